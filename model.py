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
from contextlib import contextmanager
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


class LayerKVCache(NamedTuple):
    """
    The cache of one layer. It is a tuple, so kv_cache[0][2] and kv_cache[0].cache_pos are the same.

    k_cache, v_cache: (B, n_head, block_size, head_dim), allocated once and written in place.
    cache_pos: how many positions are filled. Slots from cache_pos on are never read.

    The tuple you get back shares its storage with the one you gave. So rewinding is free: keep an old
    tuple and go on from it, and what had come after it is overwritten. Two branches alive at the same
    time need a copy: see `clone`.
    """
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cache_pos: int

    @classmethod
    def empty_like(cls, k, block_size):
        """A zero-filled cache for keys such as k (B, n_head, T, head_dim), in their dtype, on their device."""
        B, n_head, _, head_dim = k.shape
        shape = (B, n_head, block_size, head_dim)
        return cls(k.new_zeros(shape), k.new_zeros(shape), 0)

    def append(self, k, v):
        """
        Write the keys and values of T new positions, k and v (B, n_head, T, head_dim), at cache_pos.

        Returns (k, v, cache): all keys and values so far, views of (B, n_head, cache_pos + T, head_dim),
        and the tuple with its cache_pos moved on. Raises ValueError, with nothing written, when they
        do not fit. This is the one question attention asks of a cache; whatever can answer it is one.
        """
        k_cache, v_cache, start = self
        T, block_size = k.size(2), k_cache.size(2)
        end = start + T
        if end > block_size:  # written as a slice, k_cache[:, :, start:end] would clip, and drop a lone token in silence
            raise ValueError(f"cache is full: cache_pos {start} + {T} new tokens > block_size {block_size}")
        if k.dtype != k_cache.dtype or k.device != k_cache.device:
            raise ValueError(f"cache holds {k_cache.dtype} on {k_cache.device}, but the keys are {k.dtype} on {k.device}")
        if k.size(0) != k_cache.size(0):  # nor may one row be broadcast over another batch
            raise ValueError(f"cache holds a batch of {k_cache.size(0)}, but the keys are a batch of {k.size(0)}")
        k_cache.narrow(2, start, T).copy_(k)
        v_cache.narrow(2, start, T).copy_(v)
        return k_cache.narrow(2, 0, end), v_cache.narrow(2, 0, end), LayerKVCache(k_cache, v_cache, end)

    def clone(self):
        """A copy with storage of its own, to branch from."""
        return LayerKVCache(self.k_cache.clone(), self.v_cache.clone(), self.cache_pos)


