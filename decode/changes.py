"""
Which models the executors know, and whether they compute what model.py computes. That file is there to be changed: the
compiled step has code of its own, and PyTorch's executor calls the model's parts, but not `GPT.forward`.
"""
import copy
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
from torch.nn.modules import module as torch_module

from decode.batch import Batch, Runs
from device import meta_model, small_model

REFUSED = "use decoder=eager, the executor in PyTorch"
UNCACHED = "pass use_cache=False: then the model is called as it is"
N_TOKENS = 12
# how far logits may be away, the root of a mean square in standard deviations; float32 and bfloat16 round nothing here
MOST_OFF = dict(float32=3e-5, bfloat16=3e-5, int8=0.05, int4=0.05)


def gpts_of(model):
    """The classes named GPT among a model's base classes: model.py's alone, or the traced one and model.py's."""
    return [kind for kind in type(model).__mro__ if kind.__name__ == 'GPT']


def is_changed(module, names=()):
    """Does a module run anything before, after or in place of these methods of its class? Without names: of any."""
    own = {name for name, part in vars(module).items() if callable(part) and hasattr(type(module), name)}
    return bool(module._forward_hooks or module._forward_pre_hooks or (own & {*names} if names else own)
                or module._compiled_call_impl or getattr(module, 'max_norm', None) is not None)


def check_own_forward(model, names=('forward', 'hidden_states'), advice=REFUSED):
    """ValueError if a class derived from GPT overrides one of these methods, or if the model or torch has hooks."""
    kinds, gpts = type(model).__mro__, gpts_of(model)
    for kind in kinds[:kinds.index(gpts[-1])] if gpts else ():
        changed = {*names} & set(vars(kind)) if kind not in gpts else None
        if changed:
            raise ValueError(f"the executor does not run the {', '.join(sorted(changed))} of {kind.__name__}: {advice}")
    if hasattr(model, '_orig_mod'):
        raise ValueError("the model came from torch.compile, which executors do not run: give the model that "
                         "torch.compile was called with")
    if is_changed(model, names):
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


def check_compiled(model, weights):
    """
    ValueError unless the compiled step has the logits of `GPT.forward` for a small model of the same class and
    settings. (`check_unchanged` compares a model with what its class makes.) weights: those of the executor.
    """
    if not gpts_of(model):  # `check_unchanged` refuses it
        return
    is_float32 = weights == 'float32' and model.lm_head.weight.dtype == torch.float32
    try:
        small = small_model(gpts_of(model)[-1], model.config, 0.1 if is_float32 else 0.125)
        off = distance(small, lambda small, idx: by_kernel(small, weights, idx))
    except Exception as e:  # a part that is not what it was, or sizes that it does not take
        raise ValueError(f"the CPU executor does not know model.py as it is now ({e!r:.200}): {REFUSED}") from e
    if not off <= MOST_OFF[weights]:
        raise ValueError("the CPU executor has code of its own, which does not compute what model.py computes now: "
                         f"logits are {off:.2g} of their standard deviation away; {REFUSED}")


def check_forward(model):
    """ValueError unless the logits of `GPT.forward` are what lm_head makes of `hidden_states`."""
    def by_parts(small, idx):
        return small.lm_head(small.hidden_states(idx, torch.arange(idx.size(1)))[0])[0]
    if not gpts_of(model):
        return
    try:
        off = distance(small_model(gpts_of(model)[-1], model.config), by_parts)
    except Exception:  # it takes no such sizes, no CPU or no float32, or gives no logits: then nothing is known
        return
    if off > MOST_OFF['float32']:
        raise ValueError("executors call hidden_states and lm_head, but not GPT.forward, and its logits are "
                         f"{off:.2g} standard deviations away from theirs: move what forward adds into one of the two, "
                         f"or {UNCACHED}")


@torch.no_grad()
def distance(model, logits_of):
    """The distance of `logits_of(model, idx)`, (T, vocab_size), from those of `GPT.forward` in standard deviations."""
    T = min(N_TOKENS, model.config.block_size)
    idx = torch.arange(7, 7 + 5 * T, 5, device='cpu')[None] % model.config.vocab_size
    with torch.autocast('cpu', enabled=False), torch.device('cpu'):
        expected, found = model(idx, idx, use_cache=False)[0][0], logits_of(model, idx)
    return float((found - expected).square().mean().sqrt() / expected.std())


def by_kernel(model, weights, idx):
    """The logits of the compiled step for all tokens of a text idx (1, T)."""
    from decode.cpu import CPUExecutor  # imported here: numba takes a second to import
    c, T = model.config, idx.size(1)

    def array():  # as one of `kvcache.storage`
        data = torch.zeros(c.n_kv_head, T, c.head_dim, dtype=torch.float32, device='cpu')
        return SimpleNamespace(data=data, scale=None, kind='float32', head_dim=c.head_dim, tensors=lambda: [data])
    executor, rows, text = CPUExecutor(model, weights, 1), np.arange(T), SimpleNamespace(runs=Runs([(0, 0, T)]))
    executor.hold([SimpleNamespace(n_slots=T, k=array(), v=array()) for _ in range(c.n_layer)])
    batch = Batch([text], [T], idx[0].numpy(), rows, np.ones(1, np.int64), [True], [False])
    return executor.logits_of(batch, batch.tokens, rows, [T], rows, (1, 0))
