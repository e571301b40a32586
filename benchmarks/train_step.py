"""How long a training iteration takes: forward, backward and the optimizer's step."""
import os
from dataclasses import replace

import torch

from benchmarks.harness import Case, Part, take_turns
from benchmarks.shapes import SHAPES
from device import autocast, default_peak_flops
from model import GPT
from training.batches import Batches, vocab_size_of

N_STEPS = 10  # iterations of the warm-up, and of each timed run


def iterations(asked):
    """A row for each shape. mfu: None where the device's peak is unknown."""
    torch.set_float32_matmul_precision('high')  # as train.py does
    prepared = (d for d in ('data/openwebtext', 'data/shakespeare_char') if os.path.exists(d + '/train.bin'))
    data_dir = next(prepared, None) if asked.real_data else None
    for name in asked.shapes or ['S' if asked.device == 'cpu' else 'L']:
        yield [time_shape(asked, name, data_dir)]


def time_shape(asked, name, data_dir):
    """A row. data_dir: a prepared data set, or None for random tokens."""
    B, device, config = asked.batch_size, asked.device, SHAPES[name]
    vocab_size = max(config.vocab_size, vocab_size_of(data_dir)) if data_dir else config.vocab_size
    config = replace(config, bias=asked.bias, block_size=asked.block_size or config.block_size, vocab_size=vocab_size)
    model = GPT(config).to(device)
    optimizer = model.configure_optimizers(weight_decay=1e-2, learning_rate=1e-4, betas=(0.9, 0.95),
                                           device_type=device.split(':')[0])
    if data_dir:
        batches = Batches(data_dir, 'train', B, config.block_size, vocab_size, device, asked.seed)
    else:
        tokens = torch.randint(vocab_size, (B, config.block_size + 1), device=device)
        batches = lambda k: (tokens[:, :-1], tokens[:, 1:])  # noqa: E731
    forward = torch.compile(model) if asked.compile and device != 'cpu' else model

    def steps(first):
        """The loss of the last of N_STEPS iterations, each as in train.py."""
        for k in range(first, first + N_STEPS):
            x, y = batches(k)
            with autocast(device, asked.dtype):
                loss = forward(x, y)[1]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            last = loss.item()  # it waits for the device
        return last
    labels = dict(shape=name, block_size=config.block_size, batch=B, data=data_dir or 'random tokens')
    case = Case(labels, steps, lambda n: n * N_STEPS, per=N_STEPS)
    m, = take_turns([case], asked.repeats, f'{name} training')
    mfu = model.estimate_mfu(B, m.seconds, default_peak_flops(torch.device(device)))
    return m.row(iteration_s=m.seconds, tok_per_s=B * config.block_size / m.seconds, mfu=mfu, loss=m.results[-1])


PARTS = dict(train=Part(iterations, 1, "a training iteration",
                        'shape block_size batch data iteration_s tok_per_s mfu loss'))
