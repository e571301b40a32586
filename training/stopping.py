"""How a training run is asked to stop: by Ctrl-C, by SIGTERM, or by the end of its terminal."""
import os
import signal
import sys
from contextlib import suppress

import torch
import torch.distributed as dist

import configurator


class StopRequest:
    """
    Ctrl-C, SIGTERM, or SIGHUP, which comes when a terminal or a connection has ended. The first signal sets `asked`,
    and the loop stops where it can save. The second signal ends the process, except SIGHUP: a shell sends another one.
    Under torchrun the second one is ignored. Each worker gets a Ctrl-C in a terminal twice, because torchrun forwards
    the signals that it gets, and torchrun ends workers that do not stop in time.

    A SIGINT or SIGHUP that is ignored when the process starts stays ignored: shells start background jobs that way, and
    so does nohup.
    """

    def __init__(self):
        self.asked = self.signalled = False
        signal.signal(signal.SIGTERM, self.ask)
        for number in (signal.SIGINT, getattr(signal, 'SIGHUP', signal.SIGINT)):  # Windows has no SIGHUP
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.ask)

    def ask(self, signum, frame):
        """The signal handler."""
        under_torchrun = 'TORCHELASTIC_RUN_ID' in os.environ
        if self.signalled:
            if not under_torchrun and signal.Signals(signum).name != 'SIGHUP':
                os._exit(128 + signum)
            return
        self.asked = self.signalled = True  # asked may be true before: the reader of stdout has gone
        if configurator.rank() == 0:
            again = '' if under_torchrun else ' (again to stop at once)'
            with suppress(OSError):  # the terminal may be gone
                print(f"\n{signal.Signals(signum).name}: stopping after this iteration{again}", file=sys.stderr,
                      flush=True)

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
