"""
The decoder for GPUs: the step of step.py, recorded as CUDA graphs. `execute_model` is vLLM's call, for any cache;
`GPUDecoder.__call__` is one of its callers, for the model's tuples.

A graph is recorded for each number of rows in BUCKETS. A step of other numbers is padded with rows that write nothing,
one of more rows is several.
"""
import math
from collections import deque
from itertools import accumulate

import numpy as np
import torch

from decode.changes import Watch
from decode.eager import check_step
from decode.gpu.columns import Columns
from decode.gpu.draws import N_LANDINGS, DrawTable, fits
from decode.gpu.inputs import MOST_STEPS, StepInputs
from decode.gpu.queue import Direct, Queue
from decode.gpu.slots import AHEAD, SlotTable
from decode.gpu.step import Step
from decode.gpu.weights import GPUWeights
from decode.process import step_lock
from decode.static import with_length
from decode.tuples import BoundTuples

BUCKETS = 1, 2, 4, 8, 16, 32, 64, 128, 256  # numbers of rows of a graph
AT_ONCE = 4     # steps that are launched before the host looks at what an earlier group of as many has drawn
STORED = torch.float32, torch.bfloat16, torch.float16, torch.int8  # types of keys and values

# from the model's own logits, in their standard deviations, for a few tokens. That of a model of 30 layers and 49,152
# tokens, whose residual stream is rounded to bfloat16, was 0.26; wrong kernels are off by 3
LARGEST_DIFFERENCE = {torch.float32: 0.02, torch.float16: 0.15, torch.bfloat16: 1.0}


