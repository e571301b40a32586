"""
GPT-2's weights in, and the model in other projects' file formats out, so that what serves GPT-2 can serve it: a folder
in Hugging Face format (transformers, vLLM, TGI) and a GGUF file (llama.cpp and programs that are built on it).

Both formats have a bias everywhere: a model with bias=False gets zeros. Other engines stop where the context is full;
they do not crop or shift it.
"""
import json
import os
import shutil
import tempfile
from contextlib import contextmanager

from tokenizer import CharTokenizer, GPT2Tokenizer
from whole_file import replacing

CONV1D = 'c_attn.weight', 'c_proj.weight', 'c_fc.weight'  # GPT-2's own files have these as (in, out)
GPT2_NAMES = 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl'
HF_FILES = {'config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json', 'meta.json'}
GGUF_NAMES = {'wte': 'token_embd', 'wpe': 'position_embd', 'ln_f': 'output_norm', 'ln_1': 'attn_norm',
              'attn.c_attn': 'attn_qkv', 'attn.c_proj': 'attn_output', 'ln_2': 'ffn_norm', 'mlp.c_fc': 'ffn_up',
              'mlp.c_proj': 'ffn_down'}


def read_gpt2(model_type, override_args):
    """
    GPT-2's weights from a folder in Hugging Face format, which is downloaded first when model_type is a GPT-2's name.

    Returns (the arguments of GPTConfig, the state dict of a GPT). Raises ValueError if there is no such folder, if it
    cannot be read, and if it holds another model.
    """
    if set(override_args) - {'dropout'}:
        raise ValueError(f"only dropout can be overridden in pretrained weights, not {', '.join(override_args)}")
    folder = download_gpt2(model_type) if model_type in GPT2_NAMES and not os.path.isdir(model_type) else model_type
    files = sorted(f for f in os.listdir(folder) if f.endswith('.safetensors')) if os.path.isdir(folder) else []
    if not files or not os.path.exists(os.path.join(folder, 'config.json')):
        raise ValueError(f"{model_type!r} is neither {', '.join(GPT2_NAMES)} nor a folder with config.json and "
                         "*.safetensors")
    try:
        from safetensors.torch import load_file
    except ImportError as e:
        raise ValueError(f"reading {folder} needs safetensors: pip install safetensors (or transformers)") from e
    try:
        with open(os.path.join(folder, 'config.json')) as f:
            hf_config = json.load(f)
        weights = {k: w for name in files for k, w in load_file(os.path.join(folder, name)).items()}
    except Exception as e:  # errors of json, of safetensors and of the file system all mean this
        raise ValueError(f"{folder} cannot be read ({type(e).__name__}: {e}): is the download complete?") from e
    missing = {'n_positions', 'vocab_size', 'n_layer', 'n_head', 'n_embd'} - set(hf_config)
    if hf_config.get('model_type') != 'gpt2' or missing:
        raise ValueError(f"{folder}/config.json is not a gpt2's: model_type is {hf_config.get('model_type')!r}, "
                         f"and it lacks {', '.join(sorted(missing)) or 'nothing'}")
    sizes = dict(block_size=hf_config['n_positions'],
                 **{k: hf_config[k] for k in ('vocab_size', 'n_layer', 'n_head', 'n_embd')})
    state_dict = {}
    for key, w in weights.items():
        key = key if key.startswith(('transformer.', 'lm_head.')) else 'transformer.' + key
        state_dict[key] = w.t() if key.endswith(CONV1D) else w
    if 'transformer.wte.weight' in state_dict:
        state_dict.setdefault('lm_head.weight', state_dict['transformer.wte.weight'])
    return sizes | override_args, state_dict


def from_pretrained(GPT, GPTConfig, model_type, override_args):
    """See `GPT.from_pretrained` of model.py, whose classes are passed."""
    sizes, state_dict = read_gpt2(model_type, override_args)
    model = GPT(GPTConfig(**sizes, gelu='tanh'))
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as e:
        raise ValueError(f"the weights of {model_type} are not a GPT-2's: {str(e).splitlines()[1].strip()}") from e
    return model


