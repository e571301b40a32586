"""
Tokens a second by length, with the cache and without: rows, a table and a picture.

    python bench.py --mode=generate
    python bench.py --mode=generate --shape=S,M --json=out-bench/generate.json
    python bench.py --mode=generate --lengths=500 --batches=10

"no cache" is nanoGPT's way, one sample after another; all others draw their samples in one batch. "cache" is the
model's own step, "eager" that of decode/eager.py, "decoder" the fastest one here.
"""
import statistics
import time

import torch
from tqdm import tqdm

import decode
import generation
import kvcache
from benchmarks.shapes import PROMPT, config_of
from device import autocast, synchronize
from model import GPT
from training.plotting import plt, save


def fed_tokens(n, block_size, use_cache):
    """
    How many positions are computed to generate n tokens after a prompt of PROMPT tokens.

    Without a cache each token costs its whole context: about n * n / 2 until the context is full.
    """
    context = [min(PROMPT + i, block_size) for i in range(n)]
    if not use_cache:
        return sum(context)
    return context[0] + sum(1 if PROMPT + i <= block_size else block_size for i in range(1, n))


def run(names, bias, batches, lengths, repeats, kv_cache, kv_bits, device, dtype):
    """
    Time generation of shapes x batch sizes x lengths, print a table as it grows, and return the rows (dicts).

    kv_cache, kv_bits: a cache of `kvcache.make_cache` that is measured in one more column; 'tuple' and 0 add none.
    """
    rows, amp = [], autocast(device, dtype)
    n_tokens = len(names) * sum(batches) * sum(lengths) * (1 + repeats)  # generated in each way
    with tqdm(total=n_tokens, unit='tok', leave=False, disable=None) as bar:
        for name in names:
            model = GPT(config_of(name, bias)).to(device).eval()
            idx = torch.randint(model.config.vocab_size, (1, PROMPT), device=device)
            cache_bytes = print_shape(name, model, idx, amp)
            for B in batches:
                decoder = decode.best(model, B)
                ways = ways_to_generate(model, idx, B, decoder, kv_cache, kv_bits)
                tqdm.write(f"{B} sample{'s' * (B > 1)}; decoder: {decoder.name}\n{'tokens':>8}"
                           + ''.join(f'{way:>22}' for way in ways) + "   counted  tokens")
                for n in lengths:
                    block_size = model.config.block_size
                    counted = fed_tokens(n, block_size, False) / fed_tokens(n, block_size, True)
                    row = dict(shape=name, block_size=block_size, samples=B, new_tokens=n, counted=counted,
                               cache_bytes=cache_bytes, decoder=decoder.name,
                               **compare_ways(model, ways, B, n, repeats, device, amp, bar))
                    rows.append(row)
                    tqdm.write(line(row, ways))
    return rows


def print_shape(name, model, idx, amp):
    """Print the shape of a model and the size of its cache. Returns the bytes of the cache of one sequence."""
    c = model.config
    with torch.no_grad(), amp:
        cache = model(idx)[2]
    layer_bytes = 2 * cache[0].k_cache.nbytes
    tqdm.write(f"\n{name}: {c.n_layer} layers of {c.n_embd}, block {c.block_size}; the cache: "
               f"{layer_bytes / 2**20:.3g} MiB a layer, {c.n_layer * layer_bytes / 2**20:.3g} MiB in all "
               f"({cache[0].k_cache.dtype})")
    return c.n_layer * layer_bytes


def line(row, ways):
    """A row as text, with a column for each of the ways."""
    tok_per_s, speedup = row['tok_per_s'], row['speedup']
    figures = [f"{tok_per_s[way]:>9,.0f} tok/s{speedup[way]:>6.1f}x" if way in speedup else '' for way in ways]
    differing = 'DIFFERENT: ' + ', '.join(row['differing']) if row['differing'] else 'identical'
    return (f"{row['new_tokens']:>8}" + ''.join(f'{figure:>22}' for figure in figures)
            + f"{row['counted']:>9.2f}x  {differing}")


