"""
Cells: which slot holds which position, and for which sequences. llama.cpp's llama-kv-cells.h, as arrays.

A cell has a position and a set of owners, the sequences that it is a part of. If ten samples share a prompt, it is one
set of cells with ten owners each. All layers share the cells, and each layer has its own keys and values for them. This
module is numpy only and holds no keys and values.

Counts are stored beside positions and owners, so that the cost of a token depends on the number of cells in use, not on
the size of the cache.
"""
import numpy as np

EMPTY = -1  # the position of a cell that holds nothing
COLUMNS = 120  # the width of a drawing


class Cells:
    """
    An array of `size` cells for the sequences `seqs`, a range of their numbers.

    pos: int64 (size,), EMPTY or a position. owners: bool (len(seqs), size), a row for each sequence.
    shift: int64 (size,), by how much a position has changed since the key in the cell was last rotated.
    head: the cell from which the search for free cells begins.

    moved: False if all of shift is 0.
    runs: {sequence: (its `Runs`, up to which position they have cells)}, see `CellSequences`. The entry of a sequence
    is deleted when its cells or their positions change in another way than by `append` and `append_run`.

    Counted from these: n_owners, int32 (size,); owner_sum, int64 (size,), the sum of the owners' numbers, which is the
    owner's number if there is one owner; last, int64 (len(seqs),), the last position of each sequence or EMPTY; n_used,
    the number of cells that hold something; end, the last such cell's number plus one.

    Methods take cells by number, int64 (n,), ascending unless a method says otherwise. Ranges of positions are
    [p0, p1); p0 < 0 is the beginning and p1 < 0 the end.
    """

    def __init__(self, size, seqs):
        self.seqs = seqs
        self.pos = np.full(size, EMPTY)
        self.owners = np.zeros((len(seqs), size), dtype=bool)
        self.shift = np.zeros(size, dtype=np.int64)
        self.n_owners = np.zeros(size, dtype=np.int32)
        self.owner_sum = np.zeros(size, dtype=np.int64)
        self.last = np.full(len(seqs), EMPTY)
        self.head = self.n_used = self.end = 0
        self.moved, self.runs = False, {}

    def copy(self):
        other, end = Cells(len(self), self.seqs), self.end
        for name in ('pos', 'owners', 'shift', 'n_owners', 'owner_sum'):
            getattr(other, name)[..., :end] = getattr(self, name)[..., :end]
        other.last[:] = self.last
        other.head, other.n_used, other.end, other.moved = self.head, self.n_used, end, self.moved
        return other

    def __len__(self):
        return len(self.pos)

    def used(self):
        """The number of cells that hold something."""
        return self.n_used

    def used_end(self):
        """The number of the last cell that holds something, plus one."""
        return self.end

    def shifted(self):
        """Is there a key that has to be rotated?"""
        self.moved = self.moved and bool(self.shift[:self.end].any())
        return self.moved

    def set_shift(self, cells, shift):
        """Say by how much the positions of cells have changed since their keys were rotated, int64 (n,)."""
        self.moved = True
        self.shift[cells] = shift

    def row(self, seq):
        """The row of a sequence in `owners` and `last`."""
        return seq - self.seqs.start

    def of(self, seq, p0=-1, p1=-1):
        """The cells of a sequence (None: of any) with a position in [p0, p1)."""
        pos = self.pos[:self.end]
        mine = pos != EMPTY if seq is None else self.owners[self.row(seq), :self.end]
        if p0 > 0:
            mine = mine & (pos >= p0)
        if p1 >= 0:
            mine = mine & (pos < p1)
        return np.flatnonzero(mine)

    def owners_of(self, cell):
        """The sequences that own a cell, a list."""
        return [self.seqs[row] for row in np.flatnonzero(self.owners[:, cell])]

    def own_same_cells(self, seqs):
        """Do all of these sequences own the same cells?"""
        rows = self.owners[[self.row(seq) for seq in seqs], :self.end]
        return bool((rows == rows[:1]).all())

    def pos_min(self, seq):
        """The first position of a sequence, or None."""
        mine = self.pos[self.of(seq)]
        return int(mine.min()) if len(mine) else None

    def pos_max(self, seq):
        """The last position of a sequence, or None."""
        last = int(self.last[self.row(seq)])
        return None if last == EMPTY else last

    def add_owner(self, cells, seq):
        """
        Add a sequence to the owners of cells, in any order. The cells have positions and are not the sequence's yet.
        """
        if not len(cells):
            return
        row = self.row(seq)
        self.runs.pop(seq, None)
        self.owners[row, cells] = True
        self.n_owners[cells] += 1
        self.owner_sum[cells] += seq
        self.last[row] = max(self.last[row], self.pos[cells].max())

    def remove_owner(self, cells, seq):
        """
        Remove a sequence from the owners of cells, all of which it owns. Cells without owners become empty, and the
        head moves back to the first of them.
        """
        self.runs.pop(seq, None)
        if not len(cells):
            return
        row = self.row(seq)
        self.owners[row, cells] = False
        self.n_owners[cells] -= 1
        self.owner_sum[cells] -= seq
        self.last[row] = self.pos[self.of(seq)].max(initial=EMPTY)
        freed = cells[self.n_owners[cells] == 0]
        if len(freed):
            self.pos[freed], self.shift[freed] = EMPTY, 0
            self.n_used -= len(freed)
            self.head = min(self.head, int(freed[0]))
            if freed[-1] == self.end - 1:
                self.end = last_true(self.pos[:self.end] != EMPTY) + 1

    def remove(self, seq, p0=-1, p1=-1):
        """Remove the positions [p0, p1) of a sequence (None: of all sequences)."""
        for each in (self.seqs if seq is None else (seq,)):
            self.remove_owner(self.of(each, p0, p1), each)

    def recount(self):
        """
        After an interrupt: empty the cells that have a position and no owner, or an owner and no position; count again.
        """
        self.runs.clear()
        self.owners &= self.pos >= 0
        self.n_owners = self.owners.sum(axis=0, dtype=np.int32)
        unowned = self.n_owners == 0
        self.pos[unowned], self.shift[unowned] = EMPTY, 0
        self.owner_sum = np.array(self.seqs) @ self.owners
        self.last = np.array([self.pos[mine].max(initial=EMPTY) for mine in self.owners])
        self.n_used, self.end = int((~unowned).sum()), last_true(~unowned) + 1

    def move(self, cells, pos, seq):
        """
        Give new positions, int64 (n,), to cells that only this sequence owns. Cells whose position is below 0 are
        emptied, and returned.
        """
        self.moved = True
        self.runs.pop(seq, None)
        # one statement, so that an interrupt cannot come between a position and the rotation that its key needs
        self.pos[cells], self.shift[cells] = pos, self.shift[cells] + pos - self.pos[cells]
        self.last[self.row(seq)] = self.pos[self.of(seq)].max(initial=EMPTY)
        before = cells[pos < 0]
        self.remove_owner(before, seq)
        return before

    def usable(self, window, start=0, stop=None):
        """
        bool (stop - start,): may a cell of [start, stop) be written? True for empty cells, and for cells with one owner
        whose window hides them from its next token.
        """
        part = slice(start, stop)
        empty = self.pos[part] == EMPTY
        if window is None:
            return empty
        one_owner = self.n_owners[part] == 1
        owner = np.where(one_owner, self.owner_sum[part], self.seqs.start)
        return empty | one_owner & window.hides(self.pos[part], self.last[self.row(owner)] + 1)

    def n_usable(self, window):
        """How many cells may be written."""
        return len(self) - self.end + int(self.usable(window, 0, self.end).sum())

    def find(self, n, window=None, contiguous=False):
        """
        n usable cells, int64 (n,), or None if there are not as many. Changes nothing.

        The search begins at the head and goes on at 0 when it reaches the end. If the head is far beyond the number of
        used cells, there is room before it, and the search begins at 0.
        """
        size, end = len(self), self.end
        head = 0 if self.head > self.n_used + 2 * n else self.head % size
        if n > size:
            return None
        if end <= head <= size - n:  # all cells from the head on are empty
            return np.arange(head, head + n)
        if contiguous:
            return self.find_run(n, window, head)
        found = []
        for start, stop in ((head, size), (0, head)):
            middle = min(max(start, end), stop)  # all cells from here on are empty
            found.append(start + np.flatnonzero(self.usable(window, start, middle)))
            found.append(np.arange(middle, min(stop, middle + n)))
        found = np.concatenate(found)[:n]
        return found if len(found) == n else None

    def find_run(self, n, window, head):
        """The first n usable cells side by side, from the head on; or None."""
        n_before = np.concatenate(([0], self.usable(window).cumsum()))
        starts = np.flatnonzero(n_before[n:] - n_before[:-n] == n)
        if not len(starts):
            return None
        start = starts[np.searchsorted(starts, head) % len(starts)]
        return np.arange(start, start + n)

    def write(self, cells, pos, n_sink=0):
        """
        Write positions (n,) into cells (n,), in any order, whatever they held. `add_owner` gives them owners.

        If a sequence loses a position like this, it also loses all earlier ones but the first n_sink, so that its other
        positions have no hole. If it loses its last position, which can happen behind a window of 1, its next token may
        have any position.
        """
        overwritten = cells[cells < self.end]
        overwritten = overwritten[self.pos[overwritten] != EMPTY]
        if len(overwritten):
            for row in np.flatnonzero(self.owners[:, overwritten].any(axis=1)):
                lost = self.pos[overwritten][self.owners[row, overwritten]].max(initial=EMPTY)
                self.remove(self.seqs[row], n_sink, int(lost) + 1)
        self.pos[cells], self.shift[cells] = pos, 0
        self.n_used += len(cells)
        self.end = max(self.end, int(cells.max()) + 1)
        self.head = int(cells[-1]) + 1

    def append(self, cells, pos, seqs, n_sink=0):
        """
        Write the next positions of sequences: pos[i] of sequence seqs[i] into cell cells[i], (n,) each. As `write` and
        `add_owner` for each sequence, but `runs` are kept. They may list cells that were overwritten: no later token
        sees their positions.
        """
        runs = dict(self.runs)
        self.write(cells, pos, n_sink)
        self.runs = runs
        rows = seqs - self.seqs.start
        self.owners[rows, cells], self.n_owners[cells], self.owner_sum[cells], self.last[rows] = True, 1, seqs, pos

    def append_run(self, seqs, pos, n):
        """
        The fast way to the same, for n positions and the cells that `find` gives, if all cells from the head on are
        empty. seqs, pos: (n,) each; or one sequence, and its first position. Returns the first cell; or None, with
        nothing changed.
        """
        first, stop, rows = self.head, self.head + n, seqs - self.seqs.start
        if first < self.end or stop > len(self.pos) or first > self.n_used + 2 * n:
            return None
        if isinstance(seqs, np.ndarray):
            cells, last = slice(first, stop), pos
            self.owners[rows, np.arange(first, stop)] = True
        else:
            cells = first if n == 1 else slice(first, stop)  # numpy writes to one number sooner than to a slice
            self.owners[rows, cells] = True
            pos, last = pos if n == 1 else np.arange(pos, pos + n), pos + n - 1
        self.pos[cells], self.n_owners[cells], self.owner_sum[cells] = pos, 1, seqs
        self.last[rows] = last
        self.n_used += n
        self.head = self.end = stop
        return first

    def runs_of(self, seq):
        """
        The cells of a sequence by its positions, int64 (n_rows, 3): (position, cell, n) for n positions from `position`
        on that are in the cells from `cell` on.
        """
        cells = self.of(seq)
        cells = cells[self.pos[cells].argsort()]
        pos = self.pos[cells]
        first = np.flatnonzero((np.diff(pos, prepend=-2) != 1) | (np.diff(cells, prepend=-2) != 1))
        return np.stack((pos[first], cells[first], np.diff(first, append=len(cells))), axis=1)

    def copy_of(self, seq, target, seqs):
        """
        New `Cells` for `seqs` that hold one sequence of these as `target`, in cells of the same numbers, with the
        same head.
        """
        other, cells = Cells(len(self), seqs), self.of(seq)
        if len(cells):
            other.write(cells, self.pos[cells])
            other.add_owner(cells, target)
            other.set_shift(cells, self.shift[cells])
        other.head = self.head
        return other

    def __str__(self):
        """
        A drawing: each cell's number, its position, and its owners as letters. Lines are at most COLUMNS wide.

            slot  0   1   2   3
            pos   0   1   .   2
            seq   ab  ab      a
        """
        names = [''.join(chr(97 + seq) if seq < 26 else f'({seq})' for seq in self.owners_of(cell))
                 for cell in range(len(self))]
        lines = dict(slot=range(len(self)), pos=['.' if p == EMPTY else p for p in self.pos], seq=names)
        width = max(len(str(value)) for values in lines.values() for value in values) + 2
        n, parts = (COLUMNS - 6) // width, []
        for start in range(0, len(self), n):
            for label, values in lines.items():
                row = ''.join(f'{value!s:<{width}}' for value in values[start:start + n])
                parts.append(f'{label:<6}{row}'.rstrip())
            parts.append('')
        return '\n'.join(parts[:-1])


