"""
The process of one tree for old_and_new.py, which starts it in the tree's folder: timed_tree.py SHAPES ONLY.

It prints the names of its cases as a JSON list, then for each name that it reads on stdin the seconds that the case has
taken. Only names that every version of the code has are used here.
"""
import json
import os
import sys
import time

sys.path[0] = os.getcwd()  # the tree whose code is timed

import torch

import decode
from model import GPT, GPTConfig

# shape, sequences, new tokens of each, generations in one timed run
KERNEL = (('S', 1, 122, 6), ('S', 10, 122, 6), ('M', 1, 200, 2), ('M', 10, 100, 2), ('L', 1, 40, 1), ('L', 8, 24, 1))
PREFILL = ('M', 256, 4), ('L', 512, 1)  # shape, tokens of the prompt, prefills in one timed run


def cases(shapes, only):
    """Yield (name, a function to time) of the cases with `only` in their names."""
    models = {}

    def model_of(name):
        if name not in models:
            torch.manual_seed(0)
            models[name] = GPT(GPTConfig(**shapes[name])).eval()
        return models[name]

    sizes = [(f'kernel, {name} x {B}', name, B, 6, n_new, runs) for name, B, n_new, runs in KERNEL]
    sizes += [(f'prefill, {name} x {T}', name, 1, T, 1, runs) for name, T, runs in PREFILL]
    for what, name, *size in sizes:
        for threads in (None, torch.get_num_threads()):
            case = f"{what}, {f'{threads} threads' if threads else 'default threads'}"
            if only in case:
                yield case, kernel(model_of(name), *size, threads)
    others = (('training iterations', training, 'S'), ('uncached passes', uncached_pass, 'SM'),
              ('cached steps of the model', cached_steps, 'S'))
    for what, make, names in others:
        for name in names:
            if only in f'{what}, {name}':
                yield f'{what}, {name}', make(model_of(name))


def kernel(model, B, T, n_new, runs, threads):
    """Generate n_new tokens after each of B prompts of T, `runs` times; a prefill is one that generates one token."""
    decoder = decode.best(model, B, 'float32', threads)
    idx = torch.randint(model.config.vocab_size, (B, T), generator=torch.Generator().manual_seed(1))

    def run():
        for _ in range(runs):
            model.generate(idx, n_new, temperature=0, use_cache=True, decoder=decoder)
    return run


def uncached_pass(model):
    c = model.config
    idx = torch.randint(c.vocab_size, (1, c.block_size), generator=torch.Generator().manual_seed(1))

    @torch.inference_mode()
    def run():
        for _ in range(20):
            model(idx, use_cache=False)
    return run


def cached_steps(model):
    idx = torch.randint(model.config.vocab_size, (1, 6), generator=torch.Generator().manual_seed(1))
    return lambda: [model.generate(idx, 122, temperature=0, use_cache=True) for _ in range(2)]


def training(model):
    torch.manual_seed(1)
    model = GPT(model.config)
    c = model.config
    optimizer = model.configure_optimizers(weight_decay=1e-2, learning_rate=1e-4, betas=(0.9, 0.95), device_type='cpu')
    tokens = torch.randint(c.vocab_size, (12, c.block_size + 1), generator=torch.Generator().manual_seed(1))

    def run():
        for _ in range(5):
            loss = model(tokens[:, :-1], tokens[:, 1:])[1]
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    return run


def main():
    made = dict(cases(json.loads(sys.argv[1]), sys.argv[2]))
    print(json.dumps(list(made)), flush=True)
    for line in sys.stdin:
        run = made[line.strip()]
        time.sleep(0.05)  # until the threads of the other tree sleep
        t0 = time.perf_counter()
        run()
        print(json.dumps(time.perf_counter() - t0), flush=True)


if __name__ == '__main__':
    main()
