"""
How numbers are stored: floats unchanged, int8 and int4 in groups that share a scale.

    codes, scale = quantise(x, bits, group)         x = codes * scale, to half a scale
    x = dequantise(codes, scale, bits)
    rows = Rows((n_stream, kv_size), n_head, head_dim, 'int8')

Numbers are quantised once, when they are written. Reading, sharing and copying them leaves their codes unchanged.
"""
import math

import torch

BITS = {'float64': 64, 'float32': 32, 'float16': 16, 'bfloat16': 16, 'int8': 8, 'int4': 4}
GROUP = 32  # numbers that share a scale in `Rows`, as in llama.cpp's Q8_0; fewer, down to 8, in narrow heads
SMALLEST_SCALE = 1e-5


def quantise(x, bits, group):
    """
    Symmetric quantisation of x (..., D): (codes, scale). codes are int8 (..., D), or for 4 bits uint8 (..., D / 2);
    scale is (..., D / group) in x's dtype.

    The number with the largest magnitude of a group becomes 127 or 7. Halves are rounded to even. Two 4-bit numbers
    share a byte, the first in the low half.
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
    """The inverse of `quantise`: (..., D) in the dtype of scale, written to `out` if it is given."""
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).view(torch.int8)
        codes = (codes ^ 8) - 8  # the highest of the four bits is the sign
    groups = codes.unflatten(-1, (scale.size(-1), -1))
    return torch.mul(groups, scale[..., None], out=None if out is None else out.view(groups.shape)).flatten(-2)


class Scratch:
    """
    Reusable memory for rows that are copied or converted before attention. The layers of a cache share it.

    New tensors in each layer can double the time of a step, because the system hands out fresh memory page by page. The
    memory grows with the largest request, to a few times the keys and values of one layer, and never shrinks.
    """

    def __init__(self):
        self.buffers = {}

    def tensor(self, name, shape, dtype, device):
        """An uninitialised tensor. It is valid until the next call with the same name, dtype and device."""
        n, key = math.prod(shape), (name, dtype, device)
        if key not in self.buffers or len(self.buffers[key]) < n:
            with torch.inference_mode(False):  # so that it can be written with inference mode on or off
                self.buffers[key] = torch.empty(n + n // 4, dtype=dtype, device=device)  # room for contexts to grow
        return self.buffers[key].narrow(0, 0, n).view(shape)


class Rows:
    """
    Stored rows of n_head vectors of head_dim numbers. shape: (n_outer, n_inner), for example streams and their cells,
    or blocks and their slots; a row's number is outer * n_inner + inner.

    kind: a key of `BITS`. Memory is laid out (n_head, n_outer, n_inner, head_dim): attention reads one head at a time,
    and a head's numbers of rows that follow each other are side by side. transposed: (n_head, n_outer, head_dim,
    n_inner); for floats only. Rows begin as zeros: a NaN in a row that was never written would reach attention's output
    through the mask. Raises ValueError on what cannot be stored.
    """

    def __init__(self, shape, n_head, head_dim, kind='float32', device='cpu', transposed=False):
        if kind not in BITS:
            raise ValueError(f"numbers are stored as {', '.join(BITS)}, not {kind!r}")
        self.shape, self.n_head, self.head_dim, self.kind, self.bits = tuple(shape), n_head, head_dim, kind, BITS[kind]
        self.scale, self.group = None, math.gcd(head_dim, GROUP)
        with torch.inference_mode(False):  # so that they can be written with inference mode on or off
            self.allocate(device, transposed)

    def allocate(self, device, transposed):
        shape, head_dim, kind = (self.n_head, *self.shape), self.head_dim, self.kind
        if self.bits <= 8:
            if self.group < 8:
                raise ValueError(f"{kind} needs a head_dim that is a multiple of 8, not {head_dim}: use a float")
            if transposed:
                raise ValueError(f"{kind} cannot be transposed, a group would be spread over {self.group} columns: "
                                 "use a float")
            dtype = torch.int8 if self.bits == 8 else torch.uint8
            self.data = torch.zeros(*shape, head_dim * self.bits // 8, dtype=dtype, device=device)
            self.scale = torch.zeros(*shape, head_dim // self.group, dtype=torch.float32, device=device)
        elif transposed:
            data = torch.zeros(*shape[:2], head_dim, shape[2], dtype=getattr(torch, kind), device=device)
            self.data = data.transpose(2, 3)
        else:
            self.data = torch.zeros(*shape, head_dim, dtype=getattr(torch, kind), device=device)

    def tensors(self):
        """What is stored: the data, and for int8 and int4 the scales, each (n_head, n_outer, n_inner, ...)."""
        return [self.data] if self.scale is None else [self.data, self.scale]

    def write(self, rows, x):
        """Write x (n_head, n, head_dim) to rows number `rows` (n,)."""
        new = [x] if self.scale is None else quantise(x.float(), self.bits, self.group)
        for stored, x in zip(self.tensors(), new):
            if stored.is_contiguous():
                stored.flatten(1, 2).index_copy_(1, rows, x.to(stored))
            else:
                stored[:, rows // self.shape[1], rows % self.shape[1]] = x.to(stored)

    def read(self, index, dtype=torch.float32, scratch=None, name=''):
        """
        The rows that an index selects, (S, n_head, K, head_dim) in dtype.

        index: two slices of (n_outer, n_inner); or an int n, the first n outer rows as a single run, S = 1 and
        K = n * n_inner; or a tensor (S, n) of outer numbers, K = n * n_inner, which are copied together.
        Returns a view if they are stored as floats of this dtype and are not copied together. If not, a copy, which
        with a `Scratch` is valid until its next use with the same name.
        """
        scratch, parts = scratch or Scratch(), []
        for i, t in enumerate(self.tensors()):
            if isinstance(index, int):
                parts.append(t[:, :index].flatten(1, 2)[:, None])
            elif isinstance(index, torch.Tensor):
                out = scratch.tensor((name, i), (len(t), index.numel(), *t.shape[2:]), t.dtype, t.device)
                rows = torch.index_select(t, 1, index.flatten(), out=out)
                parts.append(rows.view(len(t), len(index), -1, t.size(-1)))
            else:
                parts.append(t[(slice(None), *index)])
        floats, shape = parts[0], (*parts[0].shape[:3], self.head_dim)  # (n_head, S, K, head_dim)
        if self.scale is not None:
            out = scratch.tensor((name, 'dequantised'), shape, self.scale.dtype, floats.device)
            floats = dequantise(*parts, self.bits, out)
        if floats.dtype is not dtype:
            floats = scratch.tensor(name, shape, dtype, floats.device).copy_(floats)
        return floats.transpose(0, 1)

    def nbytes(self):
        """Bytes of what is stored; the memory of a `Scratch` comes on top."""
        return sum(t.numel() * t.element_size() for t in self.tensors())
