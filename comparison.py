"""
Our ways to generate and other engines' (peers.py), with the same weights in all of them, taking turns on one machine.

Every figure is also given as a fraction of the floor: the least time a step could take if it only read each weight once,
in the type it is stored in, or only did its multiplications in float32, whichever takes longer. Both rates are measured
here, in between. Reading is measured on as many bytes as there are weights, so that a model that fits the processor's
cache is held against that cache and not against memory. Keys and values are left out of it, as is all there is between
two matrices; and 8-bit engines multiply in 8 bits, so that large batches take them below this floor.
"""
import math
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby

import torch
from tqdm import tqdm

from peers import PEERS, Peer, torch_threads
from whole_file import replacing

BYTES = {'float32': 4, 'bfloat16': 2, 'int8': 1}
NEAR_TIE = 1e-4  # logits less than this apart are decided by rounding, in float32


class NoCache(Peer):
    """The plain way: a full pass for every token."""
    name = 'no cache'

    def __init__(self, model, weights='float32', threads=1):
        super().__init__(model, weights, threads)
        self.model = model

    def generate(self, prompts, n_new, **how):
        prompts = self.checked(prompts, n_new)
        with torch_threads(self.threads):
            return self.model.generate(prompts, n_new, temperature=0, **how)[:, prompts.size(1):]


class Cache(NoCache):
    """The cache as model.py has it, PyTorch running every step."""
    name = 'cache'

    def generate(self, prompts, n_new):
        return super().generate(prompts, n_new, use_cache=True)


class Decoder(NoCache):
    """The cache, and the fastest decoder we have for the batch."""
    name = 'cache + decoder'
    packages = {'decode.cpu': 'numba'}
    ways = {weights: [{}] for weights in BYTES}

    def __init__(self, model, weights='float32', threads=1):
        super().__init__(model, weights, threads)
        self.weights, self.decoders = weights, {}

    def generate(self, prompts, n_new):
        B = len(prompts)
        if B not in self.decoders:
            import decode
            self.decoders[B] = decode.best(self.model, B, self.weights, self.threads)
        return super().generate(prompts, n_new, use_cache=True, decoder=self.decoders[B])


OURS = NoCache, Cache, Decoder


def race(name, model, prompts, n_new, repeats, max_seconds):
    """
    All engines that are installed, on each batch of prompts in the list of (B, T) tensors. Returns rows for `table` and JSON.

    They take turns, `repeats` times, and medians count. Building and converting are not timed. n_new tokens are generated,
    or as many as take about max_seconds: the slow ones do less, and are judged by what they did. (Without a cache that is
    lenient: the first tokens are the cheapest.)
    """
    entries = [(peer, weights) for peer in OURS + PEERS if not peer.missing() for weights in peer.ways]
    fields = choose(name, entries, model, prompts, n_new, min(0.15, max_seconds))
    n_weights = model.get_num_params()  # positions aside, of which a token reads one row
    rows = []
    for idx, field in zip(prompts, fields):
        B, runs, tokens = len(idx), {key: [] for key in field}, {}
        reads, multiplies = {weights: [] for weights in BYTES}, []
        new = {key: trial(engine, idx, n_new, max_seconds / 2)[0] for key, (engine, _) in field.items()}
        for _ in tqdm(range(repeats), desc=f'{name}: batch {B}', leave=False, disable=None):
            multiplies.append(multiply_rate())
            for weights, n_bytes in BYTES.items():
                reads[weights].append(read_rate(n_weights * n_bytes))
            for key, (engine, _) in field.items():
                # the last one's threads may still be waiting busily for more work, and its weights are where ours should be
                time.sleep(0.05)
                engine.generate(idx, min(8, new[key]))
                t0 = time.perf_counter()
                tokens[key] = engine.generate(idx, new[key])
                runs[key].append(time.perf_counter() - t0)
        multiply = statistics.median(multiplies)
        for key, (_, how) in field.items():
            peer, weights = key
            read, seconds = statistics.median(reads[weights]), statistics.median(runs[key])
            floor = max(n_weights * BYTES[weights] / read, 2 * n_weights * B / multiply)
            rows.append(dict(
                shape=name, batch=B, engine=peer.name, weights=weights, how=how, new_tokens=new[key], tok_per_s=B * new[key] / seconds,
                of_floor=floor * new[key] / seconds, floor_step_s=floor, read_bytes_per_s=read, flops=multiply, runs_s=runs[key],
                should_be_ours=peer.same_tokens and weights == 'float32', **compare(model, idx, tokens[key])))
    return rows


def choose(name, entries, model, prompts, n_new, enough):
    """
    The fastest way to run each entry (peer, weights) on each batch of prompts: {entry: (engine, how)} for each batch.

    One thread and all of them are tried, and each of the peer's own ways; they take turns, and medians count. The others are
    dropped before the next entry is built: a large model is some hundred megabytes.
    """
    best = [{} for _ in prompts]
    for peer, weights in tqdm(entries, desc=f'{name}: building, trying', leave=False, disable=None):
        engines = {', '.join([f"{threads} thread{'s' * (threads > 1)}"] + [f'{k} {v}' for k, v in way.items()]):
                   peer(model, weights, threads=threads, **way)
                   for threads in sorted({1, torch.get_num_threads()}) for way in peer.ways[weights]}
        for idx, found in zip(prompts, best):
            n = min(trial(engine, idx, n_new, enough)[0] for engine in engines.values())  # the same tokens for all
            runs = {how: [] for how in engines}
            for _ in range(5):
                for how, engine in engines.items():
                    engine.generate(idx, min(8, n))
                    t0 = time.perf_counter()
                    engine.generate(idx, n)
                    runs[how].append(time.perf_counter() - t0)
            how = min(runs, key=lambda how: statistics.median(runs[how]))
            found[peer, weights] = engines[how], how
    return best


