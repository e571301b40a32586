"""
A draw without most of lm_head: the logits that may be among the largest of a row, and -inf for all others.

A step of few rows reads lm_head from memory. lm_head is a third of GPT-2's weights, and a larger part of a smaller
model with the same vocabulary. A draw with top_k, or of the largest logit, needs few of its rows. So lm_head is kept in
int8 too. If its row w and x are rounded to w8 and x8, the error of the logit w x is

    |w x - w8 x8| <= |w - w8| |x| + |w8| |x - x8|

(Cauchy and Schwarz), plus rounding errors. Tokens whose logits are surely below the k-th largest are left out. The
logits of the others, some 4 for the largest logit and 500 for top_k=200, are computed from the model's own rows, each
in the order of `linears`. So the same tokens are drawn. If the bounds exclude too few tokens, later steps compute all
logits.

x8 is the sum of two rows in int8, the second one of what the first leaves. Both are multiplied in one pass over the
weights, and what is then left of x hardly matters.
"""
import math

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from decode.kernel import emit, layout, sampling
from decode.kernel.building import CFunction
from decode.kernel.emit import FLOATS, I32, LANES, address, instruction, njit, same
from decode.kernel.layout import GROUP, LINEARS_PER_LAYER, SCALE_GROUP
from decode.kernel.linears import STORE, Linears, Team, prepare_rows, shared_linear
from decode.kernel.pointers import floats_at, longs_at, pointer_like
from decode.kernel.sampling import find_peaks, gather, kth_largest
from decode.kernel.step import thread_scratch
from decode.kernel.threads import barrier, claim
from decode.kernel.vectors import constant, floats, fma, load_until, padded, splat, store, store_until, sum_lanes

INT8 = np.zeros(0, np.int8)


@instruction(floats)
def times_rows(builder, rows, tokens, at, n, x, x_at):
    """Lane j: row tokens[at + j] of rows (.., n), float32, times x[x_at : x_at + n], summed as by a linear."""
    numbers = [emit.load(builder, address(builder, tokens, builder.add(at, at.type(j))), 8) for j in range(LANES)]
    starts = [address(builder, rows, builder.mul(number, n)) for number in numbers]
    total = cgutils.alloca_once_value(builder, same(0.0, FLOATS))
    with cgutils.for_range(builder, n) as loop:
        w = ir.Constant(FLOATS, ir.Undefined)
        for j, start in enumerate(starts):
            w = builder.insert_element(w, emit.load(builder, address(builder, start, loop.index)), I32(j))
        of_x = emit.broadcast(builder, emit.load(builder, address(builder, x, builder.add(x_at, loop.index))))
        builder.store(emit.fma(builder, w, of_x, builder.load(total)), total)
    return builder.load(total)


