"""
`generate` and `stream` make several steps in one call of the CPU decoder: the tokens and the states of the generators
are those of one step at a time.
"""
import itertools

import pytest
import torch
from cache_machine import MODELS, model_of
from conftest import sizes

import kvcache
from decode import ahead
from decode.cpu import CPUDecoder
from generation import generate, stream

V = 29
HOWS = [dict(temperature=0), dict(), dict(temperature=0.7, top_k=3), dict(top_p=0.6), dict(temperature=1.4, top_k=9,
                                                                                          top_p=0.9)]


@pytest.fixture
def one_by_one(monkeypatch):
    """A function that calls another one without steps ahead."""
    def call(function):
        with monkeypatch.context() as m:
            m.setattr(CPUDecoder, 'steps_ahead', None)
            return function()
    return call


@pytest.fixture
def calls(monkeypatch):
    """How many steps each call has made."""
    made, decode_steps = [], kvcache.base.BaseCache.decode_steps

    def counted(self, handles, next_tokens):
        try:
            return decode_steps(self, handles, next_tokens)
        finally:
            made.append(next_tokens.n_drawn)
    monkeypatch.setattr(kvcache.base.BaseCache, 'decode_steps', counted)
    return made


def generators(kind, n):
    torch.manual_seed(3)
    return {'torch': None, 'one': torch.Generator().manual_seed(1),
            'own': [torch.Generator().manual_seed(seed) for seed in range(n)]}[kind]


def states(of):
    return [g.get_state() for g in (of if isinstance(of, list) else [of or torch.default_generator])]


def both(one_by_one, m, prompts, n, kind, **how):
    """[(tokens, states of the generators)] of steps ahead, and of one at a time."""
    found, decoder = [], CPUDecoder(m, threads=1)
    for run in (lambda f: f(), one_by_one):
        of = generators(kind, len(prompts) * how.get('num_samples', 1))
        found.append((run(lambda: generate(m, prompts, n, use_cache=True, decoder=decoder, generator=of, **how)),
                      states(of)))
    return found


@pytest.mark.parametrize('model', MODELS)
def test_tokens_and_states_are_those_of_single_steps(model, one_by_one, calls):
    """Within the context, to its end and past it, for prompts of different lengths, with and without a stop token."""
    m, prompts = model_of(model), [[1, 2, 3], [4], [5] * 12]
    fulls = [dict()] if m.config.window else [dict(), dict(when_full='shift'), dict(when_full='shift', n_keep=3)]
    cases = itertools.product(HOWS, (None, 4), ('torch', 'one', 'own'), fulls)
    for how, stop, kind, full in itertools.islice(cases, sizes(list(MODELS).index(model) % 3, 0), None, sizes(5, 1)):
        got, expected = both(one_by_one, m, prompts, 45, kind, stop_token=stop, **how, **full)
        assert got[0] == expected[0], (how, stop, kind, full)
        assert all(map(torch.equal, got[1], expected[1])), (how, stop, kind, full)
    assert max(calls) > (1 if m.config.window else 4)


def test_samples_of_one_prompt_and_rows_that_leave_a_batch(one_by_one):
    m = model_of('rope')
    for kind in ('torch', 'own'):
        got, expected = both(one_by_one, m, [[1], [2, 3]], 39, kind, num_samples=4, stop_token=4)
        assert got[0] == expected[0] and all(map(torch.equal, got[1], expected[1]))
        assert len({len(row) for row in got[0]}) > 3


@pytest.mark.parametrize('kind', ['paged', 'unified', 'streams', 'tuple'])
def test_other_caches(kind, one_by_one, calls):
    m = model_of('llama')
    decoder, texts = CPUDecoder(m, threads=1), []
    for run in (lambda f: f(), one_by_one):
        cache = kvcache.make_cache(m, kind, 3, decoder=decoder)
        texts.append(run(lambda cache=cache: generate(m, [[1, 2], [3], [4]], 60, use_cache=True, cache=cache,
                                                      generator=torch.Generator().manual_seed(2))))
    assert texts[0] == texts[1] and calls


def test_a_stream_that_is_closed_leaves_its_generators_where_its_tokens_end(one_by_one, calls):
    m = model_of('rope')
    decoder = CPUDecoder(m, threads=1)
    for n in (1, 2, 5, 6, 12, 13, 30):
        found = []
        for run in (lambda f: f(), one_by_one):
            of = generators('own', 2)

            def some(of=of, n=n):
                tokens = stream(m, [[1], [2, 3]], 35, use_cache=True, decoder=decoder, generator=of)
                text = [each.flatten().tolist() for each in itertools.islice(tokens, n)]
                tokens.close()
                return text
            found.append((run(some), states(of)))
        assert found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1])), n
    assert calls


def test_the_first_token_comes_at_once_and_others_in_time(monkeypatch, calls):
    m = model_of('rope')
    decoder = CPUDecoder(m, threads=1)
    tokens = stream(m, [[1]], 39, use_cache=True, decoder=decoder, temperature=0)
    next(tokens)
    assert not calls
    next(tokens)
    assert calls == [4]
    monkeypatch.setattr(ahead, 'PAUSE', 0)  # each step is too late for another one
    list(tokens)
    assert calls[1:] == [1] * 33


def test_streams_that_share_a_generator_take_turns(one_by_one, calls):
    """Code between two tokens may draw from the same generator."""
    m = model_of('rope')
    decoder, texts = CPUDecoder(m, threads=1), []
    for run in (lambda f: f(), one_by_one):
        def some():
            torch.manual_seed(3)
            two = [stream(m, [[token]], 30, use_cache=True, decoder=decoder) for token in (1, 2)]
            return [(a.item(), b.item(), torch.rand(1).item()) for a, b in zip(*two)]
        texts.append(run(some))
    assert texts[0] == texts[1] and not calls


def test_a_failed_call_leaves_generators_and_cache(monkeypatch, calls):
    m = model_of('learned')
    decoder, of = CPUDecoder(m, threads=1), torch.Generator().manual_seed(1)
    cache = kvcache.make_cache(m, 'paged', 1, decoder=decoder)
    before = of.get_state()
    with torch.no_grad():
        m.transformer.wpe.weight[7] = float('nan')
    decoder.refresh()
    with pytest.raises(ValueError, match='not numbers'):
        generate(m, [[1]], 30, use_cache=True, cache=cache, generator=of)
    assert calls and not cache.records and not torch.equal(of.get_state(), before)
    expected = torch.Generator().manual_seed(1)
    for _ in range(1 + sum(calls)):
        torch.empty(1, V).exponential_(generator=expected)
    assert torch.equal(of.get_state(), expected.get_state())


def test_a_cache_whose_steps_go_over_to_pytorch(one_by_one):
    """Keys in int8 that were shifted are turned when they are read, which the compiled step does not do."""
    m, executors = model_of('rope', n_embd=128), []

    def tokens():
        cache = kvcache.make_cache(m, 'unified', 1, 8, CPUDecoder(m, threads=1))
        drawn = stream(m, [[1, 2, 3]], 80, 0, use_cache=True, cache=cache, when_full='shift')
        return [(int(token), executors.append(cache.executor.name)) for token in drawn]
    assert tokens() == one_by_one(tokens) and len({*executors}) == 2
