"""
What the host writes for the device before a call, in one copy; what stays there from call to call; what it reads back.
"""
from collections import namedtuple

import numpy as np
import torch

BIASED, N_SETTINGS = 7, 8  # columns of the settings of a draw: `decode.draw.NAMES`, and 1 if the row has biases
# what the mark of a token has beside its count
IS_STOP, IN_PROMPT = 2**29, 2**30
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


class CallTable:
    """inputs: `StepInputs` of n_rows rows on the device. host: FIELDS as arrays, which `send` writes there."""

    def __init__(self, n_rows, vocab_size, slot_table, queue):
        self.queue, self.settings = queue, None
        self.memory, self.host_memory = (torch.zeros(n_rows * ROW_BYTES, dtype=torch.uint8, device=device)
                                         for device in (slot_table.device, 'cpu'))
        self.host = {name: t.numpy() for name, t in zip(FIELDS, fields_of(self.host_memory))}
        biases, marks = (torch.zeros(n_rows, vocab_size, dtype=dtype, device=slot_table.device)
                         for dtype in (torch.float32, torch.int32))
        drawn = queue.pinned(torch.zeros(MOST_STEPS, n_rows, dtype=torch.int64, device='cpu'))
        self.inputs = StepInputs(*fields_of(self.memory), slot_table, biases, marks, drawn)

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
