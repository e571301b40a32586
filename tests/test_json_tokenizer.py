"""The tokenizer of a tokenizer.json, against the tokenizers library, and where it is found."""
import json

import pytest
from example_models import TEXT, json_tokenizer

import checkpoint
import tokenizer as tokenizers
from tokenizer import CharTokenizer, JSONTokenizer, TextStream

LONG = TEXT + '<|endoftext|>' + ' unheard of: Ωμέγα, \U0001f9ff, \u0301, \t\t   end ' * 3


def test_ids_and_text_are_the_librarys(tmp_path):
    library = pytest.importorskip('tokenizers', reason="tokenizers is not installed")
    ours = json_tokenizer(TEXT)
    (tmp_path / 'tokenizer.json').write_text(ours.json, encoding='utf-8')
    theirs = library.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
    ids = ours.encode(LONG)
    assert ids == theirs.encode(LONG, add_special_tokens=False).ids and ours.decode(ids) == LONG
    assert ours.vocab_size == theirs.get_vocab_size() == 300
    assert theirs.token_to_id('<|endoftext|>') in ids and '<|endoftext|>' in ours.decode(ids)
    assert ours.decode([*ids, 300, 5000]) == LONG  # rows of a padded vocabulary have no text
    assert ours.encode('') == [] and ours.decode([]) == ''


def test_text_comes_out_token_by_token():
    ours = json_tokenizer(TEXT)
    stream = TextStream(ours.bytes_of_tokens())
    assert ''.join([stream.push(token) for token in ours.encode(LONG)]) + stream.finish() == LONG


def test_a_file_that_cuts_and_pads_does_not(tmp_path):
    """Truncation and padding are settings of training. The token that begins a text stays."""
    content = json.loads(json_tokenizer(TEXT).json)
    ids = json_tokenizer(TEXT).encode(LONG)
    content['truncation'] = dict(direction='Right', max_length=4, strategy='LongestFirst', stride=0)
    content['padding'] = dict(strategy={'Fixed': 999}, direction='Right', pad_to_multiple_of=None, pad_id=0,
                              pad_type_id=0, pad_token='<|endoftext|>')
    end = dict(SpecialToken=dict(id='<|endoftext|>', type_id=0))
    content['post_processor'] = dict(
        type='TemplateProcessing', single=[end, dict(Sequence=dict(id='A', type_id=0))], pair=[end],
        special_tokens={'<|endoftext|>': dict(id='<|endoftext|>', ids=[0], tokens=['<|endoftext|>'])})
    tokenizer = JSONTokenizer(json.dumps(content))
    assert tokenizer.encode(LONG) == [0, *ids] and tokenizer.begins == [0]
    assert JSONTokenizer(json.dumps(content), end_tokens=[1]).decode([0]) == ''


def test_vocab_size_is_the_largest_id_and_one():
    content = json.loads(json_tokenizer(TEXT).json)
    content['added_tokens'].append(dict(content['added_tokens'][0], id=320, content='<extra>'))
    ours = JSONTokenizer(json.dumps(content))
    largest = ours.encode('<extra>')[0]
    assert ours.vocab_size == largest + 1 and ours.decode([largest]) == '<extra>'


@pytest.mark.parametrize('content, line', [
    ('half a {', 'cannot be read'),
    ('{"model": {}}', 'cannot be read'),
    (lambda c: c | dict(decoder=dict(type='Metaspace', replacement='▁', prepend_scheme='always', split=True)),
     'decoder of the tokenizer.json is Metaspace'),
    (lambda c: c | dict(decoder=None), 'decoder of the tokenizer.json is None'),
])
def test_what_cannot_be_used_is_refused(content, line):
    content = content if isinstance(content, str) else json.dumps(content(json.loads(json_tokenizer(TEXT).json)))
    with pytest.raises(ValueError, match=line):
        JSONTokenizer(content)


def test_the_state_goes_into_checkpoints(tmp_path):
    ours = json_tokenizer(TEXT)
    state = ours.state()
    tokenizers.check_state(state)
    assert tokenizers.from_state(json.loads(json.dumps(state))).encode(LONG) == ours.encode(LONG)
    checkpoint.check_contents(dict(model={}, model_args={}, tokenizer=state))
    with pytest.raises(ValueError, match="kind 'json' must have json, a string"):
        tokenizers.from_state({'kind': 'json'})
    with pytest.raises(ValueError, match='char, gpt2 or json'):
        tokenizers.from_state({'kind': 'sentencepiece'})


def test_where_a_folder_has_its_tokenizer(tmp_path):
    def kind():
        return tokenizers.state_of_dataset(tmp_path)['kind']
    assert kind() == 'gpt2'
    (tmp_path / 'config.json').write_text('{"model_type": "gpt2"}')
    assert kind() == 'gpt2'
    (tmp_path / 'config.json').write_text('{"model_type": "mpt"}')
    assert kind() == 'unknown'
    (tmp_path / 'meta.json').write_text('{"vocab_size": 300, "dtype": "uint16"}')
    assert kind() == 'unknown'
    (tmp_path / 'tokenizer.json').write_text(json_tokenizer(TEXT).json, encoding='utf-8')
    assert kind() == 'json'
    (tmp_path / 'meta.json').write_text(json.dumps(CharTokenizer('ab').state()))  # as export.py writes it
    assert kind() == 'char'
