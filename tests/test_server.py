"""
The server over HTTP: its addresses, its refusals and its answers. Some engines step when a test says so; that with a
model in PyTorch is compared with the model without cache.
"""
import threading

import pytest

for package in ('starlette', 'uvicorn', 'pydantic', 'orjson', 'prometheus_client', 'httpx'):
    pytest.importorskip(package, reason="needs requirements-serve.txt")

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families
from serving_process import serving
from small_engine import drawing_engine, served_by, spelled, spelling_engine
from test_api import events
from test_server_clients import post, read_all

import generation
from serving.server import Service, make_app

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


def test_streamed_and_not_are_the_same(engine):
    body = dict(prompt=['hello', 'bc'], max_tokens=25, n=2, stop=['€', 'z .'])
    with serving(engine) as client:
        whole = client.post('/v1/completions', json=body).json()
        streamed = events(client.post('/v1/completions', json=body | {'stream': True}).content)
    texts, reasons = [''] * 4, [None] * 4
    for event in streamed[:-1]:
        (choice,) = event['choices']
        assert reasons[choice['index']] is None  # no chunk follows the one that has the finish_reason
        texts[choice['index']] += choice['text']
        reasons[choice['index']] = choice['finish_reason']
    expected = [spelled('o', 40).partition('z .')[0]] * 2 + [spelled('c', 40).partition('z .')[0]] * 2
    assert streamed[-1] == b'[DONE]' and texts == expected and set(reasons) == {'stop'}
    assert [(c['text'], c['finish_reason']) for c in whole['choices']] == list(zip(texts, reasons))
    n_tokens = sum(len(text) + 3 for text in texts)
    assert whole['usage'] | {'prompt_tokens_details': None} == {
        'prompt_tokens': 7, 'completion_tokens': n_tokens, 'total_tokens': 7 + n_tokens, 'prompt_tokens_details': None}


def test_streamed_samples_are_the_unstreamed(drawing):
    """With stop strings, several samples, and characters whose text may begin a stop string."""
    body = dict(n=4, max_tokens=60, seed=11, stop=['e', 'ab', '. '], return_token_ids=True)
    whole = ask(drawing, **body)['choices']
    data = drawing.post('/v1/completions', json={'prompt': TEXT, 'stream': True, **body}).content
    texts, tokens = [''] * 4, [[] for _ in range(4)]
    for event in events(data)[:-1]:
        (choice,) = event['choices']
        texts[choice['index']] += choice['text']
        tokens[choice['index']] += choice['token_ids']
    assert texts == [choice['text'] for choice in whole] and tokens == [choice['token_ids'] for choice in whole]
    assert not any(stop in text for text in texts for stop in body['stop'])
    assert 'stop' in {choice['finish_reason'] for choice in whole} and len({*texts}) == 4


