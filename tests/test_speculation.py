"""Drafts change no token and no generator: `generate` and `stream` with proposals against the same decoder without."""
import itertools
import math
import os
import signal

import numpy as np
import pytest
import torch
from cache_machine import MODELS, model_of
from conftest import sizes
from drafting import AnyDraft, Speculating
from hypothesis import given, settings
from hypothesis import strategies as st
from test_steps_ahead import HOWS, V, generators, states

import decode
import kvcache
from decode.cpu import CPUDecoder
from decode.drafts import ModelDraft, Ngrams
from decode.kernel import sampling as table
from decode.kernel.threads import n_cores
from decode.metadata import InputMetadata, NextTokens
from decode.speculative import Pace, SpeculativeDecoder
from generation import generate, stream
from serving.sampler import DRAW

DRAFTS = ['int4', 'int8', 'ngram', 'model', 'any']


def draft_of(kind, m):
    """A draft: for 'model' another model, with a context of 20 and a cache for two sequences more than rows."""
    if kind == 'model':
        small = model_of('rope', 7, n_layer=1, block_size=20)
        return ModelDraft(kvcache.make_cache(small, 'tuple', 6, decoder=CPUDecoder(small, threads=1)), 'another model')
    return AnyDraft(V) if kind == 'any' else kind


def run(m, decoder, prompts, n, kind='own', cache=None, **how):
    of = generators(kind, len(prompts) * how.get('num_samples', 1))
    where = dict(decoder=decoder) if cache is None else dict(cache=kvcache.make_cache(m, cache, 4, decoder=decoder))
    text = generate(m, prompts, n, use_cache=True, generator=of, **where, **how)
    return text, states(of)


def check_same(m, decoder, prompts, n, plain=None, **how):
    got, expected = run(m, decoder, prompts, n, **how), run(m, plain or CPUDecoder(m, threads=1), prompts, n, **how)
    assert got[0] == expected[0], how
    assert all(map(torch.equal, got[1], expected[1])), how


@pytest.mark.parametrize('model', MODELS)
def test_tokens_and_generators_are_those_without_drafts(model):
    """
    Greedy and drawn; one text and ragged rows; within the context, to its end and past it; with a stop token, which a
    draft may propose; in all caches.
    """
    m, number, n_rounds = model_of(model), list(MODELS).index(model), 0
    plain = CPUDecoder(m, threads=1)
    fulls = [dict()] if m.config.window else [dict(), dict(when_full='shift'), dict(when_full='shift', n_keep=3)]
    for draft, prompts in itertools.product(DRAFTS, ([[1, 2, 3]], [[1, 2, 3], [4], [5] * 12])):
        decoder = Speculating(m, draft_of(draft, m))
        cases = itertools.product(HOWS, (None, 4), ('torch', 'one', 'own'), fulls, (None, 'paged', 'unified'))
        for how, stop, kind, full, cache in itertools.islice(cases, number, None, sizes(61, 7)):
            check_same(m, decoder, prompts, 50, plain, kind=kind, cache=cache, stop_token=stop, **how, **full)
        n_rounds += sum(n > 0 for _, n, _, _ in decoder.rounds)
    assert n_rounds > 50


def test_weights_that_are_packed_in_fewer_bits():
    m = model_of('llama')
    for weights, draft in (('bfloat16', 'int8'), ('int8', 'int4')):
        check_same(m, Speculating(m, draft, weights), [[1], [2, 3]], 39, CPUDecoder(m, weights, 1), num_samples=2)


def test_threads_and_torch_threads():
    m = model_of('rope', n_embd=96)
    check_same(m, Speculating(m, 'int4', threads=n_cores()), [[1], [2, 3]], 60)


@pytest.mark.parametrize('how', HOWS, ids=str)
@pytest.mark.parametrize('kind', ['float32', 'model'])
def test_a_draft_that_is_the_model_is_always_right(how, kind):
    """Its proposals are drawn with the noise of their places, so that all of them are accepted."""
    m = model_of('rope', block_size=120)
    draft = kind if kind == 'float32' else ModelDraft(
        kvcache.make_cache(m, 'paged', 3, decoder=CPUDecoder(m, threads=1)), 'itself')
    decoder = Speculating(m, draft)
    decoder.k = 5
    check_same(m, decoder, [[1, 2], [3], [4]], 100, **how)
    assert len(decoder.rounds) > 15 and all(n_drawn == n + 1 for _, n, n_drawn, _ in decoder.rounds)


