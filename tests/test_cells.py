"""Cells and streams: placing, windows, sequence operations and shifts, by hand."""
import numpy as np
import pytest
import torch

from kvcache.cell_cache import CellCache
from kvcache.cells import Window
from kvcache.rotary import Rotary
from kvcache.storage import Rows
from kvcache.streams import NoSlot, context_shift


def cache(kv_size=8, n_seq_max=4, **how):
    return CellCache(**(dict(n_layer=2, n_head_kv=1, head_dim=32) | how | dict(kv_size=kv_size, n_seq_max=n_seq_max)))


def put(c, tokens, value=None):
    """Place tokens, {sequence: positions}; keys are `value` of their position, values the same and 1000 more."""
    batch = c.batch(tokens)
    slots = c.find_slot(batch)
    c.apply(slots, batch)
    c.update()
    value = batch.positions.ravel() if value is None else value
    keys = torch.from_numpy(np.asarray(value, dtype=np.float32))
    for layer in (number for number, layer in enumerate(c.layers) if layer is not None):
        rows = keys[:, None, None].expand(-1, c.n_head_kv, c.head_dim) + 100 * layer
        c.cpy_k(layer, rows, c.k_idxs(slots))
        c.cpy_v(layer, rows + 1000, c.k_idxs(slots))
    return slots.cells


def positions(c, seq):
    cells = c.cells_of(seq)
    return sorted(cells.pos[cells.of(seq)].tolist())


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
        c.place(c.batch({1: range(n)}))
    assert str(c) == before
    assert [s.cells.tolist() for s in c.prepare([c.batch({1: range(4)}), c.batch({1: [4]})])] == [[[3, 4, 5, 6]], [[7]]]
    assert str(c) == before


def test_a_window_frees_what_it_has_passed_and_leaves_no_hole():
    c = cache(kv_size=4, n_swa=3, swa_type='standard')
    put(c, {0: range(4)})
    assert put(c, {0: [4]}).tolist() == [[0]]  # a token at 4 sees 2, 3 and 4; 0 and 1 are hidden
    assert positions(c, 0) == [1, 2, 3, 4]
    c.streams[0].head = 2
    assert put(c, {0: [5]}).tolist() == [[2]]  # overwrites position 2, and position 1 is removed too
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
    assert Window(4, 'chunked').hides(np.arange(8), 6).tolist() == [True] * 4 + [False] * 4
    assert Window(4, 'standard').hides(np.arange(8), 6).tolist() == [True] * 3 + [False] * 5


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
    for tokens in ({}, {0: []}, {4: [0]}, {0: [-1]}, {0: [0.5, 1.5]}, {0: [2**31]}, {0: [2**63]}, {'a': [0]},
                   {0.5: [0]}, {(): [0]}):
        with pytest.raises(ValueError):
            c.batch(tokens)


def test_a_sequence_goes_on_where_it_ends():
    c = cache(n_seq_max=3)
    put(c, {(0, 1): range(3)})
    put(c, {1: [3]})
    before = str(c)
    # sequences 0 and 1 have different next positions
    for tokens in ({0: [4]}, {0: [2]}, {(0, 1): [3]}, {1: [0]}):
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
    put(c, {0: [3]})  # now both have a position 3, in different cells
    with pytest.raises(ValueError, match='diverged'):
        c.find_slot(c.batch({(0, 1): [4]}))
    put(c, {2: [5, 6]})  # an empty sequence can begin at any position
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
    many.seq_cp(0, 1)  # into another stream: its content is replaced, as in llama.cpp
    assert positions(many, 1) == [0, 1, 2] and torch.equal(many.get_k(1, 3, slice(1, 2)), many.get_k(1, 3, slice(0, 1)))


def test_the_drawing():
    c = cache(kv_size=4, n_seq_max=2)
    put(c, {(0, 1): [0, 1], 0: [2]})
    c.seq_rm(1, 1)
    assert str(c) == '\n'.join(['slot  0   1   2   3', 'pos   0   1   2   .', 'seq   ab  a   a'])
    wide = cache(kv_size=40)
    put(wide, {0: range(30)})
    lines = str(wide).split('\n')
    assert len(lines) == 7 and lines[4].startswith('slot  28  29') and max(map(len, lines)) <= 120
    assert lines[5] == 'pos   28  29' + '  .' + '   .' * 9
    two = cache(kv_size=1, n_seq_max=2, unified=False)
    put(two, {1: [7]})
    assert str(two) == '\n'.join(['stream 0', 'slot  0', 'pos   .', 'seq', 'stream 1', 'slot  0', 'pos   7', 'seq   b'])


# shifts

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
    written = Rows((1, 8), 32, type_k)  # for comparison: read, rotate and write at each shift
    written.write(torch.arange(8), exact)
    for i in range(64):
        keys = written.read((slice(None), slice(None)))[0][:, None]
        written.write(torch.arange(8), rotary(keys, torch.full((8,), 5 if i % 2 == 0 else -5))[:, 0])
    drifted = (written.read((slice(None), slice(None)))[0] - exact).abs().max()
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


def test_keeping_one_sequence_empties_all_other_streams():
    """llama.cpp looks at that sequence's stream only."""
    c = cache(unified=False)
    put(c, {0: range(3), 1: range(3), 2: range(3)})
    c.seq_keep(1)
    assert [cells.used() for cells in c.streams] == [0, 3, 0, 0] and positions(c, 1) == [0, 1, 2]
