"""
The families of models that a GPT here can be read from, by the model_type of their config.json: what that says in the
fields of GPTConfig, what in it cannot be represented, and which family computes what a GPT computes.

Sources: configuration_*.py and modeling_*.py of each family in https://github.com/huggingface/transformers.
"""
GPT2_SIZES = dict(block_size='n_positions', vocab_size='vocab_size', n_layer='n_layer', n_head='n_head',
                  n_embd='n_embd')
ROPE_SIZES = dict(block_size='max_position_embeddings', vocab_size='vocab_size', n_layer='num_hidden_layers',
                  n_head='num_attention_heads', n_embd='hidden_size')
SIZES = {  # family: {field of GPTConfig: its key in config.json}
    'gpt2': GPT2_SIZES,
    'gpt_bigcode': GPT2_SIZES,
    'starcoder2': ROPE_SIZES,
    'mpt': dict(block_size='max_seq_len', vocab_size='vocab_size', n_layer='n_layers', n_head='n_heads',
                n_embd='d_model'),
    **dict.fromkeys(('llama', 'mistral', 'qwen2', 'qwen3'), ROPE_SIZES | dict(n_inner='intermediate_size')),
}
GELU = {'gelu': 'none', 'gelu_new': 'tanh', 'gelu_pytorch_tanh': 'tanh'}  # the name of an activation: our name
FIELDS = {*ROPE_SIZES, *(  # of a GPTConfig, which `family_of` knows
    'n_inner n_kv_head head_dim dropout bias qkv_bias tied position rope_theta rope_scaling window n_sink gelu mlp '
    'norm norm_eps qk_norm').split()}
LLAMA3 = 'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'  # as in rope_scaling


def config_args(hf):
    """
    The arguments of GPTConfig for a config.json, hf, as a dict. Dropout is not read, and `bias` only says whether the
    linear layers have biases. ValueError, in one line, names what is missing, and what cannot be represented.
    """
    family = hf.get('model_type')
    if family not in [*SIZES]:
        raise ValueError(f"model_type is {family!r:.100}, but only {', '.join(SIZES)} can be read")
    missing = sorted(key for key in SIZES[family].values() if key not in hf)
    if missing:
        raise ValueError(f"it is not a {family}'s: it lacks {', '.join(missing)}")
    args = {field: typed(hf, key, int) for field, key in SIZES[family].items()}
    expect(hf, quantization_config=(None,), is_causal=(True, None))  # an encoder has is_causal=false
    read = {'gpt2': gpt2, 'gpt_bigcode': gpt_bigcode, 'starcoder2': starcoder2, 'mpt': mpt}.get(family, llama)
    tied = hf.get('tie_word_embeddings', read is not llama)
    return args | dict(tied=tied) | read(hf, args)


def expect(hf, prefix='', **allowed):
    """ValueError unless each key of hf has one of the allowed values; the first one is that of an absent key."""
    for key, values in allowed.items():
        value = hf.get(key, values[0])
        if value not in values:
            raise ValueError(f"{prefix}{key} is {value!r:.100}, which a GPT here cannot represent: it must be "
                             f"{' or '.join(dict.fromkeys(map(repr, values)))}")


def typed(hf, key, kind, default=None):
    """hf[key], or the default where it is absent or null. ValueError unless it is of this type."""
    value = default if hf.get(key) is None else hf[key]
    if type(value) is not kind:
        raise ValueError(f"{key} must be of type {kind.__name__}, not {value!r:.100}")
    return value


def gelu_of(hf, key, default):
    expect(hf, **{key: (default, *GELU)})
    return GELU[hf.get(key, default)]


def gpt2(hf, args):
    expect(hf, scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,))
    return dict(gelu=gelu_of(hf, 'activation_function', 'gelu_new'), n_inner=hf.get('n_inner') or 0,
                norm_eps=hf.get('layer_norm_epsilon', 1e-5))


def gpt_bigcode(hf, args):
    expect(hf, multi_query=(True, False))
    return gpt2(hf, args) | dict(n_kv_head=1 if hf.get('multi_query', True) else 0,
                                 gelu=gelu_of(hf, 'activation_function', 'gelu_pytorch_tanh'))


def starcoder2(hf, args):
    expect(hf, norm_type=('layer_norm',), mlp_type=('default',), use_bias=(True, False))
    return rotary(hf, args) | dict(
        window=window_of(hf, args), n_inner=hf.get('intermediate_size', 12288), bias=hf.get('use_bias', True),
        norm_eps=hf.get('norm_epsilon', 1e-5), gelu=gelu_of(hf, 'hidden_act', 'gelu_pytorch_tanh'))


def llama(hf, args):
    """Llama's family: llama, mistral, qwen2 and qwen3."""
    family, bias = hf['model_type'], False
    expect(hf, hidden_act=('silu', 'swish'))
    if family == 'llama':
        bias = hf.get('attention_bias', False)
        expect(dict(mlp_bias=False) | hf, mlp_bias=(bias,))
    if family == 'qwen3':
        expect(hf, attention_bias=(False,))
    return rotary(hf, args) | dict(
        norm='rms', norm_eps=hf.get('rms_norm_eps', 1e-6), mlp='swiglu', bias=bias, window=window_of_llama(hf, args),
        qkv_bias=family == 'qwen2', qk_norm=family == 'qwen3')


