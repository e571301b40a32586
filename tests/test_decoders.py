"""Each decoder in the model's place: the same tokens, the same tuples, nothing stale, nothing silent."""
import itertools

import pytest
import torch
from conftest import sizes
from hypothesis import given
from hypothesis import strategies as st
from test_cache_exactness import large

import decode
from decode.cpu import CPUDecoder
from decode.weights import quantise
from model import GPT, GPTConfig, LayerKVCache

BLOCK = 16
TIE = 1e-4  # two best logits closer than this may change places


def f32(seed, **changes):
    return large(seed, torch.float32, **changes)


def first_difference(model, a, b):
    """None, or how far apart the two best uncached logits are where a and b (B, T) part: a tie, or a mistake."""
    if torch.equal(a, b):
        return None
    row, at = (a != b).nonzero()[0].tolist()
    logits = model(a[row:row + 1, max(0, at - model.config.block_size):at], use_cache=False)[0][0, -1]
    return (logits[a[row, at]] - logits[b[row, at]]).abs().item()


@pytest.mark.parametrize('threads', [1, 2])
def test_the_cpu_decoder_gives_the_uncached_tokens(threads):
    """The matrix of test_kv_cache.py: seeds of weights, prompt and draws for each case, on to twice the window."""
    ties, n_generations = [], 0
    for s in range(sizes(5, 50)):
        torch.manual_seed(s)
        model = GPT(GPTConfig(block_size=BLOCK, vocab_size=65, n_layer=2, n_head=2, n_embd=32, bias=s % 2 == 0)).eval()
        decoder = CPUDecoder(model, threads=threads)
        for T, temperature, batch in itertools.product([1, 6, BLOCK - 1, BLOCK, BLOCK + 1], [0.0, 0.8], [1, 4]):
            idx, outputs = torch.randint(65, (batch, T)), []
            for cached in (dict(), dict(use_cache=True, decoder=decoder)):
                torch.manual_seed(1000 + s)
                outputs.append(model.generate(idx, 2 * BLOCK, temperature=temperature, top_k=20, **cached))
            n_generations += 1
            gap = first_difference(model, *outputs)
            if gap is not None:
                where = f"prompt of {T}, temperature {temperature}, batch {batch}, seed {s}: {gap} apart"
                assert temperature == 0 and gap < TIE, where
                ties.append(gap)
    print(f"{len(ties)} ties in {n_generations} generations: {ties}")
    assert 100 * len(ties) <= n_generations


