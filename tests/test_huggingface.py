"""formats/huggingface.py, against those who read what it writes: transformers and its tokenizers."""
import copy
import json
import os
from dataclasses import dataclass, fields

import pytest
import torch
from conftest import SHARED_TEXT
from example_models import (
    ALIBI,
    EASY,
    FAMILIES,
    HARD,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    ROPE,
    SCALED,
    TEXT,
    UNTIED,
    bpe,
    fields_in_files,
    gpt,
    json_tokenizer,
    logits,
    needs_byte_pairs,
)
from torch.testing import assert_close

import checkpoint
import formats
import model as plain_model
import tokenizer as tokenizers
from formats.families import FIELDS, family_of
from model import GPT, GPTConfig
from tokenizer import CharTokenizer

transformers = pytest.importorskip('transformers', reason="transformers is not installed")


@pytest.mark.parametrize('config, family', FAMILIES + SCALED)
def test_transformers_computes_the_same_and_it_is_read_back(tmp_path, config, family):
    model = gpt(**config)
    assert formats.to_huggingface(model, tmp_path / 'hf') == family
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'hf', output_loading_info=True)
    assert not any(loading.values()), loading
    assert theirs.config.model_type == family
    block_size, endless = config['block_size'], 'window' in config  # past it only a window model is trained to go
    idx = torch.randint(config['vocab_size'], (3, block_size * (3 if endless else 1)))
    with torch.no_grad():
        expected = theirs.eval()(idx).logits
    assert_close(logits(model, idx), expected, atol=3e-5 * expected.abs().max().item(), rtol=0)
    greedy = dict(do_sample=False, max_new_tokens=6 + 60 * endless, pad_token_id=0, attention_mask=torch.ones(3, 4))
    ours = model.generate(idx[:, :4], greedy['max_new_tokens'], temperature=0, use_cache=True)
    assert theirs.generate(idx[:, :4], **greedy).tolist() == ours.tolist()
    back = GPT.from_pretrained(str(tmp_path / 'hf')).eval()
    assert torch.equal(logits(back, idx[:, :block_size]), logits(model, idx[:, :block_size]))
    own = dict(n_kv_head=config['n_head']) if family in ('gpt2', 'mpt') else {}
    own |= dict(bias=model.config.bias) if family == 'starcoder2' else {}
    assert vars(back.config) == fields_in_files(model.config) | own
    formats.to_huggingface(back, tmp_path / 'again')
    assert (tmp_path / 'again' / 'model.safetensors').read_bytes() == (
        tmp_path / 'hf' / 'model.safetensors').read_bytes()


@dataclass
class WiderConfig(GPTConfig):
    """As somebody changes GPTConfig in model.py."""
    activation: str = 'gelu'


def test_a_new_field_of_gptconfig_that_is_not_its_default_is_refused():
    assert {field.name for field in fields(GPTConfig)} == FIELDS
    assert family_of(WiderConfig()) == 'gpt2'
    with pytest.raises(ValueError, match='GPTConfig has activation=relu2, but no format of an export has such a field'):
        family_of(WiderConfig(activation='relu2'))


@pytest.mark.parametrize('to, config, line', [
    *[(to, *case) for to in (formats.to_huggingface, formats.to_gguf) for case in (
        (ROPE | dict(window=5, n_sink=2), 'n_sink 2: none of the models'),
        (HARD | dict(window=5), 'window 5 with position=learned'),
        (HARD | dict(window=5, position='none'), 'window 5 with position=none'),
        (ALIBI | dict(window=5), 'window 5 with position=alibi'),
        (QWEN3 | dict(qkv_bias=True), 'no family of Llama.s kind has these together'),
        (MISTRAL | dict(bias=True), 'no family of Llama.s kind has these together'),
        (UNTIED | dict(mlp='gelu'), 'norm=rms, mlp=gelu, position=rope'),
        (UNTIED | dict(position='none'), 'norm=rms, mlp=swiglu, position=none'),
        (ROPE | dict(norm='rms'), 'norm=rms, mlp=gelu'),
        (ROPE | dict(head_dim=10), 'head_dim=10'))],
    (formats.to_huggingface, UNTIED | dict(n_embd=40, n_head=3, n_kv_head=1, head_dim=16, bias=True), 'divides n_embd'),
    (formats.to_huggingface, ALIBI | dict(bias=True), 'have no biases: train with --bias=False'),
    (formats.to_huggingface, ALIBI | dict(gelu='tanh'), 'have the exact GELU: train with --gelu=none'),
    (formats.to_huggingface, ALIBI | dict(n_inner=96), 'n_inner 96, but in transformers'),
    (formats.to_gguf, QWEN3 | dict(qk_norm=False, qkv_bias=True, head_dim=16), 'head_dim 16, but in llama.cpp'),
])
def test_what_no_family_computes_is_refused(tmp_path, to, config, line):
    if to is formats.to_gguf:
        pytest.importorskip('gguf', reason="gguf is not installed")
    with pytest.raises(ValueError, match=line):
        to(gpt(**config), tmp_path / 'new')
    assert not os.listdir(tmp_path)


