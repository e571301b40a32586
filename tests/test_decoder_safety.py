"""The CPU decoder where it could go wrong without an error: interrupts, torch's defaults, threads, forks, repaired and changed weights."""
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from test_cache_exactness import large

import decode
from decode.cpu import CPUDecoder
from fingerprint import Watch, digest, fingerprint
from model import GPT, GPTConfig, LayerKVCache

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WEIGHTS = ['float32', 'bfloat16', 'int8']


def f32(seed, **changes):
    return large(seed, torch.float32, **changes)


def in_child(code, *args):
    """Run code in a process of its own, where a crash is a return code; returns its stdout."""
    done = subprocess.run([sys.executable, '-c', code, *map(str, args)], capture_output=True, text=True, cwd=ROOT, timeout=600,
                          env={**os.environ, 'OMP_NUM_THREADS': '2', 'PYTHONPATH': os.pathsep.join([ROOT, os.path.join(ROOT, 'tests')])})
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


INTERRUPTED = """
import random, signal, sys, time
import torch
from model import GPT, GPTConfig
from decode.cpu import CPUDecoder

def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
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


@pytest.mark.parametrize('weights, n_embd, times', [('float32', 160, 300), ('int8', 96, 100), ('bfloat16', 96, 100)])
def test_an_interrupt_at_any_time_leaves_a_decoder_that_works(weights, n_embd, times):
    """Ctrl-C while weights are packed, buffers grow or a step runs: the next call packs them again. It used to crash the process."""
    hit = int(in_child(INTERRUPTED, weights, n_embd, times))
    assert hit > times // 10, f"only {hit} of {times} interrupts came in time"


DEFAULTS = """
import sys
import torch
from model import GPT, GPTConfig
from decode.cpu import CPUDecoder
torch.manual_seed(0)
model = GPT(GPTConfig(block_size=32, vocab_size=50, n_layer=2, n_head=2, n_embd=24)).eval()
idx = torch.randint(50, (3, 5))
expected = model.generate(idx, 60, temperature=0)
if sys.argv[1] == 'meta':
    with torch.device('meta'):
        decoder = CPUDecoder(model, sys.argv[2])
        got = decoder(idx, None)[0]
        for n in range(20):
            got, cache = decoder(idx[:, :1], decoder(idx, None)[1])
else:
    torch.set_default_dtype(getattr(torch, sys.argv[1]))
    decoder = CPUDecoder(model, sys.argv[2])
    for n in range(20):
        got, cache = decoder(idx[:, :1], decoder(idx, None)[1])
    tokens = model.generate(idx, 60, temperature=0, use_cache=True, decoder=decoder)
    assert sys.argv[2] != 'float32' or torch.equal(tokens, expected)
