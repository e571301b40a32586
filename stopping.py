"""How a training run is asked to stop: by a signal, or because nobody reads its output any more."""
import os
import signal
import sys

import torch
import torch.distributed as dist

import configurator


class StopRequest:
    """
    Ctrl-C or SIGTERM. The first one sets `asked`, and the loop stops where it can save; the second ends the process.

    A SIGINT that is ignored when the process starts stays ignored, as shells want it of background jobs.
    """

    def __init__(self):
        self.asked = False
        signal.signal(signal.SIGTERM, self.ask)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self.ask)

    def ask(self, signum, frame):
        if self.asked:
            os._exit(128 + signum)
        self.asked = True
        if configurator.rank() == 0:
            name = signal.Signals(signum).name
            print(f"\n{name}: stopping after this iteration (again to stop at once)", file=sys.stderr, flush=True)

    def agreed(self, world, dev):
        """Was any process asked? All learn of it at the same iteration, or one would wait for gradients for ever."""
        if world > 1:
            asked = torch.tensor(float(self.asked), device=dev)
            dist.all_reduce(asked, dist.ReduceOp.MAX)
            self.asked = bool(asked)
        return self.asked


class Output:
    """
    The lines of a run: on stdout, above the progress bar where there is one.

    Once the reader of stdout has left, the run is asked to stop, and the lines go to stderr.
    """

    def __init__(self, stop):
        self.stop, self.stream, self.bar = stop, sys.stdout, None

    def say(self, text):
        if self.stream is sys.stdout:
            try:
                self.print(text)
                return
            except BrokenPipeError:
                configurator.silence(sys.stdout)
                self.stop.asked, self.stream = True, sys.stderr
                text = "nobody reads the output any more: stopping after this iteration"
        try:
            self.print(text)
        except BrokenPipeError:  # stderr had the same reader: what is left to do is to save
            configurator.silence(sys.stderr)

    def print(self, text):
        if self.bar is None or self.bar.disable:
            print(text, file=self.stream, flush=True)
        else:
            with self.bar.external_write_mode():
                print(text, file=self.stream, flush=True)
