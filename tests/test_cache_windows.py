"""Caches of models with a window: going back, failing steps, interrupts, states, and what is freed behind a window."""

import pytest
import torch
from conftest import sizes
from sliding import SINKS, W, all_logits, feed, in_chunks, model, streaming, texts
from test_same_bits import model_of
from test_same_bits import texts as random_texts

from decode.cpu import CPUDecoder
from generation import Work
from kvcache import KINDS, block_tables
from kvcache.cell_cache import CellCache
from kvcache.paged import PagedCache, PagedMetadata, execute_model, n_blocks_for
from kvcache.placement import logits_of


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
    monkeypatch.setattr(block_tables, 'logits_of',
                        lambda m, idx, *how: numbers.append(idx.numel()) or logits_of(m, idx, *how))
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
@pytest.mark.parametrize('alike', [False, True], ids=['first of its kind', 'like the step before'])
@pytest.mark.parametrize('with_decoder', [False, True], ids=['eager', 'decoder'])
def test_a_step_uses_the_blocks_that_its_sequences_free_in_any_order(with_decoder, alike):
    """The first sequence needs the block that the window of the second one has passed."""
    m = model_of(dict(n_embd=24, n_head=4, position='rope', window=6))
    decoder = CPUDecoder(m, threads=1) if with_decoder else None
    ids, logits = random_texts(2, 10, 0), []
    for n_blocks in (4, 9):  # just enough, and enough for all
        cache = PagedCache(m, n_blocks, 4, 'float32', decoder)
        first, second = cache.new(), cache.new()
        for seq, n in ((first, 4 - alike), (second, 9 - alike)):
            cache.step(Work([seq], [0], torch.tensor([ids[seq][:n]])))
        for starts in [[3, 8]] * alike + [[4, 9]]:
            new = [[ids[seq][start]] for seq, start in zip((first, second), starts)]
            logits.append(cache.step(Work([first, second], starts, torch.tensor(new))))
        assert cache.n_free == n_blocks - 4
    tolerance = 0 if with_decoder else 1e-5
    torch.testing.assert_close(logits[-1], logits[len(logits) // 2 - 1], atol=tolerance, rtol=tolerance)


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
        return execute_model(m, idx[[50, 21]], torch.tensor([50, 21]), pool.layers, PagedMetadata(**metadata | changed))
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
