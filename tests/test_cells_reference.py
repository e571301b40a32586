"""Cells, keys and values under random operations, compared with llama.cpp's rules as loops over single cells."""
import copy
import os
import tempfile

import numpy as np
import pytest
import torch
from conftest import sizes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_cells import TOLERANCE, cache, read, rotated, write

from kvcache.llamacpp.cells import EMPTY, NoSlot, context_shift

SIZE, N_SEQ = 10, 3


class OneCell:
    def __init__(self):
        self.pos, self.owners, self.shift, self.token = None, set(), 0, None


class OneStream:
    """Cells one by one, and the head: find_slot, apply_ubatch, seq_rm and seq_add as llama-kv-cache.cpp has them."""

    def __init__(self, window):
        self.cells, self.head, self.window = [OneCell() for _ in range(SIZE)], 0, window

    def last(self, seq):
        return max((cell.pos for cell in self.cells if seq in cell.owners), default=None)

    def passed(self, pos, now):
        return bool(self.window) and now - pos >= self.window

    def usable(self, cell):
        alone = len(cell.owners) == 1 and self.passed(cell.pos, self.last(*cell.owners) + 1)
        return cell.pos is None or alone

    def first_tried(self, n):
        used = sum(cell.pos is not None for cell in self.cells)
        return 0 if self.head > used + 2 * n else self.head

    def find(self, n):
        head = self.first_tried(n)
        found = [number for number in [*range(head, SIZE), *range(head)] if self.usable(self.cells[number])][:n]
        return found if len(found) == n else None

    def put(self, numbers, content):
        """content: (position, owners, shift, token) for each cell."""
        lost = {}
        for number, (pos, owners, shift, token) in zip(numbers, content):
            cell = self.cells[number]
            for seq in cell.owners:
                lost[seq] = max(lost.get(seq, -1), cell.pos)
            cell.pos, cell.owners, cell.shift, cell.token = pos, set(owners), shift, token
        for seq, pos in lost.items():
            self.remove(seq, -1, pos + 1)
        if numbers:
            self.head = numbers[-1] + 1

    def mine(self, seq, p0=-1, p1=-1):
        """The cells of a sequence (None: of all) with a position in [p0, p1)."""
        return [cell for cell in self.cells if cell.pos is not None and (seq is None or seq in cell.owners)
                and p0 <= cell.pos and (p1 < 0 or cell.pos < p1)]

    def empty(self, cells):
        """Returns the number of the first of these cells, or None."""
        freed = [number for number, cell in enumerate(self.cells) if cell in cells]
        for cell in cells:
            cell.__init__()
        return min(freed, default=None)

    def remove(self, seq, p0=-1, p1=-1):
        mine = self.mine(seq, p0, p1)
        for cell in mine:
            cell.owners -= cell.owners if seq is None else {seq}
        freed = self.empty([cell for cell in mine if not cell.owners])
        self.head = self.head if freed is None else min(self.head, freed)

    def shares(self, seq, p0=-1, p1=-1):
        return any(len(cell.owners) > 1 for cell in self.mine(seq, p0, p1))

    def move(self, cells, moved):
        """Returns the first cell that became free, or None. The keys are turned by new - old, unlike in llama.cpp."""
        for cell in cells:
            cell.pos, cell.shift = moved(cell.pos), cell.shift + moved(cell.pos) - cell.pos
        return self.empty([cell for cell in cells if cell.pos < 0])

    def add(self, seq, p0, p1, shift):
        freed = self.move(self.mine(seq, p0, p1), lambda pos: pos + shift)
        self.head = freed or 0


