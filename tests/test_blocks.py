"""Blocks: sharing, copy on write, eviction, by hand and against plain dictionaries."""
import pytest
from conftest import sizes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache import blocks
from kvcache.blocks import BlockManager, OutOfBlocks
from kvcache.records import BlockRecord


class Pool(BlockManager):
    """A `BlockManager` with sequences by name, whose tokens are in their blocks at once."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.records = {}

    @property
    def tables(self):
        return {name: record.table for name, record in self.records.items()}

    def add(self, name, tokens, salt=''):
        """Returns how many of the tokens were found."""
        record = BlockRecord(name, salt)
        n_found = self.begin(record, list(tokens))
        try:
            self.write(record, list(tokens)[n_found:])
        except OutOfBlocks:
            self.truncate(record, 0)
            raise
        self.records[name] = record
        return n_found

    def write(self, record, tokens):
        """Append tokens. Returns the blocks that were copied, [(source, target)]."""
        copies = []
        self.extend(record, len(tokens), lambda *blocks: copies.append(blocks))
        record.tokens += tokens
        record.length += len(tokens)
        return copies

    def append(self, name, n=1):
        return self.write(self.records[name], [99] * n)

    def learn(self, name):
        self.remember(self.records[name])

    def branch(self, name, new):
        self.records[new] = BlockRecord(new, self.records[name].salt)
        self.fork(self.records[name], self.records[new])

    def cut(self, name, n):
        self.truncate(self.records[name], n)

    def rewrite(self, name, start, length):
        """Remove tokens from start on, so that `length` are left, as a shift does."""
        record = self.records[name]
        self.renew(record, start, length)
        del record.tokens[start:start + record.length - length]
        self.cut(name, length)

    def drop(self, name):
        self.truncate(self.records.pop(name), 0)


def test_prompts_that_begin_alike_share_full_blocks():
    b = Pool(8, 4)
    assert b.add('a', range(10)) == 0
    b.learn('a')
    assert b.tables['a'] == [0, 1, 2]
    assert b.add('b', [*range(8), 77, 78]) == 8 and b.tables['b'] == [0, 1, 3]
    assert b.add('c', range(8)) == 4  # not the second block, since the last token must be computed
    assert b.add('d', [9, *range(1, 8)]) == 0
    assert b.references[:4] == [3, 2, 1, 1]
    for seq in 'abcd':
        b.drop(seq)
    assert b.references == [0] * 8 and len(b.free) == 8
    assert b.add('e', range(10)) == 8  # no sequence used the blocks, and they were still remembered


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match='at least 1 block'):
        Pool(0, 4)


def test_the_same_hash_is_not_the_same_prefix(monkeypatch):
    monkeypatch.setattr(blocks, 'hash', lambda parts: 0, raising=False)
    b = Pool(8, 2)
    for seq, tokens in (('a', [1, 2, 3, 4, 9]), ('b', [1, 2, 5, 6, 9]), ('c', [7, 8, 3, 4, 9])):
        n = b.add(seq, tokens)
        assert n == {'a': 0, 'b': 2, 'c': 0}[seq]  # c also has a block (3, 4), behind another first block
        b.learn(seq)


def test_the_end_of_a_prompt_is_evicted_first():
    b = Pool(4, 2)
    b.add('a', range(8))
    b.learn('a')
    b.drop('a')
    assert list(b.free) == [3, 2, 1, 0]
    b.add('b', [50, 51, 52, 53])
    assert b.tables['b'] == [3, 2]
    b.drop('b')
    assert list(b.free) == [3, 2, 1, 0]  # the blocks of b are not remembered, and are used first
    assert b.add('c', range(8)) == 4


def test_the_least_recently_used_prompt_is_evicted_first():
    b = Pool(4, 2)
    for seq in (1, 2):
        b.add(seq, [seq] * 4)
        b.learn(seq)
        b.drop(seq)
    b.add('again', [1] * 5)  # shares a block of sequence 1
    assert b.tables['again'][0] == 0


def test_a_window_needs_its_own_blocks_of_a_prefix_and_those_of_the_sinks():
    b, tokens = Pool(12, 2, window=4, n_sink=1), list(range(40, 60))
    b.add('a', tokens)
    b.learn('a')
    b.drop('a')
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
    b, tokens = Pool(9, 2), list(range(9))
    b.add('a', tokens)
    b.learn('a')
    b.branch('a', 'b')
    b.rewrite('b', 3, 6)
    assert b.tables == {'a': [0, 1, 2, 3, 4], 'b': [0, 5, 6]} and b.references[:5] == [2, 1, 1, 1, 1]
    b.append('b', 2)
    shifted = [0, 1, 2, 6, 7, 8, 99, 99]
    assert b.records['b'].tokens == shifted
    b.branch('b', 'c')
    for seq in 'bc':
        b.learn(seq)
    assert b.cached_blocks([*shifted, 12]) == [0] and b.cached_blocks(tokens) == [0, 1, 2, 3]
    assert b.cached_blocks([*range(6), 99, 99, 12]) == [0, 1, 2]  # nor by what b has had before
    b.rewrite('a', 2, 4)  # in the blocks that it has
    assert b.tables['a'] == [0, 1] and b.cached_blocks(tokens) == [0]
    b.append('a', 4)
    before = {seq: table[:] for seq, table in b.tables.items()}, list(b.free)
    with pytest.raises(OutOfBlocks):
        b.rewrite('c', 2, 8)
    assert before == (b.tables, list(b.free))


def remembered_last(b):
    remembered = [b.prefix_of[block] is not None for block in b.free]
    return remembered == sorted(remembered)


def test_everything_is_made_anew_from_the_tables():
    """After an operation that has raised: references, free blocks and what is remembered agree with the records."""
    for window in (0, 2):
        b = Pool(12, 2, window=window, n_sink=window // 2)
        for name, tokens in (('a', range(5)), ('b', [*range(4), 50, 51]), ('c', range(80, 84)), ('e', [90, 91])):
            b.add(name, tokens)
            b.learn(name)
        b.branch('a', 'd')
        b.cut('c', 3)
        b.drop('e')
        expected = b.references[:], list(b.free), dict(b.block_with), {name: t[:] for name, t in b.tables.items()}
        b.recover(b.records.values())
        assert expected == (b.references, list(b.free), b.block_with, b.tables)
        b.references[3], b.block_with = 7, {}
        b.records['a'].table.append(11)
        b.free.popitem()
        b.recover(b.records.values())
        assert (expected[0], expected[2], expected[3]) == (b.references, b.block_with, b.tables)
        assert {*b.free} == {*expected[1]} and remembered_last(b)


class BlocksMachine(RuleBasedStateMachine):
    """
    Random operations beside {sequence: its tokens}. held: the token that was written to each slot. seen: {sequence: the
    length at which blocks that were not seen then were freed}.
    """
    window, n_sink = 0, 0

    def __init__(self):
        super().__init__()
        self.blocks, self.names, self.token = Pool(10, 3, self.window, self.n_sink), 0, 0
        self.texts, self.held, self.seen = {}, [None] * 30, {}

    def write(self, seq, start):
        record = self.blocks.records[seq]
        for slot, token in zip(self.blocks.slots(record, start, record.length), self.texts[seq][start:]):
            self.held[slot] = token

    def taken(self):
        """What an operation without enough blocks leaves as it is."""
        tables = {seq: table[:] for seq, table in self.blocks.tables.items()}
        return tables, self.blocks.references[:], sorted(self.blocks.free)

    @rule(shared=st.integers(0, 9), own=st.integers(1, 6), remember=st.booleans())
    def add(self, shared, own, remember):
        tokens = [*range(shared), *range(1000 + self.token, 1000 + self.token + own)]
        self.names += 1
        before = self.taken()
        try:
            n_found = self.blocks.add(self.names, tokens)
        except OutOfBlocks:
            assert len(self.blocks.free) < -(-len(tokens) // 3) and self.taken() == before
            return
        self.token += own
        self.texts[self.names], self.seen[self.names] = tokens, n_found
        self.write(self.names, n_found)
        if remember:
            self.blocks.learn(self.names)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), n=st.integers(1, 4))
    def append(self, data, n):
        seq, old, before = self.any(data), list(self.held), self.taken()
        new = [*range(1000 + self.token, 1000 + self.token + n)]
        try:
            copies = self.blocks.write(self.blocks.records[seq], new)
        except OutOfBlocks:
            assert self.taken() == before
            return
        for source, target in copies:
            self.held[3 * target:3 * target + 3] = old[3 * source:3 * source + 3]
        self.seen[seq] = len(self.texts[seq])
        self.texts[seq] += new
        self.token += n
        self.write(seq, self.seen[seq])
        self.blocks.learn(seq)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), n=st.integers(0, 7))
    def hold(self, data, n):
        """Blocks for later tokens, or none any more."""
        record = self.blocks.records[self.any(data)]
        self.blocks.trim(record, record.length)
        try:
            self.blocks.extend(record, n, lambda a, b: self.held.__setitem__(
                slice(3 * b, 3 * b + 3), self.held[3 * a:3 * a + 3]))
        except OutOfBlocks:
            return
        self.seen[record.handle] = max(self.seen[record.handle], record.length)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data):
        seq = self.any(data)
        self.names += 1
        self.blocks.branch(seq, self.names)
        self.texts[self.names], self.seen[self.names] = list(self.texts[seq]), self.seen[seq]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), part=st.floats(0, 1))
    def cut(self, data, part):
        seq = self.any(data)
        n = int(part * len(self.texts[seq]))
        if not self.blocks.complete(self.blocks.tables[seq], n):
            assert n > self.n_sink and n < self.seen[seq]  # not of what the last tokens saw
            return
        self.blocks.cut(seq, n)
        del self.texts[seq][n:]
        self.seen[seq] = min(self.seen[seq], n)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def remove(self, data):
        seq = self.any(data)
        self.blocks.drop(seq)
        del self.texts[seq]

    @rule()
    def reset(self):
        self.blocks.reset()
        assert not self.blocks.block_with

    @rule()
    def recover(self):
        self.blocks.recover(self.blocks.records.values())

    def any(self, data):
        return data.draw(st.sampled_from(sorted(self.texts)))

    @invariant()
    def each_sequence_has_what_it_should(self):
        counted = [0] * 10
        for seq, tokens in self.texts.items():
            record = self.blocks.records[seq]
            assert record.tokens == tokens and record.length == len(tokens)
            for p, token in enumerate(tokens):  # all that the tokens since then have seen, and no block more
                visible = not self.window or p < self.n_sink or p > self.seen[seq] - self.window
                assert record.table[p // 3] is not None or not visible
                assert record.table[p // 3] is None or self.held[self.blocks.slots(record, p, p + 1)[0]] == token
            for number, block in enumerate(record.table):
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
        for seq in list(self.texts):
            self.blocks.drop(seq)
        assert len(self.blocks.free) == 10 and not any(self.blocks.references)


class WindowMachine(BlocksMachine):
    window, n_sink = 4, 2


class LongWindowMachine(BlocksMachine):
    window, n_sink = 7, 0


TestBlocks, TestWindow, TestLongWindow = BlocksMachine.TestCase, WindowMachine.TestCase, LongWindowMachine.TestCase
for test in (TestBlocks, TestWindow, TestLongWindow):
    test.settings = settings(max_examples=sizes(25, 100), stateful_step_count=50, deadline=None)
del test  # or it would be collected as one more
