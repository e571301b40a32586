"""
Each way to compute a step on the model's tuples: the same tokens, the same tuples, nothing written where something does
not fit. (The logits on all kinds of models: test_decoder_positions.py.)
"""
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import WEIGHTS, sizes
from example_models import f32
from hypothesis import given
from hypothesis import strategies as st
from ways import DECODERS, WAYS, decoder_of, without_compilers  # noqa: F401  (a fixture)

import decode
from decode import cpu
from decode.cpu import CPUDecoder
from decode.kernel.layout import WEIGHT_GROUP
from decode.weights import quantise, quantise_groups
from model import GPT, GPTConfig, LayerKVCache

BLOCK = 16
TIE = 1e-4  # two best logits closer than this may change places
TOKEN = torch.zeros(1, 1, dtype=torch.long)
every_way = pytest.mark.parametrize('way', WAYS)
pytestmark = pytest.mark.usefixtures('without_compilers')


def first_difference(model, a, b):
    """None, or how far apart the two best uncached logits are where a and b (B, T) part: a tie, or a mistake."""
    if torch.equal(a, b):
        return None
    row, at = (a != b).nonzero()[0].tolist()
    logits = model(a[row:row + 1, max(0, at - model.config.block_size):at], use_cache=False)[0][0, -1]
    return (logits[a[row, at]] - logits[b[row, at]]).abs().item()


@pytest.mark.parametrize('way, threads', [('eager', None), ('cpu', 1), ('cpu', 2)])
def test_tokens_are_those_without_a_cache(way, threads):
    """The matrix of test_kv_cache.py: seeds of weights, prompt and draws for each case, on to twice the window."""
    ties, n_generations = [], 0
    for s in range(sizes(5, 50)):
        torch.manual_seed(s)
        model = GPT(GPTConfig(block_size=BLOCK, vocab_size=65, n_layer=2, n_head=2, n_embd=32, bias=s % 2 == 0))
        decoder = CPUDecoder(model, threads=threads) if way == 'cpu' else decode.EagerDecoder(model)
        for T, temperature, batch in itertools.product([1, 6, BLOCK - 1, BLOCK, BLOCK + 1], [0.0, 0.8], [1, 4]):
            idx, outputs = torch.randint(65, (batch, T)), []
            for cached in (dict(), dict(use_cache=True, decoder=decoder)):
                torch.manual_seed(1000 + s)
                outputs.append(model.generate(idx, 2 * BLOCK, temperature=temperature, top_k=20, **cached))
            n_generations += 1
            gap = first_difference(model, *outputs)
            if gap is not None:
                where = f"prompt of {T}, temperature {temperature}, batch {batch}, seed {s}: {gap} apart"
                assert way == 'cpu' and temperature == 0 and gap < TIE, where
                ties.append(gap)
    print(f"{len(ties)} ties in {n_generations} generations: {ties}")
    assert 100 * len(ties) <= n_generations


@pytest.mark.parametrize('way, dtype, worst', [
    ('cpu', torch.float32, 2e-5), ('eager', torch.float64, 1e-12), ('eager', torch.float32, 1e-5),
    ('eager', torch.bfloat16, 0.1)])
