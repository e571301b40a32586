"""
The functions of a step, in PyTorch: what the Triton kernels compute, to read and to compare with.

All write to tensors that they are given. R rows are new tokens; row r belongs to the sequence in row sequences[r] of
the slot table. A row with sequence -1 is padding: it writes no keys and values, sees none, and nothing reads its
results, which are numbers. The bits of these functions depend on R, as those of PyTorch's matmuls do; the bits of the
kernels do not. These functions cannot be recorded as a graph; the kernels can.
"""
import torch
import torch.nn.functional as F

from decode.draw import draw_alike
from decode.gpu.inputs import FREQUENCY, IN_PROMPT, PRESENCE, REPETITION
from positions import rotary_angles, rotate, visible


def embed(inputs, weights, x):
    """x, float32 (R, n_embd): the embeddings of the tokens, with those of learned positions; zeros for padding."""
    real = (inputs.sequences >= 0).nonzero()[:, 0]  # a sample that ended may have no next position
    x.zero_()
    x[real] = F.embedding(inputs.tokens[real], weights.wte).float()
    if weights.wpe is not None:
        x[real] += F.embedding(inputs.positions[real], weights.wpe).float()


def turn(inputs, frequencies, farthest, angles):
    """
    angles, float32 (R, kinds, 2, head_dim / 2): cosines and sines of the positions; of the second kind, for queries
    that meet sinks, of positions of at most `farthest`. frequencies: float64 (head_dim / 2,).
    """
    for kind, positions in enumerate((inputs.positions, inputs.positions.clamp(max=farthest))[:angles.size(1)]):
        radians = rotary_angles(positions, frequencies)
        angles[:, kind, 0], angles[:, kind, 1] = radians.cos(), radians.sin()


def normed(x, norm):
    """x (..., n) behind a norm, in float32."""
    weight, bias = (None if t is None else t.float() for t in (norm.weight, norm.bias))
    if norm.rms:
        return F.rms_norm(x.float(), weight.shape, weight, norm.eps)
    return F.layer_norm(x.float(), weight.shape, weight, bias, norm.eps)


def linear(x, out, linear, norm=None, gate=None, activation='', add=False):
    """
    out (R, n_out): a `Linear` of x (R, n_in), behind a norm if there is one. activation: 'gelu', 'tanh' (its
    approximation), or '' for none. With a gate, a `Linear` of the same shape, out is silu(gate(x)) * linear(x). add:
    add it to what is in out. x and out are float32 or of the model's dtype.
    """
    x = x if norm is None else normed(x, norm)
    y = product(x, linear)
    if gate is not None:
        y = F.silu(product(x, gate)) * y
    elif activation:
        y = F.gelu(y, approximate='tanh' if activation == 'tanh' else 'none')
    out.add_(y) if add else out.copy_(y)


def product(x, linear):
    """float32 (R, n_out). The numbers of x are rounded to the linear's dtype; those of int8 are whole numbers in it."""
    y = F.linear(x.to(linear.dtype), linear.weight.to(linear.dtype)).float()
    y = y if linear.scale is None else y * linear.scale
    return y if linear.bias is None else y + linear.bias.float()


