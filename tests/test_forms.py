"""Texts that have a form: masks against every token by itself, answers against jsonschema, fields of the API."""
import json
import math
import random
import re
import sys
from types import SimpleNamespace

import pytest
from conftest import SERVING, needs, sizes

needs(*SERVING, 'llguidance', 'regex', 'jsonschema')

import jsonschema
import numpy as np
import regex
from example_models import CHAT, LLAMA, chat_tokenizer, gpt, sentencepiece_tokenizer
from serving_process import chat_tokenizer_with, chatting
from test_chat_api import TOKENIZER, ask
from test_sample import printed_by_script, server  # noqa: F401
from toy_executor import Saying, toy_model

import sample as script
from chat.conversation import Conversation
from decode.cpu import CPUExecutor
from engine import Engine, default_pool
from serving import grammars
from serving.constraints import Vocabulary, compiled

BLANKS = r'( |\n{1,2} {0,20})?'
OBJECT = {'type': 'object', 'properties': {'a': {'enum': ['x', 'yy', 3]}, 'é': {'type': 'boolean'},
                                           'c': {'type': 'null'}},
          'required': ['a', 'é'], 'additionalProperties': False}
LIST = {'type': 'array', 'items': {'type': 'integer', 'minimum': 1, 'maximum': 99}, 'maxItems': 2}
NESTED = 'start: "(" start ")" | WORD\nWORD: /[ab]+/'


def by_regex(pattern):
    """A judge of texts: (can a text of the form begin so? is it one?)."""
    expression = regex.compile(pattern)

    def judge(text):
        return expression.fullmatch(text, partial=True) is not None, expression.fullmatch(text) is not None
    return judge


def by_counting(text):
    """The judge of NESTED."""
    found = re.fullmatch(r'(\(*)([ab]*)(\)*)', text)
    if not found or found[3] and not found[2] or len(found[3]) > len(found[1]):
        return False, False
    return True, bool(found[2]) and len(found[1]) == len(found[3])


FORMS = {
    'digits': ('regex', '[0-9]{2,4}(-[a-c]+)?', by_regex('[0-9]{2,4}(-[a-c]+)?')),
    'characters of several bytes': ('regex', '(é|日本|🙂x| )+', by_regex('(é|日本|🙂x| )+')),
    'choice': ('choice', ('yes', 'no', 'no "way"\n', '日', ' no'), by_regex('yes|no|no "way"\n|日| no')),
    'object': ('json_schema', json.dumps(OBJECT), by_regex(
        r'\{_"a"_:_("x"|"yy"|3)_,_"é"_:_(true|false)_(,_"c"_:_null_)?\}'.replace('_', BLANKS))),
    'array': ('json_schema', json.dumps(LIST), by_regex(
        r'\[_([1-9][0-9]?_(,_[1-9][0-9]?_)?)?\]'.replace('_', BLANKS))),
    'nested': ('grammar', NESTED, by_counting),
    'GBNF': ('grammar', 'root ::= "(" root ")" | word\nword ::= [ab]+', by_counting),
}
ALPHABET = 'é日本🙂'


def made_up(n=300, n_known=290):
    """A tokenizer whose tokens are any bytes, some of them twice, some empty, some special."""
    rng = random.Random(0)
    pieces = [bytes([i]) for i in range(128)] + [part for c in ALPHABET for part in (c.encode(), c.encode()[:1],
                                                                                     c.encode()[1:], c.encode()[:2])]
    tokens = pieces + [b''.join(rng.choices(pieces, k=rng.randint(2, 4))) for _ in range(n_known - len(pieces) - 30)]
    tokens += rng.choices(tokens, k=20) + [b'', b'no', b'"a', b'": ', b'((', b'))', b'{"', b'<end>', b'yes', b'12']
    return SimpleNamespace(bytes_of_tokens=lambda: tokens, special_ids={n_known - 3, n_known - 2, n_known + 5}), n


VOCABULARIES = {'byte pairs': (TOKENIZER, 300), 'made up': made_up()}
END = {'byte pairs': 2, 'made up': 288}


