"""Tiny models of every kind (positions, grouped heads, windows, sinks, families), and how tokens are drawn."""
import torch

from model import GPT, GPTConfig

VOCAB = 29
MODELS = {
    'learned': dict(), 'learned window': dict(window=5, n_sink=1), 'none': dict(position='none', n_kv_head=1),
    'rope': dict(position='rope', n_kv_head=2), 'rope window sinks': dict(position='rope', window=6, n_sink=3),
    'alibi': dict(position='alibi', gelu='tanh'), 'alibi window': dict(position='alibi', window=7, n_kv_head=2),
    'none window sinks': dict(position='none', window=20, n_sink=18),
    'llama': dict(position='rope', n_kv_head=2, norm='rms', mlp='swiglu', n_inner=40, rope_scaling=(8.0, 1.0, 4.0, 16)),
    'qwen window': dict(position='rope', window=9, norm='rms', mlp='swiglu', head_dim=16, qk_norm=True, tied=False)}

# settings of draws, each of which draws other tokens
HOWS = [dict(), dict(temperature=0.0), dict(top_k=5), dict(top_p=0.7, temperature=1.5), dict(frequency_penalty=1.0),
        dict(repetition_penalty=1.5, min_p=0.05), dict(stop_ids=[3, 4, 5], min_tokens=6), dict(logit_bias={7: 4.0})]


def model_of(kind, seed=0, dtype=torch.float32, **how):
    """A model of one of these kinds, in eval mode, with block_size 40."""
    torch.manual_seed(seed)
    settings = dict(block_size=40, vocab_size=VOCAB, n_layer=2, n_head=4, n_embd=48, bias=seed % 2 == 0) | MODELS[kind]
    m = GPT(GPTConfig(**(settings | how))).eval()
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return m.to(dtype)
