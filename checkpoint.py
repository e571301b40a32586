"""
Checkpoints: saved so that a crash never costs one, loaded without trusting them.

The keys are nanoGPT's (model, optimizer, model_args, iter_num, best_val_loss, config), so its ckpt.pt loads
here and ours there, plus tokenizer, rng, scaler and threads.
"""
import glob
import os
import zipfile
from dataclasses import fields

import torch

import tokenizer as tokenizers
from whole_file import replacing

NAME_IS_UTF8, SIZES_FOLLOW = 0x800, 0x8  # the flags that torch gives to the entries of a zip file
SIZES = ('n_layer', 'n_head', 'n_embd', 'block_size', 'vocab_size')  # every checkpoint's model_args must have these


def save(checkpoint, path):
    """torch.save, whole or not at all: a crash or a full disk leaves the checkpoint that was there."""
    try:
        with replacing(path) as f:
            torch.save(checkpoint, f)
    except (OSError, RuntimeError) as e:  # RuntimeError is what torch's zip writer makes of a full disk
        raise OSError(f"{path} could not be written, is the disk full? ({str(e).splitlines()[0]})") from e


def load(path, device='cpu'):
    """
    The checkpoint at path, a dict of tensors and plain values, on device.

    ValueError says what to do where there is none, where its bytes are not those that were saved, or where its
    contents are not a checkpoint's.
    """
    if not os.path.isfile(path):
        raise ValueError(f"no checkpoint {path}: train one first, with "
                         "python train.py config/train_shakespeare_char.py")
    with open(path, 'rb') as f:
        try:
            check_bytes(f)
            f.seek(0)
            checkpoint = torch.load(f, map_location=device, weights_only=True)
        except MemoryError:
            raise
        except Exception as e:  # a zip error, an unpickling error, an EOF: whichever it is, the file is no good
            reason = str(e).splitlines()[0] if isinstance(e, ValueError) else type(e).__name__
            raise ValueError(f"{path} cannot be read ({reason[:200]}): it is damaged, or holds more than tensors and "
                             "plain values; use another copy, or train again") from e
    try:
        check_contents(checkpoint)
    except ValueError as e:
        raise ValueError(f"{path} is not a checkpoint of train.py: {e}") from e
    return checkpoint


def check_bytes(f):
    """
    Compare every entry of the zip file f with its CRC: torch reads the entries, but not the CRCs.

    torch has a zip reader of its own. So the file must have one reading only: names that are unique, the same in
    the directory and in front of each entry (zipfile compares the two), bytes stored as they are, and no attributes:
    torch takes an entry marked as a folder for an empty one, and returns memory that it has not written.
    """
    start = f.read(16)
    if start.startswith(b'\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.'):
        raise ValueError("it has the format of torch before 1.6, which has no checksums: load it with "
                         "torch.load(path, weights_only=True) and save it again")
    if not start.startswith(b'PK\x03\x04'):
        raise ValueError("it is not a zip file")
    with zipfile.ZipFile(f) as archive:
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        if len(set(names)) != len(names):
            raise ValueError("an entry is there twice")
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise ValueError(f"{entry.filename} is compressed")
            flags = entry.flag_bits & ~(NAME_IS_UTF8 | SIZES_FOLLOW)
            if entry.external_attr or entry.internal_attr or entry.volume or flags:
                raise ValueError(f"{entry.filename} has attributes that torch does not write")
            with archive.open(entry) as content:
                while content.read(1 << 20):  # zipfile raises BadZipFile at the end of an entry with another CRC
                    pass


def check_contents(checkpoint):
    """ValueError unless the keys of a model are there, and every key is of the type that train.py saves."""
    if not isinstance(checkpoint, dict) or not {'model', 'model_args'} <= set(checkpoint):
        raise ValueError("it has no 'model' and 'model_args'")
    wanted = {'model': dict, 'model_args': dict, 'optimizer': dict, 'iter_num': int, 'config': dict, 'tokenizer': dict,
              'rng': dict, 'scaler': dict, 'threads': int}
    for key, kind in wanted.items():
        if key in checkpoint and (not isinstance(checkpoint[key], kind) or isinstance(checkpoint[key], bool)):
            raise ValueError(f"its {key} must be of type {kind.__name__}, not {type(checkpoint[key]).__name__}")
    if not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in checkpoint['model'].items()):
        raise ValueError("its model must be a dict of names and tensors")
    if not all(isinstance(k, str) for k in checkpoint['model_args']):
        raise ValueError("its model_args must be a dict with names as keys")
    for key, least in (('iter_num', 0), ('threads', 1)):
        if checkpoint.get(key, least) < least:
            raise ValueError(f"its {key} must be at least {least}, not {checkpoint[key]}")
    best = checkpoint.get('best_val_loss', 0.0)
    is_scalar = isinstance(best, torch.Tensor) and best.numel() == 1 and best.is_floating_point()
    if type(best) not in (int, float) and not is_scalar:
        raise ValueError("its best_val_loss must be a number")
    if checkpoint.get('tokenizer'):
        tokenizers.check_state(checkpoint['tokenizer'])
    if 'rng' in checkpoint:
        rng = checkpoint['rng']
        states = [rng.get('torch'), *rng['cuda']] if isinstance(rng.get('cuda'), list) else [None]
        if not all(isinstance(state, torch.Tensor) and state.dtype is torch.uint8 for state in states):
            raise ValueError("its rng must hold the states of torch's generators: uint8 tensors")


