"""A decode step compiled by torch.compile, for CUDA and any other device that it serves."""
from types import FunctionType

import torch

from decode.static import StaticDecoder, step


class CompiledDecoder(StaticDecoder):
    """
    The model's own step under torch.compile. Compiles at its first step, once for each batch size and dtype, and on
    CUDA records a graph of it. Weights are read at each step, so they can change. Raises ValueError where torch.compile
    does not work.
    """

    def __init__(self, model):
        super().__init__(model)
        device = next(model.parameters()).device.type
        self.name, self.steps = f"torch.compile on {device}, static shapes", {}
        self.mode = 'reduce-overhead' if device == 'cuda' else None

    def bind(self, caches):
        super().bind(caches)
        for cache in caches:  # a recorded graph may write into them instead of copying them
            torch._dynamo.mark_static_address(cache, guard=False)

    def run(self, idx, cache_pos):
        B, caches = len(idx), self.bound
        kind = caches[0].shape, caches[0].dtype
        if kind not in self.steps:
            # a function of its own for each shape: torch.compile gives up on a function after eight of them
            own = FunctionType(step.__code__.replace(), step.__globals__)
            self.steps[kind] = torch.compile(own, fullgraph=True, dynamic=False, mode=self.mode)
        try:
            return self.steps[kind](self.model, idx.contiguous(), column(cache_pos, B, idx.device), *caches)
        except torch._dynamo.exc.TorchDynamoException as e:
            reason = str(e).strip().splitlines()[0]
            raise ValueError(f"torch.compile does not work here ({reason}): use the eager decoder") from e


def column(x, B, device):
    """An int, or an int64 tensor (B,), as a new tensor (B, 1)."""
    # new in both cases: a step is compiled for tensors that were made in inference mode, or for others
    return x[:, None].clone() if torch.is_tensor(x) else torch.full((B, 1), x, dtype=torch.int64, device=device)
