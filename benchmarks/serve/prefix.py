"""
Prompts of half the window whose first 0, 50 or 90 % are common to all, and short answers.

    python bench.py --mode=serve --only=prefix --shape=S --llama_server=PATH

Each round has new prompts, of which every client sends one before the load that is measured: the common part is known.
"""
from functools import partial

from benchmarks.serve import report
from benchmarks.serve.client import closed_loop
from benchmarks.serve.race import beside, described, models, take_turns
from benchmarks.serve.servers import Ours
from benchmarks.serve.workloads import longest, with_prefix

MINUTES = 35
NAMES, CLIENTS, N_NEW = ('S', 'M', 'L'), (8,), 16
SHARES = 0.0, 0.5, 0.9
EACH = {'S': 16, 'M': 8, 'L': 2}  # requests of a client
GOAL = 0.4                        # time to first token with the largest share over that with none


def run(names, clients, bias, repeats, llama_server, n_requests):
    rows = []
    print(f"\nprompts with a common prefix\n{report.HEAD}")
    for name, config, folder, weights in models(names or NAMES, bias):
        for C in clients or CLIENTS:
            most = longest(with_prefix(config, 1, 0, N_NEW, 0))
            # ours also remembers prompts that were answered: twice the tokens, as a server has more memory than load
            with (Ours(folder, weights, 2 * C * most) as ours,
                  beside(ours, llama_server, config, folder, weights, C, most) as servers):
                rows += race(name, config, weights, servers, C, n_requests, repeats)
    return rows


def race(name, config, weights, servers, C, n_requests, repeats):
    """A row for each server and share. ttft_over_none: the median over the rounds of the ratio of the median TTFTs."""
    n = n_requests or EACH[name] * C

    def way(server, share):
        async def load(round_):
            asks = with_prefix(config, C + n, share, N_NEW, seed=1000 * round_ + round(100 * share))
            await closed_loop(server, asks[:C], C)
            return await closed_loop(server, asks[C:], C)
        return load
    loads = take_turns({(server, share): way(server, share) for server in servers for share in SHARES}, repeats,
                       f'{name}, {weights}: prefixes')
    rows = []
    for (server, share), mine in loads.items():
        row = dict(described(name, server, weights), clients=C, share=share, case=f'{share:.0%}',
                   **report.figures(mine),
                   ttft_over_none=report.over(loads, (server, share), (server, SHARES[0]),
                                              partial(report.ttft, p=50)))
        print(report.line(row, f'{name}, {share:.0%}'), flush=True)
        rows.append(row)
    for row in rows:
        if row['share'] == SHARES[-1]:
            print(report.goal_line(f"{row['server']}: TTFT at {row['case']} over that with nothing in common",
                                   row['ttft_over_none'], GOAL if row['server'] == 'ours' else None, at_most=True))
    return rows
