"""How a training run is asked to stop: by Ctrl-C or SIGTERM."""
import os
import signal
import sys

import torch
import torch.distributed as dist

import configurator


class StopRequest:
    """
    Ctrl-C or SIGTERM. The first one sets `asked`, and the loop stops where it can save. The second one ends the
    process. Under torchrun it is ignored: torchrun forwards the signals that it gets to its workers, so that each gets
    two of one Ctrl-C in a terminal, and it ends workers that do not stop in time.

    A SIGINT that is ignored when the process starts stays ignored: shells start background jobs that way.
    """

    def __init__(self):
        self.asked = self.signalled = False
        signal.signal(signal.SIGTERM, self.ask)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self.ask)

    def ask(self, signum, frame):
        """The signal handler."""
        under_torchrun = 'TORCHELASTIC_RUN_ID' in os.environ
        if self.signalled:
            if not under_torchrun:
                os._exit(128 + signum)
            return
        self.asked = self.signalled = True  # asked may be true before: the reader of stdout has gone
        if configurator.rank() == 0:
            again = '' if under_torchrun else ' (again to stop at once)'
            print(f"\n{signal.Signals(signum).name}: stopping after this iteration{again}", file=sys.stderr, flush=True)

    def agreed(self, world_size, device):
        """
        Was any process asked to stop? All of them call this in every iteration, and all get the same answer: a process
        that stopped alone would leave the others waiting for its gradients.
        """
        if world_size == 1:
            return self.asked
        asked = torch.tensor(float(self.asked), device=device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        agreed = bool(asked)
        if agreed:  # else a signal that came meanwhile is kept for the next iteration
            self.asked = True
        return agreed
