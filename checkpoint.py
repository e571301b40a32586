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


def save(checkpoint, path):
    """torch.save to a temporary name, then into place: at any moment path is the old file or the new one, whole."""
    tmp = path + '.tmp'
    try:
        with open(tmp, 'wb') as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:  # RuntimeError is what torch's zip writer makes of a full disk
        raise OSError(f"{path} could not be written, is the disk full? ({str(e).splitlines()[0]})") from e
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)


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


def newest(pattern='out*/ckpt.pt'):
    """The path of the checkpoint written last, or None."""
    return max(glob.glob(pattern), key=os.path.getmtime, default=None)


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
