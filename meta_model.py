"""Models that have shapes and no weights."""
import torch
from torch.overrides import TorchFunctionMode


class NoValues(TorchFunctionMode):
    """Inside, `torch.nn.init` does nothing: on the device meta it would import 800 modules, 70 MB in 0.6 seconds."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, '__module__', None) != 'torch.nn.init':
            return function(*args, **(kwargs or {}))


def meta_model(GPT, config):
    """GPT(config) on the device meta."""
    with torch.device('meta'), NoValues():
        return GPT(config)
