"""
Pages for a model: the pool of blocks with keys and values in it, and one forward pass for any mixture of requests.

    pool = PagedCache(n_layer, n_head, head_dim, n_blocks=64, block_size=16)
    n_cached = pool.add(model, 'a', prompt)                      # so many of its tokens, whole blocks, need not be computed
    logits = pool.run(model, ['a'])                              # prefills and decodes of any length, together

`execute_model` is vLLM's call. `run` makes the same pass, with arguments from the block tables.
"""
from dataclasses import dataclass

import torch

from fingerprint import Watch
from kvcache.blocks import BlockManager
from kvcache.exclusive import Exclusive, exclusive
from kvcache.placement import Forward, Layer, NotNumbers, Placement, logits_of, wipe
from kvcache.storage import Scratch

NOWHERE = 2**62  # later than any position


@dataclass(frozen=True)
class InputMetadata:
    """
    Of S requests, whose new tokens stand one after the other on one axis of N tokens; any beyond them are padding.

    slot_mapping: (N,) where each token's keys and values go; -1 writes nothing. block_tables: (S, n) blocks of each
    request, in order; what is beyond its end does not matter, if it is a block or -1. query_lens: (S,) new tokens of
    each, at least 1. seq_lens: (S,) all tokens of each, the new ones included.
    """
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_lens: torch.Tensor
    seq_lens: torch.Tensor


@torch.no_grad()
def execute_model(model, input_ids, input_positions, kv_caches, input_metadata):
    """
    Run the new tokens of all requests, input_ids (N,) at input_positions (N,), through the model at once, over the
    blocks in kv_caches (a `Layer` of (n_blocks, block_size) rows for each layer). Returns logits (S, vocab_size), of
    each request's last token. ValueError if what is given contradicts itself or the model, and nothing has been
    written. `NotNumbers` if the logits are not: what this pass has written is then zeros.
    """
    check(model.config, input_ids, input_positions, kv_caches, input_metadata)
    try:
        return one_pass(model, input_ids, input_positions, kv_caches, input_metadata)
    except NotNumbers:  # perhaps because of keys that earlier, broken weights left in the blocks of others
        return each_alone(model, input_ids, input_positions, kv_caches, input_metadata)


def each_alone(model, input_ids, input_positions, kv_caches, m):
    """
    A pass for each request, which sees zeros in the blocks of the others and behind its own end. Arguments as in
    `execute_model`.
    """
    parts, start = [], 0
    for i, end in enumerate(m.query_lens.cumsum(0).tolist()):
        of_one = (each[i:i + 1] for each in (m.block_tables, m.query_lens, m.seq_lens))
        alone = InputMetadata(m.slot_mapping[start:end], *of_one)
        parts.append(one_pass(model, input_ids[start:end], input_positions[start:end], kv_caches, alone, hiding=True))
        start = end
    return torch.cat(parts)


def one_pass(model, input_ids, input_positions, kv_caches, m, hiding=False):
    """The forward pass of `execute_model`; hiding: see `Forward.hiding`."""
    ends, block_size = m.query_lens.cumsum(0), kv_caches[0].k.shape[1]
    which = None if (m.slot_mapping >= 0).all() else (m.slot_mapping >= 0).nonzero()[:, 0]
    rows = m.slot_mapping if which is None else m.slot_mapping[which]
    n_used, (S, n) = int(m.block_tables.max()) + 1, m.block_tables.shape
    if S == len(input_ids) and n_used > S * n:  # one token each: a batch of requests, to each a copy of its keys
        positions, index = input_positions[:, None], m.block_tables.clamp(min=0)
        mask = (torch.arange(n * block_size, device=index.device) <= positions)[:, None, None]
    else:  # one batch of all tokens, over the keys of all
        positions = input_positions[None]
        index, mask = seen_by_all(m, input_positions, ends, block_size, n_used)
    forward = Forward(kv_caches, Placement(positions, rows, index, mask, which))
    return logits_of(model, input_ids, forward.hiding() if hiding else forward, ends - 1)


