"""The contiguous cache: block_size rows for each sequence, one for each position, as in the model's own tuples."""
import torch

from kvcache.base import BaseCache, make_layers
from kvcache.placement import LayerList, Placement, leading_rows
from positions import Keys


class ContiguousCache(BaseCache):
    """
    Position p of sequence s is row s * block_size + p. n_seq: the largest number of sequences. type_kv: how keys and
    values are stored, see `Rows`.

    The sequences of one forward pass bring the same number of new tokens; `step` makes a pass for each number.
    """
    mixes_lengths = False

    def __init__(self, model, n_seq, type_kv='float32'):
        self.size = model.config.block_size
        super().__init__(model, n_seq, make_layers(model, (n_seq, self.size), type_kv), 'tuple', type_kv)

    def copy(self, seq, new):
        for layer in self.layers:
            layer.copy(seq, new, self.lengths[seq])

    def cut(self, seq, n):
        pass  # the mask hides the rows behind a sequence's end, and they are written before they are read

    def forward_pass(self, seqs, counts, ids, hiding=False):
        T, device = counts[0], ids.device
        lengths = [self.lengths[seq] for seq in seqs]
        sequence = torch.tensor(seqs, device=device)
        positions = torch.tensor(lengths, device=device)[:, None] + torch.arange(T, device=device)
        index, n_keys = leading_rows(sequence, max(lengths) + T, self.size)
        keys = Keys(torch.arange(n_keys, device=device))
        placement = Placement(positions, (sequence[:, None] * self.size + positions).flatten(), index, keys)
        return self.logits(LayerList(self.layers, placement), counts, ids, hiding)
