"""
Linear layers on packed weights, as the compiled step computes them.

Weights are packed (`weights.PackedWeights`) in panels of LANES outputs, and SHEET panels side by side are a sheet. A
vector of weights belongs to one input and the LANES outputs of a panel, so a sum never has to be taken across the lanes
of a register, and memory is read from front to back. A sheet is

    float32     (K, SHEET, LANES)           K inputs, padded with zeros to a multiple of GROUP
    bfloat16    (K / 2, SHEET, LANES, 2)    widened to float32 in registers
    int8        K / GROUP times SHEET * LANES scales, bfloat16, and (GROUP / 4, SHEET, LANES, 4) weights
    int4        (K / GROUP, 10, SHEET, LANES)   of uint32: a vector of scales, one of lows, then eight of weights

and the last sheet of a linear ends with panels of zeros. An output is one chain of fused multiply-adds, from its first
input to its last (rounded weights: over groups, whose sums are exact). So its bits depend neither on how many rows are
multiplied at once nor on the threads.

With rounded weights the inputs are rounded to int8 too, SCALE_GROUP of them to a scale, as llama.cpp does for its Q8_0.
An int8 weight is stored plus ADDED, and a GROUP of them has one scale. An int4 weight, 0 ... 15, stands for low + scale
* number, as in llama.cpp's Q4_1, where SCALE_GROUP of them have one scale and one low: bfloat16, and a vector has both
of a GROUP. A vector of int4 weights has those of 8 inputs for each output. Its byte j has the weight of input j in the
lower half and that of input 4 + j in the upper half: a mask, and a shift and a mask, give what the dot product
instruction takes.

The sums of several rows and panels are a tile, to which one loop over the inputs adds, in registers as far as these
suffice. The code of a tile is emitted with its loops over rows and panels unrolled, so LLVM sees a straight line of
instructions.
"""
from collections import namedtuple
from functools import reduce
from itertools import product

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from decode.kernel import emit, layout
from decode.kernel.emit import ARM, F32, FLOATS, I8, I16, I32, I64, INTS, LANES, address, instruction, njit, same
from decode.kernel.layout import GROUP, SCALE_GROUP, SHEET, SUMMED_ROWS
from decode.kernel.threads import LINE, claim, share
from decode.kernel.vectors import constant, fma, gelu, gelu_tanh, load, padded, silu, store, store_first, sum_lanes

# How the products of four bytes are added to an int32. VNNI has one instruction, for unsigned times signed bytes; ARM
# has one for signed bytes, sdot. AVX2 has one for pairs, in 16 bits that must not overflow: the size of a byte times
# the other one with its sign. Elsewhere bytes are shifted out of their numbers.
VNNI = {8: 'avxvnni', 16: 'avx512vnni'}[LANES]
DOT = ('vnni' if emit.features.get(VNNI) else 'avx2' if LANES == 8 and emit.features.get('avx2')
       else 'sdot' if emit.features.get('dotprod') else 'shifts')
