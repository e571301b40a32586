"""
How numbers are stored: floats unchanged, int8 in groups that share a scale. OpenPPL's operator has 4 bits, too.

    codes, scale = quantise(x, bits, group)         x = codes * scale, to half a scale
    x = dequantise(codes, scale, bits)
    layer = Layer(n_slots, n_kv_head, head_dim, 'int8', 'int8')

Numbers are quantised once, when they are written. Reading, sharing and copying them leaves their codes unchanged.
"""
import math
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

BITS = {'float64': 64, 'float32': 32, 'float16': 16, 'bfloat16': 16, 'int8': 8}
KV_GROUP = 32  # numbers that share a scale in `SlotArray`, as in llama.cpp's Q8_0; fewer in narrow heads
SMALLEST_SCALE = 1e-30
ALWAYS_FREE = 2**27  # bytes; for fewer, free memory is not looked up, which takes 0.05 ms
CONTROL_GROUP = Path('/sys/fs/cgroup')  # of a container, on Linux


def quantise(x, bits, group):
    """
    Symmetric quantisation of x (..., D): (codes, scale). codes are int8 (..., D), or for 4 bits uint8 (..., D / 2);
    scale is (..., D / group) in x's dtype.

    The number with the largest magnitude of a group becomes 127 or 7. Halves are rounded to even. Two 4-bit numbers
    share a byte, the first in the low half.
    """
    largest = {8: 127, 4: 7}[bits]
    groups = x.unflatten(-1, (-1, group))
    scale = (groups.abs().amax(dim=-1) / largest).clamp(min=max(SMALLEST_SCALE, torch.finfo(x.dtype).tiny))
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


