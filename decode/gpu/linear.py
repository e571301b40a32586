"""
A linear of 1 to 256 rows as one Triton kernel, with the norm before it and the activation, gate or sum behind it.

A program computes BLOCK_M rows of BLOCK_N columns of out. A step of few rows takes as long as the weights take from
memory, so each program reads its rows of the weight once, and what it reads of x, and computes again of its norm, is
little beside them. Programs that read the same weights, for other rows of x, are next to each other in the grid, so all
but the first find them in the L2 cache.

The bits of a row of out do not depend on the other rows. Its sums run over columns of x in an order that the shape and
dtype of the weight decide; with few rows, the same program computes numbers that nothing reads.
"""
import torch
import triton
import triton.language as tl

BLOCK_M = 16  # rows of x of a program: the fewest that tensor cores multiply
PROGRAMS = 264  # that wait for memory at the same time, where the weight is large enough: two for each SM of an H100
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def linear(x, out, linear, norm=None, gate=None, activation='', add=False):
    """
    out (R, n_out): a `Linear` of x (R, n_in), behind a norm if there is one. activation: 'gelu', 'tanh' (its
    approximation), or '' for none. With a gate, a `Linear` of the same shape, out is silu(gate(x)) * linear(x). add:
    add it to what is in out. x and out are contiguous, float32 or of the model's dtype, and not the same memory.

    x and out begin at multiples of 16 bytes, as tensors and their first rows do: Triton compiles another kernel for
    other addresses, whose sums may have other bits.
    """
    (n_rows, n_in), n_out = x.shape, out.size(1)
    gate_weight, gate_scale, gate_bias = (None, None, None) if gate is None else gate[:3]
    norm_weight, norm_bias, eps, rms = (None, None, 0.0, False) if norm is None else norm
    dtype = DTYPES[linear.dtype]
    # the interpreter has the bits of bfloat16 as whole numbers and would multiply those; float32 has the same products
    interpreted = not isinstance(linear_kernel, triton.JITFunction)
    blocks, how = tiles(linear)
    linear_kernel[triton.cdiv(n_rows, BLOCK_M), triton.cdiv(n_out, blocks['BLOCK_N'])](
        x, out, linear.weight, linear.scale, linear.bias, gate_weight, gate_scale, gate_bias, norm_weight, norm_bias,
        eps, n_rows, n_in, n_out, RMS=rms, ACTIVATION=activation, ADD=add, DTYPE=dtype,
        PRODUCTS=tl.float32 if interpreted else dtype, BLOCK_M=BLOCK_M, **blocks, **how)


def tiles(linear):
    """
    ({BLOCK_N, BLOCK_K, NORM_K}, {num_warps, num_stages, ...}) for a `Linear`. They decide the order of sums, so nothing
    else may decide them.

    Few rows of the weight in a program make many programs, and many rows read x less often. num_stages - 1 pieces of
    the weight are on their way at the same time; with a gate, twice as many. They fit the 99 KB of shared memory of
    small cards. Tensor cores share the numbers of a product; of a float32 product, each thread has whole rows and
    columns in its registers, which fit up to 1024 numbers of the weight. NORM_K numbers of each row of x are in
    registers too; where an SM has several programs, they need room for each other.
    """
    (n_out, n_in), by_threads = linear.weight.shape, linear.dtype == torch.float32
    block_n = 16
    while block_n < (32 if by_threads else 64) and n_out >= 2 * block_n * PROGRAMS:
        block_n *= 2
    block_k = 1024 // block_n if by_threads else 64 if block_n == 64 and linear.scale is None else 128
    most = max(16, triton.next_power_of_2(n_in))
    blocks = dict(BLOCK_N=block_n, BLOCK_K=min(block_k, most), NORM_K=min(1024 if block_n == 16 else 256, most))
    # Triton's default of enable_fp_fusion, a product and a sum in one instruction, is not the same in all versions
    return blocks, dict(num_warps=4, num_stages=5 if block_n == 16 else 4, enable_fp_fusion=True)


