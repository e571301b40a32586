"""
Pages for a model: the pool of blocks with keys and values in it, and one forward pass for any mixture of requests.

    pool = PagedCache(n_layer, n_head, head_dim, n_blocks=64, block_size=16)
    n_cached = pool.add(model, 'a', prompt)                      # so many of its tokens need not be computed
    logits = pool.run(model, ['a'])                              # prefills and decodes of any length, together

`execute_model` is vLLM's call, and `run` fills in its arguments from the block tables.
"""
from dataclasses import dataclass

import torch

from fingerprint import fingerprint, identity
from kvcache.blocks import BlockManager
from kvcache.placement import Forward, Layer, Placement
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
def execute_model(model, input_ids, input_positions, kv_caches, input_metadata):
    """
    Run the new tokens of all requests, input_ids (N,) at input_positions (N,), through the model at once, over the blocks in
    kv_caches (a `Layer` of (n_blocks, block_size) rows for each layer). Returns logits (S, vocab_size), of each request's last token.
    ValueError if the metadata contradicts itself or the cache, and nothing has been written.
    """
    check(input_metadata, input_ids, input_positions, *kv_caches[0].k.shape, model.config.block_size)
    return forward_pass(model, input_ids, input_positions, kv_caches, input_metadata)


def forward_pass(model, input_ids, input_positions, kv_caches, m):
    """`execute_model` with metadata that is known to be right."""
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
    x, _ = model.hidden_states(input_ids.view(positions.shape), forward)
    return model.lm_head(x.flatten(0, 1)[ends - 1])


def check(m, input_ids, input_positions, n_blocks, block_size, context):
    """ValueError unless metadata, tokens and cache fit together."""
    N, n_tokens, (S, n) = len(input_ids), int(m.query_lens.sum()), m.block_tables.shape
    if not m.slot_mapping.shape == input_ids.shape == input_positions.shape == (N,):
        raise ValueError(f"one slot and one position for each token: {len(m.slot_mapping)} and {len(input_positions)} for {N}")
    if not m.query_lens.shape == m.seq_lens.shape == (S,) or n_tokens > N:
        raise ValueError(f"{len(m.query_lens)} query_lens, of {n_tokens} tokens in all, and {len(m.seq_lens)} seq_lens, "
                         f"but {S} block tables and {N} tokens")
    (first, last), (slot, last_slot) = input_positions.aminmax(), m.slot_mapping.aminmax()
    if first < 0 or last >= context:
        raise ValueError(f"out of context: positions {int(first)} to {int(last)}, and block_size is {context}")
    if slot < -1 or last_slot >= n_blocks * block_size:
        raise ValueError(f"slots {int(slot)} to {int(last_slot)}, and the cache has {n_blocks} blocks of {block_size}")
    new, past = m.query_lens.min(), (m.seq_lens - m.query_lens).min()
    if new < 1 or past < 0:
        raise ValueError("a request has at least one new token, and seq_lens count them: "
                         f"query_lens {m.query_lens.tolist()}, seq_lens {m.seq_lens.tolist()}")
    needed = torch.arange(n, device=m.block_tables.device) * block_size < m.seq_lens[:, None]
    if m.seq_lens.max() > n * block_size or (m.block_tables < 0)[needed].any() or m.block_tables.max() >= n_blocks:
        raise ValueError(f"block tables {m.block_tables.tolist()} of {n_blocks} blocks of {block_size} have no room for {m.seq_lens.tolist()} tokens")


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
        self.computed[seq] = self.blocks.add(seq, tokens)
        self.tokens[seq] = list(tokens)
        return self.computed[seq]

    def extend(self, seq, tokens):
        """Room for a sequence's next tokens, with the copies that sharing asks for."""
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
        b, seqs, ids, positions, slots, tables = self.blocks, list(seqs), [], [], [], []
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
        lengths = [b.length[seq] for seq in seqs]
        if max(lengths) > model.config.block_size:
            raise ValueError(f"out of context: a sequence of {max(lengths)} tokens, and block_size is {model.config.block_size}")
        new = [length - self.computed[seq] for seq, length in zip(seqs, lengths)]
        n = max(map(len, tables))
        tables = [block for table in tables for block in (*table, *[-1] * (n - len(table)))]
        parts = ids, positions, slots, new, lengths, tables
        ids, positions, slots, new_lens, seq_lens, tables = torch.tensor(sum(parts, []), device=self.device).split([len(part) for part in parts])
        logits = forward_pass(model, ids, positions, self.layers, InputMetadata(slots, tables.view(-1, n), new_lens, seq_lens))
        self.computed |= zip(seqs, lengths)
        full = [seq for seq, n, length in zip(seqs, new, lengths) if length % b.block_size < n]
        if full and identity(model.lm_head) != self.head:  # it tells for all: what they began with are other weights, and nobody else may have it
            b.reset()
        for seq in full:
            b.remember(seq, self.tokens[seq])
        return logits
