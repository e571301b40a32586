"""A tokenizer of one's own: trained, in checkpoints and exports, and in the data of others; downloads that go on."""
import hashlib
import json
import math
import os
import re
import tempfile
from functools import lru_cache
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import TINY, run
from download_server import Files, serving
from example_models import LLAMA, gpt, json_tokenizer, sentencepiece_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import checkpoint as checkpoints
import formats
import tokenizer as tokenizers
from data import prepare_text
from data.tinystories.prepare import stories as stories_of
from formats import gguf_tokenizer
from formats.gguf_tokenizer import RULES, rule_of
from tokenizer import JSONTokenizer

STORY = "Once upon a time, a “fox” saw the moon.\n\nIt said: don't go, 12345 naïve 🙂 foxes!\n"
TEXT = ''.join(STORY.replace('fox', word) for word in ('fox', 'owl', 'mouse', 'bear', 'hen', 'wolf', 'cow', 'cat')) * 9
ONLY_IN_VALIDATION = 'zqzqzqzq ' * 400
LINES = 'ab1 .\n\t\r\'"é月'


def prepared(repo, *settings, dataset='shakespeare', text=TEXT):
    """(stdout of its prepare.py, the folder of the data set)"""
    (repo / 'my.txt').write_text(text, encoding='utf-8')
    done = run(repo, f'data/{dataset}/prepare.py', '--input=my.txt', *settings, code=0)
    return done.stdout, repo / 'data' / dataset


def test_it_is_trained_on_the_training_text_alone_and_is_the_librarys(repo):
    text = TEXT * 9 + ONLY_IN_VALIDATION
    assert len(ONLY_IN_VALIDATION) < 0.1 * len(text)
    out, folder = prepared(repo, '--vocab_size=330', text=text)
    theirs = Tokenizer.from_file(str(folder / 'tokenizer.json'))
    parts = {split: np.fromfile(folder / f'{split}.bin', np.uint16) for split in ('train', 'val')}
    assert theirs.get_vocab_size() == 330 and theirs.token_to_id('<|endoftext|>') == 0
    assert ''.join(map(theirs.decode, parts.values())) == text
    assert parts['train'].tolist() == theirs.encode(text[:int(0.9 * len(text))]).ids
    assert 'owl' in theirs.get_vocab() or 'Ġowl' in theirs.get_vocab()
    assert not [token for token in theirs.get_vocab() if 'zq' in token]
    n_bytes = json.loads((folder / 'meta.json').read_text())['bytes']
    assert sum(n_bytes.values()) == len(text.encode()) and f"{len(parts['val']):,} tokens of {n_bytes['val']:,}" in out


def test_it_goes_to_checkpoints_exports_and_the_data_of_a_finetuning(repo):
    """Bits per byte are those of the loss; a character's are those of its byte."""
    _, folder = prepared(repo, '--vocab_size=300')
    n_bytes, n_tokens = json.loads((folder / 'meta.json').read_text())['bytes'], {}
    for split in ('train', 'val'):
        n_tokens[split] = os.path.getsize(folder / f'{split}.bin') / 2
    done = run(repo, 'train.py', *TINY, '--dataset=shakespeare', '--max_iters=10', code=0)
    last = [line for line in done.stdout.splitlines() if line.startswith('step ')][-1]
    for split, loss, bits in re.findall(r'(\w+) loss ([\d.]+) \(([\d.]+) bits per byte\)', last):
        assert float(bits) == pytest.approx(float(loss) / math.log(2) * n_tokens.pop(split) / n_bytes[split], abs=2e-3)
    assert not n_tokens
    ours = checkpoints.tokenizer_named(str(repo / 'out'))
    assert ours.vocab_size == 300 and ours.end_tokens == (0,)
    assert run(repo, 'export.py', '--path=hf').returncode == run(
        repo, 'export.py', '--to=gguf', '--path=m.gguf').returncode == 0
    ids = ours.encode(STORY)
    for name in ('out', 'hf', 'hf/tokenizer.json', 'm.gguf', 'data/shakespeare'):
        again = checkpoints.tokenizer_named(str(repo / name))
        assert again.encode(STORY) == ids and again.end_tokens == (0,) and again.special_ids == {0}
    transformers = pytest.importorskip('transformers', reason="transformers is not installed")
    theirs = transformers.AutoTokenizer.from_pretrained(repo / 'hf')
    assert theirs(STORY)['input_ids'] == ids and theirs.eos_token == '<|endoftext|>'
    other, finetune = TEXT[::-1], ['--out_dir=more', '--init_from=hf', '--dataset=shakespeare', '--max_iters=1']
    prepared(repo, '--tokenizer=out', text=other)
    assert np.fromfile(folder / 'val.bin', np.uint16).tolist() == ours.encode(other[int(0.9 * len(other)):])
    assert run(repo, 'train.py', *TINY, *finetune).returncode == 0


