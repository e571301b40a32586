"""
Have a model's weights changed?

A `Watch` has two answers: `unchanged` compares what is cheap to compare, for each step; `identical` also reads the
bytes, at the speed of the memory, for the start of a sequence.
"""
import ctypes

import torch
import xxhash

from decode.structure import ModelObjects

PROBES = 8  # values of each parameter that `unchanged` compares
# of a model with more than LARGE weights, `identical` reads SAMPLE of each EVERY values
LARGE, EVERY, SAMPLE = 2**24, 512, 16


def contents(tensor, every=1):
    """A tensor's bytes in order; with `every`, of the first SAMPLE of each `every` values, and of the last `every`."""
    flat = tensor.detach().contiguous().view(-1)
    if every > 1 and flat.numel() > 16 * every:
        rows = flat[:flat.numel() // every * every].view(-1, every)
        flat = torch.cat([rows[:, :SAMPLE].reshape(-1), flat[-every:]])
    flat = flat.cpu()
    return flat, (ctypes.c_char * (flat.numel() * flat.element_size())).from_address(flat.data_ptr())


def probe(tensor):
    """PROBES values of a contiguous tensor on the CPU, spread over it: a view of their bits as an integer array."""
    flat = tensor.detach().view(-1)
    flat = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]).numpy()
    return flat[::-(-len(flat) // PROBES)]


class Watch:
    """
    A model at the moment when this was made. `unchanged` is False after a change of

    - the parameters, buffers and modules that it consists of, their hooks and `forward` functions, or eps;
    - torch's version counters, or the address of a parameter's memory;
    - PROBES values of each parameter on a CPU: a write through `.data`, numpy or a fused optimizer moves no counter.

    It misses a write that moves no counter and leaves all probed values as they are. `identical` sees such a write: it
    compares a hash (xxh3) of all bytes in order, or, of a model with more than LARGE weights, of SAMPLE in EVERY values
    of each matrix, so that a change of EVERY values in a row does not escape it.
    """

    def __init__(self, model):
        self.model, self.objects = model, ModelObjects(model, parameters=True)
        self.tensors = [t for t in (*model.parameters(), *model.buffers()) if t.numel()]
        self.pointers = [t.data_ptr() for t in self.tensors]
        self.counted = [t for t in self.tensors if not t.is_inference()]  # inference tensors have no version counter
        self.counts = [t._version for t in self.counted]
        self.probes = [probe(t) for t in self.tensors if t.device.type == 'cpu' and t.is_contiguous()]
        self.values = self.probed()
        self.every = EVERY if sum(t.numel() for t in self.tensors) > LARGE else 1
        self.hash = self.hashed()

    def probed(self):
        """The probed values, as bytes, of which a NaN is equal to itself."""
        return [values.tobytes() for values in self.probes]

    def same_objects(self):
        """Are the modules, hooks and parameters, the parameters' memory and their version counters the same?"""
        return (self.objects.unchanged() and [t.data_ptr() for t in self.tensors] == self.pointers
                and [t._version for t in self.counted] == self.counts)

    def unchanged(self):
        """False after a change that is cheap to see."""
        return self.same_objects() and self.probed() == self.values

    def hashed(self):
        hasher = xxhash.xxh3_64()
        for tensor in self.tensors:
            kept, buffer = contents(tensor, self.every)
            hasher.update(buffer)
        return hasher.intdigest(), [tensor.shape for tensor in self.tensors]

    def identical(self):
        """False after a change of the model or of any byte that is hashed."""
        return self.same_objects() and self.hashed() == self.hash