def newest_first():
    """The paths of all out*/ckpt.pt, the one written last in front."""
    return sorted(glob.glob('out*/ckpt.pt'), key=os.path.getmtime, reverse=True)


def build(checkpoint, GPT, GPTConfig, **override_args):
    """The checkpoint's model: GPT(GPTConfig(...)) with its weights. ValueError where the two do not fit."""
    saved = checkpoint['model_args']
    known = {f.name for f in fields(GPTConfig)}
    args = {k: v for k, v in saved.items() if k in known} | override_args
    missing = [name for name in SIZES if name not in args]
    if missing:
        raise ValueError(f"the checkpoint's model_args lack {', '.join(missing)}: it cannot be built")
    wanted = dict.fromkeys(SIZES, (int,)) | {'dropout': (int, float), 'bias': (bool,)}
    for name, kinds in wanted.items():
        if name in args and type(args[name]) not in kinds:
            raise ValueError(f"the checkpoint's model_args have {name}={str(args[name])[:50]!r}, "
                             f"which must be of type {kinds[-1].__name__}")
    model = GPT(GPTConfig(**args))
    try:
        model.load_state_dict(checkpoint['model'])
    except RuntimeError as e:
        raise ValueError(f"the checkpoint's weights do not fit its model_args: {' '.join(str(e).split())[:300]}") from e
    return model


def restore_optimizer(optimizer, saved):
    """
    Load a checkpoint's optimizer state (the dict of AdamW.state_dict) into an optimizer of the same parameters.

    Moments of more rows than their parameter are cut to its rows: block_size was cropped. The implementation of
    the step (fused or not) is that of the new optimizer, which goes by the device. ValueError where they do not fit.
    """
    fit_moments(optimizer, saved)
    fused = [group['fused'] for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(saved)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as e:
        raise ValueError(f"the checkpoint's optimizer state cannot be loaded: {e}") from e
    for group, is_fused in zip(optimizer.param_groups, fused):
        group['fused'] = is_fused


def fit_moments(optimizer, saved):
    """Check that a saved optimizer state has the optimizer's groups and shapes, and crop its moments in place."""
    if not isinstance(saved.get('state'), dict) or not isinstance(saved.get('param_groups'), list):
        raise ValueError("the checkpoint's optimizer state has no 'state' and 'param_groups': it cannot be resumed")
    groups = saved['param_groups']
    needed = {'params', 'lr', 'betas', 'eps', 'weight_decay'}
    if not all(isinstance(g, dict) and needed <= set(g) and isinstance(g['params'], list) for g in groups):
        raise ValueError(f"the checkpoint's optimizer groups must have {', '.join(sorted(needed))}")
    for group in groups:
        betas = group['betas'] if isinstance(group['betas'], (tuple, list)) else []
        numbers = [group['lr'], group['eps'], group['weight_decay'], *betas]
        if len(numbers) != 5 or not all(type(number) in (int, float) for number in numbers):
            raise ValueError("lr, eps, weight_decay and betas in the checkpoint's optimizer state must be numbers")
    sizes, saved_sizes = ([len(g['params']) for g in groups] for groups in (optimizer.param_groups, groups))
    if sizes != saved_sizes:
        raise ValueError(f"the checkpoint's optimizer state is of {saved_sizes} parameters, but the model has {sizes}")
    params = [p for group in optimizer.param_groups for p in group['params']]
    indices = [index for group in groups for index in group['params']]
    if not all(type(index) is int for index in indices):
        raise ValueError("the parameters of the checkpoint's optimizer groups must be integers")
    for p, index in zip(params, indices):
        state = saved['state'].get(index)
        if state is None:  # of a parameter that has had no step
            continue
        if not isinstance(state, dict) or not {'step', 'exp_avg', 'exp_avg_sq'} <= set(state):
            raise ValueError(f"the checkpoint's optimizer state of parameter {index} has no step, exp_avg and "
                             "exp_avg_sq")
        step = state['step']
        if not (type(step) in (int, float) or isinstance(step, torch.Tensor) and step.numel() == 1):
            raise ValueError(f"step in the checkpoint's optimizer state of parameter {index} must be a number")
        for name in ('exp_avg', 'exp_avg_sq'):
            moment = state[name]
            cropped = isinstance(moment, torch.Tensor) and moment.dim() and moment.shape[1:] == p.shape[1:]
            if not cropped or len(moment) < len(p):
                is_ = tuple(moment.shape) if isinstance(moment, torch.Tensor) else type(moment).__name__
                raise ValueError(f"the checkpoint's optimizer state of parameter {index} must be of shape "
                                 f"{tuple(p.shape)}, but {name} is {is_}")
            state[name] = moment[:len(p)]


def tokenizer_of(checkpoint):
    """The tokenizer in the checkpoint; for older ones that of their data folder, and GPT-2's failing that."""
    if checkpoint.get('tokenizer'):
        return tokenizers.from_state(checkpoint['tokenizer'])
    folder = os.path.join('data', str(checkpoint.get('config', {}).get('dataset', '')))
    return tokenizers.from_state(tokenizers.state_of_dataset(folder))
