"""Every cache after a step that failed or had broken weights: the sequences as before, and later tokens the same."""
import functools

import pytest
import torch
from test_cache_systems import BLOCK, PROMPTS, begin, empty, feed, model

from decode.cpu import CPUDecoder
from generation import Work, generate
from kvcache import KINDS, make_cache


@pytest.fixture(params=['PyTorch', 'compiled'])
def decoder_of(request):
    """A function of a model: a decoder for its cache, or None for none."""
    return {'PyTorch': lambda m: None, 'compiled': lambda m: CPUDecoder(m, threads=1)}[request.param]


@pytest.mark.parametrize('kind', KINDS)
def test_what_does_not_fit_is_an_error_and_the_rest_goes_on(kind, decoder_of):
    m = model(0)
    cache = make_cache(m, kind, n_seq=2, decoder=decoder_of(m))
    seqs, _ = begin(cache, torch.randint(29, (2, 5)))
    with pytest.raises(ValueError, match='out of context'):
        feed(cache, seqs, torch.randint(29, (2, BLOCK)))
    with pytest.raises(ValueError, match='free|room'):
        begin(cache, torch.randint(29, (3, BLOCK)))
    for seq in cache.lengths.keys() - set(seqs):
        cache.free(seq)
    with pytest.raises(ValueError, match='free|room'):
        generate(m, [[1]], 5, num_samples=3 if kind != 'paged' else 5, use_cache=True, cache=cache)
    assert cache.lengths.keys() == set(seqs)
    feed(cache, seqs, torch.randint(29, (2, BLOCK - 5)))
    for seq in seqs:
        cache.free(seq)
    assert empty(cache)
    for wrong in (('pages', 2), (kind, 0), (kind, 1.5), (kind, 2, 3), (kind, 2, []), ([], 2)):
        with pytest.raises(ValueError, match='a cache is'):
            make_cache(m, *wrong)


@pytest.mark.parametrize('kind', KINDS)
@torch.inference_mode()
def test_a_step_that_fails_leaves_the_sequences_as_they_were(kind, decoder_of, monkeypatch):
    m, idx = model(4), torch.randint(29, (2, 9))
    cache = make_cache(m, kind, n_seq=2, decoder=decoder_of(m))
    (a, b), _ = begin(cache, idx)
    one = torch.tensor([3])
    for handles, starts, tokens in (
            ([a, b], [9, 9], torch.tensor([[3], [99]])), ([a, b], [9, 9], [one, -one]),
            ([a, b], [9, 9], [one, one, one]),
            ([a, b], [9, 9], [one]), ([a, b], [9, 9], torch.tensor([3, 4])), ([a, b], [9, 9], [one, one[:0]]),
            ([a, b], [9, 9], [one, [3]]), ([a, b], [9, 9], [one, one.float()]), ([a, b], [9, 9], None),
            ([a, b], [0, 10], [one, one]), ([a, b], [0, -1], [one, one]), ([a, b], [0, 1.5], [one, one]),
            ([a, b], [0], [one, one]), ([a, a], [0, 0], [one, one]), ([a, 99], [0, 0], [one, one]),
            ([a, None], [0, 0], [one, one]), ([], [], []),
            ([a, b], [0, 9], [one, torch.ones(BLOCK, dtype=torch.long)])):
        with pytest.raises(ValueError):
            cache.step(Work(handles, starts, tokens))
        assert cache.lengths == {a: 9, b: 9}
    if cache.decoder:  # after it has written
        execute = cache.decoder.execute_model
        monkeypatch.setattr(cache.decoder, 'execute_model', lambda *args: (execute(*args), 1 / 0))
    else:
        broken = m.transformer.h[1].register_forward_hook(lambda *_: 1 / 0)
    for tokens in (torch.tensor([[3], [9]]), [one, torch.tensor([3, 4])]):
        with pytest.raises(ZeroDivisionError):
            feed(cache, [a, b], tokens)
        assert cache.lengths == {a: 9, b: 9}
    if cache.decoder:
        monkeypatch.setattr(cache.decoder, 'execute_model', execute)
    else:
        broken.remove()
    logits = feed(cache, [a, b], torch.tensor([[7], [8]]))
    exact = m(torch.cat([idx, torch.tensor([[7], [8]])], dim=1))[0][:, 0]
    assert torch.allclose(logits, exact, atol=1e-5)


