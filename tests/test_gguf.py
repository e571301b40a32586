"""formats/gguf_files.py, against those who read what it writes: the gguf library and llama.cpp."""
import os

import pytest
import torch
import torch.nn.functional as F
from example_models import ALIBI, EASY, HARD, ROPE, TEXT, bpe, gpt, json_tokenizer, logits, needs_byte_pairs
from torch.testing import assert_close

import checkpoint as checkpoints
import formats
from model import GPT, GPTConfig
from tokenizer import CharTokenizer

gguf = pytest.importorskip('gguf', reason="gguf is not installed")


class LlamaGELU(torch.nn.Module):
    """llama.cpp's in place of the exact GELU: the tanh approximation of a float16 number, rounded to float16."""

    def forward(self, x):
        y = F.gelu(x.half().float(), approximate='tanh').half().float()
        return torch.where(x.abs() < 10, y, F.relu(x))


def llama(path):
    """The model in llama.cpp, with keys and values in float32; its logits are in scores (n_ctx, vocab_size)."""
    llama_cpp = pytest.importorskip('llama_cpp', reason="llama-cpp-python is not installed")
    return llama_cpp.Llama(str(path), n_ctx=0, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False, type_k=0,
                           type_v=0)


@pytest.mark.parametrize('type', ['f32', 'q8_0'])
def test_gguf_holds_every_weight(tmp_path, type):
    model = gpt(**EASY)
    formats.to_gguf(model, tmp_path / 'model.gguf', type)
    reader = gguf.GGUFReader(tmp_path / 'model.gguf')
    theirs = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    t = model.transformer
    ours = {'token_embd.weight': t.wte.weight, 'position_embd.weight': t.wpe.weight,
            'output_norm.weight': t.ln_f.weight}
    for i, block in enumerate(t.h):
        ours |= {f'blk.{i}.attn_norm.weight': block.ln_1.weight, f'blk.{i}.attn_qkv.weight': block.attn.c_attn.weight,
                 f'blk.{i}.attn_output.weight': block.attn.c_proj.weight, f'blk.{i}.ffn_norm.weight': block.ln_2.weight,
                 f'blk.{i}.ffn_up.weight': block.mlp.c_fc.weight, f'blk.{i}.ffn_down.weight': block.mlp.c_proj.weight}
    for name, w in ours.items():
        w, exact = w.detach(), type == 'f32' or w.dim() == 1 or name.startswith('position')
        # 8 bits: half a step of the largest of the row, and the float16 scale, off by 1 in 2048
        bound = 0 if exact else w.abs().amax(-1, keepdim=True) * (0.5 / 127 + 1 / 2048)
        assert theirs[name].shape == w.shape and ((theirs.pop(name) - w).abs() <= bound).all(), name
    assert all(name.endswith('.bias') and not w.any() for name, w in theirs.items()) and len(theirs) == 6 * 2 + 1
    keys = {'block_count': 2, 'context_length': 24, 'embedding_length': 64, 'feed_forward_length': 256,
            'attention.head_count': 2}
    assert {key: reader.fields['gpt2.' + key].contents() for key in keys} == keys


