"""On CUDA: the model, the caches and the decoders give the logits and the tokens of the CPU's float32 model."""
import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import sizes

import decode
from decode.compiled import CompiledDecoder
from decode.gpu.decoder import GPUDecoder
from decode.graphs import GraphDecoder
from generation import generate
from kvcache import KINDS, make_cache
from model import GPT, GPTConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

BLOCK, VOCAB = 48, 101
MODELS = {
    'learned': dict(), 'rope, grouped': dict(position='rope', n_kv_head=2), 'alibi': dict(position='alibi'),
    'none, one head of keys': dict(position='none', n_kv_head=1), 'learned, window': dict(window=7),
    'rope, window': dict(position='rope', window=9),
    'rope, grouped, window, sinks': dict(position='rope', n_kv_head=2, window=9, n_sink=2),
    'alibi, window, sinks': dict(position='alibi', window=9, n_sink=2),
}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [0] * 20, list(range(BLOCK)), [3, 2, 1]]


@pytest.fixture(autouse=True)
def full_float32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest')  # no TF32
    yield
    torch.set_float32_matmul_precision(before)


def models(**how):
    """(a model on the CPU whose greedy text varies, the same on CUDA)."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(dict(block_size=BLOCK, vocab_size=VOCAB, n_layer=3, n_head=4, n_embd=64) | how))).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn_like(p) * (1.0 if 'wpe' in name else 0.1))
    return model, copy.deepcopy(model).cuda()


def close(got, expected, tolerance=1e-4):
    torch.testing.assert_close(got.float().cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize('name', MODELS)
@torch.no_grad()
def test_logits_are_those_of_the_cpu(name):
    cpu, cuda = models(**MODELS[name])
    idx = torch.randint(VOCAB, (2, BLOCK))
    expected, cache, end = cpu(idx, idx)[0], None, 0
    close(cuda(idx.cuda(), idx.cuda())[0], expected)
    for n in (5, 1, 1, 9, 1, BLOCK - 17):
        end += n
        logits, _, cache = cuda(idx[:, end - n:end].cuda(), kv_cache=cache, use_cache=True)
        close(logits[:, 0], expected[:, end - 1])


@pytest.mark.parametrize('decoder', ['the model', 'eager', 'graph', 'gpu'])
@pytest.mark.parametrize('name', MODELS)
def test_tokens_are_those_of_the_uncached_model_on_the_cpu(name, decoder):
    cpu, cuda = models(**MODELS[name])
    step = None if decoder == 'the model' else decode.best(cuda, 6, name=decoder)
    for prompts in ([[1, 2, 3]], [[1, 2, 3], [7, 8, 9]], PROMPTS):
        for full in (dict(), dict(when_full='shift'))[:1 if cpu.config.window else 2]:
            expected = generate(cpu, prompts, 2 * BLOCK, temperature=0, use_cache=bool(full), **full)
            got = generate(cuda, prompts, 2 * BLOCK, temperature=0, use_cache=True, decoder=step, **full)
            assert got == expected
    drawn = [generate(cuda, PROMPTS, 2 * BLOCK, temperature=0.8, top_k=20, stop_token=4, **cached,
                      generator=[torch.Generator('cuda').manual_seed(seed) for seed in range(6)])
             for cached in (dict(), dict(use_cache=True, decoder=step))]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('name', sizes(['learned', 'rope, grouped', 'rope, grouped, window, sinks'], list(MODELS)))
def test_every_cache_gives_the_tokens_of_the_cpu(name, kind):
    cpu, cuda = models(**MODELS[name])
    for full in (dict(), dict(when_full='shift'))[:1 if cpu.config.window else 2]:
        expected = generate(cpu, PROMPTS, 2 * BLOCK, temperature=0, use_cache=True, **full)
        # a decoder without a kernel that reads this cache is not used
        cache = make_cache(cuda, kind, 6, decoder=decode.best(cuda, 6))
        assert generate(cuda, PROMPTS, 2 * BLOCK, temperature=0, use_cache=True, cache=cache, **full) == expected
    for bits in (8, 4):
        texts = [generate(m, PROMPTS, BLOCK, temperature=0, use_cache=True, cache=make_cache(m, kind, 6, bits))
                 for m in (cpu, cuda)]
        same = [a == b for row in zip(*texts) for a, b in zip(*row)]
        assert sum(same) > 0.9 * len(same)  # a key between two codes may be rounded either way


@torch.inference_mode()
def test_triton_kernels_on_caches_in_turn():
    """The graphs of one cache are forgotten when the steps of another are recorded; two decoders, a step each."""
    cpu, cuda = models()
    decoders, texts = [GPUDecoder(cuda) for _ in range(2)], [torch.randint(VOCAB, (B, 12)) for B in (1, 2, 3)]
    assert isinstance(decode.best(cuda, 1), GPUDecoder)
    caches = [decoders[0](text[:, :4].cuda(), None)[1] for text in texts]
    for t in range(4, 12):
        for i, text in enumerate(texts):
            logits, caches[i] = decoders[t % 2](text[:, t:t + 1].cuda(), caches[i])
            close(logits, cpu(text[:, :t + 1], use_cache=False)[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@torch.inference_mode()
def test_triton_kernels_on_another_gpu():
    """While the first GPU is the current one."""
    cpu, _ = models()
    decoder, text = GPUDecoder(copy.deepcopy(cpu).to('cuda:1')), torch.randint(VOCAB, (2, 9))
    close(decoder(text.to('cuda:1'), None)[0], cpu(text, use_cache=False)[0])


@torch.inference_mode()
def test_a_graph_for_each_cache_in_turn():
    cpu, cuda = models()
    decoder, texts = GraphDecoder(cuda), [torch.randint(VOCAB, (B, 30)) for B in (1, 2, 1, 3, 2)]
    caches = [cuda(text[:, :4].cuda())[2] for text in texts]
    for t in range(4, 30):
        for i, text in enumerate(texts):
            logits, caches[i] = decoder(text[:, t:t + 1].cuda(), caches[i])
            close(logits, cpu(text[:, :t + 1], use_cache=False)[0])
    assert len(decoder.recordings) == len(texts)


@torch.inference_mode()
def test_a_graph_reads_more_slots_when_the_text_needs_them():
    cpu, cuda = models(block_size=600)
    decoder, text = GraphDecoder(cuda), torch.randint(VOCAB, (2, 600))
    expected, cache = cpu(text, text)[0], cuda(text[:, :100].cuda())[2]
    for t in range(100, 600):
        logits, cache = decoder(text[:, t:t + 1].cuda(), cache)
        close(logits[:, 0], expected[:, t])
    assert sorted(n_slots for _, n_slots, _ in decoder.recordings) == [128, 256, 512, 600]


CHANGES = {
    'in place': lambda m: [p.copy_(p.roll(1, 0)) for p in m.parameters()],
    'other memory': lambda m: [setattr(p, 'data', p.data.roll(1, 0).clone()) for p in m.parameters()],
    'load_state_dict': lambda m: m.load_state_dict({k: v.roll(1, 0) for k, v in m.state_dict().items()}),
    'assigned': lambda m: m.load_state_dict({k: v.roll(2, 0) for k, v in m.state_dict().items()}, assign=True),
    'a parameter': lambda m: setattr(m.transformer.h[0].mlp.c_fc, 'weight', torch.nn.Parameter(
        m.transformer.h[0].mlp.c_fc.weight.roll(3, 0))),
    'a shorter window': lambda m: m.crop_block_size(32),
    'float64': lambda m: m.double(),
}


def test_a_graph_follows_the_weights():
    cpu, cuda = models()
    decoder, idx = GraphDecoder(cuda), torch.tensor([[1, 2, 3]])
    for change in (None, *CHANGES):
        for model in (cpu, cuda):
            with torch.no_grad():
                change and CHANGES[change](model)
        expected = cpu.generate(idx, 40, temperature=0)
        got = cuda.generate(idx.cuda(), 40, temperature=0, use_cache=True, decoder=decoder)
        assert torch.equal(got.cpu(), expected), change
    cuda.transformer.h[1].mlp.register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(ValueError, match='hooks'):
        cuda.generate(idx.cuda(), 5, temperature=0, use_cache=True, decoder=decoder)


@torch.inference_mode()
def test_weights_that_change_between_two_steps():
    """A graph reads weights where they are; where that is looked up by `refresh` in the middle of a sequence."""
    cpu, cuda = models()
    decoder, text = GraphDecoder(cuda), torch.randint(VOCAB, (1, 12))
    caches = [m(text[:, :4].to(m.lm_head.weight.device))[2] for m in (cpu, cuda)]
    for t, change in zip(range(4, 12), ('in place', 'other memory', 'assigned', 'a parameter') * 2):
        for model in (cpu, cuda):
            CHANGES[change](model)
        if change != 'in place':
            decoder.refresh()
        expected, _, caches[0] = cpu(text[:, t:t + 1], kv_cache=caches[0])
        logits, caches[1] = decoder(text[:, t:t + 1].cuda(), caches[1])
        close(logits, expected)


@torch.inference_mode()
def test_autocast_begins_and_ends_between_two_steps():
    """The graph must not read weights that autocast has cast before it, or keeps after it."""
    cpu, cuda = models()
    text = torch.randint(VOCAB, (2, 30))
    expected, decoder, cache = cpu(text, text)[0], GraphDecoder(cuda), None
    for t in range(30):
        with torch.autocast('cuda', torch.bfloat16, enabled=True):
            if cache is None:
                cache = cuda.empty_cache(2)
                assert cache[0].k_cache.dtype is torch.bfloat16
            logits, cache = decoder(text[:, t:t + 1].cuda(), cache)
        close(logits[:, 0], expected[:, t], 0.1)
        torch.randn(1000, 1000, device='cuda')  # takes memory that has been freed
    assert len(decoder.recordings) == 1


@torch.inference_mode()
def test_graphs_hold_no_cache_and_are_not_kept_for_ever():
    cpu, cuda = models(n_layer=1, n_embd=256, block_size=1024)
    decoder, text = GraphDecoder(cuda), torch.randint(VOCAB, (1, 3))
    expected, used, kept = cpu(text)[0], [], []
    for n in range(100):
        cache = cuda(text[:, :2].cuda())[2]
        kept = [*kept, cache][-n % 7:]  # so that caches come to various addresses
        close(decoder(text[:, 2:].cuda(), cache)[0], expected)
        if n >= 40:
            gc.collect()
            used.append(torch.cuda.memory_allocated() - sum(layer.k_cache.nbytes * 2 for c in kept for layer in c))
    # up to 32 recordings are forgotten together: later ones take no more memory than earlier ones
    assert len(decoder.recordings) <= 32 and max(used[30:]) < max(used[:30]) + 2**23


@torch.inference_mode()
def test_graphs_are_right_behind_others_that_were_forgotten():
    """The memory of cuBLAS ends with the graphs of a stream (pytorch#193402): several generations, two decoders."""
    cpu, cuda = models(n_embd=256)
    decoders, texts = [GraphDecoder(cuda) for _ in range(2)], torch.randint(VOCAB, (100, 1, 3))
    caches = [cuda(text[:, :2].cuda())[2] for text in texts]
    for _ in range(2):
        for i, (text, cache) in enumerate(zip(texts, caches)):
            close(decoders[i % 5 == 0](text[:, 2:].cuda(), cache)[0], cpu(text)[0])


def test_threads_share_a_decoder():
    cpu, cuda = models()
    decoder, idx = GraphDecoder(cuda), torch.tensor([[1, 2, 3]])

    def text(first):
        return cuda.generate(idx.cuda() + first, 40, temperature=0, use_cache=True, decoder=decoder).cpu()
    with ThreadPoolExecutor(4) as pool:
        for first, found in enumerate(pool.map(text, range(4))):
            assert torch.equal(found, cpu.generate(idx + first, 40, temperature=0))


@pytest.mark.parametrize('name', sizes(['rope, grouped, window, sinks'], list(MODELS)))
def test_the_compiled_decoder_on_cuda(name):
    """Other batch sizes, other caches, and weights that change."""
    cpu, cuda = models(**MODELS[name])
    decoder = CompiledDecoder(cuda)
    for prompts in ([[1, 2, 3]], [[1, 2, 3], [7, 8, 9]], [[4, 5, 6]]):
        expected = generate(cpu, prompts, 2 * BLOCK, temperature=0)
        assert generate(cuda, prompts, 2 * BLOCK, temperature=0, use_cache=True, decoder=decoder) == expected
        for model in (cpu, cuda):
            with torch.no_grad():
                CHANGES['in place'](model)
