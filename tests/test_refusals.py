"""What the API refuses: an error names the first field of a body that is wrong, and says what is wrong with it."""
import json

import pytest
from conftest import SERVING, needs

needs(*SERVING, 'llguidance')

from example_models import CHAT
from serving_process import chat_tokenizer_with
from small_engine import served_by
from test_tools import QWEN, TOOLS

from serving.api import APIError, parsed
from serving.bodies import ChatBody, CompletionBody
from serving.grammars import MOST_CHARACTERS
from serving.responses import ResponseBody, renamed
from serving.served import Served, requests_of

USER = dict(role='user', content='Hi')


def served_chat(template):
    tokenizer = chat_tokenizer_with(template)
    return Served('chat', tokenizer, tokenizer.bytes_of_tokens(), 2048)


KINDS = dict(  # the kind of a body, what it has besides the fields of a case, and the model
    completion=(CompletionBody, dict(prompt='abc'), served_by(None, max_tokens=64)),
    chat=(ChatBody, dict(messages=[USER]), served_chat(QWEN)),
    chat_without_tools=(ChatBody, dict(messages=[USER]), served_chat(CHAT)),
    chat_refused=(ChatBody, dict(messages=[USER]), served_chat("{{ raise_exception('say more') }}")),
    response=(ResponseBody, dict(input='Hi'), served_chat(QWEN)))
VALUES = [  # of a completion's fields
    *(('prompt', value) for value in (
        '', [], [[]], ['a', ''], [1, 'a'], ['a', [1]], [1, True], {}, None, ['a'] * 129, 'Q', [31], [-1], 3, [1.5],
        ['a', None])),
    *(('max_tokens', value) for value in (-2, '5', 5.5, True, 2**31)),
    ('temperature', -1), ('top_p', -0.1), ('top_p', 1.1), ('top_k', -2), ('top_k', 2**40), ('min_p', 2), ('n', 0),
    ('n', 129), ('seed', 2**63), ('seed', -2**63 - 1), ('stop', ['a'] * 257), ('stop', [1]),
    ('stop', ['a' * 2**15, 'b']), ('min_tokens', 2**63), ('min_tokens', 17), ('stop_token_ids', [31]),
    ('logprobs', 21), ('logprobs', '1'), ('echo', 1), ('logit_bias', {'a': 1}), ('logit_bias', {'31': 1}),
    ('logit_bias', {'1': 101}), ('logit_bias', [1]), ('logit_bias', {str(i): 1 for i in range(2**16 + 1)}),
    ('presence_penalty', 3), ('frequency_penalty', -3), ('repetition_penalty', 0), ('stream', 1),
    ('cache_salt', 'a' * 257), ('model', 3)]
COMPLETIONS = [
    (dict(stop_token_ids=['a']), 'stop_token_ids.0', 'integer'),
    (dict(stream=True, stream_options={'x': 1}), 'stream_options.x', 'leave it out'),
    (dict(tool_choice='auto', parallel_tool_calls=False, tools=[dict(type='function')]), 'tools', 'conversations'),
    (dict(function_call='auto', functions=[{}]), 'functions', 'tools here'),
    (dict(json_schema={'a': 1}, aaa=1, tool_choice='required'), 'json_schema', 'response_format'),
    (dict(guided_decoding_backend='x'), 'guided_decoding_backend', 'structured_outputs'),
    (dict(grammar='x'), 'grammar', 'structured_outputs'), (dict(store=True), 'store', 'keeps no'),
    (dict(best_of=2), 'best_of', 'n samples'), (dict(n=3, best_of=2), 'best_of', 'n samples'),
    (dict(use_beam_search=True), 'use_beam_search', 'draws samples'),
    (dict(repeat_penalty=1.1), 'repeat_penalty', 'repetition_penalty'), (dict(suffix='a'), 'suffix', 'the middle'),
    (dict(modalities=['text', 'audio']), 'modalities', 'text only'), (dict(zzzz=1), 'zzzz', 'leave it out'),
    (dict(temprature=0), 'temprature', 'did you mean temperature'), (dict(messages=[{}]), 'messages', 'chat'),
    (dict(prompt_logprobs=0), 'prompt_logprobs', 'echo'),
    (dict(max_completion_tokens=5), 'max_completion_tokens', 'max_tokens')]
