"""`execute_model`: what it refuses, on what it can be called, and what runs beside it."""
import threading
import time

import numpy as np
import pytest
import torch
from interrupts import interrupted
from test_paged import Fed
from test_same_bits import N_SLOTS, Store, model_of, reference_logits, texts

from decode import cpu
from decode.cpu import CPUDecoder
from decode.eager import EagerDecoder
from decode.metadata import InputMetadata, KVArrays, NextTokens, Runs
from kvcache.openppl import LAYOUTS, key_value_cache
from kvcache.storage import Layer
from model import GPT, GPTConfig

SHAPE = dict(n_embd=64, n_head=4)


@pytest.fixture
def fed():
    """A decoder, and a store with three sequences of 20 tokens in it."""
    decoder, store = CPUDecoder(model_of(SHAPE)), None
    store = Store(decoder.model, 'pages')
    store.feed(decoder, dict(enumerate(texts(3, 20, 0))))
    return decoder, store


def step(decoder, store, ids=(1, 2, 3), positions=(20, 20, 20), query_lens=(1, 1, 1), runs=None, wanted=None,
         n_threads=None):
    metadata = InputMetadata([*query_lens], runs or [store.runs[i] for i in range(len(query_lens))], wanted)
    return decoder.execute_model(torch.tensor(ids), np.array(positions), store.kv, metadata, n_threads)


def contents(store):
    return [t.clone() for layer in store.layers for t in layer.tensors()]


BAD_STEPS = {
    'token': (dict(ids=(1, 29, 3)), 'vocabulary'),
    'negative token': (dict(ids=(1, 2, -1)), 'vocabulary'),
    'ids of another dtype': (dict(ids=(1.0, 2.0, 3.0)), 'int64'),
    'too few ids': (dict(ids=(1, 2)), 'input_ids'),
    'too few positions': (dict(positions=(20, 20)), 'one for each position'),
    'position too large': (dict(positions=(20, 64, 20)), 'out of context.*sequence number 1 .*64'),
    'negative position': (dict(positions=(20, 20, -1)), 'out of context'),
    'positions with a gap': (dict(ids=(1, 2), positions=(20, 22), query_lens=(2,)), 'consecutive'),
    'a sequence without tokens': (dict(query_lens=(2, 1, 0)), 'at least one token'),
    'rows that are not there': (dict(wanted=np.array([3])), 'wanted'),
    'rows in another order': (dict(wanted=np.array([1, 0])), 'ascend'),
    'rows that are floats': (dict(wanted=np.array([0.5, 1.5])), 'int64'),
    'rows in a list': (dict(wanted=[0, 1]), 'int64'),
    'positions that are floats': (dict(positions=(20.0, 20.5, 20.9)), 'int64'),
    'no threads': (dict(n_threads=0), 'n_threads'),
    'a negative number of threads': (dict(n_threads=-1), 'n_threads'),
}
BAD_RUNS = {
    'a slot that is not there': ([(0, N_SLOTS - 32, 64)], 'within'),
    'a negative slot': ([(0, -1, 64)], 'within'),
    'an empty run': ([(0, 0, 0), (0, 0, 64)], 'run'),
    'a run of many': ([(0, 0, 2**62)], 'within'),
    'positions that go back': ([(8, 0, 16), (0, 32, 16)], 'order of positions'),
    'a position without a slot': ([(0, 0, 16), (17, 32, 16)], 'no slot for position 16'),
    'no runs': ([], 'no slot for position 0'),
    'too short': ([(0, 0, 20)], 'no slot for position 20'),
}


def check_refused(fed, message, **what):
    """A step that is refused has written nothing, and the next one works."""
    decoder, store = fed
    before = contents(store)
    with pytest.raises(ValueError, match=message):
        step(decoder, store, **what)
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(before, contents(store)))
    assert not store.kv.written.any()
    step(decoder, store)


@pytest.mark.parametrize('chunk', [256, 2])
@pytest.mark.parametrize('bad', BAD_STEPS)
def test_a_bad_step_is_refused_and_nothing_is_written(fed, bad, chunk, monkeypatch):
    monkeypatch.setattr(cpu, 'CHUNK', chunk)
    what, message = BAD_STEPS[bad]
    check_refused(fed, message, **what)


