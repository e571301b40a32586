"""
A step of models with other positions, fewer heads of keys, or a window, over the step of the learned model of the size.

    python bench.py --mode=caches --only=kinds

Each kind takes turns with the learned model, with short and long contexts, on the decoder's tuples. All models have a
block_size of 1,024.
"""
import statistics
from dataclasses import replace

import torch

import decode
from benchmarks import rounds
from benchmarks.caches.steps import random_tokens, steps_of_tuples, timed
from benchmarks.shapes import config_of
from model import GPT

MINUTES = 8
NAMES, BATCHES, CONTEXTS, BLOCK = ('M', 'L'), (1, 8), (32, 1000), 1024
N_STEPS = {'S': 64, 'M': 48, 'L': 12}
KINDS = {  # kind: settings of its GPTConfig
    'rope': dict(position='rope'),
    '2 kv heads': dict(n_kv_head=2),
    '1 kv head': dict(n_kv_head=1),
    'rope, window 256, 4 sinks': dict(position='rope', window=256, n_sink=4),
    'alibi': dict(position='alibi'),
}
GOAL = 1.05


def run(names, batches, contexts, bias, repeats):
    rows, sizes = [], [(B, T) for B in batches or BATCHES for T in contexts or CONTEXTS]
    print(f"\na decode step of other kinds of models\n{'shape':<6}{'batch':>6}{'context':>8}  {'kind':<27}"
          f"{'ms':>9}{'learned':>9}{'over it':>11}")
    for name in names or NAMES:
        config = replace(config_of(name, bias), block_size=BLOCK)
        learned = GPT(config).eval()
        for kind, settings in KINDS.items():
            model = GPT(replace(config, **settings)).eval()
            for B, T in sizes:
                rows.append(race(name, kind, learned, model, B, T, repeats))
                print(line(rows[-1]), flush=True)
    return rows


def line(row):
    ratio = rounds.line(row['over_learned'], row['goal'], at_most=True)
    return (f"{row['shape']:<6}{row['batch']:>6}{row['context']:>8}  {row['kind']:<27}"
            f"{1e3 * row['step_s']:>9.3f}{1e3 * row['learned_s']:>9.3f}  {ratio}")


@torch.inference_mode()
def race(name, kind, learned, model, B, T, repeats):
    """A row for JSON: a step of B sequences after T tokens. over_learned: its time over the learned model's."""
    n = min(N_STEPS[name], BLOCK - T - 3)
    decoders = {'learned': decode.best(learned, B), kind: decode.best(model, B)}
    texts = random_tokens(model, B, T + 3 + n)
    ways = {way: timed(steps_of_tuples(decoder, begun(decoder, texts, T), texts, T), n, decoder)
            for way, decoder in decoders.items()}
    seconds = rounds.take_turns(ways, repeats, f'{name}: {kind}, {B} x {T}')
    return dict(shape=name, batch=B, context=T, kind=kind, decoder=decoders[kind].name, steps=n,
                step_s=statistics.median(seconds[kind]), learned_s=statistics.median(seconds['learned']),
                over_learned=rounds.ratio(seconds, kind, 'learned'), goal=GOAL, runs_s=seconds)


def begun(decoder, texts, T):
    """
    The argument `begin` of `steps_of_tuples`. The first T tokens of texts[0] are read once, and copied to all rows.
    """
    B, window = len(texts), decoder.model.config.window
    kv_cache = rows_of(decoder(texts[:1, :T], None)[1], torch.zeros(B, dtype=torch.int64))
    # the rows of a cache that rolls may have moved, so each round begins with a copy
    return (lambda: rows_of(kv_cache, torch.arange(B))) if window else (lambda: kv_cache)


def rows_of(kv_cache, rows):
    """Copies of rows (n,) of the tuples of all layers, of any kind of cache."""
    return [tuple(each[rows] if isinstance(each, torch.Tensor) else each for each in layer) for layer in kv_cache]
