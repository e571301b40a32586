"""Cells and streams by hand: batches, masks, shifts, memory, states. Random operations: test_cells_reference.py."""
import json
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvcache.llamacpp.cache import CellCache
from kvcache.llamacpp.cells import Streams, context_shift
from kvcache.storage import SlotArray
from model import GPTConfig
from positions import Positions


def cache(kv_size=8, n_seq_max=4, **how):
    return CellCache(**(dict(n_layer=2, n_head_kv=1, head_dim=32) | how | dict(kv_size=kv_size, n_seq_max=n_seq_max)))


def store(c, tokens):
    """Take cells for tokens, {sequence: positions}. Returns (batch, cells)."""
    batch = c.batch(tokens)
    cells = c.find_slot(batch)
    c.apply(cells, batch)
    return batch, cells


def put(c, tokens, value=None):
    """`store` tokens; keys are `value` of their position, values the same and 1000 more. Returns the cells."""
    batch, cells = store(c, tokens)
    c.update()
    value = batch.positions.ravel() if value is None else value
    keys = torch.from_numpy(np.asarray(value, dtype=np.float32))
    for layer in (number for number, layer in enumerate(c.layers) if layer is not None):
        rows = keys[:, None, None].expand(-1, c.n_head_kv, c.head_dim) + 100 * layer
        write(c, layer, batch, cells, rows, rows + 1000)
    return cells


def write(c, layer, batch, cells, k, v):
    """Write the keys and values (n, n_head_kv, head_dim) of a batch in these cells."""
    slots = torch.from_numpy(c.slots_of(batch, cells)).flatten()
    c.layers[layer].write(slots, k.transpose(0, 1), v.transpose(0, 1))


def read(c, layer):
    """The keys and values of all cells as attention reads them, (n_stream, kv_size, n_head_kv, head_dim) each."""
    c.update()
    slots = torch.arange(len(c.shift)).view(-1, c.kv_size)
    return [x.transpose(1, 2).clone() for x in c.layers[layer].read(slots, torch.float32)]


def logits_of(m, idx, c, tokens):
    """Logits (n, vocab_size) of the n tokens idx, of any shape, that are stored as `tokens`, see `Streams.batch`."""
    batch = c.batch(tokens)
    at = torch.from_numpy(batch.positions)
    x, _ = m.hidden_states(idx.reshape(at.shape), at, c.place(batch))
    return m.lm_head(x).flatten(0, 1)


def test_batches_of_separate_streams_bring_as_many_tokens_of_each():
    c = cache(unified=False)
    batch = c.batch({2: [0, 1], 0: [0, 1]})
    assert batch.positions.shape == c.find_slot(batch).shape == (2, 2) and batch.streams.tolist() == [2, 0]
    for tokens in ({0: [0], 1: [0, 1]}, {(0, 1): [0]}):
        with pytest.raises(ValueError, match='split'):
            c.batch(tokens)


REFUSED = {  # where sequences 0 and 1 share the positions 0 to 2, sequence 1 also has 3, and 2 and 3 have none
    'goes on at position': [{0: [4]}, {0: [2]}, {(0, 1): [3]}, {1: [0]}, {0: [3], (0, 2): [3]}],
    'follow each other': [{0: [3, 5]}, {0: [3, 3]}, {0: [4, 3]}],
    'diverged': [{2: [0, 1], (2, 3): [2]}, {(2, 3): [0], 2: [1], 3: [1], (3, 2): [2]}, {(2, 3): [0, 1], (3, 4): [2]}],
    'at least one': [{}, {0: []}, {(): [0]}], 'numbered': [{5: [0]}, {'a': [0]}, {0.5: [0]}],
    'integers': [{2: [-1]}, {2: [0.5, 1.5]}, {2: [True]}]}


@pytest.mark.parametrize('words', REFUSED)
def test_batches_that_are_refused_change_nothing(words):
    """A sequence goes on where it ends. After other tokens, also inside of a batch, two of them share no more."""
    c = cache(n_seq_max=5)
    put(c, {(0, 1): range(3)})
    put(c, {1: [3]})
    before = str(c)
    for tokens in REFUSED[words]:
        with pytest.raises(ValueError, match=words):
            c.find_slot(c.batch(tokens))
    assert str(c) == before
    put(c, {(2, 3): [5], (3, 2): [6]})  # an empty sequence can begin at any position
    put(c, {2: [7], 3: [7]})
    with pytest.raises(ValueError, match='diverged'):
        c.find_slot(c.batch({(2, 3): [8]}))  # both have a position 7, in different cells


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

