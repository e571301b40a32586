"""POST /v1/chat/completions: the openai client, the blocks of earlier turns, what becomes of messages."""
import sys
import threading
from contextlib import suppress

import pytest
from conftest import SERVING, needs

needs(*SERVING)

import torch
from example_models import LLAMA, TEXT, chat_tokenizer, gpt, sentencepiece_tokenizer
from serving_process import chat_tokenizer_with, chatting, serving
from small_engine import spelling_engine
from test_api import events

from tokenizer import from_state

TOKENIZER = chat_tokenizer()
SYSTEM = dict(role='system', content='You answer in few words, and in rhymes, whatever it is that you are asked. ' * 2)
PAGE = 4


@pytest.fixture(scope='module')
def model():
    return gpt(**LLAMA)


@pytest.fixture(scope='module')
def client(model):
    with chatting(model, TOKENIZER) as client:
        yield client


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
    n_pages, before = -(-(len(TOKENIZER.conversation(messages[:-1])) + 3) // PAGE), 0
    with chatting(model, TOKENIZER, n_pages=n_pages) as client:
        for turn, text in enumerate(answers):
            answer = ask(client, messages[:2 * turn + 1], max_completion_tokens=4)
            usage = answer['usage']
            assert answer['choices'][0]['message'] == dict(role='assistant', content=text, refusal=None)
            # all full blocks of the prompt before
            n_cached = usage['prompt_tokens_details']['cached_tokens']
            assert before - before % PAGE <= n_cached < usage['prompt_tokens'] and n_cached % PAGE == 0
            before = usage['prompt_tokens']
        assert usage['prompt_tokens'] + 3 > (n_pages - 1) * PAGE
        assert client.service.thread.engine.pool.n_free == n_pages
        refused = client.post('/v1/chat/completions', json=dict(messages=[*messages, messages[0]], max_tokens=4))
        error = refused.json()['error']
        assert refused.status_code == 400
        assert (error['code'], error['param']) == ('context_length_exceeded', 'messages')


def test_the_openai_client_streams_and_scores_what_it_gets_at_once(client, model, monkeypatch):
    openai = pytest.importorskip('openai', reason="openai is not installed")
    for module in ('engine_thread', 'answer'):  # so that an answer comes in many chunks
        monkeypatch.setattr(f'serving.{module}.chunk_interval', lambda n_requests: 0)
    with openai.OpenAI(base_url=f'{client.base_url}/v1', api_key='-', max_retries=0) as ours:
        create = ours.chat.completions.create
        parts = [dict(type='text', text='Héllo'), dict(type='text', text='wörld')]
        how = dict(model='chat', messages=[SYSTEM, dict(role='user', content=parts)], n=2, seed=5, max_tokens=12,
                   logprobs=True, top_logprobs=3, temperature=1.5)
        whole, pieces, scores, roles, reasons = create(**how), ['', ''], [[], []], [[], []], [None] * 2
        usage = dict(include_usage=True, continuous_usage_stats=True)
        hand_out, has_come = client.service.thread.hand_out, threading.Event()

        def in_turns(results):  # the second tokens wait until the first chunk has come
            if any(s.n_drawn > 1 for s, _ in results):
                has_come.wait(60)
            hand_out(results)
        monkeypatch.setattr(client.service.thread, 'hand_out', in_turns)
        with ours.chat.completions.with_streaming_response.create(**how, stream=True, stream_options=usage) as response:
            chunks = []
            for chunk in response.parse():
                chunks.append(chunk)
                has_come.set()
        last = chunks.pop()
        for chunk in chunks:
            choice, = chunk.choices
            pieces[choice.index] += choice.delta.content or ''
            scores[choice.index] += choice.logprobs.content if choice.logprobs else []
            roles[choice.index].append(choice.delta.role)
            reasons[choice.index] = choice.finish_reason
        assert [choice.message.content for choice in whole.choices] == pieces and pieces[0] != pieces[1]
        assert [choice.logprobs.content for choice in whole.choices] == scores
        assert [choice.finish_reason for choice in whole.choices] == reasons and not last.choices
        assert response.headers['x-request-id'] == last.id and last.object == 'chat.completion.chunk'
        assert all(of == ['assistant'] + [None] * (len(of) - 1) for of in roles)  # the first chunk alone has it
        counts = [chunk.usage.completion_tokens for chunk in [*chunks, last]]
        assert counts == sorted(counts) and 0 < counts[0] < counts[-1] == whole.usage.completion_tokens
        one_text = dict(role='user', content='Héllo\nwörld')  # what the parts are together
        assert create(**how | dict(messages=[SYSTEM, one_text])).choices[0].message.content == pieces[0]
        for score in scores[0]:
            assert len(score.top_logprobs) == 3 and bytes(score.bytes) in TOKENIZER.token_bytes
        with pytest.raises(openai.BadRequestError, match='describe them in a message'):
            create(model='chat', messages=[dict(role='tool', content='x')])
        with pytest.raises(openai.NotFoundError):
            create(model='gpt-4', messages=[SYSTEM])

        # a message can be sent back as it is, and a developer's is the system's
        user, how = dict(role='user', content='Héllo'), dict(model='chat', temperature=0, max_tokens=9)
        said = [SYSTEM | dict(role='developer'), user]
        first = create(messages=said, **how).choices[0].message
        assert first.content == alone(model, [SYSTEM, user], 9) and first.refusal is None
        again = create(messages=[*said, first.model_dump() | dict(reasoning_content='hm', annotations=[]), user], **how)
    assert again.choices[0].message.content == alone(
        model, [SYSTEM, user, dict(role='assistant', content=first.content), user], 9)


@pytest.mark.parametrize('message, same', [
    (dict(role='user', content=[dict(type='input_text', text='a'), dict(type='text', text='b', cache_control={})]),
     dict(role='user', content='a\nb')),
    (dict(role='assistant', content=[dict(type='refusal', refusal='no')]), dict(role='assistant', content='no')),
    (dict(role='assistant', content=None, refusal='no'), dict(role='assistant', content='')),
    (dict(role='assistant'), dict(role='assistant', content='')),
    (dict(role='assistant', content='a', refusal=None, tool_calls=None, function_call=None, audio=None,
          tool_call_id=None, annotations=None), dict(role='assistant', content='a')),
    (dict(role='user', content='a', name='me', id=3), dict(role='user', content='a'))], ids=str)
def test_messages_as_clients_write_them(client, message, same):
    user = dict(role='user', content='Héllo')
    both = [client.post('/tokenize', json=dict(messages=[user, each, user])).json() for each in (message, same)]
    assert both[0] == both[1] and both[0]['tokens'] == TOKENIZER.conversation([user, same, user])


def test_the_last_message_is_continued_where_asked(client, model):
    """With the tokens that one text of both would have had."""
    said = [dict(role='user', content='Héllo'), dict(role='assistant', content='According to ')]
    prompt = TOKENIZER.encode(CHAT_PREFIX + 'According to ')
    drawn = model.generate(torch.tensor([prompt]), 9, temperature=0)[0, len(prompt):].tolist()
    for fields in (dict(), dict(add_generation_prompt=False)):
        answer = ask(client, said, max_tokens=9, continue_final_message=True, return_token_ids=True, **fields)
        choice, = answer['choices']
        assert answer['prompt_token_ids'] == choice['prompt_token_ids'] == prompt
        assert choice['token_ids'] == drawn[:len(choice['token_ids'])]


def test_samples_begin_in_their_order_whichever_has_a_text_first(client, monkeypatch):
    """`stream` of the openai client expects that. The first sample waits for what may become its stop string."""
    for module in ('engine_thread', 'answer'):
        monkeypatch.setattr(f'serving.{module}.chunk_interval', lambda n_requests: 0)
    how = dict(model='chat', messages=[dict(role='user', content='Héllo')], n=2, max_tokens=12, temperature=1.5)
    whole = [client.post('/v1/chat/completions', json=how | dict(seed=seed)).json() for seed in range(9)]
    texts = {seed: [choice['message']['content'] for choice in one['choices']] for seed, one in enumerate(whole)}
    seed, (first, second) = next((seed, both) for seed, both in texts.items() if both[0][:1] != both[1][:1])
    streamed = how | dict(seed=seed, stop=[first + ' and more'], stream=True, return_token_ids=True)
    *chunks, _ = events(client.post('/v1/chat/completions', json=streamed).content)
    assert [chunk['choices'][0]['index'] for chunk in chunks[:2]] == [0, 1]
    assert [chunk['choices'][0]['delta'].get('role') for chunk in chunks[:2]] == ['assistant', 'assistant']
    assert ['prompt_token_ids' in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    joined = [''.join(chunk['choices'][0]['delta']['content'] or '' for chunk in chunks
                      if chunk['choices'][0]['index'] == i) for i in (0, 1)]
    assert joined == [first, second]
    openai = pytest.importorskip('openai', reason="openai is not installed")
    with openai.OpenAI(base_url=f'{client.base_url}/v1', api_key='-', max_retries=0) as ours:
        with ours.chat.completions.stream(**how, seed=seed, stop=[first + ' and more']) as stream:
            with suppress(openai.LengthFinishReasonError):  # which it raises at the end
                stream.until_done()
            assert [c.message.content for c in stream.current_completion_snapshot.choices] == [first, second]


CHAT_PREFIX = '<|im_start|>user\nHéllo<|im_end|>\n<|im_start|>assistant\n'


def test_variables_of_the_template(model):
    source = TOKENIZER.chat_template.source + (
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ reasoning_effort }}")
    tokenizer = chat_tokenizer_with(source)
    said = dict(messages=[dict(role='user', content='Héllo')])
    with chatting(model, tokenizer) as client:
        def text(**fields):
            answer = client.post('/tokenize', json=said | fields)
            assert answer.status_code == 200, answer.text
            return tokenizer.decode(answer.json()['tokens'])
        assert text() == text(chat_template_kwargs=dict(enable_thinking=True)) == CHAT_PREFIX
        assert text(thinking=dict(type=None), reasoning='', reasoning_effort=False) == CHAT_PREFIX
        in_kwargs = dict(chat_template_kwargs=dict(enable_thinking=False))
        for fields in (in_kwargs, dict(reasoning_effort='none'), dict(reasoning=dict(effort='none')),
                       dict(enable_thinking=False), dict(thinking=dict(type='disabled')), dict(thinking=False),
                       dict(reasoning=dict(enabled=False), thinking=True)):
            assert text(**fields) == CHAT_PREFIX + '<think></think>'
        low, high = dict(reasoning_effort='low'), dict(reasoning_effort='high')
        assert text(**low) == text(reasoning=dict(effort='low')) == CHAT_PREFIX + 'low'
        assert text(chat_template_kwargs=low, **high, enable_thinking=True) == CHAT_PREFIX + 'low'
        assert text(**low, enable_thinking=False) == CHAT_PREFIX + '<think></think>low'
        off = dict(add_generation_prompt=False)
        assert text(chat_template_kwargs=off) == text(**off) == CHAT_PREFIX.removesuffix('<|im_start|>assistant\n')


def test_special_tokens_are_not_part_of_an_answer(client):
    """They are drawn, and counted; skip_special_tokens=false shows them. One can be a stop string, without a text."""
    def drawn(token, **fields):
        """(the text, finish_reason, tokens) of an answer, and of a completion, that has this token only"""
        fields = dict(temperature=0, max_tokens=3, logit_bias={token: 100}) | fields
        for path, how, text_of in (('chat/completions', dict(messages=[SYSTEM]), lambda c: c['message']['content']),
                                   ('completions', dict(prompt=CHAT_PREFIX), lambda c: c['text'])):
            answer = client.post(f'/v1/{path}', json=fields | how).json()
            choice, = answer['choices']
            yield text_of(choice), choice['finish_reason'], answer['usage']['completion_tokens']
    for token, name in ((1, '<|im_start|>'), (2, '<|im_end|>')):
        assert [*drawn(token, ignore_eos=True)] == [('', 'length', 3)] * 2
        assert [*drawn(token, ignore_eos=True, skip_special_tokens=False)] == [(name * 3, 'length', 3)] * 2
    for fields in (dict(stop=['never', '<|im_start|>']), dict(stop='<|im_start|>', skip_special_tokens=False)):
        assert [*drawn(1, **fields)] == [('', 'stop', 1)] * 2
    scored = dict(prompt=CHAT_PREFIX, logprobs=0, echo=True, max_tokens=4, temperature=0, logit_bias={1: 100},
                  ignore_eos=True)
    for skip in (False, True):  # what has no text takes no room in it
        choice, = client.post('/v1/completions', json=scored | dict(skip_special_tokens=skip)).json()['choices']
        n, shown = len(choice['text']), 0 if skip else len('<|im_start|>')
        assert choice['logprobs']['text_offset'][-4:] == [n - shown * i for i in (4, 3, 2, 1)]
    for skip in (False, True):  # what ends a text is not a part of it
        assert [*drawn(2, skip_special_tokens=skip)] == [('', 'stop', 1)] * 2


def test_min_tokens_holds_back_stop_strings_and_a_stop_string_can_stay(client):
    fields = dict(prompt='Héllo', temperature=0, max_tokens=58, ignore_eos=True, return_token_ids=True)
    ids = client.post('/v1/completions', json=fields).json()['choices'][0]['token_ids']
    before, text = [TOKENIZER.library.decode(part, skip_special_tokens=True) for part in (ids[:50], ids)]
    stop = next(c for c in text[len(before):] if c in before and c.isascii())
    for include in (False, True):
        held = dict(stop=[stop, 'never', ''], min_tokens=50, include_stop_str_in_output=include)
        choice = client.post('/v1/completions', json=fields | held).json()['choices'][0]
        assert choice['text'] == text[:text.index(stop, len(before)) + include]
        assert len(choice['token_ids']) > 50 and choice['finish_reason'] == 'stop'


@pytest.mark.parametrize('n_words', [1, 100])
def test_an_answer_has_all_the_room_there_is(client, n_words):
    """Where a body does not say how long it may be."""
    for fields in (dict(), dict(logprobs=True, n=2)):
        answer = ask(client, [dict(role='user', content='a ' * n_words)], ignore_eos=True, **fields)
        n = answer['usage']['completion_tokens'] // len(answer['choices'])
        assert n + answer['usage']['prompt_tokens'] == 256 and answer['choices'][0]['finish_reason'] == 'length'


def test_a_tokenizer_may_have_special_tokens_that_the_model_lacks(model):
    tokenizer = from_state(TOKENIZER.state())
    tokenizer.library.add_special_tokens(['<pad>'])
    tokenizer = from_state(TOKENIZER.state() | dict(json=tokenizer.library.to_str()))
    assert 300 in tokenizer.special_ids and model.config.vocab_size == 300
    with chatting(model, tokenizer) as client:
        assert ask(client, [SYSTEM], max_tokens=2)['usage']['completion_tokens'] > 0
        refused = client.post('/v1/completions', json=dict(prompt='a<pad>b'))
        assert refused.status_code == 400 and refused.json()['error']['param'] == 'prompt'


def test_what_is_nested_too_deeply_is_refused(client):
    deep = f'{{"a": {"[" * 990}{"]" * 990}}}'
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "chat_template_kwargs": {deep}}}'
    response = client.post('/v1/chat/completions', content=body)
    if sys.version_info < (3, 12):  # later ones take any depth that the parser of bodies takes
        assert response.status_code == 400 and 'nested too deeply' in response.json()['error']['message']


