"""Conversations whose cache is kept: held against the model that reads all of each conversation anew."""
import pytest
import torch
from example_models import LLAMA, TEXT, chat_tokenizer, gpt, json_tokenizer

import decode
import kvcache
from chat.conversation import Conversation
from kvcache.contiguous import cache_for

SAID = ['Héllo', 'tabs \\ and "quotes"', '', 'wörld ' * 12, '日本 🙂']


def conversation(kind, window=0):
    model, tokenizer = gpt(**LLAMA, window=window), chat_tokenizer()
    step = decode.best(model, 1)
    cache = cache_for(model, 1, step) if kind == 'tuples' else kvcache.make_cache(model, kind, 1, 0, step)
    return Conversation(model, tokenizer, cache, temperature=0)


def read_anew(c, text, n):
    """The tokens of an answer by the model without a cache."""
    prompt = c.tokenizer.conversation([*c.messages, dict(role='user', content=text)])
    drawn = c.model.generate(torch.tensor([prompt]), n, temperature=0)[0, len(prompt):].tolist()
    return prompt, drawn[:drawn.index(2)] if 2 in drawn else drawn


@pytest.mark.parametrize('window', [0, 24])
@pytest.mark.parametrize('kind', ['tuples', *kvcache.KINDS])
def test_each_turn_says_what_the_model_says_that_reads_all_anew(kind, window):
    c, before = conversation(kind, window), []
    for text in SAID:
        prompt, drawn = read_anew(c, text, 9)
        assert ''.join(c.answer(text, 9)) == c.tokenizer.decode(drawn) == c.messages[-1]['content']
        assert c.n_kept + c.n_new == len(prompt) and c.tokens == (prompt + drawn)[:c.cache.length(c.handle)]
        # what was said before is kept, up to where its text has other tokens than were drawn
        assert window or c.n_kept >= len(before)
        before = prompt
    assert [m['role'] for m in c.messages] == ['user', 'assistant'] * len(SAID)


@pytest.mark.parametrize('kind', ['tuples', *kvcache.KINDS])
@pytest.mark.parametrize('stop', ['close', KeyboardInterrupt])
def test_an_answer_that_is_ended_early_is_kept_as_far_as_it_came(kind, stop):
    c = conversation(kind)
    answer = c.answer('Héllo', 20)
    heard = ''.join(next(answer) for _ in range(4))
    if stop == 'close':
        answer.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            answer.throw(KeyboardInterrupt)
    assert c.messages[-1]['content'] == heard
    _, drawn = read_anew(c, 'and then', 6)
    assert ''.join(c.answer('and then', 6)) == c.tokenizer.decode(drawn)


def test_a_conversation_beyond_the_context_is_refused_and_stays():
    c = conversation('tuples')
    ''.join(c.answer('Héllo', 5))
    before = list(c.messages)
    with pytest.raises(ValueError, match="and the model's context 256: begin a new one"):
        ''.join(c.answer('long ' * 300, 5))
    assert c.messages == before
    assert len(''.join(c.answer('Héllo', 10**6))) and c.cache.length(c.handle) <= 256


def test_a_model_without_a_template_has_no_chat():
    model = gpt(**LLAMA)
    with pytest.raises(ValueError, match='no chat template'):
        Conversation(model, json_tokenizer(TEXT), cache_for(model, 1))
