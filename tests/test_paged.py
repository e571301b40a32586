"""What only the pool of blocks has: prefixes that are found, room that is reserved, several steps in one call."""
import ctypes
import gc
import weakref

import numpy as np
import pytest
import torch
from cache_machine import VOCAB, check, model_of
from conftest import sizes

import decode
from decode.cpu import CPUDecoder
from decode.metadata import NextTokens
from kvcache.blocks import OutOfBlocks
from kvcache.paged import PagedCache

TEXT = list(range(13))
EXECUTORS = decode.EagerDecoder, CPUDecoder


def pool(executor=None, kind='learned', n_blocks=16, page_size=4, seed=0):
    m = model_of(kind, seed)
    return m, PagedCache(m, n_blocks, page_size, decoder=executor and executor(m))


def feed(cache, new):
    """A step of {handle: tokens}, from where the sequences end."""
    return cache.step(list(new), [cache.length(seq) for seq in new], [torch.tensor(text) for text in new.values()])


def exact(m, text):
    """Logits (vocab_size,) behind the last token of a text."""
    return m(torch.tensor([text]), use_cache=False)[0][0, -1].detach()


@pytest.mark.parametrize('executor', EXECUTORS)
def test_a_beginning_that_is_remembered_is_not_computed_again(executor):
    m, p = pool(executor)
    a, b, c = p.new(), p.new(), p.new()
    feed(p, {a: TEXT})
    assert torch.allclose(feed(p, {b: TEXT})[0], exact(m, TEXT), atol=1e-5)
    assert p.records[b].table[:3] == p.records[a].table[:3] and p.records[b].table[3] != p.records[a].table[3]
    assert p.reuse_prefix(c, TEXT[:6] + [5] * 9) == 4 and p.length(c) == 4
    assert torch.allclose(feed(p, {c: [4, 5] + [5] * 9})[0], exact(m, TEXT[:6] + [5] * 9), atol=1e-5)
    with pytest.raises(ValueError, match='has begun already'):
        p.reuse_prefix(a, TEXT)
    for seq in (a, b, c):
        p.free(seq)
    d = p.new()
    assert p.reuse_prefix(d, TEXT) == 12, "freed blocks are remembered until they are used"
    p.truncate(d, 0)
    assert p.reuse_prefix(p.new(), TEXT[:12]) == 8, "never all of the tokens"


@pytest.mark.parametrize('executor', EXECUTORS)
def test_salt_separates(executor):
    m, p = pool(executor, n_blocks=32)
    for salt in ('', 'a', 'b'):
        seq = p.new(salt)
        assert p.reuse_prefix(seq, TEXT) == 0
        feed(p, {seq: TEXT})
        again, fork = p.new(salt), p.fork(seq)
        assert p.reuse_prefix(again, TEXT) == 12
        assert torch.allclose(feed(p, {again: TEXT[12:]})[0], exact(m, TEXT), atol=1e-5)
        p.truncate(fork, 0)
        assert p.reuse_prefix(fork, TEXT) == 12, "a fork has the salt"


def test_only_what_was_computed_is_found(monkeypatch):
    m, p = pool()
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(p.executor, 'execute_model', lambda *args: (_ for _ in ()).throw(MemoryError))
        feed(p, {p.new(): TEXT})
    assert p.reuse_prefix(p.new(), TEXT) == 0


def changes():
    def through_torch(m):
        with torch.no_grad():
            m.transformer.h[0].mlp.c_fc.weight.mul_(1.5)

    def through_data(m):
        for p in m.parameters():
            p.data.copy_(p.data * 1.01)

    def replaced(m):
        m.transformer.h[1].mlp.c_proj = torch.nn.Linear(192, 48, bias=m.config.bias)
    return [through_torch, through_data, replaced]


@pytest.mark.parametrize('executor', EXECUTORS)
@pytest.mark.parametrize('change', changes(), ids=lambda change: change.__name__)
def test_blocks_of_other_weights_are_not_found(executor, change):
    m, p = pool(executor)
    old, version = p.new(), p.version
    feed(p, {old: TEXT})
    change(m)
    new = p.new()
    assert torch.allclose(feed(p, {new: TEXT})[0], exact(m, TEXT), atol=1e-4)
    assert p.version != version and not {*p.records[new].table} & {*p.records[old].table}
    feed(p, {old: [1] * 9})  # with keys of both: its blocks are not remembered from now on
    assert p.reuse_prefix(p.new(), TEXT + [1] * 9) == 12
    assert p.reuse_prefix(p.new(), TEXT + [1]) == 12


