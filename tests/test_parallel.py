"""--parallel=fsdp: the losses of one process, checkpoints for any number of processes, lost processes, damage."""
import json
import os
import shutil
import socket

import filelock
import pytest
import torch
from conftest import ROOT, TINY, run, sizes, start
from test_train import log, rows, same, train, train_in_two_processes, wait_until

import checkpoint as checkpoints
from model import GPT, GPTConfig
from training import checkpointer, parallel, shards

# gentle: at the learning rate of TINY the last bits of a loss have grown to its third digit after 20 iterations
SETTINGS = '--gradient_accumulation_steps=4', '--dropout=0.0', '--learning_rate=1e-3', '--grad_clip=0.1'
FSDP = '--parallel=fsdp', *SETTINGS


def in_one_process(repo, *settings):
    """train.py with fsdp, as torchrun --nproc_per_node=1 starts it."""
    with socket.create_server(('127.0.0.1', 0)) as listener:
        port = str(listener.getsockname()[1])
    return train(repo, *FSDP, *settings, RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1',
                 MASTER_PORT=port)


def losses(folder):
    return [(row['iter'], float(row[column])) for row in log(folder)
            for column in ('batch_loss', 'train_loss', 'val_loss') if row[column]]


def assert_same_losses(a, b):
    assert [iter for iter, _ in losses(a)] == [iter for iter, _ in losses(b)]
    for (iter, x), (_, y) in zip(losses(a), losses(b)):
        assert x == pytest.approx(y, abs=2e-5), iter  # log.csv has six digits


def test_two_one_and_two_processes_train_as_one_does_though_the_first_two_are_killed(repo):
    one = train(repo, *SETTINGS, '--out_dir=one', '--max_iters=60')
    assert one.returncode == 0, one.stderr
    train_in_two_processes(repo, *FSDP, '--max_iters=1', '--out_dir=try')  # or skip
    with socket.create_server(('127.0.0.1', 0)) as listener:
        port = str(listener.getsockname()[1])
    group = dict(WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
    killed = [start(repo, 'train.py', *TINY, *FSDP, '--max_iters=1000000', '--out_dir=two', RANK=rank, LOCAL_RANK=rank,
                    **group) for rank in '01']
    wait_until(killed[0], lambda: rows(repo / 'two') > 14)
    for process in killed:
        process.kill()
    for process in killed:
        process.communicate(timeout=300)
    saved = shards.read_index(str(repo / 'two' / 'ckpt'))['checkpoint']['iter_num']
    done = in_one_process(repo, '--out_dir=two', '--init_from=resume', f'--max_iters={saved + 4}')
    assert done.returncode == 0 and f'resuming two/ckpt at iteration {saved}' in done.stdout, done.stderr
    end = saved + 8
    train_in_two_processes(repo, *FSDP, '--out_dir=two', '--init_from=resume', f'--max_iters={end}')
    one, two = ([float(row['batch_loss']) for row in log(repo / d) if row['batch_loss']] for d in ('one', 'two'))
    assert 18 <= len(two) == end and one[:end] == pytest.approx(two, abs=2e-5)  # log.csv has six digits
    assert run(repo, 'export.py', '--to=ckpt', '--out_dir=two').returncode == 0
    sampled = run(repo, 'sample.py', '--out_dir=two', '--num_samples=1', '--max_new_tokens=4', '--decoder=eager')
    assert sampled.returncode == 0 and f'iteration {end}' in sampled.stderr, sampled.stderr


KILLED_ONCE = """
import os, runpy, signal, sys
sys.path.insert(0, '.')
from training.batches import Batches
draw = Batches.__call__
def draw_or_die(self, step):
    if self.key[0] == 1337 and step >= 4 * 13 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
        os.kill(os.getpid(), signal.SIGKILL)
    return draw(self, step)
if os.environ['RANK'] == '1':
    Batches.__call__ = draw_or_die
sys.argv = sys.argv[1:]
runpy.run_path('train.py', run_name='__main__')
"""


@pytest.mark.parametrize('way', sizes(['fsdp'], ['fsdp', 'ddp']))
def test_torchrun_restarts_a_run_that_lost_a_process_and_it_goes_on_by_itself(repo, way):
    train_in_two_processes(repo, *FSDP, '--max_iters=1', '--out_dir=try')  # or skip
    (repo / 'killed_once.py').write_text(KILLED_ONCE)
    done = run(repo, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', '--max-restarts=1',
               'killed_once.py', 'train.py', *TINY, *SETTINGS, f'--parallel={way}')
    checkpoint = 'out/ckpt' if way == 'fsdp' else 'out/ckpt.pt'
    assert done.returncode == 0, done.stderr[-3000:]
    assert f'resuming {checkpoint} at iteration 10' in done.stdout and 'torchrun restarted this run' in done.stdout
    assert train(repo, *SETTINGS, '--out_dir=one').returncode == 0
    assert_same_losses(repo / 'one', repo / 'out')
    if 'Traceback (most' not in done.stderr:  # torchrun may have ended process 0 before that noticed
        assert f'the last good checkpoint is {checkpoint}' in done.stderr


def test_a_restarted_run_goes_on_from_its_own_checkpoint_only(tmp_path, monkeypatch):
    folder, written, path = tmp_path / 'out', tmp_path / 'out' / '.torchrun', tmp_path / 'out' / 'ckpt.pt'
    assert not checkpointer.Checkpointer(str(folder), resume=False, writes=True).run_name  # of one process
    monkeypatch.setenv('RANK', '0')
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'none')  # as torchrun names all runs by default
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '1')
    ours = checkpointer.Checkpointer(str(folder), resume=False, writes=False)
    assert not ours.has_saved()
    folder.mkdir()
    path.write_text('a checkpoint')
    assert checkpointer.run_name() == f'none {os.getppid()}'
    written.write_text('none 1')
    assert not ours.has_saved() and ours.last_good() == 'this run has saved no checkpoint yet'
    written.write_text(f'none {os.getppid()}')
    assert ours.has_saved() and ours.last_good().startswith(f'the last good checkpoint is {path}')
    checkpointer.Checkpointer(str(folder), resume=False, writes=True).lock.release()
    assert written.exists()
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '0')  # the first start removes an earlier run's name
    checkpointer.Checkpointer(str(folder), resume=False, writes=True)
    assert not written.exists()


