"""The device and dtype that device='auto' and dtype='auto' mean in every script; CPU threads, and how they wait."""
import copy
import ctypes
import os
import re
import statistics
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import torch
from torch.overrides import TorchFunctionMode

import positions

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
DOUBTED = 'mps'  # there PyTorch's attention has had faults that no error showed
MOST_OFF = {'float32': 1e-3, 'float16': 0.02, 'bfloat16': 0.1}  # of logits, in their standard deviations


def pick_device(name='auto'):
    """'auto' is cuda, then mps, then cpu. ValueError for a device that this machine does not have."""
    n_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = ['cuda'] * bool(n_cuda) + ['mps'] * torch.backends.mps.is_available() + ['cpu']
    if name == 'auto':
        return here[0]
    if not re.fullmatch(r'cpu|mps|cuda(:\d+)?', name):
        raise ValueError(f"device must be auto, cpu, mps, cuda or cuda:N, not {name!r}")
    if name not in here + [f'cuda:{i}' for i in range(n_cuda)]:
        raise ValueError(f"device {name} was asked for, but torch finds {', '.join(here)} here ({n_cuda} cuda): use "
                         "device=auto")
    return name


def pick_dtype(name, device):
    """'auto' is bfloat16 on a GPU that has it, float16 on an older one, and float32 on cpu and mps."""
    if name == 'auto':
        if not device.startswith('cuda'):
            return 'float32'
        return 'bfloat16' if torch.cuda.is_bf16_supported(including_emulation=False) else 'float16'
    if name not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, not {name!r}")
    return name


def autocast(device, dtype):
    """The context to run a model in: mixed precision in dtype, or nothing for float32."""
    return nullcontext() if dtype == 'float32' else torch.autocast(device.split(':')[0], DTYPES[dtype])


def trusted_dtype(GPT, GPTConfig, device, dtype):
    """
    The dtype in which a device computes the CPU's logits: `dtype`, or else float32. With float32, attention gets a mask
    for the causal rule too (`positions.MASKED`), and stderr says so. Only a device of the kind DOUBTED is tried. GPT,
    GPTConfig: of model.py. ValueError if float32 is wrong too.
    """
    if not device.startswith(DOUBTED):
        return dtype
    expected = logits_of_chunks(GPT, GPTConfig, 'cpu', 'float32')

    def is_right(dtype):
        found = logits_of_chunks(GPT, GPTConfig, device, dtype)
        return bool((found - expected).abs().max() < MOST_OFF[dtype] * expected.std())
    if is_right(dtype):
        return dtype
    positions.MASKED.add(device.split(':')[0])
    print(f"{device} computes other logits in {dtype} than the CPU: attention gets a mask in any case, and float32",
          file=sys.stderr)
    if not is_right('float32'):
        raise ValueError(f"the logits of {device} must be those of the CPU, and differ from them in float32 too: use "
                         "device=cpu, or another version of torch")
    return 'float32'


def logits_of_chunks(GPT, GPTConfig, device, dtype):
    """
    Logits of two small models, with grouped heads and without, float32 (tokens, 64) on the CPU: of a text as a whole,
    without a cache; in chunks on a warm cache; and token by token. Beyond 1,024 keys devices have other functions.
    """
    found = []
    for n_kv_head in (4, 2):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # as in `small_model`
            model = GPT(GPTConfig(n_layer=1, n_head=4, n_kv_head=n_kv_head, n_embd=256, vocab_size=64, position='rope',
                                  block_size=1100)).eval().to(device)
            idx = torch.randint(64, (1, 1090)).to(device)
        with torch.inference_mode(), autocast(device, dtype):
            for counts in ([1090], [1050, 37, 1, 1, 1], [7, 5, 1]):
                cache = None
                for part in idx[:, :sum(counts)].split(counts, dim=1):
                    logits, _, cache = model(part, part, cache, len(counts) > 1)
                    found.append(logits[0].float().cpu())
    return torch.cat(found)


