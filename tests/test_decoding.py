"""
Decode steps that repeat the one before with the next tokens, see kvcache/decoding.py: whatever comes between two of
them, logits and cache are those of a twin that never repeats a step.
"""
import copy
import itertools

import numpy as np
import pytest
import torch
from conftest import sizes
from interrupts import interrupted
from reference_executor import ReferenceExecutor
from sliding import BLOCK, all_logits, feed, model, texts
from test_cache_endless import in_a_cache

from decode.cpu import CPUDecoder
from generation import Work
from kvcache import KINDS, make_cache
from kvcache.paged import PagedCache

N_SEQ, VOCAB = 4, 29
MODELS = [{}, dict(position='rope', window=5, n_sink=2), dict(position='alibi', n_kv_head=1), dict(window=3)]


class Twins:
    """A cache, and one of the same kind in which no step repeats another. `texts`: the tokens of each sequence."""

    def __init__(self, m, kind):
        self.executor, self.m = ReferenceExecutor(m), m
        self.both = [make_cache(m, kind, N_SEQ, decoder=self.executor) for _ in range(2)]
        self.texts = {}

    def call(self, name, *args):
        self.both[1].decoding = None
        results = [getattr(cache, name)(*args) for cache in self.both]
        assert results[0] == results[1] and self.both[0].lengths == self.both[1].lengths
        return results[0]

    def step(self, seqs, tokens):
        """Feed a row of new tokens to each sequence. Returns how many steps have repeated another so far."""
        starts = [len(self.texts[seq]) for seq in seqs]
        work = Work(seqs, starts, torch.tensor(tokens))
        self.both[1].decoding = None
        logits = [cache.step(work) for cache in self.both]
        assert torch.equal(*logits)
        for seq, row in zip(seqs, tokens):
            self.texts[seq] = self.texts[seq] + row
        assert [cache.lengths for cache in self.both] == [{s: len(t) for s, t in self.texts.items()}] * 2
        return logits[0]

    def repeated(self):
        d = self.both[0].decoding
        return d.n_steps if d else 0


@pytest.mark.parametrize('how', MODELS, ids=str)
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('seed', range(sizes(1, 12)))
def test_steps_that_repeat_one_give_what_others_give(kind, how, seed):
    m, rng = model(torch.float32, **how), np.random.default_rng(seed)
    most = min(m.config.max_positions, 3 * BLOCK)
    twins, n_repeated = Twins(m, kind), 0

    def ids(n):
        return rng.integers(VOCAB, size=n).tolist()
    for _ in range(30):
        texts = twins.texts
        what = rng.choice(['new', 'fork', 'free', 'truncate', 'chunk', 'refused', 'decode', 'decode'])
        seqs = [int(seq) for seq in rng.permutation(list(texts))[:rng.integers(1, N_SEQ + 1)]]
        if what == 'new' and len(texts) < N_SEQ:
            texts[twins.call('new')] = []
        elif what == 'fork' and seqs and len(texts) < N_SEQ:
            texts[twins.call('fork', seqs[0])] = texts[seqs[0]]
        elif what == 'free' and seqs:
            twins.call('free', seqs[0])
            del texts[seqs[0]]
        elif what == 'truncate' and seqs and not m.config.window:
            n = int(rng.integers(len(texts[seqs[0]]) + 1))
            twins.call('truncate', seqs[0], n)
            texts[seqs[0]] = texts[seqs[0]][:n]
        elif what == 'refused' and seqs:
            starts = [len(texts[seq]) for seq in seqs]
            for work in (Work(seqs, starts, torch.full((len(seqs), 1), VOCAB)),
                         Work(seqs, [start + 1 for start in starts], torch.zeros(len(seqs), 1, dtype=torch.int64)),
                         Work(seqs * 2, starts * 2, torch.zeros(2 * len(seqs), 1, dtype=torch.int64))):
                for cache in twins.both:
                    with pytest.raises(ValueError):
                        cache.step(work)
        elif what == 'chunk' and seqs and len(texts[seqs[0]]) + 3 <= most:
            twins.step(seqs[:1], [ids(3)])
        for _ in range(int(rng.integers(1, 20))):
            if seqs and all(seq in texts for seq in seqs) and all(len(texts[seq]) < most for seq in seqs):
                twins.step(seqs, [ids(1) for _ in seqs])
        n_repeated += twins.repeated()
    assert n_repeated > 5


