"""
One step of a GPT on the CPU: token ids in, logits out, keys and values written into the arrays of the tuple cache.

The whole step is one function, `gpt_step`, which every thread runs from top to bottom. The threads share the heads of
attention and the rows of the weight matrices. At a barrier they wait for each other where one needs the results of the
others: four times a layer. Starting and joining threads for each matmul would cost a small model more than its
arithmetic.

Rows are tokens: row b * T + t is token t of sequence b, at position cache_pos[b] + t. Where linears and arrays are in
memory is in layout.py.
"""
from numba import njit

from decode import layout
from decode.attention import Norms, attention, layer_norm
from decode.layout import GROUP, LINEARS_PER_LAYER, padded
from decode.linears import (
    ADD,
    GELU,
    GELU_TANH,
    STORE,
    Linears,
    Team,
    ThreadScratch,
    linear,
    prepare_rows,
    share,
    shared_linear,
)
from decode.threads import LINE, RUNNING, SPIN, SPIN_IDLE, STOP, barrier, claim, observe, publish, wait_until, wake
from decode.vectors import LANES, bytes_at, floats_at, ints_at, load_first, longs_at, pointer_like, shorts_at, store

BAD_TOKEN, NO_ROOM, STALE = 1, 2, 3  # why a step is refused

POSTED_THREADS, POSTED_MEMORY, POSTED_SIZES = 2, 3, 4  # in line 0 of threads.Workers.post: the step that is posted


@njit
def thread_scratch(memory, thread):
    at = layout.SCRATCH + layout.N_SCRATCH * thread
    return ThreadScratch(
        floats_at(memory[at + layout.NORMED]), floats_at(memory[at + layout.SCORES]),
        floats_at(memory[at + layout.SUMS]), bytes_at(memory[at + layout.ROUNDED]),
        floats_at(memory[at + layout.SCALES]))


@njit
def packed_linears(like, memory):
    """The linears; their packed weights are of the type of `like`."""
    return Linears(
        pointer_like(like, memory[layout.PANELS]), floats_at(memory[layout.SCALE]), floats_at(memory[layout.BIAS]),
        shorts_at(memory[layout.START]), longs_at(memory[layout.LINEARS]))


@njit
def layer_norms(memory):
    return Norms(
        floats_at(memory[layout.NORM_WEIGHT]), floats_at(memory[layout.NORM_BIAS]), floats_at(memory[layout.EPS])[0])


