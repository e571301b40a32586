"""
The decoder for CPUs: the compiled step of kernel/ on the packed weights of a model. `execute_model` is vLLM's call, for
any cache; `CPUDecoder.__call__` is one of its callers, for the model's tuples.

A few steps are timed to choose the number of threads.
"""
import time
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import torch

from decode.ahead import StepsAhead
from decode.changes import Watch
from decode.choice import ThreadChoice
from decode.kernel import layout
from decode.kernel.layout import LINEARS_PER_LAYER, LOGITS, TOKENS
from decode.kernel.step import PART_ON, check, step, team_for
from decode.kernel.threads import LINE, aligned, n_cores, one_torch_thread
from decode.process import after_fork, step_lock
from decode.static import with_length
from decode.tables import PackedModel, StepTables
from decode.tuples import BoundTuples
from decode.weights import WEIGHTS, PackedWeights, check_model, padded

BYTES_A_THREAD = 2**22  # that a step reads: the first guess of how many threads are faster than one
CHUNK = 256             # rows that are computed at a time; from 128 to 512 the speed of a prefill hardly differs

choices = {}  # {(shape, weights, most threads, size of the step): ThreadChoice}, for all decoders of that shape


class CPUDecoder:
    """
    A decoder, (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache), that runs on the CPU. It reads and
    writes the same tuples as a model in float32, in place, so the two can take turns on one cache at any step;
    kv_cache=None begins a cache, and cache_pos may be an integer tensor (B,).

    weights: 'float32', 'bfloat16', 'int8' or 'int4', the type in which they are read. They are packed into a copy of 4,
        2, 1 or 0.5625 bytes a weight (1 in lm_head); the model and its checkpoint stay as they are.
    threads: how many; by default up to torch's number, as many as a few timed steps show to be fastest, see `choice`.

    Several threads may use one decoder: their steps take turns. After a fork the child's decoder works too, with
    threads of its own. Weights that have changed are packed again at the start of a sequence, see `notice_changes`, and
    by `refresh`; `version` then grows.

    type_kv: of the keys and values that it computes.

    Raises ValueError on a model that is not model.py's GPT in float32 or bfloat16 on the CPU, and on caches and tokens
    that do not fit the model; then no cache has been written.
    """

    type_kv = 'float32'
    steps_ahead = StepsAhead  # for `generation.run`

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
        self.vocab_size, self.shape, self.choices, self.version = c.vocab_size, shape_of(c), {}, 0
        self.arrays = self.packed_weights.arrays() | {
            layout.BARRIER: aligned(LINE, np.int64),
            layout.CLAIMS: aligned((c.n_layer * LINEARS_PER_LAYER + 1, LINE), np.int64)}
        self.tables, self.watch = None, None  # watch: of the model when the weights were packed
        self.teams = {}     # {dtype of keys and values: their Workers}
        self.bound = None   # the `BoundTuples` of the last call
        self.refresh()
        self.team_for(torch.float32)

    def refresh(self):
        """Pack the weights. An interrupt leaves a decoder that packs them before its next step."""
        check_model(self.model)
        c = self.model.config
        if shape_of(c) != self.shape:
            raise ValueError(f"the model's shape is {shape_of(c)}, and was {self.shape} when this decoder was "
                             "made: make a new decoder")
        with step_lock:
            self.watch = None
            self.version += 1
            watch, packed = Watch(self.model), PackedModel(self.model)
            self.packed_weights.fill()
            self.tables = self.tables_of(packed, 8, 8)
            self.watch = watch

    def notice_changes(self):
        """
        `refresh` if the model or its settings have changed, see `changes.Watch`. Called at the start of a sequence.
        """
        if self.watch is None or self.model.config != self.tables.packed.config or not self.watch.unchanged():
            self.refresh()

    @staticmethod
    def reads(kv_caches):
        """Can `execute_model` read these `KVArrays`?"""
        return kv_caches.compiled

    def team_for(self, dtype):
        """The workers for keys and values of this dtype; see `kernel.step.team_for`."""
        with step_lock:
            self.teams[dtype] = team_for(self.weights, dtype, self.n_threads)
        return self.teams[dtype]

    @contextmanager
    def torch_on_one_thread(self):
        """
        For a loop of steps: inside, torch computes on one thread. Its other threads would spin for a while after each
        operation, on a core that the step needs.
        """
        one_torch_thread.enter()
        try:
            yield
        finally:
            one_torch_thread.leave()

    def execute_model(self, input_ids, input_positions, kv_caches, input_metadata, n_threads=None):
        """
        One step of the model for the new tokens of any sequences; the call is vLLM's.

        input_ids: int64 (N,), contiguous, on the CPU. input_positions: int64 array (N,). kv_caches: `KVArrays`, in
        which the keys and values of the new tokens are written. input_metadata: see `metadata.InputMetadata`. With
        next_tokens it may be several steps, see `metadata.NextTokens`; input_ids is then its row n_drawn. n_threads:
        how many compute, by default what `choice` has found.

        Returns the logits of the wanted rows, float32 (W, vocab_size), of the last step; kv_caches.finite says whether
        they are numbers. Their bits do not depend on the other sequences, on how a text is divided into steps, on the
        slots or on the number of threads. Raises ValueError, with nothing written, on tokens, positions and runs that
        do not fit the model, the arrays or each other.
        """
        check_inputs(self.model, input_ids, input_positions, kv_caches, input_metadata)
        if n_threads is not None and (type(n_threads) is not int or n_threads < 1):
            raise ValueError(f"n_threads must be at least 1, or None to let the decoder choose, not {n_threads!r}")
        wanted = input_metadata.runs if input_metadata.wanted is None else input_metadata.wanted
        logits = torch.empty(len(wanted), self.vocab_size, dtype=torch.float32, device='cpu')
        self.run(input_ids, input_positions, kv_caches, input_metadata, logits, n_threads)
        return logits

    def run(self, input_ids, input_positions, kv_caches, input_metadata, logits, n_threads=None):
        """
        `execute_model` without its checks. input_positions: also one int for all; input_ids: also (N, 1). logits: a
        tensor to write, contiguous.
        """
        m, N, S = input_metadata, len(input_ids), len(input_metadata.runs)
        with step_lock:
            if self.watch is None:
                self.refresh()
            tables = self.tables_for(N, S, kv_caches)
            before, tables.step, kv_caches.finite = tables.step, None, True
            tables.positions[:N] = input_positions
            if N != S or N > CHUNK or m.wanted is not None:
                self.run_rows(N, input_ids.data_ptr(), logits.data_ptr(), m, n_threads)
                return
            if before is not m:  # otherwise the last step was of the same sequences, with the same runs
                tables.runs[:N], tables.n_runs[:N] = [r.address for r in m.runs], [r.n for r in m.runs]
                tables.query_starts[:N + 1], tables.wanted[:N] = np.arange(N + 1), np.arange(N)
                tables.set_sizes(N, N, N)
            team, n_threads, choice = self.team_and_threads(N, n_threads)
            tables.memory[TOKENS], tables.memory[LOGITS] = input_ids.data_ptr(), logits.data_ptr()
            if m.next_tokens is not None:
                m.next_tokens.check(input_ids)
                tables.ask_for(m.next_tokens, 1 if choice and choice.is_trial else m.next_tokens.n_steps)
            began = time.perf_counter_ns()
            refused = step(*tables.addresses, n_threads, team.address)
            self.ended(refused, choice, began, began, m.next_tokens)
            tables.step = m if m.next_tokens is None else None

    def tables_for(self, n_rows, n_seq, kv_caches):
        """The tables, with room for so many rows and sequences, and with the addresses of these `KVArrays`."""
        tables = self.tables
        if n_rows > tables.n_rows or n_seq > tables.n_seq:
            tables = self.tables = self.tables_of(tables.packed, padded(n_rows, 8), padded(n_seq, 8))
        if tables.kv is not kv_caches:
            tables.bind(kv_caches)
        return tables

    def tables_of(self, packed, n_rows, n_seq):
        tables = StepTables(packed, self.arrays, n_rows, n_seq, min(n_rows, CHUNK), self.n_threads)
        tables.memory[layout.PART] = PART_ON[self.weights].address
        return tables

    def run_rows(self, N, tokens, logits, m, n_threads):
        """
        A step of any sequences; of more than CHUNK rows as several, which are checked before the first one is run.
        tokens, logits: the addresses of the ids and of the logits.
        """
        tables, S = self.tables, len(m.runs)
        starts = np.fromiter(accumulate(m.query_lens, initial=0), np.int64, S + 1)
        wanted = starts[1:] - 1 if m.wanted is None else m.wanted
        runs, n_runs = np.array([r.address for r in m.runs]), np.array([r.n for r in m.runs])
        if N > CHUNK:
            tables.query_starts[:S + 1], tables.runs[:S], tables.n_runs[:S] = starts, runs, n_runs
            tables.set_sizes(N, S, 0)
            tables.memory[TOKENS] = tokens
            if refused := check(*tables.addresses):
                self.refuse(refused)
        positions = tables.positions[:N].copy()
        for row in range(0, N, CHUNK):
            end = min(row + CHUNK, N)
            a, b = np.searchsorted(starts, row, 'right') - 1, np.searchsorted(starts, end)
            first, last = np.searchsorted(wanted, (row, end))
            tables.query_starts[:b - a + 1] = np.clip(starts[a:b + 1], row, end) - row
            tables.positions[:end - row] = positions[row:end]
            tables.runs[:b - a], tables.n_runs[:b - a] = runs[a:b], n_runs[a:b]
            tables.wanted[:last - first] = wanted[first:last] - row
            tables.set_sizes(end - row, b - a, last - first)
            tables.memory[TOKENS] = tokens + 8 * row
            tables.memory[LOGITS] = logits + 4 * self.vocab_size * int(first)
            team, n, choice = self.team_and_threads(end - row, n_threads)
            began = time.perf_counter_ns()
            refused = step(*tables.addresses, n, team.address)
            self.ended(refused, choice, began, 0)  # 0: a prefill always follows a pause

    def team_and_threads(self, n_rows, n_threads):
        """
        The workers of the next call of the kernel, how many threads it takes, and the `ThreadChoice` that says so.
        """
        dtype, choice = self.tables.kv.dtype, None
        self.tables.sizes[layout.N_STEPS] = self.tables.sizes[layout.NOT_NUMBERS] = 0
        team = self.teams.get(dtype) or self.team_for(dtype)
        if n_threads is None:
            n_threads = self.n_threads
            if not self.fixed and n_threads > 1:
                choice = self.choice(n_rows)
                n_threads = choice.n
        n_threads = min(n_threads, self.n_threads)
        return team, n_threads if n_threads <= team.n_ready else team.ready(n_threads), choice

    def ended(self, refused, choice, began, after_pause, next_tokens=None):
        """
        What follows a call of the kernel: ValueError if it was refused. began: in nanoseconds; after_pause: see
        `ThreadChoice.record`.
        """
        ns, n_steps, ns_drawing, tables = time.perf_counter_ns() - began, 1, 0, self.tables
        if next_tokens is not None and (n_drawn := tables.note_drawn(next_tokens)):
            # if a later step is refused, the next call reports it
            refused, n_steps, ns_drawing = 0, n_drawn, int(tables.sizes[layout.DRAW_NS])
        if tables.sizes[layout.NOT_NUMBERS]:
            tables.kv.finite = False
        if refused:
            self.refuse(refused)
        if choice is not None:
            choice.record(ns - ns_drawing, after_pause, n_steps, ns_drawing)

    def refuse(self, why):
        """Raise the ValueError for what kernel/step.py has found."""
        seq, position = map(int, self.tables.refused_at)
        seq = f"sequence number {seq} of this step"
        if why == layout.BAD_TOKEN:
            raise ValueError(f"token ids must be within the vocabulary of {self.vocab_size}, not {position}")
        if why == layout.BAD_POSITION:
            raise ValueError(f"out of context: the new tokens of {seq} begin at position {position}, and must be at "
                             f"consecutive positions from 0 to below {self.tables.packed.config.max_positions}")
        if why == layout.BAD_RUNS:
            raise ValueError(f"the runs of {seq} must be in the order of positions and within "
                             f"{self.tables.kv.n_slots} slots, and the run at position {position} is not")
        if why == layout.NO_SLOT:
            raise ValueError(f"{seq} has no slot for position {position}, which its new tokens see")
        if why == layout.WRITTEN_TWICE:
            raise ValueError(f"the slot for position {position} of {seq} is also that of another new token: give each "
                             "new token a slot of its own")
        raise ValueError(f"the slot of position {position} of {seq} is one that another sequence writes in this step: "
                         "give new tokens slots that no sequence reads")

    def choice(self, n_rows):
        """The `ThreadChoice` for steps of about so many rows, shared by all decoders of this shape."""
        size = n_rows.bit_length()
        if size in self.choices:
            return self.choices[size]
        key = self.shape, self.weights, self.n_threads, size
        if key not in choices:
            # for 8 rows, reading the weights is half of the work
            n_bytes = self.packed_weights.panels.nbytes * (1 + n_rows / 8)
            guess = min(self.n_threads, 1 + int(n_bytes / BYTES_A_THREAD))
            others = {self.n_threads, *(2**i for i in range(self.n_threads.bit_length()))} - {guess}
            choices[key] = ThreadChoice([guess, *sorted(others, reverse=True)])
        self.choices[size] = choices[key]
        return choices[key]

    def __call__(self, idx, kv_cache):
        config = self.model.config
        if kv_cache is None:
            idx, cache_pos = self.model.checked_input(idx, None)
            self.notice_changes()
            kv_cache = self.empty_cache(len(idx))
            bound = self.bound = BoundTuples(kv_cache, config)
        else:
            cache_pos, bound = kv_cache[0][2], self.bound
            if bound is None or not bound.are(kv_cache, cache_pos):
                idx, cache_pos = self.model.checked_input(idx, kv_cache)
                check_tuples(kv_cache)
                bound = self.bound = BoundTuples(kv_cache, config)
            elif not is_int64(idx, 2) or idx.shape[0] != bound.batch_size or not idx.numel() or not (
                    type(cache_pos) is int and 0 <= cache_pos < 2**62) or config.window and (
                    idx.shape[1] > config.window + 1):  # of several calls, all must fit before the first one writes
                idx, cache_pos = self.model.checked_input(idx, kv_cache)
            if type(cache_pos) is int and cache_pos == 0:
                self.notice_changes()
        (B, T), most = idx.shape, config.window + 1 if config.window else idx.size(1)
        if not idx.is_cpu:
            raise ValueError(f"the CPU decoder reads tokens on the CPU, but these are on {idx.device}: move them there")
        if T > most and bool((idx < 0).any() or (idx >= self.vocab_size).any()):
            raise ValueError(f"token ids must be within the vocabulary of {self.vocab_size}")
        logits = torch.empty(B, 1, self.vocab_size, dtype=torch.float32, device='cpu')
        if not B:
            return logits, with_length(kv_cache, cache_pos + T)
        first = np.array(cache_pos) if torch.is_tensor(cache_pos) else cache_pos
        for start in range(0, T, most):  # a ring of slots takes no more tokens at once
            part = idx if T <= most else idx[:, start:start + most]
            n, starts = part.size(1), first + start
            metadata = bound.metadata(starts, n, config)
            if n > 1:
                part, starts = part.reshape(-1), (np.full(B, starts)[:, None] + np.arange(n)).ravel()
            self.run(part.contiguous(), starts, bound.kv, metadata, logits)
        return logits, with_length(kv_cache, cache_pos + T)

    def empty_cache(self, batch_size):
        """
        As the model's, in memory that the system has zeroed: it is not written here, and takes room only when it is.
        """
        c, of_none = self.model.config, self.model.empty_cache(0)
        shape = batch_size, c.n_kv_head, c.n_slots, c.head_dim
        return [type(layer)(*(torch.from_numpy(aligned(shape, np.float32)) for _ in range(2)), 0) for layer in of_none]


