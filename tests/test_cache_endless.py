"""Random operations and interrupts at any line, on every cache of a model with a window: all logits are exact."""
import itertools
import os

import pytest
import torch
from conftest import sizes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from interrupts import interrupted
from sliding import BLOCK, SINKS, ShiftedKeys, W, all_logits, feed, in_chunks, model, small_cache, texts

import kvcache
from kvcache import KINDS, make_cache
from kvcache.paged import PagedCache, n_blocks_for


class EndlessMachine(RuleBasedStateMachine):
    """Random operations on a cache of a model with a window, beside {sequence: its tokens}: all logits are exact."""
    kind, how = 'paged', dict(window=4, n_sink=1)

    def __init__(self):
        super().__init__()
        self.gpt, self.texts = model(position='rope', n_kv_head=2, n_layer=1, n_head=2, n_embd=16, **self.how), {}
        self.cache = self.make()

    def make(self):
        if self.kind == 'paged':
            return PagedCache(self.gpt, 4 * n_blocks_for(self.gpt.config, 3), 3, 'float64')
        return make_cache(self.gpt, self.kind, 4)

    def any(self, data):
        return data.draw(st.sampled_from(sorted(self.texts)))

    @precondition(lambda self: len(self.texts) < 4)
    @rule()
    def new(self):
        self.texts[self.cache.new()] = []

    @precondition(lambda self: 0 < len(self.texts) < 4)
    @rule(data=st.data())
    def fork(self, data):
        seq = self.any(data)
        self.texts[self.cache.fork(seq)] = self.texts[seq][:]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data):
        seq = self.any(data)
        self.cache.free(seq)
        del self.texts[seq]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), back=st.integers(0, 12))
    def truncate(self, data, back):
        seq = self.any(data)
        n = max(0, len(self.texts[seq]) - back)
        try:
            self.cache.truncate(seq, n)
        except ValueError as e:
            assert 'go back' in str(e) and n > self.gpt.config.n_sink and back
        else:
            del self.texts[seq][n:]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    @torch.inference_mode()
    def step(self, data):
        new = {seq: data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=11)) for seq in self.texts
               if data.draw(st.booleans())}
        if not new:
            return
        logits = feed(self.cache, list(new), [torch.tensor(text) for text in new.values()])
        for seq, row in zip(new, logits):
            self.texts[seq] += new[seq]
            assert (row - self.gpt(torch.tensor([self.texts[seq]]), use_cache=False)[0][0, 0]).abs().max() < 1e-10

    def teardown(self):
        for seq in self.texts:
            self.cache.free(seq)
        if self.kind == 'paged':
            assert len(self.cache.blocks.free) == len(self.cache.blocks.references)


def machine(kind_, **how_):
    class Machine(EndlessMachine):
        kind, how = kind_, how_
    Machine.TestCase.settings = settings(max_examples=sizes(5, 60), stateful_step_count=40, deadline=None)
    return Machine.TestCase


TestPages, TestPagesWithoutSinks = machine('paged', window=4, n_sink=1), machine('paged', window=3)
TestPagesOfOne, TestPagesOfMany = machine('paged', window=1, n_sink=4), machine('paged', window=8, n_sink=5)
TestRing, TestRingOfOne = machine('tuple', window=4, n_sink=1), machine('tuple', window=1, n_sink=2)
TestCells, TestCellsOfOne = machine('unified', window=4, n_sink=1), machine('unified', window=1, n_sink=2)
TestStreams, TestCellsWithoutSinks = machine('streams', window=3, n_sink=2), machine('unified', window=3)


# interrupts

FOLDER = os.path.dirname(kvcache.__file__)


def in_a_cache(code):
    """Is this code of kvcache/, but for the lock and the recovery?"""
    file = code.co_filename
    return file.startswith(FOLDER) and not file.endswith('exclusive.py') and code.co_name != 'recover'


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('what', ['step', 'shift'])
@torch.inference_mode()
def test_after_an_interrupt_at_any_line_a_sequence_is_as_before_or_has_nothing(kind, what):
    window = dict(window=W, n_sink=SINKS) if what == 'step' else {}
    m, idx = model(position='rope', n_layer=1, n_head=2, n_embd=16, **window), texts(40)
    exact, shifted = all_logits(m, idx[None, :40 if window else BLOCK])[0], ShiftedKeys(m)
    if not window:
        shifted.feed(idx[:12])
        shifted.move(lambda p: p if p < 2 else None if p < 6 else p - 4)
        shifted = shifted.feed(idx[12:14])
    for n in itertools.count(1, sizes(41, 4)):
        cache = small_cache(m, kind, 3)
        a, b, n_seen = cache.new(), cache.new(), 12
        feed(cache, [a], idx[None, :n_seen])
        c = cache.fork(a)
        work = {'step': lambda: feed(cache, [a, b], [idx[12:14], idx[:20]]), 'shift': lambda: cache.shift(a, 2, 4)}
        ended = not interrupted(work[what], n, in_a_cache)
        assert cache.lengths[a] in {'step': (0, 12, 14), 'shift': (0, 12, 8)}[what] and cache.lengths[b] in (0, 20)
        if cache.lengths[a] == 8:
            assert (feed(cache, [a], idx[None, 12:14])[0] - shifted).abs().max() < 1e-10
        else:
            in_chunks(cache, a, idx, [1, 1] if cache.lengths[a] else [9, 4], exact)
        in_chunks(cache, b, idx, [7, 3], exact)
        in_chunks(cache, c, idx, [1, 2], exact)
        for seq in (a, b, c):
            cache.free(seq)
        assert all(cells.used() == 0 for cells in cache.cells.streams) if hasattr(cache, 'cells') else True
        assert len(cache.blocks.free) == len(cache.blocks.references) if hasattr(cache, 'blocks') else True
        if ended:
            assert n > 40
            return


# cells in a file, and the operator
