"""
Every executor on every kind of model: the logits of one judge in float64, and of the compiled step the same bits, for
any split of texts into batches, in any slots, on any number of threads. What is refused, and what is not a number.
"""
import copy
import dataclasses
import itertools
import math
import random
import threading
import time

import numpy as np
import plain_gpu
import pytest
import torch
from conftest import WEIGHTS, sizes
from plain_gpt import plain
from plain_gpu import Direct
from test_linears import dequantised
from tiny_models import HOWS, MODELS, VOCAB, model_of

from decode import cpu
from decode.batch import Batch, NotNumbers, Refused, Runs
from decode.cpu import CPUExecutor
from decode.draw import DrawSettings, draw
from decode.eager import EagerExecutor
from decode.gpu.executor import GPUExecutor
from decode.kernel.attention import FAR
from decode.kernel.threads import n_cores
from decode.weights import input_squares
from kvcache.storage import Layer, make_layers

N_SLOTS, TWO = 1280, min(2, n_cores())
WIDTHS = [dict(), dict(n_embd=64), dict(n_embd=24, n_head=4), dict(n_embd=128)]  # channels of a head: 12, 16, 6, 32
KINDS = {name: (name, {}) for name in MODELS} | {
    'qwen2 sinks': ('llama', dict(qkv_bias=True, bias=False, window=7, n_sink=2)),
    'alibi window sinks': ('alibi', dict(n_kv_head=1, window=21, n_sink=3)),
    'rope window sink': ('rope', dict(window=1, n_sink=1)), 'none window': ('none', dict(window=1))}


class Text:
    """A sequence, as executors read it."""

    def __init__(self, tokens, vocab_size=VOCAB, **how):
        self.tokens, self.n_drawn, self.n_computed, self.n_writable, self.runs = list(tokens), 0, 0, 0, Runs()
        self.settings = DrawSettings(vocab_size, **dict(temperature=0.0, prompt=tokens) | how)


