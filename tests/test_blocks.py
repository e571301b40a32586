"""Blocks: sharing, copy on write, eviction, by hand and against plain dictionaries."""
import sys

import pytest
from conftest import sizes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache.blocks import BlockManager, OutOfBlocks


def test_slots_of_a_table():
    b = BlockManager(8, 4)
    b.tables['a'], b.length['a'] = [7, 2], 6
    assert b.slots('a', 5, 6) == [9] and b.slots('a', 2, 5) == [30, 31, 8]


def test_prompts_that_begin_alike_share_full_blocks():
    b = BlockManager(8, 4)
    assert b.add('a', range(10)) == 0
    b.remember('a', range(10))
    assert b.tables['a'] == [0, 1, 2]
    assert b.add('b', [*range(8), 77, 78]) == 8 and b.tables['b'] == [0, 1, 3]
    assert b.add('c', range(8)) == 4  # not the second block, since the last token must be computed
    assert b.add('d', [9, *range(1, 8)]) == 0
    assert b.references[:4] == [3, 2, 1, 1]
    for seq in 'abcd':
        b.remove(seq)
    assert b.references == [0] * 8 and len(b.free) == 8
    assert b.add('e', range(10)) == 8  # no sequence used the blocks, and they were still remembered


def test_the_same_hash_is_not_the_same_prefix():
    b = BlockManager(8, 2, hash=lambda parts: 0)
    for seq, tokens in (('a', [1, 2, 3, 4, 9]), ('b', [1, 2, 5, 6, 9]), ('c', [7, 8, 3, 4, 9])):
        n = b.add(seq, tokens)
        assert n == {'a': 0, 'b': 2, 'c': 0}[seq]  # c also has a block (3, 4), behind another first block
        b.remember(seq, tokens)


def test_the_end_of_a_prompt_is_evicted_first():
    b = BlockManager(4, 2)
    b.add('a', range(8))
    b.remember('a', range(8))
    b.remove('a')
    assert list(b.free) == [3, 2, 1, 0]
    b.add('b', [50, 51, 52, 53])
    assert b.tables['b'] == [3, 2]
    b.remove('b')
    assert list(b.free) == [3, 2, 1, 0]  # the blocks of b are not remembered, and are used first
    assert b.add('c', range(8)) == 4


def test_the_least_recently_used_prompt_is_evicted_first():
    b = BlockManager(4, 2)
    for seq in (1, 2):
        b.add(seq, [seq] * 4)
        b.remember(seq, [seq] * 4)
        b.remove(seq)
    b.add('again', [1] * 5)  # shares a block of sequence 1
    assert b.tables['again'][0] == 0


def test_a_write_to_a_shared_block_copies_it():
    b = BlockManager(4, 4)
    b.add('a', range(6))
    b.fork('a', 'b')
    assert b.extend('a') == [(1, 2)] and b.tables == {'a': [0, 2], 'b': [0, 1]}
    assert b.extend('b') == []  # the block is no longer shared
    b.truncate('a', 4)
    assert b.tables['a'] == [0] and b.references == [2, 1, 0, 0]
    assert b.extend('a') == [] and len(b.tables['a']) == 2


def test_a_full_block_that_is_cut_and_written_over_is_not_found_any_more():
    b = BlockManager(6, 2)
    b.add('a', range(4))
    b.remember('a', range(4))
    b.truncate('a', 3)
    b.extend('a')
    assert b.add('b', range(5)) == 2


def test_out_of_blocks_leaves_all_as_it_was():
    b = BlockManager(4, 2)
    b.add('a', range(5))
    b.remember('a', range(5))
    b.fork('a', 'b')
    before = {s: list(t) for s, t in b.tables.items()}, dict(b.length), list(b.references), list(b.free)
    for refused in (lambda: b.add('c', range(100, 104)), lambda: b.extend('a', 4), lambda: b.add('c', range(9))):
        with pytest.raises(OutOfBlocks):
            refused()
        assert before == ({s: list(t) for s, t in b.tables.items()}, dict(b.length), list(b.references), list(b.free))
    for refused in (lambda: b.add('a', [1]), lambda: b.add('d', []), lambda: b.fork('a', 'b'),
                    lambda: b.truncate('a', 6),
                    lambda: b.extend('a', -1), lambda: BlockManager(0, 4)):
        with pytest.raises(ValueError):
            refused()


