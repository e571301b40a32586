"""What a resumed run takes from its checkpoint: the weights, the shape, the optimizer's state, the generators'."""
import os

import torch

import checkpoint as checkpoints
from formats.weights import is_dense
from training.checkpointer import NAMES
from training.parallel import sharded_like

# what the weights were trained with; block_size may be cropped, and dropout is free
SHAPE = ('n_layer', 'n_head', 'n_embd', 'bias', 'position', 'rope_theta', 'n_kv_head', 'window', 'n_sink', 'gelu',
         'norm', 'norm_eps', 'mlp', 'n_inner', 'head_dim', 'tied', 'qkv_bias', 'qk_norm', 'rope_scaling')
HYPER = 'lr', 'betas', 'momentum', 'eps', 'weight_decay'  # of a group of an optimizer; Muon's has no betas


def load_furthest(out_dir, device):
    """(checkpoint, path): of the files of a run, the one that is further along. ValueError if there is none."""
    paths = [os.path.join(out_dir, name) for name in NAMES]
    found = [path for path in paths if os.path.exists(path)] or paths[:1]
    loaded = ((checkpoints.load(path, device), path) for path in found)
    return max(loaded, key=lambda pair: pair[0].get('iter_num', 0))  # of equal ones the first


def settle_shape(config, model_config, source, say):
    """
    Put the model's shape into the settings. Where a config file or the command line asks for another shape, say that
    this has no effect.

    config: the Settings of the run; source: where the weights come from; say: prints a line.
    """
    c = model_config
    of_zero = dict(n_kv_head=c.n_head, head_dim=c.n_embd // c.n_head, n_inner=4 * c.n_embd)  # what 0 means
    for name in SHAPE:
        fixed, asked = getattr(c, name), config[name] or of_zero.get(name, config[name])
        if name in config.given and asked != fixed:
            say(f"{name} stays {fixed}, as in the weights of {source}: {name}={config[name]} ({config.given[name]}) "
                "has no effect")
        config[name] = fixed


def resume_optimizer(config, optimizer, scaler, resumed, say):
    """
    Load the checkpoint's moments and loss scale. Weight decays and the betas are the checkpoint's, unless a config file
    or the command line gives them. ValueError if the checkpoint does not fit the optimizer.
    """
    if 'optimizer' not in resumed:
        raise ValueError("the checkpoint has no optimizer state, so it cannot be resumed: use a ckpt.pt that train.py "
                         "has written")
    before = resumed.get('config', {}).get('optimizer', 'adamw')
    if before != config['optimizer']:
        raise ValueError(f"optimizer is {config['optimizer']}, but the run before had {before}: resume it with "
                         f"--optimizer={before}")
    restore_optimizer(optimizer, resumed['optimizer'])
    if resumed.get('scaler'):
        try:
            scaler.load_state_dict(resumed['scaler'])
        except (RuntimeError, KeyError, TypeError) as e:
            raise ValueError(f"the checkpoint's scaler state cannot be loaded ({e}): use another copy") from e
    adamw = [group for group in optimizer.param_groups if 'betas' in group]
    muon = [group for group in optimizer.param_groups if 'momentum' in group]
    saved = dict(zip(('weight_decay', 'beta1', 'beta2'), (adamw[0]['weight_decay'], *adamw[0]['betas'])))
    if muon:
        saved['muon_weight_decay'] = muon[0]['weight_decay']
    for name in saved:
        if name not in config.given:
            config[name] = saved[name]
        elif config[name] != saved[name]:
            say(f"{name} is {config[name]} from here on ({config.given[name]}); the run before had {saved[name]}")
    adamw[0]['weight_decay'] = config['weight_decay']
    for group in adamw:
        group['betas'] = config['beta1'], config['beta2']
    for group in muon:
        group['weight_decay'] = config['muon_weight_decay']


def restore_optimizer(optimizer, saved):
    """
    Load a checkpoint's optimizer state (a state_dict) into an optimizer of the same kind and the same parameters.

    Moments that have more rows than their parameter are cut to its rows: block_size was cropped. Only the numbers in
    HYPER of its groups are loaded: how a step is computed (fused, ...) depends on the device. ValueError if the state
    does not fit, or is of another variant of AdamW.
    """
    own = optimizer.state_dict()
    try:
        groups, state = saved['param_groups'], {}
        sizes, saved_sizes = ([len(group['params']) for group in of] for of in (own['param_groups'], groups))
        if sizes != saved_sizes:
            raise ValueError(f"it is of {saved_sizes} parameters, but the model has {sizes}")
        if any(group.get('amsgrad') or group.get('maximize') for group in groups):
            raise ValueError("it has amsgrad or maximize, which AdamW here has not")
        params = [(p, 'betas' in group) for group in optimizer.param_groups for p in group['params']]
        indices = [index for group in groups for index in group['params']]
        for i, ((p, adamw), index) in enumerate(zip(params, indices)):
            if saved['state'].get(index) is not None:  # a parameter that has had no step has no moments
                state[i] = fitted_moments(p, saved['state'][index], adamw)
        hyper = [{name: theirs[name] for name in HYPER if name in mine}
                 for mine, theirs in zip(own['param_groups'], groups)]
        for group in hyper:
            beta1, beta2 = group.get('betas', (0.0, 0.0))
            if not all(type(number) in (int, float) for number in (*(group | dict(betas=beta1)).values(), beta2)):
                raise TypeError(f"{', '.join(group)} must be numbers")
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as e:
        raise ValueError(f"the checkpoint's optimizer state does not fit the model, and cannot be resumed: "
                         f"{type(e).__name__}, {e}") from e
    optimizer.load_state_dict({'state': state, 'param_groups': [
        mine | theirs for mine, theirs in zip(own['param_groups'], hyper)]})


def fitted_moments(p, state, adamw):
    """The saved state of parameter p, of AdamW or else of Muon, with p's rows. ValueError if it does not fit."""
    fitted = {'step': torch.as_tensor(state['step'], dtype=torch.float32).reshape(())} if adamw else {}
    for name in ('exp_avg', 'exp_avg_sq') if adamw else ('momentum_buffer',):
        moment = state[name]
        of_floats = is_dense(moment) and moment.is_floating_point()
        if not of_floats or moment.shape[1:] != p.shape[1:] or len(moment) < len(p):
            raise ValueError(f"{name} is {tuple(moment.shape)}, and its parameter {tuple(p.shape)}")
        fitted[name] = sharded_like(p, moment[:len(p)])
    return fitted


def restore_rng(rng):
    """
    Set torch's generators to the states in a checkpoint, if it has some. ValueError if they are not states of these
    generators.
    """
    if rng is None:
        return
    try:
        torch.set_rng_state(rng['torch'].cpu())
        if len(rng['cuda']) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([state.cpu() for state in rng['cuda']])
    except (RuntimeError, TypeError, KeyError, AttributeError) as e:
        raise ValueError(f"the checkpoint's rng is no state of torch's generator ({e}): use another copy") from e