def check(config, input_ids, input_positions, kv_caches, m):
    """ValueError unless model, tokens, cache and metadata fit together."""
    shape, width = kv_caches[0].k.shape, config.n_embd
    if len(kv_caches) != config.n_layer or any(rows.shape != shape or rows.width != width for layer in kv_caches for rows in (layer.k, layer.v)):
        raise ValueError(f"the cache must be {config.n_layer} layers alike, of rows of {width} numbers")
    (n_blocks, block_size), N = shape, len(input_ids)
    if not m.slot_mapping.shape == input_ids.shape == input_positions.shape == (N,) or N == 0:
        raise ValueError(f"one slot and one position for each token: {len(m.slot_mapping)} and {len(input_positions)} for {N}")
    if m.block_tables.dim() != 2 or not m.query_lens.shape == m.seq_lens.shape == m.block_tables.shape[:1]:
        raise ValueError(f"{len(m.query_lens)} query_lens and {len(m.seq_lens)} seq_lens do not go with block tables {tuple(m.block_tables.shape)}")
    positions, slots = input_positions.tolist(), m.slot_mapping.tolist()
    expected_positions, expected_slots = [], []
    for table, new, length in zip(m.block_tables.tolist(), m.query_lens.tolist(), m.seq_lens.tolist()):
        if not 1 <= new <= length <= config.block_size:
            raise ValueError(f"a request has at least one new token, in seq_lens up to {config.block_size}; not {new} of {length}")
        used = table[:-(-length // block_size)]
        if length > len(table) * block_size or not all(0 <= block < n_blocks for block in (*used, max(table))) or len(set(used)) < len(used):
            raise ValueError(f"the block table {table}, of {n_blocks} blocks of {block_size}, has no room for {length} tokens")
        expected_positions += range(length - new, length)
        expected_slots += [table[p // block_size] * block_size + p % block_size for p in range(length - new, length)]
    n = len(expected_slots)
    if n > N or positions[:n] != expected_positions or not all(0 <= p < config.block_size for p in positions):
        raise ValueError(f"positions {positions} are not those of the last tokens of requests: {expected_positions}")
    if any(slot not in (-1, expected) for slot, expected in zip(slots, expected_slots)) or any(slot != -1 for slot in slots[n:]):
        raise ValueError(f"slots {slots} are not those of the block tables, {expected_slots}, and -1 for padding")
    if len(set(expected_slots)) < n:
        raise ValueError(f"two requests write one slot: {expected_slots}")


def seen_by_all(m, input_positions, ends, block_size, n_used):
    """
    What is read when all tokens are one batch, and the mask (1, 1, N, K) of who sees what in it. A block that several
    requests share is there once. If the first n_used blocks of the pool are mostly these requests' they are read
    where they are.
    """
    S, n = m.block_tables.shape
    N, device = len(input_positions), m.block_tables.device
    request, nth = (torch.arange(n, device=device) * block_size < m.seq_lens[:, None]).nonzero(as_tuple=True)
    blocks = m.block_tables[request, nth]
    if n_used <= 2 * len(blocks):
        index, n_blocks, place = n_used, n_used, blocks
    else:
        distinct, place = blocks.unique(return_inverse=True)
        index, n_blocks = distinct[None], len(distinct)
    first = torch.full((S, n_blocks), NOWHERE, device=device)  # the first position that a request has in a block
    first[request, place] = nth * block_size
    position = (first[..., None] + torch.arange(block_size, device=device)).flatten(1)  # (S, K)
    if S < N:  # each token's, of its request
        position = position[torch.searchsorted(ends, torch.arange(N, device=device), right=True).clamp(max=S - 1)]
    return index, (position <= input_positions[:, None])[None, None]


class PagedCache(Exclusive):
    """
    A pool of n_blocks blocks of block_size positions, for all layers of a model, and the `BlockManager` of who uses
    them.

    kind: how keys and values are kept, see `Rows`. tokens: {sequence: its tokens}; computed: {sequence: of how many
    of them the keys and values are in the cache}. Several threads can share a pool. An operation that raises, or that
    is interrupted, leaves the sequences as they were.

    Blocks are shared only between sequences that were computed with the same weights:
    - `add` asks a `Watch` whether the model is identical to what it was. If not, no block that was computed before is
      found again.
    - `run` asks it whether the model is unchanged, before its forward pass, and after one that has filled a block. If the model has changed
      since `add`, nothing is found again that was computed before or is computed from then on by the sequences that
      exist, even if the earlier weights come back.
    So between two calls of `add` these are noticed: every change through torch (optimizers, load_state_dict, in-place
    operations), replaced parameters and modules, new hooks, and changes through .data or numpy that reach a value
    that is looked at, as those of a whole parameter do. Not noticed: a change through .data or numpy that spares
    these values and is undone before the next `add`, and autocast.
    """

    def __init__(self, n_layer, n_head, head_dim, n_blocks, block_size=16, kind='float32', device='cpu'):
        super().__init__()
        self.blocks, scratch = BlockManager(n_blocks, block_size), Scratch()
        self.layers = [Layer((n_blocks, block_size), n_head, head_dim, kind, kind, device, scratch=scratch) for _ in range(n_layer)]
        self.tokens, self.computed, self.device = {}, {}, device
        self.spoilt = False  # may blocks hold numbers that show through a mask? See `Forward.hiding`
        self.watch = None  # of the model that the blocks which can be found were computed with

    @exclusive
    def add(self, model, seq, tokens):
        """`BlockManager.add`. What was computed with other weights is not used."""
        self.look_at(model)
        return self.begin(seq, tokens)

    @exclusive
    def add_all(self, model, tokens):
        """
        `add` for each of {sequence: its tokens}, with one look at the weights. After an exception some of them may be
        there.
        """
        self.look_at(model)
        return [self.begin(seq, mine) for seq, mine in tokens.items()]

    def look_at(self, model):
        if self.spoilt and not self.tokens:
            self.blocks.reset()
            wipe(self.layers)
            self.spoilt = False
        if self.watch is None or self.watch.model is not model or not self.watch.identical():
            self.blocks.reset()
            self.watch = Watch(model)

    def begin(self, seq, tokens):
        tokens = [int(token) for token in tokens]
        computed = self.blocks.add(seq, tokens)
        self.computed[seq] = computed
        self.tokens[seq] = tokens
        return computed

    @exclusive
    def extend(self, seq, tokens):
        """Room for a sequence's next tokens, with the copies that sharing asks for."""
        self.go_on(seq, tokens)

    def go_on(self, seq, tokens):
        tokens = [int(token) for token in tokens]
        self.blocks.extend(seq, len(tokens), self.copy)
        self.tokens[seq] += tokens

    def copy(self, source, target):
        for layer in self.layers:
            layer.copy(source, target)

    @exclusive
    def fork(self, seq, new):
        """
        A new sequence with all tokens that seq has, in the same blocks until one of them goes on. Tokens that are not
        computed yet get blocks of their own: each of the two sequences will write them. OutOfBlocks if there are not
        enough.
        """
        self.blocks.fork(seq, new)
        computed = self.computed[seq]
        self.blocks.truncate(new, computed)
        self.blocks.extend(new, len(self.tokens[seq]) - computed, self.copy)
        self.computed[new] = computed
        self.tokens[new] = self.tokens[seq][:]

    @exclusive
    def truncate(self, seq, n):
        """Keep the first n tokens of a sequence."""
        self.blocks.truncate(seq, n)
        del self.tokens[seq][n:]
        self.computed[seq] = min(n, self.computed[seq])

    @exclusive
    def remove(self, seq):
        """A sequence is done."""
        self.blocks.table(seq)
        del self.tokens[seq]
        self.blocks.remove(seq)
        del self.computed[seq]

    def recover(self):
        """A sequence is one that has tokens, and it has as many as its blocks have room for and it has been told."""
        for seq in [seq for seq in self.blocks.tables if not self.tokens.get(seq)]:
            del self.blocks.tables[seq]
        self.blocks.recover()
        tables, length = self.blocks.tables, self.blocks.length
        self.tokens = {seq: tokens for seq, tokens in self.tokens.items() if seq in tables}
        for seq, tokens in self.tokens.items():
            n = min(len(tokens), length[seq])
            del tokens[n:]
            self.blocks.truncate(seq, n)
        self.computed = {seq: min(self.computed.get(seq, 0), len(tokens)) for seq, tokens in self.tokens.items()}

    def nbytes(self):
        return sum(layer.nbytes() for layer in self.layers)

    @exclusive
    @torch.no_grad()
    def run(self, model, seqs):
        """One forward pass for all tokens of these sequences that are not computed yet, at least one each. Returns logits (S, vocab_size)."""
        b, seqs, ids, positions, slots, tables, new, lengths = self.blocks, list(seqs), [], [], [], [], [], []
        if not seqs or len(set(seqs)) < len(seqs):
            raise ValueError(f"a pass is for one sequence or more, each named once, not for {seqs}")
        for seq in seqs:
            start, end = self.computed.get(seq, 0), len(self.tokens.get(seq, ()))
            if start == end:
                raise ValueError(f"sequence {seq!r} has no token that is not computed yet: add it, or extend it")
            ids += self.tokens[seq][start:]
            positions += range(start, end)
            slots += b.slots(seq, start, end)
            tables.append(b.tables[seq])
            new.append(end - start)
            lengths.append(end)
        n = max(map(len, tables))
        tables = [block for table in tables for block in (*table, *[-1] * (n - len(table)))]
        parts = ids, positions, slots, new, lengths, tables
        ids, positions, slots, new_lens, seq_lens, tables = torch.tensor(sum(parts, []), device=self.device).split([len(part) for part in parts])
        self.forget_if_changed(model)
        metadata = InputMetadata(slots, tables.view(-1, n), new_lens, seq_lens)
        try:
            logits = one_pass(model, ids, positions, self.layers, metadata)
        except NotNumbers:
            self.spoilt = True
            logits = each_alone(model, ids, positions, self.layers, metadata)
        # those that have filled a block
        full = [seq for seq, n, length in zip(seqs, new, lengths) if length % b.block_size < n]
        if full:
            self.forget_if_changed(model)  # during the pass
        self.computed |= zip(seqs, lengths)
        for seq in full:
            b.remember(seq, self.tokens[seq])
        return logits

    def forget_if_changed(self, model):
        """If the model is not what `add` saw: no block is found again, and none that the present sequences go on to fill."""
        if self.watch is None or self.watch.model is not model or not self.watch.unchanged():
            self.blocks.reset()
            self.watch = Watch(model)
