"""
Which models the decoders know, and whether a model has changed.

A decoder that knows only model.py's GPT asks `check_unchanged` whether the model is one. What a decoder has copied or
looked up belongs to the model as a `Watch` saw it; at the start of each sequence it asks that `Watch` whether the model
is still the same.
"""
import copy
from itertools import chain

import torch
import torch.nn as nn
from torch.nn.modules import module as torch_module

from decode.process import uninterrupted
from device import meta_model

REFUSED = "use another decoder, such as decode.EagerDecoder(model)"
PROBES = 8  # values of each parameter that a `Watch` compares


def gpts_of(model):
    """The classes named GPT that a model is of: model.py's, or the traced one and that."""
    return [kind for kind in type(model).__mro__ if kind.__name__ == 'GPT']


def is_changed(module):
    """Does a module something before or after the forward of its class, or in its place?"""
    return bool(module._forward_hooks or module._forward_pre_hooks or 'forward' in vars(module)
                or module._compiled_call_impl or getattr(module, 'max_norm', None) is not None)


def check_own_forward(model, names=('forward', 'hidden_states'), advice=REFUSED):
    """ValueError if a class has replaced one of these methods of the GPT that it is derived from, or has hooks."""
    kinds, gpts = type(model).__mro__, gpts_of(model)
    for kind in kinds[:kinds.index(gpts[-1])] if gpts else ():
        changed = {*names} & set(vars(kind)) if kind not in gpts else None
        if changed:
            raise ValueError(f"the decoder does not run the {', '.join(sorted(changed))} of {kind.__name__}: {advice}")
    if is_changed(model):
        raise ValueError(f"the decoder does not run the hooks and functions that were added to the model: {advice}")
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise ValueError(f"the decoder does not run torch's global hooks: {advice}")


def check_unchanged(model):
    """
    ValueError unless the model is the GPT of model.py that its config says, so that the config and the weights alone
    say what it computes: the same modules of the same classes and shapes, with biases or without, and no hooks.
    """
    check_own_forward(model)
    if not gpts_of(model):
        raise ValueError(f"the decoder expects the GPT of model.py, not {type(model).__name__}: {REFUSED}")
    config = copy.copy(model.config)
    config.bias = True
    with uninterrupted():  # an interrupt would leave a mode of torch's set
        plain = meta_model(gpts_of(model)[0], config)
    found, expected = (dict(each.named_modules(remove_duplicate=False)) for each in (model, plain))
    for name in sorted({*found, *expected} - {''}):
        module, of_plain = found.get(name), expected.get(name)
        kind = type(module)
        if kind is not type(of_plain):
            raise ValueError(f"the decoder expects {name} to be {described(type(of_plain))}, not {described(kind)}: "
                             f"{REFUSED}")
        if is_changed(module):
            raise ValueError(f"the decoder does not run the hooks and functions that were added to {name}: {REFUSED}")
        if not kind.__module__.startswith('torch.') and kind.forward.__qualname__ != f'{kind.__name__}.forward':
            raise ValueError(f"the decoder does not run the forward that was put into the class {kind.__name__}: "
                             f"{REFUSED}")
        if kind is nn.GELU and module.approximate != of_plain.approximate:
            raise ValueError(f"the decoder expects {name} to be {of_plain}, as in the config, not {module}: {REFUSED}")
        shapes, of_config = shapes_of(module), shapes_of(of_plain)
        for key in sorted({*shapes, *of_config}):
            if shapes.get(key) != of_config.get(key) and (key in shapes or key != 'bias'):
                raise ValueError(f"the decoder expects {name}.{key} to be {of_config.get(key, 'absent')}, not "
                                 f"{shapes.get(key, 'absent')}: {REFUSED}")


def described(kind):
    return 'absent' if kind is type(None) else f'a {kind.__module__}.{kind.__name__}'


def shapes_of(module):
    return {key: tuple(p.shape) for key, p in module._parameters.items() if p is not None}


def norms_of(model):
    """The norms of rows, in the order of the step."""
    return [norm for b in model.transformer.h for norm in (b.ln_1, b.ln_2)] + [model.transformer.ln_f]


class ModelObjects:
    """
    The modules of a model, their parameters and buffers (not the values of these), hooks, `forward` functions and eps,
    and its config, at the moment when this was made.
    """

    def __init__(self, model):
        modules = list(model.modules())
        tables = [table for m in modules for table in (
            m._modules, m._parameters, m._buffers, m._forward_hooks, m._forward_pre_hooks)]
        tables += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self.tables, self.empty = [t for t in tables if t], [t for t in tables if not t]
        self.variables = [vars(m) for m in modules]
        self.named = [(v, name) for v in self.variables for name in ('forward', 'eps', 'config') if name in v]
        self.sizes = [*map(len, self.variables)]  # a `forward` that is added to a module is one more variable
        self.entries = self.now()  # keeps them alive, so that no other object can have the same id
        self.ids = [*map(id, self.entries)]

    def now(self):
        return [*chain.from_iterable(map(dict.values, self.tables)), *[v.get(name) for v, name in self.named]]

    def unchanged(self):
        return not any(self.empty) and [*map(len, self.variables)] == self.sizes and [*map(id, self.now())] == self.ids


def probe(tensor):
    """PROBES values of a contiguous tensor on the CPU, spread over it: a view of their bits as an integer array."""
    flat = tensor.detach().view(-1)
    flat = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]).numpy()
    return flat[::-(-len(flat) // PROBES)]


class Watch:
    """
    A model at the moment when this was made. `unchanged` is False after a change of

    - the parameters, buffers and modules that it consists of, their hooks and `forward` functions, or eps;
    - the address of a parameter's memory, or torch's version counters: optimizers, load_state_dict, in-place
    operations;
    - PROBES values of each parameter on a CPU: a write through `.data` or numpy to all of a parameter moves no counter.

    It misses a write that moves no counter and leaves all probed values as they are.
    """

    def __init__(self, model):
        self.objects = ModelObjects(model)
        self.tensors = [t for t in (*model.parameters(), *model.buffers()) if t.numel()]
        self.counted = [t for t in self.tensors if not t.is_inference()]  # inference tensors have no version counter
        self.probes = [probe(t) for t in self.tensors if t.device.type == 'cpu' and t.is_contiguous()]
        self.state = self.now()

    def now(self):
        """Addresses, version counters and probed values; these as bytes, of which a NaN is equal to itself."""
        return ([t.data_ptr() for t in self.tensors], [t._version for t in self.counted],
                [values.tobytes() for values in self.probes])

    def unchanged(self):
        return self.objects.unchanged() and self.now() == self.state

    def same_memory(self):
        """Are parameters and modules the same objects, and at the same addresses, whatever their values are?"""
        return self.objects.unchanged() and [t.data_ptr() for t in self.tensors] == self.state[0]
