"""
Reading a GGUF file, which llama.cpp and programs that are built on it write: what `pretrained.Files` is for a folder.
The header is read here, because gguf.GGUFReader takes 2.4 s for that of SmolLM2 and this takes 0.14 s. The gguf
library turns blocks of rounded weights into numbers.

Sources: docs/gguf.md in https://github.com/ggml-org/ggml; src/models in https://github.com/ggml-org/llama.cpp.
"""
import math
import mmap
import struct
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from formats.families import LLAMA3, SIZES, expect, typed
from formats.gguf_tokenizer import gguf_tokenizer
from formats.names import HUGGING_FACE
from positions import rotary_frequencies

ARCHITECTURES = 'llama', 'qwen2', 'qwen3', 'gpt2', 'starcoder2'
KEYS = dict(block_size='context_length', n_layer='block_count', n_head='attention.head_count',
            n_embd='embedding_length', n_inner='feed_forward_length')  # of an architecture, by our names
EPS = 'attention.layer_norm_rms_epsilon', 'attention.layer_norm_epsilon'
KNOWN = {  # what else may be written of an architecture
    *KEYS.values(), *EPS, 'vocab_size', 'attention.head_count_kv', 'attention.key_length', 'attention.value_length',
    'attention.sliding_window', 'attention.causal', 'rope.freq_base', 'rope.dimension_count', 'rope.scaling.type',
    'rope.scaling.factor', 'rope.scaling.finetuned', 'rope.scaling.original_context_length', 'tensor_data_layout'}
NUMBERS = {number: np.dtype(kind) for number, kind in enumerate('u1 i1 <u2 <i2 <u4 <i4 <f4 ?'.split())} | {
    10: np.dtype('<u8'), 11: np.dtype('<i8'), 12: np.dtype('<f8')}
FLOAT32, TEXT, ARRAY = 6, 8, 9  # types of fields, as those of NUMBERS
FREQUENCIES, EMBEDDING = 'rope_freqs.weight', 'token_embd.weight'
AT_ONCE = 2**17  # numbers that are read: what the library needs on the way is several times as large


class Tensor(NamedTuple):
    """Where a tensor is in its file: kind, a GGMLQuantizationType; shape; first byte; bytes of a row."""
    kind: int
    shape: tuple
    start: int
    row_bytes: int


class Header:
    """What a GGUF file, data (bytes), says before its weights: fields {key: value}, tensors {name: (shape, ...)}."""

    def __init__(self, data):
        self.data, self.at, self.fields, self.tensors = data, 0, {}, {}
        magic, version, n_tensors, n_fields = self.take('<4sIQQ')
        if magic != b'GGUF' or version not in (2, 3):
            raise ValueError(f"it must begin with GGUF and the version 2 or 3, not {magic} and {version}")
        for _ in range(n_fields):
            key = self.text()
            self.fields[key] = self.value(*self.take('<I'))
        for _ in range(n_tensors):
            name, (n_dims,) = self.text(), self.take('<I')
            self.tensors[name] = self.take(f'<{n_dims}Q')[::-1], *self.take('<IQ')

    def take(self, format):
        values = struct.unpack_from(format, self.data, self.at)
        self.at += struct.calcsize(format)
        return values

    def text(self):
        n, = self.take('<Q')
        self.at += n
        if self.at > len(self.data):
            raise ValueError("it ends within a text")
        return self.data[self.at - n:self.at].decode('utf-8', 'replace')

    def value(self, kind):
        if kind == TEXT:
            return self.text()
        n, is_array = 1, kind == ARRAY
        if is_array:
            kind, n = self.take('<IQ')
            if kind == TEXT:
                return [self.text() for _ in range(n)]
        numbers = np.frombuffer(self.data, NUMBERS[kind], n, self.at)
        self.at += numbers.nbytes
        # the shortest text of a float32 is the number that was meant: 1e-05, not 9.999999747e-06
        return numbers.tolist() if is_array else float(str(numbers[0])) if kind == FLOAT32 else numbers[0].item()