def download_gpt2(name):
    """The folder of GPT-2's files, downloaded or from the cache of huggingface_hub. ValueError where neither works."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as e:
        raise ValueError(f"downloading {name} needs huggingface_hub: pip install transformers") from e
    try:
        return snapshot_download('openai-community/' + name, allow_patterns=['config.json', 'model.safetensors'])
    except Exception as e:  # it has some thirty kinds of error
        raise ValueError(f"{name} could not be downloaded ({type(e).__name__}): connect, or pass a local folder") from e


def to_huggingface(model, folder, tokenizer=None):
    """
    Write a folder with config.json, model.safetensors and, given a tokenizer, tokenizer.json, tokenizer_config.json and
    meta.json. An older export is replaced whole.

    transformers' GPT2LMHeadModel computes the same logits from it (activation_function is 'gelu', the exact one), and
    GPT.from_pretrained gets the same bits back. Biases that bias=False leaves out are written as zeros. The tokenizer
    gives the same ids, and the id of a space for a character that the model has never seen; meta.json is its
    `state()`, as in a data folder.
    Raises ValueError if the folder holds other files, if safetensors is not installed, and if the tokenizer has more
    tokens than the model.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as e:
        raise ValueError("writing Hugging Face format needs safetensors: pip install safetensors") from e
    check_vocabulary(model, tokenizer)
    weights = {}
    for name, w in weights_with_biases(model).items():
        transposed = name.endswith(CONV1D)
        weights[name] = (w.t() if transposed else w).contiguous()
    c = model.config
    end = tokenizer.bpe.eot_token if isinstance(tokenizer, GPT2Tokenizer) else None
    config = dict(model_type='gpt2', architectures=['GPT2LMHeadModel'], activation_function='gelu',
                  n_positions=c.block_size, n_ctx=c.block_size, vocab_size=c.vocab_size, n_layer=c.n_layer,
                  n_head=c.n_head, n_embd=c.n_embd, layer_norm_epsilon=model.transformer.ln_f.eps,
                  resid_pdrop=c.dropout, embd_pdrop=c.dropout, attn_pdrop=c.dropout, tie_word_embeddings=True,
                  bos_token_id=end, eos_token_id=end,
                  torch_dtype=str(model.lm_head.weight.dtype).removeprefix('torch.'))
    files = {'config.json': config}
    if tokenizer is not None:
        files['tokenizer.json'], files['tokenizer_config.json'] = huggingface_tokenizer(tokenizer)
        files['tokenizer_config.json'] |= dict(model_max_length=c.block_size, clean_up_tokenization_spaces=False,
                                               # no token_type_ids: GPT-2 would add their embeddings
                                               model_input_names=['input_ids', 'attention_mask'])
        files['meta.json'] = tokenizer.state()
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


