"""
A decode step through each cache, over the same kernel's step on its own tuples.

    python bench.py --mode=caches --only=steps

"tuples" are the decoder called as such, "generation" is what generation puts around it, "paged, one call" has all steps
in one call, as the server runs them (`PagedCache.decode_steps`). All ways are fed the same tokens. bits: are the logits
of the last step those of the tuples, bit by bit?
"""
import statistics
import time
from contextlib import nullcontext

import torch

import decode
import kvcache
from benchmarks import rounds
from benchmarks.shapes import config_of
from kvcache.contiguous import ContiguousCache
from model import GPT

MINUTES = 6
NAMES, BATCHES = ('S', 'M', 'L'), (8, 32)
CONTEXTS = {'S': 64, 'M': 128, 'L': 128}  # tokens before the first step that is timed
N_STEPS = {'S': 48, 'M': 24, 'L': 8}      # in a round
N_WARM = 3                                # steps before them
LEAST = 0.1                               # seconds of timed steps in a round, at least
GOALS = {'paged': 1.10, 'paged, one call': 1.10, 'unified': 1.20, 'streams': 1.20}
KERNEL, PYTORCH = 'kernel', 'PyTorch'


def run(names, batches, contexts, bias, repeats):
    print(f"\na decode step\n{'shape':<6}{'batch':>6}{'context':>8}  {'cache':<17}{'on':<9}{'ms':>9}"
          f"{'over tuples':>14}")
    return race_all(race, line, {name: contexts or [CONTEXTS[name]] for name in names or NAMES}, batches or BATCHES,
                    bias, repeats)


def race_all(race, line, contexts, batches, bias, repeats):
    """Call race for each shape of contexts {name: numbers of tokens} and each batch. Prints and returns the rows."""
    rows = []
    for name, tokens in contexts.items():
        model = GPT(config_of(name, bias)).eval()
        for B in batches:
            for T in tokens:
                mine = race(name, model, B, T, repeats)
                print('\n'.join(map(line, mine)), flush=True)
                rows += mine
    return rows


def line(row):
    bits = 'the same bits' if row['same_bits'] else f"differs by {row['difference']:.1e}"
    ratio = rounds.line(row['over_tuples'], row['goal'], at_most=True)
    return (f"{row['shape']:<6}{row['batch']:>6}{row['context']:>8}  {row['cache']:<17}{row['on']:<9}"
            f"{1e3 * row['step_s']:>9.3f}{ratio}  {bits}")


@torch.inference_mode()
def race(name, model, B, T, repeats):
    """Time a step of B sequences after T tokens in every cache. Returns a dict a cache, for JSON."""
    n = min(N_STEPS[name], model.config.block_size - T - N_WARM)
    if n < 1:
        raise ValueError(f"{name} has a block_size of {model.config.block_size}, and a context of {T} leaves no room "
                         f"for {N_WARM + 1} steps: choose a smaller one in lengths")
    texts = random_tokens(model, B, T + N_WARM + n + 1)
    decoder = decode.best(model, B)
    kv_cache, on = decoder(texts[:, :T], None)[1], {'tuples': KERNEL, 'generation': KERNEL}
    steps = {'tuples': steps_of_tuples(decoder, lambda: kv_cache, texts, T)}
    steps['generation'] = steps_of_cache(ContiguousCache.for_decoder(model, B, decoder), texts, T)
    for kind in ('paged', 'unified', 'streams', 'tuple'):
        cache = kvcache.make_cache(model, kind, B, decoder=decoder)
        label = 'contiguous' if kind == 'tuple' else kind
        steps[label], on[label] = steps_of_cache(cache, texts, T), where(cache)
    ways = {way: timed(step, n, decoder if on[way] == KERNEL else None) for way, step in steps.items()}
    logits = {way: [step(i) for i in range(N_WARM + n)][-1] for way, step in steps.items()}
    cache = kvcache.make_cache(model, 'paged', B, decoder=decoder)
    if cache.decoder:
        from benchmarks.caches.one_call import way_of  # here, because it needs numba
        way = 'paged, one call'
        on[way], (logits[way], ways[way]) = KERNEL, way_of(cache, steps_of_cache(cache, texts, T), texts, T)
    seconds = rounds.take_turns(ways, repeats, f'{name}: {B} sequences')
    return [dict(shape=name, batch=B, context=T, steps=n, cache=way, on=on[way], step_s=statistics.median(runs),
                 over_tuples=rounds.ratio(seconds, way, 'tuples'), goal=GOALS.get(way), runs_s=runs,
                 same_bits=torch.equal(logits[way], logits['tuples']),
                 difference=(logits[way] - logits['tuples']).abs().max().item()) for way, runs in seconds.items()]


def random_tokens(model, *shape, seed=0):
    return torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def where(cache):
    """What runs the steps of a cache: the compiled step of a decoder, or the model in PyTorch."""
    return KERNEL if cache.decoder else PYTORCH


def steps_of_tuples(decoder, begin, texts, T):
    """
    A function of i = 0, 1, ... that feeds token T + i of each of texts (B, N) to a decoder. begin: a function that
    returns the tuples with the T tokens before them.
    """
    kv_cache = None

    def step(i):
        nonlocal kv_cache
        logits, kv_cache = decoder(texts[:, T + i:T + i + 1], kv_cache if i else begin())
        return logits[:, 0]
    return step


def steps_of_cache(cache, texts, T):
    """The same for a cache of sequences. Their first T tokens are fed one sequence after another."""
    handles = [cache.new() for _ in texts]
    for handle, text in zip(handles, texts):
        cache.step([handle], [0], text[None, :T])

    def step(i):
        return cache.step(handles, [T + i] * len(handles), texts[:, T + i:T + i + 1])
    return step


def timed(step, n, decoder=None):
    """
    A way of `rounds.take_turns`: seconds of a step, the mean of n after N_WARM others, from the beginning, and again
    until they have taken LEAST seconds.
    """
    def seconds(round_):
        total, times = 0, 0
        with torch.inference_mode(), getattr(decoder, 'exclusive_use', nullcontext)():
            while total < LEAST:
                for i in range(N_WARM):
                    step(i)
                began = time.perf_counter()
                for i in range(N_WARM, N_WARM + n):
                    step(i)
                total += time.perf_counter() - began
                times += n
        return total / times
    return seconds
