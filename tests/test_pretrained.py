"""formats/families.py and formats/pretrained.py: folders in Hugging Face format, what is read and what is refused."""
import functools
import json
import os
import shutil
import sys

import pytest
import torch
from example_models import ALIBI, EASY, LLAMA, QWEN2, QWEN3, ROPE, TEXT, UNTIED, gpt, json_tokenizer, logits

import checkpoint
import debug_kv_model
import formats
import model as plain_model
from formats.families import config_args
from formats.pretrained import generation_defaults
from model import GPT, GPTConfig
from tokenizer import CharTokenizer

STARCODER2_3B = dict(
    model_type='starcoder2', hidden_size=3072, intermediate_size=12288, num_hidden_layers=30, num_attention_heads=24,
    num_key_value_heads=2, vocab_size=49152, max_position_embeddings=16384, sliding_window=4096, use_bias=True,
    rope_theta=999999.4420358813, norm_epsilon=1e-05, norm_type='layer_norm', mlp_type='default',
    hidden_act='gelu_pytorch_tanh')
MPT_7B = dict(
    model_type='mpt', d_model=4096, n_heads=32, n_layers=32, vocab_size=50432, max_seq_len=2048, expansion_ratio=4,
    no_bias=True, norm_type='low_precision_layernorm', logit_scale=None, attn_config=dict(
        alibi=True, alibi_bias_max=8, attn_type='multihead_attention', clip_qkv=None, prefix_lm=False, qk_ln=False,
        softmax_scale=None))
SANTACODER = dict(
    model_type='gpt_bigcode', n_embd=2048, n_head=16, n_layer=24, n_positions=2048, vocab_size=49280, n_inner=8192,
    activation_function='gelu_pytorch_tanh', multi_query=True, layer_norm_epsilon=1e-05, scale_attn_weights=True)
GPT2 = dict(model_type='gpt2', n_embd=768, n_head=12, n_layer=12, n_positions=1024, n_ctx=1024, vocab_size=50257,
            activation_function='gelu_new', layer_norm_epsilon=1e-05)
LLAMA_3_2_1B = dict(
    model_type='llama', hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, vocab_size=128256, max_position_embeddings=131072, hidden_act='silu',
    rms_norm_eps=1e-05, rope_theta=500000.0, attention_bias=False, mlp_bias=False, pretraining_tp=1,
    tie_word_embeddings=True,
    rope_scaling=dict(factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, rope_type='llama3',
                      original_max_position_embeddings=8192))
MISTRAL_7B = dict(
    model_type='mistral', hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=32000, max_position_embeddings=32768, sliding_window=4096, hidden_act='silu',
    rms_norm_eps=1e-05, rope_theta=10000.0, tie_word_embeddings=False)
QWEN2_05B = dict(
    model_type='qwen2', hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, vocab_size=151936, max_position_embeddings=32768, hidden_act='silu', rms_norm_eps=1e-06,
    rope_theta=1000000.0, sliding_window=32768, use_sliding_window=False, max_window_layers=24,
    tie_word_embeddings=True)
QWEN3_06B = dict(
    model_type='qwen3', hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960, hidden_act='silu',
    rms_norm_eps=1e-06, rope_theta=1000000, rope_scaling=None, sliding_window=None, use_sliding_window=False,
    max_window_layers=28, attention_bias=False, tie_word_embeddings=True)
OF_LLAMA = dict(bias=False, position='rope', norm='rms', mlp='swiglu')