def test_blocks_behind_the_window_are_freed_once_and_not_before():
    b = BlockManager(12, 2, window=4, n_sink=3)  # sinks in two blocks
    b.add('a', range(9))
    b.remember('a', range(9))
    assert b.tables['a'] == [0, 1, 2, 3, 4] and b.passed('a') == [2]
    b.extend('a')  # the token at 9 sees 6, 7, 8 and itself
    assert b.tables['a'] == [0, 1, None, 3, 4] and list(b.free)[-1] == 2
    b.extend('a')  # the one at 10 sees 7
    assert b.tables['a'] == [0, 1, None, 3, 4, 5] and b.references[3] == 1
    b.fork('a', 'b')
    b.extend('a', 2)  # the token at 11 sees 8, so that block 3 is b's alone
    assert b.tables['a'][2:] == [None, None, 4, 6, 7] and b.references[3:5] == [1, 2] and 3 not in b.free
    with pytest.raises(ValueError, match='cannot be cut to 10'):
        b.truncate('a', 10)
    b.truncate('a', 11)
    b.truncate('b', 10)
    b.truncate('a', 4)  # sinks are always there
    assert b.tables['a'] == [0, 1]
    b.extend('a', 3)
    for seq in 'ab':
        b.remove(seq)
    assert b.references == [0] * 12 and sorted(b.free) == list(range(12))


def test_a_window_needs_its_own_blocks_of_a_prefix_and_those_of_the_sinks():
    b, tokens = BlockManager(12, 2, window=4, n_sink=1), list(range(40, 60))
    b.add('a', tokens)
    b.remember('a', tokens)
    b.remove('a')
    assert b.cached_blocks(tokens) == [0, None, None, None, None, None, None, 7, 8]  # the token at 18 sees 15, 16, 17
    assert b.cached_blocks(tokens[:5]) == [0, 1] and b.cached_blocks(tokens[:3]) == [0]
    b.forget(4)
    assert b.cached_blocks(tokens)[7:] == [7, 8] and len(b.cached_blocks(tokens[:13])) == 4
    b.forget(7)
    assert len(b.cached_blocks(tokens)) == 7
    assert b.add('b', tokens) == 14 and b.tables['b'][:7] == [0, None, None, None, None, 5, 6]
    b.forget(0)
    assert b.cached_blocks(tokens) == []


def test_blocks_that_are_renewed_are_written_by_one_sequence_and_remembered_for_none():
    b, tokens = BlockManager(9, 2), list(range(9))
    b.add('a', tokens)
    b.remember('a', tokens)
    b.fork('a', 'b')
    b.renew('b', 3, 6)
    assert b.tables == {'a': [0, 1, 2, 3, 4], 'b': [0, 5, 6]} and b.references[:5] == [2, 1, 1, 1, 1]
    shifted = [0, 1, 2, 7, 8, 9, 10, 11]
    b.extend('b', 2)
    b.fork('b', 'c')
    for seq in 'bc':
        b.remember(seq, shifted)
    assert b.cached_blocks([*shifted, 12]) == [0] and b.cached_blocks(tokens) == [0, 1, 2, 3]
    b.renew('a', 2, 4)  # in the blocks that it has
    assert b.tables['a'] == [0, 1] and b.cached_blocks(tokens) == [0]
    b.extend('a', 4)
    before = {seq: table[:] for seq, table in b.tables.items()}, list(b.free)
    with pytest.raises(OutOfBlocks):
        b.renew('c', 2, 8)
    assert before == (b.tables, list(b.free))


