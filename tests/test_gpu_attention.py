"""Embeddings, angles, the store and attention on a GPU against their functions in PyTorch, and their bits."""
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import sizes
from decode.gpu.columns import Columns
from decode.gpu.inputs import Geometry, KVLayer, StepInputs
from on_triton import DEVICE, QUIET, compiled, compiled_apart

from decode.gpu import attention, columns, plain, storing
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


@pytest.fixture
def small_tiles(monkeypatch):
    """Several splits, and tiles within a split, of a few keys."""
    for module in attention, columns:
        monkeypatch.setattr(module, 'TILE', 16)
        monkeypatch.setattr(module, 'SPLIT', 32)


def geometry_of(n_head, head_dim, n_kv_head=0, position='learned', window=0, n_sink=0, block_size=100, n_slots=1600,
                kind='float32'):
    """A `Geometry`, and a `KVLayer` of n_slots slots, all of NaN, in rows of `kvcache.storage`."""
    n_kv_head = n_kv_head or n_head
    k, v = (Rows(n_slots, n_kv_head, head_dim, kind, DEVICE) for _ in 'kv')
    kv = KVLayer(*(None if t is None else t.fill_(torch.nan if t.is_floating_point() else 77).view(-1)
                   for t in (k.data, v.data, k.scale, v.scale)))
    config = SimpleNamespace(block_size=block_size, window=window, n_sink=n_sink)
    slopes = alibi_slopes(n_head, torch.float32, DEVICE) if position == 'alibi' else None
    return Geometry(n_head, n_kv_head, head_dim, window, n_sink, Columns.of(config, MOST_NEW), slopes, head_dim,
                    n_slots * head_dim, 0 if k.scale is None else k.group), kv


