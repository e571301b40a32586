"""Steps of a `PagedCache` in one compiled call, that of the server, with tokens that are known before."""
import time

import numpy as np
import torch

from benchmarks.caches import steps
from decode.kernel.building import CFunction
from decode.kernel.vectors import longs_at
from decode.metadata import NextTokens


def copy_row(data_at, logits_at, tokens_at, thread, n_threads):
    """On thread 0, write the data[1] tokens at the address data[0], and set data[0] to the address of the next row."""
    if thread > 0:
        return 1
    data, tokens = longs_at(data_at), longs_at(tokens_at)
    row = longs_at(data[0])
    for i in range(data[1]):
        tokens[i] = row[i]
    data[0] += 8 * data[1]
    return 1


COPY = CFunction(copy_row)


def way_of(cache, step, texts, T):
    """
    (the logits of the last step, a way of `rounds.take_turns`) for the steps that `steps.timed` times. step: that of
    `steps.steps_of_cache`. texts: (B, N) with one token more than is fed.
    """
    handles, rows = list(cache.lengths), texts[:, T + steps.N_WARM:].T.contiguous().numpy()

    def several():
        """(logits, seconds of a step)"""
        for i in range(steps.N_WARM):
            step(i)
        tokens, data = rows.copy(), np.array([rows[1:].ctypes.data, rows.shape[1]])
        began = time.perf_counter()
        logits = cache.decode_steps(handles, NextTokens(COPY, data, tokens))
        return logits, (time.perf_counter() - began) / (len(rows) - 1)

    def seconds(round_):
        runs = []
        with torch.inference_mode(), cache.decoder.exclusive_use():
            while sum(runs) * (len(rows) - 1) < steps.LEAST:
                runs.append(several()[1])
        return sum(runs) / len(runs)
    return several()[0], seconds
