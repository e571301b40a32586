"""
A text without end through a cache that does not grow: loss, time and memory of each token, from the first to the last.

    python bench.py --mode=endless

All of the validation text goes through the models of benchmarks/positions.py as one stream, one token a step: through
the rolling cache of the models with a window, and for comparison through the learned positions' full pass over the last
block_size tokens, each by the model's own step and by the best decoder. They take turns, 100 tokens each. Then tokens
at two distant positions of a stream are timed in turns, and a training iteration of each model.
"""
import statistics
import sys
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from tqdm import tqdm

import decode
from benchmarks import positions, train_step
from benchmarks.shapes import cache_bytes, config_of
from model import GPT
from training.plotting import plt, save

WINDOWS = 'rope, window 32', 'rope, window 32, 4 sinks'
DECODER, CROP = ', decoder', ', crop'
TURN = 100   # tokens of one way before the next one takes over
SPAN = 1000  # tokens that are reported as one figure
PLACES = 100, 100_000  # where in a stream single tokens are timed


def rolling(step, model):
    """A function of the tokens so far, (1, t): feeds the last one to a cache, and returns the next one's logits."""
    kv_cache = model.empty_cache(1)

    def logits_of(tokens):
        nonlocal kv_cache
        logits, kv_cache = step(tokens[:, -1:], kv_cache)
        return logits[:, -1]
    return logits_of


def cropping(step, model):
    """The same function by a full pass over the last block_size tokens, which when_full='crop' needs for each token."""
    return lambda tokens: step(tokens[:, -model.config.block_size:], None)[0][:, -1]


def ways_through(models):
    """
    {label: a function of the tokens so far, (1, t), that returns the logits (1, vocab_size) of the next one}, of
    models, {name: model}: with the model's own step and with the best decoder, through the rolling cache where it has a
    window, else cropping.
    """
    ways = {}
    for name, model in models.items():
        for of, step in (('', model.step), (DECODER, decode.best(model, 1, threads=torch.get_num_threads()))):
            if model.config.window:
                ways[name + of] = rolling(step, model)
            else:
                ways[name + CROP + of] = cropping(step, model)
    return ways


@torch.inference_mode()
def stream(ways, text):
    """
    Read text (N,) token by token in each way of `ways_through`. Returns {label: (losses, seconds)}, (N - 1,) each, and
    the resident memory of this process in bytes every SPAN tokens.
    """
    n = len(text) - 1
    measured = {label: (torch.full((n,), -1.0), torch.full((n,), -1.0, dtype=torch.float64)) for label in ways}
    resident = []
    for start in tqdm(range(0, n, TURN), desc='one stream', disable=None):
        if start % SPAN == 0:
            resident.append(resident_bytes())
        for label, logits_of in ways.items():
            losses, seconds = measured[label]
            for t in range(start, min(start + TURN, n)):
                tokens = text[None, :t + 1]
                begin = time.perf_counter()
                logits = logits_of(tokens)
                seconds[t] = time.perf_counter() - begin
                losses[t] = F.cross_entropy(logits, text[t + 1:t + 2])
    return measured, resident


def resident_bytes():
    """The memory that this process holds at the moment, 0 where the system does not say."""
    if not sys.platform.startswith('linux'):
        return 0
    with open('/proc/self/status') as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith('VmRSS'))


@torch.inference_mode()
def time_at(step, model, text, places, rounds):
    """
    Seconds of the tokens at distant places of a stream, {place: list}. In each round every place has its turn with as
    many tokens as the buffer of the cache takes until its rows have moved twice.
    """
    caches = {}
    for place in places:
        caches[place] = model(text[None, :place], kv_cache=model.empty_cache(1))[2]
    seconds = {place: [] for place in places}
    for round_ in range(rounds + 1):
        for place in places:
            kv_cache = [layer.clone() for layer in caches[place]]
            for t in range(place, place + 2 * (model.config.window + 1)):
                token = text[None, t:t + 1]
                begin = time.perf_counter()
                _, kv_cache = step(token, kv_cache)
                if round_:  # the first round is the warm-up
                    seconds[place].append(time.perf_counter() - begin)
    return seconds


