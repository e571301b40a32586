"""The layers of a cache of cells under a model: shared, left out, on other devices; gradients; masks."""
import pytest
import torch
from test_cells import cache, logits_of, put
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcache.llamacpp.cache import CellCache
from kvcache.llamacpp.cells import Streams
from model import GPT, GPTConfig
from positions import Keys


class Recorder(Streams):
    """
    The simplest cache of one sequence: for each layer all keys and values so far, (B, n_head, T, head_dim). source: the
    layer whose keys and values a layer reads.
    """

    def __init__(self, n_layer, source=lambda layer: layer, window=lambda layer: None):
        super().__init__(100, 1)
        self.recorded = [None] * n_layer
        self.layers = [RecordedLayer(self.recorded, source(layer), layer, window(layer)) for layer in range(n_layer)]

    def place(self, batch):
        return self.layers


class RecordedLayer:
    def __init__(self, recorded, source, layer, window):
        self.recorded, self.source, self.layer, self.window = recorded, source, layer, window

    def append(self, k, v, positions):
        if self.recorded[self.layer] is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.recorded[self.layer], (k, v)))
        self.recorded[self.layer] = k, v
        k, v = self.recorded[self.source]
        pos = torch.arange(k.size(2))
        return k, v, Keys(pos, positions.q_pos[..., None] - pos < (self.window or 10**9)), self


def logits_in_chunks(m, idx, chunks, c):
    """Logits (T, vocab_size) of every position of idx (1, T), fed in chunks as sequence 0 of a cache."""
    out, start = [], 0
    for n in chunks:
        out.append(logits_of(m, idx[:, start:start + n], c, {0: range(start, start + n)}))
        start += n
    return torch.cat(out)


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
    c = CellCache(4, 2, 16, 16, 1, layer_reuse=lambda layer: source(layer) if layer > 1 else None)
    assert c.layers[2] is c.layers[1] and c.layers[3] is c.layers[0]
    assert c.memory_breakdown() == {'cpu': 2 * 2 * 16 * 32 * 4}
    exact = logits_in_chunks(m, idx, [13], Recorder(4, source))
    assert torch.allclose(logits_in_chunks(m, idx, chunks, c), exact, atol=1e-4)
    with pytest.raises(ValueError, match='share'):
        CellCache(2, 1, 32, 8, 1, layer_reuse=lambda layer: 1 if layer == 0 else None)


def test_a_layer_without_a_cache_refuses():
    m, idx = deep_model()
    c = CellCache(4, 2, 16, 16, 1, layer_filter=lambda layer: layer != 2)
    for asked in (lambda: c.get_k(2, 1), lambda: c.get_v(4, 1),
                  lambda: c.cpy_k(2, torch.zeros(1, 2, 16), torch.tensor([0]))):
        with pytest.raises(ValueError, match='has no cache'):
            asked()
    with pytest.raises(ValueError, match='layer 2 has no cache'):
        logits_of(m, idx, c, {0: range(13)})
    with pytest.raises(ValueError, match='no layer'):
        CellCache(4, 2, 16, 16, 1, layer_filter=lambda layer: False)


def test_a_forward_pass_brings_slots_and_keys_to_each_layers_device():
    """
    On a fake device, which refuses tensors of other devices as a real one does. Results are where the new keys are.
    """
    with FakeTensorMode():
        c = CellCache(2, 2, 16, 8, 2, unified=False, device=lambda layer: ('cpu', 'cuda')[layer])
        assert c.memory_breakdown() == {'cpu': 2 * 16 * 32 * 4, 'cuda:0': 2 * 16 * 32 * 4}
        keys, batch = [], c.batch({0: range(3), 1: range(3)})
        for layer in c.place(batch):
            k, v, each, _ = layer.append(torch.zeros(2, 2, 3, 16), torch.zeros(2, 2, 3, 16), None)
            keys.append(each)
            assert k.shape == v.shape == (2, 2, 3, 16)
            assert k.device == v.device == each.pos.device == torch.device('cpu')
        assert keys[0] is keys[1]  # so that attention makes its mask once
        c.take_back(batch)
        assert c.place(batch, 'cuda:0')[0].keys.pos.device.type == 'cuda'


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device, CUDA")
@torch.inference_mode()
def test_layers_on_two_devices_give_what_layers_on_one_give():
    m, idx = deep_model()
    c = CellCache(4, 2, 16, 16, 1, device=lambda layer: ('cpu', 'cuda')[layer % 2])
    exact = logits_in_chunks(m, idx, [13], Recorder(4))
    assert torch.allclose(logits_in_chunks(m, idx, [5, 1, 4, 3], c), exact, atol=1e-4)


def test_no_gradients_go_through_a_cache():
    m, idx = deep_model()
    for kind, unified in (('float32', True), ('int8', True), ('float32', False)):
        c = CellCache(4, 2, 16, 16, 3, unified, kind, kind)
        for start in (0, 4):
            logits_of(m, idx[0, :8], c, {seq: range(start, start + 4) for seq in (2, 0)})
        assert not any(tensor.requires_grad for layer in c.layers for tensor in layer.tensors())


def test_what_is_cleared_is_zero():
    c = cache()
    put(c, {0: range(3)}, [float('nan')] * 3)
    c.clear()
    assert not c.layers[1].k.data.any() and not c.layers[1].v.data.any()
    with torch.inference_mode():
        made_there = cache()
    put(made_there, {0: range(3)})  # outside inference mode too


@torch.inference_mode()
def test_a_long_mask_hides_what_a_short_one_hides(monkeypatch):
    """Long masks stay bool: the logits are the same, with windows and with other sequences."""
    m, idx = deep_model()

    def logits():
        c = CellCache(4, 2, 16, 32, 3, n_swa=6, swa_type='standard')
        logits_of(m, idx[:, :4], c, {1: range(4)})
        return logits_in_chunks(m, idx, [5, 1, 4, 3], c)
    short = logits()
    monkeypatch.setattr('positions.LONG_MASK', 0)
    assert torch.allclose(logits(), short, atol=1e-5)
