"""
An independent judge of the compiled step: `execute_model` in float64, one sequence after the other, position by
position through the runs. It checks all that the compiled step relies on, and reads no slot that a token does not see.
"""
import math
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from plain_gpt import alibi_slopes

from decode.metadata import KV_GROUP


class ReferenceExecutor:
    """
    A decoder that has a step for caches only. calls: the query_lens of each call. runs: of the last call, for each
    sequence {position: slot} as its runs say. version: grows when the weights were seen to have changed.
    """
    name = 'the reference executor'

    def __init__(self, model):
        self.model, self.version, self.calls, self.runs, self.weights = model, 0, [], [], {}
        self.in_use = 0
        self.notice_changes()

    @contextmanager
    def exclusive_use(self):
        self.in_use += 1
        try:
            yield
        finally:
            self.in_use -= 1

    def notice_changes(self, thorough=False):
        weights = self.model.state_dict()
        if weights.keys() != self.weights.keys() or not all(
                torch.equal(p.double().nan_to_num(7.7), self.weights[name].nan_to_num(7.7))
                for name, p in weights.items()):
            self.weights = {name: p.detach().double().clone() for name, p in weights.items()}
            self.version += 1

    @torch.no_grad()
    def execute_model(self, input_ids, input_positions, kv_caches, input_metadata, n_threads=None):
        m = input_metadata
        self.notice_changes()
        assert input_ids.dtype is torch.int64 and input_ids.is_contiguous() and input_positions.dtype == 'int64'
        assert input_ids.shape == input_positions.shape == (sum(m.query_lens),) and m.wanted is None
        ids = input_ids.split(m.query_lens)
        positions = torch.from_numpy(input_positions).split(m.query_lens)
        self.runs = [self.slots(runs, kv_caches.n_slots) for runs in m.runs]
        self.check(ids, positions)
        self.calls.append(list(m.query_lens))
        logits = torch.stack([self.one(*each, kv_caches) for each in zip(ids, positions, self.runs)]).float()
        kv_caches.finite = bool(logits.isfinite().all())
        return logits

    def slots(self, runs, n_slots):
        """{position: slot} of `Runs`, which are in the order of positions."""
        table = runs.table[:runs.n].tolist()
        assert runs.address == runs.table.ctypes.data and runs.n <= len(runs.table)
        found = {position + i: slot + i for position, slot, n in table for i in range(n)}
        assert sum(n for *_, n in table) == len(found) and list(found) == sorted(found)
        assert all(n > 0 for *_, n in table) and all(0 <= slot < n_slots for slot in found.values())
        return found

    def seen(self, position):
        """The positions that a token sees."""
        c = self.model.config
        first = position - c.window + 1 if c.window else 0
        return [*range(min(c.n_sink, position + 1)), *range(max(c.n_sink, first), position + 1)]

    def check(self, ids, positions):
        """ValueError for what does not fit; nothing has been written."""
        written, c = {}, self.model.config
        for i, (tokens, where, slots) in enumerate(zip(ids, positions, self.runs)):
            if not len(tokens) or tokens.min() < 0 or tokens.max() >= c.vocab_size:
                raise ValueError("token ids are not in the vocabulary")
            if where.tolist() != list(range(where[0], where[0] + len(where))) or where[-1] >= c.max_positions:
                raise ValueError("positions do not follow each other, or are too large")
            seen = {p for q in where.tolist() for p in self.seen(q)}
            if not seen <= slots.keys():
                raise ValueError(f"positions {where.tolist()} see more than the runs have")
            assert len({slots[p] for p in seen}) == len(seen)
            for p in where.tolist():
                if slots[p] in written:
                    raise ValueError("two tokens write one slot")
                written[slots[p]] = i
        for i, (where, slots) in enumerate(zip(positions, self.runs)):
            if any(written.get(slots[p], i) != i for q in where.tolist() for p in self.seen(q)):
                raise ValueError("a sequence sees a slot that another one writes")

    def one(self, ids, positions, slots, arrays):
        """Logits (vocab_size,), float64, of the last of a sequence's new tokens."""
        c, w = self.model.config, self.weights
        x = w['transformer.wte.weight'][ids]
        x = x + w['transformer.wpe.weight'][positions] if c.position == 'learned' else x
        for number, tensors in enumerate(arrays.tensors):
            h = f'transformer.h.{number}.'
            q, k, v = self.linear(self.norm(x, h + 'ln_1'), h + 'attn.c_attn').split(
                [c.n_head * c.head_dim, c.n_kv_head * c.head_dim, c.n_kv_head * c.head_dim], dim=-1)
            q, k, v = (each.unflatten(-1, (-1, c.head_dim)) for each in (q, k, v))  # (T, heads, head_dim)
            new = torch.tensor([slots[p] for p in positions.tolist()])
            self.write(tensors, 0, arrays, new, self.turned(k, positions))
            self.write(tensors, 1, arrays, new, v)
            y = torch.stack([self.attend(q[t], int(p), slots, tensors, arrays) for t, p in enumerate(positions)])
            x = x + self.linear(y.flatten(1), h + 'attn.c_proj')
            y = self.linear(self.norm(x, h + 'ln_2'), h + 'mlp.c_fc')
            x = x + self.linear(F.gelu(y, approximate=c.gelu), h + 'mlp.c_proj')
        return self.linear(self.norm(x[-1], 'transformer.ln_f'), 'lm_head')

    def linear(self, x, name):
        return F.linear(x, self.weights[name + '.weight'], self.weights.get(name + '.bias'))

    def norm(self, x, name):
        return F.layer_norm(x, x.shape[-1:], self.weights[name + '.weight'], self.weights.get(name + '.bias'))

    def turned(self, x, positions):
        """Queries or keys (n, heads, head_dim) turned to positions (n,): pairs of channels as complex numbers."""
        if self.model.config.position != 'rope':
            return x
        a, b = x.chunk(2, dim=-1)
        frequency = self.model.config.rope_theta ** (-torch.arange(a.size(-1), dtype=torch.float64) / a.size(-1))
        z = torch.complex(a, b) * torch.exp(1j * positions[:, None, None] * frequency)
        return torch.cat((z.real, z.imag), dim=-1)

    def attend(self, q, position, slots, tensors, arrays):
        """One query, (n_head, head_dim), over what it sees, a key after the other."""
        c = self.model.config
        seen = torch.tensor(self.seen(position))
        where = torch.tensor([slots[p] for p in seen.tolist()])
        k, v = (self.read(tensors, which, arrays, where) for which in (0, 1))
        group = torch.arange(c.n_head) // (c.n_head // c.n_kv_head)
        last = torch.tensor(position).expand(len(seen))
        if c.n_sink:  # sinks are never further away than in a text of n_sink + window tokens
            last = torch.where(seen < c.n_sink, min(position, c.n_sink + c.window - 1), last)
        turned = self.turned(q.expand(len(seen), -1, -1), last)
        scores = (turned * k[:, group]).sum(-1).T / math.sqrt(c.head_dim)  # (n_head, K)
        if c.position == 'alibi':
            scores = scores - torch.tensor(alibi_slopes(c.n_head)).double()[:, None] * (last - seen)
        return (torch.softmax(scores, -1)[..., None] * v[:, group].transpose(0, 1)).sum(1)

    def addresses(self, arrays, slots):
        """Where the numbers of slots (n,) are in a flat array, (n, n_kv_head, head_dim)."""
        c = self.model.config
        heads = torch.arange(c.n_kv_head)[:, None] * arrays.head_stride + torch.arange(c.head_dim)
        return slots[:, None, None] * arrays.slot_stride + heads

    def write(self, tensors, which, arrays, slots, x):
        at, data = self.addresses(arrays, slots), tensors[which].view(-1)
        if data.dtype is not torch.int8:
            data[at] = x.to(data.dtype)
            return
        groups = x.float().unflatten(-1, (-1, KV_GROUP))
        scale = (groups.abs().amax(-1) / 127).clamp(min=1e-5)
        data[at] = (groups / scale[..., None]).round().clamp(-127, 127).to(torch.int8).flatten(-2)
        tensors[which + 2].view(-1)[at[..., ::KV_GROUP] // KV_GROUP] = scale

    def read(self, tensors, which, arrays, slots):
        at = self.addresses(arrays, slots)
        x = tensors[which].view(-1)[at].double()
        return x if len(tensors) == 2 else x * tensors[which + 2].view(-1)[at // KV_GROUP]
