"""
Many requests, one model: continuous batching over the paged cache of kvcache/. The tokens of a request do not depend on
which others are served.

    request      what was asked, and what one step adds to it
    scheduler    which tokens each step computes, and which sample gives way when blocks run out
    sampler      the next token of each row of logits, and log probabilities, compiled
    draws        how a row is filtered and drawn from
    engine       a thread that owns model and cache: inbox, plan, step, sample, deliver
"""
