"""The number of threads is chosen by timing, here with a clock of the test; FLOPS of devices."""
import itertools
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, sizes

import device
import positions
from model import GPT, GPTConfig


class Clock:
    """time.perf_counter for device.py: a step takes what `cost` says of torch's number of threads."""

    def __init__(self, cost):
        self.now, self.cost, self.runs = 0.0, cost, []
        torch.set_num_threads(max(cost))

    def step(self):
        self.runs.append(torch.get_num_threads())
        self.now += self.cost[torch.get_num_threads()]

    def __call__(self):
        return self.now


@pytest.fixture
def timed(monkeypatch):
    """A function of costs {threads: seconds}: the clock of device.py then. Torch has the most of these threads."""
    def make(cost):
        clock = Clock(cost)
        monkeypatch.setattr(device.time, 'perf_counter', clock)
        return clock
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    before = torch.get_num_threads()
    yield make
    torch.set_num_threads(before)


def test_the_fastest_is_chosen_but_torchs_own_number_is_kept_where_it_is_as_good(timed):
    said, clock = [], timed({4: 0.03, 2: 0.01, 1: 0.013})
    device.choose_threads(clock.step, None, said.append)
    assert torch.get_num_threads() == 2 and said == ['threads: 2 of 4, by timing (4: 30.0 ms, 2: 10.0 ms, 1: 13.0 ms)']
    assert device.fastest_threads(timed({2: 0.0105, 1: 0.01}).step)[0] == 2
    assert device.fastest_threads(timed({2: 0.012, 1: 0.01}).step)[0] == 1


def test_numbers_take_turns_and_the_hopeless_are_not_tried_again(timed):
    clock = timed({8: 0.01, 4: 0.015, 2: 0.04, 1: 100.0})
    threads, medians = device.fastest_threads(clock.step, rounds=2)
    assert threads == 8 and medians == pytest.approx({8: 0.01, 4: 0.015}) and clock.runs == [8, 8, 4, 2, 8, 4, 8, 4]
    clock = timed({4: 1.5})  # a long step
    assert device.fastest_threads(clock.step) == (4, {}) and clock.runs == [4]


def test_no_round_begins_after_the_time_is_up(timed):
    clock = timed({2: 0.9, 1: 1.0})
    device.fastest_threads(clock.step, rounds=50, seconds=5.0)
    assert clock.now < 0.9 + 5.0 + 1.9 and clock.runs == [2] + [2, 1] * 3


@pytest.fixture
def threads(timed):
    torch.set_num_threads(4)


def test_the_run_before_and_the_user_decide_without_timing(monkeypatch, threads):
    said = []
    device.choose_threads(pytest.fail, 1, said.append)
    assert torch.get_num_threads() == 1 and said == ['threads: 1 of 4, as in the run before']
    torch.set_num_threads(4)
    device.choose_threads(pytest.fail, 64, said.append)  # of a larger machine
    assert torch.get_num_threads() == 4 and 'the run before had 64' in said[-1]
    monkeypatch.setenv('OMP_NUM_THREADS', '4')
    device.choose_threads(pytest.fail, None, said.append)
    device.choose_threads(pytest.fail, 4, said.append)
    assert torch.get_num_threads() == 4 and len(said) == 2


def test_work_in_parallel(threads):
    """Results come in order, torch has one thread meanwhile, and no more items are taken than there are threads for."""
    taken, done = itertools.count(1), []

    def work(i):
        assert torch.get_num_threads() == 1 and i <= len(done) + 5
        time.sleep(0.002 * (i % 3))
        done.append(i)
        if i == 19:
            raise ValueError('no 19')
        return i * i
    assert device.in_parallel(work, itertools.islice(taken, 12)) == [i * i for i in range(1, 13)]
    assert sorted(done) == [*range(1, 13)] and torch.get_num_threads() == 4
    with pytest.raises(ValueError, match='no 19'):
        device.in_parallel(work, taken)
    assert next(taken) <= 25 and torch.get_num_threads() == 4


ATTENTION = F.scaled_dot_product_attention


def one_key_less(q, k, v, mask=None, dropout_p=0.0, is_causal=False, enable_gqa=False):
    """With is_causal; all but the first query do not see their own key."""
    if is_causal:
        mask = torch.ones(q.size(2), q.size(2), dtype=torch.bool).tril(-1)
        mask[0, 0] = True
    return ATTENTION(q, k, v, mask, enable_gqa=enable_gqa)


def wrong_in_halves(q, k, v, mask=None, dropout_p=0.0, is_causal=False, enable_gqa=False):
    return ATTENTION(q, k, v, mask, dropout_p, is_causal, enable_gqa=enable_gqa) * (1 + .2 * (q.dtype != torch.float32))


