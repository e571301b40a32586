"""
Blocks with keys and values: vLLM's paged cache for a model. One forward pass takes any mixture of prompts and next
tokens.

`execute_model` is vLLM's call, with block tables as arguments. `PagedCache` keeps sequences in a pool of blocks, see
`base.BaseCache`, and makes the same pass.
"""
from dataclasses import dataclass

import torch

from decode.fingerprint import Watch
from kvcache.base import BaseCache
from kvcache.blocks import BlockManager, needed_blocks
from kvcache.placement import LayerList, NotNumbers, Placement, device_of, logits_of, make_layers
from positions import Keys

NOWHERE = 2**62    # a key position after any query position
AFTER_ALL = 2**40  # a block number after those of any sequence


def n_blocks_for(config, block_size):
    """The largest number of blocks that a sequence of a model needs, and one without end if the model has a window."""
    if not config.window:
        return -(-config.block_size // block_size)
    # a chunk of window + 1 tokens and the window - 1 before it, which begin anywhere in a block
    n = -(-config.n_sink // block_size) + (2 * config.window - 2) // block_size + 2
    return min(n, -(-config.max_positions // block_size)) if config.position == 'learned' else n


@dataclass(frozen=True)
class PagedMetadata:
    """
    S requests, whose new tokens follow each other on one axis of N tokens. Tokens behind them are padding.

    slot_mapping: (N,) the slot for each token's keys and values; -1 writes nothing. block_tables: (S, n) the blocks of
    each request, in order; entries behind its end are any block, or -1. Blocks that no new token sees through the
    model's window may be gone: -1. query_lens: (S,) the number of new tokens of each, at least 1. seq_lens: (S,) the
    number of all tokens of each, the new ones included. block_numbers: (S, n) which block of its request each entry of
    block_tables is, so that a table may leave out blocks that are gone; None for 0, 1, 2, ...
    """
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_lens: torch.Tensor
    seq_lens: torch.Tensor
    block_numbers: torch.Tensor | None = None

    def first_positions(self, block_size):
        """The position of the first slot of each entry of block_tables, (n,) or (S, n)."""
        n = self.block_tables.size(1)
        numbers = self.block_numbers
        if numbers is None:
            numbers = torch.arange(n, device=self.block_tables.device)
        return numbers * block_size


@torch.no_grad()
def execute_model(model, input_ids, input_positions, kv_caches, input_metadata):
    """
    Run the new tokens of all requests through the model in one pass.

    input_ids, input_positions: (N,). kv_caches: a `Layer` of (n_blocks, block_size) rows for each layer of the model.
    Returns logits (S, vocab_size), of each request's last token. ValueError if the arguments do not fit the model or
    each other, with nothing written. `NotNumbers` if the logits are not numbers: the rows that were written are
    then zeros.
    """
    check(model.config, input_ids, input_positions, kv_caches, input_metadata)
    try:
        return one_pass(model, input_ids, input_positions, kv_caches, input_metadata)
    except NotNumbers:  # because of the weights, or of keys in other requests' blocks that a mask does not hide
        return one_pass_each(model, input_ids, input_positions, kv_caches, input_metadata)


def one_pass_each(model, input_ids, input_positions, kv_caches, m):
    """One pass for each request, which reads zeros in place of what it may not see, see `LayerList.hiding`."""
    parts, start = [], 0
    for i, end in enumerate(m.query_lens.cumsum(0).tolist()):
        of_one = (each if each is None else each[i:i + 1]
                  for each in (m.block_tables, m.query_lens, m.seq_lens, m.block_numbers))
        alone = PagedMetadata(m.slot_mapping[start:end], *of_one)
        parts.append(one_pass(model, input_ids[start:end], input_positions[start:end], kv_caches, alone, hiding=True))
        start = end
    return torch.cat(parts)


def one_pass(model, input_ids, input_positions, kv_caches, m, hiding=False):
    """The forward pass of `execute_model`. hiding: see `LayerList.hiding`."""
    ends, block_size = m.query_lens.cumsum(0), kv_caches[0].k.shape[1]
    written = None if (m.slot_mapping >= 0).all() else (m.slot_mapping >= 0).nonzero()[:, 0]
    rows = m.slot_mapping if written is None else m.slot_mapping[written]
    n_used, (S, n) = int(m.block_tables.max()) + 1, m.block_tables.shape
    if S == len(input_ids) and n_used > S * n:  # one token each, in scattered blocks: a batch, with copies of keys
        positions, index = input_positions[:, None], m.block_tables.clamp(min=0)
        first = m.first_positions(block_size)
        keys = Keys((first[..., None] + torch.arange(block_size, device=first.device)).flatten(-2))
    else:  # all tokens are one batch row, over the keys of all requests
        positions = input_positions[None]
        index, keys = keys_of_all_blocks(m, len(input_positions), ends, block_size, n_used)
    layers = LayerList(kv_caches, Placement(positions, rows, index, keys, written))
    return logits_of(model, input_ids.view(positions.shape), layers.hiding() if hiding else layers, ends - 1)


def check(config, input_ids, input_positions, kv_caches, m):
    """ValueError unless model, tokens, cache and metadata fit together."""
    shape, width = kv_caches[0].k.shape, config.n_kv_head * config.head_dim
    came = {(rows.shape, rows.width) for layer in kv_caches for rows in (layer.k, layer.v)}
    if len(kv_caches) != config.n_layer or came != {(shape, width)}:
        raise ValueError(f"the model needs {config.n_layer} layers alike, of rows of {width} numbers; "
                         f"not {len(kv_caches)} of (blocks, slots), width = {sorted(came)}")
    (n_blocks, block_size), N = shape, len(input_ids)
    if not m.slot_mapping.shape == input_ids.shape == input_positions.shape == (N,) or N == 0:
        raise ValueError(f"{N} tokens have {len(m.slot_mapping)} slots and {len(input_positions)} positions: "
                         "one slot and one position are needed for each token")
    if m.block_tables.dim() != 2 or not m.query_lens.shape == m.seq_lens.shape == m.block_tables.shape[:1]:
        raise ValueError(f"{len(m.query_lens)} query_lens and {len(m.seq_lens)} seq_lens came with block tables "
                         f"{tuple(m.block_tables.shape)}: for S requests they must be (S,), (S,) and (S, n)")
    first = m.first_positions(block_size)
    if first.shape not in (m.block_tables.shape, m.block_tables.shape[1:]):
        raise ValueError(f"block_numbers are {tuple(first.shape)}: give one for each entry of the block tables, "
                         f"{tuple(m.block_tables.shape)}")
    positions, slots = input_positions.tolist(), m.slot_mapping.tolist()
    expected_positions, expected_slots = [], []
    of_tables = first.expand_as(m.block_tables).tolist()
    for table, of_table, new, length in zip(m.block_tables.tolist(), of_tables, m.query_lens.tolist(),
                                            m.seq_lens.tolist()):
        if not 1 <= new <= length <= config.max_positions:
            raise ValueError(f"a request has {new} new tokens of {length}: it must have at least one new token, and at "
                             f"most {config.max_positions} in all")
        used = [(p // block_size, block) for p, block in zip(of_table, table) if p < length and block != -1]
        blocks = dict(used)
        needed = needed_blocks(length - new, length, block_size, config.window, config.n_sink)
        fits = len(set(blocks.values())) == len(blocks) == len(used) and blocks.keys() >= {*needed[0], *needed[1]}
        if not fits or not all(0 <= block < n_blocks for block in (*blocks.values(), max(table))):
            raise ValueError(f"the block table {table} has no room for {length} tokens: it needs "
                             f"{len(needed[0]) + len(needed[1])} different blocks of {block_size}, from 0 to "
                             f"{n_blocks - 1}")
        expected_positions += range(length - new, length)
        expected_slots += [blocks[p // block_size] * block_size + p % block_size for p in range(length - new, length)]
    n = len(expected_slots)
    if n > N or positions[:n] != expected_positions or not all(0 <= p < config.max_positions for p in positions):
        raise ValueError(f"positions {positions} are not those of the last tokens of requests: {expected_positions}")
    padded_right = all(slot == -1 for slot in slots[n:])
    if not padded_right or any(slot not in (-1, expected) for slot, expected in zip(slots, expected_slots)):
        raise ValueError(f"slots {slots} are not those of the block tables, {expected_slots}, and -1 for padding")
    if len(set(expected_slots)) < n:
        raise ValueError(f"two requests write one slot, {expected_slots}: give each its own blocks to write to")


def keys_of_all_blocks(m, N, ends, block_size, n_used):
    """
    For a pass in which all N tokens are one batch row: the index of what is read, see `Rows.read`, and its `Keys`.

    A block that several requests share is read once. If at least half of the first n_used blocks of the pool are in
    use, they are read in place.
    """
    S, device = len(m.block_tables), m.block_tables.device
    first_positions = m.first_positions(block_size).expand_as(m.block_tables)
    request, nth = ((first_positions < m.seq_lens[:, None]) & (m.block_tables >= 0)).nonzero(as_tuple=True)
    blocks = m.block_tables[request, nth]
    if n_used <= 2 * len(blocks):
        index, n_blocks, place = n_used, n_used, blocks
    else:
        distinct, place = blocks.unique(return_inverse=True)
        index, n_blocks = distinct[None], len(distinct)
    first = torch.full((S, n_blocks), NOWHERE, device=device)  # the first position that a request has in a block
    first[request, place] = first_positions[request, nth]
    key_pos = (first[..., None] + torch.arange(block_size, device=device)).flatten(1)  # (S, K), of each request
    if S < N:  # (N, K), of each token's request
        key_pos = key_pos[torch.searchsorted(ends, torch.arange(N, device=device), right=True).clamp(max=S - 1)]
    return index, Keys(key_pos[None])


class PagedCache(BaseCache):
    """
    Sequences of a model in a pool of n_blocks blocks of block_size positions. type_kv: how keys and values are stored,
    see `Rows`. tokens: {sequence: the ids of its tokens}. blocks: the `BlockManager`.

    A sequence computes only those first tokens that are not in a remembered block. Blocks are shared only between
    sequences that were computed with the same weights:
    - when a sequence begins, a `Watch` compares the model with its state before. If it is not identical, all blocks are
      forgotten.
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
        # of the model, or of the decoder's weights, when the blocks that are remembered were computed
        self.watch = self.version = None
        super().__init__(model, n_blocks, make_layers(model, (n_blocks, block_size), type_kv), 'paged', type_kv,
                         decoder)

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

    def begin_text(self, seq, text):
        """A new sequence with the blocks that hold the beginning of its text. Returns how many tokens these are."""
        n = self.blocks.add(seq, text, 0)
        self.tokens[seq] = text[:n]
        return n

    def make_room(self, seqs, starts, counts, ids):
        blocks, new, found, done = self.blocks, ids.tolist(), [], 0
        tables, size = blocks.tables, blocks.block_size
        for seq, start, n in zip(seqs, starts, counts):
            runs = blocks.runs.get(seq)
            if runs is None or start + n > len(tables[seq]) * size or self.window and blocks.passed(seq):
                runs = self.extended(seq, n)
            else:  # there is room in its last block
                blocks.length[seq] = start + n
            self.tokens[seq] += new[done:done + n]
            found.append(runs)
            done += n
        return found

    def extended(self, seq, n):
        """Make room for n more positions of a sequence. Returns its `Runs`, of one block each or more."""
        table, size = self.blocks.tables[seq], self.blocks.block_size
        done = len(table)
        self.blocks.extend(seq, n, self.copy_block)
        runs = self.blocks.runs.get(seq)
        if runs is None:
            runs, done = self.compiled.runs(), 0
        for i, block in enumerate(table[done:], done):
            if block is not None:
                runs.append(i * size, block * size, size)
        self.blocks.runs[seq] = runs
        return runs

    def compiled_pass(self, seqs, starts, counts, ids):
        logits = super().compiled_pass(seqs, starts, counts, ids)
        self.forget_blocks_if_changed()
        size = self.blocks.block_size
        for seq, start, n in zip(seqs, starts, counts):
            if (start + n) % size < n:  # a block was filled
                self.blocks.remember(seq, self.tokens[seq])
        return logits

    def forward_pass(self, seqs, starts, counts, ids, hiding=False):
        for seq, part in zip(seqs, ids.split(counts)):
            if seq not in self.tokens:  # its first pass failed, and is tried again
                self.begin_text(seq, [])
            self.blocks.extend(seq, len(part), self.copy_block)
            self.tokens[seq] += part.tolist()
        ids, positions, metadata = self.inputs(seqs, starts)
        self.forget_blocks_if_changed()
        logits = one_pass(self.model, ids, positions, self.layers, metadata, hiding)
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
        if self.version != self.decoder.version if self.decoder else not self.watch.unchanged():
            self.forget_blocks()

    def forget_blocks(self):
        """Forget all blocks, and do not remember those that the present sequences fill: the weights have changed."""
        self.blocks.reset()
        if self.decoder:
            self.version = self.decoder.version
        else:
            self.watch = Watch(self.model)
