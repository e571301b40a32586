"""
English without a download: the docstrings of torch and of what is installed with it, 14 MB, as GPT-2's byte pairs
(which tiktoken downloads once). Writes train.bin, val.bin and meta.json to this folder.

    python data/docstrings/prepare.py

Equal docstrings are taken once. Their order is that of their hashes, so that both splits have the same kinds of text.
"""
import ast
import hashlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
                os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
import configurator  # isort: skip

import prepare_text
from tqdm import tqdm

from tokenizer import GPT2Tokenizer

packages = 'torch,numpy,sympy,networkx'  # whose docstrings


def main(config):
    folder, tokenizer = os.path.dirname(os.path.abspath(__file__)), GPT2Tokenizer()
    text = '\n\n\n'.join(docstrings_of(packages))
    prepare_text.write_dataset(folder, prepare_text.split(text), tokenizer, f'docstrings of {packages}')


def docstrings_of(packages):
    """The docstrings of packages, a list in the order of their hashes. ValueError if there are none."""
    found = set()
    for path in tqdm([path for name in packages.split(',') for path in sources(name)], unit='file', disable=None):
        found |= docstrings(path)
    if not found:
        raise ValueError(f"packages={packages} have no docstrings: name packages that are written in Python")
    return sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest())


def sources(package):
    """The Python files of an installed package. ValueError if there is no such package."""
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"there is no package {package!r}: install it, or leave it out of --packages")
    return sorted(Path(spec.submodule_search_locations[0]).rglob('*.py'))


def docstrings(path):
    """The docstrings of a Python file that have several lines; none if it is for another version of Python."""
    try:
        nodes = ast.walk(ast.parse(path.read_bytes()))
    except (SyntaxError, ValueError, RecursionError):  # also of null bytes
        return set()
    found = {ast.get_docstring(node) or '' for node in nodes
             if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))}
    return {text for text in found if '\n' in text}


if __name__ == '__main__':
    configurator.run(main)
