"""Chat templates, held against transformers' `apply_chat_template`, and templates that do what they must not."""
import errno
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT
from jinja2.defaults import DEFAULT_FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS

from chat import template as chat_template
from chat.template import ChatTemplate

SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}\
{% endif %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- else %}
        {%- generation %}
        {{- " " + message["content"] + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
OTHERS = """{{- bos_token }} {{ strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" }}
{%- if messages[0]['role'] == 'system' %}{% set messages = messages[1:] %}{% endif %}
{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m | tojson }}
   {# blanks before a block go, and the line break after it #}
   {% set n = loop.index %}
{{ [m.content, n] | tojson(indent=2) }} {{ (m.content | trim).split(' ')[-1] | upper }}{% endfor %}"""
TEMPLATES = dict(smollm2=SMOLLM2, mistral=MISTRAL, others=OTHERS)
SPECIAL = dict(bos_token='<s>', eos_token='</s>')
WORDS = ["Hello", " there ", "\n", "<|im_end|>", "{{ bos_token }}", "{% raw %}", "ä∂🙂", '"quoted"', '<b>&amp;</b>',
         "\\n", "\t"]


def conversation(rng):
    text = lambda: ' '.join(rng.choices(WORDS, k=rng.randint(0, 6)))  # noqa: E731
    roles = ['system'] * (rng.random() < 0.4) + ['user', 'assistant'] * rng.randint(0, 4) + ['user']
    if rng.random() < 0.1:
        rng.shuffle(roles)
    return [dict(role=role, content=text()) for role in roles]


def n_refused(ours, theirs, conversations):
    """How many (messages, tools or None) transformers and we refuse, in the same words. Other texts are the same."""
    n = 0
    for messages, tools in conversations:
        variables = dict(tools=tools) if tools else {}
        try:
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
        except Exception as e:  # of the template
            n += 1
            with pytest.raises(ValueError, match="does not take this conversation") as refused:
                ours.render(messages, **variables)
            assert str(e) in str(refused.value)
            continue
        assert ours.render(messages, **variables) == expected
    return n


@pytest.mark.parametrize('name', TEMPLATES)
def test_the_text_is_that_of_transformers(name):
    theirs = their_tokenizer(TEMPLATES[name])
    conversations = [(conversation(random.Random(seed)), None) for seed in range(60)]
    assert (n_refused(ChatTemplate(TEMPLATES[name], SPECIAL), theirs, conversations) > 0) == (name == 'mistral')


THINKS = """\
{% for m in messages %}<{{ m.role }}>{{ m.content | trim if trims else m.content }}{{ eos_token }}{% endfor %}\
{% for d in documents or [] %}[{{ d.title }}]{% endfor %}\
{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}<think></think>\
{% endif %}{% endif %}{{ tools }}"""


VARIABLES = [{}, dict(enable_thinking=False), dict(enable_thinking=True), dict(add_generation_prompt=False),
             dict(documents=[dict(title='a', text='b')], enable_thinking=False), dict(eos_token='!'),
             dict(continue_final_message=True), dict(continue_final_message=True, trims=True)]


def their_tokenizer(template):
    """A tokenizer of transformers with this chat template and the special tokens SPECIAL."""
    transformers = pytest.importorskip('transformers', reason="transformers is not installed")
    tokenizers = pytest.importorskip('tokenizers', reason="tokenizers is not installed")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({'a': 0}, 'a'))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, **SPECIAL)


@pytest.mark.parametrize('source', [THINKS, SMOLLM2, MISTRAL])
def test_variables_reach_the_template_as_from_transformers(source):
    theirs, ours = their_tokenizer(source), ChatTemplate(source, SPECIAL)
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


