"""
The plain GPT that tests hold model.py against: the same arithmetic written as functions of a state dict,
with a mask and a softmax in place of a fused kernel, and no trace of a cache.
"""
import math

import torch
import torch.nn.functional as F


def logits(weights, n_head, idx):
    """weights: a state dict under nanoGPT's keys. idx (B, T) -> (B, T, vocab_size), differentiable."""
    def linear(x, name):
        return F.linear(x, weights[name + '.weight'], weights.get(name + '.bias'))

    def norm(x, name):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        x = (x - mean) / torch.sqrt(var + 1e-5) * weights[name + '.weight']
        return x + weights[name + '.bias'] if name + '.bias' in weights else x

    B, T = idx.shape
    x = weights['transformer.wte.weight'][idx] + weights['transformer.wpe.weight'][:T]
    hidden = torch.full((T, T), -math.inf, dtype=x.dtype).triu(1)
    n_layer = 1 + max(int(k.split('.')[2]) for k in weights if k.startswith('transformer.h.'))
    for layer in range(n_layer):
        h = f'transformer.h.{layer}.'
        q, k, v = linear(norm(x, h + 'ln_1'), h + 'attn.c_attn').chunk(3, dim=-1)
        q, k, v = (t.reshape(B, T, n_head, -1).permute(0, 2, 1, 3) for t in (q, k, v))
        p = torch.softmax(q @ k.mT / math.sqrt(q.size(-1)) + hidden, dim=-1)
        x = x + linear((p @ v).permute(0, 2, 1, 3).reshape(x.shape), h + 'attn.c_proj')
        y = linear(norm(x, h + 'ln_2'), h + 'mlp.c_fc')
        y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        x = x + linear(y, h + 'mlp.c_proj')
    return linear(norm(x, 'transformer.ln_f'), 'lm_head')


@torch.no_grad()
def generate(weights, n_head, block_size, idx, max_new_tokens, temperature=1.0, top_k=None):
    """nanoGPT's sampling: the cropped window in full for every token, divide, top-k, softmax, multinomial."""
    for _ in range(max_new_tokens):
        last = logits(weights, n_head, idx[:, -block_size:])[:, -1]
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
