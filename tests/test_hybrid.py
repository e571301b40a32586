"""Two caches for one model: every batch and every operation changes both or neither."""
import pytest
import torch
from conftest import sizes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_cache_layers import Recorder, deep_model, logits_in_chunks

from kvcache.llamacpp.cache import CellCache
from kvcache.llamacpp.cells import context_shift
from kvcache.llamacpp.hybrid import HybridCache


def hybrid(full=16, local=8, n_seq_max=1, n_swa=4, **how):
    """Layers 0 and 2 in a full cache, layers 1 and 3 behind a window in a smaller one."""
    sizes = dict(n_layer=4, n_head_kv=2, head_dim=16, n_seq_max=n_seq_max) | how
    window = dict(n_swa=n_swa, swa_type='standard')
    return HybridCache(CellCache(kv_size=full, layer_filter=lambda layer: layer % 2 == 0, **sizes),
                       CellCache(kv_size=local, layer_filter=lambda layer: layer % 2 == 1, **sizes, **window))


def drawn(cache):
    return [str(one) for one in cache.caches], [cells.head for one in cache.caches for cells in one.streams]


@torch.inference_mode()
def test_logits_are_those_of_layers_with_and_without_a_window():
    m, idx = deep_model()
    exact = logits_in_chunks(m, idx, [13], Recorder(4, window=lambda layer: 4 if layer % 2 else None))
    for unified in (True, False):
        cache = hybrid(unified=unified)
        got = logits_in_chunks(m, idx, [5, 1, 4, 3], cache)
        assert torch.allclose(got, exact, atol=1e-4)
    assert cache.memory_breakdown() == {'cpu': 2 * 2 * (16 + 8) * 32 * 4}
    assert cache.seq_pos_max(0) == 12 and cache.seq_pos_min(0) == cache.caches[1].seq_pos_min(0) > 0


@torch.inference_mode()
def test_a_batch_without_room_in_the_second_cache_changes_neither():
    m, idx = deep_model()
    cache = hybrid()
    before = drawn(cache)
    with pytest.raises(ValueError, match='full: 13 cells'):
        cache.place(cache.batch({0: range(13)}))
    assert not cache.find_slot(cache.batch({0: range(9)})) and not cache.prepare([cache.batch({0: range(9)})])
    assert drawn(cache) == before
    exact = logits_in_chunks(m, idx, [13], Recorder(4, window=lambda layer: 4 if layer % 2 else None))
    got = logits_in_chunks(m, idx, [8, 4, 1], cache)  # the retry
    assert torch.allclose(got, exact, atol=1e-4)


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
    full.seq_cp(0, 2)
    local.seq_cp(0, 2)
    local.seq_rm(2)
    shared = drawn(cache)
    for refused in (lambda: cache.seq_add(0, -1, -1, 1), lambda: cache.seq_div(0, -1, -1, 2),
                    lambda: context_shift(cache, 0), lambda: cache.seq_rm(True), lambda: cache.seq_keep(9)):
        with pytest.raises(ValueError):
            refused()
        assert drawn(cache) == shared
    full.seq_rm(2)
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


class HybridMachine(RuleBasedStateMachine):
    """Random operations: both caches have the same last positions, and refused operations change nothing."""
    unified = True
    seqs = st.integers(0, 2)

    def __init__(self):
        super().__init__()
        self.cache = hybrid(full=12, local=9, n_seq_max=3, n_swa=3, unified=self.unified, can_shift=True)

    def attempt(self, operation):
        before = drawn(self.cache)
        try:
            operation()
        except ValueError:
            assert drawn(self.cache) == before

    @rule(seq=seqs, n=st.integers(1, 6))
    def append(self, seq, n):
        last = self.cache.seq_pos_max(seq)
        start = 0 if last is None else last + 1
        self.attempt(lambda: self.cache.place(self.cache.batch({seq: range(start, start + n)})))

    @rule(seq=st.none() | seqs)
    def rm(self, seq):
        self.attempt(lambda: self.cache.seq_rm(seq))

    @rule(source=seqs, to=seqs)
    def cp(self, source, to):
        self.attempt(lambda: self.cache.seq_cp(source, to))

    @rule(seq=seqs, shift=st.integers(0, 3))
    def add(self, seq, shift):
        self.attempt(lambda: self.cache.seq_add(seq, -1, -1, shift))

    @rule(seq=seqs)
    def keep(self, seq):
        self.attempt(lambda: self.cache.seq_keep(seq))

    @invariant()
    def both_end_at_the_same_position(self):
        full, local = self.cache.caches
        for seq in range(3):
            assert full.seq_pos_max(seq) == local.seq_pos_max(seq) == self.cache.seq_pos_max(seq)
            if (last := full.seq_pos_max(seq)) is not None and full.seq_pos_min(seq) == 0:
                assert local.seq_pos_min(seq) <= max(0, last - 1)  # the next token sees it through the window of 3


class HybridStreamsMachine(HybridMachine):
    unified = False


TestMachine, TestStreamsMachine = HybridMachine.TestCase, HybridStreamsMachine.TestCase
for test in (TestMachine, TestStreamsMachine):
    test.settings = settings(max_examples=sizes(8, 25), stateful_step_count=30, deadline=None)
del test  # or it would be collected as one more
