"""
One step of a GPT on a GPU: which function follows which, on tensors that are allocated once.

`functions` is the module `kernels`, or `plain`. Activations are of the model's dtype; the residual stream x is float32,
so that it is rounded nowhere.
"""
import torch

from decode.gpu.inputs import Geometry, KVLayer
from positions import alibi_slopes, rotary_frequencies


class Step:
    """
    The step of a model for up to n_rows rows. weights: `GPUWeights`. columns: of the slot table. kv_caches: the
    `KVArrays` that it reads and writes. ValueError if these are not for the model, or not for a GPU.
    """

    def __init__(self, functions, weights, columns, kv_caches, n_rows):
        c, device, dtype = weights.config, weights.wte.device, weights.dtype
        self.functions, self.weights, self.kv_caches = functions, weights, kv_caches
        if kv_caches.shape != (c.n_layer, c.n_kv_head, c.head_dim):
            raise ValueError(f"kv_caches has (layers, heads, head_dim) {kv_caches.shape}, and the model "
                             f"{(c.n_layer, c.n_kv_head, c.head_dim)}: make them for this model")
        self.layers = [kv_layer(tensors) for tensors in kv_caches.tensors]
        slopes = alibi_slopes(c.n_head, torch.float32, device) if c.position == 'alibi' else None
        self.geometry = Geometry(c.n_head, c.n_kv_head, c.head_dim, c.window, c.n_sink, columns, slopes,
                                 kv_caches.slot_stride, kv_caches.head_stride,
                                 group_of(kv_caches))
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

    def logits_of(self, inputs):
        """The logits of all rows."""
        self.hidden_states(inputs)
        self.head(self.x, len(inputs.tokens))

    def draw(self, inputs, draws):
        """A whole step in which each row draws its next token."""
        self.logits_of(inputs)
        self.functions.draw(self.logits[:len(inputs.tokens)], draws, inputs)


def group_of(kv_caches):
    """How many numbers of a head share a scale, 0 if the numbers are not int8."""
    tensors = kv_caches.tensors[0]
    return kv_caches.shape[2] // tensors[2].size(-1) if len(tensors) == 4 else 0


def kv_layer(tensors):
    """The `KVLayer` of the tensors of a layer of `KVArrays`."""
    flat = [t.as_strided((t.untyped_storage().nbytes() // t.element_size() - t.storage_offset(),), (1,))
            for t in tensors]
    return KVLayer(*flat) if len(flat) == 4 else KVLayer(*flat, None, None)
