"""
Vectors for numba: LANES float32 in a register, and tiles, which are tuples of such vectors.

numba compiles scalar loops, and LLVM vectorises some of them: a dot product, but not a tile of dot products. So each
vector instruction that the decode step needs is a function here that compiled code can call: `load`, `fma`, `store`.
Arithmetic is IEEE's: a NaN goes in, a NaN comes out. Positions in arrays are in elements, arrays are one-dimensional
and contiguous, and no function checks bounds.
"""
import operator

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

from decode.kernel import emit
from decode.kernel.emit import F32, FLOATS, I32, I64, INTS, LANES, address, instruction, njit, same


class Floats(types.Type):
    """numba's type of LANES float32 in a register."""


floats = Floats('Floats')


@register_model(Floats)
class FloatsModel(models.PrimitiveModel):
    def __init__(self, data_model_manager, fe_type):
        super().__init__(data_model_manager, fe_type, FLOATS)


# what emit.py has already, for compiled code
load_first, store_first = instruction(floats)(emit.load_first), instruction(types.void)(emit.store_first)
splat, fma = instruction(floats)(emit.broadcast), instruction(floats)(emit.fma)


# memory

@instruction(floats)
def load(builder, array, i):
    """array[i : i + LANES]"""
    return emit.load(builder, address(builder, array, i, FLOATS))


@instruction(floats)
def load_bfloat16_first(builder, array, i, n):
    """`load_first` of bfloat16 numbers, as float32"""
    return emit.widened(builder, emit.load_first(builder, array, i, n))


@instruction(types.void)
def store(builder, array, i, v):
    """array[i : i + LANES] = v"""
    builder.store(v, address(builder, array, i, FLOATS)).align = 4


@instruction(types.void)
def store_rounded(builder, array, i, v):
    """array[i : i + LANES] = v in 8 bits; v within +-127, rounded to the nearest whole number, half to even"""
    emit.store_bytes(builder, array, i, emit.to_ints(builder, v))


@instruction(types.int64)
def store_between(builder, array, i, v, low, x, high):
    """The lanes of v where low <= x < high, one after the other, to array[i], array[i + 1], ... Returns how many."""
    mask = builder.and_(builder.fcmp_ordered('<=', low, x), builder.fcmp_ordered('<', x, high))
    bits = builder.bitcast(mask, ir.IntType(LANES))
    with builder.if_then(builder.icmp_unsigned('!=', bits, bits.type(0))):  # the store is slow
        p = address(builder, array, i, FLOATS)
        emit.call(builder, f'llvm.masked.compressstore.v{LANES}f32', ir.VoidType(), v, p, mask)
    return builder.zext(builder.ctpop(bits), I64)


@njit
def load_until(x, i, end):
    """x[i : i + LANES], with zero from x[end] on. In a loop it is faster than load_first, which makes its mask anew."""
    return load(x, i) if i + LANES <= end else load_first(x, i, end - i)


@njit
def store_until(x, i, v, end):
    """x[i : i + LANES] = v, except from x[end] on"""
    if i + LANES <= end:
        store(x, i, v)
    else:
        store_first(x, i, v, end - i)


# arithmetic

def operate(python, emit_value):
    infer_global(python)(type('OfVectors', (ConcreteTemplate,), dict(cases=[floats(floats, floats)])))
    lower_builtin(python, floats, floats)(lambda context, builder, sig, args: emit_value(builder, *args))


operate(operator.add, lambda builder, a, b: builder.fadd(a, b))
operate(operator.sub, lambda builder, a, b: builder.fsub(a, b))
operate(operator.mul, lambda builder, a, b: builder.fmul(a, b))
operate(operator.truediv, lambda builder, a, b: builder.fdiv(a, b))


@instruction(floats)
def larger(builder, a, b):
    """The larger in each lane; where either is NaN, b."""
    return builder.select(builder.fcmp_ordered('>', a, b), a, b)


@instruction(floats)
def smaller(builder, a, b):
    """The smaller in each lane; where either is NaN, b."""
    return builder.select(builder.fcmp_ordered('<', a, b), a, b)


