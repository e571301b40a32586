"""Mistakes that shipped in somebody's KV cache, each with the test that catches it."""
import gc
import weakref

import pytest
import torch
from example_models import f32, large
from test_cache_exactness import in_chunks

import model as model_module
from generation import generate, stream
from model import GPT, GPTConfig, LayerKVCache


def splits(T):
    """Every way to cut T positions in order, as chunk lengths: 2 ** (T - 1) of them."""
    for bits in range(2 ** (T - 1)):
        chunks = [1]
        for i in range(T - 1):
            if bits >> i & 1:
                chunks.append(1)
            else:
                chunks[-1] += 1
        yield chunks


def test_is_causal_on_a_warm_cache_every_split_of_a_prompt():
    model, idx = large(0), torch.randint(29, (3, 8))
    with torch.no_grad():
        full = model(idx, idx)[0]
    for chunks in splits(8):
        assert (in_chunks(model, idx, chunks) - full).abs().max() < 1e-10, chunks


def test_is_causal_on_a_warm_cache_the_last_token_leaves_earlier_logits_alone():
    model, idx = f32(0), torch.randint(29, (3, 8))
    other = idx.clone()
    other[:, -1] = (other[:, -1] + 1) % 29
    for chunks in ([8], [3, 5], [5, 3], [1] * 8):
        a, b = in_chunks(model, idx, chunks), in_chunks(model, other, chunks)
        assert torch.equal(a[:, :-1], b[:, :-1]) and not torch.equal(a[:, -1], b[:, -1]), chunks


def test_position_offset_skipped_or_restarted():
    """Each position on its own: the logits there must be those of its own row of wpe, and of no other."""
    model, idx = large(1, n_layer=1), torch.randint(29, (1, 16))
    with torch.no_grad():
        full = model(idx, idx)[0]
        stepped = in_chunks(model, idx, [1] * 16)
        for pos in range(16):
            assert (stepped[:, pos] - full[:, pos]).abs().max() < 1e-10, pos
        _, _, cache = model(idx[:, :5])
        elsewhere = model(idx[:, 5:6], kv_cache=[c._replace(cache_pos=4) for c in cache])[0]
    assert (elsewhere - full[:, 5]).abs().max() > 0.1  # the judge is sharp enough


@pytest.mark.parametrize('T', [15, 16, 17, 32])
def test_off_by_one_at_the_window(T):
    model = f32(2)
    idx = torch.randint(29, (2, T))
    outputs = [model.generate(idx, 5, temperature=0, use_cache=c) for c in (False, True)]
    assert torch.equal(*outputs) and outputs[0].shape == (2, T + 5)


def test_state_leaking_between_calls():
    model = f32(4)
    a, b = torch.randint(29, (1, 4)), torch.randint(29, (2, 9))

    def run(idx, use_cache):
        torch.manual_seed(0)
        return model.generate(idx, 20, use_cache=use_cache)
    first = run(a, True)
    run(b, True)
    assert torch.equal(run(a, True), first)
    assert torch.equal(run(a, False), first)
    fresh = f32(4)
    torch.manual_seed(0)
    assert torch.equal(fresh.generate(a, 20), first)


def test_nothing_holds_a_cache_after_generate_returns(monkeypatch):
    caches = []
    empty_like = LayerKVCache.empty_like

    def recorded(k, block_size):
        cache = empty_like(k, block_size)
        caches.extend([weakref.ref(cache.k_cache), weakref.ref(cache.v_cache)])
        return cache
    monkeypatch.setattr(LayerKVCache, 'empty_like', recorded)
    model = f32(5)
    model.generate(torch.randint(29, (1, 4)), 5, use_cache=True)
    steps = stream(model, torch.randint(29, (1, 4)), 5, use_cache=True)
    next(steps)
    steps.close()  # nor when the consumer leaves early
    del steps
    gc.collect()
    assert len(caches) == 8 and all(ref() is None for ref in caches)


def test_the_fallback_allocates_no_cache(monkeypatch):
    made = []
    empty_like = LayerKVCache.empty_like
    monkeypatch.setattr(LayerKVCache, 'empty_like', lambda k, n: made.append(1) or empty_like(k, n))
    model = f32(5)
    model.generate(torch.randint(29, (1, 4)), 50, use_cache=True)
    assert len(made) == 2  # one a layer, once


