"""
The speed of the decoder beside processes that keep the cores busy, and whether its choice of threads loses there.

    python benchmarks/experiments/busy.py         S, M and L, one and ten sequences, 0, 1 and 2 busy neighbours
    python benchmarks/experiments/busy.py --shape=S --neighbours=0,1 --runs=5

Each run is timed with one thread, with all of them, with the number that the decoder chooses by timing its steps, and by
the model's own cached step; they take turns. The fair share is the rate without neighbours times
cores / (cores + neighbours): the part of the cores that one process gets if all get equal parts.
"""
import math
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager

sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the repository

import torch

import configurator
import decode
from benchmarks.harness import Case, describe_machine, table, take_turns, write_json
from benchmarks.shapes import PROMPT, SHAPES
from decode.kernel.threads import n_cores
from model import GPT

shape = 'S,M,L'        # shapes of bench.py
batches = '1,10'       # sequences at once
neighbours = '0,1,2'   # processes that do nothing but compute
runs = 20              # of each
weights = 'float32'    # as the decoder reads them
seconds = 0.5          # of one run, at least
json = ''              # a file for the figures

LENGTHS = {'S': 122, 'M': 200, 'L': 16}  # new tokens of a generation, within the window
CHOSEN, MODEL = 'chosen', 'model'
LOSES = 0.95  # a choice loses if its median is below that part of the best fixed number's


def main(config):
    torch.manual_seed(0)
    counts = [int(n) for n in neighbours.split(',')]
    cells = [(name, int(B)) for name in shape.split(',') for B in batches.split(',')]
    if set(shape.split(',')) - set(SHAPES) or runs < 1:
        raise ValueError(f"shape must be any of {', '.join(SHAPES)} and runs at least 1, not {shape!r} and {runs}")
    fixed = sorted({1, n_cores()})
    minutes = len(counts) * len(cells) * (2 + len(fixed)) * (runs + 1) * 1.5 * seconds / 60
    print(f"expected time: about {math.ceil(minutes)} minutes", file=sys.stderr)
    models, cases = {name: GPT(SHAPES[name]).eval() for name, _ in cells}, []
    for name, B in cells:
        idx = torch.randint(SHAPES[name].vocab_size, (B, PROMPT))
        for n in (CHOSEN, *fixed, MODEL):
            decoder = None if n == MODEL else decode.best(models[name], B, weights, None if n == CHOSEN else n)
            cases.append(Case(dict(cell=(name, B), threads=n), generating(models[name], idx, LENGTHS[name], decoder),
                              per=B * LENGTHS[name]))
    rows = []
    for n in counts:
        with busy(n):
            measured = take_turns(cases, runs, f'{n} neighbours', seconds)
        for cell in cells:
            mine = {m.case.labels['threads']: [1 / s for s in m.runs] for m in measured if m.case.labels['cell'] == cell}
            rows.append(row(*cell, n, mine, fixed, next((r for r in rows if (r['shape'], r['batch']) == cell), None)))
    report(rows, fixed)


def generating(model, idx, n_new, decoder):
    return lambda: model.generate(idx, n_new, temperature=0, use_cache=True, decoder=decoder)


@contextmanager
def busy(n):
    """n processes that compute inside."""
    processes = [subprocess.Popen([sys.executable, '-c', "while True:\n    pass"]) for _ in range(n)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def row(name, B, n, rates, fixed, quiet):
    """
    The figures of one shape and batch beside n neighbours. rates: {threads: tokens a second of each run}. quiet: the
    row with the fewest neighbours, None if it is this one.
    """
    mine = rates[CHOSEN]
    median, of_threads = statistics.median(mine), {threads: statistics.median(rates[threads]) for threads in fixed}
    fair, best = (quiet['median'] if quiet else median) * n_cores() / (n_cores() + n), max(fixed, key=of_threads.get)
    return dict(shape=name, batch=B, neighbours=n, slowest=min(mine), median=median, fair_share=fair,
                slowest_of_fair_share=min(mine) / fair, model=statistics.median(rates[MODEL]), threads=of_threads,
                best_threads=best, chosen_of_best=median / of_threads[best], runs=mine,
                runs_of_threads={threads: rates[threads] for threads in fixed})


def report(rows, fixed):
    """Print the table and write the JSON file."""
    print(f"{n_cores()} cores, {describe_machine('cpu')}, {weights}; tokens/s of {runs} runs\n")
    print(table(sorted(rows, key=lambda r: ('SML'.index(r['shape']), r['batch'])), {
        'shape': '{shape}', 'sequences': '{batch}', 'neighbours': '{neighbours}',
        **{f"{n} thread{'s' * (n > 1)}": lambda r, n=n: f"{r['threads'][n]:,.0f}" for n in fixed},
        'chosen': '{median:,.0f}', 'chosen / best': '{chosen_of_best:.2f}', 'slowest': '{slowest:,.0f}',
        'fair share': '{fair_share:,.0f}', 'slowest / fair': '{slowest_of_fair_share:.2f}', 'model': '{model:,.0f}',
        '': lambda r: 'loses' if r['chosen_of_best'] < LOSES else ''}))
    losing = [r for r in rows if r['chosen_of_best'] < LOSES]
    print(f"\nThe choice loses more than {1 - LOSES:.0%} to the best fixed number of threads in {len(losing)} of "
          f"{len(rows)} cases.")
    write_json(json, dict(machine=describe_machine('cpu'), weights=weights, rows=rows))


if __name__ == '__main__':
    configurator.run(main)
