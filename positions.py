"""
What attention makes of positions: rotary angles, ALiBi, the masks of windows and sinks, and the slots of a ring.

A GPT with learned positions and without a window needs of this file only the causal mask. B sequences, T new tokens, K
keys. Sources: rotary positions, arXiv:2104.09864, scaled for long texts as Llama 3 (arXiv:2407.21783); ALiBi,
arXiv:2108.12409; windows with sinks, arXiv:2309.17453.
"""
import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

LONG_MASK = 2**26  # bytes: a mask of 2,048 tokens over 30,000 keys would be 246 MB in float32
MASKED = set()  # kinds of devices on which attention needs a mask for the causal rule too, see `device.trusted_dtype`


def visible(q_pos, k_pos, window=0, n_sink=0):
    """
    Which keys each query sees: those at no later position, and with a window the last `window` of these, the query's
    own position included, and the first n_sink positions. q_pos (..., T, 1), k_pos (..., 1 or T, K), bool (..., T, K).
    """
    mask = k_pos <= q_pos
    if not window:
        return mask
    near = q_pos - k_pos < window
    return mask & (near | (k_pos < n_sink) if n_sink else near)


def alibi_slopes(n_head, dtype=torch.float64, device='cpu'):
    """The slope of each head, (n_head,), for any number of heads: the rule of the paper, of MPT and of ggml."""
    n = 2 ** (n_head - 1).bit_length()  # the next power of two
    slopes = 2.0 ** (-8.0 / n * torch.arange(1, n + 1, dtype=dtype, device=device))
    return slopes if n == n_head else torch.cat((slopes[1::2], slopes[::2]))[:n_head]


def rotary_frequencies(head_dim, theta, scaling=()):
    """
    The angle from one position to the next of each of the head_dim / 2 pairs of channels, float64 (head_dim / 2,).

    With scaling, see rope_scaling of GPTConfig, as Llama 3.1 has it: pairs that turn less than low_freq_factor times
    within the original block_size turn `factor` times slower, those that turn more than high_freq_factor times turn as
    before, and between the two the frequency is interpolated. So with an original block_size of 1 all pairs turn
    `factor` times slower, as with transformers' linear rope_scaling.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device='cpu')
    frequencies = float(theta) ** (-pairs / head_dim)
    if not scaling:
        return frequencies
    factor, low, high, original = scaling
    n_turns = original * frequencies / (2 * math.pi)
    kept = ((n_turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def rotary_angles(positions, frequencies):
    """Angles, float64 (*positions.shape, head_dim / 2), of integer positions; see `rotary_frequencies`."""
    # in float64: at position 1,000,000 an angle in float32 is off by 0.06
    where = 'cpu' if positions.device.type == 'mps' else positions.device  # mps has no float64
    return positions.to(where, torch.float64)[..., None] * frequencies.to(where)


def wide(dtype):
    """float32, or the dtype itself if it has more bits."""
    return torch.promote_types(dtype, torch.float32)


def rotate(x, cos, sin):
    """Turn each pair of channels (i, i + head_dim / 2) of x by its angle. Returns x's dtype."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def ring_slots(positions, config):
    """
    The slot of each position, an integer tensor, in the cache of a layer: the position itself; with a window the first
    n_sink positions have their own slots, and the others take turns in 2 * window.
    """
    c = config
    if not c.window:
        return positions
    in_ring = c.n_sink + (positions - c.n_sink) % (2 * c.window)
    return torch.where(positions < c.n_sink, positions, in_ring)


def positions_in_ring(last, n, config):
    """
    The position in each of the first n slots, int64 (n,) or (..., n), when the newest position is `last`, int64
    (..., 1). A slot that is still empty has a position after `last`.
    """
    c, slots = config, torch.arange(n, device=last.device)
    if not c.window:
        return slots
    newest = last - (last - slots) % (2 * c.window)  # of those that share the slot
    return torch.where(slots < c.n_sink, slots, torch.maximum(slots, newest))


@dataclass(eq=False)
class KeyPositions:
    """
    Where the keys are that a cache returns. pos: their positions, int64 (K,) or (B, K). allowed: bool, broadcastable
    to (B, T, K), False where a key is not of the query's sequence; None if all are allowed.
    """
    pos: torch.Tensor
    allowed: torch.Tensor | None = None


