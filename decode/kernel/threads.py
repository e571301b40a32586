"""
Threads that share one decode step: atomic counters, waiting, and the worker threads, in a process that may fork.

The threads of a step wait for each other several times a layer, for a few microseconds each time. A waiting thread
first spins, which is fastest when every thread has a core of its own. After SPIN nanoseconds it sleeps until the
counter changes, so that on a busy machine the thread that it waits for can have the core.

How a thread sleeps, by system: Linux has futexes; macOS __ulock_wait, on which its own C++ library waits; Windows
WaitOnAddress. On others it looks again every NAP microseconds. `clock` is the clock of time.perf_counter_ns.
"""
import atexit
import ctypes
import os
import platform
import sys
import threading
import time
from contextlib import suppress

import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from decode.choice import PAUSE
from decode.kernel.emit import I32, I64, address, call, instruction, njit

LINE = 8  # int64 in a cache line of 64 bytes
SPIN = 50_000  # nanoseconds that a thread spins at a barrier before it sleeps
SPIN_IDLE = 1_000_000  # the same between two steps, where Python and sampling take 30 to 500 microseconds
LONGEST_SLEEP = 10_000_000  # nanoseconds after which a sleeping thread looks at the counter again
NAP = 200

LINUX, MACOS, WINDOWS = (sys.platform == name for name in ('linux', 'darwin', 'win32'))
FUTEX = {'x86_64': 202, 'aarch64': 98}.get(platform.machine()) if LINUX else None
FUTEX_WAIT, FUTEX_WAKE = 128, 129  # on memory that no other process has
ULOCK_WAIT, ULOCK_WAKE = 1, 0x101  # on such memory; wake all
CLOCK = 8 if MACOS else None if WINDOWS else time.CLOCK_MONOTONIC  # CLOCK_UPTIME_RAW on macOS
if WINDOWS:
    llvm.load_library_permanently('kernelbase.dll')  # which has the functions that are called by their names below

# a counter is one cache line of int64: at index 0 its value, at SLEEPERS how many threads sleep until it changes
SLEEPERS = 1
# in a worker's counter: STOP is set to end the worker, RUNNING while it runs
STOP, RUNNING = 2, 3


@instruction(types.int64)
def claim(builder, counter, i):
    """counter[i] += 1 for all threads to see; returns what it was"""
    return builder.atomic_rmw('add', address(builder, counter, i), I64(1), 'seq_cst')


@instruction(types.void)
def publish(builder, counter, i, value):
    """counter[i] = value for all threads to see, after all that this thread has written before"""
    builder.store_atomic(value, address(builder, counter, i), 'seq_cst', 8)


@instruction(types.int64)
def observe(builder, counter, i):
    """counter[i], with what other threads have written to it"""
    return builder.load_atomic(address(builder, counter, i), 'seq_cst', 8)


@instruction(types.void)
def spin_hint(builder):
    """The processor's hint that this is a spinning loop"""
    if llvm.get_default_triple().startswith('x86_64'):
        call(builder, 'llvm.x86.sse2.pause', ir.VoidType())


@instruction(types.int64)
def clock(builder):
    """Nanoseconds since some moment"""
    pair = cgutils.alloca_once(builder, I64, 2)
    second = builder.gep(pair, [I64(1)])
    if WINDOWS:
        call(builder, 'QueryPerformanceCounter', I32, pair)
        call(builder, 'QueryPerformanceFrequency', I32, second)
        ticks, rate = builder.load(pair), builder.load(second)
        seconds, rest = builder.udiv(ticks, rate), builder.mul(builder.urem(ticks, rate), I64(10 ** 9))
        return builder.add(builder.mul(seconds, I64(10 ** 9)), builder.udiv(rest, rate))
    call(builder, 'clock_gettime', I32, I32(CLOCK), pair)
    seconds, nanoseconds = builder.load(pair), builder.load(second)
    return builder.add(builder.mul(seconds, I64(10 ** 9)), nanoseconds)


