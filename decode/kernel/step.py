"""
One step of a GPT on the CPU: the new tokens of any sequences in, logits out, keys and values written where they belong.

The new tokens of all sequences are rows on one axis: a prompt, a part of one, or the next token. Where the keys and
values of each sequence lie is in its `decode.batch.Runs`, all other arrays are in layout.py.

Before it writes anything, a step checks all that it was given and lists the slots that it will read. All addresses of
keys and values come from this list. Each sequence has one entry for each key that its new tokens see, in the order of
positions: first those of the sinks, then all from FIRST_POSITION to the last new token. Without a window there are no
sinks, and FIRST_POSITION is 0.

The whole step is one function, `gpt_step`, which every thread runs from top to bottom. The threads share the heads of
attention and the rows of the weight matrices. At a barrier they wait for each other where one needs the results of the
others: four times a layer, eight times in a step of SHARED_ROWS rows and more. Starting and joining threads for each
matmul would cost a small model more than its arithmetic. In a call of several steps they also share the sequences whose
next tokens are drawn.

The logits of a token have the same bits whatever else is in the step: every sum has one order, which depends on the
token's position alone, and no thread takes part in the sum of another.
"""
import math
from collections import namedtuple

import numba
import numpy as np
from numba import int64

from decode.kernel import layout, threads
from decode.kernel.attention import ATTENTION_ON, heads_of
from decode.kernel.building import CFunction, call_c, keep_on_disk
from decode.kernel.emit import I8, LANES, njit
from decode.kernel.layout import GROUP, LINEARS_PER_LAYER, SHEET
from decode.kernel.linears import ADD, ADDED, ELEMENTS, STORE, Linears, Team, linear, prepare_rows, shared_linear
from decode.kernel.norms import norms_of_rows, row_norm
from decode.kernel.pointers import bytes_at, doubles_at, floats_at, ints_at, longs_at, pointer_like, shorts_at
from decode.kernel.threads import LINE, barrier, claim, share
from decode.kernel.vectors import load, load_bfloat16_first, load_first, padded, store, sum_lanes
from decode.weights import WEIGHTS

INT8_ELEMENTS = ELEMENTS[I8]
SHARED_ROWS = 16  # in a step of so many and more the threads share what is done to rows before linears, and wait
POSTED_THREADS, POSTED_MEMORY, POSTED_SIZES = 2, 3, 4  # in line 0 of threads.Workers.post: the step that is posted

# the arrays of a thread that linears need, see layout.py
ThreadScratch = namedtuple('ThreadScratch', 'normed sums rounded scales starts input_sums')

@njit
def thread_scratch(memory, thread, of_rows):
    """The scratch of a thread, with the rows of thread number of_rows"""
    at, own = layout.SCRATCH + layout.N_SCRATCH * of_rows, layout.SCRATCH + layout.N_SCRATCH * thread
    return ThreadScratch(floats_at(memory[at + layout.NORMED]), floats_at(memory[own + layout.SUMS]),
                         bytes_at(memory[at + layout.ROUNDED]), floats_at(memory[at + layout.SCALES]),
                         ints_at(memory[at + layout.STARTS]), floats_at(memory[at + layout.INPUT_SUMS]))


@njit
def check_step(memory, sizes):
    """Check the step and make its list of slots. Returns 0, or why it is refused; then no key or value is written."""
    tokens, vocab_size = longs_at(memory[layout.TOKENS]), sizes[layout.VOCAB_SIZE]
    at, refused_at = np.int64(0), longs_at(memory[layout.REFUSED_AT])
    for row in range(sizes[layout.N_ROWS]):
        if not 0 <= tokens[row] < vocab_size:
            refused_at[1] = tokens[row]
            return layout.BAD_TOKEN
    for seq in range(sizes[layout.N_SEQ]):
        refused_at[0] = seq
        refused, n = list_slots(memory, sizes, seq, at)
        if refused:
            return refused
        at += n
    return 0


