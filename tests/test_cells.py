"""Cells and streams: placing, windows, sequence operations, shifts and state, by hand and against plain dictionaries."""
import json
import os
import tempfile

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from safetensors import safe_open
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcache.cells import EMPTY, Window
from kvcache.placement import Forward, Layer, Placement
from kvcache.rotary import Rotary
from kvcache.storage import Rows
from kvcache.streams import NoSlot, context_shift
from kvcache.unified import KVCache
from model import GPT, GPTConfig


def cache(kv_size=8, n_seq_max=4, **how):
    return KVCache(**(dict(n_layer=2, n_head_kv=1, head_dim=32) | how | dict(kv_size=kv_size, n_seq_max=n_seq_max)))


def put(c, tokens, value=None):
    """Place tokens, {sequence: positions}; keys are `value` of their position, values the same and 1000 more."""
    batch = c.batch(tokens)
    slots = c.find_slot(batch)
    c.apply(slots, batch)
    c.update()
    keys = torch.from_numpy(batch.positions).flatten().float() if value is None else torch.as_tensor(value, dtype=torch.float32)
    for layer in (number for number, layer in enumerate(c.layers) if layer is not None):
        rows = keys[:, None, None].expand(-1, c.n_head_kv, c.head_dim) + 100 * layer
        c.cpy_k(layer, rows, c.k_idxs(slots))
        c.cpy_v(layer, rows + 1000, c.k_idxs(slots))
    return slots.cells


def positions(c, seq):
    cells = c.cells_of(seq)
    return sorted(cells.pos[cells.owners[:, seq]].tolist())


def test_cells_are_taken_from_the_head_on_and_around():
    c = cache()
    assert put(c, {0: range(5)}).tolist() == [[0, 1, 2, 3, 4]]
    c.seq_rm(0, 1, 3)
    assert c.streams[0].head == 1  # back to the first cell that became free
    c.streams[0].head = 5
    assert put(c, {1: range(4)}).tolist() == [[5, 6, 7, 1]]
    assert not c.find_slot(c.batch({2: [0, 1]})) and c.find_slot(c.batch({2: [0]})).cells.tolist() == [[2]]


def test_a_head_far_beyond_what_is_used_goes_back_to_the_beginning():
    c = cache(kv_size=16)
    put(c, {0: range(8)})
    c.seq_rm(0, 2)
    c.streams[0].head = 8
    assert c.find_slot(c.batch({1: range(3)})).cells.tolist() == [[8, 9, 10]]  # 8 <= 2 + 2 * 3
    assert c.find_slot(c.batch({1: range(2)})).cells.tolist() == [[2, 3]]      # 8 > 2 + 2 * 2


def test_contiguous_cells_do_not_wrap():
    c = cache()
    put(c, {0: range(8)})
    c.seq_rm(0, 6)
    c.seq_rm(0, 0, 2)
    c.streams[0].head = 6
    assert c.find_slot(c.batch({1: range(3)})).cells.tolist() == [[6, 7, 0]]
    assert isinstance(c.find_slot(c.batch({1: range(3)}), contiguous=True), NoSlot)
    assert c.find_slot(c.batch({1: range(2)}), contiguous=True).cells.tolist() == [[6, 7]]


@pytest.mark.parametrize('n', [9, 100])
def test_what_does_not_fit_changes_nothing(n):
    c = cache()
    put(c, {0: range(3)})
    before = str(c)
    assert not c.find_slot(c.batch({1: range(n)}))
    assert not c.prepare([c.batch({1: range(5)}), c.batch({1: [5]})])
    with pytest.raises(ValueError, match='full'):
        c.forward(c.batch({1: range(n)}))
    assert str(c) == before
    assert [s.cells.tolist() for s in c.prepare([c.batch({1: range(4)}), c.batch({1: [4]})])] == [[[3, 4, 5, 6]], [[7]]]
    assert str(c) == before


def test_a_window_frees_what_it_has_passed_and_leaves_no_hole():
    c = cache(kv_size=4, n_swa=3, swa_type='standard')
    put(c, {0: range(4)})
    assert put(c, {0: [4]}).tolist() == [[0]]  # the next token at 4 sees 2, 3 and itself: 0 and 1 are passed
    assert positions(c, 0) == [1, 2, 3, 4]
    c.streams[0].head = 2
    assert put(c, {0: [5]}).tolist() == [[2]]  # position 2 is overwritten, and position 1, before it, goes with it
    assert positions(c, 0) == [3, 4, 5]


@pytest.mark.parametrize('kind, seen', [('standard', [3, 4, 5]), ('chunked', [3, 4, 5]), ('none', [0, 1, 2, 3, 4, 5])])
def test_masks(kind, seen):
    c = cache(n_swa=3, swa_type=kind)
    put(c, {0: range(5), 1: [0]})
    batch = c.batch({0: [5], 1: [1]})
    slots = c.find_slot(batch)
    c.apply(slots, batch)
    mask = c.kq_mask(batch)
    assert c.streams[0].pos[:8][mask[0, 0, 0].numpy()].tolist() == seen
    assert np.flatnonzero(mask[0, 0, 1]).tolist() == [5, 7]
    assert Window(4, 'chunked').passed(np.arange(8), 6).tolist() == [True] * 4 + [False] * 4
    assert Window(4, 'standard').passed(np.arange(8), 6).tolist() == [True] * 3 + [False] * 5


