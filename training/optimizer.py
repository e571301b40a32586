"""The optimizer of a run: AdamW, or Muon for the hidden matrices and AdamW for the rest."""
import math

import torch

import configurator


class MuonAdamW(torch.optim.Optimizer):
    """
    Muon for hidden matrices and `torch.optim.AdamW` for all other parameters, in one optimizer: one list of groups and
    one state dict. AdamW's groups come first. A group has `momentum` if it is of `torch.optim.Muon`, else `betas`.

    Muon: Jordan and others, https://kellerjordan.github.io/posts/muon, and muon.py of github.com/KellerJordan/Muon. It
    adds up gradients with momentum, and moves a matrix by the orthogonal matrix nearest to the sum, times
    lr * sqrt(max(1, rows / columns)): every direction moves alike. At scale: arXiv:2502.16982.

    hidden: Muon's groups, dicts of params, lr and weight_decay; all params are matrices, else ValueError.
    others: AdamW's groups; betas: of AdamW.
    """

    def __init__(self, hidden, others, betas, fused):
        self.adamw = torch.optim.AdamW(others, betas=betas, fused=fused)
        super().__init__([*self.adamw.param_groups, *torch.optim.Muon(hidden).param_groups], {})
        self.share()

    def share(self):
        """Let AdamW work on its groups and on the state of this optimizer."""
        self.adamw.state = self.state
        self.adamw.param_groups = [group for group in self.param_groups if 'betas' in group]

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)  # makes new groups and a new state
        self.share()

    @torch.no_grad()
    def step(self, closure=None):
        self.adamw.step()
        for group in [group for group in self.param_groups if 'momentum' in group]:
            momentum, lr, of_shape = group['momentum'], group['lr'], {}
            for p in [p for p in group['params'] if p.grad is not None]:
                if p not in self.state:
                    self.state[p] = dict(momentum_buffer=torch.zeros_like(p.grad))
                sums = self.state[p]['momentum_buffer'].lerp_(p.grad, 1 - momentum)
                of_shape.setdefault(p.shape, []).append((p, p.grad.lerp(sums, momentum)))
            for pairs in of_shape.values():  # all products of one shape are one call
                matrices, sums = zip(*pairs)
                directions = orthogonal(torch.stack(sums), group['ns_coefficients'], group['ns_steps'])
                for p, direction in zip(matrices, directions):
                    p.mul_(1 - lr * group['weight_decay'])
                    p.add_(direction, alpha=-lr * math.sqrt(max(1, p.size(0) / p.size(1))))


def orthogonal(matrices, coefficients, n_steps):
    """
    The orthogonal matrices nearest to `matrices` (n, rows, columns), approximately, by the Newton-Schulz iteration with
    Muon's coefficients. It stays in float32 on a CPU. torch's own function computes in bfloat16 on every device, which
    takes four times as long on a CPU without instructions for it.
    """
    a, b, c = coefficients
    x = matrices if matrices.is_cpu else matrices.bfloat16()
    is_high = x.size(1) > x.size(2)
    x = x.mT if is_high else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(n_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_high else x


def check_optimizer(settings):
    """ValueError unless the settings of train.py about the optimizer and its learning rates make sense."""
    for name, known in (('optimizer', ('adamw', 'muon')), ('lr_schedule', ('cosine', 'wsd'))):
        if settings[name] not in known:
            raise ValueError(f"{name} must be {' or '.join(known)}, not {settings[name]!r}")
    configurator.check_range(settings, 0, math.inf, 'muon_lr', 'muon_weight_decay', 'warmup_iters')
    wsd = settings['decay_lr'] and settings['lr_schedule'] == 'wsd'
    configurator.check_range(settings, 1 if wsd else 0, math.inf, 'lr_decay_iters')
    if wsd and not settings.get('max_minutes') and settings['max_iters'] > settings['lr_decay_iters']:
        raise ValueError(f"lr_schedule=wsd has a learning rate of 0 from lr_decay_iters={settings['lr_decay_iters']} "
                         f"on, and max_iters is {settings['max_iters']}: give --lr_decay_iters={settings['max_iters']}")
    if not 0 < settings['cooldown_frac'] <= 1:
        raise ValueError(f"cooldown_frac must be more than 0 and at most 1, not {settings['cooldown_frac']}")
    if settings['optimizer'] == 'muon' and settings['learning_rate'] == 0:
        raise ValueError("learning_rate must be more than 0 with optimizer=muon: muon_lr goes by the same schedule")
    if settings.get('parallel') == 'fsdp' and settings['optimizer'] == 'muon':
        raise ValueError("optimizer=muon needs whole matrices, and parallel=fsdp divides them: use parallel=ddp, or "
                         "optimizer=adamw")


def make_optimizer(model, kind, settings):
    """
    The optimizer that the settings of train.py describe, for a GPT on a device of this kind ('cpu', 'cuda', ...).
    Muon updates the matrices of the blocks. AdamW updates the other parameters, in the groups of
    `GPT.configure_optimizers`.
    """
    learning_rate, betas = settings['learning_rate'], (settings['beta1'], settings['beta2'])
    adamw = model.configure_optimizers(settings['weight_decay'], learning_rate, betas, kind)
    if settings['optimizer'] == 'adamw':
        return adamw
    hidden = [p for p in model.transformer.h.parameters() if p.requires_grad and p.dim() == 2]
    taken = {id(p) for p in hidden}
    others = [dict(params=[p for p in group['params'] if id(p) not in taken], lr=learning_rate,
                   weight_decay=group['weight_decay']) for group in adamw.param_groups]
    of_muon = dict(params=hidden, lr=settings['muon_lr'], weight_decay=settings['muon_weight_decay'])
    return MuonAdamW([of_muon], others, betas, adamw.defaults['fused'])
