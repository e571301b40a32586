"""The content of a cache in a file: what is restored, and what is refused."""
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from test_cells import TOLERANCE, cache, positions, put, rotary_cache, rotated


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
    mine = cells.of(3)
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
                           (dict(kv_size=4), 'all', None), (dict(n_seq_max=2), 'all', None),
                           (dict(unified=False), 'all', None),
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
    save_file({name: tensor.contiguous() for name, tensor in kept.items() if tensor is not None}, to,
              {'kvcache-state': json.dumps(old | header)})
    return to


@pytest.mark.parametrize('how', [
    dict(tensors={'0.0.k0': None}), dict(tensors={'0.pos': None}), dict(tensors={'0.owners': None}),
    dict(tensors={'0.1.v1': torch.zeros(5, 2)}),
    dict(tensors={'0.0.k0': torch.zeros(4, 32, dtype=torch.int8)}), dict(tensors={'0.0.k0': torch.zeros(5, 32)}),
    dict(tensors={'0.pos': torch.arange(5) - 1}), dict(tensors={'0.pos': torch.arange(5).float()}),
    dict(tensors={'0.pos': torch.tensor(3)}),
    dict(tensors={'0.owners': torch.zeros(5, 4, dtype=torch.bool)}),
    dict(tensors={'0.shift': torch.ones(5, dtype=torch.int64)}),
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
    with pytest.raises(ValueError, match='1.owners is'):
        c.state_load(edited(tmp_path / 'all', {'1.owners': owners}))
    assert positions(c, 1) == [0, 1, 2, 3, 4]


def window_cache(kv_size=256, kind='standard', **how):
    return cache(kv_size=kv_size, n_swa=12, swa_type=kind, **how)


def seen_by_next(c, seq):
    """{position: first number of its key} of the positions that the next token of a sequence sees, in layer 1."""
    cells, stream = c.cells_of(seq), c.stream_of(seq)
    keys = c.get_k(1, c.kv_size, slice(stream, stream + 1))[0, :, 0, 0]
    mine = cells.of(seq, c.window.first(cells.pos_max(seq) + 1))
    return dict(zip(cells.pos[mine].tolist(), keys[mine].tolist()))


@pytest.mark.parametrize('kind', ['standard', 'chunked'])
@pytest.mark.parametrize('unified', [True, False])
def test_a_state_has_what_the_window_sees(tmp_path, kind, unified):
    """200 positions behind a window of 12, loaded into 96 free cells: those that the last token sees are saved."""
    c = window_cache(kind=kind, unified=unified)
    put(c, {0: range(200)}, [float(i) for i in range(200)])
    c.state_save(tmp_path / 'one', 0)
    first = {'standard': 188, 'chunked': 192}[kind]
    with safe_open(tmp_path / 'one', 'pt') as f:
        assert f.get_tensor('0.pos').tolist() == list(range(first, 200))
    other = window_cache(kind=kind, unified=unified)
    put(other, {1: range(160)})
    other.state_load(tmp_path / 'one', 0)
    assert positions(other, 0) == list(range(first, 200)) and other.seq_pos_max(1) == 159
    assert seen_by_next(other, 0) == seen_by_next(c, 0)
    assert len(seen_by_next(c, 0)) == {'standard': 11, 'chunked': 8}[kind]
    put(other, {0: [200]}), put(c, {0: [200]})
    assert seen_by_next(other, 0) == seen_by_next(c, 0)


def test_a_state_may_take_cells_that_a_window_has_passed(tmp_path):
    c = window_cache()
    put(c, {0: range(20)})
    c.state_save(tmp_path / 'one', 0)
    full = window_cache(kv_size=16)
    put(full, {1: range(16)})
    before = seen_by_next(full, 1)
    with pytest.raises(ValueError, match='12 cells'):  # its window has passed 5 of 16 cells
        full.state_load(tmp_path / 'one', 0)
    assert positions(full, 1) == list(range(16)) and positions(full, 0) == []
    full = window_cache(kv_size=24)
    put(full, {1: range(24)})
    before = seen_by_next(full, 1)
    full.state_load(tmp_path / 'one', 0)
    assert positions(full, 0) == list(range(8, 20)) and seen_by_next(full, 0) == seen_by_next(c, 0)
    assert seen_by_next(full, 1) == before


def test_a_state_behind_a_window_is_not_one_of_a_cache_that_sees_more(tmp_path):
    c = window_cache()
    put(c, {0: range(20)})
    c.state_save(tmp_path / 'one', 0)
    for other in (cache(kv_size=256), cache(kv_size=256, n_swa=13, swa_type='standard'), window_cache(kind='chunked')):
        with pytest.raises(ValueError, match='window'):
            other.state_load(tmp_path / 'one', 0)
        assert other.seq_pos_max(0) is None


@pytest.mark.parametrize('unified', [True, False])
def test_an_empty_sequence_empties_the_one_it_is_loaded_as(tmp_path, unified):
    """llama.cpp leaves the target as it was."""
    c = cache(unified=unified)
    put(c, {0: range(3)})
    c.state_save(tmp_path / 'empty', 1)
    c.state_load(tmp_path / 'empty', 0)
    assert positions(c, 0) == [] and not any(cells.used() for cells in c.streams)


@pytest.mark.parametrize('kind', ['float32', 'float16', 'int8'])
def test_a_state_saved_while_a_shift_is_pending_has_keys_at_their_new_positions(tmp_path, kind):
    """llama.cpp saves new positions with keys that are not rotated."""
    c, raw = rotary_cache(kind)
    c.seq_add(0, -1, -1, 3)
    c.state_save(tmp_path / 'one', 0)
    other, _ = rotary_cache(kind)
    other.seq_rm(None)
    other.state_load(tmp_path / 'one', 1)
    assert positions(other, 1) == list(range(3, 11))
    assert (other.get_k(0, 8)[0] - rotated(raw, torch.arange(3, 11))).abs().max() < TOLERANCE[kind]
