"""
The next token of each sequence of a step, drawn from its row of logits: the compiled twin of decode/draw.py.

`DRAW` is called by the threads of the model's compiled step, after each step. It first applies what is
allowed, the biases, the min_tokens and the penalties of the sequence to its logits. A row of 50,000 numbers is read a
few times and never sorted as a whole. Weights are float32, as torch's softmax computes them, and so are the sums of
PER_SUM of them. Sums of those are float64.

Rows are pointers here, with their length n beside them: numba compiles these in half of the time that arrays take.
"""
import math

import numpy as np
from numba import uint64

from decode.kernel.building import CFunction
from decode.kernel.emit import LANES, njit
from decode.kernel.pointers import bytes_at, doubles_at, floats_at, longs_at
from decode.kernel.threads import clock, observe
from decode.kernel.vectors import (
    add_from,
    constant,
    exp,
    larger,
    load,
    load_until,
    max_lanes,
    splat,
    store_between,
    store_until,
    sum_lanes,
    zero_below,
)

PER_PEAK = 64  # tokens of a part of a row, see `find_peaks`
PER_SUM = 256  # tokens whose weights are added up together
FEW, N_NARROWINGS = 256, 7  # `border` stops at an interval with at most FEW tokens, or after N_NARROWINGS passes
# rows of the scratch, float64 (N_SCRATCH, vocab_size); most of them are used as float32 or int64
WEIGHTS, TOKENS, VALUES, RANKED, MASSES, CHANGED, N_SCRATCH = range(7)

# indices of the int64 table that describes the sequences of a step
(N_SEQUENCES, VOCAB_SIZE,
 SEQUENCES,    # the address of int64 (N_SEQUENCES, N_COLUMNS), in the order of their rows of logits; see below
 SCRATCH,      # the address of float64 (threads, N_SCRATCH, vocab_size)
 RETURN_SOON,  # the address of an int64. Another thread sets it to 1; then no step follows
 STRIDE,       # from the logits of a sequence to those of the next one
 UNTIL,        # nanoseconds of `clock`. No step begins after this time
 N_TABLE) = range(8)

# the columns of SEQUENCES: first SETTING_NAMES of decode/draw.py in the same order, float64
(TEMPERATURE, TOP_K, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION,
 SEED,
 NUMBER,        # how many tokens it has drawn
 N_STOPS, STOPS,  # n_stops, and the address of int64 (n_stops,): tokens that end it
 MIN_TOKENS,    # so many tokens are drawn before a stop token can be
 COUNTS,        # the address of int64 (vocab_size,): how often each token was drawn; 0 without penalties
 IN_PROMPT,     # the address of uint8 (vocab_size,): 1 for the tokens of the prompt
 N_BIASES, BIAS_TOKENS, BIASES,  # n_biases, and the addresses of int64 and float64 (n_biases,)
 ALLOWED,       # the address of int64 (vocab_size // 64 + 1,), a bit for each token that may be drawn; 0 if all may
 N_COLUMNS) = range(19)

GOLDEN = uint64(0x9E3779B97F4A7C15)  # of the noise, as in decode/draw.py
LEAST_WEIGHT = -87.0  # weights below e ** -87 of the largest are 0, as there
LOWEST = np.finfo(np.float32).min  # of the logits of tokens that can be drawn: -inf is less


@njit
def mixed(x):
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@njit
def exponentials(values, n, largest, factor, weights):
    """weights[i] = exp((values[i] - largest) * factor), float32; 0 below e ** LEAST_WEIGHT."""
    top, times = splat(largest), splat(factor)
    for i in range(0, n, LANES):
        v = (load_until(values, i, n) - top) * times
        store_until(weights, i, zero_below(v, constant(LEAST_WEIGHT), exp(v)), n)


