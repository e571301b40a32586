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
    workloads       what clients ask for: lengths, prefixes, the trace
    client          many clients in one process: closed and open loops
    servers         ours and llama-server, as processes
    race            servers loaded in turns
    report          figures of loads, tables, the picture

Each part is a module with `MINUTES` and `run(names, clients, bias, repeats, llama_server, n_requests)`, which prints a
table and returns its rows for JSON. names, clients: shapes, and requests at once; None for its own. llama_server: the
path of its binary; without one only ours is measured. n_requests: of each load; 0 for its own number.
All answers are streams of greedy tokens, and end after max_tokens. What is compared takes turns, in `repeats` rounds.
"""
from benchmarks.serve import arrivals, closed, draws, engine_alone, faults, prefix, soak

PARTS = dict(closed=closed, arrivals=arrivals, prefix=prefix, faults=faults, soak=soak, engine_alone=engine_alone,
             draws=draws)
