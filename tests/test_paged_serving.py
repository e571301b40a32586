"""What serving asks of `PagedCache` beyond `Cache`: salts, prefixes that are looked for first, room, other rows."""
import numpy as np
import pytest
import torch
from reference_executor import ReferenceExecutor
from test_paged import feed, full_logits, model

from decode.cpu import CPUDecoder
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
    p.blocks.recover()
    before = p.blocks.tables[seq][:]
    feed(p, {other: TEXT})
    assert not set(before) & set(p.blocks.tables[other])


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


@pytest.mark.parametrize('how', [dict(), dict(window=5, n_sink=2, position='rope')])
def test_a_decode_step_is_a_step(how):
    """The same bits and lengths; a token or position that does not fit changes nothing."""
    m, p = pool(CPUDecoder, **how)
    _, q = pool(CPUDecoder, m)
    for each in (p, q):
        a, b = each.new(), each.new()
        feed(each, {a: TEXT[:7], b: TEXT[:3]})
    for token in range(9):
        expected = feed(q, {b: [token], a: [token + 1]})
        assert torch.equal(p.decode_step([b, a], np.array([token, token + 1])), expected)
        assert (p.lengths, p.tokens, p.blocks.length) == (q.lengths, q.tokens, q.blocks.length)
        with pytest.raises(ValueError, match='token ids'):
            p.decode_step([b, a], np.array([token, 29]))
        assert (p.lengths, p.tokens) == (q.lengths, q.tokens)


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
