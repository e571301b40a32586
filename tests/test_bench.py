"""bench.py and the scripts of benchmarks/ run, count correctly and write their files. The speeds are not tested."""
import json
import os

import pytest
import torch
from conftest import ROOT, run, sizes

from benchmarks.generate import fed_tokens
from benchmarks.peers import race, report
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
    wrong = run(repo, 'benchmarks/old_and_new.py', '--old=nowhere')
    assert wrong.returncode == 2 and "not 'nowhere'" in wrong.stderr


def test_train_mode_on_real_and_on_random_tokens(repo):
    real = run(repo, 'bench.py', '--device=cpu', '--repeats=1', '--batch_size=2', '--profile=True')
    assert real.returncode == 0 and 'ms an iteration' in real.stdout, real.stderr
    assert (repo / 'out-bench' / 'trace').is_dir()
    random = run(repo, 'bench.py', '--device=cpu', '--repeats=1', '--batch_size=2', '--real_data=False',
                 '--block_size=16')
    assert 'random tokens' in random.stdout


def test_peers_mode(tmp_path):
    # not a copy of the script: the compiled decode step is on disk beside the original
    done = run(tmp_path, os.path.join(ROOT, 'bench.py'), '--mode=peers', '--shape=S', '--batches=1,3', '--lengths=8',
               '--repeats=2', '--max_seconds=0.02', '--json=b.json', '--png=b.png')
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / 'b.json').read_text())
    assert {'torch', 'python'} <= set(figures['versions']) and figures['repeats'] == 2
    rows = figures['rows']
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
    done = run(repo, 'bench.py', '--mode=memory', '--device=cpu', '--shape=S', '--batches=1,3', '--lengths=10',
               '--json=b.json')
    assert done.returncode == 0, done.stderr
    rows = json.loads((repo / 'b.json').read_text())['rows']
    assert [(row['batch'], row['use_cache']) for row in rows] == [(1, False), (1, True), (3, False), (3, True)]
    for row in rows:
        assert row['cache'] == row['formula'] == row['use_cache'] * row['batch'] * 2 * 4 * 128 * 128 * 4
        assert row['peak'] > 0.9 * row['cache']  # resident memory is counted in pages, and not to the last one


def test_caches_mode(repo):
    done = run(repo, 'bench.py', '--mode=caches', '--shape=S', '--repeats=1', '--json=b.json')
    assert done.returncode == 0, done.stderr
    figures = json.loads((repo / 'b.json').read_text())
    assert len(figures['rows']) == 4 * 3 + 1
    assert all(row['same_tokens'] and len(row['prompts']) == 8 for row in figures['rows'])
    shared, = figures['sharing']
    held = 6 + 10  # blocks of 16: the full ones of the prompt, and one a sample with the rest of it and a new token
    block_bytes = 16 * 4 * 2 * 128 * 4
    assert shared['bytes_held'] == held * block_bytes and shared['bytes_unshared'] == 10 * 7 * block_bytes
    assert shared['second_prompt'] == 105 and shared['computed'] == 105 - 6 * 16


def test_settings_that_make_no_sense_end_in_one_line(repo):
    for wrong, said in (('--batches=1,zero', 'batches must be positive numbers'), ('--max_seconds=0.0', 'max_seconds'),
                        ('--dtype=bfloat16', 'CPU'), ('--lengths=500', 'do not fit into block_size 128')):
        done = run(repo, 'bench.py', '--mode=peers', '--shape=S', wrong)
        assert done.returncode == 2 and said in done.stderr.splitlines()[-1], done.stderr


def test_loss_mode(trained, tmp_path):
    done = run(trained, 'bench.py', '--mode=loss', f'--json={tmp_path}/loss.json', f'--png={tmp_path}/loss.png')
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / 'loss.json').read_text())
    rows = figures['rows']
    rounded = [('bfloat16', 0), ('int8', 0), ('float32', 8), ('float32', 4)]
    assert [(row['weights'], row['kv_bits']) for row in rows] == [('float32', 0)] * 4 + rounded
    assert [row['kv_bytes_a_token'] for row in rows[-3:]] == [2 * 2 * 16 * 4, 2 * 2 * (16 + 4), 2 * 2 * (8 + 4)]
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
