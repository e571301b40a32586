"""What the clients ask for: lengths, shared prefixes, arrivals. All of it follows from a seed."""
import csv
import math
import os
import random
from datetime import datetime

from benchmarks.serve.client import Ask

TRACE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), '..', 'shared',
                     'data', 'azure_llm_trace', 'conv.csv')
FIT = 0.99                # this part of the trace's requests fits into the window as it is scaled
PROMPT, NEW = 0.25, 0.4   # of the window, the mean lengths of the closed loops; single lengths are 0.5 to 1.5 of these
MOST = 128                # tokens that stand for the window there, if it has more: M and L take too long otherwise
LEAVING, SLOW = 0.3, 0.1  # parts of the clients that go away, and that read slowly


def tokens(rng, config, n):
    return [rng.randrange(config.vocab_size) for _ in range(n)]


def mixed(config, n, seed):
    """n requests of different lengths, each uniform between half and one and a half times its mean."""
    rng, window = random.Random(seed), min(config.block_size, MOST)

    def length(share):
        return max(1, round(window * share * rng.uniform(0.5, 1.5)))
    return [Ask(tokens(rng, config, length(PROMPT)), length(NEW)) for _ in range(n)]


def with_prefix(config, n, share, n_new, seed):
    """n requests with prompts of half the window, whose first part, `share` of them, is common to all."""
    rng, n_prompt = random.Random(seed), config.block_size // 2
    prefix = tokens(rng, config, round(n_prompt * share))
    return [Ask(prefix + tokens(rng, config, n_prompt - len(prefix)), n_new) for _ in range(n)]


def with_faults(asks, seed):
    """The same requests, but LEAVING of the clients go away, each at another time, and SLOW of them read slowly."""
    rng, changed = random.Random(seed), []
    for ask in asks:
        luck = rng.random()
        changed.append(ask._replace(leaves=rng.randrange(4)) if luck < LEAVING else
                       ask._replace(slow=luck < LEAVING + SLOW))
    return changed


def trace():
    """
    (where it is from, [(seconds, tokens of the prompt, tokens of the answer)]) of real requests: the conversations of
    the Azure LLM inference trace of November 2023 (https://github.com/Azure/AzurePublicDataset; Patel et al.,
    Splitwise, ISCA 2024). Where its file is missing, a stand-in: Poisson arrivals, and log-normal lengths with medians
    of 900 and 130 tokens and sigma 1.
    """
    if not os.path.exists(TRACE):
        rng, now, rows = random.Random(0), 0.0, []
        for _ in range(5000):
            now += rng.expovariate(5.0)
            rows.append((now, 1 + int(900 * math.exp(rng.gauss(0, 1))), 1 + int(130 * math.exp(rng.gauss(0, 1)))))
        return 'a stand-in: Poisson arrivals, log-normal lengths', rows
    with open(TRACE, encoding='utf-8') as f:
        rows = [(datetime.fromisoformat(row['TIMESTAMP'][:26]).timestamp(), int(row['ContextTokens']),
                 int(row['GeneratedTokens'])) for row in csv.DictReader(f)]
    return 'Azure LLM inference trace 2023, conversations', [(t - rows[0][0], *lengths) for t, *lengths in rows]


def from_trace(config, rows, n, part, seed):
    """
    (n requests, their n arrivals from 0 on with a mean of one a second). n consecutive rows of a trace, from a place
    that the number `part` chooses; the seed chooses the tokens. All lengths are scaled by one factor, with which FIT of
    all rows fit into the window; longer ones are cut to it.
    """
    rng = random.Random(seed)
    totals, window = sorted(p + g for _, p, g in rows), config.block_size
    factor = window / totals[int(FIT * (len(totals) - 1))]
    first = random.Random(part).randrange(len(rows))  # whatever n is: a longer load begins as a shorter one
    asks, times = [], []
    for i in range(n):
        laps, row = divmod(first + i, len(rows))
        t, n_prompt, n_new = rows[row]
        n_prompt = min(max(1, round(n_prompt * factor)), window - 1)
        asks.append(Ask(tokens(rng, config, n_prompt), min(max(1, round(n_new * factor)), window - n_prompt)))
        times.append(t + laps * rows[-1][0])
    scale = (n - 1) / max(times[-1] - times[0], 1e-9)
    return asks, [(t - times[0]) * scale for t in times]


def longest(asks):
    """Tokens of the longest prompt with its answer."""
    return max(len(ask.prompt) + ask.n_new for ask in asks)
