"""
Are a model's weights still what they were?

A `Watch` answers it twice: `unchanged` looks at what is cheap to look at, for each step; `identical` reads the bytes
as well, at the memory's speed, for the start of a sequence.
"""
import ctypes
from itertools import chain

import torch
import xxhash
from torch.nn.modules import module as torch_module

PROBES = 8  # values of each parameter that `unchanged` looks at
LARGE, EVERY, SAMPLE = 2**24, 512, 16  # of a model with more than LARGE weights, SAMPLE of EVERY so many values are read


def contents(tensor, every=1):
    """A tensor's bytes in their order; with `every`, the first SAMPLE of each so many values, and the last ones."""
    flat = tensor.detach().contiguous().view(-1)
    if every > 1 and flat.numel() > 16 * every:
        rows = flat[:flat.numel() // every * every].view(-1, every)
        flat = torch.cat([rows[:, :SAMPLE].reshape(-1), flat[-every:]])
    flat = flat.cpu()
    return flat, (ctypes.c_char * (flat.numel() * flat.element_size())).from_address(flat.data_ptr())


def probe(tensor):
    """An array of PROBES values of a contiguous tensor on the CPU, spread over it: their bits, where they are."""
    flat = tensor.detach().view(-1)
    flat = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]).numpy()
    return flat[::-(-len(flat) // PROBES)]


class Watch:
    """
    A model at the moment when this was made. `unchanged` says cheaply whether it still is the same, as far as it
    shows in

    - parameters, buffers and modules that were replaced, added or removed, hooks and `forward` functions that were
      added, another eps;
    - torch's version counters, and where each parameter's memory is;
    - PROBES values of each parameter on a CPU, since a write through `.data`, numpy or a fused optimizer moves no
      counter.

    So one change is not seen: a write past the counters that leaves all probed values as they are. `identical` sees
    it: it compares a hash (xxh3) of all bytes in their order, or, of a model with more than LARGE weights, of SAMPLE in
    EVERY values of each matrix, so that a change of EVERY values in a row does not escape it.
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
        self.counted = [t for t in self.tensors if not t.is_inference()]  # others have no count
        self.counts = [t._version for t in self.counted]
        self.probes = [probe(t) for t in self.tensors if t.device.type == 'cpu' and t.is_contiguous()]
        self.values = self.probed()
        self.every = EVERY if sum(t.numel() for t in self.tensors) > LARGE else 1
        self.hash = self.hashed()

    def now(self):
        return [*chain.from_iterable(table.values() for table in self.tables),
                *(v.get('forward') for v in self.variables), *(v.get('eps') for v in self.variables)]

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

    def hashed(self):
        hasher = xxhash.xxh3_64()
        for tensor in self.tensors:
            kept, buffer = contents(tensor, self.every)
            hasher.update(buffer)
        return hasher.intdigest(), [tensor.shape for tensor in self.tensors]

    def identical(self):
        """False if the model or any byte that is read of it has changed."""
        return self.same_objects() and self.hashed() == self.hash
