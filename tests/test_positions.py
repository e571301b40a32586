"""Masks, angles and the slots of a ring: windows, sinks, rotary positions, ALiBi, and the mistakes of others."""
import plain_gpt
import pytest
import torch
from plain_gpt import plain
from tiny_models import VOCAB, model_of

from model import GPTConfig
from positions import (
    Positions,
    alibi_slopes,
    positions_in_ring,
    ring_slots,
    rotary_angles,
    rotary_frequencies,
    rotate,
)


@torch.no_grad()
def test_a_window_of_one_more_key_and_sinks_are_other_functions():
    """So a cache that ignores one of them does not give the logits of the judge. `with_window` shares the weights."""
    model = model_of('rope', 0, torch.float64, window=5, n_sink=2)
    idx = torch.randint(VOCAB, (1, 40))
    expected = plain(model, idx)
    for window, n_sink, first in ((6, 2, 7), (5, 0, 6), (5, 1, 6)):
        windowed = model.with_window(window, n_sink)
        assert windowed.lm_head is model.lm_head and model.config.window == 5
        other = plain(windowed, idx)
        torch.testing.assert_close(windowed(idx, idx)[0], other, atol=1e-10, rtol=0)
        assert (other - expected)[:, first:].abs().amax(dim=(0, 2)).min() > 1e-4
    assert torch.equal(plain(model.with_window(6, 2), idx)[:, :7], expected[:, :7])


@pytest.mark.parametrize('window, n_sink', [(1, 0), (5, 0), (15, 0), (5, 2), (1, 1), (7, 3)])
def test_the_slots_of_a_ring(window, n_sink):
    """Against a list in which each position is written in turn."""
    config = GPTConfig(block_size=32, vocab_size=5, n_layer=1, n_head=1, n_embd=4, position='none', window=window,
                       n_sink=n_sink)
    held = [None] * config.n_slots
    for p in range(6 * config.n_slots):
        slot = int(ring_slots(torch.tensor(p), config))
        assert held[slot] is None or n_sink <= held[slot] == p - 2 * window
        held[slot] = p
        found = positions_in_ring(torch.tensor([p]), config.n_slots, config).tolist()
        assert all(at == got if at is not None else got > p for at, got in zip(held, found))


@pytest.mark.parametrize('dtype, most', [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_rotary_angles_at_a_million(dtype, most):
    """Scores depend on the distance alone. With angles in float32 or bfloat16 they would not, this far out."""
    config = GPTConfig(block_size=16, vocab_size=5, n_layer=1, n_head=1, n_embd=64, position='rope', window=8)
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 64), torch.randn(1, 1, 1, 64)

    def score(t, j):
        at = [Positions(config, torch.tensor([p]), dtype).rotated(x.to(dtype)) for p, x in ((t, q), (j, k))]
        return float((at[0].double() * at[1].double()).sum()) / 8

    frequencies = rotary_frequencies(64, 10000.0)

    def turned(x, position):
        angles = rotary_angles(torch.tensor([position]), frequencies)
        return rotate(x.double(), angles.cos(), angles.sin())
    exact = float(turned(q, 5) @ turned(k, 0).mT / 8)
    assert abs(score(5, 0) - exact) < 4 * most and abs(score(1_000_005, 1_000_000) - exact) < 4 * most
    in_float32 = torch.tensor(1_000_005.0) * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    assert (in_float32.double() - rotary_angles(torch.tensor(1_000_005), frequencies)).abs().max() > 1e-3


def test_alibi_slopes():
    assert alibi_slopes(8).tolist() == [2.0 ** -i for i in range(1, 9)]  # the paper's example
    for n_head in range(1, 33):
        assert alibi_slopes(n_head).tolist() == pytest.approx(plain_gpt.alibi_slopes(n_head), rel=1e-12), n_head
