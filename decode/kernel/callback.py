"""C functions that compiled code calls by their addresses, and so need not be compiled together with it."""
from functools import cached_property

from llvmlite import ir
from numba import types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from decode.kernel.disk_cache import keep_on_disk
from decode.kernel.vectors import I64

N_ARGUMENTS = 5


class Callback:
    """
    A function that takes five int64 and returns an int64, as a C function. At its first use it is compiled, or loaded
    from disk. If it raises, the exception is printed and 0 is returned.

    modules: those with compiled functions that it calls, see `keep_on_disk`. Compiled code calls it by `address`, see
    `call_back`; Python by `call`, without Python's lock.
    """

    def __init__(self, function, *modules):
        self.function, self.modules = function, modules

    @cached_property
    def compiled(self):
        compiled = CFunc(self.function, ((types.int64,) * N_ARGUMENTS, types.int64), locals={}, options={})
        keep_on_disk(compiled, *self.modules)
        compiled.compile()
        return compiled

    @property
    def address(self):
        return self.compiled.address

    @cached_property
    def call(self):
        return self.compiled.ctypes


@intrinsic
def call_back(typing, address, a, b, c, d, e):
    """The result of the C function at an address for these arguments"""
    def emit(context, builder, sig, args):
        signature = ir.FunctionType(I64, [I64] * N_ARGUMENTS)
        return builder.call(builder.inttoptr(args[0], signature.as_pointer()), args[1:])
    return types.int64(*[types.int64] * (1 + N_ARGUMENTS)), emit
