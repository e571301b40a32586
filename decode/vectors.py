"""
Vectors for numba: LANES float32 at a time, kept in registers.

numba compiles loops and leaves it to LLVM to find the vectors in them, which works for a dot product and not
for a tile of them. Here LLVM's vector instructions are named one by one instead, each a function that compiled
code can call: `load`, `fma`, `multiply_tile`. What they do, they do in IEEE arithmetic: a NaN goes in, a NaN
comes out. Positions in arrays are in elements, arrays are one-dimensional and contiguous, and nothing checks a bound.
"""
import operator

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

_features = llvm.get_host_cpu_features()
PREFETCH_ROWS = 4  # tiles of so many rows and more fetch the next weights ahead of time
LANES = 16 if _features.get('avx512f') else 8  # eight are one AVX register, or two of ARM's
DOT_PRODUCTS = LANES == 16 and bool(_features.get('avx512vnni'))  # int8 x int8 with int32 sums, in one instruction

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class Vector(types.Type):
    """numba's type of LANES values in a register."""

    def __init__(self, name, vector):
        super().__init__(name)
        self.vector = vector


class Floats(Vector):
    def __init__(self):
        super().__init__('Floats', FLOATS)


class Ints(Vector):
    def __init__(self):
        super().__init__('Ints', INTS)


floats, ints = Floats(), Ints()


@register_model(Floats)
@register_model(Ints)
class VectorModel(models.PrimitiveModel):
    def __init__(self, data_model_manager, fe_type):
        super().__init__(data_model_manager, fe_type, fe_type.vector)


# what an intrinsic emits, in pieces

def address(builder, pointer, index, as_type=None):
    p = builder.gep(pointer, [index])
    return builder.bitcast(p, as_type.as_pointer()) if as_type else p


def _read(builder, p, align=4):
    value = builder.load(p)
    value.align = align
    return value


def _same(value, vector):
    """A constant vector: `value` in all lanes."""
    return ir.Constant(vector, [value] * vector.count)


def _broadcast(builder, scalar):
    vector = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, scalar, I32(0)), undefined, _same(0, INTS))


def call(builder, name, result, *args, fastmath=()):
    signature = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args, fastmath=fastmath)


def _fma(builder, a, b, c):
    return call(builder, f'llvm.fma.v{LANES}f32', FLOATS, a, b, c)


def _to_ints(builder, v):
    return call(builder, f'llvm.fptosi.sat.v{LANES}i32.v{LANES}f32', INTS, v)  # where fptosi may do anything with a NaN, this gives 0


def _sum(builder, values, add):
    while len(values) > 1:  # as a tree: neighbours first, so that no sum waits for a long chain
        values = [add(a, b) for a, b in zip(values[::2], values[1::2])] + values[len(values) & ~1:]
    return values[0]


def _first_lanes(builder, n):
    """The mask of the first n lanes."""
    lanes = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
    return builder.icmp_signed('<', lanes, _broadcast(builder, n))


# memory

@intrinsic
def load(typing, array, i):
    """array[i : i + LANES]"""
    def emit(context, builder, sig, args):
        return _read(builder, address(builder, args[0], args[1], FLOATS))
    return floats(array, types.int64), emit


@intrinsic
def load_first(typing, array, i, n):
    """The first n of array[i : i + LANES], and zero in the other lanes; nothing beyond them is touched."""
    def emit(context, builder, sig, args):
        p = address(builder, args[0], args[1], FLOATS)
        return call(builder, f'llvm.masked.load.v{LANES}f32.p0', FLOATS, p, I32(4), _first_lanes(builder, args[2]), _same(0.0, FLOATS))
    return floats(array, types.int64, types.int64), emit


@intrinsic
def store(typing, array, i, v):
    """array[i : i + LANES] = v"""
    def emit(context, builder, sig, args):
        builder.store(args[2], address(builder, args[0], args[1], FLOATS)).align = 4
        return context.get_dummy_value()
    return types.void(array, types.int64, floats), emit


