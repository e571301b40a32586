"""
Every way to compute a step, on every kind of model: positions, grouped heads, windows, sinks, GELUs. Random steps of
sequences (chunks of any length, any company, rewinding, branches) against a float64 judge without a cache, and texts of
up to 20 x block_size.
"""
import functools
import itertools
import random

import pytest
import torch
from cache_machine import N_SEQ, Machine
from conftest import sizes
from example_models import large
from plain_gpt import plain
from ways import DECODERS, WAYS, decoder_of, without_compilers  # noqa: F401  (a fixture)

from kvcache.contiguous import TupleCache

BLOCK = 16
WINDOWS = [(0, 0), (1, 0), (5, 0), (15, 0), (5, 2), (1, 1), (7, 3)]  # window, n_sink
CASES = [dict(position=position, n_kv_head=n_kv_head, window=window, n_sink=n_sink, gelu=gelu)
         for position, n_kv_head, (window, n_sink), gelu in itertools.product(
             ('learned', 'rope', 'alibi', 'none'), (4, 2, 1), WINDOWS, ('none', 'tanh'))]
SINKS = dict(position='rope', n_kv_head=2, window=5, n_sink=2)
CASES += [dict(position='rope', norm='rms', mlp='swiglu') | more for more in (
    dict(n_kv_head=2, bias=False, n_inner=40), dict(qkv_bias=True, bias=False, window=5),
    dict(tied=False, norm_eps=0.01), dict(head_dim=12, qk_norm=True, n_kv_head=1),
    dict(rope_scaling=(4.0, 1.0, 4.0, 16), n_kv_head=2, window=7, n_sink=3))]
some = sizes(random.Random(0).sample(CASES[:-5], 16) + CASES[-5:], CASES)
pytestmark = pytest.mark.usefixtures('without_compilers')


def case_name(case):
    return ' '.join(str(value) for value in case.values())


def model_of(seed=0, dtype=torch.float64, **case):
    return large(seed, dtype, **dict(n_head=4, n_embd=32) | case)


def close(logits, expected):
    """To 1e-10; of the numba decoder, which computes in float32, to 1e-4."""
    tolerance = 1e-4 if logits.dtype is torch.float32 else 1e-10
    torch.testing.assert_close(logits.double(), expected, atol=tolerance, rtol=tolerance)


class TupleMachine(Machine):
    """
    Every second step of several sequences brings as many tokens of each, so that it is one call of the decoder. Shifts
    of tuples: see test_full_context.py.
    """

    def step(self, new, starts=None, as_tensor=False):
        if starts is None and self.choose.random() < 0.5:
            n = min(map(len, new.values()))
            new = {handle: tokens[:n] for handle, tokens in new.items()}
        super().step(new, starts, as_tensor)

    def shift(self):
        pass


@functools.cache
def logits_behind(case, seed, dtype, text):
    """Of the plain GPT: the same for all ways. case: a tuple of pairs."""
    return plain(model_of(seed, dtype, **dict(case)), torch.tensor([text]))[0, -1]


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('case', some, ids=case_name)
@torch.no_grad()
def test_any_steps_give_the_logits_of_the_plain_gpt(case, way):
    """In the tuples in which `stream` keeps its sequences."""
    for seed in range(sizes(1, 3)):
        dtype = torch.float32 if way == 'cpu' else torch.float64
        model = model_of(seed, dtype, **case)
        cache, n_judged = TupleCache(model, N_SEQ, decoder_of(way, model)), []

        def judge(handle, text, logits):
            n_judged.append(handle)
            close(logits, logits_behind(tuple(case.items()), seed, dtype, tuple(text)))
        machine = TupleMachine(cache, CASES.index(case) + len(CASES) * seed, judge)  # other choices for each case
        machine.most = min(machine.most, 5 * BLOCK)  # longer texts: below
        machine.run(sizes(40, 60))
        assert len(n_judged) > 5 and {each.shape for layer in cache.layers for each in layer.caches} == {
            (N_SEQ, model.config.n_kv_head, model.config.n_slots, model.config.head_dim)}
        machine.end()


