"""The bodies of the API: what becomes of a good one, and the bounds of all. The JSON of answers."""
import json
import math
import re
from dataclasses import replace

import pytest
from conftest import SERVING, needs

needs(*SERVING)

import httpx
import orjson
from pydantic import ValidationError
from small_engine import CHARS, served_by

from serving.answer import DONE, Completion, event
from serving.api import APIError, parsed
from serving.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from serving.request import Logprobs, Output
from serving.served import requests_of

SERVED = served_by(None, max_tokens=64)


def completion_body(**fields):
    return parsed(CompletionBody, json.dumps({'prompt': 'abc', **fields}).encode())


def requests(**fields):
    body = completion_body(**fields)
    return requests_of(body, SERVED, 'x', print)


def answer(**fields):
    """(a `Completion` of these fields, its body)"""
    body = completion_body(**fields)
    return Completion('x', body, SERVED, requests_of(body, SERVED, 'x', print))


def events(data):
    """The events of a stream's bytes, of which the last is [DONE] if it is there."""
    assert data.endswith(b'\n\n') or not data
    found = [line.removeprefix(b'data: ') for line in data.split(b'\n\n')[:-1]]
    return [event if event == b'[DONE]' else orjson.loads(event) for event in found]


@pytest.mark.parametrize('fields', [
    dict(tools=[]), dict(functions=[]), dict(tool_choice='none'), dict(tool_choice='auto'),
    dict(tools=[dict(type='function')], tool_choice='none'), dict(response_format=dict(type='text')), dict(stop=''),
    dict(stop=[]), dict(stop=['']), dict(store=False), dict(metadata=dict(a='b')), dict(user='me'),
    dict(service_tier='default'), dict(parallel_tool_calls=True), dict(modalities=['text']),
    dict(reasoning_effort='low', reasoning=dict(effort='none'), thinking=True, enable_thinking=False, think=False),
    dict(verbosity='low'), dict(prompt_cache_key='k'), dict(safety_identifier='s'), dict(best_of=1),
    dict(suffix=''), dict(logprobs=False), dict(skip_special_tokens=True),
    dict(use_beam_search=False), dict(chat_template_kwargs={}), dict(repeat_penalty=1.0), dict(stream_options={}),
    dict(stream_options=dict(include_usage=True)),  # the usage is in the whole answer anyway
    dict(temperature=None, stop=None, logit_bias=None, suffix=None, top_p=None, n=None, max_tokens=None),
    dict(stream_options=dict(include_usage=None)), dict(nobody_knows=None, tools=None, audio=None, prediction=None),
    dict(add_special_tokens=True), dict(include_stop_str_in_output=False), dict(logit_bias=[]), dict(grammar=''),
    dict(guided_choice=[], structured_outputs=dict(json=None)), dict(stop=[None]), dict(max_tokens=-1),
    dict(response_format=dict(type='text', json_schema=None)), dict(logit_bias={'5': None}),
    dict(usage=dict(include=True)), dict(dry_multiplier=0, mirostat=0, mirostat_tau=5, n_probs=0, id_slot=-1),
    dict(samplers=[], top_a=0, typical_p=1.0), dict(request_id='x', detokenize=True, t_max_predict_ms=-1),
    dict(top_n_sigma=-1, typ_p=1.0, dry_base=1.75, dry_sequence_breakers=['a'], adaptive_target=-1)], ids=str)
def test_what_asks_for_nothing_passes(fields):
    assert str(requests(seed=3, **fields)) == str(requests(seed=3))


def test_values_of_other_types_that_mean_the_same():
    assert completion_body(n=3, best_of=3).n == 3 and completion_body(logprobs=True).n_logprobs == 1
    assert len({requests(seed=-1)[0].seed for _ in range(4)}) == 4
    assert requests(max_tokens=5.0, top_k=2.0, n=2.0, min_tokens=1.0)[0].max_tokens == 5
    assert requests(stop='ab')[0].stop == requests(stop=['ab', None, ''])[0].stop == ('ab',)
    assert requests(seed=-5)[0].seed == -5 and 0 < requests(top_p=0)[0].draw['top_p'] < 1e-6
    assert requests(temperature=1e-31)[0].draw['temperature'] == 0
    assert parsed(CompletionBody, b'\xef\xbb\xbf{"prompt": "a"}').prompt == ['a']


