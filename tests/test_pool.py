"""Pools of pages and of cells: by hand, and under random operations, beside a storage whose slots hold texts."""
from collections import Counter

import pytest
from conftest import sizes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.sequence import Sequence
from kvcache import PagePool, pages_for
from kvcache.llamacpp.pool import CellPool
from model import GPTConfig

CONFIGS = {'no window': GPTConfig(block_size=20), 'window': GPTConfig(block_size=20, position='rope', window=4),
           'window with sinks': GPTConfig(block_size=20, position='rope', window=7, n_sink=2)}


def pages_of(size, spare):
    """Pages for the longest sequence, and some more."""
    return lambda c: PagePool(pages_for(c, size) + spare, size, c.window, c.n_sink)


POOLS = {'pages of 1': pages_of(1, 4), 'pages of 3': pages_of(3, 1), 'pages of 4': pages_of(4, 2),
         'pages of 20': pages_of(20, 3), 'unified': lambda c: CellPool(c, 4, 6),
         'streams': lambda c: CellPool(c, 3, 20, unified=False)}


def new(tokens, config=CONFIGS['no window'], salt='', **how):
    return Sequence(tokens, None, 40, config.max_positions, salt=salt, **how)


def context(s):
    """The tokens at the positions 0, 1, ... of a sequence."""
    return s.tokens if s.whole else s.tokens[:s.n_keep] + s.tokens[len(s.tokens) - s.length + s.n_keep:]


def slots_of(s):
    """{position: slot}."""
    rows = s.runs.table[:s.runs.n].tolist()
    positions = [position + i for position, _, n in rows for i in range(n)]
    assert positions == sorted(set(positions))
    return dict(zip(positions, [slot + i for _, slot, n in rows for i in range(n)]))


def seen(config, n):
    """The positions before n that the token at position n sees."""
    return [p for p in range(n) if not config.window or n - p < config.window or p < config.n_sink]


