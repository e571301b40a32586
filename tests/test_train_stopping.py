"""A second signal ends a training process at once, but the copy of a signal that torchrun forwards does not."""
import os
import signal
import subprocess
import sys

import pytest
from conftest import ENVIRONMENT, TINY, sizes
from test_train import train_in_two_processes, wait_for_rows

import checkpoint as checkpoints
from training import stopping


class Exit(Exception):
    """Raised in the place of os._exit."""


@pytest.fixture
def request_at(monkeypatch):
    """
    A function of (under torchrun?) that returns a StopRequest whose method `at(seconds, signum)` is a signal at that
    time. It handles no signal of this process.
    """
    def make(under_torchrun):
        monkeypatch.delenv('RANK', raising=False)
        if under_torchrun:
            monkeypatch.setenv('RANK', '0')
        request = stopping.StopRequest()

        def at(seconds, signum):
            monkeypatch.setattr(stopping.time, 'monotonic', lambda: seconds)
            request.ask(signum, None)
        request.at = at
        return request

    def exit(code):
        raise Exit(code)
    monkeypatch.setattr(stopping.signal, 'signal', lambda signum, handler: None)
    monkeypatch.setattr(stopping.os, '_exit', exit)
    return make


def test_the_second_signal_ends_the_process_however_soon_it_comes(request_at):
    for first in (signal.SIGINT, signal.SIGTERM):
        for second in (signal.SIGINT, signal.SIGTERM):
            request = request_at(under_torchrun=False)
            request.at(10.0, first)
            assert request.asked
            with pytest.raises(Exit, match=str(128 + second)):
                request.at(10.01, second)


def test_under_torchrun_the_same_signal_within_two_seconds_is_a_copy(request_at):
    request = request_at(under_torchrun=True)
    request.at(10.0, signal.SIGINT)
    for seconds in (10.0, 10.01, 11.9):
        request.at(seconds, signal.SIGINT)
    assert request.asked
    with pytest.raises(Exit, match='130'):
        request.at(12.1, signal.SIGINT)
    request = request_at(under_torchrun=True)
    request.at(10.0, signal.SIGINT)
    with pytest.raises(Exit, match='143'):
        request.at(10.01, signal.SIGTERM)


@pytest.mark.parametrize('under_torchrun', [False, True])
def test_the_first_signal_of_a_run_that_stops_already_is_no_second_one(request_at, under_torchrun, capsys):
    """It stops because another process was asked to, or because the reader of its output has gone."""
    request = request_at(under_torchrun)
    request.asked = True
    request.at(10.0, signal.SIGTERM)
    assert 'SIGTERM: stopping after this iteration' in capsys.readouterr().err


def test_a_signal_while_processes_agree_stops_the_next_iteration(request_at, monkeypatch):
    request, seen = request_at(under_torchrun=True), []

    def all_reduce(asked, op):
        seen.append(asked.item())
        if len(seen) == 2:
            request.at(10.0, signal.SIGTERM)
    monkeypatch.setattr(stopping.dist, 'all_reduce', all_reduce)
    assert [request.agreed(2, 'cpu') for _ in range(3)] == [False, False, True] and seen == [0.0, 0.0, 1.0]


@pytest.mark.parametrize('signum', sizes([signal.SIGINT], [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_to_torchrun_and_to_its_workers_saves(repo, signum):
    """As a terminal or a job scheduler sends it; torchrun forwards its own copy to the workers."""
    train_in_two_processes(repo, '--gradient_accumulation_steps=2', '--max_iters=1', '--out_dir=try')  # or skip
    settings = [*TINY, '--max_iters=1000000', '--eval_interval=1000000', '--gradient_accumulation_steps=2']
    script = ("import os, sys, runpy; open(f'worker{os.environ[\"RANK\"]}', 'w').write(str(os.getpid())); "
              "sys.path.insert(0, '.'); sys.argv = sys.argv[1:]; runpy.run_path('train.py', run_name='__main__')")
    (repo / 'worker.py').write_text(script)
    process = subprocess.Popen(
        [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', 'worker.py', 'train.py',
         *settings], cwd=repo, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=ENVIRONMENT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    wait_for_rows(process, repo / 'out', 5)
    workers = [int((repo / f'worker{rank}').read_text()) for rank in range(2)]
    for pid in [*workers, process.pid]:
        os.kill(pid, signum)
    out, err = process.communicate(timeout=300)
    assert 'saved to out/ckpt.pt' in out, out[-1000:] + err[-3000:]
    assert checkpoints.load(str(repo / 'out' / 'ckpt.pt'))['iter_num'] > 0
