"""Linears on packed weights: the bits of a row depend on the row alone, and its numbers are a product in float64."""
import hashlib
import itertools
import math
import os
from contextlib import contextmanager

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import WEIGHTS, sizes
from conftest import run as run_script
from numba import njit

from decode import weights as weights_of_decoder
from decode.kernel import building, layout
from decode.kernel.emit import LANES
from decode.kernel.layout import FIRST_PANEL, FIRST_WEIGHT, GROUP, SCALE_GROUP, SHEET
from decode.kernel.linears import ADD, ADDED, CLAIMED, GELU, GELU_TANH, STORE, Team, linear, prepare_rows, shared_linear
from decode.kernel.pointers import floats_at, longs_at
from decode.kernel.step import packed_linears, thread_scratch
from decode.kernel.threads import LINE, aligned
from decode.tables import scratch_of
from decode.weights import PackedWeights, padded, quantise_int4, quantise_int8
from model import GPT, GPTConfig

# outputs and inputs of linears: one panel, a sheet that is not full, several sheets, parts of K, and claimed parts
SHAPES = [(3, 20), (5 * LANES, 64), (7 * LANES - 5, 700), (9 * LANES, 2100), (CLAIMED // 512, 512)]
ROWS = [*range(1, 18), 40, 65]


@building.keep_on_disk
@njit
def run(like, memory, number, K, x_at, n_rows, then, out_at, n_out, first, end, thread, n_threads):
    """Linear `number` on panels (first, end), or on one thread's share of all if first is negative."""
    linears, scratch = packed_linears(like, memory), thread_scratch(memory, 0, 0)
    x, out = floats_at(x_at), floats_at(out_at)
    prepare_rows(linears.panels, x, (0, n_rows), K, scratch)
    if first < 0:
        team = Team(thread, n_threads, longs_at(memory[layout.CLAIMS]))
        return shared_linear(team, linears, number, x, n_rows, then, out, n_out, scratch)
    return linear(linears, number, (first, end), x, n_rows, then, out, n_out, scratch)


class Packed:
    """Packed linears of random weights, and what they are multiplied with."""

    def __init__(self, weights, shapes):
        torch.manual_seed(0)
        self.weights, self.n_rows = weights, max(ROWS)
        self.linears = [(torch.randn(n, k) * torch.rand(n, 1), torch.randn(n) * (n % 2)) for n, k in shapes]
        for w, _ in self.linears:  # the largest bytes beside each other
            w[0], w[1] = 1, torch.arange(w.size(1)) % 2 * 2.0 - 1
        c = GPTConfig(block_size=8, vocab_size=8, n_layer=1, n_head=1, n_embd=8, n_inner=max(k for _, k in shapes))
        with self.in_a_model():
            self.packed = PackedWeights(GPT(c), weights)
        self.fill()
        self.claims = aligned(LINE * len(shapes), np.int64)
        self.arrays = self.packed.arrays | {layout.CLAIMS: self.claims} | {
            layout.SCRATCH + index: array for index, array in scratch_of(c, self.n_rows).items()}
        self.memory = np.zeros(layout.SCRATCH + layout.N_SCRATCH, np.int64)
        for index, array in self.arrays.items():
            self.memory[index] = array.ctypes.data

    @contextmanager
    def in_a_model(self):
        """Within it, these linears are those of any model, which is large."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weights_of_decoder, 'linears_of', lambda *_: self.linears)
            patch.setattr(weights_of_decoder, 'CACHED', 0)
            patch.setattr(weights_of_decoder, 'input_squares', lambda _: [torch.ones(k) for w, _ in self.linears
                                                                          for k in w.shape[1:]])
            yield

    def fill(self):
        with self.in_a_model():
            self.packed.fill()

    def inputs(self, number):
        """x (rows, K), zeros where K is padded."""
        n, k = self.linears[number][0].shape
        x = torch.randn(self.n_rows, k) * torch.logspace(-3, 2, self.n_rows)[:, None]
        x[0], x[1], x[2] = 1, -1, 1e-38
        return F.pad(x, (0, padded(k, GROUP) - k))

    def width(self, number, then):
        """Of the outputs: padded as the activations are, but what is stored may end within a panel."""
        n = len(self.linears[number][0])
        return n if then == STORE else padded(n, GROUP)

    def __call__(self, number, x, n_rows, then, out, panels=(-1, 0), n_threads=1):
        """A copy of out, of which the first rows are written. `finite` is then what the threads have returned."""
        out = out.clone()
        self.claims[:] = 0
        self.finite = [run(self.packed.panels[:0], self.memory, number, x.size(1), x.data_ptr(), n_rows, then,
                           out.data_ptr(), out.size(1), *panels, thread, n_threads) for thread in range(n_threads)]
        return out

    def rounded_weights(self, number):
        """What is packed in int8 or int4, (n, k) in float64, read weight by weight as linears.py says."""
        (n, k), bits = self.linears[number][0].shape, 8 if self.weights == 'int8' else 4
        K, (row, i) = padded(k, GROUP), np.indices((n, k))
        sheet, panel, lane, group, j = row // (SHEET * LANES), row // LANES % SHEET, row % LANES, i // GROUP, i % GROUP
        if bits == 8:
            whole, n = self.packed.panels.view(np.uint8), SHEET * LANES
            first = self.packed.table[number, FIRST_WEIGHT] + (sheet * (K // GROUP) + group) * n * 66
            scale = (whole.view(np.uint16)[first // 2 + row % n].astype(np.uint32) << 16).view(np.float32)
            whole = whole[first + 2 * n + (j // 4 * n + row % n) * 4 + j % 4].astype(np.int64) - ADDED
            return torch.from_numpy(whole.astype(np.int8) * scale.astype(np.float64))
        words = self.packed.panels
        first = self.packed.table[number, FIRST_WEIGHT] + (
            (sheet * (K // GROUP) + group) * 10 * SHEET + panel) * LANES + lane
        scale, low = (((words[first + v * SHEET * LANES] >> 16 * (j // SCALE_GROUP) & 0xffff) << 16).astype(
            np.uint32).view(np.float32).astype(np.float64) for v in (0, 1))
        whole = words[first + (2 + j // 8) * SHEET * LANES] >> 8 * (j % 4) + 4 * (j // 4 % 2) & 15
        return torch.from_numpy(low + whole * scale)

    def expected(self, number, x):
        """x @ w + b in float64 and the bound of its rounding error, with the weights and inputs that are multiplied."""
        w, bias = self.linears[number]
        x = x[:, :w.size(1)].double()
        if self.weights == 'bfloat16':
            w = w.bfloat16()
        if self.weights in ('int8', 'int4'):
            w = self.rounded_weights(number)
            groups = F.pad(x, (0, -x.size(1) % SCALE_GROUP)).float().unflatten(1, (-1, SCALE_GROUP))
            peak, largest = groups.abs().amax(dim=2, keepdim=True), torch.tensor(127.0)
            whole = torch.where(peak < 1e-36, 0, (groups * (largest / peak)).round())  # 127 / peak overflows there
            x = (whole.double() * (peak / largest)).flatten(1)[:, :w.size(1)]
        w, bias = w.double(), bias.double()
        bound = (x.abs() @ w.abs().t() + abs(bias)) * (x.size(1) + 4) * 2.0**-24
        return x @ w.t() + bias, bound


def check_bytes():
    """Each product of two numbers of -127 to 127, inputs times int8 weights, against NumPy's integers."""
    packed, n_rows = Packed('int8', [(256, 320)]), 3
    j = torch.arange(320)
    is_first = j % SCALE_GROUP == 0  # of a group: 127 in each of inputs and weights, so that the scales are 1
    x = torch.where(is_first, 127, (j - j // SCALE_GROUP - 1) % 255 - 127)
    w = torch.where(is_first, 127, (torch.arange(256)[:, None] + j) % 255 - 127)  # each number for each other input
    packed.linears[0][0][:] = w
    packed.fill()
    out = packed(0, x.float().repeat(n_rows, 1), n_rows, STORE, torch.zeros(n_rows, 256))
    assert torch.equal(out.long(), torch.from_numpy(x.numpy() @ w.numpy().T).repeat(n_rows, 1))


def check(weights, shapes):
    """All that is promised of a linear. Returns a hash of all outputs."""
    if weights == 'int8':
        check_bytes()
    packed, digest = Packed(weights, shapes), hashlib.sha256()
    for number, (n, _) in enumerate(shapes):
        x, n_panels = packed.inputs(number), -(-n // LANES)
        product, bound = packed.expected(number, x)
        for then in (STORE, ADD, GELU, GELU_TANH):
            before = torch.randn(packed.n_rows, packed.width(number, then))
            alone = torch.cat([packed(number, x[r:r + 1], 1, then, before[r:r + 1]) for r in range(packed.n_rows)])
            digest.update(alone[:, :n].numpy().tobytes())
            approximate = 'tanh' if then == GELU_TANH else 'none'
            expected = {STORE: product, ADD: before[:, :n].double() + product}.get(
                then, F.gelu(product, approximate=approximate))
            error = (alone[:, :n].double() - expected).abs()
            assert (error <= 1.2 * bound + 1e-6 * expected.abs().clamp(min=1)).all(), (weights, n, then)
            for n_rows in ROWS:
                among = torch.cat([alone[:n_rows], before[n_rows:]])
                assert torch.equal(packed(number, x, n_rows, then, before), among), (weights, n, then, n_rows)
            for n_threads in (2, 3):
                assert torch.equal(packed(number, x, 5, then, before, n_threads=n_threads)[:5], alone[:5])
            for cut in {0, 1, n_panels // 2, n_panels}:  # two ranges of panels, which may begin within a sheet
                out = packed(number, x, 9, then, before, (0, cut))
                assert torch.equal(out[:, cut * LANES:], before[:, cut * LANES:])
                assert torch.equal(packed(number, x, 9, then, out, (cut, n_panels))[:9], alone[:9])
    return digest.hexdigest()


def check_finite(weights, shapes):
    """The thread that computes a product notices that it is not finite; rows that are not computed do not count."""
    packed = Packed(weights, shapes)
    for number, (n, k) in enumerate(shapes):
        x, out = packed.inputs(number), torch.zeros(packed.n_rows, packed.width(number, STORE))
        for value in (math.nan, math.inf, -math.inf):
            for row, n_rows, n_threads in itertools.product((0, 16, 64), (1, 17, 65), (1, 2)):
                broken = x.clone()
                broken[row, k - 1] = value
                numbers = packed(number, broken, n_rows, STORE, out, n_threads=n_threads)[:n_rows].isfinite().all()
                assert all(packed.finite) == bool(numbers) == (row >= n_rows)
        packed.packed.bias[packed.packed.table[number, FIRST_PANEL] * LANES + n - 1] = math.nan
        for n_threads in (1, 2):
            assert packed(number, x, 9, STORE, out, n_threads=n_threads)[:, n - 1].isnan().sum() == 9
            assert packed.finite.count(False) == 1
        packed.fill()


@pytest.mark.parametrize('weights', sizes(['int8'], WEIGHTS))
def test_a_row_has_the_same_bits_alone_and_among_others_and_what_is_not_finite_is_noticed(weights):
    check(weights, SHAPES)
    check_finite(weights, SHAPES)


def dequantised(w, bits, squares=None):
    """What `quantise_int8` and `quantise_int4` make of weights (rows, K), in float64; squares: (K,), of the inputs."""
    padding = 0, -w.size(1) % GROUP
    of_w = [] if bits == 8 or squares is None else [F.pad(squares, padding)]
    whole, scale, *low = (v.double() for v in (quantise_int8 if bits == 8 else quantise_int4)(F.pad(w, padding), *of_w))
    scale, *low = (v.repeat_interleave(whole.size(1) // scale.size(1), 1) for v in (scale, *low))
    return (sum(low) + whole * scale)[:, :w.size(1)]


@pytest.mark.parametrize('bits', [8, 4])
def test_what_was_rounded_is_packed(bits):
    packed = Packed(f'int{bits}', SHAPES[:4])
    for number, (w, _) in enumerate(packed.linears):
        assert torch.equal(packed.rounded_weights(number), dequantised(w, bits, torch.ones(w.size(1))))


def test_int8_rounds_to_the_nearest():
    w = torch.randn(40, 64) * torch.logspace(-6, 3, 40)[:, None]
    w[3] = 0
    whole, scale = quantise_int8(w)
    assert 126 <= whole.abs().max() <= 127 and torch.equal(whole, whole.round())
    assert torch.equal(scale, scale.bfloat16().float())
    scale = scale.repeat_interleave(GROUP, 1)
    assert ((whole * scale - w).abs() <= scale * 0.5001).all()
    assert ((scale[:, 0] * 127 / w.abs().amax(1)).nan_to_num(1) < 1.01).all()


def test_int4_rounds_to_the_nearest():
    w = torch.randn(60, 96) * torch.logspace(-36, 34, 60)[:, None]
    w[3, :SCALE_GROUP] = 0
    w[4] = 7.0
    groups = w.double().unflatten(1, (-1, SCALE_GROUP))
    whole, scale, low = (v.double() for v in quantise_int4(w))
    whole, scale, low = whole.unflatten(1, (-1, SCALE_GROUP)), scale[..., None], low[..., None]
    assert torch.equal(whole, whole.round().clamp(0, 15)) and torch.equal(scale, scale.bfloat16().double())
    assert torch.equal(low, low.bfloat16().double())
    error, reach = (low + whole * scale - groups).abs(), torch.maximum(low - groups, groups - low - 15 * scale)
    assert (error <= torch.maximum(scale.abs() * 0.5001, reach * 1.0001)).all()  # what is out of reach is that far off
    assert (error <= 0.2 * groups.abs().amax(dim=2, keepdim=True)).all()
    for value in (math.nan, math.inf, -math.inf):
        w[5, 40] = value
        broken = dequantised(w, 4)[5].unflatten(0, (-1, SCALE_GROUP)).isfinite().all(1)
        assert broken.tolist() == [True, False, True]


SMALL = [(70, 700), (41, 64)]
CHECK = ("import sys, test_linears\n"
         "for weights in sys.argv[1:]:\n    print(test_linears.check(weights, test_linears.SMALL))\n")


def check_elsewhere(before, weights, cpu):
    """What `check` finds in a process with DECODE_CPU=cpu after the code `before`, and a cache of its own."""
    here = os.path.dirname(os.path.abspath(__file__))
    folder = os.path.join(here, '__pycache__', hashlib.sha256(f'{before} {cpu}'.encode()).hexdigest())
    return run_script(here, '-c', before + CHECK, *weights, code=0, PYTHONPATH=os.path.dirname(here),
                      NUMBA_CACHE_DIR=folder, DECODE_CPU=cpu).stdout.split()


SHIFTS = "import decode.kernel.linears as linears\nlinears.DOT, linears.ADDED = 'shifts', 128\n"


@pytest.mark.parametrize('cpu, before', [('avx2', ''), *sizes([], [('avx2', SHIFTS), ('', SHIFTS), ('avxvnni', '')])])
def test_processors_without_some_instructions_give_the_same_bits(cpu, before):
    """Without AVX-512 tiles are others, and bytes are multiplied in other ways, whose sums are exact."""
    features = llvm.get_host_cpu_features()
    if cpu and not (features.get(cpu) or cpu == 'avxvnni' and features.get('avx512vnni')):
        pytest.skip(f"this processor has no {cpu}")
    weights = sizes(['int8'], WEIGHTS)
    assert check_elsewhere(before, weights, cpu) == [check(w, SMALL) for w in weights]
