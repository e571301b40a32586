"""
How many threads a step takes is chosen by timing, while it decodes.

The fastest number depends on the machine, the size of the step and what else is running: two threads decode a small
model 2.4 times as fast as one on one machine and more slowly on another, and much more slowly beside a busy process.
So steps are timed in windows; the numbers that are not in use are tried for a short window now and then, and the
fastest of late is used.
"""
WINDOW = 20_000_000  # nanoseconds that steps are timed together
TRIAL = 4_000_000    # the same for a number that is only tried
SOONEST, LATEST = 8, 128  # windows between two trials: more and more, while trials change nothing
SLOWER = 1.5         # a window this many times slower than the number was when it was chosen asks for trials at once


class ThreadChoice:
    """
    n: the number of threads for the next step. `record` says how long that step took.

    candidates: the numbers to choose from, the first guess in front.
    """

    def __init__(self, candidates):
        self.candidates, self.n, self.best = candidates, candidates[0], candidates[0]
        self.mean = {}  # nanoseconds a step, of each number that has been timed
        self.untried = candidates[1:]
        self.interval, self.windows, self.expected = SOONEST, 0, None
        self.begin(self.n, TRIAL)

    def begin(self, n, window):
        self.n, self.window, self.steps, self.ns = n, window, 0, 0

    def record(self, ns):
        """The step has taken so many nanoseconds."""
        self.steps += 1
        self.ns += ns
        if self.ns >= self.window and self.steps > 1:
            self.end_window()

    def end_window(self):
        mean = self.ns / self.steps
        if self.n == self.best and self.n in self.mean:
            self.mean[self.n] += (mean - self.mean[self.n]) / 2
        else:
            self.mean[self.n] = mean
        if self.untried:
            return self.begin(self.untried.pop(0), TRIAL)
        fastest = min(self.mean, key=self.mean.get)
        if fastest != self.best or self.expected is None:
            self.best, self.expected, self.interval, self.windows = fastest, self.mean[fastest], SOONEST, 0
        elif self.n != self.best:  # a trial that has changed nothing
            self.interval, self.windows = min(2 * self.interval, LATEST), 0
        self.windows += 1
        slow = self.mean[self.best] > SLOWER * self.expected
        if len(self.candidates) > 1 and (slow or self.windows > self.interval):
            if slow:
                self.interval, self.expected = SOONEST, self.mean[self.best]
            self.windows, self.untried = 0, [n for n in self.candidates if n != self.best]
            return self.begin(self.untried.pop(0), TRIAL)
        self.expected = min(self.expected, self.mean[self.best])
        self.begin(self.best, WINDOW)
