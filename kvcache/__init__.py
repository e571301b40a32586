"""
Pools: in which slots the positions of sequences lie. And the storage of these slots.

    pages        pages of slots, shared between sequences that begin alike (vLLM)
    storage      rows of numbers: floats, int8
    llamacpp/    llama.cpp's cells and streams as a pool, and its caches to be read and compared
    openppl      OpenPPL's cache as one function

A pool is what the engine's scheduler asks for slots; one thread owns it. See `pages.PagePool`.

    begin(sequence, tokens)         begin with what is remembered of these tokens; returns of how many
    extend(sequence, n)             slots for the next n positions after those that are stored; returns whether there
                                    was room. Slots that are there count: a second call changes nothing
    computed(sequence, n)           n more positions are stored
    fork(sequence, new)             a new sequence has all positions of another one
    cut(sequence, n)                keep the first n positions; returns how many are kept
    free(sequence)                  keep none
    reset()                         forget all sequences and all that is remembered
    will_grow(sequence)             will it need more room before it ends?
    copies                          of slots, which the next call makes first: the scheduler takes them
    page_size                       slots of a page
    n_pages                         pages; of cells, those of one stream
    n_slots                         slots in all
    n_free                          pages that no sequence has
    most_sequences, window          how many may run at a time; the model's window, or 0
    engine                          a weak reference to the engine that has the pool: the engine sets it
"""
from kvcache.pages import PagePool, pages_for
from kvcache.storage import bytes_of_slots, make_layers

__all__ = ['PagePool', 'bytes_of_slots', 'make_layers', 'pages_for']
