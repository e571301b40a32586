"""
Our ways to generate and other engines, with the same weights, in turns on one machine.

    decoding        greedy tokens a second after a short prompt; the largest of --lengths is their number
    prefill         the time to the first token after a long prompt, whose tokens --lengths says
    long_context    a step after a long prompt, with keys and values in fewer bits, weights in 8 bits
    second_turn     the first token of a chat's second answer: the engine keeps the conversation, and reads what is new
    per_weight      a step of L, and of a llama with as many weights

Every figure of the first two is also given as a fraction of the floor: the least time of steps that only read each
weight once, in the type it is stored in, or only did their multiplications in float32, whichever takes longer. Both
rates are measured here, in turns with the engines. The reading rate is measured on as many bytes as the weights have,
so that a model that fits the processor's cache is compared with that cache and not with memory. The floor leaves out
keys and values and everything but the matrices. Engines with 8 bits multiply in 8 bits, so with large batches they can
be faster than this floor.
"""
import math
import statistics
import sys
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import product

import torch
from tqdm import tqdm

from benchmarks.harness import Case, Part, take_turns
from benchmarks.peers.ctranslate import CTranslate2
from benchmarks.peers.hugging_face import HuggingFace
from benchmarks.peers.llamacpp import LlamaCpp
from benchmarks.peers.onnx import OnnxRuntime
from benchmarks.peers.ours import Cache, Decoder, NoCache, Pages
from benchmarks.shapes import (
    LLAMA,
    LLAMAS,
    PROMPT,
    SHAPES,
    WITHIN_WINDOW,
    model_of,
    model_with_varied_text,
)

OURS = NoCache, Cache, Decoder
PEERS = HuggingFace, CTranslate2, LlamaCpp, OnnxRuntime
KEYS = [(Pages, 'float32'), (Pages, 'bfloat16'), (Pages, 'int8'),
        (LlamaCpp, 'float32'), (LlamaCpp, 'float16'), (LlamaCpp, 'q8_0')]  # types of keys and values of long_context
BYTES = {'float32': 4, 'bfloat16': 2, 'int8': 1, 'int4': 0.5625}
WARM_UP = 32       # tokens of a prompt that are fed before a timed run
MUCH_SLOWER = 1.5  # a way to run an engine that takes so many times the time of another one is not tried again
N_NEW, N_WARM = 16, 2  # tokens of a round of long_context and per_weight, and before them
N_SAID = 40        # tokens of second_turn that are new to the cache: the second message, and the template around it
NEAR_TIE = 1e-4    # logits that differ by less than this are decided by rounding, in float32


def missing():
    """{engine: what to do about it}, of the engines that cannot be used here."""
    return {engine.name: engine.missing() for engine in OURS + PEERS if engine.missing()}


def versions():
    """{package: version} of everything that is compared."""
    found = {'python': sys.version.split()[0]}
    packages = [package for engine in OURS + PEERS for package in engine.packages.values()]
    for package in ['torch', 'numpy', *packages]:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    return found


def random_prompts(model, B, T):
    return torch.randint(model.config.vocab_size, (B, T))


def decoding(asked):
    for name, B, n_new in asked.combinations(SHAPES, {'S': (1, 10, 32), 'M': (1, 10, 32), 'L': (1, 8)} | {
            name: (1, 8) for name in LLAMAS}, {name: (n,) for name, n in WITHIN_WINDOW.items()}):
        if n_new == max(asked.lengths or [n_new]):
            yield race(asked, name, B, PROMPT, n_new, OURS + PEERS)


def prefill(asked):
    """Engines without a cache do the same work as the model with one, which is "cache"."""
    engines = [engine for engine in OURS + PEERS if engine is not NoCache]
    for name, B, T in asked.combinations(['M', 'L', *LLAMAS], (1,), {'S': (64,), 'M': (256,), 'L': (512, 1000)} | {
            name: (512,) for name in LLAMAS}):
        yield race(asked, name, B, T, 1, engines)


