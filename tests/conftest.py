"""Fixtures: a copy of the repository with a small data set to run scripts in, and what a run left behind."""
import os
import pydoc_data.topics
import shutil
import signal
import subprocess
import sys

import hypothesis
import pytest
import torch

from decode.cpu import CPUDecoder
from model import GPT, GPTConfig

hypothesis.settings.register_profile('here', deadline=None)  # a slow machine is no bug
hypothesis.settings.register_profile('ci', deadline=None, derandomize=True)
hypothesis.settings.load_profile('ci' if os.environ.get('CI') else 'here')

# one torch thread here and in the scripts: beside a busy core two of them wait for each other most of the time
torch.set_num_threads(1)
ENVIRONMENT = {**os.environ, 'OMP_NUM_THREADS': '1'}
TIMEOUT = 1200  # seconds that a script may take; a loaded machine is slow, and only a hang should end a test

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHARED_TEXT = os.path.join(ROOT, '..', 'shared', 'data', 'tinyshakespeare', 'input.txt')

TINY = ['--device=cpu', '--dataset=shakespeare_char', '--n_layer=2', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4',
        '--gradient_accumulation_steps=1', '--eval_iters=2', '--warmup_iters=2', '--lr_decay_iters=60', '--learning_rate=1e-2',
        '--dropout=0.1', '--eval_interval=10', '--max_iters=20']


def run(folder, *command, **env):
    """python command... in folder; the result has returncode, stdout and stderr."""
    return subprocess.run([sys.executable, *map(str, command)], cwd=folder, capture_output=True, text=True,
                          timeout=TIMEOUT, stdin=subprocess.DEVNULL, env={**ENVIRONMENT, **env})


def start(folder, *command, stderr=subprocess.PIPE):
    """
    python command... in folder, as a Popen that goes on by itself, with text pipes for stdout and stderr.

    The script reacts to SIGINT also where these tests ignore it, as they do in the background of a shell: a signal that
    is ignored stays ignored in a new program, but one with a handler is back at its default.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen([sys.executable, *map(str, command)], cwd=folder, stdout=subprocess.PIPE, stderr=stderr,
                                text=True, stdin=subprocess.DEVNULL, env=ENVIRONMENT)
    finally:
        signal.signal(signal.SIGINT, before)


def copy_code(folder):
    for name in os.listdir(ROOT):
        if name.endswith('.py'):
            shutil.copy(os.path.join(ROOT, name), folder)
    for weights in ('float32', 'int8'):  # compiled once, and copied with the code
        CPUDecoder(GPT(GPTConfig(block_size=8, vocab_size=5, n_layer=1, n_head=1, n_embd=8)), weights, threads=1)
    for name in ('decode', 'kvcache', 'training', 'config'):
        shutil.copytree(os.path.join(ROOT, name), folder / name)
    shutil.copytree(os.path.join(ROOT, 'data'), folder / 'data', ignore=shutil.ignore_patterns('*.bin', '*.json', '*.txt', '__pycache__'))
    return folder


@pytest.fixture(scope='session')
def trained(tmp_path_factory):
    """A copy of the code, a small character data set, and a run of 20 iterations in out/. Not to be written to."""
    folder = copy_code(tmp_path_factory.mktemp('trained'))
    text = ''.join(pydoc_data.topics.topics[topic] for topic in ('assert', 'class', 'for', 'try', 'with'))
    (folder / 'data' / 'shakespeare_char' / 'input.txt').write_text(text, encoding='utf-8')
    assert run(folder, 'data/shakespeare_char/prepare.py').returncode == 0
    done = run(folder, 'train.py', *TINY)
    assert done.returncode == 0, done.stderr
    (folder / 'train.log').write_text(done.stdout)
    return folder


@pytest.fixture
def repo(trained, tmp_path):
    """A copy of `trained` to do anything with, without the run."""
    shutil.copytree(trained, tmp_path / 'repo', ignore=shutil.ignore_patterns('out'))
    return tmp_path / 'repo'
