"""Outside judges: models of transformers with the same weights, and llama.cpp's context shift."""
import random

import pytest
import torch
from conftest import sizes
from example_models import LLAMA3, UNTIED, f32
from test_cells import logits_of
from test_executors import Slots, Text

from decode.cpu import CPUExecutor
from decode.eager import EagerExecutor
from kvcache.llamacpp.cache import CellCache
from model import GPT

STARCODER2 = dict(vocab_size=50, num_hidden_layers=3, hidden_size=48, intermediate_size=192, use_bias=True,
                  max_position_embeddings=24, rope_parameters=dict(rope_type='default', rope_theta=1000.0),
                  bos_token_id=None, eos_token_id=None)
MPT = dict(vocab_size=50, n_layers=3, d_model=48, max_seq_len=24)
GPT2 = dict(vocab_size=50, n_layer=3, n_embd=48, n_positions=24, n_head=4)
JUDGES = [  # a family of transformers, settings of its config, what it is in the fields of ours
    *[('starcoder2',
       STARCODER2 | dict(num_attention_heads=n_head, num_key_value_heads=n_kv_head, sliding_window=window),
       dict(position='rope', n_kv_head=n_kv_head, window=window or 0, rope_theta=1000.0, gelu='tanh'))
      for n_head, n_kv_head in sizes([(6, 2), (4, 1)], [(6, 6), (6, 3), (6, 2), (6, 1), (4, 4), (4, 2), (4, 1)])
      for window in sizes([None, 1, 7], [None, 1, 2, 7, 8, 23])],
    *[('mpt', MPT | dict(n_heads=n_head), dict(position='alibi', bias=False, gelu='none')) for n_head in (4, 6, 12)],
    ('gpt2', GPT2 | dict(activation_function='gelu'), dict(gelu='none')),
    ('gpt2', GPT2 | dict(activation_function='gelu_new'), dict(gelu='tanh')),
    ('gpt_bigcode', GPT2 | dict(multi_query=True), dict(n_kv_head=1, gelu='tanh')),
    ('gpt_bigcode', GPT2 | dict(multi_query=False), dict(n_kv_head=4, gelu='tanh')),
]
SHAPES = [(2, 1, 16), (4, 2, 8), (4, 4, 12), (6, 2, 10), (6, 3, 16)]  # n_head, n_kv_head, head_dim


