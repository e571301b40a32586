"""
Tiles of attention: the scores, and the weighted values, of several queries at once, for the rows of a prompt.

One query alone waits for memory: each number of a key or value is read for one multiplication. A tile reads it once for
all of its queries. The keys are transposed: a vector has one channel of LANES keys, so no sum is taken across lanes.
Each sum is added up in the order that attention.py has for a single query, so it has the same bits. A score has LANES
chains over every LANES-th channel, folded in halves; values have eight chains over every eighth key, added as a tree.
"""
from llvmlite import ir
from numba import types
from numba.core import cgutils

from decode.kernel import emit
from decode.kernel.emit import FLOATS, I64, INTS, LANES, address, broadcast, instruction, same
from decode.kernel.layout import EIGHT
from decode.kernel.vectors import floats

N_SCORED = 4            # queries of a tile of scores: the sums that wait to be folded fit the registers
N_WEIGHED = LANES // 2  # queries of a tile of weighted values, of two vectors each: their sums fill half the registers


@instruction(types.void)
def store_transposed(builder, rows, array, i, stride):
    """Store channel c of LANES rows, one vector of each, to array[i + c * stride : + LANES]."""
    for _ in range(LANES.bit_length() - 1):  # to interleave the two halves is to turn one bit of all indices
        mixed = []
        for a, b in zip(rows[:LANES // 2], rows[LANES // 2:]):
            for start in (0, LANES // 2):
                lanes = [start + lane // 2 + lane % 2 * LANES for lane in range(LANES)]
                mixed.append(builder.shuffle_vector(a, b, ir.Constant(INTS, lanes)))
        rows = mixed
    for c, v in enumerate(rows):
        at = builder.add(i, builder.mul(I64(c), stride))
        builder.store(v, address(builder, array, at, FLOATS)).align = 4


def places(builder, i, rows, stride):
    return [builder.add(i, builder.mul(row, stride)) for row in rows]


def broadcast_at(builder, array, i):
    return broadcast(builder, emit.load(builder, address(builder, array, i)))


@instruction(types.void)
def score_tile(builder, q, q_at, q_stride, n, keys, keys_at, n_chain, scores, to, stride):
    """
    scores[to + r * stride + j] = query r . key j, for n queries, N_SCORED at most, and LANES keys. Query r is at
    q[q_at + r * q_stride], n_chain vectors. Channel c * LANES + lane of the keys is vector lane * n_chain + c of
    keys[keys_at:].
    """
    rows = emit.numbers_from(builder, I64(0), N_SCORED, builder.sub(n, I64(1)))
    q_rows = places(builder, q_at, rows, q_stride)

    def chain(lane):
        sums = [cgutils.alloca_once_value(builder, same(0.0, FLOATS)) for _ in rows]
        with cgutils.for_range(builder, n_chain) as loop:
            number = builder.add(builder.mul(n_chain, I64(lane)), loop.index)
            at = builder.add(keys_at, builder.mul(number, I64(LANES)))
            k = emit.load(builder, address(builder, keys, at, FLOATS))
            channel = builder.add(builder.mul(loop.index, I64(LANES)), I64(lane))
            for s, row in zip(sums, q_rows):
                x = broadcast_at(builder, q, builder.add(row, channel))
                builder.store(emit.fma(builder, k, x, builder.load(s)), s)
        return [builder.load(s) for s in sums]

    def fold(lane, step):
        """The sums of the chains lane, lane + step, ..., in the order of `sum_lanes`"""
        if step == LANES:
            return chain(lane)
        return [builder.fadd(a, b) for a, b in zip(fold(lane, 2 * step), fold(lane + step, 2 * step))]

    for v, at in zip(fold(0, 1), places(builder, to, rows, stride)):
        builder.store(v, address(builder, scores, at, FLOATS)).align = 4


@instruction(types.void)
def weigh_tile(builder, values, at, value_stride, n_values, weights, w, w_stride, n, sums, to):
    """
    One of the eight chains of weighted values, of n rows, N_WEIGHED at most: for row r and m in 0, 1, the sum of
    values[at + i * value_stride + m * LANES : + LANES] * weights[w + r * w_stride + EIGHT * i] over i < n_values goes
    to sums[to + (2 * r + m) * EIGHT * LANES].
    """
    rows = places(builder, w, emit.numbers_from(builder, I64(0), N_WEIGHED, builder.sub(n, I64(1))), w_stride)
    totals = [[cgutils.alloca_once_value(builder, same(0.0, FLOATS)) for _ in range(2)] for _ in rows]
    with cgutils.for_range(builder, n_values) as loop:
        first = builder.add(at, builder.mul(loop.index, value_stride))
        pair = [emit.load(builder, address(builder, values, builder.add(first, I64(m * LANES)), FLOATS))
                for m in range(2)]
        for row, of_row in zip(rows, totals):
            p = broadcast_at(builder, weights, builder.add(row, builder.mul(loop.index, I64(EIGHT))))
            for v, s in zip(pair, of_row):
                builder.store(emit.fma(builder, v, p, builder.load(s)), s)
    for number, s in enumerate(s for of_row in totals for s in of_row):
        place = builder.add(to, I64(number * EIGHT * LANES))
        builder.store(builder.load(s), address(builder, sums, place, FLOATS)).align = 4


@instruction(floats)
def sum_of_eight(builder, sums, at):
    """The sum of the eight vectors at sums[at], as a tree of neighbours"""
    places = [address(builder, sums, builder.add(at, I64(r * LANES)), FLOATS) for r in range(EIGHT)]
    return emit.tree_sum(builder, [emit.load(builder, place) for place in places])
