"""
The Triton kernel of a linear against float64, the bits of its rows, and what it is compiled to for GPUs that are not
here. Without a GPU the kernel runs in Triton's interpreter, which cuts numbers off to bfloat16 where a GPU rounds them.
"""
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import sizes
from on_triton import DEVICE, TYPES, compiled, compiled_apart, dots_in_order  # noqa: F401 (a fixture)

from decode.gpu import linear as linears
from decode.gpu import plain
from decode.gpu.linear import DTYPES, linear, tiles
from decode.gpu.weights import Linear, Norm
from decode.weights import quantise

NORMS, ENDS = ('', 'layer', 'layer without bias', 'rms'), ('', 'gelu', 'tanh', 'gate')


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def linear_of(n_out, n_in, dtype, int8=False, bias=True, seed=0):
    """A `Linear` with outputs of about 1."""
    weight, scale = random(n_out, n_in, seed=seed) / n_in ** 0.5, None
    if int8:
        weight, scale = quantise(weight)
    return Linear(weight.to(torch.int8 if int8 else dtype).contiguous(), scale,
                  random(n_out, dtype=dtype, seed=seed + 1) if bias else None, dtype)


def norm_of(kind, n, dtype):
    if not kind:
        return None
    weight, bias = random(n, dtype=dtype, seed=2) / 2 + 1, random(n, dtype=dtype, seed=3)
    return Norm(weight, bias if kind == 'layer' else None, 1e-5, kind == 'rms')


def exact(x, out, linear, norm=None, gate=None, activation='', add=False):
    """What `plain.linear` writes to out, in float64. Only what is multiplied is rounded, to the dtype of the linear."""
    def product(of):
        y = F.linear(x.to(of.dtype).double(), of.weight.double())
        y = y if of.scale is None else y * of.scale.double()
        return y if of.bias is None else y + of.bias.double()
    x = x.double()
    if norm is not None:
        x = x if norm.rms else x - x.mean(-1, keepdim=True)
        x = x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
        x = x if norm.bias is None else x + norm.bias.double()
    y = product(linear)
    if gate is not None:
        y = F.silu(product(gate)) * y
    elif activation:
        y = F.gelu(y, approximate='tanh' if activation == 'tanh' else 'none')
    return out.double() + y if add else y


def check(x, out, near, *how):
    expected, by_plain = exact(x, out, *how), out.clone()
    plain.linear(x, by_plain, *how)
    linear(x, out, *how)
    torch.testing.assert_close(out.double(), expected, rtol=near, atol=near)
    torch.testing.assert_close(out.double(), by_plain.double(), rtol=2 * near, atol=2 * near)


CASES = list(itertools.product(DTYPES, (False, True), NORMS, ENDS, (False, True), (False, True)))