@pytest.mark.parametrize('hf, expected', [
    (STARCODER2_3B, GPTConfig(16384, 49152, 30, 24, 3072, position='rope', rope_theta=999999.4420358813, n_kv_head=2,
                              window=4096, gelu='tanh')),
    (MPT_7B, GPTConfig(2048, 50432, 32, 32, 4096, bias=False, position='alibi')),
    (SANTACODER, GPTConfig(2048, 49280, 24, 16, 2048, n_kv_head=1, gelu='tanh')),
    (GPT2, GPTConfig(1024, 50257, 12, 12, 768, gelu='tanh')),
    (LLAMA_3_2_1B, GPTConfig(131072, 128256, 16, 32, 2048, n_kv_head=8, n_inner=8192, rope_theta=500000.0,
                             rope_scaling=(32.0, 1.0, 4.0, 8192), **OF_LLAMA)),
    (MISTRAL_7B, GPTConfig(32768, 32000, 32, 32, 4096, n_kv_head=8, n_inner=14336, window=4096, tied=False,
                           **OF_LLAMA)),
    (QWEN2_05B, GPTConfig(32768, 151936, 24, 14, 896, n_kv_head=2, n_inner=4864, rope_theta=1e6, norm_eps=1e-6,
                          qkv_bias=True, **OF_LLAMA)),
    (QWEN3_06B, GPTConfig(40960, 151936, 28, 16, 1024, n_kv_head=8, n_inner=3072, rope_theta=1000000, norm_eps=1e-6,
                          head_dim=128, qk_norm=True, **OF_LLAMA)),
])
def test_the_models_of_the_hub(hf, expected):
    assert GPTConfig(**config_args(hf)) == expected


@pytest.mark.parametrize('hf, change, expected', [  # what test_outside_judges.py does not read of transformers' files
    (STARCODER2_3B, dict(sliding_window=16384), dict(window=0)),  # it hides nothing within max_position_embeddings
    # transformers from 5 on has rope_parameters in place of rope_theta and rope_scaling
    (STARCODER2_3B, dict(rope_parameters=dict(rope_type='default', rope_theta=77.0)), dict(rope_theta=77.0)),
    (STARCODER2_3B, dict(rope_scaling=dict(type='default')), dict(rope_theta=999999.4420358813)),
    (GPT2, dict(n_inner=1000, layer_norm_epsilon=1e-6), dict(n_inner=1000, norm_eps=1e-6)),
    (GPT2, dict(tie_word_embeddings=False), dict(tied=False)),
    (STARCODER2_3B, dict(head_dim=64, intermediate_size=8192), dict(head_dim=64, n_inner=8192)),
    (MPT_7B, dict(expansion_ratio=2), dict(n_inner=8192)), (MPT_7B, dict(no_bias=False), dict(bias=True)),
    (STARCODER2_3B, dict(use_bias=False), dict(bias=False)),
    (QWEN2_05B, dict(use_sliding_window=True), dict(window=0)),  # from layer 24 on, and there are 24
    (QWEN2_05B, dict(use_sliding_window=True, layer_types=['sliding_attention'] * 24, sliding_window=99),
     dict(window=99)),
    (QWEN2_05B, dict(use_sliding_window=True, max_window_layers=0, layer_types=['full_attention'] * 24),
     dict(window=0)),
    (QWEN2_05B, dict(max_window_layers=21), dict(window=0)),
    (MISTRAL_7B, dict(layer_types=['full_attention'] * 32), dict(window=0)),
    # of rope_scaling and rope_parameters transformers takes the first, not both; the original length has two places
    (LLAMA_3_2_1B, dict(rope_parameters=dict(rope_type='default', rope_theta=7.0)),
     dict(rope_theta=500000.0, rope_scaling=(32.0, 1.0, 4.0, 8192))),
    (LLAMA_3_2_1B, dict(rope_scaling=dict(rope_type='default', rope_theta=7.0), rope_parameters=LLAMA_3_2_1B[
        'rope_scaling']), dict(rope_theta=7.0, rope_scaling=())),
    (LLAMA_3_2_1B, dict(original_max_position_embeddings=4096), dict(rope_scaling=(32.0, 1.0, 4.0, 4096))),
    (LLAMA_3_2_1B, dict(rope_scaling={key: value for key, value in LLAMA_3_2_1B['rope_scaling'].items()
                                      if key != 'original_max_position_embeddings'}),
     dict(rope_scaling=(32.0, 1.0, 4.0, 131072))),
    (LLAMA_3_2_1B, dict(rope_scaling=dict(LLAMA_3_2_1B['rope_scaling'], rope_type='default', type='llama3')),
     dict(rope_scaling=())),
    (LLAMA_3_2_1B, dict(pretraining_tp=2, is_causal=None, hidden_act='swish'), dict(mlp='swiglu')),
])
def test_each_field(hf, change, expected):
    config = GPTConfig(**config_args(hf | change))
    assert {key: getattr(config, key) for key in expected} == expected


