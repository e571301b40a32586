"""The server over HTTP, with an engine that steps when a test says so: its addresses, its refusals and its answers."""
import threading

import pytest

for package in ('starlette', 'uvicorn', 'pydantic', 'orjson', 'prometheus_client', 'httpx'):
    pytest.importorskip(package, reason="needs requirements-serve.txt")

import httpx
from fake_engine import SERVED, FakeEngine, text_of
from serving_process import serving
from test_api import events

from serving.server import make_app


@pytest.fixture
def engine():
    engine = FakeEngine()
    yield engine
    engine.may_step.set()
    engine.stop()


def refused(response, status):
    """Check that the response is an error of the API, and return its error."""
    assert response.status_code == status and response.headers['content-type'] == 'application/json'
    error = response.json()['error']
    assert set(error) == {'message', 'type', 'param', 'code'}
    return error


def test_completions_streamed_and_not_are_the_same(engine):
    engine.start()
    body = dict(prompt=['hello', 'bc'], max_tokens=9, seed=22, n=2, stop=['€'])
    with serving(engine, SERVED) as client:
        whole = client.post('/v1/completions', json=body).json()
        streamed = events(client.post('/v1/completions', json=body | {'stream': True}).content)
    texts, reasons = [''] * 4, [None] * 4
    for event in streamed[:-1]:
        (choice,) = event['choices']
        assert reasons[choice['index']] is None  # no chunk follows the one that has the finish_reason
        texts[choice['index']] += choice['text']
        reasons[choice['index']] = choice['finish_reason']
    expected = [text_of(seed, 40).partition('€')[0][:9] for seed in (22, 23)] * 2
    assert streamed[-1] == b'[DONE]' and texts == expected and set(reasons) == {'stop'}
    assert [(c['text'], c['finish_reason']) for c in whole['choices']] == list(zip(texts, reasons))
    n_tokens = 2 * (len(expected[0]) + 1) + 2 * (len(expected[1]) + 1)
    assert whole['usage'] | {'prompt_tokens_details': None} == {
        'prompt_tokens': 7, 'completion_tokens': n_tokens, 'total_tokens': 7 + n_tokens, 'prompt_tokens_details': None}


def test_the_openai_client(engine):
    openai = pytest.importorskip('openai', reason="the client is not installed")
    engine.start()
    with serving(engine, SERVED, api_key='secret') as client:
        with openai.OpenAI(base_url=f'{client.base_url}/v1', api_key='secret', max_retries=0) as ours:
            assert [model.id for model in ours.models.list()] == ['fake']
            whole = ours.completions.create(model='fake', prompt='ab', max_tokens=5, seed=3, logprobs=2, echo=True)
            assert whole.choices[0].text == 'ab' + text_of(3, 5) and whole.usage.total_tokens == 7
            assert whole.choices[0].logprobs.token_logprobs[:2] == [None, -1 / 8]
            chunks = list(ours.completions.create(model='fake', prompt='ab', max_tokens=5, seed=3, stream=True,
                                                  stream_options={'include_usage': True},
                                                  extra_body={'top_k': 5, 'return_token_ids': True}))
            assert ''.join(c.choices[0].text for c in chunks[:-1]) == text_of(3, 5)
            assert chunks[-1].usage.completion_tokens == 5 and chunks[-2].choices[0].finish_reason == 'length'
            with pytest.raises(openai.BadRequestError, match='context|together') as caught:
                ours.completions.create(model='fake', prompt='ab', max_tokens=500)
            assert caught.value.code == 'context_length_exceeded' and caught.value.param == 'prompt'
            with pytest.raises(openai.NotFoundError):
                ours.completions.create(model='gpt-4', prompt='ab')
            with pytest.raises(openai.NotFoundError, match='chat template'):
                ours.chat.completions.create(model='fake', messages=[])
        with openai.OpenAI(base_url=f'{client.base_url}/v1', api_key='wrong', max_retries=0) as other:
            with pytest.raises(openai.AuthenticationError):
                other.models.list()


