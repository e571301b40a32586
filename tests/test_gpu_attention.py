"""Embeddings, angles, the store and attention on a GPU against their functions in PyTorch, and their bits."""
import math
from types import SimpleNamespace

import plain_gpu
import pytest
import torch
from conftest import sizes
from on_triton import DEVICE, QUIET, small_tiles  # noqa: F401 (a fixture)

from decode.gpu import attention, slots, storing
from decode.gpu.slots import Columns
from decode.gpu.step import Geometry, KVLayer, StepInputs
from decode.gpu.weights import Norm
from kvcache.storage import Rows
from positions import alibi_slopes, rotary_frequencies

pytestmark = QUIET
MOST_NEW = sizes(2, 3)  # rows of a sequence
SHAPES = dict(
    learned=dict(n_head=1, head_dim=64),
    narrow=dict(n_head=2, head_dim=6),
    rope=dict(n_head=1, head_dim=20, position='rope'),
    window=dict(n_head=1, head_dim=16, window=37),
    rope_sinks=dict(n_head=1, head_dim=16, position='rope', window=45, n_sink=5),
    alibi=dict(n_head=3, head_dim=16, position='alibi'),
    alibi_sinks=dict(n_head=2, head_dim=6, position='alibi', window=45, n_sink=18),
    grouped=dict(n_head=6, n_kv_head=2, head_dim=20, position='rope', window=50, n_sink=3))
TOLERANCES = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def geometry_of(n_head, head_dim, n_kv_head=0, position='learned', window=0, n_sink=0, block_size=100, kind='float32',
                n_slots=1600):
    """A `Geometry`, and a `KVLayer` of random numbers, in `Rows` of kvcache/storage.py."""
    n_kv_head = n_kv_head or n_head
    rows = [Rows(n_slots, n_kv_head, head_dim, kind, DEVICE) for _ in 'kv']
    for each in rows:
        each.write(torch.arange(n_slots, device=DEVICE), torch.randn(n_kv_head, n_slots, head_dim, device=DEVICE))
    kv = KVLayer(*(None if t is None else t.view(-1) for t in (*(r.data for r in rows), *(r.scale for r in rows))))
    config = SimpleNamespace(block_size=block_size, window=window, n_sink=n_sink)
    slopes = alibi_slopes(n_head, torch.float32, DEVICE) if position == 'alibi' else None
    return Geometry(n_head, n_kv_head, head_dim, window, n_sink, Columns.of(config, MOST_NEW), slopes, head_dim,
                    n_slots * head_dim, 0 if kind != 'int8' else rows[0].group), kv


def on_cpu(t):
    """A copy of a tensor, or None."""
    return t if t is None else t.to('cpu', copy=True)


def rows_of(ends, n_padding=1):
    """Of sequences whose last positions are `ends`: (sequence, position) of up to MOST_NEW rows each, and padding."""
    firsts = [max(0, end - int(torch.randint(MOST_NEW, ()))) for end in ends]
    rows = [(s, p) for s, end in enumerate(ends) for p in range(firsts[s], end + 1)] + [(-1, 7)] * n_padding
    return [rows[i] for i in torch.randperm(len(rows))]