def test_weights_that_are_written_unseen_are_found_by_refresh():
    """A write through .data that leaves the probed values as they are; and a change in the middle of a sequence."""
    m, p = pool(CPUDecoder)
    seq = p.new()
    feed(p, {seq: TEXT})
    m.transformer.h[0].mlp.c_fc.weight.data[3, 3] += 5
    assert p.reuse_prefix(p.new(), TEXT) == 12
    p.executor.refresh()
    assert p.reuse_prefix(p.new(), TEXT) == 0
    other = p.new()
    assert torch.allclose(feed(p, {other: TEXT})[0], exact(m, TEXT), atol=1e-5)
    with torch.no_grad():
        m.transformer.ln_f.weight.mul_(2)  # keys and values stay the same
    before = feed(p, {other: [5]})[0]
    p.executor.refresh()
    p.truncate(other, 13)
    assert torch.allclose(feed(p, {other: [5]})[0], exact(m, TEXT + [5]), atol=1e-5) and not torch.allclose(
        before, exact(m, TEXT + [5]), atol=1e-5)


def test_without_room_nothing_changes():
    m, p = pool(n_blocks=5)
    a, b = p.new(), p.new()
    feed(p, {a: TEXT[:7], b: TEXT[:3]})
    before = [record.table[:] for record in p.records.values()], list(p.blocks.free)
    with pytest.raises(OutOfBlocks, match='blocks are needed'):
        feed(p, {b: [1, 2], a: [1] * 10})
    assert before == ([record.table for record in p.records.values()], list(p.blocks.free))
    assert p.reserve([a, b], 30) == 3 and p.n_free == 0
    assert p.reserve([a, b], 0) == 0 and p.n_free == 2
    check(p, {a: 7, b: 3})


@pytest.mark.parametrize('kind', ['learned', 'rope window sinks', 'alibi window'])
def test_what_is_reserved_is_there(kind):
    """So many steps find room though another sequence takes all other blocks; what is not used is given back."""
    for seed in range(sizes(4, 30)):
        torch.manual_seed(seed)
        m, p = pool(kind=kind, n_blocks=14, seed=seed)
        seqs = [p.new() for _ in range(3)]
        lengths = torch.randint(1, 9, (3,)).tolist()
        feed(p, {seq: [2] * n for seq, n in zip(seqs, lengths)})
        if seed % 2:
            seqs.append(p.fork(seqs[0]))
            lengths.append(lengths[0])
        n = p.reserve(seqs, int(torch.randint(1, 12, ())))
        greedy, taken = p.new(), 0
        while p.n_free and taken < 30:
            try:
                taken += len(feed(p, {greedy: [3]}))
            except OutOfBlocks:
                break
        assert n
        for step in range(n):
            p.step(seqs, [length + step for length in lengths], torch.full((len(seqs), 1), 4))
        check(p, {seq: length + n for seq, length in zip(seqs, lengths)} | {greedy: p.length(greedy)})
        p.reserve(seqs, 0)
        for record in (p.records[seq] for seq in seqs):
            assert len(record.table) == -(-record.length // 4)


def test_a_hit_through_a_window_needs_the_sinks_and_the_last_window():
    m, p = pool(kind='rope window sinks', n_blocks=20)  # window 6, 3 sinks, blocks of 4
    text = [*range(24), 1]
    seq = p.new()
    feed(p, {seq: text})
    assert p.records[seq].table.count(None) > 1
    p.free(seq)
    again = p.new()
    assert p.reuse_prefix(again, text) == 24 and p.records[again].table.count(None) > 1
    assert torch.allclose(feed(p, {again: text[24:]})[0], exact(m, text), atol=1e-5)


class Fed:
    """
    A `Callback` in Python that writes given rows of tokens, int64 (n, B), and returns 0 behind the last one. logits: of
    each step.
    """

    def __init__(self, rows):
        self.rows, self.shape, self.logits = rows, (rows.shape[1], VOCAB), []
        self.call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)(self.draw)
        self.address = ctypes.cast(self.call, ctypes.c_void_p).value

    def draw(self, data, logits_at, tokens_at, thread, n_threads):
        if thread:
            return 1
        at = ctypes.cast(logits_at, ctypes.POINTER(ctypes.c_float))
        self.logits.append(torch.from_numpy(np.ctypeslib.as_array(at, self.shape).copy()))
        row = self.rows[len(self.logits)] if len(self.logits) < len(self.rows) else np.zeros(self.shape[0], np.int64)
        np.ctypeslib.as_array(ctypes.cast(tokens_at, ctypes.POINTER(ctypes.c_int64)), row.shape)[:] = row
        return len(self.logits) < len(self.rows)


