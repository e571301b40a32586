"""bench.py and the scripts of benchmarks/ run, count correctly and write their files. The speeds are not tested."""
import json
import math
import os
import shutil
import subprocess

import pytest
import torch
from conftest import ROOT, run, sizes

from benchmarks import caches, harness
from benchmarks.generate import fed_tokens
from benchmarks.harness import Asked, Case, Panel, Part, take_turns
from benchmarks.shapes import model_with_varied_text
from decode.kernel.threads import n_cores
from kvcache import make_cache
from model import GPTConfig


def bench(folder, *settings):
    """bench.py with a JSON file: (what it has written there, what it has printed)."""
    done = run(folder, 'bench.py', '--device=cpu', '--repeats=1', '--json=b.json', *settings)
    assert done.returncode == 0, done.stderr
    assert 'expected time' in done.stderr
    return json.loads((folder / 'b.json').read_text()), done.stdout


def is_png(path):
    return path.read_bytes().startswith(b'\x89PNG')


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
    assert calls == [(0, 'b'), (0, 'a'), (1, 'a'), (1, 'b'), (2, 'b'), (2, 'a'), (3, 'a'), (3, 'b')]
    assert (a.runs, b.runs, a.seconds, b.seconds) == ([1, 3, 2], [0.5, 1, 2], 2, 1)
    assert a.over(b) == 2 and b.over(a) == 0.5, "the median of 2, 3 and 1"
    assert a.results == [('a', 1), ('a', 2), ('a', 3)] and a.result == ('a', 3)
    assert a.row(x=1) == dict(name='a', x=1, runs_s=[1, 3, 2])
    calls.clear()
    repeated, = take_turns([case('c', [1, 1])], 1, '', least=3)
    assert repeated.runs == [0.5] and calls == [(0, 'c')] * 3 + [(1, 'c')] * 3, "the mean of three"


def test_a_table_has_the_figures_that_there_are():
    rows = [dict(shape='S', step_s=0.00125, over_a=1.234, n=1200, same=True, tok_per_s=dict(a=5.0)),
            dict(shape='M', step_s=1.5, over_a=None, n=7, same=False, tok_per_s=dict(a=1234.5))]
    assert harness.table(rows, 'shape n step_s over_a same missing tok_per_s').splitlines() == [
        'shape      n        step_s  over_a  same      a',
        'S      1,200      1.250 ms  1.234x  yes       5',
        'M          7  1,500.000 ms          NO    1,234']


def test_parts_and_shapes_that_are_not_run_stay_in_the_file(tmp_path):
    path = str(tmp_path / 'b.json')

    def measured(name, shapes, speed, auto='SML', repeats=5, **more):
        """Run one part, whose own shapes are `auto`; {part: [(shape, speed, repeats) of each row]} of the file."""
        def rows(asked):
            yield from ([dict(shape=shape, speed=speed)] for shape, *_ in asked.combinations(auto))
        asked = Asked('cpu', 'float32', shapes and list(shapes), None, None, None, dict(json=path, repeats=repeats))
        figures = harness.run_parts(asked, {name: Part(rows, 1, name, 'shape speed')}, **more)
        assert figures == harness.read_json(path)
        return {part: [tuple(row.values()) for row in of_part['rows']] for part, of_part in figures.items()}
    assert measured('steps', '', 1) == {'steps': [('S', 1, 5), ('M', 1, 5), ('L', 1, 5)]}
    assert measured('steps', 'M', 2, repeats=3) == {'steps': [('S', 1, 5), ('M', 2, 3), ('L', 1, 5)]}
    assert measured('steps', '', 3, 'SM') == {'steps': [('S', 3, 5), ('M', 3, 5), ('L', 1, 5)]}
    assert measured('closed', 'L', 4, bias=False)['steps'] == [('S', 3, 5), ('M', 3, 5), ('L', 1, 5)]
    assert measured('closed', 'S', 4, bias=False)['closed'] == [('S', 4, 5), ('L', 4, 5)]
    assert measured('closed', 'M', 5, bias=True)['closed'] == [('M', 5, 5)], "the others were without biases"


def test_panels_of_all_kinds_are_drawn(tmp_path):
    lines = [([1, 10], [2, 30], 'a line', dict(ls='--'))]
    harness.draw([Panel('lines', lines, axes=dict(xscale='log'), marks={3: 'here'}), None,
                  Panel('bars', bars=[('a', 1.0, 'one', 'C0'), ('', 2.0, 'two', '0.5')]),
                  Panel('an image', image={'a': [0, 1], 'b': [1, 0.5]})], tmp_path / 'a.png', columns=2, title='all')
    assert is_png(tmp_path / 'a.png')