@triton.jit(do_not_specialize=['n_rows'])  # one kernel for all numbers of rows, also for 1 and for multiples of 16
def linear_kernel(x, out, weight, scale, bias, gate_weight, gate_scale, gate_bias, norm_weight, norm_bias, eps, n_rows,
                  n_in, n_out, RMS: tl.constexpr, ACTIVATION: tl.constexpr, ADD: tl.constexpr, DTYPE: tl.constexpr,
                  PRODUCTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  NORM_K: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x += rows[:, None] * n_in
    in_rows = rows[:, None] < n_rows
    if norm_weight is not None:
        mean, factor = moments(x, in_rows, n_in, eps, RMS, BLOCK_M, NORM_K)
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, n_in, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        numbers = tl.load(x + k[None, :], mask=in_rows & (k[None, :] < n_in), other=0)
        if norm_weight is not None:
            numbers = (numbers.to(tl.float32) - mean[:, None]) * factor[:, None]
            numbers *= tl.load(norm_weight + k, mask=k < n_in, other=0).to(tl.float32)[None, :]
            if norm_bias is not None:
                numbers += tl.load(norm_bias + k, mask=k < n_in, other=0).to(tl.float32)[None, :]
        numbers = numbers.to(DTYPE).to(PRODUCTS)
        y = tl.dot(numbers, read(weight, k, columns, n_in, n_out).to(PRODUCTS), y, input_precision='ieee')
        if gate_weight is not None:
            g = tl.dot(numbers, read(gate_weight, k, columns, n_in, n_out).to(PRODUCTS), g, input_precision='ieee')
    y = scaled(y, scale, bias, columns, n_out)
    if gate_weight is not None:
        g = scaled(g, gate_scale, gate_bias, columns, n_out)
        y *= g * tl.sigmoid(g)
    if ACTIVATION == 'gelu':
        y = 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))
    if ACTIVATION == 'tanh':  # (1 + tanh(a)) / 2 is sigmoid(2 * a)
        y *= tl.sigmoid(2 * 0.7978845608028654 * (y + 0.044715 * y * y * y))
    out += rows[:, None] * n_out + columns[None, :]
    inside = in_rows & (columns[None, :] < n_out)
    if ADD:
        y += tl.load(out, mask=inside, other=0).to(tl.float32)
    tl.store(out, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def moments(x, in_rows, n_in, eps, RMS: tl.constexpr, BLOCK_M: tl.constexpr, NORM_K: tl.constexpr):
    """
    (mean, 1 / deviation) of rows of x, float32 (BLOCK_M,); of RMS norms the mean is taken to be 0.

    x is read once. NORM_K columns have their own mean, and squares about it; these are joined to those of the columns
    before: see Chan, Golub and LeVeque (1983). So a large mean takes no bits from the variance.
    """
    mean = tl.zeros((BLOCK_M,), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, n_in, NORM_K):
        k = start + tl.arange(0, NORM_K)[None, :]
        numbers = tl.load(x + k, mask=in_rows & (k < n_in), other=0).to(tl.float32)
        if not RMS:
            n = tl.minimum(n_in - start, NORM_K)
            own = tl.sum(numbers, 1) / n
            numbers = tl.where(k < n_in, numbers - own[:, None], 0)
            apart = own - mean
            mean += apart * (n / (start + n))
            squares += apart * apart * (start * (n / (start + n)))
        squares += tl.sum(numbers * numbers, 1)
    return mean, tl.rsqrt(squares / n_in + eps)


@triton.jit
def read(weight, k, columns, n_in, n_out):
    """(BLOCK_K, BLOCK_N) of weight (n_out, n_in), transposed. It may have more than 2^31 numbers."""
    at = columns.to(tl.int64)[None, :] * n_in + k[:, None]
    return tl.load(weight + at, mask=(k[:, None] < n_in) & (columns[None, :] < n_out), other=0)


@triton.jit
def scaled(sums, scale, bias, columns, n_out):
    """Sums of products with the codes of int8 rows times the scales of the rows, and the bias; both may be None."""
    if scale is not None:
        sums *= tl.load(scale + columns, mask=columns < n_out, other=0)[None, :]
    if bias is not None:
        sums += tl.load(bias + columns, mask=columns < n_out, other=0).to(tl.float32)[None, :]
    return sums
