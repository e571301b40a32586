"""
One forward pass of a model over stored keys and values.

A cache makes a `Placement`, once for all layers: the rows that the new keys and values are written to, the rows that
are read, and the positions of what is read. The model is handed a `LayerList` in place of its list of tuples; attention
calls `append(k, v, positions)` of each layer, gets keys, values and their `positions.Keys`, and makes the mask of
these. How a row is stored is `storage.Rows`.
"""
import math
from dataclasses import dataclass, replace

import torch

from kvcache.storage import Rows, Scratch
from positions import Keys


@dataclass(frozen=True)
class Placement:
    """
    Where the tokens (B, T) of one forward pass are stored, and what they attend to.

    positions: (B, T), of the tokens.
    rows: (n,) the rows that the new keys and values are written to, in the order of the tokens.
    index: the rows that are read, in the form that `Rows.read` takes, (B, K) in all.
    keys: the `Keys` of the K rows, the same object for all layers, so that attention makes its mask once.
    written: (n,) the numbers of those of the B * T tokens that are written, or None if all are.
    pending_shift: (B, K), by how many positions the keys must still be rotated when they are read, or None.
    """
    positions: torch.Tensor
    rows: torch.Tensor
    index: tuple | int | torch.Tensor
    keys: Keys
    written: torch.Tensor | None = None
    pending_shift: torch.Tensor | None = None

    def keys_for(self, positions):
        """`keys` on the device of these `Positions`, which keep them for the other layers."""
        device, number = positions.q_pos.device, id(self.keys)
        if self.keys.pos.device == device:
            return self.keys
        if number not in positions.shared:
            positions.shared[number] = Keys(*(x if x is None else x.to(device) for x in self.keys))
        return positions.shared[number]

    def to(self, device):
        """The same placement for rows on another device."""
        def moved(x):
            return x.to(device) if isinstance(x, torch.Tensor) else x
        return replace(self, rows=moved(self.rows), index=moved(self.index), pending_shift=moved(self.pending_shift))


def leading_rows(outer, n, n_inner):
    """
    (index, K) for `Rows.read`, to read the first n inner rows of the outer rows `outer`, int64 (S,).

    If the outer rows are consecutive the index is a slice, which reads a view, and K is n. If not, all n_inner rows of
    each are copied, and K is n_inner.
    """
    first, last = int(outer[0]), int(outer[-1])
    if outer.tolist() == list(range(first, last + 1)):
        return (slice(first, last + 1), slice(n)), n
    return outer[:, None], n_inner