@njit
def embed(thread, n_threads, memory, sizes):
    """This thread's share of the rows of x: the embeddings of the token and of its position."""
    C, C_p, T = sizes[layout.N_EMBD], padded(sizes[layout.N_EMBD], GROUP), sizes[layout.NEW_TOKENS]
    x, wte, wpe = floats_at(memory[layout.X]), floats_at(memory[layout.WTE]), floats_at(memory[layout.WPE])
    tokens, cache_pos = longs_at(memory[layout.TOKENS]), longs_at(memory[layout.CACHE_POS])
    first_row, end = share(sizes[layout.BATCH] * T, thread, n_threads)
    for r in range(first_row, end):
        token_at, pos_at = tokens[r] * C, (cache_pos[r // T] + r % T) * C
        for i in range(0, C, LANES):
            # zeros beyond C as well, so that a NaN of an earlier step does not stay there
            v = load_first(wte, token_at + i, C - i) + load_first(wpe, pos_at + i, C - i)
            store(x, r * C_p + i, v)


@njit
def gpt_step(thread, n_threads, like, memory, sizes):
    """The part of a step that thread number `thread` of n_threads computes; see the top of this file, and `steps`."""
    n_layer, n_head, C = sizes[layout.N_LAYER], sizes[layout.N_HEAD], sizes[layout.N_EMBD]
    B, T, want_logits = sizes[layout.BATCH], sizes[layout.NEW_TOKENS], sizes[layout.WANT_LOGITS]
    n_rows, C_p, ff_p, head_p = B * T, padded(C, GROUP), padded(4 * C, GROUP), padded(sizes[layout.HEAD_DIM], LANES)
    x, y, ff = floats_at(memory[layout.X]), floats_at(memory[layout.Y]), floats_at(memory[layout.FF])
    q, kv, caches = floats_at(memory[layout.Q]), floats_at(memory[layout.KV]), longs_at(memory[layout.CACHES])
    cache_pos, counter = longs_at(memory[layout.CACHE_POS]), longs_at(memory[layout.BARRIER])
    linears, norms, scratch = packed_linears(like, memory), layer_norms(memory), thread_scratch(memory, thread)
    normed, team = scratch.normed, Team(thread, n_threads, longs_at(memory[layout.CLAIMS]))

    heads, panels = share(n_head, thread, n_threads), head_p // LANES  # panels of a head
    q_panels, kv_panels = (heads[0] * panels, heads[1] * panels), (2 * heads[0] * panels, 2 * heads[1] * panels)
    lm_head, gelu = n_layer * LINEARS_PER_LAYER, GELU_TANH if sizes[layout.TANH_GELU] else GELU
    if thread == 0:
        for number in range(lm_head + 1):
            team.claims[number * LINE] = 0
    embed(thread, n_threads, memory, sizes)
    barrier(counter, n_threads)

    for layer in range(n_layer):
        first = layer * LINEARS_PER_LAYER
        # The last layer computes keys and values of all rows, but everything else only of each sequence's last row,
        # or of none if no logits are wanted.
        last = layer == n_layer - 1
        start, step = (T - 1, T) if last else (0, 1)
        every, wanted = (0, 1, n_rows), (start, step, B * want_logits if last else n_rows)

        for r in range(n_rows):
            layer_norm(x, r * C_p, norms, 2 * layer, C, normed, r * C_p)
        prepare_rows(linears.panels, normed, every, C_p, scratch)
        linear(linears, first + layout.QUERIES, q_panels, normed, wanted, STORE, q, n_head * head_p, scratch)
        linear(linears, first + layout.KEYS_VALUES, kv_panels, normed, every, STORE, kv, 2 * n_head * head_p, scratch)
        attention(q, kv, floats_at(caches[2 * layer]), floats_at(caches[2 * layer + 1]), cache_pos, sizes, heads,
                  T if last and not want_logits else start, y, scratch)
        if last and not want_logits:
            return
        barrier(counter, n_threads)

        prepare_rows(linears.panels, y, wanted, C_p, scratch)
        shared_linear(team, linears, first + layout.ATTENTION_PROJECTION, y, wanted, ADD, x, C_p, scratch)
        barrier(counter, n_threads)

        for r in range(start, n_rows, step):
            layer_norm(x, r * C_p, norms, 2 * layer + 1, C, normed, r * C_p)
        prepare_rows(linears.panels, normed, wanted, C_p, scratch)
        shared_linear(team, linears, first + layout.MLP_HIDDEN, normed, wanted, gelu, ff, ff_p, scratch)
        barrier(counter, n_threads)

        prepare_rows(linears.panels, ff, wanted, ff_p, scratch)
        shared_linear(team, linears, first + layout.MLP_PROJECTION, ff, wanted, ADD, x, C_p, scratch)
        barrier(counter, n_threads)

    for b in range(B):
        layer_norm(x, (b * T + T - 1) * C_p, norms, 2 * n_layer, C, normed, b * C_p)
    ends = 0, 1, B
    prepare_rows(linears.panels, normed, ends, C_p, scratch)
    logits, vocab_size = floats_at(memory[layout.LOGITS]), sizes[layout.VOCAB_SIZE]
    shared_linear(team, linears, lm_head, normed, ends, STORE, logits, vocab_size, scratch)


@njit
def refusal(memory, sizes):
    """Why the step cannot be taken: STALE weights, a BAD_TOKEN or NO_ROOM in the cache; otherwise 0."""
    block_size, vocab_size = sizes[layout.BLOCK_SIZE], sizes[layout.VOCAB_SIZE]
    B, T = sizes[layout.BATCH], sizes[layout.NEW_TOKENS]
    tokens, cache_pos = longs_at(memory[layout.TOKENS]), longs_at(memory[layout.CACHE_POS])
    probes, packed = longs_at(memory[layout.PROBES]), ints_at(memory[layout.PACKED_PROBES])
    for i in range(sizes[layout.N_PROBES]):
        if ints_at(probes[i])[0] != packed[i]:
            return STALE
    for r in range(B * T):
        if not 0 <= tokens[r] < vocab_size:
            return BAD_TOKEN
    for b in range(B):
        if not 0 <= cache_pos[b] <= block_size - T:
            return NO_ROOM
    return 0


def steps(sources):
    """
    The compiled functions (run, loop) for weights of the type of `like`, an array of float32, uint16 (bfloat16) or
    int8.

    run(like, memory, sizes, n_threads, post): one step on the caller's thread and n_threads - 1 `Workers`, which run
    loop(like, post, thread). memory, sizes: the addresses of the two tables of layout.py. post: the address of the
    workers' lines. A step writes the keys and values of its B * T positions, and the logits (B, vocab_size) of each
    sequence's last token if they are wanted. Returns 0, or why nothing was done, see `refusal`. The bits of the result
    do not depend on n_threads: each number is computed by one thread.

    numba keeps the compiled code on disk. sources, a hash of all files that are compiled, is a part of its key, so a
    change in any of them compiles it anew.
    """
    @njit
    def run(like, memory_at, sizes_at, n_threads, post_at):
        sources  # noqa: B018
        memory, sizes, post = longs_at(memory_at), longs_at(sizes_at), longs_at(post_at)
        refused = refusal(memory, sizes)
        if refused != 0:
            return refused
        if n_threads > 1:
            longs_at(memory[layout.BARRIER])[0] = 0
            publish(post, 0, 0)
            post[POSTED_THREADS], post[POSTED_MEMORY], post[POSTED_SIZES] = n_threads, memory_at, sizes_at
            for thread in range(1, n_threads):
                mine = longs_at(post_at + thread * LINE * 8)
                claim(mine, 0)
                wake(mine)
        gpt_step(0, n_threads, like, memory, sizes)
        if n_threads > 1:
            wait_until(post, n_threads - 1, SPIN)
        return refused

    @njit(nogil=True)
    def loop(like, post_at, thread, seen):
        sources  # noqa: B018
        post, mine = longs_at(post_at), longs_at(post_at + thread * LINE * 8)
        if claim(mine, RUNNING) != 0:
            return
        while True:
            seen += 1
            wait_until(mine, seen, SPIN_IDLE)
            if observe(mine, STOP):
                return
            gpt_step(thread, post[POSTED_THREADS], like, longs_at(post[POSTED_MEMORY]), longs_at(post[POSTED_SIZES]))
            claim(post, 0)
            wake(post)

    return run, loop
