"""
Draws figures/house.png: the modules of this repository in groups, and arrows from each group to those it imports.

    python benchmarks/house.py

The arrows are the import statements of the files. A wider one stands for more imports.
"""
import ast
import glob
import os
import sys
from collections import Counter

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = ROOT  # not this folder

from training.plotting import plt, save

# group: (x, y, width, height), y upwards; what it is. Packages, and what the files at the top are
PLACES = {
    'scripts': ((0, 50, 34, 9), 'run these'),
    'serving': ((38, 50, 24, 14), 'who runs next'),
    'benchmarks': ((66, 46, 34, 18), 'what is measured'),
    'training': ((0, 22, 14, 13), ''),
    'model': ((18, 22, 20, 13), 'read this first'),
    'kvcache': ((42, 22, 24, 13), 'where keys and values are'),
    'decode': ((70, 18, 30, 17), 'a fast step'),
    'positions, files, settings, devices': ((0, 0, 66, 10), ''),
    'formats': ((70, 0, 30, 10), 'of other projects'),
}
MODEL = 'model.py', 'generation.py', 'debug_kv_model.py'
FILES = 'positions, files, settings, devices'


def parse(path):
    with open(os.path.join(ROOT, path), encoding='utf-8') as f:
        return ast.parse(f.read())


def group_of(path):
    """The group that a file is drawn in: its folder, or what it is of the files at the top."""
    if os.sep in path:
        return path.split(os.sep)[0]
    is_script = any(isinstance(node, ast.If) and '__main__' in ast.dump(node.test) for node in parse(path).body)
    return 'model' if path in MODEL else 'scripts' if is_script else FILES


def imported_groups(path, groups):
    """The groups that a file imports, at its top or in a function, once for each import. groups: {module: its group}."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (groups.get(alias.name.split('.')[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield groups.get(node.module.split('.')[0])


def draw(path):
    packages = [os.path.dirname(name) for name in glob.glob('*/__init__.py', root_dir=ROOT)]
    if unknown := set(packages) - set(PLACES):
        raise ValueError(f"house.py has no place for {', '.join(sorted(unknown))}: add one to PLACES")
    files = sorted(glob.glob('*.py', root_dir=ROOT) + [
        name for package in packages for name in glob.glob(f'{package}/**/*.py', root_dir=ROOT, recursive=True)])
    groups = {name.split(os.sep)[0].removesuffix('.py'): group_of(name) for name in files}
    edges = Counter((group_of(name), group) for name in files for group in imported_groups(name, groups) if group)
    fig, ax = plt.subplots(figsize=(11, 7), layout='constrained')
    ax.set(xlim=(-1, 101), ylim=(-1, 65))
    ax.axis('off')
    boxes = {}
    for group, ((x, y, w, h), what) in PLACES.items():
        boxes[group] = ax.add_patch(plt.Rectangle((x, y), w, h, facecolor='#fff3e8' if group == 'model' else '0.96',
                                                  edgecolor='0.6'))
        ax.text(x + 0.7, y + h - 0.7, group + '/' * (group in packages), va='top', fontsize=10, weight='bold')
        ax.text(x + w - 0.7, y + h - 0.9, what, va='top', ha='right', fontsize=8, color='0.4')
        mine = [name.split(os.sep) for name in files if group_of(name) == group]
        # a file of a folder in a package stands for the folder
        names = dict.fromkeys(parts[1] + '/' if len(parts) > 2 else parts[-1] for parts in mine)
        names = [name for name in names if name != '__init__.py']
        n_columns = max(1, int(w // 10))
        n_lines = -(-len(names) // n_columns)
        for i, name in enumerate(names):
            ax.text(x + 0.7 + i // n_lines * (w / n_columns), y + h - 3.6 - i % n_lines * min(2.0, (h - 4) / n_lines),
                    name, va='top', fontsize=7, weight='bold' if name == 'model.py' else 'normal')
    for (source, target), count in edges.items():
        if source != target:
            (xs, ys, ws, hs), (xt, yt, wt, ht) = PLACES[source][0], PLACES[target][0]
            ax.annotate('', (xt + wt / 2, yt + ht / 2), (xs + ws / 2, ys + hs / 2), zorder=0.5, arrowprops=dict(
                arrowstyle='-|>', color='0.55', lw=0.6 + 0.2 * min(count, 10), patchA=boxes[source],
                patchB=boxes[target]))
    save(fig, path)


if __name__ == '__main__':
    picture = os.path.join(ROOT, 'benchmarks', 'figures', 'house.png')
    draw(picture)
    print(picture)
