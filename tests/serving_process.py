"""The server with an engine that a test gives it, on a free port, in a thread of this process."""
import socket
import threading
from contextlib import contextmanager

import httpx
import uvicorn
from small_engine import served_by

from serving.connection import Connection
from serving.server import Process, Service, listen, make_app


@contextmanager
def serving(engine, served=None, drain_seconds=5, load=None, **settings):
    """Yields an httpx.Client whose addresses are relative to the server; `client.service` is its `Service`."""
    service = Service(load or (lambda: (engine, served or served_by(engine))), **settings)
    ready = threading.Event()
    listener = listen('127.0.0.1', 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)  # what nobody reads waits in the server, and soon
    address = f'http://127.0.0.1:{listener.getsockname()[1]}'
    process = Process(uvicorn.Config(None, log_level='warning', access_log=False, timeout_graceful_shutdown=1,
                                     http=Connection, proxy_headers=False), service, drain_seconds)
    process.config.app = make_app(service, lambda: (process.loaded(), ready.set()))
    thread = threading.Thread(target=process.run, args=([listener],))
    thread.start()
    try:
        if load is None:
            assert ready.wait(20)
        with httpx.Client(base_url=address, timeout=20) as client:
            client.service, client.process, client.thread = service, process, thread
            yield client
    finally:
        process.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
