"""
A decoder for the CPU: the compiled step of kernel.py on packed weights, with as many threads as are fastest.
"""
import atexit
import hashlib
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numba
import numpy as np
import torch

from decode import attention, kernel, layout, linears, threads, tiles, vectors
from decode.choice import ThreadChoice
from decode.forks import StepLock, after_fork
from decode.layers import with_length
from decode.layout import GROUP, LINEARS_PER_LAYER, LOGITS, TOKENS
from decode.packing import WEIGHTS, PackedWeights, check_model, padded
from decode.tables import Activations, PackedModel, StepTables
from decode.threads import LINE, Workers, aligned, n_cores

BYTES_A_THREAD = 2**22  # that a step reads: the first guess of how many threads are faster than one

COMPILED = attention, kernel, layout, linears, threads, tiles, vectors  # the files that numba compiles
sources = hashlib.sha256(b''.join(Path(file.__file__).read_bytes() for file in COMPILED)).hexdigest()
run, loop = kernel.steps(sources)
try:
    run.enable_caching()
    loop.enable_caching()
except RuntimeError:  # numba found no folder that it may write to
    print("the compiled decode step cannot be kept on disk, so each start compiles it again: "
          "NUMBA_CACHE_DIR can name a folder for it", file=sys.stderr)

step_lock = StepLock()  # the workers run one step at a time, and a decoder has one set of activations
workers = {}  # {type of weights: the Workers of all decoders that read them}
choices = {}  # {(shape, weights, most threads, size of the step): ThreadChoice}, for all decoders of that shape


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
    with step_lock.lock:
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


