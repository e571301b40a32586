"""
Open loop: requests come at the times and with the lengths of a real trace, whatever has been answered.

    python bench.py --mode=serve --only=arrivals --shape=S --llama_server=PATH

Times are scaled so that requests come at LOAD of a server's capacity, which is the rate of a closed loop with requests
of the same trace. It is measured before each open loop, since the speed of a machine with neighbours changes within
minutes. Each server gets LOAD of its own capacity, and ours also LOAD of llama-server's.
"""
import math
import statistics
from functools import partial

from benchmarks.serve import report
from benchmarks.serve.client import closed_loop, open_loop
from benchmarks.serve.race import beside, described, models, take_turns
from benchmarks.serve.servers import Ours
from benchmarks.serve.workloads import from_trace, trace

MINUTES = 50
NAMES, CLIENTS = ('S', 'M', 'L'), 32  # clients of the closed loop, and slots of llama-server
LOAD, GOAL = 0.8, 1.0
ENOUGH = 5.0             # seconds of the closed loop, about
SECONDS = 20.0           # of an open loop, about
REQUESTS = 50, 2000      # of an open loop, at least and at most


def run(names, clients, bias, repeats, llama_server, n_requests):
    rows, (source, requests) = [], trace()
    print(f"\narrivals at {LOAD:.0%} of the capacity: {source}\n{report.HEAD}")
    for name, config, folder, weights in models(names or NAMES, bias):
        n_slots = max(clients or [CLIENTS])
        with (Ours(folder, weights, n_slots * config.block_size) as ours,
              beside(ours, llama_server, config, folder, weights, n_slots, config.block_size) as servers):
            mine = race(name, config, weights, servers, requests, n_slots, n_requests, repeats)
        rows += [dict(row, trace=source) for row in mine]
    return rows


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


def race(name, config, weights, servers, requests, n_clients, n_requests, repeats):
    """
    A row for each server and rate. capacities: requests a second, measured before each round. rate: LOAD of their
    median. p99_ttft_s: the 99th percentile of the TTFT in each round. p99_over_llama: the median over the rounds of
    ours over llama-server's. (A percentile over all rounds would be that of the round in which the machine was slowest,
    because the queue grows there.)
    """
    ours, cases = servers[0], [(server, server) for server in servers] + [(servers[0], of) for of in servers[1:]]
    capacities = {case: [] for case in cases}
    loads = take_turns({case: load_at(*case, config, requests, n_clients, n_requests, 10**6 * number, capacities[case])
                        for number, case in enumerate(cases)}, repeats, f'{name}, {weights}: arrivals')
    p99, rows = partial(report.ttft, p=99), []
    for server, of in cases:
        row = dict(described(name, server, weights), capacities=capacities[server, of],
                   rate=LOAD * statistics.median(capacities[server, of]),
                   case='its capacity' if of is server else f"{of.name}'s", **report.figures(loads[server, of]),
                   p99_ttft_s=[p99(load) for load in loads[server, of]])
        print(report.line(row, f"{name}, {row['rate']:.1f}/s"), flush=True)
        rows.append(row)
        for other in servers[1:] if server is ours else ():
            row['p99_over_llama'] = report.over(loads, (ours, of), (other, other), p99)
            print(report.goal_line(f"p99 TTFT at {LOAD:.0%} of {row['case']}, over llama-server's at {LOAD:.0%} of "
                                   "its own", row['p99_over_llama'], GOAL, at_most=True))
    return rows


def load_at(server, of, config, requests, n_clients, n_requests, seed, capacities):
    """
    A function that loads `server` at LOAD of the capacity of the server `of`, which it measures first and appends to
    capacities. Each round has another part of the trace. seed: of the prompts; no other case may have it, since a
    server remembers prompts.
    """
    async def load(round_):
        measured = await capacity(of, config, requests, n_clients, n_requests, round_, seed + 10 * round_)
        if round_:  # round 0 is not counted
            capacities.append(measured)
        rate, (fewest, most) = LOAD * measured, REQUESTS
        n = n_requests or int(min(most, max(fewest, rate * SECONDS if round_ else 0)))
        asks, times = from_trace(config, requests, n, round_, seed + 10 * round_ + 2)
        return await open_loop(server, asks, [t / rate for t in times])
    return load