@instruction(floats)
def zero_below(builder, a, b, v):
    """v, with zero in the lanes where a < b"""
    return builder.select(builder.fcmp_ordered('<', a, b), same(0.0, FLOATS), v)


@instruction(floats)
def add_from(builder, total, v, a, b):
    """total, with v added in the lanes where a >= b"""
    # add first, then select: LLVM makes one instruction of both where vectors have masks
    return builder.select(builder.fcmp_ordered('>=', a, b), builder.fadd(total, v), total)


@instruction(floats)
def absolute(builder, a):
    return emit.call(builder, f'llvm.fabs.v{LANES}f32', FLOATS, a)


@instruction(floats)
def first(builder, v, n):
    """v in the first n lanes, zero in the others"""
    return builder.select(emit.first_lanes(builder, n), v, same(0.0, FLOATS))


@instruction(floats)
def lanes_from(builder, n):
    """n, n + 1, ... n + LANES - 1 as float32"""
    lanes = builder.add(emit.broadcast(builder, builder.trunc(n, I32)), ir.Constant(INTS, list(range(LANES))))
    return builder.sitofp(lanes, FLOATS)


@instruction(types.float32)
def sum_lanes(builder, v):
    """The sum of the lanes, in the order in which `sum_each` adds those of each vector"""
    return builder.extract_element(emit.fold_each(builder, [v], builder.fadd), I32(0))


@instruction(types.float32)
def max_lanes(builder, v):
    """The largest lane; none may be NaN."""
    return emit.call(builder, f'llvm.vector.reduce.fmax.v{LANES}f32', F32, v, fastmath=('nnan',))


@instruction(floats)
def nearest(builder, v):
    """v rounded to whole numbers"""
    return emit.call(builder, f'llvm.rint.v{LANES}f32', FLOATS, v)


@instruction(floats)
def times_power_of_two(builder, v, n):
    """v * 2 ** n, for whole n in [-126, 127]"""
    # the bits of the float 2 ** n: n + 127 in the exponent
    power = builder.shl(builder.add(emit.to_ints(builder, n), same(127, INTS)), same(23, INTS))
    return builder.fmul(v, builder.bitcast(power, FLOATS))


def polynomial(*coefficients):
    """The function of a polynomial, from its highest power down, by Horner's rule."""
    @instruction(floats)
    def evaluate(builder, x):
        value = same(coefficients[0], FLOATS)
        for coefficient in coefficients[1:]:
            value = emit.fma(builder, value, x, same(coefficient, FLOATS))
        return value
    return evaluate


exp_polynomial = polynomial(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
                            5.0000001201e-1)
erf_numerator = polynomial(-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
                           -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02)
erf_denominator = polynomial(-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03,
                             -7.37332916720468e-03, -1.42647390514189e-02)


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
    return times_power_of_two(fma(exp_polynomial(r), r * r, r) + constant(1.0), n)


@njit
def erf(v):
    """The error function to 2e-7, by a ratio of polynomials (the one of Eigen and XLA)."""
    v = larger(constant(-4.0), smaller(constant(4.0), v))
    return v * erf_numerator(v * v) / erf_denominator(v * v)


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


@njit
def silu(v):
    """x / (1 + e^-x)"""
    return v / (exp(smaller(constant(88.0), constant(0.0) - v)) + constant(1.0))


@intrinsic(prefer_literal=True)
def zeros(typing, n):
    """A tile of n vectors of zeros"""
    def emit(context, builder, sig, args):
        return context.make_tuple(builder, sig.return_type, [same(0.0, FLOATS)] * n.literal_value)
    return types.UniTuple(floats, n.literal_value)(n), emit


@instruction(floats)
def sum_each(builder, sums):
    """LANES vectors -> one, whose lane r is the sum of the lanes of vector r"""
    return emit.fold_each(builder, sums, builder.fadd)


@njit
def padded(n, multiple):
    """n rounded up to a multiple."""
    return -(-n // multiple) * multiple
