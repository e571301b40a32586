"""
A decode step on the CPU, as fast as it goes: the model's weights packed for `kernel.py`, and the decoder that runs it.
"""
import ctypes
import hashlib
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numba
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from decode import kernel, threads, vectors
from decode.kernel import GROUP
from decode.vectors import LANES
from fingerprint import fingerprint

WEIGHTS = {'float32': np.float32, 'bfloat16': np.uint16, 'int8': np.int8}
padded = kernel.padded.py_func
BYTES_A_THREAD = 2**22  # to read: below, a second thread is not worth the waiting
PROBES = 8  # weights of each parameter that every step looks at
LARGEST_BATCH = 256  # up to here no batch was found at which PyTorch's matmuls are faster: see bench.py --mode=peers

# the threads of a step wait for each other, so they have to run side by side. TBB does not promise that
if numba.config.THREADING_LAYER == 'default':
    numba.config.THREADING_LAYER_PRIORITY = ['omp', 'workqueue', 'tbb']

sources = hashlib.sha256(b''.join(Path(m.__file__).read_bytes() for m in (kernel, threads, vectors))).hexdigest()
on_threads, alone = kernel.steps(sources)
try:
    on_threads.enable_caching()
    alone.enable_caching()
except RuntimeError:  # numba found no folder that it may write to
    print("the compiled decode step cannot be kept on disk, so each start compiles it again: "
          "NUMBA_CACHE_DIR can name a folder for it", file=sys.stderr)
one_step_at_a_time = threading.Lock()  # some of numba's thread pools end the process when two threads use them at once


