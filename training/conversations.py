"""Conversations as rows of a batch: padded, cut, and scored where the assistant speaks."""
import math
import os
from functools import lru_cache

import numpy as np
import torch

from training.batches import open_tokens

SCORED, FIRST = 1, 2  # bits of a token's mark in the file of marks
JITTER = 0.2          # rows are sorted by lengths that vary at random by this share: each epoch has other batches


class Conversations:
    """
    Batches of the conversations of a split, which data/chat/prepare.py writes: batches(step) -> (inputs, targets), as
    of `batches.Batches`. Each conversation is a row, cut after block_size + 1 tokens. n_cut: how many rows are cut.

    Rows of similar length share a batch. An epoch has every row, and some more than once to fill the last batch, in an
    order that is drawn from (seed, split, epoch). So a batch depends on the seed, the split and the step alone.
    ValueError, with their numbers, if some conversations have nothing to score in their first block_size + 1 tokens.
    """

    def __init__(self, folder, split, batch_size, block_size, vocab_size, device, seed=0):
        self.tokens, path = open_tokens(folder, split, 0), os.path.join(folder, split + '_marks.bin')
        self.marks = np.fromfile(path, np.uint8)
        self.batch_size, self.device, self.key = batch_size, device, [seed, sum(split.encode())]
        self.starts = np.flatnonzero(self.marks & FIRST)
        if len(self.marks) != len(self.tokens) or not len(self.starts) or self.tokens.max() >= vocab_size:
            raise ValueError(f"{path} does not fit the tokens beside it, or they do not fit the model's vocab_size "
                             f"{vocab_size}: run data/chat/prepare.py again, with --tokenizer=MODEL")
        lengths = np.diff(self.starts, append=len(self.marks))
        self.lengths = np.minimum(lengths, block_size + 1)
        self.n_cut, self.tokens_per_row = int((lengths > self.lengths).sum()), float(self.lengths.mean()) - 1
        n_before = np.append(0, np.cumsum((self.marks & SCORED) > 0))  # scored ones before each token and the end
        self.scored_of_row = n_before[self.starts + self.lengths] - n_before[self.starts + 1]
        silent = np.flatnonzero(self.scored_of_row == 0)
        if len(silent):
            numbers = ', '.join(str(i + 1) for i in silent[:9]) + ' ...' * (len(silent) > 9)
            raise ValueError(f"{path}: the assistant says nothing within block_size {block_size} in {len(silent)} of "
                             f"the conversations of {split}.bin, among these number {numbers}: raise block_size, or "
                             "leave them out")
        self.epoch = lru_cache(maxsize=2)(self.epoch)

    def epoch(self, number):
        """The rows of each batch of an epoch, (n_batches, batch_size)."""
        n, rng = len(self.starts), np.random.default_rng(self.key + [number])
        rows = np.resize(rng.permutation(n), -(-n // self.batch_size) * self.batch_size)
        order = np.argsort(self.lengths[rows] * rng.uniform(1 - JITTER, 1 + JITTER, len(rows)))
        return rng.permutation(rows[order].reshape(-1, self.batch_size))

    def rows(self, step):
        """The numbers of the conversations of batch `step`, (batch_size,)."""
        n_batches = -(-len(self.starts) // self.batch_size)
        return self.epoch(step // n_batches)[step % n_batches]

    def n_scored(self, step):
        """How many targets of a batch are scored."""
        return int(self.scored_of_row[self.rows(step)].sum())

    def __call__(self, step):
        """Batch `step`: inputs and targets, int64 tensors (batch_size, T); a target of -1 is not scored."""
        rows = self.rows(step)
        inputs = np.zeros((len(rows), self.lengths[rows].max() - 1), np.int64)
        targets = np.full_like(inputs, -1)
        for x, y, start, length in zip(inputs, targets, self.starts[rows], self.lengths[rows]):
            row, marks = self.tokens[start:start + length].astype(np.int64), self.marks[start:start + length]
            x[:length - 1], y[:length - 1] = row[:-1], np.where(marks[1:] & SCORED, row[1:], -1)
        return tuple(torch.from_numpy(each).to(self.device) for each in (inputs, targets))

    def in_words(self, loss):
        """A loss in nats a token, as text, with the perplexity."""
        return f'{loss:.4f} (perplexity {math.exp(min(loss, 99)):.2f})'