@njit
def round_twice(w, x, n_rows, K, scratch):
    """
    Prepare n_rows rows of x (.., K), and then the n_rows rows of their rounding errors, for `linear` with weights w.
    The errors that then remain are written to x, after its own rows.
    """
    for i in range(2):
        prepare_rows(w, x, (i * n_rows, (i + 1) * n_rows), K, scratch)
        for j in range(n_rows * K):
            at = i * n_rows * K + j
            x[n_rows * K + j] = x[at] - scratch.scales[at // SCALE_GROUP] * np.float32(np.int8(scratch.rounded[at]))


@njit
def norm(x, at, n):
    total = 0.0
    for i in range(at, at + n):
        total += np.float64(x[i]) * np.float64(x[i])
    return math.sqrt(total)


@njit
def find_bounds(memory, sizes, r, x):
    """
    (low, high): vocab_size numbers each, between which the logits of row r are. x: the rows of the step, and behind
    them what two rows in int8 leave of each.
    """
    V, R, K = sizes[layout.VOCAB_SIZE], sizes[layout.N_WANTED], padded(sizes[layout.N_EMBD], GROUP)
    products, errors = memory[layout.SCREEN_LOGITS], floats_at(memory[layout.SCREEN_ERRORS])
    low, high = floats_at(products + 4 * r * V), floats_at(products + 4 * (R + r) * V)
    norms, size = floats_at(memory[layout.SCREEN_NORMS]), norm(x, r * K, K)
    # Each of the two sums has K products. In any order, rounding changes a sum by at most K / 2 ** 24 times the norms.
    # 64 is added for the roundings of scales and bounds, and `least` for products that are rounded to 0.
    rest, least = norm(x, (R + r) * K, K) + (K + 64) * 2.0**-23 * size, constant(1e-30)
    of_error, of_norm = splat(np.float32(size)), splat(np.float32(rest))
    for i in range(0, V, LANES):
        v = load_until(low, i, V) + load_until(high, i, V)
        off = fma(load_until(errors, i, V), of_error, fma(load_until(norms, i, V), of_norm, least))
        store_until(low, i, v - off, V)
        store_until(high, i, v + off, V)
    return low, high


@njit
def screen_row(memory, sizes, r, n_largest, x, own, sums):
    """
    Write the logits of row r that may be among the n_largest, and -inf for the others. Returns whether these logits are
    finite. own: the address of this thread's scratch for draws. sums: LANES numbers.
    """
    V, C, K = sizes[layout.VOCAB_SIZE], sizes[layout.N_EMBD], padded(sizes[layout.N_EMBD], GROUP)
    peaks, values, masses = (floats_at(own + 8 * V * sampling.WEIGHTS), floats_at(own + 8 * V * sampling.VALUES),
                             floats_at(own + 8 * V * sampling.MASSES))
    tokens, logits = longs_at(own + 8 * V * sampling.TOKENS), floats_at(memory[layout.LOGITS] + 4 * V * r)
    if norm(x, r * K, K) < layout.LARGEST_NORM:
        low, high = find_bounds(memory, sizes, r, x)
        find_peaks(low, V, peaks)
        least = kth_largest(low, V, peaks, n_largest, tokens, values, masses)
        find_peaks(high, V, peaks)
        found = gather(high, V, peaks, least, tokens, values)
    else:
        found = V
        for i in range(V):
            tokens[i] = i
    if found > V // 8:  # scattered rows of lm_head take longer than all of them in order
        sizes[layout.N_LARGEST] = 0
    for i in range(0, V, LANES):
        store_until(logits, i, constant(-math.inf), V)
    for i in range(found, padded(found, LANES)):
        tokens[i] = tokens[0]  # for the lanes that are left
    zero, zeros = constant(0.0), constant(0.0)  # 0 times infinity or NaN makes zeros NaN
    for i in range(0, found, LANES):
        v = times_rows(floats_at(memory[layout.WTE]), tokens, i, C, x, r * K)
        zeros = fma(v, zero, zeros)
        store(sums, 0, v)
        for j in range(LANES):
            logits[tokens[i + j]] = sums[j]
    return sum_lanes(zeros) == 0.0


def screen(memory_at, sizes_at, thread, n_threads, _):
    """This thread's part of the logits of a step, whose rows are in its scratch after the last norm."""
    memory, sizes = longs_at(memory_at), longs_at(sizes_at)
    R, V, K = sizes[layout.N_WANTED], sizes[layout.VOCAB_SIZE], padded(sizes[layout.N_EMBD], GROUP)
    n_largest = sizes[layout.N_LARGEST]
    scratch, team = thread_scratch(memory, thread, thread), Team(thread, n_threads, longs_at(memory[layout.CLAIMS]))
    linears = Linears(pointer_like(INT8, memory[layout.SCREEN_PANELS]), floats_at(memory[layout.BIAS]),
                      longs_at(memory[layout.SCREEN_LINEARS]))
    x, lm_head, own = scratch.normed, sizes[layout.N_LAYER] * LINEARS_PER_LAYER, longs_at(memory[layout.DRAW_DATA])[
        sampling.SCRATCH] + 8 * V * sampling.N_SCRATCH * thread
    round_twice(linears.panels, x, R, K, scratch)
    if not shared_linear(
            team, linears, lm_head, x, 2 * R, STORE, floats_at(memory[layout.SCREEN_LOGITS]), V, scratch):
        claim(sizes, layout.NOT_NUMBERS)
    barrier(longs_at(memory[layout.BARRIER]), n_threads)
    if sizes[layout.NOT_NUMBERS] == 0:
        for r in range(thread, R, n_threads):
            if not screen_row(memory, sizes, r, n_largest, x, own, scratch.sums):
                claim(sizes, layout.NOT_NUMBERS)
    return 0


SCREEN = CFunction(screen)
