"""
Does the cache give the same tokens, and how much sooner?

    python test_kv_cache.py     draws 200 tokens without the cache, with it, and with it and the fastest decoder;
                                compares the tokens, and prints how many come in a second
    python test_kv_cache.py --decoder=graph     the same with another decoder
    pytest test_kv_cache.py     the comparison of the model's two ways, over 50 seeds and five prompt lengths

The script takes the newest out*/ckpt.pt in the current folder that was trained on Shakespeare. Without one it says so
and compares a random model of the same shape. Exit code 1 if the tokens differ; KV_DEBUG=1 traces the cache.
"""
import itertools
import math
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
from device import fastest_threads, pick_device, share_cores, synchronize

prompt = 'First '  # six characters, all of which Shakespeare has
new_tokens = 200   # to draw in each way
window = 128       # a longer context window is cropped to this, so that the tokens go past it
temperature = 0.8  # as sample.py
top_k = 200        # as sample.py
decoder = 'auto'   # of the third way: eager, cpu, graph, compiled; auto is the fastest there is
seed = 1337        # of the draws, the same in each way
repeats = 5        # runs of each way, taking turns; the median counts
device = 'auto'    # cpu, cuda, mps

PAUSE = 0.05  # seconds before each run: threads of the one before may still spin


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
    print("model: RANDOM WEIGHTS, 4 layers of 128 channels")
    torch.manual_seed(seed)
    config = gpt.GPTConfig(block_size=128, vocab_size=65, n_layer=4, n_head=4, n_embd=128, bias=False)
    return gpt.GPT(config).to(dev).eval(), None


def ways_to_draw(model):
    """{name: arguments of `generate`}. A trace (KV_DEBUG=1) shows the model's own steps, and has no decoder."""
    ways = {'without cache': dict(use_cache=False), 'with cache': dict(use_cache=True)}
    if decoder != 'auto' or not debug_kv_model.tracing():
        step = decode.best(model, 1, name=decoder)
        print(f"decoder: {step.name}")
        ways['with cache and decoder'] = dict(use_cache=True, decoder=step)
    return ways


def prompt_ids(model, tokenizer):
    if tokenizer is None:
        return torch.randint(model.config.vocab_size, (6,)).tolist()
    if isinstance(tokenizer, tokenizers.CharTokenizer):  # a stand-in text may lack some of the letters
        return [tokenizer.ids.get(c, 0) for c in prompt]
    return tokenizer.encode(prompt)


def compare(model, idx, n, ways, dev):
    """{way: (tokens (T,), seconds)} of n new tokens behind idx (1, T): medians of runs that take turns."""
    seconds, tokens = {way: [] for way in ways}, {}
    for repeat in range(1 + repeats):  # the first warms up
        for way, how in ways.items():
            time.sleep(PAUSE)
            torch.manual_seed(seed)
            synchronize(dev)
            t0 = time.perf_counter()
            tokens[way] = model.generate(idx, n, temperature, top_k, **how)[0]
            synchronize(dev)
            seconds[way] += [time.perf_counter() - t0] if repeat else []
    return {way: (tokens[way], statistics.median(seconds[way])) for way in ways}


def logits_after(model, tokens, n_prompt, use_cache, decoder=None):
    """The logits (vocab_size,) after tokens (T,), computed as `generate` does in one of the ways."""
    seen = tokens[None] if model.config.max_positions == math.inf else tokens[None, -model.config.block_size:]
    n_first = n_prompt if use_cache and seen.size(1) == len(tokens) else seen.size(1)
    kv_cache = None
    with torch.inference_mode():
        for chunk in [seen[:, :n_first], *(seen[:, i:i + 1] for i in range(n_first, seen.size(1)))]:
            logits, kv_cache = decoder(chunk, kv_cache) if decoder else model.step(chunk, kv_cache, use_cache)
    return logits[0, -1]


def report_difference(model, tokenizer, n_prompt, ways, name, plain, cached):
    """Print where the tokens of the way `name` leave those without the cache, and how far apart the logits are."""
    where = int((plain != cached).nonzero()[0])
    logits = [logits_after(model, plain[:where], n_prompt, **ways[way]) for way in ('without cache', name)]

    def show(tokens):
        tokens = tokens[where:where + 40].tolist()
        return repr(tokenizer.decode(tokens)) if tokenizer else tokens
    print(f"✘ FAILURE: outputs differ from position {where} on")
    print(f"  {'without cache':<22}   {show(plain)}\n  {name:<22}   {show(cached)}")
    print(f"  the logits of the two there are up to {(logits[0] - logits[1]).abs().max().item():.3g} apart (less than "
          "about 1e-4 is rounding, which may decide a tie either way; more is a bug)")
    print("  KV_DEBUG=1 python test_kv_cache.py shows what the cache does at each step")


def print_speeds(columns):
    """A table with a row for each way. columns: {title: (new tokens, {way: (tokens, seconds)})}."""
    print(f"  {'tok/s, speedup':<22}" + ''.join(f'{title:>26}' for title in columns))
    for way in next(iter(columns.values()))[1]:
        row = ''
        for n, drawn in columns.values():
            seconds, uncached = drawn[way][1], drawn['without cache'][1]
            row += f"{n / seconds:>18,.0f}{uncached / seconds:>7.1f}x"
        print(f"  {way:<22}" + row)


def main(config):
    configurator.check_range(globals(), 1, math.inf, 'new_tokens', 'repeats', 'window')
    configurator.check_range(globals(), 0, math.inf, 'seed')
    sys.stdout.reconfigure(errors='replace')  # where a terminal cannot show a sign or a character
    dev = pick_device(device)
    model, tokenizer = load_model(dev)
    if model.config.block_size > window:
        model.crop_block_size(window)
    ways, idx = ways_to_draw(model), torch.tensor([prompt_ids(model, tokenizer)], device=dev)
    if dev == 'cpu':
        share_cores()
    if dev == 'cpu' and 'OMP_NUM_THREADS' not in os.environ:  # beside other programs one thread may be faster
        fastest_threads(lambda: model.generate(idx, 8), limit=30)
    drawn, n_inside = compare(model, idx, new_tokens, ways, dev), model.config.block_size - idx.size(1)
    plain, differing = drawn['without cache'][0], []
    for way, (tokens, _) in drawn.items():
        if not torch.equal(plain, tokens):
            differing.append(way)
            report_difference(model, tokenizer, idx.size(1), ways, way, plain, tokens)
    if differing:
        sys.exit(1)
    columns = {f'{new_tokens:,} tokens': (new_tokens, drawn)}
    if 0 < n_inside < new_tokens:
        columns = {f'{n_inside:,} within block_size': (n_inside, compare(model, idx, n_inside, ways, dev)),
                   f'{new_tokens:,}, past it': (new_tokens, drawn)}
    print_speeds(columns)
    print(f"✔ SUCCESS: outputs are identical ({len(plain)} tokens, in each of the {len(ways)} ways"
          f"{'' if tokenizer else ', RANDOM WEIGHTS'})")


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
