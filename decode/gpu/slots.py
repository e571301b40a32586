"""
The slot table of a GPU step: which of its rows has the slots of which sequence, up to which position, and in which
columns.
"""
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch

from decode.batch import Refused

TILE = 64    # keys that attention reads at a time; tiles begin at multiples of it
SPLIT = 128  # keys of one program of attention; splits begin at multiples of it
AHEAD = 64  # later positions of a sequence whose slots are written with those of its new ones
NOTHING = 2**62, 0  # first and until of a row that has no slots


class Columns(NamedTuple):
    """
    A row of the slot table, int32 (n_columns,), has the slots of one sequence. Position p is in column p. If the model
    has a window, positions before n_sink are in the first columns, and the others take turns in the `ring` columns
    from `sinks` on: p is in column sinks + p % ring. Both are multiples of TILE, so a tile of keys is a piece of the
    row.

    n_splits: how many programs share the keys of a row of the batch, at most; the sinks have one of their own.
    """
    sinks: int
    ring: int
    n_columns: int
    n_splits: int

    @classmethod
    def of(cls, config, most_new):
        """most_new: the most new positions of a sequence that are in the table at the same time."""
        c = config
        if not c.window:
            return cls(0, 0, up_to(c.block_size, SPLIT), -(-c.block_size // SPLIT))
        sinks, ring = up_to(c.n_sink, TILE), up_to(c.window + most_new + TILE, TILE)
        return cls(sinks, ring, sinks + ring, (c.window - 2) // SPLIT + 2 + (c.n_sink > 0))

    def column(self, position, n_sink):
        """Of integers, or integer arrays or tensors."""
        if not self.ring:
            return position
        in_ring = self.sinks + position % self.ring
        return in_ring + (position - in_ring) * (position < n_sink)


def up_to(n, multiple):
    """The next multiple that is at least n."""
    return -(-n // multiple) * multiple


class SlotTable:
    """
    table: int32 (n_seq, n_columns) on the device, see `Columns`. A sequence keeps its row from step to step, so only
    slots of new positions are written.

    rows: {id of a `Runs`: [row, the runs, first, until]}, the least recently used first; the row has the slots of the
    sinks and of the positions from first to until - 1, with a window of the last `ring` of these. Pools make other
    `Runs` when slots change; those of later positions are appended.
    """

    def __init__(self, columns, config, n_seq, device):
        self.columns, self.n_sink, self.window, self.device = columns, config.n_sink, config.window, device
        self.max_positions = min(config.max_positions, 2**62)
        self.table = torch.zeros(n_seq, columns.n_columns, dtype=torch.int32, device=device)
        self.rows, self.free = OrderedDict(), list(range(n_seq))

    def update(self, runs, starts, ends):
        """
        Have the slots in the table that tokens at the positions starts to ends - 1 of some sequences see, int64 arrays
        (S,), S at most n_seq. runs: the `Runs` of each. Returns the row of each, int32 (S,). `Refused` if a sequence
        has no slot for a position that is seen; then nothing is known of these rows.
        """
        entries = [self.entry(each) for each in runs]
        held, until = np.array([entry[2:] for entry in entries]).T
        first = np.maximum(starts - self.window + 1, 0) if self.window else np.zeros_like(starts)
        known = (held <= first) & (starts <= until)
        if self.window:
            known &= until - first <= self.columns.ring
        if (until < ends).any() or not known.all():
            # the slots of later positions are written too, if the runs have them: the next steps then write none
            reach = np.array([each.next[0] if each.next else 0 for each in runs])
            ends = np.maximum(ends, np.minimum(reach, np.minimum(starts + AHEAD, self.max_positions)))
            for entry in entries:
                entry[2:] = NOTHING
            sinks = np.where(known, 0, np.minimum(self.n_sink, ends))
            self.write(runs, entries, np.where(known, until, first), ends, sinks)
            held, until = np.where(known, held, first), np.maximum(np.where(known, until, 0), ends)
            for entry, *now in zip(entries, held.tolist(), until.tolist()):
                entry[2:] = now
        return np.array([entry[0] for entry in entries], np.int32)

    def entry(self, runs):
        """The entry of a sequence, which becomes the most recently used."""
        key = id(runs)
        if key not in self.rows:
            if not self.free:
                self.free.append(self.rows.popitem(last=False)[1][0])
            self.rows[key] = [self.free.pop(), runs, *NOTHING]
        self.rows.move_to_end(key)
        return self.rows[key]

    def write(self, runs, entries, first, ends, sinks):
        """Write the slots of the positions from first to ends - 1 of each sequence, and of its first `sinks`."""
        tables = [each.table[:each.n] for each in runs]
        of_run = np.repeat(np.arange(len(runs)), [len(table) for table in tables])
        position, slot, n = np.concatenate(tables).T
        at, found = [], []
        for low, high in ((np.maximum(first, sinks), ends), (0 * sinks, sinks)):
            begin, end = np.maximum(position, low[of_run]), np.minimum(position + n, high[of_run])
            counts = np.maximum(end - begin, 0)
            seen, needed = np.bincount(of_run, counts, len(runs)).astype(int), np.maximum(high - low, 0)
            if (seen != needed).any():
                number = int((seen != needed).argmax())
                raise Refused(f"sequence number {number} of this step has slots for {seen[number]} of "
                                 f"{needed[number]} positions that its new tokens see: its runs must have all of them")
            step = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # 0, 1, ... within each run
            rows = np.array([entry[0] for entry in entries])[np.repeat(of_run, counts)]
            at.append(rows * self.columns.n_columns + self.columns.column(np.repeat(begin, counts) + step, self.n_sink))
            found.append(np.repeat(slot + begin - position, counts) + step)
        at, found = (torch.from_numpy(np.concatenate(each)).to(self.device) for each in (at, found))
        self.table.view(-1)[at] = found.int()
