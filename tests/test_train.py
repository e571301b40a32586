"""train.py as its users run it: what a run leaves, what it takes, and what is said when it cannot go on."""
import copy
import csv
import json
import os
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, run, sizes, start_training
from test_data import byte_level_json

import checkpoint as checkpoints
from model import GPT, GPTConfig
from training.log import Log

FOREVER = '--max_iters=1000000', '--eval_interval=1000000'


def train(repo, *settings, **env):
    return run(repo, 'train.py', *TINY, *settings, **env)


def changed_train(repo, code):
    """Write a script that runs this code and then train.py, with its own arguments. Returns its name."""
    (repo / 'changed.py').write_text(f"import os, runpy, signal, sys, time\nsys.path.insert(0, '.')\n{code}\n"
                                     "runpy.run_path('train.py', run_name='__main__')\n")
    return 'changed.py'


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def log(folder):
    with open(folder / 'log.csv', newline='') as f:
        return list(csv.DictReader(f))


def with_a_run(repo, trained):
    """The repository with a finished run of 20 iterations in out/."""
    shutil.copytree(trained / 'out', repo / 'out')
    return repo


def rows(folder, name='log.csv'):
    """How many lines a log has."""
    return (folder / name).read_text().count('\n') if (folder / name).exists() else 0


def wait_until(process, done):
    """Wait until done() is true, which must come about before the process ends."""
    while not done():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def wait_for_rows(process, folder, n, name='log.csv'):
    wait_until(process, lambda: rows(folder, name) > n)


def stopped(process, signum=signal.SIGTERM):
    """(stdout, stderr) of a run that is sent a signal, stops, and does not fail."""
    process.send_signal(signum)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and 'Traceback' not in err, out + err
    return out, err


def test_a_run_leaves_checkpoint_log_and_curve(trained):
    rows = log(trained / 'out')
    assert [int(r['iter']) for r in rows if r['val_loss']] == [0, 10, 20]
    assert [int(r['iter']) for r in rows if r['batch_loss']] == list(range(20))
    losses = [float(r['val_loss']) for r in rows if r['val_loss']]
    assert losses[-1] < losses[0]
    assert (trained / 'out' / 'loss.png').exists()
    saved = checkpoints.load(str(trained / 'out' / 'ckpt.pt'))
    assert {'model', 'optimizer', 'model_args', 'iter_num', 'best_val_loss', 'config', 'tokenizer', 'rng',
            'scaler'} <= set(saved)
    assert saved['iter_num'] == 20 and saved['config']['n_embd'] == 16
    out = (trained / 'train.log').read_text()
    assert 'input.txt' in out and 'iter 19: loss' in out and 'step 20: train loss' in out
    assert 'python sample.py --out_dir=out draws samples' in out.splitlines()[-1]


def test_a_run_that_fails_keeps_the_files_and_says_why_in_one_line(repo, trained):
    """With a loss that is not finite, which is said as soon as the loss shows it, and with a full disk."""
    finished = with_a_run(repo, trained)
    ckpt, rows = (finished / 'out' / 'ckpt.pt').read_bytes(), log(finished / 'out')
    bad = '--max_iters=40', '--learning_rate=1e30', '--decay_lr=False', '--grad_clip=0.0', '--eval_interval=100'
    full = changed_train(repo, 'import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))')
    for done, *texts in (
            (train(finished, '--init_from=resume', *bad), 'iteration 21, lr 1.00e+30: ',
             '; try lower learning rates; the last good checkpoint is out/ckpt.pt: to go on'),
            (run(finished, full, *TINY, '--init_from=resume', '--max_iters=30'),
             'ckpt.pt could not be written (', 'the file that was there is as it was')):
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 2 and 'Traceback' not in done.stderr, done.stderr
        assert last.startswith('train.py: error: ') and all(text in last for text in texts), last
    assert (finished / 'out' / 'ckpt.pt').read_bytes() == ckpt and log(finished / 'out')[:len(rows) - 1] == rows[:-1]


def test_a_second_run_in_a_live_out_dir_is_refused_and_a_crash_leaves_no_lock(repo):
    pytest.importorskip('fcntl')
    first = start_training(repo, *FOREVER)
    wait_for_rows(first, repo / 'out', 5)
    second = run(repo, 'train.py', *TINY)
    assert second.returncode == 2 and 'another process is training in out' in second.stderr.splitlines()[-1]
    evaluated = run(repo, 'train.py', *TINY, '--eval_only=True')  # writes nothing
    assert evaluated.returncode == 0 and 'step 0: train loss' in evaluated.stdout
    first.kill()
    first.communicate()
    assert run(repo, 'train.py', *TINY, '--max_iters=1').returncode == 0
    assert sorted(os.listdir(repo / 'out')) == ['.lock', 'ckpt.pt', 'log.csv', 'loss.png']


