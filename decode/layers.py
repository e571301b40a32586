"""The layers of a cache are tuples: `LayerKVCache` of model.py, `RollingKVCache` of positions.py, or plain ones."""


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
