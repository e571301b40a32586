"""Which executor `decode.best` takes; how many threads are the fastest; interrupts, forks, the end of a process."""
import itertools
import linecache
import multiprocessing
import os
import sys
import threading

import pytest
import torch
from conftest import ROOT, run, sizes
from test_executors import TWO, Slots, Text, texts
from tiny_models import model_of

import decode
from decode import cpu
from decode.choice import TRIAL, StepChoice
from decode.cpu import CPUExecutor
from decode.eager import EagerExecutor
from decode.kernel.step import workers
from decode.kernel.threads import Workers, n_cores


def test_best_is_the_one_place_that_picks_an_executor():
    model = model_of('learned')

    def name(*args, **settings):
        return decode.best(model, *args, **settings).name
    assert name(1).startswith('numba') and name(1, name='cpu', threads=1).endswith('1 thread')
    assert name(decode.LARGEST_BATCH + 1) == name(1, name='eager') == 'PyTorch, eager'
    assert 'int8' in name(decode.LARGEST_BATCH + 1, weights='int8')
    assert name(1, dtype='bfloat16') == name(1, kv_bits=8) == 'PyTorch, eager', "numba's has neither for these heads"
    for given, decoder, dtype in itertools.product((torch.float16, torch.bfloat16), ('auto', 'eager'), (None, 'any')):
        taken = torch.bfloat16 if (given, decoder) == (torch.bfloat16, 'auto') else torch.float32
        assert decode.converted(model_of('learned').to(given), decoder, dtype).lm_head.weight.dtype is taken
    with pytest.raises(ValueError, match='threads=1000000 cannot be had'):
        decode.best(model, 1, threads=10 ** 6)
    for settings in (dict(name='cpu'), dict(weights='int8'), dict(threads=1)):
        with pytest.raises(ValueError, match='is for the CPU, but the device is meta'):
            decode.best(model_of('learned').to('meta'), 1, **settings)
    assert decode.best(model_of('learned').to('meta'), 1).name == 'PyTorch, eager'


def simulate(choice, n_steps, seconds):
    """Steps that take seconds(n threads, step number); returns the number of threads of each step."""
    used = []
    for step in range(n_steps):
        used.append(choice.way)
        choice.record(int(1e9 * seconds(choice.way, step)))
    return used


def test_the_fastest_number_of_threads_is_chosen_and_chosen_again():
    choice = StepChoice([4, 2, 1])
    with pytest.raises(KeyboardInterrupt):
        choice.rounds.throw(KeyboardInterrupt)  # it goes on
    used = simulate(choice, 20_000, lambda n, step: {4: 80e-6, 2: 50e-6, 1: 100e-6}[n])
    assert used[0] == 4 and used[1000:].count(2) > 0.95 * len(used[1000:])
    # a neighbour comes: two threads wait for each other. Within a tenth of a second one goes on alone
    used = simulate(choice, 2_000, lambda n, step: {4: 9e-3, 2: 3e-3, 1: 150e-6}[n])
    assert used[100:].count(1) > 0.95 * len(used[100:])
    # it goes: within some seconds there are two again
    used = simulate(choice, 40_000, lambda n, step: {4: 80e-6, 2: 50e-6, 1: 100e-6}[n])
    assert used[-1000:].count(2) > 900


def test_prefetching_is_a_way_of_large_weights_and_few_rows(monkeypatch):
    ahead = (TWO, cpu.PREFETCHED)
    for cached, n_rows, threads in itertools.product((0, 2**25), (1, 15, 16), (None, TWO)):
        monkeypatch.setattr(cpu, 'CACHED', cached)
        monkeypatch.setattr(cpu, 'choices', {})
        executor = CPUExecutor(model_of('learned'), threads=threads)
        executor.n_threads = TWO
        ways = executor.choice(n_rows).candidates
        assert (ahead in ways) == (not cached and n_rows < 16) and all(way == ahead or way[1] == 0 for way in ways)
        assert {n for n, _ in ways} == ({TWO} if threads else {1, TWO})


def test_work_between_steps_is_no_pause():
    """Of two steps, and then 30 ms of draws. Beside a neighbour two threads are slow: soon one computes."""
    choice, now = StepChoice([1, 2]), 0
    for n, ms_of_steps, better in (3000, {1: 10, 2: 7}, 2), (300, {1: 10, 2: 40}, 1):
        used = []
        for _ in range(n):
            used.append(choice.way)
            steps, draws = ms_of_steps[choice.way] * 10**6, 30 * 10**6
            choice.record(steps, now, 2, draws)
            now += steps + draws + 10**6
        assert used[20:].count(better) > 0.9 * len(used[20:])


def test_trials_cost_little_even_when_each_step_is_long():
    """Sixteen cores and steps of 12 ms at best: slow numbers get one step, and rounds are rare."""
    candidates, best = [16, 8, 4, 2, 1], 12e-3
    choice, total = StepChoice(candidates), []
    simulate(choice, 1000, lambda n, step: total.append(best * 16 / n) or total[-1])
    assert sum(total) < 1.12 * 1000 * best


def test_a_context_that_grows_asks_for_no_round():
    choice = StepChoice([2, 1])
    used = simulate(choice, 3000, lambda n, step: (1e-4 + 3e-7 * step) * (1 if n == 2 else 2))
    assert used.count(1) * 2e-4 < 20 * TRIAL / 1e9


