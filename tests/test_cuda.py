"""
On CUDA: the model, the engine and the model's recorded step give logits and tokens of the CPU's float32 model; and the
GPU's executor gives the same bits at full size.
"""
import random

import pytest
import torch
from conftest import sizes
from test_gpu_executor import POOLS, check_random_texts, engine_of, feed, holding, run, sequence_of
from tiny_models import MODELS, VOCAB, model_of

import decode
from benchmarks.shapes import GPTS, model_with_varied_text
from decode.gpu.executor import GPUExecutor
from decode.gpu.graphs import GraphStep
from engine import Engine
from kvcache import BlockPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

BLOCK = 40
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [0] * 20, [i % VOCAB for i in range(BLOCK)], [3, 2, 1]]


@pytest.fixture(autouse=True)
def full_float32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest')  # no TF32 in what the kernels are compared with
    yield
    torch.set_float32_matmul_precision(before)


def models(kind):
    return model_of(kind), model_of(kind).cuda()


def close(got, expected):
    torch.testing.assert_close(got.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('name', MODELS)
@torch.no_grad()
def test_logits_are_those_of_the_cpu(name):
    cpu, cuda = models(name)
    idx = torch.randint(VOCAB, (2, BLOCK))
    expected, cache, end = cpu(idx, idx)[0], None, 0
    close(cuda(idx.cuda(), idx.cuda())[0], expected)
    for n in (5, 1, 1, 9, 1, BLOCK - 17):
        end += n
        logits, _, cache = cuda(idx[:, end - n:end].cuda(), kv_cache=cache, use_cache=True)
        close(logits[:, 0], expected[:, end - 1])


@pytest.mark.parametrize('by', ['the model', 'graph'])
@pytest.mark.parametrize('name', MODELS)
def test_generate_gives_the_tokens_of_the_uncached_model_on_the_cpu(name, by):
    cpu, cuda = models(name)
    how = dict(use_cache=True, step=GraphStep(cuda) if by == 'graph' else None)
    for prompts in [PROMPTS[0]], [PROMPTS[0], [7, 8, 9]], [PROMPTS[4]]:
        idx = torch.tensor(prompts)
        assert torch.equal(cuda.generate(idx.cuda(), 2 * BLOCK, 0, **how).cpu(), cpu.generate(idx, 2 * BLOCK, 0))
    drawn = [cuda.generate(idx.cuda(), 2 * BLOCK, 0.8, 20, generator=torch.Generator('cuda').manual_seed(1), **cached)
             for cached in (dict(), how)]
    assert torch.equal(*drawn)


@pytest.mark.parametrize('executor', ['eager', 'gpu'])
@pytest.mark.parametrize('name', MODELS)
def test_the_engine_gives_the_tokens_of_the_cpu(name, executor):
    """
    In each pool. Two scores of a draw may be nearly equal: then a text is another. And with keys in int8, of which one
    between two codes may be rounded either way.
    """
    cpu, cuda = models(name)
    made, slides = decode.best(cuda, 6, name=executor), cpu.config.max_positions == BLOCK
    assert isinstance(made, GPUExecutor) == (executor == 'gpu')
    for how, n_other in ((dict(temperature=0.0), 0), (dict(temperature=0.8, top_p=0.9), 1),
                         *[(dict(temperature=0.0, when_full='shift'), 0)] * slides):
        expected = Engine(cpu).generate(PROMPTS, 2 * BLOCK, **how)
        for pool in POOLS.values():
            got = Engine(cuda, made, pool(cpu.config)).generate(PROMPTS, 2 * BLOCK, **how)
            assert sum(a != b for a, b in zip(got, expected)) <= n_other
    texts = [Engine(m, of, kv_bits=8).generate(PROMPTS, BLOCK, temperature=0.0)
             for m, of in ((cpu, None), (cuda, made))]
    same = [a == b for row in zip(*texts) for a, b in zip(*row)]
    assert sum(same) > 0.9 * len(same)


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
            out, start = feed(executor, pool, new, dict.fromkeys(sequences, 1), logprobs=True), start + n
            for s in sequences:
                s.tokens.pop()  # what was drawn
        for s in sequences:
            pool.free(s)
        return torch.cat([of_s.logits for of_s in out])
    expected = logits_of(range(256), [299, 1])
    for first, n, chunks in (0, 1, [300]), (7, 1, [1] * 300), (3, 9, [128, 100, 72]), (100, 40, [17] * 17 + [11]), (
            0, 256, [100, 100, 100]):
        assert torch.equal(logits_of(range(first, first + n), chunks), expected[first:first + n])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_triton_kernels_on_another_gpu():
    """While the first GPU is the current one; and another executor makes steps in between."""
    cpu, cuda = models('rope')
    engines = [Engine(m, decode.best(m, 1, name='gpu')) for m in (cuda, model_of('rope').to('cuda:1'), cuda)]
    sequences = [engine.add([1, 2, 3], 20, temperature=0.0)[0] for engine in engines]
    while not all(s.ended for s in sequences):
        for engine in engines:
            engine.step()
    expected, = Engine(cpu).generate([[1, 2, 3]], 20, temperature=0.0)
    assert [s.tokens for s in sequences] == [expected] * 3
