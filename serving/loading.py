"""A model from disk, ready to be served."""
import gc
import sys
import time
from functools import partial

import torch
from tqdm import tqdm

import checkpoint
import decode
import model as plain_model
from chat.template import ChatTemplate
from device import pick_device, trusted_dtype
from engine import Engine, default_pool
from formats.gguf_files import is_gguf
from formats.pretrained import generation_defaults
from kvcache import bytes_of_slots, make_layers
from kvcache.storage import free_memory
from serving.engine_thread import EngineThread
from serving.served import Served
from tokenizer import read_text

SWITCH_INTERVAL, ON_CUDA = 0.0003, 0.00005  # seconds; on CUDA the engine's thread needs the lock more often
BUDGET = 2048  # tokens of a step on CUDA
WORK = 2**33   # weights times tokens of a step, by default: a few tenths of a second on two cores


def load_engine(init_from='resume', out_dir='', name='', device='auto', decoder='auto', weights='float32', threads=0,
                kv_bits=0, kv_memory=0.5, speculate='auto', draft='', generation_config='', chat_template='',
                n_blocks=0, page_size=16, max_num_batched_tokens=0, max_queue=1024):
    """
    (an `EngineThread` that was started, what is `Served`). The settings are those of serve.py, which says what each is.
    ValueError if there is no such model or decoder.

    It sets two things of the process, which serves one model until it ends:
    - Later garbage collections leave out what there is now: torch's objects take 0.1 s, in which all samples wait.
    - The engine waits at most SWITCH_INTERVAL, or ON_CUDA, for Python's lock, which the event loop may have. (With the
      default of 5 ms the first token of short prompts to S came a fifth later.)
    """
    defaults = generation_defaults(init_from, generation_config)
    dev, budget = pick_device(device), max_num_batched_tokens
    on_cuda, dtype = dev.startswith('cuda'), None
    if on_cuda and weights == 'bfloat16':  # there it is the dtype of the model, in which it computes
        dtype, weights = torch.bfloat16, 'float32'
    decode.check_choice(decoder, weights, threads, dev, speculate=speculate, draft=draft)
    model, tokenizer, folder = checkpoint.load_model(init_from, out_dir, plain_model, dev, weights=weights)
    trusted_dtype(plain_model.GPT, plain_model.GPTConfig, dev, 'float32')
    if chat_template:
        if not hasattr(tokenizer, 'conversation'):
            raise ValueError(f"chat_template={chat_template} needs a model with a tokenizer.json: leave it out")
        tokenizer.chat_template = ChatTemplate(read_text(chat_template), tokenizer.special_tokens)
    if dev == 'cpu' and init_from != 'resume' and not is_gguf(init_from):
        copy_weights(model)
    decode.converted(model, decoder, dtype)
    proposing = None
    if draft:
        small = copy_weights(checkpoint.load_draft(draft, plain_model, model, tokenizer))
        pool = default_pool(small.config)
        proposing = decode.draft_of(small, draft, pool, make_layers(small, pool.n_slots))
    executor = decode.best(model, 1, weights, threads, decoder, speculate, proposing, kv_bits=kv_bits)
    print(f"decoder: {executor.name}", file=sys.stderr)
    type_kv = 'int8' if kv_bits else executor.type_kv
    if on_cuda:
        n_blocks, budget = pages_on_cuda(model, type_kv, kv_memory, n_blocks, page_size), budget or BUDGET
    budget = budget or max(64, min(512, WORK // sum(p.numel() for p in model.parameters())))
    engine = Engine(model, executor, default_pool(model.config, n_blocks, page_size, type_kv), budget, kv_bits=kv_bits)
    if hasattr(executor, 'prepare'):
        executor.prepare(partial(tqdm, desc='recording graphs', unit='graph'))
    token_bytes = tokenizer.bytes_of_tokens(model.config.vocab_size)[:model.config.vocab_size]
    thread = EngineThread(engine, token_bytes, tokenizer.end_tokens, tokenizer.special_ids, max_queue)
    thread.start()
    name = name or checkpoint.name_of(folder if init_from == 'resume' else init_from)
    if defaults:
        print(f"sampling defaults: {', '.join(f'{key} {value}' for key, value in defaults.items())} "
              "(--generation_config=none: without them)", file=sys.stderr)
    max_tokens = min(model.config.max_positions, engine.pool.n_slots)
    aliases = () if init_from == 'resume' else (init_from, init_from.partition('@')[0])
    served = Served(name, tokenizer, token_bytes, max_tokens, int(time.time()), defaults, aliases)
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(ON_CUDA if on_cuda else SWITCH_INTERVAL)
    return thread, served


def copy_weights(model):
    """The model with its weights copied into memory: if a mapped file were cut, the process would end."""
    for weight in model.parameters():
        if not weight.is_meta:
            weight.data = weight.data.clone()
    return model


def pages_on_cuda(model, type_kv, kv_memory, n_blocks, page_size):
    """The pages of a pool on CUDA: n_blocks, or what the share kv_memory of free memory holds; stderr says how much."""
    n_bytes = bytes_of_slots(model.config, page_size, type_kv)
    free = free_memory(model.lm_head.weight.device)
    n_blocks = n_blocks or max(1, int(kv_memory * free) // n_bytes)
    print(f"memory: weights {sum(p.nbytes for p in model.parameters()) / 1e9:.2f} GB, pool {n_blocks:,} blocks of "
          f"{page_size} tokens, {n_blocks * n_bytes / 1e9:.2f} GB of {free / 1e9:.2f} GB that are free",
          file=sys.stderr)
    return n_blocks
