"""The cache of model.py: for any chunks the logits of one pass; and the mistakes of other projects' caches."""
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_gpt import plain
from tiny_models import MODELS, VOCAB, model_of

import positions


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def in_chunks(model, idx, chunks, cache=None):
    """Logits at every position, (B, T, vocab_size), fed chunk by chunk to one cache; and the cache."""
    logits, start = [], 0
    for n in chunks:
        part = idx[:, start:start + n]
        of_chunk, _, cache = model(part, part, cache, use_cache=True)
        logits.append(of_chunk)
        start += n
    return torch.cat(logits, dim=1), cache


def cut(data, T):
    edges = [0, *sorted(data.draw(st.sets(st.integers(1, T - 1)) if T > 1 else st.just(set()))), T]
    return [b - a for a, b in zip(edges, edges[1:])]


@settings(max_examples=sizes(60, 400), derandomize=True)
@given(st.data())
def test_any_chunks_give_the_logits_of_one_uncached_pass_and_of_the_judge(data):
    kind, how = data.draw(st.sampled_from([*MODELS])), dict(n_layer=data.draw(st.integers(1, 3)))
    if 'window' in kind:
        how |= dict(window=data.draw(st.integers(1, 13)), n_sink=data.draw(st.integers(0, 3)))
    model = model_of(kind, data.draw(st.integers(0, 10**6)), torch.float64, **how)
    endless = model.config.max_positions != model.config.block_size
    idx = torch.randint(VOCAB, (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 90 if endless else 40))))
    expected, (logits, cache) = plain(model, idx), in_chunks(model, idx, cut(data, idx.size(1)))
    for found in (logits, model(idx, idx)[0]):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(model(idx)[0], expected[:, -1:], atol=1e-10, rtol=0)
    assert {layer.cache_pos for layer in cache} == {idx.size(1)}
    c = model.config
    n_numbers = len(idx) * c.n_kv_head * c.head_dim * (c.n_sink + 2 * c.window if c.window else 40)
    assert {stored.untyped_storage().nbytes() for layer in cache for stored in layer[:2]} == {8 * n_numbers}