CHATS = [
    (dict(prompt='x'), 'prompt', '/v1/completions'), (dict(guided_json={}), 'guided_json', 'response_format'),
    (dict(max_output_tokens=5), 'max_output_tokens', 'max_tokens here'),
    (dict(thinking=dict(type='on')), 'thinking.type', "'disabled'"), (dict(documents=[{}]), 'documents', 'kwargs'),
    (dict(think=False), 'think', 'enable_thinking'), (dict(thinking_budget=0), 'thinking_budget', 'enable_thinking'),
    (dict(function_call='f'), 'function_call', 'tool_choice'),
    (dict(messages=[]), 'messages', 'messages'), (dict(messages='hi'), 'messages', 'messages'),
    (dict(messages=None), 'messages', 'missing'), (dict(top_logprobs=3), 'top_logprobs', 'needs logprobs'),
    (dict(logprobs=True, top_logprobs=21), 'top_logprobs', '20'),
    (dict(max_completion_tokens=-2), 'max_completion_tokens', '-2'),
    *((dict(chat_template_kwargs={name: 1}), 'chat_template_kwargs', name) for name in ('messages', 'self', 'tools')),
    *((dict(continue_final_message=True) | more, 'continue_final_message', '') for more in (
        dict(), dict(messages=[USER, dict(role='assistant', content='a')], add_generation_prompt=True))),
    *((dict(messages=[USER, message]), f'messages.1{param}', said) for message, param, said in [
        (dict(role='user'), '.content', 'missing'),
        (dict(role='assistant', content=None, function_call=dict(name='x')), '', 'are tools here'),
        (dict(role='function', name='f', content='x'), '', 'tools here'),
        (dict(role='user', content=[dict(type='image_url', image_url='x')]), '.content', "'image_url'"),
        (dict(role='user', content=3), '.content', 'should be a text'),
        (dict(role='robot', content=3), '.role', "'robot'"), ('hi', '', 'an object'),
        (dict(role='user', content=[dict(type='text')]), '.content', 'an object of 1'),
        (dict(role='user', content=[dict(type='text', text='a'), 'b']), '.content', "not 'b'"),
        (dict(role='assistant', tool_calls=[dict(function=3)]), '.tool_calls.0.function', 'object')]),
    (dict(tools=[{}]), 'tools.0.type', 'missing'), (dict(tools={}), 'tools', 'list'),
    (dict(tools=[dict(type='web_search')]), 'tools.0.type', "'web_search'"), (dict(tools=TOOLS * 65), 'tools', '128'),
    *((dict(tools=[dict(type='function', function=function)]), f'tools.0.function.{param}', said)
      for function, param, said in [(dict(name=''), 'name', 'at least 1'), (dict(name='a' * 257), 'name', '256'),
                                    (dict(name='a', parameters=[]), 'parameters', 'object'),
                                    (dict(name='a', parameters=dict(type=['array', 'null'])), 'parameters', 'of 2')]),
    (dict(tools=TOOLS, tool_choice='any'), 'tool_choice', 'none, auto, required'),
    (dict(tools=TOOLS, tool_choice=dict(type='function', function=dict(name='rm'))), 'tool_choice', 'rm'),
    (dict(tool_choice='required'), 'tool_choice', 'none')]
TOOLLESS = [
    (dict(tools=TOOLS), 'tools', '--chat_template'),
    (dict(messages=[USER, dict(role='tool', content='x')]), 'messages', "describe them in a message"),
    (dict(messages=[USER, dict(role='assistant', tool_calls=[dict(function=dict(name='add', arguments='{}'))])]),
     'messages', "not in this model's chat template")]
RESPONSES = [
    (dict(previous_response_id='resp_1'), 'previous_response_id', 'the whole conversation'),
    (dict(conversation=dict(id='x')), 'conversation', 'the whole conversation'),
    (dict(background=True), 'background', 'keeps no answers'),
    (dict(return_token_ids=True), 'return_token_ids', 'False'),
    (dict(max_tokens=5), 'max_tokens', 'its name is max_output_tokens'),
    (dict(messages=[USER]), 'messages', 'chat/completions'),
    (dict(reasoning=dict(effort=1)), 'reasoning.effort', 'string'), (dict(n=2), 'n', '1'),
    (dict(input=[]), 'input', 'at least 1'), (dict(input=None), 'input', 'missing'), (dict(input=3), 'input', 'list'),
    (dict(input=[3]), 'input.0', 'an object'),
    (dict(input=[dict(type='item_reference', id='x')]), 'input.0', "send the whole item"),
    (dict(input=[dict(type='image_generation_call', id='x')]), 'input.0', "'image_generation_call'"),
    (dict(input=[dict(role='user', content=[dict(type='input_image')])]), 'input.0.content', "'input_image'"),
    (dict(input=[dict(type='function_call')]), 'input.0.tool_calls.0.function.name', 'missing'),
    (dict(tools=[dict(type='web_search')]), 'tools.0.type', "'web_search'"),
    (dict(tools=[dict(type='function', name='f')], tool_choice=dict(type='function', name='rm')), 'tool_choice', 'rm'),
    (dict(max_output_tokens=5000), 'max_output_tokens', 'largest max_output_tokens')]