def test_characters_in_hugging_faces_tokenizer(tmp_path):
    ours = CharTokenizer.of_text(TEXT)
    formats.to_huggingface(gpt(**HARD | dict(vocab_size=ours.vocab_size + 3)), tmp_path / 'hf', ours)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf')
    assert set(theirs(TEXT)) == {'input_ids', 'attention_mask'}  # GPT-2 would add the embeddings of token_type_ids
    assert theirs(TEXT)['input_ids'] == ours.encode(TEXT) and theirs.decode(ours.encode(TEXT)) == TEXT
    # no character ends a text: GPT-2's 50256 by default
    assert transformers.GPT2Config.from_pretrained(tmp_path / 'hf').eos_token_id is None
    # a character the model has never seen becomes a space, in the text and at its ends
    unknown = theirs('žlo\t日')['input_ids']
    assert unknown == ours.encode(' lo\t日') and theirs.decode(unknown, skip_special_tokens=True) == ' lo\t日'
    # characters are none of them: they are left out of a decoded text
    assert set(theirs.all_special_tokens) == {'<|endoftext|>'}
    assert tokenizers.from_state(tokenizers.state_of_dataset(tmp_path / 'hf')).chars == ours.chars
    # where there is no space, it becomes the first character
    formats.to_huggingface(gpt(**HARD | dict(vocab_size=3)), tmp_path / 'hf', CharTokenizer('abc'))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf')('bxc')['input_ids'] == [1, 0, 2]


def test_a_qwen2_says_how_another_tokenizer_is_loaded(tmp_path, capsys):
    """AutoTokenizer gives it Qwen's rules."""
    ours = CharTokenizer.of_text(TEXT)
    formats.to_huggingface(gpt(**QWEN2 | dict(vocab_size=ours.vocab_size)), tmp_path / 'hf', ours)
    assert 'use PreTrainedTokenizerFast' in capsys.readouterr().err
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / 'hf')
    assert theirs(TEXT)['input_ids'] == ours.encode(TEXT)
    formats.to_huggingface(gpt(**UNTIED | dict(vocab_size=ours.vocab_size)), tmp_path / 'hf', ours)
    assert not capsys.readouterr().err


@pytest.mark.parametrize('config', [EASY, LLAMA])
def test_copies_and_batches_of_characters(tmp_path, config):
    """A copied tokenizer has the same ids. With a character that pads a batch, each answer is as the one alone."""
    ours = CharTokenizer.of_text('\n !<|end>abcdefox€')
    formats.to_huggingface(gpt(**config | dict(vocab_size=ours.vocab_size)), tmp_path / 'hf', ours)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf')
    theirs.save_pretrained(tmp_path / 'saved')
    for same in theirs, copy.deepcopy(theirs), transformers.AutoTokenizer.from_pretrained(tmp_path / 'saved'):
        assert same(''.join(ours.chars))['input_ids'] == [*range(ours.vocab_size)]
        assert same.decode(range(ours.vocab_size), skip_special_tokens=True) == ''.join(ours.chars)
        assert same.decode(same.eos_token_id) == '<|endoftext|>'
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'hf')
    pipeline, how = transformers.pipeline('text-generation', model=model, tokenizer=theirs), dict(
        max_new_tokens=12, do_sample=False)
    texts = ['a\n b', 'foo!\n\nbad', 'x']
    alone = [pipeline([text], **how)[0] for text in texts]
    assert all(len(answer[0]['generated_text']) == len(text) + 12 for answer, text in zip(alone, texts))
    theirs.pad_token = '€'  # which is in no answer, as it is then left out
    assert pipeline(texts, batch_size=2, **how) == alone


