"""
The two files of a training run in its out_dir.

    ckpt.pt        as nanoGPT writes it: the best model so far, or with always_save_checkpoint the one evaluated last
    ckpt_last.pt   where the run has stopped, if that is not in ckpt.pt

A resumed run goes on from the one that is further along.
"""
import glob
import os
import time

import torch
import torch.distributed as dist

import checkpoint as checkpoints
from training.parallel import whole
from whole_file import lock_folder

FILES = 'ckpt.pt', 'ckpt_last.pt'


class Checkpointer:
    """
    Saves a run. The first evaluation of this run that saves replaces the files of an earlier run in out_dir.

    resume: whether the files in out_dir, if any, belong to this run; writes: whether this process writes files. If it
    does, out_dir is locked, now if it exists and otherwise by `take_folder`; a second run in it is refused.
    """

    def __init__(self, out_dir, resume, writes):
        self.out_dir, self.writes, self.lock = out_dir, writes, None
        self.best, self.last = (os.path.join(out_dir, name) for name in FILES)
        self.of_earlier_run = None if resume else file_at(self.best)
        self.saved = None, ''  # in each process, the iteration of the newest `save`, and what it returned
        if writes and os.path.isdir(out_dir):
            self.take_folder()

    def take_folder(self):
        """Make and lock out_dir, if that was not done before. ValueError if another process has locked it."""
        os.makedirs(self.out_dir, exist_ok=True)
        self.lock = self.lock or lock_folder(self.out_dir)
        for name in (*FILES, 'log.csv', 'loss.png'):
            path = os.path.join(self.out_dir, name)
            for leftover in glob.glob(glob.escape(path) + '.*.tmp'):  # of a run that was killed while it saved
                os.remove(leftover)

    def track(self, model, optimizer, scaler, config, tokenizer_state, began, first_iter):
        """
        Store what every checkpoint is made from. began: when the run began, by time.monotonic, as if it had had no
        pauses. first_iter: the iteration with which this process begins; its state has been saved already.
        """
        self.began, self.first_iter = began, first_iter
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.config, self.tokenizer_state = config, tokenizer_state

    def state(self, iter_num, best_val_loss):
        """The contents of a checkpoint. All processes call this for a sharded model, and process 0 gets them."""
        weights, optimizer = whole(self.model.state_dict()), self.optimizer.state_dict()
        if self.model.config.tied:
            weights['lm_head.weight'] = weights['transformer.wte.weight']  # gathered twice, written once
        return {
            'model': weights,
            'optimizer': optimizer | {'state': {number: whole(each) for number, each in optimizer['state'].items()}},
            'model_args': checkpoints.model_args(self.model.config),
            'iter_num': iter_num, 'best_val_loss': best_val_loss,
            'config': dict(self.config), 'tokenizer': self.tokenizer_state, 'scaler': self.scaler.state_dict(),
            # of GPUs only where this process has used one: asking would start them
            'rng': {'torch': torch.get_rng_state(),
                    'cuda': torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []},
            'seconds': time.monotonic() - self.began,
            # torchrun gives each of several processes one thread, and a later run of one process should not keep that
            **({} if dist.is_initialized() else {'threads': torch.get_num_threads()}),
        }

    def save(self, iter_num, best_val_loss, best):
        """
        Save the run to ckpt.pt if it is the `best` model or if there is no ckpt.pt, else to ckpt_last.pt. All processes
        call this for a sharded model. FloatingPointError if the weights are not finite.

        Returns what was done, in words. Where ckpt.pt is of an earlier run, nothing but the best model is saved.
        """
        self.saved = iter_num, self.write(self.state(iter_num, best_val_loss), best)
        return self.saved[1]

    def write(self, state, best):
        """`save`, of what all processes have gathered."""
        if not self.writes:
            return "saved by process 0"
        if not all(w.isfinite().all() for w in state['model'].values()):
            raise FloatingPointError("the weights are not finite and were not saved")
        if not best and self.is_of_earlier_run():
            return f"not saved: {self.best} is of an earlier run"
        path = self.best if best or not os.path.exists(self.best) else self.last
        checkpoints.save(state, path)
        if path == self.best and os.path.exists(self.last):
            os.remove(self.last)
        return f"saved to {path}"

    def is_of_earlier_run(self):
        """Is there a ckpt.pt that this run has neither read nor written, in any of its processes?"""
        return self.of_earlier_run is not None and file_at(self.best) == self.of_earlier_run

    def stop(self, log, iter_num, best_val_loss):
        """Save the state of a run that was asked to stop, unless an evaluation has just saved it, and say where."""
        log.bar.close()
        if iter_num == self.first_iter:
            log.say(f"stopped at iteration {iter_num}, before an iteration was done: there is nothing to save")
            return
        done = self.saved[1] if self.saved[0] == iter_num else self.save(iter_num, best_val_loss, best=False)
        advice = "use another --out_dir" if self.is_of_earlier_run() else "to go on, add --init_from=resume"
        log.say(f"stopped at iteration {iter_num}, {done}; {advice}")
        log.save_picture(last=True)

    def last_good(self):
        """A text that names the last good checkpoint of this run."""
        if not os.path.exists(self.best) or self.is_of_earlier_run():
            return "this run has saved no checkpoint yet"
        path = self.last if os.path.exists(self.last) else self.best
        return f"the last good checkpoint is {path}: to go on from it, add --init_from=resume"


def file_at(path):
    """What tells the file at path from one that has replaced it: the time of its last write, and its inode."""
    if not os.path.exists(path):
        return None
    of_file = os.stat(path)
    return of_file.st_mtime_ns, of_file.st_ino
