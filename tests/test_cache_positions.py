"""
Rotary positions, ALiBi, no positions, grouped heads, and windows with sinks, on every cache of kvcache/: the logits are
those of the model without a cache, which reads the whole text at once.
"""
import itertools
import os
import sys

import numpy as np
import pytest
import torch
from conftest import sizes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

import kvcache
from generation import Work
from kvcache import KINDS, make_cache, paged, placement
from kvcache.cell_cache import CellCache
from kvcache.operator import key_value_cache
from kvcache.paged import InputMetadata, PagedCache, execute_model, n_blocks_for
from kvcache.placement import logits_of
from kvcache.streams import context_shift
from model import GPT, GPTConfig
from positions import Keys

BLOCK, VOCABULARY = 16, 29
SHAPES = dict(block_size=BLOCK, vocab_size=VOCABULARY, n_layer=2, n_head=4, n_embd=32)


def model(dtype=torch.float64, **how):
    torch.manual_seed(0)
    m = GPT(GPTConfig(**(SHAPES | how))).to(dtype).eval()
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return m


def texts(*shape):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def all_logits(m, idx):
    """Logits (B, T, vocab_size) of all positions of idx (B, T), read at once."""
    return m(idx, targets=idx, use_cache=False)[0]


def small_cache(m, kind, n_seq):
    """`make_cache` of a float64 model, with pages of 4 positions."""
    if kind == 'paged':
        return PagedCache(m, n_seq * n_blocks_for(m.config, 4), 4, 'float64')
    return make_cache(m, kind, n_seq)


def feed(cache, seqs, tokens):
    """A step of these sequences, from where they end."""
    return cache.step(Work(seqs, [cache.lengths[seq] for seq in seqs], tokens))


def in_chunks(cache, seq, idx, chunks, exact):
    """Feed idx (T,) to a sequence in chunks; the logits after each are exact (T, vocab_size)."""
    for n in chunks:
        start = cache.lengths[seq]
        logits = feed(cache, [seq], idx[None, start:start + n])[0]
        assert (logits - exact[start + n - 1]).abs().max() < 1e-10, (start, n)


WINDOWS = [(0, 0), (1, 0), (1, 3), (2, 0), (5, 0), (5, 2), (14, 0), (8, 7)]
CASES = [case for case in itertools.product(('learned', 'rope', 'alibi', 'none'), (1, 2, 4), WINDOWS)]
QUICK = [('rope', 2, (0, 0)), ('alibi', 1, (0, 0)), ('none', 4, (3, 0)), ('rope', 2, (5, 2)), ('alibi', 2, (5, 2)),
         ('rope', 1, (1, 3)), ('learned', 2, (5, 2))]


@pytest.mark.parametrize('position, n_kv_head, window', sizes(QUICK, CASES), ids=str)
@pytest.mark.parametrize('kind', KINDS)
def test_texts_far_beyond_the_window_are_those_of_one_pass(kind, position, n_kv_head, window):
    """Four sequences join one after the other, in chunks of any lengths; one is forked, two are freed early."""
    m = model(position=position, n_kv_head=n_kv_head, window=window[0], n_sink=window[1])
    end = BLOCK if m.config.max_positions == BLOCK else sizes(6, 20) * BLOCK
    idx, rng = texts(4, end), np.random.default_rng(0)
    exact, cache, seqs, ends = all_logits(m, idx), make_cache(m, kind, 4), {}, [end, end // 2, end, end - 3]
    allocated = cache.nbytes()
    for step in itertools.count():
        if step in (0, 1, 3):
            seqs[len(seqs)] = cache.new()
        if step == 4:
            idx[3] = idx[0]
            exact[3] = exact[0]
            seqs[3] = cache.fork(seqs[0])
        for row in [row for row in seqs if cache.lengths[seqs[row]] == ends[row]]:
            cache.free(seqs.pop(row))
        if not seqs:
            break
        live = [row for row in seqs if rng.random() < 0.8] or [*seqs]
        starts = [cache.lengths[seqs[row]] for row in live]
        sizes_drawn = [rng.choice([1, 1, 1, 2, 3, window[0] + 1, window[0] + 2, 2 * BLOCK]) for _ in live]
        stops = [min(ends[row], start + int(n)) for row, start, n in zip(live, starts, sizes_drawn)]
        tokens = [idx[row, start:stop] for row, start, stop in zip(live, starts, stops)]
        for row, stop, logits in zip(live, stops, feed(cache, [seqs[row] for row in live], tokens)):
            assert (logits - exact[row, stop - 1]).abs().max() < 1e-10
    assert cache.nbytes() == allocated and not cache.lengths


@pytest.mark.parametrize('kind', KINDS)
def test_a_model_that_is_given_a_window_of_all_of_block_size(kind):
    """As for when_full='roll': the same weights, without end."""
    m = model(position='rope', n_kv_head=2).with_window(BLOCK)
    idx = texts(6 * BLOCK)
    exact, cache = all_logits(m, idx[None])[0], make_cache(m, kind, 1)
    in_chunks(cache, cache.new(), idx, [2 * BLOCK, 1, BLOCK + 1, *[1] * 20], exact)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-4), (torch.bfloat16, 0.3)], ids=str)
