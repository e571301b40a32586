"""The KeyValueCache operator compared with a dictionary of tokens, for all of its arguments."""
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from conftest import sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from test_storage import slowly_quantised

from kvcache.openppl import key_value_cache

SHAPES = {0: 'TL2HD', 1: 'LT2HD', 2: 'L2THD', 3: 'L2HTD'}
# max_seqlen and max_kvlen are scalar tensors in the operator's definition
LENGTHS = int, torch.tensor, partial(torch.tensor, dtype=torch.int32), partial(torch.tensor, dtype=torch.uint8)


def empty(layout, max_t, n_layer, n_head, last, dtype):
    sizes = dict(T=max_t, L=n_layer, H=n_head, D=last) | {'2': 2}
    return torch.zeros(*(sizes[axis] for axis in SHAPES[layout]), dtype=dtype)


def read_back(x, bits, group, kept):
    """A row x as it is returned, when scales, or without quantisation numbers, are stored in the dtype `kept`."""
    if bits == 0:
        return x.astype(kept).astype(x.dtype)
    whole, scales = slowly_quantised(x, bits, group)
    scales = np.array(scales, dtype=kept).astype(np.float32).repeat(group)
    return (np.array(whole, dtype=np.float32) * scales).astype(x.dtype)


@st.composite
def cases(draw):
    bits = draw(st.sampled_from([0, 8, 4]))
    group = draw(st.sampled_from([2, 4, 8]))
    return dict(
        seed=draw(st.integers(0, 2**31)), bits=bits, group=group, Dh=group * draw(st.integers(1, 3)),
        H=draw(st.integers(1, 3)), n_layer=draw(st.integers(1, 2)), mode=draw(st.integers(0, 1)),
        layout=draw(st.integers(0, 3)), repeat=draw(st.integers(1, 3)), page=draw(st.integers(1, 4)),
        steps=draw(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4)),
        dtype=draw(st.sampled_from([np.float32, np.float16])), kept=draw(st.sampled_from([np.float32, np.float16])),
        length=draw(st.sampled_from(LENGTHS)))


