"""
The host side of the GPU decoder: on the CPU, with its functions in PyTorch and steps that are run instead of recorded.
"""
import random

import numpy as np
import pytest
import torch
from cache_machine import MODELS, Machine, cache_of, model_of
from conftest import sizes
from oracle import Oracle
from small_engine import BYTES, V, alone, run, submit, tokens_alone

import kvcache
from decode.eager import EagerDecoder
from decode.gpu import plain
from decode.gpu.decoder import GPUDecoder
from decode.gpu.inputs import MOST_STEPS
from decode.gpu.queue import Again, Direct, Queue
from decode.metadata import InputMetadata
from generation import generate
from serving.engine import Engine
from serving.request import Request, SamplingParams
from serving.sampler import Drawing, Sampler

KINDS = sorted(kvcache.KINDS)
HOWS = [dict(), dict(top_p=0.7), dict(top_k=5), dict(frequency_penalty=1.5), dict(temperature=0.0),
        dict(logit_bias={3: 2.0}), dict(min_tokens=5, stop_token_ids=[1, 2, 3]), dict(stop_token_ids=[1, 2, 3, 4]),
        dict(logprobs=2), dict(repetition_penalty=1.3, presence_penalty=0.3, min_p=0.05), dict(stop=('abc', 'q'))]


def gpu_decoder(model, **how):
    return GPUDecoder(model, functions=plain, **how)


class Late(Direct):
    """
    A device that does nothing before the host waits for it: then all up to the event. n_late: how many operations
    were under way at a time, at most.
    """

    def __init__(self):
        self.waiting, self.n_late, self.late = [], 0, False

    def record(self, step):
        again = super().record(step)
        again.replay = lambda: self.do(step)
        return again

    def land(self, pairs):
        self.do(lambda: super(Late, self).land(pairs))
        return LateEvent(self, len(self.waiting))

    def synchronize(self):
        LateEvent(self, len(self.waiting)).synchronize()

    def do(self, operation):
        if not self.late:
            return operation()
        self.waiting.append(operation)
        self.n_late = max(self.n_late, len([each for each in self.waiting if each]))


class LateEvent:
    def __init__(self, queue, n):
        self.queue, self.n = queue, n

    def synchronize(self):
        for i in range(self.n):
            operation, self.queue.waiting[i] = self.queue.waiting[i], None
            operation and operation()


def late_decoder(model):
    """A decoder whose calls of several steps run on a late device."""
    decoder = gpu_decoder(model, queue=Late())
    several = decoder.several

    def late_several(*args):
        decoder.queue.late = True
        try:
            return several(*args)
        finally:
            assert not any(decoder.queue.waiting)  # whatever happened: nothing writes any more when blocks are freed
            decoder.queue.late = False
    decoder.several = late_several
    return decoder


@pytest.mark.parametrize('kind', MODELS)
def test_tuples_give_the_tokens_of_the_model(kind):
    m, prompts = model_of(kind), [[1, 2, 3], [4], [0] * 20]
    expected = generate(m, prompts, 50, temperature=0, use_cache=True)
    assert generate(m, prompts, 50, temperature=0, use_cache=True, decoder=gpu_decoder(m)) == expected


@pytest.mark.parametrize('model', MODELS)
@pytest.mark.parametrize('kind', sizes(['paged', 'unified'], KINDS))
def test_every_cache_gives_the_logits_of_a_text_without_a_cache(kind, model):
    for seed in range(sizes(1, 6)):
        m = model_of(model, seed)
        decoder = gpu_decoder(m)
        cache = cache_of(kind, m, decoder=decoder)
        assert cache.executor is decoder
        machine = Machine(cache, seed, oracle=Oracle(m))
        machine.run(sizes(30, 150))
        machine.end()


@pytest.mark.parametrize('bits', [0, 8])
def test_keys_in_int8_and_weights_in_int8(bits):
    m = model_of('llama', n_embd=128)
    decoder, prompts = gpu_decoder(m, weights='int8'), [[1, 2, 3], [4]]
    rounded = model_of('llama', n_embd=128)
    with torch.no_grad():
        for layer, block in zip(decoder.packed.layers, rounded.transformer.h):
            for linear, module in ((layer.c_attn, block.attn.c_attn), (layer.attn_proj, block.attn.c_proj), (
                    layer.c_fc, block.mlp.c_fc), (layer.c_gate, block.mlp.c_gate), (layer.mlp_proj, block.mlp.c_proj)):
                module.weight.copy_(linear.weight * linear.scale[:, None])
        head = decoder.packed.lm_head
        rounded.lm_head.weight = torch.nn.Parameter(head.weight * head.scale[:, None])
    caches = [kvcache.make_cache(model, 'paged', 2, bits, step) for model, step in ((m, decoder), (rounded, None))]
    assert caches[0].executor is decoder
    first, expected = (generate(model, prompts, 20, temperature=0, use_cache=True, cache=cache)
                       for model, cache in zip((m, rounded), caches))
    assert first == expected


