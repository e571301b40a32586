"""
A GPT and its KV cache in one file. (Masks, and the angles of rotary positions, are in positions.py.)

From top to bottom: the configuration, the cache of one layer, attention over it, the block, the GPT, and a plain
`generate`. Shapes are in docstrings and comments: B sequences, T new tokens, C = n_embd channels.

Configuration fields, state-dict keys, initialisation and sampling are those of nanoGPT (MIT licence,
https://github.com/karpathy/nanoGPT): its checkpoints load here, and the same seed draws the same tokens.
"""
import copy
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from inputs import as_int64, check_append, check_config, check_sampling, checked_input, checked_prompt
from positions import Positions, visible


@dataclass
class GPTConfig:
    """The shape of a GPT. Raises ValueError on a shape that cannot be built."""
    block_size: int = 1024   # positions of the context; without `window` also the number of slots in the cache
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 64 because matmuls like that
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True        # in every linear and layer norm, as GPT-2; False is a bit faster and better
    position: str = 'learned'  # or rope, alibi, none: see positions.py
    rope_theta: float = 10000.0  # the base of rotary positions
    n_kv_head: int = 0       # heads of keys and values, each for n_head / n_kv_head queries; 0: as many as n_head
    window: int = 0          # keys that a token sees, its own included; 0: all. window + n_sink < block_size
    n_sink: int = 0          # the first positions, which every token sees in addition to its window
    gelu: str = 'none'       # or tanh: GELU's approximation, with which GPT-2 was trained
    norm: str = 'layer'      # or rms, which neither subtracts a mean nor adds a bias (arXiv:1910.07467)
    norm_eps: float = 1e-5   # added to the variance
    mlp: str = 'gelu'        # or swiglu: silu(gate) * up (arXiv:2002.05202)
    n_inner: int = 0         # channels inside of the MLP; 0: 4 * n_embd
    head_dim: int = 0        # channels of a head; 0: n_embd / n_head
    tied: bool = True        # is lm_head the token embedding?
    qkv_bias: bool = False   # biases of queries, keys and values, where bias is False
    qk_norm: bool = False    # an RMS norm of each head's queries and keys, before they are turned to their positions
    rope_scaling: tuple = ()  # of Llama 3: (factor, low_freq_factor, high_freq_factor, original block_size)

    def __post_init__(self):
        check_config(self)
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        self.n_inner = self.n_inner or 4 * self.n_embd

    @property
    def n_slots(self):
        """Slots of a cache for each sequence."""
        return self.n_sink + 2 * self.window if self.window else self.block_size

    @property
    def max_positions(self):
        """The largest number of positions: block_size, or infinite with a window and without learned positions."""
        return math.inf if self.window and self.position != 'learned' else self.block_size


