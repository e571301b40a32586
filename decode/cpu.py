"""The executor for CPUs: the compiled step of kernel/ on the packed weights of a model."""
import time
from itertools import accumulate

import numpy as np
import torch

from decode.batch import NotNumbers, Refused, SequenceOutput
from decode.choice import StepChoice
from decode.kernel import layout
from decode.kernel.building import compile_beside
from decode.kernel.linears import PREFETCHING_ROWS
from decode.kernel.sampling import DRAW, PER_PEAK
from decode.kernel.screening import SCREEN
from decode.kernel.step import step, team_for, workers
from decode.kernel.threads import n_cores
from decode.tables import DrawTable, StepTables, check_layers
from decode.weights import CACHED, PREFETCHED, WEIGHTS, PackedWeights, check_model, kept_in, padded
from device import torch_on_one_thread

BYTES_A_THREAD = 2**22  # the first guess takes one more thread for each so many bytes of weights
CHUNK = 256             # rows that are computed at a time; from 128 to 512 the speed of a prefill hardly differs

BESIDE = '''
import torch
from decode.kernel.sampling import DRAW
from decode.kernel.step import ATTENTION_ON
DRAW.compiled, ATTENTION_ON[torch.float32].compiled
'''
OF_LOGITS = dict(dtype=torch.float32, device='cpu')  # torch's defaults may be others
choices = {}  # {(shape, weights, threads, fixed, size of the step, screened): StepChoice}, for all executors


