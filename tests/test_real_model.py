"""
A real model gives a prompt one text: alone, among others, over HTTP, with drafts, when it was preempted, and when most
logits are left out.
"""
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
from conftest import ROOT, sizes
from serving_process import serving

import checkpoint
import decode
import decode.weights as packing
import model as plain_model
from decode.cpu import CPUExecutor
from engine import Engine, default_pool, pool_for
from serving.loading import load_engine

pytestmark = pytest.mark.skipif(not sizes(False, True), reason="only at full size: it draws some 30,000 tokens")
N_PROMPTS, N_NEW = 200, 24
HOW = dict(temperature=0.8, top_p=0.95)


@pytest.fixture(scope='module')
def real(real_model):
    """(the model, prompts, the text of each alone)"""
    model, tokenizer, _ = checkpoint.load_model(real_model, '', plain_model, weights='int8')
    with open(f'{ROOT}/KV_CACHE.md', encoding='utf-8') as f:
        tokens = iter(tokenizer.encode(f.read()))
    prompts = [list(islice(tokens, 8 + 7 * i % 57)) for i in range(N_PROMPTS)]
    engine = Engine(model, decode.best(model, 1, 'int8'), pool_for(model.config, 1, 64 + N_NEW))
    return model, prompts, [engine.generate([prompt], N_NEW, seed=i, **HOW)[0] for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize('at_once, n_pages, speculate', [(32, 400, 'off'), (32, 40, 'off'), (8, 80, 'int4'),
                                                         (8, 18, 'ngram')])
def test_among_others(real, at_once, n_pages, speculate):
    model, prompts, alone = real
    executor = decode.best(model, 1, 'int8', speculate=speculate)
    engine = Engine(model, executor, default_pool(model.config, n_pages), 256, at_once)
    assert engine.generate(prompts, N_NEW, **HOW) == alone
    assert (engine.scheduler.n_preempted > 0) == (n_pages in (40, 18))


def test_over_http(real, real_model):
    _, prompts, alone = real
    thread, served = load_engine(real_model, name='real', weights='int8', speculate='int4', n_blocks=300)
    with serving(thread, served) as client, ThreadPoolExecutor(12) as pool:
        def complete(i):
            body = dict(prompt=prompts[i], max_tokens=N_NEW, seed=i, ignore_eos=True, return_token_ids=True, **HOW)
            answer = client.post('/v1/completions', json=body, timeout=600).json()
            return prompts[i] + answer['choices'][0]['token_ids']
        assert list(pool.map(complete, range(len(prompts)))) == alone


def test_screened(real_model, monkeypatch):
    """Its lm_head is a fifth of its weights, so steps compute all logits unless they are told otherwise."""
    model, tokenizer, _ = checkpoint.load_model(real_model, '', plain_model)
    with open(f'{ROOT}/README.md', encoding='utf-8') as f:
        tokens = tokenizer.encode(f.read())
    found = {}
    for screened in (0.1, 1.0):
        monkeypatch.setattr(packing, 'SCREENED', screened)
        executor = CPUExecutor(model)
        assert executor.packed.is_screened == (screened < 1)
        engine = Engine(model, executor, pool_for(model.config, 4, 160 + N_NEW))
        found[screened] = [engine.generate([tokens[40 * i:40 * (i + n)] for i in range(4)], N_NEW, seed=n, **how)
                           for n in range(1, 4) for how in (
                               dict(temperature=0), dict(top_k=200), dict(top_k=40, top_p=0.9, temperature=0.8))]
    assert found[0.1] == found[1.0]
