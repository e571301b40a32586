"""
Many clients of a completions server in one process, on one event loop.

The client runs on the cores that the server needs, so it does little: it writes a body that was made before, notes when
bytes come, and reads the number of tokens at the end.
"""
import asyncio
import json
import re
import socket
import statistics
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
EVENT = re.compile(rb'data: (\{.*\})')
BUFFER = 2**16  # bytes of one read
QUICKACK = getattr(socket, 'TCP_QUICKACK', None)
TIMEOUT = 300  # seconds that an answer may take


class Ask(NamedTuple):
    """What a client asks for: n_new tokens after a prompt."""
    prompt: list  # token ids
    n_new: int
    leaves: int | None = None  # after so many parts of the answer it goes away; 0 as soon as it has asked
    seed: int | None = None    # of tokens that are drawn; None takes the likeliest
    salt: str = ''             # prompts are remembered for those of the same salt only


@dataclass(slots=True)
class Answer:
    """What came, in seconds of `time.perf_counter`."""
    ask: Ask
    began: float        # when the request was sent
    first: float = 0.0  # when the first bytes of the stream came
    end: float = 0.0    # and the last ones
    n_tokens: int = 0
    error: str = ''     # '' if all tokens came, 'left' if the client went away
    data: bytes = b''

    @property
    def token_ids(self):
        """Of the answer, if our server was asked for them."""
        chunks = (json.loads(event).get('choices', ()) for event in EVENT.findall(self.data))
        return [token for choices in chunks for choice in choices for token in choice.get('token_ids', ())]


class Load(NamedTuple):
    """The answers of one load, and the seconds it took."""
    answers: list
    seconds: float

    @property
    def tok_per_s(self):
        """Generated tokens a second, of whole answers."""
        return sum(a.n_tokens for a in self.answers if not a.error) / self.seconds


async def closed_loop(server, asks, n_clients):
    """
    The `Load` of n_clients of a `servers.Server`. When a client has its answer, it sends its next request, on a new
    connection. The clients take the asks in order.
    """
    answers, todo = [], iter([(ask, server.body(ask)) for ask in asks])

    async def client():
        for ask, body in todo:
            answer = Answer(ask, time.perf_counter())
            try:
                await asyncio.wait_for(read_stream(server.port, body, answer), TIMEOUT)
            except (OSError, asyncio.TimeoutError) as e:
                answer.error = f'{type(e).__name__} {e}'
            answers.append(answer)
    began = time.perf_counter()
    await asyncio.gather(*[client() for _ in range(n_clients)])
    return Load(answers, time.perf_counter() - began)


async def read_stream(port, body, answer):
    """Send a request, and note what comes until the server closes the connection or the client leaves."""
    leaves, parts = answer.ask.leaves, []
    head = (f'POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n'
            f'connection: close\r\ncontent-length: {len(body)}\r\n\r\n').encode()
    reader, writer = await asyncio.open_connection('127.0.0.1', port, limit=BUFFER)
    try:
        writer.write(head + body)
        while leaves is None or len(parts) < leaves:
            acknowledge_at_once(writer.get_extra_info('socket'))
            data = await reader.read(BUFFER)
            if not data:
                return finish(answer, b''.join(parts))
            answer.end = time.perf_counter()
            if not answer.first and b'data: ' in data:
                answer.first = answer.end
            parts.append(data)
        answer.error = 'left'
    finally:
        writer.transport.abort()


def acknowledge_at_once(sock):
    """
    Without this, llama-server's first token waits up to 40 ms for the client's kernel to acknowledge the headers,
    because its sockets collect small writes (Nagle's algorithm). Linux forgets it now and then.
    """
    if QUICKACK is not None:
        sock.setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)


def finish(answer, data):
    """Read the bytes of a complete answer."""
    counts = USAGE.findall(data)
    answer.n_tokens, answer.data = int(counts[-1]) if counts else 0, data
    if not data.startswith(b'HTTP/1.1 200') or not answer.first:
        answer.error = data[-200:].decode('utf-8', 'replace') or 'no answer'
    elif answer.n_tokens != answer.ask.n_new:
        answer.error = f'{answer.n_tokens} tokens instead of {answer.ask.n_new}'


def figures(loads):
    """
    The figures of the rounds of one server: a dict for JSON. tok_per_s is the median of the rounds; latencies are those
    of the requests of all rounds, in milliseconds, [median, 99th percentile]: first_ms to the first token, per_token_ms
    the mean of the later tokens of a request. failed: requests that were not answered as they should.
    """
    answers = [a for load in loads for a in load.answers]
    good, failed = [a for a in answers if not a.error], [a.error for a in answers if a.error not in ('', 'left')]

    def latency(seconds):
        return [1e3 * float(s) for s in np.percentile(seconds, (50, 99), method='inverted_cdf')] if seconds else None
    return dict(
        requests=len(answers), failed=len(failed), error=failed[:1],
        tok_per_s=statistics.median(load.tok_per_s for load in loads),
        first_ms=latency([a.first - a.began for a in good]),
        per_token_ms=latency([(a.end - a.first) / (a.n_tokens - 1) for a in good if a.n_tokens > 1]),
        runs_tok_per_s=[load.tok_per_s for load in loads])
