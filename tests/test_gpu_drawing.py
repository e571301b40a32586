"""Tokens drawn by the Triton kernels of decode/gpu/drawing.py: those of decode/draw.py, and the state of plain.draw."""
import itertools
import math

import numpy as np
import pytest
import torch
from conftest import sizes
from decode.gpu.inputs import IN_PROMPT, MOST_BIASES, MOST_STEPS, MOST_STOPS, N_SETTINGS, Draws, StepInputs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from on_triton import DEVICE, QUIET, compiled, compiled_apart, tl, triton

from decode.draw import DrawSettings, exponential_noise
from decode.draw import draw as defined
from decode.gpu import drawing, plain

pytestmark = QUIET
NEAR = 1e-5  # of a border of what is kept, or of the largest score: there roundings may draw another token


def settings_of(vocab_size, hows, seeds=None):
    """A `DrawSettings` of each row."""
    return [DrawSettings(vocab_size, seed, **how) for how, seed in zip(hows, seeds or itertools.count())]


def state_of(vocab_size, hows, seeds=None, left=100):
    """(`Draws`, `StepInputs`) of rows with these arguments of `DrawSettings`."""
    R, made = len(hows), dict(dtype=torch.int32)
    draws = Draws(
        torch.zeros(R, N_SETTINGS, dtype=torch.float64), torch.zeros(R, dtype=torch.int64), torch.zeros(R, **made),
        torch.full((R,), left, **made), torch.zeros(R, **made), torch.full((R, MOST_STOPS), -1, **made),
        torch.full((R, MOST_BIASES), -1, **made), torch.zeros(R, MOST_BIASES), torch.zeros(R, vocab_size, **made),
        torch.full((MOST_STEPS, R), -7), torch.zeros(R, **made), torch.zeros(R, **made))
    for row, s in enumerate(settings_of(vocab_size, hows, seeds)):
        draws.settings[row], draws.seeds[row] = torch.tensor(s.values), signed(s.seed)
        draws.min_tokens[row], n = s.min_tokens, len(s.biases)
        draws.stops[row, :len(s.stops)] = torch.tensor(s.stops, **made)
        draws.bias_tokens[row, :n], draws.biases[row, :n] = torch.tensor(s.bias_tokens), torch.tensor(s.biases)
        draws.counts[row, list(s.prompt)] = IN_PROMPT
    inputs = StepInputs(torch.full((R,), 3), torch.arange(R) + 10, torch.arange(R, **made), torch.zeros(R, 1, **made))
    return on_device(draws), on_device(inputs)


GOLDEN = 0x9E3779B97F4A7C15


def mixed_int(x):
    """The finaliser of splitmix64 on Python's numbers."""
    x %= 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def noise_key(seed, number):
    return mixed_int(mixed_int(seed + GOLDEN) + (number + 1) * GOLDEN)


def signed(seed):
    """The int64 with the bits of this uint64."""
    return (seed + 2**63) % 2**64 - 2**63


def on_device(tensors):
    return type(tensors)(*(t.to(DEVICE, copy=True) for t in tensors))


def rows_of(n, vocab_size, seed=0, scale=3.0):
    return (np.random.default_rng(seed).normal(size=(n, vocab_size)) * scale).astype(np.float32)


def draw(logits, draws, inputs):
    """The tokens that the kernels draw from a copy of logits, an array."""
    steps = draws.step.tolist()
    drawing.draw(torch.tensor(logits, device=DEVICE), draws, inputs)
    return [int(draws.drawn[step, row]) for row, step in enumerate(steps)]


def check_same_state(found, expected):
    for name, a, b in zip(type(found)._fields, found, expected):
        assert torch.equal(a, b), name


