"""
Every cache of kvcache/ with a decoder that has a compiled step: the logits are those of the model without a cache, and
the runs of slots are what the model in PyTorch would read. The reference executor checks each call.
"""
import copy
import itertools

import numpy as np
import pytest
import torch
from conftest import sizes
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from reference_executor import ReferenceExecutor
from sliding import BLOCK, all_logits, feed, join_and_leave, model, texts

from generation import Work
from kvcache import KINDS, make_cache
from kvcache.paged import PagedCache, n_blocks_for
from kvcache.placement import LayerView

WINDOWS = [(0, 0), (1, 0), (1, 3), (2, 0), (5, 0), (5, 2), (14, 0), (8, 7)]
CASES = [case for case in itertools.product(('learned', 'rope', 'alibi', 'none'), (1, 2, 4), WINDOWS)]
QUICK = [('learned', 4, (0, 0)), ('rope', 2, (0, 0)), ('alibi', 1, (0, 0)), ('none', 4, (3, 0)), ('rope', 2, (5, 2)),
         ('alibi', 2, (5, 2)), ('rope', 1, (1, 3)), ('learned', 2, (5, 2))]


def exact_logits(m, idx):
    """Logits (B, T, vocab_size) of all positions of idx (B, T), read at once, in float64."""
    return all_logits(copy.deepcopy(m).double(), idx)


def fill_with_nan(cache):
    """Whatever is read before it is written makes the logits NaN."""
    for layer in cache.layers:
        for stored in layer.tensors():
            if stored.is_floating_point():
                stored.fill_(float('nan'))