def requests(engine, seed, n):
    choose = random.Random(seed)
    return [submit(engine, str(i), [choose.randrange(V) for _ in range(choose.randint(1, 9))], choose.randint(5, 30), i,
                   1 + i % 2, **HOWS[(i + seed) % len(HOWS)]) for i in range(n)]


def check_all(model, all_got, ignore=()):
    decoder = EagerDecoder(model)
    decoder.vocab_size = model.config.vocab_size
    for got in all_got:
        if got.request.id not in ignore:
            expected = tokens_alone(decoder, got.request, got.request.params.stop_token_ids)
            if not got.request.stop:
                assert got.tokens == expected, (got.request, got.error)
            assert all(tokens == more[:len(tokens)] for tokens, more in zip(got.tokens, expected)), got.request


@pytest.mark.parametrize('kind', sizes(['llama', 'rope window sinks', 'learned'], MODELS))
def test_an_engine_draws_on_the_device_what_each_request_draws_alone(kind, monkeypatch):
    """Samples end one by one in a call of several steps; few blocks, so that some are preempted."""
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 1e9)
    n_late = 0
    for seed in range(sizes(1, 5)):
        m = model_of(kind, seed)
        engine = Engine(m, late_decoder(m), BYTES, (), 40, 4, 64)
        all_got = requests(engine, seed, 30)
        run(engine)
        check_all(m, all_got)
        n_late = max(n_late, engine.decoder.queue.n_late)
        assert engine.stats.generated_tokens > 2 * engine.stats.steps
    assert n_late >= 2  # in some calls


def test_a_call_goes_on_while_some_have_ended(monkeypatch):
    """One that draws 40 tokens, beside others of 1 to 20: a call has steps behind the end of a sample."""
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 1e9)
    m = model_of('rope')
    engine, calls = Engine(m, gpu_decoder(m), BYTES, (), 80, 4, 64), []
    several = engine.decoder.several
    engine.decoder.several = lambda *args: (several(*args), calls.append(args[-1].next_tokens))[0]
    all_got = [submit(engine, str(n), [n % V], n, seed=n) for n in (1, 2, 3, 5, 9, 20, 30)]
    run(engine)
    check_all(m, all_got)
    assert any(max(new.counts) > min(new.counts) > 0 for new in calls) and len(calls) < 12


def test_an_abort_and_a_retry_of_a_shared_prefix(monkeypatch):
    m, prefix = model_of('rope'), [1, 2, 3, 4, 5, 6, 7, 8]
    engine = Engine(m, late_decoder(m), BYTES, (), 40, 4, 64)
    first = [submit(engine, name, prefix + [i], 20, seed=i) for i, name in enumerate('abc')]
    for _ in range(3):
        engine.run_once()
    engine.abort('a')
    engine.abort('b')
    again = [submit(engine, name, prefix + [i], 20, seed=i) for i, name in enumerate('xy')]
    run(engine)
    check_all(m, first + again, ignore='ab')
    assert again[0].first.n_cached == 8


def test_an_interrupt_leaves_nothing_under_way(monkeypatch):
    """`late_several` asserts it; the engine then computes all samples anew."""
    m = model_of('rope')
    decoder = late_decoder(m)
    engine = Engine(m, decoder, BYTES, (), 40, 4, 64)
    all_got = [submit(engine, str(i), [i], 25, seed=i) for i in range(3)]
    engine.run_once()
    land, n_landed = decoder.draws.land, []

    def interrupted(*args):
        n_landed.append(1)
        if len(n_landed) in (2, 5):
            raise KeyboardInterrupt
        return land(*args)
    monkeypatch.setattr(decoder.draws, 'land', interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            while engine.run_once():
                pass
    run(engine)
    check_all(m, all_got)


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
        return Again(step), None


@torch.inference_mode()
def test_no_graph_is_recorded_in_the_pool_of_forgotten_ones(monkeypatch):
    """PyTorch's allocator refuses it: a pool ends with its last graph. One for each cache, and after an interrupt."""
    m, queue = model_of('rope'), Recorded(monkeypatch)
    decoder = gpu_decoder(m, queue=queue)
    for _ in range(2):
        decoder.prepare(cache_of('paged', m, decoder=decoder).arrays, lambda graphs: graphs[-3:])
    queue.fails = True
    with pytest.raises(KeyboardInterrupt):
        decoder.graph('draw', 1)
    queue.fails = False
    decoder.graph('draw', 1)
    a, b, c = (queue.pools[i] for i in (0, 3, -1))
    assert queue.pools == [a] * 3 + [b] * 4 + [c] and len({a, b, c}) == 3


def test_a_recording_after_many_steps_draws_into_no_other_memory(monkeypatch, capsys):
    """The step that is run to be recorded would go on behind the last row of `drawn`."""
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 1e9)
    m = model_of('rope', block_size=100)
    engine = Engine(m, gpu_decoder(m, queue=Recorded(monkeypatch)), BYTES, (), 80, 4, 64)
    all_got = [submit(engine, '0', [0], MOST_STEPS + 1, seed=0)]
    run(engine)
    assert engine.decoder.draws.draws.step[0] == MOST_STEPS
    all_got += [submit(engine, str(i), [i], 9, seed=i) for i in (1, 2)]
    run(engine)
    check_all(m, all_got)
    assert not capsys.readouterr().err  # a step that fails is tried again


