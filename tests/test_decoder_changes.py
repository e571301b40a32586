"""
Weights, modules and hooks that change while a decoder exists: each sequence begins with the model as it is then, or
the decoder refuses it; `refresh` is for changes in the middle of one. And Ctrl-C at any line.
"""
import os

import pytest
import torch
from conftest import WEIGHTS, sizes
from example_models import f32
from interrupts import interrupted
from ways import DECODERS, decoder_of, without_compilers  # noqa: F401  (a fixture)

import decode
from decode.changes import Watch
from decode.cpu import CPUDecoder
from generation import generate
from model import GPT, MLP, Block

pytestmark = pytest.mark.usefixtures('without_compilers')
PACKED = [('cpu', weights) for weights in WEIGHTS]


def made(way, model, weights='float32'):
    return CPUDecoder(model, weights) if way == 'cpu' else decoder_of(way, model)


def optimizer_step(model):
    optimizer = model.configure_optimizers(0.0, 0.1, (0.9, 0.95), 'cpu')
    idx = torch.randint(29, (2, 6))
    model(idx, idx)[1].backward()
    optimizer.step()


def in_place(of, change):
    def apply(model):
        with torch.no_grad():
            change(of(model))
    return apply


def averaged(model):
    for p, other in zip(model.parameters(), f32(5).parameters()):
        p.data.copy_(other)


def of_c_fc(model):
    return model.transformer.h[1].mlp.c_fc.weight


VALUES = {  # changes of values
    'optimizer': optimizer_step,
    'load_state_dict': lambda m: m.load_state_dict(f32(5).state_dict()),
    'all through data': averaged,
    'one matrix through data': lambda m: of_c_fc(m).data.mul_(1.5),
    'one matrix through numpy': lambda m: of_c_fc(m).detach().numpy().__imul__(1.5),
    'one value in place': in_place(of_c_fc, lambda w: w[0, 1].add_(1)),
    'rows swapped': in_place(of_c_fc, lambda w: w.copy_(w.flip(0).clone())),
    'a norm': in_place(lambda m: m.transformer.ln_f.weight, lambda w: w[3].add_(1)),
    'a position': in_place(lambda m: m.transformer.wpe.weight, lambda w: w[0].add_(1)),
    'a bias': in_place(lambda m: m.transformer.h[0].attn.c_attn.bias, lambda w: w[2].sub_(1))}


def new_parts(model):
    C = 16
    for h in model.transformer.h:
        h.ln_1, h.mlp.c_fc = torch.nn.LayerNorm(C, bias=False), torch.nn.Linear(C, 4 * C, bias=False)
        h.attn.c_attn = torch.nn.Linear(C, 3 * C)


OBJECTS = {  # changes of parameters and modules
    'assign': lambda m: m.load_state_dict(f32(5).state_dict(), assign=True),
    'other memory': lambda m: setattr(of_c_fc(m), 'data', 1.5 * of_c_fc(m).data),
    'there and back': lambda m: m.bfloat16().float(),
    'a parameter': lambda m: setattr(m.transformer.ln_f, 'weight', torch.nn.Parameter(m.transformer.ln_f.weight * 2)),
    'no bias': lambda m: setattr(m.transformer.h[1].mlp.c_proj, 'bias', None),
    'linears and norms': new_parts,
    'a block': lambda m: m.transformer.h.__setitem__(1, Block(m.config).eval()),
    'blocks reversed': lambda m: setattr(m.transformer, 'h', torch.nn.ModuleList(list(m.transformer.h)[::-1])),
    'the transformer': lambda m: setattr(m, 'transformer', f32(77).transformer),
    'eps': lambda m: [setattr(module, 'eps', 0.1) for module in m.modules() if isinstance(module, torch.nn.LayerNorm)],
    'gelu': lambda m: [setattr(m.config, 'gelu', 'tanh'),
                       *(setattr(h.mlp, 'gelu', torch.nn.GELU('tanh')) for h in m.transformer.h)]}


@pytest.mark.parametrize('change', VALUES | OBJECTS)
def test_a_watch_notices(change):
    model = f32(4)
    watch = Watch(model)
    assert watch.unchanged() and watch.same_memory()
    (VALUES | OBJECTS)[change](model)
    assert not watch.unchanged()
    assert watch.same_memory() == (change in VALUES)


def test_what_a_watch_misses():
    """Torch does not count writes through `.data`: one to few values is noticed if a probed value is among them."""
    model = f32(4)
    watch = Watch(model)
    of_c_fc(model).data.view(-1)[1] += 1
    assert watch.unchanged()
    of_c_fc(model).data.view(-1)[0] = float('nan')
    assert not watch.unchanged()
    assert Watch(model).unchanged()  # a NaN is equal to itself


