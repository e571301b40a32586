"""One rule for token ids and positions everywhere: integers of any dtype are taken, anything else is a ValueError."""
import numpy as np
import pytest
import torch
from example_models import f32
from ways import DECODERS, decoder_of

from benchmarks.loss import negative_log_likelihoods
from generation import generate, stream
from kvcache import KINDS, make_cache
from model import GPT

DTYPES = [getattr(torch, name) for name in ('int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64')
          if hasattr(torch, name)]
IDX = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@torch.no_grad()
def test_integers_of_any_dtype_are_the_same_tokens(dtype):
    m, idx = f32(), IDX.to(dtype)
    assert torch.equal(m(idx)[0], m(IDX)[0]) and torch.equal(m(idx, use_cache=False)[0], m(IDX)[0])
    logits, loss, _ = m(idx, idx)
    assert torch.equal(logits, m(IDX, IDX)[0]) and loss == m(IDX, IDX)[1]
    for decoder in (decoder_of(way, m) for way in DECODERS):
        assert torch.equal(decoder(idx, None)[0], decoder(IDX, None)[0])
    expected = m.generate(IDX, 20, temperature=0)
    for how in (dict(temperature=0), dict(temperature=0, use_cache=True)):
        for got in (m.generate(idx, 20, **how), generate(m, idx, 20, **how)):
            assert got.dtype is torch.int64 and torch.equal(got, expected)
        assert torch.equal(torch.cat([IDX, *stream(m, idx, 20, **how)], dim=1), expected)
        assert generate(m, list(idx), 20, **how)[0][4:] == expected[0, 4:].tolist()
    assert m.generate(idx, 0).dtype is generate(m, idx, 0).dtype is torch.int64
    nll, same = (negative_log_likelihoods(m, tokens, skip=1)[0] for tokens in (idx, IDX))
    assert torch.equal(nll, same)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@torch.no_grad()
def test_positions_of_any_dtype_are_the_same_positions(dtype):
    m = f32(block_size=300)
    long = torch.randint(29, (2, 255))
    cache = m(long)[2]
    steps = {}
    for each in (torch.int64, dtype):
        pos = torch.tensor([120, 100] if dtype is torch.int8 else [255, 100]).to(each)
        logits, _, after = m(IDX[:, :3].to(each), kv_cache=[layer.clone()._replace(cache_pos=pos) for layer in cache])
        steps[each] = logits, after
        assert after[1].cache_pos.tolist() == [pos[0].item() + 3, 103]  # 258 is no uint8
    assert torch.equal(steps[dtype][0], steps[torch.int64][0])
    assert all(torch.equal(a.k_cache, b.k_cache) for a, b in zip(steps[dtype][1], steps[torch.int64][1]))


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('kind', KINDS)
@torch.no_grad()
def test_caches_for_sequences_take_them(kind, dtype):
    m = f32()
    cache = make_cache(m, kind, 2)
    handles = [cache.new(), cache.new()]
    cache.step(handles, [0, 0], IDX[:, :2].to(dtype))
    logits = cache.step(handles, [2, 2], list(IDX[:, 2:].to(dtype)))
    assert (logits - m(IDX)[0][:, 0]).abs().max() < 1e-4


NO_IDS = [IDX.float(), IDX.double(), IDX.half(), IDX.bool(), IDX.to(torch.complex64),
          IDX.tolist(), IDX.numpy(), None, 'text', 3]


@pytest.mark.parametrize('wrong', NO_IDS, ids=lambda x: str(getattr(x, 'dtype', type(x).__name__)))
def test_other_tokens_are_refused_in_words(wrong):
    m = f32()
    with torch.no_grad():
        cache = m(IDX)[2]
    asked = [lambda: m(wrong), lambda: m(wrong, IDX), lambda: m(wrong, kv_cache=cache),
             lambda: m(wrong, use_cache=False), lambda: m.checked_input(wrong, None)]
    decoders = [decoder_of(way, m) for way in DECODERS]
    asked += [lambda d=d: d(wrong, cache) for d in decoders]
    if wrong is not None:
        asked.append(lambda: m(IDX, wrong))
    for ask in asked:
        with pytest.raises(ValueError, match='integers'):
            ask()
    for kind in KINDS if isinstance(wrong, torch.Tensor) else ():  # the tokens of a step are tensors
        held = make_cache(m, kind, 4)
        handles = [held.new(), held.new()]
        for tokens in (wrong, list(wrong)):
            with pytest.raises(ValueError, match='integers'):
                held.step(handles, [0, 0], tokens)
        assert held.step(handles, [0, 0], IDX).shape == (2, 29)


