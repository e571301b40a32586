"""
What the code computes, down to the bit, is what it computed when golden.json was written: tokens of `GPT.generate` and
of the engine, and weights after 50 steps of training. Whoever changes them on purpose writes the file anew:

    python tests/test_golden.py

golden.json has tokens, {way: {case: the tokens of each row, one letter a token}}; weights, the sha256 of a state dict;
and machine, on which it was written. Weights, and tokens of rounded weights or keys, depend on how a processor rounds:
they are compared on the same kind only. Tokens of 32-bit floats do not, but where two logits are equal to the last bit
or two. That other pools and executors give the same tokens: test_engine.py.
"""
import hashlib
import itertools
import json
import os
import platform
import random
import re
import sys
from pathlib import Path

PATH = Path(__file__).with_name('golden.json')
sys.path[:0] = [str(PATH.parents[1])] * (__name__ == '__main__')

import pytest
import torch
from conftest import sizes
from tiny_models import VOCAB, model_of

from decode.cpu import CPUExecutor
from decode.eager import EagerExecutor
from engine import Engine
from kvcache import PagePool
from model import GPT, GPTConfig

BLOCK = 24
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
WAYS = 'model', 'float32', 'bfloat16', 'int8', 'int4', 'keys and values in 8 bits'  # of the engine but the first
SHAPES = dict(), dict(bias=False, n_head=4), dict(n_layer=3, n_embd=48, n_head=3)


def cases():
    """(name, number) of 30 cases, drawn from all. The number decides the shape, the seeds and the length."""
    named = [(' '.join(names), i) for i, names in enumerate(itertools.product(PROMPTS, SAMPLINGS, WHEN_FULL))]
    return random.Random(0).sample(named, len(named))[:30]


def by_engine(way, name, i, models):
    """The tokens of a case by the engine: a list of rows, without the prompt."""
    prompt, sampling, when_full = name.split()
    prompts, n, model, in_8_bits = PROMPTS[prompt], 1 + i % 2 * 2, models[i // 3 % len(models)], way == WAYS[-1]
    executor = EagerExecutor(model) if in_8_bits else CPUExecutor(model, way, 1)
    engine = Engine(model, executor, PagePool(8 * n * len(prompts), 4), kv_bits=8 * in_8_bits)
    new = engine.generate(prompts, 2 * BLOCK + i % 7, n, 1000 + i, **SAMPLINGS[sampling], **WHEN_FULL[when_full])
    return [row[len(prompts[i // n]):] for i, row in enumerate(new)]


def by_model(i, model):
    """The tokens of model.generate itself: one generator, contexts that are cropped; with the cache and without."""
    settings = [dict(temperature=0), dict(), dict(temperature=0.8, top_k=7), dict(temperature=1.3, top_p=0.9)][i % 4]
    idx, found = torch.tensor(PROMPTS[('one', 'batch', 'full', 'longer')[i // 4 % 4]]), []
    for use_cache in (False, True):
        torch.manual_seed(i)
        generator = torch.Generator().manual_seed(i) if i % 5 < 2 else None
        found.append(model.generate(idx, 2 * BLOCK, use_cache=use_cache, generator=generator, **settings))
    assert torch.equal(*found)
    return found[0][:, idx.size(1):].tolist()


def tokens(way, part=1):
    """{case: its rows, as letters} of a way. part: of every `part`-th case."""
    small = dict(block_size=BLOCK, n_head=2, n_embd=32, bias=True)
    models = [model_of('learned', 7 + i, **small | shape) for i, shape in enumerate(SHAPES)]
    if way == 'model':
        found = {str(i): by_model(i, models[i % len(models)]) for i in range(0, 32, part)}
    else:
        found = {case: by_engine(way, case, i, models) for case, i in cases()[::part]}
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


EXPECTED = json.loads(PATH.read_text())
elsewhere = pytest.mark.skipif(machine() != EXPECTED['machine'], reason=f"bits depend on processor and torch: "
                               f"golden.json was made on {EXPECTED['machine']}, this is {machine()}")


@pytest.mark.parametrize('way', [*WAYS[:2], *(pytest.param(way, marks=elsewhere) for way in WAYS[2:])])
def test_tokens(way):
    found = tokens(way, part=sizes(6, 1))
    assert found == {case: EXPECTED['tokens'][way][case] for case in found} != {}


@elsewhere
def test_weights_after_50_steps():
    assert trained() == EXPECTED['weights']


if __name__ == '__main__':
    torch.set_num_threads(1)
    made = {'machine': machine(), 'weights': trained(), 'tokens': {way: tokens(way) for way in WAYS}}
    text = json.dumps(made, indent=0, separators=(',', ':')) + '\n'
    PATH.write_text(re.sub(r'\[[^]]*]', lambda rows: rows[0].replace('\n', ''), text))  # a line for each case
