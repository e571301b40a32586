"""
Caches with a decoder that has a compiled step: which of them run it, interrupts, changed weights, what pages share, and
vLLM's call.
"""
import copy
import itertools

import numpy as np
import pytest
import torch
from conftest import sizes
from interrupts import interrupted
from reference_executor import ReferenceExecutor
from sliding import BLOCK, SINKS, W, all_logits, feed, model, texts
from test_cache_endless import in_a_cache
from test_cache_systems import empty

import decode
from decode.cpu import CPUDecoder
from generation import generate, stream
from kvcache import KINDS, make_cache
from kvcache.cell_sequences import CellSequences
from kvcache.contiguous import ContiguousCache
from kvcache.paged import PagedCache, PagedMetadata, execute_model, n_blocks_for


def f32(**how):
    return model(torch.float32, **how)


def exact_logits(m, idx):
    """Logits (T, vocab_size) of all positions of idx (T,), read at once, in float64."""
    return all_logits(copy.deepcopy(m).double(), idx[None])[0]


# which step runs

@pytest.mark.parametrize('kind', KINDS)
def test_the_compiled_step_runs_where_it_can_read_the_cache_and_the_name_says_so(kind):
    m = f32(n_embd=128)
    best = decode.best(m, 2)
    assert make_cache(m, kind, 2, decoder=best).name == f"{best.name}, on a cache that is {kind}, float32"
    assert make_cache(m, kind, 2, 8, best).decoder is best and best.name in make_cache(m, kind, 2, 8, best).name
    narrow = f32(n_embd=64)  # heads of 16 channels share a scale
    for cache in (make_cache(m, kind, 2, 4, best), make_cache(narrow, kind, 2, 8, CPUDecoder(narrow)),
                  make_cache(m, kind, 2, decoder=decode.EagerDecoder(m)), make_cache(m, kind, 2),
                  make_cache(m.double(), kind, 2, decoder=best)):
        assert cache.decoder is None and cache.name.startswith('the model, on a cache')
    with pytest.raises(ValueError, match='different models'):
        make_cache(f32(n_embd=128), kind, 2, decoder=best)


def test_keys_and_values_in_bfloat16():
    m, idx = f32(), texts(2, 12)
    for make in (lambda d: ContiguousCache(m, 2, 'bfloat16', d), lambda d: PagedCache(m, 9, 4, 'bfloat16', d),
                 lambda d: CellSequences(m, 2, 'bfloat16', True, d)):
        logits = []
        for decoder in (None, ReferenceExecutor(m)):
            cache = make(decoder)
            seqs = [cache.new(), cache.new()]
            feed(cache, seqs, [idx[0, :7], idx[1, :3]])
            logits.append(feed(cache, seqs, [idx[0, 7:], idx[1, 3:5]]))
            assert cache.decoder is decoder
        assert (logits[0] - logits[1]).abs().max() < 0.05


