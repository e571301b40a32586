"""The two tables that the compiled step reads, and the arrays whose addresses are in them; see layout.py."""
import copy
import math

import numpy as np
import torch

from decode.kernel import layout, sampling
from decode.kernel.attention import ATTENTION_ON, KINDS
from decode.kernel.attention_tile import EIGHT, N_WEIGHED
from decode.kernel.layout import GROUP, SCALE_GROUP
from decode.kernel.linears import GELU, GELU_TANH, SWIGLU
from decode.kernel.threads import aligned, n_cores
from decode.kernel.vectors import LANES
from decode.weights import loaded, padded
from positions import alibi_slopes, rotary_frequencies

POSITIONS = dict(learned=layout.LEARNED, rope=layout.ROPE, alibi=layout.ALIBI, none=layout.NONE)


def most_keys(config):
    """How many keys one token sees at most."""
    return config.n_sink + config.window if config.window else config.block_size


def inputs_of(config, n_rows, n_seq):
    """
    The arrays that tell a step of up to n_rows tokens of up to n_seq sequences what to compute, and its list of slots:
    {index: array}.
    """
    n_entries = n_seq * most_keys(config) + n_rows
    return {layout.POSITIONS: aligned(n_rows, np.int64), layout.SEQ_OF_ROW: aligned(n_rows, np.int64),
            layout.QUERY_STARTS: aligned(n_rows + 1, np.int64), layout.WANTED: aligned(n_rows, np.int64),
            layout.RUNS: aligned(n_rows, np.int64), layout.N_RUNS: aligned(n_rows, np.int64),
            layout.REFUSED_AT: aligned(2, np.int64), layout.OFFSETS: aligned(n_entries, np.int64),
            layout.SEQUENCES: aligned((n_rows, layout.N_SEQUENCE_COLUMNS), np.int64)}


def activations_of(config, n_rows):
    """The activations of n_rows rows that all threads share, {index: array}."""
    c = config
    C_p, head_p = padded(c.n_embd, GROUP), padded(c.head_dim, LANES)
    widths = {layout.X: C_p, layout.Q: c.n_head * head_p, layout.KV: 2 * c.n_kv_head * head_p,
              layout.Y: padded(c.n_head * c.head_dim, GROUP), layout.FF: padded(c.n_inner, GROUP),
              layout.Q_SINKS: c.n_head * head_p if c.n_sink else 0,
              layout.ANGLES: 2 * c.head_dim if c.position == 'rope' else 0}
    return {index: aligned((n_rows, n), np.float32) for index, n in widths.items()}


