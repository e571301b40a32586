"""
How fast, measured here and now.

    python bench.py                          a training step, as nanoGPT's bench
    python bench.py --mode=generate          tokens/s without and with the cache, by length: a table and a PNG
    python bench.py --mode=generate --shape=S,M --json=speedup.json
    python bench.py --mode=generate --lengths=500 --batches=10        ten samples, nanoGPT's default
    python bench.py --mode=peers             the same weights in other engines: a table and a PNG
                                             (pip install -r requirements-peers.txt)
    python bench.py --mode=caches            the caches of kvcache/ on the compiled step; --only=steps,joining for parts
    python bench.py --mode=drafts            one text with drafts and without: the same tokens, sooner or not
    python bench.py --mode=serve             our server and llama-server under load (pip install -r
                                             requirements-serve.txt; benchmarks/serve/servers.py builds llama-server)
    python bench.py --mode=gpu               the step on a GPU, beside other ways and the speed of its memory (make gpu)
    python bench.py --mode=memory            the memory that generation needs, with the cache and without
    python bench.py --mode=loss              what dropping context and rounding weights cost a trained model, in nats
    python bench.py --mode=positions         trains small models with each kind of positions, and compares them in nats
    python bench.py --mode=endless           one long text through a rolling cache: nats, time and memory to the end
    python bench.py --mode=recall            what a model with a window remembers, by distance
    python bench.py --mode=recipes           what each setting of a fast training run brings in equal seconds, in nats
    python bench.py --mode=busy              decoding beside 0, 1 and 2 processes that keep the cores busy

Medians of `repeats` runs after a warm-up; what is compared takes turns within one run. Pictures go to out-bench/.
"""
import math
import os
import re
import sys
from importlib import import_module

import configurator  # before torch: it says so in one line where torch is missing

# isort: split
import torch

from benchmarks.harness import Asked, describe_machine, draw, run_parts
from benchmarks.shapes import GPTS, SHAPES
from device import pick_device, pick_dtype, share_cores

mode = 'train'            # train, recipes, generate, peers, caches, drafts, serve, gpu, memory, loss, positions,
                          # endless, recall or busy
shape = 'auto'            # S (4 x 128, block 128), M (6 x 384, 256), L (12 x 768, 1024), or S,M; auto goes by the mode.
                          # In peers mode also smollm2 and qwen0.5b, the shapes of SmolLM2-135M and Qwen2.5-0.5B
batch_size = 12           # rows of a training step
block_size = 0            # of the training step; 0 is the shape's own
bias = False              # in linears and layer norms?
real_data = True          # train on a prepared data set if there is one, else on random tokens
profile = False           # a torch.profiler trace of the training step, written to out-bench/trace/
compile = True            # torch.compile the model for training; on a CPU it is no faster, and left out
lengths = 'auto'          # new tokens after a prompt of 6, as 10,50, or tokens of context; auto goes by the mode
batches = 'auto'          # rows or clients at once; auto is 1 for generate, 1,8,32 for memory, else goes by the part
repeats = 5               # timed runs of each
only = ''                 # parts of a mode, as steps,joining; '' is all of them
llama_server = ''         # of serve mode: the path of llama-server; without it only our server is measured
requests = 0              # of each load in serve mode; 0 goes by the part
max_seconds = 2.0         # of one timed run in peers mode, about: slow engines generate fewer tokens
json = ''                 # a file for the figures; parts and shapes that are not run stay in it
png = 'auto'              # and one for their picture; auto is a name in out-bench/, '' is none
iterations = 0            # of the models that positions, recipes, endless and recall train; 0 goes by the mode
seeds = 3                 # models of each kind in positions and recipes mode, with the seeds `seed`, seed + 1, ...
seed = 1337               # of weights and data
device = 'auto'           # cpu, cuda, cuda:1, mps; auto is the best there is
dtype = 'auto'            # float32, bfloat16 or float16; auto goes by the device

OUT = 'out-bench'
# A module has PARTS, see `harness.Part`. It may have CPU_ONLY, what is measured on a CPU alone; check(asked), which
# raises ValueError and returns what is written beside the rows; and PICTURE, a file, with picture(figures, machine),
# the arguments of `harness.draw`.
MODES = dict(train='train_step', recipes='recipes', generate='generate', memory='memory', loss='loss',
             positions='experiments.positions', endless='experiments.endless', recall='experiments.recall',
             busy='experiments.busy', peers='peers', caches='caches', drafts='drafts', serve='serve', gpu='gpu')


def main(config):
    torch.manual_seed(seed)
    check_settings()
    module = import_module(f'benchmarks.{MODES[mode]}')
    cpu_only = getattr(module, 'CPU_ONLY', '')
    dev = pick_device('cpu' if cpu_only and device == 'auto' else device)
    dt = pick_dtype(dtype, dev)
    if cpu_only and (dev, dt) != ('cpu', 'float32'):
        raise ValueError(f"{cpu_only} on a CPU in float32: leave device and dtype at auto")
    if dev == 'cpu':
        share_cores()
    asked = Asked(dev, dt, None if shape == 'auto' else shape.split(','),
                  numbers('batches', batches), numbers('lengths', lengths), only.split(',') if only else None, config)
    beside, machine = module.check(asked) if hasattr(module, 'check') else {}, describe_machine(dev)
    print(f"{machine}, {dt}")
    minutes = {name: part.minutes for name, part in asked.parts(module.PARTS).items()}
    print(f"expected time with the default settings on two cores, in minutes: "
          f"{', '.join(f'{name} {n}' for name, n in minutes.items())}", file=sys.stderr)
    figures = run_parts(asked, module.PARTS, **beside)
    if png and hasattr(module, 'PICTURE') and (picture := module.picture(figures, machine)):
        path = in_out(module.PICTURE) if png == 'auto' else png
        draw(path=path, **picture)
        print(f"\n{path}")


def check_settings():
    """ValueError on settings that make no sense in any mode."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    known = SHAPES if mode == 'peers' else GPTS
    if shape != 'auto' and set(shape.split(',')) - set(known):
        raise ValueError(f"shape must be auto or any of {', '.join(known)} in {mode} mode, not {shape!r}")
    configurator.check_range(globals(), 1, math.inf, 'repeats', 'batch_size', 'seeds')
    configurator.check_range(globals(), 0, math.inf, 'iterations', 'seed')
    configurator.check_range(globals(), 0, 10**6, 'requests')
    if not max_seconds > 0:
        raise ValueError(f"max_seconds must be more than 0, not {max_seconds}")


def numbers(name, text):
    """'1,10' as [1, 10]; None for 'auto'."""
    if text == 'auto':
        return None
    if not all(re.fullmatch(r' *0*[1-9][0-9]{0,5} *', word) for word in text.split(',')):
        raise ValueError(f"{name} must be positive numbers up to 999,999 with commas between, not {text!r:.60}")
    return [int(word) for word in text.split(',')]


def in_out(name):
    """The path of a file in OUT, which is made if it is missing."""
    os.makedirs(OUT, exist_ok=True)
    return os.path.join(OUT, name)


if __name__ == '__main__':
    configurator.run(main)
