"""
The answer to a body, from the engine's thread to the client. Outputs wait in a `Mailbox`. A `Completion` or a
`ChatCompletion` turns them into chunks of a stream or into one object. An `Answer` sends these to the client, and
notices when the client goes away.
"""
import asyncio
import codecs
import time
from collections import deque

import orjson
from starlette.responses import Response

from chat.thoughts import Thought, ThoughtReader, opens_thoughts, thinks
from chat.tools import MOST_CALLS, Call, Reader, form_of, takes_several_calls
from serving.api import APIError, invalid
from serving.constraints import DeadEnd
from serving.request import chunk_interval

LEAST_LOGPROB = -9999.0  # JSON has no -inf
LARGE = 4096    # log probabilities; more of them are made into JSON in another thread
SILENCE = 10.0  # seconds after which a stream without news gets a comment, so that nobody closes the connection
DONE = b'data: [DONE]\n\n'
LINE_ENDS = [(character.encode(), b'\\u%04x' % ord(character)) for character in '\u2028\u2029\u0085']


def event(fields, name=''):
    """
    The bytes of one event of a stream, which may have a name. Some clients end a line at each of LINE_ENDS, so these
    are escaped.
    """
    data = orjson.dumps(fields)
    for character, escaped in LINE_ENDS:
        data = data.replace(character, escaped)
    return b'%sdata: %s\n\n' % (b'event: %s\n' % name.encode() if name else b'', data)


def name_of_token(token_bytes):
    r"""The text of a token by itself, or bytes:\xe2\x82 where its bytes are no whole characters, as in OpenAI's API."""
    try:
        return token_bytes.decode('utf-8')
    except UnicodeDecodeError:
        return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in token_bytes)


class Choice:
    """One sample: the pieces, tokens and log probabilities that `take` has not returned yet, and its state."""

    def __init__(self, index, request, body, served):
        self.index, self.prompt, self.body, self.served = index, request.prompt, body, served
        self.pieces, self.tokens, self.logprobs = [], [], []
        self.has_logprobs = body.n_logprobs is not None
        self.finish_reason, self.n_tokens, self.begun, self.ended = None, 0, False, False

    def add(self, output):
        self.pieces += self.read(output)
        self.tokens += output.token_ids
        self.logprobs += zip(output.token_ids, output.logprobs or ())
        self.n_tokens += len(output.token_ids)
        self.finish_reason = output.finish_reason

    def read(self, output):
        """What an `Output` adds to the answer, a list."""
        return [output.text] if output.text else []

    def has_news(self):
        """Is there something to send? Tokens without text count only if ids or logprobs are asked for."""
        asked = self.body.return_token_ids or self.has_logprobs
        return not self.ended and bool(self.pieces or self.finish_reason or asked and self.tokens)

    def take(self):
        """The JSON of what has come since the last time, a dict."""
        choice = {'index': self.index, **self.content(), 'logprobs': None, 'finish_reason': self.finish_reason}
        if self.has_logprobs:
            choice['logprobs'] = self.taken_logprobs()
        if self.body.return_token_ids:
            choice['token_ids'] = self.tokens
            if not self.begun:
                choice['prompt_token_ids'] = self.prompt
        self.begun, self.ended = True, self.finish_reason is not None
        self.pieces, self.tokens, self.logprobs = [], [], []
        return choice

    def chunks(self):
        """`take` for a stream, which may come in several chunks."""
        return [self.take()]