def test_the_key_guards_all_that_tells_of_requests(engine):
    with serving(engine, SERVED, api_key='secret') as client:
        for method, path in (('POST', '/v1/completions'), ('GET', '/v1/models'), ('GET', '/cache'),
                             ('POST', '/tokenize'), ('POST', '/detokenize')):
            for headers in ({}, {'authorization': 'Bearer wrong'}, {'authorization': 'secret'},
                            {'authorization': b'Bearer \xe9'}):
                assert refused(client.request(method, path, headers=headers), 401)['type'] == 'authentication_error'
            assert client.request(method, path, headers={'authorization': 'Bearer secret'}).status_code != 401
        assert [client.get(path).status_code for path in ('/', '/health', '/metrics', '/openapi.json')] == [200] * 4


def test_tokenize_and_detokenize(engine):
    with serving(engine, SERVED) as client:
        assert client.post('/tokenize', json={'prompt': 'ab€'}).json() == {'tokens': [0, 1, 28], 'count': 3,
                                                                           'max_model_len': 64}
        assert client.post('/detokenize', json={'tokens': [0, 1, 28]}).json() == {'prompt': 'ab€'}
        assert refused(client.post('/tokenize', json={'prompt': 'Q'}), 400)['param'] == 'prompt'
        assert refused(client.post('/detokenize', json={'tokens': [31]}), 400)['param'] == 'tokens'


def test_metrics(engine):
    """Read with Prometheus's own parser. An observation is counted once, however often the metrics are read."""
    from prometheus_client.parser import text_string_to_metric_families
    engine.start()
    engine.seconds += [.003, .2]
    with serving(engine, SERVED) as client:
        client.post('/v1/completions', json=dict(prompt='a', max_tokens=7))
        for _ in range(2):
            response = client.get('/metrics')
            values = {(sample.name, *sample.labels.values()): sample.value
                      for family in text_string_to_metric_families(response.text) for sample in family.samples}
    assert response.headers['content-type'].startswith('text/plain; version=0.0.4')
    assert values['nanogpt_generated_tokens_total',] == 7 and values['nanogpt_finished_total', 'stop'] == 2
    assert values['nanogpt_time_to_first_token_seconds_count',] == 2
    assert values['nanogpt_time_to_first_token_seconds_bucket', '0.005'] == 1 and values['nanogpt_blocks_used',] == 0


def test_addresses_that_do_not_exist(engine):
    with serving(engine, SERVED) as client:
        assert '/openapi.json' in refused(client.get('/v2'), 404)['message']
        assert refused(client.get('/v1/completions'), 405) and refused(client.post('/cache'), 405)
        assert 'chat template' in refused(client.post('/v1/chat/completions', json={}), 404)['message']
        assert client.head('/health').status_code == 200


def test_a_body_that_is_too_large_is_413(engine):
    with serving(engine, SERVED, max_body=100) as client:
        at_the_limit = b'{"prompt": "%s"}' % (b'Q' * 86)
        assert len(at_the_limit) == 100 and refused(client.post('/v1/completions', content=at_the_limit), 400)
        assert refused(client.post('/v1/completions', content=at_the_limit + b' '), 413)
        parts = iter([at_the_limit, b' ' * 10])  # without a content-length
        assert refused(client.post('/v1/completions', content=parts), 413)
        assert client.get('/health').status_code == 200


def test_a_full_queue_is_429_and_takes_none_of_a_list(engine):
    with serving(engine, SERVED) as client:  # the engine does not step, and 4 requests may wait
        response = client.post('/v1/completions', json={'prompt': ['a'] * 5})
        assert refused(response, 429)['code'] == 'queue_full' and int(response.headers['retry-after']) > 0
        assert len(engine.aborted) == 4 and not engine.waiting
        engine.start()
        assert client.post('/v1/completions', json={'prompt': ['a'] * 4}).status_code == 200


