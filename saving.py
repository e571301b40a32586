"""The checkpoints of a training run in its out_dir: what is saved where, and which one a resumed run goes on from."""
import os

import checkpoint as checkpoints

INTERRUPTED = 'ckpt_interrupted.pt'


def load_furthest(out_dir, dev):
    """(checkpoint, path): ckpt.pt, or what an interruption left beside it if that is further along."""
    path, interrupted = os.path.join(out_dir, 'ckpt.pt'), os.path.join(out_dir, INTERRUPTED)
    loaded = checkpoints.load(path, dev)
    if os.path.exists(interrupted):
        other = checkpoints.load(interrupted, dev)
        if other.get('iter_num', 0) > loaded.get('iter_num', 0):
            return other, interrupted
    return loaded, path


class Saver:
    """
    Saves to out_dir/ckpt.pt, or beside it where an interruption would cost a better model, or one of another run.

    own: whether the ckpt.pt that is there, if any, is of this run.
    """

    def __init__(self, out_dir, own):
        self.path, self.interrupted = os.path.join(out_dir, 'ckpt.pt'), os.path.join(out_dir, INTERRUPTED)
        self.own = own

    def save(self, checkpoint):
        """To ckpt.pt. Returns its path."""
        checkpoints.save(checkpoint, self.path)
        self.own = True
        if os.path.exists(self.interrupted):  # it is further back, or of a run whose ckpt.pt is overwritten now
            os.remove(self.interrupted)
        return self.path

    def save_interrupted(self, checkpoint, replace):
        """To ckpt.pt if there is none, or if it is of this run and `replace` allows it. Returns a text for the user."""
        exists = os.path.exists(self.path)
        if not exists or self.own and replace:
            return f"saved to {self.save(checkpoint)}; to go on, add --init_from=resume"
        checkpoints.save(checkpoint, self.interrupted)
        told = f"saved to {self.interrupted}; to go on, add --init_from=resume"
        return told if self.own else f"{told} and first move it over {self.path}, which is of an earlier run"

    def last_good(self):
        if os.path.exists(self.path):
            return f"the last good checkpoint is {self.path}"
        return "there is no checkpoint yet"
