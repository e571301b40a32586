"""
Tokens drawn from rows of logits, compiled. A row of 50,000 numbers is read a few times and never sorted as a whole.

A draw is the inverse of the cumulative distribution in the order of token ids, at one uniform number. That number is a
function of the sample's seed and of how many tokens it has generated, so a sample that is interrupted and computed
again draws the same tokens. Weights are float32, as torch's softmax computes them, and so are the sums of CHUNK or
BLOCK of them. Sums of those are float64.
"""
import math

import numpy as np
from numba import njit, uint64

from decode.kernel import masked_vectors, vectors
from decode.kernel.disk_cache import keep_on_disk
from decode.kernel.masked_vectors import add_from, load_until, store_between, store_until
from decode.kernel.vectors import (
    LANES,
    constant,
    exp,
    floats_at,
    larger,
    load,
    max_lanes,
    splat,
    sum_lanes,
    zero_below,
)

CHUNK = 64  # tokens whose largest logit is known, and whose weights are added up together
BLOCK = 4 * CHUNK  # tokens whose weights are added up together where the sums of chunks are not needed
FEW, N_NARROWINGS = 256, 7  # `border` stops at an interval with at most FEW tokens, or after N_NARROWINGS passes
# columns of a row's settings
TEMPERATURE, TOP_K, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION, N_SETTINGS = range(8)
# rows of the scratch, float64 (N_SCRATCH, vocab_size); some of them are viewed as float32 or int64
WEIGHTS, TOKENS, VALUES, RANKED, MASSES, CHANGED, N_SCRATCH = range(7)


@njit
def mixed(x):
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@njit
def uniform(seed, n):
    """The uniform number in [0, 1) for token n of a sample: number n of the splitmix64 stream of a mixed seed."""
    x = mixed(mixed(uint64(seed) + uint64(0x9E3779B97F4A7C15)) + uint64(n + 1) * uint64(0x9E3779B97F4A7C15))
    return np.float64(x >> uint64(11)) * 2.0**-53


@njit
def exponentials(values, largest, factor, weights):
    """weights[i] = exp((values[i] - largest) * factor), float32; 0 below e ** -87."""
    n, x, out = len(values), floats_at(values.ctypes.data), floats_at(weights.ctypes.data)
    top, times = splat(largest), splat(factor)
    for i in range(0, n, LANES):
        v = (load_until(x, i, n) - top) * times
        store_until(out, i, zero_below(v, constant(-87.0), exp(v)), n)


@njit
def find_peaks(row, peaks):
    """peaks[c] = the largest of the logits of chunk c. Returns the largest of all."""
    x, largest = floats_at(row.ctypes.data), np.float32(-math.inf)
    for c in range(len(peaks)):
        i, end, v = c * CHUNK, min(len(row), c * CHUNK + CHUNK), constant(-math.inf)
        while i + LANES <= end:
            v = larger(load(x, i), v)
            i += LANES
        peak = max_lanes(v)
        while i < end:
            peak = max(peak, row[i])
            i += 1
        peaks[c] = peak
        largest = max(largest, peak)
    return largest


@njit
def first_of(row, peaks, value):
    """The first token with this logit, the largest."""
    for c in range(len(peaks)):
        if peaks[c] == value:
            for i in range(c * CHUNK, min(len(row), c * CHUNK + CHUNK)):
                if row[i] == value:
                    return i
    return 0


@njit
def threshold(values, masses, target):
    """
    (v, the mass of what is larger than v): v is the largest of the values for which those from v up have at least this
    mass; the smallest of all, if all have less. By partitions, as in quickselect; both arrays are permuted. There must
    be a value, and no NaN.
    """
    low, high, before, x = 0, len(values), 0.0, uint64(0)
    while True:
        # the median of three values at random places: fixed places would be slow where logits rise and then fall
        x, n = mixed(x + uint64(0x9E3779B97F4A7C15)), high - low
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
def gather(row, peaks, least, tokens, values):
    """The tokens whose logits are at least so large, in ascending order, and their logits. Returns how many."""
    n = 0
    for c in range(len(peaks)):
        if peaks[c] >= least:
            for i in range(c * CHUNK, min(len(row), c * CHUNK + CHUNK)):
                tokens[n], values[n] = i, row[i]
                n += row[i] >= least
    return n


@njit
def gather_top_k(row, peaks, k, tokens, values, masses):
    """`gather` for the k largest logits, and those that are equal to the smallest of them."""
    least, n_chunks = np.float32(-math.inf), len(peaks)
    if k <= n_chunks:  # each of the k largest peaks is a logit, so the k-th largest logit is no smaller
        for c in range(n_chunks):  # assigned to a slice, it takes three seconds more to compile
            values[c], masses[c] = peaks[c], 1.0
        least = threshold(values[:n_chunks], masses[:n_chunks], k)[0]
    n = gather(row, peaks, least, tokens, values)
    for i in range(n):
        masses[i] = 1.0
    return gather(row, peaks, threshold(values[:n], masses[:n], k)[0], tokens, values)


