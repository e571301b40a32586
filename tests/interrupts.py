"""A KeyboardInterrupt at any line or call, for tests of what an interrupted operation leaves."""
import sys


def interrupted(work, n, is_traced):
    """
    Run work with a KeyboardInterrupt at the n-th event in functions for whose code object is_traced(code) is true. An
    event is a line, or the beginning of a call. Returns False if work ends before.
    """
    left = [n]

    def trace(frame, event, arg):
        if not is_traced(frame.f_code):
            return None
        if event in ('line', 'call'):
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace
    sys.settrace(trace)
    try:
        work()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
