"""model.py against the plain GPT of plain_gpt.py: logits, gradients, the cache, and what a forward pass refuses."""
import math

import plain_gpt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, GPTConfig, LayerKVCache, attend
from positions import Positions


def tiny(seed=0, **changes):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**dict(block_size=16, vocab_size=31, n_layer=3, n_head=2, n_embd=16) | changes))


@pytest.mark.parametrize('how', [
    dict(bias=True), dict(bias=False), dict(position='rope', window=4, n_sink=2, n_kv_head=1),
    dict(position='alibi', window=4, n_sink=2), dict(position='alibi', window=4), dict(position='none', gelu='tanh')])
def test_logits_and_gradients_are_those_of_a_plain_gpt(how):
    model = tiny(**how).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)  # biases and norms too must matter
    idx, targets, c = torch.randint(31, (3, 16)), torch.randint(31, (3, 16)), model.config
    targets[0, 3] = -1
    logits, loss, kv_cache = model(idx, targets)
    assert kv_cache is None
    loss.backward()

    weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
    weights['lm_head.weight'] = weights['transformer.wte.weight']
    for w in weights.values():
        w.requires_grad_()
    ours = plain_gpt.logits(weights, 2, idx, c.position, c.n_kv_head, c.window, c.n_sink, gelu=c.gelu)
    torch.testing.assert_close(logits, ours, rtol=1e-10, atol=1e-10)
    keep = targets.flatten() != -1
    plain_loss = -ours.flatten(0, 1)[keep].log_softmax(-1).gather(1, targets.flatten()[keep][:, None]).mean()
    torch.testing.assert_close(loss, plain_loss, rtol=1e-10, atol=1e-10)
    plain_loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, weights[name].grad, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize('wrong, message', [
    (dict(n_embd=17), 'n_embd'), (dict(n_layer=0), 'n_layer'), (dict(block_size=-1), 'block_size'),
    (dict(vocab_size=1.5), 'vocab_size'), (dict(vocab_size=2**24 + 1), 'vocab_size'), (dict(dropout=1.0), 'dropout'),
    (dict(dropout=-0.1), 'dropout'), (dict(bias=1), 'bias'),
    (dict(position='rotary'), 'learned, rope, alibi or none'), (dict(position='rope', n_embd=12), 'even'),
    (dict(n_kv_head=3), 'divisible by n_kv_head'), (dict(n_kv_head=-1), 'n_kv_head'),
    (dict(n_sink=1), 'needs a window'), (dict(window=16), 'must be less than block_size 16'),
    (dict(window=17), 'less than block_size 16'), (dict(window=2.0), 'window'), (dict(window=True), 'window'),
    (dict(window=12, n_sink=4), 'n_sink 4 must be less than block_size'),
    (dict(gelu='relu'), 'gelu'), (dict(rope_theta=0), 'rope_theta'),
])
def test_settings_that_make_no_gpt_are_refused_in_a_line(wrong, message):
    with pytest.raises(ValueError, match=message) as e:
        GPTConfig(**dict(block_size=16, vocab_size=29, n_layer=1, n_head=4, n_embd=16) | wrong)
    assert '\n' not in str(e.value)


def test_forward_always_returns_three_values():
    model, idx = tiny(), torch.randint(31, (2, 5))
    model.train()
    logits, loss, kv_cache = model(idx)
    assert logits.shape == (2, 1, 31) and loss is None and kv_cache is None
    model.eval()
    logits, loss, kv_cache = model(idx)
    assert logits.shape == (2, 1, 31) and loss is None and len(kv_cache) == 3
    logits, loss, kv_cache = model(idx, targets=idx)
    assert logits.shape == (2, 5, 31) and loss.dim() == 0 and kv_cache is None
    assert model(idx, use_cache=False)[2] is None
    assert model(idx, targets=idx, use_cache=True)[2] is not None
    model.train()
    assert model(idx, use_cache=True)[2] is not None


def test_the_cache_is_a_named_tuple_of_the_documented_shape():
    model = tiny().eval()
    _, _, kv_cache = model(torch.randint(31, (2, 5)))
    for layer in kv_cache:
        k_cache, v_cache, cache_pos = layer
        assert k_cache.shape == v_cache.shape == (2, 2, 16, 8)
        assert layer[2] == layer.cache_pos == cache_pos == 5
        assert k_cache.dtype == torch.float32 and not k_cache[:, :, 5:].any() and not v_cache[:, :, 5:].any()
    plain = [tuple(layer) for layer in kv_cache]
    assert model(torch.tensor([[1], [2]]), kv_cache=plain)[2][0].cache_pos == 6


def test_hidden_states_are_what_lm_head_reads():
    model = tiny().eval()
    idx = torch.randint(31, (2, 9))
    x, kv_cache = model.hidden_states(idx, torch.arange(9))
    assert x.shape == (2, 9, 16) and kv_cache is None
    torch.testing.assert_close(model.lm_head(x), model(idx, idx)[0])
    torch.testing.assert_close(model.lm_head(x[:, -1:]), model(idx)[0])


