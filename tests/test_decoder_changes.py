"""Weights, modules and hooks that change while a CPU decoder exists: it uses what the model is now, or refuses it."""
import pytest
import torch
from conftest import WEIGHTS
from test_cache_exactness import large

from decode import fingerprint
from decode.compiled import CompiledDecoder
from decode.cpu import CPUDecoder
from decode.fingerprint import Watch, contents
from model import GPT, MLP, Block, GPTConfig


def f32(seed, **changes):
    return large(seed, torch.float32, **changes)


@pytest.mark.parametrize('weights', WEIGHTS)
@pytest.mark.parametrize('n_embd', [8, 20, 48])
def test_a_nan_ends_with_its_repair(weights, n_embd):
    """Where n_embd is no multiple of the vectors' length, a NaN must not stay in what fills them up."""
    model, idx = f32(6, n_embd=n_embd, bias=True), torch.randint(29, (2, 6))
    decoder = CPUDecoder(model, weights)
    expected = decoder(idx, None)[0]
    for name, p in model.named_parameters():
        for broken in (float('nan'), float('inf'), 3e38):
            before = p.detach().clone()
            with torch.no_grad():
                p.view(-1)[0] = broken
            decoder(idx, None)
            with torch.no_grad():
                p.copy_(before)
            assert torch.equal(decoder(idx, None)[0], expected), f"{broken} in {name}"


def swap_rows(w):
    w[[1, 2]] = w[[2, 1]]


def swap_heads(w):  # of c_attn: queries of two heads
    half = w.size(0) // 6
    w[:2 * half] = torch.cat([w[half:2 * half], w[:half]])


def negate_odd_columns(w):
    w[:, 1::2] *= -1


def exchange_two(w):
    a, b = w[1, 1].item(), w[2, 3].item()
    w[1, 1], w[2, 3] = b, a


@pytest.mark.parametrize('weights', WEIGHTS)
@pytest.mark.parametrize('through', ['data', 'numpy'])
@pytest.mark.parametrize('change', [swap_rows, swap_heads, negate_odd_columns, exchange_two,
                                    lambda w: w.copy_(w.flip(0).clone())])
def test_a_new_cache_never_uses_weights_that_are_out_of_date(weights, through, change):
    """Changes that torch does not count, and that leave every sum as it was."""
    model, idx = f32(4, n_embd=32), torch.randint(29, (2, 6))
    decoder = CPUDecoder(model, weights)
    decoder(idx, None)
    for name, p in model.named_parameters():
        if p.dim() < 2 or change is swap_heads and 'c_attn' not in name:
            continue
        watch = Watch(model)
        change(p.data if through == 'data' else torch.from_numpy(p.detach().numpy()))
        assert not watch.identical(), name
        assert torch.equal(decoder(idx, None)[0], CPUDecoder(model, weights)(idx, None)[0]), name


def test_an_exchange_of_all_weights_in_mid_stream_is_seen():
    """Averaged weights are often copied into a model through `.data`, and back. Each step uses the present ones."""
    model, other, idx = f32(4), f32(5), torch.randint(29, (2, 6))
    decoder, original = CPUDecoder(model), {k: v.clone() for k, v in model.state_dict().items()}
    watch = Watch(model)
    _, cache = decoder(idx, None)
    for state in (other.state_dict(), original):
        for name, p in model.named_parameters():
            p.data.copy_(state[name])
        assert watch.unchanged() == (state is original)
        fresh = CPUDecoder(model)
        assert same_step(decoder, fresh, idx[:, :1], cache)


def same_step(a, b, idx, kv_cache):
    """Do two decoders give the same logits, each on a copy of the cache?"""
    x, y = (decoder(idx, [layer.clone() for layer in kv_cache])[0] for decoder in (a, b))
    return torch.equal(x, y)


