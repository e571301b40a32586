"""
The memory layout that the compiled step (step.py) shares with the Python code that calls it (tables.py, weights.py).

The step gets two int64 tables: `memory`, the addresses of all arrays, and `sizes`, the numbers that describe the model
and the step. The constants here are the indices into these tables.
"""
GROUP = 64        # all rows of activations are padded to a multiple of it
SCALE_GROUP = 32  # rounded inputs that share a scale, and int4 weights of an output; int8 weights: GROUP
SHEET = 4         # panels of weights that are side by side, see linears.py
SUMMED_ROWS = 48  # rows whose sums with a sheet a thread keeps at a time
KV_GROUP = 32     # numbers of keys and values in int8 that share a scale
EIGHT = 8         # sums of weighted values, each of every eighth key, see attention.py
SCREENED_ROWS = 4  # a step of more rows computes all logits, see screening.py; all tables have room for twice as many
LARGEST_NORM = 1e15  # the bounds of screening.py are finite for rows with a smaller norm

# sizes: of the model
(N_LAYER, N_HEAD, N_KV_HEAD, HEAD_DIM, N_EMBD, VOCAB_SIZE,
 MAX_POSITIONS,  # positions are below
 POSITION,       # LEARNED, ROPE, ALIBI or NONE
 WINDOW, N_SINK,  # 0: every token sees all before it
 N_INNER,        # channels inside of the MLP
 ACTIVATION,     # what follows its hidden linear: GELU, GELU_TANH or SWIGLU of linears.py
 RMS_NORM,       # 1 for RMS norms, 0 for layer norms
 QK_NORM,        # 1 for norms of each head's queries and keys
 EMBEDDINGS,     # FLOAT32, BFLOAT16 or OF_LM_HEAD: tokens have the rows of lm_head, as it is packed in int8
 # of this step
 N_ROWS,         # new tokens of all sequences, N
 N_SEQ,          # sequences, S
 N_WANTED,       # rows whose logits are wanted, W
 NOT_NUMBERS,    # result: how many threads have computed logits that are NaN or infinite
 # of a call of several steps, see step.draw
 N_STEPS,        # at most so many; 0: one step, and nothing is drawn
 N_DRAWN,        # result: after how many steps tokens were drawn
 ENDED,          # result: how many threads' draws have returned 0
 DRAW_NS,        # result: nanoseconds that the draws took
 N_LARGEST,      # how many of the largest logits of each row are wanted; 0: all. screening.py may set it to 0
 LOGITS_STEP,    # bytes from the logits of a step to those of the next one; 0: each step writes over the last one's
 # of the stored keys and values: those of head h begin at slot * HEAD_DIM + h * HEAD_STRIDE
 N_SLOTS, HEAD_STRIDE, N_SIZES) = range(28)

LEARNED, ROPE, ALIBI, NONE = range(4)
FLOAT32, BFLOAT16, OF_LM_HEAD = range(3)

