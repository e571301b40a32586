"""formats/gguf_files.py, against those who read what it writes: the gguf library and llama.cpp."""
import os

import plain_gpt
import pytest
import torch
import torch.nn.functional as F
from conftest import sizes
from example_models import (
    ALIBI,
    EASY,
    HARD,
    LLAMA3,
    MISTRAL,
    QWEN2,
    QWEN3,
    ROPE,
    TEXT,
    UNTIED,
    bpe,
    gpt,
    json_tokenizer,
    llama_like,
    logits,
    needs_byte_pairs,
)
from torch.testing import assert_close

import checkpoint as checkpoints
import formats
from benchmarks.peers.llamacpp import model_params
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
    params = model_params()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_cpp.llama_cpp, 'llama_model_default_params', lambda: params)
        return llama_cpp.Llama(str(path), n_ctx=0, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False,
                               type_k=0, type_v=0)


NAMES = {'token_embd': 'transformer.wte', 'position_embd': 'transformer.wpe', 'output_norm': 'transformer.ln_f',
         'attn_norm': 'ln_1', 'attn_qkv': 'attn.c_attn', 'attn_output': 'attn.c_proj', 'ffn_norm': 'ln_2',
         'ffn_up': 'mlp.c_fc', 'ffn_down': 'mlp.c_proj'}


