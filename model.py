"""
A GPT and its KV cache, the whole of it, in one file.

From top to bottom: the configuration, the cache of one layer, attention over it, the block, the GPT,
and generation. Shapes are in the margin: B sequences, T new tokens, C = n_embd channels.

Configuration fields, state-dict keys, initialisation and the order in which a token is sampled are
those of nanoGPT (https://github.com/karpathy/nanoGPT, MIT licence), so that its checkpoints load here
and the same seed draws the same tokens.
"""
import json
import math
import os
import threading
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    """The shape of a GPT. Raises ValueError on a shape that cannot be built."""
    block_size: int = 1024   # positions in the context window, and slots in the cache
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 64 because matmuls like that
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True        # in every linear and layer norm, as GPT-2; False is a bit faster and better

    def __post_init__(self):
        for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd'):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a positive integer, not {size!r}")
        if self.n_embd % self.n_head != 0:
            raise ValueError(f"n_embd {self.n_embd} must be divisible by n_head {self.n_head}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout}")


INTEGERS = frozenset(getattr(torch, name)
                     for name in ('int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64')
                     if hasattr(torch, name))  # torch before 2.3 has no uint16 and wider


def as_int64(what, x):
    """
    x, a tensor of any integer dtype, as int64. ValueError if it is something else; `what` is its name in the message.
    """
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{what} must be a tensor of integers, not a {type(x).__name__}: {x!r:.60}")
    if x.dtype is torch.int64:
        return x
    if x.dtype not in INTEGERS:
        raise ValueError(f"{what} must be integers, not {x.dtype}: convert them with .long()")
    return x.long()


class LayerKVCache(NamedTuple):
    """
    The cache of one layer. It is a tuple, so kv_cache[0][2] and kv_cache[0].cache_pos are the same.

    k_cache, v_cache: (B, n_head, block_size, head_dim), allocated once and written in place.
    cache_pos: how many positions are filled, or an integer tensor (B,) when the sequences differ in length. Slots from
        cache_pos on are never read.

    The tuple you get back shares its storage with the one you gave. So rewinding is free: keep an old
    tuple and go on from it, and what had come after it is overwritten. Two branches alive at the same
    time need a copy: see `clone`.
    """
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cache_pos: int | torch.Tensor

    @classmethod
    def empty_like(cls, k, block_size):
        """A zero-filled cache for keys such as k (B, n_head, T, head_dim), in their dtype, on their device."""
        B, n_head, _, head_dim = k.shape
        shape = (B, n_head, block_size, head_dim)
        return cls(k.new_zeros(shape), k.new_zeros(shape), 0)

    def append(self, k, v):
        """
        Write the keys and values of T new positions, k and v (B, n_head, T, head_dim), at cache_pos.

        Returns (k, v, mask, cache): all keys and values so far, views of (B, n_head, cache_pos + T, head_dim), where each
        may look (see `attend`), and the tuple with its cache_pos moved on. Raises ValueError, with nothing written, when they
        do not fit. (Of a ragged batch all sequences come as long as the longest, and the mask hides the rest.)
        This is the one question attention asks of a cache; whatever can answer it is one.
        """
        k_cache, v_cache, start = self
        T, block_size = k.size(2), k_cache.size(2)
        ragged = isinstance(start, torch.Tensor)
        start = as_int64('cache_pos', start) if ragged else start
        end = start + T
        longest = int(end.max()) if ragged else end
        if longest > block_size:  # written as a slice, k_cache[:, :, start:end] would clip, and drop a lone token in silence
            raise ValueError(f"cache is full: cache_pos {start} + {T} new tokens > block_size {block_size}")
        if k.dtype != k_cache.dtype or k.device != k_cache.device:
            raise ValueError(f"cache holds {k_cache.dtype} on {k_cache.device}, but the keys are {k.dtype} on {k.device}")
        if k.size(0) != k_cache.size(0):  # nor may one row be broadcast over another batch
            raise ValueError(f"cache holds a batch of {k_cache.size(0)}, but the keys are a batch of {k.size(0)}")
        if ragged:  # each sequence has its own slots
            rows = torch.arange(k.size(0), device=k.device)[:, None]
            slots = start[:, None] + torch.arange(T, device=k.device)
            k_cache[rows, :, slots], v_cache[rows, :, slots] = k.transpose(1, 2), v.transpose(1, 2)
        else:
            k_cache.narrow(2, start, T).copy_(k)
            v_cache.narrow(2, start, T).copy_(v)
        mask = visible(start, T, longest) if ragged else None
        return k_cache.narrow(2, 0, longest), v_cache.narrow(2, 0, longest), mask, LayerKVCache(k_cache, v_cache, end)

    def rewound(self):
        """The same cache with nothing in it, to be filled anew in the same storage."""
        return self.at(0)

    def at(self, cache_pos):
        """The same cache with so many positions filled: fewer than there are, or as a tensor (B,) for each sequence."""
        return LayerKVCache(self.k_cache, self.v_cache, cache_pos)

    def put(self, rows, other):
        """Take over the sequences of another cache into some rows of the batch, an index tensor; cache_pos is left as it is."""
        self.k_cache.index_copy_(0, rows, other.k_cache)
        self.v_cache.index_copy_(0, rows, other.v_cache)
        return self

    def rows(self, rows):
        """A copy of some rows of the batch, by an index tensor, repeats and all."""
        pos = self.cache_pos
        return LayerKVCache(self.k_cache[rows], self.v_cache[rows], pos[rows] if isinstance(pos, torch.Tensor) else pos)

    def clone(self):
        """A copy with storage of its own, to branch from."""
        return LayerKVCache(self.k_cache.clone(), self.v_cache.clone(), self.cache_pos)


