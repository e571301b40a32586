"""Token files, their tokenizers, and batches of them, which depend on the seed, the split and the step alone."""
import math
import os
import signal
import subprocess
import sys

import numpy as np
import torch

import tokenizer as tokenizers
from configurator import HERE


def prepare(folder):
    """Run the prepare.py of a data folder, if it has one and has no train.bin yet. ValueError if it fails."""
    script = os.path.join(folder, 'prepare.py')
    if os.path.exists(script) and not os.path.exists(token_file(folder, 'train')):
        print(f"{folder} is not prepared yet: running {script}", flush=True)
        code = subprocess.run([sys.executable, script]).returncode
        if code in (130, -signal.SIGINT, -signal.SIGTERM):
            raise KeyboardInterrupt
        if code:
            raise ValueError(f"{script} ended with exit code {code}: correct what its message names, and start again")


def vocab_size_of(folder):
    """The vocabulary of a model for a data folder: that of its tokens, or GPT-2's, 50,304. ValueError without one."""
    state, size = tokenizers.state_of_dataset(folder), tokenizers.read_meta(folder).get('vocab_size')
    if state['kind'] == 'gpt2':
        return max(50304, size or 0)  # GPT-2's 50257, padded to a multiple of 64: matrix products are faster
    if state['kind'] != 'unknown':
        try:  # also where the size is known: a checkpoint gets this tokenizer
            return max(tokenizers.from_state(state).vocab_size, size or 0)
        except ValueError as e:
            raise ValueError(f"{folder}: {e}") from e
    if size is None:
        raise ValueError(f"{folder} has no tokenizer: put its tokenizer.json there, or vocab_size into its meta.json")
    return size


def check_tokenizer(model, data, model_from, data_from):
    """
    The state of the tokenizer that checkpoints get: the model's tokenizer, with the data's chat template if there is
    one. model, data: states of tokenizers. An 'unknown' one, of ids without a text, fits every other. ValueError, which
    names both, if the two give a text different ids.
    """
    if model['kind'] == 'unknown':
        return data
    if data['kind'] == 'unknown' or model == data or same_tokenizer(model, data):
        chat = {'chat_template': data['chat_template']} if 'chat_template' in data else {}
        return data if chat and model['kind'] == 'gpt2' else model | chat  # byte pairs by name have no template
    ours, theirs = describe_tokenizer(model), describe_tokenizer(data)
    if ours == theirs and data['kind'] == 'char':
        more = ''.join(sorted({*data['chars']} - {*model['chars']}))
        theirs += f" with {more[:20]!r} among them" if more else " in another order"
    advice = "" if data['kind'] == 'char' and not {*data['chars']} <= {*model.get('chars', '')} else (
        "prepare the data with the model's tokenizer (data/shakespeare/prepare.py --tokenizer=, for example), or ")
    raise ValueError(f"{data_from} has another tokenizer, {theirs}, than {model_from}, {ours}: {advice}train a new "
                     "model, in another --out_dir")


def same_tokenizer(a, b):
    """Do two states that differ give the same ids to texts? Templates, end tokens and added tokens do not count."""
    kinds = {a['kind'], b['kind']}
    if 'json' not in kinds:
        return False
    if 'gpt2' not in kinds:
        return tokenizers.same_ids(tokenizers.from_state(a), tokenizers.from_state(b))
    tokenizer = tokenizers.from_state(a if a['kind'] == 'json' else b)  # GPT-2's byte pairs may not be on this machine
    n_learned, ids = tokenizer.vocab_size - len(tokenizer.added_ids), tokenizer.encode('Hello world', False)
    return n_learned == 50256 and ids == [15496, 995]


def describe_tokenizer(state):
    """A tokenizer's state in words."""
    if state['kind'] == 'gpt2':
        return "GPT-2's byte pairs"
    n = tokenizers.from_state(state).vocab_size
    return f"{n:,} characters" if state['kind'] == 'char' else f"a tokenizer.json of {n:,} tokens"


def token_file(folder, split):
    return os.path.join(folder, split + '.bin')


