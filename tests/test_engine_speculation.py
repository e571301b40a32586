"""The engine with drafts: each sample has the tokens, the text and the log probabilities that it has alone."""
import itertools

import numpy as np
import pytest
import torch
from conftest import sizes
from drafting import AnyDraft, Speculating
from small_engine import BYTES, V, alone, finished, run, submit
from test_same_bits import SHAPES
from test_same_bits import model_of as shape_of
from test_speculation import model_of

from decode.cpu import CPUDecoder
from serving.engine import Engine

HOWS = [dict(), dict(temperature=0.0), dict(top_k=5), dict(top_p=0.7, min_p=0.02), dict(frequency_penalty=1.5),
        dict(repetition_penalty=1.7, presence_penalty=0.5), dict(logit_bias={3: 4.0, 7: -9.0}),
        dict(min_tokens=9, stop_token_ids=[1, 2, 3, 4, 5]), dict(stop_token_ids=[1, 6, 9]), dict(logprobs=3),
        dict(logprobs=0, temperature=0.0, stop=('ab', 'q')), dict(stop=('b', 'cd', 'xyz'))]


def given(got):
    """All that a request was given."""
    logprobs = [[(each.token, each.logprob, each.rank, each.top) for each in of_sample] for of_sample in got.logprobs]
    return got.tokens, got.text, got.reasons, got.error, logprobs, got.first.prompt_logprobs


def served(decoder, m, hows, n_blocks=120, page_size=4, **more):
    """What requests of these kinds are given, three or four of them at a time, and the engine."""
    engine, seen = Engine(m, decoder, BYTES, (), n_blocks, page_size, 64), []
    for first in range(0, len(hows), 4):
        all_got = [submit(engine, f'{first + i}', [3, i, 1][:1 + i % 3], 21 - i, seed=i, n=1 + (i == 2), **how, **more)
                   for i, how in enumerate(hows[first:first + 4])]
        run(engine)
        seen += map(given, all_got)
    return seen, engine


@pytest.mark.parametrize('draft', ['int4', 'int8', 'ngram', 'any', 'float32'])
@pytest.mark.parametrize('kind', ['learned', 'llama', 'rope window sinks', 'learned window'])
def test_samples_are_given_what_they_are_given_without_drafts(kind, draft, monkeypatch):
    """
    All settings, in company and alone, with few blocks, so that samples are preempted, and with the first tokens of
    their prompts remembered.
    """
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 1e9)
    m = model_of(kind, block_size=40)
    hows = HOWS if draft == 'any' else HOWS[sizes(1, 0)::sizes(2, 1)]
    for n_blocks, more in ((120, dict()), (16, dict()), (120, dict(prompt_logprobs=True))):
        decoder = Speculating(m, AnyDraft(V) if draft == 'any' else draft)
        got, engine = served(decoder, m, hows, n_blocks, **more)
        expected, plain = served(CPUDecoder(m, threads=1), m, hows, n_blocks, **more)
        assert got == expected
        assert n_blocks > 16 or m.config.window or min(engine.scheduler.n_preempted, plain.scheduler.n_preempted) > 0
        rounds = [(n, n_drawn) for _, n, n_drawn, ended in decoder.rounds if n and not ended]
        assert len(rounds) > (0 if draft == 'ngram' else 3)
        if draft == 'float32':
            assert all(n_drawn == n + 1 for n, n_drawn in rounds)


def test_rounds_are_few_where_proposals_are_right(monkeypatch):
    """With stop strings and log probabilities too, a call is one round and gives several tokens."""
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 1e9)
    m = shape_of(SHAPES[1], 1)
    for how in (dict(), dict(logprobs=2), dict(stop=('zzzz',))):
        decoder = Speculating(m, 'float32')
        decoder.k = 4
        engine = Engine(m, decoder, BYTES, (), 80, 4, 64)
        got = finished(engine, 'a', [3, 1], 40, **how)
        (tokens, logprobs), = alone(CPUDecoder(m, threads=1), got.request)
        assert got.tokens == [tokens] and got.n_calls <= 10
        assert not got.logprobs[0] or got.logprobs[0] == [
            each._replace(top=each.top[:2]) for each in logprobs]
        assert engine.stats.generated_tokens == 40