@njit
def list_slots(memory, sizes, seq, at):
    """
    Write where the slots of a sequence begin to OFFSETS from `at` on, and its row of SEQUENCES. Returns (refused, how
    many).
    """
    starts, positions = longs_at(memory[layout.QUERY_STARTS]), longs_at(memory[layout.POSITIONS])
    of_row, offsets = longs_at(memory[layout.SEQ_OF_ROW]), longs_at(memory[layout.OFFSETS])
    refused_at = longs_at(memory[layout.REFUSED_AT])
    window, n_sink = sizes[layout.WINDOW], sizes[layout.N_SINK]
    n_slots, stride = sizes[layout.N_SLOTS], sizes[layout.HEAD_DIM]
    first_row, end_row = starts[seq], starts[seq + 1]
    start = positions[first_row]
    end = start + end_row - first_row
    refused_at[1] = start
    if not 0 <= start <= end <= sizes[layout.MAX_POSITIONS]:
        return layout.BAD_POSITION, 0
    for row in range(first_row, end_row):
        of_row[row] = seq
        if positions[row] != start + row - first_row:
            return layout.BAD_POSITION, 0

    n_sinks, first = min(n_sink, end), max(n_sink, start - window + 1) if window else 0
    of_sequence, table = seq * layout.N_SEQUENCE_COLUMNS, longs_at(memory[layout.SEQUENCES])
    table[of_sequence + layout.FIRST_OFFSET], table[of_sequence + layout.N_SINKS] = at, n_sinks
    table[of_sequence + layout.FIRST_POSITION] = first
    runs, position, last_end, n = longs_at(longs_at(memory[layout.RUNS])[seq]), 0 if n_sinks else first, 0, 0
    for run in range(longs_at(memory[layout.N_RUNS])[seq]):
        run_position, run_slot, run_n = runs[3 * run], runs[3 * run + 1], runs[3 * run + 2]
        refused_at[1] = run_position
        if not (last_end <= run_position and 0 < run_n <= n_slots and 0 <= run_slot <= n_slots - run_n):
            return layout.BAD_RUNS, 0
        last_end = run_position + run_n
        while run_position <= position < min(last_end, end):
            stop = min(last_end, n_sinks if position < n_sinks else end)
            for p in range(position, stop):
                offsets[at + n] = (run_slot + p - run_position) * stride
                n += 1
            position = max(stop, first) if stop >= n_sinks else stop
    refused_at[1] = position
    return (layout.NO_SLOT if position < end else 0), n


@njit
def packed_linears(like, memory):
    """The linears; their packed weights are of the type of `like`."""
    return Linears(
        pointer_like(like, memory[layout.PANELS]), floats_at(memory[layout.BIAS]), longs_at(memory[layout.LINEARS]))


@njit
def load_embedding(address, sizes, i, n):
    """The first n of LANES numbers of an embedding from number i on, as float32."""
    if sizes[layout.EMBEDDINGS] == layout.BFLOAT16:
        return load_bfloat16_first(shorts_at(address), i, n)
    return load_first(floats_at(address), i, n)


