"""
A decode step in PyTorch that calls torch's functions directly, on the weights of the model where they are.

A decoded token of a small model goes through some sixty modules, and most of the time goes into Python: calling an
nn.Module takes 1.5 us, looking up its weight 0.8 us. Here the weights are looked up once, and each step only compares
whether the model still consists of the same objects.
"""
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from decode.structure import ModelObjects, check_structure
from positions import Positions, visible

PLAIN = nn.Linear, nn.LayerNorm, nn.Embedding, nn.GELU, nn.Dropout, nn.ModuleDict, nn.ModuleList


class EagerDecoder:
    """
    A decoder, (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache), that computes what the model computes.

    It works wherever the model works: on any device, in any dtype, under autocast, for any T. Weights are read at each
    step, so they can change. A model that is not model.py's GPT of plain modules, that has hooks, or that applies
    dropout in training mode, is called itself instead. Raises ValueError on tokens and caches that do not fit the
    model, with nothing written.
    """
    name = 'PyTorch, eager'

    def __init__(self, model):
        self.model, self.weights = model, ModelWeights(model)

    def __call__(self, idx, kv_cache):
        weights = self.weights
        if kv_cache is None or not weights.objects.unchanged():
            weights = self.weights = ModelWeights(self.model)
        if weights.blocks is None or weights.dropping():
            with torch.no_grad():
                logits, _, kv_cache = self.model(idx, kv_cache=kv_cache, use_cache=True)
                return logits, kv_cache
        idx, cache_pos = self.model.checked_input(idx, kv_cache)
        if kv_cache is None:  # not in inference mode: code outside of that mode may write this cache too
            kv_cache = self.model.empty_cache(len(idx))
        with torch.inference_mode():
            return step(weights, self.model.config, idx, cache_pos, kv_cache)


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
        self.objects, self.blocks = ModelObjects(model, parameters=True), None
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
    """Does the model consist of plain torch modules and of the GPT, blocks, attention and MLPs of one file?"""
    try:
        check_structure(model)
    except (AttributeError, ValueError):
        return False
    modules = list(model.modules())
    own = {type(m) for m in modules if type(m) not in PLAIN}
    return ({kind.__name__ for kind in own} == {'GPT', 'Block', 'CausalSelfAttention', 'MLP'} and len(own) == 4
            and len({kind.__module__ for kind in own}) == 1
            and all(m.approximate == model.config.gelu for m in modules if type(m) is nn.GELU)
            and all(m.max_norm is None for m in modules if type(m) is nn.Embedding)
            and not any(m._compiled_call_impl for m in modules))


def norm(module):
    return module.normalized_shape, module.weight, module.bias, module.eps


def linear(module):
    return module.weight, module.bias


def step(weights, config, idx, cache_pos, kv_cache):
    """The model's forward in eval mode for the tokens idx (B, T) at cache_pos, checked: (logits, kv_cache)."""
    chunk = config.window + 1 if config.window else idx.size(1)  # a `RollingKVCache` takes no more tokens at once
    while idx.size(1) > chunk:
        _, kv_cache = hidden_states(weights, config, idx[:, :chunk], cache_pos, kv_cache)
        idx, cache_pos = idx[:, chunk:], cache_pos + chunk
    x, kv_cache = hidden_states(weights, config, idx, cache_pos, kv_cache)
    return F.linear(F.layer_norm(x, *weights.ln_f), *weights.lm_head), kv_cache


def hidden_states(weights, config, idx, cache_pos, kv_cache):
    """What the last block gives for the last of the tokens idx (B, T) at cache_pos: (x (B, 1, C), kv_cache)."""
    (B, T), x, new_cache = idx.shape, F.embedding(idx, weights.wte), []  # x: (B, T, C)
    q_pos = torch.arange(T, device=idx.device) + (cache_pos[:, None] if torch.is_tensor(cache_pos) else cache_pos)
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
        if T > 1 and w is weights.blocks[-1]:  # only the last position is asked for
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