@pytest.mark.parametrize('case', some[::sizes(4, 1)], ids=case_name)
def test_one_uncached_pass_gives_the_logits_of_the_plain_gpt(case):
    model = model_of(**case)
    idx = torch.randint(29, (2, min(model.config.max_positions, sizes(6, 20) * BLOCK)))
    with torch.no_grad():
        for how in (dict(use_cache=False), dict(use_cache=True)):
            close(model(idx, targets=idx, **how)[0], plain(model, idx))


@functools.cache
def uncached_text(case, seed):
    """(model, prompt, the text that it generates): two rows, up to 20 x block_size."""
    model = model_of(seed, **dict(case))
    idx = torch.randint(29, (2, (5, BLOCK, BLOCK + 9)[seed]))
    return model, idx, drawn(model, idx, seed, sizes(10 if dict(case) == SINKS else 3, 20) * BLOCK)


def drawn(model, idx, seed, length, **cached):
    torch.manual_seed(seed)
    return model.generate(idx, length - idx.size(1), temperature=(0.8, 0)[seed % 2], top_k=20, **cached)


@pytest.mark.parametrize('way', DECODERS)
@pytest.mark.parametrize('case', [
    SINKS, dict(position='alibi', window=5, n_sink=1), dict(position='none', n_kv_head=1, window=7, gelu='tanh'),
    dict(position='rope'), dict(position='alibi'), dict(position='none'), dict(n_kv_head=1, window=6)], ids=case_name)
def test_tokens_are_those_without_a_cache(case, way):
    for seed in range(sizes(1, 3)):
        model, idx, text = uncached_text(tuple(case.items()), seed)
        assert torch.equal(drawn(model, idx, seed, text.size(1), use_cache=True, decoder=decoder_of(way, model)), text)


@pytest.mark.parametrize('way', WAYS)
@torch.no_grad()
def test_a_window_that_was_put_on_a_model(way):
    """`with_window` shares the weights. A decoder of the copy has the window, a decoder of the original has none."""
    model = model_of(position='rope')
    windowed, idx = model.with_window(BLOCK, 1), torch.randint(29, (2, 6 * BLOCK))
    decoders, expected = [decoder_of(way, m) for m in (model, windowed)], plain(windowed, idx)
    cache = decoders[1](idx[:, :40], None)[1]
    for i in range(40, 6 * BLOCK):
        logits, cache = decoders[1](idx[:, i:i + 1], cache)
        close(logits[:, 0], expected[:, i])
    close(decoders[0](idx[:, :BLOCK], None)[0][:, 0], plain(model, idx[:, :BLOCK])[:, -1])
    with pytest.raises(ValueError, match='out of context'):
        decoders[0](idx[:, :BLOCK + 1], None)


@pytest.mark.parametrize('way', WAYS)
@torch.no_grad()
def test_slots_that_are_not_the_texts_are_never_read(way):
    """
    In a ring those of positions that are not written yet. (Those that a window has passed are read and hidden, so they
    hold numbers.)
    """
    for case in (dict(), SINKS):
        model = model_of(**case)
        text, decoder = torch.randint(29, (2, BLOCK)), decoder_of(way, model)
        expected, cache = plain(model, text), decoder(text[:, :5], None)[1]
        for t in range(5, 12 if case else BLOCK):
            for cached in (cached for layer in cache for cached in layer[:2]):
                cached[:, :, t:] = 1e4 if way in ('compiled', 'graph') else float('nan')  # static shapes read zeros
            logits, cache = decoder(text[:, t:t + 1], cache)
            close(logits[:, 0], expected[:, t])


def test_both_gelus_far_from_zero():
    """Inputs of the GELU are as large as 20 here, where the two differ by up to 5e-4 and overflow would show."""
    for gelu in ('none', 'tanh'):
        model = model_of(dtype=torch.float32, gelu=gelu)
        with torch.no_grad():
            for block in model.transformer.h:
                block.mlp.c_fc.weight.mul_(10)
        idx = torch.randint(29, (2, BLOCK))
        logits = decoder_of('cpu', model)(idx, None)[0][:, 0].double()
        torch.testing.assert_close(logits, plain(model, idx)[:, -1], atol=2e-5, rtol=2e-5)
