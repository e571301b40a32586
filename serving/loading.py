"""A model from disk, ready to be served."""
import gc
import os
import sys
import time

import checkpoint
import decode
import model as plain_model
from device import pick_device
from serving.api import Served
from serving.engine import Engine

SWITCH_INTERVAL = 0.0003  # seconds


def load_engine(init_from='resume', out_dir='', name='', device='auto', decoder='auto', weights='float32', threads=0,
                **settings):
    """
    (an `Engine` that was started, what is `Served`).

    init_from, out_dir: see `checkpoint.load_model`. name: of the model in the API, by default that of its folder.
    decoder, weights, threads: see `decode.best`. settings: further arguments of `Engine`. ValueError if there is no
    such model or decoder.

    It sets two things of the process, which serves one model until it ends:
    - Later garbage collections leave out what there is now: torch's objects take 0.1 s, in which all samples wait.
    - The engine waits at most SWITCH_INTERVAL for Python's lock, which the event loop may have. (With the default of
      5 ms the first token of short prompts to S came a fifth later.)
    """
    dev, step = pick_device(device), None
    decode.check_choice(decoder, weights, threads, dev, cache="a server's cache of blocks")
    model, tokenizer, folder = checkpoint.load_model(init_from, out_dir, plain_model, dev)
    compiled = dev == 'cpu' and decoder != 'eager'
    if not (compiled and model.lm_head.weight.dtype in decode.MODEL_DTYPES):
        model.float()
    if compiled:
        step = decode.best(model, 1, weights, threads, decoder)
        print(f"decoder: {step.name}", file=sys.stderr)
    token_bytes = tokenizer.bytes_of_tokens(model.config.vocab_size)
    engine = Engine(model, step, token_bytes, tokenizer.end_tokens, **settings)
    engine.start()
    name = name or os.path.basename(os.path.abspath(folder if init_from == 'resume' else init_from))
    served = Served(name, tokenizer, token_bytes,
                    min(model.config.max_positions, engine.cache.n_seq * engine.cache.page_size), int(time.time()))
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL)
    return engine, served
