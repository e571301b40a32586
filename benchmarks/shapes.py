"""The models that are measured: three shapes, with random weights, and the memory of their caches."""
from dataclasses import replace
from functools import lru_cache

import torch

from model import GPT, GPTConfig

SHAPES = {
    'S': GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128, vocab_size=65),
    'M': GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65),
    'L': GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304),
}
PROMPT = 6  # tokens before the generated ones
WITHIN_WINDOW = {'S': 122, 'M': 200, 'L': 50}  # new tokens that fit after the prompt; L could hold more, but is slow


def config_of(name, bias):
    """The configuration of a shape, with or without bias."""
    return replace(SHAPES[name], bias=bias)


def cache_bytes(config, batch_size, number=4):
    """Bytes of the keys and values of a cache. number: bytes of one number."""
    c = config
    return 2 * c.n_layer * batch_size * c.n_kv_head * c.head_dim * c.n_slots * number


def random_tokens(model, *shape, seed=0):
    """Token ids of a model's vocabulary, int64 of this shape."""
    return torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@lru_cache(maxsize=1)
def model_of(name, bias):
    """`model_with_varied_text` of a shape; the last one is kept."""
    return model_with_varied_text(config_of(name, bias))


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
