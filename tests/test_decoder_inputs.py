"""Tokens and caches that a decoder takes, and those that it refuses before it has written anything."""
import pytest
import torch
from test_cache_exactness import large

import decode
from decode import cpu
from decode.cpu import CPUDecoder
from model import GPT, LayerKVCache

BLOCK = 16


def f32(seed, **changes):
    return large(seed, torch.float32, **changes)


TOKEN = torch.zeros(1, 1, dtype=torch.long)


@pytest.mark.parametrize('bad', [
    lambda d, c: d(torch.tensor([[29]]), c), lambda d, c: d(torch.tensor([[-1]]), c),
    lambda d, c: d(torch.tensor([[10 ** 12]]), None), lambda d, c: d(TOKEN.expand(1, BLOCK), c),
    lambda d, c: d(TOKEN.expand(2, 1), c), lambda d, c: d(TOKEN, [layer._replace(cache_pos=BLOCK) for layer in c]),
    lambda d, c: d(TOKEN, [layer._replace(cache_pos=-1) for layer in c]), lambda d, c: d(TOKEN, c[:1]),
    lambda d, c: d(TOKEN, c + c), lambda d, c: d(TOKEN, [LayerKVCache(a.double(), b.double(), p) for a, b, p in c]),
    lambda d, c: d(TOKEN, [LayerKVCache(a.transpose(2, 3).contiguous().transpose(2, 3), b, p) for a, b, p in c]),
    lambda d, c: d(torch.zeros(1, 0, dtype=torch.long), c), lambda d, c: d(torch.zeros(1, 1), c),
])
def test_what_does_not_fit_is_refused_and_nothing_is_written(bad):
    model = f32(7)
    decoder = CPUDecoder(model)
    _, cache = decoder(torch.randint(29, (1, 6)), None)
    before = [t.clone() for layer in cache for t in layer[:2]]
    with pytest.raises(ValueError):
        bad(decoder, cache)
    assert all(torch.equal(a, b) for a, b in zip(before, (t for layer in cache for t in layer[:2])))


@pytest.mark.parametrize('pos', [0, 3, torch.tensor([3])])
@pytest.mark.parametrize('wrong', ['last token', 'room'])
def test_a_long_prefill_is_checked_once_and_before_its_first_chunk(monkeypatch, pos, wrong):
    model, checks = f32(7, block_size=64), []
    decoder, whole = CPUDecoder(model), GPT.checked_input
    monkeypatch.setattr(cpu, 'CHUNK', 8)
    monkeypatch.setattr(GPT, 'checked_input', lambda *args: checks.append(args) or whole(*args))
    idx = torch.randint(29, (1, 40))
    expected, cache = decoder(idx, None)
    assert len(checks) == 1
    cache = [layer._replace(cache_pos=pos) for layer in cache]
    for bound in (False, True):  # a cache that the last step did not see, and the same again
        if not bound:
            cache = [layer.clone() for layer in cache]
        checks.clear()
        decoder(idx, cache)
        assert len(checks) == (not bound or torch.is_tensor(pos))  # of an int the kernel checks it all
    bad, at = idx.clone(), pos
    if wrong == 'last token':
        bad[0, -1] = 29
    else:
        at = pos + 30
    before = [t.clone() for layer in cache for t in layer[:2]]
    for layers in (cache, [layer.clone() for layer in cache]):
        with pytest.raises(ValueError):
            decoder(bad, [layer._replace(cache_pos=at) for layer in layers])
        assert all(torch.equal(a, b) for a, b in zip(before, (t for layer in layers for t in layer[:2])))


@pytest.mark.parametrize('make', [lambda: decode.EagerDecoder, lambda: CPUDecoder])
def test_integers_are_taken_and_anything_else_is_refused(make):
    """On a cache that the last step has seen as on a new one, and whatever the dtype of the integers."""
    model, idx = f32(9), torch.randint(29, (2, 5))
    decoder = make()(model)
    expected, _ = decoder(idx[:, :1], decoder(idx, None)[1])
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        _, cache = decoder(idx.to(dtype), None)
        for pos in (5, torch.full((2,), 5, dtype=dtype)):
            cache = [c._replace(cache_pos=pos) for c in cache]
            torch.testing.assert_close(decoder(idx[:, :1].to(dtype), cache)[0], expected, atol=1e-5, rtol=1e-5)
    for bad in (torch.tensor([5]), torch.tensor([5.0, 5.0]), 5.0, torch.tensor([True, True]),
                torch.tensor([[5], [5]]), None, '5'):
        with pytest.raises(ValueError):
            decoder(idx[:, :1], [c._replace(cache_pos=bad) for c in cache])
    for bad in (idx[:, :1].float(), idx[:, :1] > 0, idx[0], idx[:, :0], idx[:, :1].tolist()):
        with pytest.raises(ValueError):
            decoder(bad, cache)
        with pytest.raises(ValueError):
            decoder(bad, None)


def test_models_made_in_inference_mode():
    with torch.inference_mode():
        model = f32(3)
    idx = torch.randint(29, (2, 4))
    decoder = decode.best(model, 2)
    assert 'numba' in decoder.name
    got = model.generate(idx, 40, temperature=0, use_cache=True, decoder=decoder)
    assert torch.equal(got, model.generate(idx, 40, temperature=0))


def test_caches_and_tokens_elsewhere_are_refused():
    model, idx = f32(8), torch.randint(29, (1, 4))
    decoder = CPUDecoder(model)
    _, cache = decoder(idx, None)
    with pytest.raises(ValueError, match='on the CPU'):
        decoder(idx[:, :1].to('meta'), [LayerKVCache(k.to('meta'), v.to('meta'), pos) for k, v, pos in cache])
    for pos in (2**70, -2**70, -1):
        with pytest.raises(ValueError, match='cache_pos|out of context'):
            decoder(idx[:, :1], [layer._replace(cache_pos=pos) for layer in cache])


def test_an_empty_batch():
    model = f32(8)
    logits, cache = CPUDecoder(model)(torch.zeros(0, 3, dtype=torch.int64), None)
    assert logits.shape == (0, 1, 29) and len(cache) == 2
