"""The connection of a client: uvicorn's, with bounds on how many there are, how long they wait, and what a head has."""
import math
import os
import re
import sys
import time

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.answer import JSON
from serving.api import APIError

HEAD, BODY = 30, 120  # seconds for the head of a request and for its body
IDLE = 75             # seconds between two requests: longer than clients keep a connection, so that they close it
READER = 300          # seconds in which a client must have read some of what waits for it
MOST_HEAD = 2**16     # bytes of a head
MOST_FILES = os.sysconf('SC_OPEN_MAX') if hasattr(os, 'sysconf') else -1  # files that may be open; Windows has no limit
MOST = 1000 if MOST_FILES < 0 else max(4, min(1000, MOST_FILES - 48))  # connections; some files are left for all else


class Connection(HttpToolsProtocol):
    told = False  # does stderr say that there are too many?

    def connection_made(self, transport):
        super().connection_made(transport)
        self.n_head = 0  # bytes of the next head that have come; None within a body
        self.last = b''  # the last 9 bytes that came, because two packets may split the name of a header
        self.state, self.since = None, 0.0  # what `check` found last, and when it was new
        if len(self.connections) > MOST:
            if not Connection.told:
                print(f"there are {MOST} connections, the most that there may be: others are refused", file=sys.stderr)
            Connection.told = True
            self.refuse(503, "the server has as many connections as it may have: try again later")

    def check(self):
        """Called once a second: close the connection if its time limit has passed."""
        cycle, n_left = self.cycle, self.transport.get_write_buffer_size()
        if n_left:
            seconds = READER
        elif self.n_head is None:
            seconds = BODY
        elif cycle and not cycle.response_complete:
            seconds = math.inf  # the client waits
        else:
            seconds = HEAD if self.n_head or not cycle else IDLE
        if self.state != (state := (seconds, n_left, cycle)):
            self.state, self.since = state, time.monotonic()
        elif time.monotonic() <= self.since + seconds:
            return
        elif n_left:
            self.transport.abort()
        elif self.n_head or self.n_head is None and not cycle.response_complete:
            self.refuse(408, "the request was not complete in time: send it again")
        else:
            self.transport.close()

    def refuse(self, status, message):
        """Answer with an error of the API, unless another answer has begun, and close."""
        cycle = self.cycle
        if not self.pipeline and (not cycle or cycle.response_complete or not cycle.response_started):
            answer = JSON(APIError(status, message).json(), status, {'connection': 'close'})
            head = [b'HTTP/1.1 %d \r\n' % status, *(b'%s: %s\r\n' % header for header in answer.raw_headers)]
            self.transport.write(b''.join([*head, b'\r\n', answer.body]))
        if cycle:
            cycle.disconnected = True
        self.transport.close()

    def send_400_response(self, msg):
        self.refuse(400, "this is not a valid HTTP/1.1 request: if the address begins with https://, write http://")

    def data_received(self, data):
        if self.n_head is not None:
            self.n_head += len(data)
            # uvicorn drops the body of a request that offers HTTP/2, so the header gets another name. The new name is
            # the new name has the length of the old one: data may hold a part of the body, whose length must not change
            seen = self.last + data
            data = re.sub(rb'(?i)\r\nupgrade:', b'\r\nignored:', seen)[len(self.last):]
            self.last = seen[-9:]
        super().data_received(data)
        if (self.n_head or 0) > MOST_HEAD and not self.transport.is_closing():
            self.refuse(431, f"the head of a request may have {MOST_HEAD:,} bytes: send fewer headers")

    def on_headers_complete(self):
        super().on_headers_complete()
        self.n_head = None

    def on_message_complete(self):
        super().on_message_complete()
        self.n_head = 0
