"""What serving asks of `PagedCache` beyond `Cache`: salts, prefixes that are looked for first, room, other rows."""
import ctypes
import gc
import itertools
import math
import weakref

import numpy as np
import pytest
import torch
from conftest import sizes
from interrupts import interrupted
from reference_executor import ReferenceExecutor
from test_cache_endless import in_a_cache
from test_paged import feed, full_logits, model

from decode.cpu import CPUDecoder
from decode.metadata import NextTokens
from generation import Work
from kvcache.paged import PagedCache


def pool(decoder=None, m=None, n_blocks=16, **how):
    m = m or model(**how)
    return m, PagedCache(m, n_blocks, 4, decoder=decoder and decoder(m))


TEXT = list(range(13))


@pytest.mark.parametrize('decoder', [None, ReferenceExecutor, CPUDecoder])
@torch.inference_mode()
def test_salt_separates(decoder):
    m, p = pool(decoder)
    for salt in ('', 'a', 'b'):
        seq = p.new(salt)
        assert p.reuse_prefix(seq, TEXT) == 0
        feed(p, {seq: TEXT})
        again, fork = p.new(salt), p.fork(seq)
        assert p.reuse_prefix(again, TEXT) == 12 and p.blocks.tables[again] == p.blocks.tables[seq][:3]
        assert torch.allclose(feed(p, {again: TEXT[12:]})[0], full_logits(m, TEXT), atol=1e-5)
        for each in (fork, again):
            p.truncate(each, 0)
        assert p.reuse_prefix(fork, TEXT) == 12, "a fork has the salt"
        for each in (seq, again, fork):
            p.free(each)
    assert not p.salts and not p.blocks.salts and p.n_free == 16


@torch.inference_mode()
def test_a_salt_outlives_failed_steps_and_recovery():
    m, p = pool()
    seq, other = p.new(), p.new('a')
    feed(p, {seq: TEXT})
    with pytest.raises(ValueError, match='out of context'):
        feed(p, {other: [1] * 33})
    with pytest.raises(ValueError, match='blocks are needed'):
        p.step(Work([p.new() for _ in range(3)], [0] * 3, torch.ones(3, 32, dtype=torch.int64)))
    before = list(p.blocks.free)
    p.blocks.recover()
    assert list(p.blocks.free) == before != sorted(before)  # the next one to use is the same
    before = p.blocks.tables[seq][:]
    feed(p, {other: TEXT})
    assert not set(before) & set(p.blocks.tables[other])


@torch.inference_mode()
def test_nothing_is_released_where_no_blocks_are_held_for_later_tokens():
    m, p = pool(ReferenceExecutor)
    seq, new, freed = p.new(), p.new(), p.new()
    feed(p, {seq: TEXT})
    p.free(freed)
    kept = p.blocks.runs[seq]
    assert p.release_ahead([seq, new]) == 0 and p.blocks.runs[seq] is kept and len(p.blocks.tables[seq]) == 4
    with pytest.raises(ValueError, match='there is no sequence 2'):
        p.release_ahead([freed])


def test_weights_are_not_read_for_each_sequence_that_begins():
    """Where the prefix is looked for first, neither this nor the step compares all bytes of the weights."""
    m, p = pool(ReferenceExecutor)
    notice, calls = p.decoder.notice_changes, []
    p.decoder.notice_changes = lambda thorough=False: calls.append(thorough) or notice(thorough)
    for n in (0, 12):
        seq = p.new()
        assert p.reuse_prefix(seq, TEXT) == n
        feed(p, {seq: TEXT[n:]})
        assert calls and not any(calls)
    with torch.no_grad():
        m.lm_head.weight.mul_(2)
    seq = p.new()
    assert p.reuse_prefix(seq, TEXT) == 0, "new weights are noticed"
    p.truncate(seq, 0)
    feed(p, {p.new(): TEXT})
    assert any(calls)


def rows_of(seqs, n, first=0):
    """The tokens of n steps of these sequences, int64 (n, B)."""
    return (np.arange(first, first + n)[:, None] + np.arange(len(seqs))) % 29


