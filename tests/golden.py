"""
What the code computes, down to the bit, in one file: a change that must not change it is held against that file.

    python tests/golden.py           compute everything again and say what differs from golden.json; exit code 1 if so
    python tests/golden.py --write   write golden.json

golden.json has:

tokens    what `GPT.generate` draws ('plain'), and what the engine draws for all kinds of prompts, samplings, full
          contexts, executors and pools: {way: {case: name of its tokens}}, and `rows`: {name: the tokens of each row},
          one letter a token
weights   the bytes of a model's state dict after 50 steps of training, as sha256, by a loop here and by train.py
machine   on which processor and torch the file was made

Weights, and tokens of quantised weights or caches, depend on how a processor rounds: on another one they may differ.
Tokens of 32-bit floats do not, but where two logits are equal to the last bit or two.
"""
import argparse
import hashlib
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:0] = [ROOT] if ROOT not in sys.path else []

import torch

import tokenizer
from decode.cpu import CPUExecutor
from decode.eager import EagerExecutor, UncachedExecutor
from engine import Engine, pool_for
from kvcache import BlockPool, NoPool
from kvcache.llamacpp.pool import CellPool
from model import GPT, GPTConfig
from whole_file import replacing

PATH = os.path.join(HERE, 'golden.json')


BLOCK, VOCAB = 24, 29
LETTERS = 'abcdefghijklmnopqrstuvwxyz.,-'  # of the vocabulary, to write tokens down
PROMPTS = {
    'one': [[5, 9, 2]],
    'batch': [[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8], [9, 7, 9, 3, 2, 3], [8, 4, 6, 2, 6, 4]],
    'full': [[i % VOCAB for i in range(BLOCK)], [(i + BLOCK) % VOCAB for i in range(BLOCK)]],
    'longer': [[(7 * i) % VOCAB for i in range(n, n + BLOCK + 5)] for n in (0, BLOCK + 5)],
    'ragged': [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [28, 27], [0] * 20, list(range(BLOCK)), [*range(VOCAB), 3, 1]],
    'list': [[7, 7, 7], [1, 2, 3]],
}
SAMPLINGS = {
    'greedy': dict(temperature=0),
    'plain': dict(),
    'top_k': dict(temperature=0.8, top_k=7),
    'top_p': dict(temperature=1.3, top_p=0.9),
    'stop': dict(stops=[4]),
}
WHEN_FULL = {
    'crop': dict(),
    'shift': dict(when_full='shift'),
    'keep': dict(when_full='shift', keep=5, n_keep=2),
}


def on_cpu(weights='float32', threads=1):
    return lambda model: CPUExecutor(model, weights, threads)


def pages(config, n):
    return BlockPool(8 * n, 4)


def streams(config, n):
    return CellPool(config, n, config.block_size, unified=False)


def unified(config, n):
    return CellPool(config, n, config.block_size)


# each way to generate: with how many of the 90 cases it is tried, its executor, its pool, kv_bits
FLOATS = {
    'uncached': (90, UncachedExecutor, lambda config, n: NoPool(), 0),
    'eager': (90, EagerExecutor, pages, 0),
    'cpu float32': (90, on_cpu(), pages, 0),
    'cpu float32 2 threads': (30, on_cpu(threads=2), pages, 0),
    'one page': (45, on_cpu(), lambda config, n: pool_for(config, n, config.block_size), 0),
    'streams': (45, on_cpu(), streams, 0),
    'unified': (45, on_cpu(), unified, 0),
}
ROUNDED = {
    'cpu bfloat16': (90, on_cpu('bfloat16'), pages, 0),
    'cpu int8': (90, on_cpu('int8'), pages, 0),
    'cpu int4': (90, on_cpu('int4'), pages, 0),
    'pages, 8 bits': (30, EagerExecutor, pages, 8),
    'streams, 8 bits': (30, EagerExecutor, streams, 8),
}
WAYS = ['plain', *FLOATS, *ROUNDED]
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
    """(name, number) of each case, in a random order. The number decides the shape, the generators and the length."""
    named = [(' '.join(names), i) for i, names in enumerate(itertools.product(PROMPTS, SAMPLINGS, WHEN_FULL))]
    return random.Random(0).sample(named, len(named))


