"""For the tests of Triton's kernels: they run on a GPU where there is one, and in Triton's interpreter elsewhere."""
import os

import numpy as np
import pytest
import torch

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
if DEVICE == 'cpu':
    os.environ.setdefault('TRITON_INTERPRET', '1')  # Triton reads it when a kernel is defined
triton = pytest.importorskip('triton', reason="the kernels are written in Triton, which is not installed")

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

IS_INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'
QUIET = pytest.mark.filterwarnings('ignore:.* encountered in:RuntimeWarning')  # of numpy, in the interpreter


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
