"""
Rotary positions, ALiBi, no positions, grouped heads, and windows with sinks, on every cache of kvcache/: the logits are
those of the model without a cache, which reads the whole text at once.
"""
import itertools

import numpy as np
import pytest
import torch
from conftest import sizes
from sliding import BLOCK, SINKS, VOCABULARY, W, all_logits, feed, in_chunks, join_and_leave, model, streaming, texts

from kvcache import KINDS, make_cache, placement
from kvcache.operator import key_value_cache

WINDOWS = [(0, 0), (1, 0), (1, 3), (2, 0), (5, 0), (5, 2), (14, 0), (8, 7)]
CASES = [case for case in itertools.product(('learned', 'rope', 'alibi', 'none'), (1, 2, 4), WINDOWS)]
QUICK = [('rope', 2, (0, 0)), ('alibi', 1, (0, 0)), ('none', 4, (3, 0)), ('rope', 2, (5, 2)), ('alibi', 2, (5, 2)),
         ('rope', 1, (1, 3)), ('learned', 2, (5, 2))]


@pytest.mark.parametrize('position, n_kv_head, window', sizes(QUICK, CASES), ids=str)
@pytest.mark.parametrize('kind', KINDS)
def test_texts_far_beyond_the_window_are_those_of_one_pass(kind, position, n_kv_head, window):
    """Four sequences join one after the other, in chunks of any lengths; one is forked, two are freed early."""
    m = model(position=position, n_kv_head=n_kv_head, window=window[0], n_sink=window[1])
    end = BLOCK if m.config.max_positions == BLOCK else sizes(6, 20) * BLOCK
    idx, rng = texts(4, end), np.random.default_rng(0)
    exact, cache, ends = all_logits(m, idx), make_cache(m, kind, 4), [end, end // 2, end, end - 3]
    allocated = cache.nbytes()
    lengths = [1, 1, 1, 2, 3, window[0] + 1, window[0] + 2, 2 * BLOCK]
    for seqs, tokens, expected in join_and_leave(cache, idx, exact, ends, lengths, rng):
        for logits, of_pass in zip(feed(cache, seqs, tokens), expected, strict=True):
            assert (logits - of_pass).abs().max() < 1e-10
    assert cache.nbytes() == allocated and not cache.lengths


@pytest.mark.parametrize('kind', KINDS)
def test_a_model_that_is_given_a_window_of_all_of_block_size(kind):
    """As for when_full='roll': the same weights, without end."""
    m = model(position='rope', n_kv_head=2).with_window(BLOCK)
    idx = texts(6 * BLOCK)
    exact, cache = all_logits(m, idx[None])[0], make_cache(m, kind, 1)
    in_chunks(cache, cache.new(), idx, [2 * BLOCK, 1, BLOCK + 1, *[1] * 20], exact)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-4), (torch.bfloat16, 0.3)], ids=str)
def test_other_dtypes(kind, dtype, tolerance):
    m, idx = model(dtype, position='rope', n_kv_head=2, window=5, n_sink=2), texts(1, 10 * BLOCK)
    cache, exact = make_cache(m, kind, 1), all_logits(m.double(), idx)[0]
    m.to(dtype)
    seq, worst = cache.new(), 0.0
    for start in range(0, 10 * BLOCK, 4):
        logits = feed(cache, [seq], idx[:, start:start + 4])
        worst = max(worst, float((logits[0].double() - exact[start + 3]).abs().max()))
    assert logits.dtype is dtype and worst < tolerance * exact.abs().max()


@pytest.mark.parametrize('bits', [8, 4])
@pytest.mark.parametrize('position', ['rope', 'alibi'])
def test_all_caches_agree_when_quantised(position, bits):
    """They store the same numbers in other rows. One that lies between two codes may be rounded either way."""
    m, idx = model(torch.float32, position=position, n_kv_head=2, window=5, n_sink=2), texts(2, 6 * BLOCK)
    got = []
    for kind in KINDS:
        cache = make_cache(m, kind, 2, bits)
        seqs = [cache.new(), cache.new()]
        got.append(torch.cat([feed(cache, seqs, part) for part in idx.split(3, dim=1)]))
    assert all(torch.allclose(other, got[0], atol=2e-3) for other in got[1:])


@pytest.mark.parametrize('kind', KINDS)
def test_memory_is_that_of_the_formula(kind):
    for n_kv_head, window, n_sink in ((1, 0, 0), (4, 0, 0), (2, 5, 2)):
        m = model(torch.float32, position='rope', n_kv_head=n_kv_head, window=window, n_sink=n_sink)
        slots = 16 if not window else 12
        if kind == 'paged':
            slots = 16 if not window else 16 * (1 + 2)  # a block of the sinks; 2 windows can lie in two blocks
        assert make_cache(m, kind, 3).nbytes() == 2 * 2 * 3 * n_kv_head * 8 * slots * 4
        rounded = make_cache(m, kind, 3, bits=8)
        assert rounded.nbytes() == 2 * 2 * 3 * slots * n_kv_head * (8 + 4)  # a scale for each head of a row


# windows: each of these has been shipped by somebody as a bug


