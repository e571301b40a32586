"""The GPU's executor on a GPU: tokens of the CPU's model, the same bits at full size, and launches ahead."""
import random

import pytest
import torch
from conftest import needs, sizes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
needs('triton')

from test_gpu_executor import POOLS, check_random_texts, engine_of, feed, holding, run, sequence_of
from tiny_models import MODELS, model_of

import decode
from benchmarks.shapes import GPTS, model_with_varied_text
from decode.gpu.executor import GPUExecutor
from engine import Engine
from kvcache import BlockPool


@pytest.fixture(autouse=True)
def full_float32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest')  # no TF32 in what the kernels are compared with
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize('kind', MODELS)
def test_it_gives_the_tokens_of_the_cpu(kind):
    """In several steps a call, in each pool. Two scores may be nearly equal: then a draw may be another."""
    cpu, cuda, prompts = model_of(kind), model_of(kind).cuda(), [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [0] * 20]
    executor = decode.best(cuda, 4, name='gpu')
    assert isinstance(executor, GPUExecutor)
    for how, n_other in (dict(temperature=0.0), 0), (dict(temperature=0.8, top_p=0.9), 1):
        expected = Engine(cpu).generate(prompts, 50, **how)
        for pool in POOLS.values():
            got = Engine(cuda, executor, pool(cpu.config)).generate(prompts, 50, **how)
            assert sum(a != b for a, b in zip(got, expected)) <= n_other


@pytest.mark.parametrize('kind', MODELS)
@pytest.mark.parametrize('pool', POOLS)
def test_logits_are_those_of_a_text_without_a_cache(pool, kind):
    for seed in range(sizes(1, 3)):
        m = model_of(kind, seed).cuda()
        slots = POOLS[pool](m.config)
        check_random_texts(holding(GPUExecutor(m), slots), slots, model_of(kind, seed), seed, 80)


@pytest.mark.parametrize('dtype, weights', [('bfloat16', 'float32'), ('float32', 'float32'), ('bfloat16', 'int8')])
def test_no_sequence_of_many_depends_on_its_company(dtype, weights):
    """Each with others, in small pools with preemption and shared prefixes, and alone: 0 tokens differ."""
    m = model_with_varied_text(GPTS['M']).to('cuda', getattr(torch, dtype))
    executor, choose = GPUExecutor(m, weights), random.Random(0)
    prefixes = [[choose.randrange(65) for _ in range(40)] for _ in range(5)]
    asks = [(prefixes[i % 5][:choose.randrange(40)] + [choose.randrange(65)], choose.randint(1, 60))
            for i in range(sizes(300, 3500))]
    hows = [dict(), dict(temperature=0.8, top_k=20), dict(top_p=0.9), dict(frequency_penalty=0.5)]

    def drawn(engine, i, **how):
        return engine.add(*asks[i], seed=i, **how, **hows[i % 4])[0]
    crowded = engine_of(executor, 400, 16, 512)
    found = [drawn(crowded, i) for i in range(len(asks))]
    run(crowded)
    assert crowded.scheduler.n_preempted
    alone = engine_of(executor, 40, 16, 512)
    for i, s in enumerate(found):
        expected = drawn(alone, i, salt=str(i))
        run(alone)
        assert s.tokens == expected.tokens, i


def test_rows_have_their_bits_in_batches_of_all_sizes():
    m = model_with_varied_text(GPTS['L']).to('cuda', torch.bfloat16)
    texts = torch.randint(50304, (256, 300)).tolist()
    pool = BlockPool(256 * 19, 16)
    executor = holding(GPUExecutor(m), pool)

    def logits_of(rows, chunks):
        sequences, start = [sequence_of(m.config) for _ in rows], 0
        for s in sequences:
            pool.begin(s)
        for n in chunks:
            new = {s: texts[row][start:start + n] for s, row in zip(sequences, rows)}
            out, start = feed(executor, pool, new, dict.fromkeys(sequences, 1), kept=True), start + n
            for s in sequences:
                s.tokens.pop()  # what was drawn
        for s in sequences:
            pool.free(s)
        return torch.cat([of_s.logits for of_s in out])
    expected = logits_of(range(256), [299, 1])
    for first, n, chunks in (0, 1, [300]), (7, 1, [1] * 300), (3, 9, [128, 100, 72]), (100, 40, [17] * 17 + [11]), (
            0, 256, [100, 100, 100]):
        assert torch.equal(logits_of(range(first, first + n), chunks), expected[first:first + n])
