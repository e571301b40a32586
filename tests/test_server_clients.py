"""Clients that go away or read slowly, and the end of the server. Raw sockets, because HTTP clients hide both."""
import json
import signal
import socket
import subprocess
import sys
import threading

import pytest

for package in ('starlette', 'uvicorn', 'pydantic', 'orjson', 'prometheus_client', 'httpx'):
    pytest.importorskip(package, reason="needs requirements-serve.txt")

import httpx
from conftest import ENVIRONMENT, ROOT, TIMEOUT
from serving_process import serving
from small_engine import spelled, spelling_engine
from test_api import events


def post(client, body, receive_buffer=None):
    """A raw connection that has sent this body to /v1/completions."""
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((client.base_url.host, client.base_url.port))
    data = json.dumps(body).encode()
    connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n'
                       % len(data) + data)
    return connection


def read_all(connection):
    """(status, the body) of a response, which may be chunked, until the server closes the connection."""
    data = b''
    while part := connection.recv(65536):
        data += part
    head, _, body = data.partition(b'\r\n\r\n')
    if b'chunked' in head:
        chunks, rest = [], body
        while rest:
            size, _, rest = rest.partition(b'\r\n')
            chunks.append(rest[:int(size, 16)])
            rest = rest[int(size, 16) + 2:]
        body = b''.join(chunks)
    return int(head.split()[1]), body


def test_disconnect_within_the_body():
    """A client that goes away before its body is complete asks for nothing; the server goes on."""
    engine = spelling_engine()
    with serving(engine) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
            connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt": "a')
        assert client.get('/health').status_code == 200 and not engine.stats.requests


def test_cancel_hits_only_its_request():
    engine = spelling_engine(n_allowed=0)
    with serving(engine) as client:
        with post(client, dict(prompt='a', max_tokens=9)) as stays:
            with post(client, dict(prompt='b', max_tokens=9)):
                engine.until(lambda: len(engine.live) == 2)
                engine.step()
            engine.until(lambda: len(engine.live) == 1)
            engine.allow(float('inf'))
            status, answer = read_all(stays)
    assert status == 200 and json.loads(answer)['choices'][0]['text'] == spelled('a', 9)
    assert engine.stats.finished == {'abort': 1, 'length': 1}


def test_slow_reader_stalls_nobody():
    """
    One client reads nothing while its whole answer, more than the buffers hold, is computed, and another one is served
    from begin to end. Then the slow one reads: its text is whole, in few chunks.
    """
    n = 1000
    engine = spelling_engine(block_size=2 * n, n_blocks=8 * n // 2)
    body = dict(prompt='a', n=8, max_tokens=n, stream=True, logprobs=5)
    with serving(engine) as client, post(client, body, receive_buffer=4096) as slow:
        engine.until(lambda: engine.stats.finished == {'length': 8})
        quick = client.post('/v1/completions', json=dict(prompt='d', max_tokens=50)).json()
        assert quick['choices'][0]['text'] == spelled('d', 50)
        status, answer = read_all(slow)
    chunks, texts = events(answer), [''] * 8
    for chunk in chunks[:-1]:
        (choice,) = chunk['choices']
        texts[choice['index']] += choice['text']
    assert status == 200 and chunks[-1] == b'[DONE]' and len(chunks) < n and len(answer) > 2**19
    assert texts == [spelled('a', n)] * 8


def test_drain_then_exit():
    """From the first signal on nothing new is taken; what runs is finished; then the server ends."""
    engine = spelling_engine(n_allowed=0)
    with serving(engine, drain_seconds=60) as client:
        with client.stream('POST', '/v1/completions', json=dict(prompt='a', max_tokens=5, stream=True)) as answer:
            client.process.handle_exit(signal.SIGTERM, None)
            assert client.get('/health').json()['error']['code'] == 'draining'
            refused = client.post('/v1/completions', json={'prompt': 'a'})
            assert refused.status_code == 503 and refused.headers['retry-after']
            engine.allow(5)
            chunks = events(answer.read())
        assert ''.join(chunk['choices'][0]['text'] for chunk in chunks[:-1]) == spelled('a', 5)
        client.thread.join(20)
        assert not client.thread.is_alive() and not engine.thread.is_alive() and engine.stats.finished == {'length': 1}


@pytest.mark.parametrize('stream', [True, False])
def test_a_drain_has_a_limit(stream):
    engine, answers = spelling_engine(n_allowed=0), []
    with serving(engine, drain_seconds=0) as client:
        def ask():
            answers.append(client.post('/v1/completions', json=dict(prompt='a', stream=stream)))
        thread = threading.Thread(target=ask)
        thread.start()
        engine.until(lambda: engine.live)
        engine.step()
        client.process.handle_exit(signal.SIGTERM, None)
        thread.join(20)
        client.thread.join(20)
        assert not client.thread.is_alive() and engine.stats.finished == {'abort': 1}
    if stream:
        *_, error, done = events(answers[0].content)
        assert error['error']['type'] == 'service_unavailable' and done == b'[DONE]'
    else:
        assert answers[0].status_code == 503


def test_a_model_that_cannot_be_loaded_ends_the_server():
    def load():
        raise ValueError("no checkpoint")
    with serving(None, load=load) as client:
        client.thread.join(20)
        assert not client.thread.is_alive() and isinstance(client.service.error, ValueError)


SCRIPT = """
import sys
from serving.server import Service, run
from small_engine import served_by, spelling_engine
engine = spelling_engine(n_allowed=0)
run(Service(lambda: (engine, served_by(engine))), '127.0.0.1', 0, 600)
"""


@pytest.mark.parametrize('signals, code', [(1, 0), (2, 128 + signal.SIGTERM)])
def test_a_second_signal_ends_at_once(signals, code):
    """The real signals, to a process whose only request never ends: the drain would take 10 minutes."""
    process = subprocess.Popen([sys.executable, '-c', SCRIPT], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                               env=ENVIRONMENT | {'PYTHONPATH': f'{ROOT}:{ROOT}/tests'})
    try:
        address = process.stderr.readline().split()[2]
        while httpx.get(f'{address}health').status_code != 200:  # loading
            pass
        host, port = address.removeprefix('http://').rstrip('/').split(':')
        with socket.create_connection((host, int(port))) as connection:
            if signals == 2:
                body = b'{"prompt": "a", "stream": true}'
                connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n' % len(body)
                                   + body)
                assert b'200 OK' in connection.recv(100)
            for _ in range(signals):
                process.send_signal(signal.SIGTERM)
                assert signals == 1 or process.stderr.readline().startswith('stopping') or process.wait(TIMEOUT)
            assert process.wait(TIMEOUT) == code
    finally:
        process.kill()
        process.stderr.close()
        process.wait()
