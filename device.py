"""Which device, which dtype: what device='auto' and dtype='auto' mean, for every script."""
import re
from contextlib import nullcontext

import torch

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


def pick_device(name='auto'):
    """'auto' is cuda, then mps, then cpu. ValueError for a device this machine does not have."""
    n_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = ['cuda'] * bool(n_cuda) + ['mps'] * torch.backends.mps.is_available() + ['cpu']
    if name == 'auto':
        return here[0]
    if not re.fullmatch(r'cpu|mps|cuda(:\d+)?', name):
        raise ValueError(f"device must be auto, cpu, mps, cuda or cuda:N, not {name!r}")
    if name not in here + [f'cuda:{i}' for i in range(n_cuda)]:
        raise ValueError(f"device {name} was asked for, but torch finds {', '.join(here)} here ({n_cuda} cuda): use device=auto")
    return name


def pick_dtype(name, device):
    """'auto' is bfloat16 where the GPU has it, float16 on older ones, and float32 on cpu and mps."""
    if name == 'auto':
        if not device.startswith('cuda'):
            return 'float32'
        return 'bfloat16' if torch.cuda.is_bf16_supported(including_emulation=False) else 'float16'
    if name not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, not {name!r}")
    return name


def autocast(device, dtype):
    """The context to run a model in: mixed precision in dtype, or nothing for float32."""
    return nullcontext() if dtype == 'float32' else torch.autocast(device.split(':')[0], DTYPES[dtype])


def synchronize(device):
    """Wait until the device has done what it was given, so that a clock means something."""
    if device.startswith('cuda'):
        torch.cuda.synchronize()
    elif device.startswith('mps'):
        torch.mps.synchronize()
