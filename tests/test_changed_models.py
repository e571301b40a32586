"""Models that change while an executor exists, and those that are no plain GPT, which PyTorch's executor runs."""
import types

import pytest
import torch
from conftest import ROOT, WEIGHTS
from test_executors import Slots, Text
from tiny_models import MODELS, model_of

import decode
from decode.batch import Refused
from decode.changes import check_compiled, check_forward
from decode.cpu import CPUExecutor
from decode.eager import EagerExecutor
from device import small_model
from engine import Engine
from model import GPT, MLP, attend
from tokenizer import read_text
from training.cpu import check_loss, use_onednn

IDX = torch.tensor([[1, 2, 3, 5, 8, 13, 21]])


def tiny(seed=0, **how):
    return model_of('learned', seed, n_head=2, n_embd=16, bias=True, **how)


def logits_of(executor, slots=None):
    """Of IDX, (T, vocab_size)."""
    return (slots or Slots(executor)).logits({Text(IDX[0].tolist()): IDX.size(1)})[0]


@torch.no_grad()
def by_model(model):
    return model(IDX, IDX)[0][0]


def optimizer_step(model):
    optimizer = model.configure_optimizers(0.0, 0.1, (0.9, 0.95), 'cpu')
    model(IDX, IDX)[1].backward()
    optimizer.step()


def new_parts(model):
    C = 16
    for h in model.transformer.h:
        h.ln_1, h.mlp.c_fc = torch.nn.LayerNorm(C, bias=False), torch.nn.Linear(C, 4 * C, bias=False)
        h.attn.c_attn = torch.nn.Linear(C, 3 * C)


EMBEDDINGS = {  # changes of these too, whose memory every step reads
    'optimizer': optimizer_step,
    'load_state_dict': lambda m: m.load_state_dict(tiny(5).state_dict())}
VALUES = EMBEDDINGS | {
    'one matrix': lambda m: m.transformer.h[1].mlp.c_fc.weight.data.mul_(1.5),
    'a norm': lambda m: m.transformer.ln_f.weight.data[3].add_(1),
    'a bias': lambda m: m.transformer.h[0].attn.c_attn.bias.data[2].sub_(1)}
OBJECTS = {  # changes of parameters and modules
    'assign': lambda m: m.load_state_dict(tiny(5).state_dict(), assign=True),
    'there and back': lambda m: m.bfloat16().float(),
    'a parameter': lambda m: setattr(m.transformer.ln_f, 'weight', torch.nn.Parameter(m.transformer.ln_f.weight * 2)),
    'no bias': lambda m: setattr(m.transformer.h[1].mlp.c_proj, 'bias', None),
    'linears and norms': new_parts,
    'blocks reversed': lambda m: setattr(m.transformer, 'h', torch.nn.ModuleList(list(m.transformer.h)[::-1])),
    'the transformer': lambda m: setattr(m, 'transformer', tiny(7).transformer),
    'eps': lambda m: [setattr(module, 'eps', 0.1) for module in m.modules() if isinstance(module, torch.nn.LayerNorm)],
    'gelu': lambda m: [setattr(m.config, 'gelu', 'tanh'),
                       *(setattr(h.mlp, 'gelu', torch.nn.GELU('tanh')) for h in m.transformer.h)]}


@pytest.mark.parametrize('change', VALUES | OBJECTS)
def test_an_executor_has_the_weights_of_its_last_refresh(change):
    """PyTorch's reads values as they are, and needs a refresh for other objects."""
    for weights in ('eager', *WEIGHTS):
        model = tiny(4)
        executor = EagerExecutor(model) if weights == 'eager' else CPUExecutor(model, weights)
        slots = Slots(executor)  # it holds the same ones all the time
        before = logits_of(executor, slots)
        (VALUES | OBJECTS)[change](model)
        if weights != 'eager' and change not in EMBEDDINGS:
            assert torch.equal(logits_of(executor, slots), before)
        if weights != 'eager' or change in OBJECTS:
            executor.refresh()
        after = logits_of(executor, slots)
        assert not torch.equal(after, before)
        if weights != 'eager':
            assert torch.equal(after, logits_of(CPUExecutor(model, weights)))
        if weights in ('eager', 'float32'):
            torch.testing.assert_close(after, by_model(model), atol=1e-4, rtol=1e-4)


