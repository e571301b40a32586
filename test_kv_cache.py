"""
Does the cache give the same tokens, and how much sooner?

    python test_kv_cache.py     draws 200 tokens by the model without the cache, with it, and by the engine; compares
                                the tokens, and prints how many come in a second
    python test_kv_cache.py --decoder=eager     the same with another decoder
    python test_kv_cache.py --out_dir=out-mine  the same with the model of a run
    pytest test_kv_cache.py     the comparison of the model's two ways, over 50 seeds and five prompt lengths

By default the script takes the newest out*/ckpt.pt in the current folder that was trained on Shakespeare. Without one
it says so and compares a random model of the same shape. Exit code 1 if the tokens differ; KV_DEBUG=1 traces the cache.
"""
import itertools
import math
import os
import sys
from functools import partial

import configurator  # before torch: it says so in one line where torch is missing

# isort: split
import torch

import checkpoint as checkpoints
import debug_kv_model
import decode
import model as plain_model
import tokenizer as tokenizers
from benchmarks.harness import Case, take_turns
from decode.draw import DrawSettings, draw
from device import fastest_threads, pick_device, share_cores, synchronize
from engine import Engine, pool_for

prompt = 'First '  # the text before the draws
new_tokens = 200   # to draw in each way
block_size = 128   # a longer context is cropped to this, so that the tokens go past it
temperature = 0.8  # as sample.py
top_k = 200        # as sample.py
decoder = 'auto'   # of the engine: eager, cpu, gpu; auto is the fastest there is
seed = 1337        # of the draws, the same in each way
repeats = 5        # runs of each way, taking turns; the median counts
device = 'auto'    # cpu, cuda, mps
out_dir = ''       # of a run, whose model is compared
init_from = ''     # or another model: what sample.py takes

DEFAULT_PROMPT = prompt


def load_model(dev):
    """(model, tokenizer or None): that of a setting, the newest of Shakespeare, or a random model of its shape."""
    gpt = debug_kv_model if debug_kv_model.tracing() else plain_model
    if out_dir or init_from:
        return checkpoints.load_model(init_from or 'resume', out_dir, gpt, dev, torch.float32)[:2]
    for path in checkpoints.newest_first():
        checkpoint = checkpoints.load(path)
        if 'shakespeare' in str(checkpoint.get('config', {}).get('dataset')):
            print(f"model: {path}")
            model = checkpoints.build(checkpoint, gpt.GPT, gpt.GPTConfig).to(dev).eval()
            return model, checkpoints.tokenizer_of(checkpoint)
    print(f"!! no checkpoint trained on Shakespeare in {os.path.join(os.getcwd(), 'out*')}: this compares "
          "RANDOM WEIGHTS, not your model.\n!! Run it in the folder that has your out*/ckpt.pt, or train one: "
          "python train.py config/train_shakespeare_char.py", file=sys.stderr)
    print("model: RANDOM WEIGHTS, 4 layers of 128 channels")
    torch.manual_seed(seed)
    config = gpt.GPTConfig(block_size=128, vocab_size=65, n_layer=4, n_head=4, n_embd=128, bias=False)
    return gpt.GPT(config).to(dev).eval(), None


class ByModel:
    """`GPT.generate` with the engine's draw, with the cache or without."""

    def __init__(self, model, use_cache):
        self.model, self.use_cache = model, use_cache

    def generate(self, tokens, n):
        settings = [DrawSettings(self.model.config.vocab_size, seed, temperature=temperature, top_k=top_k)]
        idx = torch.tensor([tokens], device=self.model.lm_head.weight.device)

        def drawn(logits, number):
            self.logits = logits[0]  # of the last step
            return draw(logits, settings, [number])[:, None]
        return self.model.generate(idx, n, use_cache=self.use_cache, draw=drawn)[0].tolist()

    def logits_after(self, tokens, n_prompt):
        """The logits (vocab_size,) after tokens, which it has drawn after the first n_prompt of them."""
        self.generate(tokens[:n_prompt], len(tokens) - n_prompt + 1)
        return self.logits


class ByEngine:
    """The engine with the executor that `decoder` names."""

    def __init__(self, model):
        self.executor = decode.best(model, 1, name=decoder)
        self.engine = Engine(model, self.executor, pool_for(model.config, 1, len(prompt) + new_tokens))

    def generate(self, tokens, n):
        return self.engine.generate([tokens], n, seed=seed, temperature=temperature, top_k=top_k)[0]

    def logits_after(self, tokens, n_prompt):
        self.engine.add(tokens, 1, logprobs=True)
        return [drawn for _, drawn in self.engine.step() if drawn.tokens][0].logits[-1]