def interrupted(work, n, is_traced):
    """
    Run work, with a KeyboardInterrupt at the n-th line or call in functions for whose code is_traced(code) is true.
    Returns whether there was one. Lines with a `try`, which does nothing, or a `with` do not count: before its
    `__exit__` a trace function runs, but Python handles no signal (https://bugs.python.org/issue29988).
    """
    left = [n]

    def trace(frame, event, arg):
        if not is_traced(frame.f_code):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        left[0] -= event == 'call' or event == 'line' and not line.startswith(('with ', 'try:'))
        if left[0] == 0:
            raise KeyboardInterrupt  # which ends the tracing, too
        return trace
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return left[0] <= 0


FOLDER = os.path.dirname(decode.__file__) + os.sep


@pytest.mark.parametrize('kind', [EagerExecutor, CPUExecutor])
def test_after_ctrl_c_at_any_line_an_executor_works_as_before(kind):
    """In steps of several kinds, and while it is refreshed, after which it is refreshed again."""
    model, (text,) = model_of('llama'), texts(1, 12)
    executor, n = kind(model), 0
    expected = Slots(executor).logits({Text(text.tokens): 12})[0]

    def work():
        own, slots = Text(text.tokens[:9], frequency_penalty=1.0), Slots(executor)
        executor.refresh()
        slots.run({own: 9}, 1)
        slots.run({own: 1}, 4)
        slots.logits({Text([1] * 20): 20})

    def in_decode(code):
        return code.co_filename.startswith(FOLDER) and f'{os.sep}kernel{os.sep}' not in code.co_filename
    while interrupted(work, n := n + sizes(23, 1), in_decode):
        executor.refresh()
        own, slots = Text(text.tokens), Slots(executor)
        found = torch.cat([*slots.logits({own: 10}), *slots.logits({own: 1}), *slots.logits({own: 1})])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert n > 100


@pytest.mark.skipif(not hasattr(os, 'fork'), reason="this system has no fork")
def test_executors_in_the_child_of_a_fork():
    """One that was made before, and a new one; also while a step runs in another thread of the parent."""
    model, (text,), done = model_of('llama'), texts(1, 30), threading.Event()
    executor = CPUExecutor(model, threads=TWO)

    def logits(executor):
        return Slots(executor).logits({Text(text.tokens): 30})[0]
    expected = logits(executor)

    def go_on():
        while not done.is_set():
            logits(executor)

    def child():
        for each in (executor, CPUExecutor(model, threads=TWO)):
            assert torch.equal(logits(each), expected)
    background = threading.Thread(target=go_on)
    try:
        for number in range(sizes(5, 41)):
            if number == 1:
                background.start()
            process = multiprocessing.get_context('fork').Process(target=child)
            process.start()
            process.join(60)
            assert process.exitcode == 0, "it hangs" if process.exitcode is None else "see its traceback"
    finally:
        done.set()
        process.kill()
    background.join()


def test_the_process_ends_while_a_daemon_thread_computes(tmp_path):
    code = """
import sys, threading, time
sys.path[:0] = 'tests', '.'
from test_executors import CPUExecutor, Slots, model_of, texts
executor = CPUExecutor(model_of('learned'), threads=2)
def on_and_on():
    while True:
        slots, some = Slots(executor), texts(2, 3)
        slots.run(dict.fromkeys(some, 3), 1)
        slots.run(dict.fromkeys(some, 1), 30)
threading.Thread(target=on_and_on, daemon=True).start()
time.sleep(0.3)
"""
    (tmp_path / 'computes.py').write_text(code)
    for _ in range(sizes(1, 3) if TWO > 1 else 0):
        done = run(ROOT, tmp_path / 'computes.py')
        # Python ends daemon threads where they ask for its lock, and torch's C++ may abort at that; it must not hang
        assert done.returncode in (0, -6), done.stderr


@pytest.mark.skipif(n_cores() < 2, reason="one core")
def test_a_thread_that_cannot_start_is_asked_for_once(monkeypatch):
    """Where the system allows a process no more threads, steps are the caller's, and wait for nobody."""
    none, asked = Workers(lambda *_: 0), []

    def refuse(thread):
        asked.append(thread)
        raise RuntimeError("can't start new thread")
    monkeypatch.setattr('threading.Thread.start', refuse)
    assert [none.ready(2) for _ in range(3)] == [1, 1, 1] and len(asked) == 1


@pytest.mark.skipif(not hasattr(os, 'sched_setaffinity') or n_cores() < 2, reason="threads cannot be kept off a core")
def test_threads_are_kept_off_the_callers_core():
    """By the step after a pause; the caller may run anywhere, as before."""
    executor, before = CPUExecutor(model_of('learned'), threads=2), os.sched_getaffinity(0)
    Slots(executor).logits({Text([1, 2, 3]): 3})
    worker = workers.threads[0].native_id
    os.sched_setaffinity(worker, before)
    workers.ended = 0
    Slots(executor).logits({Text([1, 2, 3]): 3})
    assert len(os.sched_getaffinity(worker)) == len(before) - 1 and os.sched_getaffinity(0) == before
