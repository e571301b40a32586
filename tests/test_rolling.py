"""
Generation past block_size with models that slide: contexts that roll, and contexts that shift without a prefill. Each
row of a batch gets the tokens that it gets alone, with the cache and without.
"""
import pytest
import torch
from conftest import sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from test_positions import model_of

import kvcache
from generation import generate, stream
from model import sample_token

BLOCK = 16
SLIDING = [dict(position=position, n_kv_head=n_kv_head, window=window, n_sink=n_sink)
           for position in ('rope', 'alibi', 'none') for n_kv_head in (4, 1) for window, n_sink in ((5, 0), (5, 2))]
UNBOUNDED = [dict(position=position, n_kv_head=n_kv_head) for position in ('rope', 'alibi', 'none')
             for n_kv_head in (4, 1)]


def generators(n):
    return [torch.Generator().manual_seed(i) for i in range(n)]


@settings(max_examples=sizes(10, 80), deadline=None, derandomize=True)
@given(st.data())
def test_rows_are_what_each_is_alone_with_the_cache_and_without(data):
    roll = data.draw(st.sampled_from([None, dict(), dict(n_keep=3), dict(keep=4, n_keep=1)]))
    model = model_of(data.draw(st.integers(0, 50)), **data.draw(st.sampled_from(UNBOUNDED if roll else SLIDING)))
    how = dict(when_full='roll', **roll) if roll is not None and model.config.window == 0 else {}
    how |= dict(num_samples=data.draw(st.integers(1, 3)), stop_token=data.draw(st.sampled_from([None, 4])),
                temperature=data.draw(st.sampled_from([0.0, 1.0])))
    lengths = data.draw(st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=4))
    prompts = [torch.randint(29, (n,)).tolist() for n in lengths]
    n, samples = 2 * BLOCK, how['num_samples']
    if not how.get('when_full') and not model.config.window:
        how['when_full'] = 'roll'
    cached = generate(model, prompts, n, use_cache=True, generator=generators(len(prompts) * samples), **how)
    assert cached == generate(model, prompts, n, generator=generators(len(prompts) * samples), **how)
    alone = [row for i, prompt in enumerate(prompts) for row in generate(
        model, [prompt], n, use_cache=True,
        generator=generators(len(prompts) * samples)[i * samples:(i + 1) * samples], **how)]
    assert cached == alone


@pytest.mark.parametrize('changes', SLIDING[::sizes(3, 1)])
def test_the_models_own_generate_goes_on_without_end(changes):
    """One step a token: the cache grows to its slots and no further, and each step feeds one token."""
    model, idx, fed = model_of(1, **changes), torch.randint(29, (2, 3)), []
    before = model.hidden_states
    model.hidden_states = lambda x, *how, **more: fed.append(x.size(1)) or before(x, *how, **more)
    torch.manual_seed(0)
    cached = model.generate(idx, 20 * BLOCK, use_cache=True)
    assert fed == [3] + [1] * (20 * BLOCK - 1)
    torch.manual_seed(0)
    assert torch.equal(cached[:, :100], model.generate(idx, 97))
    torch.manual_seed(0)
    assert torch.equal(cached, torch.cat([idx, *stream(model, idx, 20 * BLOCK, use_cache=True)], dim=1))


class ReferenceLayer:
    """Keys, values and positions of one sequence, in lists; keys turn as complex numbers when positions change."""

    def __init__(self, config):
        self.config, self.k, self.v = config, [], []

    def append(self, k, v, positions):
        self.k += k.unbind(2)
        self.v += v.unbind(2)
        return torch.stack(self.k, 2), torch.stack(self.v, 2), None, self

    def shift(self, n_keep, n):
        half = self.config.head_dim // 2
        turn = torch.exp(-1j * n * self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half))
        del self.k[n_keep:n_keep + n], self.v[n_keep:n_keep + n]
        for i in range(n_keep, len(self.k) if self.config.position == 'rope' else 0):
            turned = torch.complex(self.k[i][..., :half], self.k[i][..., half:]) * turn
            self.k[i] = torch.cat((turned.real, turned.imag), dim=-1)