def as_cache(layer):
    """The cache of a layer with its methods: a `LayerKVCache` of a plain tuple, and what is something else as it is."""
    return LayerKVCache(*layer) if type(layer) is tuple else layer


def same_position(a, b):
    """Are two values of cache_pos, both ints or both tensors (B,), the same?"""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype in INTEGERS and a.device == b.device and torch.equal(a.long(), b)
    return isinstance(a, int) and isinstance(b, int) and a == b


def visible(cache_pos, T_q, T_k):
    """The mask of a ragged batch, (B, 1, T_q, T_k): the t-th new token of row b sees positions up to cache_pos[b] + t."""
    device = cache_pos.device
    return torch.arange(T_k, device=device) <= (cache_pos[:, None] + torch.arange(T_q, device=device))[:, None, :, None]


def attend(q, k, v, mask=None, dropout_p=0.0):
    """
    Scaled dot-product attention, causal: the queries are the last T_q of the T_k positions.

    q: (B, n_head, T_q, head_dim); k, v: (B, n_head, T_k, head_dim), T_k >= T_q.
    mask: True where a query may look, or what is added to its scores; broadcastable to (B, n_head, T_q, T_k); given one, it alone decides.
    Returns (B, n_head, T_q, head_dim).
    """
    T_q, T_k = q.size(2), k.size(2)
    if mask is None and 1 < T_q < T_k:
        # a chunk on a warm cache. is_causal=True would align the triangle top-left, as if the chunk
        # stood at position 0; it has to end in the lower right corner
        mask = torch.ones(T_q, T_k, dtype=torch.bool, device=q.device).tril(T_k - T_q)
    # one query is the newest position and sees everything: no mask at all
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=mask is None and T_q > 1)


# nn.Module is generous with Python: 1.5 us for a call, 0.8 us to find self.weight. A token goes through some forty
# modules, which makes a fifth of a small model's time. So what is plain and unhooked is called directly: hooks,
# compiled, pruned, quantised or replaced modules go the usual way, only torch's global hooks pass these by

def is_plain(module):
    return not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
                or module._compiled_call_impl)


class Module(nn.Module):

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs) if is_plain(self) else super().__call__(*args, **kwargs)


def linear(x, module):
    p = module._parameters
    if type(module) is nn.Linear and is_plain(module) and 'weight' in p and 'bias' in p:
        return F.linear(x, p['weight'], p['bias'])
    return module(x)


def layer_norm(x, module):
    p = module._parameters
    if type(module) is nn.LayerNorm and is_plain(module) and 'weight' in p and 'bias' in p:
        return F.layer_norm(x, module.normalized_shape, p['weight'], p['bias'], module.eps)
    return module(x)


def dropout(x, module):
    """nn.Dropout as a function of the module's rate and mode: in eval mode it costs a decoded token nothing."""
    return F.dropout(x, module.dropout) if module.training and module.dropout else x


def gelu(x):
    """The exact GELU (arXiv:1606.08415) of a contiguous x."""
    # on a CPU torch hands a contiguous tensor to oneDNN, which needs 20 us to get going: in a decoded token
    # that is a tenth of the time. A transposed view is left to torch's own kernel, faster while x is small
    if x.numel() <= 8192 and x.device.type == 'cpu':
        return F.gelu(x.view(2, -1).t()).t().view_as(x)
    return F.gelu(x)


class CausalSelfAttention(Module):

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.block_size = config.block_size
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # q, k and v in one matmul
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x, kv_cache=None, use_cache=False, last_only=False):
        """
        x: (B, T, C), the T newest positions. Returns (y, kv_cache), y of x's shape, or (B, 1, C) for the last one only.

        Given a cache, its positions are attended too and the one returned has cache_pos + T of them.
        Given none, use_cache=True begins one; otherwise nothing is allocated and None comes back.
        """
        B, T, C = x.size()
        q, k, v = linear(x, self.c_attn).view(B, T, 3, self.n_head, C // self.n_head).transpose(1, 3).unbind(2)  # (B, nh, T, hs)
        mask = None
        if kv_cache is not None:
            k, v, mask, kv_cache = as_cache(kv_cache).append(k, v)
        elif use_cache:
            k, v, mask, kv_cache = LayerKVCache.empty_like(k, self.block_size).append(k, v)
        if last_only:
            q, mask = q[:, :, -1:], None if mask is None else mask[:, :, -1:]
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0)
        y = y.transpose(1, 2).reshape(B, -1, C)  # the heads side by side again
        return dropout(linear(y, self.c_proj), self), kv_cache


class MLP(Module):

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x):
        return dropout(linear(gelu(linear(x, self.c_fc)), self.c_proj), self)


class Block(Module):

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, kv_cache=None, use_cache=False, last_only=False):
        y, kv_cache = self.attn(layer_norm(x, self.ln_1), kv_cache, use_cache, last_only)
        x = (x[:, -1:] if last_only else x) + y
        x = x + self.mlp(layer_norm(x, self.ln_2))
        return x, kv_cache


