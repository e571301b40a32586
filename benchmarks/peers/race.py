"""
Our ways to generate and other engines, with the same weights, in turns on one machine.

Every figure is also given as a fraction of the floor: the least time of steps that only read each weight once, in the
type it is stored in, or only did their multiplications in float32, whichever takes longer. Both rates are measured
here, between the runs. The reading rate is measured on as many bytes as the weights have, so that a model that fits the
processor's cache is compared with that cache and not with memory. The floor leaves out keys and values and everything
but the matrices. Engines with 8 bits multiply in 8 bits, so with large batches they can be faster than this floor.
"""
import math
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import torch
from tqdm import tqdm

from benchmarks.peers.ctranslate import CTranslate2
from benchmarks.peers.hugging_face import HuggingFace
from benchmarks.peers.llamacpp import LlamaCpp
from benchmarks.peers.onnx_engine import OnnxRuntime
from benchmarks.peers.ours import Cache, Decoder, NoCache

OURS = NoCache, Cache, Decoder
PEERS = HuggingFace, CTranslate2, LlamaCpp, OnnxRuntime
BYTES = {'float32': 4, 'bfloat16': 2, 'int8': 1}
WARM_UP = 32      # tokens of a prompt that are fed before a timed run
MUCH_SLOWER = 1.5  # a way to run an engine that takes so many times the time of another one is not tried again


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


def race(name, model, prompts, n_new, repeats, max_seconds, engines=OURS + PEERS):
    """
    Time all installed engines on each batch of prompts in the list of (B, T) tensors. Returns rows (dicts) for JSON.

    They take turns, `repeats` times, and medians count. Building and converting are not timed. n_new tokens are
    generated, or as many as take about max_seconds: slow engines generate fewer. (Without a cache this flatters an
    engine: the first tokens cost the least.)
    """
    entries = [(engine, weights) for engine in engines if not engine.missing() for weights in engine.ways]
    fields = choose(name, entries, model, prompts, n_new, min(0.15, max_seconds))
    n_weights = model.get_num_params()  # without positions: a token reads one row of them
    rows = []
    for idx, field in zip(prompts, fields):
        (B, T), runs, tokens = idx.shape, {key: [] for key in field}, {}
        reads, multiplies = {weights: [] for weights in BYTES}, []
        new = {key: trial(engine, idx, n_new, max_seconds / 2)[0] for key, (engine, _) in field.items()}
        for _ in tqdm(range(repeats), desc=f'{name}: {B} x {T}', leave=False, disable=None):
            multiplies.append(multiply_rate())
            for weights, n_bytes in BYTES.items():
                reads[weights].append(read_rate(n_weights * n_bytes))
            for key, (engine, _) in field.items():
                # threads of the last engine may still spin, and its weights fill the cache: a pause, then a warm-up
                time.sleep(0.05)
                engine.generate(idx[:, :WARM_UP], min(8, new[key]))
                t0 = time.perf_counter()
                tokens[key] = engine.generate(idx, new[key])
                runs[key].append(time.perf_counter() - t0)
        multiply = statistics.median(multiplies)
        for key, (_, how) in field.items():
            engine, weights = key
            read, seconds = statistics.median(reads[weights]), statistics.median(runs[key])
            step = floor(model, weights, B, B, read, multiply)
            least = floor(model, weights, B * T, B, read, multiply) + (new[key] - 1) * step
            rows.append(dict(
                shape=name, batch=B, prompt=T, engine=engine.name, weights=weights, how=how, new_tokens=new[key],
                seconds=seconds, tok_per_s=B * new[key] / seconds, of_floor=least / seconds, floor_step_s=step,
                read_bytes_per_s=read, flops=multiply, runs_s=runs[key],
                should_be_ours=engine.same_tokens and weights == 'float32', **compare(model, idx, tokens[key])))
    return rows


def floor(model, weights, n_rows, n_logits, read, multiply):
    """
    The least seconds of a step with n_rows tokens and logits for n_logits of them, at a rate of `read` bytes and
    `multiply` operations a second.
    """
    n_weights, n_head = model.get_num_params(), model.lm_head.weight.numel()  # without learned positions
    return max(n_weights * BYTES[weights] / read, 2 * ((n_weights - n_head) * n_rows + n_head * n_logits) / multiply)


def choose(name, entries, model, prompts, n_new, enough):
    """
    The fastest way to run each entry (engine class, weights) on each batch: a list of {entry: (engine, how)}.

    One thread and all of them are tried, and each of the engine's own ways. Those that are much slower in a first trial
    are left out; the others take turns, and medians count. The slower ones are dropped before the next entry is built,
    because a large model is some hundred megabytes.
    """
    best = [{} for _ in prompts]
    for kind, weights in tqdm(entries, desc=f'{name}: building, trying', leave=False, disable=None):
        engines = {}
        for threads in sorted({1, torch.get_num_threads()}):
            for way in kind.ways[weights]:
                how = [f"{threads} thread{'s' * (threads > 1)}"] + [f'{k} {v}' for k, v in way.items()]
                engines[', '.join(how)] = kind(model, weights, threads=threads, **way)
        for idx, found in zip(prompts, best):
            trials = {how: trial(engine, idx, n_new, enough) for how, engine in engines.items()}
            n = min(n for n, _ in trials.values())  # the same tokens for all
            fastest = min(seconds / n for n, seconds in trials.values())
            runs = {how: [] for how, (n, seconds) in trials.items() if seconds / n <= MUCH_SLOWER * fastest}
            for _ in range(5 if len(runs) > 1 else 0):
                for how, of_engine in runs.items():
                    engines[how].generate(idx[:, :WARM_UP], min(8, n))
                    t0 = time.perf_counter()
                    engines[how].generate(idx, n)
                    of_engine.append(time.perf_counter() - t0)
            how = min(runs, key=lambda how: statistics.median(runs[how] or [0]))
            found[kind, weights] = engines[how], how
    return best


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
