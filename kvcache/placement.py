"""
What every cache system has in common. One forward pass asks three things of it:

    place    which rows do the new tokens go to, and which rows are read?    `Placement`: once a forward, for all layers
    encode   how is a row kept?                                              `storage.Rows`: each layer its own
    see      which of the rows read may a token look at?                     `Placement.mask`, of positions, owners and window

A system makes a `Placement` and hands the model a `Forward` in place of its list of tuples. The model's one attention function
then asks each layer the one question there is, `append(k, v)`, and gets keys, values and mask.
"""
import math
from dataclasses import dataclass, field, replace

import torch

from kvcache.storage import Rows, Scratch

LONG_MASK = 2**26  # bytes: 2,048 tokens over 30,000 keys would be 246 MB in float32


@dataclass(frozen=True)
class Placement:
    """
    Where the tokens (B, T) of one forward pass stand.

    positions: (B, T), what the position embeddings are looked up by.
    rows: (n,) where the new keys and values are written, in the order of the tokens; which: those of the B * T tokens that are
        written at all, (n,), or None for all.
    index: the rows that are read, as `Rows.read` takes it, (B, K) in all.
    mask: (B, 1, T, K), True where a token may look, or None where all may look at all.
    turned: (B, K), by how many positions the keys read are still to be turned, or None. added: of `added_mask`, once it is made.
    """
    positions: torch.Tensor
    rows: torch.Tensor
    index: tuple | int | torch.Tensor
    mask: torch.Tensor | None
    which: torch.Tensor | None = None
    turned: torch.Tensor | None = None
    added: dict = field(default_factory=dict)

    def added_mask(self, like):
        """
        The mask for queries like these. A short one as it is added to the scores, 0 and -inf, which attention would
        otherwise make of it in each layer anew; one of more than LONG_MASK bytes stays bool.
        """
        if self.mask is None:
            return None
        if self.mask.numel() * like.element_size() > LONG_MASK:
            return self.mask.to(like.device)
        key = like.dtype, like.device
        if key not in self.added:
            zeros = torch.zeros_like(self.mask, dtype=like.dtype, device=like.device)
            self.added[key] = zeros.masked_fill_(~self.mask.to(like.device), -math.inf)
        return self.added[key]

    def on(self, device):
        """The same for rows on a device."""
        def there(x):
            return x.to(device) if isinstance(x, torch.Tensor) else x
        return replace(self, rows=there(self.rows), index=there(self.index), turned=there(self.turned))


def beginning(numbers, n, n_inner):
    """
    (index, K) to read the first n inner rows of each of these outer ones, (S,) int64: a view if they lie side by side; if not,
    copies of them whole, and K is n_inner.
    """
    first, last = int(numbers[0]), int(numbers[-1])
    if numbers.tolist() == list(range(first, last + 1)):
        return (slice(first, last + 1), slice(n)), n
    return numbers[:, None], n_inner


class Layer:
    """
    The rows of one layer, k and v, (n_outer, n_inner) of n_head * head_dim numbers each. rotary turns keys. scratch: a `Scratch`
    that layers which are not read at the same time can share.
    """

    def __init__(self, shape, n_head, head_dim, type_k='float32', type_v='float32', device='cpu', v_trans=False, rotary=None, scratch=None):
        self.n_head, self.head_dim, self.rotary, self.scratch = n_head, head_dim, rotary, scratch or Scratch()
        self.k = Rows(shape, n_head * head_dim, type_k, device)
        self.v = Rows(shape, n_head * head_dim, type_v, device, transposed=v_trans)

    @property
    def device(self):
        return self.k.data.device

    def nbytes(self):
        return self.k.nbytes() + self.v.nbytes()

    def tensors(self):
        return self.k.tensors() + self.v.tensors()

    def scrub(self):
        """Zeros in the place of what is no number."""
        for stored in self.tensors():
            if stored.is_floating_point():
                stored.nan_to_num_(0.0, 0.0, 0.0)

    def erase(self, rows):
        """Zeros in rows number `rows` (n,), which an earlier pass has written."""
        for each in (self.k, self.v):
            each.write(rows, torch.zeros(len(rows), each.width, device=self.device))

    def copy(self, source, target, n=None):
        """Outer number `target`, a stream or a block, becomes what `source` is, as it is kept; of n rows, or all."""
        for stored in self.tensors():
            stored[target, :n] = stored[source, :n]

    def write(self, placement, k, v):
        """New keys and values, (B, n_head, T, head_dim), to where they belong."""
        for rows, new in ((self.k, k), (self.v, v)):
            new = new.transpose(1, 2).reshape(-1, rows.width)
            rows.write(placement.rows, new if placement.which is None else new[placement.which])

    def read(self, placement, dtype):
        """All keys and values that the placement reads, (B, n_head, K, head_dim) each, until the next layer with this scratch is read."""
        k, v = (rows.read(placement.index, dtype, self.scratch, name).unflatten(-1, (self.n_head, self.head_dim))
                for name, rows in (('k', self.k), ('v', self.v)))
        if placement.turned is not None:
            k = self.rotary(k, placement.turned)
        return k.transpose(1, 2), v.transpose(1, 2)


