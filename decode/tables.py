"""The two tables that the compiled step reads, and the arrays whose addresses are in them; see layout.py."""
import math

import numpy as np
import torch

from decode.kernel import layout
from decode.kernel.attention import ATTENTION_ON
from decode.kernel.layout import GROUP
from decode.kernel.linears import GELU, GELU_TANH, SWIGLU
from decode.kernel.threads import aligned
from decode.kernel.vectors import LANES
from decode.metadata import KINDS
from decode.weights import padded
from positions import alibi_slopes, rotary_frequencies

POSITIONS = dict(learned=layout.LEARNED, rope=layout.ROPE, alibi=layout.ALIBI, none=layout.NONE)


def most_keys(config):
    """How many keys one token sees at most."""
    return config.n_sink + config.window if config.window else config.block_size


class StepInputs:
    """
    What a step of up to n_rows tokens is given, and its list of slots: `arrays`, {index: array}. Each array is also an
    attribute. They keep their size; a larger step gets new ones.
    """

    def __init__(self, config, n_rows):
        self.n_rows, n_entries = n_rows, n_rows * (most_keys(config) + 1)
        self.positions, self.seq_of_row = aligned(n_rows, np.int64), aligned(n_rows, np.int64)
        self.query_starts, self.wanted = aligned(n_rows + 1, np.int64), aligned(n_rows, np.int64)
        self.runs, self.n_runs = aligned(n_rows, np.int64), aligned(n_rows, np.int64)
        self.refused_at = aligned(2, np.int64)
        self.arrays = {
            layout.POSITIONS: self.positions, layout.SEQ_OF_ROW: self.seq_of_row,
            layout.QUERY_STARTS: self.query_starts, layout.WANTED: self.wanted, layout.RUNS: self.runs,
            layout.N_RUNS: self.n_runs, layout.REFUSED_AT: self.refused_at,
            layout.OFFSETS: aligned(n_entries, np.int64), layout.SIDE_BY_SIDE: aligned(n_entries, np.int64),
            layout.SEQUENCES: aligned((n_rows, layout.N_SEQUENCE_COLUMNS), np.int64)}


