"""Writing a GGUF file, which llama.cpp and programs that are built on it read."""
import os

from formats.families import family_of
from formats.names import HUGGING_FACE
from formats.tokenizer_files import add_gguf_tokenizer, check_vocabulary
from formats.weights import named_weights
from positions import rotary_frequencies
from whole_file import replacing


def to_gguf(model, path, type='f32', tokenizer=None):
    """
    Write a GGUF file of the architecture that computes what the model computes, see `family_of`; a mistral is a llama
    there. Returns the kind of its tokenizer, see `add_gguf_tokenizer`.

    type: 'f32', or 'q8_0': matrices in 8 bits, 32 numbers to a scale. Positions, biases and norms stay float32.
    llama.cpp differs from the model in its GELU, in windows and at the end of the context: docs/SERVING.md says how.
    ValueError for a model, a type or a tokenizer that llama.cpp has no place for, for a tokenizer with more tokens than
    the model, if path is a file of another format, and if gguf is not installed.

    Sources: docs/gguf.md in https://github.com/ggml-org/ggml; src/llama-vocab.cpp and, in src/models, gpt2, starcoder2,
    mpt, llama, qwen2 and qwen3.cpp in https://github.com/ggml-org/llama.cpp.
    """
    try:
        import gguf
    except ImportError as e:
        raise ValueError("writing GGUF needs the gguf library: pip install gguf") from e
    check_vocabulary(model, tokenizer)
    c, family = model.config, family_of(model.config)
    architecture = 'llama' if family == 'mistral' else family
    if type not in ('f32', 'q8_0'):
        raise ValueError(f"type must be f32 or q8_0, not {type!r}")
    inputs = dict(n_embd=c.n_embd, n_inner=c.n_inner, n_head_times_head_dim=c.n_head * c.head_dim)  # of its matrices
    for name, n in inputs.items() if type == 'q8_0' else ():
        if n % 32 != 0:
            raise ValueError(f"q8_0 packs 32 numbers in a block, and {name} {n} is not a multiple of 32: use type=f32")
    if c.rope_scaling and architecture != 'llama':
        raise ValueError(f"llama.cpp's {architecture} has no rope_scaling: export with --to=hf")
    if architecture == 'qwen2' and c.n_head * c.head_dim != c.n_embd:
        raise ValueError(f"head_dim {c.head_dim}, but in llama.cpp's qwen2 it is n_embd / n_head, "
                         f"{c.n_embd / c.n_head:g}: export with --to=hf")
    if os.path.exists(path) and not is_gguf(path):
        raise ValueError(f"{path} exists and is no GGUF file: remove it, or choose another path")
    quantised = gguf.GGMLQuantizationType[type.upper()]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], c.n_layer)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with replacing(path) as f:
        writer = gguf.GGUFWriter(f.name, architecture)  # it opens the temporary file by its name, once more
        add_config(writer, c, type)
        kind = add_gguf_tokenizer(writer, tokenizer, c.vocab_size)
        for _, of_family, w in named_weights(model, HUGGING_FACE[family]):
            their_name, w = names.get_name(of_family, ('.weight', '.bias')), w.float()
            if architecture == 'llama' and ('.attn_q.' in their_name or '.attn_k.' in their_name):
                w = pairs_side_by_side(w, c.head_dim)
            if w.dim() == 2 and not their_name.startswith('position_embd'):
                writer.add_tensor(their_name, gguf.quantize(w.numpy(), quantised), raw_dtype=quantised)
            else:
                writer.add_tensor(their_name, w.numpy())
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        except OSError as e:
            raise OSError(f"{path} could not be written, is the disk full? ({e})") from e
    return kind


def add_config(writer, config, type):
    """Write what a GGUF file says of a model beside its weights."""
    from gguf import GGML_QUANT_VERSION, LlamaFileType
    writer.add_context_length(config.window or config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_kv_head)
    if config.position == 'rope':
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.rope_scaling:
        slower = rotary_frequencies(config.head_dim, config.rope_theta) / rotary_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling)
        writer.add_tensor('rope_freqs.weight', slower.float().numpy())
    if config.position == 'alibi':
        writer.add_max_alibi_bias(8.0)
    (writer.add_layer_norm_rms_eps if config.norm == 'rms' else writer.add_layer_norm_eps)(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(LlamaFileType['ALL_F32' if type == 'f32' else 'MOSTLY_Q8_0'])
    writer.add_quantization_version(GGML_QUANT_VERSION)


def pairs_side_by_side(w, head_dim):
    """Rows of queries or keys as in llama.cpp's llama: the channels that are turned together are side by side."""
    return w.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2).contiguous()


def is_gguf(path):
    if not os.path.isfile(path):
        return False
    with open(path, 'rb') as f:
        return f.read(4) == b'GGUF'
