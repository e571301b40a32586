"""Runs that stop and go on: exact to the bit, whatever stopped them; the two files that they leave; what they take."""
import os
import shutil
import signal
import sys
from contextlib import nullcontext

import pytest
import torch
from conftest import TINY, run, sizes, start_training
from test_train import FOREVER, changed_train, log, rows, same, stopped, train, wait_for_rows, with_a_run

import checkpoint as checkpoints
from model import GPT, GPTConfig
from training import stopping
from training.checkpointer import Checkpointer
from training.log import Log
from training.resuming import load_furthest

SINKS = '--position=rope', '--window=6', '--n_sink=2', '--n_kv_head=1', '--rope_theta=500'
WSD = '--lr_schedule=wsd', '--cooldown_frac=0.8', '--lr_decay_iters=20'


@pytest.mark.parametrize('settings', [
    (), ('--gradient_accumulation_steps=3', '--dtype=float16'), (*SINKS, '--optimizer=muon', *WSD),
    ('--dtype=bfloat16', '--onednn=True'), *sizes([], [
        ('--dtype=bfloat16',), ('--optimizer=muon', '--dtype=float16'), ('--optimizer=muon', '--onednn=True')])])
def test_resume_is_exact(repo, settings):
    """With dropout on: 20 iterations in one go, and 10 + 10. With float16, so is the state of the loss scale."""
    assert train(repo, '--out_dir=a', *settings).returncode == 0
    assert train(repo, '--out_dir=b', '--max_iters=10', *settings).returncode == 0
    resumed = train(repo, '--out_dir=b', '--init_from=resume', *settings)
    assert resumed.returncode == 0 and 'resuming b/ckpt.pt at iteration 10' in resumed.stdout
    a, b = (checkpoints.load(str(repo / d / 'ckpt.pt')) for d in 'ab')
    assert same(a['model'], b['model']) and a['scaler'] == b['scaler']
    for pa, pb in zip(a['optimizer']['state'].values(), b['optimizer']['state'].values(), strict=True):
        assert same(pa, pb)
    assert torch.equal(a['rng']['torch'], b['rng']['torch']) and a['best_val_loss'] == b['best_val_loss']
    columns = ('iter', 'lr', 'batch_loss', 'train_loss', 'val_loss')
    assert [[r[c] for c in columns] for r in log(repo / 'a')] == [[r[c] for c in columns] for r in log(repo / 'b')]


