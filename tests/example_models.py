"""Small models whose every weight counts; texts and byte pairs for the tests of formats/."""
import json
import os

import pytest
import tokenizers
import torch
from conftest import SHARED_TEXT

from model import GPT, GPTConfig
from tokenizer import GPT2Tokenizer, JSONTokenizer

TIKTOKEN_CACHE = os.path.join(os.path.dirname(os.path.dirname(SHARED_TEXT)), 'tiktoken_cache')
needs_byte_pairs = pytest.mark.skipif(not os.path.isdir(TIKTOKEN_CACHE), reason="GPT-2's byte pairs are not here")
TEXT = 'Héllo  wörld,\n\n\ttabs \\ and "quotes" \x00 “curly”, don\'t 12345 日本 🙂 '
HARD = dict(block_size=11, vocab_size=37, n_layer=3, n_head=3, n_embd=21, bias=True)    # nothing is a power of two
EASY = dict(block_size=24, vocab_size=128, n_layer=2, n_head=2, n_embd=64, bias=False)
ROPE = dict(block_size=24, vocab_size=128, n_layer=2, n_head=6, n_embd=48, bias=False, position='rope', n_kv_head=2,
            rope_theta=500.0)
LLAMA = dict(block_size=256, vocab_size=300, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, bias=False, position='rope',
             norm='rms', mlp='swiglu', n_inner=56)
UNTIED = LLAMA | dict(block_size=24, n_head=6, n_embd=48, n_inner=80, norm_eps=1e-6, tied=False)
LLAMA3 = UNTIED | dict(rope_scaling=(8.0, 1.0, 4.0, 32), tied=True, rope_theta=5e5, head_dim=10)
MISTRAL = UNTIED | dict(window=5)
QWEN2 = UNTIED | dict(qkv_bias=True, tied=True)
QWEN3 = UNTIED | dict(qk_norm=True, head_dim=12)
ALIBI = dict(block_size=24, vocab_size=128, n_layer=2, n_head=6, n_embd=48, bias=False, position='alibi')
FAMILIES = [  # config, the family of transformers that computes the same
    (HARD, 'gpt2'), (EASY, 'gpt2'), (EASY | dict(bias=True, gelu='tanh', dropout=0.1), 'gpt2'),
    (HARD | dict(n_kv_head=1), 'gpt2'),                  # rows of keys and values are repeated
    (EASY | dict(position='none', n_kv_head=1), 'gpt2'),  # positions of zeros
    (ROPE | dict(n_kv_head=0), 'starcoder2'), (ROPE | dict(bias=True, gelu='tanh', dropout=0.1), 'starcoder2'),
    (ROPE | dict(n_kv_head=1, window=5), 'starcoder2'), (ROPE | dict(bias=True, window=23), 'starcoder2'),
    (ALIBI, 'mpt'), (ALIBI | dict(n_head=4, dropout=0.1), 'mpt'), (ALIBI | dict(n_head=12, n_kv_head=3), 'mpt'),
    (UNTIED, 'llama'), (UNTIED | dict(tied=True, bias=True, head_dim=12, n_kv_head=0), 'llama'),
    (LLAMA3 | dict(dropout=0.1), 'llama'),
    (LLAMA3 | dict(tied=False, rope_scaling=(32.0, 1.0, 4.0, 64), head_dim=16), 'llama'),
    (UNTIED | dict(rope_scaling=(4.0, 1.0, 4.0, 1)), 'llama'),  # all frequencies are divided
    (MISTRAL | dict(rope_scaling=(8.0, 1.0, 4.0, 32)), 'mistral'),
    (MISTRAL | dict(tied=True, head_dim=6, window=23, n_kv_head=1), 'mistral'),
    (UNTIED | dict(n_embd=40, n_head=3, n_kv_head=1, head_dim=16), 'mistral'),  # a llama's n_head divides its n_embd
    (QWEN2, 'qwen2'), (QWEN2 | dict(tied=False, window=5), 'qwen2'),
    (QWEN3, 'qwen3'), (QWEN3 | dict(tied=True, window=9, n_inner=37), 'qwen3'),
]
SCALED = [  # llama.cpp loads rope_freqs.weight from files of the llama architecture only, which a mistral has there
    (config | dict(rope_scaling=LLAMA3['rope_scaling']), family)
    for config, family in ((ROPE, 'starcoder2'), (QWEN2, 'qwen2'), (QWEN3, 'qwen3'))]


