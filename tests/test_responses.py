"""POST /v1/responses: each event and object by the types of the openai client, and the same answer as from a chat."""
import json

import pytest
from conftest import SERVING, needs

needs(*SERVING)
openai = pytest.importorskip('openai', reason="openai is not installed")

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from test_refusals import served_chat
from test_tools import CALLS, QWEN, TOOLS, USER, saying, written  # noqa: F401

from serving import answer
from serving.constraints import DeadEnd
from serving.request import Logprobs, Output
from serving.responses import ModelResponse, ResponseBody
from serving.served import requests_of

FLAT = [dict(type='function', **tool['function']) for tool in TOOLS]
EVENT = TypeAdapter(ResponseStreamEvent)


def post(client, **fields):
    response = client.post('/v1/responses', json=dict(input='Héllo', store=False) | fields)
    assert response.status_code == 200, response.text
    return response


def events_of(client, **fields):
    """The events of a stream, each of which has the form that the client's types say."""
    blocks, found = post(client, stream=True, **fields).text.split('\n\n'), []
    assert blocks.pop() == ''
    for number, block in enumerate(block for block in blocks if not block.startswith(':')):
        name, data = block.split('\n')
        found.append(json.loads(data.removeprefix('data: ')))
        assert name == f"event: {found[-1]['type']}" and found[-1]['sequence_number'] == number
        EVENT.validate_python(found[-1], strict=False)
    return found


def plain(response):
    """What of a response is the same each time it is asked for."""
    items = [item | dict(id=0, call_id=0) for item in response['output']]
    return items, response['status'], response['usage']['output_tokens'], response['incomplete_details']


TEXT = 'I look it up.'


@pytest.mark.parametrize('said, fields, kinds, status', [
    (TEXT, dict(), ['message'], 'completed'), ('', dict(), ['message'], 'completed'),
    (TEXT, dict(max_output_tokens=3), ['message'], 'incomplete'),
    (f'<think>\nHm.\n</think>\n\n{TEXT}', dict(), ['reasoning', 'message'], 'completed'),
    (f"<think>Hm.</think>{written('qwen', CALLS[:1])}", dict(tools=FLAT), ['reasoning', 'function_call'], 'completed'),
    ('<think>Hm.', dict(), ['reasoning', 'message'], 'completed'),
    (f"{TEXT}\n{written('qwen', CALLS)}", dict(tools=FLAT), ['message', 'function_call', 'function_call'], 'completed'),
    (f"{written('qwen', CALLS[:1])}\n{TEXT}", dict(tools=FLAT), ['function_call', 'message'], 'completed'),
    (written('qwen', CALLS), dict(tools=FLAT, parallel_tool_calls=False), ['function_call'], 'completed'),
    (written('qwen', CALLS), dict(tools=FLAT, tool_choice='none'), ['message'], 'completed')], ids=str)
def test_a_stream_says_step_by_step_what_the_whole_says(saying, said, fields, kinds, status):  # noqa: F811
    client, says = saying('qwen')
    says(said)
    fields = fields | dict(metadata=dict(a='b'), truncation='auto')
    whole = post(client, **fields).json()
    assert whole['metadata'] == dict(a='b') and whole['max_output_tokens'] == fields.get('max_output_tokens')
    other = post(client, max_completion_tokens=3, reasoning=dict(effort='low', summary='auto')).json()
    assert other['max_output_tokens'] == 3 and other['reasoning'] == dict(effort='low', summary=None)
    assert Response.model_validate(whole).status == status and [item['type'] for item in whole['output']] == kinds
    found = events_of(client, **fields)
    assert [event['type'] for event in found[:2]] == ['response.created', 'response.in_progress']
    assert found[-1]['type'] == f'response.{status}' and plain(found[-1]['response']) == plain(whole)
    for i, item in enumerate(found[-1]['response']['output']):
        own = [event for event in found if event.get('output_index') == i]
        assert own[0]['type'] == 'response.output_item.added' and own[-1]['item'] == item
        kind = dict(message='output_text', reasoning='reasoning_text').get(item['type'], 'function_call_arguments')
        part = ['content_part'] * (item['type'] != 'function_call')
        assert [event['type'] for event in own if not event['type'].endswith('.delta')] == [
            f'response.{name}' for name in (*[f'{of}.added' for of in ('output_item', *part)],
                                            *[f'{of}.done' for of in (kind, *part, 'output_item')])]
        pieces = [event['delta'] for event in own if event['type'] == f'response.{kind}.delta']
        done, = [event for event in own if event['type'] == f'response.{kind}.done']
        text = item['content'][0]['text'] if part else item['arguments']
        assert ''.join(pieces) == done.get('text', done.get('arguments')) == text
        assert item['type'] != 'reasoning' or text == 'Hm.'
    assert (whole['usage']['output_tokens_details']['reasoning_tokens'] > 0) == ('reasoning' in kinds)
    calls = [(item['name'], json.loads(item['arguments'])) for item in whole['output'] if 'arguments' in item]
    assert calls == CALLS[:kinds.count('function_call')] and whole['store'] is False


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('thought', ['', '<think>Hm</think>', '<think></think>'])
def test_log_probabilities_come_of_tokens_without_text_too(stream, thought, monkeypatch):
    """Of parts of a character, and of the end, but not of thoughts. At the end all of them are written again."""
    served = served_chat(QWEN)
    body = ResponseBody.model_validate(dict(input='Hi', top_logprobs=0, stream=stream, include=[
        'message.output_text.logprobs']))
    made, data = ModelResponse('x', body, served, requests_of(body, served, 'x', print)), b''
    drawn = [(token, served.tokenizer.decode([token]), -9., None) for token in served.tokenizer.encode(thought)]
    drawn += [(0, 'a', 0., None), (1, '', -1., None), (2, '€', -2., None), (3, '', -3., 'stop')]
    for token, text, logprob, reason in drawn:
        made.add(0, [Output(0, [token], text, [Logprobs(logprob, [])], reason)])
        assert thought or not made.is_large
        data += made.chunks() if stream and not made.done else b''
    monkeypatch.setattr('serving.responses.LARGE', 3)
    assert made.is_large
    if stream:
        found = [json.loads(line[6:]) for line in (data + made.chunks()).decode().split('\n') if line[:6] == 'data: ']
        whole = found[-1]['response']
        deltas = [each for event in found if event['type'].endswith('output_text.delta') for each in event['logprobs']]
        assert [each['logprob'] for each in deltas] == [0, -1, -2]
    else:
        whole = json.loads(answer.JSON(made.object()).body)
    assert [each['logprob'] for each in whole['output'][-1]['content'][0]['logprobs']] == [0, -1, -2, -3]