def test_n_kv_is_padded_and_views_are_not_copies():
    c = cache(kv_size=8, n_pad=4)
    batch = c.batch({0: range(5)})
    put(c, {0: range(5)})
    assert c.get_n_kv(batch) == 8 and c.kq_mask(batch).shape == (1, 1, 5, 8)
    k, v = c.get_k(1, 5), c.get_v(1, 5)
    assert k.shape == (1, 5, 1, 32) and k[0, :, 0, 0].tolist() == [100, 101, 102, 103, 104] and v[0, 2, 0, 0] == 1102
    assert k.data_ptr() == c.layers[1].k.data.data_ptr()
    transposed = cache(v_trans=True)
    put(transposed, {0: range(5)})
    v = transposed.get_v(1, 5)
    assert v[0, 2, 0, 0] == 1102 and v.stride(1) == 1 and v.data_ptr() == transposed.layers[1].v.data.data_ptr()
    with pytest.raises(ValueError, match='transposed'):
        cache(v_trans=True, type_v='int8')


def test_sequences_share_cells_in_one_stream_and_copy_across_streams():
    one, many = cache(), cache(unified=False)
    for c in (one, many):
        put(c, {0: range(4)})
        c.seq_cp(0, 2)
        assert positions(c, 2) == [0, 1, 2, 3]
    assert one.streams[0].used() == 4 and many.streams[2].used() == 4
    assert torch.equal(many.layers[1].k.data[2], many.layers[1].k.data[0]) and many.layers[1].k.data[2].any()
    with pytest.raises(ValueError, match='whole'):
        many.seq_cp(0, 3, 0, 2)
    one.seq_cp(0, 3, 1, 3)
    assert positions(one, 3) == [1, 2]
    one.seq_rm(0)
    assert one.streams[0].used() == 4
    one.seq_keep(3)
    assert one.streams[0].used() == 2 and positions(one, 2) == []
    many.seq_keep(2)
    assert [cells.used() for cells in many.streams] == [0, 0, 4, 0]
    many.clear()
    assert not any(cells.used() for cells in many.streams)
    assert many.seq_pos_max(2) is None and many.seq_pos_min(2) is None


def test_separate_streams_take_equal_parts():
    c = cache(unified=False)
    batch = c.batch({2: [0, 1], 0: [0, 1]})
    assert batch.positions.shape == (2, 2) and c.find_slot(batch).streams.tolist() == [2, 0]
    for tokens in ({0: [0], 1: [0, 1]}, {(0, 1): [0]}):
        with pytest.raises(ValueError, match='split'):
            c.batch(tokens)
    for tokens in ({}, {0: []}, {4: [0]}, {0: [-1]}, {0: [0.5, 1.5]}, {0: [2**31]}, {0: [2**63]}, {'a': [0]}, {0.5: [0]}, {(): [0]}):
        with pytest.raises(ValueError):
            c.batch(tokens)


def test_a_sequence_goes_on_where_it_ends():
    c = cache(n_seq_max=3)
    put(c, {(0, 1): range(3)})
    put(c, {1: [3]})
    before = str(c)
    for tokens in ({0: [4]}, {0: [2]}, {(0, 1): [3]}, {1: [0]}):  # 0 and 1 have diverged: no next position is that of both
        with pytest.raises(ValueError, match='goes on at position'):
            c.find_slot(c.batch(tokens))
        with pytest.raises(ValueError, match='goes on at position'):
            c.prepare([c.batch({2: [0]}), c.batch(tokens)])
    for tokens in ({0: [3, 5]}, {0: [3, 3]}, {0: [4, 3]}):
        with pytest.raises(ValueError, match='follow each other'):
            c.batch(tokens)
    with pytest.raises(ValueError, match='goes on at position 4, not 3'):
        c.batch({0: [3], (0, 2): [3]})
    assert str(c) == before
    assert c.prepare([c.batch({0: [3]}), c.batch({0: [4, 5]})]) and c.find_slot(c.batch({(2,): [4, 5]}))
    for tokens in ({0: [3]}, {(0, 2): [3]}):
        with pytest.raises(ValueError, match='another cache'):
            cache(n_seq_max=4).find_slot(c.batch(tokens))
    put(c, {0: [3]})  # now both have position 3, but not the same
    with pytest.raises(ValueError, match='diverged'):
        c.find_slot(c.batch({(0, 1): [4]}))
    put(c, {2: [5, 6]})  # an empty one begins anywhere
    assert positions(c, 2) == [5, 6]