@pytest.mark.parametrize('data', [
    b'{"x": %s%s}' % (b'[' * 1000, b']' * 1000), b'{"prompt": %s%s}' % (b'[' * 900, b']' * 900),
    b'{"best_of": %s%s, "n": %s%s, "prompt": "a"}' % (b'[' * 990, b']' * 990, b'[' * 990, b']' * 990),
    b'{"%s": 1}' % (b'a' * 2**22), b'{"prompt": "a", "logit_bias": {"%s": 1}}' % (b'a' * 2**22),
    b'{"prompt": "a", "temperature": "%s"}' % (b'a' * 2**22),
    b'{"prompt": "a", "stop_token_ids": [%s1]}' % (b'-1,' * 2**20),
    b'{%s}' % b','.join(b'"%d": 0' % i for i in range(300_000)),
    b'{"prompt": "a", "stream_options": {%s}}' % b','.join(b'"%d": 1' % i for i in range(300_000)),
    b' ', b'', b'{', b'}', b'null', b'[]', b'"a"', b'"', b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b'\x00',
    b'\xff\xfe', b'{"prompt": "\xff"}', b'[' * 100_000, b'{"prompt": ' * 10_000, b'{"n": 1e999, "prompt": "a"}',
    b'{"prompt": "a"} {}', b'{"prompt": "a", "max_tokens": 99999999999999999999999999999}'], ids=range(27))
def test_an_error_is_short_whatever_came(data):
    with pytest.raises(APIError) as caught:
        parsed(CompletionBody, data)
    assert caught.value.status == 400 and 0 < len(str(caught.value)) < 300 and len(caught.value.param or '') < 100


def test_the_first_wrong_entry_ends_a_check():
    """pydantic would go on, and keep an error for each of them."""
    for kind, fields in ((CompletionBody, dict(prompt='a', logit_bias={f'x{i}': 1 for i in range(1000)})),
                         (CompletionBody, dict(prompt='a', logit_bias={'1' * 20 + f'x{i}': 1 for i in range(1000)})),
                         (CompletionBody, dict(prompt='a', stop_token_ids=[-1] * 100)),
                         (ChatBody, dict(messages=[{}] * 1000)), (DetokenizeBody, dict(tokens=[-1] * 1000))):
        with pytest.raises(ValidationError) as caught:
            kind.model_validate(fields)
        assert caught.value.error_count() <= 2  # a message without anything lacks two fields


@pytest.mark.parametrize('n_prompt, max_tokens, expected', [
    (3, None, 16), (60, None, 4), (63, None, 1), (64, None, '63'), (64, 0, 0), (64, 1, '63'), (60, 4, 4), (60, 5, '4'),
    (65, 0, '64'), (1, 2**31 - 1, '63')])
def test_a_length_that_does_not_fit_is_told_the_largest_that_does(n_prompt, max_tokens, expected):
    fields = dict(prompt=[1] * n_prompt) | (dict(max_tokens=max_tokens) if max_tokens is not None else {})
    if type(expected) is int:
        assert requests(**fields)[0].max_tokens == expected
        return
    with pytest.raises(APIError) as caught:
        requests(**fields)
    assert caught.value.code == 'context_length_exceeded' and 'is 0' not in str(caught.value)
    assert re.search(rf'largest (prompt|max_tokens here) is {expected}\b', str(caught.value))


