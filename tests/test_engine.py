"""The engine gives each text what the model gives it without a cache, in any company, pool and executor."""
import contextlib
import math
import multiprocessing
import os
import random
import signal
import threading
from functools import partial

import pytest
import torch
from conftest import sizes
from drafting import given
from example_models import f32
from tiny_models import HOWS, drawn_alone, model_of
from toy_executor import ToyConstraint, ToyExecutor, toy_model

import decode
from decode.batch import NotNumbers, Refused, now
from decode.cpu import CPUExecutor
from decode.eager import EagerExecutor
from engine import Engine, default_pool, pool_for
from kvcache import PagePool, pages_for
from kvcache.llamacpp.pool import CellPool

KINDS = 'learned', 'llama', 'alibi', 'none', 'learned window', 'rope window sinks'
MAKE = EagerExecutor, partial(CPUExecutor, threads=1), partial(CPUExecutor, weights='int8', threads=1)


def pools_of(config, n_sequences=3, n_tokens=40):
    """{name: a pool} of each kind."""
    c = config
    return {'pages of 4': PagePool(60, 4, c.window, c.n_sink), 'one page each': pool_for(c, n_sequences, n_tokens),
            'few pages': PagePool(pages_for(c, 3) + 1, 3, c.window, c.n_sink),
            'streams': CellPool(c, n_sequences, n_tokens, unified=False), 'unified': CellPool(c, n_sequences, n_tokens)}


def text_alone(model, prompt, n, **how):
    """A prompt and the tokens that the model draws after it."""
    return prompt + drawn_alone(model, prompt, n, **how)[0]


@pytest.mark.parametrize('kind', KINDS)
def test_a_text_has_in_any_company_pool_and_executor_what_it_has_alone(kind):
    """On beyond the context: the tokens of the model, and with the compiled step the bits of an engine of its own."""
    n_preempted = n_found = 0
    for seed in range(sizes(1, 8)):
        model, chooser, n_new = model_of(kind, seed, block_size=10), random.Random(seed), sizes(13, 24)
        jobs = [([*range(n_shared), *(chooser.randrange(29) for _ in range(n))], chooser.choice(HOWS))
                for n_shared, n in ((0, 1), (8, 1), (8, 2), (8, 3), (5, chooser.randint(1, 4)))]
        single = [(prompt, n_new, how | dict(seed=10 * i + j, logprobs=True))
                  for i, (prompt, how) in enumerate(jobs) for j in range(2)]
        expected = [text_alone(model, prompt, n, **how) for prompt, n, how in single]
        for make in MAKE:
            executor, alone = make(model), Engine(model, make(model))
            given_alone = [each for request in single for each in given(alone, [request])]
            for name, pool in pools_of(model.config).items():
                engine = Engine(model, executor, pool, budget=chooser.choice([3, 20, 100]))
                got = given(engine, [(prompt, n, how | dict(n=2)) for prompt, n, how in single[::2]])
                assert make is EagerExecutor or got == given_alone, (seed, name, executor.name)
                assert make is MAKE[2] or [tokens for tokens, *_ in got] == expected, (seed, name, executor.name)
                assert pool.n_free * pool.page_size == pool.n_slots
                n_preempted, n_found = n_preempted + engine.scheduler.n_preempted, n_found + engine.scheduler.n_found
    assert n_preempted and n_found


def test_sequences_side_by_side_whose_lengths_differ(capsys):
    """
    The longer one is not read beyond the last slot, in the place of the shorter one. Prompts may be tensors, and the
    MLP of an odd width.
    """
    model, prompts = model_of('rope', n_inner=33), [torch.arange(20), torch.arange(9)]
    expected = [text_alone(model, prompt.tolist(), 6, temperature=0) for prompt in prompts]
    assert Engine(model).generate(prompts[0][None], 6, temperature=0) == expected[:1]
    for pool in (PagePool(3, 16), CellPool(model.config, 2, 20)):
        assert Engine(model, pool=pool).generate(iter(prompts), 6, temperature=0) == expected
    assert not capsys.readouterr().err, "no step has failed"


