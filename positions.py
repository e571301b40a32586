"""
What attention makes of positions: rotary angles, ALiBi, windows and sinks; and the cache of a model with a window.

A GPT with learned positions and without a window needs of this file only the causal mask. B sequences, T new tokens, K
keys. Sources: rotary positions, arXiv:2104.09864; ALiBi, arXiv:2108.12409; windows with sinks, arXiv:2309.17453.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F

LONG_MASK = 2**26  # bytes: a mask of 2,048 tokens over 30,000 keys would be 246 MB in float32


def check_position(config):
    """ValueError if the position settings of a GPTConfig do not go together."""
    c = config
    if c.position not in ('learned', 'rope', 'alibi', 'none'):
        raise ValueError(f"position must be learned, rope, alibi or none, not {c.position!r}")
    if c.gelu not in ('none', 'tanh'):
        raise ValueError(f"gelu must be none (the exact one) or tanh, not {c.gelu!r}")
    for name in ('n_kv_head', 'window', 'n_sink'):
        if type(getattr(c, name)) is not int or getattr(c, name) < 0:
            raise ValueError(f"{name} must be an integer and at least 0, not {getattr(c, name)!r}")
    if c.n_head % (c.n_kv_head or c.n_head):
        raise ValueError(f"n_head {c.n_head} must be divisible by n_kv_head {c.n_kv_head}")
    if c.position == 'rope' and c.n_embd // c.n_head % 2:
        raise ValueError(f"rotary positions turn pairs of channels, and a head has {c.n_embd // c.n_head}: choose "
                         "n_embd and n_head so that n_embd / n_head is even")
    if not isinstance(c.rope_theta, (int, float)) or not 1 <= c.rope_theta < float('inf'):
        raise ValueError(f"rope_theta must be at least 1, not {c.rope_theta!r}")
    if c.n_sink and not c.window:
        raise ValueError(f"n_sink {c.n_sink} needs a window: without one, all positions are always seen")
    if c.window + c.n_sink >= c.block_size:
        raise ValueError(f"window {c.window} and n_sink {c.n_sink} must be less than block_size {c.block_size} in all, "
                         "or training would never see what the window hides: use window=0 for none")


def as_int64(name, x):
    """x, a tensor of any integer dtype, as int64. ValueError for anything else; `name` stands for x in the message."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} must be a tensor of integers, not a {type(x).__name__}: {x!r:.60}")
    if x.is_floating_point() or x.is_complex() or x.dtype is torch.bool:
        raise ValueError(f"{name} must be integers, not {x.dtype}: convert them with .long()")
    return x if x.dtype is torch.int64 else x.long()


def checked_cache_pos(config, device, cache_pos, B, T):
    """
    The position where T new tokens of each of B sequences begin: cache_pos, an int, or an integer tensor (B,) on
    device, as int64. ValueError if it is something else, negative, or if the tokens do not fit behind it.
    """
    smallest, largest = cache_pos, cache_pos
    if isinstance(cache_pos, torch.Tensor):
        cache_pos = as_int64('cache_pos', cache_pos)
        if cache_pos.shape != (B,) or cache_pos.device != device:
            raise ValueError(f"cache_pos must be ({B},), one for each sequence, on {device}; "
                             f"not {tuple(cache_pos.shape)} on {cache_pos.device}")
        smallest, largest = cache_pos.aminmax() if B else (0, 0)
    elif type(cache_pos) is not int:
        raise ValueError(f"cache_pos must be an int or a tensor of integers, not {cache_pos!r}")
    if smallest < 0:
        raise ValueError(f"cache_pos must not be negative: {cache_pos}")
    if largest + T > config.max_positions:
        raise ValueError(f"out of context: cache_pos {cache_pos} + {T} new tokens > block_size {config.block_size}")
    return cache_pos


