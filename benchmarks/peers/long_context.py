"""
A step after a long prompt, with keys and values in fewer bits: our pages beside llama.cpp's cache, weights in 8 bits.

    python bench.py --mode=peers --only=long_context

llama.cpp keeps float16 by default; q8_0 has a scale for 32 numbers, as our int8. All engines use all threads. Each
reads the prompts once, untimed. A round goes back to their end and generates the same number of tokens in every cache.
"""
import statistics
import time

import torch

from benchmarks import rounds
from benchmarks.peers.llamacpp import LlamaCpp
from benchmarks.peers.ours import Pages
from benchmarks.peers.race import random_prompts
from benchmarks.shapes import config_of, model_with_varied_text

MINUTES = 6
NAMES, BATCHES, LENGTH = ('L',), (1, 8), 1000
N_NEW, N_WARM = 16, 2
CACHES = [(Pages, kind) for kind in ('float32', 'bfloat16', 'int8')] + [
    (LlamaCpp, kind) for kind in ('float32', 'float16', 'q8_0')]
GOAL = 1.15  # our float32 over our int8


def run(names, batches, lengths, bias, repeats, max_seconds):
    """lengths: of the prompts."""
    rows = []
    for name in names or NAMES:
        model = model_with_varied_text(config_of(name, bias))
        for B in batches or BATCHES:
            for T in lengths or [LENGTH]:
                mine = race(name, model, random_prompts(model, B, T), repeats)
                print(table(mine), flush=True)
                rows += mine
    return rows


def race(name, model, prompts, repeats):
    """A dict a cache, for JSON. speedup: the time with float32 keys in the same engine over that with these."""
    (B, T), threads = prompts.shape, torch.get_num_threads()
    n = min(N_NEW, model.config.block_size - T - N_WARM)
    if n < 1:
        raise ValueError(f"prompts of {T} leave no room for {N_WARM + 1} new tokens in {model.config.block_size}: "
                         "choose shorter ones in lengths")
    engines = {(kind, kv): kind(model, 'int8', threads, kv=kv) for kind, kv in CACHES if not kind.missing()}
    first = {key: engine.begin(prompts) for key, engine in engines.items()}

    def way(key):
        def seconds(round_):
            newest = engines[key].go_on(first[key], T, N_WARM)[:, -1]
            began = time.perf_counter()
            engines[key].go_on(newest, T + N_WARM, n)
            return (time.perf_counter() - began) / n
        return seconds
    seconds = rounds.take_turns({key: way(key) for key in engines}, repeats, f'{name}: {B} x {T}')
    return [dict(shape=name, batch=B, context=T, engine=kind.name, type_kv=kv, weights='int8', new_tokens=n,
                 threads=threads, step_s=statistics.median(runs),
                 speedup=rounds.ratio(seconds, (kind, 'float32'), (kind, kv)),
                 goal=GOAL if (kind, kv) == (Pages, 'int8') else None, runs_s=runs)
            for (kind, kv), runs in seconds.items()]


def table(rows):
    """The rows of one race as text."""
    first = rows[0]
    lines = [f"\n{first['shape']}, {first['batch']} x {first['context']} tokens of context, weights in 8 bits",
             f"{'engine':<12}{'keys, values':<14}{'ms a step':>10}{'tok/s':>9}  over its float32"]
    lines += [f"{row['engine']:<12}{row['type_kv']:<14}{1e3 * row['step_s']:>10.2f}"
              f"{row['batch'] / row['step_s']:>9,.0f}  {rounds.line(row['speedup'], row['goal'])}" for row in rows]
    return '\n'.join(lines)
