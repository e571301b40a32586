"""
Many requests, one engine (see engine/). The tokens of a request do not depend on which others are served.

    request        what was asked, and what a client gets of it
    engine_thread  a thread around the engine, with an inbox
    stats          counters, and the pool's state for the web page
    loading        model, executor and tokenizer of a checkpoint
    grammars       the form that a text must have, as a grammar
    constraints    which tokens may come next in a text that must have a form
    api            checks of the fields of a body, and errors
    bodies         the bodies of the OpenAI API, with fields of vLLM
    served         the model that is served, and the requests that a body asks it for
    answer         the answer to a body: outputs from the engine's thread become what the client reads
    responses      the bodies and answers of the responses API, which are those of a chat in another form
    connection     a client's connection, with limits on its time and size
    server         the Starlette app, with the web page: page.html, page.css, page.js, and what they load of vendor/
    openapi        what is answered at an address, and the description of all for programs
    ray_app        several servers behind Ray Serve
"""
import time

BEGAN = time.monotonic()  # before torch is imported, which takes seconds
