"""
The servers that are loaded, each a process of its own on a free port: ours and llama-server, with the same weights.

llama-server is built from the source package of llama-cpp-python, whose wheel does not have it:

    pip download --no-binary :all: --no-deps llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_SERVER=ON
    cmake --build build --target llama-server -j
"""
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager

import checkpoint
from benchmarks.serve.client import closed_loop
from benchmarks.serve.workloads import mixed
from benchmarks.shapes import model_of
from decode.kernel.threads import n_cores
from formats import to_gguf
from tokenizer import CharTokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PATIENCE = 5.0         # seconds after which blocks that are in use are lost
START, STOP = 180, 20  # seconds that a server has to load its model, and to end
PAGE_SIZE = 16         # tokens of a block of our cache
TRIALS, TRIAL_TOKENS = 3, 16  # of each number of threads of llama-server; new tokens of a request
TRIAL_SEED = 10**6     # no load has these prompts
GGUF_TYPES = {'float32': 'f32', 'int8': 'q8_0'}
SETTINGS = {'temperature': 0, 'ignore_eos': True, 'stream': True, 'stream_options': {'include_usage': True}}


@contextmanager
def weights_on_disk(model):
    """A folder with the model as ckpt.pt and as GGUF in float32 and q8_0, and a character for each token."""
    first = 33 if model.config.vocab_size <= 94 else 161  # printable ones
    tokenizer = CharTokenizer([chr(first + i) for i in range(model.config.vocab_size)])
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save({'model': model.state_dict(), 'model_args': checkpoint.model_args(model.config),
                         'tokenizer': tokenizer.state()}, os.path.join(folder, 'ckpt.pt'))
        try:
            for weights, kind in GGUF_TYPES.items():
                to_gguf(model, os.path.join(folder, f'{weights}.gguf'), kind, tokenizer)
        except ValueError as e:
            print(f"no GGUF file: {e}", file=sys.stderr)
        yield folder


class Server:
    """
    A server that runs, on `port`. Use it with `with`. ValueError if it does not start.

    name: of the rows. threads: that compute a step, None where the server chooses. body(ask): the bytes of a request.
    """
    name, threads = '', None

    def __init__(self, port, *command):
        self.port, self.command = port, command

    def __enter__(self):
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(self.command, cwd=ROOT, stdout=self.log, stderr=self.log,
                                        start_new_session=True)
        deadline = time.monotonic() + START
        try:
            while not self.ready():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise ValueError(f"{self.name} does not start: {self.tail()}")
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error):
        self.stop()

    def stop(self):
        """End the process, by force if it does not end in time."""
        self.process.terminate()
        try:
            self.process.wait(STOP)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def tail(self):
        """The last lines that the server has printed."""
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 500))
        return self.log.read().decode('utf-8', 'replace')

    def ready(self):
        try:
            return self.get('/health') is not None
        except (OSError, urllib.error.URLError):
            return False

    def get(self, path):
        with urllib.request.urlopen(f'http://127.0.0.1:{self.port}{path}', timeout=20) as answer:
            return answer.read()

    def body(self, ask, **more):
        return json.dumps({'prompt': ask.prompt, 'max_tokens': ask.n_new, **SETTINGS, **more}).encode()


def free_port():
    with socket.create_server(('127.0.0.1', 0)) as free:
        return free.getsockname()[1]


class Ours(Server):
    """serve.py with the checkpoint of a folder. n_tokens: that its pool holds. options: further settings."""
    name = 'ours'

    def __init__(self, folder, weights, n_tokens, *options, device='cpu'):
        port, n_blocks = free_port(), -(-n_tokens // PAGE_SIZE)
        super().__init__(port, sys.executable, 'serve.py', f'--out_dir={folder}', f'--weights={weights}',
                         f'--device={device}', f'--port={port}', '--max_queue=100000', f'--n_blocks={n_blocks}',
                         f'--page_size={PAGE_SIZE}', *options)

    def body(self, ask):
        drawn = {} if ask.seed is None else {'temperature': 1, 'seed': ask.seed}
        return super().body(ask, return_token_ids=True, cache_salt=ask.salt, **drawn)

    def metric(self, name):
        """A number of /metrics."""
        return float(re.search(rf'^nanogpt_{name} (\S+)$', self.get('/metrics').decode(), re.M)[1])


class LlamaServer(Server):
    """
    llama-server with a GGUF file of a folder. n_slots: requests that it decodes at once. longest: tokens of the longest
    one with its answer; its cache has room for that in each slot. Of 40 candidates for a token, its default, it would
    take the first as well, and later.
    """
    name = 'llama-server'

    def __init__(self, binary, folder, weights, n_slots, longest, threads):
        self.threads = threads
        n_ctx = -(-longest // 256) * 256  # it rounds up to that itself
        port = free_port()
        super().__init__(port, binary, '-m', os.path.join(folder, f'{weights}.gguf'), '--host', '127.0.0.1', '--port',
                         str(port), '-np', str(n_slots), '-c', str(n_slots * n_ctx), '--threads', str(threads),
                         '--no-ui', '--log-verbosity', '1')

    def body(self, ask):
        return super().body(ask, top_k=1)


def blocks_left(ours):
    """Blocks of our server's pool that are in use, without a request, once it has had time to free them."""
    deadline = time.monotonic() + PATIENCE
    while (used := int(ours.metric('blocks_used'))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return used


def models(names, bias):
    """Yields (shape, config, folder with its model's files, weights) for each shape and kind of weights."""
    for name in names:
        model = model_of(name, bias)
        with weights_on_disk(model) as folder:
            for weights in GGUF_TYPES:
                yield name, model.config, folder, weights


@contextmanager
def beside(ours, llama_server, config, folder, weights, n_slots, longest):
    """
    [our server, llama-server with so many slots for requests of at most `longest` tokens], the latter if it is there.
    It runs with one thread or with one for each core: the number with which it answers n_slots clients sooner.
    """
    if missing(llama_server):
        yield [ours]
        return
    counts = sorted({1, n_cores()})
    with ExitStack() as up:
        servers = [up.enter_context(LlamaServer(llama_server, folder, weights, n_slots, longest, n)) for n in counts]
        fastest = min(servers, key=lambda server: trial(server, config, n_slots))
        for server in servers:
            if server is not fastest:
                server.stop()
        yield [ours, fastest]


def trial(server, config, n_clients):
    """Seconds that a short closed loop takes, at best."""
    asks = [ask._replace(n_new=min(ask.n_new, TRIAL_TOKENS)) for ask in mixed(config, n_clients * TRIALS, TRIAL_SEED)]
    return min(asyncio.run(closed_loop(server, asks[i::TRIALS], n_clients)).seconds for i in range(TRIALS))


def missing(llama_server):
    """Why llama-server is not compared; '' if it is. llama_server: the path of its binary."""
    if not llama_server:
        return "give its path with --llama_server=PATH; benchmarks/serve/servers.py says how to build it"
    if not os.access(llama_server, os.X_OK):
        return f"there is no program {llama_server}"
    return ''


def version(llama_server):
    """What llama-server says of its version and its compiler, in one line."""
    said = subprocess.run([llama_server, '--version'], capture_output=True, text=True, timeout=20)
    return ' '.join((said.stdout + said.stderr).split())