@pytest.mark.parametrize('kind', KINDS[:4])
@pytest.mark.parametrize('keep, n_keep', [(None, 0), (5, 0), (3, 4), (1, 15)])
def test_a_full_context_is_shifted(kind, keep, n_keep):
    """The kept tokens are computed again at positions 0, 1, ...: a judge that knows nothing of slots."""
    model = model_of(kind, 2, block_size=16)
    for n_prompt in (1, 7, 16, 20):
        prompt = [(7 * i) % 29 for i in range(n_prompt)]
        kept = min(n_keep, n_prompt)
        last = keep or min(8, 16 - kept)
        text, context = prompt[:], prompt[:kept] + prompt[kept:][-(16 - kept):] if n_prompt > 16 else prompt[:]
        for _ in range(40):
            if len(context) > 16:
                context = context[:kept] + context[-last:]
            token = int(model(torch.tensor([context]), use_cache=False)[0].argmax())
            text.append(token)
            context.append(token)
        for make in MAKE[:2]:
            engine = Engine(model, make(model), pool_for(model.config, 1, 16))
            assert engine.generate([prompt], 40, when_full='shift', keep=keep, n_keep=n_keep, temperature=0) == [text]


def toy_engine(n_pages=40):
    """On the toy executor, with pages of 4."""
    model = toy_model(block_size=64)
    return Engine(model, ToyExecutor(model), default_pool(model.config, n_pages, 4))


def finish(engine):
    while not engine.is_idle:
        engine.step()
    assert engine.pool.n_free == engine.pool.n_pages


def test_stream_gives_tokens_as_they_come_and_computes_no_more():
    engine = toy_engine()
    engine.longest_call = 0  # a step a call
    texts, stream = {0: [], 1: [], 2: [], 3: []}, engine.stream([[1, 2], [3]], 9, n=2, seed=5)
    for number, tokens in stream:
        texts[number] += tokens
    assert {len(tokens) for tokens in texts.values()} == {9}
    assert [texts[i] for i in range(4)] == [text[-9:] for text in engine.generate([[1, 2], [3]], 9, n=2, seed=5)]
    n_calls = len(engine.executor.calls)
    stream = engine.stream([[4]], 50)
    next(stream)
    stream.close()
    assert len(engine.executor.calls) == n_calls + 1 and engine.is_idle and engine.pool.n_free == 40
    assert engine.generate([[4]], 0) == [[4]] and engine.is_idle


@pytest.mark.parametrize('make', MAKE[:2])
def test_a_stream_gives_what_the_steps_of_others_drew_for_it(make):
    """Also where they end it, or meet its error."""
    model = model_of('learned', block_size=60)
    engine, prompts = Engine(model, make(model)), [[5, 9], [4]]
    expected, texts = engine.generate(prompts, 40, seed=3), [prompt[:] for prompt in prompts]
    for number, tokens in engine.stream(prompts, 40, seed=3):
        texts[number] += tokens
        assert engine.generate([[1, 2, 3]], 50, temperature=0) == engine.generate([[1, 2, 3]], 50, temperature=0)
    assert texts == expected
    failing = engine.stream([[7]], 9, stop_ids=[20], constraint=ToyConstraint(29, 25, fails=lambda drawn: 1 / 0))
    next(failing)
    engine.generate([[1, 2, 3]], 5)
    with pytest.raises(ZeroDivisionError):
        list(failing)


@pytest.mark.parametrize('error', [FloatingPointError, Refused])
def test_a_step_that_fails_is_tried_in_halves_then_one_by_one(error, capsys):
    """That the others end as without the one that fails: test_engine_machine.py."""
    engine, prompts, tried = toy_engine(99), [[i, i + 1, i] for i in range(7)], []

    def fails(texts):
        tried.append(len(texts))
        if any(text[:3] == prompts[5] for text in texts):
            raise error("this one")
    engine.executor.fails = fails
    sequences = [engine.add(prompt, 12)[0] for prompt in prompts]
    finish(engine)
    assert tried[:7] == [7, 4, 3, 1, 1, 1, 6]
    assert [s.ended for s in sequences] == ['length'] * 5 + ['error', 'length']
    assert type(sequences[5].error) is error
    assert 'a call of 7 sequences failed' in capsys.readouterr().err
    with pytest.raises(error, match='this one'):
        engine.generate([prompts[5]], 5)


