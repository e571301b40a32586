"""Small engines, what their requests are given, and what each would have had alone."""
import threading
import time

import torch
from tiny_models import drawn_alone
from toy_executor import NextLetter, toy_model

from decode.cpu import CPUExecutor
from decode.draw import SETTING_NAMES, log_probabilities
from engine import Engine, default_pool
from model import GPT, GPTConfig
from serving.engine_thread import EngineThread
from serving.request import Request
from tokenizer import CharTokenizer

V = 29
BYTES = [bytes([97 + i % 26]) for i in range(V)]
CHARS = 'abcdefghijklmnopqrstuvwxyz .€😀\n'  # of engines after a server
LETTERS = CharTokenizer(CHARS)


class Got:
    """What a request was given, sample by sample."""

    def __init__(self, request):
        self.request, request.deliver = request, self.deliver
        self.tokens, self.logprobs = [[] for _ in range(request.n)], [[] for _ in range(request.n)]
        self.text, self.reasons = [''] * request.n, [None] * request.n
        self.first, self.error, self.n_calls = None, None, 0

    def deliver(self, outputs):
        self.first, self.n_calls = self.first or outputs[0], self.n_calls + 1
        for output in outputs:
            self.tokens[output.index] += output.token_ids
            self.logprobs[output.index] += output.logprobs or []
            self.text[output.index] += output.text
            self.reasons[output.index] = output.finish_reason
            self.error = output.error or self.error


def thread_of(model, executor=None, bytes_of=BYTES, end_tokens=(), n_pages=16, page_size=4, budget=64,
              kind=EngineThread, pool=None, **how):
    """An `EngineThread` that is not started: `run` makes its steps."""
    engine = Engine(model, executor, pool or default_pool(model.config, n_pages, page_size), budget)
    return kind(engine, bytes_of, end_tokens, **how)


def request_of(id, prompt, max_tokens=8, seed=0, n=1, **how):
    """A `Request` with settings of its own, and of its draws."""
    of_draw = {name: how.pop(name) for name in (*SETTING_NAMES, 'min_tokens', 'logit_bias') if name in how}
    return Request(id, prompt, max_tokens, seed, n, of_draw, **how)


def submit(thread, id, prompt, max_tokens=8, seed=0, n=1, **how):
    got = Got(request_of(id, prompt, max_tokens, seed, n, **how))
    thread.submit(got.request)
    return got


def run(thread):
    while thread.run_once():
        pass
    assert not thread.live and thread.engine.pool.n_free == thread.engine.pool.n_pages


def finished(thread, *args, **how):
    got = submit(thread, *args, **how)
    run(thread)
    return got


def alone(model, request, stop_ids=()):
    """The tokens of each sample, and (log probability, likeliest tokens) of each: see `drawn_alone`."""
    samples = []
    for i in range(request.n):
        tokens, logits = drawn_alone(model, request.prompt, request.max_tokens, request.seed + i,
                                     {*stop_ids, *request.stop_token_ids}, **request.draw)
        samples.append((tokens, [[found[0] for found in log_probabilities(of_token, [token], 5)[:2]]
                                 for of_token, token in zip(logits, tokens)]))
    return samples


def assert_alone(model, got, stop_ids=()):
    """A request was given the tokens and log probabilities that it has alone, or if it was aborted their beginning."""
    for tokens, logprobs, reason, (expected, scores) in zip(got.tokens, got.logprobs, got.reasons,
                                                            alone(model, got.request, stop_ids)):
        assert tokens == (expected[:len(tokens)] if reason == 'abort' else expected), got.request
        for mine, (logprob, top) in zip(logprobs, scores):
            assert abs(mine.logprob - logprob) < 1e-4, got.request
            assert [token for token, _ in mine.top] == top, got.request


def tiny(n_pages=16, page_size=4, budget=64, **how):
    """(an `EngineThread` on a small model with the compiled step, the model)."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(block_size=64, vocab_size=V, n_layer=2, n_head=2, n_embd=16)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)
    return thread_of(model, CPUExecutor(model, threads=1), n_pages=n_pages, page_size=page_size, budget=budget,
                     **how), model


class Stepping(EngineThread):
    """For a server's tests. The thread makes so many steps as are allowed, or all."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.n_allowed, self.steps = float('inf'), threading.Condition()

    def allow(self, n):
        with self.steps:
            self.n_allowed = n
            self.steps.notify_all()

    def step(self, n=1):
        """Make so many steps, and wait for their end."""
        self.allow(n)
        self.until(lambda: self.n_allowed == 0)
        with self.steps:  # the thread has it during a step
            pass

    def until(self, condition):
        """Wait until the condition holds."""
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(.002)

    def run_once(self):
        with self.steps:
            self.empty_inbox()
            if not (self.engine.is_idle or self.engine.over):
                self.steps.wait_for(lambda: self.n_allowed > 0 or self.inbox or self.stopping, .05)
                if self.n_allowed <= 0:
                    self.snapshot = self.stats.snapshot()
                    return True
                self.n_allowed -= 1
            return super().run_once()


def stepping(model, executor=None, tokenizer=LETTERS, n_pages=96, **how):
    """A `Stepping` with pages of 4."""
    return thread_of(model, executor, tokenizer.bytes_of_tokens(), tokenizer.end_tokens, n_pages, 4, kind=Stepping,
                     **how)


def spelling_engine(block_size=64, n_allowed=float('inf'), **how):
    """A `Stepping`, started, with up to 4 waiting requests, that goes on in the order of CHARS, see `spelled`."""
    model = toy_model(block_size, len(CHARS))
    thread = stepping(model, NextLetter(model), **(dict(max_queue=4) | how))
    thread.allow(n_allowed)
    thread.start()
    return thread


def spelled(letter, n):
    """The n characters of CHARS after a letter."""
    first = CHARS.index(letter) + 1
    return ''.join(CHARS[(first + k) % len(CHARS)] for k in range(n))


def drawing_engine(tokenizer=LETTERS, **how):
    """A `Stepping`, started, with a model in PyTorch of random weights."""
    torch.manual_seed(0)
    config = GPTConfig(block_size=256, vocab_size=tokenizer.vocab_size, n_layer=1, n_head=2, n_embd=16)
    thread = stepping(GPT(config).eval(), tokenizer=tokenizer, **how)
    thread.start()
    return thread


def served_by(thread, name='toy', max_tokens=None, tokenizer=LETTERS):
    """What is `Served` by a thread; here because api.py needs pydantic."""
    from serving.served import Served
    return Served(name, tokenizer, tokenizer.bytes_of_tokens(), max_tokens or thread.engine.model.config.block_size)