@torch.no_grad()
def shifted_by_hand(model, prompt, n, generator, n_keep, n_removed):
    layers, tokens = [ReferenceLayer(model.config) for _ in range(model.config.n_layer)], list(prompt)
    context = tokens if len(tokens) <= BLOCK else tokens[:n_keep] + tokens[len(tokens) - BLOCK + n_keep:]
    new, length = context, 0
    for _ in range(n):
        if length + len(new) > BLOCK:
            for layer in layers:
                layer.shift(n_keep, n_removed)
            length -= n_removed
        x, _ = model.hidden_states(torch.tensor([new]), torch.arange(length, length + len(new)), layers)
        length += len(new)
        token = int(sample_token(model.lm_head(x[:, -1]), generator=generator))
        tokens.append(token)
        new = [token]
    return tokens


@pytest.mark.parametrize('changes', UNBOUNDED)
@pytest.mark.parametrize('n_keep', [0, 3])
def test_shifting_keeps_the_keys_and_turns_them(changes, n_keep):
    """llama.cpp's rule: half of what is not kept goes, (block_size - n_keep) // 2 positions."""
    for seed in range(sizes(1, 10)):
        model = model_of(seed, **changes)
        prompts = [torch.randint(29, (n,)).tolist() for n in (3, BLOCK - 1, BLOCK, BLOCK + 1, 40)]
        expected = [shifted_by_hand(model, prompt, 3 * BLOCK, generator, n_keep, (BLOCK - n_keep) // 2)
                    for prompt, generator in zip(prompts, generators(5))]
        how = dict(when_full='shift', n_keep=n_keep, use_cache=True)
        assert generate(model, prompts, 3 * BLOCK, generator=generators(5), **how) == expected
        for kind in kvcache.KINDS:
            cache = kvcache.make_cache(model, kind, 5)
            assert generate(model, prompts, 3 * BLOCK, generator=generators(5), cache=cache, **how) == expected, kind


def test_samples_of_a_full_prompt_shift_one_by_one():
    model, prompt = model_of(0, position='rope'), torch.randint(29, (BLOCK,)).tolist()
    how = dict(when_full='shift', use_cache=True)
    together = generate(model, [prompt], 2 * BLOCK, num_samples=3, generator=generators(3), **how)
    assert together == [generate(model, [prompt], 2 * BLOCK, generator=[g], **how)[0] for g in generators(3)]


@pytest.mark.parametrize('changes, how, message', [
    (dict(position='learned'), dict(when_full='roll'), 'learned positions end at block_size 16'),
    (dict(position='rope', window=5), dict(when_full='crop'), "when_full=roll; not 'crop'"),
    (dict(position='rope', window=5), dict(when_full='shift'), "when_full=roll; not 'shift'"),
    (dict(position='rope', window=5), dict(n_keep=1), 'n_keep=1'),
    (dict(position='rope'), dict(when_full='roll', n_keep=16), 'must fit in 16'),
    (dict(position='rope'), dict(when_full='roll', keep=0), 'must fit in 16'),
    (dict(position='rope'), dict(when_full='shift', use_cache=False), 'needs the cache'),
    (dict(position='rope'), dict(when_full='slide'), "'crop', 'shift' or 'roll'"),
])
def test_what_cannot_roll_says_why(changes, how, message):
    with pytest.raises(ValueError, match=message):
        stream(model_of(0, **changes), [[1, 2]], 5, **dict(use_cache=True) | how)


def test_a_decoder_of_a_model_without_a_window_cannot_roll():
    model = model_of(0, position='rope')
    cache = kvcache.make_cache(model, 'paged', 1)
    with pytest.raises(ValueError, match=r'model.with_window\(12, 4\)'):
        stream(model, [[1, 2]], 5, use_cache=True, cache=cache, when_full='roll', n_keep=4)
    rolled = model.with_window(12, 4)
    for kind in kvcache.KINDS:
        cache = kvcache.make_cache(rolled, kind, 1)
        assert (generate(rolled, [[1, 2]], 5 * BLOCK, use_cache=True, cache=cache, temperature=0)
                == generate(model, [[1, 2]], 5 * BLOCK, when_full='roll', n_keep=4, temperature=0))
