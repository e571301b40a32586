"""
For objects that threads share, caches and models: a lock with recovery when an exception or an interrupt ends an
operation early, and eval mode for as long as any thread needs it.
"""
import functools
import os
import threading
import weakref
from contextlib import contextmanager, suppress

import torch

instances = weakref.WeakSet()
mode_lock = threading.RLock()
evaluated = weakref.WeakKeyDictionary()  # {model: (the uses of `evaluating`, the modules to restore after the last)}


class Exclusive:
    """
    Methods marked with `exclusive` run one at a time, whichever threads call them. They must not call each other.

    n_operations: how many have begun so far.

    If one raises, or a KeyboardInterrupt ends it at any line, `recover` is called. `recover` must make the object
    consistent from any intermediate state. If `recover` is interrupted too, it runs again before the next operation.
    """

    def __init__(self):
        self.lock, self.holder, self.unfinished, self.n_operations = threading.Lock(), None, False, 0
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
                self.unfinished, self.n_operations = True, self.n_operations + 1
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


class Use:
    """One use of `evaluating`. Only its frame refers to it, so an interrupted use leaves the WeakSet with its frame."""


@contextmanager
def evaluating(model):
    """
    Eval mode inside; afterwards every module is back in its own mode.

    Several threads can be inside for one model: the modules go back to training mode when the last one leaves.
    """
    use = Use()
    try:
        with mode_lock:
            uses, modules = evaluated.setdefault(model, (weakref.WeakSet(), []))
            uses.add(use)
            if model.training:
                modules += [m for m in model.modules() if m.training]
                model.eval()
        yield
    finally:
        with mode_lock:
            uses, modules = evaluated.setdefault(model, (weakref.WeakSet(), []))
            uses.discard(use)
            if not uses:
                for m in modules:
                    m.training = True
                modules.clear()


def free_all(cache, handles):
    """
    Free the sequences in the list `handles`, and empty it. After an interrupt the call may be repeated, if no other
    thread has begun a sequence since: its number could be the one that was freed last.
    """
    while handles:
        with suppress(ValueError):  # an interrupt came after it was freed
            cache.free(handles[-1])
        handles.pop()


def after_fork():
    """
    In the child process only the forking thread exists. Each object gets a new lock, since another thread may have held
    the old one; the next operation recovers what that thread left unfinished. torch computes on one thread, since the
    threads of its pool are gone and waiting for them would never end.
    """
    global mode_lock
    mode_lock = threading.RLock()
    if not instances:
        return
    torch.set_num_threads(1)
    for instance in instances:
        instance.lock, instance.holder = threading.Lock(), None


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=after_fork)
