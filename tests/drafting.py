"""Decoders that speculate whatever it costs, and drafts for tests."""
import random

import numpy as np

from decode.speculative import Pace, SpeculativeDecoder


class AnyPace(Pace):
    """Asks for so many proposals in each round, or for any number up to 6 if most is None; now and then for none."""

    def __init__(self, k=None):
        self.fixed, self.random, self.rounds = k, random.Random(0), []

    @property
    def k(self):
        return self.fixed if self.fixed is not None else self.random.choice((0, 1, 1, 2, 3, 4, 6))

    times_plain = False

    def record_plain(self, ns, n_steps):
        pass

    def record_round(self, k, n, n_drawn, ns_draft, ns_chunk, ended=False):
        self.rounds.append((k, n, n_drawn, ended))


class Speculating(SpeculativeDecoder):
    """A `SpeculativeDecoder` with `AnyPace`. draft: of the class, or an object with `propose` and `draws`."""
    k = None

    def __init__(self, model, draft='int4', weights='float32', threads=1):
        super().__init__(model, draft if isinstance(draft, str) or hasattr(draft, 'cache') else 'ngram', weights,
                         threads)
        if not isinstance(draft, str):
            self.draft = draft

    def pace(self, batch_size, together):
        return self.paces.setdefault((batch_size, together), AnyPace(self.k))

    @property
    def rounds(self):
        return [each for pace in self.paces.values() for each in pace.rounds]


class AnyDraft:
    """Proposes any tokens; calls `then(rounds)` before."""
    draws, name = False, 'any tokens'

    def __init__(self, vocab_size, then=lambda rounds: None):
        self.random, self.vocab_size, self.then = np.random.default_rng(0), vocab_size, then

    def refresh(self):
        pass

    def propose(self, tokens, rounds):
        self.then(rounds)
        tokens[1:] = self.random.integers(0, self.vocab_size, tokens[1:].shape)
        return len(tokens) - 1
