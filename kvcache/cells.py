"""
Cells: which slot holds which position, and for which sequences. llama.cpp's llama-kv-cells.h, as arrays.

A cell has a position and a set of owners, the sequences that it is a part of. A prompt that ten samples share is one set
of cells with ten owners each. All layers share the cells; what is in them, keys and values, each layer has its own.
Pure numpy, and no data: everything here can be followed on paper.
"""
import numpy as np

EMPTY = -1  # the position of a cell that holds nothing
END = np.iinfo(np.int64).max
LINE = 120  # columns of a drawing


class Cells:
    """
    size cells for up to n_seq_max sequences.

    pos: int64 (size,), EMPTY or a position. owners: bool (size, n_seq_max). shift: int64 (size,), by how much a position has been
    moved since the key in the cell was last rotated. head: where the search for free cells begins.
    Ranges of positions are [p0, p1); p0 < 0 is the beginning and p1 < 0 the end. Cell sets are bool (size,).
    """

    def __init__(self, size, n_seq_max):
        self.pos = np.full(size, EMPTY)
        self.owners = np.zeros((size, n_seq_max), dtype=bool)
        self.shift = np.zeros(size, dtype=np.int64)
        self.head = 0

    def copy(self):
        other = Cells.__new__(Cells)
        other.pos, other.owners, other.shift, other.head = self.pos.copy(), self.owners.copy(), self.shift.copy(), self.head
        return other

    def __len__(self):
        return len(self.pos)

    def used(self):
        """How many cells hold something."""
        return int((self.pos != EMPTY).sum())

    def used_end(self):
        """One more than the last cell that holds something."""
        return int(np.max(np.flatnonzero(self.pos != EMPTY), initial=-1)) + 1

    def of(self, seq, p0=-1, p1=-1):
        """The cells of a sequence (None: of any) with a position in [p0, p1)."""
        mine = self.pos != EMPTY if seq is None else self.owners[:, seq]
        return mine & (self.pos >= max(p0, 0)) & (self.pos < (p1 if p1 >= 0 else END))

    def pos_min(self, seq):
        """The first position of a sequence, or None."""
        mine = self.pos[self.owners[:, seq]]
        return int(mine.min()) if len(mine) else None

    def pos_max(self, seq):
        """The last position of a sequence, or None."""
        mine = self.pos[self.owners[:, seq]]
        return int(mine.max()) if len(mine) else None

    def last(self):
        """The last position of each sequence, int64 (n_seq_max,); EMPTY without one."""
        return np.where(self.owners, self.pos[:, None], EMPTY).max(axis=0, initial=EMPTY)

    def disown(self, cells, seq):
        """Take a set of cells from a sequence (None: from all). Those that nobody owns any more are empty."""
        self.owners[cells, slice(None) if seq is None else seq] = False
        self.clear(cells & ~self.owners.any(axis=1))

    def clear(self, cells):
        """Empty a set of cells, and begin the next search no later than there."""
        freed = np.flatnonzero(cells & (self.pos != EMPTY))
        self.pos[cells], self.shift[cells], self.owners[cells] = EMPTY, 0, False
        if len(freed):
            self.head = min(self.head, int(freed[0]))

    def move(self, cells, pos):
        """Give a set of cells other positions, int64 (n,); those that would come before 0 are emptied."""
        self.shift[cells] += pos - self.pos[cells]
        self.pos[cells] = pos
        before = np.zeros(len(self), dtype=bool)
        before[np.flatnonzero(cells)[pos < 0]] = True
        self.pos[before] = 0  # any that is not EMPTY, so that they count as freed
        self.clear(before)

    def usable(self, window):
        """The cells that may be written: empty ones, and those of a single sequence that its window has passed."""
        if window is None:
            return self.pos == EMPTY
        alone = self.owners.sum(axis=1) == 1
        next_pos = self.last()[self.owners.argmax(axis=1)] + 1
        return (self.pos == EMPTY) | alone & window.passed(self.pos, next_pos)

    def find(self, n, window=None, contiguous=False):
        """
        n usable cells, int64 (n,), looked for from the head on and, past the end, from 0; or None. Nothing is changed.

        If the head is far beyond what is used there is room before it, and the search begins at 0.
        """
        size, usable = len(self), self.usable(window)
        head = 0 if self.head > self.used() + 2 * n else self.head % size
        if not contiguous:
            found = np.roll(np.arange(size), -head)
            found = found[usable[found]][:n]
            return found if len(found) == n else None
        if n > size:
            return None
        runs = np.lib.stride_tricks.sliding_window_view(usable, n).all(axis=1)  # does a run of n begin here?
        starts = np.flatnonzero(runs)
        if not len(starts):
            return None
        start = starts[np.searchsorted(starts, head) % len(starts)]
        return np.arange(start, start + n)

    def put(self, cells, pos, owners):
        """
        Write positions (n,) and owners (n, n_seq_max) into cells (n,), whatever they held.

        A sequence that loses a position loses all before it as well: what it has is [pos_min, pos_max] without a hole. One that
        loses its last, as a window may let it, has none left, and its next token may have any position.
        """
        overwritten, their_owners = self.pos[cells], self.owners[cells]
        self.pos[cells], self.owners[cells], self.shift[cells] = pos, owners, 0
        if (overwritten != EMPTY).any():
            lost = np.where(their_owners, overwritten[:, None], EMPTY).max(axis=0)  # (n_seq_max,)
            for seq in np.flatnonzero(lost != EMPTY):
                self.disown(self.of(seq, -1, int(lost[seq]) + 1), seq)
        self.head = int(cells[-1]) + 1

    def __str__(self):
        """
        A slot's number, the position in it, and its owners as letters:

            slot  0   1   2   3
            pos   0   1   .   2
            seq   ab  ab      a

        As many beside each other as fit into LINE columns, the rest below.
        """
        names = [''.join(chr(97 + seq) if seq < 26 else f'({seq})' for seq in np.flatnonzero(owners)) for owners in self.owners]
        lines = dict(slot=range(len(self)), pos=['.' if p == EMPTY else p for p in self.pos], seq=names)
        width = max(len(str(value)) for values in lines.values() for value in values) + 2
        n = (LINE - 6) // width
        return '\n\n'.join('\n'.join((f'{label:<6}' + ''.join(f'{value!s:<{width}}' for value in values[start:start + n])).rstrip()
                                     for label, values in lines.items()) for start in range(0, len(self), n))


class Window:
    """
    What a token may look back at. kind 'standard': the last n_swa positions, itself among them; 'chunked': its chunk of n_swa.

    Sliding is not shifting: a window hides old positions and leaves them what they are; a shift gives them other numbers.
    """

    def __init__(self, n_swa, kind):
        if kind not in ('standard', 'chunked') or n_swa < 1:
            raise ValueError(f"a window is standard or chunked and of at least 1 position, not {kind!r} of {n_swa}")
        self.n_swa, self.kind = n_swa, kind

    def passed(self, p0, p1):
        """Is position p0 out of sight for a token at p1? Arrays that broadcast."""
        return p1 - p0 >= self.n_swa if self.kind == 'standard' else p0 < p1 // self.n_swa * self.n_swa
