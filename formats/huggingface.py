"""Writing a folder in Hugging Face format, which transformers, vLLM and TGI read."""
import json
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager

from safetensors import SafetensorError
from safetensors.torch import save_file

from formats.families import LLAMA3, SIZES, family_of
from formats.gguf_tokenizer import is_of_qwen
from formats.names import CONV1D, HUGGING_FACE
from formats.tokenizer_files import check_vocabulary, huggingface_tokenizer
from formats.weights import named_weights, with_all_heads
from tokenizer import JSONTokenizer

HF_FILES = {'config.json', 'generation_config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json',
            'meta.json'}


def to_huggingface(model, folder, tokenizer=None):
    """
    Write a folder with config.json, model.safetensors and, given a tokenizer, tokenizer.json, tokenizer_config.json and
    meta.json. An older export is replaced whole. Returns the family of the model in it, see `family_of`.

    transformers computes the same logits from it, and GPT.from_pretrained gets the same bits back. Weights that gpt2
    has and the model lacks are zeros: biases, and the positions of position='none'. mpt has the exact GELU and no
    biases, so those of the model must be zero. Neither family has grouped heads: rows of keys and values are repeated
    for each head of queries.

    The tokenizer gives the same ids, and the id of a space for a character that the model has never seen. meta.json is
    its `state()`, as in a data folder; a JSONTokenizer needs none. The bos, eos and pad ids of an import stay.
    ValueError if transformers has no such model, the folder holds other files, or the tokenizer has more tokens.
    """
    check_vocabulary(model, tokenizer)
    family, c = family_of(model.config), model.config
    if family == 'llama' and c.n_embd % c.n_head:
        raise ValueError(f"n_embd {c.n_embd}, n_head {c.n_head} and bias=True: a llama of transformers needs an "
                         "n_head that divides n_embd: export to gguf")
    weights = huggingface_weights(model, family)
    ends = [] if tokenizer is None else list(tokenizer.end_tokens)
    end = ends[0] if len(ends) == 1 else ends or None
    begins = getattr(tokenizer, 'begins', None) or ends  # GPT-2's texts begin with the token that ends them
    ids = getattr(tokenizer, 'file_ids', {}) or {
        'config.json': dict(eos_token_id=end, bos_token_id=begins[0] if begins else None),
        'generation_config.json': {} if end is None else dict(eos_token_id=end)}
    files = {'config.json': huggingface_config(model, family) | ids.get('config.json', {}) | dict(
        tie_word_embeddings=model.config.tied,
        torch_dtype=str(model.lm_head.weight.dtype).removeprefix('torch.'))}
    if tokenizer is not None:
        files['tokenizer.json'], files['tokenizer_config.json'] = huggingface_tokenizer(tokenizer)
        files['tokenizer_config.json'] |= dict(model_max_length=model.config.block_size,
                                               clean_up_tokenization_spaces=False,
                                               # no token_type_ids: GPT-2 would add their embeddings
                                               model_input_names=['input_ids', 'attention_mask'])
        if not isinstance(tokenizer, JSONTokenizer):
            files['meta.json'] = tokenizer.state()
        if ids.get('generation_config.json'):
            files['generation_config.json'] = ids['generation_config.json']
    with replacing_folder(folder, HF_FILES) as new:
        for name, content in files.items():
            with open(os.path.join(new, name), 'w', encoding='utf-8') as f:
                json.dump(content, f, indent=1)
        try:
            save_file(weights, os.path.join(new, 'model.safetensors'), metadata={'format': 'pt'})
        except SafetensorError as e:
            raise OSError(f"{folder} could not be written, is the disk full? ({e})") from e
        # safetensors writes files that their owner alone can read
        shutil.copymode(os.path.join(new, 'config.json'), os.path.join(new, 'model.safetensors'))
    if family == 'qwen2' and 'tokenizer.json' in files and not is_of_qwen(files['tokenizer.json']):
        print("AutoTokenizer of transformers 5 applies Qwen's rules to every qwen2, whatever its tokenizer.json has: "
              f"use PreTrainedTokenizerFast.from_pretrained({os.fspath(folder)!r})", file=sys.stderr)
    return family


