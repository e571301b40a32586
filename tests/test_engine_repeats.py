"""Steps of one plan that follow each other: their tokens are delivered together, and are those of single steps."""
import itertools

import pytest
from small_engine import BYTES, alone, finished, run, submit, tiny
from test_same_bits import SHAPES, model_of

from decode.cpu import CPUDecoder
from decode.kernel.threads import n_cores
from serving.engine import Engine
from serving.request import Request


def test_steps_of_one_plan_are_delivered_together(monkeypatch):
    """The steps, and the tokens, are those of a step at a time, also where logits are changed before each draw."""
    seen, hows = [], [dict(frequency_penalty=1.5), dict(logit_bias={3: 2.0}),
                      dict(min_tokens=9, stop_token_ids=[1, 2, 3])]
    for together in (True, False):
        monkeypatch.setattr('serving.core.pause', lambda n_streams: 1e9 if together else 0)
        engine, decoder = tiny(n_blocks=80, page_size=16)
        token = alone(decoder, Request('x', [6, 2], 9, seed=4))[0][0][5]
        all_got = [submit(engine, 'a', [3, 1], 30, seed=2), submit(engine, 'b', [5], 12, seed=3, n=2),
                   submit(engine, 'c', [6, 2], 9, seed=4, stop_token_ids=[token]),
                   *(submit(engine, str(how), [3, 1], 30, seed=1, **how) for how in hows)]
        run(engine)
        for got in all_got:
            stop_ids = got.request.params.stop_token_ids
            assert got.tokens == [tokens for tokens, _ in alone(decoder, got.request, stop_ids)]
        seen.append((engine.stats.steps, engine.stats.computed_tokens, engine.stats.generated_tokens))
        n_calls = [got.n_calls for got in all_got]
        assert n_calls[0] < 15 if together else n_calls[0] == 30
    assert seen[0] == seen[1] and all_got[2].reasons == ['stop']


@pytest.mark.parametrize('how', [dict(logprobs=1), dict(stop=('xyz',))], ids=str)
def test_a_sample_that_needs_each_token_gets_one_at_a_time(monkeypatch, how):
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 1e9)
    engine, _ = tiny(n_blocks=40)
    all_got = [submit(engine, 'a', [3, 1], 20), submit(engine, 'b', [3, 1], 20, **how)]
    run(engine)
    assert [got.n_calls for got in all_got] == [20, 20]


def test_threads_draw_what_one_draws(monkeypatch):
    """Samples of all kinds, and one that ends by a token that another thread than the first draws."""
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 1e9)
    model = model_of(SHAPES[1], 1)
    one, two = (CPUDecoder(model, threads=n) for n in (1, min(2, n_cores())))
    hows = [dict(), dict(top_p=0.7), dict(top_k=5), dict(frequency_penalty=1.5), dict(temperature=0.0)]
    token = alone(one, Request('x', [3, 1], 40, seed=1))[0][0][20]
    engine = Engine(model, two, BYTES, (), 40, 16, 64)
    all_got = [submit(engine, str(i), [3, i], 40, seed=i, stop_token_ids=[token] if i == 1 else [], **how)
               for i, how in enumerate(hows)]
    run(engine)
    for i, got in enumerate(all_got):
        assert got.tokens == [tokens for tokens, _ in alone(one, got.request, (token,) if i == 1 else ())]
    assert all_got[1].reasons == ['stop'] and all_got[0].n_calls < 12


def test_steps_repeat_while_others_wait_and_while_blocks_are_few(monkeypatch):
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 1e9)
    for n_blocks, budget in ((100, 8), (8 * 10 + 1, 64), (8 * 9, 64)):  # each sample takes 11 blocks in the end
        engine, _ = tiny(n_blocks=n_blocks, budget=budget)
        all_got = [submit(engine, str(i), [i], 40, i) for i in range(9)]
        run(engine)
        assert all_got[0].n_calls < 25 and {got.reasons[0] for got in all_got} == {'length'}


