"""
How much the tests try, and fixtures: a copy of the repository to run scripts in, with a small data set and a run.

`make test` tries each claim at a small size. `make test-all` passes --full, and each test is run at its full size.
"""
import os
import pydoc_data.topics
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import hypothesis
import pytest
from fork_server import ForkServer

try:
    import fcntl
except ImportError:  # not a POSIX system: each worker has its own trained run
    fcntl = None

SERVING = 'starlette', 'uvicorn', 'pydantic', 'orjson', 'prometheus_client', 'httpx'  # of requirements-dev.txt


def needs(*packages):
    """For a module that imports what needs these packages: its tests are skipped where one of them is not installed."""
    for package in packages:
        pytest.importorskip(package)


full = False  # is this the full run? See `sizes`


def pytest_addoption(parser):
    parser.addoption('--full', action='store_true', help='run each test at its full size, as `make test-all` does')


def pytest_configure(config):
    global full
    full = config.getoption('--full')
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # no deadline: on a busy machine an example may take any time. In continuous integration the examples are the same
    # in each run
    hypothesis.settings.register_profile('nanogpt', deadline=None, max_examples=sizes(25, 100),
                                         derandomize=bool(os.environ.get('CI')))
    hypothesis.settings.load_profile('nanogpt')


def sizes(quick, full_size):
    """
    The one of two sizes (a number of seeds or examples, a list of parameters, ...) that this run takes: `quick` in
    `make test`, `full_size` in `make test-all`. Usable wherever a test module is imported or run:

        @pytest.mark.parametrize('seed', range(sizes(3, 50)))
        @settings(max_examples=sizes(20, 300))
    """
    return full_size if full else quick


WEIGHTS = ('float32', 'int8', 'bfloat16', 'int4')  # of the CPU decoder

# one torch thread here and in the scripts: beside a busy core, two threads wait for each other most of the time
os.environ['OMP_NUM_THREADS'] = '1'
# the environment of scripts. They write bytecode, so that later scripts do not compile the same modules again
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != 'PYTHONDONTWRITEBYTECODE'}
TIMEOUT = 1200  # seconds that a script may take; a loaded machine is slow, and only a hang should end a test

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHARED_TEXT = os.path.join(ROOT, '..', 'shared', 'data', 'tinyshakespeare', 'input.txt')
REAL = os.path.join(ROOT, 'data', 'real', 'SmolLM2-135M-Instruct.Q4_1.gguf')

TINY = ['--device=cpu', '--dataset=shakespeare_char', '--n_layer=2', '--n_head=2', '--n_embd=16', '--block_size=16',
        '--batch_size=4', '--gradient_accumulation_steps=1', '--eval_iters=2', '--warmup_iters=2',
        '--lr_decay_iters=60', '--learning_rate=1e-2', '--dropout=0.1', '--eval_interval=10', '--max_iters=20']


# scripts read these variables after their imports; each is the beginning of a name
READ_LATE = ('KV_DEBUG', 'CUDA_VISIBLE_DEVICES', 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_', 'HF_', 'HOME',
             'XDG_CACHE_HOME', 'PYTHONIOENCODING')

servers = []  # the ForkServer of this process, once it is needed


def pytest_unconfigure():
    for server in servers:
        server.close()


def run(folder, *command, code=None, **env):
    """
    python command... in folder, with env added to the environment; the result has returncode, stdout and stderr. code:
    what returncode must be, if it is given.

    In the quick run, scripts are forked from a process that has torch loaded, see fork_server.py. Python and the
    packages read most variables when they start, so a script that is given others than READ_LATE starts by itself.
    """
    command = [str(word) for word in command]
    if is_forked(command, env):
        done = fork_server().run(folder, command[0], command[1:], env, TIMEOUT)
    else:
        done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True,
                              timeout=TIMEOUT, stdin=subprocess.DEVNULL, env={**ENVIRONMENT, **env})
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def start(folder, *command, stderr=subprocess.PIPE, **env):
    """
    python command... in folder, as a Popen that goes on by itself, with text pipes for stdout and stderr. In the quick
    run it is forked, as in `run`.
    """
    command = [str(word) for word in command]
    if is_forked(command, env) and stderr == subprocess.PIPE:
        return fork_server().start(folder, command[0], command[1:], env)
    return subprocess.Popen([sys.executable, *command], cwd=folder, stdout=subprocess.PIPE, stderr=stderr, text=True,
                            stdin=subprocess.DEVNULL, env={**ENVIRONMENT, **env})