def last_true(mask):
    """The index of the last True of bool (n,), or -1."""
    return len(mask) - 1 - int(mask[::-1].argmax()) if mask.any() else -1


class Window:
    """
    Sliding-window attention. kind 'standard': a token sees the last n_swa positions, its own included. 'chunked': it
    sees its chunk of n_swa positions, up to its own. It also sees the first n_sink positions.

    A window hides old positions and does not change them. A shift changes positions.
    """

    def __init__(self, n_swa, kind, n_sink=0):
        if kind not in ('standard', 'chunked') or n_swa < 1 or n_sink < 0:
            raise ValueError(f"a window is 'standard' or 'chunked', of at least 1 position, with 0 sinks or more; not "
                             f"{kind!r} of {n_swa} with {n_sink}")
        self.n_swa, self.kind, self.n_sink = n_swa, kind, n_sink

    def first(self, pos):
        """The first position that a token at pos sees, apart from the sinks; int or array."""
        return pos - self.n_swa + 1 if self.kind == 'standard' else pos // self.n_swa * self.n_swa

    def hides(self, p0, p1):
        """Is position p0 too early for a token at p1 to see? Arrays broadcast."""
        hidden = p0 < self.first(p1)
        return hidden & (p0 >= self.n_sink) if self.n_sink else hidden
