"""Attention over stored keys and values, as the compiled step computes it: one row's queries of one head of keys."""
import math
from collections import namedtuple

import numpy as np
from numba import njit, types
from numba.extending import overload

from decode.kernel import layout
from decode.kernel.keys_values import (
    add_row,
    add_rows,
    add_rows_at,
    add_totals,
    dot_rows,
    dot_rows_at,
    load_stored_first,
    store_bfloat16_first,
    store_int8,
    store_row,
)
from decode.kernel.layout import GROUP, HEAD_DIM, HEAD_STRIDE, KV_GROUP, N_HEAD, N_KV_HEAD, padded
from decode.kernel.plan import own_entry
from decode.kernel.tiles import sum_each, zeros
from decode.kernel.vectors import (
    LANES,
    absolute,
    constant,
    exp,
    floats_at,
    fma,
    lanes_from,
    larger,
    load,
    load_first,
    longs_at,
    max_lanes,
    pointer_like,
    splat,
    store,
    store_first,
    sum_lanes,
    zero_below,
)

# the keys and values of a layer, and the float32 scales of both if they are int8; see metadata.py
LayerKV = namedtuple('LayerKV', 'k v k_scale v_scale')

# where a key or value is: at offsets[key] + head; side_by_side: how many keys from this one on are `stride` apart
Slots = namedtuple('Slots', 'offsets side_by_side stride head')

# the keys that a row sees, as ranges of OFFSETS: the sinks, and the last ones up to its own; sink_position: the row's
# position as the sinks see it, see model.py's GPTConfig
Seen = namedtuple('Seen', 'sinks sinks_end last last_end sink_position')


@njit
def layer_kv(like, memory, layer):
    """The arrays of a layer; keys and values are of the type of `like`."""
    arrays = longs_at(memory[layout.KV_ARRAYS])
    return LayerKV(pointer_like(like, arrays[4 * layer]), pointer_like(like, arrays[4 * layer + 1]),
                   floats_at(arrays[4 * layer + 2]), floats_at(arrays[4 * layer + 3]))


def store_head(stored, scales, at, x, x_at, head_dim):
    """stored[at : at + head_dim] = x[x_at : x_at + head_dim], in the type of `stored`"""