@given(st.data())
def test_any_shape_any_chunks_any_batch(data):
    """Logits and caches of the kernel against the model's, whatever the sizes and however a sequence is cut."""
    n_head, head_dim = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 3, 8, 16, 20, 32, 48]))
    config = GPTConfig(block_size=data.draw(st.integers(1, 40)), vocab_size=data.draw(st.integers(2, 90)),
                       n_layer=data.draw(st.integers(1, 3)), n_head=n_head, n_embd=n_head * head_dim,
                       bias=data.draw(st.booleans()))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    model = GPT(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    decoder = CPUDecoder(model, threads=data.draw(st.integers(1, 2)))
    idx = torch.randint(config.vocab_size, (data.draw(st.integers(1, 13)), config.block_size))
    mine = theirs = None
    start = 0
    with torch.no_grad():
        while start < config.block_size:
            T = data.draw(st.integers(1, config.block_size - start))
            logits, mine = decoder(idx[:, start:start + T], mine)
            expected, _, theirs = model(idx[:, start:start + T], kv_cache=theirs)
            start += T
            scale = expected.abs().max().clamp(min=0.01)
            torch.testing.assert_close(logits / scale, expected / scale, atol=2e-5, rtol=0)
            for a, b in zip(mine, theirs):
                assert a.cache_pos == b.cache_pos == start
                torch.testing.assert_close(a.k_cache, b.k_cache, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('batch', [1, 2, 3, 5, 8, 10, 17, 64])
def test_a_row_of_a_batch_is_what_it_is_alone(batch):
    """To rounding: the kernel takes rows in tiles of eight, four, two and one."""
    model = f32(0, block_size=32, n_head=4)
    decoder, idx = CPUDecoder(model), torch.randint(29, (batch, 7))
    together = decoder(idx, None)[0]
    for row in range(batch):
        torch.testing.assert_close(decoder(idx[row:row + 1], None)[0], together[row:row + 1], atol=1e-4, rtol=1e-4)


def test_prefill_by_one_and_decode_by_another_at_any_step():
    model = f32(1)
    decoders = [decode.EagerDecoder(model), CPUDecoder(model), CPUDecoder(model, threads=1)]
    idx, turns = torch.randint(29, (2, 5)), itertools.cycle([1, 0, 2, 2, 0, 1])

    def taking_turns(idx, kv_cache):
        return decoders[next(turns)](idx, kv_cache)
    got = model.generate(idx, 40, temperature=0, use_cache=True, decoder=taking_turns)
    assert torch.equal(got, model.generate(idx, 40, temperature=0))


def test_it_works_in_place_and_rewinding_is_free():
    model = f32(2)
    decoder, idx = CPUDecoder(model), torch.randint(29, (1, 6))
    _, cache = decoder(idx, None)
    before = [t.data_ptr() for layer in cache for t in layer[:2]]
    a, after = decoder(idx[:, :1], cache)
    decoder(idx[:, 3:5], after)
    again, _ = decoder(idx[:, :1], cache)
    assert torch.equal(a, again) and [t.data_ptr() for layer in after for t in layer[:2]] == before
    assert type(after[0]) is LayerKVCache and after[0].cache_pos == 7
    assert type(decoder(idx[:, :1], [tuple(layer) for layer in cache])[1][0]) is tuple


def test_logits_belong_to_the_caller():
    model = f32(3)
    decoder, idx = CPUDecoder(model), torch.randint(29, (1, 6))
    first, cache = decoder(idx, None)
    kept = first.clone()
    decoder(idx[:, :1], cache)
    assert torch.equal(first, kept)



@pytest.mark.parametrize('weights', ['float32', 'bfloat16', 'int8'])
@pytest.mark.parametrize('where', ['weight', 'bias', 'norm', 'embedding', 'cache'])
def test_a_nan_reaches_the_logits(weights, where):
    model = f32(6, bias=True)
    spot = {'weight': model.transformer.h[0].mlp.c_fc.weight, 'bias': model.transformer.h[1].attn.c_attn.bias,
            'norm': model.transformer.h[1].ln_2.weight, 'embedding': model.transformer.wpe.weight}.get(where)
    idx = torch.randint(29, (1, 6))
    if where == 'cache':
        decoder = CPUDecoder(model, weights)
        _, cache = decoder(idx, None)
        cache[0].v_cache[0, 1, 2, 0] = float('nan')
        assert decoder(idx[:, :1], cache)[0].isnan().all()
        cache[0].v_cache[0, 1, 2, 0] = 0
        cache[1].k_cache[0, 0, 5, 1] = float('nan')
        assert decoder(idx[:, :1], cache)[0].isnan().all()
        cache[1].k_cache[0, 0, 5, 1] = 0
        for layer in cache:
            layer.k_cache[:, :, 7:], layer.v_cache[:, :, 7:] = float('nan'), float('nan')
        assert decoder(idx[:, :1], cache)[0].isfinite().all()  # slots from cache_pos on are never read
    else:
        with torch.no_grad():
            spot.view(-1)[3] = float('nan')
        assert CPUDecoder(model, weights)(idx, None)[0].isnan().any()
        with pytest.raises(ValueError, match='not numbers'):
            model.generate(idx, 3, use_cache=True, decoder=CPUDecoder(model, weights))


def test_indices_of_the_step_tables():
    """Each name of layout.py has an index of its own, and a decoder's table has all addresses that a step uses."""
    from decode.kernel import layout
    decoder = CPUDecoder(f32(8), 'int8', threads=1)
    decoder(torch.zeros(1, 1, dtype=torch.int64), None)
    assert len(decoder.tables.memory) == layout.SCRATCH + layout.N_SCRATCH
    assert (decoder.tables.memory == 0).nonzero()[0].tolist() == [layout.DRAW, layout.DRAW_DATA]  # nothing is drawn
    assert len(decoder.tables.sizes) == layout.N_SIZES
    table, panels = decoder.packed_weights.table, decoder.packed_weights.panels
    assert table[0, layout.FIRST_WEIGHT] == table[0, layout.FIRST_PANEL] == 0
    from decode.kernel.layout import SHEET
    from decode.kernel.vectors import LANES
    panel_sizes = -(-table[:, layout.N_PANELS] // SHEET) * SHEET * LANES * table[:, layout.N_INPUTS]
    assert (table[1:, layout.FIRST_WEIGHT] == panel_sizes.cumsum()[:-1]).all() and panel_sizes.sum() == len(panels)
    assert (table[1:, layout.FIRST_PANEL] == table[:, layout.N_PANELS].cumsum()[:-1]).all()


def test_int8_rounds_to_the_nearest():
    w = torch.randn(40, 64) * torch.logspace(-6, 3, 40)[:, None]
    w[3] = 0
    whole, scale = quantise(w)
    assert whole.abs().max() == 127 and torch.equal(whole, whole.round())
    assert ((whole * scale[:, None] - w).abs() <= scale[:, None] * 0.5001).all()


def test_rounded_weights_are_what_a_model_of_rounded_weights_computes():
    """bfloat16 and int8 against the float32 model given the very weights that they stand for."""
    idx = torch.randint(29, (3, 12))
    for weights, worst in (('bfloat16', 1e-5), ('int8', 0.05)):  # int8 rounds the inputs of its matmuls as well
        model, rounded = f32(10), f32(10)
        with torch.no_grad():
            for name, p in rounded.named_parameters():
                if name.endswith(('attn.c_attn.weight', 'c_proj.weight', 'c_fc.weight', 'lm_head.weight')):
                    whole, scale = quantise(p)
                    p.copy_(p.bfloat16() if weights == 'bfloat16' else whole * scale[:, None])
            # embeddings are not rounded
            rounded.transformer.wte.weight = torch.nn.Parameter(model.transformer.wte.weight.detach())
            logits, expected = CPUDecoder(model, weights)(idx, None)[0], head(rounded, model, idx, weights)
        assert (logits - expected).abs().max() < worst * expected.abs().max(), weights
        assert not torch.equal(logits, CPUDecoder(model)(idx, None)[0])


def head(rounded, model, idx, weights):
    x = rounded.hidden_states(idx, torch.arange(idx.size(1)))[0][:, -1:]
    w = model.lm_head.weight
    whole, scale = quantise(w)
    return x @ (w.bfloat16().float() if weights == 'bfloat16' else whole * scale[:, None]).t()
