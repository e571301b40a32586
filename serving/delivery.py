"""The way of outputs from the engine's thread to each client, and what happens when a client goes away."""
import asyncio
from collections import deque

import orjson
from starlette.responses import Response

PAUSE = 0.02  # seconds between two chunks of a stream: tokens that come faster share a chunk


class JSON(Response):
    media_type = 'application/json'

    def render(self, content):
        return orjson.dumps(content)


class Mailbox:
    """
    Outputs on their way from the engine's thread to the coroutine of one client, which may be slow: they wait here, no
    more than a request's own tokens, and the engine never waits. One wake-up of the event loop serves all outputs that
    came since the last one. each_step: wake it for any output, or only for the last one of a sample?
    """

    def __init__(self, loop, each_step):
        self.loop, self.each_step, self.outputs, self.woken = loop, each_step, deque(), False
        self.news, self.end = asyncio.Event(), asyncio.Event()

    def put(self, number, outputs):
        """Called in the engine's thread: what one step gave to the request of this number."""
        self.outputs.append((number, outputs))
        ends = any(output.finish_reason for output in outputs)
        if ends or self.each_step and not self.woken:
            self.woken = True
            self.loop.call_soon_threadsafe(self.wake, ends)

    def wake(self, ends):
        self.news.set()
        if ends:
            self.end.set()

    async def take(self):
        """Wait for outputs, and return all that there are, a list of (number of the request, outputs)."""
        await self.news.wait()
        self.news.clear()
        self.end.clear()
        self.woken = False  # before the outputs are taken: one that comes now wakes the loop again
        taken = []
        while self.outputs:
            taken.append(self.outputs.popleft())
        return taken

    async def pause(self, seconds):
        """Wait so long, or until a sample ends."""
        try:
            await asyncio.wait_for(self.end.wait(), seconds)
        except asyncio.TimeoutError:  # noqa: UP041 (Python 3.10 has another TimeoutError)
            pass


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
            await self.mailbox.pause(PAUSE)


async def disconnect(receive):
    """Return when the client has gone away."""
    while (await receive())['type'] != 'http.disconnect':
        pass
