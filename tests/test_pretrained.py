"""formats/families.py and formats/pretrained.py: folders in Hugging Face format, what is read and what is refused."""
import json
import os
import shutil
import sys

import pytest
import torch
from conftest import run
from example_models import (
    ALIBI,
    EASY,
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
)

import checkpoint
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
    hidden_act='gelu_pytorch_tanh', attention_dropout=0.1, embedding_dropout=0.1, residual_dropout=0.1,
    architectures=['Starcoder2ForCausalLM'], bos_token_id=0, eos_token_id=0, torch_dtype='bfloat16', use_cache=True)
MPT_7B = dict(
    model_type='mpt', d_model=4096, n_heads=32, n_layers=32, vocab_size=50432, max_seq_len=2048, expansion_ratio=4,
    no_bias=True, norm_type='low_precision_layernorm', logit_scale=None, learned_pos_emb=True, embedding_fraction=1.0,
    emb_pdrop=0, resid_pdrop=0, architectures=['MPTForCausalLM'], torch_dtype='bfloat16', attn_config=dict(
        alibi=True, alibi_bias_max=8, attn_impl='torch', attn_pdrop=0, attn_type='multihead_attention',
        attn_uses_sequence_id=False, clip_qkv=None, prefix_lm=False, qk_ln=False, softmax_scale=None))
SANTACODER = dict(
    model_type='gpt_bigcode', n_embd=2048, n_head=16, n_layer=24, n_positions=2048, vocab_size=49280, n_inner=8192,
    activation_function='gelu_pytorch_tanh', multi_query=True, layer_norm_epsilon=1e-05, scale_attn_weights=True)
GPT2 = dict(model_type='gpt2', n_embd=768, n_head=12, n_layer=12, n_positions=1024, n_ctx=1024, vocab_size=50257,
            activation_function='gelu_new', layer_norm_epsilon=1e-05)