class Activations:
    """
    The activations of n_rows rows: `shared` by all threads, and the `scratch` of each thread, {index: array}.

    They keep their size; a larger batch gets new ones.
    """

    def __init__(self, config, n_rows, n_threads):
        c, self.n_rows = config, n_rows
        C_p, ff_p, head_p = padded(c.n_embd, GROUP), padded(c.n_inner, GROUP), padded(c.head_dim, LANES)
        y_p = padded(c.n_head * c.head_dim, GROUP)
        most = max(C_p, ff_p, y_p)
        group, n_scores = c.n_head // c.n_kv_head, padded(most_keys(c), LANES) + LANES
        widths = {layout.X: C_p, layout.Q: c.n_head * head_p, layout.KV: 2 * c.n_kv_head * head_p, layout.Y: y_p,
                  layout.FF: ff_p, layout.Q_SINKS: c.n_head * head_p if c.n_sink else 0,
                  layout.ANGLES: 2 * c.head_dim if c.position == 'rope' else 0}
        self.shared = {index: aligned((n_rows, n), np.float32) for index, n in widths.items()}
        self.scratch = [{layout.NORMED: aligned((n_rows, C_p), np.float32),
                         layout.SCORES: aligned((group, n_scores), np.float32),
                         layout.HEAD: aligned(head_p, np.float32),
                         layout.SUMS: aligned((layout.SUMMED_ROWS, layout.SHEET, LANES), np.float32),
                         layout.ROUNDED: aligned((n_rows, most), np.uint8),
                         layout.SCALES: aligned((n_rows, most // GROUP), np.float32)} for _ in range(n_threads)]


class PackedModel:
    """The model at the moment when its weights were packed."""

    def __init__(self, model):
        c, t = model.config, model.transformer
        self.settings, self.max_positions = settings_of(c), c.max_positions
        self.embeddings = [t.wte.weight, *([t.wpe.weight] if c.position == 'learned' else [])]  # their memory is read
        self.wte, self.wpe = self.embeddings[0].data_ptr(), self.embeddings[-1].data_ptr()
        slopes = alibi_slopes(c.n_head, torch.float32).numpy() if c.position == 'alibi' else np.zeros(c.n_head)
        self.arrays = {
            layout.SLOPES: slopes.astype(np.float32),
            layout.FREQUENCIES: rotary_frequencies(c.head_dim, c.rope_theta, c.rope_scaling).numpy()}
        self.sizes = {
            layout.N_LAYER: c.n_layer, layout.N_HEAD: c.n_head, layout.N_KV_HEAD: c.n_kv_head,
            layout.HEAD_DIM: c.head_dim, layout.N_EMBD: c.n_embd, layout.VOCAB_SIZE: c.vocab_size,
            layout.MAX_POSITIONS: 2**62 if c.max_positions == math.inf else c.max_positions,
            layout.POSITION: POSITIONS[c.position], layout.WINDOW: c.window, layout.N_SINK: c.n_sink,
            layout.N_INNER: c.n_inner, layout.RMS_NORM: c.norm == 'rms', layout.QK_NORM: c.qk_norm,
            layout.ACTIVATION: SWIGLU if c.mlp == 'swiglu' else GELU_TANH if c.gelu == 'tanh' else GELU,
            layout.BFLOAT16_EMBEDDINGS: t.wte.weight.dtype is torch.bfloat16}


def settings_of(config):
    """What a step depends on beside the weights, and what may change in a model: see `crop_block_size`."""
    c = config
    return c.block_size, c.position, c.rope_theta, c.rope_scaling, c.window, c.n_sink, c.gelu


class StepTables:
    """
    The tables `memory` and `sizes` of a decoder's steps. arrays: {index into memory: array}, those that all steps of
    the decoder use.

    An object keeps all arrays alive whose addresses it has, so a decoder replaces it as a whole.
    """

    def __init__(self, packed, inputs, activations, arrays):
        self.packed, self.inputs, self.activations = packed, inputs, activations
        self.arrays = arrays | activations.shared | inputs.arrays | packed.arrays
        self.memory = np.zeros(layout.SCRATCH + layout.N_SCRATCH * len(activations.scratch), np.int64)
        self.memory[layout.WTE], self.memory[layout.WPE] = packed.wte, packed.wpe
        for index, array in self.arrays.items():
            self.memory[index] = array.ctypes.data
        for thread, scratch in enumerate(activations.scratch):
            for index, array in scratch.items():
                self.memory[layout.SCRATCH + layout.N_SCRATCH * thread + index] = array.ctypes.data
        self.sizes = np.zeros(layout.N_SIZES, np.int64)
        for index, size in packed.sizes.items():
            self.sizes[index] = size
        self.addresses = self.memory.ctypes.data, self.sizes.ctypes.data
        self.kv = None    # the `KVArrays` whose addresses are in memory
        self.step = None  # N if sizes, query_starts and wanted are still those of N sequences with a token each

    def bind(self, kv):
        """Write the addresses of a `KVArrays` where the step reads them. ValueError if they are not for this model."""
        shape = tuple(self.packed.sizes[index] for index in (layout.N_LAYER, layout.N_KV_HEAD, layout.HEAD_DIM))
        if kv.shape != shape:
            raise ValueError(f"kv_caches has (layers, heads, head_dim) {kv.shape}, and the model {shape}: "
                             "make them for this model")
        self.kv = self.step = None  # an interrupt from here on leaves no arrays bound
        self.memory[layout.ATTENTION] = ATTENTION_ON[KINDS[kv.dtype]].address
        self.memory[layout.KV_ARRAYS], self.memory[layout.WRITTEN] = kv.addresses.ctypes.data, kv.written.ctypes.data
        self.sizes[layout.N_SLOTS], self.sizes[layout.SLOT_STRIDE] = kv.n_slots, kv.slot_stride
        self.sizes[layout.HEAD_STRIDE] = kv.head_stride
        self.kv = kv

    def set_sizes(self, n_rows, n_seq, n_wanted):
        """Write the sizes of a step."""
        self.sizes[layout.N_ROWS], self.sizes[layout.N_SEQ], self.sizes[layout.N_WANTED] = n_rows, n_seq, n_wanted

    def ask_for(self, next_tokens, n_steps):
        """Make the next call one of up to so many steps, see `metadata.NextTokens`."""
        self.memory[layout.DRAW], self.memory[layout.DRAW_DATA] = next_tokens.draw.address, next_tokens.data.ctypes.data
        self.sizes[layout.N_DRAWN] = self.sizes[layout.ENDED] = self.sizes[layout.DRAW_NS] = 0
        self.sizes[layout.N_STEPS] = n_steps

    def note_drawn(self, next_tokens):
        """Note in the `NextTokens` what a call has drawn. Returns how many rows."""
        n_drawn = int(self.sizes[layout.N_DRAWN])
        if n_drawn:
            next_tokens.n_drawn += n_drawn
            next_tokens.ended = bool(self.sizes[layout.ENDED])
        return n_drawn
