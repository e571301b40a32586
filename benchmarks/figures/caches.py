"""The pictures of the cells and of the blocks: one example each, run with the real data structures."""
import numpy as np
from matplotlib.colors import to_rgb

from kvcache.blocks import BlockManager
from kvcache.llamacpp.cache import CellCache
from kvcache.llamacpp.cells import EMPTY, context_shift
from kvcache.records import BlockRecord
from training.plotting import plt, save

COLOURS = ['#9ecae1', '#fdae6b', '#a1d99b', '#bcbddc']


def boxes(ax, y, texts, colours, below=None, x=0.0, width=1.0):
    """A row of boxes with a text in each, and smaller texts below them."""
    for i, (text, colour) in enumerate(zip(texts, colours)):
        ax.add_patch(plt.Rectangle((x + i * width, y), width * 0.94, 0.8, facecolor=colour, edgecolor='0.3', lw=0.8))
        ax.text(x + (i + 0.47) * width, y + 0.4, text, ha='center', va='center', fontsize=8)
        if below:
            ax.text(x + (i + 0.47) * width, y - 0.18, below[i], ha='center', va='center', fontsize=6, color='0.4')


def mean_colour(owners):
    """The colour of a cell: the mean of its owners' colours, white without owners."""
    colours = [to_rgb(COLOURS[owner]) for owner in owners]
    return tuple(np.mean(colours, axis=0)) if colours else (1, 1, 1)


def cell_row(ax, y, cells, title, words=None):
    """All cells of a stream as a row of boxes, and a title on the left."""
    owners = [cells.owners_of(cell) for cell in range(len(cells))]
    texts = [('' if words is None else words[i] + '\n') + f'pos {p}' if p != EMPTY else 'free'
             for i, p in enumerate(cells.pos)]
    below = [f"slot {i}" + (', ' + ''.join('AB'[s] for s in o) if len(o) else '') for i, o in enumerate(owners)]
    boxes(ax, y, texts, [mean_colour(o) for o in owners], below)
    ax.text(-0.15, y + 0.4, title, ha='right', va='center', fontsize=8)


def place(cache, tokens):
    """Put tokens, {sequence or sequences: positions}, into free cells."""
    batch = cache.batch(tokens)
    cache.apply(cache.find_slot(batch), batch)
    cache.update()


def frame(ax, x0, x1, y0, y1, title):
    """Limits and title of a picture without axes."""
    ax.set(xlim=(x0, x1), ylim=(y0, y1), title=title)
    ax.title.set_fontsize(9)
    ax.axis('off')


def draw_cells(path):
    """llama.cpp's cells: a shared prompt, freed cells, and a context shift."""
    fig, axes = plt.subplots(1, 2, figsize=(13, 4.4), layout='constrained', width_ratios=[2, 1])
    cache = CellCache(1, 1, 8, kv_size=8, n_seq_max=2, can_shift=True)
    steps = [('A and B share a prompt of 3', lambda: place(cache, {(0, 1): range(3)})),
             ('each draws two tokens of its own', lambda: [place(cache, {0: [p], 1: [p]}) for p in (3, 4)]),
             ('B is done: seq_rm(B)', lambda: cache.seq_rm(1)),
             ('A goes on, into the free cells', lambda: place(cache, {0: [5, 6, 7]})),
             ('A is shifted: keep 2, drop 3,\nrenumber 3; nothing moves', lambda: context_shift(cache, 0, n_keep=2))]
    for i, (title, act) in enumerate(steps):
        act()
        cell_row(axes[0], -1.35 * i, cache.streams[0], title)
    frame(axes[0], -3.2, 8.1, -1.35 * 4 - 0.5, 1,
          'cells of one unified stream: the slot in memory, the position in the text, the sequences (A, B)')

    cache = CellCache(1, 1, 8, kv_size=4, n_seq_max=1, can_shift=True)
    words = ['The', 'cat', 'sat', 'on']
    place(cache, {0: range(4)})
    cell_row(axes[1], 0, cache.streams[0], 'full', words)
    cache.seq_rm(0, 0, 1)
    cell_row(axes[1], -1.35, cache.streams[0], 'drop position 0', words)
    cache.seq_add(0, 1, -1, -1)
    cell_row(axes[1], -2.7, cache.streams[0], 'renumber; keys are\nturned back by 1', words)
    place(cache, {0: [3]})
    words[0] = 'mat'
    cell_row(axes[1], -4.05, cache.streams[0], 'the next token takes\nthe freed cell', words)
    frame(axes[1], -1.7, 4.1, -1.35 * 4 - 0.5, 1, 'a context shift: "The cat sat on" + "mat"')
    save(fig, path)


def draw_blocks(path):
    """vLLM's blocks: a prefix that is found again, and a copy on write."""
    blocks, held, records = BlockManager(6, 4), {}, {seq: BlockRecord(seq) for seq in 'ABC'}  # held: {slot: token}

    def copy(source, target):
        held.update({4 * target + i: held[4 * source + i] for i in range(4) if 4 * source + i in held})

    def add(record, tokens):
        blocks.extend(record, len(tokens), copy)
        record.tokens += tokens
        record.length += len(tokens)
        held.update(zip(blocks.slots(record, record.length - len(tokens), record.length), tokens))
        blocks.remember(record)
    for seq, text in (('A', 'the cat sat'), ('B', 'the cat ran')):
        n_cached = blocks.begin(records[seq], list(text))
        add(records[seq], list(text[n_cached:]))
    blocks.fork(records['B'], records['C'])
    add(records['C'], ['!'])
    fig, ax = plt.subplots(figsize=(10.5, 3.8), layout='constrained')
    for b in range(6):
        owners = [i for i, seq in enumerate('ABC') if b in records[seq].table]
        x = 4.3 * b
        texts_of_b = [held.get(4 * b + i, '').replace(' ', '␣') for i in range(4)]
        boxes(ax, 0, texts_of_b, [mean_colour(owners)] * 4, [str(4 * b + i) for i in range(4)], x)
        remembered = ', remembered' * (blocks.prefix_of[b] is not None)
        uses = f"in {blocks.references[b]} table{'s' * (len(owners) > 1)}{remembered}"
        ax.text(x + 1.9, 1.0, f"block {b}\n{uses if owners else 'free'}", ha='center', fontsize=7)
    for i, seq in enumerate('ABC'):
        y = 4.3 - i
        table, text, p = records[seq].table, ''.join(records[seq].tokens), records[seq].length - 1
        boxes(ax, y, [str(b) for b in table], [COLOURS[i]] * len(table), x=6.5, width=1.2)
        b, slot = table[p // 4], blocks.slots(records[seq], p, p + 1)[0]
        ax.text(6.2, y + 0.4, f'{seq}: "{text}"   block_table', ha='right', va='center', fontsize=8)
        ax.text(10.5, y + 0.4, f"position {p} is in slot {b} * 4 + {p % 4} = {slot}", va='center', fontsize=8)
    ax.text(17.4, 3.7, f'B begins like A: {n_cached} of its tokens were not computed.\n'
                       'C is a fork of B. Its "!" would go into a block\nthat B uses, so C got a copy of that block.',
            fontsize=8, va='center')
    frame(ax, -0.2, 25.8, -0.5, 5.3, 'blocks of 4 slots, three sequences')
    save(fig, path)
