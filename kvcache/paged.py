"""
Blocks with keys and values: vLLM's paged cache for a model. Prompts that begin alike share their blocks, and a sequence
computes only what is not remembered.
"""
import torch

from decode.metadata import Runs
from kvcache.base import BaseCache, exclusive, turning
from kvcache.blocks import BlockManager, OutOfBlocks
from kvcache.records import BlockRecord
from kvcache.storage import make_layers


def n_blocks_for(config, page_size):
    """The largest number of blocks that a sequence of a model needs, and one without end if the model has a window."""
    if not config.window:
        return -(-config.block_size // page_size)
    # a chunk of window + 1 tokens and the window - 1 before it, which begin anywhere in a block
    n = -(-config.n_sink // page_size) + (2 * config.window - 2) // page_size + 2
    return min(n, -(-config.max_positions // page_size)) if config.position == 'learned' else n


class PagedCache(BaseCache):
    """
    Sequences of a model in a pool of n_blocks blocks of page_size positions. type_kv: how keys and values are stored,
    see `storage.Rows`. blocks: the `BlockManager`.

    A sequence computes only those first tokens that are not in a remembered block. It finds only blocks that were
    computed with the same weights, which are compared when a sequence begins (see `changes.Watch`), and for sequences
    with an equal salt (vLLM's cache_salt): users who must not learn from a fast answer what others have asked get
    different ones. version: of the weights, as the executor counts them; when it has changed, all blocks are forgotten,
    and those that sequences of before fill later are not remembered.
    """
    record_type = BlockRecord

    def __init__(self, model, n_blocks, page_size=16, type_kv='float32', decoder=None):
        self.blocks = BlockManager(n_blocks, page_size, window=model.config.window, n_sink=model.config.n_sink)
        self.page_size = page_size
        super().__init__(model, n_blocks, make_layers(model, n_blocks * page_size, type_kv), 'paged', type_kv, decoder)
        self.known_version = self.version  # of the weights with which the remembered blocks were computed

    @exclusive
    def reuse_prefix(self, handle, tokens, noticed=False):
        """
        Give a new sequence the remembered blocks with which its text begins. Returns how many tokens these hold; it
        goes on at that position. A step looks by itself for the tokens that it is given, which may not be all.
        noticed: this is not the first of several that begin together, so the weights need not be compared again.
        """
        record = self.record(handle)
        if record.begun:
            raise ValueError(f"sequence {handle} has begun already: look for its text before its first step")
        if not noticed:
            self.notice_changes()
        record.begun = True
        return self.blocks.begin(record, list(tokens))

    @property
    def version(self):
        """Of the weights: it changes as soon as the executor reads others."""
        return self.executor.version

    @property
    def n_free(self):
        """How many blocks are in no table. Some may be remembered."""
        return len(self.blocks.free)

    def n_missing(self, handle, n):
        """
        How many free blocks n more tokens of a sequence take, of a new one if handle is None; negative if more are
        released, because the next token does not see them. With a window and n > window + 1 it is an estimate of the
        most that they take while they are fed; it is too small if other sequences share blocks that the window passes.
        """
        most = n_blocks_for(self.model.config, self.page_size)
        if handle is None:
            return min(-(-n // self.page_size), most)
        record = self.record(handle)
        n_missing = self.blocks.n_missing(record, n)
        if self.window and n > self.window + 1:
            n_held = len(record.table) - record.table.count(None)
            return min(n_missing, min(-(-(record.length + n) // self.page_size), most) - n_held)
        return n_missing

    @exclusive
    def reserve(self, handles, n, left=None):
        """
        Blocks for the next n tokens of each of these sequences, or for fewer where blocks do not suffice. Returns for
        how many; the next steps that feed so many find room. left: a list, how many tokens follow in each at most.
        Blocks that they have for later tokens are released if blocks do not suffice, or if n is 0. With a window n is
        at most window + 1: what the window passes is freed before.
        """
        decoding = self.last_decoding
        same = decoding and handles == decoding.handles
        records = decoding.records if same else list(map(self.record, handles))
        if self.window:
            n = min(n, self.window + 1)
        while n:
            try:
                self.make_room(records, [min(n, most) for most in left or [n] * len(records)])
                break
            except OutOfBlocks:  # what they had for later tokens is released
                n //= 2
        if not n:
            self.release_ahead(records)
        if decoding:
            decoding.left = 0  # the next step looks for its runs and room again
            self.decoding = decoding
        return n

    def make_room(self, records, counts):
        for record in records if self.window else ():
            self.blocks.free_passed(record)
        try:
            super().make_room(records, counts)
        except OutOfBlocks:
            self.release_ahead(records)
            raise

    def release_ahead(self, records):
        """Release the blocks that these sequences have for later tokens."""
        for record in records:
            if len(record.table) > -(-record.length // self.page_size):
                self.blocks.trim(record, record.length)

    def extend(self, record, n):
        blocks, size, n_before = self.blocks, self.page_size, len(record.table)
        blocks.extend(record, n, self.copy_block)
        if record.runs is None:
            record.runs, n_before = Runs(), 0
        for i, block in enumerate(record.table[n_before:], n_before):
            if block is not None:
                record.runs.append(i * size, block * size, size)
        record.room = len(record.table) * size
        if self.window:  # or until the window has passed another block
            record.room = min(record.room, (blocks.needed(record.length)[1].start + 1) * size + self.window - 1)

    def copy_block(self, source, target):
        for layer in self.layers:
            layer.copy(source * self.page_size, target * self.page_size, self.page_size)

    def added(self, records, counts, ids):
        super().added(records, counts, ids)
        self.forget_other_weights()
        new, start = ids.tolist(), 0
        for record, n in zip(records, counts):
            record.tokens += new[start:start + n]
            start += n
            if record.length % self.page_size < n:
                self.blocks.remember(record)

    def find_prefix(self, record, tokens):
        return self.blocks.begin(record, tokens.tolist())

    def notice_changes(self):
        super().notice_changes()
        self.forget_other_weights()

    def forget_other_weights(self):
        if self.known_version != self.version:
            self.known_version = self.version
            self.blocks.reset()

    def copy(self, record, new):
        self.blocks.fork(record, new)

    def cut(self, record, n):
        self.blocks.truncate(record, n)

    def holds(self, record, n):
        return n == 0 or self.blocks.complete(record.table, n)

    def remove_behind(self, record, n_keep, n):
        first, length = n_keep - n_keep % self.page_size, record.length  # first: of the first block that changes
        old = self.blocks.slots(record, first, n_keep) + self.blocks.slots(record, n_keep + n, length)
        self.blocks.renew(record, n_keep, length - n)
        new = self.blocks.slots(record, first, length - n)
        shifts = torch.tensor([0] * (n_keep - first) + [-n] * (length - n_keep - n), device='cpu')
        old, new = (torch.tensor(slots, device='cpu') for slots in (old, new))
        for layer in self.layers:
            layer.move(old, new, turning(self.model.config, shifts))
        del record.tokens[n_keep:n_keep + n]

    def reset(self):
        super().reset()
        self.blocks.reset()

    def recover(self):
        self.blocks.recover(self.records.values())
        super().recover()