def decode_several(p, seqs, fed):
    """All rows of a `Fed`, in as many calls as it takes. Returns how many."""
    n_calls = 0
    while len(fed.logits) < len(fed.rows):
        done = len(fed.logits)
        n = p.reserve(seqs, len(fed.rows) - done)
        tokens = np.full((max(n, 1) + 1, len(seqs)), -1, np.int64)
        tokens[0] = fed.rows[done]
        last = p.decode_steps(seqs, NextTokens(fed, np.zeros(1, np.int64), tokens))
        assert torch.equal(last, fed.logits[-1])
        n_calls += 1
    return n_calls


def rows_of(seqs, n, first=0):
    return (np.arange(first, first + n)[:, None] + np.arange(len(seqs))) % VOCAB


@pytest.mark.parametrize('executor', EXECUTORS)
@pytest.mark.parametrize('kind', ['learned', 'rope window sinks', 'alibi window'])
def test_several_decode_steps_are_single_steps(kind, executor):
    """The same logits, tables and remembered blocks, before and after a fork."""
    (m, p), (_, q) = (pool(executor, kind, 32) for _ in range(2))
    for each in (p, q):
        seqs = [each.new(), each.new()]
        feed(each, {seqs[0]: TEXT[:7], seqs[1]: TEXT[:3]})
    for round_, n in enumerate((1, 2, 9, 4)):
        fed = Fed(rows_of(seqs, n, round_))
        n_calls = decode_several(p, seqs, fed)
        assert n_calls == n or executor is CPUDecoder and n_calls <= n // 2 + 2
        for row, of_step in zip(fed.rows, fed.logits, strict=True):
            assert torch.equal(feed(q, dict(zip(seqs, row[:, None]))), of_step)
        for cache in (p, q):
            cache.reserve(seqs, 0)
        for seq in seqs:
            a, b = p.records[seq], q.records[seq]
            assert (a.length, a.tokens, [x is None for x in a.table]) == (b.length, b.tokens,
                                                                         [x is None for x in b.table])
        check(p, {seq: record.length for seq, record in q.records.items()})
        if not m.config.window:
            assert {x.tokens for x in p.blocks.block_with} == {x.tokens for x in q.blocks.block_with}
        if round_ == 1:
            seqs = [(p.fork(seq), q.fork(seq))[0] for seq in seqs] + seqs


def test_decode_steps_before_one_that_fails_are_kept():
    m, p = pool(CPUDecoder)
    seqs = [p.new(), p.new()]
    feed(p, {seqs[0]: TEXT[:7], seqs[1]: TEXT[:3]})
    fed = Fed(rows_of(seqs, 40))
    fed.rows[6, 1] = VOCAB
    with pytest.raises(ValueError, match='token ids'):
        decode_several(p, seqs, fed)
    check(p, {seqs[0]: 13, seqs[1]: 9})
    text = TEXT[:7] + fed.rows[:6, 0].tolist()
    assert p.records[seqs[0]].tokens == text
    assert torch.allclose(feed(p, {seqs[0]: [5]})[0], exact(m, text + [5]), atol=1e-5)


def test_next_tokens_that_do_not_fit_are_refused():
    m, p = pool(CPUDecoder)
    seq, rows = p.new(), np.zeros((5, 3), np.int64)
    feed(p, {seq: TEXT[:7]})
    for wrong in (rows[:1], rows[:, :1], rows[0], rows.astype(np.int32)):
        with pytest.raises(ValueError, match='tokens must be a contiguous int64 array'):
            NextTokens(Fed(rows), rows, wrong)
    with pytest.raises(ValueError, match='one token'):
        p.decode_steps([seq], NextTokens(Fed(rows), rows, rows))
    with pytest.raises(ValueError, match='feed those without tokens'):
        p.decode_steps([p.new()], NextTokens(Fed(rows), rows, rows[:, :1].copy()))


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
