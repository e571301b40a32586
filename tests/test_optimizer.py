"""What a training run can choose: the optimizer, the schedule of the learning rate, oneDNN's products on a CPU."""
import platform

import pytest
import torch
from conftest import ROOT, TINY, run

import checkpoint as checkpoints
import train
from model import GPT, GPTConfig
from training import cpu
from training.cpu import use_onednn
from training.optimizer import check_optimizer, make_optimizer
from training.resuming import restore

SETTINGS = dict(optimizer='muon', learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, muon_lr=0.02,
                muon_weight_decay=0.3, lr_schedule='cosine', cooldown_frac=0.2, decay_lr=True, warmup_iters=2,
                lr_decay_iters=20, max_iters=20)


def small(**settings):
    torch.manual_seed(0)
    return GPT(GPTConfig(**dict(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=8) | settings))


def steps(model, n, *optimizers):
    for i in range(n):
        tokens = (torch.arange(9) * (i + 2)).remainder(11)[None]
        model(tokens[:, :-1], tokens[:, 1:])[1].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_a_step_is_that_of_torchs_muon_and_torchs_adamw(monkeypatch):
    """Each parameter alone in an optimizer of torch, whose Muon, which has the blocks' matrices, here is in float32."""
    model, twin = (small(bias=True, mlp='swiglu', tied=False, qk_norm=True) for _ in range(2))
    optimizer = make_optimizer(model, 'cpu', SETTINGS)
    alone = [torch.optim.Muon([p], lr=0.02, weight_decay=0.3) if '.h.' in name and p.dim() == 2
             else torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1 * (p.dim() >= 2), fused=True)
             for name, p in twin.named_parameters()]
    steps(model, 3, optimizer)
    monkeypatch.setattr(torch.Tensor, 'bfloat16', torch.Tensor.clone)
    steps(twin, 3, *alone)
    assert len(alone) == 21 == sum(len(group['params']) for group in optimizer.param_groups)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize('name, damage, message', [
    *[('optimizer', *row) for row in (
        (lambda s: s.clear(), 'param_groups'),
        (lambda s: s['param_groups'][0]['params'].pop(), 'is of .* parameters'),
        (lambda s: s['state'].update({0: 3}), ''),
        (lambda s: s['state'][0].update(step='x'), ''),
        (lambda s: s['state'][0].update(exp_avg=3), ''),
        (lambda s: s['state'].update({0: s['state'][1], 1: s['state'][0]}), 'exp_avg is .* and its parameter'),
        (lambda s: s['state'][s['param_groups'][2]['params'][0]].update(momentum_buffer=torch.ones(3, 8)),
         r'is \(3, 8\)'))],
    *[('rng', state, '') for state in (
        {'torch': None}, {'torch': 3, 'cuda': []}, {'torch': torch.ones(3), 'cuda': []})],
    ('best_val_loss', None, ''), ('best_val_loss', 'x', '')])
def test_a_state_that_does_not_fit_is_refused_in_words(name, damage, message):
    """damage: a function that changes the state, or another one in its place."""
    model = small()
    optimizer = make_optimizer(model, 'cpu', SETTINGS)
    steps(model, 1, optimizer)
    resumed = dict(optimizer=optimizer.state_dict())
    restore(resumed, make_optimizer(model, 'cpu', SETTINGS), None)
    damage(resumed[name]) if callable(damage) else resumed.update({name: damage})
    with pytest.raises(ValueError, match=f"the {name} state of the checkpoint does not fit, .*{message}"):
        restore(resumed, make_optimizer(model, 'cpu', SETTINGS), None)