FORMS = [
    *((dict(response_format=form), f'response_format{param}', said) for form, param, said in [
        (dict(type='text', json_schema=dict(name='p', schema={})), '', 'the type text takes no schema'),
        (dict(type='json_schema', schema=None), '', 'is missing'), (dict(type='text', schema={}), '.schema', 'leave'),
        (dict(type='json_schema', schema={}, json_schema=dict(schema={})), '.schema', 'leave'),
        (dict(type='json_schema'), '', 'json_schema'), (dict(type='xml'), '.type', 'json_object'),
        (dict(type='json_schema', json_schema=dict(name='a')), '.json_schema.schema', 'missing'),
        (dict(type='json_schema', json_schema=dict(name='a', schema={'if': {}})), '.json_schema.schema', 'if')]),
    *((dict(structured_outputs={name: form}), f'structured_outputs.{name}', said) for name, form, said in [
        ('json', {'type': 'no type'}, 'no type'), ('json', {'properties': {'a': {'format': 'no-format'}}}, 'no-format'),
        ('json', '{', 'cannot be read'), ('json', '[]', 'object'), ('json', 3, 'schema'),
        ('json', {'a': json.loads('[' * 300 + ']' * 300)}, 'deeply'), ('regex', '[a', 'regex'), ('lark', 'a', 'leave'),
        ('regex', '(?=a)b', 'look'), ('regex', '', 'empty'), ('regex', 'a' * (MOST_CHARACTERS + 1), 'characters'),
        ('choice', [''], 'empty'), ('grammar', 'start: nothing', 'nothing'),
        ('grammar', 'start: "a"\nstart2: (', '2(10)'), ('grammar', 'x ::= "a"', "cannot be read: No 'root' rule"),
        ('grammar', 'root ::= [a-', 'cannot be read: Unexpected end')]),
    (dict(structured_outputs=dict(choice=[1])), 'structured_outputs.choice.0', 'string'),
    (dict(structured_outputs=dict(regex='a', choice=['b'])), 'structured_outputs.choice', 'give one'),
    *((dict(structured_outputs=dict(regex='a'), response_format=dict(type='json_object')) | more,
       'response_format.type', 'give one') for more in (dict(), dict(tools=TOOLS))),
    *((dict(response_format=dict(type='json_schema', json_schema=dict(name='x', schema=schema)), tools=TOOLS),
       'tools', said) for schema, said in (({'x-guidance': 5}, 'guidance'),
                                           (dict(properties=dict(id=dict(const=2**60 + 1))), 'may round'))),
    (dict(guided_regex='a'), 'guided_regex', 'structured_outputs'),
    (dict(tools=[dict(type='function', function=dict(name='f', parameters=dict(properties=dict(a=dict(
        type='string', format='nonsense')))))], tool_choice='required'),
     'tools', 'tools: failed to compile JSON schema: Unknown format: nonsense')]

ROWS = dict(completion=COMPLETIONS, chat=CHATS + FORMS, chat_without_tools=TOOLLESS, response=RESPONSES,
            chat_refused=[(dict(), 'messages', 'the chat template does not take this conversation')])


@pytest.mark.parametrize('kind, fields, param, said', [
    *(('completion', {name: value}, name, name) for name, value in VALUES),
    *((kind, *row) for kind, rows in ROWS.items() for row in rows)], ids=lambda value: str(value)[:60])
def test_an_error_names_the_first_field_that_is_wrong(kind, fields, param, said):
    body, others, served = KINDS[kind]
    # clients send their fields in alphabetical order
    data = json.dumps(dict(sorted((others | fields).items()))).encode()
    with pytest.raises(APIError) as caught:
        read = parsed(body, data)
        try:
            requests_of(read, served, 'x', print)
        except APIError as e:
            raise renamed(e) if body is ResponseBody else e from None
    error = caught.value.json()['error']
    assert caught.value.status == 400 and error['param'] == param and said in error['message'], error
    assert set(error) == {'message', 'type', 'param', 'code'} and error['type'] == 'invalid_request_error'
    assert '\n' not in error['message'] and len(error['message']) < 500
