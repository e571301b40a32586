"""
The compiled step of kernel/ on the packed weights of a model: vLLM's `execute_model`, on the CPU.

The weights are packed again when they have changed, and a few steps are timed to choose the number of threads.
"""
import time
import weakref
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import torch

from decode.choice import ThreadChoice
from decode.exclusive_use import ExclusiveThreads
from decode.forks import after_fork
from decode.kernel import layout
from decode.kernel.layout import LINEARS_PER_LAYER, LOGITS, TOKENS
from decode.kernel.step import check, step, team_for
from decode.kernel.threads import LINE, aligned, n_cores, one_torch_thread, step_lock
from decode.tables import Activations, PackedModel, StepInputs, StepTables, settings_of
from decode.weights import WEIGHTS, PackedWeights, check_model, padded

BYTES_A_THREAD = 2**22  # that a step reads: the first guess of how many threads are faster than one

executors = weakref.WeakSet()
choices = {}  # {(shape, weights, most threads, size of the step): ThreadChoice}, for all decoders of that shape


class Executor:
    """
    Runs steps of a model on the CPU. `decode.cpu.CPUDecoder` is one that also takes the model's tuples.

    weights: 'float32', 'bfloat16' or 'int8', the type in which they are read. They are packed into a copy of 4, 2 or 1
        bytes a weight; the model and its checkpoint stay as they are.
    threads: how many; by default up to torch's number, as many as a few timed steps show to be fastest, see `choice`.

    Several threads may use one executor: their steps take turns. After a fork the child's executor works too, with
    threads of its own. An interrupt at any moment leaves an executor that works.

    Weights that have changed are packed again before they are used, see `notice_changes`; `version` then grows.

    Raises ValueError on a model that is not model.py's GPT in float32 on the CPU.
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
        self.vocab_size, self.shape, self.choices, self.version = c.vocab_size, shape_of(c), {}, 0
        self.chunk = 256  # rows that are computed at a time; from 128 to 512 the speed of a prefill hardly differs
        n_linears = c.n_layer * LINEARS_PER_LAYER + 1
        self.arrays = self.packed_weights.arrays() | {
            layout.BARRIER: aligned(LINE, np.int64), layout.CLAIMS: aligned((n_linears, LINE), np.int64)}
        executors.add(self)
        self.packed = self.tables = None  # what the weights were packed of; None: to be packed before the next step
        self.exclusive, self.teams = ExclusiveThreads(), {}  # teams: {dtype of keys and values: their Workers}
        with step_lock.lock:
            self.refresh()
            self.team_for(torch.float32)

    def refresh(self):
        """Pack the weights. If it is interrupted `packed` is None, and the next step packs them again."""
        check_model(self.model)
        c = self.model.config
        if shape_of(c) != self.shape:
            raise ValueError("the model has (n_layer, n_head, n_kv_head, n_embd, vocab_size) "
                             f"{shape_of(c)}, and had {self.shape} when this decoder was made: make a new decoder")
        self.packed = None
        self.version += 1
        packed = PackedModel(self.model)
        self.packed_weights.fill()
        reuse = self.tables and self.tables.packed.settings == packed.settings
        inputs = self.tables.inputs if reuse else StepInputs(c, 8)
        activations = self.tables.activations if reuse else Activations(c, 8, self.n_threads)
        self.tables = StepTables(packed, inputs, activations, self.arrays)
        self.packed = packed

    def team_for(self, dtype):
        """The workers for keys and values of this dtype; see `step.team_for`."""
        self.teams[dtype] = team_for(self.weights, dtype, self.n_threads)
        return self.teams[dtype]

    def notice_changes(self, thorough=False):
        """
        Pack the weights again if the model was seen to have changed. Compares modules, hooks and torch's version
        counters (see `fingerprint.Watch`); thorough: also a hash of every byte, or of samples if the model is large.
        Each step compares some values of each parameter in any case.
        """
        with step_lock.lock:
            if not self.unchanged(thorough, False):
                self.refresh()

    def unchanged(self, thorough, exclusive):
        """Are the packed weights those of the model? exclusive: look at its settings only."""
        packed = self.packed
        if packed is None or settings_of(self.model.config) != packed.settings:
            return False
        return exclusive or (packed.watch.identical() if thorough else packed.watch.same_objects())

    @contextmanager
    def exclusive_use(self):
        """
        For a loop in which no other code runs between the steps of a cache. Inside, this thread's steps do not compare
        modules, hooks and version counters, which takes a tenth of a small step; they do notice weights whose probed
        values have changed. And torch computes on one thread: its other threads would spin for a while after each
        operation, on a core that the step needs.
        """
        one_torch_thread.enter()
        try:
            with self.exclusive.entered():
                yield
        finally:
            one_torch_thread.leave()

    def execute_model(self, input_ids, input_positions, kv_caches, input_metadata, n_threads=None):
        """
        One step of the model for the new tokens of any sequences; the call is vLLM's.

        input_ids: int64 (N,), contiguous, on the CPU. input_positions: int64 (N,). kv_caches: `KVArrays`, in which the
        keys and values of the new tokens are written. input_metadata: see `metadata.InputMetadata`. With next_tokens it
        may be several steps, see `metadata.NextTokens`; input_ids is then its row n_drawn. n_threads: how many compute,
        by default what `choice` has found.

        Returns the logits of the wanted rows, float32 (W, vocab_size), of the last step; kv_caches.finite says whether
        they are numbers. Their bits do not depend on the other sequences, on how a text is divided into steps, on the
        slots or on the number of threads. Raises ValueError, with nothing written, on tokens, positions and runs that
        do not fit the model, the arrays or each other.
        """
        m = input_metadata
        with step_lock.lock:
            exclusive = self.exclusive.has_this_thread
            if not self.unchanged(False, exclusive):
                self.refresh()
            if not exclusive:
                kv_caches.find()
            S, N = len(m.runs), sum(m.query_lens)
            check_inputs(input_ids, input_positions, N, m, n_threads)
            W = S if m.wanted is None else len(m.wanted)
            logits = torch.empty(W, self.vocab_size, dtype=torch.float32, device='cpu')
            inputs, tables = self.inputs_for(N), self.tables
            before, tables.step, kv_caches.finite = tables.step, None, True
            inputs.positions[:N] = input_positions
            inputs.runs[:S], inputs.n_runs[:S] = [r.address for r in m.runs], [r.n for r in m.runs]
            if N == S <= self.chunk and m.wanted is None:  # one token each
                if m.next_tokens is not None:
                    m.next_tokens.check(input_ids)
                self.run_rectangle(N, 1, before, input_ids, kv_caches, logits, n_threads, m.next_tokens)
            else:
                starts = np.fromiter(accumulate(m.query_lens, initial=0), np.int64, S + 1)
                wanted = starts[1:] - 1 if m.wanted is None else m.wanted
                self.run_rows(input_ids, starts, wanted, kv_caches, logits, n_threads)
        return logits

    def run_rectangle(self, B, T, before, idx, kv, logits, n_threads=None, next_tokens=None):
        """
        One step of B sequences with T tokens each. `inputs` has positions, runs and n_runs. before: the attribute
        `step` of the tables, after the last step.
        """
        tables, N = self.tables, B * T
        if before != (B, T) or tables.kv is not kv:
            tables.inputs.query_starts[:B + 1] = np.arange(0, N + 1, T)
            tables.inputs.wanted[:B] = np.arange(T - 1, N, T)
            self.set_sizes(N, B, B, kv)
        tables.step = B, T
        if next_tokens is not None and next_tokens.version != self.version:
            next_tokens = None
        self.run_step(N, B, B, idx.data_ptr(), logits.data_ptr(), kv, n_threads, next_tokens)

    def inputs_for(self, n_rows):
        """The `StepInputs` of the tables, with room for so many rows."""
        tables = self.tables
        if n_rows > tables.inputs.n_rows:
            inputs = StepInputs(self.model.config, padded(n_rows, 8))
            self.tables = StepTables(tables.packed, inputs, tables.activations, self.arrays)
        return self.tables.inputs

    def run_rows(self, idx, starts, wanted, kv, logits, n_threads=None):
        """
        One step, or for more rows than `chunk` several, which are checked before the first one is run. `inputs` has
        positions, runs and n_runs already. starts (S + 1,), wanted (W,): see layout.py. idx: int64 (N,).
        """
        inputs, N, S = self.tables.inputs, int(starts[-1]), len(starts) - 1
        self.tables.step = None
        inputs.query_starts[:S + 1], inputs.wanted[:len(wanted)] = starts, wanted
        if N <= self.chunk:
            self.run_step(N, S, len(wanted), idx.data_ptr(), logits.data_ptr(), kv, n_threads)
            return
        self.set_sizes(N, S, 0, kv)
        self.tables.memory[TOKENS] = idx.data_ptr()
        refused = check(*self.tables.addresses)
        if refused:
            self.refuse(refused)
        positions, runs, n_runs = inputs.positions[:N].copy(), inputs.runs[:S].copy(), inputs.n_runs[:S].copy()
        for row in range(0, N, self.chunk):
            end = min(row + self.chunk, N)
            a, b = np.searchsorted(starts, row, 'right') - 1, np.searchsorted(starts, end)
            first, last = np.searchsorted(wanted, (row, end))
            inputs = self.tables.inputs
            inputs.query_starts[:b - a + 1] = np.clip(starts[a:b + 1], row, end) - row
            inputs.positions[:end - row] = positions[row:end]
            inputs.runs[:b - a], inputs.n_runs[:b - a] = runs[a:b], n_runs[a:b]
            inputs.wanted[:last - first] = wanted[first:last] - row
            self.run_step(end - row, b - a, last - first, idx.data_ptr() + 8 * row,
                          logits.data_ptr() + 4 * self.vocab_size * int(first), kv, n_threads)

    def set_sizes(self, n_rows, n_seq, n_wanted, kv):
        """Write the sizes of a step to the tables, and where its keys and values are."""
        tables = self.tables
        if tables.kv is not kv:
            tables.bind(kv)
        sizes = tables.sizes
        sizes[layout.N_ROWS], sizes[layout.N_SEQ], sizes[layout.N_WANTED] = n_rows, n_seq, n_wanted

    def run_step(self, n_rows, n_seq, n_wanted, tokens, logits, kv, n_threads=None, next_tokens=None):
        """One step of the kernel on what `inputs` has, or several, see `NextTokens`. tokens, logits: addresses."""
        if n_rows > self.tables.activations.n_rows:
            activations = Activations(self.model.config, padded(n_rows, 8), self.n_threads)
            self.tables = StepTables(self.packed, self.tables.inputs, activations, self.arrays)
        tables = self.tables
        if tables.kv is not kv or tables.step is None:
            self.set_sizes(n_rows, n_seq, n_wanted, kv)
        tables.memory[TOKENS], tables.memory[LOGITS] = tokens, logits
        tables.sizes[layout.N_STEPS] = tables.sizes[layout.NOT_NUMBERS] = 0
        team, choice = self.teams.get(kv.dtype) or self.team_for(kv.dtype), None
        if n_threads is None:
            n_threads = self.n_threads
            if not self.fixed and n_threads > 1:
                choice = self.choices.get(n_rows.bit_length()) or self.choice(n_rows)
                n_threads = choice.n
        n_threads = min(n_threads, self.n_threads)
        if n_threads > team.n_ready:
            n_threads = team.ready(n_threads)
        if next_tokens is not None:
            tables.ask_for(next_tokens, 1 if choice is not None and choice.is_trial else next_tokens.n_steps)
        began, n_steps, drawing = time.perf_counter_ns(), 1, 0
        refused = step(*team.like, *tables.addresses, n_threads, team.address, 0, 0)
        ns = time.perf_counter_ns() - began
        if next_tokens is not None and (n_drawn := tables.note_drawn(next_tokens)):
            # if a later step is refused, the next call reports it
            refused, n_steps, drawing = 0, n_drawn, int(tables.sizes[layout.DRAW_NS])
        if tables.sizes[layout.NOT_NUMBERS]:
            kv.finite = False
        if choice is not None and not refused:
            # a prefill always follows a pause
            choice.record(ns - drawing, began if n_rows == n_seq else 0, n_steps, drawing)
        if refused:
            self.refuse(refused)

    def refuse(self, why):
        """Raise the ValueError for what kernel/step.py has found."""
        seq, position = map(int, self.tables.inputs.refused_at)
        seq = f"sequence number {seq} of this step"
        if why == layout.BAD_TOKEN:
            raise ValueError(f"token ids must be within the vocabulary of {self.vocab_size}, not {position}")
        if why == layout.BAD_POSITION:
            raise ValueError(f"out of context: the new tokens of {seq} begin at position {position}, and must be at "
                             f"consecutive positions from 0 to below {self.packed.max_positions}")
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
        key = self.shape, self.weights, self.n_threads, size
        if key not in choices:
            # for 8 rows, reading the weights is half of the work
            n_bytes = self.packed_weights.panels.nbytes * (1 + n_rows / 8)
            guess = min(self.n_threads, 1 + int(n_bytes / BYTES_A_THREAD))
            others = {self.n_threads, *(2**i for i in range(self.n_threads.bit_length()))} - {guess}
            choices[key] = ThreadChoice([guess, *sorted(others, reverse=True)])
        self.choices[size] = choices[key]
        return choices[key]


@after_fork
def forget_last_steps():
    """The parent may have forked while another of its threads wrote the inputs of a step."""
    for executor in executors:
        if executor.tables:
            executor.tables.step = None


def shape_of(config):
    """What the arrays of packed weights depend on."""
    return config.n_layer, config.n_head, config.n_kv_head, config.n_embd, config.vocab_size


def check_inputs(input_ids, input_positions, N, m, n_threads):
    """
    ValueError unless the arguments of `execute_model` are of N tokens. What is in them, the kernel checks.
    """
    if not (torch.is_tensor(input_ids) and input_ids.dtype is torch.int64 and input_ids.is_cpu
            and input_ids.is_contiguous() and input_ids.shape == (N,)):
        came = f"{tuple(input_ids.shape)} {input_ids.dtype}" if torch.is_tensor(input_ids) else repr(input_ids)
        raise ValueError(f"input_ids must be a contiguous int64 tensor ({N},) on the CPU, as many as query_lens says, "
                         f"not {came}")
    if n_threads is not None and (type(n_threads) is not int or n_threads < 1):
        raise ValueError(f"n_threads must be at least 1, or None to let the decoder choose, not {n_threads!r}")
    for name, array in (('input_positions', input_positions), ('wanted', m.wanted)):
        if array is not None and not (isinstance(array, np.ndarray) and array.dtype == np.int64 and array.ndim == 1):
            raise ValueError(f"{name} must be an int64 array of one dimension, not {array!r}")
    if not N or min(m.query_lens) < 1 or len(input_positions) != N or len(m.runs) != len(m.query_lens):
        raise ValueError(f"{len(m.query_lens)} sequences with {m.query_lens} new tokens, {len(input_positions)} "
                         f"positions and {len(m.runs)} tables of runs: give each sequence at least one token and one "
                         "table, and each token a position")
    wanted = m.wanted
    if wanted is not None and len(wanted) and not (
            0 <= wanted[0] and wanted[-1] < N and (np.diff(wanted) > 0).all()):
        raise ValueError(f"wanted must be row numbers from 0 to {N - 1} in ascending order, not {list(wanted)}: "
                         "sort them, and name each row once")