def test_other_dtypes(kind, dtype, tolerance):
    m, idx = model(dtype, position='rope', n_kv_head=2, window=5, n_sink=2), texts(1, 10 * BLOCK)
    cache, exact = make_cache(m, kind, 1), all_logits(m.double(), idx)[0]
    m.to(dtype)
    seq, worst = cache.new(), 0.0
    for start in range(0, 10 * BLOCK, 4):
        logits = feed(cache, [seq], idx[:, start:start + 4])
        worst = max(worst, float((logits[0].double() - exact[start + 3]).abs().max()))
    assert logits.dtype is dtype and worst < tolerance * exact.abs().max()


@pytest.mark.parametrize('bits', [8, 4])
@pytest.mark.parametrize('position', ['rope', 'alibi'])
def test_all_caches_agree_when_quantised(position, bits):
    """They store the same numbers, in other rows."""
    m, idx = model(torch.float32, position=position, n_kv_head=2, window=5, n_sink=2), texts(2, 6 * BLOCK)
    got = []
    for kind in KINDS:
        cache = make_cache(m, kind, 2, bits)
        seqs = [cache.new(), cache.new()]
        got.append(torch.cat([feed(cache, seqs, part) for part in idx.split(3, dim=1)]))
    assert all(torch.allclose(other, got[0], atol=1e-4) for other in got[1:])


@pytest.mark.parametrize('kind', KINDS)
def test_memory_is_that_of_the_formula(kind):
    for n_kv_head, window, n_sink in ((1, 0, 0), (4, 0, 0), (2, 5, 2)):
        m = model(torch.float32, position='rope', n_kv_head=n_kv_head, window=window, n_sink=n_sink)
        slots = 16 if not window else 12
        if kind == 'paged':
            slots = 16 if not window else 16 * (1 + 2)  # a block of the sinks; 2 windows can lie in two blocks
        assert make_cache(m, kind, 3).nbytes() == 2 * 2 * 3 * n_kv_head * 8 * slots * 4
        rounded = make_cache(m, kind, 3, bits=8)
        assert rounded.nbytes() == 2 * 2 * 3 * slots * (n_kv_head * 8 + 4)  # a scale for each row


# windows: each of these has been shipped by somebody as a bug

W, SINKS = 5, 2


def streaming(kind, n_seq=2, **how):
    m = model(**(dict(position='rope', n_kv_head=2, window=W, n_sink=SINKS) | how))
    idx = texts(10 * BLOCK)
    return m, idx, all_logits(m, idx[None])[0], small_cache(m, kind, n_seq)


@pytest.mark.parametrize('chunks', [
    [1] * 40 + [W, W + 1, W - 1, 2, W],   # a chunk on a wrapped cache
    [8 * BLOCK, 1, 1, 3],                 # a prompt longer than the window, and than block_size
    [W] + [1] * 20, [W + 1] + [1] * 20, [W - 1] + [1] * 20,  # length exactly W, and one more or less
    [SINKS] + [1] * 20, [SINKS + W] + [1] * 20, [1] + [1] * 20,
    [2] + [1] * 60,                       # a short prompt that wraps later
    [W + 2, W + 2, W + 1, 1], [2 * W, 2 * W + 1, 4 * W + SINKS + 1, 1, W],
], ids=str)
@pytest.mark.parametrize('kind', KINDS)
def test_chunks_around_the_window(kind, chunks):
    m, idx, exact, cache = streaming(kind)
    in_chunks(cache, cache.new(), idx, chunks, exact)
    wider = make_cache(model(position='rope', n_kv_head=2, window=W + 1, n_sink=SINKS), kind, 1)
    seq = wider.new()
    feed(wider, [seq], idx[None, :3 * W])
    logits = feed(wider, [seq], idx[None, 3 * W:3 * W + 1])[0]
    assert (logits - exact[3 * W]).abs().max() > 1e-3  # W and W + 1 are not the same model


