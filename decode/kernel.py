"""
One step of a GPT on the CPU: token ids in, logits out, keys and values written where the tuples keep them.

All of it is one function, `gpt_step`, which every thread runs from top to bottom: they share out the heads of
attention and the rows of the weight matrices, and meet at a barrier where one needs what the others made, four
times a layer. A fork and a join for each matmul would cost a small model more than its arithmetic.

Rows are tokens: row b * T + t is sequence b's t-th, and stands at position cache_pos[b] + t.

Weights are packed (`cpu.PackedWeights`) in panels of LANES outputs, so that one register holds what one input is
multiplied with for LANES outputs: no sum across a register is ever taken, and memory is read from front to back. A
panel is

    float32     (K, LANES)             K inputs, padded with zeros to a multiple of GROUP
    bfloat16    (K / 2, LANES, 2)      widened to float32 in registers
    int8        (K / 4, LANES, 4)      one scale for each output; as the dot product instruction wants it

With int8 weights the inputs are rounded to int8 too, GROUP of them to a scale, as llama.cpp does for its Q8_0.
"""
import math
from collections import namedtuple

import numpy as np
from numba import njit, types
from numba.extending import overload

from decode.threads import LINE, RUNNING, SPIN, SPIN_IDLE, STOP, barrier, claim, observe, publish, wait_until, wake
from decode.vectors import (
    LANES,
    absolute,
    add_rows,
    bytes_at,
    constant,
    dot_rows,
    exp,
    first,
    floats_at,
    fma,
    gelu,
    inputs_per_vector,
    ints_at,
    larger,
    load,
    load_first,
    load_ints,
    longs_at,
    max_lanes,
    multiply_tile,
    pointer_like,
    scale_tile,
    shorts_at,
    splat,
    store,
    store_bytes,
    store_first,
    store_tile,
    sum_each,
    sum_lanes,
    total,
    zeros,
)

GROUP = 64  # inputs that share a scale when they are rounded to int8
STORE, ADD, GELU = 0, 1, 2  # what becomes of the outputs of a linear
BAD_TOKEN, NO_ROOM, STALE = 1, 2, 3  # why a step is refused
CLAIMED = 2**20  # bytes of a linear's weights from which on threads take small parts of it in turn

# what the addresses in `memory` lead to, in this order; from OWN on, five of each thread's own
(TOKENS, LOGITS, WTE, WPE, MEETING, CLAIMS, CACHE_POS, CACHES, PACKED, EPS, NORM_WEIGHT, NORM_BIAS, SCALE, BIAS, START, X, Q, KV, Y, FF,
 PROBES, SEEN, OWN) = range(23)

N_THREADS, MEMORY, SIZES = 2, 3, 4  # in line 0 of threads.Workers.post: the step that is posted

# all linears, one after the other: their packed weights, and for each output row a scale (1 but for int8) and a bias;
# start is where the sums of an int8 panel and group begin, in steps of 128
Linears = namedtuple('Linears', 'w scale bias start')


# what a thread has to itself: layer-normed rows, attention weights of a row, sums of a tile, and rows rounded to int8 with their scales
Own = namedtuple('Own', 'normed weights sums rounded scales')


