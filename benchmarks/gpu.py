"""
What the engine does on a GPU, on the machine that runs this.

    python bench.py --mode=gpu --json=out-bench/gpu.json
    python bench.py --mode=gpu --only=engine --shape=L --dtype=float32

    engine    tokens of 1, 32 and 256 sequences at once, without HTTP: beside int8 weights, the same kernels with a
              vendor's matmul, and PyTorch's steps
    start     from an empty process to the first answer, graphs included
    clients, soak     the server over HTTP, see serve/loads.py

The models have random weights, in bfloat16 unless --dtype says otherwise.
"""
import subprocess
import sys

import torch

from benchmarks.harness import Case, Part, take_turns
from benchmarks.ours import generated, gpu_executor, served
from benchmarks.serve import loads
from benchmarks.serve.servers import ROOT
from benchmarks.shapes import cache_bytes, model_of

BATCHES, N_PROMPT = (1, 32, 256), 16


def check(asked):
    """ValueError unless the device is CUDA."""
    if not asked.device.startswith('cuda'):
        raise ValueError(f"gpu mode measures CUDA, and the device is {asked.device}: use a machine with a GPU")
    return dict(bias=asked.bias, dtype=asked.dtype)


def engine(asked):
    """
    A round serves B sequences with prompts of N_PROMPT tokens and answers of half a context, at most 256 tokens, drawn
    at temperature 0.8. gb_per_s: what a step reads a second if it reads weights, keys and values once.
    """
    for name in asked.shapes or ('M', 'L', 'qwen0.5b'):
        model = model_of(name, asked.bias).to(asked.device, getattr(torch, asked.dtype))
        n_new, number = min(256, model.config.block_size // 2), model.lm_head.weight.element_size()
        kernels = {asked.dtype: gpu_executor(model), 'int8': gpu_executor(model, 'int8'),
                   f"{asked.dtype}, a vendor's matmul": gpu_executor(model, vendor=True)}
        for B in asked.batches or BATCHES:
            cases = [Case(dict(shape=name, batch=B, step=of, bytes=executor.packed.nbytes()),
                          served(model, executor, B, N_PROMPT, n_new), per=n_new) for of, executor in kernels.items()]
            cases += [Case(dict(shape=name, batch=B, step=step, bytes=kernels[asked.dtype].packed.nbytes()),
                           generated(model, step, B, n_new), per=n_new) for step in ('graph', 'eager')]
            first, *_ = measured = take_turns(cases, asked.repeats, f'{name}, {B}')
            context = cache_bytes(model.config, B, number) * (N_PROMPT + n_new / 2) / model.config.block_size
            yield [m.row(us=1e6 * m.seconds, tok_per_s=B / m.seconds, over_kernels=m.over(first),
                         gb_per_s=(m.case.labels['bytes'] + context) / m.seconds / 1e9) for m in measured]


def start(asked):
    for name in asked.shapes or ('M', 'L'):
        script = f"from benchmarks.ours import first_answer; first_answer({name!r}, {asked.device!r}, {asked.dtype!r})"
        case = Case(dict(shape=name), lambda script=script: subprocess.run([sys.executable, '-c', script], cwd=ROOT,
                                                                           check=True))
        m, = take_turns([case], min(3, asked.repeats), f'{name}: starts')
        yield [m.row(seconds=m.seconds)]


PARTS = dict(
    engine=Part(engine, 7, "the engine without HTTP", 'shape batch step us tok_per_s gb_per_s over_kernels'),
    start=Part(start, 1, "from the start of a process to the first answer", 'shape seconds'),
    **loads.PARTS,
)
