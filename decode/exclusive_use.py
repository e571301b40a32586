"""Which threads are inside `exclusive_use` of a decoder: no other code runs between their steps."""
import threading
from contextlib import contextmanager


class ExclusiveThreads(threading.local):
    """has_this_thread: is the present thread one of them?"""
    has_this_thread = False

    @contextmanager
    def entered(self):
        """The present thread is one of them inside; afterwards only if it was before."""
        before = self.has_this_thread
        try:
            self.has_this_thread = True
            yield
        finally:
            self.has_this_thread = before