@pytest.mark.parametrize('settings, message', [
    (dict(optimizer='sgd'), "optimizer must be adamw or muon, not 'sgd'"),
    (dict(lr_schedule='linear'), "lr_schedule must be cosine or wsd, not 'linear'"),
    (dict(muon_lr=-1.0), 'muon_lr must be at least 0, not -1.0'),
    (dict(muon_weight_decay=float('nan')), 'muon_weight_decay must be at least 0, not nan'),
    (dict(cooldown_frac=0.0), 'cooldown_frac must be more than 0 and at most 1, not 0.0'),
    (dict(cooldown_frac=1.1), 'cooldown_frac must be more than 0 and at most 1, not 1.1'),
    (dict(warmup_iters=-1), 'warmup_iters must be at least 0, not -1'),
    (dict(lr_schedule='wsd', lr_decay_iters=0), 'lr_decay_iters must be at least 1, not 0'),
    (dict(lr_schedule='wsd', max_iters=30), 'from lr_decay_iters=20 on, and max_iters is 30: give --lr_decay_iters=30'),
    (dict(parallel='fsdp'), 'optimizer=muon needs whole matrices'),
    (dict(learning_rate=0.0), 'learning_rate must be more than 0 with optimizer=muon')])
def test_what_is_refused(settings, message):
    check_optimizer(SETTINGS)
    with pytest.raises(ValueError, match=message):
        check_optimizer(SETTINGS | settings)


def test_a_run_with_muon_is_not_resumed_with_adamw(repo):
    muon, short = ('--optimizer=muon',), ('--max_iters=2', '--eval_interval=2')
    run(repo, 'train.py', *TINY, *muon, *short, code=0)
    done = run(repo, 'train.py', *TINY, '--init_from=resume', code=2)
    assert done.stderr.splitlines()[-1] == (
        'train.py: error: optimizer is adamw, but the run before had muon: resume it with --optimizer=muon')
    done = run(repo, 'train.py', *TINY, *muon, '--init_from=resume', '--max_iters=3', '--muon_weight_decay=0.5')
    assert 'muon_weight_decay is 0.5 from here on (command line); the run before had 0.0' in done.stdout
    groups = checkpoints.load(str(repo / 'out' / 'ckpt.pt'))['optimizer']['param_groups']
    assert [group['weight_decay'] for group in groups] == [0.1, 0.0, 0.5]


@pytest.fixture
def schedule(monkeypatch):
    """A function that sets settings of train.py, and returns its learning rate by iteration."""
    def settings(**changed):
        for name, value in dict(learning_rate=1.0, min_lr=0.1, warmup_iters=4, lr_decay_iters=24, **changed).items():
            monkeypatch.setattr(train, name, value)
        return train.get_lr
    return settings


@pytest.mark.parametrize('settings, expected', [
    (dict(), {0: 0.2, 3: 0.8, 4: 1, 14: 0.55, 24: 0.1, 30: 0.1}),  # nanoGPT's cosine
    (dict(lr_schedule='wsd', cooldown_frac=0.25),  # the last quarter, 6 iterations, begins at 18
     {0: 0.2, 1: 0.4, 3: 0.8, 4: 1, 10: 1, 18: 1, 19: 5 / 6, 21: 3 / 6, 23: 1 / 6, 24: 0, 30: 0}),
    (dict(lr_schedule='wsd', decay_lr=False), {23: 1})])
def test_learning_rates_by_iteration(schedule, settings, expected):
    lr = schedule(**settings)
    assert {it: lr(it) for it in expected} == pytest.approx(expected, abs=1e-12)


def test_muons_learning_rate_goes_by_the_schedule(schedule, monkeypatch):
    schedule(lr_schedule='wsd', cooldown_frac=0.25)
    monkeypatch.setattr(train, 'muon_lr', 0.02)
    optimizer = make_optimizer(small(), 'cpu', SETTINGS)
    for it, factor in ((0, 0.2), (10, 1.0), (21, 0.5)):
        assert train.set_lr(optimizer, it) == pytest.approx(factor)
        assert [g['lr'] for g in optimizer.param_groups] == [pytest.approx(x * factor) for x in (1.0, 1.0, 0.02)]