class TextChoice(Choice):
    """A sample of a completion: a text."""

    def __init__(self, index, request, body, served):
        super().__init__(index, request, body, served)
        prompt = request.prompt
        prompt_text = served.tokenizer.decode(prompt) if body.echo or self.has_logprobs else ''
        self.offset = len(prompt_text)
        self.left_out = served.tokenizer.special_ids if body.skip_special_tokens else ()
        self.n_prompt = len(prompt) if body.echo else 0  # tokens of the prompt that are still to come
        if body.echo:  # a text may lack the blank of its first token
            self.pieces = [prompt_text]
            self.offset -= len(b''.join([served.token_bytes[token] for token in prompt]).decode('utf-8', 'replace'))
        self.characters = codecs.getincrementaldecoder('utf-8')('replace')

    def content(self):
        return {'text': ''.join(self.pieces)}

    def taken_logprobs(self):
        """
        OpenAI's legacy object: for each token its text, its logprob, the likeliest tokens beside it, and the number of
        characters of the prompt and the sample that come before it. If several of the likeliest have the same text,
        each of them but the first is named by its id, as in token_id:7.
        """
        tokens, token_logprobs, top_logprobs, offsets = [], [], [], []
        for token, found in self.logprobs:
            data = self.served.token_bytes[token]
            tokens.append(name_of_token(data))
            offsets.append(max(0, self.offset))
            if self.n_prompt > 0 or token not in self.left_out:
                self.offset += len(self.characters.decode(data))
            self.n_prompt -= 1
            if found is None:  # of the first token: nothing predicts it
                token_logprobs.append(None)
                top_logprobs.append(None)
                continue
            token_logprobs.append(max(found.logprob, LEAST_LOGPROB))
            likeliest = found.top if token in dict(found.top) else [*found.top, (token, found.logprob)]
            named = {}
            for i, value in likeliest:
                name = name_of_token(self.served.token_bytes[i])
                named[f'token_id:{i}' if name in named else name] = max(value, LEAST_LOGPROB)
            top_logprobs.append(named)
        return {'tokens': tokens, 'token_logprobs': token_logprobs, 'top_logprobs': top_logprobs,
                'text_offset': offsets}


class ChatChoice(Choice):
    """A sample of a conversation: a message of the assistant. n_thought: how many of its tokens are thoughts."""

    def __init__(self, index, request, body, served):
        super().__init__(index, request, body, served)
        template = served.tokenizer.chat_template
        form = form_of(template) if body.tools else None
        several = form and body.may_call_several and takes_several_calls(template)
        self.reader = form and Reader(form, body.callable_names, MOST_CALLS if several else 1)
        self.has_called, self.n_taken = False, 0
        opened = opens_thoughts(request.prompt, served.token_bytes)
        separates = (opened or thinks(template)) and body.reasoning_format not in ('none', 'raw')
        self.thoughts = ThoughtReader(opened) if separates else None
        self.hides_thoughts = not body.include_reasoning or body.reasoning_format == 'hidden'

    @property
    def n_thought(self):
        return self.thoughts.n_tokens if self.thoughts else 0

    def has_news(self):
        """Clients of several samples expect a first chunk of each, in their order."""
        return super().has_news() or self.body.n > 1 and not self.begun

    def read(self, output):
        thought, text, last = '', output.text, bool(output.finish_reason)
        if self.thoughts:
            thought, text = self.thoughts.push(text, [self.served.token_bytes[i] for i in output.token_ids], last)
        said = self.reader.push(text, last) if self.reader else [text] * bool(text)
        self.has_called |= any(isinstance(piece, Call) for piece in said)
        return [Thought(thought)] * bool(thought and not self.hides_thoughts) + said

    def add(self, output):
        super().add(output)
        if self.finish_reason == 'stop' and self.has_called:
            self.finish_reason = 'tool_calls'

    def chunks(self):
        """
        `take` for a stream. As clients expect, a chunk has thoughts or a text or one call, and finish_reason follows
        all calls.
        """
        thoughts, texts, calls = ([p for p in self.pieces if isinstance(p, kind)] for kind in (Thought, str, Call))
        parts = [part for part in (thoughts, texts, *([call] for call in calls)) if part]
        rest, reason = [] if calls or not parts else parts.pop(), self.finish_reason
        self.finish_reason = None
        for self.pieces in parts:
            yield self.take()
        self.pieces, self.finish_reason = rest, reason
        if self.has_news():
            yield self.take()

    def content(self):
        calls = [piece for piece in self.pieces if isinstance(piece, Call)]
        thought = ''.join(piece.text for piece in self.pieces if isinstance(piece, Thought))
        text = ''.join(piece for piece in self.pieces if isinstance(piece, str))
        message = {} if self.begun else {'role': 'assistant', 'refusal': None}
        message['content'] = text or (None if self.has_called else '')
        if thought:
            message['reasoning_content'] = thought
        if calls:
            message['tool_calls'] = [{'index': i, 'id': call.id, 'type': 'function',
                                      'function': {'name': call.name, 'arguments': call.arguments}}
                                     for i, call in enumerate(calls, self.n_taken)]
            self.n_taken += len(calls)
        return {'delta' if self.body.stream else 'message': message}

    def taken_logprobs(self):
        """OpenAI's object: for each token its text, its logprob, its bytes, and the same of the likeliest tokens."""
        return {'content': [{**self.described(token, found.logprob),
                             'top_logprobs': [self.described(*likely) for likely in found.top]}
                            for token, found in self.logprobs], 'refusal': None}

    def described(self, token, logprob):
        data = self.served.token_bytes[token]
        return {'token': name_of_token(data), 'logprob': max(logprob, LEAST_LOGPROB), 'bytes': list(data)}


