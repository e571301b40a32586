"""formats/from_gguf.py and gguf_tokenizer.py, against the gguf library, llama.cpp and transformers."""
import dataclasses
import itertools
import json
import os
import random
import sys
import unicodedata

import numpy as np
import pytest
import torch
from conftest import ROOT, run, sizes
from example_models import (
    CHAT,
    HARD,
    LLAMA,
    QWEN2,
    QWEN3,
    ROPE,
    TEXT,
    UNTIED,
    gpt,
    json_tokenizer,
    logits,
    sentencepiece_tokenizer,
)
from test_gguf import llama
from test_linears import dequantised
from tokenizers import pre_tokenizers

import checkpoint
import decode
import formats
import model as plain_model
import tokenizer as tokenizers
from benchmarks.shapes import LLAMAS
from decode.weights import PackedWeights
from engine import Engine
from formats.from_gguf import GGUFFile
from formats.gguf_tokenizer import END_TEXTS
from formats.huggingface import huggingface_weights
from model import GPT, GPTConfig
from tokenizer import byte_level_alphabet

gguf = pytest.importorskip('gguf', reason="gguf is not installed")
F32 = gguf.GGMLQuantizationType.F32
full_only = pytest.mark.skipif('not config.getoption("--full")', reason="a part of make test-all")


def rewrite(path, fields=(), tensors=()):
    """
    Write a GGUF file again with the gguf library: with other fields, of which None takes one out, and other tensors
    {name: (numbers, kind), or None}.
    """
    old = GGUFFile(str(path))
    tensors = {name: (old.numbers(name, torch.float32).numpy(), F32) for name in old.tensors} | dict(tensors)
    fields = old.fields | dict(fields)
    writer = gguf.GGUFWriter(path, fields.pop('general.architecture'))
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
           list: writer.add_array}
    for key, value in fields.items():
        if value is not None:
            add[type(value)](key, value)
    for name, of_name in tensors.items():
        if of_name is not None:
            writer.add_tensor(name, of_name[0], raw_dtype=of_name[1])
    for part in ('header_to_file', 'kv_data_to_file', 'tensors_to_file'):
        getattr(writer, 'write_' + part)()
    writer.close()


def load(path, **how):
    return formats.from_pretrained(GPT, GPTConfig, str(path), {}, **how).eval()


@pytest.mark.parametrize('config, architecture', [(UNTIED, 'llama'), (QWEN2, 'qwen2'), (QWEN3, 'qwen3'),
                                                  (ROPE | dict(gelu='tanh', bias=True), 'starcoder2')])
def test_a_window_that_a_file_names(tmp_path, config, architecture):
    formats.to_gguf(gpt(**config), tmp_path / 'model.gguf')
    rewrite(tmp_path / 'model.gguf', {f'{architecture}.attention.sliding_window': 7})
    back, model = load(tmp_path / 'model.gguf'), gpt(**config | dict(window=7))
    assert back.config == model.config
    idx = torch.arange(24)[None]
    assert torch.equal(logits(back, idx), logits(model, idx))


@pytest.mark.parametrize('config, architecture', [(UNTIED, 'llama'), (ROPE | dict(gelu='tanh'), 'starcoder2')])
@pytest.mark.parametrize('kind, expected', [('linear', (4.0, 1.0, 4.0, 1)), (None, (4.0, 1.0, 4.0, 1)), ('none', ())])
def test_rotary_positions_that_a_file_divides(tmp_path, config, architecture, kind, expected):
    formats.to_gguf(gpt(**config), tmp_path / 'model.gguf')
    key = f'{architecture}.rope.scaling.'
    rewrite(tmp_path / 'model.gguf', {key + 'type': kind, key + 'factor': 4.0})
    back, idx = load(tmp_path / 'model.gguf'), torch.randint(128, (1, 24))
    assert back.config.rope_scaling == expected
    theirs = llama(tmp_path / 'model.gguf')
    theirs.eval(idx[0].tolist())
    ours = logits(back, idx)[0]
    assert (ours - torch.tensor(theirs.scores[:24])).std() < 2e-3 * ours.std()


