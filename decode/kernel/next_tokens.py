"""
Compiled code that draws the next token of each sample of a step. It first applies the biases, the min_tokens and the
penalties of the sample to its logits.

`DRAW` is called by the threads of the model's compiled step, after each step; see `decode.metadata.NextTokens`.
"""
import math

import numpy as np
from numba import carray, njit

from decode.kernel import draws, masked_vectors, threads, vectors
from decode.kernel.callback import Callback
from decode.kernel.draws import CHANGED, FREQUENCY, N_SCRATCH, N_SETTINGS, PRESENCE, REPETITION, drawn, uniform
from decode.kernel.threads import clock, observe
from decode.kernel.vectors import bytes_at, doubles_at, floats_at, longs_at

# indices of the int64 table that describes the samples of a step
(N_SAMPLES, VOCAB_SIZE,
 # addresses of arrays with one entry for each sample. The entry is an int64 unless the line names another type
 ROWS,         # the row of its logits
 SETTINGS,     # float64 (N_SETTINGS,), see draws.py
 SEEDS,
 NUMBERS,      # how many tokens it has generated
 CHANGES,      # (N_CHANGES,), see below
 STOP_STARTS,  # where its stop tokens begin in STOPS, and behind the last sample where they end
 # addresses of arrays that all samples share
 STOPS,        # int64
 SCRATCH,      # float64 (N_THREADS, N_SCRATCH, vocab_size)
 INTERRUPT,    # int64. Another thread sets it to 1; then no step follows
 # numbers
 N_THREADS,    # how many threads have scratch; others draw nothing
 UNTIL,        # nanoseconds of `clock`. No step begins after this time
 N_TABLE) = range(14)

# indices of the int64 entry of CHANGES, which says what is done to the logits of a sample
(COUNTS,       # the address of int64 (vocab_size,): how often each token was generated; 0 without penalties
 IN_PROMPT,    # the address of uint8 (vocab_size,): 1 for the tokens of the prompt
 N_BIASES, BIAS_TOKENS, BIASES,  # n_biases, and the addresses of int64 and float64 (n_biases,)
 MIN_TOKENS,   # so many tokens are drawn before a stop token can be
 N_CHANGES) = range(7)


@njit
def is_changed(changes, number):
    return changes[COUNTS] != 0 or changes[N_BIASES] != 0 or number < changes[MIN_TOKENS]


@njit
def change(row, changes, settings, number, stops):
    """Apply biases, min_tokens and penalties to a sample's logits (V,), in place, in the order of vLLM."""
    tokens, biases = longs_at(changes[BIAS_TOKENS]), doubles_at(changes[BIASES])
    for i in range(changes[N_BIASES]):
        row[tokens[i]] += biases[i]
    if number < changes[MIN_TOKENS]:
        for token in stops:
            row[token] = -math.inf
    if changes[COUNTS] == 0:
        return
    counts, in_prompt = longs_at(changes[COUNTS]), bytes_at(changes[IN_PROMPT])
    presence, frequency, repetition = settings[PRESENCE], settings[FREQUENCY], settings[REPETITION]
    for t in range(len(row)):
        if counts[t] or in_prompt[t]:
            row[t] = row[t] / repetition if row[t] > 0 else row[t] * repetition
        if counts[t]:
            row[t] -= frequency * counts[t] + presence


def draw_tokens(table_at, logits_at, tokens_at, thread, n_threads):
    """
    Draw tokens for the samples of a table from logits float32 (W, vocab_size). This thread draws for the samples
    thread, thread + n_threads, ... Returns 1 if another step may follow; 0 if one of its tokens ends its sample, if
    there is an interrupt, or if it is late.
    """
    table, tokens = longs_at(table_at), longs_at(tokens_at)
    n, V, ended = table[N_SAMPLES], table[VOCAB_SIZE], False
    rows, seeds, numbers = longs_at(table[ROWS]), longs_at(table[SEEDS]), longs_at(table[NUMBERS])
    settings = carray(doubles_at(table[SETTINGS]), (n, N_SETTINGS))
    changes = carray(longs_at(table[CHANGES]), (n, N_CHANGES))
    n_threads = min(n_threads, table[N_THREADS])
    if thread >= n_threads:
        return 1
    scratch = carray(doubles_at(table[SCRATCH]), (n_threads, N_SCRATCH, V))[thread]
    starts = longs_at(table[STOP_STARTS])
    all_stops = carray(longs_at(table[STOPS]), (starts[n],))
    for i in range(thread, n, n_threads):
        row, stops = carray(floats_at(logits_at + 4 * V * rows[i]), (V,)), all_stops[starts[i]:starts[i + 1]]
        if is_changed(changes[i], numbers[i]):
            own = scratch[CHANGED].view(np.float32)[:V]  # samples of one prompt may share a row
            for t in range(V):
                own[t] = row[t]
            change(own, changes[i], settings[i], numbers[i], stops)
            row = own
        token = drawn(row, settings[i], uniform(seeds[i], numbers[i]), scratch)
        tokens[i] = token
        numbers[i] += 1
        if changes[i, COUNTS] != 0:
            longs_at(changes[i, COUNTS])[token] += 1
        for stop in stops:
            ended |= stop == token
    return 0 if ended or observe(longs_at(table[INTERRUPT]), 0) != 0 or clock() >= table[UNTIL] else 1


DRAW = Callback(draw_tokens, draws, masked_vectors, threads, vectors)