TOLERANCE = {'float32': 1e-5, 'float16': 4e-3, 'bfloat16': 3e-2, 'int8': 3e-2}


def rotated(x, pos, base=10000.0):
    """Keys x (n, n_head, head_dim) turned to positions pos (n,): pairs of channels as complex numbers."""
    a, b = x.double().chunk(2, dim=-1)
    angle = torch.as_tensor(pos)[:, None, None] * base ** (-torch.arange(a.size(-1), dtype=torch.float64) / a.size(-1))
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), dim=-1).float()


def rotary_cache(type_k, n=8, kv_size=8):
    """A cache with keys 0 ... n - 1 of sequence 0, and those keys before they were rotated."""
    with pytest.raises(ValueError, match='an even head_dim, not 5'):
        CellCache(1, 1, 5, kv_size, 3, can_shift=True)
    c = CellCache(1, 1, 32, kv_size, 3, type_k=type_k, can_shift=True)
    raw = torch.randn(n, 1, 32, generator=torch.Generator().manual_seed(0))
    keys = rotated(raw, torch.arange(n))
    write(c, 0, *store(c, {0: range(n)}), keys, keys)
    return c, raw


def attended_keys(c, seq, pos):
    """The keys that a token of seq at pos would see in a forward pass, in the order of positions."""
    placed = c.place(c.batch({seq: [pos]}))[0]
    k, _ = placed.layer.read(placed.read, torch.float32)
    c.seq_rm(seq, pos)
    order = np.argsort(c.streams[0].pos[:k.size(2)])
    return k[0, 0, torch.from_numpy(order[np.isin(order, c.streams[0].of(seq))])]


@pytest.mark.parametrize('type_k', TOLERANCE)
def test_64_shifts_do_not_drift(type_k):
    """Shifts back and forth: the error of the keys at the end is that before the first shift, but for float32."""
    c, raw = rotary_cache(type_k, kv_size=9)
    exact = rotated(raw, torch.arange(8))[:, 0]
    before = (attended_keys(c, 0, 8) - exact).abs().max()
    for i in range(64):
        c.seq_add(0, 0, -1, 5 if i % 2 == 0 else -5)
        shift = 5 if i % 2 == 0 else 0
        after = (attended_keys(c, 0, 8 + shift) - rotated(raw, torch.arange(8) + shift)[:, 0]).abs().max()
    assert after <= before * 1.1 + 1e-5
    # for comparison: read, rotate and write at each shift
    written, slots = SlotArray(8, 1, 32, type_k), torch.arange(8)
    written.write(slots, exact[None])
    for i in range(64):
        keys = rotated(written.read(slots[None])[0].transpose(0, 1), torch.full((8,), 5 if i % 2 == 0 else -5))
        written.write(slots, keys.transpose(0, 1))
    drifted = (written.read(slots[None])[0, 0] - exact).abs().max()
    print(f"{type_k}: off by {before:.1e} as written, {after:.1e} after 64 shifts, {drifted:.1e} if written at each")
    assert drifted > 4 * after or type_k.startswith('float')


def test_positions_that_are_not_moved():
    """Learned ones, and by what is no whole number; those of shared cells: test_cells_reference.py."""
    learned, (c, _) = cache(), rotary_cache('float32')
    put(learned, {0: range(4)})
    before = str(c), str(learned)
    for refused in (lambda: learned.seq_add(0, 0, -1, 1), lambda: learned.seq_div(0, 0, -1, 2),
                    lambda: context_shift(learned, 0), lambda: c.seq_div(0, 0, -1, 0), lambda: context_shift(c, 0, 8),
                    lambda: context_shift(c, 2), lambda: context_shift(c, 0, 2.5), lambda: c.seq_add(0, 0, -1, 1.5),
                    lambda: c.seq_div(0, 0, -1, 1.5), lambda: c.seq_rm(3), lambda: c.seq_cp(0, -1)):
        with pytest.raises((ValueError, TypeError)):
            refused()
    assert (str(c), str(learned)) == before


# the memory that a token needs depends on the cells in use, not on the size of the cache; in bytes, not seconds

MB = 10**6


