"""
Many clients of a completions server in one process, on one event loop.

    load = asyncio.run(closed_loop(server, asks, 16))

The client runs on the cores that the server needs, so it does little: it writes a body that was made before, notes when
bytes come, and reads the number of tokens at the end. A `Load` says how much processor time it took.
"""
import asyncio
import json
import re
import socket
import statistics
import time
from dataclasses import dataclass, field
from typing import NamedTuple

USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
EVENT = re.compile(rb'data: (\{.*\})')
BUFFER = 2**16  # bytes of one read
SMALL_BUFFER, SLOW_READ = 4096, 0.25  # of a slow reader: bytes of one read, and seconds between two
QUICKACK = getattr(socket, 'TCP_QUICKACK', None)
TIMEOUT = 300  # seconds that an answer may take
LIMITS = 1.0, 0.1  # seconds to the first token and a token, that goodput allows


class Ask(NamedTuple):
    """
    What a client asks for: n_new tokens after prompt, a list of token ids. leaves: the client goes away when so many
    parts of the answer have come, 0 for as soon as it has asked; None stays. slow: it reads slowly. seed: of tokens
    that are drawn; None takes the likeliest. salt: prompts are remembered for those of the same salt only.
    """
    prompt: list
    n_new: int
    leaves: int | None = None
    slow: bool = False
    seed: int | None = None
    salt: str = ''


@dataclass(slots=True)
class Answer:
    """
    What came, in seconds of `time.perf_counter`. due: when the request should have been sent, which its waiting counts
    from. first, end: of the first and the last bytes of the stream. error: '' if all tokens came.
    """
    ask: Ask
    due: float
    first: float = 0.0
    end: float = 0.0
    n_tokens: int = 0
    error: str = ''
    data: bytes = b''

    @property
    def first_token_s(self):
        return self.first - self.due

    @property
    def seconds(self):
        return self.end - self.due

    @property
    def per_token_s(self):
        """Mean seconds of the tokens after the first."""
        return (self.end - self.first) / max(1, self.n_tokens - 1)

    @property
    def token_ids(self):
        """Of the answer, if our server was asked for them."""
        chunks = (json.loads(event).get('choices', ()) for event in EVENT.findall(self.data))
        return [token for choices in chunks for choice in choices for token in choice.get('token_ids', ())]


@dataclass
class Load:
    """The answers of one load, the seconds it took, and the seconds of processor time that the client took of these."""
    answers: list = field(default_factory=list)
    seconds: float = 0.0
    client_cpu_s: float = 0.0


async def ask_one(server, body, ask, due=None):
    """The `Answer` of a `servers.Server` to one request, on a connection of its own. body: `server.body(ask)`."""
    answer = Answer(ask, due or time.perf_counter())
    try:
        await asyncio.wait_for(read_stream(server.port, body, answer), TIMEOUT)
    except (OSError, asyncio.TimeoutError) as e:
        answer.error = f'{type(e).__name__} {e}'
    return answer


async def read_stream(port, body, answer):
    """Send a request, and note what comes until the server closes the connection or the client leaves."""
    ask, parts, most = answer.ask, [], SMALL_BUFFER if answer.ask.slow else BUFFER
    head = (f'POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n'
            f'connection: close\r\ncontent-length: {len(body)}\r\n\r\n').encode()
    with socket.socket() as sock:
        if ask.slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ('127.0.0.1', port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=most)
        try:
            writer.write(head + body)
            while ask.leaves is None or len(parts) < ask.leaves:
                acknowledge_at_once(sock)
                data = await reader.read(most)
                if not data:
                    return finish(answer, b''.join(parts))
                answer.end = time.perf_counter()
                if not answer.first and b'data: ' in data:
                    answer.first = answer.end
                parts.append(data)
                if ask.slow:
                    await asyncio.sleep(SLOW_READ)
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


async def closed_loop(server, asks, n_clients):
    """
    The `Load` of n_clients that each send their next request when they have the answer to the one before. They take the
    asks in order.
    """
    load, todo = Load(), iter([(ask, server.body(ask)) for ask in asks])

    async def client():
        for ask, body in todo:
            load.answers.append(await ask_one(server, body, ask))
    return await timed(load, [client() for _ in range(n_clients)])


async def open_loop(server, asks, times):
    """The `Load` of requests that are sent at these times, in seconds from the start, whatever has been answered."""
    load, bodies = Load(), [server.body(ask) for ask in asks]
    began = time.perf_counter() + 0.05

    async def client(ask, body, due):
        await asyncio.sleep(due - time.perf_counter())
        load.answers.append(await ask_one(server, body, ask, due))
    return await timed(load, [client(ask, body, began + t) for ask, body, t in zip(asks, bodies, times)])


async def timed(load, clients):
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*clients)
    load.seconds, load.client_cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return load


def percentile(values, p):
    """The smallest value that p percent of the values do not exceed; None of no values."""
    values = sorted(values)
    return values[max(0, -(-len(values) * p // 100) - 1)] if values else None


def figures(loads):
    """
    The figures of the rounds of one way: a dict for JSON. Rates are medians of the rounds; latencies are those of the
    requests of all rounds, in milliseconds, [median, 99th percentile].

    ttft_ms: to the first token, from when a request was due. per_token_ms: the mean of its later tokens. end_to_end_ms:
    to its last token. goodput: requests a second within LIMITS. client_cpu: processor time of the client over that of
    the clock. left: requests that clients went away from; failed: those that were not answered as they should.
    """
    answers = [a for load in loads for a in load.answers]
    good = [a for a in answers if not a.error]
    failed = [a.error for a in answers if a.error not in ('', 'left')]

    def latency(of, these):
        return [None if v is None else 1e3 * v for v in (percentile([of(a) for a in these], p) for p in (50, 99))]
    return dict(
        requests=len(answers), left=len(answers) - len(good) - len(failed), failed=len(failed), error=failed[:1],
        tok_per_s=statistics.median(tok_per_s(load) for load in loads),
        ttft_ms=latency(lambda a: a.first_token_s, good),
        per_token_ms=latency(lambda a: a.per_token_s, [a for a in good if a.n_tokens > 1]),
        end_to_end_ms=latency(lambda a: a.seconds, good), goodput=statistics.median(goodput(load) for load in loads),
        requests_per_s=statistics.median(len(load.answers) / load.seconds for load in loads),
        client_cpu=statistics.median(load.client_cpu_s / load.seconds for load in loads),
        runs_tok_per_s=[tok_per_s(load) for load in loads])


def tok_per_s(load):
    """Generated tokens a second, of whole answers."""
    return sum(a.n_tokens for a in load.answers if not a.error) / load.seconds


def goodput(load):
    first, each = LIMITS
    return sum(not a.error and a.first_token_s <= first and a.per_token_s <= each for a in load.answers) / load.seconds


def ttft(load, p):
    """Percentile p of the seconds to the first token in one round; None where nothing was answered."""
    return percentile([a.first_token_s for a in load.answers if not a.error], p)


def over(mine, theirs, of=tok_per_s):
    """The median over the rounds of a figure of one `Measured` over another's. None where nothing was answered."""
    pairs = [(of(a), of(b)) for a, b in zip(mine.results, theirs.results)]
    return statistics.median(a / b for a, b in pairs) if all(a and b for a, b in pairs) else None