class OtherMLP(torch.nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.c_fc, self.c_proj = mlp.c_fc, mlp.c_proj

    def forward(self, x):
        return self.c_proj(torch.relu(self.c_fc(x)))


def replace_linear(model):
    model.transformer.h[1].attn.c_proj = torch.nn.Sequential(model.transformer.h[1].attn.c_proj)


def replace_mlp(model):
    model.transformer.h[0].mlp = OtherMLP(model.transformer.h[0].mlp)


def widen(model):
    model.transformer.h[0].mlp.c_fc = torch.nn.Linear(16, 96)
    model.transformer.h[0].mlp.c_proj = torch.nn.Linear(96, 16)


def own_forward(model):
    model.transformer.h[0].mlp.forward = lambda x: x


@pytest.mark.parametrize('change', [
    lambda m: m.transformer.h[0].register_forward_hook(lambda *a: None), replace_linear, replace_mlp, widen,
    lambda m: m.transformer.ln_f.register_forward_pre_hook(lambda *a: None), own_forward,
    lambda m: setattr(m.transformer.h[0].mlp, 'gelu', torch.nn.ReLU()),
    lambda m: setattr(m.transformer.h[0].mlp, 'gelu', torch.nn.GELU(approximate='tanh')),
    lambda m: setattr(m.config, 'block_size', 10 ** 6)])
def test_hooks_and_modules_that_come_later_are_refused(change):
    """The kernel does not run them, so it says so, at the next step of a cache and at the next cache."""
    model, idx = f32(8), torch.randint(29, (1, 4))
    decoder = CPUDecoder(model)
    _, cache = decoder(idx, None)
    change(model)
    with pytest.raises(ValueError, match='decoder'):
        decoder(idx, None)
    if change is not own_forward and model.config.block_size == 16:
        with pytest.raises(ValueError, match='decoder'):
            decoder(idx[:, :1], cache)
    with pytest.raises(ValueError, match='decoder'):
        CPUDecoder(model)


def test_a_replaced_linear_of_the_same_shape_is_used():
    model, idx = f32(8), torch.randint(29, (1, 4))
    decoder = CPUDecoder(model)
    _, cache = decoder(idx, None)
    torch.manual_seed(3)
    model.transformer.h[1].mlp.c_proj = torch.nn.Linear(64, 16)
    assert same_step(decoder, CPUDecoder(model), idx[:, :1], cache)


def test_every_byte_and_its_place_are_read():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int8):
        w = torch.arange(1, 22).view(3, 7).to(dtype)
        seen = {bytes(contents(t)[1]) for t in (w, w.flip(0), w.flip(1), w.t())}
        for i in range(21):
            v = w.clone().view(-1)
            v[i] += 1
            seen.add(bytes(contents(v)[1]))
        assert len(seen) == 25


def test_of_a_large_model_no_row_changes_unseen(monkeypatch):
    """There 16 of 512 values are read, and so 512 changed values in a row cannot escape."""
    monkeypatch.setattr(fingerprint, 'LARGE', 1000)
    model = f32(4, n_embd=512, n_layer=1, block_size=40)
    watch = Watch(model)
    assert watch.every == fingerprint.EVERY and watch.identical()
    for p in model.parameters():
        flat = p.data.view(-1)
        for start in (0, 1, 100, len(flat) - 512):
            before = flat[start:start + 512].clone()
            flat[start:start + 512] *= -1.5
            assert not watch.identical()
            flat[start:start + 512] = before
        assert watch.identical()


def test_a_cache_of_another_block_size_is_refused_after_the_model_was_cropped():
    """The kernel's strides are the block_size, so an older cache would be read and written at wrong places."""
    model, idx = f32(4), torch.randint(29, (2, 6))
    decoder = CPUDecoder(model)
    _, cache = decoder(idx, None)
    model.crop_block_size(10)
    with pytest.raises(ValueError, match='need'):
        decoder(idx[:, :1], cache)
    assert torch.equal(decoder(idx, None)[0], CPUDecoder(model)(idx, None)[0])


def test_a_context_that_was_made_longer():
    """All buffers are as long as the context."""
    model, idx = f32(4), torch.randint(29, (2, 6))
    decoder = CPUDecoder(model)
    _, old = decoder(idx, None)
    model.transformer.wpe = torch.nn.Embedding(300, 16)
    model.config.block_size = model.transformer.wpe.num_embeddings
    with pytest.raises(ValueError, match='need'):
        decoder(idx[:, :1], old)
    assert torch.equal(model.generate(idx, 250, temperature=0, use_cache=True, decoder=decoder),
                       model.generate(idx, 250, temperature=0))


