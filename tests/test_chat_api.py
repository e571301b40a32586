"""POST /v1/chat/completions: the openai client, blocks that turns and conversations share, and what is refused."""
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from conftest import SERVING, needs

needs(*SERVING)

import torch
from example_models import LLAMA, chat_tokenizer, gpt
from serving_process import serving
from test_api import events

import decode
from serving.api import Served
from serving.engine import Engine
from tokenizer import from_state

TOKENIZER = chat_tokenizer()
SYSTEM = dict(role='system', content='You answer in few words, and in rhymes, whatever it is that you are asked. ' * 2)
PAGE = 4


@pytest.fixture(scope='module')
def model():
    return gpt(**LLAMA)


@contextmanager
def chatting(model, n_blocks=64, tokenizer=TOKENIZER):
    """(a client of a chat model's server, its engine)"""
    tokens = tokenizer.bytes_of_tokens(300)
    engine = Engine(model, decode.best(model, 1, threads=1), tokens, tokenizer.end_tokens, n_blocks, PAGE)
    engine.start()
    with serving(engine, served=Served('chat', tokenizer, tokens, n_blocks * PAGE)) as client:
        yield client, engine


@pytest.fixture
def chat(model):
    with chatting(model) as both:
        yield both


def ask(client, messages, **fields):
    response = client.post('/v1/chat/completions', json=dict(messages=messages, temperature=0) | fields)
    assert response.status_code == 200, response.text
    return response.json()


def alone(model, messages, n):
    """The text of an answer by the model without a cache."""
    prompt = TOKENIZER.conversation(messages)
    drawn = model.generate(torch.tensor([prompt]), n, temperature=0)[0, len(prompt):].tolist()
    return TOKENIZER.decode(drawn[:drawn.index(2)] if 2 in drawn else drawn)