HOSTILE = dict(  # kind: templates, one on a line
    loops=r"""
{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(64) }}""",
    recursion=r"""
{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{{ ((((9999 times)))) }}
{{ 1 + 1 + 9999 times 1 }}
NESTED{{ n.x }}
NESTED{{ n.x | tojson }}
{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = n.x | select %}{% endfor %}{{ n.x | list }}""",
    texts=r"""
{{ 'x' * 10 ** 10 }}
{{ 'x' * 2 ** 25 }}
{{ ('x ' * 9999) | wordwrap(1, wrapstring='y' * 10 ** 6) }}
{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}""",
    formats=r"""
{{ '%9999999999d' % 1 }}
{{ '{:>9999999999}'.format(1) }}
{{ strftime_now('%c' * 10 ** 7) | length }}
{{ messages | tojson(indent=10 ** 10) }}""",
    numbers=r"""
{{ (9 ** (9 ** (8 + messages | length))) | string | length }}
{{ 1.5 | round(10 ** 9, 'ceil') }}""",
    lists=r"""
{{ range(10 ** 12) | list }}
{{ (range(99999) | list) * 99999 }}
{{ range(99999) | batch(10 ** 10, 'x') | list }}
{{ lipsum(n=10 ** 7) }}
DOUBLED{{ n.x | tojson }}
DOUBLED{{ n.x == n.y }}""",
    errors=r"""
{{ raise_exception('x' * 10 ** 6) }}
{{ raise_exception('one\ntwo\x1b[31m\r\nthree') }}
{{ messages['x' * 10 ** 7].foo }}
{{ 1 // 0 }}
{% if %}""",
    files=r"""
{% include '/etc/passwd' %}
{% include ['a', '/etc/passwd'] ignore missing %}""",
    escapes=r"""
{{ ''.__class__.__mro__[1].__subclasses__() }}
{{ ['']  | map(attribute='__class__') | list }}
{{ ('{0.__class__.__mro__}' | attr('format'))('') }}
{{ strftime_now.__globals__.sys.modules.os.system('id > FILE') }}
{{ lipsum.__globals__['os'].popen('id > FILE').read() }}
{{ self.__init__.__globals__.__builtins__.open('/etc/passwd').read() }}
{{ (messages | map('upper')).gi_frame.f_back.f_globals }}
{{ messages.append(messages) }}{{ messages[0].update(a=1) }}""",
    works=r"""
{{ ('http://' * 10 ** 6) | urlize }}
{{ ('\xe4' * 10 ** 7).encode('idna') }}""")
SHORT = {  # what stands for what in them
    'DOUBLED': "{% set n = namespace(x='a', y='a') %}{% for i in range(64) %}{% set n.x = [n.x, n.x] %}"
               "{% set n.y = [n.y, n.y] %}{% endfor %}",
    # deep enough for Python 3.14, whose limit is the stack of C
    'NESTED': "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}",
    '((((9999 times))))': '(' * 9999 + ')' * 9999, '1 + 1 + 9999 times': '1 + ' * 9999}


@pytest.mark.parametrize('kind, source', [
    pytest.param(kind, line, id=f'{kind}-{i}') for kind, lines in HOSTILE.items()
    for i, line in enumerate(lines.strip().splitlines())])
def test_a_hostile_template_is_an_error_in_a_line_and_others_do_not_notice(tmp_path, monkeypatch, kind, source):
    monkeypatch.setattr(chat_template, 'SECONDS', 0.2)
    for short, long in SHORT.items():
        source = source.replace(short, long)
    said, text = '', ''
    try:
        text = ChatTemplate(source.replace('FILE', str(tmp_path / 'made'))).render([dict(role='user', content='x')])
    except ValueError as e:
        said = str(e)
        assert re.match('the chat template (cannot be read|does not take this conversation|took longer than)', said)
        assert said.isprintable() and len(said) < 400
    assert said or kind == 'works' or kind in ('files', 'escapes') and not re.sub(r'Undefined|\W', '', text)
    assert len(text) < 2 * chat_template.MOST_TEXT and not list(tmp_path.iterdir())
    assert 'root:' not in text + said and '<class' not in text + said
    assert ChatTemplate("{{ messages[0].content }}").render([dict(content='a')]) == 'a'
    assert len(chat_template.waiting) == 1


