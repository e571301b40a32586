"""bench.py and the scripts of benchmarks/ run, count correctly and write their files. The speeds are not tested."""
import json
import math
import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run, sizes

import bench
from benchmarks import rounds
from benchmarks.caches import joining, kinds, rolling
from benchmarks.generate import fed_tokens
from benchmarks.peers import race, report
from benchmarks.peers.llamacpp import LlamaCpp
from benchmarks.shapes import model_with_varied_text
from decode.kernel.threads import n_cores
from kvcache import make_cache
from model import GPT, GPTConfig


def test_positions_computed():
    assert fed_tokens(1, 128, True) == fed_tokens(1, 128, False) == 6
    assert fed_tokens(3, 128, False) == 6 + 7 + 8 and fed_tokens(3, 128, True) == 6 + 1 + 1
    assert fed_tokens(200, 128, False) == sum(range(6, 128)) + 78 * 128
    assert fed_tokens(200, 128, True) == 6 + 122 + 77 * 128
    assert round(fed_tokens(200, 128, False) / fed_tokens(200, 128, True), 2) == 1.81


def test_generate_mode(repo):
    batches = sizes((1,), (1, 2))
    done = run(repo, 'bench.py', '--mode=generate', '--device=cpu', '--lengths=3,130', '--repeats=1',
               f"--batches={','.join(map(str, batches))}", '--json=b.json', '--png=b.png')
    assert done.returncode == 0, done.stderr
    rows = json.loads((repo / 'b.json').read_text())['rows']
    assert [(row['samples'], row['new_tokens']) for row in rows] == [(batch, n) for batch in batches for n in (3, 130)]
    assert not any(row['differing'] for row in rows)
    ways = ['no cache', 'cache', 'eager', 'decoder']
    assert [list(row['speedup']) for row in rows[:2]] == [ways, [*ways, 'shift']]
    paged = run(repo, 'bench.py', '--mode=generate', '--device=cpu', '--lengths=5', '--batches=2', '--repeats=1',
                '--png=', '--json=c.json', '--kv_cache=paged')
    assert paged.returncode == 0 and 'paged' in paged.stdout, paged.stderr
    row, = json.loads((repo / 'c.json').read_text())['rows']
    assert list(row['speedup']) == [*ways, 'paged'] and not row['differing']
    assert all(len(runs) == 1 for row in rows for runs in row['runs_s'].values())
    assert rows[0]['cache_bytes'] == 4 * 2 * 128 * 128 * 4
    assert (repo / 'b.png').read_bytes().startswith(b'\x89PNG') and 'identical' in done.stdout


@pytest.mark.parametrize('script, pictures', [('figures/draw_caches.py', ['cells.png', 'blocks.png']),
                                              ('figures/draw_masks.py', ['masks.png']), ('house.py', ['house.png'])])
def test_the_pictures_of_the_documentation_are_drawn(repo, script, pictures):
    figures = repo / 'benchmarks' / 'figures'
    for name in pictures:
        (figures / name).unlink(missing_ok=True)
    done = run(repo, 'benchmarks/' + script)
    assert done.returncode == 0, done.stderr
    assert all((figures / name).read_bytes().startswith(b'\x89PNG') for name in pictures)


def test_two_trees_are_timed_in_turns(repo):
    done = run(repo, 'benchmarks/old_and_new.py', f'--old={ROOT}', '--only=cached steps', '--rounds=3', '--json=b.json')
    assert done.returncode == 0 and 'new / old' in done.stdout, done.stderr
    times, = json.loads((repo / 'b.json').read_text()).values()
    assert len(times['old']) == len(times['new']) == 2
    for old in ('nowhere', '', '--help'):
        wrong = run(repo, 'benchmarks/old_and_new.py', f'--old={old}')
        assert wrong.returncode == 2 and f"not {old!r}" in wrong.stderr


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