class CPUExecutor:
    """
    A model's steps on the CPU.

    weights: 'float32', 'bfloat16', 'int8' or 'int4', the type in which they are read. They are packed into a copy of
        32, 16, 8.25 or 5 bits a weight, see `kept_in`; the model and its checkpoint stay as they are.
    threads: how many; by default up to torch's number, as many as a few timed steps show to be fastest, see `choice`.
    layers: the `kvcache.storage.Layer`s of the slots, which `hold` gives it. type_kv: of the keys and values that it
        computes.

    The weights are those of the moment when it was made, or of the last `refresh`. ValueError on a model that is not
    model.py's GPT in float32 or bfloat16 on the CPU.
    """
    type_kv, torch_on_one_thread = 'float32', staticmethod(torch_on_one_thread)

    def __init__(self, model, weights='float32', threads=None):
        if weights not in WEIGHTS:
            raise ValueError(f"weights must be {', '.join(WEIGHTS)}, not {weights!r}")
        most = n_cores()
        if threads is not None and not 1 <= threads <= most:
            raise ValueError(f"threads must be between 1 and the {most} cores of this process, not {threads}")
        check_model(model)
        c, self.model, self.weights, self.packed = model.config, model, weights, None
        self.n_threads, self.fixed = threads or min(torch.get_num_threads(), most), threads is not None
        self.most_threads = self.n_threads  # of the tables
        self.vocab_size, self.shape = c.vocab_size, shape_of(c)
        self.layers, self.draws = (), DrawTable(c.vocab_size, self.n_threads)
        compile_beside(DRAW, BESIDE)
        self.pack()

    @property
    def name(self):
        kept, up_to = self.packed.weights, '' if self.fixed or self.n_threads == 1 else 'up to '
        how = f" kept in {kept} without loss" if kept != self.weights else ''
        return (f"numba on the CPU, {self.weights} weights{how}, {up_to}{self.n_threads} "
                f"thread{'s' * (self.n_threads > 1)}")

    def refresh(self):
        """Pack the model's present weights."""
        check_model(self.model)
        c = self.model.config
        if shape_of(c) != self.shape:
            raise ValueError(f"the model's shape is {shape_of(c)}, and was {self.shape} when this executor was "
                             "made: make a new one")
        self.pack()

    def pack(self):
        """Pack the weights. ns_packing: nanoseconds that it took."""
        with workers.lock:
            self.tables, began, kept = None, time.perf_counter_ns(), kept_in(self.model, self.weights)
            if self.packed is None or self.packed.weights != kept:
                self.packed = PackedWeights(self.model, kept)
            self.packed.fill()
            self.ns_packing = time.perf_counter_ns() - began

    def hold(self, layers):
        """Let the steps read and write these `kvcache.storage.Layer`s. ValueError if they cannot."""
        check_layers(layers)
        self.layers, self.tables = layers, None
        team_for(self.packed.weights, layers[0].k.data.dtype, self.n_threads)
        DRAW.compiled  # noqa: B018 (it is compiled here)
        if self.packed.is_screened:
            SCREEN.compiled  # noqa: B018

    def execute_model(self, batch):
        """
        Compute the new tokens of a `Batch`, and draw the next ones. Returns a `SequenceOutput` for each sequence. As in
        vLLM.

        The bits of a row's logits do not depend on the other sequences, on how a prompt is divided into steps, on the
        slots or on the number of threads. `Refused` on tokens, positions and runs that do not fit the model, the slots
        or each other, before a key or a value of that step is written; `NotNumbers` if logits are broken.
        """
        with workers.lock:
            batch.make_copies(self.layers)
            if batch.decodes and len(batch.tokens) <= CHUNK:
                return self.several(batch)
            rows, parts = batch.rows()
            logits = self.logits_of(batch, batch.tokens, batch.positions, batch.counts, rows)
            return batch.result(logits, parts, lambda sequences, own: [
                token for token, in self.draws.draw(sequences, own.unsqueeze(1))])

    def several(self, batch):
        """
        `execute_model` for a batch that decodes: steps follow each other, as many as each sequence may make, until one
        of them draws a token that ends it, or the call is late.
        """
        S, V, most = len(batch.sequences), self.vocab_size, int(batch.n_steps.max())
        tokens, newest, going, done, ended = np.full((most, S), -1), batch.tokens, np.arange(S), 0, False
        kept = torch.empty(most, S, V, **OF_LOGITS) if any(batch.logprobs) else None
        while len(going) and not ended:
            n = int(batch.n_steps[going].min()) - done
            logits = torch.empty(n if kept is not None else 1, len(going), V, **OF_LOGITS)
            new, ended = self.steps(batch, going, newest, done, n, logits)
            tokens[done:done + len(new), going], newest = new, new[-1]
            if kept is not None:
                kept[done:done + len(new), going] = logits[:len(new)]
            done += len(new)
            stays = batch.n_steps[going] > done
            going, newest = going[stays], np.ascontiguousarray(newest[stays])
        found = [column[column >= 0].tolist() for column in tokens.T]
        return [SequenceOutput(of_s, kept[:len(of_s), i] if keep else None)
                for i, (of_s, keep) in enumerate(zip(found, batch.logprobs))]

    def steps(self, batch, going, newest, done, n, logits):
        """
        Make up to n steps of the sequences number `going` of a batch, after their newest tokens, until a sequence ends
        or the call is late. done: how many steps of the call were made already. logits: float32 (n, len(going),
        vocab_size), or (1, ...) for those of the last step only. Returns (tokens (n or fewer, len(going)), True if no
        other step follows).
        """
        sequences, R, made = [batch.sequences[i] for i in going], len(going), 0
        n_largest = self.n_largest(sequences, batch.logprobs)
        tables, tokens = self.tables_for(R, R), np.empty((n + 1, R), np.int64)
        tokens[0] = newest
        tables.describe(tokens.ctypes.data, batch.positions[going] + done, np.arange(R + 1), sequences, np.arange(R))
        tables.memory[layout.LOGITS] = logits.data_ptr()
        tables.sizes[layout.LOGITS_STEP] = 4 * R * self.vocab_size if len(logits) > 1 else 0
        tables.memory[layout.DRAW] = DRAW.address
        tables.memory[layout.DRAW_DATA] = self.draws.describe(sequences, done, batch.return_soon, batch.until)
        ended = False
        while made < n and not ended:
            n_threads, choice = self.prepare_call(R, is_screened=n_largest > 0)
            began = time.perf_counter_ns()
            # a call has one step if that step is a trial, which is timed alone, or comes after a pause and is not timed
            tables.ask_for(1 if choice and (choice.is_trial or choice.is_first(began)) else n - made, n_largest)
            refused = step(*tables.addresses, n_threads, workers.address)
            made += (n_drawn := int(tables.sizes[layout.N_DRAWN]))
            if made and tables.sizes[layout.NOT_NUMBERS]:  # these tokens count; the next call raises `NotNumbers`
                return tokens[1:made + 1], True
            self.after_call(refused, choice, began, n_drawn)
            if n_largest and not tables.sizes[layout.N_LARGEST]:  # the bounds exclude too few tokens
                self.packed.is_screened, n_largest = False, 0
            ended = bool(tables.sizes[layout.ENDED])
        return tokens[1:made + 1], ended

    def n_largest(self, sequences, logprobs):
        """How many of the largest logits the next step of these sequences computes; 0: all. See kernel/screening.py."""
        if not self.packed.is_screened or len(sequences) > layout.SCREENED_ROWS or any(logprobs):
            return 0
        n = max(s.settings.n_largest for s in sequences)
        return n if n <= self.vocab_size // PER_PEAK else 0

    def tables_for(self, n_rows, n_seq):
        """The tables, with room for so many rows and sequences."""
        t = self.tables
        if t is None or n_rows > t.n_rows or n_seq > t.n_seq:
            n_rows, n_seq = padded(n_rows, 8), padded(n_seq, 8)
            if t:
                n_rows, n_seq = max(n_rows, t.n_rows), max(n_seq, t.n_seq)
            self.tables = StepTables(self.packed, self.layers, n_rows, n_seq, min(n_rows, CHUNK), self.most_threads)
        return self.tables

    def logits_of(self, batch, tokens, positions, counts, wanted, way=None):
        """
        The logits of the rows `wanted`, float32 (W, vocab_size), of one step of a batch's sequences. counts: how many
        of the tokens each sequence brings. More than CHUNK rows are computed in several steps, after a check of all.
        way: of a `StepChoice`, by default what `choice` has found.
        """
        N, S, address = len(tokens), len(counts), tokens.ctypes.data
        logits = torch.empty(len(wanted), self.vocab_size, **OF_LOGITS)
        tables = self.tables_for(N, S)
        starts = np.fromiter(accumulate(counts, initial=0), np.int64, S + 1)
        tables.ask_for(0)
        if N > CHUNK:
            tables.describe(address, positions, starts, batch.sequences, ())
            self.refuse(step(*tables.addresses, 0, workers.address))
        for row in range(0, N, CHUNK):
            end = min(row + CHUNK, N)
            a, b = np.searchsorted(starts, row, 'right') - 1, np.searchsorted(starts, end)
            first, last = np.searchsorted(wanted, (row, end))
            tables.describe(address + 8 * row, positions[row:end], np.clip(starts[a:b + 1], row, end) - row,
                            batch.sequences[a:b], wanted[first:last] - row)
            tables.memory[layout.LOGITS] = logits.data_ptr() + 4 * self.vocab_size * int(first)
            n, choice = self.prepare_call(end - row, way)
            began = time.perf_counter_ns()
            # a prefill counts, though it follows a pause
            self.after_call(step(*tables.addresses, n, workers.address), choice, began, after_pause=True)
        return logits

    def prepare_call(self, n_rows, way=None, is_screened=False):
        """
        Prepare a call of the kernel: set how far ahead weights are prefetched, and make the threads ready. way: by
        default that of `choice`. Returns the number of threads, and the `StepChoice` that records the call's time, or
        None if `way` is given.
        """
        choice = None if way else self.choice(n_rows, is_screened)
        n_threads, ahead = way or choice.way
        self.packed.prefetch(ahead)
        return workers.ready(n_threads), choice

    def after_call(self, refused, choice, began, n_drawn=0, after_pause=False):
        """
        Record the time of a call of the kernel that began at `began`, in nanoseconds. n_drawn: the number of steps
        after which tokens were drawn. after_pause: does the time count after a pause too? `Refused` if the kernel
        refused the step, `NotNumbers` if its logits are not numbers.
        """
        workers.ended = time.perf_counter_ns()
        ns, ns_drawing = workers.ended - began, int(self.tables.sizes[layout.DRAW_NS])
        if self.tables.sizes[layout.NOT_NUMBERS]:
            raise NotNumbers
        self.refuse(refused)
        if choice is not None:
            choice.record(ns - ns_drawing, 0 if after_pause else began, max(1, n_drawn), ns_drawing)

    def refuse(self, why):
        """Raise `Refused` with a message if `why`, the reason that kernel/step.py has returned, is not 0."""
        if not why:
            return
        seq, position = map(int, self.tables.arrays[layout.REFUSED_AT])
        seq = f"sequence number {seq} of this step"
        if why == layout.BAD_TOKEN:
            raise Refused(f"token ids must be within the vocabulary of {self.vocab_size}, not {position}")
        if why == layout.BAD_POSITION:
            raise Refused(f"out of context: the new tokens of {seq} begin at position {position}, and must be at "
                          f"consecutive positions from 0 to below {self.packed.config.max_positions}")
        if why == layout.BAD_RUNS:
            raise Refused(f"the runs of {seq} must be in the order of positions and within {self.layers[0].n_slots} "
                          f"slots, and the run at position {position} is not")
        raise Refused(f"{seq} has no slot for position {position}, which its new tokens see")

    def choice(self, n_rows, is_screened=False):
        """The `StepChoice` for steps of about so many rows, shared by all executors of this shape."""
        key = self.shape, self.packed.weights, self.n_threads, self.fixed, n_rows.bit_length(), is_screened
        if key not in choices:
            # for 8 rows, reading the weights is half of the work
            n_bytes = self.packed.panels.nbytes * (1 + n_rows / 8)
            guess = self.n_threads if self.fixed else min(self.n_threads, 1 + int(n_bytes / BYTES_A_THREAD))
            others = {self.n_threads, *(2**i for i in range(self.n_threads.bit_length() * (not self.fixed)))} - {guess}
            is_prefetched = self.packed.panels.nbytes > CACHED and n_rows < PREFETCHING_ROWS
            choices[key] = StepChoice([(guess, 0), *[(self.n_threads, PREFETCHED)] * is_prefetched,
                                       *((n, 0) for n in sorted(others, reverse=True))])
        return choices[key]


def shape_of(config):
    """What the arrays of packed weights depend on."""
    c = config
    return c.n_layer, c.n_head, c.n_kv_head, c.head_dim, c.n_embd, c.n_inner, c.mlp, c.vocab_size
