"""
Cells and streams: llama.cpp's cache (llama-kv-cache.cpp), on arrays.

    cache = KVCache(n_layer, n_head_kv, head_dim, kv_size=256, n_seq_max=8)
    forward = cache.forward(cache.batch({0: [5, 6, 7], 1: [2]}))     # sequence: positions of its new tokens

Unified, all sequences share one stream of kv_size cells: any token can go to any free cell, sequences may share cells, and a
mask of positions and owners keeps them apart. Otherwise each sequence has a stream of kv_size cells for itself.
A batch is placed in three steps: `find_slot` looks for cells and changes nothing, `apply` takes them, `placement` says
where that is and who sees what. `prepare` does the first for many batches at once, all of them or none.
"""
from dataclasses import dataclass

import numpy as np
import torch

from kvcache import state
from kvcache.cells import EMPTY, Cells, Window
from kvcache.placement import Forward, Layer, Placement, beginning


@dataclass(frozen=True)
class Batch:
    """The new tokens of a forward pass: positions (B, T) and owners (B, T, n_seq_max), B the streams they go to, or 1 if unified."""
    positions: np.ndarray
    owners: np.ndarray


@dataclass(frozen=True)
class Slots:
    """Where a batch can go: the streams, (B,), and of each the cells (B, T)."""
    streams: np.ndarray
    cells: np.ndarray


@dataclass(frozen=True)
class NoSlot:
    """There are not enough cells for a batch. It is false, as a `Slots` is true."""
    needed: int
    usable: int

    def __bool__(self):
        return False

    def __str__(self):
        return f"the cache is full: {self.needed} cells are needed and {self.usable} are free"


