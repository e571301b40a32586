"""
A GPU step writes the queries, keys and values of the new tokens: in a kernel before attention, or in attention's own.

A program computes one head of one row, so that no row depends on another.
"""
import triton
import triton.language as tl

from decode.gpu.ordering import wait


def what_is_stored(step, layer, inputs, q, angles):
    """(arguments, {name: constant}) that `store_kernel` and `attention.attend_kernel` have in common."""
    c, k, v, padded = step.config, layer.k, layer.v, max(16, triton.next_power_of_2(step.config.head_dim))
    # numbers that share a scale in int8: a power of two, or all of a head, which is padded to one; 0 for other types
    group = 0 if k.scale is None else k.group
    return (q, angles, k.data, v.data, k.scale, v.scale, inputs.positions, inputs.sequences, inputs.slot_table,
            inputs.slot_table.stride(0), layer.n_slots), dict(
        N_HEAD=c.n_head, N_KV_HEAD=c.n_kv_head, D=c.head_dim, PADDED=padded, KINDS=q.size(1), N_SINK=c.n_sink,
        SINKS=step.columns.sinks, RING=step.columns.ring, GROUP=group,
        GROUP_SIZE=padded if group == c.head_dim else group)


# fused multiply-adds are off: a rotation then has the bits of PyTorch's, and so do the int8 codes
@triton.jit(do_not_specialize=['n_slots'])  # one kernel for all caches
def store_kernel(qkv, q, angles, k, v, k_scale, v_scale, positions, sequences, slot_table, table_stride, n_slots,
                 q_norm, k_norm, EPS: tl.constexpr, N_HEAD: tl.constexpr, N_KV_HEAD: tl.constexpr, D: tl.constexpr,
                 PADDED: tl.constexpr, KINDS: tl.constexpr, N_SINK: tl.constexpr, SINKS: tl.constexpr,
                 RING: tl.constexpr, GROUP: tl.constexpr, GROUP_SIZE: tl.constexpr, OVERLAP: tl.constexpr):
    """One head of a row of qkv: of its queries, its keys, or its values."""
    wait(OVERLAP)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    x = qkv + (row * (N_HEAD + 2 * N_KV_HEAD) + head) * D
    if head < N_HEAD:
        store_query(x, q, q_norm, angles, row, head, EPS, N_HEAD, D, PADDED, KINDS)
    else:
        sequence = tl.load(sequences + row).to(tl.int64)
        slot = slot_of(tl.load(positions + row), sequence, slot_table, table_stride, N_SINK, SINKS, RING)
        if head < N_HEAD + N_KV_HEAD:
            at = ((head - N_HEAD) * n_slots + slot) * D
            key = head_of(x, k_norm, angles, row * KINDS, EPS, D, PADDED).to(q.dtype.element_ty)
            write(key.to(tl.float32), k, k_scale, at, sequence >= 0, D, PADDED, GROUP, GROUP_SIZE)
        else:
            at = ((head - N_HEAD - N_KV_HEAD) * n_slots + slot) * D
            write(head_of(x, None, None, row, EPS, D, PADDED), v, v_scale, at, sequence >= 0, D, PADDED, GROUP,
                  GROUP_SIZE)


