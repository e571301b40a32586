"""
Decode steps of the same sequences, one after the other. Most of what such a step must find out, the step before has
found out already.
"""
from operator import sub


class Decoding:
    """
    Sequences that each get one token in a compiled step. Such a step makes a `Decoding`. The next operation of the
    cache uses it if it is a step of one more token for each of the same sequences.

    seqs: the sequences. counts: [1, 1, ...], as many. n_steps: how many steps have used it. n_left: how many more
    steps the model has positions for. positions: int64 (B,), of the newest tokens. metadata: the `InputMetadata` of
    each step; its list of runs is written anew. operation: the number of the last operation of the cache that has used
    it.
    """

    def __init__(self, seqs, ends, n_positions, kernel, operation):
        self.seqs, self.counts, self.n_steps = list(seqs), [1] * len(seqs), 0
        self.n_left, self.operation = n_positions - max(ends), operation
        self.positions = kernel.positions(ends, self.counts) - 1
        self.metadata = kernel.metadata(self.counts, [None] * len(seqs))

    @property
    def ends(self):
        """How many tokens each sequence has."""
        return (self.positions + 1).tolist()

    def goes_on(self, seqs, starts, n_new):
        """Would a step of n_new tokens, for these sequences from the positions `starts` on, be the next one?"""
        return seqs == self.seqs and starts == self.ends and n_new == len(seqs) and self.n_left > 0

    def advance(self, n=1):
        """Count the next n steps."""
        self.n_steps += n
        self.n_left -= n
        self.positions = self.positions + n  # a new array: the one before may be kept by others


class BlockDecoding(Decoding):
    """
    A `Decoding` in the blocks of a `PagedCache`. A step looks only at the sequences that need another block.

    texts: the list of tokens of each sequence. due[k]: the numbers, in seqs, of the sequences that need another block,
    or a copy of a shared one, in step k.
    """

    def __init__(self, seqs, ends, cache):
        super().__init__(seqs, ends, cache.model.config.max_positions, cache.kernel, cache.n_operations)
        self.texts, self.due = [cache.tokens[seq] for seq in seqs], {}  # not the cache itself, which refers to this
        of_all = [cache.blocks.runs.get(seq, (None, end)) for seq, end in zip(seqs, ends)]
        self.metadata.runs[:] = [runs for runs, _ in of_all]
        for number, n in enumerate(map(sub, [limit for _, limit in of_all], ends)):
            self.due.setdefault(max(n, 0) + 1, []).append(number)

    def make_room(self, cache, n=1):
        """
        Take the blocks for the next n steps, or for 2 * block_size if n is larger. Returns for how many steps there is
        room. `OutOfBlocks` if there is no room for the next one.

        For steps behind the next block_size ones, blocks are taken only while one for each sequence stays free. With a
        window, only the next step gets blocks.
        """
        blocks, free = cache.blocks, cache.blocks.free
        size = blocks.block_size
        n = max(1, min(n, 2 * size, self.n_left + 1))
        for ahead in range(n):
            due = self.due.get(self.n_steps + ahead)
            if due:
                spare = len(self.seqs) if ahead >= size else 0
                if ahead and (blocks.window or len(free) < len(due) + spare):
                    return ahead
                del self.due[self.n_steps + ahead]
                self.give_blocks(cache, due)
        return n

    def give_blocks(self, cache, due):
        """Another block, or a copy of a shared one, for the sequences with these numbers."""
        blocks, lengths, size = cache.blocks, self.positions.tolist(), cache.blocks.block_size
        for number in due:
            blocks.length[self.seqs[number]] = lengths[number]  # `add_decoded` sets those of the others
            if blocks.window:
                blocks.free_passed(self.seqs[number])
        for number in due:
            seq = self.seqs[number]
            if blocks.window or seq not in blocks.runs:
                self.metadata.runs[number] = cache.extended(seq, 1)
            else:  # the same, sooner
                runs, limit = blocks.runs[seq]
                runs.append(limit, blocks.append_block(seq) * size, size)
                blocks.runs[seq] = runs, limit + size
            n_left = blocks.runs[seq][1] - lengths[number]
            self.due.setdefault(self.n_steps + n_left, []).append(number)
