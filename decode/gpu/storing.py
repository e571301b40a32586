"""
The kernel of a GPU step that runs before attention: it writes queries, and the keys and values of the new tokens.

A program computes one head of one row, so that no row depends on another.
"""
import triton
import triton.language as tl


def store(qkv, q, angles, attn, kv, inputs, geometry):
    """
    Write the queries of a layer to q (R, kinds, n_head, head_dim), and its keys and values to their slots. qkv: (R,
    (n_head + 2 * n_kv_head) * head_dim). Behind norms of attn, if it has them, queries and keys are turned by angles.
    """
    g, columns = geometry, geometry.columns
    q_norm, k_norm = (getattr(attn, name, None) for name in ('q_norm', 'k_norm'))
    norms, padded = [each and each.weight.detach() for each in (q_norm, k_norm)], triton.next_power_of_2(g.head_dim)
    # fused multiply-adds are off: the rotation then has the bits of PyTorch's, and so do the int8 codes
    store_kernel[len(qkv), g.n_head + 2 * g.n_kv_head](
        qkv, q, angles, *norms, kv.k, kv.v, kv.k_scale, kv.v_scale, inputs.positions, inputs.sequences,
        inputs.slot_table, inputs.slot_table.stride(0), g.n_slots, q_norm.eps if q_norm else 0.0, g.n_head, g.n_kv_head,
        g.head_dim, padded, q.size(1), g.n_sink, columns.sinks, columns.ring, g.group, group_size(g, padded),
        num_warps=1, enable_fp_fusion=False)


def group_size(geometry, padded):
    """Numbers that share a scale in int8: a power of two, or all of a head, which is padded to one; 0 for others."""
    return padded if geometry.group == geometry.head_dim else geometry.group


@triton.jit(do_not_specialize=['n_slots'])  # one kernel for all caches
def store_kernel(qkv, q, angles, q_norm, k_norm, k, v, k_scale, v_scale, positions, sequences, slot_table, table_stride,
                 n_slots, EPS: tl.constexpr, N_HEAD: tl.constexpr, N_KV_HEAD: tl.constexpr,
                 D: tl.constexpr, PADDED: tl.constexpr, KINDS: tl.constexpr, N_SINK: tl.constexpr, SINKS: tl.constexpr,
                 RING: tl.constexpr, GROUP: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """One head of a row of qkv: of its queries, its keys, or its values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    x = qkv + (row * (N_HEAD + 2 * N_KV_HEAD) + head) * D
    position, sequence = tl.load(positions + row), tl.load(sequences + row).to(tl.int64)
    column = position
    if RING > 0:
        column = tl.where(position < N_SINK, position, SINKS + position % RING)
    slot = tl.load(slot_table + sequence * table_stride + column, sequence >= 0, 0).to(tl.int64)
    if head < N_HEAD:
        channels = tl.arange(0, PADDED)
        for kind in tl.static_range(KINDS):
            query = head_of(x, q_norm, angles, row * KINDS + kind, EPS, D, PADDED)
            to = q + ((row * KINDS + kind) * N_HEAD + head) * D + channels
            tl.store(to, query.to(q.dtype.element_ty), channels < D)
    elif head < N_HEAD + N_KV_HEAD:
        at = ((head - N_HEAD) * n_slots + slot) * D
        key = head_of(x, k_norm, angles, row * KINDS, EPS, D, PADDED).to(q.dtype.element_ty)
        write(key.to(tl.float32), k, k_scale, at, sequence >= 0, D, PADDED, GROUP, GROUP_SIZE)
    else:
        at = ((head - N_HEAD - N_KV_HEAD) * n_slots + slot) * D
        value = head_of(x, None, None, row, EPS, D, PADDED)
        write(value, v, v_scale, at, sequence >= 0, D, PADDED, GROUP, GROUP_SIZE)


@triton.jit
def head_of(x, norm, angles, of_row, EPS: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr):
    """float32 (PADDED,): the head at x behind a norm, turned by angles (of_row,); norm and angles may be None."""
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
