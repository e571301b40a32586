"""Checkpoints: never half-written, loaded without running what is in them; nanoGPT's load too."""
import errno
import io
import os
import pickle
import re

import pytest
import torch
from conftest import sizes

import checkpoint as checkpoints
from checkpoint import SIZES
from model import GPT, GPTConfig
from training.checkpointer import Checkpointer
from whole_file import replacing

ARGS = dict(n_layer=1, n_head=1, n_embd=8, block_size=8, bias=False, vocab_size=11, dropout=0.0)


def nanogpt_checkpoint(model=None):
    """As nanoGPT saves it: no tokenizer, no RNG. An old one: mask buffers, and the prefix of a compiled model."""
    model = model or GPT(GPTConfig(**ARGS))
    state = {'_orig_mod.' + k: v for k, v in model.state_dict().items()}
    state['_orig_mod.transformer.h.0.attn.bias'] = torch.ones(1, 1, 8, 8)
    return {'model': state, 'optimizer': {}, 'model_args': ARGS, 'iter_num': 5, 'best_val_loss': torch.tensor(1.5),
            'config': {'dataset': 'mine', 'learning_rate': 1e-3}}


def test_a_checkpoint_of_nanogpt_loads(tmp_path, monkeypatch):
    model = GPT(GPTConfig(**ARGS)).eval()
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

    for error, said in ((OSError(errno.ENOSPC, 'No space left'), 'ckpt.pt could not be written .No space left.: the'),
                        (OSError('of a writer'), 'is the disk full. of a writer'),
                        (RuntimeError('unexpected pos'), 'is the disk full. unexpected pos')):
        def half(obj, f, error=error):
            f.write(b'half a checkpoint')
            raise error
        monkeypatch.setattr(torch, 'save', half)
        with pytest.raises(OSError, match=said):
            checkpoints.save({'n': 2}, path)
    assert checkpoints.load(path)['n'] == 1 and os.listdir(tmp_path) == ['ckpt.pt']


@pytest.mark.parametrize('error, said', [
    (OSError(errno.ENOSPC, 'No space left'), "No space left: '{}'"), (OSError('of a writer'), 'of a writer'),
    (OSError(errno.EACCES, 'Permission denied', 'another'), "Permission denied: 'another'")])
def test_an_error_of_writing_names_the_file_if_it_names_none(tmp_path, error, said):
    path = tmp_path / 'x.bin'
    with pytest.raises(OSError) as caught, replacing(path):
        raise error
    assert str(caught.value).endswith(said.format(path)) and os.listdir(tmp_path) == []
    path.mkdir()
    with pytest.raises(OSError) as caught, replacing(path):
        pass
    assert str(caught.value).endswith(f": '{path}'")


class Evil:
    def __reduce__(self):
        return os.mkdir, ('evil',)


def test_what_is_no_checkpoint_ends_in_one_line_and_no_code_in_it_is_run(tmp_path, monkeypatch):
    path = tmp_path / 'ckpt.pt'
    checkpoints.save(nanogpt_checkpoint(), str(path))
    whole = path.read_bytes()
    torch.save(nanogpt_checkpoint(), path, _use_new_zipfile_serialization=False)
    old_format = path.read_bytes()  # of torch before 1.6, which has no checksums
    monkeypatch.chdir(tmp_path)
    torch.save({'model': {}, 'model_args': {}, 'x': Evil()}, path)
    for content in (path.read_bytes(), b'', b'nonsense', b'PK\x03\x04 torn', whole[:-1], old_format):
        path.write_bytes(content)
        with pytest.raises(ValueError, match='cannot be read'):
            checkpoints.load(str(path))
    assert not os.path.exists('evil')
    torch.save({'weights': 1}, path)
    with pytest.raises(ValueError, match='not a checkpoint'):
        checkpoints.load(str(path))
    with pytest.raises(ValueError, match='train one first'):
        checkpoints.load(str(tmp_path / 'nothing.pt'))


@pytest.mark.parametrize('of_nanogpt, kind', [(True, {}), (False, dict(gelu='tanh')), (False, dict(
    position='rope', window=5, n_sink=2)), (False, dict(norm='rms', mlp='swiglu', n_kv_head=1))])
def test_model_args_rebuild_the_model_and_nanogpt_reads_those_of_its_own_models(of_nanogpt, kind, tmp_path):
    model = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=8, bias=False, **kind)).eval()
    args = checkpoints.model_args(model.config)
    names = {'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias'}  # those it accepts
    assert (set(args) == names) == of_nanogpt
    checkpoints.save({'model': model.state_dict(), 'model_args': args}, str(tmp_path / 'ckpt.pt'))
    again = checkpoints.build(checkpoints.load(str(tmp_path / 'ckpt.pt')), GPT, GPTConfig).eval()
    idx = torch.randint(11, (1, 8))
    assert again.config == model.config and torch.equal(again(idx)[0], model(idx)[0])


def test_newest_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert checkpoints.newest_first() == []
    for i, name in enumerate(('out', 'out-b', 'other')):
        os.makedirs(name)
        open(f'{name}/ckpt.pt', 'w').close()
        os.utime(f'{name}/ckpt.pt', (i, i))
    assert checkpoints.newest_first() == ['out-b/ckpt.pt', 'out/ckpt.pt']


def saved(checkpoint):
    """The bytes of its file."""
    torch.save(checkpoint, file := io.BytesIO())
    return file.getvalue()


