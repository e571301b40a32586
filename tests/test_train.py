"""train.py as its users run it: exact resume, signals, kill -9, two processes, a loss that is not finite."""
import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import ENVIRONMENT, TINY, run, sizes, start_training
from test_data import byte_level_json

import checkpoint as checkpoints
from training.log import Log


def train(repo, *settings, **env):
    return run(repo, 'train.py', *TINY, *settings, **env)


BARE = """
import torch
import torch.distributed as dist
dist.init_process_group('gloo')
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
dist.barrier()
dist.destroy_process_group()
"""


def in_two_processes(repo, *command):
    """The results of a command in two processes of one group, with what torchrun would tell them."""
    with socket.create_server(('127.0.0.1', 0)) as listener:
        port = listener.getsockname()[1]
    group = dict(WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: run(repo, *command, RANK=rank, LOCAL_RANK=rank, **group), '01'))


def train_in_two_processes(repo, *settings):
    """
    train.py in two processes. Some sandboxes forbid what gloo needs, and torch's processes die by SIGABRT. If those of
    a program with nothing but torch in it die too, the test is skipped. All other failures fail.
    """
    command = 'train.py', *TINY, *settings
    done = in_two_processes(repo, *command)
    if any(each.returncode and 'terminate called' in each.stderr for each in done):
        (repo / 'bare.py').write_text(BARE)
        for bare in in_two_processes(repo, 'bare.py'):
            if bare.returncode:
                pytest.skip('two processes of torch and gloo alone do not run here: '
                            + bare.stderr.strip().splitlines()[0])
        done = in_two_processes(repo, *command)
    assert [each.returncode for each in done] == [0, 0], done[0].stderr + done[1].stderr


def weights(path):
    return checkpoints.load(str(path))['model']


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def log(folder):
    with open(folder / 'log.csv', newline='') as f:
        return list(csv.DictReader(f))


def test_a_run_leaves_checkpoint_log_and_curve(trained):
    rows = log(trained / 'out')
    assert [int(r['iter']) for r in rows if r['val_loss']] == [0, 10, 20]
    assert [int(r['iter']) for r in rows if r['batch_loss']] == list(range(20))
    losses = [float(r['val_loss']) for r in rows if r['val_loss']]
    assert losses[-1] < losses[0]
    assert (trained / 'out' / 'loss.png').read_bytes().startswith(b'\x89PNG')
    saved = checkpoints.load(str(trained / 'out' / 'ckpt.pt'))
    assert {'model', 'optimizer', 'model_args', 'iter_num', 'best_val_loss', 'config', 'tokenizer', 'rng',
            'scaler'} <= set(saved)
    assert saved['iter_num'] == 20 and saved['config']['n_embd'] == 16
    out = (trained / 'train.log').read_text()
    assert 'input.txt' in out and 'iter 19: loss' in out and 'step 20: train loss' in out


WSD = '--lr_schedule=wsd', '--cooldown_frac=0.8', '--lr_decay_iters=20'


@pytest.mark.parametrize('settings', [(), ('--gradient_accumulation_steps=3',), ('--dtype=float16',),
                                      ('--optimizer=muon', *WSD), ('--optimizer=muon', '--dtype=float16')])
def test_resume_is_exact(repo, settings):
    """With dropout on: 20 iterations in one go, and 10 + 10. With float16, so is the state of the loss scale."""
    assert train(repo, '--out_dir=a', *settings).returncode == 0
    assert train(repo, '--out_dir=b', '--max_iters=10', *settings).returncode == 0
    resumed = train(repo, '--out_dir=b', '--init_from=resume', *settings)
    assert resumed.returncode == 0 and 'resuming b/ckpt.pt at iteration 10' in resumed.stdout
    a, b = (checkpoints.load(str(repo / d / 'ckpt.pt')) for d in 'ab')
    assert same(a['model'], b['model']) and a['scaler'] == b['scaler']
    for pa, pb in zip(a['optimizer']['state'].values(), b['optimizer']['state'].values()):
        assert same(pa, pb)
    assert torch.equal(a['rng']['torch'], b['rng']['torch']) and a['best_val_loss'] == b['best_val_loss']
    columns = ('iter', 'lr', 'batch_loss', 'train_loss', 'val_loss')
    assert [[r[c] for c in columns] for r in log(repo / 'a')] == [[r[c] for c in columns] for r in log(repo / 'b')]


