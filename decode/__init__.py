"""
Decoders: one step of a model, as fast as the device allows, in the model's place.

A decoder is a callable (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache). It reads and writes the same
tuples as the model, begins a cache when given None, and has a `name`:

    model.generate(idx, 200, use_cache=True, decoder=decode.best(model, batch_size=len(idx)))
"""
import sys

import torch


class EagerDecoder:
    """The model itself, one operation after the other."""
    name = 'PyTorch, eager'

    def __init__(self, model):
        self.model = model

    @torch.inference_mode()
    def __call__(self, idx, kv_cache):
        logits, _, kv_cache = self.model(idx, kv_cache=kv_cache, use_cache=True)
        return logits, kv_cache


def best(model, batch_size, weights='float32', threads=None):
    """
    The fastest decoder for a model where it is, and for this many sequences at once.

    weights: 'float32', 'bfloat16' or 'int8', how the CPU reads them. threads: how many the CPU uses; by default a few
    timed steps decide. On a CPU that is the numba kernel. The model itself is used for batches above
    `decode.cpu.LARGEST_BATCH`, for models that the kernel does not know and without numba, which stderr is told; where
    weights or threads were asked for, these are ValueErrors. On CUDA it is the compiled step, elsewhere the model.
    """
    device, asked = next(model.parameters()).device.type, asked_of_the_kernel(weights, threads)
    if device != 'cpu':
        if asked:
            raise ValueError(f"{asked} is for the CPU decoder, but the model is on {device}: leave it out")
        return named('compiled' if device == 'cuda' else 'eager', model)
    try:
        from decode.cpu import LARGEST_BATCH
        return named('cpu' if batch_size <= LARGEST_BATCH or asked else 'eager', model, weights, threads)
    except (ImportError, ValueError) as e:
        if asked:
            raise ValueError(f"{asked} cannot be had: {e}") from e
        print(f"decoding eagerly: {e}", file=sys.stderr)
        return EagerDecoder(model)


def asked_of_the_kernel(weights, threads):
    """The settings of the CPU decoder that are not at their defaults, as text."""
    return ' and '.join([f'weights={weights}'] * (weights != 'float32') + [f'threads={threads}'] * bool(threads))


def named(name, model, weights='float32', threads=None):
    """The decoder 'eager', 'cpu' or 'compiled'; only 'cpu' takes weights and threads. ValueError if it cannot be had."""
    if name != 'cpu' and asked_of_the_kernel(weights, threads):
        raise ValueError(f"{asked_of_the_kernel(weights, threads)} is for the cpu decoder, not for the {name} one")
    if name == 'eager':
        return EagerDecoder(model)
    if name == 'compiled':
        from decode.compiled import CompiledDecoder
        return CompiledDecoder(model)
    if name == 'cpu':
        try:
            from decode.cpu import CPUDecoder
        except ImportError as e:
            raise ValueError(f"the CPU decoder needs numba ({e}): pip install numba") from e
        return CPUDecoder(model, weights, threads)
    raise ValueError(f"a decoder is eager, cpu or compiled, not {name!r}")
