"""
The executor in PyTorch: the model's own code, called directly (see direct.py), on the weights where they are. Its draws
are those of draw.py, the definition.
"""
import math
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch

from decode.batch import NotNumbers, Refused, step_slots
from decode.changes import UNCACHED, check_forward, check_own_forward
from decode.direct import direct_model
from decode.draw import draw
from positions import KeyPositions

NOWHERE = 2**62  # a key position after all others


class EagerExecutor:
    """
    A model's steps wherever the model works: on any device, in any dtype, under autocast.

    Modules that are not of model.py or torch, or that have hooks, are called as they are. Values of weights are read at
    each step; after other changes of the model call `refresh`. layers: the `kvcache.storage.Layer`s of the slots, which
    `hold` gives it. type_kv: of the keys and values that it computes. ValueError for a GPT with a `forward` of its own.
    """
    name = 'PyTorch, eager'
    torch_on_one_thread = nullcontext

    def __init__(self, model):
        self.model, self.layers = model, ()
        self.refresh()
        check_forward(model)
        empty = model.empty_cache(0)[0]
        self.tuple_of, self.type_kv = type(empty), str(empty.k_cache.dtype).removeprefix('torch.')

    def refresh(self):
        """Look up the model's modules and weights anew."""
        self.direct = direct_model(self.model)
        check_own_forward(self.model, ['forward'], UNCACHED)

    def hold(self, layers):
        """Let the steps read and write these `kvcache.storage.Layer`s."""
        self.layers = layers

    def execute_model(self, batch):
        """See `decode.cpu.CPUExecutor.execute_model`. Each call is one step."""
        batch.make_copies(self.layers)
        check_step(self.model, batch)
        rows, parts = batch.rows()
        with torch.inference_mode():
            logits = self.logits_of(batch, rows)
            if not are_numbers(logits):
                raise NotNumbers
            return batch.result(logits, parts, drawn)

    def logits_of(self, batch, rows):
        """The logits of these rows, (W, vocab_size)."""
        model, counts, S = self.direct, batch.counts, len(batch.sequences)
        device = self.model.lm_head.weight.device
        T = counts[0] if counts.count(counts[0]) == S else 0  # T new tokens each: a batch (S, T); 0: one packed row
        layers = self.tuples_of(batch, T)
        if layers is None:
            own, *found = step_slots(self.model.config, batch)
            where = padded_keys(S, *found) if T else packed_keys(counts, *found)
            layers = layers_of_step(self.layers, device, own, *where)
        shape = (S, T) if T else (1, len(batch.tokens))
        ids, positions = (torch.from_numpy(each).to(device).view(shape) for each in (batch.tokens, batch.positions))
        last_only = T > 1 and len(rows) == S and (rows == np.cumsum(counts) - 1).all()
        x, _ = model.hidden_states(ids, positions, layers, last_only)
        x = x.flatten(0, 1)
        if len(rows) < len(x):
            x = x[torch.from_numpy(rows).to(device)]
        return model.lm_head(x)

    def tuples_of(self, batch, T):
        """Tuples of model.py over the slots, if the sequences lie side by side and bring T new tokens each, or None."""
        weight, kind = self.model.lm_head.weight, self.model.lm_head.weight.device.type
        is_autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        computed = torch.get_autocast_dtype(kind) if is_autocast else weight.dtype
        if not T or self.model.config.window or self.layers[0].k.data.dtype is not computed:
            return None
        begin, where = batch.positions[::T], side_by_side(batch)
        if where is None or where[3] < begin.max() + T:
            return None
        cache_pos = int(begin[0]) if (begin == begin[0]).all() else torch.from_numpy(begin).to(weight.device)
        return [self.tuple_of(*layer.views(*where), cache_pos) for layer in self.layers]


def drawn(sequences, logits):
    """The next token of each sequence, a list, from a row of logits of each."""
    for s in sequences:
        if s.settings.penalised:
            s.settings.count(s.tokens[len(s.tokens) - s.n_drawn:])
    return draw(logits, [s.settings for s in sequences], [s.n_drawn for s in sequences]).tolist()


