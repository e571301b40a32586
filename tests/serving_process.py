"""Servers on free ports: in a thread of this process, with an engine or a model, or in processes of their own."""
import socket
import threading
from contextlib import contextmanager

import httpx
import uvicorn
from conftest import start
from example_models import chat_tokenizer
from small_engine import Stepping, served_by, thread_of

from decode.cpu import CPUExecutor
from serving.connection import Connection
from serving.served import Served
from serving.server import Process, Service, listen, make_app
from tokenizer import from_state


@contextmanager
def serving(engine, served=None, drain_seconds=5, load=None, **settings):
    """Yields an httpx.Client whose addresses are relative to the server; `client.service` is its `Service`."""
    service = Service(load or (lambda: (engine, served or served_by(engine))), **settings)
    ready = threading.Event()
    listener = listen('127.0.0.1', 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)  # what nobody reads waits in the server, and soon
    address = f'http://127.0.0.1:{listener.getsockname()[1]}'
    process = Process(uvicorn.Config(make_app(service, ready.set), log_level='warning', access_log=False,
                                     timeout_graceful_shutdown=1, http=Connection, proxy_headers=False),
                      service, drain_seconds)
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


@contextmanager
def chatting(model, tokenizer, executor=None, n_pages=64):
    """`serving` for a chat model: the compiled step, unless there is another executor, and so many pages of 4."""
    tokens = tokenizer.bytes_of_tokens(model.config.vocab_size)[:model.config.vocab_size]
    thread = thread_of(model, executor or CPUExecutor(model, threads=1), tokens, tokenizer.end_tokens, n_pages, 4,
                       kind=Stepping, special_ids=tokenizer.special_ids)
    thread.start()
    most = min(model.config.max_positions, 4 * n_pages)
    with serving(thread, Served('chat', tokenizer, tokens, most)) as client:
        yield client


def chat_tokenizer_with(template):
    """`chat_tokenizer` with another chat template."""
    return from_state(chat_tokenizer().state() | dict(chat_template=template))


@contextmanager
def started(folder, script, *settings):
    """(a process that serves, the lines that it has said when it is ready, the address of its page)"""
    process, lines = start(folder, script, *settings), ['']
    try:
        while not lines[-1].startswith('ready in'):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        yield process, lines, next(line.split()[2] for line in lines if line.startswith('the page: '))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
