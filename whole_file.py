"""Files that are there whole or not at all."""
import os
from contextlib import contextmanager


@contextmanager
def replacing(path, mode='wb', **open_args):
    """
    open(path, mode), but written under a temporary name and moved into place at the end: at any moment path is
    the old file or the new one. If writing fails the old one stays, and nothing is left lying about.
    """
    path = os.fspath(path)
    tmp = path + '.tmp'
    try:
        with open(tmp, mode, **open_args) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)
