"""Pointers to numbers at an address, for compiled code: the tables of layout.py have the addresses of all arrays."""
from numba import types
from numba.extending import intrinsic

from decode.kernel.emit import F32, F64, I8, I16, I32, I64, instruction


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
