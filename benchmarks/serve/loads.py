"""
Loads of our server and llama-server, in turns.

    python bench.py --mode=serve --only=closed --shape=S --batches=16,64 --llama_server=PATH

    closed      so many clients, each of which sends its next request when it has its answer; prompts have 16 to 48
                tokens and answers 26 to 77, all different
    arrivals    requests come at the times and with the lengths of a real trace, whatever has been answered
    prefix      prompts of half the window whose first 0, 50 or 90 % are common to all, and short answers
    faults      closed loops: in the first all clients read their answers, in the second 30 % of them go away and 10 %
                read slowly

Each is a function of (shape, config, weights, servers, number of clients, number of requests or 0 for its own,
repeats), which returns rows. servers: ours, and llama-server if it is there.
"""
import asyncio
import math
import statistics
from dataclasses import replace
from functools import partial

from benchmarks.harness import Case, Part, take_turns
from benchmarks.serve.client import closed_loop, figures, open_loop, over, ttft
from benchmarks.serve.servers import Ours, beside, blocks_left, models
from benchmarks.serve.workloads import from_trace, longest, mixed, trace, with_faults, with_prefix

EACH, FEWEST = {'S': 16, 'M': 4, 'L': 2}, 4  # requests of a client, and of all at least
SHARES, N_NEW = (0.0, 0.5, 0.9), 16  # of prefix: the common part of the prompts, and tokens of the answers
# of arrivals
LOAD = 0.8               # of a server's capacity, that requests come at
ENOUGH = 5.0             # seconds of the closed loop that measures the capacity, about
SECONDS = 20.0           # of an open loop, about
REQUESTS = 50, 2000      # of an open loop, at least and at most


def case_of(name, server, weights, load, setup=None, **labels):
    """A `Case` whose result is the `Load` of a coroutine: load(what setup has returned for a round)."""
    return Case(dict(shape=name, server=server.name, weights=weights, threads=server.threads, **labels),
                lambda given: asyncio.run(load(given)), setup)


def closed(name, config, weights, servers, C, n_requests, repeats):
    """over_llama: the median over the rounds of our tokens/s over those of llama-server."""
    n = n_requests or max(FEWEST, EACH[name] * C)

    def setup(round_):  # other prompts for each number of clients and round: ours would remember them
        return mixed(config, n if round_ else C, seed=1000 * C + round_)
    measured = take_turns([case_of(name, server, weights, partial(closed_loop, server, n_clients=C), setup, clients=C)
                           for server in servers], repeats, f'{name}, {weights}: {C} clients')
    rows = [m.case.labels | figures(m.results) for m in measured]
    rows[0]['over_llama'] = over(*measured) if len(measured) > 1 else None
    return rows


def prefix(name, config, weights, servers, C, n_requests, repeats):
    """
    Each round has new prompts, of which every client sends one before the load that is measured: the common part is
    known. ttft_over_none: the median over the rounds of the ratio of the median times to the first token.
    """
    n = n_requests or max(FEWEST, EACH[name] * C)

    def begin(server, share, round_):
        asks = with_prefix(config, C + n, share, N_NEW, seed=1000 * round_ + round(100 * share))
        asyncio.run(closed_loop(server, asks[:C], C))
        return asks[C:]
    cases = [case_of(name, server, weights, partial(closed_loop, server, n_clients=C), partial(begin, server, share),
                     clients=C, share=share, case=f'{share:.0%}') for server in servers for share in SHARES]
    measured = take_turns(cases, repeats, f'{name}, {weights}: prefixes')
    none = {m.case.labels['server']: m for m in measured if not m.case.labels['share']}
    return [m.case.labels | figures(m.results) | dict(
        ttft_over_none=over(m, none[m.case.labels['server']], partial(ttft, p=50))) for m in measured]


def faults(name, config, weights, servers, C, n_requests, repeats):
    """
    The figures are of the clients that read their whole answer at once. blocks_used: of our pool, after all rounds:
    more than 0 are lost.
    """
    n = n_requests or 8 * C

    def setup(faulty, round_):
        asks = mixed(config, n, 2 * round_ + faulty)
        return with_faults(asks, round_) if faulty else asks

    async def load(server, asks):
        whole = await closed_loop(server, asks, C)
        return replace(whole, answers=[a for a in whole.answers if not a.ask.slow])
    cases = [case_of(name, server, weights, partial(load, server), partial(setup, faulty), clients=C, faults=faulty)
             for server in servers for faulty in (False, True)]
    measured = take_turns(cases, repeats, f'{name}, {weights}: faults')
    used = {servers[0].name: blocks_left(servers[0])}
    return [m.case.labels | figures(m.results) | dict(blocks_used=used.get(m.case.labels['server'])) for m in measured]