def attend(q, k, v, mask=None, dropout_p=0.0):
    """
    Scaled dot-product attention, causal: the queries are the last T_q of the T_k positions.

    q: (B, n_head, T_q, head_dim); k, v: (B, n_head, T_k, head_dim), T_k >= T_q.
    mask: True where a query may look, broadcastable to (B, n_head, T_q, T_k); given one, it alone decides.
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

    def forward(self, x, kv_cache=None, use_cache=False):
        """
        x: (B, T, C), the T newest positions. Returns (y, kv_cache), y of x's shape.

        Given a cache, its positions are attended too and the one returned has cache_pos + T of them.
        Given none, use_cache=True begins one; otherwise nothing is allocated and None comes back.
        """
        B, T, C = x.size()
        q, k, v = linear(x, self.c_attn).view(B, T, 3, self.n_head, C // self.n_head).transpose(1, 3).unbind(2)  # (B, nh, T, hs)
        if kv_cache is not None:
            k, v, kv_cache = LayerKVCache(*kv_cache).append(k, v)
        elif use_cache:
            k, v, kv_cache = LayerKVCache.empty_like(k, self.block_size).append(k, v)
        y = attend(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side again
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

    def forward(self, x, kv_cache=None, use_cache=False):
        y, kv_cache = self.attn(layer_norm(x, self.ln_1), kv_cache, use_cache)
        x = x + y
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

    def check_input(self, idx, kv_cache):
        """cache_pos, the position of the first token of idx (B, T); ValueError before anything is written."""
        if idx.dim() != 2 or idx.size(1) == 0:
            raise ValueError(f"token ids must be (B, T) with at least one token, not {tuple(idx.shape)}")
        c, T = self.config, idx.size(1)
        cache_pos, ragged = 0, False
        if kv_cache is not None:
            if len(kv_cache) != c.n_layer:
                raise ValueError(f"kv_cache has {len(kv_cache)} layers, but the model has {c.n_layer}")
            k0, _, cache_pos = kv_cache[0]
            ragged = isinstance(cache_pos, torch.Tensor) and cache_pos.shape == idx.shape[:1] and cache_pos.dtype is torch.int64
            if not ragged and not isinstance(cache_pos, int) or (cache_pos.min() if ragged else cache_pos) < 0:
                raise ValueError(f"cache_pos must be an int >= 0, or an int64 tensor of them, one for each sequence; not {cache_pos!r}")
            shape, dtype, device = (idx.size(0), c.n_head, c.block_size, c.n_embd // c.n_head), k0.dtype, idx.device
            for layer, (k_cache, v_cache, pos) in enumerate(kv_cache):
                if pos is not cache_pos and not (torch.equal(pos, cache_pos) if ragged and torch.is_tensor(pos) else not ragged and pos == cache_pos):
                    raise ValueError(f"cache_pos is {cache_pos} in layer 0 but {pos} in layer {layer}")
                if not k_cache.shape == v_cache.shape == shape:
                    raise ValueError(f"the cache of layer {layer} is {tuple(k_cache.shape)} and {tuple(v_cache.shape)}, "
                                     f"but this model and batch need {shape}")
                if not (k_cache.dtype is v_cache.dtype is dtype and k_cache.device == v_cache.device == device):
                    raise ValueError(f"the cache of layer {layer} is {k_cache.dtype} and {v_cache.dtype} on {k_cache.device} and "
                                     f"{v_cache.device}, but layer 0 is {dtype} and the tokens are on {device}")
        if (cache_pos.max() if ragged else cache_pos) + T > c.block_size:
            raise ValueError(f"out of context: cache_pos {cache_pos} + {T} new tokens > block_size {c.block_size}")
        return cache_pos

    def hidden_states(self, idx, kv_cache=None, use_cache=False):
        """
        What lm_head reads, at every position: idx (B, T) -> (x (B, T, C), kv_cache).

        kv_cache: a list of n_layer tuples, as a call before returned it; idx then goes on at its cache_pos.
        Without one, use_cache=True begins one; otherwise None is returned in its place.
        """
        cache_pos = self.check_input(idx, kv_cache)
        t = self.transformer
        x = dropout(t.wte(idx) + t.wpe.weight[cache_pos:cache_pos + idx.size(1)], self)
        new_cache = []
        for layer, block in enumerate(t.h):
            x, layer_cache = block(x, kv_cache[layer] if kv_cache is not None else None, use_cache)
            new_cache.append(layer_cache)
        return layer_norm(x, t.ln_f), None if layer_cache is None else new_cache

    def forward(self, idx, targets=None, kv_cache=None, use_cache=None):
        """
        idx, targets: (B, T) token ids; a target of -1 is not scored. Returns (logits, loss, kv_cache).

        With targets: logits (B, T, vocab_size) and the mean loss in nats. Without: logits of the last
        position only, (B, 1, vocab_size), and loss None. use_cache=None begins a cache in eval mode
        when no loss is asked. A kv_cache that is given is always used, and always comes back advanced.
        """
        if use_cache is None:
            use_cache = not self.training and targets is None
        x, kv_cache = self.hidden_states(idx, kv_cache, use_cache)
        if targets is None:
            return linear(x[:, -1:], self.lm_head), None, kv_cache
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        return logits, loss, kv_cache

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=False,
                 stop_token=None, generator=None, decoder=None, num_samples=1):
        """`stream`, collected: idx (B, T) -> (B * num_samples, T + new tokens), the prompt included."""
        with evaluating(self):
            tokens = self.stream(idx, max_new_tokens, temperature, top_k, top_p, use_cache, stop_token,
                                 generator, decoder, num_samples)
            return torch.cat([idx.repeat_interleave(num_samples, dim=0), *tokens], dim=1)

    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=False,
               stop_token=None, generator=None, decoder=None, num_samples=1):
        """
        Continue the prompts idx (B, T) and yield each sampled token (B * num_samples, 1) as it is drawn.

        temperature, top_k, top_p, generator: as in `sample_token`; temperature 0 is greedy.
        use_cache: prefill once, then feed one token a step until the context holds block_size tokens.
            From there on, and without the cache from the start, every token costs a full pass over the
            last block_size tokens. The tokens are the same either way.
        stop_token: a row that draws it repeats it from then on; when every row has, the stream ends.
        decoder: used with the cache in the model's place; a callable (idx, kv_cache) -> (logits, kv_cache),
            where kv_cache=None asks for a prefill. It reads and writes the same tuples.
        num_samples: continuations of each prompt, side by side in the batch; the prompt is prefilled once.

        Runs without gradients and in eval mode, each module's own mode restored between tokens. Prompts
        longer than block_size are cropped to their end. Raises ValueError on an empty prompt, on ids that
        are not in the vocabulary and on settings that make no sense.
        """
        if idx.dim() != 2 or idx.numel() == 0:
            raise ValueError(f"the prompt must be (B, T) with at least one token, not {tuple(idx.shape)}: start from a newline, say")
        if idx.is_floating_point() or not 0 <= idx.min() <= idx.max() < self.config.vocab_size:
            raise ValueError(f"the prompt must be integers within the vocabulary of {self.config.vocab_size}")
        if max_new_tokens < 0 or num_samples < 1:
            raise ValueError(f"max_new_tokens {max_new_tokens} must be at least 0, and num_samples {num_samples} at least 1")
        if decoder is not None and not use_cache:
            raise ValueError("a decoder works on the cache: pass use_cache=True as well")
        check_sampling(temperature, top_k, top_p)
        tokens = self._stream(idx, max_new_tokens, num_samples, use_cache, decoder, stop_token,
                              dict(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator))
        return (token.clone() for token in tokens)  # born under inference mode, which autograd would refuse later

    @torch.inference_mode()
    def _stream(self, idx, max_new_tokens, num_samples, use_cache, decoder, stop_token, sampling):
        block_size, B = self.config.block_size, idx.size(0) * num_samples
        end = min(idx.size(1), block_size)
        # only the window is kept, in a buffer of two: when its end is reached, the last window moves to the front
        tokens = idx.new_empty(B, 2 * block_size)
        tokens[:, :end] = idx[:, -end:].repeat_interleave(num_samples, dim=0)
        kv_cache, cache_full = None, end == block_size
        stopped = torch.zeros(B, 1, dtype=torch.bool, device=idx.device)

        for step in range(max_new_tokens):
            if not use_cache or cache_full:
                kv_cache, logits = None, self._full_pass(tokens[:, max(0, end - block_size):end])
            elif kv_cache is None:
                logits, kv_cache = self._cached_step(tokens[::num_samples, :end], None, decoder)
                if num_samples > 1:  # before the first draw, so that each sample draws its own first token
                    logits = logits.repeat_interleave(num_samples, dim=0)
                    kv_cache = [LayerKVCache(k.repeat_interleave(num_samples, 0), v.repeat_interleave(num_samples, 0), pos)
                                for k, v, pos in kv_cache]
            else:
                logits, kv_cache = self._cached_step(tokens[:, end - 1:end], kv_cache, decoder)
            if (step == 0 or logits.device.type == 'cpu') and not math.isfinite(logits.sum()):  # elsewhere, asking is slow
                raise ValueError("the model's logits are not numbers: its weights are broken")
            cache_full = cache_full or use_cache and kv_cache[0][2] == block_size

            idx_next = sample_token(logits[:, -1], **sampling)  # (B, 1)
            if stop_token is not None:
                idx_next = torch.where(stopped, stop_token, idx_next)
                stopped |= idx_next == stop_token
            if end == 2 * block_size:
                tokens[:, :block_size] = tokens[:, block_size:]
                end = block_size
            tokens[:, end:end + 1] = idx_next
            end += 1
            yield idx_next
            if stop_token is not None and stopped.all():
                return

    def _cached_step(self, idx_cond, kv_cache, decoder):
        """Feed idx_cond (B, T) to the cache, or begin one: (logits (B, 1, vocab_size), kv_cache)."""
        if decoder is not None:
            return decoder(idx_cond, kv_cache)
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


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """
    The next token of each row: logits (B, vocab_size) -> (B, 1).

    temperature: divides the logits; 0 takes the largest. top_k: keep the k largest (and ties with the
    k-th). top_p: keep the fewest that hold this much probability (nucleus sampling, arXiv:1904.09751).
    generator: the torch.Generator to draw from, on the logits' device; torch's global one by default.
    Logits must be finite: unlike torch.multinomial this does not check (`stream` does).
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
        outside = probs.cumsum(dim=-1) - probs >= top_p  # enough is held before this one; never true of the first
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -float('inf'))
    # torch.multinomial, less its checks: of exponential clocks that run at the rates probs, the first to ring is
    # token i with probability probs[i]. It draws the very same tokens at half the cost
    probs = F.softmax(logits, dim=-1)
    return (probs / torch.empty_like(probs).exponential_(generator=generator)).argmax(dim=-1, keepdim=True)


def check_sampling(temperature, top_k, top_p):
    """ValueError unless temperature >= 0, top_k is None or >= 1, and top_p is None or in (0, 1]."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 (greedy) or positive, not {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], not {top_p}")


@contextmanager
def evaluating(model):
    """Eval mode inside; afterwards every module is back in the mode it was in. Free when already in eval mode."""
    training = [m for m in model.modules() if m.training] if model.training else []
    if training:
        model.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


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