def free_slots(geometry):
    """Numbers of slots in random order."""
    return torch.randperm(geometry.head_stride // geometry.head_dim)


def rows_of(ends, n_padding=1):
    """Of sequences whose last positions are `ends`: (sequence, position) of up to MOST_NEW rows each, and padding."""
    firsts = [max(0, end - int(torch.randint(MOST_NEW, ()))) for end in ends]
    rows = [(s, p) for s, end in enumerate(ends) for p in range(firsts[s], end + 1)] + [(-1, 7)] * n_padding
    return [rows[i] for i in torch.randperm(len(rows))]


def inputs_of(rows, geometry, tables):
    sequences, positions = zip(*rows)
    return StepInputs(torch.zeros(len(rows), dtype=torch.int64, device=DEVICE), torch.tensor(positions, device=DEVICE),
                      torch.tensor(sequences, dtype=torch.int32, device=DEVICE), tables.to(DEVICE))


def filled(rows, geometry, kv, slots, numbers, wider=0):
    """
    The `StepInputs` of rows, with keys and values of what they see, and only of that, in slots that `slots` yields.
    numbers: {(sequence, position): the numbers that are stored}, which are drawn where they are missing.
    """
    g, of_slot = geometry, {}
    n_tables = max(s for s, _ in rows) + 1
    tables = torch.full((max(n_tables, 1), g.columns.n_columns + wider), 3, dtype=torch.int32)  # slot 3 is never used
    slots = iter([slot for slot in slots.tolist() if slot != 3])
    for sequence, position in rows:
        low = max(0, position - g.window + 1) if g.window else 0
        near = [p for p in range(g.n_sink) if p <= position] + list(range(max(low, g.n_sink), position + 1))
        for p in near if sequence >= 0 else []:
            if (sequence, p) not in of_slot:
                slot = of_slot[sequence, p] = next(slots)
                tables[sequence, g.columns.column(p, g.n_sink)] = slot
                put(slot, g, kv, numbers.setdefault((sequence, p), drawn_numbers(g, kv)))
    return inputs_of(rows, g, tables)


def drawn_numbers(g, kv):
    """Of one slot of each tensor of a `KVLayer`, (n_kv_head, n)."""
    return [None if t is None else torch.randint(-127, 128, (g.n_kv_head, g.head_dim)) if t.dtype is torch.int8 else
            torch.rand(g.n_kv_head, g.head_dim // g.group) / 50 if i > 1 else torch.randn(g.n_kv_head, g.head_dim)
            for i, t in enumerate(kv)]


def put(slot, g, kv, numbers):
    for i, (t, new) in enumerate(zip(kv, numbers)):
        for head in range(g.n_kv_head if t is not None else 0):
            at, n = (slot * g.slot_stride + head * g.head_stride) // (g.group if i > 1 else 1), new.size(1)
            t[at:at + n] = new[head].to(t)


def attended(q, kv, inputs, geometry):
    """y of the kernels; what nobody writes is NaN."""
    g, R = geometry, len(q)
    y = torch.full((R, g.n_head * g.head_dim), torch.nan, dtype=q.dtype, device=DEVICE)
    parts = torch.full((R, g.columns.n_splits, g.n_head, g.head_dim + 2), torch.nan, device=DEVICE)
    attention.attend(q, y, parts, kv, inputs, g)
    return y


def in_float64(monkeypatch, function, *args):
    """plain's function with float64 in the place of float32, on the CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, 'float', torch.Tensor.double)
        function(*args)


def copy_of(tensors, dtype=None):
    """A named tuple of tensors on the CPU, its floats in dtype."""
    return tensors._replace(**{name: t.clone().cpu().to(dtype if dtype and t.is_floating_point() else t.dtype)
                               for name, t in tensors._asdict().items() if isinstance(t, torch.Tensor)})


def check_attend(monkeypatch, rows, dtype=torch.float32, **shape):
    g, kv = geometry_of(**shape)
    inputs = filled(rows, g, kv, free_slots(g), {})
    kinds = 2 if shape.get('position') == 'rope' and g.n_sink else 1
    q = torch.randn(len(rows), kinds, g.n_head, g.head_dim).to(DEVICE, dtype)
    y, expected = attended(q, kv, inputs, g), torch.zeros(len(rows), g.n_head * g.head_dim, dtype=torch.float64)
    in_float64(monkeypatch, plain.attend, q.cpu().double(), expected, None, copy_of(kv, torch.float64),
               copy_of(inputs), copy_of(g))
    torch.testing.assert_close(y.cpu().double(), expected, rtol=0, atol=TOLERANCES[dtype])
    assert not y[inputs.sequences < 0].any()


@pytest.mark.parametrize('name', SHAPES)
def test_attention_is_that_of_plain(small_tiles, monkeypatch, name):
    """Whatever splits, sinks and rings there are, from the first position on."""
    torch.manual_seed(list(SHAPES).index(name))
    ring = geometry_of(**SHAPES[name])[0].columns.ring
    ends = [2, 3 * ring + SHAPES[name]['window'] - 5] if ring else [0, 99]
    check_attend(monkeypatch, rows_of(ends + sizes([], [0, 5, 17, 31, 44, 48, 49, 50, 95])), **SHAPES[name])


@pytest.mark.parametrize('dtype, kind, shape', [
    (torch.bfloat16, 'bfloat16', dict(n_head=2, head_dim=20)),
    (torch.float16, 'float16', SHAPES['grouped']), (torch.float16, 'int8', SHAPES['grouped']),
    (torch.float32, 'int8', dict(n_head=2, head_dim=96, window=20, n_sink=2)),
    (torch.float32, 'bfloat16', SHAPES['alibi_sinks'])] + (DEVICE == 'cuda') * [
    (torch.bfloat16, 'bfloat16', SHAPES['grouped']), (torch.bfloat16, 'int8', SHAPES['grouped'])])
def test_attention_in_other_dtypes(small_tiles, monkeypatch, dtype, kind, shape):
    """The interpreter has no dots of bfloat16: queries of grouped heads in it are tried on a GPU."""
    torch.manual_seed(0)
    check_attend(monkeypatch, rows_of(sizes([70], [0, 40, 99])), dtype, kind=kind, **shape)


@pytest.mark.parametrize('block_size, ends', [(40, [0, 39]), (300, [127, 128, 299])])
def test_attention_in_tiles_of_their_true_size(monkeypatch, block_size, ends):
    """One split, which writes the result itself, and three, of two tiles each."""
    torch.manual_seed(0)
    check_attend(monkeypatch, rows_of(ends), n_head=1, head_dim=8, block_size=block_size)


@pytest.mark.parametrize('name, dtype', [('learned', torch.float32), ('rope_sinks', torch.bfloat16),
                                         ('grouped', torch.float16)] + sizes([], [
    (name, dtype) for name in SHAPES for dtype in (torch.float32, torch.float16)]))
def test_bits_of_a_row_are_its_own(small_tiles, name, dtype):
    """Alone and in a batch, in other slots, and with a wider table, y has the same bits."""
    torch.manual_seed(1)
    numbers, (g, kv) = {}, geometry_of(**SHAPES[name], kind='float16')
    rows = rows_of(sizes([31, 99], [0, 31, 60, 99]), 2)
    q = torch.randn(len(rows), 2 if name in ('rope_sinks', 'grouped') else 1, g.n_head, g.head_dim).to(DEVICE, dtype)
    y = attended(q, kv, filled(rows, g, kv, free_slots(g), numbers), g)
    for r in torch.randperm(len(rows))[:sizes(3, 20)].tolist():
        _, others = geometry_of(**SHAPES[name], kind='float16')
        alone = filled([rows[r]], g, others, free_slots(g), numbers, wider=32)
        assert torch.equal(attended(q[r:r + 1].clone(), others, alone, g)[0], y[r]), rows[r]


@pytest.mark.parametrize('name', ['window', 'rope_sinks', 'alibi_sinks'])
def test_far_positions_have_the_bits_of_near_ones(small_tiles, name):
    """A window of the same keys, a multiple of ring and split further, beyond 2^33 positions."""
    torch.manual_seed(2)
    numbers, (g, kv) = {}, geometry_of(**SHAPES[name])
    distance = math.lcm(g.columns.ring, columns.SPLIT) * (1 + 2**33 // columns.SPLIT)
    rows = [(0, 150), (1, 333), (1, 334)]
    q = torch.randn(len(rows), 2 if name in ('rope_sinks', 'grouped') else 1, g.n_head, g.head_dim, device=DEVICE)
    inputs = filled(rows, g, kv, free_slots(g), numbers)
    far = inputs._replace(positions=inputs.positions + distance)
    assert torch.equal(attended(q, kv, far, g), attended(q, kv, inputs, g))


def test_a_key_that_is_no_number_shows(small_tiles):
    """What a row sees is not hidden from it: its y is NaN, and that of others is not."""
    torch.manual_seed(3)
    numbers, (g, kv) = {}, geometry_of(n_head=1, head_dim=8, block_size=60)
    rows = [(0, 40), (1, 40), (2, 40)]
    filled(rows, g, kv, free_slots(g), numbers)
    numbers[0, 3][0][0, 2], numbers[2, 35][1][0, 2] = torch.nan, torch.inf
    y = attended(torch.randn(3, 1, 1, 8, device=DEVICE), kv, filled(rows, g, kv, free_slots(g), numbers), g)
    assert y[0].isnan().all() and y[1].isfinite().all() and y[2].isfinite().sum() == 7


STORES = [('float32', 'float32', dict(n_head=2, head_dim=6, position='rope')),
          ('float32', 'int8', dict(n_head=3, head_dim=96, position='rope', window=20, n_sink=3)),
          ('float32', 'int8', dict(n_head=4, n_kv_head=2, head_dim=20, window=20)),
          ('float16', 'float16', dict(n_head=2, head_dim=64, position='rope')),
          ('float16', 'float32', dict(n_head=2, head_dim=20, position='rope')),
          ('float16', 'int8', dict(n_head=2, head_dim=40, position='rope'))]
if DEVICE == 'cuda':  # the interpreter cuts float32 off to bfloat16, and does not round it
    STORES += [('bfloat16', 'bfloat16', STORES[3][2]), ('bfloat16', 'int8', STORES[5][2])]


def stored(dtype, kind, norm, ends=(0, 30, 2**33 + 7), **shape):
    """Arrays and queries that the kernels have written, and those that plain has written, for the same new tokens."""
    g, kv = geometry_of(**shape, kind=kind)
    kinds = 2 if shape.get('position') == 'rope' and g.n_sink else 1
    rows = rows_of(ends if g.window else [0, 30, 99])
    tables = free_slots(g)[:3 * g.columns.n_columns].view(3, -1).int()
    inputs = inputs_of(rows, g, tables)
    qkv = 3 * torch.randn(len(rows), (g.n_head + 2 * g.n_kv_head) * g.head_dim)
    qkv[:, -g.head_dim:] *= torch.rand(len(rows), 1) ** 30  # values so small that the smallest scale is theirs
    q = torch.full((len(rows), kinds, g.n_head, g.head_dim), torch.nan)
    angles = torch.randn(len(rows), kinds, 2, g.head_dim // 2) if 'position' in shape else None
    norms = [norm and Norm(torch.randn(g.head_dim).to(DEVICE, dtype), None, 1e-5, True) for _ in 'qk']
    layer, (qkv, q) = SimpleNamespace(q_norm=norms[0], k_norm=norms[1]), (t.to(DEVICE, dtype) for t in (qkv, q))
    angles, real = angles if angles is None else angles.to(DEVICE), inputs.sequences >= 0
    expected = [copy_of(kv), q.clone().cpu()]
    plain.store(qkv.cpu(), expected[1], angles if angles is None else angles.cpu(),
                SimpleNamespace(q_norm=norm and copy_of(norms[0]), k_norm=norm and copy_of(norms[1])), expected[0],
                copy_of(inputs), g)
    attention.store(qkv, q, angles, layer, kv, inputs, g)
    assert q.isfinite().all()
    return copy_of(kv), q[real].cpu(), expected[0], expected[1][real.cpu()]


@pytest.mark.parametrize('dtype, kind, shape', STORES)
def test_stored_bits_are_those_of_plain(dtype, kind, shape):
    """Queries, keys, values, codes and scales; what is in all other slots stays."""
    torch.manual_seed(4)
    kv, q, expected_kv, expected_q = stored(getattr(torch, dtype), kind, None, **shape)
    assert torch.equal(q, expected_q)
    for written, expected in zip(kv, expected_kv):
        assert written is None or torch.equal(written.nan_to_num(99), expected.nan_to_num(99))


@pytest.mark.parametrize('position', ['learned', 'rope'])
def test_store_behind_norms_of_queries_and_keys(position):
    torch.manual_seed(5)
    kv, q, expected_kv, expected_q = stored(torch.float32, 'float32', True, n_head=2, head_dim=20, position=position,
                                            window=20, n_sink=3)
    torch.testing.assert_close(q, expected_q, rtol=0, atol=1e-5)
    torch.testing.assert_close(kv.k, expected_kv.k, rtol=0, atol=1e-5, equal_nan=True)


def test_codes_round_halves_to_even():
    """A hand-worked example: the scale is 1, and 2.5 becomes 2, 3.5 becomes 4."""
    g, kv = geometry_of(n_head=1, head_dim=8, kind='int8')
    qkv = torch.zeros(1, 24, device=DEVICE)
    qkv[0, 8:16] = torch.tensor([127, -127, 2.5, 3.5, -2.5, 0.4, 0, 1])
    inputs = inputs_of([(0, 0)], g, torch.full((1, g.columns.n_columns), 9, dtype=torch.int32))
    attention.store(qkv, torch.empty(1, 1, 1, 8, device=DEVICE), None, SimpleNamespace(q_norm=None, k_norm=None), kv,
                    inputs, g)
    assert kv.k[72:80].tolist() == [127, -127, 2, 4, -2, 0, 0, 1] and kv.k_scale[9] == 1
    assert not kv.v[72:80].any() and kv.v_scale[9] == torch.tensor(1e-5)  # the smallest scale


@pytest.mark.parametrize('kinds', [1, 2])
def test_angles(kinds):
    """Cosines and sines have the bits of float64's, rounded, at any position."""
    frequencies, positions = rotary_frequencies(20, 10000.0), torch.tensor([0, 1, 17, 1000003, 2**33 + 5, 2**40 - 1])
    inputs = SimpleNamespace(positions=positions.to(DEVICE))
    angles, expected = torch.full((6, kinds, 2, 10), torch.nan, device=DEVICE), torch.empty(6, kinds, 2, 10)
    attention.turn(inputs, frequencies.to(DEVICE), 20, angles)
    plain.turn(SimpleNamespace(positions=positions), frequencies, 20, expected)
    torch.testing.assert_close(angles.cpu(), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('learned', [False, True])
@pytest.mark.parametrize('n_embd', [21, 1100])
def test_embeddings(dtype, learned, n_embd):
    """They have plain's bits; padding, whose next position may not exist, reads none and is zero."""
    torch.manual_seed(6)
    wte, wpe = torch.randn(9, n_embd).to(DEVICE, dtype), torch.randn(5, n_embd).to(DEVICE, dtype) if learned else None
    weights = SimpleNamespace(wte=wte, wpe=wpe)
    numbers = [8, 0, 3, 2**40], [4, 0, 2, 5], [0, 1, 1, -1]
    inputs = StepInputs(*(torch.tensor(t, device=DEVICE) for t in numbers), None)
    x, expected = torch.full((4, n_embd), torch.nan, device=DEVICE), torch.zeros(4, n_embd, device=DEVICE)
    attention.embed(inputs, weights, x)
    plain.embed(inputs.rows(3), weights, expected[:3])
    assert torch.equal(x, expected)


def compile_for(arch, dtype, kind, shape):
    """The kernels of a shape as PTX; to be called without the interpreter."""
    dtype = getattr(torch, dtype)
    g, kv = geometry_of(**shape, kind=kind)
    inputs = inputs_of([(0, 3)], g, torch.zeros(1, g.columns.n_columns, dtype=torch.int32))
    q = torch.zeros(1, 2, g.n_head, g.head_dim, dtype=dtype)
    weights = SimpleNamespace(wte=torch.zeros(2, 64, dtype=dtype), wpe=torch.zeros(2, 64, dtype=dtype))
    norm = Norm(torch.zeros(g.head_dim, dtype=dtype), None, 1e-5, True)
    angles, (qkv, y) = torch.zeros(1, 2, 2, g.head_dim // 2), torch.zeros(2, 1, 1, dtype=dtype)

    def launch():
        attention.embed(inputs, weights, torch.zeros(1, 64))
        attention.turn(inputs, torch.zeros(g.head_dim // 2, dtype=torch.float64), 9, angles)
        attention.store(qkv, q, angles, SimpleNamespace(q_norm=norm, k_norm=norm), kv, inputs, g)
        attention.attend(q, y, torch.zeros(1), kv, inputs, g)
    return compiled(arch, KERNELS, launch)


KERNELS = [(storing, 'embed_kernel'), (storing, 'turn_kernel'), (storing, 'store_kernel'),
           (attention, 'attend_kernel'), (attention, 'add_kernel')]
COMPILED = [(90, 'bfloat16', 'bfloat16', dict(n_head=12, n_kv_head=2, head_dim=64, block_size=2048)),
            (80, 'float32', 'float32', dict(n_head=12, head_dim=64, block_size=2048)),
            (90, 'bfloat16', 'int8', dict(n_head=12, head_dim=128, window=512, n_sink=4)),
            (80, 'bfloat16', 'bfloat16', dict(n_head=12, n_kv_head=2, head_dim=128, block_size=2048)),
            (80, 'bfloat16', 'int8', dict(n_head=8, n_kv_head=2, head_dim=96, block_size=2048)),
            (90, 'float32', 'int8', dict(n_head=12, head_dim=20, position='alibi', window=512, n_sink=4)),
            (90, 'float16', 'float16', dict(n_head=12, head_dim=64, block_size=2048)),
            (90, 'float32', 'float32', dict(n_head=4, n_kv_head=2, head_dim=256, block_size=2048))]


def test_kernels_compile_for_a_gpu():
    """16 bytes a load, no float32 rounded to tf32, and tensor cores for the queries of a group in 16 bits."""
    cases = sizes(COMPILED[:3], COMPILED)
    for (_, dtype, _, shape), kernels in zip(cases, compiled_apart('test_gpu_attention', cases)):
        assert [each['name'] for each in kernels] == [name for _, name in KERNELS]
        store, attend = kernels[2:4]
        assert dtype != 'bfloat16' or 'cvt.rn.bf16' in store['ptx']
        assert 'tf32' not in attend['ptx'] and attend['shared'] < 100_000  # a block of any GPU since 2020 has 99 KiB
        if shape['head_dim'] % 16 == 0:
            assert 'cp.async.cg.shared.global' in attend['ptx'] or 'ld.global.v4.b32' in attend['ptx']
        assert ('mma.sync' in attend['ptx']) == (dtype != 'float32' and shape.get('n_kv_head', 0) > 0)