def read(path):
    """The architecture of a GGUF file, its fields as {name behind the architecture's: content}, and a state dict."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields['general.architecture'].contents()
    fields = {name.removeprefix(arch + '.'): field.contents() for name, field in reader.fields.items()
              if name.startswith(arch + '.')}
    found = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    table = [gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[gguf.MODEL_ARCH[arch.upper()]]]
    known = {name.format(bid=i) for name in table for i in range(fields['block_count'])}
    assert {name.rpartition('.')[0] for name in found} <= known  # it loads no file with a tensor that it does not know
    for name in [name for name in found if '.attn_q.' in name]:  # starcoder2's are three
        parts = [name.replace('attn_q', f'attn_{part}') for part in 'qkv']
        found[name.replace('attn_q', 'attn_qkv')] = torch.cat([found.pop(part) for part in parts])
    weights = {}
    for name, w in found.items():
        *block, part, kind = name.split('.')
        weights['.'.join(['transformer.h', *block[1:]] * bool(block) + [NAMES[part], kind])] = w
    return arch, fields, weights | {'lm_head.weight': weights['transformer.wte.weight']}


@pytest.mark.parametrize('type', ['f32', 'q8_0'])
def test_gguf_holds_every_weight(tmp_path, type):
    model = gpt(**EASY)
    formats.to_gguf(model, tmp_path / 'model.gguf', type)
    _, fields, theirs = read(tmp_path / 'model.gguf')
    for name, w in model.state_dict().items():
        exact = type == 'f32' or w.dim() == 1 or name.endswith('wpe.weight')
        # 8 bits: half a step of the largest of the row, and the float16 scale, off by 1 in 2048
        bound = 0 if exact else w.abs().amax(-1, keepdim=True) * (0.5 / 127 + 1 / 2048)
        assert theirs[name].shape == w.shape and ((theirs.pop(name) - w).abs() <= bound).all(), name
    assert all(name.endswith('.bias') and not w.any() for name, w in theirs.items()) and len(theirs) == 6 * 2 + 1
    expected = {'block_count': 2, 'context_length': 24, 'embedding_length': 64, 'feed_forward_length': 256,
                'attention.head_count': 2}
    assert expected.items() <= fields.items()


MODELS = [  # config, the architecture that computes the same
    (HARD, 'gpt2'), (HARD | dict(n_kv_head=1), 'gpt2'), (EASY | dict(position='none', n_kv_head=1), 'gpt2'),
    (ROPE, 'starcoder2'), (ROPE | dict(n_kv_head=3, bias=True), 'starcoder2'), (ROPE | dict(window=9), 'starcoder2'),
    (ALIBI, 'mpt'), (ALIBI | dict(n_head=4), 'mpt'),
    (ALIBI | dict(n_kv_head=2, bias=True), 'mpt'),  # llama.cpp's mpt has both, unlike that of transformers
]


@pytest.mark.parametrize('config, architecture', MODELS)
def test_llama_cpps_graph_computes_the_same(tmp_path, config, architecture):
    """
    The graphs of src/models/gpt2.cpp, starcoder2.cpp and mpt.cpp are those of plain_gpt.py with the tanh GELU: pairs
    half a head apart (LLAMA_ROPE_TYPE_NEOX), and ALiBi's slopes as in ggml/src/ggml-cpu/ops.cpp.
    """
    model, path = gpt(**config | dict(gelu='tanh')), tmp_path / 'model.gguf'
    formats.to_gguf(model, path)
    arch, fields, weights = read(path)
    assert arch == architecture and fields['embedding_length'] == config['n_embd']
    assert fields['attention.layer_norm_epsilon'] == pytest.approx(1e-5)
    assert arch != 'mpt' or fields['attention.max_alibi_bias'] == 8
    # llama.cpp ignores a window, so the file ends where the window would begin to hide keys
    n_ctx = fields['context_length']
    assert n_ctx == config.get('window', config['block_size'])
    idx = torch.randint(config['vocab_size'], (1, n_ctx))
    theirs = plain_gpt.logits({name: w.double() for name, w in weights.items()}, fields['attention.head_count'], idx,
                              {'gpt2': 'learned', 'starcoder2': 'rope', 'mpt': 'alibi'}[arch],
                              fields['attention.head_count_kv'], rope=(fields.get('rope.freq_base'),), gelu='tanh')
    assert_close(theirs, logits(model.double(), idx), rtol=1e-5, atol=1e-5)


LLAMAS = [  # llama.cpp has no window, so a mistral is a llama up to there
    UNTIED, UNTIED | dict(tied=True, n_kv_head=0), UNTIED | dict(bias=True, head_dim=12), UNTIED | dict(n_kv_head=1),
    LLAMA3, LLAMA3 | dict(tied=False, rope_scaling=(32.0, 1.0, 4.0, 64)), MISTRAL | dict(window=20), QWEN2,
    QWEN2 | dict(tied=False), QWEN3, QWEN3 | dict(tied=True, n_inner=37),
]


@pytest.mark.parametrize('case', [*LLAMAS, *range(sizes(0, 72))])
def test_llama_cpp_computes_the_same_as_llamas_family(tmp_path, case):
    """Of a config, or of a model of transformers that is drawn from a seed."""
    if isinstance(case, int):
        pytest.importorskip('transformers', reason="transformers is not installed")
        llama_like(case)[0].save_pretrained(tmp_path)
        model = GPT.from_pretrained(str(tmp_path)).eval()
    else:
        model = gpt(**case)
    formats.to_gguf(model, tmp_path / 'model.gguf')
    theirs, n = llama(tmp_path / 'model.gguf'), model.config.window or model.config.block_size
    idx = torch.randint(model.config.vocab_size, (1, n))
    theirs.eval(idx[0].tolist())
    ours = logits(model, idx)[0]
    assert (torch.tensor(theirs.scores[:n]) - ours).abs().max() < 2e-4 * ours.std()


@pytest.mark.parametrize('config', [ROPE, QWEN2, QWEN3])
def test_rope_scaling_is_llamas_alone(tmp_path, config):
    """llama.cpp loads no other file with rope_freqs.weight."""
    with pytest.raises(ValueError, match='has no rope_scaling: export with --to=hf'):
        formats.to_gguf(gpt(**config | dict(rope_scaling=(8.0, 1.0, 4.0, 32))), tmp_path / 'model.gguf')
    assert not os.listdir(tmp_path)


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
