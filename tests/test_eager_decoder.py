"""The step in PyTorch: when it computes the model's function itself, and when it calls the model; autocast, dropout."""
import pytest
import torch
from example_models import f32
from test_decoder_changes import UNKNOWN, Doubled

from decode import EagerDecoder, direct
from kvcache import make_cache
from kvcache.contiguous import cache_for
from model import GPT


def close(a, b, worst=1e-5):
    torch.testing.assert_close(a, b, atol=worst * max(1, b.abs().max().item()), rtol=0)


@pytest.mark.parametrize('before', [False, True])
@torch.no_grad()
def test_autocast(before):
    """Begun under autocast or before it: a cache holds the dtype that its keys have, and others are refused."""
    model, idx = f32(0), torch.randint(29, (2, 6))
    decoder = EagerDecoder(model)
    cache = decoder(idx, None)[1] if before else None
    with torch.autocast('cpu', torch.bfloat16):
        if before:
            for decode in (decoder, model.step):
                with pytest.raises(ValueError, match='cache holds'):
                    decode(idx[:, :1], cache)
            return
        (got, mine), (expected, theirs) = decoder(idx, None), model.step(idx, None)
        assert torch.equal(got, expected) and mine[0].k_cache.dtype is theirs[0].k_cache.dtype is torch.bfloat16
        got, expected = decoder(idx[:, :1], mine)[0], model.step(idx[:, :1], theirs)[0]
    assert got.dtype is expected.dtype
    close(got.float(), expected.float(), 0.1)
    assert not decoder.direct.called


class Twice(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)

    @property
    def weight(self):  # the model asks its lm_head for the device
        return self.inner.weight


CHANGES = {name: UNKNOWN[name] for name in ('mlp', 'forward', 'another gelu', 'wider')} | {
    'a hook that changes': lambda m: m.transformer.h[0].register_forward_hook(
        lambda module, args, out: (out[0] + 1, out[1])),
    'a pre-hook that changes': lambda m: m.transformer.h[1].mlp.c_fc.register_forward_pre_hook(
        lambda module, args: (args[0] * 2,)),
    'twice c_proj': lambda m: setattr(m.transformer.h[0].attn, 'c_proj', Twice(m.transformer.h[0].attn.c_proj)),
    'twice lm_head': lambda m: setattr(m, 'lm_head', Twice(m.lm_head)),
    'weight norm': lambda m: torch.nn.utils.parametrizations.weight_norm(m.transformer.h[0].mlp.c_fc),
    'another class': lambda m: setattr(m, '__class__', Doubled)}


@pytest.mark.parametrize('change', CHANGES)
@torch.no_grad()
def test_a_module_that_is_hooked_or_rebuilt_is_called_itself(change):
    """From the start, and when the change comes later, from the next sequence on."""
    idx = torch.randint(29, (2, 6))
    for when in ('before', 'after'):
        model = f32(0)
        if when == 'before':
            CHANGES[change](model)
        decoder = EagerDecoder(model)
        _, cache = decoder(idx, None)
        if when == 'after' and change == 'another class':
            continue
        if when == 'after':
            CHANGES[change](model)
            _, cache = decoder(idx, None)
        got, _ = decoder(idx[:, :1], [layer.clone() for layer in cache])
        close(got, model(idx[:, :1], kv_cache=cache)[0])


class Scaled(GPT):
    def forward(self, *args, **how):
        logits, *others = super().forward(*args, **how)
        return 2 * logits, *others


@pytest.mark.parametrize('change', ['another class', 'a hook on the model'])
@torch.no_grad()
def test_a_forward_of_its_own_is_run_on_tuples_and_refused_in_other_caches(change):
    model, idx = f32(0), torch.randint(29, (2, 6))
    if change == 'another class':
        model.__class__ = Scaled
    else:
        model.register_forward_hook(lambda module, args, out: (2 * out[0], *out[1:]))
    cache = make_cache(model, 'tuple', 2)
    with pytest.raises(ValueError, match='leave the cache out'):
        cache.step([cache.new(), cache.new()], [0, 0], idx)
    cache = cache_for(model, 2, EagerDecoder(model))
    assert torch.equal(cache.step([cache.new(), cache.new()], [0, 0], idx), model(idx, use_cache=False)[0][:, 0])


@torch.no_grad()
def test_hooks_of_all_modules_and_replaced_classes(monkeypatch):
    model, idx = f32(0), torch.randint(29, (2, 6))
    decoder = EagerDecoder(model)
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 2 * out if type(module) is torch.nn.Linear else None)
    try:
        assert torch.equal(decoder(idx, None)[0], model(idx)[0])
    finally:
        hook.remove()
    monkeypatch.setattr(type(model.transformer.h[0].mlp), 'forward', lambda self, x: x)
    assert torch.equal(decoder(idx, None)[0], model(idx)[0])


@torch.no_grad()
def test_dropout_is_the_models():
    """In training mode the model is called."""
    idx = torch.randint(29, (2, 6))
    for dropout in (0.0, 0.5):
        model = f32(0, dropout=dropout)
        decoder = EagerDecoder(model)
        for training in (True, False, True):
            model.train(training)
            outputs = []
            for decode in (decoder, model.step):
                torch.manual_seed(1)
                cache = model.empty_cache(2)
                outputs.append(decode(idx, cache)[0])
            close(*outputs)


@pytest.mark.parametrize('n_kv_head', [4, 2, 1])
def test_one_query_as_two_products(n_kv_head):
    """What CUDA takes for float32, here in float64 against torch's attention: masks of all shapes, keys as views."""
    torch.manual_seed(0)
    B, n_head, K, head_dim = 3, 4, 9, 8
    q = torch.randn(B, 1, n_head, head_dim, dtype=torch.float64).transpose(1, 2)
    k, v = (torch.randn(B, n_kv_head, 2 * K, head_dim, dtype=torch.float64)[:, :, :K] for _ in range(2))
    seen = torch.rand(B, n_head, 1, K) < 0.7
    seen[..., 0] = True
    for mask in (seen, seen[:, :1], seen[0], seen[0, 0], torch.randn(B, n_head, 1, K).double(),
                 torch.zeros(seen[0].shape).double().masked_fill(~seen[0], -float('inf'))):
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(n_head // n_kv_head, dim=1), v.repeat_interleave(n_head // n_kv_head, dim=1), mask)
        torch.testing.assert_close(direct.attend_one(q, k, v, mask), expected, atol=1e-12, rtol=1e-12)
