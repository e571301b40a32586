"""The GPU decoder on a GPU: tokens of the CPU's model, the same bits at full size, and launches ahead."""
import random

import pytest
import torch
from cache_machine import MODELS, Machine, cache_of, model_of
from conftest import needs, sizes
from oracle import Oracle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
needs('triton', 'pydantic')

from small_engine import finished, run, submit

import decode
import kvcache
from benchmarks.shapes import GPTS, model_with_varied_text
from decode.gpu.decoder import GPUDecoder
from generation import generate
from serving.engine import Engine


@pytest.fixture(autouse=True)
def full_float32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest')  # no TF32 in what the kernels are compared with
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize('kind', MODELS)
def test_it_is_the_decoder_of_cuda_and_gives_the_tokens_of_the_cpu(kind):
    cpu, cuda, prompts = model_of(kind), model_of(kind).cuda(), [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [0] * 20]
    decoder = decode.best(cuda, 4)
    assert isinstance(decoder, GPUDecoder)
    expected = generate(cpu, prompts, 50, temperature=0, use_cache=True)
    assert generate(cuda, prompts, 50, temperature=0, use_cache=True, decoder=decoder) == expected
    for bits, place in [(0, 'unified'), (0, 'streams'), (0, 'paged'), (0, 'tuple')]:
        cache = kvcache.make_cache(cuda, place, 4, bits, decoder)
        assert cache.executor is decoder
        assert generate(cuda, prompts, 50, temperature=0, use_cache=True, cache=cache) == expected


@pytest.mark.parametrize('model', MODELS)
@pytest.mark.parametrize('kind', sorted(kvcache.KINDS))
def test_every_cache_gives_the_logits_of_a_text_without_a_cache(kind, model):
    for seed in range(sizes(1, 3)):
        m = model_of(model, seed).cuda()
        machine = Machine(cache_of(kind, m, decoder=GPUDecoder(m)), seed, oracle=Oracle(m.cpu()))
        m.cuda()
        machine.run(80)
        machine.end()


@pytest.mark.parametrize('dtype, weights', [('bfloat16', 'float32'), ('float32', 'float32'), ('bfloat16', 'int8')])
def test_no_sample_of_many_depends_on_its_company(dtype, weights):
    """Each request with others, in small pools with preemption and shared prefixes, and alone: 0 tokens differ."""
    m = model_with_varied_text(GPTS['M']).to('cuda', getattr(torch, dtype))
    decoder, choose = GPUDecoder(m, weights), random.Random(0)
    prefixes = [[choose.randrange(65) for _ in range(40)] for _ in range(5)]
    asks = [(str(i), prefixes[i % 5][:choose.randrange(40)] + [choose.randrange(65)], choose.randint(1, 60))
            for i in range(sizes(300, 3500))]
    hows = [dict(), dict(temperature=0.8, top_k=20), dict(top_p=0.9), dict(frequency_penalty=0.5)]

    def engine(n_blocks):
        return Engine(m, decoder, [b' '] * 65, n_blocks=n_blocks, type_kv=decoder.type_kv, max_num_batched_tokens=512)
    crowded = engine(400)
    all_got = [submit(crowded, name, prompt, n, seed=i, **hows[i % 4]) for i, (name, prompt, n) in enumerate(asks)]
    run(crowded)
    assert crowded.scheduler.n_preempted
    alone = engine(40)
    for i, ((name, prompt, n), got) in enumerate(zip(asks, all_got)):
        assert got.tokens == finished(alone, name, prompt, n, seed=i, cache_salt=name, **hows[i % 4]).tokens, (i, n)


@torch.inference_mode()
def test_rows_have_their_bits_in_batches_of_all_sizes():
    m = model_with_varied_text(GPTS['L']).to('cuda', torch.bfloat16)
    texts = torch.randint(50304, (256, 300), device='cuda')
    cache = kvcache.make_cache(m, 'paged', 256, decoder=GPUDecoder(m))

    def logits_of(rows, chunks):
        handles, start = [cache.new(object()) for _ in rows], 0
        for n in chunks:
            out = cache.step(handles, [start] * len(rows), texts[rows, start:start + n].contiguous())
            start += n
        for handle in handles:
            cache.free(handle)
        return out
    expected = logits_of(list(range(256)), [299, 1])
    for first, n, chunks in (0, 1, [300]), (7, 1, [1] * 300), (3, 9, [128, 100, 72]), (100, 40, [17] * 17 + [11]), (
            0, 256, [100, 100, 100]):
        assert torch.equal(logits_of(list(range(first, first + n)), chunks), expected[first:first + n])
