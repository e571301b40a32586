"""Files that are there whole or not at all, and folders that one process at a time writes to."""
import glob
import os
import secrets
from contextlib import contextmanager

try:
    import fcntl
except ImportError:  # not a POSIX system: no locks, so leftovers of a crash stay, and a folder is not guarded
    fcntl = None


@contextmanager
def replacing(path, mode='wb', **open_args):
    """
    open(path, mode), but written under a temporary name and moved into place at the end: at any moment path is
    the old file or the new one. If writing fails, the old file stays and the temporary one is removed.

    Each writer has a temporary name of its own, so several processes may write the same path: the last one to
    finish wins. What a process that was killed left behind is removed by the next writer of the same path.
    """
    path = os.fspath(path)
    remove_leftovers(path)
    f, tmp = open_temporary(path, mode, open_args)
    try:
        with f:
            yield f
            f.flush()
            os.fsync(f.fileno())
            if fcntl:  # while the lock is held, or another writer could take the file for a leftover
                os.replace(tmp, path)
        if not fcntl:  # Windows moves closed files only
            os.replace(tmp, path)
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)


def open_temporary(path, mode, open_args):
    """(file, name) of a new temporary file beside path, locked for as long as it is open."""
    while True:
        tmp = f"{path}.{secrets.token_hex(6)}.tmp"
        f = open(tmp, mode.replace('w', 'x'), **open_args)
        try:
            if not lock(f.fileno()) or os.path.exists(tmp):
                return f, tmp
        except BlockingIOError:
            pass
        f.close()  # another writer saw it in the moment before it was locked, and removes it as a leftover


def remove_leftovers(path):
    """Remove the temporary files of path that no living process has locked."""
    for tmp in glob.glob(glob.escape(path) + '.' + '[0-9a-f]' * 12 + '.tmp') if fcntl else ():
        try:
            with open(tmp, 'rb') as f:
                if lock(f.fileno()):
                    os.remove(tmp)
        except OSError:  # removed or finished by its writer in between, or held by one
            pass


def lock_folder(folder):
    """
    Take a folder for this process: an open file descriptor, whose lock ends with the process, however it ends.

    None where the system or the file system has no such locks. ValueError if another process has it.
    """
    if not fcntl:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if lock(descriptor):
            return descriptor
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"another process is training in {folder}: wait for it, stop it, or choose another "
                         "--out_dir") from None
    os.close(descriptor)
    return None


def lock(descriptor):
    """flock an open file. False where that is not supported; BlockingIOError if another open file holds the lock."""
    if not fcntl:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        raise
    except OSError:  # some network file systems
        return False
