"""
Cells with keys and values in them: llama.cpp's cache (llama-kv-cache.cpp) for a model.

    cache = KVCache(n_layer, n_head_kv, head_dim, kv_size=256, n_seq_max=8)
    forward = cache.forward(cache.batch({0: [5, 6, 7], 1: [2]}))     # sequence: positions of its new tokens

`Streams` says which cells the tokens of a batch go to; here are the rows behind the cells, and what a forward pass needs of them:
where to write, what to read, who sees what.
"""
from contextlib import contextmanager

import numpy as np
import torch

from kvcache import state
from kvcache.cells import EMPTY, Window
from kvcache.placement import Forward, Layer, Placement, beginning
from kvcache.rotary import Rotary
from kvcache.storage import Scratch
from kvcache.streams import Streams


class KVCache(Streams):
    """
    n_layer: layers of the model. n_head_kv, head_dim: heads of keys and values, and channels of each.
    kv_size, n_seq_max, unified: see `Streams`. type_k, type_v: how keys and values are kept, see `Rows`.
    n_pad: what is attended over is a multiple of so many cells, or all. n_swa, swa_type: a `Window` ('none' for none).
    v_trans: values with the cells side by side. device: of the data, one for all or a function of the layer.
    layer_filter: which layers have a cache; the others refuse to be asked. layer_reuse: for a layer, an earlier one whose keys
    and values it reads instead of having its own, or None.
    can_shift: keys are rotary, of base rope_base, and are turned when positions are changed. Learned positions cannot be: they
    are baked into keys and values.
    """

    def __init__(self, n_layer, n_head_kv, head_dim, kv_size, n_seq_max, unified=True, type_k='float32', type_v='float32', n_pad=1,
                 n_swa=0, swa_type='none', v_trans=False, device='cpu', layer_filter=None, layer_reuse=None, can_shift=False, rope_base=10000.0):
        if min(n_layer, n_head_kv, head_dim, kv_size, n_seq_max, n_pad) < 1:
            raise ValueError("n_layer, n_head_kv, head_dim, kv_size, n_seq_max and n_pad must be at least 1")
        self.rope_base = rope_base if can_shift else None
        super().__init__(kv_size, n_seq_max, unified, None if swa_type == 'none' else Window(n_swa, swa_type), can_shift)
        self.n_head_kv, self.head_dim, self.n_pad = n_head_kv, head_dim, n_pad
        self.rotary = Rotary(head_dim, rope_base) if can_shift else None
        self.layers, scratch = [], Scratch()
        for layer in range(n_layer):
            reused = layer_reuse(layer) if layer_reuse else None
            if layer_filter and not layer_filter(layer):
                self.layers.append(None)
            elif reused is not None:
                if not 0 <= reused < layer or self.layers[reused] is None:
                    raise ValueError(f"layer {layer} cannot share the cache of layer {reused}: it has to come before, and have one")
                self.layers.append(self.layers[reused])
            else:
                self.layers.append(Layer((len(self.streams), kv_size), n_head_kv, head_dim, type_k, type_v,
                                         device(layer) if callable(device) else device, v_trans, self.rotary, scratch))
        if not self.own_layers():
            raise ValueError("layer_filter leaves no layer with a cache")

    def own_layers(self):
        """The layers that have data, each once."""
        return list(dict.fromkeys(layer for layer in self.layers if layer is not None))

    def layer_of(self, number):
        if not 0 <= number < len(self.layers) or self.layers[number] is None:
            raise ValueError(f"layer {number} has no cache here")
        return self.layers[number]

    def clear(self):
        """Forget everything, and what the storage holds as well: a NaN there would outlive its sequence."""
        super().clear()
        for layer in self.own_layers():
            for stored in layer.tensors():
                stored.zero_()

    def seq_cp(self, source, target, p0=-1, p1=-1):
        a, b = self.stream_of(source), self.stream_of(target)
        if a != b:
            self.check_whole(source, p0, p1)
            self.seq_rm(target)  # whatever happens while rows are copied, no cell has rows of another
            for layer in self.own_layers():
                layer.copy(a, b, self.streams[a].used_end())
        super().seq_cp(source, target, p0, p1)

    def forward(self, batch):
        """
        Place a batch, and what the model is handed for it. ValueError if there is no room, and nothing has changed. If
        the model then fails the cells are taken all the same: `seq_rm` each sequence from `batch.first` on.
        """
        slots = self.find_slot(batch)
        if not slots:
            raise ValueError(str(slots))
        with self.taken(slots, batch):
            return Forward(self.layers, self.placement(batch, slots))

    @contextmanager
    def taken(self, slots, batch):
        """Take the cells of a batch, and give them back if what is done with them fails."""
        try:
            self.apply(slots, batch)
            yield
        except BaseException:
            for seq, start in batch.first.items():
                self.seq_rm(seq, start)
            raise

    def placement(self, batch, slots):
        """The `Placement` of a batch whose cells have been taken."""
        self.update()
        index, n_kv = beginning(torch.from_numpy(slots.streams), self.get_n_kv(batch), self.kv_size)
        return Placement(torch.from_numpy(batch.positions), self.k_idxs(slots), index, self.kq_mask(batch, n_kv),
                         turned=self.turned([self.streams[s] for s in slots.streams], n_kv))

    def turned(self, streams, n_kv):
        """By how many positions the keys of these streams are still to be turned, (B, n_kv), or None."""
        if not self.can_shift or not any(cells.shifted() for cells in streams):
            return None
        return torch.from_numpy(np.stack([cells.shift[:n_kv] for cells in streams]))

    def k_idxs(self, slots):
        """The rows that new keys go to, (B * T,): stream * kv_size + cell. Values go to the same."""
        return torch.from_numpy(slots.streams[:, None] * self.kv_size + slots.cells).flatten()

    def get_n_kv(self, batch):
        """How many cells of each stream a batch that is in place attends over: as many as are used, to a multiple of n_pad."""
        end = max(self.streams[s].used_end() for s in self.streams_of(batch))
        return min(self.kv_size, max(1, -(-end // self.n_pad)) * self.n_pad)

    def kq_mask(self, batch, n_kv=None):
        """
        Of a batch that is in place, bool (B, 1, T, n_kv): True where a token may look at a cell, which is one of a
        sequence that the token is a part of, at no later position, and not passed by the window.
        """
        n_kv, positions = n_kv or self.get_n_kv(batch), batch.positions[..., None]  # (B, T, 1)
        pos = np.stack([self.streams[s].pos[:n_kv] for s in self.streams_of(batch)])[:, None]  # (B, 1, n_kv)
        mask = pos <= positions
        if self.unified:
            owners = self.streams[0].owners[:, :n_kv]
            for seqs, start, stop in batch.runs:  # sequences that share a token see the same cells, as `find_slot` asks
                mask[0, start:stop] &= owners[seqs[0]]
        else:
            mask &= pos != EMPTY
        if self.window:
            mask &= pos >= self.window.first(positions)
        return torch.from_numpy(mask[:, None])

    @torch.no_grad()
    def cpy_k(self, layer, k, idxs):
        """Keys (n, n_head_kv, head_dim) of a layer to rows idxs (n,)."""
        self.layer_of(layer).k.write(idxs, k.flatten(1))

    @torch.no_grad()
    def cpy_v(self, layer, v, idxs):
        """Values (n, n_head_kv, head_dim) of a layer to rows idxs (n,)."""
        self.layer_of(layer).v.write(idxs, v.flatten(1))

    def get_k(self, layer, n_kv, streams=slice(None)):
        """
        Keys of the first n_kv cells of a slice of the streams, (n_stream, n_kv, n_head_kv, head_dim), at the positions they have now:
        a view, unless they are dequantised or turned for it.
        """
        self.update()
        k = self.get(self.layer_of(layer).k, n_kv, streams)
        turned = self.turned(self.streams[streams], n_kv)
        return k if turned is None else self.rotary(k, turned.to(k.device))

    def get_v(self, layer, n_kv, streams=slice(None)):
        """Values of the same cells: a view, unless they are dequantised."""
        return self.get(self.layer_of(layer).v, n_kv, streams)

    def get(self, rows, n_kv, streams):
        dtype = rows.data.dtype if rows.scale is None else torch.float32
        return rows.read((streams, slice(n_kv)), dtype).unflatten(-1, (self.n_head_kv, self.head_dim))

    def update(self):
        """
        Turn the keys whose positions have changed, once, before they are read.

        Only keys in float32 are turned where they are, in float64, and rounded. Narrower ones would drift by that; theirs
        stay as they were written, and are turned by the sum of their shifts whenever they are read (`Placement.turned`).
        """
        if not self.can_shift or self.own_layers()[0].k.kind != 'float32':
            return
        shifted = [(stream, cells) for stream, cells in enumerate(self.streams) if cells.shifted()]
        for stream, cells in shifted:
            which = np.flatnonzero(cells.shift)
            shift = torch.from_numpy(cells.shift[which])
            for layer in self.own_layers():
                data = layer.k.data[stream]
                rows = torch.from_numpy(which).to(data.device)
                keys = data[rows].unflatten(-1, (self.n_head_kv, self.head_dim))
                data[rows] = self.rotary(keys.double(), shift.to(data.device)).flatten(-2).to(data.dtype)
            cells.shift[:] = 0

    def state_save(self, path, seq=None):
        """Write one sequence, or all, to a file: see `state.save`."""
        state.save(self, path, seq)

    def state_load(self, path, seq=None):
        """Read what `state_save` wrote, as one sequence or as all of the cache: see `state.load`."""
        state.load(self, path, seq)

    def memory_breakdown(self):
        """{device: bytes} of all that is stored; what the layers' `Scratch` holds comes on top."""
        sizes = {}
        for layer in self.own_layers():
            device = str(layer.k.data.device)
            sizes[device] = sizes.get(device, 0) + layer.nbytes()
        return sizes
