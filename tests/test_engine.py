"""The engine on real small models: the tokens and log probabilities of a request are those that it has alone."""
import random

import pytest
import torch
from conftest import sizes
from small_engine import BYTES, V, alone, finished, run, submit, tiny
from test_same_bits import SHAPES, model_of

from decode.cpu import CPUDecoder
from kvcache.paged import n_blocks_for
from serving.engine import Engine

HOWS = [dict(), dict(temperature=0.0), dict(top_k=5), dict(top_p=0.7, temperature=1.5), dict(frequency_penalty=1.0),
        dict(repetition_penalty=1.5, min_p=0.05)]


@pytest.mark.parametrize('how', [dict(), dict(position='rope', n_kv_head=2), dict(position='alibi', window=9),
                                 dict(position='rope', window=6, n_sink=3)], ids=str)
@pytest.mark.parametrize('weights', ['float32', 'int8', 'bfloat16'])
def test_tokens_and_bits_are_those_of_the_request_alone(how, weights):
    """Random requests, pools, chunks and preemptions; log probabilities are compared for equality."""
    found = preempted = 0
    for seed in range(sizes(1, 10)):
        chooser = random.Random(seed)
        decoder = CPUDecoder(model_of(SHAPES[seed % 3] | how, seed), weights, 1)
        block_size, n_logprobs = chooser.choice([4, 8]), random.Random(f"{seed} {how} {weights}").choice([None, 5])
        n_blocks = n_blocks_for(decoder.model.config, block_size) + chooser.choice([0, 1, 4])
        engine = Engine(decoder.model, decoder, BYTES, (), n_blocks, block_size, chooser.choice([3, 16, 100]))
        shared, all_got = [chooser.randrange(V) for _ in range(20)], []
        for i in range(sizes(10, 30)):
            prompt = shared[:chooser.choice([0, 8, 15])] + [chooser.randrange(V) for _ in range(chooser.randint(1, 9))]
            all_got.append(submit(engine, str(i), prompt, chooser.randint(1, 25), i, chooser.choice([1, 1, 3]),
                                  logprobs=n_logprobs, **chooser.choice(HOWS)))
            for _ in range(chooser.choice([0, 1, 3])):
                engine.run_once()
        run(engine)
        found, preempted = found + engine.scheduler.n_found, preempted + engine.scheduler.n_preempted
        for got in all_got:
            expected = alone(decoder, got.request)
            if n_logprobs is None:  # then steps of one plan are delivered together
                assert got.tokens == [tokens for tokens, _ in expected], got.request
            else:
                assert list(zip(got.tokens, got.logprobs)) == expected, got.request
            assert set(got.reasons) == {'length'}
    assert found and preempted


@pytest.mark.parametrize('with_decoder', [True, False])
def test_greedy_equals_generate_without_cache(with_decoder):
    model = model_of(SHAPES[1], 3)
    decoder = CPUDecoder(model, threads=1) if with_decoder else None
    engine = Engine(model, decoder, BYTES, n_blocks=12, page_size=8, max_num_batched_tokens=10)
    prompts = [[i, 5, 7, i][:1 + i % 4] for i in range(8)]
    all_got = [submit(engine, str(i), prompt, 20, temperature=0.0) for i, prompt in enumerate(prompts)]
    run(engine)
    for prompt, got in zip(prompts, all_got):
        expected = model.generate(torch.tensor([prompt]), 20, temperature=0)[0].tolist()
        assert prompt + got.tokens[0] == expected


def test_stop_tokens_end_a_sample_and_give_no_text():
    engine, decoder = tiny()
    whole = finished(engine, 'whole', [3, 1], 20, seed=2)
    token = whole.tokens[0][6]
    first = whole.tokens[0].index(token)
    got = finished(engine, 'stopped', [3, 1], 20, seed=2, stop_token_ids=[token])
    assert got.reasons == ['stop'] and got.tokens[0] == whole.tokens[0][:first + 1]
    assert got.text[0] == whole.text[0][:first]
    later = finished(engine, 'later', [3, 1], 20, seed=2, stop_token_ids=[token], min_tokens=first + 3)
    assert len(later.tokens[0]) >= first + 3 and token not in later.tokens[0][:first + 3]
    engine.core.end_tokens = (token,)
    assert finished(engine, 'eos', [3, 1], 20, seed=2).tokens == got.tokens
    assert finished(engine, 'no eos', [3, 1], 20, seed=2, ignore_eos=True).tokens == whole.tokens


def test_an_error_in_a_samples_text_spares_others():
    engine, decoder = tiny()
    bad, good = submit(engine, 'bad', [1, 2], n=3, stop=(5,)), submit(engine, 'good', [1, 2], 9)
    run(engine)
    assert bad.reasons == ['error'] * 3 and 'TypeError' in bad.error
    assert good.tokens == [tokens for tokens, _ in alone(decoder, good.request)]


@pytest.mark.parametrize('wrong, words', [
    (dict(prompt=[1] * 60), 'together 68'), (dict(prompt=[V]), 'prompt has the token id 29'),
    (dict(stop_token_ids=[-1]), 'stop_token_ids'), (dict(logit_bias={99: 1.0}), 'logit_bias'),
    (dict(prompt=[]), 'no tokens'), (dict(n=0), 'n must be'), (dict(min_tokens=9), 'min_tokens'),
    (dict(prompt=[1] * 30, max_tokens=30), '15 blocks of 4, but the pool has 14')])
def test_what_can_never_run_is_refused_at_once(wrong, words):
    engine, _ = tiny(n_blocks=14)
    with pytest.raises(ValueError, match=words):
        submit(engine, 'a', **(dict(prompt=[1]) | wrong))
    assert not engine.live and finished(engine, 'a', [1, 2]).reasons == ['length']


@pytest.mark.parametrize('token', [-1, V])
def test_an_end_token_outside_the_vocabulary_is_refused(token):
    _, decoder = tiny()
    with pytest.raises(ValueError, match=f'end_tokens has the token id {token}, and the vocabulary'):
        Engine(decoder.model, decoder, BYTES, (2, token))
