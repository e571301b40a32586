"""Tiny models of every kind (positions, grouped heads, windows, sinks, families), and the tokens that they draw."""
import torch
from toy_executor import bitmap, may_follow

from decode.draw import DrawSettings, draw
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


def drawn_alone(model, prompt, n, seed=0, stop_ids=(), min_tokens=0, logit_bias=(), constraint=None, logprobs=False,
                settings=None, **how):
    """
    The tokens that a model draws after a prompt, by full passes over a text that is cropped to block_size and by the
    draw's definition; and the logits (1, vocab_size) of each. constraint: a `ToyConstraint`. settings: `DrawSettings`.
    """
    c, device, tokens, of_tokens = model.config, model.lm_head.weight.device, [], []
    settings = settings or DrawSettings(c.vocab_size, seed, stop_ids, min_tokens, logit_bias, prompt, **how)
    while len(tokens) < n and not (tokens and tokens[-1] in settings.stop_ids):
        text = [*prompt, *tokens] if c.max_positions > c.block_size else [*prompt, *tokens][-c.block_size:]
        with torch.inference_mode():
            logits = model(torch.tensor([text], device=device), use_cache=False)[0][0].float()
        settings.count(tokens)
        if constraint:
            allowed = may_follow(tokens, c.vocab_size, constraint.most, settings.stop_ids)
            settings.allowed = bitmap(allowed, c.vocab_size)
            if not allowed:
                break
        tokens.append(int(draw(logits, [settings], [len(tokens)])))
        of_tokens.append(logits)
    return tokens, of_tokens
