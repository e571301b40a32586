"""
A draw without most of lm_head: the logits of the tokens that may be drawn, and -inf for all others.

A step of few rows reads lm_head from memory, which takes a fifth to a third of the time of a small model with a large
vocabulary, and nearly all logits are too small to be drawn. So lm_head is kept in int8 too. Its logits are off by at
most

    |w x - w8 x8| <= |w - w8| |x| + |w8| |x - x8|

for a row w of lm_head (Cauchy and Schwarz), and by rounding. A token is left out if it could not be drawn with its
logit at the upper end of this interval and all others at their lower ends. The logits of the others, a few or some
hundred, are computed from the model's own rows, each in the order of `linears`. So the token that is drawn is the same.

x8 is the sum of two rows in int8, the second one of what the first leaves. Both are multiplied in one pass over the
weights, and what is left of x then hardly matters.
"""
import math

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from decode.kernel import emit, layout, sampling
from decode.kernel.building import CFunction
from decode.kernel.emit import FLOATS, I16, I32, LANES, address, instruction, njit, same
from decode.kernel.layout import GROUP, LINEARS_PER_LAYER, SCALE_GROUP
from decode.kernel.linears import STORE, Linears, Team, prepare_rows, shared_linear
from decode.kernel.pointers import doubles_at, floats_at, longs_at, pointer_like, shorts_at
from decode.kernel.sampling import exponentials, find_peaks, gather, gather_top_k, noise_key, uniform
from decode.kernel.step import thread_scratch
from decode.kernel.threads import barrier, claim
from decode.kernel.vectors import constant, floats, fma, load_until, padded, splat, store, store_until, sum_lanes

INT8 = np.zeros(0, np.int8)
SURELY = 1 - 1e-3  # a weight that is so many times as large is smaller, whatever float32 rounds


@instruction(floats)
def times_rows(builder, rows, tokens, at, n, x, x_at):
    """Lane j: row tokens[at + j] of rows (.., n), float32 or bfloat16, times x[x_at : x_at + n], as a linear has it."""
    element, vector = rows.type.pointee, ir.VectorType(rows.type.pointee, LANES)
    numbers = [emit.load(builder, address(builder, tokens, builder.add(at, at.type(j))), 8) for j in range(LANES)]
    starts = [address(builder, rows, builder.mul(number, n)) for number in numbers]
    total = cgutils.alloca_once_value(builder, same(0.0, FLOATS))
    with cgutils.for_range(builder, n) as loop:
        w = ir.Constant(vector, ir.Undefined)
        for j, start in enumerate(starts):
            of_row = emit.load(builder, address(builder, start, loop.index), emit.bytes_of(element))
            w = builder.insert_element(w, of_row, I32(j))
        of_x = emit.broadcast(builder, emit.load(builder, address(builder, x, builder.add(x_at, loop.index))))
        w = emit.widened(builder, w) if element == I16 else w
        builder.store(emit.fma(builder, w, of_x, builder.load(total)), total)
    return builder.load(total)


