"""The server with a real engine, against the model without cache: what is scored, drawn, counted, freed and stopped."""
import pytest
import torch

for package in ('starlette', 'uvicorn', 'pydantic', 'orjson', 'prometheus_client', 'httpx'):
    pytest.importorskip(package, reason="needs requirements-serve.txt")

from serving_process import serving
from stepping_engine import tiny_engine
from test_api import events
from test_server_clients import post, read_all

import generation

TEXT = 'the quick brown fox jumps over the lazy dog.'


@pytest.fixture(scope='module')
def client():
    engine, served = tiny_engine()
    with serving(engine, served) as client:
        yield client


@pytest.fixture
def engine(client):
    engine = client.service.engine
    yield engine
    engine.allow(float('inf'))


def ask(client, **fields):
    response = client.post('/v1/completions', json={'prompt': TEXT, **fields})
    assert response.status_code == 200, response.text
    return response.json()


@torch.no_grad()
def logprobs_of(engine, text, n_prompt=1):
    """The model's own log probability of each token of a text, from the second on."""
    tokens = torch.tensor([[*map(engine.vocabulary.index, text)]])
    logits = engine.cache.model(tokens, targets=tokens)[0][0]
    return torch.log_softmax(logits, -1)[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()


def test_scoring_ignores_the_prefix_cache(client, engine):
    """The text is remembered by the first request; it is scored anew, and with the model's own numbers."""
    engine.vocabulary = client.service.served.tokenizer.chars
    first = ask(client, echo=True, logprobs=1, max_tokens=0)['choices'][0]
    ask(client, max_tokens=1)
    for max_tokens in (0, 1):
        answer = ask(client, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0)
        choice = answer['choices'][0]
        scores = choice['logprobs']
        assert scores['token_logprobs'][:len(TEXT)] == first['logprobs']['token_logprobs']
        assert scores['token_logprobs'][0] is None and ''.join(scores['tokens']) == choice['text']
        assert scores['token_logprobs'][1:] == pytest.approx(logprobs_of(engine, choice['text']), abs=1e-5)
        assert scores['text_offset'] == list(range(len(TEXT) + max_tokens))
        assert all(max(top.values()) >= score for top, score in zip(scores['top_logprobs'][1:],
                                                                    scores['token_logprobs'][1:]))


def test_logprobs_equal_the_models(client, engine):
    engine.vocabulary = client.service.served.tokenizer.chars
    choice = ask(client, logprobs=0, max_tokens=20, seed=1, temperature=.7)['choices'][0]
    expected = logprobs_of(engine, TEXT + choice['text'])[-20:]
    assert choice['logprobs']['token_logprobs'] == pytest.approx(expected, abs=1e-5)


def test_greedy_is_the_models(client, engine):
    choice = ask(client, max_tokens=30, temperature=0, return_token_ids=True)['choices'][0]
    (tokens,) = generation.generate(engine.cache.model, [choice['prompt_token_ids']], 30, temperature=0)
    assert choice['token_ids'] == tokens[len(TEXT):]


def test_usage_counts_tokens(client):
    """The prompts are counted once each, all samples' tokens, and the tokens found in remembered blocks."""
    body = dict(prompt=[TEXT + ' a', TEXT + ' bc'], n=3, max_tokens=7, seed=3)
    ask(client, **body)
    usage = ask(client, **body)['usage']
    assert usage == {'prompt_tokens': 2 * len(TEXT) + 5, 'completion_tokens': 42, 'total_tokens': 2 * len(TEXT) + 47,
                     'prompt_tokens_details': {'cached_tokens': 2 * (len(TEXT) // 4 * 4)}}


def test_metrics_count_what_was_served(client):
    def read():
        lines = [line.split() for line in client.get('/metrics').text.splitlines() if not line.startswith('#')]
        return {name.removeprefix('nanogpt_'): float(value) for name, value in lines}
    before, body = read(), dict(n=2, max_tokens=9)
    ask(client, **body)
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['requests_total'] == 1 and grown['prompt_tokens_total'] == len(TEXT)
    assert grown['generated_tokens_total'] == 18 and grown['finished_total{reason="length"}'] == 2
    assert grown['time_to_first_token_seconds_count'] == 1 and grown['time_per_token_seconds_count'] == 2
    assert after['blocks_total'] == 96 and after['running'] == after['blocks_used'] == 0 < after['blocks_cached']


def test_streamed_is_the_unstreamed(client):
    """With stop strings, several samples, and characters whose text may begin a stop string."""
    body = dict(n=4, max_tokens=60, seed=11, stop=['e', 'ab', '. '], return_token_ids=True)
    whole = ask(client, **body)['choices']
    data = client.post('/v1/completions', json={'prompt': TEXT, 'stream': True, **body}).content
    texts, tokens = [''] * 4, [[] for _ in range(4)]
    for event in events(data)[:-1]:
        (choice,) = event['choices']
        texts[choice['index']] += choice['text']
        tokens[choice['index']] += choice['token_ids']
    assert texts == [choice['text'] for choice in whole] and tokens == [choice['token_ids'] for choice in whole]
    assert not any(stop in text for text in texts for stop in body['stop'])
    assert 'stop' in {choice['finish_reason'] for choice in whole}


@pytest.mark.parametrize('stream', [True, False])
@pytest.mark.parametrize('n_steps', [0, 1, 8])
def test_disconnect_frees_the_blocks(client, engine, n_steps, stream):
    """While it waits for its first step, after its prompt, and in decode. Another request goes on."""
    engine.allow(0)
    aborted = engine.stats.finished['abort']
    with post(client, dict(prompt='abc', max_tokens=50, seed=5)) as stays:
        with post(client, dict(prompt=TEXT, n=2, max_tokens=100, stream=stream)):
            engine.until(lambda: len(engine.live) == 2)
            engine.allow(n_steps)
            engine.until(lambda: not engine.n_allowed)
        engine.until(lambda: len(engine.live) == 1)
        assert engine.stats.finished['abort'] == aborted + 2
        engine.allow(float('inf'))
        status, answer = read_all(stays)
    assert status == 200 and b'"finish_reason":"length"' in answer
    engine.until(lambda: not engine.live and engine.stats.blocks_used == 0)