LLAMA_3_2_1B = dict(
    model_type='llama', hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, vocab_size=128256, max_position_embeddings=131072, hidden_act='silu',
    rms_norm_eps=1e-05, rope_theta=500000.0, attention_bias=False, mlp_bias=False, attention_dropout=0.0,
    pretraining_tp=1, tie_word_embeddings=True, torch_dtype='bfloat16', eos_token_id=[128001, 128008, 128009],
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


@pytest.mark.parametrize('hf, change, expected', [
    (GPT2, dict(activation_function='gelu'), dict(gelu='none')),
    (GPT2, dict(activation_function='gelu_pytorch_tanh'), dict(gelu='tanh')),
    (SANTACODER, dict(multi_query=False), dict(n_kv_head=16)),
    (MPT_7B, dict(no_bias=False), dict(bias=True)),
    (STARCODER2_3B, dict(hidden_act='gelu'), dict(gelu='none')),
    (STARCODER2_3B, dict(use_bias=False), dict(bias=False)),
    (STARCODER2_3B, dict(sliding_window=None), dict(window=0)),
    (STARCODER2_3B, dict(sliding_window=16383), dict(window=16383)),
    (STARCODER2_3B, dict(sliding_window=16384), dict(window=0)),  # it hides nothing within max_position_embeddings
    # transformers from 5 on has rope_parameters in place of rope_theta and rope_scaling
    (STARCODER2_3B, dict(rope_parameters=dict(rope_type='default', rope_theta=77.0)), dict(rope_theta=77.0)),
    (STARCODER2_3B, dict(rope_scaling=dict(type='default')), dict(rope_theta=999999.4420358813)),
    (GPT2, dict(n_inner=1000, layer_norm_epsilon=1e-6), dict(n_inner=1000, norm_eps=1e-6)),
    (GPT2, dict(tie_word_embeddings=False), dict(tied=False)),
    (STARCODER2_3B, dict(head_dim=64, intermediate_size=8192), dict(head_dim=64, n_inner=8192)),
    (MPT_7B, dict(expansion_ratio=2), dict(n_inner=8192)),
    (LLAMA_3_2_1B, dict(rope_scaling=None), dict(rope_scaling=())),
    (LLAMA_3_2_1B, dict(attention_bias=True, mlp_bias=True), dict(bias=True)),
    (LLAMA_3_2_1B, dict(tie_word_embeddings=False, head_dim=128), dict(tied=False, head_dim=128)),
    (MISTRAL_7B, dict(sliding_window=None), dict(window=0)),
    (QWEN2_05B, dict(use_sliding_window=True), dict(window=0)),  # from layer 24 on, and there are 24
    (QWEN2_05B, dict(use_sliding_window=True, max_window_layers=0, sliding_window=4096), dict(window=4096)),
    (QWEN2_05B, dict(use_sliding_window=True, layer_types=['sliding_attention'] * 24, sliding_window=99),
     dict(window=99)),
    (QWEN2_05B, dict(use_sliding_window=True, max_window_layers=0, layer_types=['full_attention'] * 24),
     dict(window=0)),
    (QWEN2_05B, dict(max_window_layers=21), dict(window=0)),
])
def test_each_field(hf, change, expected):
    config = GPTConfig(**config_args(hf | change))
    assert {key: getattr(config, key) for key in expected} == expected


ATTENTION = MPT_7B['attn_config']
REFUSED = [  # config.json, what is changed in it, what the line has to say
    # no Llama at all; mixtures of experts; layers that run beside one another; multimodal
    *[(LLAMA_3_2_1B, dict(model_type=name), f"model_type is '{name}', but only gpt2, gpt_bigcode, starcoder2, mpt")
      for name in ('bert', 'mixtral', 'cohere')],
    (GPT2, dict(n_layer='12'), "n_layer must be a positive integer up to 16,777,216, not '12'"),
    (GPT2, dict(model_type=[]), 'model_type is []'),
    (GPT2, dict(vocab_size=True), 'vocab_size must be a positive integer up to 16,777,216, not True'),
    (GPT2, dict(vocab_size=2**62), 'vocab_size must be a positive integer up to 16,777,216'),
    (GPT2, dict(n_layer=10**6), 'n_layer must be a positive integer up to 4,096'),
    (GPT2, dict(activation_function='relu'), "activation_function is 'relu'"),
    (GPT2, dict(scale_attn_by_inverse_layer_idx=True), 'scale_attn_by_inverse_layer_idx is True'),
    (GPT2, dict(scale_attn_weights=False), 'scale_attn_weights is False'),
    (GPT2, dict(quantization_config={'bits': 4}), 'quantization_config is'),
    (STARCODER2_3B, dict(hidden_act='silu'), "hidden_act is 'silu'"),
    (STARCODER2_3B, dict(norm_type='rms_norm'), "norm_type is 'rms_norm'"),
    (STARCODER2_3B, dict(mlp_type='gated'), "mlp_type is 'gated'"),
    (STARCODER2_3B, dict(sliding_window='all'), 'sliding_window must be'),
    (STARCODER2_3B, dict(rope_parameters=dict(rope_type='yarn')), "rope_parameters.rope_type is 'yarn'"),
    (STARCODER2_3B, dict(rope_parameters=dict(partial_rotary_factor=0.5)), 'partial_rotary_factor is 0.5'),
    (STARCODER2_3B, dict(num_key_value_heads=5), 'n_head 24 must be divisible by n_kv_head 5'),
    (MPT_7B, dict(attn_config=ATTENTION | dict(qk_ln=True)), 'attn_config.qk_ln is True'),
    (MPT_7B, dict(attn_config=ATTENTION | dict(clip_qkv=8.0)), 'attn_config.clip_qkv is 8.0'),
    (MPT_7B, dict(attn_config=ATTENTION | dict(alibi=False)), 'attn_config.alibi is False'),
    (MPT_7B, dict(attn_config=ATTENTION | dict(alibi_bias_max=16)), 'attn_config.alibi_bias_max is 16'),
    (MPT_7B, dict(attn_config=ATTENTION | dict(softmax_scale=0.1)), 'attn_config.softmax_scale is 0.1'),
    (MPT_7B, dict(attn_config=ATTENTION | dict(attn_type='grouped_query_attention')), 'attn_config.attn_type is'),
    (MPT_7B, dict(attn_config=ATTENTION | dict(prefix_lm=True)), 'attn_config.prefix_lm is True'),
    (MPT_7B, dict(expansion_ratio='4'), 'expansion_ratio must be an integer'),
    (MPT_7B, dict(logit_scale='inv_sqrt_d_model'), "logit_scale is 'inv_sqrt_d_model'"),
    *[(hf, dict(rope_scaling={key: kind, 'factor': 4.0}), f"rope_scaling.{key} is '{kind}'")
      for hf, key, kind in ((LLAMA_3_2_1B, 'type', 'linear'), (QWEN3_06B, 'rope_type', 'yarn'))],
    (QWEN3_06B, dict(rope_parameters=dict(rope_type='yarn', rope_theta=1e6)), "rope_parameters.rope_type is 'yarn'"),
    (LLAMA_3_2_1B, dict(rope_scaling=[8.0, 1.0, 4.0]), 'rope_scaling must be a dict or null, not [8.0, 1.0, 4.0]'),
    (LLAMA_3_2_1B, dict(rope_scaling=dict(rope_type='llama3')), 'rope_scaling must be () or (factor,'),
    (LLAMA_3_2_1B, dict(rope_scaling=LLAMA_3_2_1B['rope_scaling'] | dict(factor='32')), 'rope_scaling must be () or'),
    (LLAMA_3_2_1B, dict(rope_theta='500000'), "rope_theta must be at least 1 and at most 1e"),
    (LLAMA_3_2_1B, dict(attention_bias=True), 'mlp_bias is False'),
    (LLAMA_3_2_1B, dict(mlp_bias=True), 'mlp_bias is True'),
    (LLAMA_3_2_1B, dict(layer_types=['full_attention', 'sliding_attention'] * 8), '(layer_types)'),
    (QWEN2_05B, dict(layer_types=['linear_attention'] * 24), 'layer_types must be a list'),
    (QWEN2_05B, dict(layer_types=7), 'layer_types must be a list'),
    (QWEN2_05B, dict(use_sliding_window=True, max_window_layers=12, sliding_window=99), 'max_window_layers is 12'),
    (QWEN2_05B, dict(use_sliding_window=True, max_window_layers='12'), 'max_window_layers must be a number'),
    (QWEN3_06B, dict(attention_bias=True), 'attention_bias is True'),
    (QWEN3_06B, dict(head_dim=127), 'rotary positions turn pairs of channels, and a head has 127'),
    (QWEN3_06B, dict(tie_word_embeddings='yes'), "tied must be True or False, not 'yes'"),
    (MISTRAL_7B, dict(sliding_window=-1), 'sliding_window must be a number of positions'),
    (MISTRAL_7B, dict(head_dim=2**62), 'head_dim must be an integer from 0 to 16,777,216'),
    (MISTRAL_7B, dict(num_key_value_heads=2**62), 'n_kv_head must be an integer from 0 to 16,777,216'),
    (MISTRAL_7B, dict(rms_norm_eps=0), 'norm_eps must be between 0 and 1, not 0'),
]


@pytest.mark.parametrize('hf, change, line', REFUSED)
def test_what_cannot_be_represented_is_refused_by_name(hf, change, line):
    with pytest.raises(ValueError) as refused:
        GPTConfig(**config_args(hf | change))
    assert line in str(refused.value) and '\n' not in str(refused.value)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="it is not a mpt's: it lacks d_model, n_heads"):
        config_args({k: v for k, v in MPT_7B.items() if k not in ('n_heads', 'd_model')})


