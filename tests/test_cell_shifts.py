"""Cells whose positions change: rotated keys, shifts and divisions, by hand."""
import numpy as np
import pytest
import torch
from test_cells import cache, positions, put

from kvcache.cell_cache import CellCache
from kvcache.rotary import Rotary
from kvcache.storage import Rows
from kvcache.streams import context_shift


@pytest.mark.parametrize('base', [10000.0, 100.0])
def test_rotations_add_up(base):
    rotary, x = Rotary(16, base), torch.randn(7, 2, 16)
    p, d = torch.arange(7), torch.tensor([3, -2, 100, 0, 1, -4, 50])
    assert torch.allclose(rotary(rotary(x, p), d), rotary(x, p + d), atol=1e-5)


def rotary_cache(type_k, n=8, kv_size=8):
    """A cache with keys 0 ... n - 1 of sequence 0, and those keys before they were rotated."""
    rotary = Rotary(32)
    c = CellCache(1, 1, 32, kv_size, 3, type_k=type_k, can_shift=True)
    raw = torch.randn(n, 1, 32, generator=torch.Generator().manual_seed(0))
    batch = c.batch({0: range(n)})
    slots = c.find_slot(batch)
    c.apply(slots, batch)
    c.cpy_k(0, rotary(raw, torch.arange(n)), c.k_idxs(slots))
    return c, raw, rotary


def attended_keys(c, seq, pos):
    """
    The keys that a token of seq at pos would see, in the order of positions, as `Placement` and `Layer.read` give
    them.
    """
    batch = c.batch({seq: [pos]})
    slots = c.find_slot(batch)
    c.apply(slots, batch)
    placement = c.placement(batch, slots)
    k, _ = c.layers[0].read(placement, torch.float32)
    c.seq_rm(seq, pos)
    order = np.argsort(c.streams[0].pos[:k.size(2)])
    order = order[np.isin(order, c.streams[0].of(seq))]
    return k[0, 0, torch.from_numpy(order)]


@pytest.mark.parametrize('type_k, tolerance', [('float32', 1e-5), ('float16', 4e-3), ('bfloat16', 3e-2),
                                               ('int8', 3e-2)])
def test_shifted_keys_are_those_of_the_new_positions(type_k, tolerance):
    c, raw, rotary = rotary_cache(type_k)
    assert context_shift(c, 0, n_keep=2) == 3
    assert positions(c, 0) == [0, 1, 2, 3, 4]  # which were 0, 1, 5, 6, 7
    expected = rotary(raw[[0, 1, 5, 6, 7]], torch.arange(5))[:, 0]
    for _ in range(2):  # rotated once, not at each read
        assert (attended_keys(c, 0, 5) - expected).abs().max() < tolerance


@pytest.mark.parametrize('type_k', ['float32', 'float16', 'bfloat16', 'int8'])
def test_64_shifts_do_not_drift(type_k):
    """
    Shifts back and forth: the error of the keys is the same at the end as before the first shift, or in float32 a
    rounding error.
    """
    c, raw, rotary = rotary_cache(type_k, kv_size=9)
    exact = rotary(raw, torch.arange(8))[:, 0]
    before = (attended_keys(c, 0, 8) - exact).abs().max()
    for i in range(64):
        c.seq_add(0, 0, -1, 5 if i % 2 == 0 else -5)
        shift = 5 if i % 2 == 0 else 0
        after = (attended_keys(c, 0, 8 + shift) - rotary(raw, torch.arange(8) + shift)[:, 0]).abs().max()
    assert after <= before * 1.1 + 1e-5
    written = Rows((1, 8), 1, 32, type_k)  # for comparison: read, rotate and write at each shift
    written.write(torch.arange(8), exact[None])
    for i in range(64):
        keys = written.read((slice(None), slice(None)))[0].transpose(0, 1)
        written.write(torch.arange(8), rotary(keys, torch.full((8,), 5 if i % 2 == 0 else -5)).transpose(0, 1))
    drifted = (written.read((slice(None), slice(None)))[0, 0] - exact).abs().max()
    print(f"{type_k}: off by {before:.1e} as written, {after:.1e} after 64 shifts, {drifted:.1e} if written at each")
    assert drifted > 4 * after or type_k.startswith('float')


@pytest.mark.parametrize('type_k, tolerance', [('float32', 1e-5), ('float16', 4e-3), ('int8', 3e-2)])
def test_keys_are_at_the_positions_they_have_now(type_k, tolerance):
    c, raw, rotary = rotary_cache(type_k)
    c.seq_add(0, -1, -1, 3)
    for _ in range(2):
        assert (c.get_k(0, 8)[0] - rotary(raw, torch.arange(3, 11))).abs().max() < tolerance


def test_the_cat_sat_on_the_mat():
    """
    A full cache of four cells: the oldest position is removed, the new token takes its cell, the others get new
    positions and are rotated in place.
    """
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
    for refused in (lambda: learned.seq_add(0, 0, -1, 1), lambda: learned.seq_div(0, 0, -1, 2),
                    lambda: context_shift(learned, 0),
                    lambda: context_shift(c, 2), lambda: context_shift(c, 0, 2.5), lambda: c.seq_add(0, 0, -1, 1.5),
                    lambda: c.seq_div(0, 0, -1, 1.5),
                    lambda: c.seq_add(0, 0, -1, 2**62),
                    lambda: c.seq_add(0, 0, -1, 1), lambda: context_shift(c, 0), lambda: c.seq_div(0, 0, -1, 0),
                    lambda: context_shift(c, 0, 8)):
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
    assert context_shift(c, 0, n_keep=1) == 3  # removes 1, 2, 3 from sequence 0; sequence 1 keeps them
    assert positions(c, 0) == [0, 1, 2, 3, 4] and positions(c, 1) == before
    c.seq_cp(1, 2)
    with pytest.raises(ValueError, match='shares'):
        context_shift(c, 1)


@pytest.mark.parametrize('type_k, tolerance', [('float32', 1e-5), ('int8', 3e-2)])
def test_divided_positions_rotate_keys_the_right_way(type_k, tolerance):
    """By new - old. llama.cpp adds old - new to the shift, and rotates its keys the wrong way."""
    c, raw, rotary = rotary_cache(type_k)
    c.seq_rm(0, 0, 4)
    c.seq_div(0, -1, -1, 4)
    assert positions(c, 0) == [1, 1, 1, 1]  # were 4, 5, 6, 7
    assert (c.get_k(0, 8)[0, 4:] - rotary(raw[4:], torch.ones(4, dtype=torch.int64))).abs().max() < tolerance
