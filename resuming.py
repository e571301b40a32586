"""What loaded weights and a resumed checkpoint decide, and what the settings of the new run decide."""
import torch

import checkpoint as checkpoints

SHAPE = ('n_layer', 'n_head', 'n_embd', 'bias')  # block_size may be cropped, and dropout is free


def settle_shape(config, model_config, source, say):
    """
    Put the model's shape into the settings. Where a config file or the command line wants another one, say that it
    has no effect.

    config: the Settings of the run; source: where the weights come from; say: prints a line.
    """
    for name in SHAPE:
        decided = getattr(model_config, name)
        if name in config.given and config[name] != decided:
            say(f"{name} stays {decided}, as in the weights of {source}: {name}={config[name]} ({config.given[name]}) "
                "has no effect")
        config[name] = decided


def restore_optimizer(config, optimizer, scaler, resumed, say):
    """
    Load the checkpoint's moments and loss scale. weight_decay and the betas are as a config file or the command line
    gives them, and else those of the checkpoint. ValueError where the checkpoint does not fit.
    """
    if 'optimizer' not in resumed:
        raise ValueError("the checkpoint has no optimizer state: it cannot be resumed")
    checkpoints.restore_optimizer(optimizer, resumed['optimizer'])
    if resumed.get('scaler'):
        try:
            scaler.load_state_dict(resumed['scaler'])
        except (RuntimeError, KeyError, TypeError) as e:
            raise ValueError(f"the checkpoint's scaler state cannot be loaded: {e}") from e
    decaying = optimizer.param_groups[0]
    saved = dict(zip(('weight_decay', 'beta1', 'beta2'), (decaying['weight_decay'], *decaying['betas'])))
    for name in saved:
        if name not in config.given:
            config[name] = saved[name]
        elif config[name] != saved[name]:
            say(f"{name} is {config[name]} from here on ({config.given[name]}); the run before had {saved[name]}")
    decaying['weight_decay'] = config['weight_decay']
    for group in optimizer.param_groups:
        group['betas'] = config['beta1'], config['beta2']


def restore_rng(rng):
    """Set torch's generators to the states of a checkpoint. ValueError if they are none."""
    try:
        torch.set_rng_state(rng['torch'].cpu())
        if len(rng['cuda']) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([state.cpu() for state in rng['cuda']])
    except (RuntimeError, TypeError) as e:
        raise ValueError(f"the checkpoint's rng is no state of torch's generator: {e}") from e
