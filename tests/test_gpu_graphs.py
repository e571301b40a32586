"""
What the model's own step is recorded for as a CUDA graph, and when anew. Here a replay runs the step again; for CUDA
see test_cuda.py.
"""
import pytest
import torch
from example_models import large

from decode.gpu import graphs
from decode.gpu.graphs import GraphStep


def close(got, expected):
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize('how', [dict(), dict(position='rope', n_kv_head=1), dict(position='alibi', window=5, n_sink=2),
                                 dict(position='rope', window=5), dict(window=4)])
def test_generate_gives_the_same_tokens_with_it(how):
    """Past the end of the context, for several prompts one after the other, drawn and greedy."""
    model = large(0, **how)
    step = GraphStep(model)
    assert not step.direct.called  # all of the model is called directly
    for seed, (B, T) in enumerate([(1, 3), (2, 1), (3, 16)]):
        idx = torch.randint(29, (B, T))
        for temperature in 0, 0.8:
            got, expected = (model.generate(idx, 40, temperature, generator=torch.Generator().manual_seed(seed), **by)
                             for by in (dict(step=step, use_cache=True), dict()))
            assert torch.equal(got, expected)
    assert step.recordings


@pytest.mark.parametrize('change, keeps', [
    (lambda m: m.lm_head.weight.mul_(2), True),
    (lambda m: setattr(m.lm_head.weight, 'data', 3 * m.lm_head.weight.data), False)])
@torch.inference_mode()
def test_graphs_are_recorded_anew_when_a_weight_is_at_another_address(change, keeps):
    """At the start of a text; the new weights are used."""
    model = large(0)
    step, text = GraphStep(model), torch.randint(29, (2, 5))
    _, cache = step(text[:, :4], None)
    step(text[:, 4:], cache)
    recordings = dict(step.recordings)
    change(model)
    step(text[:, :4], None)
    close(step(text[:, 4:], cache)[0], model(text[:, 4:], kv_cache=cache)[0])
    assert len(recordings) == 1 and (step.recordings == recordings) == keeps


@torch.no_grad()
def test_one_graph_for_each_cache_batch_and_number_of_slots(monkeypatch):
    monkeypatch.setattr(graphs, 'FEWEST_SLOTS', 4)
    model = large(1, block_size=20)
    step, texts = GraphStep(model), [torch.randint(29, (B, 20)) for B in (1, 2, 2)]
    caches = [model(text[:, :1])[2] for text in texts]
    for t in range(1, 20):
        for i, text in enumerate(texts):
            got, caches[i] = step(text[:, t:t + 1], caches[i])
            close(got, model(text[:, :t + 1], use_cache=False)[0])
    assert sorted(n_slots for *_, n_slots, _ in step.recordings) == sorted([4, 8, 16, 20] * 3)
    first_row = [(k[:1], v[:1], 5) for k, v, _ in caches[1]]  # the same addresses, another batch size
    close(step(texts[1][:1, 5:6], first_row)[0], model(texts[1][:1, :6], use_cache=False)[0])


@torch.no_grad()
def test_recordings_are_forgotten_all_together(monkeypatch):
    """The end of one graph would free memory that the others of its stream use; see `GraphStep.forget`."""
    monkeypatch.setattr(graphs, 'MOST', 5)
    model = large(1, block_size=20)
    step, texts, numbers = GraphStep(model), torch.randint(29, (12, 1, 3)), []
    caches = [model(text[:, :2])[2] for text in texts]
    for _ in range(2):
        for text, cache in zip(texts, caches):
            close(step(text[:, 2:], cache)[0], model(text, use_cache=False)[0])
            numbers.append(len(step.recordings))
    assert numbers == [1, 2, 3, 4, 5] * 4 + [1, 2, 3, 4]


def test_it_is_for_the_gpt_of_model_py_and_within_its_context():
    model = large(2)
    cache = [(k, v, 16) for k, v, _ in model.empty_cache(1)]
    with pytest.raises(ValueError, match='block_size'):
        GraphStep(model)(torch.tensor([[1]]), cache)
    model.transformer.h[1].mlp.register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(ValueError, match='hooks'):
        GraphStep(model)
