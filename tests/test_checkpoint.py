"""Checkpoints: never half-written, loaded without running what is in them; nanoGPT's load too."""
import json
import os
import pickle
import subprocess
import sys
import zipfile
from contextlib import nullcontext

import pytest
import torch
from conftest import ROOT, sizes

import checkpoint as checkpoints
from checkpoint import SIZES
from model import GPT, GPTConfig
from training.checkpointer import Checkpointer, restore_rng


def small():
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=1, n_embd=8, bias=False)).eval()


def nanogpt_checkpoint(model):
    """As nanoGPT saves it: no tokenizer, no RNG. An old one: mask buffers, and the prefix of a compiled model."""
    args = dict(n_layer=1, n_head=1, n_embd=8, block_size=8, bias=False, vocab_size=11, dropout=0.0)
    state = {'_orig_mod.' + k: v for k, v in model.state_dict().items()}
    state['_orig_mod.transformer.h.0.attn.bias'] = torch.ones(1, 1, 8, 8)
    return {'model': state, 'optimizer': {}, 'model_args': args, 'iter_num': 5, 'best_val_loss': torch.tensor(1.5),
            'config': {'dataset': 'mine', 'learning_rate': 1e-3}}


def test_a_checkpoint_of_nanogpt_loads(tmp_path, monkeypatch):
    model = small()
    torch.save(nanogpt_checkpoint(model), tmp_path / 'ckpt.pt')
    loaded = checkpoints.load(str(tmp_path / 'ckpt.pt'))
    again = checkpoints.build(loaded, GPT, GPTConfig).eval()
    idx = torch.randint(11, (1, 8))
    assert torch.equal(again(idx)[0], model(idx)[0])
    os.makedirs(tmp_path / 'data' / 'mine')
    chars = sorted(set('hello world'))
    meta = {'vocab_size': len(chars), 'itos': dict(enumerate(chars)), 'stoi': {c: i for i, c in enumerate(chars)}}
    with open(tmp_path / 'data' / 'mine' / 'meta.pkl', 'wb') as f:
        pickle.dump(meta, f)
    monkeypatch.chdir(tmp_path)
    assert checkpoints.tokenizer_of(loaded).chars == chars


def test_a_failed_save_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = str(tmp_path / 'ckpt.pt')
    checkpoints.save({'model': {}, 'model_args': {}, 'n': 1}, path)

    for error in (OSError('disk full'), RuntimeError('[enforce fail at inline_container.cc] unexpected pos')):
        def half(obj, f, error=error):
            f.write(b'half a checkpoint')
            raise error
        monkeypatch.setattr(torch, 'save', half)
        with pytest.raises(OSError, match='disk full|ckpt.pt could not be written'):
            checkpoints.save({'n': 2}, path)
    assert checkpoints.load(path)['n'] == 1 and os.listdir(tmp_path) == ['ckpt.pt']


class Evil:
    def __reduce__(self):
        return os.mkdir, ('evil',)


def test_code_in_a_checkpoint_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({'model': {}, 'model_args': {}, 'x': Evil()}, 'ckpt.pt')
    with pytest.raises(ValueError, match='ckpt.pt cannot be read'):
        checkpoints.load('ckpt.pt')
    assert not os.path.exists('evil')


