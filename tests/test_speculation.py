"""Drafts change no token and no logits: an engine with proposals against one with the same executor without."""
import gc
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import sizes
from drafting import AnyDraft, drafting, given, model_draft
from hypothesis import given as examples_of
from hypothesis import settings
from hypothesis import strategies as st
from tiny_models import MODELS, VOCAB, model_of

import decode
from decode.batch import Batch, Refused
from decode.cpu import CPUExecutor
from decode.drafts import Ngrams
from decode.draw import DrawSettings
from decode.eager import EagerExecutor
from decode.kernel.threads import n_cores
from decode.speculative import DRAFTED_SEQUENCES, Drafting, Pace
from engine import Engine, Sequence
from kvcache import PagePool

DRAFTS = ['int4', 'int8', 'ngram', 'model', 'any']
REQUESTS = [  # prompts that begin alike, too; all settings, and numbers of tokens that differ
    ([1, 2, 3], 39, dict(temperature=0.0, logprobs=True)), ([1, 2, 3, 4, 5, 6, 7], 25, dict(n=2, seed=3)),
    ([4], 33, dict(top_k=5, top_p=0.7, min_p=0.02, logprobs=True)),
    ([5] * 12, 21, dict(frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3, logprobs=True)),
    ([1, 2, 3, 4, 5, 6, 8], 30, dict(logit_bias={3: 4.0, 7: -9.0}, seed=9)),
    ([9, 8], 30, dict(min_tokens=9, stop_ids=[1, 2, 3, 4, 5, 6], seed=2)),
    ([7], 28, dict(stop_ids=[1, 6], temperature=1.5))]


def engine_of(model, executor=None, n_pages=80, page_size=4, **how):
    pool = PagePool(n_pages, page_size, model.config.window, model.config.n_sink)
    return Engine(model, executor or CPUExecutor(model, threads=1), pool, **how)


def draft_of(kind):
    """A draft: for 'model' another model, whose context is shorter."""
    if kind == 'model':
        return model_draft(model_of('rope', 7, n_layer=1, block_size=20))
    return AnyDraft() if kind == 'any' else kind


@pytest.mark.parametrize('number, kind, draft', [
    (i, *each) for i, each in enumerate(itertools.product(MODELS, DRAFTS))][::sizes(2, 1)])
def test_sequences_are_given_what_they_are_given_without_drafts(number, kind, draft):
    """In company and alone, preempted, in remembered pages, when full; also in fewer bits."""
    weights, how = (('float32', {}), ('float32', {}), ('bfloat16', {}), ('int8', dict(kv_bits=8)))[number // 2 % 4]
    m, window = model_of(kind, **dict(head_dim=32) if how else {}), MODELS[kind].get('window')
    executor, rounds = drafting(m, draft_of(draft), weights)
    long = [] if window else [([1, 2, 3], 60, dict(when_full='shift', n_keep=2, seed=4))]
    for requests, n_pages in ((REQUESTS + long, 120), (REQUESTS, 30), (REQUESTS[sizes(4, 0):][:sizes(1, 9)], 20)):
        engines = [engine_of(m, each, n_pages, **how) for each in (executor, CPUExecutor(m, weights, 1))]
        for _ in range(2):
            got, expected = (given(engine, requests) for engine in engines)
            assert got == expected
        assert all(engine.pool.n_free == engine.pool.n_pages for engine in engines)
        assert n_pages != 30 or window or min(engine.scheduler.n_preempted for engine in engines) > 0
    assert len(rounds()) > 30 and (draft == 'ngram' or any(n for n, _, _ in rounds()))


@pytest.mark.parametrize('make', [lambda m: Drafting(CPUExecutor(m), 'int4'), CPUExecutor, EagerExecutor])
def test_an_engine_that_is_gone_keeps_no_keys_and_values_and_nobody_reads_them(make):
    m = model_of('rope')
    executor = make(m)
    engine = Engine(m, executor)
    if type(executor) is Drafting:
        executor.draft.pack()  # it holds the slots of the target too
    s, = engine.add([1, 2, 3], 9, most_ahead=1)
    engine.step()
    address = engine.layers[0].k.data.untyped_storage().data_ptr()
    del engine
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.layout is torch.strided]
    kept = [t for t in tensors if t.untyped_storage().data_ptr() == address]
    assert not kept and not executor.layers
    with pytest.raises(Refused, match='holds no slots'):
        executor.execute_model(Batch([s], [1], np.array([1]), np.array([3]), np.array([1]), [False], [False]))


