"""
After os.fork the child has one thread. A lock that another thread of the parent held would stay locked there for ever.
"""
import os
import threading


def after_fork(function):
    """Call the function in each child of a fork, on systems that fork; also a decorator."""
    if hasattr(os, 'register_at_fork'):
        os.register_at_fork(after_in_child=function)
    return function


class StepLock:
    """
    `with step_lock.lock:` one step at a time. In the child of a fork `lock` is another one, which is free; a `with`
    that the fork interrupted releases the one that it acquired.
    """

    def __init__(self):
        after_fork(self.renew)
        self.renew()

    def renew(self):
        self.lock = threading.Lock()
