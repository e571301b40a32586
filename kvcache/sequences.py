"""
Cache systems under `generate` and `stream`: what a generation holds of one, in the role of its list of tuples.

    decoder = CacheDecoder(model, 'paged', n_seq=10, bits=8)
    model.generate(idx, 200, use_cache=True, num_samples=10, decoder=decoder)

A system keeps sequences by number: `new`, `fork`, `truncate`, `free`, and `step`, which feeds T tokens to each of some and returns
the logits after the last of them. Which rows that takes and who shares them is its own business; the tokens are the same.
"""
import weakref
from typing import NamedTuple

import torch

from kvcache.exclusive import Exclusive, exclusive
from kvcache.paged import PagedCache
from kvcache.placement import Forward, Layer, NotNumbers, Placement, beginning, logits_of, wipe
from kvcache.storage import BITS, Scratch
from kvcache.unified import KVCache

KINDS = {0: 'the dtype of the model', 8: 'int8', 4: 'int4'}
BLOCK = 16  # positions of a block of the paged system


class System(Exclusive):
    """
    Sequences by number, and how many tokens each has: length, {sequence: tokens}. Several threads can share a system:
    its operations run one at a time. One that raises or is interrupted leaves the sequences as they were.

    A kind of system adds where they are kept: `feed`, for one forward pass; `copy`, of all of a sequence to a new
    one; and `cut`, to its first n tokens, of however many there are: after a pass that has failed there may be more
    than `length` says. layers: those to wipe after broken weights, when there are no sequences.
    """

    def __init__(self, n_seq):
        super().__init__()
        self.n_seq, self.length, self.unused = n_seq, {}, list(range(n_seq))[::-1]
        self.owners = {}  # {sequence: a weak reference to the object that it is for}, of those that are for one
        self.spoilt = False  # may the rows of no sequence hold numbers that show through a mask? See `Forward.hiding`

    @exclusive
    def new(self, owner=None):
        """
        The number of a new sequence. It is freed by `free` or, if it is for an owner, before the first operation
        after the owner is gone.
        """
        return self.begin(owner)

    def begin(self, owner):
        self.reclaim()
        if self.spoilt and not self.length:
            wipe(self.layers)
            self.spoilt = False
        if not self.unused:
            raise ValueError(f"the cache has room for {len(self.length)} sequences, and all are taken: let go of earlier caches, "
                             "and of exceptions that hold them")
        seq = self.unused.pop()
        if owner is not None:
            self.owners[seq] = weakref.ref(owner)
        self.length[seq] = 0
        return seq

    @exclusive
    def fork(self, seq, owner=None):
        """The number of a new sequence, see `new`, that has all tokens of seq."""
        length = self.length[seq]
        new = self.begin(owner)
        if length:
            self.copy(seq, new)
            self.length[new] = length
        return new

    @exclusive
    def rewind(self, lengths):
        """Go on from {sequence: its first n tokens}. ValueError if one of them has fewer; then none is changed."""
        for seq, n in lengths.items():
            if not 0 <= n <= self.length[seq]:
                raise ValueError(f"a sequence of {self.length[seq]} tokens cannot go on from {n}: it has been cut since")
        for seq, n in lengths.items():
            if n < self.length[seq]:
                self.length[seq] = n  # first, so that `recover` can finish the cut
                self.cut(seq, n)

    @exclusive
    def free(self, seq):
        self.end(seq)

    def end(self, seq):
        del self.length[seq]
        self.owners.pop(seq, None)
        self.cut(seq, 0)
        self.unused.append(seq)

    @exclusive
    def collect(self):
        """Free the sequences whose owners are gone, which every operation that needs room does anyway."""
        self.reclaim()

    def reclaim(self):
        for seq in [seq for seq, owner in self.owners.items() if owner() is None]:
            self.end(seq)

    def recover(self):
        self.owners = {seq: owner for seq, owner in self.owners.items() if seq in self.length}
        for seq in range(self.n_seq):
            self.cut(seq, self.length.get(seq, 0))
        self.unused = [seq for seq in range(self.n_seq) if seq not in self.length][::-1]

    @exclusive
    @torch.no_grad()
    def step(self, model, seqs, idx):
        """
        Feed idx (B, T) to B sequences; logits (B, vocab_size) of the last tokens. If it fails it is as if it had not
        been asked. `NotNumbers` if the logits are not.
        """
        self.reclaim()
        try:
            logits = self.feed(model, seqs, idx)
        except NotNumbers:  # perhaps because of keys that earlier, broken weights left in the rows of others
            self.spoilt = True
            self.recover()
            logits = torch.cat([self.feed(model, [seq], row[None], hiding=True) for seq, row in zip(seqs, idx)])
        self.length |= {seq: self.length[seq] + idx.size(1) for seq in seqs}
        return logits


