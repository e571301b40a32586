"""How the rows of a step draw their tokens on the device: what is written before a call, and read back after steps."""
from typing import NamedTuple

import numpy as np
import torch

# columns of the settings of a draw: `decode.draw.NAMES`, and 1 if the row has biases
TEMPERATURE, TOP_K, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION, BIASED, N_SETTINGS = range(9)
# what the mark of a token has beside its count
IS_STOP, IN_PROMPT = 2**29, 2**30
MOST_STEPS = 64  # of a call
N_LANDINGS = 2   # that are under way at a time


class Draws(NamedTuple):
    """
    How R rows draw their next tokens.

    settings: float64 (R, N_SETTINGS). seeds: int64 (R,), their bits. numbers: int32 (R,), how many tokens the row's
    sequence has drawn. left: int32 (R,), how many it may draw; with 0 it has ended. min_tokens: int32 (R,). biases:
    float32 (R, vocab_size), read only if the row is BIASED. marks: int32 (R, vocab_size), of each token how often the
    row has drawn it, which is kept only if a penalty is set, and IS_STOP and IN_PROMPT. drawn: int64 (MOST_STEPS, R),
    the result: row number `step` of it is written, with -1 for rows that have ended. step: int32 (R,), each row's own.
    broken: int32 (R,), 1 where logits are not numbers.
    """
    settings: torch.Tensor
    seeds: torch.Tensor
    numbers: torch.Tensor
    left: torch.Tensor
    min_tokens: torch.Tensor
    biases: torch.Tensor
    marks: torch.Tensor
    drawn: torch.Tensor
    step: torch.Tensor
    broken: torch.Tensor

    @classmethod
    def empty(cls, n_rows, vocab_size, device):
        def zeros(*shape, dtype=torch.int32):
            return torch.zeros(shape, dtype=dtype, device=device)
        return cls(zeros(n_rows, N_SETTINGS, dtype=torch.float64), zeros(n_rows, dtype=torch.int64), zeros(n_rows),
                   zeros(n_rows), zeros(n_rows), zeros(n_rows, vocab_size, dtype=torch.float32),
                   zeros(n_rows, vocab_size), zeros(MOST_STEPS, n_rows, dtype=torch.int64), zeros(n_rows),
                   zeros(n_rows))

    def rows(self, n):
        """Of the first n rows."""
        return Draws(*(t[:, :n] if t is self.drawn else t[:n] for t in self))


class Landing(NamedTuple):
    """
    What some steps have drawn, once `event` is reached: drawn, int64 (n, S), -1 for rows that had ended; left and
    broken, int32 (S,), see `Draws`, behind the last of the steps.
    """
    event: object
    drawn: np.ndarray
    left: np.ndarray
    broken: np.ndarray


class DrawTable:
    """draws: `Draws` of up to n_rows rows, on the device."""

    def __init__(self, n_rows, vocab_size, device, queue):
        self.draws = Draws.empty(n_rows, vocab_size, device)
        self.queue, self.settings, self.next_landing = queue, None, 0
        # each landing has memory of its own, which is not written again before it was waited for
        self.landings = [(queue.pinned(MOST_STEPS, n_rows, dtype=torch.int64),
                          queue.pinned(2, n_rows, dtype=torch.int32))
                         for _ in range(N_LANDINGS)]

    def load(self, sequences, limits, R):
        """Have the rows draw as these sequences do, at most limits (S,) tokens each. The rows up to R are padding."""
        d, settings = self.draws, [s.settings for s in sequences]
        if settings != self.settings:  # the same objects have the same settings
            self.settings = None  # until all is written
            self.write(d.settings, [[*each.values, len(each.biases) > 0 or each.allowed is not None]
                                     for each in settings], np.float64)
            self.write(d.seeds, np.array([each.seed for each in settings], np.uint64).view(np.int64), np.int64)
            self.write(d.min_tokens, [min(each.min_tokens, 2**31 - 1) for each in settings], np.int32)
            self.put(d.marks, [each.stops for each in settings], [[IS_STOP] * len(each.stops) for each in settings])
            self.put(d.biases, [each.bias_tokens for each in settings], [each.biases for each in settings])
            self.settings = settings
        self.write(d.numbers, [s.n_drawn for s in sequences], np.int32)
        for row, s in enumerate(sequences):
            if s.settings.penalised:
                s.settings.count(s.tokens[len(s.tokens) - s.n_drawn:])
                marks = s.settings.counts + np.where(s.settings.in_prompt, IN_PROMPT, 0)
                marks[s.settings.stops] += IS_STOP
                d.marks[row] = torch.from_numpy(marks.astype(np.int32))
            if s.settings.allowed is not None:
                biases = np.where(s.settings.forbidden(), -np.inf, 0.0)
                biases[s.settings.bias_tokens] += s.settings.biases
                d.biases[row] = torch.from_numpy(biases).to(d.biases)
        d.left[:R] = 0
        self.write(d.left, limits, np.int32)
        d.step[:R], d.broken[:R] = 0, 0

    def write(self, target, values, dtype):
        values = np.asarray(values, dtype)
        target[:len(values)] = torch.from_numpy(values).to(target.device)

    def put(self, target, tokens, values):
        """Set the numbers of these tokens in a table (R, vocab_size), lists or arrays for each row, and others to 0."""
        rows = np.repeat(np.arange(len(tokens)), [len(each) for each in tokens])
        at = (torch.from_numpy(each).to(target.device) for each in (rows, np.concatenate(tokens).astype(np.int64)))
        target[:len(tokens)] = 0
        target[tuple(at)] = torch.from_numpy(np.concatenate(values)).to(target)

    def land(self, first, end, S):
        """Begin to read what the steps first to end - 1 of this call have drawn for S rows: a `Landing`."""
        drawn, of_rows = self.landings[self.next_landing]
        self.next_landing = (self.next_landing + 1) % N_LANDINGS
        n, d = end - first, self.draws
        event = self.queue.land([(drawn[:n], d.drawn[first:end]), (of_rows[0], d.left), (of_rows[1], d.broken)])
        return Landing(event, drawn[:n, :S].numpy(), of_rows[0, :S].numpy(), of_rows[1, :S].numpy())