def test_a_stream_that_is_closed_leaves_its_generators_where_its_tokens_end():
    m = model_of('rope')
    plain, found = CPUDecoder(m, threads=1), []
    for n, decoder in itertools.product((1, 2, 5, 9, 30), (plain, Speculating(m))):
        of = generators('own', 2)
        tokens = stream(m, [[1], [2, 3]], 35, use_cache=True, decoder=decoder, generator=of)
        text = [each.flatten().tolist() for each in itertools.islice(tokens, n)]
        tokens.close()
        found.append((text, states(of)))
    for got, expected in zip(found[1::2], found[::2]):
        assert got[0] == expected[0] and all(map(torch.equal, got[1], expected[1]))


def test_rejection_sampling_with_shared_noise():
    """
    A distribution of 10, 60 and 30 % stays that over 100,000 draws with a draft that draws from 40, 30 and 30 %; and
    each token is the one that is drawn without a draft.
    """
    B, p, q = 1000, np.log([.1, .6, .3]), np.log([.4, .3, .3])
    logits, of_draft = (np.tile(each, (B, 1)).astype(np.float32) for each in (p, q))
    counts, n_accepted = np.zeros(3), 0
    for number in range(sizes(100, 100)):
        arrays = {
            table.ROWS: np.arange(B), table.SETTINGS: np.array([[1.0, 0, 1, 0, 0, 0, 1]] * B),
            table.SEEDS: np.arange(B) + B * number, table.NUMBERS: np.full(B, 7),
            table.CHANGES: np.zeros((B, table.N_CHANGES), np.int64), table.STOP_STARTS: np.zeros(B + 1, np.int64),
            table.STOPS: np.zeros(1, np.int64), table.SCRATCH: np.empty((1, table.N_SCRATCH, 3)),
            table.STOP_SOON: np.zeros(8, np.int64)}
        described = table.table_of(3, arrays)
        described[table.UNTIL] = 2**62
        alone, tokens = np.empty(B, np.int64), np.zeros((3, B), np.int64)
        DRAW.call(described.ctypes.data, logits.ctypes.data, alone.ctypes.data, 0, 1)
        arrays[table.NUMBERS] -= 1
        DRAW.call(described.ctypes.data, of_draft.ctypes.data, tokens[1].ctypes.data, 0, 1)
        proposed, chunk = tokens[1].copy(), np.stack([logits, of_draft], 1)  # behind the proposal any other logits
        table.VERIFY.call(described.ctypes.data, chunk.ctypes.data, tokens.ctypes.data, 2, table.TAKE_BACK)
        assert (tokens[1] == alone).all()
        assert ((tokens[2] >= 0) == (proposed == alone)).all() and (arrays[table.NUMBERS] == 8 + (tokens[2] >= 0)).all()
        counts += np.bincount(tokens[1], minlength=3)
        n_accepted += (proposed == alone).sum()
    n = counts.sum()
    assert abs(counts / n - [.1, .6, .3]).max() < 4 * math.sqrt(.25 / n)
    assert n_accepted / n > .6  # of draws that share no noise .1 * .4 + .6 * .3 + .3 * .3 = .31 would be


