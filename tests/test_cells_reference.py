"""Which cell each token is stored in, compared with llama.cpp's rules as loops over single cells."""
import numpy as np
import pytest
from conftest import sizes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_cells import check_counts, store

from kvcache.llamacpp.cells import EMPTY, Streams, Window

SIZE, N_SEQ = 10, 3


class OneCell:
    def __init__(self):
        self.pos, self.owners, self.shift = None, set(), 0


class OneStream:
    """Cells one by one, and the head: find_slot, apply_ubatch, seq_rm and seq_add as llama-kv-cache.cpp has them."""

    def __init__(self, window):
        self.cells, self.head, self.window = [OneCell() for _ in range(SIZE)], 0, window

    def last(self, seq):
        return max((cell.pos for cell in self.cells if seq in cell.owners), default=None)

    def passed(self, pos, now):
        n, kind, *n_sink = self.window or (None, None)
        if pos < sum(n_sink):
            return False
        return kind == 'standard' and now - pos >= n or kind == 'chunked' and pos // n < now // n

    def find(self, n):
        used = sum(cell.pos is not None for cell in self.cells)
        head, found = 0 if self.head > used + 2 * n else self.head, []
        for number in [*range(head, SIZE), *range(head)]:
            cell = self.cells[number]
            alone = len(cell.owners) == 1 and self.passed(cell.pos, self.last(*cell.owners) + 1)
            if len(found) < n and (cell.pos is None or alone):
                found.append(number)
        return found if len(found) == n else None

    def put(self, numbers, positions, owners):
        lost = {}
        for number, pos, seqs in zip(numbers, positions, owners):
            cell = self.cells[number]
            for seq in cell.owners:
                lost[seq] = max(lost.get(seq, -1), cell.pos)
            cell.pos, cell.owners, cell.shift = pos, set(seqs), 0
        for seq, pos in lost.items():
            self.remove(seq, sum(self.window[2:]), pos + 1)
        self.head = numbers[-1] + 1

    def empty(self, numbers):
        for number in numbers:
            self.cells[number].__init__()

    def remove(self, seq, p0, p1):
        freed = []
        for number, cell in enumerate(self.cells):
            if cell.pos is not None and p0 <= cell.pos < p1 and (seq is None or seq in cell.owners):
                cell.owners -= cell.owners if seq is None else {seq}
                freed += [] if cell.owners else [number]
        self.empty(freed)
        if freed and freed[0] < self.head:
            self.head = freed[0]

    def add(self, seq, shift):
        freed = []
        for number, cell in enumerate(self.cells):
            if seq in cell.owners:
                cell.pos, cell.shift = cell.pos + shift, cell.shift + shift
                freed += [number] if cell.pos < 0 else []
        self.empty(freed)
        self.head = freed[0] if freed else 0


class ReferenceMachine(RuleBasedStateMachine):
    unified, window = True, None
    seqs = st.integers(0, N_SEQ - 1)

    def __init__(self):
        super().__init__()
        window = Window(*self.window) if self.window else None
        self.streams = Streams(SIZE, N_SEQ, self.unified, window, can_shift=True)
        self.naive = [OneStream(self.window) for _ in self.streams.streams]

    def of(self, seq):
        return self.naive[0 if self.unified else seq]

    @rule(seq=seqs, other=st.none() | seqs, n=st.integers(1, 5))
    def append(self, seq, other, n):
        """n tokens for a sequence, and for another one if it is given."""
        starts = {s: -1 if (last := self.of(s).last(s)) is None else last for s in (seq, other) if s is not None}
        runs = [(seq, range(starts[seq] + 1, starts[seq] + 1 + n))]
        if other is not None and other != seq:
            runs.append((other, range(starts[other] + 1, starts[other] + 1 + n)))
        batch = self.streams.batch(dict(runs))
        slots = self.streams.find_slot(batch)
        if self.unified:
            flat = [(p, (s,)) for s, positions in runs for p in positions]
            targets = [(self.naive[0], [p for p, _ in flat], [owners for _, owners in flat])]
        else:
            targets = [(self.naive[s], list(positions), [(s,)] * n) for s, positions in runs]
        found = [stream.find(len(positions)) for stream, positions, _ in targets]
        assert bool(slots) == all(numbers is not None for numbers in found)
        if slots:
            assert slots.cells.tolist() == found
            self.streams.apply(slots, batch)
            for (stream, positions, owners), numbers in zip(targets, found):
                stream.put(numbers, positions, owners)

    @rule(seq=st.none() | seqs, p0=st.integers(-1, SIZE), p1=st.integers(-1, SIZE))
    def rm(self, seq, p0, p1):
        self.streams.seq_rm(seq, p0, p1)
        for stream in self.naive if seq is None else [self.of(seq)]:
            stream.remove(seq, max(p0, 0), p1 if p1 >= 0 else 10**9)

    @rule(source=seqs, to=seqs)
    def cp(self, source, to):
        if source == to:
            return
        a, b = self.of(source), self.of(to)
        if a is b:
            self.rm(to, -1, -1)
            for cell in a.cells:
                cell.owners |= {to} if source in cell.owners else set()
        else:
            for theirs, mine in zip(a.cells, b.cells):
                mine.pos, mine.shift = theirs.pos, theirs.shift
                mine.owners = {to} if theirs.owners else set()
            b.head = a.head
        self.streams.seq_cp(source, to)

    @rule(seq=seqs, shift=st.integers(-4, 4))
    def add(self, seq, shift):
        if any(seq in cell.owners and len(cell.owners) > 1 for cell in self.of(seq).cells):
            return
        self.streams.seq_add(seq, -1, -1, shift)
        if shift:
            self.of(seq).add(seq, shift)

    @rule(seq=seqs)
    def keep(self, seq):
        self.streams.seq_keep(seq)
        for other in range(N_SEQ):
            if other != seq:
                self.of(other).remove(other, 0, 10**9)

    @rule()
    def prepare(self):
        """Slots for two batches: the second search sees the first batch's cells as used, and nothing is changed."""
        start = -1 if (last := self.of(0).last(0)) is None else last
        batches = [{0: [start + 1, start + 2]}, {0: [start + 3]}]
        self.streams.prepare([self.streams.batch(tokens) for tokens in batches])

    @invariant()
    def each_cell_is_the_same(self):
        for cells, naive in zip(self.streams.streams, self.naive):
            assert cells.head == naive.head
            assert cells.pos.tolist() == [EMPTY if cell.pos is None else cell.pos for cell in naive.cells]
            assert cells.shift.tolist() == [cell.shift for cell in naive.cells]
            assert [set(cells.owners_of(number)) for number in range(SIZE)] == [cell.owners for cell in naive.cells]
            check_counts(cells)
            for seq in cells.seqs:
                mine = [cell.pos for cell in naive.cells if seq in cell.owners]
                assert (cells.pos_min(seq), cells.pos_max(seq)) == (min(mine, default=None), max(mine, default=None))