@intrinsic
def store_first(typing, array, i, v, n):
    """array[i : i + n] = the first n lanes of v"""
    def emit(context, builder, sig, args):
        p = address(builder, args[0], args[1], FLOATS)
        call(builder, f'llvm.masked.store.v{LANES}f32.p0', ir.VoidType(), args[2], p, I32(4), _first_lanes(builder, args[3]))
        return context.get_dummy_value()
    return types.void(array, types.int64, floats, types.int64), emit


@intrinsic
def store_bytes(typing, array, i, v):
    """array[i : i + LANES] = v rounded to the nearest whole number (half to even) plus 128, as uint8; v within +-127"""
    def emit(context, builder, sig, args):
        whole = _to_ints(builder, call(builder, f'llvm.rint.v{LANES}f32', FLOATS, args[2]))
        small = builder.trunc(builder.add(whole, _same(128, INTS)), ir.VectorType(I8, LANES))
        builder.store(small, address(builder, args[0], args[1], small.type)).align = 1
        return context.get_dummy_value()
    return types.void(array, types.int64, floats), emit


def _pointer_to(dtype):
    pointer = types.CPointer(dtype)

    @intrinsic
    def at(typing, address):
        """The pointer of an address"""
        def emit(context, builder, sig, args):
            return builder.inttoptr(args[0], context.get_value_type(pointer))
        return pointer(types.int64), emit
    return at


floats_at, shorts_at, ints_at, longs_at, bytes_at = (_pointer_to(t) for t in (types.float32, types.int16, types.int32, types.int64, types.uint8))


@intrinsic
def pointer_like(typing, array, address):
    """The pointer of an address to numbers of an array's type"""
    pointer = types.CPointer(array.dtype)

    def emit(context, builder, sig, args):
        return builder.inttoptr(args[1], context.get_value_type(pointer))
    return pointer(array, types.int64), emit


# arithmetic

@intrinsic
def splat(typing, x):
    """x in all lanes"""
    def emit(context, builder, sig, args):
        return _broadcast(builder, args[0])
    return floats(types.float32), emit


def _operator(python, emit_one):
    @intrinsic
    def apply(typing, a, b):
        def emit(context, builder, sig, args):
            return emit_one(builder, *args)
        return floats(floats, floats), emit

    @overload(python)
    def of_vectors(a, b):
        if isinstance(a, Floats) and isinstance(b, Floats):
            return lambda a, b: apply(a, b)


_operator(operator.add, lambda builder, a, b: builder.fadd(a, b))
_operator(operator.sub, lambda builder, a, b: builder.fsub(a, b))
_operator(operator.mul, lambda builder, a, b: builder.fmul(a, b))
_operator(operator.truediv, lambda builder, a, b: builder.fdiv(a, b))


@intrinsic
def fma(typing, a, b, c):
    """a * b + c, rounded once"""
    def emit(context, builder, sig, args):
        return _fma(builder, *args)
    return floats(floats, floats, floats), emit


@intrinsic
def larger(typing, a, b):
    """The larger in each lane; where either is NaN, b."""
    def emit(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered('>', *args), *args)
    return floats(floats, floats), emit


@intrinsic
def smaller(typing, a, b):
    """The smaller in each lane; where either is NaN, b."""
    def emit(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered('<', *args), *args)
    return floats(floats, floats), emit


@intrinsic
def absolute(typing, a):
    def emit(context, builder, sig, args):
        return call(builder, f'llvm.fabs.v{LANES}f32', FLOATS, args[0])
    return floats(floats), emit


@intrinsic
def first(typing, v, n):
    """v in the first n lanes, zero in the others"""
    def emit(context, builder, sig, args):
        return builder.select(_first_lanes(builder, args[1]), args[0], _same(0.0, FLOATS))
    return floats(floats, types.int64), emit


@intrinsic
def sum_lanes(typing, v):
    def emit(context, builder, sig, args):
        return call(builder, f'llvm.vector.reduce.fadd.v{LANES}f32', F32, F32(-0.0), args[0], fastmath=('reassoc',))  # in any order
    return types.float32(floats), emit


