"""
Sample from a trained model, or from GPT-2.

    python sample.py                                        the newest out*/ckpt.pt, ten samples
    python sample.py --num_samples=1 --start="To be"        one sample, streamed as it is drawn
    python sample.py --init_from=gpt2 --start=FILE:prompts.txt --split=lines       every line of a file, in one batch
    python sample.py --weights=int8 --when_full=shift       the fastest settings; other tokens, see docs/SAMPLING.md
    python sample.py --init_from=FOLDER --chat              talk with a chat model, such as SmolLM2-135M-Instruct

The samples go to stdout, everything else to stderr. KV_DEBUG=1 traces the cache.
"""
import json
import math
import re
import signal
import sys
import time
from contextlib import nullcontext, suppress
from itertools import islice

import configurator  # before torch: it says so in one line where torch is missing

# isort: split
import torch
from tqdm import tqdm

import checkpoint
import debug_kv_model
import decode
import generation
import kvcache
import model as plain_model
from chat.conversation import Conversation, talk
from device import autocast, pick_device, pick_dtype, share_cores, synchronize
from formats.pretrained import generation_defaults
from tokenizer import TextStream, read_text

init_from = 'resume'  # resume (from out_dir), gpt2, gpt2-medium, gpt2-large, gpt2-xl or a Hugging Face folder
out_dir = ''          # where ckpt.pt is; by default wherever the newest out*/ckpt.pt is
start = '\n'          # the prompt, or FILE:path to read it from a file
split = ''            # lines: each line of the prompt, up to its \n or \r\n, is a prompt of its own
num_samples = 10      # how many to draw, of each prompt
batch_size = 64       # how many of them at once, at the most
max_new_tokens = 500  # of each sample
temperature = 0.8     # below 1 is tamer, above is wilder, 0 takes the likeliest token each time
top_k = 200           # draw from the k likeliest tokens only; 0 draws from all
top_p = 1.0           # draw from the fewest tokens that hold this much probability
stop = ''             # end a sample where this text comes up; \n, \t and \\ are a newline, a tab and a backslash
use_cache = True      # keep keys and values instead of computing them again: the same tokens, sooner
when_full = 'auto'    # of a full context: crop keeps the last block_size tokens (exact, slow), shift half of them, roll
                      # all keys, of which a window is seen; auto is roll for models with a window, crop for others
keep = 0              # with shift: keep so many of the last tokens instead of half; with roll: the window
n_keep = 0            # with shift and roll: and the first so many of the prompt
kv_cache = 'tuple'    # where keys and values live: tuple, streams or unified (llama.cpp's cells), paged (vLLM's blocks)
kv_bits = 0           # keep them in 8 or 4 bits instead of as they are
decoder = 'auto'      # what computes a cached step: eager, cpu, gpu, graph, compiled; auto is the fastest there is
weights = 'float32'   # how they are read: float32, or rounded: bfloat16, int8, int4, which is faster; on CUDA int8 only
threads = 0           # of the cpu decoder; 0 lets the decoder choose
speculate = 'auto'    # the same tokens, sooner: off; int4, int8 (fewer bits) or ngram (the text) propose tokens, which
                      # the model computes together; auto is int4 or off, whichever is faster
draft = ''            # or another model proposes them: a folder with ckpt.pt, or what init_from takes
seed = 1337           # of the first sample, the next has the next; the same seed gives the same sample
device = 'auto'       # cpu, cuda, cuda:1, mps; auto is the best there is
dtype = 'auto'        # float32, bfloat16 or float16; auto goes by the device
compile = False       # the same as decoder=compiled
chat = False          # talk with a chat model; start, if it is given, is the first message
system = ''           # with chat: what the model is told before everything that is said
template_kwargs = ''  # with chat: what the chat template finds, as JSON: '{"enable_thinking": false}'
generation_config = ''  # with chat: none leaves out what generation_config.json says of the draw


