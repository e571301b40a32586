"""
Dropping the oldest keys from a full cache is not the same as computing the shorter window anew, whatever the position
encoding, as soon as there are two layers. It is attention under a banded mask. KV_CACHE.md tells the story; this is the
measurement (pytest -s prints it).
"""
import pytest
import torch
from example_models import large
from plain_gpt import plain

WINDOW, T = 8, 20


@pytest.mark.parametrize('position', ['none', 'rope', 'alibi'])
@torch.no_grad()
def test_a_sliding_cache_is_a_banded_mask_and_not_recomputation(position):
    idx = torch.randint(29, (1, T), generator=torch.Generator().manual_seed(0))
    for n_layer in (1, 2, 4):
        model, kv_cache = large(0, position=position, n_layer=n_layer), None
        sliding = model.with_window(WINDOW)
        for t in range(T):
            slid, _, kv_cache = sliding(idx[:, t:t + 1], kv_cache=kv_cache)
        anew, banded = plain(model, idx[:, -WINDOW:])[:, -1:], plain(sliding, idx)[:, -1:]
        to_anew, to_banded = (slid - anew).abs().max().item(), (slid - banded).abs().max().item()
        print(f"\n{position:>6}, {n_layer} layers: sliding cache - window anew {to_anew:.1e}, "
              f"sliding cache - banded mask {to_banded:.1e}", end='')
        assert to_banded < 1e-12
        assert to_anew < 1e-12 if n_layer == 1 else to_anew > 1e-2
