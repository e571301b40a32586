"""bench.py --mode=serve: the load client counts correctly, and each part runs on our server. No speeds are tested."""
import asyncio
import json
import math
import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import SERVING, needs

needs(*SERVING)

import torch
from conftest import sizes
from serving_process import serving
from small_engine import spelling_engine

from benchmarks.serve import client, loads, servers
from benchmarks.serve.client import Answer, Ask, Load, closed_loop
from benchmarks.shapes import model_with_varied_text
from model import GPTConfig

TINY = GPTConfig(block_size=64, vocab_size=65, n_layer=1, n_head=2, n_embd=32)
SHORT = 'short'  # the salt of an `Ask` whose server is asked for a token too few


class Here(servers.OurServer):
    """A server of this process, whose `engine` steps when the test says so, and draws the letter after the last."""

    def __init__(self, engine, port):
        self.engine, self.port = engine, port

    def body(self, ask):
        return super().body(ask._replace(n_new=ask.n_new - (ask.salt == SHORT)))


@contextmanager
def here():
    engine = spelling_engine(n_allowed=0)
    with serving(engine) as http:
        yield Here(engine, http.base_url.port)


def loaded(server, asks, n_clients, meanwhile=lambda: None):
    """The `Load` of these asks. The engine steps when `meanwhile`, which is called while they wait, has returned."""
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(asyncio.run, closed_loop(server, asks, n_clients))
        meanwhile()
        server.engine.allow(float('inf'))
        return load.result()


def test_a_closed_loop_has_so_many_clients():
    with here() as server:
        load = loaded(server, [Ask([9, i], 3 + i) for i in range(7)], 2,
                      lambda: server.engine.until(lambda: len(server.engine.live) == 2))
        assert server.engine.stats.requests == 7
    by_prompt = sorted(load.answers, key=lambda a: a.ask.prompt)
    assert [(a.n_tokens, a.error) for a in by_prompt] == [(3 + i, '') for i in range(7)]
    assert [a.token_ids for a in by_prompt] == [list(range(i + 1, 2 * i + 4)) for i in range(7)]
    assert all(0 < a.began < a.first <= a.end <= a.began + load.seconds for a in load.answers)


def test_answers_that_are_wrong_are_failures():
    with here() as server:
        load = loaded(server, [Ask([9, 0], 4), Ask([99, 0], 4), Ask([9, 0], 4, salt=SHORT)], 1)
    fine, refused, short = load.answers
    assert fine.error == '' and 'token id 99' in refused.error and short.error == '3 tokens instead of 4'
    assert 'ConnectionRefused' in asyncio.run(closed_loop(server, [Ask([9, 0], 4)], 1)).answers[0].error
    row = client.figures([load])
    assert (row['requests'], row['failed']) == (3, 2) and math.isclose(row['tok_per_s'], 4 / load.seconds)


def test_clients_that_leave():
    with here() as server:
        ended = server.engine.stats.finished
        first = loaded(server, [Ask([9, 1], 5), Ask([9, 2], 5, leaves=1)], 2,  # when the headers have come
                       lambda: server.engine.until(lambda: ended['abort'] == 1))
        second = loaded(server, [Ask([9, 4], 5, 0)], 1)
        assert first.answers[1].token_ids == [2, 3, 4, 5, 6]
    assert [(a.ask.prompt[1], a.error) for a in first.answers] == [(2, 'left'), (1, '')]
    assert [(a.ask.prompt[1], a.n_tokens, a.error) for a in second.answers] == [(4, 0, 'left')]
    assert (client.figures([first])['requests'], client.figures([first])['failed']) == (2, 0)


def made_load(seconds, *answers):
    """A Load of answers (began, first, end, tokens)."""
    return Load([Answer(Ask([1], n), began, first, end, n) for began, first, end, n in answers], seconds)


def test_figures_by_hand():
    slow = made_load(4.0, (0, 2.0, 3.0, 11), (0, 0.5, 2.5, 11))
    fast = made_load(2.0, (0, 0.1, 0.2, 11), (1, 1.3, 1.8, 11))
    row = client.figures([fast, fast, slow])
    assert row['tok_per_s'] == 11 and row['runs_tok_per_s'] == [11, 11, 5.5] and row['requests'] == 6
    assert row['first_ms'] + row['per_token_ms'] == pytest.approx([300, 2000, 50, 200])
    nothing = client.figures([Load([], 1.0)])
    assert nothing['first_ms'] is None and nothing['tok_per_s'] == 0


