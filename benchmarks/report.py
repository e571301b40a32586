"""What every measurement reports: the machine it ran on, and its rows as JSON."""
import json
import os
import platform

import torch

from whole_file import replacing


def describe_machine(device):
    """torch's version, the device, and its name or the CPU's instruction set and threads."""
    if device.startswith('cuda'):
        what = torch.cuda.get_device_name(device)
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        what = f"{platform.machine()} {capability}, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, {device}, {what}"


def write_json(path, figures):
    """Write figures to the file `path`; '' writes nothing."""
    if path:
        with replacing(path, 'w') as f:
            json.dump(figures, f, indent=1)


def read_json(path):
    """What `write_json` has written to the file `path`; {} if there is none."""
    if not path or not os.path.exists(path):
        return {}
    with open(path) as f:
        return json.load(f)
