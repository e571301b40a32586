"""
Times this work tree and an older version in turns, in one run.

    python benchmarks/old_and_new.py --old=HEAD~3                   a commit, which is unpacked in a temporary folder
    python benchmarks/old_and_new.py --old=../old-tree              another work tree
    python benchmarks/old_and_new.py --old=HEAD --only=default --rounds=20
    python benchmarks/old_and_new.py --old=HEAD --only=prefill

One process for each tree builds the same models with the same seeds, then the two take turns, case by case. The table
has the median times, and the median over the rounds of time(new) / time(old): below 1 the new tree is faster. The
cases are generations with the decoder (kernel), prefills with it, passes and training of the model.
"""
import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = ROOT  # not this folder: modules of both trees have the names of its files

import json as json_format  # `json` is a setting

from tqdm import tqdm

import configurator
from benchmarks.report import write_json
from benchmarks.shapes import SHAPES

old = ''     # what to compare this tree with: a commit, or the folder of another tree
only = ''    # measure only cases with this text in their names, such as kernel, prefill, M x 10 or default
rounds = 8   # of all cases, taking turns; the first one warms up and is dropped
json = ''    # a file for the figures

CONFIG_FIELDS = 'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd'  # those that every version of GPTConfig has


def main(config):
    if rounds < 2:
        raise ValueError(f"rounds must be at least 2, not {rounds}: the first one is a warm-up")
    print("expected time with the default settings on two cores: about 10 minutes, of these 2 for compiling",
          file=sys.stderr)
    workers = {}
    with tempfile.TemporaryDirectory() as empty:
        try:
            for tree, folder in (('old', folder_of(old, empty)), ('new', ROOT)):
                workers[tree] = Worker(folder)
            seconds = race(workers)
        finally:
            for worker in workers.values():
                worker.end()
    print(table(seconds))
    write_json(json, seconds)


def folder_of(old, empty):
    """The folder of a tree, or of a commit, which is unpacked in the folder `empty`. ValueError for neither."""
    if old and os.path.exists(os.path.join(old, 'model.py')):
        return old
    if old and not old.startswith('-'):
        archive = subprocess.run(['git', 'archive', old], cwd=ROOT, capture_output=True)
        if archive.returncode == 0:
            tarfile.open(fileobj=io.BytesIO(archive.stdout)).extractall(empty)
            return empty
    raise ValueError(f"--old must be a commit of this repository, or the folder of another tree with a model.py in it, "
                     f"not {old!r}")


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