@intrinsic
def max_lanes(typing, v):
    """The largest lane; none may be NaN."""
    def emit(context, builder, sig, args):
        return call(builder, f'llvm.vector.reduce.fmax.v{LANES}f32', F32, args[0], fastmath=('nnan',))
    return types.float32(floats), emit


@intrinsic
def nearest(typing, v):
    """v rounded to whole numbers"""
    def emit(context, builder, sig, args):
        return call(builder, f'llvm.rint.v{LANES}f32', FLOATS, args[0])
    return floats(floats), emit


@intrinsic
def times_power_of_two(typing, v, n):
    """v * 2 ** n, for whole n in [-126, 127]"""
    def emit(context, builder, sig, args):
        power = builder.shl(builder.add(_to_ints(builder, args[1]), _same(127, INTS)), _same(23, INTS))  # the bits of the float 2 ** n
        return builder.fmul(args[0], builder.bitcast(power, FLOATS))
    return floats(floats, floats), emit


@njit
def constant(x):
    return splat(np.float32(x))


@njit
def exp(v):
    """e ** v to 2 units in the last place, for v <= 88; below -87 it stays at e ** -87 (Cephes' expf, S. Moshier)."""
    v = larger(constant(-87.0), v)
    n = nearest(v * constant(1.4426950408889634))
    r = fma(n, constant(-0.693359375), v)  # ln 2 in two parts, the first of them exact in few bits
    r = fma(n, constant(2.12194440e-4), r)
    p = fma(constant(1.9875691500e-4), r, constant(1.3981999507e-3))
    p = fma(p, r, constant(8.3334519073e-3))
    p = fma(p, r, constant(4.1665795894e-2))
    p = fma(p, r, constant(1.6666665459e-1))
    p = fma(p, r, constant(5.0000001201e-1))
    return times_power_of_two(fma(p, r * r, r) + constant(1.0), n)


@njit
def erf(v):
    """The error function to 2e-7, by a ratio of polynomials (the one of Eigen and XLA)."""
    v = larger(constant(-4.0), smaller(constant(4.0), v))
    s = v * v
    p = fma(constant(-2.72614225801306e-10), s, constant(2.77068142495902e-08))
    p = fma(p, s, constant(-2.10102402082508e-06))
    p = fma(p, s, constant(-5.69250639462346e-05))
    p = fma(p, s, constant(-7.34990630326855e-04))
    p = fma(p, s, constant(-2.95459980854025e-03))
    p = fma(p, s, constant(-1.60960333262415e-02))
    q = fma(constant(-1.45660718464996e-05), s, constant(-2.13374055278905e-04))
    q = fma(q, s, constant(-1.68282697438203e-03))
    q = fma(q, s, constant(-7.37332916720468e-03))
    q = fma(q, s, constant(-1.42647390514189e-02))
    return v * p / q


@njit
def gelu(v):
    """x Phi(x), exact (arXiv:1606.08415)"""
    half = v * constant(0.5)
    return fma(half, erf(v * constant(0.7071067811865476)), half)


# tiles: n sums in n registers, a tuple to numba. Python unrolls what LLVM is then given as a straight line

@intrinsic(prefer_literal=True)
def zeros(typing, n_rows, n):
    """A tile of zeros: n vectors for each of n_rows rows"""
    result = types.UniTuple(floats, n_rows.literal_value * n.literal_value)

    def emit(context, builder, sig, args):
        return context.make_tuple(builder, sig.return_type, [_same(0.0, FLOATS)] * result.count)
    return result(n_rows, n), emit


@intrinsic(prefer_literal=True)
def load_ints(typing, n_rows, n, array, i):
    """A tile of int32: for each of n_rows rows 128 * array[i : i + LANES], of int16, and n - 1 vectors of zeros"""
    result = types.UniTuple(ints, n_rows.literal_value * n.literal_value)

    def emit(context, builder, sig, args):
        v = _read(builder, address(builder, args[2], args[3], ir.VectorType(I16, LANES)), 2)
        row = [builder.shl(builder.sext(v, INTS), _same(7, INTS))] + [_same(0, INTS)] * (n.literal_value - 1)
        return context.make_tuple(builder, sig.return_type, row * n_rows.literal_value)
    return result(n_rows, n, array, types.int64), emit