def rows(folder):
    """How many lines log.csv has."""
    return (folder / 'log.csv').read_text().count('\n') if (folder / 'log.csv').exists() else 0


def wait_until(process, done):
    """Wait until done() is true, which must come about before the process ends."""
    while not done():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def wait_for_rows(process, folder, n):
    wait_until(process, lambda: rows(folder) > n)


def stopped(process, signum=signal.SIGTERM):
    """(stdout, stderr) of a run that is sent a signal, stops, and does not fail."""
    process.send_signal(signum)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and 'Traceback' not in err, out + err
    return out, err


@pytest.mark.parametrize('signum', sizes([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_saves_says_where_and_the_run_goes_on_exactly(repo, signum):
    process = start_training(repo, '--max_iters=1000000', '--eval_interval=1000000')
    wait_for_rows(process, repo / 'out', 30)
    assert 'saved to out/ckpt.pt' in stopped(process, signum)[0]
    n = checkpoints.load(str(repo / 'out' / 'ckpt.pt'))['iter_num']
    assert n >= 29
    assert train(repo, '--init_from=resume', f'--max_iters={n + 7}', '--eval_interval=1000000').returncode == 0
    assert train(repo, '--out_dir=straight', f'--max_iters={n + 7}', '--eval_interval=1000000').returncode == 0
    assert same(weights(repo / 'out' / 'ckpt.pt'), weights(repo / 'straight' / 'ckpt.pt'))


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
    assert same(weights(repo / 'out' / 'ckpt.pt'), weights(repo / 'straight' / 'ckpt.pt'))
    rows, straight = ([r['iter'] for r in log(repo / d) if r['val_loss']] for d in ('out', 'straight'))
    assert rows == straight


def test_a_second_signal_exits_at_once(repo):
    process = start_training(repo, '--max_iters=1000000', '--eval_iters=1000000')  # its evaluation never ends
    wait_for_rows(process, repo / 'out', 0)
    process.send_signal(signal.SIGSTOP)  # so that both arrive before it can act on the first
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=300)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)


def test_an_interruption_never_costs_the_best_model(repo):
    """Without always_save_checkpoint ckpt.pt is the best model; the interrupted state goes beside it, to be resumed."""
    settings = ('--always_save_checkpoint=False', '--eval_interval=5', '--eval_iters=1')
    process = start_training(repo, '--max_iters=1000000', *settings)
    wait_until(process, (repo / 'out' / 'ckpt.pt').exists)
    wait_for_rows(process, repo / 'out', 40)
    assert 'saved to out/ckpt_interrupted.pt' in stopped(process)[0]
    best, interrupted = (checkpoints.load(str(repo / 'out' / name)) for name in ('ckpt.pt', 'ckpt_interrupted.pt'))
    assert best['iter_num'] <= interrupted['iter_num']
    resumed = train(repo, '--init_from=resume', f"--max_iters={interrupted['iter_num'] + 1}", *settings)
    assert f"at iteration {interrupted['iter_num']}" in resumed.stdout or best['iter_num'] == interrupted['iter_num']
    # ckpt.pt stays the same when this run is interrupted again, and when a new run is; so does that run's old state
    whole, state = (repo / 'out' / 'ckpt.pt').read_bytes(), repo / 'out' / 'ckpt_interrupted.pt'
    for init_from, says in (('resume', 'saved to out/ckpt_interrupted.pt'), ('scratch', 'not saved: out/ckpt.pt and'),
                            ('scratch', 'first move it over out/ckpt.pt, which is of an earlier run')):
        before = state.exists() and state.read_bytes()
        (repo / 'out' / 'log.csv').unlink()
        process = start_training(repo, '--max_iters=1000000', *settings[:1], '--eval_interval=1000000',
                                 f'--init_from={init_from}')
        wait_for_rows(process, repo / 'out', 3)
        out, _ = stopped(process, signal.SIGINT)
        assert says in out and ('both stay until this run saves' in out) == says.startswith('not saved')
        assert (repo / 'out' / 'ckpt.pt').read_bytes() == whole
        assert (state.read_bytes() == before) == says.startswith('not saved')
        if says.startswith('not saved'):
            state.unlink()


def test_kill_9_at_any_moment_leaves_a_loadable_checkpoint(repo):
    settings = ('--max_iters=1000000', '--eval_interval=1', '--eval_iters=1', '--n_embd=128')  # saves every iteration
    saw = 0
    for delay in sizes((0.013, 0.057), (0.0, 0.013, 0.031, 0.057, 0.111)):
        (repo / 'out' / 'log.csv').unlink(missing_ok=True)
        process = start_training(repo, *settings)
        wait_until(process, (repo / 'out' / 'ckpt.pt').exists)
        wait_for_rows(process, repo / 'out', 6)
        time.sleep(delay)
        process.kill()
        process.communicate(timeout=300)
        saw = checkpoints.load(str(repo / 'out' / 'ckpt.pt'))['iter_num']
        assert saw > 0
    assert train(repo, *settings[2:], '--init_from=resume', f'--max_iters={saw + 2}').returncode == 0


@pytest.mark.parametrize('settings', [
    ('--gradient_accumulation_steps=4', '--max_iters=8', '--eval_interval=8'),
    ('--gradient_accumulation_steps=2', '--max_iters=4', '--eval_interval=4', '--position=rope', '--window=6',
     '--n_sink=2', '--n_kv_head=1'),
    ('--gradient_accumulation_steps=2', '--max_iters=4', '--eval_interval=4', '--optimizer=muon', '--muon_lr=1e-3',
     '--lr_schedule=wsd', '--mlp=swiglu')])
def test_two_processes_compute_what_one_does(repo, settings):
    one = train(repo, *settings, '--dropout=0.0', '--out_dir=one')
    assert one.returncode == 0, one.stderr
    train_in_two_processes(repo, *settings, '--dropout=0.0', '--out_dir=two')
    for a, b in zip(log(repo / 'one'), log(repo / 'two'), strict=True):
        for column in ('batch_loss', 'train_loss', 'val_loss'):
            assert a[column] == b[column] == '' or float(a[column]) == pytest.approx(float(b[column]), abs=2e-5), (a, b)
    a, b = (checkpoints.load(str(repo / name / 'ckpt.pt')) for name in ('one', 'two'))
    assert all(torch.allclose(w, b['model'][name], atol=1e-4) for name, w in a['model'].items())
    assert 'threads' in a and 'threads' not in b  # torchrun gives each process one: that is not kept


DIES_EARLY = """
import os, runpy, sys
sys.path.insert(0, '.')
from training import batches
if os.environ['RANK'] == '1':
    batches.open_tokens = lambda *args: os._exit(1)  # behind a barrier, before the model is built
sys.argv = sys.argv[1:]
runpy.run_path('train.py', run_name='__main__')
"""


def test_a_process_that_is_lost_before_the_first_iteration_is_one_line(repo):
    train_in_two_processes(repo, '--gradient_accumulation_steps=2', '--max_iters=1', '--out_dir=try')  # or skip
    assert train(repo, '--max_iters=1').returncode == 0
    (repo / 'dies_early.py').write_text(DIES_EARLY)
    first, _ = in_two_processes(repo, 'dies_early.py', 'train.py', *TINY, '--gradient_accumulation_steps=2')
    last = first.stderr.strip().splitlines()[-1]
    assert first.returncode == 2 and 'Traceback' not in first.stderr and 'another process of this run' in last
    assert 'has saved no checkpoint' in last and '--init_from' not in last  # the checkpoint in out is of another run


EVALUATES_LONG = """
import datetime, os, runpy, sys, time
sys.path.insert(0, '.')
import torch.distributed.distributed_c10d as c10d
c10d.default_pg_timeout = datetime.timedelta(seconds=2)  # torch's limit, 30 minutes, scaled
from training.batches import Batches
draw = Batches.__call__
def draw_late(self, step):
    if self.key[0] == 1338 and step == 0 and os.environ['RANK'] == '0':
        time.sleep(3)  # of the evaluations, in one of the two processes
    return draw(self, step)
Batches.__call__ = draw_late
sys.argv = sys.argv[1:]
runpy.run_path('train.py', run_name='__main__')
"""


def test_an_evaluation_that_is_longer_than_the_limit_of_torch_ends_no_run(repo):
    train_in_two_processes(repo, '--gradient_accumulation_steps=2', '--max_iters=1', '--out_dir=try')  # or skip
    (repo / 'evaluates_long.py').write_text(EVALUATES_LONG)
    done = in_two_processes(repo, 'evaluates_long.py', 'train.py', *TINY, '--gradient_accumulation_steps=2',
                            '--max_iters=1', '--eval_interval=1000')
    assert [each.returncode for each in done] == [0, 0], done[0].stderr + done[1].stderr


def test_two_processes_end(repo):
    """Without DDP's reference to the group: with it, one process in three waited for ever for a thread of gloo."""
    for _ in range(sizes(3, 12)):
        train_in_two_processes(repo, '--gradient_accumulation_steps=2', '--max_iters=1')


def test_two_processes_with_dropout_resume_exactly(repo):
    shared, n = ('--gradient_accumulation_steps=2',), sizes(2, 4)
    train_in_two_processes(repo, *shared, f'--max_iters={2 * n}', f'--eval_interval={2 * n}', '--out_dir=a')
    train_in_two_processes(repo, *shared, f'--max_iters={n}', f'--eval_interval={n}', '--out_dir=b')
    train_in_two_processes(repo, *shared, f'--max_iters={2 * n}', f'--eval_interval={2 * n}', '--out_dir=b',
                           '--init_from=resume')
    assert same(weights(repo / 'a' / 'ckpt.pt'), weights(repo / 'b' / 'ckpt.pt'))


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(repo):
    assert train(repo, '--max_iters=10').returncode == 0
    before = weights(repo / 'out' / 'ckpt.pt')
    broken = train(repo, '--init_from=resume', '--max_iters=30', '--learning_rate=1e30', '--decay_lr=False',
                   '--grad_clip=0.0', '--eval_interval=7')
    assert broken.returncode == 2 and 'Traceback' not in broken.stderr
    last = broken.stderr.strip().splitlines()[-1]
    assert last.startswith('train.py: error: iteration ') and 'lr 1.00e+30' in last and 'out/ckpt.pt' in last
    assert same(weights(repo / 'out' / 'ckpt.pt'), before)


def test_eval_only_writes_nothing(repo):
    done = train(repo, '--eval_only=True')
    assert done.returncode == 0 and 'step 0: train loss' in done.stdout
    assert not (repo / 'out').exists()


def test_a_rejected_run_leaves_the_log_alone(repo):
    assert train(repo).returncode == 0
    before = (repo / 'out' / 'log.csv').read_bytes()
    for bad in ('--wandb_log=True', '--n_head=3', '--dtype=int4'):
        assert train(repo, bad).returncode == 2
    assert (repo / 'out' / 'log.csv').read_bytes() == before


def test_a_full_disk_is_one_line_and_keeps_the_checkpoint(repo):
    assert train(repo, '--max_iters=10').returncode == 0
    before = weights(repo / 'out' / 'ckpt.pt')
    limited = f"ulimit -f 60; exec {sys.executable} train.py {' '.join(TINY)} --init_from=resume"
    done = subprocess.run(['bash', '-c', limited], cwd=repo, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2 and 'Traceback' not in done.stderr, done.stderr
    assert 'ckpt.pt' in done.stderr.splitlines()[-1], done.stderr
    assert same(weights(repo / 'out' / 'ckpt.pt'), before)


def test_resuming_with_a_shorter_window(repo):
    assert train(repo, '--max_iters=10').returncode == 0
    done = train(repo, '--init_from=resume', '--block_size=8', '--max_iters=12', '--eval_interval=12')
    assert done.returncode == 0, done.stderr
    saved = checkpoints.load(str(repo / 'out' / 'ckpt.pt'))
    assert saved['model_args']['block_size'] == 8
    moments = [s['exp_avg'].shape for s in saved['optimizer']['state'].values()]
    assert saved['model']['transformer.wpe.weight'].shape == (8, 16) and (8, 16) in moments and (16, 16) in moments


def test_resuming_on_another_vocabulary_is_refused(repo):
    assert train(repo, '--max_iters=10').returncode == 0
    path = repo / 'data' / 'shakespeare_char' / 'meta.json'
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {'chars': meta['chars'][::-1]}))
    assert_other_tokenizer(train(repo, '--init_from=resume'), 'characters in another order, than out/ckpt.pt')
    path.write_text(json.dumps({'kind': 'gpt2', 'dtype': 'uint16'}))
    n = len(meta['chars'])
    assert_other_tokenizer(train(repo, '--init_from=resume'), f"GPT-2's byte pairs, than out/ckpt.pt, {n} characters")