def to_gguf(model, path, type='f32', tokenizer=None):
    """
    Write a GGUF file of architecture gpt2. Returns the kind of its tokenizer, see `add_gguf_tokenizer`.

    type: 'f32', or 'q8_0': matrices in 8 bits, 32 numbers to a scale, for which n_embd must be a multiple of 32.
        Positions, biases and layer norms stay float32.

    llama.cpp's logits differ a little: none of its architectures has the exact GELU. It has the tanh approximation,
    on a CPU from a table of float16. llama.cpp rounds the context up to a multiple of 256, and a position past
    block_size ends its process. llama-server keeps within block_size by itself; with other front ends, keep prompt and
    new tokens within it.
    Raises ValueError on another type, if path is a file of another format, if gguf is not installed, and if the
    tokenizer has more tokens than the model.

    Sources: docs/gguf.md in https://github.com/ggml-org/ggml; src/models/gpt2.cpp and src/llama-vocab.cpp in
    https://github.com/ggml-org/llama.cpp.
    """
    try:
        import gguf
    except ImportError as e:
        raise ValueError("writing GGUF needs the gguf library: pip install gguf") from e
    check_vocabulary(model, tokenizer)
    c = model.config
    if type not in ('f32', 'q8_0'):
        raise ValueError(f"type must be f32 or q8_0, not {type!r}")
    if type == 'q8_0' and c.n_embd % 32 != 0:
        raise ValueError(f"q8_0 packs 32 numbers in a block, and n_embd {c.n_embd} is not a multiple of 32: "
                         "use type=f32")
    if os.path.exists(path) and not is_gguf(path):
        raise ValueError(f"{path} exists and is no GGUF file: remove it, or choose another path")
    quantised = gguf.GGMLQuantizationType[type.upper()]
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with replacing(path) as f:
        writer = gguf.GGUFWriter(f.name, 'gpt2')  # it opens the temporary file by its name, once more
        writer.add_context_length(c.block_size)
        writer.add_embedding_length(c.n_embd)
        writer.add_block_count(c.n_layer)
        writer.add_feed_forward_length(4 * c.n_embd)
        writer.add_head_count(c.n_head)
        writer.add_layer_norm_eps(model.transformer.ln_f.eps)
        writer.add_vocab_size(c.vocab_size)
        writer.add_file_type(gguf.LlamaFileType['ALL_F32' if type == 'f32' else 'MOSTLY_Q8_0'])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

        kind = add_gguf_tokenizer(writer, tokenizer, c.vocab_size)
        for name, w in weights_with_biases(model).items():
            name, w = gguf_name(name), w.float().numpy()
            if w.ndim == 2 and not name.startswith('position_embd'):
                writer.add_tensor(name, gguf.quantize(w, quantised), raw_dtype=quantised)
            else:
                writer.add_tensor(name, w)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        except OSError as e:
            raise OSError(f"{path} could not be written, is the disk full? ({e})") from e
    return kind


def weights_with_biases(model):
    """The model's state dict on the CPU, without the tied lm_head, and with zeros for the biases that it lacks."""
    weights = {}
    for name, w in model.state_dict().items():
        weights[name] = w.cpu()
        if name.endswith('.weight') and not name.endswith(('wte.weight', 'wpe.weight')):
            # if the model has this bias, it comes next in the state dict and replaces the zeros
            weights[name.removesuffix('weight') + 'bias'] = w.new_zeros(len(w), device='cpu')
    del weights['lm_head.weight'], weights['lm_head.bias']
    return weights


def gguf_name(name):
    """transformer.h.0.mlp.c_fc.weight -> blk.0.ffn_up.weight"""
    *path, kind = name.removeprefix('transformer.').split('.')
    if path[0] != 'h':
        return f'{GGUF_NAMES[path[0]]}.{kind}'
    return f"blk.{path[1]}.{GGUF_NAMES['.'.join(path[2:])]}.{kind}"


def is_gguf(path):
    if not os.path.isfile(path):
        return False
    with open(path, 'rb') as f:
        return f.read(4) == b'GGUF'


def check_vocabulary(model, tokenizer):
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, but the model a vocab_size of "
                         f"{model.config.vocab_size}: they do not belong together")


def stand_in(tokenizer):
    """
    The id that other engines use for a character that a CharTokenizer does not have: the space's, or 0 if it has none.

    Every row of the model's embedding belongs to a character of its training text, so there is none for other
    characters. Our own CharTokenizer raises ValueError for them.
    """
    return tokenizer.ids.get(' ', 0)


