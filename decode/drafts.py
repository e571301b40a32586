"""
Who proposes tokens for `decode.speculative`: the same model with fewer bits, the sequence itself, or another model.

A draft has a `name`; `hold(layers)` and `refresh()`, as executors have them; `propose(batch, k, n_threads)`, which
returns n proposals for each sequence of a batch that decodes, int64 (n, S), n from 0 to k; and `cost`, how many more
nanoseconds its first proposals are expected to take than later ones.
"""
import copy
import math

import numpy as np

from decode.batch import Batch
from decode.cpu import CPUExecutor
from decode.kernel.building import compile_beside
from decode.kernel.step import PART_ON

LONGEST, SHORTEST = 4, 2  # n-grams that are looked for


def draft_for(draft, target):
    """The draft for an executor: 'int4', 'int8', 'ngram', or a `ModelDraft`, which must have the same vocabulary."""
    if isinstance(draft, str):
        return NgramDraft() if draft == 'ngram' else PackedDraft(target, draft)
    own, of_target = draft.executor.vocab_size, target.vocab_size
    if own != of_target:
        raise ValueError(f"draft={draft.name} has a vocabulary of {own}, and the model one of {of_target}: "
                         "take a draft with the tokenizer of the model")
    return draft


def drawn_by(executor, sequences, new, k):
    """
    Up to k tokens that an executor draws for each sequence, int64 (n, S). new: the tokens that each sequence brings
    before them, lists. A draw has the noise that the model's own draw has there, so the two agree more often.
    """
    S = len(sequences)
    positions = np.concatenate([np.arange(len(of_s)) + s.n_computed for s, of_s in zip(sequences, new)])
    batch = Batch(sequences, [len(of_s) for of_s in new], np.concatenate(new), positions, np.full(S, k), [False] * S,
                  [False] * S)
    return np.array([output.tokens for output in executor.execute_model(batch)], np.int64).T


class PackedDraft:
    """
    The model of an executor with its weights in `weights`, int8 or int4, over the same slots: it reads the keys and
    values that the model has computed, and writes its own for the proposals, over which the model then writes.

    executor: of these weights. It is None until the first proposal, because short texts are not worth the packing.
    Weights that are read from a file are packed at once, because the file may be gone later.
    """

    def __init__(self, target, weights):
        self.name, self.target, self.weights, self.executor = f'{weights} weights', target, weights, None
        if any(p.is_meta for p in target.model.parameters()):
            self.pack()

    def pack(self):
        executor = CPUExecutor(self.target.model, self.weights, self.target.n_threads)
        if self.target.layers:
            executor.hold(self.target.layers)
        self.executor = executor

    @property
    def cost(self):
        return 0 if self.executor else 2 * self.target.ns_packing

    def hold(self, layers):
        if self.executor:
            self.executor.hold(layers)
        else:
            code = f'from decode.kernel.step import PART_ON\nPART_ON[{self.weights!r}].compiled'
            compile_beside(PART_ON[self.weights], code)

    def refresh(self):
        if self.executor:
            self.executor.refresh()

    def propose(self, batch, k, n_threads):
        if not self.executor:
            self.pack()
        self.executor.n_threads = n_threads
        return drawn_by(self.executor, batch.sequences, batch.tokens[:, None], k)


class NgramDraft:
    """
    The sequence itself (prompt lookup): its last n tokens are looked for earlier in it, and what came after them there
    is proposed. n is LONGEST first, SHORTEST last. ngrams: {sequence of the last call: its `Ngrams`}.
    """
    name, cost = 'n-grams of the text', 0

    def __init__(self):
        self.ngrams = {}

    def hold(self, layers):
        """It has no keys and values."""

    def refresh(self):
        """The tokens do not depend on the weights."""

    def propose(self, batch, k, n_threads):
        self.ngrams = {s: self.ngrams.get(s) or Ngrams(s.tokens) for s in batch.sequences}
        found = [of_s.after(k) for of_s in self.ngrams.values()]
        proposals = np.tile(batch.tokens, (max(map(len, found)), 1))  # the newest token where a sequence offers fewer
        for column, tokens in zip(proposals.T, found):
            column[:len(tokens)] = tokens
        return proposals


