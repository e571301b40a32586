"""For the tests of Triton's kernels: they run on a GPU where there is one, and in Triton's interpreter elsewhere."""
import os

import numpy as np
import pytest
import torch

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
if DEVICE == 'cpu':
    os.environ.setdefault('TRITON_INTERPRET', '1')  # Triton reads it when a kernel is defined
triton = pytest.importorskip('triton', reason="the kernels are written in Triton, which is not installed")

from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

tl, IS_INTERPRETED = triton.language, os.environ.get('TRITON_INTERPRET') == '1'
QUIET = pytest.mark.filterwarnings('ignore:.* encountered in:RuntimeWarning')  # of numpy, in the interpreter
patch_language = interpreter._patch_lang


def patch_language_once(function):
    """A third of the interpreter's time went into patching all of Triton's language anew in each call of a function."""
    languages = [each for each in function.__globals__.values() if each is tl or each is tl.core]
    if any(tl.core.is_builtin(each.load) for each in languages):
        return patch_language(function)
    return interpreter._LangPatchScope()


if IS_INTERPRETED:
    interpreter._patch_lang = patch_language_once


@pytest.fixture
def dots_in_order(monkeypatch):
    """In NumPy's products, which the interpreter takes, sums depend on a row's place in a tile, unlike on a GPU."""
    if IS_INTERPRETED:
        def dot(self, a, b, d, *how):
            return TensorHandle((a.data[:, :, None] * b.data).sum(1, dtype=np.float32) + d.data, d.dtype.scalar)
        monkeypatch.setattr(InterpreterBuilder, 'create_dot', dot)


@pytest.fixture
def small_tiles(monkeypatch):
    """Attention has several splits, and tiles within a split, of a few keys; and linears have parts."""
    for module in 'decode.gpu.attention', 'decode.gpu.tables':
        monkeypatch.setattr(f'{module}.TILE', 16)
        monkeypatch.setattr(f'{module}.SMALL_TILE', 16)
        monkeypatch.setattr(f'{module}.SPLIT', 32)
    monkeypatch.setattr('decode.gpu.linears.PART', 10)
    monkeypatch.setattr('decode.gpu.linears.UNIT', 8)
