"""
Several steps of a few sequences in one call, which draw their tokens as `model.sample_token` does.

The noise of a token is drawn by torch's generators, before the call, in the order in which single steps draw it; the
rest of a draw is compiled (`kernel.sampling`). A generator that has drawn noise for steps that were not made is set
back.
"""
import numpy as np
import torch

from decode.kernel import sampling as table
from decode.kernel.threads import LINE, aligned, n_cores, nanoseconds
from decode.metadata import NextTokens

PAUSE = 0.04          # seconds that a call takes at most, but for its last step
MOST_STEPS = 64       # of a call
MOST_NOISE = 2**24    # numbers of noise of a call
BETWEEN_STATES = 2**12  # numbers of noise between two states of the generators that are kept, at least


class StepsAhead:
    """
    Draws for sequences of one `kvcache.base.BaseCache`. temperature, top_k, top_p: see `model.sample_token`. stop: the
    token that ends a sequence, or None. noise: a function (out (B, vocab_size), sequences, live) that fills `out` with
    the noise of a step, by the generators of the sequences or, if they have none, by `generator`; None is torch's own.

    n_steps: how many steps the next call asks for: more after calls that were over soon, fewer after slow ones.
    """

    def __init__(self, cache, temperature, top_k, top_p, stop, noise, generator):
        self.cache, self.vocab_size, self.stop, self.noise = cache, cache.model.config.vocab_size, stop, noise
        self.settings = [float(temperature), top_k or 0, 1.0 if top_p is None else top_p, 0.0, 0.0, 0.0, 1.0]
        self.scratch, self.n_steps = np.empty((n_cores(), table.N_SCRATCH, self.vocab_size)), 4
        self.generator = generator or torch.default_generator
        self.n_noise, self.again = 0, None  # of the last call: steps that have noise; sets the generators behind n

    def draw(self, sequences, live, newest, ended, most):
        """
        Up to `most` tokens of each sequence behind newest (B, 1): a list of (B, 1), one for each step. A call ends when
        a sequence draws the stop token that had not ended. live, ended: the row of each in the batch, and a bool.
        """
        B = len(sequences)
        n = max(self.n_steps, 1 + self.cache.n_proposals(B, together=True))
        n = min(n, most, max(1, MOST_NOISE // (B * self.vocab_size)))
        noise = self.draw_noise(n, sequences, live)
        tokens = np.empty((n + 1, B), np.int64)
        tokens[0] = newest.flatten()
        began = nanoseconds()
        described, arrays = self.table(B, ended, noise)
        described[table.UNTIL] = until = began + int(1e9 * PAUSE)
        steps = NextTokens(table.DRAW, described, tokens, (arrays, noise), until=until,
                           texts=[s.tokens for s in sequences])
        try:
            self.cache.decode_steps([s.handle for s in sequences], steps)
        finally:
            self.set_back(steps.n_drawn)
        seconds = 1e-9 * (nanoseconds() - began)
        if seconds >= PAUSE:
            self.n_steps = max(1, steps.n_drawn)
        elif 2 * steps.n_drawn > n and seconds < PAUSE / 2:
            self.n_steps = max(self.n_steps, min(2 * n, MOST_STEPS))
        return list(torch.from_numpy(tokens[1:steps.n_drawn + 1, :, None]))

    def draw_noise(self, n, sequences, live):
        """The noise of n steps, float32 (n, B, vocab_size), or None if nothing is drawn by chance."""
        self.n_noise, self.again = n, None
        if self.settings[0] == 0:
            return None
        own = [s.generator for s in sequences]
        generators = own if own[0] is not None else [self.generator]
        noise, states = torch.empty(n, len(sequences), self.vocab_size), []
        every = max(1, BETWEEN_STATES // noise[0].numel())
        for step, of_step in enumerate(noise):
            if step % every == 0:
                states.append([g.get_state() for g in generators])
            self.noise(of_step, sequences, live)

        def again(n):
            for generator, state in zip(generators, states[n // every]):
                generator.set_state(state)
            for of_step in noise[n - n % every:n]:
                self.noise(of_step, sequences, live)
        self.again = again
        return noise

    def set_back(self, n):
        """Leave the generators as if only the first n steps of the last call had been drawn."""
        if self.again and n < self.n_noise:
            with torch.inference_mode():  # the noise is of it
                self.again(n)
        self.n_noise = n

    def table(self, B, ended, noise):
        """(the table of `kernel.sampling` for B samples, the arrays that it has addresses of)."""
        starts = np.cumsum([0, *(self.stop is not None and not each for each in ended)])
        arrays = {
            table.ROWS: np.arange(B), table.SETTINGS: np.array([self.settings] * B), table.SEEDS: np.zeros(B, np.int64),
            table.NUMBERS: np.zeros(B, np.int64), table.CHANGES: np.zeros((B, table.N_CHANGES), np.int64),
            table.STOP_STARTS: starts, table.STOPS: np.full(B, -1 if self.stop is None else self.stop),
            table.SCRATCH: self.scratch, table.STOP_SOON: aligned(LINE, np.int64)}
        described = table.table_of(self.vocab_size, arrays)
        described[table.NOISE] = 0 if noise is None else noise.data_ptr()
        return described, arrays