@overload(store_head)
def choose_store_head(stored, scales, at, x, x_at, head_dim):
    def as_float32(stored, scales, at, x, x_at, head_dim):
        for i in range(0, head_dim, LANES):
            store_first(stored, at + i, load(x, x_at + i), head_dim - i)

    def as_bfloat16(stored, scales, at, x, x_at, head_dim):
        for i in range(0, head_dim, LANES):
            store_bfloat16_first(stored, at + i, load(x, x_at + i), head_dim - i)

    def as_int8(stored, scales, at, x, x_at, head_dim):
        for i in range(0, head_dim, KV_GROUP):
            largest, not_numbers = constant(0), constant(0)
            for j in range(i, i + KV_GROUP, LANES):
                v = load(x, x_at + j)
                largest, not_numbers = larger(absolute(v), largest), fma(v, constant(0), not_numbers)
            scale = max(max_lanes(largest) / np.float32(127), np.float32(1e-5))
            for j in range(i, i + KV_GROUP, LANES):
                store_int8(stored, at + j, load(x, x_at + j) / splat(scale))
            scales[(at + i) // KV_GROUP] = scale + sum_lanes(not_numbers)  # a NaN if there is one: int8 has none
    return {types.float32: as_float32, types.uint16: as_bfloat16, types.int8: as_int8}[stored.dtype]


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
def rotate_queries(memory, sizes, heads):
    """Turn the queries of heads = (from, to) to their positions, and in Q_SINKS to where the sinks see them."""
    head_dim, half, q_p = sizes[HEAD_DIM], sizes[HEAD_DIM] // 2, sizes[N_HEAD] * padded(sizes[HEAD_DIM], LANES)
    q, q_sinks, angles = (floats_at(memory[layout.Q]), floats_at(memory[layout.Q_SINKS]),
                          floats_at(memory[layout.ANGLES]))
    for row in range(sizes[layout.N_ROWS]):
        for head in range(heads[0], heads[1]):
            at, angle_at = row * q_p + head * padded(head_dim, LANES), row * 4 * half
            if sizes[layout.N_SINK]:
                rotate(q, at, angles, angle_at + 2 * half, half, q_sinks, at)
            rotate(q, at, angles, angle_at, half, q, at)


@njit
def write_keys_values(memory, sizes, kv_heads, stored, scratch):
    """Store the new keys and values of kv_heads = (from, to) of all rows, keys turned to their positions."""
    head_dim, head_p = sizes[HEAD_DIM], padded(sizes[HEAD_DIM], LANES)
    new, angles = floats_at(memory[layout.KV]), floats_at(memory[layout.ANGLES])
    offsets = longs_at(memory[layout.OFFSETS])
    for row in range(sizes[layout.N_ROWS]):
        slot_at = offsets[own_entry(memory, row)]
        for head in range(kv_heads[0], kv_heads[1]):
            k_at, at = (row * sizes[N_KV_HEAD] + head) * 2 * head_p, slot_at + head * sizes[HEAD_STRIDE]
            if sizes[layout.POSITION] == layout.ROPE:
                rotate(new, k_at, angles, row * 2 * head_dim, head_dim // 2, scratch.head, 0)
                store_head(stored.k, stored.k_scale, at, scratch.head, 0, head_dim)
            else:
                store_head(stored.k, stored.k_scale, at, new, k_at, head_dim)
            store_head(stored.v, stored.v_scale, at, new, k_at + head_p, head_dim)


@njit
def attention(memory, sizes, heads, stored, n_queries, every, scratch):
    """
    Attend with the queries of heads = (from, to): those of all rows if `every`, otherwise of the first n_queries rows
    of WANTED. y: one row for each, in the same order.
    """
    wanted, positions = longs_at(memory[layout.WANTED]), longs_at(memory[layout.POSITIONS])
    of_row = longs_at(memory[layout.SEQ_OF_ROW])
    group, n_sink, window = sizes[N_HEAD] // sizes[N_KV_HEAD], sizes[layout.N_SINK], sizes[layout.WINDOW]
    sequences = longs_at(memory[layout.SEQUENCES])
    for i in range(n_queries):
        row = i if every else wanted[i]
        position = positions[row]
        # the keys that are seen, as entries of OFFSETS: the sinks, and the last ones up to the row's own position
        n_sinks = min(n_sink, position + 1)
        n_last = position + 1 - n_sinks if window == 0 else min(window, position + 1 - n_sinks)
        a, end = sequences[of_row[row] * layout.N_SEQUENCE_COLUMNS + layout.FIRST_OFFSET], own_entry(memory, row) + 1
        seen = Seen(a, a + n_sinks, end - n_last, end, min(position, n_sink + window - 1) if n_sink else position)
        for kv_head in range(heads[0] // group, (heads[1] + group - 1) // group):
            of_group = max(heads[0], kv_head * group), min(heads[1], kv_head * group + group)
            attend(memory, sizes, stored, row, kv_head, of_group, seen, scratch.scores, i)


@njit
def attend(memory, sizes, stored, row, kv_head, heads, seen, scores, y_row):
    """The queries of one row for one head of keys and values: softmax(q k / sqrt(head_dim) + bias) v."""
    head_dim, head_p = sizes[HEAD_DIM], padded(sizes[HEAD_DIM], LANES)
    q, q_at = floats_at(memory[layout.Q]), (row * sizes[N_HEAD] + heads[0]) * head_p
    q_sinks = floats_at(memory[layout.Q_SINKS]) if sizes[layout.POSITION] == layout.ROPE else q
    slots = Slots(longs_at(memory[layout.OFFSETS]), longs_at(memory[layout.SIDE_BY_SIDE]), sizes[layout.SLOT_STRIDE],
                  kv_head * sizes[HEAD_STRIDE])
    n_sinks, n_heads = seen.sinks_end - seen.sinks, heads[1] - heads[0]
    n_keys = n_sinks + seen.last_end - seen.last
    stride, slopes = padded(n_keys, LANES) + LANES, floats_at(memory[layout.SLOPES] + 4 * heads[0])
    if n_sinks:
        score(q_sinks, q_at, n_heads, head_dim, stored, slots, seen.sinks, seen.sinks_end, -seen.sink_position, slopes,
              scores, 0, stride)
    score(q, q_at, n_heads, head_dim, stored, slots, seen.last, seen.last_end, 1 + seen.last - seen.last_end, slopes,
          scores, n_sinks, stride)
    y, y_at = floats_at(memory[layout.Y]), y_row * padded(sizes[layout.N_EMBD], GROUP) + heads[0] * head_dim
    for h in range(n_heads):
        norm = splat(softmax(scores, h * stride, n_keys))
        i = 0
        while i + 2 * LANES <= head_dim:
            weigh_two(stored, slots, i, 2 * LANES, seen, scores, h * stride, norm, y, y_at + h * head_dim + i)
            i += 2 * LANES
        while i < head_dim:
            n = min(LANES, head_dim - i)
            weigh_one(stored, slots, i, n, seen, scores, h * stride, norm, y, y_at + h * head_dim + i)
            i += LANES


@njit
def score(q, q_at, n_heads, head_dim, stored, slots, key, end, offset, slopes, scores, to, stride):
    """
    scores[to + h * stride + i], for the n_heads queries at q_at and keys number key + i, up to end - 1. offset: the
    first key's position minus the query's, at most 0. A score has the same bits whichever keys are computed with it.
    """
    scale, head_p = splat(np.float32(1 / math.sqrt(head_dim))), padded(head_dim, LANES)
    if head_dim % LANES == 0:
        while key + LANES <= end:  # the scores of LANES keys, one in each lane
            first = slots.offsets[key] + slots.head
            for h in range(n_heads):
                sums, at = zeros(LANES, 1), q_at + h * head_p
                if slots.side_by_side[key] >= LANES:
                    for i in range(0, head_dim, LANES):
                        sums = dot_rows(sums, stored.k, stored.k_scale, first + i, slots.stride, load(q, at + i))
                else:
                    for i in range(0, head_dim, LANES):
                        sums = dot_rows_at(
                            sums, stored.k, stored.k_scale, slots.head + i, slots.offsets, key, load(q, at + i))
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
    @njit
    def weigh(stored, slots, i, n, seen, weights, w, norm, out, out_at):
        """
        out[: n] = norm * the sum of numbers i to i + n - 1 of the values that are seen, times their weights, from w on.
        Sinks are added one after the other, then eight keys at a time to eight sums, then what is left.
        """
        v, scales, sums, at = stored.v, stored.v_scale, zeros(n_vectors, 1), slots.head + i
        for key in range(seen.sinks, seen.sinks_end):
            sums = add_row(sums, v, scales, slots.offsets[key] + at, n, weights[w])
            w += 1
        key = seen.last
        if n == n_vectors * LANES:
            eights = zeros(8, n_vectors)
            while key + 8 <= seen.last_end:
                if slots.side_by_side[key] >= 8:
                    eights = add_rows(eights, v, scales, slots.offsets[key] + at, slots.stride, weights, w)
                else:
                    eights = add_rows_at(eights, v, scales, at, slots.offsets, key, weights, w)
                key, w = key + 8, w + 8
            sums = add_totals(sums, eights)
        while key < seen.last_end:
            sums = add_row(sums, v, scales, slots.offsets[key] + at, n, weights[w])
            key, w = key + 1, w + 1
        store_row(out, out_at, sums, norm, n)
    return weigh


# with two vectors at a time each weight is read once for both
weigh_one, weigh_two = weigher(1), weigher(2)