@pytest.mark.parametrize('chunk', [256, 2])
@pytest.mark.parametrize('bad', BAD_RUNS)
def test_bad_runs_are_refused_and_nothing_is_written(fed, bad, chunk, monkeypatch):
    store, (rows, message) = fed[1], BAD_RUNS[bad]
    monkeypatch.setattr(cpu, 'CHUNK', chunk)
    check_refused(fed, message, runs=[store.runs[0], Runs(rows), store.runs[2]])


def test_a_slot_that_two_sequences_write_or_one_reads_is_refused(fed):
    runs = fed[1].runs
    slot = int(runs[0].table[1, 1]) + 4  # of position 20 of sequence 0
    for rows in ([(0, 0, 20), (20, slot, 1)], [(0, slot - 5, 21)]):
        check_refused(fed, 'slot', runs=[runs[0], Runs(rows), runs[2]])


@pytest.mark.parametrize('other', [dict(n_layer=1), dict(n_embd=32), dict(n_head=2), dict(n_kv_head=2)], ids=str)
def test_the_arrays_of_another_model_are_refused(fed, other):
    decoder, store = fed
    store.kv = Store(GPT(GPTConfig(**dict(block_size=64, vocab_size=29, n_layer=2) | SHAPE | other))).kv
    with pytest.raises(ValueError, match='kv_caches has .*and the model'):
        step(decoder, store)


@pytest.mark.parametrize('cache_layout', range(4))
def test_on_the_operators_cache(cache_layout):
    """The kernel goes on where the operator has written, and the operator reads what the kernel has written."""
    decoder, (text,) = CPUDecoder(model_of(SHAPE)), texts(1, 30, 1)
    c, n_slots = decoder.model.config, 64
    shape = [(n_slots, c.n_layer, 2, c.n_head, c.head_dim)[axis] for axis in np.argsort(LAYOUTS[cache_layout])]
    cache = torch.full(shape, float('nan'))
    view = cache.permute(LAYOUTS[cache_layout])
    kv, runs = KVArrays.of_views([(view[:, layer, 0], view[:, layer, 1]) for layer in range(c.n_layer)]), Runs()
    runs.set([(0, 3, 40)])
    logits = decoder.execute_model(torch.tensor(text), np.arange(30), kv, InputMetadata([30], [runs], np.arange(30)))
    torch.testing.assert_close(logits, reference_logits(decoder.model, text), atol=2e-4, rtol=1e-4)
    _, expected = decoder(torch.tensor([text]), None)
    one = torch.ones(1, c.n_head, c.head_dim)
    for layer in range(c.n_layer):
        indices = [torch.tensor(x) for x in ([0, 1], [0, 31], [3], [30])]
        k, v = key_value_cache(one, one, *indices, 1, 31, cache, num_layer=c.n_layer, layer_idx=layer,
                               cache_layout=cache_layout)
        assert torch.equal(k[:30].transpose(0, 1), expected[layer].k_cache[0, :, :30])
        assert torch.equal(v[:30].transpose(0, 1), expected[layer].v_cache[0, :, :30])
        assert view[:3].isnan().all() and view[34:].isnan().all()


def test_layers_that_are_not_alike_are_refused():
    k, other_slots = torch.zeros(8, 2, 4), torch.zeros(9, 2, 4)
    for pair in [(k, other) for other in (other_slots, k.double(), k.mT.contiguous().mT, k.half(), k.bfloat16())]:
        with pytest.raises(ValueError, match='strides'):
            KVArrays.of_views([pair])
    k, fewer_slots = torch.zeros(3, 2, 64, 8), torch.zeros(3, 2, 32, 8)
    for other in (fewer_slots, k.double(), k.bfloat16()):
        for layers in ([(k, k, 0), (k, other, 0)], [(k, k, 0), (other, k, 0)]):
            with pytest.raises(ValueError, match='layer 1 has'):
                KVArrays.of_tuples(layers)
    with pytest.raises(ValueError, match='layer 1 has'):
        KVArrays.of_layers([Layer(64, 2, 8), Layer(64, 1, 8)])


