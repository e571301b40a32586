"""
What a static step is recorded or compiled for, and when anew: CUDA graphs, where a replay runs the step again (for CUDA
see test_cuda.py), and torch.compile, where there is a C++ compiler.
"""
import shutil

import pytest
import torch
from conftest import sizes
from example_models import f32, large
from ways import without_compilers  # noqa: F401  (a fixture)

from decode import graphs
from decode.compiled import CompiledDecoder
from decode.graphs import GraphDecoder
from generation import generate

BLOCK = 16
needs_compiler = pytest.mark.skipif(not shutil.which('g++'), reason="torch.compile on a CPU needs a C++ compiler")


@pytest.mark.parametrize('change, keeps', [
    (lambda m: m.lm_head.weight.mul_(2), True),
    (lambda m: setattr(m.lm_head.weight, 'data', 3 * m.lm_head.weight.data), False)])
@pytest.mark.usefixtures('without_compilers')
@torch.no_grad()
def test_graphs_are_recorded_anew_when_a_weight_is_at_another_address(change, keeps):
    """At the start of a sequence; that the new weights are used: see test_decoder_changes.py."""
    model = large(0)
    decoder, text = GraphDecoder(model), torch.randint(29, (2, 5))
    _, cache = decoder(text[:, :4], None)
    decoder(text[:, 4:], cache)
    recordings = dict(decoder.recordings)
    change(model)
    decoder(text[:, :4], None)
    decoder(text[:, 4:], cache)
    assert len(recordings) == 1 and (decoder.recordings == recordings) == keeps


@pytest.mark.usefixtures('without_compilers')
@torch.no_grad()
def test_one_graph_for_each_cache_batch_and_number_of_slots(monkeypatch):
    monkeypatch.setattr(graphs, 'FEWEST_SLOTS', 4)
    model = large(1, block_size=20)
    decoder, texts = GraphDecoder(model), [torch.randint(29, (B, 20)) for B in (1, 2, 2)]
    caches = [model(text[:, :1])[2] for text in texts]
    for t in range(1, 20):
        for i, text in enumerate(texts):
            got, caches[i] = decoder(text[:, t:t + 1], caches[i])
            torch.testing.assert_close(got, model(text[:, :t + 1], use_cache=False)[0], atol=1e-10, rtol=1e-10)
    found = [n_slots for _, n_slots, _ in decoder.recordings]
    assert sorted(found) == sorted([4, 8, 16, 20] * 3)
    first_row = [type(layer)(layer.k_cache[:1], layer.v_cache[:1], 5) for layer in caches[1]]
    got, _ = decoder(texts[1][:1, 5:6], first_row)  # the same addresses, another batch size
    torch.testing.assert_close(got, model(texts[1][:1, :6], use_cache=False)[0], atol=1e-10, rtol=1e-10)


@pytest.mark.usefixtures('without_compilers')
@torch.no_grad()
def test_recordings_are_forgotten_all_together(monkeypatch):
    """The end of one graph would free memory that the others of its stream use; see `GraphDecoder.forget`."""
    monkeypatch.setattr(graphs, 'MOST', 5)
    model = large(1, block_size=20)
    decoder, texts, numbers = GraphDecoder(model), torch.randint(29, (12, 1, 3)), []
    caches = [model(text[:, :2])[2] for text in texts]
    for _ in range(2):
        for text, cache in zip(texts, caches):
            got, _ = decoder(text[:, 2:], cache)
            torch.testing.assert_close(got, model(text, use_cache=False)[0], atol=1e-10, rtol=1e-10)
            numbers.append(len(decoder.recordings))
    assert numbers == [1, 2, 3, 4, 5] * 4 + [1, 2, 3, 4]


@needs_compiler
def test_one_compiled_step_gives_the_same_tokens_however_long_the_sequence_grows():
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    counters.clear()
    model, idx = f32(11, n_layer=sizes(1, 2)), torch.randint(29, (2, 3))
    decoder = CompiledDecoder(model)
    for policy in (dict(), dict(when_full='shift')):
        got = generate(model, idx, 3 * BLOCK, temperature=0, use_cache=True, decoder=decoder, **policy)
        assert torch.equal(got, generate(model, idx, 3 * BLOCK, temperature=0, **policy))
    assert counters['stats']['unique_graphs'] == 1 and not counters['graph_break']
    prompts, cached = [[1, 2, 3, 4, 5, 6], [7, 8]], dict(use_cache=True, decoder=decoder)
    assert generate(model, prompts, 8, temperature=0, **cached) == generate(model, prompts, 8, temperature=0)
    assert counters['stats']['unique_graphs'] == 1
    model.load_state_dict(f32(12, n_layer=model.config.n_layer).state_dict())
    assert torch.equal(model.generate(idx, 20, temperature=0, **cached), model.generate(idx, 20, temperature=0))


@needs_compiler
def test_any_number_of_batch_sizes_is_compiled():
    """torch.compile gives up on a function after a few compilations (8, here 1); each batch size has its own."""
    torch._dynamo.reset()
    model = f32(14, n_layer=1)
    decoder = CompiledDecoder(model)
    with torch._dynamo.config.patch(recompile_limit=1):
        for B in sizes((1, 2), (1, 2, 3)):
            prompts = torch.randint(29, (B, 3))
            got = model.generate(prompts, 5, temperature=0, use_cache=True, decoder=decoder)
            assert torch.equal(got, model.generate(prompts, 5, temperature=0))
