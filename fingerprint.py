"""
Are a model's weights still what they were?

`fingerprint` reads every byte: at the memory's speed, so it is for the start of a sequence. `Watch` is for the steps
in between: it looks at what is cheap to look at, and at a few of each parameter's values.
"""
from itertools import chain

import torch
import xxhash
from torch.nn.modules import module as torch_module

PROBES = 8  # values of each parameter that a Watch looks at


def digest(tensor):
    """A 64-bit hash of a tensor's dtype, shape and bytes, in their order (xxh3; on a CPU at the memory's speed)."""
    flat = tensor.detach().contiguous().cpu().view(-1)
    if flat.dtype is not torch.uint8:
        flat = flat.view(torch.uint8)
    return xxhash.xxh3_64_intdigest(flat.numpy().data, hash((str(tensor.dtype), tuple(tensor.shape))) & (2**64 - 1))


def fingerprint(model):
    """
    A tuple to compare with an earlier one: where each parameter and buffer is, torch's count of its changes, its
    `digest`, and the modules, hooks and replaced `forward` functions the model consists of.
    """
    tensors = [*model.parameters(), *model.buffers()]
    parts = tuple((name, id(type(m)), id(vars(m).get('forward')), getattr(m, 'eps', None),
                   *map(id, chain(m._forward_hooks.values(), m._forward_pre_hooks.values())))
                  for name, m in model.named_modules())
    hooks = tuple(map(id, chain(torch_module._global_forward_hooks.values(), torch_module._global_forward_pre_hooks.values())))
    return parts, hooks, tuple((t.data_ptr(), version(t), digest(t)) for t in tensors)


def version(tensor):
    """torch's count of the changes to a tensor, or None: tensors made in inference mode have no count."""
    return None if tensor.is_inference() else tensor._version


def probe(tensor):
    """An array of PROBES values of a contiguous tensor on the CPU, spread over it: their bits, where they are."""
    flat = tensor.detach().view(-1)
    flat = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]).numpy()
    return flat[::-(-len(flat) // PROBES)]


class Watch:
    """
    A model at the moment when this was made. `unchanged` says cheaply whether it still is the same, as far as can be
    seen from:

    - parameters, buffers and modules that were replaced, added or removed; hooks and `forward` functions that were added;
    - torch's version counters, and where each parameter's memory is;
    - PROBES values of each parameter on a CPU, since a write through `.data`, numpy or a fused optimizer moves no
      counter.

    So one change is not seen: a write past the counters that leaves all probed values as they are. `fingerprint` sees
    it.
    """

    def __init__(self, model):
        self.model, modules = model, list(model.modules())
        tables = [table for m in modules
                  for table in (m._parameters, m._buffers, m._modules, m._forward_hooks, m._forward_pre_hooks)]
        tables += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self.tables, self.empty = [t for t in tables if t], [t for t in tables if not t]
        self.variables = [vars(m) for m in modules]
        self.entries = self.now()  # keeps them alive, so that no other object can have the same id
        self.ids = [*map(id, self.entries)]
        self.tensors = [t for t in (*model.parameters(), *model.buffers()) if t.numel()]
        self.pointers = [t.data_ptr() for t in self.tensors]
        self.counted = [t for t in self.tensors if not t.is_inference()]
        self.counts = [t._version for t in self.counted]
        self.probes = [probe(t) for t in self.tensors if t.device.type == 'cpu' and t.is_contiguous()]
        self.values = self.probed()

    def now(self):
        return [*chain.from_iterable(table.values() for table in self.tables), *(v.get('forward') for v in self.variables)]

    def probed(self):
        """The probed values, as bytes: a NaN is then equal to itself."""
        return [values.tobytes() for values in self.probes]

    def same_objects(self):
        """Are the modules, hooks, parameters, their memory and torch's counts of their changes the same?"""
        return (not any(self.empty) and [*map(id, self.now())] == self.ids
                and [t.data_ptr() for t in self.tensors] == self.pointers
                and [t._version for t in self.counted] == self.counts)

    def unchanged(self):
        """False if the model was seen to have changed."""
        return self.same_objects() and self.probed() == self.values


