"""Blocks under a model whose weights change: what was computed with other weights is never found."""
import torch
from test_paged import begin, feed, full_logits, model, n_computed, pool


@torch.inference_mode()
def test_changed_weights_are_not_served_from_old_blocks():
    m = model()
    p = pool(m)
    tokens = list(range(9))
    a, _ = begin(p, tokens)
    assert n_computed(p, tokens) == 1
    m.lm_head.weight[3, 5] += 1
    assert n_computed(p, tokens) == 9
    assert torch.allclose(begin(p, tokens)[1], full_logits(m, tokens), atol=1e-5)
    feed(p, {a: [1, 2, 3]})  # its first tokens were computed with the old weights: its blocks must not be shared
    longer = tokens + [1, 2, 3, 4]
    assert n_computed(p, longer) == 5 and torch.allclose(begin(p, longer)[1], full_logits(m, longer), atol=1e-5)


@torch.no_grad()
def test_what_was_begun_with_other_weights_is_not_found():
    """A sequence whose first tokens were computed with other weights, which come back later."""
    m = model()
    p, tokens = pool(m), list(range(9))
    a = begin(p, tokens[:3])[0]
    first, m.lm_head.weight.data = m.lm_head.weight.data, m.lm_head.weight + 1
    feed(p, {a: tokens[3:8]})
    m.lm_head.weight.data = first
    assert n_computed(p, tokens) == 9
    m.load_state_dict(model(1).state_dict())
    feed(p, {a: [1] * 5})
    m.load_state_dict(model().state_dict())
    assert n_computed(p, tokens[:8] + [1] * 6) == 14


def copied_in(m, other):
    for p, q in zip(m.parameters(), other.parameters()):
        p.data.copy_(q)


def permuted(m):
    """The rows of each matrix in the opposite order."""
    for p in m.parameters():
        if p.dim() == 2:
            p.data.copy_(p.data.flip(0))


@torch.inference_mode()
def test_blocks_computed_with_weights_that_were_swapped_in_and_out_are_not_found():
    """As an exponential moving average is: copied in through .data, and back, between two steps."""
    m, average, tokens = model(), model(1), list(range(13))
    kept = model()
    p = pool(m)
    a = begin(p, tokens[:7])[0]
    copied_in(m, average)
    feed(p, {a: tokens[7:12]})  # fills the block of tokens 4 to 7, and that of 8 to 11
    copied_in(m, kept)
    assert n_computed(p, tokens) == 13 and torch.allclose(begin(p, tokens)[1], full_logits(m, tokens), atol=1e-5)
    feed(p, {a: tokens[12:] + [1, 2, 3]})  # computed with both: its blocks must not be shared
    longer = tokens + [1, 2, 3, 4]
    assert n_computed(p, longer) == 17 - 12 and torch.allclose(begin(p, longer)[1], full_logits(m, longer), atol=1e-5)


@torch.inference_mode()
def test_blocks_computed_while_any_parameter_differs_are_not_found():
    """Each parameter, changed where torch counts it, or replaced; before a pass and back after it, or during it."""
    for name, _ in model().named_parameters():
        m, tokens = model(), list(range(9))
        p, owner = pool(m), m.get_submodule(name.rpartition('.')[0])
        a = begin(p, tokens[:7])[0]
        first = getattr(owner, name.rpartition('.')[2])
        setattr(owner, name.rpartition('.')[2], torch.nn.Parameter(first * 1.5 + 1))
        feed(p, {a: tokens[7:]})
        setattr(owner, name.rpartition('.')[2], first)
        assert n_computed(p, tokens) == 9, name
    m = model()
    p = pool(m)
    hook = m.transformer.h[0].register_forward_hook(lambda *_: m.transformer.wpe.weight.add_(1.0) is None or None)
    begin(p, list(range(9)))
    hook.remove()
    assert n_computed(p, list(range(9))) == 9


@torch.inference_mode()
def test_blocks_of_permuted_weights_are_not_shared():
    """A permutation through .data keeps every sum of the weights, and all of torch's counts."""
    m, tokens = model(), list(range(9))
    p = pool(m)
    begin(p, tokens)
    permuted(m)
    assert n_computed(p, tokens) == 9 and torch.allclose(begin(p, tokens)[1], full_logits(m, tokens), atol=1e-5)
