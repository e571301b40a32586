"""
Who owns which cell: positions and sequences, without keys and values. numpy only.

A cell has a position and a set of owners, the sequences that it is a part of. If ten samples share a prompt, it is one
set of cells with ten owners each. In a unified cache all sequences share one stream of kv_size cells: any token can go
to any free cell. Otherwise each sequence has its own stream of kv_size cells. A batch is stored in two steps:
`find_slot` finds cells and changes nothing, `apply` writes to them.

Follows llama.cpp's src/llama-kv-cells.h and the part of src/llama-kv-cache.cpp that has no tensors:

    here                                            there
    Cells, used, end, shift                         llama_kv_cells, get_used, used_max_p1, shift
    Cells.put, Streams.move                         pos_set and seq_add, pos_add and pos_div
    n_swa                                           the same name, with LLAMA_SWA_TYPE_STANDARD
    Batch, and the cells that find_slot returns     llama_ubatch, slot_info
    find_slot, apply                                find_slot, apply_ubatch
    seq_rm, _cp, _keep, _add, _div, _pos_min, _max  the same names
    context_shift                                   what tools/main and tools/server do when a context is full
"""
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from operator import index

import numpy as np

EMPTY = -1     # the position of a cell that holds nothing
COLUMNS = 120  # the width of a picture


class NoSlot(ValueError):
    """There are too few cells. Nothing has changed."""


class Cells:
    """
    An array of cells for the sequences `seqs`, a range of their numbers.

    shift: int64 (size,), by how much a position has changed since the key in the cell was last rotated; given as zeros.
    pos: int64 (size,), EMPTY or a position. owners: bool (len(seqs), size), a row for each sequence.
    head: the cell from which the search for free cells begins. end: the number of the last cell that holds something,
    plus one, so that the cost of a token depends on the cells in use and not on the size.

    Methods take cells by number, int64 (n,). Ranges of positions are llama.cpp's: [p0, p1), p0 < 0 from the beginning,
    p1 < 0 to the end.
    """

    def __init__(self, seqs, shift):
        self.seqs, self.shift = seqs, shift
        self.pos = np.full(len(shift), EMPTY)
        self.owners = np.zeros((len(seqs), len(shift)), dtype=bool)
        self.head = self.end = 0

    def __len__(self):
        return len(self.pos)

    def used(self):
        """How many cells hold something."""
        return len(self.of(None))

    def of(self, seq, p0=-1, p1=-1):
        """The cells of a sequence (None: of any) with a position in [p0, p1), in ascending order."""
        pos = self.pos[:self.end]
        mine = pos != EMPTY if seq is None else self.owners[self.seqs.index(seq), :self.end]
        if p0 > 0:
            mine = mine & (pos >= p0)
        if p1 >= 0:
            mine = mine & (pos < p1)
        return np.flatnonzero(mine)

    def owned_by(self, *seqs):
        """bool (len(self.seqs), 1): the owners of a cell that only these sequences own."""
        return np.isin(self.seqs, seqs)[:, None]

    def put(self, cells, pos, owners, shift=0):
        """
        Let cells hold positions pos (n,) for `owners`, bool (len(seqs), n) or (len(seqs), 1), with keys that must still
        be rotated by shift (n,). Cells without owners become empty, and the head moves back to the first of them.

        Everything that changes cells does it here.
        """
        owners = np.broadcast_to(owners, (len(self.seqs), len(cells)))
        free = ~owners.any(axis=0)
        emptied = cells[free & (self.pos[cells] != EMPTY)]
        self.owners[:, cells] = owners
        self.pos[cells], self.shift[cells] = np.where(free, EMPTY, pos), np.where(free, 0, shift)
        self.end = max(self.end, int(cells.max(initial=-1)) + 1)
        self.end = int(self.of(None).max(initial=-1)) + 1
        self.head = int(emptied.min(initial=self.head))

    def write(self, cells, pos, owners, shift=0):
        """
        `put` tokens into cells that `find` has found, whatever they held. The head is after the last of them.

        A sequence that loses a position like this loses all earlier ones too, so that its other positions have no hole.
        If it loses its last position, which can happen with a window of 1, its next token may have any position.
        """
        held = cells[self.pos[cells] != EMPTY]
        for row in np.flatnonzero(self.owners[:, held].any(axis=1)):
            self.remove(self.seqs[row], p1=self.pos[held[self.owners[row, held]]].max() + 1)
        self.put(cells, pos, owners, shift)
        self.head = int(cells[-1]) + 1

    def own(self, cells, seq, owned=True):
        """Add a sequence to the owners of cells, or remove it from them."""
        owners = self.owners[:, cells]
        owners[self.seqs.index(seq)] = owned
        self.put(cells, self.pos[cells], owners, self.shift[cells])

    def remove(self, seq, p0=-1, p1=-1):
        """Remove the positions [p0, p1) of a sequence (None: of all sequences)."""
        if seq is None:
            self.put(self.of(None, p0, p1), EMPTY, False)
        else:
            self.own(self.of(seq, p0, p1), seq, False)

    def usable(self, n_swa, stop):
        """
        The cells before `stop`, which is at least `end`, that may be written, in ascending order: empty ones, and those
        with one owner whose window of n_swa positions (0: none) hides them from its next token.
        """
        pos, owners = self.pos[:stop], self.owners[:, :stop]
        usable = pos == EMPTY
        if n_swa:
            last = np.broadcast_to(pos, owners.shape).max(axis=1, where=owners, initial=EMPTY)
            usable |= (pos + n_swa <= last[owners.argmax(axis=0)] + 1) & (owners.sum(axis=0) == 1)
        return np.flatnonzero(usable)

    def find(self, n, n_swa=0):
        """
        n cells that may be written, int64 (n,), or `NoSlot`. Changes nothing.

        The search begins at the head and goes on at 0 when it reaches the end. If the head is far beyond the number of
        used cells, there is room before it, and the search begins at 0.
        """
        size = len(self)
        head = 0 if self.head > self.used() + 2 * n else self.head % size
        found = self.usable(n_swa, min(size, max(head, self.end) + n))  # enough, or all that there are
        if len(found) < n:
            raise NoSlot(f"the cache is full: {n} cells are needed and {len(found)} are free: remove a sequence, or "
                         "make the cache larger")
        return np.roll(found, -np.searchsorted(found, head))[:n]

    def __str__(self):
        """
        A picture: each cell's number, its position, and its owners as letters. Lines are at most COLUMNS wide.

            slot  0   1   2   3
            pos   0   1   .   2
            seq   ab  ab      a
        """
        letters = [chr(97 + seq) if seq < 26 else f'({seq})' for seq in self.seqs]
        names = [''.join(letter for letter, owns in zip(letters, of_cell) if owns) for of_cell in self.owners.T]
        lines = dict(slot=range(len(self)), pos=['.' if p == EMPTY else p for p in self.pos], seq=names)
        width = max(len(str(value)) for values in lines.values() for value in values) + 2
        n, parts = (COLUMNS - 6) // width, []
        for start in range(0, len(self), n):
            for label, values in lines.items():
                row = ''.join(f'{value!s:<{width}}' for value in values[start:start + n])
                parts.append(f'{label:<6}{row}'.rstrip())
            parts.append('')
        return '\n'.join(parts[:-1])


