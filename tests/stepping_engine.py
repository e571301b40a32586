"""A real engine on a small model, which makes so many steps as a test allows."""
import threading
import time

import torch
from fake_engine import CHARS, SERVED

from model import GPT, GPTConfig
from serving.api import Served
from serving.engine import Engine


class Stepping(Engine):
    """An engine that makes so many steps as are allowed, or all."""

    def __init__(self, *args):
        super().__init__(*args)
        self.n_allowed, self.steps = float('inf'), threading.Condition()

    def allow(self, n):
        with self.steps:
            self.n_allowed = n
            self.steps.notify_all()

    def until(self, condition):
        """Wait until the condition holds."""
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(.005)

    def run_once(self):
        with self.steps:
            self.receive()
            if self.scheduler.running or self.scheduler.waiting:
                self.steps.wait_for(lambda: self.n_allowed > 0 or self.inbox or self.stopping, .05)
                if self.n_allowed <= 0:
                    self.snapshot = self.snapshots.take()
                    return True
                self.n_allowed -= 1
        return super().run_once()


def tiny_engine():
    """(the engine, started; what it serves): a model with the tokens of fake_engine.py, 96 blocks of 4 tokens."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=256, vocab_size=len(CHARS), n_layer=1, n_head=2, n_embd=16))
    engine = Stepping(model, None, SERVED.token_bytes, None, 96, 4)
    engine.start()
    return engine, Served('tiny', SERVED.tokenizer, SERVED.token_bytes, 256)