def test_a_choice_of_threads_is_compared_beside_neighbours(repo):
    done = run(repo, 'benchmarks/busy.py', '--shape=S', '--batches=1', '--neighbours=0,1', '--runs=2', '--seconds=0.01',
               '--json=b.json')
    assert done.returncode == 0 and 'chosen / best' in done.stdout, done.stderr
    quiet, busy = json.loads((repo / 'b.json').read_text())['rows']
    assert (quiet['neighbours'], busy['neighbours']) == (0, 1) and quiet['threads'].keys() >= {'1'}
    assert busy['fair_share'] == quiet['median'] * n_cores() / (n_cores() + 1)
    for row in (quiet, busy):
        assert row['chosen_of_best'] == row['median'] / max(row['threads'].values())
        assert ('loses' in done.stdout) or row['chosen_of_best'] >= 0.95


def test_train_mode_on_real_and_on_random_tokens(repo):
    real = run(repo, 'bench.py', '--device=cpu', '--repeats=1', '--batch_size=2', '--profile=True')
    assert real.returncode == 0 and 'ms an iteration' in real.stdout, real.stderr
    assert (repo / 'out-bench' / 'trace').is_dir()
    random = run(repo, 'bench.py', '--device=cpu', '--repeats=1', '--batch_size=2', '--real_data=False',
                 '--block_size=16')
    assert 'random tokens' in random.stdout


def test_peers_mode(tmp_path):
    only = sizes('decoding,prefill', 'decoding,prefill,long_context')
    # not a copy of the script: the compiled decode step is on disk beside the original
    done = run(tmp_path, os.path.join(ROOT, 'bench.py'), '--mode=peers', '--shape=S', '--batches=1,3', '--lengths=8',
               '--repeats=2', '--max_seconds=0.02', '--json=b.json', '--png=b.png',
               f'--only={only}')
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / 'b.json').read_text())
    figures, rows = parts['decoding'], parts['decoding']['rows']
    assert {'torch', 'python'} <= set(figures['versions']) and {row['repeats'] for row in rows} == {2}
    named = {(row['batch'], row['engine'], row['weights']) for row in rows}
    assert len(named) == len(rows)
    for engine in race.OURS + race.PEERS:
        why = engine.missing()
        assert figures['missing'].get(engine.name, '') == why and engine.name in done.stdout
        assert all(((B, engine.name, weights) in named) == (not why) for B in (1, 3) for weights in engine.ways)
    for row in rows:
        assert row['tok_per_s'] > 0 and row['of_floor'] > 0 and len(row['runs_s']) == 2 and 1 <= row['new_tokens'] <= 8
        near = row['first_difference'] is None or abs(row['gap']) < report.NEAR_TIE
        assert near or not row['should_be_ours'], row
    assert (tmp_path / 'b.png').read_bytes().startswith(b'\x89PNG') and 'S, batch 3' in done.stdout
    prefills = parts['prefill']['rows']
    assert {(row['batch'], row['engine'], row['weights']) for row in prefills} == {
        (B, engine, weights) for B, engine, weights in named if engine != 'no cache'}
    assert all(row['new_tokens'] == 1 and row['prompt'] == 8 for row in prefills)
    assert 'the first token of 3 prompts of 8' in done.stdout
    if 'long_context' in only:
        caches = {(row['engine'], row['type_kv']) for row in parts['long_context']['rows']}
        assert {('pages', kind) for kind in ('float32', 'bfloat16', 'int8')} <= caches
        assert LlamaCpp.missing() or {('llama.cpp', kind) for kind in ('float32', 'float16', 'q8_0')} <= caches


def test_the_floor_of_a_prefill_has_one_row_of_logits():
    model = GPT(GPTConfig(block_size=16, vocab_size=11, n_layer=1, n_head=2, n_embd=16, bias=False)).eval()
    matrices, head = 12 * 16 * 16 + 3 * 16, 11 * 16  # with the weights of the layer norms
    assert race.floor(model, 'float32', 5, 1, math.inf, 1.0) == 2 * (5 * matrices + head)
    assert race.floor(model, 'bfloat16', 5, 1, 1.0, math.inf) == 2 * (matrices + head)