@pytest.mark.parametrize('kind', ['float32', 'model'])
def test_a_draft_that_is_the_model_is_always_right(kind, monkeypatch):
    """Also where a call is late, after changed weights or an interrupted step of the draft, and in another engine."""
    m = model_of('rope', block_size=120)
    monkeypatch.setattr('decode.cpu.CPUExecutor', lambda model, _, threads=1: CPUExecutor(model, threads=threads))
    executor, rounds = drafting(m, 'float32' if kind == 'float32' else model_draft(m, 250), k=5)
    engine = engine_of(m, executor, 250)
    engine.longest_call = 0
    requests = [(prompt, 90, how | dict(logprobs=False)) for prompt, _, how in REQUESTS]

    def check(engine, requests=requests):
        n_before, got = len(rounds()), given(engine, requests)
        assert got == given(engine_of(m, n_pages=250), requests)
        assert len(rounds()) > n_before + 10 and all(n_drawn == n + 1 for n, n_drawn, ended in rounds() if not ended)
    check(engine)
    with torch.no_grad():
        m.transformer.h[0].mlp.c_fc.weight.mul_(2)
    check(engine)
    drawing, failed = executor.draft.executor.execute_model, []

    def fails(batch):
        if len(rounds()) - n_before == 7 and batch.decodes and not failed:
            failed.append(drawing(batch))
            raise KeyboardInterrupt
        return drawing(batch)
    n_before, executor.draft.executor.execute_model = len(rounds()), fails
    prompt, n, how = requests[0]
    s, = engine.add(prompt, n, **how)
    with pytest.raises(KeyboardInterrupt):
        while not s.ended:
            engine.step()
    assert failed and not s.ended
    engine.end(s, 'abort')
    check(engine)
    check(engine_of(m, executor, 250), requests[::-1])  # so that other slots have other keys


@pytest.mark.parametrize('error', [KeyboardInterrupt, ValueError])
def test_an_interrupt_and_an_error_in_a_draft(error):
    """The engine computes all again; a sequence whose step has failed twice ends with the error."""
    m, left = model_of('rope window sinks'), [1]

    def fail(n_threads):
        if left:
            left.pop()
            raise error('no draft')
    executor, rounds = drafting(m, AnyDraft(then=fail))
    engine, expected = engine_of(m, executor), given(engine_of(m), REQUESTS)
    sequences = [s for prompt, n, how in REQUESTS for s in engine.add(prompt, n, **how)]
    while any(not s.ended for s in sequences):
        try:
            engine.step()
        except KeyboardInterrupt:
            assert error is KeyboardInterrupt
    assert [s.tokens for s in sequences] == [tokens for tokens, _, _ in expected] and rounds() and not left


def test_a_proposal_behind_which_logits_are_not_numbers():
    """Nobody asks for these if the proposal is rejected. A text in which the token comes ends with an error."""
    m = model_of('qwen window')  # whose lm_head has weights of its own
    (text, _, _), = given(engine_of(m), [([1, 2, 3], 30, dict(temperature=0))])
    for token in (next(token for token in range(VOCAB) if token not in text), text[15]):
        with torch.no_grad():
            m.transformer.wte.weight[token] = math.nan
        executor, rounds = drafting(m, AnyDraft(token))
        (tokens, ended, _), = given(engine_of(m, executor), [([1, 2, 3], 30, dict(temperature=0))])
        assert tokens == text and ended == 'length' and rounds() if token not in text else ended == 'error'


def test_who_decodes_without_drafts(monkeypatch):
    """More sequences than are worth it, prompts, plain steps by the pace; with as many threads as were asked for."""
    m, taken = model_of('rope'), []
    executor, rounds = drafting(m, AnyDraft(then=taken.append), k=3, threads=n_cores())
    many = [([i], 30, {}) for i in range(DRAFTED_SEQUENCES + 1)]
    assert given(engine_of(m, executor, 120), many) == given(engine_of(m, n_pages=120), many) and not rounds()
    engine = engine_of(m, executor)
    assert len(executor.layers) == 2 and executor.layers is executor.target.layers
    engine.longest_call = 10
    s, = engine.add([1, 2, 3], 38)
    pace, n_drawn = executor.paces[1], []
    for pace.fixed, pace.is_plain_next in ((3, False), (3, True), (3, False), (0, False)):
        engine.step()
        n_drawn.append(s.n_drawn - sum(n_drawn))
    assert n_drawn[0] == n_drawn[1] == 1 and 1 <= n_drawn[2] <= 4 and s.ended
    assert len(rounds()) == 1 and {*taken} == {n_cores()}


