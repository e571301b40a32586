"""
Measures the memory that generation needs in addition to the model, in a new process for each case.

    python bench.py --mode=memory

All tokens are generated. One step would not do: without a cache every step has tensors of another size, and what the
allocator and the matrix library keep of them adds up.
"""
import ctypes
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch
from tqdm import tqdm

from benchmarks.harness import Part, process_bytes
from benchmarks.shapes import PROMPT, WITHIN_WINDOW, cache_bytes, config_of
from device import DTYPES, autocast
from model import GPT


def peaks(asked):
    """Without a cache and with it. peak, cache: bytes, see `measure`. formula: the bytes of the cache by its shape."""
    rows, lengths = [], {name: (10, n) for name, n in WITHIN_WINDOW.items()}
    cases = asked.combinations('SML', (1, 8, 32), lengths)
    each = [(*case, use_cache) for case in cases for use_cache in (False, True)]
    for name, B, n, use_cache in tqdm(each, desc='memory', leave=False, disable=None):
        c = config_of(name, asked.bias)
        row = dict(shape=name, dtype=asked.dtype, batch=B, prompt=PROMPT, new_tokens=n, use_cache=use_cache,
                   formula=use_cache * cache_bytes(c, B, DTYPES[asked.dtype].itemsize))
        rows.append(row | measure_in_new_process(c, B, PROMPT, n, use_cache, asked.device, asked.dtype))
    yield rows


def measure_in_new_process(*case):
    """measure(*case), in a new process. Raises MemoryError if the system ended it."""
    # spawned, because a forked process begins with all the memory of this one
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context('spawn')) as process:
        try:
            return process.submit(measure, *case).result()
        except BrokenProcessPool as e:
            raise MemoryError from e


def measure(config, batch_size, prompt, n_new, use_cache, device, dtype):
    """
    Bytes, {'peak': ..., 'cache': ...}, of generating n_new tokens after a prompt of `prompt` tokens, in a batch.

    peak: the largest amount held at a time, less the amount held before (the model, and what its libraries set up).
    cache: the tensors of the cache, 0 without one. They are part of peak.
    """
    model = GPT(config).to(device).eval()
    idx = torch.zeros(batch_size, prompt, dtype=torch.long, device=device)
    with torch.no_grad(), autocast(device, dtype):
        model.generate(idx[:1], 2, temperature=0, use_cache=True)
        before = reset_peak(device)
        model.generate(idx, n_new, temperature=0, use_cache=use_cache)
        peak = peak_bytes(device) - before
        kv_cache = model(idx)[2] if use_cache else []
    return dict(peak=peak, cache=sum(k.nbytes + v.nbytes for k, v, _ in kv_cache))


def reset_peak(device):
    """Set the recorded peak to the bytes that are held now, and return them."""
    if device.startswith('cuda'):
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == 'linux':
        # freed memory that the process has kept would hide new allocations
        getattr(ctypes.CDLL(None), 'malloc_trim', lambda pad: 0)(0)
        try:
            with open('/proc/self/clear_refs', 'w') as f:
                f.write('5')  # resets the peak, see proc(5)
        except OSError:
            pass  # the peak stays the highest so far, and only memory above it is seen
    return peak_bytes(device)


def peak_bytes(device):
    """The peak in bytes: allocated on a GPU, resident on a CPU."""
    if device.startswith('cuda'):
        return torch.cuda.max_memory_allocated(device)
    if (peak := process_bytes('VmHWM')) is not None:  # ru_maxrss would begin with the peak of the parent process
        return peak
    import resource  # not on Windows
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


PARTS = dict(peaks=Part(peaks, 5, "bytes that generation needs in addition to the model",
                        'shape batch new_tokens use_cache peak cache formula'))
