"""
Executors: one step of a model for any sequences, as fast as the device allows.

    outputs = executor.execute_model(batch)     # see batch.py

An executor has a `name`; the `model` that it computes; `hold(layers)`, which gives it the storage of its slots, then
its `layers`; `type_kv`, the type of keys and values that it computes; `refresh()`, which makes it use the model's
present weights; and `torch_on_one_thread()`, a context manager for a loop of steps. It may have `most_sequences`, the
most that run at a time; `prepare()`, slow work that is done before the first request; and `draft`, which proposes its
tokens.

    batch        the work of one call, and what comes of it: what all executors are told
    draw         the next token: its settings, and what a draw is
    eager        the executor in PyTorch
    direct       the model's own code, called without the work of nn.Module
    cpu          the executor on the compiled step of kernel/
    weights, tables               the model's weights, packed; what the compiled step is told, as arrays of addresses
    choice       how many threads, and whether weights are prefetched: found by timing
    changes      which models the executors know, and whether they compute what model.py does
    speculative  an executor around an executor: drafts propose tokens, and the same tokens come in fewer steps
    drafts       what proposes them: fewer bits, the sequence itself, another model
    kernel/      what numba compiles: a whole step of a GPT on the CPU
    gpu/         the executor for CUDA, with Triton kernels
"""
import sys

import torch

from decode.eager import EagerExecutor

DECODERS = 'auto', 'eager', 'cpu', 'gpu'
WEIGHTS = 'float32', 'bfloat16', 'int8', 'int4'
SPECULATE = 'auto', 'off', 'int4', 'int8', 'ngram'
MODEL_DTYPES = torch.float32, torch.bfloat16  # of the models that the CPU executor reads
LARGEST_BATCH = 256  # up to here PyTorch's matmuls were slower for every batch measured: see bench.py --mode=peers
DRAFTED_BYTES = 2**24  # of weights: with fewer, a step takes about as long as the Python code of a round with drafts
DRAFTS = {'float32': 'int8', 'bfloat16': 'int4'}  # {weights: draft}; an int8 draft's tokens are accepted more often
DRAFTED_SEQUENCES = 8  # of a call: with more, the rows of a chunk cost nearly as much as single steps


def check_choice(name='auto', weights='float32', threads=None, device='cpu', dtype='float32', speculate='off',
                 draft=''):
    """
    ValueError for settings of `best` that do not exist or do not go together; needs no model.

    device, dtype: of the model, such as 'cpu' or 'cuda:1', and 'bfloat16'. draft: the name of another model that
    proposes tokens, see `drafts.ModelDraft`.
    """
    if name not in DECODERS:
        raise ValueError(f"decoder must be auto, eager, cpu or gpu, not {name!r}")
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be float32, bfloat16, int8 or int4, not {weights!r}")
    if threads is not None and threads < 0:
        raise ValueError(f"threads must be positive, or 0 to let the decoder choose, not {threads}")
    if speculate not in SPECULATE:
        raise ValueError(f"speculate must be {', '.join(SPECULATE)}, not {speculate!r}")
    if draft and speculate != 'auto':
        raise ValueError(f"draft={draft} and speculate={speculate} both say who proposes tokens: "
                         "a draft takes speculate=auto")
    if speculate in WEIGHTS and WEIGHTS.index(speculate) <= WEIGHTS.index(weights):
        raise ValueError(f"speculate={speculate} needs weights with more bits, but weights={weights} came: "
                         "take speculate=ngram or off, or weights with more bits")
    on_cuda, of_kernel = device.startswith('cuda'), asked_of_the_kernel(weights, threads, speculate, draft)
    asked = ' and '.join([f'decoder={name}'] * (name not in ('auto', 'eager')) + [of_kernel] * bool(of_kernel))
    if of_kernel and name in ('eager', 'gpu'):
        raise ValueError(f"{of_kernel} is for the cpu decoder: leave decoder={name} out")
    if device != 'cpu' and (of_kernel or name == 'cpu'):
        raise ValueError(f"{asked} is for the CPU, but the device is {device}: use device=cpu, or leave it out")
    if name == 'gpu' and not on_cuda:
        raise ValueError(f"decoder={name} is for CUDA, but the device is {device}: use device=cuda, or leave it out")
    if dtype != 'float32' and (of_kernel or name == 'cpu'):
        raise ValueError(f"{asked}: the cpu decoder computes in float32, but not dtype={dtype}; leave dtype out")


