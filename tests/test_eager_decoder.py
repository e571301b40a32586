"""The functional eager step against the model: the same tokens and logits; unknown models are called themselves."""
import itertools

import pytest
import torch
from conftest import sizes
from example_models import large

import debug_kv_model
from decode import EagerDecoder, eager
from generation import generate
from model import GPT, GPTConfig, LayerKVCache

BLOCK = 16


def counted(monkeypatch):
    """A list that gets an entry for each functional step."""
    steps, step = [], eager.step
    monkeypatch.setattr(eager, 'step', lambda *args: steps.append(args) or step(*args))
    return steps


def close(a, b, dtype=torch.float32):
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(a, b, atol=tolerance * max(1, b.abs().max().item()), rtol=0)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('bias', [True, False])
@torch.no_grad()
def test_logits_and_caches_are_the_models(dtype, bias, monkeypatch):
    """For chunks of any length, ints and tensors as cache_pos, and a prefill."""
    steps, n = counted(monkeypatch), 0
    for seed, B in itertools.product(range(sizes(5, 10)), (1, 3)):
        model, mine, theirs, start = large(seed, dtype, bias=bias), None, None, 0
        decoder, idx = EagerDecoder(model), torch.randint(29, (B, BLOCK))
        for T in (1 + seed % 5, 1, 3, 1, 1, BLOCK - 11 - seed % 5):
            got, mine = decoder(idx[:, start:start + T], mine)
            expected, _, theirs = model(idx[:, start:start + T], kv_cache=theirs)
            start, n = start + T, n + 1
            assert got.shape == (B, 1, 29) and got.dtype is dtype
            close(got, expected, dtype)
            for a, b in zip(mine, theirs):
                assert type(a) is LayerKVCache and a.cache_pos == b.cache_pos == start
                close(a.k_cache, b.k_cache, dtype)
                close(a.v_cache, b.v_cache, dtype)
        for T, pos_dtype in ((1, torch.int64), (3, torch.int16)):
            pos = torch.randint(BLOCK - T, (B,)).to(pos_dtype)
            mine, theirs = ([layer._replace(cache_pos=pos) for layer in cache] for cache in (mine, theirs))
            (got, mine), (expected, _, theirs) = decoder(idx[:, :T], mine), model(idx[:, :T], kv_cache=theirs)
            n += 1
            close(got, expected, dtype)
            assert torch.equal(mine[0].cache_pos, theirs[0].cache_pos) and mine[0].cache_pos.equal(pos.long() + T)
    assert len(steps) == n


@pytest.mark.parametrize('batch', [1, 4])
def test_tokens_are_the_models_beyond_the_window(batch):
    for seed in range(sizes(5, 20)):
        torch.manual_seed(seed)
        model = GPT(GPTConfig(block_size=BLOCK, vocab_size=65, n_layer=2, n_head=2, n_embd=32, bias=seed % 2 == 0))
        decoder = EagerDecoder(model)  # in training mode: generate switches to eval mode
        for T, temperature in itertools.product([1, 6, BLOCK, BLOCK + 1], [0.0, 0.8]):
            idx, outputs = torch.randint(65, (batch, T)), []
            for cached in (dict(), dict(use_cache=True, decoder=decoder)):
                torch.manual_seed(1000 + seed)
                outputs.append(model.generate(idx, 2 * BLOCK, temperature=temperature, top_k=20, **cached))
            assert torch.equal(*outputs)
    prompts, policy = [[1, 2, 3], [4], list(range(20))], dict(temperature=0, when_full='shift')
    assert (generate(model, prompts, 40, use_cache=True, decoder=decoder, **policy)
            == generate(model, prompts, 40, **policy))


@pytest.mark.parametrize('before', [None, torch.float32])
@torch.no_grad()
def test_autocast(before, monkeypatch):
    """Begun under autocast or before it: a cache holds the dtype that its keys have, and others are refused."""
    steps, model, idx = counted(monkeypatch), f32(0), torch.randint(29, (2, 6))
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
    close(got.float(), expected.float(), torch.bfloat16)
    assert len(steps) == 2


class Twice(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)

    @property
    def weight(self):  # the model asks its lm_head for the device
        return self.inner.weight


class Doubled(GPT):
    def hidden_states(self, *args, **how):
        x, kv_cache = super().hidden_states(*args, **how)
        return 2 * x, kv_cache


def patched_forward(model):
    model.transformer.h[0].mlp.forward = lambda x: x


def tanh_gelu(model):
    model.transformer.h[0].mlp.gelu = torch.nn.GELU(approximate='tanh')


def other_class(model):
    model.__class__ = Doubled


CHANGES = [
    lambda m: m.transformer.h[0].register_forward_hook(lambda module, args, out: (out[0] + 1, out[1])),
    lambda m: m.transformer.h[1].mlp.c_fc.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    lambda m: m.transformer.ln_f.register_forward_hook(lambda module, args, out: 2 * out),
    lambda m: setattr(m.transformer.h[1], 'mlp', Twice(m.transformer.h[1].mlp)),
    lambda m: setattr(m.transformer.h[0].attn, 'c_proj', Twice(m.transformer.h[0].attn.c_proj)),
    lambda m: setattr(m, 'lm_head', Twice(m.lm_head)),
    lambda m: torch.nn.utils.parametrizations.weight_norm(m.transformer.h[0].mlp.c_fc), tanh_gelu, patched_forward]


