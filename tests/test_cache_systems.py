"""One model on every cache, in every number format: the same tokens, whichever sequences share a step."""
import functools

import pytest
import torch
from conftest import sizes
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.cpu import CPUDecoder
from generation import Work, generate, stream
from kvcache import KINDS, make_cache, paged
from kvcache.placement import Layer
from kvcache.storage import BITS, Rows
from model import GPT, GPTConfig

BLOCK = 24


def model(seed=0, **how):
    torch.manual_seed(seed)
    m = GPT(GPTConfig(**(dict(block_size=BLOCK, vocab_size=29, n_layer=2, n_head=2, n_embd=32) | how))).eval()
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return m


def empty(cache):
    """Does the cache hold nothing?"""
    if cache.lengths:
        return False
    if hasattr(cache, 'blocks'):
        return not cache.tokens and len(cache.blocks.free) == len(cache.blocks.references)
    return all(cells.used() == 0 for cells in cache.cells.streams) if hasattr(cache, 'cells') else True


def feed(cache, seqs, idx):
    """A step of these sequences, from where they end."""
    return cache.step(Work(seqs, [cache.lengths[seq] for seq in seqs], idx))


def begin(cache, idx):
    """(the numbers of new sequences that have the tokens idx (B, T), the logits of their last ones)."""
    seqs = [cache.new() for _ in idx]
    return seqs, feed(cache, seqs, idx)

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7], [28, 27], [0] * 20, list(range(BLOCK)),
           [3, 2, 1]]


def generators():
    return [torch.Generator().manual_seed(100 + i) for i in range(len(PROMPTS))]


@functools.cache
def each_alone(seed, how):
    """The texts of `PROMPTS`, each generated alone and without a cache. how: pairs of arguments of `generate`."""
    return [generate(model(seed), [prompt], 2 * BLOCK, generator=generator, **dict(how))[0]
            for prompt, generator in zip(PROMPTS, generators())]