class CellsMachine(RuleBasedStateMachine):
    """The value in a cell is the number of its token; the key is computed from it, and turned by its position."""
    unified, type_k, type_v, rope_base, window = True, 'float32', 'float32', 10000.0, 0
    seqs, ends = st.integers(0, N_SEQ - 1), st.sampled_from([-1, -1, -1, -1, *range(SIZE + 1)])

    def __init__(self):
        super().__init__()
        self.cache = cache(SIZE, N_SEQ, unified=self.unified, type_k=self.type_k, type_v=self.type_v, can_shift=True,
                           rope_base=self.rope_base, n_swa=self.window)
        self.naive, self.n_tokens = [OneStream(self.window) for _ in self.cache.streams], 0
        self.folder = tempfile.TemporaryDirectory()

    def of(self, seq):
        return self.naive[0 if self.unified else seq]

    def refused(self, words, operation):
        with pytest.raises(ValueError, match=words):
            operation()

    def found(self, batch):
        """The cells for a batch, or None."""
        try:
            return self.cache.find_slot(batch).tolist()
        except NoSlot:
            return None

    def key(self, tokens):
        """Keys (n, 1, 32) of tokens before they are turned, none larger than 1."""
        return torch.sin(torch.as_tensor(tokens, dtype=torch.float64)[:, None, None] * torch.arange(1, 33)).float()

    @rule(seq=seqs, other=st.none() | seqs, counts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
    def append(self, seq, other, counts):
        """Batches of so many tokens for a sequence, and for another one if it is given."""
        for n in counts:
            self.append_batch(seq, other, n)

    def append_batch(self, seq, other, n):
        runs = {}
        for s in {seq, seq if other is None else other}:
            start = -1 if (last := self.of(s).last(s)) is None else last
            runs[s] = range(start + 1, start + 1 + n)
        batch = self.cache.batch(runs)
        cells = self.found(batch)
        tokens = [(s, p, self.n_tokens + i) for i, (s, p) in enumerate((s, p) for s in runs for p in runs[s])]
        targets = [(self.naive[0], tokens)] if self.unified else [
            (self.naive[s], [token for token in tokens if token[0] == s]) for s in runs]
        found = [stream.find(len(new)) for stream, new in targets]
        assert cells == (None if None in found else found)
        if cells is None:
            return self.refused('full', lambda: self.cache.place(batch))
        self.cache.apply(np.array(cells), batch)
        for (stream, new), numbers in zip(targets, found):
            stream.put(numbers, [(p, {s}, 0, token) for s, p, token in new])
        self.n_tokens += len(tokens)
        _, pos, numbers = map(torch.tensor, zip(*tokens))
        for layer in range(2):
            write(self.cache, layer, batch, np.array(cells), rotated(self.key(numbers), pos, self.rope_base),
                  numbers.float()[:, None, None].expand(-1, 1, 32) + 1000 * layer)

    @rule(seq=st.none() | seqs, p0=ends, p1=ends)
    def rm(self, seq, p0, p1):
        self.cache.seq_rm(seq, p0, p1)
        for stream in self.naive if seq is None else [self.of(seq)]:
            stream.remove(seq, p0, p1)

    @rule(source=seqs, to=seqs, p0=ends, p1=ends)
    def cp(self, source, to, p0, p1):
        a, b = self.of(source), self.of(to)
        part, theirs = a.mine(source, p0, p1), b.mine(to)
        if a is b:
            if {cell.pos for cell in part if to not in cell.owners} & {cell.pos for cell in theirs}:
                return self.refused('already', lambda: self.cache.seq_cp(source, to, p0, p1))
            for cell in part:
                cell.owners |= {to}
        else:
            if part != a.mine(source):
                return self.refused('whole', lambda: self.cache.seq_cp(source, to, p0, p1))
            b.cells, b.head = copy.deepcopy(a.cells), a.head
            for cell in b.mine(source):
                cell.owners = {to}
        self.cache.seq_cp(source, to, p0, p1)

    @rule(seq=seqs)
    def keep(self, seq):
        self.cache.seq_keep(seq)
        for other in {*range(N_SEQ)} - {seq}:
            self.of(other).remove(other)

    @rule(seq=seqs, p0=ends, p1=ends, shift=st.integers(-4, 4))
    def add(self, seq, p0, p1, shift):
        if shift and self.of(seq).shares(seq, p0, p1):
            return self.refused('shares', lambda: self.cache.seq_add(seq, p0, p1, shift))
        self.cache.seq_add(seq, p0, p1, shift)
        if shift and p1 != max(p0, 0):
            self.of(seq).add(seq, p0, p1, shift)

    @rule(seq=seqs, p0=ends, p1=ends, divisor=st.integers(1, 3))
    def div(self, seq, p0, p1, divisor):
        mine = self.of(seq).mine(seq, p0, p1)
        if any(cell.pos // divisor != cell.pos for cell in mine) and self.of(seq).shares(seq, p0, p1):
            return self.refused('shares', lambda: self.cache.seq_div(seq, p0, p1, divisor))
        self.cache.seq_div(seq, p0, p1, divisor)
        self.of(seq).move(mine, lambda pos: pos // divisor)

    @rule(seq=seqs, n_keep=st.integers(0, 2))
    def make_room(self, seq, n_keep):
        stream, last = self.of(seq), self.of(seq).last(seq)
        n = ((0 if last is None else last + 1) - n_keep) // 2
        if n < 1 or stream.shares(seq, n_keep + n):
            return self.refused('shares' if n > 0 else 'n_keep', lambda: context_shift(self.cache, seq, n_keep))
        assert context_shift(self.cache, seq, n_keep) == n
        stream.remove(seq, n_keep, n_keep + n)
        stream.add(seq, n_keep + n, -1, -n)

    @rule(seq=seqs, to=seqs, shift=st.sampled_from([0, 0, 3]))
    def state_of_one(self, seq, to, shift):
        """Saved are the positions that the last token sees, also while a shift is pending."""
        self.add(seq, -1, -1, shift)
        path = os.path.join(self.folder.name, 'one')
        self.cache.state_save(path, seq)
        self.turned()
        last = self.of(seq).last(seq)
        saved = [(cell.pos, {to}, cell.shift, cell.token) for cell in self.of(seq).mine(seq)
                 if not self.of(seq).passed(cell.pos, last)]
        loaded = copy.deepcopy(self.of(to))
        loaded.remove(to)
        found = loaded.find(len(saved))
        if found is None:
            return self.refused('full', lambda: self.cache.state_load(path, to))
        loaded.put(found, saved)
        self.naive[0 if self.unified else to] = loaded
        self.cache.state_load(path, to)

    @rule()
    def state_of_all(self):
        path = os.path.join(self.folder.name, 'all')
        self.cache.state_save(path)
        self.turned()
        self.cache.clear()
        self.cache.state_load(path)
        for stream in self.naive:
            saved = [(cell.pos, cell.owners, cell.shift, cell.token) for cell in stream.mine(None)]
            stream.empty(stream.mine(None))
            stream.head = 0
            stream.put(list(range(len(saved))), saved)

    @rule(seq=seqs, head=st.integers(0, SIZE))
    def begin_the_search_at(self, seq, head):
        """A head far behind the used cells, to which other operations rarely bring it."""
        self.of(seq).head = self.cache.cells_of(seq).head = head

    def turned(self):
        """The cache has turned its keys: those in float32 once and for all."""
        for cell in (cell for stream in self.naive for cell in stream.cells):
            cell.shift = 0 if self.type_k == 'float32' else cell.shift

    @invariant()
    def each_cell_is_the_same(self):
        for cells, naive in zip(self.cache.streams, self.naive):
            assert cells.head == naive.head
            assert cells.pos.tolist() == [EMPTY if cell.pos is None else cell.pos for cell in naive.cells]
            assert cells.shift.tolist() == [cell.shift for cell in naive.cells]
            assert [{cells.seqs[row] for row in np.flatnonzero(of_cell)} for of_cell in cells.owners.T] == [
                cell.owners for cell in naive.cells]
            used = [number for number, cell in enumerate(naive.cells) if cell.pos is not None]
            assert (cells.used(), cells.end) == (len(used), max(used, default=-1) + 1)
            for seq in cells.seqs:
                mine = [cell.pos for cell in naive.cells if seq in cell.owners]
                assert (self.cache.seq_pos_min(seq), self.cache.seq_pos_max(seq)) == (
                    min(mine, default=None), max(mine, default=None))
        keys, values = read(self.cache, 1)
        self.turned()
        for naive, k, v in zip(self.naive, keys, values):
            used = [number for number, cell in enumerate(naive.cells) if cell.pos is not None]
            tokens, pos = ([getattr(naive.cells[number], name) for number in used] for name in ('token', 'pos'))
            assert (v[used, 0, 0] - 1000).round().tolist() == tokens
            exact = rotated(self.key(tokens), torch.tensor(pos), self.rope_base)
            assert torch.allclose(k[used].float(), exact, atol=10 * TOLERANCE[self.type_k], rtol=0)

    def teardown(self):
        self.cache.seq_rm(None)
        assert all(cells.used() == 0 and (cells.pos == EMPTY).all() and not cells.shift.any()
                   for cells in self.cache.streams)
        self.folder.cleanup()


def machine(unified, window=0, **how):
    kind = type('Machine', (CellsMachine,), dict(unified=unified, window=window, **how)).TestCase
    kind.settings = settings(max_examples=sizes(8, 60), stateful_step_count=40, deadline=None)
    return kind


TestUnified, TestStreams = machine(True), machine(False, rope_base=100.0)
TestUnifiedWindow, TestStreamsWindow = machine(True, 2), machine(False, 4)
TestRounded = machine(True, type_k='int8', type_v='int8')
TestRoundedWindow = machine(False, 3, type_k='bfloat16', rope_base=100.0)
