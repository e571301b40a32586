"""
Draws masks.png: who may look at whom when a prompt of 4 is prefilled, and when a chunk of 3 follows on a warm cache.

    python benchmarks/draw_masks.py
"""
import os

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt
import torch

PAST, T = 4, 3
PANELS = [
    ('prefill: T_q = T_k = 4\nis_causal=True', torch.ones(PAST, PAST).tril(), 0),
    (f'a chunk of {T} on {PAST} cached\nis_causal=True: top-left, WRONG', torch.ones(T, PAST + T).tril(), PAST),
    (f'a chunk of {T} on {PAST} cached\nlower right: what attend() does', torch.ones(T, PAST + T).tril(PAST), PAST),
    (f'one token on {PAST + T} cached\nno mask at all', torch.ones(1, PAST + T + 1), PAST + T),
]

fig, axes = plt.subplots(1, 4, figsize=(11, 2.7), layout='constrained', width_ratios=[p[1].shape[1] for p in PANELS])
for ax, (title, mask, start) in zip(axes, PANELS):
    ax.imshow(mask, cmap='Blues', vmin=0, vmax=1.6)
    ax.set_title(title, fontsize=9, color='C3' if 'WRONG' in title else 'black')
    ax.set_xticks(range(mask.shape[1]), [f'k{i}' for i in range(mask.shape[1])], fontsize=8)
    ax.set_yticks(range(mask.shape[0]), [f'q{start + i}' for i in range(mask.shape[0])], fontsize=8)
    ax.set_xticks([i + 0.5 for i in range(mask.shape[1] - 1)], minor=True)
    ax.set_yticks([i + 0.5 for i in range(mask.shape[0] - 1)], minor=True)
    ax.grid(which='minor', color='white', lw=2)
    ax.tick_params(which='both', length=0)
    if 0 < start < mask.shape[1]:
        ax.axvline(start - 0.5, color='0.4', ls=':')
path = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'masks.png')
fig.savefig(path, dpi=110)
print(path)