def huggingface_weights(model, family):
    """{name: tensor} of a model, as its family has them. ValueError if the family has no place for its biases."""
    c, weights = model.config, {}
    for name, their_name, w in named_weights(model, HUGGING_FACE[family]):
        if family == 'mpt' and name.endswith('.bias'):
            if w.any():
                raise ValueError(f"{name} is not zero, but transformers' ALiBi models (mpt) have no biases: train "
                                 "with --bias=False, or export to gguf")
            continue
        if family == 'starcoder2' and not c.bias and name.endswith('.bias') and '.ln_' not in name:
            continue  # use_bias is False there, and the layer norms have one in any case
        if family in ('gpt2', 'mpt') and '.c_attn.' in name:
            w = with_all_heads(w, c)
        if family == 'gpt2' and name.endswith(CONV1D):
            w = w.t()
        weights[their_name] = w.contiguous()
    return weights


def huggingface_config(model, family):
    """What config.json says of the model, in the words of its family."""
    c, eps = model.config, model.config.norm_eps
    name = 'GPT2LMHeadModel' if family == 'gpt2' else f'{family.capitalize()}ForCausalLM'
    shared = dict(model_type=family, architectures=[name]) | {
        key: getattr(c, field) for field, key in SIZES[family].items()}
    if family == 'gpt2':
        return shared | dict(activation_function={'none': 'gelu', 'tanh': 'gelu_new'}[c.gelu], n_ctx=c.block_size,
                             n_inner=c.n_inner, layer_norm_epsilon=eps,
                             resid_pdrop=c.dropout, embd_pdrop=c.dropout, attn_pdrop=c.dropout)
    if c.position == 'rope':
        kind, scaling = ('llama3', dict(zip(LLAMA3, c.rope_scaling))) if c.rope_scaling else ('default', {})
        shared |= dict(num_key_value_heads=c.n_kv_head, intermediate_size=c.n_inner,
                       rope_theta=c.rope_theta,  # where transformers before 5 has it
                       rope_parameters=dict(rope_type=kind, rope_theta=c.rope_theta) | scaling,
                       attention_dropout=c.dropout, sliding_window=c.window or None)
        if c.rope_scaling:
            shared['rope_scaling'] = dict(rope_type=kind) | scaling
        if family == 'starcoder2':
            return shared | dict(
                use_bias=c.bias, norm_epsilon=eps, hidden_act={'none': 'gelu', 'tanh': 'gelu_pytorch_tanh'}[c.gelu],
                residual_dropout=c.dropout, embedding_dropout=c.dropout)
        return shared | dict(
            hidden_act='silu', rms_norm_eps=eps, head_dim=c.head_dim, attention_bias=c.bias, mlp_bias=c.bias,
            use_sliding_window=c.window > 0, max_window_layers=0 if c.window else c.n_layer)
    if c.n_inner != 4 * c.n_embd:
        raise ValueError(f"n_inner {c.n_inner}, but in transformers' ALiBi models (mpt) it is 4 times n_embd "
                         f"{c.n_embd}: export to gguf")
    if c.gelu != 'none':
        raise ValueError(f"gelu={c.gelu}, but transformers' ALiBi models (mpt) have the exact GELU: train with "
                         "--gelu=none, or export to gguf")
    return shared | dict(
        expansion_ratio=4, no_bias=True, learned_pos_emb=False, layer_norm_epsilon=eps,
        resid_pdrop=c.dropout, emb_pdrop=c.dropout, norm_type='low_precision_layernorm',
        attn_config=dict(alibi=True, alibi_bias_max=8, attn_type='multihead_attention', attn_impl='torch'))


@contextmanager
def replacing_folder(folder, names):
    """A new folder, moved into place at the end. ValueError if `folder` is a file, or holds others than `names`."""
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise ValueError(f"{folder} exists and is no folder: choose another path")
    foreign = sorted(set(os.listdir(folder)) - names) if os.path.exists(folder) else []
    if foreign:
        some = ', '.join(foreign[:3]) + ' ...' * (len(foreign) > 3)
        raise ValueError(f"{folder} holds {some}, which is no export: choose another path")
    folder = os.path.abspath(folder)
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=os.path.basename(folder) + '.', dir=os.path.dirname(folder)) as tmp:
        new = os.path.join(tmp, 'new')
        os.mkdir(new)
        yield new
        if os.path.exists(folder):
            os.rename(folder, os.path.join(tmp, 'old'))
        os.rename(new, folder)