@pytest.mark.parametrize('added', [False, True])
def test_llama_cpp_has_the_same_ids_from_the_file(tmp_path, added):
    llama_cpp = pytest.importorskip('llama_cpp', reason="llama-cpp-python is not installed")
    made = prepare_text.tokenizer_for([TEXT], '', 290)
    if added:
        made.library.add_tokens(['<think>'])
        made.library.add_special_tokens(['<|im_end|>'])
        made = JSONTokenizer(made.library.to_str(), [291], dict(eos_token='<|im_end|>', bos_token='<|endoftext|>'),
                             "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    formats.to_gguf(gpt(**LLAMA), str(tmp_path / 'm.gguf'), tokenizer=made)
    theirs = llama_cpp.Llama(str(tmp_path / 'm.gguf'), vocab_only=True, verbose=False)
    text = STORY + '<|endoftext|> \t the<think>end<|im_end|> ' + TEXT[::-1]
    assert theirs.tokenize(text.encode(), add_bos=True, special=True) == made.encode(text)
    assert theirs.token_eos() == made.end_tokens[0]
    assert theirs.metadata.get('tokenizer.chat_template') == (made.chat_template and made.chat_template.source)
    again = checkpoints.tokenizer_named(str(tmp_path / 'm.gguf'))
    assert again.encode(text) == made.encode(text) and again.added_ids == made.added_ids


def test_the_rule_of_a_real_model_is_that_of_its_gguf_file(real_model):
    assert rule_of(json.loads(formats.files_of(real_model).tokenizer_state()['json'])) == 'smollm'


def test_the_rule_of_a_tokenizer_json():
    content = json.loads(prepare_text.tokenizer_for([TEXT], '', 290).json)
    assert rule_of(content) == 'gpt-2'
    digits = dict(type='Digits', individual_digits=True)
    content['pre_tokenizer'] = dict(type='Sequence', pretokenizers=[digits, content['pre_tokenizer']])
    assert rule_of(content) == 'smollm' and RULES['smollm'][0] == r'\p{N}'
    prefix = dict(type='ByteLevel', add_prefix_space=True)
    stripping = dict(id=0, content='<|endoftext|>', lstrip=True)
    for change in (dict(normalizer=dict(type='Lowercase')), dict(normalizer=dict(type='NFC')),  # which Qwen's has alone
                   dict(added_tokens=[stripping]), dict(pre_tokenizer=dict(type='Whitespace')),
                   dict(pre_tokenizer=prefix), dict(pre_tokenizer=dict(type='Sequence', pretokenizers=[
                       dict(type='Digits', individual_digits=False), prefix | dict(add_prefix_space=False)]))):
        with pytest.raises(ValueError, match='none of llama.cpp'):
            rule_of(content | change)


@pytest.mark.parametrize('before, behind, ends', [
    ([1], [], [2]), ([], [2], [2]), ([1], [2], [2]), ([3], [2], [3, 2]), ([0], [0], [0]), ([], [], [2]),
    ([1, 3], [], None), ([], [3], None), ([], [2, 2], None)])
def test_a_gguf_file_puts_the_same_tokens_around_a_text(tmp_path, before, behind, ends):
    """Or it is not written: one token may stand before a text, and one that ends a text behind it."""
    names, path = ['<|endoftext|>', '<s>', '</s>', '<x>'], str(tmp_path / 'm.gguf')
    plain = json_tokenizer(TEXT, 300, names)
    content, a = json.loads(plain.json), [dict(Sequence=dict(id='A', type_id=0))]
    around = [[dict(SpecialToken=dict(id=names[i], type_id=0)) for i in ids] for ids in (before, behind)]
    content['post_processor'] = dict(
        type='TemplateProcessing', single=around[0] + a + around[1], pair=a,
        special_tokens={name: dict(id=name, ids=[i], tokens=[name]) for i, name in enumerate(names)})
    made = JSONTokenizer(json.dumps(content), ends or [2])
    if ends is None:
        with pytest.raises(ValueError, match='a GGUF file takes at most one before a text'):
            formats.to_gguf(gpt(**LLAMA), path, tokenizer=made)
        return
    formats.to_gguf(gpt(**LLAMA), path, tokenizer=made)
    back = checkpoints.tokenizer_named(path)
    assert back.encode(STORY) == made.encode(STORY) == [*before, *plain.encode(STORY), *behind]
    assert {*ends} <= {*back.end_tokens}


def test_texts_end_with_a_token_that_has_no_bytes(tmp_path):
    made = prepare_text.tokenizer_for([TEXT], '', 290)
    prepare_text.write_dataset(str(tmp_path), dict(train=[STORY, 'a', ''], val=[STORY]), made, 'me', ends=True)
    ids = np.fromfile(tmp_path / 'train.bin', np.uint16).tolist()
    assert ids == [*made.encode(STORY), 0, *made.encode('a'), 0, 0]
    assert json.loads((tmp_path / 'meta.json').read_text())['bytes']['train'] == len(STORY.encode()) + 1
    assert tokenizers.state_of_dataset(tmp_path)['end_tokens'] == [0]


def test_a_preparation_that_is_ended_leaves_no_tokens_of_another_tokenizer(tmp_path, monkeypatch):
    def prepare(vocab_size):
        made = prepare_text.tokenizer_for([TEXT], '', vocab_size)
        prepare_text.write_dataset(str(tmp_path), dict(train=[TEXT], val=[TEXT]), made, 'me')
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    before = prepare(280)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_text, 'print', Mock(side_effect=BrokenPipeError), raising=False)
        with pytest.raises(BrokenPipeError):
            prepare(290)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before != prepare(290)
    monkeypatch.setattr(prepare_text.json, 'dumps', Mock(side_effect=KeyboardInterrupt))  # between two files
    with pytest.raises(KeyboardInterrupt):
        prepare(280)
    assert not (tmp_path / 'train.bin').exists()