class CPUDecoder:
    """
    A decoder, (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache), that runs on the CPU.

    weights: 'float32', 'bfloat16' or 'int8', the type in which they are read. They are packed into a copy of 4, 2 or 1
        bytes a weight; the model and its checkpoint stay as they are.
    threads: how many; by default up to torch's number, as many as a few timed steps show to be fastest, see `choice`.

    It reads and writes the same tuples as the model, in place, so the two can take turns on one cache at any step;
    kv_cache=None begins a cache, and cache_pos may be an integer tensor (B,). Several threads may use one decoder:
    their steps take turns. After a fork the child's decoder works too, with threads of its own.

    Weights that have changed are packed again before they are used. A step that begins a cache compares a hash of every
    byte (of a large model, of samples) with that of the packed weights. Each other step compares modules, hooks,
    torch's version counters and some values of each parameter (`fingerprint.Watch`); inside `exclusive_use`, only these
    values. An interrupt at any moment leaves a decoder that works.

    Raises ValueError on a model that is not model.py's GPT in float32 on the CPU, and on caches and tokens that do
    not fit it; then no cache has been written.
    """

    def __init__(self, model, weights='float32', threads=None):
        if weights not in WEIGHTS:
            raise ValueError(f"weights must be {', '.join(WEIGHTS)}, not {weights!r}")
        most = n_cores()
        if threads is not None and not 1 <= threads <= most:
            raise ValueError(f"threads must be between 1 and the {most} cores of this process, not {threads}")
        check_model(model)
        c, self.model, self.weights, self.packed_weights = model.config, model, weights, PackedWeights(model, weights)
        self.n_threads, self.fixed = threads or min(one_torch_thread.number(), most), threads is not None
        self.name = (f"numba on the CPU, {weights} weights, {'' if self.fixed or self.n_threads == 1 else 'up to '}"
                     f"{self.n_threads} thread{'s' * (self.n_threads > 1)}")
        self.vocab_size, self.shape, self.choices = c.vocab_size, (c.n_layer, c.n_head, c.n_embd, c.vocab_size), {}
        # rows of a prefill that are computed at a time: their activations fit a core's cache
        self.chunk = max(8, 2**19 // (4 * padded(4 * c.n_embd, GROUP)) // 8 * 8)
        # the cache of the last step: its k_cache and v_cache of each layer, and their addresses for the kernel
        self.bound, self.pointers, self.batch_size = None, None, 0
        self.caches = np.zeros(2 * c.n_layer, np.int64)
        n_linears = c.n_layer * LINEARS_PER_LAYER + 1
        self.arrays = self.packed_weights.arrays() | {
            layout.CACHES: self.caches, layout.BARRIER: aligned(LINE, np.int64),
            layout.CLAIMS: aligned((n_linears, LINE), np.int64)}
        self.packed = self.tables = None  # what the weights were packed of; None: to be packed before the next step
        self.of_thread = threading.local()
        with step_lock.lock:
            if weights not in workers:
                workers[weights] = Workers(loop, self.packed_weights.panels[:0].copy())
            self.workers = workers[weights]
            self.refresh()
            self.compile()

    def compile(self):
        """Compile the step, or load it from disk, by a step of no tokens; start the workers."""
        notice = "compiling the decode step for this machine; the next start finds it on disk ..."
        timer = threading.Timer(1.5, print, [notice], dict(file=sys.stderr, flush=True))
        timer.daemon = True
        timer.start()
        panels, post = self.packed_weights.panels, self.workers.address
        try:
            for compile_or_load in (lambda: run(panels, *self.tables.addresses, 1, post),
                                    lambda: loop.compile(tuple(map(numba.typeof, (self.workers.like, 0, 0, 0))))):
                try:
                    compile_or_load()
                except OSError as e:  # it is compiled nevertheless
                    print(f"the compiled decode step could not be kept on disk ({e})", file=sys.stderr)
        finally:
            timer.cancel()
        self.workers.ready(self.n_threads)

    def refresh(self):
        """Pack the weights. If it is interrupted `packed` is None, and the next step packs them again."""
        check_model(self.model)
        c = self.model.config
        if (c.n_layer, c.n_head, c.n_embd, c.vocab_size) != self.shape:
            raise ValueError("the model has another shape than when this decoder was made: make a new decoder")
        self.packed = self.bound = None
        packed = PackedModel(self.model)
        self.packed_weights.fill()
        reuse = self.tables and self.tables.packed.block_size == packed.block_size
        activations = self.tables.activations if reuse else Activations(c, 8, self.n_threads)
        self.tables = StepTables(c, packed, activations, self.arrays)
        self.packed = packed

    def __call__(self, idx, kv_cache):
        with step_lock.lock:
            if self.packed is None or self.model.config.block_size != self.packed.block_size:
                self.refresh()
            checked = True  # has the model's checked_input seen this input?
            if kv_cache is None:
                idx, cache_pos, kv_cache = self.begin(idx)
            else:
                if not getattr(self.of_thread, 'exclusive', False):
                    self.look_for_changes()
                cache_pos, bound = kv_cache[0][2], self.bound
                if bound is None or len(kv_cache) != len(bound) or any(
                        k is not bound_k or v is not bound_v or pos is not cache_pos
                        for (k, v, pos), (bound_k, bound_v) in zip(kv_cache, bound)):
                    idx, cache_pos = self.bind(idx, kv_cache)
                elif is_int64(idx, 2) and idx.size(0) == self.batch_size and idx.size(1) and (
                        type(cache_pos) is int and 0 <= cache_pos <= self.packed.block_size
                        or is_int64(cache_pos, 1) and cache_pos.size(0) == self.batch_size):
                    checked = False  # the kernel itself refuses tokens and positions that are out of range
                else:
                    idx, cache_pos = self.model.checked_input(idx, kv_cache)
            B, T = idx.shape
            logits = torch.empty(B, 1, self.vocab_size, dtype=torch.float32, device='cpu')
            chunk = max(1, self.chunk // max(1, B))
            if T <= chunk:
                self.run_step(idx, kv_cache, cache_pos, logits, True)
            else:
                if not checked:  # all chunks are checked before the first one is written
                    self.model.checked_input(idx, kv_cache)
                if idx.min() < 0 or idx.max() >= self.vocab_size:
                    self.refuse(kernel.BAD_TOKEN, cache_pos, T)
                for start in range(0, T, chunk):
                    self.run_step(idx[:, start:start + chunk], kv_cache, cache_pos + start, logits, start + chunk >= T)
            return logits, with_length(kv_cache, cache_pos + T)

    @contextmanager
    def exclusive_use(self):
        """
        For a loop in which no other code runs between the steps of a cache. Inside, this thread's steps do not compare
        modules, hooks and version counters, which takes a tenth of a small step; they do notice weights whose probed
        values have changed. And torch computes on one thread: its other threads would spin for a while after each
        operation, on a core that the step needs.
        """
        before = getattr(self.of_thread, 'exclusive', False)
        one_torch_thread.enter()
        try:
            self.of_thread.exclusive = True
            yield
        finally:
            self.of_thread.exclusive = before
            one_torch_thread.leave()

    def begin(self, idx):
        """Check the tokens that begin a cache, and the weights. Returns (idx, cache_pos, kv_cache)."""
        idx, cache_pos = self.model.checked_input(idx, None)
        if not idx.is_cpu:
            raise ValueError(f"the CPU decoder reads tokens on the CPU, but these are on {idx.device}: move them there")
        if not self.packed.watch.identical():
            self.refresh()
        kv_cache = self.empty_cache(len(idx))
        self.bind_checked(kv_cache)
        return idx, cache_pos, kv_cache

    def empty_cache(self, batch_size):
        """
        As the model's, in memory that the system has zeroed: it is not written here, and takes room only when it is.
        """
        c = self.model.config
        shape = batch_size, c.n_head, c.block_size, c.n_embd // c.n_head
        kind = type(self.model.empty_cache(0)[0])
        return [kind(*(torch.from_numpy(aligned(shape, np.float32)) for _ in range(2)), 0) for _ in range(c.n_layer)]

    def look_for_changes(self):
        """Pack the weights again if the model was seen to have changed."""
        if not self.packed.watch.same_objects():
            self.refresh()
        elif self.bound and [t.data_ptr() for layer in self.bound for t in layer] != self.pointers:
            self.bound = None  # a tensor's memory was exchanged

    def bind(self, idx, kv_cache):
        """Check a cache that is not the last step's, and the tokens for it, and bind it. Returns (idx, cache_pos)."""
        checked = self.model.checked_input(idx, kv_cache)
        for k_cache, v_cache, _ in kv_cache:
            contiguous = k_cache.is_contiguous() and v_cache.is_contiguous()
            if k_cache.dtype != torch.float32 or not (contiguous and k_cache.is_cpu):
                raise ValueError("the CPU decoder reads contiguous float32 caches on the CPU (autocast makes others), "
                                 f"but this one is {k_cache.dtype} on {k_cache.device}, with strides "
                                 f"{k_cache.stride()} and {v_cache.stride()}")
        self.bind_checked(kv_cache)
        return checked

    def bind_checked(self, kv_cache):
        """Write the addresses of a cache where the kernel reads them."""
        self.bound = None  # an interrupt from here on leaves no cache bound
        self.pointers = [cache.data_ptr() for layer in kv_cache for cache in layer[:2]]
        self.caches[:] = self.pointers
        self.batch_size, self.bound = len(kv_cache[0][0]), [tuple(layer[:2]) for layer in kv_cache]

    def run_step(self, idx, kv_cache, cache_pos, logits, want_logits, retries=3):
        """One step of the kernel: idx (B, T) at cache_pos; logits are written if they are wanted."""
        B, T = idx.shape
        if B * T > self.tables.activations.n_rows:
            activations = Activations(self.model.config, padded(B * T, 8), self.n_threads)
            self.tables = StepTables(self.model.config, self.packed, activations, self.arrays)
        tables, idx = self.tables, idx.contiguous()
        tables.activations.cache_pos[:B] = cache_pos
        tables.memory[TOKENS], tables.memory[LOGITS] = idx.data_ptr(), logits.data_ptr()
        if tables.step != (B, T, want_logits):
            tables.set_step((B, T, want_logits))
        choice = (None if self.fixed or self.n_threads == 1 else
                  self.choices.get((B * T).bit_length()) or self.choice(B * T))
        n_threads = self.n_threads if choice is None else choice.n
        if n_threads > self.workers.n_ready:
            n_threads = self.workers.ready(n_threads)
        began = time.perf_counter_ns()
        refused = run(self.packed_weights.panels, *tables.addresses, n_threads, self.workers.address)
        if choice is not None and not refused:
            choice.record(time.perf_counter_ns() - began, began if T == 1 else 0)  # a prefill always follows a pause
        if refused == kernel.STALE:
            if not retries:
                raise ValueError("the model's weights changed again while they were packed: do not write them in "
                                 "another thread during a step")
            self.refresh()
            self.bind(idx, kv_cache)
            self.run_step(idx, kv_cache, cache_pos, logits, want_logits, retries - 1)
        elif refused:
            self.refuse(refused, cache_pos, T)

    def refuse(self, why, cache_pos, T):
        if why == kernel.BAD_TOKEN:
            raise ValueError(f"token ids must be within the vocabulary of {self.vocab_size}")
        raise ValueError(f"out of context: cache_pos {cache_pos} + {T} new tokens > "
                         f"block_size {self.packed.block_size}")

    def choice(self, n_rows):
        """The `ThreadChoice` for steps of about so many rows, shared by all decoders of this shape."""
        size = n_rows.bit_length()
        key = self.shape, self.weights, self.n_threads, size
        if key not in choices:
            # for 8 rows, reading the weights is half of the work
            n_bytes = self.packed_weights.panels.nbytes * (1 + n_rows / 8)
            guess = min(self.n_threads, 1 + int(n_bytes / BYTES_A_THREAD))
            others = {self.n_threads, *(2**i for i in range(self.n_threads.bit_length()))} - {guess}
            choices[key] = ThreadChoice([guess, *sorted(others, reverse=True)])
        self.choices[size] = choices[key]
        return choices[key]


def is_int64(x, n_dims):
    """Is this an int64 tensor on the CPU with so many dimensions?"""
    return torch.is_tensor(x) and x.dtype is torch.int64 and x.dim() == n_dims and x.is_cpu
