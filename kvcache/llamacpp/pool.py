"""
The pool whose slots are llama.cpp's cells: cell c of stream s is slot s * kv_size + c. See cells.py.

Any free cell takes any position. In one stream forks share the cells of what they have in common, and a long sequence
has the room that short ones leave. In streams of their own, forks are copies. No beginning of a prompt is remembered.
"""
import numpy as np

from decode.batch import Runs
from kvcache.llamacpp.cells import Streams


class CellPool:
    """
    Cells for n_sequences sequences of up to n_tokens tokens of a model of this `config`: one stream for all if unified,
    or one for each. It has the operations of `kvcache.pages.PagePool`, and a page is a cell.

    It keeps of each sequence: cells, its number in the `Streams`; n_computed, runs and n_writable, as there. n_pages:
    of one stream, the most that a sequence can have. What a window has passed stays until it needs more cells.
    """
    page_size = 1

    def __init__(self, config, n_sequences, n_tokens, unified=True):
        if min(n_sequences, n_tokens) < 1:
            raise ValueError(f"a pool is for at least 1 sequence of at least 1 token, not {n_sequences} of {n_tokens}")
        self.window, self.n_sink, self.unified, self.most_sequences = config.window, config.n_sink, unified, n_sequences
        self.n_pages = min(n_tokens, config.n_slots) * (n_sequences if unified else 1)
        self.n_slots = self.n_pages * (1 if unified else n_sequences)
        self.reset()

    def reset(self):
        """Forget all sequences."""
        self.streams = Streams(self.n_pages, self.most_sequences, self.unified)
        self.free_numbers, self.copies = list(range(self.most_sequences))[::-1], []

    @property
    def n_free(self):
        """How many cells are free."""
        return self.n_slots - sum(cells.used() for cells in self.streams.streams)

    def begin(self, sequence, tokens=()):
        """Begin a sequence. Returns how many of these tokens are remembered: none."""
        s = sequence
        s.cells, s.runs, s.n_writable, s.n_computed = self.free_numbers.pop(), Runs(), 0, 0
        return 0

    def extend(self, sequence, n):
        """As `PagePool.extend`: cells that the window has passed are freed first."""
        s, n_new = sequence, sequence.n_computed + n - sequence.n_writable
        if n_new <= 0:
            return True
        cells = self.streams.cells_of(s.cells)
        passed = cells.of(s.cells, self.n_sink, self.first_seen(s.n_computed)) if self.window else np.arange(0)
        n_freed = (cells.owners[:, passed].sum(axis=0) == 1).sum()
        if n_new > len(cells) - cells.used() + n_freed:
            return False
        if len(passed):
            cells.own(passed, s.cells, False)
            self.write_runs(s)
        found = cells.find(n_new)
        cells.write(found, np.arange(s.n_writable, s.n_writable + n_new), cells.owned_by(s.cells))
        for position, slot in enumerate((self.first_slot(s) + found).tolist(), s.n_writable):
            s.runs.append(position, slot)
        s.n_writable += n_new
        return True

    def will_grow(self, sequence):
        """Will a sequence need another cell of the stream that all share, if it goes on to its end?"""
        return self.unified and min(sequence.n_end - 1, sequence.max_positions) > sequence.n_writable

    def first_seen(self, n):
        """The first position after the sinks that the token at position n sees, if there is a window."""
        return max(self.n_sink, n - self.window + 1)

    def write_runs(self, sequence):
        """Write the runs of a sequence."""
        s, cells = sequence, self.streams.cells_of(sequence.cells)
        mine = cells.of(s.cells)
        mine = mine[cells.pos[mine].argsort()]
        pos, slots = cells.pos[mine], mine + self.first_slot(s)
        first = np.flatnonzero((np.diff(pos, prepend=-2) != 1) | (np.diff(slots, prepend=-2) != 1))
        s.runs = Runs(zip(pos[first], slots[first], np.diff(first, append=len(mine))))

    def first_slot(self, sequence):
        """The slot of the first cell of a sequence's stream."""
        return self.n_pages * self.streams.stream_of(sequence.cells)

    def computed(self, sequence, n):
        """n more positions of a sequence are stored."""
        sequence.n_computed += n

    def cut(self, sequence, n):
        """As `PagePool.cut`."""
        s, cells = sequence, self.streams.cells_of(sequence.cells)
        if self.window and n > self.first_seen(n):
            held = cells.pos[cells.of(s.cells, self.n_sink)]  # these positions follow each other
            n = n if held.min() <= self.first_seen(n) else 0
        if n < s.n_writable:
            cells.remove(s.cells, n)
            s.n_writable = n
            self.write_runs(s)
        s.n_computed = n
        return n

    def fork(self, sequence, new):
        """Give a new sequence all positions of another one: in one stream the same cells, in streams copies of them."""
        s = sequence
        self.begin(new)
        self.streams.seq_cp(s.cells, new.cells)
        self.streams.seq_rm(new.cells, s.n_computed)  # what it has for later positions
        new.n_computed = new.n_writable = s.n_computed
        self.write_runs(new)
        if not self.unified:
            to_source = self.first_slot(s) - self.first_slot(new)
            self.copies += [(slot + to_source, slot, n) for _, slot, n in new.runs.table[:new.runs.n].tolist()]

    def free(self, sequence):
        """Free all cells of a sequence."""
        self.streams.seq_rm(sequence.cells)
        self.free_numbers.append(sequence.cells)
        sequence.forget()
