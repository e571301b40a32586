"""A decoder for the CPU: the compiled step of kernel/ on the model's tuples."""
import numpy as np
import torch

from decode.execute import Executor
from decode.kernel.layout import BAD_TOKEN
from decode.kernel.threads import aligned, step_lock
from decode.layers import make_room, with_length
from decode.metadata import KVArrays, Runs


class CPUDecoder(Executor):
    """
    A decoder, (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache), that runs on the CPU. See `Executor` for
    its arguments, and for `execute_model`, which runs the same step on other caches.

    It reads and writes the same tuples as the model, in place, so the two can take turns on one cache at any step;
    kv_cache=None begins a cache, and cache_pos may be an integer tensor (B,).

    A step that begins a cache looks for changed weights thoroughly, each other step cheaply; inside `exclusive_use`,
    only the kernel looks.

    Raises ValueError on caches and tokens that do not fit the model; then no cache has been written.
    """

    def __init__(self, model, weights='float32', threads=None):
        self.bound = None  # the `BoundTuples` of the last step
        super().__init__(model, weights, threads)

    def refresh(self):
        self.bound = None
        super().refresh()

    def __call__(self, idx, kv_cache):
        with step_lock.lock:
            if kv_cache is None:
                idx, cache_pos, kv_cache = self.begin(idx)
            else:
                idx, cache_pos = self.checked(idx, kv_cache)
            # a step that finds changed weights packs them and unbinds the cache, whose layout stays as it is
            bound, (B, T), window = self.bound, idx.shape, self.model.config.window
            logits = torch.empty(B, 1, self.vocab_size, dtype=torch.float32, device='cpu')
            if not window:
                self.run_tuples(bound, idx, cache_pos, logits)
                return logits, with_length(kv_cache, cache_pos + T)
            if T > window + 1 and bool((idx < 0).any() or (idx >= self.vocab_size).any()):
                self.refuse(BAD_TOKEN)
            for start in range(0, T, window + 1):  # a rolling cache takes no more tokens at once
                part, pos = idx[:, start:start + window + 1], cache_pos + start
                bound.make_room(kv_cache, pos, part.size(1), self.model.config)
                self.run_tuples(bound, part, pos, logits)
            return logits, with_length(kv_cache, cache_pos + T)

    def begin(self, idx):
        """Check the tokens that begin a cache, and the weights. Returns (idx, cache_pos, kv_cache)."""
        idx, cache_pos = self.model.checked_input(idx, None)
        if not idx.is_cpu:
            raise ValueError(f"the CPU decoder reads tokens on the CPU, but these are on {idx.device}: move them there")
        if not self.unchanged(True, False):
            self.refresh()
        kv_cache = self.empty_cache(len(idx))
        self.bound = BoundTuples(kv_cache)
        return idx, cache_pos, kv_cache

    def empty_cache(self, batch_size):
        """
        As the model's, in memory that the system has zeroed: it is not written here, and takes room only when it is.
        """
        c, of_none = self.model.config, self.model.empty_cache(0)
        shape = batch_size, c.n_kv_head, c.n_slots, c.head_dim
        return [type(layer)(*(torch.from_numpy(aligned(shape, np.float32)) for _ in range(2)), 0,
                            *(torch.full((batch_size,), c.n_sink, device='cpu') for _ in layer[3:]))
                for layer in of_none]

    def checked(self, idx, kv_cache):
        """Check the weights, the cache and the tokens for it, and bind the cache. Returns (idx, cache_pos)."""
        exclusive = self.exclusive.has_this_thread
        if not self.unchanged(False, exclusive):
            self.refresh()
        bound, cache_pos = self.bound, kv_cache[0][2]
        if bound is None or not bound.are(kv_cache, cache_pos, exclusive):
            checked = self.model.checked_input(idx, kv_cache)
            check_tuples(kv_cache)
            self.bound = BoundTuples(kv_cache)
            return checked
        if is_int64(idx, 2) and idx.size(0) == bound.batch_size and idx.size(1) and (
                type(cache_pos) is int and 0 <= cache_pos < 2**62
                or is_int64(cache_pos, 1) and cache_pos.size(0) == bound.batch_size):
            return idx, cache_pos  # the kernel itself refuses tokens and positions that are out of range
        return self.model.checked_input(idx, kv_cache)

    def run_tuples(self, bound, idx, cache_pos, logits):
        """One step on `BoundTuples`: idx (B, T) at cache_pos, an int or (B,)."""
        B, T = idx.shape
        idx, inputs, tables = idx.contiguous(), self.inputs_for(B * T), self.tables
        step, tables.step = tables.step, None  # an interrupt from here on leaves none
        if T == 1:
            inputs.positions[:B] = cache_pos
        else:
            first = np.asarray(cache_pos)[:, None] if torch.is_tensor(cache_pos) else cache_pos
            inputs.positions[:B * T].reshape(B, T)[:] = first + np.arange(T)
        if tables.kv is not bound.kv or step != (B, T):
            inputs.runs[:B], inputs.n_runs[:B] = [runs.address for runs in bound.runs], bound.runs[0].n if B else 0
            if B * T > self.chunk:
                self.run_rows(idx, np.arange(0, B * T + 1, T), np.arange(T - 1, B * T, T), bound.kv, logits)
                return
        self.run_rectangle(B, T, step, idx, bound.kv, logits)