def zeros(shape, dtype, device):
    """
    Zeros. On a CPU they begin at a cache line, in memory that the system has zeroed: it takes room only when it is
    written.
    """
    if torch.device(device).type != 'cpu':
        return torch.zeros(shape, dtype=dtype, device=device)
    n = math.prod(shape) * dtype.itemsize
    raw = np.zeros(n + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return torch.from_numpy(raw[start:start + n]).view(dtype).view(shape)


def group_of(head_dim):
    """How many numbers of a head share a scale."""
    common = math.gcd(head_dim, KV_GROUP)
    return common if common >= 8 else head_dim


class SlotArray:
    """
    n_slots slots of n_kv_head vectors of head_dim numbers.

    kind: a key of `BITS`. data: (n_kv_head, n_slots, head_dim), because attention reads one head at a time, and the
    numbers of a head in slots that follow each other are side by side. scale: float32 (n_kv_head, n_slots, head_dim /
    group) for int8, otherwise None. All numbers begin as zeros: a NaN that was never written would reach attention's
    output through the mask. Raises ValueError on what cannot be stored.
    """

    def __init__(self, n_slots, n_kv_head, head_dim, kind='float32', device='cpu'):
        if kind not in BITS:
            raise ValueError(f"numbers are stored as {', '.join(BITS)}, not {kind!r}")
        self.kind, self.head_dim, self.scale, dtype = kind, head_dim, None, getattr(torch, kind)
        self.group = group_of(head_dim)
        with torch.inference_mode(False):  # so that they can be written with inference mode on or off
            self.data = zeros((n_kv_head, n_slots, head_dim), dtype, device)
            if kind == 'int8':
                self.scale = zeros((n_kv_head, n_slots, head_dim // self.group), torch.float32, device)

    def tensors(self):
        """What is stored: the data, and for int8 the scales."""
        return [self.data] if self.scale is None else [self.data, self.scale]

    def write(self, slots, x):
        """Write x (n_kv_head, n, head_dim) to slots (n,)."""
        new = [x] if self.scale is None else quantise(x.float(), 8, self.group)
        for stored, x in zip(self.tensors(), new):
            stored.index_copy_(1, slots, x.to(stored))

    def read(self, slots, dtype=torch.float32, scratch=None, name=''):
        """
        The numbers in slots (S, K), as (S, n_kv_head, K, head_dim) in dtype: a copy, which with a `Scratch` is valid
        until its next use with the same name.
        """
        scratch, found = scratch or Scratch(), []
        for i, stored in enumerate(self.tensors()):
            out = scratch.tensor((name, i), (len(stored), slots.numel(), stored.size(2)), stored.dtype, stored.device)
            rows = torch.index_select(stored, 1, slots.flatten(), out=out)
            found.append(rows.view(len(stored), *slots.shape, -1))
        floats = found[0]
        if self.scale is not None:
            out = scratch.tensor((name, 'widened'), floats.shape, self.scale.dtype, floats.device)
            floats = dequantise(*found, 8, out)
        if floats.dtype is not dtype:
            floats = scratch.tensor(name, floats.shape, dtype, floats.device).copy_(floats)
        return floats.transpose(0, 1)


class Layer:
    """
    The stored keys and values of one layer of a model: `SlotArray` k and v of n_slots slots.

    type_k, type_v: how they are stored, see `SlotArray`. scratch: a `Scratch`; layers that are read one after the other
    can share one.
    """

    def __init__(self, n_slots, n_kv_head, head_dim, type_k='float32', type_v='float32', device='cpu', scratch=None):
        self.n_slots, self.n_kv_head, self.head_dim, self.scratch = n_slots, n_kv_head, head_dim, scratch or Scratch()
        self.k = SlotArray(n_slots, n_kv_head, head_dim, type_k, device)
        self.v = SlotArray(n_slots, n_kv_head, head_dim, type_v, device)

    @property
    def device(self):
        return self.k.data.device

    def tensors(self):
        return self.k.tensors() + self.v.tensors()

    def zero(self):
        for stored in self.tensors():
            stored.zero_()

    def write(self, slots, k, v):
        """Store keys and values (n_kv_head, n, head_dim) in slots (n,)."""
        self.k.write(slots, k)
        self.v.write(slots, v)

    def read(self, slots, dtype):
        """
        The keys and values in slots (S, K), (S, n_kv_head, K, head_dim) each. They are valid until the next layer with
        the same scratch is read.
        """
        return self.k.read(slots, dtype, self.scratch, 'k'), self.v.read(slots, dtype, self.scratch, 'v')

    def views(self, first, stride, S, K):
        """The floats in slots first + i * stride + j for i < S and j < K: views (S, n_kv_head, K, head_dim)."""
        strides = stride * self.head_dim, self.n_slots * self.head_dim, self.head_dim, 1
        shape, at = (S, self.n_kv_head, K, self.head_dim), first * self.head_dim
        return [t.as_strided(shape, strides, t.storage_offset() + at) for t in (self.k.data, self.v.data)]

    def copy(self, source, target, n):
        """Copy n slots from slot `source` on to those from slot `target` on, in their stored form."""
        for stored in self.tensors():
            stored[:, target:target + n] = stored[:, source:source + n]


def free_memory(device):
    """Free bytes of a device: on a CPU the machine's, or its control group's if fewer; inf where no system says it."""
    if device.type == 'cuda':
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = math.inf
    with suppress(OSError, TypeError, ValueError):  # other systems have no such files, and "max" is no limit
        free = 1024 * int(re.search(r'MemAvailable: +(\d+)', Path('/proc/meminfo').read_text())[1])
        most, used, stat = (CONTROL_GROUP.joinpath('memory.' + each).read_text() for each in ('max', 'current', 'stat'))
        of_files = sum(map(int, re.findall(r'active_file (\d+)', stat)))  # given up where they are needed
        free = min(free, int(most) - int(used) + of_files)
    return free


def bytes_of_slots(config, n, type_kv='float32'):
    """Bytes of n slots in all layers of a model."""
    of_head = config.head_dim * BITS[type_kv] // 8 + 4 * (config.head_dim // group_of(config.head_dim)) * (
        type_kv == 'int8')
    return n * 2 * config.n_layer * config.n_kv_head * of_head


def make_layers(model, n_slots, type_kv='float32'):
    """A `Layer` of n_slots slots for each layer of a model, on its device. ValueError if memory is short."""
    c, scratch = model.config, Scratch()
    device = model.transformer.ln_f.weight.device  # matrices may be on the device meta, see `formats.from_pretrained`
    n_bytes = bytes_of_slots(c, n_slots, type_kv)
    if n_bytes > ALWAYS_FREE and n_bytes > (free := free_memory(device)):
        raise ValueError(f"keys and values of {n_slots:,} tokens take {n_bytes / 1e9:,.1f} GB, and {free / 1e9:,.1f} "
                         "GB of memory are free: take a smaller batch_size, max_new_tokens or n_blocks, or kv_bits=8")
    return [Layer(n_slots, c.n_kv_head, c.head_dim, type_kv, type_kv, device, scratch=scratch)
            for _ in range(c.n_layer)]
