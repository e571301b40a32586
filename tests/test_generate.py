"""`GPT.generate`: nanoGPT's tokens, with the cache and without; what it costs, what it leaves, what it refuses."""
import gc
import itertools
import weakref

import plain_gpt
import pytest
import torch
from conftest import sizes
from tiny_models import MODELS, VOCAB, model_of

from decode.draw import DrawSettings, draw
from model import LayerKVCache, sample_token


def nano(seed=0, **how):
    """A model as nanoGPT has them."""
    return model_of('learned', seed, **dict(block_size=16) | how)


@pytest.mark.parametrize('use_cache', [False, True])
@pytest.mark.parametrize('temperature, top_k', [(1.0, None), (0.8, 5), (1.3, 200), (0, None)])
def test_same_seed_same_tokens_as_nanogpt(use_cache, temperature, top_k):
    for seed, block_size in itertools.product(sizes((0, 4, 5, 7), range(8)), (16, 1)):
        model = nano(seed, block_size=block_size)
        idx = torch.randint(29, (2, 1 + 3 * seed))  # 1 to 22: on both sides of block_size 16
        torch.manual_seed(seed)
        theirs = plain_gpt.generate(model, idx, 30, temperature, top_k)
        torch.manual_seed(seed)
        assert torch.equal(model.generate(idx, 30, temperature, top_k, use_cache=use_cache), theirs), seed


@pytest.mark.parametrize('kind', MODELS)
def test_every_kind_of_model_past_its_context_or_without_end(kind):
    for seed, T in enumerate((5, 39, 61)[:sizes(2, 3)]):
        model, found = model_of(kind, seed, torch.float64), []
        idx = torch.randint(VOCAB, (2, T))
        for use_cache in (False, True):
            torch.manual_seed(seed)
            found.append(model.generate(idx, sizes(60, 400), top_p=0.95, temperature=0.8, use_cache=use_cache))
        assert torch.equal(*found)
        if model.config.max_positions != model.config.block_size:
            first = plain_gpt.plain(model, found[0][:, :90])[:, -1].argmax(-1)
            assert torch.equal(model.generate(found[0][:, :90], 1, 0, use_cache=True)[:, -1], first)


def test_what_each_token_costs():
    """A prefill, then one token a step, and none after the last; past the context a whole window, or one for ever."""
    model, fed = nano(11), []
    model.register_forward_pre_hook(lambda m, args: fed.append(args[0].shape[1]))
    model.generate(torch.randint(29, (2, 4)), 20, use_cache=True)
    assert fed == [4] + [1] * 12 + [16] * 7
    fed.clear()
    endless = model_of('rope window sinks')
    endless.register_forward_pre_hook(lambda m, args: fed.append(args[0].shape[1]))
    endless.generate(torch.randint(VOCAB, (1, 50)), 200, use_cache=True)
    assert fed == [50] + [1] * 199


def test_one_cache_a_layer_nothing_holds_it_afterwards_and_training_makes_none(monkeypatch):
    made, empty_like = [], LayerKVCache.empty_like

    def recorded(k, n_slots):
        cache = empty_like(k, n_slots)
        made.extend([weakref.ref(cache.k_cache), weakref.ref(cache.v_cache)])
        return cache
    monkeypatch.setattr(LayerKVCache, 'empty_like', recorded)
    model, idx = nano(5), torch.randint(29, (1, 4))
    model.train()(idx, idx)
    assert not made
    model.generate(idx, 50, use_cache=True)
    gc.collect()
    assert len(made) == 4 and all(ref() is None for ref in made)


def test_a_generator_of_ones_own_leaves_the_global_one_alone():
    model, idx = nano(6), torch.randint(29, (2, 6))
    torch.manual_seed(7)
    expected, state = model.generate(idx, 20), torch.get_rng_state()
    got = model.generate(idx, 20, use_cache=True, generator=torch.Generator().manual_seed(7))
    assert torch.equal(got, expected) and torch.equal(torch.get_rng_state(), state)


