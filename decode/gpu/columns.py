"""Where a step on a GPU finds the slot of a position: the columns of its slot table."""
from typing import NamedTuple

TILE = 64    # keys that attention reads at a time; tiles begin at multiples of it
SPLIT = 128  # keys of one program of attention; splits begin at multiples of it


class Columns(NamedTuple):
    """
    A row of the slot table, int32 (n_columns,), has the slots of one sequence. Position p is in column p. If the model
    has a window, positions before n_sink are in the first columns, and the others take turns in the `ring` columns
    from `sinks` on: p is in column sinks + p % ring. Both are multiples of TILE, so a tile of keys is a piece of the
    row.

    n_splits: how many programs share the keys of a row of the batch, at most; the sinks have one of their own.
    """
    sinks: int
    ring: int
    n_columns: int
    n_splits: int

    @classmethod
    def of(cls, config, most_new):
        """most_new: the most new positions of a sequence that are in the table at the same time."""
        c = config
        if not c.window:
            return cls(0, 0, up_to(c.block_size, SPLIT), -(-c.block_size // SPLIT))
        sinks, ring = up_to(c.n_sink, TILE), up_to(c.window + most_new + TILE, TILE)
        return cls(sinks, ring, sinks + ring, (c.window - 2) // SPLIT + 2 + (c.n_sink > 0))

    def column(self, position, n_sink):
        """Of integers, or integer arrays or tensors."""
        if not self.ring:
            return position
        in_ring = self.sinks + position % self.ring
        return in_ring + (position - in_ring) * (position < n_sink)


def up_to(n, multiple):
    """The next multiple that is at least n."""
    return -(-n // multiple) * multiple