def large(seed, dtype=torch.float64, **changes):
    """A small model whose positions matter: wpe and biases are large, so a wrong offset cannot hide."""
    torch.manual_seed(seed)
    config = GPTConfig(**dict(block_size=16, vocab_size=29, n_layer=2, n_head=2, n_embd=16) | changes)
    model = GPT(config).to(dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn_like(p) * (1.0 if 'wpe' in name else 0.2))
    return model


def f32(seed=0, **changes):
    return large(seed, torch.float32, **changes)


def gpt(**config):
    """A model in eval mode with weights far from their initial values: every bias and layer norm counts."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**config)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5).add_(0.1 * torch.randn_like(p))
    return model


def fields_in_files(config):
    """The fields of a config that come back from a file: no dropout, and zeros for positions and biases it lacks."""
    has_biases = config.norm == 'layer' and config.position != 'alibi'
    return vars(config) | dict(dropout=0.0, bias=config.bias or has_biases,
                               position='learned' if config.position == 'none' else config.position)


@torch.no_grad()
def logits(model, idx):
    return model(idx, targets=idx)[0]


def bpe(monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', TIKTOKEN_CACHE)
    return GPT2Tokenizer()


CHAT = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def chat_tokenizer(text=TEXT, vocab_size=300):
    """A tokenizer as that of SmolLM2, with its chat template."""
    names = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
    state = json_tokenizer(text, vocab_size, names).state()
    return JSONTokenizer(state['json'], [2], dict(bos_token=names[1], eos_token=names[2]), CHAT)


def json_tokenizer(text, vocab_size=300, special_tokens=('<|endoftext|>',)):
    """A tokenizer as those of StarCoder2 and MPT: byte pairs of a text, and <|endoftext|>, in a tokenizer.json."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(special_tokens),
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
                                             show_progress=False)
    library.train_from_iterator([text], trainer)
    return JSONTokenizer(library.to_str())


def sentencepiece_tokenizer(text, **how):
    """
    A tokenizer as those of Llama 2 and Mistral: byte pairs of characters, U+2581 for a blank, with one at the beginning
    of each text; <0x..> for the bytes of other characters; and <s> before each text.
    """
    special_tokens, of_bytes = ['<unk>', '<s>', '</s>'], [f'<0x{byte:02X}>' for byte in range(256)]
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend('\u2581'),
                                                       tokenizers.normalizers.Replace(' ', '\u2581')])
    trained.train_from_iterator([text], tokenizers.trainers.BpeTrainer(
        vocab_size=80, special_tokens=special_tokens, limit_alphabet=30, show_progress=False))
    model = json.loads(trained.to_str())['model']
    pieces = [name for name in model['vocab'] if name not in special_tokens]
    vocab = {name: i for i, name in enumerate(special_tokens + of_bytes + pieces)}
    ours = tokenizers.Tokenizer(tokenizers.models.BPE(
        vocab, [tuple(pair) for pair in model['merges']], unk_token='<unk>', fuse_unk=True, byte_fallback=True))
    ours.normalizer = trained.normalizer
    ours.add_special_tokens(special_tokens)
    ours.post_processor = tokenizers.processors.TemplateProcessing('<s> $A', special_tokens=[('<s>', 1)])
    ours.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace('\u2581', ' '), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(' ', 1, 0)])
    return JSONTokenizer(ours.to_str(), **how)
