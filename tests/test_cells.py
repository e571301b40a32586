"""Cells and streams: placing, windows, sequence operations and shifts, by hand."""
import numpy as np
import pytest
import torch

from kvcache.cell_cache import CellCache
from kvcache.cells import Window
from kvcache.streams import NoSlot


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
    assert torch.equal(many.layers[1].k.data[:, 2], many.layers[1].k.data[:, 0]) and many.layers[1].k.data[:, 2].any()
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

def test_keeping_one_sequence_empties_all_other_streams():
    """llama.cpp looks at that sequence's stream only."""
    c = cache(unified=False)
    put(c, {0: range(3), 1: range(3), 2: range(3)})
    c.seq_keep(1)
    assert [cells.used() for cells in c.streams] == [0, 3, 0, 0] and positions(c, 1) == [0, 1, 2]
