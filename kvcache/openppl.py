"""
A whole KV cache as one function of tensors, without any state of its own: sequences of any lengths, packed on one axis;
two ways to find a token's row, four memory layouts, three ways to store a number.

Follows the operator pmx.dynamic_batching.KeyValueCache of OpenPPL PMX (https://github.com/openppl-public/ppl.pmx), as
its documentation defines it since it has cache_mode 1 and page_size:

    here                                            there
    key_value_cache, its arguments                  KeyValueCache, its inputs and attributes, by the same names
    what it returns                                 the outputs key and value
    `storage.quantise`                              the quantisation of quant_bit 8 and 4
"""
import operator

import torch

from kvcache.storage import dequantise, quantise

LAYOUTS = 'TL2HD', 'LT2HD', 'L2THD', 'L2HTD'  # the axes (MaxT, L, 2, H, Dh), in the order of each
CACHE_DTYPES = {0: (torch.float32, torch.float16), 8: (torch.int8,), 4: (torch.uint8,)}


@torch.no_grad()
def key_value_cache(current_key, current_value, seqstarts, kvstarts, cachestarts, start_pos, max_seqlen, max_kvlen,
                    cache, scale=None, *, num_layer=1, layer_idx=0, quant_bit=0, quant_group=8, num_repeat=1,
                    cache_mode=0, cache_layout=0, page_size=128):
    """
    Write the current keys and values of B sequences to the cache, and return all of theirs, past and current.

    current_key, current_value: (seqstarts[B], H, Dh), float32 or float16; sequence b has rows seqstarts[b] to
        seqstarts[b + 1] - 1.
    start_pos: (B,) the position of each sequence's first current token, and how many it has in the cache already.
    seqstarts, kvstarts: (B + 1,) cumulative lengths, of the current tokens and of all:
        kvstarts = seqstarts + [0, cumsum(start_pos)].
    max_seqlen, max_kvlen: no sequence is longer. Ints, or 0-dimensional integer tensors, which they are in PMX.
    cache_mode 0: cachestarts (B,), position p of sequence b is row cachestarts[b] + p.
    cache_mode 1: cachestarts (B, MaxP), it is row cachestarts[b, p // page_size] + p % page_size. Entries are rows, not
        numbers of pages; those that are not needed may be -1.
    cache_layout: 0 (MaxT, L, 2, H, Dh), 1 (L, MaxT, 2, H, Dh), 2 (L, 2, MaxT, H, Dh), 3 (L, 2, H, MaxT, Dh), where
        L = num_layer.
    quant_bit: 0, the cache is float32 or float16; 8 or 4, it is int8, or uint8 with a last axis of Dh / 2, and scale is
        laid out as the cache with a last axis of Dh / quant_group; see `storage.quantise`. The scale is computed in the
        input's dtype.
    num_repeat: how many times each head is returned, h0 h0 h1 h1 ..., for grouped queries.

    Returns (key, value), (kvstarts[B], H * num_repeat, Dh) in the input's dtype, as they are stored in the cache, the
    current tokens too. cache and scale are written in place. Raises ValueError, with nothing written, if shapes,
    lengths or rows do not fit together.
    """
    max_seqlen, max_kvlen = map(operator.index, (max_seqlen, max_kvlen))
    for name, x in dict(seqstarts=seqstarts, kvstarts=kvstarts, cachestarts=cachestarts, start_pos=start_pos).items():
        if x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int64 or int32, not {x.dtype}: convert it")
    # int64, since sums in int32 overflow
    seqstarts, kvstarts, cachestarts, start_pos = (x.long() for x in (seqstarts, kvstarts, cachestarts, start_pos))
    stored = views(current_key, current_value, cache, scale, num_layer, layer_idx, quant_bit, quant_group, num_repeat,
                   cache_layout)
    n_rows = len(stored[0])
    seqlens, kvlens = check_lengths(seqstarts, kvstarts, start_pos, max_seqlen, max_kvlen, len(current_key), n_rows)

    written = rows_of(start_pos, seqlens, cachestarts, cache_mode, page_size, n_rows)
    read = rows_of(torch.zeros_like(start_pos), kvlens, cachestarts, cache_mode, page_size, n_rows)
    if int(torch.isin(read, written).sum()) > len(written.unique()):  # each row that is written is read by its token
        raise ValueError("a current token would be written over another one that is read: "
                         f"cachestarts {cachestarts.tolist()} overlap, give each token its own row")

    current = torch.stack((current_key, current_value), dim=1)  # (N, 2, H, Dh)
    new = quantise(current, quant_bit, quant_group) if quant_bit else [current]
    if quant_bit and bool((new[1] > torch.finfo(stored[1].dtype).max).any()):
        raise ValueError(f"a scale of {float(new[1].max()):.3g} is more than float16 holds: use a scale in float32")
    new = [x.to(store.dtype) for x, store in zip(new, stored)]
    # the rows as they will be: those read now, with the current tokens in their places. The cache is written last
    place = torch.arange(len(written), device=cache.device) + (kvstarts[1:] - seqstarts[1:]).repeat_interleave(seqlens)
    rows = [store[read].index_copy_(0, place, rows_new) for store, rows_new in zip(stored, new)]
    loaded = dequantise(rows[0], rows[1].float(), quant_bit) if quant_bit else rows[0]
    loaded = loaded.to(current.dtype).repeat_interleave(num_repeat, dim=2)
    for store, rows_new in zip(stored, new):
        store[written] = rows_new
    return tuple(loaded.unbind(1))