def test_the_slower_way_to_run_an_engine_is_left_out(monkeypatch):
    now, asked = 0.0, []
    monkeypatch.setattr(race.time, 'perf_counter', lambda: now)
    monkeypatch.setattr(race.torch, 'get_num_threads', lambda: 3)

    class Engine:
        ways = {'float32': [dict(by='row'), dict(by='block')]}

        def __init__(self, model, weights, threads, by):
            self.cost = {(1, 'row'): 9.0, (3, 'row'): 1.2, (1, 'block'): 1.0, (3, 'block'): 2.0}[threads, by]

        def generate(self, prompts, n):
            nonlocal now
            now += self.cost * n
            asked.append(self.cost)
    (engine, how), = race.choose('', [(Engine, 'float32')], None, [torch.zeros(1, 40)], 4, 1.0)[0].values()
    assert engine.cost == 1.0 and how == '1 thread, by block'
    assert asked.count(1.0) > 10 and asked.count(1.2) > 10 and asked.count(2.0) == asked.count(9.0) < 5


def test_a_difference_is_found_and_judged():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=11, n_layer=1, n_head=2, n_embd=16)).eval()
    prompts = torch.randint(11, (3, 4))
    ours = model.generate(prompts, 12, temperature=0)[:, 4:]
    assert race.compare(model, prompts, ours) == dict(compared=12, first_difference=None, gap=None)
    theirs = ours.clone()
    theirs[0, 6], theirs[2, 3] = (ours[0, 6] + 1) % 11, (ours[2, 3] + 1) % 11
    found = race.compare(model, prompts, theirs)
    logits = model(torch.cat([prompts[2], ours[2, :3]])[None])[0][0, -1]
    assert (found['compared'], found['first_difference']) == (12, 3)
    assert abs(found['gap'] - (logits[ours[2, 3]] - logits[theirs[2, 3]]).item()) < 1e-6 and found['gap'] > 0
    verdict = lambda **row: report.verdict(found | dict(should_be_ours=True) | row)  # noqa: E731
    assert verdict(first_difference=None) == 'the same 12'
    assert verdict(should_be_ours=False) == 'the same 3, then others'
    assert verdict(gap=3e-6).startswith('near tie at 3') and verdict(gap=0.1).startswith('DIFFERENT at 3')


def test_a_trial_stops_when_it_took_long_enough(monkeypatch):
    now = 0.0
    monkeypatch.setattr(race.time, 'perf_counter', lambda: now)

    class Slow:
        def generate(self, prompts, n):
            nonlocal now
            asked.append(n)
            now += 0.01 * n
    asked = []
    assert race.trial(Slow(), None, 100, 0.1)[0] == 16 and asked == [2, 4, 8, 16, 16]
    asked = []
    assert race.trial(Slow(), None, 6, 1.0)[0] == 6 and asked == [2, 4, 6, 6, 6]


def test_memory_mode(repo):
    done = run(repo, 'bench.py', '--mode=memory', '--device=cpu', '--shape=S', '--batches=3', '--lengths=10',
               '--json=b.json')
    assert done.returncode == 0, done.stderr
    rows = json.loads((repo / 'b.json').read_text())['rows']
    assert [(row['batch'], row['use_cache']) for row in rows] == [(3, False), (3, True)]
    for row in rows:
        assert row['cache'] == row['formula'] == row['use_cache'] * row['batch'] * 2 * 4 * 128 * 128 * 4
        assert row['peak'] > 0.75 * row['cache']  # some pages of it may have been resident before


def test_parts_and_shapes_that_are_not_run_stay_in_the_file(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, 'json', str(tmp_path / 'b.json'))

    def measured(part, shape, speed, auto='SML', **more):
        """Run one part, whose own shapes are `auto`; {part: [(shape, speed, repeats) of each row]} of the file."""
        run = SimpleNamespace(run=lambda names, speed: [dict(shape=name, speed=speed) for name in names or auto])
        monkeypatch.setattr(bench, 'parts', lambda: {part: run})
        monkeypatch.setattr(bench, 'shape', shape)
        figures = bench.run_parts(more, speed)
        assert figures == json.loads((tmp_path / 'b.json').read_text())
        return {part: [tuple(row.values()) for row in of_part['rows']] for part, of_part in figures.items()}
    whole = measured('steps', 'auto', 1)
    assert whole == {'steps': [('S', 1, 5), ('M', 1, 5), ('L', 1, 5)]}
    monkeypatch.setattr(bench, 'repeats', 3)
    assert measured('steps', 'M', 2) == {'steps': [('S', 1, 5), ('M', 2, 3), ('L', 1, 5)]}
    assert measured('steps', 'auto', 3, 'SM') == {'steps': [('S', 3, 3), ('M', 3, 3), ('L', 1, 5)]}
    assert measured('closed', 'L', 4, bias=False)['steps'] == [('S', 3, 3), ('M', 3, 3), ('L', 1, 5)]
    assert measured('closed', 'S', 4, bias=False)['closed'] == [('S', 4, 3), ('L', 4, 3)]
    assert measured('closed', 'M', 5, bias=True)['closed'] == [('M', 5, 3)], "the others were without biases"


