"""Several processes, with ddp and fsdp: the losses of one, checkpoints for any number, lost processes, refusals."""
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import TINY, run, sizes, start
from test_train import changed_train, log, rows, same, train, wait_for_rows, wait_until

import checkpoint as checkpoints
from training import parallel

# gentle: at the learning rate of TINY the last bits of a loss have grown to its third digit after 20 iterations
SETTINGS = '--gradient_accumulation_steps=4', '--dropout=0.0', '--learning_rate=1e-3', '--grad_clip=0.1'

BARE = """
import torch
import torch.distributed as dist
dist.init_process_group('gloo')
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
dist.barrier()
dist.destroy_process_group()
"""


def group(size):
    """What torchrun would tell each of `size` processes of one group."""
    with socket.create_server(('127.0.0.1', 0)) as listener:
        port = str(listener.getsockname()[1])
    return [dict(WORLD_SIZE=str(size), MASTER_ADDR='127.0.0.1', MASTER_PORT=port, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(size)]


def in_processes(repo, size, *command):
    """The results of a command in so many processes of one group."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda env: run(repo, *command, **env), group(size)))


def train_in(repo, size, *settings):
    """train.py in so many processes of one group. Returns the stdout of the first one."""
    done = in_processes(repo, size, 'train.py', *TINY, *settings)
    assert [each.returncode for each in done] == [0] * size, ''.join(each.stderr for each in done)
    return done[0].stdout


def torchrun(repo):
    """The beginning of a command that is torchrun with two processes, as a script: only its workers load torch."""
    (repo / 'torchrun.py').write_text('from torch.distributed.run import main\nmain()\n')
    return 'torchrun.py', '--standalone', '--nproc_per_node=2'


@pytest.fixture(scope='module')
def gloo(tmp_path_factory):
    """Skips tests where two processes cannot be a group: some sandboxes forbid what gloo needs, and torch aborts."""
    folder = tmp_path_factory.mktemp('gloo')
    (folder / 'bare.py').write_text(BARE)
    if failed := [each.stderr for each in in_processes(folder, 2, 'bare.py') if each.returncode]:
        pytest.skip(f"two processes of torch and gloo alone do not run here: {failed[0].strip().splitlines()[0]}")


@pytest.fixture
def two(repo, gloo):
    """The repository, for two processes."""
    return repo


def losses(folder):
    return [(row['iter'], float(row[column])) for row in log(folder)
            for column in ('batch_loss', 'train_loss', 'val_loss') if row[column]]


def assert_same_state(a, b):
    """The same weights and moments in two checkpoints, to the bit."""
    assert same(a['model'], b['model']) and list(a['model']) == list(b['model'])
    assert a['optimizer']['param_groups'] == b['optimizer']['param_groups']
    for number, state in a['optimizer']['state'].items():
        assert same(state, b['optimizer']['state'][number])


@pytest.mark.parametrize('settings', [
    ('--position=rope', '--window=6', '--n_sink=2', '--n_kv_head=1'), *sizes([], [()]),
    ('--optimizer=muon', '--muon_lr=1e-3', '--lr_schedule=wsd', '--mlp=swiglu'), ('--parallel=fsdp',),
    *sizes([], [('--parallel=fsdp', *more) for more in (
        ('--position=rope', '--window=6', '--n_sink=2', '--n_kv_head=1', '--norm=rms', '--mlp=swiglu'),
        ('--tied=False', '--bias=True', '--qk_norm=True', '--position=rope'), ('--dtype=bfloat16',),
        ('--dtype=float16',), ('--onednn=True', '--tied=False'), ('--dtype=bfloat16', '--onednn=True'))])])
def test_two_processes_compute_what_one_does(two, settings):
    end = '--max_iters=6', '--eval_interval=3'
    alone = [each for each in settings if each != '--parallel=fsdp']
    train(two, *SETTINGS, *end, *alone, '--out_dir=one', code=0)
    train_in(two, 2, *SETTINGS, *end, *settings, '--out_dir=two')
    is_float32 = not any('dtype' in each for each in settings)
    most = 2e-5 if is_float32 else 2e-3  # log.csv has six digits
    for (iter, x), (of, y) in zip(losses(two / 'one'), losses(two / 'two'), strict=True):
        assert iter == of and x == pytest.approx(y, abs=most), iter
    a, b = (checkpoints.load(str(two / name / 'ckpt.pt')) for name in ('one', 'two'))
    assert list(a['model']) == list(b['model']) and 'threads' in a and 'threads' not in b  # torchrun gives each one
    assert all(torch.allclose(w, b['model'][name], atol=1e-4 if is_float32 else 1e-2) for name, w in a['model'].items())


@pytest.mark.parametrize('way', ['ddp', 'fsdp'])
def test_two_processes_with_dropout_resume_exactly(two, way):
    settings = f'--parallel={way}', '--gradient_accumulation_steps=2', '--eval_interval=100'
    train_in(two, 2, *settings, '--max_iters=7', '--out_dir=a')
    train_in(two, 2, *settings, '--max_iters=3', '--out_dir=b')
    train_in(two, 2, *settings, '--max_iters=7', '--out_dir=b', '--init_from=resume')
    a, b = (checkpoints.load(str(two / name / 'ckpt.pt')) for name in 'ab')
    assert_same_state(a, b)


def test_a_run_goes_on_in_any_number_of_processes_each_with_the_whole_model_or_a_part(two):
    """Two processes are killed, and others go on. A checkpoint that is written again is the same, to the bit."""
    assert train(two, *SETTINGS, '--out_dir=one', '--max_iters=200').returncode == 0
    killed = [start(two, 'train.py', *TINY, *SETTINGS, '--parallel=fsdp', '--max_iters=1000000', '--eval_interval=5',
                    **env) for env in group(2)]
    wait_until(killed[0], lambda: rows(two / 'out') > 14)
    for process in killed:
        process.kill()
    for process in killed:
        process.communicate(timeout=300)
    before = checkpoints.load(str(two / 'out' / 'ckpt.pt'))
    hops = (2, 'fsdp', 0), (1, 'fsdp', 2), (0, 'ddp', 2), (2, 'ddp', 2), (0, 'ddp', 0), (2, 'fsdp', 2)
    for size, way, n in sizes(hops[::2] + hops[-1:], hops):
        settings = *SETTINGS, '--init_from=resume', f'--parallel={way}', f"--max_iters={before['iter_num'] + n}"
        said = train_in(two, size, *settings) if size else train(two, *settings).stdout
        after = checkpoints.load(str(two / 'out' / 'ckpt.pt'))
        assert f"resuming out/ckpt.pt at iteration {before['iter_num']}\n" in said
        assert after['iter_num'] == before['iter_num'] + n
        tied = [after['model'][name].data_ptr() for name in ('lm_head.weight', 'transformer.wte.weight')]
        assert tied[0] == tied[1]  # in the file once
        if n == 0:
            assert_same_state(before, after)
        before = after
    one, out = ([float(row['batch_loss']) for row in log(two / d) if row['batch_loss']] for d in ('one', 'out'))
    assert sizes(14, 18) <= len(out) == before['iter_num'] and one[:len(out)] == pytest.approx(out, abs=2e-5)


def test_a_sharded_model_is_cut_to_a_shorter_block_size(two):
    assert train(two, '--max_iters=2', '--position=learned').returncode == 0
    train_in(two, 2, *SETTINGS, '--parallel=fsdp', '--init_from=resume', '--block_size=8', '--max_iters=4')
    saved = checkpoints.load(str(two / 'out' / 'ckpt.pt'))
    moments = [state['exp_avg'].shape for state in saved['optimizer']['state'].values()]
    assert saved['model']['transformer.wpe.weight'].shape == (8, 16) and (8, 16) in moments and (16, 16) in moments


DIES_EARLY = """
from training import batches
if os.environ['RANK'] == '1':
    batches.open_tokens = lambda *args: os._exit(1)  # after a barrier, before the model is built
"""


def test_a_process_that_is_lost_before_the_first_iteration_is_one_line(two):
    assert train(two, '--max_iters=1').returncode == 0
    first, _ = in_processes(two, 2, changed_train(two, DIES_EARLY), *TINY, '--gradient_accumulation_steps=2')
    last = first.stderr.strip().splitlines()[-1]
    assert first.returncode == 2 and 'Traceback' not in first.stderr and 'another process of this run' in last
    assert 'has saved no checkpoint' in last and '--init_from' not in last  # the checkpoint in out is of another run


EVALUATES_LONG = """
import datetime
import torch.distributed.distributed_c10d as c10d
from training.log import Log
c10d.default_pg_timeout = datetime.timedelta(seconds=1)  # torch's limit, 30 minutes, scaled
report = Log.evaluation
Log.evaluation = lambda *args: time.sleep(1.5) or report(*args)
"""


def test_an_evaluation_that_is_longer_than_the_limit_of_torch_ends_no_run(two):
    done = in_processes(two, 2, changed_train(two, EVALUATES_LONG), *TINY, '--gradient_accumulation_steps=2',
                        '--max_iters=1', '--eval_interval=1000')
    assert [each.returncode for each in done] == [0, 0], done[0].stderr + done[1].stderr


@pytest.mark.parametrize('signum', sizes([], [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_to_torchrun_and_to_its_workers_saves(two, signum):
    """As a terminal or a job scheduler sends it; torchrun forwards its own copy to the workers."""
    settings = [*TINY, '--max_iters=1000000', '--eval_interval=1000000', '--gradient_accumulation_steps=2']
    script = changed_train(two, "open(f'worker{os.environ[\"RANK\"]}', 'w').write(str(os.getpid()))")
    process = start(two, *torchrun(two), script, *settings)
    wait_for_rows(process, two / 'out', 5)
    workers = [int((two / f'worker{rank}').read_text()) for rank in range(2)]
    for pid in [*workers, process.pid]:
        os.kill(pid, signum)
    out, err = process.communicate(timeout=300)
    assert 'saved to out/ckpt.pt' in out, out[-1000:] + err[-3000:]
    assert checkpoints.load(str(two / 'out' / 'ckpt.pt'))['iter_num'] > 0


KILLED_ONCE = """
from training.batches import Batches
draw = Batches.__call__
def draw_or_die(self, step):
    if self.key[0] == 1337 and step >= 4 * 13 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
        os.kill(os.getpid(), signal.SIGKILL)
    return draw(self, step)
if os.environ['RANK'] == '1':
    Batches.__call__ = draw_or_die
"""


@pytest.mark.skipif(not sizes(False, True), reason="in test-all")
def test_torchrun_restarts_a_resumed_run_that_has_lost_a_process(two):
    assert train(two, *SETTINGS, '--max_iters=1').returncode == 0
    done = run(two, *torchrun(two), '--max-restarts=1', changed_train(two, KILLED_ONCE), *TINY, *SETTINGS,
               '--parallel=fsdp', '--init_from=resume')
    assert done.returncode == 0 and 'the last good checkpoint is out/ckpt.pt' in done.stderr, done.stderr[-3000:]
    assert 'resuming out/ckpt.pt at iteration 10' in done.stdout
    assert checkpoints.load(str(two / 'out' / 'ckpt.pt'))['iter_num'] == 20


def test_a_failure_of_several_processes_is_said_in_a_line(repo):
    done = run(repo, *torchrun(repo), 'train.py', *TINY, '--gradient_accumulation_steps=3')
    assert done.returncode
    assert 'train.py: error: gradient_accumulation_steps 3 must be divisible by the 2 processes: add' in done.stderr


@pytest.mark.parametrize('rank, device, backend, gpus, message', [
    ('1', 'cpu', 'nccl', 0, '--backend=gloo'), ('1', 'cuda', 'nccl', 1, '--nproc_per_node=1'),
    ('1', 'cuda:0', 'auto', 2, '--device=cuda,'),
    (None, 'cuda', 'auto', 2, 'device=cuda needs LOCAL_RANK')])  # of another launcher than torchrun, perhaps
def test_devices_that_the_processes_cannot_have_are_refused(rank, device, backend, gpus, message, monkeypatch):
    monkeypatch.setattr(os, 'environ', {**os.environ, 'LOCAL_RANK': rank} if rank else {
        name: value for name, value in os.environ.items() if name != 'LOCAL_RANK'})
    monkeypatch.setattr(parallel, 'pick_device', lambda name: name)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: gpus)
    with pytest.raises(ValueError, match=message):
        parallel.join_processes(device, backend, 'ddp', 2)


@pytest.mark.parametrize('way, message', [('fsdp', 'torchrun'), ('tensor', "must be ddp or fsdp, not 'tensor'")])
def test_a_way_that_one_process_cannot_go_is_refused(way, message, monkeypatch):
    monkeypatch.delenv('RANK', raising=False)
    with pytest.raises(ValueError, match=message):
        parallel.check_way(way, 'cpu')


def test_what_says_that_a_process_is_lost():
    for error in (RuntimeError('[gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]'),
                  RuntimeError('connect: No route to host'), RuntimeError('Wait timeout after 600000 ms'),
                  torch.distributed.DistBackendError('NCCL communicator was aborted')):
        assert parallel.is_of_lost_process(error)
    for text in ("Distributed package doesn't have NCCL built in", 'mat1 and mat2 shapes cannot be multiplied'):
        assert not parallel.is_of_lost_process(RuntimeError(text))
