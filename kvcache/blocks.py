"""
Pages: which block of the pool holds which tokens of which sequence. After vLLM's block manager (arXiv:2309.06180).

A sequence is a list of blocks, its block table; position p is at slot table[p // block_size] * block_size + p % block_size.
Blocks are counted, so that sequences can share them: forks of one prompt, and prompts that begin alike, because full blocks
are remembered by all tokens up to their end, even when nobody uses them any more, until their room is needed. Whoever
writes to a block that others use gets a copy first. Pure Python, and no data: everything here can be followed on paper.
"""
from collections import OrderedDict


class OutOfBlocks(ValueError):
    """There are not enough free blocks. Nothing has changed."""


class Prefix:
    """
    The tokens of a block and all before it. Equal only if all tokens are, whatever their hashes say.

    tokens: a tuple of block_size ids. parent: the Prefix of the block before, or None.
    """
    __slots__ = ('parent', 'tokens', 'hash')

    def __init__(self, parent, tokens, hash=hash):
        self.parent, self.tokens, self.hash = parent, tokens, hash((parent and parent.hash, tokens))

    def __hash__(self):
        return self.hash

    def __eq__(self, other):
        a, b = self, other
        while a is not b:
            if a is None or b is None or a.tokens != b.tokens:
                return False
            a, b = a.parent, b.parent
        return True


