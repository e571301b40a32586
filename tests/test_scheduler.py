"""The scheduler, one step at a time, on the toy executor. That each request gets its tokens: test_engine_machine.py."""
import pytest
import torch
from toy_executor import ToyExecutor, toy_model

from decode.batch import Refused
from engine import Engine, default_pool

V = 11


def engine_of(n_pages=16, budget=64, most_ahead=1, block_size=32, **how):
    """An engine with pages of 4. plans: of each step, [(sequence, how many tokens were computed before, and now)]."""
    model = toy_model(block_size, V)
    executor = ToyExecutor(model)
    engine = Engine(model, executor, default_pool(model.config, n_pages, 4), budget, **how)
    engine.plans, engine.most_ahead, executor.pool, whole = [], most_ahead, engine.pool, executor.execute_model

    def noted(batch):
        engine.plans.append([(s, s.n_computed, n) for s, n in zip(batch.sequences, batch.counts)])
        assert sum(batch.counts) <= budget and min(batch.counts) > 0
        return whole(batch)
    executor.execute_model = noted
    return engine


def ask(engine, prompt, max_tokens=4, **how):
    """The sequences of a new request."""
    return engine.add(list(prompt), max_tokens, most_ahead=engine.most_ahead, **how)


def finish(engine):
    while not engine.is_idle:
        engine.step()
    assert engine.pool.n_free == engine.pool.n_pages
    assert all(s.ended == 'length' for plan in engine.plans for s, _, _ in plan)


def test_no_preempt_resume_thrash():
    """A pool for half of the texts: what is computed more than once is a small part, not each text at each step."""
    engine, sequences = engine_of(n_pages=12), []
    for i in range(12):
        sequences += ask(engine, [i % 7, i % 11, 3, 1, 4], max_tokens=24)
    finish(engine)
    needed = sum(len(s.tokens) - 1 for s in sequences)
    assert engine.scheduler.n_preempted and engine.n_computed < 1.5 * needed


@pytest.mark.parametrize('n_pages', [8, 9, 13])
def test_oldest_always_advances(n_pages):
    engine, chooser, sequences = engine_of(n_pages, budget=7), torch.Generator().manual_seed(n_pages), []
    for i in range(14):
        n, max_tokens = (int(torch.randint(1, most, (), generator=chooser)) for most in (15, 18))
        sequences += ask(engine, [i % 11] * n, max_tokens, n=1 + i % 3)
    while not engine.is_idle:
        scheduler = engine.scheduler
        oldest = min(s for s in sequences if s in scheduler.running or s in scheduler.waiting)  # forks come with theirs
        n = oldest.n_computed
        engine.step()
        assert engine.plans[-1][0][0] is oldest and (oldest.ended or oldest.n_computed > n or oldest.siblings == [])
    finish(engine)


def test_long_prompt_does_not_stall_decoders():
    """Each sequence that draws gets its token in each step; the prompt has the rest of the budget."""
    engine = engine_of(n_pages=64, budget=8)
    short = [s for i in range(3) for s in ask(engine, [i], max_tokens=20)]
    engine.step()
    long, = ask(engine, [1] * 30, max_tokens=2)
    while not long.n_drawn:
        lengths, computed = [len(s.tokens) for s in short], long.n_computed
        engine.step()
        assert long.n_computed == min(30, computed + 5)
        assert [len(s.tokens) for s in short] == [n + 1 for n in lengths]
    finish(engine)


def test_a_long_prompt_keeps_no_later_one_waiting():
    """A short prompt gets what it lacks, and the oldest one half of each step at least."""
    engine = engine_of(n_pages=128, budget=8, block_size=512)
    long, = ask(engine, [i % 7 for i in range(300)])
    engine.step()
    short, = ask(engine, [8, 9, 8, 9, 8])
    for _ in range(5):
        engine.step()
    assert short.ended and all(n >= 4 for plan in engine.plans for s, _, n in plan if s is long)
    others = [ask(engine, [7 + i] * 40)[0] for i in range(3)] + [ask(engine, [10, 7] * 20)[0]]
    engine.step()
    assert [s.n_found is None for s in others] == [False, False, False, True], "with the first one they are four"
    finish(engine)


