"""Tokens drawn by the Triton kernels of decode/gpu/drawing.py: those of decode/draw.py, and the state after a draw."""
import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import sizes
from on_triton import DEVICE, QUIET
from plain_gpu import Direct
from plain_gpu import draw as draw_plainly
from test_draw import SHAPES, probabilities, rows_of
from toy_executor import bitmap

from decode.draw import DrawSettings, changed, exponential_noise
from decode.draw import draw as draw_of_definition
from decode.gpu import drawing
from decode.gpu.tables import BROKEN, FIELDS, IS_STOP, NOTHING, STOPS, StepInputs, Tables

pytestmark = QUIET
NEAR = 1e-5  # of a border of what is kept, or of the largest score: there roundings may draw another token
# (BLOCK, WARPS). Small blocks have few lanes: many of the largest logits are not among the four largest of their lane
LARGE, SMALL = (4096, 16), (128, 4)
SEEDS = 0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1
NUMBERS = 0, 1, 2, 63, 10**6, 2**30, 2**31 - 3, 2**31 - 2  # of the tokens that are drawn


def settings_of(vocab_size, hows, seeds=None):
    """A `DrawSettings` of each row."""
    return [DrawSettings(vocab_size, seed, **how) for how, seed in zip(hows, seeds or itertools.count())]


def table_of(R, vocab_size):
    return Tables(SimpleNamespace(vocab_size=vocab_size, block_size=1, window=0), R, DEVICE, Direct())


def state_of(vocab_size, hows, seeds=None, left=100, numbers=(0,) * 99):
    """`StepInputs` of rows with these arguments of `DrawSettings`, whose tables are in another order."""
    R = len(hows)
    table = table_of(R, vocab_size)
    rows = table.rows([SimpleNamespace(settings=s, n_drawn=number, tokens=[])
                       for s, number in zip(settings_of(vocab_size, hows, seeds), numbers)])
    table.step(rows, 1, np.full(R, 3), np.arange(R) + 10)
    table.draw(rows, left)
    table.send()
    table.inputs.drawn.fill_(-7)
    return table.inputs


def on_device(tensors, device=DEVICE):
    """A copy."""
    return type(tensors)(*(t.to(device, copy=True) for t in tensors))


def draw_in_kernels(logits, inputs):
    ended = torch.zeros(len(logits), dtype=torch.int32, device=DEVICE)
    drawing.draw(logits, inputs, ended)
    assert not ended.any()


def draw(logits, inputs, by=draw_in_kernels):
    """The tokens that are drawn from a copy of logits, an array."""
    steps = inputs.step.tolist()
    by(torch.tensor(logits, device=inputs.tokens.device), inputs)
    Direct().synchronize()
    codes = [int(inputs.drawn[step, row]) for row, step in enumerate(steps)]
    return [code % STOPS if code >= 0 else code for code in codes]


def check_same(found, expected):
    for name, a, b in zip(StepInputs._fields, found, expected):
        assert torch.equal(a.cpu(), b.cpu()), name


def is_near(logits, s, number, token):
    """Would other borders of what is kept, NEAR those of the settings, draw the token? In float64."""
    (temperature, top_k, *borders), noise = s.values[:4], exponential_noise([s.seed], [number], [range(len(logits))])[0]
    for slack in (-NEAR, 0, NEAR):
        scores = probabilities(logits.astype(np.float64), temperature, int(top_k), *borders, slack) / noise
        if scores[token] > 0 and scores[token] >= scores.max() * (1 - 10 * NEAR):
            return True
    return False


def check_draws(logits, hows, block):
    """The kernels draw as the definition does, but near borders, and leave its state."""
    how, numbers = settings_of(logits.shape[1], hows, SEEDS * 3), NUMBERS * 3
    state = state_of(logits.shape[1], hows, SEEDS * 3, numbers=numbers)
    others = on_device(state, 'cpu')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, 'BLOCK', block[0])
        patch.setattr(drawing, 'WARPS', block[1])
        patch.setattr(drawing, 'PROGRAMS', 2 * len(hows))
        tokens, theirs = draw(logits, state), draw(logits, others, by=draw_plainly)
    for row, (token, other) in enumerate(zip(tokens, theirs)):
        assert token == other or is_near(logits[row], how[row], numbers[row], token), (row, hows[row], token, other)
    if tokens == theirs:
        check_same(state, others)


