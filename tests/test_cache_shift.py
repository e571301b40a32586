"""Sequences that are shifted in every cache: keys that stay, turned to their new positions."""
import itertools

import pytest
import torch
from conftest import sizes
from sliding import BLOCK, ShiftedKeys, all_logits, feed, in_chunks, model, small_cache, texts

from kvcache import KINDS, make_cache
from kvcache.cell_cache import CellCache
from kvcache.placement import logits_of
from kvcache.streams import context_shift


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