class GGUFFile:
    """
    A GGUF file. config: what its config.json in Hugging Face format would say. weights: {name of a tensor without the
    base of its family: an empty tensor of its shape on the device meta}; `read` reads one of them. fields: of the
    header. ValueError if the file is damaged, or has types that the gguf library cannot read.
    """

    def __init__(self, path):
        self.path = self.where = path
        try:
            import gguf
        except ImportError as e:
            raise ValueError(f"reading {path} needs the gguf library: pip install gguf") from e
        self.gguf, self.tensors = gguf, {}
        try:
            with open(path, 'rb') as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header, size = Header(data), len(data)
            self.fields, align = header.fields, typed(header.fields, 'general.alignment', int, 32)
            first = -(-header.at // align) * align
            for name, (shape, kind, offset) in header.tensors.items():
                kind = gguf.GGMLQuantizationType(kind)
                if min(shape, default=1) < 1 or offset % align:
                    raise ValueError(f"{name!r:.70} has the shape {shape!s:.50} and begins at byte {offset}: sizes "
                                     f"must be positive, and the byte a multiple of {align}")
                row_bytes, = gguf.quant_shape_to_byte_shape(shape[-1:], kind)
                self.tensors[name] = Tensor(kind, shape, first + offset, row_bytes)
                if first + offset + math.prod(shape[:-1]) * row_bytes > size:
                    raise ValueError(f"it ends before {name!r:.70} does")
        except (ValueError, KeyError, IndexError, TypeError, ArithmeticError, MemoryError, struct.error) as e:
            raise ValueError(f"{path} cannot be read ({type(e).__name__}: {e}): is the download complete?") from e
        for kind in {tensor.kind: name for name, tensor in self.tensors.items()}:
            try:
                gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError as e:
                raise ValueError(f"{path} has weights of type {kind.name}, which the gguf library cannot read") from e

    @cached_property
    def config(self):
        """What config.json would say. ValueError names what a GPT here cannot represent."""
        architecture = self.fields.get('general.architecture')
        if architecture not in ARCHITECTURES:
            raise ValueError(f"general.architecture is {architecture!r:.100}, but only {', '.join(ARCHITECTURES)} are "
                             "read")
        expect(self.fields, **{'general.type': ('model',), 'split.count': (0, 1)})
        prefix = architecture + '.'
        of = {key.removeprefix(prefix): value for key, value in self.fields.items() if key.startswith(prefix)}
        expect(of, prefix, **{key: (0,) for key in sorted(of) if key not in KNOWN})
        sizes = {name: typed(of, key, int) for name, key in KEYS.items()}
        head_dim = typed(of, 'attention.key_length', int, 0) or sizes['n_embd'] // max(1, sizes['n_head'])
        expect(of, prefix, **{'attention.value_length': (head_dim,), 'rope.dimension_count': (head_dim,),
                              'attention.causal': (True,), 'rope.scaling.type': ('none', 'linear')})
        n_kv_head, window = (typed(of, f'attention.{key}', int, 0) for key in ('head_count_kv', 'sliding_window'))
        family = 'mistral' if architecture == 'llama' and window else architecture
        if family == 'gpt2':
            expect(of, prefix, **{'attention.head_count_kv': (sizes['n_head'], 1)})
            family = 'gpt_bigcode' if n_kv_head == 1 < sizes['n_head'] else 'gpt2'
        if EMBEDDING not in self.tensors:
            raise ValueError(f"it lacks the weights {EMBEDDING}")
        sizes['vocab_size'], eps = self.tensors[EMBEDDING].shape[0], of.get(EPS[0], of.get(EPS[1]))
        hf = {theirs: sizes[ours] for ours, theirs in SIZES[family].items()} | dict(
            model_type=family, tie_word_embeddings='output.weight' not in self.tensors)
        if architecture == 'gpt2':
            return hf | dict(n_inner=sizes['n_inner'], layer_norm_epsilon=eps)
        theta, has_bias = typed(of, 'rope.freq_base', float, 10000.0), 'blk.0.attn_output.bias' in self.tensors
        return hf | dict(
            num_key_value_heads=n_kv_head, head_dim=head_dim, rope_theta=theta, intermediate_size=sizes['n_inner'],
            rope_scaling=self.rope_scaling(of, head_dim, theta), sliding_window=window or None,
            use_sliding_window=window > 0, max_window_layers=0, rms_norm_eps=eps, norm_epsilon=eps,
            use_bias=has_bias, attention_bias=has_bias, mlp_bias=has_bias)

    def rope_scaling(self, of, head_dim, theta):
        """
        The rope_scaling of a config.json: one factor for all pairs, Llama 3's, or None. For Llama 3's the file has only
        the numbers by which frequencies are divided. The largest of them is the factor. low_freq_factor and
        high_freq_factor are 1 and 4 in all models of this kind.
        """
        factor = typed(of, 'rope.scaling.factor', float, 1.0)
        if factor == 0 or of.get('rope.scaling.type') == 'none':  # then llama.cpp scales nothing
            factor = 1.0
        if FREQUENCIES not in self.tensors:
            return dict(rope_type='linear', factor=factor) if factor != 1 else None
        if factor != 1:
            raise ValueError(f"rope.scaling.factor is {factor:g} beside {FREQUENCIES}, but a GPT here can have only "
                             "one of them: use another file of this model")
        if self.tensors[FREQUENCIES].shape != (head_dim // 2,):
            raise ValueError(f"{FREQUENCIES} has the shape {self.tensors[FREQUENCIES].shape}, but must have a number "
                             f"for each pair of the {head_dim} channels of a head")
        slower, plain = self.numbers(FREQUENCIES, torch.float32), rotary_frequencies(head_dim, theta)
        for original in (2**k for k in range(21)):
            values = slower.max().item(), 1.0, 4.0, original
            of_values = plain / rotary_frequencies(head_dim, theta, values)
            if torch.allclose(of_values.float(), slower, 1e-5):
                return dict(rope_type='llama3', **dict(zip(LLAMA3, values)))
        raise ValueError(f"{FREQUENCIES} must be those of Llama 3 or one factor for all positions, and are neither: "
                         "use another model")

    def tokenizer_state(self):
        """The state of its tokenizer. Call this before `weights`, which drops the tokens and the merges."""
        try:
            return gguf_tokenizer(self.fields)
        except ValueError as e:
            raise ValueError(f"{self.path}: {e}") from e

    @cached_property
    def names(self):
        """{name of a tensor in Hugging Face format, without the base of its family: its name here}"""
        family = self.config['model_type']
        architecture, names = self.gguf.MODEL_ARCH[self.fields['general.architecture'].upper()], HUGGING_FACE[family]
        n_layer = self.config[SIZES[family]['n_layer']]
        known = self.gguf.get_tensor_name_map(architecture, n_layer)
        ours = ['lm_head.weight'] + [
            f'transformer.{at}{part}.{kind}' for part in names.parts for kind in ('weight', 'bias') for at in (
                [''] if part in ('wte', 'wpe', 'ln_f') else [f'h.{i}.' for i in range(n_layer)])]
        return {theirs: known.get_name(full, ('.weight', '.bias'))
                for name in ours for theirs, full in zip(names.of(name), names.full(name))}

    @cached_property
    def weights(self):
        self.fields = {key: value for key, value in self.fields.items() if type(value) is not list}  # tokens, merges
        dtype = torch.bfloat16 if all(map(self.is_bfloat16, self.tensors)) else torch.float32
        of_names = {name: theirs for theirs, name in self.names.items()}
        return {of_names.get(name, name): torch.empty(tensor.shape, dtype=dtype, device='meta')
                for name, tensor in self.tensors.items() if name != FREQUENCIES}

    def is_bfloat16(self, name):
        """Is a tensor bfloat16? A vector in a wider type counts if all of its numbers are."""
        if name == FREQUENCIES:  # no weight
            return True
        if len(self.tensors[name].shape) > 1:
            return self.tensors[name].kind == self.gguf.GGMLQuantizationType.BF16
        w = self.numbers(name, torch.float32)
        return torch.equal(w, w.bfloat16().float())

    @property
    def is_rounded(self):
        """Are the embeddings in blocks that share a scale?"""
        return self.gguf.GGML_QUANT_SIZES[self.tensors[EMBEDDING].kind][0] > 1

    def read(self, name, dtype):
        """The weights of this name, as `pretrained.Files` has them."""
        w = self.numbers(self.names.get(name, name), dtype)
        if self.fields['general.architecture'] == 'llama' and ('.q_proj.' in name or '.k_proj.' in name):
            # the inverse of gguf_files.pairs_side_by_side
            w = w.unflatten(0, (-1, self.config['head_dim'] // 2, 2)).transpose(1, 2).flatten(0, 2)
        return w

    def numbers(self, name, dtype):
        """A tensor as it is in the file, converted in parts of AT_ONCE numbers or one row, to save memory."""
        tensor = self.tensors[name]
        w = torch.empty(tensor.shape, dtype=dtype)
        rows, n = w.view(-1, tensor.shape[-1]), max(1, AT_ONCE // tensor.shape[-1])
        for first in range(0, len(rows), n):
            part = rows[first:first + n]
            data = np.fromfile(self.path, np.uint8, len(part) * tensor.row_bytes,
                               offset=tensor.start + first * tensor.row_bytes)
            numbers = self.gguf.dequantize(data[None], tensor.kind)  # of rows it would take 16 at a time
            part.copy_(torch.from_numpy(numbers).view_as(part))
        return w