HOWS = [dict(), dict(temperature=3.0), dict(temperature=0.0), dict(top_k=1), dict(top_k=7),
        dict(top_p=0.5), dict(top_p=0.95, temperature=2.0), dict(top_k=20, top_p=0.7), dict(min_p=0.1),
        dict(top_p=1e-9), dict(min_p=0.01, top_k=9, top_p=0.9, temperature=1.5), dict(temperature=1e-6),
        dict(temperature=1e5), dict(temperature=1e5, top_k=3, top_p=0.5), dict(top_k=100, top_p=0.9, min_p=1e-3),
        dict(top_p=1 - 1e-6), dict(temperature=1e30), dict(temperature=1.1e-30, top_p=0.5), dict(min_p=1.0),
        dict(temperature=100.0, top_p=0.9), dict(temperature=100.0, top_k=600), dict(top_k=2**24, top_p=0.1003)]
KINDS = SHAPES | {'zeros of both signs': lambda x: np.round(x) * 0, 'none finite': lambda x: x * 0 - np.inf,
                  'tiny': lambda x: x * 1e-40, 'huge': lambda x: x * 1e37}


def rows_like(hows):
    """(kind, settings) of rows with ties here and there."""
    kinds = itertools.cycle(['rounded', 'normal', 'normal'])
    return [('two values' if how.get('temperature') == 0 else kind, how) for kind, how in zip(kinds, hows)]


def any_rows(seed):
    choose = random.Random(seed)
    return [(choose.choice([*KINDS]), choose.choice(HOWS) | choose.choice(HOWS)) for _ in range(8)]


@pytest.mark.parametrize('vocab_size, block, rows', [
    *[(n, LARGE, rows_like(HOWS[n % 2::2])) for n in sizes((1, 65, 4097), (1, 2, 65, 1000, 4097))],
    (700, SMALL, rows_like(HOWS[::2])),
    *[(n, SMALL, rows_like(HOWS)) for n in sizes([], [127, 513, 2000])],
    (700, SMALL, [(kind, dict(top_p=p, top_k=600)) for p, kind in zip(itertools.cycle([0.5, 0.003, 0.999]), KINDS)]
     [::sizes(12, 1)]),
    # more than four of each lane are kept, and whole blocks of equal ones
    (700, SMALL, [*[('almost equal', dict(top_k=513))] * sizes(3, 9),
                  *[('equal', dict(top_p=(n - 0.5) / 700)) for n in (1, 128, 384)]]),
    *[(300, (LARGE, SMALL)[seed % 2], any_rows(seed)) for seed in range(sizes(2, 40))]])
def test_tokens_are_those_of_the_definition(vocab_size, block, rows):
    """Also where many logits are equal at the border of what is kept, or almost equal, or few are finite."""
    normal = rows_of(len(rows), vocab_size, random.Random(str(rows)).getrandbits(32)).astype(np.float64)
    logits = [KINDS[kind](row) for (kind, _), row in zip(rows, normal)]
    check_draws(np.stack(logits).astype(np.float32), [how for _, how in rows], block)


CHANGES = [dict(presence_penalty=1.5), dict(frequency_penalty=0.7), dict(repetition_penalty=1.3, prompt=(1, 2, 3)),
           dict(repetition_penalty=0.5, frequency_penalty=-0.5, prompt=(4,)), dict(logit_bias={3: 100.0, 7: -100.0}),
           dict(logit_bias={t: 0.1 * t for t in range(50)}, temperature=0.5), dict(stop_ids=(3, 4, 5), min_tokens=2),
           dict(stop_ids=range(0, 60, 2), min_tokens=2**40, logit_bias={t: 90.0 for t in range(4)}),
           dict(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=1.1, prompt=(0, 64), top_p=0.9),
           dict(temperature=0.0, frequency_penalty=1.0), dict(temperature=0.0, presence_penalty=2.0, top_k=3),
           dict(presence_penalty=3.0, stop_ids=(9,), min_tokens=1, logit_bias={9: 50.0}, prompt=(9,)), dict(), dict()]


