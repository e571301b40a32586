"""
A forward pass of a cache through the compiled step of a decoder (decode/), in the place of the model in PyTorch.

A cache says in which slots each sequence's keys and values lie, in its `Runs`. The compiled step writes the new ones
there, and reads the slots that the new tokens see and no others.
"""
import numpy as np
import torch

from decode.metadata import InputMetadata, KVArrays, Runs
from kvcache.placement import NotNumbers


class KernelPass:
    """
    decoder: it has `execute_model`, see `decode.cpu.CPUDecoder`. layers: the `Layer`s of a cache. arrays: their
    `KVArrays`.
    """

    def __init__(self, decoder, layers, arrays):
        self.decoder, self.layers, self.arrays = decoder, layers, arrays

    @classmethod
    def over(cls, decoder, model, layers):
        """
        The pass over these layers, or None if they are stored in a way that the compiled step does not read. ValueError
        if the decoder is for another model.
        """
        if decoder.model is not model:
            raise ValueError("the decoder and the cache are for two different models: make both for one model")
        arrays = KVArrays.of_layers(layers)
        return arrays and cls(decoder, layers, arrays)

    @staticmethod
    def runs(rows=()):
        """New `Runs`."""
        return Runs(rows)

    @staticmethod
    def positions(starts, counts):
        """The positions of all new tokens, int64 (sum(counts),)."""
        starts, n = np.array(starts, np.int64), sum(counts)
        if len(starts) == n:
            return starts
        counts = np.array(counts, np.int64)
        return np.arange(n) + np.repeat(starts - counts.cumsum() + counts, counts)

    @staticmethod
    def metadata(counts, runs, wanted=None):
        """`InputMetadata` of sequences with so many new tokens and these `Runs`; wanted: a list of rows, or None."""
        return InputMetadata(counts, runs, None if wanted is None else np.array(wanted, np.int64))

    def __call__(self, ids, positions, metadata):
        """
        Returns the logits of the last new token of each sequence, float32 (B, vocab_size); or of the wanted rows,
        (W, vocab_size).

        ids: all new tokens, int64 (N,), contiguous, on the CPU. positions, metadata: what the functions `positions` and
        `metadata` of this class return; with `NextTokens` it may be several steps, and the logits are of the last one.
        ValueError, with nothing written, if they do not fit the model or each other.
        `NotNumbers` if the logits are not numbers: the slots of the last step are then zeros, and so is every NaN and
        infinity in the cache, because a mask of the model in PyTorch would not hide it.
        """
        next_tokens = metadata.next_tokens
        n_before = next_tokens.n_drawn if next_tokens else 0
        logits = self.decoder.execute_model(ids, positions, self.arrays, metadata)
        if not self.arrays.finite:
            if next_tokens:
                positions = positions + next_tokens.n_drawn - n_before  # of the step that failed
            parts = np.split(positions, np.cumsum(metadata.query_lens)[:-1])
            written = [slots_of(runs, part) for runs, part in zip(metadata.runs, parts)]
            for layer in self.layers:
                layer.zero_rows(torch.from_numpy(np.concatenate(written)))
                layer.zero_nonfinite()
            raise NotNumbers
        return logits


def slots_of(runs, positions):
    """The slots of positions (n,), int64 (n,)."""
    table = runs.table[:runs.n]
    row = np.searchsorted(table[:, 0], positions, side='right') - 1
    return table[row, 1] + positions - table[row, 0]
