"""Layer norm (arXiv:1607.06450) of one row, as the compiled step computes it."""
import math
from collections import namedtuple

import numpy as np
from numba import njit

from decode.kernel.layout import GROUP, padded
from decode.kernel.vectors import LANES, constant, first, fma, load, splat, store, sum_lanes

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
