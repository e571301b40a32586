"""Attention over the tuple cache and layer norm, as the compiled step computes them, one row at a time."""
import math
from collections import namedtuple

import numpy as np
from numba import njit

from decode.layout import BATCH, BLOCK_SIZE, GROUP, HEAD_DIM, N_EMBD, N_HEAD, NEW_TOKENS, padded
from decode.tiles import add_rows, dot_rows, sum_each, total, zeros
from decode.vectors import (
    LANES,
    constant,
    exp,
    first,
    fma,
    larger,
    load,
    load_first,
    max_lanes,
    splat,
    store,
    store_first,
    sum_lanes,
)

# the weights and biases of all layer norms, one after the other, each padded with zeros to a multiple of GROUP
Norms = namedtuple('Norms', 'weight bias eps')


@njit
def layer_norm(x, x_at, norms, number, C, out, out_at):
    """out = layer norm `number` of C floats of x, followed by zeros up to a multiple of LANES."""
    at = number * padded(C, GROUP)
    v = constant(0)
    for i in range(0, C, LANES):
        v = v + load(x, x_at + i)
    mean = splat(np.float32(sum_lanes(v) / np.float32(C)))
    v = constant(0)
    for i in range(0, C, LANES):
        d = first(load(x, x_at + i) - mean, C - i)
        v = fma(d, d, v)
    rstd = splat(np.float32(1 / math.sqrt(sum_lanes(v) / C + norms.eps)))
    for i in range(0, C, LANES):
        normed = (load(x, x_at + i) - mean) * rstd
        store(out, out_at + i, fma(normed, load(norms.weight, at + i), load(norms.bias, at + i)))


@njit
def attention(q, kv, k_cache, v_cache, cache_pos, sizes, heads, first_query, y, scratch):
    """
    Write the new keys and values of heads = (from, to) to the cache, and attend with the queries of these heads.

    q: (rows, n_head, head_dim padded to LANES). kv: (rows, n_head, 2, the same), a head's keys and values.
    first_query: the first of the T new tokens whose queries attend; T for none.
    """
    n_head, head_dim, block_size, B, T = (
        sizes[N_HEAD], sizes[HEAD_DIM], sizes[BLOCK_SIZE], sizes[BATCH], sizes[NEW_TOKENS])
    C_p, head_p = padded(sizes[N_EMBD], GROUP), padded(head_dim, LANES)
    for b in range(B):
        for h in range(heads[0], heads[1]):
            at = (b * n_head + h) * block_size * head_dim
            for t in range(T):
                slot, new = at + (cache_pos[b] + t) * head_dim, ((b * T + t) * n_head + h) * 2 * head_p
                for i in range(0, head_dim, LANES):
                    store_first(k_cache, slot + i, load(kv, new + i), head_dim - i)
                    store_first(v_cache, slot + i, load(kv, new + head_p + i), head_dim - i)
            for t in range(first_query, T):
                r = b * T + t
                attend(q, (r * n_head + h) * head_p, k_cache, v_cache, at, cache_pos[b] + t + 1, head_dim,
                       scratch.scores, y, r * C_p + h * head_dim)


@njit
def attend(q, q_at, k, v, at, n_keys, head_dim, scores, out, out_at):
    """One query against n_keys keys and values at `at`, (n_keys, head_dim) each: softmax(q k / sqrt(head_dim)) v."""
    scale = np.float32(1 / math.sqrt(head_dim))
    t = 0
    if head_dim % LANES == 0:
        while t + LANES <= n_keys:  # the scores of LANES keys, one in each lane
            sums = zeros(LANES, 1)
            for i in range(0, head_dim, LANES):
                sums = dot_rows(sums, k, at + t * head_dim + i, head_dim, load(q, q_at + i))
            store(scores, t, sum_each(sums) * splat(scale))
            t += LANES
    store(scores, n_keys, constant(-math.inf))  # the lanes of the last vector beyond n_keys get the weight 0
    while t < n_keys:
        s = constant(0)
        for i in range(0, head_dim, LANES):
            s = fma(load_first(k, at + t * head_dim + i, head_dim - i), load(q, q_at + i), s)
        scores[t] = sum_lanes(s) * scale
        t += 1

    peak = constant(-math.inf)
    for t in range(0, n_keys, LANES):
        peak = larger(load(scores, t), peak)
    top, sums = splat(max_lanes(peak)), constant(0)
    for t in range(0, n_keys, LANES):
        e = exp(load(scores, t) - top)
        store(scores, t, e)
        sums = sums + e
    norm = splat(np.float32(1) / sum_lanes(sums))

    for i in range(0, head_dim, LANES):
        if i + LANES <= head_dim:
            eight, t = zeros(8, 1), 0
            while t + 8 <= n_keys:
                eight = add_rows(eight, v, at + t * head_dim + i, head_dim, scores, t)
                t += 8
            s = total(eight)
            while t < n_keys:
                s = fma(load(v, at + t * head_dim + i), splat(scores[t]), s)
                t += 1
            store(out, out_at + i, s * norm)
        else:
            s = constant(0)
            for t in range(n_keys):
                s = fma(load_first(v, at + t * head_dim + i, head_dim - i), splat(scores[t]), s)
            store_first(out, out_at + i, s * norm, head_dim - i)
