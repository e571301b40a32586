"""
What an executor is told beside tokens and positions: which sequences there are, where their keys and values lie
(`Runs`, one for each sequence), and in which arrays (`KVArrays`, one for each cache).

    logits = executor.execute_model(input_ids, input_positions, kv_caches, input_metadata)

The call is vLLM's. All caches say where rows are in this one way, and all executors (PyTorch, the compiled step) read
it. The compiled step reads the tables of the `Runs` where they are in memory; `step_slots` makes arrays of them that
can be moved to a device.

A slot holds the keys and values of one position in all layers. The numbers of head h begin at
slot * slot_stride + h * head_stride in each array, so that one rule finds them in every cache:

    tuples    (B, H, n_slots, D)     slot (b * H) * n_slots + s, slot_stride D, head_stride n_slots * D
    rows      (H, n, m, D)           slot i * m + j, slot_stride D, head_stride n * m * D; streams of cells, or blocks
    operator  (n, L, 2, H, D) and three other orders of these axes; a slot is one of n
"""
from dataclasses import dataclass

import numpy as np
import torch

from decode.kernel.layout import KV_GROUP
from decode.kernel.threads import aligned, nanoseconds

KINDS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.int8: np.int8}  # as the compiled step sees them


class Runs:
    """
    The slots of one sequence in the order of its positions: rows of int64 (position, slot, n), which say that the n
    positions from `position` on lie in the slots from `slot` on, side by side.

    Positions ascend, and may be missing where no new token sees them. A run may be longer than the sequence is so far.
    `table[:n]` are the rows, `address` is where they begin in memory.
    """
    __slots__ = 'table', 'n', 'address', 'next'  # next: (position, slot) that would extend the last run, or None

    def __init__(self, rows=()):
        self.n = 0
        self.grow(max(4, len(rows)))
        self.set(rows)

    def grow(self, n):
        table = np.zeros((n, 3), np.int64)
        if self.n:
            table[:self.n] = self.table[:self.n]
        self.table, self.address = table, table.__array_interface__['data'][0]  # sooner than table.ctypes.data

    def set(self, rows):
        """Replace all rows."""
        if len(rows) > len(self.table):
            self.grow(2 * len(rows))
        self.n, self.next = len(rows), None
        if self.n:
            self.table[:self.n] = rows
            position, slot, n = self.table[self.n - 1].tolist()
            self.next = position + n, slot + n

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


