"""
Blocks with keys and values: vLLM's paged cache for a model. One forward pass takes any mixture of prompts and next
tokens.

`PagedCache` keeps sequences in a pool of blocks, see `base.BaseCache`. `execute_model` is the same pass as one call,
with block tables as arguments, see block_tables.py.
"""
from dataclasses import replace
from itertools import accumulate
from operator import add
from types import SimpleNamespace

import torch

from decode.fingerprint import Watch
from kvcache.base import BaseCache
from kvcache.block_tables import PagedMetadata, execute_model, one_pass
from kvcache.blocks import BlockManager
from kvcache.exclusive import exclusive
from kvcache.placement import NotNumbers, device_of, make_layers
from kvcache.protocol import Work
from kvcache.steps import Steps

__all__ = ['PagedCache', 'PagedMetadata', 'execute_model', 'n_blocks_for']

AFTER_ALL = 2**40  # a block number after those of any sequence


def n_blocks_for(config, block_size):
    """The largest number of blocks that a sequence of a model needs, and one without end if the model has a window."""
    if not config.window:
        return -(-config.block_size // block_size)
    # a chunk of window + 1 tokens and the window - 1 before it, which begin anywhere in a block
    n = -(-config.n_sink // block_size) + (2 * config.window - 2) // block_size + 2
    return min(n, -(-config.max_positions // block_size)) if config.position == 'learned' else n


class PagedCache(BaseCache):
    """
    Sequences of a model in a pool of n_blocks blocks of block_size positions. type_kv: how keys and values are stored,
    see `Rows`. tokens: {sequence: the ids of its tokens}. blocks: the `BlockManager`.

    A sequence computes only those first tokens that are not in a remembered block. Blocks are shared only between
    sequences that were computed with the same weights:
    - when a sequence begins by a step, a `Watch` compares the model with its state before. If it is not identical, all
      blocks are forgotten.
    - before each forward pass, and after one that has filled a block, the `Watch` looks for changes cheaply. If there
      are any, all blocks are forgotten, and blocks that the present sequences fill later are not remembered, even if
      the earlier weights come back. With a decoder that has a compiled step there is no `Watch`: the decoder looks for
      changes, and blocks belong to the `version` of its weights.
    Between two beginnings these changes are noticed: every change through torch (optimizers, load_state_dict, in-place
    operations), replaced parameters and modules, new hooks, and changes through .data or numpy that reach one of the
    values that are compared, as changes of a whole parameter do. Not noticed: a change through .data or numpy that
    leaves these values alone and is undone before the next beginning, and autocast.
    """

    def __init__(self, model, n_blocks, block_size=16, type_kv='float32', decoder=None):
        window, n_sink = model.config.window, model.config.n_sink
        self.blocks, self.tokens = BlockManager(n_blocks, block_size, window=window, n_sink=n_sink), {}
        # of the model when the blocks that are remembered were computed. version: another number after each change
        self.watch = self.version = None
        super().__init__(model, n_blocks, make_layers(model, (n_blocks, block_size), type_kv), 'paged', type_kv,
                         decoder)

    def new(self, salt=''):
        """
        As `BaseCache.new`. The sequence finds only blocks that were computed for sequences with an equal salt (vLLM's
        cache_salt): users who must not learn from a fast answer what others have asked get different ones.
        """
        return self.made_by(self.begin, salt)

    @exclusive
    def reuse_prefix(self, seq, tokens):
        """
        Give a new sequence the remembered blocks with which its text begins. Returns how many tokens these hold; it
        goes on at that position. A step looks by itself for the tokens that it is given, which may not be all.
        """
        if self.length(seq) or seq in self.blocks.tables:
            raise ValueError(f"sequence {seq} has begun already: look for its text before its first step")
        if self.decoder:
            self.decoder.notice_changes()
        if self.version is None or self.weights_differ():
            self.forget_blocks()
        self.lengths[seq] = self.begin_text(seq, list(tokens))
        return self.lengths[seq]

    @property
    def page_size(self):
        return self.blocks.block_size

    @property
    def records(self):
        """{sequence: its length and its block table}."""
        return {seq: SimpleNamespace(length=n, table=self.blocks.tables.get(seq, []), salt=self.salts[seq])
                for seq, n in self.lengths.items()}

    def step(self, handles, starts=None, tokens=None, wanted=None):
        """See `Steps.step`, whose `Work` may come as three arguments."""
        work = handles if starts is None else Work(handles, starts, tokens)
        try:
            return super().step(work, wanted)
        except NotNumbers:
            self.set_to_zero()
            raise

    @exclusive
    def set_to_zero(self):
        for seq in self.lengths:
            self.cut_to(seq, 0)
        self.zero_all()

    @exclusive
    def reserve(self, seqs, n):
        """
        Blocks for the next n tokens of each of these sequences, or for fewer where blocks do not suffice. Returns for
        how many. Blocks that a sequence has for later tokens are released.
        """
        blocks, size = self.blocks, self.page_size
        n = min(n, self.window + 1) if self.window else n
        for seq in seqs:
            if len(blocks.tables[seq]) > -(-(self.length(seq) + n) // size):
                blocks.truncate(seq, self.lengths[seq])
            blocks.free_passed(seq)
        while n and sum([new + shared for new, shared, *_ in [blocks.needs(s, n) for s in seqs]]) > self.n_free:
            n //= 2
        for seq in seqs:
            if self.kernel and n and self.lengths[seq] + n > blocks.runs.get(seq, (None, 0))[1]:
                self.extended(seq, n)
                blocks.length[seq] = self.lengths[seq]
        return n

    def decode_steps(self, seqs, next_tokens):
        """
        Steps of one more token of each of these sequences, which have some. The first row of the `NextTokens` is given,
        and a compiled function draws the others, at most as many as there is room for (see `reserve`), in one call of
        the kernel. Returns the logits (B, vocab_size) of the last step. If a step fails, the sequences have the tokens
        of before this call.
        """
        try:
            return self.decode_once(seqs, next_tokens)
        except NotNumbers:
            self.set_to_zero()
            raise

    @exclusive
    def decode_once(self, seqs, next_tokens):
        tokens, starts = next_tokens.tokens, list(map(self.length, seqs))
        if not all(starts) or tokens.shape[1] != len(seqs) or next_tokens.n_drawn:
            raise ValueError(f"sequences {seqs} have {starts} tokens, {tokens.shape[1]} come, and "
                             f"{next_tokens.n_drawn} rows were drawn: feed each sequence by `step` first, and give each one token")
        if self.kernel is None:
            ids = torch.from_numpy(tokens[0])[:, None].to(device_of(self.model))
            logits = Steps.step.__wrapped__(self, Work(seqs, starts, ids))
            next_tokens.draw_from(logits.float().cpu().contiguous())
            return logits
        runs = self.make_room(seqs, starts, [1] * len(seqs))
        n = min(self.blocks.runs[seq][1] - start for seq, start in zip(seqs, starts))
        next_tokens.n_steps, next_tokens.version = min(n, len(tokens) - 1), self.version
        metadata = replace(self.kernel.metadata([1] * len(seqs), runs), next_tokens=next_tokens)
        logits = self.compiled(torch.from_numpy(tokens[0]), self.kernel.positions(starts, [1] * len(seqs)), metadata)
        if not next_tokens.n_drawn:
            next_tokens.draw_from(logits)
        counts = [next_tokens.n_drawn] * len(seqs)
        ends = list(map(add, starts, counts))
        for seq, new in zip(seqs, tokens[:next_tokens.n_drawn].T.tolist()):
            self.tokens[seq] += new
        self.lengths.update(zip(seqs, ends))
        self.blocks.length.update(zip(seqs, ends))
        self.remember_filled(seqs, ends, counts)
        return logits

    @property
    def n_free(self):
        """How many blocks are in no table. Some may be remembered."""
        return len(self.blocks.free)

    def n_missing(self, seq, n):
        """
        How many free blocks n more tokens of a sequence take, of a new one if seq is None; negative if more are
        released, because the next token does not see them. With a window and n > window + 1 it is an estimate of the
        most that they take while they are fed: too small if other sequences share blocks that the window passes.
        """
        most = n_blocks_for(self.model.config, self.page_size)
        if seq is None or seq not in self.blocks.tables:
            return min(-(-n // self.page_size), most)
        n_new, shared, _, n_freed = self.blocks.needs(seq, n)
        if self.window and n > self.window + 1:
            table = self.blocks.tables[seq]
            n_needed = min(-(-(self.blocks.length[seq] + n) // self.page_size), most)
            return min(n_new + shared, n_needed - len(table) + table.count(None))
        return n_new + shared - n_freed

    def copy(self, seq, new):
        self.blocks.fork(seq, new)
        self.tokens[new] = self.tokens[seq][:]

    def cut(self, seq, n):
        if n:
            del self.tokens[seq][n:]
            self.blocks.truncate(seq, n)
        else:
            self.tokens.pop(seq, None)
            if seq in self.blocks.tables:
                self.blocks.remove(seq)

    def holds(self, seq, n):
        return n == 0 or seq in self.blocks.tables and self.blocks.complete(self.blocks.tables[seq], n)

    def recover(self):
        for seq in [seq for seq in self.blocks.tables if not self.lengths.get(seq)]:
            del self.blocks.tables[seq]
        self.blocks.recover()
        super().recover()

    def zero_all(self):
        self.blocks.reset()
        super().zero_all()

    def copy_block(self, source, target):
        for layer in self.layers:
            layer.copy(source, target)

    def remove_behind(self, seq, length, n_keep, n):
        first = n_keep - n_keep % self.blocks.block_size  # of the first block that changes
        old = self.blocks.slots(seq, first, n_keep) + self.blocks.slots(seq, n_keep + n, length)
        self.blocks.renew(seq, n_keep, length - n)
        new = self.blocks.slots(seq, first, length - n)
        shifts = torch.tensor([0] * (n_keep - first) + [-n] * (length - n_keep - n))
        for layer in self.layers:
            layer.move(torch.tensor(old), torch.tensor(new), self.turning(shifts))
        del self.tokens[seq][n_keep:n_keep + n]

    def begin_texts(self, seqs, texts):
        if self.decoder:
            self.forget_blocks_if_changed()  # `step` has had all weights compared
        elif self.watch is None or not self.watch.identical():
            self.forget_blocks()
        return [self.begin_text(seq, text.tolist()) for seq, text in zip(seqs, texts)]

    def has_begun(self, seq):
        return not self.lengths[seq] and seq in self.blocks.tables  # by `reuse_prefix`, which has found nothing

    def begin_text(self, seq, text):
        """A new sequence with the blocks that hold the beginning of its text. Returns how many tokens these are."""
        n = self.blocks.add(seq, text, 0, self.salts[seq])
        self.tokens[seq] = text[:n]
        return n

    def begin_decoding(self, seqs, ends):
        return None

    def make_room(self, seqs, starts, counts):
        blocks, found, ends = self.blocks, [], list(map(add, starts, counts))
        if self.window:
            for seq in seqs:
                blocks.free_passed(seq)
        for seq, end, n in zip(seqs, ends, counts):
            runs, limit = blocks.runs.get(seq, (None, 0))
            if end > limit:
                runs = self.extended(seq, n)
            found.append(runs)
        blocks.length.update(zip(seqs, ends))
        return found

    def extended(self, seq, n):
        """Make room for n more positions of a sequence. Returns its `Runs`, of one block each or more."""
        table, size, start = self.blocks.tables[seq], self.blocks.block_size, self.blocks.length[seq]
        done = len(table)
        self.blocks.extend(seq, n, self.copy_block)
        runs, _ = self.blocks.runs.get(seq, (None, 0))
        if runs is None:
            runs, done = self.kernel.runs(), 0
        for i, block in enumerate(table[done:], done):
            if block is not None:
                runs.append(i * size, block * size, size)
        limit = len(table) * size
        if self.window:  # or until the window has passed another block
            limit = min(limit, (self.blocks.needed(start)[1].start + 1) * size + self.window - 1)
        self.blocks.runs[seq] = runs, limit
        return runs

    def compiled(self, ids, positions, metadata):
        logits = super().compiled(ids, positions, metadata)
        self.forget_blocks_if_changed()  # the decoder may have noticed other weights in this step
        return logits

    def kernel_pass(self, seqs, starts, counts, ids, wanted=None):
        logits = super().kernel_pass(seqs, starts, counts, ids, wanted)
        new, ends = ids.tolist(), list(map(add, starts, counts))
        for seq, stop, n in zip(seqs, accumulate(counts), counts):
            self.tokens[seq] += new[stop - n:stop]
        self.remember_filled(seqs, ends, counts)
        return logits

    def remember_filled(self, seqs, ends, counts):
        """Remember the blocks that the last tokens of sequences have filled, so many of each."""
        size = self.blocks.block_size
        for seq in [seq for seq, end, n in zip(seqs, ends, counts) if end % size < n]:
            self.blocks.remember(seq, self.tokens[seq])

    def forward_pass(self, seqs, starts, counts, ids, hiding=False, wanted=None):
        for seq in seqs:
            if seq not in self.tokens:  # its first pass failed, and is tried again
                self.begin_text(seq, [])
            self.blocks.free_passed(seq)
        for seq, part in zip(seqs, ids.split(counts)):
            self.blocks.extend(seq, len(part), self.copy_block)
            self.tokens[seq] += part.tolist()
        ids, positions, metadata = self.inputs(seqs, starts)
        self.forget_blocks_if_changed()
        logits = one_pass(self.model, ids, positions, self.layers, metadata, hiding, wanted)
        # a block was filled if the tokens behind the last full block are fewer than the new ones
        filled = [seq for seq, start in zip(seqs, starts)
                  if len(self.tokens[seq]) % self.blocks.block_size < len(self.tokens[seq]) - start]
        if filled:
            self.forget_blocks_if_changed()  # during the pass
        for seq in filled:
            self.blocks.remember(seq, self.tokens[seq])
        return logits

    def inputs(self, seqs, starts):
        """`execute_model`'s input_ids (N,), input_positions (N,) and `PagedMetadata`, for the tokens from starts on."""
        ids, positions, slots, query_lens, seq_lens, tables, numbers = [], [], [], [], [], [], []
        for seq, start in zip(seqs, starts):
            end = len(self.tokens[seq])
            ids += self.tokens[seq][start:]
            positions += range(start, end)
            slots += self.blocks.slots(seq, start, end)
            query_lens.append(end - start)
            seq_lens.append(end)
            sinks, others = self.blocks.needed(start, end)
            numbers.append([*sinks, *others])
            tables.append([self.blocks.tables[seq][i] for i in numbers[-1]])
        n_blocks = max(map(len, tables))
        tables = [block for table in tables for block in table + [-1] * (n_blocks - len(table))]
        numbers = [number for some in numbers for number in some + [AFTER_ALL] * (n_blocks - len(some))]
        parts = ids, positions, slots, query_lens, seq_lens, tables, numbers if self.window else []
        one = torch.tensor(sum(parts, []), device=device_of(self.model))  # one transfer to the device
        ids, positions, slots, query_lens, seq_lens, tables, numbers = one.split([len(part) for part in parts])
        metadata = PagedMetadata(slots, tables.view(-1, n_blocks), query_lens, seq_lens,
                                 numbers.view(-1, n_blocks) if self.window else None)
        return ids, positions, metadata

    def forget_blocks_if_changed(self):
        if self.weights_differ():
            self.forget_blocks()

    def weights_differ(self):
        return self.version != self.decoder.version if self.decoder else not self.watch.unchanged()

    def forget_blocks(self):
        """Forget all blocks, and do not remember those that the present sequences fill: the weights have changed."""
        self.blocks.reset()
        if self.decoder:
            self.version = self.decoder.version
        else:
            self.version = (self.version or 0) + 1
            self.watch = Watch(self.model)
