"""
A pool of blocks: which block holds which tokens of which sequence. After vLLM's block manager (arXiv:2309.06180).

A sequence is a list of blocks, its block table. Position p is in block table[p // block_size], at offset
p % block_size.

References to blocks are counted, so that sequences can share them: forks of one prompt, and prompts that begin alike.
For that, full blocks are remembered by all tokens up to their end, also when no sequence uses them, until their space
is needed. A sequence that writes to a shared block gets a copy of it first. Pure Python, without keys and values.

If the model has a window, blocks that no later token of a sequence sees are freed, and None is in their places in the
block table. A beginning is found again if the blocks are remembered that the token behind it sees.
"""
from collections import OrderedDict


class OutOfBlocks(ValueError):
    """There are not enough free blocks. The operation of the `BlockManager` that raises this has changed nothing."""


class Prefix:
    """
    The tokens of a full block and of all blocks before it. Prefixes are equal if all their tokens are; equal hashes do
    not suffice.

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


def needed_blocks(start, end, block_size, window=0, n_sink=0):
    """
    The numbers of the blocks that tokens at positions start to end - 1 see, and of their own: a range for those with
    sinks, and a range for the others.
    """
    n_first = -(-min(n_sink, end) // block_size)
    seen = max(n_sink, start - window + 1) if window else 0
    return range(n_first), range(max(n_first, seen // block_size), -(-end // block_size))


class BlockManager:
    """
    n_blocks blocks of block_size slots each. Sequences have any hashable name. hash: the hash function for
    (hash of the parent, tokens). window, n_sink: of the model.

    tables: {sequence: its blocks, in order, None for those that were freed; also blocks for later positions}. length:
    {sequence: the number of its positions}. salts: {sequence: its salt}; a sequence finds only blocks that were
    computed for one with an equal salt. references: the number of tables that each block is in. runs: {sequence: (the
    `Runs` of its table, how many positions it may have before `extend` must be called again)}. The entry of a sequence
    is deleted when its last block is shared, and when its table changes in another way than by new blocks at its end.
    """

    def __init__(self, n_blocks, block_size, hash=hash, window=0, n_sink=0):
        if min(n_blocks, block_size) < 1:
            raise ValueError(f"a pool needs at least 1 block of at least 1 slot, not {n_blocks} blocks of {block_size}")
        self.block_size, self.hash, self.window, self.n_sink = block_size, hash, window, n_sink
        self.tables, self.length, self.runs, self.salts = {}, {}, {}, {}
        self.remembered = {}                               # {sequence: (its first blocks, the Prefix of their tokens)}
        self.references = [0] * n_blocks
        self.free = OrderedDict.fromkeys(range(n_blocks))  # blocks in no table; the remembered ones are used last
        self.prefix_of = [None] * n_blocks                 # the Prefix of each full block that is remembered, or None
        self.block_with = {}                               # {Prefix: block}, the inverse
        self.outdated = set()                              # sequences of before the last reset, and renewed ones

    def add(self, seq, tokens, n=None, salt=''):
        """
        A new sequence with room for the first n of its tokens, or all. Returns how many of the tokens, from the first
        on, are in the cache already; the sequence has these, also if they are more than n.

        These fill whole blocks, and are never all of the tokens: the last one must be computed, for its logits.
        """
        if seq in self.tables:
            raise ValueError(f"there is a sequence {seq!r} already: remove it first, or use another name")
        if not len(tokens) and n is None:
            raise ValueError(f"sequence {seq!r} has no tokens, and a new one needs at least one")
        table = self.cached_blocks(tokens, salt)
        n_cached = len(table) * self.block_size
        n = max(n_cached, len(tokens) if n is None else n)
        n_new = -(-n // self.block_size) - len(table)
        n_free = len(self.free) - sum(self.references[block] == 0 for block in table if block is not None)
        if n_new > n_free:
            raise self.out_of_blocks(n_new, n_free)
        for block in table:
            if block is not None:
                self.acquire(block)
        self.tables[seq], self.length[seq], self.salts[seq] = table + [self.acquire() for _ in range(n_new)], n, salt
        return n_cached

    def root(self, salt):
        """The `Prefix` before the first block of a sequence with this salt."""
        return Prefix(None, ('salt', salt), self.hash) if salt else None

    def cached_blocks(self, tokens, salt=''):
        """
        The block table of the beginning of tokens, as long as one is remembered, but not of all tokens. It has the
        blocks that the token behind it sees, and None for the others.
        """
        table, prefix = [], self.root(salt)
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            mine = Prefix(prefix, tuple(tokens[start:start + self.block_size]), self.hash)
            block = self.block_with.get(mine)
            if block is None and (not self.window or start < self.n_sink):
                break
            table.append(block)
            prefix = mine if block is None else self.prefix_of[block]
        while not self.complete(table, len(table) * self.block_size):
            table.pop()
        sinks, recent = self.needed(len(table) * self.block_size)
        return [block if i in sinks or i in recent else None for i, block in enumerate(table)]

    def needed(self, start, end=None):
        """`needed_blocks` of tokens from start to end - 1; without end, of what the token at start sees before it."""
        return needed_blocks(start, start if end is None else end, self.block_size, self.window, self.n_sink)

    def complete(self, table, n):
        """Does a table have the blocks that the token at position n sees, of the n positions before it?"""
        return not self.window or all(table[i] is not None for numbers in self.needed(n) for i in numbers)

    def passed(self, seq):
        """The numbers of the blocks of a sequence that its next token does not see, in descending order."""
        table, (sinks, recent), numbers = self.tables[seq], self.needed(self.length[seq]), []
        for i in range(min(len(table), recent.start) - 1, sinks.stop - 1, -1):
            if table[i] is None:  # and so are all before it
                break
            numbers.append(i)
        return numbers

    def acquire(self, block=None):
        """Count one more reference to a block. None takes the first of the free ones, and forgets its content."""
        if block is None:
            block, _ = self.free.popitem(last=False)
            self.forget(block)
        else:
            self.free.pop(block, None)
        self.references[block] += 1
        return block

    def out_of_blocks(self, needed, free):
        return OutOfBlocks(f"{needed} blocks are needed and {free} are free: free a sequence, or use a larger pool")

    def release(self, block):
        """Count one reference less. A block without any is free: used last if it is remembered, else first."""
        self.references[block] -= 1
        if self.references[block] == 0:
            self.free[block] = None
            self.free.move_to_end(block, last=self.prefix_of[block] is not None)

    def forget(self, block):
        """Do not remember the content of a block any more."""
        prefix, self.prefix_of[block] = self.prefix_of[block], None
        if prefix is not None:
            del self.block_with[prefix]

    def table(self, seq):
        if seq not in self.tables:
            raise ValueError(f"there is no sequence {seq!r}: add it first")
        return self.tables[seq]

    def needs(self, seq, n):
        """
        What n more positions of a sequence take: (the number of new blocks, is its last block replaced by a copy?,
        the numbers of those that are released before, how many free blocks this gives).
        """
        table, length = self.table(seq), self.length[seq]
        last = length // self.block_size  # the first block that will be written
        shared = last < len(table) and n > 0 and self.references[table[last]] > 1
        passed = self.passed(seq) if self.window else []
        n_new = max(0, -(-(length + n) // self.block_size) - len(table))  # there may be room that was not needed
        return n_new, shared, passed, sum(self.references[table[i]] == 1 for i in passed)

    def extend(self, seq, n=1, copy=None):
        """
        Room for n more positions. Blocks that the next token does not see are freed first. If the last block is shared
        and will be written, it is replaced by a copy.

        copy(source, target) copies the content of a block. It is called before the new block is in the table, so that
        after an interrupt the table has the old block or a complete copy. Returns [(source, target)] of the copies.
        """
        if n < 0:
            raise ValueError(f"a sequence is extended by at least 0 positions, not by {n}: use truncate")
        table, (n_new, shared, _, n_freed) = self.table(seq), self.needs(seq, n)
        last = self.length[seq] // self.block_size
        if n_new + shared > len(self.free) + n_freed:
            raise self.out_of_blocks(n_new + shared, len(self.free) + n_freed)
        self.free_passed(seq)
        source, target = (table[last], self.acquire()) if shared else (None, None)
        if shared:
            self.runs.pop(seq, None)
            if copy:
                copy(source, target)
            table[last] = target
            self.release(source)
        elif last < len(table) and n > 0:
            self.forget(table[last])  # a full block that was truncated will be overwritten
        table += [self.acquire() for _ in range(n_new)]
        self.length[seq] += n
        return [(source, target)] if shared else []

    def free_passed(self, seq):
        """
        Free the blocks of a sequence that its next token does not see. A step does so for all of its sequences first:
        then there are the blocks that `needs` counts, whichever sequence is extended first.
        """
        for i in self.passed(seq) if self.window else ():
            self.runs.pop(seq, None)
            self.release(self.tables[seq][i])
            self.tables[seq][i] = None

    def append_block(self, seq):
        """`extend` by one position for a sequence whose blocks are full. Returns the new block."""
        if not self.free:
            raise self.out_of_blocks(1, 0)
        block = self.acquire()
        self.tables[seq].append(block)
        self.length[seq] += 1
        return block

    def remember(self, seq, tokens):
        """
        Remember the full blocks of a sequence by its tokens, all of them so far: other sequences that begin alike may
        share them.
        """
        if seq in self.outdated:
            return
        done, prefix = self.remembered.get(seq) or (0, self.root(self.salts[seq]))
        n_full = min(len(tokens), self.length[seq]) // self.block_size
        for i in range(done, n_full):
            block = self.tables[seq][i]
            if block is None or self.prefix_of[block] is None:
                mine = Prefix(prefix, tuple(tokens[i * self.block_size:(i + 1) * self.block_size]), self.hash)
                if mine in self.block_with:  # two sequences have computed the same; one block of them is remembered
                    prefix = self.prefix_of[self.block_with[mine]]
                    continue
                if block is None:
                    prefix = mine
                    continue
                self.prefix_of[block], self.block_with[mine] = mine, block
            prefix = self.prefix_of[block]
        self.remembered[seq] = n_full, prefix

    def fork(self, seq, new):
        """A new sequence with all tokens of seq, in the same blocks."""
        if new in self.tables:
            raise ValueError(f"there is a sequence {new!r} already: remove it first, or use another name")
        self.runs.pop(seq, None)
        table = self.table(seq)[:-(-self.length[seq] // self.block_size)]  # not what it has for later tokens
        for block in table:
            if block is not None:
                self.acquire(block)
        self.tables[new], self.length[new], self.salts[new] = table, self.length[seq], self.salts[seq]
        if seq in self.remembered:
            self.remembered[new] = self.remembered[seq]
        if seq in self.outdated:
            self.outdated.add(new)

    def truncate(self, seq, length):
        """Keep the first `length` positions of a sequence. ValueError if blocks that are needed then were freed."""
        table = self.table(seq)
        if not 0 <= length <= self.length[seq] or not self.complete(table, length):
            raise ValueError(f"sequence {seq!r} has {self.length[seq]} positions, {table.count(None)} of its blocks "
                             f"are gone, and it cannot be cut to {length}")
        n = -(-length // self.block_size)
        self.runs.pop(seq, None)
        self.length[seq] = length
        done, prefix = self.remembered.pop(seq, None) or (0, self.root(self.salts[seq]))
        while done > length // self.block_size:
            done, prefix = done - 1, prefix.parent
        self.remembered[seq] = done, prefix
        for block in reversed(table[n:]):
            if block is not None:
                self.release(block)
        del table[n:]

    def renew(self, seq, start, length):
        """
        Keep the first `length` positions of a sequence, of which those from start on are to be written anew, and are
        not what was computed from its tokens: blocks with such positions that are shared are replaced by free ones, and
        none of them is remembered, now or later. The caller copies what is in the first of them before start.
        """
        table, first, n = self.table(seq), start // self.block_size, -(-length // self.block_size)
        shared = [i for i in range(first, n) if self.references[table[i]] > 1]
        n_free = len(self.free) + sum(self.references[block] == 1 for block in table[n:])
        if len(shared) > n_free:
            raise self.out_of_blocks(len(shared), n_free)
        self.outdated.add(seq)
        self.truncate(seq, length)
        for i in range(first, n):
            if i in shared:
                self.release(table[i])
                table[i] = self.acquire()
            else:
                self.forget(table[i])

    def remove(self, seq):
        """
        Remove a sequence. Its blocks are freed from the last on, so that the end of a prompt is forgotten before its
        beginning.
        """
        self.truncate(seq, 0)
        del self.tables[seq], self.length[seq], self.remembered[seq], self.salts[seq]
        self.outdated.discard(seq)

    def reset(self):
        """Forget the content of all blocks: the weights have changed, and no later sequence may share it."""
        for block in range(len(self.references)):
            self.forget(block)
        self.outdated = set(self.tables)
        self.remembered.clear()

    def recover(self):
        """
        Make everything agree with the tables again, after an exception has ended an operation at any line. Sequences,
        their lengths and the content of full blocks are not forgotten.
        """
        for seq in self.tables.keys() ^ self.length.keys() | self.tables.keys() ^ self.salts.keys():
            for of_sequence in (self.tables, self.length, self.salts):
                of_sequence.pop(seq, None)
        self.runs.clear()
        self.outdated &= self.tables.keys()
        self.references = [0] * len(self.references)
        self.remembered.clear()
        for seq, table in self.tables.items():
            del table[-(-self.length[seq] // self.block_size):]
            for block in table:
                if block is not None:
                    self.references[block] += 1
        blocks = dict.fromkeys([*self.free, *range(len(self.references))])  # those that were free keep their order
        free = [block for block in blocks if self.references[block] == 0]
        self.free = OrderedDict.fromkeys(sorted(free, key=lambda block: self.prefix_of[block] is not None))
        self.block_with = {prefix: block for block, prefix in enumerate(self.prefix_of) if prefix is not None}

    def slots(self, seq, start, end):
        """The slots of positions start to end - 1 of a sequence, for a slot_mapping."""
        table, size = self.tables[seq], self.block_size
        return [table[p // size] * size + p % size for p in range(start, end)]