async def capacity(server, config, requests, n_clients, n_requests, part, seed):
    """
    Requests a second of a closed loop: of n_requests, or of as many as take about ENOUGH. part: of the trace, the one
    that the open loop has, since some parts have longer prompts than others.
    """
    n = n_requests or 2 * n_clients
    load = await closed_loop(server, from_trace(config, requests, n, part, seed)[0], n_clients)
    if not n_requests and load.seconds < ENOUGH:
        n = max(n, math.ceil(n / load.seconds * ENOUGH))
        load = await closed_loop(server, from_trace(config, requests, n, part, seed + 1)[0], n_clients)
    return n / load.seconds


def arrivals(name, config, weights, servers, n_clients, n_requests, repeats):
    """
    Times are scaled so that requests come at LOAD of a server's capacity, which is the rate of a closed loop with
    requests of the same trace. It is measured before each open loop, since the speed of a machine with neighbours
    changes within minutes. Each server gets LOAD of its own capacity, and ours also LOAD of llama-server's.

    capacities: requests a second, measured before each round. rate: LOAD of their median. p99_ttft_s: the 99th
    percentile of the time to the first token in each round. p99_over_llama: the median over the rounds of ours over
    llama-server's at LOAD of its own capacity. (A percentile over all rounds would be that of the round in which the
    machine was slowest, because the queue grows there.)
    """
    (source, requests), ours = trace(), servers[0]
    at = [(server, server) for server in servers] + [(ours, of) for of in servers[1:]]
    capacities = {pair: [] for pair in at}

    def setup(pair, seed, round_):
        """Each round has another part of the trace. No other case has its seed: a server remembers prompts."""
        measured = asyncio.run(capacity(pair[1], config, requests, n_clients, n_requests, round_, seed + 10 * round_))
        if round_:  # round 0 is not counted
            capacities[pair].append(measured)
        rate, (fewest, most) = LOAD * measured, REQUESTS
        n = n_requests or int(min(most, max(fewest, rate * SECONDS if round_ else 0)))
        asks, times = from_trace(config, requests, n, round_, seed + 10 * round_ + 2)
        return asks, [t / rate for t in times]
    cases = [case_of(name, pair[0], weights, lambda given, server=pair[0]: open_loop(server, *given),
                     partial(setup, pair, 10**6 * number), trace=source,
                     case='its capacity' if pair[0] is pair[1] else f"{pair[1].name}'s")
             for number, pair in enumerate(at)]
    measured = take_turns(cases, repeats, f'{name}, {weights}: arrivals')
    p99, rows = partial(ttft, p=99), []
    for m, pair in zip(measured, at):
        rows.append(m.case.labels | dict(capacities=capacities[pair], rate=LOAD * statistics.median(capacities[pair]))
                    | figures(m.results) | dict(p99_ttft_s=[p99(load) for load in m.results]))
        if pair[0] is ours and len(servers) > 1:
            rows[-1]['p99_over_llama'] = over(m, measured[1], p99)
    return rows


def part(load, minutes, title, figure, shapes, clients, longest_of, room=1):
    """
    The `Part` of a load, for these shapes and numbers of clients. figure: the last one of its tables.
    longest_of(config): tokens of the longest request with its answer. room: how many of these our pool has for each
    client.
    """
    def rows(asked):
        for name, config, folder, weights in models(asked.shapes or shapes, asked.bias):
            for C in asked.batches or clients:
                most = longest_of(config)
                with (Ours(folder, weights, room * C * most) as ours,
                      beside(ours, asked.llama_server, config, folder, weights, C, most) as servers):
                    yield load(name, config, weights, servers, C, asked.requests, asked.repeats)
    names = ('server weights threads shape clients case faults rate tok_per_s requests_per_s goodput ttft_ms '
             'per_token_ms end_to_end_ms client_cpu failed error ')
    return Part(rows, minutes, title, names + figure)


def longest_mixed(config):
    return longest(mixed(config, 1000, 0))


PARTS = dict(
    closed=part(closed, 45, "closed loops", 'over_llama', 'SML', (1, 4, 16, 64), longest_mixed),
    arrivals=part(arrivals, 50, f"arrivals at {LOAD:.0%} of the capacity", 'p99_over_llama', 'SML', (32,),
                  lambda config: config.block_size),
    # ours also remembers prompts that were answered: twice the tokens, as a server has more memory than load
    prefix=part(prefix, 35, "prompts with a common prefix", 'ttft_over_none', 'SML', (8,),
                lambda config: longest(with_prefix(config, 1, 0, N_NEW, 0)), room=2),
    faults=part(faults, 6, "clients that go away or read slowly", 'blocks_used', 'SM', (16,), longest_mixed),
)
