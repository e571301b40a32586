"""
How long a training iteration takes: forward, backward and the optimizer's step.

    python bench.py
"""
import os
from dataclasses import replace

import torch

from benchmarks.harness import Case, Part, take_turns
from benchmarks.shapes import SHAPES
from device import autocast, default_peak_flops, synchronize
from model import GPT
from training.batches import Batches, vocab_size_of

N_STEPS = 10  # iterations of the warm-up, and of each timed run
TRACE = os.path.join('out-bench', 'trace')


def iterations(asked):
    """mfu: None where the device's peak is unknown."""
    torch.set_float32_matmul_precision('high')  # as train.py does
    prepared = (d for d in ('data/openwebtext', 'data/shakespeare_char') if os.path.exists(d + '/train.bin'))
    data_dir = next(prepared, None) if asked.real_data else None
    for name in asked.shapes or asked.default_shape:
        yield [time_shape(asked, name, data_dir)]


def time_shape(asked, name, data_dir):
    """A row. data_dir: a prepared data set, or None for random tokens."""
    B, device = asked.batch_size, asked.device
    config = config_for(name, data_dir, asked.block_size, asked.bias)
    model = GPT(config).to(device)
    compiled = asked.compile and device != 'cpu'
    step = training_step(model, data_dir, B, compiled, asked.seed, device, asked.dtype)

    def several(first):
        for k in range(first, first + N_STEPS):
            loss = step(k)
        synchronize(device)
        return loss
    labels = dict(shape=name, block_size=config.block_size, batch=B, data=data_dir or 'random tokens')
    case = Case(labels, several, lambda n: n * N_STEPS, per=N_STEPS)
    m, = take_turns([case], asked.repeats, f'{name} training')
    if asked.profile:
        write_trace(step)
    mfu = model.estimate_mfu(B, m.seconds, default_peak_flops(torch.device(device)))
    return m.row(iteration_s=m.seconds, tok_per_s=B * config.block_size / m.seconds, mfu=mfu, loss=m.result)


def config_for(name, data_dir, block_size, bias):
    """The configuration of a shape, with a vocabulary that holds the tokens of the data set."""
    shape = SHAPES[name]
    vocab_size = max(shape.vocab_size, vocab_size_of(data_dir)) if data_dir else shape.vocab_size
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


def write_trace(step):
    """Profile five iterations into the folder TRACE, for TensorBoard, and print the slowest operations."""
    from torch.profiler import tensorboard_trace_handler
    os.makedirs(TRACE, exist_ok=True)
    with torch.profiler.profile(on_trace_ready=tensorboard_trace_handler(TRACE), record_shapes=True) as prof:
        for k in range(5):
            step(k)
    print(prof.key_averages().table(sort_by='self_cpu_time_total', row_limit=15) + f"\n{TRACE}")


PARTS = dict(train=Part(iterations, 1, "a training iteration",
                        'shape block_size batch data iteration_s tok_per_s mfu loss'))
