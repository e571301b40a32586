"""
Linear layers on packed weights, as the compiled step computes them.

Weights are packed (`packing.PackedWeights`) in panels of LANES outputs. A vector of weights belongs to one input and
LANES outputs, so a sum never has to be taken across the lanes of a register, and memory is read from front to back.
A panel is

    float32     (K, LANES)             K inputs, padded with zeros to a multiple of GROUP
    bfloat16    (K / 2, LANES, 2)      widened to float32 in registers
    int8        (K / 4, LANES, 4)      one scale for each output; the order that the dot product instruction reads

With int8 weights the inputs are rounded to int8 too, GROUP of them to a scale, as llama.cpp does for its Q8_0.
"""
from collections import namedtuple

import numpy as np
from numba import njit, types
from numba.extending import overload

from decode.layout import FIRST_PANEL, FIRST_WEIGHT, GROUP, N_COLUMNS, N_INPUTS, N_PANELS
from decode.threads import LINE, claim
from decode.tiles import inputs_per_vector, load_ints, multiply_tile, scale_tile, store_tile, zeros
from decode.vectors import (
    LANES,
    absolute,
    constant,
    fma,
    gelu,
    gelu_tanh,
    larger,
    load,
    max_lanes,
    splat,
    store,
    store_bytes,
    store_first,
    sum_lanes,
)

# what is done with the outputs of a linear: stored, added to `out`, stored after a GELU, exact or by tanh
STORE, ADD, GELU, GELU_TANH = range(4)
CLAIMED = 2**20  # a linear with at least so many bytes of weights is shared in small parts that the threads claim

# all linears: their panels, for each output row a scale (1 unless int8) and a bias, where the int8 sums start, and the
# table that says where each linear is, see layout.py
Linears = namedtuple('Linears', 'panels scale bias start table')


Team = namedtuple('Team', 'thread n_threads claims')  # one thread of those that share the step


@njit
def share(n, part, n_parts):
    """Part number `part` of n things, as a range (from, to)."""
    return n * part // n_parts, n * (part + 1) // n_parts