@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('dtype, by_mkl, most', [('float32', False, 1e-5), ('float32', True, 1e-5),
                                                 ('bfloat16', False, 3e-2)])
def test_a_model_that_uses_onednn_has_the_gradients_of_float64(dtype, by_mkl, most, bias, monkeypatch):
    monkeypatch.setattr(cpu, 'mkl_is_fast', lambda: by_mkl)
    kind = dict(bias=bias, position='alibi', mlp='swiglu', n_embd=32)
    model, judge = small(**kind), small(**kind).double()
    use_onednn(model, dtype)
    assert ('forward' in vars(model.lm_head)) == (dtype == 'float32' and not by_mkl)
    tokens = torch.randint(11, (4, 9))
    with torch.autocast('cpu', torch.bfloat16, enabled=dtype == 'bfloat16'):
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
    loss.backward()
    judge(tokens[:, :-1], tokens[:, 1:])[1].backward()
    for a, b in zip(model.parameters(), judge.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= most * b.grad.norm()


@pytest.mark.parametrize('dtype, most', [('float32', 1e-6), ('bfloat16', 1e-2)])
@pytest.mark.parametrize('part_rows', [1, 7, 16, 50])
def test_the_loss_in_parts_is_that_of_all_logits(part_rows, dtype, most, monkeypatch):
    """Targets of -1 do not count in either; one part is the model's own computation."""
    monkeypatch.setattr(cpu, 'PART_BYTES', part_rows * 4 * 11)
    model, plain = small(), small().double()
    use_onednn(model, dtype)
    idx, targets = torch.randint(11, (4, 8)), torch.randint(-1, 11, (4, 8))
    with torch.autocast('cpu', torch.bfloat16, enabled=dtype == 'bfloat16'):
        logits, loss, _ = model(idx, targets)
        with torch.no_grad():
            assert model(idx, targets)[1] == loss
    expected = plain(idx, targets)[1]
    assert (logits is None) == (part_rows < 32) and loss.item() == pytest.approx(expected.item(), rel=most)
    (2 * loss).backward()
    (2 * expected).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 3 * most * b.grad.norm()
    assert model(idx)[0].shape == (4, 1, 11)


def test_gradients_of_many_parts_are_as_exact_as_those_of_one():
    """In bfloat16 products are rounded, but the sum over the parts is not."""
    torch.manual_seed(0)
    x, weight, targets = torch.randn(512, 16), torch.randn(64, 16) / 4, torch.randint(64, (512,))
    exact = x.double().requires_grad_(), weight.double().requires_grad_()
    torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, targets).backward()

    def errors(rows):
        given = x.clone().requires_grad_(), weight.clone().requires_grad_()
        cpu.PartedLoss.apply(*given, targets, rows, torch.bfloat16, True).backward()
        return [((a.grad - b.grad).norm() / b.grad.norm()).item() for a, b in zip(given, exact)]
    of_one, of_many = errors(512), errors(2)
    assert max(of_one + of_many) < 5e-3 and of_many[1] < 1.2 * of_one[1]


KEPT = """
import torch
from benchmarks.harness import process_bytes
from training.cpu import keep_freed_memory
keep_freed_memory()
before = process_bytes()
tensors = [torch.ones(2**18) for _ in range(64)]
del tensors
print((process_bytes() - before) / 2**20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason="needs glibc")
def test_memory_of_an_iteration_stays_for_the_next():
    """The process keeps 64 MB that were freed in tensors of 1 MB. By default glibc may give them back."""
    assert float(run(ROOT, '-c', KEPT).stdout) > 48


def test_onednn_is_for_two_dtypes_of_which_the_processor_must_multiply_one(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, '_is_mkldnn_bf16_supported', lambda: False)
    for dtype, message in (('bfloat16', 'give --dtype=float32'), ('float16', 'not float16: give --onednn=False')):
        with pytest.raises(ValueError, match=message):
            use_onednn(small(), dtype)
    use_onednn(small(), 'float32')
