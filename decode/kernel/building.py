"""
This file compiles functions once for a machine and keeps them on disk, also when several processes start at the same
time. It makes C functions too: compiled code calls them by their addresses, so it can be compiled without them.
"""
import atexit
import functools
import hashlib
import itertools
import os
import secrets
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import numba
from filelock import FileLock
from llvmlite import ir
from numba import types
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.runtime import rtsys

from decode.kernel.emit import I64, instruction
from decode.kernel.threads import n_cores

NOTICE = "compiling the decode step for this machine, which takes up to a minute; the next start finds it on disk ..."
LONGEST_WAIT = 300  # seconds for another process that compiles the same; then this one compiles it too
N_ARGUMENTS = 5     # of a `CFunction`
HERE = Path(__file__).parent


def begin_numbers():
    """
    numba numbers the functions that a process compiles, from 1 on, and uses the numbers in the names of machine code.
    Two processes could give the same name to different functions. A process that loads the code of both from disk could
    then run the wrong function. So each process begins at a random number.
    """
    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(48))


begin_numbers()
if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=begin_numbers)


def hash_of(*parts):
    return hashlib.sha256(b''.join(parts)).hexdigest()[:16]


@functools.cache
def sources():
    """The version of numba and a hash of all files of this folder, in bytes."""
    files = [path.read_bytes() for path in sorted(HERE.glob('*.py'))]
    return f'{numba.__version__} {hash_of(*files)}'.encode()


class SharedCache(FunctionCache):
    """
    numba's cache of a function, with separate files for each list of argument types. A file's name has a hash of the
    sources: the function's own file and all files of this folder. So the function is compiled anew after a change in
    any of them, and code that was compiled from other sources is never loaded.
    """

    def __init__(self, function):
        super().__init__(function)
        self.sources = sources() + Path(function.__code__.co_filename).read_bytes()

    def name_for(self, sig):
        return f'{self._impl.filename_base}-{hash_of(self.sources, str(sig).encode())}'

    def file_for(self, sig):
        # numba numbers the files from 1 again when the stamp changes, so the stamp is a constant
        return IndexDataCacheFile(self.cache_path, self.name_for(sig), source_stamp=None)

    def is_there(self, sig):
        return (Path(self.cache_path) / f'{self.name_for(sig)}.nbi').exists()

    def load_overload(self, sig, target_context):
        self._cache_file = self.file_for(sig)
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():  # numba's own method first loads all that compiling needs: 0.2 s
            loaded = self._load_overload(sig, target_context)
        if loaded is None:
            say(NOTICE)
        return loaded

    def save_overload(self, sig, data):
        self._cache_file = self.file_for(sig)
        try:
            super().save_overload(sig, data)
        except OSError as e:
            say(f"compiled code could not be kept on disk, so the next start compiles it again ({e})")

    @contextmanager
    def lock(self, sig):
        """One process at a time loads, compiles and saves the function for these types."""
        lock = FileLock(Path(self.cache_path) / f'{self.name_for(sig)}.lock')
        with suppress(OSError, NotImplementedError):  # it took too long; no room on the disk; no locks there
            lock.acquire(timeout=LONGEST_WAIT, poll_interval=0.02)
        try:
            yield
        finally:
            lock.release()


def keep_on_disk(function):
    """
    Give a numba function a `SharedCache`: its first use loads its code from disk. If there is none, it compiles the
    function and saves the code; another process that needs the same waits, and loads it then. Returns the function.
    """
    try:
        function._cache = cache = SharedCache(function.__wrapped__)
    except (RuntimeError, OSError):  # numba found no folder that it may write to; the sources are not files
        say("compiled code cannot be kept on disk, so each start compiles it again: NUMBA_CACHE_DIR can name a folder "
            "for it")
        return function
    compile_alone = function.compile

    def compile(*sig):
        with cache.lock(sig):
            return compile_alone(*sig)
    function.compile = compile
    return function


@functools.cache
def say(sentence):
    """Say it on stderr, once in a process."""
    print(sentence, file=sys.stderr, flush=True)


class CFunction:
    """
    A function that takes five int64 and returns an int64, as a C function. At its first use it is compiled, or loaded
    from disk. If it raises, the exception is printed and 0 is returned.

    Compiled code calls it by `address`, see `call_c`; Python by `call`, without Python's lock.
    """

    def __init__(self, function):
        self.function = function

    @functools.cached_property
    def kept(self):
        return keep_on_disk(CFunc(self.function, ((types.int64,) * N_ARGUMENTS, types.int64), locals={}, options={}))

    @functools.cached_property
    def compiled(self):
        self.kept.compile()
        return self.kept

    @property
    def address(self):
        return self.compiled.address

    @functools.cached_property
    def call(self):
        return self.compiled.ctypes


def compile_beside(function, code):
    """
    Start a process that runs `code`, which compiles a `CFunction` and others. Meanwhile this process compiles what it
    needs before that: numba compiles one function of a process at a time. No process is started if the function is on
    disk, or if nothing can be kept there. This process ends the other one when it exits, but not if a signal ends it.
    """
    cache = function.kept._cache
    if n_cores() > 1 and isinstance(cache, SharedCache) and not cache.is_there(function.kept._sig):
        with suppress(OSError):
            # without os._exit Python frees its memory for a second, on a core that this process needs for first steps
            code = f'import os, sys; sys.path.insert(0, {str(HERE.parents[1])!r})\n{code}\nos._exit(0)'
            atexit.register(subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.DEVNULL,
                                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).kill)


@instruction(types.int64)
def call_c(builder, address, a, b, c, d, e):
    """The result of the C function at an address for these arguments"""
    signature = ir.FunctionType(I64, [I64] * N_ARGUMENTS)
    return builder.call(builder.inttoptr(address, signature.as_pointer()), [a, b, c, d, e])