@njit
def find_peaks(row, n, peaks):
    """peaks[c] = the largest of the logits of part c. Returns the largest of all."""
    largest = np.float32(-math.inf)
    for start in range(0, n, PER_PEAK):
        i, end, v = start, min(n, start + PER_PEAK), constant(-math.inf)
        while i + LANES <= end:
            v = larger(load(row, i), v)
            i += LANES
        peak = max_lanes(v)
        while i < end:
            peak = max(peak, row[i])
            i += 1
        peaks[start // PER_PEAK] = peak
        largest = max(largest, peak)
    return largest


@njit
def first_of(row, n, peaks, value):
    """The first token with this logit, the largest."""
    for start in range(0, n, PER_PEAK):
        if peaks[start // PER_PEAK] == value:
            for i in range(start, min(n, start + PER_PEAK)):
                if row[i] == value:
                    return i
    return 0


@njit
def threshold(values, masses, n, target):
    """
    (v, the mass of the values larger than v). v is the largest of the n values for which the values from v up have at
    least the mass `target`, or the smallest value if all have less. By partitions, as in quickselect; both arrays are
    permuted. There must be a value, and no NaN.
    """
    low, high, before, x = 0, n, 0.0, uint64(0)
    while True:
        # the median of three values at random places: fixed places would be slow where logits rise and then fall
        x, n = mixed(x + GOLDEN), high - low
        i, j, k = np.int64(x >> uint64(1)) % n, np.int64(x >> uint64(21)) % n, np.int64(x >> uint64(41)) % n
        a, b, c = values[low + i], values[low + j], values[low + k]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j, end, mass_above, mass_equal = low, low, high, 0.0, 0.0  # [low, i) is above the pivot, [i, j) equal to it
        while j < end:
            v, mass = values[j], masses[j]
            if v > pivot:
                values[j], masses[j], values[i], masses[i] = values[i], masses[i], v, mass
                mass_above += mass
                i += 1
                j += 1
            elif v == pivot:
                mass_equal += mass
                j += 1
            else:
                end -= 1
                values[j], masses[j], values[end], masses[end] = values[end], masses[end], v, mass
        if i > low and before + mass_above >= target:
            high = i
        elif end == high or before + mass_above + mass_equal >= target:
            return pivot, before + mass_above
        else:
            low, before = end, before + mass_above + mass_equal


@njit
def gather(row, n, peaks, least, tokens, values):
    """The tokens whose logits are at least so large, in ascending order, and their logits. Returns how many."""
    found = 0
    for start in range(0, n, PER_PEAK):
        if peaks[start // PER_PEAK] >= least:
            for i in range(start, min(n, start + PER_PEAK)):
                tokens[found], values[found] = i, row[i]
                found += row[i] >= least
    return found


@njit
def kth_largest(row, n, peaks, k, tokens, values, masses):
    """The k-th largest logit. tokens, values and masses are written over."""
    least, n_peaks = LOWEST, -(-n // PER_PEAK)
    if k <= n_peaks:  # each of the k largest peaks is a logit, so the k-th largest logit is no smaller
        for c in range(n_peaks):
            values[c], masses[c] = peaks[c], 1.0
        least = max(least, threshold(values, masses, n_peaks, k)[0])
    found = gather(row, n, peaks, least, tokens, values)
    for i in range(found):
        masses[i] = 1.0
    return threshold(values, masses, found, k)[0]


@njit
def masses_from(row, weights, n, levels):
    """The sums of the weights of the tokens whose logits are at least so large, for each of four levels."""
    a, b, c, d = splat(levels[0]), splat(levels[1]), splat(levels[2]), splat(levels[3])
    from_a, from_b, from_c, from_d = 0.0, 0.0, 0.0, 0.0
    for start in range(0, n, PER_SUM):
        of_a, of_b, of_c, of_d = constant(0.0), constant(0.0), constant(0.0), constant(0.0)
        for i in range(start, min(n, start + PER_SUM), LANES):
            v, weight = load_until(row, i, n), load_until(weights, i, n)
            of_a = add_from(of_a, weight, v, a)
            of_b = add_from(of_b, weight, v, b)
            of_c = add_from(of_c, weight, v, c)
            of_d = add_from(of_d, weight, v, d)
        from_a += sum_lanes(of_a)
        from_b += sum_lanes(of_b)
        from_c += sum_lanes(of_c)
        from_d += sum_lanes(of_d)
    return from_a, from_b, from_c, from_d


@njit
def levels_below(top, a, b, c, d):
    """Four levels in descending order, for `masses_from`."""
    return np.float32(top - a), np.float32(top - b), np.float32(top - c), np.float32(top - d)


@njit
def border(row, weights, n, largest, factor, top_p):
    """
    (low, high, the weight from high up, target). target is the share top_p of the whole weight. The tokens with logits
    from `low` up have at least this weight, those from `high` up have less. Each pass computes the weights from four
    levels up and narrows the interval, until few tokens are between low and high, if the logits allow it.
    """
    unit = 1.0 / np.float64(factor)  # a logit that is smaller by this has a weight that is e times smaller
    low, high, before, inside = np.float32(largest - 88 * unit), np.float32(math.inf), 0.0, math.inf
    levels = levels_below(largest, 3 * unit, 6 * unit, 12 * unit, 88 * unit)  # the last of them leaves out zeros only
    masses = masses_from(row, weights, n, levels)
    target, of_low = top_p * masses[3], masses[3]
    for _ in range(N_NARROWINGS):
        for i in range(4):
            if masses[i] < target:
                high, before = levels[i], masses[i]
            elif levels[i] > low:
                low, of_low = levels[i], masses[i]
        inside_before, inside = inside, of_low - before
        if inside <= FEW * math.exp((np.float64(low) - largest) * factor):
            break
        if inside == inside_before and high - low < unit:  # equal logits, presumably
            break
        if high <= largest:
            step = (np.float64(high) - low) / 5
            levels = levels_below(high, step, 2 * step, 3 * step, 4 * step)
        else:  # all logits may be near the largest
            step = (np.float64(largest) - low) / 64
            levels = levels_below(largest, step, 4 * step, 16 * step, 32 * step)
        masses = masses_from(row, weights, n, levels)
    return low, high, before, target


@njit
def gather_between(row, weights, n, low, high, values, masses):
    """The logits that are at least `low` and less than `high`, and their weights. Returns how many."""
    found, least, end, whole = 0, splat(low), splat(high), n - n % LANES
    for i in range(0, whole, LANES):
        v = load(row, i)
        store_between(masses, found, load(weights, i), least, v, end)
        found += store_between(values, found, v, least, v, end)
    for i in range(whole, n):
        if low <= row[i] < high:
            values[found], masses[found] = row[i], weights[i]
            found += 1
    return found


@njit
def keep_top_p(row, weights, n, largest, factor, top_p, values, masses):
    """
    Keep the fewest tokens that have the share top_p of the weight: those with the largest logits, of equal ones the
    first. Set the weights of all others to 0.
    """
    low, high, before, target = border(row, weights, n, largest, factor, top_p)
    found = gather_between(row, weights, n, low, high, values, masses)
    last, larger_ones = threshold(values, masses, found, target - before)
    for i in range(0, n, LANES):
        v, weight = load_until(row, i, n), load_until(weights, i, n)
        store_until(weights, i, zero_below(v, splat(last), weight), n)
    n_equal, of_each, end = 0, 0.0, n
    for j in range(found):
        if values[j] == last:
            n_equal, of_each = n_equal + 1, masses[j]
    extra = n_equal - np.ceil((target - before - larger_ones) / of_each) if of_each > 0.0 else 0.0
    while extra > 0.0:  # the last of those that are equal
        end -= 1
        if row[end] == last:
            weights[end] = 0.0
            extra -= 1.0


@njit
def largest_over_noise(weights, tokens, chooses, n, key):
    """
    The first index whose weight over its noise is largest. chooses: are indices those of `tokens`? Noise is
    -log(u) >= 1 - u, so few logarithms are needed.
    """
    largest, found = -1.0, 0
    for i in range(n):
        if weights[i] > 0.0:
            x = mixed(key + uint64(tokens[i] + 1 if chooses else i + 1) * GOLDEN)
            u, weight = (np.float64(x >> uint64(12)) + 0.5) * 2.0**-52, np.float64(weights[i])
            if weight > largest * (1.0 - u):
                ratio = weight / -math.log(u)
                if ratio > largest:
                    largest, found = ratio, i
    return found


@njit
def drawn(row, n, settings, key, scratch):
    """The token of a row that its settings and the noise of this key draw. scratch: the address of the thread's."""
    temperature, top_k, top_p, min_p = settings[TEMPERATURE], settings[TOP_K], settings[TOP_P], settings[MIN_P]
    weights, values, ranked, masses = (floats_at(scratch + 8 * n * WEIGHTS), floats_at(scratch + 8 * n * VALUES),
                                       floats_at(scratch + 8 * n * RANKED), floats_at(scratch + 8 * n * MASSES))
    tokens = longs_at(scratch + 8 * n * TOKENS)
    largest = find_peaks(row, n, weights)
    if temperature == 0.0 or not abs(largest) < math.inf:  # infinite, or NaN: a penalty can make a logit infinite
        return first_of(row, n, weights, largest)
    chooses = 0 < top_k < n
    if chooses:
        least = kth_largest(row, n, weights, top_k, tokens, values, masses)
        n, row = gather(row, n, weights, least, tokens, values), values
    factor = np.float32(max(1.0 / temperature, 1e-30))  # times -inf it is -inf
    exponentials(row, n, largest, factor, weights)
    if min_p > 0.0:
        for i in range(n):
            if weights[i] < min_p:
                weights[i] = 0.0
    if top_p < 1.0:
        keep_top_p(row, weights, n, largest, factor, top_p, ranked, masses)
    i = largest_over_noise(weights, tokens, chooses, n, key)
    return tokens[i] if chooses else i


@njit
def copy_allowed(row, n, allowed, own):
    """own = the n logits, with -inf in the place of those whose bits in a bitmap are 0."""
    for start in range(0, n, 64):
        bits, end = uint64(allowed[start // 64]), min(n, start + 64)
        if bits == 0:  # most forms allow few tokens
            for t in range(start, end):
                own[t] = -math.inf
        else:
            for t in range(start, end):
                own[t] = row[t] if (bits >> uint64(t - start)) & uint64(1) else np.float32(-math.inf)


@njit
def change(row, n, sequence, settings):
    """Apply biases, min_tokens and penalties to the n logits of a sequence, in place, in the order of vLLM."""
    tokens, biases, stops = longs_at(sequence[BIAS_TOKENS]), doubles_at(sequence[BIASES]), longs_at(sequence[STOPS])
    for i in range(sequence[N_BIASES]):
        row[tokens[i]] += biases[i]
    if sequence[NUMBER] < sequence[MIN_TOKENS]:
        for i in range(sequence[N_STOPS]):
            row[stops[i]] = -math.inf
    if sequence[COUNTS] == 0:
        return
    counts, in_prompt = longs_at(sequence[COUNTS]), bytes_at(sequence[IN_PROMPT])
    presence, frequency, repetition = settings[PRESENCE], settings[FREQUENCY], settings[REPETITION]
    for t in range(n):
        if counts[t] or in_prompt[t]:
            row[t] = row[t] / repetition if row[t] > 0 else row[t] * repetition
        if counts[t]:
            row[t] -= frequency * counts[t] + presence


@njit
def next_token(sequence, settings, row, V, scratch):
    """Draw the next token of a sequence from a row of V logits. scratch: the address of the thread's."""
    number = sequence[NUMBER]
    if (sequence[COUNTS] != 0 or sequence[N_BIASES] != 0 or number < sequence[MIN_TOKENS]
            or sequence[ALLOWED] != 0):
        own = floats_at(scratch + 8 * V * CHANGED)
        if sequence[ALLOWED] != 0:
            copy_allowed(row, V, longs_at(sequence[ALLOWED]), own)
        else:
            for t in range(V):  # the row stays: its logits may be wanted
                own[t] = row[t]
        change(own, V, sequence, settings)
        row = own
    # the hash of the seed and of the token's number, as in `exponential_noise` of decode/draw.py
    key = mixed(mixed(uint64(sequence[SEED]) + GOLDEN) + uint64(number + 1) * GOLDEN)
    token = drawn(row, V, settings, key, scratch)
    sequence[NUMBER] += 1
    if sequence[COUNTS] != 0:
        longs_at(sequence[COUNTS])[token] += 1
    return token


@njit
def is_stop(sequence, token):
    stops = longs_at(sequence[STOPS])
    for s in range(sequence[N_STOPS]):
        if stops[s] == token:
            return True
    return False


def draw_tokens(table_at, logits_at, tokens_at, thread, n_threads):
    """
    Draw tokens for the sequences of a table from logits, a row of vocab_size float32 for each. This thread draws for
    those of the sequences thread, thread + n_threads, ... whose numbers are not negative. Returns 1 if another step may
    follow; 0 if one of its tokens ends its sequence, if RETURN_SOON is set, or if it is late.
    """
    table, tokens, ended = longs_at(table_at), longs_at(tokens_at), False
    V, scratch = table[VOCAB_SIZE], table[SCRATCH] + 8 * table[VOCAB_SIZE] * N_SCRATCH * thread
    for i in range(thread, table[N_SEQUENCES], n_threads):
        at = table[SEQUENCES] + 8 * N_COLUMNS * i
        sequence, row = longs_at(at), floats_at(logits_at + 4 * table[STRIDE] * i)
        if sequence[NUMBER] < 0:
            continue
        tokens[i] = next_token(sequence, doubles_at(at), row, V, scratch)
        ended |= is_stop(sequence, tokens[i])
    return 0 if ended or observe(longs_at(table[RETURN_SOON]), 0) != 0 or clock() >= table[UNTIL] else 1


DRAW = CFunction(draw_tokens)
