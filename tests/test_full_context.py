"""
What becomes of a context that is full: cropped, shifted or rolling. Prompts of any lengths, samples and stop tokens,
with the cache and without, against plain loops over lists of tokens, each of one sequence alone.
"""
import functools

import pytest
import torch
from conftest import sizes
from example_models import f32
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st
from oracle import Oracle
from test_decoder_positions import BLOCK, model_of

import decode
from benchmarks.loss import negative_log_likelihoods
from generation import generate, stream
from kvcache import KINDS, make_cache
from kvcache.contiguous import cache_for
from model import sample_token

POLICIES = [dict(), *(dict(when_full='shift', **how) for how in (
    dict(), dict(keep=5), dict(keep=1, n_keep=3), dict(keep=BLOCK), dict(keep=4, n_keep=12), dict(n_keep=2)))]
SLIDING = [dict(position=position, n_kv_head=n_kv_head, window=window, n_sink=n_sink)
           for position in ('rope', 'alibi', 'none') for n_kv_head in (4, 1) for window, n_sink in ((5, 0), (5, 2))]
UNBOUNDED = [dict(position=position, n_kv_head=n_kv_head) for position in ('rope', 'alibi', 'none')
             for n_kv_head in (4, 1)]
ROLLING = [dict(when_full='roll'), dict(when_full='roll', n_keep=3), dict(when_full='roll', keep=4, n_keep=1)]


def generators(n):
    return [torch.Generator().manual_seed(i) for i in range(n)]


def by_hand(model, prompt, n, temperature=0.0, generator=None, when_full='crop', keep=None, n_keep=0, stop_token=None):
    """One sequence, a list, and every token a full pass over the context: learned positions, or a text that rolls."""
    if when_full == 'roll' and not model.config.window:
        model = model.with_window(BLOCK - n_keep if keep is None else keep, n_keep)
    most = model.config.max_positions
    n_keep = min(n_keep, len(prompt))
    keep = BLOCK if when_full == 'crop' else min(BLOCK // 2, BLOCK - n_keep) if keep is None else keep
    context, pinned, out = list(prompt), prompt[:n_keep], list(prompt)
    if len(context) > most:
        context = pinned + prompt[len(prompt) - BLOCK + n_keep:]
    for _ in range(n):
        logits = model(torch.tensor([context]), use_cache=False)[0][:, -1]
        token = sample_token(logits, temperature, generator=generator).item()
        out.append(token)
        if token == stop_token:
            break
        context = context + [token]
        if len(context) > most:
            context = pinned + context[len(context) - keep:]
    return out


WAYS = {
    'no cache': lambda model, n: dict(),
    'tuples': lambda model, n: dict(use_cache=True),
    'cpu': lambda model, n: dict(use_cache=True, decoder=decode.best(model, n, name='cpu')),
} | {kind: lambda model, n, kind=kind: dict(use_cache=True, cache=make_cache(model, kind, n)) for kind in KINDS}


@functools.cache
def expected_rows(policy, temperature, stop_token, n_samples, seed):
    """(a model, prompts, what `by_hand` makes of each sample). policy: a tuple of pairs."""
    model, how = f32(seed), dict(policy)
    lengths = [1, 6, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, *torch.randint(1, 2 * BLOCK, (2,)).tolist()]
    prompts = [torch.randint(29, (T,)).tolist() for T in lengths]
    rows = [prompt for prompt in prompts for _ in range(n_samples)]
    return model, prompts, [by_hand(model, row, 40, temperature, generator, stop_token=stop_token, **how)
                            for row, generator in zip(rows, generators(len(rows)))]


@pytest.mark.parametrize('way', sizes(['no cache', 'tuples', 'cpu'], [*WAYS]))
@pytest.mark.parametrize('policy', POLICIES, ids=str)
def test_prompts_of_different_lengths_are_each_as_alone(policy, way):
    for seed in range(sizes(1, 4)):
        for temperature, stop, n_samples in sizes([(0.0, None, 1), (0.8, 11, 2)],
                                                  [(0.0, None, 1), (0.8, None, 1), (0.8, 11, 1), (1.0, 11, 3)]):
            model, prompts, alone = expected_rows(tuple(policy.items()), temperature, stop, n_samples, seed)
            together = generate(model, prompts, 40, temperature, stop_token=stop, num_samples=n_samples,
                                generator=generators(len(alone)), **WAYS[way](model, len(alone)), **policy)
            assert together == alone, (temperature, stop)


@tries(max_examples=sizes(8, 80), deadline=None, derandomize=True)
@given(st.data())
def test_models_that_roll_with_the_cache_and_without(data):
    policy = data.draw(st.sampled_from([dict(), *ROLLING]))
    model = model_of(data.draw(st.integers(0, 50)), **data.draw(st.sampled_from(UNBOUNDED if policy else SLIDING)))
    n_samples, stop = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([None, 4]))
    temperature, n = data.draw(st.sampled_from([0.0, 1.0])), BLOCK + 8
    prompts = [torch.randint(29, (n,)).tolist()
               for n in data.draw(st.lists(st.integers(1, 2 * BLOCK), min_size=1, max_size=3))]
    rows = [prompt for prompt in prompts for _ in range(n_samples)]
    alone = [by_hand(model, row, n, temperature, generator, stop_token=stop, **policy | dict(when_full='roll'))
             for row, generator in zip(rows, generators(len(rows)))]
    for use_cache in (False, True):
        how = dict(use_cache=use_cache, num_samples=n_samples, stop_token=stop, temperature=temperature, **policy)
        steps = torch.cat([*stream(model, prompts, n, generator=generators(len(rows)), **how)], dim=1).tolist()
        assert [row + new[:len(one) - len(row)] for row, new, one in zip(rows, steps, alone)] == alone
    assert generate(model, prompts, n, generator=generators(len(rows)), **how) == alone


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