@pytest.mark.parametrize('bits', [0, 8, 4])
@pytest.mark.parametrize('kind', KINDS)
def test_broken_weights_do_not_stay_in_the_cache(kind, bits, decoder_of):
    m = model(7, n_embd=64)
    decoder = decoder_of(m)
    good, cache = {name: p.clone() for name, p in m.state_dict().items()}, make_cache(m, kind, 2, bits, decoder)
    assert cache.decoder is (None if bits == 4 else decoder)
    with torch.no_grad():
        m.transformer.h[0].attn.c_attn.weight.fill_(float('nan'))
    with pytest.raises(ValueError, match='not numbers'):
        generate(m, torch.randint(29, (2, BLOCK - 1)), 5, use_cache=True, cache=cache)
    assert empty(cache)
    m.load_state_dict(good)
    again, fresh = (generate(m, PROMPTS[:2], 20, temperature=0, use_cache=True, cache=c)
                    for c in (cache, make_cache(m, kind, 2, bits, decoder)))
    assert again == fresh
    assert all(stored.isfinite().all() for layer in cache.layers for stored in layer.tensors())


def with_huge_keys(m):
    """
    Weights whose keys are finite, and so large that a query of the good weights makes an infinite score of them. The
    logits are numbers.
    """
    bias = m.transformer.h[0].attn.c_attn.bias
    with torch.no_grad():
        m.transformer.h[0].attn.c_attn.weight[:32] *= 1e-30
        bias[:32] = 0
        bias[32:34], bias[48:50] = 1e38, 1e38  # two channels of the keys of each head


def good_for_huge_keys(seed):
    m = model(seed)
    with torch.no_grad():
        m.transformer.h[0].attn.c_attn.bias[[0, 1, 16, 17]] = 30.0
    return m


@functools.cache
def without_cache(prompts, how):
    return generate(good_for_huge_keys(3), [*map(list, prompts)], BLOCK + 4, temperature=0, **dict(how))


@pytest.mark.parametrize('alive', [False, True])
@pytest.mark.parametrize('failing', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_huge_keys_of_repaired_weights_change_no_later_tokens(kind, failing, alive, decoder_of):
    """Written by a step that failed or by one that did not, of sequences that are freed or still there."""
    m = good_for_huge_keys(3)
    good = {name: p.clone() for name, p in m.state_dict().items()}
    cache = make_cache(m, kind, 4, decoder=decoder_of(m))
    with_huge_keys(m)
    idx = torch.randint(29, (2, BLOCK - 2), generator=torch.Generator().manual_seed(0))
    seqs, logits = begin(cache, idx)
    assert logits.isfinite().all()
    if failing:
        with torch.no_grad():
            m.transformer.h[1].mlp.c_proj.bias.fill_(float('inf'))
        with pytest.raises(ValueError, match='not numbers'):
            feed(cache, seqs, idx[:, :1])
    m.load_state_dict(good)
    if not alive:
        for seq in seqs:
            cache.free(seq)
    for prompts in ([[1, 2, 3], [4]], [[5]], PROMPTS[2:4], [[1, 2, 3], [4]]):
        for how in (dict(), dict(when_full='shift')):
            expected = without_cache(tuple(map(tuple, prompts)), tuple(how.items()))
            assert generate(m, prompts, BLOCK + 4, temperature=0, use_cache=True, cache=cache, **how) == expected


@pytest.mark.parametrize('bits', [0, 8])
@pytest.mark.parametrize('kind', KINDS)
def test_a_cache_with_keys_of_broken_weights_is_zeroed_when_it_is_empty(kind, bits):
    """Otherwise later generations would need each forward pass twice."""
    m = good_for_huge_keys(3)
    good, cache, passes = {name: p.clone() for name, p in m.state_dict().items()}, make_cache(m, kind, 4, bits), []
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    with_huge_keys(m)
    seqs, _ = begin(cache, torch.randint(29, (3, BLOCK)))
    for seq in seqs:
        cache.free(seq)
    m.load_state_dict(good)
    generate(m, prompts, 5, temperature=0, use_cache=True, cache=cache)
    m.transformer.ln_f.register_forward_hook(lambda *_: passes.append(1))
    again, fresh = (generate(m, prompts, 5, temperature=0, use_cache=True, cache=c)
                    for c in (cache, make_cache(m, kind, 4, bits)))
    assert again == fresh and len(passes) == 2 * 5
