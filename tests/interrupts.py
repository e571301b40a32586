"""Ctrl-C at any line or call, for tests of what an interrupted operation leaves."""
import linecache
import signal
import sys


def interrupted(work, n, is_traced):
    """
    Run work, and send SIGINT to this process at the n-th event in functions for whose code object is_traced(code) is
    true. An event is a line, or the beginning of a call. Returns whether there was one.

    Lines with a `with` or a `try` are no events: at the end of the block of a `with`, a trace function runs before
    `__exit__`, and Python handles no signal there (https://bugs.python.org/issue29988); a `try` itself does nothing.
    """
    left = [n]

    def trace(frame, event, arg):
        if not is_traced(frame.f_code):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == 'line' and line.startswith(('with ', 'try:')):
            return trace
        left[0] -= event in ('line', 'call')
        if left[0] == 0:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
            return None
        return trace
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.settrace(trace)
    try:
        work()
        return left[0] <= 0
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGINT, before)
