"""
The host side of the GPU's executor: on the CPU, with its functions in PyTorch and steps that are run instead of
recorded.
"""
import random
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import plain_gpu
import pytest
import torch
from conftest import sizes
from plain_gpt import plain as exact
from plain_gpu import Again, Direct
from tiny_models import MODELS, model_of
from tiny_models import VOCAB as V

from decode.batch import Batch, NotNumbers, Refused
from decode.draw import DrawSettings, draw
from decode.eager import EagerExecutor
from decode.gpu.draws import MOST_STEPS
from decode.gpu.executor import GPUExecutor
from decode.gpu.queue import Queue
from decode.weights import quantise
from engine import Engine
from engine.sequence import Sequence
from kvcache import BlockPool, make_layers, pages_for
from kvcache.llamacpp.pool import CellPool

HOWS = [dict(), dict(top_p=0.7), dict(top_k=5), dict(frequency_penalty=1.5), dict(temperature=0.0),
        dict(logit_bias={3: 2.0}), dict(min_tokens=5, stops=[1, 2, 3]), dict(stops=[1, 2, 3, 4], presence_penalty=0.5),
        dict(repetition_penalty=1.3, presence_penalty=0.3, min_p=0.05)]
POOLS = dict(pages=lambda c, n=4: BlockPool(8 * pages_for(c, n), n, c.window, c.n_sink),
             unified=lambda c: CellPool(c, 5, c.n_slots),
             streams=lambda c: CellPool(c, 5, c.n_slots, unified=False))


def gpu(model, weights='float32', queue=None):
    return GPUExecutor(model, weights, plain_gpu, queue or Direct())


def sequence_of(config, tokens=(), n_drawn=0, **how):
    """A sequence whose last n_drawn tokens were drawn."""
    s = Sequence(tokens, DrawSettings(config.vocab_size, **how), 2**31, config.max_positions)
    s.n_prompt -= n_drawn
    return s


def feed(executor, pool, new, n_steps=None, logprobs=False, **more):
    """
    A call for these new tokens of sequences, {sequence: tokens}, and its result. n_steps: {sequence: how many tokens it
    may draw}, which are added to it; without, nothing is drawn, and the result has all logits.
    """
    for s, tokens in new.items():
        s.tokens += tokens
        assert pool.extend(s, len(tokens) + (n_steps.get(s, 1) - 1 if n_steps else 0))
    positions = [s.n_computed + i for s, tokens in new.items() for i in range(len(tokens))]
    batch = Batch([*new], [len(tokens) for tokens in new.values()],
                  np.array([token for tokens in new.values() for token in tokens]), np.array(positions),
                  np.array([n_steps.get(s, 0) if n_steps else 0 for s in new]), [not n_steps] * len(new),
                  [logprobs] * len(new), pool.take_copies(), **more)
    results = executor.execute_model(batch)
    for (s, tokens), drawn in zip(new.items(), results):
        pool.computed(s, len(tokens) + max(0, len(drawn.tokens) - 1))
        s.tokens += drawn.tokens
    return results


def holding(executor, pool):
    """The executor with storage for the slots of a pool."""
    executor.hold(make_layers(executor.model, pool.n_slots, executor.type_kv))
    return executor


