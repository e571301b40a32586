"""How the rows of a step draw their tokens on the device: what is written before a call, and read back after steps."""
from typing import NamedTuple

import numpy as np
import torch

from decode.gpu.inputs import IN_PROMPT, MOST_BIASES, MOST_STEPS, MOST_STOPS, N_SETTINGS, Draws

N_LANDINGS = 2  # that are under way at a time


class Landing(NamedTuple):
    """
    What some steps have drawn, once `event` is reached: drawn, int64 (n, S), -1 for rows that had ended; left and
    broken, int32 (S,), see `Draws`, behind the last of the steps.
    """
    event: object
    drawn: np.ndarray
    left: np.ndarray
    broken: np.ndarray


def fits(settings):
    """Can the device draw by these `decode.draw.DrawSettings`? There are limits on what changes logits."""
    return len(settings.stops) <= MOST_STOPS and len(settings.bias_tokens) <= MOST_BIASES


class DrawTable:
    """draws: `Draws` of up to n_rows rows, on the device."""

    def __init__(self, n_rows, vocab_size, device, queue):
        def empty(*shape, dtype=torch.int32):
            return torch.zeros(shape, dtype=dtype, device=device)
        self.draws = Draws(
            empty(n_rows, N_SETTINGS, dtype=torch.float64), empty(n_rows, dtype=torch.int64), empty(n_rows),
            empty(n_rows), empty(n_rows), empty(n_rows, MOST_STOPS) - 1, empty(n_rows, MOST_BIASES) - 1,
            empty(n_rows, MOST_BIASES, dtype=torch.float32), empty(n_rows, vocab_size),
            empty(MOST_STEPS, n_rows, dtype=torch.int64), empty(n_rows), empty(n_rows))
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
            self.write(d.settings, [each.values for each in settings], np.float64)
            self.write(d.seeds, np.array([each.seed for each in settings], np.uint64).view(np.int64), np.int64)
            self.write(d.min_tokens, [min(each.min_tokens, 2**31 - 1) for each in settings], np.int32)
            self.write(d.stops, padded([each.stops for each in settings], MOST_STOPS), np.int32)
            self.write(d.bias_tokens, padded([each.bias_tokens for each in settings], MOST_BIASES), np.int32)
            self.write(d.biases, padded([each.biases for each in settings], MOST_BIASES), np.float32)
            self.settings = settings
        self.write(d.numbers, [s.n_drawn for s in sequences], np.int32)
        for row, s in enumerate(sequences):
            if s.settings.penalised:
                s.settings.count(s.tokens[len(s.tokens) - s.n_drawn:])
                counts = s.settings.counts + np.where(s.settings.in_prompt, IN_PROMPT, 0)
                d.counts[row] = torch.from_numpy(counts.astype(np.int32))
        d.left[:R] = 0
        self.write(d.left, limits, np.int32)
        d.step[:R], d.broken[:R] = 0, 0

    def write(self, target, values, dtype):
        values = np.asarray(values, dtype)
        target[:len(values)] = torch.from_numpy(values).to(target.device)

    def land(self, first, end, S):
        """Begin to read what the steps first to end - 1 of this call have drawn for S rows: a `Landing`."""
        drawn, of_rows = self.landings[self.next_landing]
        self.next_landing = (self.next_landing + 1) % N_LANDINGS
        n, d = end - first, self.draws
        event = self.queue.land([(drawn[:n], d.drawn[first:end]), (of_rows[0], d.left), (of_rows[1], d.broken)])
        return Landing(event, drawn[:n, :S].numpy(), of_rows[0, :S].numpy(), of_rows[1, :S].numpy())


def padded(rows, n):
    """Rows of up to n numbers as an array (len(rows), n), with -1 behind them."""
    out = np.full((len(rows), n), -1.0)
    for row, values in zip(out, rows):
        row[:len(values)] = values
    return out
