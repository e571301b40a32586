"""
The decoders on models with rotary positions, ALiBi or none, grouped heads, windows and sinks. Each step is held against
the model's own uncached pass over the whole text, in float64. The numba decoder computes in float32.
"""
import copy
import itertools
import random

import pytest
import torch
from conftest import sizes
from test_cache_exactness import large
from test_compiled_decoder import needs_compiler
from test_graph_decoder import StepAgain

import decode
from decode import EagerDecoder, eager, graphs
from decode.compiled import CompiledDecoder
from decode.cpu import CPUDecoder
from decode.graphs import GraphDecoder
from positions import RollingKVCache

BLOCK = 16
WINDOWS = [(0, 0), (1, 0), (5, 0), (5, 2), (7, 1)]  # window, n_sink
CASES = [dict(position=position, n_kv_head=n_kv_head, window=window, n_sink=n_sink, gelu=gelu)
         for position, n_kv_head, (window, n_sink), gelu in itertools.product(
             ('learned', 'rope', 'alibi', 'none'), (4, 2, 1), WINDOWS, ('none', 'tanh'))]
CASES.remove(dict(position='learned', n_kv_head=4, window=0, n_sink=0, gelu='none'))
SINKS = dict(position='rope', n_kv_head=2, window=5, n_sink=2)
some = sizes(random.Random(0).sample(CASES, 12), CASES)


def case_name(case):
    return ' '.join(str(value) for value in case.values())


def model_of(case, seed=0, dtype=torch.float64):
    return large(seed, dtype, **dict(n_head=4) | case)


@pytest.fixture(params=['eager', 'compiled', 'graph', 'cpu'])
def make_decoder(request, monkeypatch):
    """
    A function that makes a model's decoder, which computes its own step, not the model's. The compiled one's is run
    without a compiler, the graph's without CUDA, the numba one has a copy of the model in float32.
    """
    if request.param == 'cpu':
        return lambda model: CPUDecoder(copy.deepcopy(model).float())
    if request.param == 'eager':
        monkeypatch.setattr(eager, 'is_plain', lambda model, is_plain=eager.is_plain: is_plain(model) or pytest.fail())
        return EagerDecoder
    if request.param == 'graph':
        monkeypatch.setattr(graphs, 'captured', StepAgain)
        return GraphDecoder
    monkeypatch.setattr(torch, 'compile', lambda step, **how: step)
    return CompiledDecoder


def length_of(model):
    """How long a text to try: all positions that there are, or several times what a rolling cache holds."""
    return min(model.config.max_positions, 40 + 6 * model.config.n_slots)


def close(a, b, tolerance=1e-10):
    tolerance = max(tolerance, 1e-4) if a.dtype is torch.float32 else tolerance
    torch.testing.assert_close(a.to(b.dtype), b, atol=tolerance, rtol=tolerance)


def ragged_step(decoder, idx, at, cache):
    """One step of row i of idx with its token at position at[i], an int: (logits (B, vocab_size), cache)."""
    tokens = torch.stack([row[i:i + 1] for row, i in zip(idx, at)])
    logits, cache = decoder(tokens, [layer._replace(cache_pos=torch.tensor(at)) for layer in cache])
    return logits[:, 0], cache


@pytest.mark.parametrize('case', some, ids=case_name)
@torch.no_grad()
def test_any_chunks_give_the_logits_of_one_uncached_pass(case, make_decoder):
    """Prefills that are longer than the window, single tokens and chunks in turn, until rows have moved many times."""
    for seed, first in enumerate(sizes((13,), (1, 6, 13))):
        model, chooser = model_of(case, seed), random.Random(seed)
        length = length_of(model)
        decoder, idx = make_decoder(model), torch.randint(29, (2, length))
        expected, cache, end = model(idx, idx)[0], None, 0
        moves = set()
        while end < length:
            T = first if end == 0 else min(length - end, chooser.choice([1, 1, 1, 1, 2, case['window'] + 1, 14]))
            logits, cache = decoder(idx[:, end:end + T], cache)
            end += T
            close(logits[:, 0], expected[:, end - 1])
            assert [layer.cache_pos for layer in cache] == [end, end]
            assert {layer.k_cache.shape for layer in cache} == {(2, case['n_kv_head'], model.config.n_slots, 4)}
            moves.update(layer.first[0].item() for layer in cache[:case['window']])
        assert len(moves) > 5 or length == BLOCK


