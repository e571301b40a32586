"""The tokenizer of a tokenizer.json, against the tokenizers library, and where it is found."""
import json
import random
import threading
import time

import pytest
from example_models import CHAT, TEXT, UNTIED, gpt, json_tokenizer, sentencepiece_tokenizer
from tokenizers import Tokenizer

import checkpoint
import formats
import model as plain_model
import tokenizer as tokenizers
from chat.template import ChatTemplate
from tokenizer import CharTokenizer, JSONTokenizer, TextStream

LONG = TEXT + '<|endoftext|>' + ' unheard of: Ωμέγα, \U0001f9ff, \u0301, \t\t   end ' * 3


def test_ids_and_text_are_the_librarys(tmp_path):
    ours = json_tokenizer(TEXT)
    (tmp_path / 'tokenizer.json').write_text(ours.json, encoding='utf-8')
    theirs = Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
    ids = ours.encode(LONG)
    assert ids == theirs.encode(LONG, add_special_tokens=False).ids and ours.decode(ids) == LONG
    assert ours.vocab_size == theirs.get_vocab_size() == 300
    assert theirs.token_to_id('<|endoftext|>') in ids and '<|endoftext|>' in ours.decode(ids)
    assert ours.decode([*ids, 300, 5000]) == LONG  # rows of a padded vocabulary have no text
    assert ours.encode('') == [] and ours.decode([]) == ''
    stream = TextStream(ours.bytes_of_tokens())
    assert ''.join(map(stream.push, ids)) + stream.finish() == LONG
    with pytest.raises(ValueError, match='lone surrogates'):
        ours.encode('a\ud800')


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


def changed(**parts):
    """A state whose tokenizer.json has these parts in place of its own."""
    return dict(kind='json', json=json.dumps(json.loads(json_tokenizer(TEXT).json) | parts))


@pytest.mark.parametrize('state, line', [
    (dict(kind='json', json='half a {'), 'cannot be read'),
    (dict(kind='json', json='{"model": {}}'), 'cannot be read'),
    (changed(decoder=dict(type='Metaspace', replacement='▁', prepend_scheme='always', split=True)),
     'decoder of the tokenizer.json is .*Metaspace'),
    (changed(decoder=None), 'decoder of the tokenizer.json is {}'),
    (changed(decoder=dict(type='Sequence', decoders=[
        dict(type='Replace', pattern=dict(String='_'), content='-'), dict(type='ByteFallback'), dict(type='Fuse')])),
     'decoder of the tokenizer.json is .*ByteFallback'),
    (changed(model=dict(type='BPE', vocab=dict(a=0, zz=2**32 - 1), merges=[])), 'id 4,294,967,295'),
    (changed(post_processor=dict(type='TemplateProcessing', pair=[], special_tokens={}, single=[
        dict(SpecialToken=dict(id='<s>', type_id=0))])), 'cannot be read'),
    ({'kind': 'json'}, "kind 'json' must have json, a string"), ({'kind': 'sentencepiece'}, "not 'sentencepiece'"),
    (dict(kind='json', json=3), 'json of a tokenizer must be a str'),
    (dict(kind='json', json='{}', added_tokens='<a>'), 'added_tokens of a tokenizer must be a list'),
    (dict(kind='json', json='{}', end_tokens=[2, '3']), 'must be token ids'),
    (dict(kind='json', json='{}', special_tokens=dict(bos_token=1)), 'special_tokens texts'),
])
def test_what_is_no_state_is_refused(state, line):
    with pytest.raises(ValueError, match=line):
        tokenizers.from_state(state)


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


