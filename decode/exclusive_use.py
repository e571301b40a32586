"""Which threads are inside `exclusive_use` of a decoder: no other code runs between their steps."""
import threading
from contextlib import contextmanager


class ExclusiveThreads(threading.local):
    """has_this: is the present thread one of them?"""
    has_this = False

    @contextmanager
    def with_this(self):
        """The present thread is one of them inside; afterwards only if it was before."""
        before = self.has_this
        try:
            self.has_this = True
            yield
        finally:
            self.has_this = before