def test_requests_and_what_they_share(repo):
    (repo / 'b.json').write_text(json.dumps(dict(steps=dict(rows=[1]), sharing=dict(rows=[2]))))
    done = run(repo, 'bench.py', '--mode=caches', '--only=requests,sharing', '--shape=S', '--repeats=1',
               '--json=b.json')
    assert done.returncode == 0, done.stderr
    figures = json.loads((repo / 'b.json').read_text())
    assert figures['steps'] == dict(rows=[1])  # of a part that was not run
    rows = figures['requests']['rows']
    assert len(rows) == 4 * 3 + 1 and all(row['same_tokens'] and len(row['prompts']) == 8 for row in rows)
    shared, = figures['sharing']['rows']
    held = 6 + 10  # blocks of 16: the full ones of the prompt, and one a sample with the rest of it and a new token
    block_bytes = 16 * 4 * 2 * 128 * 4
    assert shared['bytes_held'] == held * block_bytes and shared['bytes_unshared'] == 10 * 7 * block_bytes
    assert shared['second_prompt'] == 105 and shared['computed'] == 105 - 6 * 16


def test_caches_mode(repo):
    parts = sizes('steps,joining,rolling,kinds', 'steps,joining,kv_types,rolling,kinds')
    done = run(repo, 'bench.py', '--mode=caches', f'--only={parts}', '--shape=S', '--batches=2', '--lengths=40',
               '--repeats=1', '--json=b.json')
    assert done.returncode == 0, done.stderr
    figures = {part: each['rows'] for part, each in json.loads((repo / 'b.json').read_text()).items()}
    assert [row['cache'] for row in figures['steps']] == ['tuples', 'generation', 'paged', 'unified', 'streams',
                                                          'contiguous', 'paged, one call']
    assert all(row['difference'] < 1e-4 and (row['batch'], row['context']) == (2, 40) for row in figures['steps'])
    joining, = figures['joining']
    assert joining['same_tokens'] and joining['speedup'] > 0
    if 'kv_types' in parts:
        float32, bfloat16, int8 = figures['kv_types']
        # an int8 matmul rounds its inputs, so a small change of an input can change the integer that it becomes
        assert float32['difference'] == 0 < bfloat16['difference'] < 0.05 and 0 < int8['difference'] < 0.05
    kernel = {row['cache']: row['same_bits'] for row in figures['steps'] if row['on'] == 'kernel'}
    assert len(kernel) == 7 and all(kernel.values())
    assert len(figures['rolling']) == 5 and not any(row['gap'] and row['gap'] > 1e-4 for row in figures['rolling'])
    assert [row['kind'] for row in figures['kinds']] == list(kinds.KINDS)


def test_ways_take_turns():
    calls = []

    def way(name, seconds):
        return lambda n: calls.append((n, name)) or seconds[n]
    seconds = rounds.take_turns(dict(a=way('a', [99, 2, 6, 4]), b=way('b', [99, 1, 2, 4])), 3, '')
    assert seconds == dict(a=[2, 6, 4], b=[1, 2, 4]) and rounds.ratio(seconds, 'a', 'b') == 2
    assert [name for _, name in calls] == ['b', 'a', 'a', 'b', 'b', 'a', 'a', 'b']
    assert 'MISSED' in rounds.line(7.9, 8.0) and 'MISSED' not in rounds.line(8.1, 8.0) + rounds.line(5.0, None)
    assert 'MISSED' in rounds.line(1.11, 1.1, at_most=True) and 'MISSED' not in rounds.line(1.1, 1.1, at_most=True)


