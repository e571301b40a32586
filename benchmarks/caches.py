"""
The caches of kvcache/ on the compiled step, in parts.

    python bench.py --mode=caches
    python bench.py --mode=caches --only=steps,joining --json=out-bench/caches.json

    steps      a decode step through each cache, over the step on the decoder's tuples
    joining    sequences of different lengths that begin and end, over the pages in PyTorch
    requests   many requests in each cache and in each number of bits, over the contiguous cache
    sharing    what the pages of several sequences share

`--lengths` are the tokens before the first step that is timed.
"""
from contextlib import nullcontext

import numpy as np
import torch

import decode
import kvcache
from benchmarks.harness import Case, Part, take_turns
from benchmarks.shapes import model_of, random_tokens
from decode.kernel.building import CFunction
from decode.kernel.vectors import longs_at
from decode.metadata import NextTokens
from kvcache.contiguous import cache_for

CPU_ONLY = "the caches are compared"
N_STEPS = {'S': 48, 'M': 24, 'L': 8}      # that are timed together,
N_WARM = 3                                # behind so many others,
LEAST = 0.1                               # again and again for so many seconds
CONTEXTS = {'S': (64,), 'M': (128,), 'L': (128,)}
EVERY, JOINING_STEPS = 4, {'S': 64, 'M': 32, 'L': 8}  # joining: steps from one end to the next, steps of a round
KERNEL, PYTORCH = 'kernel', 'PyTorch'


def on(cache):
    """What runs the steps of a cache."""
    return KERNEL if hasattr(cache.executor, 'torch_on_one_thread') else PYTORCH


def n_steps_after(name, T, block_size):
    """How many steps are timed behind T tokens. ValueError if there is no room."""
    n = min(N_STEPS[name], block_size - T - N_WARM)
    if n < 1:
        raise ValueError(f"the block_size is {block_size}, and a context of {T} leaves no room for {N_WARM + 1} steps: "
                         "choose a smaller one in lengths")
    return n


def case_of_steps(labels, step, n):
    """A `Case` whose result is the logits of the last step. step: a function of the number of a step, from 0 on."""
    def steps(first, end):
        for i in range(first, end):
            logits = step(i)
        return logits
    return Case(labels, lambda _: steps(N_WARM, N_WARM + n), lambda _: steps(0, N_WARM), per=n)


def steps_of_tuples(decoder, texts, T):
    """A function of i = 0, 1, ... that feeds token T + i of each of texts (B, N) to a decoder, on its tuples."""
    begin, kv_cache = decoder(texts[:, :T], None)[1], None

    def step(i):
        nonlocal kv_cache
        kv_cache = kv_cache if i else begin
        logits, kv_cache = decoder(texts[:, T + i:T + i + 1], kv_cache)
        return logits[:, 0]
    return step


def steps_of_cache(cache, texts, T):
    """(the same for a cache of sequences, their handles). Their first T tokens are fed one sequence after another."""
    handles = [cache.new() for _ in texts]
    for handle, text in zip(handles, texts):
        cache.step([handle], [0], text[None, :T])
    return (lambda i: cache.step(handles, [T + i] * len(handles), texts[:, T + i:T + i + 1])), handles


def copy_row(data_at, logits_at, tokens_at, thread, n_threads):
    """On thread 0, write the data[1] tokens at the address data[0], and set data[0] to the address of the next row."""
    if thread > 0:
        return 1
    data, tokens = longs_at(data_at), longs_at(tokens_at)
    row = longs_at(data[0])
    for i in range(data[1]):
        tokens[i] = row[i]
    data[0] += 8 * data[1]
    return 1


COPY = CFunction(copy_row)


def case_of_one_call(labels, cache, texts, T, n):
    """The steps of `case_of_steps` in one call, as the server makes them, with tokens that are known before."""
    step, handles = steps_of_cache(cache, texts, T)
    rows = texts[:, T + N_WARM:T + N_WARM + n + 1].T.contiguous().numpy()  # the last row is drawn, and not fed

    def setup(_):
        for i in range(N_WARM):
            step(i)
        return NextTokens(COPY, np.array([rows[1:].ctypes.data, rows.shape[1]]), rows.copy())

    def steps(next_tokens):
        logits = cache.decode_steps(handles, next_tokens)
        while next_tokens.n_left:  # while the number of threads is chosen, a call makes fewer steps
            again = NextTokens(COPY, next_tokens.data, next_tokens.tokens[next_tokens.n_drawn:])
            logits, next_tokens = cache.decode_steps(handles, again), again
        return logits
    return Case(labels, steps, setup, per=n)