def check_lengths(seqstarts, kvstarts, start_pos, max_seqlen, max_kvlen, n_current, n_rows):
    """
    (seqlens, kvlens), (B,) each: current tokens and all tokens of each sequence. ValueError unless they agree with each
    other, the n_current tokens and the n_rows rows of the cache.
    """
    seqlens = lengths(seqstarts, 'seqstarts')
    if seqstarts[-1] != n_current:
        raise ValueError(f"seqstarts must end at {n_current}, the number of current tokens, not {int(seqstarts[-1])}")
    B = len(seqlens)
    if start_pos.shape != (B,) or bool((start_pos < 0).any()):
        raise ValueError(f"start_pos must be ({B},) positions from 0, not {start_pos.tolist()}")
    kvlens = lengths(kvstarts, 'kvstarts')
    if len(kvlens) != B or bool((kvlens != start_pos + seqlens).any()):
        raise ValueError(f"kvstarts {kvstarts.tolist()} must be the cumulative sums of start_pos {start_pos.tolist()} "
                         f"plus lengths {seqlens.tolist()}")
    for name, largest, given in (('max_seqlen', seqlens, max_seqlen), ('max_kvlen', kvlens, max_kvlen)):
        if B and int(largest.max()) > given:
            raise ValueError(f"{name} is {given}, but a sequence has {int(largest.max())}")
    if B and int(kvlens.max()) > n_rows:
        raise ValueError(f"a sequence of {int(kvlens.max())} does not fit into the {n_rows} rows of the cache")
    return seqlens, kvlens


