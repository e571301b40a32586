"""
How a training step is computed on a CPU: matrix products by oneDNN, and the loss in parts.

torch multiplies float32 matrices by MKL, which on processors that are not Intel's uses half of the width of their
vectors: on an AMD EPYC (Zen 5) oneDNN is 2.2 times as fast. The sums are rounded in another order.

The logits of a vocabulary of 50,304 for 1,536 tokens take 309 MB. In parts that stay in the processor's caches, forward
and backward pass of a small model take 0.36 s instead of 1.6 s in bfloat16, and 0.59 s instead of 1.2 s in float32 (one
thread of the same machine).
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

PART_BYTES = 2**24  # of the float32 logits of a part; half and twice as many are slower


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


def in_parts(model):
    """`GPT.forward` of a model, which computes the loss of many logits in parts. The logits are None then."""
    forward, rows = model.forward, max(1, PART_BYTES // (4 * model.config.vocab_size))

    def forward_in_parts(idx, targets=None, kv_cache=None, use_cache=None):
        if targets is None or kv_cache or use_cache or idx.numel() <= rows:
            return forward(idx, targets, kv_cache, use_cache)
        x, _ = model.hidden_states(idx, torch.arange(idx.size(1), device=idx.device))
        losses = [F.cross_entropy(model.lm_head(part), of_part, ignore_index=-1, reduction='sum')
                  for part, of_part in zip(x.flatten(0, 1).split(rows), targets.flatten().split(rows))]
        return None, sum(losses) / (targets != -1).sum(), None
    return forward_in_parts


def use_onednn(model, dtype):
    """
    Let a GPT on a CPU compute products by oneDNN, and losses in parts. In bfloat16 torch takes oneDNN by itself, and
    attention is computed in float32. ValueError if this torch has no oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        raise ValueError("onednn=True, but this torch was built without oneDNN: leave it out")
    for module in model.modules():
        if dtype == 'float32' and isinstance(module, nn.Linear):
            module.forward = lambda x, linear=module: Linear.apply(x, linear.weight, linear.bias)
        elif dtype == 'bfloat16' and hasattr(module, 'attend'):
            module.attend = in_float32(module.attend)
    model.forward = in_parts(model)