def race(asked, name, B, T, n_new, engines):
    """
    Rows of all installed engines on B prompts of T tokens. Building and converting are not timed. n_new tokens are
    generated, or as many as take about max_seconds: slow engines generate fewer. (Without a cache this flatters an
    engine: the first tokens cost the least.)
    """
    model = model_of(name, asked.bias)
    if T + n_new - 1 > model.config.block_size:  # the last token is not fed
        raise ValueError(f"a prompt of {T} and {n_new} new tokens do not fit into block_size {model.config.block_size}")
    idx, most = random_prompts(model, B, T), asked.max_seconds
    cases = []
    for kind, weights in tqdm([(engine, weights) for engine in able(engines, name, model.config)
                               for weights in engine.ways], desc=f'{name}: building, trying', leave=False,
                              disable=None):
        engine, how = fastest_way(kind, weights, model, idx, n_new, min(0.15, most))
        n = trial(engine, idx, n_new, most / 2)[0]
        # threads of the last engine may still spin, and its weights fill the cache: a warm-up
        labels = dict(shape=name, batch=B, prompt=T, engine=engine.name, weights=weights, how=how, new_tokens=n)
        cases.append(Case(labels, lambda engine, n=n: engine.generate(idx, n), lambda _, engine=engine, n=n: (
            engine.generate(idx[:, :WARM_UP], min(8, n)), engine)[1]))
    n_weights = model.get_num_params()  # without positions: a token reads one row of them
    rates = [Case({}, lambda n_bytes=n_bytes: read_rate(n_weights * n_bytes)) for n_bytes in BYTES.values()]
    multiply, *reads_and_engines = take_turns([Case({}, multiply_rate), *rates, *cases], asked.repeats,
                                              f'{name}: {B} x {T}')
    flops = statistics.median(multiply.results)
    reads = {weights: statistics.median(m.results) for weights, m in zip(BYTES, reads_and_engines)}
    rows = []
    for m in reads_and_engines[len(BYTES):]:
        weights, n, read = m.case.labels['weights'], m.case.labels['new_tokens'], reads[m.case.labels['weights']]
        step = floor(model, weights, B, B, read, flops)
        least = floor(model, weights, B * T, B, read, flops) + (n - 1) * step
        same_tokens = next(engine.same_tokens for engine in engines if engine.name == m.case.labels['engine'])
        rows.append(m.row(seconds=m.seconds, tok_per_s=B * n / m.seconds, of_floor=least / m.seconds, floor_step_s=step,
                          read_bytes_per_s=read, flops=flops, should_be_ours=same_tokens and weights == 'float32',
                          **compare(model, idx, m.result)))
    for row in rows:
        row['tokens'] = verdict(row)
    for row in rows:  # the decoder over the best of all other rows with the same weights
        others = [other['tok_per_s'] for other in rows
                  if other['weights'] == row['weights'] and other['engine'] != Decoder.name]
        if row['engine'] == Decoder.name and others:
            row['over_others'] = row['tok_per_s'] / max(others)
    return rows


def able(engines, name, config):
    """The engines that are installed and can run the shape `name`. Those that cannot run it are named."""
    for engine in engines:
        if why := engine.refuses(config):
            tqdm.write(f"{name} not on {engine.name}: {why}")
    return [engine for engine in engines if not engine.missing() and not engine.refuses(config)]


def floor(model, weights, n_rows, n_logits, read, multiply):
    """
    The least seconds of a step with n_rows tokens and logits for n_logits of them, at a rate of `read` bytes and
    `multiply` operations a second.
    """
    n_weights, n_head = model.get_num_params(), model.lm_head.weight.numel()  # without learned positions
    return max(n_weights * BYTES[weights] / read, 2 * ((n_weights - n_head) * n_rows + n_head * n_logits) / multiply)


def fastest_way(kind, weights, model, idx, n_new, enough):
    """
    The fastest way to run an engine: (engine, how). One thread and all of them are tried, and each of the engine's own
    ways. Those that are much slower in a first trial are left out; the others take turns, and medians count.
    """
    engines = {}
    for threads in sorted({1, torch.get_num_threads()}):
        for way in kind.ways[weights]:
            how = [f"{threads} thread{'s' * (threads > 1)}"] + [f'{k} {v}' for k, v in way.items()]
            engines[', '.join(how)] = kind(model, weights, threads=threads, **way)
    trials = {how: trial(engine, idx, n_new, enough) for how, engine in engines.items()}
    n = min(n for n, _ in trials.values())  # the same tokens for all
    least = min(seconds / n for n, seconds in trials.values())
    cases = [Case(dict(how=how), lambda how=how: engines[how].generate(idx, n))
             for how, (n_tried, seconds) in trials.items() if seconds / n_tried <= MUCH_SLOWER * least]
    measured = take_turns(cases, 5, '') if len(cases) > 1 else []
    how = min(measured, key=lambda m: m.seconds).case.labels['how'] if measured else cases[0].labels['how']
    return engines[how], how


