"""
Linear layers on packed weights, as the compiled step computes them.

Weights are packed (`weights.PackedWeights`) in panels of LANES outputs, and SHEET panels side by side are a sheet. A
vector of weights belongs to one input and the LANES outputs of a panel, so a sum never has to be taken across the lanes
of a register, and memory is read from front to back. A sheet is

    float32     (K, SHEET, LANES)           K inputs, padded with zeros to a multiple of GROUP
    bfloat16    (K / 2, SHEET, LANES, 2)    widened to float32 in registers
    int8        (K / 4, SHEET, LANES, 4)    one scale for each output; the order that the dot product instruction reads

and the last sheet of a linear ends with panels of zeros. An output is one chain of fused multiply-adds, from its first
input to its last (int8: over groups, whose sums are exact), then scale and bias. So its bits depend neither on how many
rows are multiplied at once nor on the threads.

With int8 weights the inputs are rounded to int8 too, GROUP of them to a scale, as llama.cpp does for its Q8_0.
"""
from collections import namedtuple

import numpy as np
from numba import njit

from decode.kernel.layout import (
    FIRST_PANEL,
    FIRST_WEIGHT,
    GROUP,
    N_COLUMNS,
    N_INPUTS,
    N_PANELS,
    SHEET,
    SUMMED_ROWS,
    padded,
    share,
)
from decode.kernel.threads import LINE, claim
from decode.kernel.tiles import inputs_per_vector, most_rows, multiply_tile
from decode.kernel.vectors import (
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
    store_first,
    store_rounded,
    sum_lanes,
)

# what is done with the outputs of a linear: stored, added to `out`, stored after a GELU, exact or by tanh. They are
# int64, and no plain numbers, for each of which numba would compile `linear` again
STORE, ADD, GELU, GELU_TANH = map(np.int64, range(4))
CLAIMED = 2**20  # a linear with at least so many bytes of weights is shared in small parts that the threads claim

# Vectors of a panel that all tiles multiply before the next ones are read: 128 KB of a sheet. They and the next ones,
# which are prefetched meanwhile, fit a core's second cache.
PART = 512

# all linears: their panels, for each output row a scale (1 unless int8) and a bias, where the int8 sums start, and the
# table that says where each linear is, see layout.py
Linears = namedtuple('Linears', 'panels scale bias start table')

Team = namedtuple('Team', 'thread n_threads claims')  # one thread of those that share the step


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
            store_rounded(out, out_at + i, load(x, x_at + i) * to_whole, 128)
    scales[scale_at] += sum_lanes(not_numbers)  # 0, or NaN if an input is NaN or infinite: int8 has no NaN


@njit
def prepare_rows(w, x, n_rows, K, scratch):
    """Before `linear` is called: for int8 weights w, round the rows of x, (n_rows, K), to int8 in the scratch."""
    if inputs_per_vector(w) == 4:
        for r in range(n_rows):
            round_row(x, r * K, K, scratch.rounded, r * K, scratch.scales, r * (K // GROUP))


@njit
def tile_sizes(w, n_rows, K):
    """
    (rows of a tile, rows whose sums are kept at a time, inputs that all tiles multiply before the next ones are read).
    """
    at_once, alone, one_of_several = most_rows(w)
    if n_rows <= at_once:
        return n_rows, max(1, n_rows), K
    n_tiles, n_parts = 1 if n_rows <= alone else -(-n_rows // one_of_several), -(-K // (PART * inputs_per_vector(w)))
    n_tile = -(-n_rows // n_tiles)
    return n_tile, SUMMED_ROWS // n_tile * n_tile, padded(-(-K // n_parts), GROUP)


@njit(forceinline=True)
def multiply_sheet(linears, w_at, K, x, row, n_rows, sizes, scratch):
    """The sums of n_rows rows of x, from `row` on, and the sheet at w_at, into scratch.sums: (n_rows, SHEET, LANES)."""
    w, of_input, k = linears.panels, SHEET * LANES, 0
    n_tile, most, part = sizes
    while k < K:
        n, at, r = min(part, K - k), w_at + k * of_input, 0
        while r < n_rows:
            ahead, x_at = at, (row + r) * K + k
            if n_tile < most and r <= n_tile:  # the first two tiles prefetch the next part, half each
                ahead += n * of_input if r == 0 else n * of_input * 3 // 2
            multiply_tile(w, at, ahead, linears.start, x, scratch.rounded, scratch.scales, x_at, K,
                          min(n_tile, n_rows - r), n, k > 0, scratch.sums, r * of_input)
            r += n_tile
        k += part


@njit
def linear(linears, number, panels, x, n_rows, then, out, n_out, scratch):
    """
    Panels (from, to) of linear `number`, for the first n_rows rows of x, as prepare_rows has left them.

    The n_out outputs of a row go to the same row of out, (n_rows, n_out); `then` is STORE, ADD, GELU or GELU_TANH.
    Returns whether all values of x @ w + b in these panels are finite, before `then` is applied to them.
    """
    at, zero, zeros = number * N_COLUMNS, constant(0.0), constant(0.0)  # 0 times infinity or NaN makes zeros NaN
    first_weight, first_panel, K = (
        linears.table[at + FIRST_WEIGHT], linears.table[at + FIRST_PANEL], linears.table[at + N_INPUTS])
    sizes = tile_sizes(linears.panels, n_rows, K)
    for sheet in range(panels[0] // SHEET * SHEET, panels[1], SHEET):
        for row in range(0, n_rows, sizes[1]):
            n = min(n_rows - row, sizes[1])
            multiply_sheet(linears, first_weight + sheet * K * LANES, K, x, row, n, sizes, scratch)
            for p in range(max(sheet, panels[0]), min(sheet + SHEET, panels[1])):
                s, b = load(linears.scale, (first_panel + p) * LANES), load(linears.bias, (first_panel + p) * LANES)
                for i in range(n):
                    v = fma(load(scratch.sums, (i * SHEET + p - sheet) * LANES), s, b)
                    zeros = fma(v, zero, zeros)
                    to = (row + i) * n_out + p * LANES
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
    return sum_lanes(zeros) == 0.0


@njit
def shared_linear(team, linears, number, x, n_rows, then, out, n_out, scratch):
    """
    All panels of linear `number`, shared among the threads; see `linear`. Returns True if x @ w + b is finite in all
    panels that this thread has computed.

    A small linear is divided into one part for each thread, always the same part, which then stays in its core's cache.
    A large one is divided into eight parts for each thread, and a thread that is ready claims the next one: a core that
    also runs other processes is slower for a while. A part is whole sheets.
    """
    at, n_threads = number * N_COLUMNS, team.n_threads
    n_panels, K = linears.table[at + N_PANELS], linears.table[at + N_INPUTS]
    n_sheets = -(-n_panels // SHEET)
    small = n_threads == 1 or n_panels * K * LANES * 4 // inputs_per_vector(linears.panels) < CLAIMED
    n_parts = n_threads if small else min(n_sheets, 8 * n_threads)
    part, finite = team.thread if small else claim(team.claims, number * LINE), True
    while part < n_parts:
        first, end = share(n_sheets, part, n_parts)
        panels = first * SHEET, min(end * SHEET, n_panels)
        finite &= linear(linears, number, panels, x, n_rows, then, out, n_out, scratch)
        part = n_parts if small else claim(team.claims, number * LINE)
    return finite