@torch.inference_mode()
def steps(asked):
    """
    "tuples" are the decoder called as such, "generation" is what generation puts around it, "paged, one call" has all
    steps in one call. All are fed the same tokens. same_bits: are the logits of the last step those of the tuples?
    """
    for name, B, T in asked.combinations('SML', (8, 32), CONTEXTS):
        model = model_of(name, asked.bias)
        n, decoder = n_steps_after(name, T, model.config.block_size), decode.best(model, B)
        texts = random_tokens(model, B, T + N_WARM + n + 1)
        labels = dict(shape=name, batch=B, context=T, steps=n)
        cases = [case_of_steps(labels | dict(cache='tuples', on=KERNEL), steps_of_tuples(decoder, texts, T), n)]
        caches = {'generation': cache_for(model, B, decoder), **{
            kind: kvcache.make_cache(model, kind, B, decoder=decoder) for kind in kvcache.KINDS}}
        caches['contiguous'] = caches.pop('tuple')
        for kind, cache in caches.items():
            cases.append(case_of_steps(labels | dict(cache=kind, on=on(cache)), steps_of_cache(cache, texts, T)[0], n))
        cache = kvcache.make_cache(model, 'paged', B, decoder=decoder)
        if on(cache) == KERNEL:
            cases.append(case_of_one_call(labels | dict(cache='paged, one call', on=KERNEL), cache, texts, T, n))
        with getattr(decoder, 'torch_on_one_thread', nullcontext)():
            tuples, *_ = measured = take_turns(cases, asked.repeats, f'{name}: {B} sequences', LEAST)
        yield [m.row(step_s=m.seconds, over_tuples=m.over(tuples), same_bits=torch.equal(m.result, tuples.result),
                     difference=(m.result - tuples.result).abs().max().item()) for m in measured]