def trial(engine, prompts, n_new, enough):
    """(n, seconds): n tokens, doubled from 4 to n_new until they take `enough` seconds, and their best time."""
    def seconds_for(n):
        t0 = time.perf_counter()
        engine.generate(prompts, n)
        return time.perf_counter() - t0

    seconds_for(min(2, n_new))
    n = min(4, n_new)
    while True:
        seconds = seconds_for(n)
        if seconds >= enough:  # once more: another process may have slowed the first
            seconds = min(seconds, seconds_for(n))
        if seconds >= enough:
            return n, seconds
        if n == n_new:
            return n, min(seconds, seconds_for(n), seconds_for(n))
        n = min(2 * n, n_new)


def compare(model, prompts, tokens):
    """
    Are the (B, n) tokens that follow prompts (B, T) those of the model, computed without a cache?

    first_difference: the first step, from 0, at which a row differs, or None. gap: how far the logit of its token is
    below the best one. One pass over a whole row has the logits of all its steps, so nothing is generated again.
    """
    T, first, gap = prompts.size(1), None, None
    for row in torch.cat([prompts, tokens], dim=1):
        with torch.inference_mode():
            logits = model(row[None, :-1], targets=row[None, 1:])[0][0, T - 1:]  # (n, vocab_size)
        steps = (logits.argmax(dim=-1) != row[T:]).nonzero()
        if len(steps) and (first is None or steps[0].item() < first):
            first = steps[0].item()
            gap = (logits[first].max() - logits[first, row[T + first]]).item()
    return dict(compared=tokens.size(1), first_difference=first, gap=gap)


def verdict(row):
    """Are the tokens of a row ours?"""
    if row['first_difference'] is None:
        return f"the same {row['compared']}"
    if not row['should_be_ours']:
        return f"the same {row['first_difference']}, then others"
    where = f"at {row['first_difference']}, {row['gap']:.1e} below the best logit"
    return f"near tie {where}" if abs(row['gap']) < NEAR_TIE else f"DIFFERENT {where}"


def read_rate(n_bytes):
    """Bytes a second that all threads together sum up, reading n_bytes repeatedly (at least 256 MB)."""
    threads = torch.get_num_threads()
    n, again = math.ceil(n_bytes / 4 / threads), math.ceil(2**28 / n_bytes)
    numbers = torch.ones(threads, 1, n).expand(threads, again, n)  # repeated without a copy; a part for each thread
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


def long_context(asked):
    """
    llama.cpp keeps float16 by default; q8_0 has a scale for 32 numbers, as our int8. All engines use all threads. Each
    reads the prompts once, untimed. A round goes back to their end and generates the same number of tokens in every
    cache. speedup: the time with float32 keys in the same engine over that with these.
    """
    for name, B, T in asked.combinations('L', (1, 8), (1000,)):
        model, threads = model_of(name, asked.bias), torch.get_num_threads()
        n = min(N_NEW, model.config.block_size - T - N_WARM)
        if n < 1:
            raise ValueError(f"prompts of {T} leave no room for {N_WARM + 1} new tokens in {model.config.block_size}: "
                             "choose shorter ones in lengths")
        prompts, cases = random_prompts(model, B, T), []
        for kind, kv in KEYS:
            if not kind.missing():
                engine = kind(model, 'int8', threads, kv=kv)
                first = engine.begin(prompts)
                labels = dict(shape=name, batch=B, context=T, engine=kind.name, type_kv=kv, weights='int8',
                              new_tokens=n, threads=threads)
                cases.append(Case(
                    labels, lambda newest, engine=engine, T=T, n=n: engine.go_on(newest, T + N_WARM, n),
                    lambda _, engine=engine, first=first, T=T: engine.go_on(first, T, N_WARM)[:, -1], per=n))
        measured = take_turns(cases, asked.repeats, f'{name}: {B} x {T}')
        exact = {m.case.labels['engine']: m for m in measured if m.case.labels['type_kv'] == 'float32'}
        yield [m.row(step_s=m.seconds, speedup=exact[m.case.labels['engine']].over(m)) for m in measured]


