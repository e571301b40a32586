"""
What the server does in its process, measured without a server.

    python bench.py --mode=serve --only=engine_alone,draws

    engine_alone    the engine over the kernel's own rate: what scheduling, drawing and delivering cost
    draws           drawing the next tokens of a batch, beside `model.sample_token`, PyTorch's way
"""
import gc
import statistics
import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

import decode
from benchmarks.harness import Case, Part, take_turns
from benchmarks.serve.servers import GGUF_TYPES, PAGE_SIZE
from benchmarks.serve.workloads import MOST, mixed
from benchmarks.shapes import config_of, model_of
from decode.kernel.sampling import UNTIL
from model import sample_token
from serving.engine import Engine
from serving.request import Request, SamplingParams
from serving.sampler import Drawing, Sampler

N_NEW = MOST // 2  # tokens of all answers, so that all requests run until the end
SETTINGS = {'greedy': dict(temperature=0.0), 'temperature 1': {}, 'top_k 200': dict(temperature=0.8, top_k=200),
            'top_p 0.9': dict(top_p=0.9)}
LEAST = 0.02       # seconds of draws in a round


def engine_alone(asked):
    for name, B, _ in asked.combinations('SML', (32,)):
        model = model_of(name, asked.bias)
        yield [engine_race(name, model, decode.best(model, 1, weights), weights, B, asked.repeats)
               for weights in GGUF_TYPES]


def engine_race(name, model, decoder, weights, B, repeats):
    """
    A row. A round serves B requests at once. After each call of the kernel the same steps are made again, one call for
    each step, and timed separately: the speed of a machine changes within seconds, and this way both times are taken at
    the same speed. of_kernel: the median over the rounds of the kernel's time over the engine's.
    """
    engine = Engine(model, decoder, [b' '] * model.config.vocab_size, n_blocks=B * -(-MOST // PAGE_SIZE),
                    page_size=PAGE_SIZE)
    gc.collect()
    gc.freeze()  # as `loading.load_engine`

    def asks(round_):
        return [ask._replace(n_new=N_NEW) for ask in mixed(model.config, B, round_)]
    case = Case(dict(shape=name, weights=weights, requests=B, new_tokens=N_NEW),
                lambda asks: serve(engine, decoder, asks), asks)
    m, = take_turns([case], repeats, f'{name}, {weights}: the engine')
    engines, kernels, n_tokens = zip(*m.results)
    return m.row(tok_per_s=statistics.median(n / s for n, s in zip(n_tokens, engines)),
                 kernel_tok_per_s=statistics.median(n / s for n, s in zip(n_tokens, kernels)),
                 of_kernel=statistics.median(k / e for k, e in zip(kernels, engines))) | dict(
        runs_s=dict(engine=engines, kernel=kernels))


def serve(engine, decoder, asks):
    """
    Serve all requests at once in this thread, as the engine's own thread does it. Returns (seconds of the engine,
    seconds of the kernel for the same steps, number of generated tokens). ValueError if the decoder is not the compiled
    step.
    """
    outputs, executor = [], engine.cache.executor
    if executor is not decoder:
        raise ValueError(f"this part measures a compiled step, and the model's decoder is {decoder.name}")
    for i, ask in enumerate(asks):
        engine.submit(Request(str(i), ask.prompt, ask.n_new, SamplingParams(temperature=0), deliver=outputs.append))
    engine.cache.executor = twice = Twice(decoder)
    try:
        with getattr(decoder, 'torch_on_one_thread', nullcontext)():
            began = time.perf_counter()
            while engine.run_once():
                pass
            seconds = time.perf_counter() - began
    finally:
        engine.cache.executor = decoder
    return seconds - twice.seconds, twice.seconds, sum(len(output.token_ids) for some in outputs for output in some)


class Twice:
    """A decoder whose `execute_model` makes each step twice. seconds: the time of the second ones."""

    def __init__(self, decoder):
        self.decoder, self.seconds = decoder, 0.0

    def __getattr__(self, name):
        return getattr(self.decoder, name)

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


def draws(asked):
    """
    Both draw from the same logits, which are normal with a standard deviation of 3: about as spread as those of a
    trained model. The server's draws have a seed for each row; those of PyTorch have one generator for all.
    """
    for name, B, _ in asked.combinations('SL', (32,)):
        V, rows = config_of(name, asked.bias).vocab_size, []
        logits = torch.randn(B, V, generator=torch.Generator().manual_seed(0)) * 3
        sampler, generator, numbers = Sampler(V), torch.Generator().manual_seed(0), np.arange(B)
        for case, how in SETTINGS.items():
            params = SamplingParams(**how)
            drawings = [Drawing(Request(str(i), [0], params=params, seed=i), 0, (), V) for i in range(B)]
            labels = dict(shape=name, vocab_size=V, rows=B, case=case)
            ours, in_torch = take_turns(
                [Case(labels, lambda drawings=drawings: sampler.draw(logits.numpy(), numbers, drawings)),
                 Case(labels, lambda how=how: sample_token(logits, generator=generator, **how).tolist())],
                asked.repeats, f'{name}, {case}', LEAST)
            rows.append(ours.row(ms=1e3 * ours.seconds, torch_ms=1e3 * in_torch.seconds, speedup=in_torch.over(ours))
                        | dict(runs_s=dict(ours=ours.runs, torch=in_torch.runs)))
        yield rows


PARTS = dict(
    engine_alone=Part(engine_alone, 6, "the engine alone, over the kernel on the same batches",
                      'shape weights requests tok_per_s kernel_tok_per_s of_kernel'),
    draws=Part(draws, 1, "drawing the next token of each row of logits",
               'shape rows vocab_size case ms torch_ms speedup'),
)
