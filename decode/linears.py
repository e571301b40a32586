"""
Linear layers on packed weights, as the compiled step computes them.

Weights are packed (`packing.PackedWeights`) in panels of LANES outputs. A vector of weights belongs to one input and
LANES outputs, so a sum never has to be taken across the lanes of a register. SHEET panels lie side by side, input by
input, so that memory is read from front to back. A sheet is

    float32     (K, SHEET, LANES)         K inputs, padded with zeros to a multiple of GROUP
    bfloat16    (K / 2, SHEET, LANES, 2)  widened to float32 in registers
    int8        (K / 4, SHEET, LANES, 4)  one scale for each output; the order that the dot product instruction reads

Each output is one chain of multiply-adds over the inputs in order. A tile, of some rows and the panels of a sheet, has
many such chains at a time, so that none waits for itself; it never divides one. So an output has the same bits whatever
the number of rows is.

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

SHEET = 4  # panels side by side
# of a tile, for weights in float32, bfloat16 and int8: its sums and weights fit in 32 registers, or in the 16 of AVX2
MOST_ROWS = (6, 5, 6) if LANES == 16 else (3, 2, 3)

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


def tile(n_rows):
    """The function that multiplies the panels of a sheet with n_rows rows of x, the first of them `row`."""
    @njit
    def multiply(w, w_at, K, start, x, row, step, ahead, scratch):
        sums = zeros(n_rows, SHEET)
        for k in range(0, K, inputs_per_vector(w)):
            at = w_at + k * SHEET * LANES
            sums = multiply_tile(sums, w, at, x, row * K + k, step * K, n_rows, ahead + k * SHEET // 2 * LANES)
        store_tile(sums, scratch.sums, 0)
    return multiply


def int8_tile(n_rows):
    """The same for int8 weights, with the inputs that round_row has rounded."""
    @njit
    def multiply(w, w_at, K, start, x, row, step, ahead, scratch):
        totals, groups = zeros(n_rows, SHEET), K // GROUP
        for g in range(groups):
            # the inputs are 128 too large, so the sums start at -128 times the sum of the weights
            sums = load_ints(n_rows, SHEET, start, w_at // GROUP + g * SHEET * LANES)
            for k in range(g * GROUP, (g + 1) * GROUP, inputs_per_vector(w)):
                at = w_at + k * SHEET * LANES
                sums = multiply_tile(sums, w, at, x, row * K + k, step * K, n_rows, ahead + k * SHEET // 2 * LANES)
            totals = scale_tile(totals, sums, scratch.scales, row * groups + g, step * groups, n_rows)
        store_tile(totals, scratch.sums, 0)
    return multiply


def any_tile(tile, most_rows):
    """The function for a tile of any number of rows, most_rows at most."""
    one, two, three, four, five, six = (tile(min(n, most_rows)) for n in range(1, 7))

    @njit
    def multiply(w, n_rows, *args):
        if n_rows == 1:
            one(w, *args)
        elif n_rows == 2:
            two(w, *args)
        elif n_rows == 3:
            three(w, *args)
        elif n_rows == 4:
            four(w, *args)
        elif n_rows == 5:
            five(w, *args)
        else:
            six(w, *args)
    return multiply


@njit
def round_rows(w, x, rows, K, scratch):
    first_row, step, n_rows = rows
    for r in range(first_row, first_row + n_rows * step, step):
        round_row(x, r * K, K, scratch.rounded, r * K, scratch.scales, r * (K // GROUP))


@njit
def keep_rows(w, x, rows, K, scratch):
    pass


def of_weights(for_float32, for_bfloat16, for_int8):
    """A function of packed weights w that calls one of three, by the type of w."""
    by_type = {types.float32: for_float32, types.uint16: for_bfloat16, types.int8: for_int8}

    def either(w, *args):
        pass

    @overload(either, jit_options={'forceinline': True})
    def choose(w, *args):
        chosen = by_type[w.dtype]
        return lambda w, *args: chosen(w, *args)
    return either


@njit
def float_inputs(w, x, scratch):
    return x


@njit
def int8_inputs(w, x, scratch):
    return scratch.rounded


def constant_of(n):
    @njit
    def c(w):
        return n
    return c


# called with a linear's inputs before the linear itself
prepare_rows = of_weights(keep_rows, keep_rows, round_rows)
inputs_of = of_weights(float_inputs, float_inputs, int8_inputs)
most_rows_of = of_weights(*map(constant_of, MOST_ROWS))
multiply = of_weights(*(any_tile(t, n) for t, n in zip((tile, tile, int8_tile), MOST_ROWS)))


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
    inputs, n_tiles = inputs_of(w, x, scratch), -(-n_rows // most_rows_of(w))
    for sheet in range(panels[0] // SHEET * SHEET, panels[1], SHEET):
        w_at = first_weight + sheet * K * LANES
        for t in range(n_tiles):
            of_tile, end = share(n_rows, t, n_tiles)
            row = first_row + of_tile * step
            ahead = w_at
            if n_tiles > 1 and t < 2:
                ahead = w_at + (SHEET + t * SHEET // 2) * K * LANES
            multiply(w, end - of_tile, w_at, K, linears.start, inputs, row, step, ahead, scratch)
            for p in range(max(sheet, panels[0]), min(sheet + SHEET, panels[1])):
                s, b = load(linears.scale, (first_panel + p) * LANES), load(linears.bias, (first_panel + p) * LANES)
                for i in range(end - of_tile):
                    v = fma(load(scratch.sums, (i * SHEET + p - sheet) * LANES), s, b)
                    to = (row + i * step) * n_out + p * LANES
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


@njit
def shared_linear(team, linears, number, x, rows, then, out, n_out, scratch):
    """
    All panels of linear `number`, shared among the threads; see `linear`.

    A small linear is divided into one part for each thread, always the same part, which then stays in its core's cache.
    A large one is divided into eight parts for each thread, and a thread that is ready claims the next one: a core that
    also runs other processes is slower for a while. A part is whole sheets.
    """
    at, n_threads = number * N_COLUMNS, team.n_threads
    n_panels, K = linears.table[at + N_PANELS], linears.table[at + N_INPUTS]
    n_sheets = -(-n_panels // SHEET)
    small = n_threads == 1 or n_panels * K * LANES * 4 // inputs_per_vector(linears.panels) < CLAIMED
    n_parts = n_threads if small else min(n_sheets, 8 * n_threads)
    part = team.thread if small else claim(team.claims, number * LINE)
    while part < n_parts:
        first, end = share(n_sheets, part, n_parts)
        panels = first * SHEET, min(end * SHEET, n_panels)
        linear(linears, number, panels, x, rows, then, out, n_out, scratch)
        part = n_parts if small else claim(team.claims, number * LINE)