def with_norms_of_bfloat16(model):
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.copy_(p.bfloat16())
    return model


BLOCKS = dict(LLAMA, n_embd=256, n_inner=512, n_head=2, n_kv_head=2, head_dim=128)  # all kinds have 256 numbers at most


@pytest.mark.parametrize('kind', 'F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL TQ2_0'.split())
def test_each_type_of_numbers(tmp_path, monkeypatch, kind):
    """Also where a matrix is read in parts, of which the last one is shorter. llama.cpp computes the same."""
    path, kind, tensors = tmp_path / 'model.gguf', gguf.GGMLQuantizationType[kind], {}
    formats.to_gguf(with_norms_of_bfloat16(gpt(**BLOCKS)), path)
    source, draw = GGUFFile(str(path)), np.random.default_rng(0)
    for name, tensor in source.tensors.items():
        if len(tensor.shape) == 2:
            w = source.numbers(name, torch.float32).numpy()
            try:
                tensors[name] = gguf.quantize(w, kind), kind
            except NotImplementedError:  # the library only reads these: drawn bytes, whose scales are small
                n_in_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
                blocks = draw.integers(0, 256, (w.size // n_in_block, n_bytes), np.uint8)
                for at in dict(Q2_K=(-4, -2), Q3_K=(-2,), Q6_K=(-2,)).get(kind.name, (0, 2)):
                    blocks[:, at:at + 2 or None] = np.float16([1e-4]).view(np.uint8)
                tensors[name] = blocks.reshape(len(w), -1), kind
    rewrite(path, tensors=tensors)
    monkeypatch.setattr('formats.from_gguf.AT_ONCE', 100 * 256)
    model, dtype = load(path), torch.bfloat16 if kind.name == 'BF16' else torch.float32
    assert {p.dtype for p in model.parameters()} == {dtype}
    for name, part in {'token_embd': model.transformer.wte, 'blk.1.ffn_down': model.transformer.h[1].mlp.c_proj,
                       'blk.0.ffn_gate': model.transformer.h[0].mlp.c_gate}.items():
        expected = torch.from_numpy(gguf.dequantize(*tensors[name + '.weight']))
        assert torch.equal(part.weight, expected.to(dtype)), name
    theirs, idx = llama(path), torch.randint(300, (1, 24))
    theirs.eval(idx[0].tolist())
    ours, scores = logits(model.float(), idx)[0], torch.tensor(theirs.scores[:24])
    bound = dict(F16=0.01, BF16=0.04).get(kind.name, 0.2)  # it rounds activations too: to 8 bits beside blocks
    assert (ours - scores).std() < bound * scores.std()


def test_matrices_of_two_types_lose_nothing(tmp_path):
    """The embeddings alone are bfloat16, or the norms alone are not."""
    path, BF16 = tmp_path / 'model.gguf', gguf.GGMLQuantizationType.BF16
    for model, are_rounded in (with_norms_of_bfloat16(gpt(**BLOCKS)), 'token_embd.weight'), (gpt(**BLOCKS), 'weight'):
        formats.to_gguf(model, path)
        source = GGUFFile(str(path))
        rewrite(path, tensors={
            name: (gguf.quantize(source.numbers(name, torch.float32).numpy(), BF16), BF16)
            for name, tensor in source.tensors.items() if len(tensor.shape) == 2 and name.endswith(are_rounded)})
        back = load(path)
        assert all(p.dtype is torch.float32 for p in back.parameters())
        assert all(torch.equal(p, q) for p, q in zip(back.parameters(), model.parameters()) if p.dim() == 1)
        ours, theirs = (m.transformer.h[0].mlp.c_fc.weight for m in (back, model))
        assert torch.equal(ours, theirs if are_rounded != 'weight' else theirs.bfloat16().float())


@pytest.mark.parametrize('config, weights', [(UNTIED, 'int8'), (LLAMA, 'int4'), (QWEN2, 'bfloat16'),
                                             (HARD, 'int8'), (ROPE, 'int8')])
@pytest.mark.parametrize('write', [formats.to_gguf, formats.to_huggingface])
def test_matrices_that_are_read_when_they_are_packed(tmp_path, config, weights, write):
    path = str(tmp_path / ('model.gguf' if write is formats.to_gguf else 'hf'))
    write(gpt(**config), path)
    eager, lazy = load(path), load(path, lazy=True)
    assert {name for name, p in lazy.named_parameters() if p.is_meta} == {
        name for name, p in eager.named_parameters() if p.dim() == 2 and 'wte' not in name and 'wpe' not in name
        and (name != 'lm_head.weight' or not config.get('tied', True))}
    packed = [PackedWeights(model, weights) for model in (eager, lazy)]
    for each in packed:
        each.fill()
    ours, theirs = (each.arrays for each in packed)
    assert all(np.array_equal(ours[index], theirs[index]) for index in ours)
    ours, theirs = (Engine(model, decode.best(model, 1, weights, 1)).generate([[3, 4], [5]], 9, seed=1)
                    for model in (eager, lazy))
    assert ours == theirs


@pytest.mark.parametrize('weights', ['int8', 'int4', 'bfloat16'])
def test_embeddings_that_are_lm_head_too_are_its_packed_rows(tmp_path, weights):
    model = gpt(**LLAMA | dict(n_embd=96, n_inner=64, vocab_size=131, tied=True))
    formats.to_gguf(model, tmp_path / 'model.gguf', 'q8_0')
    lazy, eager = load(tmp_path / 'model.gguf', lazy=True), load(tmp_path / 'model.gguf')
    assert lazy.transformer.wte.weight.is_meta
    w = eager.lm_head.weight.detach().bfloat16().float()
    eager.config.tied, eager.lm_head.weight = False, torch.nn.Parameter(w)
    eager.transformer.wte.weight = torch.nn.Parameter(dequantised(w, 8).float() if weights == 'int8' else w)
    idx = [[i, (i * 7 + 1) % 131] for i in range(131)]
    ours, theirs = (Engine(m, decode.best(m, 1, weights, 2)).generate(idx, 5) for m in (lazy, eager))
    assert ours == theirs


# what is refused, and what is damaged

@pytest.fixture(scope='module')
def small(tmp_path_factory):
    """The bytes of a small llama with a tokenizer."""
    path = tmp_path_factory.mktemp('small') / 'model.gguf'
    formats.to_gguf(gpt(**LLAMA | dict(vocab_size=304)), path, tokenizer=json_tokenizer(TEXT))
    return path.read_bytes()


@pytest.mark.parametrize('fields, tensors, line', [  # of a llama that are changed, what the line has to say
    ({'general.architecture': 'mamba'}, {}, "general.architecture is 'mamba', but only llama, qwen2, qwen3, gpt2"),
    ({'general.type': 'adapter'}, {}, "general.type is 'adapter'"), ({'split.count': 3}, {}, 'split.count is 3'),
    *[({f'llama.{key}': value}, {}, f'llama.{key} is {value!r}') for key, value in (
        ('expert_count', 8), ('rope.scaling.type', 'yarn'), ('rope.dimension_count', 4),
        ('attention.value_length', 4), ('attention.causal', False), ('logit_scale', 2.0))],
    ({'llama.attention.head_count': [2, 4]}, {}, 'attention.head_count must be of type int, not [2, 4]'),
    ({'llama.block_count': None}, {}, 'block_count must be of type int, not None'),
    ({'llama.block_count': 10**6}, {}, 'n_layer must be a positive integer up to 4,096'),
    ({'llama.block_count': 3}, {}, 'n_layer is 3, but the weights have 2 layers'),
    ({'llama.rope.scaling.factor': 2.0}, {'rope_freqs.weight': (np.float32([1, 2, 3, 7]), F32)}, 'only one of them'),
    ({'llama.rope.freq_base': 'x'}, {}, 'rope.freq_base must be of type float'),
    ({'llama.attention.layer_norm_rms_epsilon': None}, {}, 'norm_eps must be between 1e-37 and 1, not None'),
    ({}, {'rope_freqs.weight': (np.float32([1, 2, 3, 7]), F32)}, 'rope_freqs.weight must be those of Llama 3 or'),
    ({'llama.attention.key_length': 2**30, 'llama.attention.value_length': None, 'llama.rope.dimension_count': None},
     {'rope_freqs.weight': (np.float32([1, 2, 3, 7]), F32)}, 'must have a number for each pair of the 1073741824'),
    ({'llama.attention.key_length': '8'}, {}, "attention.key_length must be of type int, not '8'"),
    ({'general.alignment': 1.5}, {}, 'general.alignment must be of type int, not 1.5'),
    ({}, {'x\ny' * 999: (np.float32([1]), F32)}, 'no place for'),
    ({}, {'token_embd.weight': None}, 'it lacks the weights token_embd.weight'),
    ({}, {'blk.1.ffn_up.weight': None}, 'it lacks the weights layers.1.mlp.up_proj.weight'),
    ({}, {'blk.0.attn_sinks.weight': (np.float32([1]), F32)}, 'no place for: blk.0.attn_sinks.weight'),
    ({}, {'blk.0.ffn_up.weight': (np.ones((56, 32), np.int32), gguf.GGMLQuantizationType.I32)}, 'of type I32'),
    ({}, {'blk.0.ffn_up.weight': (np.ones((57, 32), np.float32), F32)}, 'size mismatch'),
    ({'tokenizer.ggml.model': 't5'}, {}, "tokenizer.ggml.model is 't5'"),
    ({'tokenizer.ggml.pre': 'unheard-of' * 999}, {}, "tokenizer.ggml.pre is 'unheard-of"),
    ({'tokenizer.ggml.tokens': [7]}, {}, 'tokenizer.ggml.tokens must be texts'),
    *[({f'tokenizer.ggml.{key}': value}, {}, f'{key} must be of type list, not {value}') for key, value in (
        ('tokens', 7), ('token_type', 7), ('merges', None))],
    ({'tokenizer.ggml.model': 'llama', 'tokenizer.ggml.scores': ['x'] * 300}, {}, 'or some that are no floats'),
])
def test_what_cannot_be_represented_is_refused_by_name(small, tmp_path, monkeypatch, fields, tensors, line):
    """What the header says, before weights are read."""
    (tmp_path / 'model.gguf').write_bytes(small)
    rewrite(tmp_path / 'model.gguf', fields, tensors)
    if not tensors:
        monkeypatch.setattr(GGUFFile, 'numbers', lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError) as refused:
        checkpoint.load_model(str(tmp_path / 'model.gguf'), '', plain_model)
    assert line in str(refused.value) and 'model.gguf' in str(refused.value) and '\n' not in str(refused.value)
    assert len(str(refused.value)) < 600


def test_a_damaged_file_is_one_line(small, tmp_path):
    path, rng = tmp_path / 'model.gguf', random.Random(0)
    for cut in (0, 3, 4, 11, 24, *(rng.randrange(len(small)) for _ in range(sizes(20, 200))), len(small) - 1):
        path.write_bytes(small[:cut])
        with pytest.raises(ValueError) as refused:
            load(path)
        assert '\n' not in str(refused.value) and 'model.gguf' in str(refused.value)
        assert cut < 4 or 'cannot be read' in str(refused.value)  # before weights are read
    header = small.index(b'blk.0.attn_norm')
    for _ in range(sizes(60, 1000)):  # a byte that is another one: it is refused in a line, or it is a model
        at = rng.randrange(header)
        path.write_bytes(small[:at] + bytes([rng.randrange(256)]) + small[at + 1:])
        try:
            checkpoint.load_model(str(path), '', plain_model)
        except ValueError as e:
            assert '\n' not in str(e)


# tokenizers

SCRIPTS = [(0x20, 0x7e), (0x20, 0x7e), (0x30, 0x39), (0xa0, 0x24f), (0x370, 0x3ff), (0x400, 0x4ff), (0x531, 0x586),
           (0x5d0, 0x5ea), (0x620, 0x669), (0x900, 0x97f), (0x980, 0x9fe), (0xb80, 0xbff), (0xe01, 0xe5b),
           (0xf00, 0xfbc), (0x10a0, 0x10ff), (0x1100, 0x11ff), (0x1200, 0x137c), (0x1780, 0x17f9), (0x1e00, 0x1fff),
           (0x2010, 0x205e), (0x2070, 0x218b), (0x2190, 0x23ff), (0x2460, 0x24ff), (0x3000, 0x30ff), (0x4e00, 0x9fa5),
           (0xac00, 0xd7a3), (0xff01, 0xff9f), (0x10330, 0x1034a), (0x1d400, 0x1d7ff), (0x1f300, 0x1f64f),
           (0x20000, 0x2a6d6)]
BETWEEN = [' ', '  ', '   ', '\n', '\n\n', ' \n ', '\t', '\r\n', "'s", "'LL", "don't", ' 12', '3456', '  7', ' x',
           '...', '<|im_end|>', '<|endoftext|>', '\u00a0', '\u3000', 'e\u0301', '👩\u200d👧', '$+=', 'http://a.b/c?d=1']


def texts(n, seed=0):
    """n texts of letters, marks, numbers and signs of all scripts, between blanks, line ends and contractions."""
    rng = random.Random(seed)
    for _ in range(n):
        parts = []
        for _ in range(rng.randint(1, 6)):
            first, last = rng.choice(SCRIPTS)
            letters = (chr(rng.randint(first, last)) for _ in range(rng.randint(1, 8)))
            parts += [''.join(c for c in letters if unicodedata.category(c) not in ('Cn', 'Cs', 'Co')),
                      rng.choice(BETWEEN)]
        yield ''.join(parts)


WIDE = TEXT + ''.join(texts(300, seed=1))


def write_with_tokenizer(path, tokenizer, fields):
    """Write a small llama with a tokenizer, or None, and these fields. Returns the tokenizer that is read."""
    n = tokenizer.vocab_size + 4 if tokenizer else len(fields['tokenizer.ggml.tokens'])
    formats.to_gguf(gpt(**LLAMA | dict(vocab_size=n)), path, tokenizer=tokenizer)
    rewrite(path, fields)
    return tokenizers.from_state(formats.files_of(str(path)).tokenizer_state())


def assert_llama_cpp_makes_the_same_ids(path, ours, n, changed=str):
    theirs = llama(path)
    for text in map(changed, texts(n)):
        ids = ours.encode(text)
        assert ids == theirs.tokenize(text.encode(), special=True), repr(text)
        assert ours.decode(ids[len(ours.begins):]) == text


@pytest.mark.parametrize('rule', ['gpt-2', 'smollm', 'starcoder', 'qwen2', 'llama-bpe', 'smaug-bpe', 'default', None])
def test_llama_cpp_splits_texts_by_the_same_rules(tmp_path, rule):
    path, tokenizer = tmp_path / 'model.gguf', json_tokenizer(WIDE, 900)
    fields = {'tokenizer.ggml.pre': rule, 'tokenizer.ggml.add_bos_token': None}
    if rule in ('llama-bpe', 'smaug-bpe'):  # words of the first one are tokens also where no merges lead to them
        merges = json.loads(tokenizer.json)['model']['merges']
        fields['tokenizer.ggml.merges'] = [' '.join(pair) for pair in merges[:len(merges) // 2]]
    ours = write_with_tokenizer(path, tokenizer, fields)
    assert ours.begins == [0] * (rule == 'llama-bpe') and ours.end_tokens == (0,)
    # the tokenizer of Qwen puts characters together, which llama.cpp does not
    nfc = (lambda text: unicodedata.normalize('NFC', text)) if rule == 'qwen2' else str
    assert_llama_cpp_makes_the_same_ids(path, ours, sizes(150, 5000), nfc)


@pytest.mark.parametrize('prefix, has_ids', [(True, True), (False, True), (True, False)])
def test_llama_cpp_makes_the_same_of_sentencepiece(tmp_path, prefix, has_ids):
    path = tmp_path / 'model.gguf'
    model = json.loads(sentencepiece_tokenizer(WIDE.replace('<|', '')).json)['model']  # without names of special tokens
    tokens, types = sorted(model['vocab'], key=model['vocab'].get), {'<unk>': 2, '<s>': 3, '</s>': 3}
    ranks = {''.join(pair): -float(i) for i, pair in enumerate(model['merges'])}
    ours = write_with_tokenizer(path, None, {
        'tokenizer.ggml.model': 'llama', 'tokenizer.ggml.tokens': tokens,
        'tokenizer.ggml.token_type': [types.get(text, 6 if text.startswith('<0x') else 1) for text in tokens],
        'tokenizer.ggml.scores': [ranks.get(text, -1e6) for text in tokens],
        'tokenizer.ggml.add_space_prefix': prefix, **{
            f'tokenizer.ggml.{name}_token_id': i for i, name in enumerate(('unknown', 'bos', 'eos')) if has_ids}})
    assert ours.begins == [1] and ours.end_tokens == (2,) and ours.strips == prefix
    assert_llama_cpp_makes_the_same_ids(path, ours, sizes(150, 5000))
    for text in ('a</s>b <s> c', '</s>', '</s></s> x', ' a', '  a', ''):
        assert ours.encode(text) == llama(path).tokenize(text.encode(), special=True), text


def test_what_else_a_file_says_of_its_tokenizer(tmp_path):
    names = ['<|endoftext|>', '<|im_start|>', '<|im_end|>', '<pad>', '<s>']
    fields = {f'tokenizer.ggml.{name}_token_id': i for name, i in dict(bos=4, eos=0, eot=2, padding=3).items()}
    path = tmp_path / 'model.gguf'
    write_with_tokenizer(path, json_tokenizer(TEXT, 300, names), fields | {
        'tokenizer.ggml.pre': 'gpt-2', 'tokenizer.chat_template': CHAT, 'tokenizer.ggml.add_bos_token': True})
    model, ours, folder = checkpoint.load_model(str(path), '', plain_model)
    assert folder == 'out-model' and ours.end_tokens == (0, 2) and ours.special_ids == {0, 1, 2, 3, 4}
    assert ours.special_tokens == dict(bos_token=names[4], eos_token=names[0], pad_token=names[3])
    assert ours.decode(ours.conversation([dict(role='user', content='Hé')])) == (
        '<|im_start|>user\nHé<|im_end|>\n<|im_start|>assistant\n')
    formats.to_huggingface(model, tmp_path / 'hf', ours)
    assert json.loads((tmp_path / 'hf' / 'config.json').read_text())['eos_token_id'] == 0
    back, again, _ = checkpoint.load_model(str(tmp_path / 'hf'), '', plain_model)
    assert again.encode('Hé<|im_end|>') == ours.encode('Hé<|im_end|>') and ours.encode('Hé')[0] == 4
    assert torch.equal(back.lm_head.weight, model.lm_head.weight)


def test_texts_end_at_what_llama_cpp_ends_them_and_tools_have_a_template(tmp_path):
    """Special tokens of known names end a text, whatever else the file says."""
    names, path = ['<|im_start|>', '<|endoftext|>', '<|im_end|>', '<|eom_id|>', '<call>'], tmp_path / 'model.gguf'
    ours = write_with_tokenizer(path, json_tokenizer(TEXT, 300, names), {
        'tokenizer.ggml.pre': 'gpt-2', 'tokenizer.ggml.eos_token_id': 2, 'tokenizer.ggml.eot_token_id': None,
        'tokenizer.ggml.eom_token_id': 4, 'tokenizer.chat_template': 'plain\n',
        'tokenizer.chat_template.tool_use': '{{ tools | tojson }}\n'})
    assert ours.end_tokens == (2, 4, 1, 3) and ours.chat_template.render([]) == 'plain'
    assert ours.chat_template.render([], tools=['x']) == '["x"]'
    others = {'<|fim_pad|>', '<|fim_repo|>', '<|repo_name|>'}  # llama.cpp takes one of each kind
    names = ['<|im_start|>', *sorted(END_TEXTS - others)]
    types = ([3] + [1, 3, 4] * 9)[:len(names)] + [1] * 284  # of any type
    ours = write_with_tokenizer(path, json_tokenizer(TEXT, 280 + len(names), names), {
        'tokenizer.ggml.pre': 'gpt-2', 'tokenizer.ggml.eos_token_id': 2, 'tokenizer.ggml.eot_token_id': None,
        'tokenizer.ggml.token_type': types})
    library = pytest.importorskip('llama_cpp', reason="llama-cpp-python is not installed")
    theirs = llama(path)
    vocab = library.llama_model_get_vocab(theirs.model)
    ends = {i for i in range(ours.vocab_size) if library.llama_vocab_is_eog(vocab, i)}
    assert ends == {*ours.end_tokens} == {*range(1, len(names))} <= ours.special_ids


# the scripts

def test_the_scripts_take_a_file(small, repo):
    (repo / 'model.gguf').write_bytes(small)
    settings = '--init_from=model.gguf', '--device=cpu'
    sampled = [run(repo, 'sample.py', *settings, '--num_samples=1', '--max_new_tokens=8', '--start=Hé', *more)
               for more in ([], ['--weights=int8'])]
    assert all(done.returncode == 0 and done.stdout.startswith('Hé') for done in sampled), sampled
    refused = run(repo, 'train.py', *settings, '--dataset=shakespeare_char', '--block_size=16')
    assert refused.returncode == 2 and 'has another tokenizer' in refused.stderr, refused.stderr


# memory

SERVED = """
import re, sys
from serving.loading import load_engine
thread, served = load_engine(sys.argv[1], weights='int8', device='cpu')
print(int(re.search('VmHWM:[^0-9]*([0-9]+) kB', open('/proc/self/status').read())[1]) / 2**20)
thread.stop()
"""


@full_only
@pytest.mark.skipif(sys.platform != 'linux', reason="needs /proc/self/status")
def test_half_a_billion_weights_are_served_in_less_than_1_2_gib(tmp_path):
    """A file of the size of Qwen2.5-0.5B in q8_0, with as many tokens and merges."""
    letters = byte_level_alphabet()
    pairs = [a + b for a, b in itertools.product(letters, letters)]
    triples = [a + b for a, b in itertools.islice(itertools.product(pairs, letters), 151643 - 256 - len(pairs))]
    merges = [f'{text[:-1]} {text[-1]}' for text in pairs + triples]
    model = GPT(dataclasses.replace(LLAMAS['qwen0.5b'], block_size=32768))
    formats.to_gguf(model, tmp_path / 'model.gguf', 'q8_0')
    source = GGUFFile(str(tmp_path / 'model.gguf'))
    blocks = {name: (np.fromfile(source.path, np.uint8, t.row_bytes * t.shape[0], offset=t.start)
                     .reshape(t.shape[0], -1), t.kind) for name, t in source.tensors.items() if len(t.shape) == 2}
    del model
    rewrite(tmp_path / 'model.gguf', {'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': 'qwen2',
                                      'tokenizer.ggml.tokens': letters + pairs + triples,
                                      'tokenizer.ggml.merges': merges}, blocks)
    assert float(run(ROOT, '-c', SERVED, tmp_path / 'model.gguf', code=0).stdout) < 1.2


# a real model

@pytest.fixture(scope='module')
def real(real_model):
    """SmolLM2-135M-Instruct: its model, its tokenizer."""
    return checkpoint.load_model(real_model, '', plain_model)[:2]


QUESTIONS = ['What is the capital of France?', 'Write a haiku about the sea.', 'Why is the sky blue?',
             'List three prime numbers.', 'Translate "good morning" into Spanish.']


@full_only
def test_a_real_models_weights_tokenizer_and_template_are_those_that_transformers_reads(real, real_model):
    transformers = pytest.importorskip('transformers', reason="transformers is not installed")
    model, tokenizer = real
    where = dict(pretrained_model_name_or_path=os.path.dirname(real_model), gguf_file=os.path.basename(real_model))
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    with torch.device('meta'):  # AutoModel.from_pretrained would need accelerate, and then call this
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(**where))
    theirs = load_gguf_checkpoint(real_model, return_tensors=True, model_to_load=theirs)['tensors']
    ours = huggingface_weights(model, 'llama')
    assert ours.keys() == theirs.keys() - {'lm_head.weight'}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    del theirs
    theirs = transformers.AutoTokenizer.from_pretrained(**where)
    assert tokenizer.chat_template.source == theirs.chat_template
    said = [dict(role='system', content='Be brief.'), dict(role='user', content='Hé'),
            dict(role='assistant', content='x')]
    for n in (2, 3):
        assert tokenizer.chat_template.render(said[:n]) == theirs.apply_chat_template(
            said[:n], tokenize=False, add_generation_prompt=True)
    # transformers lacks the rule smollm, which splits digits: here it gets that of the model's own tokenizer.json
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    for text in texts(10_000):
        assert tokenizer.encode(text) == theirs(text)['input_ids'], repr(text)


@pytest.mark.parametrize('type, spread, tie', [
    ('q4_1', 0.1, 0.5),  # of the file; llama.cpp rounds the activations to 8 bits
    pytest.param('f32', 1e-3, 0.01, marks=full_only),  # the same weights, written by us
])
def test_llama_cpp_computes_and_says_the_same_with_a_real_model(real, real_model, tmp_path, type, spread, tie):
    """Each of its greedy tokens is ours, or is as likely but for `tie`; the logits differ by a part of their spread."""
    model, tokenizer = real
    if type == 'f32':
        formats.to_gguf(model, tmp_path / 'model.gguf')
    theirs, n, n_same = llama(tmp_path / 'model.gguf' if type == 'f32' else real_model), 0, 0
    for question in QUESTIONS[:sizes(2, 5)]:
        ids = tokenizer.conversation([dict(role='user', content=question)])
        tokens = list(ids)
        for token in theirs.generate(ids, temp=0, repeat_penalty=1):
            tokens.append(token)
            if len(tokens) == len(ids) + sizes(24, 100) or token in tokenizer.end_tokens:
                break
        ours, scores = logits(model, torch.tensor([tokens]))[0, :-1], torch.tensor(theirs.scores[:len(tokens) - 1])
        assert (ours - scores).std() < spread * scores.std()
        behind = (ours.amax(-1) - ours.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0])[len(ids) - 1:]
        assert behind.max() < tie
        n, n_same = n + len(behind), n_same + int((behind == 0).sum())
    assert n_same > 0.9 * n if type == 'q4_1' else n_same == n


def test_llama_cpp_makes_the_same_tokens_with_a_real_model(real, real_model):
    model, tokenizer = real
    theirs = llama(real_model)
    for text in texts(sizes(500, 10_000)):
        assert tokenizer.encode(text) == theirs.tokenize(text.encode(), add_bos=False, special=True), repr(text)
