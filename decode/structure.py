"""Is a model the GPT of model.py, unchanged? A decoder that does not run the model's own code has to check."""
from itertools import chain

from torch.nn.modules import module as torch_module

REFUSED = "use another decoder, such as decode.EagerDecoder(model)"


def check_structure(model):
    """
    ValueError if the model may compute something else than model.py's GPT: if its blocks are of classes from another
    module than the GPT class, if a `forward` was replaced, or if there are hooks.
    """
    kinds = type(model).__mro__
    gpts = [kind for kind in kinds if kind.__name__ == 'GPT']
    home = {kind.__module__ for kind in gpts}
    for kind in kinds[:kinds.index(gpts[-1])] if gpts else ():
        changed = {'forward', 'hidden_states'} & set(vars(kind)) if kind not in gpts else None
        if changed:
            raise ValueError(f"the decoder does not run the {', '.join(sorted(changed))} of {kind.__name__}: {REFUSED}")
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
            raise ValueError(f"the decoder does not run the hooks and functions that were added to "
                             f"{name or 'the model'}: {REFUSED}")
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise ValueError(f"the decoder does not run torch's global hooks: {REFUSED}")


class ModelObjects:
    """
    The modules of a model, their hooks, `forward` functions and eps, at the moment when this was made; with
    parameters=True also the parameter and buffer objects (not their values).
    """

    def __init__(self, model, parameters=False):
        modules = list(model.modules())
        tables = [table for m in modules for table in (m._modules, m._forward_hooks, m._forward_pre_hooks)]
        if parameters:
            tables += [table for m in modules for table in (m._parameters, m._buffers)]
        tables += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self.tables, self.empty = [t for t in tables if t], [t for t in tables if not t]
        self.variables = [vars(m) for m in modules]
        self.entries = self.now()  # keeps them alive, so that no other object can have the same id
        self.ids = [*map(id, self.entries)]

    def now(self):
        return [*chain.from_iterable(table.values() for table in self.tables),
                *(v.get('forward') for v in self.variables), *(v.get('eps') for v in self.variables)]

    def unchanged(self):
        return not any(self.empty) and [*map(id, self.now())] == self.ids
