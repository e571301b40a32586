"""
The GPU's executor with its Triton kernels, in Triton's interpreter where there is no GPU: the logits are the model's,
and the bits of a token's logits do not depend on its company, its chunks, its slots or its pool.
"""
from types import SimpleNamespace

import plain_gpu
import pytest
import torch
from conftest import sizes
from on_triton import DEVICE, QUIET, dots_in_order, small_tiles  # noqa: F401 (fixtures)
from plain_gpt import plain as exact
from plain_gpu import Direct
from test_gpu_executor import check_alone, engine_of, feed, holding, run, sequence_of
from tiny_models import MODELS, model_of

from decode.gpu.executor import GPUExecutor
from kvcache import BlockPool
from kvcache.llamacpp.pool import CellPool

N = sizes(5, 9)  # tokens of a text
pytestmark = QUIET


def tiny(kind, seed=0, **how):
    heads = dict(n_head=2, n_kv_head=1) if kind == 'llama' else dict(n_head=2)
    return model_of(kind, seed, **dict(n_layer=1, n_embd=16, vocab_size=11, n_inner=24, head_dim=8) | heads | how)


def on_kernels(model):
    return GPUExecutor(model, queue=None if DEVICE == 'cuda' else Direct())


def text(seed, n=N):
    return torch.randint(11, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def pages(model, size=16, n=12):
    return BlockPool(n, size, model.config.window, model.config.n_sink)


def begun(pool, config, tokens=(), salt=''):
    s = sequence_of(config)
    s.tokens = list(tokens[:pool.begin(s, tokens, salt)])
    return s


@pytest.mark.parametrize('kind', sizes(['learned', 'llama', 'rope window sinks', 'alibi window'], MODELS))
def test_the_logits_are_those_of_the_model(kind):
    """In chunks, beside another sequence, past the window."""
    judge, m = tiny(kind), tiny(kind).to(DEVICE)
    pool = pages(m)
    executor, texts = holding(on_kernels(m), pool), [text(1, 20), text(2, 20)]
    sequences = [begun(pool, m.config) for _ in 'ab']
    for pieces in sizes([(6, 0), (5, 3), (1, 1)], [(6, 0), (3, 0), (4, 2), (1, 1), (1, 1), (2, 5)]):
        new = {s: of[len(s.tokens):len(s.tokens) + n] for s, of, n in zip(sequences, texts, pieces) if n}
        for s, of_s in zip(new, feed(executor, pool, new)):
            expected = exact(judge, torch.tensor([s.tokens]))[0, -len(of_s.logits):]
            near = 2e-5 * float(expected.std())
            torch.testing.assert_close(of_s.logits.cpu().double(), expected, atol=near, rtol=1e-5)


def logits_in(executor, pool, pieces, others=()):
    """
    The logits of the last token of a text that is fed in pieces, each beside one of others: (tokens, before us?).
    """
    c = executor.model.config
    mine = begun(pool, c)
    for piece, (other, first) in zip(pieces, others or [(None, False)] * len(pieces)):
        fed, beside = {mine: piece}, begun(pool, c)
        if other is not None:
            fed = {beside: other, mine: piece} if first else {mine: piece, beside: other}
        logits = feed(executor, pool, fed)[[*fed].index(mine)].logits[-1]
        pool.free(beside)
    pool.free(mine)
    return logits


def split(tokens, n):
    return [tokens[i:i + n] for i in range(0, len(tokens), n)]


@pytest.mark.usefixtures('dots_in_order', 'small_tiles')
@pytest.mark.parametrize('kind', ['llama', 'rope window sinks', *sizes([], ['learned', 'alibi'])])
def test_bits_do_not_depend_on_company_chunks_slots_or_pool(kind):
    """Named: a neighbour's prefill (vLLM#51902); a prefix as long as a page (SGLang#22819)."""
    m, ours = tiny(kind, **dict(window=2, n_sink=1) if 'window' in kind else {}).to(DEVICE), text(3)
    most, pool = m.config.window + 1 if m.config.window else N, pages(m)
    executor = holding(on_kernels(m), pool)
    alone = logits_in(executor, pool, split(ours, 1))
    for n in sizes((3,), (2, 3, 4, 5, most)):
        assert torch.equal(logits_in(executor, pool, split(ours, n)), alone), n
    for n, first in sizes([(9, True)], [(9, True), (10, False)]):
        others = [(text(n, n), first)] + [(text(4, 2), not first)] * N
        assert torch.equal(logits_in(executor, pool, split(ours, min(most, N) - 1), others), alone), n
    for other in sizes([True], [True, False]):
        cells = CellPool(m.config, 6, 40, unified=other)
        assert torch.equal(logits_in(holding(executor, cells), cells, split(ours, min(most, N) - 2)), alone), other
    small = pages(m, 4)
    holding(executor, small)
    for n_found in 0, 4 * ((N - 1) // 4):  # cold, and then behind its own first pages
        s = begun(small, m.config, ours)
        assert len(s.tokens) == n_found
        for piece in split(ours[n_found:], most):
            logits = feed(executor, small, {s: piece})[0].logits[-1]
        assert torch.equal(logits, alone)
        small.free(s)


def test_an_engine_draws_in_the_kernels_what_each_sequence_draws_alone():
    m = tiny('rope').to(DEVICE)
    engine = engine_of(on_kernels(m), 30)
    hows = [dict(), dict(top_k=3, stops=[5]), dict(frequency_penalty=1.5), dict(temperature=0.0, top_p=0.5)]
    sequences = [s for i, how in enumerate(hows) for s in engine.add([i, 3], 3 + i, seed=i, **how)]
    assert len(run(engine)) < 8
    check_alone(m, sequences)


def test_kernels_that_compute_something_else_are_refused(monkeypatch):
    """When the executor is made; and so is a model with dropout, with which they cannot be compared."""
    m, wrong = tiny('rope'), vars(plain_gpu).copy()
    monkeypatch.setattr('decode.gpu.executor.kernels', lambda: SimpleNamespace(**wrong))
    executor = GPUExecutor(m, queue=Direct())
    assert executor.step is None and not executor.graphs  # what was compared holds no memory
    with pytest.raises(ValueError, match='training mode'):
        GPUExecutor(m.train(), queue=Direct())
    wrong['turn'] = lambda inputs, frequencies, farthest, angles: angles.fill_(1)
    with pytest.raises(ValueError, match='differ from the model'):
        GPUExecutor(m.eval(), queue=Direct())
    del wrong['attend']
    with pytest.raises(ValueError, match='do not run here: AttributeError'):
        GPUExecutor(m, queue=Direct())
