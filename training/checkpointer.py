"""The checkpoints of a training run in its out_dir: which file is saved, and what a resumed run takes from it."""
import glob
import os

import torch
import torch.distributed as dist

import checkpoint as checkpoints
from tokenizer import read_text
from training.parallel import n_restarts, run_name
from whole_file import lock_folder, replacing

INTERRUPTED = 'ckpt_interrupted.pt'
RUN = '.torchrun'  # in out_dir: the `run_name` of the run that saved the checkpoint there
# what the weights were trained with; block_size may be cropped, and dropout is free
SHAPE = ('n_layer', 'n_head', 'n_embd', 'bias', 'position', 'rope_theta', 'n_kv_head', 'window', 'n_sink', 'gelu',
         'norm', 'norm_eps', 'mlp', 'n_inner', 'head_dim', 'tied', 'qkv_bias', 'qk_norm', 'rope_scaling')


class Checkpointer:
    """
    Saves a run to out_dir/ckpt.pt. The state of an interrupted run goes to ckpt_interrupted.pt beside it where ckpt.pt
    holds a better model, or the model of another run.

    resume: whether the ckpt.pt that is in out_dir, if any, belongs to this run; writes: whether this process saves at
    all. If it does, out_dir is locked, now if it exists and otherwise by `take_folder`; a second run in it is refused.

    A subclass may keep checkpoints of another form, and save in all processes at once. It defines `names`, `saves`,
    `agreed`, `exists`, `write`, `remove` and `remove_leftovers`.
    """
    names = 'ckpt.pt', INTERRUPTED

    def __init__(self, out_dir, resume, writes):
        self.out_dir, self.ckpt_is_ours, self.writes, self.lock = out_dir, resume, writes, None
        self.path, self.interrupted = (os.path.join(out_dir, name) for name in self.names)
        self.run_name, self.run_file = run_name(), os.path.join(out_dir, RUN)
        if writes and os.path.isdir(out_dir):
            self.take_folder()

    def take_folder(self):
        """Make and lock out_dir, if that was not done before. ValueError if another process has locked it."""
        os.makedirs(self.out_dir, exist_ok=True)
        self.lock = self.lock or lock_folder(self.out_dir)
        for path in self.path, self.interrupted:
            self.remove_leftovers(path)
        if n_restarts() == 0 and os.path.exists(self.run_file):
            os.remove(self.run_file)

    def track(self, model, optimizer, scaler, config, tokenizer_state):
        """Store the objects that every checkpoint is made from."""
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.config, self.tokenizer_state = config, tokenizer_state

    def contents(self, iter_num, best_val_loss):
        """What is saved besides tensors."""
        return {
            'model_args': checkpoints.model_args(self.model.config),
            'iter_num': iter_num, 'best_val_loss': best_val_loss,
            'config': dict(self.config), 'tokenizer': self.tokenizer_state, 'scaler': self.scaler.state_dict(),
        }

    @property
    def saves(self):
        """Does this process take part in saving?"""
        return self.writes

    def agreed(self, value):
        """One value for all processes that save, each of which may have seen another."""
        return value

    def exists(self, path):
        """Is there a checkpoint at path?"""
        return os.path.exists(path)

    def write(self, path, iter_num, best_val_loss):
        """Save the state of the run to path. FloatingPointError if the weights are not finite."""
        if not all(p.isfinite().all() for p in self.model.parameters()):
            raise FloatingPointError("the weights are not finite and were not saved")
        checkpoints.save({
            'model': self.model.state_dict(), 'optimizer': self.optimizer.state_dict(),
            **self.contents(iter_num, best_val_loss),
            'rng': {'torch': torch.get_rng_state(), 'cuda': cuda_rng_states()},
            # torchrun gives each of several processes one thread, and a later run of one process should not keep that
            **({} if dist.is_initialized() else {'threads': torch.get_num_threads()}),
        }, path)

    def remove(self, path):
        """Remove the checkpoint at path, if there is one."""
        if os.path.exists(path):
            os.remove(path)

    def remove_leftovers(self, path):
        """Remove what a run left that was killed while it saved to path."""
        for leftover in glob.glob(glob.escape(path) + '.*.tmp'):
            os.remove(leftover)

    def save(self, iter_num, best_val_loss):
        """Save to ckpt.pt, and return its path."""
        self.write(self.path, iter_num, best_val_loss)
        if self.run_name and not self.ckpt_is_ours and self.writes:
            with replacing(self.run_file, 'w', encoding='utf-8') as f:
                f.write(self.run_name)
        self.ckpt_is_ours = True
        self.remove(self.interrupted)  # it is older, or belongs to a run whose ckpt.pt was just replaced
        return self.path

    def save_interrupted(self, log, iter_num, best_val_loss, first_iter, replace):
        """
        Save the state of a run that was asked to stop, if this process saves at all, and say where: in ckpt.pt if
        there is none, or if ckpt.pt belongs to this run and may be replaced; else in ckpt_interrupted.pt. If both are
        of earlier runs, nothing is saved.
        """
        if not self.saves:
            return
        if log.bar is not None:
            log.bar.close()
        if iter_num == first_iter:
            log.say(f"stopped at iteration {iter_num}, before an iteration was done: there is nothing to save")
            return
        if not self.agreed(self.exists(self.path)) or self.ckpt_is_ours and replace:
            text = f"saved to {self.save(iter_num, best_val_loss)}; to go on, add --init_from=resume"
        elif self.agreed(self.has_no_place()):
            text = f"not saved: {self.path} and {self.interrupted} are of earlier runs; use another --out_dir"
        else:
            self.write(self.interrupted, iter_num, best_val_loss)
            text = f"saved to {self.interrupted}; to go on, "
            if not self.ckpt_is_ours:
                text += (f"first move it over {self.path}, which is of an earlier run and must be removed before that, "
                         "and ")
            text += "add --init_from=resume"
        log.say(f"stopped at iteration {iter_num}, {text}")
        log.save_picture(last=True)

    def has_no_place(self):
        """Are both files of earlier runs? Then an interruption saves nothing until this run replaces ckpt.pt."""
        return not self.ckpt_is_ours and self.exists(self.path) and self.exists(self.interrupted)

    def last_good(self):
        """A text that names the last good checkpoint of this run, found without the other processes."""
        if (self.ckpt_is_ours or self.has_saved()) and self.exists(self.path):
            newest = self.interrupted if self.exists(self.interrupted) else self.path
            return f"the last good checkpoint is {newest}: to go on from it, add --init_from=resume"
        return "this run has saved no checkpoint yet"

    def has_saved(self):
        """Is the checkpoint in out_dir of this run of several processes? (Saved by process 0, or before a restart.)"""
        return os.path.exists(self.run_file) and read_text(self.run_file) == self.run_name


