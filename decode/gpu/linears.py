"""
Triton kernels for embeddings, norms and linears. A linear also applies its activation, gate or residual sum.

A linear's tile is a matrix of weights times some rows of x. Its sums run over the columns of x, or over a part of them
each, in ascending order, 16 at a time in one instruction, and sums of parts are added in ascending order, whatever the
tile's size. So a row has the same bits in all tiles, and a step of few rows may take other tiles than one of many.
`check.check_here` tries that on the device.
"""
import torch
import triton
import triton.language as tl

from decode.gpu.ordering import is_last, overlap, wait

PART, UNIT = 768, 256  # the fewest columns of a part of x, and of what it is a multiple
NARROW = 4096          # numbers of an `out` of which programs compute parts: a wide one has enough of them without
CHANNELS = 1024        # of a program of `embed_kernel`


def embed(inputs, weight, positions_weight, x):
    """x (R, n_embd), float32: the embeddings of the rows' tokens, and of their positions if these have a weight."""
    (R, C), most = x.shape, 0 if positions_weight is None else len(positions_weight) - 1
    embed_kernel[R, triton.cdiv(C, CHANNELS)](inputs.tokens, inputs.positions, weight, positions_weight, x, most, C,
                                              CHANNELS, **overlap(x))


@triton.jit(do_not_specialize=['most'])
def embed_kernel(tokens, positions, weight, positions_weight, x, most, C: tl.constexpr, CHANNELS: tl.constexpr,
                 OVERLAP: tl.constexpr):
    wait(OVERLAP)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    number = tl.load(weight + tl.load(tokens + row) * C + i, i < C, 0).to(tl.float32)
    if positions_weight is not None:  # a text that has ended may have no next position
        position = tl.minimum(tl.load(positions + row), most)
        number += tl.load(positions_weight + position * C + i, i < C, 0).to(tl.float32)
    tl.store(x + row * C + i, number, i < C)


