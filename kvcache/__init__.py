"""
Pools: in which slots the positions of sequences lie. And the storage of these slots.

    blocks       pages of slots, shared between sequences that begin alike (vLLM)
    none         nothing is kept: generation without a cache
    storage      rows of numbers: floats, int8
    llamacpp/    llama.cpp's cells and streams as a pool, and its caches to be read and compared
    openppl      OpenPPL's cache as one function

A pool has begin, extend, computed, cut, fork, free and reset; see `blocks.BlockPool`. One thread owns it, the engine's.
"""
from kvcache.blocks import BlockPool, pages_for
from kvcache.none import NoPool
from kvcache.storage import bytes_of_slots, make_layers

__all__ = ['BlockPool', 'NoPool', 'bytes_of_slots', 'make_layers', 'pages_for']