@njit
def padded(n, multiple):
    return -(-n // multiple) * multiple


@njit
def share(n, thread, n_threads):
    """This thread's part of n things, as a range."""
    return n * thread // n_threads, n * (thread + 1) // n_threads


@njit
def layer_norm(x, x_at, weight, bias, at, C, eps, out, out_at):
    """out = the layer norm of C floats of x; weight and bias are padded with zeros."""
    v = constant(0)
    for i in range(0, C, LANES):
        v = v + load(x, x_at + i)
    mean = splat(np.float32(sum_lanes(v) / np.float32(C)))
    v = constant(0)
    for i in range(0, C, LANES):
        d = first(load(x, x_at + i) - mean, C - i)
        v = fma(d, d, v)
    rstd = splat(np.float32(1 / math.sqrt(sum_lanes(v) / C + eps)))
    for i in range(0, C, LANES):
        store(out, out_at + i, fma((load(x, x_at + i) - mean) * rstd, load(weight, at + i), load(bias, at + i)))


@njit
def round_row(x, x_at, K, out, out_at, scales, scale_at):
    """out = K floats of x as uint8, 128 more than the int8 they are rounded to: GROUP to a scale, the largest is 127."""
    spoilt = constant(0)
    for g in range(K // GROUP):
        largest = constant(0)
        for i in range(g * GROUP, (g + 1) * GROUP, LANES):
            v = load(x, x_at + i)
            largest, spoilt = larger(absolute(v), largest), fma(v, constant(0), spoilt)
        peak = max_lanes(largest)
        scales[scale_at + g] = peak / np.float32(127)
        to_whole = splat(np.float32(127) / peak if peak > 0 else np.float32(0))
        for i in range(g * GROUP, (g + 1) * GROUP, LANES):
            store_bytes(out, out_at + i, load(x, x_at + i) * to_whole)
    scales[scale_at] += sum_lanes(spoilt)  # no int8 is a NaN, so a scale has to be


def tile(n_rows, n):
    """The function for one panel's outputs of n_rows rows of x, every `step` from `row`; n vectors of weights at a time."""
    @njit
    def multiply(w, w_at, K, start, x, row, step, own):
        sums = zeros(n_rows, n)  # while it works on one panel, the next is fetched
        for k in range(0, K, n * inputs_per_vector(w)):
            sums = multiply_tile(sums, w, w_at + k * LANES, x, row * K + k, step * K, n_rows, K * LANES)
        store_tile(sums, own.sums, 0, LANES, n_rows)
    return multiply


def int8_tile(n_rows, n):
    """The same for int8 weights, with the inputs as round_row has left them."""
    @njit
    def multiply(w, w_at, K, start, x, row, step, own):
        totals = zeros(n_rows, 1)
        for g in range(K // GROUP):
            # the inputs are 128 too large, so the sums start at -128 times the sum of the weights
            sums = load_ints(n_rows, n, start, w_at // GROUP + g * LANES)
            for k in range(g * GROUP, (g + 1) * GROUP, n * inputs_per_vector(w)):
                sums = multiply_tile(sums, w, w_at + k * LANES, own.rounded, row * K + k, step * K, n_rows, K * LANES)
            totals = scale_tile(totals, sums, own.scales, row * (K // GROUP) + g, step * (K // GROUP))
        store_tile(totals, own.sums, 0, LANES, n_rows)
    return multiply


def largest_of(tile, n):
    """The function for any number of rows, in tiles of 8, 4, 2 and 1, with n sums under way at least (or a row's one)."""
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
def round_rows(w, x, rows, K, own):
    first_row, step, n_rows = rows
    for r in range(first_row, first_row + n_rows * step, step):
        round_row(x, r * K, K, own.rounded, r * K, own.scales, r * (K // GROUP))


@njit
def leave_rows(w, x, rows, K, own):
    pass


def of_weights(for_floats, for_int8):
    """One function out of two, chosen by the type of its argument w when it is compiled."""
    def either(w, *args):
        pass

    @overload(either)
    def choose(w, *args):
        chosen = for_int8 if w.dtype == types.int8 else for_floats
        return lambda w, *args: chosen(w, *args)
    return either


prepare_rows = of_weights(leave_rows, round_rows)
# eight sums hide the latency of an fma. Of int8 they would be too much of a good thing: reading half a kilobyte at a stride,
# the processor's prefetcher loses the thread, and a model larger than its caches is read at 10 GB/s instead of 26
multiply = of_weights(largest_of(tile, 8), largest_of(int8_tile, 2))


@njit
def linear(linears, w_at, panel, K, mine, x, rows, then, out, out_stride, n_out, own):
    """
    Panels `mine` = (from, to) of the linear whose weights begin at w_at, and its panels at number `panel` of all, for
    rows = (first, step, how many) of x, K inputs each and as prepare_rows has left them. The n_out outputs of a row
    go to the same row of out, and are stored, added to what is there, or stored after a GELU.
    """
    w, (first_row, step, n_rows) = linears.w, rows
    for p in range(mine[0], mine[1]):
        at, row_at = w_at + p * K * LANES, (panel + p) * LANES
        s, b = load(linears.scale, row_at), load(linears.bias, row_at)
        done = 0
        while done < n_rows:
            row = first_row + done * step
            n = multiply(w, n_rows - done, at, K, linears.start, x, row, step, own)
            for i in range(n):
                v, to = fma(load(own.sums, i * LANES), s, b), (row + i * step) * out_stride + p * LANES
                if then == ADD:
                    store(out, to, load(out, to) + v)
                elif then == GELU:
                    store(out, to, gelu(v))
                elif (p + 1) * LANES <= n_out:
                    store(out, to, v)
                else:
                    store_first(out, to, v, n_out - p * LANES)
            done += n


@njit
def shared_linear(thread, n_threads, claims, number, linears, w_at, panel, K, n_panels, x, rows, then, out, out_stride, n_out, own):
    """
    All n_panels of linear number `number`, shared among the threads.

    Of a small one each takes its part, always the same, which then is in its core's cache. Of a large one they take
    eighths of a part, whoever is ready first: on a machine with other work to do, a core is slower than the other for
    a while.
    """
    small = n_threads == 1 or n_panels * K * LANES * 4 // inputs_per_vector(linears.w) < CLAIMED
    n_parts = n_threads if small else 8 * n_threads
    part = thread if small else claim(claims, number * LINE)
    while part < n_parts:
        linear(linears, w_at, panel, K, share(n_panels, part, n_parts), x, rows, then, out, out_stride, n_out, own)
        part = n_parts if small else claim(claims, number * LINE)


@njit
def attend(q, q_at, k, v, at, n_keys, head_dim, weights, out, out_at):
    """One query against n_keys keys and values at `at`, (n_keys, head_dim) each: softmax(q k / sqrt(head_dim)) v."""
    scale = np.float32(1 / math.sqrt(head_dim))
    t = 0
    if head_dim % LANES == 0:
        while t + LANES <= n_keys:  # the scores of LANES keys, one in each lane
            sums = zeros(LANES, 1)
            for i in range(0, head_dim, LANES):
                sums = dot_rows(sums, k, at + t * head_dim + i, head_dim, load(q, q_at + i))
            store(weights, t, sum_each(sums) * splat(scale))
            t += LANES
    store(weights, n_keys, constant(-math.inf))  # what the last vector of scores has beyond them weighs nothing
    while t < n_keys:
        s = constant(0)
        for i in range(0, head_dim, LANES):
            s = fma(load_first(k, at + t * head_dim + i, head_dim - i), load(q, q_at + i), s)
        weights[t] = sum_lanes(s) * scale
        t += 1

    peak = constant(-math.inf)
    for t in range(0, n_keys, LANES):
        peak = larger(load(weights, t), peak)
    top, sums = splat(max_lanes(peak)), constant(0)
    for t in range(0, n_keys, LANES):
        e = exp(load(weights, t) - top)
        store(weights, t, e)
        sums = sums + e
    norm = splat(np.float32(1) / sum_lanes(sums))

    for i in range(0, head_dim, LANES):
        if i + LANES <= head_dim:
            eight, t = zeros(8, 1), 0
            while t + 8 <= n_keys:
                eight = add_rows(eight, v, at + t * head_dim + i, head_dim, weights, t)
                t += 8
            s = total(eight)
            while t < n_keys:
                s = fma(load(v, at + t * head_dim + i), splat(weights[t]), s)
                t += 1
            store(out, out_at + i, s * norm)
        else:
            s = constant(0)
            for t in range(n_keys):
                s = fma(load_first(v, at + t * head_dim + i, head_dim - i), splat(weights[t]), s)
            store_first(out, out_at + i, s * norm, head_dim - i)


@njit
def gpt_step(thread, n_threads, like, memory, sizes):
    """What thread number `thread` of n_threads does of one step; see the top of this file, and `steps`."""
    n_layer, n_head, head_dim, C, block_size, vocab_size = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
    B, T, want_logits = sizes[6], sizes[7], sizes[8]
    tokens, cache_pos, caches, meeting = longs_at(memory[TOKENS]), longs_at(memory[CACHE_POS]), longs_at(memory[CACHES]), longs_at(memory[MEETING])
    logits, wte, wpe = floats_at(memory[LOGITS]), floats_at(memory[WTE]), floats_at(memory[WPE])
    norm_weight, norm_bias = floats_at(memory[NORM_WEIGHT]), floats_at(memory[NORM_BIAS])
    linears = Linears(pointer_like(like, memory[PACKED]), floats_at(memory[SCALE]), floats_at(memory[BIAS]), shorts_at(memory[START]))
    x, q, kv, y, ff = floats_at(memory[X]), floats_at(memory[Q]), floats_at(memory[KV]), floats_at(memory[Y]), floats_at(memory[FF])
    mine, eps = OWN + 5 * thread, floats_at(memory[EPS])[0]
    own = Own(floats_at(memory[mine]), floats_at(memory[mine + 1]), floats_at(memory[mine + 2]), bytes_at(memory[mine + 3]),
              floats_at(memory[mine + 4]))

    rows, first_head, last_head = B * T, n_head * thread // n_threads, n_head * (thread + 1) // n_threads
    C_p, ff_p, head_p = padded(C, GROUP), padded(4 * C, GROUP), padded(head_dim, LANES)
    q_stride, kv_stride = n_head * head_p, 2 * n_head * head_p
    panels_a_head, panels_C, panels_ff = head_p // LANES, padded(C, LANES) // LANES, padded(4 * C, LANES) // LANES
    my_q, my_kv = (first_head * panels_a_head, last_head * panels_a_head), (2 * first_head * panels_a_head, 2 * last_head * panels_a_head)
    claims = longs_at(memory[CLAIMS])
    w_at = panel = number = 0
    if thread == 0:
        for i in range(3 * n_layer + 1):
            claims[i * LINE] = 0

    for r in range(rows * thread // n_threads, rows * (thread + 1) // n_threads):
        token_at, pos_at = tokens[r] * C, (cache_pos[r // T] + r % T) * C
        for i in range(0, C, LANES):
            # zeros beyond C as well: a NaN of an earlier step must not stay there
            store(x, r * C_p + i, load_first(wte, token_at + i, C - i) + load_first(wpe, pos_at + i, C - i))
    barrier(meeting, n_threads)

    for layer in range(n_layer):
        k_cache, v_cache = floats_at(caches[2 * layer]), floats_at(caches[2 * layer + 1])
        for r in range(rows):
            layer_norm(x, r * C_p, norm_weight, norm_bias, 2 * layer * C_p, C, eps, own.normed, r * C_p)
        # of the last layer nobody wants more than each sequence's last position, or nothing; the keys and values, all of them
        last = layer == n_layer - 1
        start, step = (T - 1, T) if last else (0, 1)
        every, wanted = (0, 1, rows), (start, step, B * want_logits if last else rows)
        prepare_rows(linears.w, own.normed, every, C_p, own)
        linear(linears, w_at, panel, C_p, my_q, own.normed, wanted, STORE, q, q_stride, q_stride, own)
        w_at, panel = w_at + n_head * panels_a_head * C_p * LANES, panel + n_head * panels_a_head
        linear(linears, w_at, panel, C_p, my_kv, own.normed, every, STORE, kv, kv_stride, kv_stride, own)
        w_at, panel = w_at + 2 * n_head * panels_a_head * C_p * LANES, panel + 2 * n_head * panels_a_head
        for b in range(B):
            for h in range(first_head, last_head):
                at = (b * n_head + h) * block_size * head_dim
                for t in range(T):
                    slot, new = at + (cache_pos[b] + t) * head_dim, (b * T + t) * kv_stride + 2 * h * head_p
                    for i in range(0, head_dim, LANES):
                        store_first(k_cache, slot + i, load(kv, new + i), head_dim - i)
                        store_first(v_cache, slot + i, load(kv, new + head_p + i), head_dim - i)
                if last and not want_logits:
                    continue
                for t in range(start, T):
                    r = b * T + t
                    attend(q, r * q_stride + h * head_p, k_cache, v_cache, at, cache_pos[b] + t + 1, head_dim,
                           own.weights, y, r * C_p + h * head_dim)
        if last and not want_logits:
            return
        barrier(meeting, n_threads)

        prepare_rows(linears.w, y, wanted, C_p, own)
        shared_linear(thread, n_threads, claims, number, linears, w_at, panel, C_p, panels_C, y, wanted, ADD, x, C_p, C_p, own)
        w_at, panel, number = w_at + panels_C * C_p * LANES, panel + panels_C, number + 1
        barrier(meeting, n_threads)

        for r in range(start, rows, step):
            layer_norm(x, r * C_p, norm_weight, norm_bias, (2 * layer + 1) * C_p, C, eps, own.normed, r * C_p)
        prepare_rows(linears.w, own.normed, wanted, C_p, own)
        shared_linear(thread, n_threads, claims, number, linears, w_at, panel, C_p, panels_ff, own.normed, wanted, GELU, ff, ff_p, ff_p, own)
        w_at, panel, number = w_at + panels_ff * C_p * LANES, panel + panels_ff, number + 1
        barrier(meeting, n_threads)

        prepare_rows(linears.w, ff, wanted, ff_p, own)
        shared_linear(thread, n_threads, claims, number, linears, w_at, panel, ff_p, panels_C, ff, wanted, ADD, x, C_p, C_p, own)
        w_at, panel, number = w_at + panels_C * ff_p * LANES, panel + panels_C, number + 1
        barrier(meeting, n_threads)

    for b in range(B):
        layer_norm(x, (b * T + T - 1) * C_p, norm_weight, norm_bias, 2 * n_layer * C_p, C, eps, own.normed, b * C_p)
    ends = 0, 1, B
    prepare_rows(linears.w, own.normed, ends, C_p, own)
    shared_linear(thread, n_threads, claims, number, linears, w_at, panel, C_p, padded(vocab_size, LANES) // LANES, own.normed, ends,
                  STORE, logits, vocab_size, vocab_size, own)


@njit
def refusal(memory, sizes):
    """Why the step cannot be taken: STALE weights, a BAD_TOKEN or NO_ROOM in the cache; otherwise 0."""
    block_size, vocab_size, B, T, n_probes = sizes[4], sizes[5], sizes[6], sizes[7], sizes[9]
    tokens, cache_pos, probes, seen = longs_at(memory[TOKENS]), longs_at(memory[CACHE_POS]), longs_at(memory[PROBES]), ints_at(memory[SEEN])
    for i in range(n_probes):
        if ints_at(probes[i])[0] != seen[i]:
            return STALE
    for r in range(B * T):
        if not 0 <= tokens[r] < vocab_size:
            return BAD_TOKEN
    for b in range(B):
        if not 0 <= cache_pos[b] <= block_size - T:
            return NO_ROOM
    return 0


def steps(sources):
    """
    The compiled functions (run, loop) for weights of the type of `like`, an array of float32, uint16 (bfloat16) or
    int8.

    run(like, memory, sizes, n_threads, post): one step on the caller's thread and n_threads - 1 `Workers` of
    loop(like, post, thread). memory: the int64 address of a table of addresses, TOKENS to OWN. sizes: that of int64
    (n_layer, n_head, head_dim, n_embd, block_size, vocab_size, B, T, want_logits, n_probes). post: that of the
    workers' lines. A step writes the keys and values of its B * T positions, and the logits (B, vocab_size) of each
    sequence's last if they are wanted. Returns 0, or why nothing was done, see `refusal`. The bits of the result do
    not depend on n_threads: each number is computed by one thread.

    Compiled code is kept on disk. sources is a part of its key, so that a change to any file of ours compiles it anew.
    """
    @njit
    def run(like, memory_at, sizes_at, n_threads, post_at):
        sources  # noqa: B018
        memory, sizes, post = longs_at(memory_at), longs_at(sizes_at), longs_at(post_at)
        refused = refusal(memory, sizes)
        if refused != 0:
            return refused
        if n_threads > 1:
            longs_at(memory[MEETING])[0] = 0
            publish(post, 0, 0)
            post[N_THREADS], post[MEMORY], post[SIZES] = n_threads, memory_at, sizes_at
            for thread in range(1, n_threads):
                mine = longs_at(post_at + thread * LINE * 8)
                claim(mine, 0)
                wake(mine)
        gpt_step(0, n_threads, like, memory, sizes)
        if n_threads > 1:
            wait_until(post, n_threads - 1, SPIN)
        return refused

    @njit(nogil=True)
    def loop(like, post_at, thread, seen):
        sources  # noqa: B018
        post, mine = longs_at(post_at), longs_at(post_at + thread * LINE * 8)
        if claim(mine, RUNNING) != 0:
            return
        while True:
            seen += 1
            wait_until(mine, seen, SPIN_IDLE)
            if observe(mine, STOP):
                return
            gpt_step(thread, post[N_THREADS], like, longs_at(post[MEMORY]), longs_at(post[SIZES]))
            claim(post, 0)
            wake(post)

    return run, loop