def run_case(way, name, i, models):
    """The tokens of a case by the engine: a list of rows, without the prompt."""
    prompt, sampling, when_full = name.split()
    prompts, n, model = PROMPTS[prompt], 1 + i % 2 * 2, models[i // 3 % len(models)]
    _, executor, pool, kv_bits = (FLOATS | ROUNDED)[way]
    engine = Engine(model, executor(model), pool(model.config, n * len(prompts)), kv_bits=kv_bits)
    new = engine.generate(prompts, 2 * BLOCK + i % 7, n, 1000 + i, **SAMPLINGS[sampling], **WHEN_FULL[when_full])
    return [row[len(prompts[i // n]):] for i, row in enumerate(new)]


def run_plain(i, models, use_cache):
    """The tokens of model.generate itself: a tensor, one generator, contexts that are cropped."""
    settings = [dict(temperature=0), dict(), dict(temperature=0.8, top_k=7), dict(temperature=1.3, top_p=0.9)][i % 4]
    idx = torch.tensor(PROMPTS[('one', 'batch', 'full', 'longer')[i // 4 % 4]])
    torch.manual_seed(i)
    generator = torch.Generator().manual_seed(i) if i % 5 < 2 else None
    new = models[i % len(models)].generate(idx, 2 * BLOCK, use_cache=use_cache, generator=generator, **settings)
    return new[:, idx.size(1):].tolist()


def tokens(way, part=1):
    """({case: name of its tokens}, {name: rows}) of one of WAYS; part: of every `part`-th case."""
    models, of_case, rows_of = [make_model(7 + i, **shape) for i, shape in enumerate(SHAPES)], {}, {}
    if way == 'plain':
        found = ((f'{i} {"cached" if use_cache else "uncached"}', run_plain(i, models, use_cache))
                 for i in range(0, 32, part) for use_cache in (False, True))
    else:
        found = ((case, run_case(way, case, i, models)) for case, i in cases()[:(FLOATS | ROUNDED)[way][0]:part])
    for case, rows in found:
        text = [''.join(LETTERS[token] for token in row) for row in rows]
        of_case[case] = hashlib.sha256(json.dumps(text).encode()).hexdigest()[:12]
        rows_of[of_case[case]] = text
    return of_case, rows_of


def hash_of(state_dict):
    """sha256 of all names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name, w in sorted(state_dict.items()):
        digest.update(f'{name} {w.dtype} {tuple(w.shape)} '.encode())
        digest.update(w.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def trained_by_hand():
    """50 steps of AdamW with dropout, clipping and accumulation; the state dict."""
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
    return model.state_dict()


SETTINGS = ['--device=cpu', '--dataset=made_up', '--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=16',
            '--batch_size=8', '--gradient_accumulation_steps=2', '--eval_iters=2', '--eval_interval=20',
            '--warmup_iters=5', '--lr_decay_iters=50', '--learning_rate=1e-2', '--dropout=0.1', '--max_iters=50']


def trained_by_script():
    """train.py on a made-up text, 50 iterations; the state dict in its checkpoint."""
    words = ['the', 'cache', 'holds', 'keys', 'and', 'values', 'of', 'all', 'positions']
    text = ' '.join(random.Random(5).choices(words, k=2000))
    characters = tokenizer.CharTokenizer.of_text(text)
    ids = torch.tensor(characters.encode(text), dtype=torch.uint16).numpy()
    meta = characters.state() | {'vocab_size': characters.vocab_size, 'dtype': 'uint16', 'source': 'made up'}
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, 'data', 'made_up')
        os.makedirs(data)
        for name, content in (('train.bin', ids[:-1000].tobytes()), ('val.bin', ids[-1000:].tobytes()),
                              ('meta.json', json.dumps(meta).encode())):
            with open(os.path.join(data, name), 'wb') as f:
                f.write(content)
        done = subprocess.run([sys.executable, os.path.join(ROOT, 'train.py'), *SETTINGS], cwd=folder, text=True,
                              capture_output=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
        if done.returncode:
            raise RuntimeError(f"train.py ended with exit code {done.returncode}:\n{done.stderr}")
        return torch.load(os.path.join(folder, 'out', 'ckpt.pt'), weights_only=True)['model']


def weights():
    return {'loop': hash_of(trained_by_hand()), 'train.py': hash_of(trained_by_script())}


def machine():
    processor = platform.processor()
    if os.path.exists('/proc/cpuinfo'):
        with open('/proc/cpuinfo') as f:
            processor = next((line.split(':')[1].strip() for line in f if line.startswith('model name')), processor)
    return {'processor': processor, 'capability': torch.backends.cpu.get_cpu_capability(), 'torch': torch.__version__}


def golden():
    with open(PATH) as f:
        return json.load(f)


def differences(expected, way, of_case, rows_of):
    """A line for each case of a way whose tokens are not those of golden.json, or that golden.json does not have."""
    lines = []
    for case, name in of_case.items():
        was = expected['tokens'].get(way, {}).get(case)
        if was is None:
            lines.append(f"{way}, {case}: not in {os.path.basename(PATH)}")
        elif name != was:
            pairs = list(zip(rows_of[name], expected['rows'][was]))
            row = next((i for i, (now, before) in enumerate(pairs) if now != before), len(pairs) - 1)
            now, before = pairs[row]
            at = len(os.path.commonprefix([now, before]))
            lines.append(f"{way}, {case}: row {row} differs from token {at} on: {now[at:at + 12]!r}, "
                         f"was {before[at:at + 12]!r}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--write', action='store_true', help='write golden.json')
    write = parser.parse_args().write
    torch.set_num_threads(1)
    start, made, lines = time.perf_counter(), {'machine': machine(), 'weights': weights(), 'tokens': {}, 'rows': {}}, []
    expected = None if write else golden()
    for way in WAYS:
        of_case, rows_of = tokens(way)
        made['tokens'][way] = of_case
        made['rows'] |= rows_of
        lines += differences(expected, way, of_case, rows_of) if expected else []
    n_cases = sum(map(len, made['tokens'].values()))
    print(f"{n_cases} generations, {len(made['rows'])} of them different, and 2 trainings in "
          f"{time.perf_counter() - start:.0f} s")
    if write:
        with replacing(PATH, 'w') as f:
            json.dump(made, f, indent=0, separators=(',', ':'))
            f.write('\n')
        return 0
    lines += [f"weights trained by {name} differ" for name, was in expected['weights'].items()
              if made['weights'][name] != was]
    if made['machine'] != expected['machine']:
        print(f"golden.json was made on {expected['machine']}, this is {made['machine']}")
    print('\n'.join(lines) or 'all as in golden.json')
    return 1 if lines else 0


if __name__ == '__main__':
    sys.exit(main())