@pytest.mark.parametrize('attention, asked, found', [
    (ATTENTION, 'float32', 'float32'), (ATTENTION, 'bfloat16', 'bfloat16'), (ATTENTION, 'float16', 'float16'),
    (one_key_less, 'float32', 'float32 with masks'), (wrong_in_halves, 'bfloat16', 'float32 with masks'),
    (lambda *args, **kwargs: ATTENTION(*args, **kwargs) * torch.nan, 'float32', None)])
def test_a_device_whose_attention_is_wrong(monkeypatch, capsys, attention, asked, found):
    """cpu:0 is a device whose attention is this one; that of cpu is right."""
    logits_of_chunks = device.logits_of_chunks

    def logits(GPT, GPTConfig, where, dtype):
        with monkeypatch.context() as patched:
            patched.setattr(F, 'scaled_dot_product_attention', attention if where == 'cpu:0' else ATTENTION)
            return logits_of_chunks(GPT, GPTConfig, where, dtype)
    monkeypatch.setattr(device, 'DOUBTED', 'cpu:0')
    monkeypatch.setattr(device, 'logits_of_chunks', logits)
    monkeypatch.setattr('positions.MASKED', set())
    if found:
        dtype = device.trusted_dtype(GPT, GPTConfig, 'cpu:0', asked)
        assert dtype + ' with masks' * ('cpu' in positions.MASKED) == found
        assert ('computes other logits in ' + asked in capsys.readouterr().err) == ('masks' in found)
    else:
        with pytest.raises(ValueError, match='use device=cpu'):
            device.trusted_dtype(GPT, GPTConfig, 'cpu:0', asked)
    assert device.trusted_dtype(None, None, 'cpu', asked) == asked  # of others nothing is tried


def test_flops_of_a_device(threads, monkeypatch):
    four = device.default_peak_flops('cpu')
    torch.set_num_threads(2)
    assert four == 2 * device.default_peak_flops(torch.device('cpu')) > 1e10
    assert device.default_peak_flops('meta') is None
    sheet = {'NVIDIA A100-SXM4-40GB': 312e12, 'NVIDIA L40S': 362e12, 'NVIDIA RTX A1000 Laptop GPU': None}
    for name, flops in sheet.items():
        monkeypatch.setattr('torch.cuda.get_device_name', lambda _, name=name: name)
        assert device.default_peak_flops('cuda') == flops


WAITS = """
import os, sys, threading, time
sys.path.insert(0, '.')
import torch
import device
torch.set_num_threads(2)
x, since, used, rate = torch.ones(1 << 17), time.monotonic(), 0.0, 0.0

def used_by_others(cores):
    global since, used
    used, since = used + rate * (time.monotonic() - since), time.monotonic()
    return used

def seconds_of_waiting():  # of the processor, in a time in which almost nothing is computed
    start = time.process_time()
    for _ in range(40):
        x.sin()
        time.sleep(0.005)
    return time.process_time() - start

device.used_by_others = used_by_others
device.share_cores(seconds=0.05)
n = torch.get_num_threads()
torch.set_num_threads(1)  # for a while, as where files are read side by side
time.sleep(0.2)
torch.set_num_threads(n)
results = []
for rate in (0.0, max(0.5, len(os.sched_getaffinity(0)) - 1), 0.0):
    time.sleep(0.4)
    results.append(seconds_of_waiting())
print(*results)
"""


@pytest.mark.skipif(not os.path.exists('/proc/stat'), reason="only where GNU's OpenMP is")
def test_torchs_threads_spin_alone_and_sleep_beside_other_processes():
    """By what waiting costs, which other programs on this machine do not change."""
    def seconds(**env):
        env = {k: v for k, v in os.environ.items() if k not in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')} | env
        done = subprocess.run([sys.executable, '-c', WAITS], cwd=ROOT, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        return [*map(float, done.stdout.split())]
    alone, beside, again = seconds()
    if alone < 0.05:
        pytest.skip("torch's threads do not spin here")
    assert beside < 0.5 * alone and again > 2 * beside, (alone, beside, again)
    if sizes(False, True):
        alone, beside, _ = seconds(GOMP_SPINCOUNT='1000000000')  # what the user has set stays
        assert beside > 0.2 * alone, (alone, beside)  # asleep it would be a fortieth


def test_what_other_processes_use_is_counted():
    cores = set(range(os.cpu_count()))
    if not os.path.exists('/proc/stat'):
        pytest.skip('no /proc/stat')

    def used_while(run):
        before = device.used_by_others(cores)
        run()
        return device.used_by_others(cores) - before
    busy = [sys.executable, '-c', "import time\nwhile time.process_time() < 0.5: pass"]
    assert used_while(lambda: subprocess.run(busy)) > 0.4
