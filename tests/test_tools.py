"""Tools in templates, held against transformers; calls in answers, whole and in pieces."""
import json
import random
from contextlib import ExitStack
from functools import cache

import pytest
from conftest import ROOT, SERVING, needs, sizes
from hypothesis import example, given
from hypothesis import strategies as st

from chat.template import ChatTemplate
from chat.tools import HERMES, LLAMA, Call, Reader, form_of, grammar, shows_tools, takes_several_calls
from tokenizer import read_text, state_beside

needs(*SERVING)

from example_models import CHAT, gpt
from example_models import LLAMA as LLAMA_MODEL
from serving_process import chat_tokenizer_with, chatting
from test_chat_template import SMOLLM2, SPECIAL, n_refused, their_tokenizer
from toy_executor import Saying, toy_model

TOOLS = [dict(type='function', function=dict(name='get_weather', description='Of a "place" <é>', parameters=dict(
             type='object', required=['city'], properties=dict(
                 city=dict(type='string'), days=dict(anyOf=[dict(type='integer'), dict(type='null')], default=None))))),
         dict(type='function', function=dict(name='add', parameters=dict(
             type='object', properties=dict(a=dict(type='number'), b=dict(type='number')), required=['a', 'b'])))]
TURNS = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
{% if m.reasoning_content and messages[-1].role == 'tool' %}<think>
{{ m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}{% if m.content is defined %}:{{ m.content }}{% endif %}\
{% for call in m.tool_calls or [] %}{% set f = call.function %}\
{{ '\\n<tool_call>\\n{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}\\n</tool_call>' }}\
{% endfor %}{{ m.tool_call_id }}{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
QWEN = """\
{% if tools %}{{ '<|im_start|>system\\n<tools>' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{ '\\n</tools>\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>' }}\
{{ '<|im_end|>\\n' }}{% endif %}""" + TURNS
HERMES3 = """\
{{- '<tools> ' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- ' </tools>' }}
{{- "<tool_call>\n" }}
{{- '{"name": <function-name>, "arguments": <args-dict>}\n' }}
{{- '</tool_call>' }}"""
LLAMA32 = """\
{% if tools is not none %}{{ 'Respond in the format {"name": function name, "parameters": dictionary of argument name \
and its value}.' }}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}
{% for m in messages %}{{ m.role }}
{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one at a time') }}{% endif %}
{{ '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' + m.tool_calls[0].function.arguments | tojson }}}
{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}{% endfor %}"""
SMOLLM2_TOOLS = read_text(f'{ROOT}/chat/smollm2_tools.jinja')
TEMPLATES = dict(qwen=QWEN, llama=LLAMA32, smollm2=SMOLLM2_TOOLS)
XML = "<tool_call>\n<function=name>\n<parameter=a>"


def real_llama():
    """The template of Llama 4, which transformers has in its source."""
    module = pytest.importorskip('transformers.models.llama4.processing_llama4')
    return module.chat_template


def conversation(rng):
    """Messages as templates know them, with calls and their results."""
    text, messages = lambda: ' '.join(rng.choices(['Hé', '\n', '"', '<b>', '{}'], k=rng.randint(1, 4))), []
    for _ in range(rng.randint(1, 3)):
        messages.append(dict(role='user', content=text()))
        if rng.random() < .6:
            calls = [dict(id=f'c{i}', type='function', function=dict(name='add', arguments=dict(a=i, b=[text(), None])))
                     for i in range(rng.randint(1, 2))]
            said = dict(content=text()) if rng.random() < .5 else {}
            messages.append(dict(role='assistant', tool_calls=calls, **said))
            messages += [dict(role='tool', content=text(), tool_call_id=call['id']) for call in calls]
        messages.append(dict(role='assistant', content=text()))
    return [dict(role='system', content=text())] * (rng.random() < .5) + messages


@pytest.mark.parametrize('name', [*TEMPLATES, 'llama4', 'named'])
def test_the_text_with_tools_is_that_of_transformers(name, tmp_path):
    source = real_llama() if name == 'llama4' else TEMPLATES.get(name)
    theirs = their_tokenizer(source)
    if name == 'named':  # as of Hermes 2 and 3
        named = [dict(name='default', template=CHAT + '\n'), dict(name='tool_use', template='\n' + QWEN + '\n')]
        (tmp_path / 'tokenizer_config.json').write_text(json.dumps(dict(chat_template=named)))
        source = state_beside(tmp_path)['chat_template']
        theirs.chat_template = {each['name']: each['template'] for each in named}
    ours, conversations, n = ChatTemplate(source, SPECIAL), [], sizes(20, 200)
    assert shows_tools(ours)
    for seed in range(n):
        messages, tools = conversation(random.Random(seed)), [None, TOOLS, TOOLS[:1]][seed % 3]
        if name == 'named' and tools is None:
            messages = [m for m in messages if m.get('content') and m['role'] != 'tool']
        conversations.append((messages, tools))
    assert n_refused(ours, theirs, conversations) < n - 5


def test_the_form_of_calls_is_read_from_the_template():
    forms = [form_of(ChatTemplate(source)) for source in (QWEN, HERMES3, TURNS, LLAMA32, real_llama(), SMOLLM2_TOOLS)]
    assert forms == [HERMES] * 3 + [LLAMA] * 2 + [HERMES._replace(listed=True)]
    assert ['{0,' in grammar(HERMES, TOOLS, several, str) for several in (True, False)] == [True, False]
    assert {form_of(ChatTemplate(source)) for source in (CHAT, XML, '<tool_call>{function-name}')} == {None}
    takes = {name: takes_several_calls(ChatTemplate(source)) for name, source in TEMPLATES.items()}
    assert takes == dict(qwen=True, llama=False, smollm2=True)
    assert shows_tools(ChatTemplate(
        "{% for t in tools %}{{ t.function.name + t.function.parameters.properties | join }}{% endfor %}"))
    assert not shows_tools(ChatTemplate(SMOLLM2)) and not shows_tools(ChatTemplate("{{ raise_exception('no') }}"))
    messages = [dict(role='user', content='Hi'), dict(role='assistant', content='')]
    assert ChatTemplate(SMOLLM2_TOOLS).render(messages) == ChatTemplate(SMOLLM2).render(messages)


VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
    | st.sampled_from(['</tool_call>', 'a"</tool_call>\\', '\\"\n<tool_call>{']),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2), max_leaves=4)
