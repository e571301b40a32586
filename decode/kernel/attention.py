"""
Attention of a layer over stored keys and values, as the compiled step computes it.

It is a C function for each type of keys and values, and the step calls it by its address. So the step is compiled for
each type of weights, attention for each type of keys and values, and no code for two types together.

Stored keys and values are float32 or int8, and always float32 in registers. An int8 number is code * scale; KV_GROUP
numbers share a scale, whose index follows from that of the number. Numbers are rounded as kvcache/storage.py rounds
them.
"""
import math
from collections import namedtuple

import numpy as np
import torch
from llvmlite import ir
from numba import types

from decode.kernel import emit, layout
from decode.kernel.attention_tile import N_SCORED, N_WEIGHED, score_tile, store_transposed, sum_of_eight, weigh_tile
from decode.kernel.building import CFunction
from decode.kernel.emit import FLOATS, I8, I64, INTS, LANES, address, broadcast, instruction, njit
from decode.kernel.layout import EIGHT, GROUP, HEAD_DIM, HEAD_STRIDE, KV_GROUP, N_HEAD, N_KV_HEAD
from decode.kernel.norms import head_norm
from decode.kernel.pointers import floats_at, longs_at, pointer_like
from decode.kernel.threads import share
from decode.kernel.vectors import (
    absolute,
    constant,
    exp,
    floats,
    fma,
    lanes_from,
    larger,
    load,
    load_first,
    max_lanes,
    padded,
    splat,
    store,
    store_first,
    store_rounded,
    sum_each,
    sum_lanes,
    zero_below,
    zeros,
)

# the keys and values of a layer, and the float32 scales of both if they are int8; see kvcache/storage.py
LayerKV = namedtuple('LayerKV', 'k v k_scale v_scale')

# where a key or value is: at offsets[key] + head
Slots = namedtuple('Slots', 'offsets head')

# the keys that a row sees, as ranges of OFFSETS: the sinks, and the last ones up to its own; sink_position: the row's
# position for its distance to the sinks, see `positions.Positions.mask_with_sinks`
Seen = namedtuple('Seen', 'sinks sinks_end last last_end sink_position')

# what is prefetched: the keys and values number `key` to `last` of OFFSETS, of the head at `head`. If `last` is less
# than `key`, there is nothing
Ahead = namedtuple('Ahead', 'head key last')

# arrays of a thread, see layout.py
Scratch = namedtuple('Scratch', 'scores keys values eights')

ZERO = np.int64(0)  # a plain 0 is of a type of its own, for which numba would compile a function again
FAR = 2**19      # if all keys of a step have more numbers, they are prefetched: fewer stay in the caches anyway
AT_ONCE = 2**18  # the most bytes of a head's keys and values that are prefetched: they must fit the second cache
NOTHING = Ahead(ZERO, ZERO, np.int64(-1))
TOGETHER = 16  # if so many queries of a sequence read the same keys, the keys are copied so that tiles can read them
SHIFT = KV_GROUP.bit_length() - 1  # from the index of a number to that of its scale


def to_floats(builder, codes, scales, i):
    """Stored numbers as float32: those of int8 times the scale of number i."""
    if codes.type.element == I8:
        scale = emit.load(builder, address(builder, scales, builder.lshr(i, I64(SHIFT))))
        return builder.fmul(builder.sitofp(builder.sext(codes, INTS), FLOATS), broadcast(builder, scale))
    return codes


def emit_load_stored(builder, array, scales, i):
    vector = ir.VectorType(array.type.pointee, LANES)
    codes = emit.load(builder, address(builder, array, i, vector), emit.bytes_of(vector.element))
    return to_floats(builder, codes, scales, i)


@instruction(floats)
def load_stored_first(builder, array, scales, i, n):
    """The first n of array[i : i + LANES], and zero in the other lanes; nothing beyond them is touched."""
    return to_floats(builder, emit.load_first(builder, array, i, n), scales, i)


@instruction(types.boolean)
def has_scales(builder, array):
    """Are these stored numbers int8? Compiled code has only the branch for its type."""
    return ir.Constant(ir.IntType(1), array.type.pointee == I8)


