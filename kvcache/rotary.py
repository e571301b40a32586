"""Rotary positions (arXiv:2104.09864), for stored keys whose positions change."""
import torch

from positions import rotary_angles, rotate


class Rotary:
    """
    Rotates each pair of channels (i, i + head_dim / 2) of a key by the angle position * base ** (-2 i / head_dim).

    Rotations add up: a key that was rotated for position p, rotated again by d, is the key for position p + d.
    """

    def __init__(self, head_dim, base=10000.0):
        if head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {head_dim}")
        self.head_dim, self.base = head_dim, base

    def __call__(self, x, pos):
        """x (..., n, n_head, head_dim) rotated by pos (..., n), in x's dtype."""
        angles = rotary_angles(pos, self.head_dim, self.base)[..., None, :]  # (..., n, 1, head_dim / 2)
        return rotate(x, angles.cos().to(x.device, x.dtype), angles.sin().to(x.device, x.dtype))

    def turned(self, keys, pos):
        """
        Stored keys (n_head, n, head_dim), rotated by pos (n,): computed in float64 and rounded once.
        """
        turned = self(keys.to(torch.float64).transpose(0, 1), pos.to(keys.device))
        return turned.transpose(0, 1).to(keys.dtype)
