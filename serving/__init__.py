"""
Many requests, one model: continuous batching over the paged cache of kvcache/. The tokens of a request do not depend on
which others are served.

    request      what was asked, and what one step adds to it
    scheduler    which tokens each step computes, and which sample gives way when blocks run out
    draws        a token from a row of logits, and log probabilities, compiled
    sampler      the tokens of all rows of a step
    text         bytes of tokens to text: UTF-8 never cut in half, stop strings never sent
    core         one step: plan, compute, draw, deliver
    engine       a thread around it, with an inbox
    snapshot     counters, and the pool's state for the page
    loading      model, decoder and tokenizer of a checkpoint
    api          the bodies and answers of the OpenAI completions API
    completion   the answer to one body, of one request or more
    delivery     outputs from the engine's thread to the event loop
    server       the Starlette app; openapi, metrics, page.html and ray_app are of it
"""