def test_an_answer_has_a_bound():
    """8 KB of body asked for 518 MB."""
    assert requests(prompt=['a'] * 128, n=128, max_tokens=60)
    for fields in (dict(logprobs=20), dict(return_token_ids=True, logprobs=0),
                   dict(echo=True, max_tokens=0, logprobs=20)):
        with pytest.raises(APIError, match='ask for fewer') as caught:
            requests(**dict(prompt=['a' * 4] * 128, n=128, max_tokens=60) | fields)
        assert caught.value.status == 400


def test_defaults_of_the_model_take_the_place_of_what_is_left_out():
    """Null is left out too; a body of another kind has none of these fields."""
    defaults = dict(temperature=0.1, top_p=0.5, top_k=2)
    body = parsed(CompletionBody, b'{"prompt": "a", "temperature": null, "top_k": 7}', defaults)
    assert (body.temperature, body.top_p, body.top_k) == (0.1, 0.5, 7)
    assert parsed(TokenizeBody, b'{"prompt": "a"}', defaults).prompt == 'a'


def test_a_text_far_too_long_is_not_read(monkeypatch):
    monkeypatch.setattr(SERVED.tokenizer, 'encode', None)
    with pytest.raises(APIError) as caught:
        requests(prompt='a' * 100_000, max_tokens=1)
    assert (caught.value.status, caught.value.code) == (400, 'context_length_exceeded')


def test_a_body_becomes_requests():
    first, second = requests(prompt=['ab', 'c'], n=2, seed=5, stop='x', logit_bias={'3': -1, '11': 2.5}, top_k=-1,
                             logprobs=3, echo=True, cache_salt='me', user='somebody', stop_token_ids=[4], min_tokens=2)
    assert (first.prompt, second.prompt, first.n, first.seed, second.seed) == ([0, 1], [2], 2, 5, 5)
    assert first.stop == ('x',) and first.cache_salt == 'me' and first.max_tokens == 16 and first.id != second.id
    assert first.draw['logit_bias'] == {3: -1.0, 11: 2.5} and first.draw['top_k'] == -1
    assert first.prompt_logprobs and first.logprobs == 3 and first.draw['min_tokens'] == 2
    assert not requests(logprobs=3)[0].prompt_logprobs and not requests(echo=True)[0].prompt_logprobs
    assert requests(prompt=[3, 4])[0].prompt == [3, 4] and requests(prompt=[[3], [4]])[1].prompt == [4]
    stops = [f'{i}' * 300 for i in range(50)]  # of any number and length
    other, = requests(stop=stops, include_stop_str_in_output=True, skip_special_tokens=False)
    assert other.stop == tuple(stops) and other.include_stop and not other.skip_special
    assert not first.include_stop and first.skip_special and not first.strip


def test_lines_of_a_stream_end_where_its_events_do():
    """httpx ends a line at U+2028, U+2029 and U+0085 as well."""
    data = event(dict(text='a\u2028b\u2029c\u0085d€😀'))
    lines = [*httpx.Response(200, content=data).iter_lines()]
    assert len(lines) == 2 and orjson.loads(lines[0].removeprefix('data: ')) == dict(text='a\u2028b\u2029c\u0085d€😀')


def test_likeliest_tokens_of_the_same_text_are_all_named():
    """The first of them keeps its text: it is the likeliest one."""
    served = replace(SERVED, token_bytes=[b'a', b'a', b'\xe2', b'\xe2', b'b'])
    body = completion_body(logprobs=4)
    a = Completion('x', body, served, requests_of(body, SERVED, 'x', print))
    a.add(0, [Output(0, [1], 'a', [Logprobs(-3., [(0, -.5), (4, -1.), (2, -1.5), (3, -2.)])], 'length')])
    logprobs = a.object()['choices'][0]['logprobs']
    assert logprobs['top_logprobs'] == [{'a': -.5, 'b': -1., 'bytes:\\xe2': -1.5, 'token_id:3': -2., 'token_id:1': -3.}]


