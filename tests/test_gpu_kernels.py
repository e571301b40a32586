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
    of_kernels = kernels()

    def on_cpu(each):
        """A copy. On a GPU PyTorch does not divide by 127."""
        if isinstance(each, tuple):
            return type(each)(*map(on_cpu, each))
        if isinstance(each, torch.nn.Module):
            return copy.deepcopy(each).cpu()
        return each.to('cpu', copy=True) if isinstance(each, torch.Tensor) else each

    def both(name, args, more, at):
        """The argument number `at` is written: by the kernel, and by the function in float64."""
        expected = [on_cpu(each) for each in args]
        if name == 'linear' and not more.get('add') or name != 'linear':
            args[at].fill_(torch.nan)
        expected[at] = expected[at].double()
        getattr(plain_gpu, name)(*expected, **{key: on_cpu(each) for key, each in more.items()})
        getattr(of_kernels, name)(*args, **more)
        near = NEAR[model_dtype(args)] * max(1, float(expected[at].abs().max()))
        torch.testing.assert_close(args[at].double().cpu(), expected[at], rtol=0, atol=near)
        return expected

    def model_dtype(args):
        return next(each.dtype for each in args if isinstance(each, torch.Tensor) and each.is_floating_point()
                    and each.dtype is not torch.float32) if any(
            isinstance(each, torch.Tensor) and each.dtype in (torch.float16, torch.bfloat16) for each in args
        ) else torch.float32

    def attend(*args):
        args[3].fill_(torch.nan)  # the parts
        _, q, *_, kv, inputs, _, _ = args
        _, expected_q, *_, expected_kv, _, _, _ = both('attend', args, {}, 2)
        real = inputs.sequences >= 0
        for a, b in zip((q[real], *kv), (expected_q[real.cpu()], *expected_kv)):
            if a is not None:
                torch.testing.assert_close(a.cpu(), b, rtol=near_store, atol=near_store, equal_nan=True)
        assert not args[4].any()
    return SimpleNamespace(
        attend=attend, draw=of_kernels.draw, embed=lambda *args: both('embed', args, {}, 3),
        normed=lambda *args: both('normed', args, {}, 1), linear=lambda *args, **more: both('linear', args, more, 1))


class Small(GPUExecutor):
    """Graphs of few rows, for the interpreter."""
    most_sequences = 4

    def graph(self, kind, n):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr('decode.gpu.executor.BUCKETS', (4,))
            return super().graph(kind, n)


def on(functions, kind, dtype=torch.float32, **how):
    """(a tiny model, its executor)"""
    heads = dict(n_head=2, n_kv_head=1) if kind == 'llama' else dict(n_head=2)
    m = model_of(kind, **dict(n_layer=1, n_embd=16, n_inner=24, head_dim=8) | heads | how).to(DEVICE, dtype)
    if DEVICE == 'cuda':
        return m, GPUExecutor(m, functions, Direct())  # what is compared cannot be recorded
    return m, Small(m, functions, Direct())


# the interpreter has no dots of bfloat16, and cuts float32 off to it: more of it is tried on a GPU
CASES = [('learned', 'float32', 'float32', 64), ('llama', 'float16', 'int8', 40),
         ('alibi window', 'float32', 'float16', 6), ('rope window sinks', 'float32', 'int8', 96)]
CASES += sizes([], [(kind, 'float32', 'float32', 6) for kind in MODELS] + [('llama', 'float16', 'float16', 20)])
CASES += [('llama', 'bfloat16', kv, 64) for kv in ('bfloat16', 'int8') if DEVICE == 'cuda']


@pytest.mark.parametrize('kind, dtype, kv, head_dim', CASES)
def test_each_call_of_a_kernel_computes_what_its_function_in_pytorch_does(kind, dtype, kv, head_dim):
    """Queries, keys, values, codes and scales have its bits, but behind norms. What is not seen is NaN."""
    _, executor = on(compared(1e-5 * (kind == 'qwen window')), kind, getattr(torch, dtype), head_dim=head_dim)
    in_any_batches(Slots(executor, 'cells', kv), texts(2, sizes(6, 40)), random.Random(0), lambda *found: None)


@pytest.mark.parametrize('kind, layout', sizes([('llama', 'pages'), ('rope window sinks', 'cells')], [
    (kind, layout) for kind in MODELS for layout in ('pages', 'cells', 'rows')]))
def test_logits_and_their_bits_in_any_batches(kind, layout):
    """Named: a neighbour's prefill (vLLM#51902); a prefix as long as a page (SGLang#22819)."""
    m, executor = on(kernels(), kind)
    some = texts(2, sizes(6, 40))
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
    hows = [dict(), dict(top_k=3, stop_ids=[5]), dict(frequency_penalty=1.5), dict(temperature=0.0, top_p=0.5)]
    sequences = [s for i, how in enumerate(hows) for s in engine.add([i, 3], 3 + i, seed=i, **how)]
    assert len(run(engine)) < 8
    check_alone(m, sequences)
