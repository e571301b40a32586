"""
Vectors for numba: LANES float32 in a register, and tiles, which are tuples of such vectors.

numba compiles scalar loops, and LLVM vectorises some of them: a dot product, but not a tile of dot products. So each
vector instruction that the decode step needs is a function here that compiled code can call: `load`, `fma`, `store`.
Arithmetic is IEEE's: a NaN goes in, a NaN comes out. Positions in arrays are in elements, arrays are one-dimensional
and contiguous, and no function checks bounds.
"""
import ctypes
import functools
import operator
import os
import platform
import sys

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

# DECODE_CPU compiles for one of these older processors, in tests and benchmarks: (its name in LLVM, its features)
CPUS = {'avx2': ('haswell', {'avx2': True}), 'avxvnni': ('alderlake', {'avx2': True, 'avxvnni': True})}
features = llvm.get_host_cpu_features()
ARM = platform.machine() in ('aarch64', 'arm64')
if ARM and 'dotprod' not in features:  # LLVM does not look for it
    features['dotprod'] = sys.platform == 'darwin' or sys.platform == 'linux' and bool(
        ctypes.CDLL(None).getauxval(16) >> 20 & 1)  # HWCAP_ASIMDDP of AT_HWCAP
    numba.config.CPU_FEATURES = features.flatten()
if asked := os.environ.get('DECODE_CPU'):
    if asked not in CPUS:
        raise ValueError(f"DECODE_CPU must be {' or '.join(CPUS)}, or left out, not {asked!r}")
    # features in addition to those of the named processor: Zen 4 has AVX-VNNI's instruction only as one of AVX-512
    numba.config.CPU_FEATURES = ('-avxvnni,+avx512vl,+avx512vnni' if asked == 'avxvnni' and not features.get(asked)
                                 and features.get('avx512vnni') else '')
    numba.config.CPU_NAME, features = CPUS[asked]
LANES = 16 if features.get('avx512f') else 8  # eight floats are one AVX register, or two of ARM's

I1, I8, I16, I32, I64, F32, F64 = *map(ir.IntType, (1, 8, 16, 32, 64)), ir.FloatType(), ir.DoubleType()
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

# for functions that compiled code alone calls. Wrappers for calls from Python would take a seventh of the compiling
njit = functools.partial(numba.njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)


class Floats(types.Type):
    """numba's type of LANES float32 in a register."""

    def __init__(self):
        super().__init__('Floats')


floats = Floats()


@register_model(Floats)
class FloatsModel(models.PrimitiveModel):
    def __init__(self, data_model_manager, fe_type):
        super().__init__(data_model_manager, fe_type, FLOATS)


FIRST = None  # the type of the first argument


def instruction(result=FIRST):
    """
    Make a function for compiled code of one that emits its code: (builder, *LLVM values) -> an LLVM value, or None. A
    tuple is a list of values there. result: numba's type of what it returns.
    """
    def of(emit_value):
        @functools.wraps(emit_value)
        def typed(typing, *given):
            def emit(context, builder, sig, args):
                args = [cgutils.unpack_tuple(builder, value) if isinstance(of, types.BaseTuple) else value
                        for of, value in zip(sig.args, args)]
                value = emit_value(builder, *args)
                if value is None:
                    return context.get_dummy_value()
                return context.make_tuple(builder, sig.return_type, value) if isinstance(value, list) else value
            return (given[0] if result is FIRST else result)(*given), emit
        return intrinsic(typed)
    return of


# pieces of what the instructions emit

def address(builder, pointer, index, as_type=None):
    p = builder.gep(pointer, [index])
    return builder.bitcast(p, as_type.as_pointer()) if as_type else p


def emit_load(builder, p, align=4):
    value = builder.load(p)
    value.align = align
    return value


class LoadInOrder(ir.instructions.LoadInstr):
    """A load that LLVM leaves in the order of all such loads: it is volatile, which llvmlite itself cannot write."""

    def descr(self, buf):
        super().descr(buf)
        buf[-1] = buf[-1].replace('load', 'load volatile', 1)


def emit_load_in_order(builder, p):
    value = LoadInOrder(builder.block, p)
    value.align = 4
    builder._insert(value)  # what builder.load does with its own kind
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
    """Numbers below 2 ** 22 in size as int32, rounded to the nearest, half to even. A NaN becomes any number."""
    # 1.5 * 2 ** 23 + v has v in its last bits. LLVM's own conversion is undefined for a NaN, or takes lane after lane
    bits = builder.bitcast(builder.fadd(v, same(12582912.0, FLOATS)), INTS)
    return builder.sub(bits, same(0x4b400000, INTS))