@pytest.mark.parametrize('end, prefix', [('<|endoftext|>', False), ('<end>', False), ('<|endoftext|>', True)])
def test_byte_pairs_in_two_files_are_those_of_transformers(tmp_path, end, prefix):
    """As GPT-2's were, and those of many models after it. Without them the tokens would be GPT-2's own."""
    transformers = pytest.importorskip('transformers', reason="transformers is not installed")
    model, config = json.loads(json_tokenizer(TEXT).json)['model'], dict(model_type='gpt2', eos_token_id=0)
    vocab = {end if text == '<|endoftext|>' else text: i for text, i in model['vocab'].items()}
    files = dict(vocab=vocab, config=config, tokenizer_config=dict(eos_token=end, add_prefix_space=prefix))
    if prefix:
        files |= dict(added_tokens={'<|bot|>': 301, '<|user|>': 300},
                      special_tokens_map=dict(eos_token=end, additional_special_tokens=['<|bot|>']))
    for name, content in files.items():
        (tmp_path / f'{name}.json').write_text(json.dumps(content))
    merges = ['#version: 0.2', *(' '.join(pair) for pair in model['merges'])]
    (tmp_path / 'merges.txt').write_text('\n'.join(merges) + '\n', encoding='utf-8')
    ours = tokenizers.from_state(tokenizers.state_of_dataset(tmp_path))
    theirs = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    for text in (TEXT, f'Hé {end}x', " it's\n\n 12 ", '', '<|user|>the <|bot|>x'):
        assert ours.encode(text) == theirs(text)['input_ids'] and (prefix or ours.decode(ours.encode(text)) == text)
    assert ours.end_tokens == (0,) and ours.special_ids == ({0, 301} if prefix else {0})
    (tmp_path / 'added_tokens.json').write_text('{"<|x|>": 300}')
    for more in (None, [flags('<|x|>')], ['<|x|>']):
        (tmp_path / 'special_tokens_map.json').write_text(json.dumps(dict(additional_special_tokens=more)))
        found = tokenizers.from_state(tokenizers.state_of_dataset(tmp_path))
        assert found.encode('<|x|>')[-1] == 300 and (300 in found.special_ids) == bool(more)
    (tmp_path / 'added_tokens.json').write_text('{"<|x|>": 400}')
    with pytest.raises(ValueError, match="the id of '<|x|>' must be 300, the next one of the vocabulary, not 400"):
        tokenizers.state_of_dataset(tmp_path)
    (tmp_path / 'merges.txt').write_text('a b c d\n')
    with pytest.raises(ValueError, match='vocab.json and merges.txt in .* cannot be read'):
        tokenizers.state_of_dataset(tmp_path)


HOUSES = TEXT * 3 + ' the house, the other house and the mouse ' * 20
TEMPLATE = ("{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}"
            "{% endfor %}")


