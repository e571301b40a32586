"""
Tokens a second by length, with the cache and without.

    python bench.py --mode=generate
    python bench.py --mode=generate --shape=S,M --json=out-bench/generate.json
    python bench.py --mode=generate --lengths=500 --batches=10

"no cache" is nanoGPT's way, one sample after another; all others draw their samples in one batch. "cache" is the
model's own step, "eager" that of decode/eager.py, "decoder" the fastest one here.
"""
from itertools import groupby

import torch

import decode
import generation
from benchmarks.harness import Case, Panel, Part, take_turns
from benchmarks.shapes import PROMPT, cache_bytes, config_of
from device import DTYPES, autocast, synchronize
from model import GPT

PICTURE = 'speedup.png'
LENGTHS = 10, 50, 122, 128, 200, 500
LABELS = {'cache': 'cache', 'eager': 'cache + eager decoder', 'decoder': 'cache + decoder',
          'shift': 'cache + decoder, when_full=shift'}


def fed_tokens(n, block_size, use_cache):
    """
    How many positions are computed to generate n tokens after a prompt of PROMPT tokens.

    Without a cache each token costs its whole context: about n * n / 2 until the context is full.
    """
    context = [min(PROMPT + i, block_size) for i in range(n)]
    if not use_cache:
        return sum(context)
    return context[0] + sum(1 if PROMPT + i <= block_size else block_size for i in range(1, n))


def counted(n, block_size):
    """The speed-up by the number of positions alone."""
    return fed_tokens(n, block_size, False) / fed_tokens(n, block_size, True)


def lengths(asked):
    """
    A row for each shape, number of samples and number of new tokens. cache_bytes: of one sequence. differing: the ways
    whose tokens should equal those without a cache, and do not. tok_per_s, speedup, runs_s: of each way.
    """
    for (name, B), cases in groupby(asked.combinations(asked.default_shape, (1,), LENGTHS), lambda case: case[:2]):
        model = GPT(config_of(name, asked.bias)).to(asked.device).eval()
        ways = ways_to_generate(model, B, asked.device)
        yield [compare_ways(asked, name, model, ways, B, n) for _, _, n in cases]


def ways_to_generate(model, B, device):
    """{name: a function of n that draws B samples of n greedy tokens after one prompt: (B, T + n)}"""
    idx = torch.randint(model.config.vocab_size, (1, PROMPT), device=device)
    decoder = decode.best(model, B)
    print(f"{model.config.n_layer} layers of {model.config.n_embd}, block {model.config.block_size}; decoder: "
          f"{decoder.name}")

    def in_one_batch(**how):
        return lambda n: generation.generate(model, idx, n, temperature=0, num_samples=B, use_cache=True, **how)

    return {'no cache': lambda n: torch.cat([model.generate(idx, n, temperature=0) for _ in range(B)]),
            'cache': in_one_batch(), 'eager': in_one_batch(decoder=decode.best(model, B, name='eager')),
            'decoder': in_one_batch(decoder=decoder),
            'shift': in_one_batch(decoder=decoder, when_full='shift')}


def compare_ways(asked, name, model, ways, B, n):
    """A row. when_full='shift' is left out where the context does not fill up."""
    size, amp = model.config.block_size, autocast(asked.device, asked.dtype)

    def draws(draw):
        def step():
            with amp:
                tokens = draw(n)
            synchronize(asked.device)
            return tokens
        return step
    cases = [Case(dict(way=way), draws(draw)) for way, draw in ways.items() if way != 'shift' or PROMPT + n > size]
    without, *_ = measured = take_turns(cases, asked.repeats, f'{name}: {B} x {n}')
    of = {m.case.labels['way']: m for m in measured}
    differing = [way for way, m in of.items() if way != 'shift' and not torch.equal(m.result, without.result)]
    return dict(shape=name, block_size=size, dtype=asked.dtype, samples=B, prompt=PROMPT, new_tokens=n,
                counted=counted(n, size), cache_bytes=cache_bytes(model.config, 1, DTYPES[asked.dtype].itemsize),
                tok_per_s={way: B * n / m.seconds for way, m in of.items()},
                speedup={way: without.seconds / m.seconds for way, m in of.items()},
                runs_s={way: m.runs for way, m in of.items()},
                same_tokens=not differing, differing=differing)


def picture(figures, machine):
    """Speed-up against length, measured and by the number of positions computed."""
    panels, rows = [], sorted(figures['lengths']['rows'], key=lambda row: row['new_tokens'])
    for name, B in dict.fromkeys((row['shape'], row['samples']) for row in figures['lengths']['rows']):
        mine = [row for row in rows if (row['shape'], row['samples']) == (name, B)]
        block, lines = mine[0]['block_size'], []
        for way, label in LABELS.items():
            points = [(row['new_tokens'], row['speedup'][way]) for row in mine if way in row['speedup']]
            if points:
                lines.append((*zip(*points), label, dict(marker='o')))
        if B == 1:
            every = range(1, mine[-1]['new_tokens'] + 1)
            lines.append((every, [counted(k, block) for k in every], 'positions computed', dict(color='0.6', ls=':')))
        axes = dict(yscale='log', yticks=[1, 2, 5, 10, 20, 50, 100], ylabel='speed-up over no cache',
                    xlabel=f'new tokens after a prompt of {PROMPT}')
        panels.append(Panel(f"{name}, {B} sample{'s' * (B > 1)}", lines, axes=axes,
                            marks={block - PROMPT: 'the context is full'}))
    return dict(panels=panels, title=machine)


PARTS = dict(lengths=Part(  # 5 minutes for M and 20 for L, and ten times that with --batches=1,10
    lengths, 1, "greedy tokens a second, and how many times as fast as without a cache",
    'shape samples new_tokens tok_per_s\nshape samples new_tokens speedup counted same_tokens differing'))
