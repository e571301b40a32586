"""
The picture of a step: the new tokens of three sequences on one axis, and the slots of their keys in three caches. The
runs are those that the caches hand to the compiled step.
"""
import torch

from benchmarks.figures.caches import COLOURS, boxes, frame
from decode.cpu import CPUDecoder
from kvcache.contiguous import ContiguousCache
from kvcache.llamacpp import sequences
from kvcache.paged import PagedCache
from model import GPT, GPTConfig
from training.plotting import plt, save

HELD, NEW, WIDTH = (5, 2, 9), (1, 4, 1), 0.62  # tokens of each sequence before the step, and in it


class WatchedDecoder(CPUDecoder):
    """Keeps what the last step was called with."""

    def execute_model(self, input_ids, input_positions, kv_caches, input_metadata, n_threads=None):
        self.positions, self.metadata, self.n_slots = input_positions, input_metadata, kv_caches.n_slots
        return super().execute_model(input_ids, input_positions, kv_caches, input_metadata, n_threads)


def feed(cache):
    """Three sequences that have begun in turns, and the step that is drawn."""
    seqs = [cache.new() for _ in HELD]
    for start in range(0, max(HELD), 2):
        live = [i for i, n in enumerate(HELD) if n > start]
        cache.step([seqs[i] for i in live], [start] * len(live),
                   [torch.zeros(min(2, HELD[i] - start), dtype=torch.int64) for i in live])
    cache.step(seqs, list(HELD), [torch.zeros(n, dtype=torch.int64) for n in NEW])


def draw_slots(ax, y, title, decoder):
    """The slots of one cache, and below them the runs of each sequence."""
    texts, colours = [''] * decoder.n_slots, ['white'] * decoder.n_slots
    for i, runs in enumerate(decoder.metadata.runs):
        length, lines = HELD[i] + NEW[i], []
        for position, slot, n in runs.table[:runs.n].tolist():
            lines.append(f"({position}, {slot}, {n})")
            for p in range(position, min(position + n, length)):
                texts[slot + p - position], colours[slot + p - position] = f"{'ABC'[i]}{p}", COLOURS[i]
        ax.text(0, y - 0.75 - 0.42 * i, f"{'ABC'[i]}: " + '  '.join(lines), fontsize=7.5, va='center')
    boxes(ax, y, texts, colours, [str(slot) for slot in range(decoder.n_slots)], width=WIDTH)
    ax.text(-0.25, y + 0.4, title, ha='right', va='center', fontsize=9)
    ax.text(-0.25, y - 1.1, 'runs: (position, slot, n)', ha='right', va='center', fontsize=8, color='0.3')


def draw(path):
    torch.manual_seed(0)
    sequences.AHEAD = 2  # a sequence takes two cells at a time, instead of 64: so many would be too wide
    model = GPT(GPTConfig(block_size=16, vocab_size=8, n_layer=1, n_head=1, n_embd=16)).eval()
    decoder = WatchedDecoder(model, threads=1)
    fig, ax = plt.subplots(figsize=(13.5, 6.6), layout='constrained')
    caches = (('rows of block_size 16\n(contiguous, the tuple)', lambda: ContiguousCache(model, 3, 'float32', decoder)),
              ('blocks of 4 slots', lambda: PagedCache(model, 9, 4, 'float32', decoder)),
              ('cells of one stream,\ntaken two at a time',
               lambda: sequences.CellSequences(model, 3, 'float32', decoder)))
    for i, (title, make) in enumerate(caches):
        feed(make())
        if i == 0:
            owners = [seq for seq, n in enumerate(NEW) for _ in range(n)]
            boxes(ax, 2.4, [f"{'ABC'[seq]}{p}" for seq, p in zip(owners, decoder.positions)],
                  [COLOURS[seq] for seq in owners], [f"row {row}" for row in range(sum(NEW))], width=0.9)
            ax.text(-0.25, 2.8, 'new tokens: input_ids,\ninput_positions', ha='right', va='center', fontsize=9)
            ax.text(5.9, 2.8, "query_lens 1, 4, 1: the next token of A, a part of B's prompt, the next token of C\n"
                    "all linears take these six rows together; attention reads each row's own runs", fontsize=8.5,
                    va='center')
        draw_slots(ax, -3.1 * i, title, decoder)
    frame(ax, -4.6, 30, -8.6, 3.4, 'one step for three sequences, and where it finds their keys and values')
    save(fig, path)
