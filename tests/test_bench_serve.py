"""bench.py --mode=serve: the load client counts correctly, and each part runs on our server. No speeds are tested."""
import asyncio
import json
import math
import os
import stat
import sys
from dataclasses import replace

import pytest
from conftest import SERVING, needs

needs(*SERVING)

import torch
from conftest import ROOT, run, sizes
from standin_server import BROKEN, SHORT, StandIn

import decode
from benchmarks import serve
from benchmarks.harness import Measured
from benchmarks.serve import alone, client, loads, servers, soak, workloads
from benchmarks.serve.client import Answer, Ask, Load, closed_loop, open_loop
from benchmarks.shapes import SHAPES, model_with_varied_text
from model import GPT, GPTConfig

TINY = GPTConfig(block_size=64, vocab_size=65, n_layer=1, n_head=2, n_embd=32)


def with_standin(play):
    """Run the coroutine play(a StandIn)."""
    async def whole():
        standin = await StandIn().start()
        async with standin.server:
            return await play(standin)
    return asyncio.run(whole())


def test_a_closed_loop_has_so_many_clients():
    async def play(standin):
        return standin, await closed_loop(standin, [Ask([9, i], 3 + i) for i in range(7)], 2)
    standin, load = with_standin(play)
    assert standin.most == 2 and [body['prompt'][1] for body in standin.bodies] == list(range(7))
    by_prompt = sorted(load.answers, key=lambda a: a.ask.prompt)
    assert [(a.n_tokens, a.error) for a in by_prompt] == [(3 + i, '') for i in range(7)]
    assert [a.token_ids for a in by_prompt] == [list(range(i, 2 * i + 3)) for i in range(7)]
    assert all(0 < a.due < a.first <= a.end for a in load.answers) and load.seconds > 0
    assert all(a.seconds <= load.seconds for a in load.answers)


def test_answers_that_are_wrong_are_failures():
    async def play(standin):
        load = await closed_loop(standin, [Ask([9, 0], 4), Ask([BROKEN, 0], 4), Ask([SHORT, 0], 4)], 1)
        standin.server.close()
        await standin.server.wait_closed()
        return load, await closed_loop(standin, [Ask([9, 0], 4)], 1)
    load, without_server = with_standin(play)
    fine, broken, short = load.answers
    assert fine.error == '' and 'broken' in broken.error and short.error == '3 tokens instead of 4'
    assert 'ConnectionRefused' in without_server.answers[0].error
    row = client.figures([load])
    assert (row['requests'], row['failed'], row['left']) == (3, 2, 0) and math.isclose(
        row['tok_per_s'], 4 / load.seconds)


def test_clients_that_leave_and_read_slowly():
    async def play(standin):
        standin.gate.clear()
        waits = asyncio.ensure_future(closed_loop(standin, [Ask([9, 1], 5), Ask([9, 2], 5, leaves=1)], 2))
        while [9, 2] not in standin.gone:  # it has left when the headers had come
            await asyncio.sleep(0)
        standin.gate.set()
        return standin, await waits, await closed_loop(standin, [Ask([9, 3], 5, slow=True), Ask([9, 4], 5, 0)], 2)
    standin, first, second = with_standin(play)
    assert [(a.ask.prompt[1], a.error) for a in first.answers] == [(2, 'left'), (1, '')]
    assert standin.gone == [[9, 2]]
    assert [(a.ask.prompt[1], a.n_tokens, a.error) for a in second.answers] == [(4, 0, 'left'), (3, 5, '')]
    assert client.figures([first])['left'] == 1


def test_an_open_loop_does_not_wait_for_answers():
    async def play(standin):
        standin.gate.clear()
        waits = asyncio.ensure_future(open_loop(standin, [Ask([9, i], 2) for i in range(5)], [0, .01, .01, .02, .03]))
        while standin.waiting < 5:
            standin.arrived.clear()
            await standin.arrived.wait()
        standin.gate.set()
        return await waits
    answers = sorted(with_standin(play).answers, key=lambda a: a.ask.prompt)
    times = [a.due - answers[0].due for a in answers]
    assert all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(times, [0, .01, .01, .02, .03]))
    # all five waited for the last one: that counts from when each was due
    assert all(a.first >= answers[-1].due and a.first_token_s >= answers[-1].due - a.due for a in answers)


