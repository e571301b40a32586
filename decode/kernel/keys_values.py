"""
Vectors of stored keys and values for numba, of float32, bfloat16 (as uint16) and int8, always float32 in registers.

An int8 number is code * scale; KV_GROUP numbers share a scale, whose index follows from that of the number. Numbers are
rounded as kvcache/storage.py rounds them. A tile of vectors is a tuple, see tiles.py.
"""
from llvmlite import ir
from numba import types

from decode.kernel.layout import KV_GROUP
from decode.kernel.vectors import (
    F32,
    FLOATS,
    I8,
    I16,
    I64,
    INTS,
    LANES,
    address,
    broadcast,
    bytes_of,
    emit_fma,
    emit_load,
    emit_load_first,
    emit_store_first,
    emit_sum,
    floats,
    instruction,
    same,
)

SHIFT = KV_GROUP.bit_length() - 1


def to_floats(builder, codes, scales, i):
    """Stored numbers as float32: those of int8 times the scale of number i."""
    if codes.type.element == I16:
        return builder.bitcast(builder.shl(builder.zext(codes, INTS), same(16, INTS)), FLOATS)
    if codes.type.element == I8:
        scale = emit_load(builder, address(builder, scales, builder.lshr(i, I64(SHIFT))))
        return builder.fmul(builder.sitofp(builder.sext(codes, INTS), FLOATS), broadcast(builder, scale))
    return codes


def emit_load_stored(builder, array, scales, i):
    vector = ir.VectorType(array.type.pointee, LANES)
    codes = emit_load(builder, address(builder, array, i, vector), bytes_of(vector.element))
    return to_floats(builder, codes, scales, i)


def emit_load_stored_first(builder, array, scales, i, n):
    return to_floats(builder, emit_load_first(builder, array, i, n), scales, i)


@instruction(floats)
def load_stored_first(builder, array, scales, i, n):
    """The first n of array[i : i + LANES], and zero in the other lanes; nothing beyond them is touched."""
    return emit_load_stored_first(builder, array, scales, i, n)


@instruction(types.void)
def store_stored_first(builder, array, i, v, n):
    """array[i : i + n] = the first n lanes of v, as float32 or bfloat16 (rounded to the nearest, half to even)"""
    if array.type.pointee != F32:
        bits = builder.bitcast(v, INTS)
        odd = builder.and_(builder.lshr(bits, same(16, INTS)), same(1, INTS))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, same(0x7fff, INTS))), same(16, INTS))
        # rounding may carry a NaN over to infinity
        rounded = builder.select(builder.fcmp_unordered('uno', v, v), same(0x7fc0, INTS), rounded)
        v = builder.trunc(rounded, ir.VectorType(I16, LANES))
    emit_store_first(builder, array, i, v, n)


@instruction(types.boolean)
def has_scales(builder, array):
    """Are these stored numbers int8? Compiled code has only the branch for its type."""
    return ir.Constant(ir.IntType(1), array.type.pointee == I8)


def positions_of_rows(n):
    """Two functions that give the positions of n rows, for `dot_rows` and `add_rows`."""
    positions = types.UniTuple(types.int64, n)

    @instruction(positions)
    def apart(builder, i, stride):
        """Rows from i on, `stride` apart"""
        return [builder.add(i, builder.mul(stride, I64(r))) for r in range(n)]

    @instruction(positions)
    def listed(builder, i, offsets, key):
        """Rows at i + offsets[key], i + offsets[key + 1], ..."""
        return [builder.add(i, emit_load(builder, address(builder, offsets, builder.add(key, I64(r))), 8))
                for r in range(n)]
    return apart, listed


@instruction()
def dot_rows(builder, sums, array, scales, at, v):
    """sums[r] + array[at[r] : + LANES] * v, for each row r"""
    rows = [emit_load_stored(builder, array, scales, i) for i in at]
    return [emit_fma(builder, row, v, s) for row, s in zip(rows, sums)]


@instruction()
def add_rows(builder, sums, array, scales, at, p, j):
    """sums[8 * n + r] + array[at[r] + n * LANES : + LANES] * p[j + r], for each of eight rows r and each n"""
    weights = [broadcast(builder, emit_load(builder, address(builder, p, builder.add(j, I64(r))))) for r in range(8)]
    for s in range(len(sums)):
        i = builder.add(at[s % 8], I64(s // 8 * LANES))
        row = emit_load_stored(builder, array, scales, i)
        sums[s] = emit_fma(builder, row, weights[s % 8], sums[s])
    return sums


@instruction()
def add_totals(builder, sums, eights):
    """sums[m] + the sum of the eight vectors 8 * m to 8 * m + 7 of eights, for each m"""
    return [builder.fadd(s, emit_sum(builder, eights[8 * m:8 * m + 8])) for m, s in enumerate(sums)]


@instruction()
def add_row(builder, sums, array, scales, i, n, p):
    """sums + array[i : i + n] * p; sums: the vectors that n numbers fill, the last of them perhaps in part"""
    weight = broadcast(builder, p)
    for m in range(len(sums)):
        before = I64(m * LANES)
        row = emit_load_stored_first(builder, array, scales, builder.add(i, before), builder.sub(n, before))
        sums[m] = emit_fma(builder, row, weight, sums[m])
    return sums


@instruction(types.void)
def store_row(builder, array, i, sums, factor, n):
    """array[i : i + n] = sums * factor"""
    for m, v in enumerate(sums):
        before = I64(m * LANES)
        emit_store_first(builder, array, builder.add(i, before), builder.fmul(v, factor), builder.sub(n, before))