@pytest.mark.parametrize('device, backend, gpus, message', [
    ('cpu', 'nccl', 0, '--backend=gloo'), ('cuda', 'nccl', 1, '--nproc_per_node=1'),
    ('cuda:0', 'auto', 2, '--device=cuda,'), ('cpu', 'mpi', 0, 'auto, nccl or gloo')])
def test_devices_that_the_processes_cannot_have_are_refused(device, backend, gpus, message, monkeypatch):
    monkeypatch.setenv('LOCAL_RANK', '1')
    monkeypatch.setattr(parallel, 'pick_device', lambda name: name)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: gpus)
    with pytest.raises(ValueError, match=message):
        parallel.join_processes(device, backend, 'ddp', 2)


@pytest.mark.skipif(not sizes(False, True), reason="in test-all")
@pytest.mark.parametrize('settings', [
    ('--position=rope', '--window=6', '--n_sink=2', '--n_kv_head=1', '--norm=rms', '--mlp=swiglu'),
    ('--tied=False', '--bias=True', '--qk_norm=True', '--position=rope'), ('--dtype=bfloat16',), ('--dtype=float16',),
    ('--onednn=True', '--tied=False'), ('--dtype=bfloat16', '--onednn=True')])
def test_other_models_and_dtypes_train_as_with_one_process(repo, settings):
    assert train(repo, *SETTINGS, *settings, '--out_dir=one').returncode == 0
    train_in_two_processes(repo, *FSDP, *settings, '--out_dir=two')
    tolerance = 2e-3 if 'dtype' in settings[0] else 2e-5
    for (iter, x), (_, y) in zip(losses(repo / 'one'), losses(repo / 'two'), strict=True):
        assert x == pytest.approx(y, abs=tolerance), iter


@pytest.mark.skipif(not sizes(False, True), reason="in test-all")
def test_a_signal_and_dropout_resume_exactly(repo):
    for out_dir, ends in (('a', (20,)), ('b', (7, 20))):
        for end in ends:
            init = ('--init_from=resume',) if end != ends[0] else ()
            train_in_two_processes(repo, *FSDP, '--dropout=0.1', f'--out_dir={out_dir}', f'--max_iters={end}', *init)
        assert run(repo, 'export.py', '--to=ckpt', f'--out_dir={out_dir}').returncode == 0
    a, b = (checkpoints.load(str(repo / d / 'ckpt.pt')) for d in 'ab')
    assert same(a['model'], b['model'])