SAID = st.text('ab <>/_tolcbe{}\n', max_size=12).map(lambda t: t.replace('<tool_call>', '')) | st.just(
    'I write <tool_call> ')
A_CALL = st.tuples(st.sampled_from(['add', 'get_weather']), st.dictionaries(st.text(max_size=3), VALUES, max_size=2))
CUTS = st.lists(st.integers(0, 400), max_size=12)


def read(form, text, cuts, most=9):
    """(the text, the calls as values) of an answer that comes in pieces."""
    reader, pieces = Reader(form, ['add', 'get_weather'], most), []
    cuts = sorted({min(cut, len(text)) for cut in cuts})
    for start, end in zip([0, *cuts], [*cuts, len(text)]):
        pieces += reader.push(text[start:end])
    pieces += reader.push('', last=True)
    assert len({piece.id for piece in pieces if isinstance(piece, Call)}) == sum(isinstance(p, Call) for p in pieces)
    return pieces, [(p.name, json.loads(p.arguments)) for p in pieces if isinstance(p, Call)]


@example([('add', {'a"\\': '</tool_call>"\\'}), 'so'], [], '', False)  # a closing tag counts outside of texts
@example(['a < b <tool'], [], '', False)
@given(st.lists(SAID | A_CALL, max_size=5), CUTS, st.sampled_from(['\n', '', ' \n']), st.booleans())
def test_calls_are_found_in_any_pieces(parts, cuts, blank, listed):
    """Texts are kept to the character but for blanks beside calls; where there are no calls, entirely."""
    form, written = HERMES._replace(listed=listed), ''
    for part in parts:
        if type(part) is tuple:
            call = json.dumps(dict(name=part[0], arguments=part[1]), ensure_ascii=False)
            written += f'<tool_call>{blank}{f"[{call}]" if listed else call}{blank}</tool_call>'
        else:
            written += part
    pieces, calls = read(form, written, cuts)
    expected = [part for part in parts if type(part) is tuple]
    assert calls == [(name, json.loads(json.dumps(arguments))) for name, arguments in expected]
    said = ''.join(piece for piece in pieces if type(piece) is str)
    texts = [part for part in parts if type(part) is str]
    if not expected:
        assert said == written
    assert said.replace(' ', '').replace('\n', '') == ''.join(texts).replace(' ', '').replace('\n', '')
    assert read(form, written, [])[0:2][1] == calls
    assert [p for p in read(form, written, cuts, most=1)[1]] == calls[:1]