def test_tokens_with_and_without_what_the_tokenizer_adds_and_their_texts():
    tokenizer = sentencepiece_tokenizer(TEXT, end_tokens=[2])
    with chatting(gpt(**LLAMA | dict(vocab_size=400)), tokenizer) as client:
        answer = client.post('/tokenize', json=dict(prompt='Hi', return_token_strs=True)).json()
        assert answer['tokens'] == tokenizer.library.encode('Hi').ids and answer['tokens'][0] == 1
        assert ''.join(answer['token_strs']) == ' Hi'
        bare = client.post('/tokenize', json=dict(prompt='Hi', add_special_tokens=False)).json()
        assert bare['tokens'] == answer['tokens'][1:] and bare['token_strs'] is None
        for add, n in ((True, len(answer['tokens'])), (False, len(bare['tokens']))):
            fields = dict(prompt='Hi', max_tokens=1, add_special_tokens=add)
            assert client.post('/v1/completions', json=fields).json()['usage']['prompt_tokens'] == n


def test_an_answer_begins_without_the_blank_that_a_tokenizer_puts_there():
    """In a conversation; a completion keeps it. So the prompt of the next turn has the tokens that were drawn."""
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]"
    tokenizer = sentencepiece_tokenizer(TEXT, end_tokens=[2], chat_template=template)
    blank = next(i for i, piece in enumerate(tokenizer.token_bytes) if piece.startswith(b' ') and len(piece) > 1)
    text = tokenizer.token_bytes[blank].decode()
    with chatting(gpt(**LLAMA | dict(vocab_size=400)), tokenizer) as client:
        fields = dict(max_tokens=2, logit_bias={blank: 100})
        for stream in (False, True):
            body = fields | dict(messages=[dict(role='user', content='Hi')], stream=stream)
            answer = client.post('/v1/chat/completions', json=body)
            assert answer.status_code == 200, answer.text
            choices = [e['choices'][0] for e in events(answer.content)[:-1]] if stream else answer.json()['choices']
            pieces = [choice['delta' if stream else 'message']['content'] for choice in choices]
            assert ''.join(pieces) == (text * 2).removeprefix(' ')
        assert client.post('/v1/completions', json=fields | dict(prompt='Hi')).json()['choices'][0]['text'] == text * 2


def test_a_stream_without_news_has_comments(monkeypatch):
    """Proxies and clients close a connection on which nothing comes. The openai client reads over them."""
    openai = pytest.importorskip('openai', reason="openai is not installed")
    monkeypatch.setattr('serving.answer.SILENCE', 0.05)
    engine = spelling_engine(n_allowed=0)
    with serving(engine) as client, openai.OpenAI(base_url=f'{client.base_url}/v1', api_key='-') as ours:
        threading.Timer(0.4, engine.allow, [float('inf')]).start()
        with client.stream('POST', '/v1/completions', json=dict(prompt='abc', stream=True, max_tokens=2)) as response:
            lines = [*response.iter_lines()]
        assert lines[0] == ': waiting' and lines[2] == ': waiting' and lines[-2] == 'data: [DONE]'
        assert 2 < lines.count(': waiting') < 12
        engine.allow(0)
        threading.Timer(0.3, engine.allow, [float('inf')]).start()
        assert len([*ours.completions.create(model='', prompt='abc', stream=True, max_tokens=2)]) >= 1