def second_turn(asked):
    """
    A conversation of T tokens is read once, untimed. A round reads N_SAID more behind it, in place of those of the
    round before. A row for each engine and type of weights, with its best number of threads: one, or all. over_others:
    llama.cpp's time with the same weights over ours.
    """
    for name, B, T in asked.combinations(LLAMAS, (1,), (400,)):
        model, cases = model_of(name, asked.bias), []
        if T + N_SAID > model.config.block_size:
            raise ValueError(f"a conversation of {T} and {N_SAID} new tokens do not fit into block_size "
                             f"{model.config.block_size}: choose a shorter one in lengths")
        kept, said = random_prompts(model, B, T), random_prompts(model, B, N_SAID)
        for kind, weights in product([kind for kind in (Pages, LlamaCpp) if not kind.missing()], LlamaCpp.ways):
            for threads in sorted({1, torch.get_num_threads()}):
                engine = kind(model, weights, threads)
                engine.begin(kept)
                labels = dict(shape=name, batch=B, kept=T, new=N_SAID, engine=kind.name, weights=weights,
                              threads=threads)
                cases.append(Case(labels, lambda engine=engine, T=T, said=said: engine.read(said, T)))
        best = {}  # {(engine, weights): Measured}
        for m in sorted(take_turns(cases, asked.repeats, f'{name}: {B} x {T} + {N_SAID}'), key=lambda m: m.seconds):
            best.setdefault((m.case.labels['engine'], m.case.labels['weights']), m)
        theirs = {weights: m for (engine, weights), m in best.items() if engine == LlamaCpp.name}
        yield [m.row(seconds=m.seconds,
                     over_others=theirs[weights].over(m) if engine == Pages.name and theirs else None)
               for (engine, weights), m in best.items()]


def per_weight(asked):
    """
    A row for each shape, number of sequences and type of weights, beside a llama of that shape: swiglu has three
    matrices, with as many weights as the two of GELU if two thirds as wide. All engines use all threads.
    llama_over_own: the time of a step a weight, over that of the shape itself.
    """
    for name, B, T in asked.combinations('L', (1, 8), (PROMPT,)):
        own, rows = model_of(name, asked.bias), []
        c = own.config
        llama = model_with_varied_text(replace(c, n_inner=2 * c.n_inner // 3, **LLAMA))
        if T + N_NEW > c.block_size:
            raise ValueError(f"a prompt of {T} and {N_NEW} new tokens do not fit into {c.block_size}: choose a shorter "
                             "one in lengths")
        for weights in Pages.ways:
            cases = []
            for model in (own, llama):
                engine, n_weights = Pages(model, weights, torch.get_num_threads()), model.get_num_params()
                first = engine.begin(random_prompts(model, B, T))
                cases.append(Case(dict(shape=name, batch=B, weights=weights, n_weights=n_weights),
                                  lambda engine=engine, first=first, T=T: engine.go_on(first, T, N_NEW), per=N_NEW))
            a, b = take_turns(cases, asked.repeats, f'{name} and a llama, {weights}', least=0.2)
            n_weights = a.case.labels['n_weights'] / b.case.labels['n_weights']
            rows.append(a.row(own_step_s=a.seconds, llama_step_s=b.seconds, llama_over_own=n_weights * b.over(a)))
        yield rows


ENGINE, JUDGED = 'engine weights tok_per_s ', ' of_floor how over_others read_bytes_per_s flops tokens'
PARTS = dict(
    decoding=Part(decoding, 36, "greedy tokens after a short prompt", 'shape batch ' + ENGINE + 'new_tokens' + JUDGED),
    prefill=Part(prefill, 16, "the first token after a long prompt", 'shape batch prompt seconds ' + ENGINE + JUDGED),
    long_context=Part(long_context, 6, "a step after a long prompt, weights in 8 bits",
                      'shape batch context engine type_kv step_s speedup'),
    second_turn=Part(second_turn, 2, "the first token of a chat's second answer",
                     'shape batch kept new engine weights threads seconds over_others'),
    per_weight=Part(per_weight, 2, "a step of a shape, and of a llama with as many weights",
                    'shape batch weights n_weights own_step_s llama_step_s llama_over_own'),
)
