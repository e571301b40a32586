"""
The GPT of model.py, traced: the same names, the same tokens, and with KV_DEBUG=1 a line on stderr for each thing that
the cache does in a step. KV_DEBUG_LAYER=n keeps one layer's lines.

    KV_DEBUG=1 KV_DEBUG_LAYER=0 python sample.py --num_samples=1 --max_new_tokens=5

With KV_DEBUG=page sample.py writes a page instead: debug_kv_page.py is told what the model does. The traced model
inherits everything and copies nothing. It also checks its own trace: a line with !!! says that something is wrong. The
environment is read when the model runs.
"""
import os
import sys

import torch

import model
from model import GPTConfig, LayerKVCache  # noqa: F401  (the same names as model.py)


def tracing(layer=None):
    """Is KV_DEBUG on, and if a layer is given, does KV_DEBUG_LAYER let its lines through?"""
    if torch.compiler.is_compiling() or os.environ.get('KV_DEBUG', '0') in ('', '0'):
        return False
    only = os.environ.get('KV_DEBUG_LAYER', '')
    if only and not only.isdigit():
        raise ValueError(f"KV_DEBUG_LAYER must be the number of a layer, not {only!r}")
    return layer is None or only == '' or int(only) == layer


def check_layer(n_layer):
    """ValueError if KV_DEBUG_LAYER is no layer of a model that has n_layer: its trace would be empty."""
    if tracing() and int(os.environ.get('KV_DEBUG_LAYER') or 0) >= n_layer:
        raise ValueError(f"KV_DEBUG_LAYER must be from 0 to {n_layer - 1}, not {os.environ['KV_DEBUG_LAYER']}: the "
                         f"model has {n_layer} layers")


def wants_page():
    """Is a page asked for, in place of lines? Only those with !!! are printed then."""
    return os.environ.get('KV_DEBUG') == 'page'


def trace(who, text):
    if not wants_page() or text.startswith('!!!'):
        print(f"[KVDBG][{who}] {text}", file=sys.stderr, flush=True)


def is_placed(layer_cache):
    """Is this a layer of a pool's slots, see `decode.eager`, and no tuple of model.py?"""
    return type(layer_cache) not in (tuple, LayerKVCache)


def described(positions):
    """Positions (T,) as text: all of a few, the first and the last of many."""
    pos = positions.tolist()
    return f"pos[0]={pos[0]} pos[-1]={pos[-1]}" if len(pos) > 16 else f"pos={pos}"


class CausalSelfAttention(model.CausalSelfAttention):
    layer = None  # its number, set by GPT
    recording = None  # a `debug_kv_page.Recording`

    def attend(self, q, k, v, *how):
        self.T_q, self.T_k = q.size(2), k.size(2)
        if self.recording:
            self.recording.attends(self.layer, q, k, v, *how)
        return super().attend(q, k, v, *how)

    def forward(self, x, positions, layer_cache=None, *how):
        y, new_cache = super().forward(x, positions, layer_cache, *how)
        if tracing(self.layer):
            self.report(x.size(1), positions, layer_cache, new_cache)
        return y, new_cache

    def report(self, T, positions, old_cache, new_cache):
        who, mask = f"Attn L{self.layer}", f"mask T_q={self.T_q} T_k={self.T_k}"  # what `attend` was handed
        if new_cache is None:
            trace(who, f"no cache T={T}")
            return trace(who, mask)
        if is_placed(new_cache):
            return trace(who, f"placed {positions.q_pos.numel()} rows, {mask}")
        start, end, max_ctx = old_cache[2], new_cache.cache_pos, new_cache.k_cache.size(2)
        ragged = isinstance(start, torch.Tensor)
        if positions.config.window and not ragged:
            trace(who, f"slots {int(positions.slots[0])} to {int(positions.slots[-1])} of a ring")
        if ragged or start > 0:
            trace(who, f"cache_pos={start} T={T} new_cache_pos={end} max_ctx={max_ctx}")
            trace(who, f"using cache T_k={self.T_k}")
        else:
            trace(who, f"init_cache T={T} max_ctx={max_ctx}")
        trace(who, mask)
        if ragged:
            return
        if end != start + T:
            trace(who, f"!!! cache_pos went from {start} to {end}, but {T} positions were fed")
        for name, cache in (('keys', new_cache.k_cache), ('values', new_cache.v_cache)):
            if cache[:, :, positions.slots].isnan().any():
                trace(who, f"!!! NaN in the {name} of positions {start} to {end - 1}")


class GPT(model.GPT):
    step_number = -1  # number of the present step of a generation
    recording = None  # a `debug_kv_page.Recording`

    def __init__(self, config):
        super().__init__(config)
        for layer, block in enumerate(self.transformer.h):
            if type(block.attn) is not model.CausalSelfAttention:
                raise ValueError("KV_DEBUG traces model.py's CausalSelfAttention, but the model has "
                                 f"{type(block.attn).__name__} in its place: leave KV_DEBUG out")
            block.attn.__class__ = CausalSelfAttention  # same weights, same state; it prints what it does
            block.attn.layer = layer

    def hidden_states(self, idx, q_pos, kv_cache=None, last_only=False):
        check_layer(self.config.n_layer)
        if tracing():
            where = f"b={idx.size(0)} t={idx.size(1)}"
            if kv_cache and is_placed(kv_cache[0]):
                trace('GPT', f"kv_cache=placed {where} pos={q_pos.tolist()}")
            elif kv_cache and not (isinstance(kv_cache[0][2], int) and kv_cache[0][2] == 0):
                pos = described(q_pos) if q_pos.dim() == 1 else f"pos={q_pos.tolist()}"
                trace('GPT', f"kv_cache=present {where} cache_pos={kv_cache[0][2]} {pos}")
            else:
                trace('GPT', f"kv_cache=None {where} {described(q_pos)}")
        if self.recording:
            self.recording.begins_pass(idx, q_pos, kv_cache)
        x, kv_cache = super().hidden_states(idx, q_pos, kv_cache, last_only)
        if self.recording:
            self.recording.ends_pass(q_pos, kv_cache)
        return x, kv_cache

    def step(self, idx, kv_cache, use_cache=True):
        self.step_number += 1
        full = use_cache and idx.size(1) == self.config.max_positions
        if tracing():
            trace('generate', f"step={self.step_number} use_cache={use_cache} kv_cache_present="
                  f"{kv_cache is not None and not full} cache_full={full} idx_cond.shape={tuple(idx.shape)}")
        logits, new_cache = super().step(idx, kv_cache, use_cache)
        if tracing() and kv_cache and new_cache and any(
                new[0].data_ptr() != old[0].data_ptr() for new, old in zip(new_cache, kv_cache)):
            trace('generate', f"!!! the cache was re-created in the middle of a generation, at step {self.step_number}")
        if self.recording:
            self.recording.ends_step(logits)
        return logits, new_cache

    def generate(self, *args, **settings):
        self.step_number = -1
        idx = super().generate(*args, **settings)
        if self.recording:  # of one generation
            self.recording.tokens += idx[0, -1:].tolist()
            self.recording.close()
        return idx
