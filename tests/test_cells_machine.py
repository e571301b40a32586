"""Cells and streams under random operations, compared with plain dictionaries."""
import os
import tempfile

import pytest
import torch
from conftest import sizes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_cells import cache, check_counts, rotated

from kvcache.llamacpp.cells import EMPTY, context_shift

KV_SIZE, N_SEQ = 12, 4


class CellsMachine(RuleBasedStateMachine):
    """
    Random operations beside {sequence: {position: cell}}. A cell's number stands for its token, which is written as the
    value; the key is computed from it and rotated by its position.
    """
    unified, type_k, window, n_sink = True, 'float32', None, 0

    def __init__(self):
        super().__init__()
        self.cache = cache(KV_SIZE, N_SEQ, unified=self.unified, type_k=self.type_k, can_shift=True,
                           n_swa=self.window or 0, swa_type='standard' if self.window else 'none', n_sink=self.n_sink)
        self.model, self.held = {seq: {} for seq in range(N_SEQ)}, []
        self.folder = tempfile.TemporaryDirectory()

    seqs = st.integers(0, N_SEQ - 1)
    ends = st.integers(-1, KV_SIZE)

    def used(self, but=None):
        """Cells of each stream that are in use, or would be without one sequence."""
        if not self.unified:
            return {seq: 0 if seq == but else len(mine) for seq, mine in self.model.items()}
        return dict.fromkeys(self.model, len({cell for seq, mine in self.model.items() if seq != but
                                              for cell in mine.values()}))

    def cells_with(self, tokens):
        """New cells that hold these tokens."""
        self.held += tokens
        return range(len(self.held) - len(tokens), len(self.held))

    def key(self, tokens):
        """Keys (n, 1, 32) of tokens before they are rotated, none larger than 1."""
        return torch.sin(torch.as_tensor(tokens, dtype=torch.float64)[:, None, None] * torch.arange(1, 33)).float()

    @rule(seq=seqs, n=st.integers(1, 5))
    def append(self, seq, n):
        start = max(self.model[seq], default=-1) + 1
        batch = self.cache.batch({seq: range(start, start + n)})
        slots = self.cache.find_slot(batch)
        fits = self.used()[seq] + n <= KV_SIZE
        assert bool(slots) == fits or self.window and slots
        if not slots:
            return
        self.cache.apply(slots, batch)
        self.cache.update()
        new = self.cells_with(range(len(self.held), len(self.held) + n))
        rows = self.cache.k_idxs(slots)
        for layer in range(2):
            self.cache.cpy_k(layer, rotated(self.key(new), torch.arange(start, start + n)), rows)
            self.cache.cpy_v(layer, torch.tensor(new).float()[:, None, None].expand(n, 1, 32) + 1000 * layer, rows)
        self.model[seq] |= dict(zip(range(start, start + n), new))

    @rule(seq=st.one_of(st.none(), seqs), p0=ends, p1=ends)
    def rm(self, seq, p0, p1):
        if self.window:  # hidden positions may be gone, so only a whole sequence can be removed
            p0 = p1 = -1
        self.cache.seq_rm(seq, p0, p1)
        for mine in [self.model[seq]] if seq is not None else self.model.values():
            for p in [p for p in mine if p >= p0 and (p1 < 0 or p < p1)]:
                del mine[p]

    @rule(source=seqs, to=seqs, p0=ends, p1=ends)
    def cp(self, source, to, p0, p1):
        if source == to:
            return
        if self.window:  # a whole sequence to an empty one: which hidden positions are left is not known here
            p0 = p1 = -1
            self.rm(to, -1, -1)
        part = {p: cell for p, cell in self.model[source].items() if p >= p0 and (p1 < 0 or p < p1)}
        if not self.unified:
            if part != self.model[source]:
                with pytest.raises(ValueError, match='whole'):
                    self.cache.seq_cp(source, to, p0, p1)
                return
            self.model[to] = {}
        if any(self.model[to].get(p, cell) != cell for p, cell in part.items()):
            with pytest.raises(ValueError, match='already'):
                self.cache.seq_cp(source, to, p0, p1)
            return
        self.cache.seq_cp(source, to, p0, p1)
        self.model[to] |= part

    @rule(seq=seqs)
    def keep(self, seq):
        self.cache.seq_keep(seq)
        self.model = {s: mine if s == seq else {} for s, mine in self.model.items()}

    def shared(self, seq):
        return any(cell in other.values() for s, other in self.model.items() if s != seq
                   for cell in self.model[seq].values())

    @precondition(lambda self: not self.n_sink)  # which positions would be sinks then is not known here
    @rule(seq=seqs, shift=st.integers(-6, 6))
    def add(self, seq, shift):
        if self.unified and shift and self.shared(seq):
            if not self.window:  # which hidden positions are still shared is not known here
                with pytest.raises(ValueError, match='shares'):
                    self.cache.seq_add(seq, -1, -1, shift)
            return
        self.cache.seq_add(seq, -1, -1, shift)
        self.model[seq] = {p + shift: cell for p, cell in self.model[seq].items() if p + shift >= 0}

    @rule(seq=seqs, divisor=st.integers(1, 3))
    def div(self, seq, divisor):
        divided = {p // divisor: cell for p, cell in self.model[seq].items()}
        if len(divided) == len(self.model[seq]) and not self.window and not (self.unified and self.shared(seq)):
            self.cache.seq_div(seq, -1, -1, divisor)
            self.model[seq] = divided

    @rule(seq=seqs, n_keep=st.integers(0, 2))
    def make_room(self, seq, n_keep):
        mine, n = self.model[seq], len(self.model[seq])
        shared = self.unified and self.shared(seq)
        if sorted(mine) == list(range(n)) and n - n_keep > 1 and not self.window and not shared:
            n_discard = context_shift(self.cache, seq, n_keep)
            self.model[seq] = {p if p < n_keep else p - n_discard: cell for p, cell in mine.items()
                               if p < n_keep or p >= n_keep + n_discard}
            assert sorted(self.model[seq]) == list(range(n - (n - n_keep) // 2))

    @rule(seq=seqs, to=seqs)
    def state_of_one(self, seq, to):
        path = os.path.join(self.folder.name, 'one')
        self.cache.state_save(path, seq)
        if self.window:
            last = max(self.model[seq], default=-1)  # saved are the positions that the last token sees
            saved = {p: cell for p, cell in self.model[seq].items() if last - p < self.window or p < self.n_sink}
            try:
                self.cache.state_load(path, to)
            except ValueError as e:
                assert 'room' in str(e) and len(saved) + self.used(but=to)[to] > KV_SIZE
                return
            self.model[to] = dict(zip(saved, self.cells_with([self.held[cell] for cell in saved.values()])))
        elif self.used(but=to)[to] + len(self.model[seq]) <= KV_SIZE:
            self.cache.state_load(path, to)
            tokens = [self.held[cell] for cell in self.model[seq].values()]
            self.model[to] = dict(zip(self.model[seq], self.cells_with(tokens)))
        else:
            with pytest.raises(ValueError, match='room'):
                self.cache.state_load(path, to)

    @rule()
    def state_of_all(self):
        path = os.path.join(self.folder.name, 'all')
        self.cache.state_save(path)
        self.cache.clear()
        self.cache.state_load(path)

    @invariant()
    def each_sequence_has_what_it_should(self):
        for seq, mine in self.model.items():
            cells, stream = self.cache.cells_of(seq), self.cache.stream_of(seq)
            where = cells.of(seq)
            values = self.cache.get_v(1, KV_SIZE, slice(stream, stream + 1))[0, torch.from_numpy(where), 0, 0] - 1000
            held = dict(zip(cells.pos[where].tolist(), values.int().tolist()))
            mine = {p: self.held[cell] for p, cell in mine.items()}
            if self.window:  # all that the next token sees, and perhaps some before it, without a hole
                end = max(mine, default=-1) + 1
                seen = [p for p in mine if end - p < self.window or p < self.n_sink]
                assert held.keys() >= set(seen) and all(mine[p] == token for p, token in held.items())
                recent, others = ([p for p in sorted(some) if p >= self.n_sink] for some in (held, mine))
                assert recent == others[len(others) - len(recent):]
            else:
                assert held == mine
                ends = self.cache.seq_pos_min(seq), self.cache.seq_pos_max(seq)
                assert ends == (min(mine, default=None), max(mine, default=None))
            if held:
                keys = self.cache.get_k(1, KV_SIZE, slice(stream, stream + 1))[0, torch.from_numpy(where)]
                exact = rotated(self.key(list(held.values())), torch.tensor(list(held)))
                assert (keys - exact).abs().max() < (1e-4 if self.type_k == 'float32' else 0.02)
        for cells in self.cache.streams:
            check_counts(cells)

    def teardown(self):
        self.cache.seq_rm(None)
        assert all(cells.used() == 0 and (cells.pos == EMPTY).all() and not cells.shift.any()
                   for cells in self.cache.streams)
        self.folder.cleanup()


class StreamsMachine(CellsMachine):
    unified = False


class RoundedMachine(CellsMachine):
    type_k = 'int8'


class WindowMachine(CellsMachine):
    window = 4


class WindowStreamsMachine(CellsMachine):
    unified, window = False, 3


class SinksMachine(CellsMachine):
    window, n_sink = 3, 2


class SinksStreamsMachine(CellsMachine):
    unified, window, n_sink = False, 4, 1


TestCells, TestStreams, TestRounded = CellsMachine.TestCase, StreamsMachine.TestCase, RoundedMachine.TestCase
TestWindow, TestWindowStreams = WindowMachine.TestCase, WindowStreamsMachine.TestCase
TestSinks, TestSinksStreams = SinksMachine.TestCase, SinksStreamsMachine.TestCase
for test in (TestCells, TestStreams, TestRounded, TestWindow, TestWindowStreams, TestSinks, TestSinksStreams):
    test.settings = settings(max_examples=sizes(15, 60), stateful_step_count=50, deadline=None)
del test  # or it would be collected as one more