def machine(unified_, window_):
    class Machine(ReferenceMachine):
        unified, window = unified_, window_
    Machine.TestCase.settings = settings(max_examples=sizes(10, 40), stateful_step_count=40, deadline=None)
    return Machine.TestCase


TestUnified, TestStreams = machine(True, None), machine(False, None)
TestUnifiedWindow, TestStreamsWindow = machine(True, (3, 'standard')), machine(False, (4, 'standard'))
TestUnifiedChunks, TestStreamsChunks = machine(True, (3, 'chunked')), machine(False, (4, 'chunked'))
TestUnifiedSinks, TestStreamsSinks = machine(True, (2, 'standard', 1)), machine(False, (3, 'standard', 2))


def fill(streams, tokens):
    return store(streams, tokens)[1].cells


def test_a_copy_from_another_stream_goes_on_from_its_head():
    """As in llama.cpp: with a window, empty cells are taken before cells that the window has passed."""
    streams = Streams(256, 2, unified=False, window=Window(12, 'standard'))
    fill(streams, {0: range(100)})
    fill(streams, {1: range(20)})
    streams.seq_cp(0, 1)
    assert fill(streams, {1: range(100, 110)}).tolist() == [list(range(100, 110))]
    assert (streams.seq_pos_min(1), streams.seq_pos_max(1)) == (0, 109)


def test_a_shift_moves_the_head_to_what_it_freed_or_to_the_beginning():
    streams = Streams(16, 2, can_shift=True)
    fill(streams, {0: range(4)})
    fill(streams, {1: range(4)})
    streams.seq_rm(0)
    fill(streams, {0: [5]})  # in cell 0; the head is 1
    streams.seq_add(1, -1, -1, -2)
    assert streams.streams[0].head == 4 and fill(streams, {1: [2, 3]}).tolist() == [[4, 5]]
    streams.seq_add(1, -1, -1, 1)
    assert streams.streams[0].head == 0


@pytest.mark.parametrize('unified', [True, False])
def test_numbers_that_are_no_integers_are_refused(unified):
    streams = Streams(8, 3, unified, can_shift=True)
    fill(streams, {0: range(4)})
    before = str(streams)
    for refused in (lambda: streams.seq_rm(True), lambda: streams.seq_rm(0, 1.0), lambda: streams.seq_rm(0, 0, 2.5),
                    lambda: streams.seq_rm(None, 0.0), lambda: streams.seq_rm(0, None),
                    lambda: streams.seq_rm(np.True_), lambda: streams.seq_cp(0, True),
                    lambda: streams.seq_cp(0, 1, 0.0), lambda: streams.seq_cp(False, 1),
                    lambda: streams.seq_keep(True), lambda: streams.seq_add(0, 1.0, -1, 1), lambda: streams.seq_rm('0'),
                    lambda: streams.seq_add(0, -1, 2.0, 1), lambda: streams.seq_add(0, -1, -1, True),
                    lambda: streams.seq_add(0, -1, -1, 2**70), lambda: streams.seq_div(0, -1, -1, 2.0),
                    lambda: streams.seq_div(0, 0.5, -1, 2), lambda: streams.seq_pos_max(True),
                    lambda: streams.batch({True: [4]}), lambda: streams.batch({0: [True]}),
                    lambda: streams.batch({0: 4})):
        with pytest.raises(ValueError):
            refused()
    assert str(streams) == before
    streams.seq_rm(np.int32(0), np.int64(3), 2**70)
    assert streams.seq_pos_max(0) == 2
    for dtype in (np.int8, np.uint8, np.int32):
        assert streams.batch({0: np.array([127], dtype)}).positions.tolist() == [[127]]


def test_sequences_that_diverge_inside_a_batch_share_no_more_tokens():
    """As with two batches: a sequence would own a position that was computed from another's tokens."""
    streams = Streams(16, 3)
    for tokens in ({0: [0, 1], (0, 1): [2]}, {(0, 1): [0], 0: [1], 1: [1], (1, 0): [2]}, {(0, 1): [0, 1], (1, 2): [2]}):
        with pytest.raises(ValueError, match='diverged'):
            streams.batch(tokens)
    fill(streams, {(0, 1): [0], (1, 0): [1], 2: [0, 1]})
    assert [streams.seq_pos_max(seq) for seq in range(3)] == [1, 1, 1]
    fill(streams, {(0, 1): [2], 0: [3], 1: [3, 4]})
