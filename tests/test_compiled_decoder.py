"""The compiled decoder: one graph for any length, and the model's own step. See also test_decoder_positions.py."""
import shutil

import pytest
import torch
from conftest import sizes
from test_cache_exactness import large

from decode.compiled import CompiledDecoder
from generation import generate

BLOCK = 16
needs_compiler = pytest.mark.skipif(not shutil.which('g++'), reason="torch.compile on a CPU needs a C++ compiler")


def f32(seed, **changes):
    return large(seed, torch.float32, **changes)


@needs_compiler
def test_the_compiled_decoder_compiles_once_and_gives_the_same_tokens():
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    counters.clear()
    model, idx = f32(11, n_layer=sizes(1, 2)), torch.randint(29, (2, 3))
    decoder = CompiledDecoder(model)
    for policy in (dict(), dict(when_full='shift')):
        got = generate(model, idx, 3 * BLOCK, temperature=0, use_cache=True, decoder=decoder, **policy)
        assert torch.equal(got, generate(model, idx, 3 * BLOCK, temperature=0, **policy))
    # one graph, however long the sequence grew
    assert counters['stats']['unique_graphs'] == 1 and not counters['graph_break']
    prompts, cached = [[1, 2, 3, 4, 5, 6], [7, 8]], dict(use_cache=True, decoder=decoder)
    assert generate(model, prompts, 8, temperature=0, **cached) == generate(model, prompts, 8, temperature=0)
    assert counters['stats']['unique_graphs'] == 1
    model.load_state_dict(f32(12, n_layer=model.config.n_layer).state_dict())
    assert torch.equal(model.generate(idx, 20, temperature=0, **cached), model.generate(idx, 20, temperature=0))


@needs_compiler
def test_the_compiled_step_is_the_models_own():
    """At any cache_pos, in place, with the model's logits; and it refuses what does not fit."""
    model, idx = f32(13), torch.randint(29, (2, 6))
    decoder = CompiledDecoder(model)
    with torch.no_grad():
        cache = model(idx)[2]
        for pos in (6, torch.tensor([6, 2]), torch.tensor([0, 15], dtype=torch.int16)):
            mine, theirs = ([layer.clone()._replace(cache_pos=pos) for layer in cache] for _ in range(2))
            (got, mine), (expected, _, theirs) = decoder(idx[:, :1], mine), model(idx[:, :1], kv_cache=theirs)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
            for a, b in zip(mine, theirs):
                torch.testing.assert_close(a.k_cache, b.k_cache, atol=1e-5, rtol=1e-5)
                assert torch.equal(torch.as_tensor(a.cache_pos), torch.as_tensor(b.cache_pos))
        for bad in (16, -1, torch.tensor([3, 16])):
            with pytest.raises(ValueError, match='cache_pos'):
                decoder(idx[:, :1], [layer._replace(cache_pos=bad) for layer in cache])


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
