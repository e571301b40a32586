"""The way of outputs from the engine's thread to each client, and what happens when a client goes away."""
import asyncio
from collections import deque

import orjson
from starlette.responses import Response

from serving.pace import pause


class JSON(Response):
    media_type = 'application/json'

    def render(self, content):
        return orjson.dumps(content)


class Bell:
    """
    Sets events of the event loop from another thread. All that are set before the loop comes to it cost one call: each
    call gives the interpreter's lock away, and the engine would wait for it again.
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
    Outputs on their way from the engine's thread to the coroutine of one client, which may be slow: they wait here, no
    more than a request's own tokens, and the engine never waits. listening: is the bell rung for any output, or only
    for the last one of a sample?
    """

    def __init__(self, bell, listening):
        self.bell, self.listening, self.outputs, self.news = bell, listening, deque(), asyncio.Event()

    def put(self, number, outputs):
        """Take the outputs of one step or several for the request of this number. Called in the engine's thread."""
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
            self.service.end(self.completion, self.mailbox)

    async def receive(self):
        for number, outputs in await self.mailbox.take():
            self.completion.add(number, outputs)

    async def whole(self, scope, receive, send):
        """Send the answer as one object when all of it is there."""
        while not self.completion.done:
            await self.receive()
        await JSON(self.completion.object())(scope, receive, send)

    async def stream(self, scope, receive, send):
        """Send the answer as it comes. `send` waits while the client reads slowly, and outputs gather meanwhile."""
        headers = [(b'content-type', b'text/event-stream; charset=utf-8'), (b'cache-control', b'no-cache'),
                   (b'x-accel-buffering', b'no')]
        await send({'type': 'http.response.start', 'status': 200, 'headers': headers})
        while True:
            await self.receive()
            chunks, done = self.completion.chunks(), self.completion.done
            if chunks:
                await send({'type': 'http.response.body', 'body': chunks, 'more_body': not done})
            if done:
                return
            asyncio.get_running_loop().call_later(pause(len(self.service.mailboxes)), self.mailbox.listen)


async def disconnect(receive):
    """Return when the client has gone away."""
    while (await receive())['type'] != 'http.disconnect':
        pass
