"""
The engine without a server, over the kernel's own rate: what scheduling, drawing and delivering cost.

    python bench.py --mode=serve --only=engine_alone

A round serves many requests at once. After each call of the kernel the benchmark makes the same steps again, one call
for each step, and times them separately. The speed of a machine changes within seconds, and this way both times are
taken at the same speed. Rounds follow each other without a pause: the first call after one is slower, and that would
always be the engine's. All answers have the same number of tokens, so that all requests run until the end.
"""
import gc
import statistics
import time
from dataclasses import replace

import torch

import decode
from benchmarks import rounds
from benchmarks.serve.race import WEIGHTS
from benchmarks.serve.servers import BLOCK
from benchmarks.serve.workloads import MOST, mixed
from benchmarks.shapes import config_of, model_with_varied_text
from decode.kernel.sampling import UNTIL
from serving.engine import Engine
from serving.request import Request, SamplingParams

MINUTES = 6
NAMES, BATCHES = ('S', 'M', 'L'), (32,)
N_NEW = MOST // 2
GOALS = {'S': 0.80, 'M': 0.95, 'L': 0.95}
ENGINE, KERNEL = 'engine', 'kernel'


def run(names, batches, bias, repeats, llama_server, n_requests):
    rows = []
    print("\nthe engine alone, over the kernel on the same batches")
    for name in names or NAMES:
        model = model_with_varied_text(config_of(name, bias))
        for weights in WEIGHTS:
            decoder = decode.best(model, 1, weights)
            for B in batches or BATCHES:
                row = race(name, model, decoder, weights, B, repeats)
                print(line(row), flush=True)
                rows.append(row)
    return rows


def line(row):
    return (f"{row['shape']}, {row['weights']}, {row['requests']} requests: {row['tok_per_s']:,.0f} tok/s, the kernel "
            f"{row['kernel_tok_per_s']:,.0f};{rounds.line(row['of_kernel'], row['goal'])}")


def race(name, model, decoder, weights, B, repeats):
    """A row. of_kernel: the median over the rounds of the kernel's time over the engine's."""
    n_blocks = B * -(-MOST // BLOCK)
    engine = Engine(model, decoder, [b' '] * model.config.vocab_size, n_blocks=n_blocks, page_size=BLOCK)
    gc.collect()
    gc.freeze()  # as `loading.load_for_process`
    n_tokens, seconds = [], {ENGINE: [], KERNEL: []}
    for round_ in range(repeats + 1):
        asks = [ask._replace(n_new=N_NEW) for ask in mixed(model.config, B, round_)]
        taken, again, n = serve(engine, decoder, asks)
        if round_:
            seconds[ENGINE].append(taken)
            seconds[KERNEL].append(again)
            n_tokens.append(n)
    rates = {way: statistics.median(n / t for n, t in zip(n_tokens, of_way)) for way, of_way in seconds.items()}
    return dict(shape=name, weights=weights, requests=B, new_tokens=N_NEW,
                tok_per_s=rates[ENGINE], kernel_tok_per_s=rates[KERNEL],
                of_kernel=rounds.ratio(seconds, KERNEL, ENGINE), goal=GOALS.get(name), runs_s=seconds)


def serve(engine, decoder, asks):
    """
    Serve all requests at once in this thread, as the engine's own thread does it. Returns (seconds of the engine,
    seconds of the kernel for the same steps, number of generated tokens). ValueError if the cache does not use the
    decoder's compiled step.
    """
    if engine.cache.kernel is None:
        raise ValueError("this part needs the compiled step, which needs numba: pip install numba")
    outputs, compiled = [], engine.cache.kernel
    for i, ask in enumerate(asks):
        engine.submit(Request(str(i), ask.prompt, ask.n_new, SamplingParams(temperature=0), deliver=outputs.append))
    compiled.decoder = twice = Twice(decoder)
    try:
        with decoder.exclusive_use():
            began = time.perf_counter()
            while engine.run_once():
                pass
            seconds = time.perf_counter() - began
    finally:
        compiled.decoder = decoder
    return seconds - twice.seconds, twice.seconds, sum(len(output.token_ids) for some in outputs for output in some)


class Twice:
    """A decoder whose `execute_model` makes each step twice. seconds: the time of the second ones."""

    def __init__(self, decoder):
        self.decoder, self.seconds = decoder, 0.0

    def execute_model(self, ids, positions, arrays, metadata):
        several = metadata.next_tokens
        first = several.n_drawn if several else 0
        logits = self.decoder.execute_model(ids, positions, arrays, metadata)
        calls = [(ids, positions, arrays, metadata)]
        if several:
            rows, alone = several.tokens[first:max(first + 1, several.n_drawn)], replace(metadata, next_tokens=None)
            calls = [(torch.from_numpy(row), positions + i, arrays, alone) for i, row in enumerate(rows)]
        began = time.perf_counter()
        for call in calls:
            self.decoder.execute_model(*call)
        seconds = time.perf_counter() - began
        if several:  # the time until the engine delivers does not count the second steps
            several.data[UNTIL] += int(1e9 * seconds)
        self.seconds += seconds
        return logits
