"""
How fast, measured here and now.

    python bench.py                          a training step, as nanoGPT's bench
    python bench.py --mode=generate          tokens/s without and with the cache, by length: a table and a PNG
    python bench.py --mode=generate --shape=S,M --json=speedup.json
    python bench.py --mode=generate --lengths=500 --batches=10        ten samples, nanoGPT's default
    python bench.py --mode=peers             the same weights in other engines: a table and a PNG
                                             (pip install -r requirements-peers.txt)
    python bench.py --mode=caches            the caches of kvcache/ on the compiled step; --only=steps,joining for parts
    python bench.py --mode=serve             our server and llama-server under load (pip install -r
                                             requirements-serve.txt; benchmarks/serve/servers.py builds llama-server)
    python bench.py --mode=memory            the memory that generation needs, with the cache and without
    python bench.py --mode=loss              what dropping context and rounding weights cost a trained model, in nats
    python bench.py --mode=positions         trains small models with each kind of positions, and compares them in nats
    python bench.py --mode=endless           one long text through a rolling cache: nats, time and memory to the end
    python bench.py --mode=recall            what a model with a window remembers, by distance

Medians of `repeats` runs after a warm-up; what is compared takes turns within one run. Pictures go to out-bench/.
"""
import math
import os
import re
import signal
import sys
from importlib import import_module

import configurator  # before torch: it says so in one line where torch is missing

# isort: split
import torch

from benchmarks.report import describe_machine, read_json, write_json
from benchmarks.shapes import PROMPT, SHAPES, WITHIN_WINDOW
from device import pick_device, pick_dtype

mode = 'train'            # train, generate, peers, caches, serve, memory, loss, positions, endless or recall
shape = 'auto'            # S (4 x 128, block 128), M (6 x 384, 256), L (12 x 768, 1024), or S,M; auto goes by the mode
batch_size = 12           # rows of a training step
block_size = 0            # of the training step; 0 is the shape's own
bias = False              # in linears and layer norms?
real_data = True          # train on a prepared data set if there is one, else on random tokens
profile = False           # a torch.profiler trace of the training step, written to out-bench/trace/
compile = True            # torch.compile the model for training; on a CPU it is no faster, and left out
lengths = 'auto'          # new tokens after a prompt of 6, as 10,50, or tokens of context; auto goes by the mode
batches = 'auto'          # rows or clients at once; auto is 1 for generate, 1,8,32 for memory, else goes by the part
repeats = 5               # timed runs of each
only = ''                 # parts of the modes caches, peers and serve, as steps,joining; '' is all of them
llama_server = ''         # of serve mode: the path of llama-server; without it only our server is measured
requests = 0              # of each load in serve mode; 0 goes by the part
max_seconds = 2.0         # of one timed run in peers mode, about: slow engines generate fewer tokens
json = ''                 # a file for the figures of all modes but train; parts and shapes that are not run stay in it
png = 'auto'              # and one for their picture; auto is a name in out-bench/, '' is none
iterations = 0            # of the models that positions, endless and recall train; 0 is 2,000, and for recall 500
seeds = 3                 # models of each kind in positions mode, with the seeds `seed`, seed + 1, ...
kv_cache = 'tuple'        # of generate mode: one more column: streams, unified or paged, or the tuple in kv_bits
kv_bits = 0               # 8 or 4; 0 is float32
seed = 1337               # of weights and data
device = 'auto'           # cpu, cuda, cuda:1, mps; auto is the best there is
dtype = 'auto'            # float32, bfloat16 or float16; auto goes by the device

OUT = 'out-bench'
EXPECTED = {  # with the default settings, on two cores
    'train': '1 minute', 'generate': '1 minute for S, 5 for M and 20 for L, and ten times that with --batches=1,10',
    'memory': '5 minutes', 'loss': '5 minutes',
    'positions': '1 hour for training and 10 minutes for measuring, times 3 seeds',
    'endless': '15 minutes, after the training of positions mode', 'recall': '10 minutes',
}


IN_PARTS = 'peers', 'caches', 'serve'  # each part says how long it takes


def main(config):
    torch.manual_seed(seed)
    on_cpu = mode in (*IN_PARTS, 'loss', 'positions', 'endless', 'recall')
    dev = pick_device('cpu' if on_cpu and device == 'auto' else device)
    dt = pick_dtype(dtype, dev)
    names = (('S,M,L' if mode == 'memory' else 'S' if dev == 'cpu' else 'L') if shape == 'auto' else shape).split(',')
    check_settings(names)
    print(f"{describe_machine(dev)}, {dt}")
    expected = EXPECTED.get(mode) or minutes_of_parts()
    print(f"expected time with the default settings on two cores: about {expected}", file=sys.stderr)
    run = dict(train=bench_train, generate=bench_generate, peers=bench_peers, caches=bench_caches, serve=bench_serve,
               memory=bench_memory, loss=bench_loss, positions=bench_positions, endless=bench_endless,
               recall=bench_recall)[mode]
    run(names, dev, dt)


