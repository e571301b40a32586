"""
The executor for GPUs: the step of step.py, recorded as CUDA graphs.

A graph is recorded for each number of rows in BUCKETS. A step of other numbers is padded with rows that write nothing,
one of more rows is several.
"""
from collections import deque
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import torch

from decode.batch import Drawn, NotNumbers, Runs, step_slots
from decode.eager import are_numbers, check_step
from decode.gpu.draws import MOST_STEPS, N_LANDINGS, DrawTable
from decode.gpu.queue import Queue
from decode.gpu.slots import AHEAD, Columns, SlotTable
from decode.gpu.step import KVLayer, Step, StepInputs
from decode.gpu.weights import GPUWeights

BUCKETS = 1, 2, 4, 8, 16, 32, 64, 128, 256  # numbers of rows of a graph
AT_ONCE = 4     # steps that are launched before the host looks at what an earlier group of as many has drawn
STORED = torch.float32, torch.bfloat16, torch.float16, torch.int8  # types of keys and values

# the largest difference from the model's own logits for a few tokens, in standard deviations of the logits. A model of
# 30 layers and 49,152 tokens in bfloat16 measured 0.26, because its residual stream is rounded; wrong kernels, 3
LARGEST_DIFFERENCE = {torch.float32: 0.02, torch.float16: 0.15, torch.bfloat16: 1.0}


