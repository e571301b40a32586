"""Rotary positions (arXiv:2104.09864), for stored keys whose positions change."""
import torch


class Rotary:
    """
    Rotates each pair of channels (i, i + head_dim / 2) of a key by the angle position * base ** (-2 i / head_dim).

    Rotations add up: a key that was rotated for position p, rotated again by d, is the key for position p + d.
    """

    def __init__(self, head_dim, base=10000.0):
        if head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {head_dim}")
        self.frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device='cpu') / head_dim)

    def __call__(self, x, pos):
        """x (..., n, n_head, head_dim) rotated by pos (..., n), in x's dtype."""
        angles = (pos[..., None, None] * self.frequencies.to(pos.device))  # (..., n, 1, head_dim / 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