class BoundTuples:
    """The tuples of a cache whose addresses the kernel has: `kv`, and the `runs` of each sequence."""

    def __init__(self, kv_cache):
        self.layers, self.kv = [tuple(layer[:2]) for layer in kv_cache], KVArrays.of_tuples(kv_cache)
        self.batch_size, H, self.n_slots, _ = kv_cache[0][0].shape
        self.firsts = [layer[3].numpy() for layer in kv_cache if len(layer) > 3]  # of `RollingKVCache`s
        self.held, self.first, self.size = None, None, H * self.n_slots  # held: `firsts` when the runs were made
        self.runs = [Runs([(0, b * self.size, self.n_slots)]) for b in range(self.batch_size)]

    def are(self, kv_cache, cache_pos, exclusive):
        """Are these the tuples that were bound, all at one cache_pos? Unless exclusive, also compares their memory."""
        if len(kv_cache) != len(self.layers):
            return False
        for layer, (k_cache, v_cache) in zip(kv_cache, self.layers):
            if layer[0] is not k_cache or layer[1] is not v_cache or layer[2] is not cache_pos:
                return False
        return exclusive or [t.data_ptr() for layer in self.layers for t in layer] == self.kv.pointers

    def make_room(self, kv_cache, cache_pos, T, config):
        """`layers.make_room`, where T more tokens do not fit or where the cache goes back; then the runs."""
        if not self.has_room(cache_pos, T, config.window, config.n_sink):
            make_room(kv_cache, cache_pos, T, config)
            self.hold(config.n_sink)

    def has_room(self, cache_pos, T, window, n_sink):
        """Do T more tokens of rolling caches fit behind the others, with the window before them still stored?"""
        as_bytes = self.firsts[0].tobytes()
        if as_bytes != self.held or any(first.tobytes() != as_bytes for first in self.firsts):
            return False
        if self.first is not None and type(cache_pos) is int:
            first, start = self.first, cache_pos
            return n_sink + start - first + T <= self.n_slots and first <= max(n_sink, start - window + 1) and (
                start > n_sink or first == n_sink)
        held, start = self.firsts[0], np.asarray(cache_pos)
        fits = (n_sink + start - held + T <= self.n_slots) & (held <= np.maximum(n_sink, start - window + 1))
        return bool((fits & ((start > n_sink) | (held == n_sink))).all())

    def hold(self, n_sink):
        """Make the runs of rolling caches anew: the position in slot n_sink has changed."""
        held, self.held = self.firsts[0], None
        for b, (runs, first) in enumerate(zip(self.runs, held.tolist())):
            base, sinks = b * self.size, [(0, b * self.size, n_sink)] if n_sink else []
            runs.set([*sinks, (first, base + n_sink, self.n_slots - n_sink)])
        self.first = int(held[0]) if len(held) and (held == held[0]).all() else None  # of all rows, if they are alike
        self.held = held.tobytes()


def check_tuples(kv_cache):
    """ValueError unless the kernel can read the tuples of a cache."""
    for k_cache, v_cache, *_ in kv_cache:
        contiguous = k_cache.is_contiguous() and v_cache.is_contiguous()
        if k_cache.dtype != torch.float32 or not (contiguous and k_cache.is_cpu):
            raise ValueError("the CPU decoder reads contiguous float32 caches on the CPU (autocast makes others), "
                             f"but this one is {k_cache.dtype} on {k_cache.device}, with strides "
                             f"{k_cache.stride()} and {v_cache.stride()}")


def is_int64(x, n_dims):
    """Is this an int64 tensor on the CPU with so many dimensions?"""
    return torch.is_tensor(x) and x.dtype is torch.int64 and x.dim() == n_dims and x.is_cpu
