"""Data preparation against a local server, tokenizers, token files and batches."""
import hashlib
import json
import os
import pickle
import runpy
import shutil
import struct
import sys
import tempfile
import types

import numpy as np
import pytest
from conftest import SHARED_TEXT, run
from example_models import TIKTOKEN_CACHE, json_tokenizer, needs_byte_pairs
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import Evil
from test_own_tokenizer import server  # noqa: F401

import tokenizer as tokenizers
from data import prepare_text
from tokenizer import CharTokenizer
from training.batches import Batches, check_tokenizer, open_tokens, prepare, vocab_size_of

TEXT = 'To be, or not to be: that is the question.\n' * 50


@pytest.fixture
def empty(repo):
    for name in ('input.txt', 'train.bin', 'val.bin', 'meta.json'):
        os.remove(repo / 'data' / 'shakespeare_char' / name)
    return repo


def prepare_here(repo, dataset, monkeypatch, *settings):
    """Run the prepare.py of a data set in this process."""
    monkeypatch.setattr(sys, 'argv', ['prepare.py', *settings])
    monkeypatch.setattr(sys, 'path', [*sys.path])
    runpy.run_path(str(repo / 'data' / dataset / 'prepare.py'), run_name='__main__')


def download(repo, url, monkeypatch):
    """Prepare shakespeare_char with another address to download from."""
    monkeypatch.setattr(prepare_text, 'URL', url)
    prepare_here(repo, 'shakespeare_char', monkeypatch)