@pytest.mark.parametrize('error', [Refused, KeyboardInterrupt])
def test_copies_of_a_step_that_was_not_made_are_made_again(error, capsys):
    """It ended before its copies on write. The samples of a prompt go on from their own tokens; no other step fails."""
    expected = toy_engine().generate([[1, 2, 3, 4, 5, 6, 7]], 9, n=3)
    for at in range(6):
        engine, left = toy_engine(), [at]
        whole, engine.longest_call = engine.executor.execute_model, 0

        def refuses(batch, whole=whole, left=left):
            left[0] -= 1
            if left[0] == -1 and len(batch.sequences) > 1:
                raise error("not this time")
            return whole(batch)
        engine.executor.execute_model = refuses
        sequences = engine.add([1, 2, 3, 4, 5, 6, 7], 9, n=3)
        while not engine.is_idle:
            with contextlib.suppress(KeyboardInterrupt):
                engine.step()
        assert [s.tokens for s in sequences] == expected
        assert capsys.readouterr().err.count('failed') == (error is Refused and at > 0)


@pytest.mark.parametrize('make', MAKE[:2])
def test_broken_weights_end_a_run_and_mended_ones_go_on(make, capsys):
    """A NaN in stored keys is gone with the reset: a mask does not hide it."""
    model, prompts = model_of('learned'), [[1, 2, 3], [4] * 9]  # side by side, PyTorch reads as much of both
    expected = Engine(model, make(model)).generate(prompts, 10)
    engine, p = Engine(model, make(model), pool_for(model.config, 2, 40)), model.transformer.h[1].attn.c_attn.weight
    before = p.detach().clone()
    with torch.no_grad():
        p.fill_(float('inf'))
    with pytest.raises(NotNumbers):
        engine.generate([[5] * 20] * 2, 10)
    with torch.no_grad():
        p.copy_(before)
    capsys.readouterr()
    assert engine.generate(prompts, 10) == expected and not capsys.readouterr().err


@pytest.mark.parametrize('way', [EagerExecutor, CPUExecutor])
def test_tokens_before_logits_that_are_not_numbers_stay(way):
    """However many steps follow each other in a call."""
    model = f32(tied=False, block_size=64)
    tokens, = Engine(model).generate([[1, 2, 3]], 40, seed=1)
    n = max(i for i, token in enumerate(tokens[3:], 1) if token not in tokens[:2 + i])  # first drawn as number n
    assert n > 5
    with torch.no_grad():
        model.transformer.wte.weight[tokens[2 + n]] = math.nan
    for most_ahead in (1, 64):
        engine = Engine(model, way(model))
        s, = engine.add([1, 2, 3], 40, seed=1, most_ahead=most_ahead)
        finish(engine)
        assert s.ended == 'error' and s.tokens == tokens[:3 + n] and isinstance(s.error, NotNumbers)


@pytest.mark.parametrize('make', MAKE)
def test_changed_weights_are_noticed_when_a_sequence_is_added(make):
    model = model_of('learned', block_size=64)
    with torch.inference_mode():  # torch counts no changes of such a weight, and it hides none of another
        model.transformer.ln_f.weight = torch.nn.Parameter(torch.ones(48), requires_grad=False)
    engine = Engine(model, make(model))
    first = engine.generate([[1] * 20], 10)
    s, = engine.add([1] * 20, 10)
    engine.longest_call = 0
    engine.step()
    with torch.no_grad():
        for p in (p for p in model.parameters() if not p.is_inference()):
            p.add_(0.1 * torch.randn_like(p))
    second = Engine(model, make(model)).generate([[1] * 20], 10)
    assert engine.generate([[1] * 20], 10) == second != first
    assert s.ended == 'length' and len(s.tokens) == 30


def test_ctrl_c_comes_between_two_calls_of_the_compiled_step():
    """A real signal, at many moments; the engine goes on, with the same tokens."""
    model = model_of('learned', block_size=256)
    engine = Engine(model, CPUExecutor(model, threads=1))
    expected = engine.generate([[1, 2, 3]], 200)
    for moment in range(20):
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.001 * moment, os.kill, (os.getpid(), signal.SIGINT)).start()
            while True:
                assert engine.generate([[1, 2, 3]], 200) == expected
        assert engine.generate([[1, 2, 3]], 200) == expected


