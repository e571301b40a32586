"""
Encode: numbers as they are kept. Floats as they are; int8 and int4 in groups that share a scale.

    codes, scale = quantise(x, bits, group)         x = codes * scale, to half a scale
    x = dequantise(codes, scale, bits)
    rows = Rows((n_stream, kv_size), width, 'int8')

A group is quantised once, when it is written, and never again: reading, sharing and moving it do not change it.
"""
import math

import torch

BITS = {'float64': 64, 'float32': 32, 'float16': 16, 'bfloat16': 16, 'int8': 8, 'int4': 4}
GROUP = 32  # numbers that share a scale in `Rows`, as in llama.cpp's Q8_0; in narrow rows down to 8
SMALLEST_SCALE = 1e-5


def quantise(x, bits, group):
    """
    Symmetric: x (..., D) -> codes, int8 (..., D) or for 4 bits uint8 (..., D / 2), and scale (..., D / group) in x's dtype.

    The largest of a group becomes 127 or 7; halves go to the even number. Two 4-bit numbers share a byte, the first in the low half.
    """
    largest = {8: 127, 4: 7}[bits]
    groups = x.unflatten(-1, (-1, group))
    scale = (groups.abs().amax(dim=-1) / largest).clamp(min=SMALLEST_SCALE)
    codes = (groups / scale[..., None]).round().clamp(-largest, largest).to(torch.int8).flatten(-2)
    if bits == 4:
        codes = codes.view(torch.uint8) & 15
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes, scale


def dequantise(codes, scale, bits, out=None):
    """The numbers again, (..., D) in the dtype of scale; into out, if there is one."""
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).view(torch.int8)
        codes = (codes ^ 8) - 8  # of four bits the highest is the sign
    groups = codes.unflatten(-1, (scale.size(-1), -1))
    return torch.mul(groups, scale[..., None], out=None if out is None else out.view(groups.shape)).flatten(-2)


class Scratch:
    """
    Memory for what is copied together or widened to be attended over: the layers of a cache take turns with it.

    New tensors at each layer can double the time of a step: megabytes of fresh memory are fetched from the system page by
    page, and given back. It stays as large as it has been: a few times the keys and values of one layer, as they are read.
    """

    def __init__(self):
        self.kept = {}

    def tensor(self, name, shape, dtype, device):
        """A tensor with anything in it, until somebody asks for the same name again."""
        n, key = math.prod(shape), (name, dtype, device)
        if key not in self.kept or len(self.kept[key]) < n:
            with torch.inference_mode(False):  # so that it can be written in any mode
                self.kept[key] = torch.empty(n + n // 4, dtype=dtype, device=device)  # contexts grow
        return self.kept[key].narrow(0, 0, n).view(shape)


class Rows:
    """
    Rows of `width` numbers, zero-filled: a NaN in a row that nobody has written would reach the output of attention through
    the mask. shape: (n_outer, n_inner), such as streams and their cells, or blocks and their slots; row = outer * n_inner + inner.

    kind: 'float32', 'float16', 'bfloat16', 'int8' or 'int4'. transposed: numbers of one column side by side instead of those of
    one row, (n_outer, width, n_inner) in memory; only for floats. Raises ValueError on what cannot be stored like that.
    """

    def __init__(self, shape, width, kind='float32', device='cpu', transposed=False):
        if kind not in BITS:
            raise ValueError(f"numbers are kept as {', '.join(BITS)}, not {kind!r}")
        self.shape, self.width, self.kind, self.bits = tuple(shape), width, kind, BITS[kind]
        self.scale, self.group = None, math.gcd(width, GROUP)
        with torch.inference_mode(False):  # so that it can be written in any mode
            self.allocate(device, transposed)

    def allocate(self, device, transposed):
        shape, width, kind = self.shape, self.width, self.kind
        if self.bits <= 8:
            if self.group < 8:
                raise ValueError(f"{kind} keeps groups of 8 numbers at least, which do not divide a row of {width}")
            if transposed:
                raise ValueError(f"{kind} cannot be transposed: a group would be spread over {self.group} columns")
            self.data = torch.zeros(*shape, width * self.bits // 8, dtype=torch.int8 if self.bits == 8 else torch.uint8, device=device)
            self.scale = torch.zeros(*shape, width // self.group, dtype=torch.float32, device=device)
        elif transposed:
            self.data = torch.zeros(shape[0], width, shape[1], dtype=getattr(torch, kind), device=device).transpose(1, 2)
        else:
            self.data = torch.zeros(*shape, width, dtype=getattr(torch, kind), device=device)

    def tensors(self):
        """What is stored: the data, and for int8 and int4 the scales, each (n_outer, n_inner, ...)."""
        return [self.data] if self.scale is None else [self.data, self.scale]

    def encode(self, x):
        """x (n, width) as the tensors that are stored for it."""
        return [x] if self.scale is None else quantise(x.float(), self.bits, self.group)

    def write(self, rows, x):
        """Rows number `rows` (n,) = x (n, width)."""
        n_inner = self.shape[1]
        for stored, new in zip(self.tensors(), self.encode(x)):
            if stored.is_contiguous():
                stored.flatten(0, 1).index_copy_(0, rows, new.to(stored))
            else:
                stored[rows // n_inner, rows % n_inner] = new.to(stored)

    def read(self, index, dtype=torch.float32, scratch=None, name=''):
        """
        The rows that index picks, (S, K, width) in dtype: a view if they lie side by side, in dtype and as floats. If not they
        are copied, and with a `Scratch` what comes back is good until somebody asks it for the same name.

        index: two slices of (n_outer, n_inner); or n, the first n outer ones as a single run, S = 1, K = n * n_inner; or a tensor (S, n)
        of outer numbers, K = n * n_inner, which are copied together.
        """
        scratch = scratch or Scratch()
        if isinstance(index, int):
            parts = [t[:index].flatten(0, 1)[None] for t in self.tensors()]
        elif isinstance(index, torch.Tensor):
            parts = []
            for i, t in enumerate(self.tensors()):
                out = scratch.tensor((name, i), (index.numel(), *t.shape[1:]), t.dtype, t.device)
                parts.append(torch.index_select(t, 0, index.flatten(), out=out).view(len(index), -1, t.size(-1)))
        else:
            parts = [t[index] for t in self.tensors()]
        if parts[0].dtype is dtype:
            return parts[0]
        shape, device = (*parts[0].shape[:2], self.width), parts[0].device
        wide = parts[0]
        if self.scale is not None:
            wide = dequantise(*parts, self.bits, scratch.tensor((name, 'wide'), shape, self.scale.dtype, device))
        return wide if wide.dtype is dtype else scratch.tensor(name, shape, dtype, device).copy_(wide)

    def nbytes(self):
        """Bytes of what is stored; what a `Scratch` holds comes on top."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