def test_another_draw():
    """Of the engine, for example."""
    model, idx, numbers = nano(7), torch.randint(29, (2, 6)), []
    hows, state = [DrawSettings(29, seed, temperature=0.7, top_k=9) for seed in (3, 4)], torch.get_rng_state()

    def of_engine(logits, number):
        numbers.append(number)
        return draw(logits, hows, [number] * 2)[:, None]
    cached, without = (model.generate(idx, 25, use_cache=use_cache, draw=of_engine) for use_cache in (True, False))
    assert torch.equal(cached, without) and numbers == [*range(25)] * 2
    assert not torch.equal(cached, model.generate(idx, 25, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(torch.get_rng_state(), state)
    alone = model.generate(idx[1:], 25, draw=lambda logits, number: draw(logits, hows[1:], [number])[:, None])
    assert torch.equal(alone, cached[1:])


def test_modes_gradients_and_dropout():
    """It sees to eval mode itself, and leaves all as it was, also after an error. Its tokens can be trained on."""
    model, idx = nano(10, dropout=0.5), torch.randint(29, (2, 5))
    model.train()
    model.transformer.h[0].eval()
    modes = [m.training for m in model.modules()]
    found = [model.generate(idx, 20, temperature=0, use_cache=use_cache) for use_cache in (False, True, False, True)]
    assert all(torch.equal(each, found[0]) for each in found)

    def broken(logits, number):
        raise OSError
    with pytest.raises(OSError):
        model.generate(idx, 3, draw=broken)
    assert [m.training for m in model.modules()] == modes and torch.is_grad_enabled()
    assert not found[0].is_inference() and torch.equal(model.generate(idx, 0), idx)
    model(found[0][:, :16], found[0][:, :16])[1].backward()


@pytest.mark.parametrize('bad', [
    *(dict(idx=idx) for idx in (torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long),
                                torch.zeros(3, dtype=torch.long), torch.tensor([[29]]), torch.tensor([[-1]]),
                                torch.tensor([[0.5]]), [[1, 2]])),
    dict(temperature=-1), dict(temperature=float('nan')), dict(temperature=float('inf')), dict(top_k=0),
    dict(top_p=0.0), dict(top_p=1.1), dict(max_new_tokens=-1)], ids=str)
def test_what_cannot_be_generated_is_refused_at_the_call(bad):
    with pytest.raises(ValueError):
        nano(9).generate(**dict(idx=torch.zeros(1, 3, dtype=torch.long), max_new_tokens=5) | bad)


@pytest.mark.parametrize('use_cache', [False, True])
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_logits_that_are_not_numbers_are_refused(use_cache, temperature):
    for value, spot in itertools.product((float('inf'), float('nan')), ('ln_f.bias', 'wpe.weight')):
        model = nano(0)
        model.transformer.get_parameter(spot).data[-1] = value
        with pytest.raises(ValueError, match='not numbers'):
            model.generate(torch.randint(29, (2, 5)), 13, temperature=temperature, use_cache=use_cache)


def test_top_p_keeps_the_smallest_nucleus_and_top_k_ties():
    probs = torch.tensor([[0.1, 0.5, 0.25, 0.15]])
    for top_p, kept in ((0.3, {1}), (0.5, {1}), (0.51, {1, 2}), (0.75, {1, 2}), (0.8, {1, 2, 3}),
                        (0.95, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3})):
        assert {sample_token(probs.log(), top_p=top_p).item() for _ in range(200)} == kept, top_p
    logits = torch.tensor([[3.0, 1.0, 3.0, 0.0]])
    assert {sample_token(logits, top_k=1).item() for _ in range(50)} == {0, 2}
    assert {sample_token(logits * 0, top_k=99).item() for _ in range(200)} == {0, 1, 2, 3}
