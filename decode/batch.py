"""
The work of one call of an executor, and what comes of it.

    outputs = executor.execute_model(batch)

The call is vLLM's. A `Batch` has the new tokens of any sequences one after the other on one axis: prompts, parts of
prompts, and single tokens. The `Runs` of a sequence say where its keys and values lie. A slot holds the keys and
values of one position in all layers; which slot is in which page or cell is known to the pool alone.
"""
import time
from dataclasses import dataclass, field

import numpy as np
import torch


class NotNumbers(ValueError):
    """The logits of a step are NaN or infinite. (PyTorch's executor takes -inf: such a token is never drawn.)"""

    def __init__(self):
        super().__init__("the model's logits are not numbers: its weights are broken")


class Refused(ValueError):
    """A batch that does not fit the model or the slots. It is raised before a key or a value is computed."""


class Runs:
    """
    The slots of one sequence in the order of its positions: rows of int64 (position, slot, n), which say that the n
    positions from `position` on lie in the slots from `slot` on, side by side.

    Positions ascend, and may be missing where no new token sees them. A run may be longer than the sequence is so far.
    `table[:n]` are the rows, `address` is where they begin in memory.
    """
    __slots__ = 'table', 'n', 'address', 'next'  # next: (position, slot) that would extend the last run, or None

    def __init__(self, rows=()):
        self.n, self.next = 0, None
        self.grow(4)
        for row in rows:
            self.append(*row)

    def grow(self, n):
        table = np.zeros((n, 3), np.int64)
        if self.n:
            table[:self.n] = self.table[:self.n]
        self.table, self.address = table, table.__array_interface__['data'][0]  # sooner than table.ctypes.data

    def append(self, position, slot, n=1):
        """Add n positions at the end. They extend the last run if they go on where it ends."""
        if (position, slot) == self.next:
            self.table[self.n - 1, 2] += n
        else:
            if self.n == len(self.table):
                self.grow(2 * self.n)
            self.table[self.n] = position, slot, n
            self.n += 1
        self.next = position + n, slot + n


@dataclass(frozen=True, eq=False)
class Batch:
    """
    sequences: those of the call, each once. Executors read of each: `runs`, its `Runs`, with slots for the positions of
        its new tokens and of all that these see; `tokens`, a list of all; `n_drawn`, how many of these were drawn;
        `settings`, its `draw.DrawSettings`.
    counts: how many new tokens each brings, at least 1, a list (S,).
    tokens: the new tokens, int64 (N,). positions: theirs, int64 (N,); those of a sequence are consecutive.
    n_steps: int64 (S,). How many tokens each sequence may draw in this call; 0 where only a part of its prompt is
        computed. More than 1 only if every sequence brings one token: what is drawn is then the next step's token, and
        there are slots for all of them.
    prompt_logits: for each sequence, are the logits of all of its new tokens wanted? A list. Then n_steps is at most 1.
    logprobs: for each sequence, are the logits wanted from which its tokens are drawn? A list.
    copies: (source, target, n) of slots, which are copied before anything else, in this order: the targets are in pages
        that nobody reads yet.
    until: no step begins after this time of `now`. return_soon: none begins once return_soon[0] is not 0; another
        thread may set it.
    """
    sequences: list
    counts: list
    tokens: np.ndarray
    positions: np.ndarray
    n_steps: np.ndarray
    prompt_logits: list
    logprobs: list
    copies: list = ()
    until: int = 2**63 - 1
    return_soon: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))

    @property
    def decodes(self):
        """Does each sequence bring one token and draw at least one?"""
        return len(self.tokens) == len(self.counts) and self.n_steps.min() > 0 and not any(self.prompt_logits)

    def make_copies(self, layers):
        """Make the copies, in these `kvcache.storage.Layer`s. `Refused` if the executor holds no layers."""
        if not layers:
            raise Refused("this executor holds no slots: make an Engine with it, and keep that Engine")
        for source, target, n in self.copies:
            for layer in layers:
                layer.copy(source, target, n)

    def is_late(self):
        """May no other step of this call begin?"""
        return bool(self.return_soon[0]) or now() >= self.until

    def rows(self):
        """
        The rows, out of N, whose logits a single step computes: their numbers, int64 (W,), and for each sequence the
        slice of these that belongs to it. A sequence that draws does so from the last row of its slice.
        """
        rows, parts, first = [], [], 0
        for count, n, every in zip(self.counts, self.n_steps.tolist(), self.prompt_logits):
            own = range(first if every else first + count - (n > 0), first + count)
            parts.append(slice(len(rows), len(rows) + len(own)))
            rows += own
            first += count
        return np.array(rows, np.int64), parts

    def result(self, logits, parts, draw):
        """
        The `SequenceOutput`s of a single step. logits: a tensor of the rows and `parts` of `rows`. draw: the function
        (sequences, a row of logits for each) -> their next tokens, a list.
        """
        drawing = [(s, part.stop - 1) for s, n, part in zip(self.sequences, self.n_steps.tolist(), parts) if n]
        own = logits if len(drawing) == len(logits) else logits[[row for _, row in drawing]]
        tokens = iter(draw([s for s, _ in drawing], own) if drawing else [])
        return [SequenceOutput([next(tokens)] if n else [], logits[part] if every or logprobs and n else None)
                for n, every, logprobs, part in zip(self.n_steps.tolist(), self.prompt_logits, self.logprobs, parts)]