def trial(engine, prompts, n_new, enough):
    """As many tokens, doubled from 4 up to n_new, as take `enough` seconds, and the seconds they take at best."""
    def seconds_for(n):
        t0 = time.perf_counter()
        engine.generate(prompts, n)
        return time.perf_counter() - t0

    seconds_for(min(2, n_new))
    n = min(4, n_new)
    while True:
        seconds = seconds_for(n)
        if seconds >= enough:  # once more: somebody else's work may have stood in the way
            seconds = min(seconds, seconds_for(n))
        if seconds >= enough:
            return n, seconds
        if n == n_new:
            return n, min(seconds, seconds_for(n), seconds_for(n))
        n = min(2 * n, n_new)


def compare(model, prompts, tokens):
    """
    Are the (B, n) tokens that follow prompts (B, T) those of the model, computed without a cache?

    first_difference: the first step, from 0, at which one is not, or None. gap: how far it is below the best logit there.
    One pass over a whole row has the logits of all its steps, so this takes a moment where generating them takes minutes.
    """
    T, first, gap = prompts.size(1), None, None
    for row in torch.cat([prompts, tokens], dim=1):
        with torch.inference_mode():
            logits = model.lm_head(model.hidden_states(row[None, :-1])[0][0, T - 1:])  # (n, vocab_size)
        steps = (logits.argmax(dim=-1) != row[T:]).nonzero()
        if len(steps) and (first is None or steps[0].item() < first):
            first = steps[0].item()
            gap = (logits[first].max() - logits[first, row[T + first]]).item()
    return dict(compared=tokens.size(1), first_difference=first, gap=gap)


def read_rate(n_bytes):
    """Bytes a second that all threads together sum up, reading n_bytes again and again (at least 256 MB)."""
    threads = torch.get_num_threads()
    n, again = math.ceil(n_bytes / 4 / threads), math.ceil(2**28 / n_bytes)
    numbers = torch.ones(threads, 1, n).expand(threads, again, n)  # repeated without a copy; each thread reads its own part
    numbers.sum((1, 2))
    t0 = time.perf_counter()
    numbers.sum((1, 2))
    return 4 * n * threads * again / (time.perf_counter() - t0)


def multiply_rate(n=1024):
    """Floating point operations a second of a float32 matrix product."""
    a = torch.ones(n, n)
    a @ a
    t0 = time.perf_counter()
    for _ in range(4):
        a @ a
    return 4 * 2 * n**3 / (time.perf_counter() - t0)


def table(rows):
    """Rows as text, batch by batch."""
    lines = []
    for (shape, batch), mine in groupby(rows, key=lambda row: (row['shape'], row['batch'])):
        mine = list(mine)
        lines += [f"\n{shape}, batch {batch}: reading {mine[0]['read_bytes_per_s'] / 1e9:.0f} GB/s, multiplying {mine[0]['flops'] / 1e9:.0f} GFLOP/s",
                  f"{'engine':<22}{'weights':<10}{'tok/s':>9}{'of floor':>10}{'new':>5}  {'how':<22}tokens"]
        lines += [f"{row['engine']:<22}{row['weights']:<10}{row['tok_per_s']:>9,.0f}{row['of_floor']:>10.0%}{row['new_tokens']:>5}  "
                  f"{row['how']:<22}{verdict(row)}" for row in mine]
    return '\n'.join(lines)


def verdict(row):
    if row['first_difference'] is None:
        return f"the same {row['compared']}"
    if not row['should_be_ours']:
        return f"the same {row['first_difference']}, then others"
    where = f"at {row['first_difference']}, {row['gap']:.1e} below the best logit"
    return f"near tie {where}" if abs(row['gap']) < NEAR_TIE else f"DIFFERENT {where}"


def missing():
    """{engine: what to do about it}, of those that cannot be used here."""
    return {peer.name: peer.missing() for peer in OURS + PEERS if peer.missing()}


def versions():
    """{package: version} of everything that was compared."""
    found = {'python': sys.version.split()[0]}
    for package in ['torch', 'numpy', *(package for peer in OURS + PEERS for package in peer.packages.values())]:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    return found


def draw(rows, path, title):
    """Bars of tokens a second: a row of pictures for each shape, a column for each batch."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    shapes, batches = (list(dict.fromkeys(row[key] for row in rows)) for key in ('shape', 'batch'))
    fig, axes = plt.subplots(len(shapes), len(batches), figsize=(5 * len(batches), 3.2 * len(shapes) + 0.5), squeeze=False, layout='constrained')
    ours = {peer.name for peer in OURS}
    for i, shape in enumerate(shapes):
        for j, batch in enumerate(batches):
            ax, mine = axes[i, j], [row for row in rows if (row['shape'], row['batch']) == (shape, batch)]
            y = range(len(mine), 0, -1)
            bars = ax.barh(y, [row['tok_per_s'] for row in mine], color=['C0' if row['engine'] in ours else '0.7' for row in mine])
            ax.bar_label(bars, [f"{row['tok_per_s']:,.0f}" for row in mine], padding=2, fontsize=7)
            ax.set_yticks(y, [f"{row['engine']}, {row['weights']}" for row in mine], fontsize=7)
            ax.set_title(f'{shape}, batch {batch}', fontsize=9)
            ax.tick_params(axis='x', labelsize=7)
            ax.margins(x=0.15)
    fig.suptitle(f'greedy tokens/s, {title}', fontsize=9)
    with replacing(path) as f:
        fig.savefig(f, format='png', dpi=110)
    plt.close(fig)
