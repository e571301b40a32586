"""
Past the window, and prompts of different lengths: against a plain loop that keeps lists of tokens and has no cache.
"""
import functools

import pytest
import torch
from conftest import sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cache_exactness import large

import decode
from generation import Sequence, generate, stream
from model import sample_token

BLOCK = 16
POLICIES = [
    dict(),
    dict(when_full='shift'),
    dict(when_full='shift', keep=5),
    dict(when_full='shift', keep=1, n_keep=3),
    dict(when_full='shift', keep=BLOCK),
    dict(when_full='shift', keep=4, n_keep=12),
    dict(when_full='shift', n_keep=2),
]


def f32(seed, **changes):
    return large(seed, torch.float32, **changes)


@functools.cache
def expected_text(seed, prompt, n, temperature, generator_seed, policy):
    """`by_hand`, which is the same for every `way`. prompt, policy: tuples, of tokens and of pairs of arguments."""
    return by_hand(f32(seed), list(prompt), n, temperature, torch.Generator().manual_seed(generator_seed),
                   **dict(policy))


def by_hand(model, prompt, n, temperature=0.0, generator=None, when_full='crop', keep=None, n_keep=0, stop_token=None):
    """What the policies mean: one sequence, a list, and every token a full pass over the context."""
    n_keep = min(n_keep, len(prompt))
    keep = BLOCK if when_full == 'crop' else min(BLOCK // 2, BLOCK - n_keep) if keep is None else keep
    context = prompt if len(prompt) <= BLOCK else prompt[:n_keep] + prompt[len(prompt) - BLOCK + n_keep:]
    pinned, out = prompt[:n_keep], list(prompt)
    for _ in range(n):
        logits = model(torch.tensor([context]), use_cache=False)[0][:, -1]
        token = sample_token(logits, temperature, generator=generator).item()
        out.append(token)
        if token == stop_token:
            break
        context = context + [token]
        if len(context) > BLOCK:
            context = pinned + context[len(context) - keep:]
    return out


@pytest.fixture(params=['no cache', 'eager', 'cpu'])
def way(request):
    if request.param == 'no cache':
        return lambda model: dict(use_cache=False)
    if request.param == 'eager':
        return lambda model: dict(use_cache=True)
    return lambda model: dict(use_cache=True, decoder=decode.best(model, 1))


@pytest.mark.parametrize('policy', POLICIES, ids=str)
def test_both_policies_on_both_sides_of_the_window(policy, way):
    lengths = sizes([1, 6, BLOCK, BLOCK + 1, 3 * BLOCK], [1, 2, 6, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
    for seed, T in enumerate(lengths):
        model, prompt = f32(seed), torch.randint(29, (T,)).tolist()
        for temperature in (0.0, 0.8):
            expected = expected_text(seed, tuple(prompt), 45, temperature, seed, tuple(policy.items()))
            got = generate(
                model, [prompt], 45, temperature, generator=torch.Generator().manual_seed(seed), **way(model), **policy
            )
            assert got == [expected], (T, temperature)


@pytest.mark.parametrize('policy', POLICIES, ids=str)
def test_prompts_of_different_lengths_are_each_as_alone(policy, way):
    for seed in range(sizes(1, 4)):
        model = f32(seed)
        lengths = torch.randint(1, 2 * BLOCK, (6,)).tolist() + [1, BLOCK]
        prompts = [torch.randint(29, (T,)).tolist() for T in lengths]
        for temperature, stop in ((0.0, None), (0.8, None), (0.8, 11)):
            how = tuple((policy | dict(stop_token=stop)).items())
            alone = [expected_text(seed, tuple(prompt), 40, temperature, row, how)
                     for row, prompt in enumerate(prompts)]
            together = generate(
                model,
                prompts,
                40,
                temperature,
                stop_token=stop,
                generator=[torch.Generator().manual_seed(row) for row in range(8)],
                **way(model),
                **policy,
            )
            assert together == alone, (temperature, stop)


@settings(max_examples=sizes(8, 25), deadline=None)
@given(
    st.lists(st.integers(1, 2 * BLOCK), min_size=2, max_size=5),
    st.integers(0, 12),
    st.sampled_from([None, 1, 4]),
    st.sampled_from([None, 11]),
    st.integers(1, 2),
)
def test_each_row_of_a_ragged_batch_has_its_own_n_keep(lengths, n_keep, keep, stop, num_samples):
    model, policy = f32(3), dict(when_full='shift', keep=keep, n_keep=n_keep)
    prompts = [[(7 * row + 3 * i) % 29 for i in range(T)] for row, T in enumerate(lengths)]
    rows = [prompt for prompt in prompts for _ in range(num_samples)]

    def generators():
        return [torch.Generator().manual_seed(row) for row in range(len(rows))]

    alone = [
        by_hand(model, prompt, 30, 1.0, generator, stop_token=stop, **policy)
        for prompt, generator in zip(rows, generators())
    ]
    for use_cache in (False, True):
        how = dict(use_cache=use_cache, stop_token=stop, num_samples=num_samples, **policy)
        assert generate(model, prompts, 30, generator=generators(), **how) == alone
        streamed = torch.cat(list(stream(model, prompts, 30, generator=generators(), **how)), dim=1).tolist()
        assert [row + new[:len(row_alone) - len(row)] for row, new, row_alone in zip(rows, streamed, alone)] == alone


def test_the_shortest_prompt_does_not_bound_what_the_others_keep():
    model, policy = f32(0), dict(temperature=0, when_full='shift', keep=4, n_keep=4)
    for use_cache in (False, True):
        together = generate(model, [[1, 2, 3, 4, 5, 6], [7]], 40, use_cache=use_cache, **policy)
        assert together == [generate(model, [prompt], 40, **policy)[0] for prompt in ([1, 2, 3, 4, 5, 6], [7])]


def test_a_sample_does_not_depend_on_how_many_share_the_batch(way):
    model, idx = f32(9), torch.randint(29, (1, 6))
    ten = generate(
        model,
        idx,
        30,
        generator=[torch.Generator().manual_seed(row) for row in range(10)],
        num_samples=10,
        **way(model),
    )
    for n in (1, 3):
        few = generate(
            model,
            idx,
            30,
            generator=[torch.Generator().manual_seed(row) for row in range(n)],
            num_samples=n,
            **way(model),
        )
        assert torch.equal(few, ten[:n])
    one = generate(model, idx, 30, generator=torch.Generator().manual_seed(4), **way(model))
    assert torch.equal(one[0], ten[4])  # and a list of one generator draws what the generator draws


def test_num_samples_of_ragged_prompts():
    model, prompts = f32(10), [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    generators = lambda: [torch.Generator().manual_seed(row) for row in range(6)]  # noqa: E731
    twice = generate(model, [p for p in prompts for _ in range(2)], 30, generator=generators(), use_cache=True)
    assert generate(model, prompts, 30, generator=generators(), use_cache=True, num_samples=2) == twice


def test_stopped_rows_leave_the_batch():
    """The batch is halved as rows stop, what is drawn for the others does not change, and nobody waits for the last."""
    for prompts in ([[1, 2]] * 16, [[1, 2]] * 8 + [[3]] * 8):
        model, batch_sizes = f32(11), []

        def decoder(idx, kv_cache, model=model, batch_sizes=batch_sizes):
            batch_sizes.append(idx.size(0))
            logits, _, kv_cache = model(idx, kv_cache=kv_cache, use_cache=True)
            return logits, kv_cache
        free = generate(model, prompts, 60, use_cache=True, generator=torch.Generator().manual_seed(1))
        stopped = generate(
            model,
            prompts,
            60,
            use_cache=True,
            decoder=decoder,
            stop_token=7,
            generator=torch.Generator().manual_seed(1),
        )
        assert stopped == [
            row[: row.index(7, len(p)) + 1] if 7 in row[len(p) :] else row for row, p in zip(free, prompts)
        ]
        assert batch_sizes[0] == 16 and batch_sizes[-1] <= 8, batch_sizes
        steps = [row.index(7, len(p)) - len(p) + 1 if 7 in row[len(p):] else 60 for row, p in zip(free, prompts)]
        # rows that are done, but still there, are never more than the others
        assert sum(batch_sizes) <= 2 * sum(steps) + 64, (batch_sizes, steps)


def test_a_shift_feeds_two_tokens_a_token_and_a_crop_the_whole_window():
    model, fed = f32(12), []

    def decoder(idx, kv_cache):
        fed.append(idx.size(1))
        logits, _, kv_cache = model(idx, kv_cache=kv_cache, use_cache=True)
        return logits, kv_cache
    list(stream(model, torch.tensor([[1]]), 400, use_cache=True, decoder=decoder, when_full='shift'))
    assert max(fed) == BLOCK // 2 and sum(fed) <= 2 * 400
    fed.clear()
    list(stream(model, torch.tensor([[1]]), 50, use_cache=True, decoder=decoder))
    assert fed == [1] * BLOCK + [BLOCK] * 34


def test_a_crop_allocates_no_cache_and_keeps_its_storage():
    model, seen = f32(13), set()
    decoder = decode.best(model, 1, name='cpu')

    def watched(idx, kv_cache):
        logits, kv_cache = decoder(idx, kv_cache)
        seen.add(kv_cache[0][0].data_ptr())
        return logits, kv_cache
    for policy in (dict(), dict(when_full='shift')):
        seen.clear()
        list(stream(model, torch.tensor([[1, 2]]), 60, use_cache=True, decoder=watched, **policy))
        assert len(seen) == 1


def test_the_last_block_works_out_one_position_only():
    """What lm_head reads of the last position is the same to the bit whether the others are worked out or not."""
    for seed in range(5):
        model, idx = f32(seed), torch.randint(29, (3, 11))
        with torch.no_grad():
            positions = torch.arange(11)
            all_positions, cache = model.hidden_states(idx, positions, model.empty_cache(3))
            last, last_cache = model.hidden_states(idx, positions, model.empty_cache(3), last_only=True)
            torch.testing.assert_close(last, all_positions[:, -1:], atol=1e-6, rtol=1e-5)
            assert all(
                torch.equal(a.k_cache, b.k_cache) and torch.equal(a.v_cache, b.v_cache)
                for a, b in zip(cache, last_cache)
            )


@pytest.mark.parametrize('T', [1, 2, 5])
def test_ragged_steps_on_a_warm_cache(T):
    """cache_pos as a tensor, for one token or a chunk: each row is what it is alone."""
    torch.manual_seed(T)
    model, filled = f32(14), [3, 9, 1, 0]
    idx, more = torch.randint(29, (4, 9)), torch.randint(29, (4, T))
    with torch.no_grad():
        _, _, cache = model(idx, use_cache=True)
        ragged = [layer._replace(cache_pos=torch.tensor(filled)) for layer in cache]
        for layer in ragged:  # what is beyond a row's cache_pos is nobody's business
            for row, n in enumerate(filled):
                layer.k_cache[row, :, n:], layer.v_cache[row, :, n:] = 1e4, -1e4
        for step in (decode.EagerDecoder(model), decode.best(model, 1, name='cpu')):
            logits, after = step(more, [layer.clone() for layer in ragged])
            assert after[0].cache_pos.tolist() == [n + T for n in filled]
            for row, n in enumerate(filled):
                alone = model(torch.cat([idx[row, :n], more[row]])[None], use_cache=False)[0]
                torch.testing.assert_close(logits[row:row + 1], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    'bad',
    [
        dict(when_full='slide'),
        dict(keep=3),
        dict(n_keep=3),
        dict(when_full='shift', keep=0),
        dict(when_full='shift', keep=BLOCK + 1),
        dict(when_full='shift', n_keep=-1),
        dict(when_full='shift', keep=BLOCK, n_keep=1),
        dict(idx=[]),
        dict(idx=[[1], []]),
        dict(idx=[[1], [29]]),
        dict(idx=[[0.5]]),
        dict(generator=[torch.Generator()] * 3),
        dict(idx=[[[1]]]),
        dict(idx=[1, 2]),
    ],
)
def test_what_makes_no_sense_is_refused(bad):
    settings = dict(idx=[[1, 2], [3]], max_new_tokens=5) | bad
    with pytest.raises(ValueError):
        generate(f32(15), **settings)


def test_a_context_is_what_is_left_of_the_text():
    """Against slices of a list, with what the cache lacks of it, at every length."""
    for block_size, keep, n_keep in ((1, 1, 0), (2, 1, 1), (5, 5, 0), (5, 2, 1), (6, 3, 3)):
        for n in (1, block_size, block_size + 3):
            text = list(range(100, 100 + n))
            pinned, context = text[:min(n_keep, n)], text
            sequence = Sequence(list(text), block_size, keep, min(n_keep, n))
            if n > block_size:
                context = pinned + text[n - block_size + len(pinned):]
            for token in range(40):
                for cached in range(len(context)):
                    sequence.cached = cached
                    assert sequence.uncached() == context[cached:] and sequence.length == len(context)
                sequence.append(token)
                context = context + [token]
                if len(context) > block_size:
                    context = pinned + context[len(context) - keep:]
                    assert sequence.cached == 0