def test_what_can_never_fit_is_400(engine):
    engine.raises = ValueError("the request needs 9 blocks, and the pool has 8: shorten the prompt")
    with serving(engine, SERVED) as client:
        assert refused(client.post('/v1/completions', json={'prompt': 'a'}), 400)['code'] == 'context_length_exceeded'


def test_bad_request_spares_others(engine):
    """Refused bodies between the steps of a stream change nothing of it."""
    with serving(engine, SERVED) as client:
        body = dict(prompt='a', seed=0, max_tokens=8, stream=True)
        with client.stream('POST', '/v1/completions', json=body) as answer:
            for _ in range(8):
                engine.step()
                assert refused(client.post('/v1/completions', json=dict(prompt='a', n=0)), 400)
            streamed = events(answer.read())
    assert ''.join(event['choices'][0]['text'] for event in streamed[:-1]) == text_of(0, 8)


def test_an_engine_that_fails_says_so_in_the_stream_and_outside(engine):
    with serving(engine, SERVED) as client:
        with client.stream('POST', '/v1/completions', json=dict(prompt='a', stream=True)) as answer:
            engine.step()
            engine.fail()
            *_, error, done = events(answer.read())
        assert 'not finite' in error['error']['message'] and done == b'[DONE]'
        answers = []
        thread = threading.Thread(target=lambda: answers.append(client.post('/v1/completions', json={'prompt': 'a'})))
        thread.start()
        engine.until(lambda: engine.waiting)
        engine.step()
        engine.fail()
        thread.join()
        assert refused(answers[0], 500)['type'] == 'server_error'


def test_cors_is_off_unless_asked(engine):
    origin = {'origin': 'http://other', 'access-control-request-method': 'POST'}
    with serving(engine, SERVED) as client:
        assert client.options('/v1/completions', headers=origin).status_code == 405
        assert 'access-control-allow-origin' not in client.get('/health', headers=origin).headers
    with serving(FakeEngine(), SERVED, cors_origin='http://other') as client:
        assert client.options('/v1/completions', headers=origin).status_code == 200
        assert client.get('/health', headers=origin).headers['access-control-allow-origin'] == 'http://other'


def test_the_page_loads_nothing_from_elsewhere(engine):
    with serving(engine, SERVED) as client:
        page = client.get('/')
    assert page.headers['content-type'].startswith('text/html') and "default-src 'none'" in str(page.headers)
    assert not any(word in page.text for word in ('http:', 'https:', 'src="', 'href="/', '@import', 'url('))


def test_health_while_loading():
    load, engine = threading.Event(), FakeEngine()

    def slow():
        load.wait()
        return engine, SERVED
    with serving(engine, SERVED, load=slow) as client:
        for method, path in (('GET', '/health'), ('GET', '/v1/models'), ('POST', '/v1/completions'), ('GET', '/cache')):
            response = client.request(method, path)
            assert refused(response, 503)['code'] == 'loading' and response.headers['retry-after']
        assert client.get('/').status_code == 200 and client.get('/openapi.json').status_code == 200
        load.set()
        while client.get('/health').status_code == 503:
            pass
        assert client.get('/v1/models').json()['data'][0]['id'] == 'fake'


def test_health_while_busy(engine):
    """A step that takes long holds up its own requests only."""
    engine.may_step.clear()
    engine.start()
    with serving(engine, SERVED) as client:
        with client.stream('POST', '/v1/completions', json=dict(prompt='a', stream=True)) as answer:
            assert client.get('/health').json() == {'status': 'ok'} and client.get('/metrics').status_code == 200
            engine.may_step.set()
            assert events(answer.read())[-1] == b'[DONE]'


def test_a_bug_is_a_json_error(engine):
    """Without a server around it, which would log the traceback."""
    import anyio

    from serving.server import Service
    engine.state = lambda: 1 / 0
    service = Service(lambda: (engine, SERVED))
    service.engine = service.metrics = engine
    app = make_app(service)

    async def get():
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url='http://server') as client:
            return await client.get('/cache')
    error = refused(anyio.run(get), 500)
    assert 'ZeroDivisionError' in error['message'] and 'division' not in error['message']