def exported(folder, config, change=None, shards=0):
    """A model and the folder of its export, with `change` applied to its dict of weights, in one file or several."""
    from safetensors.torch import load_file, save_file
    model = gpt(**config)
    formats.to_huggingface(model, folder)
    path = folder / 'model.safetensors'
    weights = load_file(path)
    if change:
        weights = change(weights)
    os.remove(path)
    if not shards:
        save_file(weights, path)
        return model
    names = sorted(weights)
    where = {name: f'model-{i % shards + 1:05}-of-{shards:05}.safetensors' for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: weights[name] for name in names if where[name] == file}, folder / file)
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': where}))
    return model


@pytest.mark.parametrize('config', [EASY, ROPE, ALIBI])
def test_sharded_weights(tmp_path, config):
    model = exported(tmp_path / 'hf', config, shards=3)
    (tmp_path / 'hf' / 'adapter.safetensors').write_text('the index does not name it')
    idx = torch.randint(config['vocab_size'], (2, config['block_size']))
    assert torch.equal(logits(GPT.from_pretrained(str(tmp_path / 'hf')).eval(), idx), logits(model, idx))
    os.remove(tmp_path / 'hf' / 'model-00002-of-00003.safetensors')
    with pytest.raises(ValueError, match='hf lacks model-00002-of-00003.safetensors, which .*is the download complete'):
        GPT.from_pretrained(str(tmp_path / 'hf'))
    for content, line in (('{}', 'index.json has no weight_map'), ('{"weight_map": ["norm.weight"]}', 'no weight_map'),
                          ('[]', 'must hold a dict'), ('{', 'cannot be read'), ('[' * 100000, 'cannot be read')):
        (tmp_path / 'hf' / 'model.safetensors.index.json').write_text(content)
        with pytest.raises(ValueError, match=line):
            GPT.from_pretrained(str(tmp_path / 'hf'))


