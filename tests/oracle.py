"""
An independent judge of the caches: texts of one GPT in float64, as lists of keys and values that were never stored in
slots. It knows no blocks, rings, cells or masks, and computes a token after the other.
"""
import copy
import math

import torch
import torch.nn.functional as F
from plain_gpt import alibi_slopes, frequencies, rms, rope_of


class Oracle:
    """
    texts: {name: [positions' keys and values of each layer]}. Keys are kept before their rotation, so that a shift
    changes positions only.
    """

    def __init__(self, model, source=None, windows=None):
        """
        source: for each layer the one whose keys and values it reads. windows: for each layer how many positions it
        sees, 0 for all.
        """
        self.config, self.texts, layers = model.config, {}, range(model.config.n_layer)
        self.source, self.windows = source or layers, windows or [model.config.window for _ in layers]
        self.weights = {name: p.detach().double() for name, p in model.state_dict().items()}

    def new(self, name):
        self.texts[name] = [([], []) for _ in range(self.config.n_layer)]

    def fork(self, name, new):
        self.texts[new] = copy.deepcopy(self.texts[name])

    def truncate(self, name, n):
        for stored in (each for layer in self.texts[name] for each in layer):
            del stored[n:]

    def shift(self, name, n_keep, n):
        for stored in (each for layer in self.texts[name] for each in layer):
            del stored[n_keep:n_keep + n]

    def free(self, name):
        del self.texts[name]

    @torch.no_grad()
    def feed(self, name, tokens):
        """Logits (vocab_size,) behind the last of these tokens; all but the first layer's inputs depend on them."""
        for token in tokens:
            x = self.step(self.texts[name], token)
        return self.linear(self.norm(x, 'transformer.ln_f'), 'lm_head')

    def step(self, layers, token):
        c, position = self.config, len(layers[0][0])
        x = self.weights['transformer.wte.weight'][token]
        x = x + self.weights['transformer.wpe.weight'][position] if c.position == 'learned' else x
        for number, (keys, values) in enumerate(layers):
            h = f'transformer.h.{number}.'
            qkv = self.linear(self.norm(x, h + 'ln_1'), h + 'attn.c_attn').view(-1, c.head_dim)
            q, k, v = qkv.split([c.n_head, c.n_kv_head, c.n_kv_head])
            if c.qk_norm:
                q, k = (rms(x, self.weights[f'{h}attn.{name}.weight'], c.norm_eps) for x, name in (
                    (q, 'q_norm'), (k, 'k_norm')))
            keys.append(k)
            values.append(v)
            y = self.attend(q, *layers[self.source[number]], position, self.windows[number])
            x = x + self.linear(y.flatten(), h + 'attn.c_proj')
            inner = self.norm(x, h + 'ln_2')
            y = self.linear(inner, h + 'mlp.c_fc')
            if c.mlp == 'swiglu':
                gate = self.linear(inner, h + 'mlp.c_gate')
                y = gate * torch.sigmoid(gate) * y
            else:
                y = F.gelu(y, approximate=c.gelu)
            x = x + self.linear(y, h + 'mlp.c_proj')
        return x

    def attend(self, q, keys, values, position, window):
        """The query at a position, (n_head, head_dim), over the keys that it sees."""
        c = self.config
        seen = [p for p in range(position + 1) if not window or position - p < window or p < c.n_sink]
        k, v = (torch.stack([stored[p] for p in seen]) for stored in (keys, values))  # (K, n_kv_head, head_dim)
        group = torch.arange(c.n_head) // (c.n_head // c.n_kv_head)
        distance = torch.tensor([self.distance(position, p) for p in seen])
        if c.position == 'rope':
            q, k = self.as_complex(q), self.as_complex(k)
            turn = torch.exp(1j * distance[:, None, None] * frequencies(q.size(-1), *rope_of(c)))
            scores = (q * turn * k[:, group].conj()).sum(-1).real
        else:
            scores = (q * k[:, group]).sum(-1)  # (K, n_head)
        scores = scores / math.sqrt(c.head_dim)
        if c.position == 'alibi':
            scores = scores - torch.tensor(alibi_slopes(c.n_head)) * distance[:, None]
        return (scores.softmax(0)[..., None] * v[:, group]).sum(0)

    def distance(self, position, key):
        """How far away a key is: sinks are no further than in a text of n_sink + window tokens."""
        c = self.config
        return (min(position, c.n_sink + c.window - 1) if key < c.n_sink else position) - key

    @staticmethod
    def as_complex(x):
        return torch.complex(*x.chunk(2, dim=-1))

    def linear(self, x, name):
        return F.linear(x, self.weights[name + '.weight'], self.weights.get(name + '.bias'))

    def norm(self, x, name):
        if self.config.norm == 'rms':
            return rms(x, self.weights[name + '.weight'], self.config.norm_eps)
        return F.layer_norm(x, x.shape[-1:], self.weights[name + '.weight'], self.weights.get(name + '.bias'))
