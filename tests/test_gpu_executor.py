"""The GPU's executor without a GPU, by its kernels' functions in PyTorch. What it computes: test_executors.py."""
import itertools
import random
import weakref
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import numpy as np
import plain_gpu
import pytest
import torch
from conftest import sizes
from plain_gpu import Direct
from test_executors import Slots, Text
from tiny_models import HOWS, MODELS, VOCAB, drawn_alone, model_of

import decode
from decode.draw import DrawSettings, draw
from decode.gpu import check
from decode.gpu.executor import BUCKETS, GPUExecutor
from decode.gpu.queue import Queue
from decode.gpu.tables import MOST_STEPS, Tables
from engine import Engine
from kvcache import PagePool, make_layers

PLAIN = vars(plain_gpu)


def gpu(model, queue=None, **functions):
    return GPUExecutor(model, SimpleNamespace(**PLAIN | functions), queue or Direct())


class Late(Direct):
    """It does nothing before the host waits, then all up to the event. n_late: the most that were under way at once."""

    def __init__(self):
        super().__init__()
        self.waiting, self.n_late, self.late = [], 0, False

    def record(self, step, other=None):
        return SimpleNamespace(replay=lambda: self.do(step))

    def event(self):
        n = len(self.waiting)
        return SimpleNamespace(synchronize=lambda: self.finish(n))

    def do(self, operation):
        if not self.late:
            return operation()
        self.waiting.append(operation)
        self.n_late = max(self.n_late, len([each for each in self.waiting if each]))

    def finish(self, n):
        for i in range(n):
            operation, self.waiting[i] = self.waiting[i], None
            operation and operation()


class LateCalls(GPUExecutor):
    """Its calls of several steps run on a late device."""

    def several(self, batch):
        self.queue.late = True
        try:
            return super().several(batch)
        finally:
            assert not any(self.queue.waiting)  # whatever happened: nothing writes any more when pages are freed
            self.queue.late = False


def engine_of(executor, n_pages=40, page_size=4, budget=64):
    c = executor.model.config
    engine = Engine(executor.model, executor, PagePool(n_pages, page_size, c.window, c.n_sink), budget)
    engine.longest_call = 1e6
    return engine


def run(engine):
    """All steps. Returns [[how many tokens each sequence drew]] of the calls."""
    calls = []
    while not engine.is_idle:
        calls.append([len(drawn.tokens) for _, drawn in engine.step()])
    assert engine.pool.n_free == engine.pool.n_pages
    return calls


def check_alone(model, sequences):
    for s in sequences:
        tokens, _ = drawn_alone(model, s.tokens[:s.n_prompt], s.n_end - s.n_prompt, settings=s.settings)
        assert s.error is None and s.tokens[s.n_prompt:] == tokens, (s, s.settings.values)


@pytest.mark.parametrize('kind', sizes(['llama', 'rope window sinks'], MODELS))
def test_an_engine_draws_on_the_device_what_each_sequence_draws_alone(kind):
    """
    Sequences end one by one in a call, or at full contexts, or are aborted while others begin as they did; some are
    preempted. After an interrupt nothing is under way, which `LateCalls` asserts, and all are computed anew.
    """
    n_late = n_preempted = 0
    for seed in range(sizes(1, 5)):
        m, choose, sequences = model_of(kind, seed), random.Random(seed), []
        engine, interrupts = engine_of(LateCalls(m, plain_gpu, Late()), 30), [DEFAULT, DEFAULT, KeyboardInterrupt] * 2
        queue = engine.executor.queue
        queue.event = Mock(wraps=queue.event, side_effect=itertools.chain(interrupts, itertools.repeat(DEFAULT)))
        for i in range(30):
            prompt = [choose.randrange(VOCAB) for _ in range(choose.randint(1, 9))]
            sequences += engine.add(prompt, choose.randint(5, 40), 1 + i % 2, i, **HOWS[(i + seed) % len(HOWS)])
        engine.step()
        aborted = sequences.pop(0)
        engine.end(aborted, 'abort')
        sequences += engine.add(aborted.tokens[:aborted.n_prompt], 20, seed=5)
        calls = []
        while not engine.is_idle:
            with suppress(KeyboardInterrupt):
                calls += run(engine)
        check_alone(m, sequences)
        n_late = max(n_late, engine.executor.queue.n_late)
        n_preempted += engine.scheduler.n_preempted
        assert sum(map(sum, calls)) > 4 * len(calls) and queue.event.call_count > 6
    assert n_late >= 2 and n_preempted


