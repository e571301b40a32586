"""
A decoder for the CPU: the kernel of `kernel.py` on packed weights, on as many threads as are fastest.
"""
import atexit
import hashlib
import os
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numba
import numpy as np
import torch

from decode import kernel, threads, vectors
from decode.choice import ThreadChoice
from decode.kernel import GROUP
from decode.packing import WEIGHTS, PackedWeights, check_model, padded
from decode.threads import LINE, Workers, aligned, n_cores
from decode.vectors import LANES
from fingerprint import Watch, probe

BYTES_A_THREAD = 2**22  # to read in a step: the first guess of how many threads are worth waiting for
LARGEST_BATCH = 256  # up to here no batch was found at which PyTorch's matmuls are faster: see bench.py --mode=peers

sources = hashlib.sha256(b''.join(Path(m.__file__).read_bytes() for m in (kernel, threads, vectors))).hexdigest()
run, loop = kernel.steps(sources)
try:
    run.enable_caching()
    loop.enable_caching()
except RuntimeError:  # numba found no folder that it may write to
    print("the compiled decode step cannot be kept on disk, so each start compiles it again: "
          "NUMBA_CACHE_DIR can name a folder for it", file=sys.stderr)

step_lock = threading.Lock()  # one step at a time: the workers serve one, and a decoder's buffers belong to one
workers = {}  # {kind of weights: the Workers of all decoders that read them}
choices = {}  # {(shape, weights, most threads, size of the step): ThreadChoice}, for all decoders of that shape


def after_fork():
    """Renew the lock and forget the workers: the child of a fork has none of the parent's other threads, nor torch's."""
    global step_lock
    if not workers:
        return
    torch.set_num_threads(1)
    one_torch_thread.forget()
    step_lock = threading.Lock()
    for each in workers.values():
        each.forget()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=after_fork)


@atexit.register
def stop_workers():
    with step_lock:
        for each in workers.values():
            each.stop()


class OneTorchThread:
    """torch computes on one thread while it is in use, by any number of threads; each restores the number from before the first."""

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
            if self.uses:  # not so in a child that was forked inside
                self.uses -= 1
                torch.set_num_threads(self.before)


one_torch_thread = OneTorchThread()