@pytest.mark.parametrize('position, n_kv_head, window', sizes(QUICK, CASES), ids=str)
@pytest.mark.parametrize('kind', KINDS)
def test_texts_far_beyond_the_window_are_those_of_one_pass(kind, position, n_kv_head, window):
    """Four sequences join one after the other, in chunks of any lengths; one is forked, all are freed."""
    m = model(torch.float32, position=position, n_kv_head=n_kv_head, window=window[0], n_sink=window[1], gelu='tanh')
    end = BLOCK if m.config.max_positions == BLOCK else 4 * BLOCK
    idx, rng, executor = texts(4, end), np.random.default_rng(0), ReferenceExecutor(m)
    cache, ends = make_cache(m, kind, 4, decoder=executor), [end, end // 2, end, end - 3]
    exact = exact_logits(m, idx)
    fill_with_nan(cache)
    lengths = [1, 1, 1, 2, 3, window[0] + 1, window[0] + 2, BLOCK]
    for seqs, tokens, expected in join_and_leave(cache, idx, exact, ends, lengths, rng):
        executor.calls.clear()
        for logits, of_pass in zip(feed(cache, seqs, tokens), expected, strict=True):
            assert (logits - of_pass).abs().max() < 1e-4
        n_calls = -(-max(map(len, tokens)) // (window[0] + 1)) if window[0] else 1
        assert len(executor.calls) == n_calls and sum(map(sum, executor.calls)) <= sum(map(len, tokens))


def seen_by_pytorch(monkeypatch):
    """
    A list that gets, for each pass of a cache in PyTorch, what each of its tokens reads: {position: row}, by the index
    and the mask that attention is given.
    """
    passes, append = [], LayerView.append

    def recorded(view, k, v, positions):
        found = append(view, k, v, positions)
        placement, keys = view.placement, view.placement.keys
        numbers = torch.arange(np.prod(view.layer.k.shape)).view(view.layer.k.shape)
        index = placement.index
        rows = numbers[:index].flatten()[None] if isinstance(index, int) else numbers[index].flatten(1)  # (B, K)
        if isinstance(index, tuple) and isinstance(index[0], slice):
            rows = numbers[index]
        mask = positions.mask(keys, rows.size(1))
        mask = mask if mask.dtype is torch.bool else mask > -float('inf')
        B, T = placement.positions.shape
        mask = mask[:, 0] if mask.dim() == 4 else mask.expand(B, T, -1)
        pos = keys.pos if keys.pos.dim() > 1 else keys.pos.expand(B, -1)
        pos = pos if pos.dim() == 3 else pos[:, None].expand(B, T, -1)
        passes.append([{int(p): int(row) for p, row, seen in zip(pos[b, t], rows[b], mask[b, t]) if seen}
                       for b in range(B) for t in range(T)])
        return found
    monkeypatch.setattr(LayerView, 'append', recorded)
    return passes


class TwinMachine(RuleBasedStateMachine):
    """
    Random operations on two caches, one of which has a compiled step: what each token reads is the same, by the runs of
    the one and by the index and the mask of the other; so are the logits, to rounding.
    """
    kind, bits, how = 'paged', 0, {}

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.passes = seen_by_pytorch(self.patch)
        gpt = model(torch.float32, **(dict(n_layer=1, n_head=2, n_embd=64, n_kv_head=1) | self.how))
        self.executor = ReferenceExecutor(gpt)
        self.kernel, self.plain = self.cache(gpt, self.executor), self.cache(gpt)
        self.most = min(gpt.config.max_positions, 60)

    def cache(self, gpt, decoder=None):
        if self.kind == 'paged':
            type_kv = 'int8' if self.bits else 'float32'
            return PagedCache(gpt, 4 * n_blocks_for(gpt.config, 3) - 2, 3, type_kv, decoder)
        return make_cache(gpt, self.kind, 4, self.bits, decoder)

    def on_both(self, operation):
        """What operation(cache) returns or raises for both caches: [result or message] of each."""
        results = []
        for cache in (self.kernel, self.plain):
            try:
                results.append(operation(cache))
            except ValueError as e:
                results.append(str(e))
        assert self.kernel.lengths == self.plain.lengths
        return results

    def any(self, data):
        return data.draw(st.sampled_from(sorted(self.plain.lengths)))

    @precondition(lambda self: len(self.plain.lengths) < 4)
    @rule()
    def new(self):
        a, b = self.on_both(lambda cache: cache.new())
        assert a == b

    @precondition(lambda self: 0 < len(self.plain.lengths) < 4)
    @rule(data=st.data())
    def fork(self, data):
        seq = self.any(data)
        a, b = self.on_both(lambda cache: cache.fork(seq))
        assert a == b

    @precondition(lambda self: self.plain.lengths)
    @rule(data=st.data())
    def free(self, data):
        seq = self.any(data)
        self.on_both(lambda cache: cache.free(seq))

    @precondition(lambda self: self.plain.lengths)
    @rule(data=st.data(), back=st.integers(0, 9))
    def truncate(self, data, back):
        seq = self.any(data)
        n = max(0, self.plain.lengths[seq] - back)
        a, b = self.on_both(lambda cache: cache.truncate(seq, n))
        assert a == b

    @precondition(lambda self: self.plain.lengths and not self.how.get('window'))
    @rule(data=st.data(), n_keep=st.integers(0, 4), n=st.integers(0, 5))
    def shift(self, data, n_keep, n):
        seq = self.any(data)
        a, b = self.on_both(lambda cache: cache.shift(seq, n_keep, n))
        assert a == b

    @precondition(lambda self: self.plain.lengths)
    @rule(data=st.data())
    def step(self, data):
        seqs, starts, tokens = [], [], []
        for seq, length in self.plain.lengths.items():
            start = data.draw(st.just(length) | st.just(length) | st.integers(max(0, length - 3), length))
            new = data.draw(st.lists(st.integers(0, 1), max_size=min(9, self.most - start)))
            new = new[:1] if data.draw(st.booleans()) else new
            if new:
                seqs, starts, tokens = seqs + [seq], starts + [start], tokens + [torch.tensor(new)]
        if not seqs:
            return
        work = Work(seqs, starts, tokens)
        self.passes.clear()
        self.executor.calls.clear()
        seen = []  # in each call of the compiled step

        def step(cache):
            if cache is self.plain:
                seen.append(self.by_token(self.passes))
                self.passes.clear()
            return cache.step(work)
        kept = []
        execute = self.executor.execute_model

        def recorded(ids, positions, *args):
            logits = execute(ids, positions, *args)
            where = np.split(positions, np.cumsum(self.executor.calls[-1])[:-1])
            kept.append([{q: slots[q] for q in self.executor.seen(p)}
                         for slots, mine in zip(self.executor.runs, where) for p in mine.tolist()])
            return logits
        self.executor.execute_model = recorded
        a, b = self.on_both(step)
        if isinstance(b, str):
            assert a == b
            return
        fell_back = bool(seen[0])
        assert fell_back != bool(kept)
        if fell_back:  # keys that are not turned yet
            assert self.bits and self.how['position'] == 'rope' and self.kind in ('streams', 'unified')
        assert (seen[0] or self.by_token(kept)) == self.by_token(self.passes)
        assert (a - b).abs().max() < (0.3 if self.bits else 1e-4)

    @staticmethod
    def by_token(passes):
        """{(position, slot) of each token of a step: what it reads}."""
        return {(max(mine), mine[max(mine)]): mine for each in passes for mine in each}

    def teardown(self):
        self.patch.undo()
        for seq in [*self.plain.lengths]:
            self.on_both(lambda cache: cache.free(seq))
        if self.kind == 'paged':
            assert len(self.kernel.blocks.free) == len(self.kernel.blocks.references)


def machine(kind_, bits_=0, **how_):
    class Machine(TwinMachine):
        kind, bits, how = kind_, bits_, how_
    Machine.TestCase.settings = settings(max_examples=sizes(5, 60), stateful_step_count=30, deadline=None,
                                         phases=[Phase.generate])
    return Machine.TestCase


TestPages, TestLearnedPages = machine('paged', position='rope'), machine('paged')
TestWindowPages, TestPagesOfOne = machine('paged', position='rope', window=4, n_sink=1), machine(
    'paged', position='alibi', window=1, n_sink=4)
TestPagesOfInt8 = machine('paged', 8, position='alibi')
TestRows, TestRing = machine('tuple', position='rope'), machine('tuple', position='rope', window=4, n_sink=1)
TestRingOfOne, TestRowsOfInt8 = machine('tuple', position='alibi', window=1, n_sink=2), machine('tuple', 8)
TestCells, TestWindowCells = machine('unified', position='rope'), machine('unified', position='rope', window=4,
                                                                          n_sink=1)
TestCellsOfOne, TestCellsOfInt8 = machine('unified', position='none', window=1, n_sink=2), machine(
    'unified', 8, position='rope')
TestStreams, TestWindowStreams = machine('streams', position='alibi'), machine('streams', position='rope', window=3,
                                                                              n_sink=2)
TestStreamsOfInt8 = machine('streams', 8, position='rope')