@pytest.fixture
def sharded(trained, tmp_path):
    """A folder with the ckpt.pt of `trained`, and a sharded checkpoint that was made of it."""
    shutil.copy(trained / 'out' / 'ckpt.pt', tmp_path)
    assert shards.to_shards(str(tmp_path), GPT, GPTConfig) == (str(tmp_path / 'ckpt'), 20)
    return tmp_path


def test_a_checkpoint_there_and_back_has_the_same_tensors(sharded):
    before = checkpoints.load(str(sharded / 'ckpt.pt'))
    os.remove(sharded / 'ckpt.pt')
    assert shards.to_ckpt(str(sharded), GPT, GPTConfig) == (str(sharded / 'ckpt.pt'), 20)
    after = checkpoints.load(str(sharded / 'ckpt.pt'))
    assert same(before['model'], after['model']) and list(before['model']) == list(after['model'])
    for number, state in before['optimizer']['state'].items():
        assert same(state, after['optimizer']['state'][number])
    assert before['optimizer']['param_groups'] == after['optimizer']['param_groups']
    for key in 'model_args', 'iter_num', 'best_val_loss', 'config', 'tokenizer', 'scaler':
        assert before[key] == after[key]


def test_what_is_further_along_is_not_replaced(sharded, monkeypatch):
    """ckpt.pt or ckpt, or ckpt_interrupted.pt, which a resumed run would take."""
    ckpt, interrupted = str(sharded / 'ckpt.pt'), str(sharded / 'ckpt_interrupted.pt')
    saved = checkpoints.load(ckpt)
    checkpoints.save(saved | {'iter_num': 21}, interrupted)
    with pytest.raises(ValueError, match='ckpt_interrupted.pt is at iteration 21, .* which is at 20: move'):
        shards.to_ckpt(str(sharded), GPT, GPTConfig)
    assert shards.to_shards(str(sharded), GPT, GPTConfig)[1] == 21
    os.remove(interrupted)
    with pytest.raises(ValueError, match='ckpt is at iteration 21, .* which is at 20: move'):
        shards.to_shards(str(sharded), GPT, GPTConfig)
    assert shards.to_ckpt(str(sharded), GPT, GPTConfig)[1] == 21
    with filelock.FileLock(sharded / '.lock'):
        done = run(sharded, os.path.join(ROOT, 'export.py'), '--to=shards', f'--out_dir={sharded}')
    assert_one_line(done, 'another process is training in')


def test_a_run_with_muon_is_not_made_into_shards_which_could_not_go_on(sharded):
    path = str(sharded / 'ckpt.pt')
    saved = checkpoints.load(path)
    checkpoints.save(saved | {'config': saved['config'] | {'optimizer': 'muon'}}, path)
    with pytest.raises(ValueError, match='optimizer=muon, which needs whole matrices'):
        shards.to_shards(str(sharded), GPT, GPTConfig)


def test_nothing_in_a_sharded_checkpoint_is_a_pickle(sharded):
    names = [name for _, _, files in os.walk(sharded / 'ckpt') for name in files]
    assert sorted(name.rpartition('.')[2] for name in names) == ['json', 'safetensors']


def test_a_save_replaces_the_one_before_and_what_killed_ones_left(sharded):
    (sharded / 'ckpt' / '00000030-0123abcd').mkdir()
    (sharded / 'ckpt' / 'index.json.ab.tmp').write_text('{')
    (sharded / 'ckpt_interrupted' / '00000030-0123abcd').mkdir(parents=True)
    shards.ShardedCheckpointer(str(sharded), resume=True, writes=True).lock.release()
    assert not list((sharded / 'ckpt_interrupted').iterdir())
    shards.to_shards(str(sharded), GPT, GPTConfig)
    name = shards.read_index(str(sharded / 'ckpt'))['shards']
    assert sorted(os.listdir(sharded / 'ckpt')) == sorted([name, 'index.json'])


def break_index(change):
    def breaks(folder, shard):
        index = json.loads((folder / 'index.json').read_text())
        change(index)
        (folder / 'index.json').write_text(json.dumps(index))
    return breaks