def main(config):
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # as quiet as Ctrl-C
    dev = pick_device(device)
    if dev == 'cpu':
        share_cores()
    check_settings(dev)
    texts = read_prompts()
    gpt = debug_kv_model if debug_kv_model.tracing() else plain_model
    of_weights = torch.float32 if dtype == 'float32' else None
    model, tokenizer, _ = checkpoint.load_model(init_from, out_dir, gpt, dev, of_weights)
    if dev == 'cpu' and decoder in ('auto', 'cpu') and model.lm_head.weight.dtype not in decode.MODEL_DTYPES:
        model.float()
    on_kernels = use_cache and decoder in ('auto', 'gpu') and not compile and not debug_kv_model.tracing()
    if dev.startswith('cuda') and on_kernels:
        model.to(getattr(torch, pick_dtype(dtype, dev)))  # the kernels compute in the dtype of the weights
    if chat:
        return chat_with(model, tokenizer, dev, texts if 'start' in config.given else (), config.given)
    end, token_bytes = unescaped_stop(tokenizer), tokenizer.bytes_of_tokens(model.config.vocab_size)
    prompts = [tokenizer.encode(text) for text in texts]
    say_what_is_cut(prompts, model.config)
    full = dict(when_full=None if when_full == 'auto' else when_full, keep=keep or None, n_keep=n_keep)
    if when_full == 'roll' and model.config.max_positions != math.inf:
        model, full = generation.rolling(model, keep or None, n_keep), {}
    n = max(map(len, prompts)) + max_new_tokens
    if n < min(model.config.n_slots, model.config.block_size):  # no context is ever full
        generation.make_sequences(model, prompts, **full)  # for its errors
        model.crop_block_size(n)
        full = {}
    prompts = [prompt for prompt in prompts for _ in range(num_samples)]
    how = pick_decoder(model, tokenizer, min(batch_size, len(prompts)), dev) | full

    n_drawn = 0
    live = len(prompts) == 1 and gpt is plain_model  # the lines of a trace would come in the middle of the text
    no_bar = True if live or gpt is debug_kv_model else None  # None: no bar where stderr is no terminal
    with (autocast(dev, pick_dtype(dtype, dev)),
          tqdm(total=len(prompts) * max_new_tokens, unit='tok', disable=no_bar) as bar):
        if gpt is plain_model:  # a few steps that are not counted, in which kernels are compiled, or read from disk
            list(islice(sample_batch(model, [prompts[0][:1]] * min(batch_size, len(prompts)), 0, how, dev), 4))
        t0 = time.perf_counter()
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first:first + batch_size]
            streams = [TextStream(token_bytes, [end]) for _ in batch]
            samples = [shown(prompt, tokenizer, model.config.max_positions) for prompt in batch]
            if live:
                print(samples[0], end='', flush=True)
            try:
                for tokens in sample_batch(model, batch, first, how, dev):
                    n_drawn += len(batch)
                    for row, token in enumerate(tokens.flatten().tolist()):
                        samples[row] += (piece := streams[row].push(token))
                        if live:
                            print(piece, end='', flush=True)
                    bar.update(len(batch))
                    if all(text.stopped for text in streams):
                        break
            finally:  # what is drawn is printed, whatever ends the run
                if live:
                    print(streams[0].finish())
                elif n_drawn or not max_new_tokens:
                    with bar.external_write_mode():
                        for sample, text in zip(samples, streams):
                            print(sample + text.finish() + '\n---------------' * (len(prompts) > 1), flush=True)
    synchronize(dev)
    dt = time.perf_counter() - t0
    print(f"{n_drawn:,} tokens in {dt:.2f} s: {n_drawn / dt:,.0f} tok/s "
          f"({'with' if use_cache else 'without'} the cache, {dev})", file=sys.stderr)


def chat_with(model, tokenizer, dev, first, given):
    """Talk with a chat model in the terminal. first: the first messages. given: the names of settings that are set."""
    of_file = {} if generation_config == 'none' else generation_defaults(init_from)
    of_file = {name: value for name, value in of_file.items() if name not in given}
    draw = dict(temperature=temperature, top_k=top_k, top_p=top_p) | of_file
    print(f"sampling: {', '.join(f'{name}={value}' for name, value in draw.items())}"
          f"{' (generation_config.json; --generation_config=none leaves it out)' * bool(of_file)}", file=sys.stderr)
    draw['top_k'] = max(0, draw['top_k']) or None
    how = pick_decoder(model, tokenizer, 1, dev)
    generator = torch.Generator(dev).manual_seed(seed)
    with autocast(dev, pick_dtype(dtype, dev)), getattr(how['cache'].executor, 'torch_on_one_thread', nullcontext)():
        talk(Conversation(model, tokenizer, **how, system=system, variables=of_template(), generator=generator, **draw),
             max_new_tokens, first)