def test_sentencepiece_with_bytes_is_the_librarys():
    """The texts of ids, and of a stream of them, as the library decodes them behind <s>."""
    ours, rng = sentencepiece_tokenizer(HOUSES), random.Random(0)
    assert ours.begins == [1] and ours.decode([1]) == ours.decode([]) == '' and ours.encode('') == [1]
    texts = ['the house', ' the  house ', '  ', 'é', '日本 the 🙂', 'in the house</s> the mouse', TEXT, LONG, HOUSES]
    whole = [i for i in range(ours.vocab_size) if not 3 <= i < 259 and i != 1]  # no lone bytes
    for ids in [*map(ours.encode, texts), *([1, *rng.choices(whole, k=9)] for _ in range(100))]:
        expected = ours.library.decode(ids[1:], skip_special_tokens=False)
        stream = TextStream(ours.bytes_of_tokens(), strip=ours.strips)
        assert ours.decode(ids) == expected == ''.join(map(stream.push, ids)) + stream.finish()
    for text in texts:
        for special in (True, False):
            assert ours.encode(text, special) == ours.library.encode(text, add_special_tokens=special).ids
        assert '</s>' in text or ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize('files, expected', [
    ({}, dict()),
    (dict(config=dict(eos_token_id=2), generation_config=dict(eos_token_id=[5, 7])), dict(end_tokens=[5, 7, 2])),
    (dict(config=dict(eos_token_id=2), generation_config=dict(eos_token_id=None)), dict(end_tokens=[2])),
    (dict(generation_config=dict(eos_token_id=[])), dict(end_tokens=[])),
    (dict(tokenizer_config=dict(bos_token='<s>', eos_token=dict(content='</s>', lstrip=False), unk_token=None,
                                cls_token='<cls>', add_bos_token=True)),
     dict(special_tokens=dict(bos_token='<s>', eos_token='</s>'))),
    (dict(tokenizer_config=dict(chat_template='{{ 1 }}')), dict(chat_template='{{ 1 }}')),
    (dict(tokenizer_config=dict(chat_template=[dict(name='tool_use', template='{{ 2 }}'),
                                               dict(name='default', template='{{ 3 }}')])),
     dict(chat_template='{% if tools %}\n{{ 2 }}{% else %}\n{{ 3 }}{% endif %}')),
    (dict(tokenizer_config=dict(chat_template='{{ 1 }}'), chat_template='{{ 4 }}'), dict(chat_template='{{ 4 }}')),
    (dict(special_tokens_map=dict(eos_token=dict(content='</s>'))), dict(special_tokens=dict(eos_token='</s>'))),
])
def test_what_the_files_beside_a_tokenizer_json_say(tmp_path, files, expected):
    folder_with(tmp_path, tokenizer=json.loads(sentencepiece_tokenizer(HOUSES).json), **files)
    state, names = tokenizers.state_of_dataset(tmp_path), ('special_tokens', 'chat_template')
    assert {name: value for name, value in state.items() if name in ('end_tokens', *names)} == expected
    ours = tokenizers.from_state(state)
    eos = [2] if 'special_tokens' in expected else []
    assert list(ours.end_tokens) == expected.get('end_tokens', eos)  # there is no <|endoftext|> in it
    assert ours.special_tokens == expected.get('special_tokens', {})


@pytest.mark.parametrize('ends', [[2], [2, 259]])
def test_a_tokenizer_goes_through_checkpoints_and_folders(tmp_path, ends):
    ours = sentencepiece_tokenizer(HOUSES, end_tokens=ends, chat_template=TEMPLATE, special_tokens=dict(
        bos_token='<s>', eos_token='</s>', unk_token='<unk>'))
    model, messages = gpt(**UNTIED | dict(vocab_size=400)), [dict(role='user', content='the house')]
    checkpoint.save(dict(model=model.state_dict(), model_args=checkpoint.model_args(model.config),
                         tokenizer=ours.state()), tmp_path / 'ckpt.pt')
    formats.to_huggingface(model, tmp_path / 'hf', ours)
    for back in (checkpoint.tokenizer_of(checkpoint.load(tmp_path / 'ckpt.pt')),
                 tokenizers.from_state(tokenizers.state_of_dataset(tmp_path / 'hf'))):
        changed = dict(json='', file_ids={})
        assert back.state() | changed == ours.state() | changed
        assert json.loads(back.json) == json.loads(ours.json)
        assert back.begins == [1] and back.encode(LONG) == ours.encode(LONG)
        assert back.conversation(messages) == ours.conversation(messages)
    transformers = pytest.importorskip('transformers', reason="transformers is not installed")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf')
    assert theirs(LONG)['input_ids'] == ours.encode(LONG)
    assert theirs.apply_chat_template(messages, return_dict=False) == ours.conversation(messages)
    config = transformers.AutoConfig.from_pretrained(tmp_path / 'hf')
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / 'hf')
    assert config.bos_token_id == 1 and config.eos_token_id == settings.eos_token_id == (
        ends if len(ends) > 1 else ends[0])


NAMES = ['<|endoftext|>', '<|im_start|>', '<|im_end|>', '<pad>']
LAST = ("{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{% if not loop.last %} <|im_end|>{% endif %}"
        "{% endfor %}")


def folder_with(folder, **files):
    """A folder with these .json files, or .jinja of texts, and by default a tokenizer.json of NAMES and 300 ids."""
    folder.mkdir(exist_ok=True)
    for name, content in (dict(tokenizer=json.loads(json_tokenizer(TEXT, 300, NAMES).json)) | files).items():
        is_text = isinstance(content, str)
        path = folder / f'{name}.{"jinja" if is_text else "json"}'
        path.write_text(content if is_text else json.dumps(content), encoding='utf-8')
    return folder