def test_lengths_of_the_trace_are_scaled_by_one_factor(monkeypatch):
    # the 99th percentile of the totals is 1,000, so everything is divided by 10; the last row is cut to the window
    rows = [(10.0 * i, 300, 100) for i in range(98)] + [(985.0, 400, 600), (1000.0, 20_000, 10)]
    config = GPTConfig(block_size=100)
    some, times = workloads.from_trace(config, rows, 100, 0, 0)
    lengths = [(30, 10)] * 98 + [(40, 60), (99, 1)]
    first = lengths.index((40, 60)) - [(len(a.prompt), a.n_new) for a in some].index((40, 60))  # of the rows
    assert first and [(len(a.prompt), a.n_new) for a in some] == lengths[first:] + lengths[:first]
    shorter, _ = workloads.from_trace(config, rows, 7, 0, 0)
    assert shorter == some[:7], "a longer load begins as a shorter one"
    arrivals = [t for t, *_ in rows[first:]] + [1000 + t for t, *_ in rows[:first]]
    assert times == pytest.approx([(t - arrivals[0]) * 99 / (arrivals[-1] - arrivals[0]) for t in arrivals])
    again, _ = workloads.from_trace(config, rows, 100, 0, 1)
    assert [len(a.prompt) for a in again] == [len(a.prompt) for a in some] and again != some  # other tokens
    monkeypatch.setattr(workloads, 'TRACE', 'nowhere')
    source, rows = workloads.trace()
    assert 'stand-in' in source and rows == sorted(rows) and 4 < len(rows) / rows[-1][0] < 6


def test_prefixes_and_faults():
    config = SHAPES['S']
    for share, common in ((0.0, 0), (0.5, 32), (0.9, 58)):
        some = workloads.with_prefix(config, 20, share, 16, 0)
        prompts = [ask.prompt for ask in some]
        assert {len(p) for p in prompts} == {64} and len({tuple(p[:common]) for p in prompts}) == 1
        assert len({tuple(p[common:]) for p in prompts}) == 20
    faulty = workloads.with_faults(workloads.mixed(config, 1000, 0), 0)
    leaving = [ask for ask in faulty if ask.leaves is not None]
    assert 250 < len(leaving) < 350 and {ask.leaves for ask in leaving} == {0, 1, 2, 3}
    assert 60 < sum(ask.slow for ask in faulty) < 140 and not any(ask.slow for ask in leaving)


def made_load(seconds, *answers):
    """A Load of answers (due, first, end, tokens)."""
    return Load([Answer(Ask([1], n), due, first, end, n) for due, first, end, n in answers], seconds, seconds / 10)


def test_figures_by_hand():
    assert [client.percentile([3, 1, 2, 4], p) for p in (50, 75, 99)] == [2, 3, 4] and not client.percentile([], 50)
    assert client.percentile(range(1, 101), 99) == 99
    slow = made_load(4.0, (0, 2.0, 3.0, 11), (0, 0.5, 2.5, 11))    # too late; too slow: 0.2 s a token
    fast = made_load(2.0, (0, 0.1, 0.2, 11), (1, 1.3, 1.8, 11))
    row = client.figures([fast, fast, slow])
    assert row['tok_per_s'] == 11 and row['runs_tok_per_s'] == [11, 11, 5.5] and row['goodput'] == 1
    assert client.goodput(slow) == 0 and row['client_cpu'] == 0.1 and row['requests_per_s'] == 1
    assert all(math.isclose(a, b) for a, b in zip(row['ttft_ms'] + row['per_token_ms'] + row['end_to_end_ms'],
                                                  [300, 2000, 50, 200, 800, 3000]))
    mine, theirs, none = (Measured(None, results=results) for results in (
        [fast, slow, fast], [slow, slow, slow], [Load([], 1.0)] * 3))
    assert client.over(mine, theirs) == 2 and client.over(mine, none) is None