def test_ours_is_compared_with_the_better_number_of_threads(monkeypatch):
    """Tokens a second of three servers in two rounds, and of one that has answered nothing."""
    rates = {'ours': [60, 90], 'one thread': [20, 10], 'two threads': [30, 30], 'none': [0, 0]}

    async def closed_loop(server, asks, n_clients):
        assert n_clients == 4
        if len(asks) == 4:  # the warm-up
            return made_load(1)
        return made_load(1, (0, 1, 1, rates[server.name].pop(0)))
    monkeypatch.setattr(loads, 'closed_loop', closed_loop)
    ours, *others = loads.in_turns('S', TINY, 'float32', [SimpleNamespace(name=name) for name in rates], 4, 9, 2)
    assert ours['over_llama'] == 2.5 and [row['tok_per_s'] for row in others] == [15, 30, 0]


def test_llama_server_has_the_slots_and_the_context_of_a_load(tmp_path):
    """A stand-in for it, which has its arguments, and answers that it is well."""
    binary = tmp_path / 'llama-server'
    assert 'no program' in servers.missing(str(binary)) and '--llama_server' in servers.missing('')
    binary.write_text(f"""#!{sys.executable}
import sys
from http.server import HTTPServer, SimpleHTTPRequestHandler
open(sys.argv[sys.argv.index('-m') + 1]).close()
SimpleHTTPRequestHandler.do_GET = lambda self: self.send_response(200) or self.end_headers()
HTTPServer(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])), SimpleHTTPRequestHandler).serve_forever()
""")
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    assert servers.missing(str(binary)) == ''
    pytest.importorskip('gguf')
    with servers.weights_on_disk(model_with_varied_text(TINY), True) as folder, \
            servers.LlamaServer(str(binary), folder, 'int8', 4, 300, 2) as theirs:
        assert {*os.listdir(folder)} == {'ckpt.pt', 'float32.gguf', 'int8.gguf'}
        arguments = theirs.process.args
        assert [arguments[arguments.index(name) + 1] for name in ('-np', '-c', '--threads')] == ['4', '2048', '2']
        assert theirs.name == 'llama-server, 2 threads' and json.loads(theirs.body(Ask([1], 2)))['top_k'] == 1
    assert theirs.process.poll() is not None
    with pytest.raises(ValueError, match='(?s)llama-server, 1 thread does not start.*FileNotFound'), \
            servers.LlamaServer(str(binary), str(tmp_path), 'float32', 4, 300, 1):
        pass


@pytest.fixture(scope='module')
def ours():
    """(a folder with the files of a small model, our server with it)"""
    torch.manual_seed(0)
    with servers.weights_on_disk(model_with_varied_text(TINY), False) as folder, \
            servers.OurServer(folder, 'float32', 8 * TINY.block_size, '--decoder=eager') as server:
        yield folder, server


def test_clients_of_our_server(ours, monkeypatch):
    folder, server = ours
    assert os.listdir(folder) == ['ckpt.pt']
    monkeypatch.setattr(loads, 'OurServer', lambda *settings, device: nullcontext(server))  # it runs already
    monkeypatch.setattr(loads, 'model_of', lambda name, bias: model_with_varied_text(TINY))
    asked = SimpleNamespace(shapes=['S'], bias=False, device='cpu', llama_server='', batches=[2], requests=6, repeats=1)
    rows = [row for some in loads.clients(asked) for row in some]
    assert [(row['weights'], row['clients'], row['requests'], row['failed']) for row in rows] == [
        ('float32', 2, 6, 0), ('int8', 2, 6, 0)]
    assert rows[0]['over_llama'] is None and 0 < rows[0]['first_ms'][0] <= rows[0]['first_ms'][1]
    json.dumps(rows)


def test_the_soak_compares_answers(ours, monkeypatch):
    folder, server = ours
    monkeypatch.setattr(loads, 'OurServer', lambda *settings, device: nullcontext(server))  # it runs already
    monkeypatch.setattr(loads, 'COMPARED', 0.5)
    n = sizes(40, 400)
    row = loads.soak('S', TINY, folder, 'float32', 4, n)
    assert (row['failed'], row['blocks_used'], row['different'], row['compared']) == (0, 0, 0, n // 2)
    assert len(row['resident']) == loads.TURNS

    async def others(server, asks, n_clients):
        """The answers to requests alone are other ones, which is seen."""
        load = await closed_loop(server, asks, n_clients)
        return load._replace(answers=[replace(answer, data=b'') for answer in load.answers]) if n_clients == 1 else load
    monkeypatch.setattr(loads, 'closed_loop', others)
    changed = loads.soak('S', TINY, folder, 'float32', 4, 20)
    assert changed['different'] == changed['compared'] == 10