def checked_input(config, device, idx, kv_cache):
    """
    Check tokens idx (B, T) and the cache that they go to, a list of tuples or None, before anything is written.
    Returns (idx as int64, the position of its first token: an int or int64 (B,)). ValueError if they do not fit.
    """
    idx, c = as_int64('token ids', idx), config
    if idx.dim() != 2 or idx.size(1) == 0:
        raise ValueError(f"token ids must be (B, T) with at least one token, not {tuple(idx.shape)}")
    if kv_cache is None:
        return idx, checked_cache_pos(c, device, 0, *idx.shape)
    if len(kv_cache) != c.n_layer:
        raise ValueError(f"kv_cache has {len(kv_cache)} layers, but the model has {c.n_layer}")
    if any(len(layer_cache) != (4 if c.window else 3) for layer_cache in kv_cache):
        raise ValueError(f"with window={c.window} the cache of a layer must be a tuple of {4 if c.window else 3}, "
                         f"not of {sorted({*map(len, kv_cache)})}: begin with empty_cache()")
    (first, _, given), shape = kv_cache[0][:3], (len(idx), c.n_kv_head, c.n_slots, c.head_dim)
    cache_pos, expected = checked_cache_pos(c, device, given, *idx.shape), (shape, first.dtype, idx.device)
    for layer, (k_cache, v_cache, pos, *_) in enumerate(kv_cache):
        same = pos is given or type(pos) is type(given) is int and pos == given
        if not same and not (isinstance(pos, torch.Tensor) and isinstance(given, torch.Tensor)
                             and torch.equal(checked_cache_pos(c, device, pos, *idx.shape), cache_pos)):
            raise ValueError(f"cache_pos is {cache_pos} in layer 0 but {pos} in layer {layer}")
        for name, cache in (('k_cache', k_cache), ('v_cache', v_cache)):
            if (cache.shape, cache.dtype, cache.device) != expected:
                raise ValueError(f"{name} of layer {layer} is {tuple(cache.shape)}, {cache.dtype} on "
                                 f"{cache.device}, but model, tokens and layer 0 need {expected}")
    return idx, cache_pos


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


def rotary_angles(positions, head_dim, theta):
    """Angles of the head_dim / 2 pairs of channels, float64 (*positions.shape, head_dim / 2), of integer positions."""
    # in float64: at position 1,000,000 an angle in float32 is off by 0.06
    where = 'cpu' if positions.device.type == 'mps' else positions.device  # mps has no float64
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=where)
    return positions.to(where, torch.float64)[..., None] * float(theta) ** (-pairs / head_dim)


def wide(dtype):
    """float32, or the dtype itself if it has more bits."""
    return torch.promote_types(dtype, torch.float32)


