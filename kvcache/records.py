"""What the caches know of a sequence: one record each, and nothing about it anywhere else."""


class Record:
    """
    A sequence of a cache.

    handle: the number by which callers name it, never given twice. length: how many of its tokens are in the cache.
    begun: were the weights compared, and remembered blocks searched, for its beginning? salt: see `PagedCache`.
    runs: its `decode.metadata.Runs`, None before they are made. room: the position up to which these have slots that
    may be written.
    """
    __slots__ = 'handle', 'salt', 'length', 'begun', 'runs', 'room'

    def __init__(self, handle, salt=''):
        self.handle, self.salt, self.length, self.begun, self.runs, self.room = handle, salt, 0, False, None, 0


class RowRecord(Record):
    """
    A sequence with a row or a stream of its own.

    row: its number, None while the sequence is empty. reached: the largest number of positions that the row has had; in
    a ring they lie over earlier ones, even if they were cut.
    """
    __slots__ = 'row', 'reached'

    def __init__(self, handle, salt=''):
        super().__init__(handle, salt)
        self.row, self.reached = None, 0


class BlockRecord(Record):
    """
    A sequence in blocks.

    tokens: the ids of its tokens, as many as `length` says. table: its blocks in order, None for those that a window
    has passed; also blocks for later tokens. prefixes: the `blocks.Prefix` of each of its first blocks, as many as can
    be found by their tokens. epoch: `BlockManager.epoch` when it began, or None if its blocks do not hold what was
    computed from its tokens alone: only blocks of the present epoch are remembered.
    """
    __slots__ = 'tokens', 'table', 'prefixes', 'epoch'

    def __init__(self, handle, salt=''):
        super().__init__(handle, salt)
        self.tokens, self.table, self.prefixes, self.epoch = [], [], [], None
