"""
Open loop: requests come at the times and with the lengths of a real trace, whatever has been answered.

    python bench.py --mode=serve --only=arrivals --shape=S --llama_server=PATH

Times are scaled so that LOAD of what a server can do comes, which is measured first, in a closed loop with requests of
the same trace. Each server gets LOAD of its own capacity, and ours also LOAD of llama-server's.
"""
import asyncio

from benchmarks.serve import report
from benchmarks.serve.asks import from_trace, trace
from benchmarks.serve.client import closed_loop, open_loop
from benchmarks.serve.race import beside, models, take_turns
from benchmarks.serve.servers import Ours

MINUTES = 60
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
              beside(ours, llama_server, folder, weights, n_slots, config.block_size) as servers):
            mine = race(name, config, weights, servers, requests, n_slots, n_requests, repeats)
        rows += [dict(row, trace=source) for row in mine]
    return rows


def capacity(server, config, requests, n_clients, n_requests):
    """Requests a second of a closed loop with so many requests of the trace, or as many as take ENOUGH."""
    n = n_requests or 2 * n_clients
    while True:
        asks, _ = from_trace(config, requests, n, seed=1000)
        load = asyncio.run(closed_loop(server, asks, n_clients))
        if n_requests or load.seconds >= ENOUGH:
            return n / load.seconds
        n *= 2


def race(name, config, weights, servers, requests, n_clients, n_requests, repeats):
    """A row for each server and rate. p99_over_llama: our 99th percentile of the TTFT over that of llama-server."""
    capacities = {server.name: capacity(server, config, requests, n_clients, n_requests) for server in servers}
    ways, rates = {}, {}
    for server in servers:
        for of in {server.name, *capacities} if server.name == 'ours' else {server.name}:
            rates[server.name, of] = LOAD * capacities[of]
            ways[server.name, of] = load_at(server, config, requests, LOAD * capacities[of], n_requests)
    loads = take_turns(ways, repeats, f'{name}, {weights}: arrivals')
    theirs = 'llama-server', 'llama-server'
    theirs_p99 = report.figures(loads[theirs])['ttft_ms'][1] if theirs in loads else None
    rows = []
    for (server, of), mine in loads.items():
        row = dict(shape=name, server=server, weights=weights, capacity=capacities[server], capacity_of=of,
                   rate=rates[server, of], case='its capacity' if of == server else f"{of}'s", **report.figures(mine))
        row['p99_over_llama'] = row['ttft_ms'][1] / theirs_p99 if theirs_p99 and row['ttft_ms'][1] else None
        print(report.line(row, f"{name}, {row['rate']:.1f}/s"), flush=True)
        if server == 'ours':
            print(report.goal_line(f"p99 TTFT at {LOAD:.0%} of {row['case']}, over llama-server's at {LOAD:.0%} of its "
                                   "own", row['p99_over_llama'], GOAL, at_most=True))
        rows.append(row)
    return rows


def load_at(server, config, requests, rate, n_requests):
    """A way: the trace at a rate of so many requests a second, another part of it in each round."""
    fewest, most = REQUESTS
    n = n_requests or int(min(most, max(fewest, rate * SECONDS)))

    def load(round_):
        asks, times = from_trace(config, requests, n if round_ else min(n, fewest), seed=round_)
        return open_loop(server, asks, [t / rate for t in times])
    return load
