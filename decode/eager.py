"""The executor in PyTorch: the model's own code, called directly (see direct.py), on the weights where they are."""
import math
from typing import NamedTuple

import numpy as np
import torch

from decode.changes import Watch, check_own_forward
from decode.direct import DirectModel
from decode.metadata import step_slots
from positions import Keys

NOWHERE = 2**62  # a key position after all others


class EagerDecoder:
    """
    A decoder, (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache), that computes what the model computes;
    and by `execute_model` the same step on any cache.

    It works wherever the model works: on any device, in any dtype, under autocast, for any T. Values of weights are
    read at each step, so they can change; other changes of the model are seen at the start of a sequence, and after
    `refresh`. Modules that are not of model.py or torch, or that have hooks, are called as they are, and in training
    mode all of the model is. `execute_model` refuses a GPT with a `forward` of its own. Raises ValueError on tokens and
    caches that do not fit the model, with nothing written.

    version: grows when the model has changed since the last sequence began.
    """
    name = 'PyTorch, eager'

    def __init__(self, model):
        self.model, self.version = model, 0
        self.watch, self.direct = Watch(model), DirectModel(model)

    def refresh(self):
        """Look up the weights anew."""
        self.version += 1
        self.direct, self.watch = DirectModel(self.model), Watch(self.model)

    def notice_changes(self):
        """`refresh` if the model has changed, see `changes.Watch`. Called at the start of a sequence."""
        if not self.watch.unchanged():
            self.refresh()

    @staticmethod
    def reads(kv_caches):
        """Can `execute_model` read these `KVArrays`?"""
        return kv_caches.layers is not None

    def __call__(self, idx, kv_cache):
        if kv_cache is None:
            self.notice_changes()
            idx, _ = self.model.checked_input(idx, None)
            kv_cache = self.model.empty_cache(len(idx))  # not in inference mode: code outside may write this cache too
        forward = self.model if self.direct.is_training() else self.direct.forward
        with torch.inference_mode():
            logits, _, kv_cache = forward(idx, kv_cache=kv_cache)
        return logits, kv_cache

    def execute_model(self, input_ids, input_positions, kv_caches, input_metadata):
        """
        One step of the model for the new tokens of any sequences; the call is vLLM's.

        input_ids: int64 (N,), on the model's device. input_positions: an int64 array (N,). kv_caches: `KVArrays`, in
        which the keys and values of the new tokens are written. input_metadata: see `metadata.InputMetadata`, without
        next_tokens.

        Returns the logits of the wanted rows, (W, vocab_size); kv_caches.finite says whether they are numbers. Raises
        ValueError, with nothing written, on tokens, positions and runs that do not fit the model.
        """
        model, m, S = self.model, input_metadata, len(input_metadata.runs)
        check_step(model, input_ids, input_positions, m)
        if model in self.direct.called:
            check_own_forward(model, ['forward'], "leave the cache out: with its own tuples the model is called")
        counts, device = m.query_lens, input_ids.device
        T = counts[0] if counts.count(counts[0]) == S else 0  # sequences with as many new tokens each are a batch
        own, *found = step_slots(model.config, input_positions, m)
        where = batch_of(S, *found) if T else rows_of(np.repeat(np.arange(S), counts), *found)
        layers = layers_of_step(kv_caches.layers, device, own, *where)
        ids = input_ids.view(S, T) if T else input_ids[None]
        positions = torch.from_numpy(input_positions).to(device).view(ids.shape)
        last_only = T > 1 and m.wanted is None
        with torch.inference_mode():
            x, _ = self.direct.model.hidden_states(ids, positions, layers, last_only)
            x = x.flatten(0, 1)
            if m.wanted is not None or not T:
                wanted = np.cumsum(counts) - 1 if m.wanted is None else m.wanted
                x = x[torch.from_numpy(wanted).to(device)]
            logits = self.direct.model.lm_head(x)
        kv_caches.finite = math.isfinite(logits.sum(dtype=torch.float32))
        return logits


def check_step(model, input_ids, input_positions, metadata):
    """ValueError unless the model is in eval mode, and the tokens are its and as many as the metadata says."""
    if model.training:
        raise ValueError("the model is in training mode, and dropout would stay in the cache: call model.eval() first")
    N = sum(metadata.query_lens)
    if not N == len(input_ids) == len(input_positions) or min(metadata.query_lens) < 1:
        raise ValueError(f"{len(input_ids)} tokens at {len(input_positions)} positions came for sequences with "
                         f"{metadata.query_lens} new ones: give each at least one token, and each token a position")
    low, high = (int(x) for x in input_ids.aminmax())
    if low < 0 or high >= model.config.vocab_size:
        raise ValueError(f"token ids are 0 to {model.config.vocab_size - 1}, not {low} to {high}")
    if input_positions.max() >= model.config.max_positions:
        raise ValueError(f"out of context: position {input_positions.max()} of block_size {model.config.block_size}")


def batch_of(S, seq, position, slot):
    """Of `step_slots`: the slots that are read, (S, K), and the position of each; short sequences have NOWHERE."""
    n_keys = np.bincount(seq, minlength=S)
    K = int(n_keys.max())
    if (n_keys == K).all():
        return slot.reshape(S, K), position.reshape(S, K), None
    slots, positions = np.repeat(slot[n_keys.cumsum() - 1], K).reshape(S, K), np.full((S, K), NOWHERE)
    at = np.arange(len(seq)) - np.repeat(n_keys.cumsum() - n_keys, n_keys)
    slots[seq, at], positions[seq, at] = slot, position
    return slots, positions, None


def rows_of(seq_of_token, seq, position, slot):
    """
    The same for tokens that are one row of a batch over the keys of all: (1, K), and which are allowed, (1, N, K).
    """
    return slot[None], position[None], (seq_of_token[:, None] == seq)[None]


class StepLayer(NamedTuple):
    """The cache of one layer during one step, in the place of a `LayerKVCache`: see model.py's `append`."""
    layer: object        # see `metadata.KVArrays`
    own: torch.Tensor    # int64 (N,), the slots of the new tokens
    read: torch.Tensor   # int64 (B, K), the slots of the keys
    keys: Keys

    @torch.no_grad()
    def append(self, k, v, positions):
        """
        Write k and v (B, n_kv_head, T, head_dim). Returns all keys and values, (B, n_kv_head, K, head_dim), which the
        next layer may overwrite, their `Keys`, and itself.
        """
        self.layer.write(self.own, k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2))
        all_k, all_v = self.layer.read(self.read, k.dtype)
        return all_k.to(k.device), all_v.to(k.device), self.keys, self


def layers_of_step(layers, device, own, read, position, allowed=None):
    """
    A `StepLayer` for each layer, of arrays that `step_slots` and the functions above return. device: the model's; a
    layer may be on another one.
    """
    own, read = torch.from_numpy(own), torch.from_numpy(read)
    slots = {d: (own.to(d), read.to(d)) for d in {layer.device for layer in layers}}
    allowed = None if allowed is None else torch.from_numpy(allowed).to(device)
    keys = Keys(torch.from_numpy(position).to(device), allowed)
    return [StepLayer(layer, *slots[layer.device], keys) for layer in layers]