def aligned(shape, dtype):
    """An array of zeros from a multiple of 64 bytes on: no vector lies across two cache lines, no two threads share one."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + size].view(dtype).reshape(shape)


def linears_of(model):
    """
    (weight (rows, K), bias (rows) or None) of every linear, in the order kernel.py goes through them.

    c_attn comes in two: the queries of all heads, then each head's keys and values, every head's rows
    padded to a multiple of LANES, so that a thread can take some heads and leave the others.
    """
    c = model.config
    head_dim = c.n_embd // c.n_head
    pad = padded(head_dim, LANES) - head_dim
    for block in model.transformer.h:
        weight, bias = block.attn.c_attn.weight, block.attn.c_attn.bias
        w = F.pad(weight.view(3, c.n_head, head_dim, c.n_embd), (0, 0, 0, pad))
        b = [None, None] if bias is None else F.pad(bias.view(3, c.n_head, head_dim), (0, pad)).tensor_split([1])
        yield w[0].flatten(0, 1), b[0] if bias is None else b[0].flatten()
        yield w[1:].transpose(0, 1).flatten(0, 2), b[1] if bias is None else b[1].transpose(0, 1).flatten()
        for linear in (block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            yield linear.weight, linear.bias
    yield model.lm_head.weight, None


def quantise(w):
    """
    int8 weights: w (rows, K) -> (whole (rows, K) in -127 ... 127 as float32, scale (rows)), w = whole * scale.

    Symmetric and rounded to the nearest, so no weight is off by more than half its row's scale, max|w| / 254.
    """
    scale = w.abs().amax(dim=1) / 127
    return (w / scale.where(scale != 0, 1)[:, None]).round().nan_to_num(), scale  # a row with a NaN has it in its scale


class PackedWeights:
    """
    A model's weights as kernel.py reads them; `fill` copies them, and again when they have changed.

    weights: float32, bfloat16 or int8, of all matrices; embeddings are read where they are, norms and biases stay
    float32. linears is 1-D, the panels of all linears in order; scale and bias have a float32 for each of their rows.
    """

    def __init__(self, model, weights):
        self.model, self.weights = model, weights
        with torch.no_grad():
            shapes = [(padded(len(w), LANES), padded(w.size(1), GROUP)) for w, _ in linears_of(model)]
        rows, size = sum(n for n, _ in shapes), sum(n * k for n, k in shapes)
        self.linears = aligned(size, WEIGHTS[weights])
        self.together = {'float32': 1, 'bfloat16': 2, 'int8': 4}[weights]  # inputs side by side in a panel
        self.scale, self.bias = aligned(rows, np.float32), aligned(rows, np.float32)
        self.start = aligned(size // GROUP if weights == 'int8' else 0, np.int16)
        self.eps = model.transformer.ln_f.eps
        self.norms = [norm for block in model.transformer.h for norm in (block.ln_1, block.ln_2)] + [model.transformer.ln_f]
        norms = (len(self.norms), padded(model.config.n_embd, GROUP))
        self.norm_weight, self.norm_bias = aligned(norms, np.float32), aligned(norms, np.float32)

    @torch.no_grad()
    def fill(self):
        linears = torch.from_numpy(self.linears if self.weights != 'bfloat16' else self.linears.view(np.int16))
        at = row = 0
        for w, bias in linears_of(self.model):
            n, K = padded(len(w), LANES), padded(w.size(1), GROUP)
            w = F.pad(w, (0, K - w.size(1), 0, n - len(w)))
            self.scale[row:row + n] = 1
            if bias is not None:
                self.bias[row:row + len(bias)] = bias
            if self.weights == 'int8':
                w, self.scale[row:row + n] = quantise(w)
                sums = w.view(n // LANES, LANES, K // GROUP, GROUP).sum(dim=-1).transpose(1, 2)
                self.start[at // GROUP:(at + n * K) // GROUP] = -sums.flatten()
            elif self.weights == 'bfloat16':
                w = w.bfloat16().view(torch.int16)
            panels = w.view(n // LANES, LANES, K // self.together, self.together).transpose(1, 2)
            linears[at:at + n * K].view(panels.shape).copy_(panels)
            at, row = at + n * K, row + n
        for i, norm in enumerate(self.norms):
            self.norm_weight[i, :len(norm.weight)] = norm.weight
            if norm.bias is not None:
                self.norm_bias[i, :len(norm.weight)] = norm.bias


def check_model(model):
    """ValueError unless the model is a plain GPT with float32 weights on the CPU: its weights are read here, its code is not run."""
    t = model.transformer
    linears = [module for block in t.h for module in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)]
    norms = [norm for block in t.h for norm in (block.ln_1, block.ln_2)] + [t.ln_f]
    for modules, kind in ((linears + [model.lm_head], nn.Linear), (norms, nn.LayerNorm), ([t.wte, t.wpe], nn.Embedding)):
        for module in modules:
            if type(module) is not kind:
                raise ValueError(f"the CPU decoder knows {kind.__name__} here, not {type(module).__name__}: use another decoder")
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise ValueError("the CPU decoder would pass by the model's hooks: use another decoder")
    for name, p in model.named_parameters():
        if p.dtype != torch.float32 or p.device.type != 'cpu' or not p.is_contiguous():
            raise ValueError(f"the CPU decoder reads contiguous float32 weights on the CPU, but {name} is {p.dtype} on {p.device}")


class CPUDecoder:
    """
    A decoder, (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache), that runs on the CPU.

    weights: 'float32', 'bfloat16' or 'int8', how they are read. They are packed into a copy of 4, 2 or 1 bytes a
        weight; the model and its checkpoint stay as they are.
    threads: how many; by default it goes by the work in a step, up to torch's number. Threads that wait for each other
        gain little on small steps, and lose much when another process takes one of their cores.

    It reads and writes the same tuples as the model, in place, and can take over from it or hand back at any step;
    kv_cache=None begins a cache, and cache_pos may be an int64 tensor (B,). Weights that have changed are packed anew
    before they are used. Each step looks at torch's version counters, at whether the parameters are still the same
    objects in the same place, and, since fused optimizers move no counter, at some weights of each; a step that begins a
    cache compares the bits of all, or of a large model of many. (So only a write past the counters, through `.data`, to a
    few weights, may go unseen; and inside `undisturbed` counters and objects are not looked at.)

    Raises ValueError on a model that is not a plain float32 GPT on the CPU, and on caches and tokens that do not fit it.
    """

    def __init__(self, model, weights='float32', threads=None):
        if weights not in WEIGHTS:
            raise ValueError(f"weights are {', '.join(WEIGHTS)}, not {weights!r}")
        most = numba.config.NUMBA_NUM_THREADS
        if threads is not None and not 1 <= threads <= most:
            raise ValueError(f"threads must be between 1 and {most} (NUMBA_NUM_THREADS sets the limit), not {threads}")
        check_model(model)
        c, self.model, self.packed = model.config, model, PackedWeights(model, weights)
        self.n_threads, self.by_work = threads or min(torch.get_num_threads(), most), threads is None
        self.meeting, self.claims = aligned(8, np.int64), aligned((3 * c.n_layer + 1, kernel.LINE), np.int64)
        if self.n_threads > 1 and not self.threads_meet():
            self.n_threads = 1  # waiting for each other, they would wait forever
        self.name = (f"numba on the CPU, {weights} weights, {'up to ' * (self.by_work and self.n_threads > 1)}"
                     f"{self.n_threads} thread{'s' * (self.n_threads > 1)}")

        head_dim = c.n_embd // c.n_head
        self.C_p, self.ff_p, self.q_p = padded(c.n_embd, GROUP), padded(4 * c.n_embd, GROUP), c.n_head * padded(head_dim, LANES)
        self.sizes = np.array([c.n_layer, c.n_head, head_dim, c.n_embd, c.block_size, c.vocab_size, 0, 1, 1, 0], np.int64)
        self.vocab_size = c.vocab_size
        self.cache_shape = (c.n_head, c.block_size, head_dim)
        self.caches, self.known = np.zeros(2 * c.n_layer, np.int64), [(None, None)] * c.n_layer
        self.n_rows, self.chunk = 0, max(8, 2**19 // (4 * self.ff_p) // 8 * 8)  # activations of a chunk of rows fit a core's cache
        self.probes = self.seen = np.zeros(0)
        self.watching = True
        self.make_room(8)
        self.refresh()
        self.compile()

    def threads_meet(self):
        met = np.zeros(self.n_threads, np.int64)
        self.on_threads(self.n_threads, kernel.meet, self.meeting.ctypes.data, met)
        self.meeting[:] = 0
        return met.all()

    def compile(self):
        """Compile the step, or load what an earlier start has compiled, with a step of no tokens."""
        notice = threading.Timer(1.5, print, ["compiling the decode step for this machine; the next start finds it on disk ..."],
                                 dict(file=sys.stderr, flush=True))
        notice.start()
        self.fed = None  # what the last step was fed
        self.sizes[6] = 0
        try:
            for n_threads in {1 if self.by_work else self.n_threads, self.n_threads}:
                self.threads_now = n_threads
                self.run()
        except OSError as e:  # compiled it is all the same
            print(f"the compiled decode step could not be kept on disk ({e})", file=sys.stderr)
        finally:
            notice.cancel()

    def refresh(self):
        """Pack the weights, and note what would show that they have changed."""
        check_model(self.model)
        self.sizes[4] = self.model.config.block_size  # which may have been cropped
        self.slots = [(module._parameters, name, p, p._version, p.data_ptr())
                      for module in self.model.modules() for name, p in module._parameters.items() if p is not None]
        self.contents, self.kept = fingerprint(self.model), [p.detach() for p in self.model.parameters()]  # so that probes stay memory
        probes = [p.data_ptr() + p.element_size() * i for p in self.model.parameters() for i in range(0, p.numel(), max(1, p.numel() // PROBES))]
        self.probes = np.array(probes, np.int64)
        self.seen = np.array([ctypes.c_int32.from_address(probe).value for probe in probes], np.int32)
        self.sizes[9] = len(probes)
        self.packed.fill()
        self.place()

    def make_room(self, n_rows):
        """Activations for n_rows rows: those that all threads share, and each thread's own."""
        if n_rows > self.n_rows:
            self.n_rows = n_rows = padded(n_rows, 8)
            self.cache_pos = np.zeros(n_rows, np.int64)
            self.shared = [aligned((n_rows, n), np.float32) for n in (self.C_p, self.q_p, 2 * self.q_p, self.C_p, self.ff_p)]
            self.own = [aligned(shape, dtype) for _ in range(self.n_threads) for shape, dtype in (
                ((n_rows, self.C_p), np.float32), (padded(self.cache_shape[1], LANES) + LANES, np.float32), ((8, LANES), np.float32),
                ((n_rows, self.ff_p), np.uint8), ((n_rows, self.ff_p // GROUP), np.float32))]
            self.place()

    def place(self):
        """Write down where everything is, from kernel.TOKENS to kernel.OWN."""
        p, t = self.packed, self.model.transformer
        arrays = [self.meeting, self.claims, self.cache_pos, self.caches, p.norm_weight, p.norm_bias, p.scale, p.bias, p.start,
                  *self.shared, self.probes, self.seen, *self.own]
        self.memory = np.array([0, 0, t.wte.weight.data_ptr(), t.wpe.weight.data_ptr(), *(a.ctypes.data for a in arrays)], np.int64)

    def __call__(self, idx, kv_cache):
        if kv_cache is None:
            if fingerprint(self.model) != self.contents:
                self.refresh()
            kv_cache = self.empty_cache(idx.size(0))
        elif self.watching:
            for parameters, name, known, version, at in self.slots:
                if parameters[name] is not known or known._version != version or known.data_ptr() != at:
                    self.refresh()
                    break
        cache_pos = kv_cache[0][2]
        for (k_cache, v_cache, pos), (known_k, known_v) in zip(kv_cache, self.known):
            if k_cache is not known_k or v_cache is not known_v or pos is not cache_pos:
                self.get_to_know(idx, kv_cache)
                break
        B, T = idx.shape
        if B != self.batch_size or len(kv_cache) != len(self.known) or T < 1 or idx.dtype is not torch.int64:
            raise ValueError(f"the cache has {len(kv_cache)} layers and a batch of {self.batch_size}, "
                             f"but the tokens are {tuple(idx.shape)}, {idx.dtype}")
        logits, chunk = torch.empty(B, 1, self.vocab_size), max(1, self.chunk // B)
        if T <= chunk:
            self.feed(idx, cache_pos, logits, True)
        else:
            self.model.check_input(idx, kv_cache)  # all of it, before the first chunk is written
            for start in range(0, T, chunk):
                self.feed(idx[:, start:start + chunk], cache_pos + start, logits, start + chunk >= T)
        after, kind = cache_pos + T, type(kv_cache[0])
        return logits, [tuple.__new__(kind, (k_cache, v_cache, after)) for k_cache, v_cache, _ in kv_cache]

    @contextmanager
    def undisturbed(self):
        """Inside, no code but ours runs between two steps of a cache: they are spared a look at each parameter, a tenth of a small step."""
        before, self.watching = self.watching, False
        try:
            yield
        finally:
            self.watching = before

    def empty_cache(self, batch_size):
        """As the model's. But the system's zeroed memory need not be filled with zeros, and takes room only where it is written."""
        kind, shape = type(self.model.empty_cache(0)[0]), (batch_size, self.cache_shape[0], self.model.config.block_size, self.cache_shape[2])
        return [kind(*(torch.from_numpy(aligned(shape, np.float32)) for _ in range(2)), 0) for _ in self.known]

    def run(self):
        step = self.packed.linears, self.memory, self.sizes, self.packed.eps
        return alone(1, *step) if self.threads_now == 1 else self.on_threads(self.threads_now, on_threads, *step)

    def on_threads(self, n_threads, function, *args):
        """function(n_threads, *args) with as many of numba's threads, whatever the number was and will be again."""
        with one_step_at_a_time:
            before = numba.get_num_threads()
            if before == n_threads:
                return function(n_threads, *args)
            numba.set_num_threads(n_threads)
            try:
                return function(n_threads, *args)
            finally:
                numba.set_num_threads(before)

    def get_to_know(self, idx, kv_cache):
        """Check a cache that the last step did not see, and note where it is."""
        self.model.check_input(idx, kv_cache)
        for k_cache, v_cache, _ in kv_cache:
            if k_cache.dtype != torch.float32 or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
                raise ValueError(f"the CPU decoder needs contiguous float32 caches, not {k_cache.dtype}: it does not go with autocast")
        self.batch_size, self.known = len(kv_cache[0][0]), [layer[:2] for layer in kv_cache]
        self.caches[:] = [cache.data_ptr() for layer in self.known for cache in layer]

    def feed(self, idx, cache_pos, logits, want_logits):
        B, T = idx.shape
        if B * T > self.n_rows:
            self.make_room(B * T)
        idx = idx.contiguous()
        self.cache_pos[:B] = cache_pos
        self.memory[0], self.memory[1] = idx.data_ptr(), logits.data_ptr()
        if self.fed != (B, T, want_logits):
            self.sizes[6:9] = self.fed = B, T, want_logits
            if self.by_work:  # reading the weights is half of the work for 8 rows
                work = self.packed.linears.nbytes * (1 + B * T / 8)
                self.threads_now = min(self.n_threads, 1 + int(work / BYTES_A_THREAD))
        refused = self.run()
        if refused == kernel.STALE:
            self.refresh()
            return self.feed(idx, cache_pos, logits, want_logits)
        if refused == kernel.BAD_TOKEN:
            raise ValueError(f"token ids must be within the vocabulary of {self.sizes[5]}")
        if refused == kernel.NO_ROOM:
            raise ValueError(f"out of context: cache_pos {cache_pos} + {T} new tokens > block_size {self.sizes[4]}")