ATTENTION = MPT_7B['attn_config']
@pytest.mark.parametrize('hf, change, line', [  # config.json, what is changed in it, what the line has to say
    # no Llama at all; mixtures of experts; layers that run beside one another; multimodal
    *[(LLAMA_3_2_1B, dict(model_type=name), f"model_type is {name!r}, but only gpt2, gpt_bigcode, starcoder2, mpt")
      for name in ('bert', 'mixtral', 'cohere', [])],
    # what a GPT here does not compute
    *[(hf, {key: value}, f'{key} is {value!r}') for hf, key, value in (
        (GPT2, 'activation_function', 'relu'), (GPT2, 'scale_attn_by_inverse_layer_idx', True),
        (GPT2, 'scale_attn_weights', False), (GPT2, 'quantization_config', {'bits': 4}),
        (QWEN2_05B, 'is_causal', False),
        (STARCODER2_3B, 'hidden_act', 'silu'), (STARCODER2_3B, 'norm_type', 'rms_norm'),
        (STARCODER2_3B, 'mlp_type', 'gated'), (MPT_7B, 'logit_scale', 'inv_sqrt_d_model'),
        (LLAMA_3_2_1B, 'mlp_bias', True), (QWEN3_06B, 'attention_bias', True))],
    *[(MPT_7B, dict(attn_config=ATTENTION | {key: value}), f'attn_config.{key} is {value!r}') for key, value in (
        ('qk_ln', True), ('clip_qkv', 8.0), ('alibi', False), ('alibi_bias_max', 16), ('softmax_scale', 0.1),
        ('attn_type', 'grouped_query_attention'), ('prefix_lm', True))],
    *[(hf, {key: {name: value}}, f'{key}.{name} is {value!r}') for hf, key, name, value in (
        (STARCODER2_3B, 'rope_parameters', 'rope_type', 'yarn'), (LLAMA_3_2_1B, 'rope_scaling', 'type', 'dynamic'),
        (STARCODER2_3B, 'rope_parameters', 'partial_rotary_factor', 0.5))],
    (LLAMA_3_2_1B, dict(attention_bias=True), 'mlp_bias is False'),
    (LLAMA_3_2_1B, dict(layer_types=['full_attention', 'sliding_attention'] * 8), '(layer_types)'),
    (QWEN2_05B, dict(layer_types=['linear_attention'] * 24), 'layer_types must be full_attention or'),
    (QWEN2_05B, dict(use_sliding_window=True, max_window_layers=12, sliding_window=99), 'max_window_layers is 12'),
    # values of another type, and sizes that no model has
    *[(hf, {key: value}, f'{key} must be of type {kind}, not {value!r}') for hf, key, value, kind in (
        (GPT2, 'n_layer', '12', 'int'), (GPT2, 'vocab_size', True, 'int'),
        (STARCODER2_3B, 'sliding_window', 'all', 'int'), (MPT_7B, 'expansion_ratio', '4', 'int'),
        (MPT_7B, 'attn_config', [8], 'dict'),
        (LLAMA_3_2_1B, 'rope_scaling', [8.0, 1.0, 4.0], 'dict'), (QWEN2_05B, 'layer_types', 7, 'list'),
        (QWEN2_05B, 'max_window_layers', '12', 'int'))],
    (MPT_7B, dict(n_heads=0), 'n_head must be a positive integer'),
    (MPT_7B, dict(d_model=0), 'n_embd must be a positive integer'),
    (LLAMA_3_2_1B, dict(quantization_config=dict(ignored=[*range(999)])), 'quantization_config is'),
    (LLAMA_3_2_1B, dict(rope_scaling=dict(rope_type='llama3')), 'rope_scaling must be () or (factor,'),
    (LLAMA_3_2_1B, dict(rope_scaling=dict(type='linear')), 'rope_scaling must be () or (factor,'),
    (LLAMA_3_2_1B, dict(rope_scaling=LLAMA_3_2_1B['rope_scaling'] | dict(factor='32')), 'rope_scaling must be () or'),
    (LLAMA_3_2_1B, dict(rope_theta='500000'), "rope_theta must be at least 1 and at most 1e"),
    (QWEN3_06B, dict(tie_word_embeddings='yes'), "tied must be True or False, not 'yes'"),
    (MISTRAL_7B, dict(sliding_window=-1), 'window must be an integer from 0'),
    (MISTRAL_7B, dict(rms_norm_eps=0), 'norm_eps must be between 1e-37 and 1, not 0'),
])
def test_what_cannot_be_represented_is_refused_by_name(hf, change, line):
    with pytest.raises(ValueError) as refused:
        GPTConfig(**config_args(hf | change))
    assert line in str(refused.value) and '\n' not in str(refused.value) and len(str(refused.value)) < 300


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="it is not a mpt's: it lacks d_model, n_heads"):
        config_args({k: v for k, v in MPT_7B.items() if k not in ('n_heads', 'd_model')})


