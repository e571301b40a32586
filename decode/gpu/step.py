"""
One step of a GPT on a GPU: which function follows which, on tensors that are allocated once and keep their addresses.

R rows are new tokens. A row with sequence -1 is padding: it writes no keys and values, sees none, and nothing reads its
results, which are numbers. Activations are of the model's dtype; the residual stream x is float32, so that it is
rounded nowhere.
"""
from typing import NamedTuple

import torch

from decode.gpu.slots import Columns
from positions import alibi_slopes, rotary_frequencies


class StepInputs(NamedTuple):
    """
    tokens, positions: int64 (R,). sequences: int32 (R,), the row of the slot table of each new token's sequence, -1 for
    padding. slot_table: int32 (S, n_columns), see `Columns`.
    """
    tokens: torch.Tensor
    positions: torch.Tensor
    sequences: torch.Tensor
    slot_table: torch.Tensor

    def rows(self, n):
        """Of the first n rows."""
        return StepInputs(self.tokens[:n], self.positions[:n], self.sequences[:n], self.slot_table)


class KVLayer(NamedTuple):
    """
    The keys and values of one layer, in the dtype in which they are stored. Those of a head are at slot * slot_stride +
    head * head_stride in k and v, which are views of one dimension; both strides are multiples of head_dim. The scales
    of int8, float32, are those of `group` numbers each, at the same places divided by it; None otherwise.
    """
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


class Geometry(NamedTuple):
    """
    What attention and the store of keys and values go by. window, n_sink: of the model. slopes: float32 (n_head,) of
    ALiBi, or None. group: numbers of a head that share a scale in int8, 0 for other types.
    """
    n_head: int
    n_kv_head: int
    head_dim: int
    window: int
    n_sink: int
    columns: Columns
    slopes: torch.Tensor | None
    slot_stride: int
    head_stride: int
    group: int


class Step:
    """
    The step of a model for up to n_rows rows. functions: of `executor.kernels`, or others that compute the same.
    weights: `GPUWeights`. columns: of the slot table. layers: a `KVLayer` for each layer, which it reads and writes, of
    n_slots slots. group: see `Geometry`. ValueError if these are not for the model.
    """

    def __init__(self, functions, weights, columns, layers, n_slots, group, n_rows):
        c, device, dtype = weights.config, weights.wte.device, weights.dtype
        self.functions, self.weights, self.layers = functions, weights, layers
        shape, n_numbers = (c.n_layer, c.n_kv_head * n_slots * c.head_dim), layers[0].k.numel()
        if shape != (len(layers), n_numbers):
            raise ValueError(f"there is room for {len(layers)} layers with {n_numbers} numbers of keys each, and the "
                             f"model has {shape}: make the slots for this model")
        slopes = alibi_slopes(c.n_head, torch.float32, device) if c.position == 'alibi' else None
        self.geometry = Geometry(c.n_head, c.n_kv_head, c.head_dim, c.window, c.n_sink, columns, slopes, c.head_dim,
                                 c.head_dim * n_slots, group)
        kinds = 2 if c.position == 'rope' and c.n_sink else 1
        self.activation = '' if c.mlp == 'swiglu' else 'tanh' if c.gelu == 'tanh' else 'gelu'

        def empty(*shape, dtype=dtype):
            return torch.zeros(n_rows, *shape, dtype=dtype, device=device)
        self.x, self.qkv = empty(c.n_embd, dtype=torch.float32), empty((c.n_head + 2 * c.n_kv_head) * c.head_dim)
        self.q, self.y = empty(kinds, c.n_head, c.head_dim), empty(c.n_head * c.head_dim)
        self.hidden, self.logits = empty(c.n_inner), empty(c.vocab_size, dtype=torch.float32)
        self.wanted = empty(c.n_embd, dtype=torch.float32)  # rows of x whose logits are wanted
        self.parts = empty(columns.n_splits, c.n_head, c.head_dim + 2, dtype=torch.float32)  # of attention
        self.angles = self.frequencies = None
        if c.position == 'rope':
            self.angles = empty(kinds, 2, c.head_dim // 2, dtype=torch.float32)
            self.frequencies = rotary_frequencies(c.head_dim, c.rope_theta, c.rope_scaling).to(device)

    def hidden_states(self, inputs):
        """x of the rows of `StepInputs`, behind all layers."""
        run, w, R, g = self.functions, self.weights, len(inputs.tokens), self.geometry
        x, qkv, q, y, hidden, parts = (t[:R] for t in (self.x, self.qkv, self.q, self.y, self.hidden, self.parts))
        angles = None if self.angles is None else self.angles[:R]
        run.embed(inputs, w, x)
        if angles is not None:
            run.turn(inputs, self.frequencies, g.n_sink + g.window - 1, angles)
        for layer, kv in zip(w.layers, self.layers):
            run.linear(x, qkv, layer.c_attn, layer.ln_1)
            run.store(qkv, q, angles, layer, kv, inputs, g)
            run.attend(q, y, parts, kv, inputs, g)
            run.linear(y, x, layer.attn_proj, add=True)
            run.linear(x, hidden, layer.c_fc, layer.ln_2, layer.c_gate, self.activation)
            run.linear(hidden, x, layer.mlp_proj, add=True)

    def head(self, x, R):
        """The logits, float32 (R, vocab_size), of R rows of x."""
        self.functions.linear(x[:R], self.logits[:R], self.weights.lm_head, self.weights.ln_f)

    def draw(self, inputs, draws):
        """A whole step in which each row draws its next token."""
        R = len(inputs.tokens)
        self.hidden_states(inputs)
        self.head(self.x, R)
        self.functions.draw(self.logits[:R], draws, inputs)