@pytest.mark.parametrize('kind', KINDS)
def test_a_repeated_step_keeps_the_limits(kind):
    m = model(torch.float32)
    twins = Twins(m, kind)
    a, b = (twins.call('new') for _ in range(2))
    twins.texts |= {a: [], b: []}
    twins.step([a], [[1] * (BLOCK - 3)])
    twins.step([b], [[2]])
    for token in range(3):
        twins.step([a, b], [[token], [token]])
    assert twins.repeated() == 2
    with pytest.raises(ValueError, match='out of context|positions|block_size'):
        twins.both[0].step(Work([a, b], [BLOCK, 4], torch.tensor([[1], [1]])))
    assert twins.both[0].lengths == {a: BLOCK, b: 4}
    twins.step([b], [[5]])


def test_a_pool_that_is_full_refuses_a_repeated_step_and_keeps_its_sequences():
    m = model(torch.float32)
    cache = PagedCache(m, 3, 4, decoder=ReferenceExecutor(m))
    a, b = cache.new(), cache.new()
    feed(cache, [a, b], [torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])])
    for token in range(2):  # a takes the last block with its fifth token
        feed(cache, [a], torch.tensor([[token]]))
    feed(cache, [b], torch.tensor([[7]]))
    n_free, tables = cache.n_free, {seq: table[:] for seq, table in cache.blocks.tables.items()}
    assert n_free == 0 and cache.decoding.ends == [4]
    with pytest.raises(ValueError, match='1 blocks are needed and 0 are free'):
        feed(cache, [b], torch.tensor([[8]]))
    assert (cache.lengths, cache.blocks.tables, cache.decoding) == ({a: 5, b: 4}, tables, None)
    cache.free(a)
    assert torch.isfinite(feed(cache, [b], torch.tensor([[8]]))).all()


@pytest.mark.parametrize('kind', KINDS)
def test_weights_that_change_between_repeated_steps_are_noticed(kind):
    m = model(torch.float32)
    decoder = CPUDecoder(m)
    with decoder.exclusive_use():
        logits = []
        for change in (1, 2):
            cache = make_cache(m, kind, 2, decoder=decoder)
            seq = cache.new()
            feed(cache, [seq], torch.tensor([[1, 2, 3]]))
            for token in range(3):
                last = feed(cache, [seq], torch.tensor([[token]]))
            assert cache.decoding.n_steps == 2
            with torch.no_grad():
                for p in m.transformer.ln_f.parameters():  # the keys and values stay the same
                    p.mul_(change)
            logits += [last, feed(cache, [seq], torch.tensor([[3]]))]
            assert cache.decoding.n_steps == 3
    assert torch.equal(logits[0], logits[2]) and torch.equal(2 * logits[1], logits[3])


@pytest.mark.parametrize('kind', KINDS)
def test_after_an_interrupt_at_any_line_of_a_repeated_step_the_next_ones_are_exact(kind):
    m = model(torch.float32)
    executor, idx = ReferenceExecutor(m), texts(2, BLOCK)
    exact = all_logits(copy.deepcopy(m).double(), idx)

    def step(cache, seqs):
        """One more token for each. Returns whether the logits are those of a pass over the whole text."""
        starts = [cache.lengths[seq] for seq in seqs]
        new = torch.stack([idx[seq, start] for seq, start in zip(seqs, starts)])
        logits = cache.step(Work(seqs, starts, new[:, None]))
        return all((row - exact[seq, start]).abs().max() < 1e-4 for seq, start, row in zip(seqs, starts, logits))

    for n in itertools.count(1, sizes(7, 1)):
        cache = PagedCache(m, 8, 4, 'float32', executor) if kind == 'paged' else make_cache(
            m, kind, 2, decoder=executor)
        seqs = [cache.new(), cache.new()]
        feed(cache, seqs, [idx[0, :2], idx[1, :5]])
        assert all(step(cache, seqs) for _ in range(2))
        ended = not interrupted(lambda: step(cache, seqs), n, in_a_cache)
        assert [cache.lengths[seq] for seq in seqs] in ([4, 7], [5, 8])
        if kind == 'paged':
            assert {seq: len(cache.tokens[seq]) for seq in seqs} == cache.lengths == cache.blocks.length
        assert all(step(cache, seqs) for _ in range(7))
        if ended:
            assert n > 20
            return