class Slots:
    """
    Slots that an executor holds, given out as pages of 16, as cells, or as a row for each text. They begin as NaN: what
    is read must have been written. PyTorch also reads others, which the mask hides; these begin as 1e4.
    """

    def __init__(self, executor, layout='pages', kind='', seed=0, n_slots=N_SLOTS):
        self.executor, self.layers = executor, make_layers(executor.model, n_slots, kind or executor.type_kv)
        for t in (t for layer in self.layers for t in layer.tensors() if t.is_floating_point()):
            t.fill_(1e4 if isinstance(executor, EagerExecutor) else math.nan)
        executor.hold(self.layers)
        self.size = dict(pages=16, cells=1, rows=n_slots // 9)[layout]
        self.free = [*range(0, n_slots - self.size + 1, self.size)]
        if layout != 'rows':
            random.Random(seed).shuffle(self.free)

    def batch(self, counts, n_steps=0, prompt_logits=False, logprobs=False, **how):
        """A batch of {text: so many new tokens}, with slots for all that it may draw."""
        n_steps = np.broadcast_to(n_steps, len(counts)).astype(np.int64)
        for text, end in zip(counts, n_steps + [t.n_computed + n for t, n in counts.items()]):
            while text.n_writable < end:
                text.runs.append(text.n_writable, self.free.pop(), self.size)
                text.n_writable += self.size
        spans = [(text, range(text.n_computed, text.n_computed + n)) for text, n in counts.items()]
        return Batch([*counts], [*counts.values()], np.array([t.tokens[p] for t, span in spans for p in span]),
                     np.array([p for _, span in spans for p in span]), n_steps, [prompt_logits] * len(counts),
                     [logprobs] * len(counts), **how)

    def run(self, counts, n_steps=0, **how):
        """Execute it, and give the texts what they drew. Returns the `SequenceOutput` of each."""
        drawn = self.executor.execute_model(self.batch(counts, n_steps, **how))
        for (text, n), of_text in zip(counts.items(), drawn):
            text.n_computed += n + max(0, len(of_text.tokens) - 1)
            text.n_drawn += len(of_text.tokens)
            text.tokens += of_text.tokens
        return drawn

    def logits(self, counts):
        """The logits of all new tokens of each text."""
        return [each.logits for each in self.run(counts, prompt_logits=True)]


def texts(n, length, seed=0, **how):
    chooser = torch.Generator().manual_seed(seed)
    return [Text(torch.randint(VOCAB, (length,), generator=chooser).tolist(), seed=i, **how) for i in range(n)]


def made(way, model, threads=TWO):
    """An executor, of 'eager float64', 'cpu int8', 'gpu float32' ... A model of numba's stays in float32."""
    name, dtype = way.split()
    if name == 'gpu':
        return GPUExecutor(model, plain_gpu, Direct())
    return CPUExecutor(model, dtype, threads) if name == 'cpu' else EagerExecutor(model.to(getattr(torch, dtype)))


def alone(executor, all_texts, kind=''):
    """The logits of each text alone, a token a step, in a row of slots, on one thread: (T, vocab_size)."""
    found, executor.prepare_call = [], lambda *_, **how: (1, None)
    for text in all_texts:
        slots, own = Slots(executor, 'rows', kind), Text(text.tokens)
        found.append(torch.cat([slots.logits({own: 1})[0] for _ in text.tokens]))

    def any_way(*_, **how):
        executor.packed.prefetch(random.choice([0, 2**13]))
        return random.choice([1, TWO]), None
    executor.prepare_call = any_way
    return found


def in_any_batches(slots, all_texts, chooser, check):
    """Feed texts in random parts, in random company, and call check(number, first position, logits)."""
    while left := {i: len(t.tokens) - t.n_computed for i, t in enumerate(all_texts) if t.n_computed < len(t.tokens)}:
        some = [i for i in left if chooser.random() < 0.7] or list(left)
        chooser.shuffle(some)
        counts = {all_texts[i]: min(left[i], chooser.choice([1, 1, 1, 2, 3, 5, 8, 9, 17, 40])) for i in some}
        if chooser.random() < 0.3:  # as many of each: to PyTorch these are a batch of rows
            counts = dict.fromkeys(counts, min(counts.values()))
        at = [text.n_computed for text in counts]
        for i, first, logits in zip(some, at, slots.logits(counts)):
            check(i, first, logits)


def rounded(model, weights):
    """The matrices of linears as the numbers that rounded weights stand for, {name: float32}."""
    squares, found = input_squares(model) if weights == 'int4' else None, {}
    places = {'attn.c_attn': 0, 'attn.c_proj': 2, 'mlp.c_fc': 3, 'mlp.c_gate': 3, 'mlp.c_proj': 4}
    for name, w in model.state_dict().items():
        *_, i, part, linear, _ = ['', '', *name.split('.')]
        place = -1 if name == 'lm_head.weight' else places.get(f'{part}.{linear}')
        if name.endswith('weight') and place is not None:
            of_w = [] if squares is None else [squares[place if place < 0 else 5 * int(i) + place]]
            found[name] = w.bfloat16().float() if weights == 'bfloat16' else dequantised(
                w, int(weights[3:]), *of_w).float()
    return found


def judged(model, all_texts, weights='float32'):
    """The judge's logits of texts of one length, (n, T, vocab_size), by the numbers that rounded weights stand for."""
    state = dict(model.state_dict()) | (rounded(model, weights) if weights in WEIGHTS[1:] else {})
    return plain(model, torch.tensor([t.tokens for t in all_texts]), state)


@pytest.mark.parametrize('kind', KINDS)
def test_the_inputs_of_linears_are_those_of_a_pass_of_random_tokens(kind):
    name, how = KINDS[kind]
    model, found = model_of(name, 1, **how), {}
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    hooks = [m.register_forward_pre_hook(lambda m, given, n=n: found.__setitem__(n, given[0].double()))
             for n, m in linears.items()]
    idx = torch.randint(VOCAB, (1, min(64, model.config.block_size)), generator=torch.Generator().manual_seed(0))
    model(idx, idx, use_cache=False)
    for hook in hooks:
        hook.remove()
    expected = [found[f'transformer.h.{i}.{part}'] for i in range(model.config.n_layer) for part in (
        'attn.c_attn', 'attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj')] + [found['lm_head']]
    for squares, x in zip(input_squares(model), expected, strict=True):
        torch.testing.assert_close(squares.double(), x.square().mean((0, 1)), rtol=1e-4, atol=1e-6)


# the largest difference as a share of the largest logit; int8 and int4 also round the inputs of linears
WORST = {'eager float64': 1e-10, 'eager float32': 2e-5, 'eager bfloat16': 0.1, 'eager float16': 0.02,
         'cpu float32': 2e-5, 'cpu bfloat16': 2e-5, 'cpu int8': 0.05, 'cpu int4': 0.05, 'gpu float32': 2e-5}
CASES = [(way, kind) for way in WORST for kind in (
    KINDS if way in ('eager float64', 'cpu float32', 'cpu int8') else sizes([*KINDS][::4], KINDS))]


@pytest.mark.parametrize('way, kind', CASES)
def test_the_judges_logits_for_any_split_into_batches_and_the_same_bits(way, kind, monkeypatch):
    name, how = KINDS[kind]
    number = list(KINDS).index(kind)
    for seed, layout in itertools.product(range(sizes(1, 5)), sizes([('pages', 'cells', 'rows')[number % 3]],
                                                                   ('pages', 'cells', 'rows'))):
        chooser = random.Random(f'{seed} {layout} {kind}')
        monkeypatch.setattr(cpu, 'CHUNK', chooser.choice([256, 7]))
        monkeypatch.setattr(GPUExecutor, 'most_sequences', chooser.choice([256, 64]))
        model = model_of(name, seed, **how | WIDTHS[(number + seed) % 4])
        executor = made(way, model)
        n = min(70, model.config.max_positions)
        all_texts = texts(*chooser.choice([(2, n), (5, n), (9, n), *[(64, 12)] * (layout != 'rows')]), seed)
        expected = judged(model, all_texts, way.split()[1])
        scale = expected.abs().max()
        same = None if way.startswith('eager') else alone(executor, all_texts)

        def check(i, first, logits, expected=expected, same=same, scale=scale):
            part = slice(first, first + len(logits))
            assert (logits.double() - expected[i, part]).abs().max() < WORST[way] * scale, (i, first)
            assert same is None or torch.equal(logits, same[i][part]), (i, first, len(logits))
        in_any_batches(Slots(executor, layout, seed=seed), all_texts, chooser, check)


@pytest.mark.parametrize('kind', MODELS)
def test_float32_weights_that_are_bfloat16_numbers_take_half_of_the_bytes_and_give_the_same_bits(kind, monkeypatch):
    model, all_texts = model_of(kind, 3, bias=True), texts(4, 40, 0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    monkeypatch.setattr(cpu, 'kept_in', lambda model, weights: weights)
    expected = alone(wide := CPUExecutor(model), all_texts)
    monkeypatch.undo()
    for each in model, copy.deepcopy(model).bfloat16():
        assert all(map(torch.equal, alone(narrow := CPUExecutor(each), all_texts), expected))
        assert wide.packed.panels.nbytes == 2 * narrow.packed.panels.nbytes and 'kept in bfloat16' in narrow.name
        assert 'kept' not in wide.name
    for value, size in (1 + 2**-20, wide.packed.panels.nbytes), (0.5, wide.packed.panels.nbytes // 2):
        with torch.no_grad():
            model.transformer.h[1].mlp.c_proj.weight[3, 5] = value
        narrow.model = model
        narrow.refresh()  # as after a step of an optimizer
        assert narrow.packed.panels.nbytes == size and ('kept in bfloat16' in narrow.name) == (value == 0.5)
        assert all(map(torch.equal, alone(narrow, all_texts), alone(CPUExecutor(model), all_texts)))


SLIDING = [dict(position=position, n_kv_head=n_kv_head, window=window, n_sink=n_sink)
           for position, n_kv_head, (window, n_sink) in itertools.product(
               ('rope', 'alibi', 'none'), (4, 2, 1), ((1, 0), (5, 0), (13, 0), (5, 2), (1, 1), (7, 3)))]


@pytest.mark.parametrize('case', sizes(random.Random(0).sample(SLIDING, 3), SLIDING), ids=lambda c: ' '.join(
    map(str, c.values())))
def test_models_that_slide_on_texts_of_many_contexts(case):
    model = model_of('learned', 1, block_size=16, **case)
    for way in 'cpu float32', 'eager float64':
        executor, all_texts = made(way, model), texts(2, sizes(6, 20) * 16)
        expected = judged(model, all_texts)
        worst = WORST[way] * expected.abs().max()

        def check(i, first, logits):
            assert (logits.double() - expected[i, first:first + len(logits)]).abs().max() < worst, (i, first)
        in_any_batches(Slots(executor, 'cells'), all_texts, random.Random(0), check)


@pytest.mark.parametrize('kv, worst', [('int8', 0.02), ('float16', 0.003)])
@pytest.mark.parametrize('kind', sizes(['rope', 'alibi window', 'qwen window'], MODELS))
def test_rounded_keys_and_values(kind, kv, worst):
    """Executors store the same numbers, but for those between two others. The compiled step's int8 has equal bits."""
    model = model_of(kind, 1, n_embd=128, head_dim=32)
    all_texts, eager = texts(sizes(3, 5), 40), EagerExecutor(model)
    slots, expected = Slots(eager, 'rows', kv), judged(model, all_texts)
    by_torch = [slots.logits({Text(text.tokens): 40})[0] for text in all_texts]
    scale = expected.abs().max()
    assert 1e-6 < max((a - b).abs().max() for a, b in zip(by_torch, expected)) / scale < worst
    by_gpu = alone(made('gpu float32', model), all_texts, kv)
    assert max((a - b).abs().max() for a, b in zip(by_torch, by_gpu)) < 5e-3 * scale
    if kv == 'float16':
        return
    executor = CPUExecutor(model, threads=TWO)
    same = alone(executor, all_texts, kv)
    assert max((a - b).abs().max() for a, b in zip(by_torch, same)) < 5e-3 * scale

    def check(i, first, logits):
        assert torch.equal(logits, same[i][first:first + len(logits)])
    in_any_batches(Slots(executor, 'pages', kv), all_texts, random.Random(0), check)


@pytest.mark.parametrize('kv', ['float32', 'int8'])
@pytest.mark.parametrize('kind, n_kv_head', [('llama', 1), ('alibi', 4), ('learned', 2)])
def test_long_prompts_have_the_bits_of_single_tokens(kind, n_kv_head, kv):
    """Rows of a prompt share tiles of keys and values, whole and half empty ones, beside others in the batch."""
    for head_dim, seed in itertools.product((32, 64, 96), range(sizes(1, 4))):
        model = model_of(kind, seed, block_size=150, n_embd=4 * head_dim, n_kv_head=n_kv_head, n_layer=1)
        executor, chooser = CPUExecutor(model, threads=TWO), random.Random(f'{kind} {kv} {head_dim} {seed}')
        all_texts = texts(2, 150, seed)
        same, slots = alone(executor, all_texts, kv), Slots(executor, 'pages', kv)
        while (done := all_texts[0].n_computed) < 150:
            n = min(150 - done, chooser.choice([1, 4, 5, 16, 23, 57, 90]))
            for logits, expected in zip(slots.logits(dict.fromkeys(all_texts, n)), same):
                assert torch.equal(logits, expected[done:done + n]), (head_dim, seed, done, n)


@pytest.mark.parametrize('kind, kv', [('llama', 'float32'), ('rope window sinks', 'int8')])
def test_prefetched_keys_and_values_change_no_bits(kind, kv):
    """Single tokens of texts of different lengths, beside parts of prompts. Alone a text has too few of them."""
    how = dict(window=64) if 'window' in kind else {}
    model = model_of(kind, block_size=150, n_layer=8, n_head=4, n_kv_head=2, n_embd=64, head_dim=64, **how)
    executor, all_texts = CPUExecutor(model, threads=TWO), [texts(1, n, n)[0] for n in range(40, 120, 7)]
    same, seen = alone(executor, all_texts, kv), []

    def check(i, first, logits):
        assert torch.equal(logits, same[i][first:first + len(logits)])
        seen.append(sum(min(text.n_computed, 64) for text in all_texts) * 8 * 2 * 64 > FAR)
    in_any_batches(Slots(executor, 'pages', kv), all_texts, random.Random(0), check)
    assert any(seen) and 120 * 8 * 2 * 64 < FAR


@pytest.mark.parametrize('way', ['eager float64', 'cpu float32', 'cpu int8', 'gpu float32'])
def test_copies_run_first_and_in_order(way):
    """A text goes on in copies of its slots, of which some were copied twice."""
    executor = made(way, model_of('rope'))
    text, (source, middle, target) = texts(1, 30)[0], (400, 800, 40)
    slots = Slots(executor, 'cells')
    text.runs, text.n_writable = Runs([(0, source, 40)]), 40
    expected = torch.cat([slots.logits({text: 20})[0], slots.logits({text: 10})[0]])
    fork = Text(text.tokens)
    fork.runs, fork.n_writable, fork.n_computed = Runs([(0, target, 40)]), 40, 20
    copies = [(source, middle, 20), (middle, target, 20)]
    drawn = executor.execute_model(slots.batch({fork: 10}, prompt_logits=True, copies=copies))
    torch.testing.assert_close(drawn[0].logits, expected[20:], atol=1e-10, rtol=0)


def test_rows_that_are_wanted(monkeypatch):
    """Of a batch of parts of prompts, prompts that are scored, and prompts after which a token is drawn."""
    for way, chunk in itertools.product(('eager float64', 'cpu float32', 'gpu float32'), (256, 5)):
        monkeypatch.setattr(cpu, 'CHUNK', chunk)
        monkeypatch.setattr(GPUExecutor, 'most_sequences', chunk)
        model = model_of('llama')
        slots, (part, scored, drawing, kept) = Slots(made(way, model)), texts(4, 12)
        expected = judged(model, (part, scored, drawing, kept))
        batch = slots.batch({part: 9, scored: 12, drawing: 12, kept: 12}, [0, 1, 1, 1])
        batch = dataclasses.replace(batch, prompt_logits=[False, True, False, False],
                                    logprobs=[False, False, False, True])
        drawn = slots.executor.execute_model(batch)
        assert [each.tokens for each in drawn] == [[], *([int(row[-1].argmax())] for row in expected[1:])]
        assert drawn[0].logits is None and drawn[2].logits is None
        torch.testing.assert_close(drawn[1].logits.double(), expected[1], atol=1e-4, rtol=0)
        torch.testing.assert_close(drawn[3].logits.double(), expected[3, -1:], atol=1e-4, rtol=0)


@pytest.mark.parametrize('way, kind', [
    ('cpu float32', 'learned'), ('cpu int8', 'llama'), ('cpu bfloat16', 'rope window sinks'),
    ('eager float32', 'rope'), ('gpu float32', 'rope window sinks')])
def test_several_steps_in_a_call_are_those_of_single_ones(way, kind):
    """In any company, to the bit. A call ends behind a stop token. Each token is what `draw` makes of its logits."""
    executor = made(way, model_of(kind, 1))
    expected = []
    for i, how in enumerate(HOWS):
        text, slots, logits = Text([1, 2, 3, 4][:1 + i % 4], seed=i, **dict(temperature=1.0) | how), Slots(executor), []
        logits.append(slots.run({text: len(text.tokens)}, 1, logprobs=True)[0].logits)
        while len(text.tokens) < 38:
            logits.append(slots.run({text: 1}, 1, logprobs=True)[0].logits)
        n = len(text.tokens) - text.n_drawn
        settings = DrawSettings(VOCAB, seed=i, prompt=text.tokens[:n], **how)
        for number, row in enumerate(logits):
            settings.count(text.tokens[n:n + number])
            assert draw(row, [settings], [number]).tolist() == [text.tokens[n + number]]
        expected.append((n, text.tokens, logits))
    for seed in range(sizes(2, 10)):
        chooser, slots = random.Random(seed), Slots(executor, ('pages', 'cells')[seed % 2])
        some = [Text(text[:n], seed=i, **dict(temperature=1.0) | how)
                for i, (how, (n, text, _)) in enumerate(zip(HOWS, expected))]
        slots.run({text: len(text.tokens) for text in some}, 1)
        while left := {i: 38 - len(text.tokens) for i, text in enumerate(some) if len(text.tokens) < 38}:
            ids, kept = chooser.sample(list(left), chooser.randint(1, len(left))), chooser.random() < 0.7
            n_steps = [min(left[i], chooser.randint(1, 12)) for i in ids]
            drawn = slots.run(dict.fromkeys([some[i] for i in ids], 1), n_steps, logprobs=kept)
            over = min([k + 1 for i, of_text in zip(ids, drawn) for k, token in enumerate(of_text.tokens)
                        if token in some[i].settings.stop_ids], default=99)
            for i, n, of_text in zip(ids, n_steps, drawn):
                alone_or_not = 1 if way.startswith('eager') or kept and way.startswith('gpu') else min(n, over)
                assert len(of_text.tokens) == alone_or_not or way.startswith('gpu') and over < len(of_text.tokens) <= n
                assert some[i].tokens == expected[i][1][:len(some[i].tokens)], (i, n)
                if kept and not way.startswith('eager'):
                    first = some[i].n_drawn - len(of_text.tokens)
                    assert torch.equal(of_text.logits, torch.cat(expected[i][2][first:some[i].n_drawn]))


def test_a_call_ends_when_it_is_late_or_told_to():
    """Another thread runs during a call, and ends it."""
    executor = CPUExecutor(model_of('rope', block_size=4096, n_embd=384), threads=TWO)
    for how in (dict(until=0), dict(return_soon=np.ones(1, np.int64))):
        slots, some = Slots(executor), texts(3, 1)
        assert [len(each.tokens) for each in slots.run(dict.fromkeys(some, 1), 9, **how)] == [1, 1, 1]
    slots, text, return_soon = Slots(executor, 'rows'), texts(1, 1)[0], np.zeros(8, np.int64)
    text.runs, text.n_writable = Runs([(0, 0, N_SLOTS)]), N_SLOTS
    timer = threading.Thread(target=lambda: (time.sleep(0.02), return_soon.__setitem__(0, 1)))
    timer.start()
    drawn = slots.run({text: 1}, N_SLOTS, return_soon=return_soon)[0].tokens
    timer.join()
    assert len(drawn) < N_SLOTS


def computed(executor):
    """(slots, three texts of which 20 of 21 tokens are computed)"""
    slots, some = Slots(executor), texts(3, 21)
    slots.run(dict.fromkeys(some, 20))
    return slots, some


def changed(batch, tokens=None, positions=None, runs=None):
    """A batch whose sequence number 1 has another token, position or runs."""
    new = {name: getattr(batch, name).copy() for name in ('tokens', 'positions')} | dict(sequences=batch.sequences[:])
    for name, value in (('tokens', tokens), ('positions', positions)):
        if value is not None:
            new[name][1] = value
    if runs is not None:
        new['sequences'][1] = other = Text(batch.sequences[1].tokens)
        other.runs = Runs(runs)
    return dataclasses.replace(batch, **new)


BAD = {  # what is wrong with sequence number 1, what is said, and whether others than numba look for it
    'a token': (dict(tokens=VOCAB), 'vocabulary|token ids', True),
    'a negative token': (dict(tokens=-1), 'vocabulary|token ids', True),
    'a position beyond the context': (dict(positions=40), 'out of context', True),
    'a negative position': (dict(positions=-1), 'out of context', False),
    'a slot that is not there': (dict(runs=[(0, N_SLOTS - 32, 64)]), 'within', False),
    'a negative slot': (dict(runs=[(0, -1, 64)]), 'within', False),
    'an empty run': (dict(runs=[(0, 0, 0), (0, 32, 64)]), 'run', False),
    'a run of many': (dict(runs=[(0, 0, 2**62)]), 'within', False),
    'positions that go back': (dict(runs=[(8, 0, 16), (0, 32, 16)]), 'order of positions', False),
    'a position without a slot': (dict(runs=[(0, 0, 16), (17, 32, 16)]), 'slots? for', True),
    'runs that are too short': (dict(runs=[(0, 0, 20)]), 'slots? for', True),
    'no runs': (dict(runs=[(39, 0, 1)]), 'slots? for', True)}


@pytest.mark.parametrize('bad', BAD)
@pytest.mark.parametrize('way', ['eager float32', 'cpu float32', 'gpu float32'])
def test_a_bad_batch_is_refused_and_nothing_is_written(way, bad, monkeypatch):
    """One step, several, and a batch that is larger than what is computed at a time."""
    how, message, of_others = BAD[bad]
    if not way.startswith('cpu') and not of_others:
        return
    for chunk, batch_of in itertools.product((256, 1), (dict(n_steps=1), dict(n_steps=5), dict(prompt_logits=True))):
        monkeypatch.setattr(cpu, 'CHUNK', chunk)
        monkeypatch.setattr(GPUExecutor, 'most_sequences', chunk)
        slots, some = computed(made(way, model_of('learned')))
        before = [t.clone() for layer in slots.layers for t in layer.tensors()]
        good = slots.batch(dict.fromkeys(some, 1), **batch_of)
        with pytest.raises(Refused, match=message):
            slots.executor.execute_model(changed(good, **how))
        after = [t for layer in slots.layers for t in layer.tensors()]
        assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(before, after))
        slots.executor.execute_model(good)


def test_a_model_in_training_mode_is_refused():
    """Dropout would stay in the keys and values. Numba's executor has none."""
    for kind in EagerExecutor, lambda model: made('gpu float32', model):
        model = model_of('learned', dropout=0.5)
        executor = kind(model)
        executor.hold(make_layers(model, 8))
        model.train()
        batch = Slots(EagerExecutor(model_of('learned'))).batch({Text([1]): 1}, 1)
        with pytest.raises(Refused, match='model.eval'):
            executor.execute_model(batch)


@pytest.mark.parametrize('kind', ['bfloat16', 'float16', 'float64', 'int8'])
def test_storage_that_the_compiled_step_does_not_read(kind):
    """PyTorch's executor does. (12 channels of int8 share a scale.)"""
    model = model_of('learned')
    layers = [Layer(64, 4, 12, kind, kind)] * 2
    EagerExecutor(model).hold(layers)
    with pytest.raises(ValueError, match='does not read keys and values'):
        CPUExecutor(model).hold(layers)


@pytest.mark.parametrize('way', ['eager float32', 'gpu float32', 'cpu float32', 'cpu int4',
                                 *sizes([], ['cpu bfloat16', 'cpu int8'])])
@torch.no_grad()
def test_logits_that_are_not_numbers_and_their_repair(way):
    """In one step and in several. Nothing stays in what fills up vectors: n_embd is no multiple of their length."""
    model = model_of('learned', n_embd=20)
    executor, (text,) = made(way, model, 1), texts(1, 8)
    expected = Slots(executor).logits({Text(text.tokens): 8})[0]
    for name, p in model.named_parameters():
        for broken in (math.nan, math.inf):
            before = p.clone()
            p.view(-1)[0 if name != 'transformer.wte.weight' else 20 * text.tokens[3]] = broken
            executor.refresh()
            # of a query that is NaN, PyTorch's attention makes zeros, in the model as in its executor
            found = model(torch.tensor([text.tokens]))[0].sum()
            zeros = way == 'eager float32' and 'c_attn' in name and found.isfinite()
            for n_steps in (1, 3) if broken is math.nan and not zeros else ():
                own = Text(text.tokens[:8])
                slots = Slots(executor)
                with pytest.raises(NotNumbers, match='not numbers'):
                    slots.run({own: 8}, 1)
                    slots.run({own: 1}, n_steps)
            if broken is math.inf:
                Slots(executor).executor.execute_model(Slots(executor).batch({Text(text.tokens): 8}))
            p.copy_(before)
            executor.refresh()
            assert torch.equal(Slots(executor).logits({Text(text.tokens): 8})[0], expected), f"{broken} in {name}"


def test_a_division_by_zero_ends_no_thread():
    """The others would wait for it. A row of zeros has no norm if eps is 0, as one below float32 is in the kernel."""
    model = model_of('llama')
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
    for module in model.modules():
        if hasattr(module, 'eps'):
            module.eps = 1e-50
    with pytest.raises(NotNumbers):
        Slots(CPUExecutor(model, threads=2)).logits({Text([1, 2, 3]): 3})


@pytest.mark.parametrize('weights', WEIGHTS)
def test_a_nan_in_keys_or_values_reaches_the_logits_of_its_sequence_alone(weights):
    check_nan_shows(CPUExecutor(model_of('learned'), weights))


def check_nan_shows(executor):
    slots, some = computed(executor)
    slot = int(some[0].runs.table[0, 1]) + 3
    for stored in (slots.layers[0].v.data, slots.layers[-1].k.data):
        before = stored[1, slot, 2].item()
        stored[1, slot, 2] = math.nan
        with pytest.raises(NotNumbers):
            slots.executor.execute_model(slots.batch({some[0]: 1}, 1))
        slots.executor.execute_model(slots.batch({some[1]: 1}, 1))
        stored[1, slot, 2] = before
    slots.executor.execute_model(slots.batch({some[0]: 1}, 1))


def test_autocast():
    """An executor that is made under autocast stores keys and values in autocast's dtype."""
    model, (text,) = model_of('learned'), texts(1, 9)
    with torch.autocast('cpu', torch.bfloat16):
        executor = EagerExecutor(model)
        logits = Slots(executor).logits({text: 9})[0]
        rounded = CPUExecutor(model, 'int4')
    assert executor.type_kv == 'bfloat16' and logits.dtype is torch.bfloat16
    expected = judged(model, [text])[0]
    assert 1e-6 < (logits - expected).abs().max() / expected.abs().max() < 0.05
    as_before = CPUExecutor(model, 'int4')
    assert torch.equal(*(Slots(each).logits({Text(text.tokens): 9})[0] for each in (rounded, as_before)))


@pytest.mark.parametrize('default', [torch.float64, torch.bfloat16, 'meta'], ids=str)
def test_torchs_defaults_do_not_get_into_a_step(default):
    model, before = model_of('llama', n_embd=128), torch.get_default_dtype()
    executors = EagerExecutor(model), CPUExecutor(model), made('gpu float32', model)

    def logits():
        return [Slots(executor, kind=kind).run({Text([1, 2, 3], top_p=0.9): 3}, 1, logprobs=True)[0].logits
                for executor in executors for kind in ('', 'int8')]
    expected = logits()
    try:
        if default == 'meta':
            torch.set_default_device('meta')
        else:
            torch.set_default_dtype(default)
        found = logits()
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert all(map(torch.equal, found, expected))
