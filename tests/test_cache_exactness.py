"""Any split of a sequence into chunks gives the logits of one uncached pass, at every position."""
import plain_gpt
import torch
from conftest import sizes
from example_models import large
from hypothesis import given, settings
from hypothesis import strategies as st


def in_chunks(model, idx, chunks):
    """Logits at every position, (B, T, vocab_size), fed chunk by chunk to one cache."""
    kv_cache, logits, start = None, [], 0
    with torch.no_grad():
        for n in chunks:
            kv_cache = kv_cache or model.empty_cache(len(idx))
            x, kv_cache = model.hidden_states(idx[:, start:start + n], torch.arange(start, start + n), kv_cache)
            logits.append(model.lm_head(x))
            start += n
    assert all(c.cache_pos == start for c in kv_cache)
    return torch.cat(logits, dim=1)


@settings(max_examples=sizes(50, 200), deadline=None, derandomize=True)
@given(st.data())
def test_any_chunking_equals_one_uncached_pass_in_float64(data):
    T = data.draw(st.integers(1, 16))
    cuts = data.draw(st.sets(st.integers(1, T - 1)) if T > 1 else st.just(set()))
    edges = [0, *sorted(cuts), T]
    chunks = [b - a for a, b in zip(edges, edges[1:])]
    seed, B = data.draw(st.integers(0, 10 ** 6)), data.draw(st.integers(1, 3))
    n_head, bias = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.booleans())
    model = large(seed, n_head=n_head, bias=bias, n_layer=data.draw(st.integers(1, 3)))
    idx = torch.randint(29, (B, T))
    chunked = in_chunks(model, idx, chunks)
    with torch.no_grad():
        uncached = model(idx, idx)[0]
        plain = plain_gpt.logits(model.state_dict(), n_head, idx)
    assert (chunked - uncached).abs().max() < 1e-10
    assert (chunked - plain).abs().max() < 1e-10