@pytest.mark.parametrize('kind', ['tuple', 'paged', 'unified', 'streams'])
@pytest.mark.parametrize('model', ['rope window sinks', 'learned window', 'rope'])
def test_a_sequence_goes_back_behind_proposals_that_were_rejected(model, kind):
    """
    In a ring, proposals lie over positions that the window has passed. The cache knows it: it goes back to a length and
    computes what a new sequence has, or refuses to.
    """
    m, n_back = model_of(model), 0
    decoder, plain = Speculating(m, AnyDraft(V)), CPUDecoder(m, threads=1)
    decoder.k = 4
    for length in range(8, 30, sizes(5, 1)):
        cache = kvcache.make_cache(m, kind, 2, decoder=decoder)
        text = np.random.default_rng(length).integers(0, V, length).tolist()
        handle = cache.new()
        cache.step([handle], [0], [torch.tensor(text)])
        tokens = steps_of(cache, handle, text, 6)
        text += tokens[:-1]
        for n in range(len(text) - 1, 0, -1):
            try:
                cache.truncate(handle, n)
            except ValueError:
                assert m.config.window
                break
            logits = cache.step([handle], [n], [torch.tensor(text[n:n + 1])])
            assert torch.equal(logits, plain(torch.tensor([text[:n + 1]]), None)[0][0])
            n_back += 1
    assert n_back > 4 and any(n_drawn < n + 1 for _, n, n_drawn, _ in decoder.rounds)


def steps_of(cache, handle, text, n, until=2**62, draw=table.DRAW):
    """The greedy tokens of one call of up to n steps, behind the newest token of a text in a cache."""
    from decode.ahead import StepsAhead
    ahead = StepsAhead(cache, 0, None, None, None, None, None)
    newest = np.array([[5]])
    described, arrays = ahead.table(1, [False], None)
    described[table.UNTIL] = until
    tokens = np.empty((n + 1, 1), np.int64)
    tokens[0] = newest
    steps = NextTokens(draw, described, tokens, arrays, until=until, texts=[[*text, 5]])
    cache.decode_steps([handle], steps)
    return tokens[:steps.n_drawn + 1, 0].tolist()


@pytest.mark.parametrize('page_size', [1, 4])
def test_a_sibling_that_shares_blocks_sees_no_proposal(page_size):
    m = model_of('llama')
    decoder, plain = Speculating(m, AnyDraft(V)), CPUDecoder(m, threads=1)
    decoder.k = 5
    cache = kvcache.paged.PagedCache(m, 60, page_size, decoder=decoder)
    for length in range(1, 14):
        text, handle = list(range(length)), cache.new()
        cache.step([handle], [0], [torch.tensor(text)])
        sibling = cache.fork(handle)
        tokens = steps_of(cache, handle, text, 7)
        for of, new in ((sibling, 9), (handle, tokens[-1])):
            own = text if of == sibling else text + tokens[:-1]
            assert cache.length(of) == len(own)
            logits = cache.step([of], [len(own)], [torch.tensor([new])])
            assert torch.equal(logits, plain(torch.tensor([[*own, new]]), None)[0][0])
        cache.free(handle)
        cache.free(sibling)


def test_weights_that_change_between_draft_and_verification():
    """Packed weights stay as they are until a sequence begins; a draft that has others changes no token."""
    m, then = model_of('rope'), model_of('rope', 3)
    expected = run(m, CPUDecoder(m, threads=1), [[1, 2]], 38)
    changed = []

    def change(rounds):
        if not changed:
            changed.append(m.transformer.h[0].mlp.c_fc.weight.copy_(then.transformer.h[0].mlp.c_fc.weight))
    decoder = Speculating(m, AnyDraft(V, change))
    got = run(m, decoder, [[1, 2]], 38)
    assert changed and got[0] == expected[0]
    check_same(m, decoder, [[1, 2]], 38)
    packed = Speculating(m, 'int4')
    with torch.no_grad():
        m.transformer.h[0].mlp.c_fc.weight.mul_(2)
    packed.notice_changes()
    assert packed.version == packed.draft.decoder.version  # both were packed again
    check_same(m, packed, [[1, 2]], 38)


