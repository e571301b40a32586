"""
What generation needs in memory beyond the model, measured in a process of its own for each case.

Nothing shorter than generating all the tokens will do. The last step alone says what its tensors take, but without a
cache every step has tensors of another size, and what the allocator and the matrix library keep of them adds up.
"""
import ctypes
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from device import autocast
from model import GPT


def measure_apart(*case):
    """measure(*case), in a new process. Raises MemoryError if the system ended it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context('spawn')) as process:  # a fork would begin with all we hold
        try:
            return process.submit(measure, *case).result()
        except BrokenProcessPool as e:
            raise MemoryError from e


def measure(config, batch_size, prompt, n_new, use_cache, device, dtype):
    """
    Bytes, {'peak': ..., 'cache': ...}, of generating n_new tokens after a prompt of `prompt` tokens, in a batch.

    peak: the most that was held at a time, less what was held before (the model, and what its libraries set up once).
    cache: of the tensors of the cache, 0 without one. peak contains it.
    """
    model = GPT(config).to(device).eval()
    idx = torch.zeros(batch_size, prompt, dtype=torch.long, device=device)
    with torch.no_grad(), autocast(device, dtype):
        model.generate(idx[:1], 2, temperature=0, use_cache=True)
        before = forget_peak(device)
        model.generate(idx, n_new, temperature=0, use_cache=use_cache)
        peak = peak_bytes(device) - before
        kv_cache = model(idx)[2] if use_cache else []
    return dict(peak=peak, cache=sum(k.nbytes + v.nbytes for k, v, _ in kv_cache))


def forget_peak(device):
    """Begin anew to watch for the peak. Returns the bytes held now."""
    if device.startswith('cuda'):
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == 'linux':
        getattr(ctypes.CDLL(None), 'malloc_trim', lambda pad: 0)(0)  # freed memory that was kept would hide what is allocated next
        try:
            with open('/proc/self/clear_refs', 'w') as f:
                f.write('5')  # the peak is what is held now; see proc(5)
        except OSError:
            pass  # then it is the highest so far, and only what goes beyond it is seen
    return peak_bytes(device)


def peak_bytes(device):
    """The most that was held on the device at a time: allocated on a GPU, resident on a CPU."""
    if device.startswith('cuda'):
        return torch.cuda.max_memory_allocated(device)
    try:
        with open('/proc/self/status') as f:  # unlike ru_maxrss it does not begin with the peak of the process that started us
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith('VmHWM'))
    except (OSError, StopIteration):
        import resource  # Windows has none
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)
