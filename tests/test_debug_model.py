"""The traced model: what it prints, when it is silent, and that it finds what is wrong."""
import pytest
import torch

import debug_kv_model
import model as plain_model
from engine import Engine, pool_for
from kvcache.llamacpp.pool import CellPool

CONFIG = dict(block_size=128, vocab_size=65, n_layer=2, n_head=2, n_embd=16)
IDX = torch.tensor([[1, 2, 3, 4, 5, 6]])


def pair():
    models = []
    for module in (plain_model, debug_kv_model):
        torch.manual_seed(0)
        models.append(module.GPT(module.GPTConfig(**CONFIG)).eval())
    return models


@pytest.fixture
def traced(monkeypatch):
    monkeypatch.setenv('KV_DEBUG', '1')  # after import
    return pair()[1]


def alarms(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if '!!!' in line]


def test_the_trace_of_two_steps(traced, monkeypatch, capsys):
    monkeypatch.setenv('KV_DEBUG_LAYER', '0')
    traced.generate(IDX, 2, use_cache=True)
    assert capsys.readouterr().err.splitlines() == [
        '[KVDBG][generate] step=0 use_cache=True kv_cache_present=False cache_full=False idx_cond.shape=(1, 6)',
        '[KVDBG][GPT] kv_cache=None b=1 t=6 pos=[0, 1, 2, 3, 4, 5]',
        '[KVDBG][Attn L0] init_cache T=6 max_ctx=128',
        '[KVDBG][Attn L0] mask T_q=6 T_k=6',
        '[KVDBG][generate] step=1 use_cache=True kv_cache_present=True cache_full=False idx_cond.shape=(1, 1)',
        '[KVDBG][GPT] kv_cache=present b=1 t=1 cache_pos=6 pos=[6]',
        '[KVDBG][Attn L0] cache_pos=6 T=1 new_cache_pos=7 max_ctx=128',
        '[KVDBG][Attn L0] using cache T_k=7',
        '[KVDBG][Attn L0] mask T_q=1 T_k=7',
    ]
    monkeypatch.delenv('KV_DEBUG_LAYER')
    traced.generate(IDX, 2, use_cache=True)
    err = capsys.readouterr().err
    assert '[Attn L0]' in err and '[Attn L1]' in err


def test_the_trace_of_a_ring(monkeypatch, capsys):
    """Positions 9 to 11 of a window of 4 with 2 sinks: the ring of 8 slots behind slot 1 has begun again at 10."""
    monkeypatch.setenv('KV_DEBUG', '1')
    monkeypatch.setenv('KV_DEBUG_LAYER', '1')
    traced = debug_kv_model.GPT(debug_kv_model.GPTConfig(**CONFIG, position='rope', window=4, n_sink=2)).eval()
    cache = traced(torch.arange(9)[None])[2]
    capsys.readouterr()
    traced(IDX[:, :3], kv_cache=cache)
    assert capsys.readouterr().err.splitlines()[1:] == [
        '[KVDBG][Attn L1] slots 9 to 3 of a ring', '[KVDBG][Attn L1] cache_pos=9 T=3 new_cache_pos=12 max_ctx=10',
        '[KVDBG][Attn L1] using cache T_k=10', '[KVDBG][Attn L1] mask T_q=1 T_k=10']


@pytest.mark.parametrize('pool_of, step', [
    (pool_for, 'cache_pos=tensor([3, 2]) T=1 new_cache_pos=tensor([4, 3]) max_ctx=6'),  # the texts lie side by side
    (CellPool, 'placed 2 rows, mask T_q=1 T_k=4')])
