"""
A text without end through a cache that does not grow: loss, time and memory of each token, from the first to the last.

    python bench.py --mode=endless

All of the validation text goes through the models of positions.py as one stream, one token a step: through
the rolling cache of the models with a window, and for comparison through the learned positions' full pass over the last
block_size tokens, each by the model's own step and by the best decoder. They take turns, 100 tokens each. Then tokens
at two distant positions of a stream are timed in turns, and a training iteration of each model.
"""
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from tqdm import tqdm

import decode
from benchmarks import train_step
from benchmarks.experiments import positions
from benchmarks.harness import Case, Panel, process_bytes, table, take_turns
from benchmarks.shapes import cache_bytes, config_of
from model import GPT

EXPECTED, PICTURE = '15 minutes, after the training of positions mode', 'endless.png'
CPU_ONLY = "the models are trained and measured"
THREADS = torch.get_num_threads()  # of the decoders
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
        for of, step in (('', model.step), (DECODER, decode.best(model, 1, threads=THREADS))):
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
            resident.append(process_bytes() or 0)
        for label, logits_of in ways.items():
            losses, seconds = measured[label]
            for t in range(start, min(start + TURN, n)):
                tokens = text[None, :t + 1]
                begin = time.perf_counter()
                logits = logits_of(tokens)
                seconds[t] = time.perf_counter() - begin
                losses[t] = F.cross_entropy(logits, text[t + 1:t + 2])
    return measured, resident


@torch.inference_mode()
def time_at(step, model, text, places, repeats):
    """
    A `Measured` of a token at each of several distant places of a stream. A run has as many tokens as the buffer of the
    cache takes until its rows have been written twice.
    """
    def case(place):
        kv_cache = model(text[None, :place], kv_cache=model.empty_cache(1))[2]
        end = place + 2 * (model.config.window + 1)

        def steps(kv_cache):
            for t in range(place, end):
                _, kv_cache = step(text[None, t:t + 1], kv_cache)
        return Case(dict(place=place), steps, lambda _: [layer.clone() for layer in kv_cache], per=end - place)
    return take_turns([case(place) for place in places], repeats, 'distant places')


@torch.inference_mode()
def time_sizes(repeats):
    """
    Microseconds of a token at a full context, rows (dicts), of S and M with random weights, rotary positions and a
    window of half of block_size: through the rolling cache, and by the full pass that cropping needs, both by the best
    decoder.
    """
    rows = []
    for name in ('S', 'M'):
        c = config_of(name, False)
        model = GPT(replace(c, position='rope', window=c.block_size // 2)).eval()
        tokens, decoder = torch.randint(c.vocab_size, (1, 2 * c.block_size)), decode.best(model, 1, threads=THREADS)
        kv_cache = model(tokens)[2]
        cases = [Case({}, lambda: decoder(tokens[:, -1:], kv_cache)),
                 Case({}, lambda: decoder(tokens[:, -c.block_size:], None))]
        roll, crop = take_turns(cases, 10 * repeats, f'{name}: rolling and cropping')
        rows.append(dict(shape=name, block_size=c.block_size, roll=1e6 * roll.seconds, crop=1e6 * crop.seconds))
    return rows


def time_training(seed, repeats):
    """{name: milliseconds of a training iteration}; the models take turns."""
    steps = [train_step.training_step(GPT(positions.load(name, seed).config), positions.DATA, 12, False, seed, 'cpu',
                                      'float32') for name in positions.MODELS]
    measured = take_turns([Case({}, step, lambda n: n) for step in steps], 10 * repeats, 'training iterations')
    return {name: 1e3 * m.seconds for name, m in zip(positions.MODELS, measured)}


def spans(values, of=torch.median):
    """The medians or means of SPAN values each, as a list; the rest at the end is left out."""
    parts = values[:len(values) // SPAN * SPAN].view(-1, SPAN).double()
    return (parts.mean(dim=1) if of is torch.mean else parts.median(dim=1).values).tolist()


def run(asked):
    """
    Train the models that are missing, measure all, and print the figures. Returns them as a dict for JSON.

    span: tokens of a figure. stream: a dict a way: nats (the mean of the tokens that have a full context), by_span (the
    means of `span` tokens), us (the median of all tokens in microseconds), us_by_span, cache_bytes (0: none).
    resident_bytes: of the process, every `span` tokens. places: a dict a way and place: us, the median. sizes: see
    `time_sizes`. iteration_ms: milliseconds of a training iteration of each model.
    """
    text, rows, places = positions.validation_text(PLACES[-1] + SPAN), [], []
    for name in positions.MODELS:
        positions.train(name, asked.seed, asked.iterations or 2000)
    models = {name: positions.load(name, asked.seed) for name in ('learned', *WINDOWS)}
    ways = ways_through(models)
    print(f"{len(text) - 1:,} tokens through {len(ways)} ways, one token a step", flush=True)
    measured, resident = stream(ways, text)
    full = max(model.config.block_size for model in models.values()) - 1  # contexts before are shorter, for all alike
    for label, (losses, seconds) in measured.items():
        c = models[label.removesuffix(DECODER).removesuffix(CROP)].config
        rows.append(dict(way=label, nats=losses[full:].double().mean().item(), by_span=spans(losses, torch.mean),
                         us=1e6 * seconds[full:].median().item(), us_by_span=[1e6 * s for s in spans(seconds)],
                         cache_bytes=cache_bytes(c, 1) if c.window else 0))
    for name in WINDOWS:
        for way, step in (('', models[name].step), (DECODER, decode.best(models[name], 1, threads=THREADS))):
            places += [dict(way=name + way, place=m.case.labels['place'], us=1e6 * m.seconds)
                       for m in time_at(step, models[name], text, PLACES, 10 * asked.repeats)]
    sizes, iteration_ms = time_sizes(asked.repeats), time_training(asked.seed, asked.repeats)
    print(table(rows, 'way nats us cache_bytes'), table(places, 'way place us'), sep='\n\n')
    print('\n' + table(sizes, 'shape block_size roll crop'), table([dict(iteration_ms=iteration_ms)], 'iteration_ms'),
          sep='\n\n')
    return dict(span=SPAN, stream=rows, resident_bytes=resident, places=places, sizes=sizes, iteration_ms=iteration_ms)


def picture(figures, machine):
    """Loss, time and memory along the stream."""
    n, nats, times = figures['span'], [], []
    held = [size / 1e6 for size in figures['resident_bytes']]
    memory = [([n * k for k in range(len(held))], held, 'the whole process', dict(color='0.3'))]
    for i, row in enumerate(figures['stream']):
        x, style = [n * (k + 0.5) for k in range(len(row['by_span']))], dict(color=f'C{i}')
        times.append((x, row['us_by_span'], f"{row['way']}: {row['us']:,.0f} us", style))
        if row['way'].endswith(DECODER):  # the same numbers as without it
            continue
        nats.append((x, row['by_span'], f"{row['way']}: {row['nats']:.4f} nats", style))
        if row['cache_bytes']:
            size = row['cache_bytes'] / 1e6
            memory.append((x, [size] * len(x), f"cache of {row['way']}: {size:.3f} MB", style | dict(ls='--')))
    return dict(panels=[
        Panel('', nats, axes=dict(ylabel=f'nats a character,\nmeans of {n:,}')),
        Panel('', times, axes=dict(ylabel=f'microseconds a token,\nmedians of {n:,}', yscale='log')),
        Panel('', memory, axes=dict(ylabel='memory, MB', yscale='log', xlabel='characters of one stream'))],
        columns=1, size=(9, 3.3))