class Twice(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


class Doubled(GPT):
    def hidden_states(self, idx, *args, **how):
        x, kv_cache = super().hidden_states(idx, *args, **how)
        return 2 * x, kv_cache


class Negative(MLP):
    def forward(self, x):
        return -super().forward(x)


class Scaled(GPT):
    def forward(self, *args, **how):
        logits, *others = super().forward(*args, **how)
        return 2 * logits, *others


def widen(model):
    model.transformer.h[0].mlp.c_fc = torch.nn.Linear(16, 96)
    model.transformer.h[0].mlp.c_proj = torch.nn.Linear(96, 16)


UNKNOWN = {  # after these the config and the weights do not say what the model computes
    'a hook': lambda m: m.transformer.h[0].register_forward_hook(lambda module, args, out: (out[0] + 1, out[1])),
    'another linear': lambda m: setattr(m.transformer.h[0].attn, 'c_proj', Twice(m.transformer.h[0].attn.c_proj)),
    'weight norm': lambda m: torch.nn.utils.parametrizations.weight_norm(m.transformer.h[0].mlp.c_fc),
    'another mlp': lambda m: setattr(m.transformer.h[0], 'mlp', Twice(m.transformer.h[0].mlp)),
    'a forward': lambda m: setattr(m.transformer.h[0].mlp, 'forward', lambda x: x),
    'an attention': lambda m: setattr(m.transformer.h[0].attn, 'attend', lambda q, k, v, *_: attend(2 * q, k, v)),
    'wider': widen,
    'another gelu': lambda m: setattr(m.transformer.h[0].mlp, 'gelu', torch.nn.GELU(approximate='tanh')),
    'double': lambda m: m.double(),
    'embeddings of two dtypes': lambda m: m.transformer.wpe.bfloat16(),
    'an eps of its own': lambda m: setattr(m.transformer.h[1].ln_1, 'eps', 0.1),
    'other hidden states': lambda m: setattr(m, '__class__', Doubled)}


@pytest.mark.parametrize('change', UNKNOWN)
def test_what_numbas_executor_does_not_run_it_refuses_and_pytorchs_calls(change, capsys):
    """When it is made and when it is refreshed. `decode.best` then takes PyTorch's, and says so."""
    model = tiny()
    executors = CPUExecutor(model), EagerExecutor(model)
    UNKNOWN[change](model)
    for refused in (executors[0].refresh, lambda: CPUExecutor(model)):
        with pytest.raises(ValueError, match='executor'):
            refused()
    with pytest.raises(ValueError, match='use decoder=eager'):
        CPUExecutor(tiny().to('meta'))
    with pytest.raises(ValueError, match='int8'):
        decode.best(model, 1, weights='int8')
    assert decode.best(model, 1).name == 'PyTorch, eager' and 'decoding eagerly' in capsys.readouterr().err
    executors[1].refresh()
    for executor in (executors[1], EagerExecutor(model)):
        torch.testing.assert_close(logits_of(executor), by_model(model), atol=1e-5, rtol=1e-5)


# what somebody changes in model.py, each a line
EDITS = {
    'activation': ('self.gelu(hidden)', 'F.relu(hidden).square()'),
    'attention': ('scaled_dot_product_attention(q, k,', 'scaled_dot_product_attention(1.5 * q, k,'),
    'order of channels': ('y = y.transpose(1, 2).flatten(2)', 'y = y.permute(0, 2, 3, 1).flatten(2)'),
    'residual': ('x = x + self.mlp(self.ln_2(x))', 'x = x + 0.5 * self.mlp(self.ln_2(x))'),
    'embedding': ('x = t.wte(idx)\n', 'x = 2 * t.wte(idx)\n'),
    'skip': ('return t.ln_f(x), new if', 'return t.ln_f(x + t.wte(idx)[:, -x.size(1):]), new if'),
    'another part': ('self.mlp = MLP(config)', 'self.mlp = nn.Linear(config.n_embd, config.n_embd)'),
    'softcap': ('        if targets is None:\n            return',
                '        logits = 15 * torch.tanh(logits / 15)\n        if targets is None:\n            return'),
    'loss': ('ignore_index=-1)', 'ignore_index=-1, label_smoothing=0.1)')}


def edited(old, new):
    """The content of model.py after an edit."""
    source = read_text(f'{ROOT}/model.py')
    assert source.count(old) == 1
    module = types.ModuleType('model')
    exec(compile(source.replace(old, new), 'model.py', 'exec'), vars(module))
    return module


@pytest.mark.parametrize('edit', EDITS)
def test_an_edited_model_py_is_noticed_by_what_computes_the_same_by_other_code(edit, capsys):
    changed = edited(*EDITS[edit])
    model = changed.GPT(changed.GPTConfig(**vars(tiny().config))).eval()
    for weights in WEIGHTS if edit != 'loss' else ():
        with pytest.raises(ValueError, match='model.py'):
            decode.best(model, 1, weights, name='cpu')
    if edit == 'softcap':
        with pytest.raises(ValueError, match='but not GPT.forward.*move what forward adds into one of the two'):
            decode.best(model, 1)
    else:
        executor = decode.best(model, 1)
        assert (executor.name == 'PyTorch, eager') == (edit != 'loss')
        torch.testing.assert_close(logits_of(executor), by_model(model), atol=1e-5, rtol=1e-5)
        assert (edit == 'loss') == (not capsys.readouterr().err)
    small = small_model(changed.GPT, model.config)
    if edit in ('softcap', 'loss'):
        with pytest.raises(ValueError, match='by itself, .* and GPT.forward computes .*--onednn=False'):
            check_loss(small)
    else:
        check_loss(small)


@pytest.mark.parametrize('kind', MODELS)
def test_a_model_py_as_it_is_passes(kind):
    """Whatever the model's numbers are, and torch's defaults."""
    model = model_of(kind, dtype=torch.bfloat16 if len(kind) % 2 else torch.float32)
    noise = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast('cpu'):
            for weights in WEIGHTS:
                check_compiled(model, weights)
            check_forward(model.with_window(3, 1))
    finally:
        torch.set_default_dtype(torch.float32)
    check_loss(small_model(GPT, model.config))
    assert torch.equal(torch.get_rng_state(), noise)


def test_a_model_that_cannot_be_made_small_is_not_compared():
    changed = edited('self.config = config\n', 'self.config = config\n        assert config.n_layer > 2\n')
    model = changed.GPT(changed.GPTConfig(**vars(tiny(n_layer=3).config))).eval()
    torch.testing.assert_close(logits_of(EagerExecutor(model)), by_model(model), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match='does not know model.py as it is now .AssertionError'):
        check_compiled(model, 'float32')
    with pytest.raises(ValueError, match='which fails .AssertionError.*: give --onednn=False'):
        use_onednn(model, 'float32')


def test_what_torch_compile_has_made_is_no_model_of_an_engine():
    with pytest.raises(ValueError, match='came from torch.compile, .*: give the model that torch.compile was called'):
        Engine(torch.compile(tiny()))


def test_an_engine_notices_hooks_parts_and_settings():
    """Prompts are not remembered while there are hooks, because what these do may change."""
    model, prompt = model_of('rope', 1), [*range(24)]  # more than a page
    engine, found, size, direction = Engine(model), [], 0.0, torch.randn(48)

    def step():
        engine.add(prompt, 1, logprobs=True)
        (_, output), = engine.step()
        found.append(output.logits[-1])
        with torch.no_grad():
            torch.testing.assert_close(found[-1], model(torch.tensor([prompt]))[0][0, -1], atol=1e-5, rtol=1e-5)
    step()
    hook = model.transformer.h[0].register_forward_hook(lambda module, args, out: (out[0] + size * direction, out[1]))
    for size in 0.0, 3.0, -3.0:  # noqa: B007 (the hook reads it)
        step()
    hook.remove()
    step()
    step()  # now the prompt is remembered
    model.config.rope_theta = 10.0
    step()
    model.transformer.h[1].mlp = Twice(model.transformer.h[1].mlp)
    step()
    model.transformer.h[0].mlp.__class__ = Negative
    step()
    assert len({logits.sum().item() for logits in found}) >= 6
    for name, value in dict(n_layer=3, window=5).items():
        before = getattr(model.config, name)
        setattr(model.config, name, value)
        with pytest.raises(ValueError, match=f'^{name} is {value} now, .*: make a new engine'):
            step()
        setattr(model.config, name, before)


def test_where_numba_must_not_compile_pytorch_decodes(monkeypatch, capsys):
    monkeypatch.setattr('numba.config.DISABLE_JIT', True)
    assert decode.best(tiny(), 1).name == 'PyTorch, eager' and 'NUMBA_DISABLE_JIT is set' in capsys.readouterr().err
    with pytest.raises(ValueError, match='NUMBA_DISABLE_JIT'):
        decode.best(tiny(), 1, name='cpu')


@pytest.mark.parametrize('change', ['another class', 'a hook on the model'])
@torch.no_grad()
def test_a_forward_of_its_own_is_run_without_a_cache(change):
    """It may compute logits from anything, and no executor can give it keys and values."""
    model = tiny()
    executor = EagerExecutor(model)
    if change == 'another class':
        model.__class__ = Scaled
    else:
        model.register_forward_hook(lambda module, args, out: (2 * out[0], *out[1:]))
    for refused in (executor.refresh, lambda: EagerExecutor(model)):
        with pytest.raises(ValueError, match='pass use_cache=False'):
            refused()
    found = []
    model.generate(IDX, 1, draw=lambda logits, number: found.append(logits) or logits.argmax(-1, keepdim=True))
    assert torch.equal(found[0], 2 * tiny()(IDX, use_cache=False)[0][0])


def global_hook():
    return torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 2 * out if type(module) is torch.nn.Linear else None).remove