@torch.inference_mode()
def test_a_text_is_one_whoever_runs_beside_it():
    """With a draw that gives other tokens than the definition, so that one that anything else draws shows."""
    m, many = model_of('learned', vocab_size=50257, n_embd=16, n_layer=1), range(0, 50257, 90)
    hows = [dict(temperature=0.9), dict(logprobs=True), dict(stop_ids=many, min_tokens=9),
            dict(logit_bias={t: 1.0 for t in many}), dict(frequency_penalty=1.0),
            dict(prompt_logits=True, logprobs=True)]

    def other_draw(logits, inputs, ended):
        inputs.seeds[:len(logits)] ^= 2**40  # a draw by another seed: no token is the definition's but by chance
        plain_gpu.draw(logits, inputs, ended)
        inputs.seeds[:len(logits)] ^= 2**40

    def drawn(*numbers):
        engine = engine_of(gpu(m, draw=other_draw))
        texts = []
        for i in numbers:
            texts += engine.add([i, 2, 3], 12, seed=i, **hows[i])
            engine.step()  # each begins while those before draw
        run(engine)
        return [s.tokens for s in texts]
    together = drawn(*range(len(hows)))
    for i, text in enumerate(together):
        assert drawn(i) == [text]
    settings = DrawSettings(50257, 2**40, temperature=0.9)
    logits = m(torch.tensor([[0, 2, 3]]), use_cache=False)[0][:, 0]
    assert int(draw(logits, [settings], [0])) == together[0][3] != int(draw(logits, [DrawSettings(50257)], [0]))


def test_a_call_ends_behind_a_stop_at_its_time_and_when_it_is_asked_to():
    """And goes on while some have reached their limit."""
    slots = Slots(LateCalls(model_of('learned'), plain_gpu, Late()), 'cells')
    for more, stops, expected in (dict(), (), (12, 3)), (dict(until=0), (), (8, 3)), (
            dict(return_soon=np.ones(1, np.int64)), (), (8, 3)), (dict(), range(VOCAB), (8, 1)):
        texts = {Text([1]): 1, Text([2], stop_ids=stops): 1}
        drawn = slots.run(texts, [12, 12 if stops else 3], **more)
        assert tuple(len(of_s.tokens) for of_s in drawn) == expected


def test_a_call_is_one_copy_to_the_device():
    """Slots, stops, biases and counts are written for new sequences, and stay; a step of prompts comes in between."""
    m = model_of('rope', block_size=200)
    executor = gpu(m)
    engine, copies = engine_of(executor, 40, 200), Mock(side_effect=executor.queue.pinned)
    executor.queue.pinned = copies
    sequences = [s for i, how in enumerate(HOWS) for s in engine.add([i, 1], 40, seed=i, most_ahead=5, **how)]
    engine.step()
    for begins in False, True, False:
        if begins:
            sequences += engine.add([1, 2, 3], 40)
            engine.step()
        copies.reset_mock()
        engine.step()
        assert copies.call_count == 1, copies.call_args_list
    run(engine)
    check_alone(m, sequences)


class Recorded(Direct):
    """The pools of CUDA on a CPU. pools: that of each recording, of which the step is run once."""
    record = Queue.record

    def __init__(self, monkeypatch):
        super().__init__()
        self.pools, self.fails = [], False
        monkeypatch.setattr('torch.cuda.graph_pool_handle', object)
        monkeypatch.setattr('torch.cuda.Stream', lambda device: 'a stream')
        monkeypatch.setattr('decode.gpu.queue.captured', self.captured)

    def captured(self, step, pool, stream):
        self.pools.append(pool)
        step()
        if self.fails:
            raise KeyboardInterrupt
        return SimpleNamespace(replay=step, pool=lambda: pool)


@torch.inference_mode()
def test_no_graph_is_recorded_in_the_pool_of_forgotten_ones(monkeypatch):
    """PyTorch's allocator refuses it: a pool ends with its last graph. And what is run to be recorded draws nothing."""
    m, queue = model_of('rope'), Recorded(monkeypatch)
    executor = gpu(m, queue)
    executor.tables.inputs.left.fill_(3)
    executor.tables.inputs.step.fill_(MOST_STEPS)
    for _ in range(2):
        executor.hold(make_layers(m, 8, 'float32'))
        executor.prepare(lambda graphs: graphs[-3:])
    queue.fails = True
    with pytest.raises(KeyboardInterrupt):
        executor.graph('step', 8)
    queue.fails = False
    executor.graph('step', 8)
    a, b, c = (queue.pools[i] for i in (0, 3, -1))
    assert queue.pools == [a] * 3 + [b] * 4 + [c] and len({a, b, c}) == 3
    assert not executor.tables.inputs.marks.any()