def test_a_copy_does_not_give_a_position_twice():
    one, many = cache(), cache(unified=False)
    for c in (one, many):
        put(c, {0: range(3)})
        put(c, {1: range(2)})
    with pytest.raises(ValueError, match='already'):
        one.seq_cp(0, 1)
    assert positions(one, 1) == [0, 1] and one.streams[0].used() == 5
    one.seq_cp(0, 1, 2)
    one.seq_cp(0, 1, 2)
    assert positions(one, 1) == [0, 1, 2] and one.streams[0].used() == 5
    many.seq_cp(0, 1)  # into a stream of its own: what was there is gone, as in llama.cpp
    assert positions(many, 1) == [0, 1, 2] and torch.equal(many.get_k(1, 3, slice(1, 2)), many.get_k(1, 3, slice(0, 1)))


def test_the_drawing():
    c = cache(kv_size=4, n_seq_max=2)
    put(c, {(0, 1): [0, 1], 0: [2]})
    c.seq_rm(1, 1)
    assert str(c) == '\n'.join(['slot  0   1   2   3', 'pos   0   1   2   .', 'seq   ab  a   a'])
    wide = cache(kv_size=40)
    put(wide, {0: range(30)})
    lines = str(wide).split('\n')
    assert len(lines) == 7 and lines[4].startswith('slot  28  29') and lines[5] == 'pos   28  29' + '  .' + '   .' * 9 and max(map(len, lines)) <= 120
    two = cache(kv_size=1, n_seq_max=2, unified=False)
    put(two, {1: [7]})
    assert str(two) == '\n'.join(['stream 0', 'slot  0', 'pos   .', 'seq', 'stream 1', 'slot  0', 'pos   7', 'seq   b'])


class Recorder(list):
    """A cache that is nothing but what it was told: (B, n_head, T, head_dim) keys and values, by layer. source: whose a layer reads."""

    def __init__(self, n_layer, source=lambda layer: layer, window=lambda layer: None):
        super().__init__(RecordedLayer(self, source(layer), layer, window(layer)) for layer in range(n_layer))
        self.told = [None] * n_layer


class RecordedLayer:
    def __init__(self, recorder, source, layer, window):
        self.recorder, self.source, self.layer, self.window = recorder, source, layer, window

    def append(self, k, v):
        told = self.recorder.told
        told[self.layer] = (k, v) if told[self.layer] is None else tuple(torch.cat(pair, dim=2) for pair in zip(told[self.layer], (k, v)))
        k, v = told[self.source]
        back = torch.arange(k.size(2))[-self.recorder.positions.size(1):, None] - torch.arange(k.size(2))
        return k, v, ((back >= 0) & (back < (self.window or 10**9)))[None, None], self


def logits_in_chunks(m, idx, chunks, forward):
    """Of every position: idx (1, T) fed in chunks, each in forward(range of positions)."""
    out, start = [], 0
    for n in chunks:
        kv_cache = forward(range(start, start + n))
        out.append(m.lm_head(m.hidden_states(idx[:, start:start + n], kv_cache)[0]))
        start += n
    return torch.cat(out, dim=1)


def recorded(recorder):
    def forward(positions):
        recorder.positions = torch.tensor([list(positions)])
        return recorder
    return forward


def deep_model(n_layer=4):
    torch.manual_seed(0)
    m = GPT(GPTConfig(block_size=16, vocab_size=29, n_layer=n_layer, n_head=2, n_embd=32)).eval()
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return m, torch.randint(29, (1, 13))


@pytest.mark.parametrize('chunks', [[13], [5, 1, 4, 3], [1] * 13])
@torch.inference_mode()
def test_a_layer_that_shares_anothers_cache_only_reads_it(chunks):
    m, idx = deep_model()
    source = (0, 1, 1, 0).__getitem__
    c = KVCache(4, 2, 16, 16, 1, layer_reuse=lambda layer: source(layer) if layer > 1 else None)
    assert c.layers[2] is c.layers[1] and c.layers[3] is c.layers[0]
    assert c.memory_breakdown() == {'cpu': 2 * 2 * 16 * 32 * 4}
    exact = logits_in_chunks(m, idx, [13], recorded(Recorder(4, source)))
    assert torch.allclose(logits_in_chunks(m, idx, chunks, lambda positions: c.forward(c.batch({0: positions}))), exact, atol=1e-4)
    with pytest.raises(ValueError, match='share'):
        KVCache(2, 1, 32, 8, 1, layer_reuse=lambda layer: 1 if layer == 0 else None)


@pytest.mark.parametrize('chunks', [[13], [5, 1, 4, 3]])
@torch.inference_mode()
def test_two_caches_with_half_of_the_layers_each(chunks):
    """Every other layer with a window, in a smaller cache of its own, as some models have it."""
    m, idx = deep_model()
    whole = KVCache(4, 2, 16, 16, 1, layer_filter=lambda layer: layer % 2 == 0)
    local = KVCache(4, 2, 16, 8, 1, layer_filter=lambda layer: layer % 2 == 1, n_swa=4, swa_type='standard')
    assert whole.memory_breakdown() == {'cpu': 2 * 2 * 16 * 32 * 4} and local.memory_breakdown() == {'cpu': 2 * 2 * 8 * 32 * 4}

    def forward(positions):
        kv_cache = whole.forward(whole.batch({0: positions}))
        kv_cache[1::2] = local.forward(local.batch({0: positions}))[1::2]
        return kv_cache
    if chunks == [13]:
        with pytest.raises(ValueError, match='full: 13 cells'):
            logits_in_chunks(m, idx, chunks, forward)
        return
    exact = logits_in_chunks(m, idx, [13], recorded(Recorder(4, window=lambda layer: 4 if layer % 2 else None)))
    assert torch.allclose(logits_in_chunks(m, idx, chunks, forward), exact, atol=1e-4)


