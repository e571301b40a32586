"""
Two closed loops. In the first all clients read their answers. In the second 30 % of the clients go away, and 10 % read
slowly.

    python bench.py --mode=serve --only=faults --shape=S --llama_server=PATH

The figures are of the clients that read their whole answer at once. After both loops all blocks of our pool must be
free.
"""
import time
from dataclasses import replace

from benchmarks.serve import report
from benchmarks.serve.client import closed_loop
from benchmarks.serve.race import beside, described, models, take_turns
from benchmarks.serve.servers import Ours
from benchmarks.serve.workloads import longest, mixed, with_faults

MINUTES = 6
NAMES, CLIENTS = ('S', 'M'), (16,)
EACH = 8        # requests of a client
PATIENCE = 5.0  # seconds after which blocks that are in use are lost


def run(names, clients, bias, repeats, llama_server, n_requests):
    rows = []
    print(f"\nclients that go away or read slowly\n{report.HEAD}")
    for name, config, folder, weights in models(names or NAMES, bias):
        most = longest(mixed(config, 1000, 0))
        for C in clients or CLIENTS:
            with (Ours(folder, weights, C * most) as ours,
                  beside(ours, llama_server, config, folder, weights, C, most) as servers):
                rows += race(name, config, weights, servers, C, n_requests, repeats)
    return rows


def race(name, config, weights, servers, C, n_requests, repeats):
    """A row for each server, with faults and without. blocks_used: of our pool, after all rounds."""
    n = n_requests or EACH * C

    def way(server, faults):
        async def load(round_):
            asks = mixed(config, n, 2 * round_ + faults)
            whole = await closed_loop(server, with_faults(asks, round_) if faults else asks, C)
            return replace(whole, answers=[a for a in whole.answers if not a.ask.slow])
        return load
    loads = take_turns({(server, faults): way(server, faults) for server in servers for faults in (False, True)},
                       repeats, f'{name}, {weights}: faults')
    used = blocks_left(servers[0])
    rows = [dict(described(name, server, weights), clients=C, faults=faults, **report.figures(mine),
                 blocks_used=used if server is servers[0] else None) for (server, faults), mine in loads.items()]
    for row in rows:
        print(report.line(row, f"{name}, {'faults' if row['faults'] else 'none'}"), flush=True)
    print(f"blocks in use after all that: {used}{' LOST' * bool(used)}")
    return rows


def blocks_left(ours):
    """Blocks of our server's pool that are in use, without a request, once it has had time to free them."""
    deadline = time.monotonic() + PATIENCE
    while (used := int(ours.metric('blocks_used'))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return used