def graph_of_llama_cpp(path, idx):
    """
    The logits (T, vocab_size) of tokens idx (T,) from a GGUF file, in float64 and with the tanh GELU, by the graphs of
    llama.cpp: src/models/gpt2.cpp, starcoder2.cpp and mpt.cpp, and ALiBi's slopes as in ggml/src/ggml-cpu/ops.cpp.
    """
    reader = gguf.GGUFReader(path)
    w = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)).double() for t in reader.tensors}
    arch = reader.fields['general.architecture'].contents()
    table = [gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[gguf.MODEL_ARCH[arch.upper()]]]
    n_layer, n_head, n_head_kv, n_ctx = (reader.fields[f'{arch}.{key}'].contents() for key in (
        'block_count', 'attention.head_count', 'attention.head_count_kv', 'context_length'))
    named = {name.format(bid=i) for name in table for i in range(n_layer)}
    assert {name.rpartition('.')[0] for name in w} <= named  # it loads no file with a tensor that it does not know
    assert len(idx) <= n_ctx and reader.fields[f'{arch}.embedding_length'].contents() == w['token_embd.weight'].size(1)

    def linear(x, name):
        return F.linear(x, w[name + '.weight'], w.get(name + '.bias'))

    def norm(x, name):
        eps = reader.fields[f'{arch}.attention.layer_norm_epsilon'].contents()
        return F.layer_norm(x, x.shape[-1:], w[name + '.weight'], w.get(name + '.bias'), eps)

    T = len(idx)
    pos = torch.arange(T, dtype=torch.float64)
    bias = torch.zeros(T, T, dtype=torch.float64).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -float('inf'))
    if arch == 'mpt':
        most, n = reader.fields['mpt.attention.max_alibi_bias'].contents(), 2 ** (n_head.bit_length() - 1)
        slopes = [2 ** (-most / n * (h + 1)) if h < n else 2 ** (-most / 2 / n * (2 * (h - n) + 1))
                  for h in range(n_head)]
        bias = bias - torch.tensor(slopes, dtype=torch.float64)[:, None, None] * (pos[:, None] - pos).abs()
    x = w['token_embd.weight'][idx]
    x = x + w['position_embd.weight'][:T] if 'position_embd.weight' in w else x
    for i in range(n_layer):
        y = norm(x, f'blk.{i}.attn_norm')
        if f'blk.{i}.attn_qkv.weight' in w:
            qkv = linear(y, f'blk.{i}.attn_qkv')
            size = qkv.size(-1) // (n_head + 2 * n_head_kv)
            q, k, v = qkv.split([n_head * size, n_head_kv * size, n_head_kv * size], -1)
        else:
            q, k, v = (linear(y, f'blk.{i}.attn_{part}') for part in 'qkv')
        q, k, v = (t.unflatten(-1, (n, -1)).transpose(0, 1) for t, n in ((q, n_head), (k, n_head_kv), (v, n_head_kv)))
        if arch == 'starcoder2':  # LLAMA_ROPE_TYPE_NEOX: pairs are half a head apart
            base, half = reader.fields['starcoder2.rope.freq_base'].contents(), q.size(-1) // 2
            turn = torch.polar(torch.ones(T, half, dtype=torch.float64),
                               pos[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half))
            turned = [torch.complex(t[..., :half], t[..., half:]) * turn for t in (q, k)]
            q, k = (torch.cat((t.real, t.imag), -1) for t in turned)
        k, v = (t.repeat_interleave(n_head // n_head_kv, 0) for t in (k, v))
        y = (q @ k.mT / q.size(-1) ** 0.5 + bias).softmax(-1) @ v
        x = x + linear(y.transpose(0, 1).flatten(1), f'blk.{i}.attn_output')
        y = linear(norm(x, f'blk.{i}.ffn_norm'), f'blk.{i}.ffn_up')
        x = x + linear(F.gelu(y, approximate='tanh'), f'blk.{i}.ffn_down')
    return norm(x, 'output_norm') @ w['token_embd.weight'].T


MODELS = [  # config, the architecture that computes the same
    (HARD, 'gpt2'), (HARD | dict(n_kv_head=1), 'gpt2'), (EASY | dict(position='none', n_kv_head=1), 'gpt2'),
    (ROPE, 'starcoder2'), (ROPE | dict(n_kv_head=3, bias=True), 'starcoder2'), (ROPE | dict(window=9), 'starcoder2'),
    (ALIBI, 'mpt'), (ALIBI | dict(n_head=4), 'mpt'),
    (ALIBI | dict(n_kv_head=2, bias=True), 'mpt'),  # llama.cpp's mpt has both, unlike that of transformers
]


@pytest.mark.parametrize('config, architecture', MODELS)
def test_llama_cpps_graph_computes_the_same(tmp_path, config, architecture):
    model, path = gpt(**config | dict(gelu='tanh')), tmp_path / 'model.gguf'
    formats.to_gguf(model, path)
    fields = gguf.GGUFReader(path).fields
    assert fields['general.architecture'].contents() == architecture
    n_ctx = fields[f'{architecture}.context_length'].contents()
    # llama.cpp ignores a window, so the file ends where the window would begin to hide keys
    assert n_ctx == config.get('window', config['block_size'])
    idx = torch.randint(config['vocab_size'], (n_ctx,))
    assert_close(graph_of_llama_cpp(path, idx), logits(model.double(), idx[None])[0], rtol=1e-5, atol=1e-5)


def test_a_tokenizer_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match='convert_hf_to_gguf.py'):
        formats.to_gguf(gpt(**ROPE | dict(vocab_size=300)), tmp_path / 'model.gguf', tokenizer=json_tokenizer(TEXT))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize('config, type, bound', [
    *[(config, 'f32', 2e-4) for config, _ in [*MODELS, (EASY, '')]], (EASY, 'q8_0', 0.15),
])
def test_llama_cpp_computes_the_same_but_for_its_gelu(tmp_path, config, type, bound):
    model = gpt(**config)
    assert formats.to_gguf(model, tmp_path / 'model.gguf', type) == 'none'
    theirs = llama(tmp_path / 'model.gguf')
    n = config.get('window', config['block_size'])
    idx = torch.randint(config['vocab_size'], (1, n))
    theirs.eval(idx[0].tolist())
    scores = torch.tensor(theirs.scores[:n])
    exact = logits(model, idx)[0]
    for block in model.transformer.h:
        block.mlp.gelu = LlamaGELU()
    ours = logits(model, idx)[0]
    assert (scores - ours).std() < bound * ours.std()
    assert (scores - exact).std() < max(bound, 2e-3) * exact.std()


def test_llama_cpp_goes_on_as_we_do_but_for_near_ties(trained, tmp_path):
    checkpoint = checkpoints.load(trained / 'out' / 'ckpt.pt')
    model, tokenizer = checkpoints.build(checkpoint, GPT, GPTConfig).eval(), checkpoints.tokenizer_of(checkpoint)
    formats.to_gguf(model, tmp_path / 'model.gguf', tokenizer=tokenizer)
    theirs = llama(tmp_path / 'model.gguf')
    for prompt in ('The ', 'state', 'with a', '"try"'):
        tokens = theirs.tokenize(prompt.encode())
        assert tokens == tokenizer.encode(prompt)
        n = len(tokens)
        for token in theirs.generate(tokens, temp=0):
            tokens = tokens + [token]
            if len(tokens) == model.config.block_size:
                break
        scores = logits(model, torch.tensor([tokens]))[0, n - 1:-1]  # of the position before each of their tokens
        assert (scores.amax(-1) - scores.gather(-1, torch.tensor(tokens[n:])[:, None])[:, 0]).max() < 0.02


@pytest.mark.parametrize('chars, unknown', [(map(chr, range(128)), 'é'), (TEXT.replace('\x00', '\x80'), '\x7f')])
def test_llama_cpp_reads_and_writes_our_characters(tmp_path, chars, unknown):
    ours = CharTokenizer.of_text(chars)
    assert formats.to_gguf(gpt(**EASY | dict(vocab_size=130)), tmp_path / 'model.gguf', tokenizer=ours) == 'rwkv'
    theirs = llama(tmp_path / 'model.gguf')
    for text in ('don\'t', 'quotes\n"\\n"\t', ''.join(ours.chars), ''.join(ours.chars[::-1])):
        assert theirs.tokenize(text.encode()) == ours.encode(text)
        assert theirs.detokenize(ours.encode(text)) == text.encode()
    assert theirs.tokenize(f'a{unknown}b'.encode()) == ours.encode('a' + ' ' * len(unknown.encode()) + 'b')
    assert theirs.token_eos() == theirs.token_bos() == -1  # no character ends a text
    assert theirs.n_vocab() == 130
    assert theirs.create_completion('don', max_tokens=5)['choices'][0]['finish_reason'] == 'length'


@needs_byte_pairs
def test_llama_cpp_reads_and_writes_our_byte_pairs(tmp_path, monkeypatch):
    ours = bpe(monkeypatch)
    assert formats.to_gguf(gpt(**HARD | dict(vocab_size=50304)), tmp_path / 'model.gguf', tokenizer=ours) == 'gpt2'
    theirs = llama(tmp_path / 'model.gguf')
    text = TEXT.replace('\x00', '') + '<|endoftext|>[PAD50300]'  # it takes a text up to a zero byte
    assert theirs.tokenize(text.encode(), special=True) == ours.encode(text)
    assert theirs.detokenize(ours.encode(text), special=True) == text.encode()
    assert theirs.token_eos() == theirs.token_bos() == 50256 and theirs.n_vocab() == 50304


def test_gguf_is_written_over_a_gguf_only(tmp_path):
    (tmp_path / 'notes').write_text('mine')
    for path in ('notes', '.'):
        with pytest.raises(ValueError, match='is no GGUF file'):
            formats.to_gguf(gpt(**HARD), tmp_path / path)
    assert (tmp_path / 'notes').read_text() == 'mine'
    for _ in range(2):
        formats.to_gguf(gpt(**HARD), tmp_path / 'new' / 'model.gguf')
    assert os.listdir(tmp_path / 'new') == ['model.gguf']
    with pytest.raises(ValueError, match='n_embd 21'):
        formats.to_gguf(gpt(**HARD), tmp_path / 'other.gguf', 'q8_0')
    with pytest.raises(ValueError, match='f32 or q8_0'):
        formats.to_gguf(gpt(**HARD), tmp_path / 'other.gguf', 'q4_0')
