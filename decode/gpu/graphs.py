"""
A decode step recorded as a CUDA graph.

PyTorch starts a GPU kernel in about 10 us, and a step of a GPT with 12 layers has some 300 of them, most of which run
for 3 us. A graph starts all of them at once. It repeats the same kernels on the same addresses, so one is recorded for
each cache, batch size and number of slots that are read. To record a graph takes as long as a few steps.
"""
from contextlib import nullcontext, suppress
from typing import NamedTuple

import torch

from decode.static import StaticDecoder, step

FEWEST_SLOTS = 128  # a graph reads so many slots, or twice, four times, ... as many
MOST = 32  # recordings that are kept; when there would be more, all are forgotten


class Recording(NamedTuple):
    """A graph, its inputs, and the logits (B, 1, vocab_size) that a replay writes."""
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    idx: torch.Tensor        # int64 (B, 1)
    positions: torch.Tensor  # int64 (B, 1)


class GraphDecoder(StaticDecoder):
    """
    The model's step as a CUDA graph.

    A graph reads the weights where they are, so it sees values that change in place. When a parameter or its memory was
    replaced, new graphs are recorded. All steps of a process must be on one CUDA stream, since recordings share memory.
    """
    name = "PyTorch as a CUDA graph"

    def refresh(self):
        """Check the model, look up its weights anew, and forget all recordings."""
        self.forget()
        super().refresh()

    def forget(self):
        """
        Forget all recordings together, once none of them runs. The end of a graph frees the memory in which cuBLAS
        works on the stream of its recording, and other graphs of that stream would still address it (pytorch#193402).
        """
        device = next(self.model.parameters()).device
        if device.type == 'cuda':
            torch.cuda.synchronize(device)
        self.recordings = {}
        # of memory, and of recording: one of each for all graphs, as no two run at the same time
        self.pool = self.stream = None

    def bind(self, caches):
        self.bound = []  # an interrupt before the end leaves no cache bound
        self.address = tuple((cache.data_ptr(), cache.stride()) for cache in caches), caches[0].shape, caches[0].dtype
        super().bind(caches)

    def run(self, idx, cache_pos):
        n_slots = self.slots_to_read(cache_pos)
        amp = torch.get_autocast_dtype('cuda') if torch.is_autocast_enabled('cuda') else None
        kind = self.address, n_slots, amp
        with torch.cuda.device_of(idx):
            if kind not in self.recordings:
                if len(self.recordings) >= MOST:
                    self.forget()
                self.recordings[kind] = self.record(idx, cache_pos, n_slots, amp)
            recording = self.recordings[kind]
            recording.idx.copy_(idx)
            fill(recording.positions, cache_pos)
            recording.graph.replay()
        return recording.logits

    def slots_to_read(self, cache_pos):
        """The number of the first slots that hold all keys up to cache_pos, of few different numbers."""
        n_slots = self.bound[0].size(2)
        if self.model.config.window:
            return n_slots
        last, n = int(cache_pos.max()) if torch.is_tensor(cache_pos) else cache_pos, FEWEST_SLOTS
        while n <= last:
            n *= 2
        return min(n, n_slots)

    def record(self, idx, cache_pos, n_slots, amp):
        """A `Recording` of the step for tokens such as idx, in the caches that are bound."""
        static_idx, positions = idx.clone(), torch.empty_like(idx)
        fill(positions, cache_pos)
        model, caches = self.direct.model, [cache[:, :, :n_slots] for cache in self.bound]

        def of_graph():
            # the weights that autocast casts are cast in the graph: a copy that autocast keeps is freed before long
            with torch.autocast('cuda', amp, cache_enabled=False) if amp else nullcontext():
                return step(model, static_idx, positions, *caches)
        if not self.recordings and idx.is_cuda:  # a pool ends with its last graph, also with one that failed
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        return Recording(*captured(of_graph, self.pool, self.stream), static_idx, positions)


def fill(static, x):
    """Write x, an int or (B,), to a tensor (B, 1)."""
    static.copy_(x[:, None]) if torch.is_tensor(x) else static.fill_(x)


def captured(step, pool, stream):
    """(the graph of step(), what step() returns, which the graph writes). The stream runs the step once before."""
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            step()  # libraries allocate their memory at a first call, which cannot be recorded
            stream.synchronize()
            graph.capture_begin(pool, capture_error_mode='thread_local')
            try:
                out = step()
            except BaseException:
                with suppress(RuntimeError):  # of what a broken recording has become
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        torch.cuda.current_stream().wait_stream(stream)
    return graph, out