INPUTS_PER_VECTOR = {types.float32: 1, types.uint16: 2, types.int8: 4}  # of packed weights


@intrinsic
def inputs_per_vector(typing, w):
    """1, 2 or 4, by the type of packed weights: how many inputs a vector of them has weights for"""
    def emit(context, builder, sig, args):
        return I64(INPUTS_PER_VECTOR[w.dtype])
    return types.int64(w), emit


@intrinsic(prefer_literal=True)
def multiply_tile(typing, sums, w, i, x, j, stride, n_rows, ahead):
    """
    A tile of w @ x: of LANES outputs for n_rows rows of x, k of the inner dimension at a time.

    sums: n_rows * n vectors, row by row. w at i: n vectors of packed weights (see kernel.py), each LANES outputs x 1
    (float32), 2 (bfloat16 in uint16) or 4 (int8) inputs. x at j + r * stride: row r, float32, or uint8 for int8
    weights. What was added to a row's sums in the end adds up to its LANES outputs. With PREFETCH_ROWS rows and more,
    the weights that are needed `ahead` elements later are fetched meanwhile. For a single row that made a step 0.76 to
    1.02 times as fast (S, M, L in each kind of weights, on an AMD EPYC of the Zen 4 kind), so it is not done there.
    """
    n_rows_, n = n_rows.literal_value, sums.count // n_rows.literal_value
    per_vector = INPUTS_PER_VECTOR[w.dtype]

    def emit(context, builder, sig, args):
        sums, w, i, x, j, stride, _, ahead = args
        sums = cgutils.unpack_tuple(builder, sums)
        rows = [builder.add(j, builder.mul(stride, I64(r))) for r in range(n_rows_)]

        def weights(k, as_type):
            at = builder.add(i, I64(k * per_vector * LANES))
            if n_rows_ >= PREFETCH_ROWS:
                call(builder, 'llvm.prefetch.p0', ir.VoidType(), address(builder, w, builder.add(at, ahead), I8), I32(0), I32(2), I32(1))
            return _read(builder, address(builder, w, at, as_type))

        def inputs(r, k, as_type):
            p = address(builder, x, builder.add(rows[r], I64(k)), as_type)
            return _broadcast(builder, _read(builder, p))

        for k in range(n):
            if per_vector == 1:
                wk = [weights(k, FLOATS)]
            elif per_vector == 2:  # a bfloat16 is the upper half of a float32
                pairs = weights(k, INTS)
                wk = [builder.bitcast(half, FLOATS) for half in
                      (builder.shl(pairs, _same(16, INTS)), builder.and_(pairs, _same(-65536, INTS)))]
            else:
                wk = [weights(k, INTS)]
            for r in range(n_rows_):
                for m, wm in enumerate(wk):
                    s = r * n + k
                    if per_vector == 4:
                        sums[s] = _dot_bytes(builder, sums[s], inputs(r, 4 * k, I32), wm)
                    else:
                        sums[s] = _fma(builder, wm, inputs(r, per_vector * k + m, F32), sums[s])
        return context.make_tuple(builder, sig.return_type, sums)
    return sums(sums, w, types.int64, x, types.int64, types.int64, n_rows, types.int64), emit


def _dot_bytes(builder, sums, x, w):
    """sums + the dot products of four uint8 of x with four int8 of w, lane by lane (x and w as int32)."""
    if DOT_PRODUCTS:
        return call(builder, 'llvm.x86.avx512.vpdpbusd.512', INTS, sums, x, w)
    for byte in range(4):
        up = _same(24 - 8 * byte, INTS)
        x_byte = builder.lshr(builder.shl(x, up), _same(24, INTS))
        w_byte = builder.ashr(builder.shl(w, up), _same(24, INTS))
        sums = builder.add(sums, builder.mul(x_byte, w_byte))
    return sums


