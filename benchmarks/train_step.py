"""
How long a training iteration takes: forward, backward and the optimizer's step.

    python bench.py
"""
import statistics
import time
from dataclasses import replace

import torch
from tqdm import tqdm

import tokenizer as tokenizers
from benchmarks.shapes import SHAPES
from device import autocast, default_peak_flops, synchronize
from model import GPT
from training.batches import Batches

N_STEPS = 10  # iterations of the warm-up, and of each timed run


def run(name, data_dir, batch_size, block_size, bias, compiled, repeats, seed, device, dtype, trace=''):
    """
    Time training iterations of a shape, print the result, and return it as a row (a dict).

    data_dir: a prepared data set, or None for random tokens. block_size: 0 is the shape's own. trace: a folder for a
    torch.profiler trace of five iterations; '' makes none. ms: of an iteration, the median of `repeats` runs.
    """
    config = config_for(name, data_dir, block_size, bias)
    model = GPT(config).to(device)
    step = training_step(model, data_dir, batch_size, compiled, seed, device, dtype)
    for k in tqdm(range(N_STEPS), desc=f'{name} warm-up', leave=False, disable=None):
        step(k)
    if trace:
        write_trace(step, trace)
    times = []
    for repeat in tqdm(range(repeats), desc=f'{name} training', disable=None):
        synchronize(device)
        t0 = time.perf_counter()
        for k in range(N_STEPS):
            loss = step(N_STEPS * repeat + k)
        synchronize(device)
        times.append((time.perf_counter() - t0) / N_STEPS)
    dt = statistics.median(times)
    mfu = model.estimate_mfu(batch_size, dt, default_peak_flops(torch.device(device)))
    row = dict(shape=name, block_size=config.block_size, batch=batch_size, data=data_dir or 'random tokens',
               ms=1e3 * dt, tok_per_s=batch_size * config.block_size / dt, mfu=mfu, loss=loss)
    print(line(row))
    return row


def line(row):
    """A row as text."""
    mfu = 'unknown' if row['mfu'] is None else f"{row['mfu']:.1%}"
    return (f"{row['shape']}, block {row['block_size']}, batch {row['batch']}, {row['data']}: "
            f"{row['ms']:.2f} ms an iteration, {row['tok_per_s']:,.0f} tok/s, MFU {mfu}, loss {row['loss']:.4f}")


def config_for(name, data_dir, block_size, bias):
    """The configuration of a shape, with a vocabulary that holds the tokens of the data set."""
    shape = SHAPES[name]
    chars = tokenizers.state_of_dataset(data_dir).get('chars', '') if data_dir else ''
    vocab_size = 50304 if data_dir and not chars else max(shape.vocab_size, len(chars))
    return replace(shape, bias=bias, block_size=block_size or shape.block_size, vocab_size=vocab_size)


def training_step(model, data_dir, batch_size, compiled, seed, device, dtype):
    """A function that runs training iteration number k and returns its loss."""
    c = model.config
    optimizer = model.configure_optimizers(weight_decay=1e-2, learning_rate=1e-4, betas=(0.9, 0.95),
                                           device_type=device.split(':')[0])
    if data_dir:
        get_batch = Batches(data_dir, 'train', batch_size, c.block_size, c.vocab_size, device, seed)
    else:
        tokens = torch.randint(c.vocab_size, (batch_size, c.block_size + 1), device=device)
        get_batch = lambda k: (tokens[:, :-1], tokens[:, 1:])  # noqa: E731
    forward, amp = torch.compile(model) if compiled else model, autocast(device, dtype)

    def step(k):
        x, y = get_batch(k)
        with amp:
            loss = forward(x, y)[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def write_trace(step, folder):
    """Profile five iterations into a folder, for TensorBoard, and print the slowest operations."""
    from torch.profiler import tensorboard_trace_handler
    with torch.profiler.profile(on_trace_ready=tensorboard_trace_handler(folder), record_shapes=True) as prof:
        for k in range(5):
            step(k)
    print(prof.key_averages().table(sort_by='self_cpu_time_total', row_limit=15) + f"\n{folder}")