def assert_other_tokenizer(done, *texts):
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and 'Traceback' not in done.stderr and 'iter 0' not in done.stdout, done.stderr
    assert 'has another tokenizer, ' in last and all(text in last for text in texts), last


def test_a_pretrained_model_trains_on_data_of_its_tokenizer_only(repo):
    """A llama of transformers with a tokenizer of the tokenizers library; its chat template comes to the checkpoint."""
    transformers = pytest.importorskip('transformers')
    config = transformers.LlamaConfig(vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                      num_attention_heads=2, max_position_embeddings=16, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(repo / 'llama')
    text = byte_level_json(270, ['<|im_end|>'])
    (repo / 'llama' / 'tokenizer.json').write_text(text)
    (repo / 'llama' / 'chat_template.jinja').write_text('{{ messages }}<|im_end|>')
    settings = '--init_from=llama', '--max_iters=1'
    n = len(json.loads((repo / 'data' / 'shakespeare_char' / 'meta.json').read_text())['chars'])
    ours = 'than llama, a tokenizer.json of 271 tokens'
    assert_other_tokenizer(train(repo, *settings), f'{n} characters, {ours}')
    folder = repo / 'data' / 'mine'
    folder.mkdir()
    for split in ('train', 'val'):
        np.random.default_rng(0).integers(0, 270, 500, dtype=np.uint16).tofile(folder / f'{split}.bin')
    assert_other_tokenizer(train(repo, *settings, '--dataset=mine'), f"GPT-2's byte pairs, {ours}")
    (folder / 'tokenizer.json').write_text(byte_level_json(269))
    assert_other_tokenizer(train(repo, *settings, '--dataset=mine'), f'a tokenizer.json of 269 tokens, {ours}')
    (folder / 'tokenizer.json').write_text(byte_level_json(270))
    done = train(repo, *settings, '--dataset=mine')
    assert done.returncode == 0, done.stderr
    assert checkpoints.load(str(repo / 'out' / 'ckpt.pt'))['tokenizer']['chat_template'] == '{{ messages }}<|im_end|>'
    done = train(repo, '--dataset=mine', '--out_dir=new', '--max_iters=1')  # case 4: no meta.json at all
    assert done.returncode == 0, done.stderr
    assert checkpoints.load(str(repo / 'new' / 'ckpt.pt'))['model_args']['vocab_size'] == 270


def test_uint32_tokens_and_a_vocabulary_of_ones_own(repo):
    folder = repo / 'data' / 'mine'
    folder.mkdir()
    for split in ('train', 'val'):
        np.random.default_rng(0).integers(60000, 70000, 500, dtype=np.uint32).tofile(folder / f'{split}.bin')
    (folder / 'meta.json').write_text('{"vocab_size": 70000, "dtype": "uint32"}')
    done = train(repo, '--dataset=mine', '--max_iters=2')
    assert done.returncode == 0, done.stderr
    assert checkpoints.load(str(repo / 'out' / 'ckpt.pt'))['model_args']['vocab_size'] == 70000


def test_mixed_precision_on_the_cpu(repo):
    assert train(repo, '--dtype=bfloat16', '--max_iters=3').returncode == 0


def test_a_missing_character_data_set_is_prepared(repo):
    for name in ('train.bin', 'val.bin', 'meta.json'):
        os.remove(repo / 'data' / 'shakespeare_char' / name)
    done = train(repo, '--max_iters=1')
    assert done.returncode == 0 and 'running data/shakespeare_char/prepare.py' in done.stdout, done.stderr


def test_slow_iterations_are_said_once_on_stderr(capsys):
    """Five in a row, as beside another program; one that takes long, as a sleeping laptop has it, is passed over."""
    log = Log(None)
    for dt in [0.04, 0.03, 1.0, *[0.03] * 5, *[0.14] * 9, *[0.2, 0.2, 0.2, 0.2, 0.03]]:
        log.say_if_slow(dt)
    assert not capsys.readouterr().err
    for dt in [1.7] * 20 + [0.03] + [1.7] * 20:
        log.say_if_slow(dt)
    said, = capsys.readouterr().err.splitlines()
    assert 'takes 1,700 ms now and took 30 before' in said and 'OMP_NUM_THREADS' in said
