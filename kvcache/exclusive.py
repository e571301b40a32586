"""
One operation at a time, and none left half done: for objects that several threads share, and that an exception can
interrupt anywhere.
"""
import functools
import os
import threading
import weakref

import torch

shared = weakref.WeakSet()


class Exclusive:
    """
    Methods marked with `exclusive` run one at a time, whichever threads call them. They do not call each other.

    Where one of them raises, or a KeyboardInterrupt cuts it short at any place, `recover` is called: it has to make
    the object consistent from any state in between. If that is cut short too it is called again, before the next
    operation.
    """

    def __init__(self):
        self.lock, self.holder, self.unfinished = threading.Lock(), None, False
        shared.add(self)

    def recover(self):
        raise NotImplementedError


def exclusive(method):
    @functools.wraps(method)
    def alone(self, *args, **kwargs):
        if self.lock.locked() and self.holder == threading.get_ident():
            raise ValueError(f"{method.__name__} was called inside an operation on the same cache, which has not finished: "
                             "call it afterwards")
        with self.lock:  # unlike acquire() and try, an interrupt cannot get between
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
    return alone


def after_fork():
    """
    In the child of a fork only the thread that forked exists. So locks that others held are made anew, what they had
    not finished is recovered by the next operation, and torch computes on one thread: its pool would wait for threads
    that are gone.
    """
    if not shared:
        return
    torch.set_num_threads(1)
    for one in shared:
        one.lock, one.holder = threading.Lock(), None


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=after_fork)
