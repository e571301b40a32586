"""
Times this work tree and an older version in turns, in one run.

    python benchmarks/old_and_new.py --old=HEAD~3                   a commit, which is unpacked in a temporary folder
    python benchmarks/old_and_new.py --old=../old-tree              another work tree
    python benchmarks/old_and_new.py --old=HEAD --only=decode,prefill --rounds=20

One process for each tree builds the same models with the same seeds, then the two take turns, case by case. The table
has the median times of a run, and the median over the rounds of time(old) / time(new): above 1 the new tree is faster.
The cases are decoding, prefills, the engine of the server, PyTorch's own steps and training: see timed_tree.py. A case
that one of the trees cannot run is reported and left out.
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
from benchmarks.harness import describe_machine, table, turns, write_json
from benchmarks.shapes import GPTS

old = ''       # what to compare this tree with: a commit, or the folder of another tree
only = ''      # measure only cases with one of these texts in their names, as decode,prefill or M x 10
rounds = 8     # of all cases, taking turns; the first one warms up and is dropped
seconds = 0.3  # of one timed run, at least
json = ''      # a file for the figures

CONFIG_FIELDS = 'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd'  # those that every version of GPTConfig has


def main(config):
    for name, least in dict(rounds=2, seconds=0).items():  # the first round is a warm-up
        if config[name] < least:
            raise ValueError(f"{name} must be at least {least}, not {config[name]}")
    print("expected time with the default settings on two cores: about 8 minutes, and 2 for compiling", file=sys.stderr)
    workers = {}
    with tempfile.TemporaryDirectory() as empty:
        try:
            for tree, folder in (('old', folder_of(old, empty)), ('new', ROOT)):
                workers[tree] = Worker(folder)
            times = race(workers)
        finally:
            for worker in workers.values():
                worker.end()
    print(describe_machine('cpu') + '\n')
    rows = []
    for case, of in times.items():
        ratios = [before / after for before, after in zip(of['old'], of['new'])]
        rows.append(dict(case=case, old_s=statistics.median(of['old']), new_s=statistics.median(of['new']),
                         old_over_new=statistics.median(ratios), of_single_rounds=[min(ratios), max(ratios)]))
    print(table(rows, 'case old_s new_s old_over_new of_single_rounds'))
    write_json(json, times)


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
        shapes = {name: {field: getattr(c, field) for field in CONFIG_FIELDS} for name, c in GPTS.items()}
        settings = json_format.dumps(dict(shapes=shapes, seconds=seconds))
        command = sys.executable, os.path.join(ROOT, 'benchmarks', 'timed_tree.py'), settings
        self.process = subprocess.Popen(command, cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.cases = self.answer()

    def time(self, case):
        """Seconds of a run of a case, or a text that says why it has none."""
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
    cases = [case for case in workers['new'].cases if any(text in case for text in only.split(','))]
    if not cases:
        raise ValueError(f"no case has {only!r} in its name: the cases are {'; '.join(workers['new'].cases)}")
    times = {case: dict(old=[], new=[]) for case in cases}
    for n, (case, tree) in turns([(case, tree) for case in cases for tree in workers], rounds - 1, 'rounds'):
        if case in times:
            taken = workers[tree].time(case)
            if isinstance(taken, str):
                tqdm.write(f"left out: {case}, which the {tree} tree cannot run ({taken})")
                del times[case]
            elif n:
                times[case][tree].append(taken)
    return times


if __name__ == '__main__':
    configurator.run(main)
