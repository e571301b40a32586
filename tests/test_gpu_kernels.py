"""
The GPU decoder with its Triton kernels, in Triton's interpreter where there is no GPU: the logits are the model's, and
the bits of a token's logits do not depend on its company, its chunks, its slots or its cache.
"""
import ast
import glob
import os

import pytest
import torch
from cache_machine import MODELS, model_of
from conftest import ROOT, needs, sizes

needs('pydantic')

from on_triton import DEVICE, QUIET, dots_in_order  # noqa: F401 (a fixture)
from small_engine import BYTES, run, submit, tokens_alone

import kvcache
from decode.gpu.decoder import GPUDecoder
from serving.engine import Engine

N = 9  # tokens of a text
pytestmark = QUIET


def tiny(kind, seed=0, **how):
    return model_of(kind, seed, n_layer=1, n_embd=16, vocab_size=11, n_inner=24, head_dim=8, **how).to(DEVICE)


def text(seed, n=N):
    return torch.randint(11, (n,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize('kind', sizes(['learned', 'llama', 'rope window sinks', 'alibi window'], MODELS))
@torch.no_grad()
def test_the_logits_are_those_of_the_model(kind):
    """In chunks, beside another sequence, past the window."""
    m = tiny(kind)
    cache = kvcache.make_cache(m, 'paged', 2, decoder=GPUDecoder(m))
    a, b = text(1, 20), text(2)
    handles = [cache.new(), cache.new()]
    cache.step(handles[:1], [0], a[None, :9])
    got = [cache.step(handles, [9, 0], [a[9:13], b[:2]])]
    got += [cache.step(handles, [13 + t, 2 + t], torch.stack((a[13 + t:14 + t], b[2 + t:3 + t]))) for t in range(4)]
    for t, logits in enumerate(got):
        expected = torch.cat([m(x[None, :n + t], use_cache=False)[0][0] for x, n in ((a, 13), (b, 2))])
        torch.testing.assert_close(logits, expected, atol=2e-5 * float(expected.std()), rtol=1e-5)


def logits_in(cache, pieces, others=()):
    """
    The logits of the last token of a text that is fed in pieces, each beside one of others: (tokens, before us?).
    """
    handle, start = cache.new(object()), 0
    for piece, (other, first) in zip(pieces, others or [(None, False)] * len(pieces)):
        fed = [(handle, start, piece)]
        if other is not None:
            fed.insert(0 if first else 1, (cache.new(object()), 0, other))
        logits = cache.step(*map(list, zip(*fed)))
        logits, start = logits[[each[0] for each in fed].index(handle)], start + len(piece)
        for each, *_ in fed:
            if each != handle:
                cache.free(each)
    cache.free(handle)
    return logits


@pytest.mark.usefixtures('dots_in_order')
@pytest.mark.parametrize('kind', ['llama', 'rope window sinks', *sizes([], ['learned', 'alibi'])])
def test_bits_do_not_depend_on_company_chunks_slots_or_cache(kind, monkeypatch):
    """Named: a neighbour's prefill of 9 and 10 tokens (vLLM#51902); a prefix as long as a block (SGLang#22819)."""
    for each in 'decode.gpu.attention', 'decode.gpu.columns':
        monkeypatch.setattr(f'{each}.TILE', 16)
        monkeypatch.setattr(f'{each}.SPLIT', 16)
    m, ours = tiny(kind), text(3)
    decoder, most = GPUDecoder(m), m.config.window + 1 if m.config.window else N
    paged = kvcache.make_cache(m, 'paged', 6, decoder=decoder)
    alone = logits_in(paged, ours.split(1))
    for n in sizes((4,), (2, 3, 5, most)):
        assert torch.equal(logits_in(paged, ours.split(n)), alone), n
    for n, first in (9, True), (10, False):
        others = [(text(n, n), first)] + [(text(4, 3), True)] * N
        assert torch.equal(logits_in(paged, ours.split(most - 1), others), alone), n
    for other in sizes(['unified'], ['tuple', 'streams', 'unified']):
        cache = kvcache.make_cache(m, other, 6, decoder=decoder)
        assert torch.equal(logits_in(cache, ours.split(most - 2)), alone), other
    monkeypatch.setattr('kvcache.PAGE_SIZE', 4)
    small_pages = kvcache.make_cache(m, 'paged', 6, decoder=decoder)
    for _ in range(2):  # cold, and then behind its own first blocks
        handle = small_pages.new()
        assert torch.equal(small_pages.step([handle], [0], [ours])[0], alone)
        small_pages.free(handle)


def test_an_engine_draws_in_the_kernels_what_each_request_draws_alone(monkeypatch):
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 1e9)
    m = tiny('rope')
    decoder = GPUDecoder(m)
    engine = Engine(m, decoder, BYTES[:11], (), 30, 4, 64)
    hows = [dict(), dict(top_k=3, stop_token_ids=[5]), dict(frequency_penalty=1.5), dict(temperature=0.0, top_p=0.5)]
    all_got = [submit(engine, str(i), [i, 3], 5 + i, seed=i, **how) for i, how in enumerate(hows)]
    run(engine)
    assert engine.stats.steps < 12
    if DEVICE == 'cpu':
        from decode.cpu import CPUDecoder
        alone = CPUDecoder(m, threads=1)
        for got in all_got:
            assert got.tokens == tokens_alone(alone, got.request, got.request.params.stop_token_ids)


def test_a_model_in_training_mode_is_compared_in_eval_mode():
    """And stays in its modes; what was compared holds no memory."""
    m = tiny('learned', dropout=0.5)
    m.train().transformer.ln_f.eval()
    decoder = GPUDecoder(m)
    assert [name for name, module in m.named_modules() if not module.training] == ['transformer.ln_f']
    assert decoder.bound is decoder.step is None and not decoder.graphs


def test_every_dot_is_ieee():
    """Triton's default is TF32, whatever torch's flags say."""
    n_dots = 0
    for path in glob.glob(os.path.join(ROOT, 'decode', 'gpu', '*.py')):
        with open(path) as f:
            calls = [node for node in ast.walk(ast.parse(f.read())) if isinstance(node, ast.Call)]
        for call in calls:
            if ast.unparse(call.func) == 'tl.dot':
                n_dots += 1
                assert "input_precision='ieee'" in ast.unparse(call), path
    assert n_dots >= 4