@pytest.mark.parametrize('use_cache', [False, True])
def test_the_first_token_sampled_once_and_copied_to_every_sample(use_cache):
    torch.manual_seed(0)
    # as initialised: near-uniform logits
    model = GPT(GPTConfig(block_size=16, vocab_size=64, n_layer=1, n_head=1, n_embd=8)).eval()
    tokens = generate(model, torch.tensor([[1, 2, 3]]), 2, use_cache=use_cache, num_samples=16)
    assert tokens.shape == (16, 5) and (tokens[:, :3] == torch.tensor([1, 2, 3])).all()
    assert len(set(tokens[:, 3].tolist())) > 4 and len(set(tokens[:, 4].tolist())) > 4


def test_fill_values_never_cross_layers_or_positions():
    model = large(7, n_layer=3)
    with torch.no_grad():
        _, _, cache = model(torch.randint(29, (1, 4)))
        for layer, c in enumerate(cache):
            for pos in range(16):
                c.k_cache[:, :, pos] = 100 * layer + pos
                c.v_cache[:, :, pos] = -(100 * layer + pos)
        _, _, after = model(torch.randint(29, (1, 3)), kv_cache=cache)
    for layer, c in enumerate(after):
        for pos in [*range(4), *range(7, 16)]:
            assert (c.k_cache[:, :, pos] == 100 * layer + pos).all() and (
                c.v_cache[:, :, pos] == -(100 * layer + pos)
            ).all()
        for pos in range(4, 7):
            assert not (c.k_cache[:, :, pos] == 100 * layer + pos).any()


def test_aliasing_branching_needs_a_copy():
    model, idx = large(9), torch.randint(29, (1, 10))
    left, right = torch.tensor([[3, 4]]), torch.tensor([[20, 21]])
    with torch.no_grad():
        alone = model(torch.cat([idx, left], 1))[0]
        _, _, cache = model(idx)
        branch = [c.clone() for c in cache]
        _, _, one = model(left[:, :1], kv_cache=cache)
        model(right[:, :1], kv_cache=branch)
        assert (model(left[:, 1:], kv_cache=one)[0] - alone).abs().max() < 1e-10
        _, _, one = model(left[:, :1], kv_cache=cache)
        model(right[:, :1], kv_cache=cache)  # without the copy, this takes the branch's place
        assert (model(left[:, 1:], kv_cache=one)[0] - alone).abs().max() > 1e-3


def test_bf16_differences_are_neither_taken_for_bugs_nor_hide_them():
    """Teacher-forced: logits within tolerance, and the same argmax wherever its margin is larger than that."""
    compared = 0
    for seed in range(10):
        model, idx = large(seed, torch.bfloat16, n_embd=64), torch.randint(29, (2, 16))
        with torch.no_grad():
            full = model(idx, idx)[0].float()
        stepped = in_chunks(model, idx, [3] + [1] * 13).float()
        tolerance = 0.05 * full.abs().max().item()
        assert (stepped - full).abs().max() < tolerance
        top = full.topk(2).values
        clear = top[..., 0] - top[..., 1] > tolerance
        assert (stepped.argmax(-1) == full.argmax(-1))[clear].all()
        compared += clear.sum().item()
    assert compared > 50


def test_dropout_left_on():
    model = f32(10, dropout=0.5)
    model.train()  # generate has to see to it itself
    idx = torch.randint(29, (2, 5))
    outputs = [model.generate(idx, 20, temperature=0, use_cache=c) for c in (False, True, False, True)]
    assert all(torch.equal(outputs[0], o) for o in outputs) and model.training
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(idx)[0], model(idx)[0])


def test_a_cache_that_is_on_and_gains_nothing():
    model, fed = f32(11), []
    model.register_forward_pre_hook(lambda m, args: fed.append(args[0].shape[1]))
    model.generate(torch.randint(29, (2, 4)), 10, use_cache=True)
    assert fed == [4] + [1] * 9  # a prefill, then one token a step, and no forward after the last token
    fed.clear()
    model.generate(torch.randint(29, (2, 4)), 20, use_cache=True)
    assert fed == [4] + [1] * 12 + [16] * 7  # the window is full when cache_pos is 16


def test_attention_weights_of_one_token_need_no_mask(monkeypatch):
    masks = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, enable_gqa=False):
        masks.append((q.size(2), k.size(2), attn_mask is not None, is_causal))
        return sdpa(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa)
    monkeypatch.setattr(model_module.F, 'scaled_dot_product_attention', spy)
    in_chunks(large(12, n_layer=1), torch.randint(29, (1, 9)), [4, 1, 3, 1])
    assert masks == [(4, 4, False, True), (1, 5, False, False), (3, 8, True, False), (1, 9, False, False)]
