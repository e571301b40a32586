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

# group: (x, y, width, height) in percent of the width, y upwards; columns of boxes; its name; what it is
PLACES = {
    'scripts': ((0, 46, 57, 19), 6, 'scripts', 'run these'),
    'serving': ((0.9, 46.7, 55.2, 10), 6, 'serving/', 'many requests, who runs next'),
    'benchmarks': ((61, 46, 39, 19), 4, 'benchmarks/', 'what is measured'),
    'training': ((0, 15.5, 13.5, 23), 1, 'training/', ''),
    'core': ((16.5, 15.5, 24, 23), 1, 'the model', 'read this first'),
    'kvcache': ((43.5, 15.5, 28, 23), 3, 'kvcache/', 'where keys and values are'),
    'decode': ((74.5, 15.5, 25.5, 23), 3, 'decode/', 'a fast step'),
    'files': ((0, 1, 100, 9), 7, 'positions, files, settings, devices', 'an arrow: imports; a wider one: more of them'),
}
CORE = {'generation.py': 'prompts of any lengths', 'model.py': 'the GPT and its cache',
        'debug_kv_model.py': 'the same GPT, traced'}
FOLDED = {'formats': 'files'}    # packages that are one box in another group
INSIDE = {'serving': 'scripts'}  # packages in the frame of another group, from which all arrows of both begin
LANES = 44.4, 42.6, 40.8  # heights of the arrows that run sideways below the top row
ACCENT, GREY = '#d95f02', '0.45'


def modules():
    """
    {module: path} of the Python files at the top and in the packages; a folder's __init__.py is the module of its name.

    Raises ValueError for a package without a place in the picture.
    """
    packages = sorted(glob.glob('*/__init__.py', root_dir=ROOT))
    unknown = {os.path.dirname(path) for path in packages} - {*PLACES, *FOLDED}
    if unknown:
        raise ValueError(f"house.py has no place for {', '.join(sorted(unknown))}: add one to PLACES")
    files = glob.glob('*.py', root_dir=ROOT)
    for path in packages:
        files += glob.glob(os.path.join(os.path.dirname(path), '**', '*.py'), root_dir=ROOT, recursive=True)
    return {path[:-3].replace(os.sep, '.').removesuffix('.__init__'): path for path in sorted(files)}


def parse(path):
    with open(os.path.join(ROOT, path), encoding='utf-8') as f:
        return ast.parse(f.read())


def imports(path, known):
    """The modules among `known` that a file imports, at its top or in a function."""
    names = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f'{node.module}.{alias.name}' for alias in node.names}
    return names & set(known)


def group_of(path):
    """The group that a module is drawn in: its folder, or what it is of the files at the top."""
    if os.sep in path:
        folder = path.split(os.sep)[0]
        return FOLDED.get(folder, folder)
    if path in CORE:
        return 'core'
    is_script = any(isinstance(node, ast.If) and '__main__' in ast.dump(node.test) for node in parse(path).body)
    return 'scripts' if is_script else 'files'


def box_of(path):
    """The label of a module's box: its name, or the folder inside a group that it is in. None for a group itself."""
    parts = path.split(os.sep)
    if parts[0] in FOLDED:
        return parts[0] + '/'
    if len(parts) > 2:
        return parts[1] + '/'
    return None if parts[-1] == '__init__.py' else parts[-1]


def labels_by_group(paths):
    """{group: labels of its boxes}, folders last; those of CORE in their order."""
    labels = {group: [] for group in PLACES}
    for path in paths.values():
        label, group = box_of(path), group_of(path)
        if label and label not in labels[group]:
            labels[group].append(label)
    labels['core'] = [label for label in CORE if label in labels['core']]
    return {group: sorted(mine, key=lambda label: label.endswith('/')) for group, mine in labels.items()}


