"""On CUDA: the model, the engine and the model's recorded step give logits and tokens of the CPU's float32 model."""
import pytest
import torch
from test_gpu_executor import POOLS
from tiny_models import MODELS, VOCAB, model_of

import decode
from decode.gpu.graphs import GraphStep
from engine import Engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

BLOCK = 40
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [0] * 20, [i % VOCAB for i in range(BLOCK)], [3, 2, 1]]


@pytest.fixture(autouse=True)
def full_float32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest')  # no TF32
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
    """In each pool; and with keys in int8, of which one between two codes may be rounded either way."""
    cpu, cuda = models(name)
    made = decode.best(cuda, 6, name=executor)
    for full in (dict(), dict(when_full='shift'))[:1 if cpu.config.max_positions != BLOCK else 2]:
        expected = Engine(cpu).generate(PROMPTS, 2 * BLOCK, temperature=0.0, **full)
        for pool in POOLS.values():
            got = Engine(cuda, made, pool(cpu.config)).generate(PROMPTS, 2 * BLOCK, temperature=0.0, **full)
            assert got == expected
    texts = [Engine(m, of, kv_bits=8).generate(PROMPTS, BLOCK, temperature=0.0)
             for m, of in ((cpu, None), (cuda, made))]
    same = [a == b for row in zip(*texts) for a, b in zip(*row)]
    assert sum(same) > 0.9 * len(same)


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
