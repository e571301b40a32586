"""
Keys and values of many sequences, for one model.

    contiguous   a row of slots for each sequence, or a ring of them for a window; the model's tuples
    paged        blocks of slots, shared between sequences that begin alike (vLLM)
    blocks       which block holds which tokens, without keys and values
    base         what the caches have in common: operations on sequences, and a step
    records      what they know of a sequence
    storage      rows of numbers: floats, int8, int4
    llamacpp/    llama.cpp's cells and streams, its states, and its caches for some of the layers
    openppl      OpenPPL's cache as one function

`make_cache` makes a cache for sequences. Its methods are `new`, `fork`, `truncate`, `shift`, `free` and `step`, see
`base.BaseCache`. All of them take models with any positions, grouped heads, windows and sinks.
"""
from functools import partial

from kvcache.base import shortened
from kvcache.contiguous import ContiguousCache
from kvcache.llamacpp.sequences import CellSequences
from kvcache.paged import PagedCache, n_blocks_for
from kvcache.storage import BITS, check_memory

__all__ = ['KINDS', 'make_cache']


PAGE_SIZE = 16  # positions in a block of a paged cache
KINDS = {
    'tuple': ContiguousCache,
    'streams': partial(CellSequences, unified=False),
    'unified': CellSequences,
    'paged': lambda model, n_seq, *how: PagedCache(
        model, n_seq * n_blocks_for(model.config, PAGE_SIZE), PAGE_SIZE, *how),
}


def make_cache(model, kind, n_seq, bits=0, decoder=None, n_positions=None):
    """
    A cache with room for n_seq sequences of n_positions tokens each, by default block_size, or of any lengths if the
    model has a window and no learned positions; a paged one has room for more sequences if they are shorter.

    kind: one of `KINDS`. bits: 0 stores keys and values as the decoder or the model computes them, 8 and 4 quantise
    them. decoder: of this model, as `decode.best` makes it; if it has a step that reads such a cache, each step of the
    cache is one call of it, and if not, the model runs in PyTorch. The cache's `name` says which. Raises ValueError on
    other values, if the model's dtype cannot be stored, if the decoder is for another model, and if the memory that is
    free does not suffice.
    """
    if kind not in list(KINDS) or bits not in (0, 8, 4):
        raise ValueError(f"a cache is {', '.join(KINDS)} in 0 (unquantised), 8 or 4 bits; not {kind!r} in {bits!r}")
    if not isinstance(n_seq, int) or n_seq < 1:
        raise ValueError(f"a cache is for at least 1 sequence, not {n_seq!r}")
    type_kv = getattr(decoder, 'type_kv', str(model.lm_head.weight.dtype).removeprefix('torch.'))
    type_kv = f'int{bits}' if bits else type_kv
    if type_kv not in BITS:
        raise ValueError(f"a cache stores numbers as {', '.join(BITS)}, and the model is {type_kv}: "
                         "convert it, or pass bits=8")
    small = shortened(model, n_positions)
    check_memory(small, n_seq, type_kv)
    cache = KINDS[kind](small, n_seq, type_kv, decoder)
    cache.of_positions = partial(make_cache, model, kind, n_seq, bits, decoder)
    return cache