@pytest.mark.parametrize('form', [HERMES, LLAMA], ids=['tags', 'bare'])
@pytest.mark.parametrize('written', [
    'a plain text', '{"a": 1}', '{"name": "rm", "arguments": {}, "parameters": {}}', '{"name": "add", "arguments": 3}',
    '{"name": ["add"], "arguments": {}}', '{"name": "add", "arguments": {"a": NaN}}', '[[]]', '"add"', '{' * 5000,
    '{"name": "add", "arguments": {"a": "\\ud800"}, "parameters": {"a": "\\ud800"}}', '[' * 5000, '{"name": "add"',
    ' \n', '{"name": "add", "parameters": 3, "arguments": []} x', ', and so on', ';', '[]', '[] is an empty list'])
def test_what_is_no_call_is_text(form, written):
    for text in (written, f'{form.opens}{written}{form.closes}', f' a {form.opens} {written}'):
        if text.removeprefix(form.opens).removesuffix(form.closes).strip() or not form.opens:
            pieces, calls = read(form, text, [1, 5, 12, 30])
            assert calls == [] and ''.join(pieces) == text


@pytest.mark.parametrize('written, n', [
    ('{"name": "add", "parameters": {"a": 1}}', 1), ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', 1),
    (' {"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}\n', 2)])
def test_calls_without_tags(written, n):
    assert read(LLAMA, written, [14, 20])[1] == [('add', dict(a=1))] * n
    if written.startswith('<'):
        assert all(read(LLAMA, written, [n])[1] for n in range(len(written)))
    assert Reader(LLAMA, ['add']).push('I say') == ['I say']  # at once
    for before in 'I say: ', ';', '[':  # in one piece and in several
        assert read(LLAMA, before + written, [3, 20])[1] == read(LLAMA, before + written, [])[1] == []
    unclosed = HERMES.opens + '{"name": "add", "arguments": {"a": 1}}'
    reader = Reader(HERMES, ['add'])
    assert len(reader.push('<tool_call>{"name": "no", "arguments": {"a": "<tool_call>"}}</tool_call>') + reader.push(
        unclosed + HERMES.closes)) == 2  # each when it is complete
    for many in HERMES.opens + '"', HERMES.closes:  # in time
        assert Reader(HERMES, ['add']).push(HERMES.opens + '"' + many * 50_000, last=True)
    assert read(HERMES, unclosed, [3, 20])[1] == [('add', dict(a=1))]
    broken = HERMES.opens + '{"name": "add, "arguments": {}}' + HERMES.closes  # hides no call behind it
    assert read(HERMES, broken + unclosed + HERMES.closes, [3, 20])[1] == [('add', dict(a=1))]


@pytest.mark.parametrize('written, arguments', [
    ('{"name": "add", "arguments": {"a": "x\ny\t"}}', dict(a='x\ny\t')),  # line breaks in a text, as models write code
    ('{"name": "add", "arguments": "{\\"a\\": 1}"}', dict(a=1)), ('{"name": "add", "arguments": null}', {}),
    ('{"name": "add"}', {}), ('{"name": "add", "arguments": null, "parameters": {"a": 1}}', dict(a=1))])
def test_calls_as_models_write_them(written, arguments):
    for form in HERMES, LLAMA:
        assert read(form, form.opens + written + form.closes, [20])[1] == [('add', arguments)]


@pytest.fixture(scope='module')
def saying():
    """A function that starts a server with a template: (its client, a function that sets what all answers say)."""
    with ExitStack() as stack:
        @cache
        def started(name):
            tokenizer, model = chat_tokenizer_with(TEMPLATES.get(name, name)), toy_model(2048, 300)
            executor = Saying(model)
            client = stack.enter_context(chatting(model, tokenizer, executor, n_pages=1024))
            return client, lambda text: setattr(executor, 'says', [*tokenizer.encode(text), 2])
        yield started


