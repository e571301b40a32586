"""
Sample from a trained model, or from GPT-2.

    python sample.py                                        the newest out*/ckpt.pt, ten samples
    python sample.py --num_samples=1 --start="To be"        one sample, streamed as it is drawn
    python sample.py --init_from=gpt2 --start=FILE:prompts.txt --split=lines       every line of a file, in one batch
    python sample.py --weights=int8 --when_full=shift       as fast as it goes: other tokens, see README.md

The samples go to stdout, everything else to stderr. KV_DEBUG=1 traces the cache.
"""
import os
import sys
import time

import torch
from tqdm import tqdm

import checkpoint as checkpoints
import configurator
import debug_kv_model
import decode
import kvcache
import model as plain_model
from device import autocast, pick_device, pick_dtype, synchronize
from tokenizer import GPT2Tokenizer, TextStream, read_text

init_from = 'resume'  # resume (from out_dir), gpt2, gpt2-medium, gpt2-large, gpt2-xl or a Hugging Face folder
out_dir = ''          # where ckpt.pt is; by default wherever the newest out*/ckpt.pt is
start = '\n'          # the prompt, or FILE:path to read it from a file
split = ''            # lines: each line of the prompt is a prompt of its own
num_samples = 10      # how many to draw, of each prompt
batch_size = 64       # how many of them at once, at the most
max_new_tokens = 500  # of each sample
temperature = 0.8     # below 1 is tamer, above is wilder, 0 takes the likeliest token each time
top_k = 200           # draw from the k likeliest tokens only
top_p = 1.0           # draw from the fewest tokens that hold this much probability
stop = ''             # end a sample where this text comes up
use_cache = True      # keep keys and values instead of computing them again: the same tokens, sooner
when_full = 'crop'    # what a full context keeps: crop, its last block_size tokens, exact and slow, or shift, the last half
keep = 0              # with shift: keep so many of the last tokens instead of half the context
n_keep = 0            # with shift: and the first so many of the prompt
kv_cache = 'tuple'    # where keys and values live: tuple, streams or unified (llama.cpp's cells) or paged (vLLM's blocks)
kv_bits = 0           # keep them in 8 or 4 bits instead of as they are
decoder = 'auto'      # who runs a cached step: eager, cpu, compiled; auto is the fastest there is
weights = 'float32'   # how the cpu decoder reads them: float32, bfloat16 or int8; fewer bytes are faster, and rounded
threads = 0           # of the cpu decoder; 0 goes by the size of the model
seed = 1337           # of the first sample, the next has the next; the same seed gives the same sample
device = 'auto'       # cpu, cuda, cuda:1, mps; auto is the best there is
dtype = 'auto'        # float32, bfloat16 or float16; auto goes by the device
compile = False       # the same as decoder=compiled


def main(config):
    if num_samples < 1 or batch_size < 1:
        raise ValueError("num_samples and batch_size must be at least 1")
    if split not in ('', 'lines'):
        raise ValueError(f"split must be lines, or left out, not {split!r}")
    dev = pick_device(device)
    amp = autocast(dev, pick_dtype(dtype, dev))
    model, tokenizer = load(dev)
    prompts = [prompt for prompt in read_prompts(tokenizer) for _ in range(num_samples)]
    step = pick_decoder(model, min(batch_size, len(prompts)), dev)
    settings = dict(temperature=temperature, top_k=top_k, top_p=top_p, use_cache=use_cache, decoder=step, when_full=when_full)
    if when_full == 'shift':
        settings |= dict(keep=keep or None, n_keep=n_keep)

    n_drawn, t0, single = 0, time.perf_counter(), len(prompts) == 1
    with amp, tqdm(total=len(prompts) * max_new_tokens, unit='tok', disable=True if single else None) as bar:
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first:first + batch_size]
            texts, streams = [tokenizer.decode(prompt) for prompt in batch], [TextStream(tokenizer, stop) for _ in batch]
            if single:
                print(texts[0], end='', flush=True)
            # one prompt is prefilled once, whatever number of samples there is of it
            same = all(prompt == batch[0] for prompt in batch)
            tokens = model.stream(batch[:1] if same else batch, max_new_tokens, num_samples=len(batch) if same else 1,
                                  generator=[torch.Generator(dev).manual_seed(seed + first + row) for row in range(len(batch))], **settings)
            for drawn in tokens:
                for row, token in enumerate(drawn.flatten().tolist()):
                    piece = streams[row].push(token)
                    texts[row] += piece
                    if single:
                        print(piece, end='', flush=True)
                n_drawn += len(batch)
                bar.update(len(batch))
                if all(s.stopped for s in streams):
                    break
            if single:
                print(streams[0].flush())
            else:
                with bar.external_write_mode():
                    for text, stream in zip(texts, streams):
                        print(text + stream.flush() + '\n---------------', flush=True)
    synchronize(dev)
    dt = time.perf_counter() - t0
    print(f"{n_drawn:,} tokens in {dt:.2f} s: {n_drawn / dt:,.0f} tok/s ({'with' if use_cache else 'without'} the cache, {dev})", file=sys.stderr)