def inputs_of(rows, g, table=None):
    """`StepInputs` of rows, by default with slots in random order."""
    sequences, positions = zip(*rows)
    if table is None:
        n = max(0, *sequences) + 1
        table = torch.randperm(g.head_stride // g.head_dim)[:n * g.columns.n_columns].view(n, -1)
    return StepInputs(torch.zeros(len(rows), dtype=torch.int64, device=DEVICE), torch.tensor(positions, device=DEVICE),
                      torch.tensor(sequences, dtype=torch.int32, device=DEVICE), table.to(DEVICE, torch.int32))


def without_unseen(kv, inputs, g):
    """A copy of keys and values in which those that no row sees are NaN, or -128."""
    seen = torch.zeros(g.head_stride // g.head_dim, dtype=torch.bool, device=DEVICE)
    for sequence, position in zip(inputs.sequences.tolist(), inputs.positions):
        if sequence >= 0:
            columns = g.columns.column(plain_gpu.seen_at(position, g), g.n_sink)
            seen[inputs.slot_table[sequence, columns].long()] = True
    return KVLayer(*(None if t is None else t.view(g.n_kv_head, len(seen), -1).clone().masked_fill_(
        ~seen[:, None], torch.nan if t.is_floating_point() else -128).view(-1) for t in kv))


def queries(rows, g, dtype, shape):
    kinds = 2 if shape.get('position') == 'rope' and g.n_sink else 1
    return torch.randn(len(rows), kinds, g.n_head, g.head_dim).to(DEVICE, dtype)


def attended(q, kv, inputs, g):
    """y of the kernels; what nobody writes is NaN."""
    y = torch.full((len(q), g.n_head * g.head_dim), torch.nan, dtype=q.dtype, device=DEVICE)
    parts = torch.full((len(q), g.columns.n_splits, g.n_head, g.head_dim + 2), torch.nan, device=DEVICE)
    attention.attend(q, y, parts, kv, inputs, g)
    return y


def check_attend(rows, dtype=torch.float32, **shape):
    g, kv = geometry_of(**shape)
    inputs, q = inputs_of(rows, g), queries(rows, g, dtype, shape)
    kv = without_unseen(kv, inputs, g)
    y = attended(q, kv, inputs, g)
    expected = torch.zeros(y.shape, dtype=torch.float64, device=DEVICE)
    plain_gpu.attend(q, expected, None, kv, inputs, g)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=TOLERANCES[dtype])
    assert not y[inputs.sequences < 0].any()


@pytest.mark.usefixtures('small_tiles')
@pytest.mark.parametrize('name, dtype, kind', [(name, 'float32', 'float32') for name in SHAPES] + [
    ('learned', 'bfloat16', 'bfloat16'), ('grouped', 'float16', 'float16'), ('grouped', 'float16', 'int8'),
    ('window', 'float32', 'int8'), ('alibi_sinks', 'float32', 'bfloat16'), ('narrow', 'float16', 'float32')] + (
    [('grouped', 'bfloat16', 'bfloat16'), ('grouped', 'bfloat16', 'int8')] if DEVICE == 'cuda' else []))
def test_attention_is_that_of_plain(name, dtype, kind):
    """
    Whatever splits, sinks and rings there are, from the first position on. The interpreter has no dots of bfloat16:
    queries of grouped heads in it are tried on a GPU.
    """
    torch.manual_seed(list(SHAPES).index(name))
    ring = geometry_of(**SHAPES[name])[0].columns.ring
    ends = [2, 3 * ring + SHAPES[name]['window'] - 5] if ring else [0, 99]
    more = [0, 5, 17, 31, 44, 48, 49, 50, 95]
    check_attend(rows_of(ends + sizes([], more)), getattr(torch, dtype), **SHAPES[name], kind=kind)


@pytest.mark.parametrize('block_size, ends', [(40, [0, 39]), (300, [127, 128, 299])])
def test_attention_in_tiles_of_their_true_size(block_size, ends):
    """One split, which writes the result itself, and three, of two tiles each. Three scales in a head of 96."""
    torch.manual_seed(0)
    check_attend(rows_of(ends), n_head=1, head_dim=96, block_size=block_size, kind='int8')


@pytest.mark.usefixtures('small_tiles')
@pytest.mark.parametrize('name, dtype', [('learned', torch.float32), ('rope_sinks', torch.bfloat16),
                                         ('grouped', torch.float16)] + sizes([], [
    (name, dtype) for name in SHAPES for dtype in (torch.float32, torch.float16)]))
def test_bits_of_a_row_are_its_own(name, dtype):
    """Alone and in a batch, in other slots, and with a wider table, y has the same bits."""
    torch.manual_seed(1)
    g, kv = geometry_of(**SHAPES[name], kind='float16')
    rows = rows_of(sizes([31, 99], [0, 31, 60, 99]), 2)
    inputs, q = inputs_of(rows, g), queries(rows, g, dtype, SHAPES[name])
    y = attended(q, without_unseen(kv, inputs, g), inputs, g)
    for r in torch.randperm(len(rows))[:sizes(3, 20)].tolist():
        moved = torch.randperm(g.head_stride // g.head_dim, device=DEVICE)  # slot i goes to slot moved[i]
        others = KVLayer(*(t if t is None else t.view(g.n_kv_head, len(moved), -1)[:, moved.argsort()].reshape(-1)
                           for t in kv))
        table = moved[inputs.slot_table[rows[r][0]].long()][None]
        alone = inputs_of([(min(rows[r][0], 0), rows[r][1])], g, torch.nn.functional.pad(table, (0, 32)))
        found = attended(q[r:r + 1].clone(), without_unseen(others, alone, g), alone, g)
        assert torch.equal(found[0], y[r]), rows[r]


@pytest.mark.usefixtures('small_tiles')
@pytest.mark.parametrize('name', ['window', 'rope_sinks', 'alibi_sinks'])
def test_far_positions_have_the_bits_of_near_ones(name):
    """A window of the same keys, a multiple of ring and split further, beyond 2^33 positions."""
    torch.manual_seed(2)
    rows, (g, kv) = [(0, 150), (1, 333), (1, 334)], geometry_of(**SHAPES[name])
    distance = math.lcm(g.columns.ring, slots.SPLIT) * (1 + 2**33 // slots.SPLIT)
    inputs, q = inputs_of(rows, g), queries(rows, g, torch.float32, SHAPES[name])
    far = inputs._replace(positions=inputs.positions + distance)
    assert torch.equal(attended(q, kv, far, g), attended(q, kv, inputs, g))


@pytest.mark.usefixtures('small_tiles')
def test_a_key_that_is_no_number_shows():
    """What a row sees is not hidden from it: its y is NaN, and that of others is not."""
    torch.manual_seed(3)
    rows, (g, kv) = [(0, 40), (1, 40), (2, 40)], geometry_of(n_head=1, head_dim=8, block_size=60)
    inputs = inputs_of(rows, g)
    kv.k.view(-1, 8)[inputs.slot_table[0, 3], 2], kv.v.view(-1, 8)[inputs.slot_table[2, 35], 2] = torch.nan, torch.inf
    y = attended(queries(rows, g, torch.float32, {}), kv, inputs, g)
    assert y[0].isnan().all() and y[1].isfinite().all() and y[2].isfinite().sum() == 7


STORES = [('float32', 'float32', dict(n_head=2, head_dim=6, position='rope')),
          ('float32', 'int8', dict(n_head=3, head_dim=96, position='rope', window=20, n_sink=3)),
          ('float32', 'int8', dict(n_head=4, n_kv_head=2, head_dim=20, window=20)),
          ('float16', 'float16', dict(n_head=2, head_dim=64, position='rope')),
          ('float16', 'float32', dict(n_head=2, head_dim=20, position='rope')),
          ('float16', 'int8', dict(n_head=2, head_dim=40, position='rope'))]
if DEVICE == 'cuda':  # the interpreter cuts float32 off to bfloat16, and does not round it
    STORES += [('bfloat16', 'bfloat16', STORES[3][2]), ('bfloat16', 'int8', STORES[5][2])]


@pytest.mark.parametrize('dtype, kind, shape, norm', [(*each, False) for each in STORES] + [
    ('float32', 'float32', STORES[1][2], True), ('float32', 'float32', dict(n_head=2, head_dim=20), True)])
def test_stored_bits_are_those_of_plain(dtype, kind, shape, norm):
    """
    Queries, keys, values, codes and scales; what is in all other slots stays. Among the values are halves between two
    codes, and some so small that the smallest scale is theirs. Behind norms, sums may be in another order.
    """
    torch.manual_seed(4)
    dtype, (g, kv) = getattr(torch, dtype), geometry_of(**shape, kind=kind)
    inputs = inputs_of(rows_of((0, 30, 2**33 + 7) if g.window else (0, 30, 99)), g)
    R, kinds = len(inputs.tokens), 2 if 'position' in shape and g.n_sink else 1
    qkv = 3 * torch.randn(R, g.n_head + 2 * g.n_kv_head, g.head_dim)
    qkv[:, -1] *= torch.rand(R, 1) ** 30
    qkv[0, -2:] = (2 * qkv[0, -2:]).round() / 2
    qkv[0, -2:, ::4] = 127
    qkv = qkv.view(R, -1).to(DEVICE, dtype)
    angles = torch.randn(R, kinds, 2, g.head_dim // 2, device=DEVICE) if 'position' in shape else None
    norms = [Norm(torch.randn(g.head_dim).to(DEVICE, dtype), None, 1e-5, True) if norm else None for _ in 'qk']
    q, layer = torch.zeros(R, kinds, g.n_head, g.head_dim, dtype=dtype, device=DEVICE), SimpleNamespace(
        q_norm=norms[0], k_norm=norms[1])
    expected = on_cpu(q), KVLayer(*map(on_cpu, kv))
    plain_gpu.store(on_cpu(qkv), expected[0], on_cpu(angles), SimpleNamespace(**{
        name: each and Norm(on_cpu(each.weight), *each[1:]) for name, each in vars(layer).items()}), expected[1],
        StepInputs(*map(on_cpu, inputs)), g)  # on the CPU: on a GPU PyTorch does not divide by 127
    storing.store(qkv, q, angles, layer, kv, inputs, g)
    near, real = 1e-5 * norm, on_cpu(inputs.sequences) >= 0
    for found, other in zip((on_cpu(q)[real], *map(on_cpu, kv)), (expected[0][real], *expected[1])):
        assert found is None or torch.allclose(found.double(), other.double(), rtol=near, atol=near)


@pytest.mark.parametrize('kinds', [1, 2])
def test_angles(kinds):
    """Cosines and sines have the bits of float64's, rounded, at any position."""
    frequencies, positions = rotary_frequencies(20, 10000.0), torch.tensor([0, 1, 17, 1000003, 2**33 + 5, 2**40 - 1])
    inputs = SimpleNamespace(positions=positions.to(DEVICE))
    angles, expected = torch.full((6, kinds, 2, 10), torch.nan, device=DEVICE), torch.empty(6, kinds, 2, 10)
    storing.turn(inputs, frequencies.to(DEVICE), 20, angles)
    plain_gpu.turn(SimpleNamespace(positions=positions), frequencies, 20, expected)
    torch.testing.assert_close(angles.cpu(), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('n_embd, learned', [(21, True), (1100, False), (1100, True)])
def test_embeddings(dtype, learned, n_embd):
    """They have plain's bits; padding, whose next position may not exist, reads none and is zero."""
    torch.manual_seed(6)
    wte, wpe = torch.randn(9, n_embd).to(DEVICE, dtype), torch.randn(5, n_embd).to(DEVICE, dtype) if learned else None
    weights = SimpleNamespace(wte=wte, wpe=wpe)
    numbers = [8, 0, 3, 2**40], [4, 0, 2, 5], [0, 1, 1, -1]
    inputs = StepInputs(*(torch.tensor(t, device=DEVICE) for t in numbers), None)
    x, expected = torch.full((4, n_embd), torch.nan, device=DEVICE), torch.zeros(4, n_embd, device=DEVICE)
    storing.embed(inputs, weights, x)
    plain_gpu.embed(inputs.rows(3), weights, expected[:3])
    assert torch.equal(x, expected)
