"""Outside judges: Hugging Face's GPT-2 with our weights, and the Attention cases of the ONNX operator suite."""
import functools
import warnings

import numpy as np
import pytest
import torch

from model import GPT, GPTConfig, LayerKVCache, attend


def test_hugging_face_gpt2_agrees_at_each_cached_step():
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    c = GPTConfig(block_size=24, vocab_size=50, n_layer=3, n_head=4, n_embd=32)
    ours = GPT(c).eval()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    theirs = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=24, n_embd=32, n_layer=3, n_head=4, activation_function='gelu')
    ).eval()
    transposed = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')
    theirs.load_state_dict(
        {k: v.t() if k.endswith(transposed) else v for k, v in ours.state_dict().items()}, strict=False
    )
    idx = torch.randint(50, (2, 24))
    kv_cache, past = None, None
    with torch.no_grad():
        for start, end in ((0, 5), (5, 6), (6, 10), *((t, t + 1) for t in range(10, 24))):
            logits, _, kv_cache = ours(idx[:, start:end], kv_cache=kv_cache, use_cache=True)
            out = theirs(idx[:, start:end], past_key_values=past, use_cache=True)
            past = out.past_key_values
            torch.testing.assert_close(logits[:, -1], out.logits[:, -1], rtol=1e-5, atol=1e-5)
    greedy = theirs.generate(
        idx[:, :5], attention_mask=torch.ones(2, 5), max_new_tokens=19, do_sample=False, pad_token_id=0
    )
    assert torch.equal(ours.generate(idx[:, :5], 19, temperature=0, use_cache=True), greedy)


@functools.cache
def onnx_cases():
    from onnx.backend.test.case.node import collect_testcases
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return [c for c in collect_testcases('Attention') if 'expanded' not in c.name]


def why_not(node, inputs):
    """Why a case is not about what our attention does; None if it is."""
    attributes = {a.name for a in node.attribute}
    q, k = inputs['Q'], inputs['K']
    n_head = next((a.i for a in node.attribute if a.name == 'q_num_heads'), q.shape[1])
    n_head_kv = next((a.i for a in node.attribute if a.name == 'kv_num_heads'), k.shape[1])
    if 'softcap' in attributes:
        return 'soft-capped scores: GPT-2 has none'
    if 'scale' in attributes:
        return 'a scale of its own: ours is 1 / sqrt(head_dim)'
    if 'softmax_precision' in attributes:
        return 'a softmax in a precision of its own'
    if 'left_window_size' in attributes:
        return 'a sliding window: GPT-2 has none'
    if n_head != n_head_kv:
        return 'grouped-query heads: GPT-2 has a key head for every query head'
    if 'nonpad_kv_seqlen' in inputs:
        return 'a cache with a length for each row: the tuple has one cache_pos'
    if 'fullymasked' in node.name or 'robustness' in node.name:
        return 'rows that may see nothing: a causal row always sees itself'
    if 'is_causal' in attributes and q.shape[-2] != k.shape[-2]:
        return 'fewer queries than new keys, at their beginning: ours are always the newest positions'
    return None


def named_inputs(case):
    node = case.model.graph.node[0]
    values = iter(case.data_sets[0][0])
    return node, {name: next(values) for name in node.input if name}


def run_case(node, inputs):
    """The ONNX node through our cache and attention: {output name: array}."""
    tensors = {
        name: torch.from_numpy(np.asarray(x, dtype=np.float32) if x.dtype.name == 'bfloat16' else x.copy())
        for name, x in inputs.items()
    }
    q, k, v = (tensors[name] for name in 'QKV')
    packed = q.dim() == 3
    if packed:  # (B, T, heads * size)
        n_head = next(a.i for a in node.attribute if a.name == 'q_num_heads')
        q, k, v = (t.unflatten(-1, (n_head, -1)).transpose(1, 2) for t in (q, k, v))
    outputs, mask = {}, tensors.get('attn_mask')
    if 'past_key' in tensors:
        past_k, past_v = tensors['past_key'], tensors['past_value']
        block_size = past_k.size(2) + k.size(2) + 3
        cache = LayerKVCache(
            *(past.new_full((*past.shape[:2], block_size, past.size(3)), float('nan')) for past in (past_k, past_v)), 0
        )
        positions = torch.arange(block_size)
        cache = cache.append(past_k, past_v, positions[:past_k.size(2)])[3]
        k, v, _, cache = cache.append(k, v, positions[past_k.size(2):][:k.size(2)])
        outputs |= {'present_key': k.numpy(), 'present_value': v.numpy()}
    causal = any(a.name == 'is_causal' and a.i for a in node.attribute)
    if mask is None and not causal:
        mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool)
    elif mask is not None and causal:
        seen = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(k.size(2) - q.size(2))
        mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -float('inf'))
    y = attend(q, k, v, mask=mask)
    outputs['Y'] = (y.transpose(1, 2).flatten(2) if packed else y).numpy()
    return outputs


def test_onnx_attention_cases():
    """
    Every case either applies and passes, or does not for a reason that `why_not` gives and this prints (pytest -s).
    """
    passed, skipped = [], {}
    for case in onnx_cases():
        node, inputs = named_inputs(case)
        node.name = case.name
        reason = why_not(node, inputs)
        if reason:
            skipped.setdefault(reason, []).append(case.name)
            continue
        outputs = run_case(node, inputs)
        half = any(x.dtype.name in ('float16', 'bfloat16') for x in inputs.values())
        for name, expected in zip([o for o in node.output if o], case.data_sets[0][1]):
            if name == 'qk_matmul_output':
                continue  # the scores themselves, which a fused kernel never shows
            np.testing.assert_allclose(outputs[name].astype(np.float32), np.asarray(expected, np.float32),
                                       rtol=2e-2 if half else 1e-3, atol=2e-2 if half else 1e-5, err_msg=case.name)
        passed.append(case.name)
    print(f"\n{len(passed)} ONNX Attention cases apply and pass:", *passed, sep='\n  ')
    for reason, names in skipped.items():
        print(f"{len(names)} do not apply, {reason}:", *names, sep='\n  ')
    assert 'test_attention_4d_causal_with_past_and_present' in passed  # lower-right, on a past
    assert 'test_attention_4d_with_past_and_present' in passed and 'test_attention_3d_with_past_and_present' in passed
    assert len(passed) >= 20


@pytest.mark.parametrize('T_past', [0, 1, 5])
def test_attention_against_torchs_own_lower_right_bias(T_past):
    from torch.nn.attention.bias import causal_lower_right
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4 + T_past, 8), torch.randn(2, 3, 4 + T_past, 8)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(4, 4 + T_past))
    torch.testing.assert_close(attend(q, k, v), theirs)