class LayerKVCache(NamedTuple):
    """
    The cache of one layer. It is a tuple, so kv_cache[0][2] and kv_cache[0].cache_pos are the same.

    k_cache, v_cache: (B, n_kv_head, n_slots, head_dim), allocated once and written in place. n_slots is block_size, and
        position p is in slot p. With a window it is n_sink + 2 * window: the positions after the sinks take turns in
        a ring of 2 * window slots, so the memory does not grow with the text (see `positions.ring_slots`).
    cache_pos: the number of positions that were appended: an int, or an integer tensor (B,) when the sequences differ
        in length. Slots of later positions are not read, except with weight 0 where it is a tensor.

    The tuple that `append` returns shares its storage with the one before. So rewinding is free: go on from an old
    tuple, and what came after it is overwritten (in a ring, up to window + 1 positions can be undone like this). Two
    branches that are alive at the same time need a `clone`.
    """
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cache_pos: int | torch.Tensor

    @classmethod
    def empty_like(cls, k, n_slots):
        """A zero-filled cache for keys such as k (B, n_kv_head, T, head_dim), in their dtype, on their device."""
        shape = (*k.shape[:2], n_slots, k.size(3))
        return cls(k.new_zeros(shape), k.new_zeros(shape), 0)

    def append(self, k, v, positions):
        """
        Write the keys and values of T new tokens, k and v (B, n_kv_head, T, head_dim), at cache_pos and after.

        positions: the `Positions` of these tokens, (B, T) when cache_pos is a tensor.
        Returns (k, v, key_positions, cache): the keys and values in all slots so far, views of (B, n_kv_head, n,
        head_dim) with n = min(cache_pos + T, n_slots) of the longest sequence; the `KeyPositions` of these keys, or
        None if they are at positions 0, 1, ...; and the tuple with cache_pos + T. Raises ValueError, with nothing
        written, when they do not fit: more than window + 1 at once, or, if the model has no window, more than n_slots
        in all. Any object with this method can be the cache of a layer for `GPT.hidden_states`.
        """
        k_cache, v_cache, start = self
        B, n_slots, T, window = k_cache.size(0), k_cache.size(2), k.size(2), positions.config.window
        ragged = isinstance(start, torch.Tensor)
        end, longest = positions.ends if ragged else (start + T, start + T)
        check_append(self, k, longest, window)
        key_positions, n = None, min(longest, n_slots)
        if ragged or longest > n_slots:
            rows, slots = torch.arange(B, device=k.device)[:, None], positions.slots.expand(B, T)
            k_cache[rows, :, slots], v_cache[rows, :, slots] = k.transpose(1, 2), v.transpose(1, 2)
            key_positions = positions.of_slots(n)
        else:
            k_cache.narrow(2, start, T).copy_(k)
            v_cache.narrow(2, start, T).copy_(v)
        return k_cache.narrow(2, 0, n), v_cache.narrow(2, 0, n), key_positions, LayerKVCache(k_cache, v_cache, end)

    def clone(self):
        """A copy with storage of its own, to branch from."""
        return LayerKVCache(self.k_cache.clone(), self.v_cache.clone(), self.cache_pos)


def attend(q, k, v, mask=None, dropout_p=0.0):
    """
    Scaled dot-product attention. Without a mask it is causal: the queries are the last T_q of the T_k positions.

    q: (B, n_head, T_q, head_dim); k, v: (B, n_kv_head, T_k, head_dim), T_k >= T_q. Query head i reads head
        i // (n_head / n_kv_head) of the keys.
    mask: bool, True where a query sees a key, or a float that is added to the scores; broadcastable to
        (B, n_head, T_q, T_k). It replaces the causal rule.
    Returns (B, n_head, T_q, head_dim).
    """
    T_q, T_k = q.size(2), k.size(2)
    if mask is None and 1 < T_q < T_k:
        # a chunk on a warm cache: is_causal=True would align the triangle top-left, as if the chunk stood at position 0
        k_pos = torch.arange(T_k, device=q.device)
        mask = visible(k_pos[T_k - T_q:, None], k_pos)
    # one query is the newest position and sees every key: it needs no mask
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal=mask is None and T_q > 1,
                                          enable_gqa=q.size(1) != k.size(1))


