"""Sequences of a model in a `CellCache`, see `base.BaseCache`."""
import numpy as np

from kvcache.base import BaseCache
from kvcache.cell_cache import CellCache
from kvcache.placement import device_of
from kvcache.streams import LARGEST, NoSlot


class CellSequences(BaseCache):
    """
    Sequences of a model in a `CellCache`, with room for n_seq full ones: in one stream, or in one for each sequence.

    In PyTorch, with separate streams, the sequences of one forward pass bring the same number of new tokens; `step`
    makes a pass for each number. What a sequence's window has passed stays in its cells until they are written over.

    The `Runs` of a sequence are kept beside its cells, in `Cells.runs`.
    """
    keeps_shifts = True

    def __init__(self, model, n_seq, type_kv='float32', unified=True, decoder=None):
        c = model.config
        kv_size = c.n_slots * (n_seq if unified else 1)
        self.cells = CellCache(c.n_layer, c.n_kv_head, c.head_dim, kv_size, n_seq, unified, type_kv, type_kv,
                               n_swa=c.window, swa_type='standard' if c.window else 'none', n_sink=c.n_sink,
                               device=device_of(model), can_shift=c.position != 'learned',
                               rope_base=c.rope_theta if c.position == 'rope' else None)
        self.mixes_lengths = unified
        # Rows of positions that a window has passed stay in a sequence's `Runs`. With more rows than this they are made
        # anew.
        self.most_rows = 4 * c.n_slots
        super().__init__(model, n_seq, self.cells.own_layers(), 'unified' if unified else 'streams', type_kv, decoder)

    def copy(self, seq, new):
        self.cells.seq_cp(seq, new)

    def cut(self, seq, n):
        self.cells.seq_rm(seq, n)

    def remove_behind(self, seq, length, n_keep, n):
        self.cells.unshare(seq, n_keep + n)
        self.cells.seq_rm(seq, n_keep, n_keep + n)
        self.cells.seq_add(seq, n_keep + n, -1, -n)

    def first_held(self, seq):
        cells = self.cells.cells_of(seq)
        return cells.pos[cells.of(seq, self.n_sink)].min(initial=LARGEST)

    def forward_pass(self, seqs, starts, counts, ids, hiding=False):
        batch = self.cells.batch({seq: range(start, start + n) for seq, start, n in zip(seqs, starts, counts)})
        if self.window and not self.cells.find_slot(batch):  # cells that are shared are not written over
            self.remove_passed()
        return self.logits(self.cells.place(batch), counts, ids, hiding)

    def readable(self):
        """The compiled step does not turn keys: those in float32 are turned here, and others must not have moved."""
        if self.cells.rotary is None or not any([cells.shifted() for cells in self.cells.streams]):
            return True
        self.cells.update()
        return not any([cells.shifted() for cells in self.cells.streams])

    def make_room(self, seqs, starts, counts):
        if self.cells.unified:
            return self.store(self.cells.streams[0], seqs, starts, counts)
        return list(map(self.store_alone, seqs, starts, counts))

    def store_alone(self, seq, start, n):
        """
        Store n new positions of a sequence in its own stream. Returns its `Runs`. If all cells behind them are empty,
        so that the next positions go there, they are in the runs as well.
        """
        cells, base = self.cells.streams[seq], seq * self.cells.kv_size
        first = cells.append_run(seq, start, n)
        runs, limit = cells.runs.get(seq, (None, 0))
        if first is None:
            if limit:  # the cells behind the last position are not those of the next ones any more
                del cells.runs[seq]
            return self.store(cells, [seq], [start], [n], base)[0]
        if start + n > limit:
            n_left = self.cells.kv_size - first - n
            runs = self.kernel.runs(cells.runs_of(seq) + (0, base, 0))
            if n_left:
                runs.append(start + n, base + first + n, n_left)
            cells.runs[seq] = runs, start + n + n_left
        return runs

    def store(self, cells, seqs, starts, counts, base=0):
        """Store new positions of sequences in one stream. base: its first slot. Returns the `Runs` of each sequence."""
        n, positions = sum(counts), self.kernel.positions(starts, counts)
        owners = np.array(seqs) if n == len(seqs) else np.repeat(seqs, counts)
        first = cells.append_run(owners, positions, n)
        if first is None:
            found = self.find(cells, n)
            cells.append(found, positions, owners, self.n_sink)
            slots = (base + found).tolist()
        else:
            slots = range(base + first, base + first + n)
        of_all, done = [], 0
        for seq, start, n in zip(seqs, starts, counts):
            runs, _ = cells.runs.get(seq, (None, 0))
            if runs is None or runs.n > self.most_rows:
                runs = self.kernel.runs(cells.runs_of(seq) + (0, base, 0))
                cells.runs[seq] = runs, 0
            elif n == 1:
                runs.append(start, slots[done])
            else:
                for slot, m in side_by_side(slots[done:done + n]):
                    runs.append(start, slot, m)
                    start += m
            of_all.append(runs)
            done += n
        return of_all

    def find(self, cells, n):
        """n cells to write, int64 (n,). ValueError if there are not as many."""
        found = cells.find(n, self.cells.window)
        if found is None and self.window:  # cells that are shared are not written over
            self.remove_passed()
            found = cells.find(n, self.cells.window)
        if found is None:
            raise ValueError(str(NoSlot(n, cells.n_usable(self.cells.window), False)))
        return found

    def remove_passed(self):
        """Remove from each sequence what its window has passed: it may share these cells."""
        for seq in self.lengths:
            if (last := self.cells.seq_pos_max(seq)) is not None:
                self.cells.seq_rm(seq, self.n_sink, max(self.n_sink, self.cells.window.first(last + 1)))

    def recover(self):
        for cells in self.cells.streams:  # an interrupt may have come between a cell's position and its owner
            cells.recount()
        super().recover()


def side_by_side(slots):
    """[(the first of some slots side by side, how many there are)] of a list of slots, in its order."""
    ends = [*(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [(slots[start], end - start) for start, end in zip([0, *ends], ends)]
