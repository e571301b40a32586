"""
How many threads a step takes is chosen by timing, while it decodes.

The fastest number depends on the machine, the size of the step and what else is running: two threads decode a small
model 2.4 times as fast as one on one machine and more slowly on another, and much more slowly beside a busy process.
So every number is timed in a round of short trials, the fastest is used, and rounds come back: soon after a change,
ever more rarely while they change nothing, and at once when steps become much slower.
"""
import math

TRIAL = 4_000_000    # nanoseconds that a number is timed in a round, or two steps
WINDOW = 20_000_000  # nanoseconds between two looks at how long steps take
SOONEST, LATEST = 16, 128  # windows between two rounds
SLOWER = 1.5         # times slower than usual: asks for a round
TOO_SLOW = 2.0       # times slower than the best of a round: one step is enough to see it
PAUSE = 20_000_000  # nanoseconds without a step, after which the next one is not counted
SHARE = 50            # between two rounds at least this many times what the last one has cost


class ThreadChoice:
    """
    n: the number of threads for the next step. `record` says how long that step took.

    candidates: the numbers to choose from, the first guess in front. trials: {number: nanoseconds of a step}, of this
    round.
    """

    def __init__(self, candidates):
        self.candidates, self.best, self.challenger = candidates, candidates[0], None
        self.interval, self.cold, self.ended = SOONEST, True, 0
        self.begin_round()

    def begin_round(self):
        self.waiting, self.trials, self.spent = [n for n in self.candidates if n != self.best], {}, []
        self.begin(self.best, TRIAL if self.waiting else WINDOW)

    def begin(self, n, window):
        self.n, self.window, self.steps, self.ns, self.least = n, window, 0, 0, math.inf

    def record(self, ns, began=0):
        """
        The step has taken so many nanoseconds; began: when, on any clock, or 0. The first of all and the first after
        a pause are not counted: they wait for memory, caches and threads that sleep.
        """
        paused, self.ended = began > self.ended + PAUSE, began + ns
        if self.cold or paused:
            self.cold = False
            return
        self.steps += 1
        self.ns += ns
        self.least = min(self.least, ns)
        if self.ns >= self.window and (self.steps > 1 or self.trials and self.hopeless()):
            if self.n in self.trials or len(self.candidates) == 1:
                self.end_window()
            else:
                self.end_trial()

    def hopeless(self):
        return self.n not in self.trials and self.least > TOO_SLOW * min(self.trials.values())

    def end_trial(self):
        # of a few long steps the shortest counts: a new cache's first one waits for memory from the system
        self.trials[self.n] = self.least if self.steps <= 4 else self.ns / self.steps
        self.spent.append((self.ns, self.steps))
        if self.waiting:
            return self.begin(self.waiting.pop(0), TRIAL)
        fastest = min(self.trials, key=self.trials.get)
        if fastest not in (self.best, self.challenger):  # two rounds have to agree: in one, a hiccup can decide
            self.challenger = fastest
            return self.begin_round()
        self.interval = SOONEST if fastest != self.best else min(2 * self.interval, LATEST)
        self.challenger = None
        self.best, self.usual = fastest, self.trials[fastest]
        cost = sum(ns - steps * self.usual for ns, steps in self.spent)
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