class Fed:
    """
    A `Callback` in Python that writes given rows of tokens, int64 (n, B), and returns 0 behind the last one. logits: of
    each step. event: called in each call, with its number.
    """

    def __init__(self, rows, vocab_size=29, event=lambda number: None):
        self.rows, self.shape, self.logits, self.event = rows, (rows.shape[1], vocab_size), [], event
        self.call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)(self.draw)
        self.address = ctypes.cast(self.call, ctypes.c_void_p).value

    def draw(self, data, logits_at, tokens_at, thread, n_threads):
        if thread:
            return 1
        at = ctypes.cast(logits_at, ctypes.POINTER(ctypes.c_float))
        self.logits.append(torch.from_numpy(np.ctypeslib.as_array(at, self.shape).copy()))
        row = self.rows[len(self.logits)] if len(self.logits) < len(self.rows) else np.zeros(self.shape[0], np.int64)
        np.ctypeslib.as_array(ctypes.cast(tokens_at, ctypes.POINTER(ctypes.c_int64)), row.shape)[:] = row
        self.event(len(self.logits))
        return len(self.logits) < len(self.rows)

    def steps(self, n=None):
        """`NextTokens` for n steps, or some more than there are rows."""
        tokens = np.full(((n or len(self.rows) + 9) + 1, self.shape[0]), -1, np.int64)
        tokens[0] = self.rows[0]
        return NextTokens(self, np.zeros(1, np.int64), tokens)


def decode_several(cache, seqs, fed, n=None):
    return cache.decode_steps(seqs, fed.steps(n))


@pytest.mark.parametrize('decoder', [CPUDecoder, ReferenceExecutor])
@pytest.mark.parametrize('how', [dict(), dict(window=5, n_sink=2, position='rope'), dict(window=3)], ids=str)
def test_several_decode_steps_are_single_steps(how, decoder):
    """The same logits, tables and remembered blocks, before and after a fork."""
    m, p = pool(decoder, n_blocks=32, **how)
    _, q = pool(decoder, m, 32)
    for each in (p, q):
        seqs = [each.new(), each.new()]
        feed(each, {seqs[0]: TEXT[:7], seqs[1]: TEXT[:3]})
    for round_, n in enumerate((1, 2, 9, 4)):
        fed = Fed(rows_of(seqs, n, round_))
        last = decode_several(p, seqs, fed, n if round_ == 3 else None)
        for row, of_step in zip(fed.rows, fed.logits, strict=True):
            assert torch.equal(feed(q, dict(zip(seqs, row[:, None]))), of_step)
        assert torch.equal(last, fed.logits[-1])
        assert (p.lengths, p.tokens, p.blocks.length) == (q.lengths, q.tokens, q.blocks.length)
        for cache in (p, q):
            tables = cache.blocks.tables.values()
            held = [block for table in tables for block in table if block is not None]
            assert cache.blocks.references == [held.count(block) for block in range(32)]
            assert {*held, *cache.blocks.free} == {*range(32)} and not {*held} & {*cache.blocks.free}
        for seq in seqs:  # room for up to 2 * block_size more tokens
            a, b = p.blocks.tables[seq], q.blocks.tables[seq]
            assert len(b) <= len(a) <= len(b) + 2 and (not how or [x is None for x in a] == [x is None for x in b])
        if not how:
            assert {x.tokens for x in p.blocks.block_with} == {x.tokens for x in q.blocks.block_with}
        if round_ == 2:
            n_ahead = sum(len(p.blocks.tables[seq]) - len(q.blocks.tables[seq]) for seq in seqs)
            assert p.release_ahead(seqs) == n_ahead and (n_ahead > 0 or how)
            assert [*map(len, p.blocks.tables.values())] == [*map(len, q.blocks.tables.values())]
        if round_ == 1:  # there are blocks for later tokens, which a fork does not share
            seqs = [(p.fork(seq), q.fork(seq))[0] for seq in seqs] + seqs


def test_next_tokens_that_do_not_fit_are_refused():
    m, p = pool(CPUDecoder)
    seq, rows = p.new(), np.zeros((5, 3), np.int64)
    feed(p, {seq: TEXT[:7]})
    for wrong in (rows[:1], rows[:, :1], rows[0], rows.astype(np.int32)):
        with pytest.raises(ValueError, match='tokens must be a contiguous int64 array'):
            NextTokens(Fed(rows), rows, wrong)
    steps = Fed(rows_of([seq], 3)).steps()
    with pytest.raises(ValueError, match='input_ids must be'):
        p.decode_steps([seq], NextTokens(steps.draw, rows, rows))
    p.decode_steps([seq], steps)
    with pytest.raises(ValueError, match='drawn by an earlier call'):
        p.decode_steps([seq], steps)
    assert len(p.tokens[seq]) == 10 and not rows.any()


