"""
The GPU's executor with its Triton kernels, in Triton's interpreter where there is no GPU: each call of a kernel
computes what its function in PyTorch does, logits are the judge's, and their bits depend on nothing beside a text.
"""
import copy
import random
from types import SimpleNamespace

import plain_gpu
import pytest
import torch
from conftest import sizes
from on_triton import DEVICE, QUIET, dots_in_order, small_tiles  # noqa: F401 (fixtures)
from plain_gpu import Direct
from test_executors import Slots, alone, check_nan_shows, in_any_batches, judged, texts
from test_gpu_executor import check_alone, engine_of, run
from tiny_models import MODELS, model_of

from decode.gpu.executor import GPUExecutor, kernels

pytestmark = [QUIET, pytest.mark.usefixtures('dots_in_order', 'small_tiles')]
NEAR = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def compared(near_store):
    """The kernels, each of which is compared with its function in PyTorch, on copies of what it is given."""
    of_kernels, cpu = kernels(), lambda each: each if each is None else each.to('cpu', copy=True)

    def store(qkv, q, angles, attn, kv, inputs, g):  # on the CPU: on a GPU PyTorch does not divide by 127
        expected = cpu(q), type(kv)(*map(cpu, kv))
        plain_gpu.store(cpu(qkv), expected[0], cpu(angles), copy.deepcopy(attn).cpu(), expected[1],
                        type(inputs)(*map(cpu, inputs)), g)
        of_kernels.store(qkv, q, angles, attn, kv, inputs, g)
        real = inputs.sequences >= 0
        for a, b in zip((q[real], *kv), (expected[0][real.cpu()], *expected[1])):
            if a is not None:
                torch.testing.assert_close(a.cpu(), b, rtol=near_store, atol=near_store, equal_nan=True)

    def attend(q, y, parts, kv, inputs, g):
        expected = y.double()
        plain_gpu.attend(q, expected, None, kv, inputs, g)
        y.fill_(torch.nan)
        of_kernels.attend(q, y, parts.fill_(torch.nan), kv, inputs, g)
        near = NEAR[q.dtype] * max(1, float(expected.abs().max()))
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=near)
    return SimpleNamespace(store=store, attend=attend, draw=of_kernels.draw)


class Small(GPUExecutor):
    """Graphs of few rows, for the interpreter."""
    most_sequences = 4


def on(functions, kind, dtype=torch.float32, **how):
    """(a tiny model, its executor)"""
    heads = dict(n_head=2, n_kv_head=1) if kind == 'llama' else dict(n_head=2)
    m = model_of(kind, **dict(n_layer=1, n_embd=16, n_inner=24, head_dim=8) | heads | how).to(DEVICE, dtype)
    if DEVICE == 'cuda':
        return m, GPUExecutor(m, functions)
    executor = Small(m, functions, Direct())
    executor.buckets = Small.most_sequences,
    return m, executor


# the interpreter has no dots of bfloat16, and cuts float32 off to it: more of it is tried on a GPU
CASES = [('learned', 'float32', 'float32', 64), ('llama', 'float16', 'int8', 40),
         ('alibi window', 'float32', 'float16', 6), ('rope window sinks', 'float32', 'int8', 96)]
CASES += sizes([], [(kind, 'float32', 'float32', 6) for kind in MODELS] + [('llama', 'float16', 'float16', 20)])
CASES += [('llama', 'bfloat16', kv, 64) for kv in ('bfloat16', 'int8') if DEVICE == 'cuda']


@pytest.mark.parametrize('kind, dtype, kv, head_dim', CASES)
def test_each_call_of_a_kernel_computes_what_its_function_in_pytorch_does(kind, dtype, kv, head_dim):
    """Queries, keys, values, codes and scales have its bits, but behind norms. What is not seen is NaN."""
    _, executor = on(compared(1e-5 * (kind == 'qwen window')), kind, getattr(torch, dtype), head_dim=head_dim)
    in_any_batches(Slots(executor, 'cells', kv), texts(2, sizes(9, 40)), random.Random(0), lambda *found: None)


@pytest.mark.parametrize('kind, layout', sizes([('llama', 'pages'), ('rope window sinks', 'cells')], [
    (kind, layout) for kind in MODELS for layout in ('pages', 'cells', 'rows')]))
def test_logits_and_their_bits_in_any_batches(kind, layout):
    """Named: a neighbour's prefill (vLLM#51902); a prefix as long as a page (SGLang#22819)."""
    m, executor = on(kernels(), kind)
    some = texts(2, sizes(9, 40))
    same, expected = alone(executor, some), judged(copy.deepcopy(m).cpu(), some)

    def check(i, first, logits):
        part = slice(first, first + len(logits))
        assert (logits.cpu().double() - expected[i, part]).abs().max() < 2e-5 * expected.abs().max(), (i, first)
        assert torch.equal(logits, same[i][part]), (i, first, len(logits))
    in_any_batches(Slots(executor, layout), some, random.Random(0), check)


def test_a_key_that_is_no_number_shows():
    check_nan_shows(on(kernels(), 'learned')[1])


def test_an_engine_draws_in_the_kernels_what_each_sequence_draws_alone():
    m, executor = on(kernels(), 'rope')
    engine = engine_of(executor, 30)
    hows = [dict(), dict(top_k=3, stops=[5]), dict(frequency_penalty=1.5), dict(temperature=0.0, top_p=0.5)]
    sequences = [s for i, how in enumerate(hows) for s in engine.add([i, 3], 3 + i, seed=i, **how)]
    assert len(run(engine)) < 8
    check_alone(m, sequences)
