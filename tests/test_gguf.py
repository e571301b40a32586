"""formats/gguf_files.py, against those who read what it writes: the gguf library and llama.cpp."""
import os

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
    llama_like,
    logits,
    needs_byte_pairs,
    sentencepiece_tokenizer,
)

import formats
from benchmarks.peers.llamacpp import model_params
from model import GPT
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


@pytest.mark.parametrize('type', ['f32', 'q8_0'])
def test_matrices_have_32_or_8_bits(tmp_path, type):
    """Positions, biases and layer norms have 32 in any case."""
    model = gpt(**EASY)
    formats.to_gguf(model, tmp_path / 'model.gguf', type)
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / 'model.gguf').tensors}
    rounded = {name for name, t in found.items() if t.tensor_type == gguf.GGMLQuantizationType.Q8_0}
    assert rounded == ({name for name, t in found.items() if len(t.shape) == 2} - {'position_embd.weight'}
                       if type == 'q8_0' else set())
    w, t = model.transformer.h[1].mlp.c_fc.weight.detach(), found['blk.1.ffn_up.weight']
    # 8 bits: half a step of the largest of the row, and the float16 scale, off by 1 in 2048
    bound = w.abs().amax(-1, keepdim=True) * (0.5 / 127 + 1 / 2048) if rounded else 0
    assert ((torch.tensor(gguf.dequantize(t.data, t.tensor_type)) - w).abs() <= bound).all()


MODELS = [  # config, the architecture that computes the same
    (HARD, 'gpt2'), (EASY, 'gpt2'), (HARD | dict(n_kv_head=1), 'gpt2'),
    (EASY | dict(position='none', n_kv_head=1), 'gpt2'),
    (ROPE, 'starcoder2'), (ROPE | dict(n_kv_head=3, bias=True), 'starcoder2'), (ROPE | dict(window=9), 'starcoder2'),
    (ALIBI, 'mpt'), (ALIBI | dict(n_head=4), 'mpt'),
    (ALIBI | dict(n_kv_head=2, bias=True), 'mpt'),  # llama.cpp's mpt has both, unlike that of transformers
]


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


@pytest.mark.parametrize('config, how, line', [
    # llama.cpp loads rope_freqs.weight from files of the llama architecture only
    *[(config | dict(rope_scaling=(8.0, 1.0, 4.0, 32)), {}, 'has no rope_scaling: export with --to=hf')
      for config in (ROPE, QWEN2, QWEN3)],
    (ROPE | dict(vocab_size=400), dict(tokenizer='sentencepiece'), 'convert_hf_to_gguf.py'),
    (HARD, dict(type='q8_0'), 'n_embd 21'), (HARD, dict(type='q4_0'), 'f32 or q8_0'),
])
def test_what_llama_cpp_cannot_read_is_refused(tmp_path, config, how, line):
    how = how | dict(tokenizer=sentencepiece_tokenizer(TEXT * 9)) if 'tokenizer' in how else how
    with pytest.raises(ValueError, match=line):
        formats.to_gguf(gpt(**config), tmp_path / 'model.gguf', **how)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize('config, architecture, type, bound', [
    *[(*of, 'f32', 2e-4) for of in MODELS], (EASY, 'gpt2', 'q8_0', 0.15),
])
def test_llama_cpp_computes_the_same_but_for_its_gelu(tmp_path, config, architecture, type, bound):
    """llama.cpp ignores a window, so the file ends where the window would begin to hide keys."""
    model, n = gpt(**config), config.get('window', config['block_size'])
    assert formats.to_gguf(model, tmp_path / 'model.gguf', type) == 'none'
    theirs = llama(tmp_path / 'model.gguf')
    assert theirs.metadata['general.architecture'] == architecture
    assert theirs.metadata[f'{architecture}.context_length'] == str(n)
    idx = torch.randint(config['vocab_size'], (1, n))
    theirs.eval(idx[0].tolist())
    scores = torch.tensor(theirs.scores[:n])
    exact = logits(model, idx)[0]
    for block in model.transformer.h:
        block.mlp.gelu = LlamaGELU()
    ours = logits(model, idx)[0]
    assert (scores - ours).std() < bound * ours.std()
    assert (scores - exact).std() < max(bound, 2e-3) * exact.std()


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