@njit
def round_row(x, x_at, K, out, out_at, scales, scale_at):
    """
    Round K floats of x to int8, GROUP to a scale, so that the largest of a group is 127. out: uint8, 128 more than the
    int8; scales: the scale of each group.
    """
    not_numbers = constant(0)
    for g in range(K // GROUP):
        largest = constant(0)
        for i in range(g * GROUP, (g + 1) * GROUP, LANES):
            v = load(x, x_at + i)
            largest, not_numbers = larger(absolute(v), largest), fma(v, constant(0), not_numbers)
        peak = max_lanes(largest)
        scales[scale_at + g] = peak / np.float32(127)
        to_whole = splat(np.float32(127) / peak if peak > 0 else np.float32(0))
        for i in range(g * GROUP, (g + 1) * GROUP, LANES):
            store_bytes(out, out_at + i, load(x, x_at + i) * to_whole)
    scales[scale_at] += sum_lanes(not_numbers)  # 0, or NaN if an input is NaN or infinite: int8 has no NaN


def tile(n_rows, n):
    """
    The function that multiplies one panel with n_rows rows of x, from `row` on, each `step` rows apart. It adds up n
    vectors of weights in parallel.
    """
    @njit
    def multiply(w, w_at, K, start, x, row, step, scratch):
        sums = zeros(n_rows, n)
        for k in range(0, K, n * inputs_per_vector(w)):
            # the prefetched weights are those of the next panel, K * LANES ahead
            sums = multiply_tile(sums, w, w_at + k * LANES, x, row * K + k, step * K, n_rows, K * LANES)
        store_tile(sums, scratch.sums, 0, LANES, n_rows)
    return multiply


def int8_tile(n_rows, n):
    """The same for int8 weights, with the inputs that round_row has rounded."""
    @njit
    def multiply(w, w_at, K, start, x, row, step, scratch):
        rounded = scratch.rounded
        totals = zeros(n_rows, 1)
        for g in range(K // GROUP):
            # the inputs are 128 too large, so the sums start at -128 times the sum of the weights
            sums = load_ints(n_rows, n, start, w_at // GROUP + g * LANES)
            for k in range(g * GROUP, (g + 1) * GROUP, n * inputs_per_vector(w)):
                sums = multiply_tile(sums, w, w_at + k * LANES, rounded, row * K + k, step * K, n_rows, K * LANES)
            totals = scale_tile(totals, sums, scratch.scales, row * (K // GROUP) + g, step * (K // GROUP))
        store_tile(totals, scratch.sums, 0, LANES, n_rows)
    return multiply


def largest_of(tile, n):
    """
    The function for any number of rows, in tiles of 8, 4, 2 and 1. A tile adds up at least n sums in parallel, or one
    for each row if that is more.
    """
    eight, four, two, one = (tile(n_rows, max(1, n // n_rows)) for n_rows in (8, 4, 2, 1))

    @njit
    def multiply(w, n_rows, *args):
        """As many of n_rows rows as the largest tile takes; returns how many."""
        if n_rows >= 8:
            eight(w, *args)
            return 8
        if n_rows >= 4:
            four(w, *args)
            return 4
        if n_rows >= 2:
            two(w, *args)
            return 2
        one(w, *args)
        return 1
    return multiply


@njit
def round_rows(w, x, rows, K, scratch):
    first_row, step, n_rows = rows
    for r in range(first_row, first_row + n_rows * step, step):
        round_row(x, r * K, K, scratch.rounded, r * K, scratch.scales, r * (K // GROUP))


@njit
def keep_rows(w, x, rows, K, scratch):
    pass


def of_weights(for_floats, for_int8):
    """A function of packed weights w that calls one of two, by the type of w."""
    def either(w, *args):
        pass

    @overload(either)
    def choose(w, *args):
        chosen = for_int8 if w.dtype == types.int8 else for_floats
        return lambda w, *args: chosen(w, *args)
    return either


# called with a linear's inputs before the linear itself
prepare_rows = of_weights(keep_rows, round_rows)

# Eight sums in parallel hide the latency of an fma. With int8 weights there are two: the reads of eight would be half a
# kilobyte apart, which the processor's prefetcher does not follow, and a model larger than the caches would be read at
# 10 GB/s instead of 26.
multiply = of_weights(largest_of(tile, 8), largest_of(int8_tile, 2))


@njit
def linear(linears, number, panels, x, rows, then, out, n_out, scratch):
    """
    Panels (from, to) of linear `number`, for rows = (first, step, how many) of x, as prepare_rows has left them.

    The n_out outputs of a row go to the same row of out, (rows, n_out); `then` is STORE, ADD, GELU or
    GELU_TANH.
    """
    at = number * N_COLUMNS
    first_weight, first_panel, K = (
        linears.table[at + FIRST_WEIGHT], linears.table[at + FIRST_PANEL], linears.table[at + N_INPUTS])
    w, (first_row, step, n_rows) = linears.panels, rows
    for p in range(panels[0], panels[1]):
        w_at, row_at = first_weight + p * K * LANES, (first_panel + p) * LANES
        s, b = load(linears.scale, row_at), load(linears.bias, row_at)
        done = 0
        while done < n_rows:
            row = first_row + done * step
            n = multiply(w, n_rows - done, w_at, K, linears.start, x, row, step, scratch)
            for i in range(n):
                v, to = fma(load(scratch.sums, i * LANES), s, b), (row + i * step) * n_out + p * LANES
                if then == ADD:
                    store(out, to, load(out, to) + v)
                elif then == GELU:
                    store(out, to, gelu(v))
                elif then == GELU_TANH:
                    store(out, to, gelu_tanh(v))
                elif (p + 1) * LANES <= n_out:
                    store(out, to, v)
                else:
                    store_first(out, to, v, n_out - p * LANES)
            done += n


@njit
def shared_linear(team, linears, number, x, rows, then, out, n_out, scratch):
    """
    All panels of linear `number`, shared among the threads; see `linear`.

    A small linear is divided into one part for each thread, always the same part, which then stays in its core's cache.
    A large one is divided into eight parts for each thread, and a thread that is ready claims the next one: a core that
    also runs other processes is slower for a while.
    """
    at, n_threads = number * N_COLUMNS, team.n_threads
    n_panels, K = linears.table[at + N_PANELS], linears.table[at + N_INPUTS]
    small = n_threads == 1 or n_panels * K * LANES * 4 // inputs_per_vector(linears.panels) < CLAIMED
    n_parts = n_threads if small else 8 * n_threads
    part = team.thread if small else claim(team.claims, number * LINE)
    while part < n_parts:
        linear(linears, number, share(n_panels, part, n_parts), x, rows, then, out, n_out, scratch)
        part = n_parts if small else claim(team.claims, number * LINE)
