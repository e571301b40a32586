"""
What the code computes, down to the bit, is what it computed when golden.json was written: tokens of `GPT.generate` and
of the engine, and weights after 50 steps of training. Whoever changes them on purpose writes the file anew:

    python tests/test_golden.py

golden.json has tokens, {way: {case: name of its tokens}}; rows, {name: the tokens of each row, one letter a token};
weights, the sha256 of a state dict; and machine, on which it was written. Weights, and tokens of quantised weights or
caches, depend on how a processor rounds: they are compared on the same kind only. Tokens of 32-bit floats do not, but
where two logits are equal to the last bit or two.
"""
import hashlib
import itertools
import json
import os
import platform
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE)] * (__name__ == '__main__')

import pytest
import torch
from conftest import sizes

from decode.cpu import CPUExecutor
from decode.eager import EagerExecutor, UncachedExecutor
from engine import Engine, pool_for
from kvcache import NoPool, PagePool
from kvcache.llamacpp.pool import CellPool
from model import GPT, GPTConfig

PATH = os.path.join(HERE, 'golden.json')
BLOCK, VOCAB = 24, 29
LETTERS = 'abcdefghijklmnopqrstuvwxyz.,-'  # of the vocabulary, to write tokens down
PROMPTS = {
    'one': [[5, 9, 2]],
    'batch': [[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8], [9, 7, 9, 3, 2, 3], [8, 4, 6, 2, 6, 4]],
    'full': [[i % VOCAB for i in range(BLOCK)], [(i + BLOCK) % VOCAB for i in range(BLOCK)]],
    'longer': [[(7 * i) % VOCAB for i in range(n, n + BLOCK + 5)] for n in (0, BLOCK + 5)],
    'ragged': [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [28, 27], [0] * 20, list(range(BLOCK)), [*range(VOCAB), 3, 1]],
    'list': [[7, 7, 7], [1, 2, 3]]}
SAMPLINGS = {'greedy': dict(temperature=0), 'plain': dict(), 'top_k': dict(temperature=0.8, top_k=7),
             'top_p': dict(temperature=1.3, top_p=0.9), 'stop': dict(stop_ids=[4])}
WHEN_FULL = {'crop': dict(), 'shift': dict(when_full='shift'), 'keep': dict(when_full='shift', keep=5, n_keep=2)}


def on_cpu(weights='float32', threads=1):
    return lambda model: CPUExecutor(model, weights, threads)


def pages(config, n):
    return PagePool(8 * n, 4)


def streams(config, n):
    return CellPool(config, n, config.block_size, unified=False)


# each way to generate: with how many of the 90 cases it is tried, its executor, its pool, kv_bits
FLOATS = {
    'uncached': (90, UncachedExecutor, lambda config, n: NoPool(), 0),
    'eager': (90, EagerExecutor, pages, 0),
    'cpu float32': (90, on_cpu(), pages, 0),
    'cpu float32 2 threads': (30, on_cpu(threads=2), pages, 0),
    'one page': (45, on_cpu(), lambda config, n: pool_for(config, n, config.block_size), 0),
    'streams': (45, on_cpu(), streams, 0),
    'unified': (45, on_cpu(), lambda config, n: CellPool(config, n, config.block_size), 0)}
ROUNDED = {
    'cpu bfloat16': (90, on_cpu('bfloat16'), pages, 0),
    'cpu int8': (90, on_cpu('int8'), pages, 0),
    'cpu int4': (90, on_cpu('int4'), pages, 0),
    'pages, 8 bits': (30, EagerExecutor, pages, 8),
    'streams, 8 bits': (30, EagerExecutor, streams, 8)}
SHAPES = (dict(), dict(bias=False, n_head=4), dict(n_layer=3, n_embd=48, n_head=3))


