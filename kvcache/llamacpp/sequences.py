"""The cache of kvcache/ whose slots are llama.cpp's cells: `Cells` say which are free, and records what they hold."""
from itertools import pairwise

import numpy as np

from decode.eager import EagerDecoder
from decode.metadata import Runs
from kvcache.base import BaseCache
from kvcache.llamacpp.cache import CellCache
from kvcache.llamacpp.cells import NoSlot
from kvcache.records import RowRecord

AHEAD = 64  # positions for which a sequence is given cells at a time, so that most steps need not look for any


class CellSequences(BaseCache):
    """
    Sequences of a model in a `CellCache`, with room for n_seq full ones: in one stream, or in one for each sequence.

    The row of a record is the sequence's number in the `CellCache`. Its positions below `room` have cells; those from
    `length` on are for its next tokens. What the window has passed stays in its cells until there is no other room.
    The keys of shifted sequences in fewer than 32 bits are turned when they are read; the compiled step does not do
    that, so while there are any, all steps run in PyTorch.
    """
    record_type, keeps_shifts = RowRecord, True

    def __init__(self, model, n_seq, type_kv='float32', decoder=None, unified=True):
        c, self.free_rows = model.config, list(range(n_seq))[::-1]
        kv_size = c.n_slots * (n_seq if unified else 1)
        self.cells = CellCache(c.n_layer, c.n_kv_head, c.head_dim, kv_size, n_seq, unified, type_kv, type_kv,
                               device=model.lm_head.weight.device, can_shift=c.position != 'learned',
                               rope_base=c.rope_theta if c.position == 'rope' else None,
                               rope_scaling=c.rope_scaling)
        super().__init__(model, n_seq, self.cells.own_layers(), 'unified' if unified else 'streams', type_kv, decoder)
        self.fastest = self.executor
        self.in_pytorch = EagerDecoder(model) if self.cells.turns_when_read else self.executor

    def notice_changes(self):
        for executor in {self.fastest, self.in_pytorch}:
            executor.notice_changes()

    def choose_executor(self):
        """Called when shifts have changed."""
        pending = self.cells.turns_when_read and self.cells.shift.any()
        self.executor = self.in_pytorch if pending else self.fastest

    def extend(self, record, n):
        if record.row is None:
            record.row, record.runs = self.free_rows.pop(), Runs()
        cells = self.cells.cells_of(record.row)
        ahead = min(self.window + 1 if self.window else AHEAD, AHEAD, self.model.config.max_positions - record.length)
        n_new = record.length + max(n, ahead) - record.room
        try:
            found = cells.find(n_new)
        except NoSlot:
            if not self.window:
                raise
            self.remove_passed(cells)
            found = cells.find(n_new)
        cells.write(found, np.arange(record.room, record.room + n_new), cells.owned_by(record.row))
        edges = np.flatnonzero(np.diff(found, prepend=-2, append=-2) != 1)  # between cells that are not side by side
        for i, end in pairwise(edges.tolist()):
            record.runs.append(record.room + i, self.base(record) + int(found[i]), end - i)
        record.room += n_new

    def base(self, record):
        """The slot of the first cell of a sequence's stream."""
        return self.cells.stream_of(record.row) * self.cells.kv_size

    def remove_passed(self, cells):
        """Remove what their windows have passed from all sequences in these `Cells`: they may share it."""
        for record in self.records.values():
            if record.row is not None and self.cells.cells_of(record.row) is cells:
                first = max(self.n_sink, record.length - self.window + 1)
                cells.remove(record.row, self.n_sink, first)
                self.look_up(record)

    def look_up(self, record):
        """Make the runs of a sequence anew."""
        record.runs = Runs(self.cells.cells_of(record.row).runs_of(record.row) + (0, self.base(record), 0))

    def cut(self, record, n):
        if record.row is None:
            return
        self.cells.seq_rm(record.row, n)
        record.room = n
        if n:
            self.look_up(record)
        else:
            self.free_rows.append(record.row)
            record.row = record.runs = None
        self.choose_executor()

    def copy(self, record, new):
        new.row = self.free_rows.pop()
        self.cells.seq_cp(record.row, new.row)
        self.cut(new, record.length)

    def remove_behind(self, record, n_keep, n):
        row = record.row
        self.cut(record, record.length)
        self.cells.unshare(row, n_keep + n)
        self.cells.seq_rm(row, n_keep, n_keep + n)
        self.cells.seq_add(row, n_keep + n, -1, -n)
        self.cells.update()
        self.cut(record, record.length - n)

    def first_held(self, record):
        cells = self.cells.cells_of(record.row)
        return cells.pos[cells.of(record.row, self.n_sink)].min(initial=record.length)
