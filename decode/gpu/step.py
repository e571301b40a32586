"""
One step of a GPT on a GPU: PyTorch's functions, and Triton kernels that store keys and values, attend and draw.

R rows are new tokens. A row with sequence -1 is padding: it writes no keys and values, sees none, and nothing reads its
results. Activations are of the model's dtype; the residual stream x is float32, so that it is rounded nowhere.

A linear takes HEIGHT rows at a time: then the library sees products of one shape, and takes one algorithm for them, so
the bits of a row depend neither on its place nor on how many others there are.
"""
from collections import namedtuple

import torch
import torch.nn.functional as F

from decode.changes import norms_of
from positions import alibi_slopes, rotary_angles, rotary_frequencies

HEIGHT = 64


class KVLayer(namedtuple('KVLayer', 'k v k_scale v_scale')):
    """
    The keys and values of one layer, as they are stored (n_kv_head, n_slots, head_dim), in views of one dimension. The
    scales of int8, float32, are those of `group` numbers each, at the same places divided by it; None otherwise.
    """

    @classmethod
    def of(cls, layer):
        """Of a `kvcache.storage.Layer`."""
        stored = layer.k.data, layer.v.data, layer.k.scale, layer.v.scale
        return cls(*(None if t is None else t.view(-1) for t in stored))


class Geometry(namedtuple('Geometry', 'n_head n_kv_head head_dim window n_sink columns slopes n_slots group')):
    """
    What attention and the store of keys and values go by. window, n_sink: of the model. columns: of the slot table.
    slopes: float32 (n_head,) of ALiBi, or None. n_slots, group: see `KVLayer`; group is 0 for other types than int8.
    """


class Step:
    """
    The step of a model for up to n_rows rows. functions: of `executor.kernels`, or others that compute the same.
    layers: `kvcache.storage.Layer`s, of which it keeps the shape. columns: of the slot table. height: the most rows of
    a linear. ValueError if these are not for the model.

    x: float32 (n_rows, n_embd), what `hidden_states` has computed. logits: float32 (n_rows, vocab_size), of `head`.
    """

    def __init__(self, functions, model, columns, layers, n_rows, height):
        self.functions, self.model, self.config, self.height = functions, model, model.config, height
        c, device, first = self.config, model.lm_head.weight.device, layers[0].k
        shape, n_numbers = (c.n_layer, c.n_kv_head * layers[0].n_slots * c.head_dim), first.data.numel()
        if shape != (len(layers), n_numbers):
            raise ValueError(f"there is room for {len(layers)} layers with {n_numbers} numbers of keys each, and the "
                             f"model has {shape}: make the slots for this model")
        slopes = alibi_slopes(c.n_head, torch.float32, device) if c.position == 'alibi' else None
        self.geometry = Geometry(c.n_head, c.n_kv_head, c.head_dim, c.window, c.n_sink, columns, slopes,
                                 layers[0].n_slots, 0 if first.scale is None else first.group)
        self.frequencies = rotary_frequencies(c.head_dim, c.rope_theta, c.rope_scaling).to(device)
        # a norm of float32 takes weights of float32
        self.norms = {norm: [p if p is None else p.detach().float() for p in (norm.weight, getattr(norm, 'bias', None))]
                      for norm in norms_of(model)}
        self.x, self.logits = (torch.zeros(n_rows, n, dtype=torch.float32, device=device)
                               for n in (c.n_embd, c.vocab_size))

    def hidden_states(self, inputs, layers):
        """Compute x of the rows of `StepInputs`, behind all layers. layers: a `KVLayer` for each."""
        run, c, g, t, R = self.functions, self.config, self.geometry, self.model.transformer, len(inputs.tokens)
        x, angles, dtype = self.x[:R], self.angles(inputs.positions), t.wte.weight.dtype
        q = x.new_empty(R, 1 if angles is None else angles.size(1), c.n_head, c.head_dim, dtype=dtype)
        y, parts = x.new_empty(R, c.n_head * c.head_dim, dtype=dtype), x.new_empty(
            R, g.columns.n_splits, c.n_head, c.head_dim + 2)
        x.copy_(F.embedding(inputs.tokens, t.wte.weight))
        if 'wpe' in t:  # a text that has ended may have no next position
            x += F.embedding(inputs.positions.clamp(max=c.block_size - 1), t.wpe.weight)
        for block, kv in zip(t.h, layers):
            run.store(self.linear(self.normed(x, block.ln_1), block.attn.c_attn), q, angles, block.attn, kv, inputs, g)
            run.attend(q, y, parts, kv, inputs, g)
            x += self.linear(y, block.attn.c_proj)
            mlp, of_x = block.mlp, self.normed(x, block.ln_2)
            hidden = self.linear(of_x, mlp.c_fc)
            hidden = mlp.gelu(hidden) if c.mlp == 'gelu' else F.silu(self.linear(of_x, mlp.c_gate)) * hidden
            x += self.linear(hidden, mlp.c_proj)

    def head(self, x):
        """Compute the logits of some rows of x."""
        self.logits[:len(x)] = self.linear(self.normed(x, self.model.transformer.ln_f), self.model.lm_head)

    def draw(self, inputs, layers):
        """A whole step in which each row draws its next token."""
        self.hidden_states(inputs, layers)
        self.head(self.x[:len(inputs.tokens)])
        self.functions.draw(self.logits[:len(inputs.tokens)], inputs)

    def normed(self, x, norm):
        """x behind a norm, in the dtype of the model."""
        weight, bias = self.norms[norm]
        if self.config.norm == 'rms':
            return F.rms_norm(x, weight.shape, weight, norm.eps).to(norm.weight.dtype)
        return F.layer_norm(x, weight.shape, weight, bias, norm.eps).to(norm.weight.dtype)

    def linear(self, x, linear):
        """A linear of x (R, n_in), R a multiple of the height, or less."""
        out, weight = x.new_empty(len(x), linear.out_features), linear.weight.t()
        for rows, of_rows in zip(x.split(self.height), out.split(self.height)):
            if linear.bias is None:
                torch.mm(rows, weight, out=of_rows)
            else:
                torch.addmm(linear.bias, rows, weight, out=of_rows)
        return out

    def angles(self, positions):
        """Rotary cosines and sines, float32 (R, kinds, 2, head_dim / 2), or None. Queries of kind 1 meet sinks."""
        c = self.config
        if c.position != 'rope':
            return None
        kinds = [positions, positions.clamp(max=c.n_sink + c.window - 1)][:1 + (c.n_sink > 0)]
        radians = rotary_angles(torch.stack(kinds, 1), self.frequencies)
        return torch.stack((radians.cos(), radians.sin()), 2).float()
