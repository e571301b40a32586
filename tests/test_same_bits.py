"""
`execute_model`: the logits of a token have the same bits whatever else is in the step, however its text was divided, in
whichever slots its keys are, and on any number of threads. (That they are those of a float64 judge: test_caches.py.)
"""
import copy
import itertools
import random

import numpy as np
import pytest
import torch
from conftest import sizes
from example_models import large

from decode.cpu import CPUDecoder
from decode.eager import EagerDecoder
from decode.kernel.threads import n_cores
from decode.metadata import InputMetadata, KVArrays, Runs
from kvcache.storage import make_layers

KINDS = [dict(), dict(position='rope', n_kv_head=2), dict(position='alibi', n_kv_head=1), dict(position='none'),
         dict(position='rope', window=9, n_sink=2), dict(position='alibi', n_kv_head=2, window=21, n_sink=3),
         dict(window=20, gelu='tanh'), dict(position='rope', n_kv_head=2, norm='rms', mlp='swiglu', n_inner=100),
         dict(position='rope', norm='rms', mlp='swiglu', head_dim=32, qk_norm=True, qkv_bias=True, bias=False)]
SHAPES = [dict(n_embd=64, n_head=4), dict(n_embd=128, n_head=4), dict(n_embd=24, n_head=4)]  # head_dim 16, 32, 6
N_SLOTS, PAGE = 1280, 16
threads = [n for n in (1, 2) if n <= n_cores()]


class Store:
    """Slots for sequences, given out as pages, as single cells or side by side. Slots begin as NaN."""

    def __init__(self, model, layout='pages', kind='float32', seed=0):
        self.layers, self.chooser = make_layers(model, N_SLOTS, kind), random.Random(seed)
        for layer in self.layers:
            for t in layer.tensors():
                if t.is_floating_point():
                    t.fill_(float('nan'))
        self.kv, self.layout, self.runs, self.length = KVArrays.of_layers(self.layers), layout, {}, {}
        size = dict(pages=PAGE, cells=1, rows=N_SLOTS // 9)[layout]
        self.size, self.free = size, list(range(0, N_SLOTS - size + 1, size))
        if layout != 'rows':
            self.chooser.shuffle(self.free)

    def feed(self, decoder, work, n_threads=None, wanted=None):
        """work: {name: token ids}. Logits of all new tokens, {name: (T, vocab_size)}."""
        ids, positions = [], []
        for name, new in work.items():
            runs, length = self.runs.setdefault(name, Runs()), self.length.get(name, 0)
            held = int(runs.table[runs.n - 1, [0, 2]].sum()) if runs.n else 0
            while held < length + len(new):
                runs.append(held, self.free.pop(), self.size)
                held += self.size
            ids += new
            positions += range(length, length + len(new))
            self.length[name] = length + len(new)
        metadata = InputMetadata([*map(len, work.values())], [self.runs[name] for name in work], np.arange(len(ids)))
        how = dict(n_threads=n_threads) if n_threads else {}
        logits = decoder.execute_model(torch.tensor(ids), np.array(positions), self.kv, metadata, **how)
        return dict(zip(work, logits.split([*map(len, work.values())])))


def chunks(tokens, chooser):
    while tokens:
        n = min(len(tokens), chooser.choice([1, 1, 1, 2, 3, 5, 8, 9, 17, 40]))
        yield tokens[:n]
        tokens = tokens[n:]


def model_of(case, seed=0):
    return large(seed, torch.float32, block_size=64, n_layer=2, **case)


def texts(n, length, seed):
    return [torch.randint(29, (length,), generator=torch.Generator().manual_seed(seed * 100 + i)).tolist()
            for i in range(n)]


def expected_logits(decoder, texts, kind='float32'):
    """Each text alone, token by token, on one thread, its slots side by side: (T, vocab_size) each."""
    logits = []
    for text in texts:
        store = Store(decoder.model, 'rows', kind)
        logits.append(torch.cat([store.feed(decoder, {0: [token]}, 1)[0] for token in text]))
    return logits


@pytest.mark.parametrize('weights, kv', [
    ('float32', 'float32'), ('bfloat16', 'float32'), ('int8', 'float32'), ('int4', 'float32'), ('float32', 'bfloat16'),
    ('float32', 'int8')])
@pytest.mark.parametrize('case', [shape | kind for shape, kind in zip(itertools.cycle(SHAPES), KINDS)],
                         ids=lambda case: ' '.join(map(str, case.values())))
def test_the_same_bits_in_any_step(case, weights, kv):
    if kv == 'int8' and case['n_embd'] < 128:
        case = case | dict(n_embd=128)  # 32 channels have a scale
    decoder = CPUDecoder(model_of(case), weights, max(threads))
    for seed in range(sizes(1, 6 if kv == 'float32' else 1)):
        chooser, n = random.Random(seed), random.Random(seed).choice([2, 5, 9])
        all_texts = texts(n, 60, seed)
        expected = expected_logits(decoder, all_texts, kv)
        for layout in sizes(('cells',), ('pages', 'cells', 'rows')):
            store = Store(decoder.model, layout, kv, seed)
            pending = {i: list(chunks(text, chooser)) for i, text in enumerate(all_texts)}
            while any(pending.values()):
                live = [i for i in pending if pending[i] and chooser.random() < 0.7]
                at = {i: store.length.get(i, 0) for i in live}
                work = {i: pending[i].pop(0) for i in live}
                if not live:
                    continue
                for i, got in store.feed(decoder, work, chooser.choice(threads)).items():
                    assert torch.equal(got, expected[i][at[i]:at[i] + len(got)]), (layout, i, at[i], len(got))
        if weights == 'float32':
            for text, got in zip(all_texts, expected):
                worst, reference = 1e-4, reference_logits(decoder.model, text)
                if kv != 'float32':  # a number between two others may be rounded either way
                    worst = 5e-3
                    reference = Store(decoder.model, 'rows', kv).feed(EagerDecoder(decoder.model), {0: text})[0]
                assert (got - reference).abs().max() < worst * reference.abs().max()


@pytest.mark.parametrize('weights', ['float32', 'bfloat16', 'int8', 'int4'])
def test_batches_of_1_to_64(weights):
    decoder, all_texts = CPUDecoder(model_of(SHAPES[1]), weights), texts(64, 6, 1)
    expected = expected_logits(decoder, all_texts)
    for B in sizes((2, 3, 8, 17, 64), range(2, 65)):
        store = Store(decoder.model, 'pages')
        for t in range(6):
            for i, got in store.feed(decoder, {i: [all_texts[i][t]] for i in range(B)}).items():
                assert torch.equal(got[0], expected[i][t]), (B, i, t)


def reference_logits(model, text):
    """The model's own uncached pass in float64."""
    idx = torch.tensor([text])
    with torch.no_grad():
        return copy.deepcopy(model).double()(idx, idx)[0][0].float()