@triton.jit
def store_new(qkv, q, angles, k, v, k_scale, v_scale, row, first, slot, of_head, real, QUERIES: tl.constexpr,
              SHARED: tl.constexpr, N_HEAD: tl.constexpr, N_KV_HEAD: tl.constexpr, D: tl.constexpr,
              PADDED: tl.constexpr, KINDS: tl.constexpr, GROUP: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """The same without norms: QUERIES heads of a row's queries, from `first` on, and the key and value they share."""
    new = qkv + row * (N_HEAD + 2 * N_KV_HEAD) * D
    for i in tl.static_range(QUERIES):
        store_query(new + (first + i) * D, q, None, angles, row, first + i, 0.0, N_HEAD, D, PADDED, KINDS)
    new += (N_HEAD + first // SHARED) * D
    key = head_of(new, None, angles, row * KINDS, 0.0, D, PADDED).to(q.dtype.element_ty)
    write(key.to(tl.float32), k, k_scale, (of_head + slot) * D, real, D, PADDED, GROUP, GROUP_SIZE)
    value = head_of(new + N_KV_HEAD * D, None, None, row, 0.0, D, PADDED)
    write(value, v, v_scale, (of_head + slot) * D, real, D, PADDED, GROUP, GROUP_SIZE)


@triton.jit
def slot_of(position, sequence, slot_table, table_stride, N_SINK: tl.constexpr, SINKS: tl.constexpr,
            RING: tl.constexpr):
    """The slot of a position, int64; 0 for padding."""
    column = position
    if RING > 0:
        column = tl.where(position < N_SINK, position, SINKS + position % RING)
    return tl.load(slot_table + sequence * table_stride + column, sequence >= 0, 0).to(tl.int64)


@triton.jit
def store_query(x, q, norm, angles, row, head, EPS: tl.constexpr, N_HEAD: tl.constexpr, D: tl.constexpr,
                PADDED: tl.constexpr, KINDS: tl.constexpr):
    """Write a head of a row's queries, of each kind."""
    channels = tl.arange(0, PADDED)
    for kind in tl.static_range(KINDS):
        query = head_of(x, norm, angles, row * KINDS + kind, EPS, D, PADDED)
        to = q + ((row * KINDS + kind) * N_HEAD + head) * D + channels
        tl.store(to, query.to(q.dtype.element_ty), channels < D)


@triton.jit
def head_of(x, norm, angles, of_row, EPS: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr):
    """float32 (PADDED,): the head at x after a norm, turned by angles (of_row,); norm and angles may be None."""
    channels = tl.arange(0, PADDED)
    a = tl.load(x + channels, channels < D, 0).to(tl.float32)
    if norm is not None:
        size = tl.rsqrt(tl.sum(a * a, axis=0) / D + EPS)
        a = a * size * tl.load(norm + channels, channels < D, 0).to(tl.float32)
    if angles is not None:
        # channel i and its other, i + D / 2 or i - D / 2, are a pair: (a cos - b sin, b cos + a sin)
        second = channels >= D // 2
        other = tl.where(second, channels - D // 2, channels + D // 2)
        b = tl.load(x + other, channels < D, 0).to(tl.float32)
        if norm is not None:
            b = b * size * tl.load(norm + other, channels < D, 0).to(tl.float32)
        at = angles + of_row * D + tl.where(second, other, channels)
        cos, sin = tl.load(at, channels < D, 0), tl.load(at + D // 2, channels < D, 0)
        a = tl.where(second, a * cos + b * sin, a * cos - b * sin)
    return a


@triton.jit
def write(x, data, scale, at, real, D: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr,
          GROUP_SIZE: tl.constexpr):
    """Write a head x, float32 (PADDED,), at data + at, as it is stored; nothing unless real."""
    channels = tl.arange(0, PADDED)
    if scale is not None:
        x, scales = quantised(x, GROUP_SIZE)
        groups = tl.arange(0, PADDED // GROUP_SIZE)
        tl.store(scale + at // GROUP + groups, scales, groups < tl.where(real, D // GROUP, 0))
    tl.store(data + at + channels, x.to(data.dtype.element_ty), channels < tl.where(real, D, 0))


@triton.jit
def quantised(x, GROUP_SIZE: tl.constexpr):
    """Codes, whole numbers in float32 (n,), and scales of x (n,): those of `kvcache.storage.quantise`, bit for bit."""
    groups = tl.reshape(x, (x.shape[0] // GROUP_SIZE, GROUP_SIZE))
    scales = tl.maximum(tl.div_rn(tl.max(tl.abs(groups), axis=1), 127.0), 1e-5)
    scales += tl.sum(groups * 0.0, axis=1)  # NaN if a number is not finite: a maximum would hide it
    codes = tl.div_rn(groups, scales[:, None])
    codes = (codes + 12582912.0) - 12582912.0  # at 1.5 * 2^23 the next float32 is 1 away: rounds halves to even
    codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
    return tl.reshape(codes, (x.shape[0],)), scales
