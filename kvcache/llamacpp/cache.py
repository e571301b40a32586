"""
Cells with keys and values.

    cache = CellCache(n_layer, n_head_kv, head_dim, kv_size=256, n_seq_max=8)
    batch = cache.batch({0: [5, 6, 7], 1: [2]})                   # sequence: positions of its new tokens
    x, _ = model.hidden_states(idx, torch.from_numpy(batch.positions), cache.place(batch))

The keys and values of cell c of stream s are in slot s * kv_size + c of each layer.

Follows llama.cpp's src/llama-kv-cache.cpp:

    here                            there
    CellCache.place                 init_batch, and apply of its context
    cpy_k, cpy_v, get_k, get_v      the same names
    k_idxs, kq_mask                 set_input_k_idxs, set_input_kq_mask
    get_n_kv, n_pad                 the same names
    update, CellLayer.turned        update, build_graph_shift (K-shift)
    layer_filter, layer_reuse       the callbacks filter and reuse
    state_save, state_load          state_write, state_read: `save` and `load` of state.py
    memory_breakdown, clear         the same names
"""
from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch

from decode.eager import layers_of_step
from kvcache.llamacpp import state
from kvcache.llamacpp.cells import EMPTY, Streams, Window
from kvcache.storage import BITS, Layer, Scratch
from positions import rotary_angles, rotary_frequencies, rotate


def turned(keys, shifts, frequencies):
    """
    Stored rotary keys (n_head, n, head_dim) whose positions change by shifts, int64 (n,): rotations add up. Computed in
    float64 and rounded once. frequencies: see `rotary_frequencies`.
    """
    angles = rotary_angles(shifts.to(keys.device), frequencies)
    return rotate(keys.to(angles.dtype), angles.cos(), angles.sin()).to(keys.dtype)


class CellLayer(Layer):
    """
    A `Layer` whose rotary keys are turned, when they are read, by the shifts of their cells that are still pending.

    shift: those of all slots, int64 (n_slots,), an array that the cache changes; None if no key needs it. frequencies:
    of rotary positions.
    """

    def __init__(self, *args, shift=None, frequencies=None, **how):
        super().__init__(*args, **how)
        self.shift, self.frequencies = shift, frequencies

    def turned(self, k, shift):
        """Keys k (n_head, *shape, head_dim), turned by the shifts of their cells, an int64 array of that shape."""
        return turned(k, torch.from_numpy(shift), self.frequencies) if shift.any() else k

    def read(self, slots, dtype):
        k, v = super().read(slots, dtype)
        if self.shift is not None:
            k = self.turned(k.transpose(0, 1), self.shift[slots.numpy(force=True)]).transpose(0, 1)
        return k, v