def is_near(logits, s, token):
    """Would other borders of what is kept, NEAR those of the settings, draw the token? In float64."""
    x, (temperature, top_k, *borders) = logits.astype(np.float64), s.values[:4]
    noise = exponential_noise([s.seed], [0], np.arange(len(x))[None])[0]
    for p, m in itertools.product((-NEAR, 0, NEAR), repeat=2):
        top_p, min_p = borders[0] + p, borders[1] * (1 + m)
        p = np.exp((x - x.max()) / temperature)
        p[p < min_p] = 0
        if 0 < top_k < len(x):
            p[x < np.sort(x)[-int(top_k)]] = 0
        order = np.argsort(-x, kind='stable')
        before = np.cumsum(p[order]) - p[order]
        if top_p < 1:
            p[order[before >= top_p * p.sum()]] = 0
        scores = p / noise
        if scores[token] > 0 and scores[token] >= scores.max() * (1 - 10 * NEAR):
            return True
    return False


def check_draws(logits, hows):
    """
    The kernels draw as `decode.draw.draw` does, but near borders, and leave the state of `plain`. Returns how many
    tokens differ.
    """
    R, vocab_size = logits.shape
    draws, inputs = state_of(vocab_size, hows)
    others, how = (on_device(draws), on_device(inputs)), settings_of(vocab_size, hows)
    tokens, theirs = draw(logits, draws, inputs), defined(torch.tensor(logits), how, [0] * R).tolist()
    for row, (token, other) in enumerate(zip(tokens, theirs)):
        assert token == other or is_near(logits[row], how[row], token), (row, hows[row], token, other)
    plain.draw(torch.tensor(logits, device=DEVICE), *others)
    assert others[0].drawn[0].tolist() == theirs
    if tokens == theirs:
        check_same_state(draws, others[0])
        check_same_state(inputs, others[1])
    return sum(token != other for token, other in zip(tokens, theirs))


@pytest.fixture
def small_blocks(monkeypatch):
    """Small blocks have few lanes: then many of the largest logits are not among the four largest of their lane."""
    monkeypatch.setattr(drawing, 'BLOCK', 128)
    monkeypatch.setattr(drawing, 'WARPS', 4)


@triton.jit
def uniform_kernel(seeds, numbers, tokens, found, N: tl.constexpr):
    i = tl.arange(0, N)
    key = drawing.noise_key(tl.load(seeds + i), tl.load(numbers + i))
    tl.store(found + i, drawing.uniform(key, tl.load(tokens + i)))


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 2), st.integers(0, 2**18)), min_size=64,
                max_size=64))
@example([(seed, n, n % 50257) for seed in (0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1)
          for n in (0, 1, 2, 63, 10**6, 2**30, 2**31 - 3, 2**31 - 2)])
def test_the_numbers_of_the_noise_have_the_bits_of_the_definition(cases):
    seeds, numbers, tokens = zip(*cases)
    columns = (torch.tensor(column, dtype=dtype, device=DEVICE) for column, dtype in (
        ([signed(s) for s in seeds], torch.int64), (numbers, torch.int32), (tokens, torch.int32)))
    found = torch.zeros(64, dtype=torch.float64, device=DEVICE)
    uniform_kernel[1,](*columns, found, 64)
    assert found.tolist() == [((mixed_int(noise_key(seed, n) + (token + 1) * GOLDEN) >> 12) + 0.5) * 2.0**-52
                              for seed, n, token in cases]


HOWS = [dict(), dict(temperature=0.5), dict(temperature=3.0), dict(temperature=0.0), dict(top_k=1), dict(top_k=7),
        dict(top_p=0.5), dict(top_p=0.95, temperature=2.0), dict(top_k=20, top_p=0.7), dict(min_p=0.1),
        dict(top_p=1e-9), dict(min_p=0.01, top_k=9, top_p=0.9, temperature=1.5), dict(temperature=1e-6),
        dict(temperature=1e5), dict(temperature=1e5, top_k=3, top_p=0.5), dict(top_k=100, top_p=0.9, min_p=1e-3),
        dict(top_p=1 - 1e-6), dict(temperature=1e30), dict(temperature=1.1e-30, top_p=0.5), dict(min_p=1.0),
        dict(temperature=100.0, top_p=0.9), dict(temperature=100.0, top_k=600)]


@pytest.mark.parametrize('vocab_size', [1, 2, 65, 1000, 4097])
def test_tokens_are_those_of_the_definition(vocab_size):
    hows = HOWS[vocab_size % 2::2] if sizes(True, False) else HOWS * 2
    logits = rows_of(len(hows), vocab_size, seed=vocab_size)
    logits[::3] = np.round(logits[::3])
    assert check_draws(logits, hows) <= len(hows) // 100


