"""
llama.cpp's KV cache: cells with owners, in one stream for all sequences or in one for each.

    cells        which cell holds which position, and for which sequences; no keys and values
    cache        cells with the keys and values of a model's layers, to be read and compared
    state        their content in a file
    hybrid       several such caches for one model, each with some of its layers
    pool         the pool of sample.py and serve.py whose slots are cells

llama.cpp (https://github.com/ggml-org/llama.cpp) is followed as it is since August 2025, when its pull request 15467
gave the files their names. Each file says which of its files it follows, and which operation has which name there;
KV_CACHE.md lists where this one differs on purpose.
"""
