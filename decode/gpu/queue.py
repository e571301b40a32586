"""What a device does one after the other: recorded steps, copies, and events for which the host waits."""
from functools import cached_property

import numpy as np
import torch


class Queue:
    """The current stream of a CUDA device. Recordings share one stream and memory, as no two run at the same time."""

    def __init__(self, device):
        self.device = device

    @cached_property
    def stream(self):
        return torch.cuda.Stream(self.device)  # on which graphs are recorded

    def record(self, step, other=None):
        """
        A CUDA graph of step(), with a `replay`, in the memory of another one. The step is run once before. Memory ends
        with the last graph that was recorded in it, and must not be used again.
        """
        return captured(step, other.pool() if other else torch.cuda.graph_pool_handle(), self.stream)

    def pinned(self, tensor):
        """A copy that a device can read and write while the host goes on, and whose memory then serves again."""
        return tensor.pin_memory()

    def send(self, target, source):
        """Begin to copy a tensor of the host, which may change at once, to one of the device."""
        target.copy_(self.pinned(source.to(target.dtype)), non_blocking=True)

    def put(self, table, at, values):
        """Begin to write numbers, a list or array (n,), at places of a tensor of the device. One copy."""
        at, values = self.pinned(torch.from_numpy(np.stack((at, values)))).to(table.device, non_blocking=True)
        table.view(-1).index_copy_(0, at.long(), values.to(table.dtype))

    def event(self):
        """An event behind all that was begun. Its `synchronize` waits until that is done."""
        return torch.cuda.current_stream(self.device).record_event()


def captured(step, pool, stream):
    """The CUDA graph of step(), which is run once before."""
    graph = torch.cuda.CUDAGraph()
    step()  # kernels are loaded, and libraries allocate memory, at a first call, which cannot be recorded
    # torch.cuda.stream leaves the stream in any case; torch.cuda.graph does not if a recording fails
    with torch.cuda.stream(stream), torch.cuda.graph(graph, pool, stream, 'thread_local'):
        step()
    return graph
