"""
A page, one HTML file that loads nothing, on which one can watch the cache of a small run step by step:

    KV_DEBUG=page python sample.py --num_samples=1 --start="ROMEO:" --max_new_tokens=60

`recorded` keeps what a traced model (debug_kv_model.py) hands to attention. Each step is also computed a second time
without the cache, to count its multiplications and to compare its logits. What is kept has bounds, see below; with
KV_DEBUG_LAYER=n it is that of layer n alone.
"""
import base64
import json
import os
import sys
from contextlib import contextmanager

import numpy as np
import torch

from positions import positions_in_ring, ring_slots
from whole_file import replacing

PAGE = 'kv_cache.html'  # in the current folder
TEMPLATE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'debug_kv_page.html')
MOST_LAYERS, MOST_HEADS, MOST_CHANNELS = 6, 6, 32
MOST_POSITIONS, MOST_STEPS, MOST_NUMBERS = 256, 256, 2**20  # the page ends where the first of them is reached


@contextmanager
def recorded(model, tokenizer=None):
    """
    Record the first generation in the block, of its batch the first row, and write PAGE at the end. model: a GPT of
    debug_kv_model. tokenizer: without one tokens are shown as numbers. ValueError where the prompt is too long.
    """
    recording = Recording(model)
    try:
        yield
    finally:
        recording.close()
        if recording.frames:
            recording.write(tokenizer)


