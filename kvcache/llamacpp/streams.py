"""
Streams of cells: where the tokens of a batch are stored, and the operations on sequences. llama.cpp's
llama-kv-cache.cpp, without keys and values.

In a unified cache all sequences share one stream of kv_size cells: any token can go to any free cell, sequences may
share cells, and a mask of positions and owners keeps them apart. Otherwise each sequence has its own stream of kv_size
cells. A batch is stored in two steps: `find_slot` finds cells and changes nothing, `apply` writes to them. `prepare`
finds cells for several batches, for all or for none.
"""
import functools
from dataclasses import dataclass
from operator import index

import numpy as np

from kvcache.cells import Cells

LARGEST = 2**31  # all positions are below


@dataclass(frozen=True)
class Batch:
    """
    The new tokens of a forward pass. positions: (B, T), B the number of streams they go to, which is 1 if unified.
    spans: [(sequences, start, stop)]: tokens start to stop - 1 of the B * T belong to these sequences; in order.
    first: {sequence: the first of its new positions}. n_seq_max: of the cache that the batch is for.
    """
    positions: np.ndarray
    spans: list
    first: dict
    n_seq_max: int


@dataclass(frozen=True)
class Slots:
    """The cells for a batch: the numbers of the streams, (B,), and the cells of each, (B, T)."""
    streams: np.ndarray
    cells: np.ndarray


@dataclass(frozen=True)
class NoSlot:
    """The result of a search that found too few cells. It is false, and a `Slots` is true."""
    needed: int
    usable: int
    contiguous: bool

    def __bool__(self):
        return False

    def __str__(self):
        side = ' side by side' * self.contiguous
        return (f"the cache is full: {self.needed} cells{side} are needed and {self.usable} are free: "
                "remove a sequence, or make the cache larger")


def counted(operation):
    """Decorates a method of `Streams`: if an interrupt ends it, the counts of all cells are made anew."""
    @functools.wraps(operation)
    def method(self, *args, **kwargs):
        try:
            return operation(self, *args, **kwargs)
        except ValueError:  # raised before anything was changed
            raise
        except BaseException:
            for cells in self.streams:
                cells.recount()
            raise
    return method