class Layer:
    """
    The stored keys and values of one layer: rows k and v, (n_outer, n_inner) of n_head vectors of head_dim numbers.

    type_k, type_v: how they are stored, see `Rows`. v_trans: values transposed. rotary: rotates keys whose positions
    have changed, or None. scratch: a `Scratch`; layers that are read one after the other can share one.
    """

    def __init__(self, shape, n_head, head_dim, type_k='float32', type_v='float32', device='cpu', v_trans=False,
                 rotary=None, scratch=None):
        self.n_head, self.head_dim, self.rotary, self.scratch = n_head, head_dim, rotary, scratch or Scratch()
        self.k = Rows(shape, n_head, head_dim, type_k, device)
        self.v = Rows(shape, n_head, head_dim, type_v, device, transposed=v_trans)

    @property
    def device(self):
        return self.k.data.device

    def nbytes(self):
        return self.k.nbytes() + self.v.nbytes()

    def tensors(self):
        return self.k.tensors() + self.v.tensors()

    def zero_nonfinite(self):
        """Replace every NaN and infinity by 0."""
        for stored in self.tensors():
            if stored.is_floating_point():
                stored.nan_to_num_(0.0, 0.0, 0.0)

    def zero_rows(self, rows):
        """Write zeros to rows number `rows` (n,)."""
        for each in (self.k, self.v):
            each.write(rows, torch.zeros(self.n_head, len(rows), self.head_dim, device=self.device))

    def copy(self, source, target, n=None):
        """Copy the first n inner rows, or all, of outer row `source` to outer row `target`, in their stored form."""
        for stored in self.tensors():
            stored[:, target, :n] = stored[:, source, :n]

    def move(self, source, target, turning=None):
        """
        Copy rows number source (n,) to rows number target (n,), in their stored form; the two may overlap. turning: a
        function of the stored keys (n_head, n, head_dim), or None.
        """
        n_inner = self.k.shape[1]
        for stored in self.tensors():
            a, b = source.to(stored.device), target.to(stored.device)
            rows = stored[:, a // n_inner, a % n_inner]
            if turning is not None and stored is self.k.data:
                rows = turning(rows)
            stored[:, b // n_inner, b % n_inner] = rows

    def write(self, placement, k, v):
        """Store new keys and values, (B, n_head, T, head_dim), in the placement's rows."""
        for rows, new in ((self.k, k), (self.v, v)):
            new = new.transpose(0, 1).flatten(1, 2)
            rows.write(placement.rows, new if placement.written is None else new[:, placement.written])

    def read(self, placement, dtype):
        """
        The keys and values that the placement reads, (B, n_head, K, head_dim) each. They are valid until the next layer
        with the same scratch is read.
        """
        k, v = (rows.read(placement.index, dtype, self.scratch, name) for name, rows in (('k', self.k), ('v', self.v)))
        if placement.pending_shift is not None:
            k = self.rotary(k.transpose(1, 2), placement.pending_shift).transpose(1, 2)
        return k, v


class LayerView:
    """
    A layer during one forward pass, in the place of a `LayerKVCache`.

    writes: False for a layer that reads the keys and values of an earlier one and stores none of its own.
    hiding: see `LayerList.hiding`.
    """

    def __init__(self, layer, placement, writes=True):
        self.layer, self.placement, self.writes, self.hiding = layer, placement, writes, False

    @torch.no_grad()
    def append(self, k, v, positions):
        """
        Store k and v, (B, n_head, T, head_dim), of the new tokens, whose `Positions` are those of the placement.

        Returns (k, v, keys, self): all keys and values to attend over, (B, n_head, K, head_dim), on the device of k,
        and their `Keys`. They are overwritten when the next layer is read, and no gradients go through them.
        """
        if self.writes:
            self.layer.write(self.placement, k, v)
        keys, (all_k, all_v) = self.placement.keys_for(positions), self.layer.read(self.placement, k.dtype)
        all_k, all_v = all_k.to(k.device), all_v.to(k.device)
        if self.hiding:
            mask = positions.mask(keys, all_k.size(2))[:, :1]  # (B, 1, T, K): all heads see the same keys
            seen = mask if mask.dtype is torch.bool else mask > -math.inf
            hidden = ~seen.any(dim=2)[..., None]  # (B, 1, K, 1)
            all_k, all_v = all_k.masked_fill(hidden, 0), all_v.masked_fill(hidden, 0)
        return all_k, all_v, keys, self


class MissingLayer:
    """Stands for a layer without a cache in a `LayerList`; `append` raises ValueError."""

    def __init__(self, number):
        self.number = number

    def append(self, k, v, positions):
        raise ValueError(f"layer {self.number} has no cache here: replace its entry in the list by that of a cache "
                         "that has one")


class LayerList(list):
    """
    The layers of a cache for one forward pass, a `LayerView` for each, and the tokens' `positions`, int64 (B, T).

    If a layer occurs more than once, only its first view writes.
    """

    def __init__(self, layers, placement):
        super().__init__()
        self.positions = placement.positions
        placements, written = {}, set()
        for number, layer in enumerate(layers):
            if layer is None:
                self.append(MissingLayer(number))
                continue
            if layer.device not in placements:
                placements[layer.device] = placement.to(layer.device)
            self.append(LayerView(layer, placements[layer.device], layer not in written))
            written.add(layer)

    def hiding(self):
        """
        Read zeros in place of the keys and values that no token of the pass may see. Returns self.

        A mask is added to the scores, so it hides finite scores only. Broken weights can leave keys so large that a
        score is infinite, and the sum is NaN. A pass whose logits are not numbers is repeated like this, for one
        sequence at a time.
        """
        for view in self:
            view.hiding = True
        return self


def make_layers(model, shape, type_kv):
    """A `Layer` of rows (n_outer, n_inner) = shape for each layer of a model, on its device."""
    c, scratch = model.config, Scratch()
    return [Layer(shape, c.n_kv_head, c.head_dim, type_kv, type_kv, device_of(model), scratch=scratch)
            for _ in range(c.n_layer)]


def device_of(model):
    return model.lm_head.weight.device


def dtype_of(model):
    return model.lm_head.weight.dtype


def zero_all(layers):
    """Set all numbers that these layers store to zero."""
    for layer in layers:
        for stored in layer.tensors():
            stored.zero_()


class NotNumbers(ValueError):
    """The logits of a forward pass are not numbers. The rows that it wrote have been set to zero."""

    def __init__(self):
        super().__init__("the model's logits are not numbers: its weights are broken")


def check_tokens(model, idx):
    """ValueError unless the model is in eval mode, and the tokens idx, int64, are in its vocabulary."""
    check_ids(model, idx.flatten().tolist())  # of a few tokens, sooner than two operations of torch


def check_ids(model, ids):
    """The same for a list of ids."""
    if model.training:
        raise ValueError("the model is in training mode, and dropout would stay in the cache: call model.eval() first")
    if min(ids) < 0 or max(ids) >= model.config.vocab_size:
        raise ValueError(f"token ids are 0 to {model.config.vocab_size - 1}, not {min(ids)} to {max(ids)}")


def check_pass(model, idx, positions):
    """ValueError unless the model can run tokens idx, int64, at these positions, of the same shape."""
    check_tokens(model, idx)
    if idx.shape != positions.shape:
        raise ValueError(f"tokens are {tuple(idx.shape)}, and their positions {tuple(positions.shape)}: "
                         "give one position for each token")
    if positions.max() >= model.config.max_positions:
        raise ValueError(f"out of context: position {int(positions.max())} of block_size {model.config.block_size}")


def logits_of(model, idx, layers, last):
    """
    One forward pass: tokens idx, int64 of the shape of layers.positions, to logits (n, vocab_size) of the tokens
    number `last`.

    layers: a `LayerList`. last: an index into the flattened tokens. Raises ValueError, with nothing written, if the
    model is in training mode, if ids are not in the vocabulary, and if the layers, tokens and positions do not fit the
    model or each other. Raises `NotNumbers` if the logits are not numbers: the rows that were written are then zeros,
    and so is every NaN and infinity in the cache, because a mask would not hide it from the next owner of its row.
    """
    if len(layers) != model.config.n_layer:
        raise ValueError(f"kv_cache has {len(layers)} layers, but the model has {model.config.n_layer}")
    check_pass(model, idx, layers.positions)
    x, _ = model.hidden_states(idx, layers.positions.to(idx.device), layers)
    logits = model.lm_head(x.flatten(0, 1)[last])
    if not math.isfinite(logits.detach().sum(dtype=torch.float32)):
        for view in layers:
            if view.writes:
                view.layer.zero_rows(view.placement.rows)
            view.layer.zero_nonfinite()
        raise NotNumbers
    return logits
