"""The weights and modules of model.py: names, initial values, the optimizer, other files, and changes by others."""
import math

import pytest
import torch
from test_model import tiny

from model import GPT


def test_state_dict_is_nanogpts():
    keys = set(tiny(n_layer=1).state_dict())
    block = [f'transformer.h.0.{part}.{kind}' for kind in ('weight', 'bias')
             for part in ('ln_1', 'attn.c_attn', 'attn.c_proj', 'ln_2', 'mlp.c_fc', 'mlp.c_proj')]
    others = ('wte.weight', 'wpe.weight', 'ln_f.weight', 'ln_f.bias')
    assert keys == {'lm_head.weight', *(f'transformer.{name}' for name in others), *block}
    assert not any(k.endswith('.bias') for k in tiny(bias=False).state_dict())
    model = tiny()
    assert model.lm_head.weight is model.transformer.wte.weight


def test_the_same_seed_draws_nanogpts_initial_weights():
    """
    nanoGPT builds wte, wpe, the blocks and lm_head in torch's default way, then fills them in that order, and then
    draws each c_proj again, with a deviation that is smaller the more layers there are.
    """
    torch.manual_seed(3)
    block = (48, 16), (16, 16), (64, 16), (16, 64)
    shapes = [(31, 16), (16, 16), *block, *block, (31, 16)]
    for i, (rows, columns) in enumerate(shapes):
        torch.nn.Embedding(rows, columns) if i < 2 else torch.nn.Linear(columns, rows, bias=i < len(shapes) - 1)
    drawn = [torch.empty(shape).normal_(0, 0.02) for shape in shapes]
    for i in (3, 5, 7, 9):
        drawn[i].normal_(0, 0.02 / math.sqrt(2 * 2))
    drawn[0] = drawn[-1]  # one matrix
    weights = tiny(3, n_layer=2).state_dict()
    matrices = [w for w in weights.values() if w.dim() == 2]
    assert all(torch.equal(w, expected) for w, expected in zip(matrices, drawn, strict=True))
    assert all((w == float(name.endswith('weight'))).all() for name, w in weights.items() if w.dim() == 1)


def test_parameter_count_and_cropping():
    model = tiny()
    n = sum(p.numel() for p in model.parameters())
    assert model.get_num_params(non_embedding=False) == n and model.get_num_params() == n - 16 * 16
    idx = torch.randint(31, (1, 10))
    before = model.eval()(idx)[0]
    model.crop_block_size(10)
    assert torch.equal(model(idx)[0], before) and model(idx)[2][0].k_cache.shape[2] == 10
    with pytest.raises(ValueError, match='11'):
        model(torch.randint(31, (1, 11)))


def test_optimizer_decays_matrices_only_and_is_fused():
    model = tiny()
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu')
    decay, no_decay = optimizer.param_groups
    assert decay['weight_decay'] == 0.1 and all(p.dim() >= 2 for p in decay['params'])
    assert no_decay['weight_decay'] == 0.0 and all(p.dim() < 2 for p in no_decay['params'])
    assert len(decay['params']) + len(no_decay['params']) == len(list(model.parameters())) and decay['fused']


def test_mfu_counts_flops_as_palm_does():
    model = tiny()
    by_hand = (6 * model.get_num_params() + 12 * 3 * 2 * 8 * 16) * 16 * 5 / 2.0 / 1e9
    assert model.estimate_mfu(5, 2.0, peak_flops=1e9) == pytest.approx(by_hand)
    assert model.estimate_mfu(5, 2.0, None) is None


def test_each_module_is_called_and_is_one_of_torchs():
    """So hooks fire, what others put in the place of a module is run, as by LoRA, and quantisers find the linears."""
    model, seen = tiny().eval(), []
    containers = GPT, torch.nn.ModuleDict, torch.nn.ModuleList
    modules = {name: m for name, m in model.named_modules() if not isinstance(m, containers)}
    for name, module in modules.items():
        module.register_forward_hook(lambda m, args, out, name=name: seen.append(name))
    model(torch.randint(31, (1, 4)))
    assert sorted(seen) == sorted(modules)
    assert {type(m) for name, m in modules.items() if 'c_' in name} == {torch.nn.Linear}