def exported(folder, config, change=None):
    """A model and the folder of its export, with `change` applied to its dict of weights."""
    from safetensors.torch import load_file, save_file
    model, path = gpt(**config), folder / 'model.safetensors'
    formats.to_huggingface(model, folder)
    if change:
        weights = change(load_file(path))
        os.remove(path)
        save_file(weights, path)
    return model


def test_sharded_weights(tmp_path):
    from safetensors.torch import load_file, save_file
    model, folder, index = exported(tmp_path / 'hf', ROPE), tmp_path / 'hf', 'model.safetensors.index.json'
    weights = load_file(folder / 'model.safetensors')
    where = {name: f'model-{i % 3 + 1:05}-of-00003.safetensors' for i, name in enumerate(weights)}
    for file in {*where.values()}:
        save_file({name: w for name, w in weights.items() if where[name] == file}, folder / file)
    (folder / index).write_text(json.dumps(dict(metadata={}, weight_map={name: 'gone.safetensors' for name in where})))
    assert GPT.from_pretrained(str(folder))  # the whole file counts, as in transformers
    os.remove(folder / 'model.safetensors')
    (folder / index).write_text(json.dumps(dict(metadata={}, weight_map=where)))
    (folder / 'adapter.safetensors').write_text('the index does not name it')
    idx = torch.randint(128, (2, 24))
    assert torch.equal(logits(GPT.from_pretrained(str(folder)).eval(), idx), logits(model, idx))
    os.remove(folder / 'model-00002-of-00003.safetensors')
    with pytest.raises(ValueError, match='lacks model-00002-of-00003.safetensors, .* is the download complete'):
        GPT.from_pretrained(str(folder))
    for content, line in (('{}', 'index.json has no weight_map'), ('[]', 'must hold a dict'),
                          ('{"weight_map": {"a": "../x.safetensors"}}', 'lacks ../x.safetensors'),
                          *((bad, 'cannot be read') for bad in ('{', '[' * 100000))):
        (folder / index).write_text(content)
        with pytest.raises(ValueError, match=line):
            GPT.from_pretrained(str(folder))


def test_an_mpt_with_biases(tmp_path):
    """MosaicML's own code has them with no_bias=False; that of transformers reads none."""
    model = gpt(**ALIBI | dict(bias=True))
    names = {'ln_1': 'norm_1', 'ln_2': 'norm_2', 'attn.c_attn': 'attn.Wqkv', 'attn.c_proj': 'attn.out_proj',
             'mlp.c_fc': 'ffn.up_proj', 'mlp.c_proj': 'ffn.down_proj', 'ln_f': 'norm_f', 'h.': 'blocks.'}
    weights = {functools.reduce(lambda name, ours: name.replace(ours, names[ours], 1), names, name): p.detach()
               for name, p in model.named_parameters() if name != 'lm_head.weight'}
    exported(tmp_path, ALIBI, lambda _: weights)
    path = tmp_path / 'config.json'
    path.write_text(path.read_text().replace('"no_bias": true', '"no_bias": false'))
    back, idx = GPT.from_pretrained(str(tmp_path)).eval(), torch.arange(24)[None]
    assert sum(name.endswith('bias') for name in weights) == 13 and torch.equal(logits(back, idx), logits(model, idx))


