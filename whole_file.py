"""Files that are replaced as a whole or not at all, and folders that are locked for one process."""
import glob
import os
import secrets
from contextlib import contextmanager

try:
    import fcntl
except ImportError:  # no POSIX system: files of crashed writers are not removed, and folders are not locked
    fcntl = None


@contextmanager
def replacing(path, mode='wb', **open_args):
    """
    open(path, mode), but the file is written under a temporary name and renamed to path at the end. So at any moment
    path is the whole old file or the whole new one. If writing fails, the old file stays.

    Each writer has a temporary name of its own, so several processes may write the same path; the one that finishes
    last wins. If a process is killed while it writes, the next writer of the same path removes its temporary file.
    """
    path = os.fspath(path)
    remove_leftovers(path)
    f, tmp = open_temporary(path, mode, open_args)
    try:
        with f:
            yield f
            f.flush()
            os.fsync(f.fileno())
            if fcntl:  # the lock must be held: another writer removes temporary files without one
                os.replace(tmp, path)
        if not fcntl:  # Windows renames closed files only
            os.replace(tmp, path)
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)


def open_temporary(path, mode, open_args):
    """(file, name) of a new temporary file beside path. It is locked as long as it is open."""
    while True:
        tmp = f"{path}.{secrets.token_hex(6)}.tmp"
        f = open(tmp, mode.replace('w', 'x'), **open_args)
        try:
            if not lock(f.fileno()) or os.path.exists(tmp):
                return f, tmp
        except BlockingIOError:
            pass
        f.close()  # another writer found it before it was locked and removes it: try another name


def remove_leftovers(path):
    """Remove the temporary files of path that no process has locked."""
    for tmp in glob.glob(glob.escape(path) + '.' + '[0-9a-f]' * 12 + '.tmp') if fcntl else ():
        try:
            with open(tmp, 'rb') as f:
                if lock(f.fileno()):
                    os.remove(tmp)
        except OSError:  # its writer holds the lock, or has removed or renamed it
            pass


def lock_folder(folder):
    """
    Lock a folder for this process. Returns a file descriptor that holds the lock until the process ends, or None if
    the system or the file system does not support such locks. ValueError if another process holds the lock.
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
    """flock an open file. False if that is not supported; BlockingIOError if the lock is held through another file."""
    if not fcntl:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        raise
    except OSError:  # some network file systems
        return False