def views(key, value, cache, scale, num_layer, layer_idx, quant_bit, quant_group, num_repeat, cache_layout):
    """
    This layer of [cache], or of [cache, scale], as (MaxT, 2, H, ...) for any layout. ValueError if they do not fit.
    """
    if (key.shape != value.shape or key.dim() != 3 or 0 in key.shape[1:] or key.dtype is not value.dtype
            or key.dtype not in (torch.float32, torch.float16)):
        raise ValueError(f"current_key and current_value must be (tokens, H, Dh) alike, float32 or float16, "
                         f"not {tuple(key.shape)} {key.dtype} and {tuple(value.shape)} {value.dtype}")
    if cache_layout not in range(len(LAYOUTS)):
        raise ValueError(f"cache_layout is 0 to 3, not {cache_layout}")
    if quant_bit not in CACHE_DTYPES:
        raise ValueError(f"quant_bit is 0, 8 or 4, not {quant_bit}")
    if not 0 <= layer_idx < num_layer or num_repeat < 1:
        raise ValueError(f"layer_idx must be 0 to num_layer {num_layer} - 1, and num_repeat at least 1, not "
                         f"{layer_idx} and {num_repeat}")
    H, Dh = key.shape[1:]
    shape = cache_layout, num_layer, H
    found = [view_of(cache, 'cache', CACHE_DTYPES[quant_bit], *shape, Dh // 2 if quant_bit == 4 else Dh)]
    if quant_bit == 0:
        return [found[0][:, layer_idx]]
    if quant_group < 1 or Dh % quant_group or Dh % 2 and quant_bit == 4:
        raise ValueError(f"groups of {quant_group} in {quant_bit} bits do not divide Dh {Dh}")
    found.append(view_of(scale, 'scale', CACHE_DTYPES[0], *shape, Dh // quant_group))
    if len(found[0]) != len(found[1]):
        raise ValueError(f"the cache has {len(found[0])} rows and the scale {len(found[1])}")
    return [view[:, layer_idx] for view in found]


def view_of(tensor, name, dtypes, cache_layout, L, H, D):
    """A view (MaxT, L, 2, H, D) of a tensor in this layout. ValueError if it has another type or shape."""
    if tensor is None or tensor.dtype not in dtypes:
        raise ValueError(f"for this quant_bit the {name} must be {' or '.join(map(str, dtypes))}, not "
                         f"{tensor if tensor is None else tensor.dtype}")
    layout, sizes = LAYOUTS[cache_layout], dict(zip('TL2HD', ('MaxT', L, 2, H, D)))
    order = [layout.index(axis) for axis in sizes]
    if tensor.dim() != 5 or tensor.permute(order).shape[1:] != (L, 2, H, D):
        names = ', '.join(str(sizes[axis]) for axis in layout)
        raise ValueError(f"the {name} must be ({names}) in layout {cache_layout}, not {tuple(tensor.shape)}")
    if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride())):
        raise ValueError(f"the {name} is expanded, and a write to one row would change another: make it contiguous")
    return tensor.permute(order)


def lengths(starts, name):
    """The lengths (B,) between cumulative starts (B + 1,), which begin at 0."""
    if starts.dim() != 1 or len(starts) < 1 or starts[0] != 0 or bool((starts.diff() < 0).any()):
        raise ValueError(f"{name} must begin at 0 and not decrease, unlike {starts.tolist()}")
    return starts.diff()


def rows_of(start_pos, counts, cachestarts, cache_mode, page_size, n_rows):
    """
    The rows of counts (B,) positions of each sequence from start_pos (B,) on, one sequence after the other. ValueError
    unless all are among the n_rows rows of the cache.
    """
    B = len(counts)
    seq = torch.repeat_interleave(torch.arange(B, device=counts.device), counts)
    first = counts.cumsum(0) - counts
    pos = start_pos[seq] + torch.arange(len(seq), device=counts.device) - first[seq]
    if cache_mode == 0:
        if cachestarts.shape != (B,):
            raise ValueError(f"cachestarts must be ({B},) in cache_mode 0, not {tuple(cachestarts.shape)}")
        starts, rows = cachestarts[seq], cachestarts[seq] + pos
    elif cache_mode == 1:
        if page_size < 1 or cachestarts.dim() != 2 or len(cachestarts) != B:
            raise ValueError(f"cachestarts must be ({B}, MaxP) in cache_mode 1 and page_size at least 1, "
                             f"not {tuple(cachestarts.shape)} and {page_size}")
        page = pos // page_size
        if len(page) and int(page.max()) >= cachestarts.size(1):
            raise ValueError(f"a sequence needs {int(page.max()) + 1} pages, but cachestarts has {cachestarts.size(1)} "
                             "for each sequence")
        starts = cachestarts[seq, page]
        rows = starts + pos % page_size
    else:
        raise ValueError(f"cache_mode is 0 (offset) or 1 (paged), not {cache_mode}")
    if len(rows) and (int(starts.min()) < 0 or int(starts.max()) >= n_rows or int(rows.max()) >= n_rows):
        raise ValueError(f"rows {int(rows[starts.argmin()])} to {max(int(rows.max()), int(starts.max()))} are not all "
                         f"among the {n_rows} of the cache: check cachestarts {cachestarts.tolist()}")
    return rows
