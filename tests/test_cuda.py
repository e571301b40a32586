"""On CUDA: logits and tokens are those of the CPU's float32 model; the GPU's executor gives the same bits."""
import copy
import random

import pytest
import torch
from conftest import sizes
from test_executors import Slots, Text, in_any_batches, judged, texts
from test_gpu_executor import engine_of, run
from tiny_models import MODELS, VOCAB, model_of

import decode
from benchmarks.shapes import GPTS, model_with_varied_text
from decode.gpu.executor import GPUExecutor
from engine import Engine
from kvcache.llamacpp.pool import CellPool

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
def test_generate_gives_the_tokens_of_the_uncached_model_on_the_cpu(name):
    (cpu, cuda), how = models(name), dict(use_cache=True)
    for prompts in [PROMPTS[0]], [PROMPTS[0], [7, 8, 9]], [PROMPTS[4]]:
        idx = torch.tensor(prompts)
        assert torch.equal(cuda.generate(idx.cuda(), 2 * BLOCK, 0, **how).cpu(), cpu.generate(idx, 2 * BLOCK, 0))
    drawn = [cuda.generate(idx.cuda(), 2 * BLOCK, 0.8, 20, generator=torch.Generator('cuda').manual_seed(1), **cached)
             for cached in (dict(), how)]
    assert torch.equal(*drawn)


@pytest.mark.parametrize('executor', ['eager', 'gpu'])
@pytest.mark.parametrize('name', MODELS)
def test_the_engine_gives_the_tokens_of_the_cpu(name, executor):
    """In pages and in cells. One text may be another, where scores are nearly equal, and some with keys in int8."""
    cpu, cuda = models(name)
    made, slides = decode.best(cuda, 6, name=executor.replace('gpu', 'auto')), cpu.config.max_positions == BLOCK
    assert isinstance(made, GPUExecutor) == (executor == 'gpu')
    for how, n_other in ((dict(temperature=0.0), 0), (dict(temperature=0.8, top_p=0.9), 1),
                         *[(dict(temperature=0.0, when_full='shift'), 0)] * slides):
        expected = Engine(cpu).generate(PROMPTS, 2 * BLOCK, **how)
        for pool in None, CellPool(cpu.config, 5, cpu.config.n_slots):
            got = Engine(cuda, made, pool).generate(PROMPTS, 2 * BLOCK, **how)
            assert sum(a != b for a, b in zip(got, expected)) <= n_other
    in_int8 = [Engine(m, of, kv_bits=8).generate(PROMPTS, BLOCK, temperature=0.0)
               for m, of in ((cpu, None), (cuda, made))]
    same = [a == b for row in zip(*in_int8) for a, b in zip(*row)]
    assert sum(same) > 0.9 * len(same)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_no_sequence_of_many_depends_on_its_company(dtype):
    """Each in two small pools with preemption, shared prefixes and other company, and alone: 0 tokens differ."""
    m = model_with_varied_text(GPTS['M']).to('cuda', getattr(torch, dtype))
    executor, choose = GPUExecutor(m), random.Random(0)
    prefixes = [[choose.randrange(65) for _ in range(40)] for _ in range(5)]
    asks = [(prefixes[i % 5][:choose.randrange(40)] + [choose.randrange(65)], choose.randint(1, 60))
            for i in range(sizes(300, 10_000))]
    hows = [dict(), dict(temperature=0.8, top_k=20), dict(top_p=0.9), dict(frequency_penalty=0.5)]

    def begun(engine, i, **how):
        return engine.add(*asks[i], seed=i, **how, **hows[i % 4])[0]

    def in_company(numbers, *pool, **more):
        engine = engine_of(executor, *pool)
        found = {i: begun(engine, i, **more if i % 50 == 7 else {}) for i in numbers}
        run(engine)
        assert engine.scheduler.n_preempted
        return [found[i].tokens for i in range(len(asks))]
    texts_of = in_company(range(len(asks)), 100, 16, 512, logprobs=True)
    assert texts_of == in_company(reversed(range(len(asks))), 220, 8, 90, prompt_logits=True)
    alone = engine_of(executor, 40, 16, 512)
    for i in range(0, len(asks), 4):
        s = begun(alone, i, salt=str(i))
        run(alone)
        assert s.tokens == texts_of[i], i


@pytest.mark.parametrize('shape', ['L', 'rope'])
def test_rows_have_their_bits_in_batches_of_all_sizes(shape):
    """Of 124M parameters; and of a tiny model, also with the judge's logits, after a window that has gone round."""
    m = model_with_varied_text(GPTS['L']).to('cuda', torch.bfloat16) if shape == 'L' else model_of(
        'rope window sinks', block_size=2000).cuda()
    executor, chooser = GPUExecutor(m), random.Random(0)
    all_texts = texts(*((256, 60) if shape == 'L' else (9, 1000)))
    expected = judged(copy.deepcopy(m).cpu(), all_texts[:9]) if shape != 'L' else None
    first = Slots(executor, 'rows' if shape != 'L' else 'pages', n_slots=256 * 64)
    same = [torch.cat([first.logits({own: 1})[0][-1:] for _ in text.tokens])
            for text, own in ((text, Text(text.tokens)) for text in all_texts[:9])]

    def check(i, at, logits):
        if i < 9:
            assert torch.equal(logits, same[i][at:at + len(logits)]), (i, at)
            if expected is not None:
                close(logits.double(), expected[i, at:at + len(logits)])
    in_any_batches(Slots(executor, n_slots=256 * 64), all_texts, chooser, check)


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