@pytest.mark.parametrize('error', [KeyboardInterrupt, ValueError])
def test_an_interrupt_and_an_error_between_draft_and_verification(error):
    """After Ctrl-C a sequence has the tokens of the call, after an error those of before; both go on."""
    m, sent = model_of('rope window sinks'), []

    def send(rounds):
        if not sent:
            sent.append(1)
            if error is ValueError:
                raise ValueError("no draft")
            os.kill(os.getpid(), signal.SIGINT)
    decoder, plain, text = Speculating(m, AnyDraft(V, send)), CPUDecoder(m, threads=1), [1, 2, 3, 4, 5, 6, 7, 8]
    decoder.k = 3
    cache = kvcache.make_cache(m, 'tuple', 1, decoder=decoder)
    handle = cache.new()
    cache.step([handle], [0], [torch.tensor(text)])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(error):
            steps_of(cache, handle, text, 6)
    finally:
        signal.signal(signal.SIGINT, before)
    n = cache.length(handle)
    assert n == len(text) if error is ValueError else n > len(text)
    cache.truncate(handle, len(text))
    logits = cache.step([handle], [len(text)], [torch.tensor([5])])
    assert torch.equal(logits, plain(torch.tensor([[*text, 5]]), None)[0][0])
    with pytest.raises(error):
        sent.clear()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            generate(m, [[1]], 30, use_cache=True, decoder=decoder)
        finally:
            signal.signal(signal.SIGINT, before)
    check_same(m, decoder, [[1]], 38)


def test_execute_model_may_be_called_again_for_rows_that_are_left():
    m = model_of('learned')
    itself = ModelDraft(kvcache.make_cache(m, 'tuple', 1, decoder=CPUDecoder(m, threads=1)), 'itself')
    decoder, plain = Speculating(m, itself), CPUDecoder(m, threads=1)
    cache = kvcache.make_cache(m, 'tuple', 1, decoder=decoder)
    handle = cache.new()
    cache.step([handle], [0], [torch.tensor([1, 2])])
    ahead = plain.steps_ahead(cache, 0, None, None, None, None, None)
    described, arrays = ahead.table(1, [False], None)
    described[table.UNTIL] = 2**62
    steps = NextTokens(table.DRAW, described, np.full((31, 1), 3), arrays, texts=[[1, 2, 3]])
    record = cache.records[handle]
    while steps.n_left:
        steps.n_steps = min(7, steps.n_left)
        position = np.array([2 + steps.n_drawn])
        logits = decoder.execute_model(torch.from_numpy(steps.tokens[steps.n_drawn]), position, cache.arrays,
                                       InputMetadata([1], [record.runs], None, steps))
    text = [1, 2, *steps.tokens[:, 0].tolist()]
    assert text == generate(m, [[1, 2, 3]], 30, 0, use_cache=True, decoder=plain)[0]
    rounds = [(n, n_drawn) for _, n, n_drawn, _ in decoder.rounds]
    assert len(rounds) > 4 and all(n and n_drawn == n + 1 for n, n_drawn in rounds)
    assert torch.equal(logits, plain(torch.tensor([text[:-1]]), None)[0][0])


def test_a_proposal_behind_which_logits_are_not_numbers():
    """Nobody asks for these if the proposal is rejected; a text in which the token comes is refused as ever."""
    m = model_of('qwen window')  # whose lm_head has weights of its own
    text = generate(m, [[1, 2, 3]], 30, 0, use_cache=True, decoder=CPUDecoder(m, threads=1))[0]
    other = next(token for token in range(V) if token not in text)
    proposed = AnyDraft(V)
    proposed.random = type('Always', (), dict(integers=lambda *_: token))
    for token in (other, text[15]):
        with torch.no_grad():
            m.transformer.wte.weight[token] = math.nan
        decoder, plain = Speculating(m, proposed), CPUDecoder(m, threads=1)
        if token == other:
            check_same(m, decoder, [[1, 2, 3]], 30, plain, temperature=0)
            assert decoder.rounds
        else:
            for each in (decoder, plain):
                with pytest.raises(ValueError, match='not numbers'):
                    run(m, each, [[1, 2, 3]], 30, temperature=0)


@pytest.mark.parametrize('draft', ['float32', 'model'])
def test_proposals_are_made_whenever_a_call_is_to_end(draft):
    """A call that is late ends behind a round, which has all of its proposals."""
    m = model_of('rope')
    decoder = Speculating(m, draft if draft == 'float32' else ModelDraft(
        kvcache.make_cache(m, 'tuple', 3, decoder=CPUDecoder(m, threads=1)), 'itself'))
    decoder.k = 4
    cache = kvcache.make_cache(m, 'tuple', 1, decoder=decoder)
    handle = cache.new()
    cache.step([handle], [0], [torch.tensor([1, 2])])
    assert len(steps_of(cache, handle, [1, 2], 20, until=1)) == 1 + 5
    assert [n for _, n, _, _ in decoder.rounds] == [4]


