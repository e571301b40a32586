"""
The tables of a GPU step: which sequence has which row of them, and which of its slots are in which columns; what the
host writes before a call, in one copy, what stays on the device from call to call, and what is read back.
"""
from collections import OrderedDict, namedtuple

import numpy as np
import torch

from decode.batch import slots_between

TILE = 128    # keys that attention reads at a time, or a part of it; tiles begin at multiples of it
SMALL_TILE = 32  # the same, where many small programs are faster
SPLIT = 64    # keys that attention adds up at a time, or in long texts a multiple of it; splits begin at multiples
SPLITS = 32   # of the keys of a row, at most; a window may begin and end inside of one
AHEAD = 64    # later positions of a sequence whose slots are written with those of its new ones
BIASED, N_SETTINGS = 7, 8  # columns of the settings of a draw: `decode.draw.SETTING_NAMES`, and 1 if the row has biases
IS_STOP, IN_PROMPT = 2**29, 2**30  # what the mark of a token has beside its count
MOST_STEPS = 64  # of a call
# `drawn` has a token; a token + STOPS where it ends its text; NOTHING where the row had ended before; BROKEN where a
# logit is no number
NOTHING, BROKEN, STOPS = -1, -2, 2**40

# {name: (dtype, numbers of a row)} of what the host writes before a call, into one block of memory
FIELDS = {'tokens': (torch.int64, 1), 'positions': (torch.int64, 1), 'wanted': (torch.int64, 1),
          'seeds': (torch.int64, 1), 'settings': (torch.float64, N_SETTINGS), 'sequences': (torch.int32, 1),
          'min_tokens': (torch.int32, 1), 'numbers': (torch.int32, 1), 'step': (torch.int32, 1),
          'left': (torch.int32, 1), 'broken': (torch.int32, 1)}
ROW_BYTES = sum(dtype.itemsize * n for dtype, n in FIELDS.values())


