"""
The picture of the modules of this repository in groups, with arrows from each group to those it imports.

The arrows are the import statements of the files. A wider one stands for more imports.
"""
import ast
import glob
import os
from collections import Counter

from training.plotting import plt, save

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LINES = (('scripts', 'benchmarks', 'serving'), ('training', 'model', 'kvcache', 'decode'),
         ('other files', 'formats', 'chat'))
MODEL = 'model', 'generation', 'debug_kv_model'
WIDTH, HEIGHT, GAP = 100, 20, 12  # of a line, and between two boxes


def parse(path):
    with open(os.path.join(ROOT, path), encoding='utf-8') as f:
        return ast.parse(f.read())


def group_of(path):
    """The group that a file is drawn in: its folder, or what it is of the files at the top."""
    folder, _, name = path.rpartition(os.sep)
    is_script = any(isinstance(node, ast.If) and '__main__' in ast.dump(node.test) for node in parse(path).body)
    return folder.split(os.sep)[0] or ('model' if name[:-3] in MODEL else 'scripts' if is_script else 'other files')


def imported(path):
    """The first part of the name of each module that a file imports, at its top or in a function."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split('.')[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split('.')[0]


def draw(path):
    files = sorted(glob.glob('*.py', root_dir=ROOT) + [name for package in glob.glob('*/__init__.py', root_dir=ROOT)
                   for name in glob.glob(f'{os.path.dirname(package)}/**/*.py', root_dir=ROOT, recursive=True)])
    groups = {name: group_of(name) for name in files}
    if unknown := {*groups.values()} - {group for line in LINES for group in line}:
        raise ValueError(f"house.py has no place for {', '.join(sorted(unknown))}: add one to LINES")
    of_module = {name.split(os.sep)[0].removesuffix('.py'): group for name, group in groups.items()}
    edges = Counter((groups[name], of_module[module]) for name in files for module in imported(name)
                    if module in of_module and of_module[module] != groups[name])
    fig, ax = plt.subplots(figsize=(11, 8), layout='constrained')
    ax.set(xlim=(-1, WIDTH + 1), ylim=(-1, len(LINES) * (HEIGHT + GAP) - GAP + 1))
    ax.axis('off')
    boxes = {}
    for n, line in enumerate(LINES):
        width = (WIDTH + GAP) / len(line) - GAP
        for i, group in enumerate(line):
            x, y = i * (width + GAP), (len(LINES) - 1 - n) * (HEIGHT + GAP)
            boxes[group] = ax.add_patch(plt.Rectangle((x, y), width, HEIGHT, facecolor='0.96', edgecolor='0.6'))
            ax.text(x + 0.7, y + HEIGHT - 0.7, group, va='top', fontsize=10, weight='bold')
            # a folder in a package stands for its files
            names = dict.fromkeys('/'.join(name.split(os.sep)[-2:][:1]) + '/' if name.count(os.sep) > 1 else
                                  os.path.basename(name) for name in files if groups[name] == group)
            for k, name in enumerate(name for name in names if name != '__init__.py'):
                ax.text(x + 0.7 + k // 9 * width / 2, y + HEIGHT - 3.4 - k % 9 * 1.8, name, va='top', fontsize=7)
    for (source, target), count in edges.items():
        ends = [box.get_center() for box in (boxes[target], boxes[source])]
        ax.annotate('', *ends, zorder=0.5, arrowprops=dict(arrowstyle='-|>', color='0.55', patchA=boxes[source],
                                                           patchB=boxes[target], lw=0.6 + 0.2 * min(count, 10)))
    save(fig, path)