class Shapes(TorchDispatchMode):
    """Collects the shape of every tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.seen.add(tuple(t.shape))
        return out


def test_a_training_step_allocates_no_cache():
    model, idx = tiny().train(), torch.randint(31, (3, 11))  # 11 < block_size 16: a cache's shape is its own
    cache = (3, 2, 16, 8)
    with Shapes() as shapes:
        model(idx, idx)[1].backward()
    assert cache not in shapes.seen and (3, 2, 11, 8) in shapes.seen
    with Shapes() as shapes, torch.no_grad():
        model.eval()(idx)
    assert cache in shapes.seen  # the probe does see one


def test_a_training_step_saves_no_more_for_backward_than_without_cache_code():
    model, idx = tiny().train(), torch.randint(31, (3, 11))

    def saved_bytes(f):
        n = 0

        def pack(t):
            nonlocal n
            n += t.nbytes
            return t
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            f()
        return n

    def without_cache_code():
        x = model.transformer.wte(idx) + model.transformer.wpe(torch.arange(11))
        for block in model.transformer.h:
            q, k, v = (t.view(3, 11, 2, 8).transpose(1, 2) for t in block.attn.c_attn(block.ln_1(x)).split(16, 2))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block.attn.c_proj(y.transpose(1, 2).reshape(3, 11, 16))
            x = x + block.mlp(block.ln_2(x))
        logits = model.lm_head(model.transformer.ln_f(x)).view(-1, 31)
        torch.nn.functional.cross_entropy(logits, idx.view(-1), ignore_index=-1)
    assert saved_bytes(lambda: model(idx, idx)) <= saved_bytes(without_cache_code)


def cache_for(model, B=2, T=5, **kwargs):
    return model.eval()(torch.randint(31, (B, T)), use_cache=True)[2]


@pytest.mark.parametrize('what, cache, idx', [
    ('layers', lambda m: cache_for(m)[:2], (2, 1)),
    ('layer 1', lambda m: [c._replace(cache_pos=5 + (i == 1)) for i, c in enumerate(cache_for(m))], (2, 1)),
    ('need', lambda m: cache_for(m, B=3), (2, 1)),
    ('need', lambda m: [LayerKVCache(c.k_cache[:, :, :8], c.v_cache[:, :, :8], 5) for c in cache_for(m)], (2, 1)),
    ('float64', lambda m: [LayerKVCache(c.k_cache.double(), c.v_cache.double(), 5) for c in cache_for(m)], (2, 1)),
    ('float64', lambda m: [LayerKVCache(c.k_cache, c.v_cache.double(), 5) for c in cache_for(m)], (2, 1)),
    ('meta', lambda m: [LayerKVCache(c.k_cache.to('meta'), c.v_cache.to('meta'), 5) for c in cache_for(m)], (2, 1)),
    ('layer 1', lambda m: [c._replace(cache_pos=torch.tensor([5, 4 + i])) for i, c in enumerate(cache_for(m))], (2, 1)),
    ('out of context', lambda m: [c._replace(cache_pos=torch.tensor([5, 16])) for c in cache_for(m)], (2, 1)),
    ('5 .* 12 .* 16', lambda m: cache_for(m), (2, 12)),
    ('0 .* 17 .* 16', lambda m: None, (2, 17)),
    ('at least one', lambda m: cache_for(m), (2, 0)),
    ('at least one', lambda m: None, (5,)),
])
def test_a_cache_that_does_not_fit_is_refused_and_left_alone(what, cache, idx):
    model = tiny()
    kv_cache = cache(model)
    before = [(c.k_cache.clone(), c.v_cache.clone(), c.cache_pos) for c in kv_cache or []]
    with pytest.raises(ValueError, match=what), torch.no_grad():
        model(torch.zeros(idx, dtype=torch.long), kv_cache=kv_cache)
    for c, (k, v, pos) in zip(kv_cache or [], before):
        assert c.k_cache.is_meta or torch.equal(c.k_cache, k) and torch.equal(c.v_cache, v) and c.cache_pos is pos


def test_attention_itself_refuses_what_does_not_fit():
    model = tiny().eval()
    attn = model.transformer.h[0].attn

    def positions(start, end):
        return Positions(model.config, torch.arange(start, end), torch.float32)
    _, cache = attn(torch.randn(2, 15, 16), positions(0, 15), model.empty_cache(2)[0])
    for x in (torch.randn(2, 2, 16), torch.randn(1, 1, 16), torch.randn(3, 1, 16)):
        with pytest.raises(ValueError):
            attn(x, positions(15, 15 + x.size(1)), cache)
    y, cache = attn(torch.randn(2, 1, 16), positions(15, 16), cache)
    assert y.shape == (2, 1, 16) and cache.cache_pos == 16
    with pytest.raises(ValueError, match='16 .* 1 .* 16'):
        attn(torch.randn(2, 1, 16), positions(15, 16), cache)
    assert attn(torch.randn(2, 3, 16), positions(0, 3))[1] is None


def test_attend_takes_a_mask_in_place_of_causality():
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    sees_all = attend(q, k, v, mask=torch.ones(3, 5, dtype=torch.bool))
    torch.testing.assert_close(sees_all, torch.softmax(q @ k.mT / math.sqrt(8), -1) @ v)
    torch.testing.assert_close(attend(q, k, v)[:, :, -1], sees_all[:, :, -1])
    assert not torch.allclose(attend(q, k, v)[:, :, 0], sees_all[:, :, 0])


@pytest.mark.parametrize('context', ['inference_mode', 'autocast', 'float64', 'bfloat16'])
def test_caches_take_the_dtype_of_the_keys(context):
    model, idx = tiny().eval(), torch.randint(31, (2, 7))
    dtype = {'float64': torch.float64, 'inference_mode': torch.float32}.get(context, torch.bfloat16)
    if context in ('float64', 'bfloat16'):
        model = model.to(dtype)
    autocast = torch.autocast('cpu', torch.bfloat16, enabled=context == 'autocast')
    with torch.inference_mode(context == 'inference_mode'), autocast, torch.no_grad():
        _, _, kv_cache = model(idx[:, :4])
        assert kv_cache[0].k_cache.dtype == kv_cache[2].v_cache.dtype == dtype
        last, _, kv_cache = model(idx[:, 4:], kv_cache=kv_cache)
        tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(last, model(idx, use_cache=False)[0], rtol=tolerance, atol=tolerance)
