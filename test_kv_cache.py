"""
Does the cache give the same tokens, and how much sooner?

    python test_kv_cache.py     generates 206 tokens both ways, compares them, and prints the times
    python test_kv_cache.py --decoder=auto      the same of the fastest decoder there is for this machine
    pytest test_kv_cache.py     the comparison alone, over 50 seeds and five prompt lengths

The script takes the newest out*/ckpt.pt in the current folder that was trained on Shakespeare. Without one it says so
and compares a random model of the same shape. Exit code 1 if the tokens differ; KV_DEBUG=1 traces the cache.
"""
import itertools
import os
import statistics
import sys
import time

import configurator  # before torch: it says so in one line where torch is missing

# isort: split
import torch

import checkpoint as checkpoints
import debug_kv_model
import decode
import model as plain_model
import tokenizer as tokenizers
from device import pick_device, synchronize

prompt = 'First '  # six characters, all of which Shakespeare has
new_tokens = 200   # to generate both ways
window = 128       # a longer context window is cropped to this, so that the tokens go past it
temperature = 0.8  # as sample.py
top_k = 200        # as sample.py
decoder = 'eager'  # what computes the cached steps: eager is the model itself; cpu, graph, compiled, or auto
seed = 1337        # of the draws, the same both ways
repeats = 5        # runs each way, taking turns; the median counts
device = 'auto'    # cpu, cuda, mps


def load_model(dev):
    """(model, tokenizer or None): the newest checkpoint trained on Shakespeare, or a random model of its shape."""
    gpt = debug_kv_model if debug_kv_model.tracing() else plain_model
    for path in checkpoints.newest_first():
        checkpoint = checkpoints.load(path)
        if 'shakespeare' in str(checkpoint.get('config', {}).get('dataset')):
            print(f"model: {path}")
            model = checkpoints.build(checkpoint, gpt.GPT, gpt.GPTConfig).to(dev).eval()
            return model, checkpoints.tokenizer_of(checkpoint)
    print(
        f"!! no checkpoint trained on Shakespeare in {os.path.join(os.getcwd(), 'out*')}: this compares "
        "RANDOM WEIGHTS, not your model.\n!! Run it in the folder that has your out*/ckpt.pt, or train one: "
        "python train.py config/train_shakespeare_char.py",
        file=sys.stderr,
    )
    torch.manual_seed(seed)
    config = gpt.GPTConfig(block_size=128, vocab_size=65, n_layer=4, n_head=4, n_embd=128, bias=False)
    return gpt.GPT(config).to(dev).eval(), None


def timed(model, idx, n, step, dev):
    """(tokens (1, T), seconds) of one generation, uncached if step is None."""
    torch.manual_seed(seed)
    synchronize(dev)
    t0 = time.perf_counter()
    used = None if step == 'eager' else step
    tokens = model.generate(idx, n, temperature, top_k, use_cache=step is not None, decoder=used)
    synchronize(dev)
    return tokens, time.perf_counter() - t0


def compare(model, idx, n, step, dev):
    """(tokens, seconds) without the cache, and with it: medians of runs that take turns."""
    ways, seconds, tokens = (None, step), ([], []), [None, None]
    for repeat in range(1 + repeats):  # the first warms up
        for way in (0, 1):
            tokens[way], s = timed(model, idx, n, ways[way], dev)
            seconds[way].extend([s] if repeat else [])
    return [(tokens[way][0], statistics.median(seconds[way])) for way in (0, 1)]


def report_difference(model, tokenizer, plain, cached):
    where = int((plain != cached).nonzero()[0])
    with torch.inference_mode():
        logits = model(plain[None, max(0, where - model.config.block_size):where], use_cache=False)[0][0, -1]
    a, b = plain[where].item(), cached[where].item()

    def show(tokens):
        tokens = tokens[where:where + 40].tolist()
        return repr(tokenizer.decode(tokens)) if tokenizer else tokens
    print(f"{mark('✘')}FAILURE: outputs differ from position {where} on")
    print(f"  without cache   {show(plain)}\n  with cache      {show(cached)}")
    print(f"  the uncached logits of the two tokens there are {abs(logits[a] - logits[b]).item():.3g} apart "
          "(less than about 1e-4 would be a tie that rounding may break either way)")
    print("  KV_DEBUG=1 python test_kv_cache.py shows what the cache does at each step")