@njit
def leave_rest(x, at, end, to, scratch):
    """x[to ...] = what int8 leaves of x[at : end], as `prepare_rows` has rounded it"""
    for i in range(at, end):
        x[to + i - at] = x[i] - scratch.scales[i // SCALE_GROUP] * np.float32(np.int8(scratch.rounded[i]))


@njit
def norm(x, at, n):
    total = 0.0
    for i in range(at, at + n):
        total += np.float64(x[i]) * np.float64(x[i])
    return math.sqrt(total)


@njit
def find_bounds(memory, sizes, r, x, low, high):
    """
    low, high = numbers between which the logits of row r are. x: the rows of the step, and behind them what two rows in
    int8 leave of each.
    """
    V, R, K = sizes[layout.VOCAB_SIZE], sizes[layout.N_WANTED], padded(sizes[layout.N_EMBD], GROUP)
    near, errors = floats_at(memory[layout.SCREEN_LOGITS]), floats_at(memory[layout.SCREEN_ERRORS])
    size, largest = norm(x, r * K, K), floats_at(memory[layout.SCREEN_NORM])[0]
    # a sum of K products is off by at most K / 2 ** 23 of the norms in any order, and there are few other roundings
    rest = largest * (norm(x, (R + r) * K, K) + (K + 64) * 2.0**-23 * size)
    of_error, of_rest = splat(np.float32(size)), splat(np.float32(rest))
    for i in range(0, V, LANES):
        first, second = r * V, (R + r) * V
        v = load_until(near, first + i, first + V) + load_until(near, second + i, second + V)
        off = fma(load_until(errors, i, V), of_error, of_rest)
        store_until(low, i, v - off, V)
        store_until(high, i, v + off, V)


@njit
def gather_by_noise(low, high, n, least, settings, key, own):
    """
    `candidates` where every token may be drawn: those whose weights over their noise may be the largest. Also all whose
    logits may be the largest, which a draw compares the others with: those of `least` and more.
    """
    of_low, of_high = floats_at(own + 8 * n * sampling.WEIGHTS), floats_at(own + 8 * n * sampling.VALUES)
    tokens, ratios = longs_at(own + 8 * n * sampling.TOKENS), doubles_at(own + 8 * n * sampling.MASSES)
    factor, min_p = np.float32(max(1.0 / settings[sampling.TEMPERATURE], 1e-30)), settings[sampling.MIN_P]
    largest = find_peaks(high, n, of_low)
    exponentials(low, n, largest, factor, of_low)
    exponentials(high, n, largest, factor, of_high)
    best, found, kept = 0.0, 0, 0
    for i in range(n):
        u, weight = uniform(key, i), np.float64(of_high[i])
        if weight > best * (1.0 - u) or high[i] >= least:
            noise = -math.log(u)
            tokens[found], ratios[found] = i, weight / noise
            found += 1
            if of_low[i] * SURELY >= min_p:
                best = max(best, of_low[i] / noise * SURELY)
    for i in range(found):
        if ratios[i] >= best or high[tokens[i]] >= least:
            tokens[kept] = tokens[i]
            kept += 1
    return kept


@njit
def candidates(low, high, n, settings, key, own):
    """
    The tokens that may be drawn if their logits are between low and high, into the scratch at `own`. Returns how many.
    """
    peaks, values, masses = (floats_at(own + 8 * n * sampling.WEIGHTS), floats_at(own + 8 * n * sampling.VALUES),
                             floats_at(own + 8 * n * sampling.MASSES))
    tokens, top_k = longs_at(own + 8 * n * sampling.TOKENS), settings[sampling.TOP_K]
    least = find_peaks(low, n, peaks)
    if settings[sampling.TEMPERATURE] > 0.0:
        if top_k == 0:
            return gather_by_noise(low, high, n, least, settings, key, own)
        for i in range(gather_top_k(low, n, peaks, top_k, tokens, values, masses)):
            least = min(least, values[i])
    find_peaks(high, n, peaks)
    return gather(high, n, peaks, least, tokens, values)


@njit
def screen_row(memory, sizes, r, thread, scratch):
    """Write the logits of row r that may be drawn, and -inf for the others. Returns whether they are finite."""
    V, C, K = sizes[layout.VOCAB_SIZE], sizes[layout.N_EMBD], padded(sizes[layout.N_EMBD], GROUP)
    table, x, logits = longs_at(memory[layout.DRAW_DATA]), scratch.normed, floats_at(memory[layout.LOGITS] + 4 * V * r)
    own, n = table[sampling.SCRATCH] + 8 * V * sampling.N_SCRATCH * thread, table[sampling.STRIDE] // V
    low = floats_at(own + 8 * V * sampling.CHANGED)
    high = floats_at(own + 8 * V * sampling.CHANGED + 4 * V)  # there is room for two rows of float32
    find_bounds(memory, sizes, r, x, low, high)
    key = noise_key(longs_at(table[sampling.SEEDS])[r // n], longs_at(table[sampling.NUMBERS])[r // n] + r % n)
    settings = doubles_at(table[sampling.SETTINGS] + 8 * sampling.N_SETTINGS * (r // n))
    found, tokens = candidates(low, high, V, settings, key, own), longs_at(own + 8 * V * sampling.TOKENS)
    for i in range(0, V, LANES):
        store_until(logits, i, constant(-math.inf), V)
    for i in range(found, padded(found, LANES)):
        tokens[i] = tokens[0]  # in lanes that are left
    zero, zeros = constant(0.0), constant(0.0)  # 0 times infinity or NaN makes zeros NaN
    for i in range(0, found, LANES):
        if sizes[layout.EMBEDDINGS] == layout.BFLOAT16:
            v = times_rows(shorts_at(memory[layout.SCREENED_HEAD]), tokens, i, C, x, r * K)
        else:
            v = times_rows(floats_at(memory[layout.SCREENED_HEAD]), tokens, i, C, x, r * K)
        zeros = fma(v, zero, zeros)
        store(scratch.sums, 0, v + zero)
        for j in range(LANES):
            logits[tokens[i + j]] = scratch.sums[j]
    return sum_lanes(zeros) == 0.0


def screen(memory_at, sizes_at, thread, n_threads, _):
    """This thread's part of the logits of a step, whose rows are in its scratch after the last norm."""
    memory, sizes = longs_at(memory_at), longs_at(sizes_at)
    R, V, K = sizes[layout.N_WANTED], sizes[layout.VOCAB_SIZE], padded(sizes[layout.N_EMBD], GROUP)
    scratch, team = thread_scratch(memory, thread, thread), Team(thread, n_threads, longs_at(memory[layout.CLAIMS]))
    linears = Linears(pointer_like(INT8, memory[layout.SCREEN_PANELS]), floats_at(memory[layout.BIAS]),
                      longs_at(memory[layout.SCREEN_LINEARS]))
    x, near = scratch.normed, floats_at(memory[layout.SCREEN_LOGITS])
    prepare_rows(linears.panels, x, (np.int64(0), R), K, scratch)
    leave_rest(x, 0, R * K, R * K, scratch)
    prepare_rows(linears.panels, x, (R, 2 * R), K, scratch)
    leave_rest(x, R * K, 2 * R * K, R * K, scratch)
    finite = shared_linear(team, linears, sizes[layout.N_LAYER] * LINEARS_PER_LAYER, x, 2 * R, STORE, near, V, scratch)
    if not finite:
        claim(sizes, layout.NOT_NUMBERS)
    barrier(longs_at(memory[layout.BARRIER]), n_threads)
    if sizes[layout.NOT_NUMBERS] == 0:
        for r in range(thread, R, n_threads):
            if not screen_row(memory, sizes, r, thread, scratch):
                claim(sizes, layout.NOT_NUMBERS)
    return 0


SCREEN = CFunction(screen)