def test_a_layer_without_a_cache_refuses():
    m, idx = deep_model()
    c = KVCache(4, 2, 16, 16, 1, layer_filter=lambda layer: layer != 2)
    for asked in (lambda: c.get_k(2, 1), lambda: c.get_v(4, 1), lambda: c.cpy_k(2, torch.zeros(1, 2, 16), torch.tensor([0]))):
        with pytest.raises(ValueError, match='has no cache'):
            asked()
    with pytest.raises(ValueError, match='layer 2 has no cache'):
        m.hidden_states(idx, c.forward(c.batch({0: range(13)})))
    with pytest.raises(ValueError, match='no layer'):
        KVCache(4, 2, 16, 16, 1, layer_filter=lambda layer: False)
    fewer = KVCache(3, 2, 16, 16, 1)
    with pytest.raises(ValueError, match='3 layers'):
        m.hidden_states(idx, fewer.forward(fewer.batch({0: range(13)})))


def test_devices_by_layer():
    c = KVCache(2, 1, 32, 8, 1, device=lambda layer: ('cpu', 'meta')[layer])
    assert c.memory_breakdown() == {'cpu': 2 * 8 * 32 * 4, 'meta': 2 * 8 * 32 * 4}


def test_a_forward_pass_brings_rows_and_keys_to_each_layers_device():
    """On a pretended device, which refuses tensors that are not its own as a real one does: what comes back is where the new keys are."""
    with FakeTensorMode():
        layers = [Layer((2, 8), 2, 16, device=device) for device in ('cpu', 'cuda')]
        placement = Placement(torch.arange(6).view(2, 3), torch.tensor([0, 1, 2, 8, 9, 10]), torch.tensor([[0], [1]]),
                              torch.ones(2, 1, 3, 8, dtype=torch.bool))
        for placed in Forward(layers, placement):
            k, v, mask, _ = placed.append(torch.zeros(2, 2, 3, 16), torch.zeros(2, 2, 3, 16))
            assert k.shape == v.shape == (2, 2, 8, 16) and k.device == v.device == mask.device == torch.device('cpu')
        assert [layer.device.type for layer in layers] == ['cpu', 'cuda']


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device, CUDA")
@torch.inference_mode()
def test_layers_on_two_devices_give_what_layers_on_one_give():
    m, idx = deep_model()
    c = KVCache(4, 2, 16, 16, 1, device=lambda layer: ('cpu', 'cuda')[layer % 2])
    got = logits_in_chunks(m, idx, [5, 1, 4, 3], lambda positions: c.forward(c.batch({0: positions})))
    assert torch.allclose(got, logits_in_chunks(m, idx, [13], recorded(Recorder(4))), atol=1e-4)


# shifts

@pytest.mark.parametrize('base', [10000.0, 100.0])
def test_turning_adds_up(base):
    rotary, x = Rotary(16, base), torch.randn(7, 2, 16)
    p, d = torch.arange(7), torch.tensor([3, -2, 100, 0, 1, -4, 50])
    assert torch.allclose(rotary(rotary(x, p), d), rotary(x, p + d), atol=1e-5)


def rotary_cache(type_k, n=8, kv_size=8):
    """A cache with keys 0 ... n - 1 of sequence 0, and those keys before they were turned."""
    rotary = Rotary(32)
    c = KVCache(1, 1, 32, kv_size, 3, type_k=type_k, can_shift=True)
    raw = torch.randn(n, 1, 32, generator=torch.Generator().manual_seed(0))
    batch = c.batch({0: range(n)})
    slots = c.find_slot(batch)
    c.apply(slots, batch)
    c.cpy_k(0, rotary(raw, torch.arange(n)), c.k_idxs(slots))
    return c, raw, rotary


def attended_keys(c, seq, pos):
    """The keys that a token of seq at pos would see, in the order of positions: what `Placement` and `Layer.read` make of them."""
    batch = c.batch({seq: [pos]})
    slots = c.find_slot(batch)
    c.apply(slots, batch)
    placement = c.placement(batch, slots)
    k, _ = c.layers[0].read(placement, torch.float32)
    c.seq_rm(seq, pos)
    order = np.argsort(c.streams[0].pos[:k.size(2)])
    order = order[c.streams[0].owners[order, seq]]
    return k[0, 0, torch.from_numpy(order)]