def bits(allowed, n):
    return {t for t in range(n) if allowed[t // 64] >> (t % 64) & 1}


@pytest.mark.parametrize('kind', VOCABULARIES)
@pytest.mark.parametrize('form', FORMS)
def test_masks_are_those_found_by_trying_every_token(form, kind):
    (how, text, judge), (tokenizer, n), end = FORMS[form], VOCABULARIES[kind], END[kind]
    tokens, rng, n_states, n_ends = tokenizer.bytes_of_tokens(), random.Random(1), 0, 0
    template = compiled(how, text, Vocabulary(tokenizer, n))

    def begins(data):
        try:
            return judge(data.decode())[0]
        except UnicodeDecodeError as e:  # it may end in the middle of a character
            head, tail = data[:e.start].decode(), data[e.start:]
            return any(c.encode().startswith(tail) and judge(head + c)[0] for c in ALPHABET)

    def is_whole(data):
        try:
            return judge(data.decode())[1]
        except UnicodeDecodeError:
            return False
    while n_states < sizes(150, 1000):
        blank = tokens.index(b' ') if n_states == 0 else -1  # the first text has as many blanks as may come
        constraint, drawn, data = template.for_sample([end]), [], b''
        while len(drawn) < 60:
            expected = {t for t, new in enumerate(tokens[:n]) if new and t not in tokenizer.special_ids
                        and begins(data + new)}
            whole, n_states = is_whole(data), n_states + 1
            assert constraint.is_complete == (not expected) and bool(constraint.error) == (not expected and not whole)
            n_ends += whole
            if not expected:
                break
            assert bits(constraint.allowed, n) == expected | ({end} if whole else set()), (drawn, data)
            drawn.append(blank if blank in expected else rng.choice(sorted(expected)))
            data += tokens[drawn[-1]]
            constraint.take(drawn)
            constraint.write([constraint])
    assert n_ends > 0


def test_no_token_goes_on_behind_the_tag_before_a_form():
    tokens = [bytes([i]) for i in range(128)] + [b'k>{', b'>\n', b'x</think>"', b'</think>', b'>"', b'a>b', b'']
    tokenizer = SimpleNamespace(bytes_of_tokens=lambda: tokens, special_ids=set())
    constraint = compiled('regex', '[{]x', Vocabulary(tokenizer, len(tokens))).behind('</think>').for_sample([0])
    for begun, refused in (b'', {130}), (b'a</thin', {130, 128}), (b'</think', {130, 132}), (b'</</think', {130, 132}):
        constraint.n_taken = None
        constraint.take(list(begun))
        constraint.write([constraint])
        assert bits(constraint.allowed, len(tokens)) == {*range(1, len(tokens))} - refused, begun


def test_a_form_behind_a_tag_allows_the_same_after_it():
    """Before it all tokens but the ends are allowed. They come in any portions, and all again after an interruption."""
    rng, end = random.Random(2), END['byte pairs']
    template = compiled('regex', '[0-9]{3,9}', Vocabulary(TOKENIZER, 300))
    for before in 'Hm "{</think>', '</thi</think>', '</think>':
        drawn, behind = TOKENIZER.encode(before), template.behind('</think>').for_sample([end])
        n_before, plain, n = len(drawn), template.for_sample([end]), 0
        drawn += TOKENIZER.encode('31415')
        while n <= len(drawn):
            for _ in range(rng.choice([1, 2])):  # the first time, nothing comes after it
                behind.take(drawn[:n])
            behind.write([behind])
            plain.take(drawn[n_before:n])
            plain.write([plain])
            expected = bits(plain.allowed, 300) if n >= n_before else {*range(300)} - {end}
            assert bits(behind.allowed, 300) == expected and not behind.error and not behind.is_complete
            n += rng.choice([1, 2])


SIMPLE = [
    dict(type='string', minLength=1, maxLength=4), dict(type='string', pattern='^[0-9]{3}-[A-Z]{2}$', maxLength=9),
    dict(type='string', pattern='^(ab|cd)+$', maxLength=9), dict(const={'a': [None, 1]}), dict(const='fixed'),
    dict(enum=['a', 'b "c"', 'é', 1]), dict(enum=[2.5, True, None, [1, 2], {'k': 'v'}]), dict(type='boolean'),
    dict(type='integer', minimum=-7, maximum=212), dict(type='number', exclusiveMinimum=-3, maximum=4)]


def any_schema(rng, depth=0):
    """A schema whose texts are short."""
    kind = rng.choice(['array', 'anyOf', 'object', 'object'] + ['simple'] * (1 + 2 * depth))
    if kind == 'simple' or depth == 2:
        return rng.choice(SIMPLE)
    parts = [any_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    if kind == 'anyOf':
        return dict(anyOf=parts)
    if kind == 'array':
        n = rng.randint(0, 2)
        return dict(type='array', items=parts[0], minItems=n, maxItems=n + rng.randint(0, 2))
    properties = dict(zip(rng.sample(['name', 'age', 'é', 'a b', 'x"y', 'list'], len(parts)), parts))
    return dict(type='object', properties=properties, additionalProperties=False,
                required=rng.sample([*properties], rng.randint(0, len(parts))))


def test_answers_follow_drawn_schemas():
    """At temperature 1.5, by a model that knows nothing: they are valid, with the properties of the schema only."""
    n, rng, tokenizer = sizes(60, 500), random.Random(0), chat_tokenizer()
    model = gpt(**LLAMA | dict(block_size=400))
    engine = Engine(model, CPUExecutor(model, threads=1), default_pool(model.config, 4096))
    schemas, vocabulary = [any_schema(rng) for _ in range(n)], Vocabulary(tokenizer, 300)
    says = ', "additionalProperties": false'
    texts = [json.dumps(schema).replace(says, '' if i % 2 else says) for i, schema in enumerate(schemas)]
    constraints = [compiled('json_schema', text, vocabulary) for text in texts]
    sequences = [engine.add([5, 6, 7], 300, seed=i, temperature=1.5, stop_ids=[2], constraint=constraint)[0]
                 for i, constraint in enumerate(constraints)]
    while not engine.is_idle:
        engine.step()
    assert {s.ended for s in sequences} <= {'stop', 'length'}
    ended = [(s, schema) for s, schema in zip(sequences, schemas) if s.ended == 'stop']
    for s, schema in ended:
        jsonschema.validate(json.loads(tokenizer.decode([t for t in s.tokens[3:] if t != 2])), schema)
    print(f"{len(ended)} of {n} ended by themselves")
    assert len(ended) >= 0.8 * n


AGE, NAME = dict(properties=dict(age=dict(const=7))), dict(properties=dict(name=dict(const='x')))


@pytest.mark.parametrize('schema, text, is_taken', [
    (AGE, '{"age": 7}', True), (AGE, '{"b": 0}', False), (dict(properties={}), '{"b": 0}', False),
    (AGE | dict(required=['age', 'name']), '{"age": 7, "name": 0}', True),
    (AGE | dict(additionalProperties=True), '{"age": 7, "b": 0}', True),
    (dict(allOf=[AGE, NAME], required=['age', 'name']), '{"age": 7, "name": "x"}', True),
    ({'$defs': dict(a=AGE), 'allOf': [{'$ref': '#/$defs/a'}, NAME]}, '{"age": 7, "name": "x"}', True),
    (dict(anyOf=[NAME]) | AGE, '{"name": "x", "age": 7}', True),
    ({'$defs': dict(a=NAME), '$ref': '#/$defs/a'} | AGE, '{"name": "x", "age": 7}', True),
    (dict(properties=dict(properties=AGE)), '{"properties": {"age": 7}}', True),
    (dict(properties=dict(properties=AGE)), '{"properties": {"b": 7}}', False),
    (dict(properties=dict(allOf=AGE, enum=AGE)), '{"allOf": {"age": 7}, "enum": {}}', True),
    (dict(properties=dict(allOf=AGE, enum=AGE)), '{"enum": {"b": 7}}', False),
    (dict(enum=[AGE]), json.dumps(AGE), True), (dict(anyOf=[AGE, NAME]), '{"name": "x"}', True),
    (dict(items=AGE), '[{"b": 1}]', False),
    ({'$defs': dict(a=AGE), '$ref': '#/$defs/a', 'required': ['name']}, '{"age": 7, "name": 0}', True),
    (dict(required=['id'], anyOf=[AGE, NAME]), '{"age": 7, "id": 0}', True),
    ({'$defs': dict(a=AGE), '$ref': '#/$defs/a', 'anyOf': [NAME | dict(required=['name'])]},
     '{"age": 7, "name": "x"}', True),
    ({'$defs': dict(a=AGE | dict(required=['age'])), '$ref': '#/$defs/a', 'minProperties': 2},
     '{"age": 7, "b": 0}', True),
    (dict(anyOf=[AGE], additionalProperties=True), '{"age": 7, "b": 0}', True),
    ({'$defs': dict(a=AGE), 'allOf': [{'$ref': '#/$defs/a'}]}, '{"b": 0}', False),
    (dict(properties=dict(p=AGE | dict(anyOf=[NAME]))), '{"b": 0}', False),
    (dict(properties=dict(p=AGE | dict(anyOf=[NAME]))), '{"p": {"b": 0}}', True)])
def test_an_object_has_no_other_properties_unless_its_schema_lets_it(schema, text, is_taken):
    expected, tokens = json.dumps(schema), TOKENIZER.encode(text, add_special_tokens=False)
    jsonschema.validate(json.loads(text), schema)
    sample = compiled('json_schema', expected, Vocabulary(TOKENIZER, 300)).for_sample([2])
    for n in range(len(tokens)):
        if tokens[n] not in bits(sample.allowed, 300):
            break
        sample.take(tokens[:n + 1])
        sample.write([sample])
    assert (n == len(tokens) - 1 and (sample.is_complete or 2 in bits(sample.allowed, 300))) == is_taken


@pytest.fixture(scope='module')
def chat():
    with chatting(gpt(**LLAMA | dict(block_size=512)), TOKENIZER, n_pages=128) as client:
        yield client


HI = [dict(role='user', content='Hi')]
PERSON = dict(type='object', properties=dict(age=dict(type='integer', minimum=0, maximum=120), ok=dict(type='boolean')),
              required=['age', 'ok'], additionalProperties=False)


@pytest.mark.parametrize('fields, check', [
    (dict(response_format=dict(type='json_object')), lambda text: type(json.loads(text)) is dict),
    (dict(response_format=dict(type='json_schema', json_schema=dict(name='p', schema=PERSON, strict=True))),
     lambda text: jsonschema.validate(json.loads(text), PERSON) is None),
    (dict(structured_outputs=dict(json=PERSON)), lambda text: jsonschema.validate(json.loads(text), PERSON) is None),
    (dict(structured_outputs=dict(json=json.dumps(PERSON))),
     lambda text: jsonschema.validate(json.loads(text), PERSON) is None),
    (dict(structured_outputs=dict(json=dict(const=None))), lambda text: text == 'null'),
    (dict(structured_outputs=dict(regex='[A-F]{3}[0-9]?')), lambda text: re.fullmatch('[A-F]{3}[0-9]?', text)),
    (dict(response_format=dict(type='json_object', schema=PERSON)),  # as llama-server's clients write it
     lambda text: jsonschema.validate(json.loads(text), PERSON) is None),
    (dict(structured_outputs=dict(choice=['up', 'down'])), ['up', 'down'].__contains__),
    (dict(structured_outputs=dict(choice=[f'c{i}' for i in range(4096)])), re.compile('c[0-9]{1,4}').fullmatch),
    (dict(structured_outputs=dict(grammar=NESTED)), lambda text: by_counting(text)[1])],
    ids=lambda x: f'{x!s:.200}' if type(x) is dict else '')
def test_the_server_gives_texts_of_the_form(chat, fields, check):
    """In chats and completions, several samples, streamed or not; what is cut off ends with length."""
    how = dict(temperature=1.5, seed=4, n=3, max_tokens=200) | fields
    choices = ask(chat, HI, **how)['choices']
    texts = [(choice['message']['content'], choice['finish_reason']) for choice in choices]
    answer = chat.post('/v1/completions', json=dict(prompt=['Hi', 'Ho']) | how)
    assert answer.status_code == 200, answer.text
    texts += [(choice['text'], choice['finish_reason']) for choice in answer.json()['choices']]
    ended = [text for text, reason in texts if reason == 'stop']
    assert len(texts) == 9 and {reason for _, reason in texts} <= {'stop', 'length'}
    assert all(check(text) for text in ended) and len(ended) >= (1 if 'json_object' in str(fields) else 5)
    with chat.stream('POST', '/v1/chat/completions', json=dict(messages=HI, stream=True) | how | dict(n=1)) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith('data: {')]
    deltas = [chunk['choices'][0] for chunk in chunks]
    assert ''.join(each['delta'].get('content') or '' for each in deltas) == texts[0][0]
    assert deltas[-1]['finish_reason'] == texts[0][1]


def test_without_the_library(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 'llguidance', None)
        with chatting(gpt(**LLAMA), TOKENIZER) as client:
            answer = client.post('/v1/completions', json=dict(prompt='a', structured_outputs=dict(regex='a')))
            assert answer.status_code == 400 and 'pip install llguidance' in answer.json()['error']['message']
            assert client.post('/v1/completions', json=dict(prompt='a', max_tokens=2)).status_code == 200


def test_the_openai_client_parses_what_it_gets(chat):
    openai = pytest.importorskip('openai', reason="openai is not installed")
    from pydantic import BaseModel, Field

    class Tag(BaseModel):
        kind: str = Field(max_length=4)
        weight: int | None = Field(ge=0, le=9)

    class Page(BaseModel):
        done: bool
        tags: list[Tag] = Field(max_length=2)
    with openai.OpenAI(base_url=f'{chat.base_url}/v1', api_key='-', max_retries=0) as ours:
        answer = ours.chat.completions.parse(model='chat', messages=HI, response_format=Page, n=4, temperature=1.2,
                                             seed=1, max_tokens=300)
        assert all(type(choice.message.parsed) is Page for choice in answer.choices)
        with pytest.raises(openai.LengthFinishReasonError):
            ours.chat.completions.parse(model='chat', messages=HI, response_format=Page, max_tokens=2)


def test_the_script_prints_the_text_that_the_server_gives(server, monkeypatch, capsys, tmp_path):  # noqa: F811
    """A vocabulary of characters without a token that ends a text: a text ends where nothing may follow."""
    (model, client), grammar, how = server, tmp_path / 'grammar.lark', dict(temperature=9.0, top_k=0, top_p=1.0)
    grammar.write_text('start: "b" start "d" | "€😀"\n', encoding='utf-8')
    for form, settings in ((dict(regex='[a-c]{3,5}( z)?😀'), dict(regex='[a-c]{3,5}( z)?😀')),
                           (dict(grammar=grammar.read_text(encoding='utf-8')), dict(grammar=str(grammar)))):
        body = dict(prompt='be', n=3, seed=7, max_tokens=30, structured_outputs=form) | how
        answer = client.post('/v1/completions', json=body).json()
        texts = [choice['text'] for choice in answer['choices']]
        assert {choice['finish_reason'] for choice in answer['choices']} == {'stop'} and len({*texts}) > 1
        for more in (dict(), dict(decoder='eager'), dict(speculate='ngram'), dict(batch_size=1), dict(traced=True)):
            printed = printed_by_script(model, ['be'], monkeypatch, capsys, num_samples=3, seed=7,
                                        max_new_tokens=30, **settings, **how, **more)
            assert printed == ''.join(f'be{text}\n---------------\n' for text in texts), more
    refused = client.post('/v1/completions', json=dict(prompt='be', response_format=dict(type='json_object')))
    assert refused.status_code == 400 and refused.json()['error']['param'] == 'response_format.type'
    with pytest.raises(ValueError, match='regex'), monkeypatch.context() as patch:
        patch.setattr(script, 'regex', 'a')
        patch.setattr(script, 'grammar', 'b')
        script.check_settings('cpu')


def test_the_model_may_end_a_text_where_it_may_end(chat, monkeypatch, capsys):
    """By its own token, which is no part of the text, but of the tokens, with its share."""
    model, how, ends = gpt(**LLAMA | dict(block_size=512)), dict(temperature=1.5, seed=3), 0
    body = dict(prompt='Hi', n=8, max_tokens=40, structured_outputs=dict(regex='[a-f ]+'), return_token_ids=True) | how
    choices = chat.post('/v1/completions', json=body | dict(logit_bias={2: 6})).json()['choices']
    for choice in choices:
        ends += choice['token_ids'][-1] == 2
        assert re.fullmatch('[a-f ]+', choice['text']) and 2 not in choice['token_ids'][:-1]
        assert (choice['finish_reason'] == 'stop') == (choice['token_ids'][-1] == 2)
    assert ends > 2
    printed = printed_by_script(model, ['Hi'], monkeypatch, capsys, tokenizer=TOKENIZER, num_samples=8, top_k=0,
                                max_new_tokens=40, regex='[a-f ]+', **how)
    texts = [choice['text'] for choice in chat.post('/v1/completions', json=body).json()['choices']]
    assert printed == ''.join(f'Hi{text}\n---------------\n' for text in texts)


def test_a_blank_at_the_beginning_is_a_part_of_the_form():
    """In other chats such a tokenizer's texts begin without it."""
    tokenizer = sentencepiece_tokenizer('ab ba abba ' * 9, end_tokens=[2], special_tokens=dict(eos_token='</s>'),
                                        chat_template='{{ messages[0].content }}')
    with chatting(gpt(**LLAMA | dict(vocab_size=tokenizer.vocab_size)), tokenizer) as client:
        answer = ask(client, HI, structured_outputs=dict(choice=[' ab', ' ba']), max_tokens=9)
        assert answer['choices'][0]['message']['content'] in (' ab', ' ba')


def test_a_conversation_has_answers_of_a_form():
    model, pattern = gpt(**LLAMA), '[a-f]{2}( [a-f]{2})*'
    constraint = compiled('regex', pattern, Vocabulary(TOKENIZER, 300))
    engine = Engine(model, CPUExecutor(model, threads=1))
    conversation = Conversation(engine, TOKENIZER, temperature=1.5, constraint=constraint)
    for text in ('Hi', 'And?'):
        assert re.fullmatch(pattern, ''.join(conversation.answer(text, 40))) or conversation.cut
        assert conversation.n_drawn > 0
    conversation.how['constraint'] = compiled('regex', 'x', Vocabulary(TOKENIZER, 300))
    assert ''.join(conversation.answer('And?', 40)) == 'x' and conversation.n_drawn == 1 and engine.is_idle
    model = toy_model(512, 300)
    executor, tokenizer = Saying(model), chat_tokenizer_with(CHAT.replace('assistant\n', 'assistant\n<think>'))
    executor.says = tokenizer.encode('Hm.</think>Hm.')  # and the form behind it
    conversation = Conversation(Engine(model, executor), tokenizer, constraint=constraint)
    assert re.fullmatch(r'Hm\.</think>[a-f]{2}( .*)?', ''.join(conversation.answer('Hi', 40)))


def test_tokens_that_may_not_end_a_text_yet_are_no_way_on(chat):
    """Before min_tokens no token that ends the text is drawn. If its form allows no other one, that is said."""
    fields = dict(prompt='Hi', structured_outputs=dict(regex='a*b'), max_tokens=9, ignore_eos=True)
    a, b = (TOKENIZER.encode(letter)[0] for letter in 'ab')
    error = chat.post('/v1/completions', json=fields | dict(
        structured_outputs=dict(regex='[ab]'), stop_token_ids=[a, b], min_tokens=1))
    assert error.status_code == 400 and 'lower min_tokens' in error.json()['error']['message']
    choice, = chat.post('/v1/completions', json=fields | dict(
        structured_outputs=dict(regex='[ab]'), min_tokens=5)).json()['choices']
    assert choice['text'] in ('a', 'b') and choice['finish_reason'] == 'stop'  # nothing may follow
    fields |= dict(min_tokens=3, logit_bias={a: 100}, temperature=0, return_token_ids=True)
    choice, = chat.post('/v1/completions', json=fields | dict(stop_token_ids=[b])).json()['choices']
    assert choice['token_ids'] == [a] * 9 and choice['finish_reason'] == 'length'


@pytest.mark.parametrize('number', [2**53 + 1, 2**64 - 1, 123456789.12345679, 7.65286225020284e-12, 3.1905e36])
def test_numbers_that_would_be_rounded_are_refused(chat, number):
    """The library reads them as floats. Bounds may be such numbers: many schemas have those of 64 bits."""
    for schema in (dict(const=number), dict(type='array', items=dict(enum=[1, number]))):
        error = chat.post('/v1/completions', json=dict(prompt='Hi', structured_outputs=dict(json=schema)))
        assert error.status_code == 400 and 'may round' in error.json()['error']['message']
    vocabulary = Vocabulary(TOKENIZER, 300)
    for schema in (dict(const=-2**60), dict(enum=[0.1, -1.5e14, math.pi]), dict(type='integer', maximum=2**63 - 1),
                   dict(properties=dict(enum=dict(type='integer', maximum=2**63 - 1)))):
        assert compiled('json_schema', json.dumps(schema), vocabulary)


def test_bounds_of_what_comes_from_outside(monkeypatch):
    """Forms that take long, or much memory, or end the process: refused, or served within seconds."""
    monkeypatch.setattr(grammars, 'SECONDS', 0.5)
    vocabulary, rng = Vocabulary(TOKENIZER, 300), np.random.default_rng(0)
    chain = {f'd{i}': dict(type='array', items={'$ref': f'#/$defs/d{i + 1}'}) for i in range(2000)}
    for schema in ({'type': 'integer', 'multipleOf': 4_000_007, 'maximum': 10**18},
                   {'$ref': '#/$defs/d0', '$defs': chain | dict(d2000={})},
                   dict(type='object', properties={f'p{i}': dict(type='string') for i in range(4000)})):
        with pytest.raises(ValueError, match=r'ended its process \(-\d+\): give a simpler one'):
            compiled('json_schema', json.dumps(schema), vocabulary)
    bad = [('regex', '(' * 40000 + 'a' + ')' * 40000), ('regex', '(((a{1,999}){1,999}){1,999}){1,999}'),
           ('regex', '(.*a){60}' + '.' * 60), ('grammar', 'start: ' + '(' * 40000 + '"a"' + ')' * 40000),
           ('grammar', 'root ::= ' + '(' * 40000 + '"a"' + ')' * 40000), ('grammar', 'start: start'), ('grammar', ''),
           ('grammar', 'start: %json ' + '{"items": ' * 5000 + '{}' + '}' * 5000),
           ('json_schema', '{"items": ' * 9000 + '{}' + '}' * 9000), ('json_schema', '{"$ref": "#"}'),
           ('json_schema', json.dumps({'enum': rng.integers(0, 10**9, 9000).tolist()})),
           ('json_schema', json.dumps({'type': 'array', 'items': {'type': 'array', 'minItems': 10**6},
                                       'minItems': 10**6})),
           ('json_schema', '{"$ref": "https://example.com/schema.json"}'), ('choice', ('ab' * 60000,))]
    for kind, text in bad:
        try:
            constraint = compiled(kind, text, vocabulary).for_sample([2])
        except ValueError as e:
            assert '\n' not in str(e) and len(str(e)) < 400
            continue
        drawn = []
        while not constraint.is_complete and len(drawn) < 20:
            drawn.append(min(bits(constraint.allowed, 300) - {2}))
            constraint.take(drawn)
            constraint.write([constraint])
