"""
A model's weights in the order in which the compiled step reads them.

The model stays as it is, in a file if it is memory-mapped. The packed copy takes 4, 2, 1 or 0.5625 bytes a weight:
float32, bfloat16, int8 or int4. In int4 lm_head is int8, because its rounding errors reach the logits unmixed.
"""
import numpy as np
import torch
import torch.nn.functional as F

from decode import MODEL_DTYPES
from decode.changes import REFUSED, check_unchanged, norms_of
from decode.kernel import layout
from decode.kernel.layout import GROUP, SHEET, WEIGHT_GROUP
from decode.kernel.linears import INT4_VECTORS
from decode.kernel.threads import aligned
from decode.kernel.vectors import LANES, padded
from device import side_by_side, torch_on_one_thread

ROWS_AT_ONCE = 2**9  # of a matrix that is packed: the numbers on the way fit the caches
LARGEST = -7, -7.5, -8, -8.5, -9, -9.5  # what the largest number of a group is divided into, see `quantise_groups`
WEIGHTS = {'float32': np.float32, 'bfloat16': np.uint16, 'int8': np.int8, 'int4': np.uint32}  # types of the panels
padded = padded.py_func


def check_model(model):
    """
    ValueError unless the model is model.py's GPT, unchanged, with weights in float32 or bfloat16 on the CPU.

    The compiled step reads the weights and runs no code of the model's. So modules of other classes, hooks, replaced
    `forward` functions and weights of other shapes than the config says are refused.
    """
    check_unchanged(model)
    embeddings = {model.get_parameter(f'transformer.{name}.weight').dtype for name in ('wte', 'wpe')
                  if name in model.transformer}
    if len(embeddings) > 1:
        raise ValueError(f"the CPU executor expects embeddings of one dtype: {REFUSED}")
    c, blocks = model.config, model.transformer.h
    of_heads = [norm for b in blocks for norm in (b.attn.q_norm, b.attn.k_norm)] if c.qk_norm else []
    if len({norm.eps for norm in norms_of(model) + of_heads}) > 1:
        raise ValueError(f"the CPU executor expects one eps for all norms, and this model has several: {REFUSED}")
    for i, block in enumerate(blocks if c.mlp == 'swiglu' else ()):
        if (block.mlp.c_gate.bias is None) != (block.mlp.c_fc.bias is None):
            raise ValueError("the CPU executor expects biases of both c_gate and c_fc, or of neither, but block "
                             f"{i} has one of them: {REFUSED}")
    for name, p in model.named_parameters():
        on_cpu = p.device.type == 'cpu' or hasattr(p, 'read')  # or it will be: see `loaded`
        if p.dtype not in MODEL_DTYPES or not on_cpu or not p.is_contiguous():
            raise ValueError("the CPU executor reads contiguous weights in float32 or bfloat16 on the CPU, but "
                             f"{name} is {p.dtype} on {p.device} with strides {p.stride()}: {REFUSED}")


def loaded(p):
    """A parameter. One on the device meta is read from its file, and the caller alone keeps what was read."""
    return p.read() if p.is_meta else p


def shape_of(p):
    """A matrix of p's shape in little memory. (The first operation on the device meta takes a second and 0.1 GB.)"""
    return torch.empty(p.shape, dtype=torch.int8)


def linears_of(model, loaded=loaded):
    """
    (weight (rows, K), bias (rows) or None) of every linear, in the order of layout.py. They are loaded one by one.

    c_attn is two linears: the queries of all heads, then the keys and values of each head. The rows of every head are
    padded to a multiple of LANES, so that each thread can compute some of the heads. c_gate and c_fc are one linear:
    LANES rows of one and of the other take turns.
    """
    c = model.config
    pad = padded(c.head_dim, LANES) - c.head_dim
    for block in model.transformer.h:
        weight, bias = loaded(block.attn.c_attn.weight), block.attn.c_attn.bias
        heads = F.pad(weight.unflatten(0, (-1, c.head_dim)), (0, 0, 0, pad))  # (heads, head_dim padded, C)
        biases = None if bias is None else F.pad(bias.unflatten(0, (-1, c.head_dim)), (0, pad))
        yield heads[:c.n_head].flatten(0, 1), None if bias is None else biases[:c.n_head].flatten()
        k_and_v = heads[c.n_head:].unflatten(0, (2, -1)).transpose(0, 1)  # (n_kv_head, 2, ...)
        yield k_and_v.flatten(0, 2), None if bias is None else biases[c.n_head:].unflatten(0, (2, -1)).transpose(
            0, 1).flatten()
        yield loaded(block.attn.c_proj.weight), block.attn.c_proj.bias
        mlp = block.mlp
        if c.mlp == 'swiglu':
            yield in_turns(loaded(mlp.c_gate.weight), loaded(mlp.c_fc.weight)), (
                None if mlp.c_fc.bias is None else in_turns(mlp.c_gate.bias, mlp.c_fc.bias))
        else:
            yield loaded(mlp.c_fc.weight), mlp.c_fc.bias
        yield loaded(mlp.c_proj.weight), mlp.c_proj.bias
    yield loaded(model.lm_head.weight), None


