"""
The functions of a step of decode/gpu/ that are Triton kernels, in PyTorch with sums in float64: the judge of the
kernels, and their stand-in where the rest of the step is tested. `Direct` stands for the queue of a device.
"""
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from decode.draw import SETTING_NAMES, DrawSettings
from decode.draw import draw as defined
from decode.gpu.queue import Queue
from decode.gpu.tables import BIASED, BROKEN, IN_PROMPT, IS_STOP, NOTHING, STOPS
from kvcache.storage import dequantise, quantise
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


def store(step, attn, layer, inputs, qkv, q, angles):
    c, R = step.config, len(qkv)
    queries, keys, values = qkv.view(R, -1, c.head_dim).float().split([c.n_head, c.n_kv_head, c.n_kv_head], dim=1)
    if hasattr(attn, 'q_norm'):
        queries, keys = (F.rms_norm(x.double(), [c.head_dim], norm.weight.double(), norm.eps).float()
                         for x, norm in ((queries, attn.q_norm), (keys, attn.k_norm)))
    for kind in range(q.size(1)):
        q[:, kind] = queries if angles is None else rotate(queries, *angles[:, kind, :, None].unbind(1))
    if angles is not None:
        keys = rotate(keys, *angles[:, 0, :, None].unbind(1))
    rows = (inputs.sequences >= 0).nonzero()[:, 0]
    slots = slots_of(inputs, step, inputs.sequences[rows].long(), inputs.positions[rows])
    for new, stored in (keys, layer.k), (values, layer.v):
        new = new[rows].to(q.dtype).transpose(0, 1)
        if stored.scale is not None:
            new, stored.scale[:, slots] = quantise(new.float(), 8, stored.group)
        stored.data[:, slots] = new.to(stored.data.dtype)


def slots_of(inputs, step, sequences, positions):
    return inputs.slot_table[sequences, step.columns.column(positions, step.config.n_sink)].long()


def attend(step, attn, layer, inputs, qkv, q, y, parts, angles, apart):
    store(step, attn, layer, inputs, qkv, q, angles)
    c = step.config
    y.zero_()
    for row in (inputs.sequences >= 0).nonzero()[:, 0].tolist():
        sequence, position = inputs.sequences[row], inputs.positions[row]
        seen = torch.arange(int(position) + 1, device=position.device)
        seen = seen[visible(position, seen, c.window, c.n_sink)]
        slots = slots_of(inputs, step, sequence, seen)
        k, v = (read(stored, slots).to(q.dtype).double().repeat_interleave(c.n_head // c.n_kv_head, 0)
                for stored in (layer.k, layer.v))
        of_key = torch.where(seen < c.n_sink, q.size(1) - 1, 0)
        scores = torch.einsum('khd,hkd->hk', q[row, of_key].double(), k) * c.head_dim ** -0.5
        if step.slopes is not None:
            farthest = torch.where(seen < c.n_sink, c.n_sink + c.window - 1, position)
            scores -= step.slopes[:, None] * (position.clamp(max=farthest) - seen)
        y[row] = torch.einsum('hk,hkd->hd', scores.softmax(-1), v).flatten().to(y.dtype)


def read(stored, slots):
    """What is stored in slots (K,), float32 (n_kv_head, K, head_dim)."""
    rows = stored.data[:, slots].float()
    return rows if stored.scale is None else dequantise(rows, stored.scale[:, slots], 8)


def draw(logits, inputs, ended=None):
    """As `decode.draw.draw` does, which is the definition."""
    for row in range(len(logits)):
        step, number, left, sequence = (int(getattr(inputs, name)[row])
                                        for name in ('step', 'numbers', 'left', 'sequences'))
        inputs.step[row] += 1
        inputs.drawn[step, row] = NOTHING
        if not left:
            continue
        inputs.broken[row] |= int(not (logits[row] < torch.inf).all())
        settings = settings_of(inputs, row)
        token = inputs.tokens[row] = int(defined(logits[row:row + 1], [settings], [number]))
        stops = token in settings.stop_ids
        inputs.drawn[step, row] = BROKEN if inputs.broken[row] else token + STOPS * stops
        inputs.numbers[row] += 1
        inputs.marks[sequence, token] += 1
        inputs.positions[row] += 1
        inputs.left[row] = 0 if stops else left - 1
        if not inputs.left[row]:
            inputs.sequences[row] = -1


def settings_of(inputs, row):
    """The `DrawSettings` that a row stands for."""
    sequence, values = inputs.sequences[row], inputs.settings[row].tolist()
    marks, biases = inputs.marks[sequence].cpu(), inputs.biases[sequence].tolist() if values[BIASED] else []
    found = DrawSettings(len(marks), int(inputs.seeds[row]), (marks & IS_STOP).nonzero()[:, 0].tolist(),
                         int(inputs.min_tokens[row]), enumerate(biases),
                         **dict(zip(SETTING_NAMES, values)) | dict(top_k=int(values[1])))
    found.counts, found.in_prompt = (marks & (IS_STOP - 1)).numpy(), ((marks & IN_PROMPT) > 0).numpy()
    return found


class Direct(Queue):
    """A queue without CUDA: everything is done at once, and a graph runs its step again."""

    def __init__(self):
        super().__init__('cpu')

    def record(self, step, other=None):
        return SimpleNamespace(replay=step)

    def pinned(self, tensor):
        return tensor.pin_memory() if torch.cuda.is_available() else tensor.clone()

    def event(self):
        return self

    def synchronize(self):
        """What runs on a CPU is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
