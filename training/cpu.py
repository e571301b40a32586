"""
How a training step is computed on a CPU: matrix products by oneDNN.

torch multiplies float32 matrices by MKL, which on processors that are not Intel's uses half of the width of their
vectors: on an AMD EPYC (Zen 5) oneDNN is 2.2 times as fast. The sums are rounded in another order.
"""
import torch
import torch.nn as nn


def product(x, weight, bias=None):
    """x (..., K) times the transpose of weight (N, K), plus bias (N,): (..., N), by oneDNN. All float32, on a CPU."""
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


def in_float32(attend):
    """The attention function in float32 also where autocast asks for bfloat16, in which its backward is slow."""
    def attend_in_float32(q, k, v, mask=None, dropout_p=0.0):
        with torch.autocast('cpu', enabled=False):
            if mask is not None and mask.is_floating_point():
                mask = mask.float()
            return attend(q.float(), k.float(), v.float(), mask, dropout_p)
    return attend_in_float32


def use_onednn(model, dtype):
    """
    Let a GPT on a CPU compute products by oneDNN. In bfloat16 torch does so by itself, and attention is computed in
    float32. ValueError if this torch has no oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        raise ValueError("onednn=True, but this torch was built without oneDNN: leave it out")
    for module in model.modules():
        if dtype == 'float32' and isinstance(module, nn.Linear):
            module.forward = lambda x, linear=module: Linear.apply(x, linear.weight, linear.bias)
        elif dtype == 'bfloat16' and hasattr(module, 'attend'):
            module.attend = in_float32(module.attend)
