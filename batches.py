"""Training batches out of a file of token ids, each a function of (seed, split, step) and of nothing else."""
import os
import subprocess
import sys

import numpy as np
import torch

import tokenizer as tokenizers


def prepare(folder):
    """Run the prepare.py of a data folder. ValueError if there is none, or if it fails."""
    script = os.path.join(folder, 'prepare.py')
    if not os.path.exists(script):
        raise ValueError(f"no {token_file(folder, 'train')}, and no {script} to make it")
    print(f"{folder} is not prepared yet: running {script}", flush=True)
    if subprocess.run([sys.executable, script]).returncode:
        raise ValueError(f"{script} failed: its message is above")


def token_file(folder, split):
    return os.path.join(folder, split + '.bin')


def open_tokens(folder, split, block_size):
    """
    The token ids of a split, mapped from its file. ValueError if it is missing, torn, or shorter than a row of a
    batch, which takes block_size + 1 tokens.
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


@torch.no_grad()
def mean_loss(model, batches, n, context, stopped):
    """The mean loss of a model over batches 0 to n - 1, computed inside `context`. None if stopped() while at it."""
    total = torch.zeros((), device=batches.device)
    for step in range(n):
        if stopped():
            return None
        with context:
            total += model(*batches(step))[1]
    return total.item() / n


class Batches:
    """
    The token file `split`.bin of a data folder: uint16, or what meta.json's dtype says.

    Batches are drawn at random but from no running state: batch `step` is always the same. So a resumed
    run draws what it would have drawn, ranks share out one global batch by taking different steps, and
    the batches of an evaluation do not move between evaluations.

    Raises ValueError where `open_tokens` does.
    """

    def __init__(self, folder, split, batch_size, block_size, vocab_size, device, seed=0):
        self.path = token_file(folder, split)
        self.batch_size, self.vocab_size, self.device = batch_size, vocab_size, device
        self.key = [seed, sum(split.encode())]
        self.tokens = open_tokens(folder, split, block_size)
        self.row = np.arange(block_size + 1)

    def __call__(self, step):
        """Batch `step`: inputs and targets, (batch_size, block_size) each, the targets one token on."""
        rng = np.random.default_rng(self.key + [step])
        starts = rng.integers(len(self.tokens) - len(self.row) + 1, size=(self.batch_size, 1))
        tokens = self.tokens[starts + self.row]  # every row in one gather
        if tokens.max() >= self.vocab_size:
            raise ValueError(f"{self.path} has token {tokens.max()}, but the model's vocab_size is {self.vocab_size}")
        tokens = torch.from_numpy(tokens.astype(np.int64))
        if self.device.startswith('cuda'):
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        else:
            tokens = tokens.to(self.device)
        return tokens[:, :-1], tokens[:, 1:]
