"""
The model's own step in PyTorch as a CUDA graph, for `GPT.generate`.

PyTorch starts a GPU kernel in about 10 us, and a step of a GPT with 12 layers has some 300 of them, most of which run
for 3 us. A graph starts all of them at once. It repeats the same kernels on the same addresses, so one is recorded for
each cache, batch size and number of slots that are read: attention goes over all of these with a mask. (After
https://github.com/pytorch-labs/gpt-fast. Empty slots are read too, and must hold numbers.)
"""
from collections import namedtuple
from contextlib import nullcontext

import torch

from decode.changes import check_unchanged
from decode.direct import DirectModel
from decode.gpu.queue import Queue

FEWEST_SLOTS = 128  # a graph reads so many slots, or twice, four times, ... as many
MOST = 32  # recordings that are kept; when there would be more, all are forgotten


class GraphStep:
    """
    A model's step for `GPT.generate`: (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache). T = 1 is a
    graph. More tokens are the work of `GPT.step`, and so is all of a model that is traced.

    A graph sees values of weights that change in place. When a parameter or its memory was replaced, new graphs are
    recorded at the start of the next text. All steps must be on one CUDA stream. ValueError for changed models.
    """
    name = "PyTorch as a CUDA graph"

    def __init__(self, model, queue=None):
        self.model, self.queue = model, queue or Queue(model.lm_head.weight.device)
        self.refresh()

    def refresh(self):
        """Check the model, look up its weights anew, and forget all recordings."""
        check_unchanged(self.model)
        self.direct, self.weights = DirectModel(self.model), addresses_of(self.model)
        self.forget()

    def forget(self):
        """Forget all recordings, once none runs: the end of one frees memory that others use (pytorch#193402)."""
        device = self.model.lm_head.weight.device
        if device.type == 'cuda':
            torch.cuda.synchronize(device)
        self.recordings = {}
        self.queue.forget()

    @torch.inference_mode()
    def __call__(self, idx, kv_cache):
        if kv_cache is None and addresses_of(self.model) != self.weights:
            self.refresh()
        if kv_cache is None or idx.size(1) != 1 or self.direct.called or (
                kv_cache[0][2] >= self.model.config.max_positions):  # an error
            return self.model.step(idx, kv_cache)
        caches, cache_pos = [cache for layer in kv_cache for cache in layer[:2]], kv_cache[0][2]
        n_slots = self.slots_to_read(caches[0].size(2), cache_pos)
        amp = torch.get_autocast_dtype('cuda') if torch.is_autocast_enabled('cuda') else None
        kind = tuple(cache.data_ptr() for cache in caches), caches[0].shape, caches[0].dtype, n_slots, amp
        with torch.cuda.device_of(idx):
            if kind not in self.recordings:
                if len(self.recordings) >= MOST:
                    self.forget()
                self.recordings[kind] = self.record(idx, cache_pos, [cache[:, :, :n_slots] for cache in caches], amp)
            recording = self.recordings[kind]
            recording.idx.copy_(idx)
            recording.positions.fill_(cache_pos)
            recording.graph.replay()
            return recording.outputs[0].clone(), [(k, v, cache_pos + 1) for k, v, _ in kv_cache]

    def slots_to_read(self, n_slots, cache_pos):
        """The number of the first slots, of n_slots, that hold all keys up to cache_pos: of few different numbers."""
        if self.model.config.window:
            return n_slots
        n = FEWEST_SLOTS
        while n <= cache_pos:
            n *= 2
        return min(n, n_slots)

    def record(self, idx, cache_pos, caches, amp):
        """A `Recording` of the step for tokens such as idx. caches: k_cache and v_cache of each layer in turn."""
        static_idx, positions, outputs, model = idx.clone(), torch.full_like(idx, cache_pos), [], self.direct.model
        layers = [StaticSlots(k_cache, v_cache) for k_cache, v_cache in zip(caches[::2], caches[1::2])]

        def step():
            # no cache of autocast: it would free its copies of the weights, and the graph would read freed memory
            with torch.autocast('cuda', amp, cache_enabled=False) if amp else nullcontext():
                outputs[:] = [model.lm_head(model.hidden_states(static_idx, positions, layers)[0])]
        return Recording(self.queue.record(step), static_idx, positions, outputs)


# a graph, its inputs, int64 (B, 1), and a list with the logits (B, 1, vocab_size) that a replay writes
Recording = namedtuple('Recording', 'graph idx positions outputs')


class StaticSlots(namedtuple('StaticSlots', 'k_cache v_cache')):
    """The cache of one layer with slots (B, n_kv_head, n_slots, head_dim); see model.py's `append`."""

    def append(self, k, v, positions):
        """Write k and v (B, n_kv_head, T, head_dim). Returns all slots in the dtype of k, their `Keys`, and itself."""
        k_cache, v_cache = self
        rows = torch.arange(k.size(0), device=k.device)[:, None]
        k_cache[rows, :, positions.slots] = k.transpose(1, 2).to(k_cache.dtype)
        v_cache[rows, :, positions.slots] = v.transpose(1, 2).to(v_cache.dtype)
        return k_cache.to(k.dtype), v_cache.to(v.dtype), positions.keys_of_slots(k_cache.size(2)), self


def addresses_of(model):
    """Where the weights of a model are."""
    return [p.data_ptr() for p in model.parameters()]
