"""
A model with a window and sinks, far past its block_size: ten samples of 500 tokens, over no cache.

    python bench.py --mode=caches --only=rolling

The model is that of config/train_shakespeare_char_endless.py on a CPU. Without a cache each token is a full pass over
the whole text, "one by one" for one sample after another as nanoGPT draws them, "no cache" for all in one batch. All
of these passes are computed; nothing is extrapolated.
"""
import statistics
import time

import torch

import decode
import generation
import kvcache
from benchmarks import rounds
from benchmarks.caches.steps import random_tokens
from benchmarks.shapes import PROMPT, model_with_varied_text
from model import GPTConfig

MINUTES = 8
CONFIG = dict(block_size=128, vocab_size=65, n_layer=4, n_head=4, n_embd=128, position='rope', window=64, n_sink=4)
BATCH, N_NEW, GOAL = 10, 500, 60.0
ONE_BY_ONE, NO_CACHE, DECODER, PAGES = 'one by one', 'no cache', 'decoder', 'pages'


def run(names, batches, contexts, bias, repeats):
    """contexts: the numbers of new tokens."""
    model, rows = model_with_varied_text(GPTConfig(**CONFIG, bias=bias)), []
    for B in batches or [BATCH]:
        for n_new in contexts or [N_NEW]:
            mine = race(model, B, n_new, repeats)
            print(f"\na window of {CONFIG['window']} and {CONFIG['n_sink']} sinks, block_size {CONFIG['block_size']}: "
                  f"{B} x {n_new} tokens\n{'way':<12}{'tok/s':>9}{'over one by one':>17}")
            print('\n'.join(map(line, mine)), flush=True)
            rows += mine
    return rows


def line(row):
    tokens = 'the same tokens' if row['gap'] is None else f"another token {row['gap']:.1e} below the best logit"
    return f"{row['way']:<12}{row['tok_per_s']:>9,.0f}{rounds.line(row['speedup'], row['goal']):>17}  {tokens}"


def race(model, B, n_new, repeats):
    """A dict a way, for JSON. gap: see `gap_of`."""
    idx, decoder = random_tokens(model, B, PROMPT), decode.best(model, B)
    draw = {ONE_BY_ONE: lambda: torch.cat([model.generate(row, n_new, temperature=0) for row in idx.split(1)]),
            NO_CACHE: lambda: model.generate(idx, n_new, temperature=0),
            'cache': lambda: model.generate(idx, n_new, temperature=0, use_cache=True),
            DECODER: lambda: model.generate(idx, n_new, temperature=0, use_cache=True, decoder=decoder)}
    cache = kvcache.make_cache(model, 'paged', B, decoder=decoder)
    draw[PAGES] = lambda: generation.generate(model, idx, n_new, temperature=0, use_cache=True, cache=cache)
    tokens = {}

    def way(name):
        def seconds(round_):
            began = time.perf_counter()
            tokens[name] = draw[name]()
            return time.perf_counter() - began
        return seconds
    seconds = rounds.take_turns({name: way(name) for name in draw}, repeats, f'{B} x {n_new} tokens')
    on = {DECODER: decoder.name, PAGES: cache.name}
    return [dict(way=name, on=on.get(name, 'PyTorch'), samples=B, new_tokens=n_new, **CONFIG,
                 tok_per_s=B * n_new / statistics.median(runs), speedup=rounds.ratio(seconds, ONE_BY_ONE, name),
                 goal=GOAL if name == DECODER else None, gap=gap_of(model, tokens[name], tokens[ONE_BY_ONE]),
                 runs_s=runs) for name, runs in seconds.items()]


@torch.inference_mode()
def gap_of(model, tokens, exact):
    """How far below the best logit of the model is the first token that is not the exact one? None if none is."""
    rows, places = (tokens != exact).nonzero(as_tuple=True)
    if not len(rows):
        return None
    t, row = min(zip(places.tolist(), rows.tolist()))
    logits = model(exact[row, None, :t], use_cache=False)[0][0, -1]
    return (logits.max() - logits[tokens[row, t]]).item()
