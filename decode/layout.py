"""
The memory layout that the compiled step (kernel.py) shares with the Python code that calls it (cpu.py, packing.py).

The step gets two int64 tables: `memory`, the addresses of all arrays, and `sizes`, the numbers that describe the model
and the step. The constants here are the indices into these tables.
"""
from numba import njit

# inputs that share a scale when they are rounded to int8. All rows of activations are padded to a multiple of it
GROUP = 64
# panels of weights that are side by side, see linears.py
SHEET = 4
# rows whose sums with a sheet a thread keeps at a time
SUMMED_ROWS = 48

# sizes: of the model, and of this step
(N_LAYER, N_HEAD, HEAD_DIM, N_EMBD, BLOCK_SIZE, VOCAB_SIZE,
 TANH_GELU,     # 1 for GELU's approximation by tanh, 0 for the exact one
 BATCH,         # sequences, B
 NEW_TOKENS,    # of each sequence, T
 WANT_LOGITS,   # 1, or 0 if only the keys and values are needed
 N_PROBES, N_SIZES) = range(12)

# memory: the address of
(TOKENS,        # int64 (B, T)
 LOGITS,        # float32 (B, vocab_size), of each sequence's last token
 CACHE_POS,     # int64 (B,)
 CACHES,        # int64 (2 * n_layer): the addresses of each layer's k_cache and v_cache
 WTE, WPE,      # the model's own embeddings, float32
 PANELS,        # the packed weights of all linears, see linears.py
 LINEARS,       # int64 (number of linears, N_COLUMNS)
 SCALE, BIAS,   # float32, of each output row of all linears
 START,         # int16, where the sums of an int8 panel and group begin, in steps of 128
 EPS,           # float32 (1,)
 NORM_WEIGHT, NORM_BIAS,  # float32 (layer norms, n_embd padded to GROUP)
 PROBES,        # int64 (n_probes): addresses of 4-byte values of the model's parameters
 PACKED_PROBES,  # int32 (n_probes): what these values were when the weights were packed
 BARRIER,       # a counter, see threads.py
 CLAIMS,        # int64 (number of linears, LINE): how many parts of each linear the threads have claimed
 X,             # float32 (rows, n_embd padded): the residual stream
 Q, KV,         # float32 (rows, heads padded): queries; keys and values, head by head
 Y,             # float32 (rows, n_embd padded): what attention gives
 FF,            # float32 (rows, 4 * n_embd padded): the MLP's hidden layer
 SCRATCH) = range(24)  # from here on N_SCRATCH addresses for each thread

# each thread's scratch: the address at memory[SCRATCH + N_SCRATCH * thread + ...] of
(NORMED,        # float32 (rows, n_embd padded): layer-normed rows
 SCORES,        # float32 (block_size padded): attention scores of one query
 SUMS,          # float32 (SUMMED_ROWS, SHEET, LANES): sums of some rows with a sheet
 ROUNDED,       # uint8 (rows, 4 * n_embd padded): rows rounded to int8
 SCALES,        # float32 (rows, groups): their scales
 N_SCRATCH) = range(6)

# the linears of a layer, in order; lm_head comes after the last layer
QUERIES, KEYS_VALUES, ATTENTION_PROJECTION, MLP_HIDDEN, MLP_PROJECTION, LINEARS_PER_LAYER = range(6)

# the columns of the table of linears: its first weight in the panels, its first panel (numbered through all linears),
# its inputs padded to GROUP, and how many panels it has
FIRST_WEIGHT, FIRST_PANEL, N_INPUTS, N_PANELS, N_COLUMNS = range(5)


@njit
def padded(n, multiple):
    """n rounded up to a multiple."""
    return -(-n // multiple) * multiple