def test_another_model_proposes_what_it_does_with_texts_read_anew(monkeypatch):
    """What was read is not read again, but after an interrupt. For texts that fill the context nothing is proposed."""
    m, random, some, n_read = model_of('rope', 7, n_layer=1, block_size=400), np.random.default_rng(0), [], []
    draft, anew = model_draft(m, 400), model_draft(m, 400)
    execute_model = draft.executor.execute_model
    draft.executor.execute_model = lambda batch: n_read.extend(batch.counts) or execute_model(batch)
    texts = [Sequence(REQUESTS[i][0], DrawSettings(VOCAB, seed=i), 400, 400) for i in (0, 1, 1, 3)]

    def interrupted(*args):
        raise KeyboardInterrupt
    for number in range(60):
        if number % 4 == 0:
            some = [texts[i] for i in random.permutation(4)[:random.integers(1, 5)]]
        batch = SimpleNamespace(sequences=some, tokens=np.array([s.tokens[-1] for s in some]))
        if number % 10 == 5:
            with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                patched.setattr(PagePool, 'write_runs', interrupted)
                draft.propose(batch, 30, 1)  # which takes new pages
        anew.refresh()
        n_read.clear()
        proposals = draft.propose(batch, 4, 1)
        assert max(n_read) <= 3 or number % 4 == 0 or number % 10 == 5  # the last proposal, and two of those others
        assert (proposals == anew.propose(batch, 4, 1)).all() and proposals.shape == (4, len(some))
        for s, column in zip(some, proposals.T):
            s.tokens += column[:random.integers(5)].tolist() + random.integers(0, VOCAB, random.integers(1, 4)).tolist()
    short = model_draft(model_of('rope', 7, n_layer=1, block_size=20))
    batch = SimpleNamespace(sequences=[Sequence([1] * 12, DrawSettings(VOCAB), 9, 400)], tokens=np.array([1]))
    assert [len(short.propose(batch, k, 1)) for k in (9, 10)] == [9, 0]


@pytest.mark.parametrize('ns, is_packed', [(10**15, False), (0, True)])
def test_fewer_bits_are_packed_once_plain_steps_have_taken_as_long(ns, is_packed):
    m = model_of('rope')
    executor = Drafting(CPUExecutor(m, threads=1), 'int8')
    engine, executor.target.ns_packing = engine_of(m, executor), ns
    engine.longest_call = 0
    assert given(engine, REQUESTS[:1]) == given(engine_of(m), REQUESTS[:1])
    assert bool(executor.draft.executor) == is_packed and executor.draft.cost == (0 if is_packed else 2 * ns)
    executor.refresh()
    assert given(engine_of(m, executor), REQUESTS) == given(engine_of(m), REQUESTS)  # over other slots


def test_fewer_bits_are_packed_at_once_if_weights_are_read_for_it():
    """Later the file may be gone."""
    m = model_of('qwen window')
    w, m.lm_head.weight = m.lm_head.weight, torch.nn.Parameter(m.lm_head.weight.detach().to('meta'))
    m.lm_head.weight.read = lambda: w
    executor = Drafting(CPUExecutor(m, threads=1), 'int8')
    del m.lm_head.weight.read
    executor.paces = drafting(model_of('rope'), 'ngram')[0].paces  # which make rounds
    assert given(engine_of(m, executor), REQUESTS) == given(engine_of(model_of('qwen window')), REQUESTS)


def test_a_draft_without_room_proposes_nothing():
    """Too few pages for these texts, and weights that are broken for one of the tokens. It goes on with other texts."""
    m, broken = model_of('rope', block_size=100), model_of('rope', 7, n_layer=1, tied=False)
    with torch.no_grad():
        broken.transformer.wte.weight[28] = math.nan
    for draft in (model_draft(model_of('rope', 7, n_layer=1), 12), model_draft(broken)):
        executor, rounds = drafting(m, draft)
        engine, plain = engine_of(m, executor, 120), engine_of(m, None, 120)
        assert given(engine, REQUESTS) == given(plain, REQUESTS) and 0 in [n for n, _, _ in rounds()]
        executor.paces.clear()
        alone = [([4], 12, dict(temperature=0))]
        assert given(engine, alone) == given(plain, alone) and any(n for n, _, _ in rounds())