class GPUDecoder:
    """
    A decoder, (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache), that runs on a GPU; and by
    `execute_model` the same step on any cache whose keys and values are on it.

    weights: 'float32' leaves them in the model's dtype, where they are; 'int8' copies them, rounded to int8 with a
        scale a row. functions: the module of the kernels, or `plain`. queue: see queue.py.

    The bits of a row's logits depend neither on the other rows of a step nor on how its text is divided into steps, if
    the functions are the kernels. Changed values of weights are seen at once, but those of int8 at the start of a
    sequence, or after `refresh`; `version` then grows.

    Raises ValueError on a model that is not model.py's GPT on one device, in one dtype of three.
    """
    most_sequences = BUCKETS[-1]  # of a call of several steps
    ends_rows = True  # in a call of several steps the sequences may end one by one, see `metadata.NextTokens`

    def __init__(self, model, weights='float32', functions=None, queue=None):
        if weights not in ('float32', 'int8'):
            raise ValueError(f"on a GPU weights are int8 or in the dtype of the model, not {weights!r}: convert the "
                             "model with model.to(...)")
        device = model.lm_head.weight.device
        self.model, self.weights, self.functions, self.version = model, weights, functions or kernels(), 0
        self.queue = queue or (Queue(device) if device.type == 'cuda' else Direct())
        self.vocab_size = model.config.vocab_size
        self.bound = self.step = None  # the `BoundTuples` of the last call, and the `Step` of the last `KVArrays`
        self.refresh()
        self.type_kv = str(self.packed.dtype).removeprefix('torch.')
        self.name = f"Triton on {self.device.type}, {'int8' if weights == 'int8' else self.type_kv} weights"
        if functions is None:
            self.compare()

    def compare(self):
        """
        ValueError unless the kernels, as they are compiled for this device, compute what the model computes, for a few
        tokens. They are compiled here.
        """
        idx = torch.arange(3, device=self.device)[None] % self.vocab_size
        idx = idx[:, -self.model.config.block_size:]
        training = [module for module in self.model.modules() if module.training]
        try:
            for module in training:
                module.training = False
            with torch.inference_mode(), torch.cuda.device_of(idx):
                logits, expected = self(idx, None)[0].float(), self.model(idx, use_cache=False)[0].float()
                self.graph('draw', 1)
                off = float((logits - expected).abs().max() / expected.std())
        except ValueError:
            raise
        except Exception as e:  # of a compiler, or of a device that a kernel does not fit
            raise ValueError(f"the Triton kernels do not run here: {type(e).__name__}: {str(e)[:200]}") from e
        finally:
            for module in training:
                module.training = True
            self.bound = None  # its cache would take memory
            self.forget()
        if not off <= LARGEST_DIFFERENCE[self.packed.dtype] + (self.weights == 'int8'):
            raise ValueError(f"the logits of the Triton kernels differ from the model's by {off:.2g} of their standard "
                             "deviation on this device: please report it, with the versions of torch and triton")

    def refresh(self):
        """Look up the weights anew, round them if they are int8, and forget all graphs."""
        with step_lock:
            self.version += 1
            watch, packed, n = Watch(self.model), GPUWeights(self.model, self.weights), BUCKETS[-1]
            c, device = packed.config, packed.wte.device
            slots = SlotTable(Columns.of(c, max(n, AHEAD)), c, n, device)
            tokens, positions, sequences = torch.zeros(3, n, dtype=torch.int64, device=device)
            inputs = StepInputs(tokens, positions, sequences.int(), slots.table)
            draws = DrawTable(n, c.vocab_size, device, self.queue)
            # all together, so that none of them is of another model if there is no memory for the next one
            self.watch, self.packed, self.device, self.slots, self.inputs, self.draws = (
                watch, packed, device, slots, inputs, draws)
            self.forget()

    def forget(self):
        """Forget the graphs, once none of them runs, all together: they share memory of the libraries they call."""
        if self.device.type == 'cuda':
            torch.cuda.synchronize(self.device)
        self.step, self.graphs = None, {}
        self.queue.forget()

    def notice_changes(self):
        """`refresh` if the model or its settings have changed, see `changes.Watch`. Called when a sequence begins."""
        unchanged = self.watch.unchanged() if self.weights == 'int8' else self.watch.same_memory()
        if not unchanged or self.model.config != self.packed.config:
            self.refresh()
        elif not self.watch.unchanged():  # the weights were read where they are; keys of old ones were not
            self.version += 1
            self.watch = Watch(self.model)

    def reads(self, kv_caches):
        """Can `execute_model` read these `KVArrays`?"""
        of_layer = kv_caches.tensors[0]
        return (all(t.device == self.device and t.is_contiguous() for t in of_layer) and of_layer[0].dtype in STORED
                and of_layer[0].dtype == of_layer[1].dtype
                and kv_caches.slot_stride % kv_caches.shape[2] == kv_caches.head_stride % kv_caches.shape[2] == 0)

    def execute_model(self, input_ids, input_positions, kv_caches, input_metadata):
        """
        One step of the model for the new tokens of any sequences; the call is vLLM's.

        input_ids: int64 (N,), on the model's device. input_positions: an int64 array (N,). kv_caches: `KVArrays`, in
        which the keys and values of the new tokens are written. input_metadata: see `metadata.InputMetadata`. With
        next_tokens it is several steps, see `metadata.NextTokens`, unless a sample has more stop tokens or biases than
        a draw on the device takes: then it is one step, and nothing is drawn.

        Returns the logits of the wanted rows, float32 (W, vocab_size); kv_caches.finite says whether they are numbers.
        Of several steps they are those of the last one as the draws have changed them, in memory that the next call
        writes, and nothing for sequences that ended before. Raises ValueError on tokens, positions and runs that do not
        fit the model.
        """
        m, new = input_metadata, input_metadata.next_tokens
        # reading tokens on the device would wait for it
        ids = input_ids if new is None or not new.n_left else torch.from_numpy(new.tokens[new.n_drawn])
        check_step(self.model, ids, input_positions, m)
        if not self.reads(kv_caches):
            raise ValueError(f"the GPU decoder reads contiguous keys and values on {self.device} in float32, bfloat16, "
                             f"float16 or int8, and these are {kv_caches.dtype} on {kv_caches.tensors[0][0].device}: "
                             "use decode.EagerDecoder(model)")
        with step_lock, torch.inference_mode(), torch.cuda.device_of(self.inputs.tokens):
            self.bind(kv_caches)
            kv_caches.finite = True
            if new is not None and fits(new, BUCKETS[-1]):
                return self.several(input_positions, kv_caches, m)
            logits = self.rows(input_ids, input_positions, m)
            kv_caches.finite = math.isfinite(logits.sum())
            return logits

    def __call__(self, idx, kv_cache):
        model, config = self.model, self.model.config
        if kv_cache is None:
            idx, _ = model.checked_input(idx, None)
            self.notice_changes()
            kv_cache = model.empty_cache(len(idx))
        elif type(kv_cache[0][2]) is int and kv_cache[0][2] == 0:
            self.notice_changes()
        cache_pos, bound = kv_cache[0][2], self.bound
        if bound is None or not bound.are(kv_cache, cache_pos) or type(cache_pos) is not int or idx.dim() != 2 or (
                idx.dtype is not torch.int64 or len(idx) != bound.batch_size or idx.size(1) != 1
                or not 0 <= cache_pos < config.max_positions):
            idx, cache_pos = model.checked_input(idx, kv_cache)
            if bound is None or not bound.are(kv_cache, kv_cache[0][2]):
                bound = self.bound = BoundTuples(kv_cache, config)
            if not self.reads(bound.kv):
                raise ValueError(f"the GPU decoder reads contiguous caches on {self.device}, and this one is "
                                 f"{bound.kv.dtype} on {kv_cache[0][0].device}: begin one with kv_cache=None")
        if model.training:
            raise ValueError("the model is in training mode: call model.eval() before this decoder is used")
        (B, T), most = idx.shape, config.window + 1 if config.window else idx.size(1)
        logits = torch.zeros(B, self.vocab_size, device=self.device)
        first = cache_pos.cpu().numpy() if torch.is_tensor(cache_pos) else np.full(B, cache_pos)
        with step_lock, torch.inference_mode(), torch.cuda.device_of(self.inputs.tokens):
            self.bind(bound.kv)
            for start in range(0, T if B else 0, most):  # a ring of slots takes no more tokens at once
                part, starts = idx[:, start:start + most], first + start
                metadata = bound.metadata(starts, part.size(1), config)
                positions = (starts[:, None] + np.arange(part.size(1))).ravel()
                logits = self.rows(part.flatten(), positions, metadata)
        return logits[:, None].to(self.packed.dtype), with_length(kv_cache, cache_pos + T)

    def bind(self, kv_caches):
        """Have the steps read and write these `KVArrays`. The graphs of others are forgotten."""
        if self.step is None or self.step.kv_caches is not kv_caches:
            self.forget()
            self.step = Step(self.functions, self.packed, self.slots.columns, kv_caches, BUCKETS[-1])

    def graph(self, kind, R):
        """
        The graph of a function of R rows: 'layers', 'head', 'step', which is both, or 'draw', which draws the next
        tokens too. It may have to be recorded, so it is asked for before the inputs are loaded.
        """
        if (kind, R) not in self.graphs:
            step, inputs, draws = self.step, self.inputs.rows(R), self.draws.draws.rows(R)
            run = {'layers': lambda: step.hidden_states(inputs), 'head': lambda: step.head(step.wanted, R),
                   'step': lambda: step.logits_of(inputs), 'draw': lambda: step.draw(inputs, draws)}[kind]
            self.inputs.sequences.fill_(-1)  # what is run to be recorded writes nothing
            self.draws.draws.left.fill_(0)
            self.draws.draws.step.fill_(0)  # that of the last call may be behind the last row of `drawn`
            self.graphs[kind, R] = self.queue.record(run)
        return self.graphs[kind, R]

    def prepare(self, kv_caches, progress=lambda buckets: buckets):
        """Record the graphs for these `KVArrays`, all at once: progress is called with the list that is worked on."""
        with step_lock, torch.inference_mode(), torch.cuda.device_of(self.inputs.tokens):
            self.bind(kv_caches)
            for kind, R in progress([(kind, R) for kind in ('layers', 'head', 'draw') for R in BUCKETS]):
                self.graph(kind, R)

    def rows(self, input_ids, input_positions, m):
        """The logits of the wanted rows of one step, which may be several graphs one after the other."""
        most, N, S = BUCKETS[-1], len(input_ids), len(m.runs)
        starts = np.fromiter(accumulate(m.query_lens, initial=0), np.int64, S + 1)
        if N == S <= most and m.wanted is None:
            step = self.graph('step', bucket(N))
            self.load(input_ids, input_positions, m.runs, starts)
            step.replay()
            return self.step.logits[:N].clone()
        wanted = starts[1:] - 1 if m.wanted is None else m.wanted
        logits = torch.empty(len(wanted), self.vocab_size, device=self.device)
        for row in range(0, N, most):
            end = min(row + most, N)
            a, b = np.searchsorted(starts, row, 'right') - 1, np.searchsorted(starts, end)
            bounds = np.clip(starts[a:b + 1], row, end)
            layers = self.graph('layers', bucket(end - row))
            self.load(input_ids[row:end], input_positions[row:end], m.runs[a:b], bounds - row)
            layers.replay()
            first, last = np.searchsorted(wanted, (row, end))
            if first < last:
                n, of_piece = int(last - first), torch.from_numpy(wanted[first:last] - row).to(self.device)
                self.step.wanted[:n] = self.step.x[of_piece]
                self.graph('head', bucket(n)).replay()
                logits[first:last] = self.step.logits[:n]
        return logits

    def load(self, ids, positions, runs, bounds, n_steps=1):
        """
        Put the rows of a step on the device. bounds: where each sequence begins in it, and the end. n_steps: an array
        or an int, how many steps follow each other.
        """
        n = len(positions)
        rows = self.slots.update(runs, positions[bounds[:-1]], positions[bounds[1:] - 1] + n_steps)
        self.inputs.tokens[:n] = ids
        self.inputs.positions[:n] = torch.from_numpy(positions).to(self.device)
        sequences = np.full(bucket(n), -1, np.int32)
        sequences[:n] = np.repeat(rows, np.diff(bounds))
        self.inputs.sequences[:len(sequences)] = torch.from_numpy(sequences).to(self.device)

    def several(self, positions, kv_caches, m):
        """
        Steps that follow each other on the device, see `metadata.NextTokens`. The host launches some of them ahead, and
        launches no more when a sequence has ended, when the call is late, or when the engine's inbox is to be read.
        """
        new, S = m.next_tokens, len(m.runs)
        new.check_steps()
        n_steps = min(new.n_steps, MOST_STEPS)
        limits = np.full(S, n_steps) if new.limits is None else np.minimum(new.limits, n_steps)
        if new.n_drawn or limits.min() < 1:
            raise ValueError(f"of these `NextTokens` {new.n_drawn} rows were drawn, and their sequences may draw "
                             f"{limits.tolist()} more tokens: make new ones, of sequences that may draw 1 or more")
        graph = self.graph('draw', bucket(S))
        self.load(torch.from_numpy(new.tokens[0]), positions, m.runs, np.arange(S + 1), limits)
        self.draws.load(new, limits, bucket(S))
        launched = landed = 0
        ended, waiting = False, deque()
        try:
            while landed < launched or not ended and launched < n_steps:
                while not ended and launched < n_steps and len(waiting) < N_LANDINGS:
                    n = min(AT_ONCE, n_steps - launched)
                    for _ in range(n):
                        graph.replay()
                    waiting.append((launched, launched + n, self.draws.land(launched, launched + n, S)))
                    launched += n
                first, landed, landing = waiting.popleft()
                landing.event.synchronize()
                new.tokens[1 + first:1 + landed] = landing.drawn
                kv_caches.finite &= not landing.broken.any()
                ended |= not landing.left.all() or not kv_caches.finite or new.is_late()
        except BaseException:
            self.queue.synchronize()  # the caller may free slots that steps under way still write
            raise
        new.note(landed, ended)
        return self.step.logits[:S]


def bucket(n):
    """The number of rows of the graph that n rows take."""
    return next(R for R in BUCKETS if R >= n)


def kernels():
    """The module of the kernels. ValueError where there is no Triton."""
    try:
        from decode.gpu import kernels
    except ImportError as e:
        raise ValueError(f"the GPU decoder needs Triton, which torch's CUDA wheels for Linux bring: {e}") from e
    return kernels
