"""Small models whose every weight counts; texts and byte pairs for the tests of formats/."""
import json
import os
import random

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


SHAPES = [(2, 1, 16), (4, 2, 8), (4, 4, 12), (6, 2, 10), (6, 3, 16)]  # n_head, n_kv_head, head_dim


def llama_like(seed):
    """
    A model of Llama's family in transformers, with drawn sizes and weights, and what it is in the fields of our config.
    The number of the seed says which family it is and what it has, so that all of this comes in few of them.
    """
    import transformers
    rng, n = random.Random(seed), seed // 4
    family = ('llama', 'mistral', 'qwen2', 'qwen3')[seed % 4]
    tied, special, has_bias = n % 2 == 0, n % 3 > 0, n % 4 > 1
    (n_head, n_kv_head, head_dim), theta = rng.choice(SHAPES), rng.choice([1000.0, 10000.0, 500000.0])
    n_embd = n_head * head_dim if family == 'qwen2' else n_head * rng.choice([head_dim, 7, 12])
    rope, settings, expected = dict(rope_type='default', rope_theta=theta), {}, dict(tied=tied, head_dim=head_dim)
    if family == 'llama':
        settings = dict(attention_bias=has_bias, mlp_bias=has_bias)
        if special:  # of the three kinds of frequencies, these have some each
            rope |= dict(rope_type='llama3', factor=rng.choice([4.0, 32.0]), low_freq_factor=1.0, high_freq_factor=4.0,
                         original_max_position_embeddings=32)
            expected['rope_scaling'] = (rope['factor'], 1.0, 4.0, 32)
        expected['bias'] = has_bias
    if family == 'mistral':
        settings = dict(sliding_window=rng.choice([2, 5, 9]) if special else rng.choice([None, 200]))
        expected['window'] = settings['sliding_window'] if special else 0
    if family == 'qwen2':
        settings = dict(use_sliding_window=special and has_bias, sliding_window=7, max_window_layers=0)
        expected |= dict(window=7 * (special and has_bias), qkv_bias=True)
    if family in ('llama', 'mistral', 'qwen3'):
        settings['head_dim'] = head_dim
    name = family.capitalize()
    torch.manual_seed(seed)
    theirs = getattr(transformers, name + 'ForCausalLM')(getattr(transformers, name + 'Config')(
        vocab_size=rng.choice([50, 97]), hidden_size=n_embd, intermediate_size=rng.choice([37, 100, 3 * n_embd]),
        num_hidden_layers=rng.choice([1, 2, 3]), num_attention_heads=n_head, num_key_value_heads=n_kv_head,
        max_position_embeddings=48, rms_norm_eps=rng.choice([1e-5, 1e-6]), tie_word_embeddings=tied,
        rope_parameters=rope, bos_token_id=None, eos_token_id=None, pad_token_id=None, **settings)).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return theirs, expected | dict(n_kv_head=n_kv_head, rope_theta=theta, qk_norm=family == 'qwen3')


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
