"""
How everything is measured: cases that take turns, and rows that are printed, drawn and kept as JSON.

    cases = [Case(dict(shape='S', way='cache'), step), Case(dict(shape='S', way='decoder'), other_step)]
    first, *_ = measured = take_turns(cases, repeats=5, what='S')
    rows = [m.row(ms=1e3 * m.seconds, speedup=first.over(m)) for m in measured]
    print(table(rows, 'shape way ms speedup'))
"""
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks.shapes import SHAPES
from training.plotting import plt, save
from whole_file import replacing

PAUSE = 0.05  # seconds before each run: threads of the one before may still spin


class Case(NamedTuple):
    """
    One of the things that are compared.

    labels: what its row begins with, {name: value}. step: what is timed. setup: a function of the number of the round
    that comes before and is not timed; step is called with what it returns, or without arguments if there is none.
    per: the figures are of one of so many steps or tokens that a call makes.
    """
    labels: dict
    step: Callable
    setup: Callable = None
    per: float = 1


@dataclass
class Measured:
    """A case, and of each round that counts the seconds and what the step has returned."""
    case: Case
    runs: list = field(default_factory=list)
    results: list = field(default_factory=list)

    @property
    def seconds(self):
        return statistics.median(self.runs)

    @property
    def result(self):
        """What the last step has returned."""
        return self.results[-1]

    def over(self, other):
        """The time of this case over that of another one: the median of the ratios within each round."""
        return statistics.median(a / b for a, b in zip(self.runs, other.runs))

    def row(self, **figures):
        """A dict for JSON: the labels, these figures and the seconds of each round."""
        return {**self.case.labels, **figures, 'runs_s': self.runs}


def turns(items, repeats, what):
    """
    Yields (round, item): what slows the machine for a while slows all of them. Round 0 warms up. Every other round goes
    through the items backwards, so that none always comes after the same other one. what: text of the progress bar.
    """
    with tqdm(total=(repeats + 1) * len(items), desc=what, leave=False, disable=None) as bar:
        for n in range(repeats + 1):
            for item in items if n % 2 else items[::-1]:
                yield n, item
                bar.update()


def take_turns(cases, repeats, what, least=0.0):
    """
    A `Measured` of each case, with `repeats` rounds after a warm-up. least: a run repeats setup and step until so many
    seconds of steps have passed; its time is their mean.
    """
    measured = [Measured(case) for case in cases]
    for n, m in turns(measured, repeats, what):
        _, step, setup, per = m.case
        time.sleep(PAUSE)
        seconds = times = 0
        while not times or seconds < least:
            given = (setup(n),) if setup else ()
            began = time.perf_counter()
            result = step(*given)
            seconds += time.perf_counter() - began
            times += 1
        if n:
            m.runs.append(seconds / times / per)
            m.results.append(result)
    return measured


class Part(NamedTuple):
    """
    A part of a mode of bench.py. rows: a function of `Asked` that yields lists of rows; each list is printed when it is
    there, as a table for each line of names, see `table`. title: of the tables. minutes: with its own settings, on two
    cores.
    """
    rows: Callable
    minutes: float
    title: str
    names: str


