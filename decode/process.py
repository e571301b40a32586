"""
What can happen to a process in the middle of a step: Ctrl-C, and a fork.

An interrupt waits until the step has ended, so no code has to be correct when it stops at any line. A fork waits for
the compiled or recorded step that runs, so that no child finds one that nobody goes on with.
"""
import _signal  # `signal` without its enums, which take 20 us a call
import os
import threading

SIGINT = 2

step_lock = threading.RLock()  # one compiled or recorded step at a time: a decoder has one set of activations
in_child = []  # functions without arguments, see `after_fork`
main = threading.main_thread().ident
noted = []     # an entry for each SIGINT that has come inside of `uninterrupted`
replaced = []  # the handler in whose place `note` is, if it is


def note(signum, frame):
    noted.append(signum)


class uninterrupted:
    """
    `with uninterrupted() as block:` a SIGINT that comes inside is handled at the end of the block, or of the outermost
    of nested blocks. block.undo: called if the handler raises, unless it is None. A block has no effect in other
    threads than the main one, to which Python delivers no signals, and where SIGINT is ignored or has no handler in
    Python.
    """
    __slots__ = 'before', 'undo'

    def __enter__(self):
        self.before = self.undo = None
        if threading.get_ident() == main:
            before = _signal.getsignal(SIGINT)
            if before is not note and callable(before):
                self.before, replaced[:] = before, [before]
                noted.clear()  # one that was noted while an earlier block ended has had its effect
                _signal.signal(SIGINT, note)
        return self

    def __exit__(self, *error):
        if self.before is None:
            return
        try:
            _signal.signal(SIGINT, self.before)  # first: the handler may install another one
            if noted:
                noted.clear()
                self.before(SIGINT, None)
        except BaseException:
            if self.undo:
                self.undo()
            raise


def after_fork(function):
    """Call the function in each child of a fork; also a decorator."""
    in_child.append(function)
    return function


def run_in_child():
    global main
    main = threading.get_ident()
    step_lock.release()
    noted.clear()
    if replaced and _signal.getsignal(SIGINT) is note:  # the thread with the block is not in the child
        _signal.signal(SIGINT, replaced[0])
    for function in in_child:
        function()


if hasattr(os, 'register_at_fork'):  # the one hook of this repository
    os.register_at_fork(before=step_lock.acquire, after_in_parent=step_lock.release, after_in_child=run_in_child)
