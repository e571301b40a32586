"""
Cells with keys and values.

    cache = CellCache(n_layer, n_head_kv, head_dim, kv_size=256, n_seq_max=8)
    batch = cache.batch({0: [5, 6, 7], 1: [2]})                   # sequence: positions of its new tokens
    x, _ = model.hidden_states(idx, torch.from_numpy(batch.positions), cache.place(batch))

The keys and values of cell c of stream s are in slot s * kv_size + c of each layer.

Follows llama.cpp's src/llama-kv-cache.cpp:

    here                            there
    CellCache.place                 init_batch, and apply of its context
    a layer's write and read        cpy_k and cpy_v, get_k and get_v
    slots_of, keys                  set_input_k_idxs, set_input_kq_mask
    update, CellLayer.read          update, build_graph_shift (K-shift)
    layer_filter, layer_reuse       the callbacks filter and reuse
    state_save, state_load          state_write, state_read: `save` and `load` of state.py
    clear                           the same name
"""
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from decode.eager import layers_of_step
from kvcache.llamacpp import state
from kvcache.llamacpp.cells import EMPTY, Streams
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

    def read(self, slots, dtype):
        k, v = super().read(slots, dtype)
        if self.shift is not None and (shift := self.shift[slots.numpy(force=True)]).any():
            k = turned(k.transpose(0, 1), torch.from_numpy(shift), self.frequencies).transpose(0, 1)
        return k, v


class CellCache(Streams):
    """
    n_layer: layers of the model. n_head_kv, head_dim: heads of keys and values, and channels of each.
    kv_size, n_seq_max, unified, n_swa: see `Streams`. type_k, type_v: how keys and values are stored, see `SlotArray`.
    device: of keys and values; one for all, or a function of the layer.
    layer_filter: a function of the layer: does it have a cache? Layers without one raise ValueError when used.
    layer_reuse: a function of the layer: an earlier layer whose keys and values it reads instead of its own, or None.
    can_shift: positions can be changed. Keys are rotary, of base rope_base and rope_scaling, see `GPTConfig`; rope_base
        is None if they have no positions in them, as with ALiBi. Learned positions cannot be changed.
    """

    def __init__(self, n_layer, n_head_kv, head_dim, kv_size, n_seq_max, unified=True, type_k='float32',
                 type_v='float32', n_swa=0, device='cpu', layer_filter=None, layer_reuse=None, can_shift=False,
                 rope_base=10000.0, rope_scaling=()):
        super().__init__(kv_size, n_seq_max, unified, n_swa, can_shift)
        self.n_head_kv, self.head_dim = n_head_kv, head_dim
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
                                             device(layer) if callable(device) else device, scratch, shift=shift,
                                             frequencies=self.frequencies))
        self.own_layers = list(dict.fromkeys(filter(None, self.layers)))  # that store keys and values, each once
        if not self.own_layers:
            raise ValueError("layer_filter leaves no layer with a cache")

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
        def refuse(number, *new):
            raise ValueError(f"layer {number} has no cache here: take it from the cache that has it")
        self.update()
        device, layers = device or self.own_layers[0].device, []
        for number, layer in enumerate(self.layers):
            if layer is None:
                layer = SimpleNamespace(device=device, write=partial(refuse, number))
            elif layer in layers:  # an earlier one writes
                layer = SimpleNamespace(device=layer.device, read=layer.read, write=lambda *_: None)
            layers.append(layer)
        pos, allowed = self.keys(batch)
        own, read = self.slots_of(batch, found).ravel(), self.slots_of(batch, np.arange(pos.shape[1]))
        return layers_of_step(layers, device, own, read, pos, allowed)

    def slots_of(self, batch, cells):
        """The slots of cells, (B, n) or (n,) for all, in the streams of a batch, (B, n)."""
        return batch.streams[:, None] * self.kv_size + cells

    def keys(self, batch):
        """
        The cells of each stream of a stored batch, up to the last one that is used: their positions, (B, n_kv), and
        which of them each token may look at, bool (B, T, n_kv): those of its own sequence, within the window of the
        cache.
        """
        n_kv = max(self.streams[s].end for s in batch.streams)
        pos = np.stack([self.streams[s].pos[:n_kv] for s in batch.streams])
        if self.unified:
            # sequences that share a token own the same cells, see `find_slot`, so that the first one's will do
            rows, counts = zip(*((seqs[0], stop - start) for seqs, start, stop in batch.spans))
            allowed = np.repeat(self.streams[0].owners[rows, :n_kv], counts, axis=0)[None]
        else:
            allowed = np.repeat((pos != EMPTY)[:, None], batch.positions.shape[1], axis=1)
        if self.n_swa:
            allowed &= pos[:, None] > batch.positions[..., None] - self.n_swa  # in place: a mask may be large
        return pos, allowed

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