def draw_group(ax, group, labels, note=''):
    """A frame with a title, and a box for each label. Returns {label: (x, y, width / 2, height / 2) of its box}."""
    (x, y, w, h), n_columns, name, description = PLACES[group]
    core = group == 'core'
    ax.add_patch(plt.Rectangle((x, y), w, h, facecolor='#fff3e8' if core else '0.96', lw=1.5 if core else 0.8,
                               edgecolor=ACCENT if core else '0.6', zorder=2))
    title = ax.text(x + 0.8, y + h - 0.8, name, va='top', fontsize=10, weight='bold', color=ACCENT if core else '0.15',
                    zorder=3)
    ax.annotate('  ' + description, (1, 0), xycoords=title, va='bottom', fontsize=8, color='0.35', zorder=3)
    if note:
        ax.text(x + 0.8, y + 0.6, note, fontsize=7.5, style='italic', color='0.35', zorder=3)
    n_rows = -(-len(labels) // n_columns)
    top, width = y + h - 3.2, (w - 1) / n_columns
    height = min(6.4 if core else 4.6, (top - y - (2.2 if note else 0.6)) / n_rows)
    boxes = {}
    for i, label in enumerate(labels):
        cx, cy = x + 0.5 + (i % n_columns + 0.5) * width, top - (i // n_columns + 0.5) * height
        half_w, half_h = (0.44 * width, 0.36 * height) if core else (0.48 * width, 0.41 * height)
        accent = label == 'model.py'
        ax.add_patch(plt.Rectangle((cx - half_w, cy - half_h), 2 * half_w, 2 * half_h, zorder=3, lw=0.6,
                                   facecolor=ACCENT if accent else 'white', edgecolor='0.7'))
        fitting = min(7.5, 12 * 2 * half_w / len(label))
        for text, dy, size in [(label, 0.9, 10), (CORE[label], -1, 8)] if core else [(label, 0, fitting)]:
            ax.text(cx, cy + dy, text, ha='center', va='center', fontsize=size, zorder=4,
                    color='white' if accent else '0.1', weight='bold' if size > 8 else 'normal')
        boxes[label] = cx, cy, half_w, half_h
    return boxes


def arrow(ax, points, count, colour=GREY):
    """A line through points with a head at the last; its width grows with `count` imports."""
    lw = 0.8 + 0.25 * min(count, 8)
    xs, ys = zip(*points)
    ax.plot(xs[:-1], ys[:-1], color=colour, lw=lw, solid_joinstyle='round', zorder=2.5)
    ax.annotate('', points[-1], points[-2], zorder=5,
                arrowprops=dict(arrowstyle='-|>', color=colour, lw=lw, shrinkA=0, shrinkB=0, mutation_scale=11))


def route(source, target, lanes, used):
    """The points of an arrow from one group to another, down or sideways. lanes: heights that are still free."""
    (xs, ys, ws, hs), (xt, yt, wt, ht) = PLACES[source][0], PLACES[target][0]
    if ys < yt + ht and yt < ys + hs:  # side by side
        y = max(ys, yt) + min(hs, ht) / 2
        return [(xs + ws, y), (xt, y)] if xs < xt else [(xs, y), (xt + wt, y)]
    first, last = max(xs, xt), min(xs + ws, xt + wt)
    crossed = [place for place, *_ in PLACES.values() if yt + ht <= place[1] and place[1] + place[3] <= ys
               and place[0] < last and first < place[0] + place[2]]
    if crossed:  # round everything between, at the margin
        x = (-1.5 if xs == 0 else 101.5)
        y0, y1 = ys + hs / 2, yt + ht / 2
        side = (xs, xt) if xs == 0 else (xs + ws, xt + wt)
        return [(side[0], y0), (x, y0), (x, y1), (side[1], y1)]
    if first < last:
        x = (first + last) / 2
        return [(x, ys), (x, yt + ht)]
    lane = lanes.pop(0)
    used[target] += 1
    x0 = xs + 4 - 1.4 * len(lanes) if xt < xs else xs + ws - 1.5
    x1 = xt + wt - 2 * used[target] if xt < xs else xt + 1.5
    return [(x0, ys), (x0, lane), (x1, lane), (x1, yt + ht)]


def route_in_core(source, target, labels, boxes):
    """The points of an arrow between two boxes of one column: straight, or round the right side of those between."""
    (x, y0, w, h), (_, y1, _, _) = boxes[source], boxes[target]
    if abs(labels.index(source) - labels.index(target)) > 1:
        return [(x + w, y0), (x + w + 1, y0), (x + w + 1, y1), (x + w, y1)]
    return [(x, y0 - h), (x, y1 + h)] if y0 > y1 else [(x, y0 + h), (x, y1 - h)]


def main(path):
    paths = modules()
    imported = {module: imports(file, paths) for module, file in paths.items()}
    groups = {module: group_of(file) for module, file in paths.items()}
    outer = {module: INSIDE.get(group, group) for module, group in groups.items()}
    edges = Counter((outer[a], groups[b]) for a, others in imported.items() for b in others if outer[a] != outer[b])
    labels = labels_by_group(paths)
    fig, ax = plt.subplots(figsize=(9.6, 6.2))
    fig.subplots_adjust(0, 0, 1, 1)
    ax.set(xlim=(-2.5, 102.5), ylim=(0, 66))
    ax.axis('off')
    boxes = {}
    for group in PLACES:
        handed = group in ('decode', 'kvcache') and not edges[group, 'core']
        boxes |= draw_group(ax, group, labels[group], 'is handed a model, imports none' if handed else '')
    lanes, used = list(LANES), Counter()
    for source, target in sorted(edges, key=lambda edge: (PLACES[edge[1]][0], edge)):
        arrow(ax, route(source, target, lanes, used), edges[source, target])
    for label in labels['core']:
        for other in imported[label[:-3]] & {core[:-3] for core in CORE}:
            arrow(ax, route_in_core(label, f'{other}.py', labels['core'], boxes), 3, ACCENT)
    save(fig, path)


if __name__ == '__main__':
    picture = os.path.join(ROOT, 'benchmarks', 'figures', 'house.png')
    main(picture)
    print(picture)
