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
from benchmarks.harness import Case, Panel, Part, process_bytes, take_turns
from benchmarks.shapes import cache_bytes, config_of
from model import GPT

PICTURE, CPU_ONLY = 'endless.png', "the models are trained and measured"
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
def sizes(asked):
    """
    Of S and M with random weights, rotary positions and a window of half of block_size: through the rolling cache, and
    by the full pass that cropping needs, both by the best decoder.
    """
    for name in asked.shapes or 'SM':
        c = config_of(name, False)
        model = GPT(replace(c, position='rope', window=c.block_size // 2)).eval()
        tokens, decoder = torch.randint(c.vocab_size, (1, 2 * c.block_size)), decode.best(model, 1, threads=THREADS)
        kv_cache = model(tokens)[2]
        cases = [Case({}, lambda: decoder(tokens[:, -1:], kv_cache)),
                 Case({}, lambda: decoder(tokens[:, -c.block_size:], None))]
        roll, crop = take_turns(cases, 10 * asked.repeats, f'{name}: rolling and cropping')
        yield [dict(shape=name, block_size=c.block_size, roll=1e6 * roll.seconds, crop=1e6 * crop.seconds)]


def training(asked):
    """Each model of positions mode takes turns with the others."""
    cases = [Case(dict(model=name), train_step.training_step(GPT(model.config), positions.DATA, 12, False, asked.seed,
                                                             'cpu', 'float32'), lambda n: n)
             for name, model in models_of(asked, positions.MODELS).items()]
    yield [m.row(ms=1e3 * m.seconds) for m in take_turns(cases, 10 * asked.repeats, 'training iterations')]


def spans(values, of=torch.median):
    """The medians or means of SPAN values each, as a list; the rest at the end is left out."""
    parts = values[:len(values) // SPAN * SPAN].view(-1, SPAN).double()
    return (parts.mean(dim=1) if of is torch.mean else parts.median(dim=1).values).tolist()


def models_of(asked, names):
    """{name: model} of the first seed. Those that are missing are trained first."""
    return {name: model for name, (model,) in positions.trained(asked, names, 1)}


def one_stream(asked):
    """
    nats: the mean of the tokens that have a full context. us: their median, in microseconds. by_span, us_by_span: of
    SPAN tokens each. cache_bytes: 0 without one. resident_bytes: of the whole process, every SPAN tokens.
    """
    text, models = positions.validation_text(PLACES[-1] + SPAN), models_of(asked, ('learned', *WINDOWS))
    ways, rows = ways_through(models), []
    print(f"{len(text) - 1:,} tokens through {len(ways)} ways, one token a step", flush=True)
    measured, resident = stream(ways, text)
    full = max(model.config.block_size for model in models.values()) - 1  # contexts before are shorter, for all alike
    for label, (losses, seconds) in measured.items():
        c = models[label.removesuffix(DECODER).removesuffix(CROP)].config
        rows.append(dict(way=label, nats=losses[full:].double().mean().item(), by_span=spans(losses, torch.mean),
                         us=1e6 * seconds[full:].median().item(), us_by_span=[1e6 * s for s in spans(seconds)],
                         cache_bytes=cache_bytes(c, 1) if c.window else 0, resident_bytes=resident))
    yield rows


def distant_places(asked):
    """us: the median of the tokens at a place of the stream."""
    text = positions.validation_text(PLACES[-1] + SPAN)
    for name, model in models_of(asked, WINDOWS).items():
        for way, step in (('', model.step), (DECODER, decode.best(model, 1, threads=THREADS))):
            yield [dict(way=name + way, place=m.case.labels['place'], us=1e6 * m.seconds)
                   for m in time_at(step, model, text, PLACES, 10 * asked.repeats)]


def picture(figures, machine):
    """Loss, time and memory along the stream."""
    rows, n, nats, times = figures['one_stream']['rows'], SPAN, [], []
    held = [size / 1e6 for size in rows[0]['resident_bytes']]
    memory = [([n * k for k in range(len(held))], held, 'the whole process', dict(color='0.3'))]
    for i, row in enumerate(rows):
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


PARTS = dict(
    one_stream=Part(one_stream, 10, "one stream, after the training of positions mode", 'way nats us cache_bytes'),
    distant_places=Part(distant_places, 1, "a token at two places of the stream", 'way place us'),
    sizes=Part(sizes, 2, "a token at a full context, in microseconds", 'shape block_size roll crop'),
    training=Part(training, 2, "a training iteration", 'model ms'),
)