class Ngrams:
    """
    The n-grams of a list of tokens that grows. ends: {n-gram: the number of the token after its last occurrence}, for
    the n-grams that are followed by one of the first n_known tokens.
    """

    def __init__(self, tokens):
        self.tokens, self.n_known, self.ends = tokens, 0, {}

    def after(self, k):
        """Up to k tokens that followed the longest known n-gram with which the tokens end."""
        tokens = self.tokens
        for end in range(self.n_known, len(tokens)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self.ends[tuple(tokens[end - size:end])] = end
        self.n_known = len(tokens)
        for size in range(LONGEST, SHORTEST - 1, -1):
            at = self.ends.get(tuple(tokens[-size:]))
            if at is not None:
                return tokens[at:at + k]
        return []


class ModelDraft:
    """
    Another model with the same vocabulary, usually a smaller one. executor: that model's, with the slots of `pool`, a
    `kvcache.PagePool`; nothing else uses the two. The pool has the sequences of the last call, whatever the model's
    own pool does with them. If there is no room for all, or one fills its context, the draft proposes nothing.

    sequences: {sequence of the last call: its copy in the pool}. proposed: the last proposals for a copy; the keys and
    values of all but the last of them are in the slots after n_computed.
    """
    cost = 0

    def __init__(self, executor, pool, name):
        self.executor, self.pool, self.name, self.sequences, self.unfinished = executor, pool, name, {}, False

    def hold(self, layers):
        """Its keys and values lie in slots of its own."""

    def refresh(self):
        self.executor.refresh()
        self.forget()

    def forget(self):
        """Nothing is computed."""
        self.pool.reset()
        self.sequences = {}

    def propose(self, batch, k, n_threads):
        if self.unfinished:  # an exception ended the previous call, at an unknown place
            self.forget()
        self.unfinished, before = True, self.sequences
        self.sequences = {s: before.pop(s, None) or self.begin(s) for s in batch.sequences}
        for s in before.values():
            self.pool.free(s)
        sequences, proposals = [*self.sequences.values()], np.empty((0, len(batch.sequences)), np.int64)
        if all([self.has_room(s, k) for s in sequences]):
            if behind := [s for s in sequences if unread(s)]:
                self.compute(behind, [unread(s) for s in behind], 0)
            proposals = self.compute(sequences, batch.tokens[:, None], k)
            for s, column in zip(sequences, proposals.T):
                s.proposed = column.tolist()
        self.unfinished = False
        return proposals

    def begin(self, sequence):
        """A copy of a sequence, with the same tokens, in the pool. Its context is never cut."""
        s = copy.copy(sequence)
        s.proposed, s.max_positions = [], math.inf
        self.pool.begin(s, s.tokens)
        return s

    def has_room(self, s, k):
        """
        Are there positions and slots for all tokens of a sequence and k proposals? First the last proposals that were
        drawn since are counted as computed.
        """
        self.pool.computed(s, n_right(s))
        s.proposed, n_positions = [], len(s.tokens) + k - 1  # the last proposal needs none
        most = self.executor.model.config.max_positions
        return n_positions <= most and self.pool.extend(s, n_positions - s.n_computed)

    def compute(self, sequences, new, k):
        """`drawn_by` of sequences. Their new tokens then count as computed."""
        proposals = drawn_by(self.executor, sequences, new, k)
        for s, of_s in zip(sequences, new):
            self.pool.computed(s, len(of_s))
        return proposals


def unread(s):
    """The tokens of a copy that are not computed, a list. The newest one is not among them."""
    return s.tokens[s.n_computed:-1]


def n_right(s):
    """How many of the proposals in the slots of a copy have been drawn since."""
    differs = [a != b for a, b in zip(s.proposed[:-1], unread(s))]
    return [*differs, True].index(True)