def peak(work):
    """(result, the most bytes that numpy and Python held at a time because of some work)."""
    tracemalloc.start()
    try:
        result = work()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_stream_of_one_sequence_keeps_owners_for_one():
    streams, size = peak(lambda: Streams(4096, 256, unified=False))
    assert len(streams.streams) == 256 and size < 64 * MB  # a row for each sequence in each stream would be 268 MB


@pytest.mark.parametrize('n_seq_max, unified', [(1, True), (256, True), (4, False)])
def test_a_token_does_not_look_at_cells_that_are_not_in_use(n_seq_max, unified):
    c = CellCache(1, 1, 8, 131_072, n_seq_max, unified, can_shift=True)
    c.place(c.batch({0: range(10)}))
    _, size = peak(lambda: c.place(c.batch({0: [10]})))
    assert size < 40_000  # one bit for each cell would be 16,384, one number 1,048,576
    _, size = peak(lambda: (c.seq_rm(0, 10), c.seq_add(0, 5, -1, -1), c.seq_pos_min(0), c.find_slot(c.batch({0: [9]}))))
    assert size < 40_000


@pytest.mark.parametrize('n_swa', [0, 16_500])
def test_the_mask_of_a_long_prompt_stays_bool(n_swa):
    """1,024 tokens at position 16,000: one byte for each token and key, and what a comparison needs."""
    c = CellCache(1, 1, 8, 17_024, 2, n_swa=n_swa)
    for pos in (range(16_000), range(16_000, 17_024)):
        batch, cells = store(c, {0: pos})
    (_, allowed), size = peak(lambda: c.keys(batch))
    assert allowed.shape == (1, 1024, 17_024) and allowed.dtype == bool and size < 2.5 * allowed.size
    keys = c.layers_for(batch, cells, torch.device('cpu'))[0].key_positions
    mask = Positions(GPTConfig(), torch.from_numpy(batch.positions), torch.float32).mask(keys, 17_024)
    first = 17_024 - n_swa if n_swa else 0
    assert mask.dtype == torch.bool and np.array_equal(np.flatnonzero(mask[0, 0, -1]), np.arange(first, 17_024))


# states; what is restored: test_cells_reference.py

def test_state_that_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    c = cache()
    put(c, {0: range(5)})
    c.state_save(tmp_path / 'one', 0)
    c.state_save(tmp_path / 'all')
    window = cache(n_swa=4)
    put(window, {0: range(5)})
    window.state_save(tmp_path / 'window', 0)
    (tmp_path / 'junk').write_bytes(b'junk' * 100)
    save_file({'k': torch.zeros(1)}, tmp_path / 'weights')
    save_file({'k': torch.zeros(1)}, tmp_path / 'list', {'kvcache-state': '[]'})
    for how, path, seq in ((dict(n_layer=1), 'one', 0), (dict(can_shift=True), 'one', 0),
                           (dict(n_layer=3, layer_filter=lambda layer: layer > 0), 'one', 0),
                           (dict(head_dim=64), 'one', 0), (dict(type_v='int8'), 'one', 0), (dict(kv_size=4), 'one', 0),
                           (dict(kv_size=4), 'all', None), (dict(n_seq_max=2), 'all', None),
                           (dict(unified=False), 'all', None), ({}, 'window', 0),
                           (dict(n_swa=5), 'window', 0),
                           ({}, 'all', 0), ({}, 'one', None), ({}, 'junk', 0), ({}, 'weights', 0), ({}, 'list', 0),
                           ({}, 'absent', 0)):
        other = cache(**how)
        put(other, {1: range(2)})
        before = str(other), other.own_layers[0].k.data.clone()
        with pytest.raises(ValueError):
            other.state_load(tmp_path / path, seq)
        assert str(other) == before[0] and torch.equal(other.own_layers[0].k.data, before[1])


def edited(path, tensors=(), **header):
    """A state with some tensors (None: left out) and header fields replaced."""
    with safe_open(path, 'pt') as f:
        old = json.loads(f.metadata()['kvcache-state'])
        kept = {name: f.get_tensor(name) for name in f.keys()} | dict(tensors)
    to = path.with_name('edited')
    save_file({name: tensor.contiguous() for name, tensor in kept.items() if tensor is not None}, to,
              {'kvcache-state': json.dumps(old | header)})
    return to


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
    (dict(tensors={'1.owners': torch.arange(20).view(5, 4) % 4 == 0}), False),  # sequence 0 in the stream of 1
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