def test_llama_server_runs_with_the_better_number_of_threads(tmp_path, monkeypatch):
    """A stand-in for it, which has its arguments: those of both numbers of threads start, and one goes on."""
    binary = tmp_path / 'llama-server'
    assert 'no program' in servers.missing(str(binary)) and '--llama_server' in servers.missing('')
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/standin_server.py "$@"\n')
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    assert servers.missing(str(binary)) == ''
    (tmp_path / 'int8.gguf').touch()
    tried = []
    monkeypatch.setattr(servers, 'n_cores', lambda: 2)
    monkeypatch.setattr(servers, 'trial', lambda server, *_: tried.append(server) or -server.threads)
    with servers.beside('ours', str(binary), TINY, str(tmp_path), 'int8', 4, 300) as (ours, theirs):
        assert ours == 'ours' and theirs.threads == 2 and theirs.process.poll() is None
        assert [server.threads for server in tried] == [1, 2] and tried[0].process.poll() is not None
        arguments = theirs.process.args
        assert [arguments[arguments.index(name) + 1] for name in ('-np', '-c', '--threads')] == ['4', '2048', '2']
        load = asyncio.run(closed_loop(theirs, workloads.mixed(TINY, 3, 0), 2))
        assert not any(answer.error for answer in load.answers)
    assert theirs.process.poll() is not None
    with pytest.raises(ValueError, match='(?s)llama-server does not start.*FileNotFound'), \
            servers.LlamaServer(str(binary), str(tmp_path), 'float32', 4, 300, 1):
        pass
    with servers.beside('ours', '', TINY, str(tmp_path), 'int8', 4, 300) as alone:
        assert alone == ['ours']


@pytest.fixture(scope='module')
def ours():
    """(a folder with the files of a small model, our server with it)"""
    torch.manual_seed(0)
    with servers.weights_on_disk(model_with_varied_text(TINY)) as folder, \
            servers.Ours(folder, 'float32', 8 * TINY.block_size, '--decoder=eager') as server:
        yield folder, server


def test_each_part_on_our_server(ours):
    folder, server = ours
    assert {'ckpt.pt'} <= set(os.listdir(folder)) <= {'ckpt.pt', 'float32.gguf', 'int8.gguf'}
    n = sizes(6, 40)
    rows = loads.closed('S', TINY, 'float32', [server], 2, n, 1)
    rows += loads.arrivals('S', TINY, 'float32', [server], 2, n, 1)
    rows += loads.prefix('S', TINY, 'float32', [server], 2, n, 1)
    rows += loads.faults('S', TINY, 'float32', [server], 2, n, 1)
    assert len(rows) == 1 + 1 + 3 + 2 and not any(row['failed'] for row in rows)
    assert rows[0]['over_llama'] is None and rows[0]['requests'] == n
    assert math.isclose(rows[1]['rate'], 0.8 * rows[1]['capacities'][0]) and len(rows[1]['capacities']) == 1
    assert [row['ttft_over_none'] for row in rows[2:5]][0] == 1
    assert rows[-1]['faults'] and rows[-1]['blocks_used'] == 0
    json.dumps(rows)


def test_arrivals_come_at_a_part_of_a_capacity(monkeypatch):
    """Of two servers with 10 and 5 requests a second, which are half as fast from the second round on."""
    class Standing:
        def __init__(self, name, rate):
            self.name, self.rate, self.threads = name, rate, None
    ours, other = Standing('ours', 10), Standing('llama-server', 5)
    seen = []

    async def closed_loop(server, asks, n_clients):
        return made_load(len(asks) / server.rate)

    async def open_loop(server, asks, times):
        seen.append((server.name, (len(times) - 1) / times[-1]))
        if len(seen) == 6:  # three loads of round 0, which warms up, and three of round 1
            ours.rate, other.rate = 5, 2.5
        return made_load(1, *[(t, t + 0.1, t + 1, 2) for t in times])
    monkeypatch.setattr(loads, 'closed_loop', closed_loop)
    monkeypatch.setattr(loads, 'open_loop', open_loop)
    rows = loads.arrivals('S', TINY, 'float32', [ours, other], 2, None, 2)
    for at, factor in ((0, 1), (3, 1), (6, 0.5)):
        assert sorted(seen[at:at + 3]) == [('llama-server', pytest.approx(4 * factor)),
                                           ('ours', pytest.approx(4 * factor)), ('ours', pytest.approx(8 * factor))]
    assert [row['capacities'] for row in rows] == [[10, 5], [5, 2.5], [5, 2.5]]
    assert [row['rate'] for row in rows] == pytest.approx([0.8 * 7.5, 0.8 * 3.75, 0.8 * 3.75])