def tokenizer_of(folder):
    return tokenizers.from_state(json.loads(json.dumps(tokenizers.state_of_dataset(folder))))


def test_a_template_that_leaves_out_what_is_said_is_refused():
    """One for lists of parts, as those of models that read images, would drop the texts in silence."""
    parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}."
    tokenizer = json_tokenizer(TEXT)
    tokenizer.chat_template = ChatTemplate(parts)
    for content in 'Hello', ' Hello ':
        with pytest.raises(ValueError, match='leaves out the text of every message'):
            tokenizer.conversation([dict(role='user', content=content)])
    for content in ' ', '', None:
        assert tokenizer.conversation([dict(role='user', content=content or '')]) == tokenizer.encode('.')


@pytest.mark.parametrize('config, generation_config, tokenizer_config, ends', [
    (dict(eos_token_id=0), dict(eos_token_id=0), dict(eos_token='<|im_end|>'), {0, 2}),
    (dict(eos_token_id=0), dict(eos_token_id=[3]), {}, {0, 3}),
    ({}, {}, dict(eos_token='<|im_end|>'), {0, 2}),            # <|endoftext|> is one where no file says another
    (dict(eos_token_id=3), {}, dict(chat_template=CHAT), {2, 3}),  # a base model that was trained further, to chat
    (dict(eos_token_id=3), {}, dict(chat_template=LAST), {2, 3}),
    (dict(eos_token_id=3), {}, dict(chat_template="{{ messages[0].content }} <pad> Kx7q."), {3}),
    (dict(eos_token_id=3), {}, dict(chat_template='{{ messages[5].content.x }}'), {3}),
    (dict(eos_token_id=[3, 300, -1]), dict(eos_token_id=999), {}, {3}),
])
def test_an_answer_ends_at_what_the_files_and_the_template_say_together(tmp_path, capsys, config, generation_config,
                                                                        tokenizer_config, ends):
    ours = tokenizer_of(folder_with(tmp_path, config=config, generation_config=generation_config,
                                    tokenizer_config=tokenizer_config))
    assert {*ours.end_tokens} == ends and ours.end_tokens is ours.end_tokens
    said = capsys.readouterr().err
    assert said.count('\n') == (999 in generation_config.values()) + ('x }}' in str(tokenizer_config))
    assert ('the model does not have: 999, 300, -1 of 300' in said) == (999 in generation_config.values())


def flags(text, **changes):
    return dict(content=text, lstrip=False, rstrip=False, single_word=False, normalized=False, special=True) | changes


