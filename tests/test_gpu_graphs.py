"""
CUDA graphs of the model's own step: which steps are recorded, and what makes a recording invalid. Without CUDA, a
stand-in for the replay runs the step again.
"""
import copy
import gc

import pytest
import torch
from example_models import large
from plain_gpu import Direct

from decode.gpu import graphs
from decode.gpu.graphs import GraphStep

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
needs_cuda = pytest.mark.skipif(DEVICE == 'cpu', reason="needs CUDA")


def models(seed=0, **how):
    """(a model in float64, the same one on the GPU if there is one)."""
    model = large(seed, **how)
    return model, copy.deepcopy(model).to(DEVICE)


def step_of(model):
    return GraphStep(model, None if DEVICE == 'cuda' else Direct())


def texts_of(*shape):
    return torch.randint(29, shape, device=DEVICE)


def close(got, expected, near=1e-10):
    torch.testing.assert_close(got.cpu(), expected.cpu(), atol=near, rtol=near)


@pytest.mark.parametrize('how', [dict(), dict(position='rope', n_kv_head=1), dict(position='alibi', window=5, n_sink=2),
                                 dict(position='rope', window=5), dict(window=4)])
def test_generate_gives_the_same_tokens_with_it(how):
    """Past the end of the context, for several prompts one after the other, drawn and greedy."""
    _, model = models(**how)
    step = step_of(model)
    assert not step.direct.called  # all of the model is called directly
    for seed, (B, T) in enumerate([(1, 3), (2, 1), (3, 16)]):
        idx = texts_of(B, T)
        for temperature in 0, 0.8:
            got, expected = (model.generate(idx, 40, temperature, generator=torch.Generator(DEVICE).manual_seed(seed),
                                            **by) for by in (dict(step=step, use_cache=True), dict()))
            assert torch.equal(got, expected)
    assert step.recordings


CHANGES = {
    'in place': lambda m: [p.copy_(p.roll(1, 0)) for p in m.parameters()],
    'other memory': lambda m: [setattr(p, 'data', p.data.roll(1, 0).clone()) for p in m.parameters()],
    'load_state_dict': lambda m: m.load_state_dict({k: v.roll(1, 0) for k, v in m.state_dict().items()}),
    'assigned': lambda m: m.load_state_dict({k: v.roll(2, 0) for k, v in m.state_dict().items()}, assign=True),
    'a parameter': lambda m: setattr(m.transformer.h[0].mlp.c_fc, 'weight', torch.nn.Parameter(
        m.transformer.h[0].mlp.c_fc.weight.roll(3, 0))),
    'a shorter window': lambda m: m.crop_block_size(12),
    'float32': lambda m: m.float(),
}


def test_a_graph_follows_the_weights():
    """It reads them where they are; it is recorded anew, at the start of a text, when they are elsewhere."""
    cpu, model = models()
    step, idx, recordings = step_of(model), torch.tensor([[1, 2, 3]]), {}
    for change in (None, *CHANGES):
        for each in cpu, model:
            with torch.no_grad():
                change and CHANGES[change](each)
        got = model.generate(idx.to(DEVICE), 40, temperature=0, use_cache=True, step=step)
        assert torch.equal(got.cpu(), cpu.generate(idx, 40, temperature=0)), change
        kept = recordings and all(step.recordings.get(kind) is each for kind, each in recordings.items())
        assert bool(kept) == (change in ('in place', 'load_state_dict')), change
        recordings = dict(step.recordings)


@torch.inference_mode()
def test_one_graph_for_each_cache_batch_and_number_of_slots(monkeypatch):
    monkeypatch.setattr(graphs, 'FEWEST_SLOTS', 4)
    cpu, model = models(block_size=20)
    step, texts = step_of(model), [texts_of(B, 20) for B in (1, 2, 2)]
    caches = [model(text[:, :1])[2] for text in texts]
    for t in range(1, 20):
        for i, text in enumerate(texts):
            got, caches[i] = step(text[:, t:t + 1], caches[i])
            close(got, cpu(text[:, :t + 1].cpu(), use_cache=False)[0])
    assert sorted(n_slots for *_, n_slots, _ in step.recordings) == sorted([4, 8, 16, 20] * 3)
    first_row = [(k[:1], v[:1], 5) for k, v, _ in caches[1]]  # the same addresses, another batch size
    close(step(texts[1][:1, 5:6], first_row)[0], model(texts[1][:1, :6], use_cache=False)[0])


@torch.inference_mode()
def test_recordings_are_forgotten_all_together(monkeypatch):
    """
    The end of one graph would free memory that others of its stream use, also that of cuBLAS (pytorch#193402); see
    `GraphStep.forget`. Two steps, with several generations of graphs.
    """
    monkeypatch.setattr(graphs, 'MOST', 5)
    cpu, model = models(block_size=20, n_embd=256)
    steps, texts, numbers = [step_of(model) for _ in range(2)], texts_of(12, 1, 3), []
    caches = [model(text[:, :2])[2] for text in texts]
    for _ in range(2):
        for text, cache in zip(texts, caches):
            for step in steps:
                close(step(text[:, 2:], cache)[0], cpu(text.cpu(), use_cache=False)[0])
            numbers.append(len(steps[0].recordings))
    assert numbers == [1, 2, 3, 4, 5] * 4 + [1, 2, 3, 4]


def test_it_is_for_the_gpt_of_model_py_and_within_its_context():
    _, model = models()
    cache = [(k, v, 16) for k, v, _ in model.empty_cache(1)]
    with pytest.raises(ValueError, match='block_size'):
        step_of(model)(texts_of(1, 1), cache)
    model.transformer.h[1].mlp.register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(ValueError, match='hooks'):
        step_of(model)


@needs_cuda
@torch.inference_mode()
def test_autocast_begins_and_ends_between_two_steps():
    """The graph must not read weights that autocast has cast before it, or keeps after it."""
    cpu, cuda = (m.float() for m in models(block_size=48, n_embd=64))
    text = texts_of(2, 30)
    expected, step, cache = cpu(text.cpu(), text.cpu())[0], step_of(cuda), None
    for t in range(30):
        with torch.autocast('cuda', torch.bfloat16, enabled=True):
            if cache is None:
                cache = cuda.empty_cache(2)
                assert cache[0].k_cache.dtype is torch.bfloat16
            logits, cache = step(text[:, t:t + 1], cache)
        close(logits[:, 0].float(), expected[:, t], 0.05 * float(expected.abs().max()))
        torch.randn(1000, 1000, device='cuda')  # takes memory that has been freed
    assert len(step.recordings) == 1


@needs_cuda
@torch.inference_mode()
def test_graphs_hold_no_cache_and_are_not_kept_for_ever():
    cpu, cuda = models(n_layer=1, n_embd=256, block_size=1024)
    step, text = step_of(cuda), texts_of(1, 3)
    expected, used, kept = cpu(text.cpu())[0], [], []
    for n in range(100):
        cache = cuda(text[:, :2])[2]
        kept = [*kept, cache][-n % 7:]  # so that caches come to various addresses
        close(step(text[:, 2:], cache)[0], expected)
        if n >= 40:
            gc.collect()
            used.append(torch.cuda.memory_allocated() - sum(layer.k_cache.nbytes * 2 for c in kept for layer in c))
    # up to 32 recordings are forgotten together: later ones take no more memory than earlier ones
    assert len(step.recordings) <= 32 and max(used[30:]) < max(used[:30]) + 2**23