def test_what_is_no_folder_of_a_model_is_refused(tmp_path):
    exported(tmp_path, EASY)
    with pytest.raises(ValueError, match='dropout'):
        GPT.from_pretrained(str(tmp_path), dict(n_layer=3))
    (tmp_path / 'model.safetensors').write_text('version https://git-lfs.github.com/spec/v1')  # a pointer
    with pytest.raises(ValueError, match='cannot be read'):
        GPT.from_pretrained(str(tmp_path))


def test_names_without_the_base_of_their_family(tmp_path):
    """As GPT-2's own files, and those of models that were saved without their head."""
    for config, base in ((EASY, 'transformer.'), (ROPE, 'model.'), (ALIBI, 'transformer.')):
        folder = tmp_path / config.get('position', 'learned')
        model = exported(folder, config, lambda weights, base=base: {
            name.removeprefix(base): w for name, w in weights.items()})
        idx = torch.randint(config['vocab_size'], (2, config['block_size']))
        assert torch.equal(logits(GPT.from_pretrained(str(folder)).eval(), idx), logits(model, idx))


def test_weights_that_do_not_fit_are_named(tmp_path):
    cases = [
        (EASY, lambda w: w | {'transformer.h.0.attn.bias': torch.ones(1, 1, 24, 24)}, None),  # old versions' masks
        (ROPE, lambda w: w | {'lm_head.weight': w['model.embed_tokens.weight'].clone()}, None),  # tied, but written
        (ROPE, lambda w: w | {'lm_head.weight': torch.randn(128, 48)},
         'lm_head.weight is not embed_tokens.weight, but the config says that it is'),
        (ROPE, lambda w: w | {'norm.weight': w['model.norm.weight'].clone()}, None),
        (ROPE, lambda w: w | {'norm.weight': torch.zeros(48)}, 'norm.weight are there twice, with different values'),
        (ROPE, lambda w: {k: v for k, v in w.items() if 'layers.1' not in k}, 'n_layer is 2, but the weights have 1'),
        (ROPE, lambda w: w | {'model.embed_tokens.weight': torch.ones(127, 48)}, r'embed_tokens.weight is \(127, 48\)'),
        (EASY, lambda w: {k: v for k, v in w.items() if 'wpe' not in k}, 'wpe.weight is missing'),
        (ALIBI, lambda w: w | {'transformer.wpe.weight': torch.ones(24, 48)}, 'no place for: wpe.weight'),
        (ROPE, lambda w: {k: v for k, v in w.items() if 'layers.1.mlp.c_fc' not in k}, r'lacks .*layers.1.mlp.c_fc'),
        (ROPE, lambda w: w | {'model.layers.0.self_attn.k_proj.weight': torch.ones(16, 47)}, 'do not fit'),
        (EASY, lambda w: {k: v.to(torch.float8_e4m3fn) if k.endswith('c_fc.weight') else v for k, v in w.items()},
         'is of torch.float8_e4m3fn'),
        (UNTIED, lambda w: {k: v for k, v in w.items() if k != 'lm_head.weight'}, 'lacks the weights lm_head.weight'),
        (UNTIED, lambda w: {k: v for k, v in w.items() if 'layers.1.mlp.gate' not in k}, 'lacks .*1.mlp.gate_proj'),
        (UNTIED, lambda w: w | {'model.layers.0.self_attn.o_proj.bias': torch.ones(48)}, 'no place .*0.self_attn.o_'),
        (UNTIED, lambda w: w | {'model.layers.1.self_attn.k_proj.weight': torch.ones(8, 48)}, 'do not .*1.attn.c_attn'),
        (UNTIED, lambda w: w | {'model.layers.0.self_attn.rotary_emb.inv_freq': torch.ones(4)}, None),
        (QWEN2, lambda w: {k: v for k, v in w.items() if '0.self_attn.v_proj.b' not in k}, 'lacks .*v_proj.bias'),
        (QWEN3, lambda w: {k: v for k, v in w.items() if '1.self_attn.q_norm' not in k}, 'lacks .*1.self_attn.q_norm'),
        (QWEN3, lambda w: w | {'model.layers.0.self_attn.k_norm.weight': torch.ones(48)}, 'do not fit.*0.attn.k_norm'),
    ]
    for i, (config, change, line) in enumerate(cases):
        exported(tmp_path / str(i), config, change)
        if line is None:
            GPT.from_pretrained(str(tmp_path / str(i)))
        else:
            with pytest.raises(ValueError, match=line) as refused:
                GPT.from_pretrained(str(tmp_path / str(i)))
            assert '\n' not in str(refused.value)