def flip_a_byte(folder, shard):
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize('breaks, message', [
    (lambda folder, shard: shard.unlink(), 'is missing'),
    (flip_a_byte, 'is damaged'),
    (lambda folder, shard: shard.write_bytes(shard.read_bytes()[:-100]), 'is damaged'),
    (lambda folder, shard: shutil.copy(shard, shard.parent / 'more.safetensors'), 'does not name'),
    (lambda folder, shard: (folder / 'index.json').write_text('{'), 'cannot be read'),
    (lambda folder, shard: (folder / 'index.json').unlink(), 'has a ckpt.pt'),
    (break_index(lambda index: index.update(shards='../elsewhere')), 'no name that train.py gives'),
    (break_index(lambda index: index.update(files={'../x.safetensors': [0, 0]})), 'names without a folder'),
    (break_index(lambda index: index.pop('tensors')), 'must have'),
    (break_index(lambda index: index['checkpoint']['model_args'].update(n_embd=32)), 'does not fit the model'),
    (break_index(lambda index: index['checkpoint']['model_args'].update(n_head=3)), 'make no model'),
    (break_index(lambda index: index['checkpoint'].pop('optimizer')), 'cannot be read'),
    (break_index(lambda index: index['tensors'].update({'model.x': ['float32', 2]})), 'does not fit the model'),
    (break_index(lambda index: index['tensors'].update({'optimizer.0.x': ['float32', 2]})), 'cannot be read'),
    (break_index(lambda index: index['tensors'].update({'optimizer.x': ['float32', 2]})), 'cannot be read')])
def test_a_damaged_folder_is_an_error_that_names_it(sharded, breaks, message):
    folder = sharded / 'ckpt'
    shard, = folder.glob('*/*.safetensors')
    breaks(folder, shard)
    with pytest.raises(ValueError, match=message):
        shards.to_ckpt(str(sharded), GPT, GPTConfig)


def assert_one_line(done, *parts):
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and 'Traceback' not in done.stderr, done.stderr
    assert all(part in last for part in parts), last


def test_what_does_not_go_together_is_one_line(repo, trained):
    assert_one_line(train(repo, '--parallel=fsdp'), 'torchrun')
    assert_one_line(train(repo, '--parallel=tensor'), "must be ddp or fsdp, not 'tensor'")
    assert_one_line(run(repo, 'export.py', '--to=shards', '--out_dir=out'), 'no checkpoint out/ckpt.pt')
    assert_one_line(run(repo, 'export.py', '--to=ckpt', '--out_dir=out'), 'no out/ckpt/index.json')
    (repo / 'out').mkdir()
    shutil.copy(trained / 'out' / 'ckpt.pt', repo / 'out')
    assert_one_line(in_one_process(repo, '--init_from=resume'), 'export.py --to=shards')
    assert run(repo, 'export.py', '--to=shards', '--out_dir=out').returncode == 0
    os.remove(repo / 'out' / 'ckpt.pt')
    assert_one_line(train(repo, '--init_from=resume'), 'export.py --to=ckpt --out_dir=out')
    assert_one_line(run(repo, 'sample.py', '--out_dir=out'), 'export.py --to=ckpt --out_dir=out')
    assert_one_line(in_one_process(repo, '--init_from=resume', '--block_size=8'), 'is not cut')
    shard, = (repo / 'out' / 'ckpt').glob('*/*.safetensors')
    flip_a_byte(None, shard)
    assert_one_line(in_one_process(repo, '--init_from=resume'), 'is damaged')


def test_what_says_that_a_process_is_lost():
    for text in ('[gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]', 'connect: No route to host'):
        assert parallel.what_is_lost(RuntimeError(text))
    assert parallel.what_is_lost(torch.distributed.DistBackendError('NCCL communicator was aborted'))
    assert not parallel.what_is_lost(RuntimeError("Distributed package doesn't have NCCL built in"))
    assert not parallel.what_is_lost(RuntimeError('mat1 and mat2 shapes cannot be multiplied'))
    assert not parallel.what_is_lost(ValueError('connection closed'))
    assert 'has ended' in parallel.what_is_lost(RuntimeError('Connection closed by peer [::1]'))
    for text in ('Timed out waiting 1800000ms for recv operation to complete', 'Wait timeout after 600000 ms'):
        assert 'not answered in time' in parallel.what_is_lost(RuntimeError(text))  # nobody is said to have ended