def rotate(x, cos, sin):
    """Turn each pair of channels (i, i + head_dim / 2) of x by its angle. Returns x's dtype."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Keys(NamedTuple):
    """
    The keys that a cache returns. pos: their positions, int64 (K,), (B, K), or (B, T, K). allowed: bool, broadcastable
    to (B, T, K), False where a key is none of the query's sequence; None if all are allowed.
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
        self.masks = {}   # {(id of keys, n_keys): the keys, so that their id stays theirs, and their mask}
        self.shared = {}  # what the cache of the first layer has computed for those of all others
        if config.position == 'rope':
            self.angles = self.cos_sin(q_pos)
            if config.n_sink:  # a sink is no further away than in a cache that has nothing between it and the window
                self.sink_angles = self.cos_sin(q_pos.clamp(max=config.n_sink + config.window - 1))

    def cos_sin(self, positions):
        angles = rotary_angles(positions, self.config.head_dim, self.config.rope_theta)
        angles = angles[:, None] if positions.dim() == 2 else angles  # (B, 1, T, head_dim / 2): the same for all heads
        return tuple(x.to(positions.device, wide(self.dtype)) for x in (angles.cos(), angles.sin()))

    def rotated(self, x):
        """Queries or keys x (B, n_head, T, head_dim), turned to their positions."""
        return rotate(x, *self.angles)

    def keys_from_zero(self, n):
        """The `Keys` of positions 0 to n - 1, the same object for all layers."""
        if n not in self.shared:
            self.shared[n] = Keys(torch.arange(n, device=self.q_pos.device))
        return self.shared[n]

    def mask(self, keys, n_keys):
        """
        The mask for `attend`: None where the causal rule is enough, or bool, or floats that are added to the scores.

        keys: the `Keys` of a cache, or None for the n_keys consecutive positions that end with the last query's.
        """
        c = self.config
        if keys is None and c.position != 'alibi' and not 0 < c.window < n_keys - c.n_sink:
            return None
        if (id(keys), n_keys) not in self.masks:
            self.masks[id(keys), n_keys] = keys, self.make_mask(keys, n_keys)
        return self.masks[id(keys), n_keys][1]

    def key_positions(self, keys, n_keys):
        if keys is not None:
            return keys.pos
        return self.q_pos[..., -1:] + torch.arange(1 - n_keys, 1, device=self.q_pos.device)

    def make_mask(self, keys, n_keys):
        """bool or float, (T, K) or (B, 1, T, K), or with ALiBi float (n_head, T, K) or (B, n_head, T, K)."""
        c, q_pos, k_pos = self.config, self.q_pos, self.key_positions(keys, n_keys)
        q_pos, k_pos = q_pos[..., :, None], k_pos if k_pos.dim() == 3 else k_pos[..., None, :]
        mask = visible(q_pos, k_pos, c.window, c.n_sink)
        if keys is not None and keys.allowed is not None:
            mask = mask & keys.allowed
        if mask.dim() == 3:
            mask = mask[:, None]
        if c.position != 'alibi':
            if keys is None or mask.numel() * self.dtype.itemsize > LONG_MASK:
                return mask
            # as floats, once: from a bool mask attention makes them in each layer
            return torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, -float('inf'))
        distance = q_pos - k_pos
        if c.n_sink:
            distance = torch.where(k_pos < c.n_sink, q_pos.clamp(max=c.n_sink + c.window - 1) - k_pos, distance)
        distance = distance[:, None] if distance.dim() == 3 else distance
        slopes = alibi_slopes(c.n_head, wide(self.dtype), distance.device)[:, None, None]
        return (distance * -slopes).to(self.dtype).masked_fill(~mask, -float('inf'))

    def mask_with_sinks(self, mask, q, k, keys):
        """
        The mask of `mask`, with what a second rotation of the queries changes in the scores of the sinks, which are
        never further away than n_sink + window - 1. q: the queries before any rotation, k: the rotated keys.
        """
        if mask is None:  # nothing is that far away
            return None
        n, K = self.config.n_sink, k.size(2)
        k = k[:, :, :n] if keys is None else k  # then the sinks come first
        turned = (rotate(q, *self.sink_angles) - rotate(q, *self.angles)) * q.size(3) ** -0.5
        change = turned @ k.repeat_interleave(q.size(1) // k.size(1), dim=1).transpose(2, 3)
        if keys is None:
            change = F.pad(change, (0, K - n))
        else:
            other = (keys.pos >= n).reshape(keys.pos.size(0) if keys.pos.dim() > 1 else 1, 1, -1, K)
            change = change.masked_fill(other, 0.0)
        return change.masked_fill(~mask, -float('inf')) if mask.dtype is torch.bool else change + mask


class RollingKVCache(NamedTuple):
    """
    The cache of one layer of a model with a window: `LayerKVCache` of model.py, with a memory that does not grow.

    k_cache, v_cache: (B, n_kv_head, n_sink + 2 * window, head_dim), written in place. The first n_sink slots are for
        the sinks. The others are filled from left to right; when they are full, the last window - 1 rows move to the
        front, which is one row a token. So the keys are always in order and side by side.
    cache_pos: the number of positions that were appended, an int or an integer tensor (B,). Keys are stored rotated.
    first: int64 (B,) on the CPU, the position in slot number n_sink. All tuples of one storage share it.

    Going back to an older tuple is free while the window before its cache_pos is still stored, and refused otherwise.
    A new beginning in the same storage, at any cache_pos up to n_sink, is free as well.
    """
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cache_pos: int | torch.Tensor
    first: torch.Tensor

    @classmethod
    def empty_like(cls, k, window, n_sink):
        """A zero-filled cache for keys such as k (B, n_kv_head, T, head_dim), in their dtype, on their device."""
        shape = (*k.shape[:2], n_sink + 2 * window, k.size(3))
        first = torch.full((len(k),), n_sink, dtype=torch.int64, device='cpu')
        return cls(k.new_zeros(shape), k.new_zeros(shape), 0, first)

    def append(self, k, v, positions):
        """See `LayerKVCache.append`. At most window + 1 tokens: `GPT.forward` feeds more of them in chunks."""
        (k_cache, v_cache, start, first), T = self, k.size(2)
        window, n_sink = positions.config.window, positions.config.n_sink
        if (k.size(0), k.dtype, k.device) != (len(k_cache), k_cache.dtype, k_cache.device):
            raise ValueError(f"cache holds a batch of {len(k_cache)}, {k_cache.dtype} on {k_cache.device}, "
                             f"but the keys are a batch of {k.size(0)}, {k.dtype} on {k.device}")
        if T > window + 1:
            raise ValueError(f"a cache for a window of {window} takes {window + 1} new tokens at once, not {T}: "
                             "split them")
        start = as_int64('cache_pos', start) if isinstance(start, torch.Tensor) else start
        held, keys, low = self.make_room(T, window, n_sink), None, 0
        slot, new = n_sink + start - held, RollingKVCache(k_cache, v_cache, start + T, first)
        if isinstance(held, torch.Tensor):
            return *self.write_ragged(k, v, slot, held, positions), new
        k_cache.narrow(2, slot, T).copy_(k)
        v_cache.narrow(2, slot, T).copy_(v)
        if not n_sink:
            low = max(0, slot - window + 1)  # of the first new token's window
        elif held > n_sink:
            keys = positions.shared.get((held, slot))
            if keys is None:
                keys = positions.shared[held, slot] = Keys(self.slot_positions(held, slot + T, n_sink))
        return k_cache[:, :, low:slot + T], v_cache[:, :, low:slot + T], keys, new

    def write_ragged(self, k, v, slot, held, positions):
        """`append` for sequences that differ in slot (B,), where T rows are written, and held (B,), see `make_room`."""
        (k_cache, v_cache, _, first), (B, _, T, _) = self, k.shape
        n_sink, rows = positions.config.n_sink, torch.arange(B, device=k.device)[:, None]
        slots = slot[:, None] + torch.arange(T, device=k.device)
        k_cache[rows, :, slots], v_cache[rows, :, slots] = k.transpose(1, 2), v.transpose(1, 2)
        n = int(slots.max()) + 1
        shared, name = positions.shared, (*first.tolist(), n)
        if name not in shared:
            shared[name] = Keys(self.slot_positions(held[:, None], n, n_sink))
        return k_cache[:, :, :n], v_cache[:, :, :n], shared[name]

    def slot_positions(self, held, n, n_sink):
        """The positions in the first n slots, int64 (n,), or (B, n) for held (B, 1): the position in slot n_sink."""
        slots = torch.arange(n, device=self.k_cache.device)
        return torch.where(slots < n_sink, slots, slots + (held - n_sink))

    def make_room(self, T, window, n_sink):
        """
        Move rows to the front where T more tokens do not fit behind the others. Returns the position in slot n_sink,
        from which on there is one slot a position: an int, or int64 (B,), on the cache's device, if the sequences
        differ. ValueError, with nothing written, if a token at cache_pos sees positions that are not stored any more.
        """
        (k_cache, v_cache, start, first), held = self, self.first.tolist()
        if isinstance(start, torch.Tensor) or len(set(held)) > 1:
            return self.make_room_ragged(T, window, n_sink)
        held = held[0] if held and start > n_sink else n_sink
        needed = max(n_sink, start - window + 1)  # the first position after the sinks that the new tokens see
        if held > needed:
            raise ValueError(f"positions {needed} to {held - 1} are not in the cache any more, and a token at {start} "
                             "sees them: compute the sequence again")
        slot = n_sink + start - held
        if slot + T <= k_cache.size(2):
            if start <= n_sink:
                first.fill_(n_sink)
            return held
        n = start - needed
        first.fill_(start)  # after an interrupt in what follows, nothing before start counts as stored
        for cache in (k_cache, v_cache):
            cache[:, :, n_sink:n_sink + n] = cache[:, :, slot - n:slot].clone()
        first.fill_(needed)
        return needed

    def make_room_ragged(self, T, window, n_sink):
        """`make_room` for sequences of different lengths."""
        (k_cache, v_cache, start, first), n_slots, device = self, self.k_cache.size(2), self.k_cache.device
        start = as_int64('cache_pos', torch.as_tensor(start, device=device)).expand(len(k_cache))
        held, needed = first.to(device).masked_fill(start <= n_sink, n_sink), (start - window + 1).clamp(min=n_sink)
        if bool((held > needed).any()):
            raise ValueError(f"positions before {held.tolist()} are not in the cache any more, and tokens at "
                             f"{start.tolist()} see them: compute the sequences again")
        full = n_sink + start - held + T > n_slots
        if bool(full.any()):
            rows = full.nonzero()[:, 0]
            moved = (needed - held)[rows, None] + torch.arange(n_sink, n_slots, device=device)
            moved = moved.clamp(max=n_slots - 1)  # (n, slots): the slot whose content comes to each slot
            first.copy_(torch.where(full, start, held))  # see make_room
            for cache in (k_cache, v_cache):
                cache[rows, :, n_sink:] = cache[rows[:, None], :, moved].transpose(1, 2)
            held = torch.where(full, needed, held)
        first.copy_(held)
        return held

    def clone(self):
        """A copy with storage of its own, to branch from."""
        return RollingKVCache(self.k_cache.clone(), self.v_cache.clone(), self.cache_pos, self.first.clone())
