"""
A model's weights in the order in which the compiled step reads them.

The model stays as it is, in a file if it is memory-mapped. The packed copy takes 32, 16, 8.25 or 5 bits a weight:
float32, bfloat16, int8 or int4.
"""
import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch.func import functional_call

from decode import MODEL_DTYPES
from decode.changes import REFUSED, check_unchanged
from decode.kernel import layout
from decode.kernel.emit import F32, I8, I16, I32, LANES
from decode.kernel.layout import GROUP, SCALE_GROUP, SHEET
from decode.kernel.linears import ADDED, ELEMENTS, GELU, GELU_TANH, SWIGLU
from decode.kernel.threads import aligned
from decode.kernel.vectors import padded
from device import in_parallel, torch_on_one_thread
from positions import Positions, alibi_slopes, rotary_frequencies

CALIBRATED = 64       # random tokens whose pass says how much the inputs of a linear matter
ROWS_AT_ONCE = 2**9   # of a matrix that is packed: the numbers on the way fit the caches
# Weights of more than CACHED bytes come from memory at each step, and a step can prefetch them PREFETCHED bytes ahead.
# It changed the speed of L with 1 or 4 rows by a factor of 1.0 to 1.3 on a Xeon and of 0.86 to 0.95 on a Zen 4, so
# `choice` times steps with prefetching and without
CACHED, PREFETCHED = 2**25, 2**13
SCREENED = 0.25  # of the weights: a larger lm_head is screened, see kernel/screening.py
WEIGHTS = {'float32': np.float32, 'bfloat16': np.uint16, 'int8': np.int8, 'int4': np.uint32}  # types of the panels
KINDS = {'float32': F32, 'bfloat16': I16, 'int8': I8, 'int4': I32}  # the same, as the kernel's code names them
POSITIONS = dict(learned=layout.LEARNED, rope=layout.ROPE, alibi=layout.ALIBI, none=layout.NONE)
padded = padded.py_func


def check_model(model):
    """
    ValueError unless the model is model.py's GPT, unchanged, with weights in float32 or bfloat16 on the CPU: the
    compiled step reads the weights and runs no code of the model's.
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
    for name, p in model.named_parameters():
        on_cpu = p.device.type == 'cpu' or hasattr(p, 'read')  # or it will be: see `loaded`
        if p.dtype not in MODEL_DTYPES or not on_cpu or not p.is_contiguous():
            raise ValueError("the CPU executor reads contiguous weights in float32 or bfloat16 on the CPU, but "
                             f"{name} is {p.dtype} on {p.device} with strides {p.stride()}: {REFUSED}")


def norms_of(model):
    """The norms of rows, in the order of the step."""
    return [norm for b in model.transformer.h for norm in (b.ln_1, b.ln_2)] + [model.transformer.ln_f]


def loaded(p):
    """A parameter. One on the device meta is read from its file, and the caller alone keeps what was read."""
    return p.read() if p.is_meta else p


def bytes_of(p):
    """The bytes of a parameter, an array over its memory."""
    return p.detach().view(torch.uint8).numpy()


def placeholder(p):
    """A matrix of p's shape in little memory. (The first operation on the device meta takes a second and 0.1 GB.)"""
    return torch.empty(p.shape, dtype=torch.int8)


def linears_of(model, loaded=loaded):
    """
    (weight (rows, K), bias (rows)) of every linear, in the order of layout.py. They are loaded one by one.

    c_attn is two linears: the queries of all heads, then the keys and values of each head. The rows of every head are
    padded to a multiple of LANES, so that each thread can compute some of the heads. c_gate and c_fc are one linear:
    LANES rows of one and of the other take turns.
    """
    def of(linear):
        no_bias = torch.zeros(linear.out_features, dtype=linear.weight.dtype, device='cpu')
        return loaded(linear.weight), no_bias if linear.bias is None else linear.bias

    c = model.config
    pad = padded(c.head_dim, LANES) - c.head_dim
    for block in model.transformer.h:
        heads = [F.pad(p.unflatten(0, (-1, c.head_dim)), (0, 0) * (p.dim() - 1) + (0, pad))
                 for p in of(block.attn.c_attn)]  # (heads, head_dim padded, C) and (heads, head_dim padded)
        yield [p[:c.n_head].flatten(0, 1) for p in heads]
        yield [p[c.n_head:].unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 2) for p in heads]  # (n_kv_head, 2, ...)
        yield of(block.attn.c_proj)
        if c.mlp == 'swiglu':
            yield [in_turns(gate, up) for gate, up in zip(of(block.mlp.c_gate), of(block.mlp.c_fc))]
        else:
            yield of(block.mlp.c_fc)
        yield of(block.mlp.c_proj)
    yield of(model.lm_head)