def test_positions_computed():
    assert fed_tokens(1, 128, True) == fed_tokens(1, 128, False) == 6
    assert fed_tokens(3, 128, False) == 6 + 7 + 8 and fed_tokens(3, 128, True) == 6 + 1 + 1
    assert fed_tokens(200, 128, False) == sum(range(6, 128)) + 78 * 128
    assert fed_tokens(200, 128, True) == 6 + 122 + 77 * 128
    assert round(fed_tokens(200, 128, False) / fed_tokens(200, 128, True), 2) == 1.81


def test_generate_mode(repo):
    before = set(os.listdir(repo))
    figures, _ = bench(repo, '--mode=generate', '--lengths=3,130')
    rows, ways = figures['lengths']['rows'], ['no cache', 'cache', 'eager', 'decoder']
    assert [(row['samples'], row['new_tokens'], row['differing']) for row in rows] == [(1, 3, []), (1, 130, [])]
    assert [list(row['speedup']) for row in rows] == [ways, [*ways, 'shift']]
    assert all(len(runs) == 1 for row in rows for runs in row['runs_s'].values())
    assert rows[0]['cache_bytes'] == 4 * 2 * 128 * 128 * 4
    assert set(os.listdir(repo)) - before == {'out-bench', 'b.json'} and is_png(repo / 'out-bench' / 'speedup.png')
    figures, _ = bench(repo, '--mode=generate', '--lengths=5', '--batches=2', '--png=')
    row, = figures['lengths']['rows']
    assert list(row['speedup']) == ways and not row['differing']


def test_train_mode_on_real_and_on_random_tokens(repo):
    real, _ = bench(repo, '--batch_size=2', '--profile=True')
    random, _ = bench(repo, '--batch_size=2', '--real_data=False', '--block_size=16')
    (real,), (random,) = (figures['train']['rows'] for figures in (real, random))
    assert (real['data'], random['data']) == ('data/shakespeare_char', 'random tokens')
    assert random['block_size'] == 16 and (repo / 'out-bench' / 'trace').is_dir()


def test_memory_mode(repo):
    figures, _ = bench(repo, '--mode=memory', '--shape=S', '--batches=3', '--lengths=10')
    rows = figures['peaks']['rows']
    assert [(row['batch'], row['use_cache']) for row in rows] == [(3, False), (3, True)]
    for row in rows:
        assert row['cache'] == row['formula'] == row['use_cache'] * row['batch'] * 2 * 4 * 128 * 128 * 4
        assert row['peak'] > 0.75 * row['cache']  # some pages of it may have been resident before


def test_loss_mode(trained, tmp_path):
    done = run(trained, 'bench.py', '--mode=loss', f'--json={tmp_path}/loss.json', f'--png={tmp_path}/loss.png')
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / 'loss.json').read_text())
    rows = figures['policies']['rows']
    rounded = [('bfloat16', 0), ('int8', 0), ('int4', 0), ('float32', 8), ('float32', 4)]
    assert [(row['weights'], row['kv_bits']) for row in rows] == [('float32', 0)] * 4 + rounded
    assert [row['kv_bytes_a_token'] for row in rows[-3:]] == [2 * 2 * 16 * 4, 2 * 2 * (16 + 2 * 4), 2 * 2 * (8 + 2 * 4)]
    assert len(figures['by_context']['rows'][0]['nats']) == 16 and is_png(tmp_path / 'loss.png')
    assert rows[0]['difference'] == 0 and rows[0]['mean_context'] == 16 and 11.5 < rows[1]['mean_context'] < 12.5
    assert all(abs(row['difference']) < 0.1 for row in rows)
    of_weights = figures['weights']['rows']
    assert {row['model'] for row in of_weights} == {'out'} and [row['weights'] for row in of_weights][:4] == [
        'float32', 'bfloat16', 'int8', 'int4']


def test_drafts_mode(trained):
    figures, _ = bench(trained, '--mode=drafts', '--shape=S', '--lengths=20', '--repeats=1')
    shapes, trained_rows = figures['shapes']['rows'], figures['trained']['rows']
    assert len(shapes) == 2 * 9 and len(trained_rows) == 2 * 4
    assert all(row['same_tokens'] and row['tok_per_s'] > 0 for row in shapes + trained_rows)