@pytest.mark.parametrize('type_k, tolerance', [('float32', 1e-5), ('float16', 4e-3), ('bfloat16', 3e-2), ('int8', 3e-2)])
def test_shifted_keys_are_those_of_the_new_positions(type_k, tolerance):
    c, raw, rotary = rotary_cache(type_k)
    assert context_shift(c, 0, n_keep=2) == 3
    assert positions(c, 0) == [0, 1, 2, 3, 4]  # which were 0, 1, 5, 6, 7
    expected = rotary(raw[[0, 1, 5, 6, 7]], torch.arange(5))[:, 0]
    for _ in range(2):  # turned once, not at each look
        assert (attended_keys(c, 0, 5) - expected).abs().max() < tolerance


@pytest.mark.parametrize('type_k', ['float32', 'float16', 'bfloat16', 'int8'])
def test_64_shifts_do_not_drift(type_k):
    """Every shift forth and back: at the end the keys are as far from the exact ones as they were before the first, or in float32 by rounding."""
    c, raw, rotary = rotary_cache(type_k, kv_size=9)
    exact = rotary(raw, torch.arange(8))[:, 0]
    before = (attended_keys(c, 0, 8) - exact).abs().max()
    for i in range(64):
        c.seq_add(0, 0, -1, 5 if i % 2 == 0 else -5)
        after = (attended_keys(c, 0, 13 if i % 2 == 0 else 8) - rotary(raw, torch.arange(8) + (5 if i % 2 == 0 else 0))[:, 0]).abs().max()
    assert after <= before * 1.1 + 1e-5
    written = Rows((1, 8), 32, type_k)  # the plain way: read, turn, and write again
    written.write(torch.arange(8), exact)
    for i in range(64):
        keys = written.read((slice(None), slice(None)))[0][:, None]
        written.write(torch.arange(8), rotary(keys, torch.full((8,), 5 if i % 2 == 0 else -5))[:, 0])
    drifted = (written.read((slice(None), slice(None)))[0] - exact).abs().max()
    print(f"{type_k}: off by {before:.1e} as written, {after:.1e} after 64 shifts, {drifted:.1e} if written anew at each")
    assert drifted > 4 * after or type_k.startswith('float')


@pytest.mark.parametrize('type_k, tolerance', [('float32', 1e-5), ('float16', 4e-3), ('int8', 3e-2)])
def test_keys_are_at_the_positions_they_have_now(type_k, tolerance):
    c, raw, rotary = rotary_cache(type_k)
    c.seq_add(0, -1, -1, 3)
    for _ in range(2):
        assert (c.get_k(0, 8)[0] - rotary(raw, torch.arange(3, 11))).abs().max() < tolerance


def test_the_cat_sat_on_the_mat():
    """A full cache of four cells: the oldest goes, the new token takes its cell, the others are renumbered and turned where they are."""
    c, raw, rotary = rotary_cache('float32', n=4, kv_size=4)
    assert not c.find_slot(c.batch({0: [4]}))
    c.seq_rm(0, 0, 1)
    c.seq_add(0, 1, -1, -1)
    batch = c.batch({0: [3]})
    slots = c.find_slot(batch)
    c.apply(slots, batch)
    assert slots.cells.tolist() == [[0]] and c.streams[0].pos.tolist() == [3, 0, 1, 2]
    c.update()
    assert torch.allclose(c.get_k(0, 4)[0, 1:], rotary(raw[1:], torch.arange(3)), atol=1e-5)


def test_learned_positions_and_shared_cells_are_not_moved():
    learned = cache()
    put(learned, {0: range(4)})
    assert not learned.can_shift
    c, _, _ = rotary_cache('float32')
    c.seq_cp(0, 1)
    before = str(c), str(learned)
    for refused in (lambda: learned.seq_add(0, 0, -1, 1), lambda: learned.seq_div(0, 0, -1, 2), lambda: context_shift(learned, 0),
                    lambda: context_shift(c, 2), lambda: context_shift(c, 0, 2.5), lambda: c.seq_add(0, 0, -1, 1.5),
                    lambda: c.seq_div(0, 0, -1, 1.5),
                    lambda: c.seq_add(0, 0, -1, 2**62),
                    lambda: c.seq_add(0, 0, -1, 1), lambda: context_shift(c, 0), lambda: c.seq_div(0, 0, -1, 0), lambda: context_shift(c, 0, 8)):
        with pytest.raises(ValueError):
            refused()
    assert (str(c), str(learned)) == before
    c.seq_rm(1)
    c.seq_div(0, -1, -1, 2)
    assert positions(c, 0) == [0, 0, 1, 1, 2, 2, 3, 3]
    c.seq_add(0, 0, -1, -1)
    assert positions(c, 0) == [0, 0, 1, 1, 2, 2]


def test_a_fork_is_shifted_as_long_as_what_moves_is_its_own():
    c = cache(kv_size=16, can_shift=True)
    put(c, {(0, 1): range(4)})
    put(c, {0: range(4, 8)})
    before = positions(c, 1)
    assert context_shift(c, 0, n_keep=1) == 3  # drops 1, 2, 3, which 1 keeps
    assert positions(c, 0) == [0, 1, 2, 3, 4] and positions(c, 1) == before
    c.seq_cp(1, 2)
    with pytest.raises(ValueError, match='shares'):
        context_shift(c, 1)


# a cache does not remember how it came about

