"""
Pages for a model: the pool of blocks with keys and values in it, and one forward pass for any mixture of requests.

    pool = PagedCache(n_layer, n_head, head_dim, n_blocks=64, block_size=16)
    n_cached = pool.add(model, 'a', prompt)                      # so many of its tokens, whole blocks, need not be computed
    logits = pool.run(model, ['a'])                              # prefills and decodes of any length, together

`execute_model` is vLLM's call, and `run` makes it with arguments from the block tables.
"""
from dataclasses import dataclass

import torch

from fingerprint import fingerprint, identity
from kvcache.blocks import BlockManager
from kvcache.placement import Forward, Layer, Placement, logits_of
from kvcache.storage import Scratch

NOWHERE = 2**62  # later than any position


@dataclass(frozen=True)
class InputMetadata:
    """
    Of S requests, whose new tokens stand one after the other on one axis of N tokens; any beyond them are padding.

    slot_mapping: (N,) where each token's keys and values go; -1 writes nothing.
    block_tables: (S, n) blocks of each request, in order; what is beyond its end does not matter, if it is a block or -1.
    query_lens: (S,) new tokens of each, at least 1. seq_lens: (S,) all tokens of each, the new ones included.
    """
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_lens: torch.Tensor
    seq_lens: torch.Tensor


@torch.no_grad()
def execute_model(model, input_ids, input_positions, kv_caches, input_metadata, trusted=False):
    """
    Run the new tokens of all requests, input_ids (N,) at input_positions (N,), through the model at once, over the blocks in
    kv_caches (a `Layer` of (n_blocks, block_size) rows for each layer). Returns logits (S, vocab_size), of each request's last token.
    ValueError if what is given contradicts itself or the model, and nothing has been written; what is `trusted` is not looked at.
    """
    m = input_metadata
    if not trusted:
        check(model.config, input_ids, input_positions, kv_caches, m)
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
    return logits_of(model, input_ids, Forward(kv_caches, Placement(positions, rows, index, mask, which)), ends - 1)


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
    What is read when all tokens are one batch, and the mask (1, 1, N, K) of who sees what in it. A block that several requests
    share is there once. If the first n_used blocks of the pool are mostly these requests' they are read where they are.
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


class PagedCache:
    """
    A pool of n_blocks blocks of block_size positions, for all layers of a model, and the `BlockManager` of who uses them.

    kind: how keys and values are kept, see `Rows`. tokens: {sequence: its tokens}; computed: {sequence: of how many of them the
    keys and values are in the cache}.
    """

    def __init__(self, n_layer, n_head, head_dim, n_blocks, block_size=16, kind='float32', device='cpu'):
        self.blocks, scratch = BlockManager(n_blocks, block_size), Scratch()
        self.layers = [Layer((n_blocks, block_size), n_head, head_dim, kind, kind, device, scratch=scratch) for _ in range(n_layer)]
        self.tokens, self.computed, self.weights, self.head, self.device = {}, {}, None, None, device

    def add(self, model, seq, tokens):
        """`BlockManager.add`. What was computed with other weights is not used."""
        weights = fingerprint(model)
        if weights != self.weights:
            self.blocks.reset()
            self.weights, self.head = weights, identity(model.lm_head)
        tokens = [int(token) for token in tokens]
        self.computed[seq] = self.blocks.add(seq, tokens)
        self.tokens[seq] = tokens
        return self.computed[seq]

    def extend(self, seq, tokens):
        """Room for a sequence's next tokens, with the copies that sharing asks for."""
        tokens = [int(token) for token in tokens]
        copies = self.blocks.extend(seq, len(tokens))
        for source, target in copies:
            for layer in self.layers:
                layer.copy(source, target)
        self.tokens[seq] += tokens

    def fork(self, seq, new):
        """A new sequence with all that seq has, in the same blocks until one of them goes on."""
        self.blocks.fork(seq, new)
        self.tokens[new], self.computed[new] = self.tokens[seq][:], self.computed[seq]

    def truncate(self, seq, n):
        """Keep the first n tokens of a sequence."""
        self.blocks.truncate(seq, n)
        del self.tokens[seq][n:]
        self.computed[seq] = min(n, self.computed[seq])

    def remove(self, seq):
        """A sequence is done."""
        self.blocks.remove(seq)
        del self.tokens[seq], self.computed[seq]

    def nbytes(self):
        return sum(layer.nbytes() for layer in self.layers)

    @torch.no_grad()
    def run(self, model, seqs):
        """One forward pass for all tokens of these sequences that are not computed yet, at least one each. Returns logits (S, vocab_size)."""
        b, seqs, ids, positions, slots, tables, new, lengths = self.blocks, list(seqs), [], [], [], [], [], []
        if not seqs:
            raise ValueError("there is no sequence to run")
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
        if identity(model.lm_head) != self.head:  # it tells for all: what they began with are other weights, and nobody else may have it
            b.reset()
            self.weights, self.head = None, identity(model.lm_head)
        metadata = InputMetadata(slots, tables.view(-1, n), new_lens, seq_lens)
        logits = execute_model(model, ids, positions, self.layers, metadata, trusted=True)
        self.computed |= zip(seqs, lengths)
        for seq, n, length in zip(seqs, new, lengths):
            if length % b.block_size < n:  # a block has become full
                b.remember(seq, self.tokens[seq])
        return logits