def mark(sign):
    """The sign and a space where the terminal can show it."""
    try:
        sign.encode(sys.stdout.encoding or 'ascii')
        return sign + ' '
    except UnicodeEncodeError:
        return ''


def main(config):
    if new_tokens < 1 or repeats < 1 or window < 1:
        raise ValueError("new_tokens, repeats and window must be at least 1")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be between 0 and 2**63 - 1, not {seed}")
    dev = pick_device(device)
    model, tokenizer = load_model(dev)
    if model.config.block_size > window:
        model.crop_block_size(window)
    block_size = model.config.block_size
    step = decoder if decoder == 'eager' else decode.best(model, 1, name=decoder)
    if step != 'eager':
        print(f"decoder: {step.name}")
    if tokenizer is None:
        ids = torch.randint(model.config.vocab_size, (6,)).tolist()
    elif isinstance(tokenizer, tokenizers.CharTokenizer):  # a stand-in text may lack some of the letters
        ids = [tokenizer.ids.get(c, 0) for c in prompt]
    else:
        ids = tokenizer.encode(prompt)
    idx = torch.tensor([ids], device=dev)
    (plain, plain_s), (cached, cached_s) = compare(model, idx, new_tokens, step, dev)
    if not torch.equal(plain, cached):
        report_difference(model, tokenizer, plain, cached)
        sys.exit(1)
    inside = ''
    n_inside = block_size - idx.size(1)
    if 0 < n_inside < new_tokens:
        (_, plain_inside_s), (_, cached_inside_s) = compare(model, idx, n_inside, step, dev)
        inside = f"    (inside block_size: {plain_inside_s / cached_inside_s:.2f}x)"
    print(f"{mark('✔')}SUCCESS: outputs are identical ({len(cached)} tokens{'' if tokenizer else ', RANDOM WEIGHTS'})")
    print(f"  without cache   {plain_s:.2f} s   {new_tokens / plain_s:,.0f} tok/s")
    print(f"  with cache      {cached_s:.2f} s   {new_tokens / cached_s:,.0f} tok/s")
    print(f"  speedup         {plain_s / cached_s:.2f}x{inside}")


BLOCK = 16


def test_same_tokens_with_and_without_the_cache(pytestconfig):
    """
    50 seeds of weights, prompt and draws for each case, on to twice the window. `make test` takes 8 seeds: --full is an
    option of tests/conftest.py, which pytest does not read when it is given this file alone.
    """
    seeds = range(50 if pytestconfig.getoption('full', True) else 8)
    for T, draw, batch in itertools.product([1, 6, BLOCK - 1, BLOCK, BLOCK + 1], [0.0, 0.8], [1, 4]):
        for s in seeds:
            torch.manual_seed(s)
            config = plain_model.GPTConfig(block_size=BLOCK, vocab_size=65, n_layer=2, n_head=2, n_embd=32)
            model = plain_model.GPT(config).eval()
            idx = torch.randint(65, (batch, T))
            outputs = []
            for use_cache in (False, True):
                torch.manual_seed(1000 + s)
                outputs.append(model.generate(idx, 2 * BLOCK, temperature=draw, top_k=20, use_cache=use_cache))
            assert torch.equal(*outputs), f"prompt of {T}, temperature {draw}, batch {batch}, seed {s}"
            assert outputs[0].shape == (batch, T + 2 * BLOCK)


def test_same_tokens_at_the_size_people_train():
    torch.manual_seed(0)
    config = plain_model.GPTConfig(block_size=128, vocab_size=65, n_layer=4, n_head=4, n_embd=128)
    model = plain_model.GPT(config).eval()
    idx = torch.randint(65, (1, 6))
    outputs = []
    for use_cache in (False, True):
        torch.manual_seed(1)
        outputs.append(model.generate(idx, 200, temperature=0.8, use_cache=use_cache))
    assert torch.equal(*outputs)


if __name__ == '__main__':
    configurator.run(main)