@pytest.mark.parametrize('n_prompt, n_a, n_b', [(17, 3, 1), (21, 3, 0)])  # its tokens take 5 blocks, or 6
def test_blocks_for_later_steps_keep_no_request_waiting(monkeypatch, n_prompt, n_a, n_b):
    """A request comes in while another one's steps repeat, and finds the room that it finds behind single steps."""
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 1e9)
    engine, decoder = tiny(n_blocks=8, page_size=4)
    a = submit(engine, 'a', [1, 2, 3, 4, 5], 24)
    engine.run_once()
    whole = decoder.execute_model
    monkeypatch.setattr(decoder, 'execute_model', lambda *args: engine.core.stop_soon() or whole(*args))
    engine.run_once()
    assert engine.cache.n_free < 6  # a has two blocks for its 6 tokens, and others for later ones
    b = submit(engine, 'b', [*range(6, 6 + n_prompt)], 2)
    engine.run_once()
    assert (len(a.tokens[0]), len(b.tokens[0])) == (n_a, n_b)  # a may take one block more, so b gets 5 of 8
    run(engine)
    assert [a.tokens, b.tokens] == [[tokens for tokens, _ in alone(decoder, got.request)] for got in (a, b)]


@pytest.mark.parametrize('window', [4, 8])
def test_a_window_shorter_than_a_block_takes_no_block_of_another(monkeypatch, window):
    """Two samples share the blocks of a prompt, which their windows pass; one gives way, and none ends early."""
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 1e9)
    decoder = CPUDecoder(model_of(SHAPES[1] | dict(position='rope', window=window), 1), threads=1)
    for n_blocks in (3, 4, 5):
        engine = Engine(decoder.model, decoder, BYTES, (), n_blocks, 2 * window, 16)
        got = finished(engine, 'a', [1] * 2 * window, 5 * window, n=2)
        assert got.reasons == ['length'] * 2 and got.tokens == [tokens for tokens, _ in alone(decoder, got.request)]


@pytest.mark.parametrize('where', ['before', 'behind'])
@pytest.mark.parametrize('error, owner, call', [
    (KeyboardInterrupt, 'cache', 'decode_steps'), (KeyboardInterrupt, 'cache', 'step'),
    (MemoryError, 'decoder', 'execute_model')])
def test_a_step_that_ends_early_loses_no_token(monkeypatch, error, owner, call, where):
    """Tokens that were drawn and not added are drawn again, with the penalties and the random numbers of before."""
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 1e9)
    engine, decoder = tiny(n_blocks=40)
    hows = [dict(), dict(temperature=2.0), dict(frequency_penalty=1.5, presence_penalty=-1.0)]
    hows += [dict(logprobs=5)] * (owner == 'decoder')  # then a plan has one step
    all_got, calls = [submit(engine, str(i), [3, i], 30, i, **how) for i, how in enumerate(hows)], itertools.count()
    owner = getattr(engine, owner)
    whole, nth = getattr(owner, call), 5 * (owner is decoder)

    def failing(*args):
        if where == 'before' and next(calls) == nth:
            raise error
        result = whole(*args)
        if where == 'behind' and next(calls) == nth:
            raise error
        return result
    monkeypatch.setattr(owner, call, failing)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            run(engine)
    run(engine)
    for got in all_got:
        (tokens, logprobs), = alone(decoder, got.request)
        assert got.tokens == [tokens] and got.logprobs[0] in ([], logprobs)


def test_stop_ends_steps_that_would_repeat(monkeypatch):
    """`stop` comes between the look of the thread's loop and its next steps: the present step is the last."""
    monkeypatch.setattr('serving.core.pause', lambda n_streams: 1e9)
    engine, _ = tiny(n_blocks=40, page_size=16)
    got = submit(engine, 'a', [3, 1], 60)
    engine.run_once()
    n = len(got.tokens[0])
    engine.stop()
    engine.run_once()
    assert len(got.tokens[0]) == n + 1
