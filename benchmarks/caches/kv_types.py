"""
A step with a long context: keys and values in float32, bfloat16 and int8, with int8 weights.

    python bench.py --mode=caches --only=kv_types

Through pages on the compiled step. With 1,000 tokens L reads 124 MB of weights and, in float32, 74 MB of keys and
values for each sequence.
"""
import statistics

import torch

import decode
import kvcache
from benchmarks import rounds
from benchmarks.caches.steps import race_all, random_tokens, steps_of_cache, timed, where

MINUTES = 4
NAMES, BATCHES, CONTEXT = ('L',), (1, 8), 1000
N_STEPS = 16
TYPES = 'float32', 'bfloat16', 'int8'
GOALS = {'int8': 1.15}


def run(names, batches, contexts, bias, repeats):
    print(f"\nkeys and values in fewer bits, int8 weights\n{'shape':<6}{'batch':>6}{'context':>8}  {'type':<10}"
          f"{'on':<9}{'ms':>9}{'speed-up':>11}")
    return race_all(race, line, dict.fromkeys(names or NAMES, contexts or [CONTEXT]), batches or BATCHES, bias, repeats)


def line(row):
    return (f"{row['shape']:<6}{row['batch']:>6}{row['context']:>8}  {row['type_kv']:<10}{row['on']:<9}"
            f"{1e3 * row['step_s']:>9.3f}{rounds.line(row['speedup'], row['goal'])}  "
            f"off by {row['difference']:.1e} of the logits' spread")


@torch.inference_mode()
def race(name, model, B, T, repeats):
    """A dict a type, for JSON. speedup: the time with float32 over that with this type."""
    decoder = decode.best(model, B, 'int8')
    n = min(N_STEPS, model.config.block_size - T - 3)
    texts = random_tokens(model, B, T + 3 + n)
    caches = {kind: kvcache.KINDS['paged'](model, B, kind, decoder) for kind in TYPES}
    steps = {kind: steps_of_cache(cache, texts, T) for kind, cache in caches.items()}
    ways = {kind: timed(step, n, caches[kind].decoder) for kind, step in steps.items()}
    seconds = rounds.take_turns(ways, repeats, f'{name}: {B} sequences of {T}')
    logits = {kind: [step(i) for i in range(3 + n)][-1] for kind, step in steps.items()}
    exact = logits['float32']
    return [dict(shape=name, batch=B, context=T, steps=n, weights='int8', type_kv=kind, on=where(caches[kind]),
                 step_s=statistics.median(runs),
                 speedup=rounds.ratio(seconds, 'float32', kind), goal=GOALS.get(kind), runs_s=runs,
                 difference=((logits[kind] - exact).std() / exact.std()).item()) for kind, runs in seconds.items()]