def widened(builder, v):
    """bfloat16 numbers, as int16, in float32: a bfloat16 is the upper half of a float32."""
    return builder.bitcast(builder.shl(builder.zext(v, INTS), same(16, INTS)), FLOATS)


def emit_sum(builder, values):
    while len(values) > 1:  # as a tree of neighbours: the additions of one level do not wait for each other
        values = [builder.fadd(a, b) for a, b in zip(values[::2], values[1::2])] + values[len(values) & ~1:]
    return values[0]


def first_lanes(builder, n):
    """The mask of the first n lanes."""
    lanes = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
    return builder.icmp_signed('<', lanes, broadcast(builder, n))


def emit_larger(builder, a, b):
    """The larger int32 in each lane"""
    return builder.select(builder.icmp_signed('>', a, b), a, b)


def fold_each(builder, values, operation):
    """
    Fold the lanes of each of n vectors to one number, in halves. Number r fills LANES // n lanes of the result, from
    r * LANES // n on. n: a power of two, at most LANES. operation: of two vectors.
    """
    width = LANES
    while width > 1:  # fold the lanes of two vectors into one, and when one is left, its own
        half, width = len(values) // 2, width // 2
        # lanes of a and of b in turns
        starts = [s + source for s in range(0, LANES, 2 * width) for source in (0, LANES)]
        low = ir.Constant(INTS, [s + k for s in starts for k in range(width)])
        high = ir.Constant(INTS, [s + k + width for s in starts for k in range(width)])
        pairs = zip(values[:half], values[half:]) if half else [(values[0], values[0])]
        values = [operation(builder.shuffle_vector(a, b, low), builder.shuffle_vector(a, b, high)) for a, b in pairs]
    return values[0]


def bytes_of(element):
    return 4 if element == F32 else element.width // 8


def emit_load_first(builder, array, i, n):
    """The first n of array[i : i + LANES], of any type, and zero in the other lanes; nothing beyond is touched."""
    element = array.type.pointee
    vector = ir.VectorType(element, LANES)
    return call(builder, f'llvm.masked.load.v{LANES}{element.intrinsic_name}.p0', vector,
                address(builder, array, i, vector), I32(bytes_of(element)), first_lanes(builder, n),
                same(0.0 if element == F32 else 0, vector))


def emit_store_bytes(builder, array, i, v):
    """array[i : i + LANES] = the lowest 8 bits of each lane of v, int32"""
    small = builder.trunc(v, ir.VectorType(I8, LANES))
    builder.store(small, address(builder, array, i, small.type)).align = 1


def emit_store_first(builder, array, i, v, n):
    """array[i : i + n] = the first n lanes of v"""
    element = v.type.element
    call(builder, f'llvm.masked.store.v{LANES}{element.intrinsic_name}.p0', ir.VoidType(), v,
         address(builder, array, i, v.type), I32(bytes_of(element)), first_lanes(builder, n))


# memory

@instruction(floats)
def load(builder, array, i):
    """array[i : i + LANES]"""
    return emit_load(builder, address(builder, array, i, FLOATS))


@instruction(floats)
def load_first(builder, array, i, n):
    """The first n of array[i : i + LANES], and zero in the other lanes; nothing beyond them is touched."""
    return emit_load_first(builder, array, i, n)


@instruction(floats)
def load_bfloat16_first(builder, array, i, n):
    """`load_first` of bfloat16 numbers, as float32"""
    return widened(builder, emit_load_first(builder, array, i, n))


@instruction(types.void)
def store(builder, array, i, v):
    """array[i : i + LANES] = v"""
    builder.store(v, address(builder, array, i, FLOATS)).align = 4


@instruction(types.void)
def store_first(builder, array, i, v, n):
    """array[i : i + n] = the first n lanes of v"""
    emit_store_first(builder, array, i, v, n)


@instruction(types.void)
def store_rounded(builder, array, i, v):
    """array[i : i + LANES] = v in 8 bits; v within +-127, rounded to the nearest whole number, half to even"""
    emit_store_bytes(builder, array, i, to_ints(builder, v))


