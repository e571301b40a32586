"""
Tokens drawn from rows of logits, compiled. A row of 50,000 numbers is read a few times and never sorted as a whole.

A draw is the inverse of the cumulative distribution in the order of token ids, at one uniform number. That number is a
function of the sample's seed and of how many tokens it has generated, so a sample that is interrupted and computed
again draws the same tokens.
"""
import numpy as np
from numba import njit, uint64

N_BINS = 1024    # into which logits are sorted, from the largest down
DEPTH = 32.0     # nats below the largest logit, after temperature, at which the last bin begins
CHUNK = 64       # tokens whose weights are added up together
LANES, FINITE = 16, np.float32(-3e38)
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # of fdlibm's exp
# columns of a row's settings
TEMPERATURE, TOP_K, TOP_P, MIN_P = range(4)


@njit(cache=True, inline='always')
def mixed(x):
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@njit(cache=True)
def uniform(seed, n):
    """The uniform number in [0, 1) for token n of a sample: number n of the splitmix64 stream of a mixed seed."""
    x = mixed(mixed(uint64(seed) + uint64(0x9E3779B97F4A7C15)) + uint64(n + 1) * uint64(0x9E3779B97F4A7C15))
    return np.float64(x >> uint64(11)) * 2.0**-53


@njit(cache=True)
def exponentials(row, largest, factor, weights, scales):
    """weights[i] = exp((row[i] - largest) * factor), to about 1e-15, and 0 below 1e-299. Compiled to vectors."""
    n, as_float = len(row), scales.view(np.float64)
    for i in range(n):
        x = (np.float64(row[i]) - largest) * factor
        x = x if x > -690.0 else -690.0
        k = np.floor(x * 1.4426950408889634 + 0.5)
        r = (x - k * LN2_HIGH) - k * LN2_LOW
        p = 1.0 / 479001600.0
        p = p * r + 1.0 / 39916800.0
        p = p * r + 1.0 / 3628800.0
        p = p * r + 1.0 / 362880.0
        p = p * r + 1.0 / 40320.0
        p = p * r + 1.0 / 5040.0
        p = p * r + 1.0 / 720.0
        p = p * r + 1.0 / 120.0
        p = p * r + 1.0 / 24.0
        p = p * r + 1.0 / 6.0
        p = p * r + 0.5
        p = p * r + 1.0
        weights[i] = p * r + 1.0
        scales[i] = (np.int64(np.int32(k)) + 1023) << 52
    for i in range(n):
        weights[i] = weights[i] * as_float[i] if as_float[i] > 1e-299 else 0.0


@njit(cache=True)
def largest_of(row):
    """(the largest number of a row, the first token that has it)."""
    lanes, n = np.full(LANES, -np.inf, np.float32), len(row) // LANES * LANES
    for start in range(0, n, LANES):  # the compiler makes one vector operation of the inner loop
        for i in range(LANES):
            x = row[start + i]
            lanes[i] = x if x > lanes[i] else lanes[i]
    m = lanes.max()
    for i in range(n, len(row)):
        m = max(m, row[i])
    for i in range(len(row)):
        if row[i] == m:
            return m, i
    return m, 0


@njit(cache=True)
def smallest_of(row):
    """The smallest finite number of a row."""
    lanes, n = np.full(LANES, np.inf, np.float32), len(row) // LANES * LANES
    for start in range(0, n, LANES):
        for i in range(LANES):
            x = row[start + i]
            lanes[i] = x if FINITE < x < lanes[i] else lanes[i]
    m = lanes.min()
    for i in range(n, len(row)):
        m = row[i] if FINITE < row[i] < m else m
    return m


@njit(cache=True)
def bin_of(x, largest, scale):
    return np.int64(min((np.float64(largest) - x) * scale, N_BINS - 1.0))


@njit(cache=True)
def members(row, weights, number, most, largest, scale):
    """
    The tokens of a bin that have a weight, at most so many, from the largest logit down, of equal ones the first first.
    """
    found, values = np.empty(most, np.int64), np.empty(most, np.float32)
    n = 0
    for i in range(len(row)):
        if weights[i] > 0.0 and bin_of(row[i], largest, scale) == number:
            found[n], values[n] = i, -row[i]
            n += 1
    return found[np.argsort(values[:n], kind='mergesort')]


@njit(cache=True)
def keep(row, weights, largest, scale, top_k, top_p):
    """Set the weights to 0 of all tokens but the top_k likeliest, and of these all but the nucleus of top_p."""
    n, counts, masses = len(row), np.zeros(N_BINS, np.int64), np.zeros(N_BINS)
    for i in range(n):
        if weights[i] > 0.0:
            b = bin_of(row[i], largest, scale)
            counts[b] += 1
            masses[b] += weights[i]
    total = masses.sum()
    if 0 < top_k < counts.sum():
        b, before = 0, 0
        while before + counts[b] < top_k:
            before += counts[b]
            b += 1
        kth = row[members(row, weights, b, counts[b], largest, scale)[top_k - before - 1]]
        masses[:] = 0.0
        for i in range(n):
            if row[i] < kth:
                weights[i] = 0.0
            elif weights[i] > 0.0:
                masses[bin_of(row[i], largest, scale)] += weights[i]
        total = masses.sum()
    if top_p < 1.0:
        b, before, enough = 0, 0.0, top_p * total
        while b < N_BINS - 1 and before + masses[b] < enough:
            before += masses[b]
            b += 1
        kept, last = np.inf, -1  # all tokens with a larger logit stay, and of those with this one the first, to `last`
        for i in members(row, weights, b, counts[b], largest, scale):
            if before >= enough:
                break
            kept, last = np.float64(row[i]), i
            before += weights[i]
        for i in range(n):
            if row[i] < kept or row[i] == kept and i > last:
                weights[i] = 0.0