def test_rounds_take_the_threads_that_were_asked_for():
    if n_cores() < 2:
        pytest.skip("takes two cores")
    m, taken = model_of('rope'), []
    decoder = Speculating(m, AnyDraft(V, lambda rounds: taken.append(rounds.n_threads)), threads=2)
    run(m, decoder, [[1]], 20)
    assert {*taken} == {2}


def test_another_function_that_draws_is_called_without_drafts():
    m, other = model_of('rope'), table.CFunction(table.draw_tokens)
    decoder = Speculating(m, AnyDraft(V))
    found = []
    for draw in (table.DRAW, other):
        cache = kvcache.make_cache(m, 'tuple', 1, decoder=decoder)
        handle, n_rounds = cache.new(), len(decoder.rounds)
        cache.step([handle], [0], [torch.tensor([1, 2])])
        found.append(steps_of(cache, handle, [1, 2], 20, draw=draw)[:10])
        assert (len(decoder.rounds) > n_rounds) is (draw is table.DRAW)
    n = min(map(len, found))
    assert n > 1 and found[0][:n] == found[1][:n]


# who proposes

@settings(max_examples=sizes(60, 1000), deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 12), st.integers(1, 6), st.integers(0, 5))
def test_ngrams_are_those_of_a_search(text, n_drawn, k, n_lost):
    """Also as the text grows by parts that were looked at before, and after some of what was drawn is given up."""
    drawn, ngrams = [each % 3 for each in text[::-1][:n_drawn]], Ngrams(text)

    def searched(tokens):
        for size in (4, 3, 2):
            for end in range(len(tokens) - 1, size - 1, -1):
                if len(tokens) > size and tokens[end - size:end] == tokens[-size:]:
                    return tokens[end:end + k]
        return []
    for n in range(len(drawn) + 1):
        assert ngrams.after(drawn[:n], k) == searched(text + drawn[:n])
    kept = drawn[:max(0, len(drawn) - n_lost)]
    text += [*kept, 1, 2]
    assert ngrams.after([], k) == searched(text)


def test_a_draft_whose_cache_refuses_a_step_proposes_nothing():
    """More texts than it has sequences; no room; no texts; weights that are broken for one of the tokens."""
    m, small, prompts = model_of('rope', block_size=100), model_of('rope', 7, n_layer=1), [[1, 2, 3], [4, 5], [6, 7]]
    broken, reader = model_of('rope', 7, n_layer=1, tied=False), CPUDecoder(small, threads=1)
    with torch.no_grad():
        broken.transformer.wte.weight[7] = math.nan
    for cache, some in ((kvcache.make_cache(small, 'tuple', 2, decoder=reader), False),
                        (kvcache.paged.PagedCache(small, 7, 4, decoder=reader), True),
                        (kvcache.make_cache(broken, 'tuple', 3, decoder=CPUDecoder(broken, threads=1)), True)):
        decoder = Speculating(m, ModelDraft(cache, 'another model'))
        check_same(m, decoder, prompts, 60)
        numbers = [n for _, n, _, _ in decoder.rounds]
        assert 0 in numbers and any(numbers) is some
        assert decoder.draft.propose(np.zeros((3, 1), np.int64), Nobody()) == 0


class Nobody:
    """The `Rounds` of a call without texts."""
    data = np.zeros(table.N_TABLE, np.int64)
    new = NextTokens(table.DRAW, data, np.zeros((2, 1), np.int64))


