"""Ctrl-C at any line or call, for tests of what an interrupted operation leaves."""
import signal
import sys


def interrupted(work, n, is_traced):
    """
    Run work, and send SIGINT to this process at the n-th event in functions for whose code object is_traced(code) is
    true. An event is a line, or the beginning of a call. Returns whether a KeyboardInterrupt came: False if work has
    fewer events.
    """
    left = [n]

    def trace(frame, event, arg):
        if not is_traced(frame.f_code):
            return None
        if event in ('line', 'call'):
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.settrace(trace)
    try:
        work()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGINT, before)
