"""
The training step on a CPU: it keeps freed memory, oneDNN multiplies matrices, and the loss is computed in parts.

torch multiplies float32 matrices by MKL, which on processors that are not Intel's uses half of the width of their
vectors. oneDNN does not, and rounds sums in another order. On Intel's processors MKL is faster (up to 1.6 times, on a
Xeon with AMX), and the linears of the model keep using it. The loss in parts, where MKL gains 5 %, always uses oneDNN.

The logits of 1,536 tokens and a vocabulary of 50,304 take 309 MB, and their gradient as much again. `PartedLoss`
computes loss and gradient of a part, and then those of the next one, in the same memory.
docs/TRAINING.md says what all of it brings.
"""
import ctypes
import math
import platform

import torch
import torch.nn as nn

from device import DTYPES, small_model

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
PART_BYTES = 6 * 2**23  # of the float32 logits of a part; with half as many a step took 1.1 times as long on a Zen 4


def keep_freed_memory():
    """
    Let glibc keep freed memory for the next iteration. By default it gives most of that back to the system, and the
    next iteration waits for cleared pages. Tensors of more than 32 MB are still given back, because they would leave
    gaps. Other C libraries are not changed.
    """
    if platform.libc_ver()[0] == 'glibc':
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)


def product(x, weight, bias=None):
    """x (..., K) times the transpose of weight (N, K), plus bias (N,): (..., N), by oneDNN on a CPU, in their dtype."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '')


class Linear(torch.autograd.Function):
    """What nn.Linear computes, forward and backward, by oneDNN."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_rows = grad.flatten(0, -2)
        return (product(grad, weight.t()) if needs_x else None,
                product(grad_rows.t(), x.flatten(0, -2).t()) if needs_weight else None,
                grad_rows.sum(0) if needs_bias else None)


def mkl_is_fast():
    """Does torch multiply float32 matrices by MKL, on a processor of Intel? (No timing: a resumed run must agree.)"""
    return torch.backends.mkl.is_available() and torch.cpu.get_capabilities().get('cpu_name', '').startswith('Intel')


def in_float32(attend):
    """The attention function in float32 also where autocast asks for bfloat16, in which its backward is slow."""
    def attend_in_float32(q, k, v, mask=None, dropout_p=0.0):
        with torch.autocast('cpu', enabled=False):
            if mask is not None and mask.is_floating_point():
                mask = mask.float()
            return attend(q.float(), k.float(), v.float(), mask, dropout_p)
    return attend_in_float32


class PartedLoss(torch.autograd.Function):
    """
    Computes the mean cross entropy of the logits x @ weight.T, and the gradients of x and weight.

    x (N, C) and weight (vocab_size, C), float32; targets (N,), int64, where -1 is not scored. rows: of x, in a part.
    dtype: of the products. The gradient of weight is summed over the parts in float32. gradients: are they needed?
    The method is the fused linear cross entropy of Liger Kernel (arXiv:2410.10989).
    """

    @staticmethod
    def forward(ctx, x, weight, targets, rows, dtype, gradients):
        loss, n, low_weight = torch.zeros(()), (targets != -1).sum(), weight.to(dtype)
        if gradients:
            grad_x, grad_weight = torch.empty_like(x), x.new_zeros(weight.t().shape)  # transposed: half of the time
            ctx.save_for_backward(grad_x, grad_weight, n)
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            low, scored = x[part].to(dtype), targets[part, None] != -1
            of_targets = targets[part, None].clamp(min=0)
            logits = product(low, low_weight).float()
            grad = logits.softmax(1)
            log_sum = logits.amax(1, keepdim=True) - grad.amax(1, keepdim=True).log()  # of the highest probability
            loss += ((log_sum - logits.gather(1, of_targets)) * scored).sum()
            if gradients:
                grad.scatter_add_(1, of_targets, grad.new_full(of_targets.shape, -1.0)).mul_(scored)
                grad = grad.to(dtype)
                grad_x[part] = product(grad, low_weight.t())
                grad_weight += product(low.t(), grad.t())
        return loss / n

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_weight, n = ctx.saved_tensors
        # contiguous: autograd adds it to the embedding's gradient, and adding a transposed matrix takes 100 ms
        return grad_x * (grad / n), grad_weight.t().contiguous().mul_(grad / n), None, None, None, None


def in_parts(model, dtype, rows):
    """A `forward` for a GPT that computes losses of more than `rows` tokens by `PartedLoss`, and no logits then."""
    forward = model.forward

    def forward_in_parts(idx, targets=None, kv_cache=None, use_cache=None):
        if targets is None or kv_cache or use_cache or idx.numel() <= rows:
            return forward(idx, targets, kv_cache, use_cache)
        x, _ = model.hidden_states(idx, torch.arange(idx.size(1), device=idx.device))
        loss = PartedLoss.apply(x.flatten(0, 1).float(), model.lm_head.weight, targets.flatten(), rows, DTYPES[dtype],
                                torch.is_grad_enabled())
        return None, loss, None
    return forward_in_parts


def use_onednn(model, dtype):
    """
    Let a GPT on a CPU compute losses in parts, and its linears by oneDNN, unless MKL is faster. In bfloat16 torch takes
    oneDNN by itself, and attention is computed in float32. ValueError for float16, for a torch without oneDNN, and for
    bfloat16 on a processor for which oneDNN has no bfloat16.
    """
    if dtype == 'float16':
        raise ValueError(f"onednn=True is for dtype=float32 and bfloat16, not {dtype}: give --onednn=False")
    if not torch.backends.mkldnn.is_available():
        raise ValueError("onednn=True, but this torch was built without oneDNN: give --onednn=False")
    if dtype == 'bfloat16' and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise ValueError("onednn=True and dtype=bfloat16, but oneDNN cannot multiply bfloat16 numbers on this "
                         "processor: give --dtype=float32")
    by_mkl = mkl_is_fast()
    for module in model.modules():
        if dtype == 'float32' and not by_mkl and type(module) is nn.Linear:
            module.forward = lambda x, linear=module: Linear.apply(x, linear.weight, linear.bias)
        elif dtype == 'bfloat16' and hasattr(module, 'attend'):
            module.attend = in_float32(module.attend)
    try:
        check_loss(small_model(type(model), model.config))
    except (AssertionError, AttributeError, RuntimeError, TypeError) as e:  # model.py may have been changed
        raise ValueError(f"onednn=True is tried on a small model, which fails ({e!r:.200}): give --onednn=False") from e
    model.forward = in_parts(model, dtype, max(1, PART_BYTES // (4 * model.config.vocab_size)))


@torch.no_grad()
def check_loss(small):
    """ValueError unless a `small_model` has the loss of `in_parts`: `GPT.forward` may have been changed."""
    idx, forwards = torch.arange(8)[None, :small.config.block_size], (small, in_parts(small, 'float32', 4))
    by_model, in_parts_of_4 = (forward(idx, idx.flip(1))[1].item() for forward in forwards)
    if not math.isclose(by_model, in_parts_of_4, rel_tol=1e-3):
        raise ValueError(f"onednn=True computes the loss by itself, {in_parts_of_4:.4g} for a small model, and "
                         f"GPT.forward computes {by_model:.4g}: give --onednn=False")
