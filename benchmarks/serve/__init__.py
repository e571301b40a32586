"""
Our server and llama-server under load, with the same weights, on one machine.

    python bench.py --mode=serve --llama_server=PATH
    python bench.py --mode=serve --only=closed,prefix --shape=S,M --repeats=3 --json=out-bench/serve.json

    closed          1, 4, 16 and 64 clients, each of which waits for its answer: a part
    arrivals        requests at the times and of the lengths of a real trace, at 80 % of the capacity: a part
    prefix          prompts with 0, 50 and 90 % in common: a part
    faults          clients that go away or read slowly: a part
    soak            10,000 requests, of which 500 are compared with the same requests alone: a part
    engine_alone    the engine without a server, over the kernel: a part
    draws           drawing tokens from logits, beside PyTorch: a part

    loads           the first four of these
    soak, alone     the others
    workloads       what clients ask for: lengths, prefixes, the trace
    client          many clients in one process: closed and open loops, and their figures
    servers         ours and llama-server, as processes

`--batches` are clients at once, `--requests` is how many each load has. Without llama-server only ours is measured. All
answers are streams of greedy tokens, and end after max_tokens.
"""
import signal
import statistics
import sys

import configurator
from benchmarks.harness import Panel
from benchmarks.serve import alone, loads, soak
from benchmarks.serve.servers import missing, version

CPU_ONLY, PICTURE = "the servers are compared", 'serve.png'
PARTS = loads.PARTS | soak.PARTS | alone.PARTS
COLOURS = {'ours': 'C0', 'llama-server': '0.5'}


def check(asked):
    """Returns what is written beside the rows. ValueError for lengths."""
    configurator.check_installation(('starlette', 'uvicorn', 'pydantic', 'orjson', 'prometheus_client'),
                                    "pip install -r requirements-serve.txt")
    if asked.lengths:
        raise ValueError("each part of serve mode has lengths of its own: leave lengths at auto")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended too
    if why := missing(asked.llama_server):
        print(f"not compared: llama-server ({why})")
        return dict(bias=asked.bias, missing={'llama-server': why})
    return dict(bias=asked.bias, versions={'llama-server': version(asked.llama_server)})


def picture(figures, machine):
    """A line of panels for each part that was measured on this machine, a column for each shape."""
    parts = {part: figures[part]['rows'] for part in ('closed', 'arrivals', 'prefix')
             if figures.get(part, {}).get('machine') == machine}
    shapes = list(dict.fromkeys(row['shape'] for rows in parts.values() for row in rows))
    panels = []
    for part, rows in parts.items():
        for shape in shapes:
            mine = [row for row in rows if row['shape'] == shape]
            panels.append((rates if part == 'closed' else times_to_first)(f'{shape}: {part}', mine) if mine else None)
    return panels and dict(panels=panels, columns=len(shapes), size=(6, 3.2), title=machine)


def rates(title, rows):
    """Tokens a second by the number of clients."""
    lines, counts = [], sorted({row['clients'] for row in rows})
    for server, weights in dict.fromkeys((row['server'], row['weights']) for row in rows):
        mine = [row for row in rows if (row['server'], row['weights']) == (server, weights)]
        how = dict(color=COLOURS[server], marker='o', ms=4, ls='-' if weights == 'float32' else '--')
        xs, ys = zip(*((row['clients'], row['tok_per_s']) for row in mine))
        lines.append((xs, ys, f'{server}, {weights}', how))
    most = 1.3 * max(row['tok_per_s'] for row in rows)  # room for the legend above the lines
    return Panel(title, lines, axes=dict(xscale='log', xticks=counts, xlabel='clients', ylabel='tokens/s',
                                         ylim=(0, most)))


def times_to_first(title, rows):
    """p50 and p99 of the requests of all rounds. The p99 of arrivals is the median of those of the rounds."""
    bars = []
    for row in rows:
        p50, p99 = row['ttft_ms']
        if 'p99_ttft_s' in row:
            p99 = 1e3 * statistics.median(v or 0 for v in row['p99_ttft_s'])
        of = f"{row['server']}, {row['weights']}, {row['case']}"
        bars += [(of, p50 or 0, f'p50 {p50 or 0:,.0f}', COLOURS[row['server']]),
                 ('', p99 or 0, f'p99 {p99 or 0:,.0f}', '0.8')]
    return Panel(title, bars=bars, axes=dict(xlabel='milliseconds to the first token'))
