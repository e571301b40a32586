"""
Streams of cells: where the tokens of a batch go, and the sequence operations. llama.cpp's llama-kv-cache.cpp, without
the data.

Unified, all sequences share one stream of kv_size cells: any token can go to any free cell, sequences may share cells,
and a mask of positions and owners keeps them apart. Otherwise each sequence has a stream of kv_size cells for itself.
A batch is placed in two steps: `find_slot` looks for cells and changes nothing, `apply` takes them. `prepare` does the
first for many batches at once, all of them or none.
"""
import functools
from dataclasses import dataclass
from operator import index

import numpy as np

from kvcache.cells import Cells

LARGEST = 2**31  # no position is as large


@dataclass(frozen=True)
class Batch:
    """
    The new tokens of a forward pass: positions (B, T), B the streams they go to, or 1 if unified.
    runs: [(sequences, start, stop)], the owners of tokens start to stop of the B * T, in order.
    first: {sequence: the first of its new positions}. n_seq_max: of the cache that the batch is for.
    """
    positions: np.ndarray
    runs: list
    first: dict
    n_seq_max: int


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
    contiguous: bool

    def __bool__(self):
        return False

    def __str__(self):
        side = ' side by side' * self.contiguous
        return f"the cache is full: {self.needed} cells{side} are needed and {self.usable} are free"


def counted(operation):
    """A method of `Streams` after which the counts of all cells are right, even if an interrupt ends it half-way."""
    @functools.wraps(operation)
    def method(self, *args, **kwargs):
        try:
            return operation(self, *args, **kwargs)
        except ValueError:  # refused before anything was changed
            raise
        except BaseException:
            for cells in self.streams:
                cells.recount()
            raise
    return method