@pytest.mark.parametrize('case', sizes(some[:6], CASES), ids=case_name)
@torch.no_grad()
def test_sequences_of_different_lengths_in_one_batch(case, make_decoder):
    """Each moves its rows when it has to. When their lengths are the same again, cache_pos may be an int."""
    model = model_of(case)
    length, window = length_of(model), case['window']
    decoder, idx = make_decoder(model), torch.randint(29, (3, length))
    expected, cache = model(idx, idx)[0], decoder(idx[:, :7], None)[1]
    at = [7, 6, 7]  # back by one, which the window allows
    while max(at) + 1 < length:
        logits, cache = ragged_step(decoder, idx, at, cache)
        close(logits, expected[range(3), at])
        at = [i + 1 for i in at]
        assert cache[0].cache_pos.tolist() == at
        if window and at[0] == 2 * window + 9:  # the first one goes on alone, as far as the buffer has room
            alone = [RollingKVCache(k[:1], v[:1], at[0], first[:1]) for k, v, _, first in cache]
            logits, _ = decoder(idx[:1, at[0]:at[0] + 2], alone)
            close(logits[:, 0], expected[:1, at[0] + 1])
            at[0] += 2


@torch.no_grad()
def test_one_length_again_after_rows_moved_at_different_times(make_decoder):
    """`first` differs between the sequences, and cache_pos is an int: each has slots of its own."""
    model = model_of(SINKS)
    decoder, idx = make_decoder(model), torch.randint(29, (2, 60))
    expected, cache = model(idx, idx)[0], decoder(idx[:, :14], None)[1]
    assert cache[0].first.tolist() == [8, 8]
    # the second sequence goes on alone, with two tokens at the end: its rows move one position earlier
    alone = [RollingKVCache(k[1:], v[1:], 14, first[1:]) for k, v, _, first in cache]
    for i, j in ((14, 15), (15, 16), (16, 17), (17, 19)):
        _, alone = decoder(idx[1:, i:j], alone)
    for i in range(14, 20):
        logits, cache = ragged_step(decoder, idx, [i, 19], cache)
        close(logits, expected[[0, 1], [i, 19]])
    assert cache[0].first.tolist() == [14, 13]
    cache, firsts = [layer._replace(cache_pos=20) for layer in cache], set()
    for i in range(20, 60):
        logits, cache = decoder(idx[:, i:i + 1], cache)
        close(logits[:, 0], expected[:, i])
        assert cache[0].cache_pos == i + 1
        firsts.add(tuple(cache[0].first.tolist()))
    assert len(firsts) > 10 and all(a != b for a, b in firsts)


@pytest.mark.parametrize('window, n_sink', WINDOWS[1:])
@torch.no_grad()
def test_rewinding_within_the_buffer_and_further(window, n_sink, make_decoder):
    model = model_of(dict(position='rope', window=window, n_sink=n_sink))
    decoder, idx, other = make_decoder(model), *torch.randint(29, (2, 1, 60))
    for end in sizes((n_sink + 1, 20, 33, 34, 39), range(n_sink + 1, 40)):
        _, cache = decoder(idx[:, :end], None)
        first = cache[0].first.item()
        last_refused = first + window - 2 if first > n_sink else -1  # its window begins before what is stored
        for back in (*range(n_sink + 1), *range(max(n_sink + 1, last_refused), end)):
            rewound = [layer.clone()._replace(cache_pos=back) for layer in cache]
            if n_sink < back == last_refused:
                with pytest.raises(ValueError, match='not in the cache any more.*compute the sequence again'):
                    decoder(other[:, back:back + 1], rewound)
                assert all(torch.equal(a.k_cache, b.k_cache) for a, b in zip(rewound, cache))
                continue
            text = torch.cat((idx[:, :back], other[:, back:back + 3]), dim=1)
            for i in range(back, back + 3):
                logits, rewound = decoder(text[:, i:i + 1], rewound)
                close(logits, model(text[:, :i + 1])[0])


@pytest.mark.parametrize('case', [
    SINKS, dict(position='alibi', window=5, n_sink=1), dict(position='none', n_kv_head=1, window=7, gelu='tanh'),
    dict(position='rope'), dict(position='alibi'), dict(position='none'), dict(n_kv_head=1, window=6)], ids=case_name)
