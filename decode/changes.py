"""
Which models the decoders know, and whether a model has changed.

A decoder that does not run the model's own code asks `check_structure` whether the model is model.py's GPT, unchanged.
What it has copied or looked up belongs to the model as a `Watch` saw it; at the start of each sequence it asks that
`Watch` whether the model is still the same.
"""
from itertools import chain

import torch
import torch.nn as nn
from torch.nn.modules import module as torch_module

REFUSED = "use another decoder, such as decode.EagerDecoder(model)"
PROBES = 8  # values of each parameter that a `Watch` compares


def gpts_of(model):
    """The classes named GPT that a model is of: model.py's, or the traced one and that."""
    return [kind for kind in type(model).__mro__ if kind.__name__ == 'GPT']


def check_own_forward(model, names=('forward', 'hidden_states'), advice=REFUSED):
    """ValueError if a class has replaced one of these methods of the GPT that it is derived from, or has hooks."""
    kinds, gpts = type(model).__mro__, gpts_of(model)
    for kind in kinds[:kinds.index(gpts[-1])] if gpts else ():
        changed = {*names} & set(vars(kind)) if kind not in gpts else None
        if changed:
            raise ValueError(f"the decoder does not run the {', '.join(sorted(changed))} of {kind.__name__}: {advice}")
    if model._forward_hooks or model._forward_pre_hooks or 'forward' in vars(model):
        raise ValueError(f"the decoder does not run the hooks and functions that were added to the model: {advice}")


def check_structure(model):
    """
    ValueError if the model may compute something else than model.py's GPT: if its blocks are of classes from another
    module than the GPT class, if a `forward` was replaced, or if there are hooks.
    """
    check_own_forward(model)
    home = {kind.__module__ for kind in gpts_of(model)}
    for i, block in enumerate(model.transformer.h):
        for name, module in (('Block', block), ('CausalSelfAttention', block.attn), ('MLP', block.mlp)):
            kind = type(module)
            if kind.__name__ != name or kind.__module__ not in home:
                raise ValueError(f"the decoder expects the {name} of {' or '.join(sorted(home))} in block {i}, "
                                 f"not {kind.__module__}.{kind.__name__}: {REFUSED}")
            if kind.forward.__qualname__ != f'{name}.forward':
                raise ValueError(f"the decoder does not run the forward that was put into the class {name}: {REFUSED}")
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or 'forward' in vars(module):
            raise ValueError(f"the decoder does not run the hooks and functions that were added to {name}: {REFUSED}")
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise ValueError(f"the decoder does not run torch's global hooks: {REFUSED}")


def check_parts(model):
    """
    ValueError unless the model passes `check_structure`, consists of plain torch modules, and these have the settings
    and shapes that its config says: then its weights alone say what it computes.
    """
    check_structure(model)
    c, t = model.config, model.transformer
    linears = [linear for b in t.h for linear in (b.attn.c_attn, b.attn.c_proj, b.mlp.c_fc, b.mlp.c_proj)]
    dropouts = [t.drop, *(dropout for b in t.h for dropout in (b.attn.resid_dropout, b.mlp.dropout))]
    gelus, embeddings = [b.mlp.gelu for b in t.h], [t.wte, t.wpe] if c.position == 'learned' else [t.wte]
    for kind, modules in ((nn.Linear, [*linears, model.lm_head]), (nn.LayerNorm, norms_of(model)), (nn.GELU, gelus),
                          (nn.Embedding, embeddings), (nn.Dropout, dropouts)):
        for module in modules:
            if type(module) is not kind or module._compiled_call_impl or getattr(module, 'max_norm', None) is not None:
                raise ValueError(f"the decoder expects a plain {kind.__name__}, not {module}: {REFUSED}")
    if any(gelu.approximate != c.gelu for gelu in gelus):
        raise ValueError(f"the decoder expects GELU(approximate={c.gelu!r}), as the config says, in all blocks: "
                         f"{REFUSED}")
    found = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    expected = shapes_of(model)
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            raise ValueError(f"the decoder expects {name} to be {expected.get(name, 'absent')}, not "
                             f"{found.get(name, 'absent')}: {REFUSED}")


def norms_of(model):
    """The layer norms, in the order of the step."""
    return [norm for b in model.transformer.h for norm in (b.ln_1, b.ln_2)] + [model.transformer.ln_f]


def shapes_of(model):
    """{parameter name: shape} of a GPT with the model's config, with the biases that the model has."""
    c = model.config
    C, t = c.n_embd, 'transformer.'
    shapes = {name: (c.vocab_size, C) for name in ('lm_head.weight', t + 'wte.weight')}
    if c.position == 'learned':
        shapes[t + 'wpe.weight'] = (c.block_size, C)
    linears = {'attn.c_attn': ((c.n_head + 2 * c.n_kv_head) * c.head_dim, C), 'attn.c_proj': (C, C),
               'mlp.c_fc': (4 * C, C), 'mlp.c_proj': (C, 4 * C)}
    for layer in range(c.n_layer):
        shapes |= {f'{t}h.{layer}.{name}.weight': shape for name, shape in linears.items()}
        shapes |= {f'{t}h.{layer}.{name}.weight': (C,) for name in ('ln_1', 'ln_2')}
    shapes[t + 'ln_f.weight'] = (C,)
    for bias in [name for name, _ in model.named_parameters() if name.endswith('.bias')]:
        weight = bias.removesuffix('bias') + 'weight'
        if weight in shapes:
            shapes[bias] = shapes[weight][:1]
    return shapes


class ModelObjects:
    """
    The modules of a model, their parameters and buffers (not the values of these), hooks, `forward` functions and eps,
    at the moment when this was made.
    """

    def __init__(self, model):
        modules = list(model.modules())
        tables = [table for m in modules for table in (
            m._modules, m._parameters, m._buffers, m._forward_hooks, m._forward_pre_hooks)]
        tables += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self.tables, self.empty = [t for t in tables if t], [t for t in tables if not t]
        self.variables = [vars(m) for m in modules]
        self.named = [(v, name) for v in self.variables for name in ('forward', 'eps') if name in v]
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