def are_numbers(logits):
    """Are there neither NaN nor +inf in logits (B, vocab_size)? -inf is allowed: such a token is never drawn."""
    return math.isfinite(logits.sum(dtype=torch.float32)) or not logits.softmax(dim=-1).isnan().any()


def check_step(model, batch):
    """`Refused` unless the model is in eval mode, and the tokens are its and fit its context."""
    if model.training:
        raise Refused("the model is in training mode, and dropout would stay in the cache: call model.eval() first")
    ids, c = batch.tokens.tolist(), model.config  # for a few tokens, a list is faster than an array
    low, high = min(ids), max(ids)
    if low < 0 or high >= c.vocab_size:
        raise Refused(f"token ids are 0 to {c.vocab_size - 1}, not {low} to {high}")
    if batch.positions.max() >= c.max_positions:
        raise Refused(f"out of context: position {batch.positions.max()} of block_size {c.block_size}")


def padded_keys(S, seq, position, slot):
    """
    The keys that `step_slots` lists, a row for each sequence: (slots (S, K), positions (S, K), None). Short sequences
    are padded: they repeat a slot, at position NOWHERE.
    """
    n_keys = np.bincount(seq, minlength=S)
    K = int(n_keys.max())
    if (n_keys == K).all():
        return slot.reshape(S, K), position.reshape(S, K), None
    slots, positions = np.repeat(slot[n_keys.cumsum() - 1], K).reshape(S, K), np.full((S, K), NOWHERE)
    at = np.arange(len(seq)) - np.repeat(n_keys.cumsum() - n_keys, n_keys)
    slots[seq, at], positions[seq, at] = slot, position
    return slots, positions, None


def packed_keys(counts, seq, position, slot):
    """
    The same keys in one row for all N tokens: (slots (1, K), positions (1, K), bool (1, N, K): is the key one of the
    token's own sequence?)
    """
    seq_of_token = np.repeat(np.arange(len(counts)), counts)
    return slot[None], position[None], (seq_of_token[:, None] == seq)[None]


def side_by_side(batch):
    """
    (first, stride, S, K) if each sequence i of a batch, of S, has position p in slot first + i * stride + p, for all p
    < K; otherwise None.
    """
    runs = [s.runs for s in batch.sequences]
    if any([r.n != 1 or r.table[0, 0] for r in runs]):
        return None
    first, K = [int(r.table[0, 1]) for r in runs], int(min([r.table[0, 2] for r in runs]))
    stride = first[1] - first[0] if len(first) > 1 else 0
    if stride < 0 or any([b - a != stride for a, b in zip(first, first[1:])]):
        return None
    return first[0], stride, len(first), K


class StepLayer(NamedTuple):
    """The cache of one layer during one step, in the place of a `LayerKVCache`: see model.py's `append`."""
    layer: object        # a `kvcache.storage.Layer`
    own: torch.Tensor    # int64 (N,), the slots of the new tokens
    read: torch.Tensor   # int64 (B, K), the slots of the keys
    key_positions: KeyPositions

    @torch.no_grad()
    def append(self, k, v, positions):
        """
        Write k and v (B, n_kv_head, T, head_dim). Returns all keys and values, (B, n_kv_head, K, head_dim), which the
        next layer may overwrite, their `KeyPositions`, and itself.
        """
        self.layer.write(self.own, k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2))
        all_k, all_v = self.layer.read(self.read, k.dtype)
        return all_k.to(k.device), all_v.to(k.device), self.key_positions, self


def layers_of_step(layers, device, own, read, position, allowed=None):
    """
    A `StepLayer` for each layer, of what `step_slots` and the functions above return. device: the model's; a layer may
    be on another one.
    """
    own, read = torch.from_numpy(own), torch.from_numpy(read)
    slots = {d: (own.to(d), read.to(d)) for d in {layer.device for layer in layers}}
    allowed = None if allowed is None else torch.from_numpy(allowed).to(device)
    key_positions = KeyPositions(torch.from_numpy(position).to(device), allowed)
    return [StepLayer(layer, *slots[layer.device], key_positions) for layer in layers]