class Columns(namedtuple('Columns', 'sinks ring n_columns n_splits')):
    """
    A row of the slot table, int32 (n_columns,), has the slots of one sequence. Position p is in column p. If the model
    has a window, positions before n_sink are in the first columns, and the others take turns in the `ring` columns
    from `sinks` on: p is in column sinks + p % ring. Both are multiples of TILE: a tile of keys is a piece of the row.

    n_splits: of the keys of a row, at most; the sinks are one of their own.
    """

    @classmethod
    def of(cls, config, most_new):
        """most_new: the most new positions of a sequence that are in the table at the same time."""
        c = config
        n_splits = min(-(-(c.window or c.block_size) // SPLIT), SPLITS)
        if not c.window:
            return cls(0, 0, -(-c.block_size // TILE) * TILE, n_splits)
        sinks, ring = (-(-n // TILE) * TILE for n in (c.n_sink, c.window + most_new + TILE))
        return cls(sinks, ring, sinks + ring, n_splits + 1 + (c.n_sink > 0))

    def column(self, position, n_sink):
        """Of integers, or integer arrays or tensors."""
        if not self.ring:
            return position
        in_ring = self.sinks + position % self.ring
        return in_ring + (position - in_ring) * (position < n_sink)


class Row:
    """
    A row of the tables on the device, and what is there of a sequence: the slots of its `Runs` for the sinks and all
    later tokens up to position until - 1; and its marks and biases. marked: (its settings, how many tokens it had
    drawn) when these were written, None if that is not known.
    """
    __slots__ = 'number', 'sequence', 'runs', 'until', 'marked'

    def __init__(self, number, sequence):
        self.number, self.sequence, self.runs, self.until, self.marked = number, sequence, None, 0, None


class StepInputs(namedtuple('StepInputs', [*FIELDS, 'slot_table', 'biases', 'marks', 'drawn'])):
    """
    What R rows of a step read, and how they draw. Types are those of FIELDS.

    tokens, positions: of the new tokens. wanted: the rows whose logits are wanted, in a step that does not draw.
    sequences: the row of the tables of each new token's sequence, -1 for padding.
    seeds: their bits. settings: (R, N_SETTINGS). min_tokens. numbers: how many tokens the row's sequence has drawn.
    step: each row's own, from 0 on in a call. left: how many it may draw; with 0 it has ended. broken: 1 where logits
    are not numbers, until the next `send`.
    slot_table: int32 (n_rows, n_columns), see `Columns`. biases: float32 (n_rows, vocab_size), which are read if the
    row is BIASED. marks: int32 (n_rows, vocab_size), of each token how often the sequence has drawn it, and IS_STOP and
    IN_PROMPT. drawn: int64 (MOST_STEPS, R), the result, in memory of the host: row number `step` is written.
    """

    def rows(self, n):
        """Of the first n rows."""
        return StepInputs(*(t[:n] for t in self[:len(FIELDS)]), *self[len(FIELDS):-1], self.drawn[:, :n])


def fields_of(memory):
    """The tensors of FIELDS in uint8 memory (n_rows * ROW_BYTES,)."""
    n_rows = len(memory) // ROW_BYTES
    parts = memory.split([n_rows * n * dtype.itemsize for dtype, n in FIELDS.values()])
    return [part.view(dtype).view(n_rows, n).squeeze(1) for part, (dtype, n) in zip(parts, FIELDS.values())]


class Tables:
    """
    inputs: `StepInputs` of n_rows rows on the device. columns: of their slot table. host: FIELDS as arrays, which
    `send` writes to the device. A sequence only goes on while it has the same `Runs`: pools make others when slots
    change, and when it is cut. It keeps its row from step to step, until others need it.
    """

    def __init__(self, config, n_rows, device, queue):
        self.config, self.queue, self.n_rows, self.settings = config, queue, n_rows, None
        self.row_of = OrderedDict()  # {id of a sequence: its `Row`}, the least recently used first
        self.columns, V = Columns.of(config, max(n_rows, AHEAD)), config.vocab_size
        self.memory, self.host_memory = (torch.zeros(n_rows * ROW_BYTES, dtype=torch.uint8, device=device)
                                         for device in (device, 'cpu'))
        self.host = {name: t.numpy() for name, t in zip(FIELDS, fields_of(self.host_memory))}
        tables = [torch.zeros(n_rows, n, dtype=dtype, device=device) for n, dtype in (
            (self.columns.n_columns, torch.int32), (V, torch.float32), (V, torch.int32))]
        drawn = queue.pinned(torch.zeros(MOST_STEPS, n_rows, dtype=torch.int64, device='cpu'))
        self.inputs = StepInputs(*fields_of(self.memory), *tables, drawn)

    def rows(self, sequences):
        """The `Row` of each of up to n_rows sequences."""
        for s in sequences:
            if id(s) not in self.row_of:
                is_full = len(self.row_of) == self.n_rows
                self.row_of[id(s)] = Row(self.row_of.popitem(last=False)[1].number if is_full else len(self.row_of), s)
            self.row_of.move_to_end(id(s))
        return [self.row_of[id(s)] for s in sequences]

    def update(self, rows, starts, ends):
        """
        Have the slots in the table that tokens at the positions starts to ends - 1 see, int64 (S,), of the sequences
        with these `Row`s. `Refused` if a position that is seen has no slot; then nothing is known of these rows.
        """
        for row in rows:
            if row.runs is not row.sequence.runs:
                row.runs, row.until = row.sequence.runs, 0
        until, c, sequences = np.array([row.until for row in rows]), self.config, [row.sequence for row in rows]
        if (until < ends).any():
            # the slots of later positions are written too, if the runs have them: the next steps then write none
            reach = np.array([row.runs.next[0] if row.runs.next else 0 for row in rows])
            ends = np.maximum(ends, np.minimum(reach, np.minimum(starts + AHEAD, min(c.max_positions, 2**62))))
            first = np.maximum(starts - c.window + 1, 0) if c.window else 0 * starts
            sinks = np.where(until, 0, np.minimum(c.n_sink, ends))
            first = np.maximum(np.where(until, until, first), sinks)
            for row in rows:
                row.until = 0
            parts = [(0 * sinks, sinks)] * bool(sinks.any()) + [(first, ends)]
            seq, position, slot = np.concatenate([slots_between(sequences, *part) for part in parts], axis=1)
            at = np.array([row.number for row in rows])[seq], self.columns.column(position, c.n_sink)
            self.queue.put(self.inputs.slot_table, np.ravel_multi_index(at, self.inputs.slot_table.shape), slot)
            for row, end in zip(rows, np.maximum(until, ends).tolist()):
                row.until = end

    def send(self):
        """Write what is in `host` to the device. The host may change it at once."""
        self.queue.send(self.memory, self.host_memory)

    def step(self, rows, counts, tokens, positions, wanted=()):
        """The next `send` is of a step of sequences with these `Row`s, which bring so many of the tokens each."""
        host, n = self.host, len(tokens)
        host['tokens'][:n], host['positions'][:n], host['wanted'][:len(wanted)] = tokens, positions, wanted
        host['sequences'][:n], host['sequences'][n:] = np.repeat([row.number for row in rows], counts), -1

    def draw(self, rows, limits):
        """The next `send` is of rows that draw as these `Row`s' sequences do, at most `limits` tokens each."""
        host, n, settings = self.host, len(rows), [row.sequence.settings for row in rows]
        if settings != self.settings:  # the same objects have the same settings
            self.settings = None  # until all is written
            host['settings'][:n] = [[*s.values, len(s.biases) > 0 or s.allowed is not None] for s in settings]
            host['seeds'][:n] = np.array([each.seed for each in settings], np.uint64).view(np.int64)
            host['min_tokens'][:n] = [min(each.min_tokens, 2**31 - 1) for each in settings]
            self.settings = settings
        host['sequences'][:n], host['sequences'][n:] = [row.number for row in rows], -1
        host['numbers'][:n] = [row.sequence.n_drawn for row in rows]
        host['left'][:n], host['left'][n:] = limits, 0
        if new := [row for row in rows if row.marked != (row.sequence.settings, row.sequence.n_drawn)]:
            self.renew(new)
        for row in rows:
            s = row.sequence.settings
            if s.allowed is not None:  # a bitmap, which is another one for each draw
                biases = np.where(s.forbidden(), -np.inf, 0.0)
                biases[s.bias_tokens] += s.biases
                self.queue.send(self.inputs.biases[row.number], torch.from_numpy(biases))
            row.marked = None  # until the call has ended well: the device counts as it goes

    def renew(self, rows):
        """Write the marks and the biases of `Row`s, and 0 for all other tokens. Only penalties read the counts."""
        of_rows = [(row.number, row.sequence.settings) for row in rows]
        for table, new in (
                (self.inputs.marks, [(number, s.stop_ids, [IS_STOP] * len(s.stop_ids)) for number, s in of_rows]),
                (self.inputs.biases, [(n, s.bias_tokens, s.biases) for n, s in of_rows if len(s.biases)])):
            if new:  # biases of other rows are not read
                numbers, tokens, values = zip(*new)
                on_device = self.queue.pinned(torch.from_numpy(np.array(numbers))).to(table.device, non_blocking=True)
                table.index_fill_(0, on_device, 0)
                at = np.repeat(numbers, list(map(len, tokens))) * table.size(1) + np.concatenate(tokens)
                if len(at):
                    self.queue.put(table, at, np.concatenate(values))
        for row, sequence, s in [(row, row.sequence, row.sequence.settings) for row in rows]:
            if s.penalised:
                s.count(sequence.tokens[len(sequence.tokens) - sequence.n_drawn:])
                marks = s.counts + np.where(s.in_prompt, IN_PROMPT, 0)
                marks[s.stop_ids] += IS_STOP
                self.queue.send(self.inputs.marks[row.number], torch.from_numpy(marks))