@njit
def unpack_row(memory, sizes, token, x, at):
    """x from number `at` on = a token's row of lm_head, which is packed in int8, see linears.py."""
    of_head = longs_at(memory[layout.LINEARS] + sizes[layout.N_LAYER] * LINEARS_PER_LAYER * layout.N_COLUMNS * 8)
    n_groups, outputs, output = of_head[layout.N_INPUTS] // GROUP, SHEET * LANES, token % (SHEET * LANES)
    first = of_head[layout.FIRST_WEIGHT] + token // outputs * n_groups * INT8_ELEMENTS * outputs
    for g in range(n_groups):
        of_group = memory[layout.PANELS] + first + g * INT8_ELEMENTS * outputs
        scale = sum_lanes(load_bfloat16_first(shorts_at(of_group), output, 1))
        whole = bytes_at(of_group + (2 * outputs + 4 * output))
        for i in range(GROUP):
            x[at + g * GROUP + i] = scale * np.int8(whole[i // 4 * outputs * 4 + i % 4] - ADDED)


@njit
def embed(thread, n_threads, memory, sizes):
    """This thread's share of the rows of x: the embeddings of the token and of its position, if that is learned."""
    C, C_p = sizes[layout.N_EMBD], padded(sizes[layout.N_EMBD], GROUP)
    learned, rope = sizes[layout.POSITION] == layout.LEARNED, sizes[layout.POSITION] == layout.ROPE
    x, tokens, positions = (
        floats_at(memory[layout.X]), longs_at(memory[layout.TOKENS]), longs_at(memory[layout.POSITIONS]))
    first_row, end = share(sizes[layout.N_ROWS], thread, n_threads)
    for r in range(first_row, end):
        if sizes[layout.EMBEDDINGS] == layout.OF_LM_HEAD:
            unpack_row(memory, sizes, tokens[r], x, r * C_p)
        for i in range(0, 0 if sizes[layout.EMBEDDINGS] == layout.OF_LM_HEAD else C, LANES):
            # zeros beyond C as well, so that a NaN of an earlier step does not stay there
            v = load_embedding(memory[layout.WTE], sizes, tokens[r] * C + i, C - i)
            if learned:
                v = v + load_embedding(memory[layout.WPE], sizes, positions[r] * C + i, C - i)
            store(x, r * C_p + i, v)
        if rope:
            find_angles(memory, sizes, r, positions[r])


@njit
def find_angles(memory, sizes, row, position):
    """
    The cosines and sines by which a row's queries and keys are turned, and those for queries to the sinks, which are
    never further away than n_sink + window - 1. In float32 an angle at position 1,000,000 would be off by 0.06.
    """
    angles, frequencies = floats_at(memory[layout.ANGLES]), doubles_at(memory[layout.FREQUENCIES])
    half = sizes[layout.HEAD_DIM] // 2
    at, clamped = row * 4 * half, min(position, sizes[layout.N_SINK] + sizes[layout.WINDOW] - 1)
    for i in range(half):
        angles[at + i] = np.float32(math.cos(position * frequencies[i]))
        angles[at + half + i] = np.float32(math.sin(position * frequencies[i]))
    if sizes[layout.N_SINK]:
        for i in range(half):
            angles[at + 2 * half + i] = np.float32(math.cos(clamped * frequencies[i]))
            angles[at + 3 * half + i] = np.float32(math.sin(clamped * frequencies[i]))


@njit
def keep_wanted(thread, n_threads, memory, sizes):
    """Move the wanted rows of x to its front: of each row the columns that are this thread's."""
    x, wanted, C_p = floats_at(memory[layout.X]), longs_at(memory[layout.WANTED]), padded(sizes[layout.N_EMBD], GROUP)
    first, end = share(C_p // LANES, thread, n_threads)
    for i in range(sizes[layout.N_WANTED]):
        for j in range(first * LANES, end * LANES, LANES):
            store(x, i * C_p + j, load(x, wanted[i] * C_p + j))


@njit
def rows_of(team, n_rows, shared):
    """The rows (from, to) that a thread prepares: its share, or all of them, so that it need not wait for others."""
    return share(n_rows, team.thread, team.n_threads) if shared else (np.int64(0), n_rows)


@njit
def prepare(linears, x, rows, K, scratch, counter, team, shared):
    """Prepare rows (from, to) of x for the next linear; where the threads share the rows, wait for those of others."""
    prepare_rows(linears.panels, x, rows, K, scratch)
    if shared:
        barrier(counter, team.n_threads)


@njit(inline='always')  # into `part_on`, its only caller: compiled by itself it would be optimised twice
def gpt_step(thread, n_threads, like, memory_at, sizes_at):
    """The part of a step that thread number `thread` of n_threads computes; see the top of this file."""
    memory, sizes = longs_at(memory_at), longs_at(sizes_at)
    n_layer, n_head, n_kv_head, C = (
        sizes[layout.N_LAYER], sizes[layout.N_HEAD], sizes[layout.N_KV_HEAD], sizes[layout.N_EMBD])
    n_rows, n_wanted = sizes[layout.N_ROWS], sizes[layout.N_WANTED]
    C_p, ff_p, head_p = padded(C, GROUP), padded(sizes[layout.N_INNER], GROUP), padded(sizes[layout.HEAD_DIM], LANES)
    y_p = padded(n_head * sizes[layout.HEAD_DIM], GROUP)
    x, y, ff = floats_at(memory[layout.X]), floats_at(memory[layout.Y]), floats_at(memory[layout.FF])
    q, kv, counter = floats_at(memory[layout.Q]), floats_at(memory[layout.KV]), longs_at(memory[layout.BARRIER])
    shared = n_rows >= SHARED_ROWS
    linears, norms, scratch = packed_linears(like, memory), norms_of_rows(memory, sizes), thread_scratch(
        memory, thread, 0 if shared else thread)
    normed, team = scratch.normed, Team(thread, n_threads, longs_at(memory[layout.CLAIMS]))

    (heads, kv_heads), panels = heads_of(sizes, thread, n_threads), head_p // LANES
    q_panels, kv_panels = (heads[0] * panels, heads[1] * panels), (2 * kv_heads[0] * panels, 2 * kv_heads[1] * panels)
    lm_head, activation = n_layer * LINEARS_PER_LAYER, np.int64(sizes[layout.ACTIVATION])
    if thread == 0:
        for number in range(lm_head + 1):
            team.claims[number * LINE] = 0
    embed(thread, n_threads, memory, sizes)
    barrier(counter, n_threads)

    for layer in range(n_layer):
        first = layer * LINEARS_PER_LAYER
        rows = rows_of(team, n_rows, shared)
        for r in range(rows[0], rows[1]):
            row_norm(x, r * C_p, norms, 2 * layer, C, normed, r * C_p)
        prepare(linears, normed, rows, C_p, scratch, counter, team, shared)
        linear(linears, first + layout.QUERIES, q_panels, normed, n_rows, STORE, q, n_head * head_p, scratch)
        linear(linears, first + layout.KEYS_VALUES, kv_panels, normed, n_rows, STORE, kv, 2 * n_kv_head * head_p,
               scratch)
        call_c(memory[layout.ATTENTION], memory_at, sizes_at, layer, thread, n_threads)

        # The last layer computes queries, keys and values of all rows, and everything else of the wanted rows only.
        last = layer == n_layer - 1
        if last and n_wanted == 0:
            return
        barrier(counter, n_threads)
        if last and n_wanted < n_rows:
            n_rows = n_wanted
            keep_wanted(thread, n_threads, memory, sizes)
            barrier(counter, n_threads)

        rows = rows_of(team, n_rows, shared)
        prepare(linears, y, rows, y_p, scratch, counter, team, shared)
        shared_linear(team, linears, first + layout.ATTENTION_PROJECTION, y, n_rows, ADD, x, C_p, scratch)
        barrier(counter, n_threads)

        for r in range(rows[0], rows[1]):
            row_norm(x, r * C_p, norms, 2 * layer + 1, C, normed, r * C_p)
        prepare(linears, normed, rows, C_p, scratch, counter, team, shared)
        shared_linear(team, linears, first + layout.MLP_HIDDEN, normed, n_rows, activation, ff, ff_p, scratch)
        barrier(counter, n_threads)

        prepare(linears, ff, rows, ff_p, scratch, counter, team, shared)
        shared_linear(team, linears, first + layout.MLP_PROJECTION, ff, n_rows, ADD, x, C_p, scratch)
        barrier(counter, n_threads)

    for r in range(rows[0], rows[1]):
        row_norm(x, r * C_p, norms, 2 * n_layer, C, normed, r * C_p)
    prepare(linears, normed, rows, C_p, scratch, counter, team, shared)
    logits = floats_at(memory[layout.LOGITS])
    if sizes[layout.N_LARGEST]:
        call_c(memory[layout.SCREEN], memory_at, sizes_at, thread, n_threads, 0)
    elif not shared_linear(team, linears, lm_head, normed, n_rows, STORE, logits, sizes[layout.VOCAB_SIZE], scratch):
        claim(sizes, layout.NOT_NUMBERS)


@njit
def post_step(memory_at, sizes_at, n_threads, post_at):
    """Post a step to the workers."""
    if n_threads == 1:
        return
    post = longs_at(post_at)
    longs_at(longs_at(memory_at)[layout.BARRIER])[0] = 0
    threads.publish(post, 0, 0)
    post[POSTED_THREADS], post[POSTED_MEMORY], post[POSTED_SIZES] = n_threads, memory_at, sizes_at
    for thread in range(1, n_threads):
        mine = longs_at(post_at + thread * LINE * 8)
        claim(mine, 0)
        threads.wake(mine)


@njit
def draw(thread, n_threads, memory, sizes):
    """In a call of several steps: draw this thread's share of the next tokens, unless a logit is NaN or infinite."""
    if sizes[layout.N_STEPS] == 0:
        return
    barrier(longs_at(memory[layout.BARRIER]), n_threads)
    if sizes[layout.NOT_NUMBERS]:
        return
    if thread == 0:
        sizes[layout.DRAW_NS] -= threads.clock()
    next_tokens = memory[layout.TOKENS] + 8 * sizes[layout.N_ROWS]
    if not call_c(
            memory[layout.DRAW], memory[layout.DRAW_DATA], memory[layout.LOGITS], next_tokens, thread, n_threads):
        claim(sizes, layout.ENDED)


@njit
def advance(memory, sizes):
    """
    After a draw: make the drawn tokens and their positions the inputs of the next step. Returns whether that step is to
    be computed.
    """
    if sizes[layout.N_STEPS] == 0 or sizes[layout.NOT_NUMBERS]:
        return False
    positions, n_rows = longs_at(memory[layout.POSITIONS]), sizes[layout.N_ROWS]
    memory[layout.TOKENS] += 8 * n_rows
    memory[layout.LOGITS] += sizes[layout.LOGITS_STEP]
    for r in range(n_rows):
        positions[r] += 1
    sizes[layout.N_DRAWN] += 1
    sizes[layout.DRAW_NS] += threads.clock()
    return sizes[layout.ENDED] == 0 and sizes[layout.N_DRAWN] < sizes[layout.N_STEPS]


def part_on(dtype):
    """
    What one thread does in a step on weights of this type, float32, uint16 (bfloat16), int8 or uint32 (int4): a C
    function (memory_at, sizes_at, thread, n_threads, 0) -> 0.
    """
    like = np.zeros(0, dtype)

    def part_of_step(memory_at, sizes_at, thread, n_threads, _):
        gpt_step(thread, n_threads, like, memory_at, sizes_at)
        draw(thread, n_threads, longs_at(memory_at), longs_at(sizes_at))
        return 0
    return CFunction(part_of_step)


PART_ON = {weights: part_on(dtype) for weights, dtype in WEIGHTS.items()}


@njit
def run_part(memory_at, sizes_at, thread, n_threads):
    call_c(longs_at(memory_at)[layout.PART], memory_at, sizes_at, thread, n_threads, 0)


@keep_on_disk
@numba.njit(nogil=True)
def step(memory_at, sizes_at, n_threads, post_at):
    """
    One step, or several, see `draw`, on the caller's thread and n_threads - 1 `Workers`. Returns 0, or why the next
    step was not done, see layout.py. A step writes the keys and values of its N rows, and the logits (W, vocab_size) of
    the rows that are wanted.

    memory_at, sizes_at: the addresses of the two tables of layout.py. n_threads: 0 checks the step and does nothing.
    post_at: the address of the workers' lines.
    """
    while True:
        refused = check_step(longs_at(memory_at), longs_at(sizes_at))
        if refused != 0 or n_threads == 0:
            return refused
        post_step(memory_at, sizes_at, n_threads, post_at)
        run_part(memory_at, sizes_at, 0, n_threads)
        if n_threads > 1:
            threads.wait_until(longs_at(post_at), n_threads - 1, threads.SPIN)
        if not advance(longs_at(memory_at), longs_at(sizes_at)):
            return 0


@keep_on_disk
@numba.njit(nogil=True)
def work(post_at, thread, seen):
    """The loop of a worker, which has seen so many steps; see `threads.Workers`."""
    post, mine = longs_at(post_at), longs_at(post_at + thread * LINE * 8)
    if claim(mine, threads.RUNNING) != 0:
        return 0
    while True:
        seen += 1
        threads.wait_until(mine, seen, threads.SPIN_IDLE)
        if threads.observe(mine, threads.STOP):
            return 0
        run_part(post[POSTED_MEMORY], post[POSTED_SIZES], thread, post[POSTED_THREADS])
        claim(post, 0)
        threads.wake(post)


workers = threads.Workers(work)  # of the steps of all executors, which take turns


def team_for(weights, dtype, n_threads):
    """
    Compile, or load from disk, a step on weights, a key of `WEIGHTS`, and attention for keys and values of a dtype of
    torch. Start the `Workers`.
    """
    if not step.signatures:
        step.compile((int64,) * 4)
        work.compile((int64,) * 3)
    PART_ON[weights].compiled  # noqa: B018 (it is compiled here)
    ATTENTION_ON[dtype].compiled  # noqa: B018
    workers.ready(n_threads)