def headless(name):
    """The names of weights that were saved under the base of their family, or as the head."""
    return lambda weights: {'lm_head.weight' if each.endswith(name) else each: w for each, w in weights.items()}


@pytest.mark.parametrize('config, change', [
    # GPT-2's own files, and those of models that were saved without their head, have no base
    *[(config, lambda weights, base=base: {name.removeprefix(base): w for name, w in weights.items()})
      for config, base in ((EASY, 'transformer.'), (ROPE, 'model.'), (ALIBI, 'transformer.'))],
    (EASY, headless('wte.weight')), (LLAMA, headless('embed_tokens.weight')),  # a tied embedding, named as the head
    (EASY, lambda w: w | {'transformer.h.0.attn.bias': torch.ones(1, 1, 24, 24)}),  # old versions' masks
    (UNTIED, lambda w: w | {'model.layers.0.self_attn.rotary_emb.inv_freq': torch.ones(4)}),
    (ROPE, lambda w: w | {'lm_head.weight': w['model.embed_tokens.weight'].clone()}),  # tied, but written
    (ROPE, lambda w: w | {'norm.weight': w['model.norm.weight'].clone()}),
])
def test_other_names_of_weights(tmp_path, config, change):
    model, idx = exported(tmp_path, config, change), torch.randint(config['vocab_size'], (2, config['block_size']))
    assert torch.equal(logits(GPT.from_pretrained(str(tmp_path)).eval(), idx), logits(model, idx))


@pytest.mark.parametrize('config, change, line', [
    (ROPE, lambda w: w | {'lm_head.weight': torch.randn(128, 48)},
     'lm_head.weight is not embed_tokens.weight, but the config says that it is'),
    (ROPE, lambda w: w | {'norm.weight': torch.zeros(48)}, 'norm.weight are there twice, with different values'),
    (ROPE, lambda w: {k: v for k, v in w.items() if 'layers.1' not in k}, 'n_layer is 2, but the weights have 1'),
    (ROPE, lambda w: w | {'model.embed_tokens.weight': torch.ones(127, 48)}, r'embed_tokens.weight is \(127, 48\)'),
    (EASY, lambda w: {k: v for k, v in w.items() if 'wpe' not in k}, 'wpe.weight is missing'),
    (LLAMA, lambda w: {k: v for k, v in w.items() if 'embed' not in k}, 'embed_tokens.weight is missing'),
    (ALIBI, lambda w: w | {'transformer.wpe.weight': torch.ones(24, 48)}, 'no place for: wpe.weight'),
    (EASY, lambda w: {k: v.to(torch.float8_e4m3fn) if k.endswith('c_fc.weight') else v for k, v in w.items()},
     'is of torch.float8_e4m3fn'),
    (EASY, lambda w: {k: v[None] if k.endswith('h.0.attn.c_attn.weight') else v for k, v in w.items()}, 'mismatch'),
    (UNTIED, lambda w: {k: v for k, v in w.items() if k != 'lm_head.weight'}, 'lacks the weights lm_head.weight'),
    (UNTIED, lambda w: w | {'model.layers.0.self_attn.o_proj.bias': torch.ones(48)}, 'no place .*0.self_attn.o_'),
    (UNTIED, lambda w: w | {'model.layers.1.self_attn.k_proj.weight': torch.ones(8, 48)}, 'mismatch .*1.attn.c_attn'),
    (QWEN2, lambda w: {k: v for k, v in w.items() if '0.self_attn.v_proj.b' not in k}, 'lacks .*v_proj.bias'),
    (QWEN3, lambda w: {k: v for k, v in w.items() if '1.self_attn.q_norm' not in k}, 'lacks .*1.self_attn.q_norm'),
])
def test_weights_that_do_not_fit_are_named(tmp_path, config, change, line):
    exported(tmp_path, config, change)
    with pytest.raises(ValueError, match=line) as refused:
        GPT.from_pretrained(str(tmp_path))
    assert '\n' not in str(refused.value)


