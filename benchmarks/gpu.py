"""
What the step on a GPU does, on the machine that runs this.

    python bench.py --mode=gpu --json=out-bench/gpu.json
    python bench.py --mode=gpu --only=step --shape=L --dtype=float32

    engine    the engine without HTTP: tokens a second of 1, 32 and 256 requests at once
    step      one token of each of 1, 32 and 256 sequences, beside the other decoders, the same kernels with a vendor's
              matmul, and the time in which the memory is read once
    start     from an empty process to the first answer, graphs included
    http      the server with 32 clients: tokens a second
    soak      2,000 requests of all kinds over HTTP, see serve/soak.py

The models have random weights, in bfloat16 unless --dtype says otherwise.
"""
import asyncio
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace

import torch

import decode
from benchmarks.harness import Case, Panel, Part, take_turns
from benchmarks.serve import soak
from benchmarks.serve.client import closed_loop
from benchmarks.serve.servers import Ours, weights_on_disk
from benchmarks.serve.workloads import longest, mixed
from benchmarks.shapes import cache_bytes, config_of, model_of, random_tokens
from decode.gpu.decoder import GPUDecoder
from device import synchronize
from generation import generate
from kvcache.paged import n_blocks_for
from serving.engine import Engine
from serving.request import Request, SamplingParams

BATCHES, N_STEPS, PICTURE = (1, 32, 256), 64, 'gpu.png'
CLIENTS, REQUESTS = 32, 2000
STARTS = '''
import torch; from benchmarks.shapes import model_of; import decode; from serving.engine import Engine
from serving.request import Request
model = model_of({shape!r}, False).to({device!r}, torch.{dtype})
decoder = decode.best(model, 1)
engine = Engine(model, decoder, [b' '] * model.config.vocab_size, n_blocks=256, type_kv=decoder.type_kv)
decoder.prepare(engine.cache.arrays)
engine.submit(Request('first', [1, 2, 3]))
while engine.run_once(): pass
'''


def check(asked):
    """ValueError unless the device is CUDA."""
    if not asked.device.startswith('cuda'):
        raise ValueError(f"gpu mode measures CUDA, and the device is {asked.device}: use a machine with a GPU")
    return dict(bias=asked.bias, dtype=asked.dtype)


def on_gpu(asked, name):
    return model_of(name, asked.bias).to(asked.device, getattr(torch, asked.dtype))


def engine(asked):
    for name in asked.shapes or ('M', 'L'):
        model, rows = on_gpu(asked, name), []
        for weights in (asked.dtype, 'int8'):
            decoder = GPUDecoder(model, 'int8' if weights == 'int8' else 'float32')
            for B in asked.batches or BATCHES:
                rows.append(engine_row(name, model, decoder, weights, B, asked.repeats))
        yield rows