@pytest.mark.parametrize('vocab_size', sizes([700], [127, 513, 2000]))
def test_tokens_are_those_of_the_definition_with_few_lanes(small_blocks, vocab_size):
    test_tokens_are_those_of_the_definition(vocab_size)


KINDS = {'normal': lambda x: x, 'equal': lambda x: x * 0 + 5, 'almost equal': lambda x: x * 1e-3,
         'two values': np.sign, 'few values': np.round, 'zeros of both signs': lambda x: np.round(x) * 0,
         'wide': lambda x: x * 30, 'one finite': lambda x: np.where(x == x.max(), x, -np.inf),
         'some infinite': lambda x: np.where(x >= np.median(x), x, -np.inf), 'none finite': lambda x: x * 0 - np.inf,
         'far from 0': lambda x: np.round(x * 8) - 1e6, 'tiny': lambda x: x * 1e-40, 'huge': lambda x: x * 1e37,
         'one large': lambda x: np.where(x == x.min(), 15, x), 'falling': lambda x: -np.sort(-x)}
REALS = dict(allow_nan=False, width=32)
WAYS = st.fixed_dictionaries({}, optional=dict(
    temperature=st.sampled_from([0.0, 1.5e-30, 1e-6, 0.3, 0.7, 1.5, 100.0, 1e5, 1e30]) | st.floats(0.125, 4, **REALS),
    top_k=st.sampled_from([0, 1, 2, 40, 299, 300, 301, 2**24]) | st.integers(1, 300),
    top_p=st.sampled_from([1e-6, 0.1003, 0.5, 0.9003, 0.9993, 1.0]) | st.floats(2**-10, 1, **REALS),
    min_p=st.sampled_from([0.0, 1e-3, 0.03, 1.0]) | st.floats(0, 1, **REALS)))


@settings(max_examples=sizes(5, 40))
@given(rows=st.lists(st.tuples(st.sampled_from(sorted(KINDS)), WAYS), min_size=8, max_size=8),
       seed=st.integers(0, 2**32 - 1))
def test_rows_of_any_shape(rows, seed):
    """Where many logits are equal at the border of what is kept, or almost equal, or few are finite."""
    logits = [KINDS[kind](row) for (kind, _), row in zip(rows, rows_of(len(rows), 300, seed).astype(np.float64))]
    check_draws(np.stack(logits).astype(np.float32), [how for _, how in rows])


def test_rows_of_each_kind(small_blocks):
    kinds = list(KINDS)[::sizes(4, 1)]
    logits = np.stack([KINDS[kind](row) for kind, row in zip(kinds, rows_of(len(kinds), 700).astype(np.float64))])
    for top_p in sizes([0.5], [0.01, 0.5, 0.999]):
        check_draws(logits.astype(np.float32), [dict(top_p=top_p, top_k=600)] * len(kinds))


def test_equal_logits_at_the_border_of_top_p(small_blocks):
    """Kept are the first, so many that top_p is reached: counted by hand. Zeros of both signs are equal."""
    logits, step = np.zeros((12, 1000), np.float32), 7
    logits[:8, ::step] = 1  # 143 tokens
    logits[8:10], logits[10:, ::2] = -0.0, -0.0
    kept = [list(range(0, step * n, step)) for n in (1, 1, 2, 2, 50, 50, 143, 143)] + [list(range(500))] * 4
    hows = [dict(top_p=math.e * (len(tokens) - 0.5) / (math.e * 143 + 857)) for tokens in kept[:8]]
    hows += [dict(top_p=0.5), dict(top_p=0.5, top_k=3)] * 2
    for row, token in enumerate(draw(logits, *state_of(1000, hows))):
        assert token == kept[row][int(exponential_noise([row], [0], torch.tensor([kept[row]])).argmin())]


