"""Stored numbers: floats as they are, int8 and int4 in groups that share a scale; slots, views, memory."""
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import model_of

from kvcache import bytes_of_slots, make_layers, storage
from kvcache.storage import Layer, SlotArray, dequantise, quantise

FLOATS = 'float64', 'float32', 'float16', 'bfloat16'


def slowly_quantised(x, bits, group):
    """One number after the other: (integers, scales), of a row x of floats, in x's precision."""
    largest, whole, scales = {8: 127, 4: 7}[bits], [], []
    for start in range(0, len(x), group):
        part = x[start:start + group]
        scale = max(max(abs(v) for v in part) / x.dtype.type(largest), x.dtype.type(1e-30))
        scales.append(scale)
        whole += [min(largest, max(-largest, int(np.rint(v / scale)))) for v in part]
    return whole, scales


def test_quantised_by_hand():
    codes, scale = quantise(torch.tensor([.5, 1.5, 2.5, -127, 0, 0, 0, 0]), 8, 8)
    assert codes.tolist() == [0, 2, 2, -127, 0, 0, 0, 0] and scale.tolist() == [1]
    codes, scale = quantise(torch.zeros(8), 8, 8)
    assert codes.tolist() == [0] * 8 and scale.tolist() == [np.float32(1e-30)]
    codes, _ = quantise(torch.tensor([1e-12, -.5e-12]), 8, 2)
    assert codes.tolist() == [127, -64]
    assert quantise(torch.zeros(2, dtype=torch.float16), 8, 2)[0].tolist() == [0, 0]
    codes, scale = quantise(torch.tensor([7., -7, 1, -1]), 4, 4)
    # -7 is 1001, -1 is 1111; the low half is first
    assert codes.tolist() == [7 | 9 << 4, 1 | 15 << 4] and scale.tolist() == [1]
    assert dequantise(codes, scale, 4).tolist() == [7, -7, 1, -1]


@given(seed=st.integers(0, 2**31), bits=st.sampled_from([8, 4]), group=st.sampled_from([2, 8, 32]))
def test_a_number_is_rounded_to_half_a_scale_and_once(seed, bits, group):
    """As one number after the other is; and what was read is rounded to the same numbers again."""
    x = np.random.default_rng(seed).normal(0, 3, 64).astype(np.float32)
    codes, scale = quantise(torch.from_numpy(x), bits, group)
    read = dequantise(codes, scale, bits)
    whole, scales = slowly_quantised(x, bits, group)
    assert scale.tolist() == scales and np.array_equal(read.numpy(), np.float32(whole) * np.repeat(scales, group))
    assert (np.abs(read.numpy() - x) <= 0.501 * np.repeat(scales, group)).all()
    again = dequantise(*quantise(read, bits, group), bits)
    assert torch.allclose(again, read, rtol=1e-6, atol=0)


@pytest.mark.parametrize('kind', [*FLOATS, 'int8'])
def test_slots_hold_what_was_written_there_last(kind):
    """Each slot by itself, in copies and views too; slots that were not written are zeros."""
    torch.manual_seed(0)
    layer, x = Layer(12, 2, 32, kind, kind), torch.randn(4, 2, 5, 32)
    assert not any(stored.any() for stored in layer.tensors())
    slots, more = torch.tensor([7, 0, 3, 11, 4]), torch.tensor([1, 7, 2, 5, 8])
    with torch.inference_mode():
        layer.write(slots, *x[:2])
    layer.write(more, *x[2:])
    expected = torch.zeros(2, 2, 12, 32)
    for which, of_slots in ((x[:2], slots), (x[2:], more)):
        expected[:, :, of_slots] = which
    k, v = (each.clone() for each in layer.read(torch.arange(12)[None], torch.float32))
    worst = {'float16': 2e-3, 'bfloat16': 2e-2, 'int8': 2e-2}.get(kind, 0)
    assert torch.allclose(torch.stack((k[0], v[0])), expected, atol=worst, rtol=worst) and not v[0][:, 9].any()
    before = [stored.clone() for stored in layer.tensors()]
    layer.copy(3, 8, 3)
    for stored, old in zip(layer.tensors(), before):
        assert torch.equal(stored[:, 8:11], old[:, 3:6]) and torch.equal(stored[:, :8], old[:, :8])
    if kind != 'int8':
        k, v = layer.views(1, 5, 2, 4)  # slots 1 to 4 and 6 to 9
        assert torch.equal(k, layer.k.data[:, [[1, 2, 3, 4], [6, 7, 8, 9]]].transpose(0, 1))
        assert torch.equal(v, layer.v.data[:, [[1, 2, 3, 4], [6, 7, 8, 9]]].transpose(0, 1))
    layer.zero()
    assert not any(stored.any() for stored in layer.tensors())


def test_what_cannot_be_stored_is_refused():
    with pytest.raises(ValueError, match="not 'int3'"):
        SlotArray(4, 1, 8, 'int3')


# memory

def test_bytes_of_the_numbers():
    m = model_of('rope', n_embd=128)  # 2 heads of keys and values of 32 channels, in 2 layers
    for kind, per_slot in (('float32', 2 * 2 * 32 * 4), ('bfloat16', 2 * 2 * 32 * 2), ('int8', 2 * 2 * (32 + 4))):
        layers = make_layers(m, 10, kind)
        assert len(layers) == 2 and sum(t.nbytes for layer in layers for t in layer.tensors()) == 2 * 10 * per_slot


def test_slots_that_were_not_written_take_no_memory():
    if not os.path.exists('/proc/self/statm'):
        pytest.skip("this system does not say how much memory a process has")

    def resident():
        with open('/proc/self/statm') as f:
            return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
    before = resident()
    layer = Layer(2**18, 2, 32)
    assert sum(t.nbytes for t in layer.tensors()) == 2**27 and resident() - before < 2**24
    assert all(stored.data_ptr() % 64 == 0 for stored in layer.tensors())


def test_free_memory_is_that_of_the_machine_or_of_the_container(tmp_path, monkeypatch):
    free = storage.free_memory(torch.device('cpu'))
    monkeypatch.setattr(storage, 'CONTROL_GROUP', tmp_path)
    (tmp_path / 'memory.current').write_text('700000\n')
    (tmp_path / 'memory.stat').write_text('anon 400000\nfile 300000\ninactive_file 200000\nactive_file 90000\n')
    for most, expected in (('max', free), ('1000000', 590000)):
        (tmp_path / 'memory.max').write_text(most + '\n')
        found = storage.free_memory(torch.device('cpu'))
        assert found == expected or expected == free and abs(found - free) < 0.3 * free
    assert 2**20 < free <= os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') or free == math.inf


@pytest.mark.parametrize('kind', ['float32', 'int8'])
@pytest.mark.parametrize('n_embd', [16, 96, 128])  # 4, 24 and 32 channels of a head
def test_slots_that_do_not_fit_are_refused(kind, n_embd, monkeypatch):
    m = model_of('rope', n_embd=n_embd)
    n_bytes = sum(t.nbytes for layer in make_layers(m, 160, kind) for t in layer.tensors())
    assert bytes_of_slots(m.config, 160, kind) == n_bytes
    monkeypatch.setattr(storage, 'ALWAYS_FREE', 0)
    monkeypatch.setattr(storage, 'free_memory', lambda device: n_bytes)
    make_layers(m, 160, kind)
    monkeypatch.setattr(storage, 'free_memory', lambda device: n_bytes - 1)
    with pytest.raises(ValueError, match='160 tokens take .* GB, and .* GB of memory are free: take'):
        make_layers(m, 160, kind)
