"""The model's tuples as executors read them."""
import numpy as np

from decode.metadata import InputMetadata, KVArrays, Runs
from positions import sequence_runs


class BoundTuples:
    """The tuples of a cache as an executor reads them: `kv`, its `KVArrays`, and the `runs` of each sequence."""

    def __init__(self, kv_cache, config):
        self.layers, self.kv = [tuple(layer[:2]) for layer in kv_cache], KVArrays.of_tuples(kv_cache)
        self.batch_size, H, n_slots, _ = kv_cache[0][0].shape
        self.bases = [b * H * n_slots for b in range(self.batch_size)]
        self.runs = [Runs(sequence_runs(base, config)) for base in self.bases]
        self.of_ones = InputMetadata([1] * self.batch_size, self.runs)
        self.starts = np.zeros(self.batch_size, np.int64)  # of a ring: the positions for which its runs were made

    def are(self, kv_cache, cache_pos):
        """Are these the tuples that were bound, all at one cache_pos?"""
        if len(kv_cache) != len(self.layers):
            return False
        for layer, (k_cache, v_cache) in zip(kv_cache, self.layers):
            if layer[0] is not k_cache or layer[1] is not v_cache or layer[2] is not cache_pos:
                return False
        return True

    def metadata(self, starts, T, config):
        """
        The `InputMetadata` for T new tokens from positions starts (B,) on. A ring's runs have room for window + 1.
        """
        if config.window:
            passed = starts - self.starts
            if not 0 <= passed.min() <= passed.max() <= config.window + 1 - T:
                self.starts = self.starts * 0 + starts
                self.runs = [Runs(sequence_runs(base, config, start))
                             for base, start in zip(self.bases, self.starts.tolist())]
                self.of_ones = InputMetadata([1] * self.batch_size, self.runs)
        return self.of_ones if T == 1 else InputMetadata([T] * self.batch_size, self.runs)