def test_draws_follow_the_distribution(small_blocks):
    """Of probabilities 10, 60 and 30 percent."""
    n = sizes(100, 1000)
    logits = np.log(np.array([[0.1, 0.6, 0.3]] * n, np.float32))
    tokens = draw(logits, *state_of(3, [{}] * n, seeds=range(1000, 1000 + n)))
    counts = np.bincount(tokens, minlength=3)
    expected = np.array([0.1, 0.6, 0.3]) * n
    assert ((counts - expected) ** 2 / expected).sum() < 13.8, "the chance of more is 0.1 percent"


CHANGES = [dict(presence_penalty=1.5), dict(frequency_penalty=0.7), dict(repetition_penalty=1.3, prompt=(1, 2, 3)),
           dict(repetition_penalty=0.5, frequency_penalty=-0.5, prompt=(4,)), dict(logit_bias={3: 100.0, 7: -100.0}),
           dict(logit_bias={t: 0.1 * t for t in range(50)}, temperature=0.5), dict(stops=(3, 4, 5), min_tokens=2),
           dict(stops=tuple(range(0, 60, 2)), min_tokens=3, logit_bias={2: 90.0}),
           dict(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=1.1, prompt=(0, 64), top_p=0.9),
           dict(temperature=0.0, frequency_penalty=1.0), dict(temperature=0.0, presence_penalty=2.0, top_k=3)]


