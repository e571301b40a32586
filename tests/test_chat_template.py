"""Chat templates, held against transformers' `apply_chat_template`, and templates that do what they must not."""
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import venv
from importlib.util import find_spec

import pytest
from conftest import ROOT

from chat import template as chat_template
from chat.template import ChatTemplate

SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}\
{% endif %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
           (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {%- generation %}
        {{- " " + message["content"] + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- raise_exception('only user and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}
"""
OTHERS = """{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m | tojson }}
   {# blanks before a block go, and the line break behind it #}
   {% set n = loop.index %}
{{ [m.content, n] | tojson(indent=2) }} {{ m.content.split(' ')[-1] | upper }}{% endfor %}"""
TEMPLATES = dict(smollm2=SMOLLM2, qwen=QWEN, llama=LLAMA, mistral=MISTRAL, others=OTHERS)
SPECIAL = dict(bos_token='<s>', eos_token='</s>')
WORDS = ["Hello", " there ", "\n", "<|im_end|>", "{{ bos_token }}", "{% raw %}", "ä∂🙂",
         '"quoted"', '<b>&amp;</b>',
         "\\n", "\t"]


def conversation(rng):
    text = lambda: ' '.join(rng.choices(WORDS, k=rng.randint(0, 6)))  # noqa: E731
    roles = ['system'] * (rng.random() < 0.4) + ['user', 'assistant'] * rng.randint(0, 4) + ['user']
    if rng.random() < 0.1:
        rng.shuffle(roles)
    return [dict(role=role, content=text()) for role in roles]


@pytest.mark.parametrize('name', TEMPLATES)
def test_the_text_is_that_of_transformers(name):
    transformers = pytest.importorskip('transformers', reason="transformers is not installed")
    tokenizers = pytest.importorskip('tokenizers', reason="tokenizers is not installed")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({'a': 0}, 'a')), **SPECIAL)
    theirs.chat_template = TEMPLATES[name]
    ours, n_refused = ChatTemplate(TEMPLATES[name], SPECIAL), 0
    for seed in range(60):
        messages = conversation(random.Random(seed))
        try:
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as e:  # of the template
            n_refused += 1
            with pytest.raises(ValueError, match="does not take this conversation") as refused:
                ours.render(messages)
            assert str(e) in str(refused.value)
            continue
        assert ours.render(messages) == expected
    assert (n_refused > 0) == (name == 'mistral')


THINKS = """\
{% for m in messages %}<{{ m.role }}>{{ m.content | trim if trims else m.content }}{{ eos_token }}{% endfor %}\
{% for d in documents or [] %}[{{ d.title }}]{% endfor %}\
{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}<think></think>\
{% endif %}{% endif %}{{ tools }}"""


VARIABLES = [{}, dict(enable_thinking=False), dict(enable_thinking=True), dict(add_generation_prompt=False),
             dict(documents=[dict(title='a', text='b')], enable_thinking=False), dict(eos_token='!'),
             dict(continue_final_message=True), dict(continue_final_message=True, trims=True)]


@pytest.mark.parametrize('source', [THINKS, SMOLLM2, MISTRAL])
def test_variables_reach_the_template_as_from_transformers(source):
    transformers = pytest.importorskip('transformers', reason="transformers is not installed")
    tokenizers = pytest.importorskip('tokenizers', reason="tokenizers is not installed")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({'a': 0}, 'a')), **SPECIAL)
    theirs.chat_template, ours = source, ChatTemplate(source, SPECIAL)
    for variables, content in itertools.product(VARIABLES, ("According to ", " a\n", "x", "")):
        continued = 'continue_final_message' in variables
        messages = [dict(role='user', content='Hi'), dict(role='assistant', content=content)]
        messages += [] if continued else [dict(role='user', content='Bye')]
        expected = theirs.apply_chat_template(messages, tokenize=False,
                                              **dict(add_generation_prompt=not continued) | variables)
        assert ours.render(messages, **variables) == expected
    assert ours.render(messages, self=1, messages=2, continue_final_message=True) == expected


def test_what_cannot_be_continued_is_one_line():
    template = ChatTemplate("{{ messages[0].content }}")
    for messages in ([], [dict(role='assistant', content=None)]):
        with pytest.raises(ValueError, match="^continue_final_message needs a last message whose content is a text$"):
            template.render(messages, continue_final_message=True)
    with pytest.raises(ValueError, match="^the chat template leaves out the last message"):
        template.render([dict(content='a'), dict(content='b')], continue_final_message=True)


def test_a_hand_written_conversation():
    messages = [dict(role='system', content='Be brief.'), dict(role='user', content=' Hi '),
                dict(role='assistant', content='Yes?'), dict(role='user', content='Bye')]
    assert ChatTemplate(MISTRAL, SPECIAL).render(messages) == (
        '<s>[INST] Be brief.\n\n Hi [/INST] Yes?</s>[INST] Bye[/INST]')


ESCAPES = [  # each names an object that leads out of the sandbox
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ (messages | attr('__class__')) }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ self._TemplateReference__context.cycler.__init__.__globals__ }}",
    "{{ messages.append(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
]


@pytest.mark.parametrize('source', ESCAPES)
def test_a_template_does_not_leave_its_sandbox(source):
    try:
        text = ChatTemplate(source).render([dict(role='user', content='x')])
    except ValueError as e:
        text = str(e)
    assert text == '' or "does not take this conversation" in text


@pytest.mark.parametrize('source', [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{{ 'x' * 10 ** 10 }}", "{{ 'x'.ljust(10 ** 12) }}",
    "{{ (9 ** (9 ** (8 + messages | length))) | string | length }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 'x' * 2 ** 25 }}",
])
def test_what_takes_too_much_is_an_error_and_the_next_conversation_is_rendered(source):
    template = ChatTemplate("{% if messages %}" + source + "{% endif %}")
    began = time.monotonic()
    with pytest.raises(ValueError, match="the chat template"):
        template.render([dict(role='user', content='x')])
    assert time.monotonic() - began < 10 * chat_template.SECONDS
    assert template.render([]) == ''


def test_an_interrupted_rendering_is_nobody_elses_answer():
    template = ChatTemplate("{% for i in range(900) %}{% for j in range(900) %}{% endfor %}{% endfor %}"
                            "{{ messages[0].content }}")

    def interrupt(signum, frame):
        raise KeyboardInterrupt
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        with pytest.raises(KeyboardInterrupt):
            template.render([dict(content='first')])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert template.render([dict(content='second')]) == 'second'
    template.process.kill()
    template.process.wait()
    assert template.render([dict(content='third')]) == 'third'


def test_a_process_that_is_killed_was_not_slow():
    template = ChatTemplate("{% if messages %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
                            "{% endfor %}{% endif %}")
    assert template.render([]) == ''
    threading.Timer(0.1, template.process.kill).start()
    with pytest.raises(ValueError, match=r"^the process of the chat template was ended \(SIGKILL\), perhaps because"):
        template.render([dict(role='user', content='x')])
    assert template.render([]) == ''


def test_the_limit_begins_when_the_process_is_ready(tmp_path, monkeypatch):
    """On a busy machine Python takes long to start."""
    slow = tmp_path / 'python'
    slow.write_text(f'#!/bin/sh\nsleep 1.5\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, 'executable', str(slow))
    monkeypatch.setattr(chat_template, 'SECONDS', 1.2)
    assert ChatTemplate("{{ messages[0].content }}").render([dict(content='a')]) == 'a'


def test_jinja2_may_be_anywhere(tmp_path):
    """Another Python, without jinja2, to which PYTHONPATH names it; and one to which nothing does."""
    venv.create(tmp_path / 'venv')
    (tmp_path / 'packages').mkdir()
    for package in ('jinja2', 'markupsafe'):
        (tmp_path / 'packages' / package).symlink_to(os.path.dirname(find_spec(package).origin))
    (tmp_path / 'packages' / 'json.py').write_text('raise Exception("this is not the standard library")')
    call = "from chat.template import ChatTemplate; print(ChatTemplate('{{ messages[0] + 1 }}').render([1]))"
    missing = "the chat template cannot be read: ModuleNotFoundError: No module named 'jinja2'"
    for path, said in (([tmp_path / 'packages'], ''), ([], missing)):
        code = f"import json, sys; sys.path += {list(map(str, path))}; {call}"
        done = subprocess.run([tmp_path / 'venv' / 'bin' / 'python', '-c', code], cwd=ROOT, capture_output=True,
                              text=True, timeout=60)
        assert (done.stdout == '2\n', said in done.stderr) == (not said, True), done.stderr


@pytest.mark.skipif(not hasattr(os, 'fork'), reason="there is no fork here")
def test_a_child_has_a_process_of_its_own():
    template, (reading, writing) = ChatTemplate("{{ messages[0].content }}"), os.pipe()
    child = os.fork()
    texts = [template.render([dict(content=f'{child == 0} {i}')]) for i in range(200)]
    right = texts == [f'{child == 0} {i}' for i in range(200)]
    if child == 0:
        os.write(writing, b'yes' if right else b'no')
        os._exit(0)
    os.waitpid(child, 0)
    assert right and os.read(reading, 9) == b'yes'


@pytest.mark.parametrize('source', ["{% if %}", "{{ x", "{% endfor %}", "{% unknown %}"])
def test_a_broken_template_is_one_line(source):
    template = ChatTemplate(source)
    for _ in range(2):
        with pytest.raises(ValueError, match="^the chat template cannot be read: TemplateSyntaxError: .*$"):
            template.render([])
