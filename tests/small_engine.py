"""Small engines, what their requests are given, and what each would have had alone."""
import threading
import time

import torch
from toy_kernel import NextLetter, toy_model

from decode.cpu import CPUDecoder
from model import GPT, GPTConfig
from serving.engine import Engine
from serving.request import Request, SamplingParams
from serving.sampler import Drawing, Sampler
from tokenizer import CharTokenizer

V = 29
BYTES = [bytes([97 + i % 26]) for i in range(V)]
CHARS = 'abcdefghijklmnopqrstuvwxyz .€😀\n'  # of engines behind a server
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


def submit(engine, id, prompt, max_tokens=8, seed=0, n=1, **how):
    more = {name: how.pop(name) for name in ('stop', 'cache_salt') if name in how}
    got = Got(Request(id, prompt, max_tokens, SamplingParams(**how), seed, n, **more))
    engine.submit(got.request)
    return got


def run(engine):
    while engine.run_once():
        pass
    assert not engine.live and engine.cache.n_free == engine.cache.n_seq


def finished(engine, *args, **how):
    got = submit(engine, *args, **how)
    run(engine)
    return got


def alone(decoder, request, stop_ids=()):
    """The tokens and log probabilities of each sample by the decoder and its own tuple, a token after the other."""
    sampler, samples = Sampler(decoder.vocab_size), []
    for i in range(request.n):
        drawing, cache, tokens, logprobs = Drawing(request, i, stop_ids, decoder.vocab_size), None, [], []
        for token in request.prompt:
            logits, cache = decoder(torch.tensor([[token]]), cache)
        while len(tokens) < request.max_tokens:
            logits = logits[0].numpy()
            tokens += sampler.draw(logits, [0], [drawing])
            logprobs += sampler.logprobs(logits, tokens[-1:], 5)
            if tokens[-1] in stop_ids:
                break
            logits, cache = decoder(torch.tensor([tokens[-1:]]), cache)
        samples.append((tokens, logprobs))
    return samples


def tokens_alone(decoder, request, stop_ids=()):
    return [tokens for tokens, _ in alone(decoder, request, stop_ids)]


def tiny(n_blocks=16, page_size=4, budget=64, **how):
    torch.manual_seed(1)
    model = GPT(GPTConfig(block_size=64, vocab_size=V, n_layer=2, n_head=2, n_embd=16)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)
    decoder = CPUDecoder(model, threads=1)
    return Engine(model, decoder, BYTES, (), n_blocks, page_size, budget, **how), decoder


class Stepping(Engine):
    """An engine for a server's tests. Its thread makes so many steps as are allowed, or all."""

    def __init__(self, model, decoder=None, n_blocks=96, tokenizer=LETTERS, **how):
        super().__init__(model, decoder, tokenizer.bytes_of_tokens(), tokenizer.end_tokens, n_blocks, 4, **how)
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
            self.receive()
            if self.scheduler.running or self.scheduler.waiting:
                self.steps.wait_for(lambda: self.n_allowed > 0 or self.inbox or self.stopping, .05)
                if self.n_allowed <= 0:
                    self.snapshot = self.snapshots.take()
                    return True
                self.n_allowed -= 1
            return super().run_once()


def spelling_engine(block_size=64, n_allowed=float('inf'), **how):
    """
    An engine, started, that goes on behind the last letter of a prompt in the order of CHARS, see `spelled`. Up to 4
    requests may wait.
    """
    model = toy_model(block_size, len(CHARS))
    engine = Stepping(model, NextLetter(model), **(dict(max_queue=4) | how))
    engine.allow(n_allowed)
    engine.start()
    return engine


def spelled(letter, n):
    """The n characters of CHARS behind a letter."""
    first = CHARS.index(letter) + 1
    return ''.join(CHARS[(first + k) % len(CHARS)] for k in range(n))


def drawing_engine(tokenizer=LETTERS, **how):
    """An engine, started, with a model in PyTorch of random weights."""
    torch.manual_seed(0)
    config = GPTConfig(block_size=256, vocab_size=tokenizer.vocab_size, n_layer=1, n_head=2, n_embd=16)
    engine = Stepping(GPT(config), tokenizer=tokenizer, **how)
    engine.start()
    return engine


def served_by(engine, name='toy', max_tokens=None, tokenizer=LETTERS):
    """What is `Served` by an engine; here because api.py needs pydantic."""
    from serving.api import Served
    return Served(name, tokenizer, tokenizer.bytes_of_tokens(), max_tokens or engine.cache.model.config.block_size)