def written(name, calls):
    """An answer with calls, as a model of this template writes it."""
    field = 'parameters' if name == 'llama' else 'arguments'
    texts = [json.dumps({'name': each, field: arguments}, ensure_ascii=False) for each, arguments in calls]
    if name == 'smollm2':
        return f'<tool_call>[\n{", ".join(texts)}\n]</tool_call>'
    return '; '.join(texts) if name == 'llama' else '\n'.join(f'<tool_call>\n{t}\n</tool_call>' for t in texts)


CALLS = [('get_weather', dict(city='Zürich 日本', days=2)), ('add', dict(a=1, b=-2.5))]
USER = dict(role='user', content='Héllo')


@pytest.mark.parametrize('name', TEMPLATES)
@pytest.mark.parametrize('parallel', [True, False])
def test_the_openai_client_reads_calls_and_sends_them_back(saying, name, parallel):
    openai = pytest.importorskip('openai', reason="openai is not installed")
    client, says = saying(name)
    several, text = parallel and name != 'llama', 'I look it up.' if name != 'llama' and parallel else ''
    says(f'{text}\n{written(name, CALLS)}')  # llama's template raises at a message with two
    calls = CALLS if several else CALLS[:1]
    with openai.OpenAI(base_url=f'{client.base_url}/v1', api_key='-', max_retries=0) as ours:
        how = dict(model='chat', messages=[USER], tools=TOOLS, parallel_tool_calls=parallel)
        choice, = ours.chat.completions.create(**how).choices
        message = choice.message
        assert choice.finish_reason == 'tool_calls' and message.content == (text or None)
        assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == calls
        with ours.chat.completions.stream(**how) as stream:
            found = [*stream]
            n_events = sum(event.type == 'tool_calls.function.arguments.done' for event in found)
            chunks = [event.chunk.choices[0] for event in found if event.type == 'chunk']
            assert max(len(chunk.delta.tool_calls or ()) for chunk in chunks) == 1  # as OpenAI's
            assert chunks[-1].finish_reason and not chunks[-1].delta.tool_calls
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == 'tool_calls' and streamed.message.content == message.content
        assert [(c.function.name, c.function.arguments) for c in streamed.message.tool_calls] == [
            (c.function.name, c.function.arguments) for c in message.tool_calls]
        assert n_events == len(calls) and len({c.id for c in message.tool_calls}) == len(calls)

        # the message and its results can be sent back; the text is that of transformers for the same messages
        back = [USER, message.model_dump(), *[dict(role='tool', tool_call_id=c.id, content=f'{i}°')
                                              for i, c in enumerate(message.tool_calls)]]
        says('It is 0°.')
        answer = ours.chat.completions.create(model='chat', messages=back, tools=TOOLS).choices[0]
        assert (answer.message.content, answer.finish_reason, answer.message.tool_calls) == ('It is 0°.', 'stop', None)
    theirs = their_tokenizer(TEMPLATES[name])
    called = [dict(id=c.id, type='function', function=dict(name=f, arguments=a))
              for c, (f, a) in zip(message.tool_calls, calls)]
    said = dict(content=message.content) if text else {}
    plain = [USER, dict(role='assistant', tool_calls=called, **said), *back[2:]]
    tokens = client.post('/tokenize', json=dict(messages=back, tools=TOOLS)).json()['tokens']
    tokenizer = client.service.served.tokenizer
    special = dict(bos_token='<|im_start|>', eos_token='<|im_end|>')
    assert tokens == tokenizer.encode(theirs.apply_chat_template(
        plain, tools=TOOLS, tokenize=False, add_generation_prompt=True, **special))


@pytest.mark.parametrize('given, expected', [
    ('{"a": "\n"}', dict(a='\n')), ('"{\\"a\\": 1}"', dict(a=1)), (dict(a=1), dict(a=1)),
    *((broken, {}) for broken in ('{"a": "x', 'null', '[]', '3', ' ', '', None))])