def error_of(output):
    """The APIError of a sample that ended with 'abort' or 'error'."""
    e = output.error
    if output.finish_reason == 'abort':
        return APIError(503, "the server is stopping, and this request was not finished: send it again later")
    if isinstance(e, DeadEnd):
        return invalid(None, str(e))
    return APIError(500, f"the engine failed: {type(e).__name__}: {e}")


class Completion:
    """The answer to a `CompletionBody` that was made into these requests. id: of the answer."""
    choice, kind, kind_of_chunk = TextChoice, 'text_completion', 'text_completion'

    def __init__(self, id, body, served, requests):
        self.id, self.body, self.requests, self.n_cached, self.error = id, body, requests, 0, None
        self.head = {'id': id, 'object': self.kind_of_chunk if body.stream else self.kind, 'created': int(time.time()),
                     'model': served.name}
        self.of_prompt = {}
        self.choices = [self.choice(number * body.n + i, request, body, served)
                        for number, request in enumerate(requests) for i in range(body.n)]

    def add(self, number, outputs):
        """Add the outputs that one delivery brought for the request of this number."""
        choices = self.choices[number * self.body.n:(number + 1) * self.body.n]
        for output in outputs:
            if output.prompt_logprobs is not None:
                for choice in choices:
                    choice.logprobs = [*zip(choice.prompt, output.prompt_logprobs), *choice.logprobs]
            self.n_cached += output.n_cached or 0
            if output.finish_reason not in ('abort', 'error'):
                choices[output.index].add(output)
            elif not self.done:
                self.error = error_of(output)

    @property
    def done(self):
        return self.error is not None or all(choice.finish_reason for choice in self.choices)

    @property
    def is_large(self):
        """Are there so many log probabilities that making them into JSON takes long? (A million of ids take 20 ms.)"""
        return sum(len(choice.logprobs) for choice in self.choices) * (1 + (self.body.n_logprobs or 0)) > LARGE

    def usage(self):
        """Tokens of the prompts, each counted once, and of the samples."""
        n_prompt, n_sampled = (sum(len(r.prompt) for r in self.requests), sum(c.n_tokens for c in self.choices))
        return {'prompt_tokens': n_prompt, 'completion_tokens': n_sampled, 'total_tokens': n_prompt + n_sampled,
                'prompt_tokens_details': {'cached_tokens': self.n_cached}}

    def object(self):
        return {**self.head, **self.of_prompt, 'choices': [choice.take() for choice in self.choices],
                'usage': self.usage()}

    def chunks(self):
        """The events of what has come since the last call, an event for each choice, and the end of the stream."""
        options = self.body.stream_options
        asked, usage = options.include_usage, {}
        if asked:
            usage = {'usage': self.usage() if options.continuous_usage_stats else None}
        events = []
        for chunk in [chunk for choice in self.choices if choice.has_news() for chunk in choice.chunks()]:
            events.append(event({**self.head, **self.of_prompt, 'choices': [chunk], **usage}))
            self.of_prompt = {}  # in the first chunk alone
        if self.error:
            events.append(event(self.error.json()))
        elif self.done and asked:
            events.append(event({**self.head, 'choices': [], 'usage': self.usage()}))
        return b''.join(events + [DONE] * self.done)


class ChatCompletion(Completion):
    """The answer to a `ChatBody`. As vLLM's, it has the prompt's tokens beside its choices, if they are asked for."""
    choice, kind, kind_of_chunk = ChatChoice, 'chat.completion', 'chat.completion.chunk'

    def __init__(self, id, body, served, requests):
        super().__init__(id, body, served, requests)
        if body.return_token_ids:
            self.of_prompt = {'prompt_token_ids': requests[0].prompt}

    def usage(self):
        n_thought = sum(choice.n_thought for choice in self.choices)
        return super().usage() | {'completion_tokens_details': {'reasoning_tokens': n_thought}}


class JSON(Response):
    media_type = 'application/json'

    def render(self, content):
        return orjson.dumps(content)


