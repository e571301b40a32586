"""
Cache systems under `generate` and `stream`: what a generation holds of one, in the role of its list of tuples.

    decoder = CacheDecoder(model, 'paged', n_seq=10, bits=8)
    model.generate(idx, 200, use_cache=True, num_samples=10, decoder=decoder)

A system keeps sequences by number: `new`, `fork`, `truncate`, `free`, and `step`, which feeds T tokens to each of some and returns
the logits after the last of them. Which rows that takes and who shares them is its own business; the tokens are the same.
"""
from typing import NamedTuple

import torch

from kvcache.blocks import OutOfBlocks
from kvcache.paged import PagedCache
from kvcache.placement import Forward, Layer, Placement, beginning
from kvcache.unified import KVCache

KINDS = {0: 'float32', 8: 'int8', 4: 'int4'}
BLOCK = 16  # positions of a block of the paged system


class Contiguous:
    """The tuple's way, on rows: sequence i has rows i * size to i * size + size - 1, and a position is a row."""

    def __init__(self, model, n_seq, kind):
        c = model.config
        self.size = c.block_size
        self.layers = [Layer((n_seq, c.block_size), c.n_head, c.n_embd // c.n_head, kind, kind, device_of(model)) for _ in range(c.n_layer)]
        self.length, self.unused = {}, list(range(n_seq))[::-1]

    def new(self):
        if not self.unused:
            raise ValueError(f"the cache has room for {len(self.length)} sequences, and all are taken")
        seq = self.unused.pop()
        self.length[seq] = 0
        return seq

    def fork(self, seq):
        new = self.new()
        self.length[new] = self.length[seq]
        for layer in self.layers:
            layer.copy(seq, new)
        return new

    def truncate(self, seq, n):
        self.length[seq] = n

    def free(self, seq):
        del self.length[seq]
        self.unused.append(seq)

    def step(self, model, seqs, idx):
        T, device = idx.size(1), idx.device
        start = torch.tensor([self.length[seq] for seq in seqs], device=device)
        longest = max(self.length[seq] for seq in seqs) + T
        number = torch.tensor(seqs, device=device)
        positions = start[:, None] + torch.arange(T, device=device)
        index, longest = beginning(number, longest, self.size)
        mask = (torch.arange(longest, device=device) <= positions[..., None])[:, None]
        placement = Placement(positions, (number[:, None] * self.size + positions).flatten(), index, mask)
        for seq in seqs:
            self.length[seq] += T
        return last_logits(model, idx, Forward(self.layers, placement))

    def nbytes(self):
        return sum(layer.nbytes() for layer in self.layers)


class Cells:
    """llama.cpp's cells: one stream for all sequences, or one for each."""

    def __init__(self, model, n_seq, kind, unified):
        c = model.config
        self.cache = KVCache(c.n_layer, c.n_head, c.n_embd // c.n_head, c.block_size * (n_seq if unified else 1), n_seq, unified,
                             kind, kind, device=device_of(model))
        self.unused = list(range(n_seq))[::-1]

    def new(self):
        if not self.unused:
            raise ValueError(f"the cache has room for {self.cache.n_seq_max} sequences, and all are taken")
        return self.unused.pop()

    def fork(self, seq):
        new = self.new()
        self.cache.seq_cp(seq, new)
        return new

    def truncate(self, seq, n):
        self.cache.seq_rm(seq, n)

    def free(self, seq):
        self.cache.seq_rm(seq)
        self.unused.append(seq)

    def step(self, model, seqs, idx):
        T = idx.size(1)
        tokens = {}
        for seq in seqs:
            last = self.cache.seq_pos_max(seq)
            start = 0 if last is None else last + 1
            tokens[seq] = range(start, start + T)
        return last_logits(model, idx, self.cache.forward(self.cache.batch(tokens)))

    def nbytes(self):
        return sum(self.cache.memory_breakdown().values())


class Paged:
    """vLLM's pages. Prompts that begin alike share blocks, so that of a new one only the rest is computed."""

    def __init__(self, model, n_seq, kind):
        c = model.config
        n_blocks = n_seq * -(-c.block_size // BLOCK)
        self.pool = PagedCache(c.n_layer, c.n_head, c.n_embd // c.n_head, n_blocks, BLOCK, kind, device_of(model))
        self.numbers = 0

    def new(self):
        self.numbers += 1
        return self.numbers

    def fork(self, seq):
        new = self.new()
        self.pool.fork(seq, new)
        return new

    def truncate(self, seq, n):
        if n == 0:
            self.free(seq)
        else:
            self.pool.truncate(seq, n)

    def free(self, seq):
        if seq in self.pool.tokens:
            self.pool.remove(seq)

    def step(self, model, seqs, idx):
        new, before = {}, {seq: len(self.pool.tokens.get(seq, ())) for seq in seqs}
        try:
            for seq, tokens in zip(seqs, idx.tolist()):
                n_cached = 0
                if before[seq]:
                    self.pool.extend(seq, tokens)
                else:
                    n_cached = self.pool.add(model, seq, tokens)
                new[seq] = len(tokens) - n_cached
        except OutOfBlocks:  # for all of them or for none
            for seq in new:
                self.truncate(seq, before[seq])
            raise
        return self.pool.run(model, new)

    def nbytes(self):
        return self.pool.nbytes()


SYSTEMS = {
    'tuple': Contiguous,
    'streams': lambda *args: Cells(*args, unified=False),
    'unified': lambda *args: Cells(*args, unified=True),
    'paged': Paged,
}


def device_of(model):
    return model.lm_head.weight.device


def last_logits(model, idx, forward):
    """Feed idx (B, T), laid out as the forward wants it; logits (B, vocab_size) of each row's last token."""
    B, T = idx.shape
    x, _ = model.hidden_states(idx.reshape(forward.positions.shape), forward)
    return model.lm_head(x.reshape(B, T, -1)[:, -1])


class Member:
    """One sequence of a system, which is freed when nobody has it any more."""

    def __init__(self, system, seq):
        self.system, self.seq = system, seq

    def __del__(self):
        self.system.free(self.seq)


class Sequences(NamedTuple):
    """
    Sequences of a system, in the role of a `LayerKVCache` of B rows, and of all layers at once: cache_pos is where it is in the tuple.

    Unlike with tuples there is one state, the system's, that each step moves on.
    """
    system: object
    members: list
    cache_pos: int | torch.Tensor

    def rewound(self):
        return self.at(0)

    def at(self, cache_pos):
        B = len(self.members)
        for member, n in zip(self.members, [cache_pos] * B if isinstance(cache_pos, int) else cache_pos.tolist()):
            self.system.truncate(member.seq, n)
        return self._replace(cache_pos=cache_pos)

    def rows(self, rows):
        members, rows = [], rows.tolist()
        for i, row in enumerate(rows):
            again = row in rows[:i]
            members.append(Member(self.system, self.system.fork(self.members[row].seq)) if again else self.members[row])
        pos = self.cache_pos
        return Sequences(self.system, members, pos if isinstance(pos, int) else pos[rows])

    def put(self, rows, other):
        members = self.members[:]
        for row, member in zip(rows.tolist(), other.members):
            members[row] = member
        return self._replace(members=members)


class CacheDecoder:
    """
    A decoder, (idx (B, T), kv_cache) -> (logits (B, 1, vocab_size), kv_cache), whose caches are sequences of a system.

    kind: tuple, streams, unified or paged. n_seq: how many sequences of block_size there is room for. bits: 0 keeps float32; 8 or 4
    are quantised. Raises ValueError on what is not one of these, and where there is no room.
    """

    def __init__(self, model, kind, n_seq, bits=0):
        if kind not in SYSTEMS or bits not in KINDS:
            raise ValueError(f"a cache is {', '.join(SYSTEMS)} in 0 (float32), 8 or 4 bits; not {kind!r} in {bits!r}")
        self.model, self.system = model, SYSTEMS[kind](model, n_seq, KINDS[bits])
        self.name = f"PyTorch, eager, on a cache that is {kind}, {KINDS[bits]}"

    @torch.inference_mode()
    def __call__(self, idx, kv_cache):
        if kv_cache is None:
            kv_cache = [Sequences(self.system, [Member(self.system, self.system.new()) for _ in range(len(idx))], 0)]
        (system, members, cache_pos), = kv_cache
        longest = cache_pos if isinstance(cache_pos, int) else int(cache_pos.max())
        if longest + idx.size(1) > self.model.config.block_size:
            raise ValueError(f"out of context: cache_pos {longest} + {idx.size(1)} new tokens > block_size {self.model.config.block_size}")
        try:
            logits = system.step(self.model, [member.seq for member in members], idx)
        except BaseException:  # as if it had not been asked
            kv_cache[0].at(cache_pos)
            raise
        return logits[:, None], [Sequences(system, members, cache_pos + idx.size(1))]