class BlockManager:
    """
    n_blocks blocks of block_size slots each. Sequences go by any hashable name. hash: of (hash of the parent, tokens).

    tables: {sequence: its blocks, in order}. length: {sequence: positions that it has room for and uses}. references: for each
    block, how many tables it is in.
    """

    def __init__(self, n_blocks, block_size, hash=hash):
        if min(n_blocks, block_size) < 1:
            raise ValueError(f"{n_blocks} blocks of {block_size} slots are none")
        self.block_size, self.hash = block_size, hash
        self.tables, self.length = {}, {}
        self.references = [0] * n_blocks
        self.free = OrderedDict.fromkeys(range(n_blocks))  # blocks in no table, the one that is taken next first
        self.prefix_of = [None] * n_blocks                 # of full blocks: the tokens up to their end
        self.block_with = {}                               # the other way round
        self.outdated = set()                              # sequences from before the last reset

    def add(self, seq, tokens):
        """
        A new sequence with room for its tokens. Returns how many of them, from the first on, are in the cache already.

        Those are whole blocks, and never all of the tokens: the last one has to run, for its logits.
        """
        if seq in self.tables:
            raise ValueError(f"there is a sequence {seq!r} already")
        if not len(tokens):
            raise ValueError("a sequence has at least one token")
        table = self.cached_blocks(tokens)
        n_new = -(-len(tokens) // self.block_size) - len(table)
        revived = sum(self.references[block] == 0 for block in table)
        if n_new > len(self.free) - revived:
            raise OutOfBlocks(f"{n_new} blocks are needed and {len(self.free) - revived} are free: free a sequence, or use a larger pool")
        for block in table:
            self.take(block)
        n_cached = len(table) * self.block_size
        self.tables[seq], self.length[seq] = table + [self.take() for _ in range(n_new)], len(tokens)
        return n_cached

    def cached_blocks(self, tokens):
        """The blocks that hold the beginning of tokens, as many as there are, but not all of the tokens."""
        found, prefix = [], None
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            block = self.block_with.get(Prefix(prefix, tuple(tokens[start:start + self.block_size]), self.hash))
            if block is None:
                break
            found.append(block)
            prefix = self.prefix_of[block]
        return found

    def take(self, block=None):
        """Into one more table: the given block, or the free one that has not been used for longest, which forgets what it held."""
        if block is None:
            block, _ = self.free.popitem(last=False)
            self.forget(block)
        else:
            self.free.pop(block, None)
        self.references[block] += 1
        return block

    def release(self, block):
        self.references[block] -= 1
        if self.references[block] == 0:
            self.free[block] = None

    def forget(self, block):
        """What the block holds is not to be found any more."""
        prefix, self.prefix_of[block] = self.prefix_of[block], None
        if prefix is not None:
            del self.block_with[prefix]

    def table(self, seq):
        if seq not in self.tables:
            raise ValueError(f"there is no sequence {seq!r}")
        return self.tables[seq]

    def extend(self, seq, n=1, copy=None):
        """
        Room for n more positions. A last block that other sequences use as well is replaced by a copy.

        copy(from block, to block) copies what the blocks hold. It is called before the new block is in the table, so
        that an interrupt leaves either the old block there or a complete copy. Returns the copies as a list of (from
        block, to block), for who makes them later.
        """
        if n < 0:
            raise ValueError(f"a sequence is extended by positions, not by {n}: use truncate")
        table, length = self.table(seq), self.length[seq]
        n_new = -(-(length + n) // self.block_size) - len(table)
        last = length // self.block_size  # the block that is written first
        shared = last < len(table) and n > 0 and self.references[table[last]] > 1
        if n_new + shared > len(self.free):
            raise OutOfBlocks(f"{n_new + shared} blocks are needed and {len(self.free)} are free: free a sequence, or use a larger pool")
        copies = []
        if shared:
            source, target = table[last], self.take()
            if copy:
                copy(source, target)
            table[last] = target
            self.release(source)
            copies.append((source, target))
        elif last < len(table) and n > 0:
            self.forget(table[last])  # cut off within a full block, and about to be written over
        table += [self.take() for _ in range(n_new)]
        self.length[seq] += n
        return copies

    def remember(self, seq, tokens):
        """The full blocks of a sequence hold these tokens now, all of it so far: others that begin like that may share them."""
        prefix = None
        for i in range(0 if seq in self.outdated else min(len(tokens), self.length[seq]) // self.block_size):
            block = self.tables[seq][i]
            if self.prefix_of[block] is None:
                mine = Prefix(prefix, tuple(tokens[i * self.block_size:(i + 1) * self.block_size]), self.hash)
                if mine in self.block_with:  # two have computed the same at once. One is enough
                    prefix = self.prefix_of[self.block_with[mine]]
                    continue
                self.prefix_of[block], self.block_with[mine] = mine, block
            prefix = self.prefix_of[block]

    def fork(self, seq, new):
        """A new sequence with all that seq has so far, in the same blocks."""
        if new in self.tables:
            raise ValueError(f"there is a sequence {new!r} already")
        for block in self.table(seq):
            self.take(block)
        self.tables[new], self.length[new] = self.tables[seq][:], self.length[seq]
        if seq in self.outdated:
            self.outdated.add(new)

    def truncate(self, seq, length):
        """Keep the first `length` positions of a sequence."""
        self.table(seq)
        if not 0 <= length <= self.length[seq]:
            raise ValueError(f"a sequence of {self.length[seq]} cannot be cut to {length}")
        n = -(-length // self.block_size)
        self.length[seq] = length
        for block in reversed(self.tables[seq][n:]):
            self.release(block)
        del self.tables[seq][n:]

    def remove(self, seq):
        """A sequence is done. Its blocks are freed from the last on, so that of a prompt the end is given away before the beginning."""
        self.truncate(seq, 0)
        del self.tables[seq], self.length[seq]
        self.outdated.discard(seq)

    def reset(self):
        """Nothing that was computed before is to be found any more: the weights have changed."""
        for block in range(len(self.references)):
            self.forget(block)
        self.outdated = set(self.tables)

    def recover(self):
        """
        Make everything agree with the tables again, after an operation that an exception cut short at any place.
        Nothing else is lost: sequences, their lengths and what is known of full blocks stay.
        """
        for seq in self.tables.keys() ^ self.length.keys():
            self.tables.pop(seq, None)
            self.length.pop(seq, None)
        self.outdated &= self.tables.keys()
        self.references = [0] * len(self.references)
        for seq, table in self.tables.items():
            del table[-(-self.length[seq] // self.block_size):]
            for block in table:
                self.references[block] += 1
        known = dict.fromkeys([*self.free, *range(len(self.references))])  # in the order in which they became free
        self.free = OrderedDict.fromkeys(block for block in known if self.references[block] == 0)
        self.block_with = {prefix: block for block, prefix in enumerate(self.prefix_of) if prefix is not None}

    def slots(self, seq, start, end):
        """The slots of positions start to end - 1: its part of a slot_mapping."""
        table, size = self.tables[seq], self.block_size
        return [table[p // size] * size + p % size for p in range(start, end)]
