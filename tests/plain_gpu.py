"""
The functions of a step of decode/gpu/ that are Triton kernels, in PyTorch with sums in float64: the judge of the
kernels, and their stand-in where the rest of the step is tested. `Direct` stands for the queue of a device.
"""
import torch
import torch.nn.functional as F

from decode.draw import NAMES, DrawSettings
from decode.draw import draw as defined
from decode.gpu.queue import Queue
from decode.gpu.tables import BIASED, IN_PROMPT, IS_STOP
from kvcache.storage import quantise
from positions import rotate, visible


def embed(inputs, weight, positions_weight, x):
    x.copy_(F.embedding(inputs.tokens, weight))
    if positions_weight is not None:
        x += F.embedding(inputs.positions.clamp(max=len(positions_weight) - 1), positions_weight)


def normed(x, out, norm, rms):
    weight, bias = (p if p is None else p.double() for p in (norm.weight, getattr(norm, 'bias', None)))
    x = x.double()
    out.copy_(F.rms_norm(x, weight.shape, weight, norm.eps) if rms else F.layer_norm(x, weight.shape, weight, bias,
                                                                                     norm.eps))


def linear(x, out, linear, ended, activation='', gate=None, add=False):
    of_x, of_gate = (F.linear(x.double(), *(p if p is None else p.double() for p in (each.weight, each.bias)))
                     if each else 1 for each in (linear, gate))
    if activation:
        of_x = F.gelu(of_x, approximate=activation)
    if gate:
        of_x = F.silu(of_gate) * of_x
    out.copy_(out + of_x if add else of_x)


def store(qkv, q, angles, attn, kv, inputs, geometry):
    g, R = geometry, len(qkv)
    queries, keys, values = qkv.view(R, -1, g.head_dim).float().split([g.n_head, g.n_kv_head, g.n_kv_head], dim=1)
    if hasattr(attn, 'q_norm'):
        queries, keys = (F.rms_norm(x.double(), [g.head_dim], norm.weight.double(), norm.eps).float()
                         for x, norm in ((queries, attn.q_norm), (keys, attn.k_norm)))
    for kind in range(q.size(1)):
        q[:, kind] = queries if angles is None else rotate(queries, *angles[:, kind, :, None].unbind(1))
    if angles is not None:
        keys = rotate(keys, *angles[:, 0, :, None].unbind(1))
    rows = (inputs.sequences >= 0).nonzero()[:, 0]
    slots = inputs.slot_table[inputs.sequences[rows].long(), g.columns.column(inputs.positions[rows], g.n_sink)]
    for new, data, scale in (keys, kv.k, kv.k_scale), (values, kv.v, kv.v_scale):
        new = new[rows].to(q.dtype)
        codes, scales = (new, None) if scale is None else quantise(new.float(), 8, g.group)
        data[places(slots, g, g.head_dim)] = codes.to(data.dtype)
        if scale is not None:
            scale[places(slots, g, g.head_dim // g.group)] = scales


def places(slots, g, n):
    """Where the n numbers or scales of each head in slots (K,) are, int64 (K, n_kv_head, n)."""
    at = slots.long()[:, None] + torch.arange(g.n_kv_head, device=slots.device) * g.n_slots
    return at[..., None] * n + torch.arange(n, device=slots.device)


def attend(qkv, q, y, parts, ended, angles, attn, kv, inputs, geometry, apart):
    store(qkv, q, angles, attn, kv, inputs, geometry)
    g = geometry
    y.zero_()
    for row, sequence in enumerate(inputs.sequences.tolist()):
        if sequence < 0:
            continue
        position, seen = inputs.positions[row], seen_at(inputs.positions[row], g)
        slots = inputs.slot_table[sequence, g.columns.column(seen, g.n_sink)]
        k, v = (read(data, scale, slots, g).to(q.dtype).double().repeat_interleave(g.n_head // g.n_kv_head, 1)
                for data, scale in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)))
        of_key = torch.where(seen < g.n_sink, q.size(1) - 1, 0)
        scores = torch.einsum('khd,khd->hk', q[row, of_key].double(), k) * g.head_dim ** -0.5
        if g.slopes is not None:
            farthest = torch.where(seen < g.n_sink, g.n_sink + g.window - 1, position)
            scores -= g.slopes[:, None] * (position.clamp(max=farthest) - seen)
        y[row] = torch.einsum('hk,khd->hd', scores.softmax(-1), v).flatten().to(y.dtype)


def seen_at(position, g):
    """The positions of the keys that a row at `position` sees."""
    keys = torch.arange(int(position) + 1, device=position.device)
    return keys[visible(position, keys, g.window, g.n_sink)]


def read(data, scale, slots, g):
    """What is stored in slots (K,), float32 (K, n_kv_head, head_dim)."""
    rows = data[places(slots, g, g.head_dim)].float()
    if scale is None:
        return rows
    return (rows.unflatten(-1, (-1, g.group)) * scale[places(slots, g, g.head_dim // g.group)][..., None]).flatten(-2)


def draw(logits, inputs):
    """As `decode.draw.draw` does, which is the definition."""
    for row in range(len(logits)):
        step, number, left, sequence = (int(getattr(inputs, name)[row])
                                        for name in ('step', 'numbers', 'left', 'sequences'))
        inputs.step[row] += 1
        inputs.drawn[step, row] = -1
        if not left:
            continue
        inputs.broken[row] |= int(not (logits[row] < torch.inf).all())
        settings = settings_of(inputs, row)
        token = inputs.drawn[step, row] = inputs.tokens[row] = int(defined(logits[row:row + 1], [settings], [number]))
        inputs.numbers[row] += 1
        inputs.marks[sequence, token] += 1
        inputs.positions[row] += 1
        inputs.left[row] = 0 if token in settings.stop_ids else left - 1
        if not inputs.left[row]:
            inputs.sequences[row] = -1


def settings_of(inputs, row):
    """The `DrawSettings` that a row stands for."""
    sequence, values = inputs.sequences[row], inputs.settings[row].tolist()
    marks, biases = inputs.marks[sequence].cpu(), inputs.biases[sequence].tolist() if values[BIASED] else []
    found = DrawSettings(len(marks), int(inputs.seeds[row]), (marks & IS_STOP).nonzero()[:, 0].tolist(),
                         int(inputs.min_tokens[row]), enumerate(biases),
                         **dict(zip(NAMES, values)) | dict(top_k=int(values[1])))
    found.counts, found.in_prompt = (marks & (IS_STOP - 1)).numpy(), ((marks & IN_PROMPT) > 0).numpy()
    return found


class Direct(Queue):
    """A queue without CUDA: everything is done at once, and a graph runs its step again."""

    def __init__(self):
        super().__init__('cpu')

    def record(self, step):
        return Again(step)

    def pinned(self, tensor):
        return tensor.clone()

    def land(self, pairs):
        for target, source in pairs:
            target.copy_(source)
        return self

    def synchronize(self):
        """Nothing is left to wait for."""


class Again:
    """In the place of a graph."""

    def __init__(self, replay):
        self.replay = replay
