"""Small models whose every weight counts; texts and byte pairs for the tests of formats/."""
import os

import pytest
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
    tokenizers = pytest.importorskip('tokenizers', reason="tokenizers is not installed")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(special_tokens),
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
                                             show_progress=False)
    library.train_from_iterator([text], trainer)
    return JSONTokenizer(library.to_str())
