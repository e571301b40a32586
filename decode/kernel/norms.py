"""The norms of a GPT, as the compiled step computes them: of rows of the residual stream, and of single heads."""
import math
from collections import namedtuple

import numpy as np

from decode.kernel import layout
from decode.kernel.emit import LANES, njit
from decode.kernel.layout import GROUP
from decode.kernel.pointers import floats_at
from decode.kernel.vectors import constant, first, fma, load, padded, splat, store, sum_lanes

# the weights and biases of all norms of rows, one after the other, each padded with zeros to a multiple of GROUP.
# rms: are they RMS norms, whose biases are zeros?
Norms = namedtuple('Norms', 'weight bias eps rms')


@njit
def norms_of_rows(memory, sizes):
    return Norms(floats_at(memory[layout.NORM_WEIGHT]), floats_at(memory[layout.NORM_BIAS]),
                 floats_at(memory[layout.EPS])[0], sizes[layout.RMS_NORM] != 0)


@njit
def row_norm(x, x_at, norms, number, C, out, out_at):
    """
    out = norm `number` of C floats of x, then zeros up to a multiple of LANES: a layer norm (arXiv:1607.06450), or an
    RMS norm (arXiv:1910.07467).
    """
    at, mean = number * padded(C, GROUP), constant(0)
    if not norms.rms:
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
def head_norm(x, x_at, weight, weight_at, eps, head_dim, out, out_at):
    """out = the RMS norm of a query or a key; x, weight and out are padded with zeros to a multiple of LANES."""
    v = constant(0)
    for i in range(0, head_dim, LANES):
        v = fma(load(x, x_at + i), load(x, x_at + i), v)
    rstd = splat(np.float32(1 / math.sqrt(sum_lanes(v) / head_dim + eps)))
    for i in range(0, head_dim, LANES):
        store(out, out_at + i, load(x, x_at + i) * rstd * load(weight, weight_at + i))