ADDED = 128 if DOT in ('vnni', 'shifts') else 0  # to int8 weights, so that they are unsigned
BYTES, SHORTS = ir.VectorType(I8, 4 * LANES), ir.VectorType(I16, 2 * LANES)
INPUTS_PER_VECTOR = {F32: 1, I16: 2, I8: 4, I32: 8}  # of packed weights, by their type; int4 are packed as uint32
ELEMENTS = {F32: GROUP, I16: GROUP, I8: 2 + GROUP, I32: 2 + GROUP // 8}  # of an output, for GROUP inputs
# How many panels of a sheet a tile of 1, 2, ... rows multiplies at once, by the type of the weights: so many that the
# sums and what is added to them fit the registers, 32 with AVX-512 and 16 elsewhere. Tiles of 3 and 4 rows of rounded
# weights are exceptions on x86: they multiply all panels, and some of their sums are in memory. A tile of all panels
# reads the weights in order, so a step of L takes 0.6 to 0.8 of the time that it takes with tiles of 2 panels.
TILES = {F32: (4, 4, 4, 4, 4, 4), I16: (4, 4, 4, 4, 4), I8: (4, 4, 4, 4, 2), I32: (4, 4, 4, 4, 2)}
FEW_ROWS = 16  # a step of at most so many rows has only tiles of all panels
if LANES == 8:
    TILES = {F32: (4, 4, 2, 2, 2, 2), I16: (4, 4, 2, 2), I8: (4, 4, 4, 4, 2, 2), I32: (4, 4, 4, 4, 2, 2)}
    FEW_ROWS = 0
if ARM:  # a vector is two of its 32 registers; rows and panels with the fewest instructions for a product, by counting
    TILES |= {I16: (4, 2, 2, 2), I8: (4, 4, 2, 2), I32: (4, 2, 2, 2)}

# what is done with the outputs of a linear: stored, added to `out`, stored after a GELU, exact or by tanh, or stored as
# silu(gate) * up, where each panel of gates is followed by one of ups. These constants are int64, because numba would
# compile `linear` again for each plain number
STORE, ADD, GELU, GELU_TANH, SWIGLU = map(np.int64, range(5))
CLAIMED = 2**20  # a linear with at least so many bytes of weights is shared in small parts that the threads claim

# Vectors of a panel that all tiles multiply before the next ones are read: 128 KB of a sheet, which fit a core's second
# cache.
PART = 512
# With this many rows and more, tiles of some of the panels prefetch the next part of a sheet, or of the next sheet.
# That reduced the time of prompts of M and L to 0.85 to 0.99 in int8 and int4, to 0.77 to 0.89 in floats with AVX2
PREFETCHING_ROWS = 16
NEXT_PART = -1  # a distance

# all linears: their panels, a bias for each output row, and the table that says where each linear is, see layout.py
Linears = namedtuple('Linears', 'panels bias table')

Team = namedtuple('Team', 'thread n_threads claims')  # one thread of those that share the step


@instruction(types.int64)
def inputs_per_vector(builder, w):
    """The number of inputs that a vector of packed weights w covers: 1, 2, 4 or 8, by their type"""
    return I64(INPUTS_PER_VECTOR[w.type.pointee])


@instruction(types.int64)
def sheet_elements(builder, w, n_inputs):
    """How many elements of packed weights w a sheet has for so many inputs."""
    n_groups = builder.udiv(n_inputs, I64(GROUP))
    return builder.mul(n_groups, I64(ELEMENTS[w.type.pointee] * SHEET * LANES))


@instruction(types.UniTuple(types.int64, 2))
def most_rows(builder, w):
    """
    For packed weights w, the most rows of a tile that multiplies all panels of a sheet at once, and the most of any.
    """
    panels = TILES[w.type.pointee]
    return [I64(n) for n in (panels.count(SHEET), len(panels))]


@instruction(types.void)
def multiply_tile(builder, w, w_at, ahead, x, rounded, scales, starts, input_sums, x_at, stride, n_rows, n_inputs, more,
                  sums, sums_at):
    """
    One tile of w @ x: the panels of a sheet times n_rows rows of x, over n_inputs inputs in ascending order.

    w at w_at: a sheet of packed weights from the first of these inputs on, see linears.py. x at x_at + r * stride: row
    r, float32. For int8 and int4 weights it is read from `rounded`, 8 bits, with the scales of the groups of all rows.
    starts: where the int32 sums of these groups begin, for int8; input_sums: the sums of their inputs, for int4. The
    sums, (n_rows, SHEET, LANES) at sums_at, are continued where `more`. While weights from w_at on are multiplied,
    those from `ahead` on are prefetched, unless they are the same.
    """
    element, x_group = w.type.pointee, builder.udiv(x_at, I64(SCALE_GROUP))
    pointers = [address(builder, *at) for at in (
        (w, w_at), (w, ahead), (rounded if element in (I8, I32) else x, x_at), (scales, x_group),
        (starts if element == I8 else input_sums, x_group), (sums, sums_at))]
    multiplied, others = (builder.append_basic_block(name) for name in ('multiplied', 'others'))
    switch = builder.switch(n_rows, others)
    for rows, n in enumerate(TILES[element], 1):
        with builder.goto_block(builder.append_basic_block(f'rows_{rows}')):
            switch.add_case(I64(rows), builder.block)
            function = tile_function(builder.module, element, rows, n, [p.type for p in pointers])
            builder.call(function, [*pointers, stride, n_inputs, more])
            builder.branch(multiplied)
    with builder.goto_block(others):
        builder.unreachable()
    builder.position_at_end(multiplied)


def tile_function(module, element, n_rows, n, pointers):
    """The function of a compiled module for a tile of n_rows rows, n panels at once."""
    name = f'decode_tile_{n_rows}x{n}_{element.intrinsic_name}'
    if name not in module.globals:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [*pointers, I64, I64, emit.I1]), name)
        function.linkage = 'linkonce_odr'
        function.attributes.add('noinline')  # copies of all tiles at each call would take a minute to compile
        builder = ir.IRBuilder(function.append_basic_block())
        for first in range(0, SHEET, n):
            Tile(builder, element, n_rows, n, first, function.args).emit()
        builder.ret_void()
    return module.globals[name]