def test_sequences_that_join_and_leave_have_the_texts_that_they_have_alone():
    torch.manual_seed(0)
    model = model_with_varied_text(GPTConfig(block_size=40, vocab_size=11, n_layer=1, n_head=2, n_embd=16))
    prompts = [torch.randint(11, (n,)) for n in (3, 9, 1, 5, 20, 7, 2, 6)]
    cache = make_cache(model, 'paged', 3)
    _, texts = joining.serve(cache, prompts, 3, 18)
    # three begin together and end after 4, 8 and 12 more steps, the next ones 12 steps after they are first fed
    assert [len(text) for text in texts] == [5, 9, 13, 12, 10, 6, 2] and not cache.lengths
    for prompt, text in zip(prompts, texts):
        assert model.generate(prompt[None], len(text), temperature=0)[0, len(prompt):].tolist() == text


def test_the_first_other_token_is_judged():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=11, n_layer=1, n_head=2, n_embd=16)).eval()
    exact = model.generate(torch.randint(11, (3, 4)), 12, temperature=0)
    assert rolling.gap_of(model, exact, exact) is None
    other = exact.clone()
    other[1, 7], other[0, 9] = (exact[1, 7] + 1) % 11, (exact[0, 9] + 1) % 11
    logits = model(exact[1:2, :7])[0][0, -1]
    assert abs(rolling.gap_of(model, other, exact) - (logits.max() - logits[other[1, 7]]).item()) < 1e-6


def test_settings_that_make_no_sense_end_in_one_line(repo):
    for wrong, said in (('--batches=1,zero', 'batches must be positive numbers'), ('--max_seconds=0.0', 'max_seconds'),
                        ('--dtype=bfloat16', 'CPU'), ('--lengths=500', 'do not fit into block_size 128')):
        done = run(repo, 'bench.py', '--mode=peers', '--shape=S', wrong)
        assert done.returncode == 2 and said in done.stderr.splitlines()[-1], done.stderr
    for wrong, said in ((['--mode=caches', '--only=steps,none'], "not 'steps,none'"),
                        (['--mode=caches', '--only=steps', '--shape=S', '--lengths=126'], 'a context of 126 leaves no'),
                        (['--mode=loss', '--only=steps'], 'leave --only=steps out')):
        done = run(repo, 'bench.py', *wrong)
        assert done.returncode == 2 and said in done.stderr.splitlines()[-1], done.stderr


def test_loss_mode(trained, tmp_path):
    done = run(trained, 'bench.py', '--mode=loss', f'--json={tmp_path}/loss.json', f'--png={tmp_path}/loss.png')
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / 'loss.json').read_text())
    rows = figures['rows']
    rounded = [('bfloat16', 0), ('int8', 0), ('float32', 8), ('float32', 4)]
    assert [(row['weights'], row['kv_bits']) for row in rows] == [('float32', 0)] * 4 + rounded
    assert [row['kv_bytes_a_token'] for row in rows[-3:]] == [2 * 2 * 16 * 4, 2 * 2 * (16 + 2 * 4), 2 * 2 * (8 + 2 * 4)]
    assert len(figures['by_context']) == 16
    assert rows[0]['difference'] == 0 and rows[0]['mean_context'] == 16 and 11.5 < rows[1]['mean_context'] < 12.5
    assert all(abs(row['difference']) < 0.1 for row in rows)
    assert (tmp_path / 'loss.png').read_bytes().startswith(b'\x89PNG')


def test_pictures_go_to_a_folder_and_the_time_is_told_before(repo):
    before = set(os.listdir(repo))
    done = run(repo, 'bench.py', '--mode=generate', '--device=cpu', '--lengths=2', '--repeats=1')
    assert done.returncode == 0 and 'expected time' in done.stderr, done.stderr
    assert set(os.listdir(repo)) - before == {'out-bench'} and os.listdir(repo / 'out-bench') == ['speedup.png']
    assert 'out-bench/speedup.png' in done.stdout
