"""formats.py and export.py, against those who read what they write: transformers, gguf, llama.cpp."""
import glob
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from conftest import SHARED_TEXT, run
from torch.testing import assert_close

import checkpoint
import checkpoint as checkpoints
import formats
import model as plain_model
import tokenizer as tokenizers
from model import GPT, GPTConfig
from tokenizer import CharTokenizer, GPT2Tokenizer

TIKTOKEN_CACHE = os.path.join(os.path.dirname(os.path.dirname(SHARED_TEXT)), 'tiktoken_cache')
needs_byte_pairs = pytest.mark.skipif(not os.path.isdir(TIKTOKEN_CACHE), reason="GPT-2's byte pairs are not here")
TEXT = 'Héllo  wörld,\n\n\ttabs \\ and "quotes" \x00 “curly”, don\'t 12345 日本 🙂 '
HARD = dict(block_size=11, vocab_size=37, n_layer=3, n_head=3, n_embd=21, bias=True)    # nothing is a power of two
EASY = dict(block_size=24, vocab_size=128, n_layer=2, n_head=2, n_embd=64, bias=False)


def gpt(**config):
    """A model in eval mode with weights far from their initial values: every bias and layer norm counts."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**config)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5).add_(0.1 * torch.randn_like(p))
    return model


@torch.no_grad()
def logits(model, idx):
    return model(idx, targets=idx)[0]


def bpe(monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', TIKTOKEN_CACHE)
    return GPT2Tokenizer()


@pytest.mark.parametrize('config', [HARD, HARD | dict(bias=False, dropout=0.1), EASY | dict(bias=True), EASY])
def test_hugging_face_computes_the_same(tmp_path, config):
    from transformers import GPT2LMHeadModel
    model = gpt(**config)
    formats.to_huggingface(model, tmp_path / 'hf')
    theirs, loading = GPT2LMHeadModel.from_pretrained(tmp_path / 'hf', output_loading_info=True)
    assert not any(loading.values()), loading
    idx = torch.randint(config['vocab_size'], (3, config['block_size']))
    with torch.no_grad():
        assert_close(theirs.eval()(idx).logits, logits(model, idx), atol=1e-4, rtol=0)
    greedy = dict(do_sample=False, max_new_tokens=6, pad_token_id=0)
    assert (
        theirs.generate(idx[:, :4], **greedy).tolist()
        == model.generate(idx[:, :4], 6, temperature=0, use_cache=True).tolist()
    )


@pytest.mark.parametrize('bias', [True, False])
def test_there_and_back_to_the_bit(tmp_path, bias):
    from safetensors import safe_open
    model = gpt(**HARD | dict(bias=bias))
    formats.to_huggingface(model, tmp_path / 'hf')
    back = GPT.from_pretrained(str(tmp_path / 'hf')).state_dict()
    for name, w in model.state_dict().items():
        assert torch.equal(back.pop(name), w), name
    assert all(name.endswith('.bias') and not w.any() for name, w in back.items()) and bool(back) != bias
    with safe_open(tmp_path / 'hf' / 'model.safetensors', 'pt') as f:
        assert 'lm_head.weight' not in f.keys()  # it is wte
        # (in, out)
        assert sum(f.get_slice(name).get_shape()[0] == 3 * 21 for name in f.keys() if 'c_attn.weight' in name) == 0


def test_characters_in_hugging_faces_tokenizer(tmp_path):
    from transformers import AutoTokenizer, GPT2Config
    ours = CharTokenizer.of_text(TEXT)
    formats.to_huggingface(gpt(**HARD | dict(vocab_size=ours.vocab_size + 3)), tmp_path / 'hf', ours)
    theirs = AutoTokenizer.from_pretrained(tmp_path / 'hf')
    assert set(theirs(TEXT)) == {'input_ids', 'attention_mask'}  # GPT-2 would add the embeddings of token_type_ids
    assert theirs(TEXT)['input_ids'] == ours.encode(TEXT) and theirs.decode(ours.encode(TEXT)) == TEXT
    # no character ends a text: GPT-2's 50256 by default
    assert GPT2Config.from_pretrained(tmp_path / 'hf').eos_token_id is None
    # a character the model has never seen becomes a space, in the text and at its ends
    unknown = theirs('žlo\t日')['input_ids']
    assert unknown == ours.encode(' lo\t日') and theirs.decode(unknown, skip_special_tokens=True) == ' lo\t日'
    assert not theirs.all_special_tokens  # the space is not one of them: they are left out of a decoded text
    assert tokenizers.from_state(tokenizers.state_of_dataset(tmp_path / 'hf')).chars == ours.chars


def test_unknown_characters_where_there_is_no_space(tmp_path):
    from transformers import AutoTokenizer
    formats.to_huggingface(gpt(**HARD | dict(vocab_size=3)), tmp_path / 'hf', CharTokenizer('abc'))
    assert AutoTokenizer.from_pretrained(tmp_path / 'hf')('bxc')['input_ids'] == [1, 0, 2]


@needs_byte_pairs
def test_byte_pairs_in_hugging_faces_tokenizer(tmp_path, monkeypatch):
    from transformers import AutoTokenizer, GPT2TokenizerFast
    ours = bpe(monkeypatch)
    formats.to_huggingface(gpt(**EASY | dict(vocab_size=50304)), tmp_path / 'hf', ours)
    text = TEXT + '<|endoftext|>' + (open(SHARED_TEXT).read()[:10000] if os.path.exists(SHARED_TEXT) else '')
    for theirs in (AutoTokenizer.from_pretrained(tmp_path / 'hf'), GPT2TokenizerFast.from_pretrained(tmp_path / 'hf')):
        assert (
            theirs(text, truncation=False)['input_ids'] == ours.encode(text)
            and theirs.decode(ours.encode(text)) == text
        )
        assert theirs.eos_token_id == 50256 and theirs.decode([15496, 50300]) == 'Hello'
    assert tokenizers.state_of_dataset(tmp_path / 'hf') == {'kind': 'gpt2'}


@needs_byte_pairs
def test_merges_are_those_gpt2_came_with(monkeypatch):
    tokens, merges = formats.byte_pairs(bpe(monkeypatch).bpe)
    for path in glob.glob(TIKTOKEN_CACHE + '/*'):  # tiktoken downloads GPT-2's own two files
        with open(path, encoding='utf-8') as f:
            text = f.read()
        if text.startswith('{'):
            assert {text: i for i, text in enumerate(tokens)} == json.loads(text)
        else:
            assert merges == text.splitlines()[1:]
    assert len(merges) == 50000 and len(tokens) == 50257


def test_an_export_is_replaced_whole_and_nothing_else_is_touched(tmp_path, monkeypatch):
    folder, tokenizer = tmp_path / 'hf', CharTokenizer('ab')
    model = gpt(**HARD | dict(vocab_size=2))
    formats.to_huggingface(model, folder, tokenizer)
    formats.to_huggingface(gpt(**HARD), str(folder) + '/')  # no tokenizer: the old one must not stay
    assert sorted(os.listdir(folder)) == ['config.json', 'model.safetensors'] and os.listdir(tmp_path) == ['hf']
    assert os.stat(folder / 'model.safetensors').st_mode == os.stat(folder / 'config.json').st_mode
    before = (folder / 'model.safetensors').read_bytes()

    def full(*args, **kwargs):
        raise OSError("No space left on device")
    with monkeypatch.context() as m, pytest.raises(OSError, match='No space'):
        m.setattr('safetensors.torch.save_file', full)
        formats.to_huggingface(model, folder, tokenizer)
    assert os.listdir(tmp_path) == ['hf'] and (folder / 'model.safetensors').read_bytes() == before
    (folder / 'thesis.txt').write_text('mine')
    with pytest.raises(ValueError, match='holds thesis.txt, which is no export'):
        formats.to_huggingface(model, folder)
    with pytest.raises(ValueError, match='is no folder'):
        formats.to_huggingface(model, folder / 'thesis.txt')
    assert (folder / 'thesis.txt').read_text() == 'mine' and os.listdir(tmp_path) == ['hf']


@pytest.mark.parametrize('to', [formats.to_huggingface, formats.to_gguf])
def test_a_tokenizer_of_another_model_is_refused(tmp_path, to):
    if to is formats.to_gguf:
        pytest.importorskip('gguf', reason="gguf is not installed")
    with pytest.raises(ValueError, match='65 tokens, but the model a vocab_size of 37'):
        to(gpt(**HARD), tmp_path / 'new', tokenizer=CharTokenizer.of_text(map(chr, range(65))))
    assert not os.listdir(tmp_path)


# what llama.cpp does not have is the exact GELU. In its place, of float16 numbers and rounded to one
def llama_gelu(x):
    y = F.gelu(x.half().float(), approximate='tanh').half().float()
    return torch.where(x.abs() < 10, y, F.relu(x))


def llama(path):
    """The model in llama.cpp, with keys and values in float32; its logits are in scores (n_ctx, vocab_size)."""
    llama_cpp = pytest.importorskip('llama_cpp', reason="llama-cpp-python is not installed")
    return llama_cpp.Llama(
        str(path), n_ctx=0, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False, type_k=0, type_v=0
    )


@pytest.mark.parametrize('type', ['f32', 'q8_0'])
def test_gguf_holds_every_weight(tmp_path, type):
    gguf = pytest.importorskip('gguf', reason="gguf is not installed")
    model = gpt(**EASY)
    formats.to_gguf(model, tmp_path / 'model.gguf', type)
    reader = gguf.GGUFReader(tmp_path / 'model.gguf')
    theirs = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    t = model.transformer
    ours = {
        'token_embd.weight': t.wte.weight,
        'position_embd.weight': t.wpe.weight,
        'output_norm.weight': t.ln_f.weight,
    }
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
    keys = {
        'block_count': 2,
        'context_length': 24,
        'embedding_length': 64,
        'feed_forward_length': 256,
        'attention.head_count': 2,
    }
    assert {key: reader.fields['gpt2.' + key].contents() for key in keys} == keys


@pytest.mark.parametrize('config, type, bound', [(HARD, 'f32', 2e-4), (EASY, 'f32', 2e-4), (EASY, 'q8_0', 0.15)])
def test_llama_cpp_computes_the_same_but_for_its_gelu(tmp_path, monkeypatch, config, type, bound):
    pytest.importorskip('gguf', reason="gguf is not installed")
    model = gpt(**config)
    assert formats.to_gguf(model, tmp_path / 'model.gguf', type) == 'none'
    theirs = llama(tmp_path / 'model.gguf')
    idx = torch.randint(config['vocab_size'], (1, config['block_size']))
    theirs.eval(idx[0].tolist())
    scores = torch.tensor(theirs.scores[:config['block_size']])
    exact = logits(model, idx)[0]
    monkeypatch.setattr(plain_model, 'gelu', llama_gelu)
    ours = logits(model, idx)[0]
    assert (scores - ours).std() < bound * ours.std()
    assert (scores - exact).std() < max(bound, 2e-3) * exact.std()


def test_llama_cpp_goes_on_as_we_do_but_for_near_ties(trained, tmp_path):
    pytest.importorskip('gguf', reason="gguf is not installed")
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
    pytest.importorskip('gguf', reason="gguf is not installed")
    ours = CharTokenizer.of_text(chars)
    assert formats.to_gguf(gpt(**EASY | dict(vocab_size=130)), tmp_path / 'model.gguf', tokenizer=ours) == 'rwkv'
    theirs = llama(tmp_path / 'model.gguf')
    for text in ('don\'t', 'quotes\n"\\n"\t', ''.join(ours.chars), ''.join(ours.chars[::-1])):
        assert (
            theirs.tokenize(text.encode()) == ours.encode(text)
            and theirs.detokenize(ours.encode(text)) == text.encode()
        )
    assert theirs.tokenize(f'a{unknown}b'.encode()) == ours.encode('a' + ' ' * len(unknown.encode()) + 'b')
    assert theirs.token_eos() == theirs.token_bos() == -1  # no character ends a text
    assert (
        theirs.n_vocab() == 130
        and theirs.create_completion('don', max_tokens=5)['choices'][0]['finish_reason'] == 'length'
    )


@needs_byte_pairs
def test_llama_cpp_reads_and_writes_our_byte_pairs(tmp_path, monkeypatch):
    pytest.importorskip('gguf', reason="gguf is not installed")
    ours = bpe(monkeypatch)
    assert formats.to_gguf(gpt(**HARD | dict(vocab_size=50304)), tmp_path / 'model.gguf', tokenizer=ours) == 'gpt2'
    theirs = llama(tmp_path / 'model.gguf')
    text = TEXT.replace('\x00', '') + '<|endoftext|>[PAD50300]'  # it takes a text up to a zero byte
    assert theirs.tokenize(text.encode(), special=True) == ours.encode(text)
    assert theirs.detokenize(ours.encode(text), special=True) == text.encode()
    assert theirs.token_eos() == theirs.token_bos() == 50256 and theirs.n_vocab() == 50304


def test_gguf_is_written_over_a_gguf_only(tmp_path):
    pytest.importorskip('gguf', reason="gguf is not installed")
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


@pytest.fixture
def folder(repo, trained):
    """A copy of the trained run, with the code."""
    shutil.copytree(trained / 'out', repo / 'out')
    return repo


def test_the_script_exports_the_newest_checkpoint_for_hugging_face(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    done = run(folder, 'export.py')
    assert done.returncode == 0 and not done.stdout, done.stderr
    assert 'out/ckpt.pt: iteration 20' in done.stderr and 'vllm serve out/hf' in done.stderr
    theirs, tokenizer = (auto.from_pretrained(folder / 'out' / 'hf') for auto in (AutoModelForCausalLM, AutoTokenizer))
    ids = theirs.generate(**tokenizer('The ', return_tensors='pt'), do_sample=False, max_new_tokens=10, pad_token_id=0)
    ours = run(
        folder, 'sample.py', '--device=cpu', '--num_samples=1', '--temperature=0', '--max_new_tokens=10', '--start=The '
    ).stdout
    assert tokenizer.decode(ids[0]) + '\n' == ours
    back = run(
        folder,
        'sample.py',
        '--init_from=out/hf',
        '--device=cpu',
        '--num_samples=1',
        '--temperature=0',
        '--max_new_tokens=10',
        '--start=The ',
    )
    assert back.stdout == ours and 'out/hf, ' in back.stderr  # with the characters of its meta.json


def test_a_folder_without_a_tokenizer_is_refused_where_text_is_needed(repo, monkeypatch):
    formats.to_huggingface(gpt(**HARD), repo / 'hf')
    # GPT-2's, as many
    monkeypatch.setattr(checkpoint.tokenizers, 'from_state', lambda state: CharTokenizer(map(chr, range(50257))))
    with pytest.raises(ValueError, match='50257 tokens, but the model a vocab_size of 37'):
        checkpoint.load_model(str(repo / 'hf'), '', plain_model)


def test_the_script_exports_for_llama_cpp_also_from_a_folder(folder):
    pytest.importorskip('gguf', reason="gguf is not installed")
    assert run(folder, 'export.py', '--path=hf').returncode == 0
    for settings, path in (([], 'out/model.gguf'), (['--init_from=hf'], 'out-hf/model.gguf')):
        done = run(folder, 'export.py', '--to=gguf', *settings)
        assert done.returncode == 0 and not done.stdout, done.stderr
        assert (
            f'llama-server -m {path}' in done.stderr and 'tanh' in done.stderr and 'the model ends at 16' in done.stderr
        )
    assert (folder / 'out' / 'model.gguf').read_bytes() == (folder / 'out-hf' / 'model.gguf').read_bytes()


BAD = [
    # settings, what the line has to say
    (['--to=onnx'], "to must be hf, or gguf with type f32 or q8_0, not 'onnx'"),
    (['--type=q8_0'], "not 'hf' with 'q8_0'"),
    (['--out_dir=nowhere'], 'no checkpoint nowhere/ckpt.pt'),
    (['--init_from=nowhere'], 'neither gpt2'),
    (['--path=new'], 'pip install safetensors'),
    (['--to=gguf'], 'pip install gguf'),
]


def test_what_goes_wrong_ends_in_one_clear_line(folder):
    for package in ('gguf', 'safetensors'):  # as if they were not installed
        (folder / f'{package}.py').write_text("raise ImportError")
    with ThreadPoolExecutor(2) as pool:
        for (settings, line), done in zip(BAD, pool.map(lambda case: run(folder, 'export.py', *case[0]), BAD)):
            last = done.stderr.splitlines()[-1]
            assert done.returncode == 2 and 'Traceback' not in done.stderr, (settings, done.stderr)
            assert line in last and last.startswith('export.py: error: '), (settings, done.stderr)
    assert not os.path.exists(folder / 'new')