def test_nothing_is_recorded_in_service_and_nothing_kept_behind_it(monkeypatch):
    """Whatever is asked for after `prepare`. And an engine that is gone keeps no keys and values."""
    m, queue = model_of('rope'), Recorded(monkeypatch)
    engine = engine_of(gpu(m, queue))
    executor, stored = engine.executor, weakref.ref(engine.layers[0].k.data)
    executor.prepare()
    n = len(queue.pools)
    sequences = [s for how in (*HOWS, dict(logprobs=True), dict(prompt_logits=True, logprobs=True))
                 for s in engine.add([1, 2], 9, 2, **how)]
    run(engine)
    check_alone(m, sequences)
    assert len(queue.pools) == n == 4 * len(BUCKETS)
    executor.graphs.clear()  # those of CUDA keep addresses, these keep tensors
    del engine
    assert stored() is None and not executor.layers


def test_settings_take_the_place_of_those_before(monkeypatch):
    """Also of those that were written in part. Nothing of them stays."""
    m = model_of('rope')
    a, b = (Text([1], temperature=t, stop_ids=[t], min_tokens=t, logit_bias={9 + t: t}) for t in (1, 2))

    def fresh():
        return Tables(m.config, 1, 'cpu', Direct())

    def loaded(tables, text):
        tables.draw(tables.rows([text]), np.ones(1, int))
        tables.send()
        return tables.inputs
    loaded(tables := fresh(), a)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tables.queue, 'put', Mock(side_effect=KeyboardInterrupt))
        loaded(tables, b)
    for text in b, a:
        assert all(map(torch.equal, loaded(tables, text), loaded(fresh(), text)))


def test_what_it_does_not_know_is_refused():
    with pytest.raises(ValueError, match='one dtype, float32, bfloat16 or float16'):
        gpu(model_of('rope', dtype=torch.float64))
    with pytest.raises(ValueError, match='make the slots for this model'):
        gpu(model_of('rope')).hold(make_layers(model_of('rope', n_layer=1), 8, 'float32'))
    for name in 'auto', 'gpu':
        with pytest.raises(ValueError, match='weights=int8'):
            decode.check_choice(name, 'int8', device='cuda')


def off_by(error):
    """Attention whose y is off by error(y, step, inputs, apart)."""
    def attend(step, attn, layer, inputs, qkv, q, y, parts, angles, apart):
        plain_gpu.attend(step, attn, layer, inputs, qkv, q, y, parts, angles, apart)
        y += error(y, step, inputs, apart)
    return dict(attend=attend)


FAR_AWAY = off_by(lambda y, step, inputs, _: 0.1 * y * (inputs.positions > step.columns.ring + 20)[:, None])
# by a row's place, by the number of rows, where they are few, and by who stores keys
OTHER_BITS = [off_by(lambda y, *_: torch.arange(len(y))[:, None] % 7 * 1e-6),
              off_by(lambda y, *_: 1e-6 * (len(y) < 64)), off_by(lambda *given: 1e-6 * given[-1])]


def greedy(logits, inputs, ended):
    inputs.settings[:, 0] = 0
    plain_gpu.draw(logits, inputs, ended)


def test_what_a_device_computes_is_tried_first(monkeypatch):
    """Against PyTorch's functions, after a window that has gone round, in other orders and companies, and draws."""
    monkeypatch.setattr(check, 'LONGEST', sizes(40, 300))
    for kind, functions, error in [
            *[(kind, {}, '') for kind in sizes(['rope window sinks', 'qwen window', 'learned'], MODELS)],
            ('rope window sinks', FAR_AWAY, 'away from PyTorch'),
            *[('rope', each, 'other bits among others') for each in OTHER_BITS],
            ('rope', dict(draw=greedy), 'it draws'), ('rope', dict(attend=None), 'does not run here: TypeError'),
            ('llama', dict(attend=lambda *args: plain_gpu.attend(*args[:8], None, args[9])), 'away from')]:
        model, functions = model_of(kind), SimpleNamespace(**PLAIN | functions)
        monkeypatch.setattr('decode.gpu.executor.kernels', lambda functions=functions: functions)
        monkeypatch.setattr('decode.gpu.executor.Queue', lambda device: Direct())
        with pytest.raises(ValueError, match=error) if error else nullcontext():
            GPUExecutor(model)
    assert decode.best(model_of('rope').to('meta'), 1).name == 'PyTorch, eager', "auto, where the device is no CPU"