class Streams:
    """
    kv_size: cells of a stream. n_seq_max: sequences, numbered from 0. unified: one stream for all of them, or one each.
    window: a `Window`, or None. can_shift: may positions be changed?

    Ranges of positions are llama.cpp's: [p0, p1), p0 < 0 from the beginning, p1 < 0 to the end. What a method refuses
    with a ValueError, a sequence that is no integer among them, has changed nothing.
    """

    def __init__(self, kv_size, n_seq_max, unified=True, window=None, can_shift=False):
        self.kv_size, self.n_seq_max, self.unified = kv_size, n_seq_max, unified
        self.window, self.can_shift = window, can_shift
        ranges = [range(n_seq_max)] if unified else [range(seq, seq + 1) for seq in range(n_seq_max)]
        self.streams = [Cells(kv_size, seqs) for seqs in ranges]

    def stream_of(self, seq):
        if not isinstance(seq, (int, np.integer)) or isinstance(seq, bool) or not 0 <= seq < self.n_seq_max:
            raise ValueError(f"there are sequences 0 to {self.n_seq_max - 1}, but not {seq!r}")
        return 0 if self.unified else int(seq)

    def cells_of(self, seq):
        return self.streams[self.stream_of(seq)]

    def batch(self, tokens):
        """
        The batch of {sequence, or a tuple of sequences that share them: positions of its new tokens, each one more than
        the last}.

        In one stream, all tokens follow each other, and sequences that share a token must have been the same up to it.
        In separate streams, sequences share nothing and each brings as many tokens.
        """
        parts = [np.asarray(positions) for positions in tokens.values()]
        counts = {part.size for part in parts}
        if not self.unified and (len(counts) != 1 or any(isinstance(seqs, tuple) for seqs in tokens)):
            raise ValueError("separate streams take the same number of tokens each, of one sequence: split the batch")
        if not tokens or min(counts) < 1:
            raise ValueError("a batch has at least one token, and so has each of its sequences")
        positions = joined(parts)
        runs, first, after, earlier, start = [], {}, {}, {}, 0
        for seqs, part in zip(tokens, parts):
            stop = start + len(part)
            part = positions[start:stop]
            if len(part) > 1 and (np.diff(part) != 1).any():
                raise ValueError(f"the positions of a sequence's new tokens follow each other, unlike {part.tolist()}")
            if seqs == ():
                raise ValueError("a token is somebody's: name the sequences it is for")
            seqs = seqs if isinstance(seqs, tuple) else (seqs,)
            for seq in seqs:
                self.stream_of(seq)
                check_next(seq, after.get(seq), part[0])
                first.setdefault(seq, int(part[0]))
                after[seq] = part[-1] + 1
            if any(earlier.get(seq) != earlier.get(seqs[0]) for seq in seqs):
                raise diverged(seqs)
            for seq in seqs:
                earlier.setdefault(seq, []).append(len(runs))
            runs.append((seqs, start, stop))
            start = stop
        B = 1 if self.unified else len(tokens)
        return Batch(positions.reshape(B, -1), runs, first, self.n_seq_max)

    def streams_of(self, batch):
        """The streams that a batch goes to, (B,)."""
        return np.array([0] if self.unified else list(batch.first), dtype=np.int64)

    def find_slot(self, batch, contiguous=False):
        """`Slots` for a batch, or `NoSlot`. ValueError unless it begins where its sequences end. Changes nothing."""
        streams, (B, T) = self.streams_of(batch), batch.positions.shape
        if (B, batch.n_seq_max) != (len(streams), self.n_seq_max):
            raise ValueError("the batch was made by another cache")
        for seq, position in batch.first.items():
            last = self.seq_pos_max(seq)
            check_next(seq, None if last is None else last + 1, position)
        for seqs, _, _ in batch.runs:
            if len(seqs) > 1 and not self.streams[0].alike(seqs):
                raise diverged(seqs)
        found = [self.streams[s].find(T, self.window, contiguous) for s in streams]
        if any(cells is None for cells in found):
            return NoSlot(T, min(self.streams[s].n_usable(self.window) for s in streams), contiguous)
        return Slots(streams, np.stack(found))

    @counted
    def apply(self, slots, batch):
        """Take the cells that were found."""
        for stream, cells, positions in zip(slots.streams, slots.cells, batch.positions):
            self.streams[stream].put(cells, positions)
        T, found = slots.cells.shape[1], slots.cells.ravel()
        for seqs, start, stop in batch.runs:
            for seq in seqs:
                self.streams[slots.streams[start // T]].own(found[start:stop], seq)

    def prepare(self, batches):
        """`Slots` for each of several batches, one after the other, or `NoSlot` if not all fit. Changes nothing."""
        return self.rehearse(Streams.place, batches)

    def place(self, batches):
        """Take cells for several batches: `Slots` for each, or `NoSlot` for the first that does not fit."""
        found = []
        for batch in batches:
            slots = self.find_slot(batch)
            if not slots:
                return slots
            self.apply(slots, batch)
            found.append(slots)
        return found

    def rehearse(self, operation, *args):
        """Do an operation of `Streams` on copies of the cells: a ValueError if it is refused, and nothing changes."""
        streams = self.streams
        self.streams = [cells.copy() for cells in streams]
        try:
            return operation(self, *args)
        finally:
            self.streams = streams

    def clear(self):
        """Forget everything, and keep the storage."""
        self.streams = [Cells(len(cells), cells.seqs) for cells in self.streams]

    @counted
    def seq_rm(self, seq, p0=-1, p1=-1):
        """Take positions from a sequence (None: from all sequences). Cells that nobody else owns are free."""
        p0, p1 = integer('p0', p0), integer('p1', p1)
        for cells in [self.cells_of(seq)] if seq is not None else self.streams:
            cells.take(seq, p0, p1)

    @counted
    def seq_cp(self, source, target, p0=-1, p1=-1):
        """
        Let the target sequence have the source's positions too. In one stream it shares the cells and nothing is
        copied; a position that the target has already, in another cell, is refused. Across streams the target becomes
        a copy of the whole source, in cells of the same numbers, and goes on from the same head.
        """
        a, b = self.cells_of(source), self.cells_of(target)
        mine = a.of(source, integer('p0', p0), integer('p1', p1))
        if a is not b:
            self.check_whole(source, p0, p1)
            self.streams[self.stream_of(target)] = a.copy_of(source, target, b.seqs)
            return
        theirs = a.of(target)
        new = np.setdiff1d(mine, theirs, assume_unique=True)
        if np.isin(a.pos[new], a.pos[theirs]).any():
            raise ValueError(f"sequence {target} has some of these positions already: remove them first")
        a.own(new, target)

    @counted
    def seq_keep(self, seq):
        """Forget all sequences but this one."""
        kept = self.cells_of(seq)
        for cells in self.streams:
            for other in cells.seqs:
                if cells is not kept or other != seq:
                    cells.take(other)

    @counted
    def seq_add(self, seq, p0, p1, shift):
        """
        Move positions by shift; those that come before 0 are forgotten. Keys are turned before they are next used. The
        next search for cells begins at the first one that became free, or at 0.
        """
        p0, p1, shift = integer('p0', p0), integer('p1', p1), max(integer('shift', shift), -LARGEST)
        if shift and p1 != max(p0, 0):
            freed = self.move(seq, p0, p1, lambda pos: pos + shift, shift <= LARGEST)
            self.cells_of(seq).head = int(freed[0]) if len(freed) else 0

    @counted
    def seq_div(self, seq, p0, p1, divisor):
        """Divide positions, rounding down."""
        p0, p1, divisor = integer('p0', p0), integer('p1', p1), min(integer('divisor', divisor), LARGEST)
        if divisor < 1:
            raise ValueError(f"positions are divided by at least 1, not {divisor}")
        self.move(seq, p0, p1, lambda pos: pos // divisor)

    def move(self, seq, p0, p1, moved, small=True):
        """Give positions of a sequence the numbers that `moved` says. Returns the cells that became free."""
        cells = self.cells_of(seq)
        mine = cells.of(seq, p0, p1)
        if not small or len(mine) and moved(cells.pos[mine]).max() >= LARGEST:
            raise ValueError(f"positions would go beyond {LARGEST - 1}")
        if (moved(cells.pos[mine]) == cells.pos[mine]).all():
            return mine[:0]
        self.check_movable(seq, p0, p1)
        return cells.move(mine, moved(cells.pos[mine]), seq)

    def check_whole(self, seq, p0, p1):
        """ValueError unless a range has all positions of a sequence."""
        cells = self.cells_of(seq)
        if len(cells.of(seq, integer('p0', p0), integer('p1', p1))) < len(cells.of(seq)):
            raise ValueError("from stream to stream a sequence is copied whole: leave out p0 and p1")

    def check_movable(self, seq, p0=-1, p1=-1):
        """ValueError if positions of a sequence cannot be changed."""
        if not self.can_shift:
            raise ValueError("these positions cannot be changed: the model has learned positions, "
                             "which are part of the keys and values")
        cells = self.cells_of(seq)
        if (cells.n_owners[cells.of(seq, p0, p1)] > 1).any():  # the position is the cell's, and so would be theirs
            raise ValueError(f"sequence {seq} shares cells with another, which would be moved with it: "
                             "remove or copy one of them first")

    def seq_pos_min(self, seq):
        """The first position of a sequence, or None if it has none."""
        return self.cells_of(seq).pos_min(seq)

    def seq_pos_max(self, seq):
        """The last position of a sequence, or None if it has none."""
        return self.cells_of(seq).pos_max(seq)

    def __str__(self):
        """The cells of each stream, drawn as `Cells` are."""
        many = len(self.streams) > 1
        return '\n'.join(f'stream {n}\n{cells}' if many else str(cells) for n, cells in enumerate(self.streams))


def joined(parts):
    """Positions of several parts, one after the other, int64 (n,); ValueError on what is no position."""
    if all(part.ndim == 1 and part.dtype.kind in 'iu' for part in parts):
        positions = np.concatenate(parts)
        if 0 <= positions.min() and positions.max() < LARGEST:
            return positions.astype(np.int64)
    raise ValueError(f"positions are integers from 0 to {LARGEST - 1}, not {[part.tolist() for part in parts]}")


def check_next(seq, expected, position):
    """ValueError unless a sequence's next position is the expected one, where there is one."""
    if expected is not None and position != expected:
        raise ValueError(f"sequence {seq} goes on at position {expected}, not {position}")


def diverged(seqs):
    return ValueError(f"sequences {list(seqs)} have diverged: no token goes on all of them")


def integer(name, value):
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise ValueError(f"{name} is an integer, not {value!r}")


def context_shift(cache, seq, n_keep=0):
    """
    Make room in a full sequence: keep its first n_keep positions, drop the older half of the rest, and renumber what is
    left.

    Returns by how much it has moved. Eight positions with n_keep=2: of 0 ... 7, what was 0 1 5 6 7 is now 0 1 2 3 4.
    What is dropped or kept may be shared with other sequences, but what moves may not.
    """
    n_keep = integer('n_keep', n_keep)
    last = cache.seq_pos_max(seq)
    n_past = 0 if last is None else last + 1
    n_discard = (n_past - n_keep) // 2
    if n_keep < 0 or n_discard < 1:
        raise ValueError(f"of {n_past} positions {n_keep} cannot be kept and others dropped")
    cache.check_movable(seq, n_keep + n_discard)
    cache.seq_rm(seq, n_keep, n_keep + n_discard)
    cache.seq_add(seq, n_keep + n_discard, -1, -n_discard)
    return n_discard