def scratch_of(config, n_rows):
    """The arrays of one thread for n_rows rows, {index: array}."""
    c = config
    C_p, n_scores = padded(c.n_embd, GROUP), padded(most_keys(c), LANES) + LANES
    K_p = padded(max(c.n_embd, c.n_inner, c.n_head * c.head_dim), GROUP)  # the most inputs of a linear
    return {layout.NORMED: aligned((n_rows, C_p), np.float32),
            layout.SCORES: aligned((max(EIGHT, c.n_head // c.n_kv_head), n_scores), np.float32),
            layout.KEYS: aligned((n_scores, c.head_dim), np.float32),  # memory that is not touched is not taken
            layout.VALUES: aligned((n_scores, c.head_dim), np.float32),
            layout.EIGHTS: aligned((EIGHT, N_WEIGHED, 2, LANES), np.float32),
            layout.HEAD: aligned(padded(c.head_dim, LANES), np.float32),
            layout.SUMS: aligned((layout.SUMMED_ROWS, layout.SHEET, LANES), np.float32),
            layout.ROUNDED: aligned((n_rows, K_p), np.uint8),
            layout.SCALES: aligned((n_rows, K_p // SCALE_GROUP), np.float32),
            layout.STARTS: aligned((n_rows, K_p // SCALE_GROUP), np.int32),
            layout.INPUT_SUMS: aligned((n_rows, K_p // SCALE_GROUP), np.float32)}


class PackedModel:
    """
    The model at the moment when its weights were packed, for steps that read them as `weights`; config is a copy.
    Embeddings on the device meta are rows of lm_head: in int8 those that are packed, and otherwise read from the file.
    """

    def __init__(self, model, weights):
        self.config = c = copy.copy(model.config)
        t = model.transformer
        wte = t.wte.weight
        of_head = wte.is_meta and weights == 'int8'
        wte = wte if of_head else loaded(wte)
        # their memory is read, also when the model has got other embeddings
        self.embeddings = [w.detach() for w in (wte, *([t.wpe.weight] if c.position == 'learned' else []))]
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
            layout.EMBEDDINGS: layout.OF_LM_HEAD if of_head else
            layout.BFLOAT16 if wte.dtype is torch.bfloat16 else layout.FLOAT32}


class KVAddresses:
    """
    Where the compiled step finds the keys and values of `kvcache.storage.Layer`s, which must live as long.

    addresses: int64 (n_layer, 4), of keys, of values, and for int8 of the float32 scales of both. ValueError for
    numbers that it does not read: those of 64 bits, of float16, and of int8 in other groups than KV_GROUP.
    """

    def __init__(self, layers):
        first = layers[0].k
        self.dtype, self.n_slots = first.data.dtype, layers[0].n_slots
        if self.dtype not in KINDS or first.scale is not None and first.group != layout.KV_GROUP:
            raise ValueError(f"the compiled step does not read keys and values in {first.kind} with heads of "
                             f"{first.head_dim} channels (int8 takes a multiple of {layout.KV_GROUP}): use "
                             "decoder=eager, or leave kv_bits out")
        self.slot_stride, self.head_stride = first.head_dim, first.head_dim * self.n_slots
        self.addresses = np.zeros((len(layers), 4), np.int64)
        for row, layer in zip(self.addresses, layers):
            of_layer = [t for pair in zip(layer.k.tensors(), layer.v.tensors()) for t in pair]
            row[:len(of_layer)] = [t.data_ptr() for t in of_layer]


class StepTables:
    """
    The tables `memory` and `sizes` of an executor's steps of up to n_rows tokens of n_seq sequences, n_at_once tokens
    at a time. arrays: {index into memory: array}, those of the weights and the threads.

    The tables hold addresses of arrays, and this object keeps those arrays alive. An executor that needs larger tables
    makes a new object.
    """

    def __init__(self, packed, arrays, n_rows, n_seq, n_at_once, n_threads):
        self.packed, self.n_rows, self.n_seq, c = packed, n_rows, n_seq, packed.config
        self.arrays = arrays | packed.arrays | inputs_of(c, n_rows, n_seq) | activations_of(c, n_at_once)
        self.scratch = [scratch_of(c, n_at_once) for _ in range(n_threads)]
        self.memory = np.zeros(layout.SCRATCH + layout.N_SCRATCH * n_threads, np.int64)
        self.memory[layout.WTE], self.memory[layout.WPE] = (packed.embeddings[i].data_ptr() for i in (0, -1))
        for index, array in self.arrays.items():
            self.memory[index] = array.ctypes.data
        for thread, scratch in enumerate(self.scratch):
            for index, array in scratch.items():
                self.memory[layout.SCRATCH + layout.N_SCRATCH * thread + index] = array.ctypes.data
        self.sizes = np.zeros(layout.N_SIZES, np.int64)
        for index, size in packed.sizes.items():
            self.sizes[index] = size
        self.addresses = self.memory.ctypes.data, self.sizes.ctypes.data
        self.positions, self.query_starts, self.wanted, self.runs, self.n_runs, self.refused_at = (
            self.arrays[index] for index in (layout.POSITIONS, layout.QUERY_STARTS, layout.WANTED, layout.RUNS,
                                             layout.N_RUNS, layout.REFUSED_AT))
        self.kv = None  # the `KVAddresses` that are in memory

    def bind(self, kv):
        """Have the step read and write at these `KVAddresses`."""
        self.memory[layout.ATTENTION] = ATTENTION_ON[kv.dtype].address
        self.memory[layout.KV_ARRAYS] = kv.addresses.ctypes.data
        self.sizes[layout.N_SLOTS], self.sizes[layout.SLOT_STRIDE] = kv.n_slots, kv.slot_stride
        self.sizes[layout.HEAD_STRIDE] = kv.head_stride
        self.kv = kv

    def set_sizes(self, n_rows, n_seq, n_wanted):
        """Write the sizes of a step."""
        self.sizes[layout.N_ROWS], self.sizes[layout.N_SEQ], self.sizes[layout.N_WANTED] = n_rows, n_seq, n_wanted

    def ask_for(self, n_steps):
        """Make the next call one of up to so many steps with draws; 0: of one step, and nothing is drawn."""
        self.sizes[layout.N_STEPS] = n_steps
        self.sizes[layout.N_DRAWN] = self.sizes[layout.ENDED] = self.sizes[layout.DRAW_NS] = 0
        self.sizes[layout.NOT_NUMBERS] = 0


class DrawTable:
    """The table of kernel/sampling.py for the sequences of a batch. return_soon: of `Batch`, one array for all."""

    def __init__(self, vocab_size):
        self.vocab_size, self.settings = vocab_size, []
        self.scratch = np.empty((n_cores(), sampling.N_SCRATCH, vocab_size))

    def describe(self, sequences, done, return_soon, until):
        """
        Write the table for these sequences, which draw from one row of logits each, and have drawn `done` tokens in
        this call. Returns its address.
        """
        settings = [s.settings for s in sequences]
        for s in sequences:
            if s.settings.penalised and not done:
                s.settings.count(s.tokens[len(s.tokens) - s.n_drawn:])
        if settings != self.settings or any([s.penalised for s in settings]):  # the same objects have the same settings
            starts = np.cumsum([0, *[len(s.stop_ids) for s in settings]])
            changes = np.zeros((len(settings), sampling.N_CHANGES), np.int64)
            for row, s in zip(changes, settings):
                if s.counts is not None:
                    row[sampling.COUNTS], row[sampling.IN_PROMPT] = s.counts.ctypes.data, s.in_prompt.ctypes.data
                if len(s.biases):
                    row[sampling.N_BIASES] = len(s.biases)
                    row[sampling.BIAS_TOKENS], row[sampling.BIASES] = s.bias_tokens.ctypes.data, s.biases.ctypes.data
                row[sampling.MIN_TOKENS] = s.min_tokens
                if s.allowed is not None:
                    row[sampling.ALLOWED] = s.allowed.ctypes.data
            self.arrays = {
                sampling.SETTINGS: np.array([s.values for s in settings], np.float64),
                sampling.SEEDS: np.array([s.seed for s in settings], np.uint64), sampling.CHANGES: changes,
                sampling.STOP_STARTS: starts,
                sampling.STOPS: np.array([token for s in settings for token in s.stop_ids], np.int64),
                sampling.NUMBERS: np.zeros(len(settings), np.int64), sampling.SCRATCH: self.scratch}
            self.table, self.settings = sampling.table_of(self.vocab_size, self.arrays), settings
        self.arrays[sampling.NUMBERS][:] = [s.n_drawn + done for s in sequences]
        self.arrays[sampling.RETURN_SOON] = return_soon
        self.table[sampling.RETURN_SOON], self.table[sampling.UNTIL] = return_soon.ctypes.data, until
        for s in settings:
            s.n_counted = -1  # until the call has ended well: the compiled draw counts as it goes
        return self.table.ctypes.data

    def draw(self, sequences, logits):
        """The next token of each sequence, a list, from logits float32 (S, vocab_size), contiguous."""
        tokens = np.empty(len(sequences), np.int64)
        table = self.describe(sequences, 0, np.zeros(1, np.int64), 2**63 - 1)
        sampling.DRAW.call(table, logits.data_ptr(), tokens.ctypes.data, 0, 1)
        for s in sequences:
            s.settings.n_counted = s.n_drawn + 1
        return tokens.tolist()