def ways_to_draw(model):
    """{name: way}. A trace (KV_DEBUG=1) shows the model's own steps alone."""
    ways = {'without cache': ByModel(model, False), 'with cache': ByModel(model, True)}
    if decoder != 'auto' or not debug_kv_model.tracing():
        ways['the engine'] = ByEngine(model)
        print(f"decoder: {ways['the engine'].executor.name}")
    return ways


def prompt_ids(model, tokenizer):
    if tokenizer is None:
        return torch.randint(model.config.vocab_size, (6,)).tolist()
    if not prompt:
        raise ValueError("the prompt is empty: give a text, such as --prompt=ROMEO")
    if isinstance(tokenizer, tokenizers.CharTokenizer) and prompt == DEFAULT_PROMPT:  # a model may lack its letters
        return [tokenizer.ids.get(c, 0) for c in prompt]
    return tokenizer.encode(prompt)


def compare(ids, n, ways, dev):
    """{way: (tokens, seconds)} of n new tokens after ids: medians of runs that take turns."""
    def drawn_by(way):
        tokens = way.generate(ids, n)
        synchronize(dev)
        return tokens
    cases = [Case(dict(way=name), partial(drawn_by, way)) for name, way in ways.items()]
    measured = take_turns(cases, repeats, f'{n} tokens')
    return {m.case.labels['way']: (m.results[-1], m.seconds) for m in measured}


def report_difference(tokenizer, n_prompt, ways, name, plain, cached):
    """Print where the tokens of the way `name` leave those without the cache, and how far apart the logits are."""
    where = next((i for i, (a, b) in enumerate(zip(plain, cached)) if a != b), min(len(plain), len(cached)))
    logits = [ways[way].logits_after(plain[:where], n_prompt) for way in ('without cache', name)]

    def show(tokens):
        tokens = tokens[where:where + 40]
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
    configurator.check_range(globals(), 1, math.inf, 'new_tokens', 'repeats', 'block_size')
    configurator.check_range(globals(), 0, math.inf, 'seed')
    dev = pick_device(device)
    model, tokenizer = load_model(dev)
    if model.config.block_size > block_size:
        model.crop_block_size(block_size)
    ways, ids = ways_to_draw(model), prompt_ids(model, tokenizer)
    if dev == 'cpu':
        share_cores()
    if dev == 'cpu' and 'OMP_NUM_THREADS' not in os.environ:  # beside other programs one thread may be faster
        fastest_threads(lambda: ways['without cache'].generate(ids, 8), limit=30)
    drawn, n_inside = compare(ids, new_tokens, ways, dev), model.config.block_size - len(ids)
    plain, differing = drawn['without cache'][0], []
    for way, (tokens, _) in drawn.items():
        if plain != tokens:
            differing.append(way)
            report_difference(tokenizer, len(ids), ways, way, plain, tokens)
    if differing:
        sys.exit(1)
    columns = {f'{new_tokens:,} tokens': (new_tokens, drawn)}
    if 0 < n_inside < new_tokens:
        columns = {f'{n_inside:,} within block_size': (n_inside, compare(ids, n_inside, ways, dev)),
                   f'{new_tokens:,}, past it': (new_tokens, drawn)}
    print_speeds(columns)
    print(f"✔ SUCCESS: outputs are identical ({len(plain)} tokens, in each of the {len(ways)} ways"
          f"{'' if tokenizer else ', RANDOM WEIGHTS'})")


BLOCK = 16


def test_same_tokens_with_and_without_the_cache(pytestconfig):
    """
    50 seeds of weights, prompt and draws for each case, on to twice block_size. `make test` takes 3 seeds: --full is an
    option of tests/conftest.py, which pytest does not read when it is given this file alone.
    """
    seeds = range(50 if pytestconfig.getoption('full', True) else 3)
    for T, temperature, batch in itertools.product([1, 6, BLOCK - 1, BLOCK, BLOCK + 1], [0.0, 0.8], [1, 4]):
        for s in seeds:
            torch.manual_seed(s)
            config = plain_model.GPTConfig(block_size=BLOCK, vocab_size=65, n_layer=2, n_head=2, n_embd=32)
            model = plain_model.GPT(config).eval()
            idx = torch.randint(65, (batch, T))
            outputs = []
            for use_cache in (False, True):
                torch.manual_seed(1000 + s)
                outputs.append(model.generate(idx, 2 * BLOCK, temperature=temperature, top_k=20, use_cache=use_cache))
            assert torch.equal(*outputs), f"prompt of {T}, temperature {temperature}, batch {batch}, seed {s}"
            assert outputs[0].shape == (batch, T + 2 * BLOCK)


if __name__ == '__main__':
    configurator.run(main)
