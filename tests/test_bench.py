"""bench.py runs, counts correctly and writes its file. The speeds are not tested."""
import json
import os
from types import SimpleNamespace

import pytest
import torch
from conftest import run

import decode
from benchmarks import gpu, harness, loss, ours
from benchmarks.generate import counted
from benchmarks.harness import Case, Part, take_turns
from benchmarks.shapes import model_with_varied_text
from model import GPT, GPTConfig
from tokenizer import CharTokenizer


def bench(folder, *settings):
    """What bench.py has written to its JSON file."""
    done = run(folder, 'bench.py', '--device=cpu', '--repeats=1', '--json=b.json', *settings, code=0)
    assert 'expected time' in done.stderr
    return json.loads((folder / 'b.json').read_text())


def test_cases_take_turns_and_medians_count(monkeypatch):
    now, calls = 0.0, []
    monkeypatch.setattr(harness.time, 'perf_counter', lambda: now)
    monkeypatch.setattr(harness.time, 'sleep', lambda seconds: None)

    def case(name, seconds):
        def setup(n):
            nonlocal now
            now += 1000  # is not timed
            calls.append((n, name))
            return n

        def step(n):
            nonlocal now
            now += seconds[n]
            return name, n
        return Case(dict(name=name), step, setup, per=2)
    a, b = take_turns([case('a', [99, 2, 6, 4]), case('b', [99, 1, 2, 4])], 3, '')
    rounds = [calls[i:i + 2] for i in range(0, 8, 2)]
    firsts = [r[0][1] for r in rounds]
    assert [sorted(r) for r in rounds] == [[(n, 'a'), (n, 'b')] for n in range(4)]
    assert {*firsts[1:3]} == {'a', 'b'}, "the second round has the order of the first one reversed"
    assert (a.runs, b.runs, a.seconds, b.seconds) == ([1, 3, 2], [0.5, 1, 2], 2, 1)
    assert a.over(b) == 2 and b.over(a) == 0.5, "the median of 2, 3 and 1"
    assert a.results == [('a', 1), ('a', 2), ('a', 3)]
    assert a.row(x=1) == dict(name='a', x=1, runs_s=[1, 3, 2])


def test_parts_and_shapes_that_are_not_run_stay_in_the_file(tmp_path):
    path = str(tmp_path / 'folder' / 'b.json')

    def measured(name, shapes, speed, repeats=5, **more):
        """Run one part on these shapes; {part: [(shape, speed, repeats) of each row]} of the file."""
        def rows(asked):
            yield from ([dict(shape=shape, speed=speed)] for shape in shapes)
        asked = SimpleNamespace(device='cpu', json=path, repeats=repeats)
        harness.run_parts(asked, {name: Part(rows, 1, name, 'shape speed')}, **more)
        figures = harness.read_json(path)
        assert all(of_part['machine'] == harness.describe_machine('cpu') for of_part in figures.values())
        return {part: [(row['shape'], row['speed'], row['repeats']) for row in of_part['rows'] if row['date']]
                for part, of_part in figures.items()}
    assert measured('steps', 'SML', 1) == {'steps': [('S', 1, 5), ('M', 1, 5), ('L', 1, 5)]}
    assert measured('steps', 'M', 2, repeats=3) == {'steps': [('S', 1, 5), ('L', 1, 5), ('M', 2, 3)]}
    assert measured('clients', 'L', 4, bias=False)['steps'] == [('S', 1, 5), ('L', 1, 5), ('M', 2, 3)]
    assert measured('clients', 'S', 4, bias=False)['clients'] == [('L', 4, 5), ('S', 4, 5)]
    assert measured('clients', 'M', 5, bias=True)['clients'] == [('M', 5, 5)], "the others were without biases"


def test_positions_computed():
    assert counted(1, 128) == 1 and counted(3, 128) == (6 + 7 + 8) / (6 + 1 + 1)
    assert counted(200, 128) == (sum(range(6, 128)) + 78 * 128) / (6 + 122 + 77 * 128) == 18_097 / 9_984