def test_what_is_no_checkpoint_ends_in_one_line(tmp_path):
    path = tmp_path / 'ckpt.pt'
    checkpoints.save(nanogpt_checkpoint(small()), str(path))
    whole = path.read_bytes()
    torch.save(nanogpt_checkpoint(small()), path, _use_new_zipfile_serialization=False)
    old_format = path.read_bytes()  # of torch before 1.6, which has no checksums
    for content in (b'', b'nonsense', b'PK\x03\x04 torn', whole[:10], whole[:len(whole) // 2], whole[:-1], old_format):
        path.write_bytes(content)
        with pytest.raises(ValueError, match='cannot be read'):
            checkpoints.load(str(path))
    torch.save({'weights': 1}, path)
    with pytest.raises(ValueError, match='not a checkpoint'):
        checkpoints.load(str(path))
    with pytest.raises(ValueError, match='train one first'):
        checkpoints.load(str(tmp_path / 'nothing.pt'))


def test_newest_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert checkpoints.newest_first() == []
    for i, name in enumerate(('out', 'out-b', 'other')):
        os.makedirs(name)
        open(f'{name}/ckpt.pt', 'w').write(json.dumps(i))
        os.utime(f'{name}/ckpt.pt', (i, i))
    assert checkpoints.newest_first() == ['out-b/ckpt.pt', 'out/ckpt.pt']


def equal(a, b):
    """Are two checkpoints the same, tensors bit for bit?"""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """(bytes of a checkpoint, what is in it, a path to write damaged copies to)."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=40, n_layer=1, n_head=1, n_embd=16, bias=False))
    path = str(tmp_path_factory.mktemp('whole') / 'ckpt.pt')
    checkpoints.save({'model': model.state_dict(), 'model_args': dict(vars(model.config)), 'iter_num': 3,
                      'best_val_loss': 1.5, 'config': {'dataset': 'mine'},
                      'tokenizer': {'kind': 'char', 'chars': 'abc'}}, path)
    with open(path, 'rb') as f:
        return f.read(), checkpoints.load(path), path


def load_damaged(whole, damaged):
    """Load the bytes: they are refused with a ValueError, or they load with the content of the whole file."""
    _, content, path = whole
    with open(path, 'wb') as f:
        f.write(damaged)
    try:
        loaded = checkpoints.load(path)
    except ValueError:
        return False
    assert equal(loaded, content)
    return True


@pytest.mark.parametrize('size, inverted', [(1, True), (128, False)])  # of a disk's sector, for a small checkpoint
def test_no_flipped_byte_and_no_zeroed_sector_loads_as_something_else(whole, size, inverted):
    content, loaded = whole[0], []
    for start in range(0, len(content), size * sizes(97, 7) if inverted else size):
        part = bytes(255 - byte if inverted else 0 for byte in content[start:start + size])
        loaded.append(load_damaged(whole, content[:start] + part + content[start + size:]))
    assert len(loaded) > 100 and sum(loaded) < len(loaded) / 2  # what loads had nothing but padding or zeros there


def test_no_flipped_bit_of_the_zip_directory_loads_as_something_else(whole):
    """One of them marks an entry as a folder, for which torch's reader returns uninitialised memory."""
    content, start = whole[0], whole[0].index(b'PK\x01\x02')
    refused = [load_damaged(whole, content[:i] + bytes([content[i] ^ 1 << bit]) + content[i + 1:])
               for i in range(start, len(content)) for bit in (4, i % 8)]
    with open(whole[2], 'wb') as f:
        f.write(content)
    with zipfile.ZipFile(whole[2]) as archive:
        n_entries = len(archive.infolist())
    first = start + 38  # external attributes
    assert n_entries > 5 and not load_damaged(whole, content[:first] + b'\x10' + content[first + 1:])
    assert not all(refused)


WRONG = [
    (dict(model=[1]), 'model must be of type dict, not list'), (dict(model={'w': 1}), 'names and dense tensors'),
    (dict(model={1: torch.ones(1)}), 'names and dense tensors'),
    (dict(model={'w': torch.ones(1).to_sparse()}), 'names and dense tensors'),
    (dict(model_args=None), 'model_args must be of type dict'),
    (dict(model_args={1: 2}), 'names as keys'), (dict(iter_num='5'), 'iter_num must be of type int, not str'),
    (dict(iter_num=True), 'iter_num must be'), (dict(iter_num=-1), 'iter_num must be at least 0'),
    (dict(threads=0), 'threads must be at least 1'),
    (dict(best_val_loss='low'), 'best_val_loss must be a number'), (dict(best_val_loss=torch.ones(2)), 'best_val_loss'),
    (dict(config=[]), 'config must be of type dict'), (dict(tokenizer='char'), 'tokenizer must be of type dict'),
    (dict(tokenizer={'chars': 'ab'}), "with its kind"), (dict(tokenizer={'kind': 'char'}), 'chars, a string'),
    (dict(optimizer=3), 'optimizer must be of type dict'), (dict(scaler=3), 'scaler must be of type dict'),
]


@pytest.mark.parametrize('change, message', WRONG)
def test_wrong_contents_are_refused_in_words(tmp_path, change, message):
    path = str(tmp_path / 'ckpt.pt')
    torch.save(nanogpt_checkpoint(small()) | change, path)
    with pytest.raises(ValueError, match=f'ckpt.pt is not a checkpoint of train.py: .*{message}'):
        checkpoints.load(path)


@pytest.mark.parametrize('rng', [{}, {'torch': 3, 'cuda': []}, {'torch': torch.ones(3), 'cuda': []}])
def test_wrong_states_of_generators_are_refused_in_words(rng):
    with pytest.raises(ValueError, match="the checkpoint's rng is no state"):
        restore_rng(rng)


@pytest.mark.parametrize('change, message', [
    (dict(n_layer='1'), "n_layer must be a positive integer up to 4,096, not '1'"), (dict(n_head=None), 'not None'),
    (dict(dropout='0'), r"dropout must be in \[0, 1\), not '0'"),
    (dict(bias=0), 'bias must be True or False, not 0'), (dict(n_embd=True), 'positive integer .* not True'),
    *[({name: size}, f'{name} must be .* up to') for name in SIZES for size in (0, 2**62)],
    (dict(n_layer=10**6), 'n_layer must be .* up to 4,096'),
    # any number of heads fits the weights, so a default would compute something else in silence
    (dict(n_head=..., vocab_size=...), 'model_args lack n_head, vocab_size'),  # ...: left out
    (dict(bias=True), 'do not fit: .*Missing key'),
    # sizes that a GPTConfig may have, of models that are not built: they would take minutes, or all memory
    (dict(n_layer=4096), 'n_layer is 4096, but the weights have 1 layers'),
    (dict(vocab_size=2**24), r'n_embd are \(16777216, 8\), but wte.weight is \(11, 8\)'),
    (dict(block_size=2**24), r'n_embd are \(16777216, 8\), but wpe.weight is \(8, 8\)'),
    (dict(n_embd=2**24), r'n_embd are \(11, 16777216\), but wte.weight is'),
])
def test_wrong_model_args_are_refused_in_words(change, message):
    checkpoint = nanogpt_checkpoint(small())
    checkpoint['model_args'] = {k: v for k, v in (checkpoint['model_args'] | change).items() if v is not ...}
    with pytest.raises(ValueError, match=message):
        checkpoints.build(checkpoint, GPT, GPTConfig)


def test_a_weight_under_two_names_is_loaded_only_if_its_values_are_the_same():
    checkpoint, other = nanogpt_checkpoint(small()), torch.full((11, 8), float('nan'))
    args, state = checkpoint['model_args'], checkpoint['model']
    tied = '_orig_mod.lm_head.weight', '_orig_mod.transformer.wte.weight'
    for change, message in (
            ({name: other for name in tied}, None),
            ({'transformer.wte.weight': state[tied[1]].clone()}, None),
            ({tied[0]: other}, 'lm_head.weight is not wte.weight'),
            ({'transformer.ln_f.weight': torch.zeros(8)}, 'ln_f.weight are there twice, with different values')):
        changed = {'model': state | change, 'model_args': args}
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            checkpoints.build(changed, GPT, GPTConfig)


def trained_optimizer(model):
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu')
    model(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64))[1].backward()
    optimizer.step()
    return optimizer


def swap_moments(saved):
    saved['state'][0], saved['state'][1] = saved['state'][1], saved['state'][0]


@pytest.mark.parametrize('damage, message', [
    (lambda s: s.clear(), 'param_groups'),
    (lambda s: s.update(state=[]), ''),
    (lambda s: s.update(param_groups=[{}]), 'params'),
    (lambda s: s['param_groups'].pop(), 'is of .* parameters'),
    (lambda s: s['param_groups'][0]['params'].pop(), 'is of .* parameters'),
    (lambda s: s['param_groups'][0].update(lr='x'), 'must be numbers'),
    (lambda s: s['param_groups'][0].update(betas=0.9), ''),
    (lambda s: s['param_groups'][0]['params'].__setitem__(0, []), ''),
    (lambda s: s['state'].update({0: 3}), ''),
    (lambda s: s['state'][0].pop('step'), 'step'),
    (lambda s: s['state'][0].update(step='x'), ''),
    (lambda s: s['state'][0].update(exp_avg=3), ''),
    (lambda s: s['state'][0].update(exp_avg=torch.ones(8, 8).to_sparse()), 'exp_avg is'),
    (lambda s: s['param_groups'][0].update(amsgrad=True), 'amsgrad'),
    (swap_moments, 'exp_avg is .* and its parameter'),
    (lambda s: s['state'][2].update(exp_avg_sq=torch.ones(3, 8)), r'exp_avg_sq is \(3, 8\)'),
])
def test_an_optimizer_state_that_does_not_fit_is_refused_in_words(damage, message):
    model = small()
    saved = trained_optimizer(model).state_dict()
    fresh = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu')
    checkpoints.restore_optimizer(fresh, saved)
    damage(saved)
    with pytest.raises(ValueError, match=f"optimizer state does not fit the model, and cannot be resumed: .*{message}"):
        checkpoints.restore_optimizer(fresh, saved)


WRITER = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import checkpoint as checkpoints
for i in range(int(sys.argv[4])):
    checkpoints.save({'model': {'w': torch.full((20000,), float(sys.argv[3]))}, 'model_args': {}}, sys.argv[2])
"""


def test_processes_that_save_one_path_do_not_disturb_each_other_or_a_reader(tmp_path):
    path = str(tmp_path / 'ckpt.pt')
    checkpoints.save({'model': {'w': torch.full((20000,), 0.0)}, 'model_args': {}}, path)
    commands = [[sys.executable, '-c', WRITER, ROOT, path, str(i), str(sizes(10, 40))] for i in (1, 2)]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    while any(writer.poll() is None for writer in writers):
        weights = checkpoints.load(path)['model']['w']
        assert weights.min() == weights.max()
    for writer in writers:
        assert writer.communicate()[1] == '' and writer.returncode == 0
    assert os.listdir(tmp_path) == ['ckpt.pt']


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from whole_file import replacing
with replacing(sys.argv[2]) as f:
    f.write(b'half')
    f.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_is_removed_by_the_next_run_and_nothing_else(tmp_path):
    path, others = tmp_path / 'ckpt.pt', {'ckpt.pt', 'other.pt.0123456789ab.tmp'}
    for name in others:
        (tmp_path / name).write_text('mine')
    subprocess.run([sys.executable, '-c', KILLED, ROOT, str(path)])
    assert len(set(os.listdir(tmp_path)) - others) == 1 and path.read_text() == 'mine'
    (tmp_path / 'ckpt_interrupted.pt.0123456789ab.tmp').write_text('half of a state')
    Checkpointer(str(tmp_path), resume=False, writes=True)
    assert set(os.listdir(tmp_path)) == others | {'.lock'}
