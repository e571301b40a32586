"""
A decode step compiled by torch.compile, for CUDA and whatever else it serves.

A compiler wants shapes that never change, so here cache_pos is a tensor, keys and values are written to the slot it
names, and attention goes over all block_size slots with a mask: nothing in the graph knows how long the sequence is.
(After gpt-fast's decode_one_token, https://github.com/pytorch-labs/gpt-fast. The price is reading the slots that are
still empty; they are masked, but they must hold numbers, as zero-filled caches do.)
"""
import os
import threading

import torch
import torch.nn.functional as F

from decode.structure import check_structure

step_lock = threading.Lock()  # `known` is of one step at a time


def after_fork():
    global step_lock
    step_lock = threading.Lock()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=after_fork)


def step(model, idx, cache_pos, *caches):
    """idx (B, 1), cache_pos (B,), k_cache and v_cache of each layer -> logits (B, 1, vocab_size); the caches are written."""
    t, B, n_head = model.transformer, idx.size(0), model.config.n_head
    rows = torch.arange(B, device=idx.device)
    visible = torch.arange(caches[0].size(2), device=idx.device) <= cache_pos[:, None, None, None]  # (B, 1, 1, block_size)
    x = t.wte(idx) + t.wpe(cache_pos)[:, None]
    for block, k_cache, v_cache in zip(t.h, caches[::2], caches[1::2]):
        qkv = block.attn.c_attn(block.ln_1(x)).view(B, 3, n_head, -1)  # (B, 3, nh, hs)
        k_cache[rows, :, cache_pos] = qkv[:, 1].to(k_cache.dtype)
        v_cache[rows, :, cache_pos] = qkv[:, 2].to(v_cache.dtype)
        q = qkv[:, 0, :, None].to(k_cache.dtype)  # (B, nh, 1, hs)
        y = F.scaled_dot_product_attention(q, k_cache, v_cache, attn_mask=visible)
        x = x + block.attn.c_proj(y.view(B, 1, -1))
        x = x + block.mlp.c_proj(F.gelu(block.mlp.c_fc(block.ln_2(x))))
    return model.lm_head(t.ln_f(x))


class CompiledDecoder:
    """
    A decoder, (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache): T = 1 compiled, more by the model
    itself.

    Compiles at its first step, once for each batch size and dtype, and on CUDA records a graph of it. Weights are read
    where they are, at each step, so they can change. Raises ValueError where torch.compile does not work, and for models
    with other blocks than model.py's or with hooks, when it is made and when a cache is new to it.
    """

    def __init__(self, model):
        check_structure(model)
        self.model, self.known = model, []
        device = next(model.parameters()).device.type
        self.name = f"torch.compile on {device}, static shapes"
        self.step = torch.compile(step, fullgraph=True, dynamic=False, mode='reduce-overhead' if device == 'cuda' else None)

    def __call__(self, idx, kv_cache):
        if kv_cache is None or idx.dim() != 2 or idx.size(1) != 1:
            logits, _, kv_cache = self.model(idx, kv_cache=kv_cache, use_cache=True)
            return logits, kv_cache
        with step_lock:
            return self.one_token(idx, kv_cache)

    def one_token(self, idx, kv_cache):
        cache_pos = kv_cache[0][2]
        caches = [cache for layer in kv_cache for cache in layer[:2]]
        new = len(caches) != len(self.known) or any(a is not b for a, b in zip(caches, self.known))
        if new or type(cache_pos) is not int or idx.dtype is not torch.int64:
            idx, cache_pos = self.model.check_input(idx, kv_cache)
        if new:
            check_structure(self.model)
            self.known = caches
            for cache in caches:  # a recorded graph may write into them instead of copying them
                torch._dynamo.mark_static_address(cache, guard=False)
        if torch.is_tensor(cache_pos):
            pos = cache_pos
        elif 0 <= cache_pos < caches[0].size(2):
            pos = torch.full((idx.size(0),), cache_pos, dtype=torch.int64, device=idx.device)
        else:
            raise ValueError(f"out of context: cache_pos {cache_pos} + 1 new token > block_size {caches[0].size(2)}")
        try:
            with torch.inference_mode():
                logits = self.step(self.model, idx.contiguous(), pos, *caches)
        except torch._dynamo.exc.TorchDynamoException as e:
            raise ValueError(f"torch.compile does not work here ({str(e).strip().splitlines()[0]}): use the eager decoder") from e
        after, kind = cache_pos + 1, type(kv_cache[0])
        return logits.clone(), [tuple.__new__(kind, (*layer[:2], after)) for layer in kv_cache]