def test_auto_takes_int4_for_large_models_and_few_sequences(monkeypatch):
    m = model_of('rope')
    assert type(decode.best(m, 1, speculate='auto')) is CPUDecoder
    monkeypatch.setattr(decode, 'DRAFTED_BYTES', 0)
    chosen = decode.best(m, 1, speculate='auto')
    assert type(chosen) is SpeculativeDecoder and chosen.draft.name == 'int4 weights' and 'int4' in chosen.name
    assert type(decode.best(m, 1)) is type(decode.best(m, 9, speculate='auto')) is CPUDecoder
    assert type(decode.best(m, 1, 'int8', speculate='auto')) is CPUDecoder
    assert decode.best(m, 1, 'int8', speculate='int4').draft.name == 'int4 weights'
    for how, words in ((dict(speculate='int9'), 'speculate must be auto, off, int4, int8, ngram'),
                       (dict(speculate='int8', weights='int8'), 'more bits'),
                       (dict(speculate='ngram', name='eager'), 'for the cpu decoder: leave decoder=eager out'),
                       (dict(speculate='off', draft=draft_of('model', m)), 'a draft takes speculate=auto')):
        with pytest.raises(ValueError, match=words):
            decode.best(m, 1, **how)
    other = model_of('rope', vocab_size=V + 1)
    with pytest.raises(ValueError, match=f"has a vocabulary of {V}, and the model one of {V + 1}"):
        decode.best(other, 1, speculate='auto', draft=draft_of('model', m))


# how many

class Machine:
    """Time that passes as given: ns of a plain step, of a proposal, and of a chunk of n tokens."""

    def __init__(self, plain, draft, chunk, share, seed=0):
        self.plain, self.draft, self.chunk, self.share = plain, draft, chunk, share
        self.random, self.ns = np.random.default_rng(seed), 0

    def run(self, n_tokens, pace):
        """The nanoseconds of so many tokens; steps are called 16 at a time."""
        done = 0
        while done < n_tokens:
            if not pace.k or pace.times_plain:
                n = 1 if pace.k else min(16, n_tokens - done)
                ns = n * self.plain * self.random.uniform(.95, 1.05)
                pace.record_plain(ns, n)
            else:
                k, n = pace.k, 1
                while n <= k and self.random.random() < self.share:
                    n += 1
                ns_draft, ns = k * self.draft, self.chunk(k + 1) * self.random.uniform(.95, 1.05)
                pace.record_round(k, k, n, ns_draft, ns)
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
    def chunk(n):
        return 1e6 + (n - 1) * 1e5
    machine, pace = Machine(1e6, 1e5, chunk, .95), Pace()
    machine.run(1000, pace)
    assert pace.k > 4
    machine.share = .02
    machine.run(300, pace)
    assert pace.k == 0
    machine.share = .95
    machine.run(4000, pace)
    assert pace.k > 4


def test_the_cache_of_another_model_grows_with_the_texts(monkeypatch):
    m = model_of('rope', block_size=700)
    sizes, reader, made = [], CPUDecoder(m, threads=1), kvcache.make_cache

    def make_cache(*args):
        sizes.append(args[-1])
        return made(*args)
    monkeypatch.setattr(kvcache, 'make_cache', make_cache)
    draft = ModelDraft(kvcache.make_cache(m, 'tuple', 2, 0, reader, 16), 'itself')
    decoder = Speculating(m, draft)
    decoder.k = 5
    check_same(m, decoder, [[1, 2], [3]], 600)
    assert sizes[0] == 16 and sizes[-1] >= 600 and len(sizes) <= 8
    assert all(n_drawn == n + 1 for _, n, n_drawn, _ in decoder.rounds)  # it is always right, also in a new cache
    whole = made(m, 'tuple', 2, decoder=reader)
    assert draft.cache.nbytes() <= whole.nbytes()


def test_a_draft_that_has_no_memory_to_grow_proposes_nothing():
    def refused(n):
        raise ValueError('no memory')
    m = model_of('rope', block_size=200)
    cache = kvcache.make_cache(m, 'tuple', 2, decoder=CPUDecoder(m, threads=1), n_positions=64)
    cache.of_positions = refused
    decoder = Speculating(m, ModelDraft(cache, 'itself'))
    check_same(m, decoder, [[1, 2]], 150)
    n_offered = [n for _, n, _, _ in decoder.rounds]
    assert n_offered[0] > 0 == n_offered[-1]
