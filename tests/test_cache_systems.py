"""One model on every cache system, in every encoding: the same tokens, joined and left at any step."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import SYSTEMS, CacheDecoder, paged
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


def empty(decoder, kind):
    """Is nothing held any more?"""
    system = decoder.system
    system.collect()
    if system.length:
        return False
    if kind == 'paged':
        return not system.pool.tokens and len(system.pool.blocks.free) == len(system.pool.blocks.references)
    return kind == 'tuple' or all(cells.used() == 0 for cells in system.cache.streams)


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7], [28, 27], [0] * 20, list(range(BLOCK)), [3, 2, 1]]


@pytest.mark.parametrize('how', [{}, dict(when_full='shift'), dict(when_full='shift', keep=5, n_keep=1)])
@pytest.mark.parametrize('kind', SYSTEMS)
def test_eight_sequences_are_those_of_the_uncached_model(kind, how):
    """Of different lengths, greedy and drawn, over twice the window, some stopping early: each as generated alone without a cache."""
    for seed in range(3):
        m = model(seed)
        for settings_ in (dict(temperature=0), dict(temperature=1.0, top_k=7), dict(temperature=1.0, stop_token=4)):
            decoder = CacheDecoder(m, kind, n_seq=8)
            seeds = range(100, 108)
            got = m.generate(PROMPTS, 2 * BLOCK, use_cache=True, decoder=decoder,
                             generator=[torch.Generator().manual_seed(s) for s in seeds], **settings_, **how)
            for prompt, s, tokens in zip(PROMPTS, seeds, got):
                assert tokens == m.generate([prompt], 2 * BLOCK, generator=torch.Generator().manual_seed(s), **settings_, **how)[0]
            assert empty(decoder, kind)


def joining_and_leaving(m, system, prompts, n_new):
    """
    Greedy tokens of each prompt. Sequence i joins at step 2 i and leaves after n_new[i] tokens; all that are there take each step
    together, and a new one's prompt is run by itself.
    """
    running, done, step = {}, {}, 0
    logits = {}  # of each running sequence's last token
    while len(done) < len(prompts):
        for i in [i for i in running if len(running[i][1]) == n_new[i]]:
            seq, done[i] = running.pop(i)
            del logits[i]
            system.free(seq)
        old = list(running)
        for i in old:
            running[i][1].append(int(logits[i].argmax()))
        if old:
            logits = dict(zip(old, system.step(m, [running[i][0] for i in old], torch.tensor([running[i][1][-1:] for i in old]))))
        for i in [i for i in range(len(prompts)) if 2 * i == step]:
            running[i] = (system.new(), [])
            logits[i] = system.step(m, [running[i][0]], torch.tensor([prompts[i]]))[0]
        step += 1
    return [done[i] for i in range(len(prompts))]


def joining_and_leaving_mixed(m, pool, prompts, n_new):
    """The same on pages, a new one's prompt in the same forward pass as the others' tokens."""
    running, done, step, logits = {}, {}, 0, {}
    while len(done) < len(prompts):
        for i in [i for i in running if len(running[i]) == n_new[i]]:
            done[i] = running.pop(i)
            pool.remove(i)
        for i in running:
            running[i].append(int(logits[i].argmax()))
            pool.extend(i, running[i][-1:])
        for i in [i for i in range(len(prompts)) if 2 * i == step]:
            running[i] = []
            pool.add(m, i, prompts[i])
        logits = dict(zip(running, pool.run(m, list(running)))) if running else {}
        step += 1
    return [done[i] for i in range(len(prompts))]


N_NEW = [9, 20, 3, 14, 17, 1, 8, 12]
JOINING = [PROMPTS[3][:5], *(p[:BLOCK - n] for p, n in zip(PROMPTS[1:], N_NEW[1:]))]


@pytest.mark.parametrize('kind', [*SYSTEMS, 'mixed'])
@torch.inference_mode()
def test_sequences_join_and_leave_at_different_steps(kind):
    system = 'paged' if kind == 'mixed' else kind

    def run(m, bits):
        decoder = CacheDecoder(m, system, 8, bits)
        tokens = (joining_and_leaving_mixed(m, decoder.system.pool, JOINING, N_NEW) if kind == 'mixed' else
                  joining_and_leaving(m, decoder.system, JOINING, N_NEW))
        assert empty(decoder, system)
        return tokens
    for seed in range(3):
        m = model(seed)
        for prompt, n, got in zip(JOINING, N_NEW, run(m, 0)):
            assert got == m.generate([prompt], n, temperature=0)[0][len(prompt):]
    assert run(m, 8) == joining_and_leaving(m, CacheDecoder(m, 'tuple', 8, bits=8).system, JOINING, N_NEW)


@pytest.mark.parametrize('kind', SYSTEMS)
def test_samples_of_one_prompt(kind):
    m = model(1)
    idx = torch.randint(29, (2, 7), generator=torch.Generator().manual_seed(2))
    decoder = CacheDecoder(m, kind, n_seq=6)
    got = m.generate(idx, 30, use_cache=True, decoder=decoder, num_samples=3, generator=torch.Generator().manual_seed(3))
    assert torch.equal(got, m.generate(idx, 30, num_samples=3, generator=torch.Generator().manual_seed(3)))
    assert empty(decoder, kind)


@pytest.mark.parametrize('bits', [8, 4])
def test_all_systems_agree_when_quantised(bits):
    """What is kept is the same numbers, whatever row they are in; so are the tokens."""
    m = model(2)
    outputs = [m.generate(PROMPTS, BLOCK, temperature=0, use_cache=True, decoder=CacheDecoder(m, kind, 8, bits)) for kind in SYSTEMS]
    assert all(output == outputs[0] for output in outputs)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SYSTEMS)), st.sampled_from([0, 8, 4]), st.integers(0, 2**31), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_any_chunks_give_one_pass(kind, bits, seed, chunks):
    m = model(3)
    T = min(sum(chunks), BLOCK)
    idx = torch.randint(29, (3, T), generator=torch.Generator().manual_seed(seed))
    decoder, cache, start = CacheDecoder(m, kind, 3, bits), None, 0
    for n in chunks:
        if start + n > T:
            break
        logits, cache = decoder(idx[:, start:start + n], cache)
        start += n
    with torch.inference_mode():
        exact = m(idx[:, :start])[0]
    assert (logits - exact).abs().max() < {0: 1e-5, 8: 0.15, 4: 3}[bits]


@pytest.mark.parametrize('kind', SYSTEMS)
def test_what_does_not_fit_is_an_error_and_the_rest_goes_on(kind):
    m = model(0)
    decoder = CacheDecoder(m, kind, n_seq=2)
    _, cache = decoder(torch.randint(29, (2, 5)), None)
    with pytest.raises(ValueError):
        decoder(torch.randint(29, (2, BLOCK)), cache)
    with pytest.raises(ValueError):
        decoder(torch.randint(29, (3, BLOCK)), None)
    _, cache = decoder(torch.randint(29, (2, BLOCK - 5)), cache)
    del cache
    assert empty(decoder, kind)
    with pytest.raises(ValueError):
        CacheDecoder(m, 'pages', 2)
    with pytest.raises(ValueError):
        CacheDecoder(m, kind, 2, bits=3)


@pytest.mark.parametrize('kind', SYSTEMS)
@torch.inference_mode()
def test_a_step_that_fails_is_as_if_it_had_not_been_asked(kind):
    m, idx = model(4), torch.randint(29, (2, 9))
    decoder = CacheDecoder(m, kind, n_seq=2)
    _, cache = decoder(idx, None)
    other = CacheDecoder(m, kind, n_seq=2)
    for wrong in ([[3], [99]], [[3], [-1]], [[3], [4], [5]], [[3]], [3, 4]):
        with pytest.raises(ValueError):
            decoder(torch.tensor(wrong), cache)
    for refused in (lambda: decoder(idx[:, :0], cache), lambda: other(idx, cache), lambda: decoder(idx, m(idx[:, :1])[2]),
                    lambda: CacheDecoder(m, kind, 0), lambda: CacheDecoder(m, kind, 1.5), lambda: CacheDecoder(m, kind, 2, bits=[])):
        with pytest.raises(ValueError):
            refused()
    broken = m.transformer.h[1].register_forward_hook(lambda *_: 1 / 0)
    for failing in (cache, None):
        with pytest.raises(ValueError if kind != 'paged' and failing is None else ZeroDivisionError):
            decoder(torch.tensor([[3], [9]]), failing)
    broken.remove()
    logits, _ = decoder(torch.tensor([[7], [8]]), cache)
    exact = m(torch.cat([idx, torch.tensor([[7], [8]])], dim=1))[0]
    assert torch.allclose(logits, exact, atol=1e-5)


@pytest.mark.parametrize('kind', SYSTEMS)
@torch.inference_mode()
def test_an_older_cache_is_gone_on_from_where_it_was(kind):
    m, idx, other = model(5), torch.randint(29, (2, 9)), torch.randint(29, (2, 4))
    decoder = CacheDecoder(m, kind, n_seq=2)
    _, first = decoder(idx[:, :3], None)
    _, second = decoder(idx[:, 3:], first)
    logits, third = decoder(other[:, :2], first)
    assert torch.allclose(logits, m(torch.cat([idx[:, :3], other[:, :2]], dim=1))[0], atol=1e-5)
    with pytest.raises(ValueError, match='cut since'):  # of what second was there is no more
        decoder(other[:, :1], second)
    logits, _ = decoder(other[:, 2:], third)
    assert torch.allclose(logits, m(torch.cat([idx[:, :3], other], dim=1))[0], atol=1e-5)


@pytest.mark.parametrize('kind', SYSTEMS)
def test_a_model_in_training_mode_is_streamed_without_dropout(kind):
    m = model(6, dropout=0.5)
    idx = torch.randint(29, (2, 5))
    exact = m.generate(idx, 20, temperature=0)
    m.train()
    tokens = m.stream(idx, 20, temperature=0, use_cache=True, decoder=CacheDecoder(m, kind, 2))
    assert torch.equal(torch.cat([idx, *tokens], dim=1), exact) and m.training


@pytest.mark.parametrize('bits', [0, 8, 4])
@pytest.mark.parametrize('kind', SYSTEMS)
def test_broken_weights_do_not_stay_in_the_cache(kind, bits):
    m = model(7)
    good, decoder = {name: p.clone() for name, p in m.state_dict().items()}, CacheDecoder(m, kind, 2, bits)
    with torch.no_grad():
        m.transformer.h[0].attn.c_attn.weight.fill_(float('nan'))
    with pytest.raises(ValueError, match='not numbers'):
        m.generate(torch.randint(29, (2, BLOCK - 1)), 5, use_cache=True, decoder=decoder)
    assert empty(decoder, kind)
    m.load_state_dict(good)
    again, fresh = (m.generate(PROMPTS[:2], 20, temperature=0, use_cache=True, decoder=d) for d in (decoder, CacheDecoder(m, kind, 2, bits)))
    assert again == fresh


@pytest.mark.parametrize('kind', SYSTEMS)
@pytest.mark.parametrize('bits', [0, 8])
def test_half_precision(kind, bits):
    """Logits whose sum is more than float16 holds are numbers all the same."""
    m = model(9, vocab_size=3000)
    with torch.no_grad():
        m.transformer.ln_f.bias.fill_(1.0)
        m.lm_head.weight.sub_(1.0)
    m.half()
    logits, _ = CacheDecoder(m, kind, 2, bits)(torch.tensor([[1, 2], [3, 4]]), None)
    exact = m(torch.tensor([[1, 2], [3, 4]]), use_cache=False)[0]
    assert torch.isinf(exact.sum()) and (logits - exact).abs().max() < 0.5


@pytest.mark.parametrize('kind', SYSTEMS)
def test_rows_that_cannot_be_rewound_are_all_left_alone(kind):
    m = model(8)
    decoder = CacheDecoder(m, kind, n_seq=2)
    _, cache = decoder(torch.randint(29, (2, 10)), None)
    cache[0].at(torch.tensor([10, 6]))
    with pytest.raises(ValueError, match='cut since'):
        cache[0].at(8)
    assert sorted(decoder.system.length.values()) == [6, 10]
    with pytest.raises(KeyError):
        decoder.system.fork(99)
    assert len(decoder.system.length) == 2


def test_bytes():
    assert Rows((2, 8), 64).nbytes() == 16 * 64 * 4
    assert Rows((2, 8), 64, 'float16').nbytes() == 16 * 64 * 2
    assert Rows((2, 8), 64, 'int8').nbytes() == 16 * (64 + 2 * 4)
    assert Rows((2, 8), 64, 'int4').nbytes() == 16 * (32 + 2 * 4)
    assert Rows((2, 8), 24, 'int8').nbytes() == 16 * (24 + 3 * 4)  # narrow rows have smaller groups
    assert Layer((2, 8), 2, 32, 'float32', 'int8').nbytes() == 16 * (64 * 4 + 64 + 2 * 4)
    for refused in (lambda: Rows((2, 8), 36, 'int8'), lambda: Rows((2, 8), 64, 'float8')):
        with pytest.raises(ValueError):
            refused()


def with_huge_keys(m):
    """
    Weights whose keys are finite but so large that a query of the good weights makes an infinite score of them; the
    logits are numbers.
    """
    bias = m.transformer.h[0].attn.c_attn.bias
    with torch.no_grad():
        m.transformer.h[0].attn.c_attn.weight[:32] *= 1e-30
        bias[:32] = 0
        bias[32:34], bias[48:50] = 1e38, 1e38  # two channels of the keys of each head


def good_for_huge_keys(seed):
    m = model(seed)
    with torch.no_grad():
        m.transformer.h[0].attn.c_attn.bias[[0, 1, 16, 17]] = 30.0
    return m


@pytest.mark.parametrize('alive', [False, True])
@pytest.mark.parametrize('failing', [False, True])
@pytest.mark.parametrize('kind', SYSTEMS)
def test_huge_keys_of_weights_that_were_repaired_are_in_nobodys_way(kind, failing, alive):
    """Written by a step that failed or by one that did not, of sequences that are gone or still there."""
    m = good_for_huge_keys(3)
    good = {name: p.clone() for name, p in m.state_dict().items()}
    decoder = CacheDecoder(m, kind, 4)
    with_huge_keys(m)
    idx = torch.randint(29, (2, BLOCK - 2), generator=torch.Generator().manual_seed(0))
    logits, kept = decoder(idx, None)
    assert logits.isfinite().all()
    if failing:
        with torch.no_grad():
            m.transformer.h[1].mlp.c_proj.bias.fill_(float('inf'))
        with pytest.raises(ValueError, match='not numbers'):
            decoder(idx[:, :1], kept)
    m.load_state_dict(good)
    if not alive:
        del kept
    for prompts in ([[1, 2, 3], [4]], [[5]], PROMPTS[2:4], [[1, 2, 3], [4]]):
        for how in (dict(), dict(when_full='shift')):
            expected = m.generate(prompts, BLOCK + 4, temperature=0, **how)
            assert m.generate(prompts, BLOCK + 4, temperature=0, use_cache=True, decoder=decoder, **how) == expected


@pytest.mark.parametrize('bits', [0, 8])
@pytest.mark.parametrize('kind', SYSTEMS)
def test_a_cache_that_broken_weights_spoilt_is_wiped_when_it_is_empty(kind, bits):
    """So that later generations need each forward pass once again."""
    m = good_for_huge_keys(3)
    good, decoder, passes = {name: p.clone() for name, p in m.state_dict().items()}, CacheDecoder(m, kind, 4, bits), []
    with_huge_keys(m)
    decoder(torch.randint(29, (3, BLOCK)), None)
    m.load_state_dict(good)
    m.generate([[1, 2, 3], [4], [5]], 5, temperature=0, use_cache=True, decoder=decoder)
    m.register_forward_pre_hook(lambda *_: passes.append(1))
    m.transformer.ln_f.register_forward_hook(lambda *_: passes.append(1))
    again, fresh = (m.generate([[1, 2, 3], [4], [5]], 5, temperature=0, use_cache=True, decoder=d)
                    for d in (decoder, CacheDecoder(m, kind, 4, bits)))
    assert again == fresh and len(passes) == 2 * (1 + 5)  # filling all but the last tokens, and five steps


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('kind', SYSTEMS)
def test_the_models_dtype_is_kept(kind, dtype):
    m, idx = model(10).to(dtype), torch.randint(29, (2, 12))
    if str(dtype).removeprefix('torch.') not in BITS:
        with pytest.raises(ValueError, match='float64'):
            CacheDecoder(m, kind, 2)
        return
    decoder = CacheDecoder(m, kind, 2)
    logits, cache = decoder(idx[:, :9], None)
    for t in range(9, 12):
        logits, cache = decoder(idx[:, t:t + 1], cache)
    layers = decoder.system.layers or decoder.system.pool.layers
    assert logits.dtype is dtype and all(stored.dtype is dtype for layer in layers for stored in layer.tensors())
    with torch.no_grad():
        exact = m(idx, use_cache=False)[0]
    assert (logits - exact).abs().max() < {torch.float64: 1e-12, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    with pytest.raises(ValueError, match='make a new decoder'):
        m.float()
        decoder(idx[:, :1], cache)


def test_a_dtype_that_cannot_be_kept_is_refused(monkeypatch):
    monkeypatch.delitem(BITS, 'bfloat16')
    with pytest.raises(ValueError, match='the model is bfloat16'):
        CacheDecoder(model(0).to(torch.bfloat16), 'tuple', 2)


@pytest.mark.parametrize('bits', [0, 8])
@pytest.mark.parametrize('kind', SYSTEMS)
def test_a_model_made_in_inference_mode(kind, bits):
    with torch.inference_mode():
        made = model(11)
    assert all(p.is_inference() for p in made.parameters())
    expected = [model(11).generate(PROMPTS[:4], 20, temperature=0, use_cache=True, decoder=CacheDecoder(model(11), kind, 4, bits), **how)
                for how in (dict(), dict(when_full='shift'))]
    decoder = CacheDecoder(made, kind, 4, bits)
    for _ in range(2):
        assert expected == [made.generate(PROMPTS[:4], 20, temperature=0, use_cache=True, decoder=decoder, **how)
                            for how in (dict(), dict(when_full='shift'))]
    assert expected[0] == made.generate(PROMPTS[:4], 20, temperature=0) or bits


def test_the_weights_are_read_once_for_a_prefill_and_not_in_a_step(monkeypatch):
    m, read = model(0), []
    monkeypatch.setattr(paged.Watch, 'hashed', lambda watch: read.append(1))
    m.generate(torch.randint(29, (3, 5)), 10, use_cache=True, decoder=CacheDecoder(m, 'paged', 3))
    assert len(read) == 1