@lru_cache
def tokenizers_of_lines():
    """(name, a tokenizer) that keep the ids of a text that is cut: own byte pairs, and by each rule of GGUF files."""
    made = prepare_text.tokenizer_for([TEXT], '', 400)
    content = json.loads(made.json)
    found = [('own', made), ('characters', tokenizers.CharTokenizer.of_text(TEXT + LINES))]
    for rule in {regexes[0]: rule for rule, regexes in RULES.items()}.values():
        fields = dict(pre=rule, merges=content['model']['merges'])
        of_rule = gguf_tokenizer.byte_pairs(fields, content['model']['vocab'])
        found.append((rule, JSONTokenizer(json.dumps(of_rule))))
    return found


@given(st.lists(st.sampled_from([*LINES, "it's", '12', '.\n', 'fox\nsaw', '\n\n', ' \n', '🙂\nIt', "\n'", '\nnaïve']),
                max_size=60).map(''.join))
def test_a_long_text_is_encoded_in_pieces(text):
    """With the ids of the whole text; by SentencePiece, with its words."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(prepare_text, 'ENCODED', 3)
        assert ''.join(prepare_text.pieces(text)) == text
        for name, made in [*tokenizers_of_lines(), ('SentencePiece', sentencepiece_tokenizer(TEXT))]:
            prepare_text.write_dataset(folder, dict(train=[text], val=[TEXT]), made, 'me')
            ids = np.fromfile(f'{folder}/train.bin', prepare_text.dtype_of(made)).tolist()
            if name == 'SentencePiece':
                assert made.decode(ids).split() == text.split()
            else:
                assert ids == made.encode(text), (name, text)


@pytest.fixture
def server():
    with serving(Files, {}) as server:
        yield server


CONTENT = bytes(range(256)) * 1000


def test_a_download_goes_on_where_it_was_cut_and_where_it_ended(server, tmp_path):
    server.content['/a'], path = CONTENT, str(tmp_path / 'a')
    server.cut = 100_000
    for n in (65536, 131072):
        with pytest.raises(ValueError, match=f'broke off after {n:,} of 256,000 bytes: run the same'):
            prepare_text.download(server.address + '/a', path)
    server.cut = None
    assert prepare_text.download(server.address + '/a', path, 150_000) == path + '.part'  # a part is enough
    assert (tmp_path / 'a.part').read_bytes() == CONTENT[:150_000]
    assert prepare_text.download(server.address + '/a', path, 140_000) == path + '.part'  # nothing is asked for
    assert prepare_text.download(server.address + '/a', path) == path
    assert (tmp_path / 'a').read_bytes() == CONTENT and not os.path.exists(path + '.part')
    assert [asked for _, asked in server.asked] == ['bytes=0-', 'bytes=65536-', 'bytes=131072-149999', 'bytes=150000-']
    assert prepare_text.download(server.address + '/nowhere', path) == path and len(server.asked) == 4


@pytest.mark.parametrize('has_ranges', [True, False])
def test_all_that_is_here_already_is_whole_and_checked(server, tmp_path, has_ranges):
    """A process may have ended between the last byte and the check. Without ranges all of it comes again."""
    server.content['/a'], server.has_ranges, path = CONTENT, has_ranges, tmp_path / 'a'
    (tmp_path / 'a.part').write_bytes(CONTENT if has_ranges else b'x' * 99)
    server.hashes['/a'] = hashlib.sha256(CONTENT).hexdigest()
    assert prepare_text.download(server.address + '/a', str(path)) == str(path) and path.read_bytes() == CONTENT
    (tmp_path / 'b.part').write_bytes(CONTENT[:-1] + b'x' if has_ranges else b'')
    server.content['/b'], server.hashes['/b'] = CONTENT, hashlib.sha256(CONTENT if has_ranges else b'').hexdigest()
    with pytest.raises(ValueError, match='has changed or was damaged: its sha256'):
        prepare_text.download(server.address + '/b', str(tmp_path / 'b'))
    assert not list(tmp_path.glob('b*'))
    (tmp_path / 'c.part').write_bytes(b'123')
    with pytest.raises(ValueError, match='could not be reached .*c.part has only its first 3 bytes'):
        prepare_text.download(server.address + '/c', str(tmp_path / 'c'))
    server.content['/e'], server.has_ranges, server.has_length = CONTENT, False, False
    for name in 'de':  # the length of e is not known, so nobody could say whether all of it has come
        with pytest.raises(ConnectionError):
            prepare_text.download(f'{server.address}/{name}', str(tmp_path / name))
        assert not (tmp_path / name).exists()


def test_stories_are_those_within_the_bytes_that_are_asked_for(tmp_path):
    texts = [f'{STORY}{i}' for i in range(30000)]
    (tmp_path / 'a.txt').write_text('\n<|endoftext|>\n'.join(texts) + '<|endoftext|>', encoding='utf-8')
    assert [*stories_of(tmp_path / 'a.txt', 0)] == texts
    found = [*stories_of(tmp_path / 'a.txt', 1_500_000)]
    n_bytes = len('\n<|endoftext|>\n'.join(found).encode()) + len('\n<|endoftext|>')
    assert found == texts[:len(found)] and n_bytes <= 1_500_000 < n_bytes + 200


def tinystories(repo, url):
    """tinystories/prepare.py, which asks this address."""
    script = repo / 'data' / 'tinystories' / 'prepare.py'
    script.write_text(re.sub('https?://[^/]+', url, script.read_text()))
    return script


def test_stories_are_downloaded_cut_at_their_ends_and_encoded(repo, server):
    stories = [STORY.replace('fox', f'fox number {i}').strip() for i in range(20000)]
    at = '/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-'
    server.content[at + 'train.txt'] = '\n<|endoftext|>\n'.join(stories).encode()
    server.content[at + 'valid.txt'] = '\n<|endoftext|>\n'.join(stories[:50]).encode()
    script = tinystories(repo, server.address)
    done = run(repo, script, '--megabytes=1', '--vocab_size=300', code=0)
    assert 'from TinyStories; vocabulary 300' in done.stdout
    assert [asked for _, asked in server.asked] == ['bytes=0-199999', 'bytes=0-999999']
    whole = server.content[at + 'train.txt'][:10**6].decode(errors='ignore').split('<|endoftext|>')[:-1]
    theirs = Tokenizer.from_file(str(script.parent / 'tokenizer.json'))
    for split, expected in (('train', [text.strip() for text in whole]), ('val', stories[:49])):
        ids = np.fromfile(script.parent / f'{split}.bin', np.uint16).tolist()
        assert theirs.decode(ids, skip_special_tokens=False) == ''.join(text + '<|endoftext|>' for text in expected)
    assert 'bits per byte' in run(repo, 'train.py', *TINY, '--dataset=tinystories', '--max_iters=1', code=0).stdout


def test_without_an_answer_stories_have_a_loud_stand_in(repo):
    script = tinystories(repo, 'http://127.0.0.1:1')
    assert '!! USING A STAND-IN: the help texts' in run(repo, script, '--vocab_size=260', code=0).stderr
    assert 'stand-in' in json.loads((script.parent / 'meta.json').read_text())['source']
