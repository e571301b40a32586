"""The memory that a token needs depends on the cells in use, not on the size of the cache. In bytes, not seconds."""
import tracemalloc

import numpy as np
import pytest
import torch
from test_cells import cache, put, store

from kvcache import make_cache
from kvcache.llamacpp.cache import CellCache
from kvcache.llamacpp.cells import Cells, Streams
from model import GPT, GPTConfig
from positions import Keys, Positions

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
    assert len(streams.streams) == 256 and size < 64 * MB  # a column for each sequence in each stream would be 268 MB
    store(streams, {seq: range(2) for seq in range(256)})
    streams.seq_cp(7, 200)
    streams.seq_keep(200)
    assert [streams.seq_pos_max(seq) for seq in (7, 200)] == [None, 1]


@pytest.mark.parametrize('n_seq_max, unified', [(1, True), (256, True), (4, False)])
def test_a_token_does_not_look_at_cells_that_are_not_in_use(n_seq_max, unified):
    c = CellCache(1, 1, 8, 131_072, n_seq_max, unified, can_shift=True)
    c.place(c.batch({0: range(10)}))
    _, size = peak(lambda: c.place(c.batch({0: [10]})))
    assert size < 40_000  # one bit for each cell would be 16,384, one number 1,048,576
    _, size = peak(lambda: (c.seq_rm(0, 10), c.seq_add(0, 5, -1, -1), c.seq_pos_min(0), c.find_slot(c.batch({0: [9]}))))
    assert size < 40_000


@pytest.mark.parametrize('kind', ['unified', 'streams'])
def test_a_decode_step_of_sequences_does_not_look_at_the_cache(kind, monkeypatch):
    """Nor does it look for cells, but for once in 64 tokens."""
    m, searches = GPT(GPTConfig(block_size=32_768, vocab_size=7, n_layer=1, n_head=1, n_embd=8, position='alibi')), []
    c, ids = make_cache(m.eval(), kind, 4), torch.zeros(2, 1, dtype=torch.long)
    handles = [c.new(), c.new()]
    find = Cells.find
    monkeypatch.setattr(Cells, 'find', lambda *args: searches.append(1) or find(*args))
    for position in range(130):
        _, size = peak(lambda position=position: c.step(handles, [position] * 2, ids))
        assert position == 0 or size < 100_000  # one number for each cell would be 262,144 at least
    assert len(searches) == 2 * 3


@pytest.mark.parametrize('window', [None, 'standard', 'chunked'])
def test_the_mask_of_a_long_prompt_stays_bool(window):
    """2,048 tokens at position 30,000: one byte for each token and key, and what a comparison needs."""
    c = CellCache(1, 1, 8, 32_048, 2, n_swa=0 if window is None else 31_000, swa_type=window or 'none')
    for positions in (range(30_000), range(30_000, 32_048)):
        batch, slots = store(c, {0: positions})
    mask, size = peak(lambda: c.kq_mask(batch))
    assert mask.shape == (1, 1, 2048, 32_048) and mask.dtype == torch.bool and size < 2.5 * mask.numel()
    first = {None: 0, 'standard': 32_047 - 30_999, 'chunked': 31_000}[window]
    assert np.array_equal(np.flatnonzero(mask[0, 0, -1]), np.arange(first, 32_048))
    keys = c.layers_for(batch, slots, torch.device('cpu'))[0].keys
    made = Positions(GPTConfig(), torch.from_numpy(batch.positions), torch.float32).mask(keys, 32_048)
    assert made.dtype == torch.bool and torch.equal(made, mask)


def test_a_short_mask_is_added_and_made_once():
    positions, keys = Positions(GPTConfig(), torch.arange(3).repeat(2, 1), torch.float32), Keys(torch.arange(5))
    added = positions.mask(keys, 5)
    assert added.dtype == torch.float32 and torch.equal(added == 0, torch.ones(2, 1, 3, 5, dtype=torch.bool).tril())
    assert positions.mask(keys, 5) is added


@pytest.mark.parametrize('default', ['float64', 'bfloat16', 'meta'])
def test_torchs_defaults_change_nothing(default):
    """A cache made and used under another default dtype or device holds the same numbers, in the same dtype."""
    def made():
        c = cache(type_k='int8', type_v='float16', can_shift=True)
        put(c, {0: range(5)})
        c.seq_add(0, -1, -1, 2)
        return c.get_k(1, 5), c.get_v(1, 5), *c.layers[1].tensors()
    before, dtype = made(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype if default == 'meta' else getattr(torch, default))
        with torch.device('meta' if default == 'meta' else 'cpu'):
            after = made()
    finally:
        torch.set_default_dtype(dtype)
    assert [(x.dtype, x.device) for x in before] == [(x.dtype, x.device) for x in after]
    assert all(map(torch.equal, before, after))
