"""
Rotary, ALiBi and no positions, grouped heads, windows and sinks: any chunks through the model's own cache give the
logits of the plain float64 GPT over the whole text, far past block_size. And the mistakes that others have made.
"""
import itertools
import math

import plain_gpt
import pytest
import torch
from conftest import sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cache_exactness import large

from model import GPT, GPTConfig
from positions import Positions, RollingKVCache, alibi_slopes, rotary_angles, rotate, visible

BLOCK = 16


def settings_of(**changes):
    return dict(position='rope', n_kv_head=0, window=0, n_sink=0, gelu='none') | changes


def model_of(seed, **changes):
    return large(seed, n_head=4, n_embd=32, **changes)


def plain(model, idx):
    c = model.config
    with torch.no_grad():
        return plain_gpt.logits(model.state_dict(), c.n_head, idx, c.position, c.n_kv_head, c.window, c.n_sink,
                                c.rope_theta, c.gelu)


@torch.no_grad()
def in_chunks(model, idx, chunks, kv_cache=None):
    """Logits of all positions (B, T, vocab_size), through a cache that is fed chunk by chunk, and the cache."""
    found, start = [], 0
    for n in chunks:
        part = idx[:, start:start + n]
        logits, _, kv_cache = model(part, targets=part, kv_cache=kv_cache, use_cache=True)
        found.append(logits)
        start += n
    assert start == idx.size(1)
    return torch.cat(found, dim=1), kv_cache


def cut(T, sizes_of_chunks, generator):
    chunks = []
    while sum(chunks) < T:
        n = int(torch.randint(*sizes_of_chunks, (), generator=generator))
        chunks.append(min(n, T - sum(chunks)))
    return chunks


WINDOWS = (0, 0), (1, 0), (5, 0), (15, 0), (5, 2), (1, 1), (7, 3)  # and sinks
CASES = [(position, n_kv_head, window, n_sink) for position, n_kv_head, (window, n_sink) in itertools.product(
    ('learned', 'rope', 'alibi', 'none'), (4, 2, 1), WINDOWS)]


@pytest.mark.parametrize('position, n_kv_head, window, n_sink', sizes(CASES[::4] + CASES[5::9], CASES))
def test_any_chunks_equal_the_plain_model_over_the_whole_text(position, n_kv_head, window, n_sink):
    for seed, gelu in enumerate(sizes(('none',), ('none', 'tanh'))):
        model = model_of(seed, position=position, n_kv_head=n_kv_head, window=window, n_sink=n_sink, gelu=gelu)
        T = BLOCK if model.config.max_positions == BLOCK else BLOCK * sizes(6, 20)
        idx, generator = torch.randint(29, (2, T)), torch.Generator().manual_seed(seed)
        expected = plain(model, idx)
        with torch.no_grad():
            assert (model(idx, targets=idx, use_cache=False)[0] - expected).abs().max() < 1e-10
        for longest in (1, 4, 3 * BLOCK):
            logits, kv_cache = in_chunks(model, idx, cut(T, (1, longest + 1), generator))
            assert (logits - expected).abs().max() < 1e-10, longest
            assert kv_cache[0].cache_pos == T and kv_cache[0].k_cache.size(2) == model.config.n_slots


@settings(max_examples=sizes(15, 150), deadline=None, derandomize=True)
@given(st.data())
def test_sequences_of_different_lengths_are_what_each_is_alone(data):
    """cache_pos as a tensor: rows begin anywhere, and each row of the rolling cache moves at a time of its own."""
    window, n_sink = data.draw(st.sampled_from([(1, 0), (2, 0), (5, 0), (4, 2), (6, 1)]))
    model = model_of(data.draw(st.integers(0, 100)), position=data.draw(st.sampled_from(['rope', 'alibi', 'none'])),
                     n_kv_head=data.draw(st.sampled_from([1, 4])), window=window, n_sink=n_sink)
    starts = data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=4))
    chunks = data.draw(st.lists(st.integers(1, 2 * window + 3), min_size=1, max_size=8))
    idx = torch.randint(29, (len(starts), max(starts) + sum(chunks)))
    expected = plain(model, idx)
    rows = [in_chunks(model, idx[row:row + 1, :start], [start])[1] for row, start in enumerate(starts)]
    kv_cache = [RollingKVCache(torch.cat([layer.k_cache for layer in layers]),
                               torch.cat([layer.v_cache for layer in layers]), torch.tensor(starts),
                               torch.cat([layer.first for layer in layers])) for layers in zip(*rows)]
    done = 0
    for n in chunks:
        part = torch.stack([idx[row, start + done:start + done + n] for row, start in enumerate(starts)])
        logits, kv_cache = in_chunks(model, part, [n], kv_cache)
        for row, start in enumerate(starts):
            assert (logits[row] - expected[row, start + done:start + done + n]).abs().max() < 1e-10
        done += n
    assert kv_cache[0].cache_pos.tolist() == [start + done for start in starts]


