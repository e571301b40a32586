"""The weights of a model as the steps on a GPU read them: where they are, or rounded to int8 rows."""
import copy
from typing import NamedTuple

import torch

from decode.changes import REFUSED, check_unchanged
from decode.weights import quantise

DTYPES = torch.float32, torch.bfloat16, torch.float16


class Linear(NamedTuple):
    """
    weight: (n_out, n_in), in the model's dtype, or int8. scale: float32 (n_out,) of int8 rows, otherwise None. bias:
    (n_out,) or None. dtype: the model's, of the numbers that are multiplied; sums are float32.
    """
    weight: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None
    dtype: torch.dtype


class Norm(NamedTuple):
    """weight: (n,). bias: (n,) or None. rms: does it leave the mean as it is?"""
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    rms: bool


class Layer(NamedTuple):
    """The weights of one block. gate, q_norm and k_norm are None where the model has none."""
    ln_1: Norm
    c_attn: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    attn_proj: Linear
    ln_2: Norm
    c_fc: Linear
    c_gate: Linear | None
    mlp_proj: Linear


class GPUWeights:
    """
    config: a copy of the model's. dtype: of the model, in which all products are computed, with sums in float32.
    wte, wpe: the embeddings; wpe is None without learned positions. layers, ln_f, lm_head: as `Layer`, `Norm`,
    `Linear`.

    ValueError unless the model is model.py's GPT, unchanged, with contiguous weights of one dtype in DTYPES.
    """

    def __init__(self, model, weights):
        check_unchanged(model)
        self.dtype, t = model.lm_head.weight.dtype, model.transformer
        for name, p in model.named_parameters():
            if p.dtype not in DTYPES or p.dtype is not self.dtype or not p.is_contiguous():
                raise ValueError(f"the GPU executor reads contiguous weights of one dtype, float32, bfloat16 or "
                                 f"float16, but {name} is {p.dtype} with strides {p.stride()}: {REFUSED}")
        linear = rounded_linear if weights == 'int8' else linear_of
        self.config = copy.copy(model.config)
        self.wte, self.wpe = t.wte.weight.detach(), t.wpe.weight.detach() if 'wpe' in t else None
        self.layers = []
        for ln_1, attn, ln_2, mlp in [(block.ln_1, block.attn, block.ln_2, block.mlp) for block in t.h]:
            q_norm, k_norm = (norm_of(getattr(attn, name, None)) for name in ('q_norm', 'k_norm'))
            self.layers.append(Layer(norm_of(ln_1), linear(attn.c_attn), q_norm, k_norm, linear(attn.c_proj),
                                     norm_of(ln_2), linear(mlp.c_fc), linear(getattr(mlp, 'c_gate', None)),
                                     linear(mlp.c_proj)))
        self.ln_f, self.lm_head = norm_of(t.ln_f), linear(model.lm_head)

    def nbytes(self):
        """Bytes that a step reads, embeddings left out."""
        linears = [each for layer in self.layers for each in layer if isinstance(each, Linear)] + [self.lm_head]
        return sum(t.nbytes for linear in linears for t in linear[:3] if t is not None)


def detached(parameter):
    return None if parameter is None else parameter.detach()


def norm_of(module):
    if module is None:
        return None
    return Norm(module.weight.detach(), detached(getattr(module, 'bias', None)), module.eps,
                isinstance(module, torch.nn.RMSNorm))


def linear_of(module):
    return None if module is None else Linear(module.weight.detach(), None, detached(module.bias), module.weight.dtype)


def rounded_linear(module):
    """A linear in int8 with a scale for each row, as the CPU's executor rounds it."""
    if module is None:
        return None
    whole, scale = quantise(module.weight.detach().float())
    return Linear(whole.to(torch.int8), scale, detached(module.bias), module.weight.dtype)