class GPUExecutor:
    """
    A model's steps on a GPU.

    weights: 'float32' leaves them in the model's dtype, where they are; 'int8' copies them, rounded to int8 with a
        scale a row. functions: of `kernels`, or others that compute the same. queue: see queue.py.
    layers: the `kvcache.storage.Layer`s of the slots, which `hold` gives it. type_kv: of the keys and values that it
        computes. most_sequences: of a call of several steps.

    The bits of a row's logits, and what is drawn from them, depend neither on the other rows of a step nor on how its
    text is divided into steps, if the functions are the kernels. After a change of the model call `refresh`.

    Raises ValueError on a model that is not model.py's GPT on one device, in one dtype of three.
    """
    most_sequences = BUCKETS[-1]
    torch_on_one_thread = nullcontext

    def __init__(self, model, weights='float32', functions=None, queue=None):
        if weights not in ('float32', 'int8'):
            raise ValueError(f"on a GPU weights are int8 or in the dtype of the model, not {weights!r}: convert the "
                             "model with model.to(...)")
        device = model.lm_head.weight.device
        self.model, self.weights, self.functions, self.layers = model, weights, functions or kernels(), ()
        self.queue = queue or Queue(device)
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
        if any(module.training for module in self.model.modules()):
            raise ValueError("the model is in training mode, and its dropout is not compared: call model.eval() first")
        c = self.packed.config
        tokens = np.arange(min(3, c.block_size)) % c.vocab_size
        n, like = len(tokens), dict(dtype=self.packed.dtype, device=self.device)
        layers = [KVLayer(*(torch.zeros(c.n_kv_head * n * c.head_dim, **like) for _ in 'kv'), None, None)
                  for _ in range(c.n_layer)]
        try:
            with self.on_device():
                self.step = Step(self.functions, self.packed, self.slots.columns, layers, n, 0, self.most_sequences)
                logits = self.logits_of(tokens, np.arange(n), [Runs([(0, 0, n)])], [n], np.array([n - 1]))
                expected = self.model(torch.from_numpy(tokens)[None].to(self.device), use_cache=False)[0][:, 0].float()
                self.graph('draw', 1)
                off = float((logits - expected).abs().max() / expected.std())
        except ValueError:
            raise
        except Exception as e:  # of a compiler, or of a device that a kernel does not fit
            raise ValueError(f"the Triton kernels do not run here: {type(e).__name__}: {str(e)[:200]}") from e
        finally:
            self.bind()
        if not off <= LARGEST_DIFFERENCE[self.packed.dtype] + (self.weights == 'int8'):
            raise ValueError(f"the logits of the Triton kernels differ from the model's by {off:.2g} of their standard "
                             "deviation on this device: please report it, with the versions of torch and triton")

    def refresh(self):
        """Look up the weights of now, round them if they are int8, and forget all graphs."""
        packed, n = GPUWeights(self.model, self.weights), self.most_sequences
        c, device = packed.config, packed.wte.device
        slots = SlotTable(Columns.of(c, max(n, AHEAD)), c, n, device)
        tokens, positions, sequences = torch.zeros(3, n, dtype=torch.int64, device=device)
        inputs = StepInputs(tokens, positions, sequences.int(), slots.table)
        draws = DrawTable(n, c.vocab_size, device, self.queue)
        # all together, so that none of them is of another model if there is no memory for the next one
        self.packed, self.device, self.slots, self.inputs, self.draws = packed, device, slots, inputs, draws
        self.bind()

    def hold(self, layers):
        """Let the steps read and write these `kvcache.storage.Layer`s. ValueError if they cannot."""
        first = layers[0].k
        for stored in (t for layer in layers for t in layer.tensors()):
            if stored.device != self.device or not stored.is_contiguous() or first.data.dtype not in STORED:
                raise ValueError(f"the GPU executor reads contiguous keys and values on {self.device} in float32, "
                                 f"bfloat16, float16 or int8, and these are {first.kind} on {stored.device} with "
                                 f"strides {stored.stride()}: use decoder=eager")
        self.layers = layers
        self.bind()

    def bind(self):
        """Have the steps read the weights, and read and write the slots, that are now its own. Graphs are forgotten."""
        if self.device.type == 'cuda':
            torch.cuda.synchronize(self.device)
        # once none of them runs, and all together: they share memory of the libraries they call
        self.step, self.graphs = None, {}
        self.queue.forget()
        if self.layers:
            first, n_slots = self.layers[0].k, self.layers[0].n_slots
            self.step = Step(self.functions, self.packed, self.slots.columns, [kv_layer(each) for each in self.layers],
                             n_slots, 0 if first.scale is None else first.group, self.most_sequences)

    @contextmanager
    def on_device(self):
        """For what computes on the executor's device, which need not be the current one."""
        with torch.inference_mode(), torch.cuda.device_of(self.inputs.tokens):
            yield

    def execute_model(self, batch):
        """
        See `decode.cpu.CPUExecutor.execute_model`. A batch that decodes is several steps, unless logits are wanted.
        """
        with self.on_device():
            batch.copy(self.layers)
            check_step(self.model, batch)
            if len(batch.tokens) > self.most_sequences:  # a step of several graphs is checked before the first one
                step_slots(self.packed.config, batch)
            elif batch.decodes and not any(batch.logprobs):
                return self.several(batch)
            rows, parts = batch.rows()
            runs = [s.runs for s in batch.sequences]
            logits = self.logits_of(batch.tokens, batch.positions, runs, batch.counts, rows)
            if not are_numbers(logits):
                raise NotNumbers
            drawing = [i for i, n in enumerate(batch.n_steps.tolist()) if n]
            own = logits[[parts[i].stop - 1 for i in drawing]]  # a copy, which is changed
            return batch.result(self.drawn([batch.sequences[i] for i in drawing], own), logits, parts)

    def graph(self, kind, R):
        """
        The graph of a function of R rows: 'layers', 'head', or 'draw', which is both and draws the next tokens too. It
        may have to be recorded, so it is asked for before the inputs are loaded.
        """
        if (kind, R) not in self.graphs:
            step, inputs, draws = self.step, self.inputs.rows(R), self.draws.draws.rows(R)
            run = {'layers': lambda: step.hidden_states(inputs), 'head': lambda: step.head(step.wanted, R),
                   'draw': lambda: step.draw(inputs, draws)}[kind]
            self.inputs.sequences.fill_(-1)  # what is run to be recorded writes nothing
            self.draws.draws.left.fill_(0)
            self.draws.draws.step.fill_(0)  # that of the last call may be behind the last row of `drawn`
            self.graphs[kind, R] = self.queue.record(run)
        return self.graphs[kind, R]

    def prepare(self, progress=lambda graphs: graphs):
        """Record the graphs for the slots of now, all at once: progress is called with the list that is worked on."""
        with self.on_device():
            for kind, R in progress([(kind, R) for kind in ('layers', 'head', 'draw') for R in BUCKETS]):
                self.graph(kind, R)

    def logits_of(self, tokens, positions, runs, counts, wanted):
        """
        The logits of the rows `wanted`, float32 (W, vocab_size), of one step of sequences with these `Runs`, which
        bring so many of the new tokens each. It may be several graphs one after the other.
        """
        most, N, S = self.most_sequences, len(tokens), len(counts)
        starts = np.fromiter(accumulate(counts, initial=0), np.int64, S + 1)
        logits = torch.empty(len(wanted), self.packed.config.vocab_size, device=self.device)
        for row in range(0, N, most):
            end = min(row + most, N)
            a, b = np.searchsorted(starts, row, 'right') - 1, np.searchsorted(starts, end)
            bounds = np.clip(starts[a:b + 1], row, end)
            layers = self.graph('layers', bucket(end - row))
            self.load(tokens[row:end], positions[row:end], runs[a:b], bounds - row)
            layers.replay()
            first, last = np.searchsorted(wanted, (row, end))
            if first < last:
                n, of_piece = int(last - first), torch.from_numpy(wanted[first:last] - row).to(self.device)
                self.step.wanted[:n] = self.step.x[of_piece]
                self.graph('head', bucket(n)).replay()
                logits[first:last] = self.step.logits[:n]
        return logits

    def load(self, tokens, positions, runs, bounds, n_steps=1):
        """
        Put the rows of a step on the device. bounds: where each sequence begins in it, and the end. n_steps: an array
        or an int, how many steps follow each other. `Refused` if a slot is missing.
        """
        n = len(positions)
        rows = self.slots.update(runs, positions[bounds[:-1]], positions[bounds[1:] - 1] + n_steps)
        self.inputs.tokens[:n] = torch.from_numpy(tokens).to(self.device)
        self.inputs.positions[:n] = torch.from_numpy(positions).to(self.device)
        sequences = np.full(bucket(n), -1, np.int32)
        sequences[:n] = np.repeat(rows, np.diff(bounds))
        self.inputs.sequences[:len(sequences)] = torch.from_numpy(sequences).to(self.device)

    def several(self, batch):
        """
        `execute_model` for a batch that decodes: steps follow each other on the device. The host launches some of them
        ahead, and launches no more when a token has ended a sequence, or when the call is late.
        """
        S, limits = len(batch.sequences), np.minimum(batch.n_steps, MOST_STEPS)
        n_steps = int(limits.max())
        graph = self.graph('draw', bucket(S))
        self.load(batch.tokens, batch.positions, [s.runs for s in batch.sequences], np.arange(S + 1), limits)
        self.draws.load(batch.sequences, limits, bucket(S))
        tokens = np.full((n_steps, S), -1)
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
                tokens[first:landed] = landing.drawn
                if landing.broken.any():
                    raise NotNumbers
                ended |= bool((landing.left[limits > landed] == 0).any()) or batch.is_late()
        except BaseException:
            self.queue.synchronize()  # the caller may free slots that steps under way still write
            raise
        return [Drawn(column[column >= 0].tolist()) for column in tokens.T]

    def drawn(self, sequences, logits):
        """The next token of each sequence, a list, drawn from its row of logits, which are changed."""
        tokens = []
        for start in range(0, len(sequences), self.most_sequences):
            some = sequences[start:start + self.most_sequences]
            n = len(some)
            self.draws.load(some, np.ones(n, np.int64), n)
            self.functions.draw(logits[start:start + n], self.draws.draws.rows(n), self.inputs.rows(n))
            tokens += self.draws.draws.drawn[0, :n].tolist()
        return tokens


def bucket(n):
    """The number of rows of the graph that n rows take."""
    return next(R for R in BUCKETS if R >= n)


def kv_layer(layer):
    """The `KVLayer` of a `kvcache.storage.Layer`."""
    k, v = layer.k, layer.v
    return KVLayer(*(None if t is None else t.view(-1) for t in (k.data, v.data, k.scale, v.scale)))


def kernels():
    """The functions of a step, as launches of Triton kernels. ValueError where there is no Triton."""
    try:
        from decode.gpu import attention, drawing, linear, storing
    except ImportError as e:
        raise ValueError(f"the GPU executor needs Triton, which torch's CUDA wheels for Linux bring: {e}") from e
    return SimpleNamespace(embed=storing.embed, turn=storing.turn, store=storing.store, attend=attention.attend,
                           linear=linear.linear, draw=drawing.draw)
