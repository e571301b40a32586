"""Compiled functions on disk, for several processes that compile and load at the same time."""
import itertools
import secrets
from pathlib import Path

from filelock import FileLock
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import FunctionCache

LONGEST_SAVE = 60  # seconds that a process waits for others that save

# numba numbers the functions that a process compiles, from 1 on, and uses the numbers in the names of machine code.
# Two processes could give the same name to different functions. A process that loads the code of both from disk could
# then run the wrong function. So each process begins at a random number.
FunctionIdentity._unique_ids = itertools.count(secrets.randbits(48))


class SharedCache(FunctionCache):
    """
    numba's cache of a function, saved to by one process at a time. A save reads the index of files, adds one and writes
    the index; two at once would give code for different types the same file.
    """

    def save_overload(self, sig, data):
        """Raises OSError where the code cannot be saved."""
        with FileLock(Path(self.cache_path) / 'saving.lock', timeout=LONGEST_SAVE):
            super().save_overload(sig, data)


def keep_on_disk(function):
    """Look for the code of a jitted function on disk before compiling it. RuntimeError: no folder can be written to."""
    function._cache = SharedCache(function.py_func)