# memory: the address of
(TOKENS,        # int64 (N,), or (N_STEPS + 1, N): one row is written after each step
 POSITIONS,     # int64 (N,)
 QUERY_STARTS,  # int64 (S + 1,): the first row of each sequence, and N
 RUNS,          # int64 (S,): the address of each sequence's table of runs, see `decode.batch.Runs`
 N_RUNS,        # int64 (S,)
 WANTED,        # int64 (W,): rows, ascending
 LOGITS,        # float32 (W, vocab_size)
 DRAW, DRAW_DATA,  # the function that draws tokens, and its first argument, see sampling.py
 PART,          # the C function for weights of their type, see step.part_on
 ATTENTION,     # the C function for keys and values of their type, see attention.py
 SCREEN,        # the C function for the N_LARGEST logits, see screening.py, and what it reads:
 SCREEN_PANELS, SCREEN_LINEARS,  # lm_head in int8; LINEARS, where lm_head begins in these panels
 SCREEN_ERRORS, # float32 (vocab_size,): the norm of what int8 leaves of each of its rows
 SCREEN_NORMS,  # float32 (vocab_size,): no smaller than that of the row, in int8 or not
 SCREEN_LOGITS, # float32 (2 * SCREENED_ROWS, vocab_size): scratch
 KV_ARRAYS,     # int64 (n_layer, 4): the addresses of each layer's keys, values and their scales
 OFFSETS,       # int64: slot * HEAD_DIM of all keys that each sequence sees, in the order of positions, see step.py
 SEQUENCES,     # int64 (S, N_SEQUENCE_COLUMNS): where those of each sequence are
 SEQ_OF_ROW,    # int64 (N,)
 REFUSED_AT,    # int64 (2,): the sequence and the position that were refused
 WTE, WPE,      # the model's own embeddings, float32 or bfloat16
 FREQUENCIES,   # float64 (head_dim / 2,): of rotary positions
 SLOPES,        # float32 (n_head,): ALiBi's, or zeros
 PANELS,        # the packed weights of all linears, see linears.py
 LINEARS,       # int64 (number of linears, N_COLUMNS)
 BIAS,          # float32, of each output row of all linears
 EPS,           # float32 (1,)
 NORM_WEIGHT, NORM_BIAS,  # float32 (norms of rows, n_embd padded to GROUP)
 HEAD_NORM_WEIGHT,  # float32 (n_layer, 2, head_dim padded to LANES): of queries, of keys
 BARRIER,       # a counter, see threads.py
 CLAIMS,        # int64 (number of linears, LINE): how many parts of each linear the threads have claimed
 X,             # float32 (rows, n_embd padded): the residual stream
 Q, Q_SINKS,    # float32 (rows, heads padded): queries; the same, turned for the sinks
 KV,            # float32 (rows, 2 * kv heads padded): keys and values, head by head
 Y,             # float32 (rows, n_head * head_dim padded): what attention gives
 FF,            # float32 (rows, n_inner padded): the MLP's hidden layer
 ANGLES,        # float32 (rows, 4, head_dim / 2): cos and sin of each row's rotation, and of its rotation for sinks
 SCRATCH) = range(43)  # from here on N_SCRATCH addresses for each thread

# the columns of SEQUENCES: the first of a sequence's OFFSETS; how many of them are of sinks; the position of the next
FIRST_OFFSET, N_SINKS, FIRST_POSITION, N_SEQUENCE_COLUMNS = range(4)

# each thread's scratch: the address at memory[SCRATCH + N_SCRATCH * thread + ...] of
(NORMED,        # float32 (rows, n_embd padded): rows after a norm
 SCORES,        # float32 (8 or the heads of a group, keys padded): attention scores of some queries
 KEYS, VALUES,  # float32 (keys padded, head_dim): keys and values of one head, for the rows of a prompt
 EIGHTS,        # float32 (LANES / 2, 2, 8, LANES): sums of values, see attention_tile.py
 HEAD,          # float32 (head_dim padded): a key after its norm and its rotation
 SUMS,          # float32 (SUMMED_ROWS, SHEET, LANES): sums of some rows with a sheet
 ROUNDED,       # uint8 (rows, the most inputs of a linear): rows rounded to int8
 SCALES,        # float32 (rows, groups): their scales
 STARTS,        # int32 (rows, groups): where their sums with int8 weights begin
 INPUT_SUMS,    # float32 (rows, groups): the sums of the rounded inputs
 N_SCRATCH) = range(12)

# why a step is refused
BAD_TOKEN, BAD_POSITION, BAD_RUNS, NO_SLOT = range(1, 5)

# the linears of a layer, in order; lm_head comes after the last layer
QUERIES, KEYS_VALUES, ATTENTION_PROJECTION, MLP_HIDDEN, MLP_PROJECTION, LINEARS_PER_LAYER = range(6)

# the columns of the table of linears: its first element in the panels, its first panel (numbered through all linears),
# its inputs padded to GROUP, how many panels it has, and how many elements ahead it prefetches weights
FIRST_WEIGHT, FIRST_PANEL, N_INPUTS, N_PANELS, PREFETCH_DISTANCE, N_COLUMNS = range(6)