def test_the_trace_of_the_engine(traced, monkeypatch, capsys, pool_of, step):
    """Its lines come from the model's own code, which the executor in PyTorch calls."""
    monkeypatch.setenv('KV_DEBUG_LAYER', '1')
    engine = Engine(traced, pool=pool_of(traced.config, 2, 6))
    plain, prompts = pair()[0], [[1, 2, 3], [4, 5]]
    texts = engine.generate(prompts, 3, temperature=0)
    lines = capsys.readouterr().err.splitlines()
    assert texts == [plain.generate(torch.tensor([prompt]), 3, temperature=0)[0].tolist() for prompt in prompts]
    for line in 'placed 5 rows, mask T_q=5 T_k=5', step:
        assert '[KVDBG][Attn L1] ' + line in lines
    assert not any('!!!' in line for line in lines)
    monkeypatch.delenv('KV_DEBUG')
    engine.generate([[1, 2, 3]], 1)
    assert capsys.readouterr().err == ''


@pytest.mark.parametrize('value', [None, '0', '', '1'])
def test_same_tokens_and_same_state_dict_and_silent_when_off(monkeypatch, capsys, value):
    monkeypatch.delenv('KV_DEBUG', raising=False)
    if value is not None:
        monkeypatch.setenv('KV_DEBUG', value)
    plain, traced = pair()
    assert list(plain.state_dict()) == list(traced.state_dict())
    for use_cache in (False, True):
        outputs = []
        for model in (plain, traced):
            torch.manual_seed(1)
            outputs.append(model.generate(IDX, 130, use_cache=use_cache))
        assert torch.equal(*outputs)
    assert bool(capsys.readouterr().err) == (value == '1')


def test_long_prompts_and_batches_stay_readable(traced, capsys):
    traced.generate(torch.randint(65, (8, 128)), 2, use_cache=True)
    err = capsys.readouterr().err
    assert 'pos[0]=0 pos[-1]=127' in err and 'cache_full=True idx_cond.shape=(8, 128)' in err
    assert max(map(len, err.splitlines())) < 130 and '!!!' not in err


def test_an_error_stays_the_same_error(traced):
    for model in (*pair(), traced):
        _, _, cache = model(IDX)
        with pytest.raises(ValueError, match='cache_pos is 6 in layer 0 but 3 in layer 1'):
            model(IDX[:, :1], kv_cache=[cache[0], cache[1]._replace(cache_pos=3)])
        with pytest.raises(ValueError, match='0 layers'):
            model(IDX, kv_cache=[])


def test_alarm_nan_in_keys(traced, capsys):
    with torch.no_grad():
        traced.transformer.h[1].attn.c_attn.weight[16:32] = float('nan')
    traced(IDX)
    assert any('[Attn L1]' in line and 'NaN in the keys' in line for line in alarms(capsys))


def test_alarm_cache_recreated_in_the_middle(traced, capsys, monkeypatch):
    def forgetful(self, idx, kv_cache, use_cache):  # as caches that grow by torch.cat do
        logits, _, kv_cache = pair()[0](idx, kv_cache=kv_cache, use_cache=True)
        return logits, [layer.clone() for layer in kv_cache]
    with monkeypatch.context() as patch:
        patch.setattr('model.GPT.step', forgetful)
        traced.generate(IDX, 3, use_cache=True)
    assert [line.split('at ')[1] for line in alarms(capsys) if 're-created' in line] == ['step 1', 'step 2']
    traced.generate(IDX, 3, use_cache=True)
    assert not alarms(capsys)


@pytest.mark.parametrize('layer', ['first', '2', '99'])
def test_layer_must_be_one_of_the_model(traced, monkeypatch, layer):
    monkeypatch.setenv('KV_DEBUG_LAYER', layer)
    with pytest.raises(ValueError, match=f'KV_DEBUG_LAYER must be .*{layer}'):
        traced.generate(IDX, 1, use_cache=True)


def test_another_attention_is_not_traced(monkeypatch):
    class Other(plain_model.Block):
        def __init__(self, config):
            super().__init__(config)
            self.attn = torch.nn.Identity()
    monkeypatch.setattr(plain_model, 'Block', Other)
    with pytest.raises(ValueError, match='the model has Identity in its place: leave KV_DEBUG out'):
        debug_kv_model.GPT(debug_kv_model.GPTConfig(**CONFIG))