@dataclass(slots=True)
class SequenceOutput:
    """
    What a call gives a sequence. tokens: those it drew, a list. logits: None, or float32 (n, vocab_size): with
    prompt_logits a row after each token that it brought, with logprobs the row from which each token was drawn. first:
    the position of the first token that it brought. (After a preemption rows of a prompt come again.)
    """
    tokens: list
    logits: torch.Tensor | None = None
    first: int = 0


def now():
    """Nanoseconds since some moment, as `clock` of decode/kernel/threads.py counts them."""
    return time.perf_counter_ns()


def slots_between(sequences, low, high):
    """
    The slots of the positions low to high - 1 of each sequence; low and high are int64 (S,). Returns (seq, position,
    slot), int64 (K,) each, sorted by seq, the number of the sequence, and then by position. `Refused` if a position
    has no slot.
    """
    tables = [s.runs.table[:s.runs.n] for s in sequences]
    of_run = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    position, slot, n = np.concatenate(tables).T
    begin, end = np.maximum(position, low[of_run]), np.minimum(position + n, high[of_run])
    counts = np.maximum(end - begin, 0)
    n_found, n_seen = np.bincount(of_run, counts, len(tables)).astype(int), np.maximum(high - low, 0)
    if (n_found != n_seen).any():
        number = int((n_found != n_seen).argmax())
        raise Refused(f"the new tokens of sequence number {number} of this batch see {n_seen[number]} positions, but "
                      f"its runs have slots for {n_found[number]} of them: give it slots for all")
    offset = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # 0, 1, ... within each run
    seq, position, slot = np.repeat((of_run, begin, slot + begin - position), counts, axis=1)
    return seq, position + offset, slot + offset


def step_slots(config, batch):
    """
    The slots of a batch as arrays: (own, seq, position, slot). own: int64 (N,), the slot of each new token. seq,
    position and slot list all keys that the new tokens see, including their own, as `slots_between` returns them.
    """
    n_new = np.array(batch.counts)
    last = n_new.cumsum() - 1
    end = batch.positions[last] + 1
    first = np.maximum(end - n_new - config.window + 1, config.n_sink) if config.window else np.zeros_like(end)
    seq, position, slot = slots_between(batch.sequences, first, end)
    if config.n_sink:
        sinks = slots_between(batch.sequences, np.zeros_like(end), np.minimum(end, config.n_sink))
        found = np.concatenate((sinks, (seq, position, slot)), axis=1)
        seq, position, slot = found[:, found[0].argsort(kind='stable')]
    # the new tokens' own positions are the last ones of each sequence
    n_keys = np.bincount(seq, minlength=len(n_new))
    own = np.repeat(n_keys.cumsum() - 1 - last, n_new) + np.arange(len(batch.tokens))
    return slot[own], seq, position, slot