@intrinsic(prefer_literal=True)
def store_tile(typing, sums, array, i, stride, n_rows):
    """array[i + r * stride : + LANES] = the sums of row r, for the n_rows of them"""
    n = sums.count // n_rows.literal_value

    def emit(context, builder, sig, args):
        sums, array, i, stride, _ = args
        sums = cgutils.unpack_tuple(builder, sums)
        for r in range(n_rows.literal_value):
            p = address(builder, array, builder.add(i, builder.mul(stride, I64(r))), FLOATS)
            builder.store(_sum(builder, sums[r * n:r * n + n], builder.fadd), p).align = 4
        return context.get_dummy_value()
    return types.void(sums, array, types.int64, types.int64, n_rows), emit


@intrinsic(prefer_literal=True)
def scale_tile(typing, totals, sums, scale, i, stride):
    """totals[r] + the int32 sums of row r * scale[i + r * stride], for each row"""
    n = sums.count // totals.count

    def emit(context, builder, sig, args):
        totals, sums, scale, i, stride = args
        totals, sums = cgutils.unpack_tuple(builder, totals), cgutils.unpack_tuple(builder, sums)
        for r in range(len(totals)):
            p = address(builder, scale, builder.add(i, builder.mul(stride, I64(r))))
            total = builder.sitofp(_sum(builder, sums[r * n:r * n + n], builder.add), FLOATS)
            totals[r] = _fma(builder, total, _broadcast(builder, _read(builder, p)), totals[r])
        return context.make_tuple(builder, sig.return_type, totals)
    return totals(totals, sums, scale, types.int64, types.int64), emit


@intrinsic(prefer_literal=True)
def dot_rows(typing, sums, array, i, stride, v):
    """sums[r] + array[i + r * stride : + LANES] * v, for each r"""
    def emit(context, builder, sig, args):
        sums, array, i, stride, v = args
        sums = cgutils.unpack_tuple(builder, sums)
        for r in range(len(sums)):
            p = address(builder, array, builder.add(i, builder.mul(stride, I64(r))), FLOATS)
            sums[r] = _fma(builder, _read(builder, p), v, sums[r])
        return context.make_tuple(builder, sig.return_type, sums)
    return sums(sums, array, types.int64, types.int64, floats), emit


@intrinsic(prefer_literal=True)
def add_rows(typing, sums, array, i, stride, p, j):
    """sums[r] + array[i + r * stride : + LANES] * p[j + r], for each r"""
    def emit(context, builder, sig, args):
        sums, array, i, stride, p, j = args
        sums = cgutils.unpack_tuple(builder, sums)
        for r in range(len(sums)):
            row = address(builder, array, builder.add(i, builder.mul(stride, I64(r))), FLOATS)
            weight = _read(builder, address(builder, p, builder.add(j, I64(r))))
            sums[r] = _fma(builder, _read(builder, row), _broadcast(builder, weight), sums[r])
        return context.make_tuple(builder, sig.return_type, sums)
    return sums(sums, array, types.int64, types.int64, p, types.int64), emit


@intrinsic
def total(typing, sums):
    """The vectors of a tile, added up"""
    def emit(context, builder, sig, args):
        return _sum(builder, cgutils.unpack_tuple(builder, args[0]), builder.fadd)
    return floats(sums), emit


@intrinsic
def sum_each(typing, sums):
    """LANES vectors -> one, whose lane r is the sum of the lanes of vector r"""
    def emit(context, builder, sig, args):
        values, width = cgutils.unpack_tuple(builder, args[0]), LANES
        while width > 1:  # fold the lanes of two vectors into one, until each vector has a single lane left
            half, width = len(values) // 2, width // 2
            starts = [s + source for s in range(0, LANES, 2 * width) for source in (0, LANES)]  # a's lanes, then b's, in turns
            low = ir.Constant(INTS, [s + k for s in starts for k in range(width)])
            high = ir.Constant(INTS, [s + k + width for s in starts for k in range(width)])
            values = [builder.fadd(builder.shuffle_vector(a, b, low), builder.shuffle_vector(a, b, high))
                      for a, b in zip(values[:half], values[half:])]
        return values[0]
    return floats(sums), emit