def test_caches_mode(repo):
    figures, _ = bench(repo, '--mode=caches', '--shape=S', '--batches=2', '--lengths=40')
    steps, joining, requests, (shared,) = (figures[part]['rows'] for part in (
        'steps', 'joining', 'requests', 'sharing'))
    assert {row['cache'] for row in steps} == {'tuples', 'generation', 'paged', 'unified', 'streams', 'contiguous',
                                               'paged, one call'} and len(steps) == 7
    assert all(row['same_bits'] and row['on'] == 'kernel' and (row['batch'], row['context']) == (2, 40)
               for row in steps)
    assert [row['on'] for row in joining] == ['kernel', 'PyTorch'] and all(row['same_tokens'] for row in joining)
    assert len(requests) == 4 * 3 + 1 and all(row['same_tokens'] and len(row['prompts']) == 2 for row in requests)
    held = 6 + 2  # blocks of 16: the full ones of the prompt, and one a sample with the rest of it and a new token
    block_bytes = 16 * 4 * 2 * 128 * 4
    assert shared['bytes_held'] == held * block_bytes and shared['bytes_unshared'] == 2 * 7 * block_bytes
    assert shared['second_prompt'] == 105 and shared['computed'] == 105 - 6 * 16


def test_sequences_that_join_and_leave_have_the_texts_that_they_have_alone():
    torch.manual_seed(0)
    model = model_with_varied_text(GPTConfig(block_size=40, vocab_size=11, n_layer=1, n_head=2, n_embd=16))
    prompts = [torch.randint(11, (n,)) for n in (3, 9, 1, 5, 20, 7, 2, 6)]
    cache = make_cache(model, 'paged', 3)
    texts = caches.serve(cache, prompts, 3, 18)
    # the first three begin together and end after 4, 8 and 12 steps; each later one ends after 12
    assert [len(text) for text in texts] == [5, 9, 13, 12, 10, 6, 2] and not cache.records
    for prompt, text in zip(prompts, texts):
        assert model.generate(prompt[None], len(text), temperature=0)[0, len(prompt):].tolist() == text


def test_the_pictures_of_the_documentation_are_drawn(repo):
    figures = repo / 'benchmarks' / 'figures'
    done = run(repo, 'benchmarks/figures/draw.py')
    assert done.returncode == 0, done.stderr
    for name in ('masks', 'cells', 'blocks', 'step', 'house'):
        assert is_png(figures / f'{name}.png'), "a copy of the code has none"


def test_two_trees_are_timed_in_turns(repo):
    done = run(repo, 'benchmarks/old_and_new.py', f'--old={ROOT}', '--only=tuples', '--rounds=3', '--json=b.json')
    assert done.returncode == 0 and 'old_over_new' in done.stdout, done.stderr
    times, = json.loads((repo / 'b.json').read_text()).values()
    assert len(times['old']) == len(times['new']) == 2


def test_a_commit_is_unpacked(repo):
    git = ['git', '-C', repo, '-c', 'user.name=me', '-c', 'user.email=me@here']
    if shutil.which('git') is None:
        pytest.skip("git is not installed")
    (repo / 'notes').write_text('old')
    for command in (['init', '-q'], ['add', 'notes', 'model.py'], ['commit', '-q', '-m', 'old']):
        subprocess.run([*git, *command], check=True)
    (repo / 'notes').write_text('new')
    (repo / 'unpacked').mkdir()
    script = "import sys; from benchmarks import old_and_new as o; print(o.folder_of(*sys.argv[1:]))"
    done = run(repo, '-c', script, 'HEAD', 'unpacked')
    assert done.stdout == 'unpacked\n' and (repo / 'unpacked' / 'notes').read_text() == 'old', done.stderr
    assert run(repo, '-c', script, '.', 'nowhere').stdout == '.\n'


@pytest.mark.skipif(sizes(True, False), reason="keeps all cores busy: in make test-all")
def test_a_choice_of_threads_is_compared_beside_neighbours(repo):
    figures, _ = bench(repo, '--mode=busy', '--shape=S', '--batches=1')
    quiet, *_ = rows = figures['neighbours']['rows']
    assert [row['neighbours'] for row in rows] == [0, 1, 2] and quiet['threads'].keys() >= {'1'}
    for row in rows:
        assert math.isclose(row['fair_share'], quiet['median'] * n_cores() / (n_cores() + row['neighbours']))
        assert row['chosen_of_best'] == row['median'] / max(row['threads'].values()) and len(row['runs']) == 1