def test_a_prompt_waits_for_the_pages_that_it_will_find():
    engine = engine_of(n_pages=128, budget=8, block_size=512)
    prompt = [i % 7 for i in range(100)]
    ask(engine, prompt + [8] * 100, max_tokens=1)
    second, = ask(engine, prompt + [9] * 5)
    while not second.ended:
        engine.step()
    assert second.n_found == 100 and len(engine.plans) < 25, "it does not wait for the whole of the first prompt"
    finish(engine)


def test_samples_share_the_pages_of_their_prompt():
    engine = engine_of()
    samples = ask(engine, range(9), n=3)
    engine.step()  # all but the last token of the prompt, which each sample computes for itself
    engine.step()
    tables = [s.table for s in samples]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2] and len({table[2] for table in tables}) == 3
    finish(engine)
    assert engine.n_computed == 8 + 3 * 4


def test_siblings_do_not_lock_out_what_is_tried():
    """After a call that was refused: two may run, and the samples of the first prompt would be both."""
    engine = engine_of(50, 8, most_ahead=64, most_running=2)
    sequences = ask(engine, [*range(V)] * 2, 5, n=3) + ask(engine, [1, 2, 3], 5)

    def refuses(texts):
        engine.executor.fails = lambda texts: None
        raise Refused('once')
    engine.executor.fails = refuses
    finish(engine)
    assert not any(s.error for s in sequences)


def test_salt_separates_users():
    engine = engine_of()
    for salt, found in (('', 0), ('a', 0), ('a', 8), ('b', 0), ('', 8)):
        s, = ask(engine, range(10), salt=salt)
        finish(engine)
        assert s.n_found == found


@pytest.mark.parametrize('n_pages, budget', [(100, 8), (8 * 8 + 1, 64), (8 * 7, 64)])
def test_steps_repeat_while_others_wait_and_while_pages_are_few(n_pages, budget):
    engine = engine_of(n_pages, budget, most_ahead=64)
    first, *_ = [ask(engine, [i], 31, seed=i)[0] for i in range(9)]  # each takes 8 pages in the end
    finish(engine)
    assert sum(first in [s for s, _, _ in plan] for plan in engine.plans) < 25


@pytest.mark.parametrize('n_prompt, drawn', [(17, (3, 1)), (21, (3, 0))])  # its tokens take 5 pages, or 6
def test_pages_for_later_steps_keep_no_request_waiting(n_prompt, drawn):
    """A request comes while another one's steps repeat, and finds the room that it finds behind single steps."""
    engine = engine_of(n_pages=8, most_ahead=64)
    a, = ask(engine, [1, 2, 3, 4, 5], 24)
    engine.step()
    engine.return_soon[0] = 1  # the call ends after its first step
    engine.step()
    assert a.n_drawn == 2 and engine.pool.n_free < 6  # two pages for its 6 tokens, and others for later ones
    b, = ask(engine, [i % V for i in range(n_prompt)], 2)
    engine.step()
    assert (a.n_drawn, b.n_drawn) == drawn  # a may take one page more, so b gets 5 of 8
    finish(engine)


def test_a_sequence_that_is_tried_keeps_its_slots():
    """After a failed call, one of a group has no room: what is trimmed for it is not what another one needs."""
    engine = engine_of(n_pages=12)
    (a,), (b,), (c,) = ask(engine, range(8), 3), ask(engine, [*range(9), 1, 2, 3], 3), ask(engine, [5, 6] * 14, 2)
    scheduler, pool = engine.scheduler, engine.pool
    for s in (a, b, c):
        scheduler.waiting.remove(s)
        scheduler.running.append(s)
        pool.begin(s)
        assert pool.extend(s, 8)
    plan = [(s, 8) for s in (a, b, c)]
    engine.executor.execute_model(scheduler.batch_of(plan, 2**63 - 1, engine.return_soon))
    for s in (a, b, c):
        pool.computed(s, 8)
    a.tokens.append(1)
    held = [pool.acquire() for _ in range(pool.n_free - 1)]
    scheduler.suspects = [[b, c]]
    engine.step()
    assert [(s, n) for s, _, n in engine.plans[-1]] == [(b, 4)] and b.error is None and b.n_drawn == 1
    for page in held:
        pool.release(page)
    finish(engine)
