"""The GPU's executor with its Triton kernels: logits are the judge's, and their bits depend on a text alone."""
import copy
import random

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
# the largest difference of logits as a share of the largest one, by the types of weights, and of keys and values
WORST = {'float32': 2e-5, 'float16': 0.02, 'bfloat16': 0.1}
WORST_KV = {'float32': 0, 'float16': 0.003, 'bfloat16': 0.02, 'int8': 0.02}


class Small(GPUExecutor):
    """Graphs of few rows, for the interpreter."""
    most_sequences = 4

    def graph(self, kind, n):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr('decode.gpu.executor.BUCKETS', (4,))
            return super().graph(kind, n)


def on(kind, dtype='float32', **how):
    """(a tiny model, its executor)"""
    heads = dict(n_head=2, n_kv_head=1) if kind == 'llama' else dict(n_head=2)
    m = model_of(kind, **dict(n_layer=1, n_embd=16, n_inner=24, head_dim=8) | heads | how)
    m = m.to(DEVICE, getattr(torch, dtype))
    return m, (GPUExecutor if DEVICE == 'cuda' else Small)(m, kernels(), Direct())


# the interpreter has no dots of bfloat16, and cuts float32 off to it: more of it is tried on a GPU
CASES = [('llama', 'pages', 'float32', 'float32', 8), ('rope window sinks', 'cells', 'float32', 'int8', 24),
         ('alibi window', 'rows', 'float32', 'float16', 6), ('learned', 'cells', 'float16', 'int8', 40)]
CASES += sizes([], [(kind, layout, 'float32', 'float32', 6) for kind in MODELS for layout in ('pages', 'cells', 'rows')]
               + [('llama', 'pages', 'float16', 'float16', 20), ('learned', 'rows', 'float32', 'int8', 96)])
CASES += [('llama', 'pages', 'bfloat16', kv, 64) for kv in ('bfloat16', 'int8') if DEVICE == 'cuda']


@pytest.mark.parametrize('kind, layout, dtype, kv, head_dim', CASES)
def test_logits_and_their_bits_in_any_batches(kind, layout, dtype, kv, head_dim):
    """Named: a neighbour's prefill (vLLM#51902); a prefix as long as a page (SGLang#22819)."""
    m, executor = on(kind, dtype, head_dim=head_dim)
    some = texts(2, sizes(4, 40))
    same, expected = alone(executor, some, kv), judged(copy.deepcopy(m).cpu(), some)

    def check(i, first, logits):
        part = slice(first, first + len(logits))
        off = (logits.cpu().double() - expected[i, part]).abs().max() / expected.abs().max()
        assert off < WORST[dtype] + WORST_KV[kv], (i, first)
        assert torch.equal(logits, same[i][part]), (i, first, len(logits))
    slots = Slots(executor, layout, kv)
    in_any_batches(slots, some, random.Random(0), check)
    for stored in (slots.layers[0].k, slots.layers[0].v) if kv == 'int8' else ():
        largest, written = stored.data.abs().unflatten(-1, (-1, stored.group)).amax(-1), stored.scale.isfinite()
        assert written.any() and (largest[written] == 127).all()


def test_a_key_that_is_no_number_shows():
    check_nan_shows(on('learned')[1])


def test_an_engine_draws_in_the_kernels_what_each_sequence_draws_alone():
    m, executor = on('rope')
    engine = engine_of(executor, 30)
    hows = [dict(), dict(top_k=3, stop_ids=[5]), dict(frequency_penalty=1.5), dict(temperature=0.0, top_p=0.5)]
    sequences = [s for i, how in enumerate(hows) for s in engine.add([i, 3], 3 + i, seed=i, **how)]
    assert len(run(engine)) < 8
    check_alone(m, sequences)