@pytest.mark.parametrize('chunks', [
    [1] * 40 + [W, W + 1, W - 1, 2, W],   # a chunk on a wrapped cache
    [8 * BLOCK, 1, 1, 3],                 # a prompt longer than the window, and than block_size
    [W] + [1] * 20, [W + 1] + [1] * 20, [W - 1] + [1] * 20,  # length exactly W, and one more or less
    [SINKS] + [1] * 20, [SINKS + W] + [1] * 20, [1] + [1] * 20,
    [2] + [1] * 60,                       # a short prompt that wraps later
    [W + 2, W + 2, W + 1, 1], [2 * W, 2 * W + 1, 4 * W + SINKS + 1, 1, W],
], ids=str)
@pytest.mark.parametrize('kind', KINDS)
def test_chunks_around_the_window(kind, chunks):
    m, idx, exact, cache = streaming(kind)
    in_chunks(cache, cache.new(), idx, chunks, exact)
    wider = make_cache(model(position='rope', n_kv_head=2, window=W + 1, n_sink=SINKS), kind, 1)
    seq = wider.new()
    feed(wider, [seq], idx[None, :3 * W])
    logits = feed(wider, [seq], idx[None, 3 * W:3 * W + 1])[0]
    assert (logits - exact[3 * W]).abs().max() > 1e-3  # W and W + 1 are not the same model


def recorded_keys(monkeypatch):
    """A list that gets (positions of the queries (B, T), bool (B, T, K) who sees what, positions of the keys)."""
    seen, append = [], placement.LayerView.append

    def recording(view, k, v, positions):
        result = append(view, k, v, positions)
        keys, mask = result[2], positions.mask(result[2], result[0].size(2))
        seen.append((positions.q_pos, (mask if mask.dtype is torch.bool else mask > -np.inf)[:, 0],
                     keys.pos.expand(*positions.q_pos.shape, -1) if keys.pos.dim() != 2 else
                     keys.pos[:, None].expand(*positions.q_pos.shape, -1)))
        return result
    monkeypatch.setattr(placement.LayerView, 'append', recording)
    return seen


@pytest.mark.parametrize('kind', KINDS)
def test_each_token_sees_its_own_position_its_window_and_the_sinks_and_nothing_twice(kind, monkeypatch):
    """Also after the rows have wrapped, when the newest key is in any row; and sinks also while a prompt is read."""
    m, idx, exact, cache = streaming(kind)
    a, b, seen = cache.new(), cache.new(), recorded_keys(monkeypatch)
    for n in (4, 1, 17, 1, 1, W + 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 30):
        feed(cache, [a, b], [idx[cache.lengths[a]:][:n], idx[cache.lengths[b]:][:2]])
    n_seen = 0
    for q_pos, mask, key_pos in seen:
        for q, mine, pos in zip(q_pos.flatten().tolist(), mask.flatten(0, 1), key_pos.flatten(0, 1)):
            assert sorted(pos[mine].tolist()) == sorted({*range(min(SINKS, q + 1)), *range(max(0, q - W + 1), q + 1)})
            n_seen += 1
    assert n_seen == 2 * (cache.lengths[a] + cache.lengths[b])  # in each of two layers


@pytest.mark.parametrize('n_sink', [0, 2])
@pytest.mark.parametrize('kind', KINDS)
def test_a_model_of_one_layer_sees_its_window_and_its_sinks_only(kind, n_sink):
    m = model(n_layer=1, position='rope', window=W, n_sink=n_sink)
    idx = texts(40)

    def last(idx):
        cache = make_cache(m, kind, 1)
        return feed(cache, [cache.new()], idx[None])
    for changed in sizes((0, 1, 2, 20, 40 - W - 1, 40 - W, 39), range(40)):
        other = idx.clone()
        other[changed] = (idx[changed] + 1) % VOCABULARY
        same = torch.equal(last(other), last(idx))
        assert same == (n_sink <= changed < 40 - W)


@pytest.mark.parametrize('position, n_kv_head', [('rope', 1), ('rope', 2), ('alibi', 2), ('none', 4)])
@torch.inference_mode()
def test_the_operator_stores_grouped_heads_once_and_returns_them_repeated(position, n_kv_head):
    m, lengths = model(torch.float32, position=position, n_kv_head=n_kv_head), [9, 4]
    idx, rows = texts(2, 12), torch.zeros(32, 2, 2, n_kv_head, 8)
    exact = all_logits(m, idx)

    class Layer:
        def __init__(self, number):
            self.number = number

        def append(self, k, v, positions):
            """One sequence in the rows of self.seq, as a batch of one."""
            start, T = int(positions.q_pos[0]), k.size(2)
            ends = torch.tensor([0, T]), torch.tensor([0, start + T])
            k, v = key_value_cache(k[0].transpose(0, 1), v[0].transpose(0, 1), *ends, torch.tensor([16 * self.seq]),
                                   torch.tensor([start]), T, start + T, rows, num_layer=2, layer_idx=self.number,
                                   num_repeat=4 // n_kv_head)
            assert k.shape == (start + T, 4, 8)
            return k.transpose(0, 1)[None], v.transpose(0, 1)[None], None, self
    layers, starts = [Layer(0), Layer(1)], [0, 0]
    for counts in (lengths, [1, 3], [1, 1], [1, 4]):
        for seq, n in enumerate(counts):
            for layer in layers:
                layer.seq = seq
            part = idx[seq, None, starts[seq]:starts[seq] + n]
            x, _ = m.hidden_states(part, torch.arange(starts[seq], starts[seq] + n), layers)
            starts[seq] += n
            assert torch.allclose(m.lm_head(x)[0, -1], exact[seq, starts[seq] - 1], atol=1e-4)
    assert rows.nbytes == 2 * 2 * 2 * n_kv_head * 8 * 16 * 4  # not n_head