class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.dropout = config.dropout
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # one matrix reads tokens and writes them (arXiv:1608.05859)

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
        return n_params - self.transformer.wpe.weight.numel() if non_embedding else n_params

    def empty_cache(self, batch_size):
        """A cache for batch_size sequences, nothing in it yet: a list of n_layer tuples, in the dtype of the weights."""
        c, w = self.config, self.transformer.wpe.weight
        k = w.new_empty(batch_size, c.n_head, 0, c.n_embd // c.n_head)
        return [LayerKVCache.empty_like(k, c.block_size) for _ in range(c.n_layer)]

    def check_layers(self, kv_cache):
        if len(kv_cache) != self.config.n_layer:
            raise ValueError(f"kv_cache has {len(kv_cache)} layers, but the model has {self.config.n_layer}")

    def check_cache_pos(self, cache_pos, B, T):
        """
        cache_pos, where T new tokens of each of B sequences begin: an int, or a tensor (B,) of any integer dtype,
        which is returned as int64. ValueError if it is something else, negative, or if the tokens do not fit behind
        it.
        """
        ragged = isinstance(cache_pos, torch.Tensor)
        if ragged and cache_pos.dtype in INTEGERS and cache_pos.shape == (B,):
            cache_pos = cache_pos.long()
            smallest, largest = cache_pos.aminmax() if B else (0, 0)
        elif not ragged and isinstance(cache_pos, int) and not isinstance(cache_pos, bool):
            smallest = largest = cache_pos
        else:
            came = f"{tuple(cache_pos.shape)} of {cache_pos.dtype}" if ragged else repr(cache_pos)
            raise ValueError(f"cache_pos must be an int, or a tensor of integers, one for each of {B} sequences; not {came}")
        if smallest < 0:
            raise ValueError(f"cache_pos must not be negative: {cache_pos}")
        if ragged and cache_pos.device != self.lm_head.weight.device:
            raise ValueError(f"cache_pos is on {cache_pos.device}, but the model on {self.lm_head.weight.device}")
        if largest + T > self.config.block_size:
            raise ValueError(f"out of context: cache_pos {cache_pos} + {T} new tokens > "
                             f"block_size {self.config.block_size}")
        return cache_pos

    def check_input(self, idx, kv_cache):
        """
        Check the tokens idx (B, T) and the cache that they are fed to, before anything is written; ValueError if they
        do not fit.

        Returns (idx, cache_pos): the tokens as int64, and the position of the first, an int or an int64 tensor (B,).
        """
        idx = as_int64('token ids', idx)
        if idx.dim() != 2 or idx.size(1) == 0:
            raise ValueError(f"token ids must be (B, T) with at least one token, not {tuple(idx.shape)}")
        if kv_cache is None:
            return idx, self.check_cache_pos(0, *idx.shape)
        self.check_layers(kv_cache)
        c, device, (k0, _, given) = self.config, idx.device, kv_cache[0]
        cache_pos = self.check_cache_pos(given, *idx.shape)
        shape, dtype = (len(idx), c.n_head, c.block_size, c.n_embd // c.n_head), k0.dtype
        for layer, (k_cache, v_cache, pos) in enumerate(kv_cache):
            if pos is not given and not same_position(pos, cache_pos):
                raise ValueError(f"cache_pos is {cache_pos} in layer 0 but {pos} in layer {layer}")
            if not k_cache.shape == v_cache.shape == shape:
                raise ValueError(f"the cache of layer {layer} is {tuple(k_cache.shape)} and {tuple(v_cache.shape)}, "
                                 f"but this model and batch need {shape}")
            if not (k_cache.dtype is v_cache.dtype is dtype and k_cache.device == v_cache.device == device):
                raise ValueError(f"the cache of layer {layer} is {k_cache.dtype} and {v_cache.dtype} on {k_cache.device} and "
                                 f"{v_cache.device}, but layer 0 is {dtype} and the tokens are on {device}")
        return idx, cache_pos

    def hidden_states(self, idx, kv_cache=None, use_cache=False, last_only=False):
        """
        What lm_head reads, at every position or the last one: idx (B, T) -> (x (B, T, C) or (B, 1, C), kv_cache).

        kv_cache: a list of n_layer tuples, as a call before returned it; idx then goes on at its cache_pos.
        Without one, use_cache=True begins one; otherwise None is returned in its place.
        """
        t = self.transformer
        if hasattr(kv_cache, 'positions'):  # a cache system says where each token stands
            self.check_layers(kv_cache)
            idx = as_int64('token ids', idx)
            if kv_cache.positions.shape != idx.shape:
                raise ValueError(f"tokens are {tuple(idx.shape)}, and their places {tuple(kv_cache.positions.shape)}")
            if kv_cache.positions.max() >= self.config.block_size:
                raise ValueError(f"out of context: position {int(kv_cache.positions.max())} of block_size {self.config.block_size}")
            pos = t.wpe(kv_cache.positions.to(idx.device))
        else:
            idx, cache_pos = self.check_input(idx, kv_cache)
            if isinstance(cache_pos, torch.Tensor):
                pos = t.wpe.weight[cache_pos[:, None] + torch.arange(idx.size(1), device=idx.device)]
            else:
                pos = t.wpe.weight[cache_pos:cache_pos + idx.size(1)]
        x = dropout(t.wte(idx) + pos, self)
        new_cache = []
        for layer, block in enumerate(t.h):
            # above the last block nothing looks at earlier positions any more, so it need not work them out
            skip = last_only and idx.size(1) > 1 and layer == len(t.h) - 1
            x, layer_cache = block(x, kv_cache[layer] if kv_cache is not None else None, use_cache, skip)
            new_cache.append(layer_cache)
        return layer_norm(x, t.ln_f), None if layer_cache is None else new_cache

    def forward(self, idx, targets=None, kv_cache=None, use_cache=None):
        """
        idx, targets: (B, T) token ids of any integer dtype; a target of -1 is not scored. Returns (logits, loss,
        kv_cache).

        With targets: logits (B, T, vocab_size) and the mean loss in nats. Without: logits of the last
        position only, (B, 1, vocab_size), and loss None. use_cache=None begins a cache in eval mode
        when no loss is asked. A kv_cache that is given is always used, and always comes back advanced.
        """
        if use_cache is None:
            use_cache = not self.training and targets is None
        if targets is not None:
            idx, targets = as_int64('token ids', idx), as_int64('targets', targets)
            if targets.shape != idx.shape:
                raise ValueError(f"targets are {tuple(targets.shape)}, but the tokens are {tuple(idx.shape)}")
        x, kv_cache = self.hidden_states(idx, kv_cache, use_cache, last_only=targets is None)
        if targets is None:
            return linear(x, self.lm_head), None, kv_cache
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        return logits, loss, kv_cache

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=False,
                 stop_token=None, generator=None, decoder=None, num_samples=1, **when_full):
        """
        `stream`, collected, the prompts included: idx (B, T) -> (B * num_samples, T + new tokens).

        Given a list of token lists, returns a list of token lists, each up to its stop token.
        """
        # between these steps there is nobody to change the weights, so that a decoder need not look each time
        with evaluating(self), decoder.undisturbed() if hasattr(decoder, 'undisturbed') else nullcontext():
            tokens = self._tokens(idx, max_new_tokens, temperature, top_k, top_p, use_cache, stop_token,
                                  generator, decoder, num_samples, **when_full)
            if isinstance(idx, torch.Tensor):
                return torch.cat([idx.long().repeat_interleave(num_samples, dim=0), *tokens], dim=1)
            rows = [list(prompt) for prompt in idx for _ in range(num_samples)]
            new = torch.cat([*tokens, torch.empty(len(rows), 0, dtype=torch.long, device=self.lm_head.weight.device)], dim=1).tolist()
            ends = [n.index(stop_token) + 1 if stop_token in n else len(n) for n in new]
            return [row + n[:end] for row, n, end in zip(rows, new, ends)]

    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=False, stop_token=None,
               generator=None, decoder=None, num_samples=1, when_full='crop', keep=None, n_keep=0):
        """
        Continue the prompts idx (B, T), or a list of token lists, and yield each sampled token (B * num_samples, 1) as it is drawn.

        temperature, top_k, top_p, generator: as in `sample_token`; temperature 0 is greedy. A list of generators, one for
            each of the B * num_samples rows, makes a row's draws independent of the rest of the batch.
        use_cache: prefill once, then feed one token a step. The tokens are the same either way.
        stop_token: a row that draws it repeats it from then on; when every row has, the stream ends.
        decoder: used with the cache in the model's place; a callable (idx, kv_cache) -> (logits, kv_cache),
            where kv_cache=None asks for a prefill. It reads and writes the same tuples.
        num_samples: continuations of each prompt, side by side in the batch; the prompt is prefilled once.
        when_full: what the context is once it holds block_size tokens and gets another.
            'crop': the last block_size tokens, as in nanoGPT: each token costs a full pass, with the cache or without.
            'shift': the first n_keep tokens of the prompt and the last `keep`, by default half of block_size, moved to
            positions 0, 1, ...; room for the next ones, which cost one step each. Other tokens than with 'crop'.
            A prompt that is shorter than n_keep is kept whole, whatever the other prompts of the batch are.

        Runs without gradients and in eval mode, each module's own mode restored between tokens. Prompts longer than
        block_size are cropped to their end (with 'shift', after their first n_keep tokens). Raises ValueError on an empty
        prompt, on ids that are not in the vocabulary and on settings that make no sense.
        """
        tokens = self._tokens(idx, max_new_tokens, temperature, top_k, top_p, use_cache, stop_token,
                              generator, decoder, num_samples, when_full, keep, n_keep)
        return (token.clone() for token in tokens)  # what comes next depends on each, whatever becomes of the copy

    def _tokens(self, idx, max_new_tokens, temperature, top_k, top_p, use_cache, stop_token,
                generator, decoder, num_samples, when_full='crop', keep=None, n_keep=0):
        """`stream`, its tokens not to be written to."""
        c = self.config
        if max_new_tokens < 0 or num_samples < 1:
            raise ValueError(f"max_new_tokens {max_new_tokens} must be at least 0, and num_samples {num_samples} at least 1")
        if decoder is not None and not use_cache:
            raise ValueError("a decoder works on the cache: pass use_cache=True as well")
        check_sampling(temperature, top_k, top_p)
        prompts = self._prompts(idx)
        n_rows = len(prompts) * num_samples
        if isinstance(generator, (list, tuple)) and len(generator) != n_rows:
            raise ValueError(f"{len(generator)} generators for {n_rows} rows: pass one for each, or one for all")
        cuts = [cut_of(len(prompt), c.block_size, when_full, keep, n_keep) for prompt in prompts]
        context = RaggedContext if len({min(len(prompt), c.block_size) for prompt in prompts}) > 1 else Context
        return self._stream(context(prompts, num_samples, c.block_size, use_cache, cuts), max_new_tokens, use_cache, decoder,
                            stop_token, temperature, top_k, top_p, generator)

    def _prompts(self, idx):
        """
        The prompts, (B, T) or a list of token lists, as a list of int64 tensors (T,) on the model's device; or
        ValueError.
        """
        device, vocab_size = self.lm_head.weight.device, self.config.vocab_size
        if isinstance(idx, torch.Tensor):
            if idx.dim() != 2 or idx.numel() == 0:
                raise ValueError(f"the prompt must be (B, T) with at least one token, not {tuple(idx.shape)}: start from a newline, say")
            prompts = list(as_int64('the prompt', idx))
        else:
            try:
                prompts = [torch.as_tensor(prompt, device=device) for prompt in idx]
            except (TypeError, ValueError, RuntimeError) as e:  # strings, ragged lists, more than 64 bits
                raise ValueError(f"prompts must be lists of integers within the vocabulary of {vocab_size}: {e}") from None
            if not prompts or not all(prompt.dim() == 1 and len(prompt) for prompt in prompts):
                raise ValueError("prompts must be lists of at least one token each: start from a newline, say")
            prompts = [as_int64('a prompt', prompt) for prompt in prompts]
        if any(not 0 <= p.min() <= p.max() < vocab_size for p in prompts):
            raise ValueError(f"the prompt must be integers within the vocabulary of {vocab_size}")
        return prompts

    def _stream(self, context, max_new_tokens, use_cache, decoder, stop_token, temperature, top_k, top_p, generator):
        feed = self.feed if use_cache else lambda idx_cond, kv_cache: (self._full_pass(idx_cond), None)
        if decoder is not None:
            def feed(idx_cond, kv_cache):
                with evaluating(self) if self.training else nullcontext():
                    return decoder(idx_cond, kv_cache)
        B, on_cpu, one_each = context.size(), context.tokens.device.type == 'cpu', isinstance(generator, (list, tuple))
        rows = torch.arange(B, device=context.tokens.device)  # those that the context still has: finished ones leave it
        stopped = torch.zeros_like(rows, dtype=torch.bool)
        no_gradients = torch.inference_mode()
        for step in range(max_new_tokens):
            with no_gradients:
                logits = context.logits(feed)  # (rows, 1, vocab_size)
                clocks = draw_clocks(logits, generator, rows, B) if temperature and (one_each or len(rows) < B) else None
                best, idx_next = draw(logits, temperature, top_k, top_p, generator, clocks)  # (rows, 1) each
                # a NaN wins each race. On a GPU asking would mean waiting, so there it is asked once
                if (step == 0 or on_cpu) and any(b != b for b, in best.tolist()):
                    raise ValueError("the model's logits are not numbers: its weights are broken")
                if stop_token is not None:
                    drawn = torch.full((B, 1), stop_token, dtype=torch.long, device=rows.device)
                    drawn[rows] = idx_next.masked_fill(stopped[rows, None], stop_token)
                    idx_next = drawn[rows]
                context.append(idx_next)
            if stop_token is None:
                yield idx_next
                continue
            yield drawn
            stopped = drawn[:, 0] == stop_token
            n_left = B - int(stopped.sum())
            if n_left == 0:
                return
            if n_left <= len(rows) // 2:  # a copy of the cache, at most log2(B) times
                left = (~stopped[rows]).nonzero()[:, 0]
                with no_gradients:
                    context.select(left)
                rows = rows[left]

    def feed(self, idx_cond, kv_cache):
        """
        The model as its own decoder: what a step of generation feeds, idx_cond (B, T), to (logits (B, 1, vocab_size), kv_cache).

        None begins a cache. But what fills the window leaves nothing to go on from, and the cache is left alone.
        """
        if idx_cond.size(1) == self.config.block_size:
            return self._full_pass(idx_cond), kv_cache
        with evaluating(self):
            logits, _, kv_cache = self(idx_cond, kv_cache=kv_cache, use_cache=True)
            return logits, kv_cache

    def _full_pass(self, idx_cond):
        """All of idx_cond (B, T) at once, with no cache: logits (B, 1, vocab_size)."""
        with evaluating(self):
            return self(idx_cond, use_cache=False)[0]

    def crop_block_size(self, block_size):
        """Shorten the context window in place, e.g. of GPT-2's 1024 positions. Caches made before no longer fit."""
        if not 0 < block_size <= self.config.block_size:
            raise ValueError(f"block_size can be cropped from {self.config.block_size} to anything from 1, but not to {block_size}")
        self.config.block_size = block_size
        self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size].detach().clone())
        self.transformer.wpe.num_embeddings = block_size
        for block in self.transformer.h:
            block.attn.block_size = block_size

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """As in torch, and also: compiled models' `_orig_mod.` prefixes and older nanoGPT's mask buffers are dropped."""
        state_dict = {k.removeprefix('_orig_mod.'): v for k, v in state_dict.items()
                      if not k.endswith(('.attn.bias', '.attn.masked_bias'))}
        return super().load_state_dict(state_dict, strict, assign)

    @classmethod
    def from_pretrained(cls, model_type, override_args=None):
        """
        GPT-2's weights: 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl', or a folder in Hugging Face format.

        override_args may set dropout. Needs safetensors (and huggingface_hub for the download); both come
        with transformers. GPT-2 was trained with the tanh approximation of GELU; like nanoGPT we use the
        exact one, so logits differ a little. Raises ValueError on what cannot be loaded.
        """
        override_args = override_args or {}
        if set(override_args) - {'dropout'}:
            raise ValueError(f"only dropout can be overridden in pretrained weights, not {', '.join(override_args)}")
        hf_config, hf_weights = read_huggingface(model_type)
        config = GPTConfig(block_size=hf_config['n_positions'], vocab_size=hf_config['vocab_size'],
                           **{k: hf_config[k] for k in ('n_layer', 'n_head', 'n_embd')}, **override_args)
        model = cls(config)
        state_dict = {}
        for key, w in hf_weights.items():
            key = key if key.startswith(('transformer.', 'lm_head.')) else 'transformer.' + key
            # GPT-2's linears are 'Conv1D', stored (in, out)
            transposed = key.endswith(('c_attn.weight', 'c_proj.weight', 'c_fc.weight'))
            state_dict[key] = w.t() if transposed else w
        state_dict.setdefault('lm_head.weight', state_dict.get('transformer.wte.weight'))
        try:
            model.load_state_dict(state_dict)
        except RuntimeError as e:
            raise ValueError(f"the weights in {model_type} are not those of a GPT-2: {str(e).splitlines()[1].strip()}") from e
        return model

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        """AdamW: matrices and embeddings decay, biases and layer norms do not. Fused where torch has the kernel."""
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {'params': [p for p in params if p.dim() >= 2], 'weight_decay': weight_decay},
            {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=device_type in ('cpu', 'cuda', 'mps', 'xpu'))

    def estimate_mfu(self, fwdbwd_per_iter, dt, peak_flops=None):
        """
        Model FLOPS utilisation: the FLOPS of fwdbwd_per_iter sequences in dt seconds over peak_flops.

        FLOPs are counted as in PaLM (arXiv:2204.02311, appendix B). peak_flops defaults to
        `default_peak_flops` of the model's device; None comes back where that is not known.
        """
        c = self.config
        peak_flops = peak_flops or default_peak_flops(self.lm_head.weight.device)
        flops_per_token = 6 * self.get_num_params() + 12 * c.n_layer * c.n_embd * c.block_size
        return peak_flops and flops_per_token * c.block_size * fwdbwd_per_iter / dt / peak_flops