def in_turns(gate, up):
    """LANES rows of gate, LANES rows of up, and so on, both padded with zeros to whole LANES."""
    if n := padded(len(gate), LANES) - len(gate):
        gate, up = (F.pad(w, (0, 0) * (w.dim() - 1) + (0, n)) for w in (gate, up))
    return torch.stack([w.unflatten(0, (-1, LANES)) for w in (gate, up)], 1).flatten(0, 2)


def quantise(w):
    """
    int8 weights: w (rows, K) -> (whole (rows, K) in -127 ... 127 as float32, scale (rows)), w = whole * scale.

    Symmetric and rounded to the nearest, so no weight is off by more than half its row's scale, max|w| / 254.
    """
    scale = w.abs().amax(dim=1) / 127
    return (w / scale.where(scale != 0, 1)[:, None]).round().nan_to_num(), scale  # a row with a NaN has it in its scale


def quantise_groups(w):
    """
    int4 weights: w (rows, K) -> (whole (rows, K) in -8 ... 7 as float32, scale (rows, K / WEIGHT_GROUP), bfloat16
    numbers as float32), w = whole * scale of its group, rounded to the nearest.

    The number with the largest magnitude of a group becomes -8 in llama.cpp's Q4_0. Here each of LARGEST is tried. For
    the whole numbers that it gives, the scale with the least squared error is (w . whole) / (whole . whole), and the
    error is w . w less (w . whole)^2 / (whole . whole).
    """
    groups = w.unflatten(1, (-1, WEIGHT_GROUP))
    low, high = groups.aminmax(dim=2, keepdim=True)
    largest = high.where(high > -low, low)
    scale, most = 0 * largest, torch.zeros_like(largest)  # 0, or NaN if a number is NaN or infinite
    for to in LARGEST:
        whole = (groups * (to / largest)).round_().clamp_(-8, 7)
        product, square = (torch.linalg.vecdot(v, whole).unsqueeze(2) for v in (groups, whole))
        explained = (product / largest).square() / square  # as a part of largest^2, which may be too small for a float
        better = explained > most
        scale, most = torch.where(better, product / square, scale), torch.where(better, explained, most)
    scale = scale.bfloat16().float()
    whole = (groups / scale.where(scale != 0, 1)).round_().clamp_(-8, 7).nan_to_num_()
    return whole.flatten(1), scale.squeeze(2)


