"""
A decoder's tuples as a cache of sequences, and the cache of a model that uses none.

Both have the methods of `protocol.Cache`.
"""
import math

import torch

from kvcache.protocol import check_shift
from positions import rotary_angles, rotate


class TupleCache:
    """
    The list of tuples (k_cache, v_cache, cache_pos) of a decoder: a sequence is a row of their batch.

    decoder: a callable (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache); the model's own `step` if None.
    keeps_full: keep the keys and values of a sequence that fills the window, for `shift`.

    Sequences that are fed together are in one batch. It has an int as cache_pos if they have the same length, and a
    tensor if not. Rows are copied only when the sequences that are fed are not those of the step before. When new
    tokens fill all of block_size, the next token moves all positions, so nothing is kept of that sequence.
    """

    def __init__(self, model, decoder=None, keeps_full=False):
        self.model, self.name = model, getattr(decoder, 'name', 'the model')
        self.decoder = decoder or (self.model_step if keeps_full else model.step)
        self.full_at = math.inf if keeps_full else model.config.max_positions  # so many new tokens fill the window
        self.kv_cache, self.batch = None, []  # the handle of each row
        self.row, self.length = {}, {}        # {handle: its row}: forks share one until they are fed; {handle: tokens}
        self.window, self.n_handles = None, 0  # window: the storage of a decoder for sequences that fill it

    def new(self):
        self.n_handles += 1
        self.length[self.n_handles] = 0
        return self.n_handles

    def fork(self, handle):
        new = self.new()
        self.length[new] = self.length[handle]
        if handle in self.row:
            self.row[new] = self.row[handle]
        return new

    def truncate(self, handle, n):
        check_start(n, self.length[handle])
        self.check_stored(handle, n)
        self.length[handle] = n

    def check_stored(self, handle, n):
        """ValueError if a cache that rolls has dropped positions that the token at position n sees."""
        c = self.model.config
        if c.window and n > c.n_sink and handle in self.row:
            first = int(self.kv_cache[0][3][self.row[handle]])
            if first > max(c.n_sink, n - c.window + 1):
                raise ValueError(f"positions before {first} of this sequence are not in the cache any more, and a "
                                 f"token at {n} sees them: truncate it to 0 and feed it again")

    def shift(self, handle, n_keep, n):
        """See `protocol.Cache.shift`."""
        length, c = self.length[handle], self.model.config
        check_shift(c, handle, length, n_keep, n)
        if list(self.row.values()).count(self.row[handle]) > 1:  # a row that forks share
            self.arrange([handle])
        row, angles = self.row[handle], None
        source, target = slice(n_keep + n, length), slice(n_keep, length - n)
        if c.position == 'rope':
            angles = rotary_angles(torch.tensor([-n], device=self.kv_cache[0][0].device), c.head_dim, c.rope_theta)
        for k_cache, v_cache, *_ in self.kv_cache:
            keys = k_cache[row, :, source]
            if angles is not None:
                keys = rotate(keys.double(), angles.cos(), angles.sin()).to(keys.dtype)
            k_cache[row, :, target] = keys.clone()
            v_cache[row, :, target] = v_cache[row, :, source].clone()
        self.length[handle] = length - n

    def model_step(self, idx, kv_cache):
        """The model as a decoder that also keeps tokens that fill the window."""
        logits, _, kv_cache = self.model(idx, kv_cache=kv_cache, use_cache=True)
        return logits, kv_cache

    def free(self, handle):
        self.length.pop(handle, None)
        self.row.pop(handle, None)

    def nbytes(self):
        """Bytes of all tuples."""
        return sum(layer[i].nbytes for layer in [*(self.kv_cache or []), *(self.window or [])] for i in (0, 1))

    def step(self, work):
        """See `protocol.Cache.step`."""
        handles, starts, tokens = work
        for handle, start in zip(handles, starts):
            if start != self.length.get(handle, -1):
                check_start(start, self.length.get(handle, -1))
                self.check_stored(handle, start)
        self.length.update(zip(handles, starts))  # if this step fails, this is what it leaves
        full_at = self.full_at
        if isinstance(tokens, torch.Tensor) and tokens.size(1) == 1 < full_at:
            same = starts.count(starts[0]) == len(starts)
            cache_pos = starts[0] if same else torch.tensor(starts, device=tokens.device)
            logits, ends = self.run(handles, cache_pos, tokens), [start + 1 for start in starts]
        elif not isinstance(tokens, torch.Tensor) or starts.count(starts[0]) < len(starts):
            logits = self.step_mixed(handles, starts, list(tokens))
            ends = [start + len(new) if len(new) < full_at else 0 for start, new in zip(starts, tokens)]
        elif tokens.size(1) < full_at:
            logits, ends = self.run(handles, starts[0], tokens), [starts[0] + tokens.size(1)] * len(handles)
        else:
            logits, ends = self.fill_window(handles, tokens), [0] * len(handles)
        self.length.update(zip(handles, ends))
        return logits.squeeze(1)

    def step_mixed(self, handles, starts, tokens):
        """Sequences of several lengths: those that fill the window together, and all others together."""
        full = [i for i, new in enumerate(tokens) if len(new) >= self.full_at]
        others = [i for i in range(len(handles)) if i not in full]
        parts = []
        if full:
            parts.append(self.fill_window([handles[i] for i in full], torch.stack([tokens[i] for i in full])))
        if others:
            parts.append(self.run_ragged(*([each[i] for i in others] for each in (handles, starts, tokens))))
        if not full:
            return parts[0]
        order = torch.tensor(full + others, device=parts[0].device)
        return torch.cat(parts)[order.argsort()]

    def run(self, handles, cache_pos, idx):
        """The decoder on idx (B, T) for these sequences, at cache_pos, an int or a tensor (B,)."""
        self.arrange(handles)
        logits, kv_cache = self.decoder(idx, self.rows(len(handles), cache_pos))
        if len(handles) == len(self.batch):
            self.kv_cache = kv_cache
        return logits

    def run_ragged(self, handles, starts, tokens):
        """
        One step for sequences of different lengths; tokens: (T_i,) each.

        All tokens but a sequence's last are written first. They are padded to one length, and the next token is
        written over the padding before anything reads it. (A cache that rolls would drop what a short sequence needs
        to make room for the padding, so there each sequence is fed alone.) Then all last tokens take one step together.
        """
        self.arrange(handles)
        prompts = [i for i, new in enumerate(tokens) if len(new) > 1]
        if self.kv_cache is None and not self.model.config.window:
            self.kv_cache = self.decoder(padded([new[:-1] for new in tokens]), self.rows(len(handles), 0))[1]
        elif self.kv_cache is None:
            self.kv_cache = self.model.empty_cache(len(handles))
        if self.model.config.window:
            for i in prompts:
                self.write([i], starts[i], tokens[i][None, :-1])
        elif prompts and not any(starts[i] for i in prompts):
            self.write(prompts, 0, padded([tokens[i][:-1] for i in prompts]))
        else:
            for i in prompts:
                self.write([i], starts[i], tokens[i][None, :-1])
        ends = [start + len(new) - 1 for start, new in zip(starts, tokens)]
        return self.run(handles, torch.tensor(ends, device=tokens[0].device), torch.stack([new[-1:] for new in tokens]))

    def write(self, rows, cache_pos, idx):
        """Feed idx (n, T) at cache_pos to some rows of the batch; the logits are of no use."""
        rows = torch.tensor(rows, device=idx.device)
        _, written = self.decoder(idx, at(self.kv_cache, cache_pos, rows))
        for layer, new in zip(self.kv_cache, written):
            for i, tensor in enumerate(layer):
                if i != 2:
                    tensor.index_copy_(0, rows.to(tensor.device), new[i])

    def fill_window(self, handles, idx):
        """Logits for sequences whose tokens idx (B, block_size) fill the window, in storage that is used again."""
        if self.kv_cache is not None and not any(n for handle, n in self.length.items() if handle not in handles):
            self.window, self.kv_cache, self.batch, self.row = self.kv_cache, None, [], {}
        storage = self.window if self.window and len(self.window[0][0]) == len(idx) else None
        logits, self.window = self.decoder(idx, storage and at(storage, 0))
        return logits

    def rows(self, n, cache_pos):
        """The list of tuples for the decoder: the first n rows of the batch, as views, at cache_pos; or None."""
        if self.kv_cache is None:
            if not self.window or len(self.window[0][0]) != n:
                return None
            storage, self.window = self.window, None
            return at(storage, 0)
        if n == len(self.batch):
            if type(cache_pos) is type(self.kv_cache[0][2]) is int and cache_pos == self.kv_cache[0][2]:
                return self.kv_cache
            return at(self.kv_cache, cache_pos)
        return at(self.kv_cache, cache_pos, slice(n))

    def arrange(self, handles):
        """Make these sequences the first rows of the batch, in this order; other sequences with tokens come after."""
        if handles == self.batch:
            return
        batch = handles + [handle for handle, n in self.length.items() if n and handle not in handles]
        if batch == self.batch:
            return
        kv_cache = self.kv_cache
        if kv_cache is not None:
            # a new sequence gets a copy of row 0: numbers that it writes over before it reads them
            rows = torch.tensor([self.row.get(handle, 0) for handle in batch], device=kv_cache[0][0].device)
            kv_cache = at(kv_cache, kv_cache[0][2], rows)
        # in one statement, so that no interrupt comes between the rows and their numbers
        self.kv_cache, self.batch, self.row = kv_cache, batch, {handle: row for row, handle in enumerate(batch)}


