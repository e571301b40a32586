"""
The speed of the decoder beside processes that keep the cores busy, and whether its choice of threads loses there.

    python benchmarks/experiments/busy.py         S, M and L, one and ten sequences, 0, 1 and 2 busy neighbours
    python benchmarks/experiments/busy.py --shape=S --neighbours=0,1 --runs=5

Each run is timed with one thread, with all of them, with the number that the decoder chooses by timing its steps, and
by the model's own cached step; they take turns. The fair share is the rate without neighbours times
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
    models = {name: GPT(SHAPES[name]).eval() for name, _ in cells}
    cases = [case_of(models[name], name, B, threads) for name, B in cells for threads in (CHOSEN, *fixed, MODEL)]
    quiet, rows = {}, []  # quiet: {(shape, batch): the rate beside the fewest neighbours}
    for n in counts:
        with busy(n):
            measured = take_turns(cases, runs, f'{n} neighbours', seconds)
        for cell in cells:
            mine = {m.case.labels['threads']: [1 / s for s in m.runs] for m in measured
                    if m.case.labels['cell'] == cell}
            rate = quiet.setdefault(cell, statistics.median(mine[CHOSEN]))
            rows.append(row(*cell, n, mine, rate * n_cores() / (n_cores() + n)))
    rows.sort(key=lambda r: ('SML'.index(r['shape']), r['batch']))
    print(f"{n_cores()} cores, {describe_machine('cpu')}, {weights}; tokens/s of {runs} runs\n")
    print(table(rows, 'shape batch neighbours threads median chosen_of_best slowest fair_share slowest_of_fair_share '
                      'model'))
    losing = [r for r in rows if r['chosen_of_best'] < LOSES]
    print(f"\nThe choice loses more than {1 - LOSES:.0%} to the best fixed number of threads in {len(losing)} of "
          f"{len(rows)} cases.")
    write_json(json, dict(machine=describe_machine('cpu'), weights=weights, rows=rows))


def case_of(model, name, B, threads):
    """A `Case` of one token of a generation with a fixed or the CHOSEN number of threads, or by the MODEL itself."""
    idx, n_new = torch.randint(model.config.vocab_size, (B, PROMPT)), LENGTHS[name]
    decoder = None if threads == MODEL else decode.best(model, B, weights, None if threads == CHOSEN else threads)
    return Case(dict(cell=(name, B), threads=threads), lambda: model.generate(
        idx, n_new, temperature=0, use_cache=True, decoder=decoder), per=B * n_new)


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


def row(name, B, n, rates, fair):
    """
    The figures of one shape and batch beside n neighbours. rates: {threads: tokens a second of each run}. fair: the
    fair share.
    """
    mine = rates.pop(CHOSEN)
    median, model = statistics.median(mine), statistics.median(rates.pop(MODEL))
    of_threads = {str(threads): statistics.median(runs) for threads, runs in rates.items()}
    best = max(of_threads, key=of_threads.get)
    return dict(shape=name, batch=B, neighbours=n, slowest=min(mine), median=median, fair_share=fair,
                slowest_of_fair_share=min(mine) / fair, model=model, threads=of_threads, best_threads=best,
                chosen_of_best=median / of_threads[best], runs=mine, runs_of_threads=rates)


if __name__ == '__main__':
    configurator.run(main)
