"""The layers of a cache of cells under a model: shared, left out, on other devices, in several caches."""
import pytest
import torch
from example_models import f32
from plain_gpt import plain
from test_cells import cache, logits_of, put
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcache.llamacpp.cache import CellCache
from kvcache.llamacpp.cells import NoSlot, context_shift
from kvcache.llamacpp.hybrid import HybridCache


def exact(m, idx, **how):
    """Logits (T, vocab_size) of every position of idx (1, T) by the judge, see `plain`."""
    return plain(m, idx, **how)[0].float()


def logits_in_chunks(m, idx, chunks, c):
    """Logits (T, vocab_size) of every position of idx (1, T), fed in chunks as sequence 0 of a cache."""
    out, start = [], 0
    for n in chunks:
        out.append(logits_of(m, idx[:, start:start + n], c, {0: range(start, start + n)}))
        start += n
    return torch.cat(out)


def deep_model():
    return f32(n_layer=4, n_embd=32), torch.randint(29, (1, 13))


@pytest.mark.parametrize('chunks', [[13], [5, 1, 4, 3], [1] * 13])
@torch.inference_mode()
def test_a_layer_that_shares_anothers_cache_only_reads_it(chunks):
    m, idx = deep_model()
    source = (0, 1, 1, 0).__getitem__
    c = CellCache(4, 2, 16, 16, 1, layer_reuse=lambda layer: source(layer) if layer > 1 else None)
    assert c.layers[2] is c.layers[1] and c.layers[3] is c.layers[0]
    assert torch.allclose(logits_in_chunks(m, idx, chunks, c), exact(m, idx, source=[0, 1, 1, 0]), atol=1e-4)
    with pytest.raises(ValueError, match='share'):
        CellCache(2, 1, 32, 8, 1, layer_reuse=lambda layer: 1 if layer == 0 else None)


def test_a_layer_without_a_cache_refuses():
    m, idx = deep_model()
    c = CellCache(4, 2, 16, 16, 1, layer_filter=lambda layer: layer != 2)
    with pytest.raises(ValueError, match='layer 2 has no cache'):
        logits_of(m, idx, c, {0: range(13)})
    with pytest.raises(ValueError, match='no layer'):
        CellCache(4, 2, 16, 16, 1, layer_filter=lambda layer: False)


def test_a_forward_pass_brings_slots_and_keys_to_each_layers_device():
    """On a fake device, which refuses tensors of other devices. Results are where the new keys are."""
    with FakeTensorMode():
        c = CellCache(2, 2, 16, 8, 2, unified=False, device=lambda layer: ('cpu', 'cuda')[layer])
        keys, batch = [], c.batch({0: range(3), 1: range(3)})
        for layer in c.place(batch):
            k, v, each, _ = layer.append(torch.zeros(2, 2, 3, 16), torch.zeros(2, 2, 3, 16), None)
            keys.append(each)
            assert k.shape == v.shape == (2, 2, 3, 16)
            assert k.device == v.device == each.pos.device == torch.device('cpu')
        assert keys[0] is keys[1]  # so that attention makes its mask once
        c.take_back(batch)
        assert c.place(batch, 'cuda:0')[0].key_positions.pos.device.type == 'cuda'


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


# several caches for one model

def hybrid(full=16, local=8, n_seq_max=1, n_swa=4, **how):
    """Layers 0 and 2 in a full cache, layers 1 and 3 with a window in a smaller one."""
    shape = dict(n_layer=4, n_head_kv=2, head_dim=16, n_seq_max=n_seq_max) | how
    return HybridCache(CellCache(kv_size=full, layer_filter=lambda layer: layer % 2 == 0, **shape),
                       CellCache(kv_size=local, layer_filter=lambda layer: layer % 2 == 1, n_swa=n_swa, **shape))


def drawn(cache):
    return [str(one) for one in cache.caches], [cells.head for one in cache.caches for cells in one.streams]


@pytest.mark.parametrize('unified', [True, False])
@torch.inference_mode()
def test_layers_with_and_without_a_window_and_a_batch_without_room_in_the_second_cache(unified):
    m, idx = deep_model()
    cache = hybrid(unified=unified)
    before = drawn(cache)
    with pytest.raises(ValueError, match='full: 13 cells'):
        cache.place(cache.batch({0: range(13)}))
    with pytest.raises(NoSlot):
        cache.find_slot(cache.batch({0: range(9)}))
    assert drawn(cache) == before, "neither has changed"
    expected, got = exact(m, idx, windows=[0, 4, 0, 4]), logits_in_chunks(m, idx, [5, 1, 4, 3], cache)
    assert torch.allclose(got, expected, atol=1e-4)
    assert cache.seq_pos_max(0) == 12 and cache.seq_pos_min(0) == cache.caches[1].seq_pos_min(0) > 0


@pytest.mark.parametrize('error', [KeyboardInterrupt, MemoryError])
def test_a_forward_that_fails_after_the_first_cache_gives_its_cells_back(error, monkeypatch):
    cache = hybrid()
    cache.place(cache.batch({0: range(3)}))
    before = [str(one) for one in cache.caches]

    def fails(*args):
        raise error
    with monkeypatch.context() as patched:
        patched.setattr(cache.caches[1], 'layers_for', fails)
        with pytest.raises(error):
            cache.place(cache.batch({0: range(3, 6)}))
    assert [str(one) for one in cache.caches] == before
    cache.place(cache.batch({0: range(3, 6)}))
    assert [one.seq_pos_max(0) for one in cache.caches] == [5, 5]


def test_an_operation_that_one_cache_refuses_changes_none():
    cache = hybrid(n_seq_max=3, can_shift=True)
    cache.place(cache.batch({0: range(4), 1: range(2)}))
    full, local = cache.caches
    local.seq_rm(1)  # so that the two caches differ
    local.place(local.batch({1: [0]}))
    before = drawn(cache)
    with pytest.raises(ValueError, match='already'):
        cache.seq_cp(0, 1, 1)  # sequence 1 has position 1 in the full cache only
    local.seq_cp(0, 2)  # it refuses what would move sequence 2 too, after the full cache has not
    shared = drawn(cache)
    for refused in (lambda: cache.seq_add(0, -1, -1, 1), lambda: cache.seq_div(0, -1, -1, 2),
                    lambda: context_shift(cache, 0), lambda: cache.seq_rm(True), lambda: cache.seq_keep(9)):
        with pytest.raises(ValueError):
            refused()
        assert drawn(cache) == shared
    local.seq_rm(2)
    assert drawn(cache) == before
    assert context_shift(cache, 0) == 2
    cache.seq_keep(0)
    assert [one.seq_pos_max(0) for one in cache.caches] == [1, 1] and cache.seq_pos_max(1) is None
    cache.clear()
    assert cache.seq_pos_min(0) is None and cache.seq_pos_max(0) is None


def test_each_layer_is_in_one_cache():
    def one(**how):
        return CellCache(**(dict(n_layer=2, n_head_kv=1, head_dim=8, kv_size=8, n_seq_max=2) | how))
    for caches in ((), (one(), one()), (one(layer_filter=lambda layer: layer == 0),),
                   *((one(layer_filter=lambda layer: layer == 0), one(layer_filter=lambda layer: layer == 1, **how))
                     for how in (dict(n_seq_max=3), dict(unified=False)))):
        with pytest.raises(ValueError, match='cache'):
            HybridCache(*caches)