def shifted_by_hand(model, prompt, n, generator, n_keep, n_removed):
    oracle, tokens, length = Oracle(model), list(prompt), 0
    oracle.new(0)
    new = tokens if len(tokens) <= BLOCK else tokens[:n_keep] + tokens[len(tokens) - BLOCK + n_keep:]
    for _ in range(n):
        if length + len(new) > BLOCK:
            oracle.shift(0, n_keep, n_removed)
            length -= n_removed
        length += len(new)
        new = [int(sample_token(oracle.feed(0, new)[None], generator=generator))]
        tokens = tokens + new
    return tokens


@functools.cache
def expected_shifts(changes, n_keep, seed):
    """llama.cpp's rule: half of what is not kept goes, (block_size - n_keep) // 2 positions."""
    model = model_of(seed, **dict(changes))
    prompts = [torch.randint(29, (n,)).tolist() for n in (3, BLOCK - 1, BLOCK, BLOCK + 1, 40)]
    prompts.insert(2, prompts[2])  # samples of a full prompt shift one by one
    return model, prompts, [shifted_by_hand(model, prompt, 3 * BLOCK, generator, n_keep, (BLOCK - n_keep) // 2)
                            for prompt, generator in zip(prompts, generators(6))]


@pytest.mark.parametrize('kind', [None, *KINDS])
@pytest.mark.parametrize('n_keep', [0, 3])
@pytest.mark.parametrize('changes', UNBOUNDED, ids=str)
def test_shifting_keeps_the_keys_and_turns_them(changes, n_keep, kind):
    for seed in range(sizes(1, 10)):
        model, prompts, expected = expected_shifts(tuple(changes.items()), n_keep, seed)
        cache = kind and make_cache(model, kind, 6)
        assert generate(model, prompts, 3 * BLOCK, generator=generators(6), when_full='shift', n_keep=n_keep,
                        use_cache=True, cache=cache) == expected


def test_a_sample_does_not_depend_on_how_many_share_the_batch():
    model, idx = f32(9), torch.randint(29, (1, 6))
    for way in ('no cache', 'tuples', 'cpu'):
        ten, three, one = (
            generate(model, idx, 30, generator=generators(10)[:n], num_samples=n, **WAYS[way](model, n))
            for n in (10, 3, 1))
        assert torch.equal(three, ten[:3]) and torch.equal(one, ten[:1])
        alone = generate(model, idx, 30, generator=torch.Generator().manual_seed(4), **WAYS[way](model, 1))
        assert torch.equal(alone[0], ten[4])  # and a list of one generator draws what the generator draws


def test_stopped_rows_leave_the_batch():
    """The batch is halved as rows stop, what is drawn for the others does not change, and nobody waits for the last."""
    for prompts in ([[1, 2]] * 16, [[1, 2]] * 8 + [[3]] * 8):
        model, batch_sizes = f32(11), []

        def decoder(idx, kv_cache, model=model, batch_sizes=batch_sizes):
            batch_sizes.append(idx.size(0))
            return model(idx, kv_cache=kv_cache, use_cache=True)[::2]
        how = dict(use_cache=True, generator=torch.Generator())
        free, how['generator'] = generate(model, prompts, 60, **how), torch.Generator()
        ends = [row.index(7, len(p)) + 1 if 7 in row[len(p):] else len(row) for row, p in zip(free, prompts)]
        assert generate(model, prompts, 60, decoder=decoder, stop_token=7, **how) == [
            row[:end] for row, end in zip(free, ends)]
        assert batch_sizes[0] == 16 and batch_sizes[-1] <= 8, batch_sizes
        # rows that are done, but still there, are never more than the others
        assert sum(batch_sizes) <= 2 * sum(end - len(p) for end, p in zip(ends, prompts)) + 64, batch_sizes


def test_what_a_full_context_costs():
    """
    A shift of learned positions feeds two tokens a token, and a crop the whole window. Neither allocates another cache.
    """
    model, fed, seen = f32(12), [], set()
    cpu = decode.best(model, 1, name='cpu')

    def decoder(idx, kv_cache):
        fed.append(idx.size(1))
        logits, kv_cache = cpu(idx, kv_cache)
        seen.add(kv_cache[0][0].data_ptr())
        return logits, kv_cache
    for _ in stream(model, torch.tensor([[1]]), 400, use_cache=True, decoder=decoder, when_full='shift'):
        pass
    assert max(fed) == BLOCK // 2 and sum(fed) <= 2 * 400 and len(seen) == 1
    for generate_all in (lambda **how: [*stream(model, torch.tensor([[1]]), 50, **how)],
                         lambda **how: model.generate(torch.tensor([[1]]), 50, **how)):
        fed.clear()
        seen.clear()
        generate_all(use_cache=True, decoder=decoder)
        assert fed == [1] * BLOCK + [BLOCK] * 34 and len(seen) == 1


@pytest.mark.parametrize('changes, bad, message', [
    (dict(), dict(when_full='slide'), "'crop', 'shift' or 'roll'"),
    (dict(), dict(keep=3), 'keep=3'),
    (dict(), dict(n_keep=3), 'n_keep=3'),
    (dict(), dict(when_full='shift', keep=0), 'must fit in 16'),
    (dict(), dict(when_full='shift', keep=BLOCK + 1), 'must fit in 16'),
    (dict(), dict(when_full='shift', n_keep=-1), 'must fit in 16'),
    (dict(), dict(when_full='shift', keep=BLOCK, n_keep=1), 'must fit in 16'),
    (dict(), dict(when_full='roll'), 'learned positions end at block_size 16'),
    (dict(position='rope', window=5), dict(when_full='crop'), "when_full=roll; not 'crop'"),
    (dict(position='rope', window=5), dict(when_full='shift'), "when_full=roll; not 'shift'"),
    (dict(position='rope', window=5), dict(n_keep=1), 'n_keep=1'),
    (dict(position='rope'), dict(when_full='roll', n_keep=16), 'must fit in 16'),
    (dict(position='rope'), dict(when_full='roll', keep=0), 'must fit in 16'),
    (dict(position='rope'), dict(when_full='shift', use_cache=False), 'needs the cache'),
])
def test_a_policy_that_makes_no_sense_is_refused(changes, bad, message):
    for function in (generate, stream):
        with pytest.raises(ValueError, match=message):
            function(model_of(**changes), [[1, 2], [3]], 5, **dict(use_cache=True) | bad)


@pytest.mark.parametrize('kind', KINDS)
def test_a_cache_of_a_model_without_a_window_cannot_roll(kind):
    model = model_of(position='rope')
    with pytest.raises(ValueError, match=r'model.with_window\(12, 4\)'):
        stream(model, [[1, 2]], 5, use_cache=True, cache=make_cache(model, 'paged', 1), when_full='roll', n_keep=4)
    rolled = model.with_window(12, 4)
    cache = make_cache(rolled, kind, 1)
    assert (generate(rolled, [[1, 2]], 5 * BLOCK, use_cache=True, cache=cache, temperature=0)
            == generate(model, [[1, 2]], 5 * BLOCK, when_full='roll', n_keep=4, temperature=0))


@pytest.mark.parametrize('policy', [dict(), dict(when_full='shift'), dict(when_full='shift', keep=3, n_keep=1),
                                    dict(when_full='shift', keep=3, n_keep=4)], ids=str)
@pytest.mark.parametrize('decoder', [False, True])
@torch.no_grad()
def test_the_loss_of_a_policy_is_that_of_the_contexts_of_generation(policy, decoder):
    """benchmarks/loss.py against a loop over lists."""
    model, tokens = f32(0), torch.randint(29, (3, 50))
    keep = BLOCK if not policy else policy.get('keep', BLOCK // 2)
    cache = cache_for(model, 3, decode.best(model, 3)) if decoder else None
    nll, context = negative_log_likelihoods(model, tokens, cache, skip=4, **policy)
    assert nll.shape == (45, 3) and context.shape == (45,)
    for row, text in enumerate(tokens.tolist()):
        seen = text[:1]
        for t in range(1, 50):
            if t > 4:
                logp = model(torch.tensor([seen]), use_cache=False)[0][0, -1].log_softmax(-1)
                assert len(seen) == context[t - 5] and abs(nll[t - 5, row] + logp[text[t]]) < 1e-3
            seen = seen + [text[t]]
            if len(seen) > BLOCK:
                seen = text[:min(1, policy.get('n_keep', 0))] + seen[-keep:]