@pytest.mark.parametrize('how', [{}, dict(when_full='shift'), dict(when_full='shift', keep=5, n_keep=1)])
@pytest.mark.parametrize('compiled', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_eight_sequences_are_those_of_the_uncached_model(kind, compiled, how):
    """Of different lengths, greedy and drawn, over twice the window, some stopping early: each as generated alone."""
    for seed in range(sizes(1, 3)):
        m = model(seed)
        for sampling in (dict(temperature=0), dict(temperature=1.0, top_k=7), dict(temperature=1.0, stop_token=4)):
            cache, how_all = make_cache(m, kind, 8, decoder=CPUDecoder(m) if compiled else None), sampling | how
            got = generate(m, PROMPTS, 2 * BLOCK, use_cache=True, cache=cache, generator=generators(), **how_all)
            assert got == each_alone(seed, tuple(how_all.items()))
            assert empty(cache)


def joining_and_leaving(cache, prompts, n_new):
    """
    Greedy texts. Sequence i joins at step 2 i with its prompt, and leaves after n_new[i] tokens; all share each step.
    """
    texts, seqs, step = [prompt[:] for prompt in prompts], {}, 0
    while seqs or 2 * len(prompts) > step:
        for i in [i for i in seqs if len(texts[i]) == len(prompts[i]) + n_new[i]]:
            cache.free(seqs.pop(i))
        if step % 2 == 0 and step // 2 < len(prompts):
            seqs[step // 2] = cache.new()
        if seqs:
            tokens = [torch.tensor(texts[i][cache.lengths[seq]:]) for i, seq in seqs.items()]
            for i, row in zip(seqs, feed(cache, list(seqs.values()), tokens)):
                texts[i].append(int(row.argmax()))
        step += 1
    return texts

N_NEW = [9, 20, 3, 14, 17, 1, 8, 12]
JOINING = [PROMPTS[3][:5], *(p[:BLOCK - n] for p, n in zip(PROMPTS[1:], N_NEW[1:]))]


@pytest.mark.parametrize('compiled', [False, True])
@pytest.mark.parametrize('kind', KINDS)
@torch.inference_mode()
def test_sequences_join_and_leave_at_different_steps(kind, compiled):
    for seed in range(sizes(1, 3)):
        m = model(seed)
        cache = make_cache(m, kind, 8, decoder=CPUDecoder(m) if compiled else None)
        for prompt, n, got in zip(JOINING, N_NEW, joining_and_leaving(cache, JOINING, N_NEW)):
            assert got == generate(m, [prompt], n, temperature=0)[0]
        assert empty(cache)
    rounded = [joining_and_leaving(make_cache(m, each, 8, bits=8), JOINING, N_NEW) for each in (kind, 'tuple')]
    assert rounded[0] == rounded[1]


@pytest.mark.parametrize('kind', KINDS)
def test_samples_of_one_prompt(kind):
    m = model(1)
    idx = torch.randint(29, (2, 7), generator=torch.Generator().manual_seed(2))
    cache = make_cache(m, kind, n_seq=6)
    got, expected = (generate(m, idx, 30, num_samples=3, generator=torch.Generator().manual_seed(3), **how)
                     for how in (dict(use_cache=True, cache=cache), {}))
    assert torch.equal(got, expected) and empty(cache)


@pytest.mark.parametrize('bits', [8, 4])
def test_all_caches_agree_when_quantised(bits):
    """They store the same numbers, in other rows."""
    m = model(2)
    outputs = [generate(m, PROMPTS, BLOCK, temperature=0, use_cache=True, cache=make_cache(m, kind, 8, bits))
               for kind in KINDS]
    assert all(output == outputs[0] for output in outputs)


@settings(max_examples=sizes(20, 60), deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.sampled_from([0, 8, 4]), st.integers(0, 2**31),
       st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_any_chunks_give_one_pass(kind, bits, seed, chunks):
    """Each of three sequences in chunks of its own: the logits are those of one pass over all tokens."""
    m = model(3)
    idx = torch.randint(29, (3, BLOCK), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        exact = m(idx, idx)[0]
    cache = make_cache(m, kind, 3, bits)
    seqs = [cache.new() for _ in idx]
    for step in range(len(chunks)):
        starts = [cache.lengths[seq] for seq in seqs]
        ends = [min(BLOCK, start + chunks[(step + row) % len(chunks)]) for row, start in enumerate(starts)]
        live = [row for row in range(3) if starts[row] < ends[row]]
        if live:
            logits = feed(cache, [seqs[row] for row in live], [idx[row, starts[row]:ends[row]] for row in live])
            for row, mine in zip(live, logits):
                assert (mine - exact[row, ends[row] - 1]).abs().max() < {0: 1e-5, 8: 0.15, 4: 3}[bits]


@pytest.mark.parametrize('kind', KINDS)
@torch.inference_mode()
def test_a_step_from_an_earlier_position_truncates_first(kind):
    m, idx, other = model(5), torch.randint(29, (2, 9)), torch.randint(29, (2, 4))
    cache = make_cache(m, kind, n_seq=3)
    (a, b), _ = begin(cache, idx)
    fork = cache.fork(b)
    logits = cache.step(Work([a, b], [3, 0], [other[0, :2], other[1]]))
    exact = m(torch.cat([idx[:1, :3], other[:1, :2]], dim=1))[0][0, 0], m(other[1:])[0][0, 0]
    assert torch.allclose(logits, torch.stack(exact), atol=1e-5) and cache.lengths == {a: 5, b: 4, fork: 9}
    with pytest.raises(ValueError, match='cannot start at 9: feed it from 5 on'):
        cache.step(Work([a], [9], other[:1]))
    logits = feed(cache, [fork, a], other[[1, 0], 2:])
    texts = torch.cat([idx[1:], other[1:, 2:]], dim=1), torch.cat([idx[:1, :3], other[:1]], dim=1)
    exact = [m(text)[0][0, 0] for text in texts]
    assert torch.allclose(logits, torch.stack(exact), atol=1e-5)


@pytest.mark.parametrize('kind', KINDS)
def test_a_model_in_training_mode_is_streamed_without_dropout(kind):
    m = model(6, dropout=0.5)
    idx = torch.randint(29, (2, 5))
    exact = generate(m, idx, 20, temperature=0)
    m.train()
    tokens = stream(m, idx, 20, temperature=0, use_cache=True, cache=make_cache(m, kind, 2))
    assert torch.equal(torch.cat([idx, *tokens], dim=1), exact) and m.training
    with pytest.raises(ValueError, match='eval'):
        begin(make_cache(m, kind, 2), idx)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('bits', [0, 8])
def test_half_precision(kind, bits):
    """Logits whose sum is more than float16 holds are numbers all the same."""
    m = model(9, vocab_size=3000)
    with torch.no_grad():
        m.transformer.ln_f.bias.fill_(1.0)
        m.lm_head.weight.sub_(1.0)
    m.half()
    _, logits = begin(make_cache(m, kind, 2, bits), torch.tensor([[1, 2], [3, 4]]))
    exact = m(torch.tensor([[1, 2], [3, 4]]), use_cache=False)[0][:, 0]
    assert torch.isinf(exact.sum()) and (logits - exact).abs().max() < 0.5


@pytest.mark.parametrize('kind', KINDS)
def test_sequences_are_truncated_forked_and_freed(kind):
    m, idx = model(8), torch.randint(29, (2, 10))
    cache = make_cache(m, kind, n_seq=3)
    (a, b), _ = begin(cache, idx)
    cache.truncate(a, 6)
    for refused in (lambda: cache.truncate(a, 7), lambda: cache.truncate(a, -1), lambda: cache.truncate(99, 0),
                    lambda: cache.fork(99), lambda: cache.free(99), lambda: cache.free(None)):
        with pytest.raises(ValueError, match='sequence'):
            refused()
    assert cache.lengths == {a: 6, b: 10}
    c = cache.fork(a)
    cache.truncate(a, 0)
    cache.free(b)
    with pytest.raises(ValueError, match='no sequence'):
        cache.free(b)
    logits = feed(cache, [a, c], [idx[1], idx[0, 6:]])
    assert torch.allclose(logits, m(idx.flip(0))[0][:, 0], atol=1e-5)


def test_bytes():
    assert Rows((2, 8), 2, 32).nbytes() == 16 * 64 * 4
    assert Rows((2, 8), 2, 32, 'float16').nbytes() == 16 * 64 * 2
    assert Rows((2, 8), 2, 32, 'int8').nbytes() == 16 * (64 + 2 * 4)
    assert Rows((2, 8), 2, 32, 'int4').nbytes() == 16 * (32 + 2 * 4)
    assert Rows((2, 8), 2, 24, 'int8').nbytes() == 16 * (48 + 6 * 4)  # narrow heads have smaller groups
    assert Layer((2, 8), 2, 32, 'float32', 'int8').nbytes() == 16 * (64 * 4 + 64 + 2 * 4)
    for refused in (lambda: Rows((2, 8), 4, 36, 'int8'), lambda: Rows((2, 8), 2, 32, 'float8')):
        with pytest.raises(ValueError):
            refused()


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('kind', KINDS)
def test_the_models_dtype_is_kept(kind, dtype):
    m, idx = model(10).to(dtype), torch.randint(29, (2, 12))
    cache = make_cache(m, kind, 2)
    seqs, logits = begin(cache, idx[:, :9])
    for t in range(9, 12):
        logits = feed(cache, seqs, idx[:, t:t + 1])
    assert logits.dtype is dtype
    assert all(stored.dtype is dtype for layer in cache.layers for stored in layer.tensors())
    with torch.no_grad():
        exact = m(idx, use_cache=False)[0][:, 0]
    assert (logits - exact).abs().max() < {torch.float64: 1e-12, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    with pytest.raises(ValueError, match='make a new cache'):
        m.float()
        feed(cache, seqs, idx[:, :1])


def test_a_dtype_that_cannot_be_kept_is_refused(monkeypatch):
    monkeypatch.delitem(BITS, 'bfloat16')
    with pytest.raises(ValueError, match='the model is bfloat16'):
        make_cache(model(0).to(torch.bfloat16), 'tuple', 2)


@pytest.mark.parametrize('bits', [0, 8])
@pytest.mark.parametrize('kind', KINDS)
def test_a_model_made_in_inference_mode(kind, bits):
    with torch.inference_mode():
        made = model(11)
    assert all(p.is_inference() for p in made.parameters())
    policies = dict(), dict(when_full='shift')
    expected = [generate(model(11), PROMPTS[:4], 20, temperature=0, use_cache=True,
                         cache=make_cache(model(11), kind, 4, bits), **how) for how in policies]
    cache = make_cache(made, kind, 4, bits)
    for _ in range(2):
        assert expected == [generate(made, PROMPTS[:4], 20, temperature=0, use_cache=True, cache=cache, **how)
                            for how in policies]
    assert expected[0] == generate(made, PROMPTS[:4], 20, temperature=0) or bits


def test_the_weights_are_read_once_for_a_prefill_and_not_in_a_step(monkeypatch):
    m, read = model(0), []
    monkeypatch.setattr(paged.Watch, 'hashed', lambda watch: read.append(1))
    generate(m, torch.randint(29, (3, 5)), 10, use_cache=True, cache=make_cache(m, 'paged', 3))
    assert len(read) == 1