def engine_row(name, model, decoder, weights, B, repeats):
    """A round serves B requests at once, with prompts of 16 tokens and answers of half a context, drawn at 0.8."""
    config, n_new = model.config, min(256, model.config.block_size // 2)
    made = Engine(model, decoder, [b' '] * config.vocab_size, n_blocks=B * n_blocks_for(config, 16),
                  type_kv=decoder.type_kv, max_num_batched_tokens=2048)
    decoder.prepare(made.cache.arrays)

    def serve():
        for i in range(B):
            made.submit(Request(str(i), random_tokens(model, 16, seed=i).tolist(), n_new,
                                SamplingParams(temperature=0.8, ignore_eos=True), seed=i))
        while made.run_once():
            pass
    m, = take_turns([Case(dict(shape=name, weights=weights, requests=B), serve)], repeats, f'{name}, {weights}, {B}')
    return m.row(tok_per_s=B * n_new / m.seconds)


def step(asked):
    for name in asked.shapes or ('M', 'L', 'qwen0.5b'):
        model = on_gpu(asked, name)
        kernels = GPUDecoder(model)
        not_invariant = GPUDecoder(model, functions=with_vendor_matmul(kernels.functions))
        others = {'eager': decode.EagerDecoder(model), 'CUDA graph of PyTorch': decode.best(model, 1, name='graph')}
        for B in asked.batches or BATCHES:
            cases = [Case(dict(shape=name, batch=B, step='kernels'), drawn(model, kernels, B), per=N_STEPS),
                     Case(dict(shape=name, batch=B, step='kernels, not batch invariant'),
                          drawn(model, not_invariant, B), per=N_STEPS)]
            cases += [Case(dict(shape=name, batch=B, step=of), generated(model, other, B, asked.device), per=N_STEPS)
                      for of, other in others.items() if B < 256 or of != 'eager']
            measured = take_turns(cases, asked.repeats, f'{name}, {B}')
            n_bytes = kernels.packed.nbytes() + cache_bytes(model.config, B, model.lm_head.weight.element_size()) / 2
            floor = n_bytes / copied_per_second(asked.device)
            yield [m.row(us=1e6 * m.seconds, tok_per_s=B / m.seconds, of_floor=floor / m.seconds,
                         over_kernels=m.over(measured[0])) for m in measured]


def with_vendor_matmul(functions):
    """The kernels, with the matmuls that PyTorch calls: their bits depend on the number of rows."""
    from decode.gpu import plain
    return SimpleNamespace(**{name: getattr(functions, name) for name in functions.__all__} | dict(linear=plain.linear))


def drawn(model, decoder, B):
    """A function that makes N_STEPS steps for B sequences, which draw their tokens on the device."""
    made = Engine(model, decoder, [b' '] * model.config.vocab_size, n_blocks=B * n_blocks_for(model.config, 16),
                  type_kv=decoder.type_kv)

    def run():
        for i in range(B):
            made.submit(Request(str(i), [i % 5], N_STEPS + 1, SamplingParams(temperature=0.8), seed=i))
        while made.run_once():
            pass
    return run


def generated(model, decoder, B, device):
    idx = random_tokens(model, B, 1).to(device)

    def run():
        generate(model, idx, N_STEPS + 1, temperature=0.8, use_cache=True, decoder=decoder)
        synchronize(device)
    return run


def copied_per_second(device):
    """Bytes that the device's memory reads a second, by the best of 5 copies."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), float('inf')
    for _ in range(5):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * source.nbytes / best


def start(asked):
    for name in asked.shapes or ('M', 'L'):
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            subprocess.run([sys.executable, '-c', STARTS.format(shape=name, device=asked.device, dtype=asked.dtype)],
                           check=True)
            seconds.append(time.perf_counter() - began)
        yield [dict(shape=name, seconds=statistics.median(seconds), runs_s=seconds)]


def http(asked):
    for name, config, folder in on_disk(asked):
        asks = [ask._replace(n_new=N_STEPS) for ask in mixed(config, REQUESTS, 1)]
        for weights in ('bfloat16', 'float32', 'int8'):
            with Ours(folder, weights, CLIENTS * longest(asks), device=asked.device) as ours:
                case = Case(dict(shape=name, weights=weights, clients=CLIENTS),
                            lambda ours=ours, asks=asks: asyncio.run(closed_loop(ours, asks, CLIENTS)))
                m, = take_turns([case], min(3, asked.repeats), f'{name}, {weights}: {CLIENTS} clients')
            yield [m.row(tok_per_s=N_STEPS * REQUESTS / m.seconds)]


def soaked(asked):
    for name, config, folder in on_disk(asked):
        yield [soak.soak(name, config, folder, 'bfloat16', CLIENTS, REQUESTS, asked.device)]


def on_disk(asked):
    for name in asked.shapes or ('M',):
        with weights_on_disk(model_of(name, asked.bias)) as folder:
            yield name, config_of(name, asked.bias), folder


PARTS = dict(
    engine=Part(engine, 3, "the engine without HTTP", 'shape weights requests tok_per_s'),
    step=Part(step, 4, "one step", 'shape batch step us tok_per_s of_floor over_kernels'),
    start=Part(start, 1, "from the start of a process to the first answer", 'shape seconds'),
    http=Part(http, 1, "the server with clients", 'shape weights clients tok_per_s'),
    soak=soak.PARTS['soak']._replace(rows=soaked, minutes=1),
)


def picture(figures, machine):
    """Tokens a second by requests at once, a panel for each shape."""
    rows = figures.get('engine', {}).get('rows', [])
    panels = []
    for shape in dict.fromkeys(row['shape'] for row in rows):
        lines = []
        for weights in dict.fromkeys(row['weights'] for row in rows):
            mine = [row for row in rows if (row['shape'], row['weights']) == (shape, weights)]
            lines.append(([row['requests'] for row in mine], [row['tok_per_s'] for row in mine], weights, {}))
        panels.append(Panel(f'{shape}: tokens a second', lines=lines, axes=dict(
            xlabel='requests at once', xscale='log', yscale='log')))
    return dict(panels=panels, title=machine) if panels else None
