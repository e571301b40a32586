"""
Tiles: sums of several rows and panels, each in a register, that one loop over the inputs adds to.

Each function here unrolls its loops over the tile while it emits code, so LLVM sees a straight line of instructions. In
attention a tile is, to numba, a tuple of `Floats`.
"""
from itertools import product

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from decode.kernel.layout import GROUP, SHEET
from decode.kernel.vectors import (
    F32,
    FLOATS,
    I1,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    address,
    broadcast,
    call,
    emit_fma,
    emit_load,
    features,
    floats,
    instruction,
    same,
)

# does the processor have one instruction for int8 x int8 with int32 sums?
DOT_PRODUCTS = LANES == 16 and bool(features.get('avx512vnni'))
INPUTS_PER_VECTOR = {F32: 1, I16: 2, I8: 4}  # of packed weights, by their type
# How many panels of a sheet a tile of 1, 2, ... rows multiplies at once, by the type of the weights: so many that the
# sums and what is added to them fit the registers, 32 with AVX-512 and 16 elsewhere. And how many rows a tile has at
# most where there are several.
TILES = {F32: (4, 4, 4, 4, 4, 4, 2, 2), I16: (4, 4, 4, 4, 4), I8: (4, 4, 4, 4, 2, 2, 2, 2)}
ONE_OF_SEVERAL = {F32: 6, I16: 5, I8: 8}
if LANES == 8:
    TILES = {F32: (4, 4, 2, 2, 2, 2), I16: (4, 4, 2, 2), I8: (4, 4, 2)}
    ONE_OF_SEVERAL = {F32: 6, I16: 4, I8: 3}
# Tiles of so many rows and more prefetch weights. Prefetching for a single row made a step 0.76 to 1.02 times as fast
# (S, M, L with each type of weights, on an AMD EPYC of the Zen 4 kind).
PREFETCH_ROWS = 3


@intrinsic(prefer_literal=True)
def zeros(typing, n):
    """A tile of n vectors of zeros"""
    def emit(context, builder, sig, args):
        return context.make_tuple(builder, sig.return_type, [same(0.0, FLOATS)] * n.literal_value)
    return types.UniTuple(floats, n.literal_value)(n), emit


@instruction(types.int64)
def inputs_per_vector(builder, w):
    """The number of inputs that a vector of packed weights w covers: 1, 2 or 4, by their type"""
    return I64(INPUTS_PER_VECTOR[w.type.pointee])


@instruction(types.UniTuple(types.int64, 3))
def most_rows(builder, w):
    """
    The most rows of a tile, for packed weights w: of one that multiplies all panels of a sheet at once, of one that
    is alone, and of one of several.
    """
    panels = TILES[w.type.pointee]
    return [I64(n) for n in (panels.count(SHEET), len(panels), ONE_OF_SEVERAL[w.type.pointee])]


