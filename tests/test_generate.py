"""Generation: nanoGPT's tokens, and the contract of stream and generate."""
import plain_gpt
import pytest
import torch
from conftest import sizes
from example_models import f32

import decode
from generation import generate, stream
from kvcache.contiguous import cache_for
from model import GPT, GPTConfig, sample_token


@pytest.mark.parametrize('use_cache', [False, True])
@pytest.mark.parametrize('temperature, top_k', [(1.0, None), (0.8, 5), (1.3, 200), (0, None)])
def test_same_seed_same_tokens_as_nanogpt(use_cache, temperature, top_k):
    for seed in sizes((0, 4, 5, 7), range(8)):
        model = f32(seed)
        idx = torch.randint(29, (2, 1 + 3 * seed))  # 1 to 22: on both sides of block_size 16
        torch.manual_seed(seed)
        theirs = plain_gpt.generate(model.state_dict(), 2, 16, idx, 30, temperature, top_k)
        torch.manual_seed(seed)
        assert torch.equal(model.generate(idx, 30, temperature, top_k, use_cache=use_cache), theirs), seed
        torch.manual_seed(seed)
        assert torch.equal(generate(model, idx, 30, temperature, top_k, use_cache=use_cache), theirs), seed


def test_generate_is_stream_collected():
    model, idx = f32(0), torch.randint(29, (3, 5))
    torch.manual_seed(0)
    streamed = list(stream(model, idx, 20, use_cache=True))
    torch.manual_seed(0)
    assert torch.equal(model.generate(idx, 20, use_cache=True), torch.cat([idx, *streamed], dim=1))
    assert all(t.shape == (3, 1) and t.dtype == torch.long for t in streamed)
    assert torch.equal(model.generate(idx, 0), idx)


def test_the_tokens_can_be_trained_on():
    model, idx = f32(0), torch.randint(29, (1, 5))
    for tokens in (model.generate(idx, 6, use_cache=True), next(stream(model, idx, 1, use_cache=True))):
        assert not tokens.is_inference()
        model(tokens, tokens)[1].backward()


def test_a_consumer_may_do_what_it_likes_with_what_it_is_given():
    model, idx = f32(1), torch.randint(29, (1, 5))
    expected = model.generate(idx, 25, temperature=0, use_cache=True)[:, 5:]
    for use_cache in (False, True):
        got = []
        for token in stream(model, idx, 25, temperature=0, use_cache=use_cache):
            got.append(token.clone())
            token.zero_()
        assert torch.equal(torch.cat(got, 1), expected)


def test_streams_can_take_turns():
    model = f32(2)
    a, b = torch.randint(29, (1, 3)), torch.randint(29, (2, 9))
    pairs = list(zip(*(stream(model, idx, 20, temperature=0, use_cache=True) for idx in (a, b))))
    assert torch.equal(torch.cat([p[0] for p in pairs], 1), model.generate(a, 20, temperature=0)[:, 3:])
    assert torch.equal(torch.cat([p[1] for p in pairs], 1), model.generate(b, 20, temperature=0)[:, 9:])


def test_modes_and_gradients_are_left_as_they_were():
    model = f32(3, dropout=0.3)
    model.train()
    model.transformer.h[0].eval()
    modes = [m.training for m in model.modules()]
    for _ in stream(model, torch.randint(29, (1, 5)), 3, use_cache=True):
        assert [m.training for m in model.modules()] == modes and torch.is_grad_enabled()
    with pytest.raises(RuntimeError):
        list(stream(model, torch.randint(29, (1, 5)), 3, use_cache=True, decoder=broken))
    assert [m.training for m in model.modules()] == modes and torch.is_grad_enabled()


def broken(idx, kv_cache):
    raise RuntimeError("the decoder broke")


def test_a_tensor_of_rows_that_stop_is_filled_with_the_stop_token():
    """Rows as lists end there: see test_full_context.py."""
    model, idx = f32(4), torch.randint(29, (6, 3))
    torch.manual_seed(0)
    free = model.generate(idx, 40, use_cache=True)
    stop = free[0, 10].item()
    torch.manual_seed(0)
    stopped = generate(model, idx, 40, use_cache=True, stop_token=stop)
    ends = [row.index(stop) if stop in row else len(row) for row in free[:, 3:].tolist()]
    assert stopped.shape[1] == min(3 + max(ends) + 1, 43)
    for row, whole, end in zip(stopped[:, 3:].tolist(), free[:, 3:].tolist(), ends):
        assert row == whole[:end] + [stop] * (len(row) - end)


def test_num_samples_draws_what_a_batch_of_copies_draws():
    model, idx = f32(5), torch.randint(29, (2, 6))
    for use_cache in (False, True):
        torch.manual_seed(1)
        copies = model.generate(idx.repeat_interleave(3, 0), 20, use_cache=use_cache)
        torch.manual_seed(1)
        assert torch.equal(generate(model, idx, 20, use_cache=use_cache, num_samples=3), copies)
    rows = []
    model.register_forward_pre_hook(lambda m, args: rows.append(args[0].shape))
    generate(model, idx, 3, use_cache=True, num_samples=3)
    assert rows == [(2, 6), (6, 1), (6, 1)]  # each prompt is prefilled once


def test_a_generator_of_ones_own_leaves_the_global_one_alone():
    model, idx = f32(6), torch.randint(29, (2, 6))
    torch.manual_seed(7)
    expected = model.generate(idx, 20)
    state = torch.get_rng_state()
    got = model.generate(idx, 20, use_cache=True, generator=torch.Generator().manual_seed(7))
    assert torch.equal(got, expected) and torch.equal(torch.get_rng_state(), state)


