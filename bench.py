"""
How fast, measured here and now.

    python bench.py                          tokens/s by length, without a cache, with it, and as sample.py draws them
    python bench.py --shape=S,M --json=out-bench/generate.json
    python bench.py --lengths=500 --batches=10        ten samples, nanoGPT's default
    python bench.py --mode=train             a training step, as nanoGPT's bench.py
    python bench.py --mode=peers             the same weights in other engines: decoding and prefills
                                             (pip install -r requirements-peers.txt)
    python bench.py --mode=peers --init_from=HuggingFaceTB/SmolLM2-135M-Instruct      with the weights of a real model
    python bench.py --mode=serve             our server with several clients, beside llama-server, and a soak (pip
                                             install -r requirements-serve.txt; benchmarks/serve/servers.py builds
                                             llama-server)
    python bench.py --mode=gpu               the engine on a GPU, beside PyTorch's steps (make gpu)
    python bench.py --mode=loss --init_from=HuggingFaceTB/SmolLM2-135M-Instruct --text=KV_CACHE.md,docs/TRAINING.md
                                             what numbers in fewer bits cost a trained model, in nats
    python bench.py --mode=eval --init_from=out-chat --text=my.txt --choices=tasks.jsonl
                                             how good a model is: bits per byte, multiple choice

Medians of `repeats` runs after a warm-up; what is compared takes turns within one run. Nothing outside of this folder
is read unless a path is given.
"""
import math
import re
import sys
from importlib import import_module
from types import SimpleNamespace

import configurator  # before torch: it says so in one line where torch is missing

# isort: split
import torch

from benchmarks.harness import describe_machine, run_parts
from benchmarks.shapes import GPTS, SHAPES
from device import pick_device, pick_dtype, share_cores

mode = 'generate'         # generate, train, peers, serve, loss, eval or gpu
shape = 'auto'            # S (4 x 128, block 128), M (6 x 384, 256), L (12 x 768, 1024), or S,M; auto goes by the mode.
                          # In peers mode also smollm2 and qwen0.5b, the shapes of SmolLM2-135M and Qwen2.5-0.5B
init_from = ''            # in peers, loss and eval mode: a trained model, as in sample.py, or the out_dir of a run
text = ''                 # in loss and eval mode: files of text, with commas between, which the model predicts
choices = ''              # in eval mode: files of questions with choices, see benchmarks/evaluation.py
batch_size = 12           # rows of a training step
block_size = 0            # of the training step; 0 is the shape's own
bias = False              # in linears and layer norms?
real_data = True          # train on a prepared data set if there is one, else on random tokens
compile = True            # torch.compile the model for training; on a CPU it is no faster, and left out
lengths = 'auto'          # new tokens after a prompt of 6, as 10,50, or tokens of context; auto goes by the mode
batches = 'auto'          # rows or clients at once; auto is 1 for generate, else goes by the part
repeats = 5               # timed runs of each
only = ''                 # parts of a mode, as decoding,prefill; '' is all of them
llama_server = ''         # of serve mode: the path of llama-server; without it only our server is measured
requests = 0              # of each load in serve mode; 0 goes by the part
json = ''                 # a file for the figures; parts and shapes that are not run stay in it
seed = 1337               # of weights and data
device = 'auto'           # cpu, cuda, cuda:1, mps; auto is the best there is
dtype = 'auto'            # float32, bfloat16 or float16; auto goes by the device

# A module has PARTS, see `harness.Part`. It may have CPU_ONLY, what is measured on a CPU alone, and check(asked), which
# raises ValueError and returns what is written beside the rows.
MODES = dict(generate='generate', train='train_step', peers='peers.race', serve='serve.loads', loss='loss',
             eval='evaluation', gpu='gpu')


def main(config):
    torch.manual_seed(seed)
    check_settings()
    module = import_module(f'benchmarks.{MODES[mode]}')
    cpu_only, known = getattr(module, 'CPU_ONLY', ''), module.PARTS
    dev = pick_device('cpu' if cpu_only and device == 'auto' else device)
    dt = pick_dtype(dtype, dev)
    if cpu_only and (dev, dt) != ('cpu', 'float32'):
        raise ValueError(f"{cpu_only} on a CPU in float32: leave device and dtype at auto")
    names = only.split(',') if only else [name for name in known if mode != 'eval' or globals()[name]]
    if set(names) - set(known):
        raise ValueError(f"the parts of {mode} mode are {', '.join(known)}; not {only!r}")
    if dev == 'cpu':
        share_cores()
    asked = SimpleNamespace(**config | dict(
        device=dev, dtype=dt, shapes=[init_from] if init_from else None if shape == 'auto' else shape.split(','),
        batches=numbers('batches', batches), lengths=numbers('lengths', lengths)))
    beside = module.check(asked) if hasattr(module, 'check') else {}
    print(f"{describe_machine(dev)}, {dt}")
    print(f"expected time with the default settings on two cores, in minutes: "
          f"{', '.join(f'{name} {known[name].minutes}' for name in names)}", file=sys.stderr)
    run_parts(asked, {name: known[name] for name in names}, **beside)


def check_settings():
    """ValueError on settings that make no sense in any mode."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    known = SHAPES if mode in ('peers', 'gpu') else GPTS
    if (init_from or text) and mode not in ('peers', 'loss', 'eval') or choices and mode != 'eval':
        raise ValueError(f"init_from and text are for peers, loss and eval mode, choices for eval mode: leave them out "
                         f"in {mode} mode")
    if mode in ('loss', 'eval') and not (text or choices):
        raise ValueError(f"{mode} mode needs files to evaluate a model on: give --text=FILE,..."
                         f"{' or --choices=FILE,...' * (mode == 'eval')}")
    if init_from and shape != 'auto':
        raise ValueError("init_from takes the place of the shapes: leave one of them out")
    if shape != 'auto' and set(shape.split(',')) - set(known):
        raise ValueError(f"shape must be auto or any of {', '.join(known)} in {mode} mode, not {shape!r}")
    configurator.check_range(globals(), 1, math.inf, 'repeats', 'batch_size')
    configurator.check_range(globals(), 0, math.inf, 'seed')
    configurator.check_range(globals(), 0, 10**6, 'requests')


def numbers(name, text):
    """'1,10' as [1, 10]; None for 'auto'."""
    if text == 'auto':
        return None
    if not all(re.fullmatch(r' *0*[1-9][0-9]{0,5} *', word) for word in text.split(',')):
        raise ValueError(f"{name} must be positive numbers up to 999,999 with commas between, not {text!r:.60}")
    return [int(word) for word in text.split(',')]


if __name__ == '__main__':
    configurator.run(main)
