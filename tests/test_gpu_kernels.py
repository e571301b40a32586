"""
The GPU's executor with its Triton kernels, in Triton's interpreter where there is no GPU: the logits are the model's,
and the bits of a token's logits do not depend on its company, its chunks, its slots or its pool.
"""
import ast
import glob
import os

import pytest
import torch
from conftest import ROOT, sizes
from on_triton import DEVICE, QUIET, dots_in_order  # noqa: F401 (a fixture)
from plain_gpt import plain as exact
from test_gpu_executor import check_alone, engine_of, feed, holding, run, sequence_of
from tiny_models import MODELS, model_of

from decode.gpu.executor import GPUExecutor
from kvcache import BlockPool
from kvcache.llamacpp.pool import CellPool

N = 9  # tokens of a text
pytestmark = QUIET


def tiny(kind, seed=0, **how):
    return model_of(kind, seed, n_layer=1, n_embd=16, vocab_size=11, n_inner=24, head_dim=8, **how).to(DEVICE)


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
    m = tiny(kind)
    pool = pages(m)
    executor, a, b = holding(GPUExecutor(m), pool), text(1, 20), text(2)
    first, second = (begun(pool, m.config) for _ in 'ab')
    feed(executor, pool, {first: a[:6]})
    feed(executor, pool, {first: a[6:9]})
    for i, j, n, k in [(9, 0, 4, 2)] + [(13 + t, 2 + t, 1, 1) for t in range(4)]:
        got = feed(executor, pool, {first: a[i:i + n], second: b[j:j + k]})
        for s, of_s in zip((first, second), got):
            expected = exact(m.cpu(), torch.tensor([s.tokens]))[0, -len(of_s.logits):]
            near = 2e-5 * float(expected.std())
            torch.testing.assert_close(of_s.logits.cpu().double(), expected, atol=near, rtol=1e-5)
        m.to(DEVICE)


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


@pytest.mark.usefixtures('dots_in_order')
@pytest.mark.parametrize('kind', ['llama', 'rope window sinks', *sizes([], ['learned', 'alibi'])])
def test_bits_do_not_depend_on_company_chunks_slots_or_pool(kind, monkeypatch):
    """Named: a neighbour's prefill of 9 and 10 tokens (vLLM#51902); a prefix as long as a page (SGLang#22819)."""
    for each in 'decode.gpu.attention', 'decode.gpu.columns':
        monkeypatch.setattr(f'{each}.TILE', 16)
        monkeypatch.setattr(f'{each}.SPLIT', 16)
    m, ours = tiny(kind), text(3)
    most, pool = m.config.window + 1 if m.config.window else N, pages(m)
    executor = holding(GPUExecutor(m), pool)
    alone = logits_in(executor, pool, split(ours, 1))
    for n in sizes((4,), (2, 3, 5, most)):
        assert torch.equal(logits_in(executor, pool, split(ours, n)), alone), n
    for n, first in (9, True), (10, False):
        others = [(text(n, n), first)] + [(text(4, 3), True)] * N
        assert torch.equal(logits_in(executor, pool, split(ours, most - 1), others), alone), n
    for other in sizes([True], [True, False]):
        cells = CellPool(m.config, 6, 40, unified=other)
        assert torch.equal(logits_in(holding(executor, cells), cells, split(ours, most - 2)), alone), other
    small = pages(m, 4)
    holding(executor, small)
    for n_found in 0, 8:  # cold, and then behind its own first pages
        s = begun(small, m.config, ours)
        assert len(s.tokens) == n_found
        for piece in split(ours[n_found:], most):
            logits = feed(executor, small, {s: piece})[0].logits[-1]
        assert torch.equal(logits, alone)
        small.free(s)


def test_an_engine_draws_in_the_kernels_what_each_sequence_draws_alone():
    m = tiny('rope')
    engine = engine_of(GPUExecutor(m), 30)
    hows = [dict(), dict(top_k=3, stops=[5]), dict(frequency_penalty=1.5), dict(temperature=0.0, top_p=0.5)]
    sequences = [s for i, how in enumerate(hows) for s in engine.add([i, 3], 5 + i, seed=i, **how)]
    assert len(run(engine)) < 8
    check_alone(m, sequences)


def test_a_model_in_training_mode_is_compared_in_eval_mode():
    """And stays in its modes; what was compared holds no memory."""
    m = tiny('learned', dropout=0.5)
    m.train().transformer.ln_f.eval()
    executor = GPUExecutor(m)
    assert [name for name, module in m.named_modules() if not module.training] == ['transformer.ln_f']
    assert executor.step is None and not executor.graphs


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
