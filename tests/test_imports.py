"""Arrows go one way: model.py stands alone, modules do not import scripts, wings are handed a model."""
import ast
import glob
import os
import sys

from conftest import ROOT

SCRIPTS = {'train', 'sample', 'bench', 'export', 'test_kv_cache'}
OURS = {os.path.basename(p)[:-3] for p in glob.glob(os.path.join(ROOT, '*.py'))} | {'decode', 'kvcache', 'serving'}


def imports(path, top_level_only=False):
    with open(os.path.join(ROOT, path), encoding='utf-8') as f:
        tree = ast.parse(f.read())
    found = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or '').split('.')[0])
    return found


def test_model_imports_torch_and_the_standard_library_only():
    assert not imports('model.py') & OURS
    assert imports('model.py', top_level_only=True) <= set(sys.stdlib_module_names) | {'torch'}


def test_nothing_imports_a_script():
    for path in OURS - SCRIPTS - {'decode', 'kvcache', 'serving'}:
        assert not imports(path + '.py') & SCRIPTS, path
    for script in SCRIPTS:
        if os.path.exists(os.path.join(ROOT, script + '.py')):
            assert not imports(script + '.py') & SCRIPTS, script


def test_wings_do_not_import_the_model():
    for wing in ('decode', 'kvcache'):
        for path in glob.glob(os.path.join(ROOT, wing, '*.py')):
            assert not imports(os.path.relpath(path, ROOT)) & ({'model', 'debug_kv_model'} | SCRIPTS), path
    for name in ('checkpoint', 'tokenizer', 'batches', 'device', 'whole_file'):
        assert not imports(name + '.py') & {'model', 'debug_kv_model'}, name


def test_the_traced_model_copies_nothing():
    traced, plain = (open(os.path.join(ROOT, p), encoding='utf-8').read() for p in ('debug_kv_model.py', 'model.py'))
    bodies = {line.strip() for line in plain.splitlines() if len(line.strip()) > 40 and not line.strip().startswith(('def ', 'for '))}
    assert not [line for line in traced.splitlines() if line.strip() in bodies]
    assert 'KVDBG' not in plain and 'KV_DEBUG' not in plain and 'print(' not in plain
