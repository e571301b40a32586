"""The server over HTTP: its addresses, refusals and answers; clients that leave or read slowly; the process's end."""
import asyncio
import inspect
import json
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from http.client import HTTPResponse

import pytest
from conftest import SERVING, needs

needs(*SERVING)

import httpx
import torch
from conftest import ROOT, TIMEOUT, sizes
from hypothesis import HealthCheck, given, settings
from prometheus_client.parser import text_string_to_metric_families
from serving_process import serving, started
from small_engine import CHARS, drawing_engine, served_by, spelled, spelling_engine
from starlette.requests import Request
from test_api import events

import serve
from serving.api import APIError
from serving.loading import load_engine
from serving.server import ENDPOINTS, Service, listen, make_app, read_key
from tokenizer import CharTokenizer

TEXT = 'the quick brown fox jumps over the lazy dog.'


@pytest.fixture
def engine():
    engine = spelling_engine()
    yield engine
    engine.stop()


@pytest.fixture(scope='module')
def drawing():
    """A client of a server with random weights, whose requests draw different tokens for different seeds."""
    engine = drawing_engine()
    with serving(engine) as client:
        yield client


def ask(client, **fields):
    response = client.post('/v1/completions', json={'prompt': TEXT, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def metrics_of(client):
    """{(name, labels): value} of /metrics, read by Prometheus's own parser."""
    families = text_string_to_metric_families(client.get('/metrics').text)
    return {(sample.name.removeprefix('nanogpt_'), *sample.labels.values()): sample.value
            for family in families for sample in family.samples}


def refused(response, status):
    """Check that the response is an error of the API, and return its error."""
    assert response.status_code == status and response.headers['content-type'] == 'application/json'
    error = response.json()['error']
    assert set(error) == {'message', 'type', 'param', 'code'}
    return error


def test_streamed_samples_are_the_unstreamed(drawing):
    """With stop strings and what may begin one. Nothing follows a finish_reason; offsets go on from chunk to chunk."""
    body = dict(n=4, max_tokens=60, seed=11, stop=['e', 'ab', '. '], return_token_ids=True, logprobs=0)
    whole = ask(drawing, **body)['choices']
    data = drawing.post('/v1/completions', json={'prompt': TEXT, 'stream': True, **body}).content
    texts, tokens, offsets, reasons = [''] * 4, [[] for _ in range(4)], [[] for _ in range(4)], [None] * 4
    *streamed, done = events(data)
    for event in streamed:
        (choice,) = event['choices']
        assert reasons[choice['index']] is None
        texts[choice['index']] += choice['text']
        tokens[choice['index']] += choice['token_ids']
        offsets[choice['index']] += choice['logprobs']['text_offset']
        reasons[choice['index']] = choice['finish_reason']
    assert done == b'[DONE]' and reasons == [choice['finish_reason'] for choice in whole]
    assert texts == [choice['text'] for choice in whole] and tokens == [choice['token_ids'] for choice in whole]
    assert offsets == [[*range(len(TEXT), len(TEXT) + len(ids))] for ids in tokens]
    assert not any(stop in text for text in texts for stop in body['stop'])
    assert 'stop' in {choice['finish_reason'] for choice in whole} and len({*texts}) == 4


@torch.no_grad()
def logprobs_of(client, text):
    """The model's own log probability of each token of a text, from the second on."""
    chars, model = client.service.served.tokenizer.chars, client.service.thread.engine.model
    tokens = torch.tensor([[*map(chars.index, text)]])
    logits = model(tokens, targets=tokens)[0][0]
    return torch.log_softmax(logits, -1)[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()


def test_logprobs_and_greedy_tokens_are_the_models(drawing):
    for echo in (False, True, True):  # the scores of a prompt whose blocks are remembered, too
        choice = ask(drawing, logprobs=0, max_tokens=20, seed=1, temperature=.7, echo=echo)['choices'][0]
        found = choice['logprobs']['token_logprobs']
        expected = [None, *logprobs_of(drawing, choice['text'] if echo else TEXT + choice['text'])][-len(found):]
        assert len(found) == 20 + len(TEXT) * echo and found[echo:] == pytest.approx(expected[echo:], abs=1e-5)
        assert not echo or found[0] is None
    one = ask(drawing, prompt=TEXT[0], echo=True, logprobs=0, max_tokens=0)['choices'][0]  # nothing is computed
    assert (one['text'], one['logprobs']['tokens'], one['logprobs']['token_logprobs']) == (TEXT[0], [TEXT[0]], [None])
    choice = ask(drawing, max_tokens=30, temperature=0, return_token_ids=True)['choices'][0]
    model = drawing.service.thread.engine.model
    tokens = model.generate(torch.tensor([choice['prompt_token_ids']]), 30, temperature=0)[0].tolist()
    assert choice['token_ids'] == tokens[len(TEXT):]


def test_the_key_guards_all_that_tells_of_requests(engine):
    with serving(engine, api_key='secret') as client:
        for method, path in (('POST', '/v1/completions'), ('GET', '/v1/models'), ('GET', '/cache'),
                             ('GET', '/v1/models/toy'), ('GET', '/tokenizer_info'), ('POST', '/tokenize'),
                             ('POST', '/detokenize')):
            for headers in ({}, {'authorization': 'Bearer wrong'}, {'authorization': 'secret'},
                            {'authorization': b'Bearer \xe9'}, {'authorization': 'Bearer'}):
                error = refused(client.request(method, path, headers=headers), 401)
                assert error['type'] == 'authentication_error' and 'secret' not in str(error)
                is_there = headers.get('authorization', '') in ('Bearer wrong', b'Bearer \xe9')
                assert ('needs its API key' in error['message']) == (not is_there)
            assert client.request(method, path, headers={'authorization': 'Bearer secret'}).status_code != 401
        assert [client.get(path).status_code for path in ('/', '/health', '/metrics', '/openapi.json')] == [200] * 4


def test_keys_of_any_letters(monkeypatch, tmp_path):
    """As bytes of UTF-8, which curl sends, and of Latin-1, which requests sends; `bearer` in any case."""
    euro, plain = Service(None, 'schlüssel€'), Service(None, 'schlüssel')
    for key, service in (('schlüssel€'.encode(), euro), ('schlüssel'.encode(), plain),
                         ('schlüssel'.encode('latin-1'), plain)):
        for scheme in (b'bearer ', b'BEARER  '):
            service.check_key(Request({'type': 'http', 'headers': [(b'authorization', scheme + key)]}))
            with pytest.raises(APIError, match='came is wrong'):
                service.check_key(Request({'type': 'http', 'headers': [(b'authorization', scheme + key[:-1])]}))
    (tmp_path / 'key').write_text('€1\n')
    assert read_key('FILE:' + str(tmp_path / 'key')) == '€1' and read_key('') == '' == read_key()
    monkeypatch.setenv('API_KEY', 'of the environment')
    with pytest.raises(ValueError, match='without blanks') as caught:
        read_key()
    assert 'of the' not in str(caught.value) and read_key('given') == 'given'


def test_names_and_pages_of_others_are_refused():
    """Without a key everywhere, which DNS rebinding would reach; /cache in any case."""
    foreign = [{'host': 'evil.example'}, {'host': 'evil.example:8000'}, {'host': 'localhost.evil.example'},
               {'host': '['}, {'origin': 'http://evil.example'}, {'origin': 'null'}, {'host': '127.0.0.1.evil'},
               {'origin': 'http://203.0.113.5'}, {'origin': 'http://llm.lan:9'}]
    own = [{}, {'host': 'localhost:1'}, {'host': '[::1]:80'}, {'host': '10.1.2.3'}, {'host': 'LLM.lan:80'},
           {'origin': 'http://127.0.0.1:3000'}, {'origin': 'https://app.example'}, {'origin': 'http://localhost'},
           {'host': '10.1.2.3:80', 'origin': 'http://10.1.2.3:80'}]
    names = dict(cors_origin='https://app.example, https://b.example', allowed_hosts='llm.lan')
    for key, paths in (('', ('/v1/models', '/cache', '/', '/metrics')), ('secret', ('/cache',))):
        with serving(spelling_engine(), api_key=key, **names) as client:
            for path in paths:
                client.headers['authorization'] = f'Bearer {key or "any"}'
                for headers in foreign:
                    error = refused(client.get(path, headers=headers), 403)
                    assert '--cors_origin' in error['message'] or '--allowed_hosts' in error['message']
                assert {client.get(path, headers=headers).status_code for headers in own} == {200}
            assert client.get('/v1/models', headers=foreign[0]).status_code == (200 if key else 403)
            assert refused(client.get('/nowhere', headers=foreign[3]), 404)
    engine = spelling_engine()
    for wrong in 'localhost:3000', 'http://a/b', 'http://a, b':
        with pytest.raises(ValueError, match='must be origins such as http://localhost:3000'):
            Service(None, cors_origin=wrong)
    with serving(engine, cors_origin='*', allowed_hosts='*') as client:
        client.post('/v1/completions', json={'prompt': 'abcdefgh'})
        engine.until(lambda: 'abcd' in client.get('/cache').text)
        for headers in foreign:  # all may come, and pages of others do not read what was asked here
            response = client.get('/cache', headers=headers)
            assert response.status_code == 200 and ('abcd' in response.text) == ('host' in headers)


def test_prompts_are_shown_to_the_machine_itself_or_behind_the_key(drawing):
    ask(drawing, seed=1)

    def texts(client, **headers):
        return ''.join(block['text'] for block in client.get('/cache', headers=headers).json()['blocks'])
    drawing.service.thread.until(lambda: TEXT[:4] in texts(drawing))
    for header in ('x-forwarded-for', 'forwarded', 'via', 'x-real-ip'):
        assert not texts(drawing, **{header: '127.0.0.1'})
    away = httpx.ASGITransport(app=make_app(drawing.service), client=('192.0.2.1', 1))

    async def cache():
        async with httpx.AsyncClient(transport=away, base_url='http://192.0.2.2') as client:
            return (await client.get('/cache')).json()
    state = asyncio.run(cache())
    assert len(state['blocks']) == 96 and not any(block['text'] for block in state['blocks'])
    engine = spelling_engine()
    with serving(engine, api_key='secret') as client:
        bearer = {'authorization': 'Bearer secret'}
        client.post('/v1/completions', json={'prompt': 'abcdefgh'}, headers=bearer)
        engine.until(lambda: 'abcd' in texts(client, **bearer, **{'x-forwarded-for': '1.2.3.4'}))


def test_metrics(drawing):
    """An observation is counted once, however often the metrics are read."""
    engine = drawing.service.thread
    before = metrics_of(drawing)
    ask(drawing, n=2, max_tokens=9)
    engine.until(lambda: not engine.live)
    after = [metrics_of(drawing) for _ in range(2)][1]
    assert drawing.get('/metrics').headers['content-type'].startswith('text/plain; version=0.0.4')
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['requests_total',] == 1 and grown['prompt_tokens_total',] == len(TEXT)
    assert grown['generated_tokens_total',] == 18 and grown['finished_total', 'length'] == 2
    assert grown['time_to_first_token_seconds_count',] == 1 and grown['time_per_token_seconds_count',] == 2
    assert grown['time_to_first_token_seconds_bucket', '+Inf'] == 1
    assert after['blocks_total',] == 96 and after['running',] == after['blocks_used',] == 0 < after['blocks_cached',]


def test_what_clients_ask_besides(engine):
    """The addresses of vLLM; a model whose name has a slash; what stands elsewhere, or nowhere."""
    served = replace(served_by(engine, name='someone/toy'), aliases=('someone/toy@main',))
    with serving(engine, served) as client:
        listed, = client.get('/v1/models').json()['data']
        assert listed['sampling_defaults'] == {} and client.get('/v1/models/someone/toy').json() == listed
        assert client.get('/v1/models/someone%2Ftoy').json() == listed
        assert client.post('/v1/completions', json=dict(model='someone/toy@main', prompt='a')).status_code == 200
        for path in ('/v1/models/toy', '/v1/models/'):
            assert refused(client.get(path), 404)['code'] == 'model_not_found'
        assert client.get('/tokenizer_info').json()['tokenizer_class'] == 'PreTrainedTokenizerFast'
        chat = client.post('/v1/chat/completions', json={'messages': [{'role': 'user', 'content': 'ab'}]})
        assert 'no chat template' in refused(chat, 404)['message']
        for path in ('/v1/embeddings', '/chat/completions'):
            assert 'openapi.json lists' in refused(client.post(path, json={}), 404)['message']
        assert client.post('/tokenize', json={'prompt': 'ab€'}).json() == {
            'tokens': [0, 1, 28], 'count': 3, 'max_model_len': 64, 'token_strs': None}
        assert client.post('/detokenize', json={'tokens': [0, 1, 28]}).json() == {'prompt': 'ab€'}
        assert refused(client.post('/tokenize', json={'prompt': 'Q'}), 400)['param'] == 'prompt'
        assert refused(client.post('/detokenize', json={'tokens': [31]}), 400)['param'] == 'tokens'
        for path in ('/%ff', '/v1/completions/', '//', '/cache/../cache', '/v1/completions?x=1'):
            assert client.get(path).status_code in (200, 404, 405)
        for path in ('/health/', '/v1/models/someone/toy/'):  # no redirect to a Host that the client has named
            assert refused(client.get(path, headers={'host': 'localhost:9'}), 404)
        assert '/openapi.json' in refused(client.get('/v2'), 404)['message']
        assert refused(client.get('/v1/completions'), 405) and refused(client.post('/cache'), 405)
        assert client.head('/health').status_code == 200


def test_a_body_that_is_too_large_is_413(engine, monkeypatch):
    monkeypatch.setattr('serving.server.MAX_BODY', 100)
    with serving(engine) as client:
        at_the_limit = b'{"prompt": "%s"}' % (b'Q' * 86)
        assert len(at_the_limit) == 100 and refused(client.post('/v1/completions', content=at_the_limit), 400)
        assert refused(client.post('/v1/completions', content=at_the_limit + b' '), 413)
        parts = iter([at_the_limit, b' ' * 10])  # without a content-length
        assert refused(client.post('/v1/completions', content=parts), 413)
        for encoding in ('gzip', 'br', 'GZIP, identity'):
            response = client.post('/tokenize', content=b'{}', headers={'content-encoding': encoding})
            assert 'Content-Encoding' in refused(response, 415)['message']
        assert refused(client.post('/tokenize', content=b'{}', headers={'content-encoding': 'identity'}), 400)
        assert client.get('/health').status_code == 200


def test_a_full_queue_is_429_and_takes_none_of_a_list(engine):
    engine.allow(0)
    with serving(engine) as client:  # 4 samples may wait
        with post(client, dict(prompt='a', n=2, max_tokens=8)) as waits:
            engine.until(lambda: engine.live)
            response = client.post('/v1/completions', json={'prompt': ['a'] * 3})
            error = refused(response, 429)
            assert error['code'] == 'queue_full' and int(response.headers['retry-after']) > 0
            assert '2 samples are waiting, this request has 3' in error['message'] and len(engine.live) == 1
            assert refused(client.post('/v1/completions', json=dict(prompt='a', n=3)), 429)
            assert engine.engine.n_steps == 0 and not engine.stats.finished
            engine.step(3)
            with engine.steps:
                scheduler = engine.engine.scheduler
                scheduler.preempt(scheduler.running[-1])  # what has begun does not wait in the queue
            assert client.post('/v1/completions', json=dict(prompt=['a'] * 2, n=2, max_tokens=0)).status_code == 200
            engine.allow(float('inf'))
            assert read_all(waits)[0] == 200
            for body in (dict(prompt=['a'] * 5), dict(prompt='a', n=5), dict(prompt=['a'] * 3, n=2)):
                error = refused(client.post('/v1/completions', json=body), 400)  # it could never fit
                assert error['param'] == 'n' and 'at most 4' in error['message']


def test_cors_is_off_unless_asked(engine):
    origin = {'origin': 'http://other', 'access-control-request-method': 'POST'}
    with serving(engine) as client:
        assert client.options('/v1/completions', headers=origin).status_code == 405
        assert 'access-control-allow-origin' not in client.get('/health', headers=origin).headers
    with serving(spelling_engine(), cors_origin='http://one, http://other/') as client:
        asked = 'authorization,content-type,x-stainless-os,x-stainless-lang,openai-organization'
        for path in ('/v1/completions', '/v1/chat/completions', '/v1/responses'):
            preflight = client.options(path, headers=origin | {'access-control-request-headers': asked})
            assert preflight.status_code == 200 and preflight.headers['access-control-allow-headers'] == asked
            assert preflight.headers['access-control-allow-origin'] == 'http://other'
            assert 'POST' in preflight.headers['access-control-allow-methods']
            assert client.post(path, headers=origin).headers['access-control-allow-origin'] == 'http://other'
        client.service.thread.state = lambda: 1 / 0
        error = refused(client.get('/cache'), 500)  # a bug
        assert 'ZeroDivisionError' in error['message'] and 'division' not in error['message']
        for path, status in (('/health', 200), ('/nowhere', 404), ('/cache', 500)):  # errors too
            response = client.get(path, headers=origin)
            assert response.status_code == status and response.headers['access-control-allow-origin'] == 'http://other'
            assert {*response.headers['access-control-expose-headers'].split(', ')} == {'retry-after', 'x-request-id'}
        private = client.options('/v1/completions', headers=origin | {'access-control-request-private-network': 'true'})
        assert private.headers['access-control-allow-private-network'] == 'true' and private.status_code == 200
        stranger = origin | {'origin': 'http://stranger'}
        assert client.options('/v1/completions', headers=stranger).status_code == 400
        assert 'access-control-allow-origin' not in client.get('/health', headers=stranger).headers


def test_health_while_loading_and_while_busy():
    """A step that takes long holds up its own requests only."""
    load, engine = threading.Event(), spelling_engine(n_allowed=0)

    def slow():
        load.wait()
        return engine, served_by(engine)
    with serving(engine, load=slow) as client:
        for method, path in (('GET', '/health'), ('GET', '/v1/models'), ('POST', '/v1/completions'), ('GET', '/cache')):
            response = client.request(method, path)
            assert refused(response, 503)['code'] == 'loading' and response.headers['retry-after']
        loads = re.findall(r'(?:src|href)="([^"]+)"', client.get('/').text)[1:]  # after the icon, which is in the page
        kinds = dict(html='text/html', css='text/css', js='text/javascript')
        assert [path for path in loads if path.startswith('vendor/')] == loads[1:3] and len(loads) == 4
        for path in ('', *loads):  # they ask nobody else, and nothing that an answer brings can run
            file, vendored = client.get('/' + path), path.startswith('vendor/')
            assert file.headers['content-type'].startswith(kinds[(path or '.html').rpartition('.')[2]] + ';')
            assert "default-src 'none'" in str(file.headers) and 'unsafe' not in str(file.headers)
            assert ('immutable' in file.headers['cache-control']) == vendored
            assert vendored or not re.search(r'https?:|@import|url\(|<style| style=| on\w+=', file.text)
        assert client.get('/openapi.json').status_code == 200
        load.set()
        while client.get('/health').status_code == 503:
            pass
        assert client.get('/v1/models').json()['data'][0]['id'] == 'toy'
        with client.stream('POST', '/v1/completions', json=dict(prompt='a', stream=True)) as answer:
            assert client.get('/health').json() == {'status': 'ok'} and client.get('/metrics').status_code == 200
            engine.allow(float('inf'))
            assert events(answer.read())[-1] == b'[DONE]'


@pytest.mark.parametrize('stream', [True, False])
@pytest.mark.parametrize('n_steps', [0, 1, 8])
def test_disconnect_frees_the_blocks(drawing, n_steps, stream):
    """While it waits for its first step, after its prompt, and in decode. Another request goes on."""
    engine = drawing.service.thread
    engine.allow(0)
    aborted = engine.stats.finished['abort']
    with post(drawing, dict(prompt='abc', max_tokens=50, seed=5)) as stays:
        with post(drawing, dict(prompt=[TEXT, 'b'], n=2, max_tokens=100, stream=stream)):
            engine.until(lambda: len(engine.live) == 3)
            engine.step(n_steps)
        engine.until(lambda: len(engine.live) == 1)
        assert engine.stats.finished['abort'] == aborted + 4
        engine.allow(float('inf'))
        status, answer = read_all(stays)
    assert status == 200 and b'"finish_reason":"length"' in answer
    engine.until(lambda: not engine.live and engine.engine.pool.n_free == 96)


# connections and signals: raw sockets, because HTTP clients hide when they go away and how they read

def heads(body, version='1.1'):
    """The bytes of a request for completions."""
    data = json.dumps(body).encode()
    head = f'POST /v1/completions HTTP/{version}\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n'
    return head.encode() + data


def connected(client, data=b'', receive_buffer=None):
    """A raw connection that has sent these bytes."""
    connection = socket.socket()
    connection.settimeout(20)
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((client.base_url.host, client.base_url.port))
    connection.sendall(data)
    return connection


def post(client, body, receive_buffer=None):
    """A raw connection that has sent this body to /v1/completions, and is closed after the answer."""
    return connected(client, heads(body), receive_buffer)


def read_all(connection, pause=0):
    """(status, the body) of a response, until it ends. pause: seconds after each part."""
    response = HTTPResponse(connection)
    response.begin()
    data = b''
    while part := response.read1():
        data += part
        time.sleep(pause)
    return response.status, data


def test_connections_that_wait_are_closed(engine, monkeypatch):
    """Idle ones, half of a head, half of a body: none of them keeps its place. A stream is not cut, however slow."""
    for name in ('HEAD', 'BODY', 'IDLE'):
        monkeypatch.setattr(f'serving.connection.{name}', .3)
    engine.allow(0)
    with serving(engine) as client:
        slow = post(client, dict(prompt='a', max_tokens=2, stream=True))
        waiting = {'nothing': b'', 'head': b'GET / HTTP/1.1\r\nHost: loc', 'body': heads(dict(prompt='a'))[:-3],
                   'next': b'GET /health HTTP/1.1\r\n\r\n', 'next head': b'GET /health HTTP/1.1\r\n\r\nGET',
                   'refused': b'POST /nowhere HTTP/1.1\r\nContent-Length: 9\r\n\r\n{'}
        waiting = {name: connected(client, data) for name, data in waiting.items()}
        answers = {name: read_all(connection)[0] if name != 'nothing' else connection.recv(1)
                   for name, connection in waiting.items()}
        assert answers == {'nothing': b'', 'head': 408, 'body': 408, 'next': 200, 'next head': 200, 'refused': 404}
        engine.allow(float('inf'))
        assert events(read_all(slow)[1])[-1] == b'[DONE]'
        slow.close()
        for connection in waiting.values():
            while connection.recv(999):  # what comes after an answer, up to the end
                pass
            connection.close()


def test_a_reader_that_reads_nothing_is_cut_and_a_slow_one_stalls_nobody(monkeypatch):
    """Their answers are more than the buffers hold. The slow one's text is whole, in few chunks."""
    n, engine = 500, spelling_engine(block_size=600, n_pages=1200, max_queue=8)
    body = dict(prompt='a', n=4, max_tokens=n, stream=True, logprobs=20)
    with serving(engine) as client, post(client, body, 4096) as never, post(client, body, 4096) as slow:
        engine.until(lambda: engine.stats.finished == {'length': 8})
        quick = client.post('/v1/completions', json=dict(prompt='d', max_tokens=50)).json()
        assert quick['choices'][0]['text'] == spelled('d', 50)
        monkeypatch.setattr('serving.connection.READER', 1)
        status, answer = read_all(slow, .01)
        engine.until(lambda: not client.process.server_state.tasks)
        data = b''
        with suppress(OSError):
            while part := never.recv(2**20):
                data += part
        assert b'[DONE]' not in data, len(data)
    *chunks, done = events(answer)
    texts = [''.join(chunk['choices'][0]['text'] for chunk in chunks if chunk['choices'][0]['index'] == i)
             for i in range(4)]
    assert status == 200 and done == b'[DONE]' and len(chunks) < 2 * n and len(answer) > 2**18
    assert texts == [spelled('a', n)] * 4


def test_connections_have_a_limit(script):
    """That of open files is not reached: those after it are told so, and stderr has one line and no traceback."""
    process, client = script(10**9, 64)
    connections = [connected(client) for _ in range(150)]
    answers = []
    for connection in connections:
        connection.settimeout(.05 if len(answers) < 30 else .01)
        try:
            answers.append(connection.recv(1000))
        except TimeoutError:
            answers.append(None)
        connection.close()
    assert 8 < answers.count(None) < 30 and sum(b'503' in (answer or b'') for answer in answers) > 100
    assert client.post('/v1/completions', json=dict(prompt='k', max_tokens=2)).status_code == 200
    process.send_signal(signal.SIGTERM)
    said = [line for line in process.stderr if not line.startswith('stopping')]
    assert len(said) == 1 and 'the most that there may be' in said[0] and process.wait(TIMEOUT) == 0


def test_heads_have_a_limit(engine):
    """Before the key is looked at. A client that offers another protocol, as curl --http2, gets this one."""
    with serving(engine, api_key='secret') as client:
        with connected(client, b'GET / HTTP/1.1\r\nX: ') as connection, pytest.raises(OSError):
            for _ in range(200):  # 20 MB
                connection.sendall(b'a' * 100_000)
        for data in (b'\x16\x03\x01\x02\r\n\r\n', b'GET\r\n\r\n', b'GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n'):
            with connected(client, data) as connection:
                status, answer = read_all(connection)
            assert status == 400 and 'HTTP/1.1' in json.loads(answer)['error']['message']
        connected(client, heads(dict(prompt='a'))[:-3]).close()  # it asks for nothing
        head = (b'HTTP/1.1\r\nAuthorization: Bearer secret\r\nConnection: close, Upgrade, HTTP2-Settings\r\n'
                b'Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk')
        whole = heads(dict(prompt='a', max_tokens=3)).replace(b'HTTP/1.1', head)
        at = whole.index(b'\r\nUpgrade:')
        # two packets may split the header at any place, except before its colon
        cuts = {*range(at, at + 12)} - {at + len(b'\r\nUpgrade')}
        for cut in cuts:
            with connected(client, whole[:cut]) as connection:
                time.sleep(0.02)
                connection.sendall(whole[cut:])
                status, answer = read_all(connection)
            assert status == 200 and json.loads(answer)['choices'][0]['text'] == spelled('a', 3)
        assert client.get('/health').status_code == 200 and engine.stats.requests == len(cuts)


def test_a_body_keeps_its_length_and_is_no_request(engine):
    """Whatever stands in it, and wherever packets end: an Upgrade header is given another name, in heads only."""
    body = b'\r\nupgrade:' * 9 + b'GET /metrics HTTP/1.1\r\n\r\n'.ljust(100)
    head = (b'POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n'
            b'Content-Length: %d\r\n\r\n') % len(body)
    get = b'GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n'
    with serving(engine) as client:
        for before, n_answers in (b'', 1), (b'\r\n\r\n', 1), (get, 2):
            for cut in (0, 1, 2, 3):  # of the end of the head
                first, whole = len(before + head) - cut, before + head + body
                with connected(client, whole[:first]) as connection:
                    time.sleep(0.02)
                    connection.sendall(whole[first:])
                    answers = b''.join(iter(lambda connection=connection: connection.recv(2**16), b''))
                assert answers.count(b'HTTP/1.1 ') == n_answers and answers.count(b'HTTP/1.1 400') == 1


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6, or not both at once")
def test_all_addresses_are_those_of_ipv4_too():
    with listen('::', 0) as listener:
        for host in '127.0.0.1', '::1':
            socket.create_connection((host, listener.getsockname()[1]), 5).close()


def test_templates_that_take_long_delay_no_others(monkeypatch):
    """They have a thread of their own; a server that ends does not wait for it."""
    monkeypatch.setattr('serving.server.LONG_TEXT', 1)
    chat, go_on = dict(messages=[dict(role='user', content='a')]), threading.Event()

    class Chat(CharTokenizer):
        chat_template = 'slow'

        def conversation(self, messages, **variables):
            go_on.wait(20)
            return [0]
    engine = spelling_engine()
    with serving(engine, served_by(engine, tokenizer=Chat(CHARS))) as client, ThreadPoolExecutor(2) as pool:
        chats = [pool.submit(client.post, '/v1/chat/completions', json=chat) for _ in range(2)]
        engine.until(lambda: len(client.service.preparing) == 2)
        assert client.post('/tokenize', json=dict(prompt='ab')).json()['tokens'] == [0, 1]
        assert client.post('/v1/completions', json=dict(prompt='ab', max_tokens=2)).status_code == 200
        client.process.handle_exit(signal.SIGTERM, None)
        assert {refused(each.result(), 503)['code'] for each in chats} == {'draining'}
        client.thread.join(20)
        assert not client.thread.is_alive()
        go_on.set()


def test_a_form_that_compiles_slowly_holds_up_no_stream(monkeypatch):
    engine, began, go_on, went_on = spelling_engine(), threading.Event(), threading.Event(), []

    def compiled(kind, text, vocabulary):
        began.set()
        went_on.append(go_on.wait(10))
        raise ValueError("of a test")
    monkeypatch.setattr('serving.served.compiled', compiled)
    monkeypatch.setattr('serving.served.Served.vocabulary', None)
    with serving(engine) as client, ThreadPoolExecutor(1) as pool:
        engine.allow(1)
        with client.stream('POST', '/v1/completions', json=dict(prompt='a', max_tokens=9, stream=True)) as stream:
            lines = stream.iter_lines()
            assert '"b"' in next(lines)
            body = dict(prompt='a', structured_outputs=dict(regex='b'))
            slow = pool.submit(client.post, '/v1/completions', json=body)
            assert began.wait(10)
            engine.allow(float('inf'))
            assert 'data: [DONE]' in lines
            go_on.set()
        assert 'of a test' in refused(slow.result(), 400)['message'] and went_on == [True]


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('form, said', [
    (dict(regex='b\u7121'), 'no token'),
    (dict(grammar='start: ' + '|'.join(f'"b{i}"' for i in range(3000))), 'simpler')],
    ids=['vocabulary', 'size'])
def test_a_form_that_cannot_be_written_is_the_requests_error(form, said, stream):
    pytest.importorskip('llguidance', reason="not installed: pip install llguidance")
    with serving(spelling_engine()) as client:
        body = dict(prompt='a', max_tokens=9, stream=stream, structured_outputs=form)
        response = client.post('/v1/completions', json=body)
        last = [line for line in response.text.splitlines() if 'error' in line][-1].removeprefix('data: ')
        error = json.loads(last)['error'] if stream else refused(response, 400)
        assert 'cannot go on in its form' in error['message'] and said in error['message']
        assert error['type'] == 'invalid_request_error'


@pytest.mark.parametrize('bound, value', [('PATIENCE', .05), ('MOST_WAITING', 1)])
def test_few_wait_for_a_thread_and_nobody_for_long(monkeypatch, bound, value):
    monkeypatch.setattr(f'serving.server.{bound}', value)

    async def ask_thrice():
        service = Service(None)
        return await asyncio.gather(*[service.in_thread('template', lambda: time.sleep(.2)) for _ in range(3)],
                                    return_exceptions=True)
    first, *others = asyncio.run(ask_thrice())
    assert first is None and [(e.status, e.code) for e in others] == [(429, 'queue_full')] * 2


@pytest.mark.parametrize('is_in_a_call', [False, True])
@pytest.mark.parametrize('stream', [True, False])
def test_a_drain_has_a_limit(stream, is_in_a_call):
    """Also where a call of the engine takes longer."""
    engine = spelling_engine(n_allowed=0)
    with serving(engine, drain_seconds=0) as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, '/v1/completions', json=dict(prompt='a', stream=stream))
        engine.until(lambda: engine.live)
        engine.step()
        with engine.steps if is_in_a_call else nullcontext():
            client.process.handle_exit(signal.SIGTERM, None)
            answer = asked.result(20)
        client.thread.join(20)
        assert not client.thread.is_alive() and engine.stats.finished == {'abort': 1}
    if stream:
        *_, error, done = events(answer.content)
        assert error['error']['type'] == 'service_unavailable' and done == b'[DONE]'
    else:
        assert answer.status_code == 503


def test_an_engine_that_has_ended_ends_the_server(engine):
    with serving(engine) as client:
        engine.dead = True
        with pytest.raises(APIError, match='the engine has ended'):  # while addresses are still answered
            client.service.check_loaded()
        client.thread.join(20)
        assert not client.thread.is_alive()


SCRIPT = f"""
import sys, time
if len(sys.argv) > 2:
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
sys.path[:0] = {ROOT!r}, {ROOT + '/tests'!r}
from configurator import ignore_write_errors
from serving.server import Service, run
from small_engine import CHARS, served_by, spelling_engine
def fail(texts):
    for text in texts:
        if text == [CHARS.index('z')]:
            raise FloatingPointError("of one step")
        if text == [CHARS.index('q')]:
            sys.exit()
        time.sleep(.1 * (text[0] < 5))
engine = spelling_engine(n_allowed=int(sys.argv[1]))
engine.engine.executor.fails = fail
ignore_write_errors(sys.stderr)  # as serve.py does
run(Service(lambda: (engine, served_by(engine))), '127.0.0.1', 0, 600)
"""


@pytest.fixture
def script(tmp_path):
    """A function that starts SCRIPT, for so many steps and open files. It returns (the process, a client of it)."""
    (tmp_path / 'server.py').write_text(SCRIPT)
    with ExitStack() as stack:
        def ready(n_steps, *n_files):
            process, _, address = stack.enter_context(started(tmp_path, 'server.py', n_steps, *n_files))
            return process, stack.enter_context(httpx.Client(base_url=address, timeout=60))
        yield ready


def test_a_closed_terminal_loses_no_request(script):
    """`serve.py 2>&1 | tee` and Ctrl-C: stderr has no reader. What runs goes on, and nothing new is taken."""
    process, client = script(10**9)
    process.stderr.close()
    assert refused(client.post('/v1/completions', json=dict(prompt='z')), 500)['type'] == 'server_error'
    assert client.post('/v1/completions', json=dict(prompt='k', max_tokens=2)).status_code == 200
    assert client.get('/health').status_code == 200
    with client.stream('POST', '/v1/completions', json=dict(prompt='a', max_tokens=9, stream=True)) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith('data: ')
        process.send_signal(signal.SIGINT)
        while (health := client.get('/health')).status_code == 200:
            pass
        assert refused(health, 503)['code'] == 'draining'
        assert refused(client.post('/v1/completions', json={'prompt': 'a'}), 503)['code'] == 'draining'
        lines = [*lines]
        assert 'data: [DONE]' in lines and '"finish_reason":"length"' in lines[-4]
    assert process.wait(TIMEOUT) == 0


def test_an_engine_that_ends_ends_the_process(script):
    process, client = script(10**9)
    assert client.post('/v1/completions', json=dict(prompt='q')).status_code == 503
    assert process.wait(TIMEOUT) == 1 and 'the engine ended' in process.stderr.read().splitlines()[-1]


def test_what_is_not_complete_ends_with_the_server(script):
    """Bodies that have not come are told so at once; no traceback."""
    process, client = script(0)
    half, idle = connected(client, heads(dict(prompt='a'))[:-3]), connected(client, b'POST / HTT')
    assert client.get('/health').status_code == 200
    process.send_signal(signal.SIGTERM)
    assert read_all(half)[0] == 503 and idle.recv(9) == b'' and process.wait(TIMEOUT) == 0
    assert [line for line in process.stderr if not line.startswith('stopping')] == []


def test_a_second_signal_ends_at_once(script):
    """The real signals, to a process whose only request never ends: the drain would take 10 minutes."""
    process, client = script(0)
    with connected(client, heads(dict(prompt='a', stream=True))) as connection:
        assert b'200 OK' in connection.recv(100)
        process.send_signal(signal.SIGTERM)
        assert any(line.startswith('stopping') for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 128 + signal.SIGTERM


# what nobody would send on purpose gets a JSON error; the API is as its description says

# the description cannot say which tokens and characters there are, and which fields go together
FITTING = dict(model='toy', prompt='ab', max_tokens=20, min_tokens=2, logit_bias={'3': 1}, stop_token_ids=[3],
               stream_options={}, tokens=[1, 2], temperature=1, top_k=3, repetition_penalty=1)


def test_the_description_is_true():
    """schemathesis makes good and bad requests from /openapi.json, and compares the answers with what it says."""
    schemathesis = pytest.importorskip('schemathesis', reason="not installed: pip install schemathesis")
    from schemathesis.specs.openapi import checks as conformance
    checks, engine, called = [schemathesis.checks.not_a_server_error, conformance.status_code_conformance,
                              conformance.content_type_conformance, conformance.response_schema_conformance,
                              conformance.response_headers_conformance], spelling_engine(max_queue=200), set()
    expected = {('/v1/completions', 2), ('/v1/completions', 4), ('/tokenize', 2), ('/detokenize', 2)}
    with serving(engine) as client:
        schema = schemathesis.openapi.from_url(f'{client.base_url}/openapi.json')
        for operation in (result.ok() for result in schema.get_all_operations()):
            for mode in schemathesis.GenerationMode:
                if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
                    continue

                n = 12 if mode is schemathesis.GenerationMode.POSITIVE else 7  # each body must be taken at least once

                @settings(max_examples=sizes(n, 200) if operation.body else 2, suppress_health_check=list(HealthCheck))
                @given(operation.as_strategy(generation_mode=mode))
                def call(case):
                    if mode is schemathesis.GenerationMode.POSITIVE and isinstance(case.body, dict):
                        case.body |= {name: value for name, value in FITTING.items() if name in case.body}
                    response = case.call_and_validate(checks=checks)
                    called.add((case.path, response.status_code // 100))
                call()
                for _ in range(9):  # few examples, by chance none of which is taken
                    if mode is schemathesis.GenerationMode.POSITIVE and (operation.path, 2) in expected - called:
                        call()
    assert {path for path, _ in called} == {e.path for e in ENDPOINTS} - {'/openapi.json'}
    assert expected <= called


def test_load_engine_has_the_defaults_of_serve_py():
    """Ray's replicas are given its settings by name."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(load_engine).parameters.items()}
    assert defaults == {name: getattr(serve, name) for name in defaults}