def test_stream_is_openais_bytes():
    """finish_reason on the last text chunk, then usage with empty choices, then [DONE]; the whole text the same."""
    a = answer(stream=True, stream_options={'include_usage': True}, n=2)
    a.add(0, [Output(0, [3], 'd', n_cached=2), Output(1, [4], 'e')])
    a.add(0, [Output(0, [5], 'f')])
    first = a.chunks()
    assert first.startswith(b'data: {"id":"x","object":"text_completion","created":') and not a.done
    a.add(0, [Output(0, [6], '', finish_reason='stop'), Output(1, [7], 'h', finish_reason='length')])
    first, last = events(first), events(a.chunks())
    assert [e['choices'] for e in first] == [
        [{'index': 0, 'text': 'df', 'logprobs': None, 'finish_reason': None}],
        [{'index': 1, 'text': 'e', 'logprobs': None, 'finish_reason': None}]]
    assert [e['choices'] for e in last[:2]] == [
        [{'index': 0, 'text': '', 'logprobs': None, 'finish_reason': 'stop'}],
        [{'index': 1, 'text': 'h', 'logprobs': None, 'finish_reason': 'length'}]]
    assert all(e['usage'] is None for e in first + last[:2]) and last[2]['choices'] == [] and last[3] == b'[DONE]'
    assert last[2]['usage'] == {'prompt_tokens': 3, 'completion_tokens': 5, 'total_tokens': 8,
                                'prompt_tokens_details': {'cached_tokens': 2}}


def test_tokens_without_text_are_sent_only_where_asked_for():
    held = Output(0, [29], '')  # the beginning of a character, or of a stop string
    for fields, n in ((dict(), 0), (dict(return_token_ids=True), 1), (dict(logprobs=0), 1)):
        a = answer(stream=True, **fields)
        a.add(0, [held._replace(logprobs=[Logprobs(-1., [])] if fields.get('logprobs') == 0 else None)])
        assert len(events(a.chunks())) == n and 'usage' not in str(events(a.chunks()))


def test_choices_of_several_prompts_are_numbered_across_and_each_prompt_is_counted_once():
    a = answer(prompt=['a', 'bcd'], n=2, return_token_ids=True)
    for number in (1, 0):
        a.add(number, [Output(i, [number * 2 + i], str(number * 2 + i), finish_reason='length', n_cached=2 * i)
                       for i in (1, 0)])
    whole = a.object()
    choices = whole['choices']
    assert [(c['index'], c['text'], c['token_ids']) for c in choices] == [(i, str(i), [i]) for i in range(4)]
    assert [c['prompt_token_ids'] for c in choices] == [[0], [0], [1, 2, 3], [1, 2, 3]]
    assert whole['usage'] == {'prompt_tokens': 4, 'completion_tokens': 4, 'total_tokens': 8,
                              'prompt_tokens_details': {'cached_tokens': 4}}


@pytest.mark.parametrize('stream', [False, True])
def test_scoring_has_openais_shape(stream):
    """echo + logprobs: the prompt's tokens first, the first of which nothing predicts; offsets count characters."""
    prompt = CHARS.index('€'), CHARS.index('a')
    a = answer(prompt=[list(prompt)], echo=True, logprobs=1, max_tokens=1, stream=stream)
    a.add(0, [Output(0, [1], 'b', [Logprobs(-math.inf, [(2, -.25)])], 'length', [None, Logprobs(-.5, [(0, -.5)])])])
    choice = (events(a.chunks())[0] if stream else a.object())['choices'][0]
    assert choice['text'] == '€ab' and choice['logprobs'] == {
        'tokens': ['€', 'a', 'b'], 'token_logprobs': [None, -.5, -9999.], 'text_offset': [0, 1, 2],
        'top_logprobs': [None, {'a': -.5}, {'c': -.25, 'b': -9999.}]}


def test_nothing_follows_the_end():
    a = answer(stream=True)
    a.add(0, [Output(0, [1], 'b', finish_reason='stop')])
    a.add(0, [Output(0, [], '', finish_reason='abort')])
    assert a.error is None and a.chunks().endswith(DONE) and a.chunks() == DONE
