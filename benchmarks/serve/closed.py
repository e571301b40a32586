"""
Closed loops: so many clients, each of which sends its next request when it has its answer.

    python bench.py --mode=serve --only=closed --shape=S --batches=16,64 --llama_server=PATH

Prompts have 16 to 48 tokens and answers 26 to 77, all different.
"""
from benchmarks.serve import report
from benchmarks.serve.client import closed_loop
from benchmarks.serve.race import beside, described, models, take_turns
from benchmarks.serve.servers import Ours
from benchmarks.serve.workloads import longest, mixed

MINUTES = 45
NAMES, CLIENTS = ('S', 'M', 'L'), (1, 4, 16, 64)
EACH = {'S': 16, 'M': 4, 'L': 2}  # requests of a client
FEWEST = 4                        # requests of all
GOALS = {'S': 2.0, 'M': 1.5, 'L': 1.3}
FROM = 16  # clients that the goals are for, and more


def run(names, clients, bias, repeats, llama_server, n_requests):
    rows = []
    print(f"\nclosed loops\n{report.HEAD}")
    for name, config, folder, weights in models(names or NAMES, bias):
        counts = clients or CLIENTS
        most = longest(mixed(config, 1000, 0))
        with Ours(folder, weights, max(counts) * most) as ours:
            for C in counts:
                with beside(ours, llama_server, config, folder, weights, C, most) as servers:
                    rows += race(name, config, weights, servers, C, n_requests, repeats)
    return rows


def race(name, config, weights, servers, C, n_requests, repeats):
    """A row for each server. over_llama: the median over the rounds of our tokens/s over those of llama-server."""
    n = n_requests or max(FEWEST, EACH[name] * C)

    def load(server):  # other prompts for each number of clients and round: ours would remember them
        return lambda round_: closed_loop(server, mixed(config, n if round_ else C, seed=1000 * C + round_), C)
    loads = take_turns({server: load(server) for server in servers}, repeats, f'{name}, {weights}: {C} clients')
    rows = [dict(described(name, server, weights), clients=C, **report.figures(mine))
            for server, mine in loads.items()]
    rows[0]['over_llama'] = report.over(loads, servers[0], servers[-1]) if len(servers) > 1 else None
    for row in rows:
        print(report.line(row, f"{name}, {C} client{'s' * (C > 1)}"), flush=True)
    print(report.goal_line("tokens/s over llama-server", rows[0]['over_llama'], GOALS[name] if C >= FROM else None))
    return rows