def test_the_soak_compares_answers(ours, monkeypatch):
    folder, server = ours

    class Same:  # the server that runs already, in the place of new ones
        def __init__(self, *settings, device):
            pass

        def __enter__(self):
            return server

        def __exit__(self, *error):
            pass
    monkeypatch.setattr(soak, 'Ours', Same)
    monkeypatch.setattr(soak, 'COMPARED', 0.5)
    n = sizes(40, 400)
    row = soak.soak('S', TINY, folder, 'float32', 4, n)
    assert (row['failed'], row['blocks_used'], row['different'], row['compared']) == (0, 0, 0, n // 2)
    assert len(row['resident']) == soak.TURNS
    # an answer that is another one is seen
    async def others(server, asks, n_clients):
        load = await closed_loop(server, asks, n_clients)
        if n_clients == 1:
            load.answers = [replace(answer, data=b'') for answer in load.answers]
        return load
    monkeypatch.setattr(soak, 'closed_loop', others)
    changed = soak.soak('S', TINY, folder, 'float32', 4, 20)
    assert changed['different'] == changed['compared'] == 10


def test_the_calls_of_the_engine_are_made_again(monkeypatch):
    torch.manual_seed(0)
    model = GPT(TINY).eval()
    decoder = decode.best(model, 1, 'float32', 1)
    monkeypatch.setattr(alone, 'N_NEW', 20)
    row = alone.engine_race('S', model, decoder, 'float32', 3, 1)
    assert 0 < row['of_kernel'] and len(row['runs_s']['kernel']) == 1
    calls, engine = [], alone.Engine(model, decoder, [b' '] * 65, n_blocks=32)
    some, run_once = workloads.mixed(TINY, 3, 0), decoder.execute_model

    def counted(ids, positions, arrays, metadata):
        calls.append((len(ids), metadata.next_tokens))
        return run_once(ids, positions, arrays, metadata)
    monkeypatch.setattr(decoder, 'execute_model', counted)
    seconds, again, n = alone.serve(engine, decoder, some)
    assert seconds > 0 and again > 0 and n == sum(ask.n_new for ask in some) and not engine.live
    assert engine.cache.executor is decoder
    # the first two calls compute all prompts in one step. Of the others, the engine's make one step or several, and
    # the second ones make one step each
    (prompts, _), (again, _), *others = calls
    assert prompts == again == sum(len(ask.prompt) for ask in some)
    n_steps, n_alone = max(ask.n_new for ask in some) - 1, sum(several is None for _, several in others)
    assert n_steps <= n_alone < len(others) < 2 * n_steps


def test_pictures_are_of_this_machine():
    row = dict(shape='S', server='ours', weights='int8', tok_per_s=9.0, ttft_ms=[1.0, None], clients=4, case='50%')
    other = dict(row, shape='M', server='llama-server', weights='float32', clients=16)
    parts = {'closed': [row, other], 'prefix': [row], 'soak': []}
    figures = {part: dict(machine='here', rows=rows) for part, rows in parts.items()}
    closed_S, closed_M, prefix_S, prefix_M = serve.picture(figures, 'here')['panels']
    assert (closed_S.title, closed_M.title, prefix_S.title, prefix_M) == ('S: closed', 'M: closed', 'S: prefix', None)
    assert len(prefix_S.bars) == 2 and not serve.picture(figures, 'elsewhere')


def test_serve_mode(repo):
    done = run(repo, 'bench.py', '--mode=serve', '--only=engine_alone,draws', '--shape=S', '--batches=2',
               '--repeats=1', '--json=b.json')
    assert done.returncode == 0 and 'not compared: llama-server' in done.stdout, done.stderr
    parts = json.loads((repo / 'b.json').read_text())
    assert [row['case'] for row in parts['draws']['rows']] == ['greedy', 'temperature 1', 'top_k 200', 'top_p 0.9']
    figures = parts['engine_alone']
    assert [row['weights'] for row in figures['rows']] == ['float32', 'int8'] and 'llama-server' in figures['missing']
