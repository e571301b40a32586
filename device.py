"""Which device, which dtype: what device='auto' and dtype='auto' mean, for every script."""
import os
import re
import statistics
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


def pick_device(name='auto'):
    """'auto' is cuda, then mps, then cpu. ValueError for a device this machine does not have."""
    n_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = ['cuda'] * bool(n_cuda) + ['mps'] * torch.backends.mps.is_available() + ['cpu']
    if name == 'auto':
        return here[0]
    if not re.fullmatch(r'cpu|mps|cuda(:\d+)?', name):
        raise ValueError(f"device must be auto, cpu, mps, cuda or cuda:N, not {name!r}")
    if name not in here + [f'cuda:{i}' for i in range(n_cuda)]:
        raise ValueError(f"device {name} was asked for, but torch finds {', '.join(here)} here ({n_cuda} cuda): use device=auto")
    return name


def join_processes(device, backend, world):
    """(device, rank) of this process. Of several under torchrun (world > 1) each takes its GPU and joins the group."""
    dev = pick_device(device)
    if world == 1:
        return dev, 0
    if dev == 'cuda':
        dev = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(dev)
    dist.init_process_group(backend if backend != 'auto' else 'nccl' if dev.startswith('cuda') else 'gloo')
    return dev, dist.get_rank()


def pick_dtype(name, device):
    """'auto' is bfloat16 where the GPU has it, float16 on older ones, and float32 on cpu and mps."""
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


def synchronize(device):
    """Wait until the device has done what it was given, so that a clock means something."""
    if device.startswith('cuda'):
        torch.cuda.synchronize()
    elif device.startswith('mps'):
        torch.mps.synchronize()


def fastest(run, candidates, rounds=5, seconds=2.0, margin=0.1):
    """
    (choice, medians): the candidate for which run(candidate) takes the least time, and the median seconds of each.

    The rounds are interleaved: a neighbour that comes or goes meanwhile disturbs all candidates alike. The first
    candidate is kept unless another one is faster by more than `margin`, a fraction. The candidates stand in an order
    in which the time falls and then rises: after one that takes twice the best time so far, no later one is tried.
    No new round begins after `seconds`.
    """
    times, end = {}, time.perf_counter() + seconds
    for round_ in range(rounds + 1):
        for candidate in candidates if round_ == 0 else list(times):
            start = time.perf_counter()
            run(candidate)
            taken = time.perf_counter() - start
            if round_ == 0 and times and taken > 2 * min(min(t) for t in times.values()):
                break
            times.setdefault(candidate, []).append(taken)
        if time.perf_counter() > end:
            break
    # the first run after a change also wakes threads and fills caches
    medians = {candidate: statistics.median(t[1:] or t) for candidate, t in times.items()}
    first, best = candidates[0], min(medians, key=medians.get)
    return (best if medians[best] < (1 - margin) * medians[first] else first), medians


def fastest_threads(step, limit=1.0):
    """
    Set torch to the number of CPU threads with which step() is fastest: torch's own, or that halved, and so on to 1.

    Returns (threads, medians in seconds by threads), or (threads, {}) where there is nothing to choose: one thread, or
    a step of more than `limit` seconds, which is large enough for all threads.
    """
    most = torch.get_num_threads()
    start = time.perf_counter()
    if most > 1:
        step()
    if most == 1 or time.perf_counter() - start > limit:
        return most, {}
    candidates = [most]
    while candidates[-1] > 1:
        candidates.append(candidates[-1] // 2)

    def run(threads):
        torch.set_num_threads(threads)
        step()
    threads, medians = most, {}
    try:
        threads, medians = fastest(run, candidates)
    finally:
        torch.set_num_threads(threads)
    return threads, medians


def choose_threads(step, before, say):
    """
    Set the number of CPU threads of a training run, and say which it is.

    OMP_NUM_THREADS decides where it is set; then `before`, the number of the run that is resumed (None: there is
    none), because other threads add in another order; then which number makes step() fastest.
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
