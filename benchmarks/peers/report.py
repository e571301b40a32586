"""The tables and the picture of the rows of `race`."""
from itertools import groupby

from benchmarks.peers.ours import Decoder
from benchmarks.peers.race import OURS
from training.plotting import plt, save

NEAR_TIE = 1e-4  # logits that differ by less than this are decided by rounding, in float32


def table(rows):
    """Rows as text, batch by batch."""
    lines = []
    for (shape, batch), mine in groupby(rows, key=lambda row: (row['shape'], row['batch'])):
        mine = list(mine)
        lines += [f"\n{shape}, batch {batch}: {rates(mine[0])}",
                  f"{'engine':<22}{'weights':<10}{'tok/s':>9}{'of floor':>10}{'new':>5}  {'how':<22}tokens"]
        lines += [f"{row['engine']:<22}{row['weights']:<10}{row['tok_per_s']:>9,.0f}{row['of_floor']:>10.0%}"
                  f"{row['new_tokens']:>5}  {row['how']:<22}{verdict(row)}" for row in mine]
        lines += over_the_others(mine)
    return '\n'.join(lines)


def prefill_table(rows):
    """Rows of one new token each as text, by the length of the prompt."""
    lines = []
    for (shape, batch, T), mine in groupby(rows, key=lambda row: (row['shape'], row['batch'], row['prompt'])):
        mine = list(mine)
        lines += [f"\n{shape}, the first token of {batch} prompt{'s' * (batch > 1)} of {T}: {rates(mine[0])}",
                  f"{'engine':<22}{'weights':<10}{'ms':>9}{'prompt tok/s':>14}{'of floor':>10}  {'how':<22}token"]
        lines += [f"{row['engine']:<22}{row['weights']:<10}{1e3 * row['seconds']:>9,.1f}"
                  f"{batch * T / row['seconds']:>14,.0f}{row['of_floor']:>10.0%}  {row['how']:<22}{verdict(row)}"
                  for row in mine]
        lines += over_the_others(mine)
    return '\n'.join(lines)


def rates(row):
    return f"reading {row['read_bytes_per_s'] / 1e9:.0f} GB/s, multiplying {row['flops'] / 1e9:.0f} GFLOP/s"


def over_the_others(rows):
    """Lines: how many times as fast the decoder is as the best of all other rows with the same weights."""
    lines = []
    for weights in ('float32', 'int8'):
        mine = [row for row in rows if (row['engine'], row['weights']) == (Decoder.name, weights)]
        others = [row for row in rows if row['engine'] != Decoder.name and row['weights'] == weights]
        if mine and others:
            best = max(others, key=lambda row: row['tok_per_s'])
            lines.append(f"{weights}: {Decoder.name} over {best['engine']}, the best other way: "
                         f"{mine[0]['tok_per_s'] / best['tok_per_s']:.2f}x")
    return lines


def verdict(row):
    """Are the tokens of a row ours?"""
    if row['first_difference'] is None:
        return f"the same {row['compared']}"
    if not row['should_be_ours']:
        return f"the same {row['first_difference']}, then others"
    where = f"at {row['first_difference']}, {row['gap']:.1e} below the best logit"
    return f"near tie {where}" if abs(row['gap']) < NEAR_TIE else f"DIFFERENT {where}"


def plot(rows, title, path):
    """Bars of tokens a second: a row of pictures for each shape, a column for each batch."""
    shapes, batches = (list(dict.fromkeys(row[key] for row in rows)) for key in ('shape', 'batch'))
    size = 5 * len(batches), 3.2 * len(shapes) + 0.5
    fig, axes = plt.subplots(len(shapes), len(batches), figsize=size, squeeze=False, layout='constrained')
    ours = {engine.name for engine in OURS}
    for i, shape in enumerate(shapes):
        for j, batch in enumerate(batches):
            ax, mine = axes[i, j], [row for row in rows if (row['shape'], row['batch']) == (shape, batch)]
            y = range(len(mine), 0, -1)
            bars = ax.barh(y, [row['tok_per_s'] for row in mine],
                           color=['C0' if row['engine'] in ours else '0.7' for row in mine])
            ax.bar_label(bars, [f"{row['tok_per_s']:,.0f}" for row in mine], padding=2, fontsize=7)
            ax.set_yticks(y, [f"{row['engine']}, {row['weights']}" for row in mine], fontsize=7)
            ax.set_title(f'{shape}, batch {batch}', fontsize=9)
            ax.tick_params(axis='x', labelsize=7)
            ax.margins(x=0.15)
    fig.suptitle(f'greedy tokens/s, {title}', fontsize=9)
    save(fig, path)