@pytest.mark.parametrize('kind', KINDS)
def test_generation_uses_the_decoder_of_a_cache_exclusively(kind):
    m = f32()
    executor = ReferenceExecutor(m)
    cache = make_cache(m, kind, 4, decoder=executor)
    execute, inside, prompts = executor.execute_model, [], [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    executor.execute_model = lambda *args: (inside.append(executor.in_use), execute(*args))[1]
    got = generate(m, prompts, 2 * BLOCK, temperature=0, use_cache=True, cache=cache)
    assert got == generate(m, prompts, 2 * BLOCK, temperature=0) and set(inside) == {1} and empty(cache)
    list(stream(m, prompts, 3, use_cache=True, cache=cache))
    assert inside[-3:] == [0, 0, 0] and executor.in_use == 0


@pytest.mark.parametrize('kind', ['streams', 'unified'])
def test_quantised_keys_that_wait_to_be_turned_are_read_in_pytorch(kind):
    m = f32(position='rope', n_embd=128)
    executor = ReferenceExecutor(m)
    cache, plain, idx = make_cache(m, kind, 2, 8, executor), make_cache(m, kind, 2, 8), texts(2, 14)
    for each in (cache, plain):
        seqs = [each.new(), each.new()]
        feed(each, seqs, idx[:, :9])
        feed(each, seqs, idx[:, 9:10])
        each.shift(seqs[0], 2, 3)
    n_calls = len(executor.calls)
    assert (feed(cache, seqs, idx[:, 10:12]) - feed(plain, seqs, idx[:, 10:12])).abs().max() < 0.1
    assert len(executor.calls) == n_calls == 2
    for each in (cache, plain):
        each.truncate(seqs[0], 2)  # nothing is left that was moved
    feed(cache, seqs, [idx[0, 2:5], idx[1, 12:13]])
    assert executor.calls[-1] == [3, 1]


@pytest.mark.parametrize('kind', KINDS)
def test_handles_may_be_integers_of_numpy(kind):
    m, idx = f32(), texts(2, 12)
    exact = [exact_logits(m, row) for row in idx]
    cache = make_cache(m, kind, 2, decoder=ReferenceExecutor(m))
    seqs = [np.int64(cache.new()), np.int64(cache.new())]
    for start, end in ((0, 9), (9, 10), (10, 12)):
        for row, logits in enumerate(feed(cache, seqs, idx[:, start:end])):
            assert (logits - exact[row][end - 1]).abs().max() < 1e-4


# interrupts

@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('what', ['step', 'windowed step', 'shift'])
@torch.inference_mode()
def test_after_an_interrupt_at_any_line_a_sequence_is_as_before_or_has_nothing(kind, what):
    window = dict(window=W, n_sink=SINKS) if what == 'windowed step' else {}
    m, idx = f32(position='rope', n_layer=1, n_head=2, n_embd=16, **window), texts(30)
    exact, executor = exact_logits(m, idx[:30 if window else BLOCK]), ReferenceExecutor(m)

    def small():
        if kind == 'paged':
            return PagedCache(m, 3 * n_blocks_for(m.config, 4), 4, 'float32', executor)
        return make_cache(m, kind, 3, decoder=executor)
    shifted = make_cache(m, 'tuple', 1)
    if what == 'shift':
        seq = shifted.new()
        feed(shifted, [seq], idx[None, :12])
        shifted.shift(seq, 2, 4)
        shifted = feed(shifted, [seq], idx[None, 12:14])[0]
    for n in itertools.count(1, sizes(23, 3)):
        cache = small()
        a, b = cache.new(), cache.new()
        feed(cache, [a], idx[None, :11])
        feed(cache, [a], idx[None, 11:12])
        c = cache.fork(a)
        work = {'shift': lambda: cache.shift(a, 2, 4)}.get(what, lambda: feed(cache, [a, b], [idx[12:14], idx[:13]]))
        ended = not interrupted(work, n, in_a_cache)
        assert cache.lengths[a] in ((0, 12, 8) if what == 'shift' else (0, 12, 14)) and cache.lengths[b] in (0, 13)
        if cache.lengths[a] == 8:
            assert (feed(cache, [a], idx[None, 12:14])[0] - shifted).abs().max() < 1e-4
        else:
            near(cache, a, idx, [1, 1] if cache.lengths[a] else [9, 4], exact)
        near(cache, b, idx, [2, 1] if cache.lengths[b] else [7, 3], exact)
        near(cache, c, idx, [1, 2], exact)
        for seq in (a, b, c):
            cache.free(seq)
        assert empty(cache)
        if ended:
            assert n > 40
            return


def near(cache, seq, idx, chunks, exact):
    """Feed idx (T,) to a sequence in chunks; the logits after each are exact (T, vocab_size), to float32's rounding."""
    for n in chunks:
        start = cache.lengths[seq]
        logits = feed(cache, [seq], idx[None, start:start + n])[0]
        assert (logits - exact[start + n - 1]).abs().max() < 1e-4, (start, n)


# changed weights, and what pages share

def pages(m, decoder=None, n_blocks=24):
    decoder = decoder or CPUDecoder(m, threads=1)
    cache = PagedCache(m, n_blocks, 4, 'float32', decoder)
    computed, execute = [], decoder.execute_model

    def counted(ids, *args):
        computed.append(len(ids))
        return execute(ids, *args)
    decoder.execute_model = counted
    return cache, computed


def n_computed(cache, computed, text):
    """How many tokens a step of a new sequence with this text computes; and its logits. It is freed."""
    seq = cache.new()
    logits = feed(cache, [seq], text[None])[0]
    cache.free(seq)
    return computed[-1], logits


@pytest.mark.parametrize('decoder_of', [ReferenceExecutor, lambda m: CPUDecoder(m, threads=1)],
                         ids=['reference', 'kernel'])
@torch.inference_mode()
def test_only_what_was_computed_with_these_weights_is_found(decoder_of):
    m, text = f32(), texts(BLOCK)
    cache, computed = pages(m, decoder_of(m))
    exact = exact_logits(m, text)
    a = cache.new()
    feed(cache, [a], text[None, :10])
    n, logits = n_computed(cache, computed, text[:10])
    assert n == 2 and (logits - exact[9]).abs().max() < 1e-4
    good = {name: p.clone() for name, p in m.state_dict().items()}
    m.transformer.h[0].mlp.c_fc.weight.mul_(1.5)
    feed(cache, [a], text[None, 10:13])  # fills a block with the tokens of both weights
    n, logits = n_computed(cache, computed, text[:13])
    assert n == 13 and (logits - exact_logits(m, text)[12]).abs().max() < 1e-4
    assert n_computed(cache, computed, text[:13])[0] == 1
    m.load_state_dict(good)
    feed(cache, [a], text[None, 13:])  # what it has filled is never shared
    n, logits = n_computed(cache, computed, text)
    assert n == BLOCK and (logits - exact[-1]).abs().max() < 1e-4
    m.transformer.h[0].mlp.c_fc.weight.data.flatten()[5] += 1  # no counter is moved, and the value is not probed
    n, logits = n_computed(cache, computed, text)
    assert n == BLOCK and (logits - exact_logits(m, text)[-1]).abs().max() < 1e-4


@torch.inference_mode()
def test_pages_run_out_are_taken_and_computed_again():
    m, idx = f32(position='rope'), texts(3, BLOCK)
    cache, computed = pages(m, n_blocks=6)
    exact = [exact_logits(m, row) for row in idx]
    a, b = cache.new(), cache.new()
    near(cache, a, idx[0], [9, 1], exact[0])
    near(cache, b, idx[1], [9, 2], exact[1])
    with pytest.raises(ValueError, match='blocks are needed'):
        feed(cache, [a, b], [idx[0, 10:14], idx[1, 11:14]])
    assert cache.lengths == {a: 10, b: 11}
    cache.truncate(b, 0)
    near(cache, a, idx[0], [4, 2], exact[0])
    cache.truncate(a, 0)
    near(cache, b, idx[1], [11], exact[1])
    assert computed[-1] in (3, 11)  # its first two blocks may have been taken
    near(cache, b, idx[1], [1, 4], exact[1])


@pytest.mark.parametrize('decoder_of', [ReferenceExecutor, lambda m: CPUDecoder(m, threads=1)],
                         ids=['reference', 'kernel'])
@pytest.mark.parametrize('window', [{}, dict(window=W, n_sink=SINKS)], ids=['no window', 'window'])
@torch.inference_mode()
def test_vllms_call_with_a_decoder(decoder_of, window):
    m, idx = f32(position='rope', n_kv_head=2, **window), texts(BLOCK)
    exact, decoder, pool = exact_logits(m, idx), decoder_of(m), PagedCache(m, 40, 4)
    a, b = pool.new(), pool.new()
    feed(pool, [a, b], [idx[:12], idx[:5]])
    for seq, n in ((a, 1), (b, 3)):
        pool.blocks.extend(seq, n)
    tables = [[-1 if block is None else block for block in pool.blocks.tables[seq]] for seq in (a, b)]
    tables[1] += [-1] * (len(tables[0]) - len(tables[1]))
    slots = pool.blocks.slots(a, 12, 13) + pool.blocks.slots(b, 5, 8)
    metadata = PagedMetadata(torch.tensor([*slots, -1]), torch.tensor(tables), torch.tensor([1, 3]),
                             torch.tensor([13, 8]))
    ids, positions = torch.tensor([*idx[12:13], *idx[5:8], 0]), torch.tensor([12, 5, 6, 7, 0])
    logits = execute_model(decoder, ids, positions, pool.layers, metadata)
    assert (logits - exact[[12, 7]]).abs().max() < 1e-4
    with pytest.raises(ValueError, match='every token'):
        execute_model(decoder, ids, positions, pool.layers, PagedMetadata(
            torch.tensor([-1, *slots[1:], -1]), torch.tensor(tables), torch.tensor([1, 3]), torch.tensor([13, 8])))
    with pytest.raises(ValueError, match='float16, stored'):
        execute_model(decoder, ids, positions, PagedCache(m, 40, 4, 'float16').layers, metadata)
    for p in m.parameters():
        p.fill_(float('nan'))
    with pytest.raises(ValueError, match='not numbers'):
        execute_model(decoder, ids, positions, pool.layers, metadata)
    rows = pool.layers[0].k.data.flatten(1, 2)[:, slots]
    assert not rows.any()
