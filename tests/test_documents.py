"""The documents: their commands have settings that exist, their links lead somewhere, their code runs."""
import ast
import glob
import importlib
import os
import re
import shlex
import sys

import pytest
import torch
from conftest import ROOT
from tiny_models import model_of

import configurator
from engine import Engine, default_pool

SCRIPTS = ('train.py', 'sample.py', 'bench.py', 'export.py', 'serve.py', 'test_kv_cache.py')
DOCUMENTS = ('README.md', 'KV_CACHE.md', *sorted(glob.glob('docs/*.md', root_dir=ROOT)))
PACKAGES = sorted(os.path.dirname(path) for path in glob.glob('*/__init__.py', root_dir=ROOT))
README_LINES = 260


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
    if script == 'bench.py' and namespace['only']:
        mode = importlib.import_module('benchmarks.' + namespace['MODES'][namespace['mode']])
        assert {*namespace['only'].split(',')} <= {*mode.PARTS}


@pytest.mark.parametrize('document', DOCUMENTS)
def test_links_lead_somewhere_and_files_that_are_named_exist(document):
    folder = os.path.dirname(document)
    for name, anchor in re.findall(r'\]\((?!https?:)([^)#]*)#?([^)]*)\)', text_of(document)):
        path = os.path.normpath(os.path.join(folder, name.strip())) if name else document
        assert os.path.exists(os.path.join(ROOT, path)), name
        if anchor:
            headings = re.findall(r'^#+ (.+)$', text_of(path), re.M)
            anchors = {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}
            assert anchor in anchors, f"{path}#{anchor}"
    files = set(re.findall(r'\b(?:[\w-]+/)+\w+\.(?:py|json|png|txt)\b', text_of(document)))
    made = {path for path in files if path.startswith(('out', 'data/'))}  # by a command, or out of the user's text
    assert not {path for path in files - made if not os.path.exists(os.path.join(ROOT, path))}


def test_the_readme_is_short_and_leads_to_all_documents():
    text = text_of('README.md')
    assert text.count('\n') <= README_LINES
    assert {name for name in DOCUMENTS[1:] if f']({name}' in text} == set(DOCUMENTS[1:])


def test_every_module_and_package_is_in_the_readme():
    ours = {name for name in os.listdir(ROOT) if name.endswith('.py')} | {name + '/' for name in PACKAGES}
    assert ours == ours & set(re.findall(r'`(\w+(?:\.py|/))`', text_of('README.md')))


@pytest.mark.parametrize('package', [*PACKAGES, 'decode/kernel', 'decode/gpu', 'kvcache/llamacpp'])
def test_the_docstring_of_a_package_lists_its_files(package):
    """In lines that begin with a name, or with some and commas between; folders with a slash."""
    docstring = ast.get_docstring(ast.parse(text_of(f'{package}/__init__.py')))
    files = {name[:-3] for name in os.listdir(os.path.join(ROOT, package)) if name.endswith('.py')} - {'__init__'}
    files |= {name + '/' for name in os.listdir(os.path.join(ROOT, package))
              if os.path.exists(os.path.join(ROOT, package, name, '__init__.py'))}
    listed = []
    for block in docstring.split('\n\n'):
        lines = re.findall(r'^ {4}(\w+/?(?:, \w+/?)*) +(?!=)\S', block, re.M)
        names = [name for line in lines for name in line.split(', ')]
        listed += names if files & {*names} else []
    assert len(listed) == len(set(listed)) and set(listed) == files


def test_what_the_demo_imports_is_in_its_requirements():
    required = {*re.findall(r'^[\w-]+', text_of('requirements.txt'), re.M)}
    assert {'torch', 'numpy', 'numba', 'tiktoken', 'requests', 'tqdm', 'safetensors', 'matplotlib'} <= required


def code_of(document):
    """The blocks of Python in a document."""
    return re.findall(r'```python\n(.*?)```', text_of(document), re.S)


def test_the_code_of_the_readme_and_of_the_cache_runs():
    """The loop over one head gives the last row of attention over all tokens at once."""
    code, = code_of('README.md')
    found = {}
    exec(code, found)
    assert found['number'] in range(4) and found['tokens'] and len(found['kv_cache']) == 4
    one_head, by_hand = code_of('KV_CACHE.md')
    exec(by_hand, {})
    X, *weights = torch.randn(7, 8), *torch.randn(3, 8, 4)
    found = dict(zip(('Wq', 'Wk', 'Wv'), weights), X=X, d=4, torch=torch)
    exec(one_head, found)
    every = torch.nn.functional.scaled_dot_product_attention(*[X @ W for W in weights], is_causal=True)
    assert torch.allclose(found['y'], every[-1], atol=1e-5)


@torch.no_grad()
def test_the_code_of_sampling_scores_texts():
    model = model_of('rope')
    texts = [[1, 2, 3, 5, 8, 13], [1, 2, 3, 5, 9], [7], [*range(29)]]
    scoring, pool = code_of('docs/SAMPLING.md')
    found = dict(engine=Engine(model, pool=default_pool(model.config, 30, 1), budget=7), texts=texts)
    exec(scoring, found)
    for text, scores in zip(texts, found['scores'].values()):
        logits = model(torch.tensor([text]), torch.tensor([text]))[0][0].log_softmax(-1)
        expected = [0.0, *logits[range(len(text) - 1), text[1:]].tolist()]
        assert scores == pytest.approx(expected, abs=1e-5)
    exec(pool, dict(model=model, executor=None))