@settings(max_examples=sizes(60, 300))
@given(cases())
def test_the_operator_is_a_dictionary_of_tokens(case):
    """Several steps of different lengths, layer by layer: keys and values are those of the dictionary, bit by bit."""
    rng, B, L, H, Dh = np.random.default_rng(case['seed']), 3, case['n_layer'], case['H'], case['Dh']
    bits, group, layout, page, length = (case[name] for name in ('bits', 'group', 'layout', 'page', 'length'))
    steps = [step for step in case['steps'] if sum(step)]
    total = np.sum(steps, axis=0) if steps else np.zeros(B, int)
    n_pages = max(1, -(-int(total.max()) // page)) if len(total) else 1
    max_t = B * n_pages * page + 5
    if case['mode'] == 0:
        cachestarts = 3 + rng.permutation(B) * max(1, total.max())
    else:
        pages = rng.permutation(B * n_pages).reshape(B, n_pages) * page + 5
        needed = np.arange(n_pages) < -(-total // page)[:, None]
        cachestarts = np.where(needed, pages, -1)
    last = {0: Dh, 8: Dh, 4: Dh // 2}[bits]
    dtype = {0: getattr(torch, np.dtype(case['kept']).name), 8: torch.int8, 4: torch.uint8}[bits]
    cache = empty(layout, max_t, L, H, last, dtype)
    scale = empty(layout, max_t, L, H, Dh // group, getattr(torch, np.dtype(case['kept']).name)) if bits else None
    rows = {}  # {(sequence, position, layer, 0 key or 1 value, head): the row that is returned}
    start = np.zeros(B, dtype=np.int64)
    for step in steps:
        seqstarts = np.concatenate([[0], np.cumsum(step)])
        kvstarts = seqstarts + np.concatenate([[0], np.cumsum(start)])
        for layer in range(L):
            k, v = (rng.normal(0, 2, (seqstarts[-1], H, Dh)).astype(case['dtype']) for _ in range(2))
            for b, h, (kind, x) in itertools.product(range(B), range(H), enumerate((k, v))):
                for t in range(step[b]):
                    rows[b, start[b] + t, layer, kind, h] = read_back(x[seqstarts[b] + t, h], bits, group, case['kept'])
            out = key_value_cache(
                *map(torch.from_numpy, (k, v, seqstarts, kvstarts, cachestarts, start)), length(4),
                length(int(kvstarts[-1])), cache, scale, num_layer=L, layer_idx=layer, quant_bit=bits,
                quant_group=group, num_repeat=case['repeat'], cache_mode=case['mode'], cache_layout=layout,
                page_size=page)
            for kind in range(2):
                assert out[kind].shape == (kvstarts[-1], H * case['repeat'], Dh)
                for b, h in itertools.product(range(B), range(H * case['repeat'])):
                    for t in range(start[b] + step[b]):
                        expected = rows[b, t, layer, kind, h // case['repeat']]
                        assert np.array_equal(out[kind][kvstarts[b] + t, h].numpy(), expected)
        start = start + step


VECTOR = dict(seqstarts=torch.tensor([0, 3, 4]), start_pos=torch.tensor([0, 2]), kvstarts=torch.tensor([0, 3, 6]))


@pytest.mark.parametrize('mode, cachestarts, stored, loaded', [
    (0, [0, 16], [0, 1, 2, 18], [0, 1, 2, 16, 17, 18]),
    (1, [[8, 0], [24, 16]], [8, 9, 0, 16], [8, 9, 0, 24, 25, 16]),
])
@pytest.mark.parametrize('layout', SHAPES)
def test_worked_vector(mode, cachestarts, stored, loaded, layout):
    cache = empty(layout, 32, 1, 1, 2, torch.float32)
    # (T, 2, H, D)
    rows = {0: cache[:, 0], 1: cache[0], 2: cache[0].transpose(0, 1), 3: cache[0].permute(2, 0, 1, 3)}[layout]
    rows[:] = torch.arange(32.)[:, None, None, None]
    k, v = (100 * sign * torch.arange(1., 5)[:, None, None].expand(4, 1, 2) for sign in (1, -1))
    key, value = key_value_cache(k, v, **VECTOR, cachestarts=torch.tensor(cachestarts), max_seqlen=3, max_kvlen=3,
                                 cache=cache, cache_mode=mode, cache_layout=layout, page_size=2)
    expected = [float(row) for row in loaded]
    for row, token in zip(stored, (100, 200, 300, 400)):
        assert rows[row, 0].eq(token).all() and rows[row, 1].eq(-token).all()
        expected[loaded.index(row)] = token
    assert key[:, 0, 0].tolist() == expected
    untouched = [row for row in range(32) if row not in stored]
    assert rows[untouched, 0, 0, 0].tolist() == untouched


GOOD = VECTOR | dict(num_layer=2, layer_idx=1, quant_bit=8, quant_group=4, cache_mode=1, cache_layout=2, page_size=2,
                     max_seqlen=3, max_kvlen=3, cachestarts=torch.tensor([[8, 0], [24, 16]]),
                     current_key=torch.ones(4, 3, 8), current_value=torch.ones(4, 3, 8))


@pytest.mark.parametrize('words, changed', [
    *[(name, {name: value}) for name, value in (
        ('cache_mode', 2), ('cache_layout', 4), ('cache_layout', -1), ('quant_bit', 3), ('layer_idx', 2),
        ('num_repeat', 0), ('page_size', 0), ('max_seqlen', 2), ('max_seqlen', torch.tensor(2)), ('max_kvlen', 2))],
    *[(name, {name: torch.tensor(value)}) for name, value in (
        ('seqstarts', [0, 4, 3]), ('seqstarts', [0, 3, 5]), ('seqstarts', [1, 3, 4]), ('kvstarts', [0, 3, 5]),
        ('kvstarts', [0, 3]), ('start_pos', [0, -2]), ('start_pos', [0]), ('cachestarts', [8, 24]))],
    *[(words, dict(cachestarts=torch.tensor(starts))) for words, starts in (
        ('not all among', [[8, -1], [24, 16]]), ('not all among', [[8, 32], [24, 16]]),
        ('not all among', [[8, 0], [-1, 16]]), ('not all among', [[8, 2**63 - 1], [24, 16]]), ('pages', [[8], [24]]),
        ('overlap', [[8, 16], [24, 16]]), ('overlap', [[8, 0], [8, 16]]))],
    ('overlap', dict(cache_mode=0, cachestarts=torch.tensor([0, 1]))),
    ('cachestarts', dict(cache_mode=0)),
    ('divide Dh', dict(quant_group=3)),
    *[('scale must be', dict(scale=scale)) for scale in (None, torch.zeros(2, 2, 32, 3, 1))],
    ('rows and the scale', dict(scale=torch.zeros(2, 2, 31, 3, 2))),
    *[('cache must be', changed) for changed in (
        dict(cache_layout=0), dict(cache=torch.zeros(2, 2, 32, 4, 8, dtype=torch.int8)),
        dict(cache=torch.zeros(2, 2, 32, 3, 8)))],
    ('expanded', dict(cache=torch.zeros(2, 2, 1, 3, 8, dtype=torch.int8).expand(2, 2, 32, 3, 8))),
    *[('alike', changed) for changed in (
        dict(current_value=torch.ones(4, 3, 4)), dict(current_key=torch.ones(4, 3, 8).double()),
        dict(current_key=torch.ones(4, 3, 0), current_value=torch.ones(4, 3, 0)))],
    ('float16 holds', dict(scale=torch.zeros(2, 2, 32, 3, 2, dtype=torch.float16),
                           current_key=torch.full((4, 3, 8), 1e7))),
    ('does not fit', dict(start_pos=torch.tensor([0, 10**13]), kvstarts=torch.tensor([0, 3, 4 + 10**13]),
                          max_kvlen=2 * 10**13)),
])
def test_what_does_not_go_together_is_refused_and_nothing_is_written(words, changed):
    cache, scale = torch.zeros(2, 2, 32, 3, 8, dtype=torch.int8), torch.zeros(2, 2, 32, 3, 2)
    arguments = GOOD | dict(cache=cache, scale=scale)
    key_value_cache(**(arguments | dict(cache=cache.clone(), scale=scale.clone())))
    arguments |= changed
    with pytest.raises(ValueError, match=words):
        key_value_cache(**arguments)
    for tensor in (arguments['cache'], arguments['scale'], cache, scale):
        assert tensor is None or not tensor.any()


def test_a_past_that_two_sequences_share_is_read_by_both():
    """Sequence 0 and 1 have rows 0 and 1 in common, and each a current token of its own."""
    cache = torch.zeros(4, 1, 2, 1, 2)
    cache[:2] = torch.arange(8.).view(2, 1, 2, 1, 2)
    new = torch.tensor([[[8., 9]], [[10, 11]]])
    starts = dict(seqstarts=torch.tensor([0, 1, 2]), kvstarts=torch.tensor([0, 3, 6]), start_pos=torch.tensor([2, 2]),
                  max_seqlen=1, max_kvlen=3)
    key, value = key_value_cache(new, new, cachestarts=torch.tensor([[0, 2], [0, 3]]), cache=cache, cache_mode=1,
                                 page_size=2, **starts)
    assert key[:, 0, 0].tolist() == [0, 4, 8, 0, 4, 10] and value[:, 0, 1].tolist() == [3, 7, 9, 3, 7, 11]


def test_nothing_is_recorded_for_backward():
    cache, new = torch.zeros(4, 1, 2, 1, 2, requires_grad=True), torch.ones(1, 1, 2, requires_grad=True)
    key, _ = key_value_cache(new, new, torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([0]),
                             torch.tensor([0]), 1, 1, cache)
    assert not key.requires_grad and cache[0].sum() == 4


def test_the_current_keys_may_be_rows_of_the_cache():
    """They are read before anything is written: rows 0 and 1 are swapped with rows 2 and 3."""
    cache, starts = torch.arange(8.).view(4, 1, 2, 1, 1), torch.tensor([0, 2, 4])
    before = cache.clone()
    key, value = key_value_cache(cache[:, 0, 0], cache[:, 0, 1], starts, starts, torch.tensor([2, 0]),
                                 torch.tensor([0, 0]), 2, 2, cache)
    assert torch.equal(torch.stack((key, value), dim=1), before[:, 0]) and torch.equal(cache, before[[2, 3, 0, 1]])
