"""
The speed of a decoder beside processes that keep the cores busy.

    python benchmarks/busy.py           S, M and L, one and ten sequences, 0, 1 and 2 busy neighbours, 20 runs of each
    python benchmarks/busy.py --shape=S --runs=5

The table has the slowest and the median run, the fair share, and the model's own cached step. The fair share
is the rate without neighbours times cores / (cores + neighbours): the part of the cores that one process gets if all
get equal parts.
"""
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
from benchmarks.report import write_json
from benchmarks.shapes import SHAPES
from decode.threads import n_cores
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


def main(config):
    torch.manual_seed(0)
    counts = [int(n) for n in neighbours.split(',')]
    cells = [(name, int(B)) for name in shape.split(',') for B in batches.split(',')]
    models = {name: GPT(SHAPES[name]).eval() for name, _ in cells}
    cases = {}
    for name, B in cells:
        decoder = decode.best(models[name], B, weights)
        for kind, step in ((decoder.name, decoder), ('model', None)):
            cases[name, B, kind] = models[name], torch.randint(SHAPES[name].vocab_size, (B, 6)), step
    for case in cases.values():  # a warm-up
        rate(*case, 8)
    rates = {}
    for n in counts:
        busy = [subprocess.Popen([sys.executable, '-c', NEIGHBOUR]) for _ in range(n)]
        try:
            time.sleep(0.5)
            for run in tqdm(range(runs), desc=f'{n} neighbours', disable=None):
                for case, what in cases.items():
                    if case[2] != 'model' or run < 5:
                        rates.setdefault((n, case), []).append(rate(*what, LENGTHS[case[0]]))
        finally:
            for process in busy:
                process.kill()
                process.wait()
    report(counts, cells, rates)


def rate(model, idx, decoder, n_new):
    """Tokens a second of generating n_new greedy tokens after the prompts idx, repeated for at least `seconds`."""
    began, n = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        model.generate(idx, n_new, temperature=0, use_cache=True, decoder=decoder)
        n += n_new * len(idx)
    return n / (time.perf_counter() - began)


def report(counts, cells, rates):
    """Print the table and write the JSON file. rates: {(neighbours, case): tokens a second of each run}."""
    rows, cores = [], n_cores()
    for name, B in cells:
        kinds = {case[2] for _, case in rates if case[:2] == (name, B)}
        ours = next(kind for kind in kinds if kind != 'model')
        quiet = statistics.median(rates[counts[0], (name, B, ours)])
        for n in counts:
            mine, plain = rates[n, (name, B, ours)], rates[n, (name, B, 'model')]
            fair = quiet * cores / (cores + n)
            rows.append(dict(shape=name, batch=B, neighbours=n, slowest=min(mine), median=statistics.median(mine),
                             fair_share=fair, slowest_of_fair_share=min(mine) / fair, model=statistics.median(plain),
                             runs=mine))
    print(f"{cores} cores, {torch.__version__}, {weights}; tokens/s of {runs} runs\n")
    print("| shape | sequences | neighbours | slowest | median | fair share | slowest / fair share | model |")
    print("|---|---|---|---|---|---|---|---|")
    for r in rows:
        print(f"| {r['shape']} | {r['batch']} | {r['neighbours']} | {r['slowest']:,.0f} | {r['median']:,.0f} "
              f"| {r['fair_share']:,.0f} | {r['slowest_of_fair_share']:.2f} | {r['model']:,.0f} |")
    write_json(json, rows)


if __name__ == '__main__':
    configurator.run(main)