def test_layer_norm_biases_of_a_starcoder2_without_other_biases(tmp_path):
    """use_bias=False has no effect on its layer norms. Only if their biases are all zero is there a model without."""
    exported(tmp_path / 'hf', ROPE, lambda w: {k: v + 0.5 if k.endswith('norm.bias') else v for k, v in w.items()})
    ours = GPT.from_pretrained(str(tmp_path / 'hf')).eval()
    assert ours.config.bias and not ours.transformer.h[0].mlp.c_fc.bias.any()
    assert (ours.transformer.h[0].ln_1.bias == 0.5).all()
    transformers = pytest.importorskip('transformers', reason="transformers is not installed")
    theirs, idx = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'hf').eval(), torch.arange(24)[None]
    with torch.no_grad():
        torch.testing.assert_close(logits(ours, idx), theirs(idx).logits, rtol=1e-4, atol=1e-4)


def test_an_mpt_with_biases(tmp_path):
    """MosaicML's own code has them with no_bias=False; that of transformers reads none."""
    model = gpt(**ALIBI | dict(bias=True))
    biases = {name: p for name, p in model.named_parameters() if name.endswith('bias')}
    names = {'ln_1': 'norm_1', 'ln_2': 'norm_2', 'attn.c_attn': 'attn.Wqkv', 'attn.c_proj': 'attn.out_proj',
             'mlp.c_fc': 'ffn.up_proj', 'mlp.c_proj': 'ffn.down_proj', 'ln_f': 'norm_f', 'h.': 'blocks.'}

    def renamed(name):
        for ours, theirs in names.items():
            name = name.replace(ours, theirs, 1)
        return name
    exported(tmp_path / 'hf', ALIBI, lambda weights: {
        **{renamed(name): p.detach() for name, p in model.named_parameters() if name != 'lm_head.weight'}})
    path = tmp_path / 'hf' / 'config.json'
    path.write_text(path.read_text().replace('"no_bias": true', '"no_bias": false'))
    back, idx = GPT.from_pretrained(str(tmp_path / 'hf')).eval(), torch.arange(24)[None]
    assert len(biases) == 13 and torch.equal(logits(back, idx), logits(model, idx))


@pytest.mark.parametrize('kept', [torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_is_kept_or_given(tmp_path, kept):
    """Also where it differs within the file: a model computes in one."""
    for config, norm in ((EASY, 'ln_1.weight'), (ROPE, 'norm.weight'), (ALIBI, 'norm_1.weight')):
        folder = tmp_path / config.get('position', 'learned')
        exported(folder, config, lambda weights: {
            k: v.to(torch.float32 if k.endswith(norm) else kept) for k, v in weights.items()})  # noqa: B023
        for given in (None, torch.float32, torch.bfloat16):
            model = formats.from_pretrained(GPT, GPTConfig, str(folder), {}, dtype=given).eval()
            assert {p.dtype for p in model.parameters()} == {given or kept}
            idx = torch.arange(config['block_size'])[None]
            with torch.no_grad():
                assert model(idx)[0].dtype is (given or kept)


def test_one_matrix_reads_tokens_and_writes_them(tmp_path):
    exported(tmp_path / 'hf', ROPE)
    model = GPT.from_pretrained(str(tmp_path / 'hf'), dict(dropout=0.25))
    assert model.transformer.wte.weight is model.lm_head.weight and model.config.dropout == 0.25
    assert model.training and model.transformer.drop.p == 0.25
    assert len(list(model.parameters())) == len(list(gpt(**ROPE).parameters()))
    assert all(p.requires_grad and p.is_contiguous() and p.device.type == 'cpu' for p in model.parameters())
    assert not list(model.buffers())
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), 'cpu')
    before = (tmp_path / 'hf' / 'model.safetensors').read_bytes()
    idx = torch.randint(128, (4, 24))
    losses = []
    for _ in range(5):  # weights that are mapped from a file can be trained, and the file stays as it is
        loss = model(idx, idx)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and (tmp_path / 'hf' / 'model.safetensors').read_bytes() == before


