"""The CPU decoder's process: interrupts at any time, its end, torch's threads. Forks: see test_shared_caches.py."""
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ROOT, run, sizes
from example_models import f32

from decode.cpu import CPUDecoder


def in_child(code, *args):
    """Run code in a process of its own, where a crash is a return code; returns its stdout."""
    with tempfile.NamedTemporaryFile('w', suffix='.py') as script:
        script.write(f'import sys, torch\nsys.path[:0] = {ROOT!r}, {os.path.join(ROOT, "tests")!r}\n'
                     f'torch.set_num_threads(2)\n{code}')
        script.flush()
        done = run(ROOT, script.name, *args)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


INTERRUPTED = """
import random, signal, sys, time
import torch
from model import GPT, GPTConfig
from decode.cpu import CPUDecoder

signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))  # Ctrl-C, when the timer ends
torch.manual_seed(0)
weights, n_embd, times = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = GPT(GPTConfig(block_size=64, vocab_size=50, n_layer=2, n_head=4, n_embd=n_embd)).eval()
decoder, choice, hit, longest = CPUDecoder(model, weights), random.Random(0), 0, 0.02
torch.set_num_threads(1)

def compute(B, T):
    idx = torch.randint(50, (B, T))
    logits, cache = decoder(idx, None)
    return idx, decoder(idx[:, :1], cache)[0]

for i in range(times):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.01 * choice.random())  # so that the next step packs the weights again
    B, T = choice.choice([1, 2, 9, 40]), choice.randint(1, 40)
    try:
        signal.setitimer(signal.ITIMER_REAL, choice.uniform(1e-6, longest))
        compute(B, T)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        hit += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    began = time.perf_counter()
    idx, logits = compute(choice.choice([1, 3, 17]), choice.randint(1, 40))
    longest = 0.9 * longest + 0.2 * min(0.1, time.perf_counter() - began)
    with torch.no_grad():
        expected = model(torch.cat([idx, idx[:, :1]], dim=1), use_cache=False)[0]
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error < {'float32': 1e-4, 'bfloat16': 0.05, 'int8': 0.1}[weights], (i, error)
print(hit)
"""


@pytest.mark.parametrize('weights, n_embd, times', [
    ('float32', 160, sizes(60, 300)), ('int8', 96, sizes(30, 100)), ('bfloat16', 96, sizes(30, 100))])
def test_an_interrupt_at_any_time_leaves_a_decoder_that_works(weights, n_embd, times):
    """
    Ctrl-C while weights are packed, activations grow or a step runs: the next call packs the weights again. It used to
    crash the process.
    """
    hit = int(in_child(INTERRUPTED, weights, n_embd, times))
    assert hit > times // 10, f"only {hit} of {times} interrupts came in time"


def test_the_process_ends_while_a_daemon_thread_decodes():
    code = """
import threading, time
import torch
from model import GPT, GPTConfig
from decode.cpu import CPUDecoder
model = GPT(GPTConfig(block_size=32, vocab_size=50, n_layer=2, n_head=2, n_embd=32)).eval()
decoder, idx = CPUDecoder(model, threads=2), torch.randint(50, (2, 5))
def on_and_on():
    while True:
        model.generate(idx, 20, temperature=0, use_cache=True, decoder=decoder)
for _ in range(2):
    threading.Thread(target=on_and_on, daemon=True).start()
time.sleep(0.3)
"""
    for _ in range(sizes(1, 3) if os.cpu_count() > 1 else 0):
        done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, timeout=120, capture_output=True, text=True)
        # Python ends daemon threads where they ask for its lock, and torch's C++ may abort at that; it must not hang
        assert done.returncode in (0, -6), done.stderr


def test_torchs_threads_are_restored_whoever_leaves_first():
    decoder, before = CPUDecoder(f32(8)), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        seen, first_inside, second_inside = [], threading.Event(), threading.Event()

        def work(mine, other):
            with decoder.torch_on_one_thread():
                seen.append(torch.get_num_threads())
                mine.set()
                other.wait(60)
            seen.append(torch.get_num_threads())
        with ThreadPoolExecutor(2) as pool:
            pool.map(work, (first_inside, second_inside), (second_inside, first_inside))
        assert sorted(seen) == [1, 1, 3, 3] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
