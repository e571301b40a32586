"""
Dropping the oldest keys from a full cache is not the same as computing the shorter window anew, whatever
the position encoding, as soon as there are two layers. It is attention under a banded mask. KV_CACHE.md
tells the story; this is the measurement (pytest -s prints it).
"""
import math

import pytest
import torch

from model import attend

WINDOW, T, C = 8, 20, 16


def rotate(x, pos):
    """Rotary position embedding (arXiv:2104.09864) of x (T, C) at positions pos (T,)."""
    angle = pos[:, None] * 10000.0 ** (-torch.arange(0, C, 2, dtype=torch.float64) / C)
    a, b = x[:, ::2], x[:, 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(1)


def alibi(q_pos, k_pos):
    """A penalty on distance (arXiv:2108.12409), added to the scores."""
    return -0.3 * (q_pos[:, None] - k_pos[None, :]).double()


def run(weights, x, positions, encoding, mask):
    """A stack of attention layers with residuals: x (T, C) at positions, T x T mask -> (T, C)."""
    for w_q, w_k, w_v in weights:
        q, k, v = x @ w_q, x @ w_k, x @ w_v
        if encoding == 'rope':
            q, k = rotate(q, positions), rotate(k, positions)
        bias = alibi(positions, positions) if encoding == 'alibi' else torch.zeros(len(x), len(x), dtype=torch.float64)
        bias = bias.masked_fill(~mask, -math.inf)
        x = x + attend(q[None, None], k[None, None], v[None, None], mask=bias)[0, 0]
    return x


def slide(weights, x, encoding):
    """One token at a time with a cache that forgets its oldest row when it is full: the last output, (C,)."""
    caches = [([], []) for _ in weights]
    for pos in range(len(x)):
        h = x[pos:pos + 1]
        for (w_q, w_k, w_v), (keys, values) in zip(weights, caches):
            here = torch.tensor([pos])
            q, k = h @ w_q, h @ w_k
            if encoding == 'rope':
                q, k = rotate(q, here), rotate(k, here)
            keys.append(k)
            values.append(h @ w_v)
            del keys[:-WINDOW], values[:-WINDOW]
            k_pos = torch.arange(pos - len(keys) + 1, pos + 1)
            bias = alibi(here, k_pos) if encoding == 'alibi' else torch.zeros(1, len(keys), dtype=torch.float64)
            h = h + attend(q[None, None], torch.cat(keys)[None, None], torch.cat(values)[None, None], mask=bias)[0, 0]
    return h[0]


@pytest.mark.parametrize('encoding', ['none', 'rope', 'alibi'])
def test_a_sliding_cache_is_a_banded_mask_and_not_recomputation(encoding):
    torch.manual_seed(0)
    x = torch.randn(T, C, dtype=torch.float64)
    pos = torch.arange(T)
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    band = causal & (pos[:, None] - pos[None, :] < WINDOW)
    for n_layer in (1, 2, 4):
        weights = [[torch.randn(C, C, dtype=torch.float64) / math.sqrt(C) for _ in range(3)] for _ in range(n_layer)]
        slid = slide(weights, x, encoding)
        anew = run(weights, x[-WINDOW:], pos[-WINDOW:], encoding, causal[:WINDOW, :WINDOW])[-1]
        banded = run(weights, x, pos, encoding, band)[-1]
        to_anew, to_banded = (slid - anew).abs().max().item(), (slid - banded).abs().max().item()
        print(
            f"\n{encoding:>6}, {n_layer} layers: sliding cache - window anew {to_anew:.1e}, "
            f"sliding cache - banded mask {to_banded:.1e}",
            end='',
        )
        assert to_banded < 1e-12
        assert to_anew < 1e-12 if n_layer == 1 else to_anew > 1e-2
