"""
A pool of blocks: which block holds which tokens of which sequence. After vLLM's block manager (arXiv:2309.06180).

A sequence is a list of blocks, its block table. Position p is in block table[p // page_size], at offset p % page_size.

References to blocks are counted, so that sequences can share them: forks of one prompt, and prompts that begin alike.
For that, full blocks are remembered by all tokens up to their end, also when no sequence uses them, until their space
is needed. A sequence that writes to a shared block gets a copy of it first. Pure Python, without keys and values.

If the model has a window, blocks that no later token of a sequence sees are freed, and None is in their places in the
block table. A beginning is found again if the blocks are remembered that the token behind it sees.
"""
from collections import OrderedDict


class OutOfBlocks(ValueError):
    """There are not enough free blocks. The operation of the `BlockManager` that raises this has changed nothing."""

    def __init__(self, n, n_free):
        super().__init__(f"{n} blocks are needed and {n_free} are free: free a sequence, or use a larger pool")


class Prefix:
    """
    The tokens of a full block and of all blocks before it. Prefixes are equal if all their tokens are; equal hashes do
    not suffice.

    tokens: a tuple of page_size ids. parent: the Prefix of the block before, or None.
    """
    __slots__ = ('parent', 'tokens', 'hash')

    def __init__(self, parent, tokens):
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
    n_blocks blocks of page_size slots each, and the tables of sequences, which are in their `records.BlockRecord`s.
    window, n_sink: of the model.

    references: the number of tables that each block is in. free: the blocks in no table; those that are remembered are
    used last. prefix_of: the `Prefix` of each full block that is remembered, or None. block_with: {Prefix: block}, the
    inverse. epoch: how often everything was forgotten.
    """

    def __init__(self, n_blocks, page_size, window=0, n_sink=0):
        if min(n_blocks, page_size) < 1:
            raise ValueError(f"a pool needs at least 1 block of at least 1 slot, not {n_blocks} blocks of {page_size}")
        self.page_size, self.window, self.n_sink = page_size, window, n_sink
        self.references = [0] * n_blocks
        self.free = OrderedDict.fromkeys(range(n_blocks))
        self.prefix_of, self.block_with, self.epoch = [None] * n_blocks, {}, 0

    def begin(self, record, tokens):
        """
        Give an empty sequence the remembered blocks with which its tokens begin. Returns how many of the tokens these
        hold. They fill whole blocks, and are never all of the tokens: the last one must be computed, for its logits.
        """
        self.trim(record, 0)  # what was reserved for it
        for block in (table := self.cached_blocks(tokens, record.salt)):
            if block is not None:
                self.acquire(block)
        record.table, record.epoch, record.prefixes = table, self.epoch, []
        record.runs, record.room, record.length = None, 0, len(table) * self.page_size
        record.tokens = list(tokens[:record.length])
        return record.length

    def root(self, salt):
        """The `Prefix` before the first block of a sequence with this salt."""
        return Prefix(None, ('salt', salt)) if salt else None

    def cached_blocks(self, tokens, salt=''):
        """
        The block table of the beginning of tokens, as long as one is remembered, but not of all tokens. It has the
        blocks that the token behind it sees, and None for the others.
        """
        table, prefix = [], self.root(salt)
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            mine = Prefix(prefix, tuple(tokens[start:start + self.page_size]))
            block = self.block_with.get(mine)
            if block is None and (not self.window or start < self.n_sink):
                break
            table.append(block)
            prefix = mine if block is None else self.prefix_of[block]
        while not self.complete(table, len(table) * self.page_size):
            table.pop()
        sinks, recent = self.needed(len(table) * self.page_size)
        return [block if i in sinks or i in recent else None for i, block in enumerate(table)]

    def needed(self, n):
        """
        The numbers of the blocks that the token at position n sees, of the n positions before it: a range for those
        with sinks, and a range for the others.
        """
        size = self.page_size
        n_first = -(-min(self.n_sink, n) // size)
        seen = max(self.n_sink, n - self.window + 1) if self.window else 0
        return range(n_first), range(max(n_first, seen // size), -(-n // size))

    def complete(self, table, n):
        """Does a table have the blocks that the token at position n sees, of the n positions before it?"""
        return not self.window or all(table[i] is not None for numbers in self.needed(n) for i in numbers)

    def passed(self, record):
        """The numbers of the blocks of a sequence that its next token does not see, in descending order."""
        table, (sinks, recent), numbers = record.table, self.needed(record.length), []
        own = record.length // self.page_size  # of the next token; it and those behind it are for later tokens
        for i in range(min(len(table), recent.start, own) - 1, sinks.stop - 1, -1):
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

    def n_missing(self, record, n):
        """
        How many free blocks n more positions of a sequence take, a copy of a shared block included; negative if the
        window frees more than are taken.
        """
        n_freed = sum(self.references[record.table[i]] == 1 for i in self.passed(record)) if self.window else 0
        return self.n_new(record, n) + (n > 0 and self.is_shared(record)) - n_freed

    def n_new(self, record, n):
        """By how many blocks n more positions make the table of a sequence longer, which may have some for them."""
        return max(0, -(-(record.length + n) // self.page_size) - len(record.table))

    def is_shared(self, record):
        """Is the block of the next position of a sequence in other tables too?"""
        last = record.length // self.page_size
        return last < len(record.table) and self.references[record.table[last]] > 1

    def extend(self, record, n, copy=None):
        """
        Blocks for n more positions of a sequence. Blocks that the next token does not see are freed first. If the last
        block is shared and will be written, it is replaced by a copy: copy(source, target) copies the content of a
        block. `OutOfBlocks`, with nothing changed, if there are too few.
        """
        table, last, n_missing = record.table, record.length // self.page_size, self.n_missing(record, n)
        if n_missing > len(self.free):
            raise OutOfBlocks(n_missing, len(self.free))
        self.free_passed(record)
        if n > 0 and self.is_shared(record):
            source, table[last] = table[last], self.acquire()
            record.runs = None
            if copy:
                copy(source, table[last])
            self.release(source)
        elif last < len(table) and n > 0:
            self.forget(table[last])  # a full block that was truncated will be overwritten
        table += [self.acquire() for _ in range(self.n_new(record, n))]

    def free_passed(self, record):
        """
        Free the blocks of a sequence that its next token does not see. A step does so for all of its sequences first:
        then there are the blocks that `n_missing` counts, whichever sequence is extended first.
        """
        for i in self.passed(record) if self.window else ():
            record.runs, record.room = None, 0
            self.release(record.table[i])
            record.table[i] = None

    def remember(self, record):
        """Remember the full blocks of a sequence by its tokens: other sequences that begin alike may share them."""
        if record.epoch != self.epoch:
            return
        for i in range(len(record.prefixes), record.length // self.page_size):
            block = record.table[i]
            mine = None if block is None else self.prefix_of[block]
            if mine is None:
                parent = record.prefixes[-1] if i else self.root(record.salt)
                mine = Prefix(parent, tuple(record.tokens[i * self.page_size:(i + 1) * self.page_size]))
                if mine in self.block_with:  # two sequences have computed the same; one block of them is remembered
                    mine = self.prefix_of[self.block_with[mine]]
                elif block is not None:
                    self.prefix_of[block], self.block_with[mine] = mine, block
            record.prefixes.append(mine)

    def fork(self, record, new):
        """Give a new sequence all tokens of another one, in the same blocks."""
        new.table = record.table[:-(-record.length // self.page_size)]  # not what it has for later tokens
        for block in new.table:
            if block is not None:
                self.acquire(block)
        new.tokens, new.length, new.epoch = record.tokens[:record.length], record.length, record.epoch
        new.prefixes = record.prefixes[:]
        record.room = 0  # its last block is shared now

    def truncate(self, record, n):
        """Keep the first n positions of a sequence, which has the blocks that the token at position n sees."""
        del record.tokens[n:], record.prefixes[n // self.page_size:]
        record.length = n
        self.trim(record, n)

    def trim(self, record, n):
        """Release the blocks behind the first n positions of a sequence, the last one first."""
        n_kept = -(-n // self.page_size)
        for block in reversed(record.table[n_kept:]):
            if block is not None:
                self.release(block)
        del record.table[n_kept:]
        record.runs, record.room = None, 0

    def renew(self, record, start, length):
        """
        Keep the first `length` positions of a sequence, of which those from start on are to be written anew, and are
        not what was computed from its tokens: blocks with such positions that are shared are replaced by free ones, and
        none of them is remembered, now or later. The caller copies what is in the first of them before start.
        """
        table, first, n = record.table, start // self.page_size, -(-length // self.page_size)
        shared = [i for i in range(first, n) if self.references[table[i]] > 1]
        n_free = len(self.free) + sum(self.references[block] == 1 for block in table[n:])
        if len(shared) > n_free:
            raise OutOfBlocks(len(shared), n_free)
        record.epoch = None
        self.trim(record, length)
        for i in range(first, n):
            if i in shared:
                self.release(table[i])
                table[i] = self.acquire()
            else:
                self.forget(table[i])

    def reset(self):
        """Forget the content of all blocks: the weights have changed, and no later sequence may share it."""
        for block in range(len(self.references)):
            self.forget(block)
        self.epoch += 1

    def recover(self, records):
        """
        Make everything agree with the tables of these sequences, all that there are, after an exception has ended an
        operation. The content of full blocks is not forgotten.
        """
        self.references = [0] * len(self.references)
        for record in records:
            del record.table[-(-record.length // self.page_size):]
            del record.tokens[record.length:]
            record.runs, record.room, record.prefixes = None, 0, []
            for block in record.table:
                if block is not None:
                    self.references[block] += 1
        blocks = dict.fromkeys([*self.free, *range(len(self.references))])  # those that were free keep their order
        free = [block for block in blocks if self.references[block] == 0]
        self.free = OrderedDict.fromkeys(sorted(free, key=lambda block: self.prefix_of[block] is not None))
        self.block_with = {prefix: block for block, prefix in enumerate(self.prefix_of) if prefix is not None}

    def slots(self, record, start, end):
        """The slots of positions start to end - 1 of a sequence."""
        size = self.page_size
        return [record.table[p // size] * size + p % size for p in range(start, end)]
