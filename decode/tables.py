"""The two tables that the compiled step reads, and the arrays whose addresses are in them; see layout.py."""
import numpy as np

from decode import layout
from decode.fingerprint import Watch, probe
from decode.layout import GROUP
from decode.packing import padded
from decode.threads import aligned
from decode.vectors import LANES


class Activations:
    """
    The activations of n_rows rows: `shared` by all threads, and the `scratch` of each thread, {index: array}.

    They keep their size; a larger batch gets new ones.
    """

    def __init__(self, config, n_rows, n_threads):
        c = config
        C_p, ff_p = padded(c.n_embd, GROUP), padded(4 * c.n_embd, GROUP)
        q_p = c.n_head * padded(c.n_embd // c.n_head, LANES)
        self.n_rows, self.cache_pos = n_rows, np.zeros(n_rows, np.int64)
        widths = {layout.X: C_p, layout.Q: q_p, layout.KV: 2 * q_p, layout.Y: C_p, layout.FF: ff_p}
        self.shared = {index: aligned((n_rows, n), np.float32) for index, n in widths.items()}
        self.shared[layout.CACHE_POS] = self.cache_pos
        self.scratch = [{layout.NORMED: aligned((n_rows, C_p), np.float32),
                         layout.SCORES: aligned(padded(c.block_size, LANES) + LANES, np.float32),
                         layout.SUMS: aligned((layout.SUMMED_ROWS, layout.SHEET, LANES), np.float32),
                         layout.ROUNDED: aligned((n_rows, ff_p), np.uint8),
                         layout.SCALES: aligned((n_rows, ff_p // GROUP), np.float32)} for _ in range(n_threads)]


class PackedModel:
    """The model at the moment when its weights were packed, and the values of it that each step compares."""

    def __init__(self, model):
        self.watch, self.block_size = Watch(model), model.config.block_size
        probes = [probe(p) for p in model.parameters()]
        self.probes = np.array([p.ctypes.data + i * p.strides[0] for p in probes for i in range(len(p))], np.int64)
        self.values = np.concatenate(probes)
        self.wte, self.wpe = model.transformer.wte.weight.data_ptr(), model.transformer.wpe.weight.data_ptr()


class StepTables:
    """
    The tables `memory` and `sizes` of a decoder's steps. arrays: {index into memory: array}, those that all steps of
    the decoder use.

    An object keeps all arrays alive whose addresses it has, so a decoder replaces it as a whole.
    """

    def __init__(self, config, packed, activations, arrays):
        c, self.packed, self.activations = config, packed, activations
        self.arrays = arrays | activations.shared | {layout.PROBES: packed.probes, layout.PACKED_PROBES: packed.values}
        self.memory = np.zeros(layout.SCRATCH + layout.N_SCRATCH * len(activations.scratch), np.int64)
        self.memory[layout.WTE], self.memory[layout.WPE] = packed.wte, packed.wpe
        for index, array in self.arrays.items():
            self.memory[index] = array.ctypes.data
        for thread, scratch in enumerate(activations.scratch):
            for index, array in scratch.items():
                self.memory[layout.SCRATCH + layout.N_SCRATCH * thread + index] = array.ctypes.data
        self.sizes = np.zeros(layout.N_SIZES, np.int64)
        for index, size in ((layout.N_LAYER, c.n_layer), (layout.N_HEAD, c.n_head), (layout.N_EMBD, c.n_embd),
                            (layout.HEAD_DIM, c.n_embd // c.n_head), (layout.BLOCK_SIZE, packed.block_size),
                            (layout.VOCAB_SIZE, c.vocab_size), (layout.TANH_GELU, c.gelu == 'tanh'),
                            (layout.N_PROBES, len(packed.probes)),
                            (layout.BATCH, 0), (layout.NEW_TOKENS, 1), (layout.WANT_LOGITS, 1)):
            self.sizes[index] = size
        self.addresses = self.memory.ctypes.data, self.sizes.ctypes.data
        self.step = None  # (B, T, want_logits), as they are in sizes

    def set_step(self, step):
        """Write (B, T, want_logits) to sizes. `step` is None meanwhile: an interrupt may leave some of them written."""
        self.step = None
        self.sizes[layout.BATCH], self.sizes[layout.NEW_TOKENS], self.sizes[layout.WANT_LOGITS] = step
        self.step = step