@dataclass
class Asked:
    """
    What a run of bench.py is asked for. shapes, batches, lengths: lists, or None for what each part has by itself.
    only: the names of parts, or None. options: all settings of the script by name.
    """
    device: str
    dtype: str
    shapes: list
    batches: list
    lengths: list
    only: list
    options: dict

    def __getattr__(self, name):
        try:
            return self.options[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def default_shape(self):
        """Of the modes that also measure GPUs."""
        return ['S' if self.device == 'cpu' else 'L']

    def combinations(self, shapes, batches=(1,), lengths=(None,)):
        """
        Yields (shape, batch, length) of all that are asked for. The arguments are what is measured otherwise; batches
        and lengths may be dicts by shape.
        """
        def of(name, given, own):
            return given or (own[name] if isinstance(own, dict) else own)
        for name in self.shapes or shapes:
            for B in of(name, self.batches, batches):
                for T in of(name, self.lengths, lengths):
                    yield name, B, T

    def parts(self, known):
        """Those of the parts {name: Part} that are asked for. ValueError if there is no such part."""
        chosen = self.only or list(known)
        if set(chosen) - set(known):
            raise ValueError(f"the parts of {self.mode} mode are {', '.join(known)}; not {','.join(chosen)!r}")
        return {name: known[name] for name in chosen}


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
    if abs(figure) >= 1e9:
        return f'{figure / 1e9:.0f}e9'
    return f'{figure:,.0f}' if abs(figure) >= 1000 else f'{figure:.5g}'


def table(rows, names):
    """
    Rows (dicts) as text. names: of the figures that are shown, in a string. A figure that is a dict has a column for
    each key. Figures that no row has are left out.
    """
    columns = {}  # {heading: cells}
    for name in names.split():
        figures = [row.get(name) for row in rows]
        if any(isinstance(figure, dict) for figure in figures):
            for key in dict.fromkeys(key for figure in figures for key in figure):
                columns[key] = [shown(name, figure.get(key)) for figure in figures]
        else:
            columns[name] = [shown(name, figure) for figure in figures]
    columns = [[heading, *cells] for heading, cells in columns.items() if any(cells)]
    aligned = []
    for heading, *cells in columns:
        width = max(map(len, (heading, *cells)))
        is_number = all(cell[0] in '0123456789+-' for cell in cells if cell)
        aligned.append([f'{cell:>{width}}' if is_number else f'{cell:<{width}}' for cell in (heading, *cells)])
    return '\n'.join('  '.join(line).rstrip() for line in zip(*aligned))


def run_parts(asked, known, **measured_on):
    """
    Run the parts that are asked for, print their rows, and write those of each part to the JSON file when it is done.
    Other parts stay there as they are. So do the rows of shapes that were not run, if they were measured on the same
    machine with the same `measured_on`, which is written beside the rows. Returns all that is in the file.
    """
    figures = {name: of_part for name, of_part in read_json(asked.json).items() if isinstance(of_part, dict)}
    measured_on = dict(machine=describe_machine(asked.device), **measured_on)
    for name, part in asked.parts(known).items():
        rows = []
        print(f"\n{part.title}")
        for some in part.rows(asked):
            print(*(table(some, names) for names in part.names.splitlines()), sep='\n', flush=True)
            rows += [dict(row, repeats=asked.repeats) for row in some]
        before, ran = figures.get(name, {}), {row.get('shape') for row in rows}
        if measured_on.items() <= before.items():
            rows += [row for row in before['rows'] if row.get('shape') not in ran]
            rows.sort(key=lambda row: [None, *SHAPES].index(row.get('shape')))
        figures[name] = dict(measured_on, rows=rows)
        write_json(asked.json, figures)
    return figures


def describe_machine(device):
    """torch's version, the device, and its name or the CPU's instruction set and threads."""
    if device.startswith('cuda'):
        what = torch.cuda.get_device_name(device)
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        name = torch.cpu.get_capabilities().get('cpu_name', platform.machine())
        what = f"{name} ({platform.machine()} {capability}), {torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, {device}, {what}"


def process_bytes(field='VmRSS', pid='self'):
    """Bytes of memory that a process has, or of another field of Linux's /proc; None where that does not exist."""
    try:
        with open(f'/proc/{pid}/status') as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field + ':'))
    except (OSError, StopIteration):
        return None


def write_json(path, figures):
    """Write figures to the file `path`; '' writes nothing."""
    if path:
        with replacing(path, 'w') as f:
            json.dump(figures, f, indent=1)


def read_json(path):
    """What `write_json` has written to the file `path`; {} if there is none."""
    if not path or not os.path.exists(path):
        return {}
    with open(path) as f:
        return json.load(f)


class Panel(NamedTuple):
    """
    One of the pictures of a file. lines: (xs, ys, label, arguments of matplotlib's `plot`) each. bars:
    (label, value, text, colour) each. image: rows of numbers from 0 to 1, for a label each. axes: arguments of
    matplotlib's `Axes.set`. marks: {x: text} of vertical lines.
    """
    title: str
    lines: list = ()
    bars: list = ()
    image: dict = {}
    axes: dict = {}
    marks: dict = {}


def draw(panels, path, title='', columns=0, size=(6, 4)):
    """Draw panels as a PNG file, so many in a line, by default all. size: of one, in inches; None leaves a gap."""
    columns = columns or len(panels)
    n_lines = -(-len(panels) // columns)
    fig, axes = plt.subplots(n_lines, columns, figsize=(size[0] * columns, size[1] * n_lines + 0.5 * bool(title)),
                             squeeze=False, layout='constrained')
    for ax, panel in zip(axes.flat, panels):
        if panel is None:
            ax.axis('off')
            continue
        for xs, ys, label, how in panel.lines:
            ax.plot(xs, ys, label=label, **how)
        if panel.bars:
            labels, values, texts, colours = zip(*panel.bars)
            ax.bar_label(ax.barh(range(len(values), 0, -1), values, color=colours), texts, padding=2, fontsize=7)
            ax.set_yticks(range(len(values), 0, -1), labels)
            ax.margins(x=0.2)
        if panel.image:
            ax.imshow([*panel.image.values()], cmap='Blues', vmin=0, vmax=1, aspect='auto', interpolation='nearest')
            ax.set_yticks(range(len(panel.image)), panel.image)
        ax.set(title=panel.title, **panel.axes)
        for axis in (ax.xaxis, ax.yaxis) if panel.lines else ():
            if axis.get_scale() == 'log':
                axis.set_major_formatter('{x:,.0f}')
                axis.set_minor_formatter('')
        for x, text in panel.marks.items():
            ax.axvline(x, color='C3', ls=':')
            ax.annotate(text, (x, 1), xycoords=('data', 'axes fraction'), rotation=90, va='top', ha='right', fontsize=8)
        if panel.lines:
            ax.grid(alpha=0.3)
            ax.legend(fontsize=8)
        ax.title.set_fontsize(9)
        ax.tick_params(labelsize=8)
    fig.suptitle(title, fontsize=9)
    save(fig, path)