@pytest.mark.parametrize('way, weights', [*PACKED, *((way, None) for way in DECODERS if way != 'cpu')])
@pytest.mark.parametrize('change', VALUES | OBJECTS)
def test_a_new_sequence_uses_the_model_of_now(change, way, weights):
    model, idx = f32(4), torch.randint(29, (2, 6))
    decoder = made(way, model, weights)
    _, cache = decoder(idx, None)
    decoder(idx[:, :1], cache)
    (VALUES | OBJECTS)[change](model)
    # a cache of `generate` begins a sequence without kv_cache=None
    tokens, expected = (generate(model, idx, 8, temperature=0, use_cache=True, decoder=each)
                        for each in (decoder, made(way, model, weights)))
    assert torch.equal(tokens, expected)
    logits, cache = decoder(idx, None)
    fresh, fresh_cache = made(way, model, weights)(idx, None)
    assert torch.equal(logits, fresh)
    if weights in (None, 'float32'):
        with torch.no_grad():
            step, expected = decoder(idx[:, :1], cache)[0], model(idx[:, :1], kv_cache=fresh_cache)[0]
        torch.testing.assert_close(step, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('way, weights', [*PACKED, ('eager', None), ('graph', None)])
@torch.no_grad()
def test_refresh_makes_a_running_sequence_use_the_weights_of_now(way, weights):
    model, idx = f32(4), torch.randint(29, (2, 6))
    decoder, version = made(way, model, weights), None
    _, cache = decoder(idx, None)
    for change in ('one matrix through data', 'all through data', 'a parameter', 'assign', 'a block'):
        clones = [[layer.clone() for layer in cache] for _ in range(3)]
        before = decoder(idx[:, :1], clones[0])[0]
        (VALUES | OBJECTS)[change](model)
        if way == 'cpu':  # it has a copy
            assert decoder.version != version
        version = getattr(decoder, 'version', None)
        decoder.refresh()
        got, expected = decoder(idx[:, :1], clones[1])[0], made(way, model, weights)(idx[:, :1], clones[2])[0]
        assert torch.equal(got, expected) and not torch.equal(got, before)


class OtherMLP(torch.nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.c_fc, self.c_proj = mlp.c_fc, mlp.c_proj

    def forward(self, x):
        return self.c_proj(torch.relu(self.c_fc(x)))


def widen(model):
    model.transformer.h[0].mlp.c_fc = torch.nn.Linear(16, 96)
    model.transformer.h[0].mlp.c_proj = torch.nn.Linear(96, 16)


UNKNOWN = {  # changes after which the weights alone do not say what the model computes
    'hook': lambda m: m.transformer.h[0].register_forward_hook(lambda *a: None),
    'pre-hook': lambda m: m.transformer.ln_f.register_forward_pre_hook(lambda *a: None),
    'linear': lambda m: setattr(m.transformer.h[1].attn, 'c_proj', torch.nn.Sequential(m.transformer.h[1].attn.c_proj)),
    'mlp': lambda m: setattr(m.transformer.h[0], 'mlp', OtherMLP(m.transformer.h[0].mlp)),
    'forward': lambda m: setattr(m.transformer.h[0].mlp, 'forward', lambda x: x),
    'wider': widen,
    'relu': lambda m: setattr(m.transformer.h[0].mlp, 'gelu', torch.nn.ReLU()),
    'another gelu': lambda m: setattr(m.transformer.h[0].mlp, 'gelu', torch.nn.GELU(approximate='tanh')),
    'double': lambda m: m.double(),
    'more layers': lambda m: m.transformer.h.append(Block(m.config))}


@pytest.mark.parametrize('change', UNKNOWN)
def test_the_cpu_decoder_refuses_what_it_does_not_run(change, capsys):
    """When it is made, and at the start of a sequence. `decode.best` then takes another decoder, and says so."""
    model, idx = f32(8), torch.randint(29, (1, 4))
    decoder = CPUDecoder(model)
    decoder(idx, None)
    UNKNOWN[change](model)
    for use in (lambda: decoder(idx, None), lambda: CPUDecoder(model)):
        with pytest.raises(ValueError, match='decoder'):
            use()
    assert decode.best(model, 1).name == 'PyTorch, eager' and 'decoding eagerly' in capsys.readouterr().err
    with pytest.raises(ValueError, match='int8'):
        decode.best(model, 1, weights='int8')


class Doubled(GPT):
    def hidden_states(self, idx, *args, **how):
        x, kv_cache = super().hidden_states(idx, *args, **how)
        return 2 * x, kv_cache


@pytest.mark.parametrize('way', ['cpu', 'graph', 'compiled'])
@pytest.mark.parametrize('spoil', [UNKNOWN['mlp'], UNKNOWN['forward'], UNKNOWN['hook'],
                                   lambda m: setattr(m, '__class__', Doubled)])
def test_decoders_with_a_step_of_their_own_refuse_other_models(spoil, way):
    model = f32(8)
    spoil(model)
    with pytest.raises(ValueError, match='hidden_states of Doubled' if type(model) is Doubled else 'decoder'):
        made(way, model)


def global_hook():
    return torch.nn.modules.module.register_module_forward_hook(lambda *a: None).remove


def patched_class():
    before, MLP.forward = MLP.forward, lambda self, x: x
    return lambda: setattr(MLP, 'forward', before)


@pytest.mark.parametrize('spoil', [global_hook, patched_class])
def test_what_all_modules_share_is_looked_at_as_well(spoil):
    model, idx = f32(8), torch.randint(29, (1, 4))
    decoder = CPUDecoder(model)
    undo = spoil()
    try:
        with pytest.raises(ValueError, match='does not run'):
            CPUDecoder(model)
        if spoil is global_hook:
            with pytest.raises(ValueError, match='does not run'):
                decoder(idx, None)
    finally:
        undo()
    decoder(idx, None)


def test_a_context_that_became_shorter_or_longer():
    """The strides of a cache are its slots, so an older cache would be read and written at wrong places."""
    model, idx = f32(4), torch.randint(29, (2, 6))
    decoder = CPUDecoder(model)
    _, old = decoder(idx, None)
    model.crop_block_size(10)
    with pytest.raises(ValueError, match='need'):
        decoder(idx[:, :1], [layer.clone() for layer in old])
    assert torch.equal(decoder(idx, None)[0], CPUDecoder(model)(idx, None)[0])
    model.transformer.wpe = torch.nn.Embedding(300, 16)
    model.config.block_size = 300
    assert torch.equal(model.generate(idx, 250, temperature=0, use_cache=True, decoder=decoder),
                       model.generate(idx, 250, temperature=0))


@pytest.mark.parametrize('buffer', [
    torch.ones(9, 9, dtype=torch.bool), torch.zeros((), dtype=torch.int64), torch.ones(3).double()])
def test_buffers_of_any_dtype(buffer):
    model, idx = f32(8), torch.randint(29, (1, 4))
    expected = CPUDecoder(model)(idx, None)[0]
    model.register_buffer('mask', buffer)
    decoder = CPUDecoder(model)
    logits, cache = decoder(idx, None)
    assert torch.equal(logits, expected) and decoder(idx[:, :1], cache)[0].isfinite().all()


@pytest.mark.parametrize('weights', WEIGHTS)
def test_a_nan_ends_with_its_repair(weights):
    """Where n_embd is no multiple of the vectors' length, a NaN must not stay in what fills them up."""
    for n_embd in sizes((20,), (8, 20, 48)):
        model, idx = f32(6, n_embd=n_embd), torch.randint(29, (2, 6))
        decoder = CPUDecoder(model, weights)
        expected = decoder(idx, None)[0]
        for name, p in model.named_parameters():
            for broken in (float('nan'), float('inf'), 3e38):
                before = p.detach().clone()
                in_place(lambda _, p=p: p, lambda p, broken=broken: p.view(-1)[0].fill_(broken))(model)
                decoder(idx, None)
                in_place(lambda _, p=p: p, lambda p, before=before: p.copy_(before))(model)
                assert torch.equal(decoder(idx, None)[0], expected), f"{broken} in {name}"


FOLDER = os.path.dirname(decode.__file__)


@pytest.mark.parametrize('way', DECODERS)
@torch.no_grad()
def test_after_ctrl_c_at_any_line_a_decoder_works_as_before(way):
    model, idx = f32(9), torch.randint(29, (2, 12))
    decoder, expected, n = made(way, model), made(way, model)(idx, None)[0], 0

    def work():
        if hasattr(decoder, 'refresh'):
            decoder.refresh()
        _, cache = decoder(idx[:, :9], None)
        decoder(idx[:, 9:10], cache)

    def in_decode(code):
        return code.co_filename.startswith(FOLDER) and f'{os.sep}kernel{os.sep}' not in code.co_filename
    while interrupted(work, n := n + sizes(17, 1), in_decode)[0]:
        _, cache = decoder(idx[:, :10], None)
        for t in (10, 11):
            logits, cache = decoder(idx[:, t:t + 1], cache)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert n > 100
