"""
The load of a server: 8 sequences of different lengths; every few steps one ends, and another begins with its prompt.

    python bench.py --mode=caches --only=joining

The pages on the compiled step, over the pages in PyTorch. A prompt that begins shares a step with the next tokens of
the others. Each round has new prompts, so that no pages of the round before are found again.
"""
import statistics
import time
from contextlib import nullcontext

import torch

import decode
import kvcache
from benchmarks import rounds
from benchmarks.caches.requests import prompt_lengths
from benchmarks.caches.steps import KERNEL, PYTORCH, random_tokens, where
from benchmarks.shapes import config_of, model_with_varied_text

MINUTES = 2
NAMES, BATCHES = ('S', 'M'), (8,)
EVERY = 4  # steps from one end to the next
N_STEPS = {'S': 64, 'M': 32, 'L': 8}
GOALS = {'S': 8.0, 'M': 3.0}


def run(names, batches, contexts, bias, repeats):
    rows = []
    print(f"\nsequences that join and leave, one every {EVERY} steps, through pages")
    for name in names or NAMES:
        model = model_with_varied_text(config_of(name, bias))
        for B in batches or BATCHES:
            row = race(name, model, B, repeats)
            print(line(row), flush=True)
            rows.append(row)
    return rows


def line(row):
    figures = ', '.join(f"{way} {figure:,.0f} tok/s" for way, figure in row['tok_per_s'].items())
    tokens = 'the same tokens' if row['same_tokens'] else 'DIFFERENT tokens'
    return (f"{row['shape']}, {row['sequences']} at once, prompts of {row['prompts'][0]} to {row['prompts'][-1]}: "
            f"{figures};{rounds.line(row['speedup'], row['goal'])}  {tokens}")


def race(name, model, B, repeats):
    """One row: tokens a second of both ways, and `speedup`, the time in PyTorch over that of the kernel."""
    decoder, n_steps = decode.best(model, B), N_STEPS[name]
    lengths, texts = prompt_lengths(model.config, B, B * EVERY), {}
    caches = {KERNEL: kvcache.make_cache(model, 'paged', B, decoder=decoder),
              PYTORCH: kvcache.make_cache(model, 'paged', B)}

    def way(kind):
        uses = decoder.exclusive_use if caches[kind].decoder else nullcontext

        def seconds(round_):
            prompts = [random_tokens(model, n, seed=round_ * 1000 + i) for i, n in enumerate(lengths * n_steps)]
            with uses():
                taken, texts[kind] = serve(caches[kind], prompts, B, n_steps)
            return taken
        return seconds
    seconds = rounds.take_turns({kind: way(kind) for kind in caches}, repeats, f'{name}: joining and leaving')
    return dict(shape=name, sequences=B, steps=n_steps, every=EVERY, prompts=lengths, on=where(caches[KERNEL]),
                tok_per_s={kind: B * n_steps / statistics.median(runs) for kind, runs in seconds.items()},
                speedup=rounds.ratio(seconds, PYTORCH, KERNEL), goal=GOALS.get(name), runs_s=seconds,
                same_tokens=texts[KERNEL] == texts[PYTORCH])


@torch.inference_mode()
def serve(cache, prompts, B, n_steps):
    """
    (seconds, texts) of n_steps steps of B sequences. Sequence i < B ends after (i + 1) * EVERY steps, later ones after
    B * EVERY; each is followed by the next of prompts, (T,) each. The step that feeds the first B prompts is not timed.
    texts: the greedy tokens of all sequences, in the order in which they began.
    """
    live, left, texts = [], [], []  # live: (handle, its text); left: how many tokens until it ends
    for i in range(B):
        live.append((cache.new(), []))
        left.append(1 + (i + 1) * EVERY)
        texts.append(live[-1][1])
    fed, starts = prompts[:B], [0] * B
    for n in range(n_steps + 1):
        if n == 1:
            began = time.perf_counter()
        newest = cache.step([handle for handle, _ in live], starts, fed).argmax(dim=-1)
        starts = [start + len(tokens) for start, tokens in zip(starts, fed)]
        fed = list(newest.split(1))
        for i, token in enumerate(newest.tolist()):
            live[i][1].append(token)
            left[i] -= 1
            if left[i] == 0:
                cache.free(live[i][0])
                live[i], left[i] = (cache.new(), []), B * EVERY
                starts[i], fed[i] = 0, prompts[len(texts)]
                texts.append(live[i][1])
    seconds = time.perf_counter() - began
    for handle, _ in live:
        cache.free(handle)
    return seconds, texts
