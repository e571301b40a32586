"""The slot table of a GPU step: which sequence has which row, and which of its slots are in which columns."""
from collections import OrderedDict, namedtuple

import numpy as np
import torch

from decode.batch import slots_between

TILE = 128    # keys that attention reads at a time, or a part of it; tiles begin at multiples of it
SMALL_TILE = 32  # the same, where many small programs are faster
SPLIT = 64    # keys that attention adds up at a time, or in long texts a multiple of it; splits begin at multiples
SPLITS = 32   # of the keys of a row, at most; a window may begin and end inside of one
AHEAD = 64    # later positions of a sequence whose slots are written with those of its new ones


class Columns(namedtuple('Columns', 'sinks ring n_columns n_splits')):
    """
    A row of the slot table, int32 (n_columns,), has the slots of one sequence. Position p is in column p. If the model
    has a window, positions before n_sink are in the first columns, and the others take turns in the `ring` columns
    from `sinks` on: p is in column sinks + p % ring. Both are multiples of TILE, so a tile of keys is a piece of the
    row.

    n_splits: of the keys of a row, at most; the sinks are one of their own.
    """

    @classmethod
    def of(cls, config, most_new):
        """most_new: the most new positions of a sequence that are in the table at the same time."""
        c = config
        n_splits = min(-(-(c.window or c.block_size) // SPLIT), SPLITS)
        if not c.window:
            return cls(0, 0, -(-c.block_size // TILE) * TILE, n_splits)
        sinks, ring = (-(-n // TILE) * TILE for n in (c.n_sink, c.window + most_new + TILE))
        return cls(sinks, ring, sinks + ring, n_splits + 1 + (c.n_sink > 0))

    def column(self, position, n_sink):
        """Of integers, or integer arrays or tensors."""
        if not self.ring:
            return position
        in_ring = self.sinks + position % self.ring
        return in_ring + (position - in_ring) * (position < n_sink)


class Row:
    """
    A row of the tables on the device, and what is there of a sequence: the slots of its `Runs` for the sinks and all
    later tokens up to position until - 1; and its marks and biases. marked: (its settings, how many tokens it had
    drawn) when these were written, None if that is not known.
    """
    __slots__ = 'number', 'sequence', 'runs', 'until', 'marked'

    def __init__(self, number, sequence):
        self.number, self.sequence, self.runs, self.until, self.marked = number, sequence, None, 0, None


class Rows:
    """Which sequence has which of n rows: it keeps its row from step to step, until others need it."""

    def __init__(self, n):
        self.n, self.of = n, OrderedDict()  # the least recently used first

    def __call__(self, sequences):
        """The `Row` of each of up to n sequences."""
        for s in sequences:
            if id(s) not in self.of:
                number = len(self.of) if len(self.of) < self.n else self.of.popitem(last=False)[1].number
                self.of[id(s)] = Row(number, s)
            self.of.move_to_end(id(s))
        return [self.of[id(s)] for s in sequences]


class SlotTable:
    """
    table: int32 (n_rows, n_columns) on the device, see `Columns`. A sequence only goes on while it has the same `Runs`:
    pools make others when slots change, and when it is cut.
    """

    def __init__(self, config, n_rows, device, queue):
        self.columns, self.config, self.queue = Columns.of(config, max(n_rows, AHEAD)), config, queue
        self.table = torch.zeros(n_rows, self.columns.n_columns, dtype=torch.int32, device=device)

    def update(self, rows, starts, ends):
        """
        Have the slots in the table that tokens at the positions starts to ends - 1 see, int64 (S,), of the sequences
        with these `Row`s. `Refused` if a position that is seen has no slot; then nothing is known of these rows.
        """
        for row in rows:
            if row.runs is not row.sequence.runs:
                row.runs, row.until = row.sequence.runs, 0
        until, c, sequences = np.array([row.until for row in rows]), self.config, [row.sequence for row in rows]
        if (until < ends).any():
            # the slots of later positions are written too, if the runs have them: the next steps then write none
            reach = np.array([row.runs.next[0] if row.runs.next else 0 for row in rows])
            ends = np.maximum(ends, np.minimum(reach, np.minimum(starts + AHEAD, min(c.max_positions, 2**62))))
            first = np.maximum(starts - c.window + 1, 0) if c.window else 0 * starts
            sinks = np.where(until, 0, np.minimum(c.n_sink, ends))
            first = np.maximum(np.where(until, until, first), sinks)
            for row in rows:
                row.until = 0
            parts = [(0 * sinks, sinks)] * bool(sinks.any()) + [(first, ends)]
            seq, position, slot = np.concatenate([slots_between(sequences, *part) for part in parts], axis=1)
            at = np.array([row.number for row in rows])[seq], self.columns.column(position, c.n_sink)
            self.queue.put(self.table, np.ravel_multi_index(at, self.table.shape), slot)
            for row, end in zip(rows, np.maximum(until, ends).tolist()):
                row.until = end