def test_a_decoder_takes_the_models_place_at_any_step():
    model, idx, calls = f32(7), torch.randint(29, (2, 6)), []

    def decoder(idx, kv_cache):
        calls.append((tuple(idx.shape), kv_cache is None))
        logits, _, kv_cache = model(idx, kv_cache=kv_cache, use_cache=True)
        return logits, [tuple(layer) for layer in kv_cache]  # plain tuples will do
    got = model.generate(idx, 20, temperature=0, use_cache=True, decoder=decoder)
    assert torch.equal(got, model.generate(idx, 20, temperature=0))
    assert calls == [((2, 6), True)] + [((2, 1), False)] * 10 + [((2, 16), False)] * 9
    with pytest.raises(ValueError, match='use_cache'):
        model.generate(idx, 20, decoder=decoder)


def test_memory_does_not_grow_with_the_output():
    """What a step of the stream holds is the window, however many tokens were asked for."""
    from test_model import Shapes
    model = f32(8)
    for use_cache in (False, True):
        steps = stream(model, torch.randint(29, (1, 3)), 10 ** 12, use_cache=use_cache)
        seen = []
        for _ in range(3):
            with Shapes() as shapes:
                for _ in range(50):
                    next(steps)
            seen.append(shapes.seen)
        assert seen[1] == seen[2]  # both past the window, the second twice as far


@pytest.mark.parametrize('bad', [
    *(dict(idx=idx) for idx in (torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long),
                                torch.zeros(3, dtype=torch.long), torch.tensor([[29]]), torch.tensor([[-1]]),
                                torch.tensor([[0.5]]))),
    dict(temperature=-1), dict(temperature=float('nan')), dict(temperature=float('inf')), dict(top_k=0),
    dict(top_p=0.0), dict(top_p=1.1), dict(max_new_tokens=-1), dict(num_samples=0)])
def test_what_cannot_be_generated_is_refused_at_the_call(bad):
    settings = dict(idx=torch.zeros(1, 3, dtype=torch.long), max_new_tokens=5) | bad
    for function in (stream, generate):
        with pytest.raises(ValueError):
            function(f32(9), **settings)
    if 'num_samples' not in bad:
        with pytest.raises(ValueError):
            f32(9).generate(**settings)


def test_top_p_keeps_the_smallest_nucleus():
    probs = torch.tensor([[0.1, 0.5, 0.25, 0.15]])
    for top_p, kept in ((0.3, {1}), (0.5, {1}), (0.51, {1, 2}), (0.75, {1, 2}), (0.8, {1, 2, 3}),
                        (0.95, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3})):
        drawn = {sample_token(probs.log(), top_p=top_p).item() for _ in range(200)}
        assert drawn == kept, top_p


def test_top_k_keeps_ties_and_never_more_than_there_are():
    logits = torch.tensor([[3.0, 1.0, 3.0, 0.0]])
    assert {sample_token(logits, top_k=1).item() for _ in range(50)} == {0, 2}
    assert {sample_token(logits * 0, top_k=99).item() for _ in range(200)} == {0, 1, 2, 3}


def test_the_smallest_window_there_is():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=1, vocab_size=5, n_layer=1, n_head=1, n_embd=4)).eval()
    idx = torch.tensor([[1, 2]])
    assert torch.equal(model.generate(idx, 5, temperature=0, use_cache=True), model.generate(idx, 5, temperature=0))


@pytest.mark.parametrize('use_cache', [False, True])
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_logits_that_are_not_numbers_are_refused(use_cache, temperature):
    for broken_weight in (float('inf'), float('nan')):
        model, idx = f32(0), torch.randint(29, (2, 5))
        model.transformer.ln_f.bias.data[0] = broken_weight
        for function in (model.generate, lambda *args, **how: generate(model, *args, **how)):
            with pytest.raises(ValueError, match='not numbers'):
                function(idx, 3, temperature=temperature, use_cache=use_cache)
    model = f32(0)
    model.transformer.wpe.weight.data[5] = float('inf')  # found out when it gets there
    tokens = stream(model, torch.tensor([[1, 2, 3]]), 9, use_cache=use_cache, temperature=temperature)
    assert [next(tokens).shape for _ in range(3)] == [(1, 1)] * 3
    with pytest.raises(ValueError, match='not numbers'):
        next(tokens)


def test_targets_of_another_shape_leave_the_cache_alone():
    model, idx = f32(1), torch.randint(29, (1, 4))
    _, _, cache = model(idx)
    before = [layer.clone() for layer in cache]
    with pytest.raises(ValueError, match='targets'):
        model(idx[:, :2], idx[:, :3], kv_cache=cache)
    assert all(torch.equal(a.k_cache, b.k_cache) for a, b in zip(cache, before))


def test_a_shift_after_a_full_prompt_has_one_cache():
    model, idx = f32(3), torch.randint(29, (2, 16))
    cache = cache_for(model, 2, decode.best(model, 2, name='cpu'))
    rows = generate(model, idx, 20, temperature=0, use_cache=True, cache=cache, when_full='shift')
    assert torch.equal(rows, generate(model, idx, 20, temperature=0, when_full='shift'))
    assert cache.nbytes() <= sum(layer[i].nbytes for layer in model.empty_cache(2) for i in (0, 1))