def of_template():
    """`template_kwargs` as a dict. ValueError if it is not JSON of one."""
    with suppress(ValueError, RecursionError):
        if isinstance(variables := json.loads(template_kwargs or '{}'), dict):
            return variables
    raise ValueError(f"template_kwargs must be a JSON object, such as '{{\"enable_thinking\": false}}', not "
                     f"{template_kwargs!r:.60}")


def sample_batch(model, batch, first, how, dev):
    """
    Yield the tokens (B, 1) of a batch of prompts, whose first row is sample number `first`. how: further arguments of
    `stream`.
    """
    same = all(prompt == batch[0] for prompt in batch)  # then it is read once for all samples
    source = debug_kv_model if debug_kv_model.tracing() else generation
    return source.stream(model, batch[:1] if same else batch, max_new_tokens, temperature, top_k or None, top_p,
                         use_cache, num_samples=len(batch) if same else 1,
                         generator=[torch.Generator(dev).manual_seed(seed + first + row) for row in range(len(batch))],
                         **how)


def check_settings(dev):
    """ValueError, in the words of the settings, for what is wrong whatever the model is. dev: the device picked."""
    configurator.check_range(globals(), 1, 10**6, 'num_samples', 'batch_size')
    configurator.check_range(globals(), 0, math.inf, 'max_new_tokens', 'seed', 'keep', 'n_keep')
    if generation_config not in ('', 'none'):
        raise ValueError(f"generation_config must be none, or left out, not {generation_config!r}")
    of_template()
    if split not in ('', 'lines'):
        raise ValueError(f"split must be lines, or left out, not {split!r}")
    if top_k < 0:
        raise ValueError(f"top_k must be positive, or 0 to draw from all tokens, not {top_k}")
    plain_model.check_sampling(temperature, top_k or None, top_p)
    if when_full not in ('auto', 'crop', 'shift', 'roll'):
        raise ValueError(f"when_full must be auto, crop, shift or roll, not {when_full!r}")
    check_decoder(dev)


def check_decoder(dev):
    """ValueError for a decoder, weights, threads, kv_cache and kv_bits that do not exist or do not go together."""
    if compile and decoder not in ('auto', 'compiled'):
        raise ValueError(
            f"compile=True is decoder=compiled, but decoder={decoder} was given too: leave one of them out"
        )
    if kv_cache not in kvcache.KINDS:
        raise ValueError(f"kv_cache must be {', '.join(kvcache.KINDS)}, not {kv_cache!r}")
    if kv_bits not in (0, 8, 4):
        raise ValueError(f"kv_bits must be 0 (as they are), 8 or 4, not {kv_bits}")
    if chat and (draft or speculate not in ('auto', 'off')):
        raise ValueError("chat=True draws one token after the other: leave speculate and draft out")
    which = 'compiled' if compile else decoder
    cache = ' and '.join([f'kv_cache={kv_cache}'] * (kv_cache != 'tuple') + [f'kv_bits={kv_bits}'] * (kv_bits > 0)
                         + ['chat=True'] * chat)
    decode.check_choice(which, weights, threads, dev, pick_dtype(dtype, dev), cache, kv_bits, speculate, draft)
    needs_cache = decode.asked_of_the_kernel(weights, threads, speculate, draft) or cache
    if which not in ('auto', 'eager'):
        needs_cache = f'decoder={which}'
    if needs_cache and not use_cache:
        raise ValueError(f"{needs_cache} works on the cache: leave use_cache=False out")