def test_tokens_are_those_without_a_cache_up_to_20_block_sizes(case, make_decoder):
    for seed in range(sizes(1, 3)):
        model = model_of(case, seed)
        idx, decoder = torch.randint(29, (2, (5, BLOCK, BLOCK + 9)[seed])), make_decoder(model)
        length, outputs = sizes(20 if case is SINKS else 4, 20) * BLOCK, []
        for cached in (dict(), dict(use_cache=True, decoder=decoder)):
            torch.manual_seed(seed)
            text = model.generate(idx, length - idx.size(1), temperature=(0.8, 0)[seed % 2], top_k=20, **cached)
            outputs.append(text)
        assert outputs[0].size(1) == length and torch.equal(*outputs)


@torch.no_grad()
def test_a_window_that_was_put_on_a_model(make_decoder):
    """`with_window` shares the weights. A decoder of the copy has the window, a decoder of the original has none."""
    model = model_of(dict(position='rope'))
    windowed, idx = model.with_window(BLOCK, 1), torch.randint(29, (2, 6 * BLOCK))
    decoders, expected = (make_decoder(model), make_decoder(windowed)), windowed(idx, idx)[0]
    cache = decoders[1](idx[:, :40], None)[1]
    for i in range(40, 6 * BLOCK):
        logits, cache = decoders[1](idx[:, i:i + 1], cache)
        close(logits[:, 0], expected[:, i])
    close(decoders[0](idx[:, :BLOCK], None)[0], model(idx[:, :BLOCK])[0])
    with pytest.raises(ValueError, match='out of context'):
        decoders[0](idx[:, :BLOCK + 1], None)


@torch.no_grad()
def test_after_an_interrupted_step(make_decoder, monkeypatch):
    """Between two layers, each can go on. While rows of a layer move, it loses what it holds, and says so."""
    model = model_of(SINKS)
    decoder, idx = make_decoder(model), torch.randint(29, (1, 60))
    expected, cache = model(idx, idx)[0], decoder(idx[:, :12], None)[1]
    moved = [layer.clone()._replace(cache_pos=11) for layer in cache]
    moved[0].make_room(2, 5, 2)  # for two tokens, but now there comes one
    assert moved[0].first == 7 and moved[1].first == 2
    for i in range(11, 40):
        logits, moved = decoder(idx[:, i:i + 1], moved)
        close(logits[:, 0], expected[:, i])
    clone, clones = torch.Tensor.clone, itertools.count()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        def interrupted(self):
            if next(clones) == 1:  # the keys have moved, the values have not
                raise KeyboardInterrupt
            return clone(self)
        patch.setattr(torch.Tensor, 'clone', interrupted)
        decoder(idx[:, 12:13], cache)
    with pytest.raises(ValueError, match='not in the cache any more'):
        decoder(idx[:, 12:13], cache)


@pytest.mark.parametrize('case', [SINKS, dict(position='alibi', window=5), dict(position='none', n_kv_head=1)],
                         ids=case_name)
@torch.no_grad()
def test_autocast_and_other_dtypes(case):
    """What the model itself computes in these dtypes; a GELU may be rounded in another way."""
    idx = torch.randint(29, (2, 15))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        model = model_of(case, dtype=dtype)
        decoder, mine, theirs = EagerDecoder(model), None, None
        for i, j in ((0, 9), (9, 10), (10, 13), (13, 14), (14, 15)):
            (got, mine), (expected, theirs) = decoder(idx[:, i:j], mine), model.step(idx[:, i:j], theirs)
            close(got, expected, tolerance * expected.abs().max().item())
            assert got.dtype is mine[0].k_cache.dtype is dtype
    model = model_of(case, dtype=torch.float32)
    with torch.autocast('cpu', torch.bfloat16):
        (got, mine), (expected, theirs) = EagerDecoder(model)(idx[:, :9], None), model.step(idx[:, :9], None)
        assert mine[0].k_cache.dtype is theirs[0].k_cache.dtype is torch.bfloat16
        close(got.float(), expected.float(), 0.1 * expected.abs().max().item())


