"""
The shape of the house: arrows go one way (scripts -> generation -> model -> torch), functions stay short.

decode/, kvcache/ and training/ are handed a model, and import neither it nor anything above it.
"""
import ast
import glob
import os
import sys

import pytest
from conftest import ROOT

SCRIPTS = {'train', 'sample', 'bench', 'export', 'serve', 'test_kv_cache'}
WINGS = {'decode', 'kvcache', 'training', 'serving', 'benchmarks'}
MODELS = {'model', 'debug_kv_model'}
MODULES = {os.path.basename(path)[:-3] for path in glob.glob(os.path.join(ROOT, '*.py'))}
OURS = MODULES | WINGS | {'formats', 'chat'}
FOLDERS = '', 'config/', 'data/', 'data/*/', *(f'{wing}/**/' for wing in sorted(WINGS | {'formats', 'chat'}))
FILES = sorted({os.path.relpath(path, ROOT) for folder in FOLDERS
                for path in glob.glob(os.path.join(ROOT, folder, '*.py'), recursive=True)})

# what each may not import, of ours: a wing (all of its files) or a module
NOT_TO_IMPORT = {
    'decode': OURS - {'decode', 'positions', 'device'},
    'kvcache': MODELS | SCRIPTS | {'generation', 'training', 'serving', 'benchmarks'},
    'training': MODELS | SCRIPTS | {'generation', 'decode', 'kvcache', 'serving', 'benchmarks'},
    'serving': SCRIPTS | {'training', 'benchmarks'},
    'benchmarks': SCRIPTS,
    'generation': OURS - {'model', 'inputs', 'kvcache', 'decode'},
    'formats': MODELS | SCRIPTS | WINGS | {'generation'},
    'chat': SCRIPTS | WINGS | {'generation', 'debug_kv_model'},
    'debug_kv_model': OURS - {'model', 'generation'},
    **{module: MODELS | SCRIPTS | WINGS | {'generation'} for module in MODULES - MODELS - SCRIPTS - {'generation'}},
    **{script: SCRIPTS - {script} for script in SCRIPTS},
}

FUNCTION_LINES = 80
LONGEST_FILES = {'model.py': 450}  # the one compulsory file: a GPT and its cache, whole
LONGER_FUNCTIONS = {  # (file, function): (its limit, the reason)
    ('decode/kernel/step.py', 'gpt_step'): (90, "a whole decode step, read from top to bottom like a GPT"),
}


def tree_of(path):
    with open(os.path.join(ROOT, path), encoding='utf-8') as f:
        return ast.parse(f.read())


def imports(path, top_level_only=False):
    """Names of the top-level packages and modules that a file imports: anywhere, or when it is imported itself."""
    tree, found = tree_of(path), set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split('.')[0])
    return found


def test_model_needs_torch_and_the_standard_library_only():
    """But for positions.py and inputs.py, which need no more, and `from_pretrained`, which reads other formats."""
    for path, ours in (('model.py', {'positions', 'inputs'}), ('positions.py', set()), ('inputs.py', set())):
        assert imports(path, top_level_only=True) <= set(sys.stdlib_module_names) | {'torch'} | ours
        assert imports(path) & OURS <= ours | ({'formats'} if path == 'model.py' else set())


@pytest.mark.parametrize('name', sorted(NOT_TO_IMPORT))
def test_arrows_go_one_way(name):
    for path in FILES:
        if path == name + '.py' or path.startswith(name + os.sep):
            assert not imports(path) & NOT_TO_IMPORT[name], path


def test_caches_and_generation_know_no_compiled_step():
    """They take what says where keys and values are, the executor in PyTorch, and what keeps interrupts out."""
    for path in ['generation.py', *(path for path in FILES if path.startswith('kvcache' + os.sep))]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split('.')[0] == 'decode':
                assert node.module in ('decode.eager', 'decode.metadata', 'decode.process'), path
            elif isinstance(node, ast.Import):
                assert all(alias.name.split('.')[0] != 'decode' for alias in node.names), path


@pytest.mark.parametrize('name', ['request', 'scheduler', 'api'])
def test_what_serving_decides_without_a_model_needs_no_torch(name):
    """Scheduling and the API's objects can be read and tested by themselves; nothing they import has torch."""
    path = f'serving/{name}.py'
    if path not in FILES:
        pytest.skip(f"there is no {path}")
    todo, seen = [path], set()
    while todo:
        path = todo.pop()
        seen.add(path)
        tree = tree_of(path)
        assert not imports(path, top_level_only=True) & {'torch', 'numba', 'kvcache', 'decode', 'model'}, path
        named = [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
        ours = [module.replace('.', '/') + '.py' for module in named if module.split('.')[0] == 'serving']
        todo += [of for of in ours if of in FILES and of not in seen]


def test_at_most_sixteen_files_at_the_top():
    assert len(MODULES) <= 16, sorted(MODULES)


def test_no_file_is_named_after_nothing():
    vague = {'utils', 'util', 'helpers', 'helper', 'common', 'misc', 'manager'}
    assert not [path for path in FILES if vague & set(os.path.basename(path)[:-3].split('_'))]


@pytest.mark.parametrize('path', FILES)
def test_functions_and_the_model_are_short(path):
    with open(os.path.join(ROOT, path), encoding='utf-8') as f:
        n_lines = sum(1 for _ in f)
    assert n_lines <= LONGEST_FILES.get(path, n_lines), f"{path} has {n_lines} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            n_lines = node.end_lineno - node.lineno + 1
            most, *_ = LONGER_FUNCTIONS.get((path, node.name), (FUNCTION_LINES,))
            assert n_lines <= most, f"{node.name} has {n_lines} lines"


def test_the_traced_model_copies_nothing():
    traced, plain = (open(os.path.join(ROOT, p), encoding='utf-8').read() for p in ('debug_kv_model.py', 'model.py'))
    bodies = {line.strip() for line in plain.splitlines()
              if len(line.strip()) > 40 and not line.strip().startswith(('def ', 'for '))}
    assert not [line for line in traced.splitlines() if line.strip() in bodies]
    assert 'KVDBG' not in plain and 'KV_DEBUG' not in plain and 'print(' not in plain