def check_settings(names):
    """ValueError on settings that make no sense. names: the shapes that were asked for."""
    if mode not in (*EXPECTED, *IN_PARTS):
        raise ValueError(f"mode must be one of {', '.join((*EXPECTED, *IN_PARTS))}, not {mode!r}")
    if only and mode not in IN_PARTS:
        raise ValueError(f"only the modes {', '.join(IN_PARTS)} have parts: leave --only={only} out")
    if set(names) - set(SHAPES):
        raise ValueError(f"shape must be auto or any of {', '.join(SHAPES)}, not {','.join(names)!r}")
    configurator.check_range(globals(), 1, math.inf, 'repeats', 'batch_size', 'seeds')
    configurator.check_range(globals(), 0, math.inf, 'iterations', 'seed')
    configurator.check_range(globals(), 0, 10**6, 'requests')
    if not max_seconds > 0:
        raise ValueError(f"max_seconds must be more than 0, not {max_seconds}")


def parts():
    """{name: module} of the parts of this mode that `only` names."""
    known = import_module(f'benchmarks.{mode}').PARTS
    chosen = only.split(',') if only else list(known)
    if set(chosen) - set(known):
        raise ValueError(f"the parts of {mode} mode are {', '.join(known)}; not {only!r}")
    return {part: known[part] for part in chosen}


def minutes_of_parts():
    minutes = {part: module.MINUTES for part, module in parts().items()}
    return f"{sum(minutes.values()):.0f} minutes ({', '.join(f'{part} {n}' for part, n in minutes.items())})"


def numbers(name, text, auto=None):
    """'1,10' as [1, 10]; for 'auto', those of the text `auto`, or None without one."""
    if text == 'auto' and auto is None:
        return None
    words = (auto if text == 'auto' else text).split(',')
    if not all(re.fullmatch(r' *0*[1-9][0-9]{0,5} *', word) for word in words):
        raise ValueError(f"{name} must be positive numbers up to 999,999 with commas between, not {text!r:.60}")
    return [int(word) for word in words]


def in_out(name):
    """The path of a file in OUT, which is made if it is missing."""
    os.makedirs(OUT, exist_ok=True)
    return os.path.join(OUT, name)


def draw(plot, name, *figures):
    """Call plot(*figures, path) as `png` has it: for the file `name` in OUT, another file, or not at all."""
    if png:
        path = png if png != 'auto' else in_out(name)
        plot(*figures, path)
        print(f"\n{path}")


def bench_train(names, dev, dt):
    from benchmarks import train_step
    torch.set_float32_matmul_precision('high')  # as train.py does
    prepared = (d for d in ('data/openwebtext', 'data/shakespeare_char') if os.path.exists(d + '/train.bin'))
    data_dir = next(prepared, None) if real_data else None
    for name in names:
        train_step.run(name, data_dir, batch_size, block_size, bias, compile and dev != 'cpu', repeats, seed, dev, dt,
                       trace=in_out('trace') if profile else '')


def bench_generate(names, dev, dt):
    from benchmarks import generate
    rows = generate.run(names, bias, numbers('batches', batches, '1'),
                        numbers('lengths', lengths, '10,50,122,128,200,500'), repeats, kv_cache, kv_bits, dev, dt)
    machine = describe_machine(dev)
    write_json(json, dict(machine=machine, dtype=dt, prompt=PROMPT, repeats=repeats, rows=rows))
    draw(generate.plot, 'speedup.png', rows, machine)


def bench_peers(names, dev, dt):
    from benchmarks.peers import decoding, report
    from benchmarks.peers.race import missing, versions
    if dev != 'cpu' or dt != 'float32':
        raise ValueError("the peers are compared on a CPU, beginning with float32 weights: "
                         "leave device and dtype at auto")
    for engine, why in missing().items():
        print(f"not compared: {engine} ({why})")
    figures = run_parts(dict(versions=versions(), missing=missing(), bias=bias, max_seconds=max_seconds),
                        *batches_and_lengths(), bias, repeats, max_seconds)
    if any(part is decoding for part in parts().values()):
        draw(report.plot, 'peers.png', figures['decoding']['rows'], describe_machine(dev))


