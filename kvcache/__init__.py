"""
Ways to store the keys and values of many sequences: the cache designs of other engines, on one model.

    operator         a cache as one function of tensors, after OpenPPL's KeyValueCache
    storage          rows of numbers: floats, int8, int4
    placement        one forward pass: where new rows are written, which rows are read, and the positions of their keys
    exclusive        a lock for operations that must not overlap, and recovery after interrupts
    base             sequence numbers, lengths and operations on sequences, shared by the four caches below
    steps            a step of these caches: its checks, chunks and forward passes
    kernel_pass      a forward pass by the compiled step of a decoder
    decoding         what stays the same from one decode step to the next
    contiguous       block_size rows for each sequence, or a ring of rows for a window
    tuples           the tuples of the model or of a decoder, behind the same methods
    cells            which cell holds which position of which sequences, after llama.cpp
    streams          arrays of cells: finding free cells, windows, operations on sequences, shifts
    rotary           rotating stored keys whose positions change
    cell_cache       cells with keys and values
    cell_sequences   their use as a cache for sequences
    state            the content of a `CellCache` in a file
    hybrid           several `CellCache`s for one model, each with some of its layers
    blocks           which block holds which tokens, shared and counted, after vLLM
    block_tables     a forward pass over blocks with keys and values: vLLM's `execute_model`
    paged            their use as a cache for sequences

`make_cache` makes a cache for sequences. Its methods are `new`, `fork`, `truncate`, `shift`, `free` and `step`, see
`base.BaseCache`. All of them take models with any positions, grouped heads, windows and sinks.
"""
from kvcache.cell_sequences import CellSequences
from kvcache.contiguous import ContiguousCache
from kvcache.paged import PagedCache, n_blocks_for
from kvcache.placement import dtype_of
from kvcache.storage import BITS

__all__ = ['KINDS', 'make_cache']

BLOCK = 16  # positions in a block of a paged cache
QUANTISED = {8: 'int8', 4: 'int4'}
KINDS = {
    'tuple': ContiguousCache,
    'streams': lambda model, n_seq, type_kv, decoder: CellSequences(model, n_seq, type_kv, False, decoder),
    'unified': lambda model, n_seq, type_kv, decoder: CellSequences(model, n_seq, type_kv, True, decoder),
    'paged': lambda model, n_seq, type_kv, decoder: PagedCache(
        model, n_seq * n_blocks_for(model.config, BLOCK), BLOCK, type_kv, decoder),
}


def make_cache(model, kind, n_seq, bits=0, decoder=None):
    """
    A cache with room for n_seq sequences of block_size tokens each, or of any lengths if the model has a window and no
    learned positions; a paged one has room for more sequences if they are shorter.

    kind: one of `KINDS`. bits: 0 stores keys and values in the model's dtype, 8 and 4 quantise them. decoder: of this
    model, as `decode.best` makes it; if it has a compiled step that reads such a cache, each step of the cache is one
    call of it, and if not, the model runs in PyTorch. The cache's `name` says which. Raises ValueError on other values,
    if the model's dtype cannot be stored, and if the decoder is for another model.
    """
    if kind not in list(KINDS) or bits not in [0, *QUANTISED]:
        raise ValueError(f"a cache is {', '.join(KINDS)} in 0 (unquantised), 8 or 4 bits; not {kind!r} in {bits!r}")
    if not isinstance(n_seq, int) or n_seq < 1:
        raise ValueError(f"a cache is for at least 1 sequence, not {n_seq!r}")
    type_kv = QUANTISED[bits] if bits else str(dtype_of(model)).removeprefix('torch.')
    if type_kv not in BITS:
        raise ValueError(f"a cache stores numbers as {', '.join(BITS)}, and the model is {type_kv}: "
                         "convert it, or pass bits=8")
    return KINDS[kind](model, n_seq, type_kv, decoder)
