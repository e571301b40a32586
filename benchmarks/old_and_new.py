"""
Is this work tree as fast as another one? Both are timed in turns, in one run.

    git worktree add ../old-tree COMMIT
    python benchmarks/old_and_new.py --old=../old-tree
    python benchmarks/old_and_new.py --old=../old-tree --only=kernel --rounds=20

One process for each tree builds the same models with the same seeds, then the two take turns, case by case. The table
has the median times, and the median over the rounds of time(new) / time(old): below 1 the new tree is faster. About 10
minutes with the default settings on two cores.
"""
import os
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = ROOT  # not this folder: modules of both trees have the names of its files

import json as json_format  # `json` is a setting

from tqdm import tqdm

import configurator
from benchmarks.report import write_json
from benchmarks.shapes import SHAPES

old = ''     # the folder of the tree to compare this one with
only = ''    # measure only cases with this text in their names
rounds = 8   # of all cases, taking turns; the first one warms up and is dropped
json = ''    # a file for the figures

CONFIG_FIELDS = 'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd'  # those that every version of GPTConfig has


def main(config):
    if not old or not os.path.exists(os.path.join(old, 'model.py')):
        raise ValueError(f"--old must be the folder of another work tree, with a model.py in it, not {old!r}")
    if rounds < 2:
        raise ValueError(f"rounds must be at least 2, not {rounds}: the first one is a warm-up")
    workers = {}
    try:
        for tree, folder in (('old', old), ('new', ROOT)):
            workers[tree] = Worker(folder)
        seconds = race(workers)
    finally:
        for worker in workers.values():
            worker.end()
    print(table(seconds))
    write_json(json, seconds)


class Worker:
    """A process that runs the code of one tree. cases: the names of what it can time."""

    def __init__(self, folder):
        worker = os.path.join(ROOT, 'benchmarks', 'timed_tree.py')
        shapes = {name: {field: getattr(c, field) for field in CONFIG_FIELDS} for name, c in SHAPES.items()}
        command = sys.executable, worker, json_format.dumps(shapes), only
        self.process = subprocess.Popen(command, cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.cases = self.answer()

    def seconds(self, case):
        print(case, file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(f"the process in {old} or in {ROOT} has ended with an error: see its message above")
        return json_format.loads(line)

    def end(self):
        self.process.kill()
        self.process.wait()


def race(workers):
    """Time every case in every tree, in turns: {case: {'old': seconds of each round, 'new': ...}}."""
    cases = workers['new'].cases
    if cases != workers['old'].cases or not cases:
        raise ValueError(f"the trees have no common cases with {only!r} in their names: {workers['old'].cases} in the "
                         f"old one, {cases} in the new one")
    seconds = {case: dict(old=[], new=[]) for case in cases}
    for n in tqdm(range(rounds), desc='rounds', disable=None):
        for case in cases:
            for tree in ('old', 'new') if n % 2 else ('new', 'old'):  # neither is always the first
                taken = workers[tree].seconds(case)
                if n:
                    seconds[case][tree].append(taken)
    return seconds


def table(seconds):
    """The figures of `race` as a Markdown table."""
    lines = ["| case | old, ms | new, ms | new / old | of single rounds |", "|---|---|---|---|---|"]
    for case, times in seconds.items():
        ratios = [after / before for before, after in zip(times['old'], times['new'])]
        medians = [1e3 * statistics.median(times[tree]) for tree in ('old', 'new')]
        lines.append(f"| {case} | {medians[0]:,.1f} | {medians[1]:,.1f} | {statistics.median(ratios):.3f} "
                     f"| {min(ratios):.3f} to {max(ratios):.3f} |")
    return '\n'.join(lines)


if __name__ == '__main__':
    configurator.run(main)
