"""The shape of the house: arrows go one way (scripts -> serving -> engine -> kvcache, decode), functions are short."""
import ast
import builtins
import glob
import os
import sys
from importlib.util import find_spec

import pytest
from conftest import ROOT, SERVING, run
from test_documents import text_of

SCRIPTS = {'train', 'sample', 'bench', 'export', 'serve', 'test_kv_cache'}
WINGS = {'decode', 'kvcache', 'engine', 'training', 'serving', 'benchmarks'}
MODELS = {'model', 'debug_kv_model'}
MODULES = {os.path.basename(path)[:-3] for path in glob.glob(os.path.join(ROOT, '*.py'))}
OURS = MODULES | WINGS | {'formats', 'chat'}
FOLDERS = '', 'config/', 'data/', 'data/*/', *(f'{wing}/**/' for wing in sorted(WINGS | {'formats', 'chat'}))
FILES = sorted({os.path.relpath(path, ROOT) for folder in FOLDERS
                for path in glob.glob(os.path.join(ROOT, folder, '*.py'), recursive=True)})

# what each may not import, of ours: a wing (all of its files) or a module
NOT_TO_IMPORT = {
    'decode': OURS - {'decode', 'positions', 'inputs', 'device'},
    'kvcache': OURS - {'kvcache', 'decode', 'positions', 'inputs', 'whole_file'},
    'engine': OURS - {'engine', 'kvcache', 'decode', 'inputs'},
    'training': MODELS | SCRIPTS | WINGS - {'training'},
    'serving': SCRIPTS | {'training', 'benchmarks'},
    'benchmarks': SCRIPTS,
    'formats': MODELS | SCRIPTS | WINGS,
    'chat': MODELS | SCRIPTS | WINGS,
    'debug_kv_model': OURS - {'model'},
    **{module: MODELS | SCRIPTS | WINGS for module in MODULES - MODELS - SCRIPTS},
    **{script: SCRIPTS - {script} for script in SCRIPTS},
}

FUNCTION_LINES = 80
LONGEST_FILES = {'model.py': 450}  # the one compulsory file: a GPT and its cache, whole
LONGER_FUNCTIONS = {  # (file, function): (its limit, the reason)
    ('decode/kernel/step.py', 'gpt_step'): (90, "a whole decode step, read from top to bottom like a GPT"),
}


def tree_of(path):
    return ast.parse(text_of(path))


def modules_in(tree, top_level_only=False):
    """The names, with their dots, of the modules that a file imports: anywhere, or when it is imported itself."""
    found = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {node.module, *(f'{node.module}.{alias.name}' for alias in node.names)}
    return found


def imports(path, top_level_only=False):
    """Names of the top-level packages and modules that a file imports."""
    return {name.split('.')[0] for name in modules_in(tree_of(path), top_level_only)}


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


def test_pools_and_the_engine_know_no_compiled_step():
    """They know what says where keys and values are, settings of draws, and at the most the executor in PyTorch."""
    for path in FILES:
        if path.startswith(('kvcache' + os.sep, 'engine' + os.sep)):
            of_decode = [name for name in modules_in(tree_of(path)) if name.split('.')[0] == 'decode']
            assert all(name.startswith(('decode.batch', 'decode.draw', 'decode.eager')) for name in of_decode), path


LOADED = """
import importlib, os, sys
for names in sys.argv[1:]:
    for name in names.split():
        importlib.import_module(name)
    paths = {name: getattr(module, '__file__', None) or '' for name, module in sys.modules.items()}
    print(*[name for name, path in paths.items() if not name.startswith('__') and (name == 'numba'
            or path.startswith(os.getcwd() + os.sep) and 'site-packages' not in path)])
"""


def test_the_engine_is_a_few_files_and_what_is_there_to_be_compared_is_loaded_by_name_only():
    """kvcache/llamacpp and openppl.py are reading matter: what samples or serves imports them inside of a function."""
    serving = 'serving.loading serving.server' if all(map(find_spec, SERVING)) else ''
    done = run(ROOT, '-c', LOADED, 'engine', f'sample test_kv_cache decode.cpu decode.speculative {serving}', code=0)
    of_engine, of_all = (line.split() for line in done.stdout.splitlines())
    assert 8 < len(of_engine) <= 16 and 'numba' not in of_engine, of_engine
    assert len(of_all) > 25
    assert not [name for name in of_all if name.startswith(('kvcache.llamacpp', 'kvcache.openppl'))]


def test_at_most_sixteen_files_at_the_top_and_none_is_named_after_nothing():
    assert len(MODULES) <= 16, sorted(MODULES)
    vague = {'utils', 'util', 'helpers', 'helper', 'common', 'misc', 'manager'}
    assert not [path for path in FILES if vague & set(os.path.basename(path)[:-3].split('_'))]


def test_functions_and_the_model_are_short():
    for path in FILES:
        n_lines = text_of(path).count('\n')
        assert n_lines <= LONGEST_FILES.get(path, n_lines), f"{path} has {n_lines} lines"
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                n_lines = node.end_lineno - node.lineno + 1
                most, *_ = LONGER_FUNCTIONS.get((path, node.name), (FUNCTION_LINES,))
                assert n_lines <= most, f"{path}: {node.name} has {n_lines} lines"


def free_names(node, bound=frozenset()):
    """The names that are read in a node of a syntax tree, but for those that a comprehension around them binds."""
    if comprehensions := getattr(node, 'generators', ()):
        bound |= {name.id for each in comprehensions for name in ast.walk(each.target) if isinstance(name, ast.Name)}
    if isinstance(node, ast.Name) and node.id not in bound:
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from free_names(child, bound)


def test_no_comprehension_binds_a_builtin_that_its_function_reads_elsewhere():
    """Python 3.12.0 to 3.12.3 would take the one for the other: https://github.com/python/cpython/issues/118513."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                bound = {name.id for part in ast.walk(node) for each in getattr(part, 'generators', ())
                         for name in ast.walk(each.target) if isinstance(name, ast.Name)}
                assert not bound & {*dir(builtins)} & {*free_names(node)}, f'{path}: {node.name}'
