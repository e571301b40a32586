"""bench.py runs, counts what it claims to count, and writes its files. How fast it finds things is not tested."""
import json

from conftest import run

from bench import fed_tokens


def test_positions_computed():
    assert fed_tokens(1, 128, True) == fed_tokens(1, 128, False) == 6
    assert fed_tokens(3, 128, False) == 6 + 7 + 8 and fed_tokens(3, 128, True) == 6 + 1 + 1
    assert fed_tokens(200, 128, False) == sum(range(6, 128)) + 78 * 128
    assert fed_tokens(200, 128, True) == 6 + 122 + 77 * 128
    assert round(fed_tokens(200, 128, False) / fed_tokens(200, 128, True), 2) == 1.81


def test_generate_mode(repo):
    done = run(repo, 'bench.py', '--mode=generate', '--device=cpu', '--lengths=3,130', '--repeats=1', '--json=b.json', '--png=b.png')
    assert done.returncode == 0, done.stderr
    rows = json.loads((repo / 'b.json').read_text())['rows']
    assert [row['new_tokens'] for row in rows] == [3, 130] and all(row['identical'] for row in rows)
    assert rows[0]['cache_bytes_per_layer'] == 2 * 128 * 128 * 4 and rows[0]['cache_bytes'] == 4 * 2 * 128 * 128 * 4
    assert (repo / 'b.png').read_bytes().startswith(b'\x89PNG') and 'identical' in done.stdout


def test_train_mode_on_real_and_on_random_tokens(repo):
    real = run(repo, 'bench.py', '--device=cpu', '--repeats=1', '--batch_size=2', '--profile=True')
    assert real.returncode == 0 and ('ms an iteration' in real.stdout) and (repo / 'bench_log').is_dir(), real.stderr
    random = run(repo, 'bench.py', '--device=cpu', '--repeats=1', '--batch_size=2', '--real_data=False', '--block_size=16')
    assert 'random tokens' in random.stdout
