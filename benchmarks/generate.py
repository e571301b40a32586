"""
Tokens a second by length: without the cache, with it, and as sample.py draws them.

"no cache" is nanoGPT's way, one sample after another; the others draw their samples in one batch. "cache" is
`GPT.generate(use_cache=True)`, "ours" the engine with the fastest step here, "shift" the engine with when_full=shift.
"""
from itertools import product

import torch

from benchmarks.harness import Case, Part, take_turns
from benchmarks.ours import Ours
from benchmarks.shapes import PROMPT, model_of, random_tokens
from device import autocast, synchronize

LENGTHS = 10, 50, 122, 128, 200, 500


def counted(n, block_size):
    """
    The speed-up by a cache for n tokens after a prompt of PROMPT tokens, in positions that are computed. Without a
    cache each token costs its whole context, with it one position until the context is full.
    """
    context = [min(PROMPT + i, block_size) for i in range(n)]
    fed = [PROMPT, *(1 if PROMPT + i <= block_size else block_size for i in range(1, n))]
    return sum(context) / sum(fed)


def lengths(asked):
    """
    A row for each shape, number of samples, number of new tokens and way. speedup: over no cache. same_tokens: are they
    those without a cache? None for when_full='shift', which is left out where the context does not fill up.
    """
    for name, B in product(asked.shapes or ['S' if asked.device == 'cpu' else 'L'], asked.batches or [1]):
        model = model_of(name, asked.bias).to(asked.device)
        of, size = ways(model, B), model.config.block_size
        for n in asked.lengths or LENGTHS:
            labels = dict(shape=name, samples=B, new_tokens=n, block_size=size, dtype=asked.dtype,
                          counted=counted(n, size))
            first, *_ = measured = take_turns(
                [Case(labels | dict(way=way), timed(draw, n, asked), per=B * n) for way, draw in of.items()
                 if way != 'shift' or PROMPT + n > size], asked.repeats, f'{name}: {B} x {n}')
            yield [m.row(tok_per_s=1 / m.seconds, speedup=first.over(m), same_tokens=None if way == 'shift' else
                         torch.equal(m.results[-1], first.results[-1])) for way, m in zip(of, measured)]


def ways(model, B):
    """{name: a function of n that draws B samples of n greedy tokens after one prompt: (B, n)}"""
    idx, engine = random_tokens(model, 1, PROMPT).to(model.lm_head.weight.device), Ours(model)
    return {'no cache': lambda n: torch.cat([model.generate(idx, n, temperature=0)[:, PROMPT:] for _ in range(B)]),
            'cache': lambda n: model.generate(idx.repeat(B, 1), n, temperature=0, use_cache=True)[:, PROMPT:],
            'ours': lambda n: engine.generate(idx, n, num_samples=B),
            'shift': lambda n: engine.generate(idx, n, num_samples=B, when_full='shift')}


def timed(draw, n, asked):
    """A function that draws n tokens in the asked dtype, and returns them when the device has them."""
    def step():
        with autocast(asked.device, asked.dtype):
            tokens = draw(n)
        synchronize(asked.device)
        return tokens
    return step


PARTS = dict(lengths=Part(  # 5 minutes for M and 20 for L, and ten times that with --batches=1,10
    lengths, 1, "greedy tokens a second, and how many times as fast as without a cache",
    'shape samples new_tokens way tok_per_s speedup counted same_tokens'))