def bench_caches(names, dev, dt):
    if dev != 'cpu':
        raise ValueError("the caches are compared on a CPU: leave device at auto")
    run_parts({}, *batches_and_lengths(), bias, repeats)


def bench_serve(names, dev, dt):
    configurator.check_installation(('starlette', 'uvicorn', 'pydantic', 'orjson', 'prometheus_client'),
                                    "pip install -r requirements-serve.txt")
    from benchmarks.serve import report
    from benchmarks.serve.servers import missing, version
    if (dev, dt, lengths) != ('cpu', 'float32', 'auto'):
        raise ValueError("the servers are compared on a CPU, each part with lengths of its own: "
                         "leave device, dtype and lengths at auto")
    why = missing(llama_server)
    if why:
        print(f"not compared: llama-server ({why})")
    # a signal to end becomes an exception, so that the servers are ended too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    compared = dict(missing={'llama-server': why}) if why else dict(versions={'llama-server': version(llama_server)})
    figures = run_parts(dict(bias=bias, **compared), numbers('batches', batches), bias, repeats, llama_server, requests)
    machine = describe_machine(dev)
    here = {part: of_part['rows'] for part, of_part in figures.items() if of_part.get('machine') == machine}
    pictured = {part: here[part] for part in report.PANELS if part in here}
    if pictured:
        draw(report.plot, 'serve.png', pictured, machine)


def batches_and_lengths():
    return numbers('batches', batches), numbers('lengths', lengths)


def run_parts(more, *settings):
    """
    Run the parts that `only` names, and write the rows of each to `json` when it is done. Other parts stay there as
    they are. So do the rows of shapes that were not run, if they were measured on the same machine with the same
    `more`; all rows of a shape that was run are replaced. more: what is written beside the rows of each part. settings:
    arguments of their `run`, after the shapes.
    """
    figures = {part: rows for part, rows in read_json(json).items() if isinstance(rows, dict)}
    names = None if shape == 'auto' else shape.split(',')
    for part, module in parts().items():
        measured_on = dict(machine=describe_machine('cpu'), **more)
        rows = [dict(row, repeats=repeats) for row in module.run(names, *settings)]
        before, ran = figures.get(part, {}), {row.get('shape') for row in rows}  # None: of a model of the part's own
        if measured_on.items() <= before.items():
            rows += [row for row in before['rows'] if row.get('shape') not in ran]
            rows.sort(key=lambda row: [None, *SHAPES].index(row.get('shape')))
        figures[part] = dict(**measured_on, rows=rows)
        write_json(json, figures)
    return figures


def bench_memory(names, dev, dt):
    from benchmarks import memory
    cases = [(name, B, n) for name in names for B in numbers('batches', batches, '1,8,32')
             for n in numbers('lengths', lengths, f'10,{WITHIN_WINDOW[name]}')]
    rows = memory.run(cases, bias, dev, dt)
    write_json(json, dict(machine=describe_machine(dev), dtype=dt, prompt=PROMPT, rows=rows))


def bench_loss(names, dev, dt):
    from benchmarks import loss
    if dev != 'cpu':
        raise ValueError("losses are measured on a CPU, also those of its decoder's rounded weights: leave device at "
                         "auto")
    path, rows, by_context = loss.run(dev)
    write_json(json, dict(machine=describe_machine(dev), checkpoint=path, rows=rows, by_context=by_context))
    draw(loss.plot, 'loss_by_context.png', by_context, rows)


def bench_positions(names, dev, dt):
    from benchmarks import positions
    check_small_models(dev, dt)
    rows, streams, lines = positions.run(range(seed, seed + seeds), iterations or 2000)
    write_json(json, dict(machine=describe_machine(dev), iterations=iterations or 2000, bins=positions.EDGES, rows=rows,
                          streams=streams, lines=lines))
    draw(positions.plot, 'positions.png', lines)


def bench_endless(names, dev, dt):
    from benchmarks import endless
    check_small_models(dev, dt)
    figures = endless.run(seed, iterations or 2000, repeats)
    write_json(json, dict(machine=describe_machine(dev), **figures))
    draw(endless.plot, 'endless.png', figures)


def bench_recall(names, dev, dt):
    from benchmarks import recall
    check_small_models(dev, dt)
    rows = recall.run(seed, iterations or 500)
    write_json(json, dict(machine=describe_machine(dev), iterations=iterations or 500, rows=rows))
    draw(recall.plot, 'recall.png', rows)


def check_small_models(dev, dt):
    if dev != 'cpu' or dt != 'float32':
        raise ValueError(f"{mode} mode trains and measures on a CPU in float32: leave device and dtype at auto")


if __name__ == '__main__':
    configurator.run(main)