class TupleSystem(System):
    """The tuple's way, on rows: sequence i has rows i * size to i * size + size - 1, and a position is a row."""

    def __init__(self, model, n_seq, kind):
        super().__init__(n_seq)
        c = model.config
        self.size, scratch = c.block_size, Scratch()
        self.layers = [Layer((n_seq, c.block_size), c.n_head, c.n_embd // c.n_head, kind, kind, device_of(model), scratch=scratch)
                       for _ in range(c.n_layer)]

    def copy(self, seq, new):
        for layer in self.layers:
            layer.copy(seq, new)

    def cut(self, seq, n):
        pass  # what comes after is hidden, and written over

    def feed(self, model, seqs, idx, hiding=False):
        T, device = idx.size(1), idx.device
        start = torch.tensor([self.length[seq] for seq in seqs], device=device)
        number = torch.tensor(seqs, device=device)
        positions = start[:, None] + torch.arange(T, device=device)
        index, longest = beginning(number, max(self.length[seq] for seq in seqs) + T, self.size)
        mask = (torch.arange(longest, device=device) <= positions[..., None])[:, None]
        placement = Placement(positions, (number[:, None] * self.size + positions).flatten(), index, mask)
        return last_logits(model, idx, Forward(self.layers, placement), hiding)

    def nbytes(self):
        return sum(layer.nbytes() for layer in self.layers)


class CellsSystem(System):
    """llama.cpp's cells: one stream for all sequences, or one for each."""

    def __init__(self, model, n_seq, kind, unified):
        super().__init__(n_seq)
        c = model.config
        self.cache = KVCache(c.n_layer, c.n_head, c.n_embd // c.n_head, c.block_size * (n_seq if unified else 1), n_seq, unified,
                             kind, kind, device=device_of(model))
        self.layers = self.cache.own_layers()

    def copy(self, seq, new):
        self.cache.seq_cp(seq, new)

    def cut(self, seq, n):
        self.cache.seq_rm(seq, n)

    def recover(self):
        super().recover()
        for cells in self.cache.streams:  # an interrupt may have come between a cell's position and its owner
            cells.recount()
            for seq in cells.seqs:
                if seq not in self.length:
                    cells.take(seq)

    def feed(self, model, seqs, idx, hiding=False):
        batch = self.cache.batch({seq: range(self.length[seq], self.length[seq] + idx.size(1)) for seq in seqs})
        return last_logits(model, idx, self.cache.forward(batch), hiding)

    def nbytes(self):
        return sum(self.cache.memory_breakdown().values())


class PagedSystem(System):
    """vLLM's pages, with room for n_seq full sequences or more short ones. Prompts that begin alike share blocks: only the rest is computed."""

    def __init__(self, model, n_seq, kind):
        c = model.config
        n_blocks = n_seq * -(-c.block_size // BLOCK)
        super().__init__(n_blocks)
        self.pool = PagedCache(c.n_layer, c.n_head, c.n_embd // c.n_head, n_blocks, BLOCK, kind, device_of(model))
        self.layers = []  # the pool looks after its own

    def copy(self, seq, new):
        self.pool.fork(seq, new)

    def cut(self, seq, n):
        if n:
            self.pool.truncate(seq, n)
        elif seq in self.pool.tokens:
            self.pool.remove(seq)

    def feed(self, model, seqs, idx, hiding=False):
        tokens = dict(zip(seqs, idx.tolist()))
        prompts = {seq: mine for seq, mine in tokens.items() if not self.length[seq]}
        if prompts:
            self.pool.add_all(model, prompts)
        for seq, mine in tokens.items():
            if self.length[seq]:
                self.pool.extend(seq, mine)
        return self.pool.run(model, seqs)

    def nbytes(self):
        return self.pool.nbytes()


SYSTEMS = {
    'tuple': TupleSystem,
    'streams': lambda *args: CellsSystem(*args, unified=False),
    'unified': lambda *args: CellsSystem(*args, unified=True),
    'paged': PagedSystem,
}


def device_of(model):
    return model.lm_head.weight.device


def dtype_of(model):
    return model.transformer.wpe.weight.dtype


def last_logits(model, idx, forward, hiding):
    """Feed idx (B, T); logits (B, vocab_size) of each row's last token. hiding: see `Forward.hiding`."""
    B, T = idx.shape
    return logits_of(model, idx, forward.hiding() if hiding else forward, slice(T - 1, None, T))


class Member:
    """
    One sequence of a system, new or a fork of another one's. It is freed some time after the last reference to this
    is gone.
    """

    def __init__(self, system, fork_of=None):
        self.seq = system.new(self) if fork_of is None else system.fork(fork_of, self)


class Sequences(NamedTuple):
    """
    Sequences of a system, in the role of a `LayerKVCache` of B rows, and of all layers at once: cache_pos is where it is in the tuple.

    Unlike with tuples there is one state, the system's: to go on from an older list cuts its sequences to what they were then.
    """
    system: object
    members: list
    cache_pos: int | torch.Tensor

    def rewound(self):
        return self.at(0)

    def at(self, cache_pos):
        lengths = [cache_pos] * len(self.members) if isinstance(cache_pos, int) else cache_pos.tolist()
        self.system.rewind({member.seq: n for member, n in zip(self.members, lengths)})
        return self._replace(cache_pos=cache_pos)

    def rows(self, rows):
        members, rows = [], rows.tolist()
        for i, row in enumerate(rows):
            again = row in rows[:i]
            members.append(Member(self.system, self.members[row].seq) if again else self.members[row])
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

    kind: tuple, streams, unified or paged. n_seq: how many sequences of block_size there is room for. bits: 0 keeps
    the dtype of the model; 8 or 4 are quantised. Raises ValueError on what is not one of these, and where there is no
    room.

    Several threads can generate with one decoder: each step runs by itself, and their sequences together need room.
    In the child of a fork it goes on with its own copy.
    """

    def __init__(self, model, kind, n_seq, bits=0):
        if kind not in list(SYSTEMS) or bits not in list(KINDS):
            raise ValueError(f"a cache is {', '.join(SYSTEMS)} in 0 (unquantised), 8 or 4 bits; "
                             f"not {kind!r} in {bits!r}")
        if not isinstance(n_seq, int) or n_seq < 1:
            raise ValueError(f"a cache is for at least 1 sequence, not {n_seq!r}")
        self.model, self.dtype = model, dtype_of(model)
        stored = KINDS[bits] if bits else str(self.dtype).removeprefix('torch.')
        if stored not in BITS:
            raise ValueError(f"a cache keeps numbers as {', '.join(BITS)}, and the model is {stored}: "
                             "convert it, or pass bits=8")
        self.system = SYSTEMS[kind](model, n_seq, stored)
        self.name = f"PyTorch, eager, on a cache that is {kind}, {stored}"

    @torch.inference_mode()
    def __call__(self, idx, kv_cache):
        idx, _ = self.model.check_input(idx, None)
        if dtype_of(self.model) is not self.dtype:
            raise ValueError(f"the model was {self.dtype} when its cache was made, and is {dtype_of(self.model)}: "
                             "make a new decoder")
        if kv_cache is None:
            kv_cache = [Sequences(self.system, [Member(self.system) for _ in range(len(idx))], 0)]
        if len(kv_cache) != 1 or getattr(kv_cache[0], 'system', None) is not self.system:
            raise ValueError("this cache is not of this decoder: begin with None")
        (system, members, cache_pos), = kv_cache
        if len(idx) != len(members):
            raise ValueError(f"the cache holds a batch of {len(members)}, but the tokens are a batch of {len(idx)}")
        cache_pos = self.model.check_cache_pos(cache_pos, *idx.shape)
        kv_cache[0].at(cache_pos)
        logits = system.step(self.model, [member.seq for member in members], idx)
        return logits[:, None], [Sequences(system, members, cache_pos + idx.size(1))]