@njit
def masses_from(row, weights, levels):
    """The sums of the weights of the tokens whose logits are at least so large, for each of four levels."""
    n, x, w = len(row), floats_at(row.ctypes.data), floats_at(weights.ctypes.data)
    a, b, c, d = splat(levels[0]), splat(levels[1]), splat(levels[2]), splat(levels[3])
    from_a, from_b, from_c, from_d = 0.0, 0.0, 0.0, 0.0
    for start in range(0, n, BLOCK):
        of_a, of_b, of_c, of_d = constant(0.0), constant(0.0), constant(0.0), constant(0.0)
        for i in range(start, min(n, start + BLOCK), LANES):
            v, weight = load_until(x, i, n), load_until(w, i, n)
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
def border(row, weights, largest, factor, top_p):
    """
    (low, high, the weight from high up, the target): the tokens whose logits are at least `low` have at least the share
    top_p of the weight, the target; those from `high` up have less. Few tokens are between the two, if the logits allow
    it: an interval becomes smaller with each pass, which computes the shares at four levels in it.
    """
    unit = 1.0 / np.float64(factor)  # a logit that is smaller by this has a weight that is e times smaller
    low, high, before, inside = np.float32(largest - 88 * unit), np.float32(math.inf), 0.0, math.inf
    levels = levels_below(largest, 3 * unit, 6 * unit, 12 * unit, 88 * unit)  # the last of them leaves out zeros only
    masses = masses_from(row, weights, levels)
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
        masses = masses_from(row, weights, levels)
    return low, high, before, target


@njit
def gather_between(row, weights, low, high, values, masses):
    """The logits that are at least `low` and less than `high`, and their weights. Returns how many."""
    n, x, w, least, end = 0, floats_at(row.ctypes.data), floats_at(weights.ctypes.data), splat(low), splat(high)
    to, masses_to = floats_at(values.ctypes.data), floats_at(masses.ctypes.data)
    whole = len(row) - len(row) % LANES
    for i in range(0, whole, LANES):
        v = load(x, i)
        store_between(masses_to, n, load(w, i), least, v, end)
        n += store_between(to, n, v, least, v, end)
    for i in range(whole, len(row)):
        if low <= row[i] < high:
            values[n], masses[n] = row[i], weights[i]
            n += 1
    return n


@njit
def keep_top_p(row, weights, largest, factor, top_p, values, masses):
    """
    Set the weights to 0 of all tokens but the fewest that have the share top_p of the weight: those with the largest
    logits, of equal ones the first.
    """
    low, high, before, target = border(row, weights, largest, factor, top_p)
    n = gather_between(row, weights, low, high, values, masses)
    last, larger_ones = threshold(values[:n], masses[:n], target - before)
    end, x, w = len(row), floats_at(row.ctypes.data), floats_at(weights.ctypes.data)
    for i in range(0, end, LANES):
        v, weight = load_until(x, i, end), load_until(w, i, end)
        store_until(w, i, zero_below(v, splat(last), weight), end)
    n_equal, of_each = 0, 0.0
    for j in range(n):
        if values[j] == last:
            n_equal, of_each = n_equal + 1, masses[j]
    extra = n_equal - np.ceil((target - before - larger_ones) / of_each) if of_each > 0.0 else 0.0
    while extra > 0.0:  # the last of those that are equal
        end -= 1
        if row[end] == last:
            weights[end] = 0.0
            extra -= 1.0


@njit
def at_share(weights, share):
    """The first index at which the cumulative weight is more than this share of all. Sums have one fixed order."""
    n, x = len(weights), floats_at(weights.ctypes.data)
    n_chunks = -(-n // CHUNK)
    sums, total = np.empty(n_chunks), 0.0
    for c in range(n_chunks):
        v, end = constant(0.0), min(n, c * CHUNK + CHUNK)
        for i in range(c * CHUNK, end, LANES):
            v = v + load_until(x, i, end)
        sums[c] = sum_lanes(v)
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


@njit
def drawn(row, settings, share, scratch):
    """The token of a row at this share of the probability that its settings leave."""
    temperature, top_k, top_p, min_p = settings[TEMPERATURE], settings[TOP_K], settings[TOP_P], settings[MIN_P]
    n, weights, values = len(row), scratch[WEIGHTS].view(np.float32), scratch[VALUES].view(np.float32)
    peaks = weights[:-(-n // CHUNK)]
    largest = find_peaks(row, peaks)
    if temperature == 0.0 or not abs(largest) < math.inf:  # infinite, or NaN: a penalty can make a logit infinite
        return first_of(row, peaks, largest)
    tokens, masses = scratch[TOKENS].view(np.int64), scratch[MASSES].view(np.float32)
    chooses = 0 < top_k < n
    if chooses:
        n = gather_top_k(row, peaks, top_k, tokens, values, masses)
        row = values[:n]
    weights, factor = weights[:n], np.float32(max(1.0 / temperature, 1e-30))  # times -inf it is -inf
    exponentials(row, largest, factor, weights)
    if min_p > 0.0:
        for i in range(n):
            if weights[i] < min_p:
                weights[i] = 0.0
    if top_p < 1.0:
        keep_top_p(row, weights, largest, factor, top_p, scratch[RANKED].view(np.float32), masses)
    i = at_share(weights, share)
    return tokens[i] if chooses else i


@njit(nogil=True)
def log_probabilities(logits, tokens, scratch, logprobs, ranks, top, top_logprobs):
    """
    Of each row of logits: the log probability of its token, the token's rank (1 for the likeliest), and as many of the
    likeliest tokens as `top` has columns, with theirs; of equal ones the first comes first.
    """
    k, weights = top.shape[1], scratch[WEIGHTS].view(np.float32)[:logits.shape[1]]
    for i in range(len(tokens)):
        row = logits[i]
        largest = find_peaks(row, weights[:-(-len(row) // CHUNK)])
        exponentials(row, largest, np.float32(1.0), weights)
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


keep_on_disk(log_probabilities, masked_vectors, vectors)
