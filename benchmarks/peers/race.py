"""
Our ways to generate and other engines, with the same weights, in turns on one machine.

    decoding        greedy tokens a second after a short prompt; the largest of --lengths is their number
    prefill         the time to the first token after a long prompt, whose tokens --lengths says

gb_per_s: what a step would read a second if it read each weight once, in the type it is stored in. The speed of the
memory, or of the cache that the weights fit into, is its limit where few sequences are decoded.
"""
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import product

import torch
from tqdm import tqdm

from benchmarks.harness import Case, Part, take_turns
from benchmarks.ours import Cache, NoCache, Ours
from benchmarks.peers.ctranslate import CTranslate2
from benchmarks.peers.hugging_face import HuggingFace
from benchmarks.peers.llamacpp import LlamaCpp
from benchmarks.peers.onnx import OnnxRuntime
from benchmarks.shapes import PROMPT, SHAPES, label, model_of, random_tokens

CPU_ONLY = "the peers are compared, beginning with float32 weights,"
PEERS = HuggingFace, CTranslate2, LlamaCpp, OnnxRuntime
ENGINES = NoCache, Cache, Ours, *PEERS
BYTES = {'float32': 4, 'bfloat16': 2, 'int8': 1, 'int4': 0.5625}  # of a weight, about: engines differ in their scales
BATCHES = {'S': (1, 10, 32), 'M': (1, 10, 32)}                # and (1, 8) of larger ones
PREFILLS = {'S': (64,), 'M': (256,), 'L': (512, 1000)}        # and 512 of llamas
NEW_TOKENS = {'S': 122, 'M': 200}                             # within the window; and 50 of larger ones
WARM_UP = 32       # tokens of a prompt that are fed before a timed run
TRIALS = 3         # of each way to run an engine, the first of which warms up


def check(asked):
    """Says which engines are not compared. Returns what is written beside the rows."""
    missing = {engine.name: engine.missing() for engine in ENGINES if engine.missing()}
    for engine, why in missing.items():
        print(f"not compared: {engine} ({why})")
    versions = {}
    for package in sorted({package for engine in ENGINES for package in engine.packages.values()}):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return dict(versions=versions, missing=missing, bias=asked.bias)


def decoding(asked):
    for name in asked.shapes or SHAPES:
        for B in asked.batches or BATCHES.get(name, (1, 8)):
            yield race(asked, name, B, PROMPT, max(asked.lengths or [NEW_TOKENS.get(name, 50)]), ENGINES)


def prefill(asked):
    """Engines without a cache do the same work as the model with one, which is "cache"."""
    engines = [engine for engine in ENGINES if engine is not NoCache]
    for name in asked.shapes or SHAPES:
        for B, T in product(asked.batches or [1], asked.lengths or PREFILLS.get(name, [512])):
            yield race(asked, name, B, T, 1, engines)


def race(asked, name, B, T, n_new, engines):
    """
    Rows of all installed engines on B prompts of T tokens. Building and converting are not timed. over_others: ours
    over the best of all others with the same weights. n_same: how many of the n_new tokens are those of the first
    engine, our model in float32, before the first other one, in the worst row. Rounded weights and llama.cpp's GELU
    give fewer.
    """
    model = model_of(name, asked.bias)
    if T + n_new - 1 > model.config.block_size:  # the last token is not fed
        raise ValueError(f"a prompt of {T} and {n_new} new tokens do not fit into block_size {model.config.block_size}")
    idx, cases, able = random_tokens(model, B, T), [], []
    for kind in engines:
        if why := kind.refuses(model.config):
            tqdm.write(f"{name} not on {kind.name}: {why}")
        elif not kind.missing():
            able += [(kind, weights) for weights in kind.ways]
    for kind, weights in tqdm(able, desc=f'{name}: building, trying', leave=False, disable=None):
        engine, how = fastest_way(kind, weights, model, idx, n_new)
        labels = dict(shape=label(name), batch=B, prompt=T, engine=kind.name, weights=weights, how=how,
                      new_tokens=n_new)
        # threads of the last engine may still spin, and its weights fill the cache: a warm-up
        cases.append(Case(labels, lambda engine: engine.generate(idx, n_new), lambda _, engine=engine: (
            engine.generate(idx[:, :WARM_UP], min(8, n_new)), engine)[1]))
    first, *_ = measured = take_turns(cases, asked.repeats, f'{name}: {B} x {T}')
    rows = [m.row(seconds=m.seconds, tok_per_s=B * n_new / m.seconds,
                  gb_per_s=model.get_num_params() * BYTES[m.case.labels['weights']] * n_new / m.seconds / 1e9,
                  n_same=n_same(m.results[-1], first.results[-1])) for m in measured]
    for row in rows:
        others = [other['tok_per_s'] for other in rows
                  if other['weights'] == row['weights'] and other['engine'] != Ours.name]
        if row['engine'] == Ours.name and others:
            row['over_others'] = row['tok_per_s'] / max(others)
    return rows


def fastest_way(kind, weights, model, idx, n_new):
    """
    The fastest way to run an engine: (engine, how). Each of its own ways is tried, with one thread and with all, unless
    it chooses their number itself.
    """
    tried = []
    for threads in [None] if kind.chooses_threads else sorted({1, torch.get_num_threads()}):
        for way in kind.ways[weights]:
            engine, seconds = kind(model, weights, threads=threads, **way), []
            for _ in range(TRIALS):
                began = time.perf_counter()
                engine.generate(idx, n_new)
                seconds.append(time.perf_counter() - began)
            how = [f'threads {threads}'] * (threads is not None) + [*(f'{name} {value}' for name, value in way.items())]
            tried.append((min(seconds), engine, ', '.join(how)))
    return min(tried, key=lambda each: each[0])[1:]


def n_same(tokens, expected):
    """How many tokens each row of two tensors (B, n) begins with that are the same: the least of all rows."""
    return (tokens == expected).cumprod(dim=1).sum(dim=1).min().item()


ENGINE, JUDGED = 'engine weights tok_per_s ', ' gb_per_s how over_others n_same'
PARTS = dict(
    decoding=Part(decoding, 36, "greedy tokens after a short prompt", 'shape batch ' + ENGINE + 'new_tokens' + JUDGED),
    prefill=Part(prefill, 16, "the first token after a long prompt", 'shape batch prompt seconds ' + ENGINE + JUDGED),
)
