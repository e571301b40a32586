"""The next token: `draw`, the definition, and its compiled twin, against the same in NumPy."""
import itertools
import math
import random

import numpy as np
import pytest
import torch
from conftest import sizes
from numba import njit
from toy_executor import bitmap

from decode.draw import DrawSettings, draw, exponential_noise, log_probabilities
from decode.draw import changed as changed_logits
from decode.kernel.sampling import DRAW, threshold
from decode.tables import DrawTable

kth_largest = njit(threshold.py_func)  # Python cannot call what compiled code alone calls
CLOSE = 1e-4  # two tokens whose logarithms of weight / noise are closer may change places
KEPT = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
PENALTIES = dict(presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)


class Sample:
    """What draws need of a sequence. how: of `DrawSettings`."""

    def __init__(self, vocab_size, prompt=(1,), drawn=(), allowed=None, **how):
        self.tokens, self.n_drawn, self.how = [*prompt, *drawn], len(drawn), how | dict(allowed=allowed)
        self.settings = DrawSettings(vocab_size, prompt=prompt, **how)
        self.settings.allowed = allowed if allowed is None else bitmap(allowed, vocab_size)
        self.prompt, self.drawn = list(prompt), list(drawn)


def changed(row, sample):
    """Logits after what is allowed, biases, min_tokens and penalties, float64."""
    how, row = KEPT | PENALTIES | sample.how, [float(x) for x in row]
    if how['allowed'] is not None:
        row = [x if token in how['allowed'] else -math.inf for token, x in enumerate(row)]
    for token, bias in dict(how.get('logit_bias', ())).items():
        row[token] += bias
    if len(sample.drawn) < how.get('min_tokens', 0):
        for token in how['stop_ids']:
            row[token] = -math.inf
    is_penalised = any(how[name] != value for name, value in PENALTIES.items())
    for token in {*sample.prompt, *sample.drawn} if is_penalised else ():
        r, n = how['repetition_penalty'], sample.drawn.count(token)
        row[token] = row[token] / r if row[token] > 0 else row[token] * r
        row[token] -= n * how['frequency_penalty'] + (n > 0) * how['presence_penalty']
    return np.array(row)


def probabilities(row, temperature, top_k, top_p, min_p, slack=0.0):
    """Of each token, by a full sort. slack: the border of top_p is so much further."""
    if temperature == 0 or not abs(row.max()) < math.inf:
        return (np.arange(len(row)) == row.argmax()).astype(float)
    p = np.exp((row - row.max()) / temperature)
    p[p < math.exp(-87)] = 0
    if 0 < top_k < len(row):
        p[row < np.sort(row)[-top_k]] = 0
    p[p < min_p * (1 - slack)] = 0
    if top_p < 1:
        order = np.argsort(-row, kind='stable')
        before = np.cumsum(p[order]) - p[order]
        outside = before >= (top_p + slack) * p.sum()
        outside[0] = False
        p[order[outside]] = 0
    return p / p.sum()


def hashed(x):
    """splitmix64's finaliser on Python's whole numbers."""
    x %= 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def noise_of(seed, number, tokens):
    golden = 0x9E3779B97F4A7C15
    key = hashed(hashed(seed + golden) + (number + 1) * golden)
    return np.array([-math.log(((hashed(key + (token + 1) * golden) >> 12) + 0.5) * 2.0**-52) for token in tokens])


def drawn_by_numpy(row, sample):
    """The token that a sample draws, and all that it draws but for rounding. row: float32 logits."""
    row, how = changed(row, sample), {name: sample.how.get(name, value) for name, value in KEPT.items()}
    of_slack = [probabilities(row, **how, slack=slack) for slack in (0.0, 1e-5, -1e-5)]
    tokens, scores, close = np.max(of_slack, axis=0).nonzero()[0], np.full(len(row), -math.inf), set()
    noise = np.log(noise_of(sample.how.get('seed', 0), len(sample.drawn), tokens.tolist()))
    for p in reversed(of_slack):
        with np.errstate(divide='ignore'):
            scores[tokens] = np.log(p[tokens]) - noise
        close |= {*(scores > scores.max() - CLOSE).nonzero()[0].tolist()}
    return int(scores.argmax()), close


def both(rows, samples):
    """What the two draw for each sample from its row."""
    rows = torch.as_tensor(np.ascontiguousarray(rows, np.float32))
    for sample in samples:
        sample.settings.count(sample.drawn)
    definition = draw(rows, [s.settings for s in samples], [len(s.drawn) for s in samples]).tolist()
    return definition, [token for token, in DrawTable(rows.size(1)).draw(samples, rows[:, None])]


def rows_of(n, vocab_size, seed=0, scale=3.0):
    return (np.random.default_rng(seed).normal(size=(n, vocab_size)) * scale).astype(np.float32)


