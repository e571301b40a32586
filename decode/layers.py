"""The layers of a cache are tuples: `LayerKVCache` of model.py, `RollingKVCache` of positions.py, or plain ones."""
from positions import RollingKVCache


def with_length(kv_cache, cache_pos):
    """
    The same layers with another cache_pos, each still of its own class. Nothing is copied.

    `tuple.__new__` makes a NamedTuple without calling the Python function that is its constructor, once for each layer
    and token. All layers are of the class of the first.
    """
    kind = type(kv_cache[0])
    if len(kv_cache[0]) == 3:
        return [tuple.__new__(kind, (k_cache, v_cache, cache_pos)) for k_cache, v_cache, _ in kv_cache]
    return [tuple.__new__(kind, (k_cache, v_cache, cache_pos, first)) for k_cache, v_cache, _, first in kv_cache]


def make_room(kv_cache, cache_pos, T, config):
    """
    `RollingKVCache.make_room` for T tokens in all layers. Returns the position in slot n_sink, the same for all
    layers: an int, or int64 (B,).
    """
    layers = [RollingKVCache(*layer[:2], cache_pos, layer[3]) for layer in kv_cache]
    held = [layer.make_room(T, config.window, config.n_sink) for layer in layers]
    if not all(layer.first.equal(layers[0].first) for layer in layers):
        # an interrupted step has moved the rows of some layers: move those of all
        held = [layer.make_room(config.n_slots, config.window, config.n_sink) for layer in layers]
    return held[0]
