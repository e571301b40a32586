"""
Threads that run side by side, for numba: counters that all of them see, and a barrier.

numba's prange hands out work and waits for all of it, once. In a decode step the same threads wait for each other several
times a layer, which by way of prange would take longer than the work between.
"""
import os

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from decode.vectors import I32, I64, address, call


@intrinsic
def claim(typing, counters, i):
    """counters[i] += 1 for all threads to see; returns what it was"""
    def emit(context, builder, sig, args):
        return builder.atomic_rmw('add', address(builder, *args), I64(1), 'acq_rel')
    return types.int64(counters, types.int64), emit


@intrinsic
def _glance(typing, counter):
    """counter[0], as the other threads have left it, after a moment's pause"""
    def emit(context, builder, sig, args):
        if llvm.get_default_triple().startswith('x86_64'):
            call(builder, 'llvm.x86.sse2.pause', ir.VoidType())
        return builder.load_atomic(address(builder, args[0], I64(0)), 'acquire', 8)
    return types.int64(counter), emit


@intrinsic
def _let_others_run(typing):
    """Offer the core to whoever waits for one: on a busy machine that may be the very thread we wait for."""
    def emit(context, builder, sig, args):
        if os.name == 'posix':
            call(builder, 'sched_yield', I32)
        return context.get_dummy_value()
    return types.void(), emit


@njit
def barrier(counter, n_threads, patience=0):
    """
    Go on when n_threads have come here. counter: an int64 of their own, zero at first, that only ever grows.

    With patience, False comes back if they have not all come after that many glances.
    """
    if n_threads == 1:
        return True
    end_of_round, glances = (claim(counter, 0) // n_threads + 1) * n_threads, 0
    while _glance(counter) < end_of_round:
        glances += 1
        if glances % 65536 == 0:
            _let_others_run()
            if 0 < patience <= glances:
                return False
    return True
