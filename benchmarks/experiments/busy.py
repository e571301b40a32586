"""
The speed of the decoder beside processes that keep the cores busy, and whether its choice of threads loses there.

    python benchmarks/busy.py           S, M and L, one and ten sequences, 0, 1 and 2 busy neighbours, 20 runs of each
    python benchmarks/busy.py --shape=S --neighbours=0,1 --runs=5

Each run is timed with one thread, with all of them, and with the number that the decoder chooses by timing its steps;
the three take turns. The tables have the slowest and the median run of the choice, the fair share, and the model's own
cached step; then the same runs beside those with fixed numbers. The fair share is the rate without neighbours times
cores / (cores + neighbours): the part of the cores that one process gets if all get equal parts.
"""
import math
import os
import statistics
import subprocess
import sys
import time

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the repository

import torch
from tqdm import tqdm

import configurator
import decode
from benchmarks.report import describe_machine, write_json
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
NEIGHBOUR = "while True:\n    pass"
CHOSEN, MODEL = 'chosen', 'model'
LOSES = 0.95  # a choice loses if its median is below that part of the best fixed number's
MODEL_RUNS = 5


def main(config):
    torch.manual_seed(0)
    counts = [int(n) for n in neighbours.split(',')]
    cells = [(name, int(B)) for name in shape.split(',') for B in batches.split(',')]
    if set(shape.split(',')) - set(SHAPES) or runs < 1:
        raise ValueError(f"shape must be any of {', '.join(SHAPES)} and runs at least 1, not {shape!r} and {runs}")
    fixed = sorted({1, n_cores()})
    minutes = len(counts) * len(cells) * ((1 + len(fixed)) * runs + min(runs, MODEL_RUNS)) * 1.5 * seconds / 60
    print(f"expected time: about {math.ceil(minutes)} minutes", file=sys.stderr)
    models = {name: GPT(SHAPES[name]).eval() for name, _ in cells}
    cases = {}
    for name, B in cells:
        idx = torch.randint(SHAPES[name].vocab_size, (B, PROMPT))
        for n in (CHOSEN, *fixed):
            cases[name, B, n] = models[name], idx, decode.best(models[name], B, weights, None if n == CHOSEN else n)
        cases[name, B, MODEL] = models[name], idx, None
    for case in cases.values():  # a warm-up
        rate(*case, 8)
    rates = {}
    for n in counts:
        busy = [subprocess.Popen([sys.executable, '-c', NEIGHBOUR]) for _ in range(n)]
        try:
            time.sleep(0.5)
            for run in tqdm(range(runs), desc=f'{n} neighbours', disable=None):
                for case, what in cases.items():
                    if case[2] != MODEL or run < MODEL_RUNS:
                        rates.setdefault((n, *case), []).append(rate(*what, LENGTHS[case[0]]))
        finally:
            for process in busy:
                process.kill()
                process.wait()
    report([row(rates, counts, n, name, B, fixed) for name, B in cells for n in counts], fixed)


def rate(model, idx, decoder, n_new):
    """Tokens a second of generating n_new greedy tokens after the prompts idx, repeated for at least `seconds`."""
    began, n = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        model.generate(idx, n_new, temperature=0, use_cache=True, decoder=decoder)
        n += n_new * len(idx)
    return n / (time.perf_counter() - began)


def row(rates, counts, n, name, B, fixed):
    """The figures of one case beside n neighbours. rates: {(neighbours, shape, sequences, threads): tok/s of runs}"""
    cores, mine, plain = n_cores(), rates[n, name, B, CHOSEN], rates[n, name, B, MODEL]
    quiet = statistics.median(rates[min(counts), name, B, CHOSEN])
    fair = quiet * cores / (cores + n)
    of_threads = {threads: statistics.median(rates[n, name, B, threads]) for threads in fixed}
    best = max(of_threads, key=of_threads.get)
    return dict(shape=name, batch=B, neighbours=n, slowest=min(mine), median=statistics.median(mine), fair_share=fair,
                slowest_of_fair_share=min(mine) / fair, model=statistics.median(plain), threads=of_threads,
                best_threads=best, chosen_of_best=statistics.median(mine) / of_threads[best], runs=mine,
                runs_of_threads={threads: rates[n, name, B, threads] for threads in fixed})


def report(rows, fixed):
    """Print the tables and write the JSON file."""
    print(f"{n_cores()} cores, {torch.__version__}, {weights}; tokens/s of {runs} runs\n")
    print("| shape | sequences | neighbours | slowest | median | fair share | slowest / fair share | model |")
    print("|---|---|---|---|---|---|---|---|")
    for r in rows:
        print(f"| {r['shape']} | {r['batch']} | {r['neighbours']} | {r['slowest']:,.0f} | {r['median']:,.0f} "
              f"| {r['fair_share']:,.0f} | {r['slowest_of_fair_share']:.2f} | {r['model']:,.0f} |")
    print(f"\n| shape | sequences | neighbours | {' | '.join(f'{n} thread' + 's' * (n > 1) for n in fixed)} | chosen "
          "| chosen / best |\n" + "|---" * (5 + len(fixed)) + "|")
    for r in rows:
        of_threads = ' | '.join(f"{r['threads'][n]:,.0f}" for n in fixed)
        print(f"| {r['shape']} | {r['batch']} | {r['neighbours']} | {of_threads} | {r['median']:,.0f} "
              f"| {r['chosen_of_best']:.2f}{' loses' if r['chosen_of_best'] < LOSES else ''} |")
    losing = [r for r in rows if r['chosen_of_best'] < LOSES]
    print(f"\nThe choice loses more than {1 - LOSES:.0%} to the best fixed number of threads in {len(losing)} of "
          f"{len(rows)} cases.")
    write_json(json, dict(machine=describe_machine('cpu'), weights=weights, rows=rows))


if __name__ == '__main__':
    configurator.run(main)
