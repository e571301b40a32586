"""
Ways in which the CPU decoder could go wrong without an error: interrupts, defaults, threads, forks, changed weights.
"""
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import sizes
from test_cache_exactness import large

import decode
from decode import fingerprint
from decode.choice import TRIAL, ThreadChoice
from decode.compiled import CompiledDecoder
from decode.cpu import CPUDecoder
from decode.fingerprint import Watch, contents
from model import GPT, MLP, Block, GPTConfig, LayerKVCache

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WEIGHTS = ['float32', 'bfloat16', 'int8']


def f32(seed, **changes):
    return large(seed, torch.float32, **changes)


def in_child(code, *args):
    """Run code in a process of its own, where a crash is a return code; returns its stdout."""
    env = {**os.environ, 'OMP_NUM_THREADS': '2', 'PYTHONPATH': os.pathsep.join([ROOT, os.path.join(ROOT, 'tests')])}
    done = subprocess.run([sys.executable, '-c', code, *map(str, args)], capture_output=True, text=True, cwd=ROOT,
                          timeout=600, env=env)
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


@pytest.mark.parametrize('weights, n_embd, times', [
    ('float32', 160, sizes(60, 300)), ('int8', 96, sizes(30, 100)), ('bfloat16', 96, sizes(30, 100))])
def test_an_interrupt_at_any_time_leaves_a_decoder_that_works(weights, n_embd, times):
    """
    Ctrl-C while weights are packed, activations grow or a step runs: the next call packs the weights again. It used to
    crash the process.
    """
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


@pytest.mark.parametrize('default', sizes(['float64', 'meta'], ['float64', 'bfloat16', 'float16', 'meta']))
def test_torchs_defaults_do_not_reach_the_decoder(default):
    in_child(DEFAULTS, default, 'float32')
    if default == 'float64':
        in_child(DEFAULTS, default, 'int8')


