"""
The caches of kvcache/ on the compiled step, in parts.

    python bench.py --mode=caches
    python bench.py --mode=caches --only=steps,joining --json=out-bench/caches.json

    steps           a decode step through each cache, over the step on the decoder's tuples
    joining         sequences of different lengths that begin and end, over the PyTorch pages
    kv_types        a step with a long context, with keys and values in 32, 16 and 8 bits
    rolling         a model with a window far past its block_size, over no cache
    kinds           a step of models with other positions and heads, over the step of the learned model
    requests        many requests in each cache and in each number of bits
    sharing         what the pages of several sequences share

Each part is a module with `MINUTES`, the time it takes with its own settings on two cores, and
`run(names, batches, contexts, bias, repeats)`, which prints a table and returns its rows for JSON. names, batches and
contexts: the shapes, the sequences at once and the tokens before the first step that is timed; None for its own.
What is compared takes turns in one run, see benchmarks/rounds.py: a figure is the median of `repeats` rounds, and a
ratio the median of the ratios within each round.
"""
from benchmarks.caches import joining, kinds, kv_types, requests, rolling, sharing, steps

PARTS = dict(steps=steps, joining=joining, kv_types=kv_types, rolling=rolling, kinds=kinds, requests=requests,
             sharing=sharing)
