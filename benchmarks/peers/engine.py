"""
What every engine has in common.

    engine = OnnxRuntime(model, weights='int8', threads=2)
    engine.generate(prompts, 100)    # (B, T) token ids -> the (B, 100) that follow

An engine is built from a model in memory. It decodes greedily, all rows of a batch in one step, stops for no token, and
ends where the context is full. Each class uses the fastest way into its engine that we know.
"""
import importlib
from contextlib import contextmanager

import torch


class Engine:
    """
    What all engines have in common.

    packages: {module: the package to install for it}. ways: {weights: list of keyword arguments}, the variants that
    the race tries for these weights, each with one thread and with all. same_tokens: in float32 its arithmetic differs
    from ours by rounding only, so that its tokens should be ours.
    """
    name, packages, ways, same_tokens = '', {}, {'float32': [{}]}, True

    @classmethod
    def missing(cls):
        """Why this engine cannot be used here, and what to do about it; '' if it can."""
        for module, package in cls.packages.items():
            try:
                importlib.import_module(module)
            except ModuleNotFoundError:
                return f"pip install {package}"
            except Exception as e:  # a wheel for another processor or libc; the kinds of error differ by package
                return f"{module} does not load: {type(e).__name__}: {e}"
        return ''

    def __init__(self, model, weights='float32', threads=1):
        if weights not in self.ways:
            raise ValueError(f"{self.name} has weights in {' or '.join(self.ways)} here, not in {weights!r}")
        if self.missing():
            raise ValueError(f"{self.name} cannot be used: {self.missing()}")
        self.config, self.threads = model.config, threads

    def checked(self, prompts, n_new):
        """prompts as a contiguous tensor (B, T); ValueError unless n_new tokens fit behind them."""
        prompts = torch.as_tensor(prompts)
        if prompts.dim() != 2 or prompts.size(1) == 0:
            raise ValueError(f"prompts must be (B, T) with at least one token each, not {tuple(prompts.shape)}")
        if n_new < 1:
            raise ValueError(f"n_new must be at least 1, not {n_new}")
        if prompts.size(1) + n_new - 1 > self.config.block_size:  # the last token is sampled, but never fed
            raise ValueError(f"a prompt of {prompts.size(1)} and {n_new} new tokens do not fit into block_size "
                             f"{self.config.block_size}")
        return prompts.contiguous()


def array(p):
    """A copy of a parameter as a float32 array. (CTranslate2 quantises its arrays in place, so it needs a copy.)"""
    return p.detach().float().cpu().numpy().copy()


@contextmanager
def torch_threads(n):
    """PyTorch runs on n threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