@pytest.mark.parametrize('kept', [torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_is_kept_or_given(tmp_path, kept):
    """Where it differs within the file, a model computes in the one that has all of its numbers."""
    def written(matrices, norms, wide=()):
        exported(tmp_path, ROPE, lambda weights: {
            k: (1.001 * v).to(norms).float() if k.endswith('norm.weight') else v.to(
                torch.float32 if k in wide else matrices) for k, v in weights.items()
        } | {'model.layers.0.self_attn.rotary_emb.inv_freq': torch.rand(4)})  # it is no weight
    wide = 'model.layers.0.self_attn.q_proj.weight'
    for matrices, norms, *more in ((kept, torch.float32), (kept, kept, wide)) if kept is torch.bfloat16 else ():
        written(matrices, norms, more)
        assert {p.dtype for p in GPT.from_pretrained(str(tmp_path)).parameters()} == {torch.float32}
    written(kept, torch.bfloat16)
    for given in (None, torch.float32, torch.bfloat16):
        model = formats.from_pretrained(GPT, GPTConfig, str(tmp_path), {}, dtype=given).eval()
        assert {p.dtype for p in model.parameters()} == {given or kept}
        assert logits(model, torch.arange(24)[None]).dtype is (given or kept)


def test_one_matrix_reads_tokens_and_writes_them(tmp_path):
    exported(tmp_path / 'hf', ROPE)
    model = GPT.from_pretrained(str(tmp_path / 'hf'), dict(dropout=0.25))
    assert model.transformer.wte.weight is model.lm_head.weight and model.config.dropout == 0.25
    assert model.training and model.transformer.drop.p == 0.25
    assert all(p.requires_grad and p.is_contiguous() for p in model.parameters()) and not list(model.buffers())
    with pytest.raises(ValueError, match='only dropout can be overridden'):
        GPT.from_pretrained(str(tmp_path / 'hf'), dict(n_layer=3))
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), 'cpu')
    before = (tmp_path / 'hf' / 'model.safetensors').read_bytes()
    idx, w = torch.randint(128, (4, 24)), model.lm_head.weight.detach().clone()
    model(idx, idx)[1].backward()
    optimizer.step()  # weights that are mapped from a file can be trained, and the file stays as it is
    assert not torch.equal(model.lm_head.weight, w) and (tmp_path / 'hf' / 'model.safetensors').read_bytes() == before


