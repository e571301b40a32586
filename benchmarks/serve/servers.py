"""
The servers that are loaded, each a process of its own on a free port: ours and llama-server, with the same weights.

llama-server is built from the source package of llama-cpp-python, whose wheel does not have it:

    pip download --no-binary :all: --no-deps llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_SERVER=ON
    cmake --build build --target llama-server -j
"""
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager

import checkpoint
from formats import to_gguf
from tokenizer import CharTokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PATIENCE = 5.0         # seconds after which blocks that are in use are lost
START, STOP = 180, 20  # seconds that a server has to load its model, and to end
PAGE_SIZE = 16         # tokens of a block of our cache
GGUF_TYPES = {'float32': 'f32', 'int8': 'q8_0'}
SETTINGS = {'temperature': 0, 'ignore_eos': True, 'stream': True, 'stream_options': {'include_usage': True}}


@contextmanager
def weights_on_disk(model, for_llama_server):
    """A folder with the model as ckpt.pt, a character for each token, and for llama-server as GGUF_TYPES."""
    first = 33 if model.config.vocab_size <= 94 else 161  # printable ones
    tokenizer = CharTokenizer([chr(first + i) for i in range(model.config.vocab_size)])
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save({'model': model.state_dict(), 'model_args': checkpoint.model_args(model.config),
                         'tokenizer': tokenizer.state()}, os.path.join(folder, 'ckpt.pt'))
        for weights, kind in GGUF_TYPES.items() if for_llama_server else ():
            to_gguf(model, os.path.join(folder, f'{weights}.gguf'), kind, tokenizer)
        yield folder


class Server:
    """
    A server that runs inside a `with`, on `port`. ValueError if it does not start.

    name: of the rows. command: of its process. body(ask): the bytes of a request.
    """

    def __init__(self, name, *command):
        with socket.create_server(('127.0.0.1', 0)) as free:
            self.port = free.getsockname()[1]
        self.name, self.command = name, [word.format(port=self.port) for word in command]

    def __enter__(self):
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(self.command, cwd=ROOT, stdout=self.log, stderr=self.log,
                                        start_new_session=True)
        deadline = time.monotonic() + START
        try:
            while not self.ready():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 500))
                    raise ValueError(f"{self.name} does not start: {self.log.read().decode('utf-8', 'replace')}")
                time.sleep(0.1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        """End the process, by force if it does not end in time."""
        self.process.terminate()
        try:
            self.process.wait(STOP)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def ready(self):
        try:
            return self.get('/health') is not None
        except OSError:
            return False

    def get(self, path):
        with urllib.request.urlopen(f'http://127.0.0.1:{self.port}{path}', timeout=20) as answer:
            return answer.read()

    def body(self, ask, **more):
        return json.dumps({'prompt': ask.prompt, 'max_tokens': ask.n_new, **SETTINGS, **more}).encode()


class OurServer(Server):
    """serve.py with the checkpoint of a folder. n_tokens: that its pool holds. options: further settings."""

    def __init__(self, folder, weights, n_tokens, *options, device='cpu'):
        decoder = 'auto' if device == 'cpu' else 'gpu'
        super().__init__('ours', sys.executable, 'serve.py', f'--out_dir={folder}', f'--weights={weights}',
                         f'--device={device}', f'--decoder={decoder}', '--port={port}', '--max_queue=100000',
                         f'--page_size={PAGE_SIZE}', f'--n_blocks={-(-n_tokens // PAGE_SIZE)}', *options)

    def body(self, ask):
        drawn = {} if ask.seed is None else {'temperature': 1, 'seed': ask.seed}
        return super().body(ask, return_token_ids=True, cache_salt=ask.salt, **drawn)

    def metric(self, name):
        """A number of /metrics."""
        return float(re.search(rf'^nanogpt_{name} (\S+)$', self.get('/metrics').decode(), re.M)[1])

    def blocks_left(self):
        """Blocks of the pool that are in use, without a request, once the server has had time to free them."""
        deadline = time.monotonic() + PATIENCE
        while (used := int(self.metric('blocks_used'))) and time.monotonic() < deadline:
            time.sleep(0.05)
        return used


class LlamaServer(Server):
    """
    llama-server with a GGUF file of a folder. n_slots: requests that it decodes at once. longest: tokens of the longest
    one with its answer; its cache has room for that in each slot. Requests ask for one candidate for a token: of its
    default, 40, it would take the first as well, but more slowly.
    """

    def __init__(self, binary, folder, weights, n_slots, longest, threads):
        n_ctx = -(-longest // 256) * 256  # it rounds up to that itself
        super().__init__(f"llama-server, {threads} thread{'s' * (threads > 1)}", binary,
                         '-m', os.path.join(folder, f'{weights}.gguf'), '--host', '127.0.0.1', '--port', '{port}',
                         '-np', str(n_slots), '-c', str(n_slots * n_ctx), '--threads', str(threads), '--no-ui',
                         '--log-verbosity', '1')

    def body(self, ask):
        return super().body(ask, top_k=1)


def missing(llama_server):
    """Why llama-server is not compared; '' if it is. llama_server: the path of its binary."""
    if not llama_server:
        return "give its path with --llama_server=PATH; benchmarks/serve/servers.py says how to build it"
    return '' if shutil.which(llama_server) else f"there is no program {llama_server}: give another path"
