"""
Drawing the next tokens of a batch, as the server does, beside `model.sample_token`, PyTorch's way.

    python bench.py --mode=serve --only=draws

Both draw from the same logits, which are normal with a standard deviation of 3: about as spread as those of a trained
model. The server's draws have a seed for each row; those of PyTorch have one generator for all.
"""
import statistics
import time

import numpy as np
import torch

from benchmarks import rounds
from benchmarks.shapes import config_of
from model import sample_token
from serving.request import Request, SamplingParams
from serving.sampler import Drawing, Sampler

MINUTES = 1
NAMES, BATCHES = ('S', 'L'), (32,)
SETTINGS = {'greedy': dict(temperature=0.0), 'temperature 1': {}, 'top_k 200': dict(temperature=0.8, top_k=200),
            'top_p 0.9': dict(top_p=0.9)}
LEAST = 0.02  # seconds of draws in a trial
OURS, TORCH = 'ours', 'torch'


def run(names, batches, bias, repeats, llama_server, n_requests):
    rows = []
    print("\ndrawing the next token of each row of logits")
    for name in names or NAMES:
        V = config_of(name, bias).vocab_size
        for B in batches or BATCHES:
            for case, how in SETTINGS.items():
                row = race(name, V, B, case, how, repeats)
                print(line(row), flush=True)
                rows.append(row)
    return rows


def line(row):
    return (f"{row['shape']}, {row['rows']} rows of {row['vocab_size']:,}, {row['case']}: {row['ms']:.3f} ms, "
            f"PyTorch {row['torch_ms']:.3f} ms; {row['speedup']:.1f}x")


def race(name, V, B, case, how, repeats):
    """A row. speedup: the median over the rounds of PyTorch's time over ours."""
    logits = torch.randn(B, V, generator=torch.Generator().manual_seed(0)) * 3
    params, sampler, numbers = SamplingParams(**how), Sampler(V), list(range(B))
    drawings = [Drawing(Request(str(i), [0], params=params, seed=i), 0, (), V) for i in numbers]
    generator = torch.Generator().manual_seed(0)
    seconds = rounds.take_turns({
        OURS: trial(lambda: sampler.draw(logits.numpy(), np.array(numbers), drawings)),
        TORCH: trial(lambda: sample_token(logits, generator=generator, **how).tolist())}, repeats, f'{name}, {case}')
    return dict(shape=name, vocab_size=V, rows=B, case=case, ms=1000 * statistics.median(seconds[OURS]),
                torch_ms=1000 * statistics.median(seconds[TORCH]), speedup=rounds.ratio(seconds, TORCH, OURS),
                runs_s=seconds)


def trial(draw):
    """A function of the number of the round that draws until LEAST is over. It returns the seconds of a draw."""
    def seconds(round_):
        n, began = 0, time.perf_counter()
        while time.perf_counter() < began + LEAST:
            draw()
            n += 1
        return (time.perf_counter() - began) / n
    return seconds