def test_logits_that_are_not_numbers_end_the_call():
    m = model_of('learned')
    engine = Engine(m, gpu_decoder(m), BYTES, (), 40, 4, 64)
    good, bad = submit(engine, 'good', [3], 30), submit(engine, 'bad', [4], 30)
    engine.run_once()
    with torch.no_grad():
        m.transformer.wpe.weight[7] = float('nan')  # of the position of the 7th token that is drawn
    run(engine)
    assert good.reasons == bad.reasons == ['error'] and 'not numbers' in good.error


def test_a_narrow_step_follows_a_wide_one():
    """Slots of a sequence at its full context, then of a short one in the same row of the table, and many rows."""
    m = model_of('learned')
    cache = kvcache.make_cache(m, 'paged', 8, decoder=gpu_decoder(m))
    long = cache.new()
    cache.step([long], [0], torch.arange(40)[None] % V)
    cache.free(long)
    texts = torch.randint(V, (8, 30))
    handles = [cache.new() for _ in texts]
    for t in range(30):
        n = 8 if t % 3 else 1 + t % 8
        for start in range(0, 8, n):
            some = range(start, min(8, start + n))
            logits = cache.step([handles[i] for i in some], [t] * len(some), texts[list(some), t:t + 1])
            expected = m(texts[list(some), :t + 1], use_cache=False)[0][:, 0]
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_more_sequences_than_the_largest_graph_and_longer_chunks(monkeypatch):
    monkeypatch.setattr('decode.gpu.decoder.BUCKETS', (1, 2, 4))
    m = model_of('rope window sinks')
    machine = Machine(cache_of('paged', m, decoder=gpu_decoder(m)), 3, oracle=Oracle(m))
    machine.run(80)
    machine.end()


def test_log_probabilities_are_those_before_biases_and_penalties():
    m = model_of('rope')
    engine, decoder = Engine(m, late_decoder(m), BYTES, (), 40, 4, 64), EagerDecoder(m)
    decoder.vocab_size = V
    how = dict(logit_bias={3: 4.0}, frequency_penalty=1.5, logprobs=5, min_tokens=4, stop_token_ids=[1, 2])
    all_got = [submit(engine, 'a', [1, 2], 12, 1, 2, **how), submit(engine, 'b', [3], 15, frequency_penalty=1.0)]
    run(engine)
    check_all(m, all_got)
    for got, (_, expected) in zip(all_got[0].logprobs, alone(decoder, all_got[0].request, [1, 2])):
        assert len(got) == len(expected) > 3
        assert all(abs(a.logprob - b.logprob) < 1e-4 and a.rank == b.rank for a, b in zip(got, expected))


def test_a_text_goes_back_after_its_slots_were_forgotten():
    """To a position before the one at which the table has its slots from, and all of them in the same `Runs`."""
    m, idx = model_of('rope window sinks'), torch.arange(20)[None] % V
    decoder = gpu_decoder(m)
    _, cache = decoder(idx[:, :12], None)
    _, cache = decoder(idx[:, 12:13], cache)
    decoder.refresh()
    _, cache = decoder(idx[:, 13:14], cache)
    back, expected = [(*layer[:2], 9) for layer in cache], EagerDecoder(m)(idx[:, :10], None)[0]
    torch.testing.assert_close(decoder(idx[:, 9:10], back)[0], expected, atol=1e-4, rtol=1e-4)