def default_peak_flops(device):
    """The highest dense FLOPS of a device by its data sheet: half precision on a GPU, float32 on a CPU; or None."""
    device = torch.device(device)
    if device.type == 'cuda':
        sheet = {'GB200': 2500e12, 'B200': 2250e12, 'GH200': 989e12, 'H200': 989e12, 'H100': 989e12,
                 'A100': 312e12, 'L40S': 362e12, 'L40': 181e12, 'L4': 121e12, 'A10G': 70e12, 'A10': 125e12,
                 'V100S': 130e12, 'V100': 125e12, 'T4': 65e12, '5090': 210e12, '4090': 165e12, '3090': 71e12}
        name = torch.cuda.get_device_name(device)
        return next((flops for model, flops in sheet.items() if re.search(rf'\b{model}\b', name)), None)
    if device.type == 'cpu':  # two fused multiply-adds a cycle, on vectors of 8 or 16 floats, at a typical 2.6 GHz
        flops_per_cycle = {'AVX2': 32, 'AVX512': 64}.get(torch.backends.cpu.get_cpu_capability(), 16)
        return torch.get_num_threads() * 2.6e9 * flops_per_cycle
    return None


def synchronize(device):
    """Wait until the device has finished the work it was given. Call it before reading a clock."""
    if device.startswith('cuda'):
        torch.cuda.synchronize()
    elif device.startswith('mps'):
        torch.mps.synchronize()


@contextmanager
def torch_threads(n):
    """Inside, torch computes on n threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n)
        yield
    finally:
        torch.set_num_threads(before)


torch_on_one_thread = partial(torch_threads, 1)  # torch's other threads would spin, and take a core


def in_parallel(function, items):
    """
    [function(item), ...] on as many Python threads as torch has, for what computes without Python's lock. Torch uses
    one thread in each. Items are taken one by one, as there are threads for them.
    """
    n, going, results = torch.get_num_threads(), deque(), []
    with torch_on_one_thread(), ThreadPoolExecutor(n) as pool:
        for item in items:
            if len(going) == n:
                results.append(going.popleft().result())
            going.append(pool.submit(function, item))
        return results + [each.result() for each in going]


def fastest_threads(step, rounds=5, seconds=2.0, limit=1.0):
    """
    Set torch to the number of CPU threads with which step() is fastest: its own number, half of it, and so on to 1.
    Returns (threads, {threads: median seconds}).

    Every round tries every number once, so that other programs slow all of them down alike. No round begins after
    `seconds`. Torch's own number is kept unless another one is faster by more than a tenth. After a number that takes
    twice the best time so far, no smaller one is tried. If torch has one thread only, or a step takes more than `limit`
    seconds and so is large enough for all threads, nothing is tried, and {} is returned for the medians.
    """
    most, times = torch.get_num_threads(), {}

    def timed(n):
        torch.set_num_threads(n)
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    if most == 1 or timed(most) > limit:
        return most, {}
    end = time.perf_counter() + seconds
    for round_ in range(rounds + 1):
        for n in list(times) if round_ else [most >> halvings for halvings in range(most.bit_length())]:
            taken = timed(n)
            if round_ == 0 and times and taken > 2 * min(min(t) for t in times.values()):
                break
            times.setdefault(n, []).append(taken)
        if time.perf_counter() > end:
            break
    # the first time is not counted: it also wakes threads and fills caches
    medians = {n: statistics.median(t[1:] or t) for n, t in times.items()}
    best = min(medians, key=medians.get)
    threads = best if medians[best] < 0.9 * medians[most] else most
    torch.set_num_threads(threads)
    return threads, medians


def choose_threads(step, before, say):
    """
    Set the number of CPU threads of a training run. Say the number, unless OMP_NUM_THREADS has set it.

    OMP_NUM_THREADS decides if it is set. Otherwise the number is `before`, that of the run that is resumed, because
    another number adds in another order and so changes the last bits of the results. If `before` is None, it is the
    number with which step() is fastest.
    """
    most = torch.get_num_threads()
    if 'OMP_NUM_THREADS' in os.environ or before and before > most:
        if before and before != most:
            say(f"threads: {most}, but the run before had {before}: losses and weights will differ in their last bits")
    elif before:
        torch.set_num_threads(before)
        say(f"threads: {before} of {most}, as in the run before")
    else:
        threads, medians = fastest_threads(step)
        times = ', '.join(f"{n}: {1e3 * t:.1f} ms" for n, t in medians.items())
        say(f"threads: {threads}" + (f" of {most}, by timing ({times})" if times else ""))


def share_cores(seconds=0.5):
    """
    From now on, torch's waiting threads sleep while other processes need the cores. Otherwise they spin.

    GNU's OpenMP spins for milliseconds. Beside another process two threads may get one core, and then one spins until
    its slice of time is over, in each of the hundreds of operations of an iteration. With more threads than cores it
    spins only briefly (see its documentation of GOMP_SPINCOUNT). So a daemon thread measures the load every so many
    seconds, and starts or ends a team of idle threads. Nothing is done for other OpenMPs, nor where OMP_WAIT_POLICY or
    GOMP_SPINCOUNT is set.
    """
    if sys.platform != 'linux' or {'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT'} & os.environ.keys():
        return
    try:
        openmp = ctypes.CDLL('libgomp.so.1', mode=os.RTLD_NOLOAD)  # that of torch, if it has this one
        cores, n_threads = os.sched_getaffinity(0), torch.get_num_threads()  # of this thread: others may have another
        used_by_others(cores)
    except (AttributeError, OSError, ValueError):
        return

    def hold(released):
        openmp.GOMP_parallel(ctypes.CDLL(None).getpid, None, len(cores) + 1, 0)  # each thread calls it, and then waits
        released.wait()

    def watch():
        released, used, then = None, used_by_others(cores), time.monotonic()
        while True:
            time.sleep(seconds)
            before, used, since, then = used, used_by_others(cores), then, time.monotonic()
            free = len(cores) - (used - before) / (then - since)
            needed = free < n_threads - 0.25
            if needed and not released:
                released = threading.Event()
                with suppress(RuntimeError):  # no more threads are allowed
                    threading.Thread(target=hold, args=[released], daemon=True).start()
            elif released and not needed:
                released.set()  # the thread ends, and those of its own with it
                released = None
    with suppress(RuntimeError):
        threading.Thread(target=watch, daemon=True).start()


def used_by_others(cores):
    """Seconds of these cores that other processes, and other machines on the same processor, have used so far."""
    with open('/proc/stat') as f:
        rows = [line.split() for line in f if line.startswith('cpu')]
    ticks = sum(int(row[i]) for row in rows if row[0][3:].isdigit() and int(row[0][3:]) in cores
                for i in (1, 2, 3, 6, 7, 8))  # user, nice, system, irq, softirq, steal
    return ticks / os.sysconf('SC_CLK_TCK') - sum(os.times()[:2])


class NoValues(TorchFunctionMode):
    """Inside, `torch.nn.init` does nothing: on the device meta it would import 800 modules, 70 MB in 0.6 seconds."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, '__module__', None) != 'torch.nn.init':
            return function(*args, **(kwargs or {}))


