"""
What the compiled code is made of: the processor, LLVM's types, and the pieces that instructions emit.

An `instruction` is a function that compiled code can call. The functions after it are pieces of the code of several
instructions; they take LLVM's builder and its values.
"""
import ctypes
import functools
import os
import platform
import sys

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# {value of the environment variable DECODE_CPU: (the name of that older processor in LLVM, its features)}
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

# for functions that compiled code alone calls. Wrappers for calls from Python would take a seventh of the compiling.
# A division by zero gives inf or NaN: an exception would end one thread of a step, while the others wait for it
njit = functools.partial(numba.njit, no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model='numpy')


def instruction(result=None):
    """
    Make a function for compiled code of one that emits its code: (builder, *LLVM values) -> an LLVM value, or None. A
    tuple is a list of values there. result: numba's type of what it returns; None: that of its first argument.
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
            return (given[0] if result is None else result)(*given), emit
        return intrinsic(typed)
    return of


def address(builder, pointer, index, as_type=None):
    p = builder.gep(pointer, [index])
    return builder.bitcast(p, as_type.as_pointer()) if as_type else p


def load(builder, p, align=4):
    value = builder.load(p)
    value.align = align
    return value


class LoadInOrder(ir.instructions.LoadInstr):
    """A load that LLVM leaves in the order of all such loads: it is volatile, which llvmlite itself cannot write."""

    def descr(self, buf):
        super().descr(buf)
        buf[-1] = buf[-1].replace('load', 'load volatile', 1)


def load_in_order(builder, p):
    value = LoadInOrder(builder.block, p)
    value.align = 4
    builder._insert(value)  # what builder.load does with its own kind
    return value


def same(value, vector):
    """A constant vector: `value` in all lanes."""
    return ir.Constant(vector, [value] * vector.count)


def broadcast(builder, scalar):
    """A number in all lanes."""
    vector = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, scalar, I32(0)), undefined, same(0, INTS))


def numbers_from(builder, first, n, last=None):
    """The n int64 from `first` on; `last`, if it is given, takes the place of those after it."""
    numbers = [builder.add(first, I64(r)) for r in range(n)]
    return [builder.select(builder.icmp_signed('<', i, last), i, last) for i in numbers] if last else numbers


def call(builder, name, result, *args, fastmath=()):
    signature = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args, fastmath=fastmath)


def prefetch(builder, p, level):
    """Prefetch the line of memory at p, into the first cache (level 3) or the second one (level 2)."""
    read, data = I32(0), I32(1)
    call(builder, 'llvm.prefetch.p0', ir.VoidType(), p, read, I32(level), data)


def fma(builder, a, b, c):
    """a * b + c, rounded once."""
    return call(builder, f'llvm.fma.v{LANES}f32', FLOATS, a, b, c)


def to_ints(builder, v):
    """Numbers below 2 ** 22 in size as int32, rounded to the nearest, half to even. A NaN becomes any number."""
    # 1.5 * 2 ** 23 + v has v in its last bits. LLVM's own conversion is undefined for a NaN, or takes lane after lane
    bits = builder.bitcast(builder.fadd(v, same(12582912.0, FLOATS)), INTS)
    return builder.sub(bits, same(0x4b400000, INTS))


def widened(builder, v):
    """bfloat16 numbers, as int16, in float32: a bfloat16 is the upper half of a float32."""
    return builder.bitcast(builder.shl(builder.zext(v, INTS), same(16, INTS)), FLOATS)


def tree_sum(builder, values):
    """The sum of 2 ** n vectors, as a tree of neighbours: the additions of one level do not wait for each other."""
    while len(values) > 1:
        values = [builder.fadd(a, b) for a, b in zip(values[::2], values[1::2])]
    return values[0]


def first_lanes(builder, n):
    """The mask of the first n lanes."""
    lanes = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
    return builder.icmp_signed('<', lanes, broadcast(builder, n))


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


def load_first(builder, array, i, n):
    """The first n of array[i : i + LANES], of any type, and zero in the other lanes; nothing beyond is touched."""
    element = array.type.pointee
    vector = ir.VectorType(element, LANES)
    return call(builder, f'llvm.masked.load.v{LANES}{element.intrinsic_name}.p0', vector,
                address(builder, array, i, vector), I32(bytes_of(element)), first_lanes(builder, n),
                same(0.0 if element == F32 else 0, vector))


def store_bytes(builder, array, i, v):
    """array[i : i + LANES] = the lowest 8 bits of each lane of v, int32"""
    small = builder.trunc(v, ir.VectorType(I8, LANES))
    builder.store(small, address(builder, array, i, small.type)).align = 1


def store_first(builder, array, i, v, n):
    """array[i : i + n] = the first n lanes of v"""
    element = v.type.element
    call(builder, f'llvm.masked.store.v{LANES}{element.intrinsic_name}.p0', ir.VoidType(), v,
         address(builder, array, i, v.type), I32(bytes_of(element)), first_lanes(builder, n))