@pytest.mark.parametrize('files', [
    dict(tokenizer_config=dict(eos_token='<|im_end|>', pad_token='[PAD]', added_tokens_decoder={
        '300': flags('<|user|>'), '301': flags('<|end|>'), '302': flags('<think>', special=False)})),
    dict(tokenizer_config=dict(added_tokens_decoder={  # their order, blanks beside them, and no others than these
        '1000': flags('<b>'), '301': flags('<a>', lstrip=True), '99': flags('<c>', rstrip=True)})),
    dict(tokenizer_config=dict(eos_token='<|end|>', added_tokens_decoder={'0': flags('<|endoftext|>', special=False)})),
    dict(tokenizer_config=dict(eos_token='<pad>', added_tokens_decoder={'3': flags('<pad>', special=False)})),
    dict(tokenizer_config={}, special_tokens_map=dict(eos_token='<|end|>')),
    dict(tokenizer_config=dict(mask_token='<a>', cls_token='<c>', additional_special_tokens=['<|user|>', '<b>'])),
    dict(tokenizer_config=dict(extra_special_tokens=['<x>', '<|end|>'])),
    # older folders: special_tokens_map.json has precedence, and added_tokens.json adds tokens
    dict(tokenizer_config=dict(eos_token='<pad>'), special_tokens_map=dict(eos_token='<|end|>'),
         added_tokens={'<a>': 302, '<|end|>': 301, '<b>': 300, '<pad>': 3}),
    dict(tokenizer_config=dict(eos_token='<pad>', added_tokens_decoder={}), added_tokens={'<a>': 300},
         special_tokens_map=dict(eos_token='<|end|>')),
])
def test_tokens_of_the_files_beside_it_are_those_of_transformers(tmp_path, files):
    transformers = pytest.importorskip('transformers', reason="transformers is not installed")
    files['tokenizer_config']['tokenizer_class'] = 'PreTrainedTokenizerFast'
    ours, theirs = tokenizer_of(folder_with(tmp_path, **files)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = 'a <|endoftext|> b<|user|>user\nhi<|end|> <a> <b> <c> <x><y><think> the<pad> [PAD]<|im_end|>'
    assert ours.encode(text) == theirs(text)['input_ids'] and ours.vocab_size == len(theirs)
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert {*ours.end_tokens} >= {i for i in [theirs.eos_token_id] if i is not None}


def test_special_tokens_have_no_text_in_an_answer(tmp_path):
    """The text of all ids without the special ones is that of the library."""
    ours = tokenizer_of(folder_with(tmp_path, tokenizer_config=dict(added_tokens_decoder={
        '300': flags('<think>', special=False)})))
    ids = ours.encode('a<|im_start|>b <think><|im_end|> c<|endoftext|>')
    assert ours.special_ids == {0, 1, 2, 3} and ours.added_ids == {0, 1, 2, 3, 300}
    for skip in (False, True):
        stream = TextStream(ours.bytes_of_tokens(310, skip_special=skip))
        assert stream.push(*ids) + stream.finish() == ours.library.decode(ids, skip_special_tokens=skip)


def test_more_added_tokens_than_the_model_has_rows(tmp_path, capsys):
    """As transformers and vLLM do, the model is loaded; a text with such a token is refused, and it ends nothing."""
    folder = folder_with(tmp_path / 'hf', tokenizer_config=dict(pad_token='[PAD]', eos_token='<|eot|>'))
    beside = {path.name: path.read_bytes() for path in folder.glob('tokenizer*')}
    formats.to_huggingface(gpt(**UNTIED | dict(vocab_size=300)), tmp_path / 'model')
    for name, content in beside.items():
        (tmp_path / 'model' / name).write_bytes(content)
    _, ours, _ = checkpoint.load_model(str(tmp_path / 'model'), '', plain_model)
    said = capsys.readouterr().err
    assert said.count('\n') == 2
    assert "the tokenizer has 302 tokens, and the model 300: texts with '[PAD]<|eot|>' are refused" in said
    assert ours.end_tokens == (0,) and 'the model does not have: 301 of 300' in capsys.readouterr().err
    ours = tokenizer_of(folder_with(tmp_path / 'hf', config=dict(eos_token_id=305)))
    ours.n_rows = 310  # a model with more rows may end with one of those
    assert ours.end_tokens == (305, 301)
    ours = checkpoint.load_model(str(tmp_path / 'model'), '', plain_model)[1]
    assert ours.encode('a <pad>') and max(ours.encode(LONG)) < 300
    with pytest.raises(ValueError, match=r"^the token '\[PAD\]' \(id 300\), but the model has 300"):
        ours.encode('a [PAD]')


def test_other_threads_run_while_a_long_text_is_encoded():
    """Python's lock is free: another thread goes on in the middle of it, not only before and after it."""
    ours, times, done = json_tokenizer(TEXT), [], threading.Event()

    def tick():
        while not done.wait(0.002):
            times.append(time.perf_counter())
    text, thread = 'ab ' * 300_000, threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    ours.encode(text)
    ended = time.perf_counter()
    done.set()
    thread.join()
    middle = began + (ended - began) / 4, began + (ended - began) / 2
    assert any(middle[0] < t < middle[1] for t in times)