def recorded_keys(monkeypatch):
    """A list that gets (positions of the queries (B, T), bool (B, T, K) who sees what, positions of the keys)."""
    seen, append = [], placement.LayerView.append

    def recording(view, k, v, positions):
        result = append(view, k, v, positions)
        keys, mask = result[2], positions.mask(result[2], result[0].size(2))
        seen.append((positions.q_pos, (mask if mask.dtype is torch.bool else mask > -np.inf)[:, 0],
                     keys.pos.expand(*positions.q_pos.shape, -1) if keys.pos.dim() != 2 else
                     keys.pos[:, None].expand(*positions.q_pos.shape, -1)))
        return result
    monkeypatch.setattr(placement.LayerView, 'append', recording)
    return seen


@pytest.mark.parametrize('kind', KINDS)
def test_each_token_sees_its_own_position_its_window_and_the_sinks_and_nothing_twice(kind, monkeypatch):
    """Also after the rows have wrapped, when the newest key is in any row; and sinks also while a prompt is read."""
    m, idx, exact, cache = streaming(kind)
    a, b, seen = cache.new(), cache.new(), recorded_keys(monkeypatch)
    for n in (4, 1, 17, 1, 1, W + 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 30):
        feed(cache, [a, b], [idx[cache.lengths[a]:][:n], idx[cache.lengths[b]:][:2]])
    n_seen = 0
    for q_pos, mask, key_pos in seen:
        for q, mine, pos in zip(q_pos.flatten().tolist(), mask.flatten(0, 1), key_pos.flatten(0, 1)):
            assert sorted(pos[mine].tolist()) == sorted({*range(min(SINKS, q + 1)), *range(max(0, q - W + 1), q + 1)})
            n_seen += 1
    assert n_seen == 2 * (cache.lengths[a] + cache.lengths[b])  # in each of two layers


@pytest.mark.parametrize('n_sink', [0, 2])
@pytest.mark.parametrize('kind', KINDS)
def test_a_model_of_one_layer_sees_its_window_and_its_sinks_only(kind, n_sink):
    m = model(n_layer=1, position='rope', window=W, n_sink=n_sink)
    idx = texts(40)

    def last(idx):
        cache = make_cache(m, kind, 1)
        return feed(cache, [cache.new()], idx[None])
    for changed in sizes((0, 1, 2, 20, 40 - W - 1, 40 - W, 39), range(40)):
        other = idx.clone()
        other[changed] = (idx[changed] + 1) % VOCABULARY
        same = torch.equal(last(other), last(idx))
        assert same == (n_sink <= changed < 40 - W)


@pytest.mark.parametrize('kind', KINDS)
def test_going_back_behind_what_is_stored_is_refused_and_changes_nothing(kind):
    m, idx, exact, cache = streaming(kind, n_seq=1)
    seq = cache.new()
    in_chunks(cache, seq, idx, [1] * 60, exact)
    for n in (20, 50):
        for refused in (lambda n=n: cache.truncate(seq, n), lambda n=n: cache.step(Work([seq], [n], idx[None, :1]))):
            with pytest.raises(ValueError, match='cannot go back from 60 tokens'):
                refused()
            assert cache.lengths == {seq: 60}
    in_chunks(cache, seq, idx, [1, 3], exact)
    cache.truncate(seq, SINKS)  # sinks are always stored
    in_chunks(cache, seq, idx, [30, 1, 1], exact)
    cache.truncate(seq, 0)
    in_chunks(cache, seq, idx, [9, 1, 1], exact)


@pytest.mark.parametrize('back', range(1, 8))
@pytest.mark.parametrize('kind', KINDS)
def test_going_back_as_far_as_is_stored(kind, back):
    m, idx, exact, cache = streaming(kind, n_seq=1)
    seq, went_back = cache.new(), 0
    for n in range(12, 40):
        in_chunks(cache, seq, idx, [n - cache.lengths[seq]] if n > cache.lengths[seq] else [], exact)
        try:
            cache.truncate(seq, n - back)
        except ValueError:
            assert cache.lengths == {seq: n} and (kind == 'paged' or back > W + 1 or kind == 'unified')
            continue
        went_back += 1
        in_chunks(cache, seq, idx, [1], exact)
    assert went_back or back > 3