SHAPES = {'normal': lambda x: x, 'equal': lambda x: x * 0 + 5, 'almost equal': lambda x: x * 1e-3, 'rounded': np.round,
          'two values': np.sign, 'wide': lambda x: x * 30, 'one finite': lambda x: np.where(x == x.max(), x, -np.inf),
          'some infinite': lambda x: np.where(x >= np.median(x), x, -np.inf), 'falling': lambda x: -np.sort(-x),
          'far from 0': lambda x: np.round(x * 8) - 1e6, 'one large': lambda x: np.where(x == x.min(), 15, x)}


def any_sample(chooser, vocab_size, seed):
    """A sample with any settings."""
    def maybe(values, share=0.4):
        return chooser.choice(values) if chooser.random() < share else values[0]
    how = dict(seed=seed, temperature=maybe([1.0, 0.0, 0.3, 0.7, 1.5, 3.0, 1e-6, 1e5]),
               top_k=maybe([0, 1, 3, 9, 40, 100]), min_p=maybe([0.0, 0.03, 0.1]),
               top_p=maybe([1.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-12]),
               presence_penalty=maybe([0.0, 1.0, -0.5]), frequency_penalty=maybe([0.0, 0.5]),
               repetition_penalty=maybe([1.0, 1.3, 0.8]))
    if chooser.random() < 0.3:
        how['logit_bias'] = {chooser.randrange(vocab_size): chooser.choice([-100, -1.5, 0.7, 5]) for _ in range(3)}
    if chooser.random() < 0.3 and vocab_size > 5:
        how |= dict(stop_ids=chooser.sample(range(vocab_size), 3), min_tokens=chooser.choice([2, 9]))
    if chooser.random() < 0.4:
        n = min(vocab_size, chooser.choice([1, 3, 40, vocab_size - 1]))
        how['allowed'] = {*chooser.sample(range(vocab_size), n)}
    prompt, drawn = ([chooser.randrange(vocab_size) for _ in range(n)] for n in (3, chooser.choice([0, 1, 6])))
    return Sample(vocab_size, prompt, drawn, **how)


def test_both_draw_what_numpy_draws():
    """200 settings on vocabularies of 2 to 50,304: equal but where the two best are that close, at most 1 in 100."""
    chooser, n, n_close = random.Random(0), 0, 0
    cases = itertools.product([2, 3, 15, 16, 17, 64, 65, 255, 257, 4097, 50304], SHAPES)
    for number, (vocab_size, shape) in enumerate(cases):
        count = sizes(2, 20) if vocab_size < 4000 else 1
        rows = SHAPES[shape](rows_of(count, vocab_size, number)).astype(np.float32)
        samples = [any_sample(chooser, vocab_size, seed) for seed in range(number, number + count)]
        for row, sample in zip(rows, samples):
            sample.settings.count(sample.drawn)
            of_definition = changed_logits(torch.from_numpy(row), sample.settings, len(sample.drawn))
            np.testing.assert_allclose(of_definition, changed(row, sample), rtol=1e-5, atol=1e-3)
        for row, sample, *tokens in zip(rows, samples, *both(rows, samples)):
            expected, close = drawn_by_numpy(row, sample)
            assert {*tokens} <= close, (vocab_size, shape, sample.how, tokens)
            n, n_close = n + 1, n_close + (tokens != [expected, expected])
    print(f"{n_close} that are close among {n} draws")
    assert n >= 200 and 100 * n_close <= n


@pytest.mark.parametrize('how', [
    dict(), dict(temperature=0.5), dict(temperature=3.0), dict(top_k=7), dict(top_p=0.8), dict(min_p=0.1),
    dict(temperature=1.5, top_k=9, top_p=0.9, min_p=0.01), dict(frequency_penalty=1.0, repetition_penalty=1.2),
    dict(logit_bias={3: 2.0})], ids=str)
def test_draws_follow_the_distribution(how):
    """A chi-square test over seeds, and over the numbers of one sample's tokens."""
    row, n = rows_of(1, 40, scale=1.5)[0], sizes(4000, 40000)
    sample = Sample(40, [1, 2, 3], [4, 4], **how)
    sample.settings.count(sample.drawn)
    expected = n * probabilities(changed(row, sample), **KEPT | {k: v for k, v in how.items() if k in KEPT})
    logits, of_seeds = torch.from_numpy(row).expand(n, -1), []
    for seed in range(n):
        of_seeds.append(DrawSettings(40, seed, prompt=[1, 2, 3], **how))
        of_seeds[-1].counts, of_seeds[-1].in_prompt = sample.settings.counts, sample.settings.in_prompt
    for settings, numbers in ((of_seeds, [2] * n), (of_seeds[:1] * n, range(2, n + 2))):
        found = np.bincount(draw(logits, settings, numbers), minlength=40)
        assert not found[expected == 0].any()
        kept = expected > 0
        chi_square, freedom = ((found - expected)[kept] ** 2 / expected[kept]).sum(), kept.sum() - 1
        assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 5, (chi_square, freedom)


