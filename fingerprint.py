"""Are a model's weights still what they were?"""
import torch

LARGE, SAMPLE = 2**24, 2**18  # weights: of a model with more than LARGE, only some SAMPLE are looked at


def bits(tensor, every=1):
    """A number that changes with nearly any change of a tensor's bits, or of every n-th 4 bytes of them, at the speed of reading them."""
    flat = tensor.detach().reshape(-1)
    size, start = flat.numel() * flat.element_size(), flat.storage_offset() * flat.element_size()
    dtype = torch.int8 if (size | start) % 4 else torch.int32 if (size | start) % 8 or every > 1 else torch.int64
    return flat.view(dtype)[::every].sum().item()


def identity(model):
    """Of each parameter where it is, what it is, and torch's count of its changes: cheap, and blind to what is written past torch's eyes."""
    return [(p.data_ptr(), p.dtype, None if p.is_inference() else p._version) for p in model.parameters()]


def fingerprint(model):
    """Something to compare with an earlier one: the `identity`, and of each parameter its `bits`."""
    n = sum(p.numel() for p in model.parameters())
    every = 1 if n <= LARGE else n // SAMPLE
    return identity(model), [bits(p, every) for p in model.parameters()]