class Recording:
    """What a traced model does in one generation. frames: a dict for each pass of its layers, as the page reads it."""

    def __init__(self, model):
        self.model, c, only = model, model.config, os.environ.get('KV_DEBUG_LAYER')
        spread = np.linspace(0, c.n_layer - 1, min(c.n_layer, MOST_LAYERS))
        self.layers = [int(only)] if only else spread.astype(int).tolist()
        self.kv_head = [head * c.n_kv_head // c.n_head for head in range(min(c.n_head, MOST_HEADS))]  # of each head
        self.tokens, self.frames, self.masks, self.shape, self.cut = [], [], {}, None, ''
        self.rows, self.numbers = [], []  # keys and values, (layers, heads, 2, channels) each; scores and weights
        self.stored = (), ()              # what the cache has in its slots, and the rows where the page has it
        self.heard, self.products, self.again = [], 0, False
        self.listeners = model, *(block.attn for block in model.transformer.h)
        for listener in self.listeners:
            listener.recording = self
        self.hooks = [module.register_forward_hook(self.multiplies) for module in model.modules()
                      if isinstance(module, torch.nn.Linear)]

    def close(self):
        for listener in self.listeners:
            listener.recording = None
        for hook in self.hooks:
            hook.remove()

    def multiplies(self, linear, inputs, output):
        self.products += inputs[0][0].numel() * linear.out_features

    def begins_pass(self, idx, positions, cache):
        """The layers will compute tokens idx (B, T) at positions (T,). cache: that of the tokens before, or None."""
        if self.again:
            return
        fed, start, end = idx[0].tolist(), int(positions[0]), int(positions[-1]) + 1
        self.tokens[start if cache else len(self.tokens):] = fed if cache or not self.frames else fed[-1:]
        if end > MOST_POSITIONS and not self.frames:
            raise ValueError(f"KV_DEBUG=page shows up to {MOST_POSITIONS} positions, and {end} are computed at once: "
                             "give a shorter prompt")
        n_numbers = sum(map(torch.numel, self.rows + self.numbers))
        if end > MOST_POSITIONS or len(self.frames) == MOST_STEPS or n_numbers > MOST_NUMBERS:
            self.cut = f"The run went on; the page has its first {len(self.frames)} steps."
            self.close()

    def attends(self, layer, q, k, v, mask=None, dropout_p=0.0):
        """What `attend` of model.py is handed."""
        (n_head, T, head_dim), n, inf = q.shape[1:], k.size(2), float('inf')
        if mask is None:
            mask = torch.ones(T, n, dtype=torch.bool, device=q.device).tril(n - T)
        if mask.dtype is torch.bool:
            mask = torch.zeros(mask.shape, device=q.device).masked_fill(~mask, -inf)
        mask = mask.expand(len(q), n_head, T, n)[0]
        self.products += 2 * head_dim * int((mask > -inf).sum())  # q k and p v, for each key that a query sees
        if layer in self.layers and not self.again:
            q, k, v = q[0, :len(self.kv_head), -1:].float(), k[0].float(), v[0].float()
            scores = q @ k[self.kv_head].mT * head_dim ** -0.5 + mask[:len(q), -1:]
            kv = torch.stack((k, v), 2)[:self.kv_head[-1] + 1, ..., :MOST_CHANNELS].transpose(0, 1)
            self.heard.append((kv.cpu(), torch.cat((scores, scores.softmax(-1)), 1).cpu(), (mask[0] > -inf).tolist()))

    def ends_pass(self, positions, cache):
        """The layers have computed tokens at positions (T,). cache: the new one, or None."""
        if self.again:
            return
        (kv, numbers, seen), self.heard, start = zip(*self.heard), [], int(positions[0])
        kv, n = torch.stack(kv, 1), len(kv[0])  # kv: (n, layers, heads, 2, channels)
        (old, old_rows), rows = self.stored if cache else ((), ()), []
        for i in range(n):
            is_kept = i < len(old) and torch.equal(old[i], kv[i])
            rows.append(old_rows[i] if is_kept else len(self.rows))
            self.rows += [] if is_kept else [kv[i]]
        masks = [' '.join(''.join(str(int(key)) for key in query) for query in mask) for mask in seen]
        where = positions_in_ring(positions[-1:], n, self.model.config) if cache else positions
        frame = dict(start=start, n=len(positions), rows=rows, positions=where.tolist(), products=self.products,
                     first=0 if cache else len(self.tokens) - n, at=sum(map(torch.numel, self.numbers)),
                     masks=[self.masks.setdefault(mask, len(self.masks)) for mask in masks])
        if cache:
            self.stored, self.shape, end = (kv, rows), list(cache[0].k_cache.shape), cache[0].cache_pos
            frame['cache'] = start, end, int(ring_slots(torch.tensor(end), self.model.config))
        self.frames.append(frame)
        self.numbers.append(torch.stack(numbers))
        self.products = 0

    def ends_step(self, logits):
        """A step of `generate` ends with these logits (B, 1, vocab_size). It is computed again, without the cache."""
        self.frames[-1]['products'] += self.products
        self.products, self.again, c = 0, True, self.model.config
        seen = self.tokens[-c.block_size:] if c.max_positions == c.block_size else self.tokens
        plain = self.model(torch.tensor([seen], device=logits.device), use_cache=False)[0]
        self.frames[-1] |= dict(without=self.products, apart=f'{(plain[0] - logits[0]).abs().max():.0e}')
        self.products, self.again = 0, False

    def write(self, tokenizer):
        """Write the page, and say so on stderr."""
        def packed(arrays):
            return base64.b64encode(torch.cat([x.flatten() for x in arrays]).numpy().astype('<f2')).decode()
        data = dict(
            config=vars(self.model.config) | dict(n_slots=self.model.config.n_slots), shape=self.shape, cut=self.cut,
            layers=self.layers, kv_head=self.kv_head, n_channels=self.rows[0].size(-1),
            tokens=[tokenizer.decode([token]) if tokenizer else str(token) for token in self.tokens],
            frames=self.frames, masks=list(self.masks), rows=packed(self.rows), numbers=packed(self.numbers))
        with open(TEMPLATE, encoding='utf-8') as f:
            page = f.read().replace('"RUN"', json.dumps(data, separators=(',', ':')).replace('<', '\\u003c'))
        with replacing(PAGE, 'w', encoding='utf-8') as f:
            f.write(page)
        size = f"{len(self.frames)} steps, {len(page) / 1e3:,.0f} kB"
        print(f"page: {PAGE} ({size}). {self.cut}".rstrip(), file=sys.stderr)
