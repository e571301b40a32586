"""Checkpoints: whole at any moment, loaded without running what is in them, nanoGPT's among them."""
import json
import os
import pickle

import pytest
import torch

import checkpoint as checkpoints
from model import GPT, GPTConfig


def small():
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=1, n_embd=8, bias=False)).eval()


def nanogpt_checkpoint(model):
    """What nanoGPT's train.py saves: no tokenizer, no RNG, and older ones a mask buffer and a compiled model's prefix."""
    args = dict(n_layer=1, n_head=1, n_embd=8, block_size=8, bias=False, vocab_size=11, dropout=0.0)
    state = {'_orig_mod.' + k: v for k, v in model.state_dict().items()} | {'_orig_mod.transformer.h.0.attn.bias': torch.ones(1, 1, 8, 8)}
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
    with open(tmp_path / 'data' / 'mine' / 'meta.pkl', 'wb') as f:
        pickle.dump({'vocab_size': len(chars), 'itos': dict(enumerate(chars)), 'stoi': {c: i for i, c in enumerate(chars)}}, f)
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


@pytest.mark.parametrize('content', [b'', b'nonsense', b'PK\x03\x04 torn'])
def test_damaged_files_end_in_one_line(tmp_path, content):
    (tmp_path / 'ckpt.pt').write_bytes(content)
    with pytest.raises(ValueError, match='cannot be read'):
        checkpoints.load(str(tmp_path / 'ckpt.pt'))


def test_a_torn_checkpoint_and_one_without_a_model(tmp_path):
    path = str(tmp_path / 'ckpt.pt')
    checkpoints.save(nanogpt_checkpoint(small()), path)
    whole = open(path, 'rb').read()
    for n in (10, len(whole) // 2, len(whole) - 1):
        open(path, 'wb').write(whole[:n])
        with pytest.raises(ValueError, match='cannot be read'):
            checkpoints.load(path)
    torch.save({'weights': 1}, path)
    with pytest.raises(ValueError, match='not a checkpoint'):
        checkpoints.load(path)
    with pytest.raises(ValueError, match='train one first'):
        checkpoints.load(str(tmp_path / 'nothing.pt'))


def test_weights_that_do_not_fit_their_model_args(tmp_path):
    checkpoint = nanogpt_checkpoint(small())
    checkpoint['model_args']['n_embd'] = 16
    with pytest.raises(ValueError, match='do not fit'):
        checkpoints.build(checkpoint, GPT, GPTConfig)


def test_newest_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert checkpoints.newest_first() == []
    for i, name in enumerate(('out', 'out-b', 'other')):
        os.makedirs(name)
        open(f'{name}/ckpt.pt', 'w').write(json.dumps(i))
        os.utime(f'{name}/ckpt.pt', (i, i))
    assert checkpoints.newest_first() == ['out-b/ckpt.pt', 'out/ckpt.pt']