def test_what_happens_after_the_reader_has_left_is_said_on_stderr(repo):
    process = start_training(repo, *FOREVER)
    process.stdout.readline()
    wait_for_rows(process, repo / 'out', 3)
    process.stdout.close()
    try:
        code = process.wait(timeout=60)
    finally:
        process.kill()
    with process.stderr as f:
        err = f.read()
    assert code == 0 and 'stopped at iteration' in err and 'saved to out/ckpt.pt' in err
    assert 'stdout cannot be written (Broken pipe): the run saves and stops' in err


@pytest.mark.parametrize('script', ['train.py', 'data/shakespeare/prepare.py'])
def test_without_torch_a_script_says_what_to_do(script):
    """python -S sees no site-packages."""
    done = run(ROOT, '-S', script)
    assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr
    assert 'has no torch' in done.stderr and '.venv/bin/activate' in done.stderr


def assert_other_tokenizer(done, *texts):
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and 'Traceback' not in done.stderr and 'iter 0' not in done.stdout, done.stderr
    assert 'has another tokenizer, ' in last and all(text in last for text in texts), last


def test_a_pretrained_model_trains_on_data_of_its_tokenizer_only_and_keeps_its_shape(repo):
    """A starcoder2 of transformers, with a window, a tokenizer.json and a template, which come to the checkpoint."""
    transformers = pytest.importorskip('transformers')
    config = transformers.Starcoder2Config(
        vocab_size=300, hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, sliding_window=7, tie_word_embeddings=True)
    transformers.Starcoder2ForCausalLM(config).save_pretrained(repo / 'hf')
    (repo / 'hf' / 'tokenizer.json').write_text(byte_level_json(270, ['<|im_end|>']))
    (repo / 'hf' / 'chat_template.jinja').write_text('{{ messages }}<|im_end|>')
    settings = '--init_from=hf', '--max_iters=2', '--eval_interval=2', '--window=0'
    n = len(json.loads((repo / 'data' / 'shakespeare_char' / 'meta.json').read_text())['chars'])
    ours = 'than hf, a tokenizer.json of 271 tokens'
    assert_other_tokenizer(train(repo, *settings), f'{n} characters, {ours}')
    folder = repo / 'data' / 'mine'
    folder.mkdir()
    for split in ('train', 'val'):
        np.random.default_rng(0).integers(0, 270, 500, dtype=np.uint16).tofile(folder / f'{split}.bin')
    (folder / 'tokenizer.json').write_text(byte_level_json(269))
    assert_other_tokenizer(train(repo, *settings, '--dataset=mine'), f'a tokenizer.json of 269 tokens, {ours}')
    (folder / 'tokenizer.json').write_text(byte_level_json(270))
    done = train(repo, *settings, '--dataset=mine', code=0)
    assert 'window stays 7, as in the weights of hf: window=0 (command line) has no effect' in done.stdout
    saved = checkpoints.load(str(repo / 'out' / 'ckpt.pt'))
    kept = dict(block_size=16, window=7, position='rope', n_kv_head=2, gelu='tanh')
    assert saved['tokenizer']['chat_template'] == '{{ messages }}<|im_end|>'
    assert kept.items() <= saved['model_args'].items()
    on = train(repo, '--dataset=mine', '--init_from=resume', '--max_iters=3', '--eval_interval=3')
    assert on.returncode == 0 and 'stays' not in on.stdout.replace('n_head stays', ''), on.stderr
    short = train(repo, *settings, '--dataset=mine', '--block_size=7')
    assert short.returncode == 2 and 'block_size 7 must be more than' in short.stderr.splitlines()[-1]
    train(repo, '--dataset=mine', '--out_dir=new', '--max_iters=1', code=0)  # without a meta.json
    assert checkpoints.load(str(repo / 'new' / 'ckpt.pt'))['model_args']['vocab_size'] == 270
    (folder / 'tokenizer.json').write_text(byte_level_json(269))
    assert_other_tokenizer(train(repo, '--dataset=mine', '--init_from=resume'), 'of 269 tokens, than out/ckpt.pt')


def test_a_missing_character_data_set_is_prepared(repo):
    for name in ('train.bin', 'val.bin', 'meta.json'):
        os.remove(repo / 'data' / 'shakespeare_char' / name)
    done = train(repo, '--max_iters=1')
    assert done.returncode == 0 and 'running data/shakespeare_char/prepare.py' in done.stdout, done.stderr