@pytest.mark.parametrize('vocab_size', sizes([1500], [65, 1500]))
def test_penalties_over_several_steps(vocab_size):
    """The state that the draws go by stays on the device."""
    n_steps, R = sizes(4, 30), len(CHANGES)
    draws, inputs = state_of(vocab_size, CHANGES)
    how, others, texts = settings_of(vocab_size, CHANGES), (on_device(draws), on_device(inputs)), [[] for _ in CHANGES]
    for step in range(n_steps):
        logits = rows_of(R, vocab_size, seed=step // 3)
        changed, expected = (torch.tensor(logits, device=DEVICE) for _ in range(2))
        drawing.draw(changed, draws, inputs)
        plain.draw(expected, *others)
        torch.testing.assert_close(changed, expected, rtol=1e-6, atol=1e-6)
        for s, tokens in zip(how, texts):
            s.count(tokens)
        theirs = defined(torch.tensor(logits), how, [step] * R).tolist()
        for tokens, mine, other in zip(texts, draws.drawn[step].tolist(), theirs):
            assert mine in (-1, other)
            tokens += [mine] * (mine >= 0)
    check_same_state(draws, others[0])
    check_same_state(inputs, others[1])
    for counts, tokens in zip(draws.counts.cpu() % IN_PROMPT, texts):
        assert counts.tolist() == np.bincount(tokens, minlength=vocab_size).tolist()


def test_lists_that_are_full():
    """A bias, a stop and a penalty of one token, in lists without an end mark."""
    how = dict(logit_bias={t: 50.0 + t for t in range(MOST_BIASES)}, stops=range(400, 400 + MOST_STOPS), min_tokens=1,
               temperature=0.0)
    draws, inputs = state_of(700, [how, {}])
    logits = np.zeros((2, 700), np.float32)
    logits[1, 699] = 90
    assert draw(logits, draws, inputs) == [399, 699]
    assert draw(logits, draws, inputs) == [511, 699] and draws.left.tolist() == [0, 98]


def test_a_row_ends_at_a_stop_or_with_the_last_token():
    """Worked by hand: token 4 is drawn, then 2, which ends row 0; row 1 has one token left, and row 2 none."""
    draws, inputs = state_of(6, [dict(temperature=0.0, stops=(2, 5), min_tokens=1)] + [dict(temperature=0.0)] * 2)
    draws.left[:] = torch.tensor([9, 1, 0])
    before = on_device(draws), on_device(inputs)
    logits = np.array([[0, 0, 9, 0, 8, 9]] * 3, np.float32)
    assert draw(logits, draws, inputs) == [4, 2, -1]
    assert draws.left.tolist() == [8, 0, 0] and inputs.sequences.tolist() == [0, -1, 2]
    assert draw(logits, draws, inputs) == [2, -1, -1] and draw(logits, draws, inputs) == [-1, -1, -1]
    assert draws.left.tolist() == [0, 0, 0] and inputs.sequences.tolist() == [-1, -1, 2]
    assert draws.numbers.tolist() == [2, 1, 0] and draws.step.tolist() == [3, 3, 3]
    assert inputs.tokens.tolist() == [2, 2, 3] and inputs.positions.tolist() == [12, 12, 12]
    assert draws.counts.sum(1).tolist() == [2, 1, 0] and draws.broken.tolist() == [0, 0, 0]
    assert draws.drawn[3:].eq(-7).all()
    for old, new in zip(before[0] + before[1], draws + inputs):
        if new is not draws.step and new is not draws.drawn and new is not inputs.slot_table:
            assert torch.equal(old[2], new[2])


def test_broken_logits_mark_their_row_only():
    logits = rows_of(8, 3000)
    logits[1, 2999], logits[2, 0], logits[3, 1500:] = math.nan, math.inf, -math.inf
    logits[4, 7], logits[6] = -math.nan, math.nan
    hows = [dict(top_p=0.9, top_k=5)] * 5 + [dict(temperature=0.0)] * 3
    hows[7] = dict(repetition_penalty=0.01, prompt=(5,))
    logits[7, 5] = 2e37  # the penalty makes it infinite, and it is drawn
    draws, inputs = state_of(3000, hows)
    draws.broken[0] = 1
    other = on_device(draws)
    tokens = draw(logits, draws, inputs)
    plain.draw(torch.tensor(logits, device=DEVICE), other, on_device(inputs))
    assert draws.broken.tolist() == other.broken.tolist() == [1, 1, 1, 0, 1, 0, 1, 0]
    assert tokens[7] == 5 and all(0 <= token < 3000 for token in tokens)
    assert [tokens[row] for row in (0, 3, 5)] == [int(other.drawn[0, row]) for row in (0, 3, 5)]
    draws.left[:], draws.broken[:] = 0, 0
    assert draw(logits, draws, inputs) == [-1] * 8 and not draws.broken.any()


def test_a_row_does_not_depend_on_the_others():
    """The logits that it leaves have the same bits too. `drawn` is a slice of the columns, in a batch of padding."""
    hows = (CHANGES + HOWS)[::sizes(4, 1)]
    logits, R = rows_of(len(hows), 1500), len(hows)
    draws, inputs = state_of(1500, hows + [{}] * 5, seeds=range(50, 55 + R))
    alone = [(on_device(Draws(*(t[:, row:row + 1] if t is draws.drawn else t[row:row + 1] for t in draws))),
              on_device(StepInputs(*(t[row:row + 1] for t in inputs)))) for row in range(R)]
    together, each = torch.tensor(logits, device=DEVICE), torch.tensor(logits, device=DEVICE)
    for _ in range(2):
        drawing.draw(together, draws.rows(R), inputs.rows(R))
        for row in range(R):
            drawing.draw(each[row:row + 1], *alone[row])
    assert torch.equal(together, each) and draws.drawn[:, R:].eq(-7).all() and not draws.step[R:].any()
    assert torch.equal(draws.drawn[:, :R], torch.cat([d.drawn for d, _ in alone], 1))


def compile_for(arch):
    """The kernels as PTX; to be called without the interpreter."""
    state = state_of(50257, [{}])
    return compiled(arch, [(drawing, 'change_kernel'), (drawing, 'draw_kernel')],
                    lambda: drawing.draw(torch.zeros(1, 50257), *state))


def test_kernels_compile_for_a_gpu():
    """Without one. Seeds are mixed with unsigned shifts and products of 64 bits. No number is flushed to 0."""
    for kernels in compiled_apart('test_gpu_drawing', sizes([[90]], [[80], [90]])):
        ptx = '\n'.join(each['ptx'] for each in kernels)
        for needed in ('shr.u64', 'mul.lo.s64', 'cvt.rn.f64.u64', 'div.rn.f32', 'div.rn.f64'):
            assert needed in ptx, needed
        assert not any(flushing in ptx for flushing in ('add.ftz', 'sub.ftz', 'setp.ge.ftz', 'max.ftz'))
