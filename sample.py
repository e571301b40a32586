"""
Sample from a trained model, or from GPT-2.

    python sample.py                                        the newest out*/ckpt.pt, ten samples
    python sample.py --num_samples=1 --start="To be"        one sample, streamed as it is drawn
    python sample.py --init_from=gpt2 --start=FILE:prompt.txt

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
import model as plain_model
from device import autocast, pick_device, pick_dtype, synchronize
from tokenizer import GPT2Tokenizer, TextStream, read_text

init_from = 'resume'  # resume (from out_dir), gpt2, gpt2-medium, gpt2-large, gpt2-xl or a Hugging Face folder
out_dir = ''          # where ckpt.pt is; by default wherever the newest out*/ckpt.pt is
start = '\n'          # the prompt, or FILE:path to read it from a file
num_samples = 10      # how many to draw
batch_size = 64       # how many of them at once, at the most
max_new_tokens = 500  # of each sample
temperature = 0.8     # below 1 is tamer, above is wilder, 0 takes the likeliest token each time
top_k = 200           # draw from the k likeliest tokens only
top_p = 1.0           # draw from the fewest tokens that hold this much probability
stop = ''             # end a sample where this text comes up
use_cache = True      # keep keys and values instead of computing them again: the same tokens, sooner
seed = 1337           # the same seed gives the same samples
device = 'auto'       # cpu, cuda, cuda:1, mps; auto is the best there is
dtype = 'auto'        # float32, bfloat16 or float16; auto goes by the device
compile = False       # torch.compile the model; pays off on a GPU, after a minute


def main(config):
    if num_samples < 1 or batch_size < 1:
        raise ValueError("num_samples and batch_size must be at least 1")
    torch.manual_seed(seed)
    dev = pick_device(device)
    amp = autocast(dev, pick_dtype(dtype, dev))
    model, tokenizer = load(dev)
    prompt = read_prompt(tokenizer)
    idx = torch.tensor([prompt], dtype=torch.long, device=dev)
    shown = tokenizer.decode(prompt)
    if compile:
        model.compile(dynamic=True)

    n_drawn, t0 = 0, time.perf_counter()
    with amp, tqdm(total=num_samples * max_new_tokens, unit='tok', disable=True if num_samples == 1 else None) as bar:
        for first in range(0, num_samples, batch_size):
            n = min(batch_size, num_samples - first)
            texts, streams = [shown] * n, [TextStream(tokenizer, stop) for _ in range(n)]
            if num_samples == 1:
                print(shown, end='', flush=True)
            for tokens in model.stream(idx, max_new_tokens, temperature, top_k, top_p, use_cache, num_samples=n):
                for row, token in enumerate(tokens.flatten().tolist()):
                    piece = streams[row].push(token)
                    texts[row] += piece
                    if num_samples == 1:
                        print(piece, end='', flush=True)
                n_drawn += n
                bar.update(n)
                if all(s.stopped for s in streams):
                    break
            if num_samples == 1:
                print(streams[0].flush())
            else:
                with bar.external_write_mode():
                    for text, stream in zip(texts, streams):
                        print(text + stream.flush() + '\n---------------', flush=True)
    synchronize(dev)
    dt = time.perf_counter() - t0
    print(f"{n_drawn:,} tokens in {dt:.2f} s: {n_drawn / dt:,.0f} tok/s ({'with' if use_cache else 'without'} the cache, {dev})", file=sys.stderr)


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


def read_prompt(tokenizer):
    text = start
    if start.startswith('FILE:'):
        text = read_text(start[5:])
    if not text:
        raise ValueError("the prompt is empty: give --start some text, or leave it out to begin with a newline")
    return tokenizer.encode(text)


if __name__ == '__main__':
    configurator.run(main)