def generations(model, decoder, n_threads, each, batch_sizes):
    """
    Let threads generate with one decoder at once. Returns the generations that differ from the uncached ones, and the
    errors.
    """
    wrong, errors = [], []

    def work(number):
        try:
            chooser = torch.Generator().manual_seed(number)
            for n in range(each):
                B = batch_sizes[(number + n) % len(batch_sizes)]
                T = int(torch.randint(1, 20, (), generator=chooser))
                idx = torch.randint(model.config.vocab_size, (B, T), generator=chooser)
                new = int(torch.randint(1, 12, (), generator=chooser))
                got = model.generate(idx, new, temperature=0, use_cache=True, decoder=decoder)
                with torch.no_grad():  # each drawn token is the largest of an uncached pass, to rounding
                    logits = model(got[:, -model.config.block_size:][:, :-1], use_cache=False)[0][:, -1]
                if (logits.max(dim=-1).values - logits.gather(1, got[:, -1:])[:, 0]).max() > 1e-3:
                    wrong.append((number, n))
        except BaseException as e:  # noqa: B036  (the test has to see any kind)
            errors.append(repr(e))
    threads = [threading.Thread(target=work, args=(number,)) for number in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong, errors


@pytest.mark.parametrize('n_threads, threads, batch_sizes', [
    (2, 1, [2]), (4, 1, [1, 3, 10, 2]), (2, None, [1, 9]), (4, 2, [5, 1, 2])])
def test_threads_share_one_decoder(n_threads, threads, batch_sizes):
    """Generations by threads that take turns on one decoder; each token is the one of an uncached pass."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, vocab_size=50, n_layer=2, n_head=2, n_embd=32)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6)
    decoder = CPUDecoder(model, threads=threads and min(threads, os.cpu_count()))
    n_generations = sizes(200, 1000)
    wrong, errors = generations(model, decoder, n_threads, n_generations // n_threads, batch_sizes)
    assert not errors and not wrong, f"{len(wrong)} of {n_generations} generations are wrong, errors {errors[:3]}"


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
for n in range(int(sys.argv[2])):
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
    in_child(code, min(threads, os.cpu_count()), sizes(4, 10))


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
@pytest.mark.parametrize('change', [swap_rows, swap_heads, negate_odd_columns, exchange_two,
                                    lambda w: w.copy_(w.flip(0).clone())])
def test_a_new_cache_never_uses_weights_that_are_out_of_date(weights, through, change):
    """Changes that torch does not count, and that leave every sum as it was."""
    model, idx = f32(4, n_embd=32), torch.randint(29, (2, 6))
    decoder = CPUDecoder(model, weights)
    decoder(idx, None)
    for name, p in model.named_parameters():
        if p.dim() < 2 or change is swap_heads and 'c_attn' not in name:
            continue
        watch = Watch(model)
        change(p.data if through == 'data' else torch.from_numpy(p.detach().numpy()))
        assert not watch.identical(), name
        assert torch.equal(decoder(idx, None)[0], CPUDecoder(model, weights)(idx, None)[0]), name


def test_an_exchange_of_all_weights_in_mid_stream_is_seen():
    """Averaged weights are often copied into a model through `.data`, and back. Each step uses the present ones."""
    model, other, idx = f32(4), f32(5), torch.randint(29, (2, 6))
    decoder, original = CPUDecoder(model), {k: v.clone() for k, v in model.state_dict().items()}
    watch = Watch(model)
    _, cache = decoder(idx, None)
    for state in (other.state_dict(), original):
        for name, p in model.named_parameters():
            p.data.copy_(state[name])
        assert watch.unchanged() == (state is original)
        fresh = CPUDecoder(model)
        assert same_step(decoder, fresh, idx[:, :1], cache)


def same_step(a, b, idx, kv_cache):
    """Do two decoders give the same logits, each on a copy of the cache?"""
    x, y = (decoder(idx, [layer.clone() for layer in kv_cache])[0] for decoder in (a, b))
    return torch.equal(x, y)


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


@pytest.mark.parametrize('change', [
    lambda m: m.transformer.h[0].register_forward_hook(lambda *a: None), replace_linear, replace_mlp, widen,
    lambda m: m.transformer.ln_f.register_forward_pre_hook(lambda *a: None), own_forward,
    lambda m: setattr(m.transformer.h[0].mlp, 'gelu', torch.nn.ReLU()),
    lambda m: setattr(m.transformer.h[0].mlp, 'gelu', torch.nn.GELU(approximate='tanh')),
    lambda m: setattr(m.config, 'block_size', 10 ** 6)])
def test_hooks_and_modules_that_come_later_are_refused(change):
    """The kernel does not run them, so it says so, at the next step of a cache and at the next cache."""
    model, idx = f32(8), torch.randint(29, (1, 4))
    decoder = CPUDecoder(model)
    _, cache = decoder(idx, None)
    change(model)
    with pytest.raises(ValueError, match='decoder'):
        decoder(idx, None)
    if change is not own_forward and model.config.block_size == 16:
        with pytest.raises(ValueError, match='decoder'):
            decoder(idx[:, :1], cache)
    with pytest.raises(ValueError, match='decoder'):
        CPUDecoder(model)


def test_a_replaced_linear_of_the_same_shape_is_used():
    model, idx = f32(8), torch.randint(29, (1, 4))
    decoder = CPUDecoder(model)
    _, cache = decoder(idx, None)
    torch.manual_seed(3)
    model.transformer.h[1].mlp.c_proj = torch.nn.Linear(64, 16)
    assert same_step(decoder, CPUDecoder(model), idx[:, :1], cache)


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
    for bad in (torch.tensor([5]), torch.tensor([5.0, 5.0]), 5.0, torch.tensor([True, True]),
                torch.tensor([[5], [5]]), None, '5'):
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
    got = model.generate(idx, 40, temperature=0, use_cache=True, decoder=decoder)
    assert torch.equal(got, model.generate(idx, 40, temperature=0))


def test_the_number_of_threads_does_not_change_a_bit():
    model, idx = f32(2, n_head=4, n_embd=48, block_size=64), torch.randint(29, (3, 9))
    for weights in WEIGHTS:
        a, b = (CPUDecoder(model, weights, threads=n) for n in (1, min(2, os.cpu_count())))
        (x, ca), (y, cb) = a(idx, None), b(idx, None)
        assert torch.equal(x, y) and all(torch.equal(m.v_cache, n.v_cache) for m, n in zip(ca, cb))
        assert torch.equal(a(idx[:, :1], ca)[0], b(idx[:, :1], cb)[0])


def test_every_byte_and_its_place_are_read():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int8):
        w = torch.arange(1, 22).view(3, 7).to(dtype)
        seen = {bytes(contents(t)[1]) for t in (w, w.flip(0), w.flip(1), w.t())}
        for i in range(21):
            v = w.clone().view(-1)
            v[i] += 1
            seen.add(bytes(contents(v)[1]))
        assert len(seen) == 25


def test_of_a_large_model_no_row_changes_unseen(monkeypatch):
    """There 16 of 512 values are read, and so 512 changed values in a row cannot escape."""
    monkeypatch.setattr(fingerprint, 'LARGE', 1000)
    model = f32(4, n_embd=512, n_layer=1, block_size=40)
    watch = Watch(model)
    assert watch.every == fingerprint.EVERY and watch.identical()
    for p in model.parameters():
        flat = p.data.view(-1)
        for start in (0, 1, 100, len(flat) - 512):
            before = flat[start:start + 512].clone()
            flat[start:start + 512] *= -1.5
            assert not watch.identical()
            flat[start:start + 512] = before
        assert watch.identical()


def test_a_thread_that_leaves_exclusive_use_leaves_the_others_watching():
    model, other, idx = f32(4), f32(5), torch.randint(29, (1, 6))
    decoder = CPUDecoder(model)
    inside, leave = threading.Event(), threading.Event()

    def stay_inside():
        with decoder.exclusive_use():
            inside.set()
            leave.wait(60)
    thread = threading.Thread(target=stay_inside)
    thread.start()
    inside.wait(60)
    with decoder.exclusive_use():
        pass
    _, cache = decoder(idx, None)
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *a: None)
    with pytest.raises(ValueError, match='hooks'):
        decoder(idx[:, :1], cache)
    leave.set()
    thread.join()
    assert other is not model and type(cache[0]) is LayerKVCache


def test_a_signal_handler_may_raise_while_workers_run():
    """Many interrupts during steps on several threads: nothing hangs, and the next step is right."""
    if not hasattr(signal, 'setitimer'):
        pytest.skip("this system has no interval timers")
    model, idx = f32(7, n_embd=48), torch.randint(29, (2, 6))
    decoder = CPUDecoder(model, threads=min(2, os.cpu_count()))
    expected, n_interrupts = decoder(idx, None)[0], sizes(80, 300)

    class Interrupted(BaseException):
        pass

    def interrupt(*_):
        raise Interrupted
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for n in range(n_interrupts):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 6e-4 * n / n_interrupts)
                end = time.perf_counter() + 0.01
                while time.perf_counter() < end:
                    decoder(idx, None)
            except Interrupted:
                pass
            assert torch.equal(decoder(idx, None)[0], expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_cache_of_another_block_size_is_refused_after_the_model_was_cropped():
    """The kernel's strides are the block_size, so an older cache would be read and written at wrong places."""
    model, idx = f32(4), torch.randint(29, (2, 6))
    decoder = CPUDecoder(model)
    _, cache = decoder(idx, None)
    model.crop_block_size(10)
    with pytest.raises(ValueError, match='need'):
        decoder(idx[:, :1], cache)
    assert torch.equal(decoder(idx, None)[0], CPUDecoder(model)(idx, None)[0])


def test_a_context_that_was_made_longer():
    """All buffers are as long as the context."""
    model, idx = f32(4), torch.randint(29, (2, 6))
    decoder = CPUDecoder(model)
    _, old = decoder(idx, None)
    model.transformer.wpe = torch.nn.Embedding(300, 16)
    model.config.block_size = model.transformer.wpe.num_embeddings
    with pytest.raises(ValueError, match='need'):
        decoder(idx[:, :1], old)
    assert torch.equal(model.generate(idx, 250, temperature=0, use_cache=True, decoder=decoder),
                       model.generate(idx, 250, temperature=0))


def replacements():
    C = 16
    for bias in (True, False):
        yield lambda m, bias=bias: setattr(m.transformer.h[0], 'ln_1', torch.nn.LayerNorm(C, bias=bias))
        yield lambda m, bias=bias: setattr(m.transformer, 'ln_f', torch.nn.LayerNorm(C, bias=bias))
        yield lambda m, bias=bias: setattr(m.transformer.h[1].mlp, 'c_fc', torch.nn.Linear(C, 4 * C, bias=bias))
        yield lambda m, bias=bias: setattr(m.transformer.h[1].attn, 'c_attn', torch.nn.Linear(C, 3 * C, bias=bias))
    yield lambda m: m.transformer.h.__setitem__(1, Block(m.config).eval())
    yield lambda m: setattr(m.transformer, 'h', torch.nn.ModuleList(list(m.transformer.h)[::-1]))
    yield lambda m: setattr(m, 'transformer', f32(77, bias=True).transformer)
    yield lambda m: [setattr(module, 'eps', 0.1) for module in m.modules() if isinstance(module, torch.nn.LayerNorm)]


@pytest.mark.parametrize('replace', replacements())
def test_modules_of_the_same_shape_may_be_replaced(replace):
    """Norms, biases and whole blocks: a new cache computes with what the model consists of now."""
    model, idx = f32(8, bias=True), torch.randint(29, (1, 6))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith('bias'):
                p.add_(1.0)
    decoder = CPUDecoder(model)
    decoder(idx, None)
    torch.manual_seed(3)
    replace(model)
    with torch.no_grad():
        expected = model(idx, use_cache=False)[0]
    torch.testing.assert_close(decoder(idx, None)[0], expected, atol=1e-4, rtol=1e-4)


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


@pytest.mark.parametrize('buffer', [
    torch.ones(9, 9, dtype=torch.bool), torch.zeros((), dtype=torch.int64), torch.ones(3).double()])
def test_buffers_of_any_dtype(buffer):
    model, idx = f32(8), torch.randint(29, (1, 4))
    expected = CPUDecoder(model)(idx, None)[0]
    model.register_buffer('mask', buffer)
    decoder = CPUDecoder(model)
    logits, cache = decoder(idx, None)
    assert torch.equal(logits, expected) and decoder(idx[:, :1], cache)[0].isfinite().all()


def test_caches_and_tokens_elsewhere_are_refused():
    model, idx = f32(8), torch.randint(29, (1, 4))
    decoder = CPUDecoder(model)
    _, cache = decoder(idx, None)
    with pytest.raises(ValueError, match='on the CPU'):
        decoder(idx[:, :1].to('meta'), [LayerKVCache(k.to('meta'), v.to('meta'), pos) for k, v, pos in cache])
    for pos in (2**70, -2**70, -1):
        with pytest.raises(ValueError, match='cache_pos|out of context'):
            decoder(idx[:, :1], [layer._replace(cache_pos=pos) for layer in cache])


def test_a_cache_whose_memory_was_exchanged_is_read_where_it_is_now():
    model, idx = f32(8), torch.randint(29, (1, 4))
    decoder = CPUDecoder(model)
    expected = decoder(idx[:, :1], decoder(idx, None)[1])[0]
    _, cache = decoder(idx, None)
    for layer in cache:
        for t in layer[:2]:
            moved = t.clone()
            t.fill_(7.0)
            t.data = moved
    assert torch.equal(decoder(idx[:, :1], cache)[0], expected)


def test_an_empty_batch():
    model = f32(8)
    logits, cache = CPUDecoder(model)(torch.zeros(0, 3, dtype=torch.int64), None)
    assert logits.shape == (0, 1, 29) and len(cache) == 2


def global_hook(model):
    return torch.nn.modules.module.register_module_forward_hook(lambda *a: None)


class Patched:
    """A class whose forward is another one for a while."""

    def __init__(self, model):
        self.before, MLP.forward = MLP.forward, lambda self, x: x

    def remove(self):
        MLP.forward = self.before


@pytest.mark.parametrize('spoil', [global_hook, Patched])
def test_what_all_modules_share_is_looked_at_as_well(spoil):
    model, idx = f32(8), torch.randint(29, (1, 4))
    decoder = CPUDecoder(model)
    spoilt = spoil(model)
    try:
        with pytest.raises(ValueError, match='does not run'):
            CPUDecoder(model)
        if spoil is global_hook:
            with pytest.raises(ValueError, match='does not run'):
                decoder(idx, None)
    finally:
        spoilt.remove()
    decoder(idx, None)


class Doubled(GPT):
    def hidden_states(self, idx, *args, **how):
        x, kv_cache = super().hidden_states(idx, *args, **how)
        return 2 * x, kv_cache


@pytest.mark.parametrize('make', [CPUDecoder, CompiledDecoder])
def test_decoders_with_a_step_of_their_own_refuse_other_models(make):
    for spoil in (replace_mlp, own_forward, lambda m: m.transformer.h[0].register_forward_hook(lambda *a: None)):
        model = f32(8)
        spoil(model)
        with pytest.raises(ValueError, match='decoder'):
            make(model)
    with pytest.raises(ValueError, match='hidden_states of Doubled'):
        make(Doubled(GPTConfig(block_size=8, vocab_size=5, n_layer=1, n_head=1, n_embd=8)))


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


def test_torchs_threads_are_restored_whoever_leaves_first():
    decoder, before = CPUDecoder(f32(8)), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        seen, first_inside, second_inside = [], threading.Event(), threading.Event()

        def work(mine, other):
            with decoder.exclusive_use():
                seen.append(torch.get_num_threads())
                mine.set()
                other.wait(60)
            seen.append(torch.get_num_threads())
        threads = [threading.Thread(target=work, args=args) for args in
                   ((first_inside, second_inside), (second_inside, first_inside))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(seen) == [1, 1, 3, 3] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
