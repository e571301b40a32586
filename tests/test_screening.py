"""Steps that compute only the logits that may be among the largest draw the tokens of steps that compute all."""
import math

import numpy as np
import pytest
import torch
from conftest import sizes
from drafting import given
from test_executors import TWO, Slots, Text

import decode
from decode import weights
from decode.batch import NotNumbers
from decode.cpu import CPUExecutor
from engine import Engine
from model import GPT, GPTConfig

V = 4996  # not a whole number of panels


def gpt(seed=0, n_embd=40, **how):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**dict(n_layer=1, n_head=2, n_embd=n_embd, vocab_size=V, block_size=64, bias=False) | how))


def executor_of(model, monkeypatch, screened=True, threads=TWO):
    monkeypatch.setattr(weights, 'CACHED', 0 if screened else math.inf)
    executor = CPUExecutor(model, threads=threads)
    assert executor.packed.is_screened == screened
    return executor


def logits_of(executor, prompts, n_largest):
    """The logits of one step after these prompts."""
    settings = dict(temperature=0.0) if n_largest == 1 else dict(top_k=n_largest, temperature=1.0)
    slots, texts = Slots(executor), [Text(prompt, V, **settings) for prompt in prompts]
    slots.run({text: len(text.tokens) for text in texts}, 1)
    batch, logits = slots.batch({text: 1 for text in texts}, 1), torch.empty(1, len(texts), V)
    executor.steps(batch, np.arange(len(texts)), batch.tokens, 0, 1, logits)
    return logits[0]


def rows_alike(w):
    w[1::2] = w[::2]  # logits that are equal


def rows_nearly_alike(w):
    w[:] = w[0] + 1e-6 * w


def tiny(w):
    w *= 1e-30


WEIGHTS = [lambda w: None, rows_alike, rows_nearly_alike, tiny,
           lambda w: w[::997].mul_(1000), lambda w: w[:, 7].mul_(500)]  # a few large rows, one large input


@pytest.mark.parametrize('n_largest', sizes([1, V // 64], [1, 2, 50, V // 64]))
@pytest.mark.parametrize('changed', WEIGHTS)
@pytest.mark.parametrize('seed,n_embd', sizes([(2, 130)], [(0, 40), (1, 64), (2, 130)]))
def test_the_largest_logits_have_the_bits_of_all_and_none_of_them_is_left_out(
        seed, n_embd, changed, n_largest, monkeypatch):
    model = gpt(seed, n_embd)
    with torch.no_grad():
        changed(model.lm_head.weight)
    prompts = [torch.randint(V, (n,)).tolist() for n in (3, 1, 9, 5)[:1 + seed * 3 // 2]]
    every = logits_of(executor_of(model, monkeypatch, False), prompts, n_largest)
    for threads in {1, TWO}:
        some = logits_of(executor_of(model, monkeypatch, threads=threads), prompts, n_largest)
        kept = some > -math.inf
        assert torch.equal(some[kept], every[kept])
        least = every.topk(n_largest).values[:, -1:]
        assert (kept | (every < least)).all()
        if changed not in (rows_alike, rows_nearly_alike, tiny):
            assert (kept.sum(dim=1) < 4 * n_largest + 40).all()  # most are left out


@pytest.mark.parametrize('settings', [
    dict(temperature=0.0), dict(top_k=20), dict(top_k=1), dict(top_k=70, top_p=0.7, temperature=1.3),
    dict(top_k=40, min_p=0.1), dict(top_k=20, repetition_penalty=1.2), dict(top_k=79), dict(top_p=0.9),
    dict(top_k=20, logit_bias={5: 9.0}), dict(temperature=0.0, presence_penalty=9.0),
    dict(temperature=0.0, stop_ids={*range(V)} - {5}, min_tokens=99)])
def test_the_same_tokens_are_drawn(settings, monkeypatch):
    """Of 3 rows, which have the settings or draw the likeliest token, and of 5, of which all logits are computed."""
    model, hows = gpt(3, 64, n_layer=2), (settings, dict(temperature=0.0), settings)
    for rows in hows, hows[:1] * 5:
        requests = [([7, i, 9], 40, dict(seed=i) | how) for i, how in enumerate(rows)]
        some, every = (given(Engine(model, executor_of(model, monkeypatch, screened)), requests)
                       for screened in (True, False))
        assert some == every


@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_logits_that_are_not_numbers(bad, monkeypatch):
    model = gpt(4)
    with torch.no_grad():
        model.lm_head.weight[4321, 5] = bad
    monkeypatch.setattr(weights, 'CACHED', 0)
    executor = CPUExecutor(model)
    assert not executor.packed.is_screened  # its bounds would say nothing
    with torch.no_grad():
        model.lm_head.weight[4321, 5] = 0.0
        model.transformer.ln_f.weight[3] = bad
    executor = executor_of(model, monkeypatch)
    slots, text = Slots(executor), Text([1], V)
    assert executor.n_largest([text], [False]) == 1 and executor.n_largest([text], [True]) == 0
    with pytest.raises(NotNumbers):
        slots.run({text: 1}, 1)


def scaled(of_head, of_norm):
    def scale(model):
        model.lm_head.weight[9] *= of_head
        model.transformer.ln_f.weight *= of_norm
    return scale


def untie(model):
    """The config still says that lm_head is the embedding."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.roll(7, 0))


@pytest.mark.parametrize('how, change, is_screened, stays', [
    ({}, lambda model: model.lm_head.weight.copy_(model.lm_head.weight.roll(11, 0)), True, True),
    ({}, lambda model: rows_nearly_alike(model.lm_head.weight), True, False), ({}, scaled(1, 1e18), True, False),
    ({}, scaled(1e21, 1e-12), False, False), ({}, untie, False, False),
    ({}, lambda model: model.bfloat16(), False, False),
    (dict(tied=False), lambda model: None, False, False), (dict(n_layer=40), lambda model: None, False, False)])
def test_changed_models_with_and_without_a_screen_draw_the_same_tokens(how, change, is_screened, stays, monkeypatch):
    """Where too few are left out, later steps, of the same call too, compute all logits, until weights change."""
    def tokens(engine):
        return engine.generate([[1, 2], [3]], 20, top_k=9)
    model = gpt(7, **how)
    monkeypatch.setattr(weights, 'CACHED', 0)
    executor = CPUExecutor(model)
    engine = Engine(model, executor)
    before = tokens(engine)
    with torch.no_grad():
        change(model)
    found = tokens(engine)
    assert executor.packed.is_screened == stays and (found == before) == bool(how)
    executor.refresh()
    assert executor.packed.is_screened == is_screened and not CPUExecutor(model, 'int8').packed.is_screened
    monkeypatch.setattr(weights, 'CACHED', math.inf)
    assert found == tokens(Engine(model, CPUExecutor(model)))


def test_rounds_with_drafts_take_the_way_of_screened_steps(monkeypatch):
    model, asked = gpt(8), []
    monkeypatch.setattr(weights, 'CACHED', 0)
    executor = decode.best(model, 1, speculate='ngram')
    choice = executor.target.choice
    monkeypatch.setattr(executor.target, 'choice', lambda *how: asked.append(how) or choice(*how))
    Engine(model, executor).generate([[1, 2, 1, 2]], 40, temperature=0.0)
    assert (1, True) in asked and (1, False) not in asked and (1,) not in asked
