"""Is a model model.py's GPT, as it is written there? A decoder that has its own code for the step has to know."""
from torch.nn.modules import module as torch_module

REFUSED = "use another decoder, such as decode.EagerDecoder(model)"


def check_structure(model):
    """
    ValueError if the model's blocks would compute something else than a GPT's do: if their classes are not those beside
    the model's own, if a `forward` was replaced, or if there are hooks.
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
