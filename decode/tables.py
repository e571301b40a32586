"""The two tables that the compiled step reads, and the arrays whose addresses are in them; see layout.py."""
import numpy as np

from decode.kernel import layout, sampling
from decode.kernel.attention import ATTENTION_ON
from decode.kernel.attention_tile import N_WEIGHED
from decode.kernel.emit import LANES
from decode.kernel.layout import EIGHT, GROUP, LINEARS_PER_LAYER, SCALE_GROUP
from decode.kernel.screening import SCREEN
from decode.kernel.step import PART_ON
from decode.kernel.threads import LINE, aligned
from decode.weights import padded


def most_keys(config):
    """How many keys one token sees at most."""
    return config.n_sink + config.window if config.window else config.block_size


def inputs_of(config, n_rows, n_seq):
    """
    The arrays that tell a step of up to n_rows tokens of up to n_seq sequences what to compute, its list of slots, and
    the counters by which its threads wait for each other: {index: array}.
    """
    shapes = {layout.POSITIONS: n_rows, layout.SEQ_OF_ROW: n_rows, layout.QUERY_STARTS: n_seq + 1,
              layout.WANTED: n_rows, layout.RUNS: n_seq, layout.N_RUNS: n_seq, layout.REFUSED_AT: 2,
              layout.OFFSETS: n_seq * most_keys(config) + n_rows,
              layout.SEQUENCES: (n_seq, layout.N_SEQUENCE_COLUMNS),
              layout.BARRIER: LINE, layout.CLAIMS: (config.n_layer * LINEARS_PER_LAYER + 1, LINE)}
    return {index: aligned(shape, np.int64) for index, shape in shapes.items()}


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
            layout.EIGHTS: aligned((N_WEIGHED, 2, EIGHT, LANES), np.float32),
            layout.HEAD: aligned(padded(c.head_dim, LANES), np.float32),
            layout.SUMS: aligned((layout.SUMMED_ROWS, layout.SHEET, LANES), np.float32),
            layout.ROUNDED: aligned((n_rows, K_p), np.uint8),
            layout.SCALES: aligned((n_rows, K_p // SCALE_GROUP), np.float32),
            layout.STARTS: aligned((n_rows, K_p // SCALE_GROUP), np.int32),
            layout.INPUT_SUMS: aligned((n_rows, K_p // SCALE_GROUP), np.float32)}


def check_layers(layers):
    """ValueError if the compiled step does not read what these `kvcache.storage.Layer`s store."""
    k = layers[0].k
    if k.data.dtype not in ATTENTION_ON or k.scale is not None and k.group != layout.KV_GROUP:
        raise ValueError(f"the compiled step does not read keys and values in {k.kind} with heads of {k.head_dim} "
                         f"channels (int8 takes a multiple of {layout.KV_GROUP}): use decoder=eager, or leave kv_bits "
                         "out")


def addresses_of(layers):
    """The addresses of each layer's keys, values, and for int8 of the scales of both, int64 (n_layer, 4)."""
    addresses = np.zeros((len(layers), 4), np.int64)
    for row, layer in zip(addresses, layers):
        of_layer = [t for pair in zip(layer.k.tensors(), layer.v.tensors()) for t in pair]
        row[:len(of_layer)] = [t.data_ptr() for t in of_layer]
    return addresses


class StepTables:
    """
    The tables `memory` and `sizes` of an executor's steps of up to n_rows tokens of n_seq sequences, n_at_once tokens
    at a time. packed: its `PackedWeights`. layers: its slots, which must live as long.

    The tables hold addresses of arrays, and this object keeps those arrays alive. An executor that needs larger tables
    makes a new object.
    """

    def __init__(self, packed, layers, n_rows, n_seq, n_at_once, n_threads):
        self.n_rows, self.n_seq, c, k = n_rows, n_seq, packed.config, layers[0].k
        self.arrays = packed.arrays | inputs_of(c, n_rows, n_seq) | activations_of(c, n_at_once) | {
            layout.KV_ARRAYS: addresses_of(layers)}
        self.scratch = [scratch_of(c, n_at_once) for _ in range(n_threads)]
        self.memory = np.zeros(layout.SCRATCH + layout.N_SCRATCH * n_threads, np.int64)
        for index, array in self.arrays.items():
            self.memory[index] = array.ctypes.data
        for thread, scratch in enumerate(self.scratch):
            for index, array in scratch.items():
                self.memory[layout.SCRATCH + layout.N_SCRATCH * thread + index] = array.ctypes.data
        self.memory[layout.PART] = PART_ON[packed.weights].address
        self.memory[layout.ATTENTION] = ATTENTION_ON[k.data.dtype].address
        if packed.is_screened:
            self.memory[layout.SCREEN] = SCREEN.address
        self.sizes = np.zeros(layout.N_SIZES, np.int64)
        for index, size in (packed.sizes | {
                layout.N_SLOTS: layers[0].n_slots, layout.HEAD_STRIDE: c.head_dim * layers[0].n_slots}).items():
            self.sizes[index] = size
        self.addresses = self.memory.ctypes.data, self.sizes.ctypes.data

    def describe(self, tokens_at, positions, starts, sequences, wanted):
        """
        Write what a step computes. tokens_at: the address of the new tokens. starts: the first row of each of the
        sequences, and the number of rows. wanted: rows.
        """
        self.memory[layout.TOKENS] = tokens_at
        for index, values in (
                (layout.POSITIONS, positions), (layout.QUERY_STARTS, starts), (layout.WANTED, wanted),
                (layout.RUNS, [s.runs.address for s in sequences]), (layout.N_RUNS, [s.runs.n for s in sequences])):
            self.arrays[index][:len(values)] = values
        for index, values in (layout.N_ROWS, positions), (layout.N_SEQ, sequences), (layout.N_WANTED, wanted):
            self.sizes[index] = len(values)

    def ask_for(self, n_steps, n_largest=0):
        """
        Prepare the next call. n_steps: the most steps of it, each with draws; 0: one step without a draw. n_largest:
        how many of the largest logits are wanted; 0: all.
        """
        self.sizes[layout.N_STEPS], self.sizes[layout.N_LARGEST] = n_steps, n_largest
        self.sizes[layout.N_DRAWN] = self.sizes[layout.ENDED] = self.sizes[layout.DRAW_NS] = 0
        self.sizes[layout.NOT_NUMBERS] = 0


class DrawTable:
    """The table of kernel/sampling.py for the sequences of a batch. n_threads: the most that draw."""

    def __init__(self, vocab_size, n_threads=1):
        self.vocab_size, self.settings, self.table = vocab_size, [], np.zeros(sampling.N_TABLE, np.int64)
        self.scratch = np.empty((n_threads, sampling.N_SCRATCH, vocab_size))
        self.table[sampling.VOCAB_SIZE], self.table[sampling.SCRATCH] = vocab_size, self.scratch.ctypes.data

    def describe(self, sequences, done, return_soon, until, n=1):
        """
        Write the table for these sequences, which have drawn `done` tokens in this call. n: how many rows of logits
        each sequence has, side by side; a draw reads one of them. return_soon: of `Batch`, one array for all calls.
        Returns the table's address.
        """
        settings = [s.settings for s in sequences]
        for s in sequences:
            if s.settings.penalised and not done:  # after that the compiled draw counts
                s.settings.count(s.tokens[len(s.tokens) - s.n_drawn:])
        if settings != self.settings or any([s.penalised for s in settings]):  # the same objects have the same settings
            rows, stops = np.zeros((len(settings), sampling.N_COLUMNS), np.int64), []
            rows.view(np.float64)[:, :sampling.SEED] = [s.values for s in settings]
            rows[:, sampling.SEED] = np.array([s.seed for s in settings], np.uint64).view(np.int64)
            for row, s in zip(rows, settings):
                stops.append(np.array(s.stop_ids, np.int64))
                row[sampling.N_STOPS], row[sampling.N_BIASES] = len(s.stop_ids), len(s.biases)
                row[sampling.MIN_TOKENS] = s.min_tokens
                for column, array in ((sampling.STOPS, stops[-1]), (sampling.COUNTS, s.counts),
                                      (sampling.IN_PROMPT, s.in_prompt), (sampling.BIAS_TOKENS, s.bias_tokens),
                                      (sampling.BIASES, s.biases), (sampling.ALLOWED, s.allowed)):
                    if array is not None and len(array):
                        row[column] = array.ctypes.data
            self.rows, self.stops, self.settings = rows, stops, settings
        self.rows[:, sampling.NUMBER] = [s.n_drawn + done for s in sequences]
        self.table[sampling.N_SEQUENCES], self.table[sampling.SEQUENCES] = len(settings), self.rows.ctypes.data
        self.return_soon = return_soon  # it must live as long as the call
        self.table[sampling.RETURN_SOON], self.table[sampling.UNTIL] = return_soon.ctypes.data, until
        self.table[sampling.STRIDE] = n * self.vocab_size
        return self.table.ctypes.data

    def draw(self, sequences, logits, proposals=()):
        """
        The next tokens of each sequence, a list of lists, from logits float32 (S, n, vocab_size), contiguous: those
        after its newest token and after each of n - 1 proposals, int64 (n - 1, S). A sequence draws on while its token
        equals the proposal and is no stop token: after another token the next logits are not those of its text.
        """
        (S, n, V), going, found = logits.shape, range(len(sequences)), [[] for _ in sequences]
        tokens, table = np.empty(S, np.int64), self.describe(sequences, 0, np.zeros(1, np.int64), 2**63 - 1, n)
        for j in range(n):
            sampling.DRAW.call(table, logits.data_ptr() + 4 * j * V, tokens.ctypes.data, 0, 1)
            for i in going:
                found[i].append(int(tokens[i]))
            ended = [i for i in going if j == n - 1 or tokens[i] != proposals[j, i]
                     or found[i][-1] in sequences[i].settings.stop_ids]
            self.rows[ended, sampling.NUMBER] = -1
            going = [i for i in going if i not in ended]
            if not going:
                break
        return found