class KVCache:
    """
    n_layer: layers of the model. n_head_kv, head_dim: heads of keys and values, and channels of each.
    kv_size: cells of a stream. n_seq_max: sequences, numbered from 0. unified: one stream for all of them, or one each.
    type_k, type_v: how keys and values are kept, see `Rows`. n_pad: what is attended over is a multiple of so many cells.
    n_swa, swa_type: a `Window` ('none' for none). v_trans: values with the cells side by side.
    device: of the data, one for all or a function of the layer. layer_filter: which layers have a cache (the others get None).
    layer_reuse: for a layer, another layer whose keys and values it shares, or None. rotary: turns keys whose positions are
    changed; without it they cannot be (`can_shift`), as with learned positions, which are baked into keys and values.
    """

    def __init__(self, n_layer, n_head_kv, head_dim, kv_size, n_seq_max, unified=True, type_k='float32', type_v='float32', n_pad=1,
                 n_swa=0, swa_type='none', v_trans=False, device='cpu', layer_filter=None, layer_reuse=None, rotary=None):
        if min(n_layer, n_head_kv, head_dim, kv_size, n_seq_max, n_pad) < 1:
            raise ValueError("n_layer, n_head_kv, head_dim, kv_size, n_seq_max and n_pad must be at least 1")
        self.kv_size, self.n_seq_max, self.unified, self.n_pad = kv_size, n_seq_max, unified, n_pad
        self.n_head_kv, self.head_dim, self.rotary = n_head_kv, head_dim, rotary
        self.window = None if swa_type == 'none' else Window(n_swa, swa_type)
        self.streams = [Cells(kv_size, n_seq_max) for _ in range(1 if unified else n_seq_max)]
        self.layers = []
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
                                         device(layer) if callable(device) else device, v_trans, rotary))

    def own_layers(self):
        """The layers that have data, each once."""
        return list(dict.fromkeys(layer for layer in self.layers if layer is not None))

    @property
    def can_shift(self):
        return self.rotary is not None

    def stream_of(self, seq):
        if not 0 <= seq < self.n_seq_max:
            raise ValueError(f"there are sequences 0 to {self.n_seq_max - 1}, but not {seq}")
        return 0 if self.unified else seq

    def cells_of(self, seq):
        return self.streams[self.stream_of(seq)]

    # placing

    def batch(self, tokens):
        """
        The batch of {sequence, or a tuple of sequences that share them: positions of its new tokens}.

        In one stream, all tokens follow each other. Without, sequences share nothing and each brings as many tokens.
        """
        counts = {len(positions) for positions in tokens.values()}
        if not self.unified and (len(counts) != 1 or any(isinstance(seqs, tuple) for seqs in tokens)):
            raise ValueError("of separate streams each takes the same number of tokens, of one sequence: split the batch")
        if not tokens or min(counts) < 1:
            raise ValueError("a batch has at least one token, and so has each of its sequences")
        positions = np.concatenate([np.asarray(positions, dtype=np.int64) for positions in tokens.values()])
        owners = np.zeros((len(positions), self.n_seq_max), dtype=bool)
        start = 0
        for seqs, mine in tokens.items():
            for seq in seqs if isinstance(seqs, tuple) else (seqs,):
                self.stream_of(seq)
                owners[start:start + len(mine), seq] = True
            start += len(mine)
        if positions.min() < 0:
            raise ValueError(f"positions begin at 0, not {positions.min()}")
        B = 1 if self.unified else len(tokens)
        return Batch(positions.reshape(B, -1), owners.reshape(B, -1, self.n_seq_max))

    def find_slot(self, batch, contiguous=False):
        """`Slots` for a batch, or `NoSlot`. Nothing is changed."""
        B, T = batch.positions.shape
        streams = np.zeros(1, dtype=np.int64) if self.unified else batch.owners[:, 0].argmax(axis=1)
        found = [self.streams[s].find(T, self.window, contiguous) for s in streams]
        if any(cells is None for cells in found):
            return NoSlot(T, min(int(self.streams[s].usable(self.window).sum()) for s in streams))
        return Slots(streams, np.stack(found))

    def apply(self, slots, batch):
        """Take the cells that were found."""
        for stream, cells, positions, owners in zip(slots.streams, slots.cells, batch.positions, batch.owners):
            self.streams[stream].put(cells, positions, owners)

    def prepare(self, batches):
        """`Slots` for each of several batches, one after the other, or `NoSlot` if they do not all fit. Nothing is changed."""
        before, found = [cells.copy() for cells in self.streams], []
        try:
            for batch in batches:
                slots = self.find_slot(batch)
                if not slots:
                    return slots
                self.apply(slots, batch)
                found.append(slots)
            return found
        finally:
            self.streams = before

    def forward(self, batch):
        """Place a batch, and what the model is handed for it. ValueError if there is no room, and nothing has changed."""
        slots = self.find_slot(batch)
        if not slots:
            raise ValueError(str(slots))
        self.apply(slots, batch)
        return Forward(self.layers, self.placement(batch, slots))

    def placement(self, batch, slots):
        """The `Placement` of a batch whose cells have been taken."""
        self.update()
        index, n_kv = beginning(torch.from_numpy(slots.streams), self.get_n_kv(slots), self.kv_size)
        shifts = np.stack([self.streams[s].shift[:n_kv] for s in slots.streams])
        device = self.own_layers()[0].k.data.device
        return Placement(torch.from_numpy(batch.positions).to(device), self.k_idxs(slots).to(device), index,
                         self.kq_mask(batch, slots, n_kv).to(device), turned=torch.from_numpy(shifts).to(device) if shifts.any() else None)

    def k_idxs(self, slots):
        """The rows that new keys go to, (B * T,): stream * kv_size + cell. Values go to the same."""
        return torch.from_numpy(slots.streams[:, None] * self.kv_size + slots.cells).flatten()

    def get_n_kv(self, slots):
        """How many cells of each stream are attended over: as many as are used, to a multiple of n_pad."""
        end = max(self.streams[s].used_end() for s in slots.streams)
        return min(self.kv_size, max(1, -(-end // self.n_pad)) * self.n_pad)

    def kq_mask(self, batch, slots, n_kv):
        """
        (B, 1, T, n_kv), True where a token may look at a cell: one that holds something, of a sequence that the token is a part
        of, at no later position, and not passed by the window.
        """
        pos = np.stack([self.streams[s].pos[:n_kv] for s in slots.streams])[:, None]  # (B, 1, n_kv)
        owners = np.stack([self.streams[s].owners[:n_kv] for s in slots.streams])  # (B, n_kv, n_seq_max)
        mine = batch.owners.astype(np.float32) @ owners.astype(np.float32).transpose(0, 2, 1) > 0  # one of my sequences owns it
        mask = mine & (pos <= batch.positions[..., None])
        if self.window:
            mask &= ~self.window.passed(pos, batch.positions[..., None])
        return torch.from_numpy(mask[:, None])

    def cpy_k(self, layer, k, idxs):
        """Keys (n, n_head_kv, head_dim) of a layer to rows idxs (n,)."""
        self.layers[layer].k.write(idxs, k.flatten(1))

    def cpy_v(self, layer, v, idxs):
        """Values (n, n_head_kv, head_dim) of a layer to rows idxs (n,)."""
        self.layers[layer].v.write(idxs, v.flatten(1))

    def get_k(self, layer, n_kv, streams=slice(None)):
        """Keys of the first n_kv cells of some streams, (n_stream, n_kv, n_head_kv, head_dim): a view where they are floats."""
        return self.get(self.layers[layer].k, n_kv, streams)

    def get_v(self, layer, n_kv, streams=slice(None)):
        """The same of the values."""
        return self.get(self.layers[layer].v, n_kv, streams)

    def get(self, rows, n_kv, streams):
        dtype = rows.data.dtype if rows.scale is None else torch.float32
        return rows.read((streams, slice(n_kv)), dtype).unflatten(-1, (self.n_head_kv, self.head_dim))

    def update(self):
        """
        Turn the keys whose positions have changed, once, before they are read.

        Only keys in float32 are turned where they are. Narrower ones would be rounded once more each time, and drift; theirs
        stay as they were written, and are turned by the sum of their shifts whenever they are read (`Placement.turned`).
        """
        shifted = [(stream, cells) for stream, cells in enumerate(self.streams) if cells.shift.any()]
        if not shifted or self.own_layers()[0].k.kind != 'float32':
            return
        for stream, cells in shifted:
            which = np.flatnonzero(cells.shift)
            shift = torch.from_numpy(cells.shift[which])
            for layer in self.own_layers():
                data = layer.k.data[stream]
                rows = torch.from_numpy(which).to(data.device)
                keys = data[rows].unflatten(-1, (self.n_head_kv, self.head_dim))
                data[rows] = self.rotary(keys, shift.to(data.device)).flatten(-2)
            cells.shift[:] = 0

    # sequences, with llama.cpp's ranges: positions [p0, p1), p0 < 0 from the beginning, p1 < 0 to the end

    def clear(self):
        """Forget everything, and keep the storage."""
        for cells in self.streams:
            cells.clear(cells.pos != EMPTY)
            cells.head = 0

    def seq_rm(self, seq, p0=-1, p1=-1):
        """Take positions from a sequence (None: from all sequences). Cells that nobody else owns are free."""
        for cells in [self.cells_of(seq)] if seq is not None else self.streams:
            cells.disown(cells.of(seq, p0, p1), seq)

    def seq_cp(self, source, target, p0=-1, p1=-1):
        """
        Let the target sequence have the source's positions too. In one stream it shares the cells and nothing is copied;
        across streams keys and values are, all positions of them, and the target must be empty.
        """
        if source == target:
            return
        a, b = self.cells_of(source), self.cells_of(target)
        if a is b:
            a.owners[a.of(source, p0, p1), target] = True
            return
        mine = np.flatnonzero(a.of(source, p0, p1))
        if len(mine) < int(a.of(source).sum()) or b.used():
            raise ValueError("from stream to stream a sequence is copied whole, to an empty one")
        b.pos[mine], b.shift[mine], b.owners[mine, target] = a.pos[mine], a.shift[mine], True
        for layer in self.own_layers():
            layer.copy(source, target)

    def seq_keep(self, seq):
        """Forget all sequences but this one."""
        kept = self.cells_of(seq)
        for cells in self.streams:
            gone = np.arange(self.n_seq_max) != seq if cells is kept else slice(None)
            cells.owners[:, gone] = False
            cells.clear(~cells.owners.any(axis=1))

    def seq_add(self, seq, p0, p1, shift):
        """Move positions by shift; those that come before 0 are forgotten. Keys are turned before they are next used."""
        self.move(seq, p0, p1, lambda pos: pos + shift)

    def seq_div(self, seq, p0, p1, divisor):
        """Divide positions, rounding down."""
        if divisor < 1:
            raise ValueError(f"positions are divided by at least 1, not {divisor}")
        self.move(seq, p0, p1, lambda pos: pos // divisor)

    def move(self, seq, p0, p1, moved):
        cells = self.cells_of(seq)
        mine = cells.of(seq, p0, p1)
        if not mine.any() or (moved(cells.pos[mine]) == cells.pos[mine]).all():
            return
        self.check_movable(seq, p0, p1)
        cells.move(mine, moved(cells.pos[mine]))

    def check_movable(self, seq, p0=-1, p1=-1):
        """ValueError if positions of a sequence cannot be changed."""
        if not self.can_shift:
            raise ValueError("these positions cannot be changed: the model's are learned, and baked into keys and values")
        cells = self.cells_of(seq)
        if (cells.owners[cells.of(seq, p0, p1)].sum(axis=1) > 1).any():  # the position is the cell's, and so would be theirs
            raise ValueError(f"sequence {seq} shares cells with another, which would be moved with it: remove or copy one of them first")

    def seq_pos_min(self, seq):
        """The first position of a sequence, or None if it has none."""
        return self.cells_of(seq).pos_min(seq)

    def seq_pos_max(self, seq):
        """The last position of a sequence, or None if it has none. There is no hole between the two."""
        return self.cells_of(seq).pos_max(seq)

    # on disk, in memory, and for the eye

    def state_save(self, path, seq=None):
        """Write one sequence, or all, to a file: see `state.save`."""
        state.save(self, path, seq)

    def state_load(self, path, seq=None):
        """Read what `state_save` wrote, as one sequence or as all of the cache: see `state.load`."""
        state.load(self, path, seq)

    def memory_breakdown(self):
        """{device: bytes} of all that is stored."""
        sizes = {}
        for layer in self.own_layers():
            device = str(layer.k.data.device)
            sizes[device] = sizes.get(device, 0) + layer.nbytes()
        return sizes

    def __str__(self):
        """The cells of each stream, drawn as `Cells` are."""
        return '\n'.join(f'stream {number}\n{cells}' if len(self.streams) > 1 else str(cells) for number, cells in enumerate(self.streams))


def context_shift(cache, seq, n_keep=0):
    """
    Make room in a full sequence: keep its first n_keep positions, drop the older half of the rest, and renumber what is left.

    Returns how many were dropped. Eight positions with n_keep=2: of 0 ... 7, what was 0 1 5 6 7 is now 0 1 2 3 4.
    """
    cache.check_movable(seq, n_keep)
    n_past = cache.seq_pos_max(seq) + 1
    n_discard = (n_past - n_keep) // 2
    if n_keep < 0 or n_discard < 1:
        raise ValueError(f"of {n_past} positions {n_keep} cannot be kept and others dropped")
    cache.seq_rm(seq, n_keep, n_keep + n_discard)
    cache.seq_add(seq, n_keep + n_discard, -1, -n_discard)
    return n_discard