@given(st.data())
def test_any_shape_any_chunks_any_batch(way, dtype, worst, data):
    """Logits and caches against the model's, whatever the sizes and however a sequence is cut."""
    n_head, head_dim = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 3, 8, 16, 20, 32, 48]))
    config = GPTConfig(block_size=data.draw(st.integers(1, 40)), vocab_size=data.draw(st.integers(2, 90)),
                       n_layer=data.draw(st.integers(1, 3)), n_head=n_head, n_embd=n_head * head_dim,
                       bias=data.draw(st.booleans()))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    model = GPT(config).eval().to(dtype)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    decoder = CPUDecoder(model, threads=data.draw(st.integers(1, 2))) if way == 'cpu' else decoder_of(way, model)
    idx = torch.randint(config.vocab_size, (data.draw(st.integers(1, 13)), config.block_size))
    mine = theirs = None
    start = 0
    with torch.no_grad():
        while start < config.block_size:
            T = data.draw(st.integers(1, config.block_size - start))
            logits, mine = decoder(idx[:, start:start + T], mine)
            expected, _, theirs = model(idx[:, start:start + T], kv_cache=theirs)
            start += T
            scale = expected.abs().max().clamp(min=0.01 if way == 'cpu' else 1)
            torch.testing.assert_close(logits / scale, expected / scale, atol=worst, rtol=0)
            for a, b in zip(mine, theirs):
                assert type(a) is LayerKVCache and a.cache_pos == b.cache_pos == start
                for x, y in zip(a[:2], b[:2]):
                    torch.testing.assert_close(x, y, atol=5 * worst * max(1, y.abs().max().item()), rtol=0)


def test_each_step_by_another_decoder():
    model = f32(1)
    decoders, idx = [decoder_of(way, model) for way in WAYS], torch.randint(29, (2, 5))
    turns = itertools.cycle([4, 0, 1, 2, 3, 1, 4, 4, 2, 0, 3])
    got = model.generate(idx, 40, temperature=0, use_cache=True, decoder=lambda *args: decoders[next(turns)](*args))
    assert torch.equal(got, model.generate(idx, 40, temperature=0))


@every_way
@torch.no_grad()
def test_it_works_in_place_and_rewinding_is_free(way):
    model = f32(2)
    decoder, idx = decoder_of(way, model), torch.randint(29, (1, 6))
    _, cache = decoder(idx, None)
    before = [t.data_ptr() for layer in cache for t in layer[:2]]
    first, after = decoder(idx[:, :1], cache)
    kept = first.clone()
    decoder(idx[:, 3:5], after)
    assert torch.equal(first, kept)  # logits belong to the caller
    again, _ = decoder(idx[:, :1], cache)
    assert torch.equal(first, again) and [t.data_ptr() for layer in after for t in layer[:2]] == before
    assert type(after[0]) is LayerKVCache and after[0].cache_pos == 7
    assert decoder(idx[:, :1], [tuple(layer) for layer in cache])[1][0][2] == 7


def moved(cache, pos):
    return [layer._replace(cache_pos=pos) for layer in cache]


MISFITS = {  # of a cache of two sequences with 6 tokens each
    'a token too many': lambda idx, c: (idx.repeat(1, 11), c), 'no token': lambda idx, c: (idx[:, :0], c),
    'floats': lambda idx, c: (idx.float(), c), 'bools': lambda idx, c: (idx > 0, c),
    'one dimension': lambda idx, c: (idx[0], c), 'another batch': lambda idx, c: (idx[:1], c),
    'a layer too few': lambda idx, c: (idx, c[:1]), 'layers too many': lambda idx, c: (idx, c + c),
    'a prompt too long': lambda idx, c: (idx.repeat(1, 17), None), 'no token at all': lambda idx, c: (idx[:, :0], None),
    'floats at first': lambda idx, c: (idx.float(), None), 'one dimension at first': lambda idx, c: (idx[0], None),
} | {f'position {pos}': lambda idx, c, pos=pos: (idx, moved(c, pos)) for pos in (
    BLOCK, -1, 2**70, -2**70, 5.0, True, None, '5', torch.tensor([3, BLOCK]), torch.tensor([5]),
    torch.tensor([5.0, 5.0]),
    torch.tensor([True, True]), torch.tensor([[5], [5]]))}