def in_turns(gate, up):
    """LANES rows of gate, LANES rows of up, and so on, both padded with zeros to whole LANES."""
    if n := padded(len(gate), LANES) - len(gate):
        gate, up = (F.pad(w, (0, 0) * (w.dim() - 1) + (0, n)) for w in (gate, up))
    return torch.stack([w.unflatten(0, (-1, LANES)) for w in (gate, up)], 1).flatten(0, 2)


@torch.no_grad()
@torch.autocast('cpu', enabled=False)
def input_squares(model):
    """
    The mean squares of the inputs of every linear, float32 (K,), in the order of layout.py: how much the errors of its
    weights matter. They are those of a pass of random tokens. (For SmolLM2 they are as good as those of its own text.)
    """
    c, t, found = model.config, model.transformer, []
    idx = torch.randint(c.vocab_size, (1, min(CALIBRATED, c.block_size)), generator=torch.Generator().manual_seed(0))
    x, positions = loaded(t.wte.weight)[idx].float(), torch.arange(idx.size(1))
    if c.position == 'learned':
        x = x + t.wpe(positions).float()
    positions = Positions(c, positions, x.dtype)
    for block in t.h:
        inputs = block.attn.c_attn, block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj
        hooks = [m.register_forward_pre_hook(lambda _, given: found.append(given[0][0])) for m in inputs]
        try:
            x, _ = functional_call(block, {name: loaded(p).float() for name, p in block.named_parameters()}, (
                x, positions))
        finally:
            for hook in hooks:
                hook.remove()
    found.append(functional_call(t.ln_f, {name: p.float() for name, p in t.ln_f.named_parameters()}, x)[0])
    return [x.square().mean(dim=0) for x in found]


def quantise_int8(w):
    """
    int8 weights: w (rows, K) -> (whole (rows, K) in -127 ... 127 as float32, scale (rows, K / GROUP), bfloat16 numbers
    as float32), w = whole * scale of its group.

    Symmetric and rounded to the nearest, so no weight is off by more than half its group's scale, max|w| / 127, which
    is rounded up to a bfloat16.
    """
    groups = w.unflatten(1, (-1, GROUP))
    scale = ((groups.abs().amax(dim=2) / 127).view(torch.int32) + 0xffff & -0x10000).view(torch.float32)
    whole = (groups / scale.where(scale != 0, 1)[..., None]).round_().nan_to_num_()
    return whole.flatten(1), scale  # a group with a NaN has it in its scale


def quantise_int4(w, squares=None):
    """
    int4 weights: w (rows, K) -> (whole (rows, K) in 0 ... 15 as float32, scale and low (rows, K / SCALE_GROUP),
    bfloat16 numbers as float32), w = low + whole * scale of its group, rounded to the nearest.

    squares: (K,), see `input_squares`. First the least and the largest weight of a group give whole numbers. For these,
    the scale and low are then those with the least squared error of the products with the inputs.
    """
    groups = w.unflatten(1, (-1, SCALE_GROUP))
    h = torch.ones(w.size(1)) if squares is None or not squares.any() else squares + 1e-4 * squares.mean()
    h = h.view(-1, SCALE_GROUP) / h.view(-1, SCALE_GROUP).sum(dim=1, keepdim=True)
    low, high = groups.aminmax(dim=2)
    scale = (high - low) / 15
    whole = ((groups - low[..., None]) / scale[..., None]).round_()
    of_whole = whole * h
    mean, square, product = of_whole.sum(dim=2), torch.linalg.vecdot(of_whole, whole), torch.linalg.vecdot(
        of_whole, groups)
    of_groups, spread = torch.linalg.vecdot(groups, h), square - mean * mean
    fitted = (product - mean * of_groups) / spread
    scale = torch.where((spread > 1e-6 * square) & (fitted > 0), fitted, scale)
    low = (of_groups - scale * mean).where(scale != 0, low)
    scale, low = scale.bfloat16().float(), low.bfloat16().float()
    whole = ((groups - low[..., None]) / scale.where(scale != 0, 1)[..., None]).round_().clamp_(0, 15).nan_to_num_()
    return whole.flatten(1), scale, low


