"""
The functions of step.py, compiled or found on disk, and the threads that run them: one step at a time, in a process
that may fork.
"""
import atexit
import sys
import threading

import numpy as np
import torch

from decode.kernel import attention, callback, keys_values, layout, linears, norms, plan, threads, tiles, vectors
from decode.kernel.disk_cache import keep_on_disk
from decode.kernel.step import check, step
from decode.kernel.threads import Workers
from decode.metadata import KINDS
from decode.process import after_fork, step_lock
from decode.weights import WEIGHTS

# the files that numba compiles besides step.py
COMPILED = attention, callback, keys_values, layout, linears, norms, plan, threads, tiles, vectors
for compiled in (step, check):
    keep_on_disk(compiled, *COMPILED)

workers = {}  # {(type of weights, of keys and values): the Workers of all steps on them}


@after_fork
def forget_threads():
    """The child of a fork has neither the workers nor torch's threads."""
    if not workers:
        return
    torch.set_num_threads(1)
    one_torch_thread.forget()
    for each in workers.values():
        each.forget()


@atexit.register
def stop_workers():
    with step_lock:
        for each in workers.values():
            each.stop()


class OneTorchThread:
    """
    From the first `enter` to the last `leave`, of any threads, torch computes on one thread; then on as many as before.
    """

    def __init__(self):
        self.forget()

    def forget(self):
        self.lock, self.uses, self.before = threading.Lock(), 0, None

    def number(self):
        """How many threads torch uses when this is not in use."""
        return self.before if self.uses else torch.get_num_threads()

    def enter(self):
        with self.lock:
            self.before = self.number()
            self.uses += 1
        torch.set_num_threads(1)

    def leave(self):
        with self.lock:
            if self.uses:  # 0 in a child that was forked after `enter`
                self.uses -= 1
                torch.set_num_threads(self.before)


one_torch_thread = OneTorchThread()


def team_for(weights, dtype, memory, n_threads):
    """
    The `Workers` for weights, a key of `WEIGHTS`, and keys and values of a dtype of `KINDS`. Their step is compiled, or
    loaded from disk. memory: the table of a model whose weights are of that type.
    """
    key = weights, dtype
    if key not in workers:
        workers[key] = Workers(step, (np.zeros(0, WEIGHTS[weights]), np.zeros(0, KINDS[dtype])))
    team, sizes = workers[key], np.zeros(layout.N_SIZES, np.int64)  # a step of no tokens through no layers
    sizes[layout.N_KV_HEAD] = 1  # a divisor
    notice = "compiling the decode step for this machine; the next start finds it on disk ..."
    timer = threading.Timer(1.5, print, [notice], dict(file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        step(*team.like, memory.ctypes.data, sizes.ctypes.data, 1, team.address, 0, 0)
        check(memory.ctypes.data, sizes.ctypes.data)
    finally:
        timer.cancel()
    team.ready(n_threads)
    return team
