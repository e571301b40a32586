"""What a resumed run takes from its checkpoint: the weights, the shape, the optimizer's state, the generators'."""
import math
import os
from contextlib import contextmanager

import torch

import checkpoint as checkpoints
from training.checkpointer import FILES
from training.parallel import sharded_like

NO_SHAPE = 'vocab_size', 'block_size', 'dropout'  # may differ from those of the weights


def load_furthest(out_dir):
    """(checkpoint, path): of the files of a run, the one that is further along. ValueError if there is none."""
    paths = [os.path.join(out_dir, name) for name in FILES]
    found, loaded = [path for path in paths if os.path.exists(path)] or paths[:1], []
    for path in found:
        try:
            loaded.append((checkpoints.load(path), path))
        except ValueError as e:
            others = [f"; or move it away, to go on from {other}" for other in found if other != path]
            raise ValueError(f"{e}{''.join(others)}") from e
    return max(loaded, key=lambda pair: pair[0].get('iter_num', 0))  # of equal ones the first


def settle_shape(config, model_config, source, say):
    """
    Put the model's shape into the settings. Where a config file or the command line asks for another shape, say that
    this has no effect. source: where the weights come from.
    """
    c = model_config
    of_zero = dict(n_kv_head=c.n_head, head_dim=c.n_embd // c.n_head, n_inner=4 * c.n_embd)  # what 0 means
    for name, fixed in vars(c).items():
        if name not in NO_SHAPE:
            settle(config, name, fixed, source, say, config[name] or of_zero.get(name, config[name]))


def settle(config, name, fixed, source, say, asked):
    """`settle_shape` for one field of a GPTConfig. fixed: its value in the weights; asked: in the settings."""
    if name in config.given and asked != fixed:
        say(f"{name} stays {fixed}, as in the weights of {source}: {name}={config[name]} ({config.given[name]}) "
            "has no effect")
    config[name] = fixed


def settle_decays(config, resumed, say):
    """
    Put the weight decays and the betas of a checkpoint into the settings, unless a config file or the command line
    gives them: then say what they were. ValueError if the checkpoint has no optimizer, or another one.
    """
    if 'optimizer' not in resumed:
        raise ValueError("the checkpoint has no optimizer state, so it cannot be resumed: use a ckpt.pt that train.py "
                         "has written")
    kind = resumed.get('config', {}).get('optimizer', 'adamw')
    if kind != config['optimizer']:
        raise ValueError(f"optimizer is {config['optimizer']}, but the run before had {kind}: resume it with "
                         f"--optimizer={kind}")
    with of_checkpoint('optimizer'):
        groups = resumed['optimizer']['param_groups']
        saved = dict(zip(('weight_decay', 'beta1', 'beta2'), (groups[0]['weight_decay'], *groups[0]['betas'])))
        if kind == 'muon':
            saved['muon_weight_decay'] = groups[-1]['weight_decay']
    for name, before in saved.items():
        if name not in config.given:
            config[name] = before
        elif config[name] != before:
            say(f"{name} is {config[name]} from here on ({config.given[name]}); the run before had {before}")


@contextmanager
def of_checkpoint(name):
    """Inside, an error that a state of a checkpoint causes becomes a ValueError, which has its name."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as e:
        raise ValueError(f"the {name} state of the checkpoint does not fit, so it cannot be resumed "
                         f"({type(e).__name__}, {e}): use another copy") from e


def restore(resumed, optimizer, scaler):
    """
    Load the optimizer's moments, the loss scale and the states of torch's generators from a checkpoint. Its
    best_val_loss becomes a float, because nanoGPT saves a tensor. ValueError if they do not fit.
    """
    with of_checkpoint('best_val_loss'):
        resumed['best_val_loss'] = float(resumed.get('best_val_loss', math.inf))
    with of_checkpoint('optimizer'):
        restore_optimizer(optimizer, resumed['optimizer'])
    with of_checkpoint('scaler'):
        if resumed.get('scaler'):
            scaler.load_state_dict(resumed['scaler'])
    with of_checkpoint('rng'):
        if rng := resumed.get('rng'):  # nanoGPT has none
            torch.set_rng_state(rng['torch'])
            if len(rng['cuda']) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all(rng['cuda'])


def restore_optimizer(optimizer, saved):
    """
    Load the moments of a checkpoint (saved, a state_dict) into an optimizer of the same kind and the same parameters.
    Its groups stay as the settings have made them. Moments that have more rows than their parameter are cut to its
    rows: block_size was cropped.
    """
    own, state = optimizer.state_dict(), {}
    sizes, saved_sizes = ([len(group['params']) for group in of['param_groups']] for of in (own, saved))
    if sizes != saved_sizes:
        raise ValueError(f"it is of {saved_sizes} parameters, but the model has {sizes}")
    params = [p for group in optimizer.param_groups for p in group['params']]
    indices = [index for group in saved['param_groups'] for index in group['params']]
    for i, (p, index) in enumerate(zip(params, indices)):
        if index in saved['state']:  # a parameter that has had no step has no moments
            state[i] = {name: fitted(name, moment, p) for name, moment in saved['state'][index].items()}
    optimizer.load_state_dict({'state': state, 'param_groups': own['param_groups']})


def fitted(name, moment, p):
    """A number or a moment of the saved state of a parameter p, with p's rows. ValueError if it does not fit."""
    if name == 'step':
        return torch.as_tensor(moment, dtype=torch.float32)
    if moment.shape[1:] != p.shape[1:] or len(moment) < len(p):
        raise ValueError(f"{name} is {tuple(moment.shape)}, and its parameter {tuple(p.shape)}")
    return sharded_like(p, moment[:len(p)])