def in_sheets(w, n):
    """w (rows, K) in sheets with vectors of n inputs, see linears.py: (sheets, K / n, SHEET, LANES, n)."""
    return w.view(-1, SHEET, LANES, w.size(1) // n, n).permute(0, 3, 1, 2, 4)


def pack_int8(out, whole, scale):
    """out (1-D, uint8) = what `quantise_int8` returns of (rows, K), in int8 sheets, see linears.py."""
    n, n_groups = SHEET * LANES, scale.size(1)
    groups = out.view(-1, n_groups, n * (2 + GROUP))
    scales = scale.bfloat16().view(-1, n, n_groups, 1).transpose(1, 2)
    groups[..., :2 * n] = scales.contiguous().view(torch.uint8).flatten(2)
    whole = whole.add_(ADDED).to(torch.int16).to(torch.uint8)
    groups[..., 2 * n:] = in_sheets(whole, 4).unflatten(1, (-1, GROUP // 4)).flatten(2)


def pack_int4(out, w, squares):
    """out (1-D, uint8) = w (rows, K) in int4 sheets, see linears.py."""
    whole, *of_groups = quantise_int4(w, squares)
    groups = out.view(-1, w.size(1) // GROUP, 2 + GROUP // 8, SHEET, LANES, 4)
    for i, numbers in enumerate(of_groups):
        groups[:, :, i] = in_sheets(numbers.bfloat16(), 2).contiguous().view(torch.uint8)
    lower, upper = whole.byte().view(-1, SHEET, LANES, w.size(1) // GROUP, GROUP // 8, 2, 4).unbind(5)
    groups[:, :, 2:] = (lower | upper << 4).permute(0, 3, 4, 1, 2, 5)


def parts_of(w, n, K):
    """(first row, some rows in float32) of w, padded with zeros to K inputs, and to whole sheets for n rows."""
    for first in range(0, n, ROWS_AT_ONCE):
        part = w[first:first + ROWS_AT_ONCE].float()
        n_rows = padded(min(n - first, ROWS_AT_ONCE), SHEET * LANES)
        if part.shape != (n_rows, K):  # F.pad copies in any case
            part = F.pad(part, (0, K - w.size(1), 0, n_rows - len(part)))
        yield first, part


def kept_in(model, weights):
    """
    The type in which the packed copy keeps weights: `weights`, but bfloat16 instead of float32 if all numbers of all
    matrices are bfloat16 numbers, as in most published models. Half of the bytes then give the same bits: the kernel
    widens them. If a float32 matrix is not in memory, it is not looked at, and all matrices stay float32.
    """
    def is_bfloat16(p):
        return p.dtype is torch.bfloat16 or not p.is_meta and not any(
            (rows.view(torch.int32) & 0xffff).any() for rows in p.detach().split(ROWS_AT_ONCE))

    kept = weights == 'float32' and all(is_bfloat16(p) for p in model.parameters() if p.dim() == 2)
    return 'bfloat16' if kept else weights


class PackedWeights:
    """
    A model as the compiled step reads it. `fill` copies its weights, and does so again after they have changed.

    weights: 'float32', 'bfloat16', 'int8' or 'int4', the type of all matrices. Embeddings are not copied, layer norms
    and biases stay float32. Embeddings on the device meta are rows of lm_head: in int8 those that are packed, and
    otherwise read from the file. config: a copy. sizes: {index into the table `sizes`: number}, those of the model.
    arrays: {index into the table `memory`: array}. panels: 1-D, the panels of all linears in order. bias: a float32 for
    each of their rows. table: where each linear is. is_screened: is lm_head there in int8 too, for kernel/screening.py?
    """

    def __init__(self, model, weights):
        self.model, self.weights, self.ahead = model, weights, 0
        with torch.no_grad(), torch_on_one_thread():
            shapes = [(padded(len(w), LANES), padded(w.size(1), GROUP)) for w, _ in linears_of(model, placeholder)]
        self.table = aligned((len(shapes), layout.N_COLUMNS), np.int64)
        size = rows = 0
        for row, (n, K) in zip(self.table, shapes):
            row[layout.FIRST_WEIGHT], row[layout.FIRST_PANEL] = size, rows // LANES
            row[layout.N_INPUTS], row[layout.N_PANELS] = K, n // LANES
            size, rows = size + padded(n, SHEET * LANES) * K // GROUP * ELEMENTS[KINDS[weights]], rows + n
        self.panels, self.bias = aligned(size, WEIGHTS[weights]), aligned(rows, np.float32)
        c, norms = model.config, (len(norms_of(model)), padded(model.config.n_embd, GROUP))
        self.arrays = {
            layout.PANELS: self.panels, layout.LINEARS: self.table, layout.BIAS: self.bias,
            layout.EPS: np.zeros(1, np.float32), layout.NORM_WEIGHT: aligned(norms, np.float32),
            layout.NORM_BIAS: aligned(norms, np.float32),
            layout.HEAD_NORM_WEIGHT: aligned((c.n_layer, 2, padded(c.head_dim, LANES) if c.qk_norm else 0), np.float32)}

    def prefetch(self, ahead):
        """Let steps prefetch weights so many bytes ahead; 0: not at all."""
        if ahead != self.ahead:
            self.table[:, layout.PREFETCH_DISTANCE], self.ahead = ahead // self.panels.itemsize, ahead

    @torch.no_grad()
    def fill(self):
        model, arrays = self.model, self.arrays
        self.config = c = copy.copy(model.config)
        squares = input_squares(model) if self.weights == 'int4' else [None] * len(self.table)
        in_parallel(self.fill_linear, zip(self.table, linears_of(model), squares))
        arrays[layout.EPS][0] = model.transformer.ln_f.eps
        arrays[layout.NORM_BIAS][:] = 0
        for weight, bias, norm in zip(arrays[layout.NORM_WEIGHT], arrays[layout.NORM_BIAS], norms_of(model)):
            weight[:c.n_embd] = norm.weight.float()
            if getattr(norm, 'bias', None) is not None:
                bias[:c.n_embd] = norm.bias.float()
        for of_layer, block in zip(arrays[layout.HEAD_NORM_WEIGHT], model.transformer.h if c.qk_norm else ()):
            for weight, norm in zip(of_layer, (block.attn.q_norm, block.attn.k_norm)):
                weight[:c.head_dim] = norm.weight.float()
        slopes = alibi_slopes(c.n_head, torch.float32).numpy() if c.position == 'alibi' else np.zeros(c.n_head)
        arrays[layout.SLOPES] = slopes.astype(np.float32)
        arrays[layout.FREQUENCIES] = rotary_frequencies(c.head_dim, c.rope_theta, c.rope_scaling).numpy()
        wte = model.transformer.wte.weight
        of_head = wte.is_meta and self.weights == 'int8'
        # the memory of embeddings is read, also when the model has got others
        if not of_head:
            wte = loaded(wte)
            arrays[layout.WTE] = bytes_of(wte)
        if c.position == 'learned':
            arrays[layout.WPE] = bytes_of(model.transformer.wpe.weight)
        self.sizes = {
            layout.N_LAYER: c.n_layer, layout.N_HEAD: c.n_head, layout.N_KV_HEAD: c.n_kv_head,
            layout.HEAD_DIM: c.head_dim, layout.N_EMBD: c.n_embd, layout.VOCAB_SIZE: c.vocab_size,
            layout.MAX_POSITIONS: 2**62 if c.max_positions == math.inf else c.max_positions,
            layout.POSITION: POSITIONS[c.position], layout.WINDOW: c.window, layout.N_SINK: c.n_sink,
            layout.N_INNER: c.n_inner, layout.RMS_NORM: c.norm == 'rms', layout.QK_NORM: c.qk_norm,
            layout.ACTIVATION: SWIGLU if c.mlp == 'swiglu' else GELU_TANH if c.gelu == 'tanh' else GELU,
            layout.EMBEDDINGS: layout.OF_LM_HEAD if of_head else
            layout.BFLOAT16 if wte.dtype is torch.bfloat16 else layout.FLOAT32}
        n_bytes = self.panels.nbytes - int(self.table[-1, layout.FIRST_WEIGHT]) * self.panels.itemsize  # of lm_head
        self.is_screened = (self.weights == 'float32' and model.lm_head.weight is model.transformer.wte.weight
                            and wte.dtype is torch.float32 and n_bytes > max(CACHED, self.panels.nbytes * SCREENED)
                            and self.fill_screen(wte.detach()))

    def fill_screen(self, w):
        """
        Add to the arrays what kernel/screening.py reads of lm_head, w (vocab_size, n_embd). Returns whether its bounds
        hold: they do not for weights that are NaN, or so large that a bound might be infinite.
        """
        (n, K), of_head = (padded(len(w), SHEET * LANES), int(self.table[-1, layout.N_INPUTS])), self.table.copy()
        panels, errors, norms = aligned(n * K // GROUP * ELEMENTS[I8], np.int8), *aligned((2, n), np.float32)
        of_head[-1, layout.FIRST_WEIGHT] = of_head[-1, layout.PREFETCH_DISTANCE] = 0

        def fill(first_and_part):
            first, part = first_and_part
            whole, scale = quantise_int8(part)
            rounded = (whole.unflatten(1, (-1, GROUP)) * scale[..., None]).flatten(1)
            rest, size = (torch.linalg.vector_norm(v, dim=1, dtype=torch.float64) for v in (part - rounded, part))
            errors[first:first + len(part)] = rest * (1 + 1e-6)
            norms[first:first + len(part)] = (size + rest) * (1 + 1e-6)
            start, end = (r * K // GROUP * ELEMENTS[I8] for r in (first, first + len(part)))
            pack_int8(torch.from_numpy(panels[start:end].view(np.uint8)), whole, scale)
        in_parallel(fill, parts_of(w, n, K))
        self.arrays |= {layout.SCREEN_PANELS: panels, layout.SCREEN_LINEARS: of_head, layout.SCREEN_ERRORS: errors,
                        layout.SCREEN_NORMS: norms,
                        layout.SCREEN_LOGITS: aligned((2 * layout.SCREENED_ROWS, len(w)), np.float32)}
        return bool(norms.max() < layout.LARGEST_NORM)

    @torch.no_grad()
    def fill_linear(self, linear):
        """Pack a linear: (its row of the table, (weight, bias), the mean squares of its inputs for int4)."""
        of_table, (w, bias), squares = linear
        at, K = int(of_table[layout.FIRST_WEIGHT]), int(of_table[layout.N_INPUTS])
        row, n = int(of_table[layout.FIRST_PANEL]) * LANES, int(of_table[layout.N_PANELS]) * LANES
        self.bias[row:row + len(bias)] = bias.float()
        if squares is not None:
            squares = F.pad(squares, (0, K - len(squares)))
        for first, part in parts_of(w, n, K):
            start, end = (at + r * K // GROUP * ELEMENTS[KINDS[self.weights]] for r in (first, first + len(part)))
            out = torch.from_numpy(self.panels[start:end].view(np.uint8))
            if self.weights in ('float32', 'bfloat16'):
                sheets = in_sheets(part, 1) if self.weights == 'float32' else in_sheets(part.bfloat16(), 2)
                out.view(sheets.dtype).view(sheets.shape).copy_(sheets)
            elif self.weights == 'int8':
                pack_int8(out, *quantise_int8(part))
            else:
                pack_int4(out, part, squares)
