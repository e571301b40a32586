"""The connection of a client: uvicorn's, with bounds on how many there are, how long they wait, and what a head has."""
import os
import re
import sys
import time
from functools import partial
from types import SimpleNamespace

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.answer import JSON
from serving.api import APIError

HEAD, BODY = 30, 120  # seconds for the head of a request, from its first byte on, and for its body
IDLE = 75             # seconds between two requests: longer than clients keep a connection, so that they close it
READER = 300          # seconds in which a client must have read some of what waits for it
MOST_HEAD = 2**16     # bytes of a head, besides those that came with its first one
MOST, FILES = 1000, 48  # connections; open files that are left for all else
PROBES = 0, .02, .1, .5, 2.5, 12, 60, 300, 900  # seconds between two bytes of BEGINNING, see `probe`
BEGINNING = b'HTTP/1.1 '  # of each answer
UPGRADE = re.compile(rb'\r\nupgrade:', re.IGNORECASE)  # to HTTP/2, as Java asks for: httptools would drop the body


def most_connections():
    """MOST, or fewer where the system allows fewer open files (ulimit -n)."""
    files = os.sysconf('SC_OPEN_MAX') if hasattr(os, 'sysconf') else -1  # Windows has no limit
    return MOST if files < 0 else max(4, min(MOST, files - FILES))


class Connection(HttpToolsProtocol):
    """
    n_head: bytes of a head that has not ended, or None behind it. timer: of `wait`. n_left: bytes that waited for the
    client when it was last looked at. There must be fewer connections than uvicorn's limit_concurrency.
    """
    told = float('-inf')  # when stderr was last told that there are too many

    def connection_made(self, transport):
        super().connection_made(transport)
        self.n_head, self.timer, self.n_left = 0, None, 0
        self.wait(HEAD)
        if self.limit_concurrency and len(self.connections) >= self.limit_concurrency:
            if time.monotonic() > Connection.told + 60:
                Connection.told = time.monotonic()
                print(f"there are {self.limit_concurrency - 1} connections, the most that there may be: others are "
                      "refused", file=sys.stderr)
            self.refuse(503, "the server has as many connections as it may have: try again later")

    def connection_lost(self, exc):
        self.wait(None)
        super().connection_lost(exc)

    def wait(self, seconds):
        """Call `late` in so many seconds, or never, and not when it was to be called before."""
        if self.timer:
            self.timer.cancel()
        self.timer = self.loop.call_later(seconds, self.late) if seconds else None

    def late(self):
        """Close, with an answer if a request is not complete. A client that reads slowly may go on."""
        n_left, self.n_left = self.n_left, self.transport.get_write_buffer_size()
        if self.n_left == n_left and (n_left or self.transport.is_closing()):
            return self.transport.abort()
        if self.n_head or self.cycle and self.cycle.more_body and not self.cycle.response_complete:
            self.refuse(408, "the request was not complete in time: send it again")
        elif not self.n_left:
            self.transport.close()
        self.wait(READER)

    def refuse(self, status, message):
        """Answer with an error of the API, unless another answer has begun, and close."""
        cycle = self.cycle
        if not self.pipeline and (not cycle or cycle.response_complete or not cycle.response_started):
            answer = JSON(APIError(status, message).json(), status, {'connection': 'close'})
            head = [BEGINNING, b'%d \r\n' % status, *(b'%s: %s\r\n' % header for header in answer.raw_headers)]
            self.transport.write(b''.join([*head, b'\r\n', answer.body]))
        if cycle:
            cycle.disconnected = True
        self.transport.close()

    def send_400_response(self, msg):
        self.refuse(400, "this is no request in HTTP/1.1, or one with TLS: write http:// where no proxy has https://")

    def data_received(self, data):
        if self.n_head is not None:
            self.n_head += len(data)
            data = UPGRADE.sub(b'\r\nignored:', data)
        super().data_received(data)
        if self.n_head and self.n_head > MOST_HEAD and not self.transport.is_closing():
            self.refuse(431, f"the head of a request may have {MOST_HEAD:,} bytes: send fewer headers")

    def on_message_begin(self):
        super().on_message_begin()
        self.n_head = 1
        self.wait(HEAD)

    def on_headers_complete(self):
        super().on_headers_complete()
        self.n_head = None
        self.wait(BODY)
        if self.scope['http_version'] == '1.0':
            self.cycle.send = partial(send_unchunked, self.cycle, self.cycle.send)

    def on_message_complete(self):
        super().on_message_complete()
        self.wait(IDLE if self.cycle.response_complete else None)

    def on_response_complete(self):
        super().on_response_complete()
        if self.cycle.response_complete and self.n_head is None:
            self.wait(IDLE)

    def pause_writing(self):
        super().pause_writing()
        self.wait(READER)

    def resume_writing(self):
        super().resume_writing()
        if self.cycle and not self.cycle.response_complete:
            self.wait(BODY if self.cycle.more_body else None)

    def eof_received(self):
        """The client sends no more, and may still read: a request that is complete gets its answer."""
        if not self.cycle or self.cycle.response_complete or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        self.probe()
        return True

    def probe(self, n=0):
        """
        Is a client that sends no more still there? If not, its system refuses what is sent, and sending more fails. So
        the beginning of the answer is sent early, byte by byte, and in a stream, comments.
        """
        cycle = self.cycle
        if self.pipeline or cycle.response_complete or self.transport.is_closing():
            return
        if not cycle.response_started:
            self.transport.write(BEGINNING[n:n + 1])
            cycle.transport = SimpleNamespace(write=partial(self.write_rest, n + 1), close=self.transport.close,
                                              is_closing=self.transport.is_closing)
        elif not self.flow.write_paused:
            self.transport.write(b'3\r\n:\n\n\r\n' if cycle.chunked_encoding else b':\n\n')
        if n + 1 < len(PROBES):
            self.loop.call_later(PROBES[n + 1], self.probe, n + 1)

    def write_rest(self, n, data):
        """Write an answer of which n bytes were sent already."""
        self.cycle.transport = self.transport
        self.transport.write(data[n:])


async def send_unchunked(cycle, send, message):
    """`send` for HTTP/1.0, in which an answer of unknown length ends with the connection."""
    if message['type'] == 'http.response.start':
        cycle.chunked_encoding = None if b'content-length' in dict(message['headers']) else False
    elif not cycle.expected_content_length:
        cycle.expected_content_length = len(message.get('body', b''))
    await send(message)