@instruction(types.int64)
def store_between(builder, array, i, v, low, x, high):
    """The lanes of v where low <= x < high, one after the other, to array[i], array[i + 1], ... Returns how many."""
    mask = builder.and_(builder.fcmp_ordered('<=', low, x), builder.fcmp_ordered('<', x, high))
    bits = builder.bitcast(mask, ir.IntType(LANES))
    with builder.if_then(builder.icmp_unsigned('!=', bits, bits.type(0))):  # the store is slow
        p = address(builder, array, i, FLOATS)
        call(builder, f'llvm.masked.compressstore.v{LANES}f32', ir.VoidType(), v, p, mask)
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


def pointer_to(number, element):
    @instruction(types.CPointer(number))
    def at(builder, address):
        """The pointer of an address"""
        return builder.inttoptr(address, element.as_pointer())
    return at


floats_at, doubles_at, bytes_at, shorts_at, ints_at, longs_at = (
    pointer_to(*kind) for kind in ((types.float32, F32), (types.float64, F64), (types.uint8, I8), (types.int16, I16),
                                   (types.int32, I32), (types.int64, I64)))


@intrinsic
def pointer_like(typing, array, address):
    """The pointer of an address to numbers of an array's type"""
    pointer = types.CPointer(array.dtype)

    def emit(context, builder, sig, args):
        return builder.inttoptr(args[1], context.get_value_type(pointer))
    return pointer(array, types.int64), emit


# arithmetic

@instruction(floats)
def splat(builder, x):
    """x in all lanes"""
    return broadcast(builder, x)


def operate(python, emit_value):
    infer_global(python)(type('OfVectors', (ConcreteTemplate,), dict(cases=[floats(floats, floats)])))
    lower_builtin(python, floats, floats)(lambda context, builder, sig, args: emit_value(builder, *args))


operate(operator.add, lambda builder, a, b: builder.fadd(a, b))
operate(operator.sub, lambda builder, a, b: builder.fsub(a, b))
operate(operator.mul, lambda builder, a, b: builder.fmul(a, b))
operate(operator.truediv, lambda builder, a, b: builder.fdiv(a, b))


@instruction(floats)
def fma(builder, a, b, c):
    """a * b + c, rounded once"""
    return emit_fma(builder, a, b, c)


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
    return call(builder, f'llvm.fabs.v{LANES}f32', FLOATS, a)


@instruction(floats)
def first(builder, v, n):
    """v in the first n lanes, zero in the others"""
    return builder.select(first_lanes(builder, n), v, same(0.0, FLOATS))


@instruction(floats)
def lanes_from(builder, n):
    """n, n + 1, ... n + LANES - 1 as float32"""
    lanes = builder.add(broadcast(builder, builder.trunc(n, I32)), ir.Constant(INTS, list(range(LANES))))
    return builder.sitofp(lanes, FLOATS)


@instruction(types.float32)
def sum_lanes(builder, v):
    """The sum of the lanes, in the order in which `sum_each` adds those of each vector"""
    return builder.extract_element(fold_each(builder, [v], builder.fadd), I32(0))


@instruction(types.float32)
def max_lanes(builder, v):
    """The largest lane; none may be NaN."""
    return call(builder, f'llvm.vector.reduce.fmax.v{LANES}f32', F32, v, fastmath=('nnan',))


@instruction(floats)
def nearest(builder, v):
    """v rounded to whole numbers"""
    return call(builder, f'llvm.rint.v{LANES}f32', FLOATS, v)


@instruction(floats)
def times_power_of_two(builder, v, n):
    """v * 2 ** n, for whole n in [-126, 127]"""
    # the bits of the float 2 ** n: n + 127 in the exponent
    power = builder.shl(builder.add(to_ints(builder, n), same(127, INTS)), same(23, INTS))
    return builder.fmul(v, builder.bitcast(power, FLOATS))


def polynomial(*coefficients):
    """The function of a polynomial, from its highest power down, by Horner's rule."""
    @instruction(floats)
    def evaluate(builder, x):
        value = same(coefficients[0], FLOATS)
        for coefficient in coefficients[1:]:
            value = emit_fma(builder, value, x, same(coefficient, FLOATS))
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
    return fold_each(builder, sums, builder.fadd)


@njit
def padded(n, multiple):
    """n rounded up to a multiple."""
    return -(-n // multiple) * multiple