def rows_at(builder, i, offsets, keys):
    """Where the rows of these keys are: i + offsets[key]"""
    return [builder.add(i, emit.load(builder, address(builder, offsets, key), 8)) for key in keys]


@instruction()
def dot_rows(builder, sums, array, scales, i, offsets, key, v):
    """sums[r] + array[i + offsets[key + r] : + LANES] * v, for each row r"""
    at = rows_at(builder, i, offsets, emit.numbers_from(builder, key, len(sums)))
    rows = [emit_load_stored(builder, array, scales, i) for i in at]
    return [emit.fma(builder, row, v, s) for row, s in zip(rows, sums)]


@instruction()
def add_rows(builder, sums, array, scales, i, offsets, key, p, j):
    """sums[8 * n + r] + array[i + offsets[key + r] + n * LANES : + LANES] * p[j + r], for eight rows r and each n"""
    at = rows_at(builder, i, offsets, emit.numbers_from(builder, key, 8))
    weights = [broadcast(builder, emit.load(builder, address(builder, p, builder.add(j, I64(r))))) for r in range(8)]
    for s in range(len(sums)):
        i = builder.add(at[s % 8], I64(s // 8 * LANES))
        row = emit_load_stored(builder, array, scales, i)
        sums[s] = emit.fma(builder, row, weights[s % 8], sums[s])
    return sums


@instruction()
def add_totals(builder, sums, eights):
    """sums[m] + the sum of the eight vectors 8 * m to 8 * m + 7 of eights, for each m"""
    return [builder.fadd(s, emit.tree_sum(builder, eights[8 * m:8 * m + 8])) for m, s in enumerate(sums)]


@instruction()
def add_row(builder, sums, array, scales, i, n, p):
    """sums + array[i : i + n] * p; sums: the vectors that n numbers fill, the last of them perhaps in part"""
    weight = broadcast(builder, p)
    for m in range(len(sums)):
        before = I64(m * LANES)
        at = builder.add(i, before)
        row = to_floats(builder, emit.load_first(builder, array, at, builder.sub(n, before)), scales, at)
        sums[m] = emit.fma(builder, row, weight, sums[m])
    return sums


@instruction(types.void)
def store_row(builder, array, i, sums, factor, n):
    """array[i : i + n] = sums * factor"""
    for m, v in enumerate(sums):
        before = I64(m * LANES)
        emit.store_first(builder, array, builder.add(i, before), builder.fmul(v, factor), builder.sub(n, before))


@instruction(types.UniTuple(floats, LANES))
def load_rows(builder, array, scales, i, offsets, key, last):
    """array[i + offsets[k] : + LANES] for LANES keys k from `key` on; `last` takes the place of those after it."""
    at = rows_at(builder, i, offsets, emit.numbers_from(builder, key, LANES, last))
    return [emit_load_stored(builder, array, scales, i) for i in at]


@instruction(types.void)
def prefetch_rows(builder, array, i, offsets, key, last, like):
    """
    Prefetch the line of array[i + offsets[k]] into the second cache, for as many keys k from `key` on as `like` has
    vectors; `last` takes the place of those after it.
    """
    for at in rows_at(builder, i, offsets, emit.numbers_from(builder, key, len(like), last)):
        emit.prefetch(builder, address(builder, array, at, I8), 2)


def attention_on(dtype):
    """
    The `CFunction` for keys and values of a NumPy dtype. It computes thread number `thread`'s share of the attention of
    a layer: it stores the new keys and values, and attends with the queries of all rows; in the last layer only with
    those of the rows in WANTED. The results are the first rows of Y.
    """
    like = np.zeros(0, dtype)

    def layer_attention(memory_at, sizes_at, layer, thread, n_threads):
        memory, sizes = longs_at(memory_at), longs_at(sizes_at)
        arrays = longs_at(memory[layout.KV_ARRAYS] + 32 * layer)
        stored = LayerKV(pointer_like(like, arrays[0]), pointer_like(like, arrays[1]), floats_at(arrays[2]),
                         floats_at(arrays[3]))
        scratch = layout.SCRATCH + layout.N_SCRATCH * thread
        heads, kv_heads = heads_of(sizes, thread, n_threads)
        prepare_queries(memory, sizes, layer, heads)
        write_keys_values(memory, sizes, layer, kv_heads, stored, floats_at(memory[scratch + layout.HEAD]))
        every = layer < sizes[layout.N_LAYER] - 1 or sizes[layout.N_WANTED] == sizes[layout.N_ROWS]
        n_queries = sizes[layout.N_ROWS] if every else sizes[layout.N_WANTED]
        attend(memory, sizes, heads, kv_heads, stored, n_queries, every, Scratch(
            floats_at(memory[scratch + layout.SCORES]), floats_at(memory[scratch + layout.KEYS]),
            floats_at(memory[scratch + layout.VALUES]), floats_at(memory[scratch + layout.EIGHTS])))
        return 0
    return CFunction(layer_attention)


ATTENTION_ON = {torch.float32: attention_on(np.float32), torch.int8: attention_on(np.int8)}


@njit
def heads_of(sizes, thread, n_threads):
    """
    The heads (from, to) of queries that a thread computes, and the heads of keys and values that these read. Several
    threads may compute the same head of keys and values; they write the same bits.
    """
    group = sizes[N_HEAD] // sizes[N_KV_HEAD]
    first, end = share(sizes[N_HEAD], thread, n_threads)
    return (first, end), (first // group, (end + group - 1) // group if first < end else first // group)


@njit
def store_head(stored, scales, at, x, x_at, head_dim):
    """stored[at : at + head_dim] = x[x_at : x_at + head_dim], in the type of `stored`"""
    if not has_scales(stored):
        for i in range(0, head_dim, LANES):
            store_first(stored, at + i, load(x, x_at + i), head_dim - i)
        return
    for i in range(0, head_dim, KV_GROUP):
        largest, not_numbers = constant(0), constant(0)
        for j in range(i, i + KV_GROUP, LANES):
            v = load(x, x_at + j)
            largest, not_numbers = larger(absolute(v), largest), fma(v, constant(0), not_numbers)
        scale = max(max_lanes(largest) / np.float32(127), np.float32(1e-30))
        for j in range(i, i + KV_GROUP, LANES):
            store_rounded(stored, at + j, load(x, x_at + j) / splat(scale))
        scales[(at + i) // KV_GROUP] = scale + sum_lanes(not_numbers)  # a NaN if there is one: int8 has none


@njit
def own_entry(memory, row):
    """Where in OFFSETS the entry of a row's own position is."""
    table, seq = longs_at(memory[layout.SEQUENCES]), longs_at(memory[layout.SEQ_OF_ROW])[row]
    at, position = seq * layout.N_SEQUENCE_COLUMNS, longs_at(memory[layout.POSITIONS])[row]
    if position < table[at + layout.N_SINKS]:
        return table[at + layout.FIRST_OFFSET] + position
    return table[at + layout.FIRST_OFFSET] + table[at + layout.N_SINKS] + position - table[at + layout.FIRST_POSITION]


@njit
def rotate(x, at, angles, angle_at, half, out, out_at):
    """out = x (2 * half,), each pair (i, i + half) turned by its angle: angles has half cosines, then half sines."""
    for i in range(0, half, LANES):
        n = half - i
        a, b = load_first(x, at + i, n), load_first(x, at + half + i, n)
        cos, sin = load_first(angles, angle_at + i, n), load_first(angles, angle_at + half + i, n)
        store_first(out, out_at + i, a * cos - b * sin, n)
        store_first(out, out_at + half + i, b * cos + a * sin, n)


@njit
def prepare_queries(memory, sizes, layer, heads):
    """
    The norms of the queries of heads = (from, to), if the model has any; then these queries are turned to their
    positions, and in Q_SINKS to where the sinks see them.
    """
    qk_norm, rope = sizes[layout.QK_NORM], sizes[layout.POSITION] == layout.ROPE
    if not qk_norm and not rope:
        return
    head_dim, half, head_p = sizes[HEAD_DIM], sizes[HEAD_DIM] // 2, padded(sizes[HEAD_DIM], LANES)
    q_p, eps = sizes[N_HEAD] * head_p, floats_at(memory[layout.EPS])[0]
    weight = floats_at(memory[layout.HEAD_NORM_WEIGHT])
    q, q_sinks, angles = (floats_at(memory[layout.Q]), floats_at(memory[layout.Q_SINKS]),
                          floats_at(memory[layout.ANGLES]))
    for row in range(sizes[layout.N_ROWS]):
        for head in range(heads[0], heads[1]):
            at, angle_at = row * q_p + head * head_p, row * 4 * half
            if qk_norm:
                head_norm(q, at, weight, 2 * layer * head_p, eps, head_dim, q, at)
            if rope and sizes[layout.N_SINK]:
                rotate(q, at, angles, angle_at + 2 * half, half, q_sinks, at)
            if rope:
                rotate(q, at, angles, angle_at, half, q, at)


@njit
def write_keys_values(memory, sizes, layer, kv_heads, stored, prepared):
    """
    Store the new keys and values of kv_heads = (from, to) of all rows, keys after their norm and turned to their
    positions. prepared: room for such a key, head_dim numbers. The key in KV must not change, because several threads
    may store the same head.
    """
    weight, eps = floats_at(memory[layout.HEAD_NORM_WEIGHT]), floats_at(memory[layout.EPS])[0]
    head_dim, head_p = sizes[HEAD_DIM], padded(sizes[HEAD_DIM], LANES)
    new, angles = floats_at(memory[layout.KV]), floats_at(memory[layout.ANGLES])
    offsets = longs_at(memory[layout.OFFSETS])
    for row in range(sizes[layout.N_ROWS]):
        slot_at = offsets[own_entry(memory, row)]
        for head in range(kv_heads[0], kv_heads[1]):
            k_at, at = (row * sizes[N_KV_HEAD] + head) * 2 * head_p, slot_at + head * sizes[HEAD_STRIDE]
            k, from_at = new, k_at
            if sizes[layout.QK_NORM]:
                head_norm(k, from_at, weight, (2 * layer + 1) * head_p, eps, head_dim, prepared, ZERO)
                k, from_at = prepared, ZERO
            if sizes[layout.POSITION] == layout.ROPE:
                rotate(k, from_at, angles, row * 2 * head_dim, head_dim // 2, prepared, ZERO)
                k, from_at = prepared, ZERO
            store_head(stored.k, stored.k_scale, at, k, from_at, head_dim)
            store_head(stored.v, stored.v_scale, at, new, k_at + head_p, head_dim)


@njit
def attend(memory, sizes, heads, kv_heads, stored, n_queries, every, scratch):
    """
    Attend with the queries of heads = (from, to), which read kv_heads: those of all rows if `every`, otherwise of the
    first n_queries rows of WANTED. Y gets one row for each, in the same order. While a head of a row is computed, the
    keys and values of the next head, of this row or the next, are prefetched: they are scattered over pages, so the
    processor itself prefetches few of them. With each block of keys that is read one block is prefetched, because a
    processor waits if too many lines are requested at once.
    """
    wanted, positions = longs_at(memory[layout.WANTED]), longs_at(memory[layout.POSITIONS])
    of_row, starts = longs_at(memory[layout.SEQ_OF_ROW]), longs_at(memory[layout.QUERY_STARTS])
    group, n_sink, window = sizes[N_HEAD] // sizes[N_KV_HEAD], sizes[layout.N_SINK], sizes[layout.WINDOW]
    sequences, tiled = longs_at(memory[layout.SEQUENCES]), every and window == 0 and sizes[HEAD_DIM] % (2 * LANES) == 0
    n_seen, done = own_entry(memory, sizes[layout.N_ROWS] - 1) + 1, 0
    is_far = n_seen * sizes[layout.N_LAYER] * sizes[N_KV_HEAD] * sizes[HEAD_DIM] > FAR
    most_ahead = AT_ONCE // (2 * (1 if has_scales(stored.k) else 4) * sizes[HEAD_DIM])
    for i in range(n_queries):
        row = i if every else wanted[i]
        n_rows = starts[of_row[row] + 1] - row
        if row < done:
            continue
        if tiled and n_rows * group >= TOGETHER:
            attend_rows(memory, sizes, stored, row, n_rows, heads, kv_heads, scratch)
            done = row + n_rows
            continue
        position = positions[row]
        # the keys that are seen, as entries of OFFSETS: the sinks, and the last ones up to the row's own position
        n_sinks = min(n_sink, position + 1)
        n_last = position + 1 - n_sinks if window == 0 else min(window, position + 1 - n_sinks)
        a, end = sequences[of_row[row] * layout.N_SEQUENCE_COLUMNS + layout.FIRST_OFFSET], own_entry(memory, row) + 1
        seen = Seen(a, a + n_sinks, end - n_last, end, min(position, n_sink + window - 1) if n_sink else position)
        next_end = own_entry(memory, row + 1 if every else wanted[i + 1]) + 1 if i + 1 < n_queries else end
        for kv_head in range(kv_heads[0], kv_heads[1]):
            of_group = max(heads[0], kv_head * group), min(heads[1], kv_head * group + group)
            ahead = NOTHING
            if is_far:
                head, start, stop = kv_head + 1, end - n_last, end
                if head == kv_heads[1]:
                    head, start, stop = kv_heads[0], end, next_end
                ahead = Ahead(head * sizes[HEAD_STRIDE], start, min(stop, start + most_ahead) - 1)
            attend_row(memory, sizes, stored, row, kv_head, of_group, seen, ahead, scratch.scores, i)


@njit
def copy_keys_values(stored, slots, first, n_keys, head_dim, scratch):
    """
    Copy the keys and values of a head, those of n_keys entries of OFFSETS from `first` on, to the scratch, as float32:
    keys as `score_tile` reads them, values row by row.
    """
    n_chain = head_dim // LANES
    for key in range(0, n_keys, LANES):
        for c in range(n_chain):
            rows = load_rows(stored.k, stored.k_scale, slots.head + c * LANES, slots.offsets, first + key,
                             first + n_keys - 1)
            store_transposed(rows, scratch.keys, key * head_dim + c * LANES, n_chain * LANES)
    for key in range(n_keys):
        at = slots.offsets[first + key] + slots.head
        for i in range(0, head_dim, LANES):
            store(scratch.values, key * head_dim + i, load_stored_first(stored.v, stored.v_scale, at + i, LANES))


@njit
def attend_rows(memory, sizes, stored, row, n_rows, heads, kv_heads, scratch):
    """
    Attend with the queries of n_rows rows of a sequence, from `row` on. Each sees all keys up to its own. The results
    are those of `attend_row`, to the bit. Rows that see the same number of whole eights of keys are computed together.
    """
    group, position = sizes[N_HEAD] // sizes[N_KV_HEAD], longs_at(memory[layout.POSITIONS])[row]
    first = longs_at(memory[layout.SEQUENCES])[
        longs_at(memory[layout.SEQ_OF_ROW])[row] * layout.N_SEQUENCE_COLUMNS + layout.FIRST_OFFSET]
    for kv_head in range(kv_heads[0], kv_heads[1]):
        slots = Slots(longs_at(memory[layout.OFFSETS]), kv_head * sizes[HEAD_STRIDE])
        copy_keys_values(stored, slots, first, position + n_rows, sizes[HEAD_DIM], scratch)
        for head in range(max(heads[0], kv_head * group), min(heads[1], kv_head * group + group)):
            i = 0
            while i < n_rows:
                n = min(EIGHT - (position + i + 1) % EIGHT, n_rows - i)
                attend_eight(memory, sizes, row + i, n, head, scratch)
                i += n


@njit
def attend_eight(memory, sizes, row, n, head, scratch):
    """The queries of n rows from `row` on, eight at most, for one head, whose keys and values are in the scratch."""
    head_dim, n_head = sizes[HEAD_DIM], sizes[N_HEAD]
    q, q_stride, y, y_stride = (floats_at(memory[layout.Q]), n_head * head_dim, floats_at(memory[layout.Y]),
                                padded(n_head * head_dim, GROUP))
    position = longs_at(memory[layout.POSITIONS])[row]
    n_keys, scores, eights = position + n, scratch.scores, scratch.eights
    stride = padded(n_keys, LANES) + LANES
    for key in range(0, n_keys, LANES):
        for r in range(0, n, N_SCORED):
            score_tile(q, (row + r) * q_stride + head * head_dim, q_stride, n - r, scratch.keys, key * head_dim,
                       head_dim // LANES, scores, r * stride + key, stride)
    scale, slope = splat(np.float32(1 / math.sqrt(head_dim))), splat(floats_at(memory[layout.SLOPES])[head])
    for r in range(n):
        seen = position + r + 1
        for key in range(0, seen, LANES):
            at = r * stride + key
            store(scores, at, fma(load(scores, at), scale, slope * lanes_from(key + 1 - seen)))
        scores[r * stride + seen] = softmax(scores, r * stride, seen)  # stored at the end of the weights of its row
    whole = (position + 1) // EIGHT
    for i in range(0, head_dim, 2 * LANES):
        for first in range(0, n, N_WEIGHED):
            for r in range(EIGHT):
                weigh_tile(scratch.values, r * head_dim + i, EIGHT * head_dim, whole, scores, first * stride + r,
                           stride, n - first, eights, r * LANES)
            for r in range(first, min(n, first + N_WEIGHED)):
                w, seen = r * stride, position + r + 1
                for m in range(2):
                    total = constant(0) + sum_of_eight(eights, (2 * (r - first) + m) * EIGHT * LANES)
                    for key in range(EIGHT * whole, seen):
                        total = fma(load(scratch.values, key * head_dim + i + m * LANES), splat(scores[w + key]), total)
                    store(y, (row + r) * y_stride + head * head_dim + i + m * LANES, total * splat(scores[w + seen]))


@njit
def attend_row(memory, sizes, stored, row, kv_head, heads, seen, ahead, scores, y_row):
    """The queries of one row for one head of keys and values: softmax(q k / sqrt(head_dim) + bias) v."""
    head_dim, head_p = sizes[HEAD_DIM], padded(sizes[HEAD_DIM], LANES)
    q, q_at = floats_at(memory[layout.Q]), (row * sizes[N_HEAD] + heads[0]) * head_p
    q_sinks = floats_at(memory[layout.Q_SINKS]) if sizes[layout.POSITION] == layout.ROPE else q
    slots = Slots(longs_at(memory[layout.OFFSETS]), kv_head * sizes[HEAD_STRIDE])
    n_sinks, n_heads = seen.sinks_end - seen.sinks, heads[1] - heads[0]
    n_keys = n_sinks + seen.last_end - seen.last
    stride, slopes = padded(n_keys, LANES) + LANES, floats_at(memory[layout.SLOPES] + 4 * heads[0])
    if n_sinks:
        score(q_sinks, q_at, n_heads, head_dim, stored, slots, seen.sinks, seen.sinks_end, -seen.sink_position, slopes,
              NOTHING, scores, ZERO, stride)
    score(q, q_at, n_heads, head_dim, stored, slots, seen.last, seen.last_end, 1 + seen.last - seen.last_end, slopes,
          ahead, scores, n_sinks, stride)
    y, y_at = floats_at(memory[layout.Y]), y_row * padded(sizes[N_HEAD] * head_dim, GROUP) + heads[0] * head_dim
    for h in range(n_heads):
        norm = splat(softmax(scores, h * stride, n_keys))
        whole = head_dim - head_dim % (2 * LANES)
        for i in range(0, whole, 2 * LANES):
            weigh_two(stored, slots, i, 2 * LANES, seen, ahead, scores, h * stride, norm, y, y_at + h * head_dim + i)
        for i in range(whole, head_dim, LANES):
            n = min(LANES, head_dim - i)
            weigh_one(stored, slots, i, n, seen, ahead, scores, h * stride, norm, y, y_at + h * head_dim + i)
        ahead = NOTHING  # it has come with the first query


@njit
def score(q, q_at, n_heads, head_dim, stored, slots, key, end, offset, slopes, ahead, scores, to, stride):
    """
    scores[to + h * stride + i], for the n_heads queries at q_at and keys number key + i, up to end - 1. offset: the
    first key's position minus the query's, at most 0. A score has the same bits whichever keys are computed with it.
    """
    scale, head_p = splat(np.float32(1 / math.sqrt(head_dim))), padded(head_dim, LANES)
    if head_dim % LANES == 0:
        distance = ahead.key - key
        while key + LANES <= end:  # the scores of LANES keys, one in each lane
            for h in range(n_heads):
                sums, at = zeros(LANES), q_at + h * head_p
                for i in range(0, head_dim, LANES):
                    if h == 0 and key + distance <= ahead.last:
                        prefetch_rows(stored.k, ahead.head + i, slots.offsets, key + distance, ahead.last, sums)
                    sums = dot_rows(sums, stored.k, stored.k_scale, slots.head + i, slots.offsets, key, load(q, at + i))
                bias = splat(slopes[h]) * lanes_from(offset)
                store(scores, to + h * stride, fma(sum_each(sums), scale, bias))
            key, to, offset = key + LANES, to + LANES, offset + LANES
    while key < end:
        for h in range(n_heads):
            s = constant(0)
            for i in range(0, head_dim, LANES):
                k = load_stored_first(stored.k, stored.k_scale, slots.offsets[key] + slots.head + i, head_dim - i)
                s = fma(k, load(q, q_at + h * head_p + i), s)
            bias = splat(slopes[h]) * lanes_from(offset)
            store_first(scores, to + h * stride, fma(splat(sum_lanes(s)), scale, bias), 1)
        key, to, offset = key + 1, to + 1, offset + 1


@njit
def softmax(scores, at, n):
    """Replace n scores by e ** (score - the largest). Returns 1 over their sum."""
    store(scores, at + n, constant(-math.inf))  # the lanes of the last vector beyond n get no weight
    peak = constant(-math.inf)
    for i in range(0, n, LANES):
        peak = larger(load(scores, at + i), peak)
    top, sums = splat(max_lanes(peak)), constant(0)
    for i in range(0, n, LANES):
        x = load(scores, at + i) - top
        # weights below e ** -60 do not change a float32 sum; their products may be denormal numbers, which are slow
        e = zero_below(x, constant(-60.0), exp(x))
        store(scores, at + i, e)
        sums = sums + e
    return np.float32(1) / sum_lanes(sums)


def weigher(n_vectors):
    """The function for numbers that fill n_vectors vectors, the last of them perhaps in part."""
    n_eights = 8 * n_vectors

    @njit
    def weigh(stored, slots, i, n, seen, ahead, weights, w, norm, out, out_at):
        """
        out[out_at:out_at + n] = norm * the weighted sum of numbers i to i + n - 1 of the values that are seen. Weights
        begin at weights[w]. Sinks are added one by one, then eight keys at a time to eight sums, then the other keys.
        """
        v, scales, sums, at = stored.v, stored.v_scale, zeros(n_vectors), slots.head + i
        for key in range(seen.sinks, seen.sinks_end):
            sums = add_row(sums, v, scales, slots.offsets[key] + at, n, weights[w])
            w += 1
        key = seen.last
        if n == n_vectors * LANES:
            eights, distance = zeros(n_eights), ahead.key - key
            while key + 8 <= seen.last_end:
                if key + distance <= ahead.last:
                    for m in range(n_vectors):
                        at_next = ahead.head + i + m * LANES
                        prefetch_rows(v, at_next, slots.offsets, key + distance, ahead.last, zeros(8))
                eights = add_rows(eights, v, scales, at, slots.offsets, key, weights, w)
                key, w = key + 8, w + 8
            sums = add_totals(sums, eights)
        while key < seen.last_end:
            sums = add_row(sums, v, scales, slots.offsets[key] + at, n, weights[w])
            key, w = key + 1, w + 1
        store_row(out, out_at, sums, norm, n)
    return weigh


# weigh_two computes two vectors at a time: it reads each weight once for both
weigh_one, weigh_two = weigher(1), weigher(2)
