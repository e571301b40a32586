"""
The executor in PyTorch: a step that calls torch's functions directly, on the weights of the model where they are.

A decoded token of a small model goes through some sixty modules, and most of the time goes into Python: calling an
nn.Module takes 1.5 us, looking up its weight 0.8 us. Here the weights are looked up once for each sequence.
"""
import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from decode.changes import Watch, check_own_forward, check_parts
from decode.metadata import step_slots
from positions import Keys, Positions, visible

NOWHERE = 2**62  # a key position after all others


class EagerDecoder:
    """
    A decoder, (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache), that computes what the model computes;
    and by `execute_model` the same step on any cache.

    It works wherever the model works: on any device, in any dtype, under autocast, for any T. Values of weights are
    read at each step, so they can change; other changes of the model are seen at the start of a sequence, and after
    `refresh`. A model that is not model.py's GPT of plain modules, that has hooks, or that applies dropout in training
    mode, is called itself instead; `execute_model` calls its `hidden_states`, and refuses a GPT with a `forward` of its
    own. Raises ValueError on tokens and caches that do not fit the model, with nothing written.

    version: grows when the model has changed since the last sequence began.
    """
    name = 'PyTorch, eager'

    def __init__(self, model):
        self.model, self.version, self.weights = model, 0, ModelWeights(model)
        self.watch = Watch(model)

    def refresh(self):
        """Look up the weights anew."""
        self.version += 1
        self.watch, self.weights = Watch(self.model), ModelWeights(self.model)

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
        weights = self.weights
        if weights.blocks is None or weights.dropping():
            with torch.no_grad():
                logits, _, kv_cache = self.model(idx, kv_cache=kv_cache, use_cache=True)
                return logits, kv_cache
        idx, cache_pos = self.model.checked_input(idx, kv_cache)
        if kv_cache is None:  # not in inference mode: code outside of that mode may write this cache too
            kv_cache = self.model.empty_cache(len(idx))
        with torch.inference_mode():
            return step(weights, self.model.config, idx, cache_pos, kv_cache)

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
        if self.weights.blocks is None:
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
            if self.weights.blocks is None:
                x, _ = model.hidden_states(ids, positions, layers, last_only)
            else:
                x, _ = hidden_states(self.weights, model.config, ids, positions, layers, last_only)
                x = F.layer_norm(x, *self.weights.ln_f)
            x = x.flatten(0, 1)
            if m.wanted is not None or not T:
                wanted = np.cumsum(counts) - 1 if m.wanted is None else m.wanted
                x = x[torch.from_numpy(wanted).to(device)]
            logits = model.lm_head(x)
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


class BlockWeights(NamedTuple):
    """What a step needs of one block."""
    ln_1: tuple  # what F.layer_norm takes after x: normalized_shape, weight, bias, eps
    c_attn: tuple  # weight and bias or None
    heads: tuple  # how many of queries, of keys and of values
    attn_c_proj: tuple
    ln_2: tuple
    c_fc: tuple
    mlp_c_proj: tuple


class ModelWeights:
    """
    The parameters of a model as a step needs them, at the moment when this was made. `blocks` is None where `step`
    may compute something else than the model.
    """

    def __init__(self, model):
        self.blocks = None
        # the modules with a dropout rate: nn.Dropout calls it p, attention calls it dropout
        self.dropouts = [(variables, rate) for variables in map(vars, model.modules()) for rate in ('p', 'dropout')
                         if rate in variables]
        if is_plain(model):
            t = model.transformer
            self.layer_cache, self.gelu, self.wte = type(model.empty_cache(0)[0]), model.config.gelu, t.wte.weight
            self.wpe = t.wpe.weight if model.config.position == 'learned' else None
            self.ln_f, self.lm_head = norm(t.ln_f), linear(model.lm_head)
            self.blocks = [
                BlockWeights(norm(b.ln_1), linear(b.attn.c_attn), (b.attn.n_head, b.attn.n_kv_head, b.attn.n_kv_head),
                             linear(b.attn.c_proj), norm(b.ln_2), linear(b.mlp.c_fc), linear(b.mlp.c_proj))
                for b in t.h]

    def dropping(self):
        """Does the model apply dropout now?"""
        return any(variables['training'] and variables[rate] for variables, rate in self.dropouts)


def is_plain(model):
    """Do the weights of a model alone say what it does? Classes of two files may do more: debug_kv_model.py prints."""
    try:
        check_parts(model)
    except (AttributeError, ValueError):
        return False
    return type(model.transformer.h[0].attn).__module__ == type(model.transformer.h[0]).__module__


def norm(module):
    return module.normalized_shape, module.weight, module.bias, module.eps


def linear(module):
    return module.weight, module.bias


