"""How a training run is asked to stop: by Ctrl-C or SIGTERM."""
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import configurator

FORWARDING = 2.0  # seconds within which a signal that torchrun forwards arrives


class StopRequest:
    """
    Ctrl-C or SIGTERM. The first one sets `asked`, and the loop stops where it can save. The second one ends the
    process.

    torchrun forwards the signals that it gets to its workers. Where a terminal or a job scheduler sends a signal to
    torchrun and to its workers, each worker gets it twice. So under torchrun the same signal within FORWARDING seconds
    of the first one is taken for a copy and ignored.

    A SIGINT that is ignored when the process starts stays ignored: shells start background jobs that way.
    """

    def __init__(self):
        self.asked, self.first, self.under_torchrun = False, None, 'RANK' in os.environ
        signal.signal(signal.SIGTERM, self.ask)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self.ask)

    def ask(self, signum, frame):
        """The signal handler."""
        now = time.monotonic()
        if self.first:
            first_signum, first_time = self.first
            if self.under_torchrun and signum == first_signum and now - first_time < FORWARDING:
                return
            os._exit(128 + signum)
        self.asked, self.first = True, (signum, now)
        if configurator.rank() == 0:
            name = signal.Signals(signum).name
            print(f"\n{name}: stopping after this iteration (again to stop at once)", file=sys.stderr, flush=True)

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