@instruction(types.void)
def multiply_tile(builder, w, w_at, ahead, start, x, rounded, scale, x_at, stride, n_rows, n_inputs, more, sums,
                  sums_at):
    """
    One tile of w @ x: the panels of a sheet times n_rows rows of x, over n_inputs inputs in ascending order.

    w at w_at: a sheet of packed weights from the first of these inputs on, see linears.py. x at x_at + r * stride: row
    r, float32. For int8 weights it is read from `rounded`, uint8, with scale, the scales of the groups of all rows, and
    start, where the sums of all groups of weights begin. The sums, (n_rows, SHEET, LANES) at sums_at, are continued
    where `more`. Tiles of PREFETCH_ROWS rows and more prefetch half as many weights at `ahead`.
    """
    element, group = w.type.pointee, I64(GROUP)
    pointers = [address(builder, *at) for at in (
        (w, w_at), (w, ahead), (start, builder.udiv(w_at, group)), (rounded if element == I8 else x, x_at),
        (scale, builder.udiv(x_at, group)), (sums, sums_at))]
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
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [*pointers, I64, I64, I1]), name)
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
        self.w, self.ahead, self.start, self.x, self.scale, self.sums, self.stride, self.n_inputs, self.more = args
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
        begun = [builder.select(self.more, emit_load(builder, place), same(0.0, FLOATS)) for place in places]
        sums = [cgutils.alloca_once_value(builder, v) for v in begun]
        if self.inputs == 4:
            self.add_groups(sums)
        else:
            with cgutils.for_range(builder, builder.udiv(self.n_inputs, I64(self.inputs))) as loop:
                self.add_products(sums, loop.index)
        for total, place in zip(sums, places):
            builder.store(builder.load(total), place).align = 4

    def add_products(self, sums, i):
        """sums += vector number i of each panel times its inputs"""
        builder, of_vector = self.builder, LANES * self.inputs
        if self.n_rows >= PREFETCH_ROWS:
            done = self.first // self.n * SHEET // 2 * LANES  # by the panels before
            for v in range(0, SHEET // 2, 16 // LANES):
                p = self.at(self.ahead, I8, (i, SHEET // 2 * of_vector), (self.n_inputs, done), v * of_vector)
                call(builder, 'llvm.prefetch.p0', ir.VoidType(), p, I32(0), I32(2), I32(1))  # read, level 2, data
        as_type = FLOATS if self.inputs == 1 else INTS
        at = [self.at(self.w, as_type, (i, SHEET * of_vector), (self.first + p) * of_vector) for p in range(self.n)]
        weights = [of_each_input(builder, emit_load(builder, p), self.inputs) for p in at]
        for r, k in product(range(self.n_rows), range(len(weights[0]))):
            at = self.at(self.x, I32 if self.inputs == 4 else F32, (self.stride, r), (i, self.inputs), k)
            x = broadcast(builder, emit_load(builder, at))
            for p in range(self.n):
                s, w = sums[r * self.n + p], weights[p][k]
                v = builder.load(s)
                builder.store(dot_bytes(builder, v, x, w) if self.inputs == 4 else emit_fma(builder, w, x, v), s)

    def add_groups(self, totals):
        """totals += the int32 sums of each group times its scale"""
        builder, vectors = self.builder, GROUP // 4
        sums = [cgutils.alloca_once(builder, INTS) for _ in totals]
        with cgutils.for_range(builder, builder.udiv(self.n_inputs, I64(GROUP))) as loop:
            # the inputs are 128 too large, so the sums start at -128 times the sum of the weights
            for s, (_, p) in zip(sums, self.cells):
                shorts = ir.VectorType(I16, LANES)
                at = self.at(self.start, shorts, (loop.index, SHEET * LANES), (self.first + p) * LANES)
                v = builder.sext(emit_load(builder, at, 2), INTS)
                builder.store(builder.shl(v, same(7, INTS)), s)
            with cgutils.for_range(builder, I64(vectors)) as of_group:
                self.add_products(sums, builder.add(builder.mul(loop.index, I64(vectors)), of_group.index))
            groups = builder.udiv(self.stride, I64(GROUP))
            for s, total, (r, _) in zip(sums, totals, self.cells):
                scale = broadcast(builder, emit_load(builder, self.at(self.scale, None, (groups, r), (loop.index, 1))))
                v = builder.sitofp(builder.load(s), FLOATS)
                builder.store(emit_fma(builder, v, scale, builder.load(total)), total)


def of_each_input(builder, v, inputs):
    """A vector of packed weights as one vector for each input; one of int8 stays as it is."""
    if inputs != 2:
        return [v]
    halves = builder.shl(v, same(16, INTS)), builder.and_(v, same(-65536, INTS))  # a bfloat16 is a float32's upper half
    return [builder.bitcast(half, FLOATS) for half in halves]


def dot_bytes(builder, sums, x, w):
    """sums + the dot products of four uint8 of x with four int8 of w, lane by lane (x and w as int32)."""
    if DOT_PRODUCTS:
        return call(builder, 'llvm.x86.avx512.vpdpbusd.512', INTS, sums, x, w)
    for byte in range(4):
        up = same(24 - 8 * byte, INTS)
        x_byte = builder.lshr(builder.shl(x, up), same(24, INTS))
        w_byte = builder.ashr(builder.shl(w, up), same(24, INTS))
        sums = builder.add(sums, builder.mul(x_byte, w_byte))
    return sums


@instruction(floats)
def sum_each(builder, sums):
    """LANES vectors -> one, whose lane r is the sum of the lanes of vector r"""
    width = LANES
    while width > 1:  # fold the lanes of two vectors into one, until one vector is left
        half, width = len(sums) // 2, width // 2
        # lanes of a and of b in turns
        starts = [s + source for s in range(0, LANES, 2 * width) for source in (0, LANES)]
        low = ir.Constant(INTS, [s + k for s in starts for k in range(width)])
        high = ir.Constant(INTS, [s + k + width for s in starts for k in range(width)])
        sums = [builder.fadd(builder.shuffle_vector(a, b, low), builder.shuffle_vector(a, b, high))
                for a, b in zip(sums[:half], sums[half:])]
    return sums[0]
