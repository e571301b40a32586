"""
What the graph decoder records, and when it records anew. Here a replay runs the step again; for CUDA see test_cuda.py.
"""
import pytest
import torch
from test_cache_exactness import large

from decode import graphs
from decode.graphs import GraphDecoder


class StepAgain:
    """In the place of a CUDA graph: a replay runs the recorded step again, on the recorded inputs."""

    def __init__(self, step, pool):
        self.step, self.out = step, step()

    def replay(self):
        self.out.copy_(self.step())

    def __iter__(self):  # (graph, out), as `graphs.captured` returns them
        return iter((self, self.out))


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch):
    monkeypatch.setattr(graphs, 'captured', StepAgain)


@torch.no_grad()
@pytest.mark.parametrize('change, anew', [
    (lambda m: m.lm_head.weight.mul_(2), False),
    (lambda m: setattr(m.lm_head.weight, 'data', 3 * m.lm_head.weight.data), True)])
def test_new_graphs_are_recorded_when_a_weight_is_at_another_address(change, anew):
    """At the start of a sequence; that the new weights are used: see test_decoder_changes.py."""
    model = large(0)
    decoder, text = GraphDecoder(model), torch.randint(29, (2, 5))
    _, cache = decoder(text[:, :4], None)
    for changed in (False, True):
        if changed:
            change(model)
        decoder(text[:, :4], None)
        before = dict(decoder.recordings)
        decoder(text[:, 4:], cache)
        assert (decoder.recordings == before != {}) == (changed and not anew)


@torch.no_grad()
def test_one_graph_for_each_cache_batch_and_number_of_slots(monkeypatch):
    monkeypatch.setattr(graphs, 'FEWEST_SLOTS', 4)
    model = large(1, block_size=20)
    decoder, texts = GraphDecoder(model), [torch.randint(29, (B, 20)) for B in (1, 2, 2)]
    caches = [model(text[:, :1])[2] for text in texts]
    for t in range(1, 20):
        for i, text in enumerate(texts):
            got, caches[i] = decoder(text[:, t:t + 1], caches[i])
            torch.testing.assert_close(got, model(text[:, :t + 1], use_cache=False)[0], atol=1e-10, rtol=1e-10)
    found = [n_slots for _, n_slots, _ in decoder.recordings]
    assert sorted(found) == sorted([4, 8, 16, 20] * 3)
    first_row = [type(layer)(layer.k_cache[:1], layer.v_cache[:1], 5) for layer in caches[1]]
    got, _ = decoder(texts[1][:1, 5:6], first_row)  # the same addresses, another batch size
    torch.testing.assert_close(got, model(texts[1][:1, :6], use_cache=False)[0], atol=1e-10, rtol=1e-10)
    monkeypatch.setattr(graphs, 'MOST', 5)
    for _ in range(10):
        decoder(texts[0][:, :1], [layer.clone()._replace(cache_pos=0) for layer in caches[0]])
    assert len(decoder.recordings) == 5