@pytest.mark.parametrize('config, settings, args', [
    ('train_shakespeare_char', ('--position=rope', '--window=16', '--n_sink=4'),
     dict(position='rope', window=16, n_sink=4)),
    ('train_shakespeare_char_fast', ('--dtype=float32',), dict(position='rope'))])
def test_a_config_trains_a_model_of_its_kind(repo, config, settings, args):
    """The recipe has Muon, and a model with a window goes on past its block_size."""
    run(repo, 'train.py', f'config/{config}.py', '--device=cpu', '--max_iters=2', '--eval_interval=2',
        '--eval_iters=1', '--batch_size=2', '--block_size=32', '--n_layer=2', '--n_head=2', '--n_embd=16',
        '--out_dir=new', *settings, code=0)
    saved = checkpoints.load(str(repo / 'new' / 'ckpt.pt'))
    assert args.items() <= saved['model_args'].items()
    assert len(saved['optimizer']['param_groups']) == 2 + config.endswith('_fast')
    model, idx = checkpoints.build(saved, GPT, GPTConfig).eval(), torch.tensor([[1]])
    cached = model.generate(idx, 100, temperature=0, use_cache=True)
    assert torch.equal(cached, model.generate(idx, 100, temperature=0)) and cached.shape == (1, 101)


# what is traced is the same with either backend; inductor also compiles it, to C++
@pytest.mark.parametrize('backend', sizes(['aot_eager'], ['aot_eager', 'inductor']))
@pytest.mark.parametrize('kind', [dict(position='rope', n_kv_head=1, window=5, n_sink=2),
                                  *sizes([], [dict(), dict(position='alibi')])])
def test_a_compiled_training_step_is_the_step(kind, backend):
    torch._dynamo.reset()
    try:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    except Exception as e:
        pytest.skip(f"torch.compile does not run here: {type(e).__name__}, {str(e).splitlines()[0]}")
    losses = []
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=11, n_layer=2, n_head=4, n_embd=32, bias=False, **kind))
    twin, (idx, targets) = copy.deepcopy(model), torch.randint(11, (2, 3, 16))
    for each, forward in (model, model), (twin, torch.compile(twin, backend=backend)):
        optimizer = each.configure_optimizers(0.1, 1e-2, (0.9, 0.95), 'cpu')
        for _ in range(2):
            loss = forward(idx, targets)[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
    assert losses[2:] == pytest.approx(losses[:2], abs=1e-5) and losses[1] < losses[0]
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        assert torch.allclose(p, q, atol=1e-3), name  # AdamW's first step divides each gradient by itself


def test_the_curves_are_a_picture(trained, tmp_path, monkeypatch, capsys):
    """A run goes on without matplotlib, and where that finds no folder to write to."""
    shutil.copy(trained / 'out' / 'log.csv', tmp_path)
    log = Log(None)
    log.open_files(str(tmp_path), 20, 20)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, 'matplotlib.figure', None)
        log.save_picture(last=True)
    assert 'the run goes on without it' in capsys.readouterr().out and not (tmp_path / 'loss.png').exists()
    log.save_picture(last=True)
    log.close()
    picture = (tmp_path / 'loss.png').read_bytes()
    assert picture.startswith(b'\x89PNG') and len(picture) > 9000


@pytest.mark.parametrize('damage', [b'6,0.1\xff\xfe,4.4\n', bytes(200_000), b'6'])
def test_a_damaged_log_keeps_the_rows_before(trained, tmp_path, damage):
    whole = (trained / 'out' / 'log.csv').read_bytes()
    (tmp_path / 'log.csv').write_bytes(whole + damage)
    log = Log(None)
    log.open_files(str(tmp_path), 1000, 2000)
    log.close()
    assert (tmp_path / 'log.csv').read_bytes().startswith(whole)


def test_a_run_goes_on_without_a_log_that_cannot_be_written_and_stops_without_stdout(tmp_path, capsys):
    def full(*_):
        raise OSError(28, 'No space left on device')
    log = Log(SimpleNamespace(asked=False))
    log.open_files(str(tmp_path), 0, 9)
    log.file.close()
    log.file = SimpleNamespace(name='log.csv', write=full, close=full)
    for _ in range(2):
        log.row(iter=1, lr=0.1)
    said = "log.csv cannot be written (No space left on device), and the run goes on without it\n"
    assert capsys.readouterr().out == said
    with open(tmp_path / 'stdout', 'w') as f:
        log.stream = SimpleNamespace(write=full, flush=full, fileno=f.fileno)
        log.say('a')
        log.say('b')
    assert log.stop.asked and capsys.readouterr().err.endswith('b\n')
