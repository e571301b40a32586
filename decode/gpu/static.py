"""
A decode step whose shapes never change, for decoders that run a recorded or compiled step again and again.

A layer's cache is a `StaticSlots` here: keys and values are written to the slots of their positions, and attention goes
over a fixed number of slots with a mask. Nothing that is recorded depends on the length of the sequence. (After
gpt-fast's decode_one_token, https://github.com/pytorch-labs/gpt-fast. The price is that empty slots are read too; the
mask hides them, but they must hold numbers, as the zeros of a new cache do.)
"""
from typing import NamedTuple

import torch

from decode.changes import Watch, check_unchanged
from decode.direct import DirectModel
from decode.process import step_lock


class StaticSlots(NamedTuple):
    """The cache of one layer with slots (B, n_kv_head, n_slots, head_dim); see model.py's `append`."""
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def append(self, k, v, positions):
        """
        Write k and v (B, n_kv_head, T, head_dim). Returns all slots, in the dtype of k, their `Keys`, in which a slot
        that is empty has a position after the new tokens', and itself.
        """
        k_cache, v_cache = self
        rows = torch.arange(k.size(0), device=k.device)[:, None]
        k_cache[rows, :, positions.slots] = k.transpose(1, 2).to(k_cache.dtype)
        v_cache[rows, :, positions.slots] = v.transpose(1, 2).to(v_cache.dtype)
        return k_cache.to(k.dtype), v_cache.to(v.dtype), positions.keys_of_slots(k_cache.size(2)), self


def step(model, idx, positions, *caches):
    """
    The logits (B, 1, vocab_size) of tokens idx at positions, both int64 (B, 1). caches: k_cache and v_cache of each
    layer, one after the other, which are written.
    """
    layers = [StaticSlots(k_cache, v_cache) for k_cache, v_cache in zip(caches[::2], caches[1::2])]
    x, _ = model.hidden_states(idx, positions, layers)
    return model.lm_head(x)


def with_length(kv_cache, cache_pos):
    """
    The same layers with another cache_pos, each still of its own class. Nothing is copied.

    `tuple.__new__` makes a NamedTuple without calling the Python function that is its constructor, once for each layer
    and token. All layers are of the class of the first.
    """
    kind = type(kv_cache[0])
    return [tuple.__new__(kind, (k_cache, v_cache, cache_pos)) for k_cache, v_cache, _ in kv_cache]


class StaticDecoder:
    """
    A decoder, (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache). T = 1 is the work of `run`. More tokens
    are that of the model itself, and so is all in training mode, or if it is traced.

    Raises ValueError for models that are not model.py's GPT, unchanged. A model is checked when the decoder is made,
    and again at the start of a sequence if its modules, its parameters or their memory were replaced.
    """

    def __init__(self, model):
        self.model = model
        self.refresh()

    def refresh(self):
        """Check the model, and look up its weights anew."""
        check_unchanged(self.model)
        self.bound = []  # k_cache and v_cache of each layer of the last step
        self.direct, self.watch = DirectModel(self.model), Watch(self.model)

    def notice_changes(self):
        """`refresh` if a parameter or its memory was replaced. Called at the start of a sequence."""
        if not self.watch.same_memory():
            self.refresh()

    def bind(self, caches):
        """Prepare for steps on these caches: called when they are not those of the last step."""
        self.bound = caches

    def run(self, idx, cache_pos):
        """
        Logits (B, 1, vocab_size), not to be kept, for idx, int64 (B, 1), at cache_pos, an int or int64 (B,), in the
        caches that are bound.
        """
        raise NotImplementedError

    def __call__(self, idx, kv_cache):
        if kv_cache is None:
            self.notice_changes()
        if kv_cache is None or not torch.is_tensor(idx) or idx.dim() != 2 or idx.size(1) != 1 or (
                self.direct.called or self.direct.is_training()):
            with torch.no_grad():
                logits, _, kv_cache = self.model(idx, kv_cache=kv_cache, use_cache=True)
                return logits, kv_cache
        with step_lock:
            return self.one_token(idx, kv_cache)

    def one_token(self, idx, kv_cache):
        cache_pos = kv_cache[0][2]
        caches = [cache for layer in kv_cache for cache in layer[:2]]
        new = len(caches) != len(self.bound) or any(a is not b for a, b in zip(caches, self.bound))
        if new or type(cache_pos) is not int or idx.dtype is not torch.int64 or len(idx) != len(caches[0]):
            idx, cache_pos = self.model.checked_input(idx, kv_cache)
        if new:
            self.notice_changes()
            self.bind(caches)
        config = self.model.config
        if type(cache_pos) is int and not 0 <= cache_pos < config.max_positions:
            raise ValueError(f"out of context: cache_pos {cache_pos} + 1 new token > block_size {config.block_size}")
        with torch.inference_mode():
            logits = self.run(idx, cache_pos).clone()
        return logits, with_length(kv_cache, cache_pos + 1)