def test_another_thread_and_a_forked_child_are_told_so():
    engine, errors = toy_engine(), []

    def intrude(texts):
        thread = threading.Thread(target=lambda: errors.append(pytest.raises(ValueError, engine.step)))
        thread.start()
        thread.join()
    engine.executor.fails = intrude
    engine.generate([[1]], 1)
    assert 'one thread at a time' in str(errors[0].value)
    if not hasattr(os, 'fork'):
        return
    context = multiprocessing.get_context('fork')
    receiving, sending = context.Pipe(False)

    def child():
        with pytest.raises(ValueError) as error:
            engine.generate([[1]], 1)
        sending.send(str(error.value))
    process = context.Process(target=child)
    process.start()
    assert receiving.poll(60) and 'before a fork' in receiving.recv()
    process.join()


@pytest.mark.parametrize('kv_bits', [0, 8])
def test_a_pool_by_default_is_no_larger_than_its_bytes(monkeypatch, kv_bits):
    monkeypatch.setattr('engine.engine.POOL_BYTES', 2**18)
    model = model_of('learned', block_size=8192).double()
    engine = Engine(model, EagerExecutor(model), kv_bits=kv_bits)
    assert 0.9 * 2**18 < sum(tensor.nbytes for layer in engine.layers for tensor in layer.tensors()) <= 2**18


@pytest.mark.parametrize('wrong, words', [
    (dict(prompt=[]), 'at least one token'), (dict(prompt=[29]), 'vocabulary of 29'), (dict(prompt=[-1]), 'vocabulary'),
    (dict(prompt=['a']), 'list of'), (dict(prompt=[[1], [2, 3]]), 'list of'), (dict(prompt=[1.5]), 'list of'),
    (dict(prompt=[1] * 12, max_new_tokens=20), '8 pages of 4 slots, and the pool has 6'),
    (dict(when_full='roll'), "when_full must be crop or shift"), (dict(keep=3), "when_full='shift'"),
    (dict(when_full='shift', keep=33), 'must fit in 32'), (dict(when_full='shift', n_keep=32), 'must fit in 32'),
    (dict(when_full='shift', keep=7.5), 'keep must be an integer'), (dict(when_full='shift', keep=0), 'from 1'),
    (dict(when_full='shift', n_keep=1.5), 'n_keep must be an integer'), (dict(n_keep=-1), 'n_keep must be an integer'),
    (dict(salt=[1]), 'salt must be a text'), (dict(most_ahead=None), 'most_ahead must be an integer from 1 on'),
    (dict(min_tokens='2'), 'min_tokens must be an integer from 0 on'),
    (dict(logits_from='x'), 'logits_from must be'), (dict(logit_bias={3: math.nan}), 'a bias must be a number'),
    (dict(prompt=[1] * 33, max_new_tokens=1, prompt_logits=True), 'a prompt of at most 32 tokens, not 33')])
def test_what_makes_no_sense_is_refused(wrong, words):
    model = model_of('learned', block_size=32)
    engine = Engine(model, EagerExecutor(model), default_pool(model.config, 6, 4))
    with pytest.raises(ValueError, match=words):
        engine.add(**(dict(prompt=[1] * 32 if 'n_keep' in wrong else [1], max_new_tokens=2) | wrong))
    with pytest.raises(ValueError, match='another model'):
        Engine(model, EagerExecutor(model_of('learned')))
    for how in dict(kv_bits=4), dict(most_running=0), dict(budget=0):
        with pytest.raises(ValueError, match='must be'):
            Engine(model, **how)
    assert engine.is_idle and len(engine.generate([[1, 2]], 4)[0]) == 6


def test_a_pool_is_of_one_engine():
    """Another one finds nothing in it, and the first one is told so."""
    pool = PagePool(40, 4)
    one, two = toy_model(), model_of('learned', block_size=32)
    first = Engine(one, ToyExecutor(one), pool)
    first.generate([[1] * 9], 3)
    assert Engine(two, EagerExecutor(two), pool).generate([[1] * 9], 3, temperature=0) == Engine(two).generate(
        [[1] * 9], 3, temperature=0)
    with pytest.raises(ValueError, match='has taken the pool of this one'):
        first.generate([[1] * 9], 3)