def test_several_decode_steps_are_few_calls():
    m, p = pool(CPUDecoder)
    seqs, calls = [p.new(), p.new()], []
    feed(p, {seqs[0]: TEXT[:7], seqs[1]: TEXT[:3]})
    whole = p.decoder.execute_model
    p.decoder.execute_model = lambda *args: calls.append(args) or whole(*args)
    fed = Fed(rows_of(seqs, 20))
    decode_several(p, seqs, fed)
    assert len(fed.logits) == 20 and 3 <= len(calls) <= 5  # block_size is 4; a thread count may be on trial


@pytest.mark.parametrize('n_blocks', [9, 10, 11, 12])
def test_a_second_block_ahead_leaves_one_for_each_sequence(n_blocks):
    m, p = pool(CPUDecoder, n_blocks=n_blocks)
    seqs, ahead, whole = [p.new(), p.new()], [], p.decoder.execute_model
    feed(p, {seqs[0]: TEXT[:7], seqs[1]: TEXT[:3]})

    def execute_model(ids, positions, *more):
        ahead.append(max(len(p.blocks.tables[seq]) - (n + 4) // 4 for seq, n in zip(seqs, positions.tolist())))
        assert ahead[-1] <= 1 or p.n_free >= len(seqs)
        return whole(ids, positions, *more)
    p.decoder.execute_model = execute_model
    decode_several(p, seqs, Fed(rows_of(seqs, 12)))  # it could go on; 9 blocks have tokens in the end
    assert p.lengths == {seqs[0]: 19, seqs[1]: 15} and max(ahead) == 2


SLIDING = dict(window=5, n_sink=2, position='rope')  # never out of room, and its context has no end


@pytest.mark.parametrize('decoder', [CPUDecoder, ReferenceExecutor])
@pytest.mark.parametrize('how, fault', [({}, 'token'), ({}, 'room'), ({}, 'context'), ({}, 'numbers'),
                                        (SLIDING, 'token')], ids=str)
def test_decode_steps_before_one_that_fails_are_kept(how, fault, decoder):
    m = model(**how)
    if fault == 'numbers':
        with torch.no_grad():
            m.transformer.wpe.weight[13] = math.nan
    _, p = pool(decoder, m, n_blocks=5 if fault == 'room' else 16)
    seqs = [p.new(), p.new()]
    feed(p, {seqs[0]: TEXT[:7], seqs[1]: TEXT[:3]})
    fed = Fed(rows_of(seqs, 40))
    if fault == 'token':
        fed.rows[6, 1] = 29
    with pytest.raises(ValueError, match='token ids|blocks are needed|out of context|not numbers'):
        decode_several(p, seqs, fed)
    n = len(fed.logits)
    assert p.lengths[seqs[0]] == 7 + n and p.lengths[seqs[1]] == 3 + n and n > 2
    assert n == {'token': 6, 'room': 5, 'context': 25, 'numbers': 6}[fault]
    for seq, first, column in zip(seqs, (7, 3), (0, 1)):
        text = TEXT[:first] + fed.rows[:n, column].tolist()
        assert p.tokens[seq] == text and p.blocks.length[seq] == len(text)
        if fault == 'token' or fault == 'numbers' and column:
            new = feed(p, {seq: [5]})
            assert torch.allclose(new[0], full_logits(m, text + [5]), atol=1e-5)


@pytest.mark.parametrize('how', [{}, SLIDING], ids=str)
def test_after_an_interrupt_at_any_line_of_decode_steps_the_next_ones_are_exact(how):
    m = model(**how)
    executor, rows = ReferenceExecutor(m), rows_of([0, 1], 6)
    for n in itertools.count(1, sizes(11, 1)):
        p = PagedCache(m, 16, 4, decoder=executor)
        seqs = [p.new(), p.new()]
        feed(p, {seqs[0]: TEXT[:7], seqs[1]: TEXT[:3]})
        was_interrupted = interrupted(lambda: decode_several(p, seqs, Fed(rows)), n, in_a_cache)  # noqa: B023
        done = [p.lengths[seq] - n_first for seq, n_first in zip(seqs, (7, 3))]
        for seq, n_first, n_done, column in zip(seqs, (7, 3), done, (0, 1)):
            text = TEXT[:n_first] + rows[:max(0, n_done), column].tolist()
            if p.lengths[seq] == 0 and how:  # its window was gone
                feed(p, {seq: text})
            assert p.tokens[seq] == text and p.blocks.length[seq] == len(text)
            new = feed(p, {seq: [5]})
            assert torch.allclose(new[0], full_logits(m, text + [5]), atol=1e-5)
        if not was_interrupted:
            assert done == [6, 6] and n > 100
            return


@pytest.mark.parametrize('decoder', [CPUDecoder, ReferenceExecutor])
def test_weights_that_change_between_decode_steps_leave_nothing_remembered(decoder):
    """Nothing is drawn for the new weights, because their step may read keys of the old ones."""
    m, p = pool(decoder)
    seq = p.new()
    feed(p, {seq: TEXT[:4]})
    assert len(p.blocks.block_with) == 1

    def change(number):
        if number == 6:
            with torch.no_grad():
                m.transformer.ln_f.weight.mul_(2)  # the keys and values stay the same
    fed = Fed(rows_of([seq], 9), event=change)
    last = decode_several(p, [seq], fed)
    assert len(fed.logits) == 6 and p.tokens[seq] == TEXT[:4] + fed.rows[:6, 0].tolist() and not p.blocks.block_with
    assert torch.allclose(last[0], full_logits(m, p.tokens[seq] + [int(fed.rows[6, 0])]), atol=1e-5)


def test_prefixes_are_of_new_sequences():
    m, p = pool()
    seq = p.new()
    feed(p, {seq: TEXT})
    with pytest.raises(ValueError, match='has begun already'):
        p.reuse_prefix(seq, TEXT)


@pytest.mark.parametrize('how', [dict(), dict(window=5, n_sink=2, position='rope')])
def test_missing_blocks_are_those_that_a_step_takes(how):
    m, p = pool(ReferenceExecutor, **how)
    seq, forks = p.new(), []
    for n in (3, 1, 1, 4, 5, 1, 1, 6, 1):
        missing, free = p.n_missing(seq, n), p.n_free
        feed(p, {seq: [1] * n})
        assert p.n_free == free - missing
        if n == 4:
            forks.append(p.fork(seq))  # the last block is shared from now on
        if len(forks) == 1 and n == 6:
            p.free(forks.pop())


@pytest.mark.parametrize('decoder', [CPUDecoder])
@pytest.mark.parametrize('how', [dict(), dict(window=8, position='alibi')])
@torch.inference_mode()
def test_logits_of_all_tokens_of_a_text(decoder, how):
    m, p = pool(decoder, **how)
    a, b = p.new(), p.new()
    feed(p, {b: [5, 6, 7]})
    logits = p.step(Work([a, b], [0, 3], [torch.tensor(TEXT[:9]), torch.tensor([8])]), wanted=[*range(9), 9])
    expected = [full_logits(m, TEXT[:i + 1]) for i in range(9)] + [full_logits(m, [5, 6, 7, 8])]
    assert torch.allclose(logits, torch.stack(expected), atol=1e-5)
    assert torch.equal(feed(p, {a: TEXT[9:]})[0], p.step(Work([a], [9], [torch.tensor(TEXT[9:])]), wanted=[3])[0])


def test_logits_of_all_tokens_are_refused_where_they_are_not_computed():
    m, p = pool(ReferenceExecutor)
    feed(p, {p.new(): TEXT})
    with pytest.raises(ValueError, match='remembered'):
        p.step(Work([p.new()], [0], [torch.tensor(TEXT)]), wanted=[0])
    m, p = pool()
    with pytest.raises(ValueError, match='take a decoder'):
        p.step(Work([p.new()], [0], [torch.tensor(TEXT)]), wanted=[0])


def test_a_pool_is_freed_without_the_garbage_collector():
    m, p = pool(CPUDecoder)
    seqs = [p.new(), p.new()]
    feed(p, {seqs[0]: TEXT[:7], seqs[1]: TEXT[:3]})
    decode_several(p, seqs, Fed(rows_of(seqs, 3)))
    seen = weakref.ref(p.blocks), weakref.ref(p)
    gc.disable()
    try:
        del p
        assert [each() for each in seen] == [None, None]
    finally:
        gc.enable()
