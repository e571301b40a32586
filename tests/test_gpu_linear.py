"""
The Triton kernel of a linear against float64, the bits of its rows, and what it is compiled to for GPUs that are not
here. Without a GPU the kernel runs in Triton's interpreter, which cuts numbers off to bfloat16 where a GPU rounds them.
"""
import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ENVIRONMENT, ROOT, sizes

if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')
triton = pytest.importorskip('triton', reason="the kernels of the GPU decoder need Triton, which comes with torch")

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from decode.gpu import plain
from decode.gpu.linear import BLOCK_M, DTYPES, linear, linear_kernel, tiles
from decode.gpu.weights import Linear, Norm
from decode.weights import quantise

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
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


@pytest.fixture
def dots_in_order(monkeypatch):
    """
    The interpreter multiplies tiles as NumPy does, whose sums depend on where in a tile a row is. Those of a GPU do
    not, nor do these.
    """
    if not isinstance(linear_kernel, triton.JITFunction):
        def dot(self, a, b, d, *how):
            return TensorHandle((a.data[:, :, None] * b.data).sum(1, dtype=np.float32) + d.data, d.dtype.scalar)
        monkeypatch.setattr(InterpreterBuilder, 'create_dot', dot)


# the interpreter takes minutes for those of models
SHAPES = [(384, 1152), (768, 2304), (3072, 768), (768, 50304)] if DEVICE == 'cuda' else sizes(
    [(40, 24)], [(40, 24), (65, 80), (384, 40), (1100, 12)])


def bits(t):
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize('dtype, int8', [(torch.float32, False), (torch.bfloat16, False), (torch.float16, True)])
@pytest.mark.parametrize('shape', SHAPES)
def test_a_rows_bits_are_those_of_the_row_alone(dots_in_order, dtype, int8, shape):
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


# The kernel as it is compiled for GPUs. In a process of its own, since Triton here may be the interpreter

TYPES = {torch.float32: 'fp32', torch.bfloat16: 'bf16', torch.float16: 'fp16', torch.int8: 'i8'}


def shapes(n_out, n_in, dtype, int8):
    """A `Linear` without numbers."""
    return Linear(torch.empty(n_out, n_in, dtype=torch.int8 if int8 else dtype, device='meta'),
                  torch.empty(n_out, device='meta') if int8 else None, None, dtype)


def compiled(capability, dtype, int8, kind, n_out, n_in):
    """The kernel for n_in and addresses that are multiples of 16, as those of models are."""
    has_norm, stored = kind in ('layer', 'gate'), torch.int8 if int8 else dtype
    blocks, how = tiles(shapes(n_out, n_in, dtype, int8))
    pointers = dict(x=torch.float32 if has_norm else dtype, out=dtype if has_norm else torch.float32, weight=stored,
                    bias=dtype)
    if has_norm:
        pointers.update(norm_weight=dtype, norm_bias=dtype)
    if kind == 'gate':
        pointers.update(gate_weight=stored, gate_bias=dtype)
    if int8:
        pointers.update(scale=torch.float32, **({'gate_scale': torch.float32} if kind == 'gate' else {}))
    numbers = dict(eps='fp32', n_rows='i32', n_in='i32', n_out='i32')
    names = linear_kernel.arg_names
    constants = dict.fromkeys(set(names) - {*pointers, *numbers})
    constants.update(RMS=False, ACTIVATION='' if has_norm else kind, ADD=not has_norm, DTYPE=DTYPES[dtype],
                     PRODUCTS=DTYPES[dtype], BLOCK_M=BLOCK_M, **blocks)
    signature = {name: '*' + TYPES[pointers[name]] if name in pointers else numbers.get(name, 'constexpr')
                 for name in names}
    multiples = {(i,): [['tt.divisibility', 16]] for i, name in enumerate(names)
                 if name in pointers or name == 'n_in' and n_in % 16 == 0}
    source = triton.compiler.ASTSource(linear_kernel, signature, constants, multiples)
    return triton.compile(source, target=triton.backends.compiler.GPUTarget('cuda', capability, 32), options=how)


KINDS = ('gate', 50304, 768), ('gate', 768, 4096), ('layer', 2304, 768), ('gelu', 768, 3072), ('tanh', 65, 12)
KERNELS = [(capability, dtype, int8, *kind)
           for capability in (80, 90) for dtype in DTYPES for int8 in (False, True) for kind in KINDS]
KERNELS = sizes([(90, torch.float32, False, *KINDS[2]), (80, torch.bfloat16, False, *KINDS[0])], KERNELS)


COMPILE = """
import sys, torch, test_gpu_linear
for i, how in enumerate(eval(sys.argv[2])):
    kernel = test_gpu_linear.compiled(*how)
    with open(f'{sys.argv[1]}/{i}', 'w') as f:
        f.write(f"{kernel.metadata.shared} {kernel.asm['ptx']}")
"""


@pytest.mark.skipif(sys.platform != 'linux', reason="Triton is for Linux")
def test_the_kernel_is_compiled(tmp_path):
    """Without tensor cores that cut off float32, with weights read 16 bytes at a time, in the memory of small cards."""
    done = subprocess.run([sys.executable, '-c', COMPILE, tmp_path, repr(KERNELS)], capture_output=True, text=True,
                          env={**ENVIRONMENT, 'TRITON_INTERPRET': '0', 'PYTHONPATH': f'{ROOT}:{ROOT}/tests'})
    assert done.returncode == 0, done.stderr
    for i, how in enumerate(KERNELS):
        shared, ptx = (tmp_path / str(i)).read_text().split(' ', 1)
        capability, dtype, n_in = how[0], how[1], how[-1]
        assert int(shared) <= 99 * 1024 and f'.target sm_{capability}' in ptx and 'tf32' not in ptx, how
        if dtype == torch.float32:
            assert 'fma.rn.f32' in ptx and 'mma' not in ptx, how
        else:
            assert f"mma.sync.aligned.m16n8k16.row.col.f32.{TYPES[dtype].replace('fp', 'f')}" in ptx, how
        assert n_in % 16 or re.search(r'cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10', ptx), how
