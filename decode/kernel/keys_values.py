"""
Vectors of stored keys and values for numba, of float32, bfloat16 (as uint16) and int8, always float32 in registers.

An int8 number is code * scale; KV_GROUP numbers share a scale, whose index follows from that of the number. Numbers are
rounded as kvcache/storage.py rounds them.
"""
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from decode.kernel.layout import KV_GROUP
from decode.kernel.vectors import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    address,
    broadcast,
    call,
    emit_fma,
    emit_load,
    emit_sum,
    first_lanes,
    floats,
    same,
    to_ints,
)

STORED = {types.float32: F32, types.uint16: I16, types.int8: I8}
SHIFT = KV_GROUP.bit_length() - 1


def widened(builder, kind, codes, scales, i):
    """Stored numbers as float32: those of int8 times the scale of number i."""
    if kind == types.float32:
        return codes
    if kind == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(codes, INTS), same(16, INTS)), FLOATS)
    scale = emit_load(builder, address(builder, scales, builder.lshr(i, I64(SHIFT))))
    return builder.fmul(builder.sitofp(builder.sext(codes, INTS), FLOATS), broadcast(builder, scale))


def emit_load_stored(builder, array_type, array, scales, i):
    kind = array_type.dtype
    codes = emit_load(builder, address(builder, array, i, ir.VectorType(STORED[kind], LANES)), kind.bitwidth // 8)
    return widened(builder, kind, codes, scales, i)


def emit_load_stored_first(builder, array_type, array, scales, i, n):
    """The first n of array[i : i + LANES], and zero in the other lanes; nothing beyond them is touched."""
    kind, vector = array_type.dtype, ir.VectorType(STORED[array_type.dtype], LANES)
    letter = {types.float32: 'f32', types.uint16: 'i16', types.int8: 'i8'}[kind]
    zeros = ir.Constant(vector, [0.0 if kind == types.float32 else 0] * LANES)
    codes = call(builder, f'llvm.masked.load.v{LANES}{letter}.p0', vector, address(builder, array, i, vector),
                 I32(kind.bitwidth // 8), first_lanes(builder, n), zeros)
    return widened(builder, kind, codes, scales, i)


@intrinsic
def load_stored_first(typing, array, scales, i, n):
    """The first n of array[i : i + LANES], and zero in the other lanes; nothing beyond them is touched."""
    def emit(context, builder, sig, args):
        return emit_load_stored_first(builder, sig.args[0], *args)
    return floats(array, scales, types.int64, types.int64), emit


def _emit_dots(builder, array_type, array, scales, sums, v, at):
    """sums[r] + array[at[r] : + LANES] * v, for each r"""
    rows = [emit_load_stored(builder, array_type, array, scales, i) for i in at]
    return [emit_fma(builder, row, v, s) for row, s in zip(rows, sums)]


@intrinsic(prefer_literal=True)
def dot_rows(typing, sums, array, scales, i, stride, v):
    """sums[r] + array[i + r * stride : + LANES] * v, for each r"""
    def emit(context, builder, sig, args):
        sums, array, scales, i, stride, v = args
        sums = cgutils.unpack_tuple(builder, sums)
        at = [builder.add(i, builder.mul(stride, I64(r))) for r in range(len(sums))]
        sums = _emit_dots(builder, sig.args[1], array, scales, sums, v, at)
        return context.make_tuple(builder, sig.return_type, sums)
    return sums(sums, array, scales, types.int64, types.int64, floats), emit


@intrinsic(prefer_literal=True)
def dot_rows_at(typing, sums, array, scales, i, offsets, key, v):
    """sums[r] + array[i + offsets[key + r] : + LANES] * v, for each r"""
    def emit(context, builder, sig, args):
        sums, array, scales, i, offsets, key, v = args
        sums = cgutils.unpack_tuple(builder, sums)
        at = _gathered(builder, i, offsets, key, len(sums))
        sums = _emit_dots(builder, sig.args[1], array, scales, sums, v, at)
        return context.make_tuple(builder, sig.return_type, sums)
    return sums(sums, array, scales, types.int64, offsets, types.int64, floats), emit


def _gathered(builder, i, offsets, key, n):
    return [builder.add(i, emit_load(builder, address(builder, offsets, builder.add(key, I64(r))), 8))
            for r in range(n)]


def _emit_add(builder, array_type, array, scales, sums, at, p, j):
    """Add n vectors of each of eight rows, at `at`, times p[j + r] to sums: eight for the first vector, and so on."""
    weights = [broadcast(builder, emit_load(builder, address(builder, p, builder.add(j, I64(r))))) for r in range(8)]
    for s in range(len(sums)):
        i = builder.add(at[s % 8], I64(s // 8 * LANES))
        row = emit_load_stored(builder, array_type, array, scales, i)
        sums[s] = emit_fma(builder, row, weights[s % 8], sums[s])
    return sums


@intrinsic(prefer_literal=True)
def add_rows(typing, sums, array, scales, i, stride, p, j):
    """
    sums[8 * n + r] + array[i + r * stride + n * LANES : + LANES] * p[j + r], for each of eight rows r and each n
    """
    def emit(context, builder, sig, args):
        sums, array, scales, i, stride, p, j = args
        at = [builder.add(i, builder.mul(stride, I64(r))) for r in range(8)]
        sums = _emit_add(builder, sig.args[1], array, scales, cgutils.unpack_tuple(builder, sums), at, p, j)
        return context.make_tuple(builder, sig.return_type, sums)
    return sums(sums, array, scales, types.int64, types.int64, p, types.int64), emit


@intrinsic(prefer_literal=True)
def add_rows_at(typing, sums, array, scales, i, offsets, key, p, j):
    """The same of the rows at i + offsets[key + r]."""
    def emit(context, builder, sig, args):
        sums, array, scales, i, offsets, key, p, j = args
        at = _gathered(builder, i, offsets, key, 8)
        sums = _emit_add(builder, sig.args[1], array, scales, cgutils.unpack_tuple(builder, sums), at, p, j)
        return context.make_tuple(builder, sig.return_type, sums)
    return sums(sums, array, scales, types.int64, offsets, types.int64, p, types.int64), emit


@intrinsic
def add_totals(typing, sums, eights):
    """sums[m] + the sum of the eight vectors 8 * m to 8 * m + 7 of eights, for each m"""
    def emit(context, builder, sig, args):
        sums, eights = (cgutils.unpack_tuple(builder, tile) for tile in args)
        totals = [builder.fadd(s, emit_sum(builder, eights[8 * m:8 * m + 8], builder.fadd))
                  for m, s in enumerate(sums)]
        return context.make_tuple(builder, sig.return_type, totals)
    return sums(sums, eights), emit


@intrinsic
def add_row(typing, sums, array, scales, i, n, p):
    """sums + array[i : i + n] * p; sums: the vectors that n numbers fill, the last of them perhaps in part"""
    def emit(context, builder, sig, args):
        sums, array, scales, i, n, p = args
        weight, sums = broadcast(builder, p), cgutils.unpack_tuple(builder, sums)
        for m in range(len(sums)):
            before = I64(m * LANES)
            row = emit_load_stored_first(builder, sig.args[1], array, scales, builder.add(i, before),
                                         builder.sub(n, before))
            sums[m] = emit_fma(builder, row, weight, sums[m])
        return context.make_tuple(builder, sig.return_type, sums)
    return sums(sums, array, scales, types.int64, types.int64, types.float32), emit


@intrinsic
def store_row(typing, array, i, sums, factor, n):
    """array[i : i + n] = sums * factor"""
    def emit(context, builder, sig, args):
        array, i, sums, factor, n = args
        for m, v in enumerate(cgutils.unpack_tuple(builder, sums)):
            before = I64(m * LANES)
            mask = first_lanes(builder, builder.sub(n, before))
            call(builder, f'llvm.masked.store.v{LANES}f32.p0', ir.VoidType(), builder.fmul(v, factor),
                 address(builder, array, builder.add(i, before), FLOATS), I32(4), mask)
        return context.get_dummy_value()
    return types.void(array, types.int64, sums, floats, types.int64), emit


@intrinsic
def store_bfloat16_first(typing, array, i, v, n):
    """array[i : i + n] = the first n lanes of v as bfloat16, rounded to the nearest, half to even"""
    def emit(context, builder, sig, args):
        array, i, v, n = args
        bits = builder.bitcast(v, INTS)
        odd = builder.and_(builder.lshr(bits, same(16, INTS)), same(1, INTS))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, same(0x7fff, INTS))), same(16, INTS))
        # rounding may carry a NaN over to infinity
        rounded = builder.select(builder.fcmp_unordered('uno', v, v), same(0x7fc0, INTS), rounded)
        vector = ir.VectorType(I16, LANES)
        call(builder, f'llvm.masked.store.v{LANES}i16.p0', ir.VoidType(), builder.trunc(rounded, vector),
             address(builder, array, i, vector), I32(2), first_lanes(builder, n))
        return context.get_dummy_value()
    return types.void(array, types.int64, floats, types.int64), emit


@intrinsic
def store_int8(typing, array, i, v):
    """array[i : i + LANES] = v rounded to the nearest whole number, half to even, within +-127, as int8"""
    def emit(context, builder, sig, args):
        array, i, v = args
        v = call(builder, f'llvm.rint.v{LANES}f32', FLOATS, v)
        for name, bound in (('minnum', 127.0), ('maxnum', -127.0)):
            v = call(builder, f'llvm.{name}.v{LANES}f32', FLOATS, v, same(bound, FLOATS))
        small = builder.trunc(to_ints(builder, v), ir.VectorType(I8, LANES))
        builder.store(small, address(builder, array, i, small.type)).align = 1
        return context.get_dummy_value()
    return types.void(array, types.int64, floats), emit