def start_training(folder, *settings):
    """train.py in the background, with the settings of `TINY` and these."""
    return start(folder, 'train.py', *TINY, *settings)


def is_forked(command, env):
    can_fork = sys.platform == 'linux' and not full  # on others a fork of a process with torch may crash
    return can_fork and command[0].endswith('.py') and all(name.startswith(READ_LATE) for name in env)


def fork_server():
    if not servers:
        servers.append(ForkServer(ENVIRONMENT))
    return servers[0]


def shared_folder(tmp_path_factory):
    """A temporary folder of this run of the tests, the same for all workers of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if fcntl and 'PYTEST_XDIST_WORKER' in os.environ else own


@contextmanager
def locked(path):
    """One process at a time is inside, of those that name the same path."""
    with open(path, 'w') as f:
        if fcntl:
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


# `make gpu` needs none of them
@pytest.fixture(scope='session', autouse='PYTEST_XDIST_WORKER' in os.environ and 'FOR_GPU' not in os.environ)
def kernels():
    """
    The compiled functions of the quick run, where several workers of pytest-xdist begin at once: each begins with other
    ones, since a worker that needs what another one compiles would wait for it.
    """
    # imported here because one process of pytest-xdist only distributes tests, and does not need torch
    import torch

    from decode.kernel.attention import ATTENTION_ON
    from decode.kernel.sampling import DRAW
    from decode.kernel.step import team_for
    steps = [lambda weights=weights: team_for(weights, torch.float32, 1) for weights in WEIGHTS]
    others = [lambda each=each: each.compiled for each in (*ATTENTION_ON.values(), DRAW)]
    worker = int(os.environ['PYTEST_XDIST_WORKER'].removeprefix('gw'))
    for compile_one in steps + others if worker % 2 == 0 else others + steps:
        compile_one()


def copy_code(folder):
    """Copy all of the code to a folder; what is compiled of it is in one place for all copies. Returns the folder."""
    not_code = shutil.ignore_patterns('.*', 'out*', 'tests', '__pycache__', '*.bin', '*.gguf', '*.json', '*.txt',
                                      '*.png', '*.md')
    shutil.copytree(ROOT, folder, ignore=not_code, dirs_exist_ok=True)
    compiled, link = (os.path.join(at, 'decode', 'kernel', '__pycache__') for at in (ROOT, folder))
    os.makedirs(compiled, exist_ok=True)
    if not os.path.exists(link):
        os.symlink(compiled, link)
    return folder


@pytest.fixture(scope='session')
def trained(tmp_path_factory):
    """
    A copy of the code, a small character data set, and a run of 20 iterations in out/. Not to be written to: the
    workers of pytest-xdist share it, and the first one that needs it makes it.
    """
    folder = shared_folder(tmp_path_factory) / 'trained'
    finished = folder / 'train.log'
    with locked(folder.with_suffix('.lock')):
        if not finished.exists():
            copy_code(folder)
            text = ''.join(pydoc_data.topics.topics[topic] for topic in ('assert', 'class', 'for', 'try', 'with'))
            (folder / 'data' / 'shakespeare_char' / 'input.txt').write_text(text, encoding='utf-8')
            run(folder, 'data/shakespeare_char/prepare.py', code=0)
            finished.write_text(run(folder, 'train.py', *TINY, code=0).stdout)
    return folder


@pytest.fixture(scope='session')
def real_model():
    """The path of SmolLM2-135M-Instruct, a GGUF file of q4_1. Tests that need it are skipped where it is not."""
    if not os.path.exists(REAL):
        pytest.skip("no real model in data/real: `make real` downloads it")
    return REAL


@pytest.fixture
def repo(trained, tmp_path):
    """A copy of `trained` to do anything with, without the run."""
    shutil.copytree(trained, tmp_path / 'repo', ignore=shutil.ignore_patterns('out'), symlinks=True)
    return tmp_path / 'repo'