class Cut(NamedTuple):
    """What is left of a context that is full and gets another token: its first n_keep tokens and its last `keep`."""
    keep: int
    n_keep: int


def cut_of(length, block_size, when_full='crop', keep=None, n_keep=0):
    """The `Cut` of a prompt of `length` tokens, see `GPT.stream`; ValueError on settings that make no sense."""
    if when_full not in ('crop', 'shift') or when_full == 'crop' and (keep is not None or n_keep):
        raise ValueError(f"when_full is 'crop', or 'shift' with keep and n_keep; "
                         f"not {when_full!r} with keep={keep}, n_keep={n_keep}")
    n_keep = min(n_keep, length)
    if when_full == 'crop' or keep is None:
        keep = block_size if when_full == 'crop' else max(1, min(block_size // 2, block_size - n_keep))
    if keep < 1 or n_keep < 0 or n_keep + keep > block_size:
        raise ValueError(f"n_keep={n_keep} and keep={keep} tokens of a full context, of these at least 1, "
                         f"must fit in {block_size}")
    return Cut(keep, n_keep)


class Context:
    """
    The last tokens of each sequence of a batch, as many of each, and the cache of them: what `_stream` goes on from.

    prompts: tensors (T,) of token ids. cuts: the `Cut` of each, which a context that outgrows the window is reduced
    to. The cache is then rewound: the tokens that are left stand at other positions, so their keys and values are
    computed anew, in the same storage.
    """

    def __init__(self, prompts, num_samples, block_size, use_cache, cuts):
        self.num_samples, self.block_size, self.use_cache, self.cuts = num_samples, block_size, use_cache, cuts
        contexts = [p if len(p) <= block_size else torch.cat([p[:cut.n_keep], p[len(p) - block_size + cut.n_keep:]])
                    for p, cut in zip(prompts, cuts)]
        self.kv_cache = None
        self.end = max(map(len, contexts))
        # each context ends at column `end` of a buffer of two windows: at its end, the last window moves to the front
        self.tokens = contexts[0].new_zeros(len(contexts), 2 * block_size)
        for row, context in zip(self.tokens, contexts):
            row[self.end - len(context):self.end] = context
        self.unwritten = []  # the newest tokens, (B, 1) each, that are not in the buffer yet
        self.pinned = [context[:cut.n_keep].clone() for context, cut in zip(contexts, cuts)]
        self.set_lengths([len(context) for context in contexts])

    def set_lengths(self, lengths):
        self.length = lengths[0]

    def size(self):
        return len(self.tokens) * self.num_samples

    def logits(self, feed):
        """(B, 1, vocab_size), for the next token of each row; feed(idx, kv_cache) -> (logits, kv_cache)."""
        n_new = self.length - (self.kv_cache[0][2] if self.kv_cache is not None else 0)
        idx = self.unwritten[-1] if n_new == 1 and self.unwritten else self.newest(slice(None), n_new)
        logits, self.kv_cache = feed(idx, self.kv_cache)
        if self.num_samples > 1:  # the prompts were prefilled once; from here on each sample goes its own way
            rows = torch.arange(len(self.tokens), device=self.tokens.device).repeat_interleave(self.num_samples)
            self.num_samples = 1
            self.select(rows)
            logits = logits[rows]
        return logits

    def append(self, idx_next):
        """Add each row's next token, (B, 1), and cut the contexts that no longer fit."""
        self.unwritten.append(idx_next)
        if len(self.unwritten) == self.block_size:
            self.write()
        self.lengthen()

    def write(self):
        if self.unwritten:
            new = torch.cat(self.unwritten, dim=1)
            self.unwritten, start = [], self.end
            if start + new.size(1) > 2 * self.block_size:
                start = self.block_size
                self.tokens[:, :start] = self.tokens[:, self.end - start:self.end].clone()
            self.end = start + new.size(1)
            self.tokens[:, start:self.end] = new

    def newest(self, rows, n):
        """The last n tokens of some rows."""
        self.write()
        return self.tokens[rows, self.end - n:self.end]

    def lengthen(self):
        if self.length < self.block_size:
            self.length += 1
        else:
            self.length = sum(self.cuts[0])  # prompts of one length have the same cut
            self.pin(range(len(self.tokens)))
            self.kv_cache = self.kv_cache and [as_cache(layer).rewound() for layer in self.kv_cache]

    def pin(self, rows):
        """Put the first n_keep tokens of these rows, a list, in front of their last `keep`."""
        for row in rows:
            keep, n_keep = self.cuts[row]
            if n_keep:
                self.write()
                self.tokens[row, self.end - keep - n_keep:self.end - keep] = self.pinned[row]

    def select(self, rows):
        """Go on with these rows, an index tensor, alone."""
        self.write()
        self.tokens = self.tokens[rows]
        self.pinned, self.cuts = ([each[row] for row in rows.tolist()] for each in (self.pinned, self.cuts))
        self.kv_cache = self.kv_cache and [as_cache(layer).rows(rows) for layer in self.kv_cache]


class RaggedContext(Context):
    """
    The same for contexts of different lengths. All rows take each step together, with a cache_pos of their own.

    To fill a row's cache, all of its tokens but the last are fed, right-padded: what is written at the padding is beyond
    cache_pos, and overwritten before it could be read. The last one takes part in the common step, and so each row's
    logits are those of its own last token. A row that is cropped at each token has left the common step for good.
    """

    def __init__(self, prompts, num_samples, block_size, use_cache, cuts):
        prompts, cuts = ([each[i] for i in range(len(prompts)) for _ in range(num_samples)] for each in (prompts, cuts))
        super().__init__(prompts, 1, block_size, use_cache, cuts)

    def set_lengths(self, lengths):
        self.lengths = lengths
        self.stepping = list(range(len(lengths)))  # the rows in the common step, in the order of the batch of kv_cache
        self.unfilled = self.stepping[:]           # those of them whose cache is to be filled
        self.full_cache = None                     # the storage for the others, whose whole window is fed each time

    def logits(self, feed):
        if not self.use_cache:  # each row by itself, for want of a cache_pos to tell them apart
            return torch.cat([feed(self.newest([row], n), None)[0] for row, n in enumerate(self.lengths)])
        device = self.tokens.device
        full = [row for row in range(len(self.tokens)) if row not in self.stepping]
        parts = []
        if self.unfilled:
            self.fill(feed)
        if self.stepping:
            cache_pos = torch.tensor([self.lengths[row] - 1 for row in self.stepping], device=device)
            logits, self.kv_cache = feed(self.newest(self.stepping, 1),
                                         [as_cache(layer).at(cache_pos) for layer in self.kv_cache])
            parts.append(logits)
        if full:
            cache, self.full_cache = self.full_cache, None
            cache = [as_cache(layer).rewound() for layer in cache] if cache and self.n_full == len(full) else None
            logits, self.full_cache = feed(self.newest(full, self.block_size), cache)
            self.n_full = len(full)
            parts.append(logits)
        order = torch.tensor(self.stepping + full, device=device)
        return torch.cat(parts)[order.argsort()]

    def fill(self, feed):
        n_old = max(1, max(self.lengths[row] for row in self.unfilled) - 1)
        idx = self.tokens.new_zeros(len(self.unfilled), n_old)
        for i, row in enumerate(self.unfilled):
            idx[i, :self.lengths[row] - 1] = self.newest(row, self.lengths[row])[:-1]
        if self.kv_cache is None:
            self.kv_cache = feed(idx, None)[1]
        else:
            places = torch.tensor([self.stepping.index(row) for row in self.unfilled], device=idx.device)
            filled = feed(idx, [as_cache(layer).rows(places).rewound() for layer in self.kv_cache])[1]
            self.kv_cache = [as_cache(mine).put(places, as_cache(new)) for mine, new in zip(self.kv_cache, filled)]
        self.unfilled = []

    def lengthen(self):
        overflowing = [row for row in self.stepping if self.lengths[row] == self.block_size]
        self.lengths = [min(n + 1, self.block_size) for n in self.lengths]
        cropped = [row for row in overflowing if self.cuts[row].keep == self.block_size]
        if cropped:
            self.leave([row for row in self.stepping if row not in cropped])
        self.unfilled = [row for row in overflowing if row not in cropped]
        for row in self.unfilled:
            self.lengths[row] = sum(self.cuts[row])
        self.pin(self.unfilled)

    def leave(self, stepping):
        """Keep only these rows in the common step."""
        places = torch.tensor([self.stepping.index(row) for row in stepping], dtype=torch.long, device=self.tokens.device)
        self.kv_cache = self.kv_cache and [as_cache(layer).rows(places) for layer in self.kv_cache]
        self.stepping = stepping

    def select(self, rows):
        self.write()
        rows = rows.tolist()
        self.leave([row for row in self.stepping if row in rows])
        self.tokens = self.tokens[rows]
        per_row = self.pinned, self.cuts, self.lengths
        self.pinned, self.cuts, self.lengths = ([each[row] for row in rows] for each in per_row)
        self.stepping, self.unfilled = ([rows.index(row) for row in old if row in rows] for old in (self.stepping, self.unfilled))


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """
    The next token of each row: logits (B, vocab_size) -> (B, 1).

    temperature: divides the logits; 0 takes the largest. top_k: keep the k largest (and ties with the
    k-th). top_p: keep the fewest that hold this much probability (nucleus sampling, arXiv:1904.09751).
    generator: the torch.Generator to draw from, on the logits' device; torch's global one by default.
    Logits must be numbers: unlike torch.multinomial this does not check (`stream` does).
    """
    return draw(logits[:, None], temperature, top_k, top_p, generator)[1]


def draw(logits, temperature, top_k, top_p, generator, clocks=None):
    """`sample_token` of logits (B, 1, vocab_size): (what was largest, the token), (B, 1) each. clocks may be drawn already."""
    if temperature == 0:
        return largest(logits)
    if temperature != 1.0:
        logits = logits / temperature
    if top_k is not None and top_k < logits.size(-1):
        kth = torch.topk(logits, top_k).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -float('inf'))
    if top_p is not None and top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = F.softmax(ordered, dim=-1)
        outside = probs.cumsum(dim=-1) - probs >= top_p  # enough is held before this one; never true of the first
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -float('inf'))
    # torch.multinomial, less its checks: of exponential clocks that run at the rates probs, the first to ring is
    # token i with probability probs[i]. It draws the very same tokens at half the cost
    probs = F.softmax(logits, dim=-1)
    if clocks is None:
        clocks = torch.empty_like(probs).exponential_(generator=generator)
    return largest(probs / clocks)


