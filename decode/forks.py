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
    `with step_lock.lock:` one step at a time. In the child of a fork `lock` is a new lock, which is free. A `with`
    block in which the process forked still releases the old lock at its end.
    """

    def __init__(self):
        after_fork(self.renew)
        self.renew()

    def renew(self):
        self.lock = threading.Lock()
