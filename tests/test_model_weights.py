"""The weights and modules of model.py: names, initial values, the optimizer, other files, and changes by others."""
import math

import pytest
import torch
from test_model import tiny

from model import GPT, GPTConfig


def test_state_dict_is_nanogpts():
    keys = set(tiny(n_layer=1).state_dict())
    block = [f'transformer.h.0.{part}.{kind}' for kind in ('weight', 'bias')
             for part in ('ln_1', 'attn.c_attn', 'attn.c_proj', 'ln_2', 'mlp.c_fc', 'mlp.c_proj')]
    others = ('wte.weight', 'wpe.weight', 'ln_f.weight', 'ln_f.bias')
    assert keys == {'lm_head.weight', *(f'transformer.{name}' for name in others), *block}
    assert not any(k.endswith('.bias') for k in tiny(bias=False).state_dict())
    model = tiny()
    assert model.lm_head.weight is model.transformer.wte.weight


def test_initialisation_is_nanogpts():
    model = GPT(GPTConfig(block_size=64, vocab_size=500, n_layer=8, n_head=4, n_embd=128))
    for name, p in model.named_parameters():
        if name.endswith('bias'):
            assert not p.any(), name
        elif 'ln_' in name:
            assert (p == 1).all(), name
        else:
            std = 0.02 / math.sqrt(16) if name.endswith('c_proj.weight') else 0.02
            assert abs(p.std().item() / std - 1) < 0.05 and abs(p.mean().item()) < std / 10, name


def test_the_same_seed_draws_nanogpts_initial_weights():
    """nanoGPT builds wte, wpe, the blocks and lm_head in torch's default way, then fills them in that order."""
    torch.manual_seed(3)
    shapes = [(31, 16), (16, 16), (48, 16), (16, 16), (64, 16), (16, 64), (31, 16)]
    for module, *size in ((torch.nn.Embedding, 31, 16), (torch.nn.Embedding, 16, 16), (torch.nn.Linear, 16, 48),
                          (torch.nn.Linear, 16, 16), (torch.nn.Linear, 16, 64), (torch.nn.Linear, 64, 16)):
        module(*size)
    torch.nn.Linear(16, 31, bias=False)
    drawn = [torch.empty(s).normal_(0, 0.02) for s in shapes]
    model = tiny(3, n_layer=1)
    assert torch.equal(model.transformer.wpe.weight, drawn[1])
    assert torch.equal(model.transformer.h[0].attn.c_attn.weight, drawn[2])
    assert torch.equal(model.transformer.h[0].mlp.c_fc.weight, drawn[4])
    assert torch.equal(model.lm_head.weight, drawn[6])


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


def test_hooks_fire_in_every_module():
    model, seen = tiny().eval(), []
    lists = torch.nn.ModuleDict, torch.nn.ModuleList
    modules = {name: m for name, m in model.named_modules() if not isinstance(m, (GPT, *lists))}
    for name, module in modules.items():
        module.register_forward_hook(lambda m, args, out, name=name: seen.append(name))
        module.register_forward_pre_hook(lambda m, args: None)
    model(torch.randint(31, (1, 4)))
    assert sorted(seen) == sorted(modules)
    compiled = []
    model.transformer.h[1].mlp._compiled_call_impl = lambda x: compiled.append(x) or x  # what Module.compile() sets
    model(torch.randint(31, (1, 4)))
    assert len(compiled) == 1
    model.transformer.h[1].mlp._compiled_call_impl = None
    grads = []
    model.transformer.h[0].attn.c_proj.register_full_backward_hook(lambda m, gi, go: grads.append(go[0].shape))
    idx = torch.randint(31, (1, 4))
    model(idx, idx)[1].backward()
    assert grads == [(1, 4, 16)]


def test_modules_changed_by_others_go_the_usual_way():
    from torch.nn.utils import parametrizations, prune
    model, idx = tiny().eval(), torch.randint(31, (1, 4))
    before = model(idx)[0]
    prune.l1_unstructured(model.transformer.h[0].mlp.c_fc, 'weight', 0.5)
    pruned = model(idx)[0]
    assert not torch.equal(before, pruned)
    parametrizations.weight_norm(model.transformer.h[1].attn.c_proj)
    torch.testing.assert_close(model(idx)[0], pruned)
    model.transformer.h[2].attn.c_attn = torch.nn.Sequential(model.transformer.h[2].attn.c_attn)  # as LoRA wraps it
    torch.testing.assert_close(model(idx)[0], pruned)
    assert type(model.transformer.h[0].attn.c_attn) is torch.nn.Linear  # so that quantisers find it