def open_tokens(folder, split, block_size):
    """
    The token ids of a split, as a memory map of its file (`split`.bin: uint16, or the dtype in meta.json). ValueError
    if it is missing, has ids of another dtype, or is shorter than a row of a batch, which takes block_size + 1 tokens.
    """
    path = token_file(folder, split)
    named = tokenizers.read_meta(folder).get('dtype')
    dtype = np.dtype(named or 'uint16')
    if not os.path.isfile(path):
        script = os.path.join(folder, 'prepare.py')
        if os.path.exists(script):
            raise ValueError(f"no {path}: run python {script}")
        there = f", or run the command in {HERE}, where {script} is" * os.path.exists(os.path.join(HERE, script))
        raise ValueError(f"no {path}, and no {script} to make it: name a folder of data/ as the dataset{there}")
    check_dtype(path, named)
    n_tokens, rest = divmod(os.path.getsize(path), dtype.itemsize)
    if rest:
        raise ValueError(f"{path} ends within a token, after {n_tokens:,} whole ones of {dtype}: it is cut, or "
                         "of another dtype; run its prepare.py again")
    if n_tokens <= block_size:
        raise ValueError(f"{path} has {n_tokens:,} tokens ({dtype}), but one row takes block_size + 1 = "
                         f"{block_size + 1:,}: prepare more text or lower block_size")
    return np.memmap(path, dtype=dtype, mode='r')


def check_dtype(path, named):
    """
    ValueError if a file is a .npy file, or if the ids at its beginning have more bytes than the dtype that it is read
    as. named: that dtype in meta.json, or None, which is read as uint16. If meta.json has uint16, ids are not checked.
    """
    with open(path, 'rb') as f:
        start = f.read(1 << 16)
    rewrite = f"write them with ids.astype(np.uint16).tofile('{path}'), or uint32 if an id is above 65,535"
    if start.startswith(b'\x93NUMPY'):
        raise ValueError(f"{path} is a .npy file, but must hold the ids alone: {rewrite}")
    parts = np.frombuffer(start[:len(start) // 8 * 8], dtype='<u2').reshape(-1, 4)  # of numbers of 8 bytes
    if named == 'uint16' or len(parts) < 8:
        return
    low, high = (parts[:, :2], parts[:, 2:]) if named else (parts[:, ::2], parts[:, 1::2])
    # of ids with more bytes, the upper halves are zeros, or small numbers where a vocabulary has up to a million tokens
    if high.max() == 0 < low.max() or not named and high.max() < 16 and low.max() >= 4096:
        if not parts[:, 2:].any():
            raise ValueError(f"{path} holds ids of 8 bytes (int64), not {named or 'uint16'}: {rewrite}, and name that "
                             "dtype in meta.json")
        raise ValueError(f"{path} holds ids of 4 bytes, and without a dtype in meta.json they are read as uint16: put "
                         f'"dtype": "uint32" into {os.path.dirname(path)}/meta.json (or "uint16", if they are that)')


class Batches:
    """
    Random batches of a data folder's split: batches(step) -> (inputs, targets).

    A batch is drawn from a generator that is made from (seed, split, step). That is why a resumed run draws the batches
    that the run before would have drawn, why processes share one global batch by taking different steps, and why every
    evaluation uses the same batches. ValueError for the reasons of `open_tokens`.
    """

    def __init__(self, folder, split, batch_size, block_size, vocab_size, device, seed=0):
        self.path = token_file(folder, split)
        self.batch_size, self.vocab_size, self.device = batch_size, vocab_size, device
        self.key = [seed, sum(split.encode())]
        self.tokens = open_tokens(folder, split, block_size)
        self.row, self.tokens_per_row = np.arange(block_size + 1), block_size
        self.n_bytes = tokenizers.read_meta(folder).get('bytes', {}).get(split)

    def __call__(self, step):
        """
        Batch `step`: inputs and targets, int64 tensors (batch_size, block_size); a target is the token after its input.

        ValueError if the file has a token that is not in the vocabulary.
        """
        rng = np.random.default_rng(self.key + [step])
        starts = rng.integers(len(self.tokens) - len(self.row) + 1, size=(self.batch_size, 1))
        tokens = self.tokens[starts + self.row]  # all rows in one indexing operation
        if tokens.max() >= self.vocab_size:
            raise ValueError(f"{self.path} has token {tokens.max()}, but the model's vocab_size is {self.vocab_size}: "
                             "prepare the data for this model, and name the dtype of the file in meta.json")
        tokens = torch.from_numpy(tokens.astype(np.int64))
        if self.device.startswith('cuda'):
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        else:
            tokens = tokens.to(self.device)
        return tokens[:, :-1], tokens[:, 1:]

    def n_scored(self, step):
        """How many targets of a batch are scored."""
        return self.batch_size * self.tokens_per_row

    def in_words(self, loss):
        """A loss in nats a token, as text; with bits per byte where meta.json says how many bytes the split has."""
        if not self.n_bytes:
            return f'{loss:.4f}'
        return f'{loss:.4f} ({loss / math.log(2) * len(self.tokens) / self.n_bytes:.3f} bits per byte)'