class KVArrays:
    """
    The keys and values of all layers of a cache, with n_slots slots each, as executors are given them.

    layers: for each layer an object with `write(rows, k, v)` and `read(rows, dtype)`, see `kvcache.storage.Layer`, for
    the executor in PyTorch; None where only the compiled step reads.
    compiled: can the compiled step read them? Not on another device, in 4 or 64 bits, in float16, transposed, or in
    int8 with other groups than KV_GROUP. It reads `tensors`, through addresses, int64 (n_layer, 4): of keys, values,
    and for int8 the float32 scales of both. written: uint8 (n_slots,), in which it marks the slots that it will write.
    finite: were the logits of the last `execute_model` numbers? ValueError unless the layers are alike.
    """

    def __init__(self, tensors, n_slots, slot_stride, head_stride, n_kv_head, head_dim, layers=None):
        """tensors: for each layer (k, v) or (k, v, k_scale, v_scale)."""
        self.tensors, self.n_slots, self.slot_stride, self.head_stride = tensors, n_slots, slot_stride, head_stride
        self.shape, self.layers, self.finite = (len(tensors), n_kv_head, head_dim), layers, True
        self.dtype = tensors[0][0].dtype
        self.compiled = all(data.is_cpu and data.dtype in KINDS and data.is_contiguous() for layer in tensors
                            for data in layer[:2] if layers) and self.dtype in KINDS and (
            len(tensors[0]) == 2 or tensors[0][0].size(-1) == head_dim == tensors[0][2].size(-1) * KV_GROUP)
        if self.compiled:
            self.check()
            self.written = aligned(n_slots, np.uint8)
            self.addresses = np.zeros((len(tensors), 4), np.int64)
            for row, layer in zip(self.addresses, tensors):
                row[:len(layer)] = [t.data_ptr() for t in layer]

    def check(self):
        (_, H, D), of_first = self.shape, [t.dtype for t in self.tensors[0]]
        needed = (self.n_slots - 1) * self.slot_stride + (H - 1) * self.head_stride + D if self.n_slots else 0
        for number, of_layer in enumerate(self.tensors):
            room = [t.untyped_storage().nbytes() // t.element_size() - t.storage_offset() for t in of_layer]
            if [t.dtype for t in of_layer] != of_first or min(room[:2]) < needed or (
                    room[2:] and min(room[2:]) * KV_GROUP < needed):
                raise ValueError(f"layer {number} has keys and values {[(t.dtype, tuple(t.shape)) for t in of_layer]}, "
                                 f"and all layers must be {of_first} with room for {self.n_slots} slots, as layer 0")

    @classmethod
    def of_layers(cls, layers):
        """Of the `kvcache.storage.Layer`s of a cache."""
        first = layers[0]
        tensors = [tuple(t for pair in zip(layer.k.tensors(), layer.v.tensors()) for t in pair) for layer in layers]
        return cls(tensors, first.n_slots, first.head_dim, first.n_slots * first.head_dim, first.n_head,
                   first.head_dim, layers)

    @classmethod
    def of_views(cls, views):
        """
        Of keys and values of each layer, pairs of views (n_slots, H, D) with the same strides, side by side in D: those
        of `kvcache.openppl.views` in float32, whatever the order of the cache's axes is.
        """
        k = views[0][0]
        for each in (t for pair in views for t in pair):
            if each.dtype is not k.dtype or k.dtype not in (torch.float32, torch.bfloat16) or not each.is_cpu or (
                    (each.shape, each.stride()) != (k.shape, k.stride()) or each.stride(2) != 1):
                raise ValueError("keys and values of all layers must be views (slots, heads, head_dim) with the same "
                                 f"strides, float32 or bfloat16 on the CPU; one is {tuple(each.shape)} {each.dtype} "
                                 f"with strides {each.stride()}")
        return cls(views, len(k), k.stride(0), k.stride(1), *k.shape[1:])

    @classmethod
    def of_tuples(cls, kv_cache):
        """Of a list of tuples (k_cache, v_cache, ...), contiguous float32 (B, H, n_slots, D) on the CPU."""
        B, H, n_slots, D = kv_cache[0][0].shape
        return cls([tuple(layer[:2]) for layer in kv_cache], max(0, B * H - H + 1) * n_slots, D, n_slots * D, H, D)


@dataclass(frozen=True)
class InputMetadata:
    """
    The sequences of one step, whose new tokens follow each other on one axis of N tokens.

    query_lens: how many new tokens each sequence brings, at least 1; they are at consecutive positions, and their sum
    is N. runs: the `Runs` of each sequence, with the new tokens' own positions and all that these see. wanted: the
    rows, of N, whose logits are wanted, int64 (W,), ascending; None for the last row of each sequence. next_tokens: for
    several steps of one token of each sequence in one call; the `Runs` have room for all of them.

    Where runs change between two steps, the second one has a new object. ValueError if `wanted` does not fit.
    """
    query_lens: list
    runs: list
    wanted: np.ndarray | None = None
    next_tokens: 'NextTokens | None' = None

    def __post_init__(self):
        rows = self.wanted
        if rows is not None and not (isinstance(rows, np.ndarray) and rows.dtype == np.int64 and rows.ndim == 1 and (
                not len(rows) or 0 <= rows[0] and rows[-1] < sum(self.query_lens) and (np.diff(rows) > 0).all())):
            raise ValueError(f"wanted must be an int64 array (W,) of row numbers from 0 to {sum(self.query_lens) - 1} "
                             f"in ascending order, not {rows!r}: sort them, and name each row once")


def step_slots(config, input_positions, metadata):
    """
    The slots of a step as arrays: (own, seq, position, slot). own: int64 (N,), the slot of each new token. The others
    are int64 (K,), all keys that the new tokens see, their own included: the number of the sequence in this step, in
    ascending order, the position, the slot. ValueError if a sequence has no slot for a position that is seen.
    """
    n_new, tables = np.array(metadata.query_lens), [runs.table[:runs.n] for runs in metadata.runs]
    last = n_new.cumsum() - 1
    end = input_positions[last] + 1
    first = np.maximum(end - n_new - config.window + 1, config.n_sink) if config.window else np.zeros_like(end)
    of_run = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    position, slot, n = np.concatenate(tables).T
    parts = [(np.maximum(position, first[of_run]), np.minimum(position + n, end[of_run]))]
    if config.n_sink:
        parts.insert(0, (position, np.minimum(np.minimum(position + n, config.n_sink), end[of_run])))
    found = []
    for low, high in parts:
        n_keys = np.maximum(high - low, 0)
        step = np.arange(n_keys.sum()) - np.repeat(n_keys.cumsum() - n_keys, n_keys)  # 0, 1, ... within each run
        found.append((np.repeat(of_run, n_keys), np.repeat(low, n_keys) + step,
                      np.repeat(slot + low - position, n_keys) + step))
    seq, position, slot = (np.concatenate(each) for each in zip(*found)) if len(found) > 1 else found[0]
    if len(found) > 1:
        order = seq.argsort(kind='stable')
        seq, position, slot = seq[order], position[order], slot[order]
    n_keys = np.bincount(seq, minlength=len(tables))
    n_seen = end - first + np.minimum(config.n_sink, first)
    if (n_keys != n_seen).any():
        number = int((n_keys != n_seen).argmax())
        raise ValueError(f"sequence number {number} of this step has slots for {n_keys[number]} of {n_seen[number]} "
                         "positions that its new tokens see: its runs must have all of them")
    # the new tokens' own positions are the last ones of each sequence
    own = np.repeat(n_keys.cumsum() - 1 - last, n_new) + np.arange(len(input_positions))
    return slot[own], seq, position, slot


class NextTokens:
    """
    How steps follow each other in one call of an executor: behind each one the tokens of the next one are drawn from
    its logits (B, vocab_size). vLLM calls it multi-step scheduling.

    draw: a `kernel.building.CFunction`. All threads of the compiled step call it at the same time, each with the
    address of the array `data`, the address of the logits, the address of the row of tokens to write, the number of the
    thread, and how many threads there are. A call draws the thread's share of the tokens. If any call returns 0, no
    step follows. It must not raise. kept: what `data` has addresses of.
    drawings: the same for an executor on another device, a `serving.sampler.Drawing` for each sequence; None where only
    `draw` says how tokens are drawn. stop_soon, until: no step begins once stop_soon[0] is 1, or after this time, in
    nanoseconds of `kernel.threads.nanoseconds`; `draw` knows both.
    tokens: int64 (n + 1, B), contiguous, for n steps at most. Row 0 is given; row i + 1 is drawn behind step i.
    limits: int64 (B,), how many tokens each sequence may draw, for an executor that `ends_rows`: sequences may then
    draw different numbers of tokens. Other executors end with the first of them, and so do all if limits is None.
    n_drawn: how many rows were drawn so far; they have -1 behind the last token of a sequence that has drawn fewer.
    ended: was the last step one that no other follows?
    texts: the tokens of each sequence with the newest, lists that may be kept to be recognised; for `decode.drafts`.
    logits: float32 (n, B, vocab_size) for those of all steps, or None. With it an executor makes several steps in a
    call only if it can write them.
    n_written: in a cache, so many tokens of each sequence were written, at most; some may have been given up.
    n_steps: the largest number of steps of the next call. A call makes one step, and draws nothing, if it has more
    sequences than one pass takes, if `wanted` names rows, or if the executor is PyTorch's.
    """
    __slots__ = ('draw', 'data', 'kept', 'drawings', 'stop_soon', 'until', 'tokens', 'limits', 'texts', 'logits',
                 'n_drawn', 'n_written', 'ended', 'n_steps')

    def __init__(self, draw, data, tokens, kept=None, drawings=None, stop_soon=(0,), until=2**63 - 1, limits=None,
                 texts=None):
        if tokens.dtype != np.int64 or tokens.ndim != 2 or len(tokens) < 2 or not tokens.flags.c_contiguous:
            raise ValueError(f"tokens must be a contiguous int64 array (n + 1, B) for n >= 1 steps, not {tokens.dtype} "
                             f"{tokens.shape} with strides {tokens.strides}: make it with np.empty")
        self.draw, self.data, self.kept, self.drawings, self.stop_soon = draw, data, kept, drawings, stop_soon
        self.until, self.tokens, self.limits, self.texts, self.logits = until, tokens, limits, texts, None
        self.n_drawn, self.n_written, self.ended, self.n_steps = 0, 0, False, 1

    @property
    def n_left(self):
        """How many rows may still be drawn."""
        return len(self.tokens) - 1 - self.n_drawn

    @property
    def counts(self):
        """How many tokens each sequence has drawn so far, a list."""
        return (self.tokens[1:self.n_drawn + 1] >= 0).sum(0).tolist()

    def check_steps(self):
        """ValueError unless the next n_steps rows can be drawn."""
        if not self.n_left:
            raise ValueError(f"all {self.n_drawn} rows of these `NextTokens` were drawn: make new ones, whose first "
                             "row is the last that was drawn")
        if not 1 <= self.n_steps <= self.n_left:
            raise ValueError(f"n_steps must be between 1 and {self.n_left}, the number of rows that are left to draw, "
                             f"not {self.n_steps}: set it before the step")

    def check(self, input_ids):
        """ValueError unless a step of input_ids can write the next n_steps rows."""
        self.check_steps()
        if input_ids.data_ptr() != self.tokens[self.n_drawn].ctypes.data:
            raise ValueError(f"input_ids are not row {self.n_drawn} of tokens: give tokens[{self.n_drawn}] itself, "
                             "not a copy")

    def is_late(self):
        """Is it time to look for other work?"""
        return bool(self.stop_soon[0]) or nanoseconds() >= self.until

    def note(self, n, ended):
        """Note that n rows more were drawn, and whether the last of these steps is one that no other follows."""
        new = self.tokens[self.n_drawn + 1:self.n_drawn + n + 1]
        for drawing, drawn in zip(self.drawings, new.T):
            if drawing.counts is not None:
                np.add.at(drawing.counts, drawn[drawn >= 0], 1)
        self.n_drawn, self.ended = self.n_drawn + n, ended

    def draw_from(self, logits):
        """Draw the next row, from logits float32 (B, vocab_size), contiguous, on the CPU."""
        row = self.tokens[self.n_drawn + 1]
        self.ended = not self.draw.call(self.data.ctypes.data, logits.data_ptr(), row.ctypes.data, 0, 1)
        self.n_drawn += 1