@pytest.mark.skipif(sys.platform != 'linux', reason="needs /proc/self/maps")
@pytest.mark.parametrize('config, copied', [(EASY, ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')),  # transposed
                                            (ROPE, ('c_attn.weight', 'c_attn.bias')),  # of three
                                            (ALIBI, ())])
def test_weights_stay_mapped_in_the_file(tmp_path, config, copied):
    exported(tmp_path / 'hf', config)
    model = GPT.from_pretrained(str(tmp_path / 'hf'))
    with open('/proc/self/maps', encoding='utf-8') as f:
        ranges = [[int(x, 16) for x in line.split()[0].split('-')] for line in f if str(tmp_path / 'hf') in line]
    for name, p in model.named_parameters():
        is_mapped = any(start <= p.data_ptr() < end for start, end in ranges)
        assert is_mapped != name.endswith(copied), name


@pytest.mark.parametrize('module', [plain_model, debug_kv_model])
def test_a_folder_in_bfloat16_with_its_tokenizer_comes_back_as_it_was(tmp_path, module):
    model = gpt(**ROPE | dict(vocab_size=300, window=7)).to(torch.bfloat16)
    formats.to_huggingface(model, tmp_path / 'hf', json_tokenizer(TEXT))
    loaded, tokenizer, _ = checkpoint.load_model(str(tmp_path / 'hf'), '', module)
    assert type(loaded) is module.GPT and loaded.lm_head.weight.dtype is torch.bfloat16
    formats.to_huggingface(loaded, tmp_path / 'again', tokenizer)
    for name in os.listdir(tmp_path / 'hf'):
        assert (tmp_path / 'again' / name).read_bytes() == (tmp_path / 'hf' / name).read_bytes(), name


def cut(name):
    """Of a file, the first half."""
    return lambda folder: os.truncate(folder / name, os.path.getsize(folder / name) // 2)


def changed(name, **changes):
    """Other values in a JSON file; without any, the whole file, see `written`."""
    def change(folder):
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(content | changes))
    return change


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


def both(*changes):
    return lambda folder: [change(folder) for change in changes]


def shorter_embedding(folder):
    from safetensors.torch import load_file, save_file
    weights = load_file(folder / 'model.safetensors')
    save_file({name: w[:299].contiguous() if len(w) == 300 else w.clone() for name, w in weights.items()},
              folder / 'model.safetensors')


@pytest.fixture(scope='module')
def good_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('good') / 'hf'
    tokenizer = json_tokenizer(TEXT)
    formats.to_huggingface(gpt(**UNTIED | dict(vocab_size=300)), folder, tokenizer)
    checkpoint.load_model(str(folder), '', plain_model)
    return folder


@pytest.mark.parametrize('change, said', [
    (changed('tokenizer_config.json', chat_template='{% for message in messages %}{{ message }}'),
     'the chat template cannot be read: '),
    (changed('tokenizer_config.json', chat_template=['{{', dict(name='default', template='{{ a')]),
     'the chat template cannot be read: '),
    (written('chat_template.jinja', '{{ messages'), 'the chat template cannot be read: '),
    (changed('tokenizer_config.json', chat_template=3), 'the chat template must be a text, not 3: it is left out'),
    (changed('generation_config.json', eos_token_id=[0, 300, -1]), 'that the model does not have: 300, -1 of 300'),
])
def test_what_a_model_can_do_without_is_one_line_and_it_loads(good_folder, tmp_path, capsys, change, said):
    shutil.copytree(good_folder, tmp_path / 'hf')
    change(tmp_path / 'hf')
    tokenizer = checkpoint.load_model(str(tmp_path / 'hf'), '', plain_model)[1]
    assert tokenizer.end_tokens == (0,) and tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    err = capsys.readouterr().err
    assert said in err and err.count('\n') == 2  # the other one names the model


@pytest.mark.parametrize('given, expected, said', [
    (dict(temperature=0.1, top_p=0.5, top_k=2), dict(temperature=0.1, top_k=2, top_p=0.5), ''),
    (dict(min_p=0, repetition_penalty=1.1, max_new_tokens=5, do_sample=False, temperature=None),
     dict(min_p=0.0, repetition_penalty=1.1), ''),
    (dict(temperature=-1, top_p=0.9), dict(top_p=0.9), 'temperature must be from 0 to'),
    (dict(top_k=2.5, top_p=True, min_p=float('nan')), {}, 'min_p must be from 0 to 1, not nan: it is left out'),
    (None, {}, ''),
])
def test_sampling_defaults_of_a_folder(tmp_path, capsys, given, expected, said):
    if given is not None:
        (tmp_path / 'generation_config.json').write_text(json.dumps(given))
    defaults = generation_defaults(str(tmp_path))
    assert defaults == expected and {name: type(value) for name, value in defaults.items()} == {
        name: int if name == 'top_k' else float for name in expected}
    err = capsys.readouterr().err
    assert said in err and bool(said) == bool(err) and 'ignored' not in err
    assert generation_defaults('resume') == {}


@pytest.mark.parametrize('n_draft, n', [(300, 320), (320, 300), (300, 300)])
def test_a_draft_has_the_tokenizer_of_its_model_however_its_rows_are_padded(tmp_path, n_draft, n):
    """Its logits of the ids that both have stay the same, those of others are no larger than its last one's."""
    tokenizer, idx = json_tokenizer(TEXT), torch.randint(300, (1, 9))
    for tied in (True, False):
        draft, target = gpt(**UNTIED | dict(vocab_size=n_draft, tied=tied)), gpt(**UNTIED | dict(vocab_size=n))
        formats.to_huggingface(draft, tmp_path / 'draft', tokenizer)
        loaded = checkpoint.load_draft(str(tmp_path / 'draft'), plain_model, target, tokenizer)
        assert loaded.config.vocab_size == n and (loaded.lm_head.weight is loaded.transformer.wte.weight) == tied
        theirs, ours = logits(loaded, idx), logits(draft, idx)
        assert theirs.shape == (1, 9, n) and torch.equal(theirs[..., :min(n, n_draft)], ours[..., :n])
        assert torch.equal(theirs[..., n_draft:], ours[..., -1:].expand(1, 9, max(0, n - n_draft)))
    for other in (json_tokenizer(TEXT * 2 + 'abab' * 50), CharTokenizer(map(chr, range(40, 340)))):
        with pytest.raises(ValueError, match='^draft=.* has another tokenizer than the model: take'):
            checkpoint.load_draft(str(tmp_path / 'draft'), plain_model, target, other)


@pytest.mark.parametrize('change, line', [  # what is changed in a folder that is good, what the line has to say
    (cut('config.json'), 'config.json cannot be read'),
    (cut('model.safetensors'), 'model.safetensors cannot be read (SafetensorError: '),
    (cut('tokenizer.json'), 'the tokenizer.json cannot be read'),
    (cut('tokenizer_config.json'), 'tokenizer_config.json cannot be read'),
    (cut('generation_config.json'), 'generation_config.json cannot be read'),
    (written('config.json', '[]'), 'config.json cannot be read (ValueError: it must hold a dict'),
    (written('model.safetensors', 'version https://git-lfs.github.com/spec/v1'), 'cannot be read'),  # a pointer
    (lambda folder: os.remove(folder / 'config.json'), 'is a folder with weights, but no config.json'),
    (lambda folder: os.remove(folder / 'tokenizer.json'), 'hf has no tokenizer.json: these tokens have no text'),
    # errors of the config come before the weights are read
    (both(cut('model.safetensors'), changed('config.json', hidden_act='gelu')), "config.json: hidden_act is 'gelu'"),
    (changed('config.json', vocab_size=2**24), '(16777216, 48), but embed_tokens.weight is (300, 48)'),
    (changed('config.json', intermediate_size=2**24), 'size mismatch'),
    (both(changed('config.json', vocab_size=299), shorter_embedding),
     'the tokenizer has 300 tokens, but the model a vocab_size of 299'),
    *[(changed('generation_config.json', eos_token_id=end), line) for end, line in (
        ('</s>', "generation_config.json: eos_token_id must be a token id or a list of them, not '</s>'"),
        (True, 'not True'), ([[0]], 'not [[0]]'))],
    (changed('tokenizer_config.json', added_tokens_decoder={'0': 7}), 'a token that the files beside it add'),
    (changed('tokenizer_config.json', added_tokens_decoder={'x': dict(content='a')}), 'must name ids, not'),
    (changed('tokenizer.json', decoder=dict(type='WordPiece', prefix='##', cleanup=True)),
     'the decoder of the tokenizer.json is {"type": "WordPiece"'),
    (changed('tokenizer.json', added_tokens=[], model=dict(type='BPE', vocab={}, merges=[])),
     'the tokenizer.json has no tokens'),
])
def test_a_bad_folder_is_one_line(good_folder, tmp_path, change, line):
    shutil.copytree(good_folder, tmp_path / 'hf')
    change(tmp_path / 'hf')
    with pytest.raises(ValueError) as refused:
        checkpoint.load_model(str(tmp_path / 'hf'), '', plain_model)
    assert line in str(refused.value) and '\n' not in str(refused.value) and len(str(refused.value)) < 600
