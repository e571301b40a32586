"""How everything is measured: cases that take turns, and rows that are printed and kept as JSON."""
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from typing import NamedTuple

import torch
from tqdm import tqdm

from tokenizer import read_json
from whole_file import replacing

PAUSE = 0.05  # seconds before each run: threads of the one before may still spin


class Case(NamedTuple):
    """One of the things that are compared."""
    labels: dict            # what its row begins with
    step: Callable          # what is timed
    setup: Callable = None  # called before with the number of the round, and not timed; step gets what it returns
    per: float = 1          # how many steps or tokens a call makes; the figures are for one of them


@dataclass
class Measured:
    """A case, with the seconds of each round after the warm-up and what the step returned in it."""
    case: Case
    runs: list = field(default_factory=list)
    results: list = field(default_factory=list)

    @property
    def seconds(self):
        return statistics.median(self.runs)

    def over(self, other):
        """The time of this case over that of another one: the median of the ratios within each round."""
        return statistics.median(a / b for a, b in zip(self.runs, other.runs))

    def row(self, **figures):
        """A dict for JSON: the labels, these figures and the seconds of each round."""
        return {**self.case.labels, **figures, 'runs_s': self.runs}


def take_turns(cases, repeats, what):
    """
    A `Measured` of each case, with `repeats` rounds after a warm-up. A round runs every case once, so that what slows
    the machine for a while slows all of them. Every second round has a new random order, so that memory that is slow
    now and then does not always meet the same case. The round after it has the reverse order, so that no case is first
    most of the time. what: text of the progress bar.
    """
    measured = order = [Measured(case) for case in cases]
    rng = random.Random(0)  # the same orders in each run
    with tqdm(total=(repeats + 1) * len(cases), desc=what, leave=False, disable=None) as bar:
        for n in range(repeats + 1):
            order = rng.sample(measured, len(measured)) if n % 2 else order[::-1]
            for m in order:
                _, step, setup, per = m.case
                time.sleep(PAUSE)
                given = (setup(n),) if setup else ()
                began = time.perf_counter()
                result = step(*given)
                seconds = time.perf_counter() - began
                if n:
                    m.runs.append(seconds / per)
                    m.results.append(result)
                bar.update()
    return measured


class Part(NamedTuple):
    """
    A part of a mode of bench.py. What is asked for has all settings of the script by name. Of these shapes, batches and
    lengths are lists, or None for what the part has by itself.
    """
    rows: Callable  # of what is asked for: yields lists of rows, each of which is printed when it is there
    minutes: float  # with its own settings, on two cores
    title: str      # of the tables
    names: str      # of their columns


def shown(name, figure):
    """A figure as text. Seconds are in ms. name: of the figure."""
    if isinstance(figure, (list, tuple)):
        return ', '.join(shown(name, each) for each in figure)
    if isinstance(figure, bool) or figure is None:
        return {True: 'yes', False: 'NO', None: ''}[figure]
    if not isinstance(figure, float):
        return f'{figure:,}' if isinstance(figure, int) else str(figure)[-80:]
    if name.endswith('_s') and not name.endswith('per_s'):
        return f'{1e3 * figure:,.3f} ms'
    if 'over' in name or name == 'speedup':
        return f'{figure:.3f}x'
    return f'{figure:,.0f}' if abs(figure) >= 1000 else f'{figure:.5g}'


def table(rows, names):
    """Rows (dicts) as text. names: of the figures that are shown, in a string. Those that no row has are left out."""
    aligned = []
    for name in names.split():
        cells = [shown(name, row.get(name)) for row in rows]
        if any(cells):
            width = max(map(len, (name, *cells)))
            is_number = all(cell[0] in '0123456789+-' for cell in cells if cell)
            aligned.append([f'{cell:>{width}}' if is_number else f'{cell:<{width}}' for cell in (name, *cells)])
    return '\n'.join('  '.join(line).rstrip() for line in zip(*aligned))


def run_parts(asked, parts, **measured_on):
    """
    Run the parts {name: Part}, print their rows, and write those of each part to the JSON file when it is done: {part:
    {machine, ..., rows}}. Other parts stay there as they are. So do the rows of shapes that were not run, if they were
    measured on the same machine with the same `measured_on`, which is written beside the rows.
    """
    if asked.json:
        folder = os.path.dirname(os.path.abspath(asked.json))
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # an OSError now, not when all is measured
    figures = read_json(asked.json) if asked.json and os.path.exists(asked.json) else {}
    measured_on = dict(machine=describe_machine(asked.device), **measured_on)
    for name, part in parts.items():
        rows = []
        print(f"\n{part.title}")
        for some in part.rows(asked):
            print(table(some, part.names), flush=True)
            rows += [dict(row, repeats=asked.repeats, date=f'{date.today()}') for row in some]
        before, ran = figures.get(name, {}), {row.get('shape') for row in rows}
        if measured_on.items() <= before.items():
            rows = [row for row in before['rows'] if row.get('shape') not in ran] + rows
        figures[name] = dict(measured_on, rows=rows)
        if asked.json:
            with replacing(asked.json, 'w') as f:
                json.dump(figures, f, indent=1)


def describe_machine(device):
    """torch's version, the device, and its name or the CPU's instruction set and threads."""
    if device.startswith('cuda'):
        what = torch.cuda.get_device_name(device)
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        name = torch.cpu.get_capabilities().get('cpu_name', platform.machine())
        what = f"{name} ({platform.machine()} {capability}), {torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, {device}, {what}"


def process_bytes(pid='self'):
    """Bytes of memory that a process has; None where there is no /proc of Linux."""
    try:
        with open(f'/proc/{pid}/status') as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith('VmRSS:'))
    except (OSError, StopIteration):
        return None