class PoolMachine(RuleBasedStateMachine):
    """held: what was computed in each slot, (salt, the tokens up to this one), on which its keys and values depend."""

    def __init__(self, kind, config):
        super().__init__()
        self.pool, self.config, self.sequences = POOLS[kind](config), config, []
        self.held = [None] * self.pool.n_slots
        self.at_once = config.window + 1 if config.window else 99

    def copied(self, copies):
        """What is held once these copies are made."""
        held = self.held[:]
        for source, target, n in copies:
            held[target:target + n] = held[source:source + n]
        return held

    def state(self):
        """All that an operation which finds no room leaves as it is."""
        pool, of_sequences = self.pool, [
            (s.n_computed, s.n_writable, s.table[:], s.cells, s.runs.table[:s.runs.n].tolist()) for s in self.sequences]
        if isinstance(pool, CellPool):
            return of_sequences, str(pool.streams), pool.copies[:]
        return of_sequences, pool.references[:], list(pool.free_pages), pool.prefix_of[:], pool.copies[:]

    def any(self, data):
        return data.draw(st.sampled_from(self.sequences))

    @precondition(lambda self: len(self.sequences) < self.pool.most_sequences)
    @rule(shared=st.integers(0, 17), own=st.lists(st.integers(50, 52), min_size=1, max_size=8),
          salt=st.sampled_from(['', '', 'a']), shifts=st.booleans())
    def begin(self, shared, own, salt, shifts):
        how = dict(n_keep=1, keep=10) if shifts and not self.config.window else {}
        s = new([*range(shared), *own], self.config, salt, **how)
        most = self.most_that_can_be_found(s.tokens, salt) if s.whole else 0
        assert self.pool.begin(s, s.tokens if s.whole else ()) == s.n_computed == most
        self.sequences.append(s)

    def remembered(self):
        """{page: (salt, the tokens up to its end)} of those that can be found."""
        found = {}
        for prefix, page in getattr(self.pool, 'page_with', {}).items():
            assert self.pool.prefix_of[page] is prefix
            parts = []
            while prefix:
                parts.insert(0, prefix.tokens)
                prefix = prefix.parent
            found[page] = sum(parts, ())
        return found

    def most_that_can_be_found(self, tokens, salt):
        """The most tokens, whole pages but not all, after which all that the next one sees is remembered."""
        size, texts = self.pool.page_size, {*self.remembered().values()}
        return max(n for n in range(0, len(tokens), size)
                   if all((salt, *tokens[:p - p % size + size]) in texts for p in seen(self.config, n)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), n=st.integers(1, 4))
    def steps(self, data, n):
        for _ in range(n):
            if self.sequences:
                self.step(data)

    def step(self, data):
        """As a scheduler does it: slots for new tokens of some sequences, and then all are computed."""
        batch = []
        for s in data.draw(st.lists(st.sampled_from(self.sequences), min_size=1, unique=True)):
            if s.n_computed == s.length:
                drawn = data.draw(st.lists(st.integers(50, 52), min_size=1, max_size=6))
                s.tokens += drawn[:max(1, min(6, s.max_positions - s.length))]
            if s.n_computed >= s.length:  # the context was full and was cut
                assert self.pool.cut(s, 0) == 0
            n = min(data.draw(st.integers(1, 8)), s.length - s.n_computed, self.at_once)
            ahead = min(data.draw(st.integers(0, 3)), self.at_once - n, s.max_positions - s.n_computed - n)
            while s in self.sequences and not self.extends(s, n + ahead):
                newest = self.sequences.pop()  # it gives its room up, as in a scheduler
                self.pool.free(newest)
                batch = [part for part in batch if part[0] is not newest]
            if s in self.sequences:
                batch.append((s, n))
        if data.draw(st.integers(0, 19)) == 19:
            self.fail()
        else:
            self.compute(batch)

    def extends(self, s, n):
        before, n_free, size = self.state(), self.pool.n_free, self.pool.page_size
        if self.pool.extend(s, n):
            assert {*seen(self.config, s.n_computed), *range(s.n_computed, s.n_computed + n)} <= {*slots_of(s)}
            return True
        assert self.state() == before and n_free < -(-n // size) + 1  # one more, where the last page is shared
        assert len(self.sequences) > 1, "one sequence alone has room"
        assert isinstance(self.pool, PagePool) or self.pool.unified, "each sequence has its own stream"
        return False

    def compute(self, batch):
        """The step of (sequence, number of new tokens): copies first, then all read what they see and write."""
        self.held, written = self.copied(self.pool.copies), []
        self.pool.copies.clear()
        for s, n in batch:
            slots, text = slots_of(s), context(s)
            others = {slot for other in self.sequences if other is not s for slot in slots_of(other).values()}
            for p in seen(self.config, s.n_computed):
                assert self.held[slots[p]] == (s.salt, *text[:p + 1])
            for p in range(s.n_computed, s.n_computed + n):
                assert slots[p] not in others
                written.append((slots[p], (s.salt, *text[:p + 1])))
        assert len({slot for slot, _ in written}) == len(written)
        for slot, text in written:
            self.held[slot] = text
        for s, n in batch:
            before = s.n_computed
            self.pool.computed(s, n)
            assert s.n_computed == before + n

    @precondition(lambda self: self.sequences and len(self.sequences) < self.pool.most_sequences)
    @rule(data=st.data())
    def fork(self, data):
        s = self.any(data)
        forked = new(s.tokens, self.config, s.salt, n_keep=s.n_keep, keep=s.keep)
        forked.n_prompt = s.n_prompt
        self.pool.fork(s, forked)
        assert forked.n_computed == s.n_computed and {*seen(self.config, s.n_computed)} <= {*slots_of(forked)}
        self.sequences.append(forked)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), part=st.floats(0, 1) | st.just(1.0), other=st.lists(st.integers(50, 52), max_size=6))
    def cut(self, data, part, other):
        """Back to an earlier position, if what its token sees is there; perhaps to go on otherwise. 1.0: a trim."""
        s = self.any(data)
        n, had = round(part * s.n_computed), {*slots_of(s)}
        kept = self.pool.cut(s, n)
        assert kept == s.n_computed == s.n_writable == (n if {*seen(self.config, n)} <= had else 0)
        assert max(slots_of(s), default=0) < max(1, -(-kept // self.pool.page_size)) * self.pool.page_size
        if other and s.whole and kept + 6 < s.max_positions:
            s.tokens[max(1, kept):] = other

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data):
        s = self.any(data)
        self.sequences.remove(s)
        self.pool.free(s)

    def fail(self):
        """The step has raised: all is lost, and all begin anew."""
        self.pool.reset()
        self.held = [None] * len(self.held)
        assert self.pool.n_free == self.pool.n_slots // self.pool.page_size and not self.pool.copies
        for s in self.sequences:
            s.forget()
            assert self.pool.begin(s, s.tokens if s.whole else ()) == 0

    @invariant()
    def each_sequence_has_what_it_has_computed(self):
        held, size = self.copied(self.pool.copies), self.pool.page_size
        for s in self.sequences:
            slots, text = slots_of(s), context(s)
            for p in seen(self.config, s.n_computed):
                assert held[slots[p]] == (s.salt, *text[:p + 1])
            pages = {slot // size for slot in slots.values()}
            assert len(pages) <= pages_for(self.config, size), "a window's memory does not grow with the text"
            assert s.n_writable <= len(slots) or self.config.window

    @invariant()
    def references_and_free_pages_add_up(self):
        pool, size = self.pool, self.pool.page_size
        of_each = [{slot // size for slot in slots_of(s).values()} for s in self.sequences]
        used = Counter(page for pages in of_each for page in pages)
        assert pool.n_free == pool.n_slots // size - len(used)
        if isinstance(pool, CellPool):
            numbers = [s.cells for s in self.sequences]
            assert sorted(numbers + pool.free_numbers) == list(range(pool.most_sequences))
            return
        assert pool.references == [used[page] for page in range(pool.n_pages)]
        assert {*pool.free_pages} == {*range(pool.n_pages)} - {*used}
        remembered = [pool.prefix_of[page] is not None for page in pool.free_pages]
        assert remembered == sorted(remembered), "pages that are remembered are used last"

    @invariant()
    def what_is_remembered_was_computed_from_these_tokens(self):
        size = self.pool.page_size
        for page, text in self.remembered().items():
            assert self.held[page * size:page * size + size] == [text[:len(text) - size + i + 1] for i in range(size)]

    def teardown(self):
        for s in self.sequences:
            self.pool.free(s)
        assert self.pool.n_free == self.pool.n_slots // self.pool.page_size


@pytest.mark.parametrize('kind', POOLS)
@pytest.mark.parametrize('config', CONFIGS)
def test_a_sequence_reads_what_its_own_tokens_have_given(kind, config):
    run_state_machine_as_test(lambda: PoolMachine(kind, CONFIGS[config]),
                              settings=settings(max_examples=sizes(8, 150), stateful_step_count=40, deadline=None))


def test_sequences_of_the_size_that_a_pool_was_made_for_never_lack_room():
    for config in CONFIGS.values():
        at_once, most = config.window + 1 if config.window else 20, 200 if config.window else 20
        for pool in (PagePool(3 * pages_for(config, 4), 4, config.window, config.n_sink), CellPool(config, 3, 20),
                     CellPool(config, 3, 20, unified=False)):
            sequences = [new([0] * most, config) for _ in range(3)]
            for s in sequences:
                pool.begin(s)
            for i in range(most):
                for s, n in zip(sequences, (1, 1 + i % at_once, at_once)):
                    n = min(n, most - s.n_computed)
                    assert pool.extend(s, n)
                    pool.computed(s, n)


def test_who_has_all_that_it_will_need_does_not_grow():
    unified, streams = (CellPool(CONFIGS['no window'], 2, 20, unified) for unified in (True, False))
    for pool, grows in ((PagePool(4, 8), True), (unified, True), (streams, False)):
        s = Sequence(range(5), None, 8, 20)  # 12 positions are written: nothing follows the last token
        pool.begin(s)
        assert pool.extend(s, 5) and pool.will_grow(s) == grows
        assert pool.extend(s, 12) and not pool.will_grow(s)


# pages by hand

def add(pool, tokens):
    """A sequence whose tokens are all computed, and how many of them were found."""
    s = new(tokens)
    n_found = pool.begin(s, s.tokens)
    assert pool.extend(s, len(s.tokens) - n_found)
    pool.computed(s, len(s.tokens) - n_found)
    return s, n_found


def test_a_pool_without_room_is_refused():
    for make in (lambda: PagePool(0, 4), lambda: PagePool(4, 0), lambda: CellPool(CONFIGS['window'], 0, 4),
                 lambda: CellPool(CONFIGS['window'], 4, 0)):
        with pytest.raises(ValueError, match='at least 1'):
            make()


def test_the_same_hash_is_not_the_same_prefix(monkeypatch):
    monkeypatch.setattr('kvcache.pages.hash', lambda parts: 0, raising=False)
    pool = PagePool(8, 2)
    # the third also has a page (3, 4), after another first one
    for tokens, n in (([1, 2, 3, 4, 9], 0), ([1, 2, 5, 6, 9], 2), ([7, 8, 3, 4, 9], 0)):
        assert add(pool, tokens)[1] == n


def test_the_end_of_a_prompt_is_evicted_first():
    pool = PagePool(4, 2)
    pool.free(add(pool, range(8))[0])
    assert list(pool.free_pages) == [3, 2, 1, 0]
    b = new([50, 51, 52, 53])
    pool.begin(b, b.tokens)
    assert pool.extend(b, 4) and b.table == [3, 2]
    pool.free(b)
    assert list(pool.free_pages) == [3, 2, 1, 0], "pages that are not remembered are used first"
    assert add(pool, range(8))[1] == 4


def test_the_least_recently_used_prompt_is_evicted_first():
    for prompts, evicted in (((1, 2), 1), ((1, 2, 1), 2)):
        pool = PagePool(4, 2)
        for token in (*prompts, 7):
            pool.free(add(pool, [token] * 4)[0])
        assert [token for token in (1, 2, 7) if not pool.remembered([token] * 5)[0]] == [evicted]


# cells by hand; which cell a token takes: test_cells_reference.py

@pytest.mark.parametrize('unified', [True, False])
def test_forks_share_cells_in_one_stream_and_are_copies_in_streams(unified):
    pool, a, b = CellPool(CONFIGS['no window'], 3, 10, unified), new(range(5)), new(range(5))
    pool.begin(a)
    assert pool.extend(a, 7)
    pool.computed(a, 5)
    pool.fork(a, b)
    assert ('ab' in str(pool.streams)) == unified
    assert pool.copies == ([] if unified else [(0, 10, 5)])
    assert pool.n_free == (30 - 7 if unified else 30 - 7 - 5)
    assert pool.extend(b, 2)
    assert slots_of(b) == {p: p + (0 if p < 5 else 2) if unified else p + 10 for p in range(7)}
