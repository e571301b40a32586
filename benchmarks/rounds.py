"""Ways to do the same work, timed in turns: what slows the machine for a while slows all of them."""
import statistics
import time

from tqdm import tqdm

PAUSE = 0.05  # seconds before each way: threads of the one before may still spin


def take_turns(ways, rounds, description):
    """
    {way: seconds of each round}. ways: {way: a function of the number of the round that returns its seconds}.

    Round 0 warms up and is not counted. Every other round goes through the ways backwards, so that no way always runs
    after the same other one.
    """
    seconds = {way: [] for way in ways}
    with tqdm(total=(rounds + 1) * len(ways), desc=description, leave=False, disable=None) as bar:
        for n in range(rounds + 1):
            for way in list(ways) if n % 2 else reversed(ways):
                time.sleep(PAUSE)
                taken = ways[way](n)
                if n:
                    seconds[way].append(taken)
                bar.update()
    return seconds


def ratio(seconds, of, to):
    """The median over the rounds of the time of one way over that of another."""
    return statistics.median(a / b for a, b in zip(seconds[of], seconds[to]))


def line(figure, goal, at_most=False):
    """A ratio as text, with its goal if it has one: it should be at least that, or at most."""
    if goal is None:
        return f"{figure:>8.2f}x"
    met = figure <= goal if at_most else figure >= goal
    return f"{figure:>8.2f}x  goal {'<=' if at_most else '>='} {goal:.2f}{'' if met else '  MISSED'}"