@torch.no_grad()
def logprobs_of(client, text):
    """The model's own log probability of each token of a text, from the second on."""
    chars, model = client.service.served.tokenizer.chars, client.service.engine.cache.model
    tokens = torch.tensor([[*map(chars.index, text)]])
    logits = model(tokens, targets=tokens)[0][0]
    return torch.log_softmax(logits, -1)[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()


def test_scoring_ignores_the_prefix_cache(drawing):
    """The text is remembered by the first request; it is scored anew, and with the model's own numbers."""
    first = ask(drawing, echo=True, logprobs=1, max_tokens=0)['choices'][0]
    ask(drawing, max_tokens=1)
    for max_tokens in (0, 1):
        choice = ask(drawing, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0)['choices'][0]
        scores = choice['logprobs']
        assert scores['token_logprobs'][0] is first['logprobs']['token_logprobs'][0] is None
        assert scores['token_logprobs'][1:len(TEXT)] == pytest.approx(first['logprobs']['token_logprobs'][1:], abs=1e-5)
        assert ''.join(scores['tokens']) == choice['text']
        assert scores['token_logprobs'][1:] == pytest.approx(logprobs_of(drawing, choice['text']), abs=1e-5)
        assert scores['text_offset'] == list(range(len(TEXT) + max_tokens))
        assert all(max(top.values()) >= score for top, score in zip(scores['top_logprobs'][1:],
                                                                    scores['token_logprobs'][1:]))


def test_logprobs_and_greedy_tokens_are_the_models(drawing):
    choice = ask(drawing, logprobs=0, max_tokens=20, seed=1, temperature=.7)['choices'][0]
    expected = logprobs_of(drawing, TEXT + choice['text'])[-20:]
    assert choice['logprobs']['token_logprobs'] == pytest.approx(expected, abs=1e-5)
    choice = ask(drawing, max_tokens=30, temperature=0, return_token_ids=True)['choices'][0]
    model = drawing.service.engine.cache.model
    (tokens,) = generation.generate(model, [choice['prompt_token_ids']], 30, temperature=0)
    assert choice['token_ids'] == tokens[len(TEXT):]


def test_usage_counts_tokens(drawing):
    """The prompts are counted once each, all samples' tokens, and the tokens found in remembered blocks."""
    body = dict(prompt=[TEXT + ' a', TEXT + ' bc'], n=3, max_tokens=7, seed=3)
    ask(drawing, **body)
    usage = ask(drawing, **body)['usage']
    assert usage == {'prompt_tokens': 2 * len(TEXT) + 5, 'completion_tokens': 42, 'total_tokens': 2 * len(TEXT) + 47,
                     'prompt_tokens_details': {'cached_tokens': 2 * (len(TEXT) // 4 * 4)}}


def test_the_openai_client(engine):
    openai = pytest.importorskip('openai', reason="the client is not installed")
    with serving(engine, api_key='secret') as client:
        with openai.OpenAI(base_url=f'{client.base_url}/v1', api_key='secret', max_retries=0) as ours:
            assert [model.id for model in ours.models.list()] == ['toy']
            whole = ours.completions.create(model='toy', prompt='ab', max_tokens=5, logprobs=2, echo=True)
            assert whole.choices[0].text == 'ab' + spelled('b', 5) and whole.usage.total_tokens == 7
            assert whole.choices[0].logprobs.token_logprobs[:2] == [None, 0.0]
            chunks = list(ours.completions.create(model='toy', prompt='ab', max_tokens=5, stream=True,
                                                  stream_options={'include_usage': True},
                                                  extra_body={'top_k': 5, 'return_token_ids': True}))
            assert ''.join(c.choices[0].text for c in chunks[:-1]) == spelled('b', 5)
            assert chunks[-1].usage.completion_tokens == 5 and chunks[-2].choices[0].finish_reason == 'length'
            with pytest.raises(openai.BadRequestError, match='context|together') as caught:
                ours.completions.create(model='toy', prompt='ab', max_tokens=500)
            assert caught.value.code == 'context_length_exceeded' and caught.value.param == 'prompt'
            with pytest.raises(openai.NotFoundError):
                ours.completions.create(model='gpt-4', prompt='ab')
            with pytest.raises(openai.NotFoundError, match='chat template'):
                ours.chat.completions.create(model='toy', messages=[])
        with openai.OpenAI(base_url=f'{client.base_url}/v1', api_key='wrong', max_retries=0) as other:
            with pytest.raises(openai.AuthenticationError):
                other.models.list()


def test_the_key_guards_all_that_tells_of_requests(engine):
    with serving(engine, api_key='secret') as client:
        for method, path in (('POST', '/v1/completions'), ('GET', '/v1/models'), ('GET', '/cache'),
                             ('POST', '/tokenize'), ('POST', '/detokenize')):
            for headers in ({}, {'authorization': 'Bearer wrong'}, {'authorization': 'secret'},
                            {'authorization': b'Bearer \xe9'}):
                assert refused(client.request(method, path, headers=headers), 401)['type'] == 'authentication_error'
            assert client.request(method, path, headers={'authorization': 'Bearer secret'}).status_code != 401
        assert [client.get(path).status_code for path in ('/', '/health', '/metrics', '/openapi.json')] == [200] * 4


def test_tokenize_and_detokenize(engine):
    with serving(engine) as client:
        assert client.post('/tokenize', json={'prompt': 'ab€'}).json() == {'tokens': [0, 1, 28], 'count': 3,
                                                                           'max_model_len': 64}
        assert client.post('/detokenize', json={'tokens': [0, 1, 28]}).json() == {'prompt': 'ab€'}
        assert refused(client.post('/tokenize', json={'prompt': 'Q'}), 400)['param'] == 'prompt'
        assert refused(client.post('/detokenize', json={'tokens': [31]}), 400)['param'] == 'tokens'


def test_metrics(drawing):
    """An observation is counted once, however often the metrics are read."""
    engine = drawing.service.engine
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
    for seconds in (.003, .2, .005):
        engine.stats.first_token.observe(seconds)
    observed = metrics_of(drawing)
    for bound, n in (('0.0025', 0), ('0.005', 2), ('0.1', 2), ('0.25', 3), ('+Inf', 3)):
        name = 'time_to_first_token_seconds_bucket', bound
        assert observed[name] - after[name] == n
    name = 'time_to_first_token_seconds_sum',
    assert observed[name] - after[name] == pytest.approx(.208)


def test_addresses_that_do_not_exist(engine):
    with serving(engine) as client:
        assert '/openapi.json' in refused(client.get('/v2'), 404)['message']
        assert refused(client.get('/v1/completions'), 405) and refused(client.post('/cache'), 405)
        assert 'chat template' in refused(client.post('/v1/chat/completions', json={}), 404)['message']
        assert client.head('/health').status_code == 200


def test_a_body_that_is_too_large_is_413(engine):
    with serving(engine, max_body=100) as client:
        at_the_limit = b'{"prompt": "%s"}' % (b'Q' * 86)
        assert len(at_the_limit) == 100 and refused(client.post('/v1/completions', content=at_the_limit), 400)
        assert refused(client.post('/v1/completions', content=at_the_limit + b' '), 413)
        parts = iter([at_the_limit, b' ' * 10])  # without a content-length
        assert refused(client.post('/v1/completions', content=parts), 413)
        assert client.get('/health').status_code == 200


def test_a_full_queue_is_429_and_takes_none_of_a_list(engine):
    engine.allow(0)
    with serving(engine) as client:  # 4 requests may wait
        response = client.post('/v1/completions', json={'prompt': ['a'] * 5})
        assert refused(response, 429)['code'] == 'queue_full' and int(response.headers['retry-after']) > 0
        engine.until(lambda: not engine.live)
        assert engine.stats.steps == 0 and engine.stats.finished == {'abort': 4}
        engine.allow(float('inf'))
        assert client.post('/v1/completions', json={'prompt': ['a'] * 4}).status_code == 200


def test_what_can_never_fit_is_400():
    engine = spelling_engine(n_blocks=8)
    with serving(engine) as client:
        error = refused(client.post('/v1/completions', json={'prompt': 'a', 'max_tokens': 40}), 400)
        assert error['code'] == 'context_length_exceeded' and '8' in error['message']


def test_bad_request_spares_others(engine):
    """Refused bodies between the steps of a stream change nothing of it."""
    engine.allow(0)
    with serving(engine) as client:
        with client.stream('POST', '/v1/completions', json=dict(prompt='a', max_tokens=8, stream=True)) as answer:
            for _ in range(8):
                engine.step()
                assert refused(client.post('/v1/completions', json=dict(prompt='a', n=0)), 400)
            streamed = events(answer.read())
    assert ''.join(event['choices'][0]['text'] for event in streamed[:-1]) == spelled('a', 8)


def test_an_engine_that_fails_says_so_in_the_stream_and_outside(engine):
    def fail(texts):
        raise FloatingPointError("numbers that are not finite")
    engine.allow(0)
    with serving(engine) as client:
        with client.stream('POST', '/v1/completions', json=dict(prompt='a', stream=True)) as answer:
            engine.step()
            engine.decoder.fails = fail
            engine.allow(float('inf'))
            *_, error, done = events(answer.read())
        assert 'not finite' in error['error']['message'] and done == b'[DONE]'
        assert refused(client.post('/v1/completions', json={'prompt': 'a'}), 500)['type'] == 'server_error'


def test_cors_is_off_unless_asked(engine):
    origin = {'origin': 'http://other', 'access-control-request-method': 'POST'}
    with serving(engine) as client:
        assert client.options('/v1/completions', headers=origin).status_code == 405
        assert 'access-control-allow-origin' not in client.get('/health', headers=origin).headers
    with serving(spelling_engine(), cors_origin='http://other') as client:
        assert client.options('/v1/completions', headers=origin).status_code == 200
        assert client.get('/health', headers=origin).headers['access-control-allow-origin'] == 'http://other'


def test_the_page_loads_nothing_from_elsewhere(engine):
    with serving(engine) as client:
        page = client.get('/')
    assert page.headers['content-type'].startswith('text/html') and "default-src 'none'" in str(page.headers)
    assert not any(word in page.text for word in ('http:', 'https:', 'src="', 'href="/', '@import', 'url('))


def test_health_while_loading():
    load, engine = threading.Event(), spelling_engine()

    def slow():
        load.wait()
        return engine, served_by(engine)
    with serving(engine, load=slow) as client:
        for method, path in (('GET', '/health'), ('GET', '/v1/models'), ('POST', '/v1/completions'), ('GET', '/cache')):
            response = client.request(method, path)
            assert refused(response, 503)['code'] == 'loading' and response.headers['retry-after']
        assert client.get('/').status_code == 200 and client.get('/openapi.json').status_code == 200
        load.set()
        while client.get('/health').status_code == 503:
            pass
        assert client.get('/v1/models').json()['data'][0]['id'] == 'toy'


def test_health_while_busy(engine):
    """A step that takes long holds up its own requests only."""
    engine.allow(0)
    with serving(engine) as client:
        with client.stream('POST', '/v1/completions', json=dict(prompt='a', stream=True)) as answer:
            assert client.get('/health').json() == {'status': 'ok'} and client.get('/metrics').status_code == 200
            engine.allow(float('inf'))
            assert events(answer.read())[-1] == b'[DONE]'


def test_a_bug_is_a_json_error(engine):
    """Without a server around it, which would log the traceback."""
    import anyio
    engine.state = lambda: 1 / 0
    service = Service(None)
    service.engine = engine
    app = make_app(service)

    async def get():
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url='http://server') as client:
            return await client.get('/cache')
    error = refused(anyio.run(get), 500)
    assert 'ZeroDivisionError' in error['message'] and 'division' not in error['message']


@pytest.mark.parametrize('stream', [True, False])
@pytest.mark.parametrize('n_steps', [0, 1, 8])
def test_disconnect_frees_the_blocks(drawing, n_steps, stream):
    """While it waits for its first step, after its prompt, and in decode. Another request goes on."""
    engine = drawing.service.engine
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
    engine.until(lambda: not engine.live and engine.cache.n_free == 96)