def normed(x, out, norm, rms):
    """out (R, n_embd), of the model's dtype: x, float32, after a norm."""
    (R, C), padded, bias = x.shape, triton.next_power_of_2(x.size(1)), getattr(norm, 'bias', None)
    norm_kernel[R,](x, out, norm.weight.detach(), bias if bias is None else bias.detach(), norm.eps, C, padded, rms,
                    num_warps=min(8, max(1, padded // 256)), **overlap(x), enable_fp_fusion=True)


@triton.jit
def norm_kernel(x, out, weight, bias, EPS: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr, RMS: tl.constexpr,
                OVERLAP: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    weights = tl.load(weight + i, i < C, 0).to(tl.float32)
    wait(OVERLAP)
    v = tl.load(x + row * C + i, i < C, 0)
    if not RMS:
        v = tl.where(i < C, v - tl.sum(v, axis=0) / C, 0.0)
    v *= tl.rsqrt(tl.sum(v * v, axis=0) / C + EPS) * weights
    if bias is not None:
        v += tl.load(bias + i, i < C, 0).to(tl.float32)
    tl.store(out + row * C + i, v.to(out.dtype.element_ty), i < C)


def linear(x, out, linear, ended, activation='', gate=None, add=False):
    """
    out (R, n_out): a linear of x (R, n_in). ended: int32 zeros, one for each tile, and zeros again after it.
    activation: 'none' or 'tanh', GELU as `GPTConfig.gelu` names it, or ''. gate: another linear of x; out is
    silu(gate(x)) * linear(x). add: add it to what is in out.
    """
    (R, n_in), n_out = x.shape, out.size(1)
    n_parts = 1 if gate or n_out > NARROW else max(1, n_in // PART)
    size = triton.cdiv(triton.cdiv(n_in, n_parts), UNIT) * UNIT
    parts = torch.empty(n_parts, R, n_out, dtype=torch.float32, device=x.device) if n_parts > 1 else None
    rows, outs, ins, num_warps, num_stages = tile(R, n_out, n_in, x.dtype)
    weights = [p if p is None else p.detach() for each in (linear, gate) if each for p in (each.weight, each.bias)]
    linear_kernel[triton.cdiv(n_out, outs), triton.cdiv(R, rows), n_parts](
        x, out, *weights, *[None] * (4 - len(weights)), parts, ended, R, n_in, n_out, activation, add, rows, outs, ins,
        size, num_stages, num_warps=num_warps, **overlap(x), enable_fp_fusion=True)


def tile(R, n_out, n_in, dtype):
    """
    (rows, outs, ins, num_warps, num_stages) of the tiles for R rows, as timed on an H100 and an H200 in bfloat16. A
    tensor core computes 16 outs at least. It does not multiply float32, where each thread keeps whole sums in its
    registers.
    """
    if dtype is torch.float32:
        return (8, 32, 32, 4, 3) if R <= 32 else (32, 32, 32, 4, 3)
    if R > 32:
        if n_out > 2**14 and R > 64:
            return (128 if R <= 128 else 256), 128, 64, 8, 3
        if R * n_out > 2**19 and R > 64:
            return 128, 64, 64, 8, 4
        if R * n_out > 2**18 or R > 128 and n_in > 2048:
            return 64, 64, 64, 8, 4
        return 32, 64, 128, 4, 3
    if n_in > 1024:
        return (8, 16, 256, 2, 4) if R <= 16 else (16, 16, 256, 2, 4)
    return (8, 16, 128, 1, 5) if R <= 16 else (32, 32, 128, 4, 4)


@triton.jit(do_not_specialize=['n_rows'])
def linear_kernel(x, out, weight, bias, gate, gate_bias, parts, ended, n_rows, n_in, n_out, ACTIVATION: tl.constexpr,
                  ADD: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, SIZE: tl.constexpr,
                  STAGES: tl.constexpr, OVERLAP: tl.constexpr):
    """
    ROWS rows of OUTS numbers of out, from SIZE columns of x, INS at a time. The tile is (OUTS, ROWS). The program of a
    tile that ends last adds up its parts, applies bias, gate and activation, and writes it.
    """
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[None, :]
    of_weight, out_is_real = outs.to(tl.int64)[:, None] * n_in, (outs < n_out)[:, None]
    sums = tl.zeros((OUTS, ROWS), tl.float32)
    gates = tl.zeros((OUTS, ROWS), tl.float32)
    wait(OVERLAP)
    first = tl.program_id(2) * SIZE
    end = tl.minimum(first + SIZE, n_in)
    for start in tl.range(first, end, INS, num_stages=STAGES):
        i = start + tl.arange(0, INS)
        numbers = tl.load(x + rows * n_in + i[:, None], (rows < n_rows) & (i < end)[:, None], 0)
        inside = out_is_real & (i < end)[None, :]
        sums = tl.dot(tl.load(weight + of_weight + i[None, :], inside, 0), numbers, sums, input_precision='ieee')
        if gate is not None:
            gates = tl.dot(tl.load(gate + of_weight + i[None, :], inside, 0), numbers, gates, input_precision='ieee')
    at, inside = rows.to(tl.int64) * n_out + outs[:, None], out_is_real & (rows < n_rows)
    is_whole = True
    if parts is not None:
        of_part, n_parts = n_rows.to(tl.int64) * n_out, tl.num_programs(2)
        tl.store(parts + tl.program_id(2) * of_part + at, sums, inside)
        is_whole = is_last(ended + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), n_parts)
    if is_whole:
        if parts is not None:
            sums = tl.load(parts + at, inside, 0)
            for part in range(1, n_parts):
                sums += tl.load(parts + part * of_part + at, inside, 0)
        if bias is not None:
            sums += tl.load(bias + outs, outs < n_out, 0).to(tl.float32)[:, None]
        if gate is not None:
            if gate_bias is not None:
                gates += tl.load(gate_bias + outs, outs < n_out, 0).to(tl.float32)[:, None]
            sums *= gates * tl.sigmoid(gates)
        if ACTIVATION == 'none':
            sums = 0.5 * sums * (1 + tl.erf(sums * 0.7071067811865476))
        if ACTIVATION == 'tanh':  # (1 + tanh(a)) / 2 is sigmoid(2 * a)
            sums *= tl.sigmoid(1.5957691216057308 * (sums + 0.044715 * sums * sums * sums))
        if ADD:
            sums += tl.load(out + at, inside, 0)
        tl.store(out + at, sums.to(out.dtype.element_ty), inside)