@pytest.mark.parametrize('how', [dict(type_k='int4', type_v='int4'), dict(type_k='float64', type_v='float64'),
                                 dict(v_trans=True), dict(type_k='int8', type_v='int8')], ids=str)
def test_layers_that_the_compiled_step_does_not_read(fed, how):
    """They are for the executor in PyTorch, and the compiled step refuses them. (8 channels of int8 share a scale.)"""
    kv = KVArrays.of_layers([Layer(64, 4, 16, **how)] * 2)
    assert not kv.compiled and not fed[0].reads(kv) and EagerDecoder(fed[0].model).reads(kv)
    with pytest.raises(ValueError, match='does not read keys and values'):
        fed[0].execute_model(torch.tensor([1]), np.array([0]), kv, InputMetadata([1], [Runs([(0, 0, 64)])]))


# functions of decode/ that write the tables; those that call them hold the lock
INTERRUPTED = 'run', 'run_rows', 'tables_for', 'set_sizes', 'bind', 'ended', 'team_and_threads'


@pytest.mark.parametrize('between', ['tuples', 'other tuples', 'execute_model'])
def test_after_an_interrupt_at_any_line_the_next_step_is_right(fed, between):
    """A step on tuples, another one that is interrupted, and the first one again, which has the same logits."""
    decoder, store = fed
    cache, idx = decoder(torch.randint(29, (2, 4)), None)[1], torch.randint(29, (2, 8))
    other = decoder(torch.randint(29, (2, 6)), None)[1]
    first = {T: decoder(idx[:, :T], cache)[0] for T in (1, 8)}
    work = {'tuples': lambda: decoder(idx[:, :4], cache), 'other tuples': lambda: decoder(idx[:, :1], other),
            'execute_model': lambda: step(decoder, store)}[between]
    for n in range(1, 300):
        stopped = interrupted(work, n, lambda code: code.co_name in INTERRUPTED)[0]
        for T in (1, 8, 8, 1):
            assert torch.equal(decoder(idx[:, :T], cache)[0], first[T])
        if not stopped:
            break
    assert n > 10 and not stopped


def test_other_python_threads_run_during_a_step(monkeypatch):
    decoder = CPUDecoder(model_of(dict(n_embd=768, n_head=12)))
    store, ticks, done = Store(decoder.model, 'pages'), [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)
    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        began = time.perf_counter()
        monkeypatch.setattr(cpu, 'CHUNK', 2**16)  # one call of native code
        store.feed(decoder, dict(enumerate(texts(16, 60, 3))))
        ended = time.perf_counter()
    finally:
        done.set()
        ticking.join()
    # native code takes almost all of this time; a thread that waits for it ticks before and after only
    in_the_middle = [t for t in ticks if began + 0.3 * (ended - began) < t < began + 0.7 * (ended - began)]
    assert len(in_the_middle) > 2


def test_steps_write_only_rows_of_tokens_that_there_are(fed):
    decoder, store = fed
    tokens = np.arange(12).reshape(4, 3)
    for row, n_steps in ((tokens[0].copy(), 1), (tokens[1], 1), (tokens[0], 0), (tokens[0], 4)):
        several = NextTokens(Fed(tokens), np.zeros(1, np.int64), tokens)
        several.n_steps = n_steps
        metadata = InputMetadata([1, 1, 1], [store.runs[i] for i in range(3)], None, several)
        wrong = 'input_ids are not row 0 of tokens' if n_steps == 1 else 'n_steps must be between 1 and 3'
        with pytest.raises(ValueError, match=wrong):
            decoder.execute_model(torch.from_numpy(row), np.array([20, 20, 20]), store.kv, metadata)
    several.n_drawn = 3
    with pytest.raises(ValueError, match='all 3 rows of these `NextTokens` were drawn: make new ones'):
        decoder.execute_model(torch.from_numpy(tokens[3]), np.array([20, 20, 20]), store.kv, metadata)
    assert (tokens == np.arange(12).reshape(4, 3)).all()