class CausalSelfAttention(nn.Module):
    attend = staticmethod(attend)

    def __init__(self, config):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.dropout = config.dropout
        n_rows = (config.n_head + 2 * config.n_kv_head) * config.head_dim  # q, k and v in one matmul, in this order
        self.c_attn = nn.Linear(config.n_embd, n_rows, bias=config.bias or config.qkv_bias)
        self.c_proj = nn.Linear(config.n_head * config.head_dim, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        if config.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(config.head_dim, config.norm_eps) for _ in 'qk')

    def forward(self, x, positions, layer_cache=None, last_only=False):
        """
        x: (B, T, C), the newest tokens; positions: their `Positions`; layer_cache: of the tokens before, or None.
        Returns (y, layer_cache with the new tokens); y is (B, T, C), or with last_only the last token's, (B, 1, C).
        """
        B, T, _ = x.size()
        heads = self.c_attn(x).view(B, T, self.n_head + 2 * self.n_kv_head, self.head_dim).transpose(1, 2)
        q, k, v = heads.split_with_sizes([self.n_head, self.n_kv_head, self.n_kv_head], 1)  # (B, heads, T, head_dim)
        config, key_positions = positions.config, None  # of the pass: `with_window` shares modules between configs
        if config.qk_norm:
            q, k = self.q_norm(q).type_as(v), self.k_norm(k).type_as(v)  # CUDA's autocast makes them float32
        if config.position == 'rope':
            q_unrotated, q, k = q, positions.rotated(q), positions.rotated(k)
        if layer_cache is not None:
            k, v, key_positions, layer_cache = layer_cache.append(k, v, positions)  # k, v: (B, n_kv_head, n, head_dim)
        mask = positions.mask(key_positions, k.size(2))
        if config.position == 'rope' and config.n_sink:
            mask = positions.mask_with_sinks(mask, q_unrotated, k, key_positions)
        if last_only:
            q, mask = q[:, :, -1:], None if mask is None else mask[..., -1:, :]
        y = self.attend(q, k, v, mask, self.dropout if self.training else 0.0)
        y = y.transpose(1, 2).flatten(2)  # the heads side by side again
        return self.resid_dropout(self.c_proj(y)), layer_cache


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.n_inner, bias=config.bias)
        self.gelu = nn.GELU(config.gelu) if config.mlp == 'gelu' else None  # arXiv:1606.08415
        if config.mlp == 'swiglu':
            self.c_gate = nn.Linear(config.n_embd, config.n_inner, bias=config.bias)
        self.c_proj = nn.Linear(config.n_inner, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        hidden = self.c_fc(x)
        hidden = F.silu(self.c_gate(x)) * hidden if self.gelu is None else self.gelu(hidden)
        return self.dropout(self.c_proj(hidden))


def norm_of(config):
    """The norm of a model's residual stream."""
    if config.norm == 'rms':
        return nn.RMSNorm(config.n_embd, config.norm_eps)
    return nn.LayerNorm(config.n_embd, config.norm_eps, bias=config.bias)


class Block(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.ln_1 = norm_of(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = norm_of(config)
        self.mlp = MLP(config)

    def forward(self, x, positions, layer_cache=None, last_only=False):
        y, layer_cache = self.attn(self.ln_1(x), positions, layer_cache, last_only)
        x = (x[:, -1:] if last_only else x) + y
        x = x + self.mlp(self.ln_2(x))
        return x, layer_cache


class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        t = self.transformer = nn.ModuleDict(dict(wte=nn.Embedding(config.vocab_size, config.n_embd)))
        if config.position == 'learned':
            t.wpe = nn.Embedding(config.block_size, config.n_embd)
        t.drop = nn.Dropout(config.dropout)
        t.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        t.ln_f = norm_of(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            t.wte.weight = self.lm_head.weight  # one matrix reads tokens and writes them (arXiv:1608.05859)

        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith('c_proj.weight'):  # GPT-2: 2 * n_layer of these add up in the residual stream
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if getattr(module, 'bias', None) is not None:
                nn.init.zeros_(module.bias)

    def get_num_params(self, non_embedding=True):
        """Parameters, by default without the position embeddings (token embeddings stay: lm_head uses them)."""
        n_params = sum(p.numel() for p in self.parameters())
        return n_params - sum(p.numel() for name, p in self.named_parameters() if 'wpe' in name and non_embedding)

    def empty_cache(self, batch_size):
        """A cache for batch_size sequences with nothing in it: n_layer tuples, in the dtype that the keys will have."""
        c, w = self.config, next(self.transformer.h[0].attn.parameters())
        dtype, kind = w.dtype, w.device.type
        if dtype != torch.float64 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        k = w.new_empty(batch_size, c.n_kv_head, 0, c.head_dim, dtype=dtype)
        return [LayerKVCache.empty_like(k, c.n_slots) for _ in range(c.n_layer)]

    def hidden_states(self, idx, q_pos, kv_cache=None, last_only=False):
        """
        Compute the input of lm_head for tokens idx (B, T) at q_pos, positions (T,) or (B, T), both int64, unchecked.

        kv_cache: the caches of the layers, each an object with `append` (see `LayerKVCache`), or None.
        Returns (x, kv_cache): x (B, T, C), or with last_only the last position's alone, (B, 1, C).
        """
        t = self.transformer
        x = t.wte(idx)
        x = t.drop(x + t.wpe(q_pos) if self.config.position == 'learned' else x)
        positions = Positions(self.config, q_pos, x.dtype)
        old, new = kv_cache or [None] * len(t.h), []
        for block, layer_cache in zip(t.h, old, strict=True):
            # no other block reads what the last one computes, so it computes only the position that is asked for
            skip = last_only and idx.size(1) > 1 and block is t.h[-1]
            x, layer_cache = block(x, positions, layer_cache, skip)
            new.append(layer_cache)
        return t.ln_f(x), new if kv_cache else None

    def forward(self, idx, targets=None, kv_cache=None, use_cache=None):
        """
        idx, targets: (B, T) token ids of any integer dtype; a target of -1 is not scored. kv_cache: a list of n_layer
        tuples, as an earlier call returned it; idx goes on at its cache_pos. Without one, use_cache=True begins one, by
        default in eval mode without targets. Returns (logits, loss, kv_cache): with targets, logits (B, T, vocab_size)
        and the mean loss in nats; without, logits of the last position, (B, 1, vocab_size), and None. The last block
        then computes this position alone.
        """
        idx, cache_pos = checked_input(self.config, self.lm_head.weight.device, idx, kv_cache)
        if targets is not None and (targets := as_int64('targets', targets)).shape != idx.shape:
            raise ValueError(f"targets are {tuple(targets.shape)}, but the tokens are {tuple(idx.shape)}")
        if use_cache is False and kv_cache is not None:
            raise ValueError("use_cache=False came with a kv_cache: pass one of them")
        if use_cache is None:
            use_cache = not self.training and targets is None
        if kv_cache is None and use_cache:
            kv_cache = self.empty_cache(len(idx))
        begin = cache_pos[:, None] if isinstance(cache_pos, torch.Tensor) else cache_pos
        q_pos = begin + torch.arange(idx.size(1), device=idx.device)
        parts, chunk = [], idx.size(1)
        if kv_cache:
            kv_cache = [LayerKVCache(*cache) if type(cache) is tuple else cache for cache in kv_cache]
            if self.config.window:  # it takes window + 1 tokens at once, and so need not hold more than two windows
                chunk = self.config.window + 1
        for start in range(0, idx.size(1), chunk):
            part = slice(start, start + chunk)
            x, kv_cache = self.hidden_states(idx[:, part], q_pos[..., part], kv_cache, last_only=targets is None)
            parts.append(x)
        logits = self.lm_head(x if targets is None else torch.cat(parts, dim=1))
        if targets is None:
            return logits, None, kv_cache
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        return logits, loss, kv_cache

    def step(self, idx, kv_cache, use_cache=True):
        """
        One step of `generate`: idx (B, T) -> (logits (B, 1, vocab_size), kv_cache). kv_cache=None begins a cache.
        If idx has max_positions tokens, it is computed without a cache, and kv_cache is returned as it came.
        """
        if not use_cache or idx.size(1) == self.config.max_positions:
            return self(idx, use_cache=False)[0], kv_cache
        logits, _, kv_cache = self(idx, kv_cache=kv_cache, use_cache=True)
        return logits, kv_cache

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=False, generator=None,
                 draw=None):
        """
        Continue each row of idx (B, T) with max_new_tokens sampled tokens. Returns (B, T + max_new_tokens).

        The model sees the last block_size tokens. With use_cache=True it reads the prompt once and then one token a
        step. Beyond block_size each new token moves all others to an earlier position, which changes their keys and
        values, so there each step reads the last block_size tokens, with the cache or without. The tokens are the same.
        A model with a window and without learned positions sees all of the text through it, and goes on without end.

        temperature, top_k, top_p, generator: see `sample_token`. draw: takes its place: (logits (B, vocab_size), number
        of the token) -> (B, 1).
        Raises ValueError on settings that make no sense. For stop tokens and prompts of any lengths: see engine/.
        """
        check_sampling(temperature, top_k, top_p)
        idx, c = checked_prompt(self.config, idx), self.config
        first_seen = -c.block_size if c.max_positions == c.block_size else None
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, not {max_new_tokens}")
        kv_cache = None
        draw = draw or (lambda logits, number: sample_token(logits, temperature, top_k, top_p, generator))
        training = [m for m in self.modules() if m.training]
        try:
            self.eval()
            with torch.inference_mode():
                idx_cond = idx[:, first_seen:]
                for number in range(max_new_tokens):
                    logits, kv_cache = self.step(idx_cond, kv_cache, use_cache)
                    idx_next = draw(logits.squeeze(1), number)
                    idx = torch.cat([idx, idx_next], dim=1)
                    if kv_cache and idx.size(1) <= c.max_positions:
                        idx_cond = idx_next
                    else:  # all that the model sees again, from position 0 on
                        idx_cond = idx[:, first_seen:]
        finally:
            for module in training:
                module.training = True
        if max_new_tokens and F.softmax(logits, -1).isnan().any():
            raise ValueError("the model's logits are not numbers: its weights are broken")
        return idx.clone()  # outside of inference mode, so that a model can be trained on it

    def crop_block_size(self, block_size):
        """Shorten the context window in place, e.g. of GPT-2's 1024 positions. Caches made before no longer fit."""
        if not 0 < block_size <= self.config.block_size:
            raise ValueError(f"block_size must be between 1 and the model's {self.config.block_size}, not {block_size}")
        c = self.config
        sees_all = c.window + c.n_sink >= block_size  # no token of so short a context is hidden
        self.config = replace(c, block_size=block_size, **(dict(window=0, n_sink=0) if sees_all else {}))
        if self.config.position == 'learned':
            self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size].detach().clone())
            self.transformer.wpe.num_embeddings = block_size

    def with_window(self, window, n_sink=0):
        """
        The same weights (they are shared) with another window and sinks. A model that was not trained with them
        computes another function than before, and learned positions still end at block_size.
        """
        model = copy.copy(self)
        model.config = copy.copy(self.config)
        model.config.window, model.config.n_sink = window, n_sink  # not checked: a window may be all of block_size
        return model

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """As in torch; compiled models' `_orig_mod.` prefixes and older nanoGPT's mask buffers are dropped."""
        state_dict = {k.removeprefix('_orig_mod.'): v for k, v in state_dict.items()
                      if not k.endswith(('.attn.bias', '.attn.masked_bias'))}
        return super().load_state_dict(state_dict, strict, assign)

    @classmethod
    def from_pretrained(cls, model_type, override_args=None, dtype=None):
        """
        The weights of a folder in Hugging Face format, see formats/families.py, of a GGUF file, or of a model of the
        hub by its name ('gpt2', 'Qwen/Qwen3-0.6B'), which is downloaded. override_args may set dropout. dtype: None
        keeps that of the files.
        """
        from formats import from_pretrained  # imported here so that model.py does not need formats/
        return from_pretrained(cls, GPTConfig, model_type, override_args or {}, dtype)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        """AdamW: matrices and embeddings decay, biases and layer norms do not. Fused where torch has the kernel."""
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [dict(params=[p for p in params if p.dim() >= 2], weight_decay=weight_decay),
                  dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0)]
        return torch.optim.AdamW(groups, learning_rate, betas, fused=device_type in ('cpu', 'cuda', 'mps', 'xpu'))

    def estimate_mfu(self, fwdbwd_per_iter, dt, peak_flops=None):
        """FLOPS of fwdbwd_per_iter sequences in dt seconds over peak_flops (or None), as PaLM (arXiv:2204.02311)."""
        c = self.config
        flops_per_token = 6 * self.get_num_params() + 12 * c.n_layer * c.n_head * c.head_dim * c.block_size
        return peak_flops and flops_per_token * c.block_size * fwdbwd_per_iter / dt / peak_flops


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """
    The next token of each row: logits (B, vocab_size) -> (B, 1).

    temperature: divides the logits; 0 takes the largest. top_k: keep the k largest (and ties with the k-th).
    top_p: keep the fewest that hold this much probability (nucleus sampling, arXiv:1904.09751).
    generator: the torch.Generator to draw from, on the logits' device; torch's global one by default.
    NaN in the logits is not found here.
    """
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if temperature != 1.0:
        logits = logits / temperature
    if top_k is not None and top_k < logits.size(-1):
        kth = torch.topk(logits, top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -float('inf'))
    if top_p is not None and top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = F.softmax(ordered, dim=-1)
        outside = probs.cumsum(dim=-1) - probs >= top_p  # of the first this is never true
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -float('inf'))
    # torch.multinomial without its checks: the largest of probs / noise, with exponential noise, is token i with
    # probability probs[i]. It draws the same tokens at half the cost
    probs = F.softmax(logits, dim=-1)
    noise = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / noise).argmax(dim=-1, keepdim=True)