def test_no_gradients_go_through_a_cache():
    m, idx = deep_model()
    for kind, unified in (('float32', True), ('int8', True), ('float32', False)):
        c = KVCache(4, 2, 16, 16, 3, unified, kind, kind)
        for start in (0, 4):
            batch = c.batch({seq: range(start, start + 4) for seq in (2, 0)})
            m.hidden_states(idx[0, :8].view(batch.positions.shape), c.forward(batch))
        assert not any(tensor.requires_grad for layer in c.layers for tensor in layer.tensors())


def test_tokens_and_places_go_together():
    m, _ = deep_model()
    c = KVCache(4, 2, 16, 32, 3, unified=False)
    with pytest.raises(ValueError, match='places'):
        m.hidden_states(torch.tensor([[1]]), c.forward(c.batch({0: [0], 1: [0], 2: [0]})))
    with pytest.raises(ValueError, match='block_size 16'):
        m.hidden_states(torch.ones(1, 16, dtype=torch.long), c.forward(c.batch({0: range(1, 17)})))


def test_what_is_cleared_is_zero():
    c = cache()
    put(c, {0: range(3)}, [float('nan')] * 3)
    c.clear()
    assert not c.layers[1].k.data.any() and not c.layers[1].v.data.any()
    with torch.inference_mode():
        made_there = cache()
    put(made_there, {0: range(3)})  # and can be used here


# state

@pytest.mark.parametrize('kind', ['float32', 'bfloat16', 'int8', 'int4'])
@pytest.mark.parametrize('unified', [True, False])
def test_state_comes_back(tmp_path, kind, unified):
    c = cache(unified=unified, type_k=kind, type_v=kind)
    put(c, {0: range(5)})
    put(c, {1: range(3)}, [7., 8, 9])
    c.seq_rm(0, 0, 2)
    c.state_save(tmp_path / 'all')
    c.state_save(tmp_path / 'one', 1)
    other = cache(unified=unified, type_k=kind, type_v=kind)
    put(other, {2: range(2)})
    other.state_load(tmp_path / 'one', 3)
    assert positions(other, 2) == [0, 1] and positions(other, 3) == [0, 1, 2]
    cells = other.cells_of(3)
    mine = np.flatnonzero(cells.owners[:, 3])
    stream = other.stream_of(3)
    assert other.get_k(1, 8)[stream, mine, 0, 0].tolist() == pytest.approx([107, 108, 109], rel=0.08)
    other.state_load(tmp_path / 'all')
    assert [positions(other, seq) for seq in range(4)] == [[2, 3, 4], [0, 1, 2], [], []]


def test_state_that_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    c = cache()
    put(c, {0: range(5)})
    c.state_save(tmp_path / 'one', 0)
    c.state_save(tmp_path / 'all')
    (tmp_path / 'junk').write_bytes(b'junk' * 100)
    for how, path, seq in ((dict(n_layer=1), 'one', 0), (dict(can_shift=True), 'one', 0),
                           (dict(n_layer=3, layer_filter=lambda layer: layer > 0), 'one', 0),
                           (dict(head_dim=64), 'one', 0), (dict(type_v='int8'), 'one', 0), (dict(kv_size=4), 'one', 0),
                           (dict(kv_size=4), 'all', None), (dict(n_seq_max=2), 'all', None), (dict(unified=False), 'all', None),
                           ({}, 'all', 0), ({}, 'one', None), ({}, 'junk', 0), ({}, 'absent', 0)):
        other = cache(**how)
        put(other, {1: range(2)})
        before = str(other), other.own_layers()[0].k.data.clone()
        with pytest.raises(ValueError):
            other.state_load(tmp_path / path, seq)
        assert str(other) == before[0] and torch.equal(other.own_layers()[0].k.data, before[1])


def edited(path, tensors=(), **header):
    """A state with some tensors (None: left out) and header fields replaced."""
    with safe_open(path, 'pt') as f:
        old = json.loads(f.metadata()['kvcache-state'])
        kept = {name: f.get_tensor(name) for name in f.keys()} | dict(tensors)
    to = path.with_name('edited')
    save_file({name: tensor.contiguous() for name, tensor in kept.items() if tensor is not None}, to, {'kvcache-state': json.dumps(old | header)})
    return to


