"""formats/families.py and formats/pretrained.py: folders in Hugging Face format, what is read and what is refused."""
import json
import os
import sys

import pytest
import torch
from conftest import run
from example_models import ALIBI, EASY, HARD, ROPE, TEXT, gpt, json_tokenizer, logits

import checkpoint
import formats
import model as plain_model
from formats.families import config_args
from model import GPT, GPTConfig

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


@pytest.mark.parametrize('hf, expected', [
    (STARCODER2_3B, GPTConfig(16384, 49152, 30, 24, 3072, position='rope', rope_theta=999999.4420358813, n_kv_head=2,
                              window=4096, gelu='tanh')),
    (MPT_7B, GPTConfig(2048, 50432, 32, 32, 4096, bias=False, position='alibi')),
    (SANTACODER, GPTConfig(2048, 49280, 24, 16, 2048, n_kv_head=1, gelu='tanh')),
    (GPT2, GPTConfig(1024, 50257, 12, 12, 768, gelu='tanh')),
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
])
def test_each_field(hf, change, expected):
    config = GPTConfig(**config_args(hf | change))
    assert {key: getattr(config, key) for key in expected} == expected


ATTENTION = MPT_7B['attn_config']
REFUSED = [  # config.json, what is changed in it, what the line has to say
    (GPT2, dict(model_type='llama'), "model_type is 'llama', but only gpt2, gpt_bigcode, starcoder2, mpt"),
    (GPT2, dict(n_layer='12'), "n_layer must be a positive integer, not '12'"),
    (GPT2, dict(model_type=[]), 'model_type is []'),
    (GPT2, dict(vocab_size=True), 'vocab_size must be a positive integer, not True'),
    (GPT2, dict(vocab_size=2**62), 'vocab_size must be a positive integer up to 16,777,216'),
    (GPT2, dict(n_positions=2**62), 'block_size must be a positive integer up to 16,777,216'),
    (GPT2, dict(n_embd=12 * 2**62), 'n_embd must be a positive integer up to 16,777,216'),
    (GPT2, dict(n_layer=10**6), 'n_layer must be a positive integer up to 4,096'),
    (GPT2, dict(activation_function='relu'), "activation_function is 'relu'"),
    (GPT2, dict(scale_attn_by_inverse_layer_idx=True), 'scale_attn_by_inverse_layer_idx is True'),
    (GPT2, dict(scale_attn_weights=False), 'scale_attn_weights is False'),
    (GPT2, dict(add_cross_attention=True), 'add_cross_attention is True'),
    (GPT2, dict(n_inner=1000), 'n_inner is 1000'),
    (GPT2, dict(layer_norm_epsilon=1e-6), 'layer_norm_epsilon is 1e-06'),
    (GPT2, dict(tie_word_embeddings=False), 'tie_word_embeddings is False'),
    (GPT2, dict(quantization_config={'bits': 4}), 'quantization_config is'),
    (SANTACODER, dict(activation_function='gelu_fast'), "activation_function is 'gelu_fast'"),
    (STARCODER2_3B, dict(tie_word_embeddings=False), 'tie_word_embeddings is False'),
    (STARCODER2_3B, dict(hidden_act='silu'), "hidden_act is 'silu'"),
    (STARCODER2_3B, dict(norm_type='rms_norm'), "norm_type is 'rms_norm'"),
    (STARCODER2_3B, dict(norm_epsilon=1e-6), 'norm_epsilon is 1e-06'),
    (STARCODER2_3B, dict(mlp_type='gated'), "mlp_type is 'gated'"),
    (STARCODER2_3B, dict(intermediate_size=8192), 'intermediate_size is 8192'),
    (STARCODER2_3B, dict(head_dim=64), 'head_dim is 64'),
    (STARCODER2_3B, dict(sliding_window='all'), 'sliding_window must be'),
    (STARCODER2_3B, dict(rope_scaling=dict(type='linear', factor=2.0)), "rope_scaling.type is 'linear'"),
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
    (MPT_7B, dict(expansion_ratio=2), 'expansion_ratio is 2'),
    (MPT_7B, dict(logit_scale='inv_sqrt_d_model'), "logit_scale is 'inv_sqrt_d_model'"),
    (MPT_7B, dict(norm_type='rmsnorm'), "norm_type is 'rmsnorm'"),
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
    with pytest.raises(ValueError, match='model-00002-of-00003.safetensors cannot be read.*is the download complete'):
        GPT.from_pretrained(str(tmp_path / 'hf'))
    for content, line in (('{}', 'do not fit'), ('[]', 'must hold a dict'), ('{', 'cannot be read'),
                          ('[' * 100000, 'cannot be read')):
        (tmp_path / 'hf' / 'model.safetensors.index.json').write_text(content)
        with pytest.raises(ValueError, match=line):
            GPT.from_pretrained(str(tmp_path / 'hf'))


def test_what_is_no_folder_of_a_model_is_refused(tmp_path):
    exported(tmp_path, EASY)
    with pytest.raises(ValueError, match='dropout'):
        GPT.from_pretrained(str(tmp_path), dict(n_layer=3))
    pointer = 'version https://git-lfs.github.com/spec/v1'
    for name, content in (('model.safetensors', pointer), ('config.json', 'half a {')):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match='cannot be read'):
            GPT.from_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match='neither'):
        GPT.from_pretrained(str(tmp_path / 'nowhere'))


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
        (ROPE, lambda w: w | {'lm_head.weight': torch.randn(128, 48)}, r'not embed_tokens.weight \(untied heads\)'),
        (ROPE, lambda w: w | {'norm.weight': w['model.norm.weight'].clone()}, None),
        (ROPE, lambda w: w | {'norm.weight': torch.zeros(48)}, 'norm.weight are there twice, with different values'),
        (ROPE, lambda w: {k: v for k, v in w.items() if 'layers.1' not in k}, 'n_layer is 2, but the weights have 1'),
        (ROPE, lambda w: w | {'model.embed_tokens.weight': torch.ones(127, 48)}, r'embed_tokens.weight is \(127, 48\)'),
        (EASY, lambda w: {k: v for k, v in w.items() if 'wpe' not in k}, 'wpe.weight is missing'),
        (ALIBI, lambda w: w | {'transformer.wpe.weight': torch.ones(24, 48)}, 'no place for: wpe.weight'),
        (ALIBI, lambda w: w | {'transformer.blocks.0.attn.q_ln.weight': torch.ones(48)}, 'attn.q_ln.weight'),
        (ROPE, lambda w: {k: v for k, v in w.items() if 'layers.1.mlp.c_fc' not in k}, r'lacks .*layers.1.mlp.c_fc'),
        (ROPE, lambda w: w | {'model.norm.weight': torch.ones(47)}, 'do not fit its config.json.*ln_f.weight'),
        (ROPE, lambda w: w | {'model.layers.0.self_attn.k_proj.weight': torch.ones(16, 47)}, 'do not fit'),
        (EASY, lambda w: {k: v.to(torch.float8_e4m3fn) if k.endswith('c_fc.weight') else v for k, v in w.items()},
         'is of torch.float8_e4m3fn'),
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
    ours = tokenizer.decode(model.generate(idx, 60, temperature=0, use_cache=True)[0].tolist())
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
