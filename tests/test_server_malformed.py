"""Bodies that nobody would send on purpose: each gets a JSON error, none a 500. The API is as its description says."""
import json
import random

import pytest

for package in ('starlette', 'uvicorn', 'pydantic', 'orjson', 'prometheus_client', 'httpx'):
    pytest.importorskip(package, reason="needs requirements-serve.txt")

from conftest import sizes
from hypothesis import HealthCheck, given, settings
from serving_process import serving
from small_engine import spelling_engine

from serving.api import CompletionBody
from serving.server import ENDPOINTS

VALUES = [None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, 2**64, -2**63, 1e308, -1e308, 1e-320, 0.5, '', 'a', 'Q',
          '\x00', '€😀', 'a' * 5000, [], [[]], [None], [1], [1, 'a'], ['a'] * 200, [[1], ['a']], [2**62], {}, {'a': 1},
          {'1': 1}, {'1': 'a'}, {'include_usage': 1}, [[[[[]]]]], {'': {}}, '-1', 'Infinity', [1.5], [-1], [True]]
TEXTS = [b'', b'{', b'}', b'null', b'[]', b'"', b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b'\x00', b'\xff\xfe',
         b'[' * 100_000, b'{"prompt": ' * 10_000, b'{"n": 1e999, "prompt": "a"}', b'{"prompt": "a"} {}',
         b'{"prompt": "a", "max_tokens": 99999999999999999999999999999}', b'\xef\xbb\xbf{"prompt": "a"}']


def malformed(rng):
    """A body: some fields of the API with values of any type, or a good body of which bytes were changed."""
    if rng.random() < .1:
        return rng.choice(TEXTS)
    names = rng.sample([*CompletionBody.model_fields, 'best_of', 'zzz', ''], rng.randint(1, 4))
    fields = {'prompt': 'ab', **{name: rng.choice(VALUES) for name in names if name != 'model' or rng.random() < .5}}
    if rng.random() < .1:
        del fields['prompt']
    data = bytearray(json.dumps(fields).encode())
    if rng.random() < .2:
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def test_malformed_requests_get_a_json_error():
    engine, rng, n_refused = spelling_engine(max_queue=200), random.Random(0), 0
    with serving(engine) as client:
        for _ in range(sizes(300, 1500)):
            data = malformed(rng)
            response = client.post('/v1/completions', content=data)
            assert response.status_code in (200, 400, 404), (data, response.text)
            if response.status_code != 200:
                error = response.json()['error']
                assert set(error) == {'message', 'type', 'param', 'code'} and error['message'], data
                assert 'Traceback' not in error['message'] and len(error['message']) < 500, data
                n_refused += 1
        for path in ('/%ff', '/v1/completions/', '//', '/cache/../cache', '/v1/completions?x=1'):
            response = client.get(path, follow_redirects=False)
            assert response.status_code < 500 and (response.status_code < 400 or response.json()['error'])
    assert n_refused >= sizes(200, 1000) and not engine.live


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
    with serving(engine) as client:
        schema = schemathesis.openapi.from_url(f'{client.base_url}/openapi.json')
        for operation in (result.ok() for result in schema.get_all_operations()):
            for mode in schemathesis.GenerationMode:
                if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
                    continue

                @settings(max_examples=sizes(20, 200), suppress_health_check=list(HealthCheck))
                @given(operation.as_strategy(generation_mode=mode))
                def call(case):
                    if mode is schemathesis.GenerationMode.POSITIVE and isinstance(case.body, dict):
                        case.body |= {name: value for name, value in FITTING.items() if name in case.body}
                    response = case.call_and_validate(checks=checks)
                    called.add((case.path, response.status_code // 100))
                call()
    assert {path for path, _ in called} == {path for _, path, _ in ENDPOINTS} - {'/openapi.json'}
    assert {('/v1/completions', 2), ('/v1/completions', 4), ('/tokenize', 2), ('/detokenize', 2)} <= called
