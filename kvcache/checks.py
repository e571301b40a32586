"""What a cache refuses, before it changes anything."""
from operator import add

import torch


def checked_step(cache, handles, starts, tokens):
    """
    (records, starts, numbers of new tokens, ids int64 (n,) of all of them) of the arguments of `BaseCache.step`.
    ValueError if they do not fit the model, the sequences or each other.
    """
    model, config = cache.model, cache.model.config
    if model.lm_head.weight.dtype is not cache.dtype:
        raise ValueError(f"the model was {cache.dtype} when its cache was made, and is {model.lm_head.weight.dtype}: "
                         "make a new cache")
    if model.training:
        raise ValueError("the model is in training mode, and dropout would stay in the cache: call model.eval() first")
    handles, starts = list(handles), list(starts)
    rows, counts = checked_tokens(model, tokens)
    if not handles or len(set(handles)) < len(handles):
        raise ValueError(f"a step is for one sequence or more, each named once, not for {handles}")
    if not len(handles) == len(starts) == len(rows):
        raise ValueError(f"{len(handles)} sequences have {len(starts)} starts and {len(rows)} rows of tokens: "
                         "give one of both for each sequence")
    records = list(map(cache.record, handles))
    if {*map(type, starts)} != {int} or starts != [record.length for record in records] or (
            max(map(add, starts, counts)) > config.max_positions):
        for i, (record, start, n) in enumerate(zip(records, starts, counts)):
            starts[i] = start = int(model.checked_cache_pos(start, 1, n))
            if start > record.length:
                raise ValueError(f"sequence {record.handle} has {record.length} tokens in the cache, and new ones "
                                 f"cannot start at {start}: feed it from {record.length} on")
            cache.check_held(record, start)
    ids = torch.cat(rows) if isinstance(rows, list) else rows.flatten()
    low, high = (int(x) for x in ids.aminmax())
    if low < 0 or high >= config.vocab_size:
        raise ValueError(f"token ids are 0 to {config.vocab_size - 1}, not {low} to {high}")
    if ids.device != cache.device:
        raise ValueError(f"the cache is on {cache.device}, but the tokens are on {ids.device}: move them")
    return records, starts, counts, ids


def checked_tokens(model, tokens):
    """
    (rows, counts) of the tokens of a step: int64 (B, T), or a list of (T_i,); and how many new tokens each sequence
    brings. ValueError if they are something else, or too many for the model.
    """
    if not isinstance(tokens, (list, tuple)):
        if not isinstance(tokens, torch.Tensor) or tokens.dtype is not torch.int64 or tokens.dim() != 2:
            tokens = model.checked_input(tokens, None)[0]
        B, T = tokens.shape
        return tokens if T else model.checked_input(tokens, None)[0], [T] * B
    rows = list(tokens)
    for i, row in enumerate(rows):
        if not isinstance(row, torch.Tensor) or row.dtype is not torch.int64 or row.dim() != 1 or not row.numel():
            rows[i] = model.checked_input(row[None] if isinstance(row, torch.Tensor) else row, None)[0][0]
    return rows, [row.numel() for row in rows]


def check_shift(config, record, n_keep, n):
    """ValueError unless n tokens behind the first n_keep of a sequence can be removed."""
    if config.position == 'learned':
        raise ValueError(f"sequence {record.handle} cannot be shifted, the model has learned positions, which are in "
                         "its keys and values: compute the tokens again at their new positions")
    if config.window:
        raise ValueError(f"sequence {record.handle} cannot be shifted, the model has a window of {config.window} and "
                         "forgets what it has passed: go on without a shift")
    if type(n_keep) is not int or type(n) is not int or n_keep < 0 or n < 0 or n_keep + n > record.length:
        raise ValueError(f"sequence {record.handle} has {record.length} tokens: {n!r} behind the first {n_keep!r} "
                         "cannot be removed")