def asked_of_the_kernel(weights, threads, speculate='off', draft=''):
    """The settings that only the executor on numba has, as text, if they are not at their defaults."""
    return ' and '.join([f'weights={weights}'] * (weights != 'float32') + [f'threads={threads}'] * bool(threads)
                        + [f'speculate={speculate}'] * (speculate not in ('auto', 'off'))
                        + [f'draft={draft}'] * bool(draft))


def converted(model, name, dtype=None):
    """
    The model, its weights in a type that the executor `name` of `best` reads. dtype: on CUDA, the one in which the
    kernels compute; None leaves the weights as they are.
    """
    device = model.transformer.ln_f.weight.device.type
    if device == 'cuda':
        return model if dtype is None else model.to(dtype)
    is_read = device == 'cpu' and name != 'eager' and model.lm_head.weight.dtype in MODEL_DTYPES
    return model if is_read else model.float()


def best(model, batch_size, weights='float32', threads=None, name='auto', speculate='off', draft=None, dtype='float32',
         kv_bits=0):
    """
    The executor `name` for a model, or with 'auto' the fastest one for this many sequences at once on its device.

    name: 'eager' (PyTorch), 'cpu' (numba), 'gpu' (Triton), or 'auto': on a CPU the numba one, on CUDA the one with
        Triton's kernels, elsewhere the eager one. For models that these do not support, 'auto' takes the eager one and
        says so on stderr. On a CPU it also takes it for batches above LARGEST_BATCH, for a dtype other than float32,
        and for kv_bits that the numba one does not have.
    weights: 'float32', 'bfloat16', 'int8' or 'int4', the type in which the numba executor reads them. threads: how
        many it uses; None or 0 lets it choose by timing a few steps. If one of the two is not at its default, the
        result is the numba executor or a ValueError.
    speculate: who proposes tokens to the numba executor, see `speculative`: 'int4' or 'int8', the same weights in fewer
        bits; 'ngram', the sequence itself; 'off', nobody. 'auto' is the type in DRAFTS for weights of DRAFTED_BYTES or
        more and up to DRAFTED_SEQUENCES sequences, or `draft`, a `drafts.ModelDraft`.
    dtype, kv_bits: of `device.autocast` around the calls, and of the `Engine`.

    Raises ValueError for an executor that does not exist or does not work here, and for settings that it does not have.
    """
    device, of_draft = str(model.transformer.ln_f.weight.device), draft.name if draft else ''
    asked = asked_of_the_kernel(weights, threads, speculate, of_draft)
    check_choice(name, weights, threads, device, dtype, speculate, of_draft)
    on_cuda, on_cpu = device.startswith('cuda'), device == 'cpu'
    is_plain = batch_size <= LARGEST_BATCH and dtype == 'float32' and not (kv_bits and model.config.head_dim % 32)
    if name == 'eager' or name == 'auto' and not on_cuda and not asked and not (on_cpu and is_plain):
        return EagerExecutor(model)
    try:
        if not on_cuda:
            return on_numba(model, batch_size, weights, threads, speculate, draft)
        from decode.gpu.executor import GPUExecutor  # Triton is on CUDA's machines alone
        return GPUExecutor(model)
    except ValueError as e:
        if name != 'auto':
            raise
        if asked:
            raise ValueError(f"{asked} cannot be had: {e}") from e
        print(f"decoding eagerly: {e}", file=sys.stderr)
    return EagerExecutor(model)


def draft_of(model, name, pool, layers):
    """The `drafts.ModelDraft` of a model that a setting `draft` names, read in int8. layers: the slots of its pool."""
    from decode.cpu import CPUExecutor
    from decode.drafts import ModelDraft
    executor = CPUExecutor(model, 'int8')
    executor.hold(layers)
    return ModelDraft(executor, pool, name)


def on_numba(model, batch_size, weights, threads, speculate, draft):
    """The executor on numba, with a draft if there is one. Imported here: numba takes a second to import."""
    from numba import config
    if config.DISABLE_JIT:
        raise ValueError("NUMBA_DISABLE_JIT is set, but the decoder cpu must be compiled: unset it, or choose "
                         "decoder=eager")
    from decode.changes import check_compiled
    from decode.cpu import CPUExecutor
    check_compiled(model, weights)
    executor = CPUExecutor(model, weights, threads or None)
    if speculate == 'auto' and not draft:
        pays = executor.packed.panels.nbytes >= DRAFTED_BYTES and batch_size <= DRAFTED_SEQUENCES
        speculate = DRAFTS.get(executor.packed.weights, 'off') if pays else 'off'
    if speculate == 'off' and not draft:
        return executor
    from decode.speculative import Drafting
    return Drafting(executor, draft or speculate)