def ways_to_generate(model, idx, B, decoder, kv_cache, kv_bits):
    """{name: a function of n that draws B samples of n greedy tokens after the prompt idx (1, T): (B, T + n)}."""
    def in_one_batch(**how):
        return lambda n: generation.generate(model, idx, n, temperature=0, num_samples=B, use_cache=True, **how)

    ways = {'no cache': lambda n: torch.cat([model.generate(idx, n, temperature=0) for _ in range(B)]),
            'cache': in_one_batch(), 'eager': in_one_batch(decoder=decode.best(model, B, name='eager')),
            'decoder': in_one_batch(decoder=decoder),
            'shift': in_one_batch(decoder=decoder, when_full='shift')}
    if (kv_cache, kv_bits) != ('tuple', 0):
        cache = kvcache.make_cache(model, kv_cache, B, kv_bits, decoder)
        ways[f'{kv_cache}, {kv_bits} bits' if kv_bits else kv_cache] = in_one_batch(cache=cache)
    return ways


def compare_ways(model, ways, B, n, repeats, device, amp, bar):
    """
    Time n new tokens of B samples in each of the ways, in turns. Returns a dict for JSON.

    when_full='shift' is left out where the context does not fill up. Medians of `repeats` rounds after a warm-up;
    the bar moves on by B * n a round. differing: the ways whose tokens should equal those without a cache, and do not.
    """
    ways = {way: draw for way, draw in ways.items() if way != 'shift' or PROMPT + n > model.config.block_size}
    seconds, tokens = {way: [] for way in ways}, {}
    bar.set_description(f'{B} x {n}')
    for repeat in range(1 + repeats):
        for way, draw in ways.items():
            synchronize(device)
            t0 = time.perf_counter()
            with amp:
                tokens[way] = draw(n)
            synchronize(device)
            seconds[way] += [time.perf_counter() - t0] if repeat else []
        bar.update(B * n)
    medians = {way: statistics.median(runs) for way, runs in seconds.items()}
    exact = [way for way in ways if way != 'shift' and 'bits' not in way]
    return dict(tok_per_s={way: B * n / s for way, s in medians.items()},
                speedup={way: medians['no cache'] / s for way, s in medians.items()}, runs_s=seconds,
                differing=[way for way in exact if not torch.equal(tokens[way], tokens['no cache'])])


def plot(rows, title, path):
    """Speed-up against length, measured and by the number of positions computed. rows: those of `run`."""
    cases = list(dict.fromkeys((row['shape'], row['samples']) for row in rows))
    fig, axes = plt.subplots(1, len(cases), figsize=(5.5 * len(cases), 4.2), squeeze=False, layout='constrained')
    for ax, (name, B) in zip(axes[0], cases):
        mine = [row for row in rows if (row['shape'], row['samples']) == (name, B)]
        mine.sort(key=lambda row: row['new_tokens'])
        block = mine[0]['block_size']
        labels = {'cache': 'cache', 'eager': 'cache + eager decoder', 'decoder': 'cache + decoder',
                  'shift': 'cache + decoder, when_full=shift'}
        for way, label in labels.items():
            points = [(row['new_tokens'], row['speedup'][way]) for row in mine if way in row['speedup']]
            if points:
                ax.plot(*zip(*points), marker='o', label=label)
        if B == 1:
            every = range(1, mine[-1]['new_tokens'] + 1)
            counted = [fed_tokens(k, block, False) / fed_tokens(k, block, True) for k in every]
            ax.plot(every, counted, color='0.6', ls=':', label='positions computed')
        ax.axvline(block - PROMPT, color='0.6', lw=0.8)
        ax.set(xlabel=f'new tokens after a prompt of {PROMPT}; vertical line: the context is full', yscale='log',
               title=f"{name}, {B} sample{'s' * (B > 1)}")
        ax.set_yticks([1, 2, 5, 10, 20, 50, 100], ['1x', '2x', '5x', '10x', '20x', '50x', '100x'])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    axes[0, 0].set_ylabel('speed-up over no cache')
    fig.suptitle(title, fontsize=9)
    save(fig, path)