@after_fork
def forget_choices():
    """Steps of the child are not those that the parent has timed, and a `ThreadChoice` may be in the middle of one."""
    choices.clear()


def check_tuples(kv_cache):
    """ValueError unless the kernel can read the tuples of a cache."""
    for k_cache, v_cache, _ in kv_cache:
        contiguous = k_cache.is_contiguous() and v_cache.is_contiguous()
        if k_cache.dtype != torch.float32 or not (contiguous and k_cache.is_cpu):
            raise ValueError("the CPU decoder reads contiguous float32 caches on the CPU (autocast makes others), "
                             f"but this one is {k_cache.dtype} on {k_cache.device}, with strides "
                             f"{k_cache.stride()} and {v_cache.stride()}")


def is_int64(x, n_dims):
    """Is this an int64 tensor on the CPU with so many dimensions?"""
    return torch.is_tensor(x) and x.dtype is torch.int64 and x.dim() == n_dims and x.is_cpu


def shape_of(config):
    """What the arrays of packed weights depend on."""
    c = config
    return c.n_layer, c.n_head, c.n_kv_head, c.head_dim, c.n_embd, c.n_inner, c.mlp, c.vocab_size


def check_inputs(model, input_ids, input_positions, kv_caches, m):
    """
    ValueError unless the arguments of `execute_model` are of N tokens. What is in them, the kernel checks.
    """
    N, counts = len(input_positions), m.query_lens
    if model.training:
        raise ValueError("the model is in training mode, and dropout would stay in the cache: call model.eval() first")
    if not (isinstance(input_ids, torch.Tensor) and input_ids.dtype is torch.int64 and input_ids.is_cpu
            and input_ids.dim() == 1 and len(input_ids) == N and input_ids.is_contiguous()):
        came = f"{tuple(input_ids.shape)} {input_ids.dtype}" if torch.is_tensor(input_ids) else repr(input_ids)
        raise ValueError(f"input_ids must be a contiguous int64 tensor ({N},) on the CPU, one for each position, not "
                         f"{came}")
    if not isinstance(input_positions, np.ndarray) or input_positions.dtype != np.int64 or input_positions.ndim != 1:
        raise ValueError(f"input_positions must be an int64 array of one dimension, not {input_positions!r}")
    if not N or min(counts) < 1 or sum(counts) != N or len(m.runs) != len(counts):
        raise ValueError(f"{len(counts)} sequences with {counts} new tokens, {N} positions and {len(m.runs)} tables of "
                         "runs: give each sequence at least one token and one table, and each token a position")
    if not kv_caches.compiled:
        raise ValueError(f"the compiled step does not read keys and values that are {kv_caches.dtype} on "
                         f"{kv_caches.tensors[0][0].device} or stored as these are: use decode.EagerDecoder(model)")
