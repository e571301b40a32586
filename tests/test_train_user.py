"""train.py used in other ways: started twice, stopped early, resumed with other settings, without data or torch."""
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ENVIRONMENT, ROOT, TINY, run, start_training
from test_train import rows, stopped, wait_for_rows

import checkpoint as checkpoints

FOREVER = ('--max_iters=1000000', '--eval_interval=1000000')


@pytest.fixture
def finished(repo, trained):
    """A repository with a finished run of 20 iterations in out/."""
    (repo / 'out').mkdir()
    for name in ('ckpt.pt', 'log.csv'):
        (repo / 'out' / name).write_bytes((trained / 'out' / name).read_bytes())
    return repo


def test_what_the_checkpoint_decides_and_the_command_line_contradicts_is_said(finished):
    def resume(*settings):
        done = run(finished, 'train.py', *TINY, '--init_from=resume', *settings)
        assert done.returncode == 0, done.stderr
        return done.stdout, checkpoints.load(str(finished / 'out' / 'ckpt.pt'))
    out, _ = resume('--max_iters=30')
    assert 'stays' not in out and 'from here on' not in out
    out, saved = resume('--max_iters=31', '--n_layer=3', '--n_head=4', '--n_embd=32', '--bias=True',
                        '--weight_decay=0.3', '--beta1=0.8', '--beta2=0.95')
    for name, holds, given in (('n_layer', 2, 3), ('n_head', 2, 4), ('n_embd', 16, 32), ('bias', False, True)):
        assert out.count(f'{name} stays {holds}') == 1 and f'{name}={given} (command line) has no effect' in out
        assert saved['config'][name] == saved['model_args'][name] == holds
    assert 'weight_decay is 0.3 from here on (command line); the run before had 0.1' in out
    assert 'beta1 is 0.8 from here on (command line); the run before had 0.9' in out and 'beta2' not in out
    groups = saved['optimizer']['param_groups']
    assert [g['weight_decay'] for g in groups] == [0.3, 0.0]
    assert [tuple(g['betas']) for g in groups] == [(0.8, 0.95)] * 2
    out, saved = resume('--max_iters=32')  # not given again: those of the checkpoint
    assert 'weight_decay' not in out and saved['config']['weight_decay'] == 0.3 and saved['config']['beta1'] == 0.8


def test_resuming_past_max_iters_says_so_and_changes_nothing(finished):
    before = (finished / 'out' / 'ckpt.pt').read_bytes(), (finished / 'out' / 'log.csv').read_bytes()
    done = run(finished, 'train.py', *TINY, '--init_from=resume', '--max_iters=10')
    assert done.returncode == 0 and 'at iteration 20 and max_iters is 10: there is nothing left' in done.stdout
    assert before == ((finished / 'out' / 'ckpt.pt').read_bytes(), (finished / 'out' / 'log.csv').read_bytes())


def test_a_second_run_in_a_live_out_dir_is_refused_and_a_crash_leaves_no_lock(repo):
    pytest.importorskip('fcntl')
    first = start_training(repo, *FOREVER)
    wait_for_rows(first, repo / 'out', 5)
    second = run(repo, 'train.py', *TINY)
    assert second.returncode == 2 and 'another process is training in out' in second.stderr.splitlines()[-1]
    assert run(repo, 'train.py', *TINY, '--eval_only=True').returncode == 0  # writes nothing
    first.kill()
    first.communicate()
    assert run(repo, 'train.py', *TINY, '--max_iters=1').returncode == 0
    assert sorted(os.listdir(repo / 'out')) == ['.lock', 'ckpt.pt', 'log.csv', 'loss.png']


def test_stopping_before_the_first_iteration_saves_nothing(repo):
    process = start_training(repo, *FOREVER, '--eval_iters=1000000')  # in the first evaluation for ever
    wait_for_rows(process, repo / 'out', 0)
    assert 'nothing to save' in stopped(process, signal.SIGINT)[0]
    assert not [name for name in os.listdir(repo / 'out') if name.endswith('.pt')]


def test_a_sigint_that_is_ignored_at_entry_stays_so_and_sigterm_stops(repo):
    process = subprocess.Popen([sys.executable, 'train.py', *TINY, *FOREVER], cwd=repo, text=True, env=ENVIRONMENT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    wait_for_rows(process, repo / 'out', 5)
    process.send_signal(signal.SIGINT)
    n = rows(repo / 'out')
    wait_for_rows(process, repo / 'out', n + 20)
    out, err = stopped(process)
    assert 'saved to out/ckpt.pt' in out and 'SIGINT' not in err and 'SIGTERM' in err


def test_what_happens_after_the_reader_has_left_is_said_on_stderr(repo):
    process = start_training(repo, *FOREVER)
    process.stdout.readline()
    wait_for_rows(process, repo / 'out', 3)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=300) == 0 and 'nobody reads the output any more' in err
    assert 'stopped at iteration' in err and 'saved to out/ckpt.pt' in err


def test_no_file_is_left_open(repo):
    done = run(repo, '-W', 'error::ResourceWarning', 'train.py', *TINY, '--max_iters=2')
    assert done.returncode == 0 and 'ResourceWarning' not in done.stderr, done.stderr


def test_a_failure_of_several_processes_is_said_once_and_last(repo):
    done = run(repo, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', 'train.py', *TINY,
               '--gradient_accumulation_steps=3')
    assert done.returncode and done.stderr.count('train.py: error: ') == 1
    assert 'must be divisible by the 2 processes' in '\n'.join(done.stderr.strip().splitlines()[-5:]), done.stderr


@pytest.mark.parametrize('script', ['train.py', 'data/shakespeare_char/prepare.py', 'data/shakespeare/prepare.py',
                                    'data/docstrings/prepare.py', 'data/openwebtext/prepare.py'])
def test_without_torch_a_script_says_what_to_do(script):
    """python -S sees no site-packages."""
    done = subprocess.run([sys.executable, '-S', os.path.join(ROOT, script)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr
    assert 'has no torch' in done.stderr and '.venv/bin/activate' in done.stderr


def train_on_any_number_of_threads(repo, folder, *settings, **env):
    """train.py where OMP_NUM_THREADS is what env says, or not set. Returns (stdout, weights, threads)."""
    env = {k: v for k, v in os.environ.items() if k != 'OMP_NUM_THREADS'} | env
    command = [sys.executable, 'train.py', *TINY, '--eval_interval=2', f'--out_dir={folder}', *settings]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    saved = checkpoints.load(str(repo / folder / 'ckpt.pt'))
    return done.stdout, saved['model'], saved['threads']


def test_timing_threads_changes_no_result_and_a_resumed_run_keeps_their_number(repo):
    """With dropout, which the timed iterations draw as well."""
    out, timed, threads = train_on_any_number_of_threads(repo, 'timed', '--max_iters=4')
    assert f'threads: {threads}' in out
    out, given, again = train_on_any_number_of_threads(repo, 'given', '--max_iters=2', OMP_NUM_THREADS=str(threads))
    assert again == threads and 'threads:' not in out
    out, given, again = train_on_any_number_of_threads(repo, 'given', '--max_iters=4', '--init_from=resume')
    assert again == threads and 'as in the run before' in out
    assert all(torch.equal(timed[k], given[k]) for k in timed)
