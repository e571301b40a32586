"""
The contiguous cache: for each sequence a row of as many slots as its keys need, one for each position, as in the
model's tuples; or these tuples themselves, for decoders that read nothing else.
"""
import torch

from decode.eager import EagerDecoder, check_step
from decode.metadata import Runs
from kvcache.base import BaseCache, are_numbers, turning
from kvcache.records import RowRecord
from kvcache.storage import check_memory, make_layers
from positions import sequence_runs


class ContiguousCache(BaseCache):
    """
    Position p of a sequence is slot p of its row, see `positions.ring_slots`; n_seq: the largest number of sequences.
    type_kv: how keys and values are stored, see `storage.Rows`.
    """
    record_type = RowRecord

    def __init__(self, model, n_seq, type_kv='float32', decoder=None):
        self.n_slots, self.free_rows = model.config.n_slots, list(range(n_seq))[::-1]
        self.n_ring = self.n_slots - model.config.n_sink
        super().__init__(model, n_seq, self.new_layers(model, n_seq, type_kv), 'tuple', type_kv, decoder)

    def new_layers(self, model, n_seq, type_kv):
        return make_layers(model, n_seq * self.n_slots, type_kv)

    def extend(self, record, n):
        """
        The runs of a ring cover 2 * window positions, from the first that the next token sees: room for window + 1 more
        tokens. Without a window they never change.
        """
        if record.row is None:
            record.row = self.free_rows.pop()
        rows = sequence_runs(record.row * self.n_slots, self.model.config, record.length)
        record.runs, record.room = Runs(rows), rows[-1][0] + rows[-1][2]

    def added(self, records, counts, ids):
        super().added(records, counts, ids)
        self.wrote(records, 0)

    def wrote(self, records, n):
        for record in records if self.window else ():
            record.reached = max(record.reached, record.length + n)

    def cut(self, record, n):
        # the slots behind a sequence's end are hidden by their positions, and written before they are read
        if n == 0 and record.row is not None:
            self.free_rows.append(record.row)
            record.row, record.runs, record.room, record.reached = None, None, 0, 0
        elif self.window:
            record.room = 0
            if n <= max(self.n_sink, record.reached - self.n_ring):
                record.reached = n  # only sinks are left: the ring begins anew

    def copy(self, record, new):
        self.extend(new, 0)
        new.reached = record.reached
        n = min(max(record.reached, record.length), self.n_slots)
        for layer in self.layers:
            layer.copy(record.row * self.n_slots, new.row * self.n_slots, n)

    def remove_behind(self, record, n_keep, n):
        slots = record.row * self.n_slots + torch.arange(n_keep + n, record.length, device='cpu')
        for layer in self.layers:
            layer.move(slots, slots - n, turning(self.model.config, torch.full((len(slots),), -n, device='cpu')))

    def first_held(self, record):
        return max(self.n_sink, record.reached - self.n_ring)


class TupleCache(ContiguousCache):
    """
    The model's tuples, for a decoder that is any callable (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size),
    kv_cache) and writes the tuples in place; the model itself if it is None. It gets views of the leading rows, so rows
    are exchanged when the sequences that are fed are not those of the step before.
    """

    def __init__(self, model, n_seq, decoder=None):
        super().__init__(model, n_seq, 'tuples', decoder)

    def new_layers(self, model, n_seq, type_kv):
        return [TupleLayer(*layer[:2]) for layer in model.empty_cache(n_seq)]

    def executor_for(self, decoder):
        executor = TupleExecutor(self.model, decoder, self.layers)
        return executor, executor  # it has `finite`, and needs no arrays

    def make_room(self, records, counts):
        super().make_room(records, counts)
        self.lead(records)

    def feed(self, records, counts, ids, wanted=None):
        logits = super().feed(records, counts, ids, wanted)
        self.lead(records)  # through a window the last chunks were of some of them, and the next step is of all
        return logits

    def lead(self, records):
        """Make the rows of these sequences the first ones, in this order."""
        rows = [record.row for record in records]
        if rows == list(range(len(rows))):
            return
        others = [record for record in self.records.values() if record.row is not None and record not in records]
        order = rows + [record.row for record in others]
        for layer in self.layers:
            layer.permute(order)
        for row, record in enumerate([*records, *others]):
            record.row, record.runs, record.room = row, None, 0
            self.extend(record, 0)
        self.free_rows = list(range(len(order), self.n_seq))[::-1]


def cache_for(model, n_seq, decoder=None):
    """The cache in which a decoder is fastest: of tuples, which PyTorch reads as views, unless it is compiled."""
    compiled = hasattr(decoder, 'execute_model') and not isinstance(decoder, EagerDecoder)
    check_memory(model, n_seq, 'float32' if compiled else str(model.lm_head.weight.dtype).removeprefix('torch.'))
    return ContiguousCache(model, n_seq, decoder=decoder) if compiled else TupleCache(model, n_seq, decoder)