class PlacedLayer:
    """A layer during one forward pass: in the role of a `LayerKVCache`. One that does not write reads what another has written."""

    def __init__(self, layer, placement, writes=True):
        self.layer, self.placement, self.writes, self.hides = layer, placement, writes, False

    @torch.no_grad()
    def append(self, k, v):
        """
        Write k and v, (B, n_head, T, head_dim), of the new tokens. Returns (k, v, mask, self): all keys and values to attend
        over, (B, n_head, K, head_dim), and what is added to hide those that a token may not see, (B, 1, T, K) or None; where k is.
        Not for training: no gradients go through a cache, and what comes back is overwritten by the next layer.
        """
        if self.writes:
            self.layer.write(self.placement, k, v)
        keys, values = self.layer.read(self.placement, k.dtype)
        if self.hides and self.placement.mask is not None:
            hidden = ~self.placement.mask.any(dim=2).to(keys.device)[..., None]  # (B, 1, K, 1)
            keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
        return keys.to(k.device), values.to(k.device), self.placement.added_mask(k), self


def wipe(layers):
    """Zeros in every row of these layers."""
    for layer in layers:
        for stored in layer.tensors():
            stored.zero_()


class NotNumbers(ValueError):
    """The logits of a forward pass are not numbers. The keys and values that it wrote are zeros now."""


def logits_of(model, idx, forward, last):
    """
    One forward pass: tokens idx, laid out as the forward wants them, to logits (n, vocab_size) of those numbered `last` (n,).

    ValueError, before anything is written, on ids that are not in the vocabulary and if the model is in training
    mode. `NotNumbers` if the logits are not: then the rows that were written are zeros, and so is every NaN and
    infinity in the cache, since it would reach the next owner of its row through any mask.
    """
    if model.training:
        raise ValueError("the model is in training mode, and dropout would stay in the cache: call model.eval() first")
    if idx.min() < 0 or idx.max() >= model.config.vocab_size:
        raise ValueError(f"token ids are 0 to {model.config.vocab_size - 1}, not {int(idx.min())} to {int(idx.max())}")
    x, _ = model.hidden_states(idx.reshape(forward.positions.shape), forward)
    logits = model.lm_head(x.flatten(0, 1)[last])
    if not math.isfinite(logits.sum(dtype=torch.float32)):
        for placed in forward:
            if placed.writes:
                placed.layer.erase(placed.placement.rows)
            placed.layer.scrub()
        raise NotNumbers("the model's logits are not numbers: its weights are broken")
    return logits


class NoCache:
    """In the place of a layer that has no cache."""

    def __init__(self, number):
        self.number = number

    def append(self, k, v):
        raise ValueError(f"layer {self.number} has no cache here: take its place in the list from a cache that has one")


class Forward(list):
    """
    What a system hands the model for one forward pass: a placed layer for each of its layers, and the `positions` (B, T).
    Of a layer that is there more than once only the first writes.
    """

    def __init__(self, layers, placement):
        super().__init__()
        self.positions = placement.positions
        placements, written = {}, set()
        for number, layer in enumerate(layers):
            if layer is None:
                self.append(NoCache(number))
                continue
            if layer.device not in placements:
                placements[layer.device] = placement.on(layer.device)
            self.append(PlacedLayer(layer, placements[layer.device], layer not in written))
            written.add(layer)

    def hiding(self):
        """
        The same pass over zeros in place of the keys and values that none of its tokens may see.

        A mask is added to the scores, and hides finite ones only: a key that broken weights made so large that its
        score is infinite becomes NaN through any mask. So a pass whose logits are not numbers is repeated like this,
        one sequence at a time.
        """
        for placed in self:
            placed.hides = True
        return self