class NoCache:
    """Keeps the tokens of each sequence and computes them all in each step: what generation without a cache is."""
    name = 'no cache'

    def __init__(self, model):
        self.model, self.tokens = model, {}  # {handle: (T,)}

    def new(self):
        handle = len(self.tokens)
        self.tokens[handle] = None
        return handle

    def fork(self, handle):
        new = self.new()
        self.tokens[new] = self.tokens[handle]
        return new

    def truncate(self, handle, n):
        self.tokens[handle] = self.tokens[handle][:n]

    def free(self, handle):
        self.tokens[handle] = None

    def nbytes(self):
        return 0

    def step(self, work):
        """See `protocol.Cache.step`. Sequences of different lengths are computed one by one."""
        for handle, start, new in zip(*work):
            self.tokens[handle] = torch.cat([self.tokens[handle][:start], new]) if start else new
        texts = [self.tokens[handle] for handle in work.handles]
        together = [texts] if len({len(text) for text in texts}) == 1 else [[text] for text in texts]
        return torch.cat([self.model.step(torch.stack(part), None, use_cache=False)[0] for part in together])[:, 0]


def at(kv_cache, cache_pos, rows=None):
    """The layers of a list of tuples at another cache_pos; of all rows, or views of a slice, or copies of rows (n,)."""
    if rows is None:
        return [(k_cache, v_cache, cache_pos, *first) for k_cache, v_cache, _, *first in kv_cache]
    on_cpu = rows if isinstance(rows, slice) else rows.cpu()  # where a `RollingKVCache` has its `first`
    return [(k_cache[rows], v_cache[rows], cache_pos, *(each[on_cpu] for each in first))
            for k_cache, v_cache, _, *first in kv_cache]


def check_start(start, length):
    """ValueError unless a sequence of `length` cached tokens, -1 for an unknown one, can go on at position `start`."""
    if not 0 <= start <= length:
        holds = f"holds {length} tokens of this sequence" if length >= 0 else "does not know this sequence"
        raise ValueError(f"the cache {holds}: it cannot go on from position {start}")


def padded(tokens):
    """Token ids (T_i,) each, one below the other, with zeros behind the shorter ones: (B, T), T at least 1."""
    idx = tokens[0].new_zeros(len(tokens), max(1, *map(len, tokens)))
    for row, new in zip(idx, tokens):
        row[:len(new)] = new
    return idx