@pytest.mark.parametrize('how', [
    dict(tensors={'0.0.k0': None}), dict(tensors={'0.pos': None}), dict(tensors={'0.owners': None}), dict(tensors={'0.1.v1': torch.zeros(5, 2)}),
    dict(tensors={'0.0.k0': torch.zeros(4, 32, dtype=torch.int8)}), dict(tensors={'0.0.k0': torch.zeros(5, 32)}),
    dict(tensors={'0.pos': torch.arange(5) - 1}), dict(tensors={'0.pos': torch.arange(5).float()}), dict(tensors={'0.pos': torch.tensor(3)}),
    dict(tensors={'0.owners': torch.zeros(5, 4, dtype=torch.bool)}), dict(tensors={'0.shift': torch.ones(5, dtype=torch.int64)}),
    dict(tensors={'0.0.k1': torch.full((5, 1), float('nan'))}), dict(tensors={'0.pos': torch.full((5,), 2**40)}),
    dict(version=1), dict(one=True), dict(n_seq_max=None), dict(type_k=None),
])
def test_damaged_state_is_refused_and_changes_nothing(tmp_path, how):
    c = cache(type_k='int8', type_v='int8')
    put(c, {0: range(5)})
    c.state_save(tmp_path / 'all')
    path = edited(tmp_path / 'all', **how)
    before = str(c), [t.clone() for layer in c.layers for t in layer.tensors()]
    with pytest.raises(ValueError):
        c.state_load(path)
    assert str(c) == before[0]
    assert all(map(torch.equal, before[1], [t for layer in c.layers for t in layer.tensors()]))
    c.state_load(edited(tmp_path / 'all'))
    with pytest.raises(ValueError, match='not 99'):
        c.state_save(tmp_path / 'all', seq=99)


def test_a_stream_has_its_own_sequence_only(tmp_path):
    c = cache(unified=False)
    put(c, {1: range(5)})
    c.state_save(tmp_path / 'all')
    owners = torch.zeros(5, 4, dtype=torch.bool)
    owners[:, 0] = True
    with pytest.raises(ValueError, match='another sequence'):
        c.state_load(edited(tmp_path / 'all', {'1.owners': owners}))
    assert positions(c, 1) == [0, 1, 2, 3, 4]


# a machine that does anything in any order

KV_SIZE, N_SEQ = 12, 4


