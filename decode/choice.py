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
    way: of the next step, (threads, how many bytes ahead weights are prefetched). is_trial: is this way timed for the
    first time in a round? Steps are recorded one by one then. `record` is told how long a step took.

    candidates: the ways to choose from, beginning with the first guess. best: the way in use between rounds.
    """

    def __init__(self, candidates):
        self.candidates, self.best, self.ended = candidates, candidates[0], -math.inf
        self.begin()

    def begin(self):
        rounds = self.choose()
        next(rounds)
        self.rounds = rounds

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
        if not is_first:
            try:
                self.rounds.send((ns, n_steps))
            except StopIteration:  # an interrupt has ended it
                self.begin()

    def choose(self):
        """Rounds, and what is between them: a generator that sets `way`, and is sent (ns, n_steps) of what was made."""
        if len(self.candidates) == 1:
            yield from self.timed(self.best, math.inf)
        interval, challenger = SOONEST, None
        while True:
            trials, spent = {}, []
            for way in sorted(self.candidates, key=lambda way: way != self.best):
                shortest = min(trials.values(), default=math.inf)
                ns, n_steps, least = yield from self.timed(way, TRIAL, TOO_SLOW * shortest)
                # the shortest of up to four steps counts: the first step of a new cache waits for memory of the system
                trials[way] = least if n_steps <= 4 else ns / n_steps
                spent.append((ns, n_steps))
            fastest = min(trials, key=trials.get)
            if fastest not in (self.best, challenger):  # two rounds have to agree: one may be disturbed
                challenger = fastest
                continue
            interval, usual = SOONEST if fastest != self.best else min(2 * interval, LATEST), trials[fastest]
            rest = max(interval * WINDOW, REST * sum(ns - n_steps * usual for ns, n_steps in spent))
            self.best, challenger = fastest, None
            while rest >= 0:
                ns, n_steps, _ = yield from self.timed(fastest, WINDOW)
                rest -= ns
                if ns / n_steps > SLOWER * usual:
                    break
                usual += (ns / n_steps - usual) / 4  # steps become slower while the context grows

    def timed(self, way, window, too_slow=math.inf):
        """
        Make steps in a way until they have taken so long. One step is enough if it is too slow, two are otherwise.
        Returns (nanoseconds, steps, the least nanoseconds of a step).
        """
        self.way, self.is_trial, ns, n_steps, least = way, window == TRIAL, 0, 0, math.inf
        while ns < window or n_steps == 1 and least <= too_slow:
            new, n = yield
            ns, n_steps, least = ns + new, n_steps + n, min(least, new / n)
        return ns, n_steps, least
