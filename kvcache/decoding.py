"""
Decode steps of the same sequences, one after the other. Most of what such a step must find out, the step before has
found out already.
"""


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
