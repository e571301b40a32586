"""
Several caches for one model, each with some of its layers: llama.cpp's llama_kv_cache_iswa.

    full = KVCache(4, 2, 16, kv_size=4096, n_seq_max=8, layer_filter=lambda layer: layer % 2 == 0)
    local = KVCache(4, 2, 16, kv_size=640, n_seq_max=8, layer_filter=lambda layer: layer % 2 == 1, n_swa=64,
                    swa_type='standard')
    cache = HybridCache(full, local)
    forward = cache.forward(cache.batch({0: [5, 6, 7], 1: [2]}))

A batch is planned on all of them before it is taken on any, and so is every operation on sequences.
"""
from contextlib import ExitStack

from kvcache.placement import Forward
from kvcache.streams import Streams


class HybridCache:
    """
    caches: `KVCache`s for the same number of layers and sequences, all unified or none, each layer in exactly one.

    Its methods are those of a `KVCache`. What one of the caches refuses with a ValueError has changed none of them.
    States are saved and loaded for each cache, to a file of its own.
    """

    def __init__(self, *caches):
        if len({(len(cache.layers), cache.n_seq_max, cache.unified) for cache in caches}) != 1:
            raise ValueError("the caches of one model have the same number of layers and of sequences, "
                             "and all are unified or none")
        self.caches, self.number_of = caches, []  # number_of each layer: the number of the cache that has it
        for layer in range(len(caches[0].layers)):
            numbers = [number for number, cache in enumerate(caches) if cache.layers[layer] is not None]
            if len(numbers) != 1:
                raise ValueError(f"each layer is in exactly one cache, and layer {layer} is in {len(numbers)}")
            self.number_of += numbers

    def batch(self, tokens):
        """See `Streams.batch`."""
        return self.caches[0].batch(tokens)

    def find_slot(self, batch, contiguous=False):
        """`Slots` for a batch in each cache, a list, or the first cache's `NoSlot`. Changes nothing."""
        return self.planned(cache.find_slot(batch, contiguous) for cache in self.caches)

    def prepare(self, batches):
        """For each cache the `Slots` of each of several batches, or the first cache's `NoSlot`. Changes nothing."""
        return self.planned(cache.prepare(batches) for cache in self.caches)

    def planned(self, plans):
        plans = list(plans)
        return next((plan for plan in plans if not plan), plans)

    def apply(self, slots, batch):
        """Take the cells that were found, in each cache."""
        for cache, found in zip(self.caches, slots):
            cache.apply(found, batch)

    def forward(self, batch):
        """
        Place a batch in all caches, and what the model is handed for it. ValueError if one of them has no room, and
        none has changed.
        """
        slots = self.find_slot(batch)
        if not slots:
            raise ValueError(str(slots))
        with ExitStack() as taken:
            for cache, found in zip(self.caches, slots):
                taken.enter_context(cache.taken(found, batch))
            forwards = [Forward(cache.layers, cache.placement(batch, found))
                        for cache, found in zip(self.caches, slots)]
        forward = forwards[0]
        forward[:] = [forwards[number][layer] for layer, number in enumerate(self.number_of)]
        return forward

    def clear(self):
        """Forget everything, and what the storage holds as well."""
        for cache in self.caches:
            cache.clear()

    def seq_rm(self, seq, p0=-1, p1=-1):
        """See `Streams.seq_rm`."""
        self.everywhere('seq_rm', seq, p0, p1)

    def seq_cp(self, source, target, p0=-1, p1=-1):
        """See `Streams.seq_cp`."""
        self.everywhere('seq_cp', source, target, p0, p1)

    def seq_keep(self, seq):
        """See `Streams.seq_keep`."""
        self.everywhere('seq_keep', seq)

    def seq_add(self, seq, p0, p1, shift):
        """See `Streams.seq_add`."""
        self.everywhere('seq_add', seq, p0, p1, shift)

    def seq_div(self, seq, p0, p1, divisor):
        """See `Streams.seq_div`."""
        self.everywhere('seq_div', seq, p0, p1, divisor)

    def everywhere(self, name, *args):
        """An operation on all caches, if none of them refuses it."""
        for cache in self.caches:
            cache.rehearse(getattr(Streams, name), *args)
        for cache in self.caches:
            getattr(cache, name)(*args)

    def check_movable(self, seq, p0=-1, p1=-1):
        """ValueError if positions of a sequence cannot be changed."""
        for cache in self.caches:
            cache.check_movable(seq, p0, p1)

    def seq_pos_min(self, seq):
        """The first position that a sequence has in all caches, or None. With a window the earlier ones may be gone."""
        first = [cache.seq_pos_min(seq) for cache in self.caches]
        return None if None in first else max(first)

    def seq_pos_max(self, seq):
        """The last position of a sequence, or None if it has none."""
        return max((last for cache in self.caches if (last := cache.seq_pos_max(seq)) is not None), default=None)

    def memory_breakdown(self):
        """{device: bytes} of all that is stored in the caches."""
        sizes = {}
        for cache in self.caches:
            for device, size in cache.memory_breakdown().items():
                sizes[device] = sizes.get(device, 0) + size
        return sizes
