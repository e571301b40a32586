"""
Many requests, one model: continuous batching over the paged cache of kvcache/. The tokens of a request do not depend on
which others are served.

    request      what was asked, and what one step adds to it
    scheduler    which tokens each step computes, and which sample gives way when blocks run out
    sampler      the tokens of all rows of a step
    core         one step: plan, compute, draw, deliver
    engine       a thread around it, with an inbox
    stats        counters, and the pool's state for the page
    loading      model, decoder and tokenizer of a checkpoint
    api          the bodies of the OpenAI completions API, and its errors
    answer       the answer to a body: outputs from the engine's thread become what the client reads
    connection   a client's connection, and what it may cost
    server       the Starlette app, with page.html
    openapi      what is answered at an address, and the description of all for programs
    ray_app      several servers behind Ray Serve
"""
import time

BEGAN = time.monotonic()  # before torch is imported, which takes seconds