class CellsMachine(RuleBasedStateMachine):
    """
    Random operations, beside {sequence: {position: cell}}, a cell being a number that stands for what it holds: its token is
    written as the value, and the key is made of it and turned by its position.
    """
    unified, type_k, window = True, 'float32', None

    def __init__(self):
        super().__init__()
        self.cache = cache(KV_SIZE, N_SEQ, unified=self.unified, type_k=self.type_k, can_shift=True, n_swa=self.window or 0,
                           swa_type='standard' if self.window else 'none')
        self.model, self.held = {seq: {} for seq in range(N_SEQ)}, []
        self.folder = tempfile.TemporaryDirectory()

    seqs = st.integers(0, N_SEQ - 1)
    ends = st.integers(-1, KV_SIZE)

    def used(self, but=None):
        """Cells of each stream that are in use, or would be without one sequence."""
        if not self.unified:
            return {seq: 0 if seq == but else len(mine) for seq, mine in self.model.items()}
        return dict.fromkeys(self.model, len({cell for seq, mine in self.model.items() if seq != but for cell in mine.values()}))

    def cells_with(self, tokens):
        """New cells that hold these tokens."""
        self.held += tokens
        return range(len(self.held) - len(tokens), len(self.held))

    def key(self, tokens):
        """Keys (n, 1, 32) of tokens before they are turned, none larger than 1."""
        return torch.sin(torch.as_tensor(tokens, dtype=torch.float64)[:, None, None] * torch.arange(1, 33)).float()

    @rule(seq=seqs, n=st.integers(1, 5))
    def append(self, seq, n):
        start = max(self.model[seq], default=-1) + 1
        batch = self.cache.batch({seq: range(start, start + n)})
        slots = self.cache.find_slot(batch)
        fits = self.used()[seq] + n <= KV_SIZE
        assert bool(slots) == fits or self.window and slots
        if not slots:
            return
        self.cache.apply(slots, batch)
        self.cache.update()
        new = self.cells_with(range(len(self.held), len(self.held) + n))
        rows = self.cache.k_idxs(slots)
        for layer in range(2):
            self.cache.cpy_k(layer, self.cache.rotary(self.key(new), torch.arange(start, start + n)), rows)
            self.cache.cpy_v(layer, torch.tensor(new).float()[:, None, None].expand(n, 1, 32) + 1000 * layer, rows)
        self.model[seq] |= dict(zip(range(start, start + n), new))

    @rule(seq=st.one_of(st.none(), seqs), p0=ends, p1=ends)
    def rm(self, seq, p0, p1):
        if self.window:  # what has been passed is gone, so that nothing but all of a sequence can be taken back
            p0 = p1 = -1
        self.cache.seq_rm(seq, p0, p1)
        for mine in [self.model[seq]] if seq is not None else self.model.values():
            for p in [p for p in mine if p >= p0 and (p1 < 0 or p < p1)]:
                del mine[p]

    @rule(source=seqs, to=seqs, p0=ends, p1=ends)
    def cp(self, source, to, p0, p1):
        if source == to:
            return
        if self.window:  # whole, to an empty one: of what has been passed nobody knows
            p0 = p1 = -1
            self.rm(to, -1, -1)
        part = {p: cell for p, cell in self.model[source].items() if p >= p0 and (p1 < 0 or p < p1)}
        if not self.unified:
            if part != self.model[source]:
                with pytest.raises(ValueError, match='whole'):
                    self.cache.seq_cp(source, to, p0, p1)
                return
            self.model[to] = {}
        if any(self.model[to].get(p, cell) != cell for p, cell in part.items()):
            with pytest.raises(ValueError, match='already'):
                self.cache.seq_cp(source, to, p0, p1)
            return
        self.cache.seq_cp(source, to, p0, p1)
        self.model[to] |= part

    @rule(seq=seqs)
    def keep(self, seq):
        self.cache.seq_keep(seq)
        self.model = {s: mine if s == seq else {} for s, mine in self.model.items()}

    def shared(self, seq):
        return any(cell in other.values() for s, other in self.model.items() if s != seq for cell in self.model[seq].values())

    @rule(seq=seqs, shift=st.integers(-6, 6))
    def add(self, seq, shift):
        if self.unified and shift and self.shared(seq):
            if not self.window:  # of what the window has passed nobody knows
                with pytest.raises(ValueError, match='shares'):
                    self.cache.seq_add(seq, -1, -1, shift)
            return
        self.cache.seq_add(seq, -1, -1, shift)
        self.model[seq] = {p + shift: cell for p, cell in self.model[seq].items() if p + shift >= 0}

    @rule(seq=seqs, divisor=st.integers(1, 3))
    def div(self, seq, divisor):
        divided = {p // divisor: cell for p, cell in self.model[seq].items()}
        if len(divided) == len(self.model[seq]) and not self.window and not (self.unified and self.shared(seq)):
            self.cache.seq_div(seq, -1, -1, divisor)
            self.model[seq] = divided

    @rule(seq=seqs, n_keep=st.integers(0, 2))
    def make_room(self, seq, n_keep):
        mine, n = self.model[seq], len(self.model[seq])
        if sorted(mine) == list(range(n)) and n - n_keep > 1 and not self.window and not (self.unified and self.shared(seq)):
            n_discard = context_shift(self.cache, seq, n_keep)
            self.model[seq] = {p if p < n_keep else p - n_discard: cell for p, cell in mine.items() if p < n_keep or p >= n_keep + n_discard}
            assert sorted(self.model[seq]) == list(range(n - (n - n_keep) // 2))

    @precondition(lambda self: not self.window)
    @rule(seq=seqs, to=seqs)
    def state_of_one(self, seq, to):
        path = os.path.join(self.folder.name, 'one')
        self.cache.state_save(path, seq)
        if self.used(but=to)[to] + len(self.model[seq]) <= KV_SIZE:
            self.cache.state_load(path, to)
            self.model[to] = dict(zip(self.model[seq], self.cells_with([self.held[cell] for cell in self.model[seq].values()])))
        else:
            with pytest.raises(ValueError, match='room'):
                self.cache.state_load(path, to)

    @rule()
    def state_of_all(self):
        path = os.path.join(self.folder.name, 'all')
        self.cache.state_save(path)
        self.cache.clear()
        self.cache.state_load(path)

    @invariant()
    def each_sequence_has_what_it_should(self):
        for seq, mine in self.model.items():
            cells, stream = self.cache.cells_of(seq), self.cache.stream_of(seq)
            where = np.flatnonzero(cells.owners[:, seq])
            values = self.cache.get_v(1, KV_SIZE, slice(stream, stream + 1))[0, torch.from_numpy(where), 0, 0] - 1000
            held, mine = dict(zip(cells.pos[where].tolist(), values.int().tolist())), {p: self.held[cell] for p, cell in mine.items()}
            if self.window:  # what the next token sees is there, and whatever else there is is right and without a hole
                end = max(mine, default=-1) + 1
                seen = [p for p in mine if end - p < self.window]
                assert held.keys() >= set(seen) and all(mine[p] == token for p, token in held.items())
                assert sorted(held) == sorted(mine)[len(mine) - len(held):]
            else:
                assert held == mine
                assert (self.cache.seq_pos_min(seq), self.cache.seq_pos_max(seq)) == (min(mine, default=None), max(mine, default=None))
            if held:
                keys = self.cache.get_k(1, KV_SIZE, slice(stream, stream + 1))[0, torch.from_numpy(where)]
                exact = self.cache.rotary(self.key(list(held.values())), torch.tensor(list(held)))
                assert (keys - exact).abs().max() < (1e-4 if self.type_k == 'float32' else 0.02)
        for cells in self.cache.streams:
            assert ((cells.pos == EMPTY) == ~cells.owners.any(axis=1)).all()

    def teardown(self):
        self.cache.seq_rm(None)
        assert all(cells.used() == 0 and (cells.pos == EMPTY).all() and not cells.shift.any() for cells in self.cache.streams)
        self.folder.cleanup()


class StreamsMachine(CellsMachine):
    unified = False


class RoundedMachine(CellsMachine):
    type_k = 'int8'


class WindowMachine(CellsMachine):
    window = 4


class WindowStreamsMachine(CellsMachine):
    unified, window = False, 3


MACHINES = [CellsMachine, StreamsMachine, RoundedMachine, WindowMachine, WindowStreamsMachine]
TestCells, TestStreams, TestRounded, TestWindow, TestWindowStreams = (machine.TestCase for machine in MACHINES)
for machine in (TestCells, TestStreams, TestRounded, TestWindow, TestWindowStreams):
    machine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
