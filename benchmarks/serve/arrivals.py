"""
Open loop: requests come at the times and with the lengths of a real trace, whatever has been answered.

    python bench.py --mode=serve --only=arrivals --shape=S --llama_server=PATH

Times are scaled so that LOAD of what a server can do comes, which is measured first, in a closed loop with requests of
the same trace. Each server gets LOAD of its own capacity, and ours also LOAD of llama-server's.
"""
import asyncio
from functools import partial

from benchmarks.serve import report
from benchmarks.serve.client import closed_loop, open_loop
from benchmarks.serve.race import beside, described, models, take_turns
from benchmarks.serve.servers import Ours
from benchmarks.serve.workloads import from_trace, trace

MINUTES = 50
NAMES, CLIENTS = ('S', 'M', 'L'), 32  # clients of the closed loop, and slots of llama-server
LOAD, GOAL = 0.8, 1.0
ENOUGH = 5.0             # seconds of the closed loop, at least
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


def capacity(server, config, requests, n_clients, n_requests, repeats):
    """
    Requests a second of a closed loop with so many requests of the trace, or as many as take ENOUGH, from the places
    that the open loops of all rounds begin at: some parts of the trace have longer prompts than others.
    """
    n = n_requests or 2 * n_clients
    while True:
        parts = [from_trace(config, requests, -(-n // repeats), part, 10**6 * n + part)[0]
                 for part in range(1, repeats + 1)]
        asks = [ask for some in zip(*parts) for ask in some][:n]
        load = asyncio.run(closed_loop(server, asks, n_clients))
        if n_requests or load.seconds >= ENOUGH:
            return n / load.seconds
        n *= 2


def race(name, config, weights, servers, requests, n_clients, n_requests, repeats):
    """
    A row for each server and rate. p99_ttft_s: the 99th percentile of the TTFT in each round. p99_over_llama: the
    median over the rounds of ours over llama-server's. (A percentile over all rounds would be that of the round in
    which the machine was slowest, because the queue grows there.)
    """
    capacities = {server: capacity(server, config, requests, n_clients, n_requests, repeats)
                  for server in servers}
    ours, cases = servers[0], [(server, server) for server in servers] + [(servers[0], of) for of in servers[1:]]
    loads = take_turns({(server, of): load_at(server, config, requests, LOAD * capacities[of], n_requests, seed)
                        for seed, (server, of) in enumerate(cases)}, repeats, f'{name}, {weights}: arrivals')
    p99, rows = partial(report.ttft, p=99), []
    for server, of in cases:
        row = dict(described(name, server, weights), capacity=capacities[server], rate=LOAD * capacities[of],
                   case='its capacity' if of is server else f"{of.name}'s", **report.figures(loads[server, of]),
                   p99_ttft_s=[p99(load) for load in loads[server, of]])
        print(report.line(row, f"{name}, {row['rate']:.1f}/s"), flush=True)
        rows.append(row)
        for other in servers[1:] if server is ours else ():
            row['p99_over_llama'] = report.over(loads, (ours, of), (other, other), p99)
            print(report.goal_line(f"p99 TTFT at {LOAD:.0%} of {row['case']}, over llama-server's at {LOAD:.0%} of "
                                   "its own", row['p99_over_llama'], GOAL, at_most=True))
    return rows


def load_at(server, config, requests, rate, n_requests, seed):
    """
    A way: the trace at a rate of so many requests a second, another part of it in each round. seed: of the prompts,
    which other ways must not have, because a server would remember them.
    """
    fewest, most = REQUESTS
    n = n_requests or int(min(most, max(fewest, rate * SECONDS)))

    def load(round_):
        asks, times = from_trace(config, requests, n if round_ else min(n, fewest), round_, 1000 * seed + round_)
        return open_loop(server, asks, [t / rate for t in times])
    return load