@pytest.mark.skipif(sys.platform != 'linux', reason="needs /proc/self/maps")
@pytest.mark.parametrize('config, copied', [(EASY, ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')),  # transposed
                                            (ROPE, ('c_attn.weight',)),  # of three matrices
                                            (ALIBI, ())])
def test_weights_stay_mapped_in_the_file(tmp_path, config, copied):
    exported(tmp_path / 'hf', config)
    model = GPT.from_pretrained(str(tmp_path / 'hf'))
    with open('/proc/self/maps', encoding='utf-8') as f:
        ranges = [[int(x, 16) for x in line.split()[0].split('-')] for line in f if str(tmp_path / 'hf') in line]
    for name, p in model.named_parameters():
        is_mapped = any(start <= p.data_ptr() < end for start, end in ranges)
        is_zeros = name.endswith('.bias') and not config['bias'] and config is not EASY
        assert is_mapped != (name.endswith(copied) or is_zeros), name


def test_sampling_and_exporting_again_from_a_folder_with_a_tokenizer_json(repo):
    """A small StarCoder2: bfloat16, grouped heads, a window, its own tokenizer; past its window."""
    model, tokenizer = gpt(**ROPE | dict(vocab_size=300, window=7, bias=True, gelu='tanh')), json_tokenizer(TEXT)
    formats.to_huggingface(model.to(torch.bfloat16), repo / 'starcoder2', tokenizer)
    settings = ['--init_from=starcoder2', '--device=cpu', '--temperature=0', '--num_samples=1', '--max_new_tokens=60',
                '--start=Héllo  wörld']
    done = run(repo, 'sample.py', *settings)
    assert done.returncode == 0, done.stderr
    idx = torch.tensor([tokenizer.encode('Héllo  wörld')])
    ours = tokenizer.decode(model.float().generate(idx, 60, temperature=0, use_cache=True)[0].tolist())
    assert done.stdout.startswith('Héllo  wörld') and idx.size(1) + 60 > 24
    assert done.stdout.rstrip('\n') == ours.rstrip('\n')
    again = run(repo, 'export.py', '--init_from=starcoder2', '--path=again')
    assert again.returncode == 0 and 'again, a starcoder2: ' in again.stderr, again.stderr
    for name in ('model.safetensors', 'config.json', 'tokenizer.json', 'tokenizer_config.json'):
        assert (repo / 'again' / name).read_bytes() == (repo / 'starcoder2' / name).read_bytes(), name


def test_a_folder_of_another_family_without_a_tokenizer_has_no_text(tmp_path):
    """GPT-2's tokenizer is the default of gpt2 folders only: an mpt has enough rows for its ids, and other texts."""
    exported(tmp_path / 'hf', ALIBI)
    with pytest.raises(ValueError, match='these tokens have no text'):
        checkpoint.load_model(str(tmp_path / 'hf'), '', plain_model)


def test_the_debug_model_reads_folders_too(tmp_path):
    import debug_kv_model
    model = exported(tmp_path / 'hf', ROPE | HARD | dict(n_head=3, n_embd=24, n_kv_head=1))
    traced = debug_kv_model.GPT.from_pretrained(str(tmp_path / 'hf'))
    assert type(traced) is debug_kv_model.GPT
    assert torch.equal(traced.transformer.h[0].attn.c_attn.weight, model.transformer.h[0].attn.c_attn.weight)


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


BAD_FOLDERS = [  # what is changed in a folder that is good, what the line has to say
    (cut('config.json'), 'config.json cannot be read'),
    (cut('model.safetensors'), 'model.safetensors cannot be read (SafetensorError: '),
    (cut('tokenizer.json'), 'the tokenizer.json cannot be read'),
    (cut('tokenizer_config.json'), 'tokenizer_config.json cannot be read'),
    (cut('generation_config.json'), 'generation_config.json cannot be read'),
    (written('config.json', '[]'), 'config.json cannot be read (ValueError: it must hold a dict'),
    (lambda folder: os.remove(folder / 'config.json'), 'is neither gpt2, gpt2-medium'),
    (lambda folder: os.remove(folder / 'tokenizer.json'), 'hf has no tokenizer.json: these tokens have no text'),
    # what the config alone says is said before weights are read
    *[(both(cut('model.safetensors'), changed('config.json', **change)), line) for change, line in (
        (dict(model_type='mixtral'), "config.json: model_type is 'mixtral'"),
        (dict(hidden_act='gelu'), "config.json: hidden_act is 'gelu'"),
        (dict(rope_parameters=dict(rope_type='yarn')), "config.json: rope_parameters.rope_type is 'yarn'"))],
    (changed('config.json', num_hidden_layers=3), 'n_layer is 3, but the weights have 2 layers'),
    (changed('config.json', vocab_size=2**24), '(16777216, 48), but embed_tokens.weight is (300, 48)'),
    (changed('config.json', intermediate_size=2**24), 'do not fit its config.json'),
    (both(changed('config.json', vocab_size=299), lambda folder: shorter_embedding(folder)),
     'the tokenizer has 300 tokens, but the model a vocab_size of 299'),
    *[(changed('generation_config.json', eos_token_id=end), line) for end, line in (
        ('</s>', "generation_config.json: eos_token_id must be a token id or a list of them, not '</s>'"),
        (True, 'not True'), ([[0]], 'not [[0]]'))],
    (changed('tokenizer_config.json', added_tokens_decoder={'0': 7}), 'a token that the files beside it add'),
    (changed('tokenizer_config.json', added_tokens_decoder={'x': dict(content='a')}), 'must name ids, not'),
    (changed('tokenizer.json', decoder=dict(type='WordPiece', prefix='##', cleanup=True)),
     'the decoder of the tokenizer.json is WordPiece'),
    (changed('tokenizer.json', added_tokens=[], model=dict(type='BPE', vocab={}, merges=[])),
     'the tokenizer.json has no tokens'),
]


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


@pytest.mark.parametrize('config', [LLAMA, EASY])
def test_a_tied_embedding_may_have_the_name_of_the_head(tmp_path, config):
    from safetensors.torch import load_file, save_file
    model = gpt(**config)
    formats.to_huggingface(model, tmp_path / 'hf')
    path = tmp_path / 'hf' / 'model.safetensors'
    weights = load_file(path)
    name, = (name for name in weights if name.endswith(('wte.weight', 'embed_tokens.weight')))
    save_file({'lm_head.weight' if each == name else each: w for each, w in weights.items()}, path)
    back, idx = GPT.from_pretrained(str(tmp_path / 'hf')).eval(), torch.randint(config['vocab_size'], (2, 9))
    assert torch.equal(logits(back, idx), logits(model, idx))
    save_file({each: w for each, w in weights.items() if each != name}, path)
    with pytest.raises(ValueError, match='is missing'):
        GPT.from_pretrained(str(tmp_path / 'hf'))


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
    assert generation_defaults('gpt2') == generation_defaults('resume') == {}


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


@pytest.mark.parametrize('change, line', BAD_FOLDERS)
def test_a_bad_folder_is_one_line(good_folder, tmp_path, change, line):
    shutil.copytree(good_folder, tmp_path / 'hf')
    change(tmp_path / 'hf')
    with pytest.raises(ValueError) as refused:
        checkpoint.load_model(str(tmp_path / 'hf'), '', plain_model)
    assert line in str(refused.value) and '\n' not in str(refused.value) and len(str(refused.value)) < 600


def test_and_sampling_from_it_ends_with_exit_code_2(repo, good_folder):
    shutil.copytree(good_folder, repo / 'hf')
    cut('model.safetensors')(repo / 'hf')
    done = run(repo, 'sample.py', '--init_from=hf', '--device=cpu')
    assert done.returncode == 2 and not done.stdout and done.stderr.count('\n') == 3  # of them two are the settings
    assert done.stderr.splitlines()[-1].startswith('sample.py: error: ')