def huggingface_tokenizer(tokenizer):
    """The contents of tokenizer.json and tokenizer_config.json, which transformers and tokenizers read."""
    if isinstance(tokenizer, CharTokenizer):
        return dict(  # each character is a word
            version='1.0', added_tokens=[], normalizer=None, post_processor=None,
            pre_tokenizer=dict(type='Split', pattern=dict(Regex=r'[\s\S]'), behavior='Isolated', invert=False),
            decoder=dict(type='Fuse'),
            model=dict(type='WordLevel', vocab=tokenizer.ids, unk_token=tokenizer.chars[stand_in(tokenizer)]),
        ), dict(tokenizer_class='PreTrainedTokenizerFast')
    tokens, merges = byte_pairs(tokenizer.bpe)
    end = tokens[tokenizer.bpe.eot_token]
    byte_level = dict(type='ByteLevel', add_prefix_space=False, trim_offsets=True, use_regex=True)
    return dict(
        version='1.0', normalizer=None, pre_tokenizer=byte_level, post_processor=byte_level, decoder=byte_level,
        added_tokens=[dict(id=tokenizer.bpe.eot_token, content=end, special=True, normalized=False, single_word=False,
                           lstrip=False, rstrip=False)],
        model=dict(type='BPE', vocab={text: i for i, text in enumerate(tokens)}, merges=merges),
    ), dict(tokenizer_class='GPT2Tokenizer', bos_token=end, eos_token=end, unk_token=end, add_prefix_space=False)


def add_gguf_tokenizer(writer, tokenizer, vocab_size):
    """
    Write the tokenizer for llama.cpp. Returns its kind: 'gpt2', 'rwkv', or 'none' (token ids only) if there is none.

    A character tokenizer is written as 'rwkv', which takes the longest token at each place and needs no token for the
    end of a text: 'gpt2' always has one, and would use token 11. Each byte of an unknown character becomes a space.
    llama.cpp's 'rwkv' never returns from an unknown character that shares its first byte with a known one; if all
    known characters are ASCII, no unknown one does.
    """
    from gguf import TokenType
    if tokenizer is None:
        kind, tokens = 'none', []
    elif isinstance(tokenizer, CharTokenizer):
        kind, tokens = 'rwkv', [c if ord(c) > 127 else c.encode('unicode_escape').decode() for c in tokenizer.chars]
        writer.add_unk_token_id(stand_in(tokenizer))  # without one, an unknown character ends llama.cpp's process
    else:
        kind, (tokens, merges) = 'gpt2', byte_pairs(tokenizer.bpe)
        writer.add_tokenizer_pre('gpt-2')
        writer.add_token_merges(merges)
        writer.add_bos_token_id(tokenizer.bpe.eot_token)
        writer.add_eos_token_id(tokenizer.bpe.eot_token)
    writer.add_tokenizer_model(kind)
    if tokens:
        # rows of the model without a text of their own get a byte that UTF-8 does not have
        padding = range(len(tokens), vocab_size)
        types = [TokenType.NORMAL] * len(tokens) + [TokenType.UNUSED] * len(padding)
        if kind == 'gpt2':
            types[tokenizer.bpe.eot_token] = TokenType.CONTROL
        writer.add_token_list(tokens + [rf'\xff{i}' for i in padding])
        writer.add_token_types(types)
    return kind


def byte_pairs(bpe):
    """
    GPT-2's tokens and merges, spelled as in its vocab.json and merges.txt: ([text of each id], ['left right' by rank]).

    tiktoken has the tokens only. The two parts that a token was merged from are found by encoding its bytes with the
    merges of a lower rank.
    """
    # printable bytes stand for themselves, the others for the characters from 256 on, so that no text has a blank in it
    shown = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
    text_of = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(sorted(set(range(256)) - set(shown)))}
    spell = lambda token: ''.join(text_of[b] for b in token)  # noqa: E731
    ranks = {bpe.decode_single_token_bytes(i): i for i in range(bpe.eot_token)}
    merges = []
    for token, rank in ranks.items():
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            first = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
            parts[first:first + 2] = [parts[first] + parts[first + 1]]
        if len(parts) == 2:
            merges.append(f'{spell(parts[0])} {spell(parts[1])}')
    return [*map(spell, ranks), bpe.decode([bpe.eot_token])], merges


@contextmanager
def replacing_folder(folder, names):
    """
    A new folder to write to, moved into place at the end. If writing fails the old folder stays.

    ValueError if `folder` is a file, or holds other files than `names`.
    """
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
