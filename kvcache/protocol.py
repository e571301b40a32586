"""What generation asks of a cache: `Work` is what one step feeds, and a `Cache` keeps sequences and runs steps."""
from typing import NamedTuple, Protocol

import torch


class Work(NamedTuple):
    """
    New tokens of B sequences. starts: the position of the first new token of each. tokens: int64 (B, T) if all bring T
    of them, or a list of (T_i,).
    """
    handles: list
    starts: list[int]
    tokens: torch.Tensor | list


class Cache(Protocol):
    """Keys and values of many sequences, for one model."""

    def new(self):
        """The handle of a new sequence without tokens. ValueError where there is no room for another."""

    def fork(self, handle):
        """The handle of a new sequence that has all tokens of this one."""

    def truncate(self, handle, n):
        """
        Keep the first n tokens of a sequence. ValueError if it has fewer, or if the next token would see some through
        its window that are not stored any more.
        """

    def shift(self, handle, n_keep, n):
        """
        Remove the n tokens behind the first n_keep of a sequence, and move the others down by n positions. ValueError
        for learned positions, which are a part of the keys and values, and for windows, which leave no full context.
        """

    def free(self, handle):
        """Forget a sequence."""

    def step(self, work):
        """
        Feed the tokens of a `Work`. Returns logits (B, vocab_size), for the token after the last one of each sequence.

        A sequence that is longer than its start is truncated to it first. ValueError if it is shorter, if there is no
        room, and on tokens that do not fit the model. After a step that failed each sequence has its first `start`
        tokens, or none if some of these are gone that the next token would see through its window.
        """


def checked_tokens(model, tokens):
    """
    (rows, counts) of `Work.tokens`: int64 (B, T), or a list of (T_i,); and how many new tokens each sequence brings.
    ValueError if they are something else, or too many for the model.
    """
    if not isinstance(tokens, (list, tuple)):
        if not isinstance(tokens, torch.Tensor) or tokens.dtype is not torch.int64 or tokens.dim() != 2:
            tokens = model.checked_input(tokens, None)[0]
        B, T = tokens.shape
        return tokens if T else model.checked_input(tokens, None)[0], [T] * B
    rows = list(tokens)
    for i, row in enumerate(rows):
        if not isinstance(row, torch.Tensor) or row.dtype is not torch.int64 or row.dim() != 1 or not row.numel():
            rows[i] = model.checked_input(row[None] if isinstance(row, torch.Tensor) else row, None)[0][0]
    return rows, [row.numel() for row in rows]


def check_shift(config, seq, length, n_keep, n):
    """ValueError unless n tokens behind the first n_keep can be removed from a sequence of `length` tokens."""
    if config.position == 'learned':
        raise ValueError(f"sequence {seq} cannot be shifted, the model has learned positions, which are in its keys "
                         "and values: compute the tokens again at their new positions")
    if config.window:
        raise ValueError(f"sequence {seq} cannot be shifted, the model has a window of {config.window} and forgets "
                         "what it has passed: go on without a shift")
    if type(n_keep) is not int or type(n) is not int or n_keep < 0 or n < 0 or n_keep + n > length:
        raise ValueError(f"sequence {seq} has {length} tokens: {n!r} behind the first {n_keep!r} cannot be removed")
