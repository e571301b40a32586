"""
All caches, executors and kinds of models under random operations: the logits are those of a float64 judge that has no
cache, and on the compiled step they have the bits that each text gives alone.
"""
import itertools
import math
import os
from functools import partial

import pytest
import torch
from cache_machine import MODELS, N_SEQ, VOCAB, Machine, cache_of, check, model_of
from conftest import WEIGHTS, sizes
from oracle import Oracle

import decode
import kvcache
from decode import cpu
from decode.cpu import CPUDecoder
from decode.kernel.threads import n_cores
from kvcache import storage
from kvcache.contiguous import cache_for
from model import GPT, GPTConfig

KINDS = sorted(kvcache.KINDS)


def seeds(kind, model, n):
    """n seeds of one case: each has its own, so that the quick run makes other choices in each cache and model."""
    first = 100 * (len(MODELS) * KINDS.index(kind) + list(MODELS).index(model))
    return range(first, first + n)


class Alone:
    """The logits of texts, each computed token by token by the decoder in its tuple, and kept."""

    def __init__(self, decoder):
        self.decoder, self.known = decoder, {}

    def __call__(self, text):
        n = len(text)
        while n and tuple(text[:n]) not in self.known:
            n -= 1
        cache = self.known[tuple(text[:n])][1] if n else None
        for i in range(n, len(text)):
            cache = cache and [layer.clone() for layer in cache]
            logits, cache = self.decoder(torch.tensor([text[i:i + 1]]), cache)
            self.known[tuple(text[:i + 1])] = logits[0, 0], cache
        return self.known[tuple(text)][0]


@pytest.mark.parametrize('model', MODELS)
@pytest.mark.parametrize('kind', KINDS)
def test_in_float64_every_cache_gives_the_logits_of_a_text_without_a_cache(kind, model):
    for seed in seeds(kind, model, sizes(1, 12)):
        m = model_of(model, seed, torch.float64)
        decoder = decode.EagerDecoder(m) if seed % 2 else None
        machine = Machine(cache_of(kind, m, decoder=decoder), seed, oracle=Oracle(m))
        machine.run(120)
        machine.end()