def check_random_texts(executor, pool, judge, seed, n, tolerance=2e-4):
    """Texts that begin, grow, are forked, cut and freed at random: all logits are those of the judge, in float64."""
    choose, c, texts = random.Random(seed), judge.config, []
    most = min(c.max_positions, 3 * c.block_size)
    for _ in range(n):
        if not texts or len(texts) < 5 and choose.random() < 0.5:
            texts.append(sequence_of(c))
            pool.begin(texts[-1])
        s = choose.choice(texts)
        action = choose.choice(['feed'] * 4 + ['decode'] * 2 + ['fork', 'cut', 'free'])
        if action == 'fork' and len(texts) < 5:
            texts.append(sequence_of(c, s.tokens))
            pool.fork(s, texts[-1])
        elif action == 'cut':
            n_kept = pool.cut(s, choose.randrange(s.n_computed + 1))
            del s.tokens[n_kept:]
        elif action == 'free':
            pool.free(s)
            texts.remove(s)
        elif action in ('feed', 'decode'):
            for _ in range(1 if action == 'feed' else choose.randint(1, 6)):
                new = {}
                for s in choose.sample(texts, choose.randint(1, len(texts))):
                    n_new = choose.choice([1, 1, 2, 5, 16]) if action == 'feed' else 1
                    n_new = min(n_new, most - s.n_computed, c.window + 1 if c.window else most)
                    if n_new:
                        new[s] = [choose.randrange(c.vocab_size) for _ in range(n_new)]
                for (s, tokens), of_s in zip(new.items(), feed(executor, pool, new) if new else ()):
                    expected = exact(judge, torch.tensor([s.tokens]))[0, -len(tokens):]
                    torch.testing.assert_close(of_s.logits.cpu().double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize('kind', MODELS)
@pytest.mark.parametrize('pool', sizes(['pages', 'unified'], POOLS))
def test_logits_are_those_of_a_text_without_a_cache(pool, kind):
    for seed in range(sizes(1, 6)):
        m = model_of(kind, seed)
        slots = POOLS[pool](m.config)
        check_random_texts(holding(gpu(m), slots), slots, m, seed, sizes(25, 150))


@pytest.fixture
def small_graphs(monkeypatch):
    """A step of more tokens than the largest graph has rows."""
    monkeypatch.setattr('decode.gpu.executor.BUCKETS', (1, 2, 4))
    monkeypatch.setattr(GPUExecutor, 'most_sequences', 4)


@pytest.mark.usefixtures('small_graphs')
def test_logits_of_several_graphs_are_those_of_a_text_without_a_cache():
    test_logits_are_those_of_a_text_without_a_cache('pages', 'rope window sinks')


def test_a_text_goes_back_after_its_slots_were_forgotten():
    """To a position before the one at which the table has its slots from, and all of them in the same `Runs`."""
    m = model_of('rope window sinks')
    pool, text = POOLS['pages'](m.config, 40), [i % V for i in range(14)]
    executor, s = holding(gpu(m), pool), sequence_of(m.config)
    pool.begin(s)
    feed(executor, pool, {s: text[:12]})
    executor.refresh()
    feed(executor, pool, {s: text[12:13]})
    s.tokens, s.n_computed = text[:9], 9
    found, = feed(executor, pool, {s: text[9:10]})
    expected = exact(m, torch.tensor([s.tokens]))[0, -1:]
    torch.testing.assert_close(found.logits.double(), expected, atol=1e-4, rtol=1e-4)


class Late(Direct):
    """
    A device that does nothing before the host waits for it: then all up to the event. n_late: how many operations
    were under way at a time, at most.
    """

    def __init__(self):
        self.waiting, self.n_late, self.late = [], 0, False

    def record(self, step):
        return Again(lambda: self.do(step))

    def land(self, pairs):
        self.do(lambda: super(Late, self).land(pairs))
        n = len(self.waiting)
        return SimpleNamespace(synchronize=lambda: self.finish(n))

    def synchronize(self):
        self.finish(len(self.waiting))

    def do(self, operation):
        if not self.late:
            return operation()
        self.waiting.append(operation)
        self.n_late = max(self.n_late, len([each for each in self.waiting if each]))

    def finish(self, n):
        for i in range(n):
            operation, self.waiting[i] = self.waiting[i], None
            operation and operation()


def late(model):
    """An executor whose calls of several steps run on a late device."""
    executor = gpu(model, queue=Late())
    several = executor.several

    def late_several(batch):
        executor.queue.late = True
        try:
            return several(batch)
        finally:
            assert not any(executor.queue.waiting)  # whatever happened: nothing writes any more when pages are freed
            executor.queue.late = False
    executor.several = late_several
    return executor


def engine_of(executor, n_pages=40, page_size=4, budget=64):
    c = executor.model.config
    engine = Engine(executor.model, executor, BlockPool(n_pages, page_size, c.window, c.n_sink), budget)
    engine.pause = 1e6
    return engine


def run(engine):
    """All steps. Returns [[how many tokens each sequence drew]] of the calls."""
    calls = []
    while not engine.is_idle:
        calls.append([len(drawn.tokens) for _, drawn in engine.step() if drawn])
    assert engine.pool.n_free == engine.pool.n_pages
    return calls


def tokens_alone(model, s):
    """The tokens of a sequence by whole texts, without a cache, and the definition of a draw."""
    how, tokens = s.settings, s.tokens[:s.n_prompt]
    while len(tokens) < s.n_end and not (len(tokens) > s.n_prompt and tokens[-1] in how.stops):
        device = model.lm_head.weight.device
        with torch.inference_mode():
            logits = model.step(torch.tensor([tokens[-model.config.block_size:]], device=device), None, False)[0][:, 0]
        how.count(tokens[s.n_prompt:])
        tokens.append(int(draw(logits.float(), [how], [len(tokens) - s.n_prompt])))
    return tokens


def check_alone(model, sequences):
    for s in sequences:
        assert s.error is None and s.tokens == tokens_alone(model, s), (s, s.settings.values)


@pytest.mark.parametrize('kind', ['llama', 'learned', *sizes([], [k for k in MODELS if 'window' not in k])])
def test_an_engine_draws_on_the_device_what_each_sequence_draws_alone(kind):
    """
    Sequences end one by one in a call of several steps, or at full contexts, or are aborted while others begin as they
    did; few pages, so some are preempted.
    """
    n_late = n_preempted = 0
    for seed in range(sizes(1, 5)):
        m, choose, sequences = model_of(kind, seed), random.Random(seed), []
        engine = engine_of(late(m), 30)
        for i in range(30):
            prompt = [choose.randrange(V) for _ in range(choose.randint(1, 9))]
            sequences += engine.add(prompt, choose.randint(5, 40), 1 + i % 2, i, **HOWS[(i + seed) % len(HOWS)])
        engine.step()
        aborted = sequences.pop(0)
        engine.end(aborted, 'abort')
        sequences += engine.add(aborted.tokens[:aborted.n_prompt], 20, seed=5)
        calls = run(engine)
        check_alone(m, sequences)
        n_late = max(n_late, engine.executor.queue.n_late)
        n_preempted += engine.scheduler.n_preempted
        assert sum(map(sum, calls)) > 4 * len(calls)
    assert n_late >= 2 and n_preempted


def test_texts_without_end_draw_what_they_draw_alone():
    """In calls of several steps a window passes the pages of before. A draw may forbid stops for longer than int32."""
    m, judge = model_of('rope window sinks'), model_of('rope window sinks', block_size=400)
    engine = engine_of(late(m))
    sequences = [s for i in range(3) for s in engine.add([i, 2], 100, seed=i)]
    endless, = engine.add([1, 2], 2**31 - 1, min_tokens=2**31 - 1, stops=[1, 2])
    while not all(s.ended for s in sequences):
        engine.step()
    check_alone(judge, sequences)
    assert endless.error is None and len(endless.tokens) > 50 and not {1, 2} & {*endless.tokens[2:]}


def test_a_call_ends_behind_a_stop_at_its_time_and_when_it_is_asked_to():
    """And goes on while some have reached their limit."""
    m = model_of('learned')
    c, pool = m.config, POOLS['pages'](m.config)
    executor = holding(late(m), pool)
    for more, stops, expected in (dict(), (), (12, 3)), (dict(until=0), (), (8, 3)), (
            dict(stop_soon=np.ones(1, np.int64)), (), (8, 3)), (dict(), range(V), (8, 1)):
        a, b = sequences = [sequence_of(c, temperature=0.0, stops=of) for of in ((), stops)]
        for s in sequences:
            pool.begin(s)
        drawn = feed(executor, pool, {a: [1], b: [2]}, {a: 12, b: 12 if stops else 3}, **more)
        assert tuple(len(of_s.tokens) for of_s in drawn) == expected
        for s in sequences:
            pool.free(s)


def test_logits_from_which_tokens_are_drawn_are_those_before_biases_and_penalties():
    m, found = model_of('rope'), {}
    engine = engine_of(late(m))
    how = dict(logit_bias={3: 4.0}, frequency_penalty=1.5, min_tokens=4, stops=[1, 2])
    sequences = engine.add([1, 2], 12, 2, 1, logprobs=True, **how) + engine.add([3], 15, frequency_penalty=1.0)
    scored, = engine.add([5, 6, 7], 3, logprobs=True, scores=True, **how)
    while not engine.is_idle:
        for s, drawn in engine.step():
            if drawn.logits is not None:
                found.setdefault(s, []).append(drawn.logits)
    check_alone(m, [*sequences, scored])
    for s in (*sequences[:2], scored):
        expected = exact(m, torch.tensor([s.tokens[:-1]]))[0, 0 if s is scored else s.n_prompt - 1:]
        torch.testing.assert_close(torch.cat(found[s]).double(), expected, atol=1e-4, rtol=1e-4)


def test_an_interrupt_leaves_nothing_under_way(monkeypatch):
    """`late` asserts it; the engine then computes all sequences anew."""
    m = model_of('rope')
    engine = engine_of(late(m))
    sequences = [s for i in range(3) for s in engine.add([i, 1], 25, seed=i)]
    land, n_landed = engine.executor.draws.land, []

    def interrupted(*args):
        n_landed.append(1)
        if len(n_landed) in (2, 5):
            raise KeyboardInterrupt
        return land(*args)
    monkeypatch.setattr(engine.executor.draws, 'land', interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(engine)
    run(engine)
    check_alone(m, sequences)


class Recorded(Queue):
    """The queue of CUDA on a CPU. pools: that of each recording, of which the step is run once."""
    pinned, land, synchronize = Direct.pinned, Direct.land, Direct.synchronize

    def __init__(self, monkeypatch):
        super().__init__(torch.device('cuda', 1))
        self.pools, self.fails = [], False
        monkeypatch.setattr('torch.cuda.graph_pool_handle', object)
        monkeypatch.setattr('torch.cuda.Stream', lambda device: f'a stream of {device}')
        monkeypatch.setattr('decode.gpu.queue.captured', self.captured)

    def captured(self, step, pool, stream):
        assert stream == 'a stream of cuda:1'
        self.pools.append(pool)
        step()
        if self.fails:
            raise KeyboardInterrupt
        return Again(step)


@torch.inference_mode()
def test_no_graph_is_recorded_in_the_pool_of_forgotten_ones(monkeypatch):
    """PyTorch's allocator refuses it: a pool ends with its last graph. One for each storage, and after an interrupt."""
    m, queue = model_of('rope'), Recorded(monkeypatch)
    executor = gpu(m, queue=queue)
    for _ in range(2):
        holding(executor, POOLS['pages'](m.config)).prepare(lambda graphs: graphs[-3:])
    queue.fails = True
    with pytest.raises(KeyboardInterrupt):
        executor.graph('draw', 1)
    queue.fails = False
    executor.graph('draw', 1)
    a, b, c = (queue.pools[i] for i in (0, 3, -1))
    assert queue.pools == [a] * 3 + [b] * 4 + [c] and len({a, b, c}) == 3


def test_a_recording_after_many_steps_draws_into_no_other_memory(monkeypatch, capsys):
    """The step that is run to be recorded would go on behind the last row of `drawn`."""
    m = model_of('rope', block_size=100)
    engine = engine_of(gpu(m, queue=Recorded(monkeypatch)), 80)
    sequences = engine.add([0], MOST_STEPS)
    run(engine)
    assert engine.executor.draws.draws.step[0] == MOST_STEPS
    sequences += [s for i in (1, 2) for s in engine.add([i], 9, seed=i)]
    run(engine)
    check_alone(m, sequences)
    assert not capsys.readouterr().err  # a step that fails is tried again


def test_logits_that_are_not_numbers_end_the_call():
    m = model_of('learned')
    with torch.no_grad():
        m.transformer.wpe.weight[7] = float('nan')  # of the position of the 7th token that is drawn
    engine = engine_of(late(m))
    sequences = engine.add([3], 30) + engine.add([4], 6)
    run(engine)
    check_alone(m, sequences[1:])
    assert sequences[0].ended == 'error' and isinstance(sequences[0].error, NotNumbers)


def test_settings_take_the_place_of_those_before(monkeypatch):
    """Also of those that were written in part. Nothing of them stays."""
    m, one = model_of('rope'), np.array([1])
    a, b = (sequence_of(m.config, [1], temperature=t, stops=[t], min_tokens=t, logit_bias={9 + t: t}) for t in (1, 2))
    used = gpu(m).draws
    used.load([a], one, 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(used, 'put', Mock(side_effect=KeyboardInterrupt))
        used.load([b], one, 1)
    for s in a, b:
        new = gpu(m).draws
        for table in used, new:
            table.load([s], one, 1)
        assert all(map(torch.equal, used.draws, new.draws))


@pytest.mark.parametrize('bits', [0, 8])
def test_keys_in_int8_and_weights_in_int8(bits):
    m, rounded = (model_of('llama', n_embd=128) for _ in range(2))
    for module in rounded.modules():
        if isinstance(module, torch.nn.Linear):
            whole, scale = quantise(module.weight.detach())
            module.weight = torch.nn.Parameter(whole * scale[:, None])
    first, expected = (Engine(each.model, each, kv_bits=bits).generate([[1, 2, 3], [4]], 20, temperature=0.0)
                       for each in (gpu(m, 'int8'), EagerExecutor(rounded)))
    assert first == expected


@pytest.mark.parametrize('weights', ['float32', 'int8'])
def test_changed_weights_are_seen_when_a_sequence_is_added(weights):
    m = model_of('rope')
    engine = Engine(m, gpu(m, weights=weights))
    before = engine.generate([[1, 2, 3]], 20, temperature=0.0)
    with torch.no_grad():
        m.transformer.h[0].mlp.c_fc.weight.mul_(3)
        m.lm_head.weight.data = m.lm_head.weight.flip(0)
    after = engine.generate([[1, 2, 3]], 20, temperature=0.0)
    assert before != after == Engine(m, gpu(m, weights=weights)).generate([[1, 2, 3]], 20, temperature=0.0)


def test_what_it_does_not_know_is_refused():
    m, s = model_of('rope'), sequence_of(model_of('rope').config)
    with pytest.raises(ValueError, match="int8 or in the dtype of the model, not 'bfloat16'"):
        gpu(m, weights='bfloat16')
    with pytest.raises(ValueError, match='one dtype, float32, bfloat16 or float16'):
        gpu(model_of('rope', dtype=torch.float64))
    executor, pool = gpu(m), POOLS['pages'](m.config)
    with pytest.raises(ValueError, match='these are float64'):
        executor.hold(make_layers(m, 8, 'float64'))
    with pytest.raises(ValueError, match='make the slots for this model'):
        executor.hold(make_layers(model_of('rope', n_layer=1), 8, 'float32'))
    pool.begin(s)
    holding(executor, pool).model.train()
    with pytest.raises(Refused, match='training mode'):
        feed(executor, pool, {s: [1]})


def test_a_step_without_slots_is_refused_before_it_writes(small_graphs):
    """Also where it is several graphs, and the first of them has all its slots. Copies are made."""
    m = model_of('rope')
    pool = POOLS['pages'](m.config)
    executor, s = holding(gpu(m), pool), sequence_of(m.config)
    pool.begin(s)
    for n, n_slots in (3, 2), (20, 10):
        s.runs.table[0], s.runs.n = (0, 0, n_slots), 1
        executor.layers[0].k.data[:] = 0
        executor.layers[0].k.data[:, 50] = 1
        batch = Batch([s], [n], np.arange(n), np.arange(n), np.zeros(1, np.int64), [False], [False], [(50, 60, 1)])
        with pytest.raises(Refused, match=f'slots for {n_slots} of {n} positions'):
            executor.execute_model(batch)
        stored = executor.layers[0].k.data
        assert (stored[:, [50, 60]] == 1).all() and stored.sum() == 2 * stored[:, 50].numel()
