"""
The families of models that a GPT here can be read from: gpt2, gpt_bigcode, starcoder2 and mpt, by the model_type of
their config.json. Here is what a config.json says in the fields of GPTConfig, what in it cannot be represented, and
which family computes what a GPT computes.

Sources: configuration_*.py and modeling_*.py of each family in https://github.com/huggingface/transformers.
"""
GPT2_SIZES = dict(block_size='n_positions', vocab_size='vocab_size', n_layer='n_layer', n_head='n_head',
                  n_embd='n_embd')
SIZES = {  # family: {field of GPTConfig: its key in config.json}
    'gpt2': GPT2_SIZES,
    'gpt_bigcode': GPT2_SIZES,
    'starcoder2': dict(block_size='max_position_embeddings', vocab_size='vocab_size', n_layer='num_hidden_layers',
                       n_head='num_attention_heads', n_embd='hidden_size'),
    'mpt': dict(block_size='max_seq_len', vocab_size='vocab_size', n_layer='n_layers', n_head='n_heads',
                n_embd='d_model'),
}
GELU = {'gelu': 'none', 'gelu_new': 'tanh', 'gelu_pytorch_tanh': 'tanh'}  # the name of an activation: our name
EPS = 1e-5  # of our layer norms


def config_args(hf):
    """
    The arguments of GPTConfig for a config.json, hf, as a dict. Dropout is not read, and `bias` only says whether the
    linear layers have biases. ValueError, in one line, names what is missing, and what cannot be represented.
    """
    family = hf.get('model_type')
    if family not in [*SIZES]:
        raise ValueError(f"model_type is {family!r}, but only {', '.join(SIZES)} can be read")
    missing = sorted(key for key in SIZES[family].values() if key not in hf)
    if missing:
        raise ValueError(f"it is not a {family}'s: it lacks {', '.join(missing)}")
    args = {field: hf[key] for field, key in SIZES[family].items()}
    for field, key in SIZES[family].items():
        if type(args[field]) is not int or args[field] < 1:
            raise ValueError(f"{key} must be a positive integer, not {args[field]!r}")
    expect(hf, tie_word_embeddings=(True,), quantization_config=(None,))
    read = {'gpt2': gpt2, 'gpt_bigcode': gpt_bigcode, 'starcoder2': starcoder2, 'mpt': mpt}[family]
    return args | read(hf, args)


def expect(hf, prefix='', **allowed):
    """ValueError unless each key of hf has one of the allowed values; the first one is that of an absent key."""
    for key, values in allowed.items():
        value = hf.get(key, values[0])
        if value not in values:
            raise ValueError(f"{prefix}{key} is {value!r}, which a GPT here cannot represent: it must be "
                             f"{' or '.join(map(repr, values))}")


def gelu_of(hf, key, default):
    expect(hf, **{key: (default, *GELU)})
    return GELU[hf.get(key, default)]


def gpt2(hf, args):
    expect(hf, n_inner=(None, 4 * args['n_embd']), layer_norm_epsilon=(EPS,), scale_attn_weights=(True,),
           scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,))
    return dict(gelu=gelu_of(hf, 'activation_function', 'gelu_new'))


def gpt_bigcode(hf, args):
    expect(hf, multi_query=(True, False))
    return gpt2(hf, args) | dict(n_kv_head=1 if hf.get('multi_query', True) else 0,
                                 gelu=gelu_of(hf, 'activation_function', 'gelu_pytorch_tanh'))


def starcoder2(hf, args):
    expect(hf, intermediate_size=(4 * args['n_embd'],), norm_epsilon=(EPS,), norm_type=('layer_norm',),
           mlp_type=('default',), head_dim=(None, args['n_embd'] // args['n_head']), use_bias=(True, False))
    window = hf.get('sliding_window') or 0
    if type(window) is not int or window < 0:
        raise ValueError(f"sliding_window must be a number of positions or null, not {window!r}")
    return dict(position='rope', rope_theta=rope_theta(hf), n_kv_head=hf.get('num_key_value_heads', args['n_head']),
                window=window if window < args['block_size'] else 0,  # a larger one hides nothing within block_size
                bias=hf.get('use_bias', True), gelu=gelu_of(hf, 'hidden_act', 'gelu_pytorch_tanh'))


def rope_theta(hf):
    """The base of the rotary angles: rope_theta, or in newer files rope_parameters. ValueError if they are scaled."""
    for key in ('rope_parameters', 'rope_scaling'):
        values = hf.get(key) or {}
        for kind in ('rope_type', 'type'):
            expect(values, f'{key}.', **{kind: ('default',)})
        expect(values, f'{key}.', partial_rotary_factor=(1.0,))
    return (hf.get('rope_parameters') or {}).get('rope_theta', hf.get('rope_theta', 10000.0))


def mpt(hf, args):
    attention = hf.get('attn_config') or {}
    expect(hf, expansion_ratio=(4,), layer_norm_epsilon=(EPS,), logit_scale=(None,), no_bias=(True, False),
           norm_type=('low_precision_layernorm', 'layernorm'))
    expect(attention, 'attn_config.', alibi=(True,), alibi_bias_max=(8,), attn_type=('multihead_attention',),
           clip_qkv=(None, 0), qk_ln=(False,), qk_gn=(False,), prefix_lm=(False,), rope=(False,),
           softmax_scale=(None, (args['n_embd'] // args['n_head']) ** -0.5), sliding_window_size=(-1,))
    return dict(position='alibi', bias=not hf.get('no_bias', True), gelu='none')


def family_of(config):
    """
    The family whose models compute what a model of this config computes: gpt2, starcoder2 or mpt. ValueError, which
    says why, if there is none.
    """
    if config.n_sink:
        raise ValueError(f"n_sink {config.n_sink}: none of the models that transformers and llama.cpp have sees sinks "
                         "beside its window, so there is no format for this one; use it here")
    if config.window and config.position != 'rope':
        raise ValueError(f"window {config.window} with position={config.position}: the window has a place in the "
                         "files of rope models only (starcoder2), and others would ignore it; use this model here")
    return {'rope': 'starcoder2', 'alibi': 'mpt'}.get(config.position, 'gpt2')
