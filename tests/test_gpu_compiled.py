"""What the kernels of a step are compiled to, for GPUs that are not here."""
import json
import os
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run, sizes
from on_triton import triton
from plain_gpu import Direct

from kvcache.storage import make_layers
from model import GPT, GPTConfig

KERNELS = {f'{name}_kernel' for name in ('embed', 'norm', 'linear', 'store', 'attend', 'change', 'draw')}
LLAMA = dict(position='rope', mlp='swiglu', norm='rms', qk_norm=True, n_kv_head=2)
WINDOW = dict(position='rope', window=512, n_sink=4)
CASES = [(90, 'bfloat16', 'bfloat16', LLAMA), (80, 'float32', 'float32', dict(mlp='swiglu')),
         (90, 'bfloat16', 'int8', WINDOW | dict(head_dim=128))]
MORE = [(80, 'bfloat16', 'bfloat16', LLAMA | dict(head_dim=128, block_size=32768)), (90, 'float16', 'float16', {}),
        (80, 'bfloat16', 'int8', LLAMA | dict(n_head=8, head_dim=96)),
        (90, 'float32', 'int8', dict(position='alibi', gelu='tanh', head_dim=20, window=512, n_sink=4)),
        (90, 'float32', 'float32', LLAMA | dict(n_head=4, head_dim=256)),
        (80, 'float16', 'float32', dict(n_head=2, n_embd=12, vocab_size=65))]


def compile_for(arch, dtype, kv, how):
    """[{name, ptx, shared}] of the kernels that a step of such a model launches. Without the interpreter."""
    from triton.backends.compiler import GPUTarget

    from decode.gpu.executor import GPUExecutor, kernels
    device = SimpleNamespace(get_current_device=lambda: arch, get_current_stream=lambda device: 0,
                             get_current_target=lambda: GPUTarget('cuda', arch, 32))
    config = GPTConfig(**dict(block_size=2048, vocab_size=50304, n_layer=1, n_head=12, n_embd=768) | how)
    with torch.device('meta'):
        model = GPT(config).eval().to(getattr(torch, dtype))
    executor, found = GPUExecutor(model, kernels(), Direct()), []
    executor.hold(make_layers(model, 4096, kv))
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(triton.runtime.driver, '_active', device)
        patch.setattr(triton.JITFunction, '__getitem__', lambda kernel, grid: lambda *args, **how: found.append(
            kernel.run(*args, grid=grid, warmup=True, **how)))  # what would launch a kernel compiles it
        executor.step.draw(executor.tables.inputs.rows(8))
    return [dict(name=each.name, ptx=each.asm['ptx'], shared=each.metadata.shared) for each in found]


def compiled(cases):
    """What `compile_for` returns for each of the cases, in another process."""
    code = ('import json, sys, test_gpu_compiled; '
            'print(json.dumps([test_gpu_compiled.compile_for(*case) for case in json.loads(sys.argv[1])]))')
    own = dict(TRITON_INTERPRET='0', PYTHONPATH=os.pathsep.join([ROOT, f'{ROOT}/tests']))
    return json.loads(run(ROOT, '-c', code, json.dumps(cases), code=0, **own).stdout.splitlines()[-1])


def test_the_kernels_of_a_step_compile_for_gpus():
    """No float32 becomes tf32, 16 bits are for tensor cores, blocks fit GPUs since 2020, draws flush nothing to 0."""
    cases = sizes(CASES, CASES + MORE)
    for case, kernels in zip(cases, compiled(cases)):
        arch, dtype, _, how = case
        stored_before = {'store_kernel'} if 'qk_norm' not in how else set()
        assert {each['name'] for each in kernels} == KERNELS - stored_before, case
        for each in kernels:
            name, ptx = each['name'], each['ptx']
            assert f'.target sm_{arch}' in ptx and 'tf32' not in ptx and each['shared'] <= 99 * 1024, (case, name)
            multiplied = dtype != 'float32' and name in ('attend_kernel', 'linear_kernel')
            kind = dtype.replace('bfloat', 'bf').replace('float', 'f')
            on_tensor_cores = f'mma.sync.aligned.m16n8k16.row.col.f32.{kind}' in ptx
            assert on_tensor_cores == ('mma' in ptx) == multiplied, (case, name)
            if name == 'attend_kernel' and how.get('head_dim', 64) % 16 == 0 and 'n_embd' not in how:
                assert 'cp.async.cg.shared.global' in ptx or 'ld.global.v4.b32' in ptx, case
            if name == 'store_kernel' and dtype == 'bfloat16':
                assert 'cvt.rn.bf16' in ptx, case
        drawing = ''.join(each['ptx'] for each in kernels if each['name'] in ('change_kernel', 'draw_kernel'))
        for needed in 'shr.u64', 'mul.lo.s64', 'cvt.rn.f64.u64', 'div.rn.f32', 'div.rn.f64':
            assert needed in drawing, needed
        assert not any(flushing in drawing for flushing in ('add.ftz', 'sub.ftz', 'setp.ge.ftz', 'max.ftz'))
