"""
The executor for GPUs: the step of step.py, recorded as CUDA graphs.

A graph is recorded for each number of rows in BUCKETS. A step of other numbers is padded with rows that write nothing,
one of more rows is several.
"""
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import torch

from decode.batch import NotNumbers, SequenceOutput, step_slots
from decode.changes import REFUSED, check_unchanged
from decode.eager import are_numbers, check_step
from decode.gpu.queue import Queue
from decode.gpu.step import Step
from decode.gpu.tables import BROKEN, MOST_STEPS, STOPS, Tables

BUCKETS = 8, 16, 32, 64, 128, 192, 256  # numbers of rows of a graph
AT_ONCE = 4  # steps of a group, which are launched together; two groups are under way at a time, at most
DTYPES = torch.float32, torch.bfloat16, torch.float16  # of models


class GPUExecutor:
    """
    A model's steps on a GPU. After a change of the model call `refresh`.

    functions: of `kernels`, or others that compute the same. queue: see queue.py. layers: see `hold`. type_kv: of the
    keys and values that it computes.

    ValueError on a model that is not model.py's GPT in one of DTYPES, and where `check.check_here` finds that the
    kernels compute something else.
    """
    torch_on_one_thread, most_sequences = nullcontext, BUCKETS[-1]

    def __init__(self, model, functions=None, queue=None):
        device, self.model, self.layers = model.lm_head.weight.device, model, ()
        self.functions, self.queue = functions or kernels(), queue or Queue(device)
        self.refresh()
        self.type_kv = str(model.lm_head.weight.dtype).removeprefix('torch.')
        self.name = f"Triton on {device.type}, {self.type_kv} weights"
        if functions is None:
            from decode.gpu.check import check_here
            check_here(model, self.functions, self.queue)

    def refresh(self):
        """Look up the weights of now, and forget all graphs."""
        check_unchanged(self.model)
        c, n, weight = self.model.config, self.most_sequences, self.model.lm_head.weight
        for name, p in self.model.named_parameters():
            if p.dtype not in DTYPES or p.dtype is not weight.dtype or not p.is_contiguous():
                raise ValueError(f"the GPU executor reads contiguous weights of one dtype, float32, bfloat16 or "
                                 f"float16, but {name} is {p.dtype} with strides {p.stride()}: {REFUSED}")
        self.tables = Tables(c, n, weight.device, self.queue)
        self.bind()

    def hold(self, layers):
        """Let the steps read and write these `kvcache.storage.Layer`s, or none. ValueError if they cannot."""
        self.layers = layers
        self.bind()

    def bind(self):
        """Have the steps read the weights, and read and write the slots, that are now its own. Graphs are forgotten."""
        if self.tables.memory.is_cuda:
            torch.cuda.synchronize(self.tables.memory.device)
        # once none of them runs, and all together: they share memory of the libraries they call
        self.step, self.graphs = None, {}
        if self.layers:
            self.step = Step(self.functions, self.model, self.tables.columns, self.layers, self.most_sequences)

    @contextmanager
    def on_device(self):
        """For what computes on the executor's device, which need not be the current one, in the model's dtype."""
        memory = self.tables.memory
        with torch.inference_mode(), torch.cuda.device_of(memory), torch.autocast(memory.device.type, enabled=False):
            yield

    def execute_model(self, batch):
        """See `decode.cpu.CPUExecutor.execute_model`. A call for logits, which stay on the device, is one step."""
        with self.on_device():
            batch.make_copies(self.layers)
            check_step(self.model, batch)
            if len(batch.tokens) > self.most_sequences:  # a step of several graphs is checked before the first one
                step_slots(self.model.config, batch)
            elif batch.decodes and not any(batch.logprobs):
                return self.several(batch)
            rows, parts = batch.rows()
            logits = self.logits_of(batch.sequences, batch.counts, batch.tokens, batch.positions, rows)
            if any(batch.prompt_logits) and not are_numbers(logits):  # a draw looks at what it draws from
                raise NotNumbers
            return batch.result(logits, parts, self.drawn)

    def graph(self, kind, n):
        """For n rows: 'layers', 'head', 'draw', or 'step', which is all of them. To record one spoils the inputs."""
        R = next(R for R in BUCKETS if R >= n)
        if (kind, R) not in self.graphs:
            step, inputs = self.step, self.tables.inputs.rows(R)
            run = {'layers': lambda: step.hidden_states(inputs), 'step': lambda: step.draw(inputs),
                   'head': lambda: step.head(step.x[inputs.wanted]),
                   'draw': lambda: self.functions.draw(step.logits[:R], inputs, step.ended)}[kind]
            inputs.sequences.fill_(-1)  # what is run to be recorded writes nothing
            inputs.left.fill_(0)
            inputs.step.fill_(0)  # that of the last call may be past the last row of `drawn`
            graphs, self.graphs = self.graphs, {}  # a recording that fails may break their pool: then all are forgotten
            graphs[kind, R] = self.queue.record(run, next(iter(graphs.values()), None))
            self.graphs = graphs
        return self.graphs[kind, R]

    def prepare(self, progress=lambda graphs: graphs):
        """Record all graphs for the slots of now: progress is called with the list that is worked on."""
        with self.on_device():
            for kind, R in progress([(kind, R) for kind in ('layers', 'head', 'draw', 'step') for R in BUCKETS]):
                self.graph(kind, R)

    def load(self, sequences, counts, tokens, positions, n_steps=1, wanted=()):
        """
        Have the slots on the device, and the inputs of a step after the next `send`. counts: how many of the tokens
        each sequence brings; n_steps: how many steps follow each other. Returns each `Row`. `Refused` without a slot.
        """
        rows, ends = self.tables.rows(sequences), counts.cumsum()
        self.tables.update(rows, positions[ends - counts], positions[ends - 1] + n_steps)
        self.tables.step(rows, counts, tokens, positions, wanted)
        return rows

    def logits_of(self, sequences, counts, tokens, positions, wanted):
        """Float32 (W, vocab_size) of the rows `wanted` of one step, which may be several graphs one after the other."""
        logits = self.step.logits.new_empty(len(wanted), self.model.config.vocab_size)
        ends, counts = np.cumsum(counts), np.asarray(counts)
        for start in range(0, len(tokens), self.most_sequences):
            end = min(start + self.most_sequences, len(tokens))
            n_new = np.clip(ends, start, end) - np.clip(ends - counts, start, end)
            numbers = n_new.nonzero()[0]
            first, last = np.searchsorted(wanted, (start, end)).tolist()
            graphs = [self.graph('layers', end - start)]
            if first < last:
                graphs.append(self.graph('head', last - first))
            self.load([sequences[i] for i in numbers], n_new[numbers], tokens[start:end], positions[start:end],
                      wanted=wanted[first:last] - start)
            self.tables.send()
            for graph in graphs:
                graph.replay()
            logits[first:last] = self.step.logits[:last - first]
        return logits

    def several(self, batch):
        """Steps of a batch that decodes."""
        limits = np.minimum(batch.n_steps, MOST_STEPS)
        rows = self.load(batch.sequences, np.ones_like(limits), batch.tokens, batch.positions, limits)
        return [SequenceOutput(tokens) for tokens in self.launched('step', rows, limits, batch.is_late)]

    def drawn(self, sequences, logits):
        """The next token of each sequence, a list, drawn from its row of logits."""
        tokens, n = [], self.most_sequences
        for start in range(0, len(sequences), n):
            rows = self.tables.rows(sequences[start:start + n])
            self.step.logits[:len(rows)] = logits[start:start + n]  # a draw changes its own
            tokens += [token for token, in self.launched('draw', rows, np.ones(len(rows), np.int64))]
        return tokens

    def launched(self, kind, rows, limits, is_late=None):
        """
        What these `Row`s draw in graphs of a kind, lists of tokens. limits: of each, at most. The host launches some
        steps ahead, but none after an end, or when it is late. `NotNumbers` if one had logits that are none.
        """
        graph, n_steps, launched, events = self.graph(kind, len(rows)), limits.max(), 0, []
        self.tables.draw(rows, limits)
        self.tables.send()
        drawn = self.tables.inputs.drawn[:, :len(rows)].numpy()
        try:
            while launched < n_steps:
                landed, launched = launched, min(launched + AT_ONCE, n_steps)
                for _ in range(landed, launched):
                    graph.replay()
                events.append(self.queue.event())
                if landed:  # one group is under way while the host waits for the one before
                    events[-2].synchronize()
                    if (drawn[:landed] >= STOPS).any() or is_late():
                        break
            events[-1].synchronize()
        except BaseException:
            self.queue.event().synchronize()  # the caller may free slots that steps under way still write
            raise
        drawn = drawn[:launched]
        if (drawn == BROKEN).any():
            raise NotNumbers
        counts = (drawn >= 0).sum(0).tolist()  # what is nothing is behind the end
        found = [tokens[:n] for tokens, n in zip((drawn.T % STOPS).tolist(), counts)]
        for row, tokens in zip(rows, found):
            row.marked = row.sequence.settings, row.sequence.n_drawn + len(tokens)
        return found


def kernels():
    """The functions of a step that are Triton kernels. ValueError where there is no Triton."""
    try:
        from decode.gpu import attention, drawing, linears
    except ImportError as e:
        raise ValueError(f"the GPU executor needs Triton, which torch's CUDA wheels for Linux bring: {e}") from e
    return SimpleNamespace(embed=linears.embed, normed=linears.normed, linear=linears.linear, attend=attention.attend,
                           draw=drawing.draw)