def prompt_lengths(config, n_seq, n_new=24):
    """Prompt lengths of n_seq sequences, evenly spread; n_new tokens fit behind the longest."""
    longest = config.block_size - n_new
    return [max(1, longest * (i + 2) // (n_seq + 1)) for i in range(n_seq)]


def joining(asked):
    """
    The load of a server: 8 sequences of different lengths; every EVERY steps one ends, and another begins with its
    prompt, which shares a step with the next tokens of the others. Each round has new prompts. speedup: over PyTorch.
    """
    for name, B, _ in asked.combinations('SM', (8,)):
        model, n_steps = model_of(name, asked.bias), JOINING_STEPS[name]
        decoder, lengths = decode.best(model, B), prompt_lengths(model.config, B)
        caches = [kvcache.make_cache(model, 'paged', B, decoder=each) for each in (decoder, None)]

        def prompts(round_, model=model, lengths=lengths, n_steps=n_steps):
            return [random_tokens(model, n, seed=round_ * 1000 + i) for i, n in enumerate(lengths * n_steps)]

        def step(cache, B=B, n_steps=n_steps):
            def run(prompts):
                with getattr(cache.executor, 'torch_on_one_thread', nullcontext)():
                    return serve(cache, prompts, B, n_steps)
            return run
        labels = dict(shape=name, sequences=B, steps=n_steps, every=EVERY, prompts=lengths)
        measured = take_turns([Case(labels | dict(on=on(cache)), step(cache), prompts, per=B * n_steps)
                               for cache in caches], asked.repeats, f'{name}: joining and leaving')
        yield [m.row(tok_per_s=1 / m.seconds, speedup=measured[1].over(m), same_tokens=m.result == measured[1].result)
               for m in measured]


@torch.inference_mode()
def serve(cache, prompts, B, n_steps):
    """
    The greedy tokens of all sequences, in the order in which they began, of n_steps steps of B of them behind the one
    that feeds the first B prompts. Sequence i < B ends after (i + 1) * EVERY steps, later ones after B * EVERY; each is
    followed by the next of prompts, (T,) each.
    """
    texts = [[] for _ in range(B)]
    live = [(cache.new(), text) for text in texts]
    left = [1 + (i + 1) * EVERY for i in range(B)]  # how many tokens until it ends
    fed, starts = prompts[:B], [0] * B
    for _ in range(n_steps + 1):
        newest = cache.step([handle for handle, _ in live], starts, fed).argmax(dim=-1)
        starts = [start + len(tokens) for start, tokens in zip(starts, fed)]
        fed = list(newest.split(1))
        for i, token in enumerate(newest.tolist()):
            live[i][1].append(token)
            left[i] -= 1
            if left[i] == 0:
                cache.free(live[i][0])
                texts.append([])
                live[i], left[i] = (cache.new(), texts[-1]), B * EVERY
                starts[i], fed[i] = 0, prompts[len(texts) - 1]
    for handle, _ in live:
        cache.free(handle)
    return texts


def requests(asked, n_new=24):
    """n_new greedy tokens of prompts of several lengths. same_tokens: as those of the contiguous cache of the width."""
    for name, B, _ in asked.combinations('SM', (8,)):
        model = model_of(name, asked.bias)
        decoder, prompts = decode.best(model, B), [
            random_tokens(model, n, seed=i) for i, n in enumerate(prompt_lengths(model.config, B, n_new))]
        settings = [(kind, bits, True) for kind in kvcache.KINDS for bits in (0, 8, 4)] + [('paged', 0, False)]
        cases = []
        for kind, bits, together in settings:
            def begin(_, kind=kind, bits=bits, together=together):
                groups = [prompts] if together else [[prompt] for prompt in prompts]
                return [read(kvcache.make_cache(model, kind, len(group), bits, decoder), group) for group in groups]
            labels = dict(shape=name, kv_cache=kind, kv_bits=bits, together=together, prompts=[*map(len, prompts)],
                          new_tokens=n_new)
            cases.append(Case(labels, lambda groups: torch.cat([write(*group, n_new) for group in groups], dim=1),
                              begin, per=B * n_new))
        measured = take_turns(cases, asked.repeats, f'{name}: requests')
        contiguous = {m.case.labels['kv_bits']: m for m in measured if m.case.labels['kv_cache'] == 'tuple'}
        yield [m.row(tok_per_s=1 / m.seconds, time_over_contiguous=m.over(contiguous[0]),
                     same_tokens=torch.equal(m.result, contiguous[m.case.labels['kv_bits']].result)) for m in measured]


@torch.inference_mode()
def read(cache, prompts):
    """(the cache, the handles of prompts (T_i,) that it has read, their lengths, the logits behind them)."""
    handles = [cache.new() for _ in prompts]
    logits = [cache.step([handle], [0], prompt[None]) for handle, prompt in zip(handles, prompts)]
    return cache, handles, [*map(len, prompts)], torch.cat(logits)


@torch.inference_mode()
def write(cache, handles, lengths, logits, n_new):
    """The n_new greedy tokens behind what `read` has read, (n_new, B)."""
    tokens = []
    for i in range(n_new):
        tokens.append(logits.argmax(dim=-1))
        logits = cache.step(handles, [length + i for length in lengths], tokens[-1][:, None])
    return torch.stack(tokens)


def sharing(asked, n_prompt=100):
    """
    What pages share: memory of samples of one prompt, and computation of a prompt that begins alike.

    bytes_held: of the blocks that are used after each sample has one token of its own; bytes_unshared: if no two
    samples shared a block. computed: tokens of a second prompt, which begins with the first one's n_prompt tokens,
    that are not in blocks of the first.
    """
    for name, n_samples, _ in asked.combinations('SM', (10,)):
        model = model_of(name, asked.bias)
        cache = kvcache.make_cache(model, 'paged', n_samples)
        prompt = random_tokens(model, 1, n_prompt)
        first = cache.new()
        cache.step([first], [0], prompt)
        samples = [first] + [cache.fork(first) for _ in range(n_samples - 1)]
        cache.step(samples, [n_prompt] * n_samples, torch.arange(n_samples)[:, None] % model.config.vocab_size)
        tables = [cache.record(handle).table for handle in samples]
        held, unshared = {block for table in tables for block in table}, sum(map(len, tables))
        bytes_a_block = cache.nbytes() // len(cache.blocks.references)
        second, text = cache.new(), torch.cat([prompt, torch.arange(1, 6)[None]], dim=1)
        n_cached = cache.reuse_prefix(second, text[0].tolist())
        yield [dict(shape=name, samples=n_samples, prompt=n_prompt, bytes_held=len(held) * bytes_a_block,
                    bytes_unshared=unshared * bytes_a_block, second_prompt=text.size(1),
                    computed=text.size(1) - n_cached)]


STEP, REQUEST = 'shape batch context ', 'shape kv_cache kv_bits together tok_per_s '
PARTS = dict(
    steps=Part(steps, 6, "a decode step through each cache", STEP + 'cache on step_s over_tuples same_bits difference'),
    joining=Part(joining, 2, f"sequences that join and leave, one every {EVERY} steps, through pages",
                 'shape sequences on tok_per_s speedup same_tokens'),
    requests=Part(requests, 2, "requests of different lengths, 24 more tokens of each",
                  REQUEST + 'time_over_contiguous same_tokens'),
    sharing=Part(sharing, 0.1, "what the pages of samples of one prompt share",
                 'shape samples prompt bytes_held bytes_unshared second_prompt computed'),
)