def test_a_stop_string_inside_of_a_draft_ends_the_text_and_the_tokens():
    m = shape_of(SHAPES[1], 1)
    plain = Engine(m, CPUDecoder(m, threads=1), BYTES, (), 80, 4, 64)
    text = finished(plain, 'a', [3, 1], 40).text[0]
    for first, size in itertools.product(range(0, 36, sizes(5, 1)), (1, 2, 3)):
        stop = (text[first:first + size],)
        decoder = Speculating(m, 'float32')
        decoder.k = 7
        got, expected = (finished(engine, 'a', [3, 1], 40, stop=stop, logprobs=0)
                         for engine in (Engine(m, decoder, BYTES, (), 80, 4, 64), plain))
        assert given(got) == given(expected) and len(got.tokens[0]) == len(got.logprobs[0])
        assert got.reasons == ['stop']


def test_weights_that_change_inside_of_a_round(monkeypatch):
    """The tokens of that call are drawn again, by the new weights, behind the tokens of before."""
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 0)
    m = model_of('rope', block_size=64)
    old, changed = {name: p.clone() for name, p in m.named_parameters()}, []

    def change(rounds):
        if not changed and len(decoder.rounds) > 4:
            changed.append(len(got.tokens[0]))
            with torch.no_grad():
                m.transformer.h[1].mlp.c_proj.weight.mul_(-2)
            decoder.refresh()
    decoder = Speculating(m, AnyDraft(V, change))
    engine = Engine(m, decoder, BYTES, (), 80, 4, 64)
    got = submit(engine, 'a', [3, 1], 40, temperature=0.0)
    run(engine)
    text, n = [3, 1, *got.tokens[0]], 2 + changed[0]
    assert 2 < n < 36
    for weights, part in ((dict(m.named_parameters()), range(n, 42)), (old, range(2, n))):
        with torch.no_grad():
            for name, p in m.named_parameters():
                p.copy_(weights[name])
        logits = CPUDecoder(m, threads=1).model(torch.tensor([text]), targets=torch.tensor([text]))[0][0]
        assert [text[i] for i in part] == [int(logits[i - 1].argmax()) for i in part]


def test_an_error_of_a_draft_ends_no_request(monkeypatch):
    """The call is made again, one step at a time, which takes no draft."""
    m, failed = shape_of(SHAPES[1], 1), []

    def fail(rounds):
        if len(decoder.rounds) > 2 and not failed:
            failed.append(1)
            raise ValueError("no draft")
    decoder = Speculating(m, AnyDraft(V, fail))
    engine = Engine(m, decoder, BYTES, (), 80, 4, 64)
    all_got = [submit(engine, str(i), [3, i], 30, seed=i, frequency_penalty=.5) for i in range(3)]
    run(engine)
    for got in all_got:
        assert got.tokens == [tokens for tokens, _ in alone(CPUDecoder(m, threads=1), got.request)]
    assert failed


def test_many_samples_are_served_without_drafts():
    m = shape_of(SHAPES[1], 1)
    decoder = Speculating(m, AnyDraft(V))
    engine = Engine(m, decoder, BYTES, (), 200, 4, 64)
    all_got = [submit(engine, str(i), [3, i % V], 20, seed=i) for i in range(12)]
    run(engine)
    for got in all_got:
        assert got.tokens == [tokens for tokens, _ in alone(CPUDecoder(m, threads=1), got.request)]
    assert all(batch_size <= 8 for batch_size, _ in decoder.paces)
    assert np.all([len(got.tokens[0]) == 20 for got in all_got])
