"""
For the tests of Triton's kernels: they run on a GPU where there is one, and in Triton's interpreter elsewhere. Or they
are compiled for a GPU that is not here, in a process of its own, see `compiled_apart`.
"""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ENVIRONMENT, ROOT

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
if DEVICE == 'cpu':
    os.environ.setdefault('TRITON_INTERPRET', '1')  # Triton reads it when a kernel is defined
triton = pytest.importorskip('triton', reason="the kernels are written in Triton, which is not installed")

from triton.backends.compiler import GPUTarget
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

tl, IS_INTERPRETED = triton.language, os.environ.get('TRITON_INTERPRET') == '1'
QUIET = pytest.mark.filterwarnings('ignore:.* encountered in:RuntimeWarning')  # of numpy, in the interpreter
TYPES = {torch.float32: '*fp32', torch.float64: '*fp64', torch.bfloat16: '*bf16', torch.float16: '*fp16',
         torch.int8: '*i8', torch.int32: '*i32', torch.int64: '*i64'}


@pytest.fixture
def dots_in_order(monkeypatch):
    """
    The interpreter multiplies tiles as NumPy does, whose sums depend on where in a tile a row is. Those of a GPU do
    not, nor do these.
    """
    if IS_INTERPRETED:
        def dot(self, a, b, d, *how):
            return TensorHandle((a.data[:, :, None] * b.data).sum(1, dtype=np.float32) + d.data, d.dtype.scalar)
        monkeypatch.setattr(InterpreterBuilder, 'create_dot', dot)


class Compiled(triton.JITFunction):
    """Stands for a kernel: what would launch it compiles it for the GPU `arch`, without one, into `texts`."""

    def __init__(self, kernel, arch, texts):
        self.kernel, self.arch, self.texts = kernel, arch, texts

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args, **more):
        names = [parameter.name for parameter in self.kernel.params]
        values = dict(zip(names, args)) | {name: more.pop(name) for name in names if name in more}
        signature, constants, aligned = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[parameter.name] = 'constexpr', value
            elif isinstance(value, float):
                signature[parameter.name] = 'fp32'
            else:
                tensor = isinstance(value, torch.Tensor)
                signature[parameter.name] = TYPES[value.dtype] if tensor else 'i64' if value >= 2**31 else 'i32'
                if tensor or value % 16 == 0 and not parameter.do_not_specialize:
                    aligned[i,] = [['tt.divisibility', 16]]
        source = triton.compiler.ASTSource(self.kernel, signature, constants, aligned)
        compiled = triton.compile(source, target=GPUTarget('cuda', self.arch, 32), options=more)
        self.texts.append(dict(name=self.kernel.__name__, ptx=compiled.asm['ptx'], shared=compiled.metadata.shared))


def compiled(arch, kernels, launch):
    """What the kernels, [(module, name)], become that launch() would launch on this GPU: [{name, ptx, shared}]."""
    texts = []
    with pytest.MonkeyPatch.context() as patch:
        for module, name in kernels:
            patch.setattr(module, name, Compiled(getattr(module, name), arch, texts))
        launch()
    return texts


def compiled_apart(module, cases):
    """
    What the function `compile_for` of a test module returns for each of the cases, lists of arguments as in JSON. In a
    process without the interpreter.
    """
    code = ('import importlib, json, sys; module = importlib.import_module(sys.argv[1]); '
            'print(json.dumps([module.compile_for(*case) for case in json.loads(sys.argv[2])]))')
    run = subprocess.run([sys.executable, '-c', code, module, json.dumps(cases)], capture_output=True, text=True,
                         cwd=ROOT, env=ENVIRONMENT | dict(TRITON_INTERPRET='0', PYTHONPATH=f'{ROOT}:{ROOT}/tests'))
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])