@dataclass(frozen=True)
class Batch:
    """
    The new tokens of a forward pass. positions: (B, T), B the number of streams they go to, which is 1 if unified.
    spans: [(sequences, start, stop)]: tokens start to stop - 1 of the B * T belong to these sequences; in order.
    first: {sequence: the first of its new positions}. streams: the numbers of the streams, (B,).
    """
    positions: np.ndarray
    spans: list
    first: dict
    streams: np.ndarray


class Streams:
    """
    kv_size: the number of cells of a stream. n_seq_max: the number of sequences, which are numbered from 0. unified:
    one stream for all of them, or one each. n_swa: how many positions a token sees, its own included; 0: all before it.
    can_shift: can positions be changed?
    streams: the `Cells` of each stream. shift: their shifts one after the other, int64 (len(streams) * kv_size,).

    Ranges of positions are those of `Cells`. A method that raises ValueError has changed nothing.
    """

    def __init__(self, kv_size, n_seq_max, unified=True, n_swa=0, can_shift=False):
        if n_swa < 0:
            raise ValueError(f"n_swa must be a number of positions (0: no window), not {n_swa}")
        self.kv_size, self.n_seq_max, self.unified = kv_size, n_seq_max, unified
        self.n_swa, self.can_shift = n_swa, can_shift
        ranges = [range(n_seq_max)] if unified else [range(seq, seq + 1) for seq in range(n_seq_max)]
        self.shift = np.zeros(len(ranges) * kv_size, dtype=np.int64)
        self.streams = [Cells(*each) for each in zip(ranges, self.shift.reshape(len(ranges), kv_size))]

    def stream_of(self, seq):
        """The number of the stream that a sequence is in."""
        if isinstance(seq, bool) or seq not in range(self.n_seq_max):
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
        if not tokens or min(counts) < 1 or () in tokens:
            raise ValueError(f"sequences {list(tokens)} bring {counts} tokens, and a batch needs at least one of each: "
                             "leave out sequences without new tokens, and tokens without a sequence")
        if not self.unified and (len(set(counts)) > 1 or any(isinstance(seqs, tuple) for seqs in tokens)):
            raise ValueError(f"sequences {list(tokens)} bring {counts} tokens, and separate streams take the same "
                             "number of each, and none for several of them: split the batch")
        joined = np.concatenate(parts)
        positions = joined.astype(np.int64)
        if joined.dtype.kind not in 'iu' or positions.min() < 0:
            raise ValueError(f"positions are integers from 0 on, not {joined.tolist()}")
        spans, first, ends, start = [], {}, {}, 0  # ends: {sequence: (its last position, where its last span begins)}
        for seqs, n in zip(tokens, counts):
            part = positions[start:start + n]
            if (np.diff(part) != 1).any():
                raise ValueError(f"positions {part.tolist()} do not follow each other: each must be one "
                                 "more than the one before")
            seqs = seqs if isinstance(seqs, tuple) else (seqs,)
            for seq in seqs:
                self.stream_of(seq)
                check_next(seq, ends[seq][0] if seq in ends else None, part[0])
                first.setdefault(seq, int(part[0]))
            if len({ends.get(seq) for seq in seqs}) > 1:
                raise diverged(seqs)
            ends |= dict.fromkeys(seqs, (part[-1], start))
            spans.append((seqs, start, start + n))
            start += n
        streams = np.array([0] if self.unified else list(first), dtype=np.int64)
        return Batch(positions.reshape(len(streams), -1), spans, first, streams)

    def find_slot(self, batch):
        """
        Cells for a batch, int64 (B, T), in each of its streams. Changes nothing. `NoSlot` if there are too few,
        ValueError unless the batch begins where its sequences end.
        """
        for seq, position in batch.first.items():
            check_next(seq, self.seq_pos_max(seq), position)
        for seqs, _, _ in batch.spans:
            if len(seqs) > 1:
                owners = self.streams[0].owners[list(seqs), :self.streams[0].end]
                if (owners != owners[0]).any():
                    raise diverged(seqs)
        n = batch.positions.shape[1]
        return np.stack([self.streams[s].find(n, self.n_swa) for s in batch.streams])

    def apply(self, found, batch):
        """Write the positions and owners of a batch to the cells that `find_slot` has found for it."""
        for i, (stream, numbers, positions) in enumerate(zip(batch.streams, found, batch.positions)):
            cells = self.streams[stream]
            spans = batch.spans if self.unified else batch.spans[i:i + 1]
            owners = np.concatenate([np.repeat(cells.owned_by(*seqs), stop - start, axis=1)
                                     for seqs, start, stop in spans], axis=1)
            cells.write(numbers, positions, owners)

    @contextmanager
    def dry_run(self):
        """`with streams.dry_run():` what is done inside is done on copies of the cells, and forgotten at the end."""
        streams = self.streams
        self.streams = deepcopy(streams)
        try:
            yield
        finally:
            self.streams = streams

    def clear(self):
        """Remove all sequences."""
        for cells in self.streams:
            cells.remove(None)
            cells.head = 0

    def seq_rm(self, seq, p0=-1, p1=-1):
        """Remove positions of a sequence (None: of all sequences). Cells that no sequence owns any more are free."""
        for cells in [self.cells_of(seq)] if seq is not None else self.streams:
            cells.remove(seq, p0, p1)

    def seq_cp(self, source, target, p0=-1, p1=-1):
        """
        Give the target sequence the source's positions too.

        In one stream the two share the cells, and nothing is copied. ValueError if the target has one of the positions
        already, in another cell. Across streams the target becomes a copy of the whole source, in cells of the
        same numbers and with the same head.
        """
        a, b = self.cells_of(source), self.cells_of(target)
        mine = a.of(source, p0, p1)
        if a is not b:
            if len(mine) < len(a.of(source)):
                raise ValueError(f"[{p0}, {p1}) is a part of sequence {source}, and only a whole sequence can be "
                                 "copied to another stream: leave out p0 and p1")
            b.remove(target)
            b.put(mine, a.pos[mine], True, a.shift[mine])
            b.head = a.head
            return
        theirs = a.of(target)
        new = np.setdiff1d(mine, theirs, assume_unique=True)
        if np.isin(a.pos[new], a.pos[theirs]).any():
            raise ValueError(f"sequence {target} has some of these positions already: remove them first")
        a.own(new, target)

    def seq_keep(self, seq):
        """Remove all sequences but this one."""
        self.stream_of(seq)
        for other in {*range(self.n_seq_max)} - {seq}:
            self.seq_rm(other)

    def seq_add(self, seq, p0, p1, shift):
        """
        Add shift to positions. Positions that would be below 0 are removed. The keys are rotated before they are next
        used. The next search for cells begins at the first cell that became free, or at 0.
        """
        shift = index(shift)
        if shift and p1 != max(p0, 0):
            freed = self.move(seq, p0, p1, lambda pos: pos + shift)
            self.cells_of(seq).head = int(freed[0]) if len(freed) else 0

    def seq_div(self, seq, p0, p1, divisor):
        """Divide positions, rounding down."""
        if index(divisor) < 1:
            raise ValueError(f"positions are divided by at least 1, not {divisor}")
        self.move(seq, p0, p1, lambda pos: pos // divisor)

    def move(self, seq, p0, p1, moved):
        """
        Change positions of a sequence to moved(positions). Keys must then be rotated. Cells whose position would be
        below 0 are emptied, and returned.
        """
        cells = self.cells_of(seq)
        mine = cells.of(seq, p0, p1)
        old = cells.pos[mine]
        new = moved(old)
        if (new != old).any():
            self.check_movable(seq, p0, p1)
            cells.put(mine, new, cells.owners[:, mine] & (new >= 0), cells.shift[mine] + new - old)
        return mine[new < 0]

    def check_movable(self, seq, p0=-1, p1=-1):
        """ValueError if these positions of a sequence cannot be changed."""
        if not self.can_shift:
            raise ValueError("these positions cannot be changed, the model has learned positions, which are part of "
                             "its keys and values: compute the tokens again at their new positions")
        cells = self.cells_of(seq)
        if (cells.owners[:, cells.of(seq, p0, p1)].sum(axis=0) > 1).any():  # a cell has one position for all its owners
            raise ValueError(f"sequence {seq} shares cells with another, which would be moved with it: "
                             "remove or copy one of them first")

    def seq_pos_min(self, seq):
        """The first position of a sequence, or None if it has none."""
        return int(pos.min()) if len(pos := self.positions_of(seq)) else None

    def seq_pos_max(self, seq):
        """The last position of a sequence, or None if it has none."""
        return int(pos.max()) if len(pos := self.positions_of(seq)) else None

    def positions_of(self, seq):
        """The positions of a sequence, int64 (n,), in the order of its cells."""
        cells = self.cells_of(seq)
        return cells.pos[cells.of(seq)]

    def __str__(self):
        """A picture of the cells of each stream, see `Cells`."""
        many = len(self.streams) > 1
        return '\n'.join(f'stream {n}\n{cells}' if many else str(cells) for n, cells in enumerate(self.streams))


def check_next(seq, last, position):
    """ValueError unless a position follows the last one of a sequence. After None any may come."""
    if last is not None and position != last + 1:
        raise ValueError(f"sequence {seq} goes on at position {last + 1}, not {position}")


def diverged(seqs):
    return ValueError(f"sequences {list(seqs)} have diverged and cannot share a token: give each its own")


def context_shift(cache, seq, n_keep=0):
    """
    Make room in a full sequence: keep its first n_keep positions, remove the older half of the rest, and move the
    others down. Returns by how many positions they have moved.

    Example: with n_keep=2, of positions 0 ... 7 those at 0 1 5 6 7 remain, at 0 1 2 3 4. The positions that are removed
    or kept may be shared with other sequences. Those that move may not.
    """
    last = cache.seq_pos_max(seq)
    n_past = 0 if last is None else last + 1
    n_discard = (n_past - index(n_keep)) // 2
    if n_keep < 0 or n_discard < 1:
        raise ValueError(f"sequence {seq} has {n_past} positions, of which {n_keep} cannot be kept and others removed: "
                         f"n_keep must be 0 to {max(0, n_past - 2)}")
    cache.check_movable(seq, n_keep + n_discard)
    cache.seq_rm(seq, n_keep, n_keep + n_discard)
    cache.seq_add(seq, n_keep + n_discard, -1, -n_discard)
    return n_discard