@pytest.mark.parametrize('number', range(0, len(CASES), sizes(5, 1)))
def test_all_kinds(number):
    dtype, int8, norm, end, bias, add = CASES[number]
    n_rows, n_in, n_out = 1 + number * 7 % 40, (12, 48, 65, 144)[number // 3 % 4], (12, 33, 65, 96)[number // 5 % 4]
    x = random(n_rows, n_in, dtype=torch.float32 if number % 3 else dtype, seed=4)
    out = random(n_rows, n_out, dtype=torch.float32 if number % 2 else dtype, seed=5)
    gate = linear_of(n_out, n_in, dtype, int8, bias, seed=6) if end == 'gate' else None
    near = 40 * torch.finfo(dtype).eps if dtype == torch.float32 else 5 * torch.finfo(dtype).eps
    check(x, out, near, linear_of(n_out, n_in, dtype, int8, bias), norm_of(norm, n_in, dtype), gate,
          '' if gate is not None else end, add)


@pytest.mark.parametrize('n_in', sizes((1030,), (384, 576, 768, 896, 1030, 4096)))
@pytest.mark.parametrize('rms', (False, True))
def test_norms_of_many_columns(n_in, rms):
    """Of several pieces, with a mean that is large beside the deviation, and with one large number."""
    x = random(3, n_in, seed=1)
    x[0] += 300  # the bits of a float32 mean of 300 are worth 3e-5; of a mean of squares, 0.01
    x[1, n_in // 2] = 1000
    check(x, torch.zeros(3, 20, device=DEVICE), 1e-4, linear_of(20, n_in, torch.float32),
          norm_of('rms' if rms else 'layer', n_in, torch.float32))


def test_a_sum_by_hand():
    x, out = torch.tensor([[1., 2, 3]], device=DEVICE), torch.tensor([[100., 200]], device=DEVICE)
    weight, scale = torch.tensor([[1, 0, -1], [4, 5, 6]], dtype=torch.int8, device=DEVICE), torch.tensor([.5, 2])
    linear(x, out, Linear(weight, scale.to(DEVICE), torch.tensor([10., 20], device=DEVICE), torch.float32), add=True)
    assert out.tolist() == [[109, 284]]  # 100 + (1 - 3) / 2 + 10 and 200 + (4 + 10 + 18) * 2 + 20


# the interpreter takes minutes for those of models
SHAPES = [(384, 1152), (768, 2304), (3072, 768), (768, 50304)] if DEVICE == 'cuda' else sizes(
    [(40, 24)], [(40, 24), (65, 80), (384, 40), (1100, 12)])


def bits(t):
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize('dtype, int8', [(torch.float32, False), (torch.bfloat16, False), (torch.float16, True)])
@pytest.mark.parametrize('shape', SHAPES)
def test_a_rows_bits_are_those_of_the_row_alone(dots_in_order, dtype, int8, shape):  # noqa: F811
    n_in, n_out = shape
    rows = random(34, n_in, seed=4)
    how = (linear_of(n_out, n_in, dtype, int8), norm_of('layer', n_in, dtype),
           linear_of(n_out, n_in, dtype, int8, seed=6))
    alone = torch.zeros(34, n_out, dtype=dtype, device=DEVICE)
    for row in range(34):
        out = alone[:1].clone()
        linear(rows[row:row + 1].clone(), out, *how)
        alone[row] = out[0]
    for n in 1, 2, 15, 16, 17, 33:
        at = torch.randperm(34, generator=torch.Generator().manual_seed(n))[:n].to(DEVICE)
        out = torch.zeros(n, n_out, dtype=dtype, device=DEVICE)
        linear(rows[at], out, *how)
        assert torch.equal(bits(out), bits(alone[at])), n


@pytest.mark.filterwarnings('ignore:invalid value')  # of NumPy
@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('bad', (torch.nan, torch.inf))
def test_a_row_that_is_not_numbers_reaches_no_other(norm, bad):
    x, how = random(18, 40, seed=4), (linear_of(24, 40, torch.float32), norm_of(norm, 40, torch.float32))
    good, out = torch.zeros(2, 18, 24, device=DEVICE)
    linear(x, good, *how)
    x[5, 7] = bad
    linear(x, out, *how)
    others = torch.arange(18) != 5
    assert torch.equal(bits(out[others]), bits(good[others])) and not out[5].isfinite().any()


def test_nothing_is_written_beside_out():
    memory = torch.full((20, 24), 7.0, device=DEVICE)
    linear(random(17, 40), memory[:17], linear_of(24, 40, torch.float32))
    assert (memory[17:] == 7).all() and (memory[:17] != 7).any()


def test_tiles_are_many_programs():
    for dtype, int8 in itertools.product(DTYPES, (False, True)):
        for n_out in 2304, 3072, 11008, 50304, 151936:
            assert n_out / tiles(shapes(n_out, 768, dtype, int8))[0]['BLOCK_N'] > 132


def shapes(n_out, n_in, dtype, int8, bias=False):
    """A `Linear` without numbers."""
    def made(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device='meta')
    scale = made(n_out, dtype=torch.float32) if int8 else None
    return Linear(made(n_out, n_in, dtype=torch.int8 if int8 else dtype), scale, made(n_out) if bias else None, dtype)


def compile_for(capability, dtype, int8, kind, n_out, n_in):
    """The kernel as PTX, for addresses that are multiples of 16, as those of models are."""
    dtype, has_norm = getattr(torch, dtype), kind in ('layer', 'gate')
    x, out = (torch.empty(1, n, dtype=torch.float32 if is_float else dtype, device='meta')
              for n, is_float in ((n_in, has_norm), (n_out, not has_norm)))
    of = shapes(n_out, n_in, dtype, int8, True)
    norm = Norm(*torch.empty(2, n_in, dtype=dtype, device='meta'), 1e-5, False) if has_norm else None
    return compiled(capability, [(linears, 'linear_kernel')], lambda: linear(
        x, out, of, norm, of if kind == 'gate' else None, '' if has_norm else kind, not has_norm))[0]


KINDS = ('gate', 50304, 768), ('gate', 768, 4096), ('layer', 2304, 768), ('gelu', 768, 3072), ('tanh', 65, 12)
KERNELS = [(capability, dtype, int8, *kind) for capability in (80, 90) for dtype in ('float32', 'bfloat16', 'float16')
           for int8 in (False, True) for kind in KINDS]
KERNELS = sizes([(90, 'float32', False, *KINDS[2]), (80, 'bfloat16', False, *KINDS[0])], KERNELS)


def test_the_kernel_compiles_for_a_gpu():
    """Without tensor cores that cut off float32, with weights read 16 bytes at a time, in the memory of small cards."""
    for how, kernel in zip(KERNELS, compiled_apart('test_gpu_linear', KERNELS)):
        (capability, dtype, *_, n_in), ptx = how, kernel['ptx']
        assert kernel['shared'] <= 99 * 1024 and f'.target sm_{capability}' in ptx and 'tf32' not in ptx, how
        if dtype == 'float32':
            assert 'fma.rn.f32' in ptx and 'mma' not in ptx, how
        else:
            kind = TYPES[getattr(torch, dtype)].replace('*', '').replace('fp', 'f')
            assert f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}" in ptx, how
        assert n_in % 16 or re.search(r'cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10', ptx), how
