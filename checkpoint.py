"""
Checkpoints: saved so that a crash never costs one, loaded without trusting them.

The keys are nanoGPT's (model, optimizer, model_args, iter_num, best_val_loss, config), so its ckpt.pt loads
here and ours there, plus tokenizer, rng and scaler.
"""
import glob
import os
from dataclasses import fields

import torch

import tokenizer as tokenizers
from whole_file import replacing


def save(checkpoint, path):
    """torch.save, whole or not at all: a crash or a full disk leaves the checkpoint that was there."""
    try:
        with replacing(path) as f:
            torch.save(checkpoint, f)
    except (OSError, RuntimeError) as e:  # RuntimeError is what torch's zip writer makes of a full disk
        raise OSError(f"{path} could not be written, is the disk full? ({str(e).splitlines()[0]})") from e


def load(path, device='cpu'):
    """The checkpoint at path, tensors and plain values only. ValueError says what to do when there is none, or a broken one."""
    if not os.path.isfile(path):
        raise ValueError(f"no checkpoint {path}: train one first, with python train.py config/train_shakespeare_char.py")
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
    except Exception as e:  # a zip error, an unpickling error, an EOF: whichever it is, the file is no good
        raise ValueError(f"{path} cannot be read ({type(e).__name__}): it is damaged, or holds more than tensors and plain values") from e
    if not isinstance(checkpoint, dict) or not {'model', 'model_args'} <= set(checkpoint):
        raise ValueError(f"{path} is not a checkpoint of train.py: it has no 'model' and 'model_args'")
    return checkpoint


def newest_first():
    """The paths of all out*/ckpt.pt, the one written last in front."""
    return sorted(glob.glob('out*/ckpt.pt'), key=os.path.getmtime, reverse=True)


def build(checkpoint, GPT, GPTConfig, **override_args):
    """The checkpoint's model: GPT(GPTConfig(...)) with its weights. ValueError where the two do not fit."""
    known = {f.name for f in fields(GPTConfig)}
    args = {k: v for k, v in checkpoint['model_args'].items() if k in known}
    model = GPT(GPTConfig(**args | override_args))
    try:
        model.load_state_dict(checkpoint['model'])
    except RuntimeError as e:
        raise ValueError(f"the checkpoint's weights do not fit its model_args: {' '.join(str(e).split())[:300]}") from e
    return model


def tokenizer_of(checkpoint):
    """The tokenizer in the checkpoint; for older ones that of their data folder, and GPT-2's failing that."""
    if checkpoint.get('tokenizer'):
        return tokenizers.from_state(checkpoint['tokenizer'])
    folder = os.path.join('data', str(checkpoint.get('config', {}).get('dataset', '')))
    return tokenizers.from_state(tokenizers.state_of_dataset(folder))
