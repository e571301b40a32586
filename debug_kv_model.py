"""
The GPT of model.py, traced: the same names, the same tokens, and with KV_DEBUG=1 a line on stderr for what the
cache does at each step. KV_DEBUG_LAYER=n keeps one layer's lines.

    KV_DEBUG=1 KV_DEBUG_LAYER=0 python sample.py --num_samples=1 --max_new_tokens=5

It inherits everything and copies nothing. While it traces it also checks what must hold, and a line with !!!
says that something does not. The environment is read when the model runs.
"""
import os
import sys

import torch

import model
from model import GPTConfig, LayerKVCache  # noqa: F401  (the same names as model.py)


def tracing(layer=None):
    """Is KV_DEBUG on, and if a layer is asked about, does KV_DEBUG_LAYER let it through?"""
    if os.environ.get('KV_DEBUG', '0') in ('', '0'):
        return False
    only = os.environ.get('KV_DEBUG_LAYER', '')
    if only and not only.isdigit():
        raise ValueError(f"KV_DEBUG_LAYER must be the number of a layer, not {only!r}")
    return layer is None or only == '' or int(only) == layer


def trace(who, text):
    print(f"[KVDBG][{who}] {text}", file=sys.stderr, flush=True)


def alarm(who, text):
    trace(who, f"!!! {text}")


def positions(start, n):
    if n > 16:
        return f"pos[0]={start} pos[-1]={start + n - 1}"
    return f"pos={list(range(start, start + n))}"


class CausalSelfAttention(model.CausalSelfAttention):
    layer = None  # its number, set by GPT

    def forward(self, x, kv_cache=None, *how):
        y, new_cache = super().forward(x, kv_cache, *how)
        if tracing(self.layer):
            self.report(x.size(1), kv_cache, new_cache)
        return y, new_cache

    def report(self, T, kv_cache, new_cache):
        who = f"Attn L{self.layer}"
        if new_cache is None:
            trace(who, f"no cache T={T}")
            return trace(who, f"mask T_q={T} T_k={T}")
        if not isinstance(new_cache, tuple):  # a cache system's layer
            mask = new_cache.placement.mask
            return trace(who, f"placed {len(new_cache.placement.rows)} rows, mask T_q={T} T_k={mask.size(-1)}")
        start, end = 0 if kv_cache is None else kv_cache[2], new_cache.cache_pos
        if kv_cache is None:
            trace(who, f"init_cache T={T} max_ctx={self.block_size}")
        else:
            trace(who, f"cache_pos={start} T={T} new_cache_pos={end} max_ctx={self.block_size}")
            trace(who, f"using cache T_k={end}")
        trace(who, f"mask T_q={T} T_k={end}")
        if end != start + T:
            alarm(who, f"cache_pos went from {start} to {end}, but {T} positions were fed")
        for name, cache in (('keys', new_cache.k_cache), ('values', new_cache.v_cache)):
            if cache[:, :, start:end].isnan().any():
                alarm(who, f"NaN in the {name} of positions {start} to {end - 1}")


class GPT(model.GPT):

    def __init__(self, config):
        super().__init__(config)
        for layer, block in enumerate(self.transformer.h):
            block.attn.__class__ = CausalSelfAttention  # same weights, same state; it only talks more
            block.attn.layer = layer

    def hidden_states(self, idx, kv_cache=None, *args, **how):
        if tracing() and isinstance(idx, torch.Tensor) and idx.dim() == 2:
            where = f"b={idx.size(0)} t={idx.size(1)}"
            if not kv_cache:
                trace('GPT', f"kv_cache=None {where} {positions(0, idx.size(1))}")
            elif hasattr(kv_cache, 'positions'):
                trace('GPT', f"kv_cache=placed {where} pos={kv_cache.positions.tolist()}")
            else:
                all_pos = [layer_cache[2] for layer_cache in kv_cache]
                trace('GPT', f"kv_cache=present {where} cache_pos={all_pos[0]} {positions(all_pos[0], idx.size(1))}")
                if len(set(all_pos)) > 1:
                    alarm('GPT', f"cache_pos differs between layers: {all_pos}")
        return super().hidden_states(idx, kv_cache, *args, **how)

    def _stream(self, context, max_new_tokens, use_cache, decoder, *rest):
        step = -1
        serve = decoder or (self.feed if use_cache else lambda idx_cond, kv_cache: (self._full_pass(idx_cond), None))

        def traced(idx_cond, kv_cache):
            nonlocal step
            step += 1
            full = use_cache and idx_cond.size(1) == self.config.block_size
            if tracing():
                trace('generate', f"step={step} use_cache={use_cache} kv_cache_present={kv_cache is not None and not full} "
                                  f"cache_full={full} idx_cond.shape={tuple(idx_cond.shape)}")
            logits, new_cache = serve(idx_cond, kv_cache)
            tuples = kv_cache is not None and isinstance(kv_cache[0], LayerKVCache)
            if tracing() and tuples and any(new[0].data_ptr() != old[0].data_ptr() for new, old in zip(new_cache, kv_cache)):
                alarm('generate', f"the cache was re-created in the middle of a generation, at step {step}")
            return logits, new_cache
        return super()._stream(context, max_new_tokens, use_cache, traced, *rest)