def pick_decoder(model, batch, dev):
    """The decoder that was asked for, or None where the model itself serves; says which it is."""
    which = 'compiled' if compile and decoder == 'auto' else decoder
    if which not in ('auto', 'eager', 'cpu', 'compiled'):
        raise ValueError(f"decoder must be auto, eager, cpu or compiled, not {decoder!r}")
    mixed = dev == 'cpu' and pick_dtype(dtype, dev) != 'float32'
    kernel_asked = which == 'cpu' or weights != 'float32' or threads
    if mixed and kernel_asked:
        raise ValueError(f"the cpu decoder computes in float32 and takes weights=bfloat16 or int8, but not dtype={dtype}")
    if (kv_cache, kv_bits) != ('tuple', 0):
        if not use_cache or kernel_asked or which == 'compiled':
            raise ValueError("kv_cache and kv_bits are for the cached model itself: leave use_cache, decoder, weights, threads and compile out")
        step = kvcache.CacheDecoder(model, kv_cache, batch, kv_bits)
        print(f"decoder: {step.name}, {step.system.nbytes() / 2**20:,.1f} MiB", file=sys.stderr)
        return step
    if not use_cache and (kernel_asked or which == 'compiled'):
        raise ValueError("decoders work on the cache: leave use_cache=False out, or decoder, weights, threads and compile")
    if not use_cache or which == 'auto' and not kernel_asked and (mixed or debug_kv_model.tracing()):
        which = 'eager'  # mixed precision and the trace are the model's own
    step = decode.named(which, model, weights, threads or None) if which != 'auto' else decode.best(model, batch, weights, threads or None)
    print(f"decoder: {step.name}", file=sys.stderr)
    return None if which == 'eager' else step


def load(dev):
    """(model in eval mode, tokenizer) of a checkpoint, or of GPT-2; the traced model when KV_DEBUG is set."""
    gpt = debug_kv_model if debug_kv_model.tracing() else plain_model
    if init_from != 'resume':
        model, tokenizer = gpt.GPT.from_pretrained(init_from), GPT2Tokenizer()
    else:
        path = os.path.join(out_dir, 'ckpt.pt') if out_dir else (checkpoints.newest_first() or ['out/ckpt.pt'])[0]
        checkpoint = checkpoints.load(path, dev)
        model, tokenizer = checkpoints.build(checkpoint, gpt.GPT, gpt.GPTConfig), checkpoints.tokenizer_of(checkpoint)
        print(f"{path}: iteration {checkpoint.get('iter_num', '?')}, {model.get_num_params() / 1e6:.2f}M parameters, "
              f"block_size {model.config.block_size}", file=sys.stderr)
    return model.to(dev).eval(), tokenizer


def read_prompts(tokenizer):
    """The prompts, lists of token ids: the text of `start`, or its lines, less the empty ones."""
    text = read_text(start[5:]) if start.startswith('FILE:') else start
    texts = [line for line in text.splitlines() if line.strip()] if split else [text]
    if not any(texts):
        raise ValueError("the prompt is empty: give --start some text, or leave it out to begin with a newline")
    return [tokenizer.encode(text) for text in texts]


if __name__ == '__main__':
    configurator.run(main)