@pytest.mark.parametrize('signum', sizes([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
def test_a_signal_saves_says_where_and_the_run_goes_on_exactly(repo, signum):
    """Twice: the first state is ckpt.pt, as there is none, and the second one ckpt_last.pt."""
    if signal.getsignal(signum) == signal.SIG_IGN:
        pytest.skip("this process was started with nohup, and SIGHUP is ignored in all that it starts")
    for name, more in (('ckpt.pt', ()), ('ckpt_last.pt', ('--init_from=resume',))):
        process = start_training(repo, *FOREVER, *more)
        before = rows(repo / 'out')
        wait_for_rows(process, repo / 'out', before + 30)
        assert f'saved to out/{name}; to go on, add --init_from=resume' in stopped(process, signum)[0]
    n = checkpoints.load(str(repo / 'out' / 'ckpt_last.pt'))['iter_num']
    assert n > checkpoints.load(str(repo / 'out' / 'ckpt.pt'))['iter_num'] >= 29
    for more in (('--init_from=resume',), ('--out_dir=straight',)):
        assert train(repo, *more, f'--max_iters={n + 7}', '--eval_interval=1000000').returncode == 0
    assert same(*(checkpoints.load(str(repo / d / 'ckpt.pt'))['model'] for d in ('out', 'straight')))
    assert not (repo / 'out' / 'ckpt_last.pt').exists()


@pytest.mark.parametrize('max_iters', sizes([5], [5, 30]))
def test_a_signal_during_an_evaluation_costs_neither_it_nor_exactness(repo, max_iters):
    """At iteration 5, which may be the last: the evaluation is done again when the run goes on."""
    settings = ('--eval_interval=5', f'--max_iters={max_iters}')
    assert train(repo, *settings[:1], '--max_iters=1').returncode == 0
    process = start_training(repo, *settings, '--init_from=resume', '--eval_iters=1000000')
    wait_for_rows(process, repo / 'out', 6)  # the evaluation at 0 and iterations 0 to 4
    assert 'stopped at iteration 5,' in stopped(process)[0]
    assert train(repo, *settings, '--init_from=resume').returncode == 0
    assert train(repo, *settings, '--out_dir=straight').returncode == 0
    assert same(*(checkpoints.load(str(repo / d / 'ckpt.pt'))['model'] for d in ('out', 'straight')))
    evaluated, straight = ([r['iter'] for r in log(repo / d) if r['val_loss']] for d in ('out', 'straight'))
    assert evaluated == straight


@pytest.fixture
def handled(monkeypatch):
    """The signals for which a StopRequest sets a handler: none of this process. Its end is a SystemExit."""
    signums = []
    monkeypatch.setattr(stopping.signal, 'signal', lambda signum, handler: signums.append(signum))
    monkeypatch.setattr(stopping.os, '_exit', sys.exit)
    monkeypatch.delenv('TORCHELASTIC_RUN_ID', raising=False)
    return signums


@pytest.mark.parametrize('at_entry, expected', [
    (signal.SIG_IGN, []), (signal.SIG_DFL, [signal.SIGINT, signal.SIGHUP])])
def test_a_signal_that_is_ignored_at_entry_stays_so(handled, monkeypatch, at_entry, expected):
    expected = [signal.SIGTERM, *expected]
    monkeypatch.setattr(stopping.signal, 'getsignal', lambda number: at_entry)
    stopping.StopRequest()
    assert handled == expected


@pytest.mark.parametrize('under_torchrun', [False, True])
def test_a_second_signal_ends_the_process_unless_torchrun_sends_it(handled, monkeypatch, under_torchrun, capsys):
    """A signal to a run that stops already for another reason is a first one."""
    if under_torchrun:
        monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'none')
    request = stopping.StopRequest()
    request.asked = True
    request.ask(signal.SIGINT, None)
    assert 'SIGINT: stopping after this iteration' in capsys.readouterr().err
    request.ask(signal.SIGHUP, None)  # of which a shell sends one more
    with nullcontext() if under_torchrun else pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        request.ask(signal.SIGTERM, None)


def test_a_signal_while_processes_agree_stops_the_next_iteration(handled, monkeypatch):
    request, seen = stopping.StopRequest(), []

    def all_reduce(asked, op):
        seen.append(asked.item())
        if len(seen) == 2:
            request.ask(signal.SIGTERM, None)
    monkeypatch.setattr(stopping.dist, 'all_reduce', all_reduce)
    assert [request.agreed(2, 'cpu') for _ in range(3)] == [False, False, True] and seen == [0.0, 0.0, 1.0]


def test_the_best_model_stays_and_the_run_goes_on_from_its_end(repo):
    """Ten good iterations, and ten at a rate that spoils the model, in one go or in two."""
    bad = ('--init_from=resume', '--always_save_checkpoint=False', '--learning_rate=3', '--decay_lr=False',
           '--eval_interval=5')
    assert train(repo, '--max_iters=10').returncode == 0
    best = (repo / 'out' / 'ckpt.pt').read_bytes()
    shutil.copytree(repo / 'out', repo / 'straight')
    for command, says in ((('--out_dir=straight', '--max_iters=20'), 'resuming straight/ckpt.pt at iteration 10'),
                          (('--max_iters=15',), 'resuming out/ckpt.pt at iteration 10'),
                          (('--max_iters=20',), 'resuming out/ckpt_last.pt at iteration 15')):
        done = train(repo, *bad, *command)
        assert done.returncode == 0 and says in done.stdout and 'saved to' in done.stdout, done.stdout + done.stderr
        assert done.stdout.splitlines()[-2].endswith('/ckpt_last.pt')
    a, b = (checkpoints.load(str(repo / folder / 'ckpt_last.pt')) for folder in ('straight', 'out'))
    assert same(a['model'], b['model']) and a['best_val_loss'] == b['best_val_loss'] and b['iter_num'] == 20
    assert (repo / 'out' / 'ckpt.pt').read_bytes() == best == (repo / 'straight' / 'ckpt.pt').read_bytes()


def test_a_new_run_that_is_stopped_early_leaves_the_files_of_an_earlier_one(repo, trained):
    finished = with_a_run(repo, trained)
    shutil.copy(finished / 'out' / 'ckpt.pt', finished / 'out' / 'ckpt_last.pt')
    (finished / 'out' / 'loss.png').write_bytes(b'the earlier picture')
    names = 'ckpt.pt', 'ckpt_last.pt', 'log.csv', 'loss.png'
    before = [(finished / 'out' / name).read_bytes() for name in names]
    process = start_training(finished, *FOREVER)
    wait_for_rows(process, finished / 'out', 3, 'log_new.csv')
    out, _ = stopped(process, signal.SIGINT)
    assert 'out/ckpt.pt is of an earlier run: it stays until an evaluation of this run saves' in out
    assert 'not saved: out/ckpt.pt is of an earlier run; use another --out_dir' in out
    assert [(finished / 'out' / name).read_bytes() for name in names] == before
    assert not (finished / 'out' / 'log_new.csv').exists()
    done = train(finished, '--max_iters=4', '--always_save_checkpoint=True')
    rows = (finished / 'out' / 'log.csv').read_text().splitlines()
    assert done.returncode == 0 and [row.split(',')[0] for row in rows[1:]] == ['0', '0', '1', '2', '3', '4'], rows
    assert (finished / 'out' / 'loss.png').read_bytes() != before[3]


def test_the_error_for_a_damaged_file_names_the_other_one(tmp_path):
    write(tmp_path, {'ckpt.pt': 3, 'ckpt_last.pt': 5})
    (tmp_path / 'ckpt.pt').write_bytes(b'garbage')
    with pytest.raises(ValueError, match=r'ckpt\.pt cannot be read .*; or move it away, to go on from .*_last\.pt$'):
        load_furthest(str(tmp_path))


def checkpointer_in(folder, resume=True, first_iter=0):
    """A Checkpointer of a small run in a folder."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=1, n_embd=8))
    made = Checkpointer(str(folder), resume, writes=True)
    made.track(model, torch.optim.AdamW(model.parameters()), torch.amp.GradScaler(enabled=False), {}, {}, 0.0,
               first_iter)
    return made


def write(folder, files):
    """Write {name: iteration} to a folder, as checkpoints."""
    made = checkpointer_in(folder)
    for name, iter_num in files.items():
        checkpoints.save(made.state(iter_num, 1.0), str(folder / name))


def iterations(folder):
    """{name: iteration} of the checkpoints in a folder."""
    return {path.name: checkpoints.load(str(path))['iter_num'] for path in folder.glob('*.pt')}


@pytest.mark.parametrize('before, resume, best, after', [
    ({}, False, False, {'ckpt.pt': 7}),
    ({}, False, True, {'ckpt.pt': 7}),
    ({'ckpt.pt': 8, 'ckpt_last.pt': 9}, False, False, {'ckpt.pt': 8, 'ckpt_last.pt': 9}),
    ({'ckpt.pt': 8, 'ckpt_last.pt': 9}, False, True, {'ckpt.pt': 7}),
    ({'ckpt.pt': 5}, True, False, {'ckpt.pt': 5, 'ckpt_last.pt': 7}),
    ({'ckpt.pt': 5, 'ckpt_last.pt': 6}, True, False, {'ckpt.pt': 5, 'ckpt_last.pt': 7}),
    ({'ckpt.pt': 5, 'ckpt_last.pt': 6}, True, True, {'ckpt.pt': 7})])
def test_which_file_a_save_writes_and_which_it_removes(tmp_path, before, resume, best, after):
    write(tmp_path, before)
    run_of = checkpointer_in(tmp_path, resume)
    other = Checkpointer(str(tmp_path), resume, writes=False)  # of another process, which tells where to go on from
    said, saved = run_of.save(7, 1.0, best), 7 in after.values()
    assert iterations(tmp_path) == after and said.startswith('saved to ' if saved else 'not saved: ')
    for each in (run_of, other):
        newest = tmp_path / max(after, key=after.get)
        expected = f'is {newest}: to go on from it, add --init_from=resume' if saved else 'this run has saved no'
        assert expected in each.last_good() and each.is_of_earlier_run() != saved


def test_stopping_before_the_first_iteration_saves_nothing(tmp_path, capsys):
    checkpointer_in(tmp_path, first_iter=5).stop(Log(None), 5, 1.0)
    assert 'nothing to save' in capsys.readouterr().out and iterations(tmp_path) == {}


@pytest.mark.parametrize('writes', [True, False])
def test_stopping_at_an_iteration_that_was_saved_writes_it_once(tmp_path, monkeypatch, capsys, writes):
    """No process gathers weights a second time: one that did would wait for the others."""
    made = checkpointer_in(tmp_path)
    made.writes = writes
    for name in ('ckpt.pt', 'ckpt_last.pt'):
        made.save(7, 1.0, best=name == 'ckpt.pt')
        with monkeypatch.context() as patch:
            patch.setattr(made, 'state', None)
            made.stop(Log(None), 7, 1.0)
        done = f'saved to {tmp_path / name}' if writes else 'saved by process 0'
        assert f'stopped at iteration 7, {done}; to go on' in capsys.readouterr().out
    assert iterations(tmp_path) == ({'ckpt.pt': 7, 'ckpt_last.pt': 7} if writes else {})


@pytest.mark.parametrize('step, taken', [('replace', 6), ('remove', 7)])
def test_a_save_that_is_killed_leaves_the_state_before_or_the_new_one(tmp_path, monkeypatch, step, taken):
    def killed(*paths):
        raise KeyboardInterrupt
    write(tmp_path, {'ckpt.pt': 5, 'ckpt_last.pt': 6})
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, step, killed)
        checkpointer_in(tmp_path).save(7, 1.0, best=True)
    assert load_furthest(str(tmp_path))[0]['iter_num'] == taken
    checkpointer_in(tmp_path).save(8, 1.0, best=True)
    assert iterations(tmp_path) == {'ckpt.pt': 8}


@pytest.mark.parametrize('files, name', [
    ({'ckpt.pt': 5, 'ckpt_last.pt': 6}, 'ckpt_last.pt'), ({'ckpt.pt': 6, 'ckpt_last.pt': 6}, 'ckpt.pt'),
    ({'ckpt.pt': 7, 'ckpt_last.pt': 6}, 'ckpt.pt'), ({'ckpt_last.pt': 6}, 'ckpt_last.pt')])
def test_a_resumed_run_takes_the_file_that_is_further_along(tmp_path, files, name):
    write(tmp_path, files)
    loaded, path = load_furthest(str(tmp_path))
    assert path == str(tmp_path / name) and loaded['iter_num'] == files[name]


def test_the_shape_is_that_of_the_checkpoint_and_another_is_said_to_have_no_effect(repo):
    assert train(repo, '--max_iters=10', *SINKS).returncode == 0
    expected = dict(position='rope', rope_theta=500.0, n_kv_head=1, window=6, n_sink=2, gelu='none', n_layer=2)

    def resume(*settings):
        done = train(repo, '--init_from=resume', '--eval_interval=1', *settings, code=0)
        saved = checkpoints.load(str(repo / 'out' / 'ckpt.pt'))
        assert expected.items() <= saved['model_args'].items() and expected.items() <= saved['config'].items()
        return done.stdout, saved
    out, _ = resume('--max_iters=11')
    assert 'stays' not in out and 'from here on' not in out
    out, saved = resume('--max_iters=12', '--position=alibi', '--window=5', '--n_kv_head=0', '--gelu=tanh',
                        '--n_inner=0', '--n_sink=2', '--n_layer=3', '--n_head=4', '--n_embd=32', '--bias=True',
                        '--weight_decay=0.3', '--beta1=0.8', '--beta2=0.95')
    for name, holds, given in (('position', 'rope', 'alibi'), ('window', 6, 5), ('n_kv_head', 1, 0),
                               ('gelu', 'none', 'tanh'), ('n_layer', 2, 3), ('n_head', 2, 4), ('n_embd', 16, 32),
                               ('bias', False, True)):
        assert out.count(f'{name} stays {holds}') == 1 and f'{name}={given} (command line) has no effect' in out
    assert not any(each in out for each in ('n_sink stays', 'n_inner stays', 'beta2'))  # n_inner=0 is 4 * n_embd
    assert 'weight_decay is 0.3 from here on (command line); the run before had 0.1' in out
    assert 'beta1 is 0.8 from here on (command line); the run before had 0.9' in out
    assert [(g['weight_decay'], *g['betas']) for g in saved['optimizer']['param_groups']] == [(0.3, 0.8, 0.95),
                                                                                              (0.0, 0.8, 0.95)]
    out, saved = resume('--max_iters=13')  # not given again: those of the checkpoint
    assert 'weight_decay' not in out and saved['config']['weight_decay'] == 0.3 and saved['config']['beta1'] == 0.8


def test_a_shorter_block_size_cuts_positions_and_their_moments_and_must_show_the_window(repo):
    assert train(repo, '--max_iters=10').returncode == 0
    train(repo, '--init_from=resume', '--block_size=8', '--max_iters=12', '--eval_interval=12', code=0)
    saved = checkpoints.load(str(repo / 'out' / 'ckpt.pt'))
    assert saved['model_args']['block_size'] == 8
    moments = [s['exp_avg'].shape for s in saved['optimizer']['state'].values()]
    assert saved['model']['transformer.wpe.weight'].shape == (8, 16) and (8, 16) in moments and (16, 16) in moments
    assert train(repo, '--max_iters=1', *SINKS).returncode == 0
    short = train(repo, '--init_from=resume', '--block_size=8')
    assert short.returncode == 2 and short.stderr.strip().splitlines()[-1] == (
        "train.py: error: block_size 8 must be more than what the model's tokens see, a window of 6 and 2 sinks: set "
        "it to 16, for example")


def test_a_config_file_does_not_cut_a_model(repo):
    """The block_size of the checkpoint stays, whether that of the file is less or more."""
    assert train(repo, '--max_iters=5').returncode == 0
    for n in (8, 32):
        (repo / 'other.py').write_text(f'block_size = {n}\n')
        others = [setting for setting in TINY if 'block_size' not in setting]
        done = run(repo, 'train.py', 'other.py', *others, '--init_from=resume', '--max_iters=6', code=0)
        assert f'block_size stays 16, as in the weights of out/ckpt.pt: block_size={n} (other.py)' in done.stdout
        assert 'tokens per iteration: 64' in done.stdout
        assert checkpoints.load(str(repo / 'out' / 'ckpt.pt'))['model_args']['block_size'] == 16


def test_resuming_past_max_iters_says_so_and_changes_nothing(repo, trained):
    finished = with_a_run(repo, trained)
    before = (finished / 'out' / 'ckpt.pt').read_bytes(), (finished / 'out' / 'log.csv').read_bytes()
    done = train(finished, '--init_from=resume', '--max_iters=10')
    assert done.returncode == 0 and 'at iteration 20 and max_iters is 10: there is nothing left' in done.stdout
    assert before == ((finished / 'out' / 'ckpt.pt').read_bytes(), (finished / 'out' / 'log.csv').read_bytes())
    for _ in range(2):  # the first time its evaluation may be the best so far
        done = train(finished, '--init_from=resume', '--max_iters=20')
        assert done.returncode == 0 and 'there is nothing left' in done.stdout
    assert 'saved to' not in done.stdout and not (finished / 'out' / 'ckpt_last.pt').exists()


# torch has two threads, and the user has set as many as the first argument says, or none
THREADS = """
import torch
given = sys.argv.pop(1)
del os.environ['OMP_NUM_THREADS']
if given:
    os.environ['OMP_NUM_THREADS'] = given
torch.set_num_threads(int(given or 2))
"""


def test_timing_threads_changes_no_result_and_a_resumed_run_keeps_their_number(repo):
    """With dropout, which the timed iterations draw as well."""
    script = changed_train(repo, THREADS)

    def train_on(given, folder, *settings):
        """(stdout, weights, threads) of a run for which the user has given a number of threads, or ''."""
        done = run(repo, script, given, *TINY, '--eval_interval=2', f'--out_dir={folder}', *settings, code=0)
        saved = checkpoints.load(str(repo / folder / 'ckpt.pt'))
        return done.stdout, saved['model'], saved['threads']
    out, timed, threads = train_on('', 'timed', '--max_iters=4')
    assert f'threads: {threads} of 2, by timing' in out
    out, _, again = train_on(str(threads), 'given', '--max_iters=2')
    assert again == threads and 'threads:' not in out
    out, given, again = train_on('', 'given', '--max_iters=4', '--init_from=resume')
    assert again == threads and 'as in the run before' in out and same(timed, given)


def test_minutes_end_a_run_and_its_learning_rate_and_a_resumed_one_has_the_rest_of_them(repo):
    """The rate is the cosine's of the share of the time that has gone: 2.4 seconds, 1.2 of them in a run before."""
    script = changed_train(repo, "import training.checkpointer, time\nclock = [1e6]\n"
                           "time.monotonic = lambda: clock.append(clock[-1] + 0.05) or clock[-1]")
    how = '--max_minutes=0.04', '--warmup_iters=2', '--min_lr=0.0', '--learning_rate=1e-2', '--max_iters=3'
    run(repo, script, *TINY, *how, '--eval_interval=10', '--out_dir=straight', code=0)
    rates = [float(row['lr']) for row in log(repo / 'straight') if row['batch_loss']]
    assert 20 < len(rates) < 60 and max(rates) == max(rates[:4]) and rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] < 2e-4 and rates[len(rates) // 2] == pytest.approx(5e-3, rel=0.2)
    saved = checkpoints.load(str(repo / 'straight' / 'ckpt.pt'))
    assert saved['iter_num'] == len(rates) and saved['seconds'] >= 2.4
    over = run(repo, script, *TINY, *how, '--out_dir=straight', '--init_from=resume')
    assert over.returncode == 0 and 'has had its max_minutes, 0.04: to go on, give a larger' in over.stdout, over.stderr
    half = saved | dict(seconds=1.2)
    (repo / 'again').mkdir()
    checkpoints.save(half, str(repo / 'again' / 'ckpt.pt'))
    run(repo, script, *TINY, *how, '--eval_interval=1000', '--out_dir=again', '--init_from=resume', code=0)
    rates_of_rest = [float(row['lr']) for row in log(repo / 'again') if row['batch_loss']]
    assert 5e-3 >= rates_of_rest[0] > 4e-3 and 0.3 < len(rates_of_rest) / len(rates) < 0.7