def meta_model(GPT, config):
    """GPT(config) on the device meta: it has shapes, and no weights."""
    with torch.device('meta'), NoValues():
        return GPT(config)


@torch.no_grad()
def small_model(GPT, config, size=0.1):
    """
    A GPT with these settings and random weights, but few layers, heads, channels and tokens, on the CPU, to compare two
    ways of computing it. A difference that shows only in a third layer, or for large token ids, is not found. Its
    matrices have two numbers, size and -size, so that few bits keep them. Its logits are so large that a function which
    bends large ones is seen.
    """
    c = copy.copy(config)
    n_kv_head = min(c.n_kv_head, 2)
    vars(c).update(n_layer=min(c.n_layer, 2), vocab_size=64, n_kv_head=n_kv_head, n_embd=64, n_inner=96, dropout=0.0,
                   n_head=n_kv_head * (c.n_head // c.n_kv_head), block_size=min(c.block_size, 1024))
    with torch.random.fork_rng(devices=[]), torch.device('cpu'):
        torch.default_generator.manual_seed(0)  # torch.manual_seed seeds GPUs too, which stay as they are
        model = GPT(c).float().eval()
        for p in model.parameters():
            noise = torch.randn(p.shape, dtype=p.dtype)
            p.copy_(noise.sign() * size) if p.dim() == 2 else p.add_(noise, alpha=0.2)
        model.lm_head.weight *= 8
    return model
