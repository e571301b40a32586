"""Tokens drawn by serving/: the same kept sets as model.sample_token, draws that follow the distribution, penalties."""
import itertools
import math

import numpy as np
import pytest
import torch
from conftest import sizes

from decode.kernel.sampling import DRAW, change, threshold, uniform
from model import sample_token
from serving.request import Request, SamplingParams
from serving.sampler import Drawing, Sampler


def drawing(seed=0, index=0, stop_ids=(), vocab_size=50, prompt=(1,), max_tokens=100, **params):
    request = Request('r', list(prompt), max_tokens, SamplingParams(**params), seed)
    return Drawing(request, index, stop_ids, vocab_size)


def rows_of(n, vocab_size, seed=0, scale=3.0):
    return (np.random.default_rng(seed).normal(size=(n, vocab_size)) * scale).astype(np.float32)


def draw(logits, rows, hows, seeds):
    """The token that a new sampler draws for each of the settings `hows`, from its row of the logits."""
    vocab_size = logits.shape[1]
    drawings = [drawing(seed, vocab_size=vocab_size, **how) for seed, how in zip(seeds, hows)]
    return Sampler(vocab_size).draw(logits, rows, drawings)


def distribution(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The probability of each token in float64, by the definitions: a full sort, the longest way."""
    x = row.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    p[p < min_p] = 0
    if 0 < top_k < len(row):
        p[row < np.sort(np.where(p > 0, row, -np.inf))[-top_k]] = 0
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-row, kind='stable')
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
    return p / p.sum()


SETTINGS = [dict(), dict(temperature=0.5), dict(temperature=3.0), dict(top_k=1), dict(top_k=7), dict(top_p=0.5),
            dict(top_p=0.95, temperature=2.0), dict(top_k=20, top_p=0.7), dict(min_p=0.1), dict(top_p=1e-9),
            dict(min_p=0.01, top_k=9, top_p=0.9, temperature=1.5), dict(temperature=1e-6), dict(temperature=1e5),
            dict(temperature=1e5, top_k=3, top_p=0.5), dict(top_k=100), dict(top_k=100, top_p=0.9, min_p=1e-3),
            dict(top_p=1 - 1e-16), dict(top_p=1 - 1e-12)]


def check_draw(token, row, how, seed):
    """The draw is the inverse of the cumulative distribution, at its uniform number."""
    p, share = distribution(row, **how), uniform(np.uint64(seed), 0)
    cumulative = np.cumsum(p)
    assert p[token] > 0
    assert cumulative[token] >= share - 1e-7 and cumulative[token] - p[token] <= share + 1e-7


@pytest.mark.parametrize('vocab_size', [1, 2, 65, 3000, 50257])
@pytest.mark.parametrize('how', SETTINGS, ids=str)
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(how, vocab_size):
    """Independently computed, in float64, at the uniform number of the draw. Ties are among the logits too."""
    n = sizes(30, 300) if vocab_size < 50000 else 3
    logits = rows_of(n, vocab_size, seed=vocab_size)
    logits[::3] = np.round(logits[::3])
    for seed, token in enumerate(draw(logits, range(n), [how] * n, range(n))):
        check_draw(token, logits[seed], how, seed)


KINDS = {'equal': lambda x: x * 0 + 5, 'almost equal': lambda x: x * 1e-3, 'two values': lambda x: np.sign(x),
         'few values': np.round, 'wide': lambda x: x * 30, 'one finite': lambda x: np.where(x == x.max(), x, -np.inf),
         'some infinite': lambda x: np.where(x >= np.median(x), x, -np.inf),
         'far from 0': lambda x: np.round(x * 8) - 1e6,
         'one large': lambda x: np.where(x == x.min(), 15, x), 'falling': lambda x: -np.sort(-x)}


@pytest.mark.parametrize('vocab_size', [3, 15, 16, 17, 63, 64, 255, 256, 257, 4097])
@pytest.mark.parametrize('kind', KINDS)
def test_top_p_of_rows_of_any_shape(kind, vocab_size):
    """Where many logits are equal at the border of what is kept, or all are almost equal, or few are finite."""
    cases = [*itertools.product(
        rows_of(sizes(2, 10), vocab_size, seed=vocab_size), (1e-6, 0.1003, 0.5003, 0.9003, 0.9993, 1 - 1e-12),
        (dict(), dict(top_k=40), dict(min_p=0.03), dict(temperature=1e5), dict(temperature=0.3, top_k=9)))]
    logits = np.stack([KINDS[kind](row).astype(np.float32) for row, _, _ in cases])
    hows = [dict(top_p=top_p, **more) for _, top_p, more in cases]
    for seed, token in enumerate(draw(logits, range(len(cases)), hows, range(len(cases)))):
        check_draw(token, logits[seed], hows[seed], seed)


@pytest.mark.parametrize('order', ['rising', 'falling', 'rising and falling', 'equal', 'few'])
def test_the_kth_largest_of_numbers_in_any_order(order):
    """With partitions that leave almost all of the numbers this would go on for minutes."""
    n = 300_000
    row = {'rising': np.arange(n), 'falling': -np.arange(n), 'rising and falling': -abs(np.arange(n) - n // 2),
           'equal': np.zeros(n), 'few': np.arange(n) % 7}[order].astype(np.float32) / n
    for k in (1, n // 3, n - 1):
        value, above = threshold(row.copy(), np.ones(n), n, k)
        assert value == np.sort(row)[-k] and above == (row > value).sum()


@pytest.mark.parametrize('how', [dict(top_k=5), dict(top_p=0.8), dict(top_k=12, top_p=0.6, temperature=0.7),
                                 dict(temperature=2.0, top_p=0.3)], ids=str)
def test_the_kept_set_is_that_of_sample_token(how):
    """Each token that model.sample_token draws is drawn here too, and no other."""
    logits, n = rows_of(1, 40), sizes(3000, 30000)
    theirs = sample_token(torch.from_numpy(logits).expand(n, -1), how.get('temperature', 1.0), how.get('top_k'),
                          how.get('top_p'), torch.Generator().manual_seed(0))[:, 0]
    ours, theirs = (np.bincount(tokens, minlength=40) / n
                    for tokens in (draw(logits, [0] * n, [how] * n, range(n)), theirs))
    p = distribution(logits[0], **how)
    assert ((ours > 0) == (theirs > 0))[p > 0.01].all() and not ours[p == 0].any()
    assert np.abs(ours - theirs).max() < 5 / math.sqrt(n)


def test_temperature_0_takes_the_first_of_the_largest():
    logits = rows_of(20, 50)
    logits[3, 7] = logits[3, 9] = 100
    tokens = draw(logits, range(20), [dict(temperature=0, top_p=0.5)] * 20, range(20))
    assert tokens == sample_token(torch.from_numpy(logits), 0)[:, 0].tolist() and tokens[3] == 7


def test_seed_ignores_batchmates():
    """A draw is a function of the row, the settings, the seed and the number of the token."""
    logits, chooser = rows_of(64, 300), np.random.default_rng(0)
    alone, sampler = [], Sampler(300)
    of_each = [[drawing(i, vocab_size=300, **SETTINGS[i % len(SETTINGS)]) for i in range(64)] for _ in range(2)]
    for i, d in enumerate(of_each[0]):
        alone.append([Sampler(300).draw(logits[i:i + 1], [0], [d])[0] for _ in range(3)])
    done = [0] * 64
    while min(done) < 3:
        some = [i for i in chooser.permutation(64).tolist() if done[i] < 3][:chooser.integers(1, 65)]
        for i, token in zip(some, sampler.draw(logits, some, [of_each[1][i] for i in some])):
            assert token == alone[i][done[i]]
            done[i] += 1


def test_samples_of_one_row_have_seeds_of_their_own():
    logits, sampler = rows_of(1, 1000, scale=0.1), Sampler(1000)
    tokens = sampler.draw(logits, [0] * 8, [drawing(5, index=i, vocab_size=1000) for i in range(8)])
    assert len(set(tokens)) > 4 and tokens == draw(logits, [0] * 8, [{}] * 8, range(5, 13))


@pytest.mark.parametrize('n_threads', [1, 2, 3, 7, 99])
def test_threads_share_the_samples_of_a_step(monkeypatch, n_threads):
    """One thread draws each sample, with more samples than threads and with fewer. Only four threads have scratch."""
    monkeypatch.setattr('serving.sampler.n_cores', lambda: 4)
    logits, hows = rows_of(5, 300), SETTINGS + [dict(frequency_penalty=1.0)]
    for n in (1, 2, len(hows)):
        several, (shared, expected) = [], [[drawing(i, vocab_size=300, **how) for i, how in enumerate(hows[-n:])]
                                           for _ in range(2)]
        rows, sampler, alone = [i % 5 for i in range(n)], Sampler(300), Sampler(300)
        for drawings, of in ((shared, sampler), (expected, alone)):
            several.append(of.several(1, 2**62, of.draw(logits, rows, drawings), rows, drawings))
        for thread in reversed(range(n_threads)):
            assert DRAW.call(several[0].data.ctypes.data, logits.ctypes.data, several[0].tokens[1].ctypes.data, thread,
                             n_threads) == 1
        several[1].draw_from(torch.from_numpy(logits))
        for each in several:
            each.n_drawn = 1
        assert sampler.drawn_by(several[0]) == alone.drawn_by(several[1])
        assert sampler.draw(logits, rows, shared) == alone.draw(logits, rows, expected)


def test_uniform_numbers():
    x = np.array([[uniform(np.uint64(seed), n) for n in range(200)] for seed in range(200)])
    assert 0 <= x.min() and x.max() < 1 and len(np.unique(x)) == x.size
    for axis in (0, 1):
        assert abs(np.corrcoef(x.take(range(199), axis).ravel(), x.take(range(1, 200), axis).ravel())[0, 1]) < 0.02
    assert abs(x.mean() - 0.5) < 0.01 and abs((x < 0.1).mean() - 0.1) < 0.01
    assert uniform(np.uint64(0), 0) == uniform(np.uint64(0), 0) != uniform(np.uint64(2**64 - 1), 0)


def test_bias_min_tokens_and_penalties_by_hand():
    row = np.array([[2.0, -1.0, 0.5, 1.0, 3.0]], np.float32)

    def changed(d):
        copy, stops = row[0].copy(), np.array(d.stops, np.int64)
        change(copy, len(copy), np.array(d.changes), np.array(d.settings), d.n_generated, stops, len(stops))
        return copy.tolist()
    assert changed(drawing(vocab_size=5, logit_bias={1: 5.0, 4: -100})) == [2.0, 4.0, 0.5, 1.0, -97.0]
    held = drawing(vocab_size=5, stop_ids=[4], min_tokens=2)
    assert changed(held) == [2.0, -1.0, 0.5, 1.0, -math.inf]
    held.restore([0, 0])
    assert changed(held) == row[0].tolist()
    d = drawing(vocab_size=5, prompt=[1, 2], presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=2.0)
    d.restore([0, 0])
    assert changed(d) == [1.0 - 1.0 - 2 * 0.5, -2.0, 0.25, 1.0, 3.0]
    assert d.settings[1] == 0 and drawing(vocab_size=5, top_k=9).settings[1] == 5
    before = row.copy()
    assert draw(row, [0, 0], [dict(temperature=0, logit_bias={1: 9.0}), dict(temperature=0)], [0, 0]) == [1, 4]
    assert (row == before).all(), "samples of one prompt share a row"


def test_a_logit_that_a_penalty_makes_infinite_is_drawn():
    row = np.array([[3.0, 2e37, 1.0, 2e37, -2e37]], np.float32)
    for how in (dict(top_p=0.9), dict(top_k=3), dict(), dict(temperature=0.0)):
        assert draw(row, [0] * 9, [dict(prompt=[1, 3, 4], repetition_penalty=0.01, **how)] * 9, range(9)) == [1] * 9


def test_logprobs_equal_the_models():
    logits = rows_of(5, 3000)
    logits[2, 10:14] = 40
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    tokens = [3, 5, 12, 700, int(logits[4].argmax())]
    for i, found in enumerate(Sampler(3000).logprobs(logits, tokens, 5)):
        order = torch.sort(expected[i], descending=True, stable=True)
        assert found.token == tokens[i] and abs(found.logprob - float(expected[i, tokens[i]])) < 1e-7
        assert found.rank == 1 + int((expected[i] > expected[i, tokens[i]]).sum())
        assert [t for t, _ in found.top] == order.indices[:5].tolist()
        assert np.allclose([x for _, x in found.top], order.values[:5], atol=1e-7)
    assert Sampler(3000).logprobs(logits, tokens, 0)[0].top == []
    assert [t for t, _ in Sampler(3).logprobs(logits[:, :3], [0] * 5, 5)[4].top] == np.argsort(-logits[4, :3]).tolist()


@pytest.mark.parametrize('wrong', [dict(temperature=-1), dict(temperature=math.nan), dict(temperature=math.inf),
                                   dict(top_p=-0.1), dict(top_p=1.1), dict(min_p=2), dict(logprobs=21),
                                   dict(presence_penalty=3), dict(repetition_penalty=0), dict(min_tokens=-1),
                                   dict(logit_bias={1: math.nan})], ids=str)
def test_bad_settings_name_the_field(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)
