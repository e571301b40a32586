"""
Decoders: one step of a model, as fast as the device allows, in the model's place.

A decoder is a callable (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache). It reads and writes the same
tuples as the model, begins a cache when given None, and has a `name`:

    model.generate(idx, 200, use_cache=True, decoder=decode.best(model, batch_size=len(idx)))
"""
import sys


class EagerDecoder:
    """The model itself, one operation after the other."""
    name = 'PyTorch, eager'

    def __init__(self, model):
        self.model = model

    def __call__(self, idx, kv_cache):
        logits, _, kv_cache = self.model(idx, kv_cache=kv_cache, use_cache=True)
        return logits, kv_cache


def best(model, batch_size, weights='float32', threads=None):
    """
    The fastest decoder for a model where it is, and for this many sequences at once.

    weights: 'float32', 'bfloat16' or 'int8', how the CPU reads them. threads: how many the CPU uses, by default by size.
    On a CPU that is the numba kernel, and the model itself for batches beyond LARGEST_BATCH, or if the kernel does not know
    it (`decode.cpu.check_model`) or numba is not there; that is said on stderr, and where weights or threads were
    asked for it is a ValueError. On CUDA it is the compiled step, elsewhere the model itself.
    """
    device = next(model.parameters()).device.type
    if device != 'cpu' and (weights != 'float32' or threads):
        raise ValueError(f"weights={weights} and threads are for the CPU; on {device}, the model's dtype decides")
    if device == 'cuda':
        from decode.compiled import CompiledDecoder
        return CompiledDecoder(model)
    if device == 'cpu':
        try:
            from decode.cpu import LARGEST_BATCH, CPUDecoder
            if batch_size <= LARGEST_BATCH or weights != 'float32':
                return CPUDecoder(model, weights, threads)
        except (ImportError, ValueError) as e:
            if weights != 'float32' or threads:
                raise ValueError(f"weights={weights}, threads={threads}: {e}") from e
            print(f"decoding eagerly: {e}", file=sys.stderr)
    return EagerDecoder(model)