def test_a_sequence_may_end_while_a_call_is_under_way():
    """As where Python collects a generator of `stream`. The call may fail: others go on."""
    engine = toy_engine()
    expected, = engine.generate([[1, 2, 3]], 9)
    for error in None, Refused, RuntimeError:
        (leaving,), (staying,) = (engine.add(prompt, 9, most_ahead=1) for prompt in ([4, 5], [1, 2, 3]))

        def fails(texts, leaving=leaving, error=error):
            if not leaving.ended and leaving.n_drawn == 2:
                engine.end(leaving, 'abort')
                engine.executor.fails = lambda texts: None
                if error:
                    raise error('while one ends')
        engine.executor.fails = fails
        finish(engine)
        assert leaving.ended == 'abort' and staying.tokens == expected and not staying.error


def test_a_constraint_that_fails_ends_its_own_sequence():
    model = model_of('learned', block_size=60)
    engine = Engine(model)

    def fails(drawn):
        if len(drawn) == 3:
            raise MemoryError('of a constraint')
    bad, = engine.add([1], 9, stop_ids=[20], constraint=ToyConstraint(29, 25, fails=fails))
    good, = engine.add([2], 9, stop_ids=[20], seed=1, constraint=ToyConstraint(29, 25))
    finish(engine)
    assert bad.ended == 'error' and isinstance(bad.error, MemoryError) and bad.n_drawn == 3
    assert not good.error and good.tokens == text_alone(model, [2], 9, stop_ids=[20], seed=1,
                                                        constraint=ToyConstraint(29, 25))


@pytest.mark.parametrize('speculate', ['off', 'int4'])
def test_constrained_sequences_beside_others(speculate, monkeypatch):
    """Also after interrupts. Others make several steps in a call in which these make one; such calls are short."""
    monkeypatch.setattr('engine.engine.LONGEST_MASKED', 9.0)
    interrupts = []

    def fails(drawn):
        if len(interrupts) < 2 and len(drawn) == 2 + 3 * len(interrupts):
            interrupts.append(drawn[-1])
            raise KeyboardInterrupt
    model = model_of('learned', block_size=60)
    prompts = [[1, 2, 3], [4], list(range(9))]
    hows = [how | dict(stop_ids=[20, 21]) for how in (dict(), dict(temperature=0.0), dict(top_k=5, min_tokens=6),
                                                   dict(top_p=0.7, frequency_penalty=1.0), dict(logprobs=True))]
    requests = [(prompt, 30, how | dict(seed=i, constraint=constraint))
                for i, how in enumerate(hows) for prompt in prompts
                for constraint in (None, ToyConstraint(29, 25), ToyConstraint(29, 7, fails=fails))]
    expected = [text_alone(model, prompt, n, **how) for prompt, n, how in requests]
    executor = decode.best(model, 1, threads=1, speculate=speculate)
    for n_pages in (999, 40):
        engine, alone, several = Engine(model, executor, PagePool(n_pages, 4)), set(), 0
        sequences = [s for prompt, n, how in requests for s in engine.add(prompt, n, **how)]
        while not engine.is_idle:
            with contextlib.suppress(KeyboardInterrupt):
                drawn = [(s, len(of_s.tokens)) for s, of_s in engine.step()]
                alone |= {n for s, n in drawn if s.constraint}
                several += (any(s.constraint for s, _ in drawn) and any(n > 1 for _, n in drawn)
                            and not any(s.constraint for s, n in drawn if n > 1))
        assert [s.tokens for s in sequences] == expected and alone <= {0, 1} and several > 3
        assert {s.ended for s in sequences} == {'stop', 'length'} and len(interrupts) == 2
        assert n_pages == 999 or engine.scheduler.n_preempted > 0
    seen, executing = [], executor.execute_model
    monkeypatch.undo()
    monkeypatch.setattr(executor, 'execute_model', lambda batch: seen.append(batch.until - now()) or executing(batch))
    for constraint in (None, ToyConstraint(29)):
        engine.generate([[1]], 5, constraint=constraint)
        assert max(seen[1:]) <= 0.0005 * 1e9 if constraint else max(seen) > 0.01 * 1e9
        seen.clear()