def test_tokens_are_drawn_once_and_by_sequences_that_may_draw_some():
    m = model_of('rope')
    cache = cache_of('paged', m, decoder=gpu_decoder(m))
    seq, sampler = cache.new(), Sampler(V)
    cache.step([seq], [0], torch.tensor([[1, 2, 3]]))
    for n_drawn, limit in ((1, 5), (0, 0)):
        drawings = [Drawing(Request('a', [1, 2, 3]), 0, (), V)]
        several = sampler.several(4, 2**62, [4], range(1), drawings, np.array([limit]))
        several.n_drawn = n_drawn
        metadata = InputMetadata([1], [cache.records[seq].runs], None, several)
        with pytest.raises(ValueError, match='make new ones, of sequences that may draw 1 or more'):
            cache.executor.execute_model(torch.tensor([4]), np.array([3]), cache.arrays, metadata)


def test_a_text_fills_the_context_while_others_go_on():
    """Then there is no position, and no slot, for what follows it."""
    m = model_of('learned')
    cache, sampler = cache_of('paged', m, decoder=late_decoder(m)), Sampler(V)
    seqs = [cache.new(), cache.new()]
    cache.step(seqs, [0, 0], [torch.arange(37) % V, torch.arange(2)])
    cache.reserve(seqs, 12, [3, 12])
    drawings = [Drawing(Request('a', [1], 50), i, (), V) for i in range(2)]
    several = sampler.several(12, 2**62, [1, 2], range(2), drawings, np.array([12, 12]))
    cache.decode_steps(seqs, several)
    assert several.counts[0] == 3 < several.counts[1] and cache.length(seqs[0]) == 40


def test_settings_that_were_written_in_part_are_written_again(monkeypatch):
    m = model_of('rope')
    decoder = gpu_decoder(m)
    sampler = Sampler(V)
    greedy, hot = (Drawing(Request('a', [1], params=SamplingParams(temperature=t)), 0, (), V) for t in (0.0, 50.0))
    write, table = decoder.draws.write, decoder.draws
    table.load(sampler.several(1, 2**62, [1], range(1), [greedy]), np.array([1]), 1)

    def interrupted(target, *args):
        write(target, *args)
        if target is table.draws.settings:
            raise KeyboardInterrupt
    monkeypatch.setattr(table, 'write', interrupted)
    with pytest.raises(KeyboardInterrupt):
        table.load(sampler.several(1, 2**62, [1], range(1), [hot]), np.array([1]), 1)
    monkeypatch.undo()
    table.load(sampler.several(1, 2**62, [1], range(1), [greedy]), np.array([1]), 1)
    assert table.draws.settings[0].tolist() == [float(x) for x in greedy.settings]


def test_min_tokens_of_a_text_without_end():
    m = model_of('rope window sinks')
    engine = Engine(m, gpu_decoder(m), BYTES, (), 40, 4, 64)
    got = submit(engine, 'a', [1, 2], 2**31 - 1, min_tokens=2**31 - 1, stop_token_ids=[1, 2])
    for _ in range(4):
        engine.run_once()
    assert got.error is None and len(got.tokens[0]) > 4 and not {1, 2} & {*got.tokens[0]}


def test_a_cache_at_position_0_begins_sequences_and_one_before_it_is_refused():
    m, idx = model_of('rope'), torch.tensor([[1]])
    decoder = gpu_decoder(m, weights='int8')
    before = decoder(idx, m.empty_cache(1))[0]
    with torch.no_grad():
        m.transformer.h[0].mlp.c_fc.weight.mul_(3)
    cache = m.empty_cache(1)
    assert not torch.equal(decoder(idx, cache)[0], before)
    with pytest.raises(ValueError, match='cache_pos'):
        decoder(idx, [(*layer[:2], -1) for layer in cache])


def test_changed_weights_are_seen():
    m = model_of('rope')
    for decoder in (gpu_decoder(m), gpu_decoder(m, weights='int8')):
        idx = torch.tensor([[1, 2, 3]])
        before, version = decoder(idx, None)[0], decoder.version
        with torch.no_grad():
            m.transformer.h[0].mlp.c_fc.weight.mul_(2)
        after = decoder(idx, None)[0]
        assert not torch.equal(before, after) and decoder.version > version
        assert torch.allclose(after, m(idx)[0], atol=1e-4 if decoder.weights == 'float32' else 0.2)


def test_what_it_does_not_know_is_refused():
    m = model_of('rope')
    with pytest.raises(ValueError, match="int8 or in the dtype of the model, not 'bfloat16'"):
        gpu_decoder(m, weights='bfloat16')
    with pytest.raises(ValueError, match='one dtype, float32, bfloat16 or float16'):
        gpu_decoder(model_of('rope', dtype=torch.float64))
    decoder = gpu_decoder(m)
    assert not decoder.reads(cache_of('paged', m, 4).arrays)
    assert kvcache.make_cache(m, 'paged', 2, 4, decoder).executor is not decoder
    m.train()
    with pytest.raises(ValueError, match='training mode'):
        decoder(torch.tensor([[1]]), None)
