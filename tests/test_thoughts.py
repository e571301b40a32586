"""Thoughts before answers: their reader, the openai client, what is sent back, and forms that begin behind them."""
import re
from itertools import accumulate

import pytest
from conftest import SERVING, needs
from hypothesis import example, given
from hypothesis import strategies as st

from chat.thoughts import ThoughtReader
from tokenizer import from_state

needs(*SERVING)

from example_models import chat_tokenizer
from test_chat_template import their_tokenizer
from test_tools import CALLS, QWEN, TOOLS, USER, saying, written  # noqa: F401

TOKENS = ['<think>', '</think>', '<thi', 'nk>', '</th', 'ink>', '</', '<', 'é', 'Hm.', ' ', '\n', 'a</think>\n']
OPENED = QWEN.replace("|>assistant\\n' }}", "|>assistant\\n<think>\\n' }}")
BEGINNINGS = {'qwen': '<think>\n', OPENED: ''}  # of an answer with thoughts, by template
THOUGHT = 'Hm: a\n<tool_call> {"name": é'


@example(['<thi'], False, [])
@example(['</th', 'ink>', 'é'], True, [1])
@given(st.lists(st.sampled_from(TOKENS), max_size=20), st.booleans(), st.lists(st.integers(0, 20), max_size=8))
def test_thoughts_are_those_that_an_expression_finds_in_the_whole(tokens, opened, cuts):
    """However they come. The tokens of the thoughts are those up to the one that ends them."""
    text, reader, found, at = ''.join(tokens), ThoughtReader(opened), [], 0
    for cut in [*sorted(cuts), len(tokens)]:
        found.append(reader.push(''.join(tokens[at:cut]), [token.encode() for token in tokens[at:cut]]))
        at = cut
    found.append(reader.push('', last=True))
    whole = re.fullmatch(r'(?s)' + r'\s*<think>' * (not opened) + '(.*?)(</think>(.*))?', text)
    thought, answer = (whole[1].strip(), (whole[3] or '').lstrip()) if whole else ('', text)
    assert tuple(map(''.join, zip(*found))) == (thought, answer)
    end = whole.end(1) + len('</think>') if whole and whole[2] else len(text)
    ends = accumulate(map(len, tokens))
    assert reader.n_tokens == (sum(e - len(t) < end for e, t in zip(ends, tokens)) if whole else 0)