@pytest.mark.skipif(sys.platform != 'linux', reason="this system does not limit memory")
def test_memory_has_a_limit():
    with pytest.raises(ValueError, match="does not take this conversation: MemoryError"):
        ChatTemplate(f"{{{{ ('x' * {chat_template.MEMORY}) | length }}}}").render([])


def test_the_process_of_templates_can_open_nothing():
    """What breaks out of Jinja's sandbox finds no files, connections and programs."""
    code = ("import socket, subprocess; from chat import template; template.confine(template.LATE)\n"
            "for take in (lambda: open('/etc/hostname'), socket.socket, lambda: subprocess.run('true')):\n"
            "    try: take()\n"
            "    except OSError as e: print(e.errno)")
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(errno.EMFILE)] * 3, done.stderr


def test_what_jinja_imports_late_is_there():
    """All filters and tests do in a process that can open nothing what they do in another one."""
    environment = ImmutableSandboxedEnvironment()
    sources = [f"{{{{ '<b>ab\\t\\N{{BULLET}}' | {name} }}}}" for name in DEFAULT_FILTERS
               if name not in ('tojson', 'random')]
    for source in sources + [f"{{{{ 'ab' is {name} }}}}" for name in TESTS]:
        try:
            expected = environment.from_string(source).render()
        except Exception as e:
            with pytest.raises(ValueError, match=type(e).__name__):
                ChatTemplate(source).render([])
        else:
            at = re.compile('0x[0-9a-f]+')  # of a generator
            assert at.sub('', ChatTemplate(source).render([])) == at.sub('', expected)
    assert len(ChatTemplate("{{ lipsum(n=1) }}").render([])) > 99


def test_a_rendering_that_is_interrupted_or_killed_is_nobody_elses_answer():
    looping = ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    text = ChatTemplate("{{ messages[0].content }}")

    def interrupt(signum, frame):
        raise KeyboardInterrupt
    assert text.render([dict(content='first')]) == 'first'  # now there is a process
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            looping.render([])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert text.render([dict(content='second')]) == 'second'
    threading.Timer(0.1, chat_template.waiting[-1].kill).start()
    with pytest.raises(ValueError, match=r"something else ended its process \(-9\): shorten the conversation"):
        looping.render([])
    assert text.render([dict(content='third')]) == 'third'
    (process,) = chat_template.waiting
    process.kill()  # while it waits
    process.wait()
    assert text.render([dict(content='fourth')]) == 'fourth'


def test_threads_do_not_get_each_others_answers():
    template = ChatTemplate("{{ messages[0].content }}")
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda i: template.render([dict(content=str(i))]), range(400)))
    assert texts == list(map(str, range(400))) and len(chat_template.waiting) <= 4


def test_modules_of_other_folders_do_not_replace_those_of_the_standard_library(tmp_path, monkeypatch):
    """jinja2 may be in any folder that this process looks in."""
    (tmp_path / 'html.py').write_text('raise Exception("this is not the standard library")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(chat_template, 'waiting', [])
    assert ChatTemplate("{{ messages[0] + 1 }}").render([1]) == '2'


@pytest.mark.skipif(not hasattr(os, 'fork'), reason="there is no fork here")
def test_a_child_has_a_process_of_its_own():
    template, (reading, writing) = ChatTemplate("{{ messages[0].content }}"), os.pipe()
    assert template.render([dict(content='before')]) == 'before'
    child = os.fork()
    texts = [template.render([dict(content=f'{child == 0} {i}')]) for i in range(200)]
    right = texts == [f'{child == 0} {i}' for i in range(200)]
    if child == 0:
        os.write(writing, b'yes' if right else b'no')
        os._exit(0)
    os.waitpid(child, 0)
    assert right and os.read(reading, 9) == b'yes'
