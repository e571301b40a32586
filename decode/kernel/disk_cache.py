"""Compiled functions on disk, for several processes that compile and load at the same time."""
import hashlib
import itertools
import secrets
import sys
from pathlib import Path

import numba
from filelock import FileLock
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import FunctionCache, IndexDataCacheFile

from decode.process import after_fork

LONGEST_SAVE = 10  # seconds that a process waits for others that save

complaints = set()  # what has been said on stderr


@after_fork
def begin_numbers():
    """
    numba numbers the functions that a process compiles, from 1 on, and uses the numbers in the names of machine code.
    Two processes could give the same name to different functions. A process that loads the code of both from disk could
    then run the wrong function. So each process begins at a random number.
    """
    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(48))


begin_numbers()


class SharedCache(FunctionCache):
    """
    numba's cache of a function, in files whose names have a hash of the sources: a change in any of them compiles it
    anew, and nothing that was compiled of other sources can be taken for it.

    One process at a time saves: a save reads the index of what is on disk, adds an entry and writes the index, and two
    at once would give code for different types the same file.
    """

    def __init__(self, function, paths):
        super().__init__(function)
        digest = hashlib.sha256(numba.__version__.encode() + b''.join(Path(path).read_bytes() for path in paths))
        name = f'{self._impl.filename_base}-{digest.hexdigest()[:16]}'
        # numba numbers the files from 1 again when the stamp changes, so the stamp is a constant
        self._cache_file = IndexDataCacheFile(self.cache_path, name, source_stamp=None)

    def save_overload(self, sig, data):
        try:
            with FileLock(Path(self.cache_path) / 'saving.lock', timeout=LONGEST_SAVE):
                super().save_overload(sig, data)
        except (OSError, NotImplementedError) as e:  # the second: a file system without locks
            complain(f"compiled code could not be kept on disk, so the next start compiles it again ({e})")


def keep_on_disk(function, *modules):
    """
    Give a numba function a `SharedCache`. The first use of the function loads its code from disk. If there is none, it
    compiles the function and saves the code.

    modules: those with functions that it calls, besides its own.
    """
    python = getattr(function, '__wrapped__', None)
    if python is None:  # NUMBA_DISABLE_JIT
        return
    paths = [python.__code__.co_filename, *(module.__file__ for module in modules)]
    try:
        function._cache = SharedCache(python, paths)
    except (RuntimeError, OSError):  # numba found no folder that it may write to; the sources are not files
        complain("compiled code cannot be kept on disk, so each start compiles it again: NUMBA_CACHE_DIR can name a "
                 "folder for it")


def complain(sentence):
    """Say it on stderr, once in a process."""
    if sentence not in complaints:
        complaints.add(sentence)
        print(sentence, file=sys.stderr)