@njit(cache=True)
def at_share(weights, share):
    """The first token at which the cumulative weight is more than this share of all. Sums have one fixed order."""
    n = len(weights)
    n_chunks = -(-n // CHUNK)
    sums, total = np.empty(n_chunks), 0.0
    for c in range(n_chunks):
        start, end = c * CHUNK, min(n, c * CHUNK + CHUNK)
        a0, a1, a2, a3 = 0.0, 0.0, 0.0, 0.0
        i = start
        while i + 4 <= end:
            a0 += weights[i]
            a1 += weights[i + 1]
            a2 += weights[i + 2]
            a3 += weights[i + 3]
            i += 4
        while i < end:
            a0 += weights[i]
            i += 1
        sums[c] = (a0 + a1) + (a2 + a3)
        total += sums[c]
    target, before, last = share * total, 0.0, 0
    for c in range(n_chunks):
        if before + sums[c] <= target:
            before += sums[c]
            continue
        for i in range(c * CHUNK, min(n, c * CHUNK + CHUNK)):
            before += weights[i]
            if before > target:
                return i
    for i in range(n):  # rounding: the target is the whole
        if weights[i] > 0.0:
            last = i
    return last


@njit(cache=True)
def drawn(row, settings, share, weights, scales):
    """The token of a row at this share of the probability that its settings leave."""
    largest, likeliest = largest_of(row)
    temperature, top_k, top_p, min_p = settings[TEMPERATURE], settings[TOP_K], settings[TOP_P], settings[MIN_P]
    if temperature == 0.0 or not largest > -np.inf:
        return likeliest
    weights, scales = weights[:len(row)], scales[:len(row)]
    exponentials(row, np.float64(largest), 1.0 / temperature, weights, scales)
    if min_p > 0.0:
        for i in range(len(row)):
            if weights[i] < min_p:
                weights[i] = 0.0
    if 0 < top_k < len(row) or top_p < 1.0:
        depth = DEPTH * temperature
        if temperature > 4.0:  # all logits might be in a few bins, which are sorted
            depth = min(depth, np.float64(largest) - np.float64(smallest_of(row)))
        keep(row, weights, largest, N_BINS / max(depth, 1e-30), np.int64(top_k), top_p)
    return at_share(weights, share)


@njit(cache=True, nogil=True)
def draw_rows(logits, rows, settings, seeds, numbers, weights, scales, tokens):
    """
    tokens[i]: the token drawn from row rows[i] of the logits with settings[i], for number numbers[i] of the sample with
    seeds[i]. weights, scales: scratch, float64 and int64, of a row's length.
    """
    for i in range(len(rows)):
        share = uniform(seeds[i], numbers[i]) if settings[i, TEMPERATURE] > 0.0 else 0.0
        tokens[i] = drawn(logits[rows[i]], settings[i], share, weights, scales)


@njit(cache=True, nogil=True)
def log_probabilities(logits, tokens, weights, scales, logprobs, ranks, top, top_logprobs):
    """
    Of each row of logits: the log probability of its token, the token's rank (1 for the likeliest), and as many of the
    likeliest tokens as `top` has columns, with theirs; of equal ones the first comes first.
    """
    k = top.shape[1]
    for i in range(len(tokens)):
        row = logits[i]
        largest, _ = largest_of(row)
        exponentials(row, np.float64(largest), 1.0, weights, scales)
        total = 0.0
        for w in weights:
            total += w
        log_total, own = np.float64(largest) + np.log(total), row[tokens[i]]
        rank, n = 1, 0
        for t in range(len(row)):
            x = row[t]
            rank += x > own
            if n < k or k and x > row[top[i, k - 1]]:
                at = n if n < k else k - 1
                while at and x > row[top[i, at - 1]]:
                    top[i, at] = top[i, at - 1]
                    at -= 1
                top[i, at] = t
                n = min(n + 1, k)
        for j in range(k):
            top_logprobs[i, j] = row[top[i, j]] - log_total
        logprobs[i], ranks[i] = own - log_total, rank


@njit(cache=True)
def penalise(row, counts, in_prompt, presence, frequency, repetition):
    """Lower the logits of tokens that a sample has generated (counts), and of those in its prompt. In place."""
    for t in range(len(row)):
        if counts[t] or in_prompt[t]:
            row[t] = row[t] / repetition if row[t] > 0 else row[t] * repetition
        if counts[t]:
            row[t] -= frequency * counts[t] + presence