@pytest.mark.parametrize('kind', MODELS)
def test_rows_of_different_lengths_are_each_as_alone(kind):
    """Padded on the right, with a tensor of cache_pos; chunks of one token and of three."""
    for seed in range(sizes(1, 5)):
        model = model_of(kind, seed, torch.float64)
        most = min(4, model.config.window or 4)  # what a ring can take back
        lengths = torch.tensor([9, 9 - most, 9 - most // 2])
        idx = torch.randint(VOCAB, (3, 30))
        cache = [layer._replace(cache_pos=lengths) for layer in model(idx[:, :9])[2]]
        expected = [plain(model, torch.cat((row[:n], row[9:]))[None])[0] for row, n in zip(idx, lengths.tolist())]
        start = 9
        for T in (1, 3, 1, 5, 1, 4):
            logits, _, cache = model(idx[:, start:start + T], kv_cache=cache)
            start += T
            for row, n in enumerate(lengths.tolist()):
                torch.testing.assert_close(logits[row, 0], expected[row][n + start - 10], atol=1e-10, rtol=0)
            assert cache[1].cache_pos.tolist() == (lengths + start - 9).tolist()


@pytest.mark.parametrize('kind', ['learned', 'rope', 'rope window sinks'])
def test_slots_that_are_not_the_texts_are_never_read(kind):
    """From cache_pos on; in a ring those of positions that are not written yet."""
    model, idx = model_of(kind, 0, torch.float64), torch.randint(VOCAB, (2, 14))
    expected, cache = plain(model, idx), model(idx[:, :5])[2]
    for t in range(5, 14):
        for stored in (stored for layer in cache for stored in layer[:2]):
            stored[:, :, t:] = float('nan')
        logits, _, cache = model(idx[:, t:t + 1], kv_cache=cache)
        torch.testing.assert_close(logits[:, 0], expected[:, t], atol=1e-10, rtol=0)


def test_it_works_in_place_rewinding_is_free_and_a_branch_needs_a_clone():
    model, idx = model_of('learned', 9, torch.float64), torch.randint(29, (1, 10))
    left, right = torch.tensor([[3, 4]]), torch.tensor([[20, 21]])
    alone, cache = model(torch.cat([idx, left], 1))[0], model(idx)[2]
    branch = [layer.clone() for layer in cache]
    one = model(left[:, :1], kv_cache=cache)[2]
    assert one[0].k_cache.data_ptr() == cache[0].k_cache.data_ptr() and cache[0].cache_pos == 10
    model(right[:, :1], kv_cache=branch)
    assert (model(left[:, 1:], kv_cache=one)[0] - alone).abs().max() < 1e-10
    again = model(left, kv_cache=[tuple(layer) for layer in cache])[0]  # from the old tuple; plain tuples will do
    assert (again - alone).abs().max() < 1e-10
    one = model(left[:, :1], kv_cache=cache)[2]
    model(right[:, :1], kv_cache=cache)  # without the clone, this takes the branch's place
    assert (model(left[:, 1:], kv_cache=one)[0] - alone).abs().max() > 1e-3


@pytest.mark.parametrize('window, n_sink', [(1, 0), (5, 0), (5, 2), (8, 1)])
def test_going_back_by_a_window_and_one_is_free(window, n_sink):
    """The ring holds two windows, so what the token there sees is stored."""
    model = model_of('rope', 0, torch.float64, window=window, n_sink=n_sink)
    idx, other = torch.randint(VOCAB, (2, 1, 80))
    for end in (n_sink + 1, 2 * window + n_sink, 60, 61):
        cache = model(idx[:, :end])[2]
        for back in range(max(0, end - window - 1), end, sizes(3, 1)):
            text = torch.cat((idx[:, :back], other[:, back:back + 2 * window]), dim=1)
            rewound = [layer.clone()._replace(cache_pos=back) for layer in cache]
            logits = in_chunks(model, text[:, back:], [1] * (2 * window), rewound)[0]
            torch.testing.assert_close(logits, plain(model, text)[:, back:], atol=1e-10, rtol=0)


@pytest.mark.parametrize('position', ['none', 'rope', 'alibi'])
def test_a_sliding_cache_is_a_banded_mask_and_not_recomputation(position):
    """The measurement of KV_CACHE.md, which pytest -s prints: with two layers they differ, whatever the positions."""
    window, idx = 8, torch.randint(29, (1, 20), generator=torch.Generator().manual_seed(0))
    for n_layer in (1, 2, 4):
        model = model_of(position, 0, torch.float64, n_layer=n_layer)
        sliding = model.with_window(window)
        assert sliding.lm_head is model.lm_head and not model.config.window, "the weights are shared, the settings not"
        slid = in_chunks(sliding, idx, [1] * 20)[0][:, -1:]
        to_anew = (slid - plain(model, idx[:, -window:])[:, -1:]).abs().max().item()
        to_banded = (slid - plain(sliding, idx)[:, -1:]).abs().max().item()
        print(f"\n{position:>6}, {n_layer} layers: sliding cache - window anew {to_anew:.1e}, "
              f"sliding cache - banded mask {to_banded:.1e}", end='')
        assert to_banded < 1e-12
        assert to_anew < 1e-12 if n_layer == 1 else to_anew > 1e-2


DTYPES = [getattr(torch, name) for name in ('int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64')
          if hasattr(torch, name)]
IDX = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_integers_of_any_dtype_are_the_same_tokens_and_positions(dtype):
    model, idx = model_of('learned', block_size=300), IDX.to(dtype)
    assert torch.equal(model(idx)[0], model(IDX)[0]) and torch.equal(model(idx, use_cache=False)[0], model(IDX)[0])
    assert torch.equal(model(idx, idx)[0], model(IDX, IDX)[0]) and model(idx, idx)[1] == model(IDX, IDX)[1]
    for use_cache in (False, True):
        got = model.generate(idx, 20, temperature=0, use_cache=use_cache)
        assert got.dtype is torch.int64 and torch.equal(got, model.generate(IDX, 20, temperature=0))
    assert model.generate(idx, 0).dtype is torch.int64
    cache, steps = model(torch.randint(29, (2, 255)))[2], {}
    for each in (torch.int64, dtype):
        pos = torch.tensor([120, 100] if dtype is torch.int8 else [255, 100]).to(each)
        logits, _, after = model(IDX[:, :3], kv_cache=[layer.clone()._replace(cache_pos=pos) for layer in cache])
        steps[each] = logits, after[1].k_cache
        assert after[1].cache_pos.tolist() == [pos[0].item() + 3, 103]  # 258 is no uint8
    assert all(map(torch.equal, steps[dtype], steps[torch.int64]))


@pytest.mark.parametrize('wrong', [
    IDX.float(), IDX.half(), IDX.bool(), IDX.to(torch.complex64), IDX.tolist(), IDX.numpy(), None, 'text', 3],
    ids=lambda x: str(getattr(x, 'dtype', type(x).__name__)))
def test_other_tokens_are_refused_in_words(wrong):
    model, asked = model_of('learned', block_size=16), []
    cache = model(IDX)[2]
    asked += [lambda: model(wrong), lambda: model(wrong, IDX), lambda: model(wrong, kv_cache=cache),
              lambda: model(wrong, use_cache=False), lambda: model.generate(wrong, 3)]
    if wrong is not None:
        asked.append(lambda: model(IDX, wrong))
    for ask in asked:
        with pytest.raises(ValueError, match='integers'):
            ask()


def test_a_cache_that_is_not_to_be_used_is_refused():
    model = model_of('learned', block_size=16)
    with pytest.raises(ValueError, match='use_cache=False came with a kv_cache'):
        model(IDX, kv_cache=model(IDX)[2], use_cache=False)


def replaced(*positions):
    return lambda cache: [layer._replace(cache_pos=p) for layer, p in zip(cache, positions)]


def stored(change):
    return lambda cache: [layer._replace(k_cache=change(layer.k_cache), v_cache=change(layer.v_cache))
                          for layer in cache]


MISFITS = {  # of a cache of two rows with 5 tokens each, and one more token for each unless there are others
    'layers': ('layers', lambda cache: cache[:1], IDX[:, :1]),
    'layers that disagree': ('layer 1', replaced(5, 6), IDX[:, :1]),
    'rows that disagree': ('layer 1', replaced(torch.tensor([5, 4]), torch.tensor([5, 5])), IDX[:, :1]),
    'another batch': ('need', lambda cache: cache, IDX[:1, :1]),
    'other slots': ('need', stored(lambda t: t[:, :, :8]), IDX[:, :1]),
    'one storage': ('make it with repeat', stored(lambda t: t[:1].expand(2, -1, -1, -1)), IDX[:, :1]),
    'another dtype': ('float64', stored(lambda t: t.double()), IDX[:, :1]),
    'values of another dtype': ('float64', lambda cache: [layer._replace(v_cache=layer.v_cache.double())
                                                          for layer in cache], IDX[:, :1]),
    'another device': ('meta', stored(lambda t: t.to('meta')), IDX[:, :1]),
    'no tuple of three': ('tuple of 3', lambda cache: [layer[:2] for layer in cache], IDX[:, :1]),
    'a full cache': ('5 .* 12 .* 16', lambda cache: cache, IDX.repeat(1, 3)),
    'a full row': ('out of context', replaced(*[torch.tensor([5, 16])] * 2), IDX[:, :1]),
    'no tokens': ('at least one', lambda cache: cache, IDX[:, :0]),
    'targets of another shape': ('targets', lambda cache: cache, IDX[:, :2])}
MISFITS |= {f'cache_pos {pos}': ('cache_pos', replaced(pos, pos), IDX[:, :3]) for pos in (
    5.0, True, None, '5', 2**70, -1, 14, torch.tensor(4), torch.tensor([4]), torch.tensor([[4], [4]]),
    torch.tensor([4.0, 4.0]), torch.tensor([True, True]), torch.tensor([4, 4, 4]), torch.tensor([4, -1]))}


@pytest.mark.parametrize('misfit', MISFITS)
def test_what_does_not_fit_a_cache_is_refused_and_nothing_is_written(misfit):
    model = model_of('learned', block_size=16)
    cache, (message, change, idx) = model(torch.randint(29, (2, 5)))[2], MISFITS[misfit]
    before = [layer.clone() for layer in cache]
    with pytest.raises(ValueError, match=message):
        model(idx, IDX[:, :3] if 'targets' in misfit else None, kv_cache=change(cache))
    for a, b in zip(cache, before):
        assert torch.equal(a.k_cache, b.k_cache) and torch.equal(a.v_cache, b.v_cache) and a.cache_pos == 5
    for long in (torch.zeros(2, 17, dtype=torch.long), torch.zeros(5, dtype=torch.long)):
        with pytest.raises(ValueError, match='0 .* 17 .* 16|at least one'):
            model(long)


@pytest.mark.parametrize('context', ['inference_mode', 'autocast', 'float64', 'bfloat16'])
def test_caches_take_the_dtype_of_the_keys(context):
    model, idx = model_of('learned', block_size=16), torch.randint(29, (2, 7))
    dtype = {'float64': torch.float64, 'inference_mode': torch.float32}.get(context, torch.bfloat16)
    if context in ('float64', 'bfloat16'):
        model = model.to(dtype)
    before = model(idx[:, :4])[2]
    with (torch.inference_mode(context == 'inference_mode'),
          torch.autocast('cpu', torch.bfloat16, enabled=context == 'autocast')):
        cache = model(idx[:, :4])[2]
        assert cache[0].k_cache.dtype == cache[1].v_cache.dtype == dtype
        last, expected = model(idx[:, 4:], kv_cache=cache)[0], model(idx, use_cache=False)[0]
        torch.testing.assert_close(last, expected, rtol=0, atol=(6e-2 if dtype == torch.bfloat16 else 2e-5)
                                   * expected.abs().max().item())
        if context == 'autocast':  # a cache that was begun before holds another dtype
            with pytest.raises(ValueError, match='cache holds'):
                model(idx[:, 4:], kv_cache=before)


def test_normed_keys_have_the_dtype_of_the_values(monkeypatch):
    """CUDA's autocast computes RMS norms in float32, and that of a CPU does not."""
    monkeypatch.setattr(torch.nn.RMSNorm, 'forward', lambda norm, x: norm.weight * F.rms_norm(x.float(), x.shape[-1:]))
    model, idx = model_of('qwen window', 0), torch.randint(29, (2, 7))
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        last, expected = model(idx[:, 4:], kv_cache=model(idx[:, :4])[2])[0], model(idx, use_cache=False)[0]
    torch.testing.assert_close(last, expected, rtol=0, atol=6e-2 * expected.abs().max().item())


def test_an_empty_batch():
    logits, _, cache = model_of('learned', block_size=16)(torch.zeros(0, 3, dtype=torch.int64))
    assert logits.shape == (0, 1, 29) and len(cache) == 2 and np.prod(cache[0].k_cache.shape) == 0


@pytest.mark.parametrize('T', [1, 3, 30])
def test_with_a_mask_in_any_case_the_logits_are_the_same(T, monkeypatch):
    """`positions.MASKED`, also for prompts that are shorter than the sinks are many."""
    model = model_of('rope', 0, torch.float64, window=5, n_sink=4)
    idx = torch.randint(VOCAB, (2, T))
    expected = plain(model, idx)[:, -1:]
    monkeypatch.setattr(positions, 'MASKED', {'cpu'})
    for use_cache in (False, True):
        torch.testing.assert_close(model(idx, use_cache=use_cache)[0], expected, atol=1e-10, rtol=0)