@pytest.mark.parametrize('name', BEGINNINGS, ids=['writes', 'opened'])
def test_the_openai_client_gets_thoughts_and_sends_them_back(saying, name):  # noqa: F811
    openai = pytest.importorskip('openai', reason="openai is not installed")
    client, says = saying(name)
    says(f'{BEGINNINGS[name]}{THOUGHT}\n</think>\n\nI look it up.\n{written("qwen", CALLS)}')
    with openai.OpenAI(base_url=f'{client.base_url}/v1', api_key='-', max_retries=0) as ours:
        how = dict(model='chat', messages=[USER], tools=TOOLS, logprobs=True)
        answer = ours.chat.completions.create(**how)
        message, tokenizer = answer.choices[0].message, client.service.served.tokenizer
        assert (message.reasoning_content, message.content) == (THOUGHT, 'I look it up.')
        assert len(message.tool_calls) == len(CALLS) and answer.choices[0].finish_reason == 'tool_calls'
        thought = tokenizer.encode(f'{BEGINNINGS[name]}{THOUGHT}\n</think>')
        assert 0 <= answer.usage.completion_tokens_details.reasoning_tokens - len(thought) <= 1
        with ours.chat.completions.stream(**how) as stream:
            deltas = [event.chunk.choices[0].delta for event in stream if event.type == 'chunk']
        assert not any(delta.content and getattr(delta, 'reasoning_content', None) for delta in deltas)
        for field, text in ('reasoning_content', THOUGHT), ('content', 'I look it up.'):
            assert ''.join(getattr(delta, field, None) or '' for delta in deltas) == text

        cut = ours.chat.completions.create(**how, max_tokens=9).choices[0]
        assert cut.finish_reason == 'length' and THOUGHT.startswith(cut.message.reasoning_content)
        assert cut.message.content == '' and len(cut.logprobs.content) == 9
        whole = ours.chat.completions.create(model='chat', messages=[USER], extra_body=dict(reasoning_format='none'))
        assert f'{THOUGHT}\n</think>\n\nI' in whole.choices[0].message.content
        assert not hasattr(whole.choices[0].message, 'reasoning_content')
        for hides in dict(include_reasoning=False), dict(reasoning_format='hidden'):
            hidden = ours.chat.completions.create(**how, extra_body=hides)
            assert hidden.choices[0].message.content == 'I look it up.'
            assert hidden.usage.completion_tokens_details == answer.usage.completion_tokens_details
            assert not hasattr(hidden.choices[0].message, 'reasoning_content')

    back = [USER, message.model_dump(),
            *[dict(role='tool', tool_call_id=c.id, content='0°') for c in message.tool_calls]]
    tokens = client.post('/tokenize', json=dict(messages=back, tools=TOOLS)).json()['tokens']
    other = [USER, back[1] | dict(reasoning=THOUGHT, reasoning_content=None), *back[2:]]  # vLLM's newer name
    assert tokens == client.post('/tokenize', json=dict(messages=other, tools=TOOLS)).json()['tokens']
    theirs = their_tokenizer(QWEN if name == 'qwen' else OPENED)
    called = [dict(id=c.id, function=dict(name=f, arguments=a)) for c, (f, a) in zip(message.tool_calls, CALLS)]
    said = dict(role='assistant', content='I look it up.', reasoning_content=THOUGHT, tool_calls=called)
    assert tokens == tokenizer.encode(theirs.apply_chat_template(
        [USER, said, *back[2:]], tools=TOOLS, tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize('template, said, content, thought', [
    ('qwen', '\nA <think>tag</think>.', '\nA <think>tag</think>.', None),
    ('qwen', ' <think>\n\n</think>\n\nA.', 'A.', None), ('qwen', '<think>Hm', '', 'Hm'),
    (OPENED, '\n</think>\n\n<think> is a tag.', '<think> is a tag.', None),
    (OPENED, '\nHm\n', '', 'Hm'), ('smollm2', '<think>Hm</think>', '<think>Hm</think>', None)])
def test_an_answer_may_have_no_thoughts_and_thoughts_no_answer(saying, template, said, content, thought):  # noqa: F811
    client, says = saying(template)
    says(said)
    choice, = client.post('/v1/chat/completions', json=dict(messages=[USER])).json()['choices']
    assert (choice['message']['content'], choice['message'].get('reasoning_content')) == (content, thought)
    assert choice['finish_reason'] == 'stop'


def test_tags_are_a_part_of_the_text_also_where_they_are_special_tokens():
    tokenizer = chat_tokenizer()
    tokenizer.library.add_special_tokens(['<think>', '</think>', '<pad>'])
    found = from_state(tokenizer.state() | dict(json=tokenizer.library.to_str()))
    assert {300, 301, 302} & found.special_ids == {302} and found.decode([301]) == '</think>'


def test_a_form_begins_behind_the_thoughts_that_the_prompt_opens(saying):  # noqa: F811
    pytest.importorskip('llguidance', reason="llguidance is not installed")
    client, says = saying(OPENED)
    says(f'{THOUGHT}</think>maybe')
    form = dict(messages=[USER], structured_outputs=dict(regex='(yes|no)!{3}'), seed=1)
    for fields in dict(form), dict(form, n=3, min_tokens=9):
        for choice in client.post('/v1/chat/completions', json=fields).json()['choices']:
            assert choice['message']['reasoning_content'] == THOUGHT and choice['finish_reason'] == 'stop'
            assert choice['message']['content'] in ('yes!!!', 'no!!!')
    says('Hm')  # and nothing ends a text before its form
    choice, = client.post('/v1/chat/completions', json=form | dict(max_tokens=20)).json()['choices']
    assert choice['finish_reason'] == 'length' and choice['message']['reasoning_content'].startswith('Hm')
    call = dict(messages=[USER], tools=TOOLS, tool_choice=dict(type='function', function=dict(name='add')), seed=2)
    says(f'{THOUGHT}</think>{written("qwen", CALLS[1:])}')
    message = client.post('/v1/chat/completions', json=call).json()['choices'][0]['message']
    assert message['reasoning_content'] == THOUGHT and message['tool_calls'][0]['function']['name'] == 'add'
    client, says = saying('qwen')  # without thoughts in the prompt the form is that of the whole
    says(f'{THOUGHT}</think>maybe')
    message = client.post('/v1/chat/completions', json=form).json()['choices'][0]['message']
    assert message['content'] in ('yes!!!', 'no!!!') and 'reasoning_content' not in message
