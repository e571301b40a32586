"""
The scheduler in an engine on the toy kernel, one step at a time: each test is named after a bug that an engine had.
That each request gets its own tokens, whatever is planned: test_engine_machine.py.
"""
import pytest
import torch
from small_engine import run, submit
from toy_kernel import ToyKernel, begin_with_nan, toy_model

from serving.engine import Engine

V = 11


@pytest.fixture(autouse=True)
def one_step_at_a_time(monkeypatch):
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 0)


def engine_of(n_blocks=16, budget=64):
    """
    An engine with blocks of 4. plans: of all steps, [(sample, its tokens that were computed before, how many now)].
    got: what each request was given.
    """
    kernel = ToyKernel(toy_model(vocab_size=V))
    engine = Engine(kernel.model, kernel, [b'a'] * V, (), n_blocks, 4, budget)
    engine.plans, engine.got, kernel.cache, plan = [], [], engine.cache, engine.core.plan
    begin_with_nan(engine.cache)

    def noted():
        found, n_steps = plan()
        engine.plans.append([(sample, sample.computed, n) for sample, n in found])
        assert sum(n for _, n in found) <= budget and all(n > 0 for _, n in found)
        return found, n_steps
    engine.core.plan = noted
    return engine


def ask(engine, prompt, max_tokens=4, **how):
    """The samples of a new request."""
    engine.got.append(submit(engine, str(len(engine.got)), list(prompt), max_tokens, **how))
    engine.receive()
    return engine.live[engine.got[-1].request.id].samples


def finish(engine):
    run(engine)
    assert all(set(got.reasons) == {'length'} for got in engine.got)


def tables_of(engine, samples):
    return [engine.cache.records[sample.handle].table for sample in samples]


def test_uncomputed_blocks_are_not_findable():
    engine = engine_of(budget=6)
    (first,), (second,) = (ask(engine, range(10), max_tokens=2) for _ in range(2))
    engine.run_once()
    assert first.computed == 6 and second.handle is None
    assert len(engine.cache.blocks.cached_blocks(list(range(10)))) == 1
    engine.run_once()
    assert second.n_cached == 4, "found when it began: the block that was computed in the step before"
    finish(engine)


def test_fully_cached_prompt_still_runs_its_last_token():
    engine = engine_of()
    for prompt, n_found in ((range(8), 0), (range(8), 4), (range(9), 8)):
        sample, = ask(engine, prompt)
        engine.run_once()
        assert engine.plans[-1] == [(sample, n_found, len(prompt) - n_found)] and sample.n_cached == n_found
        finish(engine)


def test_cache_hit_after_preemption():
    """What a preempted sample had computed is found again as far as nobody needed its blocks."""
    engine = engine_of(n_blocks=8)
    (first,), (second,) = ask(engine, range(4), max_tokens=24), ask(engine, range(9)[::-1], max_tokens=12)
    while not engine.scheduler.n_preempted:
        assert engine.run_once()
    assert second.handle is None and second.computed == 0 and len(second.tokens) > 9
    text = second.tokens[:]
    while second.handle is None:
        engine.run_once()
    assert second.tokens[:len(text)] == text
    finish(engine)
    assert engine.stats.computed_tokens < len(first.tokens) + len(second.tokens) - 2 + len(text)


def test_no_preempt_resume_thrash():
    """A pool for half of the samples: what is computed more than once is a small part, not each text at each step."""
    engine = engine_of(n_blocks=12)
    for i in range(12):
        ask(engine, [i % 7, i % 11, 3, 1, 4], max_tokens=24)
    finish(engine)
    needed = sum(len(got.request.prompt) + 24 - 1 for got in engine.got)
    assert engine.scheduler.n_preempted and engine.stats.computed_tokens < 1.5 * needed


@pytest.mark.parametrize('n_blocks', [8, 9, 13])
def test_oldest_always_advances(n_blocks):
    engine, chooser, samples = engine_of(n_blocks, budget=7), torch.Generator().manual_seed(n_blocks), []
    for i in range(14):
        n, max_tokens = (int(torch.randint(1, most, (), generator=chooser)) for most in (15, 18))
        samples += ask(engine, [i % 11] * n, max_tokens, n=1 + i % 3)
    while True:
        waiting = engine.scheduler.waiting
        left = [sample for sample in samples if not sample.finished and (
            sample.handle is not None or sample in waiting)]  # forks come with their sample
        computed = min(left).computed if left else 0
        if not engine.run_once():
            break
        oldest = engine.plans[-1][0][0]
        assert oldest is min(left) and (oldest.finished or oldest.computed >= computed)
    finish(engine)


def test_long_prompt_does_not_stall_decoders():
    """Each sample that draws gets its token in each step; the prompt has the rest of the budget."""
    engine = engine_of(n_blocks=64, budget=8)
    short = [sample for i in range(3) for sample in ask(engine, [i], max_tokens=20)]
    engine.run_once()
    long, = ask(engine, [1] * 30, max_tokens=2)
    while len(long.tokens) < 31:
        lengths, computed = [len(s.tokens) for s in short], long.computed
        engine.run_once()
        assert long.computed == min(30, computed + 5)
        assert [len(s.tokens) for s in short] == [n + 1 for n in lengths]
    finish(engine)


def test_samples_share_the_blocks_of_their_prompt():
    engine = engine_of()
    samples = ask(engine, range(9), max_tokens=4, n=3)
    engine.run_once()
    tables = tables_of(engine, samples)
    assert tables[0] == tables[1] == tables[2] and [len(s.tokens) for s in samples] == [10] * 3
    engine.run_once()
    tables = tables_of(engine, samples)
    assert tables[0][:2] == tables[1][:2] == tables[2][:2] and len({table[2] for table in tables}) == 3
    finish(engine)
    assert engine.stats.computed_tokens == 9 + 3 * 3


def test_salt_separates_users():
    engine = engine_of()
    for salt, found in (('', 0), ('a', 0), ('a', 8), ('b', 0), ('', 8)):
        sample, = ask(engine, range(10), cache_salt=salt)
        finish(engine)
        assert sample.n_cached == found


def test_scoring_computes_its_whole_prompt():
    engine = engine_of()
    ask(engine, range(10))
    finish(engine)
    scoring, = ask(engine, range(10), 20, prompt_logprobs=True)
    engine.run_once()
    assert engine.plans[-1] == [(scoring, 0, 10)]
    finish(engine)
    other, = ask(engine, range(10))
    engine.run_once()
    assert other.n_cached == 8, "others still find what was remembered"