def pick_decoder(model, tokenizer, n_rows, dev):
    """The arguments of `stream` for the decoder or cache that was asked for; stderr is told which it is."""
    which, mixed = 'compiled' if compile else decoder, dev == 'cpu' and pick_dtype(dtype, dev) != 'float32'
    in_cache = chat or (kv_cache, kv_bits) != ('tuple', 0)
    if (
        not use_cache
        or which == 'auto'
        and not decode.asked_of_the_kernel(weights, threads, speculate, draft)
        and (mixed or debug_kv_model.tracing() or in_cache and (dev == 'mps' or kv_bits == 4))
    ):
        which = 'eager'  # the other decoders have no mixed precision on a CPU, and no trace
    proposer = draft and decode.draft_of(checkpoint.load_draft(draft, plain_model, model, tokenizer), draft,
                                         kvcache.make_cache, min(n_rows, decode.DRAFTED_SEQUENCES))
    step = decode.best(model, n_rows, weights, threads, which, 'off' if chat else speculate, proposer)
    name, how = step.name, dict(decoder=step)
    if in_cache:
        cache = kvcache.make_cache(model, kv_cache, n_rows, kv_bits, step, 1024 if chat else None)  # a chat's grows
        if cache.executor is not step and (
                which in ('cpu', 'gpu') or decode.asked_of_the_kernel(weights, threads, speculate, draft)):
            raise ValueError(f"this decoder does not read a cache of kv_bits={kv_bits} with heads of "
                             f"{model.config.head_dim} channels, which must be a multiple of 32: leave kv_bits out, or "
                             "decoder, weights, threads, speculate and draft")
        step, name, how = cache.executor, f"{cache.name}, {cache.nbytes() / 2**20:,.1f} MiB", dict(cache=cache)
    print(f"decoder: {name}", file=sys.stderr)
    if not in_cache and (not use_cache or debug_kv_model.tracing() and which == 'eager'):
        return {}
    if hasattr(step, 'torch_on_one_thread'):
        # torch's threads would spin between two operations on the cores that the decoder needs
        torch.set_num_threads(1)
    return how


def read_prompts():
    """The texts of the prompts: `start`, or the file it names; with split=lines each line, without the empty ones."""
    text = read_text(start[5:], '' if split else None) if start.startswith('FILE:') else start
    texts = [line for line in re.split('\r?\n', text) if line.strip()] if split else [text]
    if not any(texts):
        raise ValueError("the prompt is empty: give --start some text, or leave it out to begin with a newline")
    return texts


def unescaped_stop(tokenizer):
    r"""
    `stop` with \n, \t and \\ replaced: a shell passes --stop='\n\n' on as four characters.

    ValueError where the model has no tokens for it, so that it can never come up.
    """
    end = re.sub(r'\\([nt\\])', lambda found: {'n': '\n', 't': '\t', '\\': '\\'}[found[1]], stop)
    if end != stop:
        print(rf"stop: {end!r} (\n is a newline, \t a tab, \\ a backslash)", file=sys.stderr)
    try:
        tokenizer.encode(end)
    except ValueError as e:
        raise ValueError(f"stop={stop!r} can never come up: {e}") from e
    return end


def say_what_is_cut(prompts, config):
    """Say so where prompts (token lists) are longer than block_size."""
    longest, block_size = max(map(len, prompts)), config.block_size
    if when_full == 'roll' or config.max_positions == math.inf:
        return
    n_long = sum(len(prompt) > block_size for prompt in prompts)
    if n_long:
        which = "the prompt has" if len(prompts) == 1 else f"{n_long:,} of {len(prompts):,} prompts have up to"
        sees = f"the first {n_keep} and last {block_size - n_keep}" if n_keep else f"the last {block_size}"
        print(f"{which} {longest:,} tokens, more than block_size: the model sees {sees} of them, and only these are "
              "printed, with ... for the others", file=sys.stderr)


def shown(prompt, tokenizer, max_positions):
    """The text of a prompt (token ids) before its sample: of a long one what the model sees, and ... for the rest."""
    if len(prompt) <= max_positions:
        return tokenizer.decode(prompt)
    return tokenizer.decode(prompt[:n_keep]) + '...' + tokenizer.decode(prompt[len(prompt) - max_positions + n_keep:])


if __name__ == '__main__':
    configurator.run(main)
