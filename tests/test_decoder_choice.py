"""Which decoder `decode.best` takes, and how many threads the CPU decoder finds to be the fastest."""
import re

import pytest
from example_models import f32

import decode
from decode.choice import TRIAL, ThreadChoice
from decode.cpu import CPUDecoder


def test_best_is_the_one_place_that_picks_a_decoder():
    def name(*args, **settings):
        return decode.best(f32(8), *args, **settings).name
    assert name(1).startswith('numba') and name(1, name='cpu', threads=1).endswith('1 thread')
    assert name(decode.LARGEST_BATCH + 1) == name(1, name='eager') == 'PyTorch, eager'
    assert 'int8' in name(decode.LARGEST_BATCH + 1, weights='int8') and name(1, name='compiled').startswith('torch.')
    for settings, message in (
            (dict(name='fast'), "decoder must be auto, eager, cpu, gpu, graph or compiled, not 'fast'"),
            (dict(weights='int2'), "weights must be float32, bfloat16, int8 or int4, not 'int2'"),
            (dict(threads=-1), 'threads must be positive'), (dict(threads=10 ** 6), 'threads=1000000 cannot be had'),
            (dict(name='eager', weights='int8'), 'weights=int8 is for the cpu decoder: leave decoder=eager out'),
            (dict(name='graph'), 'decoder=graph is for CUDA, but the device is cpu: use device=cuda'),
            (dict(name='compiled', threads=2), 'threads=2 is for the cpu decoder: leave decoder=compiled out')):
        with pytest.raises(ValueError, match=re.escape(message)):
            decode.best(f32(8), 1, **settings)
    for wrong in (dict(weights='int2'), dict(threads=0), dict(threads=10 ** 6)):
        with pytest.raises(ValueError):
            CPUDecoder(f32(8), **wrong)
    for settings in (dict(name='cpu'), dict(weights='int8'), dict(threads=1)):
        with pytest.raises(ValueError, match='is for the CPU, but the device is meta'):
            decode.best(f32(8).to('meta'), 1, **settings)
    assert decode.best(f32(8).to('meta'), 1).name == 'PyTorch, eager'


def simulate(choice, n_steps, seconds):
    """Steps that take seconds(n threads, step number); returns the number of threads of each step."""
    used = []
    for step in range(n_steps):
        used.append(choice.n)
        choice.record(int(1e9 * seconds(choice.n, step)))
    return used


def test_the_fastest_number_of_threads_is_chosen_and_chosen_again():
    choice = ThreadChoice([4, 2, 1])
    used = simulate(choice, 20_000, lambda n, step: {4: 80e-6, 2: 50e-6, 1: 100e-6}[n])
    assert used[0] == 4 and used[1000:].count(2) > 0.95 * len(used[1000:])
    # a neighbour comes: two threads wait for each other. Within a tenth of a second one goes on alone
    used = simulate(choice, 2_000, lambda n, step: {4: 9e-3, 2: 3e-3, 1: 150e-6}[n])
    assert used[100:].count(1) > 0.95 * len(used[100:])
    # it goes: within some seconds there are two again
    used = simulate(choice, 40_000, lambda n, step: {4: 80e-6, 2: 50e-6, 1: 100e-6}[n])
    assert used[-1000:].count(2) > 900


def test_work_between_steps_is_no_pause():
    """Steps of 3 ms, or 4 ms on one thread, and behind each group of them 30 ms of draws."""
    choice, now, used = ThreadChoice([1, 2]), 0, []
    for _ in range(3000):
        used.append(choice.n)
        steps, draws = 7_000_000 + 3_000_000 * (choice.n == 1), 30_000_000
        choice.record(steps, now, 2, draws)
        now += steps + draws + 1_000_000
    assert used[20:].count(2) > 0.9 * len(used[20:])
    slow = [choice.n]
    for _ in range(300):  # beside a neighbour two threads are slow: soon one computes
        steps, draws = 40_000_000 if choice.n == 2 else 10_000_000, 30_000_000
        choice.record(steps, now, 2, draws)
        now += steps + draws + 1_000_000
        slow.append(choice.n)
    assert slow[20:].count(1) > 0.9 * len(slow[20:])


def test_trials_cost_little_even_when_each_step_is_long():
    """Sixteen cores and steps of 12 ms at best: slow numbers get one step, and rounds are rare."""
    candidates, best = [16, 8, 4, 2, 1], 12e-3
    choice, total = ThreadChoice(candidates), []
    simulate(choice, 1000, lambda n, step: total.append(best * 16 / n) or total[-1])
    assert sum(total) < 1.12 * 1000 * best


def test_a_context_that_grows_asks_for_no_round():
    choice = ThreadChoice([2, 1])
    used = simulate(choice, 3000, lambda n, step: (1e-4 + 3e-7 * step) * (1 if n == 2 else 2))
    assert used.count(1) * 2e-4 < 20 * TRIAL / 1e9
