"""
Tiles for numba: n vectors in n registers, each the sum of one row of inputs. To numba a tile is a tuple of `Floats`.

Each function here unrolls its loops over the tile while it emits code, so LLVM sees a straight line of instructions.
"""
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from decode.vectors import (
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
    features,
    floats,
    ints,
    same,
)

PREFETCH_ROWS = 3  # tiles of so many rows and more prefetch the weights
# does the processor have one instruction for int8 x int8 with int32 sums?
DOT_PRODUCTS = LANES == 16 and bool(features.get('avx512vnni'))
INPUTS_PER_VECTOR = {types.float32: 1, types.uint16: 2, types.int8: 4}  # of packed weights, by their type


@intrinsic(prefer_literal=True)
def zeros(typing, n_rows, n):
    """A tile of zeros: n vectors for each of n_rows rows"""
    result = types.UniTuple(floats, n_rows.literal_value * n.literal_value)

    def emit(context, builder, sig, args):
        return context.make_tuple(builder, sig.return_type, [same(0.0, FLOATS)] * result.count)
    return result(n_rows, n), emit


@intrinsic(prefer_literal=True)
def load_ints(typing, n_rows, n, array, i):
    """A tile of int32: for each of n_rows rows the n vectors of 128 * array[i : i + n * LANES], of int16"""
    result = types.UniTuple(ints, n_rows.literal_value * n.literal_value)

    def emit(context, builder, sig, args):
        row = []
        for p in range(n.literal_value):
            at = address(builder, args[2], builder.add(args[3], I64(p * LANES)), ir.VectorType(I16, LANES))
            row.append(builder.shl(builder.sext(emit_load(builder, at, 2), INTS), same(7, INTS)))
        return context.make_tuple(builder, sig.return_type, row * n_rows.literal_value)
    return result(n_rows, n, array, types.int64), emit


@intrinsic
def inputs_per_vector(typing, w):
    """The number of inputs that a vector of packed weights w covers: 1, 2 or 4, by their type"""
    def emit(context, builder, sig, args):
        return I64(INPUTS_PER_VECTOR[w.dtype])
    return types.int64(w), emit


def at_multiple(builder, i, n, stride):
    """The index i + n * stride"""
    return builder.add(i, builder.mul(stride, I64(n)))