def test_the_window_counts_the_token_itself():
    """W keys, its own included: key j is seen at t iff t - j < W."""
    t = torch.arange(6)
    seen = visible(t[:, None], t[None], window=3)
    assert seen.sum(1).tolist() == [1, 2, 3, 3, 3, 3] and seen[5].tolist() == [False] * 3 + [True] * 3
    assert visible(t[:, None], t[None], 2, 1)[5].tolist() == [True, False, False, False, True, True]


@pytest.mark.parametrize('T', [4, 5, 6, 10, 11, 12])
def test_lengths_around_the_window_and_the_buffer(T):
    """W - 1, W, W + 1 tokens, and 2 W - 1, 2 W, 2 W + 1: where the mask begins to hide, and where rows move."""
    model, idx = model_of(T, position='rope', window=5), torch.randint(29, (1, T + 3))
    logits, _ = in_chunks(model, idx, [T, 1, 1, 1])
    assert (logits - plain(model, idx)).abs().max() < 1e-10


def test_a_window_of_one_more_key_is_another_function():
    model, idx = model_of(0, position='rope', window=5), torch.randint(29, (1, 12))
    wider = model.with_window(6)
    assert (plain(model, idx) - plain(wider, idx)).abs().max() > 1e-3
    assert torch.equal(plain(model, idx)[:, :5], plain(wider, idx)[:, :5])
    logits, _ = in_chunks(wider, idx, [1] * 12)
    assert (logits - plain(wider, idx)).abs().max() < 1e-10


def test_decoding_does_not_ignore_the_window():
    """The keys that a decoded token attends over are no more than its window, and the sinks."""
    model, seen = model_of(1, position='rope', window=5), []
    attn = model.transformer.h[1].attn
    before, kv_cache = attn.forward, None
    attn.forward = lambda x, positions, cache, *how: seen.append(positions) or before(x, positions, cache, *how)
    in_chunks(model, torch.randint(29, (1, 40)), [20] + [1] * 20)
    assert not any(p.masks for p in seen[-20:])  # no mask is made, since only the window is read
    _, kv_cache = in_chunks(model, torch.randint(29, (1, 40)), [40])
    cache = kv_cache[0]
    k, v, keys, _ = cache.append(torch.zeros(1, 4, 1, 8).double(), torch.zeros(1, 4, 1, 8).double(),
                                 Positions(model.config, torch.tensor([40]), torch.float64))
    assert k.size(2) == 5 and keys is None


def test_sinks_are_seen_during_prefill_and_after():
    model, idx = model_of(2, position='rope', window=4, n_sink=2), torch.randint(29, (1, 40))
    logits, _ = in_chunks(model, idx, [40])
    without, _ = in_chunks(model.with_window(4), idx, [40])
    assert (logits - without)[:, 6:].abs().amax(dim=(0, 2)).min() > 1e-4  # at each position behind the first windows
    assert (logits - plain(model, idx)).abs().max() < 1e-10


def test_going_back_is_free_while_the_window_is_stored_and_refused_afterwards():
    model, idx = model_of(3, position='rope', window=5, n_sink=1), torch.randint(29, (1, 60))
    logits, kv_cache = in_chunks(model, idx[:, :33], [33])
    first = int(kv_cache[0].first[0])
    expected = plain(model, idx)
    for back in range(0, 34):
        rewound = [layer._replace(cache_pos=back).clone() for layer in kv_cache]
        if back > 1 and back - 4 < first:
            before = [layer.k_cache.clone() for layer in rewound]
            with pytest.raises(ValueError, match='not in the cache any more'):
                in_chunks(model, idx[:, back:back + 3], [3], rewound)
            assert all(torch.equal(a, layer.k_cache) for a, layer in zip(before, rewound))
        else:
            again, _ = in_chunks(model, idx[:, back:], cut(60 - back, (3, 4), None), rewound)
            assert (again - expected[:, back:]).abs().max() < 1e-10, back
    assert first > 20  # some were refused


def test_an_older_tuple_goes_on_after_the_rows_have_moved():
    model, idx = model_of(4, position='alibi', window=5), torch.randint(29, (1, 30))
    _, old = in_chunks(model, idx[:, :10], [10])  # the buffer is full: the next token moves rows
    in_chunks(model, idx[:, 10:12], [1, 1], old)
    logits, _ = in_chunks(model, idx[:, 10:], [1] * 20, old)
    assert (logits - plain(model, idx)[:, 10:]).abs().max() < 1e-10


def test_slots_behind_the_newest_row_are_never_read():
    for n_sink in (0, 2):
        model, idx = model_of(5, position='rope', window=5, n_sink=n_sink), torch.randint(29, (2, 50))
        kv_cache = model.empty_cache(2)
        for layer in kv_cache:
            layer.k_cache.fill_(math.nan), layer.v_cache.fill_(math.nan)
        logits, _ = in_chunks(model, idx, cut(50, (1, 9), torch.Generator().manual_seed(0)), kv_cache)
        assert (logits - plain(model, idx)).abs().max() < 1e-10