@pytest.mark.parametrize('n_sink', [0, 3])
@pytest.mark.parametrize('kind', KINDS)
def test_with_a_window_of_one_a_sequence_can_go_back_anywhere(kind, n_sink):
    m, idx, exact, cache = streaming(kind, window=1, n_sink=n_sink)
    a, b = cache.new(), cache.new()
    for back in (1, 2, 3, 5, 8, 13, 21, 34) if kind != 'paged' else (4, 8, 20, 36):  # to the beginning of a block
        in_chunks(cache, a, idx, [60 - cache.lengths[a]], exact)
        cache.truncate(a, 60 - back)
        in_chunks(cache, b, idx, [1, 7], exact)  # in unified cells it may take the cells of the other
        in_chunks(cache, a, idx, [1, 2, 1][:back // 2], exact)


@pytest.mark.parametrize('kind', KINDS)
@torch.inference_mode()
def test_a_step_that_fails_in_a_later_chunk_leaves_the_start_or_nothing(kind):
    m, idx, exact, cache = streaming(kind)
    a, b = cache.new(), cache.new()
    feed(cache, [a], idx[None, :20])
    for n_new in (3, 2 * (W + 1), 40):
        before, left = dict(cache.lengths), [-(-n_new // (W + 1))]

        def fails_in_the_last_pass(*_, left=left):
            left[0] -= 1
            if left[0] == 0:
                raise ZeroDivisionError
        broken = m.transformer.h[1].register_forward_hook(fails_in_the_last_pass)
        with pytest.raises(ZeroDivisionError):
            feed(cache, [a, b], [idx[before[a]:before[a] + n_new], idx[before[b]:before[b] + n_new]])
        broken.remove()
        assert cache.lengths[a] in (before[a], 0) and cache.lengths[b] in (before[b], 0)
        assert cache.lengths == (before if n_new <= W + 1 else {a: 0, b: 0}) or kind == 'unified'
        in_chunks(cache, a, idx, [20, 1, 1] if not cache.lengths[a] else [1, 1, 2], exact)
        in_chunks(cache, b, idx, [1, 7], exact)


@pytest.mark.parametrize('position', ['rope', 'alibi'])
@pytest.mark.parametrize('kind', KINDS)
@torch.no_grad()
def test_keys_of_broken_weights_change_no_later_logits(kind, position):
    m, idx, exact, cache = streaming(kind, position=position)
    good = {name: p.clone() for name, p in m.state_dict().items()}
    a, b = cache.new(), cache.new()
    m.transformer.h[0].attn.c_attn.bias[32:36] = 1e300  # of the keys: an infinite score, where it is not hidden
    feed(cache, [b], idx[None, :13])
    m.transformer.h[1].mlp.c_proj.bias.fill_(float('nan'))
    with pytest.raises(ValueError, match='not numbers'):
        feed(cache, [a, b], [idx[:30], idx[13:15]])
    m.load_state_dict(good)
    assert cache.lengths[a] == 0
    in_chunks(cache, a, idx, [30, 1, 1, 4], exact)


# blocks

def n_computed(monkeypatch):
    """A list that gets the number of tokens of each pass."""
    numbers = []
    monkeypatch.setattr(paged, 'logits_of', lambda m, idx, *how: numbers.append(idx.numel()) or logits_of(m, idx, *how))
    return numbers


def test_a_prefix_hit_needs_the_sinks_and_the_last_window(monkeypatch):
    m, idx, exact, _ = streaming('paged')
    pool, numbers = PagedCache(m, 20, 4, 'float64'), n_computed(monkeypatch)
    a = pool.new()
    in_chunks(pool, a, idx, [33], exact)
    table = pool.blocks.tables[a]
    assert [i for i, block in enumerate(table) if block is not None] == [0, 6, 7, 8]  # the chunk began at 30
    prefixes = {i: pool.blocks.prefix_of[block] for i, block in enumerate(table) if block is not None}
    pool.free(a)

    def computed(n):
        numbers.clear()
        seq = pool.new()
        in_chunks(pool, seq, idx, [n], exact)
        assert None not in [pool.blocks.tables[seq][i] for numbers in pool.blocks.needed(n) for i in numbers]
        pool.free(seq)
        return sum(numbers)
    assert computed(33) == 1
    middle = pool.blocks.cached_blocks(idx[:33].tolist())[3]
    assert middle is None  # it was not needed
    for i in (1, 2, 3):  # of the middle: not needed
        for block in range(20):
            if pool.blocks.prefix_of[block] and depth(pool.blocks.prefix_of[block]) == i:
                pool.blocks.forget(block)
    assert computed(33) == 1
    for i, expected in ((7, 33 - 28), (0, 33)):  # of the window: the beginning before it is used; a sink: none is
        pool.blocks.forget(pool.blocks.block_with[prefixes[i]])
        assert computed(33) == expected
    for n in range(1, 40):
        computed(n)


def depth(prefix):
    """How many blocks are before that of a prefix."""
    return -1 if prefix is None else 1 + depth(prefix.parent)


def test_blocks_behind_the_window_stay_for_those_that_share_them():
    m, idx, exact, _ = streaming('paged')
    pool = PagedCache(m, 40, 4, 'float64')
    a = pool.new()
    in_chunks(pool, a, idx, [6], exact)
    b = pool.fork(a)
    in_chunks(pool, a, idx, [1] * 50, exact)
    in_chunks(pool, b, idx, [1] * 50, exact)
    c = pool.fork(b)
    in_chunks(pool, b, idx, [20], exact)
    in_chunks(pool, c, idx, [1, 20], exact)
    for seq in (a, b, c):
        pool.free(seq)
    assert len(pool.blocks.free) == 40 and not any(pool.blocks.references)


def test_a_pool_for_n_sequences_is_enough_for_n_without_end():
    for window, n_sink in sizes(((1, 0), (7, 5)), ((1, 0), (2, 1), (5, 2), (7, 0), (7, 5), (8, 7), (14, 0))):
        m = model(position='rope', window=window, n_sink=n_sink)
        for block_size in sizes((1, 3, 4), (1, 2, 3, 4, 5, 7, 16)):
            pool = PagedCache(m, 3 * n_blocks_for(m.config, block_size), block_size)
            idx, most = texts(3, 60), 0
            seqs = [pool.new()]
            feed(pool, seqs, idx[:1, :9])
            seqs += [pool.fork(seqs[0]), pool.fork(seqs[0])]
            for start in range(0, 50, 10):
                for seq, row in zip(seqs, idx):
                    feed(pool, [seq], row[None, start:start + 9])
                feed(pool, seqs, idx[:, start + 9:start + 10])
                most = max(most, len(pool.blocks.references) - len(pool.blocks.free))
            assert most <= 3 * n_blocks_for(m.config, block_size)


@torch.inference_mode()
def test_execute_model_takes_tables_whose_blocks_behind_the_window_are_gone():
    m, idx, exact, _ = streaming('paged')
    pool = PagedCache(m, 40, 4, 'float64')
    a, b = pool.new(), pool.new()
    feed(pool, [a, b], [idx[:50], idx[:21]])
    for seq in (a, b):
        pool.blocks.extend(seq)
    tables = [[-1 if block is None else block for block in pool.blocks.tables[seq]] for seq in (a, b)]
    assert tables[0][5] == -1 and tables[0][0] != -1
    tables[1] += [-1] * (13 - len(tables[1]))
    slots = [pool.blocks.slots(a, 50, 51), pool.blocks.slots(b, 21, 22)]
    metadata = dict(slot_mapping=torch.tensor(slots).flatten(), block_tables=torch.tensor(tables),
                    query_lens=torch.tensor([1, 1]), seq_lens=torch.tensor([51, 22]))

    def run(**changed):
        return execute_model(m, idx[[50, 21]], torch.tensor([50, 21]), pool.layers, InputMetadata(**metadata | changed))
    assert (run() - exact[[50, 21]]).abs().max() < 1e-10
    kept = [[i for i, block in enumerate(table) if block != -1] for table in tables]
    n = max(map(len, kept))
    numbers = torch.tensor([some + [99] * (n - len(some)) for some in kept])
    short = torch.tensor([[table[i] for i in some] + [-1] * (n - len(some)) for some, table in zip(kept, tables)])
    assert (run(block_tables=short, block_numbers=numbers) - exact[[50, 21]]).abs().max() < 1e-10
    for number in (0, 12, 11):  # a sink, and two of the window
        missing = torch.tensor(tables)
        missing[0, number] = -1
        with pytest.raises(ValueError, match='room'):
            run(block_tables=missing)
    with pytest.raises(ValueError, match='block_numbers'):
        run(block_numbers=torch.arange(12))


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


# shifts

class ShiftedKeys(list):
    """The layers of a cache of one sequence that keeps all keys and values, and can give them other positions."""

    def __init__(self, m):
        super().__init__(ShiftedLayer(m.config) for _ in range(m.config.n_layer))
        self.model = m

    def feed(self, idx):
        """Logits (vocab_size,) of the last of the tokens idx (T,)."""
        start = 1 + (max(self[0].pos) if self[0].pos else -1)
        x, _ = self.model.hidden_states(idx[None], torch.arange(start, start + len(idx)), self)
        return self.model.lm_head(x)[0, -1]

    def move(self, moved):
        """moved: a function of a position; None removes it."""
        for layer in self:
            layer.move(moved)


class ShiftedLayer:
    def __init__(self, config):
        self.config, self.pos, self.k, self.v = config, [], [], []

    def append(self, k, v, positions):
        self.pos += positions.q_pos.tolist()
        self.k += k[0].unbind(1)
        self.v += v[0].unbind(1)
        return torch.stack(self.k, 1)[None], torch.stack(self.v, 1)[None], Keys(torch.tensor(self.pos)), self

    def move(self, moved):
        kept = [(moved(p), p, k, v) for p, k, v in zip(self.pos, self.k, self.v) if moved(p) is not None]
        self.pos, self.v = [new for new, *_ in kept], [v for *_, v in kept]
        self.k = [self.turned(k, new - p) for new, p, k, _ in kept]

    def turned(self, k, by):
        """A key (n_kv_head, head_dim): pairs of channels as complex numbers, times exp(i * angle)."""
        if self.config.position != 'rope':
            return k
        a, b = k.chunk(2, dim=-1)
        angle = by * self.config.rope_theta ** (-torch.arange(a.size(-1), dtype=torch.float64) / a.size(-1))
        z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), dim=-1)


@pytest.mark.parametrize('position', ['rope', 'alibi', 'none'])
@pytest.mark.parametrize('kind', KINDS)
@torch.inference_mode()
def test_shifts_again_and_again_are_those_of_keys_that_are_turned_by_hand(kind, position):
    m, idx = model(position=position, n_kv_head=2), texts(sizes(8, 40) * BLOCK)
    cache, reference = small_cache(m, kind, 3), ShiftedKeys(m)
    seq, other, start, exact = cache.new(), cache.new(), 0, all_logits(m, idx[None, :BLOCK])[0]
    in_chunks(cache, other, idx, [5], exact)
    for n_keep in itertools.cycle((0, 3, 1, 7)):
        while cache.lengths[seq] < BLOCK and start < len(idx):
            part = idx[start:start + min(1 + start % 3, BLOCK - cache.lengths[seq])]
            logits = feed(cache, [seq], part[None])[0]
            assert (logits - reference.feed(part)).abs().max() < 1e-10, start
            start += len(part)
        if start == len(idx):
            break
        n = (BLOCK - n_keep) // 2
        cache.shift(seq, n_keep, n)
        reference.move(lambda p, n_keep=n_keep, n=n: p if p < n_keep else None if p < n_keep + n else p - n)
        assert cache.lengths[seq] == BLOCK - n
    in_chunks(cache, other, idx, [4, 7], exact)


@pytest.mark.parametrize('kind', KINDS)
@torch.inference_mode()
def test_forks_are_shifted_one_by_one(kind):
    """The others keep what they share: keys, and what is remembered of a prompt."""
    m, idx = model(position='rope', n_kv_head=2), texts(5, BLOCK)
    cache, exact = small_cache(m, kind, 4), all_logits(m, idx)
    a = cache.new()
    feed(cache, [a], idx[:1, :13])
    b, c = cache.fork(a), cache.fork(a)
    for seq in (a, b):
        reference = ShiftedKeys(m)
        reference.feed(idx[0, :13])
        reference.move(lambda p: p if p < 2 else None if p < 6 else p - 4)
        cache.shift(seq, 2, 4)
        for new in idx[1, :5].split(2):
            assert (feed(cache, [seq], new[None])[0] - reference.feed(new)).abs().max() < 1e-10
    in_chunks(cache, c, idx[0], [2, 1], exact[0])
    again = cache.new()
    in_chunks(cache, again, idx[0], [14, 2], exact[0])  # a paged cache finds no blocks that were shifted
    cache.free(again)
    for seq in (a, b):
        feed(cache, [seq], idx[2, None, :16 - cache.lengths[seq]])
    again, shorter = cache.new(), torch.cat([idx[0, :2], idx[0, 6:13], idx[1, :5], idx[2, :2]])
    in_chunks(cache, again, shorter, [16], all_logits(m, shorter[None])[0])


@pytest.mark.parametrize('kind', KINDS)
def test_what_cannot_be_shifted_is_refused_and_unchanged(kind):
    for words, how in (('learned positions', dict(position='learned')), ('window of 5', dict(window=5)),
                       ('tokens: ', {})):
        m = model(**(dict(position='rope') | how))
        idx = texts(BLOCK)
        cache, exact = small_cache(m, kind, 2), all_logits(m, idx[None])[0]
        seq = cache.new()
        in_chunks(cache, seq, idx, [9], exact)
        for n_keep, n in ((2, 8), (-1, 2), (0, -1), (0, 10), (1.0, 2), (True, 1)) if not how else ((2, 3),):
            with pytest.raises(ValueError, match=words):
                cache.shift(seq, n_keep, n)
        with pytest.raises(ValueError, match='no sequence'):
            cache.shift(99, 0, 1)
        in_chunks(cache, seq, idx, [1, 4], exact)
        if not how:
            cache.shift(seq, 3, 0)
            in_chunks(cache, seq, idx, [1], exact)
            cache.shift(seq, 10, 5)
            in_chunks(cache, seq, idx, [2], exact)


@pytest.mark.parametrize('bits', [8, 4])
@pytest.mark.parametrize('kind', KINDS)
@torch.inference_mode()
def test_quantised_keys_are_shifted_where_they_are_not_rounded_again(kind, bits):
    m, idx = model(torch.float32, position='rope'), texts(1, BLOCK)
    cache, plain = make_cache(m, kind, 1, bits), make_cache(m, kind, 1)
    for each in (cache, plain):
        feed(each, [each.new()], idx)
    if kind in ('tuple', 'paged'):
        with pytest.raises(ValueError, match='streams or unified'):
            cache.shift(0, 2, 6)
        assert cache.lengths == {0: BLOCK}
        return
    for each in (cache, plain):
        each.shift(0, 2, 6)
    off = (feed(cache, [0], idx[:, :3]) - feed(plain, [0], idx[:, :3])).abs().max()
    assert 0 < off < {8: 0.2, 4: 3}[bits]
    nope = make_cache(model(torch.float32, position='none'), kind, 1, bits)
    feed(nope, [nope.new()], idx)
    nope.shift(0, 2, 6)
    assert nope.lengths == {0: 10}


@pytest.mark.parametrize('unified', [True, False])
@torch.inference_mode()
def test_cells_of_a_rotary_model_compute_what_keys_at_their_positions_give(unified):
    """llama.cpp's operations on a real model: seq_add, seq_div and its context shift."""
    m, idx = model(position='rope', n_kv_head=2), texts(60)
    cells = CellCache(2, 2, 8, 2 * BLOCK, 2, unified, 'float64', 'float64', can_shift=True)
    reference, start = ShiftedKeys(m), 0
    operations = [
        (lambda: context_shift(cells, 0, 3), lambda p: p if p < 3 else None if p < 8 else p - 5),
        (lambda: (cells.seq_rm(0, 0, 4), cells.seq_add(0, -1, -1, -3)), lambda p: None if p < 4 else p - 3),
        (lambda: cells.seq_div(0, 2, -1, 3), lambda p: p if p < 2 else p // 3),
        (lambda: cells.seq_add(0, 1, 3, 1), lambda p: p + 1 if 1 <= p < 3 else p),
    ]
    for (operation, moved), n in zip(operations, (14, 4, 5, 1)):
        for _ in range(n):
            position = 0 if (last := cells.seq_pos_max(0)) is None else last + 1
            layers = cells.place(cells.batch({0: [position]}))
            logits = logits_of(m, idx[None, start:start + 1], layers, slice(None))[0]
            assert (logits - reference.feed(idx[start:start + 1])).abs().max() < 1e-10, start
            start += 1
        operation()
        reference.move(moved)
    layers = cells.place(cells.batch({0: range(cells.seq_pos_max(0) + 1, cells.seq_pos_max(0) + 4)}))
    logits = logits_of(m, idx[None, start:start + 3], layers, slice(None))[-1]
    assert (logits - reference.feed(idx[start:start + 3])).abs().max() < 1e-10


# interrupts

FOLDER = os.path.dirname(kvcache.__file__)


def interrupted(work, n):
    """Run work and interrupt it at the n-th line that runs in kvcache/, but for the lock; False if it ends before."""
    left = [n]

    def trace(frame, event, arg):
        file = frame.f_code.co_filename
        if not file.startswith(FOLDER) or file.endswith('exclusive.py') or frame.f_code.co_name == 'recover':
            return None
        if event == 'line':
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace
    sys.settrace(trace)
    try:
        work()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)


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
        ended = not interrupted(work[what], n)
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

@pytest.mark.parametrize('unified', [True, False])
@torch.inference_mode()
def test_a_saved_sequence_has_its_window_and_its_sinks(tmp_path, unified):
    m, idx = model(torch.float32, position='rope', window=W, n_sink=SINKS), texts(1, 60)
    exact = all_logits(m, idx)[0]

    def cells():
        return CellCache(2, 4, 8, 12 * (1 + unified), 2, unified, n_swa=W, swa_type='standard', n_sink=SINKS)

    def place(c, seq, positions):
        layers = c.place(c.batch({seq: positions}))
        return logits_of(m, idx[:, positions[0]:positions[-1] + 1], layers, slice(None))[-1]
    c = cells()
    for start in range(0, 48, 3):
        place(c, 0, range(start, start + 3))
    c.state_save(tmp_path / 'one', 0)
    c.state_save(tmp_path / 'all')
    other, whole = cells(), cells()
    other.state_load(tmp_path / 'one', 1)
    whole.state_load(tmp_path / 'all')
    held = other.cells_of(1).pos[other.cells_of(1).of(1)]
    assert sorted(held.tolist()) == [0, 1, 43, 44, 45, 46, 47]
    for each, seq in ((other, 1), (whole, 0)):
        for start in range(48, 60, 3):
            assert torch.allclose(place(each, seq, range(start, start + 3)), exact[start + 2], atol=1e-4)
    plain = CellCache(2, 4, 8, 24, 2, unified, n_swa=W, swa_type='standard')
    with pytest.raises(ValueError, match='window'):
        plain.state_load(tmp_path / 'one', 1)


@pytest.mark.parametrize('position, n_kv_head', [('rope', 1), ('rope', 2), ('alibi', 2), ('none', 4)])
@torch.inference_mode()
def test_the_operator_stores_grouped_heads_once_and_returns_them_repeated(position, n_kv_head):
    m, lengths = model(torch.float32, position=position, n_kv_head=n_kv_head), [9, 4]
    idx, rows = texts(2, 12), torch.zeros(32, 2, 2, n_kv_head, 8)
    exact = all_logits(m, idx)

    class Layer:
        def __init__(self, number):
            self.number = number

        def append(self, k, v, positions):
            """One sequence in the rows of self.seq, as a batch of one."""
            start, T = int(positions.q_pos[0]), k.size(2)
            ends = torch.tensor([0, T]), torch.tensor([0, start + T])
            k, v = key_value_cache(k[0].transpose(0, 1), v[0].transpose(0, 1), *ends, torch.tensor([16 * self.seq]),
                                   torch.tensor([start]), T, start + T, rows, num_layer=2, layer_idx=self.number,
                                   num_repeat=4 // n_kv_head)
            assert k.shape == (start + T, 4, 8)
            return k.transpose(0, 1)[None], v.transpose(0, 1)[None], None, self
    layers, starts = [Layer(0), Layer(1)], [0, 0]
    for counts in (lengths, [1, 3], [1, 1], [1, 4]):
        for seq, n in enumerate(counts):
            for layer in layers:
                layer.seq = seq
            part = idx[seq, None, starts[seq]:starts[seq] + n]
            x, _ = m.hidden_states(part, torch.arange(starts[seq], starts[seq] + n), layers)
            starts[seq] += n
            assert torch.allclose(m.lm_head(x)[0, -1], exact[seq, starts[seq] - 1], atol=1e-4)
    assert rows.nbytes == 2 * 2 * 2 * n_kv_head * 8 * 16 * 4  # not n_head