def remembered_last(b):
    remembered = [b.prefix_of[block] is not None for block in b.free]
    return remembered == sorted(remembered)


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize('operation', [
    lambda b: b.add('new', [*range(4), 70, 71, 72]), lambda b: b.extend('a', 5), lambda b: b.extend('b', 1),
    lambda b: b.fork('a', 'new'),
    lambda b: b.truncate('a', 1), lambda b: b.remove('a'), lambda b: b.remember('b', [*range(4), 50, 51]),
    lambda b: b.extend('c', 1), lambda b: b.renew('b', 1, 4),
])
@pytest.mark.parametrize('window', [0, 2])
def test_an_operation_cut_short_anywhere_can_be_recovered_from(window, operation):
    """Stopped at each line in turn: references, free blocks and remembered prefixes agree with the tables."""
    line, finished = 0, False
    while not finished:
        line += 1
        b = BlockManager(12, 2, window=window, n_sink=window // 2)
        for seq, tokens in (('a', range(5)), ('b', [*range(4), 50, 51]), ('c', range(80, 84)), ('e', [90, 91])):
            b.add(seq, tokens)
            if seq != 'b':
                b.remember(seq, tokens)
        b.fork('a', 'd')
        b.truncate('c', 3)
        b.remove('e')
        before = {seq: list(table) for seq, table in b.tables.items()}
        left = line

        def trace(frame, event, arg):
            nonlocal left
            if frame.f_code.co_filename.endswith('blocks.py') and event == 'line':
                left -= 1
                if left == 0:
                    raise Interrupted
            return trace
        sys.settrace(trace)
        try:
            operation(b)
            finished = True
        except Interrupted:
            pass
        finally:
            sys.settrace(None)
        b.recover()
        counted = [sum(table.count(block) for table in b.tables.values()) for block in range(12)]
        assert counted == b.references and sorted(b.free) == [block for block, n in enumerate(counted) if n == 0]
        assert b.tables.keys() == b.length.keys() and all(len(b.tables[seq]) == -(-b.length[seq] // 2)
                                                          for seq in b.tables)
        assert all(b.prefix_of[block] is prefix for prefix, block in b.block_with.items())
        assert len(b.block_with) == 12 - b.prefix_of.count(None) and remembered_last(b)
        assert b.tables['d'] == before['d'] and {'b', 'c'} <= b.tables.keys()
        b.add('later', [*range(4), 9])
        for seq in list(b.tables):
            b.remove(seq)
        assert len(b.free) == 12


class BlocksMachine(RuleBasedStateMachine):
    """
    Random operations beside {sequence: its tokens}. held: the token that was written to each slot. seen: {sequence: the
    length at which blocks that were not seen then were freed}.
    """
    window, n_sink = 0, 0

    def __init__(self):
        super().__init__()
        self.blocks, self.model, self.names, self.token = BlockManager(10, 3, hash, self.window, self.n_sink), {}, 0, 0
        self.held, self.seen = [None] * 30, {}

    def write(self, seq, start):
        for slot, token in zip(self.blocks.slots(seq, start, len(self.model[seq])), self.model[seq][start:]):
            self.held[slot] = token

    @rule(shared=st.integers(0, 9), own=st.integers(1, 6), remember=st.booleans())
    def add(self, shared, own, remember):
        tokens = [*range(shared), *range(1000 + self.token, 1000 + self.token + own)]
        self.names += 1
        try:
            n_cached = self.blocks.add(self.names, tokens)
        except OutOfBlocks:
            assert len(self.blocks.free) < -(-len(tokens) // 3)
            return
        self.token += own
        self.model[self.names], self.seen[self.names] = tokens, n_cached
        self.write(self.names, n_cached)
        if remember:
            self.blocks.remember(self.names, tokens)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), n=st.integers(1, 4))
    def append(self, data, n):
        seq, old = self.any(data), list(self.held)
        try:
            copies = self.blocks.extend(seq, n)
        except OutOfBlocks:
            return
        for source, target in copies:
            self.held[3 * target:3 * target + 3] = old[3 * source:3 * source + 3]
        self.seen[seq] = len(self.model[seq])
        self.model[seq] += range(1000 + self.token, 1000 + self.token + n)
        self.token += n
        self.write(seq, len(self.model[seq]) - n)
        self.blocks.remember(seq, self.model[seq])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data):
        seq = self.any(data)
        self.names += 1
        self.blocks.fork(seq, self.names)
        self.model[self.names], self.seen[self.names] = list(self.model[seq]), self.seen[seq]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), part=st.floats(0, 1))
    def cut(self, data, part):
        seq = self.any(data)
        n = int(part * len(self.model[seq]))
        try:
            self.blocks.truncate(seq, n)
        except ValueError:
            assert n > self.n_sink and n < self.seen[seq]  # not of what the last tokens saw
            return
        del self.model[seq][n:]
        self.seen[seq] = min(self.seen[seq], n)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data):
        seq = self.any(data)
        self.blocks.remove(seq)
        del self.model[seq]

    @rule()
    def reset(self):
        self.blocks.reset()
        assert not self.blocks.block_with

    def any(self, data):
        return data.draw(st.sampled_from(sorted(self.model)))

    @invariant()
    def each_sequence_has_what_it_should(self):
        counted = [0] * 10
        for seq, tokens in self.model.items():
            table = self.blocks.tables[seq]
            for p in range(len(tokens)):  # all that the tokens since then have seen, and no block more
                visible = not self.window or p < self.n_sink or p > self.seen[seq] - self.window
                assert table[p // 3] is not None or not visible
                assert table[p // 3] is None or self.held[self.blocks.slots(seq, p, p + 1)[0]] == tokens[p]
            for number, block in enumerate(table):
                if block is not None:
                    counted[block] += 1
                    assert not self.window or 3 * number < self.n_sink or (
                        3 * number + 2 > self.seen[seq] - self.window)
        assert counted == self.blocks.references
        assert sorted(self.blocks.free) == [i for i, n in enumerate(counted) if n == 0]
        assert remembered_last(self.blocks)
        for prefix, block in self.blocks.block_with.items():
            assert self.blocks.prefix_of[block] is prefix and tuple(self.held[3 * block:3 * block + 3]) == prefix.tokens

    def teardown(self):
        for seq in list(self.model):
            self.blocks.remove(seq)
        assert len(self.blocks.free) == 10 and not any(self.blocks.references) and not self.blocks.tables


class WindowMachine(BlocksMachine):
    window, n_sink = 4, 2


class LongWindowMachine(BlocksMachine):
    window, n_sink = 7, 0


TestBlocks, TestWindow, TestLongWindow = BlocksMachine.TestCase, WindowMachine.TestCase, LongWindowMachine.TestCase
for test in (TestBlocks, TestWindow, TestLongWindow):
    test.settings = settings(max_examples=sizes(25, 100), stateful_step_count=50, deadline=None)
del test  # or it would be collected as one more