@pytest.mark.parametrize('dtype, most', [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_rotary_angles_at_a_million(dtype, most):
    """Scores depend on the distance alone. With angles in float32 or bfloat16 they would not, this far out."""
    config = GPTConfig(block_size=16, vocab_size=5, n_layer=1, n_head=1, n_embd=64, position='rope', window=8)
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 64), torch.randn(1, 1, 1, 64)

    def score(t, j):
        at = [Positions(config, torch.tensor([p]), dtype).rotated(x.to(dtype)) for p, x in ((t, q), (j, k))]
        return float((at[0].double() * at[1].double()).sum()) / 8
    near, far = score(5, 0), score(1_000_005, 1_000_000)
    exact = rotate(q.double(), *turned(5)) @ rotate(k.double(), *turned(0)).mT / 8
    assert abs(near - float(exact)) < 4 * most and abs(far - float(exact)) < 4 * most
    in_float32 = torch.tensor(1_000_005.0) * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    assert (in_float32.double() - rotary_angles(torch.tensor(1_000_005), 64, 10000.0)).abs().max() > 1e-3


def turned(position):
    angles = rotary_angles(torch.tensor([position]), 64, 10000.0)
    return angles.cos(), angles.sin()


def test_alibi_slopes():
    assert alibi_slopes(8).tolist() == [2.0 ** -i for i in range(1, 9)]  # the paper's example
    for n_head in range(1, 33):
        assert alibi_slopes(n_head).tolist() == pytest.approx(plain_gpt.alibi_slopes(n_head), rel=1e-12), n_head


@pytest.mark.parametrize('wrong, message', [
    (dict(position='rotary'), 'learned, rope, alibi or none'), (dict(position='rope', n_embd=12), 'even'),
    (dict(n_kv_head=3), 'divisible by n_kv_head'), (dict(n_kv_head=-1), 'n_kv_head'),
    (dict(n_sink=1), 'needs a window'), (dict(window=16), 'must be less than block_size 16'),
    (dict(window=17), 'less than block_size 16'), (dict(window=2.0), 'window'), (dict(window=True), 'window'),
    (dict(window=12, n_sink=4), 'n_sink 4 must be less than block_size'),
    (dict(gelu='relu'), 'gelu'), (dict(rope_theta=0), 'rope_theta'),
])
def test_bad_combinations_are_refused_in_a_line(wrong, message):
    with pytest.raises(ValueError, match=message) as e:
        GPTConfig(**dict(block_size=16, vocab_size=29, n_layer=1, n_head=4, n_embd=16) | wrong)
    assert '\n' not in str(e.value)


def test_plain_tuples_of_a_model_with_a_window_need_their_first_position():
    model, idx = model_of(6, position='rope', window=5), torch.randint(29, (1, 30))
    _, kv_cache = in_chunks(model, idx[:, :20], [20])
    logits, _ = in_chunks(model, idx[:, 20:], [10], [tuple(layer) for layer in kv_cache])
    assert (logits - plain(model, idx)[:, 20:]).abs().max() < 1e-10
    with pytest.raises(ValueError, match='tuple of 4'):
        model(idx[:, 20:], kv_cache=[tuple(layer)[:3] for layer in kv_cache])


@pytest.mark.parametrize('changes', [
    dict(), dict(n_kv_head=1), dict(window=5), dict(window=5, n_sink=2, n_kv_head=2), dict(position='alibi'),
])
def test_the_memory_of_a_cache_is_what_the_formula_says(changes):
    model = model_of(7, **settings_of(**changes)).float()
    c, B = model.config, 3
    expected = 2 * c.n_layer * B * c.n_kv_head * c.head_dim * c.n_slots * 4
    kv_cache = model.empty_cache(B)
    for _ in range(3 if c.window else 1):  # it does not grow
        assert sum(cache.untyped_storage().nbytes() for layer in kv_cache for cache in layer[:2]) == expected
        _, _, kv_cache = model(torch.randint(29, (B, BLOCK)), kv_cache=kv_cache)


def test_gradients_go_through_sinks_and_alibi():
    for position, n_sink in (('rope', 2), ('alibi', 2), ('alibi', 0)):
        model, idx = model_of(8, position=position, window=4, n_sink=n_sink), torch.randint(29, (2, 16))
        weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        weights['lm_head.weight'] = weights['transformer.wte.weight']
        model.train()(idx, idx)[1].backward()
        logits = plain_gpt.logits(weights, 4, idx, position, 0, 4, n_sink)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), idx.flatten()).backward()
        for name, p in model.named_parameters():
            assert (p.grad - weights[name].grad).abs().max() < 1e-10, (position, name)


def test_a_model_that_was_made_before_these_settings_is_the_same():
    old = dict(block_size=16, vocab_size=29, n_layer=2, n_head=2, n_embd=16, dropout=0.0, bias=True)
    c = config = GPTConfig(**old)
    assert (c.position, c.n_kv_head, c.window, c.n_sink, c.gelu) == ('learned', 2, 0, 0, 'none')
    torch.manual_seed(0)
    weights = GPT(config).state_dict()
    assert 'transformer.wpe.weight' in weights and len(weights) == 29
    assert weights['transformer.h.0.attn.c_attn.weight'].shape == (48, 16)
    assert 'transformer.wpe.weight' not in GPT(GPTConfig(**old, position='rope')).state_dict()
