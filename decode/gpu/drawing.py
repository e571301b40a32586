"""
The next token of each row of a step, drawn on the GPU from its logits: two Triton kernels, launched by `draw`.

The meaning is that of `decode.draw.draw`: the largest of weight / noise. A program reads a row BLOCK numbers at a time,
a few times if top_k or top_p is set, and never sorts it. The order of all sums depends on vocab_size only. Some
programs share a row, if rows are few: each finds what is kept, and makes the noise of some blocks; the one that ends
last takes the largest.

A logit is found by halving an interval of `rank`s, whole numbers in the order of the numbers of float32, so what top_k
and top_p keep is exact. To halve it 32 times without reading the row 32 times, a program holds the four largest logits
of each of BLOCK lanes: lane l has the tokens l, l + BLOCK, ... The logits it does not hold are mostly much too small.
"""
import torch
import triton
import triton.language as tl

from decode.gpu import tables
from decode.gpu.ordering import is_last, overlap, wait

TEMPERATURE, TOP_K, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION, BIASED, N_SETTINGS = map(
    tl.constexpr, range(tables.N_SETTINGS + 1))
IS_STOP, IN_PROMPT, NOTHING, BROKEN, STOPS = map(tl.constexpr, (
    tables.IS_STOP, tables.IN_PROMPT, tables.NOTHING, tables.BROKEN, tables.STOPS))
PART = 1024  # logits that a program of `change_kernel` reads, and of which it finds the largest
BLOCK, WARPS = 4096, 16  # tokens that a program of `draw_kernel` reads at a time, or fewer of a small vocabulary
PROGRAMS = 128  # of `draw_kernel`, at least, if the vocabulary has so many blocks
MOST_PROGRAMS = tl.constexpr(16)  # of these, for one row
UNROLL = tl.constexpr(4)  # so many times, if it need not wait in between: one program alone has to hide its latency
INFINITY, GOLDEN = tl.constexpr(float('inf')), tl.constexpr(0x9E3779B97F4A7C15)