assert got.dtype is torch.float32 and got.device.type == 'cpu' and cache[0].k_cache.dtype is torch.float32
torch.set_default_dtype(torch.float32)
fresh = CPUDecoder(model, sys.argv[2])
assert torch.equal(got, fresh(idx[:, :1], fresh(idx, None)[1])[0])
"""


@pytest.mark.parametrize('default', ['float64', 'bfloat16', 'float16', 'meta'])
def test_torchs_defaults_do_not_reach_the_decoder(default):
    in_child(DEFAULTS, default, 'float32')
    if default == 'float64':
        in_child(DEFAULTS, default, 'int8')


def generations(model, decoder, n_threads, each, sizes):
    """Let threads generate with one decoder at once. Returns how many generations differ from the uncached ones, and the errors."""
    wrong, errors = [], []

    def work(number):
        try:
            chooser = torch.Generator().manual_seed(number)
            for n in range(each):
                B, T = sizes[(number + n) % len(sizes)], int(torch.randint(1, 20, (), generator=chooser))
                idx = torch.randint(model.config.vocab_size, (B, T), generator=chooser)
                new = int(torch.randint(1, 12, (), generator=chooser))
                got = model.generate(idx, new, temperature=0, use_cache=True, decoder=decoder)
                with torch.no_grad():  # each drawn token is the largest of an uncached pass, to rounding
                    logits = model.lm_head(model.hidden_states(got[:, -model.config.block_size:][:, :-1])[0])[:, -1]
                if (logits.max(dim=-1).values - logits.gather(1, got[:, -1:])[:, 0]).max() > 1e-3:
                    wrong.append((number, n))
        except BaseException as e:  # noqa: B036  (whatever it is, the test has to see it)
            errors.append(repr(e))
    threads = [threading.Thread(target=work, args=(number,)) for number in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong, errors


@pytest.mark.parametrize('n_threads, threads, sizes', [(2, 1, [2]), (4, 1, [1, 3, 10, 2]), (2, None, [1, 9]), (4, 2, [5, 1, 2])])
def test_threads_share_one_decoder(n_threads, threads, sizes):
    """Thousands of generations by threads that take turns on one decoder; each token is the one of an uncached pass."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, vocab_size=50, n_layer=2, n_head=2, n_embd=32)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6)
    decoder = CPUDecoder(model, threads=threads and min(threads, os.cpu_count()))
    wrong, errors = generations(model, decoder, n_threads, 1000 // n_threads, sizes)
    assert not errors and not wrong, f"{len(wrong)} of 1000 generations are wrong, errors {errors[:3]}"


@pytest.mark.skipif(not hasattr(os, 'fork'), reason="this system has no fork")
@pytest.mark.parametrize('threads', [1, 2])
def test_after_a_fork_the_child_decodes_with_threads_of_its_own(threads):
    code = """
import os, sys, threading, time
import torch
from model import GPT, GPTConfig
from decode.cpu import CPUDecoder
torch.set_num_threads(1)
torch.manual_seed(0)
model = GPT(GPTConfig(block_size=32, vocab_size=50, n_layer=2, n_head=2, n_embd=32)).eval()
decoder, idx = CPUDecoder(model, threads=int(sys.argv[1])), torch.randint(50, (2, 5))
expected = model.generate(idx, 20, temperature=0)
def generate():
    return model.generate(idx, 20, temperature=0, use_cache=True, decoder=decoder)
generate()
done = False
def on_and_on():  # so that forks come in the middle of steps
    while not done:
        generate()
thread = threading.Thread(target=on_and_on, daemon=True)
thread.start()
for n in range(10):
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(generate(), expected) else 9)
    end = time.monotonic() + 60
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(child, 9)
            sys.exit('the child hangs')
        time.sleep(0.001)
    assert status[1] == 0, f'the child ended with {status[1]}'
    assert torch.equal(generate(), expected)
done = True
thread.join()
"""
    in_child(code, min(threads, os.cpu_count()))


@pytest.mark.parametrize('weights', WEIGHTS)
@pytest.mark.parametrize('n_embd', [8, 20, 48])
def test_a_nan_ends_with_its_repair(weights, n_embd):
    """Where n_embd is no multiple of the vectors' length, a NaN must not stay in what fills them up."""
    model, idx = f32(6, n_embd=n_embd, bias=True), torch.randint(29, (2, 6))
    decoder = CPUDecoder(model, weights)
    expected = decoder(idx, None)[0]
    for name, p in model.named_parameters():
        for broken in (float('nan'), float('inf'), 3e38):
            before = p.detach().clone()
            with torch.no_grad():
                p.view(-1)[0] = broken
            decoder(idx, None)
            with torch.no_grad():
                p.copy_(before)
            assert torch.equal(decoder(idx, None)[0], expected), f"{broken} in {name}"


def swap_rows(w):
    w[[1, 2]] = w[[2, 1]]


def swap_heads(w):  # of c_attn: queries of two heads
    half = w.size(0) // 6
    w[:2 * half] = torch.cat([w[half:2 * half], w[:half]])


def negate_odd_columns(w):
    w[:, 1::2] *= -1


def exchange_two(w):
    a, b = w[1, 1].item(), w[2, 3].item()
    w[1, 1], w[2, 3] = b, a


@pytest.mark.parametrize('weights', WEIGHTS)
@pytest.mark.parametrize('through', ['data', 'numpy'])
@pytest.mark.parametrize('change', [swap_rows, swap_heads, negate_odd_columns, exchange_two, lambda w: w.copy_(w.flip(0).clone())])
def test_a_new_cache_never_uses_weights_that_are_out_of_date(weights, through, change):
    """Changes that torch does not count, and that leave every sum as it was."""
    model, idx = f32(4, n_embd=32), torch.randint(29, (2, 6))
    decoder = CPUDecoder(model, weights)
    decoder(idx, None)
    for name, p in model.named_parameters():
        if p.dim() < 2 or change is swap_heads and 'c_attn' not in name:
            continue
        before = fingerprint(model)
        change(p.data if through == 'data' else torch.from_numpy(p.detach().numpy()))
        assert fingerprint(model) != before, name
        assert torch.equal(decoder(idx, None)[0], CPUDecoder(model, weights)(idx, None)[0]), name


def test_an_exchange_of_all_weights_in_mid_stream_is_seen():
    """Averaged weights are often copied into a model through `.data`, used, and copied back. Each step uses what is there."""
    model, other, idx = f32(4), f32(5), torch.randint(29, (2, 6))
    decoder, original = CPUDecoder(model), {k: v.clone() for k, v in model.state_dict().items()}
    watch = Watch(model)
    _, cache = decoder(idx, None)
    for state in (other.state_dict(), original):
        for name, p in model.named_parameters():
            p.data.copy_(state[name])
        assert watch.unchanged() == (state is original)
        fresh = CPUDecoder(model)
        assert torch.equal(decoder(idx[:, :1], [c.clone() for c in cache])[0], fresh(idx[:, :1], [c.clone() for c in cache])[0])


class OtherMLP(torch.nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.c_fc, self.c_proj = mlp.c_fc, mlp.c_proj

    def forward(self, x):
        return self.c_proj(torch.relu(self.c_fc(x)))


def replace_linear(model):
    model.transformer.h[1].attn.c_proj = torch.nn.Sequential(model.transformer.h[1].attn.c_proj)


def replace_mlp(model):
    model.transformer.h[0].mlp = OtherMLP(model.transformer.h[0].mlp)


def widen(model):
    model.transformer.h[0].mlp.c_fc = torch.nn.Linear(16, 96)
    model.transformer.h[0].mlp.c_proj = torch.nn.Linear(96, 16)


def own_forward(model):
    model.transformer.h[0].mlp.forward = lambda x: x


@pytest.mark.parametrize('change', [lambda m: m.transformer.h[0].register_forward_hook(lambda *a: None), replace_linear, replace_mlp, widen,
                                    lambda m: m.transformer.ln_f.register_forward_pre_hook(lambda *a: None), own_forward,
                                    lambda m: setattr(m.config, 'block_size', 10 ** 6)])
def test_hooks_and_modules_that_come_later_are_refused(change):
    """The kernel does not run them, so it says so, at the next step of a cache and at the next cache."""
    model, idx = f32(8), torch.randint(29, (1, 4))
    decoder = CPUDecoder(model)
    _, cache = decoder(idx, None)
    change(model)
    with pytest.raises(ValueError, match='CPU decoder|new decoder'):
        decoder(idx, None)
    if change is not own_forward and model.config.block_size == 16:
        with pytest.raises(ValueError, match='CPU decoder'):
            decoder(idx[:, :1], cache)
    with pytest.raises(ValueError, match='CPU decoder'):
        CPUDecoder(model)


def test_a_replaced_linear_of_the_same_shape_is_used():
    model, idx = f32(8), torch.randint(29, (1, 4))
    decoder = CPUDecoder(model)
    _, cache = decoder(idx, None)
    torch.manual_seed(3)
    model.transformer.h[1].mlp.c_proj = torch.nn.Linear(64, 16)
    expected = CPUDecoder(model)
    assert torch.equal(decoder(idx[:, :1], [c.clone() for c in cache])[0], expected(idx[:, :1], [c.clone() for c in cache])[0])


@pytest.mark.parametrize('make', [lambda: decode.EagerDecoder, lambda: CPUDecoder])
def test_integers_are_taken_and_anything_else_is_refused(make):
    """On a cache that the last step has seen as on a new one, and whatever the dtype of the integers."""
    model, idx = f32(9), torch.randint(29, (2, 5))
    decoder = make()(model)
    expected, _ = decoder(idx[:, :1], decoder(idx, None)[1])
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        _, cache = decoder(idx.to(dtype), None)
        for pos in (5, torch.full((2,), 5, dtype=dtype)):
            cache = [c._replace(cache_pos=pos) for c in cache]
            torch.testing.assert_close(decoder(idx[:, :1].to(dtype), cache)[0], expected, atol=1e-5, rtol=1e-5)
    for bad in (torch.tensor([5]), torch.tensor([5.0, 5.0]), 5.0, torch.tensor([True, True]), torch.tensor([[5], [5]]), None, '5'):
        with pytest.raises(ValueError):
            decoder(idx[:, :1], [c._replace(cache_pos=bad) for c in cache])
    for bad in (idx[:, :1].float(), idx[:, :1] > 0, idx[0], idx[:, :0], idx[:, :1].tolist()):
        with pytest.raises(ValueError):
            decoder(bad, cache)
        with pytest.raises(ValueError):
            decoder(bad, None)


def test_models_made_in_inference_mode():
    with torch.inference_mode():
        model = f32(3)
    idx = torch.randint(29, (2, 4))
    decoder = decode.best(model, 2)
    assert 'numba' in decoder.name
    assert torch.equal(model.generate(idx, 40, temperature=0, use_cache=True, decoder=decoder), model.generate(idx, 40, temperature=0))


def test_the_number_of_threads_does_not_change_a_bit():
    model, idx = f32(2, n_head=4, n_embd=48, block_size=64), torch.randint(29, (3, 9))
    for weights in WEIGHTS:
        a, b = (CPUDecoder(model, weights, threads=n) for n in (1, min(2, os.cpu_count())))
        (x, ca), (y, cb) = a(idx, None), b(idx, None)
        assert torch.equal(x, y) and all(torch.equal(m.v_cache, n.v_cache) for m, n in zip(ca, cb))
        assert torch.equal(a(idx[:, :1], ca)[0], b(idx[:, :1], cb)[0])


def test_a_digest_depends_on_every_byte_and_its_place():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int8):
        w = torch.arange(1, 22).view(3, 7).to(dtype)
        seen = {digest(w), digest(w.view(7, 3)), digest(w.flip(0)), digest(w.flip(1)), digest(w.t())}
        for i in range(21):
            v = w.clone().view(-1)
            v[i] += 1
            seen.add(digest(v.view(3, 7)))
        assert len(seen) == 26
    assert digest(torch.zeros(4)) != digest(torch.zeros(4, dtype=torch.int32))
    assert digest(torch.empty(0)) == digest(torch.empty(0))


def test_a_thread_that_ends_in_undisturbed_leaves_the_others_watching():
    model, other, idx = f32(4), f32(5), torch.randint(29, (1, 6))
    decoder = CPUDecoder(model)
    inside, leave = threading.Event(), threading.Event()

    def stay_inside():
        with decoder.undisturbed():
            inside.set()
            leave.wait(60)
    thread = threading.Thread(target=stay_inside)
    thread.start()
    inside.wait(60)
    with decoder.undisturbed():
        pass
    _, cache = decoder(idx, None)
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *a: None)
    with pytest.raises(ValueError, match='hooks'):
        decoder(idx[:, :1], cache)
    leave.set()
    thread.join()
    assert other is not model and type(cache[0]) is LayerKVCache


def test_a_signal_handler_may_raise_while_workers_run():
    """Hundreds of interrupts during steps on several threads: nothing hangs, and the next step is right."""
    if not hasattr(signal, 'setitimer'):
        pytest.skip("this system has no interval timers")
    model, idx = f32(7, n_embd=48), torch.randint(29, (2, 6))
    decoder = CPUDecoder(model, threads=min(2, os.cpu_count()))
    expected = decoder(idx, None)[0]

    class Interrupted(BaseException):
        pass

    def interrupt(*_):
        raise Interrupted
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for n in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 2e-6 * n)
                end = time.perf_counter() + 0.01
                while time.perf_counter() < end:
                    decoder(idx, None)
            except Interrupted:
                pass
            assert torch.equal(decoder(idx, None)[0], expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