def test_no_flipped_byte_no_zeroed_sector_and_no_flipped_bit_loads_as_something_else(tmp_path):
    """A bit of the zip's directory marks an entry as a folder, for which torch returns uninitialised memory."""
    path = tmp_path / 'ckpt.pt'
    checkpoints.save(nanogpt_checkpoint() | {'best_val_loss': 1.5}, str(path))
    whole, expected = path.read_bytes(), saved(checkpoints.load(str(path)))

    def loads(damaged):
        path.write_bytes(damaged)
        try:
            loaded = checkpoints.load(str(path))
        except ValueError:
            return False
        assert saved(loaded) == expected
        return True
    directory = whole.index(b'PK\x01\x02')
    damages = [(i, bytes([255 - whole[i]])) for i in range(0, len(whole), sizes(97, 7))]
    damages += [(i, bytes(len(whole[i:i + 128]))) for i in range(0, len(whole), 128)]
    damages += [(i, bytes([whole[i] ^ 1 << bit])) for i in range(directory, len(whole), sizes(3, 1))
                for bit in (4, i % 8)]
    loaded = [loads(whole[:i] + part + whole[i + len(part):]) for i, part in damages]
    assert len(loaded) > 300 and sum(loaded) < len(loaded) / 2  # what loads had nothing but padding or zeros there
    attributes = [entry.start() + 38 for entry in re.finditer(b'PK\x01\x02', whole)]
    assert len(attributes) > 10 and not any(loads(whole[:i] + b'\x10' + whole[i + 1:]) for i in attributes)


@pytest.mark.parametrize('change, message', [
    *[(change, f'ckpt.pt is not a checkpoint of train.py: .*{message}') for change, message in (
        (dict(model=[1]), 'model must be of type dict, not list'), (dict(model={'w': 1}), 'names and dense tensors'),
        (dict(model={1: torch.ones(1)}), 'names and dense tensors'),
        (dict(model={'w': torch.ones(1).to_sparse()}), 'names and dense tensors'),
        (dict(model_args=None), 'model_args must be of type dict'),
        (dict(iter_num='5'), 'iter_num must be of type int'), (dict(iter_num=-5), 'iter_num must be 0 or more'),
        (dict(tokenizer={'chars': 'ab'}), "with its kind"))],
    # the weights fit any n_head, so a default one would give wrong logits without an error
    (dict(model_args={name: ARGS[name] for name in ARGS if name not in ('n_head', 'vocab_size')}),
     'model_args lack n_head, vocab_size'),
    *[(dict(model_args=ARGS | args), message) for args, message in (
        (dict(n_layer='1'), "n_layer must be a positive integer up to 4,096, not '1'"),
        (dict(dropout='0'), r"dropout must be in \[0, 1\), not '0'"),
        *[({name: size}, f'{name} must be .* up to') for name in SIZES for size in (0, 2**62)],
        (dict(bias=True), 'do not fit: .*Missing key'),
        # sizes that a GPTConfig may have, of models that are not built: they would take minutes, or all memory
        (dict(n_layer=4096), 'n_layer is 4096, but the weights have 1 layers'),
        (dict(vocab_size=2**24), r'n_embd are \(16777216, 8\), but wte.weight is \(11, 8\)'),
        (dict(block_size=2**24), r'n_embd are \(16777216, 8\), but wpe.weight is \(8, 8\)'),
        (dict(n_embd=2**24), r'n_embd are \(11, 16777216\), but wte.weight is'))]])
def test_wrong_contents_are_refused_in_words(tmp_path, change, message):
    path = str(tmp_path / 'ckpt.pt')
    torch.save(nanogpt_checkpoint() | change, path)
    with pytest.raises(ValueError, match=message):
        checkpoints.build(checkpoints.load(path), GPT, GPTConfig)


def test_a_tied_weight_that_is_not_a_number_is_one_weight():
    """NaN is not equal to itself."""
    checkpoint, other = nanogpt_checkpoint(), torch.full((11, 8), float('nan'))
    tied = dict.fromkeys(('_orig_mod.lm_head.weight', '_orig_mod.transformer.wte.weight'), other)
    checkpoints.build(checkpoint | {'model': checkpoint['model'] | tied}, GPT, GPTConfig)


def test_fields_that_gptconfig_lacks_are_named(capsys):
    checkpoint = nanogpt_checkpoint() | dict(model_args=ARGS | dict(flash=True))
    assert checkpoints.build(checkpoint, GPT, GPTConfig).config.n_embd == 8
    assert 'model_args of the checkpoint have flash, which GPTConfig lacks' in capsys.readouterr().err


def test_what_a_killed_run_left_is_removed_by_the_next_run_and_nothing_else(tmp_path, monkeypatch):
    def killed(*paths):
        raise KeyboardInterrupt
    others = {'ckpt.pt', 'other.pt.0123456789ab.tmp'}
    for name in others:
        (tmp_path / name).write_text('mine')
    with monkeypatch.context() as patched:  # a killed process renames nothing and removes nothing
        patched.setattr(os, 'replace', killed)
        patched.setattr(os, 'remove', lambda path: None)
        for name in ('ckpt.pt', 'ckpt_last.pt'):
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save({}, str(tmp_path / name))
    assert len(set(os.listdir(tmp_path)) - others) == 2 and (tmp_path / 'ckpt.pt').read_text() == 'mine'
    Checkpointer(str(tmp_path), resume=False, writes=True)
    assert set(os.listdir(tmp_path)) == others | {'.lock'}