def make_model(seed, **changes):
    """A small model whose weights are so large that its tokens vary."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**dict(block_size=BLOCK, vocab_size=VOCAB, n_layer=2, n_head=2, n_embd=32) | changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def cases():
    """(name, number) of each case, in a random order. The number decides the shape, the seeds and the length."""
    named = [(' '.join(names), i) for i, names in enumerate(itertools.product(PROMPTS, SAMPLINGS, WHEN_FULL))]
    return random.Random(0).sample(named, len(named))


def by_engine(way, name, i, models):
    """The tokens of a case by the engine: a list of rows, without the prompt."""
    prompt, sampling, when_full = name.split()
    prompts, n, model = PROMPTS[prompt], 1 + i % 2 * 2, models[i // 3 % len(models)]
    _, executor, pool, kv_bits = (FLOATS | ROUNDED)[way]
    engine = Engine(model, executor(model), pool(model.config, n * len(prompts)), kv_bits=kv_bits)
    new = engine.generate(prompts, 2 * BLOCK + i % 7, n, 1000 + i, **SAMPLINGS[sampling], **WHEN_FULL[when_full])
    return [row[len(prompts[i // n]):] for i, row in enumerate(new)]


def by_model(i, models, use_cache):
    """The tokens of model.generate itself: a tensor, one generator, contexts that are cropped."""
    settings = [dict(temperature=0), dict(), dict(temperature=0.8, top_k=7), dict(temperature=1.3, top_p=0.9)][i % 4]
    idx = torch.tensor(PROMPTS[('one', 'batch', 'full', 'longer')[i // 4 % 4]])
    torch.manual_seed(i)
    generator = torch.Generator().manual_seed(i) if i % 5 < 2 else None
    new = models[i % len(models)].generate(idx, 2 * BLOCK, use_cache=use_cache, generator=generator, **settings)
    return new[:, idx.size(1):].tolist()


def tokens(way, part=1):
    """{case: its rows, as letters} of a way: 'plain' is the model's own. part: of every `part`-th case."""
    models = [make_model(7 + i, **shape) for i, shape in enumerate(SHAPES)]
    if way == 'plain':
        found = {f'{i} {"cached" if use_cache else "uncached"}': by_model(i, models, use_cache)
                 for i in range(0, 32, part) for use_cache in (False, True)}
    else:
        found = {case: by_engine(way, case, i, models) for case, i in cases()[:(FLOATS | ROUNDED)[way][0]:part]}
    return {case: [''.join(LETTERS[token] for token in row) for row in rows] for case, rows in found.items()}


def trained():
    """The sha256 of a state dict after 50 steps of AdamW with dropout, clipping and accumulation."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(block_size=16, vocab_size=VOCAB, n_layer=2, n_head=2, n_embd=32, dropout=0.1))
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.99), 'cpu')
    generator = torch.Generator().manual_seed(4)
    for _ in range(50):
        for _ in range(2):
            batch = (torch.randint(VOCAB, (8, 1), generator=generator) + torch.arange(17) ** 2) % VOCAB
            (model(batch[:, :-1], batch[:, 1:])[1] / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    digest = hashlib.sha256()
    for name, w in sorted(model.state_dict().items()):
        digest.update(f'{name} {w.dtype} {tuple(w.shape)} '.encode())
        digest.update(w.contiguous().numpy().tobytes())
    return digest.hexdigest()


def machine():
    processor = platform.processor()
    if os.path.exists('/proc/cpuinfo'):
        with open('/proc/cpuinfo') as f:
            processor = next((line.split(':')[1].strip() for line in f if line.startswith('model name')), processor)
    return {'processor': processor, 'capability': torch.backends.cpu.get_cpu_capability(), 'torch': torch.__version__}


def golden():
    with open(PATH) as f:
        return json.load(f)


EXPECTED = golden()
elsewhere = pytest.mark.skipif(machine() != EXPECTED['machine'], reason=f"bits depend on processor and torch: "
                               f"golden.json was made on {EXPECTED['machine']}, this is {machine()}")


@pytest.mark.parametrize('way', ['plain', *FLOATS, *(pytest.param(way, marks=elsewhere) for way in ROUNDED)])
def test_tokens(way):
    found = tokens(way, part=sizes(15, 1))
    assert found == {case: EXPECTED['rows'][EXPECTED['tokens'][way][case]] for case in found} != {}


@elsewhere
def test_weights_after_50_steps():
    assert trained() == EXPECTED['weights']['loop']


def write():
    torch.set_num_threads(1)
    made = {'machine': machine(), 'weights': {'loop': trained()}, 'tokens': {}, 'rows': {}}
    for way in ('plain', *FLOATS, *ROUNDED):
        made['tokens'][way] = {}
        for case, rows in tokens(way).items():
            name = made['tokens'][way][case] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]
            made['rows'][name] = rows
    with open(PATH, 'w') as f:
        json.dump(made, f, indent=0, separators=(',', ':'))
        f.write('\n')


if __name__ == '__main__':
    write()
