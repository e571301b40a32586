"""
The contiguous cache: as many rows for each sequence as its keys need, one for each position, as in the model's tuples.
"""
import torch

from kvcache.base import BaseCache
from kvcache.placement import LayerList, Placement, leading_rows, make_layers
from positions import Keys


class ContiguousCache(BaseCache):
    """
    Position p of sequence s is row s * n_slots + p, where n_slots is block_size. n_seq: the largest number of
    sequences. type_kv: how keys and values are stored, see `Rows`.

    If the model has a window, the first n_sink rows are for the sinks, and the other 2 * window are a ring: position p
    is in row n_sink + (p - n_sink) % (2 * window). The window before a new token is there, and window + 1 new tokens.

    In PyTorch the sequences of one forward pass bring the same number of new tokens; `step` makes a pass for each
    number.
    """
    mixes_lengths = False

    def __init__(self, model, n_seq, type_kv='float32', decoder=None):
        self.size = model.config.n_slots
        self.n_ring = self.size - model.config.n_sink
        self.written = {}  # {sequence: positions that were written, also those that were cut: they are in the ring}
        self.runs = {}  # {sequence: (its `Runs`, the position where they end)}
        super().__init__(model, n_seq, make_layers(model, (n_seq, self.size), type_kv), 'tuple', type_kv, decoder)

    def copy(self, seq, new):
        self.written[new] = self.written[seq]
        for layer in self.layers:
            layer.copy(seq, new, self.written[seq])

    def cut(self, seq, n):
        if self.window:  # without one the runs are always the same
            self.runs.pop(seq, None)
        # the positions hide the rows behind a sequence's end, and they are written before they are read
        if n == 0:
            self.written.pop(seq, None)
        elif not self.window or n <= max(self.n_sink, self.written[seq] - self.n_ring):
            self.written[seq] = n  # nothing in a ring is of any use

    def remove_behind(self, seq, length, n_keep, n):
        rows = seq * self.size + torch.arange(n_keep + n, length)
        for layer in self.layers:
            layer.move(rows, rows - n, self.turning(torch.full((len(rows),), -n)))
        self.written[seq] = length - n

    def first_held(self, seq):
        return max(self.n_sink, self.written.get(seq, 0) - self.n_ring)

    def make_room(self, seqs, starts, counts):
        found = []
        for seq, start, n in zip(seqs, starts, counts):
            end, (runs, limit) = start + n, self.runs.get(seq, (None, 0))
            self.written[seq] = max(self.written.get(seq, 0), end)
            if end > limit:
                rows = self.rows(seq, start)
                runs, limit = self.runs[seq] = self.kernel.runs(rows), rows[-1][0] + rows[-1][2]
            found.append(runs)
        return found

    def rows(self, seq, start):
        """
        The rows of `Runs` for the token at position start of a sequence. With a window: of the sinks, and of the n_ring
        positions from the first that it sees on, which have one slot each.
        """
        base, n_sink, n_ring = seq * self.size, self.n_sink, self.n_ring
        if not self.window:
            return [(0, base, self.size)]
        first = max(n_sink, start - self.window + 1)
        offset = (first - n_sink) % n_ring
        parts = (0, base, n_sink), (first, base + n_sink + offset, n_ring - offset), (
            first + n_ring - offset, base + n_sink, offset)
        return [part for part in parts if part[2]]

    def forward_pass(self, seqs, starts, counts, ids, hiding=False):
        T, device = counts[0], ids.device
        self.written |= {seq: max(self.written.get(seq, 0), start + T) for seq, start in zip(seqs, starts)}
        ends = [self.written[seq] for seq in seqs]
        sequence, starts, end = (torch.tensor(numbers, device=device) for numbers in (seqs, starts, ends))
        positions = starts[:, None] + torch.arange(T, device=device)
        index, n_keys = leading_rows(sequence, min(max(ends), self.size), self.size)
        rows, key_pos = positions, torch.arange(n_keys, device=device)
        if self.window:
            n_sink, n_ring = self.n_sink, self.n_ring
            rows = torch.where(positions < n_sink, positions, n_sink + (positions - n_sink) % n_ring)
            rounds = ((end[:, None] - 1 - key_pos) // n_ring).clamp(min=0)  # (B, K): how often a row was written again
            key_pos = torch.where(key_pos < n_sink, key_pos, key_pos + rounds * n_ring)
        rows = (sequence[:, None] * self.size + rows).flatten()
        layers = LayerList(self.layers, Placement(positions, rows, index, Keys(key_pos)))
        return self.logits(layers, counts, ids, hiding)
