"""
How many threads a step takes is chosen by timing, while it decodes.

The fastest number depends on the machine, the size of the step and what else is running: two threads decode a small
model 2.4 times as fast as one on one machine and more slowly on another, and much more slowly beside a busy process.
So every number is timed in a round of short trials, the fastest is used, and rounds come back: soon after a change,
ever more rarely while they change nothing, and at once when steps become much slower.
"""
TRIAL = 4_000_000    # nanoseconds that a number is timed in a round, or two steps
WINDOW = 20_000_000  # nanoseconds between two looks at how long steps take
SOONEST, LATEST = 8, 128  # windows between two rounds
SLOWER = 1.5         # times slower than usual: asks for a round
TOO_SLOW = 2.0       # times slower than the best of a round: one step is enough to see it
SHARE = 20           # between two rounds at least this many times what the last one has cost


class ThreadChoice:
    """
    n: the number of threads for the next step. `record` says how long that step took.

    candidates: the numbers to choose from, the first guess in front.
    """

    def __init__(self, candidates):
        self.candidates, self.best, self.interval = candidates, candidates[0], SOONEST
        self.begin_round()

    def begin_round(self):
        self.waiting, self.trials = [n for n in self.candidates if n != self.best], {}  # trials: {n: (nanoseconds, steps)}
        self.begin(self.best, TRIAL if self.waiting else WINDOW)

    def begin(self, n, window):
        self.n, self.window, self.steps, self.ns = n, window, 0, 0

    def record(self, ns):
        """The step has taken so many nanoseconds."""
        self.steps += 1
        self.ns += ns
        if self.ns >= self.window and (self.steps > 1 or self.trials and self.hopeless()):
            if self.n in self.trials or len(self.candidates) == 1:
                self.end_window()
            else:
                self.end_trial()

    def hopeless(self):
        return self.n not in self.trials and self.ns > TOO_SLOW * min(ns / steps for ns, steps in self.trials.values())

    def end_trial(self):
        self.trials[self.n] = self.ns, self.steps
        if self.waiting:
            return self.begin(self.waiting.pop(0), TRIAL)
        means = {n: ns / steps for n, (ns, steps) in self.trials.items()}
        fastest = min(means, key=means.get)
        self.interval = SOONEST if fastest != self.best else min(2 * self.interval, LATEST)
        self.best, self.usual = fastest, means[fastest]
        cost = sum(ns - steps * self.usual for ns, steps in self.trials.values())
        self.rest = max(self.interval * WINDOW, SHARE * cost)
        self.begin(fastest, WINDOW)

    def end_window(self):
        mean, n = self.ns / self.steps, self.n
        if len(self.candidates) > 1:
            self.rest -= self.ns
            if self.rest < 0 or mean > SLOWER * self.usual:
                return self.begin_round()
            self.usual += (mean - self.usual) / 4  # a context that grows makes steps slower, little by little
        self.begin(n, WINDOW)
