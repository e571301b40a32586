"""
The decode step that numba compiles: a whole step of a GPT on the CPU as one function that all threads run.

    step         the step, from tokens to logits, and several steps in one call
    plan         its checks, and the list of the slots that it reads
    layout       the two tables that it shares with the Python code that calls it
    linears, attention, norms     the parts of a GPT
    tiles, vectors, masked_vectors, keys_values     vector instructions, tiles of them, stored keys and values
    next_tokens, draws     the next token of each row of logits
    threads      counters, waiting, and the worker threads
    native, callback, disk_cache     compiling, or loading what is compiled
"""