@torch.inference_mode()
def time_sizes(repeats):
    """
    Microseconds of a token at a full context, rows (dicts), of S and M with random weights, rotary positions and a
    window of half of block_size: through the rolling cache, and by the full pass that cropping needs, both by the best
    decoder. They take turns.
    """
    rows = []
    for name in ('S', 'M'):
        c = config_of(name, False)
        model = GPT(replace(c, position='rope', window=c.block_size // 2)).eval()
        tokens, seconds = torch.randint(c.vocab_size, (1, 2 * c.block_size)), {'roll': [], 'crop': []}
        decoder, kv_cache = decode.best(model, 1, threads=torch.get_num_threads()), model(tokens)[2]
        for _ in tqdm(range(10 * repeats + 2), desc=f'{name}: rolling and cropping', leave=False, disable=None):
            for how in seconds:
                begin = time.perf_counter()
                if how == 'roll':
                    _, kv_cache = decoder(tokens[:, -1:], kv_cache)
                else:
                    decoder(tokens[:, -c.block_size:], None)
                seconds[how].append(time.perf_counter() - begin)
        us = {how: 1e6 * statistics.median(times[2:]) for how, times in seconds.items()}
        rows.append(dict(shape=name, block_size=c.block_size, **us))
        print(f"{name}, block_size {c.block_size}: {us['roll']:,.0f} us a token through the rolling cache, "
              f"{us['crop']:,.0f} cropping", flush=True)
    return rows


def time_training(seed, repeats):
    """{name: milliseconds of a training iteration}, medians of 10 * repeats; the models take turns."""
    seconds = {name: [] for name in positions.MODELS}
    steps = {}
    for name in positions.MODELS:
        model = GPT(positions.load(name, seed).config)
        steps[name] = train_step.training_step(model, positions.DATA, 12, False, seed, 'cpu', 'float32')
    for k in tqdm(range(10 * repeats + 2), desc='training iterations', disable=None):
        for name, step in steps.items():
            begin = time.perf_counter()
            step(k)
            if k > 1:
                seconds[name].append(time.perf_counter() - begin)
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}


def spans(values):
    """The medians of SPAN values each, as a list; the rest at the end is left out."""
    return values[:len(values) // SPAN * SPAN].view(-1, SPAN).median(dim=1).values.tolist()


def span_means(values):
    """The means of SPAN values each, as a list; the rest at the end is left out."""
    return values[:len(values) // SPAN * SPAN].view(-1, SPAN).double().mean(dim=1).tolist()


def run(seed, iterations, repeats):
    """
    Train what is not trained, measure, print, and return a dict to be written as JSON.

    span: tokens of a figure. stream: a dict a way: nats (the mean of the tokens that have a full context), by_span (the
    means of `span` tokens), us (the median of all tokens in microseconds), us_by_span, cache_bytes (0: none).
    resident_bytes: of the process, every `span` tokens. places: a dict a way and place: us, the median. sizes: see
    `time_sizes`. iteration_ms: milliseconds of a training iteration of each model.
    """
    text = positions.validation_text(PLACES[-1] + SPAN)
    for name in positions.MODELS:
        positions.train(name, seed, iterations)
    models = {name: positions.load(name, seed) for name in ('learned', *WINDOWS)}
    ways = ways_through(models)
    print(f"{len(text) - 1:,} tokens through {len(ways)} ways, one token a step", flush=True)
    measured, resident = stream(ways, text)
    full = max(model.config.block_size for model in models.values()) - 1  # contexts before are shorter, for all alike
    rows = []
    for label, (losses, seconds) in measured.items():
        c = models[label.removesuffix(DECODER).removesuffix(CROP)].config
        rows.append(dict(way=label, nats=losses[full:].double().mean().item(), by_span=span_means(losses),
                         us=1e6 * seconds[full:].median().item(), us_by_span=[1e6 * s for s in spans(seconds)],
                         cache_bytes=cache_bytes(c, 1) if c.window else 0))
        print(f"{label}: {rows[-1]['nats']:.4f} nats, {rows[-1]['us']:,.0f} us a token, cache "
              f"{rows[-1]['cache_bytes']:,} bytes", flush=True)
    places = []
    for name in WINDOWS:
        decoder = decode.best(models[name], 1, threads=torch.get_num_threads())
        for way, step in (('', models[name].step), (DECODER, decoder)):
            seconds = time_at(step, models[name], text, PLACES, 10 * repeats)
            us = {place: 1e6 * statistics.median(times) for place, times in seconds.items()}
            places += [dict(way=name + way, place=place, us=value) for place, value in us.items()]
            first, last = us.values()
            print(f"{name + way}: {first:,.1f} us at position {PLACES[0]:,}, {last:,.1f} us at position {PLACES[1]:,}, "
                  f"{last / first - 1:+.1%}", flush=True)
    iteration_ms = time_training(seed, repeats)
    for name, ms in iteration_ms.items():
        print(f"{name}: {ms:.1f} ms a training iteration")
    return dict(span=SPAN, stream=rows, resident_bytes=resident, places=places, sizes=time_sizes(repeats),
                iteration_ms=iteration_ms)


def plot(figures, path):
    """Loss, time and memory along the stream. figures: what `run` returned."""
    fig, axes = plt.subplots(3, 1, figsize=(9, 10), layout='constrained', sharex=True)
    for i, row in enumerate(figures['stream']):
        style = dict(color=f'C{i}', lw=1.3)
        x = [figures['span'] * (k + 0.5) for k in range(len(row['by_span']))]
        if not row['way'].endswith(DECODER):  # the same numbers as without it
            axes[0].plot(x, row['by_span'], label=f"{row['way']}: {row['nats']:.4f} nats", **style)
        axes[1].plot(x, row['us_by_span'], label=f"{row['way']}: {row['us']:,.0f} us", **style)
    held = [n / 1e6 for n in figures['resident_bytes']]
    axes[2].plot([figures['span'] * k for k in range(len(held))], held, color='0.3', label='the whole process')
    for i, row in enumerate(figures['stream']):
        if row['cache_bytes'] and not row['way'].endswith(DECODER):
            axes[2].axhline(row['cache_bytes'] / 1e6, color=f'C{i}', ls='--',
                            label=f"cache of {row['way']}: {row['cache_bytes'] / 1e6:.3f} MB")
    axes[0].set(ylabel=f"nats a character,\nmeans of {figures['span']:,}")
    axes[1].set(yscale='log', ylabel=f"microseconds a token,\nmedians of {figures['span']:,}")
    axes[1].set_yticks([100, 200, 500, 1000, 2000, 5000, 10000])
    axes[1].yaxis.set_major_formatter('{x:,.0f}')
    axes[1].yaxis.set_minor_formatter('')
    axes[2].set(yscale='log', ylabel='memory, MB', xlabel='characters of one stream')
    for ax in axes:
        ax.xaxis.set_major_formatter('{x:,.0f}')
        ax.grid(alpha=0.3)
        ax.legend(fontsize=9, loc='lower left', bbox_to_anchor=(0.0, 1.0), ncols=2, frameon=False)
    save(fig, path)
