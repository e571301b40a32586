"""All ways to compute a step on the model's tuples, for tests that hold each of them against one judge."""
import copy

import pytest
import torch

from decode import EagerDecoder, graphs
from decode.compiled import CompiledDecoder
from decode.cpu import CPUDecoder
from decode.graphs import GraphDecoder

WAYS = 'model', 'eager', 'compiled', 'graph', 'cpu'
DECODERS = WAYS[1:]


class StepAgain:
    """In the place of a CUDA graph: a replay runs the recorded step again, on the recorded inputs."""

    def __init__(self, step, pool, stream):
        self.step, self.out = step, step()

    def replay(self):
        self.out.copy_(self.step())

    def __iter__(self):  # (graph, out), as `graphs.captured` returns them
        return iter((self, self.out))


@pytest.fixture
def without_compilers(monkeypatch):
    """The static step of the compiled decoder runs as it is, and that of the graph decoder without CUDA."""
    monkeypatch.setattr(torch, 'compile', lambda step, **how: step)
    monkeypatch.setattr(graphs, 'captured', StepAgain)


def decoder_of(way, model):
    """
    One of `WAYS` for a model, (idx, kv_cache) -> (logits, kv_cache). The numba one has a copy of the model in float32,
    if the model is not that itself.
    """
    if way == 'model':
        return lambda idx, kv_cache: model(idx, kv_cache=kv_cache, use_cache=True)[::2]
    if way == 'cpu':
        return CPUDecoder(model if model.lm_head.weight.dtype is torch.float32 else copy.deepcopy(model).float())
    decoder = {'eager': EagerDecoder, 'compiled': CompiledDecoder, 'graph': GraphDecoder}[way](model)
    assert not decoder.direct.called  # all of the model is called directly
    return decoder