def test_noise():
    """Exponential, and not correlated between seeds, numbers or tokens next to each other."""
    n = 150
    noise = np.stack([exponential_noise([seed] * n, range(n), torch.arange(n).expand(n, -1)) for seed in range(n)])
    assert noise.min() > 0 and len(np.unique(noise)) == noise.size
    for axis in range(3):
        a, b = (noise.take(part, axis).ravel() for part in (range(n - 1), range(1, n)))
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.005
    assert abs(noise.mean() - 1) < 0.005 and abs((noise < 0.1).mean() - (1 - math.exp(-0.1))) < 0.002
    for seed, number in ((0, 0), (2**64 - 1, 0), (7, 10**6)):
        by_torch = exponential_noise([seed], [number], torch.tensor([[0, 5, 50303]]))[0]
        assert np.allclose(by_torch, noise_of(seed, number, [0, 5, 50303]), rtol=1e-14, atol=0)


@pytest.mark.parametrize('n_threads', [1, 2, 3, 7, 99])
def test_threads_share_the_samples_of_a_step(n_threads):
    """Each is drawn once, with more samples than threads and with fewer."""
    hows = [dict(), dict(top_p=0.5), dict(top_k=7), dict(frequency_penalty=1.0), dict(temperature=0.0)]
    for n in (1, 2, 5):
        logits, table = torch.from_numpy(rows_of(n, 300)), DrawTable(300, n_threads)
        samples = [Sample(300, seed=i, **how) for i, how in enumerate(hows[-n:])]
        expected, found = both(logits, samples)[1], np.full(n, -1)
        data = table.describe(samples, 0, np.zeros(1, np.int64), 2**63 - 1)
        for thread in reversed(range(n_threads)):
            assert DRAW.call(data, logits.data_ptr(), found.ctypes.data, thread, n_threads) == 1
        assert found.tolist() == expected


@pytest.mark.parametrize('order', ['rising', 'falling', 'rising and falling', 'equal', 'few'])
def test_the_kth_largest_of_numbers_in_any_order(order):
    """With partitions that leave almost all of the numbers this would go on for minutes."""
    n = 300_000
    row = {'rising': np.arange(n), 'falling': -np.arange(n), 'rising and falling': -abs(np.arange(n) - n // 2),
           'equal': np.zeros(n), 'few': np.arange(n) % 7}[order].astype(np.float32) / n
    for k in (1, n // 3, n - 1):
        value, above = kth_largest(row.copy(), np.ones(n), n, k)
        assert value == np.sort(row)[-k] and above == (row > value).sum()


def test_min_tokens_and_counts_of_what_was_drawn():
    for drawn, token in (([3], 3), ([3, 3], 4)):
        sample = Sample(5, [1], drawn, temperature=0.0, stop_ids=[0, 4], min_tokens=2, logit_bias={1: 0.5})
        assert both([[2.0, -1.0, 0.5, 1.0, 3.0]], [sample]) == ([token], [token])
    settings = DrawSettings(5, top_k=9, min_tokens=3)
    assert settings.values[1] == 5 and settings.min_tokens == 0, "there are no stop tokens"
    penalised = DrawSettings(5, frequency_penalty=1.0, prompt=[2])
    for drawn in ([], [1], [1, 1, 3], [1]):
        penalised.count(drawn)
        assert penalised.counts.tolist() == [drawn.count(token) for token in range(5)]
    penalised.counts[0] = 7  # a call has failed
    penalised.count([1])
    assert penalised.counts.tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize('how', [dict(seed=1.5), dict(stop_ids=[1.5]), dict(logit_bias={1.5: 1}), dict(stop_ids=[11])])
def test_numbers_that_are_no_ids_are_refused(how):
    with pytest.raises(ValueError, match='1.5|11'):
        DrawSettings(11, **how)
    assert DrawSettings(11, seed=np.int64(7), stop_ids=[np.int32(3)]).seed == DrawSettings(11, seed=7).seed


def test_infinite_logits():
    row = np.array([[3.0, 2e37, 1.0, 2e37, -2e37]] * 9, np.float32)  # a penalty makes token 1 infinite
    for how in (dict(top_p=0.9), dict(top_k=3), dict(), dict(temperature=0.0)):
        samples = [Sample(5, [1, 3, 4], seed=seed, repetition_penalty=0.01, **how) for seed in range(9)]
        for tokens in both(row, samples):
            assert tokens == [1] * 9


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_log_probabilities(dtype):
    logits = rows_of(5, 3000)
    logits[2, 10:14] = 40
    if dtype is torch.bfloat16:
        logits = torch.from_numpy(logits).bfloat16().float().numpy()
    tokens, x = [3, 5, 12, 700, int(logits[4].argmax())], logits.astype(np.float64)
    expected = x - x.max(1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(1, keepdims=True))
    for k in (0, 1, 5, 3000, 9999):
        found = log_probabilities(torch.from_numpy(logits).to(dtype), tokens, k)
        for row, of_row, token, logprob, top, values in zip(logits, expected, tokens, *found):
            order = np.argsort(-row, kind='stable')[:k]
            assert abs(logprob - of_row[token]) < 1e-6
            assert top == order.tolist() and np.allclose(values, of_row[order], atol=1e-6)