@pytest.mark.parametrize('wrong', [
    IDX.float(), IDX.bool(), [[1.0, 2.0]], [[True, False]], ['ab'], 'ab', [[1, [2]]], [[2**70]], 3, None, [3, 4],
    [None], np.array([[0.5]]), [[29]],
], ids=str)
def test_prompts_that_are_no_integers_are_refused_at_the_call(wrong):
    for function in (generate, stream, GPT.generate):
        with pytest.raises(ValueError):
            function(f32(), wrong, 3)


@pytest.mark.parametrize('pos', [
    5.0, True, None, '5', torch.tensor(4), torch.tensor([4]), torch.tensor([[4], [4]]), torch.tensor([4.0, 4.0]),
    torch.tensor([True, True]), torch.tensor([4, 4, 4]), -1, torch.tensor([4, -1]), 14, torch.tensor([0, 14]),
], ids=str)
def test_other_positions_are_refused_in_words_and_nothing_is_written(pos):
    m = f32()
    with torch.no_grad():
        cache = m(IDX)[2]
    before = [layer.clone() for layer in cache]
    for positions in ([pos] * len(cache), [4, pos]):
        with pytest.raises(ValueError, match='cache_pos'):
            m(IDX[:, :3], kv_cache=[layer._replace(cache_pos=p) for layer, p in zip(cache, positions)])
    assert all(torch.equal(a.k_cache, b.k_cache) for a, b in zip(cache, before))
    if isinstance(pos, torch.Tensor) and pos.shape == (1,):
        return  # of one sequence, as below, this is a position
    for kind in KINDS:
        held = make_cache(m, kind, 2)
        handles = [held.new(), held.new()]
        held.step(handles, [0, 0], IDX)
        with pytest.raises(ValueError, match='cache_pos'):
            held.step(handles, [4, pos], IDX[:, :3])
        logits = held.step(handles, [4, 4], IDX[:, :3])
        assert (logits - m(torch.cat([IDX, IDX[:, :3]], dim=1))[0][:, 0]).abs().max() < 1e-4


@pytest.mark.parametrize('default', [torch.float64, torch.bfloat16, 'meta'], ids=str)
def test_torchs_defaults_do_not_get_into_a_generation(default):
    """Nor into caches and decoders, made before the default was set or after, and their logits."""
    m, prompts = f32(n_embd=64), [[1, 2, 3], [4], [5] * 16]
    policies = [dict(temperature=0, when_full=how) for how in ('crop', 'shift')]
    makers = [*(lambda kind=kind, bits=bits: dict(cache=make_cache(m, kind, 3, bits)) for kind in KINDS
                for bits in (0, 8)), *(lambda way=way: dict(decoder=decoder_of(way, m)) for way in ('eager', 'cpu'))]

    def results(ways):
        texts = [generate(m, prompts, 20, use_cache=True, **way, **policy) for way in ways for policy in policies]
        tensors = [t for way in ways if 'cache' in way for layer in way['cache'].layers for t in layer.tensors()]
        logits = [way['decoder'](IDX, None)[0].tolist() for way in ways if 'decoder' in way]
        return texts, [(t.dtype, t.device.type) for t in tensors], logits
    expected, kept = results([make() for make in makers]), [make() for make in makers]
    before = torch.get_default_dtype()
    try:
        if default == 'meta':
            torch.set_default_device('meta')
        else:
            torch.set_default_dtype(default)
        got = [results(kept), results([make() for make in makers])]
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert got == [expected, expected]
