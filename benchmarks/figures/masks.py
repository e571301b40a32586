"""
The picture of which keys each query sees: when a prompt of 4 is prefilled, and when a chunk of 3 follows on the cache.
"""
import torch

from training.plotting import plt, save

PAST, T = 4, 3
PANELS = [
    ('prefill: T_q = T_k = 4\nis_causal=True', torch.ones(PAST, PAST).tril(), 0),
    (f'a chunk of {T} on {PAST} cached\nis_causal=True: top-left, WRONG', torch.ones(T, PAST + T).tril(), PAST),
    (f'a chunk of {T} on {PAST} cached\nlower right: what attend() does', torch.ones(T, PAST + T).tril(PAST), PAST),
    (f'one token on {PAST + T} cached\nno mask at all', torch.ones(1, PAST + T + 1), PAST + T),
]


def draw(path):
    fig, axes = plt.subplots(1, 4, figsize=(11, 2.7), layout='constrained',
                             width_ratios=[mask.shape[1] for _, mask, _ in PANELS])
    for ax, (title, mask, start) in zip(axes, PANELS):
        n_queries, n_keys = mask.shape
        ax.imshow(mask, cmap='Blues', vmin=0, vmax=1.6)
        ax.set_title(title, fontsize=9, color='C3' if 'WRONG' in title else 'black')
        ax.set_xticks(range(n_keys), [f'k{i}' for i in range(n_keys)], fontsize=8)
        ax.set_yticks(range(n_queries), [f'q{start + i}' for i in range(n_queries)], fontsize=8)
        ax.set_xticks([i + 0.5 for i in range(n_keys - 1)], minor=True)
        ax.set_yticks([i + 0.5 for i in range(n_queries - 1)], minor=True)
        ax.grid(which='minor', color='white', lw=2)
        ax.tick_params(which='both', length=0)
        if 0 < start < n_keys:
            ax.axvline(start - 0.5, color='0.4', ls=':')
    save(fig, path)
