"""Vector instructions for numba on some of the lanes: those within an array, and those that a comparison chooses."""
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from decode.kernel.vectors import FLOATS, I64, LANES, address, call, floats, load, load_first, store, store_first


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


@intrinsic
def store_between(typing, array, i, v, low, x, high):
    """The lanes of v where low <= x < high, one after the other, to array[i], array[i + 1], ... Returns how many."""
    def emit(context, builder, sig, args):
        array, i, v, low, x, high = args
        mask = builder.and_(builder.fcmp_ordered('<=', low, x), builder.fcmp_ordered('<', x, high))
        bits = builder.bitcast(mask, ir.IntType(LANES))
        with builder.if_then(builder.icmp_unsigned('!=', bits, bits.type(0))):  # the store is slow
            p = address(builder, array, i, FLOATS)
            call(builder, f'llvm.masked.compressstore.v{LANES}f32', ir.VoidType(), v, p, mask)
        return builder.zext(builder.ctpop(bits), I64)
    return types.int64(array, types.int64, floats, floats, floats, floats), emit


@intrinsic
def add_from(typing, total, v, a, b):
    """total, with v added in the lanes where a >= b"""
    def emit(context, builder, sig, args):
        total, v, a, b = args  # add first, then select: LLVM makes one instruction of both where vectors have masks
        return builder.select(builder.fcmp_ordered('>=', a, b), builder.fadd(total, v), total)
    return floats(floats, floats, floats, floats), emit
