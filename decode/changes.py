"""Which models the executors know."""
import copy

import torch.nn as nn
from torch.nn.modules import module as torch_module

REFUSED = "use decoder=eager, the executor in PyTorch"


def gpts_of(model):
    """The classes named GPT among a model's base classes: model.py's alone, or the traced one and model.py's."""
    return [kind for kind in type(model).__mro__ if kind.__name__ == 'GPT']


def is_changed(module):
    """Does a module run anything before, after or in place of the forward of its class?"""
    return bool(module._forward_hooks or module._forward_pre_hooks or 'forward' in vars(module)
                or module._compiled_call_impl or getattr(module, 'max_norm', None) is not None)


def check_own_forward(model, names=('forward', 'hidden_states'), advice=REFUSED):
    """ValueError if a class derived from GPT overrides one of these methods, or if the model or torch has hooks."""
    kinds, gpts = type(model).__mro__, gpts_of(model)
    for kind in kinds[:kinds.index(gpts[-1])] if gpts else ():
        changed = {*names} & set(vars(kind)) if kind not in gpts else None
        if changed:
            raise ValueError(f"the executor does not run the {', '.join(sorted(changed))} of {kind.__name__}: {advice}")
    if is_changed(model):
        raise ValueError(f"the executor does not run the hooks and functions that were added to the model: {advice}")
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise ValueError(f"the executor does not run torch's global hooks: {advice}")


def check_unchanged(model):
    """
    ValueError unless the model is the GPT of model.py that its config describes: the same modules of the same classes
    and shapes, with biases or without, and no hooks. The config and the weights alone then say what it computes.
    """
    check_own_forward(model)
    if not gpts_of(model):
        raise ValueError(f"the executor expects the GPT of model.py, not {type(model).__name__}: {REFUSED}")
    config = copy.copy(model.config)
    config.bias = True
    from device import meta_model  # imported here: whoever reads the executor in PyTorch needs no device.py
    plain = meta_model(gpts_of(model)[0], config)
    found, expected = (dict(each.named_modules(remove_duplicate=False)) for each in (model, plain))
    for name in sorted({*found, *expected} - {''}):
        module, of_plain = found.get(name), expected.get(name)
        traits, of_config = traits_of(module), traits_of(of_plain)
        for key in of_config | traits:
            if traits.get(key) != of_config.get(key) and (key in traits or key != '.bias'):
                raise ValueError(f"the executor expects {name}{key} to be {of_config.get(key, 'absent')}, not "
                                 f"{traits.get(key, 'absent')}: {REFUSED}")
        kind = type(module)
        if is_changed(module):
            raise ValueError(f"the executor does not run the hooks and functions that were added to {name}: {REFUSED}")
        if not kind.__module__.startswith('torch.') and kind.forward.__qualname__ != f'{kind.__name__}.forward':
            raise ValueError(f"the executor does not run the forward that was put into the class {kind.__name__}: "
                             f"{REFUSED}")


def traits_of(module):
    """What the config says of a module, {what: value}: its class, and the shapes of its parameters."""
    if module is None:
        return {}
    own = {'': type(module)}
    if isinstance(module, nn.GELU):
        own['.approximate'] = module.approximate
    return own | {f'.{key}': tuple(p.shape) for key, p in module._parameters.items() if p is not None}