def replacements():
    C = 16
    for bias in (True, False):
        yield lambda m, bias=bias: setattr(m.transformer.h[0], 'ln_1', torch.nn.LayerNorm(C, bias=bias))
        yield lambda m, bias=bias: setattr(m.transformer, 'ln_f', torch.nn.LayerNorm(C, bias=bias))
        yield lambda m, bias=bias: setattr(m.transformer.h[1].mlp, 'c_fc', torch.nn.Linear(C, 4 * C, bias=bias))
        yield lambda m, bias=bias: setattr(m.transformer.h[1].attn, 'c_attn', torch.nn.Linear(C, 3 * C, bias=bias))
    yield lambda m: m.transformer.h.__setitem__(1, Block(m.config).eval())
    yield lambda m: setattr(m.transformer, 'h', torch.nn.ModuleList(list(m.transformer.h)[::-1]))
    yield lambda m: setattr(m, 'transformer', f32(77, bias=True).transformer)
    yield lambda m: [setattr(module, 'eps', 0.1) for module in m.modules() if isinstance(module, torch.nn.LayerNorm)]


@pytest.mark.parametrize('replace', replacements())
def test_modules_of_the_same_shape_may_be_replaced(replace):
    """Norms, biases and whole blocks: a new cache computes with what the model consists of now."""
    model, idx = f32(8, bias=True), torch.randint(29, (1, 6))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith('bias'):
                p.add_(1.0)
    decoder = CPUDecoder(model)
    decoder(idx, None)
    torch.manual_seed(3)
    replace(model)
    with torch.no_grad():
        expected = model(idx, use_cache=False)[0]
    torch.testing.assert_close(decoder(idx, None)[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('buffer', [
    torch.ones(9, 9, dtype=torch.bool), torch.zeros((), dtype=torch.int64), torch.ones(3).double()])
def test_buffers_of_any_dtype(buffer):
    model, idx = f32(8), torch.randint(29, (1, 4))
    expected = CPUDecoder(model)(idx, None)[0]
    model.register_buffer('mask', buffer)
    decoder = CPUDecoder(model)
    logits, cache = decoder(idx, None)
    assert torch.equal(logits, expected) and decoder(idx[:, :1], cache)[0].isfinite().all()


def test_a_cache_whose_memory_was_exchanged_is_read_where_it_is_now():
    model, idx = f32(8), torch.randint(29, (1, 4))
    decoder = CPUDecoder(model)
    expected = decoder(idx[:, :1], decoder(idx, None)[1])[0]
    _, cache = decoder(idx, None)
    for layer in cache:
        for t in layer[:2]:
            moved = t.clone()
            t.fill_(7.0)
            t.data = moved
    assert torch.equal(decoder(idx[:, :1], cache)[0], expected)


def global_hook(model):
    return torch.nn.modules.module.register_module_forward_hook(lambda *a: None)


class Patched:
    """A class whose forward is another one for a while."""

    def __init__(self, model):
        self.before, MLP.forward = MLP.forward, lambda self, x: x

    def remove(self):
        MLP.forward = self.before


@pytest.mark.parametrize('spoil', [global_hook, Patched])
def test_what_all_modules_share_is_looked_at_as_well(spoil):
    model, idx = f32(8), torch.randint(29, (1, 4))
    decoder = CPUDecoder(model)
    spoilt = spoil(model)
    try:
        with pytest.raises(ValueError, match='does not run'):
            CPUDecoder(model)
        if spoil is global_hook:
            with pytest.raises(ValueError, match='does not run'):
                decoder(idx, None)
    finally:
        spoilt.remove()
    decoder(idx, None)


class Doubled(GPT):
    def hidden_states(self, idx, *args, **how):
        x, kv_cache = super().hidden_states(idx, *args, **how)
        return 2 * x, kv_cache


@pytest.mark.parametrize('make', [CPUDecoder, CompiledDecoder])
def test_decoders_with_a_step_of_their_own_refuse_other_models(make):
    for spoil in (replace_mlp, own_forward, lambda m: m.transformer.h[0].register_forward_hook(lambda *a: None)):
        model = f32(8)
        spoil(model)
        with pytest.raises(ValueError, match='decoder'):
            make(model)
    with pytest.raises(ValueError, match='hidden_states of Doubled'):
        make(Doubled(GPTConfig(block_size=8, vocab_size=5, n_layer=1, n_head=1, n_embd=8)))


def test_weights_that_change_before_more_tokens_than_a_window():
    """The first of several chunks finds them, and the others go on with the same cache."""
    model, idx = f32(2, position='rope', window=5, n_sink=2), torch.randint(29, (1, 40))
    decoder = CPUDecoder(model)
    _, cache = decoder(idx[:, :7], None)
    for p in model.parameters():
        p.data.mul_(1.25)
    expected = CPUDecoder(model)(idx[:, 7:30], [layer.clone() for layer in cache])[0]
    assert torch.equal(decoder(idx[:, 7:30], cache)[0], expected)