class Tile:
    """The code of a tile for panels first ... first + n - 1 of a sheet; args are those of its function."""

    def __init__(self, builder, element, n_rows, n, first, args):
        self.builder, self.inputs, self.n_rows, self.n, self.first = (
            builder, INPUTS_PER_VECTOR[element], n_rows, n, first)
        self.of_vector = 4 * LANES // emit.bytes_of(element)  # elements
        self.of_group = ELEMENTS[element] * LANES * SHEET
        self.w, self.ahead, self.x, self.scales, self.of_groups, self.sums, self.stride, self.n_inputs, self.more = args
        self.cells = list(product(range(n_rows), range(n)))

    def at(self, pointer, as_type, *terms):
        """The address of pointer[sum of the terms]; a term is a number, or a product of an LLVM value and a number."""
        index = I64(0)
        for term in terms:
            value, times = term if isinstance(term, tuple) else (I64(term), 1)
            index = self.builder.add(index, self.builder.mul(value, I64(times)))
        return address(self.builder, pointer, index, as_type)

    def emit(self):
        builder = self.builder
        places = [self.at(self.sums, FLOATS, (r * SHEET + self.first + p) * LANES) for r, p in self.cells]
        begun = [builder.select(self.more, emit.load(builder, place), same(0.0, FLOATS)) for place in places]
        sums = [cgutils.alloca_once_value(builder, v) for v in begun]
        self.is_ahead = builder.icmp_unsigned('!=', self.ahead, self.w)
        if self.inputs >= 4:
            self.add_groups(sums)
        else:
            with cgutils.for_range(builder, builder.udiv(self.n_inputs, I64(self.inputs))) as loop:
                self.prefetch(loop.index, SHEET * self.of_vector)
                self.add_products(sums, loop.index, (loop.index, self.inputs))
        for total, place in zip(sums, places):
            builder.store(builder.load(total), place).align = 4

    def prefetch(self, i, n):
        """
        Prefetch number i of the parts of n elements that lie `ahead`, where something does: into the first cache, or by
        a tile of some of the panels, for which several passes read them, into the second one.
        """
        level = 3 if self.n == SHEET else 2
        if self.first == 0:
            with self.builder.if_then(self.is_ahead):
                for first in range(0, n, 16 * self.of_vector // LANES):  # a line has 64 bytes
                    at = self.at(self.ahead, I8, (i, n), first)
                    emit.prefetch(self.builder, at, level)

    def load_vectors(self, i, *behind):
        """
        Vector number i of each panel, which lies behind so many other elements (see `at`).

        Where a tile reads all panels, rounded weights are loaded in their order. A processor prefetches what is read
        from front to back, and LLVM would mix these loads: on Zen 4 a step of L took 1.5 times as long in int8, 1.8
        times in int4. (ARM has one instruction for two loads beside each other, which LLVM may then not use.)
        """
        as_type = FLOATS if self.inputs == 1 else INTS
        load_vector = emit.load_in_order if self.inputs >= 4 and self.n == SHEET and not ARM else emit.load
        at = [self.at(self.w, as_type, (i, SHEET * self.of_vector), (self.first + p) * self.of_vector, *behind)
              for p in range(self.n)]
        return [load_vector(self.builder, p) for p in at]

    def add_products(self, sums, i, *first_input, behind=()):
        """sums += vector number i of each panel times its inputs, of which the first has this number (see `at`)"""
        builder = self.builder
        weights = [of_each_input(builder, v, self.inputs) for v in self.load_vectors(i, *behind)]
        sizes = [size_of_bytes(builder, v) for v, in weights] if self.inputs == 4 and DOT == 'avx2' else None
        for r, k in product(range(self.n_rows), range(len(weights[0]))):
            in_bytes = self.inputs >= 4
            at = self.at(self.x, I32 if in_bytes else F32, (self.stride, r), *first_input, 4 * k if in_bytes else k)
            x = emit.broadcast(builder, emit.load(builder, at))
            for p in range(self.n):
                s, w = sums[r * self.n + p], weights[p][k]
                v = builder.load(s)
                if sizes:
                    v = dot_bytes(builder, v, sizes[p], with_signs(builder, x, w))
                elif in_bytes:
                    v = dot_bytes(builder, v, w, x)
                else:
                    v = emit.fma(builder, w, x, v)
                builder.store(v, s)

    def add_groups(self, totals):
        """totals += int32 sums of groups of inputs, times the scales of inputs and weights"""
        sums = [cgutils.alloca_once(self.builder, INTS) for _ in totals]
        with cgutils.for_range(self.builder, self.builder.udiv(self.n_inputs, I64(GROUP))) as loop:
            self.prefetch(loop.index, self.of_group)
            (self.add_int8_group if self.inputs == 4 else self.add_int4_group)(totals, sums, loop.index)

    def add_int8_group(self, totals, sums, group):
        """For int8 a GROUP has one scale, and its inputs have two: (sums * scale + sums * scale) * scale of weights."""
        builder, behind = self.builder, [(self.builder.add(group, I64(1)), 2 * SHEET * LANES)]
        scaled, shorts = [None] * len(totals), ir.VectorType(I16, LANES)
        for half in range(2):
            self.sum_products(sums, group, half, builder.mul(group, I64(GROUP // 4)), behind)
            for c, (s, (r, _)) in enumerate(zip(sums, self.cells)):
                v, scale = builder.sitofp(builder.load(s), FLOATS), self.of_row(self.scales, group, half, r)
                scaled[c] = emit.fma(builder, v, scale, scaled[c]) if half else builder.fmul(v, scale)
        at = [self.at(self.w, shorts, (group, SHEET * LANES * ELEMENTS[I8]), (self.first + p) * LANES * 2)
              for p in range(self.n)]
        scales = [emit.widened(builder, emit.load(builder, p, 2)) for p in at]
        for v, total, (_, p) in zip(scaled, totals, self.cells):
            builder.store(emit.fma(builder, v, scales[p], builder.load(total)), total)

    def add_int4_group(self, totals, sums, group):
        """For int4 a half has its own scale and low, and the low is multiplied by the sum of the half's inputs."""
        builder, first = self.builder, self.builder.mul(group, I64(ELEMENTS[I32]))
        scales, lows = ([of_each_input(builder, v, 2) for v in self.load_vectors(builder.add(first, I64(i)))]
                        for i in range(2))
        for half in range(2):
            self.sum_products(sums, group, half, builder.add(first, I64(2)))
            for s, total, (r, p) in zip(sums, totals, self.cells):
                v = builder.fmul(builder.sitofp(builder.load(s), FLOATS), scales[p][half])
                v = emit.fma(builder, v, self.of_row(self.scales, group, half, r), builder.load(total))
                v = emit.fma(builder, lows[p][half], self.of_row(self.of_groups, group, half, r), v)
                builder.store(v, total)

    def sum_products(self, sums, group, half, first, behind=()):
        """sums = those of half a group, whose vectors of weights begin behind number `first`."""
        builder, vectors = self.builder, SCALE_GROUP // self.inputs
        for s, (r, _) in zip(sums, self.cells):
            begins = self.inputs == 4 and ADDED
            builder.store(self.of_row(self.of_groups, group, half, r) if begins else same(0, INTS), s)
        for v in range(half * vectors, (half + 1) * vectors):
            self.add_products(sums, builder.add(first, I64(v)), (group, GROUP), self.inputs * v, behind=behind)

    def of_row(self, numbers, group, half, r):
        """The number of half a group of row r, in all lanes"""
        of_row = self.builder.udiv(self.stride, I64(SCALE_GROUP))
        at = self.at(numbers, None, (of_row, r), (group, GROUP // SCALE_GROUP), half)
        return emit.broadcast(self.builder, emit.load(self.builder, at))


def of_each_input(builder, v, inputs):
    """
    A vector of packed weights as one vector for each input. One of int8 stays as it is, and those of int4 have four
    inputs in each number.
    """
    if inputs == 8:
        return [builder.and_(half, same(0x0f0f0f0f, INTS)) for half in (v, builder.lshr(v, same(4, INTS)))]
    if inputs != 2:
        return [v]
    halves = builder.shl(v, same(16, INTS)), builder.and_(v, same(-65536, INTS))  # a bfloat16 is a float32's upper half
    return [builder.bitcast(half, FLOATS) for half in halves]


def dot_bytes(builder, sums, a, b):
    """
    sums + the dot products of four uint8 of a with four int8 of b, lane by lane (a and b as int32). With AVX2 no
    products of two bytes beside each other may add up to more than 32,767; with sdot the bytes of a are int8 too.
    """
    if DOT == 'vnni':
        return emit.call(builder, f'llvm.x86.avx512.vpdpbusd.{32 * LANES}', INTS, sums, a, b)
    if DOT == 'avx2':
        pairs = emit.call(builder, 'llvm.x86.avx2.pmadd.ub.sw', SHORTS, *[builder.bitcast(v, BYTES) for v in (a, b)])
        return builder.add(sums, emit.call(builder, 'llvm.x86.avx2.pmadd.wd', INTS, pairs, same(1, SHORTS)))
    if DOT == 'sdot':  # of four lanes
        halves, four, bytes_of_four = [], ir.VectorType(I32, 4), ir.VectorType(I8, 16)
        for first in range(0, LANES, 4):
            lanes = ir.Constant(four, list(range(first, first + 4)))
            of_sums, *of_bytes = (builder.shuffle_vector(v, v, lanes) for v in (sums, a, b))
            halves.append(emit.call(builder, 'llvm.aarch64.neon.sdot.v4i32.v16i8', four, of_sums,
                               *[builder.bitcast(v, bytes_of_four) for v in of_bytes]))
        return builder.shuffle_vector(*halves, ir.Constant(INTS, list(range(LANES))))
    for byte in range(4):
        up = same(24 - 8 * byte, INTS)
        a_byte = builder.lshr(builder.shl(a, up), same(24, INTS))
        b_byte = builder.ashr(builder.shl(b, up), same(24, INTS))
        sums = builder.add(sums, builder.mul(a_byte, b_byte))
    return sums


def size_of_bytes(builder, v):
    return builder.bitcast(emit.call(builder, 'llvm.abs.v32i8', BYTES, builder.bitcast(v, BYTES), emit.I1(0)), INTS)


def with_signs(builder, v, of):
    """The bytes of v with the signs of those of `of` as factors: -1, 0 or 1."""
    v, of = (builder.bitcast(each, BYTES) for each in (v, of))
    return builder.bitcast(emit.call(builder, 'llvm.x86.avx2.psign.b', BYTES, v, of), INTS)


@instruction(types.void)
def round_inputs(builder, x, group, rounded, scales, starts, input_sums):
    """Round two groups of SCALE_GROUP inputs of x, from number `group` on, to int8; see prepare_rows."""
    first = builder.mul(group, I64(SCALE_GROUP))
    places = [[builder.add(first, I64(g * SCALE_GROUP + i)) for i in range(0, SCALE_GROUP, LANES)] for g in range(2)]
    inputs = [[emit.load(builder, address(builder, x, place, FLOATS)) for place in of_group] for of_group in places]

    def store_both(array, v):
        """array[group : group + 2] = the numbers of the groups, each of which is in half of the lanes of v"""
        v = builder.shuffle_vector(v, v, ir.Constant(ir.VectorType(I32, 2), [0, LANES // 2]))
        builder.store(v, address(builder, array, group, v.type)).align = 4

    def larger(a, b):
        return builder.select(builder.icmp_signed('>', a, b), a, b)

    zero, whole_peak = same(0.0, FLOATS), same(127.0, FLOATS)
    # absolute values are compared by their bits, as int32: infinity is then above all numbers, and NaN above infinity
    sizes = [reduce(larger, [builder.and_(builder.bitcast(v, INTS), same(0x7fffffff, INTS)) for v in of_group])
             for of_group in inputs]
    peaks = builder.bitcast(emit.fold_each(builder, sizes, larger), FLOATS)
    # int8 has neither infinity nor NaN, so a group that contains one of them gets NaN as its scale
    scale = emit.fma(builder, peaks, zero, builder.fdiv(peaks, whole_peak))
    is_zero = builder.fcmp_ordered('<', peaks, same(1e-36, FLOATS))  # below it the quotient overflows
    to_whole = builder.select(is_zero, zero, builder.fdiv(whole_peak, peaks))
    totals = [same(0, INTS)] * 2
    for g in range(2):
        factor = builder.shuffle_vector(to_whole, to_whole, same(g * LANES // 2, INTS))
        for place, v in zip(places[g], inputs[g]):
            whole = emit.to_ints(builder, builder.fmul(v, factor))
            emit.store_bytes(builder, rounded, place, whole)
            totals[g] = builder.add(totals[g], whole)
    total = emit.fold_each(builder, totals, builder.add)
    store_both(scales, scale)
    store_both(starts, builder.mul(total, same(-ADDED, INTS)))
    store_both(input_sums, builder.fmul(scale, builder.sitofp(total, FLOATS)))


@njit
def prepare_rows(w, x, rows, K, scratch):
    """
    Before `linear` is called: for int8 and int4 weights w, round rows (from, to) of x, (.., K), to int8, into the
    scratch. The largest in size of SCALE_GROUP inputs becomes 127 or -127. For each group scratch.scales gets the
    scale, input_sums the sum of what was rounded, and starts -ADDED times the sum of the int8, because each stored int8
    weight is ADDED too large.
    """
    if inputs_per_vector(w) >= 4:
        for group in range(rows[0] * K // SCALE_GROUP, rows[1] * K // SCALE_GROUP, 2):
            round_inputs(x, group, scratch.rounded, scratch.scales, scratch.starts, scratch.input_sums)


@njit
def tile_sizes(w, n_rows, K):
    """
    (rows of a tile, rows whose sums are kept at a time, inputs that all tiles multiply before the next ones are read).
    """
    at_once, most = most_rows(w)
    if n_rows <= at_once:
        return n_rows, max(1, n_rows), K
    n_tiles = -(-n_rows // (at_once if n_rows <= FEW_ROWS else most))
    n_tile, n_parts = -(-n_rows // n_tiles), -(-K // (PART * inputs_per_vector(w)))
    return n_tile, SUMMED_ROWS // n_tile * n_tile, padded(-(-K // n_parts), GROUP)


@njit(forceinline=True)
def multiply_sheet(linears, w_at, distance, then_at, K, x, row, n_rows, sizes, scratch):
    """
    The sums of n_rows rows of x, from `row` on, and the sheet at w_at, into scratch.sums: (n_rows, SHEET, LANES).

    While weights are multiplied for the first time, those that lie so many elements ahead are prefetched; distance 0:
    none. With NEXT_PART it is the part that is read next, which is at then_at after the last one.
    """
    w, k = linears.panels, 0
    n_tile, _, part = sizes
    while k < K:
        n, at, r = min(part, K - k), w_at + sheet_elements(w, k), 0
        ahead = at + distance
        if distance == NEXT_PART:
            ahead = at + sheet_elements(w, n) if k + n < K else then_at
        while r < n_rows:
            multiply_tile(w, at, ahead if r == 0 else at, x, scratch.rounded, scratch.scales, scratch.starts,
                          scratch.input_sums, (row + r) * K + k, K, min(n_tile, n_rows - r), n, k > 0, scratch.sums,
                          r * SHEET * LANES)
            r += n_tile
        k += part


@njit
def linear(linears, number, panels, x, n_rows, then, out, n_out, scratch):
    """
    Panels (from, to) of linear `number`, for the first n_rows rows of x, as prepare_rows has left them.

    The n_out outputs of a row go to the same row of out, (n_rows, n_out); `then` is STORE, ADD, GELU, GELU_TANH or
    SWIGLU.
    Returns whether all values of x @ w + b in these panels are finite, before `then` is applied to them.
    """
    zero, zeros = constant(0.0), constant(0.0)  # 0 times infinity or NaN makes zeros NaN
    table, at = linears.table, number * layout.N_COLUMNS
    first_weight, first_panel, K = (
        table[at + layout.FIRST_WEIGHT], table[at + layout.FIRST_PANEL], table[at + layout.N_INPUTS])
    sizes, distance = tile_sizes(linears.panels, n_rows, K), table[at + layout.PREFETCH_DISTANCE]
    # tiles of some of the panels do not read weights in order, so the processor prefetches few of these weights
    if n_rows >= PREFETCHING_ROWS and sizes[0] > most_rows(linears.panels)[0]:
        distance = NEXT_PART
    for sheet in range(panels[0] // SHEET * SHEET, panels[1], SHEET):
        for row in range(0, n_rows, sizes[1]):
            n = min(n_rows - row, sizes[1])
            w_at = first_weight + sheet // SHEET * sheet_elements(linears.panels, K)
            then_at = w_at if row + n < n_rows else w_at + sheet_elements(linears.panels, K)
            multiply_sheet(linears, w_at, distance, then_at, K, x, row, n, sizes, scratch)
            for p in range(max(sheet, panels[0]), min(sheet + SHEET, panels[1])):
                bias = load(linears.bias, (first_panel + p) * LANES)
                for i in range(n):
                    v = load(scratch.sums, (i * SHEET + p - sheet) * LANES) + bias
                    zeros = fma(v, zero, zeros)
                    to = (row + i) * n_out + p * LANES
                    if then == ADD:
                        store(out, to, load(out, to) + v)
                    elif then == GELU:
                        store(out, to, gelu(v))
                    elif then == GELU_TANH:
                        store(out, to, gelu_tanh(v))
                    elif then == SWIGLU:  # both panels are in this sheet, because SHEET is even
                        if p % 2 == 0:
                            store(scratch.sums, (i * SHEET + p - sheet) * LANES, silu(v))
                        else:
                            gate = load(scratch.sums, (i * SHEET + p - 1 - sheet) * LANES)
                            store(out, (row + i) * n_out + p // 2 * LANES, gate * v)
                    elif (p + 1) * LANES <= n_out:
                        store(out, to, v)
                    else:
                        store_first(out, to, v, n_out - p * LANES)
    return sum_lanes(zeros) == 0.0


@njit
def shared_linear(team, linears, number, x, n_rows, then, out, n_out, scratch):
    """
    All panels of linear `number`, shared among the threads; see `linear`. Returns True if x @ w + b is finite in all
    panels that this thread has computed.

    A small linear is divided into one part for each thread, always the same part, which then stays in its core's cache.
    A large one is divided into eight parts for each thread, and a thread that has finished a part claims the next one,
    because a core that also runs other processes is slower for a while. A part is whole sheets.
    """
    at, n_threads = number * layout.N_COLUMNS, team.n_threads
    n_panels, K = linears.table[at + layout.N_PANELS], linears.table[at + layout.N_INPUTS]
    n_sheets = -(-n_panels // SHEET)
    small = n_threads == 1 or n_panels * K * LANES * 4 // inputs_per_vector(linears.panels) < CLAIMED
    n_parts = n_threads if small else min(n_sheets, 8 * n_threads)
    part, finite = team.thread if small else claim(team.claims, number * LINE), True
    while part < n_parts:
        first, end = share(n_sheets, part, n_parts)
        panels = first * SHEET, min(end * SHEET, n_panels)
        finite &= linear(linears, number, panels, x, n_rows, then, out, n_out, scratch)
        part = n_parts if small else claim(team.claims, number * LINE)
    return finite