def test_auto_takes_fewer_bits_for_large_models_and_few_sequences(monkeypatch):
    m = model_of('rope')
    assert type(decode.best(m, 1, speculate='auto')) is CPUExecutor
    monkeypatch.setattr(decode, 'DRAFTED_BYTES', 0)
    chosen = decode.best(m, 1, speculate='auto')
    assert type(chosen) is Drafting and chosen.draft.name == 'int8 weights' and 'drafts by int8' in chosen.name
    assert decode.best(m, 1, 'bfloat16', speculate='auto').draft.name == 'int4 weights'
    assert type(decode.best(m, 1)) is type(decode.best(m, 9, speculate='auto')) is CPUExecutor
    assert type(decode.best(m, 1, 'int8', speculate='auto')) is CPUExecutor
    assert decode.best(m, 1, 'int8', speculate='int4').draft.name == 'int4 weights'
    with pytest.raises(ValueError, match='more bits'):
        decode.best(m, 1, 'int8', speculate='int8')
    with pytest.raises(ValueError, match=f"has a vocabulary of {VOCAB}, and the model one of {VOCAB + 1}"):
        decode.best(model_of('rope', vocab_size=VOCAB + 1), 1, speculate='auto', draft=draft_of('model'))


@settings(max_examples=sizes(60, 1000), deadline=None)
@examples_of(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=4), st.integers(1, 6))
def test_ngrams_are_those_of_a_search(parts, k):
    """Also as the text grows by parts that were looked at before."""
    def searched(tokens):
        for size in (4, 3, 2):
            for end in range(len(tokens) - 1, size - 1, -1):
                if len(tokens) > size and tokens[end - size:end] == tokens[-size:]:
                    return tokens[end:end + k]
        return []
    text = []
    ngrams = Ngrams(text)
    for part in parts:
        text += part
        assert ngrams.after(k) == searched(text)


class Machine:
    """Time that passes as given: ns of a plain step, of a proposal, and of a chunk of n tokens."""

    def __init__(self, plain, draft, chunk, share, seed=0):
        self.plain, self.draft, self.chunk, self.share = plain, draft, chunk, share
        self.random, self.ns = np.random.default_rng(seed), 0

    def run(self, n_tokens, pace):
        """The nanoseconds of so many tokens; steps are called 16 at a time."""
        done = 0
        while done < n_tokens:
            if not pace.k or pace.is_plain_next:
                n = 1 if pace.k else min(16, n_tokens - done)
                ns = n * self.plain * self.random.uniform(.95, 1.05)
                pace.record_plain(ns, n)
            else:
                k, n = pace.k, 1
                while n <= k and self.random.random() < self.share:
                    n += 1
                ns_draft, ns = k * self.draft, self.chunk(k + 1) * self.random.uniform(.95, 1.05)
                pace.record_round(k, n, ns_draft, ns)
                ns += ns_draft
            self.ns, done = self.ns + ns, done + n
        return self.ns


@pytest.mark.parametrize('share', [0, .3, .6, .8, .95])
@pytest.mark.parametrize('plain, draft, of_row', [(1e6, 2e5, 1e5), (1e6, 9e5, 2e5), (3e4, 3e4, 9e4), (1e7, 0, 3e6)])
def test_the_pace_is_never_much_slower_than_plain_steps_and_near_the_best(plain, draft, of_row, share):
    def chunk(n):
        return plain + (n - 1) * of_row + 5e4
    n, pace = 6000, Pace()
    ns = Machine(plain, draft, chunk, share).run(n, pace)
    best = min((k * draft + chunk(k + 1)) / sum(share**j for j in range(k + 1)) for k in range(1, 16))
    assert ns < n * plain / .97
    assert ns < 1.12 * n * min(plain, best)


def test_the_pace_notices_when_proposals_become_worse():
    machine, pace = Machine(1e6, 1e5, lambda n: 1e6 + (n - 1) * 1e5, .95), Pace()
    for share, n_tokens, proposes in ((.95, 1000, True), (.02, 300, False), (.95, 4000, True)):
        machine.share = share
        machine.run(n_tokens, pace)
        assert pace.k > 4 if proposes else pace.k == 0
