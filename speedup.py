"""Ways to generate, with a cache and without: how many positions they compute, how long they take, and a picture of it."""
import statistics
import time

import torch

from device import synchronize
from whole_file import replacing

PROMPT = 6  # tokens before the generated ones, in all modes of bench.py


def fed_tokens(n, block_size, use_cache):
    """How many positions are computed to generate n tokens after the prompt: about n * n / 2 without a cache and a limit."""
    context = [min(PROMPT + i, block_size) for i in range(n)]
    if not use_cache:
        return sum(context)
    return context[0] + sum(1 if PROMPT + i <= block_size else block_size for i in range(1, n))


def compare_ways(model, idx, ways, B, n, repeats, dev, amp, bar):
    """
    Time generating n new tokens of B samples in each way, {name: arguments of generate}, taking turns.

    A way without arguments draws one sample after another. when_full='shift' is left out where the context does not
    fill up. Returns medians over `repeats` rounds after a warm-up, a dict for JSON; bar is moved on by B * n a round.
    """
    mine = {way: how for way, how in ways.items() if way != 'shift' or idx.size(1) + n > model.config.block_size}
    seconds, tokens = {way: [] for way in mine}, {}
    bar.set_description(f'{B} x {n}')
    for repeat in range(1 + repeats):
        for way, how in mine.items():
            together = B if how else 1
            synchronize(dev)
            t0 = time.perf_counter()
            with amp:
                parts = [model.generate(idx, n, temperature=0, num_samples=together, **how) for _ in range(B // together)]
            synchronize(dev)
            seconds[way] += [time.perf_counter() - t0] if repeat else []
            tokens[way] = torch.cat(parts)
        bar.update(B * n)
    medians = {way: statistics.median(runs) for way, runs in seconds.items()}
    exact = [way for way in mine if way != 'shift' and 'bits' not in way]
    return dict(decoder=ways['decoder']['decoder'].name, tok_per_s={way: B * n / s for way, s in medians.items()},
                speedup={way: medians['no cache'] / s for way, s in medians.items()}, runs_s=seconds,
                differing=[way for way in exact if not torch.equal(tokens[way], tokens['no cache'])])


def draw(rows, path, title):
    """Speed-up against length, measured and by positions computed. rows: those of bench.py's generate mode."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    cases = list(dict.fromkeys((row['shape'], row['samples']) for row in rows))
    fig, axes = plt.subplots(1, len(cases), figsize=(5.5 * len(cases), 4.2), squeeze=False, layout='constrained')
    for ax, (name, B) in zip(axes[0], cases):
        mine = [row for row in rows if (row['shape'], row['samples']) == (name, B)]
        mine.sort(key=lambda row: row['new_tokens'])
        block = mine[0]['block_size']
        labels = {'cache': 'cache', 'decoder': 'cache + decoder', 'shift': 'cache + decoder, when_full=shift'}
        for way, label in labels.items():
            points = [(row['new_tokens'], row['speedup'][way]) for row in mine if way in row['speedup']]
            ax.plot(*zip(*points), marker='o', label=label) if points else None
        if B == 1:
            every = range(1, mine[-1]['new_tokens'] + 1)
            counted = [fed_tokens(k, block, False) / fed_tokens(k, block, True) for k in every]
            ax.plot(every, counted, color='0.6', ls=':', label='positions computed')
        ax.axvline(block - PROMPT, color='0.6', lw=0.8)
        ax.set(xlabel=f'new tokens after a prompt of {PROMPT}; vertical line: the context is full', yscale='log',
               title=f"{name}, {B} sample{'s' * (B > 1)}")
        ax.set_yticks([1, 2, 5, 10, 20, 50, 100], ['1x', '2x', '5x', '10x', '20x', '50x', '100x'])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    axes[0, 0].set_ylabel('speed-up over no cache')
    fig.suptitle(title, fontsize=9)
    with replacing(path) as f:
        fig.savefig(f, format='png', dpi=110)
    plt.close(fig)