@torch.no_grad()
def test_a_gelu_that_is_not_the_configs_is_the_models_own(monkeypatch):
    """The eager decoder knows both, of a model whose blocks all have the one that its config says."""
    steps, step = [], eager.step
    monkeypatch.setattr(eager, 'step', lambda *args: steps.append(args) or step(*args))
    idx = torch.randint(29, (2, 6))
    for gelu, other in (('tanh', 'none'), ('none', 'tanh')):
        model, n = model_of(dict(gelu=gelu)), len(steps)
        close(EagerDecoder(model)(idx, None)[0], model(idx)[0])
        assert len(steps) == n + 1
        model.transformer.h[0].mlp.gelu = torch.nn.GELU(approximate=other)
        close(EagerDecoder(model)(idx, None)[0], model(idx)[0])
        assert len(steps) == n + 1


@torch.no_grad()
def test_plain_tuples_of_four(make_decoder):
    model, idx = model_of(SINKS), torch.randint(29, (1, 40))
    decoder, expected = make_decoder(model), model(idx, idx)[0]
    cache = [tuple(layer) for layer in decoder(idx[:, :9], None)[1]]
    for i in range(9, 40):
        logits, cache = decoder(idx[:, i:i + 1], [tuple(layer) for layer in cache])
        close(logits[:, 0], expected[:, i])
        assert len(cache[0]) == 4
    for bad in (cache[:1], [layer[:3] for layer in cache], [(*layer[:2], -1, layer[3]) for layer in cache]):
        with pytest.raises(ValueError):
            make_decoder(model)(idx[:, :1], bad)


def test_settings_that_change_later():
    model = model_of(dict(), dtype=torch.float32)
    decoder, idx = CPUDecoder(model), torch.randint(29, (1, 4))
    expected = model.generate(idx, 9, temperature=0)
    assert torch.equal(model.generate(idx, 9, temperature=0, use_cache=True, decoder=decoder), expected)
    model.config.gelu = 'tanh'
    for block in model.transformer.h:
        block.mlp.gelu = torch.nn.GELU('tanh')
    torch.testing.assert_close(decoder(idx, None)[0], model(idx, use_cache=False)[0], atol=1e-5, rtol=1e-5)
    model.config.gelu = 'none'
    model.transformer.h[0].mlp.gelu = torch.nn.GELU()
    with pytest.raises(ValueError, match="expects GELU"):
        decoder(idx, None)


def test_the_cpu_decoder_computes_both_gelus():
    """Inputs of the GELU are as large as 20 here, where the two differ by up to 5e-4 and overflow would show."""
    for gelu in ('none', 'tanh'):
        model = model_of(dict(gelu=gelu), dtype=torch.float32)
        with torch.no_grad():
            for block in model.transformer.h:
                block.mlp.c_fc.weight.mul_(10)
        decoder, idx = decode.best(model, 2, name='cpu'), torch.randint(29, (2, BLOCK))
        logits, kv_cache = decoder(idx[:, :3], None)
        for t in range(3, BLOCK):
            logits, kv_cache = decoder(idx[:, t:t + 1], kv_cache)
            expected = model.double()(idx[:, :t + 1], use_cache=False)[0].float()
            model.float()
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-5)


@needs_compiler
@pytest.mark.parametrize('case', sizes(
    [SINKS | dict(gelu='tanh')],
    [SINKS | dict(gelu='tanh'), dict(position='alibi', window=6, n_sink=1), dict(position='alibi', n_kv_head=1),
     dict(position='rope', n_kv_head=1), dict(position='none', window=4), dict(window=6), dict(position='none')]),
    ids=case_name)
@torch.inference_mode()
def test_one_graph_is_compiled_however_often_rows_move(case):
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    counters.clear()
    model = model_of(case, dtype=torch.float32)
    decoder, idx = CompiledDecoder(model), torch.randint(29, (2, 5))
    expected = model.generate(idx, 6 * BLOCK, temperature=0)
    assert torch.equal(model.generate(idx, 6 * BLOCK, temperature=0, use_cache=True, decoder=decoder), expected)
    steps, at = torch.randint(29, (2, length_of(model))), [7, 6]
    cache, expected = decoder(steps[:, :7], None)[1], model(steps, steps)[0]
    while max(at) + 1 < steps.size(1):
        logits, cache = ragged_step(decoder, steps, at, cache)
        close(logits, expected[range(2), at], 1e-4)
        at = [i + 1 for i in at]
    assert counters['stats']['unique_graphs'] == 1 and not counters['graph_break']
