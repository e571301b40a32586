"""
Cells: which slot holds which position, and for which sequences. llama.cpp's llama-kv-cells.h, as arrays.

A cell has a position and a set of owners, the sequences that it is a part of. A prompt that ten samples share is one
set of cells with ten owners each. All layers share the cells; each layer has keys and values of its own for them.
Pure numpy, and no data: everything here can be followed on paper.

Counts are kept beside the positions and owners, so that the cost of a token depends on the cells in use, not on the
size of the cache.
"""
import numpy as np

EMPTY = -1  # the position of a cell that holds nothing
END = np.iinfo(np.int64).max
LINE = 120  # columns of a drawing


class Cells:
    """
    size cells for the sequences `seqs`, a range of their numbers.

    pos: int64 (size,), EMPTY or a position. owners: bool (len(seqs), size), a row for each sequence.
    shift: int64 (size,), by how much a position has been moved since the key in the cell was last rotated.
    head: where the search for free cells begins.

    Counted from these: n_owners, int32 (size,); owner_sum, int64 (size,), the sum of the owners' numbers, which is the
    owner where there is one; last, int64 (len(seqs),), the last position of each sequence or EMPTY; n_used, the number
    of cells that hold something; end, one more than the last cell that does.

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

    def copy(self):
        other, end = Cells(len(self), self.seqs), self.end
        for name in ('pos', 'owners', 'shift', 'n_owners', 'owner_sum'):
            getattr(other, name)[..., :end] = getattr(self, name)[..., :end]
        other.last[:] = self.last
        other.head, other.n_used, other.end = self.head, self.n_used, end
        return other

    def __len__(self):
        return len(self.pos)

    def used(self):
        """How many cells hold something."""
        return self.n_used

    def used_end(self):
        """One more than the last cell that holds something."""
        return self.end

    def shifted(self):
        """Is there a key that has to be turned?"""
        return bool(self.shift[:self.end].any())

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

    def alike(self, seqs):
        """Do these sequences own the same cells?"""
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

    def own(self, cells, seq):
        """Make a sequence an owner of cells (in any order) that have a position and are not its own yet."""
        if not len(cells):
            return
        row = self.row(seq)
        self.owners[row, cells] = True
        self.n_owners[cells] += 1
        self.owner_sum[cells] += seq
        self.last[row] = max(self.last[row], self.pos[cells].max())

    def disown(self, cells, seq):
        """Take cells from a sequence that owns them. Those without owners are empty, and the head goes back to them."""
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

    def take(self, seq, p0=-1, p1=-1):
        """Take positions from a sequence (None: from all)."""
        for mine in (self.seqs if seq is None else (seq,)):
            self.disown(self.of(mine, p0, p1), mine)

    def recount(self):
        """After an interrupt: empty the cells that have a position or an owner but not both, and count again."""
        self.owners &= self.pos >= 0
        self.n_owners = self.owners.sum(axis=0, dtype=np.int32)
        unowned = self.n_owners == 0
        self.pos[unowned], self.shift[unowned] = EMPTY, 0
        self.owner_sum = np.array(self.seqs) @ self.owners
        self.last = np.array([self.pos[mine].max(initial=EMPTY) for mine in self.owners])
        self.n_used, self.end = int((~unowned).sum()), last_true(~unowned) + 1

    def move(self, cells, pos, seq):
        """Give cells of a single sequence other positions, int64 (n,). Returns the cells below 0, which are emptied."""
        # one statement, so that no interrupt comes between a position and the turn that its key still needs
        self.pos[cells], self.shift[cells] = pos, self.shift[cells] + pos - self.pos[cells]
        self.last[self.row(seq)] = self.pos[self.of(seq)].max(initial=EMPTY)
        before = cells[pos < 0]
        self.disown(before, seq)
        return before

    def usable(self, window, start=0, stop=None):
        """
        bool (stop - start,): may a cell of [start, stop) be written? Empty cells may, and cells of a single sequence
        whose window has passed them.
        """
        part = slice(start, stop)
        empty = self.pos[part] == EMPTY
        if window is None:
            return empty
        alone = self.n_owners[part] == 1
        owner = np.where(alone, self.owner_sum[part], self.seqs.start)
        return empty | alone & window.passed(self.pos[part], self.last[self.row(owner)] + 1)

    def n_usable(self, window):
        """How many cells may be written."""
        return len(self) - self.end + int(self.usable(window, 0, self.end).sum())

    def find(self, n, window=None, contiguous=False):
        """
        n usable cells, int64 (n,), looked for from the head on and, past the end, from 0; or None. Nothing is changed.

        If the head is far beyond the number of used cells there is room before it, and the search begins at 0.
        """
        size, end = len(self), self.end
        head = 0 if self.head > self.n_used + 2 * n else self.head % size
        if n > size:
            return None
        if end <= head <= size - n:  # all that follows is empty
            return np.arange(head, head + n)
        if contiguous:
            return self.find_run(n, window, head)
        found = []
        for start, stop in ((head, size), (0, head)):
            middle = min(max(start, end), stop)  # from there on all is empty
            found.append(start + np.flatnonzero(self.usable(window, start, middle)))
            found.append(np.arange(middle, min(stop, middle + n)))
        found = np.concatenate(found)[:n]
        return found if len(found) == n else None

    def find_run(self, n, window, head):
        """n usable cells side by side, the first such run from the head on; or None."""
        n_before = np.concatenate(([0], self.usable(window).cumsum()))
        starts = np.flatnonzero(n_before[n:] - n_before[:-n] == n)
        if not len(starts):
            return None
        start = starts[np.searchsorted(starts, head) % len(starts)]
        return np.arange(start, start + n)

    def put(self, cells, pos):
        """
        Write positions (n,) into cells (n,), in any order, whatever they held; `own` gives them owners.

        A sequence that loses a position loses all before it as well, so that it has [pos_min, pos_max] without a hole.
        A sequence that loses its last position, as a window may let it, has none left, and its next token may have any.
        """
        overwritten = cells[cells < self.end]
        overwritten = overwritten[self.pos[overwritten] != EMPTY]
        if len(overwritten):
            for row in np.flatnonzero(self.owners[:, overwritten].any(axis=1)):
                lost = self.pos[overwritten][self.owners[row, overwritten]].max(initial=EMPTY)
                self.take(self.seqs[row], -1, int(lost) + 1)
        self.pos[cells], self.shift[cells] = pos, 0
        self.n_used += len(cells)
        self.end = max(self.end, int(cells.max()) + 1)
        self.head = int(cells[-1]) + 1

    def copy_of(self, seq, target, seqs):
        """New cells for `seqs` that hold one sequence of these as `target`, at the same numbers, with the same head."""
        other, cells = Cells(len(self), seqs), self.of(seq)
        if len(cells):
            other.put(cells, self.pos[cells])
            other.own(cells, target)
            other.shift[cells] = self.shift[cells]
        other.head = self.head
        return other

    def __str__(self):
        """
        A slot's number, the position in it, and its owners as letters:

            slot  0   1   2   3
            pos   0   1   .   2
            seq   ab  ab      a

        As many beside each other as fit into LINE columns, the rest below.
        """
        names = [''.join(chr(97 + seq) if seq < 26 else f'({seq})' for seq in self.owners_of(cell))
                 for cell in range(len(self))]
        lines = dict(slot=range(len(self)), pos=['.' if p == EMPTY else p for p in self.pos], seq=names)
        width = max(len(str(value)) for values in lines.values() for value in values) + 2
        n, parts = (LINE - 6) // width, []
        for start in range(0, len(self), n):
            for label, values in lines.items():
                row = ''.join(f'{value!s:<{width}}' for value in values[start:start + n])
                parts.append(f'{label:<6}{row}'.rstrip())
            parts.append('')
        return '\n'.join(parts[:-1])


def last_true(which):
    """The number of the last True of bool (n,), or -1."""
    return len(which) - 1 - int(which[::-1].argmax()) if which.any() else -1


class Window:
    """
    What a token may look back at. kind 'standard': the last n_swa positions, itself among them; 'chunked': its chunk of
    n_swa positions.

    Sliding is not shifting: a window hides old positions and does not change them; a shift gives them other numbers.
    """

    def __init__(self, n_swa, kind):
        if kind not in ('standard', 'chunked') or n_swa < 1:
            raise ValueError(f"a window is standard or chunked and of at least 1 position, not {kind!r} of {n_swa}")
        self.n_swa, self.kind = n_swa, kind

    def first(self, pos):
        """The first position that a token at pos sees; int or array."""
        return pos - self.n_swa + 1 if self.kind == 'standard' else pos // self.n_swa * self.n_swa

    def passed(self, p0, p1):
        """Is position p0 out of sight for a token at p1? Arrays that broadcast."""
        return p0 < self.first(p1)