def window_of_llama(hf, args):
    """The window of all layers, or 0. mistral has one by default, qwen2 and qwen3 if use_sliding_window says so."""
    kinds, first = typed(hf, 'layer_types', list, []), typed(hf, 'max_window_layers', int, 28)
    if not all(kind in ('full_attention', 'sliding_attention') for kind in kinds):
        raise ValueError(f"layer_types must be full_attention or sliding_attention, not {str(kinds)[:100]}")
    family, windowed = hf['model_type'], {kind == 'sliding_attention' for kind in kinds}
    is_qwen = family.startswith('qwen')
    if is_qwen and not windowed:
        windowed = {first <= 0, first < args['n_layer']}  # has the first layer a window, has the last one?
    has_window = hf.get('use_sliding_window') if is_qwen else family == 'mistral'
    window = window_of(dict(sliding_window=4096) | hf, args) if has_window else 0
    if len(windowed) > 1 and (window or kinds):
        raise ValueError("some layers have a window and others have none, which a GPT here cannot represent "
                         f"({'layer_types' if kinds else f'max_window_layers is {first}'})")
    return 0 if windowed == {False} else window


def window_of(hf, args):
    window = typed(hf, 'sliding_window', int, 0)
    return window if window < args['block_size'] else 0  # a larger one hides nothing within block_size


def rotary(hf, args):
    """Heads and rotary positions: rope_theta and rope_scaling, or in newer files rope_parameters."""
    n_kv_head = dict(mistral=8, qwen2=32, qwen3=32, starcoder2=2).get(hf['model_type'], args['n_head'])
    for key in ('rope_parameters', 'rope_scaling'):
        given, kinds = typed(hf, key, dict, {}), ('default', 'llama3', 'linear')
        expect(given, f'{key}.', rope_type=kinds, type=kinds, partial_rotary_factor=(1.0,))
    values, scaling = hf.get('rope_scaling') or hf.get('rope_parameters') or {}, ()  # as in transformers, not both
    kind = values.get('rope_type', values.get('type'))
    if kind == 'linear':  # Llama 3's rule for an original length of 1, in which no pair turns once: it slows all pairs
        scaling = values.get('factor', 0), 1.0, 4.0, 1
    if kind == 'llama3':
        *factors, original = (values.get(name, 0) for name in LLAMA3)  # 0, which GPTConfig refuses
        scaling = *factors, hf.get(LLAMA3[-1], original) or args['block_size']
    return dict(position='rope', rope_theta=values.get('rope_theta', hf.get('rope_theta', 10000.0)),
                rope_scaling=scaling, n_kv_head=hf.get('num_key_value_heads', n_kv_head) or args['n_head'],
                head_dim=hf.get('head_dim', 128 if hf['model_type'] == 'qwen3' else 0) or 0)


def mpt(hf, args):
    attention = typed(hf, 'attn_config', dict, {})
    expect(hf, logit_scale=(None,), no_bias=(True, False), norm_type=('low_precision_layernorm', 'layernorm'))
    expect(attention, 'attn_config.', alibi=(True,), alibi_bias_max=(8,), attn_type=('multihead_attention',),
           clip_qkv=(None, 0), qk_ln=(False,), qk_gn=(False,), prefix_lm=(False,), rope=(False,),
           softmax_scale=(None, (max(1, args['n_embd']) / max(1, args['n_head'])) ** -0.5), sliding_window_size=(-1,))
    n_inner = typed(hf, 'expansion_ratio', int, 4) * args['n_embd']
    return dict(position='alibi', bias=not hf.get('no_bias', True), gelu='none', n_inner=n_inner,
                norm_eps=hf.get('layer_norm_epsilon', 1e-5))


def family_of(config):
    """The family whose models compute what a GPT of this config computes. ValueError, which says why, if none does."""
    c = config
    if own := [f"{name}={value}" for name, value in vars(c).items()
               if name not in FIELDS and value != getattr(type(c), name, None)]:
        raise ValueError(f"GPTConfig has {', '.join(own)}, but no format of an export has such a field: use this model "
                         "here")
    if c.n_sink:
        raise ValueError(f"n_sink {c.n_sink}: none of the models that transformers and llama.cpp have sees sinks "
                         "beside its window, so there is no format for this one; use it here")
    if c.window and c.position != 'rope':
        raise ValueError(f"window {c.window} with position={c.position}: the window has a place in the files of rope "
                         "models only (starcoder2, mistral), and others would ignore it; use this model here")
    if (c.norm, c.mlp, c.position) == ('rms', 'swiglu', 'rope'):
        if c.qk_norm + c.qkv_bias + c.bias > 1 or c.window and c.bias:
            raise ValueError(f"qk_norm={c.qk_norm}, qkv_bias={c.qkv_bias}, bias={c.bias} and window={c.window}: no "
                             "family of Llama's kind has these together; use this model here")
        # in transformers n_head must divide n_embd in a llama, but not in a mistral
        is_mistral = c.window or c.n_embd % c.n_head and not c.bias
        return 'qwen3' if c.qk_norm else 'qwen2' if c.qkv_bias else 'mistral' if is_mistral else 'llama'
    if (c.norm, c.mlp, c.qk_norm, c.qkv_bias and not c.bias) != ('layer', 'gelu', False, False) or (
            c.head_dim * c.n_head != c.n_embd):
        raise ValueError(f"norm={c.norm}, mlp={c.mlp}, position={c.position}, head_dim={c.head_dim}, "
                         f"qk_norm={c.qk_norm}, qkv_bias={c.qkv_bias}: no family of transformers has these together; "
                         "norm=rms, mlp=swiglu and position=rope are a llama; use this model here")
    return {'rope': 'starcoder2', 'alibi': 'mpt'}.get(c.position, 'gpt2')
