"""
Attention on a GPU. It stores the keys and values of new tokens, and attends over the keys and values in the slots.

The keys that a row sees are divided into splits, so that a few rows keep the whole GPU busy. A split is attended TILE
keys at a time, with a running maximum of the scores (arXiv:2205.14135). The program of a row that ends last adds up its
splits. Tiles and splits begin at multiples of their size, which follows from the row's position, and splits are added
in ascending order. So the bits of a row depend on its position and its own keys alone, and a short text costs the same
in a long context. Sinks are the first split. Keys and values that are not seen may be NaN.
"""
import torch
import triton
import triton.language as tl
from triton.language import constexpr

from decode.gpu.ordering import is_last, overlap, wait
from decode.gpu.tables import SMALL_TILE, SPLIT, SPLITS, TILE

PROGRAMS = 1024  # of a step of few rows, which share the splits; in one of many rows, each head of a row has a program
STAGES = 2  # tiles of 16 bits that are in memory at a time: one is attended, the other is on its way


def attend(step, attn, layer, inputs, qkv, q, y, parts, angles, apart):
    """
    Write the keys and values of qkv (R, (n_head + 2 * n_kv_head) * head_dim) to their slots, and its queries to q (R,
    kinds, n_head, head_dim), and attend. Queries and keys have their norms, if there are any, and are turned by angles.

    y (R, n_head * head_dim): of each row's queries, over what its sequence has up to its position, through the window.
    Zeros for padding. parts, float32 (R, n_splits, n_head, head_dim + 2), are written too. step: a `step.Step`. layer:
    a `kvcache.storage.Layer`. apart: all rows are of different sequences, so the program that reads a new key can store
    it.
    """
    c, k, v, n_splits, R = step.config, layer.k, layer.v, step.columns.n_splits, len(q)
    shared, one, padded = c.n_head // c.n_kv_head, q.dtype == torch.float32, max(16, triton.next_power_of_2(c.head_dim))
    # how many int8 numbers share a scale: a power of two, or a whole head, padded to one; 0 for other types
    group = 0 if k.scale is None else k.group
    arguments = (qkv, q, angles, k.data, v.data, k.scale, v.scale, inputs.positions, inputs.sequences,
                 inputs.slot_table, inputs.slot_table.stride(0), layer.n_slots)
    constants = dict(SHARED=shared, N_HEAD=c.n_head, N_KV_HEAD=c.n_kv_head, D=c.head_dim, PADDED=padded,
                     KINDS=q.size(1), N_SINK=c.n_sink, SINKS=step.columns.sinks, RING=step.columns.ring, GROUP=group,
                     GROUP_SIZE=padded if group == c.head_dim else group, enable_fp_fusion=False, **overlap(q))
    norms = [getattr(attn, name, None) for name in ('q_norm', 'k_norm')]
    # a program of one warp adds up a norm in another order than one of several
    stores = apart and norms == [None, None]
    if not stores:
        weights, eps = [norm and norm.weight.detach() for norm in norms], norms[0].eps if norms[0] else 0.0
        store_kernel[R, c.n_kv_head](*arguments, *weights, eps, **constants, num_warps=1)
    # Tensor cores multiply the queries of 16 bits that share keys as one matrix, padded to 16 rows. They do not
    # multiply float32: each query of float32 has a program of its own, without a barrier in its loop
    n_heads = c.n_head if one else c.n_kv_head
    n_programs = min(n_splits, max(1, PROGRAMS // (R * n_heads)))
    queries, rows = (1, 1) if one else (shared, max(16, triton.next_power_of_2(shared)))
    # Many programs of one warp fit a multiprocessor: some compute while others wait for memory. Heads of more than 64
    # channels need more registers than one warp has
    if small := not one and padded <= 64:
        tile, split, num_warps, stages = SMALL_TILE, SPLIT, 1, STAGES
    else:
        tile = min(TILE, 2**14 // padded)  # so that one fits the memory of small cards
        split, num_warps, stages = max(SPLIT, tile), 8 if one else 4, 1
    attend_kernel[R, n_heads, n_programs](
        *arguments, y, parts, step.ended, step.slopes, queries, rows, c.head_dim ** -0.5, tile, stores, c.window, split,
        SPLITS, n_splits, small and n_programs == 1, stages, **constants, num_warps=num_warps)


# fused multiply-adds are off: a rotation then has the bits of PyTorch's, and so do the int8 codes
@triton.jit(do_not_specialize=['n_slots'])
def store_kernel(qkv, q, angles, k, v, k_scale, v_scale, positions, sequences, slot_table, table_stride, n_slots,
                 q_norm, k_norm, EPS: constexpr, SHARED: constexpr, N_HEAD: constexpr, N_KV_HEAD: constexpr,
                 D: constexpr, PADDED: constexpr, KINDS: constexpr, N_SINK: constexpr, SINKS: constexpr,
                 RING: constexpr, GROUP: constexpr, GROUP_SIZE: constexpr, OVERLAP: constexpr):
    """A head of a row's new keys and values, and the queries that share it."""
    wait(OVERLAP)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(sequences + row).to(tl.int64)
    slot = slot_of(tl.load(positions + row), sequence, slot_table, table_stride, N_SINK, SINKS, RING)
    store_new(qkv, q, angles, k, v, k_scale, v_scale, q_norm, k_norm, row, head * SHARED, slot,
              head.to(tl.int64) * n_slots, sequence >= 0, EPS, SHARED, SHARED, N_HEAD, N_KV_HEAD, D, PADDED, KINDS,
              GROUP, GROUP_SIZE)


@triton.jit
def store_new(qkv, q, angles, k, v, k_scale, v_scale, q_norm, k_norm, row, first, slot, of_head, real, EPS: constexpr,
              QUERIES: constexpr, SHARED: constexpr, N_HEAD: constexpr, N_KV_HEAD: constexpr, D: constexpr,
              PADDED: constexpr, KINDS: constexpr, GROUP: constexpr, GROUP_SIZE: constexpr):
    """Write QUERIES heads of a row's queries, from `first` on, of each kind, and the key and value that they share."""
    channels, new = tl.arange(0, PADDED), qkv + row * (N_HEAD + 2 * N_KV_HEAD) * D
    for i in tl.static_range(QUERIES):
        for kind in tl.static_range(KINDS):
            query = head_of(new + (first + i) * D, q_norm, angles, row * KINDS + kind, EPS, D, PADDED)
            to = q + ((row * KINDS + kind) * N_HEAD + first + i) * D + channels
            tl.store(to, query.to(q.dtype.element_ty), channels < D)
    new += (N_HEAD + first // SHARED) * D
    key = head_of(new, k_norm, angles, row * KINDS, EPS, D, PADDED).to(q.dtype.element_ty)
    write(key.to(tl.float32), k, k_scale, (of_head + slot) * D, real, D, PADDED, GROUP, GROUP_SIZE)
    value = head_of(new + N_KV_HEAD * D, None, None, row, EPS, D, PADDED)
    write(value, v, v_scale, (of_head + slot) * D, real, D, PADDED, GROUP, GROUP_SIZE)


@triton.jit
def slot_of(position, sequence, slot_table, table_stride, N_SINK: constexpr, SINKS: constexpr, RING: constexpr):
    """The slot of a position, int64; 0 for padding."""
    column = tl.where(position < N_SINK, position, SINKS + position % RING) if RING > 0 else position
    return tl.load(slot_table + sequence * table_stride + column, sequence >= 0, 0).to(tl.int64)


@triton.jit
def head_of(x, norm, angles, of_row, EPS: constexpr, D: constexpr, PADDED: constexpr):
    """float32 (PADDED,): the head at x after a norm, turned by angles (of_row,); norm and angles may be None."""
    channels = tl.arange(0, PADDED)
    a = tl.load(x + channels, channels < D, 0).to(tl.float32)
    if norm is not None:
        size = tl.rsqrt(tl.sum(a * a, axis=0) / D + EPS)
        a = a * size * tl.load(norm + channels, channels < D, 0).to(tl.float32)
    if angles is not None:
        # channels i and i + D / 2 are a pair (a, b), which becomes (a cos - b sin, b cos + a sin)
        second = channels >= D // 2
        other = tl.where(second, channels - D // 2, channels + D // 2)
        b = tl.load(x + other, channels < D, 0).to(tl.float32)
        if norm is not None:
            b = b * size * tl.load(norm + other, channels < D, 0).to(tl.float32)
        at = angles + of_row * D + tl.where(second, other, channels)
        cos, sin = tl.load(at, channels < D, 0), tl.load(at + D // 2, channels < D, 0)
        a = tl.where(second, a * cos + b * sin, a * cos - b * sin)
    return a


@triton.jit
def write(x, data, scale, at, real, D: constexpr, PADDED: constexpr, GROUP: constexpr, GROUP_SIZE: constexpr):
    """Write a head x, float32 (PADDED,), at data + at, as it is stored; nothing unless real."""
    channels = tl.arange(0, PADDED)
    if scale is not None:
        x, scales = quantised(x, GROUP_SIZE)
        groups = tl.arange(0, PADDED // GROUP_SIZE)
        tl.store(scale + at // GROUP + groups, scales, groups < tl.where(real, D // GROUP, 0))
    tl.store(data + at + channels, x.to(data.dtype.element_ty), channels < tl.where(real, D, 0))


@triton.jit
def quantised(x, GROUP_SIZE: constexpr):
    """Codes, whole numbers in float32 (n,), and scales of x (n,): those of `kvcache.storage.quantise`, bit for bit."""
    groups = tl.reshape(x, (x.shape[0] // GROUP_SIZE, GROUP_SIZE))
    scales = tl.maximum(tl.div_rn(tl.max(tl.abs(groups), axis=1), 127.0), 1e-30)
    scales += tl.sum(groups * 0.0, axis=1)  # NaN if a number is not finite: a maximum would hide it
    codes = tl.div_rn(groups, scales[:, None])
    codes = (codes + 12582912.0) - 12582912.0  # at 1.5 * 2^23 the next float32 is 1 away: rounds halves to even
    codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
    return tl.reshape(codes, (x.shape[0],)), scales


@triton.jit(do_not_specialize=['n_slots'])  # one kernel is compiled for all caches, so that bits are the same in each
def attend_kernel(qkv, q, angles, k, v, k_scale, v_scale, positions, sequences, slot_table, table_stride, n_slots, y,
                  parts, ended, slopes, QUERIES: constexpr, ROWS: constexpr, SCALE: constexpr, TILE: constexpr,
                  STORES: constexpr, WINDOW: constexpr, SPLIT: constexpr, SPLITS: constexpr, N_SPLITS: constexpr,
                  ALONE: constexpr, STAGES: constexpr, SHARED: constexpr, N_HEAD: constexpr, N_KV_HEAD: constexpr,
                  D: constexpr, PADDED: constexpr, KINDS: constexpr, N_SINK: constexpr, SINKS: constexpr,
                  RING: constexpr, GROUP: constexpr, GROUP_SIZE: constexpr, OVERLAP: constexpr):
    """
    Some splits of a row, for QUERIES of the SHARED query heads of a head of keys, padded to ROWS, of which each is a
    lane. One query alone has TILE lanes: lane i is key i of each tile, and lanes meet after the last tile. ALONE: this
    program has all splits, which are added up as they come.
    """
    row, channels = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    position, sequence = tl.load(positions + row), tl.load(sequences + row).to(tl.int64)
    heads, mine = tl.program_id(1) * QUERIES + tl.arange(0, ROWS), tl.arange(0, ROWS) < QUERIES
    numbers = mine[:, None] & (channels < D)[None, :]
    LANES: constexpr = TILE if ROWS == 1 else ROWS
    of_head = (tl.program_id(1) * QUERIES // SHARED).to(tl.int64) * n_slots
    slope = None if slopes is None else tl.load(slopes + heads, mine, 0)[:, None]
    slot = slot_of(position, sequence, slot_table, table_stride, N_SINK, SINKS, RING)
    wait(OVERLAP)  # positions and slots are older than the kernel before
    if STORES:  # each program of a row writes the same
        store_new(qkv, q, angles, k, v, k_scale, v_scale, None, None, row, tl.program_id(1) * QUERIES, slot, of_head,
                  sequence >= 0, 0.0, QUERIES, SHARED, N_HEAD, N_KV_HEAD, D, PADDED, KINDS, GROUP, GROUP_SIZE)
        tl.debug_barrier()  # all threads read what some have written
    n_splits = splits_of(position, sequence, 0, WINDOW, N_SINK, SPLIT, SPLITS)[0]
    all_most, all_weight, all_sums = nothing(ROWS, PADDED)
    for split in tl.range(tl.program_id(2), n_splits, tl.num_programs(2)):
        n, low, end, of_sinks = splits_of(position, sequence, split, WINDOW, N_SINK, SPLIT, SPLITS)
        from_position = tl.where(of_sinks, tl.minimum(position, N_SINK + WINDOW - 1), position)
        of_query = (row * KINDS + tl.where(of_sinks, KINDS - 1, 0)) * N_HEAD + heads
        query = tl.load(q + of_query[:, None] * D + channels[None, :], numbers, 0)
        most, weight, sums = nothing(LANES, PADDED)
        start = low // TILE * TILE
        for tile in tl.range(0, ((end - start + TILE - 1) // TILE).to(tl.int32), num_stages=STAGES):
            first = start + tile * TILE
            keys = first + tl.arange(0, TILE)
            seen = (keys >= low) & (keys < end)
            column = tl.where(of_sinks, first, SINKS + first % RING) if RING > 0 else first
            slots = tl.load(slot_table + sequence * table_stride + column + tl.arange(0, TILE), seen, 0).to(tl.int64)
            at = (of_head + slots) * D
            key = read(k, k_scale, at, seen, D, PADDED, GROUP, GROUP_SIZE).to(q.dtype.element_ty)
            value = read(v, v_scale, at, seen, D, PADDED, GROUP, GROUP_SIZE).to(q.dtype.element_ty)
            if ROWS == 1:
                scores = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1)[:, None] * SCALE
                keys, seen = keys[:, None], seen[:, None]
            else:
                scores = tl.dot(query, tl.trans(key), input_precision='ieee') * SCALE
                keys, seen = keys[None, :], seen[None, :]
            if slope is not None:
                scores -= slope * (from_position - keys).to(tl.float32)
            scores = tl.where(seen, scores, float('-inf'))
            before, most = most, tl.maximum(most, tl.max(scores, axis=1))
            kept, weights = share(before, most), share(scores, most[:, None])
            weight = weight * kept + tl.sum(weights, axis=1)
            if ROWS == 1:
                sums = sums * kept[:, None] + weights * value.to(tl.float32)
            else:
                sums = tl.dot(weights.to(value.dtype), value, sums * kept[:, None], input_precision='ieee')
        if ROWS == 1:
            kept = share(most, tl.max(most, axis=0, keep_dims=True))
            most, weight = tl.max(most, axis=0, keep_dims=True), tl.sum(weight * kept, axis=0, keep_dims=True)
            sums = tl.sum(sums * kept[:, None], axis=0, keep_dims=True)
        if ALONE:
            all_most, all_weight, all_sums = joined(all_most, all_weight, all_sums, most, weight, sums)
        else:
            part = parts + ((row * N_SPLITS + split) * N_HEAD + heads) * (D + 2)
            tl.store(part + D, most, mine)
            tl.store(part + D + 1, weight, mine)
            tl.store(part[:, None] + channels[None, :], sums, numbers)
    is_whole = True
    if not ALONE:
        is_whole = is_last(ended + row * N_HEAD + tl.program_id(1), tl.num_programs(2))
    if is_whole:
        if not ALONE:
            all_weight, all_sums = parts_joined(parts + (row * N_SPLITS * N_HEAD + heads) * (D + 2), n_splits, mine,
                                                N_HEAD, D, PADDED, ROWS)
        all_sums /= tl.where(n_splits > 0, all_weight, 1)[:, None]  # 0 of padding, which has no splits
        to = y + (row * N_HEAD + heads) * D
        tl.store(to[:, None] + channels[None, :], all_sums.to(y.dtype.element_ty), numbers)


@triton.jit
def splits_of(position, sequence, split, WINDOW: constexpr, N_SINK: constexpr, SPLIT: constexpr, SPLITS: constexpr):
    """
    Of the row at `position`: how many splits its keys are, int32, none for padding; and the first position that it sees
    of one of them, the end, and whether it is the split of sinks.
    """
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else position * 0  # that is no sink
    size = (position - first + SPLIT * SPLITS) // (SPLIT * SPLITS) * SPLIT
    n_splits = tl.where(sequence >= 0, position // size - first // size + 1 + (N_SINK > 0), 0).to(tl.int32)
    start = (first // size + split - (N_SINK > 0)) * size
    low, end = tl.maximum(tl.maximum(first, N_SINK), start), tl.minimum(start + size, position + 1)
    of_sinks = (split == 0) & (N_SINK > 0)
    return n_splits, tl.where(of_sinks, 0, low), tl.where(of_sinks, tl.minimum(N_SINK, position + 1), end), of_sinks


@triton.jit
def read(data, scale, at, seen, D: constexpr, PADDED: constexpr, GROUP: constexpr, GROUP_SIZE: constexpr):
    """A tile of keys or values (TILE, PADDED) from data + at, those of int8 times their scales; 0 where not seen."""
    channels = tl.arange(0, PADDED)
    x = tl.load(data + at[:, None] + channels[None, :], seen[:, None] & (channels < D)[None, :], 0)
    if scale is not None:
        groups = tl.arange(0, PADDED // GROUP_SIZE)
        scales = tl.load(scale + (at // GROUP)[:, None] + groups[None, :],
                         seen[:, None] & (groups < D // GROUP)[None, :], 0)
        x = tl.reshape(x.to(tl.float32), (x.shape[0], PADDED // GROUP_SIZE, GROUP_SIZE)) * scales[:, :, None]
        x = tl.reshape(x, (at.shape[0], PADDED))
    return x


@triton.jit
def share(score, most):
    """e to the power of score - most; 0 for -inf, also where nothing is seen and so most is -inf."""
    return tl.exp(score - tl.where(most == float('-inf'), 0.0, most))


@triton.jit
def nothing(n: constexpr, PADDED: constexpr):
    """The largest score, the sum of weights and the sums of values of no keys."""
    return tl.full((n,), float('-inf'), tl.float32), tl.zeros((n,), tl.float32), tl.zeros((n, PADDED), tl.float32)


@triton.jit
def joined(most, weight, sums, of_split, of_weights, of_values):
    """The same of some splits and one more."""
    largest = tl.maximum(most, of_split)
    kept, added = share(most, largest), share(of_split, largest)
    return largest, weight * kept + of_weights * added, sums * kept[:, None] + of_values * added[:, None]


@triton.jit
def parts_joined(parts, n_splits, mine, N_HEAD: constexpr, D: constexpr, PADDED: constexpr, ROWS: constexpr):
    """The sum of weights and the sums of values of all parts: D sums, the largest score, the sum of weights."""
    channels = tl.arange(0, PADDED)
    numbers = mine[:, None] & (channels < D)[None, :]
    most, weight, sums = nothing(ROWS, PADDED)
    for split in tl.range(0, n_splits):
        part = parts + split * N_HEAD * (D + 2)
        of_split, of_weights = tl.load(part + D, mine, 0), tl.load(part + D + 1, mine, 0)
        of_values = tl.load(part[:, None] + channels[None, :], numbers, 0)
        most, weight, sums = joined(most, weight, sums, of_split, of_weights, of_values)
    return weight, sums
