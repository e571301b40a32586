"""
The documents: their commands have settings that exist, their links lead somewhere, and what they use is installed.
"""
import importlib
import os
import re
import shlex
import sys

import pytest
from conftest import ROOT

import configurator

SCRIPTS = ('train.py', 'sample.py', 'bench.py', 'export.py', 'serve.py', 'test_kv_cache.py')
DOCUMENTS = ('README.md', 'KV_CACHE.md')


def text_of(document):
    with open(os.path.join(ROOT, document), encoding='utf-8') as f:
        return f.read()


def commands():
    """(document, script, arguments) of each command of ours, in code blocks and between backticks."""
    for document in DOCUMENTS:
        text = text_of(document).replace('\\\n', ' ')
        spans = re.findall(r'^    (\S.*)$', text, re.M) + re.findall(r'`([^`\n]+)`', text)
        for line in dict.fromkeys(spans):
            words = shlex.split(line.replace("don't", ''), comments=True) if line.count("'") % 2 == 0 else []
            for i, word in enumerate(words):
                is_run = i == 0 or 'python' in words[i - 1] or words[0] == 'torchrun' and word in SCRIPTS
                if word.endswith('.py') and is_run and (word in SCRIPTS or '/' in word):
                    yield document, word, words[i + 1:]


def test_there_are_commands_of_each_script():
    assert {script for _, script, _ in commands()} >= set(SCRIPTS) and len(list(commands())) > 40


@pytest.mark.parametrize('document, script, arguments', commands(), ids=str)
def test_a_command_has_settings_that_exist(document, script, arguments, monkeypatch):
    if 'configurator' not in text_of(script):  # it takes no settings, and may work as soon as it is imported
        assert not arguments
        return
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, 'path', sys.path[:])  # some scripts add folders to it
    namespace = dict(vars(importlib.import_module(script[:-3].replace('/', '.'))))  # a copy, to be changed
    if '--help' not in arguments:
        configurator.override(namespace, arguments)


@pytest.mark.parametrize('document', DOCUMENTS)
def test_a_link_leads_somewhere(document):
    for name, anchor in re.findall(r'\]\((?!https?:)([^)#]*)#?([^)]*)\)', text_of(document)):
        assert os.path.exists(os.path.join(ROOT, name)), name
        if anchor:
            headings = re.findall(r'^#+ (.+)$', text_of(name or document), re.M)
            anchors = {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}
            assert anchor in anchors, anchor


def test_every_module_is_in_the_readme():
    ours = {name for name in os.listdir(ROOT) if name.endswith('.py')}
    assert ours == {name for name in re.findall(r'`(\w+\.py)`', text_of('README.md')) if name in ours}


def test_what_the_demo_imports_is_in_its_requirements():
    with open(os.path.join(ROOT, 'requirements.txt')) as f:
        required = {re.match(r'[\w-]+', line)[0] for line in f}
    assert {'torch', 'numpy', 'numba', 'tiktoken', 'requests', 'tqdm', 'safetensors', 'matplotlib'} <= required
