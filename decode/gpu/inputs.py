"""What a step on a GPU reads beside weights, keys and values: tensors on the device, which keep their addresses."""
from typing import NamedTuple

import torch

from decode.gpu.columns import Columns

# columns of the settings of a draw, as `decode.draw.NAMES`
TEMPERATURE, TOP_K, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION, N_SETTINGS = range(8)
IN_PROMPT = 2**30  # is added to the count of a token that is in the prompt
MOST_STOPS, MOST_BIASES = 256, 512  # of a sequence; one with more is drawn by PyTorch
MOST_STEPS = 64    # of a call


class StepInputs(NamedTuple):
    """
    tokens, positions: int64 (R,). sequences: int32 (R,), the row of the slot table of each new token's sequence, -1 for
    padding. slot_table: int32 (S, n_columns), see `Columns`.
    """
    tokens: torch.Tensor
    positions: torch.Tensor
    sequences: torch.Tensor
    slot_table: torch.Tensor

    def rows(self, n):
        """Of the first n rows."""
        return StepInputs(self.tokens[:n], self.positions[:n], self.sequences[:n], self.slot_table)


class KVLayer(NamedTuple):
    """
    The keys and values of one layer, in the dtype in which they are stored. Those of a head are at slot * slot_stride +
    head * head_stride in k and v, which are views of one dimension; both strides are multiples of head_dim. The scales
    of int8, float32, are those of `group` numbers each, at the same places divided by it; None otherwise.
    """
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


class Geometry(NamedTuple):
    """
    What attention and the store of keys and values go by. window, n_sink: of the model. slopes: float32 (n_head,) of
    ALiBi, or None. group: numbers of a head that share a scale in int8, 0 for other types.
    """
    n_head: int
    n_kv_head: int
    head_dim: int
    window: int
    n_sink: int
    columns: Columns
    slopes: torch.Tensor | None
    slot_stride: int
    head_stride: int
    group: int


class Draws(NamedTuple):
    """
    How R rows draw their next tokens.

    settings: float64 (R, N_SETTINGS), the values of `decode.draw.DrawSettings`. seeds: int64 (R,), their bits. numbers:
    int32 (R,), how many tokens the row's sequence has drawn. left: int32 (R,), how many it may draw; with 0 it has
    ended. min_tokens: int32 (R,). stops: int32 (R, MOST_STOPS), the tokens that end it, then -1. bias_tokens, biases:
    int32 and float32 (R, MOST_BIASES), then -1. counts: int32 (R, vocab_size), how often it has drawn each token, and
    IN_PROMPT; read and written only if a penalty is set. drawn: int64 (MOST_STEPS, R), the result: row number `step` of
    it is written, with -1 for rows that have ended. step: int32 (R,), each row's own. broken: int32 (R,), 1 where
    logits are not numbers.
    """
    settings: torch.Tensor
    seeds: torch.Tensor
    numbers: torch.Tensor
    left: torch.Tensor
    min_tokens: torch.Tensor
    stops: torch.Tensor
    bias_tokens: torch.Tensor
    biases: torch.Tensor
    counts: torch.Tensor
    drawn: torch.Tensor
    step: torch.Tensor
    broken: torch.Tensor

    def rows(self, n):
        """Of the first n rows."""
        return Draws(*(t[:, :n] if t is self.drawn else t[:n] for t in self))