def test_generate_mode_is_the_default(repo):
    before = set(os.listdir(repo))
    rows, ways = bench(repo, '--lengths=3,130', '--batches=2')['lengths']['rows'], ['no cache', 'cache', 'ours']
    assert [(row['new_tokens'], row['way']) for row in rows] == [
        *((3, way) for way in ways), *((130, way) for way in [*ways, 'shift'])]
    assert {row['same_tokens'] for row in rows if row['way'] != 'shift'} == {True}
    assert {row['samples'] for row in rows} == {2} and rows[0]['speedup'] == 1
    assert all(len(row['runs_s']) == 1 for row in rows)
    assert set(os.listdir(repo)) - before == {'b.json'}


def test_train_mode_on_real_and_on_random_tokens(repo):
    real, = bench(repo, '--mode=train', '--batch_size=2')['train']['rows']
    random, = bench(repo, '--mode=train', '--batch_size=2', '--real_data=False', '--block_size=16')['train']['rows']
    assert (real['data'], random['data']) == ('data/shakespeare_char', 'random tokens')
    assert random['block_size'] == 16 and random['loss'] < 6 and real['tok_per_s'] > 0


def test_loss_mode(trained, tmp_path):
    (tmp_path / 'my.txt').write_text('the text of a class ' * 20)
    run(trained, 'bench.py', '--mode=loss', f'--text={tmp_path}/my.txt', f'--json={tmp_path}/loss.json', code=0)
    rows = json.loads((tmp_path / 'loss.json').read_text())['bits']['rows']
    assert [(row['weights'], row['kv']) for row in rows if row['engine'] == 'ours'][:5] == [
        *((weights, 'float32') for weights in decode.WEIGHTS), ('float32', 'int8')]
    assert rows[0]['difference'] == 0 and all(abs(row['difference']) < 0.1 for row in rows)


def test_loss_mode_needs_two_pieces_of_text(monkeypatch, tmp_path):
    tokenizer, config = CharTokenizer('abc'), GPTConfig(block_size=8, vocab_size=9, n_layer=1, n_head=1, n_embd=16)
    monkeypatch.setattr(loss, 'trained', lambda init_from: (GPT(config).eval(), tokenizer))
    asked = SimpleNamespace(init_from='out', text=f'{tmp_path}/a.txt')
    (tmp_path / 'a.txt').write_text('abca' * 4)
    with pytest.raises(ValueError, match='the text has 16 tokens, and two pieces take 17'):
        next(loss.bits(asked))
    (tmp_path / 'a.txt').write_text('abca' * 4 + 'b')
    row, *_ = next(loss.bits(asked))
    assert row['model'] == 'out' and row['tokens'] == 16


def test_gpu_mode_with_the_same_step_in_pytorch_on_a_cpu(monkeypatch):
    pytest.importorskip('pydantic')
    import plain_gpu

    from decode.gpu.executor import GPUExecutor
    torch.manual_seed(0)
    model = model_with_varied_text(GPTConfig(block_size=40, vocab_size=11, n_layer=1, n_head=2, n_embd=16))
    monkeypatch.setattr(gpu, 'model_of', lambda name, bias: model)
    monkeypatch.setattr(gpu, 'gpu_executor', lambda model, as_they_come=False: GPUExecutor(
        model, plain_gpu, plain_gpu.Direct()))
    monkeypatch.setattr(gpu, 'compiled_on_gpu', lambda model, B, n_new: lambda: None)
    monkeypatch.setattr(gpu, 'BATCHES', (1, 3))
    asked = SimpleNamespace(shapes=['M'], batches=None, bias=False, device='cpu', dtype='float32', repeats=1)
    one, three = gpu.engine(asked)
    steps = ['gpu', 'gpu, rows as they come'] + ['transformers'] * (not gpu.HuggingFace.missing())
    assert [[row['step'] for row in rows] for rows in (one, three)] == [[*steps, 'eager'], steps]
    assert {row['batch'] for row in three} == {3} and one[0]['over_gpu'] == 1
    for row in one + three:  # a text holds 16 to 36 keys of 16 numbers: 26 on average
        n_weights, n_keys = 12 * 16**2 + 9 * 16 + 11 * 16, 26 * row['batch']
        assert row['gb_per_s'] * row['us'] * 1e3 == pytest.approx(4 * (n_weights + n_keys * 2 * 16), rel=1e-6)
    served = ours.served(model, GPUExecutor(model, plain_gpu, plain_gpu.Direct()), 3, 5, 7)
    assert served() == served() == 3 * 7, "tokens of a round"
    ours.first_answer('S', 'cpu', 'float32')