def test_the_text_is_downloaded_checked_and_kept(empty, server, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(prepare_text, 'SHA256', hashlib.sha256(TEXT.encode()).hexdigest())
    server.content |= {'/input.txt': TEXT.encode(), '/changed.txt': b'something else'}
    folder = empty / 'data' / 'shakespeare_char'
    with pytest.raises(SystemExit) as end:
        download(empty, f'{server.address}/changed.txt', monkeypatch)
    assert end.value.code == 2 and 'sha256' in capsys.readouterr().err and not (folder / 'input.txt').exists()
    download(empty, f'{server.address}/input.txt', monkeypatch)
    assert (folder / 'input.txt').read_text() == TEXT
    chars = sorted(set(TEXT))
    meta = json.loads((folder / 'meta.json').read_text())
    assert meta['chars'] == ''.join(chars) and meta['source'] == 'tinyshakespeare'  # by its hash
    train, val = (np.fromfile(folder / f'{split}.bin', dtype=np.uint16) for split in ('train', 'val'))
    assert ''.join(chars[i] for i in [*train, *val]) == TEXT and len(train) == int(len(TEXT) * 0.9)
    download(empty, f'{server.address}/missing.txt', monkeypatch)  # what was kept is used
    assert json.loads((folder / 'meta.json').read_text()) == meta


@pytest.mark.parametrize('url, name, value', [
    ('{server}/missing.txt', '', ''), ('http://127.0.0.1:1/input.txt', '', ''),
    ('https://127.0.0.1:1/input.txt', 'REQUESTS_CA_BUNDLE', '/nowhere'),
    ('https://127.0.0.1:1/input.txt', 'HTTPS_PROXY', 'http://[::1')])
def test_without_an_answer_a_loud_stand_in_is_used(empty, server, url, name, value, monkeypatch, capsys):  # noqa: F811
    """Or with a wrong setting of the network."""
    if name:
        monkeypatch.setenv(name, value)
    download(empty, url.format(server=server.address), monkeypatch)
    assert '!! USING A STAND-IN' in capsys.readouterr().err
    meta = json.loads((empty / 'data' / 'shakespeare_char' / 'meta.json').read_text())
    assert 'stand-in' in meta['source'] and not (empty / 'data' / 'shakespeare_char' / 'input.txt').exists()
    assert os.path.getsize(empty / 'data' / 'shakespeare_char' / 'train.bin') > 2 * 300_000


def test_any_text_will_do(empty, tmp_path):
    (tmp_path / 'my.txt').write_text('žluťoučký kůň ' * 20, encoding='utf-8')
    done = run(empty, 'data/shakespeare_char/prepare.py', f'--input={tmp_path}/my.txt')
    assert done.returncode == 0 and 'my.txt' in done.stdout and '280 characters' in done.stdout


@pytest.mark.skipif(not os.path.exists(SHARED_TEXT), reason="the real tinyshakespeare is not here")
def test_the_real_tinyshakespeare_has_the_known_counts(empty):
    done = run(empty, 'data/shakespeare_char/prepare.py', f'--input={SHARED_TEXT}')
    assert '1,115,394 characters from tinyshakespeare; vocabulary 65' in done.stdout
    assert 'train.bin: 1,003,854 tokens' in done.stdout and 'val.bin: 111,540 tokens' in done.stdout
    if os.path.isdir(TIKTOKEN_CACHE):
        done = run(empty, 'data/shakespeare/prepare.py', f'--input={SHARED_TEXT}', TIKTOKEN_CACHE_DIR=TIKTOKEN_CACHE)
        assert 'train.bin: 301,966 tokens' in done.stdout and 'val.bin: 36,059 tokens' in done.stdout


@needs_byte_pairs
def test_gpt2_byte_pairs(monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', TIKTOKEN_CACHE)
    bpe = tokenizers.from_state({'kind': 'gpt2'})
    assert bpe.encode('Hello world<|endoftext|>') == [15496, 995, 50256] and bpe.vocab_size == 50257
    text = 'naïve 🙂 žluťoučký'
    assert bpe.decode(bpe.encode(text)) == text and bpe.decode([15496, 50300]) == 'Hello'


@given(st.text(min_size=1))
def test_characters_there_and_back(text):
    tokenizer = CharTokenizer.of_text(text)
    again = tokenizers.from_state(json.loads(json.dumps(tokenizer.state())))
    ids = again.encode(text)
    assert again.decode(ids) == text and max(ids) < again.vocab_size == len(set(text))


def test_unknown_characters_are_named():
    with pytest.raises(ValueError, match="'é' 'ü'"):
        CharTokenizer('abc').encode('abüécé')
    assert CharTokenizer('abc').decode([0, 7]) == 'a\ufffd'


def test_nanogpts_meta_pkl_is_read_and_nothing_in_it_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    meta = tmp_path / 'meta.pkl'
    meta.write_bytes(pickle.dumps({'vocab_size': 2, 'itos': {0: 'a', 1: 'b'}, 'stoi': {'a': 0, 'b': 1}}))
    assert tokenizers.state_of_dataset(tmp_path) == {'kind': 'char', 'chars': 'ab'}
    meta.write_bytes(pickle.dumps({'vocab_size': 3}))  # all that nanoGPT's train.py needs
    assert tokenizers.read_meta(tmp_path) == {'vocab_size': 3}
    assert tokenizers.state_of_dataset(tmp_path) == {'kind': 'unknown'}
    wrong = ({'itos': Evil()}, Evil(), ['a'], {'itos': {1: 'a'}}, {'itos': {0: 'ab', 1: 'c'}}, {'itos': os.getcwd})
    too_long = b'\x80\x04\x8e' + struct.pack('<Q', 2**63) + b'a.'
    for content in (b'', b'\x80', b'nonsense', too_long, *map(pickle.dumps, wrong)):
        meta.write_bytes(content)
        with pytest.raises(ValueError, match='meta.pkl'):
            tokenizers.read_meta(tmp_path)
    assert not os.path.exists('evil')


def test_damaged_metadata(tmp_path):
    for content in ('{"kind": ', '[1]', '{"kind": "char"}', '{"chars": "ab"}', '{"kind": "gpt2", "dtype": "float8"}',
                    '{"vocab_size": -1}', '{"vocab_size": true}', '{"vocab_size": 4611686018427387904}', '[' * 100000):
        (tmp_path / 'meta.json').write_text(content)
        with pytest.raises(ValueError, match='prepare the data again'):
            tokenizers.read_meta(tmp_path)
    assert tokenizers.state_of_dataset(tmp_path / 'nowhere') == {'kind': 'gpt2'}


def token_file(folder, tokens, dtype='uint16'):
    np.array(tokens, dtype=dtype).tofile(folder / 'train.bin')
    (folder / 'meta.json').write_text(json.dumps({'kind': 'gpt2', 'dtype': dtype}))


@pytest.mark.parametrize('how, error', [
    ('os.kill(os.getpid(), 15)', KeyboardInterrupt), ('sys.exit(130)', KeyboardInterrupt), ('sys.exit(2)', ValueError)])
def test_a_signal_during_a_preparation_is_no_mistake_in_the_text(tmp_path, how, error):
    (tmp_path / 'prepare.py').write_text(f'import os, sys; {how}')
    with pytest.raises(error):
        prepare(str(tmp_path))


def test_batches_are_windows_and_their_targets_the_next_tokens(tmp_path):
    token_file(tmp_path, range(100), 'uint32')
    get = Batches(str(tmp_path), 'train', 64, 8, 100, 'cpu')
    starts = set()
    for step in range(20):
        x, y = get(step)
        assert x.shape == y.shape == (64, 8) and (y == x + 1).all() and (x == x[:, :1] + np.arange(8)).all()
        starts |= set(x[:, 0].tolist())
    assert starts == set(range(92))  # every window there is, the last one included


def test_a_batch_depends_on_seed_split_and_step_alone(tmp_path):
    token_file(tmp_path, range(100))
    shutil.copy(tmp_path / 'train.bin', tmp_path / 'val.bin')

    def first(split, seed, step):
        return Batches(str(tmp_path), split, 4, 8, 100, 'cpu', seed)(step)[0].tolist()
    assert first('train', 1, 5) == first('train', 1, 5)
    assert len({str(first(*a)) for a in (('train', 1, 5), ('val', 1, 5), ('train', 2, 5), ('train', 1, 6))}) == 4


def test_token_files_that_cannot_be_right(tmp_path):
    token_file(tmp_path, range(8))
    with pytest.raises(ValueError, match='8 tokens .* 9'):
        Batches(str(tmp_path), 'train', 1, 8, 100, 'cpu')
    token_file(tmp_path, range(9))
    assert Batches(str(tmp_path), 'train', 1, 8, 100, 'cpu')(0)[0].tolist() == [list(range(8))]
    with pytest.raises(ValueError, match='token 8.* vocab_size is 5'):
        Batches(str(tmp_path), 'train', 1, 8, 5, 'cpu')(0)
    with open(tmp_path / 'train.bin', 'ab') as f:
        f.write(b'x')
    with pytest.raises(ValueError, match='ends within a token, after 9 whole'):
        Batches(str(tmp_path), 'train', 1, 8, 100, 'cpu')
    with pytest.raises(ValueError, match='prepare.py'):
        Batches(str(tmp_path), 'val', 1, 8, 100, 'cpu')


@needs_byte_pairs
def test_openwebtext_is_written_in_order_with_an_end_after_each_document(repo, monkeypatch):
    """Against a stand-in for `datasets` with the few methods the script calls."""
    class Rows(list):
        select_columns = lambda self, name: self  # noqa: E731

        def train_test_split(self, **kwargs):
            return {'train': self, 'test': Rows(self[:2])}

        def map(self, f, **kwargs):
            return Rows(map(f, self))

        def shard(self, n, i, contiguous):
            assert contiguous and n <= len(self)
            return Rows(np.array_split(np.array(self, dtype=object), n)[i])

        def with_format(self, _):
            return {'ids': [row['ids'] for row in self]}
    documents = Rows({'text': f'document {i} ' * 3} for i in range(5))
    stand_in = types.SimpleNamespace(load_dataset=lambda source, num_proc: {'train': documents})
    monkeypatch.setitem(sys.modules, 'datasets', stand_in)
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', TIKTOKEN_CACHE)
    prepare_here(repo, 'openwebtext', monkeypatch)
    bpe = tokenizers.GPT2Tokenizer()
    tokens = np.fromfile(repo / 'data' / 'openwebtext' / 'train.bin', dtype=np.uint16).tolist()
    assert bpe.bpe.decode(tokens) == ''.join(f'document {i} ' * 3 + '<|endoftext|>' for i in range(5))


@pytest.mark.parametrize('error', [
    RuntimeError('Dataset scripts are no longer\nsupported'), OSError(28, 'No space left on device'), None])
def test_whatever_ends_the_download_of_openwebtext_is_one_line(repo, error, monkeypatch, capsys):
    """None: the data set has no split `train`."""
    def load_dataset(source, num_proc):
        if error:
            raise error
        return {'test': []}
    monkeypatch.setitem(sys.modules, 'datasets', types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(tokenizers, 'GPT2Tokenizer', object)  # whose byte pairs may not be here
    with pytest.raises(SystemExit) as end:
        prepare_here(repo, 'openwebtext', monkeypatch)
    message = capsys.readouterr().err
    assert end.value.code == 2 and message.count('\n') == 1, message
    assert message.startswith('prepare.py: error: Skylion007/openwebtext could not be downloaded ('), message


@pytest.mark.parametrize('tokens, dtype, named, says', [
    (range(60000), 'uint32', None, '"dtype": "uint32" into '), (range(0, 2**17, 2), 'int32', None, 'of 4 bytes'),
    (range(90), 'int64', None, 'of 8 bytes'), (range(70000, 71000), 'int64', None, 'of 8 bytes'),
    (range(90), 'int64', 'uint32', 'of 8 bytes'), (range(90), 'npy', 'uint16', 'is a .npy file')])
def test_ids_of_another_dtype_are_refused_and_it_is_named(tmp_path, tokens, dtype, named, says):
    path = tmp_path / 'train.bin'
    if dtype == 'npy':
        with open(path, 'wb') as f:
            np.save(f, np.array(tokens, dtype='uint16'))
    else:
        np.array(tokens, dtype=dtype).tofile(path)
    (tmp_path / 'meta.json').write_text(json.dumps({'dtype': named} if named else {}))
    with pytest.raises(ValueError, match='train.bin .*' + says):
        Batches(str(tmp_path), 'train', 1, 8, 2**20, 'cpu')


@given(st.lists(st.integers(0, 65535), min_size=33, max_size=200))
def test_ids_of_two_bytes_are_taken_for_nothing_else(tokens):
    """Also where every second one is 0, if meta.json says uint16, as the scripts here write it."""
    with tempfile.TemporaryDirectory() as folder:
        np.array(tokens, dtype='uint16').tofile(f'{folder}/train.bin')
        high = np.array(tokens[1:len(tokens) // 4 * 4:2])
        if high.max() < 16:
            with open(f'{folder}/meta.json', 'w') as f:
                f.write('{"dtype": "uint16"}')
        assert list(open_tokens(folder, 'train', 8)) == tokens


def byte_level_json(n, added=()):
    """A tokenizer.json of byte-level BPE with n tokens, and added ones after them."""
    library = json_tokenizer(TEXT, n, ()).library
    library.add_special_tokens([*added])
    return library.to_str()


def test_what_is_another_tokenizer_and_what_is_none():
    """Added tokens, end tokens and templates make none; other merges, letters or an order of letters do."""
    def state(n=270, **others):
        return {'kind': 'json', 'json': byte_level_json(n, others.pop('added', ()))} | others
    same = [(state(), json.loads(json.dumps(state() | {'json': json.dumps(json.loads(state()['json']), indent=1)}))),
            (state(added=['<|im_end|>'], end_tokens=[270], chat_template='{{ messages }}'), state()),
            (tokenizers.GPT2, tokenizers.GPT2), (tokenizers.GPT2, {'kind': 'unknown'}),
            ({'kind': 'char', 'chars': 'ab'}, {'kind': 'char', 'chars': 'ab'})]
    for model, data in same:
        assert check_tokenizer(model, data, 'm', 'd') == model
    other = [(state(), state(280), '270 tokens', '280 tokens'), (state(), tokenizers.GPT2, '270 tokens', "GPT-2's"),
             (tokenizers.GPT2, {'kind': 'char', 'chars': 'ab'}, "GPT-2's byte", '2 characters'),
             (state(), {'kind': 'char', 'chars': 'ab'}, '270 tokens', '2 characters'),
             ({'kind': 'char', 'chars': 'ab'}, {'kind': 'char', 'chars': 'aé'}, '2 characters:', "'é' among them"),
             ({'kind': 'char', 'chars': 'ab'}, {'kind': 'char', 'chars': 'ba'}, '2 characters:', 'another order')]
    for model, data, ours, theirs in other:
        with pytest.raises(ValueError, match=f'^d has another tokenizer, .*{theirs}.*, than m, .*{ours}'):
            check_tokenizer(model, data, 'm', 'd')
    with pytest.raises(ValueError, match=r'tokenizer \(data/shakespeare/prepare.py --tokenizer=, for example\), or'):
        check_tokenizer({'kind': 'char', 'chars': 'abc'}, {'kind': 'char', 'chars': 'ac'}, 'm', 'd')


def test_a_folder_with_a_tokenizer_json_has_its_vocabulary(tmp_path):
    """Whatever its meta.json leaves out, and one line if it is cut."""
    text = byte_level_json(270, ['<|im_end|>'])
    (tmp_path / 'tokenizer.json').write_text(text)
    assert vocab_size_of(str(tmp_path)) == 271
    for meta in ('{}', '{"dtype": "uint16"}', '{"source": "x"}'):
        (tmp_path / 'meta.json').write_text(meta)
        assert vocab_size_of(str(tmp_path)) == 271
    (tmp_path / 'meta.json').write_text('{"vocab_size": 320}')
    assert vocab_size_of(str(tmp_path)) == 320
    for length in (0, 1, 100, len(text) - 1):
        (tmp_path / 'tokenizer.json').write_text(text[:length])
        with pytest.raises(ValueError, match='tokenizer.json.* cannot be read'):
            vocab_size_of(str(tmp_path))
    os.remove(tmp_path / 'tokenizer.json')
    (tmp_path / 'meta.json').write_text('{}')
    assert vocab_size_of(str(tmp_path)) == 50304  # as without a meta.json: GPT-2's
    (tmp_path / 'meta.json').write_text('{"kind": "gpt2", "vocab_size": 60000}')
    assert vocab_size_of(str(tmp_path)) == 60000
    (tmp_path / 'meta.json').write_text('{"vocab_size": 70000, "dtype": "uint32"}')  # ids without a text
    assert vocab_size_of(str(tmp_path)) == 70000
    (tmp_path / 'meta.json').write_text('{}')
    (tmp_path / 'config.json').write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match='has no tokenizer: put its tokenizer.json there'):
        vocab_size_of(str(tmp_path))