def step(weights, config, idx, cache_pos, kv_cache):
    """The model's forward in eval mode for the tokens idx (B, T) at cache_pos, checked: (logits, kv_cache)."""
    chunk = config.window + 1 if config.window else idx.size(1)  # a ring of slots takes no more tokens at once
    q_pos = torch.arange(idx.size(1), device=idx.device)
    q_pos = q_pos + (cache_pos[:, None] if torch.is_tensor(cache_pos) else cache_pos)
    for start in range(0, idx.size(1), chunk):
        part = slice(start, start + chunk)
        x, kv_cache = hidden_states(weights, config, idx[:, part], q_pos[..., part], kv_cache)
    return F.linear(F.layer_norm(x, *weights.ln_f), *weights.lm_head), kv_cache


def hidden_states(weights, config, idx, q_pos, kv_cache, last_only=True):
    """
    What the last block gives for tokens idx (B, T) at positions q_pos, (T,) or (B, T): (x (B, T, C), kv_cache); with
    last_only x is (B, 1, C), of the last of the tokens.
    """
    (B, T), x, new_cache = idx.shape, F.embedding(idx, weights.wte), []  # x: (B, T, C)
    if weights.wpe is not None:
        x = x + F.embedding(q_pos, weights.wpe)
    positions, rotary, head_dim = Positions(config, q_pos, x.dtype), config.position == 'rope', config.head_dim
    for w, layer in zip(weights.blocks, kv_cache):
        qkv = F.linear(F.layer_norm(x, *w.ln_1), *w.c_attn)
        heads = qkv.view(B, T, sum(w.heads), head_dim).transpose(1, 2)
        q, k, v = heads.split_with_sizes(w.heads, 1)  # (B, heads, T, head_dim) each
        if rotary:
            q_unrotated, q, k = q, positions.rotated(q), positions.rotated(k)
        layer = weights.layer_cache(*layer) if type(layer) is tuple else layer
        k, v, keys, layer = layer.append(k, v, positions)
        new_cache.append(layer)
        mask = positions.mask(keys, k.size(2))
        if rotary and config.n_sink:
            mask = positions.mask_with_sinks(mask, q_unrotated, k, keys)
        if last_only and T > 1 and w is weights.blocks[-1]:
            x, q, mask = x[:, -1:], q[:, :, -1:], None if mask is None else mask[..., -1:, :]
        x = x + F.linear(attend(q, k, v, mask).transpose(1, 2).flatten(2), *w.attn_c_proj)
        x = x + F.linear(gelu(F.linear(F.layer_norm(x, *w.ln_2), *w.c_fc), weights.gelu), *w.mlp_c_proj)
    return x, new_cache


def attend(q, k, v, mask):
    """Attention of the newest T_q of T_k positions; a mask replaces the causal rule. As `attend` of model.py."""
    T_q, T_k = q.size(2), k.size(2)
    if mask is None and 1 < T_q < T_k:
        k_pos = torch.arange(T_k, device=q.device)
        mask = visible(k_pos[T_k - T_q:, None], k_pos)
    if q.is_cuda and q.dtype is torch.float32 and T_q == 1 and mask is not None:
        # torch's kernel for float32 with a mask gives a head to one multiprocessor: 120 us for 1,024 keys
        return attend_one(q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and T_q > 1,
                                          enable_gqa=q.size(1) != k.size(1))


def attend_one(q, k, v, mask):
    """`attend` for one query (B, n_head, 1, head_dim), as two products for each head of keys. It needs a mask."""
    (B, n_head, _, head_dim), n_kv_head = q.shape, k.size(1)
    queries = (q * head_dim ** -0.5).reshape(B, n_kv_head, n_head // n_kv_head, head_dim)
    scores = (queries @ k.transpose(2, 3)).view(B, n_head, 1, -1)
    scores = scores.masked_fill(~mask, -float('inf')) if mask.dtype is torch.bool else scores + mask
    weights = scores.softmax(dim=-1).view(B, n_kv_head, n_head // n_kv_head, -1)
    return (weights @ v).view(B, n_head, 1, head_dim)


def gelu(x, approximate):
    """GELU (arXiv:1606.08415) of a contiguous x (..., 4 * n_embd); approximate: 'none' or 'tanh'."""
    # On a CPU torch passes a contiguous tensor to oneDNN, whose set-up takes 20 us: a tenth of the time of a decoded
    # token. A transposed view goes to torch's own kernel, which is faster while x is small.
    if 0 < x.numel() <= 8192 and x.device.type == 'cpu':
        return F.gelu(x.view(2, -1).t(), approximate=approximate).t().view_as(x)
    return F.gelu(x, approximate=approximate)
