"""
Where keys and values live: the ideas of other engines' caches, on one model and tested against each other.

    storage      how numbers are kept: floats, int8, int4
    placement    what all systems have in common: place, encode, see
    exclusive    one operation at a time, and none left half done
    operator     a cache as one function of tensors (OpenPPL's KeyValueCache)
    cells        which slot holds which position, for whom (llama.cpp)
    streams      where a batch goes, windows, sequence operations, shifts
    unified      cells for a model, with keys and values in them
    hybrid       several of these for one model, each with some of its layers
    blocks       which block holds which tokens, shared and counted (vLLM)
    paged        blocks for a model: any mixture of requests in one forward pass
    sequences    all of them under `generate`, `stream` and sample.py
"""
from kvcache.sequences import SYSTEMS, CacheDecoder

__all__ = ['CacheDecoder', 'SYSTEMS']