def test_a_conversation_goes_on_whatever_a_model_once_wrote(saying, given, expected):
    """Arguments that are no object are empty ones, and a tool may say nothing."""
    client, says = saying('qwen')
    says('Yes.')

    def answer_to(arguments, content, **of_tool):
        calls = [dict(id='c', type='function', function=dict(name='add', arguments=arguments))]
        tools = [dict(type='function', function=dict(name='add', **of_tool))]
        result = dict(role='tool', tool_call_id='c', content=content)
        messages = [USER, dict(role='assistant', tool_calls=calls), result]
        return [client.post(path, json=dict(messages=messages, tools=tools)).json()
                for path in ('/tokenize', '/v1/chat/completions')]
    (ids, answer), (same, _) = answer_to(given, None), answer_to(
        json.dumps(expected), '', parameters=dict(type='object', properties={}))
    assert ids['tokens'] == same['tokens'] and answer['choices'][0]['message']['content'] == 'Yes.'
    item = dict(type='function_call', call_id='c', name='add', arguments=given)
    said = client.post('/v1/responses', json=dict(input=[item, dict(type='function_call_output', call_id='c')])).json()
    assert said['output'][0]['content'][0]['text'] == 'Yes.'


@pytest.fixture(scope='module')
def drawing():
    """A function that starts a server of random weights with a template: its client."""
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(chatting(
            gpt(**LLAMA_MODEL | dict(block_size=2048)), chat_tokenizer_with(TEMPLATES[name]), n_pages=2048)))


PAINT = '画"/天 '
PROPERTIES = {
    PAINT: dict(colour=dict(enum=['red', 'grün', '"']), at=dict(type='array', items=dict(type='boolean'), maxItems=2)),
    'stop': {}, 'wait': dict(unit=dict(const='s'), how=dict(anyOf=[dict(type='null'), dict(const=1)]))}
FORCED = [dict(type='function', function=dict(name=name, parameters=dict(
    type='object', properties=properties, required=[*properties]))) for name, properties in PROPERTIES.items()]
del FORCED[1]['function']['parameters']  # it has no arguments
PERSON = dict(type='json_schema', json_schema=dict(name='p', schema=dict(
    type='object', properties=dict(age=dict(enum=[36, 85])), required=['age'], additionalProperties=False)))


@pytest.mark.parametrize('name', TEMPLATES)
def test_an_answer_that_must_call_does_so_as_the_schemas_say(drawing, name):
    """At a high temperature, by random weights: jsonschema is the judge."""
    jsonschema = pytest.importorskip('jsonschema')
    pytest.importorskip('llguidance')
    client, seen, n_whole = drawing(name), set(), 0
    schemas = {tool['function']['name']: tool['function'].get('parameters', dict(maxProperties=0)) for tool in FORCED}
    for seed in range(sizes(12, 100)):
        several, only = seed % 2 > 0, dict(name=PAINT) if seed % 3 == 0 else {}
        how = dict(temperature=1.5, seed=seed, parallel_tool_calls=several)
        chat = dict(messages=[USER], tools=FORCED, max_tokens=500, **how)
        chosen = dict(type='function', function=only) if only else 'required'
        choice, = client.post('/v1/chat/completions', json=chat | dict(tool_choice=chosen)).json()['choices']
        if choice['finish_reason'] == 'length':
            continue
        calls, n_whole = [call['function'] for call in choice['message']['tool_calls']], n_whole + 1
        assert choice['finish_reason'] == 'tool_calls' and choice['message']['content'] is None
        assert len(calls) == 1 or several and not only and name != 'llama'
        for call in calls:
            jsonschema.validate(json.loads(call['arguments']), schemas[call['name']])
            assert not only or call['name'] == PAINT
            seen.add(call['name'])
        flat = [dict(type='function', **tool['function']) for tool in FORCED]
        fields = dict(input=USER['content'], tools=flat, max_output_tokens=500, **how)
        chosen = dict(type='function', **only) if only else 'required'
        response = client.post('/v1/responses', json=fields | dict(tool_choice=chosen)).json()
        assert [dict(name=item['name'], arguments=item['arguments']) for item in response['output']] == calls
    assert seen == {*schemas} and n_whole > sizes(6, 60)


@pytest.mark.parametrize('name', TEMPLATES)
def test_beside_a_schema_an_answer_may_call(drawing, name):
    pytest.importorskip('llguidance')
    client, kinds = drawing(name), set()
    for seed in range(sizes(16, 60)):
        fields = dict(messages=[USER], tools=FORCED, temperature=1.5, seed=seed, max_tokens=500, response_format=PERSON)
        choice, = client.post('/v1/chat/completions', json=fields).json()['choices']
        if choice['finish_reason'] == 'stop':
            assert json.loads(choice['message']['content'])['age'] in (36, 85)
        kinds.add(choice['finish_reason'])
    assert {'stop', 'tool_calls'} <= kinds