MISFITS_OF_THE_KERNEL = {
    'a token': lambda idx, c: (idx * 0 + 29, c), 'a negative token': lambda idx, c: (idx * 0 - 1, c),
    'a token in a later chunk': lambda idx, c: (torch.cat([idx.repeat(1, 8), idx * 0 + 29], dim=1), c),
    'a token at first': lambda idx, c: (idx * 0 + 10**12, None), 'a list': lambda idx, c: (idx.tolist(), c),
    'float64': lambda idx, c: (idx, [LayerKVCache(k.double(), v.double(), pos) for k, v, pos in c]),
    'transposed': lambda idx, c: (idx, [
        LayerKVCache(k.mT.contiguous().mT, v, pos) for k, v, pos in c]),
    'elsewhere': lambda idx, c: (idx.to('meta'), [LayerKVCache(k.to('meta'), v.to('meta'), pos) for k, v, pos in c])}


@pytest.mark.parametrize('way, misfit', [
    *itertools.product(WAYS, MISFITS), *itertools.product(['cpu'], MISFITS_OF_THE_KERNEL), ('eager', 'a list')])
@torch.no_grad()
def test_what_does_not_fit_is_refused_and_the_cache_is_as_it_was(way, misfit, monkeypatch):
    """On the cache of the last step, whose tensors a decoder knows, and on another one; a long text before its end."""
    monkeypatch.setattr(cpu, 'CHUNK', 4)
    model, idx = f32(7), torch.randint(29, (2, 7))
    decoder, expected = decoder_of(way, model), model(idx, use_cache=False)[0]
    _, cache = decoder(idx[:, :5], None)
    _, cache = decoder(idx[:, 5:6], cache)
    for held in (cache, [layer.clone() for layer in cache]):
        before = [t.clone() for layer in held for t in layer[:2]]
        with pytest.raises(ValueError):
            decoder(*(MISFITS | MISFITS_OF_THE_KERNEL)[misfit](idx[:, :1], held))
        assert all(torch.equal(a, b) for a, b in zip(before, (t for layer in held for t in layer[:2])))
        torch.testing.assert_close(decoder(idx[:, 6:], held)[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('way', DECODERS)
def test_a_decoder_computes_nothing_for_gradients(way):
    idx, decoder = torch.randint(29, (2, 9)), decoder_of(way, f32(3))
    _, cache = decoder(idx[:, :5], None)
    for tokens in (idx[:, 5:6], idx[:, 6:]):
        logits, cache = decoder(tokens, cache)
        assert not any(t.requires_grad for t in (logits, *(t for layer in cache for t in layer[:2])))


@every_way
def test_an_empty_batch(way):
    logits, cache = decoder_of(way, f32(8))(torch.zeros(0, 3, dtype=torch.int64), None)
    assert logits.shape == (0, 1, 29) and len(cache) == 2


def test_models_made_in_inference_mode():
    with torch.inference_mode():
        model = f32(3)
    idx = torch.randint(29, (2, 4))
    decoder = decode.best(model, 2)
    assert 'numba' in decoder.name
    got = model.generate(idx, 40, temperature=0, use_cache=True, decoder=decoder)
    assert torch.equal(got, model.generate(idx, 40, temperature=0))


@pytest.mark.parametrize('weights', WEIGHTS)
@pytest.mark.parametrize('where', ['weight', 'bias', 'norm', 'embedding'])
def test_a_nan_in_the_weights_reaches_the_logits(weights, where):
    model = f32(6, bias=True)
    spot = {'weight': model.transformer.h[0].mlp.c_fc.weight, 'bias': model.transformer.h[1].attn.c_attn.bias,
            'norm': model.transformer.h[1].ln_2.weight, 'embedding': model.transformer.wpe.weight}[where]
    with torch.no_grad():
        spot.view(-1)[3] = float('nan')
    idx = torch.randint(29, (1, 6))
    assert CPUDecoder(model, weights)(idx, None)[0].isnan().any()
    with pytest.raises(ValueError, match='not numbers'):
        model.generate(idx, 3, use_cache=True, decoder=CPUDecoder(model, weights))


@pytest.mark.parametrize('weights', WEIGHTS)
def test_a_nan_in_the_cache_reaches_the_logits(weights):
    idx, decoder = torch.randint(29, (1, 6)), CPUDecoder(f32(6), weights)
    _, cache = decoder(idx, None)
    for spot in (cache[0].v_cache[0, 1, 2], cache[1].k_cache[0, 0, 5]):
        spot[1] = float('nan')
        assert decoder(idx[:, :1], cache)[0].isnan().all()
        spot[1] = 0
    assert decoder(idx[:, :1], cache)[0].isfinite().all()


def test_int8_rounds_to_the_nearest():
    w = torch.randn(40, 64) * torch.logspace(-6, 3, 40)[:, None]
    w[3] = 0
    whole, scale = quantise(w)
    assert whole.abs().max() == 127 and torch.equal(whole, whole.round())
    assert ((whole * scale[:, None] - w).abs() <= scale[:, None] * 0.5001).all()


@torch.no_grad()
def test_int4_rounds_to_the_nearest_and_better_than_q4_0():
    w = torch.randn(60, 96) * torch.logspace(-36, 34, 60)[:, None]
    w[3, :WEIGHT_GROUP] = 0
    groups = w.double().unflatten(1, (-1, WEIGHT_GROUP))
    whole, scale = (v.double() for v in quantise_groups(w))
    whole, scale = whole.unflatten(1, (-1, WEIGHT_GROUP)), scale[..., None]
    assert torch.equal(whole, whole.round().clamp(-8, 7)) and torch.equal(scale, scale.bfloat16().double())
    error, beyond = (whole * scale - groups).abs(), groups.abs() - 7 * scale.abs()
    assert (error <= beyond.clamp(min=scale.abs() * 0.5001)).all()  # what is beyond 7 or -8 steps is that
    assert (error <= 0.3 * groups.abs().amax(dim=2, keepdim=True)).all()
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    q4_0 = ((groups * (-8 / largest)).round().clamp(-8, 7).nan_to_num() * (largest / -8) - groups) / largest
    of_group, of_q4_0 = ((v.nan_to_num() ** 2).sum(dim=2) for v in (error / largest, q4_0))
    assert (of_group <= 1.01 * of_q4_0).all() and of_group.mean() < 0.92 * of_q4_0.mean()
    for value in (float('nan'), float('inf'), -float('inf')):
        w[5, 40] = value
        assert quantise_groups(w)[1][5].isnan().tolist() == [False, True, False]


def rounded(w, weights):
    if weights == 'int4':
        whole, scale = quantise_groups(F.pad(w, (0, -w.size(1) % WEIGHT_GROUP)))
        return (whole * scale.repeat_interleave(WEIGHT_GROUP, 1))[:, :w.size(1)]
    whole, scale = quantise(w)
    return w.bfloat16().float() if weights == 'bfloat16' else whole * scale[:, None]


# int8 and int4 round inputs of matmuls too
@pytest.mark.parametrize('weights, worst', [('bfloat16', 1e-5), ('int8', 0.05), ('int4', 0.05)])
@torch.no_grad()
def test_rounded_weights_are_what_a_model_of_rounded_weights_computes(weights, worst):
    """Against the float32 model given the very weights that they stand for. Embeddings are not rounded."""
    idx, model, other = torch.randint(29, (3, 12)), f32(10), f32(10)
    for name, p in other.named_parameters():
        if name.endswith(('attn.c_attn.weight', 'c_proj.weight', 'c_fc.weight')):
            p.copy_(rounded(p, weights))
    x = other.hidden_states(idx, torch.arange(idx.size(1)))[0][:, -1:]
    head = rounded(model.lm_head.weight, 'int8' if weights == 'int4' else weights)
    logits, expected = CPUDecoder(model, weights)(idx, None)[0], x @ head.t()
    assert (logits - expected).abs().max() < worst * expected.abs().max()
    assert not torch.equal(logits, CPUDecoder(model)(idx, None)[0])