def draw(logits, inputs, ended):
    """
    Draw the next tokens from logits, float32 (R, vocab_size), which are changed. Then each row's token, position,
    number and mark in the `StepInputs` go on; a row that ends becomes padding. ended: of a `step.Step`.
    """
    (R, V), i, early = logits.shape, inputs, overlap(logits)
    most = logits.new_empty(R, triton.cdiv(V, PART))
    change_kernel[most.shape](
        logits, i.settings, i.numbers, i.left, i.min_tokens, i.sequences, i.biases, i.marks, i.broken, most, V, PART,
        **early, num_warps=4, enable_fp_fusion=False)
    block = min(BLOCK, max(64, triton.next_power_of_2(V)))
    n_programs = min(triton.cdiv(V, block), triton.cdiv(PROGRAMS, R), MOST_PROGRAMS.value)
    scores, found = (logits.new_empty(R, MOST_PROGRAMS.value, dtype=dtype) for dtype in (torch.float64, torch.int32))
    draw_kernel[R, n_programs](
        logits, i.settings, i.seeds, i.numbers, i.left, i.broken, i.marks, i.drawn, i.drawn.stride(0), i.step, i.tokens,
        i.positions, i.sequences, most, scores, found, ended, V, PART, block, **early,
        num_warps=min(WARPS, block // 32), enable_fp_fusion=False)


@triton.jit
def change_kernel(logits, settings, numbers, left, min_tokens, sequences, biases, marks, broken, most, V: tl.constexpr,
                  BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """
    Apply biases, min_tokens and penalties to BLOCK logits of a row, in place, in this order. Note broken ones, and in
    `most` the largest.
    """
    wait(OVERLAP)
    row, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tl.where(tl.load(left + row) > 0, V, 0)  # nothing of a row that has ended
    at, of_sequence = row.to(tl.int64) * V + i, tl.load(sequences + row).to(tl.int64) * V + i
    v = tl.load(logits + at, inside, other=0.0)
    # Several programs may write the same 1. No program of this launch reads it
    tl.store(broken + row, 1, tl.max((v < INFINITY).to(tl.int32) ^ 1, 0) > 0)

    settings += row * N_SETTINGS
    presence, frequency = tl.load(settings + PRESENCE).to(tl.float32), tl.load(settings + FREQUENCY).to(tl.float32)
    repetition = tl.load(settings + REPETITION).to(tl.float32)
    is_biased, has_penalty = tl.load(settings + BIASED) != 0, (presence != 0) | (frequency != 0) | (repetition != 1)
    may_not_stop = tl.load(numbers + row) < tl.load(min_tokens + row)
    if is_biased:
        v += tl.load(biases + of_sequence, inside, other=0.0)
    if has_penalty | may_not_stop:
        mark = tl.load(marks + of_sequence, inside, other=0)
        v = tl.where(may_not_stop & ((mark & IS_STOP) != 0), -INFINITY, v)
        if has_penalty:
            count, in_prompt = mark & (IS_STOP - 1), (mark & IN_PROMPT) != 0
            repeated = tl.where(v > 0, tl.div_rn(v, tl.zeros_like(v) + repetition), v * repetition)
            v = tl.where(in_prompt | (count > 0), repeated, v)
            v -= tl.where(count > 0, frequency * count + presence, 0.0)
    if is_biased | has_penalty | may_not_stop:
        tl.store(logits + at, v, inside)
    largest = tl.max(tl.where(inside & (v == v), v, -INFINITY), 0)
    tl.store(most + row * tl.num_programs(1) + tl.program_id(1), largest)


@triton.jit
def draw_kernel(logits, settings, seeds, numbers, left, broken, marks, drawn, drawn_stride, step, tokens, positions,
                sequences, most, scores, found, ended, V: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
                OVERLAP: tl.constexpr):
    """
    Find the token of one row among the blocks of this program. The program of the row that ends last takes the best
    one, and writes it and the state of the row's next step.
    """
    wait(OVERLAP)
    row, n_programs = tl.program_id(0), tl.num_programs(1)
    may_draw, number = tl.load(left + row), tl.load(numbers + row)
    score, token = tl.full((), 0.0, tl.float64), tl.full((), 0, tl.int32)
    if may_draw > 0:
        # the hash of the seed and of the token's number, as in `exponential_noise` of decode/draw.py
        key = mixed(mixed(tl.load(seeds + row).to(tl.uint64) + GOLDEN) + (number + 1).to(tl.uint64) * GOLDEN)
        N_PARTS: tl.constexpr = (V + PART - 1) // PART
        part = tl.arange(0, triton.next_power_of_2(N_PARTS))
        largest = tl.max(tl.load(most + row * N_PARTS + part, part < N_PARTS, -INFINITY), 0)
        score, token = token_of(logits + row.to(tl.int64) * V, settings + row * N_SETTINGS, largest, key, V, BLOCK)
    if n_programs > 1:
        tl.store(scores + row * MOST_PROGRAMS + tl.program_id(1), score)
        tl.store(found + row * MOST_PROGRAMS + tl.program_id(1), token)
    if is_last(ended + row, n_programs):
        if n_programs > 1:
            i = tl.arange(0, MOST_PROGRAMS)
            all_scores = tl.load(scores + row * MOST_PROGRAMS + i, i < n_programs, -1.0)
            all_tokens = tl.load(found + row * MOST_PROGRAMS + i, i < n_programs, V)
            token = tl.min(tl.where(all_scores == tl.max(all_scores, 0), all_tokens, V), 0)
        at_step = tl.load(step + row)
        result = drawn + at_step.to(tl.int64) * drawn_stride + row
        if may_draw > 0:
            mark, position = marks + tl.load(sequences + row).to(tl.int64) * V + token, positions + row
            old_mark, new_position, is_broken = tl.load(mark), tl.load(position) + 1, tl.load(broken + row) != 0
            stops = (old_mark & IS_STOP) != 0
            may_draw = tl.where(stops, 0, may_draw - 1)
            tl.debug_barrier()  # all warps have read the state that one of them writes now
            tl.store(result, tl.where(is_broken, BROKEN, token.to(tl.int64) + tl.where(stops, STOPS, 0)))
            tl.store(numbers + row, number + 1)
            tl.store(mark, old_mark + 1)
            tl.store(tokens + row, token.to(tl.int64))
            tl.store(position, new_position)
            tl.store(left + row, may_draw)
            tl.store(sequences + row, -1, may_draw == 0)
        else:
            tl.store(result, tl.full((), NOTHING, tl.int64))
        tl.debug_barrier()
        tl.store(step + row, at_step + 1)


@triton.jit
def mixed(x):
    """The finaliser of splitmix64, of a uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def token_of(row, settings, largest, key, V: tl.constexpr, BLOCK: tl.constexpr):
    """(score, token) that the settings and the noise of this key draw from the blocks of this program."""
    temperature, top_k = tl.load(settings + TEMPERATURE), tl.load(settings + TOP_K)
    top_p, min_p = tl.load(settings + TOP_P), tl.load(settings + MIN_P).to(tl.float32)
    if (temperature == 0) | (tl.abs(largest) == INFINITY):  # a penalty can make a logit infinite
        score, token = first_equal(row, largest, V, BLOCK)
    else:
        factor = tl.maximum(1.0 / temperature, 1e-30).to(tl.float32)
        low, last_equal = tl.full((), -INFINITY, tl.float32), tl.full((), V, tl.int32)
        has_top_k = (top_k > 0) & (top_k < V)
        if has_top_k | (top_p < 1):
            few = largest_of_lanes(row, V, BLOCK)
            if has_top_k:
                low = threshold(row, few, (largest, 0.0, 0.0, low, V), top_k, V, BLOCK)
            if top_p < 1:
                kept = largest, factor, min_p, low, V
                target = top_p * weight_of(row, kept, V, BLOCK)
                low = threshold(row, few, kept, target, V, BLOCK)
                above = weight_of(row, (largest, factor, min_p, number_at(rank(low) + 1), V), V, BLOCK)
                of_each = weigh(low, 0, kept).to(tl.float64)
                n_equal = tl.maximum(tl.ceil((target - above) / of_each), 1.0)  # so many that are equal to low are kept
                last_equal = nth_equal(row, low, n_equal, V, BLOCK)
        score, token = largest_over_noise(row, (largest, factor, min_p, low, last_equal), key, V, BLOCK)
    return score, token


@triton.jit
def read(row, start, V: tl.constexpr, BLOCK: tl.constexpr):
    """(indices, logits) of BLOCK tokens; -inf beyond the end, and where they are not numbers."""
    i = start + tl.arange(0, BLOCK)
    v = tl.load(row + i, i < V, other=-INFINITY)
    return i, tl.where(v == v, v, -INFINITY)


@triton.jit
def weigh(v, i, how):
    """
    The weights of logits v with indices i: e ** ((v - largest) * factor), but 0 if that is below e ** -87 or min_p, or
    if v is less than low, or if it is equal to low and i is more than last_equal. how: these five.
    """
    largest, factor, min_p, low, last_equal = how
    x = (v - largest) * factor
    weights = tl.where(x < -87.0, 0.0, tl.exp(x))
    kept = (v >= low) & ((v > low) | (i <= last_equal)) & (weights >= min_p)
    return tl.where(kept & (v > -INFINITY), weights, 0.0)


@triton.jit
def largest_of_lanes(row, V: tl.constexpr, BLOCK: tl.constexpr):
    """The four largest logits of each lane, in descending order: four times (BLOCK,)."""
    a = tl.full((BLOCK,), -INFINITY, tl.float32)
    b, c, d = a, a, a
    for start in tl.range(0, V, BLOCK, loop_unroll_factor=UNROLL):
        i, v = read(row, start, V, BLOCK)
        a, v = tl.maximum(a, v), tl.minimum(a, v)
        b, v = tl.maximum(b, v), tl.minimum(b, v)
        c, v = tl.maximum(c, v), tl.minimum(c, v)
        d = tl.maximum(d, v)
    return a, b, c, d


@triton.jit
def weight_of(row, how, V: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of a row's weights, float64: sums of lanes in float32, and of these in float64."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, V, BLOCK, loop_unroll_factor=UNROLL):
        i, v = read(row, start, V, BLOCK)
        sums += weigh(v, i, how)
    return tl.sum(sums.to(tl.float64), 0)


@triton.jit
def rank(v):
    """The place of a float32 in the order of its numbers: an int64, which fits into 32 bits. -0 has that of 0."""
    bits = (v + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def number_at(rank):
    """The float32 that has this rank."""
    bits = rank.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def threshold(row, few, how, target, V: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit for which those from it up have the weight `target`, or low. few: of `largest_of_lanes`."""
    a, b, c, d = few
    of_a, of_b, of_c, of_d = weigh(a, 0, how), weigh(b, 0, how), weigh(c, 0, how), weigh(d, 0, how)
    largest, factor, min_p, lowest, last_equal = how
    low, high = rank(lowest), rank(largest)
    while low < high:  # the threshold is at least low, and at most high
        middle = high - (high - low) // 2
        level = number_at(middle)
        weights = tl.where(a >= level, of_a, 0.0) + tl.where(b >= level, of_b, 0.0)
        weights += tl.where(c >= level, of_c, 0.0) + tl.where(d >= level, of_d, 0.0)
        is_enough = tl.sum(weights.to(tl.float64), 0) >= target
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle - 1)
    # The few contain every logit above the largest d. So the threshold of the few is that of all if it is above this d;
    # otherwise it is a lower bound, and the search goes on over the whole row
    high = rank(tl.max(d, 0))
    while low < high:
        middle = high - (high - low) // 2
        weight = weight_of(row, (largest, factor, min_p, number_at(middle), V), V, BLOCK)
        low, high = tl.where(weight >= target, middle, low), tl.where(weight >= target, high, middle - 1)
    return number_at(low)


@triton.jit
def nth_equal(row, level, n, V: tl.constexpr, BLOCK: tl.constexpr):
    """The index of the n-th logit that is equal to level; that of the last one if there are fewer."""
    last, before = 0, 0
    for start in range(0, V, BLOCK):
        i, v = read(row, start, V, BLOCK)
        if tl.max((v == level).to(tl.int32), 0) > 0:
            numbers = before + tl.cumsum((v == level).to(tl.int32), 0)
            last = tl.maximum(last, tl.max(tl.where((v == level) & (numbers <= n), i, 0), 0))
            before = tl.max(numbers, 0)
    return last


@triton.jit
def first_equal(row, level, V: tl.constexpr, BLOCK: tl.constexpr):
    """(1.0, index) of the first logit of this program's blocks that is equal to level; (0.0, V) if there is none."""
    token = tl.full((), V, tl.int32)
    for start in range(tl.program_id(1) * BLOCK, V, tl.num_programs(1) * BLOCK):
        i, v = read(row, start, V, BLOCK)
        token = tl.minimum(token, tl.min(tl.where(v == level, i, V), 0))
    return (token < V).to(tl.float64), token


@triton.jit
def largest_over_noise(row, how, key, V: tl.constexpr, BLOCK: tl.constexpr):
    """
    (score, token) of this program's blocks: the first token whose weight over its noise, -log(u), is largest. The noise
    is at least 1 - u, and a block whose weights over that are all too small needs no logarithms.
    """
    largest, token = tl.full((), 0.0, tl.float64), tl.full((), 0, tl.int32)
    for start in range(tl.program_id(1) * BLOCK, V, tl.num_programs(1) * BLOCK):
        i, v = read(row, start, V, BLOCK)
        bits = mixed(key + (i + 1).to(tl.uint64) * GOLDEN) >> 12
        weights, u = weigh(v, i, how).to(tl.float64), (bits.to(tl.float64) + 0.5) * 2.0**-52  # between 0 and 1
        is_near = weights > largest * (1.0 - u)
        if tl.max(is_near.to(tl.int32), 0) > 0:
            scores = tl.where(is_near, weights / -tl.log(u), 0.0)
            score = tl.max(scores, 0)
            token = tl.where(score > largest, tl.min(tl.where(scores == score, i, V), 0), token)
            largest = tl.maximum(largest, score)
    return largest, token