def store(qkv, q, angles, layer, kv, inputs, geometry):
    """
    Write the queries of a layer to q (R, kinds, n_head, head_dim), and its keys and values to their slots. qkv: (R,
    (n_head + 2 * n_kv_head) * head_dim), of the model's dtype, as q. Behind the norms of queries and keys, both are
    turned by angles, see `turn`; None if the model has no rotary positions: q then has one kind. layer: its weights.
    """
    g, R = geometry, len(qkv)
    heads = qkv.view(R, -1, g.head_dim).float()
    queries, keys, values = heads.split([g.n_head, g.n_kv_head, g.n_kv_head], dim=1)
    if layer.q_norm is not None:
        queries, keys = normed(queries, layer.q_norm), normed(keys, layer.k_norm)
    for kind in range(q.size(1)):
        q[:, kind] = queries if angles is None else rotate(queries, *angles[:, kind, :, None].unbind(1))
    if angles is not None:
        keys = rotate(keys, *angles[:, 0, :, None].unbind(1))
    rows = (inputs.sequences >= 0).nonzero()[:, 0]
    columns = g.columns.column(inputs.positions[rows], g.n_sink)
    slots = inputs.slot_table[inputs.sequences[rows].long(), columns].long()
    heads = torch.arange(g.n_kv_head, device=slots.device)
    at = (slots[:, None] * g.slot_stride + heads * g.head_stride)[..., None]
    for new, data, scale in (keys, kv.k, kv.k_scale), (values, kv.v, kv.v_scale):
        new = new[rows].to(q.dtype)
        if scale is None:
            data[at + torch.arange(g.head_dim, device=at.device)] = new.to(data.dtype)
        else:
            codes, scales = rounded(new.float(), g.group)
            data[at + torch.arange(g.head_dim, device=at.device)] = codes
            scale[at // g.group + torch.arange(g.head_dim // g.group, device=at.device)] = scales


def rounded(x, group):
    """int8 codes (..., D) and a scale for each group of x (..., D), rounded as kvcache/storage.py rounds."""
    groups = x.unflatten(-1, (-1, group))
    scales = (groups.abs().amax(-1) / 127).clamp(min=1e-5)
    return (groups / scales[..., None]).round().clamp(-127, 127).flatten(-2).to(torch.int8), scales


def attend(q, y, parts, kv, inputs, geometry):
    """
    y (R, n_head * head_dim): attention of each row's queries, see `store`, over the keys and values of its sequence up
    to its own position, through the window if there is one. Zeros for padding.
    """
    g = geometry
    y.zero_()
    for row, sequence in enumerate(inputs.sequences.tolist()):
        if sequence < 0:
            continue
        position = inputs.positions[row]
        seen = torch.arange(int(position) + 1, device=q.device)
        seen = seen[visible(position, seen, g.window, g.n_sink)]
        slots = inputs.slot_table[sequence, g.columns.column(seen, g.n_sink)].long()
        k, v = (read(data, scale, slots, g).repeat_interleave(g.n_head // g.n_kv_head, 1).to(q.dtype)
                for data, scale in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)))
        of_key = torch.where(seen < g.n_sink, q.size(1) - 1, 0)
        scores = torch.einsum('khd,khd->hk', q[row, of_key].float(), k.float()) * g.head_dim ** -0.5
        if g.slopes is not None:
            farthest = torch.where(seen < g.n_sink, g.n_sink + g.window - 1, position)
            scores -= g.slopes[:, None] * (position.clamp(max=farthest) - seen)
        y[row] = torch.einsum('hk,khd->hd', scores.softmax(-1), v.float()).flatten().to(y.dtype)


def read(data, scale, slots, g):
    """What is stored in slots (K,), float32 (K, n_kv_head, head_dim)."""
    at = slots[:, None] * g.slot_stride + torch.arange(g.n_kv_head, device=slots.device) * g.head_stride
    rows = data[at[..., None] + torch.arange(g.head_dim, device=at.device)]
    if scale is None:
        return rows.float()
    scales = scale[at[..., None] // g.group + torch.arange(g.head_dim // g.group, device=at.device)]
    return (rows.unflatten(-1, (-1, g.group)) * scales[..., None]).flatten(-2)


def draw(logits, draws, inputs):
    """
    Draw the next token of each row that has not ended from logits, float32 (R, vocab_size), which are changed, as
    `decode.draw.draw` does. Then the row's token, position, number and count go on; a row that ends becomes padding.
    """
    for row in range(len(logits)):
        step, number = int(draws.step[row]), int(draws.numbers[row])
        draws.step[row] += 1
        draws.drawn[step, row] = -1
        if not draws.left[row]:
            continue
        draws.broken[row] |= int(not (logits[row] < torch.inf).all())
        change(logits[row], draws, row)
        how = draws.settings[row, :PRESENCE].tolist()
        token = draw_alike(logits[row:row + 1], *how, [int(draws.seeds[row])], [number])
        draws.drawn[step, row] = inputs.tokens[row] = token
        draws.numbers[row] += 1
        draws.counts[row, token] += 1
        inputs.positions[row] += 1
        draws.left[row] = 0 if token in draws.stops[row].tolist() else draws.left[row] - 1
        if not draws.left[row]:
            inputs.sequences[row] = -1


def change(logits, draws, row):
    """Apply biases, min_tokens and penalties to the logits (vocab_size,) of a row, in place, in this order."""
    settings, n_biases = draws.settings[row].tolist(), int((draws.bias_tokens[row] >= 0).sum())
    logits[draws.bias_tokens[row, :n_biases].long()] += draws.biases[row, :n_biases]
    if draws.numbers[row] < draws.min_tokens[row]:
        logits[draws.stops[row][draws.stops[row] >= 0].long()] = -torch.inf
    counts, repetition = draws.counts[row], settings[REPETITION]
    if settings[PRESENCE] or settings[FREQUENCY] or repetition != 1:
        logits[:] = torch.where(counts > 0, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        n = counts % IN_PROMPT
        logits -= torch.where(n > 0, settings[FREQUENCY] * n + settings[PRESENCE], 0.0)