class Bell:
    """
    Sets events of the event loop from another thread. All events that are set before the loop runs `answer` share one
    `call_soon_threadsafe`, because it releases Python's lock, and the engine then has to wait for the lock again.
    """

    def __init__(self, loop):
        self.loop, self.events, self.rung = loop, deque(), False

    def ring(self, event):
        self.events.append(event)
        if not self.rung:
            self.rung = True
            self.loop.call_soon_threadsafe(self.answer)

    def answer(self):
        self.rung = False  # before the events are taken: for one that comes now the bell is rung again
        while self.events:
            self.events.popleft().set()


class Mailbox:
    """
    Outputs on their way from the engine's thread to the coroutine of one client. If the client is slow they wait here,
    so that the engine never waits; there are at most the tokens of the client's requests. listening: is the bell rung
    for any output, or only for the last one of a sample?
    """

    def __init__(self, bell, listening):
        self.bell, self.listening, self.outputs, self.news = bell, listening, deque(), asyncio.Event()

    def put(self, number, outputs):
        """Take the outputs of one call or several for the request of this number. Called in the engine's thread."""
        self.outputs.append((number, outputs))
        if self.listening or any(output.finish_reason for output in outputs):
            self.listening = False
            self.bell.ring(self.news)

    async def take(self):
        """Wait for the bell, and return all outputs that there are, a list of (number of the request, outputs)."""
        await self.news.wait()
        self.news.clear()
        taken = []
        while self.outputs:
            taken.append(self.outputs.popleft())
        return taken

    def listen(self):
        """Ring for any output from now on, until one has come."""
        self.listening = True  # before looking: an output that comes now is seen here, or rings the bell, or both
        if self.outputs:
            self.news.set()


class Answer:
    """
    The ASGI response that a `Completion` becomes. If the client goes away before its end, its requests are aborted:
    while they wait, in prefill and in decode, streamed or not.
    """

    def __init__(self, service, completion, mailbox):
        self.service, self.completion, self.mailbox = service, completion, mailbox

    async def __call__(self, scope, receive, send):
        write = self.stream if self.completion.body.stream else self.whole
        writer, gone = asyncio.ensure_future(write(scope, receive, send)), asyncio.ensure_future(disconnect(receive))
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        except asyncio.CancelledError:  # uvicorn ends, and this client has not read its answer in time
            pass
        finally:
            writer.cancel()
            gone.cancel()
            self.service.end(self.completion)

    async def add_outputs(self):
        for number, outputs in await self.mailbox.take():
            self.completion.add(number, outputs)

    async def whole(self, scope, receive, send):
        """Send the answer as one object when all of it is there."""
        while not self.completion.done:
            await self.add_outputs()
        if self.completion.error:
            raise self.completion.error
        headers = {'x-request-id': self.completion.id}
        await (await self.written(lambda: JSON(self.completion.object(), headers=headers)))(scope, receive, send)

    async def written(self, write):
        """The result of `write`, a function that writes JSON. A large answer is written in another thread."""
        if not self.completion.is_large:
            return write()
        return await asyncio.get_running_loop().run_in_executor(self.service.threads_for['answer'], write)

    async def stream(self, scope, receive, send):
        """Send the answer as it comes. `send` waits while the client reads slowly, and outputs gather meanwhile."""
        headers = [(b'content-type', b'text/event-stream; charset=utf-8'), (b'cache-control', b'no-cache'),
                   (b'x-accel-buffering', b'no'), (b'x-request-id', self.completion.id.encode())]
        await send({'type': 'http.response.start', 'status': 200, 'headers': headers})
        loop = asyncio.get_running_loop()
        sent = loop.time()
        while True:
            timer = loop.call_later(max(0, sent + SILENCE - loop.time()), self.mailbox.news.set)
            await self.add_outputs()
            timer.cancel()
            chunks, done = await self.written(self.completion.chunks), self.completion.done
            if not chunks and loop.time() - sent >= SILENCE:
                chunks = b': waiting\n\n'
            if chunks:
                await send({'type': 'http.response.body', 'body': chunks, 'more_body': not done})
                sent = loop.time()
            if done:
                return
            loop.call_later(chunk_interval(len(self.service.thread.live)), self.mailbox.listen)


async def disconnect(receive):
    """Return when the client has gone away."""
    while (await receive())['type'] != 'http.disconnect':
        pass
