"""
The number of threads of a step, and whether it prefetches weights, is chosen by timing steps while decoding.

The fastest way depends on the machine, the size of the step and the other processes: two threads decode a small model
2.4 times as fast as one on one machine, more slowly than one on another, and much more slowly beside a busy process.
So a round of short trials times every way, and the fastest is used until the next round. The next round comes soon if
the choice has changed, later and later while it stays the same, and at once when steps become much slower.
"""
import math

TRIAL = 4_000_000    # nanoseconds for which a round times each way; at least two steps
WINDOW = 20_000_000  # nanoseconds of steps whose mean is compared with the usual
SOONEST, LATEST = 16, 128  # windows between two rounds
SLOWER = 1.5         # a window so many times slower than usual starts a round
TOO_SLOW = 2.0       # a way so many times slower than the best of the round is timed for one step only
PAUSE = 20_000_000   # nanoseconds without a step, after which the next one is not counted
REST = 100           # between two rounds, steps take at least so many times what the last round has cost


class StepChoice:
    """
    way: of the next step, (threads, how many bytes ahead weights are prefetched). `record` is told how long that step
    took.

    candidates: the ways to choose from, beginning with the first guess. trials: {way: nanoseconds of a step}, of the
    present round. best: the way in use between rounds. challenger: another way that won the last round.
    """

    def __init__(self, candidates):
        self.candidates, self.best, self.challenger = candidates, candidates[0], None
        self.interval, self.ended = SOONEST, -math.inf
        self.rest = self.usual = 0  # nanoseconds until the next round, and of a step; 0: the next window begins a round
        self.begin_round()

    def begin_round(self):
        self.waiting, self.trials, self.spent = [w for w in self.candidates if w != self.best], {}, []
        self.begin(self.best, TRIAL if self.waiting else WINDOW)

    def begin(self, way, window):
        self.way, self.window, self.steps, self.ns, self.least = way, window, 0, 0, math.inf

    @property
    def is_trial(self):
        """True while a way is timed for the first time in a round: steps are recorded one by one then."""
        return self.way not in self.trials and len(self.candidates) > 1

    def is_first(self, began):
        """Is a step that begins at this time the first of all, or the first after a pause?"""
        return began > self.ended + PAUSE

    def record(self, ns, began=0, n_steps=1, others=0):
        """
        ns: the nanoseconds that n_steps steps took; others: the nanoseconds of other work between the steps; began:
        when they began, on any clock. The first step of all and the first after a pause are not counted: they wait for
        memory, caches and sleeping threads. With began=0 there is no pause before them.
        """
        is_first, self.ended = self.is_first(began), began + ns + others
        if is_first:
            return
        self.steps += n_steps
        self.ns += ns
        self.least = min(self.least, ns / n_steps)
        is_trial, shortest = self.is_trial, min(self.trials.values(), default=math.inf)
        if self.ns >= self.window and (self.steps > 1 or is_trial and self.least > TOO_SLOW * shortest):
            if is_trial:
                self.end_trial()
            else:
                self.end_window()

    def end_trial(self):
        # the shortest of up to four steps counts: the first step of a new cache waits for memory from the system
        self.trials[self.way] = self.least if self.steps <= 4 else self.ns / self.steps
        self.spent.append((self.ns, self.steps))
        if self.waiting:
            return self.begin(self.waiting.pop(0), TRIAL)
        fastest = min(self.trials, key=self.trials.get)
        if fastest not in (self.best, self.challenger):  # two rounds have to agree: one may be disturbed
            self.challenger = fastest
            return self.begin_round()
        self.interval = SOONEST if fastest != self.best else min(2 * self.interval, LATEST)
        self.challenger = None
        self.best, self.usual = fastest, self.trials[fastest]
        cost = sum(ns - steps * self.usual for ns, steps in self.spent)
        self.rest = max(self.interval * WINDOW, REST * cost)
        self.begin(fastest, WINDOW)

    def end_window(self):
        mean, way = self.ns / self.steps, self.way
        if len(self.candidates) > 1:
            self.rest -= self.ns
            if self.rest < 0 or mean > SLOWER * self.usual:
                return self.begin_round()
            self.usual += (mean - self.usual) / 4  # steps become slower while the context grows
        self.begin(way, WINDOW)