class Streams:
    """
    kv_size: the number of cells of a stream. n_seq_max: the number of sequences, which are numbered from 0. unified:
    one stream for all of them, or one each. window: a `Window`, or None. can_shift: can positions be changed?

    Ranges of positions are llama.cpp's: [p0, p1), p0 < 0 from the beginning, p1 < 0 to the end. A method that raises
    ValueError has changed nothing.
    """

    def __init__(self, kv_size, n_seq_max, unified=True, window=None, can_shift=False):
        self.kv_size, self.n_seq_max, self.unified = kv_size, n_seq_max, unified
        self.window, self.can_shift, self.n_sink = window, can_shift, window.n_sink if window else 0
        ranges = [range(n_seq_max)] if unified else [range(seq, seq + 1) for seq in range(n_seq_max)]
        self.streams = [Cells(kv_size, seqs) for seqs in ranges]

    def stream_of(self, seq):
        """The number of the stream that a sequence is in."""
        if not isinstance(seq, (int, np.integer)) or isinstance(seq, bool) or not 0 <= seq < self.n_seq_max:
            raise ValueError(f"sequences are numbered 0 to {self.n_seq_max - 1}, not {seq!r}")
        return 0 if self.unified else int(seq)

    def cells_of(self, seq):
        """The `Cells` that a sequence is in."""
        return self.streams[self.stream_of(seq)]

    def batch(self, tokens):
        """
        The `Batch` of {sequence, or tuple of sequences: the consecutive positions of its new tokens}.

        In one stream the tokens are stored one after the other. Sequences that share a token must own the same cells
        before it. In separate streams sequences share nothing, and each brings the same number of tokens.
        """
        parts = [np.asarray(positions) for positions in tokens.values()]
        counts = [part.size for part in parts]
        if not self.unified and any(isinstance(seqs, tuple) for seqs in tokens):
            raise ValueError(f"tokens are for sequences {list(tokens)}, and in separate streams none can be shared: "
                             "split the batch, and give each sequence its own tokens")
        if not self.unified and len(set(counts)) > 1:
            raise ValueError(f"sequences {list(tokens)} bring {counts} tokens, and separate streams take the same "
                             "number of each: split the batch by numbers of tokens")
        if not tokens or min(counts) < 1:
            raise ValueError(f"sequences {list(tokens)} bring {counts} tokens, and a batch needs at least one of each: "
                             "leave out sequences without new tokens")
        positions = joined(parts)
        spans, first, after, earlier, start = [], {}, {}, {}, 0
        for seqs, part in zip(tokens, parts):
            stop = start + len(part)
            part = positions[start:stop]
            if len(part) > 1 and (np.diff(part) != 1).any():
                raise ValueError(f"positions {part.tolist()} do not follow each other: each must be one "
                                 "more than the one before")
            if seqs == ():
                raise ValueError(f"the tokens at positions {part.tolist()} are for no sequence: name at least one")
            seqs = seqs if isinstance(seqs, tuple) else (seqs,)
            for seq in seqs:
                self.stream_of(seq)
                check_next(seq, after.get(seq), part[0])
                first.setdefault(seq, int(part[0]))
                after[seq] = part[-1] + 1
            if any(earlier.get(seq) != earlier.get(seqs[0]) for seq in seqs):
                raise diverged(seqs)
            for seq in seqs:
                earlier.setdefault(seq, []).append(len(spans))
            spans.append((seqs, start, stop))
            start = stop
        B = 1 if self.unified else len(tokens)
        return Batch(positions.reshape(B, -1), spans, first, self.n_seq_max)

    def streams_of(self, batch):
        """The numbers of the streams that a batch goes to, (B,)."""
        return np.array([0] if self.unified else list(batch.first), dtype=np.int64)

    def find_slot(self, batch, contiguous=False):
        """
        `Slots` for a batch, or `NoSlot`. Changes nothing. ValueError unless the batch begins where its sequences end.
        """
        streams, (B, T) = self.streams_of(batch), batch.positions.shape
        if (B, batch.n_seq_max) != (len(streams), self.n_seq_max):
            raise ValueError("the batch was made by another cache: make it with this cache's batch()")
        for seq, position in batch.first.items():
            last = self.seq_pos_max(seq)
            # a window of 1 lets all positions but the sinks be written over
            lost = self.n_sink and self.window.n_swa == 1 and last is not None and last < self.n_sink <= position
            check_next(seq, None if last is None or lost else last + 1, position)
        for seqs, _, _ in batch.spans:
            if len(seqs) > 1 and not self.streams[0].own_same_cells(seqs):
                raise diverged(seqs)
        found = [self.streams[s].find(T, self.window, contiguous) for s in streams]
        if any(cells is None for cells in found):
            return NoSlot(T, min(self.streams[s].n_usable(self.window) for s in streams), contiguous)
        return Slots(streams, np.stack(found))

    @counted
    def apply(self, slots, batch):
        """Write the positions and owners of a batch to the cells that were found for it."""
        for stream, cells, positions in zip(slots.streams, slots.cells, batch.positions):
            self.streams[stream].write(cells, positions, self.n_sink)
        T, found = slots.cells.shape[1], slots.cells.ravel()
        for seqs, start, stop in batch.spans:
            for seq in seqs:
                self.streams[slots.streams[start // T]].add_owner(found[start:stop], seq)

    def prepare(self, batches):
        """`Slots` for each of several batches, one after the other, or `NoSlot` if not all fit. Changes nothing."""
        return self.dry_run(Streams.find_and_apply, batches)

    def find_and_apply(self, batches):
        """Store several batches: their `Slots`, or `NoSlot` for the first that does not fit."""
        found = []
        for batch in batches:
            slots = self.find_slot(batch)
            if not slots:
                return slots
            self.apply(slots, batch)
            found.append(slots)
        return found

    def dry_run(self, operation, *args):
        """What operation(self, *args) returns or raises, on copies of the cells. Changes nothing."""
        streams = self.streams
        self.streams = [cells.copy() for cells in streams]
        try:
            return operation(self, *args)
        finally:
            self.streams = streams

    def clear(self):
        """Remove all sequences."""
        self.streams = [Cells(len(cells), cells.seqs) for cells in self.streams]

    @counted
    def seq_rm(self, seq, p0=-1, p1=-1):
        """Remove positions of a sequence (None: of all sequences). Cells that no sequence owns any more are free."""
        p0, p1 = integer('p0', p0), integer('p1', p1)
        for cells in [self.cells_of(seq)] if seq is not None else self.streams:
            cells.remove(seq, p0, p1)

    @counted
    def seq_cp(self, source, target, p0=-1, p1=-1):
        """
        Give the target sequence the source's positions too.

        In one stream the two share the cells, and nothing is copied. ValueError if the target has one of the positions
        already, in another cell. Across streams the target becomes a copy of the whole source, in cells of the
        same numbers and with the same head.
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
        a.add_owner(new, target)

    @counted
    def seq_keep(self, seq):
        """Remove all sequences but this one."""
        kept = self.cells_of(seq)
        for cells in self.streams:
            for other in cells.seqs:
                if cells is not kept or other != seq:
                    cells.remove(other)

    @counted
    def seq_add(self, seq, p0, p1, shift):
        """
        Add shift to positions. Positions that would be below 0 are removed. The keys are rotated before they are next
        used. The next search for cells begins at the first cell that became free, or at 0.
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

    def move(self, seq, p0, p1, moved, fits=True):
        """
        Change positions of a sequence to moved(positions). Returns the cells that became free. ValueError if `fits` is
        False or a position would be LARGEST or more.
        """
        cells = self.cells_of(seq)
        mine = cells.of(seq, p0, p1)
        if not fits or len(mine) and moved(cells.pos[mine]).max() >= LARGEST:
            raise ValueError(f"positions of sequence {seq} would be more than {LARGEST - 1}: move them by less")
        if (moved(cells.pos[mine]) == cells.pos[mine]).all():
            return mine[:0]
        self.check_movable(seq, p0, p1)
        return cells.move(mine, moved(cells.pos[mine]), seq)

    def check_whole(self, seq, p0, p1):
        """ValueError unless a range has all positions of a sequence."""
        cells = self.cells_of(seq)
        if len(cells.of(seq, integer('p0', p0), integer('p1', p1))) < len(cells.of(seq)):
            raise ValueError(f"[{p0}, {p1}) is a part of sequence {seq}, and only a whole sequence can be copied to "
                             "another stream: leave out p0 and p1")

    def check_movable(self, seq, p0=-1, p1=-1):
        """ValueError if these positions of a sequence cannot be changed."""
        if not self.can_shift:
            raise ValueError("these positions cannot be changed, the model has learned positions, which are part of "
                             "its keys and values: compute the tokens again at their new positions")
        cells = self.cells_of(seq)
        if (cells.n_owners[cells.of(seq, p0, p1)] > 1).any():  # a cell has one position, for all of its owners
            raise ValueError(f"sequence {seq} shares cells with another, which would be moved with it: "
                             "remove or copy one of them first")

    def seq_pos_min(self, seq):
        """The first position of a sequence, or None if it has none."""
        return self.cells_of(seq).pos_min(seq)

    def seq_pos_max(self, seq):
        """The last position of a sequence, or None if it has none."""
        return self.cells_of(seq).pos_max(seq)

    def __str__(self):
        """A drawing of the cells of each stream, see `Cells`."""
        many = len(self.streams) > 1
        return '\n'.join(f'stream {n}\n{cells}' if many else str(cells) for n, cells in enumerate(self.streams))


def joined(parts):
    """Several arrays of positions as one, int64 (n,). ValueError if they are not positions."""
    if all(part.ndim == 1 and part.dtype.kind in 'iu' for part in parts):
        positions = np.concatenate(parts)
        if 0 <= positions.min() and positions.max() < LARGEST:
            return positions.astype(np.int64)
    raise ValueError(f"positions are integers from 0 to {LARGEST - 1}, not {[part.tolist() for part in parts]}")


def check_next(seq, expected, position):
    """ValueError unless the next position of a sequence is the expected one; None expects any."""
    if expected is not None and position != expected:
        raise ValueError(f"sequence {seq} goes on at position {expected}, not {position}")


def diverged(seqs):
    return ValueError(f"sequences {list(seqs)} have diverged and cannot share a token: give each its own")


def integer(name, value):
    """value as an int, or ValueError."""
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise ValueError(f"{name} must be an integer, not {value!r}")


def context_shift(cache, seq, n_keep=0):
    """
    Make room in a full sequence: keep its first n_keep positions, remove the older half of the rest, and move the
    others down. Returns by how many positions they have moved.

    Example: with n_keep=2, of positions 0 ... 7 those at 0 1 5 6 7 remain, at 0 1 2 3 4. The positions that are removed
    or kept may be shared with other sequences. Those that move may not.
    """
    n_keep = integer('n_keep', n_keep)
    last = cache.seq_pos_max(seq)
    n_past = 0 if last is None else last + 1
    n_discard = (n_past - n_keep) // 2
    if n_keep < 0 or n_discard < 1:
        raise ValueError(f"sequence {seq} has {n_past} positions, of which {n_keep} cannot be kept and others removed: "
                         f"n_keep must be 0 to {max(0, n_past - 2)}")
    cache.check_movable(seq, n_keep + n_discard)
    cache.seq_rm(seq, n_keep, n_keep + n_discard)
    cache.seq_add(seq, n_keep + n_discard, -1, -n_discard)
    return n_discard
