"""The models that are measured: GPT-2's kind in three shapes, two llamas, with random weights."""
import os
from dataclasses import replace
from functools import lru_cache

import torch

import checkpoint
import model as gpt
from model import GPT, GPTConfig

GPTS = {
    'S': GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128, vocab_size=65),
    'M': GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65),
    'L': GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304),
}
LLAMA = dict(norm='rms', mlp='swiglu', position='rope')
LLAMAS = {  # the shapes of SmolLM2-135M and of Qwen2.5-0.5B; the context is L's, to be compared with it
    'smollm2': GPTConfig(n_layer=30, n_head=9, n_kv_head=3, n_embd=576, n_inner=1536, vocab_size=49152,
                         block_size=1024, bias=False, rope_theta=100000.0, **LLAMA),
    'qwen0.5b': GPTConfig(n_layer=24, n_head=14, n_kv_head=2, n_embd=896, n_inner=4864, vocab_size=151936,
                          block_size=1024, bias=False, rope_theta=1000000.0, norm_eps=1e-6, qkv_bias=True, **LLAMA),
}
SHAPES = GPTS | LLAMAS
PROMPT = 6  # tokens before the generated ones


def random_tokens(model, *shape, seed=0):
    """Token ids of a model's vocabulary, int64 of this shape."""
    return torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@lru_cache(maxsize=1)
def model_of(name, bias):
    """`model_with_varied_text` of a shape, or else the `trained` model of this name; the last one is kept."""
    return model_with_varied_text(replace(SHAPES[name], bias=bias)) if name in SHAPES else trained(name)[0]


@lru_cache(maxsize=1)
def trained(init_from):
    """(The model that sample.py's init_from names, its tokenizer), in float32, its context at most L's."""
    model, tokenizer, _ = checkpoint.load_model(init_from, '', gpt, dtype=torch.float32)
    model.crop_block_size(min(model.config.block_size, SHAPES['L'].block_size))
    return model, tokenizer


def label(name):
    """What rows call a shape, or the model of a path; '' is the newest run."""
    name = name or os.path.dirname(checkpoint.newest_first()[0])
    return name if name in SHAPES else os.path.basename(name.rstrip('/'))


def model_with_varied_text(config):
    """
    A model with random weights whose greedy text varies.

    With the weights that training starts from, a GPT repeats its last token, and equal tokens would prove little.
    """
    model = GPT(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if 'wte' not in name:
                p.add_(0.1 * torch.randn_like(p))
    return model