def test_the_openai_client_reads_texts_calls_and_streams_and_sends_them_back(saying):  # noqa: F811
    client, says = saying('qwen')
    says(f"<think>\nHm.\n</think>\n{TEXT}\n{written('qwen', CALLS)}")
    with openai.OpenAI(base_url=f'{client.base_url}/v1', api_key='-', max_retries=0) as ours:
        how = dict(model='chat', instructions='Be brief.', tools=FLAT)
        first = ours.responses.create(input='Héllo', **how)
        with ours.responses.stream(input='Héllo', **how) as stream:
            for _ in stream:
                pass
            assert stream.get_final_response().output_text == first.output_text == TEXT
        says('It is 0°.')
        user = dict(role='user', content=[dict(type='input_text', text='Héllo')])
        given = [user, *first.output, *[dict(type='function_call_output', call_id=item.call_id, output='0°')
                                        for item in first.output[2:]]]
        last = ours.responses.create(input=given, top_logprobs=2, **how)
    assert last.output_text == 'It is 0°.' and last.usage.input_tokens > first.usage.input_tokens
    scores = last.output[0].content[0].logprobs
    assert b''.join(bytes(score.bytes) for score in scores).decode() == 'It is 0°.<|im_end|>'
    assert len(scores[0].top_logprobs) == 2

    # a chat of the same messages has the same prompt
    message = dict(role='assistant', content=TEXT, reasoning_content='Hm.', tool_calls=[
        dict(id=item.call_id, type='function', function=dict(name=item.name, arguments=item.arguments))
        for item in first.output[2:]])
    results = [dict(role='tool', tool_call_id=item.call_id, content='0°') for item in first.output[2:]]
    tools = [dict(type='function', function={k: v for k, v in tool.items() if k != 'type'}) for tool in FLAT]
    system = dict(role='system', content='Be brief.')
    answer = client.post('/v1/chat/completions', json=dict(messages=[system, USER, message, *results], tools=tools))
    assert answer.json()['usage']['prompt_tokens'] == last.usage.input_tokens
    assert answer.json()['choices'][0]['message']['content'] == last.output_text


def test_a_format_is_that_of_the_text(saying):  # noqa: F811
    pytest.importorskip('llguidance', reason="llguidance is not installed")
    for schema, said in (dict(type='string', maxLength=3), 200), ({'if': {}}, 400):
        form = dict(type='json_schema', name='x', schema=schema, strict=True)
        response = saying('qwen')[0].post('/v1/responses', json=dict(input='Hi', text=dict(format=form)))
        assert response.status_code == said and (said == 400) == ('"text.format.schema' in response.text)
        assert said == 400 or form.items() <= response.json()['text']['format'].items()


@pytest.mark.parametrize('error, status, code', [(FloatingPointError, 500, 'server_error'),
                                                 (DeadEnd, 400, 'invalid_prompt')])
def test_what_fails_in_a_stream_is_an_event(saying, error, status, code):  # noqa: F811
    client, says = saying('qwen')
    says(TEXT)
    executor = client.service.thread.engine.executor
    try:
        def fail(batch):
            raise error('of a test')
        executor.execute_model = fail
        found = events_of(client)
        assert found[-1]['type'] == 'response.failed' and found[-1]['response']['error']['code'] == code
        assert 'of a test' in found[-1]['response']['error']['message']
        assert client.post('/v1/responses', json=dict(input='Hi')).status_code == status
    finally:
        del executor.execute_model
    post(client)