def test_a_conversation_of_ten_turns_on_a_pool_that_just_holds_it():
    model, messages, answers = gpt(**LLAMA | dict(block_size=512)), [], []
    for turn in range(10):
        messages.append(dict(role='user', content=f'{turn}?'))
        answers.append(alone(model, messages, 4))
        messages.append(dict(role='assistant', content=answers[-1]))
    n_blocks, before = -(-(len(TOKENIZER.conversation(messages[:-1])) + 3) // PAGE), 0
    with chatting(model, n_blocks) as (client, engine):
        for turn, text in enumerate(answers):
            answer = ask(client, messages[:2 * turn + 1], max_completion_tokens=4)
            usage = answer['usage']
            assert answer['choices'][0]['message'] == dict(role='assistant', content=text, refusal=None)
            # all full blocks of the prompt before
            assert before - before % PAGE <= usage['prompt_tokens_details']['cached_tokens'] < usage['prompt_tokens']
            before = usage['prompt_tokens']
        assert usage['prompt_tokens'] + 3 > (n_blocks - 1) * PAGE and engine.cache.n_free == n_blocks
        refused = client.post('/v1/chat/completions', json=dict(messages=[*messages, messages[0]], max_tokens=4))
        assert refused.status_code == 400 and refused.json()['error']['code'] == 'context_length_exceeded'


def test_two_conversations_at_once_share_the_blocks_of_their_system_message(chat, model):
    client, engine = chat
    both = [[SYSTEM, dict(role='user', content=text)] for text in ('Héllo', 'wörld')]
    n_shared = len(TOKENIZER.conversation([SYSTEM])) // PAGE
    gate = threading.Barrier(2)

    def answer(messages):
        gate.wait()
        return ask(client, messages, max_tokens=20)
    ask(client, both[0], max_tokens=1)  # its system message is remembered from here on
    with ThreadPoolExecutor(2) as pool:
        answers = [*pool.map(answer, both)]
    for messages, got in zip(both, answers):
        assert got['choices'][0]['message']['content'] == alone(model, messages, 20)
        assert got['usage']['prompt_tokens_details']['cached_tokens'] >= (n_shared - 6) * PAGE
    assert engine.cache.n_free == 64


def test_the_openai_client_streams_and_scores_what_it_gets_at_once(chat):
    openai = pytest.importorskip('openai', reason="openai is not installed")
    client, _ = chat
    with openai.OpenAI(base_url=f'{client.base_url}/v1', api_key='-', max_retries=0) as ours:
        create = ours.chat.completions.create
        parts = [dict(type='text', text='Héllo'), dict(type='text', text='wörld')]
        how = dict(model='chat', messages=[SYSTEM, dict(role='user', content=parts)], n=2, seed=5, max_tokens=12,
                   logprobs=True, top_logprobs=3, temperature=1.5)
        whole, pieces, scores, chunks = create(**how), ['', ''], [[], []], []
        for chunk in create(**how, stream=True, stream_options=dict(include_usage=True)):
            chunks.append(chunk)
            for choice in chunk.choices:
                pieces[choice.index] += choice.delta.content or ''
                scores[choice.index] += choice.logprobs.content if choice.logprobs else []
        assert [choice.message.content for choice in whole.choices] == pieces and pieces[0] != pieces[1]
        assert [choice.logprobs.content for choice in whole.choices] == scores
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens and not chunks[-1].choices
        assert chunks[0].choices[0].delta.role == 'assistant' and chunks[0].object == 'chat.completion.chunk'
        one_text = dict(role='user', content='Héllo\nwörld')  # what the parts are together
        assert create(**how | dict(messages=[SYSTEM, one_text])).choices[0].message.content == pieces[0]
        for score in scores[0]:
            assert len(score.top_logprobs) == 3 and bytes(score.bytes) in TOKENIZER.token_bytes
        with pytest.raises(openai.BadRequestError, match='calls no functions'):
            create(model='chat', messages=[dict(role='tool', content='x')])
        with pytest.raises(openai.NotFoundError):
            create(model='gpt-4', messages=[SYSTEM])


def test_a_stream_ends_as_the_answer_does(chat):
    client, _ = chat
    fields = dict(messages=[dict(role='user', content='Héllo')], temperature=0, max_tokens=9, stream=True)
    found = events(client.post('/v1/chat/completions', json=fields).content)
    assert found[-1] == b'[DONE]' and found[-2]['choices'][0]['finish_reason'] in ('stop', 'length')
    assert ['role' in event['choices'][0]['delta'] for event in found[:-1]] == [True] + [False] * (len(found) - 2)


@pytest.mark.parametrize('fields, param', [
    (dict(messages=[]), 'messages'), (dict(messages='hi'), 'messages'), (dict(), 'messages'),
    (dict(messages=[dict(role='user')]), 'messages.0.content'),
    (dict(messages=[dict(role='user', content=[dict(type='image_url', image_url='x')])]), 'messages.0.content'),
    (dict(messages=[SYSTEM], top_logprobs=3), 'top_logprobs'),
    (dict(messages=[SYSTEM], logprobs=True, top_logprobs=21), 'top_logprobs'),
    (dict(messages=[SYSTEM], max_completion_tokens=-1), 'max_completion_tokens'),
    (dict(messages=[SYSTEM], tools=[{}]), 'tools'), (dict(messages=[SYSTEM], prompt='x'), 'prompt'),
])
def test_an_error_names_the_field(chat, fields, param):
    response = chat[0].post('/v1/chat/completions', json=fields)
    error = response.json()['error']
    assert response.status_code == 400 and error['param'] == param and param.split('.')[-1] in error['message'], error


def test_a_template_that_refuses_or_loops_is_an_error_of_the_request(model):
    looping = ("{% if messages | length == 1 %}{{ raise_exception('say more') }}{% endif %}{% for i in range(99999) %}"
               "{% for j in range(99999) %}{% endfor %}{% endfor %}")
    with chatting(model, tokenizer=from_state(TOKENIZER.state() | dict(chat_template=looping))) as (client, _):
        for n, said in ((1, 'say more'), (2, 'took longer than')):
            response = client.post('/v1/chat/completions', json=dict(messages=[SYSTEM] * n))
            assert response.status_code == 400 and said in response.json()['error']['message']
        assert client.post('/v1/completions', json=dict(prompt='Héllo', max_tokens=3)).status_code == 200
