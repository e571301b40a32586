"""
The Triton kernel of a linear against float64, and the bits of its rows. Without a GPU the kernel runs in Triton's
interpreter, which cuts numbers off to bfloat16 where a GPU rounds them.
"""
import itertools

import plain_gpu
import pytest
import torch
from conftest import sizes
from on_triton import DEVICE, dots_in_order  # noqa: F401 (a fixture)

from benchmarks.ours import vendor_linear
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


def check(x, out, near, *how):
    """Nothing is written beside out. The product of PyTorch that the benchmark compares with computes the same."""
    expected, by_vendor, memory = out.double(), out.clone(), torch.full((len(out) + 3, out.size(1)), 7.0).to(out)
    plain_gpu.linear(x, expected, *how)
    memory[:len(out)] = out
    linear(x, memory[:len(out)], *how)
    torch.testing.assert_close(memory[:len(out)].double(), expected, rtol=near, atol=near)
    assert (memory[len(out):] == 7).all()
    if how[0].scale is None:
        vendor_linear(x, by_vendor, *how)
        torch.testing.assert_close(by_vendor.double(), expected, rtol=2 * near, atol=2 * near)


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
@pytest.mark.parametrize('kind', ('rms', 'layer'))
def test_norms_of_many_columns(n_in, kind):
    """Of several pieces, with a mean that is large beside the deviation, and with one large number."""
    x = random(3, n_in, seed=1)
    x[0] += 300  # the bits of a float32 mean of 300 are worth 3e-5; of a mean of squares, 0.01
    x[1, n_in // 2] = 1000
    check(x, torch.zeros(3, 20, device=DEVICE), 1e-4, linear_of(20, n_in, torch.float32),
          norm_of(kind, n_in, torch.float32))


# the interpreter takes minutes for those of models
SHAPES = [(384, 1152), (768, 2304), (3072, 768), (768, 50304)] if DEVICE == 'cuda' else sizes(
    [(40, 24)], [(40, 24), (65, 80), (384, 40), (1100, 12)])


def bits(t):
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.int16)


@pytest.mark.filterwarnings('ignore:invalid value')  # of NumPy
@pytest.mark.usefixtures('dots_in_order')
@pytest.mark.parametrize('dtype, int8, norm', [
    (torch.float32, False, 'layer'), (torch.bfloat16, False, ''), (torch.float16, True, 'rms')])
@pytest.mark.parametrize('shape', SHAPES)
def test_a_rows_bits_are_those_of_the_row_alone(dtype, int8, norm, shape):
    """Also beside rows that are not numbers."""
    n_in, n_out = shape
    rows = random(34, n_in, seed=4)
    rows[5, 7], rows[20, 7] = torch.nan, torch.inf
    how = (linear_of(n_out, n_in, dtype, int8), norm_of(norm, n_in, dtype),
           linear_of(n_out, n_in, dtype, int8, seed=6))
    alone = torch.zeros(34, n_out, dtype=dtype, device=DEVICE)
    for row in range(34):
        out = alone[:1].clone()
        linear(rows[row:row + 1].clone(), out, *how)
        alone[row] = out[0]
    assert alone.isfinite().all(1).logical_not().nonzero()[:, 0].tolist() == [5, 20]
    for n in 1, 2, 15, 16, 17, 33:
        at = torch.randperm(34, generator=torch.Generator().manual_seed(n))[:n].to(DEVICE)
        out = torch.zeros(n, n_out, dtype=dtype, device=DEVICE)
        linear(rows[at], out, *how)
        assert torch.equal(bits(out), bits(alone[at])), n


def test_tiles_are_many_programs():
    for dtype, int8, n_out in itertools.product(DTYPES, (False, True), (2304, 3072, 11008, 50304, 151936)):
        weight = torch.empty(n_out, 768, dtype=torch.int8 if int8 else dtype, device='meta')
        assert n_out / tiles(Linear(weight, weight[:, 0] if int8 else None, None, dtype))[0]['BLOCK_N'] > 132
