"""Attention on a GPU by itself: the bits of a row, and how much work it is; see test_gpu_kernels.py too."""
import math
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from conftest import sizes
from on_triton import DEVICE, QUIET, small_tiles  # noqa: F401 (a fixture)

from decode.gpu import attention, tables
from decode.gpu.tables import Columns
from kvcache.storage import Layer
from model import GPTConfig
from positions import alibi_slopes

pytestmark = QUIET
SHAPES = dict(learned=dict(n_head=2, head_dim=6), grouped=dict(n_head=6, n_kv_head=2, head_dim=20, window=50, n_sink=3),
              window=dict(n_head=1, head_dim=16, window=37),
              alibi_sinks=dict(n_head=2, head_dim=6, position='alibi', window=45, n_sink=18))


def attended(rows, block_size=100, n_slots=3000, dtype=torch.float32, far=0, apart=True, **how):
    """(y, parts, NaN where nothing is written) of rows, (number of a text, position), of which all is a function."""
    c, chooser = GPTConfig(block_size=block_size, **dict(position='none') | how), torch.Generator().manual_seed(0)
    layer = Layer(n_slots, c.n_kv_head, c.head_dim, 'float16', 'float16', DEVICE)
    for each in layer.k, layer.v:
        each.data.copy_(torch.randn(each.data.shape, generator=chooser))
    columns, slopes = Columns.of(c, 3), alibi_slopes(c.n_head, torch.float32, DEVICE)
    step = SimpleNamespace(config=c, columns=columns, slopes=slopes if c.position == 'alibi' else None,
                           ended=torch.zeros(len(rows) * c.n_head, dtype=torch.int32, device=DEVICE))
    table = (600 * torch.arange(5)[:, None] + 7 * torch.arange(columns.n_columns) % 599) % n_slots  # none is shared
    sequences, positions = (torch.tensor(each, device=DEVICE) for each in zip(*rows))
    inputs = SimpleNamespace(positions=positions + far * (positions >= 0) * math.lcm(columns.ring or 1, tables.SPLIT),
                             sequences=sequences.int(), slot_table=table.int().to(DEVICE))
    n = (c.n_head + 2 * c.n_kv_head) * c.head_dim
    qkv = torch.stack([torch.randn(n, generator=torch.Generator().manual_seed(p))
                       for _, p in rows]).to(DEVICE, dtype)
    q, y, parts = (torch.full((len(rows), *shape), torch.nan, dtype=dtype, device=DEVICE) for shape, dtype in (
        ((1 + (c.n_sink > 0), c.n_head, c.head_dim), dtype), ((c.n_head * c.head_dim,), dtype),
        ((columns.n_splits, c.n_head, c.head_dim + 2), torch.float32)))
    attention.attend(step, None, layer, inputs, qkv, q, y, parts, None, apart)
    assert not step.ended.any()
    return y, parts


@pytest.mark.usefixtures('small_tiles')
@pytest.mark.parametrize('name, dtype', [('alibi_sinks', torch.bfloat16), ('grouped', torch.float16),
                                         *sizes([], [('learned', torch.float32), ('window', torch.float32)])])
def test_bits_of_a_row_are_its_own(name, dtype, monkeypatch):
    """Alone and in a batch, in a longer context, by any number of programs, and beyond 2^33 positions in a window."""
    rows, how = [(0, 31), (1, 99), (-1, 7), (2, 98), (3, 60), (4, 0)], SHAPES[name] | dict(dtype=dtype)
    y, _ = attended(rows, **how)
    assert y[3].isfinite().all() and not y[2].any()
    for i, row in enumerate(rows):
        monkeypatch.setattr(attention, 'PROGRAMS', (1, 4, 9999)[i % 3])
        more = dict(block_size=(100, 128, 390)[i % 3], apart=i % 2 == 0)
        assert torch.equal(attended([row], **how | more)[0][0], y[i]), row
    if name != 'learned':
        rows = [(0, 150), (1, 333), (2, 334)]
        assert torch.equal(attended(rows, **how, far=2**33 // 7)[0], attended(rows, **how)[0])


def test_work_grows_with_the_text_and_not_with_the_context(monkeypatch):
    """Programs, and the parts that are read and written, in contexts of 1,000 to 100,000 tokens."""
    for position, n in (0, 1), (66, 1), (128, 2), (1000, 8), (4095, 32), (4096, 17):
        _, parts = attended([(0, position)], n_head=1, head_dim=8, block_size=5000)
        assert (~parts.isnan()).all(-1).sum() == n and parts[0, n:].isnan().all(), position
    launched = MagicMock()
    monkeypatch.setattr(attention, 'attend_kernel', launched)
    for heads, R, block_size in [(h, R, n) for h in (2, 12) for R in (1, 8, 64, 256) for n in (1000, 32768, 10**5)]:
        launched.reset_mock()
        _, parts = attended([(0, 0)] * R, block_size, 400, torch.float16, n_head=12, head_dim=8, n_kv_head=heads)
        n = math.prod(launched.__getitem__.call_args.args[0])
        assert n == R * heads or n <= attention.PROGRAMS and parts.size(1) <= 32, (heads, R, block_size)

