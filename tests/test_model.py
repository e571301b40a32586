"""model.py and positions.py without a cache: logits and gradients are the judge's; which settings make no GPT."""
import plain_gpt
import pytest
import torch
from tiny_models import MODELS, VOCAB, model_of

from model import GPT, GPTConfig
from positions import Positions, alibi_slopes


def tiny(seed=0, **changes):
    """As it is initialised."""
    torch.manual_seed(seed)
    return GPT(GPTConfig(**dict(block_size=16, vocab_size=31, n_layer=3, n_head=2, n_embd=16) | changes))


@pytest.mark.parametrize('kind', MODELS)
@pytest.mark.parametrize('bias', [True, False])
def test_logits_and_gradients_are_the_judges(kind, bias):
    model = model_of(kind, 0, torch.float64, bias=bias)
    idx, targets = torch.randint(VOCAB, (2, 3, 30))
    targets[0, 3] = -1
    logits, loss, kv_cache = model.train()(idx, targets)
    assert kv_cache is None
    loss.backward()
    weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
    if model.config.tied:
        weights['lm_head.weight'] = weights['transformer.wte.weight']
    for w in weights.values():
        w.requires_grad_()
    plain = plain_gpt.plain(model, idx, weights)
    torch.testing.assert_close(logits, plain, rtol=1e-10, atol=1e-10)
    keep = targets.flatten() != -1
    plain_loss = -plain.flatten(0, 1)[keep].log_softmax(-1).gather(1, targets.flatten()[keep][:, None]).mean()
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
    for training, how, n_rows, cached in (
            (True, {}, 1, False), (False, {}, 1, True), (False, dict(targets=idx), 5, False),
            (False, dict(use_cache=False), 1, False), (False, dict(targets=idx, use_cache=True), 5, True),
            (True, dict(use_cache=True), 1, True)):
        logits, loss, kv_cache = model.train(training)(idx, **how)
        assert logits.shape == (2, n_rows, 31) and (loss is None) == ('targets' not in how)
        assert (kv_cache is None) != cached


def test_the_cache_is_a_named_tuple_of_the_documented_shape():
    _, _, kv_cache = tiny().eval()(torch.randint(31, (2, 5)))
    assert len(kv_cache) == 3
    for layer in kv_cache:
        k_cache, v_cache, cache_pos = layer
        assert k_cache.shape == v_cache.shape == (2, 2, 16, 8) and k_cache.dtype == torch.float32
        assert layer[2] == layer.cache_pos == cache_pos == 5
        assert not k_cache[:, :, 5:].any() and not v_cache[:, :, 5:].any()


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


@pytest.mark.parametrize('dtype, most', [(torch.float32, 8e-6), (torch.bfloat16, 8e-2)])
def test_scores_of_rotary_positions_depend_on_the_distance_alone(dtype, most):
    """At position 1,000,000 too, where angles in float32 or bfloat16 would be off."""
    config = GPTConfig(block_size=16, vocab_size=5, n_layer=1, n_head=1, n_embd=64, position='rope', window=8)
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 64)

    def score(t, j, dtype):
        q_t, k_j = (Positions(config, torch.tensor([p]), dtype).rotated(x.to(dtype)) for p, x in ((t, q), (j, k)))
        return float((q_t.double() * k_j.double()).sum()) / 8
    assert abs(score(1_000_005, 1_000_000, dtype) - score(5, 0, torch.float64)) < most


def test_alibi_slopes():
    assert alibi_slopes(8).tolist() == [2.0 ** -i for i in range(1, 9)]  # the paper's example
    for n_head in range(1, 33):
        assert alibi_slopes(n_head).tolist() == pytest.approx(plain_gpt.alibi_slopes(n_head), rel=1e-12), n_head
