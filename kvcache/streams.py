"""
Streams of cells: where the tokens of a batch go, and the sequence operations. llama.cpp's llama-kv-cache.cpp, without the data.

Unified, all sequences share one stream of kv_size cells: any token can go to any free cell, sequences may share cells, and a
mask of positions and owners keeps them apart. Otherwise each sequence has a stream of kv_size cells for itself.
A batch is placed in two steps: `find_slot` looks for cells and changes nothing, `apply` takes them. `prepare` does the first for
many batches at once, all of them or none.
"""
from dataclasses import dataclass
from operator import index

import numpy as np

from kvcache.cells import EMPTY, Cells

LARGEST = 2**31  # no position is as large


@dataclass(frozen=True)
class Batch:
    """
    The new tokens of a forward pass: positions (B, T) and owners (B, T, n_seq_max), B the streams they go to, or 1 if unified.
    first: {sequence: the first of its new positions}. coupled: the groups of sequences that share tokens.
    """
    positions: np.ndarray
    owners: np.ndarray
    first: dict
    coupled: list


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
        return f"the cache is full: {self.needed} cells{' side by side' * self.contiguous} are needed and {self.usable} are free"


class Streams:
    """
    kv_size: cells of a stream. n_seq_max: sequences, numbered from 0. unified: one stream for all of them, or one each.
    window: a `Window`, or None. can_shift: may positions be changed?

    Ranges of positions are llama.cpp's: [p0, p1), p0 < 0 from the beginning, p1 < 0 to the end.
    """

    def __init__(self, kv_size, n_seq_max, unified=True, window=None, can_shift=False):
        self.kv_size, self.n_seq_max, self.unified, self.window, self.can_shift = kv_size, n_seq_max, unified, window, can_shift
        self.streams = [Cells(kv_size, n_seq_max) for _ in range(1 if unified else n_seq_max)]

    def stream_of(self, seq):
        if not isinstance(seq, (int, np.integer)) or not 0 <= seq < self.n_seq_max:
            raise ValueError(f"there are sequences 0 to {self.n_seq_max - 1}, but not {seq!r}")
        return 0 if self.unified else seq

    def cells_of(self, seq):
        return self.streams[self.stream_of(seq)]

    def batch(self, tokens):
        """
        The batch of {sequence, or a tuple of sequences that share them: positions of its new tokens, each one more than the last}.

        In one stream, all tokens follow each other. Without, sequences share nothing and each brings as many tokens.
        """
        counts = {len(positions) for positions in tokens.values()}
        if not self.unified and (len(counts) != 1 or any(isinstance(seqs, tuple) for seqs in tokens)):
            raise ValueError("of separate streams each takes the same number of tokens, of one sequence: split the batch")
        if not tokens or min(counts) < 1:
            raise ValueError("a batch has at least one token, and so has each of its sequences")
        positions = np.concatenate([np.asarray(positions) for positions in tokens.values()])
        if positions.dtype.kind != 'i' or not 0 <= positions.min() <= positions.max() < LARGEST:
            raise ValueError(f"positions are integers from 0 to {LARGEST - 1}, not {positions.tolist()}")
        owners = np.zeros((len(positions), self.n_seq_max), dtype=bool)
        first, after, start = {}, {}, 0
        for seqs, mine in tokens.items():
            end = start + len(mine)
            if (np.diff(positions[start:end]) != 1).any():
                raise ValueError(f"the positions of a sequence's new tokens follow each other, unlike {list(mine)}")
            if seqs == ():
                raise ValueError("a token is somebody's: name the sequences it is for")
            for seq in seqs if isinstance(seqs, tuple) else (seqs,):
                self.stream_of(seq)
                check_next(seq, after.get(seq), positions[start])
                first.setdefault(seq, int(positions[start]))
                after[seq] = positions[end - 1] + 1
                owners[start:end, seq] = True
            start = end
        B = 1 if self.unified else len(tokens)
        coupled = [list(seqs) for seqs in tokens if isinstance(seqs, tuple)]
        return Batch(positions.reshape(B, -1), owners.reshape(B, -1, self.n_seq_max), first, coupled)

    def streams_of(self, batch):
        """The streams that a batch goes to, (B,)."""
        return np.array([0] if self.unified else list(batch.first))

    def find_slot(self, batch, contiguous=False):
        """`Slots` for a batch, or `NoSlot`. ValueError if it does not begin where its sequences end. Nothing is changed."""
        streams = self.streams_of(batch)
        B, T, n_seq_max = batch.owners.shape
        if (B, n_seq_max) != (len(streams), self.n_seq_max):
            raise ValueError("the batch was made by another cache")
        for seq, position in batch.first.items():
            last = self.seq_pos_max(seq)
            check_next(seq, None if last is None else last + 1, position)
        for seqs in batch.coupled:
            owners = self.streams[0].owners[:, seqs]
            if (owners != owners[:, :1]).any():
                raise ValueError(f"sequences {seqs} have diverged: no token goes on all of them")
        found = [self.streams[s].find(T, self.window, contiguous) for s in streams]
        if any(cells is None for cells in found):
            return NoSlot(T, min(int(self.streams[s].usable(self.window).sum()) for s in streams), contiguous)
        return Slots(streams, np.stack(found))

    def apply(self, slots, batch):
        """Take the cells that were found."""
        for stream, cells, positions, owners in zip(slots.streams, slots.cells, batch.positions, batch.owners):
            self.streams[stream].put(cells, positions, owners)

    def prepare(self, batches):
        """`Slots` for each of several batches, one after the other, or `NoSlot` if they do not all fit. Nothing is changed."""
        streams, found = self.streams, []
        self.streams = [cells.copy() for cells in streams]
        try:
            for batch in batches:
                slots = self.find_slot(batch)
                if not slots:
                    return slots
                self.apply(slots, batch)
                found.append(slots)
            return found
        finally:
            self.streams = streams

    def clear(self):
        """Forget everything, and keep the storage."""
        for cells in self.streams:
            cells.clear(cells.pos != EMPTY)
            cells.head = 0

    def seq_rm(self, seq, p0=-1, p1=-1):
        """Take positions from a sequence (None: from all sequences). Cells that nobody else owns are free."""
        for cells in [self.cells_of(seq)] if seq is not None else self.streams:
            cells.disown(cells.of(seq, p0, p1), seq)

    def seq_cp(self, source, target, p0=-1, p1=-1):
        """
        Let the target sequence have the source's positions too. In one stream it shares the cells and nothing is copied; a position
        that the target has already, in another cell, is refused. Across streams the target becomes a copy of the whole source.
        """
        a, b = self.cells_of(source), self.cells_of(target)
        mine = a.of(source, p0, p1)
        if a is not b:
            if mine.sum() < a.of(source).sum():
                raise ValueError("from stream to stream a sequence is copied whole: leave out p0 and p1")
            b.clear(b.pos != EMPTY)
            b.pos[mine], b.shift[mine], b.owners[mine, target] = a.pos[mine], a.shift[mine], True
            return
        new = mine & ~a.owners[:, target]
        if np.isin(a.pos[new], a.pos[a.owners[:, target]]).any():
            raise ValueError(f"sequence {target} has some of these positions already: remove them first")
        a.owners[new, target] = True

    def seq_keep(self, seq):
        """Forget all sequences but this one."""
        kept = self.cells_of(seq)
        for cells in self.streams:
            gone = np.arange(self.n_seq_max) != seq if cells is kept else slice(None)
            cells.owners[:, gone] = False
            cells.clear(~cells.owners.any(axis=1))

    def seq_add(self, seq, p0, p1, shift):
        """Move positions by shift; those that come before 0 are forgotten. Keys are turned before they are next used."""
        shift = integer('shift', shift)
        self.move(seq, p0, p1, lambda pos: pos + shift)

    def seq_div(self, seq, p0, p1, divisor):
        """Divide positions, rounding down."""
        divisor = integer('divisor', divisor)
        if divisor < 1:
            raise ValueError(f"positions are divided by at least 1, not {divisor}")
        self.move(seq, p0, p1, lambda pos: pos // divisor)

    def move(self, seq, p0, p1, moved):
        cells = self.cells_of(seq)
        mine = cells.of(seq, p0, p1)
        if not mine.any() or (moved(cells.pos[mine]) == cells.pos[mine]).all():
            return
        self.check_movable(seq, p0, p1)
        if moved(cells.pos[mine]).max() >= LARGEST:
            raise ValueError(f"positions would go beyond {LARGEST - 1}")
        cells.move(mine, moved(cells.pos[mine]))

    def check_movable(self, seq, p0=-1, p1=-1):
        """ValueError if positions of a sequence cannot be changed."""
        if not self.can_shift:
            raise ValueError("these positions cannot be changed: the model's are learned, and baked into keys and values")
        cells = self.cells_of(seq)
        if (cells.owners[cells.of(seq, p0, p1)].sum(axis=1) > 1).any():  # the position is the cell's, and so would be theirs
            raise ValueError(f"sequence {seq} shares cells with another, which would be moved with it: remove or copy one of them first")

    def seq_pos_min(self, seq):
        """The first position of a sequence, or None if it has none."""
        return self.cells_of(seq).pos_min(seq)

    def seq_pos_max(self, seq):
        """The last position of a sequence, or None if it has none."""
        return self.cells_of(seq).pos_max(seq)

    def __str__(self):
        """The cells of each stream, drawn as `Cells` are."""
        return '\n'.join(f'stream {number}\n{cells}' if len(self.streams) > 1 else str(cells) for number, cells in enumerate(self.streams))


def check_next(seq, expected, position):
    """ValueError unless a sequence's next position is the expected one, where there is one."""
    if expected is not None and position != expected:
        raise ValueError(f"sequence {seq} goes on at position {expected}, not {position}")


def integer(name, value):
    try:
        return index(value)
    except TypeError:
        raise ValueError(f"{name} is an integer, not {value!r}") from None


def context_shift(cache, seq, n_keep=0):
    """
    Make room in a full sequence: keep its first n_keep positions, drop the older half of the rest, and renumber what is left.

    Returns by how much it has moved. Eight positions with n_keep=2: of 0 ... 7, what was 0 1 5 6 7 is now 0 1 2 3 4. What is dropped
    or kept may be shared with other sequences, but what moves may not.
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
