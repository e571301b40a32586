"""Drafts for tests, executors that make rounds whatever these cost, and what an engine gives its sequences."""
import random
from collections import defaultdict

import numpy as np
import torch
from tiny_models import VOCAB

import decode
from decode.cpu import CPUExecutor
from decode.speculative import Drafting, Pace
from kvcache import PagePool, make_layers


def model_draft(model, n_pages=64, page_size=4):
    """The `ModelDraft` of a model, with a pool of so many pages."""
    c = model.config
    pool = PagePool(n_pages, page_size, c.window, c.n_sink)
    return decode.draft_of(model, 'another model', pool, make_layers(model, n_pages * page_size))


class AnyPace(Pace):
    """Asks for k proposals in each round, or for any number up to 6 if it is None, now and then for none."""
    is_plain_next = False

    def __init__(self, k=None):
        self.fixed, self.random, self.rounds = k, random.Random(0), []

    @property
    def k(self):
        return self.random.choice((0, 1, 1, 2, 3, 4, 6)) if self.fixed is None else self.fixed

    def record_plain(self, ns, n_steps):
        pass

    def record_round(self, n, n_drawn, ns_draft, ns_chunk, ended=False):
        self.rounds.append((n, n_drawn, ended))


class AnyDraft:
    """Proposes any tokens, or `token`; calls `then(n_threads)` before."""
    name = 'any tokens'

    def __init__(self, token=None, then=lambda n_threads: None):
        self.random, self.token, self.then = np.random.default_rng(0), token, then

    def hold(self, layers):
        pass

    def refresh(self):
        pass

    def propose(self, batch, k, n_threads):
        self.then(n_threads)
        shape = k, len(batch.sequences)
        return self.random.integers(0, VOCAB, shape) if self.token is None else np.full(shape, self.token)


def drafting(model, draft, weights='float32', k=None, threads=1):
    """(a `Drafting` with `AnyPace`, a function that returns its rounds: proposals, tokens of a sequence, ended?)"""
    executor = Drafting(CPUExecutor(model, weights, threads), 'ngram' if isinstance(draft, AnyDraft) else draft)
    executor.paces = defaultdict(lambda: AnyPace(k))
    if isinstance(draft, AnyDraft):
        executor.draft = draft
    return executor, lambda: [each for pace in executor.paces.values() for each in pace.rounds]


def given(engine, requests):
    """
    Of each sequence of requests (prompt, number of new tokens, settings): its tokens, why it has ended, and the logits
    that it drew from.
    """
    sequences = [s for prompt, n, how in requests for s in engine.add(prompt, n, **how)]
    logits = {s: [] for s in sequences}
    while any(not s.ended for s in sequences):
        for s, drawn in engine.step():
            if drawn.logits is not None:
                logits[s].append(drawn.logits)
    return [(s.tokens, s.ended, torch.cat(logits[s]).numpy().tobytes() if logits[s] else b'') for s in sequences]
