"""Batches for training out of a file of token ids. A batch depends on the seed, the split and the step alone."""
import os
import subprocess
import sys

import numpy as np
import torch

import tokenizer as tokenizers


def prepare(folder):
    """Run the prepare.py of a data folder. ValueError if there is no such script, or if it fails."""
    script = os.path.join(folder, 'prepare.py')
    if not os.path.exists(script):
        raise ValueError(f"no {token_file(folder, 'train')}, and no {script} to make it")
    print(f"{folder} is not prepared yet: running {script}", flush=True)
    if subprocess.run([sys.executable, script]).returncode:
        raise ValueError(f"{script} failed: its message is above")


def vocab_size_of(folder):
    """The vocabulary of a model for a data folder: that of its tokens, or GPT-2's, 50,304."""
    state = tokenizers.state_of_dataset(folder)
    if state['kind'] == 'gpt2':
        return 50304  # GPT-2's 50257, padded to a multiple of 64: matrix products are faster
    return tokenizers.read_meta(folder).get('vocab_size') or len(state['chars'])


def token_file(folder, split):
    return os.path.join(folder, split + '.bin')


def open_tokens(folder, split, block_size):
    """
    The token ids of a split, as a memory map of its file (`split`.bin: uint16, or the dtype in meta.json).

    ValueError if the file is missing, if its size is not a whole number of tokens, or if it is shorter than one row
    of a batch, which takes block_size + 1 tokens.
    """
    path = token_file(folder, split)
    dtype = np.dtype(tokenizers.read_meta(folder).get('dtype', 'uint16'))
    if not os.path.isfile(path):
        raise ValueError(f"no {path}: run python {os.path.join(folder, 'prepare.py')}")
    n_bytes = os.path.getsize(path)
    if n_bytes % dtype.itemsize or n_bytes // dtype.itemsize <= block_size:
        raise ValueError(f"{path} has {n_bytes / dtype.itemsize:g} tokens ({dtype}), but one row takes block_size + 1 "
                         f"= {block_size + 1}: prepare more text or lower block_size")
    return np.memmap(path, dtype=dtype, mode='r')


class Batches:
    """
    Random batches of a data folder's split: batches(step) -> (inputs, targets).

    A batch is drawn from a generator that is made from (seed, split, step), so the same step always gives the same
    batch. That is why a resumed run draws the batches that the run before would have drawn, why processes share one
    global batch by taking different steps, and why every evaluation uses the same batches.

    Raises ValueError for the reasons of `open_tokens`.
    """

    def __init__(self, folder, split, batch_size, block_size, vocab_size, device, seed=0):
        self.path = token_file(folder, split)
        self.batch_size, self.vocab_size, self.device = batch_size, vocab_size, device
        self.key = [seed, sum(split.encode())]
        self.tokens = open_tokens(folder, split, block_size)
        self.row = np.arange(block_size + 1)

    def __call__(self, step):
        """
        Batch `step`: inputs and targets, int64 tensors (batch_size, block_size); a target is the token after its input.

        ValueError if the file has a token that is not in the vocabulary.
        """
        rng = np.random.default_rng(self.key + [step])
        starts = rng.integers(len(self.tokens) - len(self.row) + 1, size=(self.batch_size, 1))
        tokens = self.tokens[starts + self.row]  # all rows in one indexing operation
        if tokens.max() >= self.vocab_size:
            raise ValueError(f"{self.path} has token {tokens.max()}, but the model's vocab_size is {self.vocab_size}")
        tokens = torch.from_numpy(tokens.astype(np.int64))
        if self.device.startswith('cuda'):
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        else:
            tokens = tokens.to(self.device)
        return tokens[:, :-1], tokens[:, 1:]
