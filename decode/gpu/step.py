"""
One step of a GPT on a GPU, of Triton kernels; which of them follow each other.

R rows are new tokens. A row with sequence -1 is padding: it writes no keys and values, sees none, and nothing reads its
results. Activations are of the model's dtype; the residual stream x is float32, so that it is rounded nowhere.
"""
import torch

from positions import alibi_slopes, rotary_angles, rotary_frequencies


class Step:
    """
    The step of a model for up to n_rows rows. functions: of `executor.kernels`, or others that compute the same.
    layers: a `kvcache.storage.Layer` for each of the model's, otherwise it is a ValueError. columns: of the slot table.

    x: float32 (n_rows, n_embd), what `hidden_states` has computed. logits: float32 (n_rows, vocab_size), of `head`.
    slopes: float32 (n_head,) of ALiBi, or None. ended: int32 zeros, counters of a kernel, which leaves zeros: of each
    row, of its heads, or of the tiles of a narrow linear.
    """

    def __init__(self, functions, model, columns, layers, n_rows):
        self.functions, self.model, self.config = functions, model, model.config
        self.columns, self.layers = columns, layers
        c, device, n_numbers = self.config, model.lm_head.weight.device, layers[0].k.data.numel()
        shape = c.n_layer, c.n_kv_head * layers[0].n_slots * c.head_dim
        if shape != (len(layers), n_numbers):
            raise ValueError(f"there is room for {len(layers)} layers with {n_numbers} numbers of keys each, and the "
                             f"model has {shape}: make the slots for this model")
        self.slopes = alibi_slopes(c.n_head, torch.float32, device) if c.position == 'alibi' else None
        self.frequencies = rotary_frequencies(c.head_dim, c.rope_theta, c.rope_scaling).to(device)
        self.x, self.logits = (torch.zeros(n_rows, n, dtype=torch.float32, device=device)
                               for n in (c.n_embd, c.vocab_size))
        # a tile has 8 rows and 16 numbers at least
        self.ended = torch.zeros((n_rows + 8) * max(c.n_head, 64), dtype=torch.int32, device=device)

    def hidden_states(self, inputs, apart=False):
        """Compute x of the rows of `StepInputs`, after all layers. apart: each row is of another sequence."""
        run, c, t, R = self.functions, self.config, self.model.transformer, len(inputs.tokens)
        x, angles = self.x[:R], self.angles(inputs.positions)
        of_x, qkv, y, hidden = (self.activations(R, n) for n in (
            c.n_embd, (c.n_head + 2 * c.n_kv_head) * c.head_dim, c.n_head * c.head_dim, c.n_inner))
        q = self.activations(R, 1 if angles is None else angles.size(1), c.n_head, c.head_dim)
        parts = x.new_empty(R, self.columns.n_splits, c.n_head, c.head_dim + 2)
        run.embed(inputs, t.wte.weight, t.wpe.weight if 'wpe' in t else None, x)
        for block, layer in zip(t.h, self.layers):
            attn, mlp = block.attn, block.mlp
            run.normed(x, of_x, block.ln_1, c.norm == 'rms')
            run.linear(of_x, qkv, attn.c_attn, self.ended)
            run.attend(self, attn, layer, inputs, qkv, q, y, parts, angles, apart)
            run.linear(y, x, attn.c_proj, self.ended, add=True)
            run.normed(x, of_x, block.ln_2, c.norm == 'rms')
            how = dict(activation=c.gelu) if c.mlp == 'gelu' else dict(gate=mlp.c_gate)
            run.linear(of_x, hidden, mlp.c_fc, self.ended, **how)
            run.linear(hidden, x, mlp.c_proj, self.ended, add=True)

    def head(self, x):
        """Compute the logits of some rows of x."""
        of_x = self.activations(*x.shape)
        self.functions.normed(x, of_x, self.model.transformer.ln_f, self.config.norm == 'rms')
        self.functions.linear(of_x, self.logits[:len(x)], self.model.lm_head, self.ended)

    def draw(self, inputs):
        """A whole step in which each row draws the next token of another sequence."""
        self.hidden_states(inputs, apart=True)
        self.head(self.x[:len(inputs.tokens)])
        self.functions.draw(self.logits[:len(inputs.tokens)], inputs, self.ended)

    def activations(self, *shape):
        return self.x.new_empty(shape, dtype=self.model.lm_head.weight.dtype)

    def angles(self, positions):
        """Rotary cosines and sines, float32 (R, kinds, 2, head_dim / 2), or None. Queries of kind 1 meet sinks."""
        c = self.config
        if c.position != 'rope':
            return None
        kinds = [positions, positions.clamp(max=c.n_sink + c.window - 1)][:1 + (c.n_sink > 0)]
        radians = rotary_angles(torch.stack(kinds, 1), self.frequencies)
        return torch.stack((radians.cos(), radians.sin()), 2).float()