def largest(x):
    """(values, indices) of the largest number of each row, x (B, 1, n) -> (B, 1) each; a NaN is larger than any."""
    if len(x) == 1 or x.device.type != 'cpu':
        return x.max(dim=-1)
    # on a CPU max() of several rows hands even ten short ones to torch's threads, which then spin against a decoder's
    indices = x.argmax(dim=-1, keepdim=True)
    return x.gather(-1, indices)[..., 0], indices[..., 0]


def draw_clocks(logits, generator, rows, B):
    """
    The clocks for some rows of a batch of B, logits (rows, 1, vocab_size), whichever the other rows are and do.

    With a list of B generators, each row draws from its own. With one, it draws for all B in any case.
    """
    if isinstance(generator, (list, tuple)):
        clocks = torch.empty_like(logits)
        for row, clock in zip(rows.tolist(), clocks.unbind()):
            clock.exponential_(generator=generator[row])
        return clocks
    return logits.new_empty(B, 1, logits.size(2)).exponential_(generator=generator)[rows]


def check_sampling(temperature, top_k, top_p):
    """ValueError unless temperature >= 0, top_k is None or >= 1, and top_p is None or in (0, 1]."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 (greedy) or positive, not {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], not {top_p}")


flipping = threading.RLock()
# {model: (weak references to the uses of `evaluating`, the modules to be restored after the last of them)}
evaluated = weakref.WeakKeyDictionary()


def new_lock():
    global flipping
    flipping = threading.RLock()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=new_lock)  # another thread of the parent may have held it


class Use:
    """One use of `evaluating`."""


@contextmanager
def evaluating(model):
    """
    Eval mode inside; afterwards every module is back in the mode it was in.

    Several threads can be inside for one model: the modules go back to training mode when the last one leaves. What
    is in eval mode is not touched.
    """
    use = Use()
    try:
        with flipping:
            uses, modules = evaluated.setdefault(model, ([], []))
            uses.append(weakref.ref(use))
            if model.training:
                modules += [m for m in model.modules() if m.training]
                model.eval()
        yield
    finally:
        with flipping:
            uses, modules = evaluated.setdefault(model, ([], []))
            # None: a use that an interrupt kept from getting here
            uses[:] = [other for other in uses if other() not in (None, use)]
            if not uses:
                for m in modules:
                    m.training = True
                modules.clear()


def read_huggingface(model_type):
    """(config dict, state dict) of a folder in Hugging Face format, downloaded first when given a GPT-2's name."""
    folder = model_type
    if model_type in ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl') and not os.path.isdir(model_type):
        try:
            from huggingface_hub import snapshot_download
        except ImportError as e:
            raise ValueError(f"downloading {model_type} needs huggingface_hub: pip install transformers") from e
        try:
            folder = snapshot_download('openai-community/' + model_type, allow_patterns=['config.json', 'model.safetensors'])
        except Exception as e:  # it has some thirty kinds of error, and all of them mean this
            raise ValueError(f"{model_type} could not be downloaded ({type(e).__name__}): connect, or pass a local folder") from e
    files = sorted(f for f in os.listdir(folder) if f.endswith('.safetensors')) if os.path.isdir(folder) else []
    if not files or not os.path.exists(os.path.join(folder, 'config.json')):
        raise ValueError(f"{model_type!r} is neither gpt2, gpt2-medium, gpt2-large, gpt2-xl nor a folder with config.json and *.safetensors")
    try:
        from safetensors.torch import load_file
    except ImportError as e:
        raise ValueError(f"reading {folder} needs safetensors: pip install safetensors (or transformers)") from e
    try:
        with open(os.path.join(folder, 'config.json')) as f:
            hf_config = json.load(f)
        weights = {k: w for name in files for k, w in load_file(os.path.join(folder, name)).items()}
    except Exception as e:  # json's, safetensors' own, a git-lfs pointer's: whichever it is, the folder is no good
        raise ValueError(f"{folder} cannot be read ({type(e).__name__}: {e}): is the download complete?") from e
    missing = {'n_positions', 'vocab_size', 'n_layer', 'n_head', 'n_embd'} - set(hf_config)
    if hf_config.get('model_type') != 'gpt2' or missing:
        raise ValueError(f"{folder}/config.json is not a gpt2's: model_type is {hf_config.get('model_type')!r}, "
                         f"and it lacks {', '.join(sorted(missing)) or 'nothing'}")
    return hf_config, weights


def default_peak_flops(device):
    """Dense FLOPS a device can do at best, from its data sheet: half precision on a GPU, float32 on a CPU. None if unknown."""
    if device.type == 'cuda':
        sheet = {'B200': 2250e12, 'H200': 989e12, 'H100': 989e12, 'A100': 312e12, 'L40': 181e12, 'L4': 121e12,
                 'A10': 125e12, 'V100': 125e12, 'T4': 65e12, '5090': 210e12, '4090': 165e12, '3090': 71e12}
        name = torch.cuda.get_device_name(device)
        return next((flops for model, flops in sheet.items() if model in name), None)
    if device.type == 'cpu':  # two fused multiply-adds a cycle, on vectors of 8 or 16 floats, at a typical 2.6 GHz
        return torch.get_num_threads() * 2.6e9 * {'AVX2': 32, 'AVX512': 64}.get(torch.backends.cpu.get_cpu_capability(), 16)
    return None
