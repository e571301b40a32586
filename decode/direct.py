"""
A model's own code without the work of nn.Module around it, for the steps in PyTorch.

A decoded token of a small model goes through some sixty modules, and most of the time goes into Python: calling an
nn.Module takes 1.5 us, looking up its weight 0.8 us. Here both are done once for each `refresh`, and no code of the
model is written again: its classes run, and torch's modules become torch's functions.
"""
from functools import partial

import torch.nn as nn
import torch.nn.functional as F

from decode.changes import check_own_forward, gpts_of, is_changed


def direct_model(model):
    """
    A model's own code, bound to its present parameters and modules. The values of weights may change later.

    Its `hidden_states` and `lm_head` are called directly, as in eval mode. Modules that are not of model.py or torch,
    or were changed, are called as they are. A model with a forward of its own, or that is no GPT, is returned itself.
    """
    try:
        check_own_forward(model)
    except ValueError:
        return model
    gpts = gpts_of(model)
    return opened(model, gpts[-1].__module__) if gpts else model


def opened(module, home):
    """An object of the module's class that has the module's variables, and functions in the place of its parts."""
    own = object.__new__(type(module))
    public = {name: value for name, value in vars(module).items() if not name.startswith('_')}
    parts = {name: function_of(part, home) for name, part in module.named_children()}
    vars(own).update(public | module._parameters | module._buffers | parts, training=False)
    return own


def function_of(module, home):
    """What computes a module's forward: see FUNCTIONS, or the code of its class, if that is in the file `home`."""
    kind = type(module)
    if kind is nn.ModuleList:
        return [function_of(part, home) for part in module]
    if is_changed(module):
        return module
    if kind in FUNCTIONS:
        return FUNCTIONS[kind](module)
    if kind is nn.ModuleDict:
        return opened(module, home)
    return opened(module, home).forward if kind.__module__ == home else module


def gelu(module):
    """GELU (arXiv:1606.08415) of a contiguous x (..., n_inner)."""
    approximate = module.approximate

    def function(x):
        # On a CPU torch passes a contiguous tensor to oneDNN, whose set-up takes 20 us: a tenth of the time of a
        # decoded token. A transposed view goes to torch's own kernel, which is faster while x is small.
        if 0 < x.numel() <= 8192 and x.numel() % 2 == 0 and x.device.type == 'cpu':
            return F.gelu(x.view(2, -1).t(), approximate=approximate).t().view_as(x)
        return F.gelu(x, approximate=approximate)
    return function


FUNCTIONS = {  # {class of torch: (a module of that class) -> the function that computes its forward}
    nn.LayerNorm: lambda m: partial(F.layer_norm, normalized_shape=m.normalized_shape, weight=m.weight, bias=m.bias,
                                    eps=m.eps),
    nn.RMSNorm: lambda m: partial(F.rms_norm, normalized_shape=m.normalized_shape, weight=m.weight, eps=m.eps),
    nn.Linear: lambda m: partial(F.linear, weight=m.weight, bias=m.bias),
    nn.Embedding: lambda m: partial(F.embedding, weight=m.weight),
    nn.GELU: gelu,
    nn.Dropout: lambda m: lambda x: x,
}
