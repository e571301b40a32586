"""
Several caches for one model, each with some of its layers; KV_CACHE.md has an example.

Follows llama.cpp's src/llama-kv-cache-iswa.cpp: a `HybridCache` of two caches is its llama_kv_cache_iswa (kv_base and
kv_swa), `place` its init_batch, and the other methods have the same names.
"""
from functools import partialmethod

from kvcache.llamacpp.cache import CellCache
from kvcache.llamacpp.cells import Streams


class HybridCache:
    """
    caches: `CellCache`s for the same number of layers and of sequences, all unified or none. Each layer of the model
    is in exactly one of them.

    The methods are those of a `CellCache`, and are tried on all caches before any of them changes. States are saved and
    loaded for each cache, in a file of its own.
    """

    def __init__(self, *caches):
        shapes = [(len(cache.layers), cache.n_seq_max, cache.unified) for cache in caches]
        if len(set(shapes)) != 1:
            raise ValueError("make at least one cache, and all with the same n_layer, n_seq_max and unified; "
                             f"the caches here have {', '.join(map(str, shapes)) or 'nothing'}")
        self.caches, self.number_of = caches, []  # number_of[layer]: the number of the cache that has the layer
        for layer in range(len(caches[0].layers)):
            numbers = [number for number, cache in enumerate(caches) if cache.layers[layer] is not None]
            if len(numbers) != 1:
                raise ValueError(f"layer {layer} is in {len(numbers)} caches: let the layer_filter of exactly one "
                                 "cache accept it")
            self.number_of += numbers

    def batch(self, tokens):
        """See `Streams.batch`."""
        return self.caches[0].batch(tokens)

    def find_slot(self, batch):
        """A list of the cells for a batch in each cache. Changes nothing."""
        return [cache.find_slot(batch) for cache in self.caches]

    def apply(self, found, batch):
        """Store a batch in the cells that were found, in each cache."""
        for cache, cells in zip(self.caches, found):
            cache.apply(cells, batch)

    place, take_back = CellCache.place, CellCache.take_back

    def layers_for(self, batch, found, device=None):
        """See `CellCache.layers_for`."""
        placed = [cache.layers_for(batch, cells, device) for cache, cells in zip(self.caches, found)]
        return [placed[number][layer] for layer, number in enumerate(self.number_of)]

    def on_all_caches(self, name, *args, **how):
        """Call a method of all caches, if a dry run on each of them raises nothing."""
        for cache in self.caches:
            with cache.dry_run():
                getattr(Streams, name)(cache, *args, **how)
        for cache in self.caches:
            getattr(cache, name)(*args, **how)

    # each is the method of `Streams` or `CellCache` of that name
    clear = partialmethod(on_all_caches, 'clear')
    check_movable = partialmethod(on_all_caches, 'check_movable')
    seq_rm = partialmethod(on_all_caches, 'seq_rm')
    seq_cp = partialmethod(on_all_caches, 'seq_cp')
    seq_keep = partialmethod(on_all_caches, 'seq_keep')
    seq_add = partialmethod(on_all_caches, 'seq_add')
    seq_div = partialmethod(on_all_caches, 'seq_div')

    def seq_pos_min(self, seq):
        """
        The first position that a sequence has in all caches, or None. Behind a window the earlier ones may be gone.
        """
        first = [cache.seq_pos_min(seq) for cache in self.caches]
        return None if None in first else max(first)

    def seq_pos_max(self, seq):
        """The last position of a sequence, or None if it has none."""
        return max((last for cache in self.caches if (last := cache.seq_pos_max(seq)) is not None), default=None)
