"""The content of cells in a file: what is refused. What is restored: test_cells_reference.py."""
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from test_cells import cache, put


def test_state_that_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    c = cache()
    put(c, {0: range(5)})
    c.state_save(tmp_path / 'one', 0)
    c.state_save(tmp_path / 'all')
    window = cache(n_swa=4, swa_type='standard')
    put(window, {0: range(5)})
    window.state_save(tmp_path / 'window', 0)
    (tmp_path / 'junk').write_bytes(b'junk' * 100)
    for how, path, seq in ((dict(n_layer=1), 'one', 0), (dict(can_shift=True), 'one', 0),
                           (dict(n_layer=3, layer_filter=lambda layer: layer > 0), 'one', 0),
                           (dict(head_dim=64), 'one', 0), (dict(type_v='int8'), 'one', 0), (dict(kv_size=4), 'one', 0),
                           (dict(kv_size=4), 'all', None), (dict(n_seq_max=2), 'all', None),
                           (dict(unified=False), 'all', None), ({}, 'window', 0),
                           (dict(n_swa=5, swa_type='standard'), 'window', 0),
                           (dict(n_swa=4, swa_type='chunked'), 'window', 0),
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


STRANGER = torch.arange(20).view(5, 4) % 4 == 0  # sequence 0 owns what is in the stream of sequence 1


@pytest.mark.parametrize('how, unified', [
    *[(how, True) for how in (
        dict(tensors={'0.0.k0': None}), dict(tensors={'0.pos': None}), dict(tensors={'0.1.v1': torch.zeros(5, 2)}),
        dict(tensors={'0.0.k0': torch.zeros(1, 4, 32, dtype=torch.int8)}),
        dict(tensors={'0.0.k0': torch.zeros(1, 5, 32)}),
        dict(tensors={'0.pos': torch.arange(5) - 1}), dict(tensors={'0.pos': torch.arange(5).float()}),
        dict(tensors={'0.pos': torch.tensor(3)}), dict(tensors={'0.owners': torch.zeros(5, 4, dtype=torch.bool)}),
        dict(tensors={'0.shift': torch.ones(5, dtype=torch.int64)}),
        dict(tensors={'0.0.k1': torch.full((1, 5, 1), float('nan'))}), dict(version=1), dict(one=True),
        dict(n_seq_max=None), dict(type_k=None))],
    (dict(tensors={'1.owners': STRANGER}), False),
])
def test_damaged_state_is_refused_and_changes_nothing(tmp_path, how, unified):
    c = cache(type_k='int8', type_v='int8', unified=unified)
    put(c, {1: range(5)})
    c.state_save(tmp_path / 'all')
    path = edited(tmp_path / 'all', **how)
    before = str(c), [t.clone() for layer in c.layers for t in layer.tensors()]
    with pytest.raises(ValueError):
        c.state_load(path)
    assert str(c) == before[0]
    assert all(map(torch.equal, before[1], [t for layer in c.layers for t in layer.tensors()]))
    c.state_load(edited(tmp_path / 'all'))
