"""GGUF files that formats/gguf_files.py writes: the gguf library, llama.cpp and from_gguf.py read the same of them."""
import os

import pytest
import torch
import torch.nn.functional as F
from example_models import (
    ALIBI,
    EASY,
    FAMILIES,
    HARD,
    ROPE,
    SCALED,
    TEXT,
    UNTIED,
    bpe,
    fields_in_files,
    gpt,
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


@pytest.mark.parametrize('config, family', [
    *FAMILIES, (ALIBI | dict(n_kv_head=2, bias=True), 'mpt'),
    (UNTIED | dict(n_embd=40, n_head=3, n_kv_head=1, head_dim=16, bias=True), 'llama')])
def test_llama_cpp_computes_the_same_and_it_is_read_back(tmp_path, config, family):
    """But for its GELU, and a window: it has none, so the file ends where the window would begin to hide keys."""
    model, path = gpt(**config), tmp_path / 'model.gguf'
    assert formats.to_gguf(model, path) == 'none'
    n = model.config.window or model.config.block_size
    if family != 'mpt':  # which is not read
        back = GPT.from_pretrained(str(path))
        gelu = 'tanh' if model.config.mlp == 'gelu' else 'none'
        assert vars(back.config) == fields_in_files(model.config) | dict(window=0, block_size=n, gelu=gelu)
        formats.to_gguf(back, tmp_path / 'again.gguf')
        assert (tmp_path / 'again.gguf').read_bytes() == path.read_bytes()
    theirs, architecture = llama(path), 'llama' if family == 'mistral' else family
    assert theirs.metadata['general.architecture'] == architecture
    assert theirs.metadata[f'{architecture}.context_length'] == str(n)
    idx = torch.randint(model.config.vocab_size, (1, n))
    theirs.eval(idx[0].tolist())
    scores = torch.tensor(theirs.scores[:n])
    exact = logits(model, idx)[0]
    for block in model.transformer.h if model.config.mlp == 'gelu' else ():
        block.mlp.gelu = LlamaGELU()
    ours = logits(model, idx)[0]
    assert (scores - ours).std() < 2e-4 * ours.std()
    assert (scores - exact).std() < 2e-3 * exact.std()


@pytest.mark.parametrize('config, how, line', [
    *[(config, {}, 'has no rope_scaling: export with --to=hf') for config, _ in SCALED],
    (ROPE | dict(vocab_size=400), dict(tokenizer='sentencepiece'), 'convert_hf_to_gguf.py'),
    (HARD, dict(type='q8_0'), 'n_embd 21'), (HARD, dict(type='q4_0'), 'f32 or q8_0'),
])
def test_what_llama_cpp_cannot_read_is_refused(tmp_path, config, how, line):
    how = how | dict(tokenizer=sentencepiece_tokenizer(TEXT * 9)) if 'tokenizer' in how else how
    with pytest.raises(ValueError, match=line):
        formats.to_gguf(gpt(**config), tmp_path / 'model.gguf', **how)
    assert not os.listdir(tmp_path)


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
    assert formats.files_of(str(tmp_path / 'model.gguf')).tokenizer_state() == ours.state()


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
