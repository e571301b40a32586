"""
Cells with keys and values: llama.cpp's cache (llama-kv-cache.cpp) for a model.

    cache = CellCache(n_layer, n_head_kv, head_dim, kv_size=256, n_seq_max=8)
    layers = cache.place(cache.batch({0: [5, 6, 7], 1: [2]}))     # sequence: positions of its new tokens
    logits = logits_of(model, idx, layers, last)

`Streams` says which cells the tokens of a batch are stored in. A `CellCache` has the rows behind the cells, and makes
the `Placement` of a forward pass.
"""
from contextlib import contextmanager

import numpy as np
import torch

from kvcache import state
from kvcache.cells import EMPTY, Window
from kvcache.placement import Layer, LayerList, Placement, leading_rows, zero_all
from kvcache.rotary import Rotary
from kvcache.storage import Scratch
from kvcache.streams import NoSlot, Streams
from positions import Keys, visible


class CellCache(Streams):
    """
    n_layer: layers of the model. n_head_kv, head_dim: heads of keys and values, and channels of each.
    kv_size, n_seq_max, unified: see `Streams`. type_k, type_v: how keys and values are stored, see `Rows`.
    n_pad: the number of cells that are attended over is a multiple of this, or kv_size.
    n_swa, swa_type, n_sink: size, kind and sinks of a `Window`; kind 'none' for no window.
    v_trans: values transposed, see `Rows`. device: of keys and values; one for all, or a function of the layer.
    layer_filter: a function of the layer: does it have a cache? Layers without one raise ValueError when used.
    layer_reuse: a function of the layer: an earlier layer whose keys and values it reads instead of its own, or None.
    can_shift: positions can be changed. Keys are rotary, of base rope_base; None if they have no positions in them, as
        with ALiBi. Learned positions cannot be changed.
    """

    def __init__(self, n_layer, n_head_kv, head_dim, kv_size, n_seq_max, unified=True, type_k='float32',
                 type_v='float32', n_pad=1, n_swa=0, swa_type='none', v_trans=False, device='cpu', layer_filter=None,
                 layer_reuse=None, can_shift=False, rope_base=10000.0, n_sink=0):
        sizes = dict(n_layer=n_layer, n_head_kv=n_head_kv, head_dim=head_dim, kv_size=kv_size, n_seq_max=n_seq_max,
                     n_pad=n_pad)
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        self.rope_base = rope_base if can_shift else None
        window = None if swa_type == 'none' else Window(n_swa, swa_type, n_sink)
        super().__init__(kv_size, n_seq_max, unified, window, can_shift)
        self.n_head_kv, self.head_dim, self.n_pad = n_head_kv, head_dim, n_pad
        self.rotary = None if self.rope_base is None else Rotary(head_dim, rope_base)
        self.layers, scratch = [], Scratch()
        for layer in range(n_layer):
            reused = layer_reuse(layer) if layer_reuse else None
            if layer_filter and not layer_filter(layer):
                self.layers.append(None)
            elif reused is not None:
                if not 0 <= reused < layer or self.layers[reused] is None:
                    raise ValueError(f"layer {layer} cannot share the cache of layer {reused}: "
                                     "name an earlier layer that has a cache")
                self.layers.append(self.layers[reused])
            else:
                self.layers.append(Layer((len(self.streams), kv_size), n_head_kv, head_dim, type_k, type_v,
                                         device(layer) if callable(device) else device, v_trans, self.rotary, scratch))
        if not self.own_layers():
            raise ValueError("layer_filter leaves no layer with a cache")

    def own_layers(self):
        """The layers that store keys and values, each once."""
        return list(dict.fromkeys(layer for layer in self.layers if layer is not None))

    def layer_of(self, number):
        if not 0 <= number < len(self.layers) or self.layers[number] is None:
            raise ValueError(f"layer {number} has no cache here: ask the cache that has it")
        return self.layers[number]

    def clear(self):
        """Remove all sequences and zero all keys and values: a mask does not hide a NaN from the next sequence."""
        super().clear()
        zero_all(self.own_layers())

    def seq_cp(self, source, target, p0=-1, p1=-1):
        a, b = self.stream_of(source), self.stream_of(target)
        if a != b:
            self.check_whole(source, p0, p1)
            self.seq_rm(target)  # first: an interrupt while rows are copied must not leave cells with another's rows
            for layer in self.own_layers():
                layer.copy(a, b, self.streams[a].used_end())
        super().seq_cp(source, target, p0, p1)

    def place(self, batch):
        """
        Store a batch, and return the `LayerList` for its forward pass. ValueError if there is no room, with nothing
        changed. If the forward pass fails the cells stay in use: `seq_rm` each sequence from `batch.first` on.
        """
        slots = self.find_slot(batch)
        if not slots:
            raise ValueError(str(slots))
        with self.applied(slots, batch):
            return LayerList(self.layers, self.placement(batch, slots))

    @contextmanager
    def applied(self, slots, batch):
        """Store a batch in the cells that were found, and remove it again if the body of the `with` fails."""
        try:
            self.apply(slots, batch)
            yield
        except BaseException:
            for seq, start in batch.first.items():
                self.seq_rm(seq, start)
            raise

    def placement(self, batch, slots):
        """The `Placement` of a batch that is stored in these cells."""
        self.update()
        index, n_kv = leading_rows(torch.from_numpy(slots.streams), self.get_n_kv(batch), self.kv_size)
        return Placement(torch.from_numpy(batch.positions), self.k_idxs(slots), index, self.keys(batch, n_kv),
                         pending_shift=self.pending_shift([self.streams[s] for s in slots.streams], n_kv))

    def pending_shift(self, streams, n_kv):
        """By how many positions the keys of these streams must still be rotated, (B, n_kv), or None."""
        if self.rotary is None or not any(cells.shifted() for cells in streams):
            return None
        return torch.from_numpy(np.stack([cells.shift[:n_kv] for cells in streams]))

    def k_idxs(self, slots):
        """The rows for new keys and values, (B * T,): stream * kv_size + cell."""
        return torch.from_numpy(slots.streams[:, None] * self.kv_size + slots.cells).flatten()

    def get_n_kv(self, batch):
        """
        How many cells of each stream a stored batch attends over: up to the last used one, to a multiple of n_pad.
        """
        end = max(self.streams[s].used_end() for s in self.streams_of(batch))
        return min(self.kv_size, max(1, -(-end // self.n_pad)) * self.n_pad)

    def keys(self, batch, n_kv):
        """
        The `Keys` of the first n_kv cells of each stream: a stored batch may look at the cells of its own sequences,
        within the window of the cache.
        """
        pos = np.stack([self.streams[s].pos[:n_kv] for s in self.streams_of(batch)])  # (B, n_kv)
        if self.unified:
            # sequences that share a token own the same cells, see `find_slot`, so that the first one's will do
            rows, counts = zip(*((seqs[0], stop - start) for seqs, start, stop in batch.spans))
            allowed = np.repeat(self.streams[0].owners[rows, :n_kv], counts, axis=0)[None]
        else:
            allowed = (pos != EMPTY)[:, None]
        if self.window is not None:
            seen = self.window.hides(pos[:, None], batch.positions[..., None])
            allowed = np.logical_and(allowed, np.logical_not(seen, out=seen), out=seen)
        return Keys(torch.from_numpy(pos), torch.from_numpy(allowed))

    def kq_mask(self, batch, n_kv=None):
        """
        The mask of a stored batch, bool (B, 1, T, n_kv): True where a token may look at a cell, which is one of its
        sequence, at no later position, and within the window.
        """
        keys = self.keys(batch, n_kv or self.get_n_kv(batch))
        return (visible(torch.from_numpy(batch.positions)[..., None], keys.pos[:, None]) & keys.allowed)[:, None]

    @torch.no_grad()
    def cpy_k(self, layer, k, idxs):
        """Write keys (n, n_head_kv, head_dim) of a layer to rows idxs (n,)."""
        self.layer_of(layer).k.write(idxs, k.transpose(0, 1))

    @torch.no_grad()
    def cpy_v(self, layer, v, idxs):
        """Write values (n, n_head_kv, head_dim) of a layer to rows idxs (n,)."""
        self.layer_of(layer).v.write(idxs, v.transpose(0, 1))

    def get_k(self, layer, n_kv, streams=slice(None)):
        """
        Keys of the first n_kv cells of a slice of the streams, (n_stream, n_kv, n_head_kv, head_dim), rotated for their
        present positions. A view, unless they have to be dequantised or rotated.
        """
        self.update()
        k = self.read(self.layer_of(layer).k, n_kv, streams)
        shift = self.pending_shift(self.streams[streams], n_kv)
        return k if shift is None else self.rotary(k, shift.to(k.device))

    def get_v(self, layer, n_kv, streams=slice(None)):
        """Values of the same cells. A view, unless they have to be dequantised."""
        return self.read(self.layer_of(layer).v, n_kv, streams)

    def read(self, rows, n_kv, streams):
        dtype = rows.data.dtype if rows.scale is None else torch.float32
        return rows.read((streams, slice(n_kv)), dtype).transpose(1, 2)

    def update(self):
        """
        Rotate the stored keys whose positions have changed, once, before they are read.

        This is done for keys in float32 only; they are rotated in float64 and rounded. Keys in fewer bits would drift
        with each rounding. They stay as they were written, and are rotated by the sum of their shifts whenever they
        are read, see `Placement.pending_shift`.
        """
        if not self.can_shift or self.rotary and self.own_layers()[0].k.kind != 'float32':
            return
        for stream, cells in enumerate(self.streams):
            if not cells.shifted():
                continue
            which = np.flatnonzero(cells.shift)
            shift = torch.from_numpy(cells.shift[which])
            for layer in self.own_layers() if self.rotary else ():
                data = layer.k.data[:, stream]
                rows = torch.from_numpy(which).to(data.device)
                data[:, rows] = self.rotary.turned(data[:, rows], shift)
            cells.shift[:] = 0

    def unshare(self, seq, p0=-1, p1=-1):
        """
        Give a sequence copies of the cells in [p0, p1) that it shares with others, so that their positions can be
        changed. ValueError if there is no room, with nothing changed.
        """
        cells, stream = self.cells_of(seq), self.stream_of(seq)
        shared = cells.of(seq, p0, p1)
        shared = shared[cells.n_owners[shared] > 1]
        own = cells.find(len(shared))
        if own is None:
            raise ValueError(str(NoSlot(len(shared), cells.n_usable(None), False)))
        if not len(shared):
            return
        for layer in self.own_layers():
            layer.move(*(torch.from_numpy(stream * self.kv_size + numbers) for numbers in (shared, own)))
        pos, shift = cells.pos[shared], cells.shift[shared]
        cells.remove_owner(shared, seq)
        cells.write(own, pos)
        cells.set_shift(own, shift)
        cells.add_owner(own, seq)

    def state_save(self, path, seq=None):
        """Write one sequence, or all, to a file: see `state.save`."""
        state.save(self, path, seq)

    def state_load(self, path, seq=None):
        """Read a file of `state_save`, as one sequence or as the whole content of the cache: see `state.load`."""
        state.load(self, path, seq)

    def memory_breakdown(self):
        """{device: bytes} of the stored keys and values; the memory of the layers' `Scratch` comes on top."""
        sizes = {}
        for layer in self.own_layers():
            device = str(layer.k.data.device)
            sizes[device] = sizes.get(device, 0) + layer.nbytes()
        return sizes