def patched_class():
    before, MLP.forward = MLP.forward, lambda self, x: x
    return lambda: setattr(MLP, 'forward', before)


@pytest.mark.parametrize('spoil', [global_hook, patched_class])
def test_hooks_of_all_modules_and_a_forward_that_was_put_into_a_class(spoil):
    model = tiny()
    executor, before = EagerExecutor(model), by_model(model)
    undo = spoil()
    try:
        with pytest.raises(ValueError, match='does not run'):
            CPUExecutor(model)
        if spoil is global_hook:  # which the model itself has too
            with pytest.raises(ValueError, match="global hooks: pass use_cache=False"):
                executor.refresh()
        else:
            executor.refresh()
            torch.testing.assert_close(logits_of(executor), by_model(model))
        assert not torch.equal(by_model(model), before)
    finally:
        undo()
    CPUExecutor(model)


def test_a_context_that_became_shorter_and_a_model_of_another_shape():
    model = tiny()
    executor, expected = CPUExecutor(model), logits_of(CPUExecutor(model))
    model.crop_block_size(7)
    executor.refresh()
    assert torch.equal(logits_of(executor), expected)
    with pytest.raises(Refused, match='out of context'):
        Slots(executor).logits({Text([1] * 8): 8})
    model.config.n_layer = 1
    model.transformer.h = model.transformer.h[:1]
    with pytest.raises(ValueError, match='make a new one'):
        executor.refresh()


def test_what_makes_no_difference():
    """Buffers of any dtype; a model that was made in inference mode; a shared norm."""
    expected = logits_of(CPUExecutor(tiny()))
    with torch.inference_mode():
        made_there = tiny()
    for buffer in (torch.ones(9, 9, dtype=torch.bool), torch.zeros((), dtype=torch.int64), torch.ones(3).double()):
        made_there.register_buffer('mask', buffer)
        assert torch.equal(logits_of(CPUExecutor(made_there)), expected)
        torch.testing.assert_close(logits_of(EagerExecutor(made_there)), expected)


def test_linears_have_biases_or_not_each_by_itself():
    model = model_of('llama')
    for linear in (model.transformer.h[0].mlp.c_gate, model.transformer.h[1].attn.c_attn):
        linear.bias = torch.nn.Parameter(torch.randn(linear.out_features))
    torch.testing.assert_close(logits_of(CPUExecutor(model)), by_model(model), atol=1e-5, rtol=1e-5)