@pytest.mark.parametrize('ids', [dict(bos_token_id=0, eos_token_id=0), dict(bos_token_id=None, eos_token_id=None)])
def test_an_imported_model_goes_out_with_the_ids_it_came_with(tmp_path, ids):
    content = json.loads(json_tokenizer(TEXT, 300, ['<|endoftext|>', '<s>', '<|im_end|>', '<pad>']).json)
    formats.to_huggingface(gpt(**UNTIED | dict(vocab_size=305)), tmp_path / 'in')
    config = json.loads((tmp_path / 'in' / 'config.json').read_text())
    added = {'300': dict(content='<tool>', special=False), '301': dict(content='<|x|>', special=True)}
    for name, of_file in {
        'config.json': config | ids, 'tokenizer.json': content,
        'generation_config.json': dict(bos_token_id=1, eos_token_id=[2, 0], pad_token_id=3, temperature=0.5),
        'tokenizer_config.json': dict(bos_token='<s>', eos_token='<|im_end|>', pad_token='<pad>',
                                      added_tokens_decoder=added, tokenizer_class='PreTrainedTokenizerFast'),
    }.items():
        (tmp_path / 'in' / name).write_text(json.dumps(of_file), encoding='utf-8')
    model, ours, _ = checkpoint.load_model(str(tmp_path / 'in'), '', plain_model)
    formats.to_huggingface(model, tmp_path / 'out', tokenizers.from_state(ours.state()))

    def facts(folder):
        theirs, c = transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoConfig.from_pretrained(folder)
        g = transformers.GenerationConfig.from_pretrained(folder)
        return (theirs.special_tokens_map, {i: str(token) for i, token in theirs.added_tokens_decoder.items()},
                sorted(theirs.all_special_ids), theirs('<tool><s> a<|x|>')['input_ids'], c.bos_token_id, c.eos_token_id,
                c.pad_token_id, g.bos_token_id, g.eos_token_id, g.pad_token_id)
    assert facts(tmp_path / 'out') == facts(tmp_path / 'in')


@needs_byte_pairs
def test_byte_pairs_in_hugging_faces_tokenizer(tmp_path, monkeypatch):
    ours = bpe(monkeypatch)
    formats.to_huggingface(gpt(**EASY | dict(vocab_size=50304)), tmp_path / 'hf', ours)
    text = TEXT + '<|endoftext|>' + (open(SHARED_TEXT).read()[:10000] if os.path.exists(SHARED_TEXT) else '')
    for auto in (transformers.AutoTokenizer, transformers.GPT2TokenizerFast):
        theirs = auto.from_pretrained(tmp_path / 'hf')
        assert theirs(text, truncation=False)['input_ids'] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
        assert theirs.eos_token_id == 50256 and theirs.decode([15496, 50300]) == 'Hello'
    assert tokenizers.state_of_dataset(tmp_path / 'hf') == {'kind': 'gpt2'}


def test_an_export_is_replaced_whole_and_nothing_else_is_touched(tmp_path, monkeypatch):
    folder, tokenizer = tmp_path / 'hf', CharTokenizer('ab')
    model = gpt(**HARD | dict(vocab_size=2))
    formats.to_huggingface(model, folder, tokenizer)
    formats.to_huggingface(gpt(**HARD), str(folder) + '/')  # no tokenizer: the old one must not stay
    assert sorted(os.listdir(folder)) == ['config.json', 'model.safetensors'] and os.listdir(tmp_path) == ['hf']
    assert os.stat(folder / 'model.safetensors').st_mode == os.stat(folder / 'config.json').st_mode
    before = (folder / 'model.safetensors').read_bytes()

    def full(*args, **kwargs):
        raise OSError("No space left on device")
    with monkeypatch.context() as m, pytest.raises(OSError, match='No space'):
        m.setattr('formats.huggingface.save_file', full)
        formats.to_huggingface(model, folder, tokenizer)
    assert os.listdir(tmp_path) == ['hf'] and (folder / 'model.safetensors').read_bytes() == before
    (folder / 'thesis.txt').write_text('mine')
    with pytest.raises(ValueError, match='holds thesis.txt, which is no export'):
        formats.to_huggingface(model, folder)
    with pytest.raises(ValueError, match='is no folder'):
        formats.to_huggingface(model, folder / 'thesis.txt')
    assert (folder / 'thesis.txt').read_text() == 'mine' and os.listdir(tmp_path) == ['hf']


@pytest.mark.parametrize('to', [formats.to_huggingface, formats.to_gguf])
def test_a_tokenizer_of_another_model_is_refused(tmp_path, to):
    if to is formats.to_gguf:
        pytest.importorskip('gguf', reason="gguf is not installed")
    with pytest.raises(ValueError, match='65 tokens, but the model a vocab_size of 37'):
        to(gpt(**HARD), tmp_path / 'new', tokenizer=CharTokenizer.of_text(map(chr, range(65))))
    assert not os.listdir(tmp_path)
