"""Files that are replaced as a whole or not at all, and folders that are locked for one process."""
import os
import secrets
from contextlib import contextmanager

from filelock import FileLock, Timeout


@contextmanager
def replacing(path, mode='wb', **open_args):
    """
    open(path, mode), but the file is written under a temporary name and renamed to path at the end. So at any moment
    path is the whole old file or the whole new one. If writing fails, the old one stays, and the OSError names path.
    Each writer has a name of its own: of several processes, the one that finishes last wins.
    """
    tmp = f'{os.fspath(path)}.{secrets.token_hex(6)}.tmp'
    try:
        with open(tmp, mode, **open_args) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except OSError as e:
        if e.errno and e.filename in (None, tmp):
            raise OSError(e.errno, e.strerror, os.fspath(path)) from e
        raise
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)


def lock_folder(folder):
    """Lock a folder for this process. Returns the lock, None where there are none. ValueError if another has it."""
    lock = FileLock(os.path.join(folder, '.lock'))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"another process is training in {folder}: wait for it, stop it, or choose another "
                         "--out_dir") from None
    except (OSError, NotImplementedError):  # some network file systems
        return None
    return lock