@pytest.mark.parametrize('change', [*CHANGES, other_class])
@torch.no_grad()
def test_a_model_that_is_hooked_or_rebuilt_is_called_itself(change, monkeypatch):
    """From the start, and when the change comes later, from the next sequence on."""
    steps, idx = counted(monkeypatch), torch.randint(29, (2, 6))
    for when in ('before', 'after'):
        model = f32(0)
        if when == 'before':
            change(model)
        decoder = EagerDecoder(model)
        _, cache = decoder(idx, None)
        assert len(steps) == (when == 'after')
        if when == 'after' and change is other_class:
            continue
        if when == 'after':
            change(model)
            _, cache = decoder(idx, None)
        got, _ = decoder(idx[:, :1], [layer.clone() for layer in cache])
        assert torch.equal(got, model(idx[:, :1], kv_cache=cache)[0]) and len(steps) == (when == 'after')


@torch.no_grad()
def test_hooks_of_all_modules_and_replaced_classes(monkeypatch):
    steps, model, idx = counted(monkeypatch), f32(0), torch.randint(29, (2, 6))
    decoder = EagerDecoder(model)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert torch.equal(decoder(idx, None)[0], model(idx)[0]) and not steps
    finally:
        hook.remove()
    monkeypatch.setattr(type(model.transformer.h[0].mlp), 'forward', lambda self, x: x)
    assert torch.equal(decoder(idx, None)[0], model(idx)[0]) and not steps



@torch.no_grad()
def test_dropout_is_the_models(monkeypatch):
    """In training mode with a dropout rate the model is called; with none there is nothing to drop."""
    steps, idx = counted(monkeypatch), torch.randint(29, (2, 6))
    for dropout in (0.0, 0.5):
        model = f32(0, dropout=dropout)
        decoder, n = EagerDecoder(model), len(steps)
        for training in (True, False, True):
            model.train(training)
            outputs = []
            for decode in (decoder, model.step):
                torch.manual_seed(1)
                cache = model.empty_cache(2)
                outputs.append(decode(idx, cache)[0])
            close(*outputs)
        assert len(steps) == n + (1 if dropout else 3)


def test_the_traced_model_is_called_itself(monkeypatch, capfd):
    """The lines of the trace come from the model's own code."""
    steps = counted(monkeypatch)
    torch.manual_seed(0)
    model = debug_kv_model.GPT(GPTConfig(block_size=8, vocab_size=5, n_layer=1, n_head=1, n_embd=8)).eval()
    monkeypatch.setenv('KV_DEBUG', '1')
    EagerDecoder(model)(torch.zeros(1, 3, dtype=torch.int64), None)
    assert 'Attn L0' in capfd.readouterr().err and not steps


@pytest.mark.parametrize('bad', [
    lambda idx, c: (idx.float(), c), lambda idx, c: (idx[0], c), lambda idx, c: (idx[:, :0], c),
    lambda idx, c: (idx.tolist(), c), lambda idx, c: (idx, c[:1]), lambda idx, c: (idx[:1], c),
    lambda idx, c: (idx, [layer._replace(cache_pos=BLOCK - 1) for layer in c]),
    lambda idx, c: (idx, [layer._replace(cache_pos=-1) for layer in c]),
    lambda idx, c: (idx, [layer._replace(cache_pos=1.0) for layer in c]),
    lambda idx, c: (idx.expand(2, -1).repeat(1, BLOCK), None)])
@torch.no_grad()
def test_what_does_not_fit_is_refused_and_nothing_is_written(bad):
    model, idx = f32(0), torch.randint(29, (2, 2))
    decoder = EagerDecoder(model)
    _, cache = decoder(idx, None)
    before = [layer.clone() for layer in cache]
    with pytest.raises(ValueError):
        decoder(*bad(idx, cache))
    assert all(torch.equal(a.k_cache, b.k_cache) for a, b in zip(cache, before))


@torch.no_grad()
def test_plain_tuples_and_turns_with_the_model():
    model, idx = f32(0), torch.randint(29, (1, 6))
    decoder = EagerDecoder(model)
    expected = model.generate(idx, 30, temperature=0)
    turns = itertools.cycle([decoder, model.step])
    got = model.generate(idx, 30, temperature=0, use_cache=True, decoder=lambda *args: next(turns)(*args))
    assert torch.equal(got, expected)
    cache = decoder(idx, None)[1]
    logits, after = decoder(idx[:, :1], [tuple(layer) for layer in cache])
    assert type(after[0]) is LayerKVCache and after[0].cache_pos == 7
    assert after[0].k_cache.data_ptr() == cache[0].k_cache.data_ptr()


def test_an_empty_batch():
    logits, cache = EagerDecoder(f32(0))(torch.zeros(0, 3, dtype=torch.int64), None)
    assert logits.shape == (0, 1, 29) and len(cache) == 2


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
        torch.testing.assert_close(eager.attend_one(q, k, v, mask), expected, atol=1e-12, rtol=1e-12)
