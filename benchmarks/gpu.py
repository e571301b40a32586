"""
What the engine does on a GPU, on the machine that runs this.

    engine    tokens of 1, 32 and 256 sequences at once, without HTTP: beside the same step with PyTorch's products of
              all rows as they come, transformers' static cache with a compiled step, and PyTorch's steps
    start     from an empty process to the first answer, graphs included
    clients, soak     the server over HTTP, see serve/loads.py

The models have random weights, in bfloat16 unless --dtype says otherwise.
"""
import subprocess
import sys
from functools import partial

import torch

import configurator
from benchmarks.harness import Case, Part, take_turns
from benchmarks.ours import Cache, gpu_executor, served
from benchmarks.peers.hugging_face import HuggingFace, compiled_on_gpu
from benchmarks.serve import loads
from benchmarks.serve.servers import ROOT
from benchmarks.shapes import model_of, random_tokens

BATCHES, N_PROMPT = (1, 32, 256), 16


def check(asked):
    """ValueError unless the device is CUDA. Exits where a part needs the server and a package is missing."""
    if not asked.device.startswith('cuda'):
        raise ValueError(f"gpu mode measures CUDA, and the device is {asked.device}: use a machine with a GPU")
    if not asked.only or {*asked.only.split(',')} & {*loads.PARTS}:
        configurator.check_installation(configurator.OF_SERVER, "pip install -r requirements-serve.txt, or "
                                        "--only=engine,start")
    return dict(bias=asked.bias, dtype=asked.dtype)


def engine(asked):
    """
    A round serves B sequences with prompts of N_PROMPT tokens and answers of half a context, at most 256 tokens, drawn
    at temperature 0.8. gb_per_s: what a step reads a second if it reads weights, keys and values once.
    """
    for name in asked.shapes or ('M', 'L', 'qwen0.5b'):
        model = model_of(name, asked.bias).to(asked.device, getattr(torch, asked.dtype))
        n_new = min(256, model.config.block_size // 2)
        executors = {'gpu': gpu_executor(model), 'gpu, rows as they come': gpu_executor(model, as_they_come=True)}
        for B in asked.batches or BATCHES:
            def case(step, run):
                return Case(dict(shape=name, batch=B, step=step), run, per=n_new)
            ours = [case(step, served(model, executor, B, N_PROMPT, n_new)) for step, executor in executors.items()]
            measured = take_turns(ours, asked.repeats, f'{name}, {B}')
            others = []  # they run after ours: torch.compile seems to free the memory of cuBLAS that our graphs use
            if HuggingFace.missing():
                print(f"not compared: transformers ({HuggingFace.missing()})")
            else:
                others.append(case('transformers', compiled_on_gpu(model, B, n_new)))
            if B == 1:
                eager = partial(Cache(model).generate, random_tokens(model, 1, 1).to(asked.device), n_new, 0.8)
                others.append(case('eager', lambda: eager().cpu()))
            first, *_ = measured = measured + take_turns(others, asked.repeats, f'{name}, {B}, others')
            n_bytes = step_bytes(model, B, N_PROMPT + n_new / 2)
            yield [m.row(us=1e6 * m.seconds, tok_per_s=B / m.seconds, over_gpu=m.over(first),
                         gb_per_s=n_bytes / m.seconds / 1e9) for m in measured]


def step_bytes(model, B, n_keys):
    """Bytes of weights, without embeddings, and of the keys and values of B sequences with n_keys of them each."""
    c, linears = model.config, [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    number = model.lm_head.weight.element_size()
    return sum(p.nbytes for m in linears for p in m.parameters()) + int(
        2 * c.n_layer * c.n_kv_head * c.head_dim * number * B * n_keys)


def start(asked):
    for name in asked.shapes or ('M', 'L'):
        script = f"from benchmarks.ours import first_answer; first_answer({name!r}, {asked.device!r}, {asked.dtype!r})"
        process = partial(subprocess.run, [sys.executable, '-c', script], cwd=ROOT, check=True)
        m, = take_turns([Case(dict(shape=name), process)], min(3, asked.repeats), f'{name}: starts')
        yield [m.row(seconds=m.seconds)]


PARTS = dict(
    engine=Part(engine, 7, "the engine without HTTP", 'shape batch step us tok_per_s gb_per_s over_gpu'),
    start=Part(start, 1, "from the start of a process to the first answer", 'shape seconds'),
    **loads.PARTS,
)