class Buffers:
    """Activations for n_rows rows: those that all threads share, and each thread's own. Never resized: larger ones replace them."""

    def __init__(self, config, n_rows, n_threads):
        c = config
        C_p, ff_p = padded(c.n_embd, GROUP), padded(4 * c.n_embd, GROUP)
        q_p = c.n_head * padded(c.n_embd // c.n_head, LANES)
        self.n_rows = n_rows
        self.cache_pos = np.zeros(n_rows, np.int64)
        self.shared = [aligned((n_rows, n), np.float32) for n in (C_p, q_p, 2 * q_p, C_p, ff_p)]
        self.own = [aligned(shape, dtype) for _ in range(n_threads) for shape, dtype in (
            ((n_rows, C_p), np.float32), (padded(c.block_size, LANES) + LANES, np.float32), ((8, LANES), np.float32),
            ((n_rows, ff_p), np.uint8), ((n_rows, ff_p // GROUP), np.float32))]


class Packed:
    """The model whose weights are packed, as it was then, and the values that the kernel looks at in each step."""

    def __init__(self, model):
        self.watch, self.block_size = Watch(model), model.config.block_size
        probes = [probe(p) for p in model.parameters()]
        self.probes = np.array([p.ctypes.data + i * p.strides[0] for p in probes for i in range(len(p))], np.int64)
        self.seen = np.concatenate(probes)
        self.embeddings = [model.transformer.wte.weight.data_ptr(), model.transformer.wpe.weight.data_ptr()]


class Placed:
    """
    The tables that the kernel reads: `memory`, where everything is, and `sizes`, see `kernel.steps`. It keeps alive
    what the addresses lead to, so a decoder replaces it as a whole.
    """

    def __init__(self, config, packed, buffers, arrays):
        c, self.packed, self.buffers, self.arrays = config, packed, buffers, arrays
        arrays = [*arrays[:2], buffers.cache_pos, *arrays[2:], *buffers.shared, packed.probes, packed.seen, *buffers.own]
        self.memory = np.array([0, 0, *packed.embeddings, *(a.ctypes.data for a in arrays)], np.int64)
        self.sizes = np.array([c.n_layer, c.n_head, c.n_embd // c.n_head, c.n_embd, packed.block_size, c.vocab_size, 0, 1, 1,
                               len(packed.probes)], np.int64)
        self.addresses = self.memory.ctypes.data, self.sizes.ctypes.data
        self.step = None  # (B, T, want_logits), as they are in sizes


class CPUDecoder:
    """
    A decoder, (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache), that runs on the CPU.

    weights: 'float32', 'bfloat16' or 'int8', how they are read. They are packed into a copy of 4, 2 or 1 bytes a
        weight; the model and its checkpoint stay as they are.
    threads: how many; by default up to torch's number, as many as a few timed steps show to be fastest, see `choice`.

    It reads and writes the same tuples as the model, in place, and can take over from it or hand back at any step;
    kv_cache=None begins a cache, and cache_pos may be an integer tensor (B,). Several threads may use one decoder:
    their steps take turns. After a fork the child's decoder works too, with threads of its own.

    Weights that have changed are packed anew before they are used. A step that begins a cache compares a hash of
    every byte (of a large model, of samples) with that of the packed weights. Each other step looks at modules, hooks, torch's version counters and
    some values of each parameter (`fingerprint.Watch`); inside `undisturbed`, only at these values. An interrupt at
    any moment leaves a decoder that works.

    Raises ValueError on a model that is not model.py's GPT in float32 on the CPU, and on caches and tokens that do
    not fit it.
    """

    def __init__(self, model, weights='float32', threads=None):
        if weights not in WEIGHTS:
            raise ValueError(f"weights are {', '.join(WEIGHTS)}, not {weights!r}")
        most = n_cores()
        if threads is not None and not 1 <= threads <= most:
            raise ValueError(f"threads must be between 1 and the {most} cores of this process, not {threads}")
        check_model(model)
        c, self.model, self.weights, self.packed_weights = model.config, model, weights, PackedWeights(model, weights)
        self.n_threads, self.fixed = threads or min(one_torch_thread.number(), most), threads is not None
        self.name = (f"numba on the CPU, {weights} weights, {'' if self.fixed or self.n_threads == 1 else 'up to '}"
                     f"{self.n_threads} thread{'s' * (self.n_threads > 1)}")
        self.vocab_size, self.shape, self.choices = c.vocab_size, (c.n_layer, c.n_head, c.n_embd, c.vocab_size), {}
        self.chunk = max(8, 2**19 // (4 * padded(4 * c.n_embd, GROUP)) // 8 * 8)  # activations of these rows fit a core's cache
        self.caches, self.known, self.batch_size = np.zeros(2 * c.n_layer, np.int64), None, 0
        p = self.packed_weights
        self.arrays = [aligned(LINE, np.int64), aligned((3 * c.n_layer + 1, LINE), np.int64), self.caches, p.linears, p.eps,
                       p.norm_weight, p.norm_bias, p.scale, p.bias, p.start]
        self.packed = self.placed = self.pointers = None
        self.of_thread = threading.local()
        with step_lock:
            if weights not in workers:
                workers[weights] = Workers(loop, p.linears[:0].copy())
            self.workers = workers[weights]
            self.refresh()
            self.compile()

    def compile(self):
        """Compile the step, or load what an earlier start has compiled, with a step of no tokens; start the workers."""
        notice = threading.Timer(1.5, print, ["compiling the decode step for this machine; the next start finds it on disk ..."],
                                 dict(file=sys.stderr, flush=True))
        notice.daemon = True
        notice.start()
        try:
            for compile_or_load in (lambda: run(self.packed_weights.linears, *self.placed.addresses, 1, self.workers.address),
                                    lambda: loop.compile(tuple(map(numba.typeof, (self.workers.like, 0, 0, 0))))):
                try:
                    compile_or_load()
                except OSError as e:  # compiled it is all the same
                    print(f"the compiled decode step could not be kept on disk ({e})", file=sys.stderr)
        finally:
            notice.cancel()
        self.workers.ready(self.n_threads)

    def refresh(self):
        """Pack the weights. If it is interrupted `packed` is None, and the next step packs them again."""
        check_model(self.model)
        c = self.model.config
        if (c.n_layer, c.n_head, c.n_embd, c.vocab_size) != self.shape:
            raise ValueError("the model has another shape than when this decoder was made: make a new decoder")
        self.packed = self.known = None
        packed = Packed(self.model)
        self.packed_weights.fill()
        reuse = self.placed and self.placed.packed.block_size == packed.block_size
        buffers = self.placed.buffers if reuse else Buffers(c, 8, self.n_threads)
        self.placed = Placed(c, packed, buffers, self.arrays)
        self.packed = packed

    def __call__(self, idx, kv_cache):
        with step_lock:
            if self.packed is None or self.model.config.block_size != self.packed.block_size:
                self.refresh()
            if kv_cache is None:
                idx, _ = self.model.check_input(idx, None)
                if not self.packed.watch.identical():
                    self.refresh()
                kv_cache = self.empty_cache(len(idx))
            elif not getattr(self.of_thread, 'undisturbed', False):
                if not self.packed.watch.same_objects():
                    self.refresh()
                elif self.known and [t.data_ptr() for layer in self.known for t in layer] != self.pointers:
                    self.known = None  # a tensor's memory was exchanged
            cache_pos, known = kv_cache[0][2], self.known
            if known is None or len(kv_cache) != len(known) or any(
                    k is not known_k or v is not known_v or pos is not cache_pos
                    for (k, v, pos), (known_k, known_v) in zip(kv_cache, known)):
                self.get_to_know(idx, kv_cache)
            if not (is_int64(idx, 2) and idx.size(0) == self.batch_size and idx.size(1) and (
                    type(cache_pos) is int and 0 <= cache_pos <= self.packed.block_size
                    or is_int64(cache_pos, 1) and cache_pos.size(0) == self.batch_size)):
                idx, cache_pos = self.model.check_input(idx, kv_cache)
            B, T = idx.shape
            logits = torch.empty(B, 1, self.vocab_size, dtype=torch.float32, device='cpu')
            chunk = max(1, self.chunk // max(1, B))
            if T <= chunk:
                self.feed(idx, kv_cache, cache_pos, logits, True)
            else:  # all of it is checked before the first chunk is written
                self.model.check_input(idx, kv_cache)
                if idx.min() < 0 or idx.max() >= self.vocab_size:
                    self.refuse(kernel.BAD_TOKEN, cache_pos, T)
                for start in range(0, T, chunk):
                    self.feed(idx[:, start:start + chunk], kv_cache, cache_pos + start, logits, start + chunk >= T)
            after, kind = cache_pos + T, type(kv_cache[0])
            return logits, [tuple.__new__(kind, (k_cache, v_cache, after)) for k_cache, v_cache, _ in kv_cache]

    @contextmanager
    def undisturbed(self):
        """
        For a loop in which no code but ours runs between two steps of a cache. Inside, this thread's steps take no
        look at modules, hooks and version counters, a tenth of a small step; weights whose probed values change are
        noticed all the same. And torch computes on one thread: its pool would spin for a while after each operation,
        on a core that a step needs.
        """
        before = getattr(self.of_thread, 'undisturbed', False)
        one_torch_thread.enter()
        try:
            self.of_thread.undisturbed = True
            yield
        finally:
            self.of_thread.undisturbed = before
            one_torch_thread.leave()

    def empty_cache(self, batch_size):
        """As the model's. But the system's zeroed memory need not be filled with zeros, and takes room only where it is written."""
        c = self.model.config
        kind, shape = type(self.model.empty_cache(0)[0]), (batch_size, c.n_head, c.block_size, c.n_embd // c.n_head)
        return [kind(*(torch.from_numpy(aligned(shape, np.float32)) for _ in range(2)), 0) for _ in range(c.n_layer)]

    def get_to_know(self, idx, kv_cache):
        """Check a cache that the last step did not see, and note where it is."""
        self.model.check_input(idx, kv_cache)
        for k_cache, v_cache, _ in kv_cache:
            if k_cache.dtype != torch.float32 or not (k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.is_cpu):
                raise ValueError("the CPU decoder reads contiguous float32 caches on the CPU (autocast makes others), but this "
                                 f"one is {k_cache.dtype} on {k_cache.device}, with strides {k_cache.stride()} and "
                                 f"{v_cache.stride()}")
        self.known = None  # until the addresses are those of what is known
        self.pointers = [cache.data_ptr() for layer in kv_cache for cache in layer[:2]]
        self.caches[:] = self.pointers
        self.batch_size, self.known = len(kv_cache[0][0]), [tuple(layer[:2]) for layer in kv_cache]

    def feed(self, idx, kv_cache, cache_pos, logits, want_logits, retries=3):
        """One step of the kernel: idx (B, T) at cache_pos; logits are written if they are wanted."""
        B, T = idx.shape
        if B * T > self.placed.buffers.n_rows:
            c = self.model.config
            self.placed = Placed(c, self.packed, Buffers(c, padded(B * T, 8), self.n_threads), self.arrays)
        placed, idx = self.placed, idx.contiguous()
        placed.buffers.cache_pos[:B] = cache_pos
        placed.memory[0], placed.memory[1] = idx.data_ptr(), logits.data_ptr()
        if placed.step != (B, T, want_logits):
            placed.step = None
            placed.sizes[6:9] = B, T, want_logits
            placed.step = B, T, want_logits
        choice = None if self.fixed or self.n_threads == 1 else self.choices.get((B * T).bit_length()) or self.choice(B * T)
        n_threads = self.n_threads if choice is None else choice.n
        if n_threads > self.workers.n_ready:
            n_threads = self.workers.ready(n_threads)
        began = time.perf_counter_ns()
        refused = run(self.packed_weights.linears, *placed.addresses, n_threads, self.workers.address)
        if choice is not None and not refused:
            choice.record(time.perf_counter_ns() - began, began if T == 1 else 0)  # a prefill always follows a pause
        if refused == kernel.STALE:
            if not retries:
                raise ValueError("the model's weights changed again while they were packed: another thread is writing them")
            self.refresh()
            self.get_to_know(idx, kv_cache)
            self.feed(idx, kv_cache, cache_pos, logits, want_logits, retries - 1)
        elif refused:
            self.refuse(refused, cache_pos, T)

    def refuse(self, why, cache_pos, T):
        if why == kernel.BAD_TOKEN:
            raise ValueError(f"token ids must be within the vocabulary of {self.vocab_size}")
        raise ValueError(f"out of context: cache_pos {cache_pos} + {T} new tokens > block_size {self.packed.block_size}")

    def choice(self, n_rows):
        """The `ThreadChoice` for steps of about so many rows, shared by all decoders of this shape."""
        size = n_rows.bit_length()
        key = self.shape, self.weights, self.n_threads, size
        if key not in choices:
            # reading the weights is half of the work for 8 rows
            guess = min(self.n_threads, 1 + int(self.packed_weights.linears.nbytes * (1 + n_rows / 8) / BYTES_A_THREAD))
            others = {self.n_threads, *(2**i for i in range(self.n_threads.bit_length()))} - {guess}
            choices[key] = ThreadChoice([guess, *sorted(others, reverse=True)])
        self.choices[size] = choices[key]
        return choices[key]


def is_int64(x, n_dims):
    """Is this an int64 tensor on the CPU with so many dimensions?"""
    return torch.is_tensor(x) and x.dtype is torch.int64 and x.dim() == n_dims and x.is_cpu