@instruction(types.void)
def sleep(builder, counter, value):
    """Sleep while counter[0] is `value`, LONGEST_SLEEP at most. Futexes are 32 bits: the lower half of the counter."""
    pair, lower = cgutils.alloca_once(builder, I64, 2), builder.and_(value, I64(2 ** 32 - 1))
    if FUTEX:
        builder.store(I64(0), pair)
        builder.store(I64(LONGEST_SLEEP), builder.gep(pair, [I64(1)]))
        call(builder, 'syscall', I64, I64(FUTEX), builder.ptrtoint(counter, I64), I64(FUTEX_WAIT), lower,
             builder.ptrtoint(pair, I64), I64(0), I64(0))
    elif MACOS:
        call(builder, '__ulock_wait', I32, I32(ULOCK_WAIT), counter, lower, I32(LONGEST_SLEEP // 10 ** 3))
    elif WINDOWS:
        builder.store(value, pair)
        call(builder, 'WaitOnAddress', I32, counter, pair, I64(8), I32(LONGEST_SLEEP // 10 ** 6))
    else:
        call(builder, 'usleep', I32, I32(NAP))


@instruction(types.void)
def wake_sleepers(builder, counter):
    if FUTEX:
        call(builder, 'syscall', I64, I64(FUTEX), builder.ptrtoint(counter, I64), I64(FUTEX_WAKE), I64(2 ** 31 - 1),
             I64(0), I64(0), I64(0))
    elif MACOS:
        call(builder, '__ulock_wake', I32, I32(ULOCK_WAKE), counter, I64(0))
    elif WINDOWS:
        call(builder, 'WakeByAddressAll', ir.VoidType(), counter)


@instruction(types.void)
def add_sleepers(builder, counter, n):
    builder.atomic_rmw('add', address(builder, counter, I64(SLEEPERS)), n, 'seq_cst')


@njit
def wait_until(counter, target, spin):
    """Return when counter[0] is at least `target`: spin for so many nanoseconds, then sleep."""
    looks, end_of_spin = 0, 0
    while True:
        value = observe(counter, 0)
        if value >= target:
            return
        looks += 1
        if looks % 32:
            spin_hint()
        elif end_of_spin == 0:
            end_of_spin = clock() + spin
        elif clock() > end_of_spin:
            add_sleepers(counter, 1)
            sleep(counter, value)
            add_sleepers(counter, -1)


@njit
def wake(counter):
    """Wake the threads that sleep until this counter changes; called after it has changed."""
    if observe(counter, SLEEPERS) > 0:
        wake_sleepers(counter)


@njit
def barrier(counter, n_threads):
    """Return when n_threads threads have called this. Before the first call counter[0] is a multiple of n_threads."""
    if n_threads == 1:
        return
    arrived = claim(counter, 0) + 1
    if arrived % n_threads == 0:
        wake(counter)
    else:
        wait_until(counter, (arrived // n_threads + 1) * n_threads, SPIN)


@njit
def share(n, part, n_parts):
    """Part number `part` of n things, as a range (from, to)."""
    return n * part // n_parts, n * (part + 1) // n_parts


def n_cores():
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def aligned(shape, dtype):
    """An array of zeros that begins at a cache line: vectors of 64 bytes and each thread's counters are in one line."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + size].view(dtype).reshape(shape)


class Workers:
    """
    Threads 1, 2, ... of a step; thread 0 is the caller's own. They are started when they are first needed, wait
    between steps, and end with the process. lock: one step at a time.

    loop: compiled, without Python's lock, (address of post, thread, steps seen) -> 0. It computes the part of thread
        number `thread` in each step that is posted, until STOP is set in its line. It returns at once where a thread of
        that number is running already.
    post: int64 (threads, LINE). Line 0 counts how many threads have finished the step. Line t counts the steps posted
        to thread t.
    ended: when the last step ended, which the caller sets, in nanoseconds of `time.perf_counter_ns`.
    """

    def __init__(self, loop):
        self.loop = loop
        self.forget()
        atexit.register(self.stop)
        if hasattr(os, 'register_at_fork'):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self):
        """Begin again without threads, in the child of a fork. torch's threads are not there either."""
        if getattr(self, 'threads', None) is not None:
            torch.set_num_threads(1)
        self.lock, self.n_ready, self.threads, self.stopped, self.ended = threading.RLock(), 1, [], False, 0
        self.post = aligned((max(n_cores(), os.cpu_count() or 1), LINE), np.int64)
        self.address, self.most = self.post.ctypes.data, len(self.post)

    def ready(self, n_threads):
        """
        How many threads can share a step, the caller's included, n_threads at most. Starts those that are missing, and
        waits up to a second for them. After the system has refused one, no more are started.
        """
        n_threads = min(n_threads, self.most)
        if self.stopped or n_threads == 1:
            return 1
        if time.perf_counter_ns() > self.ended + PAUSE:
            self.spread()
        if self.n_ready < n_threads:
            for number in range(self.n_ready, n_threads):
                args = self.address, number, int(self.post[number, 0])
                thread = threading.Thread(target=self.loop, args=args, name=f'decode {number}', daemon=True)
                self.threads.append(thread)
                try:
                    thread.start()
                except RuntimeError:  # the system allows no more threads
                    self.most = n_threads = number
                    break
            end = time.monotonic() + 1
            while not self.post[1:n_threads, RUNNING].all() and time.monotonic() < end:
                time.sleep(0.0002)
            self.n_ready = 1 + int(self.post[1:n_threads, RUNNING].astype(bool).cumprod().sum())
        return min(n_threads, self.n_ready)

    def spread(self):
        """
        Keep the threads off the caller's core. Linux often wakes a thread that has slept on the core of the one that
        wakes it, and moves it tens of milliseconds later. Until then a step with two threads takes 3 to 6 times as
        long.
        """
        with suppress(AttributeError, OSError):  # other systems have neither call
            others = os.sched_getaffinity(0) - {ctypes.CDLL(None).sched_getcpu()}
            for thread in self.threads:
                if others and thread.native_id:
                    os.sched_setaffinity(thread.native_id, others)

    def stop(self):
        """End the threads, before the memory that they read is freed."""
        with self.lock:
            self.stopped, self.n_ready = True, 1
            self.post[1:, STOP] = 1
            self.post[1:, 0] += 1
            for thread in self.threads:
                if thread.ident is not None:
                    thread.join(1)
