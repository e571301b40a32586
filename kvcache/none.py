"""The pool of generation without a cache: it keeps nothing, so each step computes whole sequences."""


class NoPool:
    """
    It has the operations of `pages.PagePool` but `fork`, and always room. n_computed of a sequence stays 0.
    most_sequences: of a step.
    """
    page_size, n_slots, window, n_free, most_sequences, copies = 0, 0, 0, 2**62, 2**20, []

    def begin(self, sequence, tokens=(), salt=''):
        sequence.n_computed, sequence.runs = 0, None
        return 0

    def extend(self, sequence, n):
        return True

    def will_grow(self, sequence):
        return False

    def computed(self, sequence, n):
        """Nothing is kept."""

    def cut(self, sequence, n):
        return 0

    def free(self, sequence):
        """Nothing is kept."""

    def reset(self):
        """Nothing is kept."""