def cuda_rng_states():
    """The state of each GPU's generator; none if this process has not used a GPU, which asking would start."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def load_furthest(out_dir, device):
    """(checkpoint, path): ckpt.pt, or ckpt_interrupted.pt if that is further along. ValueError without a ckpt.pt."""
    path, interrupted = os.path.join(out_dir, 'ckpt.pt'), os.path.join(out_dir, INTERRUPTED)
    loaded = checkpoints.load(path, device)
    if os.path.exists(interrupted):
        other = checkpoints.load(interrupted, device)
        if other.get('iter_num', 0) > loaded.get('iter_num', 0):
            return other, interrupted
    return loaded, path


def settle_shape(config, model_config, source, say):
    """
    Put the model's shape into the settings. Where a config file or the command line asks for another shape, say that
    this has no effect.

    config: the Settings of the run; source: where the weights come from; say: prints a line.
    """
    c = model_config
    of_zero = dict(n_kv_head=c.n_head, head_dim=c.n_embd // c.n_head, n_inner=4 * c.n_embd)  # what 0 means
    for name in SHAPE:
        fixed, asked = getattr(c, name), config[name] or of_zero.get(name, config[name])
        if name in config.given and asked != fixed:
            say(f"{name} stays {fixed}, as in the weights of {source}: {name}={config[name]} ({config.given[name]}) "
                "has no effect")
        config[name] = fixed


def optimizer_of(checkpoint, path='the checkpoint'):
    """The optimizer whose state a checkpoint has: adamw or muon. ValueError if it has no such state."""
    if 'optimizer' not in checkpoint:
        raise ValueError(f"{path} has no optimizer state, so it cannot be resumed: use a ckpt.pt that train.py has "
                         "written")
    return checkpoint.get('config', {}).get('optimizer', 'adamw')


def resume_optimizer(config, optimizer, scaler, resumed, say):
    """
    Load the checkpoint's moments and loss scale. Weight decays and the betas are the checkpoint's, unless a config file
    or the command line gives them. ValueError if the checkpoint does not fit the optimizer.
    """
    before = optimizer_of(resumed)
    if before != config['optimizer']:
        raise ValueError(f"optimizer is {config['optimizer']}, but the run before had {before}: resume it with "
                         f"--optimizer={before}")
    checkpoints.restore_optimizer(optimizer, resumed['optimizer'])
    if resumed.get('scaler'):
        try:
            scaler.load_state_dict(resumed['scaler'])
        except (RuntimeError, KeyError, TypeError) as e:
            raise ValueError(f"the checkpoint's scaler state cannot be loaded ({e}): use another copy") from e
    adamw = [group for group in optimizer.param_groups if 'betas' in group]
    muon = [group for group in optimizer.param_groups if 'momentum' in group]
    saved = dict(zip(('weight_decay', 'beta1', 'beta2'), (adamw[0]['weight_decay'], *adamw[0]['betas'])))
    if muon:
        saved['muon_weight_decay'] = muon[0]['weight_decay']
    for name in saved:
        if name not in config.given:
            config[name] = saved[name]
        elif config[name] != saved[name]:
            say(f"{name} is {config[name]} from here on ({config.given[name]}); the run before had {saved[name]}")
    adamw[0]['weight_decay'] = config['weight_decay']
    for group in adamw:
        group['betas'] = config['beta1'], config['beta2']
    for group in muon:
        group['weight_decay'] = config['muon_weight_decay']


def restore_rng(rng):
    """
    Set torch's generators to the states in a checkpoint, if it has some. ValueError if they are not states of these
    generators.
    """
    if rng is None:
        return
    try:
        torch.set_rng_state(rng['torch'].cpu())
        if len(rng['cuda']) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([state.cpu() for state in rng['cuda']])
    except (RuntimeError, TypeError, KeyError, AttributeError) as e:
        raise ValueError(f"the checkpoint's rng is no state of torch's generator ({e}): use another copy") from e
