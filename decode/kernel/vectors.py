"""
Vectors for numba: LANES float32 in a register. Memory and arithmetic are here, tiles of several vectors in tiles.py.

numba compiles scalar loops, and LLVM vectorises some of them: a dot product, but not a tile of dot products. So each
vector instruction that the decode step needs is a function here that compiled code can call: `load`, `fma`, `store`.
Arithmetic is IEEE's: a NaN goes in, a NaN comes out. Positions in arrays are in elements, arrays are one-dimensional
and contiguous, and no function checks bounds.
"""
import operator

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

features = llvm.get_host_cpu_features()
LANES = 16 if features.get('avx512f') else 8  # eight floats are one AVX register, or two of ARM's

I1, I8, I16, I32, I64, F32 = *map(ir.IntType, (1, 8, 16, 32, 64)), ir.FloatType()
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class Floats(types.Type):
    """numba's type of LANES float32 in a register."""

    def __init__(self):
        super().__init__('Floats')


floats = Floats()


@register_model(Floats)
class FloatsModel(models.PrimitiveModel):
    def __init__(self, data_model_manager, fe_type):
        super().__init__(data_model_manager, fe_type, FLOATS)


# pieces of what the intrinsics emit

def address(builder, pointer, index, as_type=None):
    p = builder.gep(pointer, [index])
    return builder.bitcast(p, as_type.as_pointer()) if as_type else p


def emit_load(builder, p, align=4):
    value = builder.load(p)
    value.align = align
    return value


def same(value, vector):
    """A constant vector: `value` in all lanes."""
    return ir.Constant(vector, [value] * vector.count)


def broadcast(builder, scalar):
    vector = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, scalar, I32(0)), undefined, same(0, INTS))


def call(builder, name, result, *args, fastmath=()):
    signature = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args, fastmath=fastmath)


def emit_fma(builder, a, b, c):
    return call(builder, f'llvm.fma.v{LANES}f32', FLOATS, a, b, c)


def to_ints(builder, v):
    """Whole numbers below 2 ** 22 in size as int32. A NaN becomes any number."""
    # 1.5 * 2 ** 23 + v has v in its last bits. LLVM's own conversion is undefined for a NaN, or takes lane after lane
    bits = builder.bitcast(builder.fadd(v, same(12582912.0, FLOATS)), INTS)
    return builder.sub(bits, same(0x4b400000, INTS))


def emit_sum(builder, values, add):
    while len(values) > 1:  # as a tree of neighbours: the additions of one level do not wait for each other
        values = [add(a, b) for a, b in zip(values[::2], values[1::2])] + values[len(values) & ~1:]
    return values[0]


def first_lanes(builder, n):
    """The mask of the first n lanes."""
    lanes = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
    return builder.icmp_signed('<', lanes, broadcast(builder, n))


# memory

@intrinsic
def load(typing, array, i):
    """array[i : i + LANES]"""
    def emit(context, builder, sig, args):
        return emit_load(builder, address(builder, args[0], args[1], FLOATS))
    return floats(array, types.int64), emit


@intrinsic
def load_first(typing, array, i, n):
    """The first n of array[i : i + LANES], and zero in the other lanes; nothing beyond them is touched."""
    def emit(context, builder, sig, args):
        p = address(builder, args[0], args[1], FLOATS)
        mask = first_lanes(builder, args[2])
        return call(builder, f'llvm.masked.load.v{LANES}f32.p0', FLOATS, p, I32(4), mask, same(0.0, FLOATS))
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
        mask = first_lanes(builder, args[3])
        call(builder, f'llvm.masked.store.v{LANES}f32.p0', ir.VoidType(), args[2], p, I32(4), mask)
        return context.get_dummy_value()
    return types.void(array, types.int64, floats, types.int64), emit


@intrinsic
def store_bytes(typing, array, i, v):
    """array[i : i + LANES] = v rounded to the nearest whole number (half to even) plus 128, as uint8; v within +-127"""
    def emit(context, builder, sig, args):
        whole = to_ints(builder, call(builder, f'llvm.rint.v{LANES}f32', FLOATS, args[2]))
        small = builder.trunc(builder.add(whole, same(128, INTS)), ir.VectorType(I8, LANES))
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


floats_at, doubles_at, bytes_at, shorts_at, ints_at, longs_at = map(
    _pointer_to, (types.float32, types.float64, types.uint8, types.int16, types.int32, types.int64))


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
        return broadcast(builder, args[0])
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
        return emit_fma(builder, *args)
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
def zero_below(typing, a, b, v):
    """v, with zero in the lanes where a < b"""
    def emit(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered('<', args[0], args[1]), same(0.0, FLOATS), args[2])
    return floats(floats, floats, floats), emit


@intrinsic
def absolute(typing, a):
    def emit(context, builder, sig, args):
        return call(builder, f'llvm.fabs.v{LANES}f32', FLOATS, args[0])
    return floats(floats), emit


@intrinsic
def first(typing, v, n):
    """v in the first n lanes, zero in the others"""
    def emit(context, builder, sig, args):
        return builder.select(first_lanes(builder, args[1]), args[0], same(0.0, FLOATS))
    return floats(floats, types.int64), emit


@intrinsic
def lanes_from(typing, n):
    """n, n + 1, ... n + LANES - 1 as float32"""
    def emit(context, builder, sig, args):
        lanes = builder.add(broadcast(builder, builder.trunc(args[0], I32)), ir.Constant(INTS, list(range(LANES))))
        return builder.sitofp(lanes, FLOATS)
    return floats(types.int64), emit


@intrinsic
def sum_lanes(typing, v):
    """The sum of the lanes, folded in halves: the order in which `tiles.sum_each` adds those of each vector"""
    def emit(context, builder, sig, args):
        v, width = args[0], LANES
        while width > 1:
            width //= 2
            upper = ir.Constant(INTS, [(lane + width) % LANES for lane in range(LANES)])
            v = builder.fadd(v, builder.shuffle_vector(v, v, upper))
        return builder.extract_element(v, I32(0))
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
        # the bits of the float 2 ** n: n + 127 in the exponent
        power = builder.shl(builder.add(to_ints(builder, args[1]), same(127, INTS)), same(23, INTS))
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


@njit
def gelu_tanh(v):
    """x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), as x / (1 + e^(-2 u))."""
    minus_2u = v * fma(v * v, constant(-0.07135481282753), constant(-1.5957691216057308))
    return v / (exp(smaller(constant(88.0), minus_2u)) + constant(1.0))
