"""
What a GPT refuses: settings that do not go together, token ids and caches that do not fit. Nothing is computed here.
"""
import torch


def check_config(config):
    """ValueError if the settings of a GPTConfig do not make a GPT."""
    c = config
    for name, most in dict(block_size=2**24, vocab_size=2**24, n_layer=2**12, n_head=2**24, n_embd=2**24).items():
        size = getattr(c, name)
        if type(size) is not int or not 1 <= size <= most:
            raise ValueError(f"{name} must be a positive integer up to {most:,}, not {size!r}")
    if c.n_embd % c.n_head != 0:
        raise ValueError(f"n_embd {c.n_embd} must be divisible by n_head {c.n_head}")
    if type(c.dropout) not in (int, float) or not 0.0 <= c.dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), not {c.dropout!r}")
    if type(c.bias) is not bool:
        raise ValueError(f"bias must be True or False, not {c.bias!r}")
    if c.position not in ('learned', 'rope', 'alibi', 'none'):
        raise ValueError(f"position must be learned, rope, alibi or none, not {c.position!r}")
    if c.gelu not in ('none', 'tanh'):
        raise ValueError(f"gelu must be none (the exact one) or tanh, not {c.gelu!r}")
    for name in ('n_kv_head', 'window', 'n_sink'):
        if type(getattr(c, name)) is not int or getattr(c, name) < 0:
            raise ValueError(f"{name} must be an integer and at least 0, not {getattr(c, name)!r}")
    if c.n_head % (c.n_kv_head or c.n_head):
        raise ValueError(f"n_head {c.n_head} must be divisible by n_kv_head {c.n_kv_head}")
    if c.position == 'rope' and c.n_embd // c.n_head % 2:
        raise ValueError(f"rotary positions turn pairs of channels, and a head has {c.n_embd // c.n_head}: choose "
                         "n_embd and n_head so that n_embd / n_head is even")
    if not isinstance(c.rope_theta, (int, float)) or not 1 <= c.rope_theta < float('inf'):
        raise ValueError(f"rope_theta must be at least 1, not {c.rope_theta!r}")
    if c.n_sink and not c.window:
        raise ValueError(f"n_sink {c.n_sink} needs a window: without one, all positions are always seen")
    if c.window + c.n_sink >= c.block_size:
        raise ValueError(f"window {c.window} and n_sink {c.n_sink} must be less than block_size {c.block_size} in all, "
                         "or training would never see what the window hides: use window=0 for none")


def as_int64(name, x):
    """x, a tensor of any integer dtype, as int64. ValueError for anything else; `name` stands for x in the message."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} must be a tensor of integers, not a {type(x).__name__}: {x!r:.60}")
    if x.is_floating_point() or x.is_complex() or x.dtype is torch.bool:
        raise ValueError(f"{name} must be integers, not {x.dtype}: convert them with .long()")
    return x if x.dtype is torch.int64 else x.long()


def checked_cache_pos(config, device, cache_pos, B, T):
    """
    The position where T new tokens of each of B sequences begin: cache_pos, an int, or an integer tensor (B,) on
    device, as int64. ValueError if it is something else, negative, or if the tokens do not fit behind it.
    """
    smallest, largest = cache_pos, cache_pos
    if isinstance(cache_pos, torch.Tensor):
        cache_pos = as_int64('cache_pos', cache_pos)
        if cache_pos.shape != (B,) or cache_pos.device != device:
            raise ValueError(f"cache_pos must be ({B},), one for each sequence, on {device}; "
                             f"not {tuple(cache_pos.shape)} on {cache_pos.device}")
        smallest, largest = cache_pos.aminmax() if B else (0, 0)
    elif type(cache_pos) is not int:
        raise ValueError(f"cache_pos must be an int or a tensor of integers, not {cache_pos!r}")
    if smallest < 0:
        raise ValueError(f"cache_pos must not be negative: {cache_pos}")
    if largest + T > config.max_positions:
        raise ValueError(f"out of context: cache_pos {cache_pos} + {T} new tokens > block_size {config.block_size}")
    return cache_pos


def checked_input(config, device, idx, kv_cache):
    """
    Check tokens idx (B, T) and the cache that they go to, a list of tuples or None, before anything is written.
    Returns (idx as int64, the position of its first token: an int or int64 (B,)). ValueError if they do not fit.
    """
    idx, c = as_int64('token ids', idx), config
    if idx.dim() != 2 or idx.size(1) == 0:
        raise ValueError(f"token ids must be (B, T) with at least one token, not {tuple(idx.shape)}")
    if kv_cache is None:
        return idx, checked_cache_pos(c, device, 0, *idx.shape)
    if len(kv_cache) != c.n_layer:
        raise ValueError(f"kv_cache has {len(kv_cache)} layers, but the model has {c.n_layer}")
    if any(len(layer_cache) != 3 for layer_cache in kv_cache):
        raise ValueError(f"the cache of a layer must be a tuple of 3, not of {sorted({*map(len, kv_cache)})}: begin "
                         "with empty_cache()")
    (first, _, given), shape = kv_cache[0], (len(idx), c.n_kv_head, c.n_slots, c.head_dim)
    cache_pos, expected = checked_cache_pos(c, device, given, *idx.shape), (shape, first.dtype, idx.device)
    for layer, (k_cache, v_cache, pos) in enumerate(kv_cache):
        same = pos is given or type(pos) is type(given) is int and pos == given
        if not same and not (isinstance(pos, torch.Tensor) and isinstance(given, torch.Tensor)
                             and torch.equal(checked_cache_pos(c, device, pos, *idx.shape), cache_pos)):
            raise ValueError(f"cache_pos is {cache_pos} in layer 0 but {pos} in layer {layer}")
        for name, cache in (('k_cache', k_cache), ('v_cache', v_cache)):
            if (cache.shape, cache.dtype, cache.device) != expected:
                raise ValueError(f"{name} of layer {layer} is {tuple(cache.shape)}, {cache.dtype} on "
                                 f"{cache.device}, but model, tokens and layer 0 need {expected}")
    return idx, cache_pos
