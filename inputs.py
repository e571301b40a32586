"""What a GPT refuses: settings that do not go together, token ids and caches that do not fit. It computes nothing."""
import math

import torch

LARGEST = 1e30  # number for rotary positions


def check_config(config):
    """ValueError if the settings of a GPTConfig do not make a GPT."""
    c = config
    for name, most in dict(block_size=2**24, vocab_size=2**24, n_layer=2**12, n_head=2**24, n_embd=2**24).items():
        size = getattr(c, name)
        if type(size) is not int or not 1 <= size <= most:
            raise ValueError(f"{name} must be a positive integer up to {most:,}, not {size!r}")
    for name in ('n_kv_head', 'window', 'n_sink', 'head_dim', 'n_inner'):
        if type(getattr(c, name)) is not int or not 0 <= getattr(c, name) <= 2**24:
            raise ValueError(f"{name} must be an integer from 0 to {2**24:,}, not {getattr(c, name)!r}")
    if c.n_embd % c.n_head != 0 and not c.head_dim:
        raise ValueError(f"n_embd {c.n_embd} must be divisible by n_head {c.n_head}, or head_dim be given")
    if type(c.dropout) not in (int, float) or not 0.0 <= c.dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), not {c.dropout!r}")
    for name in ('bias', 'tied', 'qkv_bias', 'qk_norm'):
        if type(getattr(c, name)) is not bool:
            raise ValueError(f"{name} must be True or False, not {getattr(c, name)!r}")
    for name, values in dict(position=('learned', 'rope', 'alibi', 'none'), gelu=('none', 'tanh'),
                             norm=('layer', 'rms'), mlp=('gelu', 'swiglu')).items():
        if getattr(c, name) not in values:
            raise ValueError(f"{name} must be {', '.join(values[:-1])} or {values[-1]}, not {getattr(c, name)!r}")
    if c.n_head % (c.n_kv_head or c.n_head):
        raise ValueError(f"n_head {c.n_head} must be divisible by n_kv_head {c.n_kv_head}")
    head_dim = c.head_dim or c.n_embd // c.n_head
    if c.position == 'rope' and head_dim % 2:
        raise ValueError(f"rotary positions turn pairs of channels, and a head has {head_dim}: choose an even "
                         "head_dim, or n_embd and n_head so that n_embd / n_head is even")
    if type(c.rope_theta) not in (int, float) or not 1 <= c.rope_theta <= LARGEST:
        raise ValueError(f"rope_theta must be at least 1 and at most {LARGEST:g}, not {c.rope_theta!r}")
    if not isinstance(c.norm_eps, (int, float)) or not 1e-37 <= c.norm_eps < 1:  # in float32 less may be 0
        raise ValueError(f"norm_eps must be between 1e-37 and 1, not {c.norm_eps!r}")
    check_rope_scaling(c)
    if c.n_sink and not c.window:
        raise ValueError(f"n_sink {c.n_sink} needs a window: without one, all positions are always seen")
    if c.window + c.n_sink >= c.block_size:
        raise ValueError(f"window {c.window} and n_sink {c.n_sink} must be less than block_size {c.block_size} in all, "
                         "or training would never see what the window hides: use window=0 for none")


def check_rope_scaling(config):
    """ValueError unless rope_scaling is empty, or Llama 3's four numbers for rotary positions."""
    scaling = config.rope_scaling
    if scaling == ():
        return
    if config.position != 'rope':
        raise ValueError(f"rope_scaling is for position=rope, not {config.position}")
    if type(scaling) is not tuple or len(scaling) != 4 or not all(
            type(x) in (int, float) and 0 < x <= LARGEST for x in scaling) or scaling[1] >= scaling[2]:
        raise ValueError("rope_scaling must be () or (factor, low_freq_factor, high_freq_factor, original block_size), "
                         f"positive numbers with low_freq_factor < high_freq_factor, not {scaling!r}")


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
    device, as int64. ValueError if it is something else, negative, or if the tokens do not fit after it.
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
        raise ValueError("each layer's cache must be a tuple of 3, (k_cache, v_cache, cache_pos), but tuples with "
                         f"{sorted({*map(len, kv_cache)})} items came: begin with empty_cache()")
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


def checked_prompt(config, idx):
    """The tokens idx (B, T) of a prompt as int64. ValueError unless they are tokens of the model, one or more a row."""
    idx = as_int64('the prompt', idx)
    if idx.dim() != 2 or not idx.numel() or not 0 <= idx.min() <= idx.max() < config.vocab_size:
        raise ValueError("the prompt must be (B, T), at least one token, of integers within the vocabulary of "
                         f"{config.vocab_size}; its shape is {tuple(idx.shape)}")
    return idx


def check_append(layer_cache, k, longest, window):
    """
    ValueError unless the cache of a layer, a `model.LayerKVCache`, takes new keys k (B, n_kv_head, T, head_dim), with
    which its longest sequence has `longest` positions. window: the model's.
    """
    k_cache, _, start = layer_cache
    (B, _, n_slots, _), T = k_cache.shape, k.size(2)
    if longest > n_slots and not window:  # k_cache[:, :, start:end] would drop what does not fit, in silence
        raise ValueError(f"cache is full: cache_pos {start} + {T} new tokens > block_size {n_slots}")
    if window and T > window + 1:
        raise ValueError(f"a cache for a window of {window} takes {window + 1} new tokens at once, not {T}: split them")
    if B > 1 and k_cache.stride(0) == 0:  # as `expand` makes it: all sequences would be written into one place
        raise ValueError(f"the {B} sequences of the cache share one storage, as after expand, but each needs its own: "
                         "make it with repeat")
    if (k.size(0), k.dtype, k.device) != (B, k_cache.dtype, k_cache.device):  # copy_ would broadcast and convert
        raise ValueError(f"cache holds a batch of {B}, {k_cache.dtype} on {k_cache.device}, "
                         f"but the keys are a batch of {k.size(0)}, {k.dtype} on {k.device}")


def check_sampling(temperature, top_k, top_p):
    """ValueError unless temperature >= 0, top_k is None or >= 1, and top_p is None or in (0, 1]."""
    if temperature != 0 and not 1e-30 < temperature < math.inf:  # a smaller one makes infinite logits
        raise ValueError(f"temperature must be 0 (greedy) or positive (above 1e-30), not {temperature}")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k must be an integer and at least 1, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], not {top_p}: 1 draws from all tokens")
