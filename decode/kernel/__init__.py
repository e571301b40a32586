"""
The decode step that numba compiles: a whole step of a GPT on the CPU as one function that all threads run.

    step         the step, from its checks and tokens to logits, and several steps in one call
    layout       the two tables that it shares with the Python code that calls it
    norms        norms of rows and of heads
    linears, attention            the parts of a GPT that take time
    attention_tile                attention of several queries of a prompt at once
    sampling     the next token of each row of logits
    screening    the logits that may be among the largest, of a large vocabulary
    vectors      vector instructions
    pointers     numbers at an address
    emit         what these and others emit: LLVM's types, and pieces of code
    threads      counters, waiting, and the worker threads
    building     compiling, or loading what is compiled; C functions

Compiled functions are called with int64 numbers where possible: numba gives a plain number in the source a type of its
own, and compiles the called function once more for that type.
"""