def llama_like(seed):
    """
    As in JUDGES, of Llama's family, with drawn sizes. The number of the seed says which family it is and what it has,
    so that all of this comes in few of them.
    """
    rng, n = random.Random(seed), seed // 4
    family = ('llama', 'mistral', 'qwen2', 'qwen3')[seed % 4]
    tied, special, has_bias = n % 2 == 0, n % 3 > 0, n % 4 > 1
    (n_head, n_kv_head, head_dim), theta = rng.choice(SHAPES), rng.choice([1000.0, 10000.0, 500000.0])
    n_embd = n_head * head_dim if family == 'qwen2' else n_head * rng.choice([head_dim, 7, 12])
    rope, settings, expected = dict(rope_type='default', rope_theta=theta), {}, dict(tied=tied, head_dim=head_dim)
    if family == 'llama':
        settings = dict(attention_bias=has_bias, mlp_bias=has_bias)
        if n % 3 == 2:
            rope |= dict(rope_type='linear', factor=4.0)
            expected['rope_scaling'] = (4.0, 1.0, 4.0, 1)
        elif special:  # of the three kinds of frequencies, these have some each
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
    settings |= dict(
        vocab_size=rng.choice([50, 97]), hidden_size=n_embd, intermediate_size=rng.choice([37, 100, 3 * n_embd]),
        num_hidden_layers=rng.choice([1, 2, 3]), num_attention_heads=n_head, num_key_value_heads=n_kv_head,
        max_position_embeddings=48, rms_norm_eps=rng.choice([1e-5, 1e-6]), tie_word_embeddings=tied,
        rope_parameters=rope, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return family, settings, expected | dict(n_kv_head=n_kv_head, rope_theta=theta, qk_norm=family == 'qwen3')


@pytest.mark.parametrize('number, judge', enumerate([*JUDGES, *map(llama_like, range(sizes(12, 72)))]))
def test_transformers_agrees_at_each_cached_step(tmp_path, number, judge):
    """
    Its weights through from_pretrained; chunks and single tokens, by the model on its tuples and by both executors in
    pages, cells and rows; past a window, and past block_size where that is allowed. test_huggingface.py: its generate.
    """
    transformers = pytest.importorskip('transformers', reason="transformers is not installed")
    family, settings, expected = judge
    torch.manual_seed(number)
    config = transformers.AutoConfig.for_model(family, **settings)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(str(tmp_path)).eval()
    assert {key: getattr(ours.config, key) for key in expected} == expected
    length = 72 if ours.config.window else ours.config.block_size
    idx, kv_cache = torch.randint(ours.config.vocab_size, (2, length)), None
    with torch.no_grad():
        whole = theirs(idx).logits
    assert whole.std() > 0.1  # not all the same
    slots = [Slots(executor, layout) for executor in (EagerExecutor(ours), CPUExecutor(ours))
             for layout in ('pages', 'cells', 'rows')[number % 3:][:2]]
    of_texts = [[Text(row) for row in idx.tolist()] for _ in slots]
    cuts = [0, 5, 6, *range(10, length + 1)]
    for start, end in zip(cuts, cuts[1:]):
        with torch.no_grad():
            logits, _, kv_cache = ours(idx[:, start:end], kv_cache=kv_cache, use_cache=True)
        found = [logits[:, -1]]
        for each, some in zip(slots, of_texts):
            each.executor.hold(each.layers)
            found.append(torch.stack([of_text[-1] for of_text in each.logits(dict.fromkeys(some, end - start))]))
        for each in found:
            assert (each - whole[:, end - 1]).abs().max() / whole.std() < 1e-5, end


@pytest.mark.parametrize('config', [UNTIED, LLAMA3])
def test_llama_cpp_shifts_its_context_as_our_cells(config, monkeypatch):
    """
    Two texts, whose shifts come at different times and take different numbers of tokens away; both sides get the same
    tokens. Measured: 7.8e-6 of the deviation without a shift, 1.3e-5 in 2,000 steps with 251 shifts, and more than 0.1
    if keys are turned by frequencies without rope_scaling.
    """
    llama_cpp = pytest.importorskip('llama_cpp', reason="llama-cpp-python is not installed")
    pytest.importorskip('gguf', reason="gguf is not installed")
    settings = llama_cpp.llama_context_default_params()
    settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds: 1e-2 of the deviation
    monkeypatch.setattr(llama_cpp, 'llama_context_default_params', lambda: settings)
    from benchmarks.peers.llamacpp import Batch, LlamaCpp
    model, rng, n_shifts = f32(**config | dict(block_size=64)), random.Random(0), 0
    theirs, lengths = LlamaCpp(model, kv='float32'), [0, 0]
    theirs.make_context(2)
    memory = theirs.lib.llama_get_memory(theirs.context)
    c = model.config
    caches = [CellCache(c.n_layer, c.n_kv_head, c.head_dim, n_cells, 2, unified, can_shift=True, rope_base=c.rope_theta,
                        rope_scaling=c.rope_scaling) for unified, n_cells in ((False, 64), (True, 128))]
    batch = Batch(theirs.lib, range(2))
    batch.wanted[:] = 1
    for step in range(sizes(200, 2000)):
        for row, n_past in enumerate(lengths):
            if n_past == 64 or n_past > 40 and rng.random() < 0.02:
                n_keep = rng.choice([0, 1, 5])
                n_discard = rng.randint(1, (n_past - n_keep) // 2)
                assert theirs.lib.llama_memory_seq_rm(memory, row, n_keep, n_keep + n_discard)
                theirs.lib.llama_memory_seq_add(memory, row, n_keep + n_discard, n_past, -n_discard)
                for cache in caches:
                    cache.seq_rm(row, n_keep, n_keep + n_discard)
                    cache.seq_add(row, n_keep + n_discard, -1, -n_discard)
                lengths[row] -= n_discard
                n_shifts += 1
        tokens = torch.randint(model.config.vocab_size, (2, 1))
        batch.token[:], batch.pos[:] = tokens[:, 0].numpy(), lengths
        theirs.decode(batch)
        expected = torch.tensor(theirs.logits(2))
        for cache in caches:
            with torch.no_grad():
                logits = logits_of(model, tokens, cache, {row: [n] for row, n in enumerate(lengths)})
            worst = (logits - expected).abs().max() / expected.std()
            assert worst < 5e-5, (cache.unified, step, worst)
        lengths = [n + 1 for n in lengths]
    assert n_shifts > sizes(5, 50)