class Positions:
    """
    The positions of the new tokens of one forward pass, and what follows from them, computed once for all layers.

    config: the model's. q_pos: int64 (T,), or (B, T) if the sequences differ. dtype: of the activations.
    """

    def __init__(self, config, q_pos, dtype):
        self.config, self.q_pos, self.dtype = config, q_pos, dtype
        self.masks = {}  # {(key_positions, n_keys): mask}
        self.in_slots = {}  # {n: the `KeyPositions` of the first n slots}
        if config.position == 'rope':
            self.angles = self.cos_sin(q_pos)
            if config.n_sink:  # a sink is no further away than in a cache that has nothing between it and the window
                self.sink_angles = self.cos_sin(q_pos.clamp(max=config.n_sink + config.window - 1))

    def cos_sin(self, positions):
        c = self.config
        angles = rotary_angles(positions, rotary_frequencies(c.head_dim, c.rope_theta, c.rope_scaling))
        angles = angles[:, None] if positions.dim() == 2 else angles  # (B, 1, T, head_dim / 2): the same for all heads
        return tuple(x.to(positions.device, wide(self.dtype)) for x in (angles.cos(), angles.sin()))

    def rotated(self, x):
        """Queries or keys x (B, n_head, T, head_dim), turned to their positions."""
        return rotate(x, *self.angles)

    @cached_property
    def ends(self):
        """For a q_pos (B, T): (the length of each sequence with its new tokens, int64 (B,); the largest, an int)."""
        end = self.q_pos[:, -1] + 1
        return end, int(end.max())

    @cached_property
    def slots(self):
        """The slots of the new tokens in a cache of tuples, int64 like q_pos: see `ring_slots`."""
        return ring_slots(self.q_pos, self.config)

    def of_slots(self, n):
        """The `KeyPositions` of the first n slots of a cache of tuples with the new tokens, one for all layers."""
        if n not in self.in_slots:
            self.in_slots[n] = KeyPositions(positions_in_ring(self.q_pos[..., -1:], n, self.config))
        return self.in_slots[n]

    def mask(self, key_positions, n_keys):
        """
        The mask for `attend`: None where the causal rule is enough, or bool, or floats that are added to the scores.

        key_positions: of a cache, or None for the n_keys consecutive positions that end with the last query's.
        """
        c = self.config
        is_causal = key_positions is None and c.position != 'alibi' and not 0 < c.window < n_keys - c.n_sink
        if is_causal and self.q_pos.device.type not in MASKED:
            return None
        if (key := (key_positions, n_keys)) not in self.masks:
            self.masks[key] = self.make_mask(*key)
        return self.masks[key]

    def make_mask(self, key_positions, n_keys):
        """bool or float, (T, K) or (B, 1, T, K), or with ALiBi float (n_head, T, K) or (B, n_head, T, K)."""
        c, q_pos = self.config, self.q_pos
        allowed = key_positions and key_positions.allowed
        k_pos = key_positions and key_positions.pos
        if k_pos is None:
            k_pos = q_pos[..., -1:] + torch.arange(1 - n_keys, 1, device=q_pos.device)
        q_pos, k_pos = q_pos[..., :, None], k_pos[..., None, :]
        mask = visible(q_pos, k_pos, c.window, c.n_sink)
        if allowed is not None:
            mask = mask & allowed
        if mask.dim() == 3:
            mask = mask[:, None]
        if c.position != 'alibi':
            if key_positions is None or mask.numel() * self.dtype.itemsize > LONG_MASK:
                return mask
            # as floats, once: from a bool mask attention makes them in each layer
            return torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, -float('inf'))
        distance = q_pos - k_pos
        if c.n_sink:
            distance = torch.where(k_pos < c.n_sink, q_pos.clamp(max=c.n_sink + c.window - 1) - k_pos, distance)
        distance = distance[:, None] if distance.dim() == 3 else distance
        slopes = alibi_slopes(c.n_head, wide(self.dtype), distance.device)[:, None, None]
        return (distance * -slopes).to(self.dtype).masked_fill(~mask, -float('inf'))

    def mask_with_sinks(self, mask, q, k, key_positions):
        """
        `mask`, plus the changes in the scores of the sinks by a second rotation of the queries: in it a sink is never
        further away than n_sink + window - 1. q: the queries before any rotation, k: the rotated keys.
        """
        if mask is None:  # nothing is that far away
            return None
        n, K = self.config.n_sink, k.size(2)
        k = k[:, :, :n] if key_positions is None else k  # then the sinks come first
        extra = (rotate(q, *self.sink_angles) - rotate(q, *self.angles)) * q.size(3) ** -0.5
        change = extra @ k.repeat_interleave(q.size(1) // k.size(1), dim=1).transpose(2, 3)
        if key_positions is None:
            change = F.pad(change, (0, K - change.size(-1)))  # a prompt may be shorter than the sinks
        else:
            other = (key_positions.pos >= n).view(-1, 1, 1, K)
            change = change.masked_fill(other, 0.0)
        return change.masked_fill(~mask, -float('inf')) if mask.dtype is torch.bool else change + mask