def pack(out, w, n):
    """out (1-D) = w (rows, K) in sheets of SHEET panels (see linears.py) with vectors of n inputs."""
    packed = w.view(-1, SHEET, LANES, w.size(1) // n, n).permute(0, 3, 1, 2, 4)
    out.view(packed.shape).copy_(packed)


def pack_groups(out, w):
    """out (1-D, int32) = w (rows, K) in int4 sheets, see linears.py."""
    whole, scale = quantise_groups(w)
    sheets = out.view(-1, w.size(1) // GROUP, INT4_VECTORS, SHEET, LANES)
    scales = scale.bfloat16().view(-1, SHEET, LANES, w.size(1) // GROUP, GROUP // WEIGHT_GROUP)
    sheets.view(torch.bfloat16).unflatten(-1, (LANES, -1))[:, :, 0] = scales.permute(0, 3, 1, 2, 4)
    lower, upper = (whole + 8).byte().view(-1, SHEET, LANES, w.size(1) // GROUP, GROUP // 8, 2, 4).unbind(5)
    sheets.view(torch.uint8).unflatten(-1, (LANES, -1))[:, :, 1:] = (lower | upper << 4).permute(0, 3, 4, 1, 2, 5)


class PackedWeights:
    """
    A model's weights as the compiled step reads them. `fill` copies them, and does so again after they have changed.

    weights: 'float32', 'bfloat16', 'int8' or 'int4', the type of all matrices; beside int4, lm_head is int8. Embeddings
    are not copied, layer norms and biases stay float32.
    panels is 1-D, the panels of all linears in order; scale and bias have a float32 for each of their rows; table says
    where each linear is. The arrays are allocated once and keep their addresses.
    """

    def __init__(self, model, weights):
        self.model, self.weights = model, weights
        with torch.no_grad(), torch_on_one_thread():
            shapes = [(padded(len(w), LANES), padded(w.size(1), GROUP)) for w, _ in linears_of(model, shape_of)]
        self.table = aligned((len(shapes), layout.N_COLUMNS), np.int64)
        size = rows = 0
        for number, (row, (n, K)) in enumerate(zip(self.table, shapes)):
            if weights == 'int4' and number == len(shapes) - 1:
                size = size // GROUP * INT4_VECTORS * 4  # lm_head is counted in bytes
            row[layout.FIRST_WEIGHT], row[layout.FIRST_PANEL] = size, rows // LANES
            row[layout.N_INPUTS], row[layout.N_PANELS] = K, n // LANES
            size, rows = size + padded(n, SHEET * LANES) * K, rows + n
        self.panels = aligned(size // 4 if weights == 'int4' else size, WEIGHTS[weights])
        self.scale, self.bias = aligned(rows, np.float32), aligned(rows, np.float32)
        self.start = aligned(size // GROUP if weights in ('int8', 'int4') else 0, np.int16)
        self.eps = np.zeros(1, np.float32)
        norms = (len(norms_of(model)), padded(model.config.n_embd, GROUP))
        self.norm_weight, self.norm_bias = aligned(norms, np.float32), aligned(norms, np.float32)
        c = model.config
        self.head_norm_weight = aligned((c.n_layer, 2, padded(c.head_dim, LANES) if c.qk_norm else 0), np.float32)

    def arrays(self):
        """{index into the table `memory`: array}"""
        return {layout.PANELS: self.panels, layout.LINEARS: self.table, layout.SCALE: self.scale,
                layout.BIAS: self.bias, layout.START: self.start, layout.EPS: self.eps,
                layout.NORM_WEIGHT: self.norm_weight, layout.NORM_BIAS: self.norm_bias,
                layout.HEAD_NORM_WEIGHT: self.head_norm_weight}

    @torch.no_grad()
    def fill(self):
        side_by_side(self.fill_linear, enumerate(linears_of(self.model)))
        self.eps[0] = self.model.transformer.ln_f.eps
        self.norm_bias[:] = 0
        for i, norm in enumerate(norms_of(self.model)):
            self.norm_weight[i, :len(norm.weight)] = norm.weight.float()
            if getattr(norm, 'bias', None) is not None:
                self.norm_bias[i, :len(norm.weight)] = norm.bias.float()
        c = self.model.config
        for of_layer, block in zip(self.head_norm_weight, self.model.transformer.h if c.qk_norm else ()):
            for weight, norm in zip(of_layer, (block.attn.q_norm, block.attn.k_norm)):
                weight[:c.head_dim] = norm.weight.float()

    @torch.no_grad()
    def fill_linear(self, linear):
        """Pack a linear: (its number, (weight, bias))."""
        number, (w, bias) = linear
        at, K = int(self.table[number, layout.FIRST_WEIGHT]), int(self.table[number, layout.N_INPUTS])
        row, n = (int(self.table[number, column]) * LANES for column in (layout.FIRST_PANEL, layout.N_PANELS))
        self.scale[row:row + n], self.bias[row:row + n] = 1, 0
        if bias is not None:
            self.bias[row:row + len(bias)] = bias.float()
        lm_head = number == len(self.table) - 1
        weights = 'int8' if lm_head and self.weights == 'int4' else self.weights
        for first in range(0, n, ROWS_AT_ONCE):
            part = w[first:first + ROWS_AT_ONCE].float()
            n_rows = padded(min(n - first, ROWS_AT_ONCE), SHEET * LANES)
            if part.shape != (n_rows, K):  # F.pad copies in any case
                part = F.pad(part, (0, K - w.size(1), 0, n_rows - len(part)))
            scale = self.pack_rows(part, at + first * K, weights)
            if scale is not None:
                self.scale[row + first:row + min(n, first + n_rows)] = scale[:n - first]

    def pack_rows(self, w, at, weights):
        """Pack whole sheets of rows, w (rows, K), from weight number `at` on. Returns the scales of int8 rows."""
        to, K = slice(at, at + w.numel()), w.size(1)
        if weights == 'float32':
            pack(torch.from_numpy(self.panels[to]), w, 1)
        elif weights == 'bfloat16':
            pack(torch.from_numpy(self.panels.view(np.int16)[to]), w.bfloat16().view(torch.int16), 2)
        elif weights == 'int4':
            first, end = (i // GROUP * INT4_VECTORS for i in (to.start, to.stop))
            pack_groups(torch.from_numpy(self.panels.view(np.int32)[first:end]), w)
        else:
            whole, scale = quantise(w)
            sums = whole.view(len(w), K // GROUP, GROUP).sum(dim=-1)
            pack(torch.from_numpy(self.start[to.start // GROUP:to.stop // GROUP]), -sums, 1)
            pack(torch.from_numpy(self.panels.view(np.int8)[to]), whole, 4)
            return scale
