"""
The judge of everything that computes a GPT: the same arithmetic as functions of a state dict, over the whole text at
once, with explicit distances, a mask and a softmax in place of a fused kernel, and no trace of a cache.
"""
import math

import torch
import torch.nn.functional as F


def distances(T, window, n_sink):
    """How far key j is from the token at t, int64 (T, T), and which keys that token sees, bool (T, T)."""
    t, j = torch.arange(T)[:, None], torch.arange(T)[None]
    distance, seen = t - j, j <= t
    if window:
        near = t.clamp(max=n_sink + window - 1) - j
        return torch.where(j < n_sink, near, distance), seen & ((distance < window) | (j < n_sink))
    return distance, seen


def frequencies(half, theta, scaling=()):
    """The angles of pairs of channels from one position to the next; Llama 3.1's rule, by their wave lengths."""
    found = []
    for i in range(half):
        frequency = theta ** (-i / half)
        if scaling:
            factor, low, high, original = scaling
            wave = 2 * math.pi / frequency
            if wave > original / low:
                frequency /= factor
            elif wave >= original / high:
                smooth = (original / wave - low) / (high - low)
                frequency = (1 - smooth) * frequency / factor + smooth * frequency
        found.append(frequency)
    return torch.tensor(found, dtype=torch.float64)


def scores(q, k, distance, position, rope, slopes):
    """q, k (B, n_head, T, head_dim) -> (B, n_head, T, T)."""
    scale = math.sqrt(q.size(-1))
    if position == 'rope':  # pairs of channels as complex numbers, each pair of tokens turned by its own distance
        half = q.size(-1) // 2
        q, k = (torch.complex(x[..., :half], x[..., half:]) for x in (q, k))
        turn = torch.exp(1j * distance[..., None] * frequencies(half, *rope)).to(q.dtype)
        return torch.einsum('bhtf,bhjf,tjf->bhtj', q, k.conj(), turn).real / scale
    found = q @ k.mT / scale
    return found - slopes[:, None, None] * distance if position == 'alibi' else found


def alibi_slopes(n_head):
    """The paper's rule: 2^(-8 i / n) for a power of two n; for others also every second slope of 2 n heads."""
    n = 2 ** int(math.log2(n_head))
    slopes = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    return slopes + [2 ** (-8 * i / (2 * n)) for i in range(1, 2 * n, 2)][:n_head - n]


def rms(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def logits(weights, n_head, idx, position='learned', n_kv_head=0, window=0, n_sink=0, rope=(10000.0,), gelu='none',
           rms_norm=False, norm_eps=1e-5, source=None):
    """
    weights: a state dict under nanoGPT's keys; what it has of c_gate, q_norm and k_norm is used. window: of all layers,
    or a list. rope: theta, and rope_scaling if there is any. source: for each layer the one whose keys and values it
    reads, by default its own. idx (B, T) -> (B, T, vocab_size), differentiable.
    """
    def linear(x, name):
        return F.linear(x, weights[name + '.weight'], weights.get(name + '.bias'))

    def norm(x, name):
        if rms_norm:
            return rms(x, weights[name + '.weight'], norm_eps)
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        x = (x - mean) / torch.sqrt(var + norm_eps) * weights[name + '.weight']
        return x + weights[name + '.bias'] if name + '.bias' in weights else x

    B, T = idx.shape
    x = weights['transformer.wte.weight'][idx]
    if position == 'learned':
        x = x + weights['transformer.wpe.weight'][:T]
    slopes = torch.tensor(alibi_slopes(n_head), dtype=x.dtype)
    n_kv_head = n_kv_head or n_head
    head_dim = weights['transformer.h.0.attn.c_attn.weight'].size(0) // (n_head + 2 * n_kv_head)
    n_layer = 1 + max(int(k.split('.')[2]) for k in weights if k.startswith('transformer.h.'))
    stored = []
    for layer in range(n_layer):
        h = f'transformer.h.{layer}.'
        distance, seen = distances(T, window[layer] if isinstance(window, list) else window, n_sink)
        q, k, v = linear(norm(x, h + 'ln_1'), h + 'attn.c_attn').split(
            [n_head * head_dim, n_kv_head * head_dim, n_kv_head * head_dim], dim=-1)
        q, k, v = (t.reshape(B, T, -1, head_dim).permute(0, 2, 1, 3) for t in (q, k, v))
        if h + 'attn.q_norm.weight' in weights:
            q, k = (rms(x, weights[f'{h}attn.{name}.weight'], norm_eps) for x, name in ((q, 'q_norm'), (k, 'k_norm')))
        stored.append((k, v))
        k, v = stored[layer if source is None else source[layer]]
        group = torch.arange(n_head) // (n_head // n_kv_head)  # the key head of each query head
        s = scores(q, k[:, group], distance, position, rope, slopes)
        p, v = torch.softmax(s.masked_fill(~seen, -math.inf), dim=-1), v[:, group]
        x = x + linear((p @ v).permute(0, 2, 1, 3).flatten(2), h + 'attn.c_proj')
        y = linear(norm(x, h + 'ln_2'), h + 'mlp.c_fc')
        if h + 'mlp.c_gate.weight' in weights:
            gate = linear(norm(x, h + 'ln_2'), h + 'mlp.c_gate')
            y = gate / (1 + torch.exp(-gate)) * y
        elif gelu == 'tanh':
            y = y * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y ** 3)))
        else:
            y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        x = x + linear(y, h + 'mlp.c_proj')
    return linear(norm(x, 'transformer.ln_f'), 'lm_head')


def plain(model, idx, weights=None, windows=None, source=None):
    """`logits` of one of our models in float64. weights, windows: in the place of its own, if they are given."""
    c, weights = model.config, {name: w.double() for name, w in (weights or model.state_dict()).items()}
    rope = (c.rope_theta, c.rope_scaling) if c.rope_scaling else (c.rope_theta,)
    return logits(weights, c.n_head, idx, c.position, c.n_kv_head, windows or c.window, c.n_sink, rope, c.gelu,
                  c.norm == 'rms', c.norm_eps, source)


@torch.no_grad()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None):
    """nanoGPT's sampling: the cropped window in full for every token, divide, top-k, softmax, multinomial."""
    for _ in range(max_new_tokens):
        last = logits(model.state_dict(), model.config.n_head, idx[:, -model.config.block_size:])[:, -1]
        if temperature == 0:
            idx_next = last.argmax(-1, keepdim=True)
        else:
            last = last / temperature
            if top_k is not None:
                kth = last.sort(descending=True).values[:, min(top_k, last.size(-1)) - 1]
                last[last < kth[:, None]] = -math.inf
            idx_next = torch.multinomial(torch.softmax(last, -1), 1)
        idx = torch.cat([idx, idx_next], 1)
    return idx