class CellCache(Streams):
    """
    n_layer: layers of the model. n_head_kv, head_dim: heads of keys and values, and channels of each.
    kv_size, n_seq_max, unified: see `Streams`. type_k, type_v: how keys and values are stored, see `SlotArray`.
    n_pad: the number of cells that are attended over is a multiple of this, or kv_size.
    n_swa, swa_type: size and kind of a `Window`; kind 'none' for no window.
    v_trans: values transposed, see `SlotArray`. device: of keys and values; one for all, or a function of the layer.
    layer_filter: a function of the layer: does it have a cache? Layers without one raise ValueError when used.
    layer_reuse: a function of the layer: an earlier layer whose keys and values it reads instead of its own, or None.
    can_shift: positions can be changed. Keys are rotary, of base rope_base and rope_scaling, see `GPTConfig`; rope_base
        is None if they have no positions in them, as with ALiBi. Learned positions cannot be changed.
    """

    def __init__(self, n_layer, n_head_kv, head_dim, kv_size, n_seq_max, unified=True, type_k='float32',
                 type_v='float32', n_pad=1, n_swa=0, swa_type='none', v_trans=False, device='cpu', layer_filter=None,
                 layer_reuse=None, can_shift=False, rope_base=10000.0, rope_scaling=()):
        super().__init__(kv_size, n_seq_max, unified, Window(n_swa, swa_type) if swa_type != 'none' else None,
                         can_shift)
        self.n_head_kv, self.head_dim, self.n_pad = n_head_kv, head_dim, n_pad
        self.rope_base, self.rope_scaling, self.frequencies = rope_base if can_shift else None, rope_scaling, None
        if self.rope_base is not None:
            if head_dim % 2:
                raise ValueError(f"rotary positions need an even head_dim, not {head_dim}")
            self.frequencies = rotary_frequencies(head_dim, rope_base, rope_scaling)
        # keys in fewer bits would drift with each rounding: they stay as they were written, and are turned when read
        self.turns_when_read = self.frequencies is not None and BITS.get(type_k, 0) < 32
        shift, scratch, self.layers = self.shift if self.turns_when_read else None, Scratch(), []
        for layer in range(n_layer):
            if layer_filter and not layer_filter(layer):
                self.layers.append(None)
            elif layer_reuse and (reused := layer_reuse(layer)) is not None:
                if not 0 <= reused < layer or self.layers[reused] is None:
                    raise ValueError(f"layer {layer} cannot share the cache of layer {reused}: "
                                     "name an earlier layer that has a cache")
                self.layers.append(self.layers[reused])
            else:
                self.layers.append(CellLayer(len(self.shift), n_head_kv, head_dim, type_k, type_v,
                                             device(layer) if callable(device) else device, v_trans, scratch,
                                             shift=shift, frequencies=self.frequencies))
        self.own_layers = list(dict.fromkeys(filter(None, self.layers)))  # that store keys and values, each once
        if not self.own_layers:
            raise ValueError("layer_filter leaves no layer with a cache")

    def layer_of(self, number):
        if not 0 <= number < len(self.layers) or self.layers[number] is None:
            raise ValueError(f"layer {number} has no cache here: take it from the cache that has it")
        return self.layers[number]

    def clear(self):
        """Remove all sequences and zero all keys and values: a mask does not hide a NaN from the next sequence."""
        super().clear()
        for layer in self.own_layers:
            layer.zero()

    def seq_cp(self, source, target, p0=-1, p1=-1):
        a, b = self.stream_of(source), self.stream_of(target)
        super().seq_cp(source, target, p0, p1)
        for layer in self.own_layers if a != b else ():
            layer.copy(a * self.kv_size, b * self.kv_size, self.streams[a].end)

    def place(self, batch, device=None):
        """
        Store a batch, and return what `GPT.hidden_states` takes as its kv_cache: for each layer an object with
        `append`, see `decode.eager.StepLayer`. `NoSlot` if there is no room, with nothing changed. If the forward pass
        fails the cells stay in use: `take_back` frees them.

        device: of the model's tokens; by default that of the first layer with a cache.
        """
        found = self.find_slot(batch)
        try:
            self.apply(found, batch)
            return self.layers_for(batch, found, device)
        except BaseException:
            self.take_back(batch)
            raise

    def take_back(self, batch):
        """Remove a batch that was stored."""
        for seq, start in batch.first.items():
            self.seq_rm(seq, start)

    def layers_for(self, batch, found, device=None):
        """What `place` returns for a batch that is stored in the cells that were found."""
        self.update()
        device, layers = device or self.own_layers[0].device, []
        for number, layer in enumerate(self.layers):
            if layer is None:  # its write raises ValueError
                layer = SimpleNamespace(device=device, write=lambda *_, number=number: self.layer_of(number))
            elif layer in layers:  # an earlier one writes
                layer = SimpleNamespace(device=layer.device, read=layer.read, write=lambda *_: None)
            layers.append(layer)
        own, read = self.slots_of(batch, found).ravel(), self.slots_of(batch, np.arange(self.get_n_kv(batch)))
        return layers_of_step(layers, device, own, read, *self.keys(batch))

    def slots_of(self, batch, cells):
        """The slots of cells, (B, n) or (n,) for all, in the streams of a batch, (B, n)."""
        return batch.streams[:, None] * self.kv_size + cells

    def k_idxs(self, batch, found):
        """The slots for new keys and values, (B * T,), in the cells that were found."""
        return torch.from_numpy(self.slots_of(batch, found)).flatten()

    def get_n_kv(self, batch):
        """How many cells of each stream a stored batch sees: up to the last used one, to a multiple of n_pad."""
        end = max(self.streams[s].end for s in batch.streams)
        return min(self.kv_size, max(1, -(-end // self.n_pad)) * self.n_pad)

    def keys(self, batch):
        """
        The first n_kv cells of each stream: their positions, (B, n_kv), and which of them each token of a stored batch
        may look at, bool (B, T, n_kv): those of its own sequence, within the window of the cache.
        """
        n_kv = self.get_n_kv(batch)
        pos = np.stack([self.streams[s].pos[:n_kv] for s in batch.streams])
        if self.unified:
            # sequences that share a token own the same cells, see `find_slot`, so that the first one's will do
            rows, counts = zip(*((seqs[0], stop - start) for seqs, start, stop in batch.spans))
            allowed = np.repeat(self.streams[0].owners[rows, :n_kv], counts, axis=0)[None]
        else:
            allowed = np.repeat((pos != EMPTY)[:, None], batch.positions.shape[1], axis=1)
        if self.window is not None:
            hidden = self.window.hides(pos[:, None], batch.positions[..., None])
            allowed &= np.logical_not(hidden, out=hidden)  # in place: a mask of a long prompt is large
        return pos, allowed

    def kq_mask(self, batch):
        """
        The mask of a stored batch, bool (B, 1, T, n_kv): True where a token may look at a cell, which is one of its
        sequence, at no later position, and within the window.
        """
        pos, allowed = self.keys(batch)
        allowed &= pos[:, None] <= batch.positions[..., None]
        return torch.from_numpy(allowed)[:, None]

    @torch.no_grad()
    def cpy_k(self, layer, k, idxs):
        """Write keys (n, n_head_kv, head_dim) of a layer to slots idxs (n,)."""
        self.layer_of(layer).k.write(idxs, k.transpose(0, 1))

    @torch.no_grad()
    def cpy_v(self, layer, v, idxs):
        """Write values (n, n_head_kv, head_dim) of a layer to slots idxs (n,)."""
        self.layer_of(layer).v.write(idxs, v.transpose(0, 1))

    def get_k(self, layer, n_kv, streams=slice(None)):
        """
        Keys of the first n_kv cells of a slice of the streams, (n_stream, n_kv, n_head_kv, head_dim), rotated for their
        present positions. A view, unless they have to be dequantised or rotated.
        """
        self.update()
        layer, shift = self.layer_of(layer), self.shift.reshape(-1, self.kv_size)[streams, :n_kv]
        return layer.turned(self.view(layer.k, n_kv, streams), shift).permute(1, 2, 0, 3)

    def get_v(self, layer, n_kv, streams=slice(None)):
        """Values of the same cells. A view, unless they have to be dequantised."""
        return self.view(self.layer_of(layer).v, n_kv, streams).permute(1, 2, 0, 3)

    def view(self, rows, n_kv, streams):
        """The numbers in `SlotArray`, (n_head, n_stream, n_kv, head_dim)."""
        found = [stored.unflatten(1, (-1, self.kv_size))[:, streams, :n_kv] for stored in rows.tensors()]
        return rows.widened(found, rows.data.dtype if rows.scale is None else torch.float32, Scratch())

    def update(self):
        """Rotate the keys in 32 bits or more whose positions have changed, once, before they are read."""
        if not self.can_shift or self.turns_when_read:
            return
        moved = np.concatenate([stream * self.kv_size + np.flatnonzero(cells.shift[:cells.end])
                                for stream, cells in enumerate(self.streams)])
        slots, shift = torch.from_numpy(moved), torch.from_numpy(self.shift[moved])
        for layer in self.own_layers if len(moved) and self.frequencies is not None else ():
            data, where = layer.k.data, slots.to(layer.device)
            data[:, where] = turned(data[:, where], shift, self.frequencies)
        self.shift[moved] = 0

    state_save, state_load = state.save, state.load

    def memory_breakdown(self):
        """A Counter {device: bytes} of the stored keys and values; the memory of the layers' `Scratch` comes on top."""
        sizes = Counter()
        for layer in self.own_layers:
            sizes[str(layer.device)] += layer.nbytes()
        return sizes
