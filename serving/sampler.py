"""The next token of each sample of a step, by one compiled call for all rows."""
import math

import numpy as np

from serving.draws import N_SCRATCH, draw_rows, log_probabilities, penalise
from serving.request import Logprobs


class Drawing:
    """
    How one sample draws: its settings, its seed, and what changes its logits before. `add` is called with each token
    that it has generated.

    stop_ids: the tokens that end it, which are not drawn before min_tokens.
    """
    __slots__ = ('params', 'settings', 'seed', 'n_generated', 'stop_ids', 'min_tokens', 'penalises', 'counts',
                 'in_prompt')

    def __init__(self, request, index, stop_ids, vocab_size):
        p = self.params = request.params
        self.settings = p.temperature, min(p.top_k, vocab_size), p.top_p, p.min_p
        self.seed, self.n_generated = (request.seed + index) % 2**64, 0
        self.stop_ids, self.min_tokens = sorted(stop_ids), p.min_tokens
        self.penalises = bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1)
        if self.penalises:
            self.counts, self.in_prompt = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.bool_)
            self.in_prompt[request.prompt] = True

    def changes_logits(self):
        return self.penalises or bool(self.params.logit_bias) or self.holds_back()

    def holds_back(self):
        return self.n_generated < self.min_tokens and bool(self.stop_ids)

    def change(self, row):
        """Apply biases, min_tokens and penalties to a row of logits, in place, in the order of vLLM."""
        p = self.params
        for token, bias in p.logit_bias:
            row[token] += bias
        if self.holds_back():
            row[self.stop_ids] = -math.inf
        if self.penalises:
            penalise(row, self.counts, self.in_prompt, p.presence_penalty, p.frequency_penalty, p.repetition_penalty)

    def add(self, token):
        self.n_generated += 1
        if self.penalises:
            self.counts[token] += 1


class Sampler:
    """Draws tokens from logits, float32 (W, vocab_size), each row contiguous."""

    def __init__(self, vocab_size):
        self.scratch = np.empty((N_SCRATCH, vocab_size))
        self.drawings = []
        self.logprobs(np.zeros((1, vocab_size), np.float32), [0], 1)  # compiles, or loads what is compiled
        self.settings, self.seeds, self.tokens = np.zeros((1, 4)), np.zeros(1, np.uint64), np.zeros(1, np.int64)
        draw_rows(np.zeros((1, vocab_size), np.float32), np.zeros(1, np.int64), self.settings, self.seeds,
                  np.zeros(1, np.int64), self.scratch, self.tokens)

    def draw(self, logits, rows, drawings):
        """
        The token that each `Drawing` draws from its row of the logits, a list. Their `n_generated` grows. The same list
        object may be given again if nothing else has added tokens to its drawings since.
        """
        if drawings is not self.drawings:
            if drawings != self.drawings:
                self.settings = np.array([d.settings for d in drawings], np.float64)
                self.seeds = np.array([d.seed for d in drawings], np.uint64)
                self.tokens = np.empty(len(drawings), np.int64)
                self.changing = any(d.changes_logits() for d in drawings)
            self.numbers = np.array([d.n_generated for d in drawings], np.int64)
            self.drawings = drawings
        if self.changing:
            logits, rows = logits[rows], range(len(rows))  # a copy; samples of one prompt may share a row
            for d, row in zip(drawings, logits):
                d.change(row)
        draw_rows(logits, np.asarray(rows, np.int64), self.settings, self.seeds, self.numbers, self.scratch,
                  self.tokens)
        self.numbers += 1
        tokens = self.tokens.tolist()
        if self.changing:
            for d, token in zip(drawings, tokens):
                d.add(token)
        else:  # the same, sooner
            for d in drawings:
                d.n_generated += 1
        return tokens

    def logprobs(self, logits, tokens, k):
        """A `Logprobs` with the k likeliest tokens for each row of logits (W, vocab_size) and its token."""
        n = len(tokens)
        logprobs, ranks = np.empty(n), np.empty(n, np.int64)
        top = np.zeros((n, min(k, logits.shape[1])), np.int64)
        top_logprobs = np.empty(top.shape)
        log_probabilities(logits, np.array(tokens, np.int64), self.scratch, logprobs, ranks, top, top_logprobs)
        of_rows = zip(tokens, logprobs.tolist(), ranks.tolist(), top.tolist(), top_logprobs.tolist())
        return [Logprobs(token, logprob, rank, list(zip(*likeliest))) for token, logprob, rank, *likeliest in of_rows]