class TupleLayer:
    """The tuple of one layer, k_cache and v_cache (n_seq, n_kv_head, n_slots, head_dim), as a `storage.Layer`."""

    def __init__(self, k_cache, v_cache):
        self.caches, self.n_slots = (k_cache, v_cache), k_cache.size(2)

    def zero(self):
        for cache in self.caches:
            cache.zero_()

    def nbytes(self):
        return sum(cache.nbytes for cache in self.caches)

    def copy(self, source, target, n):
        for cache in self.caches:
            cache[target // self.n_slots, :, :n] = cache[source // self.n_slots, :, :n]

    def move(self, source, target, turning=None):
        row = int(source[0]) // self.n_slots
        for cache in self.caches:
            a, b = ((slots % self.n_slots).to(cache.device) for slots in (source, target))
            moved = cache[row][:, a]
            cache[row][:, b] = turning(moved) if turning is not None and cache is self.caches[0] else moved

    def permute(self, order):
        """Let row i have what row order[i] has had, for the first len(order) rows."""
        for cache in self.caches:
            cache[:len(order)] = cache[order]


class TupleExecutor:
    """
    A decoder of tuples behind the call of an executor: the sequences of a step are the leading rows of all tuples.

    It stands for the `KVArrays` as well, which are not made. finite: were the logits of the last step numbers? (-inf is
    one here.) On a GPU to look would be to wait for the step, and those who draw look at the first one.
    """
    version, finite = 0, True

    def __init__(self, model, decoder, layers):
        self.model, self.decoder, self.layers = model, decoder or self.model_step, layers
        self.name = getattr(decoder, 'name', 'the model')
        self.notice_changes = getattr(decoder, 'notice_changes', lambda: None)
        self.views = {}  # {B: k_cache and v_cache of the first B rows, for each layer}

    def model_step(self, idx, kv_cache):
        """The model's own step; tokens that fill the context are kept as well."""
        if idx.size(1) < self.model.config.max_positions:
            return self.model.step(idx, kv_cache)
        logits, _, kv_cache = self.model(idx, kv_cache=kv_cache, use_cache=True)
        return logits, kv_cache

    def execute_model(self, input_ids, input_positions, kv_caches, input_metadata):
        """See `decode.cpu.CPUDecoder.execute_model`; the logits are those of each sequence's last token."""
        if input_ids.is_cpu or self.model.training:  # a GPU would wait for the tokens
            check_step(self.model, input_ids, input_positions, input_metadata)
        counts, device = input_metadata.query_lens, input_ids.device
        if input_metadata.wanted is not None:
            raise ValueError("a decoder of tuples has no logits of other tokens than the last ones: make a cache with "
                             "a decoder that has execute_model, such as decode.EagerDecoder(model)")
        if counts.count(counts[0]) == len(counts):
            starts = torch.from_numpy(input_positions[::counts[0]])
            logits = self.run(input_ids.view(len(counts), -1), starts.to(device))
        else:
            logits = self.run_ragged(input_ids.split(counts), torch.from_numpy(input_positions).split(counts), device)
        logits = logits[:, 0]
        self.finite = device.type != 'cpu' or are_numbers(logits)
        return logits

    def run(self, idx, starts, first=0):
        """
        The decoder on idx (B, T) for the rows from number `first` on, at positions starts (B,). One step has one int as
        cache_pos where it can.
        """
        low, high = starts.aminmax()
        return self.decoder(idx, self.rows(first, len(idx), int(low) if low == high else starts))[0]

    def run_ragged(self, tokens, positions, device):
        """
        One step for sequences with different numbers of new tokens, (T_i,) each.

        All tokens but a sequence's last are written first: in one padded batch where all begin at 0, since the next
        token is written over the padding before anything reads it; otherwise for each sequence alone. (In a ring the
        padding would lie over what a sequence needs.) Then all last tokens take one step together.
        """
        starts = [int(of_sequence[0]) for of_sequence in positions]
        if not any(starts) and not self.model.config.window:
            idx = torch.nn.utils.rnn.pad_sequence([new[:-1] for new in tokens], batch_first=True)
            self.run(idx, torch.zeros(len(idx), dtype=torch.int64, device='cpu'))
        else:
            for row, (new, start) in enumerate(zip(tokens, starts)):
                if len(new) > 1:
                    self.run(new[None, :-1], torch.tensor([start], device='cpu'), row)
        last = torch.tensor([int(of_sequence[-1]) for of_sequence in positions], device=device)
        return self.run(torch.stack([new[-1:] for new in tokens]), last)

    def rows(self, first, n, cache_pos):
        """The list of tuples of n rows from number `first` on, as views, at cache_pos."""
        if (first, n) not in self.views:
            self.views[first, n] = [[cache[first:first + n] for cache in layer.caches] for layer in self.layers]
        return [(k_cache, v_cache, cache_pos) for k_cache, v_cache in self.views[first, n]]