@pytest.mark.parametrize('model', MODELS)
@pytest.mark.parametrize('kind', KINDS)
def test_on_the_compiled_step_every_token_has_the_bits_that_its_text_gives_alone(kind, model):
    for seed in seeds(kind, model, sizes(1, 9)):
        weights, m = WEIGHTS[(seed // 100 + seed) % len(WEIGHTS)], model_of(model, seed)
        decoder = CPUDecoder(m, weights, min(2, n_cores()))
        alone, n_compared = Alone(CPUDecoder(m, weights, 1)), []

        def judge(handle, text, logits):
            n_compared.append(handle)
            assert torch.equal(logits, alone(text)), (handle, len(text))
        cache = cache_of(kind, m, decoder=decoder)
        assert cache.executor is decoder
        machine = Machine(cache, seed, judge, Oracle(m) if weights == 'float32' else None, shared=range(20))
        machine.run(sizes(100, 150))
        assert len(n_compared) > 20
        machine.end()


@pytest.mark.parametrize('bits', [8, 4])
@pytest.mark.parametrize('model', sizes(['learned', 'rope window sinks'], MODELS))
def test_rounded_numbers_are_the_same_in_every_cache(model, bits):
    """
    A position is rounded once, whatever happens to it: the same operations give the same logits in all caches. In
    PyTorch the model is in float64, in which no number is so near to a border that another batch rounds it otherwise.
    """
    for seed in range(sizes(1, 4)):
        for how in (dict(n_embd=128), dict(n_embd=48)):  # 32 and 12 channels a head
            exact, m = (model_of(model, seed, dtype, **how) for dtype in (torch.float64, torch.float32))
            decoder, compiled = CPUDecoder(m), bits == 8 and m.config.head_dim == 32
            assert all((cache_of(kind, m, bits, decoder).executor is decoder) == compiled for kind in KINDS)
            for each, executor in [(exact, None)] + [(m, decoder)] * compiled:
                logs = []
                for kind in KINDS:
                    machine = Machine(cache_of(kind, each, bits, executor), seed, cuts_windows=False)
                    machine.run(sizes(40, 80))
                    logs.append(torch.cat(machine.log))
                    assert torch.equal(logs[0], logs[-1]) if executor else torch.allclose(
                        logs[0], logs[-1], atol=1e-6), kind


@pytest.mark.parametrize('kind', KINDS)
def test_eight_bits_are_close_and_four_bits_less(kind):
    m, text = model_of('rope', 3, n_embd=128), torch.randint(VOCAB, (1, 30))
    exact, errors = m(text)[0][:, -1], []
    for bits in (8, 4):
        cache = cache_of(kind, m, bits)
        errors.append((cache.step([cache.new()], [0], text) - exact).abs().max().item())
    assert 0 < errors[0] < errors[1] / 4 < 0.2


@pytest.mark.parametrize('model', ['learned', 'rope', 'rope window sinks', 'alibi window'])
@pytest.mark.parametrize('kind', [*KINDS, 'tuples'])
def test_a_step_that_fails_leaves_each_sequence_with_its_first_tokens(kind, model, monkeypatch):
    """The executor fails at its first call of the step, or at its second where a window makes several of one."""
    m = model_of(model, 1, torch.float64)
    cache, oracle = cache_of(kind, m), Oracle(m)
    machine, run = Machine(cache, 4, oracle=oracle), cache.executor.execute_model
    for n_calls in sizes(6, 30) * [0, 1]:
        machine.run(6)
        starts = {handle: machine.choose.randint(0, len(text)) for handle, text in machine.texts.items()
                  if None not in text and len(text) < machine.most - 9}
        starts = {handle: n for handle, n in starts.items() if cache.holds(cache.records[handle], n)}
        if not starts:
            continue
        calls = []

        def fail(*args):
            calls.append(args)
            if len(calls) > n_calls * bool(m.config.window):
                raise MemoryError
            return run(*args)
        monkeypatch.setattr(cache.executor, 'execute_model', fail)
        with pytest.raises(MemoryError):
            cache.step(list(starts), list(starts.values()), torch.ones(len(starts), 9, dtype=torch.int64))
        monkeypatch.undo()
        for handle, start in starts.items():
            n = cache.length(handle)
            assert n == start or n == 0 and m.config.window
            del machine.texts[handle][n:]
            oracle.truncate(handle, n)
    machine.end()


@pytest.mark.parametrize('kind', [*KINDS, 'tuples'])
@pytest.mark.parametrize('compiled', [False, True])
def test_broken_weights_leave_zeros_and_no_tokens(kind, compiled):
    m = model_of('rope', 2)
    cache = cache_of(kind, m, decoder=CPUDecoder(m) if compiled else None)
    seqs, text = [cache.new(), cache.new()], torch.randint(VOCAB, (2, 20))
    expected = cache.step(seqs, [0, 0], text)
    with torch.no_grad():
        before = m.transformer.h[0].mlp.c_fc.weight.clone()
        m.transformer.h[0].mlp.c_fc.weight.fill_(float('nan'))
    late = cache.new()
    with pytest.raises(ValueError, match='not numbers'):
        cache.step([late], [0], text[:1, :3])
    check(cache, {seq: 0 for seq in (*seqs, late)})
    assert all(not stored.count_nonzero() for layer in cache.layers
               for stored in (layer.caches if kind == 'tuples' else layer.tensors()))
    with torch.no_grad():
        m.transformer.h[0].mlp.c_fc.weight.copy_(before)
    assert torch.allclose(cache.step(seqs, [0, 0], text), expected, atol=1e-5)


@pytest.mark.parametrize('kind', KINDS)
def test_what_does_not_fit_is_refused_and_changes_nothing(kind):
    m = model_of('learned')
    cache = cache_of(kind, m)
    seq, other = cache.new(), cache.new()
    cache.step([seq], [0], torch.tensor([[1, 2, 3]]))
    cases = [
        (([seq], [4], torch.tensor([[1]])), 'feed it from 3'), (([99], [0], torch.tensor([[1]])), 'no sequence'),
        (([seq, seq], [3, 3], torch.tensor([[1], [1]])), 'each named once'),
        (([seq], [3], torch.tensor([[VOCAB]])), 'token ids'), (([seq], [3], torch.tensor([[-1]])), 'token ids'),
        (([seq], [3], torch.ones(1, 38, dtype=torch.int64)), 'out of context'),
        (([seq, other], [3], torch.tensor([[1], [2]])), 'give one of both'),
        (([seq], [3], torch.tensor([[0.5]])), 'integers'), (([seq], [3], [torch.tensor([])]), 'integers'),
        (([], [], torch.zeros(0, 1, dtype=torch.int64)), 'one sequence or more')]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            cache.step(*arguments)
        check(cache, {seq: 3, other: 0})
    for call in (lambda: cache.truncate(seq, 4), lambda: cache.truncate(seq, -1), lambda: cache.free(77),
                 lambda: cache.fork(77), lambda: cache.shift(seq, 0, 1)):
        with pytest.raises(ValueError):
            call()
        check(cache, {seq: 3, other: 0})
    m.train()
    with pytest.raises(ValueError, match='training mode'):
        cache.step([seq], [3], torch.tensor([[1]]))
    m.eval()
    for _ in range(cache.n_seq - 2):
        cache.new()
    with pytest.raises(ValueError, match='all are in use'):
        cache.new()
    with pytest.raises(ValueError, match='two different models'):
        cache_of(kind, m, decoder=CPUDecoder(model_of('learned')))
    with pytest.raises(ValueError, match='make a new cache'):
        m.double()
        cache.step([seq], [3], torch.tensor([[1]]))


@pytest.mark.parametrize('kind', KINDS)
def test_logits_of_any_tokens_of_a_step(kind, monkeypatch):
    """Also of a step that the compiled executor divides into chunks."""
    monkeypatch.setattr(cpu, 'CHUNK', 4)
    for model in ('learned', 'rope window sinks'):
        m = model_of(model, 5)
        for decoder, worst in ((None, 1e-5), (CPUDecoder(m), 0)):
            cache, text = cache_of(kind, m, decoder=decoder), torch.randint(VOCAB, (2, 6))
            seqs = [cache.new('a'), cache.new('b')]
            wanted = cache.step(seqs, [0, 0], [text[0], text[1, :4]], [1, 2, 6, 9])
            cache.step(seqs, [0, 0], text)
            for row, (seq, n) in zip(wanted, [(0, 2), (0, 3), (1, 1), (1, 4)]):
                alone = cache.step([seqs[seq]], [0], text[seq:seq + 1, :n])[0]
                assert (row - alone).abs().max() <= worst
            if m.config.window:
                with pytest.raises(ValueError, match='at most window'):
                    cache.step(seqs[:1], [0], torch.ones(1, 8, dtype=torch.int64), [3])


@pytest.mark.parametrize('kind', KINDS)
def test_memory_does_not_grow_with_an_endless_text(kind):
    m = model_of('rope window sinks', 6, torch.float64)
    cache, oracle, seq = cache_of(kind, m), Oracle(m), None
    seq, n_bytes, n = cache.new(), cache.nbytes(), 0
    oracle.new(seq)
    while n < sizes(200, 2000):
        tokens = torch.randint(VOCAB, (1, min(17, n + 1)))
        logits, n = cache.step([seq], [n], tokens)[0], n + tokens.size(1)
        torch.testing.assert_close(logits, oracle.feed(seq, tokens[0].tolist()), atol=1e-9, rtol=1e-9)
    assert cache.nbytes() == n_bytes and cache.records[seq].runs.n < 4 * m.config.n_slots
    if kind == 'paged':
        assert len(cache.blocks.references) - len(cache.blocks.free) <= kvcache.paged.n_blocks_for(m.config, 16)


def test_bytes_of_the_numbers():
    m = model_of('rope', n_embd=128)
    positions = N_SEQ * m.config.block_size
    for bits, per_position in ((0, 2 * 2 * 32 * 4), (8, 2 * 2 * (32 + 4)), (4, 2 * 2 * (16 + 4))):
        assert cache_of('tuple', m, bits).nbytes() == positions * m.config.n_layer * per_position


@torch.no_grad()
def test_a_model_in_bfloat16_has_the_same_bits_in_every_cache():
    m, text = model_of('llama').bfloat16(), torch.randint(VOCAB, (1, 12))
    decoder = CPUDecoder(m)
    expected, kept = decoder(text[:, :7], None)
    after, _ = decoder(text[:, 7:], kept)
    for kind in KINDS:
        cache = kvcache.make_cache(m, kind, 1, 0, decoder)
        handle = cache.new()
        assert torch.equal(cache.step([handle], [0], text[:, :7]), expected[:, 0])
        assert torch.equal(cache.step([handle], [7], text[:, 7:]), after[:, 0])


def test_a_long_prompt_of_a_long_context_needs_no_list_for_each_of_its_tokens():
    m = GPT(GPTConfig(block_size=2**17, vocab_size=VOCAB, n_layer=1, n_head=1, n_embd=8, position='rope')).eval()
    decoder = CPUDecoder(m, threads=1)
    decoder(torch.randint(VOCAB, (1, 700)), None)
    assert sum(array.nbytes for array in decoder.tables.arrays.values()) < 2**25


@pytest.mark.parametrize('window', [0, 9])
@pytest.mark.parametrize('kind', kvcache.KINDS)
def test_a_small_cache_computes_what_a_whole_one_does(kind, window):
    """For texts of up to n positions, with the decoder of the model or without one; longer ones are refused."""
    m = model_of('rope', window=window)
    for decoder, n in itertools.product((None, CPUDecoder(m, threads=1)), (8, 9, 30)):
        whole, small = (kvcache.make_cache(m, kind, 2, 0, decoder, n_positions) for n_positions in (None, n))
        text, logits = torch.randint(m.config.vocab_size, (1, n)), []
        for cache in (whole, small):
            seq = cache.new()
            logits.append([cache.step([seq], [a], text[:, a:b]) for a, b in ((0, 5), (5, 6), (6, 7), (7, n))])
        assert all(map(torch.equal, *logits))
        assert small.nbytes() <= whole.nbytes() and (small.model is m) == (n >= (window or m.config.block_size))
        if small.model is not m:
            with pytest.raises(ValueError):
                small.step([seq], [n], torch.tensor([[1] * 16]))
    with pytest.raises(ValueError, match='two different models'):
        kvcache.make_cache(model_of('rope', window=4), kind, 2, 0, decoder, 8)


def test_free_memory_is_that_of_the_machine_or_of_the_container(tmp_path, monkeypatch):
    free = storage.free_memory(torch.device('cpu'))
    monkeypatch.setattr(storage, 'CONTROL_GROUP', tmp_path)
    (tmp_path / 'memory.current').write_text('700000\n')
    (tmp_path / 'memory.stat').write_text('anon 400000\nfile 300000\ninactive_file 200000\nactive_file 90000\n')
    for most, expected in (('max', free), ('1000000', 590000)):
        (tmp_path / 'memory.max').write_text(most + '\n')
        found = storage.free_memory(torch.device('cpu'))
        assert found == expected or expected == free and abs(found - free) < 0.3 * free
    assert 2**20 < free <= os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') or free == math.inf


@pytest.mark.parametrize('bits', [0, 8])
def test_a_cache_that_does_not_fit_is_not_made(bits, monkeypatch):
    m = model_of('rope')
    n_bytes = 4 * 40 * 2 * m.config.n_layer * m.config.n_kv_head * m.config.head_dim * (1 if bits else 4)
    monkeypatch.setattr(storage, 'ALWAYS_FREE', 0)
    makers = [partial(kvcache.make_cache, m, kind, 4, bits) for kind in KINDS] + [partial(cache_for, m, 4)] * (not bits)
    for make in makers:
        monkeypatch.setattr(storage, 'free_memory', lambda device: n_bytes)
        make()
        monkeypatch.setattr(storage, 'free_memory', lambda device: n_bytes - 1)
        with pytest.raises(ValueError, match='4 sequences of 40 tokens take .* GB, and .* GB of memory are free: take'):
            make()
