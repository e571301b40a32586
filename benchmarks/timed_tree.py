"""
The process of one tree for old_and_new.py, which starts it in the tree's folder: timed_tree.py SETTINGS.

It prints the names of its cases as a JSON list, then for each name that it reads on stdin the seconds of one run of it,
or what went wrong. A case is built when it is first asked for. Only what every version of the code has is used here.
"""
import gc
import json
import os
import queue
import random
import sys
import time
from functools import cache

sys.path[0] = os.getcwd()  # the tree whose code is timed

import torch

import decode
from model import GPT, GPTConfig

DECODING = ('S', 1, 122), ('S', 10, 122), ('M', 1, 200), ('M', 10, 100), ('L', 1, 40), ('L', 8, 24)  # with new tokens
PREFILL = ('M', 256), ('L', 512)           # shape, tokens of the prompt
CLIENTS = ('S', 16), ('M', 16)             # shape, requests at once
EACH = 3                                   # requests of a client, with prompts of 16 to 48 tokens and answers of
PROMPTS, ANSWERS = (16, 48), (26, 77)      # 26 to 77


def cases(settings):
    """{name: a function without arguments that returns the function to be timed}"""
    shapes, made = settings['shapes'], {}

    @cache
    def model(name):
        torch.manual_seed(0)
        return GPT(GPTConfig(**shapes[name])).eval()

    def decoder(name, B, weights):
        return decode.best(model(name), B, weights)
    for weights in 'float32', 'int8':
        for name, B, n_new in DECODING:
            made[f'decode, {name} x {B}, {weights}'] = lambda name=name, B=B, n_new=n_new, weights=weights: generating(
                model(name), B, 6, n_new, decoder=decoder(name, B, weights))
        for name, T in PREFILL:
            made[f'prefill, {name} {T}, {weights}'] = lambda name=name, T=T, weights=weights: generating(
                model(name), 1, T, 1, decoder=decoder(name, 1, weights))
        for name, n in CLIENTS:
            made[f'engine, {name}, {n} clients, {weights}'] = lambda name=name, n=n, weights=weights: serving(
                model(name), decoder(name, 1, weights), n)
    made['training iteration, S'] = lambda: training(model('S').config)
    made['tuples in PyTorch, S x 1'] = lambda: generating(model('S'), 1, 6, 122)
    for name in 'SM':
        made[f'uncached pass, {name}'] = lambda name=name: uncached_pass(model(name))
    return made


def tokens(config, *shape, seed=1):
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def generating(model, B, T, n_new, **how):
    """n_new tokens after each of B prompts of T. A prefill is one that generates one token."""
    idx = tokens(model.config, B, T)
    return lambda: model.generate(idx, n_new, temperature=0, use_cache=True, **how)


def serving(model, decoder, n_clients):
    """Requests of n_clients to the engine in this process, each of which sends its next one when it has its answer."""
    from serving.engine import Engine
    from serving.request import Request, SamplingParams
    config, rng, ended, n_runs = model.config, random.Random(0), queue.SimpleQueue(), 0
    asks = [(tokens(config, rng.randint(*PROMPTS), seed=i).tolist(), rng.randint(*ANSWERS))
            for i in range(n_clients * EACH)]
    engine = Engine(model, decoder, [b' '] * config.vocab_size)
    engine.start()
    gc.collect()
    gc.freeze()  # as the server does when it has loaded a model

    def send(i, client):
        def deliver(outputs):
            if outputs[-1].finish_reason is not None:
                ended.put((client, outputs[-1]))
        prompt, n_new = asks[i]
        # what one run has computed is not found by the next one
        engine.submit(Request(f'{n_runs} {i}', prompt, n_new, SamplingParams(temperature=0), cache_salt=str(n_runs),
                              deliver=deliver))

    def run():
        nonlocal n_runs
        n_runs += 1
        for client in range(n_clients):
            send(client, client)
        for n in range(len(asks)):
            client, output = ended.get(timeout=300)
            if output.finish_reason != 'length':
                raise ValueError(f"a request ended with {output.finish_reason}: {output.error}")
            if n_clients + n < len(asks):
                send(n_clients + n, client)
    return run


def training(config):
    torch.manual_seed(1)
    model = GPT(config)
    optimizer = model.configure_optimizers(weight_decay=1e-2, learning_rate=1e-4, betas=(0.9, 0.95), device_type='cpu')
    text = tokens(config, 12, config.block_size + 1)

    def run():
        loss = model(text[:, :-1], text[:, 1:])[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return run


def uncached_pass(model):
    idx = tokens(model.config, 1, model.config.block_size)
    return torch.inference_mode()(lambda: model(idx, use_cache=False))


def seconds_of(run, least):
    """Seconds of one run, the mean of as many as take the seconds `least`."""
    time.sleep(0.05)  # until the threads of the other tree sleep
    n, began = 0, time.perf_counter()
    while not n or time.perf_counter() - began < least:
        run()
        n += 1
    return (time.perf_counter() - began) / n


def main():
    settings = json.loads(sys.argv[1])
    makers, runs = cases(settings), {}
    print(json.dumps(list(makers)), flush=True)
    for line in sys.stdin:
        case = line.strip()
        try:
            if case not in runs:
                runs[case] = makers[case]()
            answer = seconds_of(runs[case], settings['seconds'])
        except Exception as e:  # the other cases go on
            answer = f'{type(e).__name__}: {e}'
        print(json.dumps(answer), flush=True)


if __name__ == '__main__':
    main()
