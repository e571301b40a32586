"""
The speed of the decoder beside processes that keep the cores busy, and whether its choice of threads loses there.

    python bench.py --mode=busy
    python bench.py --mode=busy --shape=S --repeats=20

Each run is timed with one thread, with all of them, with the number that the decoder chooses by timing its steps, and
by the model's own cached step; they take turns. The fair share is the rate without neighbours times
cores / (cores + neighbours): the part of the cores that one process gets if all get equal parts.
"""
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager

import torch

import decode
from benchmarks.harness import Case, Part, take_turns
from benchmarks.shapes import PROMPT, model_of
from decode.kernel.threads import n_cores

CPU_ONLY = "the threads of the decoder are compared"
NEIGHBOURS = 0, 1, 2   # processes that do nothing but compute
LENGTHS = {'S': 122, 'M': 200, 'L': 16}  # new tokens of a generation, within the window
LEAST = 0.5            # seconds of a run
CHOSEN, MODEL = 'chosen', 'model'


def neighbours(asked):
    for name, B, _ in asked.combinations('SML', (1, 10)):
        model, rows = model_of(name, asked.bias), []
        cases = [case_of(model, name, B, threads) for threads in (CHOSEN, *sorted({1, n_cores()}), MODEL)]
        for n in NEIGHBOURS:
            with busy(n):
                measured = take_turns(cases, asked.repeats, f'{name}, {B}: {n} neighbours', LEAST)
            rates = {m.case.labels['threads']: [1 / s for s in m.runs] for m in measured}
            quiet = rows[0]['median'] if rows else statistics.median(rates[CHOSEN])
            rows.append(row(name, B, n, rates, quiet * n_cores() / (n_cores() + n)))
        yield rows


def case_of(model, name, B, threads):
    """A `Case` of one token of a generation with a fixed or the CHOSEN number of threads, or by the MODEL itself."""
    idx, n_new = torch.randint(model.config.vocab_size, (B, PROMPT)), LENGTHS[name]
    decoder = None if threads == MODEL else decode.best(model, B, threads=None if threads == CHOSEN else threads)
    return Case(dict(threads=threads), lambda: model.generate(
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


PARTS = dict(neighbours=Part(
    neighbours, 8, "tokens a second beside processes that keep the cores busy",
    'shape batch neighbours threads median chosen_of_best slowest fair_share slowest_of_fair_share model'))
