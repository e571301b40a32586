"""A lock for objects that threads share, with recovery when an exception or an interrupt ends an operation early."""
import functools
import os
import threading
import weakref

import torch

instances = weakref.WeakSet()


class Exclusive:
    """
    Methods marked with `exclusive` run one at a time, whichever threads call them. They must not call each other.

    If one raises, or a KeyboardInterrupt ends it at any line, `recover` is called. `recover` must make the object
    consistent from any intermediate state. If `recover` is interrupted too, it runs again before the next operation.
    """

    def __init__(self):
        self.lock, self.holder, self.unfinished = threading.Lock(), None, False
        instances.add(self)

    def recover(self):
        raise NotImplementedError


def exclusive(method):
    @functools.wraps(method)
    def locked(self, *args, **kwargs):
        if self.lock.locked() and self.holder == threading.get_ident():
            raise ValueError(f"{method.__name__} was called inside an operation on the same cache, which has not "
                             "finished: call it afterwards")
        with self.lock:  # unlike with acquire() and try, an interrupt cannot come between the lock and the block
            self.holder = threading.get_ident()
            try:
                if self.unfinished:
                    self.recover()
                self.unfinished = True
                try:
                    result = method(self, *args, **kwargs)
                except BaseException:
                    self.recover()
                    self.unfinished = False
                    raise
                self.unfinished = False
                return result
            finally:
                self.holder = None
    return locked


def after_fork():
    """
    In the child process only the forking thread exists. Each object gets a new lock, since another thread may have held
    the old one; the next operation recovers what that thread left unfinished. torch computes on one thread, since the
    threads of its pool are gone and waiting for them would never end.
    """
    if not instances:
        return
    torch.set_num_threads(1)
    for instance in instances:
        instance.lock, instance.holder = threading.Lock(), None


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=after_fork)