@intrinsic(prefer_literal=True)
def multiply_tile(typing, sums, w, i, x, j, stride, n_rows, ahead):
    """
    One step of w @ x: multiply n vectors of packed weights, one of each of n panels, with n_rows rows of x, and add the
    products to `sums`, those of the first input first.

    sums: n_rows * n vectors, row by row, each LANES outputs of one row. w at i: n vectors of packed weights (see
    linears.py), each LANES outputs x 1 (float32), 2 (bfloat16 in uint16) or 4 (int8) inputs. x at j + r * stride:
    row r, float32, or uint8 for int8 weights. In tiles of PREFETCH_ROWS rows and more, the cache lines of two vectors
    at `ahead` are prefetched.
    """
    n_rows_, n = n_rows.literal_value, sums.count // n_rows.literal_value
    per_vector = INPUTS_PER_VECTOR[w.dtype]

    def emit(context, builder, sig, args):
        sums, w, i, x, j, stride, _, ahead = args
        sums = cgutils.unpack_tuple(builder, sums)

        def prefetch(v):
            p = address(builder, w, builder.add(ahead, I64(v * per_vector * LANES)), I8)
            call(builder, 'llvm.prefetch.p0', ir.VoidType(), p, I32(0), I32(2), I32(1))  # read, level 2, data

        def weights(p):
            """The vectors of panel p, one for each input (int8: for four)"""
            at = builder.add(i, I64(p * per_vector * LANES))
            v = emit_load(builder, address(builder, w, at, FLOATS if per_vector == 1 else INTS))
            if per_vector == 2:  # a bfloat16 is the upper half of a float32
                halves = builder.shl(v, same(16, INTS)), builder.and_(v, same(-65536, INTS))
                return [builder.bitcast(half, FLOATS) for half in halves]
            return [v]

        def inputs(r):
            row = at_multiple(builder, j, r, stride)
            at = [address(builder, x, builder.add(row, I64(k)), I32 if per_vector == 4 else F32)
                  for k in range(2 if per_vector == 2 else 1)]
            return [broadcast(builder, emit_load(builder, p)) for p in at]

        def add(s, xs, ws):
            for xk, wk in zip(xs, ws):
                sums[s] = (dot_bytes(builder, sums[s], xk, wk) if per_vector == 4 else
                           emit_fma(builder, wk, xk, sums[s]))

        if n_rows_ >= PREFETCH_ROWS:
            for v in range(0, 2, 16 // LANES):
                prefetch(v)
        if n_rows_ < n:  # what there is less of is loaded first, and kept in registers
            rows = [inputs(r) for r in range(n_rows_)]
            for p in range(n):
                wp = weights(p)
                for r in range(n_rows_):
                    add(r * n + p, rows[r], wp)
        else:
            panels = [weights(p) for p in range(n)]
            for r in range(n_rows_):
                xr = inputs(r)
                for p in range(n):
                    add(r * n + p, xr, panels[p])
        return context.make_tuple(builder, sig.return_type, sums)
    return sums(sums, w, types.int64, x, types.int64, types.int64, n_rows, types.int64), emit


def dot_bytes(builder, sums, x, w):
    """sums + the dot products of four uint8 of x with four int8 of w, lane by lane (x and w as int32)."""
    if DOT_PRODUCTS:
        return call(builder, 'llvm.x86.avx512.vpdpbusd.512', INTS, sums, x, w)
    for byte in range(4):
        up = same(24 - 8 * byte, INTS)
        x_byte = builder.lshr(builder.shl(x, up), same(24, INTS))
        w_byte = builder.ashr(builder.shl(w, up), same(24, INTS))
        sums = builder.add(sums, builder.mul(x_byte, w_byte))
    return sums


@intrinsic
def store_tile(typing, sums, array, i):
    """The vectors of a tile, one after the other from array[i] on"""
    def emit(context, builder, sig, args):
        sums, array, i = args
        for v, vector in enumerate(cgutils.unpack_tuple(builder, sums)):
            builder.store(vector, address(builder, array, builder.add(i, I64(v * LANES)), FLOATS)).align = 4
        return context.get_dummy_value()
    return types.void(sums, array, types.int64), emit


@intrinsic(prefer_literal=True)
def scale_tile(typing, totals, sums, scale, i, stride, n_rows):
    """totals + the int32 sums * scale[i + r * stride], for each row r"""
    n = sums.count // n_rows.literal_value

    def emit(context, builder, sig, args):
        totals, sums, scale, i, stride, _ = args
        totals, sums = cgutils.unpack_tuple(builder, totals), cgutils.unpack_tuple(builder, sums)
        for r in range(n_rows.literal_value):
            v = broadcast(builder, emit_load(builder, address(builder, scale, at_multiple(builder, i, r, stride))))
            for s in range(r * n, r * n + n):
                totals[s] = emit_fma(builder, builder.sitofp(sums[s], FLOATS), v, totals[s])
        return context.make_tuple(builder, sig.return_type, totals)
    return totals(totals, sums, scale, types.int64, types.int64, n_rows), emit


@intrinsic
def total(typing, sums):
    """The vectors of a tile, added up"""
    def emit(context, builder, sig, args):
        return emit_sum(builder, cgutils.unpack_tuple(builder, args[0]), builder.fadd)
    return floats(sums), emit


@intrinsic
def sum_each(typing, sums):
    """LANES vectors -> one, whose lane r is the sum of the lanes of vector r"""
    def emit(context, builder, sig, args):
        values, width = cgutils.unpack_tuple(builder, args[0]), LANES
        while width > 1:  # fold the lanes of two vectors into one, until one vector is left
            half, width = len(values) // 2, width // 2
            # lanes of a and of b in turns
            starts = [s + source for s in range(0, LANES, 2 * width) for source in (0, LANES)]
            low = ir.Constant(INTS, [s + k for s in starts for k in range(width)])
            high = ir.Constant(INTS, [s + k + width for s in starts for k in range(width)])
            values = [builder.fadd(builder.shuffle_vector(a, b, low), builder.shuffle_vector(a, b, high))
                      for a, b in zip(values[:half], values[half:])]
        return values[0]
    return floats(sums), emit