@pytest.mark.parametrize('vocab_size', sizes([1100], [65, 1500]))
def test_changed_logits_over_several_steps(vocab_size):
    """The state that the draws go by stays on the device. A row ends at a stop, or with the last token that it has."""
    R = len(CHANGES)
    inputs = state_of(vocab_size, CHANGES, left=[100] * (R - 2) + [2, 0])
    how, others, sequences = settings_of(vocab_size, CHANGES), on_device(inputs, 'cpu'), inputs.sequences.tolist()
    texts = [[] for _ in CHANGES]
    for step in range(sizes(4, 30)):
        logits = rows_of(R, vocab_size, seed=step // 3)
        found, going = torch.tensor(logits, device=DEVICE), (inputs.left > 0).tolist()
        draw_in_kernels(found, inputs)
        draw(logits, others, by=draw_plainly)
        check_same(inputs, others)
        for row, (s, tokens) in enumerate(zip(how, texts)):
            s.count(tokens)
            expected = changed(torch.tensor(logits[row]), s, step) if going[row] else torch.tensor(logits[row])
            torch.testing.assert_close(found[row].cpu(), expected, rtol=1e-6, atol=1e-6)
            tokens += [code % STOPS for code in inputs.drawn[step, row:row + 1].tolist() if code != NOTHING]
    assert [len(tokens) for tokens in texts[-3:]] == [2, 2, 0] and not inputs.left[-3:].any()
    for marks, tokens in zip(inputs.marks[sequences].cpu() & (IS_STOP - 1), texts):
        assert marks.tolist() == np.bincount(np.array(tokens, int), minlength=vocab_size).tolist()


def test_broken_logits_mark_their_row_only():
    logits = rows_of(8, 3000)
    logits[1, 2999], logits[2, 0], logits[3, 1500:] = math.nan, math.inf, -math.inf
    logits[4, 7], logits[6] = -math.nan, math.nan
    hows = [dict(top_p=0.9, top_k=5)] * 5 + [dict(temperature=0.0)] * 3
    hows[7] = dict(repetition_penalty=0.01, prompt=(5,))
    logits[7, 5] = 2e37  # the penalty makes it infinite, and it is drawn
    inputs = state_of(3000, hows)
    inputs.broken[0] = 1
    others = on_device(inputs, 'cpu')
    tokens, theirs = draw(logits, inputs), draw(logits, others, by=draw_plainly)
    assert inputs.broken.tolist() == others.broken.tolist() == [1, 1, 1, 0, 1, 0, 1, 0]
    assert [token == BROKEN for token in tokens] == inputs.broken.tolist() and tokens[7] == 5
    assert [tokens[row] for row in (0, 3, 5)] == [theirs[row] for row in (0, 3, 5)]
    inputs.left[:], inputs.broken[:] = 0, 0
    assert draw(logits, inputs) == [NOTHING] * 8 and not inputs.broken.any()


def test_a_row_does_not_depend_on_the_others():
    """The logits that it leaves have the same bits too. `drawn` is a slice of the columns, in a batch of padding."""
    hows = (CHANGES + HOWS)[::sizes(4, 1)]
    logits, R = rows_of(len(hows), 1500), len(hows)
    inputs, n = state_of(1500, hows + [{}] * 5, seeds=range(50, 55 + R)), len(FIELDS)
    alone = [on_device(StepInputs(*(t[row:row + 1] for t in inputs[:n]), *inputs[n:-1], inputs.drawn[:, row:row + 1]))
             for row in range(R)]
    together, each = torch.tensor(logits, device=DEVICE), torch.tensor(logits, device=DEVICE)
    for _ in range(2):
        draw_in_kernels(together, inputs.rows(R))
        for row in range(R):
            draw_in_kernels(each[row:row + 1], alone[row])
    assert torch.equal(together, each) and inputs.drawn[:, R:].eq(-7).all() and not inputs.step[R:].any()
    assert torch.equal(inputs.drawn[:, :R], torch.cat([own.drawn.cpu() for own in alone], 1))


def test_only_allowed_tokens_are_drawn():
    """A bitmap is a bias of minus infinity, beside others, and made anew for each call; the next sequence has none."""
    logits, rng, table = rows_of(3, 200), np.random.default_rng(1), table_of(3, 200)
    texts = [SimpleNamespace(settings=s, n_drawn=0, tokens=[]) for s in settings_of(
        200, [dict(), dict(top_k=5, logit_bias={7: 90.0, 8: 90.0}), dict(temperature=0.0)])]
    rows = table.rows(texts)
    for n in (1, 3, 60, 0):
        for text in texts[:2]:
            text.n_drawn, text.settings.allowed = n, bitmap({7, *rng.choice(200, n).tolist()}, 200)
        if not n:
            texts[0].settings, texts[1].settings = settings_of(200, [dict(), dict()])
        table.draw(rows, 1)
        table.send()
        settings, numbers = [text.settings for text in texts], [text.n_drawn for text in texts]
        expected = draw_of_definition(torch.tensor(logits), settings, numbers).tolist()
        found = torch.tensor(logits, device=DEVICE)
        draw_in_kernels(found, table.inputs)
        table.queue.event().synchronize()
        assert table.inputs.drawn[0].tolist() == expected
        for row, *of in zip(found.cpu(), torch.tensor(logits), settings, numbers):
            assert torch.equal(row, changed(*of))
